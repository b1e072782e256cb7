//! Waits for bytes: how long they take, and whether anybody still wants what comes after.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

#[derive(Debug, Default)]
pub(crate) struct Waits {
    nanos: AtomicU64,
    /// Raised when passes are given up.
    pub cancelled: Arc<AtomicBool>,
}

impl Waits {
    /// Counts the time of a wait. An error if the pass was given up meanwhile: a wait may be long, and no other may
    /// follow.
    pub fn wait_for<G>(&self, wait: impl FnOnce() -> outcore::Result<G>) -> Result<G> {
        let since = Instant::now();
        let guard = wait()?;
        self.nanos.fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.check_cancelled()?;
        Ok(guard)
    }

    /// An error if the pass is given up.
    pub fn check_cancelled(&self) -> Result<()> {
        if self.cancelled.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// How long they took in all.
    pub fn took(&self) -> Duration {
        Duration::from_nanos(self.nanos.load(Ordering::Relaxed))
    }
}
