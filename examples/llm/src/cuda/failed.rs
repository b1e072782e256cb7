//! Errors of the driver.

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;
use outcore::{Error, ErrorKind};

/// What the driver refused while doing `what`.
pub(super) fn failed(what: impl std::fmt::Display, error: DriverError) -> Error {
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
    let message = format!("{what}: {:?} ({text})", error.0);
    match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::new(ErrorKind::OutOfMemory, message)
            .remedy("choose a smaller device budget, a shorter prompt or fewer tokens, or end what else uses the GPU"),
        // After these no call of the process succeeds any more.
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        | CUresult::CUDA_ERROR_LAUNCH_FAILED
        | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
        | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
        | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | CUresult::CUDA_ERROR_INVALID_PC
        | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUresult::CUDA_ERROR_ASSERT
        | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
        | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED => Error::new(ErrorKind::Device, message).remedy(
            "the GPU is lost to this process: start the program again, and if it recurs look for Xid lines in the kernel's log \
             (dmesg), or use --device host",
        ),
        _ => Error::new(ErrorKind::Device, message).remedy(
            "try again; if it recurs, see that the driver is well (nvidia-smi, dmesg) and no older than CUDA 12.0, or use \
             --device host",
        ),
    }
}
