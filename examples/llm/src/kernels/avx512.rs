//! Kernels on 512-bit registers, for processors with AVX-512 and its dot product of bytes (VNNI).
//!
//! What one row and one vector give is defined once, and computed in two ways. Per block of 32 elements there is a
//! whole number `p`, the sum of products, and from it `term = d * p` or `fma(d, p, min * sum)`. Block `b` is added to
//! the accumulator of its lane: `acc[b % 4] = fma(scale, term, acc[b % 4])`. Blocks of zeros fill the last four. The
//! result is `(acc[0] + acc[2]) + (acc[1] + acc[3])`.
//!
//! For one vector, registers hold sixteen blocks of one row ([`one_row`]). For many, they hold one block of sixteen
//! vectors ([`many`]), and four rows are unpacked once for all of them. Whole numbers have no rounding, and the other
//! operations are the same in the same order, so both give the same bits.

use std::arch::x86_64::*;

use super::blocks::{
    IQ4_NL, IQ4_XS, MXFP4, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0, ROWS, VECTORS_BYTES, block_bytes, eight_bytes, fetch,
    for_kind, one_by_one, part, scale_bytes, table, word,
};
use super::x86::Rows;
use super::{BLOCK, Four, LANES, Q8Group, Q8Lanes, Quantised, Quants, WeightType};
use super::{half_power, iq4_scale};

/// Vectors from which computing for sixteen at once is quicker than one after the other.
const MANY: usize = 6;
/// How many bytes before they are used plain numbers are fetched, which take less time.
const PLAIN_AHEAD: usize = 8192;

/// Whether vectors are to be laid out in lanes when there are `m`.
pub fn wants_lanes(m: usize) -> bool {
    m >= MANY
}

/// Quantises one block, with the bits of [`quantise_plainly`](super::quantise_plainly).
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub fn quantise(x: &[f32; BLOCK]) -> Quants {
    let halves = x.as_chunks::<16>().0;
    let x = [load_ps(&halves[0]), load_ps(&halves[1])];
    // What is no number counts as zero.
    let sizes = x.map(|x| _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(x, x), _mm512_abs_ps(x)));
    let scale = _mm512_reduce_max_ps(_mm512_max_ps(sizes[0], sizes[1])) / 127.0;
    let inverse = _mm512_set1_ps(if scale > 0.0 { 1.0 / scale } else { 0.0 });
    let rounder = _mm512_set1_ps(12_582_912.0);
    let (least, most) = (_mm512_set1_ps(-128.0), _mm512_set1_ps(127.0));
    let whole = x.map(|x| {
        let rounded = _mm512_sub_ps(_mm512_add_ps(_mm512_mul_ps(x, inverse), rounder), rounder);
        // As a conversion by `as` does: infinities are the nearest, and what is no number is zero.
        let is_number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(rounded, rounded);
        _mm512_maskz_cvttps_epi32(is_number, _mm512_max_ps(_mm512_min_ps(rounded, most), least))
    });
    let both = whole.map(|whole| _mm512_cvtepi32_epi8(whole));
    let mut quants = Quants { q: [0; BLOCK], scale, half: whole.map(|whole| _mm512_reduce_add_epi32(whole)) };
    // SAFETY: the reference covers the 32 bytes; the store needs no alignment.
    unsafe { _mm256_storeu_si256(quants.q.as_mut_ptr().cast(), _mm256_set_m128i(both[1], both[0])) };
    quants
}

/// [`scaled_e4m3`](super::scaled_e4m3).
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub fn scaled_e4m3(bytes: &[u8], scale: f32, out: &mut [u8]) {
    super::scaled_e4m3_plainly(bytes, scale, out);
}

/// Multiplies rows with vectors that are quantised.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub fn rows(dtype: WeightType, job: Rows<'_>, acts: &Quantised, out: &mut [f32]) {
    for_kind!(dtype, drive, (job, acts, out))
}

#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
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
            let next = fours.peek().map_or(&[][..], |(next, _)| next);
            for (r, row) in rows.chunks_exact(row_bytes).enumerate() {
                unpack::<KIND>(row, &mut tile, r);
            }
            let mut keep = |nth: usize, sums: &[[f32; LANES]; ROWS]| {
                for (sums, out) in sums.iter().zip(out.chunks_exact_mut(m)) {
                    let out = &mut out[(first + nth) * LANES..];
                    match out.first_chunk_mut::<LANES>() {
                        Some(out) => *out = *sums,
                        None => out.iter_mut().zip(sums).for_each(|(out, sum)| *out = *sum),
                    }
                }
            };
            for (pair, both) in lanes.chunks(2 * tile.len()).enumerate() {
                let ahead = if pair == 0 { next } else { &[] };
                let (one, other) = both.split_at(tile.len());
                if other.is_empty() {
                    let [sums] = many::<KIND, 1>(&tile, [one], ahead);
                    keep(2 * pair, &sums);
                } else {
                    let sums = many::<KIND, 2>(&tile, [one, other], ahead);
                    sums.iter().enumerate().for_each(|(side, sums)| keep(2 * pair + side, sums));
                }
            }
        }
    }
}

// ---- loads ----

#[inline]
#[target_feature(enable = "avx512f")]
fn load<T: Lane, const N: usize>(values: &[T; N]) -> __m512i {
    const { assert!(N * size_of::<T>() == 64) };
    // SAFETY: the reference covers the 64 bytes; the load needs no alignment.
    unsafe { _mm512_loadu_si512(values.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_ps(values: &[f32; 16]) -> __m512 {
    // SAFETY: the reference covers the 64 bytes; the load needs no alignment.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_ps(values: &mut [f32; 16], x: __m512) {
    // SAFETY: the reference covers the 64 bytes; the store needs no alignment.
    unsafe { _mm512_storeu_ps(values.as_mut_ptr(), x) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store32(bytes: &mut [u8; 32], x: __m256i) {
    // SAFETY: the reference covers the 32 bytes; the store needs no alignment.
    unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), x) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load32(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: the reference covers the 32 bytes; the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load16(bytes: &[u8; 16]) -> __m128i {
    // SAFETY: the reference covers the 16 bytes; the load needs no alignment.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

/// Numbers of which every bit pattern is one, and that have no padding.
trait Lane: Copy {}
impl Lane for u8 {}
impl Lane for i8 {}
impl Lane for i32 {}

/// Two vectors of activations behind one another, of blocks `first` and `first + 1`.
#[inline]
#[target_feature(enable = "avx512f")]
fn pair(y: &Q8Group, first: usize) -> __m512i {
    let bytes = y.q.as_flattened();
    match bytes[first * BLOCK..].first_chunk::<64>() {
        Some(bytes) => load(bytes),
        None => _mm512_setzero_si512(),
    }
}

// ---- one vector: registers hold sixteen blocks of a row ----

#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn one_row<const KIND: u32>(row: &[u8], groups: &[Q8Group], ahead: &[u8]) -> f32 {
    let each = 2 * eight_bytes(KIND);
    let mut acc = _mm_setzero_ps();
    let whole = row.len() / each;
    let mut ahead = ahead.chunks(each);
    for (bytes, y) in row.chunks_exact(each).zip(groups) {
        ahead.next().unwrap_or_default().chunks(64).for_each(fetch);
        acc = add_group::<KIND, 4>(bytes, y, acc);
    }
    let rest = &row[whole * each..];
    if let (false, Some(y)) = (rest.is_empty(), groups.get(whole)) {
        let mut padded = [0u8; 2 * 210 + 16 * 34];
        padded[..rest.len()].copy_from_slice(rest);
        acc = match rest.len().div_ceil(each / 4) {
            1 => add_group::<KIND, 1>(&padded[..each], y, acc),
            2 => add_group::<KIND, 2>(&padded[..each], y, acc),
            3 => add_group::<KIND, 3>(&padded[..each], y, acc),
            _ => add_group::<KIND, 4>(&padded[..each], y, acc),
        };
    }
    let two = _mm_add_ps(acc, _mm_movehl_ps(acc, acc));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

/// Adds the first `4 * N` blocks of a group to the accumulators.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn add_group<const KIND: u32, const N: usize>(bytes: &[u8], y: &Q8Group, acc: __m128) -> __m128 {
    let sum = load(&y.sum);
    let term = match KIND {
        Q6_K => {
            let first = sixteens(part(bytes, 0), y, 0);
            let second = if N > 2 { sixteens(part(bytes, 210), y, 1) } else { _mm512_setzero_ps() };
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
            let evens = _mm512_permutex2var_ps(first, even, second);
            let p = _mm512_add_ps(evens, _mm512_permutex2var_ps(first, odd, second));
            let high = if N > 2 { half_at(bytes, 210 + 208) } else { 0.0 };
            _mm512_mul_ps(two_halves(half_at(bytes, 208), high), p)
        }
        Q4_K | Q5_K => {
            let mut quads = [_mm512_setzero_si512(); 4];
            [quads[0], quads[1]] = super_quads::<KIND>(bytes, y, 0);
            if N > 2 {
                [quads[2], quads[3]] = super_quads::<KIND>(&bytes[block_bytes(KIND)..], y, 8);
            }
            let order = _mm512_setr_epi32(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
            let p = _mm512_cvtepi32_ps(sum_quads(quads, order));
            let (d, min) = scales_mins::<KIND, N>(bytes);
            _mm512_fmadd_ps(d, p, _mm512_mul_ps(min, _mm512_cvtepi32_ps(sum)))
        }
        _ => {
            let mut quads = [_mm512_setzero_si512(); 4];
            quads[0] = quad::<KIND>(bytes, y, 0);
            if N > 1 {
                quads[1] = quad::<KIND>(bytes, y, 4);
            }
            if N > 2 {
                quads[2] = quad::<KIND>(bytes, y, 8);
            }
            if N > 3 {
                quads[3] = quad::<KIND>(bytes, y, 12);
            }
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let p = sum_quads(quads, order);
            let (d, min) = plain_scales::<KIND, N>(bytes);
            match KIND {
                Q4_1 => {
                    let low = _mm512_mul_ps(min, _mm512_cvtepi32_ps(sum));
                    _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(p), low)
                }
                Q4_0 => _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_sub_epi32(p, _mm512_slli_epi32::<3>(sum)))),
                _ => _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_sub_epi32(p, _mm512_slli_epi32::<7>(sum)))),
            }
        }
    };
    let scale = load_ps(&y.scale);
    let mut acc = _mm_fmadd_ps(_mm512_castps512_ps128(scale), _mm512_castps512_ps128(term), acc);
    if N > 1 {
        acc = _mm_fmadd_ps(_mm512_extractf32x4_ps::<1>(scale), _mm512_extractf32x4_ps::<1>(term), acc);
    }
    if N > 2 {
        acc = _mm_fmadd_ps(_mm512_extractf32x4_ps::<2>(scale), _mm512_extractf32x4_ps::<2>(term), acc);
    }
    if N > 3 {
        acc = _mm_fmadd_ps(_mm512_extractf32x4_ps::<3>(scale), _mm512_extractf32x4_ps::<3>(term), acc);
    }
    acc
}

/// Sixteen sums of four, from four registers with sixteen parts of sums each.
#[inline]
#[target_feature(enable = "avx512f")]
fn sum_quads(q: [__m512i; 4], order: __m512i) -> __m512i {
    let a = _mm512_add_epi32(_mm512_unpacklo_epi32(q[0], q[1]), _mm512_unpackhi_epi32(q[0], q[1]));
    let b = _mm512_add_epi32(_mm512_unpacklo_epi32(q[2], q[3]), _mm512_unpackhi_epi32(q[2], q[3]));
    let all = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    _mm512_permutexvar_epi32(order, all)
}

/// [`half_power`] of sixteen bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn half_powers(e: __m128i) -> __m512 {
    let e = _mm512_cvtepu8_epi32(e);
    let subnormal = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), e);
    let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
    let below_two = _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2));
    _mm512_castsi512_ps(_mm512_mask_blend_epi32(below_two, normal, subnormal))
}

/// `d * scale` of the sixteen parts of two blocks of IQ4_XS, or of one.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn iq4_scales<const N: usize>(bytes: &[u8]) -> __m512 {
    let size = block_bytes(IQ4_XS);
    let both = |at: usize| {
        let second = if N > 2 { word(bytes, size + at) } else { 0 };
        _mm512_inserti64x4::<1>(_mm512_set1_epi32(word(bytes, at)), _mm256_set1_epi32(second))
    };
    // `scales_h` is above `d`.
    let high =
        _mm512_srlv_epi32(both(0), _mm512_setr_epi32(16, 18, 20, 22, 24, 26, 28, 30, 16, 18, 20, 22, 24, 26, 28, 30));
    let low = _mm512_srlv_epi32(both(4), _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28));
    let low = _mm512_and_si512(low, _mm512_set1_epi32(15));
    let high = _mm512_slli_epi32::<4>(_mm512_and_si512(high, _mm512_set1_epi32(3)));
    let scale = _mm512_sub_epi32(_mm512_or_si512(low, high), _mm512_set1_epi32(32));
    let second = if N > 2 { half_at(bytes, size) } else { 0.0 };
    _mm512_mul_ps(two_halves(half_at(bytes, 0), second), _mm512_cvtepi32_ps(scale))
}

/// Sums of the products of four blocks from `first`, four parts for each block.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn quad<const KIND: u32>(bytes: &[u8], y: &Q8Group, first: usize) -> __m512i {
    let size = block_bytes(KIND);
    let zero = _mm512_setzero_si512();
    let (ya, yb) = (pair(y, first), pair(y, first + 2));
    if KIND == Q8_0 {
        let at = |b: usize| part::<32>(bytes, (first + b) * size + 2);
        let a = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(load32(at(0))), load32(at(1)));
        let b = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(load32(at(2))), load32(at(3)));
        // Signed weights become unsigned ones that are 128 larger.
        let sign = _mm512_set1_epi8(-128);
        let pa = _mm512_dpbusd_epi32(zero, _mm512_xor_si512(a, sign), ya);
        let pb = _mm512_dpbusd_epi32(zero, _mm512_xor_si512(b, sign), yb);
        let low = _mm512_shuffle_i64x2::<0x88>(pa, pb);
        return _mm512_add_epi32(low, _mm512_shuffle_i64x2::<0xDD>(pa, pb));
    }
    let four = if KIND == IQ4_XS {
        load(part::<64>(bytes, first / 8 * size + 8 + first % 8 * 16))
    } else {
        let at = |b: usize| part::<16>(bytes, (first + b) * size + size - 16);
        let two = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(load16(at(0))), load16(at(1)));
        let more = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(load16(at(2))), load16(at(3)));
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(two), more)
    };
    let mask = _mm512_set1_epi8(15);
    let mut low = _mm512_and_si512(four, mask);
    let mut high = _mm512_and_si512(_mm512_srli_epi16::<4>(four), mask);
    if let IQ4_NL | IQ4_XS | MXFP4 = KIND {
        let table = _mm512_broadcast_i32x4(load16(&const { table(KIND, 128) }));
        (low, high) = (_mm512_shuffle_epi8(table, low), _mm512_shuffle_epi8(table, high));
    }
    let p = _mm512_dpbusd_epi32(zero, low, _mm512_shuffle_i64x2::<0x88>(ya, yb));
    _mm512_dpbusd_epi32(p, high, _mm512_shuffle_i64x2::<0xDD>(ya, yb))
}

/// The scales, and for Q4_1 the minima, of the first `4 * N` blocks.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn plain_scales<const KIND: u32, const N: usize>(bytes: &[u8]) -> (__m512, __m512) {
    let size = block_bytes(KIND);
    if KIND == IQ4_XS {
        return (iq4_scales::<N>(bytes), _mm512_setzero_ps());
    }
    if KIND == MXFP4 {
        let e = std::array::from_fn(|b| if b < 4 * N { bytes[b * size] } else { 0 });
        return (half_powers(load16(&e)), _mm512_setzero_ps());
    }
    if KIND == Q4_1 {
        let at = |b: usize| if b < 4 * N { word(bytes, b * size) } else { 0 };
        let both = _mm512_setr_epi32(
            at(0),
            at(1),
            at(2),
            at(3),
            at(4),
            at(5),
            at(6),
            at(7),
            at(8),
            at(9),
            at(10),
            at(11),
            at(12),
            at(13),
            at(14),
            at(15),
        );
        let d = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(both));
        return (d, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(both))));
    }
    let at = |b: usize| if b < 4 * N { i16::from_le_bytes(*part(bytes, b * size)) } else { 0 };
    let halves = _mm256_setr_epi16(
        at(0),
        at(1),
        at(2),
        at(3),
        at(4),
        at(5),
        at(6),
        at(7),
        at(8),
        at(9),
        at(10),
        at(11),
        at(12),
        at(13),
        at(14),
        at(15),
    );
    (_mm512_cvtph_ps(halves), _mm512_setzero_ps())
}

#[inline]
#[target_feature(enable = "avx512f")]
fn half_at(bytes: &[u8], at: usize) -> f32 {
    let half = i32::from(u16::from_le_bytes(*part(bytes, at)));
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)))
}

#[inline]
#[target_feature(enable = "avx512dq")]
fn two_halves(first: f32, second: f32) -> __m512 {
    _mm512_insertf32x8::<1>(_mm512_set1_ps(first), _mm256_set1_ps(second))
}

/// `d * scale` and `-dmin * min` of the sixteen parts of two blocks of Q4_K or Q5_K, or of one.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn scales_mins<const KIND: u32, const N: usize>(bytes: &[u8]) -> (__m512, __m512) {
    let size = block_bytes(KIND);
    let (scale, min) = scale_bytes(part(bytes, 4));
    let (d, dmin) = (half_at(bytes, 0), half_at(bytes, 2));
    let ((scale2, min2), d2, dmin2) = if N > 2 {
        (scale_bytes(part(bytes, size + 4)), half_at(bytes, size), half_at(bytes, size + 2))
    } else {
        ((0, 0), 0.0, 0.0)
    };
    let scale = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_set_epi64x(scale2 as i64, scale as i64)));
    let min = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_set_epi64x(min2 as i64, min as i64)));
    (_mm512_mul_ps(two_halves(d, d2), scale), _mm512_mul_ps(two_halves(-dmin, -dmin2), min))
}

/// Four parts of a block of Q4_K or Q5_K from part `2 * t`, as bytes: parts `2t` and `2t + 2`, `2t + 1` and `2t + 3`.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn super_parts<const KIND: u32>(block: &[u8], t: usize) -> [__m512i; 2] {
    let mask = _mm512_set1_epi8(15);
    let quants = if KIND == Q5_K { 48 } else { 16 };
    let bytes = load(part::<64>(block, quants + t * 32));
    let low = _mm512_and_si512(bytes, mask);
    let high = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask);
    if KIND != Q5_K {
        return [low, high];
    }
    // Bit `i` of these bytes belongs to part `i`; it becomes bit 4.
    let fifth = _mm512_broadcast_i64x4(load32(part::<32>(block, 16)));
    let counts = |a: i16, b: i16| _mm512_inserti64x4::<1>(_mm512_set1_epi16(a), _mm256_set1_epi16(b));
    let (even, odd) = if t == 0 {
        (_mm512_sllv_epi16(fifth, counts(4, 2)), _mm512_sllv_epi16(fifth, counts(3, 1)))
    } else {
        (_mm512_srlv_epi16(fifth, counts(0, 2)), _mm512_srlv_epi16(fifth, counts(1, 3)))
    };
    let bit = _mm512_set1_epi8(16);
    [_mm512_or_si512(low, _mm512_and_si512(even, bit)), _mm512_or_si512(high, _mm512_and_si512(odd, bit))]
}

/// The sums of the eight parts of a block of Q4_K or Q5_K. In a register, the parts' order is 0, 2, 1, 3.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn super_quads<const KIND: u32>(block: &[u8], y: &Q8Group, first: usize) -> [__m512i; 2] {
    let zero = _mm512_setzero_si512();
    let mut quads = [zero; 2];
    for (i, quad) in quads.iter_mut().enumerate() {
        let [low, high] = super_parts::<KIND>(block, 2 * i);
        let (ya, yb) = (pair(y, first + 4 * i), pair(y, first + 4 * i + 2));
        let pa = _mm512_dpbusd_epi32(zero, low, _mm512_shuffle_i64x2::<0x44>(ya, yb));
        let pb = _mm512_dpbusd_epi32(zero, high, _mm512_shuffle_i64x2::<0xEE>(ya, yb));
        let a = _mm512_shuffle_i64x2::<0x88>(pa, pb);
        *quad = _mm512_add_epi32(a, _mm512_shuffle_i64x2::<0xDD>(pa, pb));
    }
    quads
}

/// A half of a block of Q6_K, as bytes that are 32 too large: parts 0 and 1, 2 and 3.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn sixth_parts(block: &[u8; 210], half: usize) -> [__m512i; 2] {
    let mask = _mm512_set1_epi8(15);
    let counts = |a: i16, b: i16| _mm512_inserti64x4::<1>(_mm512_set1_epi16(a), _mm256_set1_epi16(b));
    let bytes = load(part::<64>(block, half * 64));
    let two = _mm512_broadcast_i64x4(load32(part::<32>(block, 128 + half * 32)));
    let bits = _mm512_set1_epi8(0x30);
    let low = _mm512_and_si512(_mm512_sllv_epi16(two, counts(4, 2)), bits);
    let high = _mm512_and_si512(_mm512_srlv_epi16(two, counts(0, 2)), bits);
    let first = _mm512_or_si512(_mm512_and_si512(bytes, mask), low);
    [first, _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask), high)]
}

/// `scale * p` of the sixteen parts of sixteen elements of a block of Q6_K: whole numbers below 2^23.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn sixteens(block: &[u8; 210], y: &Q8Group, nth: usize) -> __m512 {
    let zero = _mm512_setzero_si512();
    let mut quads = [zero; 4];
    for half in 0..2 {
        let [a, b] = sixth_parts(block, half);
        let first = 8 * nth + 4 * half;
        quads[2 * half] = _mm512_dpbusd_epi32(zero, a, pair(y, first));
        quads[2 * half + 1] = _mm512_dpbusd_epi32(zero, b, pair(y, first + 2));
    }
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let p = _mm512_sub_epi32(sum_quads(quads, order), _mm512_slli_epi32::<5>(load(&y.half[nth])));
    let scales = _mm512_cvtepi8_epi32(load16(part(block, 192)));
    _mm512_mul_ps(_mm512_cvtepi32_ps(scales), _mm512_cvtepi32_ps(p))
}

// ---- many vectors: registers hold one block of sixteen vectors ----

/// One block of four rows, unpacked.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Tile {
    /// The weights without sign, larger by what [`terms`] takes off.
    w: [[u8; BLOCK]; ROWS],
    d: [f32; ROWS],
    min: [f32; ROWS],
    /// The scales of each sixteen elements of Q6_K.
    sixteen: [[f32; 2]; ROWS],
}

impl Tile {
    const ZERO: Self = Self { w: [[0; BLOCK]; ROWS], d: [0.0; ROWS], min: [0.0; ROWS], sixteen: [[0.0; 2]; ROWS] };
}

/// The 32 weights of 16 bytes: first the low nibbles, then the high ones, or what they stand for.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn unpack32<const KIND: u32>(bytes: &[u8; 16]) -> __m256i {
    let low = load16(bytes);
    let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), _mm_srli_epi16::<4>(low));
    let nibbles = _mm256_and_si256(both, _mm256_set1_epi8(15));
    if let IQ4_NL | IQ4_XS | MXFP4 = KIND {
        let table = load16(&const { table(KIND, 128) });
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles);
    }
    nibbles
}

/// Unpacks row `r` of `tile`.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn unpack<const KIND: u32>(row: &[u8], tile: &mut [Tile], r: usize) {
    let size = block_bytes(KIND);
    if let Q4_0 | Q4_1 | Q8_0 | IQ4_NL | MXFP4 = KIND {
        for (block, tile) in row.chunks_exact(size).zip(tile) {
            tile.d[r] = if KIND == MXFP4 { half_power(block[0]) } else { half_at(block, 0) };
            let w = if KIND == Q8_0 {
                _mm256_xor_si256(load32(part(block, 2)), _mm256_set1_epi8(-128))
            } else {
                unpack32::<KIND>(part(block, size - 16))
            };
            store32(&mut tile.w[r], w);
            if KIND == Q4_1 {
                tile.min[r] = half_at(block, 2);
            }
        }
        return;
    }
    for (block, tile) in row.chunks_exact(size).zip(tile.as_chunks_mut::<8>().0) {
        if KIND == IQ4_XS {
            let (d, scales) = (half_at(block, 0), *part(block, 2));
            for (t, tile) in tile.iter_mut().enumerate() {
                tile.d[r] = d * f32::from(iq4_scale(t, scales));
                store32(&mut tile.w[r], unpack32::<KIND>(part(block, 8 + 16 * t)));
            }
            continue;
        }
        for half in 0..2 {
            let (parts, order) = if KIND == Q6_K {
                (sixth_parts(part(block, 0), half), [0, 1, 2, 3])
            } else {
                (super_parts::<KIND>(block, 2 * half), [0, 2, 1, 3])
            };
            for (i, nth) in order.into_iter().enumerate() {
                let two = parts[i / 2];
                let one = if i % 2 == 0 { _mm512_castsi512_si256(two) } else { _mm512_extracti64x4_epi64::<1>(two) };
                store32(&mut tile[4 * half + nth].w[r], one);
            }
        }
        if KIND == Q6_K {
            let d = half_at(block, 208);
            for (t, tile) in tile.iter_mut().enumerate() {
                tile.d[r] = d;
                tile.sixteen[r] = [0, 1].map(|i| f32::from(block[192 + 2 * t + i] as i8));
            }
        } else {
            let (scale, min) = scale_bytes(part(block, 4));
            let (d, dmin) = (half_at(block, 0), -half_at(block, 2));
            for (t, tile) in tile.iter_mut().enumerate() {
                tile.d[r] = d * f32::from((scale >> (8 * t)) as u8);
                tile.min[r] = dmin * f32::from((min >> (8 * t)) as u8);
            }
        }
    }
}

/// Four rows with `G` times sixteen vectors, which share the loads of weights. Meanwhile, the bytes that will be
/// unpacked next are fetched.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn many<const KIND: u32, const G: usize>(
    tile: &[Tile],
    lanes: [&[Q8Lanes]; G],
    next: &[u8],
) -> [[[f32; LANES]; ROWS]; G] {
    let mut acc = [[[_mm512_setzero_ps(); ROWS]; G]; 4];
    let each = next.len().div_ceil(tile.len() / 4).max(1);
    let mut next = next.chunks(each);
    let lanes = lanes.map(|lanes| lanes.as_chunks::<4>().0);
    for (nth, tile) in tile.as_chunks::<4>().0.iter().enumerate() {
        next.next().unwrap_or_default().chunks(64).for_each(fetch);
        let lanes = lanes.map(|lanes| &lanes[nth]);
        add_block::<KIND, G>(&tile[0], lanes.map(|lanes| &lanes[0]), &mut acc[0]);
        add_block::<KIND, G>(&tile[1], lanes.map(|lanes| &lanes[1]), &mut acc[1]);
        add_block::<KIND, G>(&tile[2], lanes.map(|lanes| &lanes[2]), &mut acc[2]);
        add_block::<KIND, G>(&tile[3], lanes.map(|lanes| &lanes[3]), &mut acc[3]);
    }
    let mut out = [[[0f32; LANES]; ROWS]; G];
    for g in 0..G {
        for r in 0..ROWS {
            let [a, b, c, d] = [acc[0][g][r], acc[1][g][r], acc[2][g][r], acc[3][g][r]];
            store_ps(&mut out[g][r], _mm512_add_ps(_mm512_add_ps(a, c), _mm512_add_ps(b, d)));
        }
    }
    out
}

#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn add_block<const KIND: u32, const G: usize>(w: &Tile, y: [&Q8Lanes; G], acc: &mut [[__m512; ROWS]; G]) {
    let terms = terms::<KIND, G>(w, y);
    for g in 0..G {
        let scale = load_ps(&y[g].scale);
        for r in 0..ROWS {
            acc[g][r] = _mm512_fmadd_ps(scale, terms[g][r], acc[g][r]);
        }
    }
}

/// What one block of four rows adds for `G` times sixteen vectors, but for the vectors' scale.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn terms<const KIND: u32, const G: usize>(w: &Tile, y: [&Q8Lanes; G]) -> [[__m512; ROWS]; G] {
    let zero = _mm512_setzero_si512();
    let products = |words: std::ops::Range<usize>, start: [__m512i; G]| {
        let mut p = [start; ROWS];
        for i in words {
            let yi = y.map(|y| load(&y.q[i]));
            for (p, w) in p.iter_mut().zip(&w.w) {
                let w = _mm512_set1_epi32(word(w, 4 * i));
                for (p, yi) in p.iter_mut().zip(yi) {
                    *p = _mm512_dpbusd_epi32(*p, w, yi);
                }
            }
        }
        p
    };
    let mut out = [[_mm512_setzero_ps(); ROWS]; G];
    if KIND == Q6_K {
        let less = |half: usize| y.map(|y| _mm512_sub_epi32(zero, _mm512_slli_epi32::<5>(load(&y.half[half]))));
        let (a, b) = (products(0..4, less(0)), products(4..8, less(1)));
        for g in 0..G {
            for r in 0..ROWS {
                let [first, second] = w.sixteen[r].map(|s| _mm512_set1_ps(s));
                let p = _mm512_mul_ps(first, _mm512_cvtepi32_ps(a[r][g]));
                let p = _mm512_fmadd_ps(second, _mm512_cvtepi32_ps(b[r][g]), p);
                out[g][r] = _mm512_mul_ps(_mm512_set1_ps(w.d[r]), p);
            }
        }
        return out;
    }
    let sum = y.map(|y| load(&y.sum));
    let start = match KIND {
        Q4_0 => sum.map(|sum| _mm512_sub_epi32(zero, _mm512_slli_epi32::<3>(sum))),
        Q8_0 | IQ4_NL | IQ4_XS | MXFP4 => sum.map(|sum| _mm512_sub_epi32(zero, _mm512_slli_epi32::<7>(sum))),
        _ => [zero; G],
    };
    let p = products(0..8, start);
    for g in 0..G {
        for r in 0..ROWS {
            let (d, p) = (_mm512_set1_ps(w.d[r]), _mm512_cvtepi32_ps(p[r][g]));
            out[g][r] = match KIND {
                Q4_0 | Q8_0 | IQ4_NL | IQ4_XS | MXFP4 => _mm512_mul_ps(d, p),
                _ => {
                    let low = _mm512_mul_ps(_mm512_set1_ps(w.min[r]), _mm512_cvtepi32_ps(sum[g]));
                    _mm512_fmadd_ps(d, p, low)
                }
            };
        }
    }
    out
}

// ---- weights that are plain numbers ----

/// Sixteen numbers from the start of `bytes`.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn widen<const BYTES: usize, const BRAIN: bool>(bytes: &[u8; BYTES]) -> __m512 {
    if BYTES == 64 {
        return _mm512_castsi512_ps(load(part::<64>(bytes, 0)));
    }
    let half = load32(part(bytes, 0));
    if BRAIN {
        return _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)));
    }
    _mm512_cvtph_ps(half)
}

/// Multiplies rows of plain numbers with vectors of `f32`.
///
/// Each row and each vector have 32 accumulators, element `i` going to number `i % 32`. The second half of them is
/// added to the first; the sum of those is [`sum4`]'s.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
pub fn dense_rows(dtype: WeightType, job: Rows<'_>, acts: &[f32], fours: &[Four], out: &mut [f32]) {
    match dtype {
        WeightType::F32 => dense::<64, 128, false>(job, acts, fours, out),
        WeightType::F16 => dense::<32, 64, false>(job, acts, fours, out),
        _ => dense::<32, 64, true>(job, acts, fours, out),
    }
}

#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dense<const ONE: usize, const TWO: usize, const BRAIN: bool>(
    job: Rows<'_>,
    acts: &[f32],
    fours: &[Four],
    out: &mut [f32],
) {
    let Rows { k, row_bytes, rows, m } = job;
    let (steps, in_fours) = (k.div_ceil(16), m / 4 * 4);
    if in_fours > 0 {
        let last = rows.len() / row_bytes - 1;
        for (tile, out) in out.chunks_mut(ROWS * m).enumerate() {
            // Rows beyond the last are the last once more.
            let these = [0, 1, 2, 3].map(|r| &rows[(ROWS * tile + r).min(last) * row_bytes..][..row_bytes]);
            let mut next = rows.get(ROWS * (tile + 1) * row_bytes..).unwrap_or_default();
            next = &next[..next.len().min(ROWS * row_bytes)];
            let each = next.len().div_ceil(m / 4).next_multiple_of(64);
            for (nth, x) in fours.chunks_exact(steps).enumerate() {
                let (now, later) = next.split_at(next.len().min(each));
                next = later;
                let sums = dense_many::<ONE, TWO, BRAIN>(these, x, now);
                for (sums, out) in sums.iter().zip(out.chunks_exact_mut(m)) {
                    out[4 * nth..4 * nth + 4].copy_from_slice(sums);
                }
            }
        }
    }
    if in_fours < m {
        for (r, out) in (0..rows.len() / row_bytes).zip(out.chunks_exact_mut(m)) {
            let rest = &rows[r * row_bytes..];
            let ahead = rest.get(PLAIN_AHEAD..).unwrap_or_default();
            for (x, out) in acts.chunks_exact(k).zip(out).skip(in_fours) {
                *out = dense_one::<ONE, TWO, BRAIN>(&rest[..row_bytes], ahead, x);
            }
        }
    }
}

/// The sums of four times sixteen numbers, each by the same tree.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn sum4(q: [__m512; 4]) -> [f32; 4] {
    let a = _mm512_add_ps(_mm512_unpacklo_ps(q[0], q[1]), _mm512_unpackhi_ps(q[0], q[1]));
    let b = _mm512_add_ps(_mm512_unpacklo_ps(q[2], q[3]), _mm512_unpackhi_ps(q[2], q[3]));
    let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
    let low = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    let all = _mm512_add_ps(low, _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    let two = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps::<1>(all));
    let one = _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps::<1>(two));
    let mut out = [0f32; 4];
    // SAFETY: the reference covers the 16 bytes; the store needs no alignment.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), one) };
    out
}

/// The first `N` elements of what remains of a slice, and zeros.
#[inline(always)]
fn padded<T: Copy + Default, const N: usize>(rest: &[T]) -> [T; N] {
    let mut padded = [T::default(); N];
    let count = rest.len().min(N);
    padded[..count].copy_from_slice(&rest[..count]);
    padded
}

/// Four rows with four vectors, while the rows behind them are fetched.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dense_many<const ONE: usize, const TWO: usize, const BRAIN: bool>(
    rows: [&[u8]; ROWS],
    x: &[Four],
    next: &[u8],
) -> [[f32; 4]; ROWS] {
    let (even, odd) = x.split_at(x.len().div_ceil(2));
    let (now, later) = next.split_at(next.len() / 128 * 64);
    let mut sums = [[[_mm512_setzero_ps(); 4]; ROWS]; 2];
    dense_side::<ONE, TWO, BRAIN>(rows, 0, even, now, &mut sums[0]);
    dense_side::<ONE, TWO, BRAIN>(rows, ONE, odd, later, &mut sums[1]);
    let mut out = [[0f32; 4]; ROWS];
    for r in 0..ROWS {
        let [a, b] = [sums[0][r], sums[1][r]];
        let both = [
            _mm512_add_ps(a[0], b[0]),
            _mm512_add_ps(a[1], b[1]),
            _mm512_add_ps(a[2], b[2]),
            _mm512_add_ps(a[3], b[3]),
        ];
        out[r] = sum4(both);
    }
    out
}

/// The even steps, or those that begin `at` bytes behind each: half of the accumulators, which sixteen registers hold.
#[inline(never)]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dense_side<const ONE: usize, const TWO: usize, const BRAIN: bool>(
    rows: [&[u8]; ROWS],
    at: usize,
    x: &[Four],
    next: &[u8],
    sums: &mut [[__m512; 4]; ROWS],
) {
    let mut acc = [[_mm512_setzero_ps(); 4]; ROWS];
    let [a, b, c, d] = rows.map(|row| row[at.min(row.len())..].as_chunks::<TWO>());
    let mut next = next.chunks(64);
    for ((((a, b), c), d), x) in a.0.iter().zip(b.0).zip(c.0).zip(d.0).zip(x) {
        next.next().into_iter().for_each(fetch);
        dense_step::<ONE, BRAIN>([part(a, 0), part(b, 0), part(c, 0), part(d, 0)], x, &mut acc);
    }
    if let (false, Some(x)) = (a.1.is_empty(), x.get(a.0.len())) {
        let w = [a, b, c, d].map(|row| padded(row.1));
        dense_step::<ONE, BRAIN>([&w[0], &w[1], &w[2], &w[3]], x, &mut acc);
    }
    *sums = acc;
}

#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dense_step<const ONE: usize, const BRAIN: bool>(w: [&[u8; ONE]; ROWS], x: &Four, acc: &mut [[__m512; 4]; ROWS]) {
    let x = [load_ps(&x.0[0]), load_ps(&x.0[1]), load_ps(&x.0[2]), load_ps(&x.0[3])];
    for r in 0..ROWS {
        let w = widen::<ONE, BRAIN>(w[r]);
        for j in 0..4 {
            acc[r][j] = _mm512_fmadd_ps(w, x[j], acc[r][j]);
        }
    }
}

/// One row with one vector.
#[inline]
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dense_one<const ONE: usize, const TWO: usize, const BRAIN: bool>(row: &[u8], ahead: &[u8], x: &[f32]) -> f32 {
    let mut acc = [_mm512_setzero_ps(); 2];
    let ((row, row_rest), (x, x_rest)) = (row.as_chunks::<TWO>(), x.as_chunks::<32>());
    let mut ahead = ahead.chunks(TWO);
    for (w, x) in row.iter().zip(x) {
        ahead.next().unwrap_or_default().chunks(64).for_each(fetch);
        let (x, _) = x.as_chunks::<16>();
        acc[0] = _mm512_fmadd_ps(widen::<ONE, BRAIN>(part(w, 0)), load_ps(&x[0]), acc[0]);
        acc[1] = _mm512_fmadd_ps(widen::<ONE, BRAIN>(part(w, ONE)), load_ps(&x[1]), acc[1]);
    }
    for (side, (w, x)) in row_rest.chunks(ONE).zip(x_rest.chunks(16)).enumerate() {
        acc[side] = _mm512_fmadd_ps(widen::<ONE, BRAIN>(&padded(w)), load_ps(&padded(x)), acc[side]);
    }
    let zero = _mm512_setzero_ps();
    sum4([_mm512_add_ps(acc[0], acc[1]), zero, zero, zero])[0]
}
