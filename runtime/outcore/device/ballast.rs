//! Mappings that are held for nothing, and given up when the process needs them.

use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::mappings::{ADVICE, Claim, Count, LEFT_AT_LEAST, MAPS};
use super::sys::{self, Region};
use crate::error::{Error, ErrorKind, Result};

/// Mappings that a ballast holds.
pub(super) const BALLAST: u64 = 256;
/// Mappings that must be free beside a ballast before it is taken up again.
const SPARE: u64 = LEFT_AT_LEAST / 2;

/// A count is used for later refusals for at least this long ...
const RECENT: Duration = Duration::from_millis(250);
/// ... and for at least this many times as long as counting took. Busy processors slow counting down, and refusals that
/// each count anew would get nowhere.
const RECENT_TIMES: u32 = 4;

/// Mappings held for nothing. When the kernel refuses a mapping they are given up to the rest of the process, and not
/// to the next frame.
#[derive(Debug)]
pub(super) struct Ballast {
    /// While the ballast is held every second page is readable, so that each page is a mapping. When it is given up
    /// none is.
    region: Region,
    #[allow(dead_code, reason = "held")]
    claim: Claim,
    held: bool,
    /// The count for the last refusal, kept because counting takes long with many mappings.
    counted: Option<Counted>,
}

/// A count, and how long it is used.
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
        let region = Region::reserve(BALLAST * page, page, "mappings held back")?;
        let ballast = Self { region, claim, held: true, counted: None };
        ballast.take(0..BALLAST).map_err(|cause| Error::io("hold mappings back", cause))?;
        Ok(ballast)
    }

    /// Makes each of these pages a mapping.
    fn take(&self, pages: Range<u64>) -> io::Result<()> {
        let page = sys::system_page_bytes();
        pages.step_by(2).try_for_each(|at| {
            // SAFETY: the region is ours, nothing is in it, and nobody knows its addresses. Its readable pages are
            // zeros that take no memory.
            unsafe { sys::set_readable(self.region.base() + at * page, page) }
        })
    }

    /// Makes all of these pages one mapping.
    fn leave(&self, pages: Range<u64>) {
        let page = sys::system_page_bytes();
        let (at, len) = (self.region.base() + pages.start * page, (pages.end - pages.start) * page);
        // SAFETY: as in `take`.
        if let Err(cause) = unsafe { sys::set_access(at, len, false) } {
            tracing::debug!(%cause, "give up mappings held back");
        }
    }

    /// Checks that the ballast is held. If it had been given up and there is room now, takes it up again.
    ///
    /// # Errors
    /// [`ErrorKind::TooManyMappings`] while there is no room.
    #[inline]
    pub(super) fn hold(&mut self, what: impl FnOnce() -> String) -> Result<()> {
        if self.held { Ok(()) } else { self.take_up(&what()) }
    }

    /// Room is counted, and not found by taking mappings until the kernel refuses one: for that moment nobody else in
    /// the process would get any. So room that has come back is used when the last count is not recent any more.
    fn take_up(&mut self, what: &str) -> Result<()> {
        let recent = self.counted.filter(|counted| Instant::now() < counted.until);
        self.counted = recent.or_else(Counted::now);
        let Some(Counted { count, .. }) = self.counted else {
            let message = format!("{what}: the kernel gave this process no more mappings, and {MAPS} cannot be read");
            return Err(
                Error::new(ErrorKind::TooManyMappings, message).remedy(format!("raise vm.max_map_count{ADVICE}"))
            );
        };
        if count.left() < BALLAST + SPARE {
            return Err(count.told(what, 2, ADVICE));
        }
        self.held = true;
        self.take(0..BALLAST).map_err(|cause| {
            self.give_up();
            Error::io("hold mappings back", cause)
        })
    }

    #[cfg(test)]
    pub(super) fn is_held(&self) -> bool {
        self.held
    }

    /// Gives the ballast's mappings to others that need them, and says how many there were.
    pub(super) fn give_up(&mut self) -> u64 {
        if !std::mem::take(&mut self.held) {
            return 0;
        }
        self.leave(0..BALLAST);
        BALLAST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The time for which a count is used began before counting and had passed when it ended, so each refusal counted
    /// anew.
    #[test]
    fn regression_refusals_give_the_same_count_however_long_it_takes() {
        let (count, began) = (Count { limit: 65_530, others: 30, ours: 0 }, Instant::now());
        for took in [Duration::ZERO, RECENT / 5, RECENT, 8 * RECENT] {
            let ended = began + took;
            let given = Counted::between(count, began, ended).until.saturating_duration_since(ended);
            assert!(given >= RECENT && given >= 4 * took, "counting takes {took:?}, and is done every {given:?}");
        }
    }
}
