//! Requests for pins, which become guards.

#![allow(private_interfaces, reason = "the trait that names private types is sealed: nobody outside can call it")]

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::device::{DevicePin, StreamPin};
use super::guard::{Complete, Guard};
use super::scope::Scope;
use super::walker::Walker;
use super::{Hold, Member, Read, Runs, describe, runs_of, tensor_of};
use crate::compute::ComputeStream;
use crate::engine::ticket::Ticket;
use crate::engine::{Own, Received, Waiting, event_at, may_wait};
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

/// A request for pins: await it, or call [`wait`](Self::wait). Nothing happens before that. Dropping it withdraws the
/// request; fills in flight for it go on as prefetches.
#[must_use = "nothing is pinned until this is awaited or waited for"]
pub struct PinRequest<'a, G: Guard> {
    of: G::Of<'a>,
    scope: Option<&'a Arc<Member>>,
    asks: Asks,
    progress: Progress,
}

/// For whom a request asks, and how. One word: each verb of a request makes another one of it, and a processor that
/// loads in one piece what was just stored in several waits for the stores.
#[derive(Clone, Copy)]
struct Asks(u64);

impl Asks {
    /// The tensors, the scope and the walker are not all of one runtime. The bits below are the number of the walker.
    const STRANGE: u64 = 1 << 32;
    /// It may use the frames that are kept for requests which can never be refused.
    const NEVER_REFUSED: u64 = 1 << 33;
    /// It is refused if it asks to write: others share the tensors.
    const READ_ONLY: u64 = 1 << 34;

    #[inline]
    fn has(self, what: u64) -> bool {
        self.0 & what != 0
    }

    /// The walker whose use this is. None if the tensors, the scope and the walker are not all of the runtime that was
    /// asked: the request is refused then, and numbers of another runtime's scopes and walkers mean others here.
    #[inline]
    fn walker(self) -> Option<WalkerId> {
        (!self.has(Self::STRANGE)).then_some(WalkerId::new(self.0 as u32))
    }

    #[inline]
    fn by(self, walker: Option<WalkerId>) -> Self {
        let of = walker.map_or(Self::STRANGE, |walker| u64::from(walker.get()));
        Self(self.0 & (Self::NEVER_REFUSED | Self::READ_ONLY) | of)
    }
}

impl<G: Guard> fmt::Debug for PinRequest<'_, G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let purpose = G::PURPOSE;
        f.debug_struct("PinRequest").field("of", &describe(self.tensors())).field("for", &purpose).finish()
    }
}

impl<'a, G: Guard> PinRequest<'a, G> {
    #[inline]
    pub(crate) fn new(of: G::Of<'a>, runtime: &Arc<Shared>) -> Self {
        let ours = G::tensors(of).iter().all(|tensor| tensor.is_of(runtime));
        let asks = Asks(0).by(ours.then_some(WalkerId::DEFAULT));
        Self { of, scope: None, asks, progress: Progress::Start }
    }

    /// A request for a guard of another kind, on the same terms. This one is withdrawn when it is dropped.
    #[inline]
    fn with<H: Guard>(&self, of: H::Of<'a>) -> PinRequest<'a, H> {
        PinRequest { of, scope: self.scope, asks: self.asks, progress: Progress::Start }
    }

    #[inline]
    fn tensors(&self) -> &[Tensor] {
        G::tensors(self.of)
    }

    /// The walker of the request, unless its tensors are of another runtime than `other`.
    #[inline]
    fn walker_in(&self, other: &Arc<Shared>) -> Option<WalkerId> {
        self.asks.walker().filter(|_| self.tensors().first().is_none_or(|tensor| tensor.is_of(other)))
    }

    /// Pins in a scope, for a task that holds guards and asks for more: see [`Scope`]. A scope of another runtime is
    /// [refused](ErrorKind::InvalidArgument).
    #[inline]
    pub fn in_scope(self, scope: &'a Scope) -> Self {
        let mut request = self.with(self.of);
        request.asks = self.asks.by(self.walker_in(&scope.member.shared));
        request.scope = Some(&scope.member);
        request
    }

    /// The use is one of a [`Walker`]'s, or of no walker's if that one has ended by then. A walker of another runtime
    /// is [refused](ErrorKind::InvalidArgument).
    #[inline]
    pub fn of(self, walker: &Walker) -> Self {
        let mut request = self.with(self.of);
        request.asks = self.asks.by(self.walker_in(&walker.walking.shared).map(|_| walker.id()));
        request
    }

    /// For the pages of faults: it may use the frames that [are kept](crate::Runtime::keep_frames) for these, and
    /// passes all requests that may not.
    #[doc(hidden)]
    pub fn never_refused(mut self) -> Self {
        self.asks.0 |= Asks::NEVER_REFUSED;
        self
    }

    /// For tensors that others share: a request to write, made of this one, is refused.
    #[doc(hidden)]
    pub fn read_only(mut self) -> Self {
        self.asks.0 |= Asks::READ_ONLY;
        self
    }

    /// # Errors
    /// As for [`Guard::check`]; `InvalidArgument` to write what may only be read.
    #[inline]
    fn check(&self) -> Result<()> {
        if G::PURPOSE == Purpose::Write && self.asks.has(Asks::READ_ONLY) {
            Err(self.shared())
        } else {
            G::check(self.of)
        }
    }

    #[cold]
    fn shared(&self) -> Error {
        let message = format!("{} may be read by others too, and was given to be read", describe(self.tensors()));
        Error::new(ErrorKind::InvalidArgument, message).remedy("ask for it to be written where it comes from")
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
            if let Some(tensor) = tensor_of(self.tensors(), at, run) {
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
        self.tensors().iter().find(|tensor| tensor.len > 0).map(|tensor| &tensor.segment)
    }

    /// The guard, if all pages are resident and none is closed.
    //
    // Inlined with its callees, so that the guard is built in the caller's place: each move of a guard through memory
    // costs as much as an atomic operation.
    #[inline(always)]
    fn resident(&self) -> Option<G> {
        let (Progress::Start, Some(walker)) = (&self.progress, self.asks.walker()) else { return None };
        let [tensor] = self.tensors() else { return self.resident_set(walker) };
        if tensor.len == 0 || self.check().is_err() {
            return None;
        }
        let run = tensor.run();
        let segment = &tensor.segment;
        let engine = &segment.shared.engine;
        let pinned = match (self.scope, segment.words_of(run)) {
            (None, [word]) => {
                let page = PageId { segment: run.segment, index: run.first };
                engine.try_pin_page(page, word, G::PURPOSE, walker)
            }
            (None, words) => engine.try_pin(&[(run, words)], G::PURPOSE, walker),
            (Some(scope), words) => scope.try_pin(engine, &[(run, words)], &[run], (G::PURPOSE, walker)),
        };
        if pinned && engine.hides_pages {
            self.show_all(&[run]);
        }
        pinned.then(|| G::new(self.of, &[run], self.hold(0)))
    }

    /// As [`resident`](Self::resident), for a set.
    #[inline(never)]
    fn resident_set(&self, walker: WalkerId) -> Option<G> {
        let tensors = self.tensors();
        let segment = self.segment()?;
        if self.check().is_err() {
            return None;
        }
        let runs = runs_of(tensors);
        let of = |(at, run): (usize, &PageRun)| Some((*run, tensor_of(tensors, at, run)?.segment.words_of(*run)));
        let words: SmallVec<[Words<'_>; 8]> = runs.iter().enumerate().filter_map(of).collect();
        let engine = &segment.shared.engine;
        let pinned = match self.scope {
            None => engine.try_pin(&words, G::PURPOSE, walker),
            Some(scope) => scope.try_pin(engine, &words, &runs, (G::PURPOSE, walker)),
        };
        if pinned && engine.hides_pages {
            self.show_all(&runs);
        }
        pinned.then(|| G::new(self.of, &runs, self.hold(0)))
    }

    /// Starts a request for which [`resident`](Self::resident) gave nothing. Returns the guard if everything was there.
    /// `waits` is true if the caller does nothing else on this thread until the result is there.
    fn start(&mut self, waits: bool) -> Result<Option<G>> {
        self.check()?;
        let walker = self.asks.walker().ok_or_else(|| self.of_another_runtime())?;
        let mut runs = runs_of(self.tensors());
        if runs.is_empty() {
            return Ok(Some(G::new(self.of, &runs, self.hold(0))));
        }
        let joined = PageRun::join(&mut runs);
        runs.truncate(joined);
        self.submit(runs, walker, waits)
    }

    #[cold]
    fn of_another_runtime(&self) -> Error {
        let what = match self.tensors() {
            [tensor] => format!("{tensor:?} belongs"),
            _ => "the tensors of a set belong".to_owned(),
        };
        let what = format!("{what} to another runtime than the one that was asked, or than the scope or the walker");
        Error::new(ErrorKind::InvalidArgument, what)
            .remedy("pin with the runtime that opened or allocated the tensors, in a scope and by a walker of it")
    }

    /// Submits the request under the latch.
    fn submit(&mut self, runs: Runs, walker: WalkerId, waits: bool) -> Result<Option<G>> {
        let Some(segment) = self.segment() else { return Err(ended()) };
        let engine = &segment.shared.engine;
        let since = Instant::now();
        let (scope, never_refused) = (self.scope.map(|scope| scope.id), self.asks.has(Asks::NEVER_REFUSED));
        let terms = Terms { purpose: G::PURPOSE, scope, walker, never_refused, ..Terms::default() };
        let mut own = if waits { Own::Wanted } else { Own::Unwanted };
        match engine.submit(&runs, terms, &mut own)? {
            Received::Ready(Granted { after, spent, .. }) => {
                self.show(&runs);
                G::new_after(self.of, &runs, self.hold(spent), after.map(event_at)).map(Some)
            }
            Received::Waiting(Waiting { id, ticket, page }) => {
                let own = if let Own::Begun(read) = own { Some(read) } else { None };
                self.progress = Progress::Waiting(Box::new(Submitted { id, ticket, since, page, runs, own }));
                Ok(None)
            }
        }
    }

    fn finish(&mut self, result: Result<Granted>) -> Result<G> {
        let Progress::Waiting(submitted) = std::mem::replace(&mut self.progress, Progress::Done) else {
            return Err(ended());
        };
        let Submitted { since, page, runs, .. } = *submitted;
        let Granted { cause, after, spent } = result?;
        if let Some(segment) = self.segment() {
            segment.shared.engine.stalled(cause, page, since, || describe(self.tensors()));
        }
        self.show(&runs);
        G::new_after(self.of, &runs, self.hold(spent), after.map(event_at))
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
    pub fn wait(mut self) -> Result<G> {
        match self.resident() {
            Some(guard) => Ok(guard),
            None => self.wait_until(None)?.ok_or_else(ended),
        }
    }

    /// Pins the pages if all of them are resident now; `None` if one is not, or an error is to be told, which
    /// [`wait`](Self::wait) tells. Never blocks, and has nothing filled.
    #[inline(always)]
    pub fn if_resident(self) -> Option<G> {
        self.resident()
    }

    /// Blocks until the pages are pinned, for at most `limit`; `None` if it passes. Fills in flight for them then go on
    /// as prefetches. Resident pages are pinned whatever the limit is; with a limit of zero no others are.
    ///
    /// This is for callers who hold guards outside of a [scope](crate::Scope) for which others may wait. Such a wait
    /// may never end, and the runtime cannot detect that.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    pub fn wait_timeout(mut self, limit: Duration) -> Result<Option<G>> {
        match self.resident() {
            Some(guard) => Ok(Some(guard)),
            // A limit beyond the clock's range is no limit.
            None => self.wait_until(Instant::now().checked_add(limit)),
        }
    }

    #[inline(never)]
    fn wait_until(&mut self, deadline: Option<Instant>) -> Result<Option<G>> {
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

impl<'a, G: Complete> PinRequest<'a, G> {
    /// Pins to write. No other guard has the pages meanwhile, and no two of several tensors may share a byte. Only
    /// [writable](Tensor::is_writable) tensors can be.
    #[inline]
    pub fn write(self) -> PinRequest<'a, G::Write> {
        self.with(self.of)
    }

    /// Pins by device address, on any device.
    #[inline]
    pub fn on_device(self) -> PinRequest<'a, DevicePin<G::Access>> {
        self.with(G::tensors(self.of))
    }
}

impl<'a, G: Complete<Access = Read>> PinRequest<'a, G> {
    /// Pins for reading by work on `stream`. The guard may come before the bytes are there: they were read and checked,
    /// and the device has taken up the copies. The stream is made to wait for the copies; no thread waits for the
    /// device. When the guard is dropped, the pins end once the stream has got that far.
    ///
    /// ```
    /// use outcore::{Bytes, DType, Runtime};
    ///
    /// let runtime = Runtime::builder().device_budget(Bytes::mib(4)).open()?;
    /// let tensor = runtime.alloc(DType::U8, &[1000])?;
    /// let stream = runtime.compute_stream()?;
    /// let guard = runtime.pin(&tensor).on(&stream).wait()?;
    /// let bytes = guard.device_bytes(0);
    /// stream.call(move || assert!(bytes.is_some())); // in place of a kernel, which finds the bytes there
    /// drop(guard); // returns at once; the pages stay until the closure has run
    /// stream.synchronize()?; // results count from here on
    /// # drop((stream, tensor));
    /// # runtime.close()?;
    /// # Ok::<(), outcore::Error>(())
    /// ```
    ///
    /// The request fails as others do. It also fails with [`InvalidArgument`](ErrorKind::InvalidArgument) for a stream
    /// of another runtime, and for one that is being captured into a graph.
    #[inline]
    pub fn on(self, stream: &'a ComputeStream) -> PinRequest<'a, StreamPin> {
        self.with((G::tensors(self.of), stream))
    }
}

impl<G: Guard> Future for PinRequest<'_, G> {
    type Output = Result<G>;

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

impl<G: Guard> PinRequest<'_, G> {
    #[inline(never)]
    fn poll_slowly(&mut self, cx: &mut Context<'_>) -> Poll<Result<G>> {
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

impl<G: Guard> Drop for PinRequest<'_, G> {
    #[inline]
    fn drop(&mut self) {
        if let Progress::Waiting(_) = self.progress {
            self.give_up();
        }
    }
}

impl<G: Guard> PinRequest<'_, G> {
    #[cold]
    fn give_up(&mut self) {
        let Progress::Waiting(submitted) = std::mem::replace(&mut self.progress, Progress::Done) else { return };
        let Submitted { id, ticket, runs, .. } = *submitted;
        let Some(segment) = self.segment() else { return };
        // The pins may have been granted after all.
        if let Some(Ok(Granted { spent, .. })) = segment.shared.engine.cancel(id, &ticket) {
            G::give_back(self.of, &runs, self.hold(spent));
        }
    }
}
