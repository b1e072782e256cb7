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
use crate::kernels::{Acts, Level, dot};
use crate::quants::dequantise;
use crate::weights::WeightInfo;

/// What follows the name of a matrix in that of its scales.
pub(crate) const SCALES: &str = "_scale_inv";

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

    /// The values of a row, the `nth` of the matrix.
    fn row(&self, nth: usize, bytes: &[u8], out: &mut [f32]) {
        dequantise(WeightType::F8_E4M3, bytes, out);
        let [rows, cols] = self.block;
        let scales = &self.values[nth / rows * self.across..][..self.across];
        for (out, scale) in out.chunks_mut(cols).zip(scales) {
            out.iter_mut().for_each(|value| *value *= scale);
        }
    }
}

/// [`rows_dot`](crate::kernels::rows_dot) for rows of `k` elements of FP8, of which the first is the `first` of its
/// matrix.
pub(crate) fn rows_dot(
    level: Level,
    scales: &BlockScales,
    (first, k): (usize, usize),
    rows: &[u8],
    acts: Acts<'_>,
    m: usize,
    out: &mut [f32],
) {
    let Acts::Plain(x, _) = acts else { return };
    let mut weights = vec![0f32; k];
    let rows = rows.chunks_exact(k).zip(first..);
    for ((row, nth), out) in rows.zip(out.chunks_exact_mut(m)) {
        scales.row(nth, row, &mut weights);
        out.iter_mut().zip(x.chunks_exact(k)).for_each(|(out, x)| *out = dot(level, &weights, x));
    }
}
