//! Groups of parameters.

use std::sync::Arc;

#[cfg(feature = "cuda")]
use outcore::{Error, ErrorKind, Result};

#[cfg(feature = "cuda")]
use crate::errors::invalid;
#[cfg(feature = "cuda")]
use crate::rule::DeviceRule;
use crate::rule::Rule;
use crate::schedule::Schedule;

/// Parameters that change by one rule and one schedule.
#[derive(Clone, Debug)]
#[must_use]
pub struct Group {
    pub(crate) rule: Arc<dyn Rule>,
    pub(crate) schedule: Schedule,
    pub(crate) parameters: Vec<(String, Vec<u64>)>,
}

impl Group {
    /// A group without parameters.
    pub fn new(rule: impl Rule, schedule: Schedule) -> Self {
        Self { rule: Arc::new(rule), schedule, parameters: Vec::new() }
    }

    /// Adds a parameter: its name, and its extents, outermost first. Those that are used behind one another are best
    /// added behind one another: that is the order of a step.
    pub fn parameter(mut self, name: impl Into<String>, shape: &[u64]) -> Self {
        self.parameters.push((name.into(), shape.into()));
        self
    }

    /// With the name of a parameter, the names of its states.
    pub(crate) fn states_of<'a>(&self, name: &'a str) -> impl Iterator<Item = (&'a str, String)> + use<'a> {
        self.rule.states().iter().map(move |state| (name, format!("{name}.{state}")))
    }
}

#[cfg(feature = "cuda")]
impl Group {
    /// What updates the group on a device whose memory the host cannot address.
    pub(crate) fn on_device(&self) -> Result<DeviceRule> {
        let name = self.rule.name();
        let Some(rule) = self.rule.on_device() else {
            let what = format!("the rule {name:?} has no kernel, and the host cannot address the device's memory");
            return Err(Error::new(ErrorKind::Unsupported, what).remedy("use AdamW or Sgd, or a runtime on the host"));
        };
        let kernel: &dyn Rule = match &rule {
            DeviceRule::AdamW(rule) => rule,
            DeviceRule::Sgd(rule) => rule,
        };
        kernel.check().map_err(|error| error.context(format!("update by {name:?} on a device")))?;
        let (states, of_kernel) = (self.rule.states(), kernel.states());
        if states.len() != of_kernel.len() {
            let what = format!("the rule {name:?} keeps {states:?} of a parameter, and on a device {of_kernel:?}");
            return Err(invalid(what, "have `on_device` return a rule that keeps as many states as `states` names"));
        }
        Ok(rule)
    }
}

/// How many states the rule with the most of them keeps of a parameter.
pub(crate) fn most_states(groups: &[Group]) -> usize {
    groups.iter().map(|group| group.rule.states().len()).max().unwrap_or(0)
}
