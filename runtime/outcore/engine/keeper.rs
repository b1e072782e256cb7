//! The keeper: a thread for the runtime's periodic work.
//!
//! - When a thread's ring of recorded hits fills, the keeper passes the hits to the pager, so that the thread need not.
//! - Once a second it offers the system again the memory of a smaller budget that the system has not yet taken back.
//! - Once a second, while requests wait, it looks for reads and writes that take longer than the runtime's limit, and
//!   ends the requests that wait for them. Memory that the kernel still uses stays in the in-flight table.
//! - It logs, once for each time that requests make no progress, which of them wait for what.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::chunks::move_of;
use super::waiting::Waiting;
use super::{Engine, Inside, Marked, Stage, log};
use crate::device::Token;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{MoveId, RequestId};
use crate::os::signals::without_signals;
use crate::pager::{Place, WaitsFor};

/// How often it does its periodic work.
const TICK: Duration = Duration::from_secs(1);
/// A request that has waited this long for others' pins is named in the statistics.
const NOTED: Duration = TICK;
/// A request that has waited this long is warned of in the log.
const LONG: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct Keeper {
    thread: OnceLock<Thread>,
    handle: Mutex<Option<JoinHandle<()>>>,
    stopped: AtomicBool,
}

impl Keeper {
    /// Starts the thread. Without it, threads that pin drain their own rings, and slow reads and long waits go
    /// unnoticed.
    pub(super) fn start(engine: &Arc<Engine>) {
        let weak = Arc::downgrade(engine);
        match without_signals(|| thread::Builder::new().name("outcore-keeper".into()).spawn(move || run(&weak))) {
            Ok(handle) => {
                let _ = engine.keeper.thread.set(handle.thread().clone());
                *engine.keeper.handle.lock() = Some(handle);
            }
            Err(cause) => tracing::warn!(%cause, "no thread for the runtime's keeper: slow reads are not noticed"),
        }
    }

    /// Wakes the thread to pass recorded uses to the pager soon.
    pub(super) fn hurry(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Ends the thread, and waits for it unless it is the caller.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.hurry();
        let handle = self.handle.lock().take();
        if let Some(handle) = handle.filter(|handle| handle.thread().id() != thread::current().id())
            && handle.join().is_err()
        {
            tracing::error!("the runtime's keeper panicked");
        }
    }
}

fn run(engine: &Weak<Engine>) {
    let mut told = false;
    let mut next = Instant::now() + TICK;
    let mut more = false;
    loop {
        if !more {
            thread::park_timeout(next.saturating_duration_since(Instant::now()));
        }
        let Some(engine) = engine.upgrade() else { return };
        if engine.keeper.stopped.load(Ordering::Acquire) {
            return;
        }
        let _marked = Marked::begin(Inside::Waker);
        let kept = engine.contain(|| {
            more = engine.record_until(next)?;
            if Instant::now() >= next {
                next = Instant::now() + TICK;
                engine.log.mark_all();
                engine.change(|pager, fx| pager.discard_again(fx))?;
                engine.end_overdue()?;
                told = engine.tell_of_long_waits(told)?;
            }
            Ok(())
        });
        // An engine that was given up needs no keeper.
        if kept.is_err() {
            return;
        }
    }
}

impl Engine {
    /// Passes recorded uses to the pager, at most until `next`. Returns whether there are more.
    fn record_until(&self, next: Instant) -> Result<bool> {
        let mut latched = self.latch.hold()?;
        let mut more = latched.pager.record_some(&self.log);
        // Uses may be recorded faster than they are passed on.
        while more && Instant::now() < next && !self.keeper.stopped.load(Ordering::Acquire) {
            latched.bump(&self.latch)?;
            more = latched.pager.record_some(&self.log);
        }
        latched.release();
        Ok(more)
    }

    /// Ends requests that wait for overdue reads and writes.
    fn end_overdue(&self) -> Result<()> {
        let Some(limit) = self.io_timeout else { return Ok(()) };
        let now = Instant::now();
        let old = |since: Instant| now.saturating_duration_since(since) >= limit;
        let mut late: Vec<super::Move> = {
            let in_flight = self.in_flight.lock();
            let of_the_store = |entry: &&super::InFlight| matches!(entry.stage, Stage::Reading | Stage::Writing);
            in_flight
                .values()
                .filter(of_the_store)
                .filter(|entry| old(entry.since))
                .map(|entry| entry.planned)
                .collect()
        };
        if late.is_empty() {
            return Ok(());
        }
        let tokens: Vec<Token> = late.iter().flat_map(|planned| self.tokens_of(planned.id)).collect();
        let ids: HashSet<MoveId> = self.store.late(&tokens, limit).into_iter().map(move_of).collect();
        late.retain(|planned| ids.contains(&planned.id));
        late.sort_unstable_by_key(|planned| planned.id);
        let waiting: Vec<RequestId> = self.hold(|latched| {
            latched.tickets.iter().filter(|(_, ticket)| old(ticket.since())).map(|(id, _)| *id).collect()
        })?;
        if late.is_empty() || waiting.is_empty() {
            return Ok(());
        }
        let errors: Vec<(MoveId, Error)> = late
            .iter()
            .map(|planned| {
                let what = if planned.to == Place::Disk { "write" } else { "read" };
                let message =
                    format!("{what} {}: no answer for {} s", self.describe(planned.page), limit.as_secs_f64());
                let error = Error::new(ErrorKind::TimedOut, message)
                    .remedy("check the drive or the network file system, or wait longer (RuntimeBuilder::io_timeout)");
                (planned.id, error)
            })
            .collect();
        self.change(|pager, fx| pager.overdue(&errors, &waiting, fx))
    }

    /// Notes requests that have waited long for what others hold, and warns of them once, until no request waits so
    /// long. Returns whether one does.
    fn tell_of_long_waits(&self, told: bool) -> Result<bool> {
        let now = Instant::now();
        let waited = |ticket: &super::Ticket| now.saturating_duration_since(ticket.since());
        // Finding the holders looks at every page, and requests that wait for moves need no report.
        let noted = self.hold(|latched| {
            let mut long = latched.tickets.iter().filter(|(_, ticket)| waited(ticket) >= NOTED);
            long.any(|(id, _)| latched.pager.waits_for_others(*id))
        })?;
        let mut waiting = if noted { self.waiting() } else { Waiting::default() };
        let told_of = waiting.waiters.len();
        waiting.waiters.retain(|waiter| waiter.waits_for != WaitsFor::Moves && waiter.waited >= NOTED);
        waiting.total -= told_of - waiting.waiters.len();
        let is_long = waiting.waiters.iter().any(|waiter| waiter.waited >= LONG);
        let text = if waiting.waiters.is_empty() { String::new() } else { waiting.to_string() };
        if is_long && !told {
            let long = LONG.as_secs();
            log(|| tracing::warn!("requests have waited for more than {long} s for what others hold:\n{text}"));
        }
        *self.long_waits.lock() = text.into();
        Ok(is_long)
    }
}
