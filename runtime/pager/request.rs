//! Requests: what each says of itself (what it is for, whose it is, how urgent), and where it stands.

use super::granted::WaitCause;
use super::line::{Source, Turn};
use super::runs::PageRun;
use crate::ids::{PageId, ScopeId, WalkerId};

/// The use that pins are wanted for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// To read.
    #[default]
    Read,
    /// To read and write. Nobody else has the pages meanwhile.
    Write,
    /// To be read by work on a stream. The stream waits for pages that are not there yet, so pages may be *lent*: see
    /// [`Pager::taken`](crate::Pager::taken).
    ReadOnStream,
}

/// The terms of a request: all but its pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// What the pins are for.
    pub purpose: Purpose,
    /// The scope it belongs to. Without one, the request is a scope of its own.
    pub scope: Option<ScopeId>,
    /// The walker that uses the pages.
    pub walker: WalkerId,
    /// The priority of a request without a scope.
    pub priority: ScopePriority,
    /// Whether the request cannot be refused. Such a request has no scope, and may use the
    /// [floor](crate::Pager::set_floor). It gets `BudgetTooSmall` only for more pages than there are frames.
    pub never_refused: bool,
}

impl From<Purpose> for Terms {
    fn from(purpose: Purpose) -> Self {
        Self { purpose, ..Self::default() }
    }
}

/// Which scopes and pins are served first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ScopePriority {
    /// Somebody waits for an answer.
    #[default]
    Interactive,
    /// Nobody waits for an answer. Served when no interactive scope waits, or after 16 interactive requests have
    /// passed it.
    Batch,
}

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
    /// In the lines of these pages, each with the line's count when it joined. The first page is in its way.
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
