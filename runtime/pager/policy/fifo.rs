//! First in, first out.

use super::{Policy, Take, Want};
use crate::ids::{PageId, SegmentId};
use crate::pager::order::Order;

/// Evicts the page that came longest ago, whether it was used since or not.
///
/// L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966. No
/// parameters. 8 bytes a page.
#[derive(Debug)]
pub(super) struct FifoPolicy {
    order: Order,
}

impl Default for FifoPolicy {
    fn default() -> Self {
        Self { order: Order::new() }
    }
}

impl Policy for FifoPolicy {
    fn name(&self) -> &'static str {
        "fifo"
    }
    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.order.add_segment(segment, pages);
    }
    fn accessed(&mut self, _page: PageId) {}
    fn inserted(&mut self, page: PageId) {
        if !self.order.contains(page) {
            self.order.insert(page);
        }
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
