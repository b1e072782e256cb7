//! Keys and values in blocks of a pool: of a context larger than the memory for it, and shared by sequences.

use std::ops::Range;

use outcore::{Bytes, DType, PageSize, Runtime};
use outcore_kv::{KvLayout, KvPart, KvPool, KvShape, KvWindow, Sequence};

use crate::block_attention::{HeadGroup, Scores, seen};
use crate::config::Config;
use crate::dtype::KvType;
use crate::error::{Error, Result};
use crate::kernels::Level;
use crate::pool::Pool;

/// So many tokens of a block are never too many.
const TOKENS_FEW: u64 = 64;
/// A layout has no larger blocks.
const TOKENS_LIMIT: u64 = 4096;
/// A wave of blocks takes at most this part of the frames: one is used while the next ones come.
const WAVE_PART: u64 = 8;
/// Waves that are asked for ahead of the one that is used, where the policy follows no plan.
const WAVES_AHEAD: usize = 2;
/// A sequence with more than this part of the frames is declared: below it, all of it stays.
const PLANNED_PART: u64 = 2;
/// With so many results each is one thread's work; fewer would leave threads without.
const RESULTS_MANY: usize = 32;

/// Tokens of a block of one layer, at most: a sequence of this length wastes no more of its last blocks than a quarter.
fn tokens_most(context: u64) -> u64 {
    (context / 4).clamp(TOKENS_FEW, TOKENS_LIMIT)
}

/// The layout of this model's keys and values on `runtime`, for sequences of up to about `context` tokens: elements of
/// 32 bits, in groups of one layer. A pass uses one layer after the other, so a context that does not fit is read once.
/// If a page has room for more tokens of a layer than such sequences could use, a block has several layers. It knows
/// the model's windows.
pub fn layout(config: &Config, runtime: &Runtime, context: u64) -> Result<KvLayout> {
    layout_of(config, runtime, context, KvType::F32)
}

/// The [`layout`], in elements of `kv`. Only a GPU computes with those of 16 bits.
pub fn layout_of(config: &Config, runtime: &Runtime, context: u64, kv: KvType) -> Result<KvLayout> {
    layout_in(config, runtime.stats().page_size, context, kv)
}

/// The [`layout_of`] on a runtime with pages of this size.
pub fn layout_in(config: &Config, page: PageSize, context: u64, kv: KvType) -> Result<KvLayout> {
    let layout = layout_without_windows(config, page, context, kv)?;
    let window_of = |layer: u32| {
        let window = config.window_of(layer as usize)?;
        // One that is longer than any sequence is none, nor is one that the configuration gave no tokens.
        KvWindow::new(u32::try_from(window.tokens).ok()?).ok()
    };
    Ok(layout.with_windows(window_of))
}

fn layout_without_windows(config: &Config, page: PageSize, context: u64, kv: KvType) -> Result<KvLayout> {
    let shape = shape(config, kv)?;
    let tokens = page.bytes() / (2 * shape.row_bytes().get());
    let one_layer = |most| {
        let tokens = u32::try_from(tokens).ok().filter(|tokens| (8..=most).contains(&u64::from(*tokens)))?;
        Some(KvLayout::with(shape, page, tokens, 1))
    };
    if let Some(Ok(layout)) = one_layer(tokens_most(context)) {
        return Ok(layout);
    }
    // Or rows are so short that no block of a few tokens fills a page.
    KvLayout::new(shape, page).or_else(|error| one_layer(TOKENS_LIMIT).unwrap_or(Err(error))).map_err(Error::from)
}

/// The largest page size, up to `most`, with which [`layout`] has groups of one layer; no less than `least`. `most` for
/// a model whose keys and values have no layout.
pub fn page_size(config: &Config, context: u64, [least, most]: [PageSize; 2]) -> PageSize {
    let Ok(shape) = shape(config, KvType::F32) else { return most };
    let room = 2 * shape.row_bytes().get() * (tokens_most(context) + 1) - 1;
    // What is too small for a page is below the least.
    PageSize::new(Bytes::new(1 << room.max(1).ilog2())).map_or(least, |size| size.min(most).max(least))
}

fn shape(config: &Config, kv: KvType) -> Result<KvShape> {
    let number = |n: usize| u32::try_from(n).map_err(|_| Error::Invalid(format!("{n} is too large for a model")));
    Ok(KvShape::new(number(config.layers)?, number(config.kv_heads)?, number(config.head_dim)?, element(kv))?)
}

fn element(kv: KvType) -> DType {
    match kv {
        KvType::F32 => DType::F32,
        KvType::F16 => DType::F16,
    }
}

/// Keys and values of one sequence, in blocks of a pool.
#[derive(Debug)]
pub struct PagedKeys {
    sequence: Sequence,
    /// Blocks that are pinned at a time.
    wave: usize,
    /// A sequence whose passes use no more needs no plan of them.
    stays: Bytes,
}

/// The positions of which a pass reads a layer's blocks, by the blocks that are pinned together.
struct Waves {
    first: u64,
    end: u64,
    /// Where the first block begins.
    start: u64,
    /// Tokens of a wave's blocks.
    step: u64,
}

impl Waves {
    fn iter(&self) -> impl ExactSizeIterator<Item = Range<u64>> + use<> {
        let Self { first, end, start, step } = *self;
        let count = end.saturating_sub(start).div_ceil(step) as usize;
        (0..count).map(move |nth| {
            let begin = start + nth as u64 * step;
            begin.max(first)..(begin + step).min(end)
        })
    }
}

/// The operands of a layer's attention, of `m` tokens.
pub(crate) struct Operands<'a> {
    /// `[m x heads * head_dim]`.
    pub q: &'a [f32],
    /// `[m x kv_heads * head_dim]`, as the values.
    pub k: &'a [f32],
    pub v: &'a [f32],
    /// `[heads]`: see [`HeadGroup::end`].
    pub sinks: Option<&'a [f32]>,
}

impl PagedKeys {
    /// A sequence of a pool with the [`layout`] of the model. It may have tokens already, which the pool found.
    pub fn new(sequence: Sequence) -> Self {
        let pool = sequence.pool();
        let (stats, layout) = (pool.runtime().stats(), pool.layout());
        let (device, block) = (stats.device.budget.get(), layout.block_room().get());
        let wave = stats.settings.step.value.get().min(device / WAVE_PART) / block;
        Self { wave: wave.max(1) as usize, stays: Bytes::new(device / PLANNED_PART), sequence }
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

    /// How the pool stores elements. Refuses one whose layout is not [that](layout) of the model's keys and values, in
    /// elements of one of `kinds`.
    pub(crate) fn check(&self, config: &Config, kinds: &[KvType]) -> Result<KvType> {
        let shape = self.pool().layout().shape();
        let [layers, heads, head_dim] = [shape.layers(), shape.heads(), shape.head_dim()].map(|n| n as usize);
        let kind = kinds.iter().find(|kind| element(**kind) == shape.dtype());
        if let Some(kind) = kind
            && (layers, heads, head_dim) == (config.layers, config.kv_heads, config.head_dim)
        {
            return Ok(*kind);
        }
        let kinds: Vec<String> = kinds.iter().map(|kind| element(*kind).to_string()).collect();
        let wanted = format!(
            "{} layers of {} heads of {} {}",
            config.layers,
            config.kv_heads,
            config.head_dim,
            kinds.join(" or ")
        );
        Err(Error::Invalid(format!(
            "the pool is for {layers} layers of {heads} heads of {head_dim} {}, and the model has {wanted}: make its \
             layout with paged_kv::layout",
            shape.dtype()
        )))
    }

    /// Has the blocks leave the device: see [`Sequence::park`].
    pub(crate) fn park(&mut self) -> Result<()> {
        Ok(self.sequence.park()?)
    }

    /// Makes room for these tokens.
    pub(crate) fn append(&mut self, tokens: &[u32]) -> Result<()> {
        let tokens: Vec<_> = tokens.iter().copied().map(outcore_kv::Token::new).collect();
        let start = self.sequence.len();
        // Before the tokens are there: the order is then declared for the pass that reads them.
        if self.pool().layout().pass_bytes(start..start + tokens.len() as u64) > self.stays {
            self.sequence.plan_passes()?;
        }
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
        Self { sequence: self.sequence.fork(), ..*self }
    }

    fn blocks(&self, positions: Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let each = u64::from(self.pool().layout().block_tokens());
        let (start, end) = (positions.start, positions.end);
        (start / each..end.div_ceil(each)).map(move |nth| (nth * each).max(start)..((nth + 1) * each).min(end))
    }

    /// The blocks below position `end` that the token at `position` sees in a layer.
    fn waves(&self, config: &Config, layer: u32, position: usize, end: usize) -> Waves {
        let each = u64::from(self.pool().layout().block_tokens());
        let first = seen(position, config.window_of(layer as usize)).start as u64;
        Waves { first, end: end as u64, start: first / each * each, step: self.wave as u64 * each }
    }

    /// What is asked for while wave `nth` of a layer is used, in a pass over these positions: its group, and positions.
    fn ahead(&self, config: &Config, layer: u32, pass: Range<usize>, nth: usize) -> Option<(u32, Range<u64>)> {
        let layers = self.pool().layout().shape().layers();
        let mut nth = nth + WAVES_AHEAD;
        for at in (layer..).take(WAVES_AHEAD + 1) {
            // The next pass goes on with the first layer, for the token behind these. Its block may not be there yet.
            let position = if at < layers { pass.start } else { pass.end };
            let mut waves = self.waves(config, at % layers, position, pass.end).iter();
            let count = waves.len();
            if let Some(positions) = waves.nth(nth) {
                return Some((self.pool().layout().group_of(at % layers).0, positions));
            }
            nth -= count;
        }
        None
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

    /// `softmax(scores(q K^T)) V` for each head of each of the new tokens, of which each sees those before it, or those
    /// of the layer's window: `[m x heads * head_dim]`. Blocks are summed in turn, as [`HeadGroup`] says.
    pub(crate) fn attend(
        &self,
        config: &Config,
        (pool, level): (&Pool, Level),
        layer: usize,
        past: usize,
        operands: &Operands<'_>,
    ) -> Result<Vec<f32>> {
        let window = config.window_of(layer);
        let layer = layer as u32;
        self.write(layer, past, operands)?;
        let (head_dim, kv_heads) = (config.head_dim, config.kv_heads);
        let layout = self.pool().layout();
        let (group, place) = layout.group_of(layer);
        let [keys_at, values_at] = [KvPart::Keys, KvPart::Values]
            .map(|part| layout.row(place, part, 0).map_or(0, |row| row.start / size_of::<f32>()));
        let of_head = |kv_head: usize| HeadGroup {
            level,
            scores: Scores::new(config),
            heads: config.heads / kv_heads,
            head_dim,
            row: kv_heads * head_dim,
            keys_at: keys_at + kv_head * head_dim,
            values_at: values_at + kv_head * head_dim,
        };
        // A result of a token and a head of keys and values each.
        let (queries, each) = (of_head(0).heads * head_dim, of_head(0).state_len());
        let m = operands.q.len() / (kv_heads * queries);
        let results = m * kv_heads;
        let mut state = vec![0f32; results * each];
        state.chunks_exact_mut(each).for_each(|state| of_head(0).begin(state));
        let mut parts = Vec::new();

        // A policy that follows the plan asks for them itself.
        let hinted = !self.pool().runtime().observe().is_planned();
        let waves = self.waves(config, layer, past, past + m);
        for (nth, positions) in waves.iter().enumerate() {
            let wave: Vec<_> = self.blocks(positions.clone()).collect();
            let blocks = self.sequence.read(group, positions)?;
            if let Some((group, positions)) = self.ahead(config, layer, past..past + m, nth).filter(|_| hinted) {
                self.sequence.read(group, positions)?.prefetch();
            }
            let guard = blocks.pin().wait()?;
            let views = (0..wave.len()).map(|nth| guard.view::<f32>(nth)).collect::<outcore::Result<Vec<_>>>()?;
            // The positions of a block that the token of a result sees, counted from where the block begins.
            let each_block = layout.block_tokens() as usize;
            let seen = |result: usize, block: usize| {
                let begin = wave[block].start as usize / each_block * each_block;
                let seen = seen(past + result / kv_heads, window);
                seen.start.saturating_sub(begin)..seen.end.min(wave[block].end as usize).saturating_sub(begin)
            };
            let attend = |result: usize, block: usize, seen: Range<usize>, part: &mut [f32]| {
                let q = &operands.q[result * queries..][..queries];
                of_head(result % kv_heads).attend(q, views[block], seen, part);
            };
            if results >= RESULTS_MANY {
                pool.run_chunks(&mut state, each, |result, state| {
                    let mut part = vec![0f32; each];
                    for block in 0..wave.len() {
                        let seen = seen(result, block);
                        if !seen.is_empty() {
                            attend(result, block, seen, &mut part);
                            of_head(0).add(state, &part);
                        }
                    }
                });
                continue;
            }
            // Too few to keep all threads busy: blocks are summed side by side.
            parts.resize(results * wave.len() * each, 0f32);
            pool.run_chunks(&mut parts, each, |nth, part| {
                let (result, block) = (nth / wave.len(), nth % wave.len());
                let seen = seen(result, block);
                if !seen.is_empty() {
                    attend(result, block, seen, part);
                }
            });
            let parts = parts.chunks_exact(each * wave.len());
            for (result, (state, parts)) in state.chunks_exact_mut(each).zip(parts).enumerate() {
                let parts = parts.chunks_exact(each).enumerate();
                for (_, part) in parts.filter(|(block, _)| !seen(result, *block).is_empty()) {
                    of_head(0).add(state, part);
                }
            }
        }
        let mut out = vec![0f32; results * queries];
        for (result, (out, state)) in out.chunks_exact_mut(queries).zip(state.chunks_exact(each)).enumerate() {
            let heads = of_head(0).heads;
            let sinks = operands.sinks.map(|sinks| &sinks[result % kv_heads * heads..][..heads]);
            of_head(0).end(state, sinks, out);
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use outcore_kv::{TenantId, Token};

    use super::*;
    use crate::arch::Arch;
    use crate::dtype::WeightType;
    use crate::files::ModelFiles;
    use crate::synthetic::Spec;

    /// What is asked for ahead is what the pass reads two waves later: in layers with a window and without, and beyond
    /// the last layer. Layers were taken to have as many waves as the one before them.
    #[test]
    fn regression_what_is_asked_for_ahead_is_what_the_next_layers_read() {
        let folder = tempfile::tempdir().unwrap();
        let page = PageSize::new(Bytes::kib(16)).unwrap();
        // Waves are of one block, and of several.
        for (window, pages) in [(41, 16), (3, 64), (41, 64), (150, 80), (2000, 64)] {
            let path = folder.path().join("model.gguf");
            let spec = Spec { layers: 5, context: 2048, window, ..Spec::small(Arch::GptOss, WeightType::Q8_0) };
            spec.write_gguf(&path).unwrap();
            let config = Config::new(&ModelFiles::open(&path).unwrap()).unwrap();
            let budget = Bytes::new(pages * page.bytes());
            let runtime = Runtime::builder().page_size(page).device_budget(budget).open().unwrap();
            let pool = KvPool::open(&runtime, layout(&config, &runtime, 0).unwrap(), b"", 64).unwrap();
            let mut keys = PagedKeys::new(pool.begin(TenantId::new(1), &[]).unwrap());
            keys.sequence.append(&vec![Token::new(1); 500]).unwrap();
            for pass in [400..401, 399..500, 0..1, 0..16, 495..496] {
                // Of this pass, and of the next one as far as its blocks are there.
                let of_layer = |(layer, position): (u32, usize)| {
                    let waves = keys.waves(&config, layer, position, pass.end).iter();
                    waves.map(move |positions| (layer, positions)).collect::<Vec<_>>()
                };
                let this: Vec<_> = (0..5).flat_map(|layer| of_layer((layer, pass.start))).collect();
                let next = (0..2).flat_map(|layer| of_layer((layer, pass.end)));
                let all: Vec<_> = this.iter().cloned().chain(next).collect();
                let mut at = 0;
                for layer in 0..5 {
                    for nth in 0..of_layer((layer, pass.start)).len() {
                        let ahead = keys.ahead(&config, layer, pass.clone(), nth);
                        assert_eq!(ahead.as_ref(), all.get(at + WAVES_AHEAD), "window {window}, {pass:?}, {layer}");
                        at += 1;
                    }
                }
                // All blocks that are read, once each.
                for layer in 0..5 {
                    let first = seen(pass.start, config.window_of(layer as usize)).start as u64;
                    let waves: Vec<_> = of_layer((layer, pass.start)).into_iter().map(|(_, wave)| wave).collect();
                    let ends = [first].into_iter().chain(waves.iter().map(|wave| wave.end));
                    assert!(ends.eq(waves.iter().map(|wave| wave.start).chain([pass.end as u64])));
                }
            }
            drop((keys, pool));
            runtime.close().unwrap();
        }
    }
}
