//! Policies that keep their pages in one line and evict the first. They differ only in where a page goes when it is
//! used or comes.

use std::fmt;
use std::marker::PhantomData;

use super::{Policy, Take, Want};
use crate::ids::{PageId, SegmentId};
use crate::order::Order;

/// Where pages stand in the line.
pub trait LineRule: fmt::Debug + Send {
    /// The policy's name.
    const NAME: &'static str;
    /// A page is used; it may be resident or not.
    fn used(order: &mut Order, page: PageId);
    /// A page is resident; it may have been before.
    fn came(order: &mut Order, page: PageId);
}

/// A policy that follows a rule. 8 bytes a page.
#[derive(Debug)]
pub struct Line<R> {
    order: Order,
    rule: PhantomData<R>,
}

impl<R> Line<R> {
    /// With no pages.
    pub fn new() -> Self {
        Self { order: Order::new(), rule: PhantomData }
    }
}

impl<R> Default for Line<R> {
    fn default() -> Self {
        Self::new()
    }
}

impl<R: LineRule> Policy for Line<R> {
    fn name(&self) -> &'static str {
        R::NAME
    }
    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.order.add_segment(segment, pages);
    }
    fn accessed(&mut self, page: PageId) {
        R::used(&mut self.order, page);
    }
    fn inserted(&mut self, page: PageId) {
        R::came(&mut self.order, page);
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
