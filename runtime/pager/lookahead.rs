//! Filling pages before they are used: because of hints, and because the policy's plan says that they come next.

use super::hint::Hint;
use super::policy::Want;
use super::{Effects, PageRun, Pager, Priority};
use crate::ids::{PageId, WalkerId};

/// The most hints that are kept. Later ones are dropped.
const HINTS_MAX: usize = 4096;

impl Pager {
    /// Suggests that these pages will be used soon. A hint is not a promise: it is dropped if there is no frame for it.
    pub fn prefetch(&mut self, runs: &[PageRun], fx: &mut Effects) {
        for page in runs.iter().flat_map(|run| run.pages()) {
            self.hint(page, None);
        }
        self.pump(fx);
    }

    /// A walker is likely to use these pages next, in this order. They take the place of those that it expected before:
    /// what is not on its way of these is not filled any more. The policy keeps expected pages from going before they
    /// are used, as long as others can go. A walker that has ended expects nothing.
    pub fn expect(&mut self, walker: WalkerId, runs: &[PageRun], fx: &mut Effects) {
        if !self.is_walking(walker) {
            return;
        }
        self.expect_nothing(walker);
        let pages: Vec<PageId> = runs.iter().flat_map(|run| run.pages()).collect();
        for page in &pages {
            self.hint(*page, Some(walker));
        }
        self.staying = None;
        self.tells_of(walker);
        self.policy.expected(&pages);
        self.pump(fx);
    }

    /// Drops the hints of a walker.
    pub(super) fn expect_nothing(&mut self, walker: WalkerId) {
        self.hints.retain(|hint| hint.of != Some(walker));
    }

    fn hint(&mut self, page: PageId, of: Option<WalkerId>) {
        if self.hints.len() < HINTS_MAX && self.fillable(page) {
            self.hints.push_back(Hint { page, of });
        }
    }

    /// How many pages ahead of use fills start.
    pub fn lookahead(&self) -> u32 {
        self.config.lookahead
    }

    /// Sets how many pages ahead of use fills start. The policy hears of it with the next
    /// [`set_frames`](Self::set_frames).
    pub fn set_lookahead(&mut self, pages: u32) {
        self.config.lookahead = pages;
    }

    /// Starts fills ahead of use, as far as frames and the lookahead allow.
    pub(super) fn look_ahead(&mut self, fx: &mut Effects) {
        // While the budget shrinks, nothing is filled ahead: free frames go to pages first, so fills would keep the
        // budget waiting.
        if !self.frame_line.line.is_empty() || self.frames.active() > self.frames.target {
            return;
        }
        while let Some(Hint { page, .. }) = self.hints.front().copied() {
            if self.prefetching >= self.config.lookahead.max(1) {
                return;
            }
            if self.fillable(page) && !self.fill_ahead(page, Want::Hint, fx) {
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
            if !self.fill_ahead(page, Want::Planned(page), fx) {
                return;
            }
            self.policy.filling(page);
        }
    }

    /// Whether this page can be filled. Hints and plans may name segments that are gone.
    fn fillable(&self, page: PageId) -> bool {
        self.segments.get(page.segment.index()).is_some_and(|table| table.fillable(page.index))
    }

    fn fill_ahead(&mut self, page: PageId, want: Want, fx: &mut Effects) -> bool {
        if self.closing {
            return false;
        }
        while self.frames.free_count() + self.transit <= self.promised() + self.floor {
            if !self.reclaim(want, fx) {
                return false;
            }
        }
        let _ = self.admit_fill(page, None, false, Priority::Prefetch, fx);
        true
    }
}
