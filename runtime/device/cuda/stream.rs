//! Streams: what was submitted in which order, and how it ended. The [reaper](super::reaper) learns when.
//!
//! # Invariants
//!
//! 1. Submissions of one stream are numbered under its lock and handed to the driver in that order, so an event is a
//!    stream and a number. The driver's event for it exists until everything up to the number has ended.
//! 2. An item leaves the queue, and what it names is given back, only after the driver has said that it ended, or has
//!    said of the event and of the whole stream that they failed. Then closures that have not run never will:
//!    [`Job::end`] takes them, and waits for one that is running.
//! 3. Events are recorded, destroyed and reused by whoever holds the lock, or by the reaper, which alone takes items out.
//!
//! # Captures
//!
//! A stream whose handle others have may be captured into a graph at any moment, by any thread. What is put on it then does
//! not run, now or ever as far as can be told, and would run with each launch of the graph. So under the stream's lock the
//! driver is asked first, and what would be captured is refused. A capture that begins between the two is not excluded: then
//! the driver calls its host functions with numbers of jobs that are gone, which is harmless, and will not say when the event
//! happens; so the event is given up, and the item ends when all that has run on the stream has ended. Of copies, whose
//! memory is then still borrowed by the graph, it is for the caller not to begin a capture while they are submitted.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::super::stream::{call_caught, unknown_event};
use super::super::{Completion, DeviceAddress, HostPointer, RawStream, StreamOp, Token};
use super::Core;
use super::driver::{BatchedCopy, Current, EventHandle, Failure, Locked, Outcome, StreamHandle};
use super::frames::Range;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::Bytes;

/// How many copies go to the driver together. Their completions come together, so the first waits for the last.
pub(super) const COPIES_AT_ONCE: usize = 4;

/// Of the buffer through which copies of unlocked memory go: enough that its host functions cost little beside the copies.
pub(super) const BOUNCE_BYTES: usize = 1 << 20;

const LEFT_TO_THE_DRIVER: &str =
    "copies of unlocked host memory are left to the driver: submitting them may take as long as the copy";

/// What a host function does.
enum Work {
    Call(Box<dyn FnOnce() + Send>),
    Copy { from: HostPointer, to: HostPointer, len: usize },
}

enum JobState {
    Waiting(Work),
    Ended(Result<()>),
}

/// What the driver was given and has not run, by the number that it was given. No pointer, because host functions that were
/// captured into a graph are called with each launch, when what they were to do is long gone.
static JOBS: Mutex<BTreeMap<usize, Arc<Job>>> = Mutex::new(BTreeMap::new());

/// Something a stream runs on a thread of the driver.
struct Job {
    /// Among [`JOBS`].
    number: usize,
    /// The lock is held while it runs.
    state: Mutex<JobState>,
}

impl Job {
    fn new(work: Work) -> Arc<Self> {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let job = Arc::new(Self { number, state: Mutex::new(JobState::Waiting(work)) });
        JOBS.lock().insert(number, Arc::clone(&job));
        job
    }

    fn run(&self) {
        let mut state = self.state.lock();
        // A job that was ended first, because the device was taken for lost, stays ended.
        let ended = JobState::Ended(Ok(()));
        *state = JobState::Ended(match std::mem::replace(&mut *state, ended) {
            JobState::Waiting(Work::Call(call)) => call_caught(call),
            JobState::Waiting(Work::Copy { from, to, len }) => {
                // SAFETY: one side is the stream's own buffer, which the stream's order keeps from other use; the other
                // is borrowed until the operation is reported, which waits for this lock (invariant 2).
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), len) };
                Ok(())
            }
            JobState::Ended(result) => result,
        });
    }

    /// The result so far; `None` while it has not ended.
    fn result(&self) -> Option<Result<()>> {
        match &*self.state.try_lock()? {
            JobState::Waiting(_) => None,
            JobState::Ended(result) => Some(result.clone()),
        }
    }

    /// The result; what has not run will not.
    fn end(&self) -> Result<()> {
        JOBS.lock().remove(&self.number);
        let mut state = self.state.lock();
        if let JobState::Waiting(_) = &*state {
            let error = Error::new(
                ErrorKind::Device,
                "a closure on a stream was not run: the device failed, or the stream was captured",
            );
            *state = JobState::Ended(Err(error.remedy("put it there again, and begin no capture meanwhile")));
        }
        match &*state {
            JobState::Ended(result) => result.clone(),
            JobState::Waiting(_) => Ok(()),
        }
    }
}

/// What the driver calls, with the number of a job.
extern "C" fn run_job(argument: *mut c_void) {
    let job = JOBS.lock().remove(&argument.addr());
    // One that has run or was ended, in a graph.
    let Some(job) = job else { return };
    IN_HOST_FUNCTION.set(true);
    job.run();
    drop(job);
    IN_HOST_FUNCTION.set(false);
}

thread_local! {
    /// The driver must not be called from its own host functions.
    pub(super) static IN_HOST_FUNCTION: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Something the reaper reports, or learns the end of.
struct Item {
    number: u64,
    token: Option<Token>,
    /// Whether the driver got anything of it.
    queued: bool,
    /// Shared by the copies of a batch, and with the reaper while it asks.
    event: Option<Arc<EventHandle>>,
    jobs: Vec<Arc<Job>>,
    result: Result<()>,
}

#[derive(Default)]
struct State {
    items: VecDeque<Item>,
    submitted: u64,
    /// Everything up to here has ended.
    completed: u64,
    /// Up to here, an item with an event is queued.
    marked: u64,
    /// The first failure nobody was told of by token, and its number.
    failure: Option<(u64, Error)>,
    /// Others have its handle, so that it may be captured.
    shared: bool,
    /// For copies of unlocked memory, used in the stream's order. Without it they are the driver's affair, which may keep the
    /// submitter waiting, and with it who asks for this lock. An adopted stream gets it with the first such copy.
    bounce: Option<Locked>,
    /// The reaper knows that there are items.
    watched: bool,
    closing: bool,
}

/// What has to happen before the first item has ended.
pub(super) enum First {
    /// There is no item.
    Nothing,
    /// The driver has nothing of it: nothing has to.
    Unqueued,
    Event(Arc<EventHandle>),
    /// There is no event behind it: everything on the stream has to end.
    Unmarked,
}

pub(super) struct Stream {
    raw: StreamHandle,
    /// Made here, and destroyed here. One that is not may be gone once nothing is submitted to it any more.
    owned: bool,
    /// Operations that the mapper has yet to hand on; changes under its lock.
    pub(super) deferred: AtomicU32,
    /// Nanoseconds that what ended last took; the reaper's.
    pace: AtomicU32,
    state: Mutex<State>,
}

fn captured() -> Error {
    let message = "the stream is being captured into a graph: nothing that is put on it runs";
    Error::new(ErrorKind::InvalidArgument, message).remedy("end the capture first")
}

/// Whether an error is [`captured`], or what the driver says when it is asked about captures, which is never this kind.
fn is_refusal(error: &Error) -> bool {
    error.kind() == ErrorKind::InvalidArgument
}

/// Whether one writes what the other reads or writes.
fn overlap(a: BatchedCopy, b: BatchedCopy) -> bool {
    let touch = |x: u64, y: u64| x < y.saturating_add(b.len) && y < x.saturating_add(a.len);
    touch(a.to, b.to) || touch(a.to, b.from) || touch(a.from, b.to)
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        write!(f, "Stream({} of {} operations ended)", state.completed, state.submitted)
    }
}

impl Stream {
    pub(super) fn create(core: &Core, priority: i32) -> Result<Arc<Self>> {
        let current = core.enter()?;
        let raw = core.done(core.context.create_stream(&current, priority))?;
        let bounce = match core.context.alloc_locked(&current, BOUNCE_BYTES) {
            Ok(bounce) => Some(bounce),
            Err(failure) => {
                tracing::warn!(error = %core.note(failure), "{LEFT_TO_THE_DRIVER}");
                None
            }
        };
        Ok(Self::of(raw, true, bounce))
    }

    /// A stream that somebody else owns.
    ///
    /// # Safety
    /// As for [`Device::adopt_stream`](super::super::Device::adopt_stream).
    pub(super) unsafe fn adopt(core: &Core, raw: RawStream) -> Result<Arc<Self>> {
        let current = core.enter()?;
        // SAFETY: the caller's promise.
        let raw = core.done(unsafe { core.context.adopt_stream(&current, raw) })?;
        Ok(Self::of(raw, false, None))
    }

    fn of(raw: StreamHandle, owned: bool, bounce: Option<Locked>) -> Arc<Self> {
        let (deferred, pace) = Default::default();
        let state = Mutex::new(State { shared: !owned, bounce, ..State::default() });
        Arc::new(Self { raw, owned, deferred, pace, state })
    }

    /// Gives back what the driver made for it. Nothing of it is in flight.
    pub(super) fn destroy(self, core: &Core) {
        let current = match core.context.enter() {
            Ok(current) => current,
            Err(failure) => return tracing::warn!(error = %failure.error, "destroy a CUDA stream"),
        };
        let mut outcomes = Vec::new();
        if self.owned {
            outcomes.push(core.context.destroy_stream(&current, self.raw));
        }
        let State { bounce, items, .. } = self.state.into_inner();
        outcomes.extend(bounce.map(|bounce| core.context.free_locked(&current, bounce)));
        let left = items.into_iter().filter_map(|item| Arc::into_inner(item.event?));
        outcomes.extend(left.map(|event| core.context.destroy_event(&current, event)));
        for failure in outcomes.into_iter().filter_map(Outcome::err) {
            tracing::warn!(error = %failure.error, "destroy a CUDA stream");
        }
    }

    /// Submits operations, in order; returns those that the driver has taken, by token, with their numbers. When the stream
    /// is closed it takes none, and gives the tokens back.
    pub(super) fn submit_all(
        self: &Arc<Self>,
        core: &Core,
        ops: Vec<(StreamOp, Option<Token>)>,
    ) -> std::result::Result<Vec<(Token, u64)>, Vec<Option<Token>>> {
        let mut state = self.state.lock();
        if state.closing {
            return Err(ops.into_iter().map(|(_, token)| token).collect());
        }
        let before = state.submitted;
        let current = core.enter();
        let captured = match &current {
            Ok(current) => self.not_captured(core, current, &state),
            Err(_) => Ok(()),
        };
        let batched = match (&current, &captured) {
            (Ok(current), Ok(())) if ops.len() > 1 => self.submit_batch(core, current, &mut state, &ops),
            _ => false,
        };
        if !batched {
            for (op, token) in ops {
                self.submit_one(core, (&current, &captured), &mut state, op, token);
            }
        }
        // Without an event there is nothing to wait for but its end.
        let good = |item: &&Item| item.queued && item.event.is_some() && item.result.is_ok();
        let new = state.items.iter().rev().take_while(|item| item.number > before).filter(good);
        let mut taken_up: Vec<_> = new.filter_map(|item| Some((item.token?, item.number))).collect();
        taken_up.reverse();
        drop(current);
        self.tell(core, state);
        Ok(taken_up)
    }

    /// Lets the reaper know of items, if it does not.
    fn tell(self: &Arc<Self>, core: &Core, mut state: MutexGuard<'_, State>) {
        if state.watched || state.items.is_empty() {
            return;
        }
        state.watched = true;
        core.reaper.watch(Arc::clone(self));
        drop(state);
        core.reaper.wake();
    }

    /// Hands copies to the driver in one call, if it takes them and they are none of each other's business. Each
    /// completes by itself, when all have ended.
    fn submit_batch(
        &self,
        core: &Core,
        current: &Current<'_>,
        state: &mut State,
        ops: &[(StreamOp, Option<Token>)],
    ) -> bool {
        if !core.batches.load(Ordering::Relaxed) {
            return false;
        }
        let mut copies: Vec<BatchedCopy> = Vec::with_capacity(ops.len());
        for (op, _) in ops {
            let (StreamOp::CopyIn { host, device, len } | StreamOp::CopyOut { host, device, len }) = op else {
                return false;
            };
            let (host, device, len) = (*host, *device, *len);
            if len == 0 || !core.is_locked(host, len) || core.check_mapped(device, len).is_err() {
                return false;
            }
            let (there, here) = (device.get(), host.as_ptr() as u64);
            let (to, from) = if matches!(op, StreamOp::CopyIn { .. }) { (there, here) } else { (here, there) };
            let copy = BatchedCopy { to, from, len };
            if copies.iter().any(|other| overlap(copy, *other)) {
                return false;
            }
            copies.push(copy);
        }
        // SAFETY: contract rule 5 keeps the callers' memory until each is reported, and it is locked.
        if let Err(failure) = unsafe { core.context.copy_batch(current, &self.raw, &copies) } {
            if failure.error.kind() == ErrorKind::Unsupported {
                core.batches.store(false, Ordering::Relaxed);
            }
            // One by one, each gets its own answer; what is copied twice is the same bytes.
            tracing::debug!(error = %core.note(failure));
            return false;
        }
        let event = self.mark(core, current).ok().map(Arc::new);
        for (_, token) in ops {
            state.submitted += 1;
            let (number, event) = (state.submitted, event.clone());
            if token.is_some() {
                if event.is_some() {
                    state.marked = number;
                }
                let (jobs, result) = (Vec::new(), Ok(()));
                state.items.push_back(Item { number, token: *token, queued: true, event, jobs, result });
            }
        }
        true
    }

    fn submit_one(
        &self,
        core: &Core,
        (current, captured): (&Result<Current<'_>>, &Result<()>),
        state: &mut State,
        op: StreamOp,
        token: Option<Token>,
    ) {
        let is_mark = matches!(op, StreamOp::Mark);
        state.submitted += 1;
        let mut item =
            Item { number: state.submitted, token, queued: false, event: None, jobs: Vec::new(), result: Ok(()) };
        match (current, captured) {
            // What others put on the stream is not refused with it: the end of a mark is theirs, and has no failure but the
            // device's. Without an event the reaper waits for the whole stream.
            (Err(_), _) if is_mark => item.queued = true,
            (Err(error), _) => item.result = Err(error.clone()),
            // Of a mark, only what is known to be captured is refused.
            (Ok(_), Err(error)) if !is_mark || is_refusal(error) => item.result = Err(error.clone()),
            (Ok(current), _) => {
                let bounce = self.bounce(core, current, state, &op);
                item.result = self.queue(core, current, op, bounce, &mut item);
                if item.queued && (token.is_some() || !item.jobs.is_empty()) {
                    item.event = self.mark(core, current).ok().map(Arc::new);
                }
            }
        }
        if token.is_none() && item.jobs.is_empty() {
            // Nobody waits for it by itself; who records an event behind it learns of its end.
            if let (Err(error), None) = (item.result, &state.failure) {
                state.failure = Some((item.number, error));
            }
            return;
        }
        if item.event.is_some() {
            state.marked = item.number;
        }
        state.items.push_back(item);
    }

    /// The buffer that an operation's bytes go through, if they should and there is one.
    fn bounce(&self, core: &Core, current: &Current<'_>, state: &mut State, op: &StreamOp) -> Option<HostPointer> {
        let (StreamOp::CopyIn { host, len, .. } | StreamOp::CopyOut { host, len, .. }) = op else { return None };
        if core.is_locked(*host, *len) {
            return None;
        }
        if state.bounce.is_none() && !self.owned {
            let taken = core.take_bounce(current);
            state.bounce = taken.inspect_err(|error| tracing::warn!(%error, "{LEFT_TO_THE_DRIVER}")).ok();
        }
        state.bounce.as_ref().map(|bounce| bounce.base)
    }

    /// Gives up the buffer of a stream that [is spent](Self::is_spent).
    pub(super) fn take_bounce(&self) -> Option<Locked> {
        self.state.lock().bounce.take()
    }

    /// Hands an operation to the driver.
    fn queue(
        &self,
        core: &Core,
        current: &Current<'_>,
        op: StreamOp,
        bounce: Option<HostPointer>,
        item: &mut Item,
    ) -> Result<()> {
        match op {
            StreamOp::CopyIn { host, device, len } => self.copy(core, current, item, (host, bounce), device, len, true),
            StreamOp::CopyOut { device, host, len } => {
                self.copy(core, current, item, (host, bounce), device, len, false)
            }
            StreamOp::Zero { device, len } => {
                core.check_mapped(device, len)?;
                if len == 0 {
                    return Ok(());
                }
                core.done(core.context.zero(current, &self.raw, device, len))?;
                item.queued = true;
                Ok(())
            }
            StreamOp::Call(call) => self.queue_job(core, current, item, Work::Call(call)),
            StreamOp::Mark => {
                item.queued = true;
                Ok(())
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "a copy, and where it is noted")]
    fn copy(
        &self,
        core: &Core,
        current: &Current<'_>,
        item: &mut Item,
        (host, bounce): (HostPointer, Option<HostPointer>),
        device: DeviceAddress,
        len: u64,
        into: bool,
    ) -> Result<()> {
        core.check_mapped(device, len)?;
        if len == 0 {
            return Ok(());
        }
        let move_bytes = |host: HostPointer, device: DeviceAddress, len: u64| {
            // SAFETY: contract rule 5 keeps the caller's memory until the item is reported; the buffer is the stream's,
            // and only used in the stream's order.
            core.done(unsafe {
                if into {
                    core.context.copy_in(current, &self.raw, host, device, len)
                } else {
                    core.context.copy_out(current, &self.raw, device, host, len)
                }
            })
        };
        let Some(bounce) = bounce else {
            move_bytes(host, device, len)?;
            item.queued = true;
            return Ok(());
        };
        let mut at = 0;
        while at < len {
            let part = (len - at).min(BOUNCE_BYTES as u64);
            let place = host.offset(at);
            let size = part as usize;
            if into {
                self.queue_job(core, current, item, Work::Copy { from: place, to: bounce, len: size })?;
                move_bytes(bounce, device.offset(at), part)?;
            } else {
                move_bytes(bounce, device.offset(at), part)?;
                item.queued = true;
                self.queue_job(core, current, item, Work::Copy { from: bounce, to: place, len: size })?;
            }
            at += part;
        }
        Ok(())
    }

    fn queue_job(&self, core: &Core, current: &Current<'_>, item: &mut Item, work: Work) -> Result<()> {
        let job = Job::new(work);
        let argument = std::ptr::without_provenance_mut(job.number);
        // SAFETY: `run_job` takes any number, also of a job that is gone, catches panics, and does not call the driver.
        let outcome = unsafe { core.context.call(current, &self.raw, run_job, argument) };
        match outcome {
            Ok(()) => {
                item.queued = true;
                item.jobs.push(job);
                Ok(())
            }
            Err(failure) => {
                JOBS.lock().remove(&job.number);
                Err(core.note(failure))
            }
        }
    }

    /// The handle, for others.
    pub(super) fn raw(&self) -> RawStream {
        self.state.lock().shared = true;
        self.raw.raw()
    }

    /// Refuses where an event would say nothing of what runs.
    pub(super) fn can_mark(&self, core: &Core) -> Result<()> {
        let state = self.state.lock();
        if state.closing {
            return Err(super::super::stream::closed(&core.name));
        }
        if IN_HOST_FUNCTION.get() {
            // Whoever hands the mark on asks.
            return core.healthy();
        }
        let current = core.enter()?;
        self.not_captured(core, &current, &state)
    }

    /// Whether what is put on the stream runs.
    ///
    /// # Errors
    /// [A refusal](is_refusal) while it is being captured; what the driver says if it will not tell.
    fn not_captured(&self, core: &Core, current: &Current<'_>, state: &State) -> Result<()> {
        if state.shared && core.done(core.context.is_capturing(current, &self.raw))? {
            return Err(captured());
        }
        Ok(())
    }

    /// Records an event at the current end.
    fn mark(&self, core: &Core, current: &Current<'_>) -> Result<EventHandle> {
        let event = core.take_event(current)?;
        match core.context.record(current, &event, &self.raw) {
            Ok(()) => Ok(event),
            Err(failure) => {
                core.return_event(event);
                Err(core.note(failure))
            }
        }
    }

    /// The number of the last operation, with an event behind it unless all has ended.
    pub(super) fn record(self: &Arc<Self>, core: &Core) -> Result<u64> {
        let mut state = self.state.lock();
        let number = state.submitted;
        if state.completed < number && state.marked < number && !state.closing {
            let current = core.enter()?;
            self.not_captured(core, &current, &state)?;
            let event = Some(Arc::new(self.mark(core, &current)?));
            state.items.push_back(Item { number, token: None, queued: true, event, jobs: Vec::new(), result: Ok(()) });
            state.marked = number;
            drop(current);
            self.tell(core, state);
        }
        Ok(number)
    }

    /// Makes what is submitted from now on wait until `number` of `other` has ended.
    pub(super) fn wait(&self, core: &Core, other: &Self, number: u64) -> Result<()> {
        if std::ptr::eq(self, other) {
            return Ok(());
        }
        if self.state.lock().closing {
            return Err(super::super::stream::closed(&core.name));
        }
        {
            let theirs = other.state.lock();
            if number > theirs.submitted {
                return Err(unknown_event());
            }
            if theirs.completed >= number {
                return Ok(());
            }
            let current = core.enter()?;
            // The lock keeps the event from being reused until the driver has taken note of it.
            let event = theirs.items.iter().filter(|item| item.number >= number).find_map(|item| item.event.as_ref());
            let event = event.ok_or_else(|| {
                Error::new(ErrorKind::Device, "the event to wait for was not recorded, because the driver refused it")
                    .remedy("record another one, or wait for the first stream itself")
            })?;
            core.done(core.context.wait(&current, &self.raw, event))?;
        }
        // An event recorded behind the wait is one of its own.
        self.state.lock().submitted += 1;
        Ok(())
    }

    /// Whether everything up to `number` has ended; an error if that much was never submitted, or something failed.
    pub(super) fn poll(&self, core: &Core, number: u64) -> Result<Poll<()>> {
        let state = self.state.lock();
        if number > state.submitted {
            return Err(unknown_event());
        }
        if let Some((_, error)) = state.failure.as_ref().filter(|(at, _)| *at <= number) {
            return Err(error.clone());
        }
        if state.completed >= number {
            return Ok(Poll::Ready(()));
        }
        let current = core.enter()?;
        let after = state.items.iter().filter(|item| item.number >= number);
        let Some(event) = after.filter_map(|item| item.event.as_ref()).next() else { return Ok(Poll::Pending) };
        match core.context.happened(&current, event) {
            Ok(true) => {}
            Ok(false) => return Ok(Poll::Pending),
            // The reaper finds another way to learn of it.
            Err(failure) if failure.captured => return Ok(Poll::Pending),
            Err(failure) => return Err(core.note(failure)),
        }
        // The reaper has yet to learn of it, and of closures that failed.
        for item in state.items.iter().take_while(|item| item.number <= number).filter(|item| item.token.is_none()) {
            item.result.clone()?;
            for job in &item.jobs {
                match job.result() {
                    Some(result) => result?,
                    None => return Ok(Poll::Pending),
                }
            }
        }
        Ok(Poll::Ready(()))
    }

    /// Lets the queue run dry; later submissions are given back.
    pub(super) fn begin_close(&self) {
        self.state.lock().closing = true;
    }

    /// Whether it is another's stream, was forgotten, and everything on it has ended.
    pub(super) fn is_spent(&self) -> bool {
        let state = self.state.lock();
        !self.owned && state.closing && state.items.is_empty()
    }

    /// The first failure nobody was told of by token.
    pub(super) fn failure(&self) -> Result<()> {
        match &self.state.lock().failure {
            Some((_, error)) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// How long what ended last took, as far as that says something of what comes next. Zero at first.
    pub(super) fn pace(&self) -> Duration {
        Duration::from_nanos(self.pace.load(Ordering::Relaxed).into())
    }

    /// Of less than four seconds.
    pub(super) fn set_pace(&self, pace: Duration) {
        self.pace.store(pace.as_nanos() as u32, Ordering::Relaxed);
    }

    /// What the reaper waits for next.
    pub(super) fn first(&self) -> First {
        let mut state = self.state.lock();
        let first = match state.items.front() {
            None => First::Nothing,
            Some(item) if !item.queued => First::Unqueued,
            Some(Item { event: Some(event), .. }) => First::Event(Arc::clone(event)),
            Some(_) => First::Unmarked,
        };
        state.watched = !matches!(first, First::Nothing);
        first
    }

    /// Gives up an event that will not say when it happens, because it was captured.
    pub(super) fn unmark(&self, core: &Core, event: Arc<EventHandle>) {
        let mut state = self.state.lock();
        for item in &mut state.items {
            if item.event.as_ref().is_some_and(|own| Arc::ptr_eq(own, &event)) {
                item.event = None;
            }
        }
        if let Some(event) = Arc::into_inner(event) {
            core.return_event(event);
        }
    }

    /// Takes out the first item, which has ended or never will, and those whose event is the same.
    pub(super) fn retire(&self, core: &Core, done: &mut Vec<Completion>) {
        let mut state = self.state.lock();
        let mut jobs = Ok(());
        if let Some(first) = state.items.front().filter(|first| !first.jobs.is_empty()) {
            let all = first.jobs.clone();
            drop(state);
            // All of them, so that none runs after this; without the lock, which a closure that still runs may want.
            jobs = all.iter().map(|job| job.end()).fold(Ok(()), Result::and);
            state = self.state.lock();
        }
        while let Some(Item { number, token, queued, event, result, .. }) = state.items.pop_front() {
            let healthy = if queued { core.healthy() } else { Ok(()) };
            let result = healthy.and(result).and(std::mem::replace(&mut jobs, Ok(())));
            state.completed = state.completed.max(number);
            match (token, result) {
                (Some(token), result) => done.push(Completion { token, result }),
                (None, Err(error)) => {
                    state.failure.get_or_insert((number, error));
                }
                (None, Ok(())) => {}
            }
            // The last of a batch gives its event back.
            let Some(event) = event.map(Arc::into_inner) else { return };
            if let Some(event) = event {
                return core.return_event(event);
            }
        }
    }

    /// Waits for everything on it.
    ///
    /// # Errors
    /// What the driver says. Unless a capture forbids it, for now, the device is lost then.
    pub(super) fn finish(&self, core: &Core) -> Outcome {
        let finish = || {
            let current = core.context.enter()?;
            if !self.owned {
                // The stream may be gone by now; what was on it is not.
                return core.context.finish(&current);
            }
            if self.state.lock().shared && core.context.is_capturing(&current, &self.raw)? {
                return Err(Failure::captured(captured()));
            }
            core.context.finish_stream(&current, &self.raw)
        };
        // Asked again, because a context that is lost says so again.
        finish().or_else(|failure| finish().map_err(|_| failure))
    }

    /// Everything that has a token was reported. What nobody waits for is waited for here, unless it is another's.
    pub(super) fn end(&self, core: &Core) {
        let finished = if self.owned { self.finish(core) } else { Ok(()) };
        let mut state = self.state.lock();
        state.completed = state.submitted;
        if let Err(error) = finished.map_err(|failure| core.poison(failure.error)) {
            let number = state.submitted;
            state.failure.get_or_insert((number, error));
        }
    }
}

impl Core {
    /// Refuses a range that is not wholly mapped, which on a GPU would cost the context. The reason is that of the mapper
    /// where it was refused.
    fn check_mapped(&self, device: DeviceAddress, len: u64) -> Result<()> {
        match self.mapper.lock().layout.range(device.get(), len) {
            Range::Mapped => Ok(()),
            Range::Unusable(error) => Err(error),
            Range::Pending => {
                let message = format!("a copy of {} names device memory whose mapping changes", Bytes::new(len));
                Err(Error::new(ErrorKind::InvalidArgument, message).remedy("map no page while an operation uses it"))
            }
        }
    }
}
