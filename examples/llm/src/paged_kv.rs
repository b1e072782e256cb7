//! Keys and values in blocks of a pool: of a context larger than the memory for it, and shared by sequences.

use std::ops::Range;

use outcore::{DType, PageSize, Runtime};
use outcore_kv::{KvLayout, KvPart, KvPool, KvShape, Sequence};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::kernels::{self, Level};
use crate::pool::Pool;

/// Tokens of a block at most: more are shared too seldom, fewer are more reads.
const TOKENS_MOST: u32 = 1024;
/// A wave of blocks takes at most this part of the frames: one is used while the next comes.
const WAVE_PART: u32 = 8;

/// What one pass over a layer's keys and values keeps of a query: the largest score so far, and the sum of the shares.
const STATE: usize = 2;

/// The layout of this model's keys and values on `runtime`: elements of 32 bits, in groups of one layer. A pass uses
/// one layer after the other, so a context that does not fit is read once.
pub fn layout(config: &Config, runtime: &Runtime) -> Result<KvLayout> {
    layout_in(config, runtime.stats().page_size)
}

/// The [`layout`] on a runtime with pages of this size.
pub fn layout_in(config: &Config, page: PageSize) -> Result<KvLayout> {
    let number = |n: usize| u32::try_from(n).map_err(|_| Error::Invalid(format!("{n} is too large for a model")));
    let shape = KvShape::new(number(config.layers)?, number(config.kv_heads)?, number(config.head_dim)?, DType::F32)?;
    // Keys and values of as many tokens as a page has room for.
    let tokens = page.bytes() / (2 * shape.row_bytes().get());
    match u32::try_from(tokens) {
        Ok(tokens @ 8..=TOKENS_MOST) => KvLayout::with(shape, page, tokens, 1),
        _ => KvLayout::new(shape, page),
    }
    .map_err(Error::from)
}

/// Keys and values of one sequence, in blocks of a pool.
#[derive(Debug)]
pub struct PagedKeys {
    sequence: Sequence,
    /// Blocks that are pinned at a time.
    wave: usize,
}

/// The operands of a layer's attention, of `m` tokens.
pub(crate) struct Operands<'a> {
    /// `[m x heads * head_dim]`.
    pub q: &'a [f32],
    /// `[m x kv_heads * head_dim]`, as the values.
    pub k: &'a [f32],
    pub v: &'a [f32],
}

impl PagedKeys {
    /// A sequence of a pool with the [`layout`] of the model. It may have tokens already, which the pool found.
    pub fn new(sequence: Sequence) -> Self {
        let pool = sequence.pool();
        let stats = pool.runtime().stats();
        let frames = stats.device.1.get() / stats.page_size.bytes();
        let wave = frames / u64::from(WAVE_PART) / pool.layout().pages().max(1);
        Self { wave: wave.max(1) as usize, sequence }
    }

    /// The sequence.
    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// Its pool.
    pub fn pool(&self) -> &KvPool {
        self.sequence.pool()
    }

    /// Blocks that are pinned at a time.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "attention on a GPU asks"))]
    pub(crate) fn wave(&self) -> usize {
        self.wave
    }

    /// Refuses a pool whose layout is not [that](layout) of the model's keys and values.
    pub(crate) fn check(&self, config: &Config) -> Result<()> {
        let shape = self.pool().layout().shape();
        let [layers, heads, head_dim] = [shape.layers(), shape.heads(), shape.head_dim()].map(|n| n as usize);
        if (layers, heads, head_dim) == (config.layers, config.kv_heads, config.head_dim) && shape.dtype() == DType::F32
        {
            return Ok(());
        }
        let wanted = format!("{} layers of {} heads of {} F32", config.layers, config.kv_heads, config.head_dim);
        Err(Error::Invalid(format!(
            "the pool is for {layers} layers of {heads} heads of {head_dim} {}, and the model has {wanted}: make its \
             layout with paged_kv::layout",
            shape.dtype()
        )))
    }

    /// Has the blocks leave the device: see [`Sequence::park`].
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "sessions on a GPU park"))]
    pub(crate) fn park(&mut self) -> Result<()> {
        Ok(self.sequence.park()?)
    }

    /// Makes room for these tokens.
    pub(crate) fn append(&mut self, tokens: &[u32]) -> Result<()> {
        let tokens: Vec<_> = tokens.iter().copied().map(outcore_kv::Token::new).collect();
        self.sequence.append(&tokens)?;
        Ok(())
    }

    /// All layers of the tokens below `end` are there.
    pub(crate) fn commit(&mut self, end: usize) -> Result<()> {
        Ok(self.sequence.commit(end as u64)?)
    }

    pub(crate) fn truncate(&mut self, len: usize) -> Result<()> {
        Ok(self.sequence.truncate(len as u64)?)
    }

    /// Another sequence with the same tokens.
    pub fn fork(&mut self) -> Self {
        Self { sequence: self.sequence.fork(), wave: self.wave }
    }

    fn blocks(&self, positions: Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let each = u64::from(self.pool().layout().block_tokens());
        let (start, end) = (positions.start, positions.end);
        (start / each..end.div_ceil(each)).map(move |nth| (nth * each).max(start)..((nth + 1) * each).min(end))
    }

    /// Writes the rows of new tokens, the first of which is at position `past`.
    fn write(&self, layer: u32, past: usize, operands: &Operands<'_>) -> Result<()> {
        let layout = self.pool().layout();
        let (group, place) = layout.group_of(layer);
        let row = layout.shape().row_bytes().get() as usize / size_of::<f32>();
        let end = past + operands.k.len() / row;
        for positions in self.blocks(past as u64..end as u64) {
            let mut blocks = self.sequence.write(group, positions.clone())?;
            let mut guard = blocks.pin().wait()?;
            let block = guard.view_mut::<f32>(0)?;
            let (_, first) = self.sequence.place(positions.start);
            let at = (positions.start as usize - past) * row;
            let len = (positions.end - positions.start) as usize * row;
            for (part, from) in [(KvPart::Keys, operands.k), (KvPart::Values, operands.v)] {
                let Some(rows) = layout.row(place, part, first) else { continue };
                let start = rows.start / size_of::<f32>();
                block[start..start + len].copy_from_slice(&from[at..at + len]);
            }
        }
        Ok(())
    }

    /// `softmax(q K^T / sqrt(head_dim)) V` for each head of each of the new tokens, of which each sees those before it:
    /// `[m x heads * head_dim]`. The sum goes over the positions in turn, block by block, with the largest score so far
    /// (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018). So a token's result depends on the
    /// tokens before it alone: not on those that are computed with it, nor on threads.
    pub(crate) fn attend(
        &self,
        config: &Config,
        (pool, level): (&Pool, Level),
        layer: usize,
        past: usize,
        operands: &Operands<'_>,
    ) -> Result<Vec<f32>> {
        let layer = layer as u32;
        self.write(layer, past, operands)?;
        let (hd, heads) = (config.head_dim, config.heads);
        let (group_heads, scale) = (heads / config.kv_heads, 1.0 / (hd as f32).sqrt());
        let row = config.kv_heads * hd;
        let m = operands.q.len() / (heads * hd);
        let layout = self.pool().layout();
        let (group, place) = layout.group_of(layer);
        let [keys_at, values_at] = [KvPart::Keys, KvPart::Values]
            .map(|part| layout.row(place, part, 0).map_or(0, |row| row.start / size_of::<f32>()));
        let mut state = vec![0f32; m * heads * (hd + STATE)];
        state.chunks_exact_mut(hd + STATE).for_each(|state| state[hd] = f32::NEG_INFINITY);
        let blocks: Vec<_> = self.blocks(0..(past + m) as u64).collect();
        let of_wave = |wave: &[Range<u64>]| wave.first().zip(wave.last()).map(|(a, b)| a.start..b.end);
        let mut waves = blocks.chunks(self.wave).peekable();
        while let Some(wave) = waves.next() {
            let Some(positions) = of_wave(wave) else { break };
            let blocks = self.sequence.read(group, positions)?;
            if let Some(next) = waves.peek().and_then(|wave| of_wave(wave)) {
                self.sequence.read(group, next)?.prefetch();
            }
            let guard = blocks.pin().wait()?;
            let views = (0..wave.len()).map(|nth| guard.view::<f32>(nth)).collect::<outcore::Result<Vec<_>>>()?;
            pool.run_chunks(&mut state, hd + STATE, |i, state| {
                let (t, h) = (i / heads, i % heads);
                let q = &operands.q[i * hd..(i + 1) * hd];
                for (positions, view) in wave.iter().zip(&views) {
                    let seen = (past + t + 1).min(positions.end as usize);
                    let Some(count) = seen.checked_sub(positions.start as usize).filter(|count| *count > 0) else {
                        return;
                    };
                    let at = |start: usize, nth: usize| {
                        let first = start + nth * row + h / group_heads * hd;
                        first..first + hd
                    };
                    let score = |nth: usize| scale * kernels::dot(level, q, &view[at(keys_at, nth)]);
                    let mut scores: Vec<f32> = (0..count).map(score).collect();
                    let (out, kept) = state.split_at_mut(hd);
                    let peak = scores.iter().fold(kept[0], |peak, score| peak.max(*score));
                    let shrink = (kept[0] - peak).exp();
                    out.iter_mut().for_each(|out| *out *= shrink);
                    kept[1] *= shrink;
                    kept[0] = peak;
                    for (nth, score) in scores.iter_mut().enumerate() {
                        let share = (*score - peak).exp();
                        kept[1] += share;
                        kernels::axpy(level, share, &view[at(values_at, nth)], out);
                    }
                }
            });
        }
        let mut out = vec![0f32; m * heads * hd];
        for (out, state) in out.chunks_exact_mut(hd).zip(state.chunks_exact(hd + STATE)) {
            let total = state[hd + 1];
            out.iter_mut().zip(state).for_each(|(out, sum)| *out = sum / total);
        }
        Ok(out)
    }
}
