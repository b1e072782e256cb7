//! The terms of a request: what it is for, whose it is, how urgent it is.

use crate::ids::{ScopeId, WalkerId};

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
    /// The scope it belongs to. Without one it is outside of scopes, and is taken to hold nothing.
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
