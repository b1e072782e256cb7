//! What an event is: a place on a timeline.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::clock::{Clock, TimelineId};
use crate::state::graphs::CapturedPoint;

pub struct Event {
    pub context: u64,
    pub timed: bool,
    pub point: Point,
    pub serial: u64,
}

/// What was last recorded. Waiting takes a copy: a later record changes nothing for who already waits.
#[derive(Clone)]
pub enum Point {
    /// Never recorded: complete, and waiting for it is no wait.
    Nothing,
    Stream {
        timeline: TimelineId,
        number: u64,
        clock: Clock,
        time: Arc<OnceLock<Instant>>,
    },
    Captured(CapturedPoint),
}
