//! What the CUDA driver says of the GPUs there are.

use outcore::device::DeviceFactory;
use outcore::{Bytes, Result};
use outcore_cuda::{CudaDeviceInfo, CudaDeviceSelector, cuda_devices};

use super::output::size;

/// The GPUs there are.
pub struct Gpus {
    /// A line for each.
    pub found: Vec<String>,
    /// What the driver supports.
    pub driver: Option<String>,
    /// Whether one of them can be a device.
    pub usable: bool,
    /// What page tables take of a GPU's memory for a host tier of all memory that is free.
    pub tables: Bytes,
}

/// Asks the driver. `free` is the host's free memory.
///
/// # Errors
/// As [`cuda_devices`].
pub fn gpus(free: Bytes) -> Result<Gpus> {
    let devices = cuda_devices()?;
    let driver = devices.first().map(|gpu| format!("CUDA {}.{}", gpu.driver.0, gpu.driver.1));
    let usable = devices.iter().any(|gpu| gpu.virtual_memory);
    let tables = CudaDeviceSelector::default().tables_of_host_memory(free);
    Ok(Gpus { found: devices.iter().map(gpu).collect(), driver, usable, tables })
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
