//! What a simulation is told.

use std::num::NonZeroU32;

use super::super::any_policy::AnyPolicy;
use super::trouble::Trouble;
use crate::ids::{Bytes, PageSize};
use crate::pager::PolicyKind;
use outcore::Lookahead;

/// What is simulated beside the machine and the workload.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Which pages stay.
    pub policy: AnyPolicy,
    /// Memory for frames of each device.
    pub device_budget: Bytes,
    /// Memory for the host tiers of all devices together.
    pub host_budget: Bytes,
    /// Bytes of a page.
    pub page_size: PageSize,
    /// How far ahead of use fills start.
    pub lookahead: Lookahead,
    /// Pages that one pin of a large tensor takes; `None` is 8 MiB of them, but at most a 32nd of the frames, and at least 2;
    /// where everything fits, whole tensors.
    pub step_pages: Option<NonZeroU32>,
    /// How many steps beyond the one that is computed are pinned: none where the caller computes, as on the host; one or
    /// more where it is ahead of a stream, as with a GPU.
    pub steps_ahead: u32,
    /// Passes, one after the other.
    pub passes: NonZeroU32,
    /// Of all that is drawn.
    pub seed: u64,
    /// Reads, writes and copies fail by chance, one in so many. A step whose pages did not come is asked for again.
    pub fail_one_in: Option<NonZeroU32>,
    /// What goes wrong besides, and what changes.
    pub trouble: Vec<Trouble>,
    /// Whether at every event the pagers' invariants are checked, and that every page's newest bytes are where they should be;
    /// and at the end that nothing is left in flight, or pinned. It makes each event cost as much as all pages.
    pub checked: bool,
    /// Whether [what happened when](crate::sim::Recorded) is kept: of the first device, and of the disk. It changes nothing else.
    pub timeline: bool,
}

impl Settings {
    /// The settings of a runtime's defaults with these budgets: policy [`Plan`](PolicyKind::Plan), pages of 2 MiB, four
    /// passes.
    pub fn new(device_budget: Bytes, host_budget: Bytes) -> Self {
        Self {
            policy: PolicyKind::Plan.into(),
            device_budget,
            host_budget,
            page_size: PageSize::DEFAULT,
            lookahead: Lookahead::Auto,
            step_pages: None,
            steps_ahead: 0,
            passes: NonZeroU32::MIN.saturating_add(3),
            seed: 0,
            fail_one_in: None,
            trouble: Vec::new(),
            checked: false,
            timeline: false,
        }
    }
}
