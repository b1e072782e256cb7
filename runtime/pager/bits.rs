//! A set of small numbers: one bit each, and summaries above them, so that the next member is found in a few steps.

const WORD: usize = u64::BITS as usize;

/// A set of numbers below a size.
#[derive(Debug, Default)]
pub(super) struct Bits {
    /// `levels[0]` has a bit for each number. `levels[k + 1]` has a bit for each word of `levels[k]`, set if that is
    /// not 0.
    levels: Vec<Vec<u64>>,
    count: usize,
}

impl Bits {
    /// An empty set for numbers below `size`.
    pub(super) fn new(size: usize) -> Self {
        let mut levels = Vec::new();
        let mut words = size.div_ceil(WORD).max(1);
        loop {
            levels.push(vec![0; words]);
            if words == 1 {
                break;
            }
            words = words.div_ceil(WORD);
        }
        Self { levels, count: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Lets the set have numbers below `size`. It never gets smaller.
    pub(super) fn reach(&mut self, size: usize) {
        let reached = self.levels.first().map_or(0, |level| level.len() * WORD);
        if size <= reached {
            return;
        }
        let mut larger = Self::new(size.max(reached + reached / 2));
        let mut next = self.first_from(0);
        while let Some(n) = next {
            larger.insert(n);
            next = self.first_from(n + 1);
        }
        *self = larger;
    }

    /// Whether the set has this number. The number may be of any size.
    pub(super) fn contains(&self, n: usize) -> bool {
        self.levels.first().and_then(|level| level.get(n / WORD)).is_some_and(|word| word & (1 << (n % WORD)) != 0)
    }

    pub(super) fn insert(&mut self, n: usize) {
        self.count += usize::from(!self.contains(n));
        let mut n = n;
        for level in &mut self.levels {
            let word = &mut level[n / WORD];
            let known = *word != 0;
            *word |= 1 << (n % WORD);
            if known {
                break;
            }
            n /= WORD;
        }
    }

    /// Removes a number. Returns whether it was there.
    pub(super) fn remove(&mut self, n: usize) -> bool {
        if !self.contains(n) {
            return false;
        }
        self.count -= 1;
        let mut n = n;
        for level in &mut self.levels {
            let word = &mut level[n / WORD];
            *word &= !(1 << (n % WORD));
            if *word != 0 {
                break;
            }
            n /= WORD;
        }
        true
    }

    pub(super) fn clear(&mut self) {
        self.levels.iter_mut().for_each(|level| level.fill(0));
        self.count = 0;
    }

    /// The largest member below `end`.
    pub(super) fn last_below(&self, end: usize) -> Option<usize> {
        let mut last = end.min(self.levels[0].len() * WORD).checked_sub(1)?;
        for (at, level) in self.levels.iter().enumerate() {
            let low = level[last / WORD] & (u64::MAX >> (WORD - 1 - last % WORD));
            if low != 0 {
                let n = last / WORD * WORD + low.ilog2() as usize;
                return Some(self.descend(at, n, |word| word.ilog2() as usize));
            }
            last = (last / WORD).checked_sub(1)?;
        }
        None
    }

    /// The smallest member that is at least `start`.
    pub(super) fn first_from(&self, start: usize) -> Option<usize> {
        let mut start = start;
        for (at, level) in self.levels.iter().enumerate() {
            let high = level.get(start / WORD).map_or(0, |word| word & (u64::MAX << (start % WORD)));
            if high != 0 {
                let n = start / WORD * WORD + high.trailing_zeros() as usize;
                return Some(self.descend(at, n, |word| word.trailing_zeros() as usize));
            }
            start = start / WORD + 1;
        }
        None
    }

    /// The member below bit `n` of a level. `bit` chooses the bit in each word on the way down.
    fn descend(&self, level: usize, mut n: usize, bit: impl Fn(u64) -> usize) -> usize {
        for below in self.levels[..level].iter().rev() {
            n = n * WORD + bit(below[n]);
        }
        n
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn does_what_a_tree_would() {
        let mut none = Bits::default();
        assert!(!none.contains(7) && !none.remove(7) && none.first_from(0).is_none());
        none.reach(1);
        none.insert(0);
        none.reach(100_000);
        none.insert(99_999);
        assert_eq!((none.len(), none.first_from(1), none.contains(1 << 40)), (2, Some(99_999), false));
        for size in [1usize, 63, 64, 65, 4_096, 4_097, 300_000] {
            let mut bits = Bits::new(size);
            let mut model = BTreeSet::new();
            let mut x = 1u32;
            for _ in 0..3_000 {
                x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let n = (x >> 4) as usize % size;
                match x >> 30 {
                    0 | 1 => {
                        bits.insert(n);
                        model.insert(n);
                    }
                    2 => assert_eq!(bits.remove(n), model.remove(&n)),
                    _ if x >> 20 & 0x1FF == 0 => {
                        bits.clear();
                        model.clear();
                    }
                    _ => {}
                }
                assert_eq!(bits.contains(n), model.contains(&n));
                assert_eq!(bits.len(), model.len());
                assert_eq!(bits.first_from(n), model.range(n..).next().copied());
                assert_eq!(bits.last_below(n), model.range(..n).next_back().copied());
                assert_eq!(bits.last_below(size), model.last().copied());
                assert_eq!(bits.first_from(size), None);
            }
        }
    }
}
