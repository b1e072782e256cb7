//! The resident pages that no followed plan names, while a plan is followed: the least recently used goes first, or the
//! one with the least [score](super::scores).
//!
//! A search costs as many steps as it skips pages. So a page that was skipped, most likely because it is pinned, is
//! *held*: each later search offers a few held pages, in turn. A search for a request that waits offers all of them
//! before it gives up.

use std::collections::BTreeSet;
use std::ops::Range;

use smallvec::SmallVec;

use super::active::{RETURNING, Stopped, offer_each};
use super::scores::Scores;
use super::{Take, Want};
use crate::ids::PageId;
use crate::links::{Links, List};
use crate::numbers::PageNumbers;
use crate::steps::step;

/// Pages in the order in which they go.
#[derive(Debug)]
enum Line {
    /// By use: 8 bytes for each page that exists, from the first page on.
    Recency { links: Links, list: List },
    /// By score. The place of each page plus one, 0 for a page that is not in the line; and all of them in order.
    Worth { scores: Box<Scores>, places: Vec<u32>, line: BTreeSet<(u32, u32)> },
}

impl Line {
    fn len(&self) -> usize {
        match self {
            Self::Recency { list, .. } => list.len as usize,
            Self::Worth { line, .. } => line.len(),
        }
    }

    fn fit(&mut self, end: usize) {
        match self {
            Self::Recency { links, .. } => links.fit(end),
            Self::Worth { places, .. } => places.resize(end, 0),
        }
    }

    fn contains(&self, number: u32) -> bool {
        match self {
            Self::Recency { links, list } => list.len > 0 && links.present(number),
            Self::Worth { places, .. } => places.get(number as usize).is_some_and(|place| *place > 0),
        }
    }

    fn first(&self) -> Option<u32> {
        match self {
            Self::Recency { list, .. } => list.first(),
            Self::Worth { line, .. } => line.first().map(|(_, number)| *number),
        }
    }

    fn after(&self, number: u32) -> Option<u32> {
        match self {
            Self::Recency { links, .. } => links.after(number),
            Self::Worth { places, line, .. } => {
                let place = places.get(number as usize)?.checked_sub(1)?;
                line.range((place, number + 1)..).next().map(|(_, number)| *number)
            }
        }
    }

    fn remove(&mut self, number: u32) {
        match self {
            Self::Recency { links, list } => links.remove(list, number),
            Self::Worth { places, line, .. } => {
                if let Some(place) = places.get_mut(number as usize).and_then(|at| std::mem::take(at).checked_sub(1)) {
                    line.remove(&(place, number));
                }
            }
        }
    }

    /// Adds a page that is not in the line. By score, its place is `least` at the least.
    fn append(&mut self, number: u32, least: u32) {
        match self {
            Self::Recency { links, list } => links.push_last(list, number),
            Self::Worth { scores, places, line } => {
                let place = scores.place(number).max(least).min(u32::MAX - 1);
                if let Some(at) = places.get_mut(number as usize) {
                    *at = place + 1;
                    line.insert((place, number));
                }
            }
        }
    }

    /// By score, the least place behind the pages that come before `next`, or behind all.
    fn least_behind(&self, next: Option<u32>) -> u32 {
        let Self::Worth { places, line, .. } = self else { return 0 };
        let before = match next {
            Some(next) => places
                .get(next as usize)
                .and_then(|at| at.checked_sub(1))
                .and_then(|at| line.range(..(at, next)).next_back()),
            None => line.last(),
        };
        before.map_or(0, |(place, _)| place.saturating_add(1))
    }

    fn numbers(&self) -> impl Iterator<Item = u32> {
        let (recent, worth) = match self {
            Self::Recency { links, list } => (Some(links.numbers(list)), None),
            Self::Worth { line, .. } => (None, Some(line.iter().map(|(_, number)| *number))),
        };
        recent.into_iter().flatten().chain(worth.into_iter().flatten())
    }
}

/// See above.
#[derive(Debug)]
pub(super) struct Outside {
    /// The held pages, which are those before `next`, then the others.
    line: Line,
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
    /// By recency of use.
    pub(super) fn new() -> Self {
        let line = Line::Recency { links: Links::default(), list: List::EMPTY };
        Self { line, next: None, returning: None }
    }

    /// By score.
    pub(super) fn by_worth() -> Self {
        let line = Line::Worth { scores: Box::new(Scores::new()), places: Vec::new(), line: BTreeSet::new() };
        Self { line, next: None, returning: None }
    }

    pub(super) fn is_by_worth(&self) -> bool {
        matches!(self.line, Line::Worth { .. })
    }

    pub(super) fn len(&self) -> usize {
        self.line.len()
    }

    pub(super) fn contains(&self, number: u32) -> bool {
        self.line.contains(number)
    }

    pub(super) fn numbers(&self) -> impl Iterator<Item = u32> {
        self.line.numbers()
    }

    /// Numbers are below `end` from now on.
    pub(super) fn fit(&mut self, end: usize) {
        if self.line.len() > 0 {
            self.line.fit(end);
        }
    }

    /// These numbers are those of other pages from now on, or of none.
    pub(super) fn forget(&mut self, numbers: Range<usize>) {
        if numbers.len() > self.line.len() {
            let gone: Vec<u32> = self.line.numbers().filter(|number| numbers.contains(&(*number as usize))).collect();
            gone.into_iter().for_each(|number| self.remove(number));
        } else {
            numbers.clone().for_each(|number| self.remove(number as u32));
        }
        if let Line::Worth { scores, .. } = &mut self.line {
            scores.forget(numbers);
        }
    }

    /// A page that no plan names is used; it need not be resident. There is room for so many of these pages. Only where
    /// pages have scores.
    pub(super) fn count(&mut self, number: u32, room: usize) {
        let Line::Worth { scores, line, .. } = &mut self.line else { return };
        scores.fit(room);
        if scores.used(number) {
            let all: Vec<u32> = line.iter().map(|(_, number)| *number).collect();
            step(all.len());
            all.iter().for_each(|number| self.line.remove(*number));
            (self.next, self.returning) = (None, None);
            all.iter().for_each(|number| self.line.append(*number, 0));
            self.next = self.line.first();
        }
    }

    /// Adds a page, as the one used last; it may be in the list already. Numbers are below `end`.
    pub(super) fn insert(&mut self, number: u32, end: usize) {
        self.remove(number);
        if self.line.len() == 0 {
            self.line.fit(end);
        }
        self.append(number);
    }

    /// Adds a page that is not in the list.
    fn append(&mut self, number: u32) {
        // A held page is offered in its turn only. So a page that is not held has its place behind them.
        self.line.append(number, self.line.least_behind(self.next));
        if self.next.is_none_or(|next| self.line.after(number) == Some(next)) {
            // The page that was next is not held: it is no more the one to return to.
            self.returning = self.returning.filter(|returning| self.next != Some(*returning));
            self.next = Some(number);
        }
    }

    pub(super) fn remove(&mut self, number: u32) {
        if !self.contains(number) {
            return;
        }
        let after = self.line.after(number);
        for place in [&mut self.next, &mut self.returning] {
            if *place == Some(number) {
                *place = after;
            }
        }
        self.line.remove(number);
    }

    /// If the page is in the list, it is now the one used last.
    pub(super) fn touch(&mut self, number: u32) {
        if self.contains(number) {
            self.remove(number);
            self.append(number);
        }
    }

    pub(super) fn clear(&mut self) {
        while let Some(number) = self.line.first() {
            self.line.remove(number);
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
            let offered = Offered { again: SmallVec::new(), end: self.line.first() };
            return (offer_each(self.line.numbers(), numbers, take), offered);
        }
        let mut offered = Offered { again: SmallVec::new(), end: self.next };
        if self.line.len() == 0 {
            return (Ok(None), offered);
        }
        while offered.again.len() < RETURNING {
            let held = |number: &u32| offered.end != Some(*number);
            let Some(number) = self.returning.filter(held).or_else(|| self.line.first().filter(held)) else { break };
            if offered.again.contains(&number) {
                break;
            }
            offered.again.push(number);
            self.returning = self.line.after(number);
            match offer_each([number].into_iter(), numbers, take) {
                Ok(None) => {}
                found => return (found, offered),
            }
        }
        while let Some(number) = self.next {
            match offer_each([number].into_iter(), numbers, take) {
                Ok(None) => self.next = self.line.after(number),
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
        let held = self.line.numbers().take_while(|number| Some(*number) != offered.end);
        offer_each(held.filter(|number| !offered.again.contains(number)), numbers, take)
    }
}
