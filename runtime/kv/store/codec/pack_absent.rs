//! Stands in for `pack` in a build without the feature `compression`. Stores with compressed blocks are refused before
//! any of them is read.

/// Compresses nothing.
pub fn pack(_bytes: &[u8]) -> Option<Vec<u8>> {
    None
}

/// Nothing was compressed.
pub fn unpack(_packed: &[u8], _into: &mut [u8]) -> bool {
    false
}

/// Nothing was compressed.
pub fn is_packed(_packed: &[u8], _bytes: u64) -> bool {
    false
}
