//! Rotary position embedding (Su et al., RoFormer, 2021).

use crate::config::RopePairs;

/// Sines and cosines for the positions of one pass: `[positions x pairs]`.
pub(crate) struct Turns {
    pairs: usize,
    table: Vec<(f32, f32)>,
}

impl Turns {
    /// For these positions, each with its frequencies, of which all have equally many. Sines and cosines are multiplied
    /// by `scale`.
    pub fn new<'a>(scale: f32, positions: impl Iterator<Item = (usize, &'a [f32])>) -> Self {
        let angle = |p: usize, f: f32| {
            let (sin, cos) = (p as f32 * f).sin_cos();
            (sin * scale, cos * scale)
        };
        let mut turns = Self { pairs: 0, table: Vec::new() };
        for (position, frequencies) in positions {
            turns.pairs = frequencies.len();
            turns.table.extend(frequencies.iter().map(|f| angle(position, *f)));
        }
        turns
    }

    /// Turns every head of every position; elements beyond the turned pairs stay as they are.
    pub fn apply(&self, x: &mut [f32], heads: usize, head_dim: usize, pairs: RopePairs) {
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
