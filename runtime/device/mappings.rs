//! Mappings: how many this process has, how many the kernel allows it, and how many outcore's can come to.
//!
//! A process that has all its mappings cannot start threads, nor get memory in larger pieces, and is as good as lost. So
//! outcore counts what it can come to before it begins ([`Claim`]), leaves [`LEFT`] to the rest of the process, and
//! holds some of its own for nothing ([`Ballast`]) that it gives up when others have taken the rest.
//!
//! No lock is taken here, nor by what a host device finds out about the kernel: a child by `fork` may open a runtime while a
//! thread of its parent, which it does not have, was in here.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::sys::{self, Region};
use crate::error::{Error, ErrorKind, Result};
use crate::machine;

/// Mappings left to the rest of the process, and for what it starts later.
pub(super) const LEFT: u64 = 1024;
/// Of those, left beside what the process has already.
const LEFT_AT_LEAST: u64 = 512;
/// Mappings that a ballast holds.
pub(super) const BALLAST: u64 = 256;
/// Mappings that must be there beside a ballast before it is taken up again.
const SPARE: u64 = LEFT_AT_LEAST / 2;
/// Mappings that a region can take, whatever is in it: itself, its two ends, and the table about it.
pub(super) const A_REGION: u64 = 4;

/// For so long at least refusals give the same count.
const RECENT: Duration = Duration::from_millis(250);
/// And for so many times as long as it took to count: where the processors are busy that is more, and refusals that each count
/// anew get nowhere.
const RECENT_TIMES: u32 = 4;

/// What all claims of this process add up to.
static CLAIMED: AtomicU64 = AtomicU64::new(0);

/// That the limit cannot be checked was said.
static UNCHECKED: AtomicBool = AtomicBool::new(false);

/// Ranges of outcore's, which are told from others' in `/proc/self/maps`. One that finds no room here counts as others',
/// which errs on the safe side.
static REGIONS: [Known; 256] = [const { Known::NONE }; 256];

struct Known {
    /// 0 where the place is free.
    base: AtomicU64,
    end: AtomicU64,
}

impl Known {
    #[allow(clippy::declare_interior_mutable_const, reason = "the beginning of each element")]
    const NONE: Self = Self { base: AtomicU64::new(0), end: AtomicU64::new(0) };
}

/// A range is outcore's from now on.
pub(super) fn register(base: u64, len: u64) {
    for known in &REGIONS {
        if known.base.compare_exchange(0, base, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            // Until then it counts as empty.
            known.end.store(base + len, Ordering::Release);
            return;
        }
    }
}

/// A range is not outcore's any more.
pub(super) fn unregister(base: u64) {
    if let Some(known) = REGIONS.iter().find(|known| known.base.load(Ordering::Relaxed) == base) {
        known.end.store(0, Ordering::Relaxed);
        known.base.store(0, Ordering::Release);
    }
}

/// What there is, at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Count {
    limit: u64,
    /// Of this process, as far as they are not outcore's.
    others: u64,
    ours: u64,
}

impl Count {
    /// Reads `/proc`. As long as the process has few mappings it takes microseconds, with 65,000 of them some 50 ms.
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

    /// Whether there is room for so many beside what others have.
    fn holds(self, claimed: u64) -> bool {
        claimed.saturating_add(self.kept_back()) <= self.limit
    }

    /// What is not to be claimed.
    fn kept_back(self) -> u64 {
        (self.others + LEFT_AT_LEAST).max(LEFT)
    }

    /// What can still be claimed beside `claimed`: so many more it [holds](Self::holds).
    fn claimable(self, claimed: u64) -> u64 {
        self.limit.saturating_sub(self.kept_back()).saturating_sub(claimed)
    }

    fn left(self) -> u64 {
        self.limit.saturating_sub(self.others + self.ours)
    }

    fn told(self, what: &str, wanted: u64, larger: &str) -> Error {
        let Self { limit, others, ours } = self;
        let claimed = CLAIMED.load(Ordering::Relaxed);
        let message = format!(
            "{what}: needs up to {wanted} more mappings, and the kernel allows this process {limit} (vm.max_map_count): it has \
             {}, and outcore's {ours} of them can become {claimed}",
            others + ours
        );
        let enough = (wanted + claimed + others + LEFT).max(2 * limit).next_power_of_two();
        Error::new(ErrorKind::TooManyMappings, message)
            .remedy(format!("run `sysctl -w vm.max_map_count={enough}`{larger}"))
    }
}

const MAPS: &str = "/proc/self/maps";

/// Calls `each` with the first address of every line. In small pieces: where mappings are short, so is memory.
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

/// How many mappings this process can still claim; `None` where the kernel does not say.
pub(super) fn claimable() -> Option<u64> {
    Some(Count::now().ok()?.claimable(CLAIMED.load(Ordering::Relaxed)))
}

/// A number of mappings that something of outcore's can come to; given back on drop.
#[derive(Debug)]
pub(super) struct Claim(u64);

impl Claim {
    /// Claims `count` mappings for `what`; `larger` says what else would do than a higher limit.
    ///
    /// # Errors
    /// [`ErrorKind::TooManyMappings`] if the process could then come to more than it may have. Where the kernel does not
    /// say how many it has, none.
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

    /// What a region can come to, but for frames.
    pub(super) fn of_region(what: &str) -> Result<Self> {
        Self::of(A_REGION, what, |_| ", or close other runtimes and models".to_owned())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        CLAIMED.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Why a call that makes or splits a mapping was refused: for want of mappings, which then is the answer, or of memory.
pub(super) fn shortage(what: &str, cause: &io::Error) -> Option<Error> {
    if cause.raw_os_error() != Some(libc::ENOMEM) {
        return None;
    }
    let now = Count::now().ok()?;
    (now.left() < LEFT_AT_LEAST).then(|| now.told(what, 2, ", use larger pages, or keep fewer mappings elsewhere"))
}

/// Mappings held for nothing. Whoever is refused one gives them up: then the rest of the process has them, and not the
/// next frame.
#[derive(Debug)]
pub(super) struct Ballast {
    /// Each second page can be read where mappings are held, so that each page is one; no page can where they are not.
    region: Region,
    #[allow(dead_code, reason = "held")]
    claim: Claim,
    held: bool,
    /// What was counted for a refusal. To count takes long where there are many.
    counted: Option<Counted>,
}

/// A count that is given for some time.
#[derive(Clone, Copy, Debug)]
struct Counted {
    count: Count,
    until: Instant,
}

impl Counted {
    fn now() -> Option<Self> {
        let began = Instant::now();
        let count = Count::now().ok()?;
        Some(Self::between(count, began, Instant::now()))
    }

    fn between(count: Count, began: Instant, ended: Instant) -> Self {
        let took = ended.saturating_duration_since(began);
        Self { count, until: ended + RECENT.max(RECENT_TIMES * took) }
    }
}

impl Ballast {
    /// # Errors
    /// If there is no room for it.
    pub(super) fn new() -> Result<Self> {
        let claim = Claim::of(BALLAST, "a host device", |_| String::new())?;
        let page = sys::system_page_bytes();
        let region = Region::reserve((BALLAST + SPARE) * page, page, "mappings held back")?;
        let ballast = Self { region, claim, held: true, counted: None };
        ballast.take(0..BALLAST).map_err(|cause| Error::io("hold mappings back", cause))?;
        Ok(ballast)
    }

    /// Makes a mapping of each of these pages.
    fn take(&self, pages: Range<u64>) -> io::Result<()> {
        let page = sys::system_page_bytes();
        pages.step_by(2).try_for_each(|at| {
            // SAFETY: the region is ours, nothing is in it, and nobody knows its addresses. What can be read there are zeros
            // that take no memory.
            unsafe { sys::set_readable(self.region.base() + at * page, page) }
        })
    }

    /// Makes one mapping of all of these.
    fn leave(&self, pages: Range<u64>) {
        let page = sys::system_page_bytes();
        let (at, len) = (self.region.base() + pages.start * page, (pages.end - pages.start) * page);
        // SAFETY: as in `take`.
        if let Err(cause) = unsafe { sys::set_access(at, len, false) } {
            tracing::debug!(%cause, "give up mappings held back");
        }
    }

    /// Whether it is still held; taken up again if it had been given up and there is room for it now.
    ///
    /// # Errors
    /// [`ErrorKind::TooManyMappings`] as long as there is not.
    #[inline]
    pub(super) fn hold(&mut self, what: impl FnOnce() -> String) -> Result<()> {
        if self.held { Ok(()) } else { self.take_up(&what()) }
    }

    /// The kernel is asked, and not the last count: room that has come back is there at once.
    fn take_up(&mut self, what: &str) -> Result<()> {
        const ADVICE: &str = ", use larger pages, or keep fewer mappings elsewhere";
        if self.take(0..BALLAST + SPARE).is_ok() {
            self.leave(BALLAST..BALLAST + SPARE);
            self.held = true;
            return Ok(());
        }
        self.leave(0..BALLAST + SPARE);
        let recent = self.counted.filter(|counted| Instant::now() < counted.until);
        self.counted = recent.or_else(Counted::now);
        Err(match self.counted {
            Some(Counted { count, .. }) => count.told(what, 2, ADVICE),
            None => Error::new(
                ErrorKind::TooManyMappings,
                format!("{what}: the kernel gives this process no more mappings"),
            )
            .remedy(format!("raise vm.max_map_count{ADVICE}")),
        })
    }

    /// Gives the mappings to whoever needs them.
    pub(super) fn give_up(&mut self) {
        if std::mem::take(&mut self.held) {
            self.leave(0..BALLAST);
        }
    }
}

#[cfg(test)]
mod tests {
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

    /// The time in which a count is given began before it was made, and had passed when it was there: each refusal counted anew.
    #[test]
    fn regression_refusals_give_the_same_count_however_long_it_takes() {
        let (count, began) = (Count { limit: 65_530, others: 30, ours: 0 }, Instant::now());
        for took in [Duration::ZERO, RECENT / 5, RECENT, 8 * RECENT] {
            let ended = began + took;
            let given = Counted::between(count, began, ended).until.saturating_duration_since(ended);
            assert!(given >= RECENT && given >= 4 * took, "counting takes {took:?}, and is done every {given:?}");
        }
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
