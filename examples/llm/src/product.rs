//! Products of stored rows with vectors, whatever scales the rows.

use std::ops::Range;

use crate::fp8::{self, BlockScales};
use crate::kernels::{self, Acts, Level};
use crate::mxfp4;
use crate::pool::Pool;
use crate::weights::WeightInfo;

/// Bytes of products that a thread makes before they become columns, or those of four rows.
const PRODUCTS_BYTES: usize = 64 << 10;

/// What scales rows besides what lies in them.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scales<'a> {
    None,
    /// Those of blocks of the whole tensor, in FP8.
    OfBlocks(&'a BlockScales),
    /// Those of the tensor's rows from `first` on, in MXFP4.
    OfRows {
        first: usize,
        bytes: &'a [u8],
    },
}

/// Rows of a tensor are multiplied with vectors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product<'a> {
    pub level: Level,
    pub info: &'a WeightInfo,
    pub scales: Scales<'a>,
    /// `m` vectors.
    pub acts: Acts<'a>,
    pub m: usize,
}

impl Product<'_> {
    /// [`rows_dot`](kernels::rows_dot) of these rows, of which the first is the tensor's row `first`.
    pub fn rows(&self, first: usize, rows: &[u8], out: &mut [f32]) {
        let Self { level, info, scales, acts, m } = *self;
        let k = info.cols as usize;
        if k == 0 || m == 0 {
            return out.fill(0.0);
        }
        match scales {
            Scales::None => kernels::rows_dot(level, info.dtype, k, rows, acts, m, out),
            Scales::OfBlocks(scales) => fp8::rows_dot(level, scales, (first, k), rows, acts, m, out),
            Scales::OfRows { first: first_of_scales, bytes } => {
                let scales = &bytes[(first - first_of_scales) * (k / kernels::BLOCK)..];
                mxfp4::rows_dot(level, (k, scales), rows, acts, m, out);
            }
        }
    }

    /// The products of `columns.len()` rows, of which the first is the tensor's row `first`, by all threads of `pool`:
    /// in these columns of `out`, whose rows belong to vectors and have `n` elements.
    pub fn by_vector(
        &self,
        pool: &Pool,
        (first, rows): (usize, &[u8]),
        columns: Range<usize>,
        (out, n): (&mut [f32], usize),
    ) {
        let (m, row_bytes) = (self.m, self.info.row_bytes as usize);
        if m == 1 {
            kernels::in_chunks(pool, row_bytes, rows, m, &mut out[columns], |nth, rows, out| {
                self.rows(first + nth, rows, out);
            });
            return;
        }
        // Products are made in the second cache, where they become columns.
        let most = (PRODUCTS_BYTES / size_of::<f32>() / m.max(1)).max(4) & !3;
        let chunk = kernels::chunk_rows(pool, row_bytes, columns.len(), m).min(most);
        let end = columns.len();
        pool.run_columns((out, n), columns, chunk, |i, mut out| {
            let (start, end) = (i * chunk, end.min((i + 1) * chunk));
            let mut products = vec![0f32; (end - start) * m];
            self.rows(first + start, &rows[start * row_bytes..end * row_bytes], &mut products);
            kernels::transpose(&products, m, &mut out);
        });
    }
}
