//! `generate`: runs a model, in less memory than its weights take if need be.

mod args;

mod device;
mod progress;
mod report;
mod residency;
mod source;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use clap::Parser;
use outcore::machine::ProcessMemory;
use outcore::stats::Lane;
use outcore::store::{QueueDepth, StoreOptions};
use outcore::{Bytes, PageSize, Runtime, RuntimeBuilder};
use outcore_kv::{KvLayout, KvPool, TenantId};
use outcore_lab::output::{Input, NewFile};
use outcore_lab::sim::{CaptureFile, CaptureHeader};
use outcore_llm::{
    ChatTemplate, Config, CudaModel, CudaSession, Decoder, Error, Gpu, KvType, Message, Model, ModelFiles, Options,
    PagedKeys, PagedWeights, PassCounts, PassTime, Pool, Result, Sampler, Session, TextStream, Timing, Tokenizer,
};

use args::Args;
use device::Device;
use outcore_llm::budget::{self, Budgets, Wishes, Working};
use progress::Progress;
use report::{Generated, Memory, Run, Timeline};
use residency::Watch;

/// What a shell reports for a program that SIGINT ended.
const INTERRUPTED: u8 = 130;
/// Pages are made no smaller than this for keys and values.
const KV_PAGE_LEAST: Bytes = Bytes::kib(64);
/// How many pages a run reports, of those that were waited for longest.
const WORST_PAGES: usize = 16;

/// What an interrupt does. Before the first pass there is nothing to report, and the program ends at once. From then
/// on, the pass in progress is given up and what was done is reported; a second interrupt ends the program at once. The
/// program says so, because a page that is on its way may take a while to come.
#[derive(Debug, Default)]
struct Interrupt {
    working: AtomicBool,
    asked: Arc<AtomicBool>,
}

impl Interrupt {
    fn ask(&self) {
        let again = self.asked.swap(true, Ordering::SeqCst);
        if again || !self.working.load(Ordering::SeqCst) {
            let _ = writeln!(std::io::stderr(), "generate: interrupted");
            std::process::exit(i32::from(INTERRUPTED));
        }
        let _ = writeln!(std::io::stderr(), "generate: the pass is given up; interrupt again to end at once");
    }

    fn asked(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into()))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(wrong) if wrong.use_stderr() => return fail(&args::in_one_line(&wrong)),
        Err(help) => {
            let _ = help.print();
            return ExitCode::SUCCESS;
        }
    };
    let interrupt = Arc::new(Interrupt::default());
    let handler = interrupt.clone();
    if let Err(error) = ctrlc::set_handler(move || handler.ask()) {
        tracing::warn!(%error, "an interrupt will end the program without a summary");
    }
    let run = match run(&args, &interrupt) {
        Ok(run) => run,
        Err(error @ (Error::MissingTensor(_) | Error::Shape { .. })) => {
            return fail(&format!("{}: {}", args.model.display(), error.in_full()));
        }
        Err(error) => return fail(&error.in_full()),
    };
    // Where nobody reads the summary there is nobody to tell.
    let _ = write!(std::io::stderr(), "\n{}", run.summary());
    if args.json
        && let Err(error) = write_out(&format!("{}\n", run.json()))
    {
        return fail(&error.in_full());
    }
    if run.interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS }
}

fn fail(why: &str) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "generate: {why}");
    ExitCode::FAILURE
}

/// The prompt's tokens.
fn prompt_tokens(args: &Args, files: &ModelFiles, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>> {
    if let Some(ids) = &args.prompt_tokens {
        return Ok(ids.clone());
    }
    let text = args.prompt.as_deref().unwrap_or_default();
    let Some(tokenizer) = tokenizer else {
        return Err(Error::Unsupported("the model has no tokenizer: give the prompt as --prompt-tokens".into()));
    };
    if !args.chat {
        return tokenizer.encode(text, true);
    }
    let template = ChatTemplate::load(files, tokenizer)?
        .ok_or_else(|| Error::Unsupported("the model has no chat template: leave --chat out".into()))?;
    tokenizer.encode_chat(&template.render(&[Message::new("user", text)], true)?)
}

/// Blocks for a sequence of `context` tokens, and one that a copy may need.
fn blocks_for(layout: &KvLayout, context: usize) -> u32 {
    u32::try_from(context.div_ceil(layout.block_tokens() as usize) + 1).unwrap_or(u32::MAX)
}

/// An empty sequence of up to `context` tokens in a pool of its own.
fn paged_keys(config: &Config, runtime: &Runtime, context: usize, kv: KvType) -> Result<PagedKeys> {
    let layout = outcore_llm::paged_kv::layout_of(config, runtime, context as u64, kv)?;
    let blocks = blocks_for(&layout, context);
    // Nobody else uses the pool, so the model needs no name.
    let pool = KvPool::open(runtime, layout, b"", blocks)?;
    let mut sequence = pool.begin(TenantId::new(0), &[])?;
    // The weights are declared too: what no plan names goes first.
    sequence.plan_passes()?;
    Ok(PagedKeys::new(sequence))
}

/// The model, on whatever computes it.
enum Computing {
    Host(Arc<Model>),
    Cuda(Arc<CudaModel>),
}

impl Computing {
    /// Binds the weights, on `gpu` or on this machine's processor.
    fn load(args: &Args, files: &ModelFiles, weights: Arc<PagedWeights>, gpu: Option<Arc<Gpu>>) -> Result<Self> {
        Ok(match gpu {
            None => {
                let options = Options { threads: args.threads, ..Options::default() };
                Self::Host(Arc::new(Model::load(files, weights, options)?))
            }
            Some(gpu) => Self::Cuda(Arc::new(CudaModel::load(files, weights, gpu)?)),
        })
    }

    /// An empty sequence of up to `context` tokens.
    fn begin(&self, args: &Args, runtime: &Runtime, context: usize, pass: usize) -> Result<Sequence> {
        let kv = args.kv_type();
        let keys = |config: &Config| args.paged_kv.then(|| paged_keys(config, runtime, context, kv)).transpose();
        Ok(match self {
            Self::Host(model) => Sequence::Host(Box::new(match keys(model.config())? {
                None => Session::new(model.clone(), context, kv)?,
                Some(keys) => Session::paged(model.clone(), keys)?,
            })),
            Self::Cuda(model) => {
                let mut session = match keys(model.config())? {
                    None => CudaSession::new(model.clone(), context, pass, kv)?,
                    Some(keys) => CudaSession::paged(model.clone(), keys, pass)?,
                };
                session.use_graphs(!args.no_graphs);
                session.time(if args.time_stalls { Timing::Stalls } else { Timing::Passes });
                Sequence::Cuda(Box::new(session))
            }
        })
    }
}

/// The sequence, on whatever computes it.
enum Sequence {
    Host(Box<Session>),
    Cuda(Box<CudaSession>),
}

impl Sequence {
    /// Reads `tokens`.
    fn read(&mut self, tokens: &[u32]) -> Result<()> {
        match self {
            Self::Host(session) => session.forward(tokens).map(drop),
            Self::Cuda(session) => session.read(tokens),
        }
    }

    /// Reads `tokens`, puts the logits' bytes into `hash` if there is one, and chooses the next token.
    fn step<H: std::hash::Hasher>(
        &mut self,
        tokens: &[u32],
        sampler: &mut Sampler,
        hash: Option<&mut H>,
    ) -> Result<u32> {
        match (self, hash) {
            (Self::Host(session), hash) => {
                let logits = session.forward(tokens)?;
                if let Some(hash) = hash {
                    hash.write(&logits_bytes(&logits));
                }
                Ok(sampler.sample(&logits))
            }
            (Self::Cuda(session), None) => session.next(tokens, sampler),
            (Self::Cuda(session), Some(hash)) => {
                hash.write(&logits_bytes(session.forward(tokens)?));
                session.sample(sampler)
            }
        }
    }

    fn last_pass(&self) -> PassTime {
        match self {
            Self::Host(session) => session.last_pass(),
            Self::Cuda(session) => session.last_pass(),
        }
    }

    /// What the host did for the passes so far; `None` where the host computes.
    fn counts(&self) -> Option<PassCounts> {
        match self {
            Self::Host(_) => None,
            Self::Cuda(session) => Some(session.counts()),
        }
    }
}

fn run(args: &Args, interrupt: &Interrupt) -> Result<Run> {
    args.check()?;
    // Opened before a model is fetched: most of what can be wrong with a GPU is known at once.
    let gpu = match &args.device {
        Device::Cuda(selector) => {
            let gpu = Gpu::open(selector, args.kernels.as_deref())?;
            if !args.deterministic && !gpu.has_cublaslt() {
                tracing::warn!(
                    "there is no cuBLASLt that can be used (libcublasLt.so), so own kernels compute prompts, which takes longer: \
                     install NVIDIA's cuBLAS 12 or 13 and have LD_LIBRARY_PATH name its folder, or pass --deterministic"
                );
            }
            Some(Arc::new(if args.deterministic { gpu.without_cublaslt() } else { gpu }))
        }
        _ => None,
    };
    let files = ModelFiles::open(source::resolve(&args.model)?)?;
    let outputs = Outputs::create(args, &files)?;
    let (prompt, decoder) = prompt(args, &files)?;
    let config = Config::new(&files)?;
    let pass_bytes = Bytes::new(outcore_llm::pass_bytes(&files)?);
    check_prompt(&prompt, args.tokens, &config)?;
    let context = prompt.len() + args.tokens;

    let (runtime, budgets) = open_runtime(args, &files, &config, &prompt, gpu.as_deref())?;
    let page_size = runtime.stats().page_size;
    let opened = Instant::now();
    let model = runtime.open_parsed(files.header().clone())?;
    let about = format!("generate --model {} --device-budget {}", source::name(&args.model), budgets.device);
    let capture = outputs.capture.map(|file| {
        let header = model.header();
        let segment = |file| {
            let tensor = header.tensors.iter().find(|tensor| tensor.file == file)?;
            Some(runtime.observe().snapshot(&model.tensor(&tensor.name).ok()?).id)
        };
        CaptureFile::begin(file, &CaptureHeader::of_model(header, page_size, &about, segment))
    });
    let capture = capture.transpose()?;
    let weights = PagedWeights::open_in_steps(&runtime, &model, &files, args.step)?;
    let weights = Arc::new(weights.cancelled_by(interrupt.asked.clone()));
    let bandwidth = gpu.as_ref().and_then(|gpu| gpu.bandwidth());
    let computing = Computing::load(args, &files, weights, gpu)?;
    let sequence = computing.begin(args, &runtime, context, budgets.pass)?;
    let keys_values = budget::keys_values(&config, plain_context(args, context), args.kv_type());
    let memory = Memory::of(&files, page_size, keys_values, budgets.working);
    let size = files.header().files.iter().fold(Bytes::ZERO, |sum, file| sum + Bytes::new(file.len));
    drop(files);

    interrupt.working.store(true, Ordering::SeqCst);
    let watch = outputs.timeline.is_some().then(|| Watch::start(&runtime, &model, page_size, opened));
    tracing::info!(budget = %budgets.device, memory = ?ProcessMemory::now().ok(), "ready");
    let mut generation = Generation::new(args, &runtime, sequence, capture, decoder.as_ref(), &budgets, size);
    generation.run(&prompt, interrupt)?;
    let mut done = generation.finish(interrupt.asked())?;
    let mut repeats = vec![done.times()];
    while repeats.len() < args.repeat && !interrupt.asked() {
        let sequence = computing.begin(args, &runtime, context, budgets.pass)?;
        let mut generation = Generation::new(args, &runtime, sequence, None, decoder.as_ref(), &budgets, size);
        generation.progress = None;
        generation.run(&prompt, interrupt)?;
        done = generation.finish(interrupt.asked())?;
        repeats.push(done.times());
    }
    drop(computing);
    if let (Some(timeline), Some(watch)) = (outputs.timeline, watch) {
        timeline.write(runtime.observe().take_timeline(), &watch.finish())?;
        let dropped = runtime.stats().spans_dropped;
        if dropped > 0 {
            tracing::warn!(dropped, "the timeline ends before the run does: there was no room for more spans");
        }
    }
    let (stats, optimum, worst_pages) =
        (runtime.stats(), runtime.observe().optimum(), runtime.observe().worst_pages(WORST_PAGES));
    // What failed outside of the calls is reported only here.
    runtime.close()?;
    Ok(Run {
        model: args.model.to_string_lossy().into_owned(),
        device: args.device.to_string(),
        device_budget: budgets.device,
        device_asked: budgets.device_asked,
        host_budget: budgets.host,
        memory,
        pass_bytes,
        bandwidth,
        times_stalls: args.time_stalls,
        prompt_tokens: prompt,
        done,
        repeats,
        interrupted: interrupt.asked(),
        stats,
        optimum,
        worst_pages,
    })
}

/// The files that a run writes.
struct Outputs {
    timeline: Option<Timeline>,
    capture: Option<NewFile>,
}

impl Outputs {
    /// Creates them before the run, which is too long to find out only at its end that a file cannot be written.
    fn create(args: &Args, files: &ModelFiles) -> Result<Self> {
        let of_model = |path| Input { path, is: "it is a file of the model" };
        let inputs: Vec<Input> = files.all_paths().into_iter().map(of_model).collect();
        let timeline = args.timeline.as_deref().map(|path| Timeline::create(path, &inputs)).transpose()?;
        let capture = args.capture.as_deref().map(|path| {
            let file = NewFile::create(path, "capture", "--capture", &inputs)?;
            args.timeline.as_deref().map_or(Ok(()), |timeline| file.is_not(timeline))?;
            Ok::<_, outcore::Error>(file)
        });
        Ok(Self { timeline, capture: capture.transpose()? })
    }
}

/// The prompt's tokens, and what turns tokens into text.
fn prompt(args: &Args, files: &ModelFiles) -> Result<(Vec<u32>, Option<Decoder>)> {
    let tokenizer = match (Tokenizer::load(files), &args.prompt_tokens) {
        (Ok(tokenizer), _) => Some(tokenizer),
        // With a prompt of ids, ids are printed, and no tokenizer is needed.
        (Err(_), Some(_)) => None,
        (Err(error), None) => return Err(error),
    };
    let prompt = prompt_tokens(args, files, tokenizer.as_ref())?;
    // The memory that an encoder takes is of more use for pages.
    Ok((prompt, tokenizer.map(Tokenizer::into_decoder)))
}

/// Tokens of a context whose keys and values are in no page.
fn plain_context(args: &Args, context: usize) -> usize {
    if args.paged_kv { 0 } else { context }
}

/// The page size with this device budget, and whether it is smaller than the weights' own choice: a page shall not have
/// room for many more keys and values than the context has.
fn page_size(
    args: &Args,
    config: &Config,
    context: usize,
    builder: &RuntimeBuilder,
    device: Bytes,
) -> outcore::Result<(PageSize, bool)> {
    let chosen = builder.clone().device_budget(device).settings()?.page_size.value;
    if !args.paged_kv || args.page_size.is_some() {
        return Ok((chosen, false));
    }
    let least = PageSize::new(KV_PAGE_LEAST)?;
    let size = outcore_llm::paged_kv::page_size(config, context as u64, [least.min(chosen), chosen]);
    Ok((size, size < chosen))
}

/// Divides the memory, and opens the runtime with its part.
fn open_runtime(
    args: &Args,
    files: &ModelFiles,
    config: &Config,
    prompt: &[u32],
    gpu: Option<&Gpu>,
) -> Result<(Runtime, Budgets)> {
    let context = prompt.len() + args.tokens;
    let mut lengths: Vec<Bytes> = files.header().files.iter().map(|file| Bytes::new(file.len)).collect();
    // In pages, keys and values compete with the weights for frames.
    let plain_context = plain_context(args, context);
    lengths.extend(
        args.paged_kv
            .then(|| match gpu {
                None => Ok(budget::keys_values(config, context, args.kv_type())),
                Some(_) => {
                    // Pages of a GPU are large: a short context takes more of them than its bytes would.
                    let page = args.page_size.map_or(Ok(PageSize::DEFAULT), PageSize::new)?;
                    let layout = outcore_llm::paged_kv::layout_in(config, page, context as u64, args.kv_type())?;
                    let each = u64::from(layout.groups()) * layout.block_room().get();
                    Ok::<_, Error>(Bytes::new(each.saturating_mul(u64::from(blocks_for(&layout, context)))))
                }
            })
            .transpose()?,
    );
    // Blocks of keys and values on a GPU: larger pages would have room for thousands of tokens of a layer.
    let of_blocks = (args.paged_kv && gpu.is_some()).then_some(Bytes::new(PageSize::DEFAULT.bytes()));
    let asked = args.page_size.or(of_blocks);
    let wishes = Wishes { memory: args.memory, device: args.device_budget, host: args.host_budget, page_size: asked };
    let store = match args.depth {
        Some(depth) => StoreOptions::new(args.io).depth_ahead(QueueDepth::new(depth)?),
        None => StoreOptions::new(args.io),
    };
    let builder = Runtime::builder().for_model(files.header()).lookahead(args.prefetch).store(store);
    let builder = match asked {
        Some(size) => builder.page_size(PageSize::new(size)?),
        None => builder,
    };
    let budgets = match gpu {
        None => {
            let threads = Pool::threads_for(args.threads);
            let working = Working::of(config, context, plain_context, args.kv_type(), prompt.len(), threads);
            budget::divide(wishes, &lengths, working, |device| {
                page_size(args, config, context, &builder, device).map(|size| size.0)
            })?
        }
        Some(gpu) => {
            let working = |pass| match args.paged_kv {
                true => CudaSession::paged_memory(config, pass),
                false => CudaSession::memory(config, context, pass, args.kv_type()),
            };
            let builder = builder.clone().device(args.device.factory());
            let page_of = |device| Ok(builder.clone().device_budget(device).settings()?.page_size.value);
            let tables_of = |host| args.device.factory().tables_of_host_memory(host);
            budget::divide_gpu(wishes, &lengths, working, prompt.len(), gpu.free_memory()?, tables_of, page_of)?
        }
    };
    // A GPU has pages of its own size.
    let builder = match page_size(args, config, context, &builder, budgets.device)? {
        (size, true) if gpu.is_none() => builder.page_size(size),
        _ => builder,
    };
    let runtime = builder
        .device(args.device.factory())
        .device_budget(budgets.device)
        .host_budget(budgets.host)
        .policy(args.policy.unwrap_or_else(|| config.policy()))
        .verify(args.verify)
        .timeline(args.timeline.is_some())
        .keep_uses(args.capture.is_some())
        .open()?;
    Ok((runtime, budgets))
}

/// Passes over the model, one for each token.
struct Generation<'a> {
    args: &'a Args,
    runtime: &'a Runtime,
    sequence: Sequence,
    sampler: Sampler,
    capture: Option<CaptureFile>,
    decoder: Option<&'a Decoder>,
    stream: Option<TextStream<'a>>,
    /// The most tokens of one pass.
    pass: usize,
    hash: Option<twox_hash::XxHash3_64>,
    progress: Option<Progress>,
    done: Generated,
}

impl<'a> Generation<'a> {
    fn new(
        args: &'a Args,
        runtime: &'a Runtime,
        sequence: Sequence,
        capture: Option<CaptureFile>,
        decoder: Option<&'a Decoder>,
        budgets: &Budgets,
        model: Bytes,
    ) -> Self {
        let greedy = args.temperature <= 0.0;
        Self {
            args,
            runtime,
            sequence,
            sampler: if greedy { Sampler::greedy() } else { Sampler::new(args.temperature, args.seed) },
            capture,
            decoder,
            stream: decoder.map(Decoder::stream),
            pass: budgets.pass,
            hash: args.hashes_logits().then(twox_hash::XxHash3_64::new),
            progress: Some(Progress::start(runtime, model.min(budgets.device))),
            done: Generated::default(),
        }
    }

    /// Generates until the text ends, there are enough tokens, or the user interrupts.
    fn run(&mut self, prompt: &[u32], interrupt: &Interrupt) -> Result<()> {
        let mut input = prompt.to_vec();
        while self.done.tokens.len() < self.args.tokens && !interrupt.asked() {
            let Some(next) = self.token(&input)? else { break };
            if self.decoder.is_some_and(|decoder| decoder.is_end(next)) {
                break;
            }
            self.done.tokens.push(next);
            if let Some(stream) = &mut self.stream {
                let piece = stream.push(next);
                self.say(&piece)?;
            }
            input = vec![next];
        }
        Ok(())
    }

    /// Reads `input` and chooses the next token; `None` if a pass was given up. A long prompt is read in several
    /// passes; the logits after its last token are the ones that count.
    fn token(&mut self, input: &[u32]) -> Result<Option<u32>> {
        let (start, counts) = (Instant::now(), self.sequence.counts());
        let (mut pass, mut next) = (PassTime::default(), 0);
        let mut parts = input.chunks(self.pass).peekable();
        while let Some(part) = parts.next() {
            let since = Instant::now();
            let done = match parts.peek() {
                Some(_) => self.sequence.read(part).map(|()| next),
                None => self.sequence.step(part, &mut self.sampler, self.hash.as_mut()),
            };
            next = match done {
                Err(Error::Cancelled) => return Ok(None),
                done => done?,
            };
            self.progress.take();
            if let Some(capture) = &mut self.capture {
                capture.pass(self.runtime)?;
            }
            let part = self.sequence.last_pass();
            self.runtime.observe().add_span(Lane::Compute, "pass", since, since + part.total);
            pass = PassTime { total: pass.total + part.total, waited: pass.waited + part.waited };
        }
        let done = &mut self.done;
        (done.total, done.waited) = (done.total + pass.total, done.waited + pass.waited);
        if done.tokens.is_empty() {
            done.first_token = start.elapsed();
            tracing::info!(after = ?done.first_token, "first token");
        } else {
            done.passes.push(pass.total);
            if let (Some(now), Some(before)) = (self.sequence.counts(), counts) {
                done.counts = done.counts + (now - before);
            }
        }
        Ok(Some(next))
    }

    /// Prints text as it comes, unless standard output is for programs.
    fn say(&mut self, piece: &str) -> Result<()> {
        self.done.text.push_str(piece);
        if self.args.json { Ok(()) } else { write_out(piece) }
    }

    fn finish(mut self, interrupted: bool) -> Result<Generated> {
        if let Some(stream) = self.stream.take() {
            let rest = stream.finish();
            self.say(&rest)?;
        }
        if let Some(capture) = self.capture {
            capture.finish(self.runtime, interrupted)?;
        }
        self.done.logits_hash = self.hash.as_ref().map(std::hash::Hasher::finish);
        Ok(self.done)
    }
}

fn check_prompt(prompt: &[u32], tokens: usize, config: &Config) -> Result<()> {
    let (context, vocab) = (config.context, config.vocab);
    if prompt.is_empty() {
        return Err(Error::Invalid("the prompt has no token: give at least one".into()));
    }
    if let Some(id) = prompt.iter().find(|id| **id as usize >= vocab) {
        return Err(Error::Invalid(format!(
            "there is no token {id}: the model has ids 0 to {}",
            vocab.saturating_sub(1)
        )));
    }
    if prompt.len() >= context {
        return Err(Error::Invalid(format!(
            "the prompt has {} tokens, but the model's context is {context}: shorten it",
            prompt.len()
        )));
    }
    if tokens > context - prompt.len() {
        return Err(Error::Invalid(format!(
            "{} tokens of prompt and {tokens} more exceed the model's context of {context}: ask for at most {}",
            prompt.len(),
            context - prompt.len()
        )));
    }
    Ok(())
}

fn write_out(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|cause| {
        let error = outcore::Error::io("cannot write to standard output", cause);
        error.remedy("check where it goes: a reader that ended, or a disk that is full").into()
    })
}

fn logits_bytes(logits: &[f32]) -> Vec<u8> {
    logits.iter().flat_map(|logit| logit.to_le_bytes()).collect()
}
