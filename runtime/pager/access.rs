//! The order of use, carried from the lock-free hit path to the policy.

use crossbeam_queue::ArrayQueue;

use crate::ids::{PageId, PageIndex, SegmentId};

/// One use of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The page.
    pub page: PageId,
    /// Whether it was the first since the page was filled ahead of use.
    pub first_use: bool,
}

/// Uses not yet seen by the pager, oldest first. When it is full, whoever could not push takes the latch and lets the
/// pager record.
#[derive(Debug)]
pub struct AccessLog {
    queue: ArrayQueue<u64>,
}

const FIRST_USE: u64 = 1 << 63;

impl AccessLog {
    /// Room for this many uses: one latch every few thousand hits costs nothing, and the policy is never far behind.
    const CAPACITY: usize = 4096;

    /// An empty log.
    pub fn new() -> Self {
        Self { queue: ArrayQueue::new(Self::CAPACITY) }
    }

    /// Adds a use; `false` if there is no room.
    #[inline]
    pub fn push(&self, access: Access) -> bool {
        let flag = if access.first_use { FIRST_USE } else { 0 };
        let packed = u64::from(access.page.segment.0) << 32 | u64::from(access.page.index.0) | flag;
        self.queue.push(packed).is_ok()
    }

    /// How many uses the pager has not seen.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether the pager has seen every use.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn pop(&self) -> Option<Access> {
        let packed = self.queue.pop()?;
        let page = PageId { segment: SegmentId((packed >> 32) as u32 & 0x7FFF_FFFF), index: PageIndex(packed as u32) };
        Some(Access { page, first_use: packed & FIRST_USE != 0 })
    }
}

/// One use of a page, as a program made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageUse {
    /// The page.
    pub page: PageId,
    /// Whether it was pinned for writing.
    pub write: bool,
}

/// A prefix chain that was told of.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageChain {
    /// How many of the uses came before it.
    pub before: usize,
    /// Its pages, from the beginning.
    pub pages: Vec<PageId>,
}

/// Uses of pages in order, those of a request for several pages one by one: what a
/// [capture](crate::sim::capture) is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageUses {
    /// The uses, the first one first.
    pub uses: Vec<PageUse>,
    /// The prefix [chains](crate::Runtime::chain) that were told of, in order.
    pub chains: Vec<PageChain>,
    in_chains: usize,
    /// How many uses and chains followed that there was no room for.
    pub dropped: u64,
}

impl PageUses {
    /// Uses kept at most until they are taken: 12 MiB. As many pages of chains.
    pub const MAX: usize = 1 << 20;

    pub(super) fn push(&mut self, used: PageUse) {
        // After a gap nothing is kept, so that what is there is without one.
        if self.dropped == 0 && self.uses.len() < Self::MAX {
            self.uses.push(used);
        } else {
            self.dropped += 1;
        }
    }

    pub(super) fn push_chain(&mut self, pages: Vec<PageId>) {
        if self.dropped == 0 && self.in_chains + pages.len() <= Self::MAX {
            self.in_chains += pages.len();
            self.chains.push(PageChain { before: self.uses.len(), pages });
        } else {
            self.dropped += 1;
        }
    }
}

impl Default for AccessLog {
    fn default() -> Self {
        Self::new()
    }
}
