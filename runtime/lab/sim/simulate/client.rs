//! What a simulated walker is doing; `walker.rs` moves it on.

use super::Nanos;
use crate::ids::{PageId, RequestId};
use crate::pager::PageRun;

/// A walker uses each of its pages once, then rests.
#[derive(Debug)]
pub(super) struct Walker {
    pub(super) pages: Vec<PageId>,
    pub(super) writes: bool,
    pub(super) hold: Nanos,
    /// Pages that it hints at when it begins.
    pub(super) hints: Vec<PageRun>,
    /// Index of the page that it uses next; the number of pages when it rests.
    pub(super) next: usize,
    /// Whether it has asked for a page and has not unpinned it yet.
    pub(super) busy: bool,
    pub(super) request: Option<RequestId>,
    /// The page that it has pinned.
    pub(super) held: Option<PageId>,
}

impl Walker {
    pub(super) fn new(pages: Vec<PageId>, writes: bool, hold: Nanos, hints: Vec<PageRun>) -> Self {
        let next = pages.len();
        Self { pages, writes, hold, hints, next, busy: false, request: None, held: None }
    }

    pub(super) fn rests(&self) -> bool {
        !self.busy && self.next == self.pages.len()
    }
}
