//! The latch, and how an engine is given up after a panic.
//!
//! A panic during a change leaves the engine half changed: moves that nobody starts, requests that nobody ends. So the
//! engine is not used again. Everyone who waits gets an error, and so does every later call. All memory that the kernel
//! or the device may still use stays where it is until the process ends.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};
use std::task::Waker;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::ticket::Ticket;
use super::{Latched, wake_all};
use crate::error::{Error, ErrorKind, Result};
use crate::pager::Granted;
use crate::sync::Alone;

/// The lock around the table, the policy and the waiters together.
#[derive(Debug)]
pub(super) struct Latch {
    state: Alone<Mutex<Guarded>>,
    /// The error of the first panic, for which the engine was given up.
    given_up: OnceLock<Error>,
}

#[derive(Debug)]
struct Guarded {
    latched: Latched,
    /// A panic happened under the latch, or while effects of a change were carried out.
    torn: bool,
}

/// The held latch, until it is [released](Self::release). If a panic drops it instead, nobody gets it again.
#[derive(Debug)]
pub(super) struct Held<'a> {
    guard: MutexGuard<'a, Guarded>,
    whole: bool,
}

impl Latch {
    pub(super) fn new(latched: Latched) -> Self {
        Self { state: Alone(Mutex::new(Guarded { latched, torn: false })), given_up: OnceLock::new() }
    }

    /// # Errors
    /// `Internal` once something has panicked under it.
    pub(super) fn hold(&self) -> Result<Held<'_>> {
        let guard = self.state.lock();
        if guard.torn {
            drop(guard);
            return Err(self.why());
        }
        Ok(Held { guard, whole: false })
    }

    /// # Errors
    /// `Internal` once the engine was given up.
    #[inline]
    pub(super) fn is_sound(&self) -> Result<()> {
        if self.given_up.get().is_none() { Ok(()) } else { Err(self.why()) }
    }

    #[cold]
    fn why(&self) -> Error {
        // `torn` is set a moment before `given_up` by a panic in another thread.
        self.given_up.get().cloned().unwrap_or_else(|| given_up("in another thread"))
    }

    /// Marks the latch so that nobody gets it again. Returns the error for all, and the tickets of those who wait.
    pub(super) fn give_up(&self, panic: &str) -> (Error, Vec<Arc<Ticket>>) {
        let error = self.given_up.get_or_init(|| given_up(panic)).clone();
        let mut guard = self.state.lock();
        guard.torn = true;
        (error, guard.latched.tickets.drain().map(|(_, ticket)| ticket).collect())
    }
}

fn given_up(panic: &str) -> Error {
    Error::new(ErrorKind::Internal, format!("the runtime was given up, because something in it panicked: {panic}"))
        .remedy("report this as a bug, and open another runtime; data that only this one had in memory is lost")
}

impl Held<'_> {
    pub(super) fn release(mut self) {
        self.whole = true;
    }

    /// Lets others have the latch first, if somebody waits for it.
    ///
    /// # Errors
    /// As [`Latch::hold`].
    pub(super) fn bump(&mut self, of: &Latch) -> Result<()> {
        MutexGuard::bump(&mut self.guard);
        if self.guard.torn { Err(of.why()) } else { Ok(()) }
    }

    /// Waits with the latch released. Returns whether the time has passed.
    ///
    /// # Errors
    /// As [`Latch::hold`].
    pub(super) fn wait_for(&mut self, idle: &Condvar, limit: Duration, of: &Latch) -> Result<bool> {
        let late = idle.wait_for(&mut self.guard, limit).timed_out();
        if self.guard.torn { Err(of.why()) } else { Ok(late) }
    }
}

impl Deref for Held<'_> {
    type Target = Latched;
    fn deref(&self) -> &Latched {
        &self.guard.latched
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut Latched {
        &mut self.guard.latched
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.guard.torn |= !self.whole;
    }
}

/// Results to deliver and wakers to wake once the latch is released; also delivered if something panics before that.
#[derive(Debug, Default)]
pub(super) struct News {
    pub(super) done: Vec<(Arc<Ticket>, Result<Granted>)>,
    pub(super) wakers: Vec<Waker>,
}

impl News {
    /// The same error for all of these tickets.
    pub(super) fn failed(tickets: impl IntoIterator<Item = Arc<Ticket>>, error: &Error) -> Self {
        Self { done: tickets.into_iter().map(|ticket| (ticket, Err(error.clone()))).collect(), wakers: Vec::new() }
    }

    /// Puts results into their tickets. Pollers are woken last.
    pub(super) fn tell(&mut self) {
        for (ticket, result) in self.done.drain(..) {
            self.wakers.extend(ticket.fulfil(result));
        }
    }
}

impl Drop for News {
    fn drop(&mut self) {
        self.tell();
        wake_all(std::mem::take(&mut self.wakers));
    }
}
