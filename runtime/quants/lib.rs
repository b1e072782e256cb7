//! The formats of stored weights, as ggml defines them, E4M3 and E8M0: numbers from bytes, and bytes from numbers.
//!
//! A row is a sequence of blocks without padding, and may begin at any address. The structs are `ggml-common.h`'s of
//! llama.cpp; what a field means is in `dequantize_row_*` of its `ggml-quants.c`. Integers are little-endian, and `d`,
//! `dmin` and `m` are f16. Sizes are in bytes, in the order of the fields.
//!
//! | type | elements | struct | value of an element |
//! |---|---|---|---|
//! | Q4_0 | 32 | `d` 2, `qs` 16 | `d * (q - 8)` |
//! | Q4_1 | 32 | `d` 2, `m` 2, `qs` 16 | `d * q + m` |
//! | Q5_0 | 32 | `d` 2, `qh` 4, `qs` 16 | `d * (q - 16)` |
//! | Q5_1 | 32 | `d` 2, `m` 2, `qh` 4, `qs` 16 | `d * q + m` |
//! | Q8_0 | 32 | `d` 2, `qs` 32 | `d * q`, `q` signed |
//! | Q2_K | 256 | `scales` 16, `qs` 64, `d` 2, `dmin` 2 | `d * scale * q - dmin * min`, one pair for 16 elements |
//! | Q3_K | 256 | `hmask` 32, `qs` 64, `scales` 12, `d` 2 | `d * (scale - 32) * (q - 4)`, one for 16 |
//! | Q4_K | 256 | `d` 2, `dmin` 2, `scales` 12, `qs` 128 | `d * scale * q - dmin * min`, one pair for 32 |
//! | Q5_K | 256 | `d` 2, `dmin` 2, `scales` 12, `qh` 32, `qs` 128 | the same |
//! | Q6_K | 256 | `ql` 128, `qh` 64, `scales` 16, `d` 2 | `d * scale * (q - 32)`, `scale` signed, one for 16 |
//! | IQ4_NL | 32 | `d` 2, `qs` 16 | `d * IQ4[q]` |
//! | IQ4_XS | 256 | `d` 2, `scales_h` 2, `scales_l` 4, `qs` 128 | `d * (scale - 32) * IQ4[q]`, one for 32 |
//! | MXFP4 | 32 | `e` 1, `qs` 16 | `2^(e - 128) * E2M1[q]` |
//! | F8_E4M3 | 1 | a byte | that of the OCP 8-bit Floating Point Specification (OFP8) |
//! | F8_E8M0 | 1 | a byte `e` | `2^(e - 127)`; 255 is no number |
//!
//! `q` is an element's quant: unsigned, of as many bits as the type's name says. Its low bits are in `qs` (`ql`), its
//! other bits in `qh` (`hmask`). Where they lie is said at the functions below. `IQ4` and `E2M1` are tables of whole
//! numbers. MXFP4 is of the Microscaling Formats (MX) Specification of the Open Compute Project, which has halves in
//! place of `E2M1`, and `2^(e - 127)`. What is no number there, `e` = 255, is one more power of two for ggml, and here.
//!
//! F8_E4M3 and F8_E8M0 are types of safetensors files, which ggml does not have. Models have scales for F8_E4M3 in
//! other tensors: what is read and written here is the number alone. F8_E8M0 is the type of the scales of the MX
//! specification.

#![warn(missing_docs)]

use half::{bf16, f16};

mod quantise;
#[cfg(test)]
mod tests;
mod weight_type;

pub use quantise::quantise;
pub use weight_type::WeightType;

/// Elements in one block of a K type, and of IQ4_XS.
const SUPER: usize = 256;

/// What the quants of IQ4_NL and IQ4_XS stand for, in ascending order.
pub const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Twice what the quants of MXFP4 stand for. Bit 3 is the sign, but of a zero.
pub const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Writes the values of a row (or of any whole number of blocks) to `out`.
pub fn dequantise(dtype: WeightType, row: &[u8], out: &mut [f32]) {
    match dtype {
        WeightType::F32 => each(row, out, |b, [o]: &mut [f32; 1]| *o = f32::from_le_bytes(*b)),
        WeightType::F16 => each(row, out, |b, [o]: &mut [f32; 1]| *o = f16::from_le_bytes(*b).to_f32()),
        WeightType::BF16 => each(row, out, |b, [o]: &mut [f32; 1]| *o = bf16::from_le_bytes(*b).to_f32()),
        WeightType::Q4_0 => each(row, out, q4_0),
        WeightType::Q4_1 => each(row, out, q4_1),
        WeightType::Q5_0 => each(row, out, q5_0),
        WeightType::Q5_1 => each(row, out, q5_1),
        WeightType::Q8_0 => each(row, out, q8_0),
        WeightType::Q2_K => each(row, out, q2_k),
        WeightType::Q3_K => each(row, out, q3_k),
        WeightType::Q4_K => each(row, out, q4_k),
        WeightType::Q5_K => each(row, out, q5_k),
        WeightType::Q6_K => each(row, out, q6_k),
        WeightType::IQ4_NL => each(row, out, iq4_nl),
        WeightType::IQ4_XS => each(row, out, iq4_xs),
        WeightType::MXFP4 => each(row, out, mxfp4),
        WeightType::F8_E4M3 => each(row, out, |[b], [o]: &mut [f32; 1]| *o = e4m3(*b)),
        WeightType::F8_E8M0 => each(row, out, |[b], [o]: &mut [f32; 1]| *o = e8m0(*b)),
    }
}

/// Calls `block` for each block of `row` and its elements.
fn each<const B: usize, const N: usize>(row: &[u8], out: &mut [f32], block: impl Fn(&[u8; B], &mut [f32; N])) {
    row.as_chunks().0.iter().zip(out.as_chunks_mut().0).for_each(|(b, o)| block(b, o));
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// The scale and the minimum of sub-block `j` (0..8) of a Q4_K or Q5_K block, from its 12 packed bytes: six bits each.
/// Bytes 0..4 hold the first four scales and bytes 4..8 the first four minima. Of the others, bytes 8..12 hold the low
/// four bits (of scales in the low half), and the upper two bits of bytes 0..8 hold the high two.
#[inline]
pub fn scale_min(j: usize, s: &[u8]) -> (u8, u8) {
    if j < 4 {
        (s[j] & 63, s[j + 4] & 63)
    } else {
        ((s[j + 4] & 15) | ((s[j - 4] >> 6) << 4), (s[j + 4] >> 4) | ((s[j] >> 6) << 4))
    }
}

/// The scale of sub-block `j` (0..16) of a Q3_K block, from its 12 packed bytes, in -32..32. Bytes 0..8 hold the low
/// four bits (of the first eight in the low half), byte 8 + i the high two bits of sub-blocks i, i + 4, i + 8, i + 12.
fn q3_scale(j: usize, s: &[u8]) -> i8 {
    let low = (s[j % 8] >> (j / 8 * 4)) & 15;
    let high = (s[8 + j % 4] >> (j / 4 * 2)) & 3;
    (low | high << 4) as i8 - 32
}

/// `2^(e - 128)`, for all 256 of `e`: half of what the byte stands for in the specification. The first two are
/// subnormal.
#[inline]
pub fn half_power(e: u8) -> f32 {
    let bits = if e < 2 { 0x0020_0000 << e } else { (u32::from(e) - 1) << 23 };
    f32::from_bits(bits)
}

/// The scale of sub-block `j` (0..8) of an IQ4_XS block, from the six bytes of `scales_h` and `scales_l`, in -32..32.
/// The first two bytes, as one number, hold the high two bits of each, the lowest those of the first. Byte `2 + j / 2`
/// holds the low four bits: in its low half where `j` is even.
#[inline]
pub fn iq4_scale(j: usize, s: [u8; 6]) -> i8 {
    let high = (u16::from_le_bytes([s[0], s[1]]) >> (2 * j)) & 3;
    let low = (s[2 + j / 2] >> (j % 2 * 4)) & 15;
    (low | (high as u8) << 4) as i8 - 32
}

/// `qs` of the types of four and five bits: element `i` is the low half of byte `i`, element `i + 16` its high half.
fn q4_0(b: &[u8; 18], o: &mut [f32; 32]) {
    let d = half_at(b, 0);
    for i in 0..16 {
        o[i] = d * (f32::from(b[2 + i] & 15) - 8.0);
        o[i + 16] = d * (f32::from(b[2 + i] >> 4) - 8.0);
    }
}

fn q4_1(b: &[u8; 20], o: &mut [f32; 32]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    for i in 0..16 {
        o[i] = d * f32::from(b[4 + i] & 15) + m;
        o[i + 16] = d * f32::from(b[4 + i] >> 4) + m;
    }
}

/// The quants of a Q5_0 or Q5_1 block: bit `i` of `high` is the fifth bit of element `i`.
#[inline(always)]
fn five_bits(high: [u8; 4], low: &[u8], value: impl Fn(f32) -> f32, o: &mut [f32; 32]) {
    let high = u32::from_le_bytes(high);
    // A mask for each element, not a shift: the vectors that all x86-64 have are not shifted by element.
    let fifth = |i: usize| if high & 1 << i != 0 { 16.0 } else { 0.0 };
    for i in 0..16 {
        o[i] = value(f32::from(low[i] & 15) + fifth(i));
        o[i + 16] = value(f32::from(low[i] >> 4) + fifth(i + 16));
    }
}

fn q5_0(b: &[u8; 22], o: &mut [f32; 32]) {
    let d = half_at(b, 0);
    five_bits([b[2], b[3], b[4], b[5]], &b[6..], |q| d * (q - 16.0), o);
}

fn q5_1(b: &[u8; 24], o: &mut [f32; 32]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    five_bits([b[4], b[5], b[6], b[7]], &b[8..], |q| d * q + m, o);
}

fn q8_0(b: &[u8; 34], o: &mut [f32; 32]) {
    let d = half_at(b, 0);
    o.iter_mut().zip(&b[2..]).for_each(|(o, q)| *o = d * f32::from(*q as i8));
}

/// Byte `j` of `scales` holds sub-block `j`'s scale in its low half and the minimum in its high half. Each half of a
/// block has 32 bytes of `qs`; elements `i`, `i + 32`, `i + 64` and `i + 96` of it are bits 0..2, 2..4, 4..6 and 6..8
/// of byte `i`.
fn q2_k(b: &[u8; 84], o: &mut [f32; SUPER]) {
    let (d, dmin) = (half_at(b, 80), half_at(b, 82));
    for (j, o) in o.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let (scale, min) = (d * f32::from(b[j] & 15), dmin * f32::from(b[j] >> 4));
        let shift = j % 8 / 2 * 2;
        for (o, q) in o.iter_mut().zip(&b[16 + j / 8 * 32 + j % 2 * 16..]) {
            *o = scale * f32::from((q >> shift) & 3) - min;
        }
    }
}

/// `qs` as in Q2_K. Bit `t` of byte `i` of `hmask` is the third bit of element `32 * t + i`.
fn q3_k(b: &[u8; 110], o: &mut [f32; SUPER]) {
    let d = half_at(b, 108);
    for (j, o) in o.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(q3_scale(j, &b[96..108]));
        let (shift, third) = (j % 8 / 2 * 2, 1u8 << (j / 2));
        let quants = b[32 + j / 8 * 32 + j % 2 * 16..].iter().zip(&b[j % 2 * 16..]);
        for (o, (q, high)) in o.iter_mut().zip(quants) {
            let below = if high & third == 0 { 4.0 } else { 0.0 };
            *o = scale * (f32::from((q >> shift) & 3) - below);
        }
    }
}

/// Each 32 bytes of `qs` hold two sub-blocks: one in the low halves, the next in the high halves.
fn q4_k(b: &[u8; 144], o: &mut [f32; SUPER]) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    for (j, o) in o.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = scale_min(j, &b[4..16]);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        let shift = j % 2 * 4;
        for (o, q) in o.iter_mut().zip(&b[16 + j / 2 * 32..]) {
            *o = scale * f32::from((q >> shift) & 15) - min;
        }
    }
}

/// `scales` and `qs` as in Q4_K. Bit `j` of byte `i` of `qh` is the fifth bit of element `i` of sub-block `j`.
fn q5_k(b: &[u8; 176], o: &mut [f32; SUPER]) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    for (j, o) in o.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = scale_min(j, &b[4..16]);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        let (shift, fifth) = (j % 2 * 4, 1u8 << j);
        let quants = b[48 + j / 2 * 32..].iter().zip(&b[16..48]);
        for (o, (q, high)) in o.iter_mut().zip(quants) {
            let above = if high & fifth == 0 { 0.0 } else { 16.0 };
            *o = scale * (f32::from((q >> shift) & 15) + above) - min;
        }
    }
}

/// Each half of a block has 64 bytes of `ql` and 32 of `qh`. Elements `i` and `i + 64` of it are the low and the high
/// half of byte `i` of `ql` (`i` below 64); `qh` has two more bits of each, in places as those of `qs` in Q2_K.
fn q6_k(b: &[u8; 210], o: &mut [f32; SUPER]) {
    let d = half_at(b, 208);
    for (j, o) in o.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(b[192 + j] as i8);
        let (half, quarter) = (j / 8, j % 8 / 2);
        let (low_shift, high_shift) = (quarter / 2 * 4, quarter * 2);
        let low = &b[half * 64 + quarter % 2 * 32 + j % 2 * 16..];
        let quants = low.iter().zip(&b[128 + half * 32 + j % 2 * 16..]);
        for (o, (low, high)) in o.iter_mut().zip(quants) {
            let q = (low >> low_shift) & 15 | ((high >> high_shift) & 3) << 4;
            *o = scale * (f32::from(q) - 32.0);
        }
    }
}

/// A number of E4M3: a sign, four bits of an exponent with a bias of 7, three of a fraction. With all seven set it is
/// no number; none is infinite. Nothing is computed with subnormal `f32`, which many processors are slow with.
#[inline(always)]
pub fn e4m3(b: u8) -> f32 {
    let magnitude = b & 0x7F;
    // The exponent of binary32 has a bias of 127. With the exponent 0 there is no leading one.
    let number = match magnitude {
        0..8 => f32::from(magnitude) * f32::from_bits((127 - 9) << 23),
        0x7F => f32::NAN,
        _ => f32::from_bits((u32::from(magnitude) << 20) + ((127 - 7) << 23)),
    };
    f32::from_bits(number.to_bits() | u32::from(b & 0x80) << 24)
}

#[inline(always)]
fn e8m0(b: u8) -> f32 {
    if b == u8::MAX { f32::NAN } else { 2.0 * half_power(b) }
}

/// Writes `d` times what the quants of a block of 32 stand for in `table`; `qs` as in Q4_0.
#[inline(always)]
fn looked_up(table: &[i8; 16], d: f32, qs: &[u8; 16], o: &mut [f32; 32]) {
    let values = table.map(|value| d * f32::from(value));
    for (i, q) in qs.iter().enumerate() {
        o[i] = values[usize::from(q & 15)];
        o[i + 16] = values[usize::from(q >> 4)];
    }
}

fn iq4_nl(b: &[u8; 18], o: &mut [f32; 32]) {
    let [d0, d1, qs @ ..] = b;
    looked_up(&IQ4, f16::from_le_bytes([*d0, *d1]).to_f32(), qs, o);
}

/// Each 16 bytes of `qs` hold a sub-block, in the order of a block of IQ4_NL.
fn iq4_xs(b: &[u8; 136], o: &mut [f32; SUPER]) {
    let [d0, d1, s0, s1, s2, s3, s4, s5, qs @ ..] = b;
    let (d, scales) = (f16::from_le_bytes([*d0, *d1]).to_f32(), [*s0, *s1, *s2, *s3, *s4, *s5]);
    for (j, (qs, o)) in qs.as_chunks::<16>().0.iter().zip(o.as_chunks_mut::<32>().0).enumerate() {
        looked_up(&IQ4, d * f32::from(iq4_scale(j, scales)), qs, o);
    }
}

fn mxfp4(b: &[u8; 17], o: &mut [f32; 32]) {
    let [e, qs @ ..] = b;
    looked_up(&E2M1, half_power(*e), qs, o);
}
