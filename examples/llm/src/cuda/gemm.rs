//! Products of dense 16-bit matrices with many vectors by cuBLAS, where it is installed. Without it the kernels do it.

use std::sync::Arc;

use cudarc::cublas::sys::{cublasComputeType_t, cublasGemmAlgo_t, cublasOperation_t, cudaDataType};
use cudarc::cublas::{CudaBlas, result, sys};
use cudarc::driver::CudaStream;
use outcore::{Error, ErrorKind};

use super::kernels::Product;
use crate::dtype::WeightType;
use crate::error::Result;

/// A cuBLAS handle on the stream that everything runs on.
pub(super) struct Gemm(CudaBlas);

impl Gemm {
    /// `None` where there is no cuBLAS, or none that works.
    pub fn open(stream: &Arc<CudaStream>) -> Option<Self> {
        // SAFETY: opens libcublas and closes it again; its initialisers are trusted as the driver's are.
        if !unsafe { sys::is_culib_present() } {
            return None;
        }
        match CudaBlas::new(stream.clone()) {
            Ok(blas) => Some(Self(blas)),
            Err(error) => {
                tracing::warn!(?error, "cuBLAS cannot be used: own kernels multiply instead");
                None
            }
        }
    }

    /// `out[j * stride + r] = sum of x[j * k + i] * w[r * k + i]` with `x` of the weights' 16-bit type; added to what
    /// is in `out` where the product accumulates. Sums are in f32.
    pub fn multiply(&self, p: &Product) -> Result<()> {
        let kind = match p.dtype {
            WeightType::F16 => cudaDataType::CUDA_R_16F,
            _ => cudaDataType::CUDA_R_16BF,
        };
        let (one, beta) = (1f32, if p.accumulate { 1f32 } else { 0f32 });
        // cuBLAS counts columns first: our rows of weights are columns of a k x rows matrix, which it transposes.
        // SAFETY: the handle is alive; the three matrices are device memory of the sizes given (the session allocated
        // `x` and `out`, the weights are pinned until the stream has passed); the constants are host memory that is
        // read before the call returns.
        let outcome = unsafe {
            result::gemm_ex(
                *self.0.handle(),
                cublasOperation_t::CUBLAS_OP_T,
                cublasOperation_t::CUBLAS_OP_N,
                p.rows as i32,
                p.m as i32,
                p.k as i32,
                (&raw const one).cast(),
                p.weights as *const _,
                kind,
                p.k as i32,
                p.x as *const _,
                kind,
                p.k as i32,
                (&raw const beta).cast(),
                p.out as *mut _,
                cudaDataType::CUDA_R_32F,
                p.stride as i32,
                cublasComputeType_t::CUBLAS_COMPUTE_32F,
                cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        };
        outcome.map_err(|error| {
            let message = format!("cuBLAS cannot multiply {} x {} by {} vectors: {:?}", p.rows, p.k, p.m, error.0);
            Error::new(ErrorKind::Device, message)
                .remedy("take libcublas off LD_LIBRARY_PATH: then this program's kernels multiply")
                .into()
        })
    }
}
