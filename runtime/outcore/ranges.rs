//! Free ranges of addresses or of slots of a file: handed out where they fit best, and joined again. A step takes time
//! that grows with the logarithm of the number of ranges. The sum of what is free is kept.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Free ranges. No two of them touch within one arena.
#[derive(Debug, Default)]
pub(crate) struct FreeRanges {
    by_start: BTreeMap<u64, u64>,
    /// The same, by length and start.
    by_len: BTreeSet<(u64, u64)>,
    /// The sum of their lengths.
    total: u64,
}

impl FreeRanges {
    /// How much is free in all.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// The range that comes last.
    pub(crate) fn last(&self) -> Option<Range<u64>> {
        self.by_start.last_key_value().map(|(start, len)| *start..start + len)
    }

    /// The ranges, in order.
    #[cfg(test)]
    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.by_start.iter().map(|(start, len)| *start..start + len)
    }

    fn insert(&mut self, start: u64, len: u64) {
        if len > 0 {
            self.by_start.insert(start, len);
            self.by_len.insert((len, start));
            self.total += len;
        }
    }

    /// Takes out the range that starts at `start`, if there is one, and returns its length.
    pub(crate) fn remove(&mut self, start: u64) -> Option<u64> {
        let len = self.by_start.remove(&start)?;
        self.by_len.remove(&(len, start));
        self.total -= len;
        Some(len)
    }

    /// Takes a range of `len` from the first of the smallest free ranges that hold it, and returns its start.
    pub(crate) fn take(&mut self, len: u64) -> Option<u64> {
        let &(found, start) = self.by_len.range((len, 0)..).next()?;
        self.remove(start);
        self.insert(start + len, found - len);
        Some(start)
    }

    /// Takes the first one that is free from `from` on; where none is, the first one of all.
    pub(crate) fn take_one_from(&mut self, from: u64) -> Option<u64> {
        if self.take_this(from) {
            return Some(from);
        }
        let behind = self.by_start.range(from..).next().or_else(|| self.by_start.first_key_value());
        let start = *behind?.0;
        self.take_this(start).then_some(start)
    }

    /// Takes this one out of the range that it is in. Returns whether it was free.
    pub(crate) fn take_this(&mut self, one: u64) -> bool {
        let around = self.by_start.range(..=one).next_back().map(|(start, len)| (*start, start + len));
        let Some((start, end)) = around.filter(|(_, end)| one < *end) else { return false };
        self.remove(start);
        self.insert(start, one - start);
        self.insert(one + 1, end - one - 1);
        true
    }

    /// Frees a range of `arena` and joins it with its free neighbours there. Returns the joined range.
    pub(crate) fn give(&mut self, start: u64, len: u64, arena: &Range<u64>) -> Range<u64> {
        let (mut first, mut end) = (start, start + len);
        let before = self.by_start.range(..first).next_back().map(|(start, len)| (*start, start + len));
        if let Some((before, before_end)) = before
            && before_end == first
            && before >= arena.start
        {
            self.remove(before);
            first = before;
        }
        if end < arena.end
            && let Some(len) = self.remove(end)
        {
            end += len;
        }
        self.insert(first, end - first);
        first..end
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn neighbours_of_two_arenas_stay_apart() {
        let mut free = FreeRanges::default();
        assert_eq!(free.give(100, 10, &(100..110)), 100..110);
        assert_eq!(free.give(110, 10, &(110..120)), 110..120);
        assert_eq!(free.take(11), None);
        assert_eq!((free.take(10), free.take(10)), (Some(100), Some(110)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Ranges that are handed out never overlap. In the end all of them are one free range again.
        #[test]
        fn what_is_handed_out_is_disjoint(
            steps in prop::collection::vec((any::<bool>(), 1u64..40, any::<prop::sample::Index>()), 1..200)
        ) {
            let arena = 1000..2000;
            let mut free = FreeRanges::default();
            free.give(1000, 1000, &arena);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (keep, len, which) in steps {
                if keep || held.is_empty() {
                    held.extend(free.take(len).map(|start| (start, len)));
                } else {
                    let (start, len) = held.swap_remove(which.index(held.len()));
                    free.give(start, len, &arena);
                }
                let mut spans = held.clone();
                spans.extend(free.ranges().map(|range| (range.start, range.end - range.start)));
                prop_assert_eq!(free.total() + held.iter().map(|(_, len)| len).sum::<u64>(), 1000);
                spans.sort_unstable();
                let mut at = arena.start;
                for (start, len) in spans {
                    prop_assert_eq!(start, at);
                    at += len;
                }
                prop_assert_eq!(at, arena.end);
                prop_assert_eq!(free.by_start.len(), free.by_len.len());
            }
            for (start, len) in held {
                free.give(start, len, &arena);
            }
            prop_assert_eq!(free.by_start, BTreeMap::from([(1000, 1000)]));
        }
    }
}
