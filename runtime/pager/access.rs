//! The order of use, carried from the lock-free hit path to the policy.
//!
//! Each thread that pins has a ring of its own, which it alone writes and the pager, under its latch, alone reads: a hit
//! is recorded with plain stores. Uses of one page that follow each other are one entry with a count. An entry that is no use
//! says whose uses follow. What is lost is the order between threads, as far as nothing else tells it; each thread's own is
//! kept, and every use is there.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

use crate::ids::{PageId, PageIndex, SegmentId, WalkerId};
use crate::sync::{Alone, Mutex};

const FIRST_USE: u64 = 1 << 63;
const WRITE: u64 = 1 << 62;
/// Segments are counted in 30 bits here.
const SEGMENT: u32 = (1 << 30) - 1;
/// In place of the segment: the entry is no use, and its lower half names the walker whose uses follow. It counts none.
const WALKER: u64 = SEGMENT as u64;

/// One use of a page. One number, which functions pass in a register: read back from memory field by field it would wait
/// for its own stores, for longer than a pin takes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Access(u64);

impl Access {
    /// A use of `page`: whether it was pinned for writing, and whether this was the first use since the page was filled
    /// ahead.
    #[inline]
    pub fn new(page: PageId, write: bool, first_use: bool) -> Self {
        let flags = if first_use { FIRST_USE } else { 0 } | if write { WRITE } else { 0 };
        Self(u64::from(page.segment.0) << 32 | u64::from(page.index.0) | flags)
    }

    /// The page.
    pub fn page(self) -> PageId {
        PageId { segment: SegmentId((self.0 >> 32) as u32 & SEGMENT), index: PageIndex(self.0 as u32) }
    }

    /// Whether it was pinned for writing.
    pub fn is_write(self) -> bool {
        self.0 & WRITE != 0
    }

    /// Whether it was the first since the page was filled ahead of use.
    #[inline]
    pub fn is_first(self) -> bool {
        self.0 & FIRST_USE != 0
    }
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Access");
        shown.field("page", &self.page()).field("write", &self.is_write()).field("first", &self.is_first()).finish()
    }
}

/// How full a ring is after a use was recorded.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recorded {
    /// There is room.
    Ok,
    /// Its back has just become a quarter full: somebody should [drain](super::Pager::record) the log soon.
    High,
    /// It was full: the use was not recorded. The caller drains the log and records it again.
    Full,
}

/// Slots of a ring's front. They stay in the cache of the thread that writes them, unless somebody has read them.
const FRONT: u32 = 64;
/// Slots that move to the back at once: of memory another core has read, many cache lines are fetched in the time of one.
const BATCH: u32 = FRONT / 2;
/// Slots of the back. So many that what an overflow costs is one use in as many.
const BACK: u32 = 1 << 16;
/// The back comes in parts, made when they are first needed: a thread whose uses are read often needs few, or none.
const PART: u32 = 1 << 10;
/// Slots in the back at which somebody is asked to read them.
const HIGH: u32 = BACK / 4;
/// Slots read before the writer may use them again.
const READ: u32 = 1 << 8;

#[derive(Debug, Default)]
struct Slot {
    access: AtomicU64,
    /// Uses so far; grows while it is the newest slot.
    count: AtomicU32,
}

impl Slot {
    fn set(&self, access: u64, count: u32) {
        self.access.store(access, Ordering::Relaxed);
        self.count.store(count, Ordering::Relaxed);
    }

    fn get(&self) -> (u64, u32) {
        (self.access.load(Ordering::Relaxed), self.count.load(Ordering::Relaxed))
    }
}

/// One thread's uses. Slots are numbered in the order in which they are begun; numbers wrap.
///
/// # Invariants
///
/// 1. `head <= flushed + FRONT`, `flushed <= newest`, `head <= newest`: the newest slot, which may grow, is in the front and
///    stays the reader's.
/// 2. A slot at or after `flushed` is in the front; one before it, and not before `head`, is in the back.
/// 3. The writer uses the place of a front slot again after it has stored a later `flushed`, and a fence. So a reader that
///    read a front slot, and after a fence finds it not before `flushed`, has read that slot.
/// 4. Places in the back are counted from `base`, which moves only while the back holds nothing that is to be read.
#[derive(Debug)]
struct Ring {
    written: Alone<Written>,
    front: [Slot; FRONT as usize],
    back: [OnceLock<Box<[Slot]>>; (BACK / PART) as usize],
    /// Slots done with, by the reader.
    head: Alone<AtomicU32>,
    /// Its bit in [`AccessLog::dirty`].
    bit: u64,
}

/// What the writer writes.
#[derive(Debug, Default)]
struct Written {
    /// Slots begun.
    tail: AtomicU32,
    flushed: AtomicU32,
    base: AtomicU32,
    /// Uses recorded in all.
    uses: AtomicU64,
}

impl Ring {
    fn new(bit: u64) -> Self {
        let front = std::array::from_fn(|_| Slot::default());
        let back = [const { OnceLock::new() }; _];
        Self { written: Alone::default(), front, back, head: Alone::default(), bit }
    }

    #[inline]
    fn front(&self, number: u32) -> &Slot {
        &self.front[(number % FRONT) as usize]
    }

    fn back(&self, number: u32, base: u32) -> &Slot {
        let at = number.wrapping_sub(base) % BACK;
        let part = self.back[(at / PART) as usize].get_or_init(|| (0..PART).map(|_| Slot::default()).collect());
        &part[(at % PART) as usize]
    }

    /// Reads a slot that was in the front, has begun, and that the reader is not done with.
    fn read_front(&self, number: u32) -> (u64, u32) {
        let slot = self.front(number).get();
        fence(Ordering::Acquire);
        if number.wrapping_sub(self.written.flushed.load(Ordering::Relaxed)) < FRONT {
            return slot;
        }
        // It has moved meanwhile.
        fence(Ordering::Acquire);
        self.back(number, self.written.base.load(Ordering::Relaxed)).get()
    }
}

/// Records the uses of one thread, or of whoever else makes one at a time.
#[derive(Debug)]
pub struct Recorder {
    ring: Arc<Ring>,
    dirty: Arc<Alone<AtomicU64>>,
    /// The newest slot.
    last: u64,
    count: u32,
    uses: u64,
    tail: u32,
    flushed: u32,
    base: u32,
    /// Whose uses these are.
    walker: WalkerId,
}

impl Recorder {
    /// Adds a use of this walker.
    #[inline(always)]
    pub fn record_of(&mut self, walker: WalkerId, access: Access) -> Recorded {
        if walker != self.walker { self.record_of_another(walker, access) } else { self.record(access) }
    }

    #[inline(never)]
    fn record_of_another(&mut self, walker: WalkerId, access: Access) -> Recorded {
        let named = if self.tail.wrapping_sub(self.flushed) == FRONT { self.flush() } else { Recorded::Ok };
        if named == Recorded::Full {
            return named;
        }
        (self.last, self.count) = (WALKER << 32 | u64::from(walker.0), 0);
        self.ring.front(self.tail).set(self.last, 0);
        self.tail = self.tail.wrapping_add(1);
        self.ring.written.tail.store(self.tail, Ordering::Release);
        self.walker = walker;
        named.max(self.record(access))
    }

    /// Adds a use, of the walker of the last one.
    #[inline]
    pub fn record(&mut self, Access(packed): Access) -> Recorded {
        let mut recorded = Recorded::Ok;
        if packed == self.last && self.count != 0 && self.count < u32::MAX {
            self.count += 1;
            self.ring.front(self.tail.wrapping_sub(1)).count.store(self.count, Ordering::Relaxed);
        } else {
            if self.tail.wrapping_sub(self.flushed) == FRONT {
                recorded = self.flush();
                if recorded == Recorded::Full {
                    return recorded;
                }
            }
            self.ring.front(self.tail).set(packed, 1);
            self.tail = self.tail.wrapping_add(1);
            (self.last, self.count) = (packed, 1);
            // Publishes the slot.
            self.ring.written.tail.store(self.tail, Ordering::Release);
        }
        self.uses += 1;
        self.ring.written.uses.store(self.uses, Ordering::Release);
        if self.dirty.load(Ordering::Relaxed) & self.ring.bit == 0 {
            self.dirty.fetch_or(self.ring.bit, Ordering::Release);
        }
        recorded
    }

    /// Makes room in the front, which is full.
    #[inline(never)]
    fn flush(&mut self) -> Recorded {
        let (ring, written) = (&self.ring, &self.ring.written);
        let head = ring.head.load(Ordering::Acquire);
        let read = head.wrapping_sub(self.flushed);
        // Before `flushed` it would be far beyond it.
        let mut recorded = Recorded::Ok;
        if read <= FRONT {
            // Nothing in the back is wanted any more.
            self.base = self.flushed;
            written.base.store(self.base, Ordering::Relaxed);
        }
        if (BATCH..=FRONT).contains(&read) {
            self.flushed = head;
        } else {
            let waiting = self.flushed.wrapping_sub(head);
            if read > FRONT && waiting > BACK - BATCH {
                return Recorded::Full;
            }
            for number in (0..BATCH).map(|n| self.flushed.wrapping_add(n)) {
                let (access, count) = ring.front(number).get();
                ring.back(number, self.base).set(access, count);
            }
            self.flushed = self.flushed.wrapping_add(BATCH);
            if (HIGH..HIGH + BATCH).contains(&self.flushed.wrapping_sub(head)) {
                recorded = Recorded::High;
            }
        }
        written.flushed.store(self.flushed, Ordering::Release);
        // Before the places in the front are written again.
        fence(Ordering::Release);
        recorded
    }
}

#[derive(Debug)]
struct Reader {
    ring: Arc<Ring>,
    /// Uses of the newest slot that were told already.
    told: u32,
    /// Uses that were told in all.
    uses: u64,
    /// Whose uses come next.
    walker: WalkerId,
}

/// What is told of the uses so far.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// Those of threads that are marked: of many threads, few. Seldom, a mark is [missing](AccessLog::mark_all).
    Marked,
    /// The same, but of so many slots of each thread.
    Some(u32),
    /// Those of every thread.
    All,
}

/// Uses not yet seen by the pager.
#[derive(Debug, Default)]
pub struct AccessLog {
    readers: Mutex<Vec<Reader>>,
    /// Rings with something new, by one of 64 bits.
    dirty: Arc<Alone<AtomicU64>>,
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
            // Looked at first: after that nobody writes any more.
            let ended = Arc::strong_count(&reader.ring) == 1;
            fence(Ordering::Acquire);
            !ended || reader.uses != reader.ring.written.uses.load(Ordering::Relaxed)
        });
        let used = readers.iter().fold(0u64, |used, reader| used | reader.ring.bit);
        // Beyond 64 threads some share a bit.
        let bit = 1u64 << (!used).trailing_zeros().min(63);
        let ring = Arc::new(Ring::new(bit));
        readers.push(Reader { ring: ring.clone(), told: 0, uses: 0, walker: WalkerId::DEFAULT });
        let dirty = self.dirty.clone();
        let walker = WalkerId::DEFAULT;
        Recorder { ring, dirty, last: 0, count: 0, uses: 0, tail: 0, flushed: 0, base: 0, walker }
    }

    /// Has the next reader look at every ring. A writer that finds its mark does not set it again, and the reader that is just
    /// taking the marks may not see what was written before. If that thread does nothing more, only this finds it.
    pub fn mark_all(&self) {
        self.dirty.store(u64::MAX, Ordering::Relaxed);
    }

    /// How many threads have a ring.
    #[doc(hidden)]
    pub fn rings(&self) -> usize {
        self.readers.lock().len()
    }

    /// How many uses the pager has not seen.
    pub fn len(&self) -> u64 {
        let readers = self.readers.lock();
        readers.iter().map(|reader| reader.ring.written.uses.load(Ordering::Relaxed).saturating_sub(reader.uses)).sum()
    }

    /// Whether the pager has seen every use.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tells the uses so far, each with whose it is and how often it was made in a row, and forgets them. Whether there are
    /// more.
    pub(super) fn drain(&self, part: Part, mut tell: impl FnMut(WalkerId, Access, u32)) -> bool {
        let all = part == Part::All;
        if !all && self.dirty.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let dirty = self.dirty.swap(0, Ordering::Acquire);
        let most = if let Part::Some(slots) = part { slots } else { u32::MAX };
        let mut left = 0;
        let mut readers = self.readers.lock();
        readers.retain_mut(|reader| {
            if !all && reader.ring.bit & dirty == 0 {
                return true;
            }
            // Nobody writes any more if this is the last owner; looked at before the ring is read to its end.
            let ended = Arc::strong_count(&reader.ring) == 1;
            fence(Ordering::Acquire);
            let done = reader.read(most, &mut tell);
            left |= if done { 0 } else { reader.ring.bit };
            !(ended && done)
        });
        if left != 0 {
            self.dirty.fetch_or(left, Ordering::Relaxed);
        }
        left != 0
    }
}

impl Reader {
    /// Tells what is new in the ring, of so many slots. Whether that was all.
    fn read(&mut self, most: u32, tell: &mut impl FnMut(WalkerId, Access, u32)) -> bool {
        let written = &self.ring.written;
        let tail = written.tail.load(Ordering::Acquire);
        // Looked at once: what the writer writes all the time is not taken from its cache for every slot.
        let flushed = written.flushed.load(Ordering::Acquire);
        let base = written.base.load(Ordering::Relaxed);
        let mut head = self.ring.head.load(Ordering::Relaxed);
        let end = head.wrapping_add(tail.wrapping_sub(head).min(most));
        while head != end {
            let in_front = head.wrapping_sub(flushed) <= FRONT;
            let (access, count) = if in_front { self.ring.read_front(head) } else { self.ring.back(head, base).get() };
            if access >> 32 == WALKER {
                self.walker = WalkerId(access as u32);
            } else if count > self.told {
                tell(self.walker, Access(access), count - self.told);
                self.uses += u64::from(count - self.told);
            }
            if head.wrapping_add(1) == tail {
                // It may still grow.
                self.told = count;
                break;
            }
            self.told = 0;
            head = head.wrapping_add(1);
            if head.is_multiple_of(READ) {
                self.ring.head.store(head, Ordering::Release);
            }
        }
        self.ring.head.store(head, Ordering::Release);
        end == tail
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
/// capture is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageUses {
    /// The uses, the first one first.
    pub uses: Vec<PageUse>,
    /// The prefix chains that were told of, in order.
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
    use crate::random::Random;

    fn access(page: u32) -> Access {
        let page = PageId { segment: SegmentId(page / 7), index: PageIndex(page) };
        Access::new(page, page.index.0.is_multiple_of(5), page.index.0.is_multiple_of(3))
    }

    /// Adds uses, and has the log read when it must be. Returns whether it had to.
    fn record(recorder: &mut Recorder, log: &AccessLog, page: u32, told: &mut Vec<u32>) -> bool {
        let full = recorder.record(access(page)) == Recorded::Full;
        if full {
            drain(log, told);
            assert_ne!(recorder.record(access(page)), Recorded::Full, "there is room again");
        }
        full
    }

    fn drain(log: &AccessLog, told: &mut Vec<u32>) {
        log.drain(Part::All, |walker, used, count| {
            let page = used.page().index.0;
            assert_eq!((walker, used), (WalkerId::DEFAULT, access(page)));
            told.extend((0..count).map(|_| page));
        });
    }

    #[test]
    fn every_use_is_told_once_in_order_however_often_the_log_is_read() {
        let mut random = Random(7);
        // How many uses, at most, come between two reads.
        for between in [1, 3, FRONT, 3 * FRONT, 5 * PART, 2 * BACK] {
            let log = AccessLog::new();
            let mut recorder = log.recorder();
            let (mut uses, mut told) = (Vec::new(), Vec::new());
            while uses.len() < 6 * between as usize + 1000 {
                for _ in 0..=random.below(between) {
                    let page = random.below(3);
                    uses.push(page);
                    record(&mut recorder, &log, page, &mut told);
                }
                drain(&log, &mut told);
                assert_eq!(told.len(), uses.len());
                assert!(log.is_empty());
            }
            assert_eq!(told, uses);
        }
    }

    /// However often the walker changes, and whenever the log is read: also when the newest entry names a walker.
    #[test]
    fn every_use_is_told_with_its_walker() {
        let mut random = Random(11);
        for between in [1, 3, FRONT, 3 * FRONT, 3 * BACK / 2] {
            let log = AccessLog::new();
            let mut recorder = log.recorder();
            let (mut uses, mut told) = (Vec::new(), Vec::new());
            let read = |told: &mut Vec<(u32, u32)>| {
                log.drain(Part::All, |walker, used, count| {
                    told.extend((0..count).map(|_| (walker.0, used.page().index.0)));
                });
            };
            let mut walker = 0;
            while uses.len() < 4 * between as usize + 1000 {
                for _ in 0..=random.below(between) {
                    if random.below(3) == 0 {
                        walker = random.below(4);
                    }
                    let used = (walker, random.below(3));
                    uses.push(used);
                    if recorder.record_of(WalkerId(used.0), access(used.1)) == Recorded::Full {
                        read(&mut told);
                        assert_ne!(recorder.record_of(WalkerId(used.0), access(used.1)), Recorded::Full);
                    }
                }
                read(&mut told);
                assert!(log.is_empty(), "an entry that names a walker is no use");
            }
            assert_eq!(told, uses);
        }
    }

    #[test]
    fn a_full_ring_says_so_and_asks_to_be_read_once_before() {
        let log = AccessLog::new();
        let mut recorder = log.recorder();
        let (mut uses, mut told, mut high) = (0, Vec::new(), 0);
        loop {
            match recorder.record(access(uses)) {
                Recorded::Ok => {}
                Recorded::High => high += 1,
                Recorded::Full => break,
            }
            uses += 1;
        }
        assert_eq!(high, 1);
        assert!((BACK..=BACK + FRONT).contains(&uses), "{uses} uses fit");
        assert_eq!(log.len(), u64::from(uses));
        drain(&log, &mut told);
        assert!(told.into_iter().eq(0..uses));
        assert_eq!(recorder.record(access(uses)), Recorded::Ok);
    }

    #[test]
    fn a_thread_whose_uses_are_read_often_needs_no_back() {
        let log = AccessLog::new();
        let mut recorder = log.recorder();
        for page in 0..10 * BACK {
            assert_eq!(recorder.record(access(page)), Recorded::Ok);
            if page.is_multiple_of(16) {
                drain(&log, &mut Vec::new());
            }
        }
        assert!(recorder.ring.back.iter().all(|part| part.get().is_none()));
    }

    #[test]
    fn uses_are_read_while_they_are_recorded() {
        const USES: u32 = 400_000;
        let log = AccessLog::new();
        let mut recorder = log.recorder();
        let mut told = std::thread::scope(|scope| {
            let reading = scope.spawn(|| {
                let mut told = Vec::new();
                while told.last() != Some(&USES) {
                    drain(&log, &mut told);
                }
                told
            });
            let mut random = Random(3);
            for page in 0..=USES {
                // Runs of one page grow while they are read.
                for _ in 0..=random.below(2) {
                    while recorder.record(access(page)) == Recorded::Full {
                        std::thread::yield_now();
                    }
                }
            }
            reading.join().unwrap()
        });
        drain(&log, &mut told);
        assert!(told.is_sorted());
        assert_eq!(told.len() as u64, recorder.uses);
        told.dedup();
        assert!(told.into_iter().eq(0..=USES));
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
                log.drain(Part::All, |_, _, count| told += count);
            }
            drop(recorder);
            assert!(log.rings() <= 3, "{} rings after {n} recorders", log.rings());
        }
        log.drain(Part::All, |_, _, count| told += count);
        assert_eq!((recorded, log.rings()), (told, 0), "what was not told when they ended was told later");
    }
}
