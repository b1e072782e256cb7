//! The resident pages that no followed plan names, while a plan is followed: the least recently used goes first.
//!
//! A search costs as many steps as it skips pages. So a page that was skipped, most likely because it is pinned, is
//! *held*: each later search offers a few held pages, in turn. A search for a request that waits offers all of them
//! before it gives up.

use smallvec::SmallVec;

use super::active::{RETURNING, Stopped};
use super::place::step;
use super::{Take, Want};
use crate::ids::PageId;
use crate::links::{Links, List};
use crate::numbers::PageNumbers;

/// 8 bytes for each page that exists, from the first page outside of a plan on.
#[derive(Debug)]
pub(super) struct Outside {
    links: Links,
    /// In order of use: the held pages, which are those before `next`, then the others.
    list: List,
    /// The first page that was not skipped since it was used or came.
    next: Option<u32>,
    /// The next held page to offer again; if it is `next` or `None`, the first one is.
    returning: Option<u32>,
}

/// The held pages that a search has offered, and the first page behind the held ones.
#[derive(Debug)]
pub(super) struct Offered {
    again: SmallVec<[u32; RETURNING]>,
    end: Option<u32>,
}

impl Outside {
    pub(super) fn new() -> Self {
        Self { links: Links::default(), list: List::EMPTY, next: None, returning: None }
    }

    pub(super) fn len(&self) -> usize {
        self.list.len as usize
    }

    pub(super) fn contains(&self, number: u32) -> bool {
        self.list.len > 0 && self.links.present(number)
    }

    /// Numbers are below `end` from now on.
    pub(super) fn fit(&mut self, end: usize) {
        if self.list.len > 0 {
            self.links.fit(end);
        }
    }

    /// Adds a page, as the one used last; it may be in the list already. Numbers are below `end`.
    pub(super) fn insert(&mut self, number: u32, end: usize) {
        self.remove(number);
        if self.list.len == 0 {
            self.links.fit(end);
        }
        self.append(number);
    }

    /// Adds a page that is not in the list.
    fn append(&mut self, number: u32) {
        self.links.push_last(&mut self.list, number);
        self.next = self.next.or(Some(number));
    }

    pub(super) fn remove(&mut self, number: u32) {
        if !self.contains(number) {
            return;
        }
        let after = self.links.after(number);
        for place in [&mut self.next, &mut self.returning] {
            if *place == Some(number) {
                *place = after;
            }
        }
        self.links.remove(&mut self.list, number);
    }

    /// If the page is in the list, it is now the one used last.
    pub(super) fn touch(&mut self, number: u32) {
        if self.contains(number) {
            self.remove(number);
            self.append(number);
        }
    }

    pub(super) fn clear(&mut self) {
        while let Some(number) = self.list.first() {
            self.links.remove(&mut self.list, number);
        }
        (self.next, self.returning) = (None, None);
    }

    /// Offers a few of the held pages, and all others.
    pub(super) fn offer(
        &mut self,
        want: Want,
        numbers: &PageNumbers,
        take: &mut dyn FnMut(PageId) -> Take,
    ) -> (Result<Option<PageId>, Stopped>, Offered) {
        if want == Want::Memory {
            // A search for memory also skips dirty pages: a skip does not mean that the page is in use.
            let offered = Offered { again: SmallVec::new(), end: self.list.first() };
            return (offer_each(self.links.numbers(&self.list), numbers, take), offered);
        }
        let mut offered = Offered { again: SmallVec::new(), end: self.next };
        if self.list.len == 0 {
            return (Ok(None), offered);
        }
        while offered.again.len() < RETURNING {
            let held = |number: &u32| offered.end != Some(*number);
            let Some(number) = self.returning.filter(held).or_else(|| self.list.first().filter(held)) else { break };
            if offered.again.contains(&number) {
                break;
            }
            offered.again.push(number);
            self.returning = self.links.after(number);
            match offer_each([number].into_iter(), numbers, take) {
                Ok(None) => {}
                found => return (found, offered),
            }
        }
        while let Some(number) = self.next {
            match offer_each([number].into_iter(), numbers, take) {
                Ok(None) => self.next = self.links.after(number),
                found => return (found, offered),
            }
        }
        (Ok(None), offered)
    }

    /// Offers the held pages that this search has not offered.
    pub(super) fn offer_held(
        &self,
        offered: &Offered,
        numbers: &PageNumbers,
        take: &mut dyn FnMut(PageId) -> Take,
    ) -> Result<Option<PageId>, Stopped> {
        let held = self.links.numbers(&self.list).take_while(|number| Some(*number) != offered.end);
        offer_each(held.filter(|number| !offered.again.contains(number)), numbers, take)
    }
}

/// Offers pages in order until one is taken.
pub(super) fn offer_each(
    mut pages: impl Iterator<Item = u32>,
    numbers: &PageNumbers,
    take: &mut dyn FnMut(PageId) -> Take,
) -> Result<Option<PageId>, Stopped> {
    let ended = pages.find_map(|number| {
        step(1);
        let page = numbers.page(number);
        match take(page) {
            Take::Yes => Some(Ok(Some(page))),
            Take::Skip => None,
            Take::Stop => Some(Err(Stopped)),
        }
    });
    ended.unwrap_or(Ok(None))
}
