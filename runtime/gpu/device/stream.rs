//! Streams: the order of submitted operations, and their results. The [reaper](super::reaper) learns when they end.
//!
//! # Invariants
//!
//! 1. Submissions of one stream are numbered under its `submission` lock and handed to the driver in that order, so an
//!    event is a stream and a number. The driver's event for it exists until everything up to the number has ended.
//! 2. An item enters the queue after the driver has its work and the event behind it. It leaves the queue, and its
//!    memory is given back, only after the driver has said that it ended, or that the event and the whole stream
//!    failed. Closures that have not run by then never will: [`Job::end`] takes them, and waits for one that is
//!    running.
//! 3. The reaper alone takes items out. An event is reused when its last owner gives it back
//!    ([`Core::give_back`]): its items, and whoever asks the driver about it or lets a stream wait for it.
//! 4. A submission is counted ([`Reaper::submitting`](super::reaper::Reaper::submitting)) from before it finds the
//!    stream open until its items are queued. So the reaper does not end before it has seen them. Whoever else uses the
//!    handle is counted too, from before it finds the stream open, so `close` waits for it.
//! 5. Whoever uses the handle of an adopted stream names the stream, and so keeps it from being forgotten, or has found
//!    `closing` or `forgotten` not to be set, with a lock: `submission`, or `asking` for a question. [`Stream::forget`]
//!    sets them, and takes both locks, so nobody uses the handle after it. In a closure it takes no lock, so there a
//!    call that has begun may still use the handle.
//!
//! # Locking
//!
//! `submission` is held over calls of the driver, which wait while the driver's queue is full; only submitters take it,
//! threads that [mark again](Stream::mark_again), and whoever forgets the stream outside of closures. `asking` is held
//! over a call that waits for no work, by the reaper, and for a moment by whoever forgets the stream. `state` is held
//! for moments, and never over a call of the driver. The reaper, and whoever asks for results, take only that one. So a
//! full queue holds up those who submit to this stream or forget it, and nobody else.
//!
//! Closures are dropped with no lock held: they may own pins on this stream, or its last owner.
//!
//! # Captures
//!
//! A stream whose handle others have may be captured into a graph at any moment, by any thread. Operations that are put
//! on it then do not run, perhaps never, and would run with each launch of the graph. So under the `submission` lock
//! the driver is asked first, and operations that would be captured are refused.
//!
//! A capture may still begin between the question and the operation. Then the driver calls the host functions with
//! numbers of jobs that are gone, which is harmless. The driver will not say when such an event happens, so the event
//! is given up. The item then ends with a later event of its stream; if there is none, another one is recorded when the
//! capture has ended. The graph would still borrow the memory of captured copies, so callers must not begin a capture
//! while copies are being submitted.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::task::Poll;

use outcore::device::parts::{closed, run_call, unknown_event};
use outcore::device::{Completion, DeviceAddress, Direction, HostPointer, RawStream, StreamOp, Token};
use outcore::{Bytes, Error, ErrorKind, Result};
use parking_lot::Mutex;

use super::frames::Range;
use super::pace::Pace;
use super::{Core, not_given_back};
use crate::driver::{BatchedCopy, Driver, Failure, Locked, Outcome};

/// How many copies go to the driver in one call, if they are [small](BATCHED_BELOW). They are reported together, so the
/// first waits for the last.
pub(super) const COPIES_AT_ONCE: usize = 4;

/// Copies of this size, in bytes, and larger ones go to the driver one by one. Together they copy 2 % more a second at
/// 4 MiB and 0.6 % at 16 MiB on an H100, and the first of them would be reported later by three times its own length.
pub(super) const BATCHED_BELOW: u64 = 4 << 20;

/// Size of the buffer through which copies of unlocked memory go: large enough that its host functions cost little
/// beside the copies.
pub(super) const BOUNCE_BYTES: usize = 1 << 20;

const LEFT_TO_THE_DRIVER: &str =
    "copies of unlocked host memory are left to the driver: submitting them may take as long as the copy";

/// The work of a host function.
enum Work {
    Call(Box<dyn FnOnce() + Send>),
    Copy { from: HostPointer, to: HostPointer, len: usize },
}

impl Work {
    /// What an operation calls.
    fn of(op: StreamOp) -> Option<Self> {
        match op {
            StreamOp::Call(call) => Some(Self::Call(call)),
            _ => None,
        }
    }
}

enum JobState {
    Waiting(Work),
    Ended(Result<()>),
}

/// Jobs that the driver was given and has not run, by number. The driver gets numbers and not pointers: host functions
/// that were captured into a graph are called at each launch, long after their jobs are gone.
static JOBS: Mutex<BTreeMap<usize, Arc<Job>>> = Mutex::new(BTreeMap::new());

/// Work that a stream runs on a thread of the driver.
struct Job {
    /// The key in [`JOBS`].
    number: usize,
    /// The lock is held while the work runs.
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
        // A job that was already ended, because the device was taken for lost, stays ended.
        let ended = JobState::Ended(Ok(()));
        *state = JobState::Ended(match std::mem::replace(&mut *state, ended) {
            JobState::Waiting(Work::Call(call)) => run_call(call),
            JobState::Waiting(Work::Copy { from, to, len }) => {
                // SAFETY: one side is the stream's own buffer, which the stream's order keeps from other use. The other
                // side is borrowed until the operation is reported, which waits for this lock (invariant 2).
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), len) };
                Ok(())
            }
            JobState::Ended(result) => result,
        });
    }

    /// Takes out work that the driver was not given.
    fn take(&self) -> Option<Work> {
        JOBS.lock().remove(&self.number);
        match std::mem::replace(&mut *self.state.lock(), JobState::Ended(Ok(()))) {
            JobState::Waiting(work) => Some(work),
            JobState::Ended(_) => None,
        }
    }

    /// The result so far; `None` while it has not ended.
    fn result(&self) -> Option<Result<()>> {
        match &*self.state.try_lock()? {
            JobState::Waiting(_) => None,
            JobState::Ended(result) => Some(result.clone()),
        }
    }

    /// The result; a job that has not run by now never will.
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

/// The function that the driver calls, with the number of a job.
extern "C" fn run_job(argument: *mut c_void) {
    let job = JOBS.lock().remove(&argument.addr());
    // In a graph, the job may have run or ended already.
    let Some(job) = job else { return };
    IN_HOST_FUNCTION.set(true);
    job.run();
    drop(job);
    IN_HOST_FUNCTION.set(false);
}

thread_local! {
    /// Whether the driver is running a host function on this thread. The driver must not be called from one.
    pub(super) static IN_HOST_FUNCTION: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// An operation that the reaper watches, to report its end or its failure.
struct Item<D: Driver> {
    number: u64,
    token: Option<Token>,
    /// Whether the driver got any part of it.
    queued: bool,
    /// How many bytes it copies.
    bytes: u64,
    /// Shared by the copies of a batch, and with the reaper while it asks.
    event: Option<Arc<D::Event>>,
    jobs: Vec<Arc<Job>>,
    /// Work that the driver was not given. A closure may own what uses this stream when it is dropped, so it is dropped
    /// without locks.
    refused: Vec<Work>,
    result: Result<()>,
}

impl<D: Driver> Item<D> {
    fn new(number: u64, token: Option<Token>) -> Self {
        let (jobs, refused) = Default::default();
        Self { number, token, queued: false, bytes: 0, event: None, jobs, refused, result: Ok(()) }
    }

    /// Whether the operation can no longer be refused. Without an event others could wait only for its end.
    fn is_taken_up(&self) -> bool {
        self.queued && self.event.is_some() && self.result.is_ok()
    }
}

/// What submitters alone use.
struct Submission {
    /// The buffer for copies of unlocked memory, used in the stream's order. Without it the driver carries them out,
    /// which may block the submitter and, with it, later submitters to this stream. An adopted stream gets it with the
    /// first such copy.
    bounce: Option<Locked>,
}

struct State<D: Driver> {
    items: VecDeque<Item<D>>,
    submitted: u64,
    /// All operations up to this number have ended.
    completed: u64,
    /// The highest number of an item with an event.
    marked: u64,
    /// The first failure that was not reported by token, and its number.
    failure: Option<(u64, Error)>,
    /// Whether the reaper knows that there are items.
    watched: bool,
    closing: bool,
}

impl<D: Driver> State<D> {
    /// The number of the last operation, if no event has to be recorded behind it.
    fn recorded(&self) -> Option<u64> {
        let needs_event = self.completed < self.submitted && self.marked < self.submitted && !self.closing;
        (!needs_event).then_some(self.submitted)
    }

    /// The first event behind an operation that has not ended.
    fn event_behind(&self, number: u64) -> Option<Arc<D::Event>> {
        self.items.iter().filter(|item| item.number >= number).find_map(|item| item.event.clone())
    }

    /// The first event, and how many bytes are copied until then.
    fn next_event(&self) -> Option<(Arc<D::Event>, u64)> {
        let event = self.items.iter().find_map(|item| item.event.as_ref())?;
        let is_behind = |item: &Item<D>| item.event.as_ref().is_some_and(|other| !Arc::ptr_eq(other, event));
        let bytes = self.items.iter().take_while(|item| !is_behind(item)).map(|item| item.bytes).sum();
        Some((Arc::clone(event), bytes))
    }

    /// Whether everything up to `number` has ended, if that can be said without the driver.
    fn reported(&self, number: u64) -> Result<Option<Poll<()>>> {
        if number > self.submitted {
            return Err(unknown_event());
        }
        if let Some((_, error)) = self.failure.as_ref().filter(|(at, _)| *at <= number) {
            return Err(error.clone());
        }
        Ok((self.completed >= number).then_some(Poll::Ready(())))
    }
}

/// What has to happen before the first item counts as ended.
pub(super) enum First<D: Driver> {
    /// There is no item.
    Nothing,
    /// The driver has nothing of the item, so nothing has to happen.
    Unqueued,
    /// This event, and how many bytes are copied until then.
    Event(Arc<D::Event>, u64),
    /// No event is behind the item: [another](Stream::mark_again) has to be, or everything on the stream has to end.
    Unmarked,
}

pub(super) struct Stream<D: Driver> {
    raw: D::Stream,
    /// Whether the stream was made here, and is destroyed here. Any other may be gone once nothing is submitted to it.
    owned: bool,
    /// Operations that the mapper has yet to hand on. Changes under the mapper's lock.
    pub(super) deferred: AtomicU32,
    /// How long its work takes. Written by the reaper.
    pub(super) pace: Pace,
    /// Whether others have the handle, so that the stream may be captured.
    shared: AtomicBool,
    /// Whether the owner of an adopted stream may destroy it (invariant 5).
    forgotten: AtomicBool,
    /// Held while the handle is used for a question, which waits for no work, without the `submission` lock.
    asking: Mutex<()>,
    submission: Mutex<Submission>,
    state: Mutex<State<D>>,
}

pub(super) fn captured() -> Error {
    let message = "the stream is being captured into a graph: nothing that is put on it runs";
    Error::new(ErrorKind::InvalidArgument, message).remedy("end the capture first")
}

/// Whether an error is [`captured`]. Errors of the driver, when it is asked about captures, are never of this kind.
fn is_refusal(error: &Error) -> bool {
    error.kind() == ErrorKind::InvalidArgument
}

/// How many bytes an operation copies between host and device.
pub(super) const fn copied(op: &StreamOp) -> u64 {
    match op {
        StreamOp::CopyIn { len, .. } | StreamOp::CopyOut { len, .. } => *len,
        StreamOp::Zero { .. } | StreamOp::Call(_) | StreamOp::Mark => 0,
    }
}

/// Whether one copy writes memory that the other reads or writes.
fn overlap(a: BatchedCopy, b: BatchedCopy) -> bool {
    let touch = |x: u64, y: u64| x < y.saturating_add(b.len.get()) && y < x.saturating_add(a.len.get());
    touch(a.target(), b.target()) || touch(a.target(), b.source()) || touch(a.source(), b.target())
}

impl<D: Driver> fmt::Debug for Stream<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        write!(f, "Stream({} of {} operations ended)", state.completed, state.submitted)
    }
}

impl<D: Driver> Stream<D> {
    pub(super) fn create(core: &Core<D>, priority: i32) -> Result<Arc<Self>> {
        let current = core.enter()?;
        let raw = core.done(core.driver.create_stream(&current, priority))?;
        let bounce = match core.driver.alloc_locked(&current, Bytes::new(BOUNCE_BYTES as u64)) {
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
    /// As for [`Device::adopt_stream`](outcore::device::Device::adopt_stream).
    pub(super) unsafe fn adopt(core: &Core<D>, raw: RawStream) -> Result<Arc<Self>> {
        let current = core.enter()?;
        // SAFETY: the caller's promise.
        let raw = core.done(unsafe { core.driver.adopt_stream(&current, raw) })?;
        Ok(Self::of(raw, false, None))
    }

    fn of(raw: D::Stream, owned: bool, bounce: Option<Locked>) -> Arc<Self> {
        let (deferred, pace) = Default::default();
        let state = State {
            items: VecDeque::new(),
            submitted: 0,
            completed: 0,
            marked: 0,
            failure: None,
            watched: false,
            closing: false,
        };
        let (state, submission) = (Mutex::new(state), Mutex::new(Submission { bounce }));
        Arc::new(Self {
            raw,
            owned,
            deferred,
            pace,
            shared: AtomicBool::new(!owned),
            forgotten: AtomicBool::new(false),
            asking: Mutex::default(),
            submission,
            state,
        })
    }

    /// Destroys what the driver made for the stream. Nothing on it is in flight.
    pub(super) fn destroy(self, core: &Core<D>) {
        let current = match core.driver.enter() {
            Ok(current) => current,
            Err(failure) => return not_given_back(&failure),
        };
        let mut outcomes = Vec::new();
        if self.owned {
            outcomes.push(core.driver.destroy_stream(&current, self.raw));
        }
        let (Submission { bounce }, State { items, .. }) = (self.submission.into_inner(), self.state.into_inner());
        outcomes.extend(bounce.map(|bounce| core.driver.free_locked(&current, bounce)));
        let left = items.into_iter().filter_map(|item| Arc::into_inner(item.event?));
        outcomes.extend(left.map(|event| core.driver.destroy_event(&current, event)));
        outcomes.into_iter().filter_map(Outcome::err).for_each(|failure| not_given_back(&failure));
    }

    /// Submits operations, in order. Returns the tokens and numbers of those that the driver has taken. A closed stream
    /// takes none, and returns the tokens.
    pub(super) fn submit_all(
        self: &Arc<Self>,
        core: &Core<D>,
        ops: Vec<(StreamOp, Option<Token>)>,
    ) -> std::result::Result<Vec<(Token, u64)>, Vec<Option<Token>>> {
        // Outlives the lock.
        let mut refused = Vec::new();
        let mut submission = self.submission.lock();
        let _counted = core.reaper.submitting();
        if self.state.lock().closing {
            // This submission is counted, so if the reaper is not closing by now, it sees the items.
            let takes_marks = !self.owned && !core.reaper.is_closing();
            let mut tokens = Vec::new();
            for (op, token) in ops {
                if takes_marks && matches!(op, StreamOp::Mark) {
                    self.take_mark(core, token);
                } else {
                    tokens.push(token);
                    refused.extend(Work::of(op));
                }
            }
            return Err(tokens);
        }
        let current = core.enter();
        let captured = match &current {
            Ok(current) => self.not_captured(core, current),
            Err(_) => Ok(()),
        };
        if let (Ok(current), Ok(())) = (&current, &captured)
            && ops.len() > 1
            && let Some(taken_up) = self.submit_batch(core, current, &ops)
        {
            return Ok(taken_up);
        }
        let mut taken_up = Vec::with_capacity(ops.len());
        for (op, token) in ops {
            taken_up.extend(self.submit_one(core, (&current, &captured), &mut submission, &mut refused, (op, token)));
        }
        Ok(taken_up)
    }

    /// Takes a mark on an adopted stream that was forgotten while the mapper had the mark: it stands for others' work
    /// that still runs. Without the handle the reaper finds the end of that in another way.
    fn take_mark(self: &Arc<Self>, core: &Core<D>, token: Option<Token>) {
        let number = self.state.lock().submitted + 1;
        self.push(core, number, [Item { queued: true, ..Item::new(number, token) }]);
    }

    /// Queues items behind which the driver has what they need, and lets the reaper watch the stream.
    fn push(self: &Arc<Self>, core: &Core<D>, submitted: u64, items: impl IntoIterator<Item = Item<D>>) {
        let mut state = self.state.lock();
        state.submitted = submitted;
        for item in items {
            if item.token.is_none() && item.jobs.is_empty() && item.event.is_none() {
                // Nobody waits for this item alone. Its failure is reported by events recorded behind it.
                if let Err(error) = item.result {
                    state.failure.get_or_insert((item.number, error));
                }
                continue;
            }
            if item.event.is_some() {
                state.marked = item.number;
            }
            state.items.push_back(item);
        }
        if state.watched || state.items.is_empty() {
            return;
        }
        state.watched = true;
        core.reaper.watch(Arc::clone(self));
        drop(state);
        core.reaper.wake();
    }

    /// Hands copies to the driver in one call, if it supports that and no copy touches another's memory. The copies are
    /// reported one by one, when all have ended.
    fn submit_batch(
        self: &Arc<Self>,
        core: &Core<D>,
        current: &D::Current<'_>,
        ops: &[(StreamOp, Option<Token>)],
    ) -> Option<Vec<(Token, u64)>> {
        if !core.batches.load(Ordering::Relaxed) {
            return None;
        }
        let mut copies: Vec<BatchedCopy> = Vec::with_capacity(ops.len());
        for (op, _) in ops {
            let (StreamOp::CopyIn { host, device, len } | StreamOp::CopyOut { host, device, len }) = op else {
                return None;
            };
            let (host, device, len) = (*host, *device, *len);
            if len == 0 || !core.is_locked(host, len) || core.check_mapped(device, len).is_err() {
                return None;
            }
            let direction = if matches!(op, StreamOp::CopyIn { .. }) { Direction::In } else { Direction::Out };
            let copy = BatchedCopy { direction, host, device, len: Bytes::new(len) };
            if copies.iter().any(|other| overlap(copy, *other)) {
                return None;
            }
            copies.push(copy);
        }
        // SAFETY: contract rule 5 keeps the callers' memory until each copy is reported, and it is locked.
        if let Err(failure) = unsafe { core.driver.copy_batch(current, &self.raw, &copies) } {
            if failure.error.kind() == ErrorKind::Unsupported {
                core.batches.store(false, Ordering::Relaxed);
            }
            // Submitted one by one, each copy gets its own result. Copying twice writes the same bytes.
            tracing::debug!(error = %core.note(failure));
            return None;
        }
        let event = self.mark(core, current).ok().map(Arc::new);
        let before = self.state.lock().submitted;
        let (mut items, mut taken_up) = (Vec::with_capacity(ops.len()), Vec::with_capacity(ops.len()));
        for (number, (op, token)) in (before + 1..).zip(ops) {
            let Some(token) = *token else { continue };
            let bytes = copied(op);
            items.push(Item { queued: true, bytes, event: event.clone(), ..Item::new(number, Some(token)) });
            if event.is_some() {
                taken_up.push((token, number));
            }
        }
        self.push(core, before + ops.len() as u64, items);
        if let Some(event) = event {
            core.give_back(event);
        }
        Some(taken_up)
    }

    /// Returns the token and the number, if the driver has taken it.
    fn submit_one(
        self: &Arc<Self>,
        core: &Core<D>,
        (current, captured): (&Result<D::Current<'_>>, &Result<()>),
        submission: &mut Submission,
        refused: &mut Vec<Work>,
        (op, token): (StreamOp, Option<Token>),
    ) -> Option<(Token, u64)> {
        let is_mark = matches!(op, StreamOp::Mark);
        // Only submitters change it.
        let number = self.state.lock().submitted + 1;
        let mut item = Item { bytes: copied(&op), ..Item::new(number, token) };
        match (current, captured) {
            // A mark stands for others' work on the stream, so a refusal here must not fail it: it fails only if the
            // device does. Without an event the reaper waits for the whole stream.
            (Err(_), _) if is_mark => item.queued = true,
            (Err(error), _) => {
                item.result = Err(error.clone());
                refused.extend(Work::of(op));
            }
            // A mark is refused only if the stream is known to be captured.
            (Ok(_), Err(error)) if !is_mark || is_refusal(error) => {
                item.result = Err(error.clone());
                refused.extend(Work::of(op));
            }
            (Ok(current), _) => {
                let bounce = self.bounce(core, current, submission, &op);
                item.result = self.queue(core, current, op, bounce, &mut item);
                if item.queued && (token.is_some() || !item.jobs.is_empty()) {
                    item.event = self.mark(core, current).ok().map(Arc::new);
                }
            }
        }
        refused.append(&mut item.refused);
        let taken_up = item.token.filter(|_| item.is_taken_up()).map(|token| (token, number));
        self.push(core, number, [item]);
        taken_up
    }

    /// The buffer for an operation's bytes, if they need one and there is one.
    fn bounce(
        &self,
        core: &Core<D>,
        current: &D::Current<'_>,
        submission: &mut Submission,
        op: &StreamOp,
    ) -> Option<HostPointer> {
        let (StreamOp::CopyIn { host, len, .. } | StreamOp::CopyOut { host, len, .. }) = op else { return None };
        if core.is_locked(*host, *len) {
            return None;
        }
        if submission.bounce.is_none() && !self.owned {
            let taken = core.take_bounce(current);
            submission.bounce = taken.inspect_err(|error| tracing::warn!(%error, "{LEFT_TO_THE_DRIVER}")).ok();
        }
        submission.bounce.as_ref().map(Locked::base)
    }

    /// Takes the buffer of a stream that [is spent](Self::is_spent).
    pub(super) fn take_bounce(&self) -> Option<Locked> {
        self.submission.lock().bounce.take()
    }

    /// Hands an operation to the driver.
    fn queue(
        &self,
        core: &Core<D>,
        current: &D::Current<'_>,
        op: StreamOp,
        bounce: Option<HostPointer>,
        item: &mut Item<D>,
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
                core.done(core.driver.zero(current, &self.raw, device, Bytes::new(len)))?;
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
        core: &Core<D>,
        current: &D::Current<'_>,
        item: &mut Item<D>,
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
            // and is used only in the stream's order.
            core.done(unsafe {
                if into {
                    core.driver.copy_in(current, &self.raw, host, device, Bytes::new(len))
                } else {
                    core.driver.copy_out(current, &self.raw, device, host, Bytes::new(len))
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

    fn queue_job(&self, core: &Core<D>, current: &D::Current<'_>, item: &mut Item<D>, work: Work) -> Result<()> {
        let job = Job::new(work);
        let argument = std::ptr::without_provenance_mut(job.number);
        // SAFETY: `run_job` accepts any number, also of a job that is gone, catches panics, and does not call the
        // driver.
        let outcome = unsafe { core.driver.call(current, &self.raw, run_job, argument) };
        match outcome {
            Ok(()) => {
                item.queued = true;
                item.jobs.push(job);
                Ok(())
            }
            Err(failure) => {
                item.refused.extend(job.take());
                Err(core.note(failure))
            }
        }
    }

    /// The handle, for use by others.
    pub(super) fn raw(&self, core: &Core<D>) -> RawStream {
        self.shared.store(true, Ordering::Release);
        core.driver.raw_stream(&self.raw)
    }

    /// Refuses a mark if an event would not cover the work that runs.
    pub(super) fn can_mark(&self, core: &Core<D>) -> Result<()> {
        let _counted = core.reaper.submitting();
        if self.state.lock().closing {
            return Err(closed(&core.name));
        }
        if IN_HOST_FUNCTION.get() {
            // The driver is asked when the mark is handed on.
            return core.healthy();
        }
        let current = core.enter()?;
        self.not_captured(core, &current)
    }

    /// Checks that operations put on the stream run.
    ///
    /// # Errors
    /// [A refusal](is_refusal) while the stream is being captured; the driver's error if it does not answer.
    fn not_captured(&self, core: &Core<D>, current: &D::Current<'_>) -> Result<()> {
        if self.shared.load(Ordering::Acquire) && core.done(core.driver.is_capturing(current, &self.raw))? {
            return Err(captured());
        }
        Ok(())
    }

    /// Records an event at the current end.
    fn mark(&self, core: &Core<D>, current: &D::Current<'_>) -> Result<D::Event> {
        let event = core.take_event(current)?;
        match core.driver.record(current, &event, &self.raw) {
            Ok(()) => Ok(event),
            Err(failure) => {
                core.return_event(event);
                Err(core.note(failure))
            }
        }
    }

    /// The number of the last operation, with an event behind it unless everything has ended.
    pub(super) fn record(self: &Arc<Self>, core: &Core<D>) -> Result<u64> {
        if let Some(number) = self.state.lock().recorded() {
            return Ok(number);
        }
        let _submission = self.submission.lock();
        let _counted = core.reaper.submitting();
        let number = {
            let state = self.state.lock();
            if let Some(number) = state.recorded() {
                return Ok(number);
            }
            state.submitted
        };
        let current = core.enter()?;
        self.not_captured(core, &current)?;
        let event = Some(Arc::new(self.mark(core, &current)?));
        self.push(core, number, [Item { queued: true, event, ..Item::new(number, None) }]);
        Ok(number)
    }

    /// Makes operations submitted from now on wait until `number` of `other` has ended.
    pub(super) fn wait(&self, core: &Core<D>, other: &Self, number: u64) -> Result<()> {
        if std::ptr::eq(self, other) {
            return Ok(());
        }
        let _submission = self.submission.lock();
        let _counted = core.reaper.submitting();
        if self.state.lock().closing {
            return Err(closed(&core.name));
        }
        let event = {
            let theirs = other.state.lock();
            if number > theirs.submitted {
                return Err(unknown_event());
            }
            if theirs.completed >= number {
                return Ok(());
            }
            // With an owner here, the event is not used again before the driver has noted the wait.
            theirs.event_behind(number).ok_or_else(|| {
                Error::new(ErrorKind::Device, "the event to wait for was not recorded, because the driver refused it")
                    .remedy("record another one, or wait for the first stream itself")
            })?
        };
        let waits = core.enter().and_then(|current| core.done(core.driver.wait(&current, &self.raw, &event)));
        core.give_back(event);
        waits?;
        // An event recorded behind the wait needs a number of its own.
        self.state.lock().submitted += 1;
        Ok(())
    }

    /// Whether everything up to `number` has ended; an error if fewer were submitted, or if something failed.
    pub(super) fn poll(&self, core: &Core<D>, number: u64) -> Result<Poll<()>> {
        let event = {
            let state = self.state.lock();
            if let Some(ready) = state.reported(number)? {
                return Ok(ready);
            }
            let Some(event) = state.event_behind(number) else { return Ok(Poll::Pending) };
            event
        };
        let asked = core.enter().map(|current| core.driver.happened(&current, &event));
        core.give_back(event);
        match asked? {
            Ok(true) => {}
            Ok(false) => return Ok(Poll::Pending),
            // The reaper learns of the end in another way.
            Err(failure) if failure.captured => return Ok(Poll::Pending),
            Err(failure) => return core.done(Err(failure)),
        }
        let state = self.state.lock();
        if let Some(ready) = state.reported(number)? {
            return Ok(ready);
        }
        // The reaper has yet to notice, and closures may have failed.
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

    /// Forgets an adopted stream, whose handle is not used any more after this. Later submissions are given back. Waits
    /// for submissions that are under way, which may wait for room in the driver's queue.
    ///
    /// On a thread on which the driver runs a closure it waits for nothing, because the driver may need the closure to
    /// end first. The handle may then still be in use by a call that has begun.
    pub(super) fn forget(&self, core: &Core<D>) {
        self.begin_close();
        if self.owned {
            return;
        }
        if IN_HOST_FUNCTION.get() {
            self.forgotten.store(true, Ordering::SeqCst);
            return;
        }
        let _submission = self.submission.lock();
        self.mark_end(core);
        self.forgotten.store(true, Ordering::SeqCst);
        // Whoever found the handle in use still has this lock.
        drop(self.asking.lock());
    }

    /// Puts an event behind everything on the stream, if the last item has none that can be asked about. The caller has
    /// the `submission` lock.
    fn mark_end(&self, core: &Core<D>) {
        // An event that was captured would leave the last item without one, and the handle for another is still there.
        let last = self.state.lock().items.back().map(|item| item.event.clone());
        if let Some(event) = last
            && let Ok(current) = core.driver.enter()
        {
            if let Some(event) = event {
                let asked = core.driver.happened(&current, &event);
                if asked.is_err_and(|failure| failure.captured) {
                    self.unmark(core, event);
                } else {
                    core.give_back(event);
                }
            }
            if let Err(failure) = self.mark_unmarked(core, &current) {
                tracing::debug!(error = %failure.error, "a stream was forgotten whose end cannot be asked for");
            }
        }
    }

    /// Puts an event behind items that have none, and no event behind them. `false` if the stream itself has to be
    /// waited for: nobody else has the handle, or it may be gone. May wait for room in the driver's queue.
    ///
    /// # Errors
    /// Errors of the driver; that the stream is being captured.
    pub(super) fn mark_again(&self, core: &Core<D>) -> Outcome<bool> {
        let _submission = self.submission.lock();
        if !self.can_mark_again() {
            return Ok(false);
        }
        let current = core.driver.enter()?;
        self.mark_unmarked(core, &current).map(|()| true)
    }

    /// Whether others have the handle, and it is still there.
    pub(super) fn can_mark_again(&self) -> bool {
        !self.forgotten.load(Ordering::SeqCst) && self.shared.load(Ordering::Acquire)
    }

    /// The caller has the `submission` lock.
    fn mark_unmarked(&self, core: &Core<D>, current: &D::Current<'_>) -> Outcome {
        // Before the event is recorded: it does not cover items that come later.
        let is_unmarked = |item: &Item<D>| item.queued && item.event.is_none();
        let unmarked = self.state.lock().items.iter().rev().find(|item| is_unmarked(item)).map(|item| item.number);
        let Some(number) = unmarked else { return Ok(()) };
        if core.driver.is_capturing(current, &self.raw)? {
            return Err(Failure::captured(captured()));
        }
        let unused = core.events.lock().pop();
        let event = unused.map_or_else(|| core.driver.create_event(current), Ok)?;
        let recorded = core.driver.record(current, &event, &self.raw);
        let event = Arc::new(event);
        let mut state = self.state.lock();
        let mut items = state.items.iter_mut();
        if recorded.is_ok()
            && let Some(item) = items.find(|item| item.number == number && is_unmarked(item))
        {
            item.event = Some(Arc::clone(&event));
        }
        drop(state);
        core.give_back(event);
        recorded
    }

    /// Whether the stream is being captured, as far as its handle may still be used.
    pub(super) fn is_captured(&self, core: &Core<D>, current: &D::Current<'_>) -> Outcome<bool> {
        let _asking = self.asking.lock();
        if !self.can_mark_again() {
            return Ok(false);
        }
        core.driver.is_capturing(current, &self.raw)
    }

    /// Lets the queue run dry; later submissions are given back.
    pub(super) fn begin_close(&self) {
        self.state.lock().closing = true;
    }

    /// Whether the stream is adopted, was forgotten, and everything on it has ended.
    pub(super) fn is_spent(&self) -> bool {
        // Whoever found the stream open before it was forgotten still has this lock.
        let Some(_submission) = self.submission.try_lock() else { return false };
        let state = self.state.lock();
        !self.owned && state.closing && state.items.is_empty()
    }

    /// The first failure that was not reported by token.
    pub(super) fn failure(&self) -> Result<()> {
        match &self.state.lock().failure {
            Some((_, error)) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// What the reaper waits for next.
    pub(super) fn first(&self) -> First<D> {
        let mut state = self.state.lock();
        let first = match state.items.front() {
            None => First::Nothing,
            Some(item) if !item.queued => First::Unqueued,
            // An item without an event ends no later than with the next event.
            Some(_) => state.next_event().map_or(First::Unmarked, |(event, bytes)| First::Event(event, bytes)),
        };
        state.watched = !matches!(first, First::Nothing);
        first
    }

    /// Gives up an event that was captured, because the driver will not say when it happens.
    pub(super) fn unmark(&self, core: &Core<D>, event: Arc<D::Event>) {
        let mut state = self.state.lock();
        for item in &mut state.items {
            if item.event.as_ref().is_some_and(|own| Arc::ptr_eq(own, &event)) {
                item.event = None;
            }
        }
        drop(state);
        core.give_back(event);
    }

    /// Takes out the first item, which has ended or never will, and later items with the same event.
    pub(super) fn retire(&self, core: &Core<D>, done: &mut Vec<Completion>) {
        let mut state = self.state.lock();
        let mut jobs = Ok(());
        if let Some(first) = state.items.front().filter(|first| !first.jobs.is_empty()) {
            let all = first.jobs.clone();
            drop(state);
            // Ends all jobs, so that none runs after this; without the lock, which a closure that still runs may want.
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
            let Some(event) = event else { return };
            let is_shared = |next: &Item<D>| next.event.as_ref().is_some_and(|other| Arc::ptr_eq(other, &event));
            let more = state.items.front().is_some_and(is_shared);
            core.give_back(event);
            if !more {
                return;
            }
        }
    }

    /// Waits for everything on the stream. For an adopted stream, whose handle may be gone, that is everything on the
    /// GPU: so this is for failures only, and refused while a stream that the device knows is being captured, because a
    /// capture of any stream of the context is spoiled by such a wait.
    ///
    /// # Errors
    /// Errors of the driver. The device is lost then, unless the error is that a capture forbids the call for now.
    pub(super) fn finish(&self, core: &Core<D>) -> Outcome {
        let finish = || {
            let current = core.driver.enter()?;
            if self.owned {
                if self.is_captured(core, &current)? {
                    return Err(Failure::captured(captured()));
                }
                return core.driver.finish_stream(&current, &self.raw);
            }
            let streams = core.streams.read().all.clone();
            for stream in &streams {
                if stream.is_captured(core, &current)? {
                    return Err(Failure::captured(captured()));
                }
            }
            core.driver.finish(&current)
        };
        // Tried twice: a lost device gives its error again.
        finish().or_else(|failure| if failure.captured { Err(failure) } else { finish().map_err(|_| failure) })
    }

    /// Ends the stream, when everything with a token was reported. Waits for the rest, unless the stream is adopted.
    pub(super) fn end(&self, core: &Core<D>) {
        let finished = if self.owned { self.finish(core) } else { Ok(()) };
        let mut state = self.state.lock();
        state.completed = state.submitted;
        if let Err(error) = finished.map_err(|failure| core.lose(failure)) {
            let number = state.submitted;
            state.failure.get_or_insert((number, error));
        }
    }
}

impl<D: Driver> Core<D> {
    /// Refuses a range that is not wholly mapped, because the GPU could be lost by it. If the mapper was
    /// refused, the error is the mapper's.
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
