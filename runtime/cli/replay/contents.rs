//! Made-up keys and values. They depend on all tokens up to theirs, so that a wrong block is seen.

use std::ops::Range;

use outcore_kv::{KvPart, Token};
use outcore_pager::random;

/// For each token of a sequence, a hash of all tokens up to it.
#[derive(Debug, Default)]
pub struct Contents(Vec<u64>);

impl Contents {
    /// Those of another sequence.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn extend(&mut self, tokens: &[Token]) {
        let mut state = self.0.last().copied().unwrap_or(0);
        self.0.extend(tokens.iter().map(|token| {
            state = random::nth(state ^ u64::from(token.get()));
            state
        }));
    }

    /// Writes the keys, or the values, of a token in a layer.
    pub fn row(&self, position: u64, layer: u32, part: KvPart, row: &mut [u8]) {
        let state = self.0.get(position as usize).copied().unwrap_or(0);
        let mut word = random::nth(state ^ (u64::from(layer) << 1 | u64::from(part == KvPart::Values)));
        for bytes in row.chunks_mut(8) {
            bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
            word = word.rotate_left(7).wrapping_add(0x9E37_79B9_7F4A_7C15);
        }
    }
}

/// Positions in the block of this number.
pub fn in_block(positions: &Range<u64>, nth: u64, each: u64) -> Range<u64> {
    positions.start.max(nth * each)..positions.end.min((nth + 1) * each)
}
