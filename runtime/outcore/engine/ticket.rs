//! What a caller holds while its request waits: a place for the result, and a waker.

use std::task::{Poll, Waker};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::error::Result;
use crate::pager::Granted;

/// Filled once by the engine, taken once by the caller, from any thread or executor.
#[derive(Debug)]
pub(crate) struct Ticket {
    since: Instant,
    state: Mutex<State>,
    ready: Condvar,
}

#[derive(Debug, Default)]
struct State {
    result: Option<Result<Granted>>,
    waker: Option<Waker>,
}

impl Default for Ticket {
    fn default() -> Self {
        Self { since: Instant::now(), state: Mutex::default(), ready: Condvar::new() }
    }
}

impl Ticket {
    /// When the request began to wait.
    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// Puts the result in. Returns the waker of a poller, which the caller has yet to wake.
    pub(super) fn fulfil(&self, result: Result<Granted>) -> Option<Waker> {
        let mut state = self.state.lock();
        state.result = Some(result);
        let waker = state.waker.take();
        drop(state);
        self.ready.notify_all();
        waker
    }

    /// Blocks until the result is there; `None` once `deadline` has passed without one.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> Option<Result<Granted>> {
        let mut state = self.state.lock();
        loop {
            if let Some(result) = state.result.take() {
                return Some(result);
            }
            match deadline {
                None => self.ready.wait(&mut state),
                Some(deadline) => {
                    if self.ready.wait_until(&mut state, deadline).timed_out() {
                        return state.result.take();
                    }
                }
            }
        }
    }

    pub(crate) fn poll(&self, waker: &Waker) -> Poll<Result<Granted>> {
        // Cloning or dropping a waker runs code of the caller's, which must not happen under the lock.
        let waker = waker.clone();
        let mut state = self.state.lock();
        if let Some(result) = state.result.take() {
            return Poll::Ready(result);
        }
        let replaced = state.waker.replace(waker);
        drop(state);
        drop(replaced);
        Poll::Pending
    }
}
