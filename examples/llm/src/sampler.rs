//! Choosing the next token.

use std::cmp::Ordering;
use std::collections::HashMap;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// What makes tokens likelier or less likely than the model has them, before one is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Penalties {
    /// Taken from the logit of each token that the answer has, as OpenAI's API defines it.
    pub presence: f32,
    /// Taken from the logit of a token as often as the answer has it.
    pub frequency: f32,
    /// Divides the positive logits, and multiplies the negative ones, of tokens that the prompt or the answer has
    /// (Keskar et al., 2019); 1 changes nothing.
    pub repetition: f32,
    /// Added to the logits of these tokens.
    pub bias: Vec<(u32, f32)>,
}

impl Default for Penalties {
    fn default() -> Self {
        Self { presence: 0.0, frequency: 0.0, repetition: 1.0, bias: Vec::new() }
    }
}

/// Chooses tokens from logits: the best one, or by chance with a seed. The same seed and logits give the same tokens.
#[derive(Debug)]
pub struct Sampler {
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
    penalties: Penalties,
    /// Tokens that are penalised, and how often the answer has them.
    met: HashMap<u32, u32>,
    rng: StdRng,
}

impl Sampler {
    /// Always the token with the largest logit; of equals, the first.
    pub fn greedy() -> Self {
        Self::new(0.0, 0)
    }

    /// Draws from `softmax(logits / temperature)`; a temperature of 0 (or less) is greedy.
    pub fn new(temperature: f32, seed: u64) -> Self {
        Self {
            temperature,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            penalties: Penalties::default(),
            met: HashMap::new(),
            rng: StdRng::seed_from_u64(seed),
        }
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

    /// Draws among the tokens that are at least `p` times as probable as the most probable one (Nguyen et al., 2024).
    #[must_use]
    pub fn min_p(mut self, p: f32) -> Self {
        self.min_p = p;
        self
    }

    /// Chooses from logits that are changed before. `prompt` is what comes before the answer.
    #[must_use]
    pub fn penalties(mut self, penalties: Penalties, prompt: &[u32]) -> Self {
        if penalties.repetition != 1.0 {
            self.met.extend(prompt.iter().map(|token| (*token, 0)));
        }
        self.penalties = penalties;
        self
    }

    /// Whether the logits are changed before a token is chosen.
    fn changes_logits(&self) -> bool {
        self.penalties != Penalties::default()
    }

    fn changed(&self, logits: &[f32]) -> Vec<f32> {
        let Penalties { presence, frequency, repetition, bias } = &self.penalties;
        let mut changed = logits.to_vec();
        for (token, count) in &self.met {
            let Some(logit) = changed.get_mut(*token as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            *logit -= *count as f32 * frequency + if *count > 0 { *presence } else { 0.0 };
        }
        for (token, more) in bias {
            if let Some(logit) = changed.get_mut(*token as usize) {
                *logit += more;
            }
        }
        changed
    }

    /// What a device needs to choose as [`sample`](Self::sample) would, or `None` where it cannot: it draws from all
    /// tokens.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the host samples by itself"))]
    pub(crate) fn draw(&mut self) -> Option<Draw> {
        if self.changes_logits() {
            return None;
        }
        if self.temperature <= 0.0 {
            return Some(Draw::Best);
        }
        let all = self.top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0;
        all.then(|| Draw::Chance { temperature: self.temperature, uniform: self.rng.random() })
    }

    /// The next token of the answer. 0 for empty `logits`.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        if !self.changes_logits() {
            return self.choose(logits, None);
        }
        let token = self.choose(&self.changed(logits), None);
        *self.met.entry(token).or_default() += 1;
        token
    }

    /// As [`sample`](Self::sample), among the tokens that are `allowed`: of the others, the logits do not count. `None`
    /// if none of these is.
    pub fn sample_among(&mut self, logits: &[f32], allowed: &dyn Fn(u32) -> bool) -> Option<u32> {
        let mut changed = if self.changes_logits() { self.changed(logits) } else { logits.to_vec() };
        let mut first = None;
        for (token, logit) in (0u32..).zip(&mut changed) {
            if allowed(token) {
                first.get_or_insert(token);
            } else {
                *logit = f32::NEG_INFINITY;
            }
        }
        let first = first?;
        // Logits that are not numbers choose none of them.
        let token = Some(self.choose(&changed, Some(allowed))).filter(|token| allowed(*token)).unwrap_or(first);
        if self.changes_logits() {
            *self.met.entry(token).or_default() += 1;
        }
        Some(token)
    }

    fn choose(&mut self, logits: &[f32], allowed: Option<&dyn Fn(u32) -> bool>) -> u32 {
        if self.temperature <= 0.0 {
            return argmax(logits);
        }
        let peak = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |l: f32| f64::from((l - peak) / self.temperature).exp();
        let mut odds: Vec<(u32, f64)> = (0u32..).zip(logits.iter().map(|l| weight(*l))).collect();
        if let Some(allowed) = allowed {
            odds.retain(|(token, _)| allowed(*token));
        }
        if self.top_k > 0 && self.top_k < odds.len() {
            odds.select_nth_unstable_by(self.top_k - 1, likelier);
            odds.truncate(self.top_k);
        }
        if self.top_p < 1.0 {
            keep_nucleus(&mut odds, self.top_p.into());
        } else if self.top_k > 0 {
            odds.sort_unstable_by(likelier);
        }
        if self.min_p > 0.0 {
            // The most probable one has the weight 1.
            let least = self.min_p.min(1.0).into();
            odds.retain(|(_, weight)| *weight >= least);
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

    /// What many draws give, each by a sampler of its own.
    fn drawn(logits: &[f32], sampler: impl Fn(u64) -> Sampler) -> Vec<u32> {
        let mut drawn: Vec<u32> = (0..200).map(|seed| sampler(seed).sample(logits)).collect();
        drawn.sort_unstable();
        drawn.dedup();
        drawn
    }

    #[test]
    fn tokens_below_a_part_of_the_most_probable_one_are_not_drawn() {
        let logits = [0.6_f32.ln(), 0.3_f32.ln(), 0.1_f32.ln()];
        assert_eq!(drawn(&logits, |seed| Sampler::new(1.0, seed)), [0, 1, 2]);
        assert_eq!(drawn(&logits, |seed| Sampler::new(1.0, seed).min_p(0.4)), [0, 1]);
        assert_eq!(drawn(&logits, |seed| Sampler::new(1.0, seed).min_p(0.4).top_k(3).top_p(0.99)), [0, 1]);
        assert_eq!(drawn(&logits, |seed| Sampler::new(1.0, seed).min_p(7.0)), [0]);
    }

    #[test]
    fn what_an_answer_has_becomes_less_likely() {
        let logits = [2.0, 1.5, -1.0, -1.1];
        let said = |penalties: Penalties, prompt: &[u32]| -> Vec<u32> {
            let mut sampler = Sampler::greedy().penalties(penalties, prompt);
            (0..4).map(|_| sampler.sample(&logits)).collect()
        };
        let none = Penalties::default();
        assert_eq!(said(none.clone(), &[0, 1]), [0, 0, 0, 0]);
        // Once taken, whatever the count.
        assert_eq!(said(Penalties { presence: 0.6, ..none.clone() }, &[0]), [0, 1, 0, 0]);
        // Each time it is there, but not for the prompt.
        assert_eq!(said(Penalties { frequency: 0.4, ..none.clone() }, &[0, 0, 0]), [0, 0, 1, 0]);
        assert_eq!(said(Penalties { repetition: 2.0, ..none.clone() }, &[]), [0, 1, 0, 0]);
        // For the prompt too; a negative logit becomes smaller.
        assert_eq!(said(Penalties { repetition: 2.0, ..none.clone() }, &[0]), [1, 0, 0, 0]);
        let negative = |prompt: &[u32]| {
            Sampler::greedy()
                .penalties(Penalties { repetition: 2.0, ..Penalties::default() }, prompt)
                .sample(&[-1.0, -1.5])
        };
        assert_eq!((negative(&[]), negative(&[0])), (0, 1));
        let bias = vec![(0, -100.0), (3, 5.0), (4000, 100.0)];
        assert_eq!(said(Penalties { bias, ..none }, &[]), [3, 3, 3, 3]);
    }

    #[test]
    fn only_what_is_allowed_is_chosen_however_unlikely_it_is() {
        let logits = [9.0, f32::NEG_INFINITY, -90.0, f32::NAN, -91.0, 9.0];
        let even = |token: u32| [2, 4].contains(&token);
        let bias = Penalties { bias: vec![(4, 5.0), (0, 100.0)], ..Penalties::default() };
        for seed in 0..100 {
            let samplers = [0.0, 0.1, 2.0].map(|temperature| Sampler::new(temperature, seed).top_p(0.9).min_p(0.1));
            for mut sampler in samplers {
                assert!(sampler.sample_among(&logits, &even).is_some_and(even));
            }
            let mut sampler = Sampler::new(2.0, seed).top_k(1);
            assert_eq!(sampler.sample_among(&logits, &even), Some(2));
            assert_eq!(Sampler::greedy().penalties(bias.clone(), &[]).sample_among(&logits, &even), Some(4));
        }
        // What the model cannot tell apart, or rules out, is allowed all the same.
        for temperature in [0.0, 1.0] {
            let mut sampler = Sampler::new(temperature, 1);
            assert_eq!(sampler.sample_among(&logits, &|token| token == 1), Some(1));
            assert_eq!(sampler.sample_among(&logits, &|token| token == 3), Some(3));
            assert_eq!(sampler.sample_among(&logits, &|token| token > 5), None);
        }
    }

    #[test]
    fn where_all_tokens_are_allowed_the_same_ones_are_chosen() {
        let logits: Vec<f32> = (0..50).map(|n| (n * 37 % 50) as f32 / 10.0).collect();
        let penalties = Penalties { frequency: 0.5, ..Penalties::default() };
        for (temperature, penalties) in [(0.0, penalties.clone()), (1.5, penalties), (1.5, Penalties::default())] {
            let [mut one, mut other] =
                [(); 2].map(|()| Sampler::new(temperature, 7).top_p(0.9).penalties(penalties.clone(), &[]));
            for _ in 0..50 {
                assert_eq!(Some(one.sample(&logits)), other.sample_among(&logits, &|_| true));
            }
        }
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
