//! Least frequently used, with ageing.

use super::{Policy, Take, Want};
use crate::ids::{PageId, SegmentId};
use crate::pager::links::{Links, List};
use crate::pager::numbers::{PageNumbers, fit};

/// Evicts the page that was used least often since it came; of several, the one whose count is as it is for longest. A
/// count is 63 at most. After ten times as many uses as there are frames, 4096 at least, all counts are halved, so that
/// what was used often once does not stay for ever.
///
/// One queue for each count, as in K. Shah, A. Mitra and D. Matani, "An O(1) algorithm for implementing the LFU cache
/// eviction scheme", 2010. Halving is the ageing of J. T. Robinson and M. V. Devarakonda, "Data cache management using
/// frequency-based replacement", SIGMETRICS 1990; it takes the same few steps whatever the number of pages. A page that
/// was filled ahead has the count 1 too, and its first use is the one it was filled for. 13 bytes a page.
#[derive(Debug)]
pub(super) struct LfuPolicy {
    numbers: PageNumbers,
    links: Links,
    /// By page: its count when it was last used, and [`PENDING`].
    counts: Vec<u8>,
    /// By page: how often counts had been halved then.
    ages: Vec<u32>,
    /// By count, those that have had it for longest first.
    lists: [List; COUNTS],
    /// A bit for each list that is not empty.
    used: u64,
    held: List,
    age: u32,
    uses: u64,
    period: u64,
}

const COUNTS: usize = 64;
/// Of a resident page: it was filled ahead and not used yet. Of another: it was missed, and comes.
const PENDING: u8 = 0x80;
const PERIOD_MIN: u64 = 4096;

impl Default for LfuPolicy {
    fn default() -> Self {
        Self {
            numbers: PageNumbers::default(),
            links: Links::default(),
            counts: Vec::new(),
            ages: Vec::new(),
            lists: [List::EMPTY; COUNTS],
            used: 0,
            held: List::EMPTY,
            age: 0,
            uses: 0,
            period: PERIOD_MIN,
        }
    }
}

impl LfuPolicy {
    fn fit(&mut self) {
        let end = self.numbers.end();
        self.links.fit(end);
        fit(&mut self.counts, end, 0);
        fit(&mut self.ages, end, 0);
    }

    /// The count of a resident page.
    fn count(&self, number: u32) -> usize {
        let count = self.counts[number as usize] & !PENDING;
        let halved = self.age - self.ages[number as usize];
        usize::from(count.checked_shr(halved).unwrap_or(0))
    }

    fn unlink(&mut self, number: u32) {
        let count = self.count(number);
        self.links.remove(&mut self.lists[count], number);
        if self.lists[count].len == 0 {
            self.used &= !(1 << count);
        }
    }

    /// Puts a page that is in no list behind the others that have this count. It is not pending then.
    fn link(&mut self, number: u32, count: usize) {
        self.links.push_last(&mut self.lists[count], number);
        self.used |= 1 << count;
        self.counts[number as usize] = count as u8;
        self.ages[number as usize] = self.age;
    }

    fn halve(&mut self) {
        // Ages are compared: they must not begin again.
        let Some(age) = self.age.checked_add(1) else { return };
        self.age = age;
        self.uses = 0;
        for count in 1..COUNTS {
            let mut list = std::mem::replace(&mut self.lists[count], List::EMPTY);
            self.links.append(&mut self.lists[count / 2], &mut list);
        }
        self.used = (0..COUNTS).filter(|count| self.lists[*count].len > 0).fold(0, |bits, count| bits | 1 << count);
    }

    /// The resident pages, the first to leave first.
    fn resident(&self) -> impl Iterator<Item = PageId> {
        let numbers = self.lists.iter().flat_map(|list| self.links.numbers(list));
        numbers.map(|number| self.numbers.page(number))
    }

    fn offer_unchanged(&self, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        for page in self.resident() {
            match take(page) {
                Take::Yes => return Some(page),
                Take::Skip => {}
                Take::Stop => return None,
            }
        }
        None
    }

    /// Offers pages; those that are not taken are linked in `held`.
    fn offer(&mut self, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        while self.used != 0 {
            let number = self.lists[self.used.trailing_zeros() as usize].first()?;
            let page = self.numbers.page(number);
            match take(page) {
                Take::Yes => return Some(page),
                Take::Skip => {
                    self.unlink(number);
                    self.links.push_last(&mut self.held, number);
                }
                Take::Stop => return None,
            }
        }
        None
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
        let pending = self.counts[number as usize] & PENDING != 0;
        match (self.links.present(number), pending) {
            (true, false) => {
                let count = self.count(number);
                self.unlink(number);
                self.link(number, (count + 1).min(COUNTS - 1));
            }
            (true, true) => self.counts[number as usize] &= !PENDING,
            (false, _) => self.counts[number as usize] |= PENDING,
        }
    }

    fn inserted(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        if self.links.present(number) {
            return;
        }
        let wanted = self.counts[number as usize] & PENDING != 0;
        self.link(number, 1);
        if !wanted {
            self.counts[number as usize] |= PENDING;
        }
    }

    fn removed(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        if self.links.present(number) {
            self.unlink(number);
        }
        self.counts[number as usize] = 0;
    }

    fn forget(&mut self, segment: SegmentId) {
        for number in self.numbers.of_segment(segment) {
            if self.links.present(number as u32) {
                self.unlink(number as u32);
            }
            self.counts[number] = 0;
        }
        self.numbers.remove(segment);
        self.fit();
    }

    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        if want == Want::Memory {
            return self.offer_unchanged(take);
        }
        let taken = self.offer(take);
        while let Some(number) = self.held.first() {
            let (count, pending) = (self.count(number), self.counts[number as usize] & PENDING);
            self.links.remove(&mut self.held, number);
            self.link(number, count);
            self.counts[number as usize] |= pending;
        }
        taken
    }

    fn tracked(&self) -> Vec<PageId> {
        self.resident().collect()
    }
}
