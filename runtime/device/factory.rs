//! How a runtime opens its device.

use std::fmt;
use std::sync::Arc;

use super::{Completions, Device, HostDevice, HostDeviceConfig, LinkModel, SimClock, SimDevice, SimDeviceConfig};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, PageSize};

/// What a runtime asks of the device that it opens.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DeviceSettings {
    /// Bytes of a page and of a frame.
    pub page_size: PageSize,
    /// How many frames exist at first. More are [asked for](Device::grow_frames) when the budget is a share of what the
    /// open device has [free](Device::free_memory), or is raised.
    pub frames: u32,
    /// The modelled link between host memory and the device, if one was asked for.
    pub link: Option<LinkModel>,
    /// Whether frames get their memory before their first use, in the background.
    pub warm: bool,
}

/// Opens the device of a runtime: [`RuntimeBuilder::custom_device`](crate::RuntimeBuilder::custom_device) takes one from
/// any crate. `examples/own_device` is such a crate.
pub trait DeviceFactory: Send + Sync + fmt::Debug {
    /// What users call the device: `host`, `cuda:0`.
    fn name(&self) -> String;

    /// Opens the device. It reports the ends of operations to `completions`.
    ///
    /// # Errors
    /// Of any kind. [`InvalidArgument`](ErrorKind::InvalidArgument) for a setting that the device cannot have.
    fn open(&self, settings: DeviceSettings, completions: Arc<dyn Completions>) -> Result<Arc<dyn Device>>;

    /// Whether frames are memory of this process. Then a runtime that nobody gave a page size chooses one by how much
    /// memory the budget and this machine have.
    fn is_process_memory(&self) -> bool {
        false
    }

    /// The kernel's page tables that a frame can have for itself, of this process: they count in the device budget.
    fn tables_of_a_frame(&self, _page_size: PageSize) -> Bytes {
        Bytes::ZERO
    }
}

/// The error of a device that has a link of its own.
pub(super) fn has_a_link(device: &str) -> Error {
    let message = format!("a modelled link was asked for, and the device {device} has a link of its own");
    Error::new(ErrorKind::InvalidArgument, message).remedy("leave the link out, or use the host device")
}

/// The host device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostFactory;

impl DeviceFactory for HostFactory {
    fn name(&self) -> String {
        "host".to_owned()
    }

    fn open(&self, settings: DeviceSettings, completions: Arc<dyn Completions>) -> Result<Arc<dyn Device>> {
        let DeviceSettings { page_size, frames, link, warm } = settings;
        Ok(Arc::new(HostDevice::new(HostDeviceConfig { page_size, frames, link, warm }, completions)?))
    }

    fn is_process_memory(&self) -> bool {
        true
    }

    fn tables_of_a_frame(&self, page_size: PageSize) -> Bytes {
        HostDevice::tables_of_a_frame(page_size)
    }
}

/// The simulated device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SimFactory {
    pub seed: u64,
}

impl DeviceFactory for SimFactory {
    fn name(&self) -> String {
        format!("sim:{}", self.seed)
    }

    fn open(&self, settings: DeviceSettings, completions: Arc<dyn Completions>) -> Result<Arc<dyn Device>> {
        let DeviceSettings { page_size, frames, link, .. } = settings;
        let config = SimDeviceConfig { page_size, frames, link, seed: self.seed, clock: SimClock::Free };
        Ok(Arc::new(SimDevice::new(config, completions)?))
    }

    fn is_process_memory(&self) -> bool {
        true
    }
}
