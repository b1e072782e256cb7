//! What a stream is: its settings, and the timeline whose queue a thread runs.

use std::collections::VecDeque;

use crate::abi::Outcome;
use crate::clock::{Clock, TimelineId};
use crate::state::graphs::CaptureId;

/// Work, as a stream's thread runs it.
pub type Run = Box<dyn FnOnce() -> Outcome + Send>;

/// A sequence of numbered operations: a stream, a branch of a launched graph, or the host.
pub struct Timeline {
    pub label: String,
    /// The context of a stream, which may be destroyed while its work goes on; 0 for what is not a stream.
    pub context: u64,
    pub submitted: u64,
    pub completed: u64,
    /// Tasks that have not ended, without those of a graph's nodes: what counts against the depth of a queue.
    pub pending: u64,
    pub queue: VecDeque<Task>,
    /// The clock of the last operation submitted.
    pub tail: Clock,
    pub held: bool,
    pub closing: bool,
    pub has_worker: bool,
}

/// What a stream's thread does next.
pub struct Task {
    pub number: u64,
    pub what: What,
    /// The operation of a graph's branch that this is.
    pub branch: Option<(TimelineId, u64)>,
}

pub enum What {
    Nothing,
    WaitFor(TimelineId, u64),
    Run(Run),
}

impl Timeline {
    pub fn new(label: String, context: u64) -> Self {
        Self {
            label,
            context,
            submitted: 0,
            completed: 0,
            pending: 0,
            queue: VecDeque::new(),
            tail: Clock::default(),
            held: false,
            closing: false,
            has_worker: false,
        }
    }
    /// Drops what is queued; nothing of it will run.
    pub fn abandon(&mut self) {
        self.queue.clear();
        self.completed = self.submitted;
        self.pending = 0;
    }
}

pub struct Stream {
    pub timeline: TimelineId,
    pub context: u64,
    /// Synchronises implicitly with the legacy default stream.
    pub blocking: bool,
    pub flags: u32,
    pub priority: i32,
    pub capture: Option<(CaptureId, usize)>,
    /// A default stream: not the program's to destroy.
    pub default: bool,
}

pub const PRIORITY_GREATEST: i32 = -5;

/// A priority as the driver keeps it: silently clamped into the range.
pub fn clamp_priority(priority: i32) -> i32 {
    priority.clamp(PRIORITY_GREATEST, 0)
}
