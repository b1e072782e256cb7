//! The pin: how resident pages are pinned without the latch, by whoever pins: the runtime, the simulator, the tests.
//!
//! All pages of a request or none; the pager hears of each use through `record`. Where anything is in the way, what
//! was pinned is given back and the caller [submits](super::Pager::submit) a request, which is decided under the latch.
//! So nobody who waits is passed unseen: pages that a request waits for are [closed](PageWord::close), and while one waits
//! for frames the [`Gate`] is.

use smallvec::SmallVec;

use super::access::Access;
use super::{PageRun, PageWord, Purpose, TryPin, Unpin};
use crate::ids::PageId;
use crate::state::TryWrite;
use crate::sync::{Alone, AtomicU64, Ordering};

/// Says whether a request waits for frames: then every pin asks under the latch, because it may take away a frame that
/// could have been given. Read by every pin, written when the first begins to wait and the last has ended.
#[derive(Debug, Default)]
pub struct Gate {
    closed: Alone<AtomicU64>,
    /// How often it was opened.
    #[cfg(test)]
    pub(super) opened: AtomicU64,
}

impl Gate {
    /// What is closed already is not written: all cores read it.
    #[doc(hidden)]
    pub fn close(&self) {
        if !self.is_closed() {
            self.closed.0.store(1, Ordering::Release);
        }
    }

    pub(super) fn open(&self) {
        self.closed.0.store(0, Ordering::Release);
        #[cfg(test)]
        self.opened.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether pins ask under the latch.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.closed.0.load(Ordering::Acquire) != 0
    }
}

/// How [`pin`] went.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pinned {
    /// Every page is pinned. `reached` if one of them had been filled ahead and not been used: the pager may
    /// [look further](super::Pager::pump).
    All {
        /// See above.
        reached: bool,
    },
    /// None is. `wanted` holds what somebody waits for and had met the pins of this attempt: the pager is
    /// [told](super::Pager::released).
    None {
        /// See above.
        wanted: bool,
    },
}

/// A run of pages, and their words.
pub type Words<'a> = (PageRun, &'a [PageWord]);

/// [`pin`] of one page. The use, which the pager is to hear of; `None` if the page is not pinned.
#[inline(always)]
pub fn page(gate: &Gate, page: PageId, word: &PageWord, purpose: Purpose) -> Option<Access> {
    if gate.is_closed() {
        return None;
    }
    let write = purpose == Purpose::Write;
    let first_use = if write {
        let TryWrite::Won { first_use, .. } = word.try_write() else { return None };
        first_use
    } else {
        match word.try_pin() {
            TryPin::Hit => false,
            TryPin::FirstUse => true,
            TryPin::Busy => return None,
        }
    };
    Some(Access::new(page, write, first_use))
}

/// Pins every page of `runs`, of which no two have one in common, or none.
pub fn pin(gate: &Gate, runs: &[Words<'_>], purpose: Purpose, mut record: impl FnMut(Access)) -> Pinned {
    invariant!(
        runs.iter().all(|(run, words)| run.count as usize == words.len()),
        "a run has not as many words as pages"
    );
    if let [(run, [word])] = runs {
        let Some(used) = page(gate, PageId { segment: run.segment, index: run.first }, word, purpose) else {
            return Pinned::None { wanted: false };
        };
        record(used);
        return Pinned::All { reached: used.is_first() };
    }
    if gate.is_closed() {
        return Pinned::None { wanted: false };
    }
    // Looked at before anything is pinned: a pin takes the mark of a page that was filled ahead, and a set that is given
    // up half way would leave such pages to be counted as hits.
    let in_the_way = |word: &PageWord| {
        let snapshot = word.load();
        !snapshot.is_resident() || snapshot.exclusive || snapshot.closed
    };
    if runs.iter().flat_map(|(_, words)| words.iter()).any(in_the_way) {
        return Pinned::None { wanted: false };
    }
    if purpose == Purpose::Write { write(runs, record) } else { read(runs, record) }
}

fn read(runs: &[Words<'_>], mut record: impl FnMut(Access)) -> Pinned {
    // Of each page whether this is its first use.
    let mut pinned: SmallVec<[bool; 16]> = SmallVec::new();
    let words = || runs.iter().flat_map(|(_, words)| words.iter());
    for word in words() {
        match word.try_pin() {
            TryPin::Hit => pinned.push(false),
            TryPin::FirstUse => pinned.push(true),
            TryPin::Busy => {
                let undone = words().zip(&pinned).map(|(word, _)| word.unpin());
                let wanted = undone.fold(false, |wanted, undone| wanted | (undone == Unpin::Wanted));
                return Pinned::None { wanted };
            }
        }
    }
    let mut reached = false;
    for (page, first_use) in runs.iter().flat_map(|(run, _)| run.pages()).zip(&pinned) {
        reached |= first_use;
        record(Access::new(page, false, *first_use));
    }
    Pinned::All { reached }
}

fn write(runs: &[Words<'_>], mut record: impl FnMut(Access)) -> Pinned {
    // Of each page whether it was clean, and whether this is its first use.
    let mut won: SmallVec<[(bool, bool); 16]> = SmallVec::new();
    let words = || runs.iter().flat_map(|(_, words)| words.iter());
    for word in words() {
        match word.try_write() {
            TryWrite::Won { clean, first_use } => {
                won.push((clean, first_use));
            }
            TryWrite::Busy => {
                let undone = words().zip(&won).map(|(word, (clean, _))| word.undo_write(*clean));
                let wanted = undone.fold(false, |wanted, undone| wanted | (undone == Unpin::Wanted));
                return Pinned::None { wanted };
            }
        }
    }
    let pages = runs.iter().flat_map(|(run, _)| run.pages());
    for (page, (_, first_use)) in pages.zip(&won) {
        record(Access::new(page, true, *first_use));
    }
    Pinned::All { reached: won.iter().any(|(_, first_use)| *first_use) }
}

/// Ends the pins of a run, `exclusive` ones of a writer. Whether somebody waits for that: then the pager is
/// [told](super::Pager::released).
#[must_use]
#[inline]
pub fn unpin(words: &[PageWord], exclusive: bool) -> bool {
    words.iter().fold(false, |wanted, word| {
        let told = if exclusive { word.unlock() } else { word.unpin() };
        wanted | (told == Unpin::Wanted)
    })
}
