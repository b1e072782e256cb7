//! Numbers to blocks, by the rules by which llama.cpp writes files where no importance matrix is given: those of
//! `quantize_row_*_ref` of ggml's `ggml-quants.c`, and for IQ4_NL that of `quantize_iq4_nl`, which tries more scales.
//!
//! Bytes are the same as ggml's for finite numbers, if its compiler fused no products with sums, as none does that
//! compiles for all x86-64 processors. Where `d` or `dmin` is zero as f16, what it is multiplied by may differ:
//! inverses of tiny ranges are infinite, of which ggml's conversions to integers make what they will. So may blocks of
//! MXFP4 of numbers below 2^-125.
//!
//! Sums are added in the order of elements, because a rule compares sums that differ in their last bits.

use half::{bf16, f16};

use super::{E2M1, IQ4, SUPER, half_power};
use crate::WeightType;

/// Sub-blocks of the K types with numbers below this are zeros.
const ZERO: f32 = 1e-15;

/// Elements that one scale of Q3_K and Q6_K is for.
const SUB: usize = 16;

/// Quantises `values` (a whole number of blocks, all finite) to `dtype`, appending to `out`.
pub fn quantise(dtype: WeightType, values: &[f32], out: &mut Vec<u8>) {
    match dtype {
        WeightType::F32 => each(values, out, |[v]: &[f32; 1]| v.to_le_bytes()),
        WeightType::F16 => each(values, out, |[v]: &[f32; 1]| f16::from_f32(*v).to_le_bytes()),
        WeightType::BF16 => each(values, out, |[v]: &[f32; 1]| bf16::from_f32(*v).to_le_bytes()),
        WeightType::F8_E4M3 => each(values, out, |[v]: &[f32; 1]| [e4m3(*v)]),
        WeightType::F8_E8M0 => each(values, out, |[v]: &[f32; 1]| [e8m0(*v)]),
        WeightType::Q4_0 => each(values, out, q4_0),
        WeightType::Q4_1 => each(values, out, q4_1),
        WeightType::Q5_0 => each(values, out, q5_0),
        WeightType::Q5_1 => each(values, out, q5_1),
        WeightType::Q8_0 => each(values, out, q8_0),
        WeightType::Q2_K => each(values, out, q2_k),
        WeightType::Q3_K => each(values, out, q3_k),
        WeightType::Q4_K => each(values, out, q4_k),
        WeightType::Q5_K => each(values, out, q5_k),
        WeightType::Q6_K => each(values, out, q6_k),
        WeightType::IQ4_NL => each(values, out, iq4_nl),
        WeightType::IQ4_XS => each(values, out, iq4_xs),
        WeightType::MXFP4 => each(values, out, mxfp4),
    }
}

/// Appends the block that `block` makes of each `N` values.
fn each<const N: usize, const B: usize>(values: &[f32], out: &mut Vec<u8>, block: impl Fn(&[f32; N]) -> [u8; B]) {
    values.as_chunks().0.iter().for_each(|values| out.extend_from_slice(&block(values)));
}

/// A block of its fields' bytes, in their order.
fn joined<const B: usize>(fields: &[&[u8]]) -> [u8; B] {
    let mut block = [0; B];
    let mut at = 0;
    for field in fields {
        block[at..at + field.len()].copy_from_slice(field);
        at += field.len();
    }
    block
}

/// The nearest integer, the even one of two as near, of a number below 2^22.
fn nearest(v: f32) -> f32 {
    // Adding 1.5 * 2^23 leaves no bits for the fraction. It vectorises where `round_ties_even` is a call.
    (v + 12_582_912.0) - 12_582_912.0
}

/// `v` within the bounds; what is no number (zero times an infinite inverse) is the least.
fn within(v: f32, least: f32, most: f32) -> f32 {
    v.max(least).min(most)
}

/// The first of the numbers that are farthest from zero.
fn farthest(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |far: f32, v| if v.abs() > far.abs() { *v } else { far })
}

/// The sum over elements, in their order.
fn sum<const N: usize>(term: impl Fn(usize) -> f32) -> f32 {
    (0..N).map(term).sum()
}

fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// A scale, and quants such that the number farthest from zero is `-zero` times the scale.
fn around(x: &[f32; 32], zero: u8) -> (f16, [u8; 32]) {
    let d = farthest(x) / -f32::from(zero);
    let inverse = inverse(d);
    let quants = x.map(|v| ((v * inverse + (f32::from(zero) + 0.5)) as u8).min(2 * zero - 1));
    (f16::from_f32(d), quants)
}

/// A scale, the least number, and quants from 0 for it to `most` for the largest.
fn from_least(x: &[f32; 32], most: u8) -> (f16, f16, [u8; 32]) {
    let least = x.iter().fold(f32::MAX, |least, v| if *v < least { *v } else { least });
    let largest = x.iter().fold(f32::MIN, |largest, v| if *v > largest { *v } else { largest });
    let d = (largest - least) / f32::from(most);
    let inverse = inverse(d);
    let quants = x.map(|v| (((v - least) * inverse + 0.5) as u8).min(most));
    (f16::from_f32(d), f16::from_f32(least), quants)
}

/// The low four bits of quants: of the first half of them, and above these of the second half.
fn nibbles<const N: usize>(quants: &[u8]) -> [u8; N] {
    std::array::from_fn(|i| quants[i] & 15 | quants[i + N] << 4)
}

/// The fifth bits of quants.
fn fifths(quants: &[u8; 32]) -> [u8; 4] {
    quants.iter().enumerate().fold(0, |bits, (i, q)| bits | u32::from(q >> 4) << i).to_le_bytes()
}

fn q4_0(x: &[f32; 32]) -> [u8; 18] {
    let (d, q) = around(x, 8);
    joined(&[&d.to_le_bytes(), &nibbles::<16>(&q)])
}

fn q4_1(x: &[f32; 32]) -> [u8; 20] {
    let (d, m, q) = from_least(x, 15);
    joined(&[&d.to_le_bytes(), &m.to_le_bytes(), &nibbles::<16>(&q)])
}

fn q5_0(x: &[f32; 32]) -> [u8; 22] {
    let (d, q) = around(x, 16);
    joined(&[&d.to_le_bytes(), &fifths(&q), &nibbles::<16>(&q)])
}

fn q5_1(x: &[f32; 32]) -> [u8; 24] {
    let (d, m, q) = from_least(x, 31);
    joined(&[&d.to_le_bytes(), &m.to_le_bytes(), &fifths(&q), &nibbles::<16>(&q)])
}

fn q8_0(x: &[f32; 32]) -> [u8; 34] {
    let d = farthest(x).abs() / 127.0;
    let inverse = inverse(d);
    let q = x.map(|v| (v * inverse).round() as i8 as u8);
    joined(&[&f16::from_f32(d).to_le_bytes(), &q])
}

/// How a type with minima searches for a sub-block's scale and minimum.
struct Search {
    /// The largest quant.
    most: f32,
    /// The largest scale and minimum of a sub-block, in units of the block's.
    scale_most: f32,
    /// Ranges of quants that are tried: `most + first`, and `steps` more, 0.1 apart.
    first: f32,
    steps: usize,
    /// Minimise the sum of |x| |error|; otherwise that of (|x| + the root mean square of x) error^2.
    absolute: bool,
}

/// A block of a type with minima: values are `d * scale * q - dmin * min`.
struct Affine {
    d: f16,
    dmin: f16,
    /// As many as there are sub-blocks.
    scales: [u8; 16],
    mins: [u8; 16],
    q: [u8; SUPER],
}

impl Search {
    /// Quantises a block in sub-blocks of `N`. Quants are rounded once more when the scales are integers.
    fn block<const N: usize>(&self, x: &[f32; SUPER]) -> Affine {
        let (x, _) = x.as_chunks::<N>();
        let mut q = [0; SUPER];
        let (quants, _) = q.as_chunks_mut::<N>();
        let (mut scales, mut mins) = ([0f32; 16], [0f32; 16]);
        for (j, (x, q)) in x.iter().zip(&mut *quants).enumerate() {
            (scales[j], mins[j]) = self.sub_block(x, q);
        }
        let (d, scales) = self.integers(&scales);
        let (dmin, mins) = self.integers(&mins);
        for (j, (x, q)) in x.iter().zip(quants).enumerate() {
            let scale = d.to_f32() * f32::from(scales[j]);
            let min = dmin.to_f32() * f32::from(mins[j]);
            if scale != 0.0 {
                *q = x.map(|v| within(nearest((v + min) / scale), 0.0, self.most) as u8);
            }
        }
        Affine { d, dmin, scales, mins, q }
    }

    /// The unit of the numbers, none of which is negative, and the numbers in it.
    fn integers(&self, numbers: &[f32; 16]) -> (f16, [u8; 16]) {
        let largest = numbers.iter().fold(0f32, |a, b| a.max(*b));
        let inverse = if largest > 0.0 { self.scale_most / largest } else { 0.0 };
        let integers = numbers.map(|v| within(nearest(inverse * v), 0.0, self.scale_most) as u8);
        (f16::from_f32(largest / self.scale_most), integers)
    }

    /// Quantises a sub-block, and returns its scale and minimum. For each range that is tried, numbers above the best
    /// minimum so far are rounded to quants, and scale and minimum are those of the weighted least squares for these.
    fn sub_block<const N: usize>(&self, x: &[f32; N], q: &mut [u8; N]) -> (f32, f32) {
        let weights = self.weights(x);
        let mut min = x.iter().fold(0f32, |least, v| if *v < least { *v } else { least });
        let largest = x.iter().fold(f32::MIN, |largest, v| if *v > largest { *v } else { largest });
        if largest == min {
            *q = [0; N];
            return (0.0, -min);
        }
        let quants = |inverse: f32, min: f32| x.map(|v| within(nearest(inverse * (v - min)), 0.0, self.most));
        let error = |scale: f32, min: f32, quants: &[f32; N]| {
            sum::<N>(|i| {
                let off = scale * quants[i] + min - x[i];
                weights[i] * if self.absolute { off.abs() } else { off * off }
            })
        };

        let inverse = self.most / (largest - min);
        let mut scale = 1.0 / inverse;
        let mut best = quants(inverse, min);
        let mut best_error = error(scale, min, &best);
        let (sum_w, sum_x) = (sum::<N>(|i| weights[i]), sum::<N>(|i| weights[i] * x[i]));
        for step in 0..=self.steps {
            let range = self.first + 0.1 * step as f32 + self.most;
            let tried = quants(range / (largest - min), min);
            let sum_q = sum::<N>(|i| weights[i] * tried[i]);
            let sum_qq = sum::<N>(|i| weights[i] * tried[i] * tried[i]);
            let sum_xq = sum::<N>(|i| weights[i] * tried[i] * x[i]);
            let determinant = sum_w * sum_qq - sum_q * sum_q;
            if determinant <= 0.0 {
                continue;
            }
            let mut its_scale = (sum_w * sum_xq - sum_x * sum_q) / determinant;
            let mut its_min = (sum_qq * sum_x - sum_q * sum_xq) / determinant;
            if its_min > 0.0 {
                // A file's minima are subtracted, and are not negative.
                (its_scale, its_min) = (sum_xq / sum_qq, 0.0);
            }
            let its_error = error(its_scale, its_min, &tried);
            if its_error < best_error {
                (scale, min, best, best_error) = (its_scale, its_min, tried, its_error);
            }
        }
        *q = best.map(|q| q as u8);
        (scale, -min)
    }

    /// What the error of each element is multiplied by.
    fn weights<const N: usize>(&self, x: &[f32; N]) -> [f32; N] {
        if self.absolute {
            return x.map(f32::abs);
        }
        let root_mean = (sum::<N>(|i| x[i] * x[i]) / N as f32).sqrt();
        x.map(|v| root_mean + v.abs())
    }
}

/// The `qs` of Q2_K and Q3_K.
fn pairs_of_bits(q: &[u8; SUPER]) -> [u8; 64] {
    std::array::from_fn(|i| {
        let at = i / 32 * 128 + i % 32;
        (0..4).fold(0, |byte, k| byte | (q[at + 32 * k] & 3) << (2 * k))
    })
}

/// The `qs` of Q4_K and Q5_K.
fn halves_of_bytes(q: &[u8; SUPER]) -> [u8; 128] {
    std::array::from_fn(|i| {
        let at = i / 32 * 64 + i % 32;
        q[at] & 15 | q[at + 32] << 4
    })
}

/// Bit `bit` of each quant: of element `32 * t + i` in bit `t` of byte `i`.
fn one_bit(q: &[u8; SUPER], bit: u32) -> [u8; 32] {
    std::array::from_fn(|i| (0..8).fold(0, |byte, t| byte | (q[32 * t + i] >> bit & 1) << t))
}

/// The `scales` of Q4_K and Q5_K, as `scale_min` reads them.
fn six_bits(scales: &[u8; 16], mins: &[u8; 16]) -> [u8; 12] {
    std::array::from_fn(|i| match i {
        0..4 => scales[i] | scales[i + 4] >> 4 << 6,
        4..8 => mins[i - 4] | mins[i] >> 4 << 6,
        _ => scales[i - 4] & 15 | mins[i - 4] << 4,
    })
}

fn q2_k(x: &[f32; SUPER]) -> [u8; 84] {
    let search = Search { most: 3.0, scale_most: 15.0, first: -0.5, steps: 15, absolute: true };
    let Affine { d, dmin, scales, mins, q } = search.block::<16>(x);
    let scales: [u8; 16] = std::array::from_fn(|j| scales[j] | mins[j] << 4);
    joined(&[&scales, &pairs_of_bits(&q), &d.to_le_bytes(), &dmin.to_le_bytes()])
}

fn q4_k(x: &[f32; SUPER]) -> [u8; 144] {
    let search = Search { most: 15.0, scale_most: 63.0, first: -1.0, steps: 20, absolute: false };
    let Affine { d, dmin, scales, mins, q } = search.block::<32>(x);
    joined(&[&d.to_le_bytes(), &dmin.to_le_bytes(), &six_bits(&scales, &mins), &halves_of_bytes(&q)])
}

fn q5_k(x: &[f32; SUPER]) -> [u8; 176] {
    let search = Search { most: 31.0, scale_most: 63.0, first: -0.5, steps: 15, absolute: false };
    let Affine { d, dmin, scales, mins, q } = search.block::<32>(x);
    let low = halves_of_bytes(&q);
    joined(&[&d.to_le_bytes(), &dmin.to_le_bytes(), &six_bits(&scales, &mins), &one_bit(&q, 4), &low])
}

/// Quants of a sub-block without a minimum, before `half` is added, and the sums that its scale is made of. Weights are
/// the squares of the elements.
struct Levels {
    q: [f32; SUB],
    /// The weighted sum of elements times quants, and that of quants squared.
    xq: f32,
    qq: f32,
}

impl Levels {
    fn new(x: &[f32; SUB], inverse: f32, half: f32) -> Self {
        let q = x.map(|v| within(nearest(inverse * v), -half, half - 1.0));
        let (mut xq, mut qq) = (0.0, 0.0);
        for (x, q) in x.iter().zip(q) {
            xq += x * x * x * q;
            qq += x * x * q * q;
        }
        Self { q, xq, qq }
    }

    /// The scale of the least squares.
    fn scale(&self) -> f32 {
        if self.qq > 0.0 { self.xq / self.qq } else { 0.0 }
    }

    fn stored(&self, half: f32) -> [u8; SUB] {
        self.q.map(|q| (q + half) as u8)
    }
}

/// Q6_K's scale and quants of a sub-block: the best of 19 ranges.
fn best_range(x: &[f32; SUB], half: f32) -> (f32, [u8; SUB]) {
    let far = farthest(x);
    let mut best = Levels::new(x, -half / far, half);
    let mut scale = best.scale();
    for step in (-9i8..=9).filter(|step| *step != 0) {
        let tried = Levels::new(x, -(half + 0.1 * f32::from(step)) / far, half);
        if tried.qq > 0.0 && tried.xq * tried.xq > scale * best.xq * tried.qq {
            scale = tried.scale();
            best = tried;
        }
    }
    (scale, best.stored(half))
}

/// Q3_K's scale and quants of a sub-block: one element's quant after the other is changed where that makes the error
/// less, five times over.
fn best_quants(x: &[f32; SUB], half: f32) -> (f32, [u8; SUB]) {
    let mut best = Levels::new(x, -half / farthest(x), half);
    for _ in 0..5 {
        let before = best.q;
        for (i, v) in x.iter().enumerate() {
            let (w, q) = (v * v, best.q[i]);
            let (mut xq, mut qq) = (best.xq - w * v * q, best.qq - w * q * q);
            if xq <= 0.0 {
                continue;
            }
            let other = within(nearest(v * qq / xq), -half, half - 1.0);
            if other == q {
                continue;
            }
            xq += w * v * other;
            qq += w * other * other;
            if qq > 0.0 && xq * xq * best.qq > best.xq * best.xq * qq {
                best.q[i] = other;
                (best.xq, best.qq) = (xq, qq);
            }
        }
        if best.q == before {
            break;
        }
    }
    (best.scale(), best.stored(half))
}

/// A block of a type without minima: values are `d * scale * (q - half)`.
struct Symmetric {
    d: f16,
    scales: [i8; SUPER / SUB],
    q: [u8; SUPER],
}

/// Quantises a block whose scales are in `-scale_half..scale_half`, with the scale and the quants that `fit` finds for
/// a sub-block. `None` where all scales are zero.
fn symmetric(
    x: &[f32; SUPER],
    half: f32,
    scale_half: f32,
    fit: fn(&[f32; SUB], f32) -> (f32, [u8; SUB]),
) -> Option<Symmetric> {
    let (x, _) = x.as_chunks::<SUB>();
    let mut q = [0; SUPER];
    let (quants, _) = q.as_chunks_mut::<SUB>();
    let mut scales = [0f32; SUPER / SUB];
    for ((x, q), scale) in x.iter().zip(&mut *quants).zip(&mut scales) {
        if farthest(x).abs() >= ZERO {
            (*scale, *q) = fit(x, half);
        }
    }
    let far = farthest(&scales);
    if far.abs() < ZERO {
        return None;
    }
    // The largest scale is -scale_half, which has no counterpart above.
    let inverse = -scale_half / far;
    let d = f16::from_f32(1.0 / inverse);
    let scales = scales.map(|scale| within(nearest(inverse * scale), -scale_half, scale_half - 1.0) as i8);
    for ((x, q), scale) in x.iter().zip(quants).zip(scales) {
        let scale = d.to_f32() * f32::from(scale);
        if scale != 0.0 {
            *q = x.map(|v| (within(nearest(v / scale), -half, half - 1.0) + half) as u8);
        }
    }
    Some(Symmetric { d, scales, q })
}

fn q3_k(x: &[f32; SUPER]) -> [u8; 110] {
    let Some(Symmetric { d, scales, q }) = symmetric(x, 4.0, 32.0, best_quants) else { return [0; 110] };
    let scales = scales.map(|scale| (scale + 32) as u8);
    let packed: [u8; 12] = std::array::from_fn(|i| match i {
        0..8 => scales[i] & 15 | scales[i + 8] << 4,
        _ => (0..4).fold(0, |byte, k| byte | scales[i - 8 + 4 * k] >> 4 << (2 * k)),
    });
    joined(&[&one_bit(&q, 2), &pairs_of_bits(&q), &packed, &d.to_le_bytes()])
}

fn q6_k(x: &[f32; SUPER]) -> [u8; 210] {
    let Some(Symmetric { d, scales, q }) = symmetric(x, 32.0, 128.0, best_range) else { return [0; 210] };
    let (first, second) = q.split_at(SUPER / 2);
    let high = pairs_of_bits(&q.map(|q| q >> 4));
    let scales = scales.map(|scale| scale as u8);
    joined(&[&nibbles::<64>(first), &nibbles::<64>(second), &high, &scales, &d.to_le_bytes()])
}

/// The number of the nearest value of [`IQ4`], of the larger one of two as near.
fn nearest_iq4(v: f32) -> u8 {
    // So many borders between neighbours are not above it.
    IQ4.windows(2).map(|pair| u8::from(v >= (f32::from(pair[0]) + f32::from(pair[1])) / 2.0)).sum()
}

/// For quants of a block of 32 by [`IQ4`], the sums that the scale of the least squares is made of. Weights are the
/// squares of the elements.
struct Listed {
    xq: f32,
    qq: f32,
}

impl Listed {
    fn new(x: &[f32; 32], inverse: f32) -> Self {
        let values = x.map(|v| f32::from(IQ4[usize::from(nearest_iq4(inverse * v))]));
        let value = |i: usize| values[i];
        let xq = sum::<32>(|i| x[i] * x[i] * value(i) * x[i]);
        let qq = sum::<32>(|i| x[i] * x[i] * value(i) * value(i));
        Self { xq, qq }
    }

    fn scale(&self) -> f32 {
        if self.qq > 0.0 { self.xq / self.qq } else { 0.0 }
    }
}

/// The scale of a block of IQ4_NL, or of a sub-block of IQ4_XS: the best of 16 ranges.
fn best_listed(x: &[f32; 32]) -> f32 {
    let (far, end) = (farthest(x), f32::from(IQ4[0]));
    if far.abs() < ZERO {
        return 0.0;
    }
    let first = Listed::new(x, 1.0 / (-far / end));
    let mut scale = first.scale();
    let mut best = scale * first.xq;
    for step in -7i8..=7 {
        let tried = Listed::new(x, (f32::from(step) + end) / far);
        if tried.qq > 0.0 && tried.xq * tried.xq > best * tried.qq {
            scale = tried.scale();
            best = scale * tried.xq;
        }
    }
    scale
}

fn iq4_nl(x: &[f32; 32]) -> [u8; 18] {
    let d = best_listed(x);
    let inverse = inverse(d);
    let q = x.map(|v| nearest_iq4(inverse * v));
    joined(&[&f16::from_f32(d).to_le_bytes(), &nibbles::<16>(&q)])
}

fn iq4_xs(x: &[f32; SUPER]) -> [u8; 136] {
    let (x, _) = x.as_chunks::<32>();
    let found: [f32; 8] = std::array::from_fn(|j| best_listed(&x[j]));
    // The largest scale is -32, which has no counterpart above. Quants are rounded for `d` before it is f16.
    let d = -farthest(&found) / 32.0;
    let (mut scales, mut qs) = ([0u8; 8], [0u8; SUPER / 2]);
    for (j, x) in x.iter().enumerate() {
        let scale = within(nearest(inverse(d) * found[j]), -32.0, 31.0);
        let inverse = inverse(d * scale);
        let q = x.map(|v| nearest_iq4(inverse * v));
        qs.as_chunks_mut::<16>().0[j] = nibbles(&q);
        scales[j] = (scale + 32.0) as u8;
    }
    let high = scales.iter().enumerate().fold(0, |bits, (j, scale)| bits | u16::from(scale >> 4) << (2 * j));
    let low: [u8; 4] = std::array::from_fn(|i| scales[2 * i] & 15 | scales[2 * i + 1] << 4);
    joined(&[&f16::from_f32(d).to_le_bytes(), &high.to_le_bytes(), &low, &qs])
}

/// The largest number is in 4..8 times the power of two, so that those above 6 become 6: what the specification wants.
/// Quants are the nearest, the first of two as near.
fn mxfp4(x: &[f32; 32]) -> [u8; 17] {
    let most = farthest(x).abs();
    // The logarithm is f32's, as ggml's: that of a number just below a power of two is rounded up.
    let e = if most > 0.0 { (most.log2().floor() + 125.0) as u8 } else { 0 };
    let d = half_power(e);
    let q = x.map(|v| {
        let off = |q: u8| (d * f32::from(E2M1[usize::from(q)]) - v).abs();
        (1..16).fold(0, |best, q| if off(q) < off(best) { q } else { best })
    });
    joined(&[&[e], &nibbles::<16>(&q)])
}

/// The nearest number of E4M3, even where two are; the largest for one beyond it.
fn e4m3(value: f32) -> u8 {
    let magnitude = value.abs().min(448.0);
    // Below the least exponent numbers are as far apart as at it.
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-6);
    let steps = (magnitude * 2f32.powi(3 - exponent)).round_ties_even() as u8;
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() { 0x7F } else { sign | ((exponent + 6) as u8 * 8 + steps) }
}

/// The power of two that is at most the value without its sign; the least, 2^-127, for one below it.
fn e8m0(value: f32) -> u8 {
    // The exponents of both have the same bias. Where it is 0 here, the number is below 2^-126.
    let exponent = (value.to_bits() >> 23) as u8;
    if value.is_finite() { exponent } else { u8::MAX }
}
