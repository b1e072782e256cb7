//! A request: what it asks for, and where it stands.

use super::line::{Source, Turn};
use crate::granted::WaitCause;
use crate::ids::PageId;
use crate::runs::PageRun;
use crate::terms::{Purpose, Terms};

/// How far a request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Holds nothing, and stands in lines.
    Queued,
    /// Holds pins or locks of some pages, and waits for the fills of the others.
    Filling,
    /// Waits until the device tier fits the budget.
    Shrinking,
}

/// Where a request stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stand {
    Nowhere,
    /// In the line for frames. `joined` is the line's count when it joined.
    Frames {
        source: Source,
        joined: u64,
    },
    /// In the lines of these pages, each with the line's count when it joined. One of them was in its way.
    Pages(Vec<(PageId, u64)>),
}

/// A live request.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) runs: Vec<PageRun>,
    pub(super) terms: Terms,
    /// Frames to set aside for its scope, if it is a request for a purse; otherwise 0.
    pub(super) frames: u32,
    pub(super) turn: Turn,
    pub(super) stage: Stage,
    pub(super) stand: Stand,
    /// How often it was passed in lines that it has left.
    pub(super) passed: u32,
    /// How many fills it waits for.
    pub(super) remaining: u32,
    /// How many of these fills the device has not taken up.
    pub(super) untaken: u32,
    /// Frames that it has spent of its scope's purse.
    pub(super) spent: u32,
    /// Pages claimed for it of those its scope was opened for. 0 once its scope holds them.
    pub(super) claimed: u32,
    pub(super) cause: WaitCause,
    pub(super) serial: u32,
}

impl Request {
    pub(super) fn pages(&self) -> impl Iterator<Item = PageId> + use<> {
        self.runs.clone().into_iter().flat_map(PageRun::pages)
    }

    pub(super) fn writes(&self) -> bool {
        self.terms.purpose == Purpose::Write
    }
}
