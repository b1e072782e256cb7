//! A fill: the way of a page's bytes into the device tier, and who waits for it.

use crate::error::Error;
use crate::ids::{FillPoint, MoveId, RequestId};
use crate::page_move::Priority;

/// A fill under way.
#[derive(Debug)]
pub(super) struct Fill {
    pub(super) waiters: Vec<RequestId>,
    /// How many of the waiters, counted from the first, waited when the current move was started.
    pub(super) own: usize,
    pub(super) priority: Priority,
    pub(super) moving: Option<MoveId>,
    /// When the bytes are there. Set once the device has taken up the copy.
    pub(super) taken: Option<FillPoint>,
    /// Whether the fill is for a writer. The writer is then the only waiter.
    pub(super) locked: bool,
    /// Whether the page has been lent during this fill.
    pub(super) lent: bool,
    /// Why the move failed. Set only while the page is still lent.
    pub(super) failed: Option<Error>,
}

impl Fill {
    /// Whether a request cannot join it.
    pub(super) fn excludes(&self, writes: bool) -> bool {
        self.locked || writes && (self.lent || !self.waiters.is_empty())
    }

    /// Takes a request from the waiters. Returns whether it was one.
    pub(super) fn leave(&mut self, waiter: RequestId) -> bool {
        let Some(at) = self.waiters.iter().position(|other| *other == waiter) else { return false };
        self.waiters.remove(at);
        self.own -= usize::from(at < self.own);
        true
    }
}
