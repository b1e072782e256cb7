//! Least frequently used, with ageing.

use crate::ids::{PageId, SegmentId};
use crate::pager::policy::parts::{Classes, PageNumbers, fit, offer_each};
use crate::pager::policy::{Policy, Take, Want};

/// Evicts the page with the fewest uses since it came; among equals, the one that has had its count for longest. A
/// count is at most 63. After ten times as many uses as there are frames, but at least 4096, all counts are halved, so
/// that a page that was once used often does not stay for ever.
///
/// One queue for each count, as in K. Shah, A. Mitra and D. Matani, "An O(1) algorithm for implementing the LFU cache
/// eviction scheme", 2010. Halving is the ageing of J. T. Robinson and M. V. Devarakonda, "Data cache management using
/// frequency-based replacement", SIGMETRICS 1990; it takes the same few steps whatever the number of pages. A page that
/// was filled ahead has the count 1 too; its first use does not raise it. 12 bytes a page.
#[derive(Debug)]
pub(super) struct LfuPolicy {
    numbers: PageNumbers,
    /// By page: its count when it was last used; [`PENDING`]; and, from bit [`AGE_SHIFT`] on, how often counts had been
    /// halved by then.
    state: Vec<u32>,
    /// By count; in each list, the page that has had the count for longest is first.
    counts: Classes<COUNTS>,
    age: u32,
    uses: u64,
    period: u64,
}

const COUNTS: usize = 64;
/// A resident page was filled ahead and not used yet; another page was missed and is on its way.
const PENDING: u32 = COUNTS as u32;
const COUNT: u32 = COUNTS as u32 - 1;
const AGE_SHIFT: u32 = 7;
const AGE_MAX: u32 = u32::MAX >> AGE_SHIFT;
const PERIOD_MIN: u64 = 4096;

/// The count that `state` holds, after counts have been halved `age` times.
fn count_of(state: u32, age: u32) -> usize {
    let halved = age - (state >> AGE_SHIFT);
    (state & COUNT).checked_shr(halved).unwrap_or(0) as usize
}

impl Default for LfuPolicy {
    fn default() -> Self {
        Self {
            numbers: PageNumbers::default(),
            state: Vec::new(),
            counts: Classes::default(),
            age: 0,
            uses: 0,
            period: PERIOD_MIN,
        }
    }
}

impl LfuPolicy {
    fn fit(&mut self) {
        let end = self.numbers.end();
        self.counts.fit(end);
        fit(&mut self.state, end, 0);
    }

    /// The count of a resident page.
    fn count(&self, number: u32) -> usize {
        count_of(self.state[number as usize], self.age)
    }

    fn is_pending(&self, number: u32) -> bool {
        self.state[number as usize] & PENDING != 0
    }

    fn unlink(&mut self, number: u32) {
        self.counts.remove(number, self.count(number));
    }

    /// Puts a page that is in no list behind the others with this count, and clears [`PENDING`].
    fn link(&mut self, number: u32, count: usize) {
        self.counts.push_last(number, count);
        self.state[number as usize] = self.age << AGE_SHIFT | count as u32;
    }

    fn halve(&mut self) {
        if self.age == AGE_MAX {
            self.rejuvenate();
        }
        self.age += 1;
        self.uses = 0;
        self.counts.move_down(|count| count / 2);
    }

    /// Starts ages again from 0, for all pages together, because ages are compared. Once in 2^25 halvings; goes through
    /// all pages.
    fn rejuvenate(&mut self) {
        for number in 0..self.state.len() as u32 {
            let pending = self.state[number as usize] & PENDING;
            let count = if self.counts.contains(number) { self.count(number) as u32 } else { 0 };
            self.state[number as usize] = count | pending;
        }
        self.age = 0;
    }
}

impl Policy for LfuPolicy {
    fn name(&self) -> &'static str {
        "lfu"
    }

    fn resize(&mut self, frames: u32, _host_frames: u32, _lookahead: u32) {
        self.period = (10 * u64::from(frames)).max(PERIOD_MIN);
    }

    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.numbers.add(segment, pages);
        self.fit();
    }

    fn accessed(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        self.uses += 1;
        if self.uses >= self.period {
            self.halve();
        }
        match (self.counts.contains(number), self.is_pending(number)) {
            (true, false) => {
                let count = self.count(number);
                self.unlink(number);
                self.link(number, (count + 1).min(COUNTS - 1));
            }
            (true, true) => self.state[number as usize] &= !PENDING,
            (false, _) => self.state[number as usize] |= PENDING,
        }
    }

    fn inserted(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        if self.counts.contains(number) {
            return;
        }
        let wanted = self.is_pending(number);
        self.link(number, 1);
        if !wanted {
            self.state[number as usize] |= PENDING;
        }
    }

    fn removed(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        if self.counts.contains(number) {
            self.unlink(number);
        }
        self.state[number as usize] = 0;
    }

    fn forget(&mut self, segment: SegmentId) {
        for number in self.numbers.of_segment(segment) {
            if self.counts.contains(number as u32) {
                self.unlink(number as u32);
            }
            self.state[number] = 0;
        }
        self.numbers.remove(segment);
        self.fit();
    }

    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        let Self { numbers, state, counts, age, .. } = self;
        if want == Want::Memory {
            return offer_each(counts.pages(numbers), take);
        }
        let fewest = |counts: &Classes<COUNTS>| counts.firsts().next().map(|(_, number)| number);
        counts.offer(numbers, |number| count_of(state[number as usize], *age), fewest, take)
    }

    fn tracked(&self) -> Vec<PageId> {
        self.counts.pages(&self.numbers).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PageIndex;

    /// When ages start again, every page keeps its count and its place.
    #[test]
    fn ages_begin_again_without_a_trace() {
        let page = |index| PageId { segment: SegmentId::new(0), index: PageIndex::new(index) };
        let run = |age: u32| {
            let mut policy = LfuPolicy { age, ..LfuPolicy::default() };
            policy.segment(SegmentId::new(0), 8);
            let mut x = 1u32;
            let mut orders = Vec::new();
            for step in 0..3_000u32 {
                x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let index = (x >> 8) % (1 + (x >> 24) % 8);
                policy.accessed(page(index));
                if x >> 29 == 0 {
                    policy.removed(page(index))
                } else {
                    policy.inserted(page(index))
                }
                if step % 300 == 299 {
                    policy.halve();
                }
                orders.push(policy.tracked());
            }
            (orders, policy.age)
        };
        let (young, age) = run(0);
        assert_eq!(age, 10);
        let (old, age) = run(AGE_MAX - 4);
        assert_eq!(age, 6, "they have begun again");
        assert_eq!(young, old);
    }
}
