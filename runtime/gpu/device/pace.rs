//! How long work on a stream will take, from what has ended there: so that the [reaper](super::reaper) asks about each
//! operation about once.
//!
//! Copies take a time for each byte, which is learned. Anything else is taken to last as long as the last such work.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The longest time that is foreseen for work that is no copy, because the next may be short.
const FORESEEN_MAX: Duration = Duration::from_micros(100);
/// The longest time that a MiB of a copy is taken to need, in nanoseconds: what no link of a GPU needs. A copy that
/// waited for other work does not make much of the next one's time.
const MIB_MAX: u32 = 1_000_000;
const MIB: u64 = 1 << 20;

/// Written by the reaper alone.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// How long the last work that was no copy took, in nanoseconds.
    last: AtomicU32,
    /// Nanoseconds for a MiB of a copy; 0 while none has ended.
    mib: AtomicU32,
}

impl Pace {
    /// How long work that copies this number of bytes is likely to take. Zero at first.
    pub(super) fn foresee(&self, bytes: u64) -> Duration {
        let mib = self.mib.load(Ordering::Relaxed);
        if bytes == 0 || mib == 0 {
            return Duration::from_nanos(self.last.load(Ordering::Relaxed).into());
        }
        Duration::from_nanos(u64::from(mib).saturating_mul(bytes) / MIB)
    }

    /// Notes that `operations`, which copied `bytes`, ended within `taken`. Without `seen_running` they were
    /// not seen before their end, which may then have been long ago.
    pub(super) fn learn(&self, taken: Duration, operations: u32, bytes: u64, seen_running: bool) {
        if bytes == 0 {
            let each = (taken / operations.max(1)).min(FORESEEN_MAX);
            return self.last.store(each.as_nanos() as u32, Ordering::Relaxed);
        }
        let found = taken.as_nanos() as u64 as f64 * MIB as f64 / bytes as f64;
        let known = f64::from(self.mib.load(Ordering::Relaxed));
        let next = match (known > 0.0, seen_running) {
            (false, _) => found,
            // One that takes much longer waited for something.
            (true, true) => known + (found.min(2.0 * known) - known) / 4.0,
            // Asked too late, perhaps.
            (true, false) => found.min(known * 7.0 / 8.0),
        };
        self.mib.store((next as u32).clamp(1, MIB_MAX), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn micros(n: u64) -> Duration {
        Duration::from_micros(n)
    }

    /// How often one copy of `taken` is asked about, as the reaper does: first when it is foreseen to end.
    fn asked(pace: &Pace, bytes: u64, taken: Duration) -> u32 {
        let (mut at, mut asked) = (pace.foresee(bytes).max(micros(20)), 1);
        while at < taken {
            at += (at / 8).clamp(micros(20), micros(1000));
            asked += 1;
        }
        pace.learn(at, 1, bytes, asked > 1);
        asked
    }

    #[test]
    fn copies_are_asked_about_once_or_twice_whatever_their_size() {
        for (bytes, taken) in [(2 * MIB, micros(38)), (16 * MIB, micros(308)), (64 * MIB, micros(1230))] {
            let pace = Pace::default();
            (0..10).for_each(|_| _ = asked(&pace, bytes, taken));
            let all: u32 = (0..100).map(|_| asked(&pace, bytes, taken)).sum();
            assert!(all <= 300, "{bytes}: {all} questions for 100 copies");
            // What was learned from one size holds for another.
            assert!(asked(&pace, 2 * bytes, 2 * taken) <= 4, "{bytes}");
        }
    }

    #[test]
    fn a_copy_that_waited_does_not_delay_the_next_ones_for_long() {
        let pace = Pace::default();
        (0..50).for_each(|_| _ = asked(&pace, 16 * MIB, micros(308)));
        pace.learn(Duration::from_secs(3), 1, 16 * MIB, true);
        assert!(pace.foresee(16 * MIB) < micros(500), "{:?}", pace.foresee(16 * MIB));
        for _ in 0..100 {
            pace.learn(Duration::from_secs(3), 1, 16 * MIB, true);
        }
        assert!(pace.foresee(16 * MIB) <= micros(16_000));
    }

    #[test]
    fn other_work_is_as_long_as_the_last_and_no_longer_than_a_moment() {
        let pace = Pace::default();
        assert_eq!(pace.foresee(0), Duration::ZERO);
        pace.learn(micros(90), 3, 0, true);
        assert_eq!(pace.foresee(0), micros(30));
        pace.learn(Duration::from_secs(1), 1, 0, true);
        assert_eq!(pace.foresee(0), FORESEEN_MAX);
        assert_eq!(pace.foresee(MIB), FORESEEN_MAX, "no copy has ended yet");
    }
}
