//! Attention over blocks of keys and values, on the processor: what each block adds to a token's result, and the sum of
//! that over the blocks in turn.
//!
//! A result depends on the token's query, the keys and values before it, and where blocks begin: neither on which
//! tokens are computed with it, nor on which blocks are at hand at a time, nor on threads. For that, each block is
//! summed by itself, over its positions in turn, and then added to the blocks before it.

use std::ops::Range;

use crate::config::{Config, Window};
use crate::kernels::{self, Level};

/// What is kept of a head beside the sum of its values: the largest score so far, and the sum of the shares.
const STATE: usize = 2;
/// Positions whose rows are used by all heads of a group before the next ones: they stay in the first cache.
const TILE: usize = 32;

/// How the product of a query and a key becomes a score.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scores {
    scale: f32,
    cap: Option<f32>,
}

impl Scores {
    pub fn new(config: &Config) -> Self {
        Self { scale: config.attention_scale, cap: config.attention_cap }
    }

    pub fn of(self, product: f32) -> f32 {
        let score = self.scale * product;
        self.cap.map_or(score, |cap| cap * (score / cap).tanh())
    }
}

/// The positions that the token at `position` sees, itself included.
pub(crate) fn seen(position: usize, window: Option<&Window>) -> Range<usize> {
    let first = window.map_or(0, |window| (position + 1).saturating_sub(window.tokens));
    first..position + 1
}

/// The query heads that share a head of keys and values, in blocks of one layout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadGroup {
    pub level: Level,
    pub scores: Scores,
    /// Query heads.
    pub heads: usize,
    pub head_dim: usize,
    /// Elements from a position's row to the next one's.
    pub row: usize,
    /// Where the first position's keys, and its values, begin in a block, of this head of keys and values.
    pub keys_at: usize,
    pub values_at: usize,
}

impl HeadGroup {
    /// Elements of the state of a token's heads of this group.
    pub fn state_len(&self) -> usize {
        self.heads * (self.head_dim + STATE)
    }

    /// The state before the first block.
    pub fn begin(&self, state: &mut [f32]) {
        state.fill(0.0);
        state.chunks_exact_mut(self.head_dim + STATE).for_each(|state| state[self.head_dim] = f32::NEG_INFINITY);
    }

    /// What these positions of a block, at least one, give a token with the query heads `q`, into `part`.
    pub fn attend(&self, q: &[f32], block: &[f32], seen: Range<usize>, part: &mut [f32]) {
        let Self { level, heads, head_dim, row, .. } = *self;
        let count = seen.len();
        let [keys_at, values_at] = [self.keys_at, self.values_at].map(|at| at + seen.start * row);
        let tiles = || (0..count).step_by(TILE).map(|first| first..(first + TILE).min(count));
        let mut scores = vec![0f32; heads * count];
        for tile in tiles() {
            for (q, scores) in q.chunks_exact(head_dim).zip(scores.chunks_exact_mut(count)) {
                let scores = &mut scores[tile.clone()];
                kernels::dots(level, q, &block[keys_at + tile.start * row..], row, scores);
                scores.iter_mut().for_each(|score| *score = self.scores.of(*score));
            }
        }
        part.fill(0.0);
        for (part, scores) in part.chunks_exact_mut(head_dim + STATE).zip(scores.chunks_exact_mut(count)) {
            let peak = scores.iter().fold(f32::NEG_INFINITY, |peak, score| peak.max(*score));
            kernels::exp_less(level, scores, peak);
            part[head_dim] = peak;
            part[head_dim + 1] = scores.iter().sum();
        }
        for tile in tiles() {
            for (part, scores) in part.chunks_exact_mut(head_dim + STATE).zip(scores.chunks_exact(count)) {
                let values = &block[values_at + tile.start * row..];
                kernels::add_rows(level, &scores[tile.clone()], values, row, &mut part[..head_dim]);
            }
        }
    }

    /// Adds what a block gave to the blocks before it (Milakov and Gimelshein, Online normalizer calculation for
    /// softmax, 2018).
    pub fn add(&self, state: &mut [f32], part: &[f32]) {
        let each = self.head_dim + STATE;
        for (state, part) in state.chunks_exact_mut(each).zip(part.chunks_exact(each)) {
            let (sum, kept) = state.split_at_mut(self.head_dim);
            let (more, new) = part.split_at(self.head_dim);
            let peak = kept[0].max(new[0]);
            let [old_share, new_share] = [kept[0], new[0]].map(|score| (score - peak).exp());
            sum.iter_mut().zip(more).for_each(|(sum, more)| *sum = *sum * old_share + more * new_share);
            kept[1] = kept[1] * old_share + new[1] * new_share;
            kept[0] = peak;
        }
    }

    /// The heads' results, `heads * head_dim` elements, behind the last block. `sinks` has a score for each of the
    /// heads, if there are any: its share of the softmax goes to nothing.
    pub fn end(&self, state: &[f32], sinks: Option<&[f32]>, out: &mut [f32]) {
        let heads = state.chunks_exact(self.head_dim + STATE);
        for (head, (out, state)) in out.chunks_exact_mut(self.head_dim).zip(heads).enumerate() {
            let [peak, total] = [state[self.head_dim], state[self.head_dim + 1]];
            let Some(sink) = sinks.map(|sinks| sinks[head]) else {
                out.iter_mut().zip(state).for_each(|(out, sum)| *out = sum / total);
                continue;
            };
            let most = peak.max(sink);
            let share = (peak - most).exp();
            let total = total * share + (sink - most).exp();
            out.iter_mut().zip(state).for_each(|(out, sum)| *out = sum * share / total);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `softmax(scores(q K^T)) V`, at once, in 64 bits.
    fn plain(q: &[f32], keys: &[f32], values: &[f32], (scale, cap, sink): (f64, Option<f64>, Option<f32>)) -> Vec<f64> {
        let head_dim = q.len();
        let score = |k: &[f32]| {
            let score = scale * q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>();
            cap.map_or(score, |cap| cap * (score / cap).tanh())
        };
        let scores: Vec<f64> = keys.chunks_exact(head_dim).map(score).collect();
        let to_nothing = sink.map_or(0.0, |sink| f64::from(sink).exp());
        let total = scores.iter().map(|score| score.exp()).sum::<f64>() + to_nothing;
        let of = |d: usize| {
            let shares = scores.iter().zip(values.chunks_exact(head_dim));
            shares.map(|(score, v)| score.exp() * f64::from(v[d])).sum::<f64>() / total
        };
        (0..head_dim).map(of).collect()
    }

    #[test]
    fn blocks_in_turn_give_what_all_positions_at_once_give() {
        let (heads, head_dim, tokens) = (3, 24, 70);
        let row = 2 * head_dim;
        let mut random = outcore_testkit::harness::Rng::new(5);
        let mut numbers = |n: usize| (0..n).map(|_| random.below(2001) as f32 / 500.0 - 2.0).collect::<Vec<f32>>();
        // Two heads of keys and values; this group uses the second one. Keys first, then values, as in a layout.
        let blocks: Vec<Vec<f32>> = (0..3).map(|_| numbers(2 * tokens * row)).collect();
        let q = numbers(heads * head_dim);
        // Below, among and above the scores.
        let some_sinks = [-9.0, 0.5, 9.0];
        let windowed = |tokens| Window { tokens, layers: vec![true], rope_frequencies: None };
        for (end, window, cap, sinks) in [
            (1, None, None, None),
            (32, None, None, Some(&some_sinks)),
            (33, None, Some(2.0), None),
            (70, Some(windowed(70)), None, Some(&some_sinks)),
            (71, Some(windowed(1)), None, Some(&some_sinks)),
            (140, Some(windowed(33)), Some(2.0), None),
            (199, Some(windowed(128)), None, None),
            (210, Some(windowed(1000)), None, Some(&some_sinks)),
            (210, None, None, None),
        ] {
            let scale = 1.0 / (head_dim as f32).sqrt();
            let group = HeadGroup {
                level: Level::detect(),
                scores: Scores { scale, cap },
                heads,
                head_dim,
                row,
                keys_at: head_dim,
                values_at: tokens * row + head_dim,
            };
            let all_seen = seen(end - 1, window.as_ref());
            assert_eq!(all_seen.end, end);
            let mut state = vec![0f32; group.state_len()];
            let mut part = state.clone();
            let mut out = vec![0f32; heads * head_dim];
            group.begin(&mut state);
            for (nth, block) in blocks.iter().enumerate() {
                let [start, end] = [all_seen.start, all_seen.end]
                    .map(|position| position.clamp(nth * tokens, (nth + 1) * tokens) - nth * tokens);
                if start < end {
                    group.attend(&q, block, start..end, &mut part);
                    group.add(&mut state, &part);
                }
            }
            group.end(&state, sinks.map(|sinks| &sinks[..]), &mut out);
            let rows = |start: usize| -> Vec<f32> {
                let row_of = |n: usize| &blocks[n / tokens][start + n % tokens * row..][..head_dim];
                all_seen.clone().flat_map(|n| row_of(n).to_vec()).collect()
            };
            let (keys, values) = (rows(group.keys_at), rows(group.values_at));
            for (head, (q, out)) in q.chunks_exact(head_dim).zip(out.chunks_exact(head_dim)).enumerate() {
                let how = (f64::from(scale), cap.map(f64::from), sinks.map(|sinks| sinks[head]));
                for (out, plain) in out.iter().zip(plain(q, &keys, &values, how)) {
                    assert!((f64::from(*out) - plain).abs() < 1e-4, "{all_seen:?}: {out} and {plain}");
                }
            }
        }
    }
}
