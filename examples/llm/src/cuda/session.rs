//! The forward pass on a GPU: the same formulas in the same order as on the CPU, launched on one stream.
//!
//! Weights are in the runtime's pages and are pinned for the stream: it waits for those that are still on their way,
//! while the thread that launches goes on, and they stay for as long as the kernels that read them run. Keys and values
//! are in blocks of a pool (`paged.rs`), or with everything else (what a pass computes, logits) in one allocation of
//! plain device memory that the session makes when it begins.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaSlice, DevicePtr, PinnedHostSlice};
use outcore::{Bytes, StreamPin};

use super::failed::failed;
use super::gpu::{Adopted, Gpu};
use super::kernels::{Attention, Cache, HEAD_MAX, Product};
use super::paged::{Operands, Paged};
use super::prompt::{FEW, Input, Room};
use crate::architecture::{Architecture, Linear, Op, tiles};
use crate::config::Config;
use crate::dtype::WeightType;
use crate::error::{Error, Result};
use crate::files::ModelFiles;
use crate::model::PassTime;
use crate::paged::PagedWeights;
use crate::paged_kv::PagedKeys;
use crate::sampler::Sampler;
use crate::weights::{WeightInfo, Weights};

/// Most tokens that are computed together. The kernels count them in a dimension of the grid that ends at 65535.
const PASS_MAX: usize = 1 << 14;
const FLOAT: u64 = size_of::<f32>() as u64;
/// Alignment of everything in the session's memory, in bytes: a transaction of the GPU's memory.
const ALIGNMENT: u128 = 256;

/// A model whose passes a GPU computes. Shared by any number of sessions.
#[derive(Debug)]
pub struct CudaModel {
    arch: Architecture,
    weights: Arc<PagedWeights>,
    /// The GPU's stream as the weights' runtime knows it.
    stream: Adopted,
    gpu: Arc<Gpu>,
    frequencies: Vec<f32>,
}

impl CudaModel {
    /// Binds the tensors of `files` to `weights`, whose runtime has its pages on `gpu`. Reads no weight but the rotary
    /// factors of Llama 3 GGUF files.
    ///
    /// # Errors
    /// As [`Model::load`](crate::Model::load); `Unsupported` for heads of more than 256 elements; `InvalidArgument` if
    /// the pages are not on `gpu`.
    pub fn load(files: &ModelFiles, weights: Arc<PagedWeights>, gpu: Arc<Gpu>) -> Result<Self> {
        let arch = Architecture::new(files)?;
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
            crate::kernels::dequantise(info.dtype, &bytes, &mut values);
            Ok(values)
        })?;
        let stream = Adopted::new(&gpu, weights.runtime())?;
        Ok(Self { arch, weights, stream, gpu, frequencies })
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

/// Where things lie in a session's memory, in bytes from its start. `[..]` are the shapes, in elements.
#[derive(Clone, Copy, Debug)]
struct Places {
    /// The residual stream: `[pass x dim]`.
    x: u64,
    normed: u64,
    q: u64,
    k: u64,
    v: u64,
    mixed: u64,
    gate: u64,
    up: u64,
    /// A norm's or a bias's numbers.
    vector: u64,
    frequencies: u64,
    logits: u64,
    token: u64,
    /// `[layer][kv_head][capacity][head_dim]`; nothing where keys and values are in blocks.
    keys: u64,
    values: u64,
    /// Where they are in blocks, what attention keeps between waves: `[pass][head][largest score, sum of shares]`.
    state: u64,
    prompt: Room,
    total: u64,
}

impl Places {
    /// For keys and values of `capacity` tokens; for none where they are in blocks.
    fn new(c: &Config, capacity: Option<usize>, pass: usize) -> Result<Self> {
        let (mut end, mut too_large) = (0u128, false);
        let mut take = |extents: &[usize], bytes: u64| {
            let size = extents.iter().try_fold(u128::from(bytes), |n, extent| n.checked_mul(*extent as u128));
            let start = end;
            match size.and_then(|size| end.checked_add(size.next_multiple_of(ALIGNMENT))) {
                Some(next) if next <= i64::MAX as u128 => end = next,
                _ => too_large = true,
            }
            start as u64
        };
        let (q_dim, kv_dim) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let widest = c.dim.max(q_dim).max(kv_dim).max(c.ffn_dim);
        let (plain, waves) = capacity.map_or((0, pass), |capacity| (capacity, 0));
        let places = Self {
            x: take(&[pass, c.dim], FLOAT),
            normed: take(&[pass, c.dim], FLOAT),
            q: take(&[pass, q_dim], FLOAT),
            k: take(&[pass, kv_dim], FLOAT),
            v: take(&[pass, kv_dim], FLOAT),
            mixed: take(&[pass, q_dim], FLOAT),
            gate: take(&[pass, c.ffn_dim], FLOAT),
            up: take(&[pass, c.ffn_dim], FLOAT),
            vector: take(&[widest], FLOAT),
            frequencies: take(&[c.rope_frequencies.len()], FLOAT),
            logits: take(&[c.vocab], FLOAT),
            token: take(&[1], FLOAT),
            keys: take(&[c.layers, c.kv_heads, plain, c.head_dim], FLOAT),
            values: take(&[c.layers, c.kv_heads, plain, c.head_dim], FLOAT),
            state: take(&[waves, c.heads, 2], FLOAT),
            prompt: Room::new(c, pass, take),
            total: 0,
        };
        let capacity = capacity.unwrap_or(c.context);
        if too_large || u32::try_from(capacity).is_err() {
            return Err(Error::Invalid(format!("a context of {capacity} is too large")));
        }
        Ok(Self { total: end as u64, ..places })
    }

    /// The places as addresses, for memory that begins at `base`.
    fn at(self, base: u64) -> Self {
        let Self { x, normed, q, k, v, mixed, gate, up, vector, frequencies, .. } = self;
        let Self { logits, token, keys, values, state, prompt, total, .. } = self;
        Self {
            x: base + x,
            normed: base + normed,
            q: base + q,
            k: base + k,
            v: base + v,
            mixed: base + mixed,
            gate: base + gate,
            up: base + up,
            vector: base + vector,
            frequencies: base + frequencies,
            logits: base + logits,
            token: base + token,
            keys: base + keys,
            values: base + values,
            state: base + state,
            prompt: prompt.at(base),
            total,
        }
    }
}

/// Rows on the GPU, for kernels on the model's stream. When this is dropped, the rows stay pinned until what was
/// launched so far has ended. Nobody waits for that.
struct Pinned {
    address: u64,
    _pin: StreamPin,
}

/// Where a session's keys and values are.
enum Keys {
    /// In the session's memory, with room for `capacity` tokens.
    Plain,
    /// In blocks of a pool.
    Paged(Paged),
}

/// One sequence of tokens being read or written, on a GPU.
pub struct CudaSession {
    keys: Keys,
    model: Arc<CudaModel>,
    /// Addresses within `memory`.
    at: Places,
    memory: CudaSlice<u8>,
    /// The last pass's logits, and the token chosen from them.
    logits: PinnedHostSlice<f32>,
    token: PinnedHostSlice<u32>,
    capacity: usize,
    pass: usize,
    len: usize,
    last: PassTime,
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
    }
}

impl CudaSession {
    /// Device memory that a session of `capacity` tokens takes, of which `pass` are computed together at most.
    ///
    /// # Errors
    /// `Invalid` if that has no size.
    pub fn memory(config: &Config, capacity: usize, pass: usize) -> Result<Bytes> {
        let (capacity, pass) = clamped(config, capacity, pass);
        Ok(Bytes::new(Places::new(config, Some(capacity), pass)?.total))
    }

    /// Device memory that a session takes beside the blocks of its pool, of which `pass` tokens are computed together
    /// at most.
    ///
    /// # Errors
    /// `Invalid` if that has no size.
    pub fn paged_memory(config: &Config, pass: usize) -> Result<Bytes> {
        let (_, pass) = clamped(config, config.context, pass);
        Ok(Bytes::new(Places::new(config, None, pass)?.total))
    }

    /// An empty sequence that can grow to `capacity` tokens (to the model's context where that is less). A prompt of
    /// more than `pass` tokens takes several passes over the weights.
    ///
    /// # Errors
    /// `OutOfMemory` if the GPU has less than [`memory`](Self::memory) left; what the driver refuses.
    pub fn new(model: Arc<CudaModel>, capacity: usize, pass: usize) -> Result<Self> {
        let (capacity, pass) = clamped(model.config(), capacity, pass);
        Self::begin(model, Keys::Plain, capacity, pass)
    }

    /// A sequence whose keys and values are in blocks of a pool, with the tokens that the pool found. It can grow to
    /// the model's context, which need not fit the GPU's memory. A prompt of more than `pass` tokens takes several
    /// passes over the weights. Neither that nor the room for blocks changes a bit of the logits, unless
    /// cuBLASLt multiplies.
    ///
    /// # Errors
    /// `Invalid` if the pool's layout is for another model or for elements other than F32, or if the pool's pages are
    /// on the host or on another GPU; `OutOfMemory` if the GPU has less than [`paged_memory`](Self::paged_memory) left;
    /// what the driver refuses.
    pub fn paged(model: Arc<CudaModel>, keys: PagedKeys, pass: usize) -> Result<Self> {
        let (capacity, pass) = clamped(model.config(), model.config().context, pass);
        let keys = Keys::Paged(Paged::new(&model.gpu, model.config(), keys)?);
        Self::begin(model, keys, capacity, pass)
    }

    fn begin(model: Arc<CudaModel>, keys: Keys, capacity: usize, pass: usize) -> Result<Self> {
        let c = model.config();
        let places = Places::new(c, matches!(keys, Keys::Plain).then_some(capacity), pass)?;
        let (gpu, what) = (&model.gpu, format!("take {} of GPU memory for one sequence", Bytes::new(places.total)));
        let memory = gpu.stream.alloc_zeros::<u8>(places.total as usize).map_err(|e| failed(what, e))?;
        let base = memory.device_ptr(&gpu.stream).0;
        let locked = |e| failed("take locked host memory for logits", e);
        // SAFETY: the memory is written before it is read: by the lines below, and by the copies of each pass.
        let mut logits = unsafe { gpu.context.alloc_pinned_with_flags::<f32>(c.vocab.max(model.frequencies.len()), 0) }
            .map_err(locked)?;
        // SAFETY: as above.
        let mut token = unsafe { gpu.context.alloc_pinned_with_flags::<u32>(1, 0) }.map_err(locked)?;
        logits.as_mut_slice().map_err(locked)?.fill(0.0);
        token.as_mut_slice().map_err(locked)?.fill(0);
        let len = match &keys {
            Keys::Plain => 0,
            Keys::Paged(paged) => paged.keys.sequence().len() as usize,
        };
        let mut session = Self {
            keys,
            at: places.at(base),
            memory,
            logits,
            token,
            capacity,
            pass,
            len,
            last: PassTime::default(),
            model: model.clone(),
        };
        session.send_frequencies(places.frequencies as usize)?;
        Ok(session)
    }

    fn send_frequencies(&mut self, place: usize) -> Result<()> {
        let (gpu, values) = (&self.model.gpu, &self.model.frequencies);
        let sending = |e| failed("copy the rotary frequencies to the GPU", e);
        self.logits.as_mut_slice().map_err(sending)?[..values.len()].copy_from_slice(values);
        let mut to = self.memory.slice_mut(place..place + size_of_val(&values[..]));
        // SAFETY: the bytes are the session's, aligned for f32, and any bytes are numbers.
        let Some(mut to) = (unsafe { to.transmute_mut::<f32>(values.len()) }) else { return Ok(()) };
        let from = self.logits.as_slice().map_err(sending)?;
        // Waits, so that the locked memory may be used for logits.
        let copied = gpu.stream.memcpy_htod(&from[..values.len()], &mut to);
        copied.map_err(sending)?;
        gpu.finish()
    }

    /// Another session with the same tokens and logits, which shares their keys and values. `None` if they are in no
    /// pool.
    ///
    /// # Errors
    /// As for [`paged`](Self::paged).
    pub fn fork(&mut self) -> Result<Option<Self>> {
        let Keys::Paged(paged) = &mut self.keys else { return Ok(None) };
        let keys = Keys::Paged(paged.fork(&self.model.gpu)?);
        let mut fork = Self::begin(self.model.clone(), keys, self.capacity, self.pass)?;
        let (gpu, copying) = (&self.model.gpu, |e| failed("copy logits to a fork", e));
        let bytes = self.model.config().vocab * size_of::<f32>();
        let range = |session: &Self| {
            let start = (session.at.logits - session.memory.device_ptr(&gpu.stream).0) as usize;
            start..start + bytes
        };
        let (from, to) = (range(self), range(&fork));
        gpu.stream.memcpy_dtod(&self.memory.slice(from), &mut fork.memory.slice_mut(to)).map_err(copying)?;
        fork.fetch_logits()?;
        Ok(Some(fork))
    }

    /// Forgets everything after the first `len` tokens.
    ///
    /// # Errors
    /// As for [`Sequence::truncate`](outcore_kv::Sequence::truncate).
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        let len = self.len.min(len);
        if let Keys::Paged(paged) = &mut self.keys {
            paged.keys.truncate(len)?;
        }
        self.len = len;
        Ok(())
    }

    /// Tells that the session is not needed for some time: its blocks leave the GPU, and come back with the next pass.
    /// See [`Sequence::park`](outcore_kv::Sequence::park). Does nothing if its keys and values are in no pool.
    ///
    /// # Errors
    /// As for that; what the GPU ended with.
    pub fn park(&mut self) -> Result<()> {
        // So that no block is still pinned for a kernel.
        self.model.stream.synchronize()?;
        match &mut self.keys {
            Keys::Plain => Ok(()),
            Keys::Paged(paged) => paged.keys.park(),
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

    /// What the last pass took.
    pub fn last_pass(&self) -> PassTime {
        self.last
    }

    /// Reads `tokens`; returns the logits after the last one (`vocab` numbers). Waits for the GPU once, at the end.
    ///
    /// # Errors
    /// `Invalid` for tokens that the session has no room for or the model does not know; what making weights resident
    /// ends with, and what the driver refuses. After an error the session is as it was before the call, unless the GPU
    /// is lost.
    pub fn forward(&mut self, tokens: &[u32]) -> Result<&[f32]> {
        let started = Instant::now();
        let model = Arc::clone(&self.model);
        model.arch.check_pass(tokens, self.len, self.capacity)?;
        let end = self.len + tokens.len();
        if let Keys::Paged(paged) = &mut self.keys {
            paged.keys.append(tokens)?;
        }
        let done = self.passes(&model, tokens);
        match (&mut self.keys, &done) {
            (Keys::Plain, _) => {}
            (Keys::Paged(paged), Ok(_)) => paged.keys.commit(end)?,
            (Keys::Paged(paged), Err(_)) => paged.keys.truncate(self.len)?,
        }
        let waited = done?;
        self.len = end;
        self.last = PassTime { total: started.elapsed(), waited };
        let logits = self.logits.as_slice().map_err(|e| failed("wait for logits", e))?;
        Ok(&logits[..model.config().vocab])
    }

    /// Reads `tokens` in passes, and fetches the logits. Returns how long this thread waited for pages.
    fn passes(&mut self, model: &CudaModel, tokens: &[u32]) -> Result<Duration> {
        let weights = model.weights.waited();
        let (mut past, mut blocks) = (self.len, Duration::ZERO);
        for part in tokens.chunks(self.pass) {
            blocks += self.pass(part, past)?;
            past += part.len();
        }
        self.fetch_logits()?;
        Ok(blocks + model.weights.waited().saturating_sub(weights))
    }

    /// Chooses the token that follows the last pass, on the GPU unless `sampler` draws from the best few only.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn sample(&mut self, sampler: &mut Sampler) -> Result<u32> {
        let vocab = self.model.config().vocab;
        let choosing = |e| failed("choose a token", e);
        let Some(draw) = sampler.draw() else {
            return Ok(sampler.sample(&self.logits.as_slice().map_err(choosing)?[..vocab]));
        };
        let gpu = &self.model.gpu;
        gpu.kernels.choose(self.at.logits, self.at.token, vocab as u32, draw)?;
        copy_out(gpu, self.at.token, &mut self.token, 1)?;
        gpu.finish()?;
        Ok(self.token.as_slice().map_err(choosing)?[0])
    }

    fn fetch_logits(&mut self) -> Result<()> {
        let gpu = &self.model.gpu;
        copy_out(gpu, self.at.logits, &mut self.logits, self.model.config().vocab)?;
        gpu.finish()
    }

    /// Rows of a weight, on the GPU.
    fn pin(&self, info: &WeightInfo, rows: Range<u64>) -> Result<Pinned> {
        let pin = self.model.weights.pin_device_on(info.id, rows, &self.model.stream)?;
        let pinned = Pinned { address: pin.address(0).unwrap_or(0), _pin: pin };
        let plain = matches!(info.dtype, WeightType::F32 | WeightType::F16 | WeightType::BF16);
        if !plain && !pinned.address.is_multiple_of(2) {
            return Err(Error::Unsupported(format!(
                "tensor {:?} begins at an odd byte of its file, where the GPU's kernels cannot read {}: use --device host",
                info.name, info.dtype
            )));
        }
        Ok(pinned)
    }

    /// A vector's numbers, until the next call.
    fn vector(&self, info: &WeightInfo) -> Result<u64> {
        let pin = self.pin(info, 0..1)?;
        self.model.gpu.kernels.decode(info.dtype, pin.address, self.at.vector, info.cols as u32)?;
        Ok(self.at.vector)
    }

    /// The embeddings of `tokens` to `x`.
    fn embed(&self, tokens: &[u32]) -> Result<()> {
        let (embedding, dim) = (&self.model.arch.embedding, self.model.config().dim as u64);
        let mut by_token: Vec<(u32, u64)> = tokens.iter().copied().zip(0..).collect();
        by_token.sort_unstable();
        for same in by_token.chunk_by(|a, b| a.0 == b.0) {
            let token = u64::from(same[0].0);
            let row = self.pin(embedding, token..token + 1)?;
            for (_, place) in same {
                let to = self.at.x + place * dim * FLOAT;
                self.model.gpu.kernels.decode(embedding.dtype, row.address, to, dim as u32)?;
            }
        }
        Ok(())
    }

    /// `out = x W^T`, or added to it.
    fn multiply(&self, w: &WeightInfo, input: &mut Input, out: u64, accumulate: bool) -> Result<()> {
        for rows in tiles(w, self.model.weights.tile_rows(w.id)) {
            let pin = self.pin(w, rows.clone())?;
            let product = Product {
                dtype: w.dtype,
                weights: pin.address,
                k: input.k,
                rows: (rows.end - rows.start) as u32,
                x: input.x,
                m: input.m,
                out: out + rows.start * FLOAT,
                stride: w.rows as u32,
                accumulate,
            };
            self.product(&product, input)?;
        }
        Ok(())
    }

    fn product(&self, p: &Product, input: &mut Input) -> Result<()> {
        let gpu = &self.model.gpu;
        match gpu.prompts.as_ref().filter(|_| p.m as usize > FEW) {
            Some(prompts) => prompts.multiply(&gpu.kernels, &self.at.prompt, p, input),
            None => gpu.kernels.multiply(p),
        }
    }

    /// `out = x W^T + b`.
    fn linear(&self, linear: &Linear, input: &mut Input, out: u64) -> Result<()> {
        self.multiply(&linear.weight, input, out, false)?;
        self.bias(linear, input.m, out)
    }

    /// `out = out + x W^T + b`.
    fn linear_onto(&self, linear: &Linear, input: &mut Input, out: u64) -> Result<()> {
        self.multiply(&linear.weight, input, out, true)?;
        self.bias(linear, input.m, out)
    }

    fn bias(&self, linear: &Linear, m: u32, out: u64) -> Result<()> {
        let Some(bias) = &linear.bias else { return Ok(()) };
        let bias_at = self.vector(bias)?;
        self.model.gpu.kernels.add(out, bias_at, u64::from(m) * bias.cols, bias.cols as u32)
    }

    fn norm(&self, x: u64, weight: &WeightInfo, out: u64, vectors: u32) -> Result<()> {
        let weight_at = self.vector(weight)?;
        let epsilon = self.model.config().norm_eps;
        self.model.gpu.kernels.rms_norm(x, weight_at, out, vectors, weight.cols as u32, epsilon)
    }

    /// Launches the pass of `tokens`, which are at position `past` and after it. Returns how long this thread waited
    /// for blocks of keys and values.
    fn pass(&self, tokens: &[u32], past: usize) -> Result<Duration> {
        let mut waited = Duration::ZERO;
        let (model, at) = (&*self.model, &self.at);
        let (c, kernels) = (model.config(), &model.gpu.kernels);
        let (m, pairs) = (tokens.len() as u32, model.frequencies.len() as u32);
        model.weights.will_use(&model.arch.pass_order(tokens, |id| model.weights.tile_rows(id)));
        let (heads, kv_heads) = (c.heads as u32, c.kv_heads as u32);
        let mut input = Input::new(at.normed, m, c.dim);
        for op in model.arch.ops() {
            match op {
                Op::Embed(_) => self.embed(tokens)?,
                Op::Norm(weight) => {
                    self.norm(at.x, weight, at.normed, m)?;
                    input = Input::new(at.normed, m, c.dim);
                }
                Op::Query(linear) => self.linear(linear, &mut input, at.q)?,
                Op::Key(linear) => self.linear(linear, &mut input, at.k)?,
                Op::Value(linear) => self.linear(linear, &mut input, at.v)?,
                Op::NormQueries(weight) => self.norm(at.q, weight, at.q, m * heads)?,
                Op::NormKeys(weight) => self.norm(at.k, weight, at.k, m * kv_heads)?,
                Op::Attend(layer) => {
                    let attention = Attention { heads, kv_heads, head_dim: c.head_dim as u32, past: past as u32, m };
                    kernels.rope(at.q, heads, &attention, at.frequencies, pairs, c.rope_pairs)?;
                    kernels.rope(at.k, kv_heads, &attention, at.frequencies, pairs, c.rope_pairs)?;
                    match &self.keys {
                        Keys::Plain => {
                            let start = (layer * c.kv_heads * self.capacity * c.head_dim) as u64 * FLOAT;
                            let (keys, values) = (at.keys + start, at.values + start);
                            let cache = Cache { keys, values, capacity: self.capacity as u32 };
                            kernels.append(at.k, at.v, &cache, &attention)?;
                            kernels.attend(at.q, at.mixed, &cache, &attention)?;
                        }
                        Keys::Paged(paged) => {
                            let operands = Operands { q: at.q, k: at.k, v: at.v, out: at.mixed, state: at.state };
                            waited += paged.attend((kernels, &model.weights), layer as u32, &operands, &attention)?;
                        }
                    }
                    input = Input::new(at.mixed, m, c.heads * c.head_dim);
                }
                Op::AttentionOutput(linear) => self.linear_onto(linear, &mut input, at.x)?,
                Op::Gate(linear) => self.linear(linear, &mut input, at.gate)?,
                Op::Up(linear) => self.linear(linear, &mut input, at.up)?,
                Op::Down(linear) => {
                    kernels.silu_multiply(at.gate, at.up, u64::from(m) * c.ffn_dim as u64)?;
                    self.linear_onto(linear, &mut Input::new(at.gate, m, c.ffn_dim), at.x)?;
                }
                Op::LastNorm(weight) => {
                    let last = at.x + u64::from(m - 1) * c.dim as u64 * FLOAT;
                    self.norm(last, weight, at.normed, 1)?;
                    input = Input::new(at.normed, 1, c.dim);
                }
                Op::Logits(output) => self.multiply(output, &mut input, at.logits, false)?,
            }
        }
        Ok(waited)
    }
}

/// What a session can have: at most the model's context, and a pass that the kernels can count.
fn clamped(config: &Config, capacity: usize, pass: usize) -> (usize, usize) {
    let capacity = capacity.min(config.context);
    (capacity, pass.clamp(1, PASS_MAX).min(capacity.max(1)))
}

/// Queues the copy of `count` elements at `from` to locked memory.
fn copy_out<T>(gpu: &Gpu, from: u64, to: &mut PinnedHostSlice<T>, count: usize) -> Result<()>
where
    T: cudarc::driver::DeviceRepr + cudarc::driver::ValidAsZeroBits,
{
    let copying = |e| failed("copy a result from the GPU", e);
    let to = &mut to.as_mut_slice().map_err(copying)?[..count];
    // SAFETY: `from` is a place in the session's memory with room for `count`; `to` is locked memory of the session,
    // which is not looked at before the stream has been waited for.
    let copied = unsafe { cudarc::driver::result::memcpy_dtoh_async(to, from, gpu.stream.cu_stream()) };
    Ok(copied.map_err(copying)?)
}
