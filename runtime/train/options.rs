//! How an optimizer is made.

use std::collections::HashSet;
use std::num::NonZeroUsize;
#[cfg(feature = "cuda")]
use std::sync::Arc;

use outcore::{DType, Error, ErrorKind, Result, Runtime};

#[cfg(feature = "cuda")]
use crate::cuda::CudaKernels;
use crate::device::Device;
use crate::errors::invalid;
use crate::group::Group;

/// What a step does about gradients that are infinite or no numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonFinite {
    /// It is an error that names the parameter. Nothing has changed, and the gradients are still there.
    #[default]
    Refuse,
    /// The step is skipped: the gradients are dropped, and [`Step::skipped`](crate::Step::skipped) names the parameter.
    Skip,
}

/// Makes an [`Optimizer`](crate::Optimizer).
#[derive(Clone, Debug)]
#[must_use]
pub struct OptimizerBuilder {
    pub(crate) runtime: Runtime,
    pub(crate) groups: Vec<Group>,
    pub(crate) tied: Vec<(String, String)>,
    pub(crate) gradients: DType,
    pub(crate) has_working_copy: bool,
    pub(crate) clip: Option<f64>,
    pub(crate) non_finite: NonFinite,
    pub(crate) threads: Option<NonZeroUsize>,
    #[cfg(feature = "cuda")]
    pub(crate) cuda: Option<CudaKernels>,
}

impl OptimizerBuilder {
    pub(crate) fn new(runtime: &Runtime) -> Self {
        Self {
            runtime: runtime.clone(),
            groups: Vec::new(),
            tied: Vec::new(),
            gradients: DType::F32,
            has_working_copy: false,
            clip: None,
            non_finite: NonFinite::default(),
            threads: None,
            #[cfg(feature = "cuda")]
            cuda: None,
        }
    }

    /// Adds a group of parameters.
    pub fn group(mut self, group: Group) -> Self {
        self.groups.push(group);
        self
    }

    /// Makes `name` another name of the parameter `of`: both add to one gradient, and there is one state.
    pub fn tied(mut self, name: impl Into<String>, of: impl Into<String>) -> Self {
        self.tied.push((name.into(), of.into()));
        self
    }

    /// The element type in which gradients are accumulated: `F32` unless set, or `BF16`.
    pub fn gradients(mut self, dtype: DType) -> Self {
        self.gradients = dtype;
        self
    }

    /// Keeps a copy of all parameters in `bf16`, which each step makes as it updates them: see
    /// [`working_copy`](crate::Optimizer::working_copy). It is not durable, and made anew when the optimizer is opened.
    pub fn with_working_copy(mut self) -> Self {
        self.has_working_copy = true;
        self
    }

    /// Scales the gradients so that their norm, over all parameters, is at most this. No limit unless set.
    pub fn clip(mut self, norm: f64) -> Self {
        self.clip = Some(norm);
        self
    }

    /// What a step does about gradients that are infinite or no numbers.
    pub fn non_finite(mut self, action: NonFinite) -> Self {
        self.non_finite = action;
        self
    }

    /// How many threads update: as many as the process may use unless set. The result is the same.
    pub fn threads(mut self, count: NonZeroUsize) -> Self {
        self.threads = Some(count);
        self
    }

    /// Updates by these kernels, for a runtime on the same GPU. They take 4 MiB of its memory beside the device budget,
    /// 4 MiB of locked host memory, and somewhat more of both for sums. Gradients come from the host, as elsewhere;
    /// parameters are read and written [on the device](outcore::PinRequest::on_device). Results have the bits that they
    /// have on the host, but for which NaN a NaN is.
    #[cfg(feature = "cuda")]
    pub fn cuda(mut self, kernels: CudaKernels) -> Self {
        self.cuda = Some(kernels);
        self
    }

    /// What computes on the runtime's device; `None` if the host does.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only kernels have sizes"))]
    pub(crate) fn device(&self, block: u64) -> Result<Option<Device>> {
        #[cfg(feature = "cuda")]
        if let Some(kernels) = &self.cuda {
            let rules = self.groups.iter().map(Group::on_device).collect::<Result<_>>()?;
            return Ok(Some(Device { kernels: Arc::new(kernels.adopt(&self.runtime, block)?), rules }));
        }
        if self.runtime.host_addressable() {
            return Ok(None);
        }
        let what =
            "the host cannot address the memory of the runtime's device, and the optimizer has no kernels for it";
        let remedy =
            "build outcore-train with the feature `cuda` and give the builder `cuda`, or use a runtime on the host";
        Err(Error::new(ErrorKind::Unsupported, what).remedy(remedy))
    }

    pub(crate) fn check(&self) -> Result<()> {
        let invalid = |what: String, remedy: &str| Err(invalid(what, remedy));
        if !matches!(self.gradients, DType::F32 | DType::BF16) {
            let what = format!("gradients cannot be accumulated in {}", self.gradients);
            return invalid(what, "choose F32 or BF16");
        }
        if let Some(norm) = self.clip.filter(|norm| !(norm.is_finite() && *norm > 0.0)) {
            return invalid(format!("gradients cannot be clipped to a norm of {norm}"), "choose a norm above 0");
        }
        let mut names = HashSet::new();
        for group in &self.groups {
            group.rule.check()?;
            group.schedule.check()?;
            for (name, _) in &group.parameters {
                if !names.insert(name.as_str()) {
                    let what = format!("the parameter {name:?} is in the groups twice");
                    return invalid(what, "name it once; another name of the same tensor is `tied`");
                }
            }
        }
        for group in &self.groups {
            for (parameter, state) in group.parameters.iter().flat_map(|(name, _)| group.states_of(name)) {
                if names.contains(state.as_str()) {
                    let what = format!("{state:?} is a parameter, and the name of a state of {parameter:?}");
                    return invalid(what, "choose another name");
                }
            }
        }
        for (at, (name, of)) in self.tied.iter().enumerate() {
            if !names.contains(of.as_str()) {
                let what = format!("{name:?} is tied to {of:?}, which is no parameter");
                return invalid(what, "tie it to a parameter of a group");
            }
            if names.contains(name.as_str()) || self.tied[..at].iter().any(|(other, _)| other == name) {
                return invalid(format!("{name:?} is tied, and named once more"), "give each name one meaning");
            }
        }
        Ok(())
    }
}
