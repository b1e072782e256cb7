//! Reads that callers carry out themselves. A caller that would wait anyway saves two hand-overs between threads.
//!
//! Each read goes through a ring of its own, not through `pread`: a caller can leave a ring, but not a system call that
//! a dying drive does not answer. A thread is then started to go on with the read. It keeps the operation, and so the
//! buffer, for as long as the kernel may write there.
//!
//! Only files read with direct I/O are read this way, because through the page cache the submission itself may wait.
//! Files on remote file systems (NFS, FUSE) are not: the kernel gives their reads to workers, and lets a thread that
//! has left a read end only after that read.

use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::device::Completion;
use crate::error::Result;
use crate::store::backend::operation::Active;
use crate::store::backend::own_ring::{Answer, OwnRing};
use crate::store::backend::queue::Lane;
use crate::store::backend::shared::{Driver, Ended, Shared, closed, report_late};

/// How long a caller stays with its read. After that it waits and is told of a timeout as other callers are.
const PATIENCE: Duration = Duration::from_secs(1);

/// A read that is under way, with its ring.
struct Running {
    active: Active,
    ring: OwnRing,
    /// Whether the kernel has a call of this read.
    issued: bool,
}

impl Running {
    /// Goes on until the read has ended, or until `until`: then `None`.
    fn go_on(&mut self, shared: &Shared, until: Option<Instant>) -> Option<Result<()>> {
        if let Err(error) = self.active.open(shared.hook.as_deref()) {
            return Some(Err(error));
        }
        loop {
            let answer = if self.issued {
                self.ring.wait(until)
            } else if let Some(injected) = self.active.consult(shared.hook.as_deref()) {
                Answer::Came(injected)
            } else {
                self.ring.issue(&self.active);
                self.issued = true;
                continue;
            };
            let Answer::Came(answer) = answer else { return None };
            self.issued = false;
            if let Some(outcome) = self.active.advance(answer) {
                return Some(outcome);
            }
            if answer == -libc::EAGAIN {
                thread::yield_now();
            }
        }
    }
}

/// A demand read that its submitter carries out. [`run`](Self::run) reports its completion on the caller's stack. If it
/// is dropped instead, the store's threads carry it out.
#[must_use = "the read is handed to the store's threads when this is dropped"]
pub struct OwnRead {
    /// `None` once it has ended, or has been left.
    running: Option<Running>,
    shared: Arc<Shared>,
    driver: Arc<dyn Driver>,
}

impl OwnRead {
    /// A read that the queue has let start. `None` if there is no ring for it: then the store's threads have it.
    pub(crate) fn new(active: Active, shared: Arc<Shared>, driver: Arc<dyn Driver>) -> Option<Self> {
        let idle = shared.own_rings.as_ref().map(|rings| rings.0.lock().pop());
        let Some(ring) = idle.and_then(|idle| idle.or_else(OwnRing::new)) else {
            hand_over(active, &shared, &*driver);
            return None;
        };
        Some(Self { running: Some(Running { active, ring, issued: false }), shared, driver })
    }

    /// Carries out the read and reports it. If the disk takes long, leaves the rest to another thread.
    pub fn run(mut self) {
        let Some(mut running) = self.running.take() else { return };
        match running.go_on(&self.shared, Some(Instant::now() + PATIENCE)) {
            Some(outcome) => self.end(running, outcome),
            None => self.leave(running),
        }
    }

    fn end(&self, running: Running, outcome: Result<()>) {
        let Running { active, ring, .. } = running;
        let shared = &*self.shared;
        if let Some(rings) = &shared.own_rings {
            rings.0.lock().push(ring);
        }
        let me = thread::current().id();
        let mut done = Vec::with_capacity(1);
        shared.conclude(&mut vec![Ended { active, outcome }], &mut done);
        shared.state.lock().serving.push(me);
        shared.deliver(&mut done);
        let mut state = shared.state.lock();
        if let Some(at) = state.serving.iter().position(|serving| *serving == me) {
            state.serving.swap_remove(at);
        }
        state.queue.finished(Lane::Callers);
        let more = state.queue.has_startable(Instant::now());
        let closing = state.closing;
        drop(state);
        if more {
            self.driver.wake();
        }
        if closing {
            shared.left.notify_all();
        }
    }

    /// Starts a thread that waits for the kernel instead of the caller.
    #[cold]
    fn leave(&self, running: Running) {
        // Kept here too, in case no thread can be started: the kernel may still write to the buffer.
        let left = Arc::new(Mutex::new(Some(running)));
        let taken = Arc::clone(&left);
        let late = Self { running: None, shared: Arc::clone(&self.shared), driver: Arc::clone(&self.driver) };
        let serve = move || {
            if let Some(mut running) = taken.lock().take()
                && let Some(outcome) = running.go_on(&late.shared, None)
            {
                late.end(running, outcome);
            }
        };
        let Err(cause) = self.shared.spawn("outcore-io-late".into(), serve) else { return };
        tracing::warn!(%cause, "no thread for a read that takes long: its caller waits until it ends");
        if let Some(mut running) = left.lock().take()
            && let Some(outcome) = running.go_on(&self.shared, None)
        {
            self.end(running, outcome);
        }
    }
}

impl Drop for OwnRead {
    fn drop(&mut self) {
        let Some(Running { active, ring, .. }) = self.running.take() else { return };
        if let Some(rings) = &self.shared.own_rings {
            rings.0.lock().push(ring);
        }
        hand_over(active, &self.shared, &*self.driver);
    }
}

/// Gives a read that a caller was allowed to start to the store's threads. If they have gone, it ends with `Closed`.
fn hand_over(active: Active, shared: &Shared, driver: &dyn Driver) {
    let (token, bytes) = (active.op.token, active.op.len);
    let mut state = shared.state.lock();
    if state.stopped {
        state.queue.finished(Lane::Callers);
        drop(state);
        report_late(&shared.sink, vec![Completion { token, result: Err(closed()) }]);
    } else {
        state.queue.give_back(token, bytes, active, Instant::now());
        drop(state);
        driver.wake();
    }
    shared.left.notify_all();
}

impl fmt::Debug for OwnRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnRead")
            .field("active", &self.running.as_ref().map(|running| &running.active))
            .finish_non_exhaustive()
    }
}
