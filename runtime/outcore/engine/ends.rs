//! Waiting for the ends of moves, without a request.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// The ends of moves of pages that are in durable folders.
#[derive(Debug, Default)]
pub(super) struct Ends {
    /// How many have come while somebody looked out for them.
    count: Mutex<u64>,
    changed: Condvar,
    /// How many look out. It saves the ends of all other moves the lock.
    watchers: AtomicU32,
    given_up: AtomicBool,
}

/// Looks out for ends from when it was made.
#[derive(Debug)]
pub(super) struct Watch<'a> {
    ends: &'a Ends,
    seen: u64,
}

impl Ends {
    /// Whether somebody looks out.
    pub(super) fn are_watched(&self) -> bool {
        self.watchers.load(Ordering::SeqCst) > 0
    }

    /// A move has ended and the pager knows.
    pub(super) fn news(&self) {
        if self.are_watched() {
            *self.count.lock() += 1;
            self.changed.notify_all();
        }
    }

    /// No more will end.
    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::SeqCst);
        self.news();
    }

    /// Whether no more will end.
    pub(super) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::SeqCst)
    }

    pub(super) fn watch(&self) -> Watch<'_> {
        self.watchers.fetch_add(1, Ordering::SeqCst);
        Watch { ends: self, seen: *self.count.lock() }
    }
}

impl Watch<'_> {
    /// Waits for an end since the last call, or since this was made. False if none comes before `deadline`.
    pub(super) fn wait(&mut self, deadline: Option<Instant>) -> bool {
        let mut count = self.ends.count.lock();
        while *count == self.seen {
            match deadline {
                None => self.ends.changed.wait(&mut count),
                Some(deadline) if self.ends.changed.wait_until(&mut count, deadline).timed_out() => break,
                Some(_) => {}
            }
        }
        let came = *count != self.seen;
        self.seen = *count;
        came
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.ends.watchers.fetch_sub(1, Ordering::SeqCst);
    }
}
