//! The result of a simulation.

use std::time::Duration;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::ids::Bytes;
use crate::pager::PagerStats;
use crate::sim::Recorded;
use outcore::stats::StallStats;

/// Bytes that moved one way, and how long that took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Flow {
    /// How many bytes moved. Failed operations do not count.
    pub bytes: Bytes,
    /// How long the disk or a link was busy with them: with latencies on a link, without on a disk. The mean over the
    /// devices where each has its own.
    #[serde(rename = "busy_s", serialize_with = "seconds", deserialize_with = "of_seconds")]
    pub busy: Duration,
    /// `busy` as a share of all time.
    pub utilisation: f64,
}

fn seconds<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64())
}

fn of_seconds<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    Duration::try_from_secs_f64(f64::deserialize(from)?).map_err(D::Error::custom)
}

/// What moved in a pass, over all devices. Times are means of the devices, and those that the moves take by themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moved {
    /// Bytes read from the disk.
    pub disk_read: Bytes,
    /// Bytes written to the disk.
    pub disk_written: Bytes,
    /// Time that the disk takes for both.
    pub disk_busy: Duration,
    /// Bytes copied to device memory. Without a link: from the host tier.
    pub link_in: Bytes,
    /// Bytes copied from device memory.
    pub link_out: Bytes,
    /// Time of the copies to the device.
    pub link_in_busy: Duration,
    /// Time of the copies from the device.
    pub link_out_busy: Duration,
    /// Time in which nothing was computed because pages were missing. The rest of a pass is computing.
    pub waited: Duration,
}

impl Moved {
    pub(super) fn since(&self, before: &Self) -> Self {
        Self {
            disk_read: self.disk_read.saturating_sub(before.disk_read),
            disk_written: self.disk_written.saturating_sub(before.disk_written),
            disk_busy: self.disk_busy.saturating_sub(before.disk_busy),
            link_in: self.link_in.saturating_sub(before.link_in),
            link_out: self.link_out.saturating_sub(before.link_out),
            link_in_busy: self.link_in_busy.saturating_sub(before.link_in_busy),
            link_out_busy: self.link_out_busy.saturating_sub(before.link_out_busy),
            waited: self.waited.saturating_sub(before.waited),
        }
    }
}

/// The result of a simulation.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Simulated {
    /// How long each pass took.
    pub passes: Vec<Duration>,
    /// What each pass moved.
    pub moved: Vec<Moved>,
    /// The sum of the passes.
    pub time: Duration,
    /// Time in which a device had nothing to compute because pages were missing, by cause, summed over all devices.
    pub stalls: Vec<StallStats>,
    /// Reads of the disk.
    pub disk_read: Flow,
    /// Writes to the disk.
    pub disk_written: Flow,
    /// Copies from host to device memory.
    pub link_in: Flow,
    /// Copies from device to host memory.
    pub link_out: Flow,
    /// Bytes that were computed on.
    pub compute: Flow,
    /// The pagers' counters, summed over the devices.
    pub pager: PagerStats,
    /// How many pages all pagers have.
    pub pages: u64,
    /// Frames of each device tier, with the largest budget it had.
    pub frames: u32,
    /// Frames of each host tier.
    pub host_frames: u32,
    /// Bytes of last pages beyond their segments' ends, over all segments.
    pub tails: Bytes,
    /// How many pages the largest unit has.
    pub unit_pages: u32,
    /// How many moves failed.
    pub failures: u64,
    /// How many steps could not be computed because the bytes of a page were lost.
    pub lost_steps: u64,
    /// How many events there were.
    pub events: u64,
    /// The record over time, if the settings ask for it.
    pub recorded: Option<Recorded>,
}

impl Simulated {
    /// Returns the time of the first pass, which finds nothing resident.
    pub fn first(&self) -> Duration {
        self.passes.first().copied().unwrap_or_default()
    }

    /// Returns the median time of the other passes, or the time of the only one.
    pub fn median(&self) -> Duration {
        let mut later = self.passes.iter().copied().skip(usize::from(self.passes.len() > 1)).collect::<Vec<_>>();
        later.sort_unstable();
        later.get(later.len() / 2).copied().unwrap_or_default()
    }

    /// Returns hits over all uses; 0 if there were no uses.
    pub fn hit_ratio(&self) -> f64 {
        if self.pager.uses == 0 { 0.0 } else { self.pager.hits as f64 / self.pager.uses as f64 }
    }
}
