//! Groups of parameters.

use std::sync::Arc;

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

/// How many states the rule with the most of them keeps of a parameter.
pub(crate) fn most_states(groups: &[Group]) -> usize {
    groups.iter().map(|group| group.rule.states().len()).max().unwrap_or(0)
}
