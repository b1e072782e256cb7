//! Compresses blocks without loss: all bytes at even places in one zstd frame, then those at odd places in another.
//!
//! Keys and values are mostly numbers of two bytes. The one byte, of sign and exponent, has few values; the other looks
//! random. Apart, the one compresses well, and zstd passes over the other quickly. In one frame, small blocks would
//! share one table of codes.

use std::io::{self, Read};

/// How zstd compresses: 1 is its fastest usual level.
const LEVEL: i32 = 1;

/// The bytes packed, if they are fewer then.
pub fn pack(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut apart = vec![0; bytes.len()];
    let (even, odd) = apart.split_at_mut(bytes.len().div_ceil(2));
    for ((even, odd), pair) in even.iter_mut().zip(odd.iter_mut()).zip(bytes.chunks_exact(2)) {
        (*even, *odd) = (pair[0], pair[1]);
    }
    if let Some((last, [lone])) = even.last_mut().zip(bytes.chunks_exact(2).remainder().first_chunk()) {
        *last = *lone;
    }
    let mut packed = zstd::bulk::compress(even, LEVEL).ok()?;
    packed.append(&mut zstd::bulk::compress(odd, LEVEL).ok()?);
    (packed.len() < bytes.len()).then_some(packed)
}

/// Undoes [`pack`]. False if these bytes are not what it made of as many as `into` has.
pub fn unpack(packed: &[u8], into: &mut [u8]) -> bool {
    let mut apart = vec![0; into.len()];
    if !zstd::bulk::decompress_to_buffer(packed, &mut apart).is_ok_and(|bytes| bytes == into.len()) {
        return false;
    }
    let (even, odd) = apart.split_at(into.len().div_ceil(2));
    let mut pairs = into.chunks_exact_mut(2);
    for ((pair, even), odd) in pairs.by_ref().zip(even).zip(odd) {
        pair.copy_from_slice(&[*even, *odd]);
    }
    if let Some((lone, last)) = pairs.into_remainder().first_mut().zip(even.last()) {
        *lone = *last;
    }
    true
}

/// Whether [`unpack`] would give so many bytes. None are kept.
pub fn is_packed(packed: &[u8], bytes: u64) -> bool {
    let Ok(unpacked) = zstd::stream::read::Decoder::with_buffer(packed) else { return false };
    io::copy(&mut unpacked.take(bytes + 1), &mut io::sink()).is_ok_and(|unpacked| unpacked == bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_the_same_again() {
        for count in [0_usize, 1, 2, 3, 100, 4095, 4096, 70_001] {
            let bytes: Vec<u8> = (0..count).map(|at| (at / 5 % 3) as u8).collect();
            let Some(packed) = pack(&bytes) else {
                assert!(count < 100);
                continue;
            };
            let mut into = vec![7; count];
            assert!(unpack(&packed, &mut into) && into == bytes, "{count}");
            assert!(is_packed(&packed, count as u64));
            assert!(!is_packed(&packed, count as u64 + 1) && !is_packed(&packed, count as u64 - 1));
            assert!(!unpack(&packed, &mut vec![0; count + 1]) && !unpack(&packed, &mut vec![0; count - 1]));
            assert!(!unpack(&packed[1..], &mut into) && !unpack(&packed[..packed.len() - 1], &mut into));
        }
    }
}
