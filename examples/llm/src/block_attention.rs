//! Attention over blocks of keys and values, on the processor: what each block adds to a token's result, and the sum of
//! that over the blocks in turn.
//!
//! A result depends on the token's query, the keys and values before it, and where blocks begin: neither on which
//! tokens are computed with it, nor on which blocks are at hand at a time, nor on threads. For that, each block is
//! summed by itself, over its positions in turn, and then added to the blocks before it.

use crate::kernels::{self, Level};

/// What is kept of a head beside the sum of its values: the largest score so far, and the sum of the shares.
const STATE: usize = 2;
/// Positions whose rows are used by all heads of a group before the next ones: they stay in the first cache.
const TILE: usize = 32;

/// The query heads that share a head of keys and values, in blocks of one layout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadGroup {
    pub level: Level,
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

    /// What the first `count` positions of a block, at least one, give a token with the query heads `q`, into `part`.
    pub fn attend(&self, q: &[f32], block: &[f32], count: usize, part: &mut [f32]) {
        let Self { level, heads, head_dim, row, keys_at, values_at } = *self;
        let at = |start: usize, nth: usize| start + nth * row..start + nth * row + head_dim;
        let tiles = || (0..count).step_by(TILE).map(|first| first..(first + TILE).min(count));
        let scale = 1.0 / (head_dim as f32).sqrt();
        let mut scores = vec![0f32; heads * count];
        for tile in tiles() {
            for (q, scores) in q.chunks_exact(head_dim).zip(scores.chunks_exact_mut(count)) {
                for nth in tile.clone() {
                    scores[nth] = scale * kernels::dot(level, q, &block[at(keys_at, nth)]);
                }
            }
        }
        part.fill(0.0);
        for (part, scores) in part.chunks_exact_mut(head_dim + STATE).zip(scores.chunks_exact_mut(count)) {
            let peak = scores.iter().fold(f32::NEG_INFINITY, |peak, score| peak.max(*score));
            scores.iter_mut().for_each(|score| *score = (*score - peak).exp());
            part[head_dim] = peak;
            part[head_dim + 1] = scores.iter().sum();
        }
        for tile in tiles() {
            for (part, scores) in part.chunks_exact_mut(head_dim + STATE).zip(scores.chunks_exact(count)) {
                for nth in tile.clone() {
                    kernels::axpy(level, scores[nth], &block[at(values_at, nth)], &mut part[..head_dim]);
                }
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

    /// The heads' results, `heads * head_dim` elements, behind the last block.
    pub fn end(&self, state: &[f32], out: &mut [f32]) {
        let heads = state.chunks_exact(self.head_dim + STATE);
        for (out, state) in out.chunks_exact_mut(self.head_dim).zip(heads) {
            let total = state[self.head_dim + 1];
            out.iter_mut().zip(state).for_each(|(out, sum)| *out = sum / total);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `softmax(q K^T / sqrt(head_dim)) V`, at once, in 64 bits.
    fn plain(q: &[f32], keys: &[f32], values: &[f32], head_dim: usize) -> Vec<f64> {
        let scores: Vec<f64> = keys
            .chunks_exact(head_dim)
            .map(|k| {
                q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() / (head_dim as f64).sqrt()
            })
            .collect();
        let total: f64 = scores.iter().map(|score| score.exp()).sum();
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
        let group = HeadGroup {
            level: Level::detect(),
            heads,
            head_dim,
            row,
            keys_at: head_dim,
            values_at: tokens * row + head_dim,
        };
        let q = numbers(heads * head_dim);
        for seen in [1, 32, 33, 70, 71, 140, 199, 210] {
            let mut state = vec![0f32; group.state_len()];
            let mut part = state.clone();
            let mut out = vec![0f32; heads * head_dim];
            group.begin(&mut state);
            for (nth, block) in blocks.iter().enumerate() {
                let count = seen.min((nth + 1) * tokens).saturating_sub(nth * tokens);
                if count > 0 {
                    group.attend(&q, block, count, &mut part);
                    group.add(&mut state, &part);
                }
            }
            group.end(&state, &mut out);
            let rows = |start: usize| -> Vec<f32> {
                let row_of = |n: usize| &blocks[n / tokens][start + n % tokens * row..][..head_dim];
                (0..seen).flat_map(|n| row_of(n).to_vec()).collect()
            };
            let (keys, values) = (rows(group.keys_at), rows(group.values_at));
            for (q, out) in q.chunks_exact(head_dim).zip(out.chunks_exact(head_dim)) {
                for (out, plain) in out.iter().zip(plain(q, &keys, &values, head_dim)) {
                    assert!((f64::from(*out) - plain).abs() < 1e-4, "{seen} positions: {out} and {plain}");
                }
            }
        }
    }
}
