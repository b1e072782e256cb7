//! What opens a GPU.

use std::sync::Arc;

use outcore::device::parts::has_a_link;
use outcore::device::{Completions, Device, DeviceFactory, DeviceSettings};
use outcore::{Bytes, Error, ErrorKind, PageSize, Result};
use outcore_gpu::{GpuConfig, GpuDevice};

use crate::driver::{CudaDriver, cuda_device};
use crate::select::CudaDeviceSelector;

/// A device in the memory of one GPU.
pub type CudaDevice = GpuDevice<CudaDriver>;

/// Settings of a CUDA device.
#[derive(Clone, Debug)]
pub struct CudaDeviceConfig {
    /// Which GPU.
    pub device: CudaDeviceSelector,
    /// Bytes of a page and of a frame: a multiple of the GPU's allocation granularity, which is 2 MiB so far.
    pub page_size: PageSize,
    /// How many frames exist at first. Their memory is taken at once.
    pub frames: u32,
}

impl CudaDeviceConfig {
    /// A device that reports completions to `sink`.
    ///
    /// # Errors
    /// - [`ErrorKind::Unsupported`] if there is no CUDA driver, it is too old, or the GPU cannot map memory at
    ///   addresses of our choice.
    /// - [`ErrorKind::NotFound`] if there is no such GPU.
    /// - [`ErrorKind::InvalidArgument`] if a page is no multiple of the GPU's allocation granularity.
    /// - [`ErrorKind::OutOfMemory`] if the frames need more than is free.
    /// - [`ErrorKind::Device`] for other refusals of the driver.
    pub fn open(self, sink: Arc<dyn Completions>) -> Result<CudaDevice> {
        let gpu = cuda_device(&self.device)?;
        let name = format!("cuda:{}", gpu.ordinal);
        if !gpu.virtual_memory {
            let message = format!("{name} ({}) has no virtual memory management", gpu.name);
            return Err(Error::new(ErrorKind::Unsupported, message).remedy(
                "use a GPU and driver mode with it (data-centre and desktop GPUs since Pascal), or the host device",
            ));
        }
        let config = GpuConfig {
            name,
            number: gpu.ordinal,
            numa_node: gpu.numa_node,
            page_size: self.page_size,
            frames: self.frames,
        };
        GpuDevice::new(CudaDriver::open(&gpu)?, config, sink)
    }
}

impl DeviceFactory for CudaDeviceSelector {
    fn name(&self) -> String {
        format!("cuda:{self}")
    }

    fn usual_page(&self) -> PageSize {
        PageSize::USUAL_ON_GPU
    }

    /// Eight bytes for each 4 KiB: a 512th, as measured on an H100.
    fn tables_of_host_memory(&self, host: Bytes) -> Bytes {
        Bytes::new(host.get().div_ceil(512))
    }

    fn open(&self, settings: DeviceSettings, completions: Arc<dyn Completions>) -> Result<Arc<dyn Device>> {
        let DeviceSettings { page_size, frames, link, .. } = settings;
        if link.is_some() {
            return Err(has_a_link(&self.name()));
        }
        let config = CudaDeviceConfig { device: self.clone(), page_size, frames };
        let device = config.open(completions);
        Ok(Arc::new(device.map_err(|error| error.context(format!("open the device {}", self.name())))?))
    }
}
