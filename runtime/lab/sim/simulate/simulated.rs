//! What comes of a simulation.

use std::time::Duration;

use crate::ids::Bytes;
use crate::pager::PagerStats;
use crate::sim::Recorded;
use outcore::StallStats;

/// Bytes that went one way, and for how long.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Flow {
    /// How many. Those of operations that failed do not count.
    pub bytes: Bytes,
    /// Time in which they took the disk or a link, latencies included on a link and not on a disk; on average over the devices
    /// where each has its own.
    pub busy: Duration,
    /// That time as a share of all time.
    pub utilisation: f64,
}

/// What came of a simulation.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Simulated {
    /// How long each pass took.
    pub passes: Vec<Duration>,
    /// The sum of these.
    pub time: Duration,
    /// Time in which a device had nothing to compute because pages were not there, by cause; the sum over all devices.
    pub stalls: Vec<StallStats>,
    /// Reads of the disk.
    pub disk_read: Flow,
    /// Writes to the disk.
    pub disk_written: Flow,
    /// Copies from host to device memory.
    pub link_in: Flow,
    /// Copies from device to host memory.
    pub link_out: Flow,
    /// What was computed on.
    pub compute: Flow,
    /// The pagers' counters, summed over the devices.
    pub pager: PagerStats,
    /// Pages of all pagers.
    pub pages: u64,
    /// Frames of each device tier, with the largest budget that it had.
    pub frames: u32,
    /// Frames of each host tier.
    pub host_frames: u32,
    /// Bytes of the last pages of all segments that are beyond these segments' ends.
    pub tails: Bytes,
    /// Pages of the largest set that was pinned at once.
    pub unit_pages: u32,
    /// Moves that failed.
    pub failures: u64,
    /// Steps that could not be computed because the bytes of a page were lost.
    pub lost_steps: u64,
    /// Events.
    pub events: u64,
    /// What happened when, if the settings ask for it.
    pub recorded: Option<Recorded>,
}

impl Simulated {
    /// The first pass, which finds nothing resident.
    pub fn first(&self) -> Duration {
        self.passes.first().copied().unwrap_or_default()
    }

    /// The median of the other passes; of the only one, if there is one.
    pub fn median(&self) -> Duration {
        let mut later = self.passes.iter().copied().skip(usize::from(self.passes.len() > 1)).collect::<Vec<_>>();
        later.sort_unstable();
        later.get(later.len() / 2).copied().unwrap_or_default()
    }

    /// Hits over all uses; 0 where there were none.
    pub fn hit_ratio(&self) -> f64 {
        if self.pager.uses == 0 { 0.0 } else { self.pager.hits as f64 / self.pager.uses as f64 }
    }
}
