//! A random page.

use crate::ids::{PageId, SegmentId};
use crate::pager::policy::parts::{PageNumbers, fit};
use crate::pager::policy::{Policy, Take, Want};
use crate::random::Random;

/// Evicts any page, each with the same probability. The seed is always the same.
///
/// L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
/// 8 bytes a page.
#[derive(Debug)]
pub(super) struct RandomPolicy {
    numbers: PageNumbers,
    resident: Vec<u32>,
    /// By page: where it is in `resident`, or [`ABSENT`].
    at: Vec<u32>,
    random: Random,
}

const ABSENT: u32 = u32::MAX;

impl Default for RandomPolicy {
    fn default() -> Self {
        Self { numbers: PageNumbers::default(), resident: Vec::new(), at: Vec::new(), random: Random(0) }
    }
}

impl RandomPolicy {
    fn remove_number(&mut self, number: u32) {
        let at = std::mem::replace(&mut self.at[number as usize], ABSENT);
        if at == ABSENT {
            return;
        }
        self.resident.swap_remove(at as usize);
        if let Some(moved) = self.resident.get(at as usize) {
            self.at[*moved as usize] = at;
        }
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.resident.swap(a, b);
        self.at[self.resident[a] as usize] = a as u32;
        self.at[self.resident[b] as usize] = b as u32;
    }
}

impl Policy for RandomPolicy {
    fn name(&self) -> &'static str {
        "random"
    }

    fn resize(&mut self, frames: u32, _host_frames: u32, _lookahead: u32) {
        let frames = frames as usize;
        self.resident.reserve_exact(frames.min(self.at.len()).saturating_sub(self.resident.len()));
    }

    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.numbers.add(segment, pages);
        fit(&mut self.at, self.numbers.end(), ABSENT);
    }

    fn accessed(&mut self, _page: PageId) {}

    fn inserted(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        if self.at[number as usize] == ABSENT {
            self.at[number as usize] = self.resident.len() as u32;
            self.resident.push(number);
        }
    }

    fn removed(&mut self, page: PageId) {
        if let Some(number) = self.numbers.number(page) {
            self.remove_number(number);
        }
    }

    fn forget(&mut self, segment: SegmentId) {
        for number in self.numbers.of_segment(segment) {
            self.remove_number(number as u32);
        }
        self.numbers.remove(segment);
        fit(&mut self.at, self.numbers.end(), ABSENT);
    }

    fn victim(&mut self, _want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        // Pages that were offered are at `end` and behind it.
        for end in (1..=self.resident.len()).rev() {
            let drawn = self.random.below(end as u32) as usize;
            let page = self.numbers.page(self.resident[drawn]);
            match take(page) {
                Take::Yes => return Some(page),
                Take::Skip => self.swap(drawn, end - 1),
                Take::Stop => return None,
            }
        }
        None
    }

    fn tracked(&self) -> Vec<PageId> {
        self.resident.iter().map(|number| self.numbers.page(*number)).collect()
    }
}
