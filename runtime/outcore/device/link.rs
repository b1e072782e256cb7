//! A modelled link between host and device memory, to show on a machine without a GPU how long copies would take.
//!
//! The model only says when an operation ends, and the device waits until then; the bytes really move. The result
//! depends only on when an operation starts and on the operations that the link was given before.

use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::ids::Bytes;

/// Which way bytes cross the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Host to device.
    In,
    /// Device to host.
    Out,
}

/// The speed of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkModel {
    bandwidth: Bytes,
    latency: Duration,
    duplex: bool,
}

impl LinkModel {
    /// A link that moves `bandwidth` bytes per second in each direction and adds `latency` to every operation. Where
    /// it is not `duplex`, the two directions share the bandwidth, one operation at a time.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if `bandwidth` is zero.
    pub fn new(bandwidth: Bytes, latency: Duration, duplex: bool) -> Result<Self> {
        if bandwidth == Bytes::ZERO {
            return Err(Error::new(ErrorKind::InvalidArgument, "a link of 0 bytes per second never ends a copy")
                .remedy("give the bandwidth in bytes per second, such as 25GB for PCIe 4.0 x16"));
        }
        Ok(Self { bandwidth, latency, duplex })
    }

    /// Bytes per second in each direction.
    pub const fn bandwidth(&self) -> Bytes {
        self.bandwidth
    }

    /// The time that every operation takes beside that of its bytes.
    pub const fn latency(&self) -> Duration {
        self.latency
    }

    /// Whether the two directions are independent.
    pub const fn duplex(&self) -> bool {
        self.duplex
    }

    /// How long one operation of `len` bytes occupies the link.
    pub fn time_of(&self, len: u64) -> Duration {
        let nanos = (u128::from(len) * 1_000_000_000).div_ceil(u128::from(self.bandwidth.get()));
        self.latency.saturating_add(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }
}

/// When a modelled link is next free. Times are durations since any fixed moment.
#[derive(Clone, Debug)]
pub struct LinkSchedule {
    model: LinkModel,
    free: [Duration; 2],
}

impl LinkSchedule {
    /// An idle link.
    pub const fn new(model: LinkModel) -> Self {
        Self { model, free: [Duration::ZERO; 2] }
    }

    /// Gives the link an operation of `len` bytes at time `now` and returns when it ends. Operations of one direction
    /// run one after the other.
    pub fn admit(&mut self, now: Duration, direction: Direction, len: u64) -> Duration {
        self.occupy(now, direction, self.model.time_of(len))
    }

    /// [`admit`](Self::admit) for an operation that occupies the link for `time`.
    pub fn occupy(&mut self, now: Duration, direction: Direction, time: Duration) -> Duration {
        let lane = match direction {
            Direction::Out if self.model.duplex => &mut self.free[1],
            _ => &mut self.free[0],
        };
        *lane = now.max(*lane).saturating_add(time);
        *lane
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    fn schedule(duplex: bool) -> LinkSchedule {
        // 1 byte per nanosecond.
        LinkSchedule::new(LinkModel::new(Bytes::new(1_000_000_000), 2 * US, duplex).unwrap())
    }

    #[test]
    fn operations_of_one_direction_follow_each_other() {
        let mut link = schedule(true);
        assert_eq!(link.admit(10 * US, Direction::In, 3_000), 15 * US);
        assert_eq!(link.admit(11 * US, Direction::In, 3_000), 20 * US);
        // Idle in between: time starts at `now`, not at the end of the one before.
        assert_eq!(link.admit(100 * US, Direction::In, 0), 102 * US);
    }

    #[test]
    fn directions_are_independent_only_on_a_duplex_link() {
        let mut duplex = schedule(true);
        duplex.admit(Duration::ZERO, Direction::In, 8_000);
        assert_eq!(duplex.admit(Duration::ZERO, Direction::Out, 8_000), 10 * US);
        let mut shared = schedule(false);
        shared.admit(Duration::ZERO, Direction::In, 8_000);
        assert_eq!(shared.admit(Duration::ZERO, Direction::Out, 8_000), 20 * US);
    }

    #[test]
    fn extremes_neither_overflow_nor_round_down() {
        let slow = LinkModel::new(Bytes::new(3), Duration::ZERO, true).unwrap();
        assert_eq!(slow.time_of(1), Duration::from_nanos(333_333_334));
        assert!(slow.time_of(u64::MAX) > Duration::from_secs(1 << 30));
        assert_eq!(LinkModel::new(Bytes::ZERO, US, true).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}
