//! What the CUDA driver says of the GPUs there are.

use outcore::Result;
use outcore_cuda::{CudaDeviceInfo, cuda_devices};

use super::output::size;

/// The GPUs there are.
pub struct Gpus {
    /// A line for each.
    pub found: Vec<String>,
    /// What the driver supports.
    pub driver: Option<String>,
    /// Whether one of them can be a device.
    pub usable: bool,
}

/// Asks the driver.
///
/// # Errors
/// As [`cuda_devices`].
pub fn gpus() -> Result<Gpus> {
    let devices = cuda_devices()?;
    let driver = devices.first().map(|gpu| format!("CUDA {}.{}", gpu.driver.0, gpu.driver.1));
    let usable = devices.iter().any(|gpu| gpu.virtual_memory);
    Ok(Gpus { found: devices.iter().map(gpu).collect(), driver, usable })
}

fn gpu(gpu: &CudaDeviceInfo) -> String {
    let memory = if gpu.virtual_memory { "can map memory" } else { "cannot map memory, so cannot be used" };
    let (major, minor) = gpu.capability;
    let near = gpu.numa_node.map(|node| format!(", near memory node {node}")).unwrap_or_default();
    format!(
        "cuda:{} {}, {}, compute {major}.{minor}{near}, {memory} ({}, {})",
        gpu.ordinal,
        gpu.name,
        size(gpu.memory.get()),
        gpu.pci,
        gpu.uuid
    )
}
