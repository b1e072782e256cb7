//! Recognising that the order of use repeats.
//!
//! A pass over a model uses its pages in one order, and the next pass again. For each use the distance to the same
//! page's last use is computed; on a cycle of period `d` it is `d` every time. A run of equal distances, interrupted at
//! most by single strays (an embedding row that differs from pass to pass), is the sign; the last `d` uses are the plan.

use std::collections::VecDeque;
use std::ops::Range;

use crate::pager::numbers::fit;

/// Uses remembered: a cycle longer than this is not recognised. 1 MiB.
const HISTORY: usize = 1 << 18;
/// The shortest run of equal distances that counts, however short the cycle.
const RUN_MIN: u32 = 16;

/// Pages go by their numbers.
#[derive(Debug, Default)]
pub(super) struct CycleRecorder {
    history: VecDeque<u32>,
    /// Uses so far, 0 never being the number of one.
    now: u32,
    /// By page: the number of its last use; 0 if there was none. Numbers begin again after 2^32 uses: a page that was
    /// not used for so long looks like a stray.
    last: Vec<u32>,
    distance: u32,
    run: u32,
    strays: u32,
}

impl CycleRecorder {
    /// Takes in a use; pages have numbers below `numbers`. Returns one period of the order, ending with this use, once
    /// it repeats.
    pub(super) fn push(&mut self, page: u32, numbers: usize) -> Option<Vec<u32>> {
        if self.history.back() == Some(&page) {
            // Neighbouring tensors share a page: one stay, not two uses.
            return None;
        }
        self.now = self.now.wrapping_add(1).max(1);
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(page);
        if self.last.len() < numbers {
            fit(&mut self.last, numbers, 0);
        }
        let before = std::mem::replace(self.last.get_mut(page as usize)?, self.now);
        if before == 0 {
            return None;
        }
        let distance = self.now.wrapping_sub(before);
        if distance == self.distance {
            self.run = self.run.saturating_add(1);
            self.strays = 0;
        } else {
            self.strays += 1;
            if self.strays > 1 || self.run == 0 {
                self.distance = distance;
                self.run = 1;
                self.strays = 0;
            }
        }
        let known = self.distance > 0 && self.distance as usize <= self.history.len();
        if known && self.strays == 0 && self.run >= RUN_MIN.max(self.distance / 4) {
            let start = self.history.len() - self.distance as usize;
            return Some(self.history.range(start..).copied().collect());
        }
        None
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// The pages with these numbers are gone.
    pub(super) fn forget(&mut self, numbers: Range<usize>) {
        let known = numbers.start.min(self.last.len())..numbers.end.min(self.last.len());
        if self.last[known].iter().any(|last| *last != 0) {
            self.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: usize = 2_000;

    #[test]
    fn a_cycle_with_a_changing_page_in_it_is_recognised_in_its_second_pass() {
        let mut recorder = CycleRecorder::default();
        let mut found = None;
        for (at, n) in (0..3).flat_map(|pass| std::iter::once(1000 + pass * 7).chain(0..100)).enumerate() {
            if let Some(plan) = recorder.push(n, PAGES) {
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
            assert!(recorder.push((x >> 16) % 500, PAGES).is_none());
        }
    }
}
