//! The library's binary interface: statuses, attributes, the structures that callers pass.

use std::ffi::{c_int, c_void};

/// `cublasStatus_t`.
pub type Status = u32;
pub type Outcome<T = ()> = Result<T, Status>;

pub const SUCCESS: Status = 0;
pub const NOT_INITIALIZED: Status = 1;
pub const INVALID_VALUE: Status = 7;
pub const EXECUTION_FAILED: Status = 13;
pub const NOT_SUPPORTED: Status = 15;

/// `cudaDataType`.
pub const R_32F: u32 = 0;
pub const R_16F: u32 = 2;
pub const R_16BF: u32 = 14;
/// `cublasComputeType_t`.
pub const COMPUTE_32F: u32 = 68;

/// `cublasLtMatmulDescAttributes_t`.
pub const DESC_TRANSA: u32 = 3;
pub const DESC_TRANSB: u32 = 4;
/// `cublasLtMatrixLayoutAttribute_t`.
pub const LAYOUT_BATCH_COUNT: u32 = 5;
pub const LAYOUT_STRIDED_BATCH_OFFSET: u32 = 6;
/// `cublasLtMatmulPreferenceAttributes_t`.
pub const PREF_MAX_WORKSPACE_BYTES: u32 = 1;
pub const PREF_MIN_ALIGNMENT_A: u32 = 5;
pub const PREF_MIN_ALIGNMENT_D: u32 = 8;

/// `cublasLtMatmulAlgo_t`, with what this library keeps in it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Algo {
    pub mark: u64,
    /// What divides the addresses of A, B, C and D.
    pub alignments: [u64; 4],
    pub workspace: u64,
    pub rest: [u64; 2],
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Debug)]
pub struct HeuristicResult {
    algo: Algo,
    workspace: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

impl HeuristicResult {
    pub fn of(algo: Algo) -> Self {
        Self { algo, workspace: algo.workspace as usize, state: SUCCESS, waves: 1.0, reserved: [0; 4] }
    }
}

/// A pointer from C that a function writes one `T` through.
#[repr(transparent)]
#[derive(Debug)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    pub fn set(&self, value: T) -> Outcome {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null; the caller of the C function keeps cuBLASLt's promise that there is room.
        unsafe { self.0.write(value) };
        Ok(())
    }
}

/// A pointer from C that a function reads one `T` through.
#[repr(transparent)]
#[derive(Debug)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub fn get(&self) -> Outcome<T> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null; the caller of the C function keeps cuBLASLt's promise that there is a value.
        Ok(unsafe { self.0.read_unaligned() })
    }
}

impl In<c_void> {
    /// An attribute's value of `size` bytes, which must be `want`.
    pub fn integer(&self, size: usize, want: usize) -> Outcome<u64> {
        match want {
            _ if size != want => Err(INVALID_VALUE),
            4 => In(self.0.cast::<u32>()).get().map(u64::from),
            _ => In(self.0.cast::<u64>()).get(),
        }
    }
}
