//! What can be put on a stream, described by the addresses that the program gave.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::abi::HostFn;
use crate::launch::Launch;
use crate::reach::Reach;

/// What the work does.
#[derive(Clone)]
pub enum Action {
    /// An event's place in the stream.
    Mark,
    /// The same, noting the time.
    Stamp(Arc<OnceLock<Instant>>),
    /// `staged` owns the sources that were taken over at the call.
    Copies {
        copies: Vec<Copy>,
        staged: Arc<[Vec<u8>]>,
    },
    /// Repeats a pattern over a range.
    Fill {
        address: u64,
        count: u64,
        pattern: u32,
        width: u8,
    },
    Launch(Arc<Launch>),
    HostFunction {
        function: HostFn,
        argument: usize,
    },
    /// Gives a physical allocation back (the end of an asynchronous free).
    Release(u64),
}

#[derive(Clone, std::marker::Copy, Debug)]
pub struct Copy {
    pub to: u64,
    pub from: u64,
    pub len: u64,
}

#[derive(Clone)]
pub struct Work {
    /// The call, or the kernel's name.
    pub what: Arc<str>,
    pub reach: Vec<Reach>,
    pub action: Action,
    /// Bytes that must not be in use elsewhere, beyond what `reach` says: a stream-ordered allocation or its end.
    pub whole: Option<u64>,
}

impl Work {
    pub fn new(what: &str, reach: Vec<Reach>, action: Action) -> Self {
        Self { what: what.into(), reach, action, whole: None }
    }
    /// Whether only memory and time would show that it did not run.
    pub fn is_quiet(&self) -> bool {
        matches!(self.action, Action::Mark | Action::Copies { .. } | Action::Fill { .. } | Action::Launch(_))
    }
    pub fn mark(what: &str) -> Self {
        Self::new(what, Vec::new(), Action::Mark)
    }
}
