//! What computes a model, and the memory that it is given: the only part, beside the options, that knows of devices.

use std::sync::Arc;

use outcore::store::{QueueDepth, StoreOptions};
use outcore::{Bytes, PageSize, Runtime, RuntimeBuilder};
use outcore_kv::{KvLayout, KvPool, TenantId};
use outcore_lab::sim::CaptureFile;
use outcore_llm::budget::{self, Budgets, Wishes, Working};
use outcore_llm::{
    Config, CudaModel, CudaSession, DraftFiles, Error, Gpu, KvType, Model, ModelFiles, Options, PagedKeys,
    PagedWeights, Passes, Pool, Result, Session, Timing, Tokenizer,
};

use crate::args::Args;
use crate::device::Device;
use crate::generation::Task;
use crate::report::{Generated, Times};
use crate::source;

/// Pages are made no smaller than this for keys and values.
const KV_PAGE_LEAST: Bytes = Bytes::kib(64);

/// The GPU that the options name, if they name one.
pub fn gpu(args: &Args) -> Result<Option<Arc<Gpu>>> {
    let Device::Cuda(selector) = &args.device else { return Ok(None) };
    let gpu = Gpu::open(selector, args.kernels.as_deref())?;
    if !args.deterministic && !gpu.has_cublaslt() {
        tracing::warn!(
            "there is no cuBLASLt that can be used (libcublasLt.so), so own kernels compute prompts, which takes longer: \
             install NVIDIA's cuBLAS 12 or 13 and have LD_LIBRARY_PATH name its folder, or pass --deterministic"
        );
    }
    Ok(Some(Arc::new(if args.deterministic { gpu.without_cublaslt() } else { gpu })))
}

/// Binds the weights, on `gpu` or on this machine's processor, and does `task` in sequences of up to `context` tokens.
pub fn run(
    task: &Task<'_>,
    files: ModelFiles,
    weights: Arc<PagedWeights>,
    gpu: Option<Arc<Gpu>>,
    context: usize,
    capture: Option<CaptureFile>,
) -> Result<(Generated, Vec<Times>)> {
    let Task { args, runtime, pass, .. } = task;
    let kv = args.kv_type();
    let keys = |config: &Config| args.paged_kv.then(|| paged_keys(config, runtime, context, kv)).transpose();
    match gpu {
        None => {
            let options = Options { threads: args.threads, ..Options::default() };
            let model = Arc::new(Model::load(&files, weights, options)?);
            drop(files);
            let begin = || match keys(model.config())? {
                None => Session::new(model.clone(), context, kv),
                Some(keys) => model.begin(keys, *pass),
            };
            task.run(&model, begin, capture)
        }
        Some(gpu) => {
            let model = Arc::new(CudaModel::load(&files, weights, gpu)?);
            drop(files);
            let begin = || {
                let mut session = match keys(model.config())? {
                    None => CudaSession::new(model.clone(), context, *pass, kv)?,
                    Some(keys) => model.begin(keys, *pass)?,
                };
                session.use_graphs(!args.no_graphs);
                session.time(if args.time_stalls { Timing::Stalls } else { Timing::Passes });
                Ok(session)
            };
            task.run(&model, begin, capture)
        }
    }
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

/// Tokens of a context whose keys and values are in no page.
pub fn plain_context(args: &Args, context: usize) -> usize {
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

/// The draft model, if there is to be one. Its sequence sees up to `context` tokens.
pub fn draft(args: &Args, files: &ModelFiles, config: &Config, context: usize) -> Result<Option<DraftFiles>> {
    let Some(draft) = &args.draft_model else { return Ok(None) };
    let path = source::resolve(draft)?;
    DraftFiles::open(path, (&Tokenizer::load(files)?, config.vocab), args.threads, context).map(Some)
}

/// Divides the memory, and opens the runtime with its part.
pub fn runtime(
    args: &Args,
    files: &ModelFiles,
    config: &Config,
    prompt: &[u32],
    gpu: Option<&Gpu>,
    draft: Option<&DraftFiles>,
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
            let drafted = if draft.is_some() { args.draft_tokens } else { 0 };
            let pass = prompt.len().max(1 + drafted);
            let mut working = Working::of(config, context, plain_context, args.kv_type(), pass, threads);
            // Logits exist twice for a while, by rows and by vectors.
            let logits = Bytes::new(2 * (drafted * config.vocab * size_of::<f32>()) as u64);
            working.fixed = working.fixed + logits + draft.map_or(Bytes::ZERO, |draft| draft.memory(1));
            let budgets = budget::divide(wishes, &lengths, working, |device| {
                page_size(args, config, context, &builder, device).map(|size| size.0)
            });
            match (budgets, draft) {
                (Err(error), Some(draft)) => return Err(draft.no_room(1, error)),
                (budgets, _) => budgets?,
            }
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
