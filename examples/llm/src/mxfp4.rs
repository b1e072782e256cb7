//! MXFP4 as gpt-oss is published in safetensors: a matrix is two tensors of bytes. `X_blocks` has 16 bytes for each 32
//! elements of a row, and `X_scales` one. ggml has the same bits in another order, in which the kernels take them: its
//! blocks begin with the scale, and byte `i` holds elements `i` and `i + 16` where here it holds `2i` and `2i + 1`.
//!
//! So rows are used where they lie, and a few at a time are put into ggml's order.

use crate::dtype::WeightType;
use crate::kernels::{self, Acts, BLOCK, Level, SCRATCH_BYTES};
use crate::weights::WeightInfo;

/// What follows the name of a matrix in that of its blocks, and in that of its scales.
pub(crate) const BLOCKS: &str = "_blocks";
pub(crate) const SCALES: &str = "_scales";

/// Bytes of a block without its scale, and of one of ggml's.
const APART: usize = BLOCK / 2;
const PACKED: usize = APART + 1;

/// How the elements of a tensor of bytes with this name and shape are stored, how many extents its rows have, and how
/// many elements; `None` if the tensor holds neither blocks nor scales of MXFP4.
pub(crate) fn stored(name: &str, shape: &[u64]) -> Option<(WeightType, usize, u64)> {
    match shape {
        [_, .., blocks, bytes] if name.ends_with(BLOCKS) && *bytes == APART as u64 => {
            Some((WeightType::MXFP4, 2, blocks.checked_mul(BLOCK as u64)?))
        }
        [_, .., blocks] if name.ends_with(SCALES) => Some((WeightType::F8_E8M0, 1, *blocks)),
        _ => None,
    }
}

/// Whether these are blocks whose scales are in another tensor.
pub(crate) fn is_apart(info: &WeightInfo) -> bool {
    info.dtype == WeightType::MXFP4 && info.row_bytes == info.cols / 2
}

/// Writes blocks of ggml from blocks and their scales.
fn pack(blocks: &[u8], scales: &[u8], out: &mut [u8]) {
    let blocks = blocks.as_chunks::<APART>().0.iter().zip(scales);
    for ((block, scale), out) in blocks.zip(out.as_chunks_mut::<PACKED>().0) {
        out[0] = *scale;
        for i in 0..APART / 2 {
            let (first, second) = (block[i], block[i + APART / 2]);
            out[1 + 2 * i] = first & 15 | second << 4;
            out[2 + 2 * i] = first >> 4 | second & 0xF0;
        }
    }
}

/// [`rows_dot`](kernels::rows_dot) for rows of `k` elements. `scales` begins with those of the first row, and may be
/// longer than these rows need.
pub(crate) fn rows_dot(
    level: Level,
    (k, scales): (usize, &[u8]),
    rows: &[u8],
    acts: Acts<'_>,
    m: usize,
    out: &mut [f32],
) {
    let blocks = k / BLOCK;
    let some = (SCRATCH_BYTES / (blocks * PACKED).max(1)).max(4) & !3;
    let count = rows.len() / (blocks * APART).max(1);
    let mut packed = vec![0; some.min(count) * blocks * PACKED];
    let each = rows.chunks(some * blocks * APART).zip(scales.chunks(some * blocks));
    for ((rows, scales), out) in each.zip(out.chunks_mut(some * m)) {
        let packed = &mut packed[..rows.len() / APART * PACKED];
        pack(rows, scales, packed);
        kernels::rows_dot(level, WeightType::MXFP4, k, packed, acts, m, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quants::dequantise;

    /// Elements in the order of the published form.
    #[test]
    fn blocks_that_are_packed_have_the_values_of_their_nibbles_and_scales() {
        const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let value = |nibble: u8| VALUES[usize::from(nibble & 7)] * if nibble < 8 { 1.0 } else { -1.0 };
        let blocks: Vec<u8> = (0..=255).map(|byte: u8| byte.wrapping_mul(77)).collect();
        let scales: Vec<u8> = (120..136).collect();
        let mut packed = vec![0; scales.len() * PACKED];
        pack(&blocks, &scales, &mut packed);
        let mut found = vec![0f32; 2 * blocks.len()];
        dequantise(WeightType::MXFP4, &packed, &mut found);
        for (nth, found) in found.chunks_exact(2).enumerate() {
            let (byte, scale) = (blocks[nth], 2f32.powi(i32::from(scales[nth / APART]) - 127));
            assert_eq!(found, [value(byte & 15) * scale, value(byte >> 4) * scale], "byte {nth}");
        }
    }
}
