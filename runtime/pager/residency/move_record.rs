//! What residency keeps of a move that has not ended.

use crate::ids::{PageId, StagingId};
use crate::page_move::{Place, Priority};

/// A move in flight, or waiting for its staging buffer.
#[derive(Debug)]
pub(super) struct MoveRecord {
    pub(super) page: PageId,
    pub(super) from: Place,
    pub(super) to: Place,
    pub(super) priority: Priority,
    pub(super) staging: Option<StagingId>,
    pub(super) started: bool,
    pub(super) serial: u32,
}
