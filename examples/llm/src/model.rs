//! The forward pass of a Llama-family transformer over weights that somebody else makes resident.
//!
//! A pass uses each weight once, in a fixed order that is declared beforehand ([`Weights::will_use`]), whatever the
//! number of tokens: a prompt of a thousand tokens costs as many bytes as one generated token. Matrices larger than
//! what may be held at once are used in tiles of rows; the kernels' first invariant makes that invisible in the result.
//!
//! Formulas: Touvron et al., Llama (2023); Su et al., RoFormer (2021); Ainslie et al., grouped-query attention (2023);
//! Qwen2 and Qwen3 technical reports for biases and per-head norms; Gemma 2 and 3 technical reports for windows, caps
//! and norms behind; the model card of gpt-oss for sinks (Xiao et al., efficient streaming language models with
//! attention sinks, 2023).

use std::cell::OnceCell;
use std::collections::HashMap;
use std::mem::take;
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::architecture::{Architecture, Linear, Matrix, Op, Rows, tiles};
use crate::config::Config;
use crate::dtype::{KvType, WeightType};
use crate::error::{Error, Result};
use crate::experts::{Foreseen, Foresight, Scores};
use crate::files::ModelFiles;
use crate::fp8::{self, BlockScales};
use crate::kernels::{self, ActKind, Acts, Fours, Level, Quantised};
use crate::paged_kv::{Operands, PagedKeys};
use crate::passes::{Logits, Part, PassError, PassTime};
use crate::plain_keys::{Cache, attention};
use crate::pool::Pool;
use crate::product::{Product, Scales};
use crate::quants;
use crate::rotary::Turns;
use crate::weights::{Step, TensorId, WeightInfo, Weights};

/// The attention of so many tokens of a session is one thread's work, where there are other sessions for the others.
const PART_FEW: usize = 8;

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
    pub(crate) arch: Architecture,
    pub(crate) weights: Arc<dyn Weights>,
    pub(crate) pool: Pool,
    /// Who computes by itself what one thread of the pool has to do.
    pub(crate) alone: Pool,
    pub(crate) level: Level,
    /// Rotary frequencies, and those of sessions that have room for more than so many tokens.
    frequencies: Vec<f32>,
    long_frequencies: Option<(usize, Vec<f32>)>,
    /// How often it was right what was foreseen of each layer's experts.
    pub(crate) foresight: Vec<Foresight>,
    /// Of matrices in FP8.
    pub(crate) scales: HashMap<TensorId, BlockScales>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("config", &self.arch.config).field("level", &self.level).finish_non_exhaustive()
    }
}

impl Model {
    /// Binds the tensors of `files` to `weights`. Reads no weight but the rotary factors of GGUF files, and the scales
    /// of weights in FP8.
    pub fn load(files: &ModelFiles, weights: Arc<dyn Weights>, options: Options) -> Result<Self> {
        let mut arch = Architecture::new(files)?;
        arch.foresees = weights.foresees();
        let used = arch.config.mixture.as_ref().map_or(0, |mixture| mixture.used);
        let foresight = (0..arch.layers.len()).map(|_| Foresight::new(used)).collect();
        let pool = Pool::new(options.threads).map_err(|e| Error::io("cannot start compute threads", e))?;
        let alone = Pool::new(1).map_err(|e| Error::io("cannot start compute threads", e))?;
        let level = options.level.unwrap_or_else(Level::detect);
        let (frequencies, long_frequencies, scales) = (Vec::new(), None, HashMap::new());
        let mut model = Self { arch, weights, pool, alone, level, frequencies, long_frequencies, foresight, scales };
        let read = |info: &WeightInfo| {
            model.weights.will_use(&[(info.id, 0..1)]);
            model.vector(info)
        };
        (model.frequencies, model.long_frequencies) =
            (model.arch.frequencies(read)?, model.arch.long_frequencies(read)?);
        if let Some(blocks) = model.arch.config.weight_blocks {
            let read =
                |one: &fp8::Scaled| Ok((one.matrix.id, BlockScales::new(one, blocks, model.whole(&one.scales)?)?));
            model.scales = model.arch.scaled.iter().map(read).collect::<Result<_>>()?;
        }
        Ok(model)
    }

    /// All values of a matrix, outside of passes.
    fn whole(&self, info: &WeightInfo) -> Result<Vec<f32>> {
        let mut out = Vec::with_capacity((info.rows * info.cols) as usize);
        for tile in tiles(0..info.rows, self.weights.tile_rows(info.id)) {
            self.weights.will_use(&[(info.id, tile.clone())]);
            out.extend(self.values((info, tile))?);
        }
        Ok(out)
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

    /// These threads, for work between passes.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The steps of a pass over `tokens`, in order: embedding rows by ascending token, then every layer, then the
    /// output.
    pub fn pass_order(&self, tokens: &[u32]) -> Vec<Step> {
        self.arch.pass_order(tokens, |id| self.weights.tile_rows(id))
    }

    /// Reads the tokens of several sessions in one pass over the weights: see [`Passes::pass`](crate::Passes::pass).
    /// Returns the logits that each part needs, for its sampler too, or the hidden states that it wants, and how long
    /// the pass waited for weights.
    pub(crate) fn forward_together(
        self: &Arc<Self>,
        parts: &mut [Part<'_, Session>],
    ) -> std::result::Result<(Vec<Vec<f32>>, Duration), PassError> {
        for nth in 0..parts.len() {
            let Part { session, tokens, .. } = &mut parts[nth];
            if let Err(error) = session.begin(self, tokens) {
                let undone = undo(&mut parts[..nth]);
                return Err(undone.err().unwrap_or(PassError { part: Some(nth), error }));
            }
        }
        let done = match self.compute(parts) {
            Ok(done) => done,
            Err(error) => {
                // Nobody comes for the experts that it expected.
                self.weights.drawn(&[], &[]);
                undo(parts)?;
                return Err(error);
            }
        };
        for (nth, Part { session, tokens, .. }) in parts.iter_mut().enumerate() {
            session.commit(tokens.len()).map_err(|error| PassError { part: Some(nth), error })?;
        }
        Ok(done)
    }

    /// The logits, and how long it waited for weights.
    fn compute(&self, parts: &mut [Part<'_, Session>]) -> std::result::Result<(Vec<Vec<f32>>, Duration), PassError> {
        let c = &self.arch.config;
        let tokens: Vec<u32> = parts.iter().flat_map(|part| part.tokens).copied().collect();
        let m = tokens.len();
        let waited = self.weights.waited();
        self.weights.will_use(&self.pass_order(&tokens));
        let turns_of = |others: Option<&Vec<f32>>| {
            let of_part = |part: &Part<'_, Session>| {
                let first = part.session.len;
                let frequencies = others.map_or_else(|| self.frequencies_of(part.session.capacity), Vec::as_slice);
                (first..first + part.tokens.len()).map(move |position| (position, frequencies))
            };
            Turns::new(c.rope_scale, parts.iter().flat_map(of_part))
        };
        let turns = turns_of(None);
        // In layers with a window, where these are others.
        let windowed = c.window.as_ref().and_then(|window| window.rope_frequencies.as_ref());
        let windowed = windowed.map(|frequencies| turns_of(Some(frequencies)));
        let mut work = Work::default();
        for op in self.arch.ops() {
            match op {
                Op::Embed(_) => {
                    work.x = self.embed(&tokens)?;
                    if c.embedding_scale != 1.0 {
                        work.x.iter_mut().for_each(|x| *x *= c.embedding_scale);
                    }
                }
                Op::Norm(weight) => work.input = self.normed(&work.x, weight)?,
                Op::Query(linear) => work.q = self.linear(linear, &mut work.input)?,
                Op::Key(linear) => work.k = self.linear(linear, &mut work.input)?,
                Op::Value(linear) => work.v = self.linear(linear, &mut work.input)?,
                Op::NormQueries(weight) => self.norm_heads(&mut work.q, weight)?,
                Op::NormKeys(weight) => self.norm_heads(&mut work.k, weight)?,
                Op::Attend(layer, sinks) => {
                    let (mut q, mut k, v) = (take(&mut work.q), take(&mut work.k), take(&mut work.v));
                    let sinks = sinks.map(|sinks| self.sinks(sinks)).transpose()?;
                    let turns = c.window_of(layer).and(windowed.as_ref()).unwrap_or(&turns);
                    turns.apply(&mut q, c.heads, c.head_dim, c.rope_pairs);
                    turns.apply(&mut k, c.kv_heads, c.head_dim, c.rope_pairs);
                    let operands = Operands { q: &q, k: &k, v: &v, sinks: sinks.as_deref() };
                    work.input = Input::new(self.attend(parts, layer, &operands)?, m);
                }
                Op::AttentionOutput(linear, norm) => {
                    let made = self.linear(linear, &mut work.input)?;
                    self.add(&mut work.x, made, norm)?;
                }
                Op::Gate(linear) => work.gate = self.linear(linear, &mut work.input)?,
                Op::Up(linear) => work.up = self.linear(linear, &mut work.input)?,
                Op::Down(linear, norm) => {
                    let (mut gate, up) = (take(&mut work.gate), take(&mut work.up));
                    self.activate(&mut gate, &up);
                    drop(up);
                    let made = self.linear(linear, &mut Input::new(gate, m))?;
                    self.add(&mut work.x, made, norm)?;
                }
                Op::AddShared(shared) => {
                    let (mut gate, up) = (take(&mut work.gate), take(&mut work.up));
                    self.activate(&mut gate, &up);
                    drop(up);
                    let made = self.linear(&shared.network.down, &mut Input::new(gate, m))?;
                    let row = shared.gate.as_ref().map(|gate| self.vector(gate)).transpose()?;
                    let of_each = work.x.chunks_exact_mut(c.dim).zip(made.chunks_exact(c.dim));
                    for ((x, made), input) in of_each.zip(work.input.x.chunks_exact(c.dim)) {
                        let score = row.as_ref().map(|row| kernels::dot(self.level, input, row));
                        let scale = score.map_or(1.0, |score| 1.0 / (1.0 + (-score).exp()));
                        x.iter_mut().zip(made).for_each(|(x, made)| *x += scale * made);
                    }
                }
                Op::Router(experts) => work.scores = self.scores(experts, &mut work.input)?,
                Op::ForeseeNorm(norm) => work.ahead = self.normed(&work.x, norm)?,
                Op::Foresee(layer, experts) => {
                    let scores = self.scores(experts, &mut take(&mut work.ahead))?;
                    work.next = Some(self.foresee(layer, experts, &scores));
                }
                Op::Experts(layer, experts) => {
                    let (input, scores) = (take(&mut work.input), take(&mut work.scores));
                    let foreseen = std::mem::replace(&mut work.foreseen, work.next.take());
                    let draws = self.draw(experts, &scores)?;
                    self.check_foreseen(layer, foreseen, &draws);
                    self.add_experts((experts, &draws), input, work.foreseen.as_ref(), &mut work.x)?;
                }
                Op::LastNorm(weight) => {
                    let (rows, with_logits) = wanted(parts, &take(&mut work.x), c.dim);
                    let mut normed = self.normed(&rows, weight)?.x;
                    work.hidden = normed.split_off(with_logits * c.dim);
                    work.input = Input::new(normed, with_logits);
                }
                Op::Logits(output) => {
                    work.logits = self.matmul(output, &mut work.input)?;
                    if let Some(cap) = c.logit_cap {
                        work.logits.iter_mut().for_each(|logit| *logit = cap * (*logit / cap).tanh());
                    }
                }
            }
        }
        // From the end: what was taken off is freed as it goes.
        let mut results = Vec::with_capacity(parts.len());
        for part in parts.iter().rev() {
            let (all, each) = match part.logits.is_hidden() {
                true => (&mut work.hidden, c.dim),
                false => (&mut work.logits, c.vocab),
            };
            let mine = part.rows() * each;
            results.push(all.split_off(all.len().saturating_sub(mine)));
            all.shrink_to_fit();
        }
        results.reverse();
        Ok((results, self.weights.waited().saturating_sub(waited)))
    }

    /// The rotary frequencies of a session of this capacity. They are the same from its first token to its last, so
    /// that keys need not be turned anew when it grows. Sessions in pages have the model's context for their capacity,
    /// so that all can share their keys.
    fn frequencies_of(&self, capacity: usize) -> &[f32] {
        match &self.long_frequencies {
            Some((original_context, long)) if capacity > *original_context => long,
            _ => &self.frequencies,
        }
    }

    /// Attention of all parts, one behind the other.
    fn attend(
        &self,
        parts: &mut [Part<'_, Session>],
        layer: usize,
        operands: &Operands<'_>,
    ) -> std::result::Result<Vec<f32>, PassError> {
        let c = &self.arch.config;
        let (q_row, kv_row) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let mut jobs = Vec::with_capacity(parts.len());
        let mut first = 0;
        for (nth, part) in parts.iter_mut().enumerate() {
            let count = part.tokens.len();
            let of = |row: usize| first * row..(first + count) * row;
            let (q, kv) = (of(q_row), of(kv_row));
            let (q, k, v) = (&operands.q[q], &operands.k[kv.clone()], &operands.v[kv]);
            let mine = Operands { q, k, v, sinks: operands.sinks };
            jobs.push(Mutex::new((nth, &mut *part.session, mine, Ok(Vec::new()))));
            first += count;
        }
        // Parts of few tokens leave threads without work: these are computed side by side, each by one thread.
        let few = |job: &Mutex<Job<'_, '_>>| job.lock().2.q.len() <= PART_FEW * q_row;
        let (mut side_by_side, alone): (Vec<_>, Vec<_>) = jobs.iter().partition(|job| few(job));
        let mut in_turn = alone;
        if side_by_side.len() < self.pool.threads() {
            in_turn.append(&mut side_by_side);
        }
        let work = |job: &Mutex<Job<'_, '_>>, pool: &Pool| {
            let (_, session, mine, result) = &mut *job.lock();
            *result = session.attend(self, pool, layer, mine);
        };
        self.pool.run(side_by_side.len(), &|nth| work(side_by_side[nth], &self.alone));
        in_turn.iter().for_each(|job| work(job, &self.pool));
        let mut out = Vec::with_capacity(operands.q.len());
        for job in jobs {
            let (nth, _, _, result) = job.into_inner();
            out.extend(result.map_err(|error| PassError { part: Some(nth), error })?);
        }
        Ok(out)
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

    /// What scales rows from `first` on: `of_rows`, or what is held for the tensor.
    pub(crate) fn scales_of<'a>(&'a self, info: &WeightInfo, of_rows: Option<&'a [u8]>, first: usize) -> Scales<'a> {
        match of_rows {
            Some(bytes) => Scales::OfRows { first, bytes },
            None => self.scales.get(&info.id).map_or(Scales::None, Scales::OfBlocks),
        }
    }

    /// A copy of the bytes of these rows.
    fn copied(&self, (info, rows): Rows<'_>) -> Result<Vec<u8>> {
        let mut out = Vec::with_capacity(((rows.end - rows.start) * info.row_bytes) as usize);
        for tile in tiles(rows, self.weights.tile_rows(info.id)) {
            out.extend_from_slice(&self.rows(info, tile)?);
        }
        Ok(out)
    }

    /// A vector's values.
    pub(crate) fn vector(&self, info: &WeightInfo) -> Result<Vec<f32>> {
        self.values((info, 0..1))
    }

    /// The values of these rows.
    fn values(&self, (info, rows): Rows<'_>) -> Result<Vec<f32>> {
        let mut out = vec![0f32; (rows.end - rows.start) as usize * info.cols as usize];
        quants::dequantise(info.dtype, &self.rows(info, rows)?, &mut out);
        Ok(out)
    }

    /// The scores of a layer's sinks: one for each head.
    fn sinks(&self, info: &WeightInfo) -> Result<Vec<f32>> {
        let sinks = self.vector(info)?;
        match sinks.iter().position(|sink| !sink.is_finite()) {
            Some(head) => Err(Error::Invalid(format!(
                "the sink of head {head} in {:?} is infinite or no number (the model is damaged, or was converted \
                 wrongly: fetch it again)",
                info.name
            ))),
            None => Ok(sinks),
        }
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
            quants::dequantise(self.arch.embedding.dtype, &bytes, &mut out[first * dim..(first + 1) * dim]);
            for (_, place) in &same[1..] {
                out.copy_within(first * dim..(first + 1) * dim, place * dim);
            }
        }
        Ok(out)
    }

    /// `x W^T + b`: `[m x rows]`.
    pub(crate) fn linear(&self, linear: &Linear, x: &mut Input) -> Result<Vec<f32>> {
        self.linear_rows(linear.matrix(), x)
    }

    /// The same of a matrix with its bias.
    pub(crate) fn linear_rows(&self, Matrix { rows, scales, bias }: Matrix<'_>, x: &mut Input) -> Result<Vec<f32>> {
        let mut out = self.matmul_rows(rows, scales, x)?;
        if let Some(bias) = bias {
            let bias = self.values(bias)?;
            add_to_each(&mut out, &bias);
        }
        Ok(out)
    }

    /// Adds `made` to `x`, normalised first if there is a norm for it.
    fn add(&self, x: &mut [f32], mut made: Vec<f32>, norm: Option<&WeightInfo>) -> Result<()> {
        if let Some(norm) = norm {
            made = self.normed(&made, norm)?.x;
        }
        x.iter_mut().zip(&made).for_each(|(x, made)| *x += made);
        Ok(())
    }

    fn matmul(&self, w: &WeightInfo, x: &mut Input) -> Result<Vec<f32>> {
        self.matmul_rows((w, 0..w.rows), None, x)
    }

    /// The product of these rows of a matrix, with the scales of each that a tensor of their own has.
    fn matmul_rows(&self, (w, rows): Rows<'_>, scales: Option<Rows<'_>>, x: &mut Input) -> Result<Vec<f32>> {
        // Rows and their scales are not held at once.
        let copied = scales.map(|scales| self.copied(scales)).transpose()?;
        let tiles = tiles(rows.clone(), self.weights.tile_rows(w.id));
        let tiles = tiles.map(|tile| Ok((tile.clone(), self.rows(w, tile)?)));
        self.product((w, rows), copied.as_deref(), tiles, x)
    }

    /// The product of these rows of a matrix, whose bytes come tile by tile. `of_rows` has their scales, where a tensor
    /// of their own has them.
    pub(crate) fn product<B: Deref<Target = [u8]>>(
        &self,
        (w, rows): Rows<'_>,
        of_rows: Option<&[u8]>,
        tiles: impl Iterator<Item = Result<(Range<u64>, B)>>,
        x: &mut Input,
    ) -> Result<Vec<f32>> {
        let (n, m) = ((rows.end - rows.start) as usize, x.m);
        let scales = self.scales_of(w, of_rows, rows.start as usize);
        let acts = x.prepare(w.dtype, (self.level, &self.pool));
        let product = Product { level: self.level, info: w, scales, acts, m };
        let mut out = vec![0f32; m * n];
        for tile in tiles {
            let (tile, bytes) = tile?;
            let columns = (tile.start - rows.start) as usize..(tile.end - rows.start) as usize;
            product.by_vector(&self.pool, (tile.start as usize, &bytes), columns, (&mut out, n));
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

    /// The weights of a norm.
    fn norm(&self, weight: &WeightInfo) -> Result<Vec<f32>> {
        let mut weight = self.vector(weight)?;
        let offset = self.arch.config.norm_offset;
        if offset != 0.0 {
            weight.iter_mut().for_each(|w| *w += offset);
        }
        Ok(weight)
    }

    /// Vectors of the model's width, normalised.
    fn normed(&self, x: &[f32], weight: &WeightInfo) -> Result<Input> {
        let weight = self.norm(weight)?;
        let mut out = vec![0f32; x.len()];
        self.rms_norm(x, &weight, &mut out);
        Ok(Input::new(out, x.len() / weight.len()))
    }

    /// Normalises each head in place.
    fn norm_heads(&self, x: &mut [f32], norm: &WeightInfo) -> Result<()> {
        let weight = self.norm(norm)?;
        let copy = x.to_vec();
        self.rms_norm(&copy, &weight, x);
        Ok(())
    }

    /// The model's activation of both, in place of `gate`.
    pub(crate) fn activate(&self, gate: &mut [f32], up: &[f32]) {
        let per = 1024;
        let (activation, level) = (self.arch.config.activation, self.level);
        self.pool.run_chunks(gate, per, |i, gate| activation.apply(level, gate, &up[i * per..]));
    }
}

/// Activations entering a matrix: `m` vectors, prepared once however many matrices use them.
#[derive(Default)]
pub(crate) struct Input {
    pub x: Vec<f32>,
    pub m: usize,
    quantised: OnceCell<Quantised>,
    fours: OnceCell<Fours>,
}

impl Input {
    pub fn new(x: Vec<f32>, m: usize) -> Self {
        Self { x, m, ..Self::default() }
    }

    /// Prepares them for a type of weights, unless that is done.
    pub fn prepare(&self, dtype: WeightType, (level, pool): (Level, &Pool)) -> Acts<'_> {
        let (x, m) = (&self.x, self.m);
        match kernels::act_kind(dtype) {
            ActKind::Plain => Acts::Plain(x, self.fours.get_or_init(|| Fours::new(level, x, m, pool))),
            ActKind::Q8 => Acts::Q8(self.quantised.get_or_init(|| Quantised::new(level, x, m, pool))),
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
    /// What the router makes of the input.
    scores: Scores,
    /// What the next layer's router is asked about.
    ahead: Input,
    /// What was foreseen of the layer that comes next, and of the one behind the experts that come next.
    foreseen: Option<Foreseen>,
    next: Option<Foreseen>,
    /// `[tokens whose logits are wanted x vocab]`.
    logits: Vec<f32>,
    /// `[tokens whose hidden states are wanted x dim]`.
    hidden: Vec<f32>,
}

/// Adds a bias to each of these vectors, which are as long.
pub(crate) fn add_to_each(vectors: &mut [f32], bias: &[f32]) {
    for vector in vectors.chunks_exact_mut(bias.len()) {
        vector.iter_mut().zip(bias).for_each(|(o, b)| *o += b);
    }
}

/// Takes back that these parts have begun.
fn undo(parts: &mut [Part<'_, Session>]) -> std::result::Result<(), PassError> {
    let mut first = Ok(());
    for (nth, part) in parts.iter_mut().enumerate() {
        let undone = part.session.undo().map_err(|error| PassError { part: Some(nth), error });
        first = first.and(undone);
    }
    first
}

/// The rows of `x` (`[tokens x dim]`) whose logits are wanted, and how many they are; one at least, so that each pass
/// uses each weight. Behind them the rows whose hidden states are wanted.
fn wanted(parts: &[Part<'_, Session>], x: &[f32], dim: usize) -> (Vec<f32>, usize) {
    let mut rows = Vec::new();
    let mut add = |hidden: bool| {
        let mut end = 0;
        for part in parts {
            end += part.tokens.len();
            if part.logits.is_hidden() == hidden {
                rows.extend_from_slice(&x[(end - part.rows()) * dim..end * dim]);
            }
        }
        if rows.is_empty() {
            rows.extend_from_slice(&x[..dim.min(x.len())]);
        }
        rows.len() / dim
    };
    let with_logits = add(false);
    add(true);
    (rows, with_logits)
}

/// Attention of one part: its number, its session, what it works on, and the result.
type Job<'a, 'b> = (usize, &'a mut Session, Operands<'b>, Result<Vec<f32>>);

/// Where a session's keys and values are.
enum Keys {
    /// Of each layer, in memory of their own.
    Plain(Vec<Cache>),
    Paged(Box<PagedKeys>),
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
        keys.check(model.config(), &[KvType::F32])?;
        Ok(Self { model, keys: Keys::Paged(Box::new(keys)), capacity, len, last: PassTime::default() })
    }

    /// Another session with the same tokens, which shares their keys and values. `None` if they are in no pool.
    pub fn fork(&mut self) -> Option<Self> {
        let Self { model, keys: Keys::Paged(keys), capacity, len, .. } = self else { return None };
        let (model, keys) = (model.clone(), Keys::Paged(Box::new(keys.fork())));
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

    /// Its keys and values, if they are in a pool.
    pub fn paged_keys(&self) -> Option<&PagedKeys> {
        match &self.keys {
            Keys::Plain(_) => None,
            Keys::Paged(keys) => Some(keys),
        }
    }

    /// Has its blocks leave the device, if its keys and values are in a pool: see [`Sequence::park`].
    ///
    /// [`Sequence::park`]: outcore_kv::Sequence::park
    pub fn park(&mut self) -> Result<()> {
        match &mut self.keys {
            Keys::Plain(_) => Ok(()),
            Keys::Paged(keys) => keys.park(),
        }
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
        self.pass(tokens, Logits::Last)
    }

    /// Like [`Session::forward`], with the logits after every token: `[tokens x vocab]`.
    pub fn forward_all(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        self.pass(tokens, Logits::All)
    }

    fn pass(&mut self, tokens: &[u32], logits: Logits) -> Result<Vec<f32>> {
        let started = Instant::now();
        let model = Arc::clone(&self.model);
        let done = model.forward_together(&mut [Part { session: self, tokens, logits, sampler: None }]);
        let (mut results, waited) = done.map_err(|failed| failed.error)?;
        self.last = PassTime { total: started.elapsed(), waited };
        Ok(results.pop().unwrap_or_default())
    }

    /// Makes room for `tokens`.
    fn begin(&mut self, model: &Arc<Model>, tokens: &[u32]) -> Result<()> {
        if !Arc::ptr_eq(&self.model, model) {
            return Err(Error::Invalid("a session of another model, in one pass with sessions of this one".into()));
        }
        model.arch.check_pass(tokens, self.len, self.capacity)?;
        match &mut self.keys {
            Keys::Plain(_) => Ok(()),
            Keys::Paged(keys) => keys.append(tokens),
        }
    }

    /// Takes back what [`begin`](Self::begin) did.
    fn undo(&mut self) -> Result<()> {
        match &mut self.keys {
            Keys::Plain(_) => Ok(()),
            Keys::Paged(keys) => keys.truncate(self.len),
        }
    }

    fn commit(&mut self, count: usize) -> Result<()> {
        if let Keys::Paged(keys) = &mut self.keys {
            keys.commit(self.len + count)?;
        }
        self.len += count;
        Ok(())
    }

    /// Attention of `layer` for the new tokens of this session.
    fn attend(&mut self, model: &Model, pool: &Pool, layer: usize, operands: &Operands<'_>) -> Result<Vec<f32>> {
        let config = &model.arch.config;
        match &mut self.keys {
            Keys::Plain(caches) => Ok(attention(
                (config, model.level, pool),
                (layer, &mut caches[layer]),
                (self.capacity, self.len),
                operands,
            )),
            Keys::Paged(keys) => keys.attend(config, (pool, model.level), layer, self.len, operands),
        }
    }
}
