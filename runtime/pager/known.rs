//! What the search for deadlocks knows of a scope that waits. The scope keeps it; `deadlock.rs` fills and reads it.

use std::collections::{BTreeSet, HashMap};

use super::runs::{PageRun, pages_of};
use crate::ids::{PageId, RequestId};

/// What the search knows of a scope that waits.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// The rank of a member: see `deadlock.rs`.
    pub(super) rank: Option<i64>,
    /// The pages it holds.
    pub(super) held: HashMap<PageId, Times>,
    /// The frames it claims.
    pub(super) claim: u32,
    /// What a member's requests ask for.
    pub(super) asks: HashMap<RequestId, Asks>,
    /// Waiting requests that are not in `asks` yet.
    pub(super) unasked: BTreeSet<RequestId>,
}

/// How often a scope holds a page, and how often exclusively.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    pub(super) all: u32,
    pub(super) exclusive: u32,
}

#[derive(Clone, Debug)]
pub(super) struct Asks {
    pub(super) runs: Vec<PageRun>,
    pub(super) writes: bool,
    pub(super) reserves: u32,
}

impl Asks {
    pub(super) fn pages(&self) -> impl Iterator<Item = PageId> {
        self.runs.iter().flat_map(|run| run.pages())
    }

    /// The most frames it may want.
    pub(super) fn most(&self) -> u64 {
        pages_of(&self.runs) + u64::from(self.reserves)
    }
}

impl Known {
    pub(super) fn begins_to_wait(&mut self, request: RequestId) {
        self.unasked.insert(request);
    }

    pub(super) fn is_nothing(&self) -> bool {
        self.rank.is_none() && self.held.is_empty() && self.asks.is_empty() && self.unasked.is_empty()
    }

    /// How many edges to pages it has: one for each page held, and one for each page asked for.
    pub(super) fn size(&self) -> u64 {
        self.held.len() as u64 + self.asks.values().map(|asks| pages_of(&asks.runs)).sum::<u64>()
    }
}
