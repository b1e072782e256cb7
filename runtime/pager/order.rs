//! Pages in an order that changes: a linked list in an array by page number.

use super::links::{Links, List};
use super::numbers::PageNumbers;
use super::policy::{Take, Want, offer_each};
use crate::ids::{PageId, SegmentId};

/// Pages in the order of their last use, or of their insertion: the first one leaves first. 8 bytes for each page of
/// its segments, whether in the list or not.
#[derive(Debug)]
pub struct Order {
    numbers: PageNumbers,
    links: Links,
    list: List,
}

impl Order {
    pub(super) fn new() -> Self {
        Self { numbers: PageNumbers::default(), links: Links::default(), list: List::EMPTY }
    }

    /// Adds a segment, whose pages may be inserted from now on.
    pub(super) fn add_segment(&mut self, segment: SegmentId, pages: u32) {
        self.numbers.add(segment, pages);
        self.links.fit(self.numbers.end());
    }

    /// Removes a segment and its pages.
    pub(super) fn remove_segment(&mut self, segment: SegmentId) {
        let range = self.numbers.of_segment(segment);
        if range.len() > self.len() {
            let of_segment = |number: &u32| range.contains(&(*number as usize));
            let gone: Vec<u32> = self.present_numbers().filter(of_segment).collect();
            gone.into_iter().for_each(|number| self.remove_number(number));
        } else {
            range.for_each(|number| self.remove_number(number as u32));
        }
        self.numbers.remove(segment);
        self.links.fit(self.numbers.end());
    }

    pub(super) fn numbers(&self) -> &PageNumbers {
        &self.numbers
    }

    pub(super) fn len(&self) -> usize {
        self.list.len as usize
    }

    pub fn contains(&self, page: PageId) -> bool {
        self.numbers.number(page).is_some_and(|number| self.links.present(number))
    }

    /// Makes the page the last to leave, if it is in the list.
    pub fn touch(&mut self, page: PageId) {
        if let Some(number) = self.numbers.number(page)
            && self.links.present(number)
        {
            self.links.move_last(&mut self.list, number);
        }
    }

    /// Makes the page the last to leave. Inserts it if it is not in the list.
    pub fn insert(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        self.remove_number(number);
        self.links.push_last(&mut self.list, number);
    }

    /// Makes the page the first to leave, if it is in the list.
    pub fn demote(&mut self, page: PageId) {
        if let Some(number) = self.numbers.number(page)
            && self.links.present(number)
        {
            self.links.remove(&mut self.list, number);
            self.links.push_first(&mut self.list, number);
        }
    }

    pub(super) fn remove(&mut self, page: PageId) {
        if let Some(number) = self.numbers.number(page) {
            self.remove_number(number);
        }
    }

    fn remove_number(&mut self, number: u32) {
        if self.links.present(number) {
            self.links.remove(&mut self.list, number);
        }
    }

    /// The pages' numbers, the first to leave first.
    pub(super) fn present_numbers(&self) -> impl Iterator<Item = u32> {
        self.links.numbers(&self.list)
    }

    /// The pages, the first to leave first.
    pub(super) fn pages(&self) -> impl Iterator<Item = PageId> {
        self.present_numbers().map(|number| self.numbers.page(number))
    }

    /// Offers victims for this purpose.
    pub(super) fn offer_for(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        if want == Want::Memory { self.offer(take) } else { self.offer_all(take) }
    }

    /// Offers the pages, the first to leave first. A page that is skipped is in use, so it moves to the end. If pinned
    /// pages stayed first, every search would begin with all of them.
    fn offer_all(&mut self, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        for _ in 0..self.list.len {
            let number = self.list.first()?;
            let page = self.numbers.page(number);
            match take(page) {
                Take::Yes => return Some(page),
                Take::Skip => {
                    self.links.remove(&mut self.list, number);
                    self.links.push_last(&mut self.list, number);
                }
                Take::Stop => return None,
            }
        }
        None
    }

    /// Offers the pages in the same order, without changing it.
    pub(super) fn offer(&self, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        offer_each(self.pages(), take)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PageIndex;
    use std::collections::VecDeque;

    fn page(n: u32) -> PageId {
        PageId { segment: SegmentId(n / 8), index: PageIndex(n % 8) }
    }

    /// Compared with a queue that is searched.
    #[test]
    fn does_what_a_queue_would() {
        let mut order = Order::new();
        let mut model: VecDeque<PageId> = VecDeque::new();
        for segment in 0..3 {
            order.add_segment(SegmentId(segment), 8);
        }
        let mut x = 1u32;
        for _ in 0..20_000 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let page = page((x >> 8) % 24);
            let at = model.iter().position(|other| *other == page);
            match x >> 29 {
                0..3 => {
                    order.insert(page);
                    at.map(|at| model.remove(at));
                    model.push_back(page);
                }
                3 => {
                    order.touch(page);
                    if let Some(at) = at {
                        model.remove(at);
                        model.push_back(page);
                    }
                }
                4 => {
                    order.demote(page);
                    if let Some(at) = at {
                        model.remove(at);
                        model.push_front(page);
                    }
                }
                5 => {
                    order.remove(page);
                    at.map(|at| model.remove(at));
                }
                6 => {
                    let mut left = 2;
                    order.offer_all(&mut |_| {
                        left -= 1;
                        if left == 0 { Take::Yes } else { Take::Skip }
                    });
                    if let Some(skipped) = model.pop_front() {
                        model.push_back(skipped);
                    }
                }
                _ if x & 1 == 0 => {
                    order.remove_segment(page.segment);
                    model.retain(|other| other.segment != page.segment);
                    order.add_segment(page.segment, 8);
                }
                _ => assert_eq!(order.contains(page), at.is_some()),
            }
            assert_eq!(order.pages().collect::<VecDeque<_>>(), model);
            assert_eq!(order.len(), model.len());
        }
    }

    #[test]
    fn pages_of_unknown_segments_are_not_kept() {
        let mut order = Order::new();
        order.insert(page(3));
        order.touch(page(3));
        assert_eq!((order.len(), order.contains(page(3))), (0, false));
    }
}
