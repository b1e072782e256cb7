//! Filling pages before they are used: because of hints, and because the policy's plan says that they come next.

use super::hint::Hint;
use super::{Kept, Residency};
use crate::effects::Effects;
use crate::ids::{PageId, WalkerId};
use crate::page_move::Priority;
use crate::policy::Want;

/// The most hints that are kept. Later ones are dropped.
const HINTS_MAX: usize = 4096;

impl Residency {
    /// Suggests that a page will be used soon, by walker `of` if there is one.
    pub(crate) fn hint(&mut self, page: PageId, of: Option<WalkerId>) {
        if self.hints.len() < HINTS_MAX && self.fillable(page) {
            self.hints.push_back(Hint { page, of });
        }
    }

    /// Drops the hints of a walker.
    pub(crate) fn expect_nothing(&mut self, walker: WalkerId) {
        self.hints.retain(|hint| hint.of != Some(walker));
    }

    /// Starts fills ahead of use, as far as frames and the lookahead allow.
    pub(crate) fn look_ahead(&mut self, kept: Kept, fx: &mut Effects) {
        // While the budget shrinks, nothing is filled ahead: free frames go to pages first, so fills would keep the
        // budget waiting.
        if self.frames.active() > self.frames.target {
            return;
        }
        while let Some(Hint { page, .. }) = self.hints.front().copied() {
            if self.prefetching >= self.config.lookahead.max(1) {
                return;
            }
            if self.fillable(page) && !self.fill_ahead(kept, page, Want::Hint, fx) {
                self.hints.clear();
                break;
            }
            self.hints.pop_front();
        }
        while self.prefetching < self.config.lookahead {
            let Self { policy, segments, .. } = self;
            let next = policy.next_fill(&|page: PageId| {
                !segments.get(page.segment.index()).is_some_and(|table| table.fillable(page.index))
            });
            // A user's policy may name pages that it should not.
            let Some(page) = next.filter(|page| self.fillable(*page)) else { return };
            if !self.fill_ahead(kept, page, Want::Planned(page), fx) {
                return;
            }
            self.policy.filling(page);
        }
    }

    /// Whether this page can be filled. Hints and plans may name segments that are gone.
    pub(super) fn fillable(&self, page: PageId) -> bool {
        self.segments.get(page.segment.index()).is_some_and(|table| table.fillable(page.index))
    }

    fn fill_ahead(&mut self, kept: Kept, page: PageId, want: Want, fx: &mut Effects) -> bool {
        if self.closing {
            return false;
        }
        while self.frames.free_count() + self.transit <= self.promised(kept) + kept.floor {
            if !self.reclaim(kept, want, fx) {
                return false;
            }
        }
        let _ = self.admit_fill(kept, page, None, false, Priority::Prefetch, fx);
        true
    }
}
