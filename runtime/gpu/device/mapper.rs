//! The mapper: a thread that puts frames behind pages by calls of the driver, ahead of the copies.
//!
//! A caller that maps pages notes which frame it wants where, and goes on. The mapper carries this out in runs, because
//! the driver's mapping calls cost by the call. An operation on pages that are not there yet waits in the same queue,
//! and so does everything behind it on its stream. When its turn comes the pages are there, or it fails with the reason
//! why they are not.
//!
//! A lone page that somebody waits for is mapped by the caller itself, if the mapper has nothing to do: waking the
//! mapper would cost more than sharing calls could save.
//!
//! # Invariants
//!
//! 1. Jobs are taken up in order, up to [`FRAMES_AT_ONCE`] frames together: first their mappings, then the operations
//!    among them. So an operation follows the mappings queued before it, and is not held up by many behind it. Where
//!    pages are so large that runs save nothing, it is held up by none behind it.
//! 2. `Stream::deferred` counts the operations of a stream that are queued or not yet handed on. It changes under the
//!    lock here. While it is not 0, later operations on that stream queue up too.
//! 3. These are done without the lock: calling the driver, submitting to streams, and telling the sink what was taken
//!    up or refused. The sink is told when the operation does not count as queued here any more.
//! 4. While a caller maps a page itself, the thread takes nothing up and does not end: an operation on that page may be
//!    queued meanwhile. Once it has `ended`, nothing is queued any more.
//! 5. The thread submits what waited for a page, so a full queue of that stream holds it up. The copies of the device's
//!    own streams end by themselves, and with them that wait. A caller who lets copies to absent pages wait on a stream
//!    of its own, and fills that stream's queue, holds up mappings until the queue has room.
//! 6. A thread on which the driver runs a closure does nothing itself: it queues the work, because the driver must not
//!    be called there.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};

use outcore::device::parts::closed;
use outcore::device::{FrameId, StreamId, StreamOp, Token};
use outcore::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::Core;
use super::frames::{Layout, Range, carry_out, refuse_all};
use super::stream::{BATCHED_BELOW, COPIES_AT_ONCE, IN_HOST_FUNCTION, Stream, copied};
use crate::driver::Driver;

/// How many frames change together: enough to form runs, and few enough that nobody waits long for the last.
const FRAMES_AT_ONCE: usize = 16;
/// From this size of a page on, in bytes, frames change together only up to the next operation. Calls for mappings cost
/// by the frame, so a run saves nothing of them; it lets copies follow each other without a gap, and a copy of 4 MiB
/// takes longer than a mapping already (75 us against 52 on an H100).
const RUNS_BELOW: u64 = 4 << 20;

pub(super) struct Deferred<D: Driver> {
    pub(super) id: StreamId,
    pub(super) stream: Arc<Stream<D>>,
    pub(super) op: StreamOp,
    pub(super) token: Option<Token>,
}

enum Job<D: Driver> {
    Frame(FrameId),
    Op(Deferred<D>),
    GiveBack(GiveBack),
}

/// Something that is given back because a closure has dropped its owner.
pub(super) enum GiveBack {
    /// A reservation: its base and its number of pages.
    Addresses(u64, u32),
    /// The memory of a frame, unless the frame is wanted again by then.
    Memory(FrameId),
}

/// The jobs that [`Mapper::next`] takes up together.
struct Batch<D: Driver> {
    frames: Vec<FrameId>,
    ops: Vec<Deferred<D>>,
    given_back: Vec<GiveBack>,
}

pub(super) struct State<D: Driver> {
    pub(super) layout: Layout<D>,
    jobs: VecDeque<Job<D>>,
    /// The thread is working on jobs it has taken up.
    at_work: bool,
    /// A caller is mapping a page itself.
    others_at_work: bool,
    closing: bool,
    /// The thread takes up no more jobs.
    ended: bool,
}

pub(super) struct Mapper<D: Driver> {
    state: Mutex<State<D>>,
    work: Condvar,
    /// Signalled when changes of frames have ended, or operations were handed on.
    settled: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl<D: Driver> Mapper<D> {
    pub(super) fn new(layout: Layout<D>) -> Self {
        let (jobs, at_work, others_at_work, closing, ended) = Default::default();
        let state = State { layout, jobs, at_work, others_at_work, closing, ended };
        Self { state: Mutex::new(state), work: Condvar::new(), settled: Condvar::new(), thread: Mutex::default() }
    }

    pub(super) fn start(core: &Arc<Core<D>>) -> Result<()> {
        let mapper = Arc::clone(core);
        let thread = thread::Builder::new()
            .name(format!("{}-map", D::NAME.to_lowercase()))
            .spawn(move || run(&mapper))
            .map_err(|cause| {
                Error::io("start the thread that maps device memory", cause)
                    .remedy("raise the thread limit (ulimit -u)")
            })?;
        *core.mapper.thread.lock() = Some(thread);
        Ok(())
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State<D>> {
        self.state.lock()
    }

    pub(super) fn get_mut(&mut self) -> &mut Layout<D> {
        &mut self.state.get_mut().layout
    }

    /// Wants a frame behind an address, and returns at once. With `here` it maps the frame itself, if nothing else is
    /// under way.
    ///
    /// # Errors
    /// If there is no such frame or page; if the device is closed or lost. Errors of the driver go to the operations
    /// that use the page.
    pub(super) fn map(&self, core: &Core<D>, frame: FrameId, address: u64, here: bool) -> Result<()> {
        core.healthy().inspect_err(|_| core.keep_still())?;
        let mut state = self.state.lock();
        if state.closing {
            return Err(closed(&core.name));
        }
        let moved = state.layout.place(frame, address)?;
        // Several frames at a time make runs, which are left to the thread.
        let idle = !state.at_work && !state.others_at_work && state.jobs.is_empty();
        if here && idle && !IN_HOST_FUNCTION.get() {
            state.others_at_work = true;
            let (mut state, outcome) = self.settle(core, state, &moved);
            state.others_at_work = false;
            let awaited = state.closing || !state.jobs.is_empty();
            drop(state);
            if awaited {
                self.work.notify_one();
            }
            note_refusal(outcome);
            return Ok(());
        }
        state.jobs.extend(moved.into_iter().map(Job::Frame));
        drop(state);
        self.work.notify_one();
        Ok(())
    }

    /// Carries out the wanted changes of these frames now. Nobody else changes them meanwhile.
    pub(super) fn settle<'a>(
        &'a self,
        core: &Core<D>,
        mut state: MutexGuard<'a, State<D>>,
        frames: &[FrameId],
    ) -> (MutexGuard<'a, State<D>>, Result<()>) {
        let mut frames = frames.to_vec();
        while !state.layout.can_begin(&mut frames) {
            self.settled.wait(&mut state);
        }
        let mut changes = state.layout.begin(&frames);
        if changes.is_empty() {
            return (state, Ok(()));
        }
        MutexGuard::unlocked(&mut state, || match core.enter() {
            Ok(current) => carry_out(&mut changes, core.page_size.bytes(), &core.driver, &current),
            Err(error) => refuse_all(&mut changes, &error),
        });
        let outcome = state.layout.end(changes, |failure| core.note(failure));
        self.settled.notify_all();
        (state, outcome)
    }

    /// Queues an operation that must wait for mappings, or that this thread must not submit. Returns the operation if
    /// it can be submitted at once, or if the mapper has ended.
    pub(super) fn defer(&self, deferred: Deferred<D>) -> Option<Deferred<D>> {
        let mut state = self.state.lock();
        if state.ended {
            return Some(deferred);
        }
        let waits = match &deferred.op {
            StreamOp::CopyIn { device, len, .. }
            | StreamOp::CopyOut { device, len, .. }
            | StreamOp::Zero { device, len } => matches!(state.layout.range(device.get(), *len), Range::Pending),
            StreamOp::Call(_) | StreamOp::Mark => false,
        };
        // If a change is under way, the thread looks at the queue once more before it ends.
        if !waits && deferred.stream.deferred.load(Ordering::Relaxed) == 0 && !IN_HOST_FUNCTION.get() {
            return Some(deferred);
        }
        deferred.stream.deferred.fetch_add(1, Ordering::Relaxed);
        state.jobs.push_back(Job::Op(deferred));
        drop(state);
        self.work.notify_one();
        None
    }

    /// Queues work that a closure may not do itself; `false` if the mapper has ended.
    ///
    /// # Errors
    /// If there is no such frame.
    pub(super) fn give_back_later(&self, what: GiveBack) -> Result<bool> {
        let mut state = self.state.lock();
        if state.ended {
            return Ok(false);
        }
        if let GiveBack::Memory(frame) = &what {
            // If the frame is behind an address again by then, it was wanted since.
            state.layout.vacate(*frame)?;
        }
        state.jobs.push_back(Job::GiveBack(what));
        drop(state);
        self.work.notify_one();
        Ok(true)
    }

    /// Waits until every operation that was submitted to the stream has been handed to it. That waits for mappings, but
    /// for no work of the device.
    pub(super) fn catch_up(&self, stream: &Stream<D>) {
        if stream.deferred.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut state = self.state.lock();
        while stream.deferred.load(Ordering::Relaxed) > 0 {
            self.settled.wait(&mut state);
        }
    }

    /// Accepts no more mappings; jobs that are queued are still done.
    pub(super) fn begin_close(&self) {
        self.state.lock().closing = true;
        self.work.notify_all();
    }

    /// Waits for the thread to end, after [`begin_close`](Self::begin_close).
    pub(super) fn join(&self) -> Result<()> {
        let thread = self.thread.lock().take();
        // The thread may drop the device's last owner, and cannot wait for itself.
        let foreign = thread.filter(|thread| thread.thread().id() != thread::current().id());
        if foreign.is_some_and(|thread| thread.join().is_err()) {
            return Err(Error::new(ErrorKind::Internal, "the thread that maps device memory panicked")
                .remedy("report this as a bug"));
        }
        Ok(())
    }

    /// The next jobs: frames, then operations, then memory to give back. `None` when the device closes and nothing is
    /// left.
    fn next(&self) -> Option<Batch<D>> {
        let mut state = self.state.lock();
        state.at_work = false;
        while state.jobs.is_empty() || state.others_at_work {
            if state.closing && !state.others_at_work {
                state.ended = true;
                return None;
            }
            self.work.wait(&mut state);
        }
        state.at_work = true;
        let (mut frames, mut ops, mut given_back) = (Vec::new(), Vec::new(), Vec::new());
        let one_by_one = state.layout.page() >= RUNS_BELOW;
        while frames.len() < FRAMES_AT_ONCE
            && !(one_by_one && !ops.is_empty() && matches!(state.jobs.front(), Some(Job::Frame(_))))
            && let Some(job) = state.jobs.pop_front()
        {
            match job {
                Job::Frame(frame) if frames.contains(&frame) => {}
                Job::Frame(frame) => frames.push(frame),
                Job::Op(op) => ops.push(op),
                Job::GiveBack(what) => given_back.push(what),
            }
        }
        // Also the operations right behind the last frame.
        while let Some(Job::Op(_)) = state.jobs.front() {
            if let Some(Job::Op(op)) = state.jobs.pop_front() {
                ops.push(op);
            }
        }
        Some(Batch { frames, ops, given_back })
    }
}

fn run<D: Driver>(core: &Arc<Core<D>>) {
    let mapper = &core.mapper;
    while let Some(Batch { frames, ops, given_back }) = mapper.next() {
        let (state, outcome) = mapper.settle(core, mapper.lock(), &frames);
        drop(state);
        note_refusal(outcome);
        hand_on(core, ops);
        for what in given_back {
            let outcome = match what {
                GiveBack::Addresses(base, pages) => core.release(base, pages),
                GiveBack::Memory(frame) => core.discard_unwanted(frame),
            };
            if let Err(error) = outcome {
                tracing::warn!(%error, "give back what a closure dropped");
            }
        }
    }
}

fn note_refusal(outcome: Result<()>) {
    if let Err(error) = outcome {
        // The operations that use the page get the error.
        tracing::debug!(%error, "device memory was not mapped");
    }
}

/// Hands operations to their streams, in order. Consecutive small copies on one stream go together. Tells the sink
/// which operations were taken up.
fn hand_on<D: Driver>(core: &Arc<Core<D>>, ops: Vec<Deferred<D>>) {
    let mut ops = ops.into_iter().peekable();
    while let Some(Deferred { id, stream, op, token }) = ops.next() {
        let mut group = vec![(op, token)];
        let is_small = |op: &StreamOp| (1..BATCHED_BELOW).contains(&copied(op));
        while group.len() < COPIES_AT_ONCE
            && is_small(&group[0].0)
            && let Some(next) = ops.next_if(|next| Arc::ptr_eq(&next.stream, &stream) && is_small(&next.op))
        {
            group.push((next.op, next.token));
        }
        let count = group.len();
        let handed_over = core.hand_over(id, &stream, group);
        let state = core.mapper.lock();
        stream.deferred.fetch_sub(count as u32, Ordering::Relaxed);
        drop(state);
        core.mapper.settled.notify_all();
        let taken_up = handed_over.unwrap_or_else(|refused| {
            core.refuse(refused);
            Vec::new()
        });
        for (token, end) in taken_up {
            // A panic here is the caller's bug. It must not end the mapper, because no page could be mapped any more.
            if catch_unwind(AssertUnwindSafe(|| core.sink.taken_up(token, end))).is_err() {
                tracing::error!("the receiver of completions panicked");
            }
        }
    }
}
