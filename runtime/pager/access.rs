//! The order of use, carried from the lock-free hit path to the policy.
//!
//! Each thread that pins has a ring of its own, which it alone writes and the pager, under its latch, alone reads: a hit
//! is recorded with plain stores. Uses of one page that follow each other are one entry with a count. What is lost is the
//! order between threads, as far as nothing else tells it; each thread's own is kept, and every use is there.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::ids::{PageId, PageIndex, SegmentId};

/// One use of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The page.
    pub page: PageId,
    /// Whether it was the first since the page was filled ahead of use.
    pub first_use: bool,
    /// Whether it was pinned for writing.
    pub write: bool,
}

const FIRST_USE: u64 = 1 << 63;
const WRITE: u64 = 1 << 62;
/// Segments are counted in 30 bits here.
const SEGMENT: u32 = (1 << 30) - 1;

impl Access {
    #[inline]
    fn pack(self) -> u64 {
        let flags = if self.first_use { FIRST_USE } else { 0 } | if self.write { WRITE } else { 0 };
        u64::from(self.page.segment.0) << 32 | u64::from(self.page.index.0) | flags
    }

    fn unpack(packed: u64) -> Self {
        let page = PageId { segment: SegmentId((packed >> 32) as u32 & SEGMENT), index: PageIndex(packed as u32) };
        Self { page, first_use: packed & FIRST_USE != 0, write: packed & WRITE != 0 }
    }
}

/// How full a ring is after a use was recorded.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recorded {
    /// There is room.
    Ok,
    /// It has just become three quarters full: somebody should [drain](super::Pager::record) the log soon.
    High,
    /// It was full: the use was not recorded. The caller drains the log and records it again.
    Full,
}

/// Entries of a ring. So many that what an overflow costs is one use in as many.
const CAPACITY: u32 = 1 << 14;
/// Entries come in parts, made when they are first needed: a thread whose uses are drained often needs few.
const PART: u32 = 1 << 10;
const HIGH: u32 = CAPACITY / 4 * 3;

#[derive(Debug, Default)]
struct Slot {
    access: AtomicU64,
    /// Uses so far; grows while it is the newest slot.
    count: AtomicU32,
}

/// One thread's uses.
#[derive(Debug)]
struct Ring {
    parts: [OnceLock<Box<[Slot]>>; (CAPACITY / PART) as usize],
    /// Slots begun, by the writer; wraps.
    tail: AtomicU32,
    /// Uses recorded in all.
    uses: AtomicU64,
    /// Slots done with, by the reader; wraps.
    head: AtomicU32,
    /// Its bit in [`AccessLog::dirty`].
    bit: u64,
}

impl Ring {
    #[inline]
    fn slot(&self, number: u32) -> &Slot {
        let at = number % CAPACITY;
        let part = self.parts[(at / PART) as usize].get_or_init(|| (0..PART).map(|_| Slot::default()).collect());
        &part[(at % PART) as usize]
    }
}

/// Records the uses of one thread, or of whoever else makes one at a time.
#[derive(Debug)]
pub struct Recorder {
    ring: Arc<Ring>,
    dirty: Arc<AtomicU64>,
    last: u64,
    count: u32,
    uses: u64,
    tail: u32,
    /// The reader's head when it was last looked at.
    head: u32,
}

impl Recorder {
    /// Adds a use.
    #[inline]
    pub fn record(&mut self, access: Access) -> Recorded {
        let packed = access.pack();
        let mut recorded = Recorded::Ok;
        if packed == self.last && self.count < u32::MAX && self.tail != self.head {
            self.count += 1;
            self.ring.slot(self.tail.wrapping_sub(1)).count.store(self.count, Ordering::Release);
        } else {
            if self.tail.wrapping_sub(self.head) >= HIGH {
                recorded = self.crowded();
                if recorded == Recorded::Full {
                    return recorded;
                }
            }
            let slot = self.ring.slot(self.tail);
            slot.access.store(packed, Ordering::Relaxed);
            slot.count.store(1, Ordering::Relaxed);
            self.tail = self.tail.wrapping_add(1);
            (self.last, self.count) = (packed, 1);
            // Publishes the slot.
            self.ring.tail.store(self.tail, Ordering::Release);
        }
        self.uses += 1;
        self.ring.uses.store(self.uses, Ordering::Relaxed);
        if self.dirty.load(Ordering::Relaxed) & self.ring.bit == 0 {
            self.dirty.fetch_or(self.ring.bit, Ordering::Release);
        }
        recorded
    }

    #[cold]
    fn crowded(&mut self) -> Recorded {
        self.head = self.ring.head.load(Ordering::Acquire);
        match self.tail.wrapping_sub(self.head) {
            // The newest slot stays the reader's until there is a newer one.
            CAPACITY.. => Recorded::Full,
            HIGH => Recorded::High,
            _ => Recorded::Ok,
        }
    }
}

#[derive(Debug)]
struct Reader {
    ring: Arc<Ring>,
    /// Uses of the newest slot that were told already.
    told: u32,
    /// Uses that were told in all.
    uses: u64,
}

/// Uses not yet seen by the pager.
#[derive(Debug, Default)]
pub struct AccessLog {
    readers: Mutex<Vec<Reader>>,
    /// Rings with something new, by one of 64 bits.
    dirty: Arc<AtomicU64>,
}

impl AccessLog {
    /// An empty log.
    pub fn new() -> Self {
        Self::default()
    }

    /// A ring for one more thread. It goes when the recorder has gone and its uses have been told.
    pub fn recorder(&self) -> Recorder {
        let mut readers = self.readers.lock();
        // What a thread that has ended recorded was told, or is told with the next drain.
        readers.retain(|reader| {
            let told = reader.uses == reader.ring.uses.load(Ordering::Acquire);
            Arc::strong_count(&reader.ring) > 1 || !told
        });
        let used = readers.iter().fold(0u64, |used, reader| used | reader.ring.bit);
        // Beyond 64 threads some share a bit.
        let bit = 1u64 << (!used).trailing_zeros().min(63);
        let (tail, head) = (AtomicU32::new(0), AtomicU32::new(0));
        let uses = AtomicU64::new(0);
        let ring = Arc::new(Ring { parts: [const { OnceLock::new() }; _], tail, uses, head, bit });
        readers.push(Reader { ring: ring.clone(), told: 0, uses: 0 });
        Recorder { ring, dirty: self.dirty.clone(), last: u64::MAX, count: 0, uses: 0, tail: 0, head: 0 }
    }

    #[cfg(test)]
    pub(crate) fn rings(&self) -> usize {
        self.readers.lock().len()
    }

    /// How many uses the pager has not seen.
    pub fn len(&self) -> u64 {
        let readers = self.readers.lock();
        readers.iter().map(|reader| reader.ring.uses.load(Ordering::Relaxed).saturating_sub(reader.uses)).sum()
    }

    /// Whether the pager has seen every use.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tells every use so far, each with how often it was made in a row, and forgets it.
    pub(super) fn drain(&self, mut tell: impl FnMut(Access, u32)) {
        if self.dirty.load(Ordering::Relaxed) == 0 {
            return;
        }
        let dirty = self.dirty.swap(0, Ordering::Acquire);
        let mut readers = self.readers.lock();
        readers.retain_mut(|reader| {
            if reader.ring.bit & dirty == 0 {
                return true;
            }
            // Nobody writes any more if this is the last owner; looked at before the ring is read to its end.
            let ended = Arc::strong_count(&reader.ring) == 1;
            let tail = reader.ring.tail.load(Ordering::Acquire);
            let mut head = reader.ring.head.load(Ordering::Relaxed);
            while head != tail {
                let slot = reader.ring.slot(head);
                let count = slot.count.load(Ordering::Acquire);
                let access = Access::unpack(slot.access.load(Ordering::Relaxed));
                if count > reader.told {
                    tell(access, count - reader.told);
                    reader.uses += u64::from(count - reader.told);
                }
                if head.wrapping_add(1) == tail {
                    // It may still grow.
                    reader.told = count;
                    break;
                }
                reader.told = 0;
                head = head.wrapping_add(1);
            }
            reader.ring.head.store(head, Ordering::Release);
            !ended
        });
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn access(n: u32) -> Access {
        Access { page: PageId { segment: SegmentId(0), index: PageIndex(n) }, first_use: false, write: false }
    }

    /// One that had told everything when it ended is not looked at by a drain again.
    #[test]
    fn regression_the_rings_of_recorders_that_have_gone_go() {
        let log = AccessLog::new();
        let (mut recorded, mut told) = (0, 0);
        for n in 0..3000 {
            let mut recorder = log.recorder();
            if n % 3 > 0 {
                assert_eq!(recorder.record(access(n)), Recorded::Ok);
                recorded += 1;
            }
            if n % 3 == 1 {
                log.drain(|_, count| told += count);
            }
            drop(recorder);
            assert!(log.rings() <= 3, "{} rings after {n} recorders", log.rings());
        }
        log.drain(|_, count| told += count);
        assert_eq!((recorded, log.rings()), (told, 0), "what was not told when they ended was told later");
    }
}
