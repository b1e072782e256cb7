//! The CUDA device of [`outcore`]: frames in the memory of one GPU.
//!
//! ```no_run
//! use outcore::{Bytes, Runtime};
//! use outcore_cuda::CudaDeviceSelector;
//!
//! let first = CudaDeviceSelector::default();
//! let runtime = Runtime::builder().device(first).device_budget(Bytes::gib(8)).open()?;
//! let model = runtime.open_model("model.gguf")?;
//! # Ok::<(), outcore::Error>(())
//! ```
//!
//! A [`CudaDeviceSelector`] names a GPU and is what [opens](outcore::device::DeviceFactory) it; [`cuda_devices`] lists
//! those that there are. What the device does with the driver is in [`outcore_gpu`]. libcuda is looked for at run time:
//! a program that links this crate starts on a machine without it.

mod device;
mod driver;
mod select;

pub use device::{CudaDevice, CudaDeviceConfig};
pub use driver::{CudaDriver, cuda_device, cuda_devices, is_device_lost};
pub use select::{CudaDeviceInfo, CudaDeviceSelector};
