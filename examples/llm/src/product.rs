//! Products of stored rows with vectors, whatever scales the rows.

use crate::fp8::{self, BlockScales};
use crate::kernels::{self, Acts, Level};
use crate::mxfp4;
use crate::pool::Pool;
use crate::weights::WeightInfo;

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

    /// As [`rows`](Self::rows), by all threads of `pool`.
    pub fn rows_on(&self, pool: &Pool, first: usize, rows: &[u8], out: &mut [f32]) {
        kernels::in_chunks(pool, self.info.row_bytes as usize, rows, self.m, out, |nth, rows, out| {
            self.rows(first + nth, rows, out);
        });
    }
}
