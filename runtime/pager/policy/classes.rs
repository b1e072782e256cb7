//! Shared by policies that rank pages by class: a queue for each class, and searches through them.

use super::Take;
use crate::ids::PageId;
use crate::links::{Links, List};
use crate::numbers::PageNumbers;

/// `N` queues, at most 64, of resident pages. The owner knows which class a page is in. 8 bytes for each page that
/// exists.
#[derive(Debug)]
pub struct Classes<const N: usize> {
    links: Links,
    /// By class; in each list, the page that has been there for longest is first.
    lists: [List; N],
    /// A bit for each list that is not empty.
    used: u64,
    held: List,
}

impl<const N: usize> Default for Classes<N> {
    fn default() -> Self {
        const { assert!(N <= u64::BITS as usize) };
        Self { links: Links::default(), lists: [List::EMPTY; N], used: 0, held: List::EMPTY }
    }
}

impl<const N: usize> Classes<N> {
    /// Sets the end of page numbers. Pages beyond it were removed before.
    pub fn fit(&mut self, len: usize) {
        self.links.fit(len);
    }

    pub fn contains(&self, number: u32) -> bool {
        self.links.present(number)
    }

    /// Takes a page out of the class it is in.
    pub fn remove(&mut self, number: u32, class: usize) {
        self.links.remove(&mut self.lists[class], number);
        if self.lists[class].len == 0 {
            self.used &= !(1 << class);
        }
    }

    /// Puts a page that is in no class behind the others of this one.
    pub fn push_last(&mut self, number: u32, class: usize) {
        self.links.push_last(&mut self.lists[class], number);
        self.used |= 1 << class;
    }

    /// Moves the pages of each class from 1 on behind those of class `into(class)`, which is a lower one.
    pub fn move_down(&mut self, into: impl Fn(usize) -> usize) {
        for class in 1..N {
            let mut list = std::mem::replace(&mut self.lists[class], List::EMPTY);
            self.links.append(&mut self.lists[into(class)], &mut list);
        }
        self.used = (0..N).filter(|class| self.lists[*class].len > 0).fold(0, |bits, class| bits | 1 << class);
    }

    /// For each class that is not empty, lowest first: its number and its first page.
    pub fn firsts(&self) -> impl Iterator<Item = (usize, u32)> {
        let mut left = self.used;
        std::iter::from_fn(move || {
            let class = (left != 0).then(|| left.trailing_zeros() as usize)?;
            left &= left - 1;
            self.lists[class].first().map(|number| (class, number))
        })
    }

    /// The pages, by class, then in order.
    pub fn pages(&self, numbers: &PageNumbers) -> impl Iterator<Item = PageId> {
        self.lists.iter().flat_map(|list| self.links.numbers(list)).map(|number| numbers.page(number))
    }

    /// Offers the page that `next` names until one is taken. A page that is not taken is in use. It is held aside until
    /// the search ends, so that it is offered once, and then goes to the end of its class.
    pub fn offer(
        &mut self,
        numbers: &PageNumbers,
        class_of: impl Fn(u32) -> usize,
        next: impl Fn(&Self) -> Option<u32>,
        take: &mut dyn FnMut(PageId) -> Take,
    ) -> Option<PageId> {
        let mut taken = None;
        while let Some(number) = next(self) {
            let page = numbers.page(number);
            match take(page) {
                Take::Yes => {
                    taken = Some(page);
                    break;
                }
                Take::Skip => {
                    self.remove(number, class_of(number));
                    self.links.push_last(&mut self.held, number);
                }
                Take::Stop => break,
            }
        }
        while let Some(number) = self.held.first() {
            self.links.remove(&mut self.held, number);
            self.push_last(number, class_of(number));
        }
        taken
    }
}
