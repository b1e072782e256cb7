//! Learning rates that change.

use outcore::Result;

use crate::errors::invalid;

/// The learning rate of each step: a linear warm-up, then a constant rate or a decay.
///
/// ```
/// use outcore_train::Schedule;
///
/// let schedule = Schedule::constant(1e-3).warm_up(10).cosine(100, 0.0);
/// assert_eq!((schedule.rate(1), schedule.rate(10), schedule.rate(100)), (1e-4, 1e-3, 0.0));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct Schedule {
    peak: f64,
    warm_up: u64,
    decay: Option<Decay>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Decay {
    is_cosine: bool,
    /// The step from which on the rate is `to`.
    end: u64,
    to: f64,
}

impl Schedule {
    /// This rate at every step.
    pub fn constant(rate: f64) -> Self {
        Self { peak: rate, warm_up: 0, decay: None }
    }

    /// Raises the rate in equal parts over the first steps; at step `steps` it is the full one.
    pub fn warm_up(mut self, steps: u64) -> Self {
        self.warm_up = steps;
        self
    }

    /// Lowers the rate in equal parts from the end of the warm-up on, until it is `to` at step `end`.
    pub fn linear(self, end: u64, to: f64) -> Self {
        Self { decay: Some(Decay { is_cosine: false, end, to }), ..self }
    }

    /// Lowers the rate by half a period of a cosine from the end of the warm-up on, until it is `to` at step `end`.
    pub fn cosine(self, end: u64, to: f64) -> Self {
        Self { decay: Some(Decay { is_cosine: true, end, to }), ..self }
    }

    /// The rate of a step, from 1.
    pub fn rate(&self, step: u64) -> f64 {
        if step < self.warm_up {
            return self.peak * (step as f64 / self.warm_up as f64);
        }
        let Some(Decay { is_cosine, end, to }) = self.decay else { return self.peak };
        if step >= end {
            return to;
        }
        let passed = (step - self.warm_up) as f64 / (end - self.warm_up) as f64;
        let left = if is_cosine { (1.0 + (std::f64::consts::PI * passed).cos()) / 2.0 } else { 1.0 - passed };
        to + (self.peak - to) * left
    }

    pub(crate) fn check(&self) -> Result<()> {
        let rates = [Some(self.peak), self.decay.map(|decay| decay.to)];
        match rates.into_iter().flatten().find(|rate| !(rate.is_finite() && *rate >= 0.0)) {
            Some(rate) => Err(invalid(format!("a learning rate is {rate}"), "choose rates from 0 on")),
            None => Ok(()),
        }
    }
}
