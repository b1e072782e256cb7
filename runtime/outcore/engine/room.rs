//! A thread that gives back room of the scratch file.
//!
//! Giving room back takes long. If the last handle of a tensor is dropped on a thread of a store or a device, in a
//! waker or in a closure on a stream, others wait for what that thread has to report next. So one thread does it for
//! all of them, one tensor after the other. It runs only while there is something to give back, and closing the runtime
//! waits for it.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::SegmentIo;

#[derive(Debug, Default)]
pub(super) struct RoomKeeper(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Signalled when the room of one more segment was given back, and when the thread ends.
    gone: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Segments whose room is to be given back, which each does when it is dropped.
    waiting: VecDeque<Arc<SegmentIo>>,
    /// A thread is running, and will look at `waiting` once more before it ends.
    running: bool,
    /// The thread that was started last.
    thread: Option<JoinHandle<()>>,
    /// How many segments' room was given back.
    done: u64,
}

impl RoomKeeper {
    /// Has the scratch room of a segment given back soon. Nobody else may use the segment.
    pub(super) fn give_back(&self, io: Arc<SegmentIo>) {
        let mut state = self.0.state.lock();
        state.waiting.push_back(io);
        if state.running {
            return;
        }
        let shared = self.0.clone();
        match thread::Builder::new().name("outcore-room".into()).spawn(move || shared.run()) {
            Ok(thread) => {
                state.running = true;
                // An earlier thread has nothing left to do but end.
                state.thread = Some(thread);
            }
            Err(cause) => {
                tracing::debug!(%cause, "no thread to give room of the scratch file back: done on this one");
                let waiting = mem::take(&mut state.waiting);
                drop(state);
                drop(waiting);
            }
        }
    }

    /// Waits until nothing is left to give back and the thread has ended. Returns false if no segment is finished
    /// within a `limit`.
    pub(super) fn drain(&self, limit: Duration) -> bool {
        let mut state = self.0.state.lock();
        while state.running {
            let done = state.done;
            let late = self.0.gone.wait_for(&mut state, limit).timed_out();
            if late && state.running && state.done == done {
                return false;
            }
        }
        let thread = state.thread.take();
        drop(state);
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that gives room of the scratch file back panicked");
        }
        true
    }
}

impl Shared {
    fn run(&self) {
        let mut state = self.state.lock();
        while let Some(io) = state.waiting.pop_front() {
            MutexGuard::unlocked(&mut state, || drop(io));
            state.done += 1;
            self.gone.notify_all();
        }
        // Under the same hold of the lock as the last look: a later caller starts another thread.
        state.running = false;
        self.gone.notify_all();
    }
}
