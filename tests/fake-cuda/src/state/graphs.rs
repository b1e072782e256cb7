//! What is being captured, what was, and which calls captures forbid.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::thread::ThreadId;

use crate::clock::{Clock, TimelineId};
use crate::work::Work;

pub type CaptureId = u64;

#[derive(Default)]
pub struct Graphs {
    pub captures: HashMap<CaptureId, Capture>,
    pub graphs: HashMap<u64, Arc<Vec<Node>>>,
    pub executables: HashMap<u64, Executable>,
}

pub struct Capture {
    pub origin: u64,
    pub mode: u32,
    pub thread: ThreadId,
    pub nodes: Vec<Node>,
    /// For each captured stream: the nodes its next node comes after.
    pub after: Vec<Vec<usize>>,
    pub invalid: bool,
}

pub struct Node {
    pub branch: usize,
    pub work: Work,
    pub after: Vec<usize>,
}

pub struct Executable {
    pub graph: Arc<Vec<Node>>,
    pub branches: Vec<TimelineId>,
    /// Launches of one executable follow each other.
    pub last: Option<(TimelineId, u64, Clock)>,
}

/// What an event recorded in a capturing stream stands for.
#[derive(Clone)]
pub struct CapturedPoint {
    pub capture: CaptureId,
    pub after: Vec<usize>,
}

pub const MODE_GLOBAL: u32 = 0;
pub const MODE_THREAD_LOCAL: u32 = 1;
pub const MODE_RELAXED: u32 = 2;

thread_local! {
    /// How captures elsewhere limit what this thread may call.
    pub static MODE: Cell<u32> = const { Cell::new(MODE_GLOBAL) };
}

/// Calls that are "potentially unsafe" while a stream is captured: they wait, ask, or take and give memory. The
/// documentation names some of them; the others are taken to be meant.
const UNSAFE: &[&str] = &[
    "cuCtxSynchronize",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuMemAlloc_v2",
    "cuMemCreate",
    "cuMemFree_v2",
    "cuMemFreeHost",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
    "cuStreamQuery",
    "cuStreamSynchronize",
];

impl Graphs {
    /// Whether captures forbid this thread a call; they are spoiled by it.
    pub fn forbid(&mut self, name: &str) -> bool {
        let mode = MODE.get();
        if self.captures.is_empty() || mode == MODE_RELAXED || !UNSAFE.contains(&name) {
            return false;
        }
        let here = std::thread::current().id();
        let forbids = |capture: &&mut Capture| {
            (capture.thread == here && capture.mode != MODE_RELAXED)
                || (mode == MODE_GLOBAL && capture.thread != here && capture.mode == MODE_GLOBAL)
        };
        let mut forbidden = false;
        for capture in self.captures.values_mut().filter(forbids) {
            capture.invalid = true;
            forbidden = true;
        }
        forbidden
    }
}
