//! How many pages threads have pinned.

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use outcore::{PinSet, Result};
use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;

use crate::error::OrRaise;
use crate::holder::Holder;

/// How long a wait goes on before Python may handle signals, and before it is seen that a thread has ended.
const STEP: Duration = Duration::from_millis(100);

/// Room for pages that are announced. What is given is never more than there is, however many of the pages are in
/// memory already, so that the frames for touches stay free: a thread that touches what it did not announce is served,
/// whatever others hold.
///
/// A thread that holds some of it, or of another model's, or pins of a runtime, never waits for more. What a thread
/// has when it ends is taken back by whoever finds no room. So those that hold nothing and wait get theirs.
#[derive(Debug)]
pub struct Room {
    pages: u64,
    taken: Mutex<Taken>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Taken {
    pages: u64,
    parts: HashMap<u64, Given>,
    /// The number of the next part.
    next: u64,
}

/// What a part is, until it is given back.
#[derive(Debug)]
struct Given {
    pages: u64,
    by: Arc<Holder>,
    /// Of the pages for which the room is, once they are there.
    pins: Option<PinSet>,
}

/// Some of the room, by its number.
#[derive(Debug)]
pub struct Part(u64);

impl Room {
    pub fn new(pages: u64) -> Self {
        Self { pages, taken: Mutex::default(), changed: Condvar::new() }
    }

    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Takes room for so many pages; each counts as often as it is announced. Waits for it with the GIL released.
    /// `None` if there is less at all, or now, while this thread holds something.
    ///
    /// # Errors
    /// What a handler of a signal raises, and that of `usable`, which is asked while it waits.
    pub fn take(
        &self,
        py: Python<'_>,
        pages: u64,
        by: &Arc<Holder>,
        usable: impl Fn() -> Result<()>,
    ) -> PyResult<Option<Part>> {
        if pages > self.pages {
            return Ok(None);
        }
        if let Some(part) = self.take_of(&mut self.taken.lock(), pages, by) {
            return Ok(Some(part));
        }
        loop {
            // What ended threads had goes first: also one that never waits gets room of that.
            if let Some(result) = py.detach(|| self.take_within(STEP, pages, by)) {
                return Ok(result);
            }
            py.check_signals()?;
            usable().or_raise()?;
        }
    }

    /// What [`take`](Self::take) gives; `None` if it would wait longer.
    fn take_within(&self, limit: Duration, pages: u64, by: &Arc<Holder>) -> Option<Option<Part>> {
        self.take_back();
        let until = Instant::now() + limit;
        let mut taken = self.taken.lock();
        loop {
            if let Some(part) = self.take_of(&mut taken, pages, by) {
                return Some(Some(part));
            }
            if by.holds() {
                return Some(None);
            }
            if self.changed.wait_until(&mut taken, until).timed_out() {
                return None;
            }
        }
    }

    /// `None` if there is less now.
    fn take_of(&self, taken: &mut Taken, pages: u64, by: &Arc<Holder>) -> Option<Part> {
        if taken.pages + pages > self.pages {
            return None;
        }
        taken.pages += pages;
        let number = taken.next;
        taken.next += 1;
        by.took_part();
        taken.parts.insert(number, Given { pages, by: by.clone(), pins: None });
        Some(Part(number))
    }

    /// Keeps the pins of a part's pages until it is given back.
    pub fn keep(&self, part: &Part, pins: PinSet) {
        if let Some(given) = self.taken.lock().parts.get_mut(&part.0) {
            given.pins = Some(pins);
        }
    }

    /// Whether a part was neither given back nor taken back.
    pub fn has(&self, part: &Part) -> bool {
        self.taken.lock().parts.contains_key(&part.0)
    }

    /// Ends the pins of a part, and gives it back. Any thread may do that. What was taken back already is no more.
    pub fn give_back(&self, part: Part) {
        let given = self.taken.lock().parts.remove(&part.0);
        self.end(given);
    }

    /// Takes back what threads have that have ended.
    fn take_back(&self) {
        let mut taken = self.taken.lock();
        let ended = taken.parts.iter().filter(|(_, given)| given.by.has_ended());
        let numbers: Vec<u64> = ended.map(|(number, _)| *number).collect();
        let given: Vec<Given> = numbers.iter().filter_map(|number| taken.parts.remove(number)).collect();
        drop(taken);
        self.end(given);
    }

    /// Unpins outside of the lock, and before anybody else gets the room.
    fn end(&self, given: impl IntoIterator<Item = Given>) {
        let mut pages = 0;
        for Given { pages: of_part, by, pins } in given {
            drop(pins);
            by.gave_part_back();
            pages += of_part;
        }
        if pages > 0 {
            self.taken.lock().pages -= pages;
            self.changed.notify_all();
        }
    }

    /// In a child by `fork` nothing is to be unpinned, and locks may be held for ever.
    pub fn forget(&mut self) {
        mem::forget(mem::take(self.taken.get_mut()));
    }
}
