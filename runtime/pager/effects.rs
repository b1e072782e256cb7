//! What a step of the pager has its caller do.

use super::granted::Granted;
use super::page_move::{Move, Priority};
use crate::error::Result;
use crate::ids::{FrameId, MoveId, RequestId, SegmentId};

/// What the pager wants done, in the order of the fields, after the latch is released (except `protect`).
#[derive(Debug, Default)]
pub struct Effects {
    /// Frames whose bytes must no longer be reachable. Done before the latch is released.
    pub protect: Vec<FrameId>,
    /// Moves to start. Each is answered by [`Pager::complete`](crate::Pager::complete).
    pub moves: Vec<Move>,
    /// Moves already started that have become more urgent.
    pub raised: Vec<(MoveId, Priority)>,
    /// Frames whose memory goes back to the system. Each is answered by
    /// [`Pager::discarded`](crate::Pager::discarded) or [`Pager::discard_refused`](crate::Pager::discard_refused).
    pub discard: Vec<FrameId>,
    /// Requests that ended.
    pub done: Vec<(RequestId, Result<Granted>)>,
    /// Segments that nothing refers to any more and that have nothing in flight.
    pub released: Vec<SegmentId>,
}

impl Effects {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.protect.is_empty()
            && self.moves.is_empty()
            && self.raised.is_empty()
            && self.discard.is_empty()
            && self.done.is_empty()
            && self.released.is_empty()
    }
}
