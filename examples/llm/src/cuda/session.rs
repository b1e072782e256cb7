//! The forward pass on a GPU: the same formulas in the same order as on the CPU, launched on one stream.
//!
//! Weights are in the runtime's pages and are pinned for the stream: it waits for those that are still on their way,
//! while the thread that launches goes on, and they stay for as long as the kernels that read them run. Keys and values
//! are in blocks of a pool (`paged.rs`), or with everything else (what a pass computes, logits) in one allocation of
//! plain device memory that the session makes when it begins.

use std::collections::HashSet;
use std::future::Future;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaSlice, DevicePtr};
use outcore::{Bytes, ErrorKind, StreamPin};
use parking_lot::Mutex;

use super::failed::failed;
use super::gpu::{Adopted, Gpu, Locked, copy_in, copy_out, thread_time};
use super::graphs::{Graph, Graphs};
use super::inputs::{Inputs, Span};
use super::kernels::{Choice, DeviceDraw, Element, HEAD_MAX};
use super::paged::{Blocks, Paged};
use super::places::Places;
use super::spans::{Spans, can_be_timed};
use super::step::{Piece, Schedule, Segment, Work};
use crate::architecture::Architecture;
use crate::config::Config;
use crate::dtype::{KvType, ON_GPU};
use crate::error::{Error, Result};
use crate::files::ModelFiles;
use crate::paged::{Frames, PagedWeights};
use crate::paged_kv::PagedKeys;
use crate::passes::{PassCounts, PassTime, Timing};
use crate::sampler::Sampler;
use crate::weights::{Step, Weights};

/// Most tokens that are computed together. The kernels count them in a dimension of the grid that ends at 65535.
const PASS_MAX: usize = 1 << 14;
/// While all weights are pinned, one pass in eight looks whether they may stay so.
const LOOK_EVERY: u64 = 8;

/// A model whose passes a GPU computes. Shared by any number of sessions.
#[derive(Debug)]
pub struct CudaModel {
    pub(super) arch: Architecture,
    pub(super) weights: Arc<PagedWeights>,
    /// The last one that was made.
    schedule: Mutex<Arc<Schedule>>,
    /// The GPU's stream as the weights' runtime knows it.
    stream: Adopted,
    pub(super) gpu: Arc<Gpu>,
    pub(super) frequencies: Vec<f32>,
}

impl CudaModel {
    /// Binds the tensors of `files` to `weights`, whose runtime has its pages on `gpu`. Reads no weight but the rotary
    /// factors of Llama 3 GGUF files.
    ///
    /// # Errors
    /// As [`Model::load`](crate::Model::load); `Unsupported` for weights of types that are not in
    /// [`ON_GPU`], for heads of more than 256 elements, and for weights that begin where the kernels cannot
    /// read them; `InvalidArgument` if the pages are not on `gpu`.
    pub fn load(files: &ModelFiles, weights: Arc<PagedWeights>, gpu: Arc<Gpu>) -> Result<Self> {
        if let Some(other) = files.tensors().iter().find(|info| !ON_GPU.contains(&info.dtype)) {
            let path = files.paths().get(other.file as usize).map_or(files.folder(), PathBuf::as_path).display();
            let known = ON_GPU.map(|known| known.to_string()).join(", ");
            return Err(Error::Unsupported(format!(
                "{path}: tensor {:?} has type {}, which the kernels of a GPU do not multiply: use --device host, or \
                 fetch the model in one of {known}",
                other.name, other.dtype
            )));
        }
        let arch = Architecture::new(files)?;
        if let Some(what) = arch.config.beyond_dense() {
            return Err(Error::Unsupported(format!("{what}: not supported on a GPU; use --device host")));
        }
        let head = arch.config.head_dim;
        if head > HEAD_MAX {
            return Err(Error::Unsupported(format!(
                "heads of {head} elements are not supported on a GPU, where they have at most {HEAD_MAX}: use --device host"
            )));
        }
        let frequencies = arch.frequencies(|info| {
            weights.will_use(&[(info.id, 0..1)]);
            let pin = weights.pin_device(info.id, 0..1)?;
            let mut bytes = vec![0; info.row_bytes as usize];
            pin.copy_out(0, 0, &mut bytes)?;
            let mut values = vec![0f32; info.cols as usize];
            crate::quants::dequantise(info.dtype, &bytes, &mut values);
            Ok(values)
        })?;
        let stream = Adopted::new(&gpu, weights.runtime())?;
        let schedule = Mutex::new(Arc::new(Schedule::new(&arch, &weights, weights.frames())?));
        Ok(Self { arch, weights, schedule, stream, gpu, frequencies })
    }

    /// How a pass is divided where there are `frames`: made again if the last one does not suit them.
    fn schedule(&self, frames: Frames) -> Result<Arc<Schedule>> {
        let mut schedule = self.schedule.lock();
        if !schedule.suits(frames) {
            *schedule = Arc::new(Schedule::new(&self.arch, &self.weights, frames)?);
        }
        Ok(schedule.clone())
    }

    /// Sizes and constants.
    pub fn config(&self) -> &Config {
        &self.arch.config
    }

    /// The GPU it runs on.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}

/// Where a session's keys and values are.
pub(super) enum Keys {
    /// In the session's memory, as one block of `capacity` tokens.
    Plain(Element),
    /// In blocks of a pool.
    Paged(Box<Paged>),
}

/// One sequence of tokens being read or written, on a GPU.
///
/// If the device budget holds all weights of the model, the session pins them once, as soon as they are there, and not
/// in every pass. They stay pinned until the session is [parked](Self::park) or dropped, or until a pass finds that the
/// budget became too small, or that somebody waits for frames. Without that, weights are pinned layer by layer, or in
/// parts of a layer, as many at a time as the budget allows when a pass begins.
pub struct CudaSession {
    pub(super) keys: Keys,
    pub(super) model: Arc<CudaModel>,
    /// How passes are divided, for the frames that there were when the session last looked, and how many these were.
    pub(super) schedule: Arc<Schedule>,
    frames: u64,
    /// Addresses within `memory`.
    pub(super) at: Places,
    memory: CudaSlice<u8>,
    /// All weights, while they are pinned for the session.
    resident: Option<StreamPin>,
    /// The last pass's logits, if they have been copied, and the token chosen from them.
    logits: Locked<f32>,
    has_logits: bool,
    draw: Locked<DeviceDraw>,
    token: Locked<u32>,
    pub(super) inputs: Inputs,
    /// Whether copies from locked memory may be on their way.
    in_flight: bool,
    graphs: Graphs,
    uses_graphs: bool,
    /// Whether a library's products compute the attention of the layer that is being launched.
    pub(super) by_products: AtomicBool,
    pub(super) capacity: usize,
    pass: usize,
    len: usize,
    last: PassTime,
    counts: PassCounts,
    timing: Timing,
    /// Passes, and what is launched behind them before the thread waits.
    spans: Spans,
    /// Pins of weights in these.
    stalls: Spans,
    /// Processor time that waits for the GPU have taken.
    polled: Duration,
}

impl std::fmt::Debug for CudaSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaSession").field("len", &self.len).field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

impl Drop for CudaSession {
    fn drop(&mut self) {
        // A pass that ended in an error may have left work on the stream, which uses this memory and holds pins. A
        // device that cannot be waited for is lost, and says so wherever it is asked again.
        if let Err(error) = self.model.stream.synchronize() {
            tracing::debug!(%error, "a session ends on a GPU that fails");
        }
        // The graphs end in this context.
        if let Err(error) = self.model.gpu.context.bind_to_thread() {
            tracing::debug!(?error, "a session ends on a GPU that fails");
        }
    }
}

impl CudaSession {
    /// Device memory that a session of `capacity` tokens takes, of which `pass` are computed together at most.
    ///
    /// # Errors
    /// `Invalid` if that has no size.
    pub fn memory(config: &Config, capacity: usize, pass: usize, kv: KvType) -> Result<Bytes> {
        let (capacity, pass) = clamped(config, capacity, pass);
        Ok(Bytes::new(Places::new(config, Some(capacity), pass, kv)?.total))
    }

    /// Device memory that a session takes beside the blocks of its pool, of which `pass` tokens are computed together
    /// at most.
    ///
    /// # Errors
    /// `Invalid` if that has no size.
    pub fn paged_memory(config: &Config, pass: usize) -> Result<Bytes> {
        let (_, pass) = clamped(config, config.context, pass);
        Ok(Bytes::new(Places::new(config, None, pass, KvType::F32)?.total))
    }

    /// An empty sequence that can grow to `capacity` tokens (to the model's context where that is less), with keys and
    /// values in elements of `kv`. A prompt of more than `pass` tokens takes several passes over the weights.
    ///
    /// # Errors
    /// `OutOfMemory` if the GPU has less than [`memory`](Self::memory) left; what the driver refuses.
    pub fn new(model: Arc<CudaModel>, capacity: usize, pass: usize, kv: KvType) -> Result<Self> {
        let (capacity, pass) = clamped(model.config(), capacity, pass);
        let element = match kv {
            KvType::F32 => Element::F32,
            KvType::F16 => Element::F16,
        };
        Self::begin(model, Keys::Plain(element), capacity, pass)
    }

    /// A sequence whose keys and values are in blocks of a pool, with the tokens that the pool found. It can grow to
    /// the model's context, which need not fit the GPU's memory. A prompt of more than `pass` tokens takes several
    /// passes over the weights. Neither that nor the room for blocks changes a bit of the logits, unless cuBLASLt
    /// multiplies.
    ///
    /// # Errors
    /// `Invalid` if the pool's layout is for another model or for elements other than F32 or F16, or if the pool's
    /// pages are on the host or on another GPU; `OutOfMemory` if the GPU has less than
    /// [`paged_memory`](Self::paged_memory) left; what the driver refuses.
    pub fn paged(model: Arc<CudaModel>, keys: PagedKeys, pass: usize) -> Result<Self> {
        let (capacity, pass) = clamped(model.config(), model.config().context, pass);
        let keys = Keys::Paged(Box::new(Paged::new(&model.gpu, model.config(), keys)?));
        Self::begin(model, keys, capacity, pass)
    }

    fn begin(model: Arc<CudaModel>, keys: Keys, capacity: usize, pass: usize) -> Result<Self> {
        let c = model.config();
        let (plain, kv) = match &keys {
            Keys::Plain(Element::F16) => (Some(capacity), KvType::F16),
            Keys::Plain(Element::F32) => (Some(capacity), KvType::F32),
            Keys::Paged(_) => (None, KvType::F32),
        };
        let places = Places::new(c, plain, pass, kv)?;
        let (gpu, what) = (&model.gpu, format!("take {} of GPU memory for one sequence", Bytes::new(places.total)));
        let memory = gpu.stream.alloc_zeros::<u8>(places.total as usize).map_err(|e| failed(what, e))?;
        let base = memory.device_ptr(&gpu.stream).0;
        let logits = Locked::new(gpu, c.vocab)?;
        let (draw, token) = (Locked::new(gpu, 1)?, Locked::new(gpu, 1)?);
        let inputs = Inputs::new(Locked::new(gpu, Inputs::words(pass))?, base + places.inputs);
        let len = match &keys {
            Keys::Plain(_) => 0,
            Keys::Paged(paged) => paged.keys.sequence().len() as usize,
        };
        let frames = model.weights.frames();
        let mut session = Self {
            keys,
            schedule: model.schedule(frames)?,
            frames: frames.count,
            at: places.at(base),
            memory,
            resident: None,
            logits,
            has_logits: false,
            draw,
            token,
            inputs,
            in_flight: false,
            graphs: Graphs::default(),
            uses_graphs: true,
            by_products: AtomicBool::new(false),
            capacity,
            pass,
            len,
            last: PassTime::default(),
            counts: PassCounts::default(),
            timing: Timing::Off,
            spans: Spans::default(),
            stalls: Spans::default(),
            polled: Duration::ZERO,
            model: model.clone(),
        };
        session.send_constants()?;
        Ok(session)
    }

    /// Sends what stays as it is for the session's life.
    fn send_constants(&mut self) -> Result<()> {
        let (gpu, values) = (&self.model.gpu, &self.model.frequencies);
        let mut numbers = Locked::new(gpu, values.len())?;
        numbers[..values.len()].copy_from_slice(values);
        copy_in(gpu, &numbers[..values.len()], self.at.frequencies)?;
        let mut table = Locked::new(gpu, 1)?;
        table[0] = self.at.keys;
        copy_in(gpu, &table[..], self.at.table)?;
        // So that the locked memory may go.
        gpu.finish()
    }

    /// Where the session's memory begins.
    fn at_start(&self) -> u64 {
        self.memory.device_ptr(&self.model.gpu.stream).0
    }

    /// Another session with the same tokens and logits, which shares their keys and values. `None` if they are in no
    /// pool.
    ///
    /// # Errors
    /// As for [`paged`](Self::paged).
    pub fn fork(&mut self) -> Result<Option<Self>> {
        let Keys::Paged(paged) = &mut self.keys else { return Ok(None) };
        let keys = Keys::Paged(Box::new(paged.fork(&self.model.gpu, self.model.config())?));
        let mut fork = Self::begin(self.model.clone(), keys, self.capacity, self.pass)?;
        let (gpu, copying) = (&self.model.gpu, |e| failed("copy logits to a fork", e));
        let bytes = self.model.config().vocab * size_of::<f32>();
        let range = |session: &Self| {
            let start = (session.at.logits - session.at_start()) as usize;
            start..start + bytes
        };
        let (from, to) = (range(self), range(&fork));
        gpu.stream.memcpy_dtod(&self.memory.slice(from), &mut fork.memory.slice_mut(to)).map_err(copying)?;
        fork.uses_graphs = self.uses_graphs;
        fork.timing = self.timing;
        Ok(Some(fork))
    }

    /// Forgets everything after the first `len` tokens.
    ///
    /// # Errors
    /// As for [`Sequence::truncate`](outcore_kv::Sequence::truncate).
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        let len = self.len.min(len);
        if let Keys::Paged(paged) = &mut self.keys {
            paged.truncate(len)?;
        }
        self.len = len;
        Ok(())
    }

    /// Tells that the session is not needed for some time: its blocks leave the GPU, and come back with the next pass.
    /// See [`Sequence::park`](outcore_kv::Sequence::park). Keys and values that are in no pool stay where they are.
    /// Weights that are pinned for the session are unpinned.
    ///
    /// # Errors
    /// As for that; what the GPU ended with.
    pub fn park(&mut self) -> Result<()> {
        self.resident = None;
        // So that no block is still pinned for a kernel.
        self.model.stream.synchronize()?;
        match &mut self.keys {
            Keys::Plain(_) => Ok(()),
            Keys::Paged(paged) => paged.park(),
        }
    }

    /// Tokens read so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token was read yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The model.
    pub fn model(&self) -> &Arc<CudaModel> {
        &self.model
    }

    /// Its keys and values, if they are in a pool.
    pub fn paged_keys(&self) -> Option<&PagedKeys> {
        match &self.keys {
            Keys::Plain(_) => None,
            Keys::Paged(paged) => Some(&paged.keys),
        }
    }

    /// What the last pass took.
    pub fn last_pass(&self) -> PassTime {
        self.last
    }

    /// Whether passes of one token are launched as graphs, which they are at first. It changes no bit of the results.
    pub fn use_graphs(&mut self, whether: bool) {
        self.uses_graphs = whether;
    }

    /// What is timed on the GPU from now on; nothing at first. It changes no bit of the results.
    pub fn time(&mut self, what: Timing) {
        self.timing = if can_be_timed(&self.model.gpu) { what } else { Timing::Off };
    }

    /// What the host did for the passes so far, and what the GPU read for them.
    pub fn counts(&self) -> PassCounts {
        self.counts
    }

    /// Reads `tokens`; returns the logits after the last one (`vocab` numbers). Waits for the GPU once, at the end.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub fn forward(&mut self, tokens: &[u32]) -> Result<&[f32]> {
        self.counted(|session| {
            session.passes(tokens)?;
            session.fetch_logits()
        })?;
        self.logits()
    }

    /// Reads `tokens`, and returns when all of it has been launched.
    ///
    /// # Errors
    /// `Invalid` for tokens that the session has no room for or the model does not know; what making weights resident
    /// ends with, and what the driver refuses. After an error the session is as it was before the call, unless the GPU
    /// is lost.
    pub fn read(&mut self, tokens: &[u32]) -> Result<()> {
        self.counted(|session| {
            session.passes(tokens)?;
            session.spans.end(&session.model.gpu)
        })
    }

    /// Reads `tokens`, and chooses the token that follows: [`read`](Self::read) and [`sample`](Self::sample). Waits for
    /// the GPU once, and copies no logits, unless `sampler` draws from the best few only.
    ///
    /// # Errors
    /// As for these.
    pub fn next(&mut self, tokens: &[u32], sampler: &mut Sampler) -> Result<u32> {
        self.counted(|session| {
            session.passes(tokens)?;
            session.choose(sampler)
        })
    }

    /// The logits after the last pass. Copies them from the GPU if that was not done yet, and waits for it then.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn logits(&mut self) -> Result<&[f32]> {
        if !self.has_logits {
            self.counted(Self::fetch_logits)?;
        }
        Ok(&self.logits[..self.model.config().vocab])
    }

    /// Chooses the token that follows the last pass, on the GPU unless `sampler` draws from the best few only.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn sample(&mut self, sampler: &mut Sampler) -> Result<u32> {
        self.counted(|session| session.choose(sampler))
    }

    /// Does `what`, and adds what it took to the counts.
    fn counted<T>(&mut self, what: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let gpu = self.model.gpu.clone();
        let (launches, waits) = (gpu.kernels.launched(), gpu.waits());
        let (host, polled) = (thread_time(), self.polled);
        let done = what(self);
        if done.is_err() {
            // A part of it may still be on the stream. How long that takes says nothing of a pass.
            self.spans.abandon();
            self.stalls.abandon();
        }
        let polled = self.polled.saturating_sub(polled);
        let counts = &mut self.counts;
        counts.launches += gpu.kernels.launched() - launches;
        counts.synchronisations += gpu.waits() - waits;
        counts.host += thread_time().saturating_sub(host).saturating_sub(polled);
        done
    }

    /// Reads `tokens` in passes.
    fn passes(&mut self, tokens: &[u32]) -> Result<()> {
        let started = Instant::now();
        let model = Arc::clone(&self.model);
        model.arch.check_pass(tokens, self.len, self.capacity)?;
        let end = self.len + tokens.len();
        if let Keys::Paged(paged) = &mut self.keys {
            paged.keys.append(tokens)?;
        }
        let (weights, mut past, mut blocks) = (model.weights.waited(), self.len, Duration::ZERO);
        let done: Result<()> = tokens.chunks(self.pass).try_for_each(|part| {
            blocks += self.pass(&model, part, past)?;
            past += part.len();
            Ok(())
        });
        match (&mut self.keys, &done) {
            (Keys::Plain(_), _) => {}
            (Keys::Paged(paged), Ok(())) => paged.commit(self.len, end)?,
            (Keys::Paged(paged), Err(_)) => paged.truncate(self.len)?,
        }
        done?;
        (self.len, self.has_logits) = (end, false);
        let waited = blocks + model.weights.waited().saturating_sub(weights);
        self.last = PassTime { total: started.elapsed(), waited };
        Ok(())
    }

    /// Launches the pass of `tokens`, which are at position `past` and after it. Returns how long this thread waited
    /// for blocks of keys and values.
    fn pass(&mut self, model: &CudaModel, tokens: &[u32], past: usize) -> Result<Duration> {
        let span = Span { m: tokens.len() as u32, past: past as u32 };
        if self.in_flight {
            self.finish()?;
        }
        self.begin_span()?;
        self.look()?;
        let schedule = self.schedule.clone();
        let c = model.config();
        let positions = 2 * (c.layers * c.kv_heads * c.head_dim * (past + tokens.len())) as u64;
        self.counts.passes += 1;
        let read = schedule.bytes + positions * self.keys.element_bytes();
        self.counts.read = self.counts.read + Bytes::new(read);
        self.send(tokens, span)?;
        let resident = self.resident.is_some();
        if resident && matches!(self.keys, Keys::Plain(_)) {
            return self.resident_pass(model, &schedule, span);
        }
        let mut waited = Duration::ZERO;
        if resident {
            model.weights.check_cancelled()?;
            self.embed(0..span.m, span.m)?;
        } else {
            let mut order: Vec<Step> = tokens.iter().map(|token| model.arch.embedding_step(*token)).collect();
            order.sort_unstable_by_key(|step| step.1.start);
            order.dedup();
            order.extend_from_slice(&schedule.cycle);
            model.weights.will_use(&order);
            self.pin_and_embed(model, tokens)?;
        }
        for (nth, segment) in schedule.segments.iter().enumerate() {
            let pin = if resident { None } else { self.pin(model, &segment.parts)? };
            waited += self.segment(model, nth, segment, span)?;
            drop(pin);
        }
        Ok(waited)
    }

    /// Sends a pass's tokens and positions, and the addresses of blocks that have changed. Earlier copies have ended.
    fn send(&mut self, tokens: &[u32], span: Span) -> Result<()> {
        self.in_flight = true;
        self.inputs.set(tokens, span);
        if let Keys::Paged(paged) = &mut self.keys
            && let Some((first, addresses)) = paged.changed((span.past + span.m) as usize)?
        {
            copy_in(&self.model.gpu, addresses, self.at.table + 8 * first as u64)?;
        }
        // Otherwise they are the first node of the graph.
        if !self.is_one_graph(span) {
            self.inputs.send(&self.model.gpu, span.m)?;
        }
        Ok(())
    }

    /// Whether a pass is one graph.
    fn is_one_graph(&self, span: Span) -> bool {
        self.resident.is_some() && self.uses_graphs && span.m == 1 && matches!(self.keys, Keys::Plain(_))
    }

    /// A pass with all weights pinned, and keys and values in the session's memory.
    fn resident_pass(&mut self, model: &CudaModel, schedule: &Schedule, span: Span) -> Result<Duration> {
        model.weights.check_cancelled()?;
        let launch = |session: &Self| {
            session.embed(0..span.m, span.m)?;
            let each = |segment| session.launch(segment, span, Blocks::Pinned).map(drop);
            schedule.segments.iter().try_for_each(each)
        };
        if !self.is_one_graph(span) {
            launch(self)?;
            return Ok(Duration::ZERO);
        }
        if self.graphs.pass.is_none() {
            let captured = Graph::capture(&model.gpu, || {
                self.inputs.send(&model.gpu, span.m)?;
                launch(self)
            })?;
            self.graphs.pass = Some(captured);
        }
        if let Some(graph) = &self.graphs.pass {
            start(graph, &mut self.counts)?;
        }
        Ok(Duration::ZERO)
    }

    /// Launches a segment, whose weights are pinned: as a graph if it is for one token and the blocks that it needs can
    /// be pinned before.
    fn segment(&mut self, model: &CudaModel, nth: usize, segment: &Segment, span: Span) -> Result<Duration> {
        let attends = segment.pieces.iter().find_map(|piece| match piece {
            Piece::Whole(Work::Attend(layer)) | Piece::Rest(Work::Attend(layer)) => Some(*layer as u32),
            _ => None,
        });
        let as_graph = self.uses_graphs && span.m == 1;
        let (mut pinned, mut waited) = (None, Duration::ZERO);
        if let (Keys::Paged(paged), Some(layer)) = (&self.keys, attends) {
            let pages = if self.resident.is_some() { self.schedule.all_pages } else { segment.pages };
            if !as_graph || !paged.fits(span, pages, self.frames) {
                return self.launch(segment, span, Blocks::InWaves);
            }
            let (blocks, time) = paged.pin(layer, span)?;
            (pinned, waited) = (Some(blocks), time);
        }
        let done = if as_graph { self.segment_graph(model, nth, segment, span) } else { self.launched(segment, span) };
        // Also where that failed: a part may have been launched.
        if let (Keys::Paged(paged), Some(pinned)) = (&self.keys, &mut pinned) {
            paged.end(pinned)?;
        }
        done?;
        Ok(waited)
    }

    fn launched(&self, segment: &Segment, span: Span) -> Result<()> {
        self.launch(segment, span, Blocks::Pinned).map(drop)
    }

    fn segment_graph(&mut self, model: &CudaModel, nth: usize, segment: &Segment, span: Span) -> Result<()> {
        if self.graphs.segments.is_empty() {
            self.graphs.segments.resize_with(self.schedule.segments.len(), || None);
        }
        if self.graphs.segments.get(nth).is_some_and(Option::is_none) {
            let captured = Graph::capture(&model.gpu, || self.launched(segment, span))?;
            self.graphs.segments[nth] = Some(captured);
        }
        match self.graphs.segments.get(nth) {
            Some(Some(graph)) => start(graph, &mut self.counts),
            _ => self.launched(segment, span),
        }
    }

    /// Pins parts of weights for the stream, if there are any. When the pin is dropped, the parts stay pinned until
    /// what was launched so far has ended. Nobody waits for that.
    fn pin(&mut self, model: &CudaModel, parts: &[outcore::Tensor]) -> Result<Option<StreamPin>> {
        if parts.is_empty() {
            return Ok(None);
        }
        self.counts.pins += 1;
        if self.timing < Timing::Stalls {
            return model.weights.pin_parts_on(parts, &model.stream).map(Some);
        }
        self.stalls.begin(&model.gpu)?;
        let pin = model.weights.pin_parts_on(parts, &model.stream)?;
        self.stalls.end(&model.gpu)?;
        Ok(Some(pin))
    }

    /// Begins the span of a pass, or of what is launched behind one that was waited for.
    fn begin_span(&mut self) -> Result<()> {
        if self.timing == Timing::Off { Ok(()) } else { self.spans.begin(&self.model.gpu) }
    }

    /// The embeddings of `tokens` to `x`, as many at a time as a segment's frames hold.
    fn pin_and_embed(&mut self, model: &CudaModel, tokens: &[u32]) -> Result<()> {
        let schedule = self.schedule.clone();
        let mut first = 0;
        while first < tokens.len() {
            let (mut count, mut parts, mut used) = (0, Vec::new(), HashSet::new());
            for token in &tokens[first..] {
                let part = model.weights.parts(&[model.arch.embedding_step(*token)])?;
                let fresh: Vec<u64> = schedule.pages_of(&part).filter(|page| !used.contains(page)).collect();
                if count > 0 && (used.len() + fresh.len()) as u64 > schedule.most {
                    break;
                }
                used.extend(fresh);
                parts.extend(part);
                count += 1;
            }
            let pin = self.pin(model, &parts)?;
            self.embed(first as u32..(first + count) as u32, tokens.len() as u32)?;
            drop(pin);
            first += count;
        }
        Ok(())
    }

    /// Looks how many frames there are, for the pass that begins.
    fn look(&mut self) -> Result<()> {
        if self.resident.is_some() && !self.counts.passes.is_multiple_of(LOOK_EVERY) {
            return Ok(());
        }
        let frames = self.model.weights.frames();
        self.divide(frames)?;
        self.keep_all(frames)
    }

    /// Has passes divided for `frames`. Earlier passes have ended.
    fn divide(&mut self, frames: Frames) -> Result<()> {
        let schedule = self.model.schedule(frames)?;
        if !schedule.launches_as(&self.schedule) {
            self.model.gpu.context.bind_to_thread().map_err(|e| failed("drop the graphs of passes", e))?;
            self.graphs.pass = None;
            self.graphs.segments.clear();
        }
        (self.schedule, self.frames) = (schedule, frames.count);
        Ok(())
    }

    /// Pins all weights for the session if they fit and are there; ends these pins where they are in the way.
    fn keep_all(&mut self, frames: Frames) -> Result<()> {
        let (model, schedule) = (self.model.clone(), self.schedule.clone());
        let blocks = match &self.keys {
            Keys::Plain(_) => 0,
            Keys::Paged(paged) => paged.pages,
        };
        if frames.wanted || frames.count < schedule.all_pages + blocks {
            self.resident = None;
            return Ok(());
        }
        if self.resident.is_some() {
            return Ok(());
        }
        let runtime = model.weights.runtime();
        let mut request = pin!(runtime.pin(&schedule.all).on(&model.stream));
        self.resident = match request.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(pin)) => {
                self.counts.pins += 1;
                Some(pin)
            }
            // Not all of it is there: this pass takes what it needs, and the rest is on its way.
            Poll::Pending => None,
            Poll::Ready(Err(error)) if error.kind() == ErrorKind::BudgetTooSmall => None,
            Poll::Ready(Err(error)) => return Err(error.into()),
        };
        Ok(())
    }

    fn choose(&mut self, sampler: &mut Sampler) -> Result<u32> {
        let since = Instant::now();
        let Some(draw) = sampler.draw() else {
            if !self.has_logits {
                self.fetch_logits()?;
            }
            return Ok(sampler.sample(&self.logits[..self.model.config().vocab]));
        };
        // The copies of the choice before have ended: it was waited for.
        self.draw[0] = draw.into();
        self.begin_span()?;
        let model = self.model.clone();
        if self.uses_graphs {
            if self.graphs.choice.is_none() {
                self.graphs.choice = Some(Graph::capture(&model.gpu, || self.launch_choice())?);
            }
            if let Some(graph) = &self.graphs.choice {
                start(graph, &mut self.counts)?;
            }
        } else {
            self.launch_choice()?;
        }
        self.finish()?;
        self.last.total += since.elapsed();
        Ok(self.token[0])
    }

    fn launch_choice(&self) -> Result<()> {
        let (gpu, at) = (&self.model.gpu, &self.at);
        copy_in(gpu, &self.draw[..], at.draw)?;
        gpu.kernels.choose_next(&Choice {
            logits: at.logits,
            n: self.model.config().vocab as u32,
            m: 1,
            draws: at.draw,
            tokens: self.inputs.tokens(1),
            positions: self.inputs.positions(1),
            said: at.token,
            ring: 1,
        })?;
        copy_out(at.token, &self.token)
    }

    fn fetch_logits(&mut self) -> Result<()> {
        let since = Instant::now();
        self.begin_span()?;
        copy_out(self.at.logits, &self.logits)?;
        self.finish()?;
        self.has_logits = true;
        self.last.total += since.elapsed();
        Ok(())
    }

    /// Waits for everything that was launched, and reads the times of it.
    fn finish(&mut self) -> Result<()> {
        self.spans.end(&self.model.gpu)?;
        let (since, polled) = (Instant::now(), thread_time());
        let finished = self.model.gpu.finish();
        self.polled += thread_time().saturating_sub(polled);
        self.counts.waiting += since.elapsed();
        finished?;
        self.in_flight = false;
        self.counts.gpu += self.spans.take()?;
        self.counts.stalled += self.stalls.take()?;
        Ok(())
    }
}

impl Keys {
    fn element_bytes(&self) -> u64 {
        match self {
            Self::Plain(element) => element.bytes(),
            Self::Paged(paged) => paged.element.bytes(),
        }
    }
}

fn start(graph: &Graph, counts: &mut PassCounts) -> Result<()> {
    graph.launch()?;
    counts.graph_launches += 1;
    counts.graph_nodes += graph.nodes;
    Ok(())
}

/// What a session can have: at most the model's context, and a pass that the kernels can count.
fn clamped(config: &Config, capacity: usize, pass: usize) -> (usize, usize) {
    let capacity = capacity.min(config.context);
    (capacity, pass.clamp(1, PASS_MAX).min(capacity.max(1)))
}
