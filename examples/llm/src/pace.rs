//! How long a pass takes, by the passes that were: what a pass costs, and what each token of it adds.

/// How much an observation counts that was made one pass before another.
const KEPT: f64 = 0.97;
/// A pass that took less is as good as one that took so long.
const SECONDS_LEAST: f64 = 1e-6;
/// No token takes less, in seconds: a line through passes of one size has no slope.
const TOKEN_LEAST: f64 = 1e-7;

/// A line through what passes took, by their tokens: the least squares of relative errors, in which later passes
/// count more.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    weight: f64,
    tokens: f64,
    seconds: f64,
    tokens_squared: f64,
    product: f64,
}

impl Pace {
    /// A pass of so many tokens took so long.
    pub fn observe(&mut self, tokens: usize, seconds: f64) {
        let tokens = tokens as f64;
        // By what part the line is off counts, not by how many seconds: else a few long passes would decide it.
        let weight = 1.0 / seconds.max(SECONDS_LEAST).powi(2);
        for (sum, new) in [
            (&mut self.weight, 1.0),
            (&mut self.tokens, tokens),
            (&mut self.seconds, seconds),
            (&mut self.tokens_squared, tokens * tokens),
            (&mut self.product, tokens * seconds),
        ] {
            *sum = *sum * KEPT + new * weight;
        }
    }

    /// Seconds of a pass, and of each token. `None` before the first pass.
    pub fn line(&self) -> Option<(f64, f64)> {
        if self.weight == 0.0 {
            return None;
        }
        let spread = self.tokens_squared * self.weight - self.tokens * self.tokens;
        let slope = if spread > 1e-6 * self.tokens_squared * self.weight {
            (self.product * self.weight - self.tokens * self.seconds) / spread
        } else {
            // All had as many tokens: half of it is taken to be theirs.
            self.seconds / self.tokens / 2.0
        };
        let most = self.seconds / self.tokens.max(1.0);
        let slope = slope.clamp(TOKEN_LEAST, most.max(TOKEN_LEAST));
        Some((((self.seconds - slope * self.tokens) / self.weight).max(0.0), slope))
    }

    /// How many tokens of prompts may join a pass in which `decoding` tokens are generated, so that it takes at most
    /// twice as long as it would without them.
    pub fn joining(&self, decoding: usize) -> Option<usize> {
        self.line().map(|(pass, token)| (pass / token) as usize + decoding)
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    #[test]
    fn the_line_follows_what_passes_take() {
        let mut pace = Pace::default();
        assert_eq!(pace.line(), None);
        for _ in 0..50 {
            pace.observe(8, 0.1);
        }
        assert!(pace.line().is_some_and(|(pass, token)| (pass + 8.0 * token - 0.1).abs() < 1e-9), "{pace:?}");
        for tokens in (1..200).cycle().take(1000) {
            pace.observe(tokens, 0.05 + 0.002 * tokens as f64);
        }
        let near = |value: f64, wanted: f64| (value / wanted - 1.0).abs() < 0.05;
        assert!(pace.line().is_some_and(|(pass, token)| near(pass, 0.05) && near(token, 0.002)), "{pace:?}");
        assert!(pace.joining(10).is_some_and(|tokens| (33..37).contains(&tokens)));
        // The model streams from now on.
        for tokens in (1..200).cycle().take(1000) {
            pace.observe(tokens, 1.0 + 0.002 * tokens as f64);
        }
        assert!(pace.joining(10).is_some_and(|tokens| (450..570).contains(&tokens)), "{:?}", pace.joining(10));
    }

    /// How many times as long passes take that prompts join, as those without: of the last of 200, after 60 without.
    /// `cost` is seconds of a pass, by its number and its tokens.
    fn times_as_long(decoding: usize, cost: impl Fn(usize, usize) -> f64) -> Vec<f64> {
        let mut pace = Pace::default();
        (0..60).for_each(|nth| pace.observe(decoding, cost(nth, decoding)));
        let passes = (60..260).map(|nth| {
            let tokens = decoding + pace.joining(decoding).unwrap_or(0);
            let took = cost(nth, tokens);
            pace.observe(tokens, took);
            took / cost(nth, decoding)
        });
        passes.skip(100).collect()
    }

    /// Of 64 experts, tokens that draw four each draw so many.
    fn experts(tokens: usize) -> f64 {
        64.0 * (1.0 - (60.0_f64 / 64.0).powf(tokens as f64))
    }

    #[test]
    fn prompts_have_passes_take_twice_as_long_whatever_a_token_adds() {
        let check = |what: &str, decoding: usize, within: Range<f64>, cost: &dyn Fn(usize, usize) -> f64| {
            let times = times_as_long(decoding, cost);
            assert!(times.iter().all(|times| within.contains(times)), "{what}, {decoding} decode: {times:?}");
        };
        let dense = |_: usize, tokens: usize| 0.1 + 0.0035 * tokens as f64;
        [1, 8, 24, 40].iter().for_each(|decoding| check("dense", *decoding, 1.9..2.05, &dense));
        // Of a mixture's file less and less is read for each token more. A line through passes of almost one size is
        // steeper than that: it errs to fewer tokens.
        let mixture = |_: usize, tokens: usize| 0.02 * experts(tokens) + 0.002 * tokens as f64;
        [8, 24, 40].iter().for_each(|decoding| check("a mixture", *decoding, 1.6..2.05, &mixture));
        // The machine is three times as slow from the hundredth pass on.
        let slower = |nth: usize, tokens: usize| mixture(nth, tokens) * if nth < 100 { 1.0 } else { 3.0 };
        check("a slower machine", 24, 1.6..2.05, &slower);
    }
}
