//! Least recently used.

use super::{Policy, Take, Want};
use crate::ids::{PageId, SegmentId};
use crate::pager::order::Order;

/// Evicts the page whose last use is longest ago. Fills nothing ahead by itself.
#[derive(Debug)]
pub struct LruPolicy {
    order: Order,
}

impl LruPolicy {
    /// With no pages.
    pub fn new() -> Self {
        Self { order: Order::new() }
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
    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.order.add_segment(segment, pages);
    }
    fn accessed(&mut self, page: PageId) {
        self.order.touch(page);
    }
    fn inserted(&mut self, page: PageId) {
        self.order.insert(page);
    }
    fn removed(&mut self, page: PageId) {
        self.order.remove(page);
    }
    fn forget(&mut self, segment: SegmentId) {
        self.order.remove_segment(segment);
    }
    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        self.order.offer_for(want, take)
    }
    fn tracked(&self) -> Vec<PageId> {
        self.order.pages().collect()
    }
}
