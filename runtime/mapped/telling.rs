//! Tells the program why a page could not be had.
//!
//! What the program says or logs may wait for a thread that waits for a page: for the lock of a pipe in which a write
//! of a mapped page sleeps, or for room in a pipe that the same thread reads. So the thread of faults has a thread of
//! its own tell, and waits for that for [`PATIENCE`] only: a signal may end the process, and then the reason should
//! have been told.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use outcore::os::signals::without_signals;
use outcore::{Error, Result};

/// How long a signal waits for its reason to be told.
const PATIENCE: Duration = Duration::from_millis(100);
/// So many reasons may wait to be told. What comes beyond that is told by nobody.
const MOST: usize = 64;

/// Tells one reason.
pub type Tell = Box<dyn FnOnce() + Send>;

/// See the [module's documentation](self). Its thread ends with it, when what it tells has been told.
pub struct Teller {
    to_thread: mpsc::SyncSender<(Tell, Option<mpsc::Sender<()>>)>,
    /// Whether the thread had not told a reason in time, and has told none since.
    is_stuck: Arc<AtomicBool>,
}

impl Teller {
    /// # Errors
    /// `Io` without a thread.
    pub fn start() -> Result<Self> {
        let (to_thread, reasons) = mpsc::sync_channel::<(Tell, Option<mpsc::Sender<()>>)>(MOST);
        let is_stuck = Arc::new(AtomicBool::new(false));
        let seen = is_stuck.clone();
        let serve = move || {
            while let Ok((tell, done)) = reasons.recv() {
                // What panics there is the program's, and ends nothing here.
                drop(catch_unwind(AssertUnwindSafe(tell)));
                seen.store(false, Ordering::Release);
                if let Some(done) = done {
                    // Nobody may wait any more.
                    let _ = done.send(());
                }
            }
        };
        without_signals(|| thread::Builder::new().name("outcore-failures".into()).spawn(serve)).map_err(|cause| {
            Error::io("start a thread that tells of failures", cause).remedy("raise the thread limit (ulimit -u)")
        })?;
        Ok(Self { to_thread, is_stuck })
    }

    /// Has a reason told, and waits for nothing.
    pub fn tell_later(&self, tell: Tell) {
        let _ = self.to_thread.try_send((tell, None));
    }

    /// Has a reason told, and waits until it was, but not for long.
    pub fn tell(&self, tell: Tell) {
        let (done, told) = mpsc::channel();
        let was_stuck = self.is_stuck.load(Ordering::Acquire);
        if self.to_thread.try_send((tell, Some(done))).is_ok()
            && !was_stuck
            && told.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout)
        {
            self.is_stuck.store(true, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;

    #[test]
    fn a_reason_that_cannot_be_told_now_holds_nobody_up() {
        let teller = Teller::start().unwrap();
        let (go_on, wait) = mpsc::channel::<()>();
        let (told, all) = mpsc::channel();
        let telling = |what: u32| {
            let told = told.clone();
            Box::new(move || told.send(what).unwrap())
        };
        teller.tell(telling(0));
        assert_eq!(all.try_recv(), Ok(0), "this one was waited for");
        teller.tell(Box::new(move || wait.recv().unwrap()));
        assert!(teller.is_stuck.load(Ordering::Acquire));
        // More than are kept: those are told by nobody.
        (1..200).for_each(|what| teller.tell(telling(what)));
        assert!(all.try_recv().is_err());
        go_on.send(()).unwrap();
        let seen: Vec<u32> = (0..MOST).map(|_| all.recv().unwrap()).collect();
        assert_eq!(seen, (1..=MOST as u32).collect::<Vec<_>>());
        teller.tell(Box::new(|| panic!("on purpose")));
        teller.tell(telling(1000));
        assert_eq!(all.recv(), Ok(1000));
    }
}
