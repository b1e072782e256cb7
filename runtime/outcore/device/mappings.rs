//! Mappings: how many this process has, how many the kernel allows it, and how many outcore may need.
//!
//! A process that has all its mappings cannot start threads, nor get memory in larger pieces, and is as good as lost.
//! So outcore counts the most that it may need before it begins ([`Claim`]), leaves [`LEFT`] to the rest of the
//! process, and holds some mappings for nothing (`ballast.rs`), which it gives up when others have taken the rest.
//!
//! No lock is taken here, nor where a host device finds out about the kernel. A child by `fork` may open a runtime
//! although a thread of its parent, which the child does not have, was in here.

use std::fs::File;
use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::error::{Error, ErrorKind, Result};
use crate::os::machine;

/// Mappings left to the rest of the process, including those that it makes later.
pub(super) const LEFT: u64 = 1024;
/// The least that is left free beside the mappings that the process has already.
pub(super) const LEFT_AT_LEAST: u64 = 512;
/// The most mappings that a region needs, whatever is in it: itself, its two ends, and the table of its pages.
pub(super) const A_REGION: u64 = 4;

/// The sum of all claims of this process.
static CLAIMED: AtomicU64 = AtomicU64::new(0);

/// Whether it was logged that the limit cannot be checked.
static UNCHECKED: AtomicBool = AtomicBool::new(false);

/// Ranges of outcore's, to tell them from others in `/proc/self/maps`. A range that finds no room here counts as
/// others', which errs on the safe side.
static REGIONS: [Known; 256] = [const { Known::NONE }; 256];

struct Known {
    /// 0 if the entry is free.
    base: AtomicU64,
    end: AtomicU64,
}

impl Known {
    #[allow(clippy::declare_interior_mutable_const, reason = "the beginning of each element")]
    const NONE: Self = Self { base: AtomicU64::new(0), end: AtomicU64::new(0) };
}

/// Notes that a range is outcore's.
pub(super) fn register(base: u64, len: u64) {
    for known in &REGIONS {
        if known.base.compare_exchange(0, base, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            // Until then the entry counts as empty.
            known.end.store(base + len, Ordering::Release);
            return;
        }
    }
}

/// Notes that a range is not outcore's any more.
pub(super) fn unregister(base: u64) {
    if let Some(known) = REGIONS.iter().find(|known| known.base.load(Ordering::Relaxed) == base) {
        known.end.store(0, Ordering::Relaxed);
        known.base.store(0, Ordering::Release);
    }
}

/// The mappings of this process at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Count {
    pub(super) limit: u64,
    /// Mappings of this process that are not outcore's.
    pub(super) others: u64,
    pub(super) ours: u64,
}

impl Count {
    /// Reads `/proc`. This takes microseconds if the process has few mappings, and some 50 ms if it has 65,000.
    ///
    /// # Errors
    /// If `/proc` cannot be read.
    pub(super) fn now() -> Result<Self> {
        let limit = machine::max_map_count()?;
        let mut known: Vec<(u64, u64)> = REGIONS
            .iter()
            .map(|known| (known.base.load(Ordering::Relaxed), known.end.load(Ordering::Acquire)))
            .filter(|(base, end)| base < end)
            .collect();
        known.sort_unstable();
        let (mut others, mut ours) = (0, 0);
        let is_ours = |start: u64| {
            let before = known.partition_point(|(base, _)| *base <= start);
            before.checked_sub(1).and_then(|at| known.get(at)).is_some_and(|(_, end)| start < *end)
        };
        let file = File::open(MAPS).map_err(|cause| Error::io(format!("open {MAPS}"), cause))?;
        each_start(file, |start| if is_ours(start) { ours += 1 } else { others += 1 })
            .map_err(|cause| Error::io(format!("read {MAPS}"), cause))?;
        Ok(Self { limit, others, ours })
    }

    /// Whether there is room for `claimed` mappings beside others' and those left to them.
    pub(super) fn holds(self, claimed: u64) -> bool {
        claimed.saturating_add(self.kept_back()) <= self.limit
    }

    /// How many of the allowed mappings cannot be claimed.
    pub(super) fn kept_back(self) -> u64 {
        (self.others + LEFT_AT_LEAST).max(LEFT)
    }

    /// How many mappings can still be claimed beside `claimed`: the most that it [`holds`](Self::holds).
    fn claimable(self, claimed: u64) -> u64 {
        self.limit.saturating_sub(self.kept_back()).saturating_sub(claimed)
    }

    pub(super) fn left(self) -> u64 {
        self.limit.saturating_sub(self.others + self.ours)
    }

    pub(super) fn told(self, what: &str, wanted: u64, larger: &str) -> Error {
        let Self { limit, others, ours } = self;
        let claimed = CLAIMED.load(Ordering::Relaxed);
        let message = format!(
            "{what}: needs up to {wanted} more mappings, and the kernel allows this process {limit} \
             (vm.max_map_count). It has {} now, and the {ours} of them that are outcore's may become {claimed}",
            others + ours
        );
        let enough = (wanted + claimed + others + LEFT).max(2 * limit).next_power_of_two();
        Error::new(ErrorKind::TooManyMappings, message)
            .remedy(format!("run `sysctl -w vm.max_map_count={enough}`{larger}"))
    }
}

pub(super) const MAPS: &str = "/proc/self/maps";

/// Calls `each` with the first address of every line. Reads in small pieces: where mappings are short, memory is too.
fn each_start(mut file: impl Read, mut each: impl FnMut(u64)) -> io::Result<()> {
    let mut bytes = [0; 8192];
    let (mut start, mut at_start) = (0_u64, true);
    loop {
        let count = match file.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => continue,
            Err(cause) => return Err(cause),
        };
        for byte in bytes.iter().take(count) {
            match (*byte as char).to_digit(16) {
                Some(digit) if at_start => start = start << 4 | u64::from(digit),
                _ if at_start => {
                    each(start);
                    at_start = *byte == b'\n';
                    start = 0;
                }
                _ => at_start = *byte == b'\n',
            }
        }
    }
}

/// How many mappings this process can still claim; `None` if the kernel does not say.
pub(super) fn claimable() -> Option<u64> {
    Some(Count::now().ok()?.claimable(CLAIMED.load(Ordering::Relaxed)))
}

/// The most mappings that some part of outcore may need; given back on drop.
#[derive(Debug)]
pub(super) struct Claim(u64);

impl Claim {
    /// Claims `count` mappings for `what`; `larger` names another remedy than a higher limit.
    ///
    /// # Errors
    /// [`ErrorKind::TooManyMappings`] if the process could then have more than it may. No error if the kernel does not
    /// say how many it has.
    pub(super) fn of(count: u64, what: &str, larger: impl FnOnce(u64) -> String) -> Result<Self> {
        let claimed = CLAIMED.fetch_add(count, Ordering::Relaxed).saturating_add(count);
        let claim = Self(count);
        match Count::now() {
            Ok(now) if now.holds(claimed) => Ok(claim),
            Ok(now) => {
                drop(claim);
                Err(now.told(what, count, &larger(now.limit)))
            }
            Err(error) => {
                if !UNCHECKED.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "cannot check the limit on mappings");
                }
                Ok(claim)
            }
        }
    }

    /// Claims the most mappings that a region needs, without those for frames.
    pub(super) fn of_region(what: &str) -> Result<Self> {
        Self::of(A_REGION, what, |_| ", or close other runtimes and models".to_owned())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        CLAIMED.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// What helps besides a larger limit.
pub(super) const ADVICE: &str = ", use larger pages, or keep fewer mappings elsewhere";

/// Whether mappings or memory may be what a refused call lacked.
pub(super) fn may_be_short(cause: &io::Error) -> bool {
    cause.raw_os_error() == Some(libc::ENOMEM)
}

/// The error for a refused call that makes or splits a mapping, if mappings are short. None if memory is. `given_up` of
/// the mappings that are free were not when the call was refused.
pub(super) fn shortage(what: &str, cause: &io::Error, given_up: u64) -> Option<Error> {
    if !may_be_short(cause) {
        return None;
    }
    let now = Count::now().ok()?;
    let left = now.left().saturating_sub(given_up);
    (left < LEFT_AT_LEAST).then(|| now.told(what, 2, ADVICE))
}

#[cfg(test)]
mod tests {
    use super::super::sys::{self, Region};
    use super::*;

    #[test]
    fn starts_of_lines_are_told_from_what_is_behind_them() {
        let maps = "55d0-55d1 r--p 00000000 fe:00 12 /a b\nff00ff00-ff00ffff rw-p 0 0:0 0 \nabc-abd ---p 0 00:00 0";
        let mut starts = Vec::new();
        each_start(maps.as_bytes(), |start| starts.push(start)).unwrap();
        assert_eq!(starts, [0x55d0, 0xff00_ff00, 0xabc]);
    }

    #[test]
    fn ours_are_told_from_others() {
        let before = Count::now().unwrap();
        let page = sys::system_page_bytes();
        let region = Region::reserve(64 * page, page, "a test").unwrap();
        for at in (0..64).step_by(2) {
            // SAFETY: the region is this test's.
            unsafe { sys::set_readable(region.base() + at * page, page) }.unwrap();
        }
        let within = Count::now().unwrap();
        assert!(within.ours >= 60, "{before:?}, {within:?}");
        drop(region);
    }

    #[test]
    fn what_others_have_counts_against_a_claim() {
        let count = Count { limit: 65_530, others: 30, ours: 0 };
        assert!(count.holds(65_530 - 1024) && !count.holds(65_530 - 1023));
        assert_eq!((count.claimable(0), count.claimable(506), count.claimable(65_000)), (64_506, 64_000, 0));
        let crowded = Count { limit: 65_530, others: 60_000, ours: 0 };
        assert!(crowded.holds(5_530 - 512) && !crowded.holds(5_530 - 511));
        assert_eq!(crowded.claimable(0), 5_530 - 512);
        let error = crowded.told("7 frames", 14, "");
        assert_eq!(error.kind(), ErrorKind::TooManyMappings);
        assert!(error.advice().is_some_and(|advice| advice.contains("vm.max_map_count=131072")), "{error}");
    }
}
