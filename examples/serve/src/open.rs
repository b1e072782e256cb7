//! From a model's files to an engine that answers: memory is divided here.

use std::hash::Hasher;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use outcore::device::HostDevice;
use outcore::machine::MemoryLimit;
use outcore::store::StoreOptions;
use outcore::{Bytes, Error as OutcoreError, ErrorKind, PageSize, Runtime};
use outcore_kv::{ActiveOptions, Extent, KvLayout, KvPool};
use outcore_llm::budget::{Wishes, Working, divide};
use outcore_llm::{
    ChatTemplate, Config, DraftFiles, Error, GenerationDefaults, KvType, Model, ModelFiles, Options, PagedWeights,
    Pool, Result, Tokenizer, paged_kv,
};

use crate::args::Args;
use crate::capture::{self, Capture};
use crate::engine::{Drafter, Engine, Limits, Pooling};
use crate::grammar::{self, Grammars};
use crate::metrics::Metrics;
use crate::places::Places;
use crate::sampling::Defaults;
use crate::slack::{Kept, Slack};
use crate::tenants::Tenants;

/// Sequences are taken to be about so long where the tokens of a block follow from it.
const TYPICAL_CONTEXT: u64 = 256;
/// The fewest pages that `--kv-space` is: where it is small, so are pages, because each answer wastes half of its last
/// blocks.
const KV_PAGES_LEAST: u64 = 32;
/// What that makes smaller is no smaller than this.
const PAGE_LEAST: Bytes = Bytes::kib(64);
/// The largest pages where all weights have room beside what answers may use: only blocks come and go then, and the
/// fewer tokens one has, the more of a prompt is found.
const PAGE_WHERE_WEIGHTS_STAY: Bytes = Bytes::kib(512);
/// Logits may take one part in so many of the memory, where nobody says how many answers are written at a time.
const LOGITS_PART: u64 = 16;
/// The fewest and the most answers at a time, then.
const CONCURRENCY: [u64; 2] = [4, 64];
/// Tokens of prompts in one pass, where memory allows.
const PROMPT_TOKENS: usize = 512;
/// The most drafted tokens of a pass.
const DRAFTS: usize = 32;
/// Answers for which a draft model drafts at a time, at most: where more are written, each pass is worth more already.
const DRAFT_SESSIONS: usize = 8;
/// The last tokens of an answer that a draft model sees.
const DRAFT_WINDOW: usize = 512;
/// What the network takes: threads, buffers of connections.
const NETWORK: Bytes = Bytes::mib(16);
/// Requests may hold one part in so many of the memory.
const REQUESTS_PART: u64 = 64;
/// The least and the most of that, in bytes.
const REQUESTS: [u64; 2] = [16 << 20, 128 << 20];
/// Grammars may take one part in so many of the memory.
const GRAMMARS_PART: u64 = 64;
/// The most of that, in bytes.
const GRAMMARS_MOST: u64 = 1 << 30;
/// Bytes for each token of the vocabulary that choosing one takes: a copy of the logits, the odds, and their order.
const CHOOSING: u64 = 24;
/// Of each row of logits: the product by rows and by vectors.
const LOGITS_COPIES: u64 = 2;

/// Everything that answers.
#[derive(Debug)]
pub struct Opened {
    /// Writes answers.
    pub engine: Engine,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Where pages are.
    pub places: Arc<Places>,
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// The model's own, if it has one.
    pub template: Option<ChatTemplate>,
    /// The longest sequence, in tokens.
    pub context: usize,
    /// Number of tokens there are.
    pub vocab: usize,
    /// Numbers of an embedding.
    pub dim: usize,
    /// How embeddings are made, or why they are not.
    pub pooling: std::result::Result<Pooling, String>,
    /// Bytes that requests may hold in memory.
    pub room: usize,
    /// What forms of answers share.
    pub grammars: Arc<Grammars>,
    /// How tokens are chosen where a request does not say.
    pub sampling: Defaults,
}

/// Names the weights, so that keys and values of other ones are never taken for theirs. A file that was written anew is
/// another one.
fn fingerprint(files: &ModelFiles) -> Result<Vec<u8>> {
    let mut hash = twox_hash::XxHash3_64::new();
    for path in files.all_paths() {
        let data = std::fs::metadata(&path)
            .map_err(|source| Error::Io { what: format!("cannot look at {}", path.display()), source })?;
        let changed = data.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
        hash.write_u64(data.len());
        hash.write_u128(changed.as_nanos());
    }
    for tensor in files.tensors() {
        hash.write(tensor.name.as_bytes());
        hash.write_u64(tensor.offset);
    }
    // Other instructions give other last bits.
    let level = outcore_llm::kernels::Level::detect();
    Ok([format!("{level:?}").as_bytes(), &hash.finish().to_le_bytes()].concat())
}

fn refused(what: String, remedy: &str) -> Error {
    Error::Outcore(OutcoreError::new(ErrorKind::InvalidArgument, what).remedy(remedy))
}

/// Opens the pool of keys and values, with these bytes for active answers and for all.
fn open_pool(
    args: &Args,
    runtime: &Runtime,
    layout: KvLayout,
    model: &[u8],
    [active, all]: [Bytes; 2],
    longest: Extent,
) -> Result<KvPool> {
    // A store keeps whole blocks, and so does a pool that has one.
    let layout = if args.kv_store.is_some() { layout } else { layout.letting_go() };
    let block = layout.block_room().get() * u64::from(layout.groups());
    let of_blocks = |bytes: Bytes| u32::try_from(bytes.get() / block).unwrap_or(u32::MAX - 1);
    let active = of_blocks(active).max(1);
    let one = u32::try_from(layout.room_most(longest).get().div_ceil(block)).unwrap_or(u32::MAX - 2) + 1;
    let blocks = of_blocks(all).max(active).max(one);
    // Of layers with windows a pass uses little, but of a store's pool all blocks are whole.
    let groups = u64::from(layout.groups());
    let whole = (0..layout.groups()).filter(|group| layout.window_of(*group).is_none()).count() as u64;
    let useful = u64::from(active).saturating_mul(groups) / whole.max(1);
    if !layout.lets_go() && u64::from(blocks) < useful {
        tracing::info!(
            kv_space = %Bytes::new(u64::from(blocks) * block),
            useful = %Bytes::new(useful.saturating_mul(block)),
            "with a larger --kv-space more answers can be active: layers with windows need less memory for them"
        );
    }
    let pool = match &args.kv_store {
        None => KvPool::open(runtime, layout, model, blocks)?,
        Some(folder) => {
            let folder = store_of(folder, &layout, model);
            let store = (folder.as_path(), outcore_kv::StoreOptions::new());
            KvPool::open_with_store(runtime, layout, model, blocks, store)?
        }
    };
    pool.set_active(ActiveOptions::default().blocks_most(active));
    Ok(pool)
}

/// The part of the folder for this model and these blocks: those of others are of no use to it, and stay.
fn store_of(folder: &Path, layout: &KvLayout, model: &[u8]) -> PathBuf {
    let mut hash = twox_hash::XxHash3_64::new();
    hash.write(model);
    for number in [layout.page_size().bytes(), layout.block_tokens().into(), layout.groups().into()] {
        hash.write_u64(number);
    }
    let store = folder.join(format!("{:016x}", hash.finish()));
    let others = std::fs::read_dir(folder).map_or(0, |all| all.flatten().filter(|one| one.path() != store).count());
    if others > 0 {
        tracing::warn!(
            folder = %folder.display(),
            others,
            "the folder of --kv-store also has keys and values of other models or settings: delete what is not needed"
        );
    }
    store
}

/// Opens the model and starts the engine.
///
/// # Errors
/// What a model, its tokenizer or a budget gets that cannot be used; each says what to do.
pub fn open(args: &Args, tenants: &Tenants) -> Result<Opened> {
    let files = ModelFiles::open(&args.model)?;
    let read = [&args.draft_model, &args.tenants, &args.token_file].map(Option::as_ref);
    let capture = args.capture.as_deref().map(|path| Capture::file(path, &files, &read)).transpose()?;
    let config = Config::new(&files)?;
    let tokenizer = Arc::new(Tokenizer::load(&files)?);
    let template = ChatTemplate::load(&files, &tokenizer)?;
    let generation = GenerationDefaults::of(&files)?;
    let pooling = args.pooling.map_or_else(|| Pooling::of(&files), |named| Ok(Ok(named)))?;
    if let Err(why) = &pooling {
        tracing::warn!(%why, "requests for embeddings are refused");
    }
    let context = args.context.unwrap_or(config.context);
    if context < 2 || context > config.context {
        let what = format!("--context {context}, and the model's context is {}", config.context);
        return Err(refused(what, "choose from 2 to the model's context"));
    }
    let threads = Pool::threads_for(args.threads);
    let drafts = if args.speculate || args.draft_model.is_some() { DRAFTS } else { 0 };
    let draft = args
        .draft_model
        .as_ref()
        .map(|path| DraftFiles::open(path, (&tokenizer, config.vocab), args.threads, DRAFT_WINDOW.min(context)));
    let draft = draft.transpose()?;
    let row = config.vocab as u64 * size_of::<f32>() as u64 * LOGITS_COPIES;
    let memory = args.memory.map_or_else(|| MemoryLimit::detect().map(|limit| limit.limit), Ok)?;
    let concurrency = match args.concurrency {
        Some(asked) => usize::from(asked),
        None => (memory.get() / LOGITS_PART / row.max(1)).clamp(CONCURRENCY[0], CONCURRENCY[1]) as usize,
    };
    let room = Bytes::new((memory.get() / REQUESTS_PART).clamp(REQUESTS[0], REQUESTS[1]));
    let mut working = Working::of(&config, context, 0, KvType::F32, PROMPT_TOKENS + concurrency + drafts, threads);
    // Each thread that chooses a token has the odds of all, and perhaps their order.
    let choosing = (threads.min(concurrency) as u64 - 1) * config.vocab as u64 * CHOOSING;
    let grammars = (memory.get() / GRAMMARS_PART).clamp(grammar::BYTES_LEAST as u64, GRAMMARS_MOST);
    let for_grammars = Bytes::new(grammars + grammar::vocab_bytes(&tokenizer, config.vocab));
    let logits = Bytes::new((concurrency + drafts) as u64 * row);
    working.fixed = working.fixed
        + Bytes::new(choosing)
        + logits
        + room
        + for_grammars
        + draft.as_ref().map_or(Bytes::ZERO, |draft| draft.memory(DRAFT_SESSIONS))
        + if capture.is_some() { capture::MEMORY } else { Bytes::ZERO }
        + NETWORK;

    let mut lengths: Vec<Bytes> = files.header().files.iter().map(|file| Bytes::new(file.len)).collect();
    let weights = lengths.iter().fold(Bytes::ZERO, |sum, len| sum + *len);
    lengths.push(args.kv_space);
    let wishes = Wishes { memory: args.memory, device: None, host: Bytes::ZERO, page_size: args.page_size };
    let builder = Runtime::builder().for_model(files.header()).store(StoreOptions::new(args.io));
    // Where a page has room for more tokens of a layer than answers have, it has several layers.
    let frames_most = HostDevice::frames_allowed(outcore::machine::max_map_count()?).max(1);
    // What keys and values of running answers may take.
    let active_of = |device: Bytes| {
        args.kv_memory.unwrap_or_else(|| device.saturating_sub(weights).max(Bytes::new(device.get() / 2)))
    };
    let page_of = |device: Bytes| {
        let chosen = builder.clone().device_budget(device).settings()?.page_size.value.bytes();
        // The smallest with which the kernel allows so much memory: each frame takes two mappings.
        let least = device.get().div_ceil(frames_most).next_power_of_two();
        let mut of_blocks = 1 << (args.kv_space.get() / KV_PAGES_LEAST).max(PAGE_LEAST.get()).ilog2();
        if device >= weights + active_of(device).min(args.kv_space) {
            of_blocks = of_blocks.min(PAGE_WHERE_WEIGHTS_STAY.get());
        }
        PageSize::new(Bytes::new(chosen.min(least.max(of_blocks))))
    };
    let budgets = match (divide(wishes, &lengths, working, page_of), &draft) {
        (Err(error), Some(draft)) => return Err(draft.no_room(DRAFT_SESSIONS, error)),
        (budgets, _) => budgets?,
    };
    let page = args.page_size.map_or_else(|| page_of(budgets.device), PageSize::new)?;
    let runtime = builder
        .page_size(page)
        .device_budget(budgets.device)
        .policy(args.policy.unwrap_or_else(|| config.policy()))
        .keep_uses(capture.is_some())
        .open()?;

    let active = active_of(budgets.device);
    let layout = paged_kv::layout(&config, &runtime, TYPICAL_CONTEXT)?;
    let longest = Extent::new(context as u64).in_passes_of(budgets.pass as u64);
    let pool = open_pool(args, &runtime, layout, &fingerprint(&files)?, [active, args.kv_space], longest)?;
    for tenant in tenants.iter() {
        pool.set_tenant(tenant.id, tenant.options)?;
    }

    let model = runtime.open_parsed(files.header().clone())?;
    let of_file = |file: u32| files.tensors().iter().find(|tensor| tensor.file == file);
    let one_of_each =
        (0..files.paths().len() as u32).filter_map(of_file).map(|one| Ok((one.file, model.tensor(&one.name)?)));
    let one_of_each: Vec<_> = one_of_each.collect::<outcore::Result<_>>()?;
    let capture = capture.map(|to| Capture::begin(to, files.header(), &one_of_each, &pool)).transpose()?;
    let places = Arc::new(Places::new(one_of_each.into_iter().map(|(_, tensor)| tensor).collect(), pool.clone()));
    let metrics = Arc::new(Metrics::new(places.clone(), pooling.as_ref().map_or("none", |pooling| pooling.name())));
    let weights = Arc::new(PagedWeights::open(&runtime, &model, &files)?);
    let model = Arc::new(Model::load(&files, weights, Options { threads: args.threads, ..Options::default() })?);
    let drafter = match draft {
        None => None,
        Some(draft) => {
            Some(Drafter { model: draft.load()?, sessions: DRAFT_SESSIONS, tokens: args.draft_tokens.into() })
        }
    };
    let kept = Kept {
        token: working.token,
        row: Bytes::new(row),
        pass: logits + Bytes::new(working.token.get().saturating_mul(budgets.pass as u64)),
        grammars: for_grammars,
    };
    let all = lengths.iter().map(|len| page.pages_for(len.get())).sum::<u64>().saturating_mul(page.bytes());
    let slack = Arc::new(Slack::new(&runtime, kept, Bytes::new(all))?);
    let limits = Limits {
        concurrency: concurrency.min(budgets.pass.saturating_sub(drafts).max(1)),
        queue: usize::from(args.queue),
        pass: budgets.pass,
        drafts,
        preempt: args.preempt,
    };
    tracing::info!(
        pages = %budgets.device,
        page = %Bytes::new(page.bytes()),
        active_tokens = u64::from(pool.stats().active_most) * u64::from(pool.layout().block_tokens()),
        block_tokens = pool.layout().block_tokens(),
        concurrency = limits.concurrency,
        pass = limits.pass,
        requests = %room,
        "memory is divided"
    );
    let grammars =
        Arc::new(Grammars::new(tokenizer.clone(), config.vocab, grammars as usize, slack.clone(), metrics.clone()));
    let capture = capture.unwrap_or_default();
    let engine = Engine::start(model, drafter, (pool, slack), tokenizer.clone(), limits, metrics.clone(), capture)
        .map_err(|source| Error::Io { what: "cannot start the engine's thread".into(), source })?;
    let room = room.get() as usize;
    let sampling = Defaults::of(args, generation);
    let (vocab, dim) = (config.vocab, config.dim);
    Ok(Opened { engine, metrics, places, tokenizer, template, context, vocab, dim, pooling, room, grammars, sampling })
}
