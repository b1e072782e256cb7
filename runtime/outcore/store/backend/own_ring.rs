//! Rings with at most one operation, for reads that callers carry out themselves (`own_read.rs`).

use std::thread;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};
use parking_lot::Mutex;

use crate::os::descriptors::making;
use crate::store::backend::operation::Active;

/// Pause before trying again after the kernel has refused a submission.
const BACK_OFF: Duration = Duration::from_millis(1);

/// A ring with at most one operation. Any thread may enter it, one at a time.
pub(crate) struct OwnRing(Box<IoUring>);

/// The result of waiting.
pub(crate) enum Answer {
    /// A byte count, or a negated `errno`.
    Came(i32),
    /// Nothing yet. The kernel has the operation, or the ring still holds it.
    None,
}

impl OwnRing {
    /// `None` if the kernel gives no ring that can be left: it is too old, or it has no memory, or the process has no
    /// descriptor.
    pub(crate) fn new() -> Option<Self> {
        // The thread that waits in the ring is the one its completions are for: no interrupt has to tell it.
        let set_up = || IoUring::builder().setup_coop_taskrun().build(2).or_else(|_| IoUring::new(2));
        let ring = making(set_up).ok()?;
        ring.params().is_feature_ext_arg().then(|| Self(Box::new(ring)))
    }

    /// Hands the next call of an operation to the kernel.
    pub(crate) fn issue(&mut self, active: &Active) {
        let rest = active.remainder();
        let fd = types::Fd(active.fd());
        let entry = opcode::Read::new(fd, rest.buffer.as_ptr(), rest.len).offset(rest.offset).build();
        // SAFETY: the entry names memory that the operation's submitter keeps valid until completion (rule 3 of the
        // store contract). `own::Running` keeps operation and ring together until the answer has come, also when its
        // caller leaves.
        let pushed = unsafe { self.0.submission().push(&entry) };
        invariant!(pushed.is_ok(), "a ring with room for two has more than one operation");
    }

    /// Waits for the answer until `until`, or without a limit.
    pub(crate) fn wait(&mut self, until: Option<Instant>) -> Answer {
        loop {
            if let Some(answer) = self.0.completion().next() {
                return Answer::Came(answer.result());
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Answer::None;
            }
            let entered = match left.map(types::Timespec::from) {
                Some(left) => self.0.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&left)),
                None => self.0.submit_and_wait(1),
            };
            match entered.map_err(|cause| cause.raw_os_error()) {
                Ok(_) | Err(Some(libc::EINTR | libc::ETIME)) => {}
                // The kernel takes nothing just now. The submission is still queued.
                Err(errno) => {
                    tracing::debug!(errno, "io_uring takes no read of a caller just now; trying again");
                    thread::sleep(BACK_OFF);
                }
            }
        }
    }
}

/// Rings that no caller uses now. There are as many rings as callers have read at once.
#[derive(Default)]
pub(crate) struct OwnRings(pub(crate) Mutex<Vec<OwnRing>>);
