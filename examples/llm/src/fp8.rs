//! Weights of FP8 with a scale for each block of a matrix, as DeepSeek and Qwen publish them: a weight is the number of
//! its byte (E4M3 of the OCP 8-bit Floating Point Specification) times the scale of its block. Blocks at the lower and
//! the right edge of a matrix may be cut short.
//!
//! Products are those of the dequantised weights with activations in `f32`. The engines that these checkpoints were
//! made for round activations to FP8 too (`"activation_scheme": "dynamic"`); that is not imitated.

use std::collections::HashSet;

use crate::dtype::WeightType;
use crate::error::{Error, Result};
use crate::files::ModelFiles;
use crate::kernels::{self, Acts, Level};
use crate::weights::WeightInfo;

/// What follows the name of a matrix in that of its scales.
pub(crate) const SCALES: &str = "_scale_inv";
const FLOAT: usize = size_of::<f32>();
/// Rows of numbers that are multiplied at a time.
pub(crate) const ROWS: usize = 4;

/// A matrix in FP8, and the tensor with its scales.
#[derive(Clone, Debug)]
pub(crate) struct Scaled {
    pub matrix: WeightInfo,
    pub scales: WeightInfo,
}

fn is_fp8(info: &&WeightInfo) -> bool {
    info.dtype == WeightType::F8_E4M3
}

/// Finds the scales of those of `matrices` that are in FP8, in blocks of so many rows and columns.
///
/// # Errors
/// For a matrix without blocks or scales, for scales of another shape or in FP8 themselves, and for one of `others`,
/// which are in no product, that is in FP8.
pub(crate) fn find<'a>(
    files: &ModelFiles,
    blocks: Option<[u64; 2]>,
    matrices: impl Iterator<Item = &'a WeightInfo>,
    mut others: impl Iterator<Item = &'a WeightInfo>,
) -> Result<Vec<Scaled>> {
    if let Some(info) = others.find(is_fp8) {
        return Err(Error::Unsupported(format!(
            "tensor {:?} has type {}, which is supported for matrices that activations are multiplied with, and not for \
             embeddings, norms and biases (fetch the model in another form)",
            info.name, info.dtype
        )));
    }
    let scaled = |matrix: &'a WeightInfo| {
        let [rows, cols] = blocks.ok_or_else(|| {
            Error::Unsupported(format!(
                "tensor {:?} has type {}, and config.json has no quantization_config that says how it is scaled (fetch \
                 the model's own config.json, or the model in another form)",
                matrix.name, matrix.dtype
            ))
        })?;
        let shape = files.header().tensors.get(matrix.id.0 as usize).map_or(0, |tensor| tensor.shape.len());
        if shape != 2 {
            return Err(Error::Unsupported(format!(
                "tensor {:?} of type {} has {shape} dimensions: only one with 2 is supported (fetch the model with a \
                 tensor for each expert)",
                matrix.name, matrix.dtype
            )));
        }
        let name = format!("{}{SCALES}", matrix.name);
        let scales = files.tensor(&name).ok_or(Error::MissingTensor(name))?;
        let (want_rows, want_cols) = (matrix.rows.div_ceil(rows), matrix.cols.div_ceil(cols));
        if (scales.rows, scales.cols) != (want_rows, want_cols) {
            let (name, rows, cols) = (scales.name.clone(), scales.rows, scales.cols);
            return Err(Error::Shape { name, rows, cols, want_rows, want_cols });
        }
        if matches!(scales.dtype, WeightType::F8_E4M3 | WeightType::F8_E8M0) {
            let what = format!("tensor {:?} has type {}: scales are F32, F16 or BF16", scales.name, scales.dtype);
            return Err(Error::Unsupported(format!("{what} (fetch the model in another form)")));
        }
        Ok(Scaled { matrix: matrix.clone(), scales: scales.clone() })
    };
    // Several may lie in one tensor.
    let mut found = HashSet::new();
    matrices.filter(is_fp8).filter(|matrix| found.insert(matrix.id)).map(scaled).collect()
}

/// The scales of a matrix, in memory.
#[derive(Debug)]
pub(crate) struct BlockScales {
    /// Rows and columns of a block.
    block: [usize; 2],
    /// Blocks side by side.
    across: usize,
    values: Vec<f32>,
}

impl BlockScales {
    /// Those of `scaled`, in blocks of so many rows and columns.
    ///
    /// # Errors
    /// For one that is not above 0, or infinite, or no number.
    pub fn new(scaled: &Scaled, block: [u64; 2], values: Vec<f32>) -> Result<Self> {
        let across = scaled.scales.cols as usize;
        if let Some(at) = values.iter().position(|scale| !(*scale > 0.0 && scale.is_finite())) {
            let what = format!("tensor {:?}", scaled.scales.name);
            let why = format!(
                "the scale of block {}, {} is {}, not a finite number above 0 (the file is damaged or was written \
                 wrongly: fetch it again)",
                at / across.max(1),
                at % across.max(1),
                values[at]
            );
            return Err(Error::format(what, why));
        }
        Ok(Self { block: block.map(|size| size as usize), across, values })
    }

    /// Writes the values of a row, the `nth` of the matrix, as `f32`.
    fn row(&self, level: Level, nth: usize, bytes: &[u8], out: &mut [u8]) {
        let [rows, cols] = self.block;
        let scales = &self.values[nth / rows * self.across..][..self.across];
        for ((bytes, out), scale) in bytes.chunks(cols).zip(out.chunks_mut(cols * FLOAT)).zip(scales) {
            kernels::scaled_e4m3(level, bytes, *scale, out);
        }
    }
}

/// [`rows_dot`](kernels::rows_dot) for rows of `k` elements of FP8, of which the first is the `first` of its matrix: as
/// rows of `f32`, a few at a time.
pub(crate) fn rows_dot(
    level: Level,
    scales: &BlockScales,
    (first, k): (usize, usize),
    rows: &[u8],
    acts: Acts<'_>,
    m: usize,
    out: &mut [f32],
) {
    // Kernels for several vectors multiply `ROWS` rows at a time. For one vector, a row stays in the first cache.
    let some = if m < ROWS { 1 } else { ROWS };
    let mut values = vec![0; some.min(rows.len() / k) * k * FLOAT];
    let parts = rows.chunks(some * k).zip(out.chunks_mut(some * m));
    for ((rows, out), first) in parts.zip((first..).step_by(some)) {
        let values = &mut values[..rows.len() * FLOAT];
        let of_rows = rows.chunks_exact(k).zip(values.chunks_exact_mut(k * FLOAT));
        of_rows.zip(first..).for_each(|((row, values), nth)| scales.row(level, nth, row, values));
        kernels::rows_dot(level, WeightType::F32, k, values, acts, m, out);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::kernels::Fours;
    use crate::pool::Pool;
    use crate::quants::e4m3;

    fn numbers(len: usize, mut state: u32) -> Vec<f32> {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    /// Bytes of every number, in rows and columns that leave parts of blocks and of registers, from the middle of a
    /// block on.
    #[test]
    fn every_level_has_the_products_of_the_scaled_numbers_in_any_company() {
        const COUNT: usize = 11;
        let pool = Pool::new(1).unwrap();
        for (k, block) in [(1, [1, 1]), (40, [3, 7]), (272, [128, 128]), (5000, [5, 96])] {
            let first = block[0] / 2;
            let across = usize::div_ceil(k, block[1]);
            let values =
                numbers((first + COUNT).div_ceil(block[0]) * across, 3).iter().map(|v| v.abs() + 0.01).collect();
            let scales = BlockScales { block, across, values };
            // All bytes but those that are no numbers.
            let all: Vec<u8> = (0..=255).filter(|byte| byte & 0x7F != 0x7F).collect();
            let rows: Vec<u8> = (0..COUNT * k).map(|nth| all[nth * 37 % all.len()]).collect();
            let weight = |row: usize, at: usize| {
                let scale = scales.values[(first + row) / block[0] * across + at / block[1]];
                e4m3(rows[row * k + at]) * scale
            };
            for level in [Level::Scalar, Level::Avx2, Level::Avx512] {
                let product = |first: usize, rows: &[u8], x: &[f32]| {
                    let m = x.len() / k;
                    let fours = Fours::new(level, x, m, &pool);
                    let mut out = vec![f32::NAN; rows.len() / k * m];
                    rows_dot(level, &scales, (first, k), rows, Acts::Plain(x, &fours), m, &mut out);
                    out
                };
                for m in [1, 3, 4, 7, 17] {
                    let x = numbers(m * k, 9);
                    let found = product(first, &rows, &x);
                    for (row, found) in found.chunks_exact(m).enumerate() {
                        for (found, x) in found.iter().zip(x.chunks_exact(k)) {
                            let terms = x.iter().enumerate().map(|(at, x)| f64::from(weight(row, at)) * f64::from(*x));
                            let (sum, most) =
                                terms.fold((0.0, 0.0), |(sum, most), term| (sum + term, most + term.abs()));
                            let off = (f64::from(*found) - sum).abs();
                            assert!(off <= 1e-5 * most, "{level:?}, {k} x {m}, row {row}: {found}, not {sum}");
                        }
                        let alone = product(first + row, &rows[row * k..(row + 1) * k], &x);
                        assert!(alone == found, "{level:?}, {k} x {m}: row {row} alone");
                    }
                    for (nth, x) in x.chunks_exact(k).enumerate() {
                        let alone = product(first, &rows, x);
                        assert!(found[nth..].iter().step_by(m).eq(&alone), "{level:?}, {k}: vector {nth} of {m} alone");
                    }
                }
            }
        }
    }
}
