//! A move: what it copies, from where to where, and how urgently.

use crate::ids::{FrameId, HostFrameId, MoveId, PageId, StagingId};

/// How urgent a move is. The smallest goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Somebody waits for the page.
    Demand,
    /// A write back that somebody waits for.
    WriteBack,
    /// The plan will want the page.
    Prefetch,
    /// Somebody may want the page.
    Speculation,
    /// Nobody waits.
    Background,
}

/// One end of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The page's own bytes on disk: its place in the model file, or its slot in the scratch file.
    Disk,
    /// Nowhere: the page was never written and reads as zero bytes.
    Zero,
    /// A device frame.
    Device(FrameId),
    /// A host frame.
    Host(HostFrameId),
}

/// One planned copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Its id, given back at completion.
    pub id: MoveId,
    /// The page whose bytes move.
    pub page: PageId,
    /// Where the bytes are.
    pub from: Place,
    /// Where the bytes go.
    pub to: Place,
    /// The staging buffer that the bytes pass through, where disk and device cannot exchange bytes directly.
    pub staging: Option<StagingId>,
    /// Urgency at the start; may be raised later.
    pub priority: Priority,
}
