//! What stands in for the CUDA device in a build without it.

use std::sync::Arc;

use super::parts::has_a_link;
use super::{Completions, CudaDeviceInfo, CudaDeviceSelector, Device, DeviceFactory, DeviceSettings};
use crate::error::{Error, ErrorKind, Result};

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

impl DeviceFactory for CudaDeviceSelector {
    fn name(&self) -> String {
        format!("cuda:{self}")
    }

    fn open(&self, settings: DeviceSettings, _: Arc<dyn Completions>) -> Result<Arc<dyn Device>> {
        match settings.link {
            Some(_) => Err(has_a_link(&self.name())),
            None => Err(absent().context(format!("open the device {}", self.name()))),
        }
    }
}
