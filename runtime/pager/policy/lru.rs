//! Least recently used.

use lru::LruCache;

use super::{PageHashing, Policy, Take, Want};
use crate::ids::{PageId, SegmentId};

/// Resident pages in order of use.
#[derive(Debug)]
pub(super) struct LruOrder(LruCache<PageId, (), PageHashing>);

impl LruOrder {
    pub(super) fn new() -> Self {
        Self(LruCache::unbounded_with_hasher(PageHashing::default()))
    }
    pub(super) fn touch(&mut self, page: PageId) {
        self.0.promote(&page);
    }
    pub(super) fn insert(&mut self, page: PageId) {
        self.0.get_or_insert(page, || ());
    }
    pub(super) fn remove(&mut self, page: PageId) -> bool {
        self.0.pop(&page).is_some()
    }
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
    /// The pages, least recently used first.
    pub(super) fn pages(&self) -> impl Iterator<Item = PageId> {
        self.0.iter().rev().map(|(page, ())| *page)
    }
    /// Offers the pages, least recently used first. One that is skipped is in use, so it counts as used now: were pinned
    /// pages to stay first in line, every search would begin with all of them.
    pub(super) fn offer_all(&mut self, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        for _ in 0..self.0.len() {
            let page = *self.0.peek_lru()?.0;
            match take(page) {
                Take::Yes => return Some(page),
                Take::Skip => self.0.promote(&page),
                Take::Stop => return None,
            };
        }
        None
    }
    /// Offers the pages in the same order, without changing it.
    pub(super) fn offer(&mut self, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        for (page, ()) in self.0.iter().rev() {
            match take(*page) {
                Take::Yes => return Some(*page),
                Take::Skip => {}
                Take::Stop => return None,
            }
        }
        None
    }
}

/// Evicts the page whose last use is longest ago. Fills nothing ahead by itself.
#[derive(Debug)]
pub struct LruPolicy {
    order: LruOrder,
}

impl LruPolicy {
    /// With no pages.
    pub fn new() -> Self {
        Self { order: LruOrder::new() }
    }
}

impl Default for LruPolicy {
    fn default() -> Self {
        Self::new()
    }
}

impl Policy for LruPolicy {
    fn name(&self) -> &'static str {
        "lru"
    }
    fn resize(&mut self, _frames: u32, _host_frames: u32, _lookahead: u32) {}
    fn unit(&mut self, _pages: u32) {}
    fn accessed(&mut self, page: PageId) {
        self.order.touch(page);
    }
    fn inserted(&mut self, page: PageId) {
        self.order.insert(page);
    }
    fn removed(&mut self, page: PageId) {
        self.order.remove(page);
    }
    fn forget(&mut self, _segment: SegmentId) {}
    fn victim(&mut self, _want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        self.order.offer_all(take)
    }
    fn declare(&mut self, _order: &[PageId], _cyclic: bool) {}
    fn has_plan(&self) -> bool {
        false
    }
    fn next_fill(&mut self, _present: &dyn Fn(PageId) -> bool) -> Option<PageId> {
        None
    }
    fn filling(&mut self, _page: PageId) {}
    fn worth_host(&self, _page: PageId) -> bool {
        true
    }
    fn tracked(&self) -> Vec<PageId> {
        self.order.pages().collect()
    }
    fn host_victim(&self, _candidate: PageId, _incoming: PageId) -> bool {
        true
    }
}
