//! What the pager counts.

use serde::Serialize;

use super::policy::WalkerPlace;
use crate::ids::{Bytes, WalkerId};

/// What the pager has counted since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PagerStats {
    /// Pages used: one count for each page of each pin.
    pub uses: u64,
    /// Uses that found the page resident since an earlier use.
    pub hits: u64,
    /// Uses that found the page filled ahead and ready.
    pub prefetched: u64,
    /// Uses that found the page being filled.
    pub late: u64,
    /// Uses that found the page absent.
    pub faults: u64,
    /// Fills from disk.
    pub fills_disk: u64,
    /// Fills from the host tier.
    pub fills_host: u64,
    /// Fills with zero bytes.
    pub fills_zero: u64,
    /// Pages that left the device tier.
    pub evictions: u64,
    /// Pages copied from the device tier to the host tier.
    pub demotions: u64,
    /// Dirty pages written to disk.
    pub write_backs: u64,
    /// Pages whose bytes were lost after repeated failures.
    pub poisoned: u64,
    /// Failed fills that were tried once more, because requests had come to wait for them after their moves had
    /// started.
    pub retried: u64,
    /// Requests that ended with [`Busy`](crate::ErrorKind::Busy): their scopes hold guards, and others hold what they
    /// ask for.
    pub busy: u64,
    /// Pins that took the latch although every page was resident: somebody waited for these pages or for frames, a
    /// writer or a move had one of the pages, or the scope itself had waiting requests. Not counted: the first use of a
    /// page that was filled ahead. That one takes the latch after it has pinned, to begin the next fill.
    pub latched_hits: u64,
}

impl std::ops::AddAssign for PagerStats {
    fn add_assign(&mut self, more: Self) {
        let Self {
            uses,
            hits,
            prefetched,
            late,
            faults,
            fills_disk,
            fills_host,
            fills_zero,
            evictions,
            demotions,
            write_backs,
            poisoned,
            retried,
            busy,
            latched_hits,
        } = more;
        self.uses += uses;
        self.hits += hits;
        self.prefetched += prefetched;
        self.late += late;
        self.faults += faults;
        self.fills_disk += fills_disk;
        self.fills_host += fills_host;
        self.fills_zero += fills_zero;
        self.evictions += evictions;
        self.demotions += demotions;
        self.write_backs += write_backs;
        self.poisoned += poisoned;
        self.retried += retried;
        self.busy += busy;
        self.latched_hits += latched_hits;
    }
}

/// One pass in progress: what it has used, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WalkerStats {
    /// The walker.
    pub id: WalkerId,
    /// Pages it has used: one count for each page of each pin.
    pub uses: u64,
    /// Those uses that found the page resident since an earlier use, by this walker or another. Each spared one read.
    pub hits: u64,
    /// Where it is in each order that it follows. Empty if it follows none, or if the policy follows none.
    pub places: Vec<WalkerPlace>,
}

/// A walker's counts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Walked {
    pub(super) uses: u64,
    pub(super) hits: u64,
}

/// Frames of a tier, now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FrameStats {
    /// Frames that pages occupy.
    pub used: u64,
    /// Frames of the budget that no page occupies.
    pub free: u64,
    /// Free frames without memory: no page has used them yet, or not since their memory was given back. On the host
    /// device, frames smaller than a huge page get memory together with their neighbours. Such neighbours may still be
    /// counted here.
    pub bare: u64,
    /// Bytes of used frames that hold nothing: a segment's last page may be short, and its frame is whole.
    pub tails: Bytes,
}

/// Bytes of used frames behind the ends of short last pages, by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tails {
    pub(super) device: u64,
    pub(super) host: u64,
}
