//! Chooses the blocks of a file that are read to measure its speed.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::ids::Bytes;

/// Offsets of the blocks that lie wholly inside given pieces of a file: each once, spread over all of the file.
pub(crate) struct Blocks {
    /// First offset of each piece, and how many blocks are before it.
    pieces: Vec<(u64, u64)>,
    block: u64,
    count: u64,
    stride: u64,
    /// Index of the first block. It differs each time, because drives and hosts remember what was read.
    first: u64,
    given: u64,
}

impl Blocks {
    /// The blocks of the parts of a file, each given by its start and end in bytes.
    pub fn of(written: &[(u64, u64)], block: Bytes) -> Self {
        let block = block.get().max(1);
        let (mut pieces, mut count) = (Vec::new(), 0);
        for (start, end) in written {
            let first = start.next_multiple_of(block);
            let here = end.saturating_sub(first) / block;
            if here > 0 {
                pieces.push((first, count));
                count += here;
            }
        }
        // The golden section: wherever the iteration stops, the blocks so far are spread evenly.
        let near = (count as f64 * 0.618) as u64;
        let stride = (near.max(1)..).find(|&stride| gcd(stride, count.max(1)) == 1).unwrap_or(1);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { pieces, block, count, stride, first: u64::from(now.subsec_nanos()), given: 0 }
    }

    pub fn left(&self) -> u64 {
        self.count - self.given
    }
}

impl Iterator for Blocks {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        if self.left() == 0 {
            return None;
        }
        let index = self.first as u128 + self.given as u128 * self.stride as u128;
        let index = (index % self.count as u128) as u64;
        self.given += 1;
        let piece = self.pieces.partition_point(|(_, before)| *before <= index).checked_sub(1)?;
        let (first, before) = self.pieces.get(piece)?;
        Some(first + (index - before) * self.block)
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn blocks_are_each_read_once_wherever_the_file_has_any() {
        let pieces = [(0, 3 * MIB), (4 * MIB + 5, 6 * MIB), (7 * MIB + 1, 7 * MIB + 9), (100 * MIB, 140 * MIB + 77)];
        let blocks = Blocks::of(&pieces, Bytes::mib(1));
        assert_eq!(blocks.left(), 3 + 1 + 40);
        let mut found: Vec<u64> = blocks.collect();
        // The first few are not beside each other.
        assert!(found.windows(2).filter(|two| two[0].abs_diff(two[1]) == MIB).count() < 4, "{found:?}");
        found.sort_unstable();
        let all: Vec<u64> = (0..3).chain([5]).chain(100..140).map(|block| block * MIB).collect();
        assert_eq!(found, all);
        for none in [&[][..], &[(0, 0)], &[(1, MIB)]] {
            assert_eq!(Blocks::of(none, Bytes::mib(1)).next(), None);
        }
    }
}
