//! Recognising that the order of use repeats.
//!
//! A pass over a model uses its pages in one order, and the next pass again. For each use the distance to the same
//! page's last use is computed; on a cycle of period `d` it is `d` every time. A run of equal distances, interrupted at
//! most by single strays (an embedding row that differs from pass to pass), is the sign; the last `d` uses are the plan.

use std::collections::{HashMap, VecDeque};

use super::PageHashing;
use crate::ids::{PageId, SegmentId};

/// Uses remembered: a cycle longer than this is not recognised. 2 MiB.
const HISTORY: usize = 1 << 18;
/// The shortest run of equal distances that counts, however short the cycle.
const RUN_MIN: u64 = 16;

#[derive(Debug, Default)]
pub(super) struct CycleRecorder {
    history: VecDeque<PageId>,
    /// Uses before the front of `history`.
    dropped: u64,
    last: HashMap<PageId, u64, PageHashing>,
    distance: u64,
    run: u64,
    strays: u32,
}

impl CycleRecorder {
    /// Takes in a use. Returns one period of the order, ending with this use, once it repeats.
    pub(super) fn push(&mut self, page: PageId) -> Option<Vec<PageId>> {
        if self.history.back() == Some(&page) {
            // Neighbouring tensors share a page: one stay, not two uses.
            return None;
        }
        let now = self.dropped + self.history.len() as u64;
        self.history.push_back(page);
        if self.history.len() > HISTORY {
            self.history.pop_front();
            self.dropped += 1;
        }
        let before = self.last.insert(page, now)?;
        let distance = now - before;
        if distance == self.distance {
            self.run += 1;
            self.strays = 0;
        } else {
            self.strays += 1;
            if self.strays > 1 || self.run == 0 {
                self.distance = distance;
                self.run = 1;
                self.strays = 0;
            }
        }
        let known = self.distance > 0 && self.distance <= self.history.len() as u64;
        if known && self.strays == 0 && self.run >= RUN_MIN.max(self.distance / 4) {
            let start = self.history.len() - self.distance as usize;
            return Some(self.history.range(start..).copied().collect());
        }
        None
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn forget(&mut self, segment: SegmentId) {
        if self.last.keys().any(|page| page.segment == segment) {
            self.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PageIndex;

    fn page(n: u32) -> PageId {
        PageId { segment: SegmentId(0), index: PageIndex(n) }
    }

    #[test]
    fn a_cycle_with_a_changing_page_in_it_is_recognised_in_its_second_pass() {
        let mut recorder = CycleRecorder::default();
        let mut found = None;
        for (at, n) in (0..3).flat_map(|pass| std::iter::once(1000 + pass * 7).chain(0..100)).enumerate() {
            if let Some(plan) = recorder.push(page(n)) {
                found = Some((at, plan));
                break;
            }
        }
        let (at, plan) = found.expect("the cycle is recognised");
        assert!(at < 2 * 101, "only at use {at}");
        assert_eq!(plan.len(), 101);
    }

    #[test]
    fn random_use_is_not_a_cycle() {
        let mut recorder = CycleRecorder::default();
        let mut x = 12345u32;
        for _ in 0..20_000 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            assert!(recorder.push(page((x >> 16) % 500)).is_none());
        }
    }
}
