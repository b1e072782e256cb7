//! Errors of the driver.

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;
use outcore::{Error, ErrorKind};
use outcore_cuda::is_device_lost;

/// What the driver refused while doing `what`.
pub(super) fn failed(what: impl std::fmt::Display, error: DriverError) -> Error {
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
    let message = format!("{what}: {:?} ({text})", error.0);
    match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::new(ErrorKind::OutOfMemory, message)
            .remedy("choose a smaller device budget, a shorter prompt or fewer tokens, or end what else uses the GPU"),
        code if is_device_lost(code as u32) => Error::new(ErrorKind::Device, message).remedy(
            "the GPU is lost to this process: start the program again, and if it recurs look for Xid lines in the kernel's log \
             (dmesg), or use --device host",
        ),
        _ => Error::new(ErrorKind::Device, message).remedy(
            "try again; if it recurs, see that the driver is well (nvidia-smi, dmesg) and no older than CUDA 12.0, or use \
             --device host",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regression_every_way_to_lose_a_gpu_says_to_start_again() {
        for (code, is_lost) in [
            (CUresult::CUDA_ERROR_INVALID_CONTEXT, true),
            (CUresult::CUDA_ERROR_CONTAINED, true),
            (CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, true),
            (CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED, true),
            (CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK, true),
            (CUresult::CUDA_ERROR_UNKNOWN, true),
            (CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED, true),
            (CUresult::CUDA_ERROR_INVALID_VALUE, false),
            (CUresult::CUDA_ERROR_OUT_OF_MEMORY, false),
            (CUresult::CUDA_ERROR_NOT_READY, false),
        ] {
            let advice = failed("launch a kernel", DriverError(code)).to_string();
            assert_eq!(advice.contains("start the program again"), is_lost, "{code:?}: {advice}");
        }
    }
}
