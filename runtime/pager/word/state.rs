//! The page word: all that may change about one page without the latch, in one atomic.
//!
//! # Layout
//!
//! | bits | field | meaning |
//! |---|---|---|
//! | 0..3 | state | [`State`] |
//! | 3 | held | the frame is being copied down, or write backs have failed: a writer asks under the latch |
//! | 4 | exclusive | the one pin is a writer's |
//! | 5 | wanted | somebody under the latch was stopped by a pin: the next unpin must tell the pager |
//! | 6 | fresh | filled ahead of use, and not used yet |
//! | 7 | closed | a request waits, or the frame is promised: pins ask under the latch, every unpin tells the pager |
//! | 8..32 | pins | how many guards forbid eviction |
//! | 32..64 | generation | how often the page has left this tier |
//!
//! # Access protocol
//!
//! 1. Every change is one read-modify-write. After construction there are no plain stores.
//! 2. Anyone may call [`PageWord::try_pin`], [`PageWord::try_write`], [`PageWord::undo_write`], [`PageWord::unpin`] and
//!    [`PageWord::unlock`], without the latch.
//! 3. Every other edge is taken only under the pager's latch. So two threads never race for the same edge; only a
//!    latched edge races with pins.
//! 4. The edge that makes a page resident publishes its bytes (release), and the pin sees them (acquire). A guard's
//!    last access comes before its unpin (release) and the evictor's edge (acquire). A pin that was *lent* publishes
//!    nothing: its bytes are there only for the stream that waits for the fill.
//! 5. `wanted` is set by the very read-modify-write that found the pin, and read by the very one that removes it. So no
//!    wake-up is lost, whatever the order.
//! 6. A writer outdates copies in lower tiers. The pager learns that from the state when the page leaves. So a writer
//!    needs the latch only if `held` is set.
//!
//! # Edges
//!
//! | from | edge | to |
//! |---|---|---|
//! | Empty | `begin_fill` | Filling |
//! | Filling | `lend` | same, pins + 1 |
//! | Filling | `fill_ok(pins, dirty)` | Clean or Dirty, pins + the waiters, fresh if there are none |
//! | Filling | `fill_ok_lent(pins, dirty)` | the same, never fresh |
//! | Filling, pins = 0 | `fill_ok_locked(dirty)` | Clean or Dirty, exclusive, pins = 1 |
//! | Filling, pins = 0 | `fill_err` | Empty |
//! | Clean, Dirty, WritingBack, not exclusive, not closed | `try_pin` | same, pins + 1, no longer fresh |
//! | Clean, Dirty, WritingBack, not exclusive | `try_pin_latched` | same, pins + 1, no longer fresh |
//! | Clean, Dirty, pins = 0, not closed, not held | `try_write` | Dirty, exclusive, pins = 1 |
//! | Dirty, exclusive | `undo_write(clean)` | Clean or Dirty, as before, pins = 0 |
//! | any | `close` / `reopen` | same, closed / not closed |
//! | any | `hold` / `release` | same, held / not held |
//! | Filling, Clean, Dirty, WritingBack | `unpin` | same, pins - 1 |
//! | Clean or Dirty, pins = 0 | `lock` | same, exclusive, pins = 1 |
//! | Clean or Dirty, exclusive | `begin_write` | Dirty, exclusive |
//! | Clean or Dirty, exclusive | `unlock` | same, pins - 1 |
//! | Dirty, not exclusive | `begin_write_back` | WritingBack |
//! | Dirty, pins = 0 | `begin_last_write_back` | WritingBack, closed |
//! | WritingBack | `write_back_ok` / `write_back_err` | Clean / Dirty |
//! | Clean, pins = 0 | `begin_evict` | Evicting |
//! | Evicting | `rescue` | Clean, pins = 1 |
//! | Evicting | `evicted` | Empty, generation + 1 |
//! | Dirty, pins = 0 | `begin_discard` | Evicting |
//! | Dirty, pins = 0 | `poison` | Poisoned |
//! | Poisoned, pins = 0 | `revive` | Empty, generation + 1 |
//! | any | `condemn` | Poisoned |

use std::sync::Arc;

use crate::sync::{AtomicU64, Ordering};

/// Where a page stands in the device tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum State {
    /// No valid frame.
    Empty = 0,
    /// A fill is in flight or waits for its frame.
    Filling = 1,
    /// Resident. It may leave without a write: a lower tier has its bytes, or they are zeros or discarded.
    Clean = 2,
    /// Resident. No other copy is valid.
    Dirty = 3,
    /// Resident. Its bytes are being copied down.
    WritingBack = 4,
    /// Chosen as a victim. Its bytes are still valid until it has left.
    Evicting = 5,
    /// The only valid bytes were lost.
    Poisoned = 6,
}

const STATE: u64 = 0x7;
const HELD: u64 = 1 << 3;
const EXCLUSIVE: u64 = 1 << 4;
const WANTED: u64 = 1 << 5;
const FRESH: u64 = 1 << 6;
const CLOSED: u64 = 1 << 7;
const PIN: u64 = 1 << 8;
const PINS: u64 = 0xFF_FFFF << 8;
const GENERATION: u64 = 1 << 32;
/// One less than the field can hold, so that a count never carries into the generation.
const PINS_MAX: u64 = 0xFF_FFFE;

fn state_of(word: u64) -> State {
    match word & STATE {
        0 => State::Empty,
        1 => State::Filling,
        2 => State::Clean,
        3 => State::Dirty,
        4 => State::WritingBack,
        5 => State::Evicting,
        _ => State::Poisoned,
    }
}

fn pins_of(word: u64) -> u64 {
    (word & PINS) >> 8
}

fn resident(state: State) -> bool {
    matches!(state, State::Clean | State::Dirty | State::WritingBack)
}

fn with_state(word: u64, state: State) -> u64 {
    (word & !STATE) | state as u64
}

/// One reading of a page word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Snapshot {
    /// The state.
    pub state: State,
    /// How many guards forbid eviction.
    pub pins: u32,
    /// Whether the one pin is a writer's.
    pub exclusive: bool,
    /// Whether somebody waits for a pin to end.
    pub wanted: bool,
    /// Whether pins ask under the latch: a request waits for this page, or its frame is promised.
    pub closed: bool,
    /// Whether a writer has to ask under the latch.
    pub held: bool,
    /// Whether the page was filled ahead of use and not used yet.
    pub fresh: bool,
    /// How often the page has left the tier.
    pub generation: u32,
}

impl Snapshot {
    /// Whether the page has a valid frame.
    pub fn is_resident(&self) -> bool {
        resident(self.state)
    }
}

/// The result of [`PageWord::try_pin`].
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TryPin {
    /// Pinned.
    Hit,
    /// Pinned, and this is the first use since the page was filled ahead: the caller must tell the pager to look ahead.
    FirstUse,
    /// Not pinned: the page is not resident, is being evicted, is held by a writer, or an older request waits for it.
    Busy,
}

/// What the end of a pin asks of the caller.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unpin {
    /// Nothing: nobody waits for this.
    Done,
    /// To tell the pager: somebody waits for pins of this page to end.
    Wanted,
}

/// The result of [`PageWord::try_write`].
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TryWrite {
    /// Pinned for writing, and dirty.
    Won {
        /// Whether the page was clean, for [`PageWord::undo_write`].
        clean: bool,
        /// See [`TryPin::FirstUse`].
        first_use: bool,
    },
    /// Not pinned: the page is not resident, is pinned, in motion, or waited for.
    Busy,
}

/// The result of [`PageWord::begin_evict`].
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BeginEvict {
    /// The caller is the evictor.
    Won,
    /// A guard forbids it. The end of the guard will be told.
    Pinned,
    /// The bytes must be written back first.
    Dirty,
    /// Not resident, or already in motion.
    Busy,
}

/// The result of an edge that needs the page free of guards.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// The edge was taken.
    Won,
    /// A guard or a move forbids it. The end of a guard will be told.
    Blocked,
}

/// An edge was tried from a state that does not have it: a bug in the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("page edge {edge} is not legal from {from:?}")]
pub struct Illegal {
    edge: &'static str,
    from: Snapshot,
}

/// The page word. See the [module documentation](self) for its protocol.
#[derive(Debug)]
pub struct PageWord(AtomicU64);

impl Default for PageWord {
    fn default() -> Self {
        Self(AtomicU64::new(State::Empty as u64))
    }
}

/// The words of a segment's pages.
#[derive(Clone, Debug)]
pub struct PageWords {
    /// One cache line more than there are pages, so that pins of two segments never share one.
    words: Arc<[PageWord]>,
    pages: usize,
}

impl PageWords {
    pub(crate) fn new(pages: usize) -> Self {
        const LINE: usize = 64 / size_of::<PageWord>();
        Self { words: (0..pages + LINE).map(|_| PageWord::default()).collect(), pages }
    }
}

impl std::ops::Deref for PageWords {
    type Target = [PageWord];
    #[inline]
    fn deref(&self) -> &[PageWord] {
        &self.words[..self.pages]
    }
}

impl PageWord {
    fn snapshot_of(word: u64) -> Snapshot {
        Snapshot {
            state: state_of(word),
            pins: pins_of(word) as u32,
            exclusive: word & EXCLUSIVE != 0,
            wanted: word & WANTED != 0,
            closed: word & CLOSED != 0,
            held: word & HELD != 0,
            fresh: word & FRESH != 0,
            generation: (word >> 32) as u32,
        }
    }

    /// Reads the word. The result may be out of date at once, except for what only the latch may change.
    pub fn load(&self) -> Snapshot {
        Self::snapshot_of(self.0.load(Ordering::Acquire))
    }

    /// Applies `change` until its result is stored, or until it declines. Returns the outcome for the word it was
    /// applied to.
    fn update<T>(&self, mut change: impl FnMut(u64) -> (Option<u64>, T)) -> T {
        let mut word = self.0.load(Ordering::Acquire);
        loop {
            let (next, outcome) = change(word);
            let Some(next) = next else { return outcome };
            match self.0.compare_exchange_weak(word, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return outcome,
                Err(now) => word = now,
            }
        }
    }

    fn edge(&self, edge: &'static str, mut change: impl FnMut(u64) -> Option<u64>) -> Result<(), Illegal> {
        self.update(|word| match change(word) {
            Some(next) => (Some(next), Ok(())),
            None => (None, Err(Illegal { edge, from: Self::snapshot_of(word) })),
        })
    }

    /// Pins a resident page. Takes no lock.
    #[inline]
    pub fn try_pin(&self) -> TryPin {
        self.pin_unless(EXCLUSIVE | CLOSED)
    }

    /// Pins a resident page for a request that the pager has let past those that wait for the page. If a writer is in
    /// the way, its end will be told.
    pub fn try_pin_latched(&self) -> TryPin {
        self.update(|word| {
            if resident(state_of(word)) && word & EXCLUSIVE != 0 {
                return (Some(word | WANTED), TryPin::Busy);
            }
            if !resident(state_of(word)) || pins_of(word) >= PINS_MAX {
                return (None, TryPin::Busy);
            }
            let outcome = if word & FRESH == 0 { TryPin::Hit } else { TryPin::FirstUse };
            (Some((word & !FRESH) + PIN), outcome)
        })
    }

    #[inline]
    fn pin_unless(&self, forbidden: u64) -> TryPin {
        self.update(|word| {
            if !resident(state_of(word)) || word & forbidden != 0 || pins_of(word) >= PINS_MAX {
                return (None, TryPin::Busy);
            }
            let outcome = if word & FRESH == 0 { TryPin::Hit } else { TryPin::FirstUse };
            (Some((word & !FRESH) + PIN), outcome)
        })
    }

    /// Pins a resident page for writing, if it has no other pin. Takes no lock.
    #[inline]
    pub fn try_write(&self) -> TryWrite {
        self.update(|word| {
            let state = state_of(word);
            let free = pins_of(word) == 0 && word & (CLOSED | HELD) == 0;
            if !free || !matches!(state, State::Clean | State::Dirty) {
                return (None, TryWrite::Busy);
            }
            let won = TryWrite::Won { clean: state == State::Clean, first_use: word & FRESH != 0 };
            (Some((with_state(word & !FRESH, State::Dirty) | EXCLUSIVE) + PIN), won)
        })
    }

    /// Gives back what [`try_write`](Self::try_write) won, unwritten. Used when a set could not be pinned as a whole.
    pub fn undo_write(&self, clean: bool) -> Unpin {
        self.update(|word| {
            invariant!(word & EXCLUSIVE != 0 && pins_of(word) == 1, "a write is undone that was not begun");
            let to = if clean { State::Clean } else { State::Dirty };
            (Some(with_state(word & !(WANTED | EXCLUSIVE), to) - PIN), told(word))
        })
    }

    /// Makes pins ask under the latch from now on: a request waits for this page.
    pub fn close(&self) {
        self.update(|word| (Some(word | CLOSED), ()))
    }

    /// Lets pins do without the latch again: no request waits for this page.
    pub fn reopen(&self) {
        self.update(|word| (Some(word & !CLOSED), ()))
    }

    /// Makes writers ask under the latch from now on.
    pub fn hold(&self) {
        self.update(|word| (Some(word | HELD), ()))
    }

    /// Lets writers do without the latch again.
    pub fn release(&self) {
        self.update(|word| (Some(word & !HELD), ()))
    }

    /// Ends a pin. Takes no lock. The caller owns the pin, so there is one to end.
    #[inline]
    pub fn unpin(&self) -> Unpin {
        self.update(|word| {
            invariant!(pins_of(word) > 0, "unpin without a pin");
            (Some((word & !WANTED) - PIN), told(word))
        })
    }

    /// Ends a pin that was taken and given up under one hold of the latch. Leaves `wanted` as it is: whoever set it
    /// waits for the pin it met, not for this one.
    pub fn unpin_quiet(&self) {
        self.update(|word| {
            invariant!(pins_of(word) > 0, "unpin without a pin");
            (Some(word - PIN), ())
        })
    }

    /// Ends a writer's pin.
    #[inline]
    pub fn unlock(&self) -> Unpin {
        self.update(|word| {
            invariant!(word & EXCLUSIVE != 0 && pins_of(word) == 1, "unlock without a lock");
            (Some((word & !(WANTED | EXCLUSIVE)) - PIN), told(word))
        })
    }

    /// Empty to Filling.
    pub fn begin_fill(&self) -> Result<(), Illegal> {
        self.edge("begin_fill", |w| (state_of(w) == State::Empty).then(|| with_state(w, State::Filling)))
    }

    /// Pins a page whose fill the device has taken up, for a stream that waits for the fill. Does not if the count of
    /// pins is at its limit.
    pub fn lend(&self) -> Result<Claim, Illegal> {
        self.update(|word| match state_of(word) {
            State::Filling if pins_of(word) < PINS_MAX => (Some(word + PIN), Ok(Claim::Won)),
            State::Filling => (None, Ok(Claim::Blocked)),
            _ => (None, Err(Illegal { edge: "lend", from: Self::snapshot_of(word) })),
        })
    }

    /// Filling to Clean or Dirty, with `pins` pins: one for each waiter.
    pub fn fill_ok(&self, pins: u32, dirty: bool) -> Result<(), Illegal> {
        self.become_resident("fill_ok", pins, dirty, pins == 0)
    }

    /// [`fill_ok`](Self::fill_ok) for a page that was lent, and so has been used. Lent pins that have not ended stay.
    pub fn fill_ok_lent(&self, pins: u32, dirty: bool) -> Result<(), Illegal> {
        self.become_resident("fill_ok_lent", pins, dirty, false)
    }

    fn become_resident(&self, edge: &'static str, pins: u32, dirty: bool, fresh: bool) -> Result<(), Illegal> {
        let to = if dirty { State::Dirty } else { State::Clean };
        let fresh = if fresh { FRESH } else { 0 };
        self.edge(edge, |w| {
            (state_of(w) == State::Filling).then(|| (with_state(w, to) + u64::from(pins) * PIN) | fresh)
        })
    }

    /// Filling to Clean or Dirty, pinned by the writer that it was filled for.
    pub fn fill_ok_locked(&self, dirty: bool) -> Result<(), Illegal> {
        let to = if dirty { State::Dirty } else { State::Clean };
        self.edge("fill_ok_locked", |w| {
            let fits = state_of(w) == State::Filling && pins_of(w) == 0;
            fits.then(|| (with_state(w, to) | EXCLUSIVE) + PIN)
        })
    }

    /// Filling to Empty, unless lent pins remain: a stream may still use the frame.
    pub fn fill_err(&self) -> Result<Claim, Illegal> {
        self.update(|word| match state_of(word) {
            State::Filling if pins_of(word) == 0 => (Some(with_state(word, State::Empty)), Ok(Claim::Won)),
            State::Filling => (Some(word | WANTED), Ok(Claim::Blocked)),
            _ => (None, Err(Illegal { edge: "fill_err", from: Self::snapshot_of(word) })),
        })
    }

    /// Clean and unpinned to Evicting.
    pub fn begin_evict(&self) -> BeginEvict {
        self.update(|word| match state_of(word) {
            State::Clean if pins_of(word) == 0 => (Some(with_state(word & !FRESH, State::Evicting)), BeginEvict::Won),
            State::Clean | State::Dirty | State::WritingBack if pins_of(word) > 0 => {
                (Some(word | WANTED), BeginEvict::Pinned)
            }
            State::Dirty => (None, BeginEvict::Dirty),
            _ => (None, BeginEvict::Busy),
        })
    }

    /// Evicting back to Clean, pinned once: the bytes are still valid.
    pub fn rescue(&self) -> Result<(), Illegal> {
        self.edge("rescue", |w| (state_of(w) == State::Evicting).then(|| with_state(w, State::Clean) + PIN))
    }

    /// Evicting to Empty.
    pub fn evicted(&self) -> Result<(), Illegal> {
        self.edge("evicted", |w| {
            (state_of(w) == State::Evicting).then(|| with_state(w & !WANTED, State::Empty).wrapping_add(GENERATION))
        })
    }

    /// Dirty and unpinned to WritingBack, for a victim. Its frame is promised, so pins ask under the latch.
    pub fn begin_last_write_back(&self) -> Claim {
        self.update(|word| match state_of(word) {
            State::Dirty if pins_of(word) == 0 => (Some(with_state(word, State::WritingBack) | CLOSED), Claim::Won),
            State::Dirty => (Some(word | WANTED), Claim::Blocked),
            _ => (None, Claim::Blocked),
        })
    }

    /// Dirty to WritingBack. Readers do not prevent it; a writer does.
    pub fn begin_write_back(&self) -> Claim {
        self.update(|word| match state_of(word) {
            State::Dirty if word & EXCLUSIVE == 0 => (Some(with_state(word, State::WritingBack)), Claim::Won),
            State::Dirty => (Some(word | WANTED), Claim::Blocked),
            _ => (None, Claim::Blocked),
        })
    }

    /// WritingBack to Clean.
    pub fn write_back_ok(&self) -> Result<(), Illegal> {
        self.edge("write_back_ok", |w| (state_of(w) == State::WritingBack).then(|| with_state(w, State::Clean)))
    }

    /// WritingBack to Dirty.
    pub fn write_back_err(&self) -> Result<(), Illegal> {
        self.edge("write_back_err", |w| (state_of(w) == State::WritingBack).then(|| with_state(w, State::Dirty)))
    }

    /// Pins a resident page that has no other pin, for a writer whose other pages may still be on their way. The writer
    /// writes nothing before [`begin_write`](Self::begin_write).
    pub fn lock(&self) -> Claim {
        self.update(|word| match state_of(word) {
            State::Clean | State::Dirty if pins_of(word) == 0 => {
                (Some(((word & !FRESH) | EXCLUSIVE) + PIN), Claim::Won)
            }
            _ if pins_of(word) > 0 => (Some(word | WANTED), Claim::Blocked),
            _ => (None, Claim::Blocked),
        })
    }

    /// Hands the page to the writer that [locked](Self::lock) it. The page is dirty from here on.
    pub fn begin_write(&self) -> Result<(), Illegal> {
        self.edge("begin_write", |w| {
            let locked = w & EXCLUSIVE != 0 && matches!(state_of(w), State::Clean | State::Dirty);
            locked.then(|| with_state(w, State::Dirty))
        })
    }

    /// Dirty and unpinned to Evicting: its bytes are not wanted any more.
    pub fn begin_discard(&self) -> Claim {
        self.update(|word| match state_of(word) {
            State::Dirty if pins_of(word) == 0 => (Some(with_state(word & !FRESH, State::Evicting)), Claim::Won),
            State::Dirty => (Some(word | WANTED), Claim::Blocked),
            _ => (None, Claim::Blocked),
        })
    }

    /// Poisoned to Empty: older bytes of the page are wanted, which are on disk.
    pub fn revive(&self) -> Result<(), Illegal> {
        self.edge("revive", |w| {
            let may = state_of(w) == State::Poisoned && pins_of(w) == 0;
            may.then(|| with_state(w & !WANTED, State::Empty).wrapping_add(GENERATION))
        })
    }

    /// Dirty and unpinned to Poisoned.
    pub fn poison(&self) -> Claim {
        self.update(|word| match state_of(word) {
            State::Dirty if pins_of(word) == 0 => (Some(with_state(word, State::Poisoned)), Claim::Won),
            State::Dirty => (Some(word | WANTED), Claim::Blocked),
            _ => (None, Claim::Blocked),
        })
    }

    /// Gives the page up after an [illegal edge](Illegal): its state is unknown. Pins stay.
    pub fn condemn(&self) {
        self.update(|word| (Some(with_state(word, State::Poisoned)), ()))
    }
}

/// What the end of a pin must tell.
fn told(word: u64) -> Unpin {
    if word & (WANTED | CLOSED) == 0 { Unpin::Done } else { Unpin::Wanted }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use super::*;

    fn filled(pins: u32) -> PageWord {
        let word = PageWord::default();
        word.begin_fill().unwrap();
        word.fill_ok(pins, false).unwrap();
        word
    }

    #[test]
    fn a_page_filled_ahead_reports_its_first_use_once() {
        let word = filled(0);
        assert!(word.load().fresh);
        assert_eq!(word.try_pin(), TryPin::FirstUse);
        assert_eq!(word.try_pin(), TryPin::Hit);
    }

    #[test]
    fn an_evictor_that_met_a_pin_hears_of_its_end() {
        let word = filled(1);
        assert_eq!(word.begin_evict(), BeginEvict::Pinned);
        assert_eq!(word.unpin(), Unpin::Wanted);
        assert_eq!(word.begin_evict(), BeginEvict::Won);
        assert_eq!(word.try_pin(), TryPin::Busy);
        word.evicted().unwrap();
        assert_eq!(word.load().generation, 1);
    }

    #[test]
    fn a_writer_needs_the_page_to_itself() {
        let word = filled(1);
        assert_eq!(word.lock(), Claim::Blocked);
        assert_eq!(word.try_write(), TryWrite::Busy);
        assert_eq!(word.unpin(), Unpin::Wanted);
        assert_eq!(word.lock(), Claim::Won);
        assert_eq!(word.try_pin(), TryPin::Busy);
        assert_eq!(word.begin_evict(), BeginEvict::Pinned);
        word.begin_write().unwrap();
        assert_eq!(word.begin_write_back(), Claim::Blocked);
        assert_eq!(word.unlock(), Unpin::Wanted);
        assert_eq!(word.begin_evict(), BeginEvict::Dirty);
        assert_eq!(word.begin_write_back(), Claim::Won);
        assert_eq!(word.try_write(), TryWrite::Busy);
        assert_eq!(word.try_pin(), TryPin::Hit);
        assert_eq!(word.lock(), Claim::Blocked);
        word.write_back_ok().unwrap();
        assert_eq!(word.unpin(), Unpin::Wanted);
        assert_eq!(word.try_write(), TryWrite::Won { clean: true, first_use: false });
        assert_eq!(word.undo_write(true), Unpin::Done);
        assert_eq!((word.load().state, word.load().pins), (State::Clean, 0));
        word.hold();
        assert_eq!(word.try_write(), TryWrite::Busy);
        word.release();
        word.close();
        assert_eq!((word.try_write(), word.try_pin()), (TryWrite::Busy, TryPin::Busy));
        assert_eq!(word.try_pin_latched(), TryPin::Hit);
        assert_eq!(word.unpin(), Unpin::Wanted);
    }

    /// The reader closes the page only after it has met the writer, and the writer may have gone meanwhile.
    #[test]
    fn regression_a_reader_that_met_a_writer_under_the_latch_hears_of_its_end() {
        let word = filled(0);
        assert_eq!(word.lock(), Claim::Won);
        assert_eq!(word.try_pin_latched(), TryPin::Busy);
        assert_eq!(word.unlock(), Unpin::Wanted);
        assert_eq!(word.try_pin_latched(), TryPin::Hit);
        assert_eq!(word.unpin(), Unpin::Done);
    }

    #[test]
    fn bytes_are_discarded_only_without_a_pin() {
        let word = filled(0);
        assert_eq!(word.begin_discard(), Claim::Blocked, "a clean page has its bytes elsewhere");
        assert_eq!(word.try_write(), TryWrite::Won { clean: true, first_use: true });
        assert_eq!(word.begin_discard(), Claim::Blocked);
        assert_eq!(word.unlock(), Unpin::Wanted);
        assert_eq!(word.begin_discard(), Claim::Won);
        assert_eq!((word.try_pin(), word.try_write()), (TryPin::Busy, TryWrite::Busy));
        word.evicted().unwrap();
        assert_eq!((word.load().state, word.load().generation), (State::Empty, 1));
    }

    #[test]
    fn a_page_that_was_lost_can_be_filled_again() {
        let word = filled(0);
        word.revive().unwrap_err();
        assert_eq!(word.try_write(), TryWrite::Won { clean: true, first_use: true });
        assert_eq!(word.unlock(), Unpin::Done);
        assert_eq!(word.poison(), Claim::Won);
        word.revive().unwrap();
        assert_eq!((word.load().state, word.load().generation), (State::Empty, 1));
        word.begin_fill().unwrap();
    }

    #[test]
    fn a_victim_that_is_written_back_is_closed() {
        let word = filled(0);
        assert_eq!(word.try_write(), TryWrite::Won { clean: true, first_use: true });
        assert_eq!(word.begin_last_write_back(), Claim::Blocked);
        assert_eq!(word.unlock(), Unpin::Wanted);
        assert_eq!(word.begin_last_write_back(), Claim::Won);
        assert_eq!(word.try_pin(), TryPin::Busy);
        word.write_back_ok().unwrap();
        word.reopen();
        assert_eq!(word.try_pin(), TryPin::Hit);
    }

    #[test]
    fn a_lent_page_keeps_its_pins_when_the_fill_ends() {
        for ended in [false, true] {
            let word = PageWord::default();
            word.begin_fill().unwrap();
            assert_eq!(word.try_pin(), TryPin::Busy);
            assert_eq!(word.lend(), Ok(Claim::Won));
            assert_eq!(word.lend(), Ok(Claim::Won));
            assert_eq!(word.begin_evict(), BeginEvict::Busy);
            assert_eq!(word.unpin(), Unpin::Done);
            if ended {
                assert_eq!(word.unpin(), Unpin::Done);
            }
            word.fill_ok_lent(1, false).unwrap();
            assert_eq!((word.load().pins, word.load().fresh), (2 - u32::from(ended), false));
            assert_eq!(word.begin_evict(), BeginEvict::Pinned);
        }
    }

    #[test]
    fn a_fill_that_fails_waits_for_those_it_was_lent_to() {
        let word = PageWord::default();
        word.begin_fill().unwrap();
        assert_eq!(word.lend(), Ok(Claim::Won));
        assert_eq!(word.lend(), Ok(Claim::Won));
        assert_eq!(word.fill_err(), Ok(Claim::Blocked));
        assert_eq!(word.unpin(), Unpin::Wanted);
        assert_eq!(word.fill_err(), Ok(Claim::Blocked));
        assert_eq!(word.unpin(), Unpin::Wanted);
        assert_eq!(word.fill_err(), Ok(Claim::Won));
        assert_eq!(word.load(), PageWord::default().load());
    }

    /// Every edge from every state: legal ones lead where the table says, the others change nothing.
    #[test]
    fn illegal_edges_change_nothing() {
        type Edge = (&'static str, fn(&PageWord) -> Result<(), Illegal>, &'static [State]);
        let edges: [Edge; 9] = [
            ("begin_fill", PageWord::begin_fill, &[State::Empty]),
            ("lend", |w| w.lend().map(|claim| assert_eq!(claim, Claim::Won)), &[State::Filling]),
            ("fill_ok", |w| w.fill_ok(0, false), &[State::Filling]),
            ("fill_ok_lent", |w| w.fill_ok_lent(0, false), &[State::Filling]),
            ("fill_err", |w| w.fill_err().map(|claim| assert_eq!(claim, Claim::Won)), &[State::Filling]),
            ("rescue", PageWord::rescue, &[State::Evicting]),
            ("evicted", PageWord::evicted, &[State::Evicting]),
            ("write_back_ok", PageWord::write_back_ok, &[State::WritingBack]),
            ("write_back_err", PageWord::write_back_err, &[State::WritingBack]),
        ];
        let states = [
            State::Empty,
            State::Filling,
            State::Clean,
            State::Dirty,
            State::WritingBack,
            State::Evicting,
            State::Poisoned,
        ];
        for (name, edge, legal) in edges {
            for from in states {
                let word = PageWord(AtomicU64::new(from as u64));
                let before = word.load();
                let taken = edge(&word).is_ok();
                assert_eq!(taken, legal.contains(&from), "{name} from {from:?}");
                if !taken {
                    assert_eq!(word.load(), before);
                }
            }
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    fn filled(pins: u32) -> Arc<PageWord> {
        let word = Arc::new(PageWord::default());
        word.begin_fill().unwrap();
        word.fill_ok(pins, false).unwrap();
        word
    }

    /// A pin and an eviction exclude each other. An eviction that loses is told of the pin's end.
    #[test]
    fn loom_pin_against_evict() {
        loom::model(|| {
            let word = filled(0);
            let other = word.clone();
            let pinner = thread::spawn(move || other.try_pin() != TryPin::Busy);
            let evict = word.begin_evict();
            let pinned = pinner.join().unwrap();
            match evict {
                BeginEvict::Won => assert_eq!(word.load().pins, u32::from(pinned)),
                BeginEvict::Pinned => assert_eq!(word.unpin(), Unpin::Wanted),
                other => panic!("{other:?}"),
            }
            assert!(!(pinned && evict == BeginEvict::Won));
        });
    }

    /// However an unpin and an eviction interleave: either the eviction wins, or the unpin says "wanted".
    #[test]
    fn loom_no_wakeup_is_lost() {
        loom::model(|| {
            let word = filled(1);
            let other = word.clone();
            let reader = thread::spawn(move || other.unpin());
            let evict = word.begin_evict();
            let unpin = reader.join().unwrap();
            assert!(evict == BeginEvict::Won || unpin == Unpin::Wanted);
        });
    }

    /// A reader under the latch that finds a writer either pins the page, or the writer's end says that somebody waits.
    #[test]
    fn loom_a_reader_that_met_a_writer_is_told() {
        loom::model(|| {
            let word = filled(0);
            assert!(matches!(word.try_write(), TryWrite::Won { .. }));
            let other = word.clone();
            let writer = thread::spawn(move || other.unlock());
            let met = word.try_pin_latched();
            if met == TryPin::Busy {
                word.close();
            }
            let told = writer.join().unwrap();
            assert!(met != TryPin::Busy || told == Unpin::Wanted);
        });
    }

    /// A writer's lock and a reader's pin never hold together.
    #[test]
    fn loom_lock_against_pin() {
        loom::model(|| {
            let word = filled(0);
            let other = word.clone();
            let reader = thread::spawn(move || match other.try_pin() {
                TryPin::Busy => None,
                _ => Some(other.unpin()),
            });
            let locked = word.lock();
            if locked == Claim::Won {
                assert!(word.load().exclusive);
                let _ = word.unlock();
                let _ = reader.join().unwrap();
            } else {
                // The reader was in the way. Its unpin tells us, unless it had pinned after our attempt.
                let unpin = reader.join().unwrap();
                assert_eq!(unpin, Some(Unpin::Wanted));
            }
        });
    }

    /// A frame: its bytes, and how many use it. The bytes are accessed without ordering of their own, so that a pin
    /// that does not publish them is found.
    #[derive(Default)]
    struct Frame {
        bytes: AtomicU64,
        users: AtomicU64,
    }

    const WRITING: u64 = 1 << 16;

    impl Frame {
        fn read(&self) -> u64 {
            assert!(self.users.fetch_add(1, Ordering::Relaxed) < WRITING, "read while written");
            let bytes = self.bytes.load(Ordering::Relaxed);
            self.users.fetch_sub(1, Ordering::Relaxed);
            bytes
        }
        fn write(&self, bytes: u64) {
            assert_eq!(self.users.fetch_add(WRITING, Ordering::Relaxed), 0, "written while used");
            self.bytes.store(bytes, Ordering::Relaxed);
            self.users.fetch_sub(WRITING, Ordering::Relaxed);
        }
    }

    /// A page, its frame, and what is under the latch: how many requests wait for the fill, and whether a writer waits.
    #[derive(Default)]
    struct Page {
        word: PageWord,
        frame: Frame,
        waiters: Mutex<u32>,
        writer_waits: Mutex<bool>,
    }

    impl Page {
        /// Reads like a reader that pins without the latch. `None` if the page could not be pinned.
        fn read_if_pinned(&self) -> Option<u64> {
            if self.word.try_pin() == TryPin::Busy {
                return None;
            }
            Some(self.frame.read())
        }

        /// Under the latch: the waiting writer gets its lock if nobody is in its way.
        fn advance_writer(&self, waits: &mut bool) -> bool {
            let won = *waits && self.word.lock() == Claim::Won;
            *waits &= !won;
            won
        }
    }

    /// A reader that comes while the page is filled gets its pin from the fill, or pins the page afterwards. Either way
    /// it sees the bytes.
    #[test]
    fn loom_fill_with_a_waiter() {
        loom::model(|| {
            let page = Arc::new(Page::default());
            page.word.begin_fill().unwrap();
            let filler = {
                let page = page.clone();
                thread::spawn(move || {
                    page.frame.write(7);
                    let waiters = page.waiters.lock().unwrap();
                    page.word.fill_ok(*waiters, false).unwrap();
                })
            };
            let reader = {
                let page = page.clone();
                thread::spawn(move || {
                    if let Some(bytes) = page.read_if_pinned() {
                        assert_eq!(bytes, 7);
                        return;
                    }
                    let mut waiters = page.waiters.lock().unwrap();
                    if page.word.load().state == State::Filling {
                        *waiters += 1;
                    } else {
                        assert_ne!(page.word.try_pin(), TryPin::Busy);
                        assert_eq!(page.frame.read(), 7);
                    }
                })
            };
            filler.join().unwrap();
            reader.join().unwrap();
            // The reader's pin, whoever took it.
            assert_eq!(page.word.load().pins, 1);
            assert_eq!(page.frame.read(), 7);
        });
    }

    /// A page is lent; its pin and its fill end, in any order. The frame is used again only when both have.
    #[test]
    fn loom_lent_pin_against_the_end_of_the_fill() {
        for failed in [false, true] {
            loom::model(move || {
                let page = Arc::new(Page::default());
                page.word.begin_fill().unwrap();
                assert_eq!(page.word.lend(), Ok(Claim::Won));
                // Under the latch: `spoiled` says whether the fill has failed and the frame is not given back yet.
                let spoiled = |page: &Page, spoiled: &mut bool| {
                    if *spoiled && page.word.fill_err().unwrap() == Claim::Won {
                        *spoiled = false;
                        page.frame.write(99);
                    }
                };
                let filler = {
                    let page = page.clone();
                    thread::spawn(move || {
                        let mut latch = page.writer_waits.lock().unwrap();
                        if failed {
                            *latch = true;
                            spoiled(&page, &mut latch);
                        } else {
                            page.word.fill_ok_lent(0, false).unwrap();
                            if page.word.begin_evict() == BeginEvict::Won {
                                page.word.evicted().unwrap();
                                page.frame.write(99);
                            }
                        }
                    })
                };
                // The stream's work, which ends before the pin does.
                page.frame.read();
                if page.word.unpin() == Unpin::Wanted {
                    let mut latch = page.writer_waits.lock().unwrap();
                    if failed {
                        spoiled(&page, &mut latch);
                    } else if page.word.begin_evict() == BeginEvict::Won {
                        page.word.evicted().unwrap();
                        page.frame.write(99);
                    }
                }
                filler.join().unwrap();
                assert!(!*page.writer_waits.lock().unwrap(), "the frame is never given back");
                assert_eq!((page.word.load().state, page.word.load().pins), (State::Empty, 0));
                assert_eq!(page.frame.read(), 99);
            });
        }
    }

    /// Of two readers of a page that was filled ahead, one is the first.
    #[test]
    fn loom_first_use_is_told_once() {
        loom::model(|| {
            let word = filled(0);
            let readers = [word.clone(), word.clone()].map(|word| thread::spawn(move || word.try_pin()));
            let firsts = readers.map(|reader| reader.join().unwrap() == TryPin::FirstUse);
            assert!(firsts[0] != firsts[1]);
        });
    }

    /// A page wanted again while it is evicted either is rescued with its bytes, or has left. Its frame is used again
    /// only when nobody can have pinned it.
    #[test]
    fn loom_rescue_against_the_end_of_an_eviction() {
        loom::model(|| {
            let page = Arc::new(Page::default());
            page.word.begin_fill().unwrap();
            page.frame.write(7);
            page.word.fill_ok(0, false).unwrap();
            let evictor = {
                let page = page.clone();
                thread::spawn(move || {
                    let latch = page.waiters.lock().unwrap();
                    let won = page.word.begin_evict() == BeginEvict::Won;
                    drop(latch);
                    // Here the copy down runs.
                    let _latch = page.waiters.lock().unwrap();
                    if won && page.word.load().state == State::Evicting {
                        page.word.evicted().unwrap();
                        page.frame.write(99);
                    }
                })
            };
            let passer = {
                let page = page.clone();
                thread::spawn(move || {
                    if let Some(bytes) = page.read_if_pinned() {
                        assert_eq!(bytes, 7);
                        let _ = page.word.unpin();
                    }
                })
            };
            match page.read_if_pinned() {
                Some(bytes) => assert_eq!(bytes, 7),
                None => {
                    let _latch = page.waiters.lock().unwrap();
                    match page.word.load().state {
                        State::Evicting => {
                            page.word.rescue().unwrap();
                            assert_eq!(page.frame.read(), 7);
                        }
                        State::Empty => {
                            page.word.begin_fill().unwrap();
                            page.frame.write(7);
                            page.word.fill_ok(1, false).unwrap();
                        }
                        other => panic!("{other:?}"),
                    }
                }
            }
            evictor.join().unwrap();
            passer.join().unwrap();
            let end = page.word.load();
            assert_eq!((end.state, end.pins), (State::Clean, 1));
            assert_eq!(page.frame.read(), 7);
        });
    }

    /// The bytes of a dirty page are given up while somebody may pin it: whoever has it pinned sees them to the end.
    #[test]
    fn loom_discard_against_a_pin() {
        loom::model(|| {
            let page = Arc::new(Page::default());
            page.word.begin_fill().unwrap();
            page.frame.write(7);
            page.word.fill_ok(0, true).unwrap();
            let discarder = {
                let page = page.clone();
                thread::spawn(move || {
                    let _latch = page.waiters.lock().unwrap();
                    page.word.close();
                    let unpinned = page.word.load().pins == 0;
                    if unpinned {
                        // Closed, so nobody has pinned it since.
                        assert_eq!(page.word.begin_discard(), Claim::Won);
                        page.word.evicted().unwrap();
                        page.frame.write(99);
                    }
                    page.word.reopen();
                    unpinned
                })
            };
            if let Some(bytes) = page.read_if_pinned() {
                assert_eq!(bytes, 7);
                let _ = page.word.unpin();
            }
            let expected = if discarder.join().unwrap() { State::Empty } else { State::Dirty };
            assert_eq!((page.word.load().state, page.word.load().pins), (expected, 0));
        });
    }

    /// A page is written again while its write back runs: not before the write back has read it, never beside a reader.
    /// The writer gets its turn, whoever ends first.
    #[test]
    fn loom_dirty_again_while_written_back() {
        for closed in [false, true] {
            loom::model(move || {
                let page = Arc::new(Page::default());
                page.word.begin_fill().unwrap();
                page.frame.write(7);
                // A reader's pin.
                page.word.fill_ok(1, true).unwrap();
                assert_eq!(page.word.begin_write_back(), Claim::Won);
                if closed {
                    page.word.close();
                }
                let write = |page: &Page| {
                    page.word.reopen();
                    page.word.begin_write().unwrap();
                    page.frame.write(8);
                    assert_ne!(page.word.begin_write_back(), Claim::Won, "written back while it is written");
                    let _ = page.word.unlock();
                };
                let store = {
                    let page = page.clone();
                    thread::spawn(move || {
                        assert_eq!(page.frame.read(), 7, "the write back reads what was dirty");
                        let mut waits = page.writer_waits.lock().unwrap();
                        page.word.write_back_ok().unwrap();
                        if page.advance_writer(&mut waits) {
                            write(&page);
                        }
                    })
                };
                let reader = {
                    let page = page.clone();
                    thread::spawn(move || {
                        assert_eq!(page.frame.read(), 7);
                        if page.word.unpin() == Unpin::Wanted {
                            let mut waits = page.writer_waits.lock().unwrap();
                            if page.advance_writer(&mut waits) {
                                write(&page);
                            }
                        }
                    })
                };
                {
                    let mut waits = page.writer_waits.lock().unwrap();
                    *waits = true;
                    if page.advance_writer(&mut waits) {
                        write(&page);
                    }
                }
                store.join().unwrap();
                reader.join().unwrap();
                assert!(!*page.writer_waits.lock().unwrap(), "the writer waits for ever");
                let end = page.word.load();
                assert_eq!((end.state, end.pins, end.closed), (State::Dirty, 0, false));
                // What was written can be written back in turn.
                assert_eq!(page.word.begin_write_back(), Claim::Won);
                assert_eq!(page.frame.read(), 8);
            });
        }
    }

    /// Two writers without the latch, and an evictor: one at a time has the frame, and what is written stays.
    #[test]
    fn loom_writers_against_eviction() {
        loom::model(|| {
            let page = Arc::new(Page::default());
            page.word.begin_fill().unwrap();
            page.frame.write(7);
            page.word.fill_ok(0, false).unwrap();
            let writer = |page: &Page| match page.word.try_write() {
                TryWrite::Won { .. } => {
                    page.frame.write(8);
                    let _ = page.word.unlock();
                    true
                }
                TryWrite::Busy => false,
            };
            let other = {
                let page = page.clone();
                thread::spawn(move || writer(&page))
            };
            let undone = match page.word.try_write() {
                TryWrite::Won { clean, .. } => {
                    let _ = page.word.undo_write(clean);
                    true
                }
                TryWrite::Busy => false,
            };
            let evict = page.word.begin_evict();
            let wrote = other.join().unwrap();
            match evict {
                BeginEvict::Won => assert!(!wrote && page.frame.read() == 7),
                BeginEvict::Dirty => assert!(wrote),
                _ => {}
            }
            assert!(wrote || undone || evict == BeginEvict::Won);
            if wrote {
                assert_eq!((page.word.load().state, page.frame.read()), (State::Dirty, 8));
            }
        });
    }

    /// Once a page is closed to readers, its writer gets it when the present readers have left.
    #[test]
    fn loom_closed_to_readers() {
        loom::model(|| {
            let page = Arc::new(Page::default());
            page.word.begin_fill().unwrap();
            page.word.fill_ok(1, false).unwrap();
            *page.writer_waits.lock().unwrap() = true;
            let leaving = {
                let page = page.clone();
                thread::spawn(move || {
                    if page.word.unpin() == Unpin::Wanted {
                        let mut waits = page.writer_waits.lock().unwrap();
                        page.advance_writer(&mut waits);
                    }
                })
            };
            let coming = {
                let page = page.clone();
                thread::spawn(move || {
                    if page.word.try_pin() != TryPin::Busy && page.word.unpin() == Unpin::Wanted {
                        let mut waits = page.writer_waits.lock().unwrap();
                        page.advance_writer(&mut waits);
                    }
                })
            };
            {
                let mut waits = page.writer_waits.lock().unwrap();
                if !page.advance_writer(&mut waits) && *waits {
                    page.word.close();
                    // A reader that has left meanwhile did not see the page closed.
                    page.advance_writer(&mut waits);
                }
            }
            leaving.join().unwrap();
            coming.join().unwrap();
            assert!(!*page.writer_waits.lock().unwrap(), "the writer waits for ever");
            assert!(page.word.load().exclusive);
        });
    }
}
