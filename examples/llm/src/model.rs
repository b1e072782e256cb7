//! The forward pass of a Llama-family transformer over weights that somebody else makes resident.
//!
//! A pass uses each weight once, in a fixed order that is declared beforehand ([`Weights::will_use`]), whatever the
//! number of tokens: a prompt of a thousand tokens costs as many bytes as one generated token. Matrices larger than
//! what may be held at once are used in tiles of rows; the kernels' first invariant makes that invisible in the result.
//!
//! Formulas: Touvron et al., Llama (2023); Su et al., RoFormer (2021); Ainslie et al., grouped-query attention (2023);
//! Qwen2 and Qwen3 technical reports for biases and per-head norms.

use std::mem::take;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::f16;

use crate::architecture::{Architecture, Linear, Op, tiles};
use crate::config::{Config, RopePairs};
use crate::dtype::WeightType;
use crate::error::{Error, Result};
use crate::files::ModelFiles;
use crate::kernels::{self, ActKind, Acts, Fours, Level, Quantised};
use crate::paged_kv::{Operands, PagedKeys};
use crate::pool::Pool;
use crate::weights::{Step, TensorId, WeightInfo, Weights};

/// Most vectors whose products one thread sorts at a time.
const SORTED: usize = 8;

/// How the cache of keys and values stores its elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvType {
    /// Four bytes an element.
    #[default]
    F32,
    /// Two bytes an element.
    F16,
}

/// How a model computes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Threads that compute; 0 means one a core.
    pub threads: usize,
    /// Instructions to use; `None` means the best this processor has.
    pub level: Option<Level>,
}

/// A model ready to run. Shared by any number of sessions.
pub struct Model {
    arch: Architecture,
    weights: Arc<dyn Weights>,
    pool: Pool,
    level: Level,
    frequencies: Vec<f32>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("config", &self.arch.config).field("level", &self.level).finish_non_exhaustive()
    }
}

impl Model {
    /// Binds the tensors of `files` to `weights`. Reads no weight but the rotary factors of Llama 3 GGUF files.
    pub fn load(files: &ModelFiles, weights: Arc<dyn Weights>, options: Options) -> Result<Self> {
        let arch = Architecture::new(files)?;
        let pool = Pool::new(options.threads).map_err(|e| Error::io("cannot start compute threads", e))?;
        let level = options.level.unwrap_or_else(Level::detect);
        let mut model = Self { arch, weights, pool, level, frequencies: Vec::new() };
        model.frequencies = model.arch.frequencies(|info| {
            model.weights.will_use(&[(info.id, 0..1)]);
            model.vector(info)
        })?;
        Ok(model)
    }

    /// Sizes and constants.
    pub fn config(&self) -> &Config {
        &self.arch.config
    }

    /// Whoever makes the weights resident.
    pub fn weights(&self) -> &Arc<dyn Weights> {
        &self.weights
    }

    /// The tensor whose rows are the embeddings; the output matrix too where they are tied.
    pub fn embedding(&self) -> TensorId {
        self.arch.embedding.id
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The steps of a pass over `tokens`, in order: embedding rows by ascending token, then every layer, then the
    /// output.
    pub fn pass_order(&self, tokens: &[u32]) -> Vec<Step> {
        self.arch.pass_order(tokens, |id| self.weights.tile_rows(id))
    }

    /// The bytes of `rows`, after checking that there are as many as there should be.
    fn rows(&self, info: &WeightInfo, rows: Range<u64>) -> Result<crate::weights::Rows<'_>> {
        let want = (rows.end - rows.start) * info.row_bytes;
        let bytes = self.weights.rows(info.id, rows)?;
        if bytes.len() as u64 != want {
            return Err(Error::Invalid(format!("{} bytes of {:?} arrived, not {want}", bytes.len(), info.name)));
        }
        Ok(bytes)
    }

    /// A vector's values.
    fn vector(&self, info: &WeightInfo) -> Result<Vec<f32>> {
        let bytes = self.rows(info, 0..1)?;
        let mut out = vec![0f32; info.cols as usize];
        kernels::dequantise(info.dtype, &bytes, &mut out);
        Ok(out)
    }

    /// The embeddings of `tokens`: `[tokens x dim]`.
    fn embed(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        let dim = self.arch.config.dim;
        let mut out = vec![0f32; tokens.len() * dim];
        let mut by_token: Vec<(u32, usize)> = tokens.iter().copied().zip(0..).collect();
        by_token.sort_unstable();
        for same in by_token.chunk_by(|a, b| a.0 == b.0) {
            let (token, first) = same[0];
            let bytes = self.rows(&self.arch.embedding, u64::from(token)..u64::from(token) + 1)?;
            kernels::dequantise(self.arch.embedding.dtype, &bytes, &mut out[first * dim..(first + 1) * dim]);
            for (_, place) in &same[1..] {
                out.copy_within(first * dim..(first + 1) * dim, place * dim);
            }
        }
        Ok(out)
    }

    /// `x W^T + b`: `[m x rows]`.
    fn linear(&self, linear: &Linear, x: &mut Input) -> Result<Vec<f32>> {
        let mut out = self.matmul(&linear.weight, x)?;
        if let Some(bias) = &linear.bias {
            let bias = self.vector(bias)?;
            for row in out.chunks_exact_mut(bias.len()) {
                row.iter_mut().zip(&bias).for_each(|(o, b)| *o += b);
            }
        }
        Ok(out)
    }

    fn matmul(&self, w: &WeightInfo, x: &mut Input) -> Result<Vec<f32>> {
        let (k, n, m) = (w.cols as usize, w.rows as usize, x.m);
        let acts = x.prepare(w.dtype, self);
        let mut out = vec![0f32; m * n];
        let mut transposed = vec![0f32; if m > 1 { n * m } else { 0 }];
        for tile in tiles(w, self.weights.tile_rows(w.id)) {
            let bytes = self.rows(w, tile.clone())?;
            let bytes: &[u8] = &bytes;
            let (start, end) = (tile.start as usize * m, tile.end as usize * m);
            let target = if m > 1 { &mut transposed[start..end] } else { &mut out[start..end] };
            kernels::rows_dot_on(&self.pool, self.level, w.dtype, k, bytes, acts, m, target);
        }
        if m > 1 {
            let some = m.div_ceil(self.pool.threads()).min(SORTED);
            self.pool.run_chunks(&mut out, n * some, |i, out| {
                // Sixteen rows at a time, so that a row's products are in the first cache for all of these vectors.
                for (first, rows) in transposed.chunks(16 * m).enumerate().map(|(i, rows)| (16 * i, rows)) {
                    for (j, out) in out.chunks_exact_mut(n).enumerate() {
                        let products = rows[i * some + j..].iter().step_by(m);
                        out[first..].iter_mut().zip(products).for_each(|(o, t)| *o = *t);
                    }
                }
            });
        }
        Ok(out)
    }

    /// `x / rms(x) * weight` for each vector of `weight.len()` elements.
    fn rms_norm(&self, x: &[f32], weight: &[f32], out: &mut [f32]) {
        let n = weight.len();
        for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
            let mean = kernels::dot(self.level, x, x) / n as f32;
            let scale = 1.0 / (mean + self.arch.config.norm_eps).sqrt();
            out.iter_mut().zip(x).zip(weight).for_each(|((o, x), w)| *o = x * scale * w);
        }
    }

    /// Vectors of the model's width, normalised.
    fn normed(&self, x: &[f32], weight: &WeightInfo) -> Result<Input> {
        let weight = self.vector(weight)?;
        let mut out = vec![0f32; x.len()];
        self.rms_norm(x, &weight, &mut out);
        Ok(Input::new(out, x.len() / weight.len()))
    }

    /// Normalises each head in place.
    fn norm_heads(&self, x: &mut [f32], norm: &WeightInfo) -> Result<()> {
        let weight = self.vector(norm)?;
        let copy = x.to_vec();
        self.rms_norm(&copy, &weight, x);
        Ok(())
    }

    /// `silu(gate) * up`, in place of `gate`.
    fn silu_multiply(&self, gate: &mut [f32], up: &[f32]) {
        let per = 1024;
        self.pool.run_chunks(gate, per, |i, gate| {
            let up = &up[i * per..i * per + gate.len()];
            gate.iter_mut().zip(up).for_each(|(g, u)| *g = *g / (1.0 + (-*g).exp()) * u);
        });
    }
}

/// Activations entering a matrix: `m` vectors, prepared once however many matrices use them.
#[derive(Default)]
struct Input {
    x: Vec<f32>,
    m: usize,
    quantised: Option<Quantised>,
    fours: Option<Fours>,
}

impl Input {
    fn new(x: Vec<f32>, m: usize) -> Self {
        Self { x, m, quantised: None, fours: None }
    }

    fn prepare(&mut self, dtype: WeightType, model: &Model) -> Acts<'_> {
        let (x, m, level, pool) = (&self.x, self.m, model.level, &model.pool);
        match kernels::act_kind(dtype) {
            ActKind::Plain => Acts::Plain(x, self.fours.get_or_insert_with(|| Fours::new(level, x, m, pool))),
            ActKind::Q8 => Acts::Q8(self.quantised.get_or_insert_with(|| Quantised::new(level, x, m, pool))),
        }
    }
}

/// What a pass works on. The last step that uses a buffer frees it, so that the next step has the room.
#[derive(Default)]
struct Work {
    /// The residual stream: `[tokens x dim]`.
    x: Vec<f32>,
    /// What enters the next matrices.
    input: Input,
    /// `[tokens x heads x head_dim]`; keys and values `[tokens x kv_heads x head_dim]`.
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// `[tokens x ffn_dim]`.
    gate: Vec<f32>,
    up: Vec<f32>,
    /// `[tokens whose logits are wanted x vocab]`.
    logits: Vec<f32>,
}

/// Keys and values of one layer: `[kv_head][position][head_dim]`.
enum Cache {
    F32 { keys: Vec<f32>, values: Vec<f32> },
    F16 { keys: Vec<f16>, values: Vec<f16> },
}

impl Cache {
    fn new(kind: KvType, elements: usize) -> Self {
        match kind {
            KvType::F32 => Self::F32 { keys: vec![0.0; elements], values: vec![0.0; elements] },
            KvType::F16 => Self::F16 { keys: vec![f16::ZERO; elements], values: vec![f16::ZERO; elements] },
        }
    }

    fn store(&mut self, at: usize, k: &[f32], v: &[f32]) {
        match self {
            Self::F32 { keys, values } => {
                keys[at..at + k.len()].copy_from_slice(k);
                values[at..at + v.len()].copy_from_slice(v);
            }
            Self::F16 { keys, values } => {
                keys[at..at + k.len()].iter_mut().zip(k).for_each(|(c, x)| *c = f16::from_f32(*x));
                values[at..at + v.len()].iter_mut().zip(v).for_each(|(c, x)| *c = f16::from_f32(*x));
            }
        }
    }

    /// `softmax(q K^T * scale) V` over `len` positions from element `base`.
    fn attend(&self, level: Level, base: usize, len: usize, scale: f32, q: &[f32], out: &mut [f32]) {
        let hd = q.len();
        let at = |p: usize| base + p * hd..base + (p + 1) * hd;
        let mut scores = vec![0f32; len];
        let mut peak = f32::NEG_INFINITY;
        for (p, score) in scores.iter_mut().enumerate() {
            *score = scale
                * match self {
                    Self::F32 { keys, .. } => kernels::dot(level, q, &keys[at(p)]),
                    Self::F16 { keys, .. } => kernels::dot_f16(level, q, &keys[at(p)]),
                };
            peak = peak.max(*score);
        }
        let mut total = 0f32;
        for score in &mut scores {
            *score = (*score - peak).exp();
            total += *score;
        }
        out.fill(0.0);
        for (p, score) in scores.iter().enumerate() {
            let share = score / total;
            match self {
                Self::F32 { values, .. } => kernels::axpy(level, share, &values[at(p)], out),
                Self::F16 { values, .. } => kernels::axpy_f16(level, share, &values[at(p)], out),
            }
        }
    }
}

/// What one pass took.
#[derive(Clone, Copy, Debug, Default)]
pub struct PassTime {
    /// From start to end.
    pub total: Duration,
    /// Of that, waiting for weights to become resident.
    pub waited: Duration,
}

/// Where a session's keys and values are.
enum Keys {
    /// Of each layer, in memory of their own.
    Plain(Vec<Cache>),
    Paged(PagedKeys),
}

/// One sequence of tokens being read or written: positions, keys and values.
pub struct Session {
    model: Arc<Model>,
    keys: Keys,
    capacity: usize,
    len: usize,
    last: PassTime,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("len", &self.len).field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

impl Session {
    /// An empty sequence that can grow to `capacity` tokens (to the model's context where that is less).
    pub fn new(model: Arc<Model>, capacity: usize, kv: KvType) -> Result<Self> {
        let c = model.config();
        let capacity = capacity.min(c.context);
        let elements = [c.kv_heads, capacity, c.head_dim].iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        let elements = elements.ok_or_else(|| Error::Invalid(format!("a context of {capacity} is too large")))?;
        let caches = (0..c.layers).map(|_| Cache::new(kv, elements)).collect();
        Ok(Self { model, keys: Keys::Plain(caches), capacity, len: 0, last: PassTime::default() })
    }

    /// A sequence whose keys and values are in blocks of a pool, with the tokens that the pool found. It can grow to
    /// the model's context.
    pub fn paged(model: Arc<Model>, keys: PagedKeys) -> Result<Self> {
        let capacity = model.config().context;
        let len = keys.sequence().len() as usize;
        keys.check(model.config())?;
        Ok(Self { model, keys: Keys::Paged(keys), capacity, len, last: PassTime::default() })
    }

    /// Another session with the same tokens, which shares their keys and values. `None` if they are in no pool.
    pub fn fork(&mut self) -> Option<Self> {
        let Self { model, keys: Keys::Paged(keys), capacity, len, .. } = self else { return None };
        let (model, keys) = (model.clone(), Keys::Paged(keys.fork()));
        Some(Self { model, keys, capacity: *capacity, len: *len, last: PassTime::default() })
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
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// What the last pass took.
    pub fn last_pass(&self) -> PassTime {
        self.last
    }

    /// Forgets everything after the first `len` tokens.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        self.len = self.len.min(len);
        match &mut self.keys {
            Keys::Plain(_) => Ok(()),
            Keys::Paged(keys) => keys.truncate(self.len),
        }
    }

    /// Reads `tokens` in one pass over the weights; returns the logits after the last one (`vocab` numbers).
    ///
    /// After an error the session is as it was before the call.
    pub fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        self.pass(tokens, false)
    }

    /// Like [`Session::forward`], with the logits after every token: `[tokens x vocab]`.
    pub fn forward_all(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        self.pass(tokens, true)
    }

    fn pass(&mut self, tokens: &[u32], all: bool) -> Result<Vec<f32>> {
        let started = Instant::now();
        let model = Arc::clone(&self.model);
        model.arch.check_pass(tokens, self.len, self.capacity)?;
        if let Keys::Paged(keys) = &mut self.keys {
            keys.append(tokens)?;
        }
        let done = self.compute(&model, tokens, all);
        match (&mut self.keys, &done) {
            (Keys::Plain(_), _) => {}
            (Keys::Paged(keys), Ok(_)) => keys.commit(self.len + tokens.len())?,
            (Keys::Paged(keys), Err(_)) => keys.truncate(self.len)?,
        }
        let (logits, waited) = done?;
        self.len += tokens.len();
        self.last = PassTime { total: started.elapsed(), waited };
        Ok(logits)
    }

    /// The logits, and how long it waited for weights.
    fn compute(&mut self, model: &Model, tokens: &[u32], all: bool) -> Result<(Vec<f32>, Duration)> {
        let (c, m) = (&model.arch.config, tokens.len());
        let waited = model.weights.waited();
        model.weights.will_use(&model.pass_order(tokens));
        let turns = Turns::new(&model.frequencies, self.len, m);
        let mut work = Work::default();
        for op in model.arch.ops() {
            match op {
                Op::Embed(_) => work.x = model.embed(tokens)?,
                Op::Norm(weight) => work.input = model.normed(&work.x, weight)?,
                Op::Query(linear) => work.q = model.linear(linear, &mut work.input)?,
                Op::Key(linear) => work.k = model.linear(linear, &mut work.input)?,
                Op::Value(linear) => work.v = model.linear(linear, &mut work.input)?,
                Op::NormQueries(weight) => model.norm_heads(&mut work.q, weight)?,
                Op::NormKeys(weight) => model.norm_heads(&mut work.k, weight)?,
                Op::Attend(layer) => {
                    let (mut q, mut k, v) = (take(&mut work.q), take(&mut work.k), take(&mut work.v));
                    turns.apply(&mut q, c.heads, c.head_dim, c.rope_pairs);
                    turns.apply(&mut k, c.kv_heads, c.head_dim, c.rope_pairs);
                    let mixed = match &mut self.keys {
                        Keys::Plain(caches) => {
                            attention(model, &mut caches[layer], self.capacity, self.len, m, &q, &k, &v)
                        }
                        Keys::Paged(keys) => {
                            let operands = Operands { q: &q, k: &k, v: &v };
                            keys.attend(c, (&model.pool, model.level), layer, self.len, &operands)?
                        }
                    };
                    work.input = Input::new(mixed, m);
                }
                Op::AttentionOutput(linear) => add(&mut work.x, &model.linear(linear, &mut work.input)?),
                Op::Gate(linear) => work.gate = model.linear(linear, &mut work.input)?,
                Op::Up(linear) => work.up = model.linear(linear, &mut work.input)?,
                Op::Down(linear) => {
                    let (mut gate, up) = (take(&mut work.gate), take(&mut work.up));
                    model.silu_multiply(&mut gate, &up);
                    drop(up);
                    add(&mut work.x, &model.linear(linear, &mut Input::new(gate, m))?);
                }
                Op::LastNorm(weight) => {
                    let from = if all { 0 } else { (m - 1) * c.dim };
                    work.input = model.normed(&work.x[from..], weight)?;
                }
                Op::Logits(output) => work.logits = model.matmul(output, &mut work.input)?,
            }
        }
        Ok((work.logits, model.weights.waited().saturating_sub(waited)))
    }
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Stores the new keys and values, then attends: `[m x heads * head_dim]`.
#[expect(clippy::too_many_arguments, reason = "the operands of one formula")]
fn attention(
    model: &Model,
    cache: &mut Cache,
    capacity: usize,
    past: usize,
    m: usize,
    q: &[f32],
    k: &[f32],
    v: &[f32],
) -> Vec<f32> {
    let c = &model.arch.config;
    let hd = c.head_dim;
    for t in 0..m {
        for h in 0..c.kv_heads {
            let at = (t * c.kv_heads + h) * hd;
            cache.store((h * capacity + past + t) * hd, &k[at..at + hd], &v[at..at + hd]);
        }
    }
    let cache = &*cache;
    let (group, scale) = (c.heads / c.kv_heads, 1.0 / (hd as f32).sqrt());
    let mut out = vec![0f32; m * c.heads * hd];
    model.pool.run_chunks(&mut out, hd, |i, out| {
        let (t, h) = (i / c.heads, i % c.heads);
        let base = h / group * capacity * hd;
        cache.attend(model.level, base, past + t + 1, scale, &q[i * hd..(i + 1) * hd], out);
    });
    out
}

/// Sines and cosines for the positions of one pass: `[positions x pairs]`.
struct Turns {
    pairs: usize,
    table: Vec<(f32, f32)>,
}

impl Turns {
    fn new(frequencies: &[f32], first: usize, count: usize) -> Self {
        let angle = |p: usize, f: f32| (p as f32 * f).sin_cos();
        let table = (first..first + count).flat_map(|p| frequencies.iter().map(move |f| angle(p, *f))).collect();
        Self { pairs: frequencies.len(), table }
    }

    /// Turns every head of every position; elements beyond the turned pairs stay as they are.
    fn apply(&self, x: &mut [f32], heads: usize, head_dim: usize, pairs: RopePairs) {
        for (t, x) in x.chunks_exact_mut(heads * head_dim).enumerate() {
            let turns = &self.table[t * self.pairs..(t + 1) * self.pairs];
            for head in x.chunks_exact_mut(head_dim) {
                for (i, (sin, cos)) in turns.iter().enumerate() {
                    let (a, b) = match pairs {
                        RopePairs::Adjacent => (2 * i, 2 * i + 1),
                        RopePairs::Halves => (i, i + self.pairs),
                    };
                    let (x, y) = (head[a], head[b]);
                    head[a] = x * cos - y * sin;
                    head[b] = x * sin + y * cos;
                }
            }
        }
    }
}
