//! Shared by policies that keep pages in several queues: the queues, a byte of state for each page, and the answers to
//! the pager. Each policy adds a [`Rule`].
//!
//! # Uses and comings
//!
//! Papers tell hits from misses, and a miss brings the page in. Here uses and comings are apart, and each may happen
//! without the other:
//!
//! - A use of a page that is not resident is one miss, however many uses follow before the page comes.
//! - A page that comes without a miss was filled ahead. The fill stands for the use that it was made for: it is treated
//!   as a miss, and the first use after it does not count again.
//!
//! # Offers
//!
//! A page that was offered and not taken is in use. It is held aside until the search ends, so that it is offered once,
//! and then goes to the end of its queue. If pinned pages stayed first in line, every search would begin with them.

use std::fmt;

use super::{Policy, Take, Want, offer_each};
use crate::ids::{PageId, SegmentId};
use crate::links::{Links, List};
use crate::numbers::{PageNumbers, fit};

/// In a page's state: one more than its queue, or [`NOWHERE`].
const PLACE: u8 = 0b0000_0111;
const NOWHERE: u8 = 0;
/// The page is held aside: in no list, but counted in its queue.
const HELD: u8 = 0b0000_1000;
/// A resident page was filled ahead and not used yet; another page was missed and is on its way.
const PENDING: u8 = 0b0001_0000;
/// The rule's own bits begin here.
const MARK_SHIFT: u32 = 5;
/// The largest mark.
pub(super) const MARK_MAX: u8 = u8::MAX >> MARK_SHIFT;

/// `N` queues. The first `resident` are of resident pages, the others of pages that are remembered (ghosts). A page is
/// in at most one. 9 bytes for each page that exists.
#[derive(Debug)]
pub struct Queues<const N: usize> {
    numbers: PageNumbers,
    links: Links,
    state: Vec<u8>,
    lists: [List; N],
    held: List,
    held_of: [u32; N],
    resident: usize,
}

impl<const N: usize> Queues<N> {
    fn new(resident: usize) -> Self {
        const { assert!(N < PLACE as usize) };
        Self {
            numbers: PageNumbers::default(),
            links: Links::default(),
            state: Vec::new(),
            lists: [List::EMPTY; N],
            held: List::EMPTY,
            held_of: [0; N],
            resident,
        }
    }

    fn fit(&mut self) {
        self.links.fit(self.numbers.end());
        fit(&mut self.state, self.numbers.end(), NOWHERE);
    }

    /// The queue the page is in.
    pub(super) fn place(&self, number: u32) -> Option<usize> {
        usize::from(self.state[number as usize] & PLACE).checked_sub(1)
    }

    fn is_resident(&self, number: u32) -> bool {
        self.place(number).is_some_and(|queue| queue < self.resident)
    }

    pub fn mark(&self, number: u32) -> u8 {
        self.state[number as usize] >> MARK_SHIFT
    }

    /// At most [`MARK_MAX`].
    pub fn set_mark(&mut self, number: u32, mark: u8) {
        let state = &mut self.state[number as usize];
        *state = *state & !(MARK_MAX << MARK_SHIFT) | mark << MARK_SHIFT;
    }

    fn is_pending(&self, number: u32) -> bool {
        self.state[number as usize] & PENDING != 0
    }

    fn set_pending(&mut self, number: u32, pending: bool) {
        let state = &mut self.state[number as usize];
        *state = *state & !PENDING | if pending { PENDING } else { 0 };
    }

    /// Pages in the queue, including those held aside.
    pub(super) fn len(&self, queue: usize) -> u32 {
        self.lists[queue].len + self.held_of[queue]
    }

    /// The first page of a queue that is not held aside.
    pub fn first(&self, queue: usize) -> Option<u32> {
        self.lists[queue].first()
    }

    /// The page behind this one in its queue.
    pub fn after(&self, number: u32) -> Option<u32> {
        self.links.after(number)
    }

    /// Takes the page out of its queue, if it is in one.
    pub fn remove(&mut self, number: u32) {
        let Some(queue) = self.place(number) else { return };
        let state = &mut self.state[number as usize];
        if *state & HELD != 0 {
            self.links.remove(&mut self.held, number);
            self.held_of[queue] -= 1;
        } else {
            self.links.remove(&mut self.lists[queue], number);
        }
        *state &= !(PLACE | HELD);
    }

    /// The page is now the last of this queue, wherever it was.
    #[inline]
    pub fn push_last(&mut self, queue: usize, number: u32) {
        // Most pages are in this queue already. If `queue` is known at compile time, this path writes to no address
        // that depends on the page's state, so the processor can begin the next use without waiting for the state.
        if self.state[number as usize] & (PLACE | HELD) == queue as u8 + 1 {
            self.links.move_last(&mut self.lists[queue], number);
            return;
        }
        self.remove(number);
        self.links.push_last(&mut self.lists[queue], number);
        self.state[number as usize] |= queue as u8 + 1;
    }

    /// Forgets the first pages of a queue until it has at most `most`.
    pub(super) fn trim(&mut self, queue: usize, most: u32) {
        while self.len(queue) > most
            && let Some(oldest) = self.first(queue)
        {
            self.remove(oldest);
        }
    }

    fn hold(&mut self, number: u32) {
        let Some(queue) = self.place(number) else { return };
        self.links.remove(&mut self.lists[queue], number);
        self.links.push_last(&mut self.held, number);
        self.held_of[queue] += 1;
        self.state[number as usize] |= HELD;
    }

    fn release_held(&mut self) {
        while let Some(number) = self.held.first() {
            let Some(queue) = self.place(number) else { return };
            self.push_last(queue, number);
        }
    }

    /// Every resident page, queue by queue.
    fn pages(&self) -> impl Iterator<Item = PageId> {
        let lists = self.lists[..self.resident].iter();
        lists.flat_map(|list| self.links.numbers(list)).map(|number| self.numbers.page(number))
    }
}

/// Decides what hits, misses and comings do to the queues. Queues from `RESIDENT` on are of pages that are not
/// resident.
///
/// 1. `insert` puts the page into a resident queue; `leave` takes it out of all of them.
/// 2. `candidate` names the first page of a resident queue, or one that can be taken out of its middle. It names a page
///    as long as there is one that is not held aside.
/// 3. A page's mark is 0 until the rule sets it, and again once the page was [`erased`](Self::erase).
pub trait Rule<const N: usize>: fmt::Debug + Default + Send {
    const NAME: &'static str;
    const RESIDENT: usize;

    /// The number of frames has changed.
    fn resize(&mut self, queues: &mut Queues<N>, frames: u32);
    /// Pages have numbers below `end`.
    fn fit(&mut self, _end: usize) {}
    /// A resident page is used.
    fn hit(&mut self, queues: &mut Queues<N>, number: u32);
    /// A page that is not resident is used, and is now on its way.
    fn miss(&mut self, _queues: &mut Queues<N>, _number: u32) {}
    /// The page comes.
    fn insert(&mut self, queues: &mut Queues<N>, number: u32);
    /// A resident page goes.
    fn leave(&mut self, queues: &mut Queues<N>, number: u32);
    /// The page that goes next.
    fn candidate(&mut self, queues: &mut Queues<N>) -> Option<u32>;
    /// The candidate will be held aside.
    fn hold(&mut self, _queues: &mut Queues<N>, _number: u32) {}
    /// The candidate was taken, and is about to leave.
    fn taken(&mut self, _queues: &mut Queues<N>, _number: u32) {}
    /// Everything about the page is forgotten.
    fn erase(&mut self, queues: &mut Queues<N>, number: u32) {
        queues.remove(number);
    }
}

/// A policy that follows a rule.
#[derive(Debug)]
pub struct Ruled<R, const N: usize> {
    pub(super) rule: R,
    queues: Queues<N>,
}

impl<R: Rule<N>, const N: usize> Default for Ruled<R, N> {
    fn default() -> Self {
        Self { rule: R::default(), queues: Queues::new(R::RESIDENT) }
    }
}

impl<R: Rule<N>, const N: usize> Ruled<R, N> {
    fn missed(&mut self, number: u32) {
        self.rule.miss(&mut self.queues, number);
        self.queues.set_pending(number, true);
    }
}

impl<R: Rule<N>, const N: usize> Policy for Ruled<R, N> {
    fn name(&self) -> &'static str {
        R::NAME
    }

    fn resize(&mut self, frames: u32, _host_frames: u32, _lookahead: u32) {
        self.rule.resize(&mut self.queues, frames);
    }

    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.queues.numbers.add(segment, pages);
        self.queues.fit();
        self.rule.fit(self.queues.numbers.end());
    }

    fn accessed(&mut self, page: PageId) {
        let Some(number) = self.queues.numbers.number(page) else { return };
        match (self.queues.is_resident(number), self.queues.is_pending(number)) {
            (true, false) => self.rule.hit(&mut self.queues, number),
            (true, true) => self.queues.set_pending(number, false),
            (false, false) => self.missed(number),
            (false, true) => {}
        }
    }

    fn inserted(&mut self, page: PageId) {
        let Some(number) = self.queues.numbers.number(page) else { return };
        if self.queues.is_resident(number) {
            return;
        }
        let wanted = self.queues.is_pending(number);
        if !wanted {
            self.missed(number);
        }
        self.rule.insert(&mut self.queues, number);
        self.queues.set_pending(number, !wanted);
    }

    fn removed(&mut self, page: PageId) {
        let Some(number) = self.queues.numbers.number(page) else { return };
        self.queues.set_pending(number, false);
        if self.queues.is_resident(number) {
            self.rule.leave(&mut self.queues, number);
        }
    }

    fn forget(&mut self, segment: SegmentId) {
        for number in self.queues.numbers.of_segment(segment) {
            self.rule.erase(&mut self.queues, number as u32);
            self.queues.state[number] = NOWHERE;
        }
        self.queues.numbers.remove(segment);
        self.queues.fit();
        self.rule.fit(self.queues.numbers.end());
    }

    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        if want == Want::Memory {
            return offer_each(self.queues.pages(), take);
        }
        let mut taken = None;
        while let Some(number) = self.rule.candidate(&mut self.queues) {
            let page = self.queues.numbers.page(number);
            match take(page) {
                Take::Yes => {
                    self.rule.taken(&mut self.queues, number);
                    taken = Some(page);
                    break;
                }
                Take::Skip => {
                    self.rule.hold(&mut self.queues, number);
                    self.queues.hold(number);
                }
                Take::Stop => break,
            }
        }
        self.queues.release_held();
        taken
    }

    fn tracked(&self) -> Vec<PageId> {
        self.queues.pages().collect()
    }
}
