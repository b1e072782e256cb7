//! Mixtures of experts: their sizes, and the part that a pass uses.

use serde::Serialize;

use crate::ids::Bytes;

/// The experts among which each layer's router chooses. A shared expert, which all tokens use, is not one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Experts {
    /// Experts of each layer, at least 1.
    pub count: u64,
    /// How many of them a token uses: from 1 to all.
    pub active: u64,
    /// Elements of an expert's feed-forward layer.
    pub ffn: u64,
    /// Elements of the feed-forward layer that all tokens use in addition; 0 if there is none.
    pub shared_ffn: u64,
    /// Parameters of all experts of all layers.
    pub parameters: u64,
    /// Their weights as they are stored.
    #[serde(rename = "weights_bytes")]
    pub weights: Bytes,
    /// Bytes of one expert in one tensor, where the tensors are known.
    #[serde(skip)]
    pub piece: Option<Bytes>,
}

impl Experts {
    /// How many of a layer's experts `tokens` tokens are expected to use, if each token draws its own evenly and
    /// independently: `E (1 - (1 - k/E)^b)`. Trained routers are not even, and tokens of one text are alike: then it is
    /// fewer.
    pub fn distinct(&self, tokens: u64) -> f64 {
        let (count, active) = (self.count.max(1) as f64, self.active as f64);
        if self.active >= self.count {
            return count;
        }
        // 1 - (1 - p)^b, where p may be small and b large.
        let drawn = -(tokens as f64 * (-active / count).ln_1p()).exp_m1();
        (count * drawn).clamp(active.min(count), count)
    }

    /// The share of the experts' bytes that `tokens` tokens use: from 0 to 1.
    pub fn share(&self, tokens: u64) -> f64 {
        self.distinct(tokens) / self.count.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn experts(count: u64, active: u64) -> Experts {
        Experts { count, active, ffn: 1, shared_ffn: 0, parameters: 1, weights: Bytes::new(1), piece: None }
    }

    #[test]
    fn as_many_are_used_as_are_expected_of_even_draws() {
        let near = |found: f64, wanted: f64| assert!((found - wanted).abs() < 1e-9 * wanted, "{found} {wanted}");
        near(experts(128, 8).distinct(1), 8.0);
        near(experts(8, 2).distinct(2), 8.0 * (1.0 - 0.75f64.powi(2)));
        near(experts(128, 8).distinct(16), 128.0 * (1.0 - 0.9375f64.powi(16)));
        near(experts(8, 8).distinct(7), 8.0);
        near(experts(1, 1).distinct(1), 1.0);
        near(experts(1 << 24, 1).distinct(1), 1.0);
        near(experts(8, 1).distinct(u64::MAX), 8.0);
    }

    /// Expected numbers agree with drawn ones.
    #[test]
    fn draws_agree() {
        let (count, active, tokens, rounds) = (16u64, 3, 5, 4000);
        let mut state = 7u64;
        let mut below = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        let mut used = 0u32;
        for _ in 0..rounds {
            let mut all = 0u64;
            for _ in 0..tokens {
                let mut own = 0u64;
                while u64::from(own.count_ones()) < active {
                    own |= 1 << below(count);
                }
                all |= own;
            }
            used += all.count_ones();
        }
        let mean = f64::from(used) / f64::from(rounds);
        assert!((mean / experts(count, active).distinct(tokens) - 1.0).abs() < 0.01, "{mean}");
    }
}
