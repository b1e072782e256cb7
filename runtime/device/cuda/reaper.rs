//! The reaper: a thread that learns of every stream what has ended, and reports it.
//!
//! # Why it asks
//!
//! Completions must come without delay from whichever stream is first, and must come when the device is lost. A thread
//! that sleeps inside the driver hears of one event only, so that would take a thread for each stream; and the functions
//! that the driver calls behind work are not called any more once the device is lost. So one thread asks, of the first
//! event of every stream on which anything is: again and again for a moment, then after naps. A nap is a fraction of what
//! the work has taken so far, so that its end is seen late by no more than that fraction, and long kernels cost little.
//! What ends in one nap is reported together. While nothing is submitted the thread is parked.
//!
//! # Invariants
//!
//! 1. A stream with items is in the inbox or watched, once: `watched` of its state says so. It is set with the stream
//!    locked, which is when the stream goes to the inbox, and cleared by the reaper when it finds no item.
//! 2. The thread ends when the device is closed and no stream has items: then none gets any more.
//! 3. The sink is called with no lock held and no context entered.
//!
//! # Failure
//!
//! What the driver will not say is waited for: until the event has happened or, where there is none, until everything on
//! the stream has ended. Where that fails too the device is lost, and what was on the stream ends with the first cause.

use std::mem;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::super::stream::{BATCH_OPERATIONS_MAX, report};
use super::super::{Completion, sys};
use super::Core;
use super::driver::EventHandle;
use super::stream::{First, Stream};
use crate::error::{Error, ErrorKind, Result};

/// How long it asks without a nap after anything has ended or begun: about what a nap costs.
const RESTLESS: Duration = Duration::from_micros(3);
/// Work that has taken so much for so long is asked about after a nap of one part in `NAP_PARTS` of that ...
const NAP_PARTS: u32 = 8;
/// ... but of no less: about a quarter of what the copy of a page of 2 MiB takes;
const NAP_MIN: Duration = Duration::from_micros(10);
/// ... and of no more: less than what a kernel of 10 ms may end late.
const NAP_MAX: Duration = Duration::from_micros(500);

#[derive(Default)]
struct State {
    /// Streams that are to be watched.
    inbox: Vec<Arc<Stream>>,
    closing: bool,
}

#[derive(Default)]
pub(super) struct Reaper {
    state: Mutex<State>,
    work: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Reaper {
    pub(super) fn start(core: &Arc<Core>) -> Result<()> {
        let worker = Worker { watched: Vec::new(), done: Vec::new(), core: Arc::clone(core) };
        let thread = thread::Builder::new().name("cuda-reap".into()).spawn(move || worker.run()).map_err(|cause| {
            Error::io("start the thread that reports what a GPU has done", cause)
                .remedy("raise the thread limit (ulimit -u)")
        })?;
        *core.reaper.thread.lock() = Some(thread);
        Ok(())
    }

    /// Takes in a stream that has its first item, and is locked. [`wake`](Self::wake) follows when it is not any more.
    pub(super) fn watch(&self, stream: Arc<Stream>) {
        self.state.lock().inbox.push(stream);
    }

    pub(super) fn wake(&self) {
        self.work.notify_one();
    }

    /// What is on the streams is still reported. They take no more by now.
    pub(super) fn begin_close(&self) {
        self.state.lock().closing = true;
        self.work.notify_one();
    }

    /// Waits for the thread to end, after [`begin_close`](Self::begin_close).
    pub(super) fn join(&self) -> Result<()> {
        let thread = self.thread.lock().take();
        // A receiver of completions may hold the device's last owner; the thread cannot wait for itself, and ends soon.
        let foreign = thread.filter(|thread| thread.thread().id() != thread::current().id());
        if foreign.is_some_and(|thread| thread.join().is_err()) {
            return Err(Error::new(ErrorKind::Internal, "the thread that reports what a GPU has done panicked"));
        }
        Ok(())
    }
}

/// A stream with items.
struct Watched {
    stream: Arc<Stream>,
    /// When the first item came to be the first.
    since: Instant,
}

struct Worker {
    /// Before the core, which if it is the last owner's gives back the streams that nobody holds.
    watched: Vec<Watched>,
    done: Vec<Completion>,
    core: Arc<Core>,
}

impl Worker {
    fn run(mut self) {
        sys::exact_timers();
        while self.rest() {
            self.ask();
            report(&self.core.sink, &mut self.done);
        }
        let streams = self.core.streams.read().all.clone();
        for stream in streams {
            stream.end(&self.core);
        }
    }

    /// Until there may be something to learn; `false` when there never will.
    fn rest(&mut self) -> bool {
        let newest = self.watched.iter().map(|watched| watched.since).max();
        let mut state = self.core.reaper.state.lock();
        if state.inbox.is_empty()
            && let Some(newest) = newest
        {
            let taken = newest.elapsed();
            if taken < RESTLESS {
                drop(state);
                std::hint::spin_loop();
                return true;
            }
            // Who has nothing new to say does not wake it.
            self.core.reaper.work.wait_for(&mut state, (taken / NAP_PARTS).clamp(NAP_MIN, NAP_MAX));
        }
        while state.inbox.is_empty() && newest.is_none() {
            if state.closing {
                return false;
            }
            self.core.reaper.work.wait(&mut state);
        }
        let inbox = mem::take(&mut state.inbox);
        drop(state);
        if !inbox.is_empty() {
            let since = Instant::now();
            self.watched.extend(inbox.into_iter().map(|stream| Watched { stream, since }));
        }
        true
    }

    /// Takes out what has ended, of every stream.
    fn ask(&mut self) {
        let Self { watched, done, core } = self;
        // Entered once for all.
        let mut current = None;
        watched.retain_mut(|watched| {
            let stream = &watched.stream;
            let most = done.len() + BATCH_OPERATIONS_MAX;
            while done.len() < most {
                match stream.first() {
                    First::Nothing => return false,
                    First::Unqueued => {}
                    First::Event(event) => {
                        let current = current.get_or_insert_with(|| core.context.enter());
                        let asked = match current {
                            Ok(current) => core.context.happened(current, &event),
                            Err(failure) => Err(failure.clone()),
                        };
                        match asked {
                            Ok(true) => {}
                            Ok(false) => return true,
                            Err(failure) => {
                                tracing::debug!(error = %failure.error);
                                wait_for(core, stream, &event);
                            }
                        }
                    }
                    First::Unmarked => {
                        if let Err(error) = stream.finish(core) {
                            core.poison(error);
                        }
                    }
                }
                stream.retire(core, done);
                watched.since = Instant::now();
            }
            true
        });
    }
}

/// Waits for an event that cannot be asked about. If that is not possible either the device is lost.
fn wait_for(core: &Core, stream: &Stream, event: &EventHandle) {
    let outcome = match core.context.enter() {
        Ok(current) => core.context.finish_event(&current, event),
        Err(failure) => Err(failure),
    };
    if let Err(failure) = outcome {
        // The context may be lost, or only this call have failed. Before memory is given back, make sure that nothing
        // uses it any more, as far as the driver still answers.
        core.poison(failure.error);
        let _ = stream.finish(core);
    }
}
