//! Which policy suits a job.

use super::memory::{Job, Work};
use crate::pager::PolicyKind;

/// The policy that `docs/policies.md` found best for such a job, and the reason. `draws` says whether passes draw
/// experts.
pub(super) fn recommend(job: &Job, resident: bool, kv_paged: bool, draws: bool) -> (PolicyKind, &'static str) {
    match job.work {
        _ if resident => (PolicyKind::Plan, "every page has a frame, and none ever goes"),
        Work::Train { .. } => (
            PolicyKind::Plan,
            "every step uses the same pages in the same order: declare it, and it is followed from the first step on",
        ),
        Work::Infer { .. } if kv_paged => (
            PolicyKind::Shares,
            "weights and caches are used differently and share the frames: allocate caches as keys and values",
        ),
        Work::Infer { .. } if draws => {
            (PolicyKind::Kv, "which experts a pass draws does not repeat: how often counts as well as how lately")
        }
        Work::Infer { .. } => (PolicyKind::Plan, "every pass uses all weights in the same order"),
    }
}
