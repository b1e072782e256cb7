//! The most hits that any policy could have had: Belady's MIN on the recorded order of use.
//!
//! L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use serde::Serialize;

/// The result of [`Trace::optimum`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Optimum {
    /// The uses covered: the first of the run, up to a fixed number.
    pub uses: u64,
    /// Uses that find their page resident under MIN.
    pub hits: u64,
    /// How many of the same uses were [hits](crate::PagerStats::hits), for comparison.
    pub actual_hits: u64,
    /// Whether there were more uses than are covered.
    pub truncated: bool,
}

impl Optimum {
    /// Hits over uses; 0 where there were none.
    pub fn ratio(&self) -> f64 {
        if self.uses == 0 { 0.0 } else { self.hits as f64 / self.uses as f64 }
    }

    /// Actual hits over the same uses; 0 where there were none.
    pub fn actual_ratio(&self) -> f64 {
        if self.uses == 0 { 0.0 } else { self.actual_hits as f64 / self.uses as f64 }
    }
}

/// The order of use, bounded. A clone shares nearly all of its memory, so one can be taken under the latch and examined
/// elsewhere.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// Page numbers. A number that is given out again stands for another page; then only the count of hits is off.
    full: Vec<Arc<[u32]>>,
    last: Vec<u32>,
    hits: u64,
    truncated: bool,
}

impl Trace {
    /// 1 MiB of page numbers: hundreds of passes of a model of hundreds of pages.
    const LIMIT: usize = 1 << 18;
    const PART: usize = 1 << 12;

    /// Whether no more uses are recorded. If so, notes that there were more.
    pub(crate) fn is_full(&mut self) -> bool {
        let full = self.full.len() * Self::PART == Self::LIMIT;
        self.truncated |= full;
        full
    }

    /// Records a use, and whether it was a hit.
    pub(crate) fn push(&mut self, page: u32, hit: bool) {
        if self.is_full() {
            return;
        }
        self.last.push(page);
        self.hits += u64::from(hit);
        if self.last.len() == Self::PART {
            self.full.push(std::mem::take(&mut self.last).into());
        }
    }

    /// The hits of MIN with `frames` frames, if every missing page is brought in at its use. Takes some tens of
    /// milliseconds for 2^18 uses.
    pub fn optimum(&self, frames: u32) -> Optimum {
        let pages: Vec<u32> = self.full.iter().flat_map(|part| part.iter()).chain(&self.last).copied().collect();
        let hits = min_hits(&pages, frames as usize);
        Optimum { uses: pages.len() as u64, hits, actual_hits: self.hits, truncated: self.truncated }
    }
}

/// MIN, one use after the other. It is told the page's next use with each use; it keeps one number for each frame and
/// knows no pages.
#[derive(Debug)]
pub struct Min {
    frames: usize,
    at: u64,
    /// For each resident page that is used again: twice the index of its next use, plus one if the page is dirty.
    next: BTreeSet<u64>,
    /// How many resident pages are not used again: clean ones, and dirty ones.
    dead: [usize; 2],
    hits: u64,
    written_back: u64,
}

impl Min {
    /// The next use of a page that is not used again.
    pub const NEVER: u64 = u64::MAX;

    /// An empty cache with this many frames.
    pub fn new(frames: usize) -> Self {
        Self { frames, at: 0, next: BTreeSet::new(), dead: [0; 2], hits: 0, written_back: 0 }
    }

    /// Makes the next use; uses are counted from 0. `next` is the next use of the same page, `write` whether this use
    /// writes.
    pub fn used(&mut self, next: u64, write: bool) {
        let mut dirty = write;
        // No resident page's next use is before this one, and only this page's is this one.
        if let Some(found) = self.next.first().copied().filter(|found| found >> 1 == self.at) {
            self.next.pop_first();
            self.hits += 1;
            dirty |= found & 1 != 0;
        } else if self.next.len() + self.dead.iter().sum::<usize>() == self.frames {
            self.written_back += u64::from(self.evict());
        }
        self.at += 1;
        if self.frames == 0 {
            self.written_back += u64::from(write);
        } else if next == Self::NEVER {
            self.dead[usize::from(dirty)] += 1;
        } else {
            self.next.insert(next << 1 | u64::from(dirty));
        }
    }

    /// Takes a frame, if there is one. Returns whether its page was dirty. Among pages that are not used again, clean
    /// ones go first.
    fn evict(&mut self) -> bool {
        for (dirty, dead) in [false, true].into_iter().zip(&mut self.dead) {
            if let Some(fewer) = dead.checked_sub(1) {
                *dead = fewer;
                return dirty;
            }
        }
        self.next.pop_last().is_some_and(|last| last & 1 != 0)
    }

    /// Uses that found their page.
    pub const fn hits(&self) -> u64 {
        self.hits
    }

    /// How many pages were evicted dirty.
    pub const fn written_back(&self) -> u64 {
        self.written_back
    }
}

/// For each use, the next use of the same page, or [`Min::NEVER`]. Pages go by numbers.
pub fn next_uses(order: &[u32]) -> Vec<u64> {
    let mut next = vec![Min::NEVER; order.len()];
    let mut seen: HashMap<u32, u64> = HashMap::new();
    for (at, page) in order.iter().enumerate().rev() {
        next[at] = seen.insert(*page, at as u64).unwrap_or(Min::NEVER);
    }
    next
}

/// How many uses of `order` find their page resident under MIN with `frames` frames, if every missing page is brought
/// in at its use. No policy that brings in one page at a time has more hits. Pages go by numbers. Takes O(n log frames)
/// steps for `n` uses.
pub fn min_hits(order: &[u32], frames: usize) -> u64 {
    let mut min = Min::new(frames);
    next_uses(order).into_iter().for_each(|next| min.used(next, false));
    min.hits()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cycle_larger_than_memory_hits_all_but_one_frame() {
        let pass: Vec<u32> = (0..10).collect();
        let three = pass.repeat(3);
        // On a cycle of N pages MIN keeps M - 1 of them a pass once warm: (M - 1) of every N - 1 uses.
        let hits = min_hits(&three, 4);
        assert!((6..=8).contains(&hits), "{hits}");
        assert_eq!(min_hits(&three, 10), 20);
        assert_eq!(min_hits(&three, 0), 0);
    }

    /// MIN with a look at each frame's page: hits, and pages written back.
    fn with_pages(uses: &[(u32, bool)], frames: usize) -> (u64, u64) {
        let mut resident: Vec<(u32, bool)> = Vec::new();
        let (mut hits, mut written) = (0, 0);
        for (at, (page, write)) in uses.iter().enumerate() {
            if let Some(found) = resident.iter_mut().find(|found| found.0 == *page) {
                hits += 1;
                found.1 |= write;
                continue;
            }
            if resident.len() == frames {
                let next = |page: u32| uses[at..].iter().position(|used| used.0 == page).unwrap_or(usize::MAX);
                // Of pages that are never used again, a clean one.
                let last = (0..frames).max_by_key(|frame| (next(resident[*frame].0), !resident[*frame].1)).unwrap();
                written += u64::from(resident.remove(last).1);
            }
            resident.push((*page, *write));
        }
        (hits, written)
    }

    #[test]
    fn dirty_pages_are_written_back_when_they_go() {
        let mut random = crate::random::Random(5);
        for round in 0..200 {
            let pages = 3 + random.below(12);
            let uses: Vec<(u32, bool)> = (0..120).map(|_| (random.below(pages), random.below(3) == 0)).collect();
            let frames = 1 + round % 6;
            let order: Vec<u32> = uses.iter().map(|used| used.0).collect();
            let mut min = Min::new(frames);
            next_uses(&order).into_iter().zip(&uses).for_each(|(next, used)| min.used(next, used.1));
            assert_eq!((min.hits(), min.written_back()), with_pages(&uses, frames), "{frames} frames, {uses:?}");
        }
        let mut none = Min::new(0);
        none.used(1, true);
        none.used(Min::NEVER, false);
        assert_eq!((none.hits(), none.written_back()), (0, 1));
    }

    #[test]
    fn what_is_compared_covers_the_same_uses() {
        let mut trace = Trace::default();
        let page = 7;
        for n in 0..Trace::LIMIT + 10 {
            let taken = trace.clone();
            trace.push(page, n % 4 == 0);
            if n == Trace::PART + 5 {
                let early = taken.optimum(1);
                assert_eq!((early.uses, early.hits, early.truncated), (n as u64, n as u64 - 1, false));
                assert_eq!(early.actual_hits, n.div_ceil(4) as u64);
            }
        }
        let limit = Trace::LIMIT as u64;
        let all = trace.optimum(1);
        assert_eq!(all, Optimum { uses: limit, hits: limit - 1, actual_hits: limit / 4, truncated: true });
        assert!(all.actual_ratio() <= all.ratio());
    }

    /// The textbook reference string with 3 frames has 9 faults of 20.
    #[test]
    fn textbook_reference_string() {
        let string = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1];
        assert_eq!(string.len() as u64 - min_hits(&string, 3), 9);
    }
}
