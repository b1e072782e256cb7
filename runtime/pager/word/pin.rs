//! The pin: how the runtime, the simulator and the tests pin resident pages without the latch.
//!
//! All pages of a request are pinned, or none. The pager hears of each use through `record`. If anything is in the way,
//! the pins are undone, and the caller [submits](crate::Pager::submit) a request, which is decided under the latch. So
//! no waiting request is passed without being counted: pages that a request waits for are [closed](PageWord::close),
//! and the [`Gate`] is closed while a request waits for frames.

use smallvec::SmallVec;

use super::access::Access;
use super::state::TryWrite;
use crate::ids::PageId;
use crate::sync::{Alone, AtomicU64, Ordering};
use crate::{PageRun, PageWord, Purpose, TryPin, Unpin};

/// Says whether a request waits for frames. Then every pin asks under the latch, because it may take away a frame that
/// could have been given to the request. Every pin reads it. It is written when the first request begins to wait, and
/// when the last has ended.
#[derive(Debug, Default)]
pub struct Gate {
    closed: Alone<AtomicU64>,
    /// How often it was opened.
    #[cfg(test)]
    pub(crate) opened: AtomicU64,
}

impl Gate {
    /// Writes only if it is open: all cores read it.
    #[doc(hidden)]
    pub fn close(&self) {
        if !self.is_closed() {
            self.closed.0.store(1, Ordering::Release);
        }
    }

    pub(crate) fn open(&self) {
        self.closed.0.store(0, Ordering::Release);
        #[cfg(test)]
        self.opened.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether pins have to ask under the latch.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.closed.0.load(Ordering::Acquire) != 0
    }
}

/// The result of [`pin`].
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pinned {
    /// Every page is pinned. `reached` means that one of them was filled ahead and had not been used: the pager may
    /// [look further](crate::Pager::pump).
    All {
        /// See above.
        reached: bool,
    },
    /// No page is pinned. `wanted` means that somebody waits for a page and met a pin of this attempt: the pager must
    /// be [told](crate::Pager::released).
    None {
        /// See above.
        wanted: bool,
    },
}

/// A run of pages, with their words.
pub type Words<'a> = (PageRun, &'a [PageWord]);

/// [`pin`] for one page. Returns the use, which the pager must hear of, or `None` if the page is not pinned.
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

/// Pins every page of `runs`, or none. No page may occur twice.
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
    // All words are looked at before any page is pinned. A pin removes the mark of a page that was filled ahead. If the
    // set were given up half way, the next use of such a page would be counted as a hit.
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
    // For each page, whether this is its first use.
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
    // For each page, whether it was clean, and whether this is its first use.
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

/// Ends the pins of a run. `exclusive` means a writer's. Returns whether somebody waits for that: the pager must then
/// be [told](crate::Pager::released).
#[must_use]
#[inline]
pub fn unpin(words: &[PageWord], exclusive: bool) -> bool {
    words.iter().fold(false, |wanted, word| {
        let told = if exclusive { word.unlock() } else { word.unpin() };
        wanted | (told == Unpin::Wanted)
    })
}
