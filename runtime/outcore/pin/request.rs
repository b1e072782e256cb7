//! Requests for pins, which become guards.

#![allow(private_interfaces, reason = "the trait that names private types is sealed: nobody outside can call it")]

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::member::Walking;
use super::{Hold, Member, Runs, describe, runs_of, tensor_of};
use crate::device::EventId;
use crate::engine::ticket::Ticket;
use crate::engine::{Received, Waiting, event_at, may_wait, with_own_read};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{PageId, RequestId, Tier, WalkerId};
use crate::pager::pin::Words;
use crate::pager::{Granted, PageRun, Purpose, Terms};
use crate::segment::Segment;
use crate::shared::Shared;
use crate::store::OwnRead;
use crate::tensor::Tensor;

use smallvec::SmallVec;

/// The state of a request.
#[derive(Debug)]
enum Progress {
    Start,
    /// Boxed, so that requests for resident pages stay small.
    Waiting(Box<Submitted>),
    Done,
}

#[derive(Debug)]
struct Submitted {
    id: RequestId,
    ticket: Arc<Ticket>,
    since: Instant,
    page: Option<(PageId, Tier)>,
    runs: Runs,
    own: Option<OwnRead>,
}

/// The tensors to be pinned, and the kind of guard they get.
pub trait Target: super::sealed::Sealed + Unpin {
    #[doc(hidden)]
    type Guard;
    #[doc(hidden)]
    const PURPOSE: Purpose;
    #[doc(hidden)]
    fn tensors(&self) -> &[Tensor];
    #[doc(hidden)]
    fn check(&self) -> Result<()>;
    /// Makes a guard of pins. The pages' bytes are all there.
    #[doc(hidden)]
    fn guard(&self, runs: &[PageRun], hold: Hold) -> Self::Guard;
    /// Makes a guard of pins. Some pages' bytes are there only when `after` has happened, which matters only to guards
    /// that read on a stream. If this fails, it has given the pins back.
    #[doc(hidden)]
    fn guard_after(&self, runs: &[PageRun], hold: Hold, _after: Option<EventId>) -> Result<Self::Guard> {
        Ok(self.guard(runs, hold))
    }
    /// Gives back pins that nobody wants any more.
    #[doc(hidden)]
    fn give_back(&self, runs: &[PageRun], hold: Hold) {
        drop(self.guard(runs, hold));
    }
}

/// A request for pins: await it, or call [`wait`](Self::wait). Nothing happens before that. Dropping it withdraws the
/// request; fills in flight for it go on as prefetches.
#[must_use = "nothing is pinned until this is awaited or waited for"]
pub struct PinRequest<'a, T: Target> {
    target: T,
    scope: Option<&'a Arc<Member>>,
    /// The walker whose use this is. None if a tensor is of another runtime than was asked to pin it: the request is
    /// refused then, and numbers of that runtime's scopes and walkers mean others here.
    walker: Option<WalkerId>,
    /// Whether it may use the frames that are kept for requests which can never be refused.
    never_refused: bool,
    progress: Progress,
}

impl<T: Target> fmt::Debug for PinRequest<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let purpose = T::PURPOSE;
        f.debug_struct("PinRequest").field("of", &describe(self.target.tensors())).field("for", &purpose).finish()
    }
}

impl<'a, T: Target> PinRequest<'a, T> {
    #[inline]
    pub(crate) fn new(target: T, runtime: &Arc<Shared>) -> Self {
        Self::of(target, runtime, None, WalkerId::DEFAULT)
    }

    #[inline]
    pub(super) fn of_walker(target: T, walking: &Walking) -> Self {
        Self::of(target, &walking.shared, None, walking.id)
    }

    pub(crate) fn of_scope(target: T, scope: &'a Arc<Member>) -> Self {
        Self::of(target, &scope.shared, Some(scope), scope.walker_id())
    }

    #[inline]
    fn of(target: T, runtime: &Arc<Shared>, scope: Option<&'a Arc<Member>>, walker: WalkerId) -> Self {
        let ours = target.tensors().iter().all(|tensor| tensor.is_of(runtime));
        Self { target, scope, walker: ours.then_some(walker), never_refused: false, progress: Progress::Start }
    }

    /// For the pages of faults: it may use the frames that [are kept](crate::Runtime::keep_frames) for these, and
    /// passes all requests that may not.
    #[doc(hidden)]
    pub fn never_refused(mut self) -> Self {
        self.never_refused = true;
        self
    }

    /// Has the device show pages that it hides: they are pinned now.
    #[inline]
    fn show(&self, runs: &[PageRun]) {
        if self.segment().is_some_and(|segment| segment.shared.engine.hides_pages) {
            self.show_all(runs);
        }
    }

    #[cold]
    fn show_all(&self, runs: &[PageRun]) {
        for (at, run) in runs.iter().enumerate() {
            if let Some(tensor) = tensor_of(self.target.tensors(), at, run) {
                let segment = &tensor.segment;
                let first = segment.base.offset(run.first.index() as u64 * segment.page_size.bytes());
                segment.shared.engine.device.pinned(first, run.count);
            }
        }
    }

    #[inline]
    fn hold(&self, spent: u32) -> Hold {
        Hold { scope: self.scope.cloned(), spent }
    }

    /// The segment of one page to be pinned, if there is a page.
    fn segment(&self) -> Option<&Arc<Segment>> {
        self.target.tensors().iter().find(|tensor| tensor.len > 0).map(|tensor| &tensor.segment)
    }

    /// The guard, if all pages are resident and none is closed.
    //
    // Inlined with its callees, so that the guard is built in the caller's place: each move of a guard through memory
    // costs as much as an atomic operation.
    #[inline(always)]
    fn resident(&self) -> Option<T::Guard> {
        let (Progress::Start, Some(walker)) = (&self.progress, self.walker) else { return None };
        let [tensor] = self.target.tensors() else { return self.resident_set(walker) };
        if tensor.len == 0 || self.target.check().is_err() {
            return None;
        }
        let run = tensor.run();
        let segment = &tensor.segment;
        let engine = &segment.shared.engine;
        let pinned = match (self.scope, segment.words_of(run)) {
            (None, [word]) => {
                let page = PageId { segment: run.segment, index: run.first };
                engine.try_pin_page(page, word, T::PURPOSE, walker)
            }
            (None, words) => engine.try_pin(&[(run, words)], T::PURPOSE, walker),
            (Some(scope), words) => scope.try_pin(engine, &[(run, words)], &[run], T::PURPOSE),
        };
        if pinned && engine.hides_pages {
            self.show_all(&[run]);
        }
        pinned.then(|| self.target.guard(&[run], self.hold(0)))
    }

    /// As [`resident`](Self::resident), for a set.
    #[inline(never)]
    fn resident_set(&self, walker: WalkerId) -> Option<T::Guard> {
        let tensors = self.target.tensors();
        let segment = self.segment()?;
        if self.target.check().is_err() {
            return None;
        }
        let runs = runs_of(tensors);
        let of = |(at, run): (usize, &PageRun)| Some((*run, tensor_of(tensors, at, run)?.segment.words_of(*run)));
        let words: SmallVec<[Words<'_>; 8]> = runs.iter().enumerate().filter_map(of).collect();
        let engine = &segment.shared.engine;
        let pinned = match self.scope {
            None => engine.try_pin(&words, T::PURPOSE, walker),
            Some(scope) => scope.try_pin(engine, &words, &runs, T::PURPOSE),
        };
        if pinned && engine.hides_pages {
            self.show_all(&runs);
        }
        pinned.then(|| self.target.guard(&runs, self.hold(0)))
    }

    /// Starts a request for which [`resident`](Self::resident) gave nothing. Returns the guard if everything was there.
    /// `waits` is true if the caller does nothing else on this thread until the result is there.
    fn start(&mut self, waits: bool) -> Result<Option<T::Guard>> {
        self.target.check()?;
        let walker = self.walker.ok_or_else(|| self.of_another_runtime())?;
        let mut runs = runs_of(self.target.tensors());
        if runs.is_empty() {
            return Ok(Some(self.target.guard(&runs, self.hold(0))));
        }
        let joined = PageRun::join(&mut runs);
        runs.truncate(joined);
        self.submit(runs, walker, waits)
    }

    #[cold]
    fn of_another_runtime(&self) -> Error {
        let what = match self.target.tensors() {
            [tensor] => format!("{tensor:?} belongs to another runtime than the one that was asked to pin it"),
            _ => "the tensors of a set belong to another runtime than the one that was asked to pin them".to_owned(),
        };
        Error::new(ErrorKind::InvalidArgument, what)
            .remedy("pin with the runtime that opened or allocated the tensors, or with a scope or a walker of it")
    }

    /// Submits the request under the latch.
    fn submit(&mut self, runs: Runs, walker: WalkerId, waits: bool) -> Result<Option<T::Guard>> {
        let Some(segment) = self.segment() else { return Err(ended()) };
        let engine = &segment.shared.engine;
        let since = Instant::now();
        let (scope, never_refused) = (self.scope.map(|scope| scope.id), self.never_refused);
        let terms = Terms { purpose: T::PURPOSE, scope, walker, never_refused, ..Terms::default() };
        let submit = || engine.submit(&runs, terms);
        let (received, own) = if waits { with_own_read(submit) } else { (submit(), None) };
        match received? {
            Received::Ready(Granted { after, spent, .. }) => {
                self.show(&runs);
                self.target.guard_after(&runs, self.hold(spent), after.map(event_at)).map(Some)
            }
            Received::Waiting(Waiting { id, ticket, page }) => {
                self.progress = Progress::Waiting(Box::new(Submitted { id, ticket, since, page, runs, own }));
                Ok(None)
            }
        }
    }

    fn finish(&mut self, result: Result<Granted>) -> Result<T::Guard> {
        let Progress::Waiting(submitted) = std::mem::replace(&mut self.progress, Progress::Done) else {
            return Err(ended());
        };
        let Submitted { since, page, runs, .. } = *submitted;
        let Granted { cause, after, spent } = result?;
        if let Some(segment) = self.segment() {
            segment.shared.engine.stalled(cause, page, since, || describe(self.target.tensors()));
        }
        self.show(&runs);
        self.target.guard_after(&runs, self.hold(spent), after.map(event_at))
    }

    /// Blocks until the pages are pinned. A request that was already polled keeps its place in line.
    ///
    /// # Errors
    /// - [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if the pages cannot be resident together, or are more than the
    ///   scope was opened for
    /// - [`Busy`](ErrorKind::Busy) if its [scope](crate::Scope) holds guards, and others have the pages or the frames,
    ///   or the scope's own guards exclude this one
    /// - the error of a fill that failed
    /// - [`TimedOut`](ErrorKind::TimedOut) if a fill takes longer than the [runtime
    ///   waits](crate::RuntimeBuilder::io_timeout)
    /// - [`Poisoned`](ErrorKind::Poisoned) if a page's bytes were lost
    /// - [`Closed`](ErrorKind::Closed)
    /// - [`InvalidArgument`](ErrorKind::InvalidArgument) for a tensor of another runtime than was asked to pin it
    /// - [`InvalidArgument`](ErrorKind::InvalidArgument) if it would block in a waker or in a [closure on a
    ///   stream](crate::ComputeStream::call): the pages may be waiting for the threads that run these
    #[inline(always)]
    pub fn wait(mut self) -> Result<T::Guard> {
        match self.resident() {
            Some(guard) => Ok(guard),
            None => self.wait_until(None)?.ok_or_else(ended),
        }
    }

    /// Blocks until the pages are pinned, for at most `limit`; `None` if it passes. Fills in flight for them then go on
    /// as prefetches. Resident pages are pinned whatever the limit is; with a limit of zero no others are.
    ///
    /// This is for callers who hold guards outside of a [scope](crate::Scope) for which others may wait. Such a wait
    /// may never end, and the runtime cannot detect that.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    pub fn wait_timeout(mut self, limit: Duration) -> Result<Option<T::Guard>> {
        match self.resident() {
            Some(guard) => Ok(Some(guard)),
            // A limit beyond the clock's range is no limit.
            None => self.wait_until(Instant::now().checked_add(limit)),
        }
    }

    #[inline(never)]
    fn wait_until(&mut self, deadline: Option<Instant>) -> Result<Option<T::Guard>> {
        if let Progress::Start = self.progress
            // A caller with a deadline carries out no read itself, because it could not leave the read.
            && let Some(guard) = self.start(deadline.is_none())?
        {
            self.progress = Progress::Done;
            return Ok(Some(guard));
        }
        let Progress::Waiting(submitted) = &mut self.progress else { return Err(ended()) };
        let (ticket, own) = (submitted.ticket.clone(), submitted.own.take());
        // In a child by `fork` no result comes, and a thread that the child does not have may hold the ticket's lock.
        self.segment().map_or(Ok(()), |segment| segment.shared.engine.usable())?;
        may_wait("a pin")?;
        if let Some(own) = own {
            own.run();
        }
        // Without a result the request is dropped, which withdraws it.
        ticket.wait(deadline).map(|result| self.finish(result)).transpose()
    }
}

fn ended() -> Error {
    Error::new(ErrorKind::InvalidArgument, "a pin request was polled after it ended")
        .remedy("make another one: each becomes one guard, or one error")
}

impl<T: Target> Future for PinRequest<'_, T> {
    type Output = Result<T::Guard>;

    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.resident() {
            Some(guard) => {
                self.progress = Progress::Done;
                Poll::Ready(Ok(guard))
            }
            None => self.poll_slowly(cx),
        }
    }
}

impl<T: Target> PinRequest<'_, T> {
    #[inline(never)]
    fn poll_slowly(&mut self, cx: &mut Context<'_>) -> Poll<Result<T::Guard>> {
        if let Progress::Start = self.progress {
            match self.start(false) {
                Ok(Some(guard)) => {
                    self.progress = Progress::Done;
                    return Poll::Ready(Ok(guard));
                }
                Ok(None) => {}
                Err(error) => {
                    self.progress = Progress::Done;
                    return Poll::Ready(Err(error));
                }
            }
        }
        let Progress::Waiting(submitted) = &self.progress else { return Poll::Ready(Err(ended())) };
        // In a child by `fork` a thread that the child does not have may hold the ticket's lock.
        self.segment().map_or(Ok(()), |segment| segment.shared.engine.usable())?;
        match submitted.ticket.clone().poll(cx.waker()) {
            Poll::Ready(result) => Poll::Ready(self.finish(result)),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<T: Target> Drop for PinRequest<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if let Progress::Waiting(_) = self.progress {
            self.give_up();
        }
    }
}

impl<T: Target> PinRequest<'_, T> {
    #[cold]
    fn give_up(&mut self) {
        let Progress::Waiting(submitted) = std::mem::replace(&mut self.progress, Progress::Done) else { return };
        let Submitted { id, ticket, runs, .. } = *submitted;
        let Some(segment) = self.segment() else { return };
        // The pins may have been granted after all.
        if let Some(Ok(Granted { spent, .. })) = segment.shared.engine.cancel(id, &ticket) {
            self.target.give_back(&runs, self.hold(spent));
        }
    }
}
