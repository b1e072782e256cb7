//! A loss scale that adapts itself.

use outcore::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::errors::invalid;
use crate::optimizer::Step;

/// What a loss is multiplied by before its gradients are computed, so that small ones are not lost in 16 bits.
///
/// It is halved after a step whose gradients were not finite, and doubled after as many steps without one (Micikevicius
/// et al., "Mixed Precision Training", 2018, section 3.2; the numbers are those of PyTorch's `torch.amp.GradScaler`
/// unless set). It stays a power of two, so multiplying rounds nothing.
///
/// ```
/// use outcore::Runtime;
/// use outcore_train::{AdamW, Group, LossScale, NonFinite, Optimizer, Schedule};
///
/// let runtime = Runtime::builder().open()?;
/// let weights = Group::new(AdamW::default(), Schedule::constant(1e-3)).parameter("weights", &[2]);
/// let mut optimizer = Optimizer::builder(&runtime).group(weights).non_finite(NonFinite::Skip).open()?;
/// let mut scale = LossScale::default();
/// // The gradients of the loss times `scale.get()`, as 16 bits have them.
/// optimizer.accumulate("weights", 0, &[f32::INFINITY, 1.0], 1.0)?;
/// let step = optimizer.step(scale.inverse())?;
/// scale.after(&step)?;
/// assert_eq!((scale.get(), optimizer.steps()), (32_768.0, 0));
/// # drop(optimizer);
/// # runtime.close()?;
/// # Ok::<(), outcore::Error>(())
/// ```
///
/// A program keeps it with [what it commits](crate::Optimizer::commit): it is a value that serde knows. One that is out
/// of range is not deserialized.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Stored")]
pub struct LossScale {
    exponent: u8,
    interval: u64,
    /// Steps since it changed.
    steps: u64,
}

/// A [`LossScale`] that was not checked.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    exponent: u8,
    interval: u64,
    steps: u64,
}

impl TryFrom<Stored> for LossScale {
    type Error = Error;

    fn try_from(Stored { exponent, interval, steps }: Stored) -> Result<Self> {
        Ok(Self { steps, ..Self::new(exponent, interval)? })
    }
}

impl Default for LossScale {
    fn default() -> Self {
        Self { exponent: 16, interval: 2000, steps: 0 }
    }
}

impl LossScale {
    /// The largest exponent: any larger one makes `f32` infinite sooner than it helps.
    const EXPONENT_MOST: u8 = 32;

    /// Begins with 2 to the power of `exponent`, which is at most 32, and doubles after `interval` steps.
    ///
    /// # Errors
    /// [`InvalidArgument`](outcore::ErrorKind::InvalidArgument) for an exponent above 32, and an interval of 0.
    pub fn new(exponent: u8, interval: u64) -> Result<Self> {
        if exponent > Self::EXPONENT_MOST || interval == 0 {
            let what = format!("a loss scale of 2^{exponent} that doubles after {interval} steps");
            return Err(invalid(what, "choose an exponent of at most 32, and at least one step"));
        }
        Ok(Self { exponent, interval, steps: 0 })
    }

    /// What the loss is multiplied by.
    pub fn get(&self) -> f32 {
        (1u64 << self.exponent) as f32
    }

    /// What undoes it, for [`Optimizer::step`](crate::Optimizer::step).
    pub fn inverse(&self) -> f32 {
        1.0 / self.get()
    }

    /// Adapts it to how a step went.
    ///
    /// # Errors
    /// [`InvalidArgument`](outcore::ErrorKind::InvalidArgument) if gradients are not finite with a scale of 1 either:
    /// the message names the parameter.
    pub fn after(&mut self, step: &Step) -> Result<()> {
        self.steps = self.steps.saturating_add(1);
        match &step.skipped {
            Some(name) if self.exponent == 0 => {
                let what = format!("gradients of {name:?} are infinite or no numbers without a loss scale too");
                return Err(invalid(what, "go back to the last commit, and choose a lower rate"));
            }
            Some(_) => (self.exponent, self.steps) = (self.exponent - 1, 0),
            None if self.steps >= self.interval => {
                (self.exponent, self.steps) = ((self.exponent + 1).min(Self::EXPONENT_MOST), 0);
            }
            None => {}
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use super::*;

    fn step(skipped: Option<&str>) -> Step {
        Step { number: 1, norm: 1.0, skipped: skipped.map(str::to_owned) }
    }

    #[test]
    fn it_halves_after_a_skipped_step_and_doubles_after_an_interval() {
        let mut scale = LossScale::new(2, 3).unwrap();
        let mut found = Vec::new();
        for skipped in [false, true, false, false, false, true, true, false, false, false, false] {
            scale.after(&step(skipped.then_some("w"))).unwrap();
            found.push(scale.get());
            assert_eq!(scale.get() * scale.inverse(), 1.0);
        }
        assert_eq!(found, [4.0, 2.0, 2.0, 2.0, 4.0, 2.0, 1.0, 1.0, 1.0, 2.0, 2.0]);
        let text = serde_json::to_string(&scale).unwrap();
        assert_eq!(serde_json::from_str::<LossScale>(&text).unwrap(), scale);
    }

    #[test]
    fn it_stays_in_range() {
        let mut scale = LossScale::new(32, 1).unwrap();
        scale.after(&step(None)).unwrap();
        assert_eq!(scale.get(), 2f32.powi(32));
        let mut scale = LossScale::new(0, 1).unwrap();
        let error = scale.after(&step(Some("w"))).unwrap_err();
        assert!(error.to_string().contains("\"w\""), "{error}");
        assert!(LossScale::new(33, 1).is_err() && LossScale::new(3, 0).is_err());
        let read = |text: &str| serde_json::from_str::<LossScale>(text);
        let error = read(r#"{"exponent":200,"interval":1,"steps":0}"#).unwrap_err();
        assert!(error.to_string().contains("2^200"), "{error}");
        assert!(read(r#"{"exponent":3,"interval":0,"steps":0}"#).is_err());
        let mut scale = read(&format!(r#"{{"exponent":3,"interval":7,"steps":{}}}"#, u64::MAX)).unwrap();
        scale.after(&step(None)).unwrap();
        assert_eq!(scale.get(), 16.0);
    }
}
