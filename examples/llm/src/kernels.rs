//! Dot products of stored weight rows with activations: the only arithmetic whose cost grows with the model.
//!
//! Weights are used where they lie, in the file's own format. Quantised weights meet activations quantised to 8 bits in
//! blocks of 32 with a scale each (finer than ggml's blocks of 256 for K-quants); plain weights meet `f32` activations.
//!
//! Invariants:
//! 1. The result for one row and one activation vector depends on nothing else: not on how many rows or vectors are
//!    computed together, not on the thread, not on the rows' address. Tiling and batching therefore never change a bit.
//!    The instruction set may: each [`Level`] has kernels of its own.
//! 2. A kernel reads only the slices it is given; vector loads go through fixed-size array references.
//! 3. A vectorised kernel runs only after the processor was seen to have every feature it is compiled for.
//!
//! Formats: [`quants`](crate::quants).
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "vector kernels alone use all that is prepared"))]

use std::sync::OnceLock;

use half::f16;

use crate::dtype::WeightType;
use crate::pool::{Columns, Pool};
use crate::quants::{E2M1, IQ4, dequantise, e4m3, half_power, iq4_scale};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod blocks;
mod elementwise;

pub(crate) use elementwise::{clamped_silu, exp_less, gelu, silu};

/// Elements in one block of quantised activations.
pub const BLOCK: usize = 32;

/// Blocks in one [`Q8Group`].
const GROUP: usize = 16;
/// Vectors in one [`Q8Lanes`].
const LANES: usize = 16;

/// Most bytes that an element of a vector has in what is prepared for the kernels. Four vectors may take the room of
/// sixteen.
pub const PREPARED_BYTES: usize = 6;
/// Memory in which a thread repacks rows whose scales are in another tensor: so much, or four rows if they take more.
pub(crate) const SCRATCH_BYTES: usize = 64 << 10;

/// Sixteen blocks of one vector: `value[i] = scale * q[i]`. Blocks beyond the vector's end are zeros.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Q8Group {
    /// The values, in -127..=127; -128 too where a block's numbers are so small that `1 / scale` is infinite.
    q: [[i8; BLOCK]; GROUP],
    scale: [f32; GROUP],
    /// The sums of `q`, which formats with a minimum or an offset need.
    sum: [i32; GROUP],
    /// The sums of 16 values each.
    half: [[i32; GROUP]; 2],
}

/// One block of sixteen vectors. Vectors beyond the last are zeros.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Q8Lanes {
    /// Four values of each vector, then the next four.
    q: [[i8; 4 * LANES]; BLOCK / 4],
    scale: [f32; LANES],
    sum: [i32; LANES],
    /// The sums of the first 16 values, and of the others.
    half: [[i32; LANES]; 2],
}

/// Vectors of activations, quantised for one level's kernels.
#[derive(Clone, Debug, Default)]
pub struct Quantised {
    /// For kernels that take one vector after the other.
    groups: Vec<Q8Group>,
    /// For kernels that take sixteen at once; one of the two is empty.
    lanes: Vec<Q8Lanes>,
}

impl Quantised {
    /// Quantises `m` vectors of a multiple of 32 elements each. A block's scale is `max|x| / 127`.
    pub fn new(level: Level, x: &[f32], m: usize, pool: &Pool) -> Self {
        let mut new = Self::default();
        let blocks = x.len() / BLOCK / m.max(1);
        let (x, _) = x.as_chunks::<BLOCK>();
        let level = level.clamped();
        #[cfg(target_arch = "x86_64")]
        if match level {
            Level::Avx512 => avx512::wants_lanes(m),
            Level::Avx2 => avx2::wants_lanes(m),
            Level::Scalar => false,
        } {
            // The kernels take four blocks at a time.
            let each = blocks.next_multiple_of(4);
            let zero = Q8Lanes { q: [[0; 64]; 8], scale: [0.0; LANES], sum: [0; LANES], half: [[0; LANES]; 2] };
            new.lanes = vec![zero; m.div_ceil(LANES) * each];
            pool.run_chunks(&mut new.lanes, 8, |i, out| {
                for (b, out) in out.iter_mut().enumerate() {
                    let (group, b) = ((8 * i + b) / each, (8 * i + b) % each);
                    if b < blocks {
                        let vectors = x[group * LANES * blocks..].chunks_exact(blocks).take(LANES);
                        vectors.enumerate().for_each(|(v, x)| out.set(v, &quantise(level, &x[b])));
                    }
                }
            });
            return new;
        }
        let each = blocks.div_ceil(GROUP);
        let zero = Q8Group { q: [[0; BLOCK]; GROUP], scale: [0.0; GROUP], sum: [0; GROUP], half: [[0; GROUP]; 2] };
        new.groups = vec![zero; m * each];
        pool.run_chunks(&mut new.groups, 8, |i, out| {
            for (g, out) in out.iter_mut().enumerate() {
                let (vector, first) = ((8 * i + g) / each, (8 * i + g) % each * GROUP);
                let x = &x[vector * blocks + first..];
                x.iter().take(GROUP.min(blocks - first)).enumerate().for_each(|(b, x)| out.set(b, &quantise(level, x)));
            }
        });
        new
    }

    /// The scale and the values of block `b` of vector `j`, of `blocks` blocks, for the kernel that takes a block at a
    /// time.
    fn block(&self, j: usize, b: usize, blocks: usize) -> (f32, &[i8; BLOCK]) {
        let group = &self.groups[j * blocks.div_ceil(GROUP) + b / GROUP];
        (group.scale[b % GROUP], &group.q[b % GROUP])
    }
}

/// A block, quantised.
struct Quants {
    q: [i8; BLOCK],
    scale: f32,
    half: [i32; 2],
}

impl Q8Group {
    fn set(&mut self, b: usize, x: &Quants) {
        self.q[b] = x.q;
        self.scale[b] = x.scale;
        self.sum[b] = x.half[0] + x.half[1];
        let halves = self.half.as_flattened_mut();
        [halves[2 * b], halves[2 * b + 1]] = x.half;
    }
}

impl Q8Lanes {
    fn set(&mut self, v: usize, x: &Quants) {
        for (words, x) in self.q.iter_mut().zip(x.q.as_chunks::<4>().0) {
            words.as_chunks_mut::<4>().0[v] = *x;
        }
        self.scale[v] = x.scale;
        self.sum[v] = x.half[0] + x.half[1];
        [self.half[0][v], self.half[1][v]] = x.half;
    }
}

fn quantise(level: Level, x: &[f32; BLOCK]) -> Quants {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the features were detected (invariant 3).
    unsafe {
        match level {
            Level::Avx512 => return avx512::quantise(x),
            Level::Avx2 => return avx2::quantise(x),
            Level::Scalar => {}
        }
    }
    let _ = level;
    quantise_plainly(x)
}

/// The same operations whatever they are compiled to.
#[inline(always)]
fn quantise_plainly(x: &[f32; BLOCK]) -> Quants {
    let mut peaks = [0f32; 16];
    let (halves, _) = x.as_chunks::<16>();
    for half in halves {
        peaks.iter_mut().zip(half).for_each(|(peak, v)| *peak = peak.max(v.abs()));
    }
    for some in [8, 4, 2, 1] {
        let (low, high) = peaks.split_at_mut(some);
        low.iter_mut().zip(high).for_each(|(low, high)| *low = low.max(*high));
    }
    let peak = peaks[0];
    let scale = peak / 127.0;
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    let mut quants = Quants { q: [0; BLOCK], scale, half: [0; 2] };
    for (i, (q, v)) in quants.q.iter_mut().zip(x).enumerate() {
        // Adding and subtracting 1.5 * 2^23 rounds to nearest even, and vectorises where `round` does not.
        let rounded = (v * inverse + 12_582_912.0) - 12_582_912.0;
        *q = rounded as i8;
        quants.half[i / 16] += i32::from(*q);
    }
    quants
}

/// Which instructions the kernels use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Level {
    /// Portable Rust, one element at a time: the oracle, and what other processors run.
    Scalar,
    /// AVX2, FMA, F16C.
    Avx2,
    /// AVX-512 with its dot product of bytes (VNNI).
    Avx512,
}

impl Level {
    /// The best level this processor has.
    pub fn detect() -> Self {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| {
            #[cfg(target_arch = "x86_64")]
            {
                let avx2 = is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c");
                let avx512 = is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni");
                if avx2 && avx512 {
                    return Level::Avx512;
                }
                if avx2 {
                    return Level::Avx2;
                }
            }
            Level::Scalar
        })
    }

    /// `self`, or the best level this processor has where that is less.
    fn clamped(self) -> Self {
        self.min(Self::detect())
    }
}

/// Sixteen elements of four vectors.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Four([[f32; 16]; 4]);

/// Vectors of numbers in fours, as far as there are four, for kernels that take several at once: of each four the
/// sixteens with an even number, then the others. Vectors apart would share few sets of the first cache.
#[derive(Clone, Debug, Default)]
pub struct Fours(Vec<Four>);

impl Fours {
    /// Lays out `m` vectors, if kernels of `level` want that.
    pub fn new(level: Level, x: &[f32], m: usize, pool: &Pool) -> Self {
        let (k, count) = (x.len() / m.max(1), m / 4);
        if level.clamped() < Level::Avx512 || count == 0 {
            return Self::default();
        }
        let steps = k.div_ceil(16);
        let mut fours = vec![Four([[0.0; 16]; 4]); count * steps];
        pool.run_chunks(&mut fours, 64, |i, out| {
            for (nth, out) in (64 * i..).zip(out) {
                let (four, place) = (nth / steps, nth % steps);
                let evens = steps.div_ceil(2);
                let step = if place < evens { 2 * place } else { 2 * (place - evens) + 1 };
                for (j, out) in out.0.iter_mut().enumerate() {
                    let x = &x[(4 * four + j) * k..(4 * four + j + 1) * k][16 * step..k.min(16 * step + 16)];
                    out[..x.len()].copy_from_slice(x);
                }
            }
        });
        Self(fours)
    }
}

/// How activations must be prepared for a weight type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActKind {
    /// As `f32`.
    Plain,
    /// As [`Quantised`].
    Q8,
}

/// What `dtype`'s kernels multiply with.
pub fn act_kind(dtype: WeightType) -> ActKind {
    use WeightType::{BF16, F8_E4M3, F8_E8M0, F16, F32, Q2_K, Q3_K, Q5_0, Q5_1};
    match dtype {
        F32 | F16 | BF16 | F8_E4M3 | F8_E8M0 | Q5_0 | Q5_1 | Q2_K | Q3_K => ActKind::Plain,
        _ => ActKind::Q8,
    }
}

/// Activations for a block of rows: `m` vectors of `k` elements each, in the form the weight type wants.
#[derive(Clone, Copy, Debug)]
pub enum Acts<'a> {
    /// `m * k` numbers, and the same laid out for the level that computes.
    Plain(&'a [f32], &'a Fours),
    /// `m` vectors, quantised for the level that computes.
    Q8(&'a Quantised),
}

/// `out[r * m + j] = dot(row r, vector j)` for the `rows.len() / row_bytes` rows in `rows`.
///
/// `k` is the length of a row and of a vector, in elements; `acts` holds `m` vectors in the form [`act_kind`] asks for.
pub fn rows_dot(level: Level, dtype: WeightType, k: usize, rows: &[u8], acts: Acts<'_>, m: usize, out: &mut [f32]) {
    let row_bytes = k / dtype.block_elements() * dtype.block_bytes();
    if row_bytes == 0 || m == 0 {
        out.fill(0.0);
        return;
    }
    #[cfg(target_arch = "x86_64")]
    {
        use WeightType::{BF16, F16, F32, IQ4_NL, IQ4_XS, MXFP4, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0};
        let job = x86::Rows { k, row_bytes, rows, m };
        // SAFETY: `clamped` returns a level only after its features were detected (invariant 3).
        unsafe {
            match (level.clamped(), acts, dtype) {
                (Level::Avx512, Acts::Q8(a), Q4_0 | Q4_1 | Q8_0 | Q4_K | Q5_K | Q6_K | IQ4_NL | IQ4_XS | MXFP4) => {
                    return avx512::rows(dtype, job, a, out);
                }
                (Level::Avx2, Acts::Q8(a), Q4_0 | Q4_1 | Q8_0 | Q4_K | Q5_K | Q6_K | IQ4_NL | IQ4_XS | MXFP4) => {
                    return avx2::rows(dtype, job, a, out);
                }
                (Level::Avx512, Acts::Plain(a, fours), F32 | F16 | BF16) => {
                    return avx512::dense_rows(dtype, job, a, &fours.0, out);
                }
                (Level::Avx2, Acts::Plain(a, _), F32 | F16 | BF16) => {
                    return x86::dense_rows(dtype, job, a, out);
                }
                _ => {}
            }
        }
    }
    let mut weights = vec![0f32; k];
    let level = level.clamped();
    for (row, out) in rows.chunks_exact(row_bytes).zip(out.chunks_exact_mut(m)) {
        dequantise(dtype, row, &mut weights);
        for (j, out) in out.iter_mut().enumerate() {
            *out = match acts {
                Acts::Plain(a, _) => dot(level, &weights, &a[j * k..(j + 1) * k]),
                Acts::Q8(a) => scalar_dot(&weights, a, j),
            };
        }
    }
}

/// Fewest stored bytes worth handing to another thread.
const CHUNK_BYTES: usize = 8 << 10;

/// [`rows_dot`] by all threads of `pool`.
#[expect(clippy::too_many_arguments, reason = "the operands of one product, and who computes it")]
pub fn rows_dot_on(
    pool: &Pool,
    level: Level,
    dtype: WeightType,
    k: usize,
    rows: &[u8],
    acts: Acts<'_>,
    m: usize,
    out: &mut [f32],
) {
    let row_bytes = k / dtype.block_elements() * dtype.block_bytes();
    in_chunks(pool, row_bytes, rows, m, out, |_, rows, out| rows_dot(level, dtype, k, rows, acts, m, out));
}

/// How many of these rows a thread multiplies at a time with `m` vectors.
pub(crate) fn chunk_rows(pool: &Pool, row_bytes: usize, rows: usize, m: usize) -> usize {
    let least = (CHUNK_BYTES / row_bytes.max(1) / m.max(1)).max(1);
    // A multiple of four keeps the kernels' groups of rows whole.
    rows.div_ceil(pool.threads() * 4).max(least).next_multiple_of(4)
}

/// Has the threads of `pool` multiply chunks of rows with `m` vectors: `each` gets the number of a chunk's first row,
/// its rows, and where their products go.
pub(crate) fn in_chunks(
    pool: &Pool,
    row_bytes: usize,
    rows: &[u8],
    m: usize,
    out: &mut [f32],
    each: impl Fn(usize, &[u8], &mut [f32]) + Sync,
) {
    let row_bytes = row_bytes.max(1);
    let chunk = chunk_rows(pool, row_bytes, rows.len() / row_bytes, m);
    let stride = chunk * row_bytes;
    pool.run_chunks(out, chunk * m.max(1), |i, out| {
        each(i * chunk, &rows[i * stride..rows.len().min((i + 1) * stride)], out);
    });
}

fn scalar_dot(weights: &[f32], acts: &Quantised, j: usize) -> f32 {
    let (blocks, _) = weights.as_chunks::<BLOCK>();
    let mut total = 0f32;
    for (b, w) in blocks.iter().enumerate() {
        let (scale, q) = acts.block(j, b, blocks.len());
        let inner: f32 = w.iter().zip(q).map(|(w, q)| w * f32::from(*q)).sum();
        total += scale * inner;
    }
    total
}

/// Writes numbers of E4M3, multiplied by `scale`, as `f32`: the same whatever the level.
pub(crate) fn scaled_e4m3(level: Level, bytes: &[u8], scale: f32, out: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `clamped` returns a level only after its features were detected (invariant 3).
    unsafe {
        match level.clamped() {
            Level::Avx512 => return avx512::scaled_e4m3(bytes, scale, out),
            Level::Avx2 => return x86::scaled_e4m3(bytes, scale, out),
            Level::Scalar => {}
        }
    }
    let _ = level;
    scaled_e4m3_plainly(bytes, scale, out);
}

/// The same operations whatever they are compiled to.
#[inline(always)]
fn scaled_e4m3_plainly(bytes: &[u8], scale: f32, out: &mut [u8]) {
    let (out, _) = out.as_chunks_mut::<4>();
    out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = (e4m3(*byte) * scale).to_le_bytes());
}

/// The dot product of two vectors of numbers.
pub fn dot(level: Level, a: &[f32], b: &[f32]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if level.clamped() >= Level::Avx2 {
        // SAFETY: the features were detected (invariant 3).
        return unsafe { x86::dot_f32(a, b) };
    }
    let _ = level;
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `out[i] = dot(q, row i)`, where row `i` begins at `rows[i * stride]`.
///
/// # Panics
/// When `rows` ends before the last row does.
pub(crate) fn dots(level: Level, q: &[f32], rows: &[f32], stride: usize, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if level.clamped() >= Level::Avx2 {
        // SAFETY: the features were detected (invariant 3).
        return unsafe { x86::dots_f32(q, rows, stride, out) };
    }
    out.iter_mut().enumerate().for_each(|(i, out)| *out = dot(level, q, &rows[i * stride..][..q.len()]));
}

/// `y += a * x` for each `a` of `shares` in turn, where `x` of number `i` begins at `rows[i * stride]`.
///
/// # Panics
/// When `rows` ends before the last row does.
pub(crate) fn add_rows(level: Level, shares: &[f32], rows: &[f32], stride: usize, y: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if level.clamped() >= Level::Avx2 {
        // SAFETY: the features were detected (invariant 3).
        return unsafe { x86::add_rows_f32(shares, rows, stride, y) };
    }
    let len = y.len();
    shares.iter().enumerate().for_each(|(i, a)| axpy(level, *a, &rows[i * stride..][..len], y));
}

/// Rows become columns: row `r` of `products`, of which each has `m` elements, becomes column `r` of `out`.
pub(crate) fn transpose(products: &[f32], m: usize, out: &mut Columns<'_, f32>) {
    // A square of so many rows and columns at a time.
    const SIDE: usize = 16;
    let rows = products.len() / m.max(1);
    for first in (0..rows).step_by(SIDE) {
        for j in (0..m).step_by(SIDE) {
            let [high, wide] = [rows - first, m - j].map(|left| left.min(SIDE));
            let mut square = [[0f32; SIDE]; SIDE];
            for (r, row) in square[..high].iter_mut().enumerate() {
                let products = &products[(first + r) * m + j..];
                match products.first_chunk::<SIDE>() {
                    Some(products) => *row = *products,
                    None => row[..wide].copy_from_slice(&products[..wide]),
                }
            }
            for c in 0..wide {
                let out = &mut out.row(j + c)[first..first + high];
                out.iter_mut().zip(&square).for_each(|(out, row)| *out = row[c]);
            }
        }
    }
}

/// The dot product of numbers with half-precision numbers.
pub fn dot_f16(level: Level, a: &[f32], b: &[f16]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if level.clamped() >= Level::Avx2 {
        // SAFETY: the features were detected (invariant 3).
        return unsafe { x86::dot_f16(a, b) };
    }
    let _ = level;
    a.iter().zip(b).map(|(a, b)| a * b.to_f32()).sum()
}

/// `y += a * x`.
pub fn axpy(level: Level, a: f32, x: &[f32], y: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if level.clamped() >= Level::Avx2 {
        // SAFETY: the features were detected (invariant 3).
        return unsafe { x86::axpy_f32(a, x, y) };
    }
    let _ = level;
    y.iter_mut().zip(x).for_each(|(y, x)| *y += a * x);
}

/// `y += a * x` with half-precision `x`.
pub fn axpy_f16(level: Level, a: f32, x: &[f16], y: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if level.clamped() >= Level::Avx2 {
        // SAFETY: the features were detected (invariant 3).
        return unsafe { x86::axpy_f16(a, x, y) };
    }
    let _ = level;
    y.iter_mut().zip(x).for_each(|(y, x)| *y += a * x.to_f32());
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Kernels for plain numbers on 256-bit registers.

    use std::arch::x86_64::*;

    use super::blocks::part;
    use super::{WeightType, f16};

    /// A block of rows to be multiplied with `m` vectors of `k` elements.
    #[derive(Clone, Copy)]
    pub struct Rows<'a> {
        pub k: usize,
        pub row_bytes: usize,
        pub rows: &'a [u8],
        pub m: usize,
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    pub fn load16(bytes: &[u8; 16]) -> __m128i {
        // SAFETY: the reference covers the 16 bytes; the load needs no alignment.
        unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    pub fn load32<T: Byte>(bytes: &[T; 32]) -> __m256i {
        // SAFETY: the reference covers the 32 bytes; the load needs no alignment.
        unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    pub fn load_ps(values: &[f32; 8]) -> __m256 {
        // SAFETY: the reference covers the 32 bytes; the load needs no alignment.
        unsafe { _mm256_loadu_ps(values.as_ptr()) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    pub fn store_ps(values: &mut [f32; 8], x: __m256) {
        // SAFETY: the reference covers the 32 bytes; the store needs no alignment.
        unsafe { _mm256_storeu_ps(values.as_mut_ptr(), x) }
    }

    pub trait Byte: Copy {}
    impl Byte for u8 {}
    impl Byte for i8 {}

    #[inline]
    #[target_feature(enable = "avx2")]
    fn sum_ps(x: __m256) -> f32 {
        let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }

    /// [`scaled_e4m3`](super::scaled_e4m3).
    #[target_feature(enable = "avx2")]
    pub fn scaled_e4m3(bytes: &[u8], scale: f32, out: &mut [u8]) {
        super::scaled_e4m3_plainly(bytes, scale, out);
    }

    /// Multiplies rows of plain numbers with vectors of `f32`.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn dense_rows(dtype: WeightType, job: Rows<'_>, acts: &[f32], out: &mut [f32]) {
        match dtype {
            WeightType::F32 => dense::<128, 0>(job, acts, out),
            WeightType::F16 => dense::<64, 1>(job, acts, out),
            _ => dense::<64, 2>(job, acts, out),
        }
    }

    /// Eight stored numbers from the start of `bytes`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn widen<const KIND: u8>(bytes: &[u8]) -> __m256 {
        match KIND {
            0 => _mm256_castsi256_ps(load32(part::<32>(bytes, 0))),
            1 => _mm256_cvtph_ps(load16(part(bytes, 0))),
            _ => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(load16(part(bytes, 0))))),
        }
    }

    /// `BYTES` are the bytes of 32 elements. A few rows are multiplied with all vectors before the next ones, so that
    /// vectors are fetched once for them.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn dense<const BYTES: usize, const KIND: u8>(job: Rows<'_>, acts: &[f32], out: &mut [f32]) {
        const TILE: usize = 4;
        let Rows { k, row_bytes, rows, m } = job;
        let act = |j: usize| &acts[j * k..(j + 1) * k];
        for (rows, out) in rows.chunks(TILE * row_bytes).zip(out.chunks_mut(TILE * m)) {
            let row = |r: usize| &rows[r * row_bytes..(r + 1) * row_bytes];
            for j in (0..m).step_by(2) {
                for r in (0..rows.len() / row_bytes).step_by(2) {
                    let (two_rows, two_acts) = ((r + 1) * row_bytes < rows.len(), j + 1 < m);
                    let at = r * m + j;
                    match (two_rows, two_acts) {
                        (true, true) => {
                            let [a, b] = dense_some::<BYTES, KIND, 2, 2>([row(r), row(r + 1)], [act(j), act(j + 1)]);
                            out[at..at + 2].copy_from_slice(&a);
                            out[at + m..at + m + 2].copy_from_slice(&b);
                        }
                        (true, false) if m > 1 => {
                            let [[a], [b]] = dense_some::<BYTES, KIND, 2, 1>([row(r), row(r + 1)], [act(j)]);
                            (out[at], out[at + m]) = (a, b);
                        }
                        (false, true) => {
                            let [a] = dense_some::<BYTES, KIND, 1, 2>([row(r)], [act(j), act(j + 1)]);
                            out[at..at + 2].copy_from_slice(&a);
                        }
                        // A row at a time is read from memory as it lies there.
                        _ => {
                            for r in r..r + 1 + usize::from(two_rows) {
                                [[out[r * m + j]]] = dense_some::<BYTES, KIND, 1, 1>([row(r)], [act(j)]);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Each row with each vector: four sums of each 8 elements of 32, and what is behind the last 32.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn dense_some<const BYTES: usize, const KIND: u8, const R: usize, const M: usize>(
        rows: [&[u8]; R],
        acts: [&[f32]; M],
    ) -> [[f32; M]; R] {
        let mut acc = [[[_mm256_setzero_ps(); 4]; M]; R];
        if R * M == 1 {
            dense_sums::<BYTES, KIND, R, M, 4>(rows, acts, 0, &mut acc);
        } else {
            // The sums of half of them fit the registers.
            dense_sums::<BYTES, KIND, R, M, 2>(rows, acts, 0, &mut acc);
            dense_sums::<BYTES, KIND, R, M, 2>(rows, acts, 2, &mut acc);
        }
        let mut out = [[0f32; M]; R];
        for (r, out) in out.iter_mut().enumerate() {
            let (_, rest) = rows[r].as_chunks::<BYTES>();
            let mut weights = [0f32; 32];
            let behind = rest.len() / (BYTES / 32);
            super::dequantise(kind::<KIND>(), rest, &mut weights[..behind]);
            for (j, out) in out.iter_mut().enumerate() {
                let (_, x) = acts[j].as_chunks::<32>();
                let tail: f32 = weights.iter().zip(x).map(|(w, x)| w * x).sum();
                let [a, b, c, d] = acc[r][j];
                *out = sum_ps(_mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d))) + tail;
            }
        }
        out
    }

    /// `L` of the four sums, from number `first`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn dense_sums<const BYTES: usize, const KIND: u8, const R: usize, const M: usize, const L: usize>(
        rows: [&[u8]; R],
        acts: [&[f32]; M],
        first: usize,
        out: &mut [[[__m256; 4]; M]; R],
    ) {
        let (rows, acts) = (rows.map(|row| row.as_chunks::<BYTES>().0), acts.map(|x| x.as_chunks::<32>().0));
        let mut acc = [[[_mm256_setzero_ps(); L]; M]; R];
        for step in 0..rows[0].len() {
            for lane in 0..L {
                let x = acts.map(|x| eight(&x[step][8 * (first + lane)..]));
                for (acc, row) in acc.iter_mut().zip(rows) {
                    let w = widen::<KIND>(&row[step][(first + lane) * BYTES / 4..]);
                    for (acc, x) in acc.iter_mut().zip(x) {
                        acc[lane] = _mm256_fmadd_ps(w, x, acc[lane]);
                    }
                }
            }
        }
        for (out, acc) in out.as_flattened_mut().iter_mut().zip(acc.as_flattened()) {
            out[first..first + L].copy_from_slice(acc);
        }
    }

    const fn kind<const KIND: u8>() -> WeightType {
        match KIND {
            0 => WeightType::F32,
            1 => WeightType::F16,
            _ => WeightType::BF16,
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn eight(values: &[f32]) -> __m256 {
        match values.first_chunk::<8>() {
            Some(values) => load_ps(values),
            None => _mm256_setzero_ps(),
        }
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn dot_f32(a: &[f32], b: &[f32]) -> f32 {
        let mut acc = [_mm256_setzero_ps(); 2];
        let (wide_a, tail_a) = a.as_chunks::<16>();
        let (wide_b, tail_b) = b.as_chunks::<16>();
        for (a, b) in wide_a.iter().zip(wide_b) {
            acc[0] = _mm256_fmadd_ps(eight(&a[..8]), eight(&b[..8]), acc[0]);
            acc[1] = _mm256_fmadd_ps(eight(&a[8..]), eight(&b[8..]), acc[1]);
        }
        let tail: f32 = tail_a.iter().zip(tail_b).map(|(a, b)| a * b).sum();
        sum_ps(_mm256_add_ps(acc[0], acc[1])) + tail
    }

    /// [`dots`](super::dots), with the bits of [`dot_f32`].
    #[target_feature(enable = "avx2,fma")]
    pub fn dots_f32(q: &[f32], rows: &[f32], stride: usize, out: &mut [f32]) {
        let row = |i: usize| &rows[i * stride..][..q.len()];
        let (fours, rest) = out.as_chunks_mut::<4>();
        let done = 4 * fours.len();
        for (i, out) in fours.iter_mut().enumerate() {
            let rows = [0, 1, 2, 3].map(|r| row(4 * i + r).as_chunks::<16>());
            let (wide, tail) = q.as_chunks::<16>();
            let mut acc = [[_mm256_setzero_ps(); 2]; 4];
            for (step, q) in wide.iter().enumerate() {
                let q = [eight(&q[..8]), eight(&q[8..])];
                for (acc, row) in acc.iter_mut().zip(&rows) {
                    let row = &row.0[step];
                    acc[0] = _mm256_fmadd_ps(q[0], eight(&row[..8]), acc[0]);
                    acc[1] = _mm256_fmadd_ps(q[1], eight(&row[8..]), acc[1]);
                }
            }
            *out = sums_ps(acc.map(|[a, b]| _mm256_add_ps(a, b)));
            for (out, row) in out.iter_mut().zip(&rows) {
                *out += tail.iter().zip(row.1).map(|(a, b)| a * b).sum::<f32>();
            }
        }
        rest.iter_mut().enumerate().for_each(|(i, out)| *out = dot_f32(q, row(done + i)));
    }

    /// [`sum_ps`] of four, with its bits.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn sums_ps(x: [__m256; 4]) -> [f32; 4] {
        let four = x.map(|x| _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x)));
        let low = _mm_add_ps(_mm_unpacklo_ps(four[0], four[1]), _mm_unpackhi_ps(four[0], four[1]));
        let high = _mm_add_ps(_mm_unpacklo_ps(four[2], four[3]), _mm_unpackhi_ps(four[2], four[3]));
        let all = _mm_add_ps(_mm_movelh_ps(low, high), _mm_movehl_ps(high, low));
        let mut sums = [0f32; 4];
        // SAFETY: the reference covers the 16 bytes; the store needs no alignment.
        unsafe { _mm_storeu_ps(sums.as_mut_ptr(), all) };
        sums
    }

    /// [`add_rows`](super::add_rows), with the bits of [`axpy_f32`]: sums stay in registers for all rows.
    #[target_feature(enable = "avx2,fma")]
    pub fn add_rows_f32(shares: &[f32], rows: &[f32], stride: usize, y: &mut [f32]) {
        const WIDE: usize = 8;
        if shares.is_empty() {
            return;
        }
        let mut at = 0;
        while let Some(y) = y[at..].first_chunk_mut::<{ 8 * WIDE }>() {
            add_columns::<WIDE>(shares, &rows[at..], stride, y.as_chunks_mut::<8>().0);
            at += 8 * WIDE;
        }
        while let Some(y) = y[at..].first_chunk_mut::<8>() {
            add_columns::<1>(shares, &rows[at..], stride, y.as_chunks_mut::<8>().0);
            at += 8;
        }
        let tail = &mut y[at..];
        for (i, a) in shares.iter().enumerate() {
            let x = &rows[i * stride + at..][..tail.len()];
            tail.iter_mut().zip(x).for_each(|(y, x)| *y += a * x);
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn add_columns<const N: usize>(shares: &[f32], rows: &[f32], stride: usize, y: &mut [[f32; 8]]) {
        let mut acc: [__m256; N] = std::array::from_fn(|n| load_ps(&y[n]));
        for (i, a) in shares.iter().enumerate() {
            let (a, x) = (_mm256_set1_ps(*a), rows[i * stride..][..8 * N].as_chunks::<8>().0);
            for n in 0..N {
                acc[n] = _mm256_fmadd_ps(a, load_ps(&x[n]), acc[n]);
            }
        }
        y.iter_mut().zip(acc).for_each(|(y, acc)| store_ps(y, acc));
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn widen_f16(values: &[f16; 8]) -> __m256 {
        // SAFETY: the reference covers the 16 bytes; the load needs no alignment.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(values.as_ptr().cast()) })
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn dot_f16(a: &[f32], b: &[f16]) -> f32 {
        let mut acc = _mm256_setzero_ps();
        let (wide_a, tail_a) = a.as_chunks::<8>();
        let (wide_b, tail_b) = b.as_chunks::<8>();
        for (a, b) in wide_a.iter().zip(wide_b) {
            acc = _mm256_fmadd_ps(load_ps(a), widen_f16(b), acc);
        }
        let tail: f32 = tail_a.iter().zip(tail_b).map(|(a, b)| a * b.to_f32()).sum();
        sum_ps(acc) + tail
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn axpy_f32(a: f32, x: &[f32], y: &mut [f32]) {
        let scale = _mm256_set1_ps(a);
        let (wide_x, tail_x) = x.as_chunks::<8>();
        let (wide_y, tail_y) = y.as_chunks_mut::<8>();
        for (x, y) in wide_x.iter().zip(wide_y) {
            let sum = _mm256_fmadd_ps(scale, load_ps(x), load_ps(y));
            store_ps(y, sum);
        }
        tail_y.iter_mut().zip(tail_x).for_each(|(y, x)| *y += a * x);
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn axpy_f16(a: f32, x: &[f16], y: &mut [f32]) {
        let scale = _mm256_set1_ps(a);
        let (wide_x, tail_x) = x.as_chunks::<8>();
        let (wide_y, tail_y) = y.as_chunks_mut::<8>();
        for (x, y) in wide_x.iter().zip(wide_y) {
            let sum = _mm256_fmadd_ps(scale, widen_f16(x), load_ps(y));
            store_ps(y, sum);
        }
        tail_y.iter_mut().zip(tail_x).for_each(|(y, x)| *y += a * x.to_f32());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_quantised_alike_at_all_levels_whatever_they_hold() {
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-38, -1e-38, 1e-45, 0.0, f32::MAX];
        let mut state = 7u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        for round in 0..2000 {
            let scale = [1.0, 1e-30, 1e-38, 1e30][round % 4];
            let mut x: [f32; BLOCK] = std::array::from_fn(|_| (next() as f32 / (1 << 23) as f32 - 1.0) * scale);
            for value in odd.iter().take(round % 3) {
                x[next() as usize % BLOCK] = *value;
            }
            x[next() as usize % BLOCK] = odd[next() as usize % odd.len()];
            let plain = quantise_plainly(&x);
            let found = quantise(Level::detect(), &x);
            assert_eq!((found.q, found.half), (plain.q, plain.half), "{x:?}");
            assert_eq!(found.scale.to_bits(), plain.scale.to_bits(), "{x:?}");
        }
    }
}
