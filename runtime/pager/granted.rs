//! What becomes of a request: what it is granted, and what it waited for.

use serde::Serialize;

use crate::ids::{FillPoint, RequestId};

/// Why a request had to wait. If several causes apply, the first one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitCause {
    /// It did not wait.
    #[default]
    None,
    /// A page had to come from disk.
    Disk,
    /// A page had to come from the host tier.
    Host,
    /// A page had to be filled with zero bytes.
    Zero,
    /// A prefetch of the page was under way, but had not ended.
    LatePrefetch,
    /// Every frame was pinned or in motion.
    Frames,
    /// A victim had to be written back, or copied down, first.
    WriteBack,
    /// A writer held the page, or readers that a writer must wait for.
    Guard,
}

impl WaitCause {
    /// All causes but [`None`](Self::None).
    pub const ALL: [Self; 7] =
        [Self::Disk, Self::Host, Self::Zero, Self::LatePrefetch, Self::Frames, Self::WriteBack, Self::Guard];

    /// The cause in words.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Disk => "disk fault",
            Self::Host => "host fault",
            Self::Zero => "zero fill",
            Self::LatePrefetch => "late prefetch",
            Self::Frames => "no free frame",
            Self::WriteBack => "write back of a victim",
            Self::Guard => "held by another guard",
        }
    }
}

/// What a request was granted: pins of all its pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Granted {
    /// What it waited for.
    pub cause: WaitCause,
    /// When the bytes of lent pages are there; `None` if no page was lent. Only for [requests for a
    /// stream](crate::Purpose::ReadOnStream).
    pub after: Option<FillPoint>,
    /// Frames that the request has spent of its scope's purse. Given back with
    /// [`Pager::unspent`](crate::Pager::unspent) when the pins have ended.
    pub spent: u32,
}

/// How a request was received.
#[derive(Debug)]
pub enum Submitted {
    /// Every page is pinned. The bytes of lent pages are there only [after](Granted::after) a point.
    Ready(Granted),
    /// [`Effects::done`](crate::Effects::done) will name this request.
    Waiting(RequestId),
}
