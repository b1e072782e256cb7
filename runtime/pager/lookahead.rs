//! Filling pages before they are used: by hints, and by what the policy's plan says comes next.
//!
//! # How far ahead
//!
//! A pass that keeps step with the disk needs many fills under way: they carry it over the disk's unevenness. A pass that waits
//! for the disk in any case needs only as many as keep the disk busy, and each frame more in which pages stream is one less in
//! which pages stay. Which of the two it is shows in the uses: the first use of a page that was filled ahead finds it *ready*, or
//! *late*, still on its way. Where nearly all are late though as much is under way as may be, fewer are. Where then some are
//! ready after all, or after a while in any case, it is as many as may be again; each time that this was of no use, the while
//! is twice as long.

use super::policy::Want;
use super::{Effects, PageRun, Pager, Priority};
use crate::ids::PageId;

/// Hints kept beyond those in flight; later ones are dropped.
const HINTS_MAX: usize = 4096;

/// Uses that are looked at together, for each page of the lookahead, and at least.
const WINDOW: u32 = 4;
const WINDOW_LEAST: u32 = 64;
/// Of 16 uses, so many late ones: nearly all; and so few that the pass keeps step.
const NEARLY_ALL: u32 = 15;
const KEEPS_STEP: u32 = 12;
/// Windows until the most is tried again, at first and at last.
const WHILE: u32 = 16;
const WHILE_MOST: u32 = 1024;

/// How far ahead of use fills start, by how uses find what was filled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    most: u32,
    least: u32,
    narrow: bool,
    ready: u32,
    late: u32,
    /// Of a narrow one, windows until the most is tried again.
    left: u32,
    /// For how many windows it is narrow the next time.
    patience: u32,
}

impl Pace {
    pub(super) fn new(most: u32, least: u32) -> Self {
        Self { most, least: least.min(most), narrow: false, ready: 0, late: 0, left: 0, patience: WHILE }
    }

    pub(super) fn pages(&self) -> u32 {
        if self.narrow { self.least } else { self.most }
    }

    /// The first use of a page that was filled ahead. Whether that changes how far ahead fills start.
    pub(super) fn used(&mut self, late: bool) -> bool {
        if self.least == self.most {
            return false;
        }
        *(if late { &mut self.late } else { &mut self.ready }) += 1;
        let seen = self.ready + self.late;
        if seen < (WINDOW * self.most).max(WINDOW_LEAST) {
            return false;
        }
        let late = u64::from(self.late) * 16;
        (self.ready, self.late) = (0, 0);
        let before = self.narrow;
        if !self.narrow {
            self.narrow = late >= u64::from(NEARLY_ALL) * u64::from(seen);
            self.left = self.patience;
            if !self.narrow {
                self.patience = WHILE;
            }
        } else {
            self.left = self.left.saturating_sub(1);
            let keeps_step = late <= u64::from(KEEPS_STEP) * u64::from(seen);
            if keeps_step || self.left == 0 {
                self.narrow = false;
                self.patience = (2 * self.patience).min(WHILE_MOST);
            }
        }
        self.narrow != before
    }
}

impl Pager {
    /// Suggests that these pages will be used soon. A hint is not a promise: it is dropped where no frame can be had.
    pub fn prefetch(&mut self, runs: &[PageRun], fx: &mut Effects) {
        for page in runs.iter().flat_map(|run| run.pages()) {
            if self.hints.len() < HINTS_MAX && self.fillable(page) {
                self.hints.push_back(page);
            }
        }
        self.pump(fx);
    }

    /// How many pages ahead of use fills start now.
    pub fn lookahead(&self) -> u32 {
        self.pace.pages()
    }

    /// Changes how many they are at most, and of a pass that waits for them in any case. The policy hears of it with the next
    /// [`set_frames`](Self::set_frames), or when the pass changes.
    pub fn set_lookahead(&mut self, most: u32, least: u32) {
        self.pace = Pace::new(most, least);
    }

    /// The first use of a page that was filled ahead.
    pub(super) fn used_ahead(&mut self, late: bool) {
        if self.pace.used(late) {
            self.policy.resize(self.frames.target, self.host.total(), self.pace.pages());
        }
    }

    /// Starts fills ahead of use, as far as frames and the lookahead allow.
    pub(super) fn look_ahead(&mut self, fx: &mut Effects) {
        // Whoever waits for a smaller budget would wait for as long as something is filled: frames that become free go to
        // pages first.
        if !self.frame_line.line.is_empty() || self.frames.active() > self.frames.target {
            return;
        }
        while let Some(page) = self.hints.front().copied() {
            if self.prefetching >= self.pace.pages().max(1) {
                return;
            }
            if self.fillable(page) && !self.fill_ahead(page, Want::Hint, fx) {
                self.hints.clear();
                break;
            }
            self.hints.pop_front();
        }
        while self.prefetching < self.pace.pages() {
            let Self { policy, segments, .. } = self;
            let next = policy.next_fill(&|page: PageId| {
                !segments.get(page.segment.index()).is_some_and(|table| table.fillable(page.index))
            });
            // A policy of the user's may name what it should not.
            let Some(page) = next.filter(|page| self.fillable(*page)) else { return };
            if !self.fill_ahead(page, Want::Planned(page), fx) {
                return;
            }
            self.policy.filling(page);
        }
    }

    /// Whether this page can be filled: what is suggested or planned may name segments that are gone.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses until the lookahead has changed, at most so many; one in `ready_in` is ready, or none if 0.
    fn until_changed(pace: &mut Pace, ready_in: u32, most: u32) -> Option<u32> {
        (1..=most).find(|n| pace.used(ready_in == 0 || n % ready_in != 0))
    }

    #[test]
    fn a_pass_that_waits_for_the_disk_has_fewer_pages_under_way() {
        let mut pace = Pace::new(16, 4);
        assert_eq!(pace.pages(), 16);
        assert_eq!(until_changed(&mut pace, 0, 1000), Some(WINDOW_LEAST));
        assert_eq!(pace.pages(), 4);
        // The most is tried again, each time after twice as long.
        let whiles: Vec<u32> = (0..4)
            .map(|_| {
                let narrow = until_changed(&mut pace, 0, 1 << 20).unwrap();
                assert_eq!(pace.pages(), 16);
                assert_eq!(until_changed(&mut pace, 0, 1000), Some(WINDOW_LEAST));
                narrow / WINDOW_LEAST
            })
            .collect();
        assert_eq!(whiles, [16, 32, 64, 128]);
        // Until it is of use.
        let back = until_changed(&mut pace, 3, 1000);
        assert_eq!((back, pace.pages()), (Some(WINDOW_LEAST), 16));
        assert_eq!(until_changed(&mut pace, 3, 10_000), None);
        assert_eq!(pace.patience, WHILE);
    }

    #[test]
    fn a_pass_that_keeps_step_has_all_of_it() {
        let mut pace = Pace::new(16, 4);
        assert_eq!(until_changed(&mut pace, 2, 100_000), None);
        // Nor is there anything to choose where the disk needs as much.
        let mut pace = Pace::new(8, 8);
        assert_eq!(until_changed(&mut pace, 0, 100_000), None);
        assert_eq!(Pace::new(2, 5).pages(), 2);
        assert_eq!(Pace::new(2, 5).least, 2);
    }
}
