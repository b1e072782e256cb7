//! Rules: how a parameter changes by its gradient.

use std::fmt;

use outcore::Result;

use crate::errors::invalid;

/// When an update is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moment {
    /// The number of the step, from 1.
    pub step: u64,
    /// The learning rate of the group at this step.
    pub rate: f64,
}

/// How parameters change by their gradients, element by element.
///
/// An implementation sees a few thousand elements at a time, from many threads, and nothing of where they lie. The
/// result for an element may depend on that element alone: how the elements are divided depends on the size of pages.
///
/// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2), as an example:
///
/// ```
/// use outcore::Result;
/// use outcore_train::{Moment, Rule};
///
/// #[derive(Debug)]
/// struct Lion {
///     betas: (f32, f32),
///     weight_decay: f32,
/// }
///
/// impl Rule for Lion {
///     fn name(&self) -> &'static str {
///         "lion"
///     }
///     fn states(&self) -> &'static [&'static str] {
///         &["exp_avg"]
///     }
///     fn check(&self) -> Result<()> {
///         Ok(())
///     }
///     fn update(&self, at: Moment, parameters: &mut [f32], gradients: &[f32], states: &mut [&mut [f32]]) {
///         let (rate, (first, second)) = (at.rate as f32, self.betas);
///         let [averages] = states else { return };
///         for ((p, g), m) in parameters.iter_mut().zip(gradients).zip(averages.iter_mut()) {
///             let update = *m + (1.0 - first) * (g - *m);
///             let sign = if update == 0.0 { 0.0 } else { update.signum() };
///             *p -= rate * (sign + self.weight_decay * *p);
///             *m += (1.0 - second) * (g - *m);
///         }
///     }
/// }
/// ```
pub trait Rule: fmt::Debug + Send + Sync + 'static {
    /// The rule's name, which a durable state remembers.
    fn name(&self) -> &'static str;

    /// The names of what the rule keeps of each parameter: tensors of `f32` of the parameter's shape, zeros at first.
    fn states(&self) -> &'static [&'static str];

    /// Whether the settings are in range.
    ///
    /// # Errors
    /// [`InvalidArgument`](outcore::ErrorKind::InvalidArgument) with the setting and its range.
    fn check(&self) -> Result<()>;

    /// Changes `parameters` and `states`. All slices have one length, and the states are in the order of
    /// [`states`](Self::states). The gradients are what was accumulated, unscaled and clipped.
    fn update(&self, at: Moment, parameters: &mut [f32], gradients: &[f32], states: &mut [&mut [f32]]);

    /// The rule of which there is a kernel that does the same on a device whose memory the host cannot address, with as
    /// many states. An optimizer with kernels refuses to [open](crate::OptimizerBuilder::open) with a rule that has
    /// none. It asks once, and updates all pages by the answer.
    fn on_device(&self) -> Option<DeviceRule> {
        None
    }
}

/// A rule of which there is a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum DeviceRule {
    /// AdamW.
    AdamW(AdamW),
    /// Gradient descent.
    Sgd(Sgd),
}

fn in_range(what: &str, value: f64, least: f64, below: f64) -> Result<()> {
    if (least..below).contains(&value) {
        return Ok(());
    }
    let range = if below.is_finite() { format!("{least} <= {what} < {below}") } else { format!("{what} >= {least}") };
    Err(invalid(format!("{what} is {value}"), &format!("choose {range}")))
}

/// AdamW: Adam with decoupled weight decay and bias correction (Loshchilov and Hutter, "Decoupled Weight Decay
/// Regularization", 2019, algorithm 2), in the order of operations of PyTorch's `torch.optim.AdamW`. Its settings are
/// PyTorch's unless set.
///
/// ```text
/// p = p - rate * weight_decay * p
/// m = m + (1 - beta1) * (g - m)
/// v = beta2 * v + (1 - beta2) * g * g
/// p = p - rate / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + epsilon)
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// How slowly the averages of gradients and of their squares change: 0.9 and 0.999.
    pub betas: (f64, f64),
    /// Added to the denominator: 1e-8.
    pub epsilon: f64,
    /// The part of the parameter that goes in a step, in units of the rate: 0.01.
    pub weight_decay: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        Self { betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.01 }
    }
}

/// What elements are multiplied by in a step of AdamW; the names are those of the terms of [`AdamW`]'s formula.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Factors {
    /// `1 - rate * weight_decay`.
    pub kept: f32,
    /// `1 - beta1`.
    pub weight: f32,
    /// `beta2`.
    pub second: f32,
    /// `1 - beta2`.
    pub weight_of_square: f32,
    /// `rate / (1 - beta1^step)`.
    pub size: f32,
    /// `sqrt(1 - beta2^step)`.
    pub root: f32,
    pub epsilon: f32,
}

impl AdamW {
    pub(crate) fn factors(&self, at: Moment) -> Factors {
        let Moment { step, rate } = at;
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        Factors {
            kept: (1.0 - rate * self.weight_decay) as f32,
            weight: (1.0 - self.betas.0) as f32,
            second: self.betas.1 as f32,
            weight_of_square: (1.0 - self.betas.1) as f32,
            size: (rate / correction(self.betas.0)) as f32,
            root: correction(self.betas.1).sqrt() as f32,
            epsilon: self.epsilon as f32,
        }
    }
}

impl Rule for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn states(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn check(&self) -> Result<()> {
        in_range("beta1", self.betas.0, 0.0, 1.0)?;
        in_range("beta2", self.betas.1, 0.0, 1.0)?;
        in_range("epsilon", self.epsilon, 0.0, f64::INFINITY)?;
        in_range("weight_decay", self.weight_decay, 0.0, f64::INFINITY)
    }

    fn update(&self, at: Moment, parameters: &mut [f32], gradients: &[f32], states: &mut [&mut [f32]]) {
        let Factors { kept, weight, second, weight_of_square, size, root, epsilon } = self.factors(at);
        let [averages, squares] = states else { return };
        // By AVX2 where the processor has it: a root and two quotients of four elements at a time take longer than
        // their bytes. No product is fused with a sum, so the bits are the same without it.
        pulp::Arch::new().dispatch(|| {
            let both = averages.iter_mut().zip(squares.iter_mut());
            for ((p, g), (m, v)) in parameters.iter_mut().zip(gradients).zip(both) {
                *m += weight * (g - *m);
                *v = *v * second + weight_of_square * g * g;
                *p = *p * kept - size * (*m / (v.sqrt() / root + epsilon));
            }
        });
    }

    fn on_device(&self) -> Option<DeviceRule> {
        Some(DeviceRule::AdamW(*self))
    }
}

/// Gradient descent, with momentum if set, in the order of operations of PyTorch's `torch.optim.SGD`: weight decay is
/// added to the gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sgd {
    /// How much of the last update remains in the next one; 0 keeps no state.
    pub momentum: f64,
    /// How much of the parameter is added to its gradient.
    pub weight_decay: f64,
}

impl Rule for Sgd {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn states(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 { &[] } else { &["momentum_buffer"] }
    }

    fn check(&self) -> Result<()> {
        in_range("momentum", self.momentum, 0.0, 1.0)?;
        in_range("weight_decay", self.weight_decay, 0.0, f64::INFINITY)
    }

    fn update(&self, at: Moment, parameters: &mut [f32], gradients: &[f32], states: &mut [&mut [f32]]) {
        let (rate, decay, momentum) = (at.rate as f32, self.weight_decay as f32, self.momentum as f32);
        let both = parameters.iter_mut().zip(gradients);
        let Some(buffer) = states.first_mut() else {
            both.for_each(|(p, g)| *p -= rate * (g + decay * *p));
            return;
        };
        for ((p, g), b) in both.zip(buffer.iter_mut()) {
            *b = *b * momentum + (g + decay * *p);
            *p -= rate * *b;
        }
    }

    fn on_device(&self) -> Option<DeviceRule> {
        Some(DeviceRule::Sgd(*self))
    }
}
