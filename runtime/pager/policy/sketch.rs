//! Estimates how often pages were used lately, in a few bits.

use crate::random::nth;

/// A count-min sketch of four-bit counters. Apart from the cap of 15 and the ageing, estimates are never too low. A use
/// raises only the lowest of a page's counters (conservative update).
///
/// G. Cormode and S. Muthukrishnan, "An improved data stream summary: the count-min sketch and its applications",
/// Journal of Algorithms 55(1), 2005. A page's four counters lie in one line of the processor's caches, as in F. Putze,
/// P. Sanders and J. Singler, "Cache-, hash- and space-efficient Bloom filters", Journal of Experimental Algorithmics
/// 14, 2009. Ageing is that of G. Einziger, R. Friedman and B. Manes (see
/// [`WTinyLfuPolicy`](super::wtinylfu::WTinyLfuPolicy)): after a fixed number of counted uses all counters are halved.
#[derive(Debug, Default)]
pub(super) struct Sketch {
    lines: Vec<Line>,
    /// The number of lines, a power of two, less one.
    mask: u32,
    counted: u64,
    period: u64,
}

/// Four rows of 32 counters; each word has 16.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Line([u64; 8]);

const ROWS: usize = 4;
const COUNT_MAX: u64 = 15;
/// Pages for each line: eight counters for each page.
const PAGES_PER_LINE: u32 = 16;
/// The low three bits of every counter.
const HALVED: u64 = 0x7777_7777_7777_7777;

/// Word and shift of a page's counter in each row of its line.
fn places(mixed: u64) -> [(usize, u32); ROWS] {
    std::array::from_fn(|row| {
        let bits = (mixed >> (5 * row)) as usize;
        (2 * row + (bits >> 4 & 1), (bits & 15) as u32 * 4)
    })
}

impl Sketch {
    /// Forgets everything, and makes room for this many pages. Ages after ten times as many uses.
    pub(super) fn reset(&mut self, pages: u32) {
        let lines = pages.clamp(1, 1 << 30).div_ceil(PAGES_PER_LINE).next_power_of_two();
        self.mask = lines - 1;
        self.lines = vec![Line([0; 8]); lines as usize];
        self.counted = 0;
        self.period = 10 * u64::from(pages.max(1));
    }

    /// The page's uses: at least those counted since the last ageing and half of those before; at most 15.
    pub(super) fn estimate(&self, number: u32) -> u8 {
        let mixed = nth(u64::from(number));
        let Some(Line(words)) = self.lines.get((mixed >> 32) as usize & self.mask as usize) else { return 0 };
        let counts = places(mixed).map(|(word, shift)| words[word] >> shift & COUNT_MAX);
        counts.into_iter().min().unwrap_or(0) as u8
    }

    /// Counts a use. Once a period this takes time in proportion to the sketch's size.
    pub(super) fn count(&mut self, number: u32) {
        let mixed = nth(u64::from(number));
        let Some(Line(words)) = self.lines.get_mut((mixed >> 32) as usize & self.mask as usize) else { return };
        let places = places(mixed);
        let lowest = places.map(|(word, shift)| words[word] >> shift & COUNT_MAX).into_iter().min().unwrap_or(0);
        // Without a branch that would wait for memory.
        let room = lowest < COUNT_MAX;
        for (word, shift) in places {
            let raised = room & (words[word] >> shift & COUNT_MAX == lowest);
            words[word] += u64::from(raised) << shift;
        }
        self.counted += 1;
        if self.counted >= self.period {
            let words = self.lines.iter_mut().flat_map(|line| &mut line.0);
            words.for_each(|word| *word = *word >> 1 & HALVED);
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
            // Small numbers come more often.
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
