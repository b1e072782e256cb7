//! What blocks of quantised weights look like, for kernels that are compiled for one type each.

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

use super::x86::Rows;
use super::{BLOCK, E2M1, GROUP, IQ4, Q8Group, WeightType};

pub const Q4_0: u32 = WeightType::Q4_0 as u32;
pub const Q4_1: u32 = WeightType::Q4_1 as u32;
pub const Q8_0: u32 = WeightType::Q8_0 as u32;
pub const Q4_K: u32 = WeightType::Q4_K as u32;
pub const Q5_K: u32 = WeightType::Q5_K as u32;
pub const Q6_K: u32 = WeightType::Q6_K as u32;
pub const IQ4_NL: u32 = WeightType::IQ4_NL as u32;
pub const IQ4_XS: u32 = WeightType::IQ4_XS as u32;
pub const MXFP4: u32 = WeightType::MXFP4 as u32;

/// Rows that are unpacked at a time for many vectors.
pub const ROWS: usize = 4;
/// How many bytes before they are used those of the next rows are fetched.
pub const AHEAD: usize = 4096;
/// So many bytes of vectors are multiplied with one row after the other: what the second cache holds beside the rows.
pub const VECTORS_BYTES: usize = 384 << 10;

/// Calls the function of a type: those of each instruction set are compiled for one type each.
macro_rules! for_kind {
    ($dtype:expr, $function:ident, $arguments:tt) => {
        match $dtype {
            WeightType::Q4_0 => $function::<Q4_0> $arguments,
            WeightType::Q4_1 => $function::<Q4_1> $arguments,
            WeightType::Q8_0 => $function::<Q8_0> $arguments,
            WeightType::Q4_K => $function::<Q4_K> $arguments,
            WeightType::Q5_K => $function::<Q5_K> $arguments,
            WeightType::IQ4_NL => $function::<IQ4_NL> $arguments,
            WeightType::IQ4_XS => $function::<IQ4_XS> $arguments,
            WeightType::MXFP4 => $function::<MXFP4> $arguments,
            _ => $function::<Q6_K> $arguments,
        }
    };
}
pub(super) use for_kind;

/// Multiplies each row with one vector after the other. `one` gets a row, a vector, and what to fetch meanwhile.
#[inline(always)]
pub fn one_by_one(job: Rows<'_>, vectors: &[Q8Group], out: &mut [f32], one: impl Fn(&[u8], &[Q8Group], &[u8]) -> f32) {
    let Rows { k, row_bytes, rows, m } = job;
    let each = (k / BLOCK).div_ceil(GROUP);
    for (r, out) in (0..rows.len() / row_bytes).zip(out.chunks_exact_mut(m)) {
        let rest = &rows[r * row_bytes..];
        for (vector, out) in vectors.chunks_exact(each).zip(out) {
            *out = one(&rest[..row_bytes], vector, rest.get(AHEAD..).unwrap_or_default());
        }
    }
}

pub const fn block_bytes(kind: u32) -> usize {
    match kind {
        MXFP4 => 17,
        Q4_0 | IQ4_NL => 18,
        Q4_1 => 20,
        Q8_0 => 34,
        IQ4_XS => 136,
        Q4_K => 144,
        Q5_K => 176,
        _ => 210,
    }
}

/// Bytes of eight blocks of 32 elements.
pub const fn eight_bytes(kind: u32) -> usize {
    match kind {
        Q4_0 | Q4_1 | Q8_0 | IQ4_NL | MXFP4 => 8 * block_bytes(kind),
        _ => block_bytes(kind),
    }
}

/// What the quants of a type with a table stand for, larger by `offset`.
pub const fn table(kind: u32, offset: u8) -> [u8; 16] {
    let table = if kind == MXFP4 { E2M1 } else { IQ4 };
    let mut larger = [0; 16];
    let mut i = 0;
    while i < 16 {
        larger[i] = (table[i] as u8).wrapping_add(offset);
        i += 1;
    }
    larger
}

/// `N` bytes of `b` from `at`. Callers pass constant ranges, so the check disappears.
#[inline(always)]
pub fn part<const N: usize>(b: &[u8], at: usize) -> &[u8; N] {
    match b[at..].first_chunk::<N>() {
        Some(part) => part,
        None => &[0; N],
    }
}

#[inline(always)]
pub fn word(b: &[u8], at: usize) -> i32 {
    i32::from_le_bytes(*part(b, at))
}

/// The eight scales and the eight minima of a block of Q4_K or Q5_K, a byte each.
#[inline(always)]
pub fn scale_bytes(s: &[u8; 12]) -> (u64, u64) {
    let (a, b, c) = (word(s, 0) as u32, word(s, 4) as u32, word(s, 8) as u32);
    let (low, two) = (0x3F3F_3F3F, 0x3030_3030);
    let scale = (a & low, (c & 0x0F0F_0F0F) | ((a >> 2) & two));
    let min = (b & low, ((c >> 4) & 0x0F0F_0F0F) | ((b >> 2) & two));
    let both = |(low, high): (u32, u32)| u64::from(low) | u64::from(high) << 32;
    (both(scale), both(min))
}

/// Asks for the cache line in which `bytes` begins.
#[inline(always)]
pub fn fetch(bytes: &[u8]) {
    // SAFETY: a prefetch of any address does no harm.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().cast()) }
}
