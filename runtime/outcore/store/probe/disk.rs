//! What is known of a disk.

use std::time::Duration;

use serde::{Serialize, Serializer};

use crate::ids::Bytes;

/// Bytes of a large read of the measurement.
pub(crate) const BLOCK: Bytes = Bytes::mib(1);
/// Most reads in flight.
pub(crate) const MOST: u32 = 32;
/// The longest that a caller waits, whatever the disk and the file system do.
pub(crate) const WAIT: Duration = Duration::from_secs(1);

/// What a disk needs to be read at its full rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DiskProfile {
    /// The best rate, in bytes a second. For a disk that does one read after the other: the rate once a read has begun.
    pub bytes_per_second: Bytes,
    /// The time of a small read with nothing else in flight: to position a head, or for the way to another machine.
    #[serde(rename = "latency_s", serialize_with = "as_seconds")]
    pub latency: Duration,
    /// The fewest bytes in flight that give nearly the best rate of reads of 1 MiB.
    pub in_flight: Bytes,
}

fn as_seconds<S: Serializer>(time: &Duration, to: S) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64())
}

impl DiskProfile {
    /// A disk with this rate that needs `in_flight` bytes in flight for it, with a latency of zero.
    pub const fn new(bytes_per_second: Bytes, in_flight: Bytes) -> Self {
        Self { bytes_per_second, latency: Duration::ZERO, in_flight }
    }

    /// The same profile with this latency.
    #[must_use]
    pub const fn latency(mut self, latency: Duration) -> Self {
        self.latency = latency;
        self
    }
}
