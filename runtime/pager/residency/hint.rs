//! Hints, which wait for their fills.

use crate::ids::{PageId, WalkerId};

/// A page that may be used soon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Hint {
    pub(super) page: PageId,
    /// The walker that [expects](crate::Pager::expect) to use it; `None` for a hint that stays until there is room.
    pub(super) of: Option<WalkerId>,
}
