//! How a runtime opens its device.

use std::fmt;
use std::sync::Arc;

use super::{Completions, Device, HostDevice, HostDeviceConfig, LinkModel};
use crate::error::Result;
use crate::ids::{Bytes, PageSize};
use crate::pager::PolicyKind;

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

/// Opens the device of a runtime: [`RuntimeBuilder::device`](crate::RuntimeBuilder::device) takes one from any crate.
/// `outcore-cuda` is such a crate, and `examples/own_device` shows the smallest.
pub trait DeviceFactory: Send + Sync + fmt::Debug {
    /// What users call the device: `host`, `cuda:0`.
    fn name(&self) -> String;

    /// Opens the device. It reports the ends of operations to `completions`.
    ///
    /// # Errors
    /// Of any kind. [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a setting that the device cannot have.
    fn open(&self, settings: DeviceSettings, completions: Arc<dyn Completions>) -> Result<Arc<dyn Device>>;

    /// Whether frames are memory of this process. Then a runtime that nobody gave a page size chooses one by how much
    /// memory the budget and this machine have.
    fn is_process_memory(&self) -> bool {
        false
    }

    /// The page size of a runtime that nobody gave one, where its budget has room for enough pages of it.
    fn usual_page(&self) -> PageSize {
        PageSize::DEFAULT
    }

    /// The policy of a runtime that nobody gave one.
    fn default_policy(&self) -> PolicyKind {
        PolicyKind::default()
    }

    /// The kernel's page tables that a frame can have for itself, of this process: they count in the device budget.
    fn tables_of_a_frame(&self, _page_size: PageSize) -> Bytes {
        Bytes::ZERO
    }

    /// The device's own memory that goes to its page tables when it [locks](Device::lock_host) this much host memory.
    /// It is beside the device budget: a budget that is a share of free memory leaves room for it.
    fn tables_of_host_memory(&self, _host: Bytes) -> Bytes {
        Bytes::ZERO
    }
}

impl<F: DeviceFactory + ?Sized> DeviceFactory for Arc<F> {
    fn name(&self) -> String {
        (**self).name()
    }
    fn open(&self, settings: DeviceSettings, completions: Arc<dyn Completions>) -> Result<Arc<dyn Device>> {
        (**self).open(settings, completions)
    }
    fn is_process_memory(&self) -> bool {
        (**self).is_process_memory()
    }
    fn usual_page(&self) -> PageSize {
        (**self).usual_page()
    }

    fn default_policy(&self) -> PolicyKind {
        (**self).default_policy()
    }
    fn tables_of_a_frame(&self, page_size: PageSize) -> Bytes {
        (**self).tables_of_a_frame(page_size)
    }
    fn tables_of_host_memory(&self, host: Bytes) -> Bytes {
        (**self).tables_of_host_memory(host)
    }
}

/// The host device: frames are this process's own memory. A runtime has it unless it is given another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Host;

impl DeviceFactory for Host {
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
