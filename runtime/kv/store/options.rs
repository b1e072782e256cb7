//! What a store is told when it is opened.

use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use outcore::Bytes;

use super::codec::StoreKey;

const DAY_SECONDS: u64 = 24 * 60 * 60;

/// Which blocks are written to disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Admission {
    /// Each at once.
    Always,
    /// Those that are put for the second time, and those that are parked. Most prefixes come once, and would wear the
    /// disk for nothing.
    #[default]
    SecondTime,
}

/// Tells the time. A store asks it which day it is, for the write budget.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> SystemTime + Send + Sync>);

impl Clock {
    /// By this function.
    pub fn new(now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// Days since 1970.
    pub(super) fn day(&self) -> u64 {
        (self.0)().duration_since(UNIX_EPOCH).map_or(0, |passed| passed.as_secs() / DAY_SECONDS)
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock(..)")
    }
}

/// What a store is told when it is opened.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    pub(super) capacity: u64,
    pub(super) file_bytes: Option<u64>,
    pub(super) coalesce: usize,
    pub(super) write_budget: u64,
    pub(super) compress: bool,
    pub(super) admit: Admission,
    pub(super) key: Option<StoreKey>,
    pub(super) clock: Clock,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            capacity: 64 << 30,
            file_bytes: None,
            coalesce: 2 << 20,
            write_budget: u64::MAX,
            compress: false,
            admit: Admission::default(),
            key: None,
            clock: Clock::new(SystemTime::now),
        }
    }
}

impl StoreOptions {
    /// 64 GiB on disk, no limit of writes, blocks written when they are put for the second time, neither compressed nor
    /// encrypted.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes that all block files may have together. The oldest blocks go first. It must hold two block files.
    #[must_use]
    pub fn capacity(mut self, bytes: Bytes) -> Self {
        self.capacity = bytes.get();
        self
    }

    /// Bytes after which a new block file is begun. Unless set, a 64th of the capacity, between 64 MiB and 4 GiB.
    #[must_use]
    pub fn file_bytes(mut self, bytes: Bytes) -> Self {
        self.file_bytes = Some(bytes.get());
        self
    }

    /// Bytes of a write. Less than the 2 MiB that it has is for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn coalesce(mut self, bytes: Bytes) -> Self {
        self.coalesce = bytes.get() as usize;
        self
    }

    /// Bytes that may be written a day, by UTC. Blocks that are put beyond it are not kept. What has been written today
    /// is remembered over a restart.
    #[must_use]
    pub fn write_budget(mut self, bytes_a_day: Bytes) -> Self {
        self.write_budget = bytes_a_day.get();
        self
    }

    /// Whether blocks are compressed by zstd, without loss; not unless set. A block that does not get smaller is kept
    /// as it is. The size of a compressed block tells a little of its bytes, even if it is encrypted. A build without
    /// the feature `compression` refuses to open a store with this set.
    #[must_use]
    pub fn compress(mut self, compress: bool) -> Self {
        self.compress = compress;
        self
    }

    /// Which blocks are written.
    #[must_use]
    pub fn admit(mut self, admit: Admission) -> Self {
        self.admit = admit;
        self
    }

    /// Encrypts blocks, their tokens and whose they are, by XChaCha20-Poly1305. A build without the feature
    /// `encryption` refuses to open a store with a key.
    #[must_use]
    pub fn key(mut self, key: StoreKey) -> Self {
        self.key = Some(key);
        self
    }

    /// Another clock than the system's.
    #[must_use]
    pub fn clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }

    pub(super) fn bytes_of_a_file(&self) -> u64 {
        self.file_bytes.unwrap_or_else(|| (self.capacity / 64).clamp(64 << 20, 4 << 30))
    }
}
