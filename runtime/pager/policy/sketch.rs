//! How often pages were used lately, in a few bits.

/// A count-min sketch of four rows of four-bit counters: estimates are never too low, but for the cap of 15 and the
/// ageing. A use raises only those of a page's counters that are lowest (conservative update).
///
/// G. Cormode and S. Muthukrishnan, "An improved data stream summary: the count-min sketch and its applications", Journal
/// of Algorithms 55(1), 2005. Ageing, as in G. Einziger, R. Friedman and B. Manes (see
/// [`WTinyLfuPolicy`](super::wtinylfu::WTinyLfuPolicy)): after so many uses that were counted all counters are halved.
#[derive(Debug, Default)]
pub(super) struct Sketch {
    /// Four rows, one after the other; each word has 16 counters.
    words: Vec<u64>,
    /// Counters of a row, less one: a power of two, less one.
    mask: u32,
    counted: u64,
    period: u64,
}

const ROWS: usize = 4;
const COUNTERS: u32 = 16;
const COUNT_MAX: u64 = 15;
/// The low three bits of every counter.
const HALVED: u64 = 0x7777_7777_7777_7777;
/// Odd numbers with as many ones as zeros, one a row.
const SEEDS: [u64; ROWS] = [0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB, 0xC2B2_AE3D_27D4_EB4F];

impl Sketch {
    /// For so many pages whose counts matter; ages after ten times as many uses. Forgets everything.
    pub(super) fn reset(&mut self, pages: u32) {
        let counters = pages.clamp(COUNTERS, 1 << 30).next_power_of_two() * 2;
        self.mask = counters - 1;
        self.words = vec![0; ROWS * (counters / COUNTERS) as usize];
        self.counted = 0;
        self.period = 10 * u64::from(pages.max(1));
    }

    /// Word and shift of a page's counter in each row.
    fn places(&self, number: u32) -> [(usize, u32); ROWS] {
        let row_words = self.words.len() / ROWS;
        std::array::from_fn(|row| {
            let mixed = (u64::from(number) + 1).wrapping_mul(SEEDS[row]);
            let counter = (mixed ^ mixed >> 32).wrapping_mul(SEEDS[(row + 1) % ROWS]) >> 32;
            let counter = counter as u32 & self.mask;
            (row * row_words + (counter / COUNTERS) as usize, counter % COUNTERS * 4)
        })
    }

    /// Uses of the page, at least as many as were counted since the last ageing and half of those before; 15 at most.
    pub(super) fn estimate(&self, number: u32) -> u8 {
        if self.words.is_empty() {
            return 0;
        }
        let counts = self.places(number).map(|(word, shift)| self.words[word] >> shift & COUNT_MAX);
        counts.into_iter().min().unwrap_or(0) as u8
    }

    /// Counts a use. Once in a while it takes as long as the sketch is large.
    pub(super) fn count(&mut self, number: u32) {
        if self.words.is_empty() {
            return;
        }
        let lowest = u64::from(self.estimate(number));
        if lowest < COUNT_MAX {
            for (word, shift) in self.places(number) {
                if self.words[word] >> shift & COUNT_MAX == lowest {
                    self.words[word] += 1 << shift;
                }
            }
        }
        self.counted += 1;
        if self.counted >= self.period {
            self.words.iter_mut().for_each(|word| *word = *word >> 1 & HALVED);
            self.counted /= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn estimates_are_never_too_low_and_rarely_too_high() {
        let mut sketch = Sketch::default();
        sketch.reset(1_000);
        let mut counts: HashMap<u32, u64> = HashMap::new();
        let mut x = 1u32;
        for _ in 0..9_000 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Small numbers more often.
            let number = (x >> 8) % ((x >> 24) * 4 + 1);
            sketch.count(number);
            *counts.entry(number).or_default() += 1;
        }
        let mut high = 0;
        for (number, count) in &counts {
            let (estimate, count) = (u64::from(sketch.estimate(*number)), (*count).min(COUNT_MAX));
            assert!(estimate >= count, "{number}: {estimate} of {count}");
            high += usize::from(estimate > count);
        }
        assert!(high * 20 < counts.len(), "{high} of {} are too high", counts.len());
    }

    #[test]
    fn ageing_halves() {
        let mut sketch = Sketch::default();
        sketch.reset(2);
        for _ in 0..12 {
            sketch.count(7);
        }
        assert_eq!(sketch.estimate(7), 12);
        for _ in 0..8 {
            sketch.count(3);
        }
        assert_eq!((sketch.estimate(7), sketch.estimate(3)), (6, 4));
    }
}
