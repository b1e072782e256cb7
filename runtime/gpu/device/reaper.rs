//! The reaper: a thread that learns for every stream which work has ended, and reports it.
//!
//! # Why it polls
//!
//! Completions must come without delay from whichever stream is first, and must come when the device is lost. A thread
//! that sleeps inside the driver learns of one event only, so every stream would need a thread. And the driver does not
//! call the functions behind work once the device is lost. So one thread polls the first event of every busy stream:
//! without a pause for a moment, then after naps.
//!
//! A nap is as long as the work is [foreseen](super::pace) to take: a copy by its bytes, anything else as long as the
//! last. So each of several consecutive copies is polled about once. After that a nap is a fraction of the time that
//! the work has taken so far. So its end is seen late by no more than that fraction, and long kernels cost little. Each
//! stream has naps of its own: short work on one stream does not make the thread poll the copies on another. Work that
//! ends within one nap is reported together. While nothing is submitted the thread is parked.
//!
//! # Invariants
//!
//! 1. A stream with items is in the inbox or watched, once; `watched` in its state says so. `watched` is set with the
//!    stream's state locked, when the stream goes to the inbox. The reaper clears it when it finds no item.
//! 2. The thread ends when the device is closed, no submission is [under way](Reaper::submitting), and no stream has
//!    items: no stream gets any more then.
//! 3. The sink is called with no lock held, and the driver [left](Driver::enter).
//! 4. The thread takes no lock that anybody holds over a call that puts something on a stream, and makes no such call
//!    on a stream that others use. Those wait while a queue of the driver's is full, which may last as long as the work
//!    in it, and the reports of all other streams must go on. If another event has to be recorded, a thread of its own
//!    records it; the stream is polled again after naps meanwhile.
//! 5. The sink may submit the fills that a report makes possible. So the thread may wait while the queue of the fills'
//!    stream is full. Copies on that stream wait for no stream of others', so they end by themselves, and with them
//!    that wait. A receiver that drops the last owner of an adopted stream, or a pin on a stream, may wait for room in
//!    that stream's queue.
//!
//! # Failure
//!
//! If the driver gives an error in place of an answer, the reaper waits for the event. If there is none, another one is
//! recorded; where that is not possible it waits for everything on the stream. If the wait fails too the device is
//! lost, and the work on the stream ends with the first error. (While the process [exits](super) nothing is reported at
//! first.) But if something fails because a graph is being captured, which says nothing about the device, the reaper
//! tries again after a nap, and waits for nothing meanwhile: that would spoil the capture.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use outcore::device::Completion;
use outcore::device::parts::{BATCH_OPERATIONS_MAX, report};
use outcore::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

use super::Core;
use super::stream::{First, Stream, captured};
use crate::driver::{Driver, Failure, Outcome};

/// How long it polls without a nap where work ends soon: about the cost of a nap where timers are cheap.
const RESTLESS: Duration = Duration::from_micros(3);
/// The shortest nap: half of the time to copy a page of 2 MiB. On a virtual machine it may take twice as long.
const NAP_MIN: Duration = Duration::from_micros(20);
/// A stream that is due so soon is polled with another: cheaper than another nap.
const SOON: Duration = Duration::from_micros(5);
/// Work that takes longer than foreseen is polled after naps of this fraction (one eighth) of the time it has taken,
const NAP_PARTS: u32 = 8;
/// but no longer than this: so a kernel of 10 ms is seen to end at most this late.
const NAP_MAX: Duration = Duration::from_millis(1);

struct State<D: Driver> {
    /// Streams that the thread is to watch.
    inbox: Vec<Arc<Stream<D>>>,
    closing: bool,
}

pub(super) struct Reaper<D: Driver> {
    /// Submissions that may still queue items.
    submitting: AtomicUsize,
    /// As in the state, for submitters.
    closing: AtomicBool,
    state: Mutex<State<D>>,
    work: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl<D: Driver> Reaper<D> {
    pub(super) fn new() -> Self {
        let state = State { inbox: Vec::new(), closing: false };
        let (submitting, closing) = Default::default();
        Self { submitting, closing, state: Mutex::new(state), work: Condvar::new(), thread: Mutex::default() }
    }

    pub(super) fn start(core: &Arc<Core<D>>) -> Result<()> {
        let (watched, done, markers) = Default::default();
        let worker = Worker { watched, done, markers, core: Arc::clone(core) };
        let thread = thread::Builder::new()
            .name(format!("{}-reap", D::NAME.to_lowercase()))
            .spawn(move || worker.run())
            .map_err(|cause| {
                Error::io("start the thread that reports what a GPU has done", cause)
                    .remedy("raise the thread limit (ulimit -u)")
            })?;
        *core.reaper.thread.lock() = Some(thread);
        Ok(())
    }

    /// Keeps the thread from ending while the returned value lives. Whoever submits has one from before it finds its
    /// stream open until its items are queued.
    pub(super) fn submitting(&self) -> Submitting<'_, D> {
        self.submitting.fetch_add(1, Ordering::SeqCst);
        Submitting(self)
    }

    /// Whether the thread ends once nothing is left. While it is not closing, it sees the items of any submission that
    /// was counted before this question.
    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Adds a stream that has its first item and is locked. Call [`wake`](Self::wake) after unlocking it.
    pub(super) fn watch(&self, stream: Arc<Stream<D>>) {
        self.state.lock().inbox.push(stream);
    }

    pub(super) fn wake(&self) {
        self.work.notify_one();
    }

    /// Lets the thread end when all work on the streams has been reported. The streams accept no more by now.
    pub(super) fn begin_close(&self) {
        let mut state = self.state.lock();
        state.closing = true;
        self.closing.store(true, Ordering::SeqCst);
        drop(state);
        self.work.notify_one();
    }

    /// Waits for the thread to end, after [`begin_close`](Self::begin_close).
    pub(super) fn join(&self) -> Result<()> {
        let thread = self.thread.lock().take();
        // A receiver of completions may hold the device's last owner. The thread cannot wait for itself, and ends soon.
        let foreign = thread.filter(|thread| thread.thread().id() != thread::current().id());
        if foreign.is_some_and(|thread| thread.join().is_err()) {
            return Err(Error::new(ErrorKind::Internal, "the thread that reports what a GPU has done panicked")
                .remedy("report this as a bug"));
        }
        Ok(())
    }
}

/// A submission that is under way.
#[must_use]
pub(super) struct Submitting<'a, D: Driver>(&'a Reaper<D>);

impl<D: Driver> Drop for Submitting<'_, D> {
    fn drop(&mut self) {
        let Self(reaper) = self;
        // The count goes down before `closing` is read, and the thread reads them in the other order: one of the two
        // sees what the other has written.
        if reaper.submitting.fetch_sub(1, Ordering::SeqCst) == 1 && reaper.closing.load(Ordering::SeqCst) {
            drop(reaper.state.lock());
            reaper.work.notify_one();
        }
    }
}

/// A stream with items.
struct Watched<D: Driver> {
    stream: Arc<Stream<D>>,
    /// When its first item became the first.
    since: Instant,
    /// Whether that item was found not to have ended.
    seen_running: bool,
    /// When to poll it next.
    due: Instant,
    /// The thread that puts another event on it.
    marker: Option<Marker>,
}

/// A thread that [marks a stream again](Stream::mark_again), because the driver's call may wait for room in a queue.
type Marker = JoinHandle<Outcome<bool>>;

/// What is left when a stream has been polled.
enum Left {
    Nothing,
    /// Perhaps something that has ended.
    More,
    /// Work that copies this number of bytes.
    Running(u64),
}

impl<D: Driver> Watched<D> {
    fn new(stream: Arc<Stream<D>>, now: Instant) -> Self {
        Self { stream, since: now, seen_running: false, due: now, marker: None }
    }

    /// How long to wait before polling it again, while work of this number of bytes runs.
    fn nap(&self, now: Instant, bytes: u64) -> Duration {
        let (taken, foreseen) = (now - self.since, self.stream.pace.foresee(bytes));
        if taken < RESTLESS && foreseen < NAP_MIN {
            return Duration::ZERO;
        }
        foreseen.saturating_sub(taken).max((taken / NAP_PARTS).clamp(NAP_MIN, NAP_MAX))
    }
}

struct Worker<D: Driver> {
    /// Before the core in the order of drops: if the core goes with it, it destroys the streams that nobody else holds.
    watched: Vec<Watched<D>>,
    done: Vec<Completion>,
    /// Markers of streams that are not watched any more.
    markers: Vec<Marker>,
    core: Arc<Core<D>>,
}

impl<D: Driver> Worker<D> {
    fn run(mut self) {
        exact_timers();
        let core = Arc::clone(&self.core);
        // The driver is entered while there is anything to poll, but not while others' code runs, which may enter it
        // for another GPU.
        let mut current = None;
        while self.rest(&mut current) {
            self.ask(&core, &mut current);
            if !self.done.is_empty() {
                drop(current.take());
                core.keep_still();
                report(&*core.sink, &mut self.done);
            }
        }
        let streams = core.streams.read().all.clone();
        for stream in streams {
            stream.end(&core);
        }
        // What they were to mark has ended, so they find nothing to do.
        for marker in self.markers {
            let _ = marker.join();
        }
    }

    /// Waits until there may be something to learn; `false` when there never will be. Leaves the driver if that may
    /// take long.
    fn rest(&mut self, current: &mut Option<D::Current<'_>>) -> bool {
        let now = Instant::now();
        let nap = self.watched.iter().map(|watched| watched.due.saturating_duration_since(now)).min();
        let reaper = &self.core.reaper;
        let mut state = reaper.state.lock();
        match nap {
            _ if !state.inbox.is_empty() => {}
            Some(Duration::ZERO) => std::hint::spin_loop(),
            // Streams that are watched already do not end the nap.
            Some(nap) => drop(reaper.work.wait_for(&mut state, nap)),
            None => {
                drop(current.take());
                while state.inbox.is_empty() {
                    if state.closing && reaper.submitting.load(Ordering::SeqCst) == 0 {
                        return false;
                    }
                    reaper.work.wait(&mut state);
                }
            }
        }
        let now = Instant::now();
        self.watched.extend(state.inbox.drain(..).map(|stream| Watched::new(stream, now)));
        true
    }

    /// Takes out the items that have ended, of every stream that is due.
    fn ask<'a>(&mut self, core: &'a Arc<Core<D>>, current: &mut Option<D::Current<'a>>) {
        let Self { watched, done, markers, .. } = self;
        let now = Instant::now();
        watched.retain_mut(|watched| {
            if watched.due.saturating_duration_since(now) > SOON {
                return true;
            }
            let stream = Arc::clone(&watched.stream);
            let (mut ended, mut ended_bytes) = (0, 0);
            let left = loop {
                match stream.first() {
                    First::Nothing => break Left::Nothing,
                    _ if ended == BATCH_OPERATIONS_MAX as u32 => break Left::More,
                    First::Unqueued => {}
                    First::Event(event, bytes) => {
                        let happened = happened(core, current, &event);
                        if let Err(failure) = &happened {
                            tracing::debug!(error = %failure.error);
                        }
                        match happened {
                            Err(failure) if failure.captured => {
                                stream.unmark(core, event);
                                continue;
                            }
                            Err(_) => wait_for(core, &stream, &event),
                            Ok(_) => {}
                        }
                        // The stream may have given it up meanwhile.
                        core.give_back(event);
                        if let Ok(false) = happened {
                            break Left::Running(bytes);
                        }
                        ended_bytes += bytes;
                    }
                    First::Unmarked => match mark_again(core, &stream, &mut watched.marker) {
                        Ok(Marking::UnderWay) => break Left::Running(0),
                        Ok(Marking::Done) => continue,
                        Err(failure) if failure.captured => break Left::Running(0),
                        Ok(Marking::NotPossible) | Err(_) => match stream.finish(core) {
                            Ok(()) => {}
                            Err(failure) if failure.captured => break Left::Running(0),
                            Err(failure) => drop(core.lose(failure)),
                        },
                    },
                }
                stream.retire(core, done);
                ended += 1;
            };
            let now = Instant::now();
            if ended > 0 {
                stream.pace.learn(now - watched.since, ended, ended_bytes, watched.seen_running);
                (watched.since, watched.seen_running) = (now, false);
            }
            watched.due = now;
            if let Left::Running(bytes) = left {
                watched.seen_running = true;
                watched.due += watched.nap(now, bytes);
            }
            let is_left = !matches!(left, Left::Nothing);
            if !is_left && let Some(marker) = watched.marker.take() {
                markers.retain(|marker| !marker.is_finished());
                markers.push(marker);
            }
            is_left
        });
    }
}

/// Lets timers of the calling thread fire on time instead of up to 50 us late.
fn exact_timers() {
    // Where it is refused, naps are longer.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
}

fn happened<'a, D: Driver>(core: &'a Core<D>, current: &mut Option<D::Current<'a>>, event: &D::Event) -> Outcome<bool> {
    let current = match current {
        Some(current) => current,
        None => current.insert(core.driver.enter()?),
    };
    core.driver.happened(current, event)
}

enum Marking {
    /// A thread is about to put an event on the stream.
    UnderWay,
    Done,
    /// The stream itself has to be waited for.
    NotPossible,
}

/// [Marks a stream again](Stream::mark_again) on a thread of its own (invariant 4), one for a stream at a time.
///
/// # Errors
/// Errors of the driver; that the stream is being captured; that there is no thread.
fn mark_again<D: Driver>(
    core: &Arc<Core<D>>,
    stream: &Arc<Stream<D>>,
    marker: &mut Option<Marker>,
) -> Outcome<Marking> {
    if let Some(running) = marker.take_if(|marker| marker.is_finished()) {
        let panicked = |_| Error::new(ErrorKind::Internal, "a thread that records an event panicked").into();
        let marked = running.join().map_err(panicked).flatten()?;
        return Ok(if marked { Marking::Done } else { Marking::NotPossible });
    }
    if marker.is_some() {
        return Ok(Marking::UnderWay);
    }
    if !stream.can_mark_again() {
        return Ok(Marking::NotPossible);
    }
    // A capture may last, and meanwhile a thread could do nothing.
    let current = core.driver.enter()?;
    if stream.is_captured(core, &current)? {
        return Err(Failure::captured(captured()));
    }
    drop(current);
    let (for_core, for_stream) = (Arc::clone(core), Arc::clone(stream));
    let started = thread::Builder::new()
        .name(format!("{}-mark", D::NAME.to_lowercase()))
        .spawn(move || for_stream.mark_again(&for_core))
        .map_err(|cause| Error::io("start a thread that records an event", cause))?;
    *marker = Some(started);
    Ok(Marking::UnderWay)
}

/// Waits for an event that cannot be polled. If that fails too the device is lost.
fn wait_for<D: Driver>(core: &Core<D>, stream: &Stream<D>, event: &D::Event) {
    let outcome = match core.driver.enter() {
        Ok(current) => core.driver.finish_event(&current, event),
        Err(failure) => Err(failure),
    };
    if let Err(failure) = outcome {
        // The device may be lost, or only this call may have failed. Before memory is given back, make sure that
        // nothing uses it any more, as far as the driver still answers.
        core.lose(failure);
        let _ = stream.finish(core);
    }
}
