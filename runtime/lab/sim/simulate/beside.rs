//! Computing and the disk side by side, where the disk reads into the memory that computing reads.
//!
//! While both are at work they want more of that memory than it gives, and each gets its part: with computing that
//! takes `w` bytes a second and a disk of `r`, of a memory of `m`, both go on at `m / (w + r)` of their speed, at most
//! at all of it. `docs/planning.md` compares that with measurements. Behind a link nothing is slowed: the disk fills
//! host memory, and computing reads the device's.
//!
//! Each of the two has a clock that runs at the share of its speed that it has. What takes a time ends when the clock
//! has advanced by it. Events come at the earliest time that is possible; one that comes too early is put off.

use std::collections::VecDeque;

use super::Nanos;
use super::settings::Settings;
use crate::ids::Bytes;
use crate::sim::machine::MachineModel;

/// What is left of a time when it counts as ended, in nanoseconds.
pub(super) const NOTHING: Nanos = 500;

/// A transfer of the disk, on its clock, and the speed of both while it and computing are at work.
#[derive(Clone, Copy, Debug)]
struct Transfer {
    begin: Nanos,
    end: Nanos,
    speed: f64,
}

#[derive(Debug)]
pub(super) struct Clocks {
    /// The memory's bandwidth and what computing takes of it; `None` if nothing is slowed.
    memory: Option<(f64, f64)>,
    now: Nanos,
    disk: Nanos,
    compute: Nanos,
    /// Transfers that have not ended, in order.
    transfers: VecDeque<Transfer>,
    /// How many devices compute.
    computing: u32,
}

impl Clocks {
    pub(super) fn new(machine: &MachineModel, settings: &Settings) -> Self {
        let all = machine.compute.bandwidth;
        let taken = settings.computing.map_or(all, |computing| computing.memory);
        let memory = machine.link.is_none().then_some((all.get() as f64, taken.get() as f64));
        Self { memory, now: 0, disk: 0, compute: 0, transfers: VecDeque::new(), computing: 0 }
    }

    pub(super) fn disk(&self) -> Nanos {
        if self.memory.is_some() { self.disk } else { self.now }
    }

    pub(super) fn computing(&self) -> Nanos {
        if self.memory.is_some() { self.compute } else { self.now }
    }

    /// The disk transfers from `begin` to `end` on its clock, after all transfers before.
    pub(super) fn transfers(&mut self, begin: Nanos, end: Nanos, rate: Bytes) {
        if let Some((all, taken)) = self.memory {
            let speed = (all / (taken + rate.get() as f64)).min(1.0);
            self.transfers.push_back(Transfer { begin, end, speed });
        }
    }

    pub(super) fn begins_computing(&mut self) {
        self.computing += 1;
    }

    pub(super) fn ends_computing(&mut self) {
        self.computing -= 1;
    }

    /// Advances to `now`. Nothing begins or ends to compute before.
    pub(super) fn advance(&mut self, now: Nanos) {
        let mut left = now.saturating_sub(self.now);
        self.now = now;
        if self.memory.is_none() {
            return;
        }
        while left > 0 {
            let (until, speed) = match self.transfers.front() {
                Some(next) if next.end <= self.disk => {
                    self.transfers.pop_front();
                    continue;
                }
                Some(next) if next.begin > self.disk => (next.begin, 1.0),
                Some(next) => (next.end, if self.computing > 0 { next.speed } else { 1.0 }),
                None => (Nanos::MAX, 1.0),
            };
            let there = until - self.disk;
            let time = left.min(if speed < 1.0 { (there as f64 / speed).ceil() as Nanos } else { there });
            // Not nothing, so that this ends; no more than there is, so that the next transfer has its own speed.
            let done = if speed < 1.0 { ((time as f64 * speed).round() as Nanos).clamp(1, there) } else { time };
            self.disk += done;
            self.compute += done;
            left -= time;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clocks(machine: &str, transfers: &[(Nanos, Nanos)]) -> Clocks {
        let machine = MachineModel::named(machine).unwrap();
        let mut clocks = Clocks::new(&machine, &Settings::new(Bytes::gib(1), Bytes::ZERO));
        // A disk as fast as the memory: each gets half.
        transfers.iter().for_each(|(begin, end)| clocks.transfers(*begin, *end, machine.compute.bandwidth));
        clocks
    }

    #[test]
    fn both_are_slowed_while_both_are_at_work() {
        let mut clocks = clocks("laptop", &[(0, 100), (300, 400)]);
        let at = |clocks: &mut Clocks, now| {
            clocks.advance(now);
            (clocks.disk(), clocks.computing())
        };
        clocks.begins_computing();
        assert_eq!(at(&mut clocks, 100), (50, 50));
        clocks.ends_computing();
        assert_eq!(at(&mut clocks, 150), (100, 100), "the disk alone");
        clocks.begins_computing();
        assert_eq!(at(&mut clocks, 350), (300, 300), "nothing to transfer");
        assert_eq!(at(&mut clocks, 650), (500, 500), "200 for the second transfer, and 100 after it");
    }

    #[test]
    fn behind_a_link_nothing_is_slowed() {
        let mut clocks = clocks("rtx4090", &[(0, 100)]);
        clocks.begins_computing();
        clocks.advance(100);
        assert_eq!((clocks.disk(), clocks.computing()), (100, 100));
    }
}
