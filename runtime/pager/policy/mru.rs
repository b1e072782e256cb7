//! Most recently used.

use super::{Policy, Take, Want};
use crate::ids::{PageId, SegmentId};
use crate::pager::order::Order;

/// Evicts the page that was used last: on a cycle larger than memory nearly the best there is, elsewhere nearly the
/// worst.
///
/// H.-T. Chou and D. J. DeWitt, "An evaluation of buffer management strategies for relational database systems", VLDB
/// 1985. No parameters. 8 bytes a page.
#[derive(Debug)]
pub(super) struct MruPolicy {
    order: Order,
}

impl Default for MruPolicy {
    fn default() -> Self {
        Self { order: Order::new() }
    }
}

impl Policy for MruPolicy {
    fn name(&self) -> &'static str {
        "mru"
    }
    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.order.add_segment(segment, pages);
    }
    fn accessed(&mut self, page: PageId) {
        self.order.demote(page);
    }
    fn inserted(&mut self, page: PageId) {
        self.order.insert(page);
        self.order.demote(page);
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
