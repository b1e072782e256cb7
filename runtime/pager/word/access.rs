//! The order of use, carried from pins without the latch to the policy.
//!
//! Each thread that pins has its own ring. Only that thread writes it, and only the pager, under its latch, reads it.
//! So a hit is recorded with plain stores. Consecutive uses of one page are one entry with a count. An entry may
//! instead name the walker whose uses follow. No use is lost, and the order within a thread is kept. The order between
//! threads is lost unless something else tells it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

use crate::ids::{PageId, PageIndex, SegmentId, WalkerId};
use crate::sync::{Alone, Mutex};

const FIRST_USE: u64 = 1 << 63;
const WRITE: u64 = 1 << 62;
/// Segments have 30 bits here.
const SEGMENT: u32 = (1 << 30) - 1;
/// In place of a segment: the entry is no use, and its lower half names the walker whose uses follow. Its count is 0.
const WALKER: u64 = SEGMENT as u64;

/// One use of a page. It is one number, which functions pass in a register. Read back from memory field by field, it
/// would wait for its own stores, for longer than a pin takes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Access(u64);

impl Access {
    /// A use of `page`. `write`: it was pinned for writing. `first_use`: this was the first use since the page was
    /// filled ahead.
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
    /// The back has just become a quarter full: somebody should [drain](crate::Pager::record) the log soon.
    High,
    /// The ring was full, and the use was not recorded. The caller drains the log and records the use again.
    Full,
}

/// Slots of a ring's front. They stay in the cache of the writing thread unless another core has read them.
const FRONT: u32 = 64;
/// Slots that move to the back together: where another core has read the memory, many cache lines then arrive in the
/// time of one.
const BATCH: u32 = FRONT / 2;
/// Slots of the back. So many that an overflow costs little for each use.
const BACK: u32 = 1 << 16;
/// Slots of one part of the back. Parts are made when first needed: a thread whose uses are read often needs few, or
/// none.
const PART: u32 = 1 << 10;
/// Slots in the back at which the caller is asked to have them read.
const HIGH: u32 = BACK / 4;
/// Slots that are read before the writer may use them again.
const READ: u32 = 1 << 8;

#[derive(Debug, Default)]
struct Slot {
    access: AtomicU64,
    /// Uses so far. Grows while this is the newest slot.
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

/// The uses of one thread. Slots are numbered in the order in which they are begun; numbers wrap.
///
/// # Invariants
///
/// 1. `head <= flushed + FRONT`, `flushed <= newest`, `head <= newest`. So the newest slot, which may grow, is in the
///    front and has not been passed by the reader.
/// 2. A slot at or after `flushed` is in the front. A slot before it, and not before `head`, is in the back.
/// 3. The writer uses a front slot's place again only after it has stored a later `flushed`, and a fence. So if a
///    reader reads a front slot, and after a fence finds it not before `flushed`, it has read that slot.
/// 4. Places in the back are counted from `base`. It moves only while the back holds nothing that is still to be read.
#[derive(Debug)]
struct Ring {
    written: Alone<Written>,
    front: [Slot; FRONT as usize],
    back: [OnceLock<Box<[Slot]>>; (BACK / PART) as usize],
    /// The first slot that the reader is not done with.
    head: Alone<AtomicU32>,
    /// Its bit in [`AccessLog::dirty`].
    bit: u64,
}

/// What only the writer writes.
#[derive(Debug, Default)]
struct Written {
    /// How many slots were begun.
    tail: AtomicU32,
    flushed: AtomicU32,
    base: AtomicU32,
    /// How many uses were recorded in all.
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

    /// Reads a slot that has begun, was in the front, and that the reader is not done with.
    fn read_front(&self, number: u32) -> (u64, u32) {
        let slot = self.front(number).get();
        fence(Ordering::Acquire);
        if number.wrapping_sub(self.written.flushed.load(Ordering::Relaxed)) < FRONT {
            return slot;
        }
        // The slot has moved to the back meanwhile.
        fence(Ordering::Acquire);
        self.back(number, self.written.base.load(Ordering::Relaxed)).get()
    }
}

/// Records the uses of one thread, or of several that take turns.
#[derive(Debug)]
pub struct Recorder {
    ring: Arc<Ring>,
    dirty: Arc<Alone<AtomicU64>>,
    /// The entry in the newest slot.
    last: u64,
    count: u32,
    uses: u64,
    tail: u32,
    flushed: u32,
    base: u32,
    /// The walker whose uses these are.
    walker: WalkerId,
}

impl Recorder {
    /// Records a use of this walker.
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

    /// Records a use, of the same walker as the last one.
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

    /// Makes room in the full front.
    #[inline(never)]
    fn flush(&mut self) -> Recorded {
        let (ring, written) = (&self.ring, &self.ring.written);
        let head = ring.head.load(Ordering::Acquire);
        let read = head.wrapping_sub(self.flushed);
        // If `head` is before `flushed`, `read` wraps to a large number.
        let mut recorded = Recorded::Ok;
        if read <= FRONT {
            // Nothing in the back is still to be read.
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
        // Comes before the places in the front are written again.
        fence(Ordering::Release);
        recorded
    }
}

#[derive(Debug)]
struct Reader {
    ring: Arc<Ring>,
    /// How many uses of the newest slot were told already.
    told: u32,
    /// How many uses were told in all.
    uses: u64,
    /// The walker whose uses come next.
    walker: WalkerId,
}

/// Which of the recorded uses are told.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// Those of marked threads: few, of many threads. Rarely, a mark is [missing](AccessLog::mark_all).
    Marked,
    /// Those of marked threads, but at most this many slots of each.
    Some(u32),
    /// Those of every thread.
    All,
}

/// The recorded uses that the pager has not seen.
#[derive(Debug, Default)]
pub struct AccessLog {
    readers: Mutex<Vec<Reader>>,
    /// One of 64 bits for each ring that has something new.
    dirty: Arc<Alone<AtomicU64>>,
}

impl AccessLog {
    /// An empty log.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes a ring for one more thread. The ring goes once the recorder has gone and its uses have been told.
    pub fn recorder(&self) -> Recorder {
        let mut readers = self.readers.lock();
        // Drops rings of ended threads whose uses were all told. The others go with the next drain.
        readers.retain(|reader| {
            // Checked first: once this is so, nobody writes any more.
            let ended = Arc::strong_count(&reader.ring) == 1;
            fence(Ordering::Acquire);
            !ended || reader.uses != reader.ring.written.uses.load(Ordering::Relaxed)
        });
        let used = readers.iter().fold(0u64, |used, reader| used | reader.ring.bit);
        // Beyond 64 threads, some share a bit.
        let bit = 1u64 << (!used).trailing_zeros().min(63);
        let ring = Arc::new(Ring::new(bit));
        readers.push(Reader { ring: ring.clone(), told: 0, uses: 0, walker: WalkerId::DEFAULT });
        let dirty = self.dirty.clone();
        let walker = WalkerId::DEFAULT;
        Recorder { ring, dirty, last: 0, count: 0, uses: 0, tail: 0, flushed: 0, base: 0, walker }
    }

    /// Makes the next reader look at every ring. A writer that finds its mark set does not set it again, and a reader
    /// that is just taking the marks may not see what was written before. If that thread then does nothing more, only
    /// this finds its uses.
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

    /// Tells the recorded uses, each with its walker and how often it was made in a row, and forgets them. Returns
    /// whether there are more.
    pub(crate) fn drain(&self, part: Part, mut tell: impl FnMut(WalkerId, Access, u32)) -> bool {
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
            // Checked before the ring is read to its end: nobody writes any more if this is the last owner.
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
    /// Tells what is new in the ring, from at most `most` slots. Returns whether that was all.
    fn read(&mut self, most: u32, tell: &mut impl FnMut(WalkerId, Access, u32)) -> bool {
        let written = &self.ring.written;
        let tail = written.tail.load(Ordering::Acquire);
        // Read once: the writer writes these all the time, so reading them for every slot would take them from its
        // cache.
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
                // This slot may still grow.
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

/// A prefix chain that a program has declared.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageChain {
    /// How many of the uses came before the chain.
    pub before: usize,
    /// Its pages, from the beginning.
    pub pages: Vec<PageId>,
}

/// Uses of pages in order, from which a capture is made. A request for several pages gives one use for each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageUses {
    /// The uses, the first one first.
    pub uses: Vec<PageUse>,
    /// The prefix chains, in order.
    pub chains: Vec<PageChain>,
    in_chains: usize,
    /// How many later uses and chains were dropped for want of room.
    pub dropped: u64,
}

impl PageUses {
    /// The most uses that are kept until they are taken: 12 MiB. The same limit holds for the pages of chains.
    pub const MAX: usize = 1 << 20;

    pub(crate) fn push(&mut self, used: PageUse) {
        // After a gap nothing is kept, so that what is kept has no gap.
        if self.dropped == 0 && self.uses.len() < Self::MAX {
            self.uses.push(used);
        } else {
            self.dropped += 1;
        }
    }

    pub(crate) fn push_chain(&mut self, pages: Vec<PageId>) {
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

    /// Records a use, and drains the log if it is full. Returns whether it was.
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

    /// However often the walker changes, and whenever the log is read, also when the newest entry names a walker.
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

    /// A ring that had told everything when its recorder ended is not looked at by a drain again.
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
