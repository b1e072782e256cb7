//! What stands in for the CUDA device in a build without it.

use std::sync::Arc;

use super::{Completions, CudaDeviceInfo, CudaDeviceSelector, Device};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::PageSize;

fn absent() -> Error {
    Error::new(ErrorKind::Unsupported, "this build of outcore has no CUDA device")
        .remedy("build it with the feature `cuda` (cargo build --features cuda), or use the host device")
}

/// The GPUs there are.
///
/// # Errors
/// [`ErrorKind::Unsupported`]: this build has no CUDA device.
pub fn cuda_devices() -> Result<Vec<CudaDeviceInfo>> {
    Err(absent())
}

/// The GPU a selector means.
///
/// # Errors
/// [`ErrorKind::Unsupported`]: this build has no CUDA device.
pub fn cuda_device(_: &CudaDeviceSelector) -> Result<CudaDeviceInfo> {
    Err(absent())
}

pub(crate) fn open(_: &CudaDeviceSelector, _: PageSize, _: u32, _: Arc<dyn Completions>) -> Result<Arc<dyn Device>> {
    Err(absent())
}
