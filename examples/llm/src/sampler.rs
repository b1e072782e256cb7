//! Choosing the next token.

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
        if self.top_k > 0 || self.top_p < 1.0 {
            odds.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            if self.top_k > 0 {
                odds.truncate(self.top_k);
            }
            let target = odds.iter().map(|o| o.1).sum::<f64>() * f64::from(self.top_p);
            let mut reached = 0.0;
            let keep = odds.iter().take_while(|o| {
                let more = reached < target;
                reached += o.1;
                more
            });
            let keep = keep.count().max(1);
            odds.truncate(keep);
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
