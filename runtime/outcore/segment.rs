//! Segments: a contiguous address range per model file and per read-write tensor, and the mapping from bytes to pages.

use std::sync::Arc;

use crate::device::DeviceAddress;
use crate::ids::{PageIndex, PageSize, SegmentId};
use crate::pager::{Backing, PageRun, PageWord, PageWords};
use crate::shared::Shared;

/// A segment as its users hold it. When the last user drops it, its pages are given up. It has cache lines of its own,
/// because every pin changes its count of users.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Segment {
    pub(crate) id: SegmentId,
    pub(crate) base: DeviceAddress,
    pub(crate) page_size: PageSize,
    pub(crate) backing: Backing,
    pub(crate) words: PageWords,
    pub(crate) shared: Arc<Shared>,
}

impl Segment {
    /// The pages that hold bytes `[offset, offset + len)`.
    pub(crate) fn run(&self, offset: u64, len: u64) -> PageRun {
        let first = self.page_size.page_of(offset);
        let count = if len == 0 { 0 } else { self.page_size.page_of(offset + len - 1) - first + 1 };
        PageRun { segment: self.id, first: PageIndex::new(first as u32), count: count as u32 }
    }

    pub(crate) fn words_of(&self, run: PageRun) -> &[PageWord] {
        &self.words[run.first.index()..run.first.index() + run.count as usize]
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        self.shared.engine.remove_segment(self.id);
    }
}
