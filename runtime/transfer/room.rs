//! Room of the scratch file that is given back by a thread of its own.
//!
//! Where the last handle of a tensor goes on a thread of a store or a device, in a waker or in a closure on a stream, others
//! wait for what that thread has to report next, and to give room back takes long. One thread does it for all of them, one
//! tensor after the other. It is there as long as there is something to do, and closing the runtime waits for it.

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
    /// Of one more the room was given back, or the thread ends.
    gone: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Each gives its room back when it is dropped.
    waiting: VecDeque<Arc<SegmentIo>>,
    /// There is a thread, which will look at what is waiting once more before it ends.
    running: bool,
    /// The one started last.
    thread: Option<JoinHandle<()>>,
    /// Of how many the room was given back.
    done: u64,
}

impl RoomKeeper {
    /// Has what a segment had of the scratch file given back, soon. Nobody else may have any use for it.
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
                // The one before it, if there was any, has nothing left to do but to end.
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

    /// Waits until nothing is left to give back and the thread has ended, as long as it does one in each `limit`. Whether
    /// that is so.
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
        // Under the same hold of the lock as the last look: who comes later starts another one.
        state.running = false;
        self.gone.notify_all();
    }
}
