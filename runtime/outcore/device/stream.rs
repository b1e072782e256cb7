//! Streams of the host device: one thread each, which runs a queue in order.
//!
//! # Invariants
//!
//! 1. Items of one stream run in the order they were queued; `completed` counts them, so an event is a stream and a
//!    count, and nothing has to be freed.
//! 2. An event only names items that were queued before it, so streams that wait for each other cannot deadlock.
//! 3. The sink is called with no lock held.
//!
//! The queue has no limit of its own. Each copy in it holds a frame or a staging buffer that was reserved before, so
//! their number bounds it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::task::Poll;
use std::thread::{self, JoinHandle};

use parking_lot::{Condvar, Mutex};

use super::parts::{BATCH_OPERATIONS_MAX, report, run_call, unknown_event};
use super::{Completion, Completions, StreamOp, Token, sys};
use crate::error::{Error, ErrorKind, Result};
use crate::os::signals::without_signals;

/// Completions are reported after at most this many bytes: about as many as are copied in the time a waiter takes to
/// wake up. Or after [`BATCH_OPERATIONS_MAX`] operations.
const BATCH_BYTES_MAX: u64 = 256 << 10;

/// Runs the copies in a stream's queue. The stream runs closures itself.
pub trait Copier: Send + Sync + 'static {
    /// Runs a copy: an operation that is neither a closure nor a mark. Calls `before_wait` before it blocks for longer
    /// than the copy takes.
    ///
    /// # Errors
    /// The operation's.
    fn run(&self, op: StreamOp, before_wait: &mut dyn FnMut()) -> Result<()>;
}

enum Item {
    Op(StreamOp, Option<Token>),
    Wait(Arc<Timeline>, u64),
}

impl Item {
    fn bytes(&self) -> u64 {
        match self {
            Self::Op(StreamOp::CopyIn { len, .. } | StreamOp::CopyOut { len, .. } | StreamOp::Zero { len, .. }, _) => {
                *len
            }
            _ => 0,
        }
    }
}

#[derive(Default)]
struct State {
    queue: VecDeque<Item>,
    queued: u64,
    completed: u64,
    /// The first failure that was not reported by token, and the number of its item.
    failure: Option<(u64, Error)>,
    closing: bool,
}

/// The order of one stream; shared by its thread, its submitters and the streams that wait for it.
#[derive(Default)]
struct Timeline {
    state: Mutex<State>,
    work: Condvar,
    progress: Condvar,
}

impl Timeline {
    /// Queues `item` and returns its number, or gives it back when the stream is closing.
    fn push(&self, item: Item) -> Result<u64, Item> {
        let mut state = self.state.lock();
        if state.closing {
            return Err(item);
        }
        state.queue.push_back(item);
        state.queued += 1;
        let number = state.queued;
        drop(state);
        self.work.notify_one();
        Ok(number)
    }

    fn wait_for(&self, count: u64) {
        let mut state = self.state.lock();
        while state.completed < count {
            self.progress.wait(&mut state);
        }
    }
}

/// A stream and its thread.
pub(super) struct Stream {
    timeline: Arc<Timeline>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.timeline.state.lock();
        write!(f, "Stream({} of {} items ended)", state.completed, state.queued)
    }
}

impl Stream {
    pub(super) fn start(name: String, copier: Arc<dyn Copier>, sink: Arc<dyn Completions>) -> Result<Self> {
        let timeline = Arc::new(Timeline::default());
        let worker =
            Worker { timeline: Arc::clone(&timeline), copier, batch: Batch { sink, done: Vec::new(), bytes: 0 } };
        let thread = without_signals(|| thread::Builder::new().name(name.clone()).spawn(move || worker.run()))
            .map_err(|cause| {
                Error::io(format!("start stream thread {name}"), cause).remedy("raise the thread limit (ulimit -u)")
            })?;
        Ok(Self { timeline, thread: Mutex::new(Some(thread)) })
    }

    /// Queues `op` and returns its number, or gives its token back when the stream is closed.
    pub(super) fn submit(&self, op: StreamOp, token: Option<Token>) -> Result<u64, Option<Token>> {
        self.timeline.push(Item::Op(op, token)).map_err(|item| match item {
            Item::Op(_, token) => token,
            Item::Wait(..) => None,
        })
    }

    /// How many items were queued so far: an event.
    pub(super) fn record(&self) -> u64 {
        self.timeline.state.lock().queued
    }

    /// Makes items queued from now on wait until `count` items of `other` have ended. The error is `None` where the
    /// stream is closed.
    pub(super) fn wait(&self, other: &Self, count: u64) -> Result<(), Option<Error>> {
        if Arc::ptr_eq(&self.timeline, &other.timeline) {
            return Ok(());
        }
        if count > other.record() {
            return Err(Some(unknown_event()));
        }
        let item = Item::Wait(Arc::clone(&other.timeline), count);
        self.timeline.push(item).map(drop).map_err(|_| None)
    }

    /// Whether `count` items have ended; an error if that many were never queued.
    pub(super) fn poll(&self, count: u64) -> Result<Poll<()>> {
        let state = self.timeline.state.lock();
        if count > state.queued {
            return Err(unknown_event());
        }
        match &state.failure {
            Some((at, error)) if *at <= count => Err(error.clone()),
            _ if state.completed >= count => Ok(Poll::Ready(())),
            _ => Ok(Poll::Pending),
        }
    }

    /// Lets the queue run dry; later submissions are given back.
    pub(super) fn begin_close(&self) {
        self.timeline.state.lock().closing = true;
        self.timeline.work.notify_all();
    }

    /// Waits for the thread to end, after [`begin_close`](Self::begin_close), and returns the stream's failure.
    pub(super) fn join(&self) -> Result<()> {
        let thread = self.thread.lock().take();
        // A closure on the stream may hold the device's last owner; its thread cannot wait for itself.
        let foreign = thread.filter(|t| t.thread().id() != thread::current().id());
        if foreign.is_some_and(|t| t.join().is_err()) {
            return Err(Error::new(ErrorKind::Internal, "a stream thread panicked").remedy("report this as a bug"));
        }
        match &self.timeline.state.lock().failure {
            Some((_, error)) => Err(error.clone()),
            None => Ok(()),
        }
    }
}

struct Batch {
    sink: Arc<dyn Completions>,
    done: Vec<Completion>,
    bytes: u64,
}

impl Batch {
    fn report(&mut self) {
        self.bytes = 0;
        report(&*self.sink, &mut self.done);
    }
}

struct Worker {
    timeline: Arc<Timeline>,
    copier: Arc<dyn Copier>,
    batch: Batch,
}

impl Worker {
    fn run(mut self) {
        sys::exact_timers();
        while let Some(item) = self.next() {
            self.batch.bytes += item.bytes();
            let (token, result) = match item {
                Item::Wait(timeline, count) => {
                    self.batch.report();
                    timeline.wait_for(count);
                    (None, Ok(()))
                }
                Item::Op(StreamOp::Call(call), token) => {
                    self.batch.report();
                    (token, run_call(call))
                }
                Item::Op(StreamOp::Mark, token) => (token, Ok(())),
                Item::Op(op, token) => (token, self.copier.run(op, &mut || self.batch.report())),
            };
            self.ended(token, result);
        }
    }

    /// The next item, or `None` when the stream is closing and its queue is empty. Reports before it blocks.
    fn next(&mut self) -> Option<Item> {
        loop {
            let mut state = self.timeline.state.lock();
            if let Some(item) = state.queue.pop_front() {
                return Some(item);
            }
            if self.batch.done.is_empty() {
                if state.closing {
                    return None;
                }
                self.timeline.work.wait(&mut state);
            } else {
                drop(state);
                self.batch.report();
            }
        }
    }

    fn ended(&mut self, token: Option<Token>, result: Result<()>) {
        let untold = match token {
            Some(token) => {
                self.batch.done.push(Completion { token, result });
                None
            }
            None => result.err(),
        };
        let mut state = self.timeline.state.lock();
        state.completed += 1;
        if let (Some(error), None) = (untold, &state.failure) {
            state.failure = Some((state.completed, error));
        }
        drop(state);
        self.timeline.progress.notify_all();
        if self.batch.done.len() >= BATCH_OPERATIONS_MAX || self.batch.bytes >= BATCH_BYTES_MAX {
            self.batch.report();
        }
    }
}
