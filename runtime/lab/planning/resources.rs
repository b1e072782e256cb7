//! What a job may use: memory, bandwidths, and how fast it computes.

use std::time::Duration;

use super::compute::Compute;
use super::units::Bandwidth;
use crate::error::{Error, Result};
use crate::ids::Bytes;
use crate::sim::MachineModel;
use crate::store::QueueDepth;

/// The resources that a job may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Resources {
    /// The device's memory: a GPU's, or without a GPU the process's.
    pub device: Bytes,
    /// The host's memory, beside the device's.
    pub host: Bytes,
    /// The disk's read bandwidth.
    pub disk: Bandwidth,
    /// The disk's write bandwidth; `None` if it equals `disk`. The disk either reads or writes at a time.
    pub disk_write: Option<Bandwidth>,
    /// The time from the start of an operation of the disk to its first byte; 0 if it is not known.
    pub disk_latency: Duration,
    /// The most operations that the disk is given at once.
    pub disk_depth: QueueDepth,
    /// Bandwidth between host and device, each way; `None` if the device is the host itself.
    pub link: Option<Bandwidth>,
    /// Whether the two ways share the link, one at a time.
    pub link_shared: bool,
    /// The time that each copy over the link takes beside its bytes' time.
    pub link_latency: Duration,
    /// How long a pass computes if it waits for nothing; `None` if that is not known.
    pub compute: Option<Compute>,
}

impl Resources {
    /// One device of `machine`, with all of its host memory and its disk. If host and device share one memory, all of
    /// it is the device's.
    ///
    /// # Errors
    /// [`InvalidArgument`](outcore::ErrorKind::InvalidArgument) if the bandwidth of the disk or of the link is 0.
    pub fn of(machine: &MachineModel) -> Result<Self> {
        let one = machine.unified_memory || machine.link.is_none();
        let of_machine = |error: Error| error.context(format!("machine {}", machine.name));
        Ok(Self {
            device: machine.device_memory,
            host: if one { Bytes::ZERO } else { machine.host_memory },
            disk: Bandwidth::new(machine.disk.read).map_err(of_machine)?,
            disk_write: Some(Bandwidth::new(machine.disk.write).map_err(of_machine)?),
            disk_latency: machine.disk.latency,
            disk_depth: machine.disk.depth,
            link: machine.link.map(|link| Bandwidth::new(link.bandwidth()).map_err(of_machine)).transpose()?,
            link_shared: machine.link.is_some_and(|link| !link.duplex()),
            link_latency: machine.link.map_or(Duration::ZERO, |link| link.latency()),
            compute: Some(Compute::Roofline(machine.compute)),
        })
    }
}
