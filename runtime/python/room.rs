//! How many pages threads have pinned.

use std::collections::HashMap;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;

/// How long a wait goes on before Python may handle signals.
const STEP: Duration = Duration::from_millis(100);

/// Room for pages that are announced. What is given is never more than there is, however many of the pages are in
/// memory already, so that the frames for touches stay free: a thread that touches what it did not announce is served,
/// whatever others hold.
///
/// A thread that holds some of it never waits for more, so those that hold nothing and wait get theirs.
#[derive(Debug)]
pub struct Room {
    pages: u64,
    taken: Mutex<Taken>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Taken {
    pages: u64,
    /// By how many parts each thread holds.
    holders: HashMap<ThreadId, u32>,
}

/// Some of the room.
#[derive(Debug)]
pub struct Part {
    pages: u64,
    holder: ThreadId,
}

impl Room {
    pub fn new(pages: u64) -> Self {
        Self { pages, taken: Mutex::default(), changed: Condvar::new() }
    }

    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Takes room for so many pages; each counts as often as it is announced. Waits for it with the GIL released.
    /// `None` if there is less at all, or now, while this thread holds some.
    ///
    /// # Errors
    /// What a handler of a signal raises.
    pub fn take(&self, py: Python<'_>, pages: u64) -> PyResult<Option<Part>> {
        if pages > self.pages {
            return Ok(None);
        }
        let holder = thread::current().id();
        if let Some(result) = self.take_now(pages, holder) {
            return Ok(result);
        }
        loop {
            if let Some(result) = py.detach(|| self.take_within(STEP, pages, holder)) {
                return Ok(result);
            }
            py.check_signals()?;
        }
    }

    /// What [`take`](Self::take) gives; `None` if it would wait longer.
    fn take_within(&self, limit: Duration, pages: u64, holder: ThreadId) -> Option<Option<Part>> {
        let until = Instant::now() + limit;
        let mut taken = self.taken.lock();
        loop {
            if let Some(result) = self.take_of(&mut taken, pages, holder) {
                return Some(result);
            }
            if self.changed.wait_until(&mut taken, until).timed_out() {
                return None;
            }
        }
    }

    /// What [`take`](Self::take) gives; `None` if it would wait.
    fn take_now(&self, pages: u64, holder: ThreadId) -> Option<Option<Part>> {
        self.take_of(&mut self.taken.lock(), pages, holder)
    }

    fn take_of(&self, taken: &mut Taken, pages: u64, holder: ThreadId) -> Option<Option<Part>> {
        if taken.pages + pages > self.pages {
            return taken.holders.contains_key(&holder).then_some(None);
        }
        taken.pages += pages;
        *taken.holders.entry(holder).or_default() += 1;
        Some(Some(Part { pages, holder }))
    }

    /// Gives some back. Any thread may do that.
    pub fn give_back(&self, part: Part) {
        let mut taken = self.taken.lock();
        taken.pages -= part.pages;
        if let Some(parts) = taken.holders.get_mut(&part.holder) {
            *parts -= 1;
            if *parts == 0 {
                taken.holders.remove(&part.holder);
            }
        }
        drop(taken);
        self.changed.notify_all();
    }
}
