//! Products of 16-bit matrices with many vectors by cuBLASLt, where it is installed. Without it the kernels do it.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{self, cublasComputeType_t, cublasStatus_t, cudaDataType};
use cudarc::driver::CudaStream;
use outcore::{Error, ErrorKind};
use parking_lot::Mutex;

use crate::error::Result;

/// The widest loads of the library's kernels, in bytes: more alignment than this is of no use.
const WIDEST: u64 = 16;
/// Shapes that are remembered. A pass of a prompt has some tens: a few matrices by its length, and its tiles of
/// attention. So those of several lengths stay, and a server that meets every length keeps no more.
pub(super) const SHAPES: usize = 256;
/// What the address of a workspace is a multiple of, in bytes.
pub(super) const WORKSPACE_ALIGNMENT: u64 = 256;

/// A type of 16-bit numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Half {
    F16,
    BF16,
}

/// Rows of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Rows {
    pub address: u64,
    /// From one row to the next, in numbers.
    pub ld: u32,
    /// From one batch to the next, in numbers.
    pub stride: u64,
}

impl Rows {
    /// Of one batch.
    pub const fn new(address: u64, ld: u32) -> Self {
        Self { address, ld, stride: 0 }
    }
}

/// `out[j][r] = sum over i of a[r][i] * x[j][i]`, or added to what is there, for each batch. Sums are in f32.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub half: Half,
    pub batches: u32,
    /// `rows` rows of `k`; where `a_is_turned`, `k` rows of `rows`, so that `a[i][r]` takes the place of `a[r][i]`.
    pub a: Rows,
    pub a_is_turned: bool,
    /// `m` rows of `k`.
    pub x: Rows,
    /// `m` rows of `rows` f32.
    pub out: Rows,
    pub rows: u32,
    pub k: u32,
    pub m: u32,
    pub accumulate: bool,
}

/// Memory that the library's kernels use while they run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Workspace {
    pub address: u64,
    pub bytes: u64,
}

/// All that the choice of an algorithm depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    half: Half,
    /// Rows, k, m.
    extents: [u32; 3],
    a_is_turned: bool,
    batches: u32,
    ld: [u32; 3],
    strides: [u64; 3],
    alignments: [u32; 3],
    workspace: u64,
}

impl Shape {
    fn of(call: &Call, workspace: u64) -> Self {
        let all = [call.a, call.x, call.out];
        Self {
            half: call.half,
            extents: [call.rows, call.k, call.m],
            a_is_turned: call.a_is_turned,
            batches: call.batches,
            ld: all.map(|rows| rows.ld),
            strides: all.map(|rows| rows.stride),
            alignments: all.map(|rows| alignment(rows.address)),
            workspace,
        }
    }
}

/// The largest power of two that divides the address, as far as it matters.
fn alignment(address: u64) -> u32 {
    1 << (address | WIDEST).trailing_zeros()
}

/// One of the library's objects, which is given back.
struct Object<T: Copy> {
    handle: T,
    destroy: unsafe fn(T) -> std::result::Result<(), CublasError>,
}

impl<T: Copy> Drop for Object<T> {
    fn drop(&mut self) {
        // SAFETY: the object was made by the library and is given back once.
        if let Err(error) = unsafe { (self.destroy)(self.handle) } {
            tracing::debug!(?error, "cuBLASLt keeps an object");
        }
    }
}

/// What the library chose for a shape.
struct Plan {
    desc: Object<sys::cublasLtMatmulDesc_t>,
    a: Object<sys::cublasLtMatrixLayout_t>,
    x: Object<sys::cublasLtMatrixLayout_t>,
    out: Object<sys::cublasLtMatrixLayout_t>,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// What is known of a shape.
struct Known {
    /// `None` if the library has nothing for it.
    plan: Option<Plan>,
    /// By [`Plans::uses`].
    used: u64,
}

/// The shapes that were used last, at most [`SHAPES`].
#[derive(Default)]
struct Plans {
    known: HashMap<Shape, Known>,
    uses: u64,
    /// The library does not support products of several batches: it is not asked for those of other shapes.
    without_batches: bool,
}

impl Plans {
    fn keep(&mut self, shape: Shape, plan: Option<Plan>) {
        // Whoever comes here has asked the library, which takes longer than to look at all shapes.
        if self.known.len() >= SHAPES
            && let Some(oldest) = self.known.iter().min_by_key(|(_, known)| known.used).map(|(shape, _)| *shape)
        {
            self.known.remove(&oldest);
        }
        self.known.insert(shape, Known { plan, used: self.uses });
    }

    /// Remembers that the library has nothing for a product.
    fn refuse(&mut self, shape: Shape, call: &Call, error: &CublasError) {
        // Batches differ in extents only, and lie as the library wants them: what does not support one does not support
        // the others.
        if shape.batches > 1 && is_unsupported(error) {
            if !std::mem::replace(&mut self.without_batches, true) {
                tracing::warn!(?call, ?error, "cuBLASLt has no products of several batches: own kernels attend");
            }
        } else {
            tracing::warn!(?call, ?error, "cuBLASLt has no kernel for a product: own kernels multiply");
        }
        self.keep(shape, None);
    }
}

/// Whether the library does not do such a thing at all, maybe because it is older than the GPU.
fn is_unsupported(error: &CublasError) -> bool {
    matches!(error.0, cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED | cublasStatus_t::CUBLAS_STATUS_ARCH_MISMATCH)
}

/// A cuBLASLt handle, and what it chose for the shapes it met last.
pub(super) struct Gemm {
    /// Dropped before the handle.
    plans: Mutex<Plans>,
    handle: Object<sys::cublasLtHandle_t>,
    stream: Arc<CudaStream>,
}

// SAFETY: NVIDIA allows calls with one handle from several threads, and descriptors that nobody changes may be read by
// all. A plan is not changed once it is made, and is only reached under the lock.
unsafe impl Send for Gemm {}
// SAFETY: as above.
unsafe impl Sync for Gemm {}

impl Gemm {
    /// `None` where there is no cuBLASLt, or none that works.
    pub fn open(stream: &Arc<CudaStream>) -> Option<Self> {
        // SAFETY: opens libcublasLt and closes it again; its initialisers are trusted as the driver's are.
        if !unsafe { sys::is_culib_present() } {
            tracing::info!("there is no cuBLASLt here (libcublasLt.so)");
            return None;
        }
        match result::create_handle() {
            Ok(handle) => {
                let handle = Object { handle, destroy: result::destroy_handle };
                Some(Self { plans: Mutex::default(), handle, stream: stream.clone() })
            }
            Err(error) => {
                tracing::warn!(
                    ?error,
                    "cuBLASLt makes no handle: it may not suit the driver, whose CUDA version nvidia-smi names"
                );
                None
            }
        }
    }

    /// Whether the library has a kernel for a product.
    pub fn has(&self, call: &Call, workspace: Workspace) -> bool {
        self.planned(&mut self.plans.lock(), call, workspace).is_some()
    }

    /// What the library chose for a product, now or earlier.
    fn planned<'a>(&self, plans: &'a mut Plans, call: &Call, workspace: Workspace) -> Option<&'a Plan> {
        let shape = Shape::of(call, workspace.bytes);
        plans.uses += 1;
        if !plans.known.contains_key(&shape) {
            if shape.batches > 1 && plans.without_batches {
                return None;
            }
            match self.plan(&shape) {
                Ok(plan) => plans.keep(shape, Some(plan)),
                Err(error) => plans.refuse(shape, call, &error),
            }
        }
        let known = plans.known.get_mut(&shape)?;
        known.used = plans.uses;
        known.plan.as_ref()
    }

    /// Queues a product; `false`, and nothing is queued, if the library has no kernel for it.
    pub fn multiply(&self, call: &Call, workspace: Workspace) -> Result<bool> {
        let mut plans = self.plans.lock();
        let Some(plan) = self.planned(&mut plans, call, workspace) else { return Ok(false) };
        let (alpha, beta) = (1f32, if call.accumulate { 1f32 } else { 0f32 });
        // SAFETY: the handle and the descriptors are alive; the three matrices are device memory of the sizes given
        // (the session allocated `x` and `out`, the weights are pinned until the stream has passed), as aligned as the
        // algorithm was promised; the workspace is the session's; the constants are host memory that is read before
        // the call returns.
        let queued = unsafe {
            result::matmul(
                self.handle.handle,
                plan.desc.handle,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                call.a.address as *const c_void,
                plan.a.handle,
                call.x.address as *const c_void,
                plan.x.handle,
                call.out.address as *const c_void,
                plan.out.handle,
                call.out.address as *mut c_void,
                plan.out.handle,
                &raw const plan.algorithm,
                workspace.address as *mut c_void,
                workspace.bytes as usize,
                self.stream.cu_stream().cast(),
            )
        };
        match queued {
            Ok(()) => Ok(true),
            // What the library knows only now: it is older than the GPU.
            Err(error) if is_unsupported(&error) => {
                plans.refuse(Shape::of(call, workspace.bytes), call, &error);
                Ok(false)
            }
            Err(error) => Err(refused(call, error)),
        }
    }

    fn plan(&self, shape: &Shape) -> std::result::Result<Plan, CublasError> {
        let half = match shape.half {
            Half::F16 => cudaDataType::CUDA_R_16F,
            Half::BF16 => cudaDataType::CUDA_R_16BF,
        };
        let [rows, k, m] = shape.extents;
        let single = cudaDataType::CUDA_R_32F;
        // cuBLASLt counts columns first: our rows are its columns, and it transposes the first matrix, unless that is
        // turned already.
        let desc = Object {
            handle: result::create_matmul_desc(cublasComputeType_t::CUBLAS_COMPUTE_32F, single)?,
            destroy: result::destroy_matmul_desc,
        };
        let transposed = i32::from(!shape.a_is_turned);
        // SAFETY: the descriptor is alive; the value is an i32, as the attribute wants.
        unsafe {
            result::set_matmul_desc_attribute(
                desc.handle,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of::<i32>(),
            )?;
        }
        let layout = |which: usize, kind, rows: u32, cols: u32| {
            let handle = result::create_matrix_layout(kind, rows.into(), cols.into(), shape.ld[which].into())?;
            let layout = Object { handle, destroy: result::destroy_matrix_layout };
            let (count, stride) = (shape.batches as i32, shape.strides[which] as i64);
            // SAFETY: the layout is alive; the values are an i32 and an i64, as the attributes want.
            unsafe {
                use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
                let set = result::set_matrix_layout_attribute;
                let batches = Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
                set(layout.handle, batches, (&raw const count).cast(), size_of::<i32>())?;
                let apart = Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
                set(layout.handle, apart, (&raw const stride).cast(), size_of::<i64>())?;
            }
            Ok::<_, CublasError>(layout)
        };
        let (of_k, of_rows) = if shape.a_is_turned { (rows, k) } else { (k, rows) };
        let (a, x, out) = (layout(0, half, of_k, of_rows)?, layout(1, half, k, m)?, layout(2, single, rows, m)?);
        let preference = Object { handle: result::create_matmul_pref()?, destroy: result::destroy_matmul_pref };
        let [of_a, of_x, of_out] = shape.alignments;
        // SAFETY: everything is alive; the values are a usize and numbers of 32 bits, as the attributes want.
        let found = unsafe {
            use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
            let set = result::set_matmul_pref_attribute;
            let bytes = shape.workspace as usize;
            let most = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            set(preference.handle, most, (&raw const bytes).cast(), size_of::<usize>())?;
            for (which, alignment) in [
                (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, of_a),
                (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, of_x),
                (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, of_out),
                (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, of_out),
            ] {
                set(preference.handle, which, (&raw const alignment).cast(), size_of::<u32>())?;
            }
            result::get_matmul_algo_heuristic(
                self.handle.handle,
                desc.handle,
                a.handle,
                x.handle,
                out.handle,
                out.handle,
                preference.handle,
            )?
        };
        Ok(Plan { desc, a, x, out, algorithm: found.algo })
    }
}

fn refused(call: &Call, error: CublasError) -> crate::error::Error {
    let message = format!("cuBLASLt cannot multiply {} x {} by {} vectors: {:?}", call.rows, call.k, call.m, error.0);
    Error::new(ErrorKind::Device, message)
        .remedy("take libcublasLt off LD_LIBRARY_PATH: then this program's kernels multiply")
        .into()
}
