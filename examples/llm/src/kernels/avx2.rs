//! Kernels for quantised weights on 256-bit registers, for processors with AVX2, FMA and F16C.
//!
//! What one row and one vector give is defined as for [512-bit registers](super::avx512), and computed in two ways as
//! there: for one vector, registers hold eight blocks of a row ([`one_row`]); for many, one block of eight vectors
//! ([`many`]), and four rows are unpacked once for all of them.
//!
//! The product of bytes takes unsigned weights and signed values, and sums of two products saturate at 2^15. Types
//! whose weights are small enough count [from their least](offset) and are summed in 16 bits for as long as that
//! [holds](fits); the others are multiplied by their size, with the sign moved to the value.

use std::arch::x86_64::*;

use super::blocks::{
    IQ4_NL, IQ4_XS, MXFP4, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0, ROWS, VECTORS_BYTES, block_bytes, eight_bytes, fetch,
    for_kind, one_by_one, part, scale_bytes, table, word,
};
use super::x86::{Rows, load_ps, load16, load32, store_ps};
use super::{BLOCK, LANES, Q8Group, Q8Lanes, Quantised, Quants, WeightType, half_power, iq4_scale};

/// Vectors from which computing for eight at once is quicker than one after the other.
const MANY: usize = 4;
/// Vectors that one register holds a block of.
const WIDE: usize = 8;

/// Whether vectors are to be laid out in lanes when there are `m`.
pub fn wants_lanes(m: usize) -> bool {
    m >= MANY
}

/// Quantises one block, with the bits of [`quantise_plainly`](super::quantise_plainly).
#[target_feature(enable = "avx2,fma,f16c")]
pub fn quantise(x: &[f32; BLOCK]) -> Quants {
    super::quantise_plainly(x)
}

/// Multiplies rows with vectors that are quantised.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn rows(dtype: WeightType, job: Rows<'_>, acts: &Quantised, out: &mut [f32]) {
    for_kind!(dtype, drive, (job, acts, out))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn drive<const KIND: u32>(job: Rows<'_>, acts: &Quantised, out: &mut [f32]) {
    let Rows { k, row_bytes, rows, m } = job;
    let blocks = k / BLOCK;
    let Quantised { groups, lanes } = acts;
    if lanes.is_empty() {
        return one_by_one(job, groups, out, |row, groups, ahead| one_row::<KIND>(row, groups, ahead));
    }
    let mut tile = vec![Tile::ZERO; blocks.next_multiple_of(4)];
    let some = (VECTORS_BYTES / (tile.len() * size_of::<Q8Lanes>()).max(1)).max(1);
    // Vectors that stay in the second cache while all rows are multiplied with them.
    for (first, lanes) in lanes.chunks(some * tile.len()).enumerate().map(|(nth, lanes)| (nth * some, lanes)) {
        let mut fours = rows.chunks(ROWS * row_bytes).zip(out.chunks_mut(ROWS * m)).peekable();
        while let Some((rows, out)) = fours.next() {
            let mut next = fours.peek().map_or(&[][..], |(next, _)| next);
            for (r, row) in rows.chunks_exact(row_bytes).enumerate() {
                unpack::<KIND>(row, &mut tile, r);
            }
            for (nth, lanes) in lanes.chunks(tile.len()).enumerate() {
                let at = (first + nth) * LANES;
                let sums = if m - at > WIDE {
                    many::<KIND, 2>(&tile, lanes, next)
                } else {
                    let [low] = many::<KIND, 1>(&tile, lanes, next);
                    [low, [[0.0; WIDE]; ROWS]]
                };
                next = &[];
                for (r, out) in out.chunks_exact_mut(m).enumerate() {
                    for (sums, out) in sums.iter().zip(out[at..].chunks_mut(WIDE)) {
                        out.copy_from_slice(&sums[r][..out.len()]);
                    }
                }
            }
        }
    }
}

/// By how much weights are larger where they are multiplied than what they stand for.
const fn offset(kind: u32) -> u8 {
    match kind {
        Q4_0 => 8,
        MXFP4 => 12,
        Q6_K => 32,
        _ => 0,
    }
}

/// Whether weights are too large for products without sign.
const fn signed(kind: u32) -> bool {
    matches!(kind, Q8_0 | IQ4_NL | IQ4_XS)
}

/// How many sums of two products 16 bits hold, at most 8: `2 * 128 * largest weight` each.
const fn fits(kind: u32) -> usize {
    match kind {
        Q4_0 | Q4_1 | Q4_K => 8,
        Q5_K | MXFP4 => 4,
        Q6_K => 2,
        _ => 1,
    }
}

// ---- one vector: registers hold eight blocks of a row ----

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn one_row<const KIND: u32>(row: &[u8], groups: &[Q8Group], ahead: &[u8]) -> f32 {
    let each = eight_bytes(KIND);
    let mut acc = _mm_setzero_ps();
    let whole = row.len() / each;
    let mut ahead = ahead.chunks(each);
    for (nth, bytes) in row.chunks_exact(each).enumerate() {
        ahead.next().unwrap_or_default().chunks(64).for_each(fetch);
        let (term, scale) = eight_blocks::<KIND>(bytes, &groups[nth / 2], nth % 2);
        acc = _mm_fmadd_ps(_mm256_castps256_ps128(scale), _mm256_castps256_ps128(term), acc);
        acc = _mm_fmadd_ps(_mm256_extractf128_ps::<1>(scale), _mm256_extractf128_ps::<1>(term), acc);
    }
    let rest = &row[whole * each..];
    if !rest.is_empty() {
        let mut padded = [0u8; 8 * 34];
        padded[..rest.len()].copy_from_slice(rest);
        let (term, scale) = eight_blocks::<KIND>(&padded[..each], &groups[whole / 2], whole % 2);
        acc = _mm_fmadd_ps(_mm256_castps256_ps128(scale), _mm256_castps256_ps128(term), acc);
        // As many blocks as many vectors have: the next multiple of four.
        if rest.len() > each / 2 {
            acc = _mm_fmadd_ps(_mm256_extractf128_ps::<1>(scale), _mm256_extractf128_ps::<1>(term), acc);
        }
    }
    let two = _mm_add_ps(acc, _mm_movehl_ps(acc, acc));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

/// What eight blocks add, with the first or the second half of a group of the vector, but for the vector's scales, and
/// those.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn eight_blocks<const KIND: u32>(bytes: &[u8], y: &Q8Group, side: usize) -> (__m256, __m256) {
    let scale = load_ps(&y.scale.as_chunks().0[side]);
    let y_of = |b: usize| &y.q[8 * side + b];
    let four = |first: usize| [0, 1, 2, 3].map(|b| pairs::<KIND>(bytes, first + b, y_of(first + b)));
    if KIND == Q6_K {
        let [a, b] = [0, 4].map(|first| sum_quads(four(first).map(|p| sums(p))));
        // The sums of each block's first 16 elements, and of the others.
        let halves = [_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b)];
        // Both sums of a block, then those of the next one.
        let [a, b] = [0, 1].map(|four| load_i32(&y.half[side].as_chunks().0[four]));
        let (a, b) = (_mm256_castsi256_ps(a), _mm256_castsi256_ps(b));
        let less = [_mm256_shuffle_ps::<0x88>(a, b), _mm256_shuffle_ps::<0xDD>(a, b)]
            .map(|x| _mm256_permute4x64_epi64::<0xD8>(_mm256_castps_si256(x)))
            .map(|x| _mm256_slli_epi32::<5>(x));
        let scales = load16(part(bytes, 192));
        let apart = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
        let scales = _mm_shuffle_epi8(scales, apart);
        let scales = [scales, _mm_srli_si128::<8>(scales)].map(|s| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(s)));
        let p = [0, 1].map(|i| _mm256_cvtepi32_ps(_mm256_sub_epi32(halves[i], less[i])));
        let p = _mm256_fmadd_ps(scales[1], p[1], _mm256_mul_ps(scales[0], p[0]));
        return (_mm256_mul_ps(_mm256_set1_ps(half_at(bytes, 208)), p), scale);
    }
    let sum = load_i32(&y.sum.as_chunks().0[side]);
    let twos = || [0, 1, 2, 3].map(|b| two::<KIND>(bytes, b, [y_of(b), y_of(b + 4)]));
    let p = match KIND {
        Q4_0 | Q4_1 => sums(sum_quads16(twos())),
        IQ4_NL | IQ4_XS | MXFP4 => sum_quads(twos()),
        Q4_K | Q5_K => both_halves([0, 4].map(|first| sums(sum_quads16(four(first))))),
        _ => both_halves([0, 4].map(|first| sum_quads(four(first).map(|p| sums(p))))),
    };
    let (d, min) = scales::<KIND>(bytes);
    let term = match KIND {
        Q4_1 | Q4_K | Q5_K => _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(p), _mm256_mul_ps(min, _mm256_cvtepi32_ps(sum))),
        _ => _mm256_mul_ps(d, _mm256_cvtepi32_ps(less_offset::<KIND>(p, sum))),
    };
    (term, scale)
}

/// `p` of weights that are larger by their [`offset`], where `sum` is that of the values.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn less_offset<const KIND: u32>(p: __m256i, sum: __m256i) -> __m256i {
    match offset(KIND) {
        0 => p,
        more => _mm256_sub_epi32(p, _mm256_mullo_epi32(sum, _mm256_set1_epi32(i32::from(more)))),
    }
}

/// Sixteen sums of two products each.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn multiply<const KIND: u32>(w: __m256i, y: __m256i) -> __m256i {
    if signed(KIND) {
        return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(y, w));
    }
    _mm256_maddubs_epi16(w, y)
}

/// Sixteen sums of two products each, of block `b`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn pairs<const KIND: u32>(bytes: &[u8], b: usize, y: &[i8; BLOCK]) -> __m256i {
    multiply::<KIND>(weights::<KIND>(bytes, b), load32(y))
}

/// Sums of products of blocks `b` and `b + 4`, each in a half of the register: eight of 16 bits where those
/// [hold](fits) them, or four of 32.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn two<const KIND: u32>(bytes: &[u8], b: usize, y: [&[i8; BLOCK]; 2]) -> __m256i {
    let both = |a: __m128i, b: __m128i| _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(a), b);
    let of = |b: usize| load16(part(bytes, nibbles_at(KIND, b)));
    let (x, mask) = (both(of(b), of(b + 4)), _mm256_set1_epi8(15));
    let w = [x, _mm256_srli_epi16::<4>(x)].map(|x| stand_for::<KIND>(_mm256_and_si256(x, mask)));
    let products = [0, 1].map(|side| {
        let [a, b] = y.map(|y| load_i8(&y.as_chunks().0[side]));
        multiply::<KIND>(w[side], both(a, b))
    });
    match fits(KIND) {
        8 => _mm256_add_epi16(products[0], products[1]),
        1 => _mm256_add_epi32(sums(products[0]), sums(products[1])),
        _ => sums(_mm256_add_epi16(products[0], products[1])),
    }
}

/// Sums of two neighbours each.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sums(pairs: __m256i) -> __m256i {
    _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
}

/// The sums of the halves of eight blocks, four in each register.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn both_halves([a, b]: [__m256i; 2]) -> __m256i {
    _mm256_add_epi32(_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b))
}

/// The sums of four times eight numbers: those of the low halves, then those of the high ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sum_quads(q: [__m256i; 4]) -> __m256i {
    sum_quads_by(q, |a, b| _mm256_add_epi32(a, b))
}

/// As [`sum_quads`], of numbers of 16 bits: for each of its sums, that of the even ones and that of the odd ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sum_quads16(q: [__m256i; 4]) -> __m256i {
    sum_quads_by(q, |a, b| _mm256_add_epi16(a, b))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sum_quads_by(q: [__m256i; 4], add: impl Fn(__m256i, __m256i) -> __m256i) -> __m256i {
    let a = add(_mm256_unpacklo_epi32(q[0], q[1]), _mm256_unpackhi_epi32(q[0], q[1]));
    let b = add(_mm256_unpacklo_epi32(q[2], q[3]), _mm256_unpackhi_epi32(q[2], q[3]));
    add(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b))
}

/// Where the quants of block `b` of eight begin, of types that have them in sixteen bytes.
const fn nibbles_at(kind: u32, b: usize) -> usize {
    match kind {
        IQ4_XS => 8 + 16 * b,
        _ => (b + 1) * block_bytes(kind) - 16,
    }
}

/// Sixteen bytes as 32 nibbles: first the low ones, then the high ones.
#[inline]
#[target_feature(enable = "avx2")]
fn nibbles(bytes: &[u8; 16]) -> __m256i {
    let low = load16(bytes);
    let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), _mm_srli_epi16::<4>(low));
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

/// What these quants stand for, larger by their [`offset`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn stand_for<const KIND: u32>(nibbles: __m256i) -> __m256i {
    if let IQ4_NL | IQ4_XS | MXFP4 = KIND {
        let table = load16(&const { table(KIND, offset(KIND)) });
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles);
    }
    nibbles
}

/// The weights of block `b` of eight, larger by their [`offset`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn weights<const KIND: u32>(bytes: &[u8], b: usize) -> __m256i {
    let size = block_bytes(KIND);
    match KIND {
        Q8_0 => load32(part::<32>(bytes, b * size + 2)),
        Q4_K | Q5_K => {
            let quants = if KIND == Q5_K { 48 } else { 16 };
            let pair = load32(part::<32>(bytes, quants + b / 2 * 32));
            let shifted = if b.is_multiple_of(2) { pair } else { _mm256_srli_epi16::<4>(pair) };
            let low = _mm256_and_si256(shifted, _mm256_set1_epi8(15));
            if KIND == Q4_K {
                return low;
            }
            let bit = _mm256_set1_epi8((1u8 << b) as i8);
            let set = _mm256_cmpeq_epi8(_mm256_and_si256(load32(part::<32>(bytes, 16)), bit), bit);
            _mm256_or_si256(low, _mm256_and_si256(set, _mm256_set1_epi8(16)))
        }
        Q6_K => {
            let (half, quarter) = (b / 4, b % 4);
            let bytes_of = load32(part::<32>(bytes, half * 64 + quarter % 2 * 32));
            let four = if quarter < 2 { bytes_of } else { _mm256_srli_epi16::<4>(bytes_of) };
            let high = load32(part::<32>(bytes, 128 + half * 32));
            let two = match quarter {
                0 => _mm256_slli_epi16::<4>(high),
                1 => _mm256_slli_epi16::<2>(high),
                2 => high,
                _ => _mm256_srli_epi16::<2>(high),
            };
            let four = _mm256_and_si256(four, _mm256_set1_epi8(15));
            _mm256_or_si256(four, _mm256_and_si256(two, _mm256_set1_epi8(0x30)))
        }
        _ => stand_for::<KIND>(nibbles(part(bytes, nibbles_at(KIND, b)))),
    }
}

/// The scales of eight blocks, and what is added for each sum of values.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scales<const KIND: u32>(bytes: &[u8]) -> (__m256, __m256) {
    let size = block_bytes(KIND);
    let none = _mm256_setzero_ps();
    match KIND {
        IQ4_XS => {
            // `scales_h` is above `d`.
            let high = _mm256_set1_epi32(word(bytes, 0));
            let high = _mm256_srlv_epi32(high, _mm256_setr_epi32(16, 18, 20, 22, 24, 26, 28, 30));
            let low = _mm256_set1_epi32(word(bytes, 4));
            let low = _mm256_srlv_epi32(low, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
            let low = _mm256_and_si256(low, _mm256_set1_epi32(15));
            let high = _mm256_slli_epi32::<4>(_mm256_and_si256(high, _mm256_set1_epi32(3)));
            let scale = _mm256_sub_epi32(_mm256_or_si256(low, high), _mm256_set1_epi32(32));
            (_mm256_mul_ps(_mm256_set1_ps(half_at(bytes, 0)), _mm256_cvtepi32_ps(scale)), none)
        }
        Q4_K | Q5_K => {
            let (scale, min) = scale_bytes(part(bytes, 4));
            let [scale, min] = [scale, min]
                .map(|bytes| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes.cast_signed()))));
            let [d, less] = [half_at(bytes, 0), -half_at(bytes, 2)].map(|x| _mm256_set1_ps(x));
            (_mm256_mul_ps(d, scale), _mm256_mul_ps(less, min))
        }
        MXFP4 => {
            let e = u64::from_le_bytes(std::array::from_fn(|b| bytes[b * size]));
            // As `half_power`.
            let e = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(e.cast_signed()));
            let subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
            let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
            let below_two = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
            (_mm256_castsi256_ps(_mm256_blendv_epi8(normal, subnormal, below_two)), none)
        }
        Q4_1 => {
            let at = |b: usize| word(bytes, b * size);
            let both = _mm256_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
            let low = _mm256_and_si256(both, _mm256_set1_epi32(0xFFFF));
            let halves = _mm256_packus_epi32(low, _mm256_srli_epi32::<16>(both));
            let halves = _mm256_permute4x64_epi64::<0xD8>(halves);
            (_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)))
        }
        _ => {
            let at = |b: usize| i16::from_le_bytes(*part(bytes, b * size));
            let halves = _mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
            (_mm256_cvtph_ps(halves), none)
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn half_at(bytes: &[u8], at: usize) -> f32 {
    let half = i32::from(u16::from_le_bytes(*part(bytes, at)));
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_i8(values: &[i8; 16]) -> __m128i {
    // SAFETY: the reference covers the 16 bytes; the load needs no alignment.
    unsafe { _mm_loadu_si128(values.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_i32(values: &[i32; 8]) -> __m256i {
    // SAFETY: the reference covers the 32 bytes; the load needs no alignment.
    unsafe { _mm256_loadu_si256(values.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store32(bytes: &mut [u8; 32], x: __m256i) {
    // SAFETY: the reference covers the 32 bytes; the store needs no alignment.
    unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), x) }
}

// ---- many vectors: registers hold one block of eight vectors ----

/// One block of four rows, unpacked.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Tile {
    /// The weights, larger by their [`offset`].
    w: [[u8; BLOCK]; ROWS],
    /// Their sizes, of types that are [`signed`].
    size: [[u8; BLOCK]; ROWS],
    d: [f32; ROWS],
    min: [f32; ROWS],
    /// The scales of each sixteen elements of Q6_K.
    sixteen: [[f32; 2]; ROWS],
}

impl Tile {
    const ZERO: Self = Self {
        w: [[0; BLOCK]; ROWS],
        size: [[0; BLOCK]; ROWS],
        d: [0.0; ROWS],
        min: [0.0; ROWS],
        sixteen: [[0.0; 2]; ROWS],
    };
}

/// Unpacks row `r` of `tile`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn unpack<const KIND: u32>(row: &[u8], tile: &mut [Tile], r: usize) {
    let size = block_bytes(KIND);
    let keep = |tile: &mut Tile, w: __m256i| {
        store32(&mut tile.w[r], w);
        if signed(KIND) {
            store32(&mut tile.size[r], _mm256_abs_epi8(w));
        }
    };
    if let Q4_0 | Q4_1 | Q8_0 | IQ4_NL | MXFP4 = KIND {
        for (block, tile) in row.chunks_exact(size).zip(tile) {
            tile.d[r] = if KIND == MXFP4 { half_power(block[0]) } else { half_at(block, 0) };
            if KIND == Q4_1 {
                tile.min[r] = half_at(block, 2);
            }
            keep(tile, weights::<KIND>(block, 0));
        }
        return;
    }
    for (block, tile) in row.chunks_exact(size).zip(tile.as_chunks_mut::<8>().0) {
        for (b, tile) in tile.iter_mut().enumerate() {
            keep(tile, weights::<KIND>(block, b));
        }
        match KIND {
            IQ4_XS => {
                let (d, scales) = (half_at(block, 0), *part(block, 2));
                for (b, tile) in tile.iter_mut().enumerate() {
                    tile.d[r] = d * f32::from(iq4_scale(b, scales));
                }
            }
            Q6_K => {
                let d = half_at(block, 208);
                for (b, tile) in tile.iter_mut().enumerate() {
                    tile.d[r] = d;
                    tile.sixteen[r] = [0, 1].map(|i| f32::from(block[192 + 2 * b + i] as i8));
                }
            }
            _ => {
                let (scale, min) = scale_bytes(part(block, 4));
                let (d, dmin) = (half_at(block, 0), -half_at(block, 2));
                for (b, tile) in tile.iter_mut().enumerate() {
                    tile.d[r] = d * f32::from((scale >> (8 * b)) as u8);
                    tile.min[r] = dmin * f32::from((min >> (8 * b)) as u8);
                }
            }
        }
    }
}

/// Four rows with `G` times eight vectors. Meanwhile, the bytes that will be unpacked next are fetched.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn many<const KIND: u32, const G: usize>(tile: &[Tile], lanes: &[Q8Lanes], next: &[u8]) -> [[[f32; WIDE]; ROWS]; G] {
    let mut acc = [[[_mm256_setzero_ps(); G]; ROWS]; 4];
    let each = next.len().div_ceil(tile.len() / 4).max(1);
    let mut next = next.chunks(each);
    for (tile, lanes) in tile.as_chunks::<4>().0.iter().zip(lanes.as_chunks::<4>().0) {
        next.next().unwrap_or_default().chunks(64).for_each(fetch);
        for ((tile, lanes), acc) in tile.iter().zip(lanes).zip(&mut acc) {
            // What two rows need fits the registers.
            add_block::<KIND, G>(tile, 0, lanes, acc);
            add_block::<KIND, G>(tile, 2, lanes, acc);
        }
    }
    let mut out = [[[0f32; WIDE]; ROWS]; G];
    for g in 0..G {
        for r in 0..ROWS {
            let [a, b, c, d] = [acc[0][r][g], acc[1][r][g], acc[2][r][g], acc[3][r][g]];
            store_ps(&mut out[g][r], _mm256_add_ps(_mm256_add_ps(a, c), _mm256_add_ps(b, d)));
        }
    }
    out
}

/// Adds what one block of rows `first` and `first + 1` gives.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_block<const KIND: u32, const G: usize>(w: &Tile, first: usize, y: &Q8Lanes, acc: &mut [[__m256; G]; ROWS]) {
    let terms = terms::<KIND, G>(w, first, y);
    for g in 0..G {
        let scale = load_ps(&y.scale.as_chunks().0[g]);
        for (acc, terms) in acc[first..].iter_mut().zip(&terms) {
            acc[g] = _mm256_fmadd_ps(scale, terms[g], acc[g]);
        }
    }
}

/// The products of `4 * N` elements of two rows from element `4 * from`.
#[expect(clippy::needless_range_loop, reason = "the indices count rows and vectors of two arrays")]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn products<const KIND: u32, const G: usize, const N: usize>(
    w: &Tile,
    first: usize,
    y: &Q8Lanes,
    from: usize,
) -> [[__m256i; G]; 2] {
    let ones = _mm256_set1_epi16(1);
    let mut p = [[_mm256_setzero_si256(); G]; 2];
    let mut pairs = p;
    for i in from..from + N {
        let is_first = i % fits(KIND) == 0;
        for g in 0..G {
            let y = load32(&y.q[i].as_chunks().0[g]);
            for r in 0..2 {
                let w_of = _mm256_set1_epi32(word(&w.w[first + r], 4 * i));
                let pair = if signed(KIND) {
                    let size = _mm256_set1_epi32(word(&w.size[first + r], 4 * i));
                    _mm256_maddubs_epi16(size, _mm256_sign_epi8(y, w_of))
                } else {
                    _mm256_maddubs_epi16(w_of, y)
                };
                pairs[r][g] = if is_first { pair } else { _mm256_add_epi16(pairs[r][g], pair) };
            }
        }
        if (i + 1) % fits(KIND) == 0 {
            for r in 0..2 {
                for g in 0..G {
                    p[r][g] = _mm256_add_epi32(p[r][g], _mm256_madd_epi16(pairs[r][g], ones));
                }
            }
        }
    }
    p
}

/// What one block of two rows adds for `G` times eight vectors, but for the vectors' scale.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn terms<const KIND: u32, const G: usize>(w: &Tile, first: usize, y: &Q8Lanes) -> [[__m256; G]; 2] {
    let mut out = [[_mm256_setzero_ps(); G]; 2];
    if KIND == Q6_K {
        let halves = [products::<KIND, G, 4>(w, first, y, 0), products::<KIND, G, 4>(w, first, y, 4)];
        for g in 0..G {
            let less = [0, 1].map(|half| load_i32(&y.half[half].as_chunks().0[g]));
            for r in 0..2 {
                let p = [0, 1].map(|half| _mm256_cvtepi32_ps(less_offset::<KIND>(halves[half][r][g], less[half])));
                let scales = w.sixteen[first + r].map(|s| _mm256_set1_ps(s));
                let p = _mm256_fmadd_ps(scales[1], p[1], _mm256_mul_ps(scales[0], p[0]));
                out[r][g] = _mm256_mul_ps(_mm256_set1_ps(w.d[first + r]), p);
            }
        }
        return out;
    }
    let p = products::<KIND, G, 8>(w, first, y, 0);
    for g in 0..G {
        let sum = load_i32(&y.sum.as_chunks().0[g]);
        for r in 0..2 {
            let d = _mm256_set1_ps(w.d[first + r]);
            out[r][g] = match KIND {
                Q4_1 | Q4_K | Q5_K => {
                    let low = _mm256_mul_ps(_mm256_set1_ps(w.min[first + r]), _mm256_cvtepi32_ps(sum));
                    _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(p[r][g]), low)
                }
                _ => _mm256_mul_ps(d, _mm256_cvtepi32_ps(less_offset::<KIND>(p[r][g], sum))),
            };
        }
    }
    out
}
