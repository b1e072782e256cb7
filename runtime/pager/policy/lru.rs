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
    fn resize(&mut self, _frames: u32, _host_frames: u32, _lookahead: u32) {}
    fn unit(&mut self, _pages: u32) {}
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
