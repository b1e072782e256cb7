//! Runs of consecutive pages.

use crate::ids::{PageId, PageIndex, SegmentId};

/// A run of consecutive pages of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRun {
    /// The segment.
    pub segment: SegmentId,
    /// First page.
    pub first: PageIndex,
    /// Number of pages.
    pub count: u32,
}

impl PageRun {
    /// The pages, in order.
    pub fn pages(self) -> impl Iterator<Item = PageId> {
        (self.first.0..self.first.0 + self.count).map(move |n| PageId { segment: self.segment, index: PageIndex(n) })
    }

    /// Whether a page is one of them.
    pub fn contains(&self, page: PageId) -> bool {
        page.segment == self.segment && page.index.0.checked_sub(self.first.0).is_some_and(|at| at < self.count)
    }

    /// Sorts runs and joins those that touch or overlap, so that each page appears once.
    pub fn normalize(runs: &mut Vec<PageRun>) {
        let joined = Self::join(runs);
        runs.truncate(joined);
    }

    /// [`normalize`](Self::normalize) in place: the joined runs come first. Returns how many there are.
    pub fn join(runs: &mut [PageRun]) -> usize {
        runs.sort_unstable();
        let mut joined = 0usize;
        for at in 0..runs.len() {
            let next = runs[at];
            if next.count == 0 {
                continue;
            }
            if let Some(run) = joined.checked_sub(1).map(|last| &mut runs[last])
                && run.segment == next.segment
                && next.first.0 <= run.first.0 + run.count
            {
                run.count = run.count.max(next.first.0 + next.count - run.first.0);
            } else {
                runs[joined] = next;
                joined += 1;
            }
        }
        joined
    }
}

/// How many pages runs have.
pub(super) fn pages_of(runs: &[PageRun]) -> u64 {
    runs.iter().map(|run| u64::from(run.count)).sum()
}
