//! The settings of a simulation.

use std::num::NonZeroU32;
use std::time::Duration;

use super::super::any_policy::AnyPolicy;
use super::trouble::Trouble;
use crate::ids::{Bytes, PageSize};
use crate::pager::PolicyKind;
use outcore::Lookahead;

/// How long passes compute, where the machine's rate for bytes of weights does not say it: several sequences at a time,
/// or a time that was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Computing {
    /// Time of a pass that waits for nothing, without the fixed time of its steps. Each step has the share that it has
    /// of the pass's bytes.
    pub pass: Duration,
    /// Bytes a second of the memory's bandwidth that computing takes meanwhile. What is left of the machine's
    /// `compute.bandwidth` is the disk's, where there is no link.
    pub memory: Bytes,
}

/// The settings of a simulation, besides the machine and the workload.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The policy, which decides which pages stay.
    pub policy: AnyPolicy,
    /// Memory for frames of each device.
    pub device_budget: Bytes,
    /// Memory for the host tiers of all devices together.
    pub host_budget: Bytes,
    /// Bytes of a page.
    pub page_size: PageSize,
    /// How far ahead of use fills start.
    pub lookahead: Lookahead,
    /// The most pages that one pin of a large tensor takes. `None` pins whole tensors where everything fits; else 8 MiB
    /// of pages, but at most a 32nd of the frames, and at least 2 pages.
    pub step_pages: Option<NonZeroU32>,
    /// How many steps beyond the computed one are pinned: none where the caller computes, as on the host; one or more
    /// where it is ahead of a stream, as with a GPU.
    pub steps_ahead: u32,
    /// How long passes compute; `None` if the machine's rates say it.
    pub computing: Option<Computing>,
    /// How many passes run, one after the other.
    pub passes: NonZeroU32,
    /// The seed of all random numbers.
    pub seed: u64,
    /// One in this many reads, writes and copies fails, by chance. A step whose pages did not come is asked for again.
    pub fail_one_in: Option<NonZeroU32>,
    /// What else goes wrong, and what changes.
    pub trouble: Vec<Trouble>,
    /// Whether the simulation is checked: at every event the pagers' invariants, and that every page's newest bytes are
    /// where they should be; at the end, that nothing is left in flight or pinned. Each event then takes time
    /// proportional to the number of pages.
    pub checked: bool,
    /// Whether [a record](crate::sim::Recorded) of the first device and of the disk is kept. It changes nothing else.
    pub timeline: bool,
}

impl Settings {
    /// Returns a runtime's defaults with these budgets: policy [`Plan`](PolicyKind::Plan), pages of 2 MiB, four passes.
    pub fn new(device_budget: Bytes, host_budget: Bytes) -> Self {
        Self {
            policy: PolicyKind::Plan.into(),
            device_budget,
            host_budget,
            page_size: PageSize::DEFAULT,
            lookahead: Lookahead::Auto,
            step_pages: None,
            steps_ahead: 0,
            computing: None,
            passes: NonZeroU32::MIN.saturating_add(3),
            seed: 0,
            fail_one_in: None,
            trouble: Vec::new(),
            checked: false,
            timeline: false,
        }
    }
}
