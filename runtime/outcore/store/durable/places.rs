//! Which places of a file may be written: those that no kept generation names.

use std::collections::BTreeMap;
use std::ops::Range;

use super::generation::Generation;
use crate::ranges::FreeRanges;

/// Places of one size in a file, each free or in use.
///
/// # Invariants
///
/// 1. A place is free, or taken, or left: the newest generations do not name it, but an older one does that is kept.
/// 2. Places are taken in ascending order, beginning anew at the end of the file. So what is written in a sweep is
///    written in one run, as far as places are free.
#[derive(Debug, Default)]
pub(crate) struct Places {
    count: u64,
    free: FreeRanges,
    /// The place that is taken next, if it is free.
    next: u64,
    /// Places that are left, by the last generation that names them.
    left: BTreeMap<Generation, Vec<u64>>,
}

impl Places {
    /// How many there are.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// How many are free.
    pub(crate) fn free(&self) -> u64 {
        self.free.total()
    }

    /// Makes it `count` places, if it has fewer. The new ones are free.
    pub(crate) fn grow(&mut self, count: u64) {
        if count > self.count {
            self.free.give(self.count, count - self.count, &(0..count));
            self.count = count;
        }
    }

    /// Makes it `count` places, if it has more. Those behind them are free.
    pub(crate) fn shrink(&mut self, count: u64) {
        let behind = |last: &Range<u64>| last.end == self.count && last.contains(&count);
        if let Some(last) = self.free.last().filter(behind) {
            self.free.remove(last.start);
            self.count = count;
            if last.start < count {
                self.free.give(last.start, count - last.start, &(0..count));
            }
        }
    }

    /// Takes a free place.
    pub(crate) fn take(&mut self) -> Option<u64> {
        let taken = self.free.take_one_from(self.next)?;
        self.next = taken + 1;
        Some(taken)
    }

    /// Takes this place. Returns whether it was free.
    pub(crate) fn take_this(&mut self, place: u64) -> bool {
        self.free.take_this(place)
    }

    /// A place that was taken is free: no generation names it.
    pub(crate) fn give(&mut self, place: u64) {
        self.free.give(place, 1, &(0..self.count));
    }

    /// A place that was taken is free as soon as `last` is not kept any more, the last generation that names it.
    pub(crate) fn leave(&mut self, place: u64, last: Generation) {
        self.left.entry(last).or_default().push(place);
    }

    /// A place that is free so far is named by `last`, and by no newer generation. Returns whether it was free.
    pub(crate) fn is_left(&mut self, place: u64, last: Generation) -> bool {
        let was_free = self.take_this(place);
        if was_free {
            self.leave(place, last);
        }
        was_free
    }

    /// Frees the places that only generations before `oldest` name.
    pub(crate) fn forget_before(&mut self, oldest: Generation) {
        let kept = self.left.split_off(&oldest);
        for place in std::mem::replace(&mut self.left, kept).into_values().flatten() {
            self.give(place);
        }
    }
}
