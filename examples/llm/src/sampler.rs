//! Choosing the next token.

use std::cmp::Ordering;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Chooses tokens from logits: the best one, or by chance with a seed. The same seed and logits give the same tokens.
#[derive(Debug)]
pub struct Sampler {
    temperature: f32,
    top_k: usize,
    top_p: f32,
    rng: StdRng,
}

impl Sampler {
    /// Always the token with the largest logit; of equals, the first.
    pub fn greedy() -> Self {
        Self::new(0.0, 0)
    }

    /// Draws from `softmax(logits / temperature)`; a temperature of 0 (or less) is greedy.
    pub fn new(temperature: f32, seed: u64) -> Self {
        Self { temperature, top_k: 0, top_p: 1.0, rng: StdRng::seed_from_u64(seed) }
    }

    /// Draws among the `k` most probable tokens only; 0 means all.
    #[must_use]
    pub fn top_k(mut self, k: usize) -> Self {
        self.top_k = k;
        self
    }

    /// Draws among the fewest most probable tokens whose probabilities reach `p` (Holtzman et al., 2020).
    #[must_use]
    pub fn top_p(mut self, p: f32) -> Self {
        self.top_p = p;
        self
    }

    /// What a device needs to choose as [`sample`](Self::sample) would, or `None` where it cannot: it draws from all
    /// tokens.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the host samples by itself"))]
    pub(crate) fn draw(&mut self) -> Option<Draw> {
        if self.temperature <= 0.0 {
            return Some(Draw::Best);
        }
        let all = self.top_k == 0 && self.top_p >= 1.0;
        all.then(|| Draw::Chance { temperature: self.temperature, uniform: self.rng.random() })
    }

    /// The next token. 0 for empty `logits`.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        if self.temperature <= 0.0 {
            return argmax(logits);
        }
        let peak = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |l: f32| f64::from((l - peak) / self.temperature).exp();
        let mut odds: Vec<(u32, f64)> = (0u32..).zip(logits.iter().map(|l| weight(*l))).collect();
        if self.top_k > 0 && self.top_k < odds.len() {
            odds.select_nth_unstable_by(self.top_k - 1, likelier);
            odds.truncate(self.top_k);
        }
        if self.top_p < 1.0 {
            keep_nucleus(&mut odds, self.top_p.into());
        } else if self.top_k > 0 {
            odds.sort_unstable_by(likelier);
        }
        let total: f64 = odds.iter().map(|o| o.1).sum();
        let mut left = self.rng.random::<f64>() * total;
        for (token, odds) in &odds {
            left -= odds;
            if left < 0.0 {
                return *token;
            }
        }
        odds.last().map_or(0, |o| o.0)
    }
}

/// A token, and its probability times what all have in common.
type Odds = (u32, f64);

/// The likelier one first; of equals, the first in the vocabulary.
fn likelier(a: &Odds, b: &Odds) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Keeps the fewest of the likeliest that have a part `p` of the sum, in order. They are few of very many, as a rule:
/// so only as many are sorted as may be needed, eight times as many whenever these are not enough.
fn keep_nucleus(odds: &mut Vec<Odds>, p: f64) {
    let target = odds.iter().map(|o| o.1).sum::<f64>() * p;
    let (mut sorted, mut reached, mut kept) = (0, 0.0, 0);
    let mut some = 128;
    while sorted < odds.len() {
        let rest = &mut odds[sorted..];
        let now = some.min(rest.len());
        if now < rest.len() {
            rest.select_nth_unstable_by(now, likelier);
        }
        rest[..now].sort_unstable_by(likelier);
        sorted += now;
        while kept < sorted && (kept == 0 || reached < target) {
            reached += odds[kept].1;
            kept += 1;
        }
        if kept < sorted || reached >= target {
            break;
        }
        some *= 8;
    }
    odds.truncate(kept);
}

/// How a token is chosen from logits.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the host samples by itself"))]
#[derive(Clone, Copy, Debug)]
pub(crate) enum Draw {
    /// The largest.
    Best,
    /// By `uniform`, in `0..1`, from `softmax(logits / temperature)`.
    Chance { temperature: f32, uniform: f64 },
}

/// The index of the largest logit; of equals, the first. NaN never wins.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = (0u32, f32::NEG_INFINITY);
    for (token, logit) in (0u32..).zip(logits) {
        if *logit > best.1 {
            best = (token, *logit);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// All sorted: the fewest first ones that reach the sum.
    fn nucleus(mut odds: Vec<Odds>, p: f64) -> Vec<Odds> {
        let target = odds.iter().map(|o| o.1).sum::<f64>() * p;
        odds.sort_by(likelier);
        let mut reached = 0.0;
        let before = odds.iter().take_while(|o| {
            let more = reached < target;
            reached += o.1;
            more
        });
        let kept = before.count().max(1);
        odds.truncate(kept);
        odds
    }

    proptest! {
        /// Sums of small whole numbers are exact, in whatever order: so are both ways.
        #[test]
        fn the_nucleus_is_that_of_all_sorted(
            weights in proptest::collection::vec(0u8..20, 1..3000),
            p in prop_oneof![Just(0.0), Just(1.0), 0.0..1.0],
        ) {
            let odds: Vec<Odds> = (0..).zip(weights.iter().map(|w| f64::from(*w))).collect();
            let mut kept = odds.clone();
            keep_nucleus(&mut kept, p);
            prop_assert_eq!(kept, nucleus(odds, p));
        }
    }
}
