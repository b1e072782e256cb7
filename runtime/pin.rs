//! Pins: guards that keep pages where they are and give access to their bytes.
//!
//! # Why the slices are sound
//!
//! A guard's pages are pinned in their words: no edge out of a resident state can be taken (see `pager::state`), so the
//! frames stay behind their addresses, mapped, until the guard is dropped. A shared guard's pages cannot be locked by a
//! writer, and no move writes to a resident page, so the bytes do not change. An exclusive guard's pages admit no
//! other pin, and no move reads or writes them. The segment, and with it the reservation, is held by the guard.
//!
//! Guards that give slices exist only where device memory is memory of this process: [`addressable`] refuses the request
//! elsewhere. [`DevicePin`] and [`DevicePinMut`], which give no slices, exist on any device.
//!
//! A [`StreamPin`] may be there before its bytes: its pages are *lent* (see `pager`). It gives addresses and no bytes but by
//! copies on its stream, which has been made to wait for the fills when the guard is made.

#![allow(private_interfaces, reason = "the trait that names private types is sealed: nobody outside can call it")]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytemuck::{AnyBitPattern, NoUninit};
use parking_lot::Mutex;

use crate::compute::ComputeStream;
use crate::device::{DeviceAddress, EventId, HostPointer, StreamOp};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, PageId, PageIndex, RequestId, Tier};
use crate::pager::{Access, Granted, PageRun, TryPin, Unpin};
use crate::segment::Segment;
use crate::tensor::Tensor;
use crate::transfer::ticket::Ticket;
use crate::transfer::{Engine, Purpose, Received, Waiting, event_at, may_wait};

/// The pages of one request: almost always one run.
#[derive(Clone, Debug)]
enum Runs {
    One(PageRun),
    Many(Vec<PageRun>),
}

impl Runs {
    fn as_slice(&self) -> &[PageRun] {
        match self {
            Self::One(run) => std::slice::from_ref(run),
            Self::Many(runs) => runs,
        }
    }
}

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    /// The thread's name among [`ENDED_ELSEWHERE`]; 0 before it has one.
    static NAME: Cell<u64> = const { Cell::new(0) };
    static REGISTERED: Registered = Registered::new();
}

/// For each thread that has had a guard and lives: how many of its guards ended on other threads since it last asked.
static ENDED_ELSEWHERE: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());

/// A thread's entry in [`ENDED_ELSEWHERE`].
struct Registered(u64);

impl Registered {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let name = NEXT.fetch_add(1, Ordering::Relaxed);
        ENDED_ELSEWHERE.lock().insert(name, 0);
        Self(name)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        ENDED_ELSEWHERE.lock().remove(&self.0);
    }
}

/// Counts the guards that a thread has got and that live. Where they are now is not known: whoever has been sent some
/// asks for more as if it held none, until it has waited for [`PATIENCE`].
#[derive(Debug)]
struct Held {
    home: u64,
}

impl Held {
    #[inline]
    fn new() -> Self {
        let _ = HELD.try_with(|held| held.set(held.get() + 1));
        let home = NAME.try_with(Cell::get).unwrap_or(0);
        Self { home: if home == 0 { Self::register() } else { home } }
    }

    #[cold]
    fn register() -> u64 {
        // A thread that is ending asks for nothing more, so what it holds does not matter.
        let name = REGISTERED.try_with(|registered| registered.0).unwrap_or(0);
        let _ = NAME.try_with(|cell| cell.set(name));
        name
    }

    fn any() -> bool {
        HELD.try_with(|held| {
            if held.get() > 0
                && let Some(ended) = ENDED_ELSEWHERE.lock().get_mut(&NAME.get())
            {
                held.set(held.get().saturating_sub(std::mem::take(ended)));
            }
            held.get() > 0
        })
        .unwrap_or(false)
    }
}

impl Drop for Held {
    #[inline]
    fn drop(&mut self) {
        if NAME.try_with(Cell::get).is_ok_and(|name| name == self.home) {
            let _ = HELD.try_with(|held| held.set(held.get().saturating_sub(1)));
        } else if let Some(ended) = ENDED_ELSEWHERE.lock().get_mut(&self.home) {
            *ended += 1;
        }
    }
}

/// How long a request keeps its place in the line. After that its caller is taken for one that holds guards, sent from
/// other threads: those before it may be waiting for just these.
const PATIENCE: Duration = Duration::from_millis(100);

/// Pins every page of `run` without the latch, or none.
fn try_pin_run(engine: &Engine, segment: &Segment, run: PageRun) -> bool {
    let words = segment.words_of(run);
    // Looked at before anything is pinned: a pin takes the mark of a page that was filled ahead, and a run given up half
    // way would leave such pages to be counted as hits.
    if words.iter().any(|word| !word.load().is_resident()) {
        return false;
    }
    let mut first_uses = 0u32;
    for (at, word) in words.iter().enumerate() {
        match word.try_pin() {
            TryPin::Hit => {}
            TryPin::FirstUse => first_uses += 1,
            TryPin::Busy => {
                let wanted = words[..at].iter().fold(false, |wanted, word| wanted | (word.unpin() == Unpin::Wanted));
                if wanted {
                    engine.with(|pager, fx| pager.pump(fx));
                }
                return false;
            }
        }
    }
    for index in 0..run.count {
        let page = PageId { segment: run.segment, index: PageIndex::new(run.first.get() + index) };
        // Which of a run's pages was the first use does not matter to the order; that there was one does to the count.
        let access = Access { page, first_use: index < first_uses };
        if !engine.log.push(access) {
            engine.with(|_, _| ());
            let _ = engine.log.push(access);
        }
    }
    if first_uses > 0 {
        // A page filled ahead has been reached: the pager may look further.
        engine.with(|pager, fx| pager.pump(fx));
    }
    true
}

/// A request under way.
#[derive(Debug)]
enum Progress {
    Start,
    Waiting { id: RequestId, ticket: Arc<Ticket>, since: Instant, page: Option<(PageId, Tier)> },
    Done,
}

mod sealed {
    use super::{Error, EventId, Purpose, Result, Runs, Segment, Tensor, describe, runs_of};
    use std::sync::Arc;

    /// What is to be pinned, and the guard it becomes.
    pub trait Target: Unpin {
        type Guard;
        const PURPOSE: Purpose;
        fn tensors(&self) -> &[Tensor];
        fn check(&self) -> Result<()>;
        /// Takes over the pins of pages whose bytes are there.
        fn guard(&self, runs: Runs) -> Self::Guard;
        /// Takes over pins; the bytes of some of the pages are there when `after` has happened, which concerns only those
        /// who read on a stream. If it fails, the pins have been given back.
        fn guard_after(&self, runs: Runs, _after: Option<EventId>) -> Result<Self::Guard> {
            Ok(self.guard(runs))
        }
        /// Takes over pins that nobody wants any more.
        fn give_back(&self, runs: Runs) {
            drop(self.guard(runs));
        }
        /// The segment of a page that is to be pinned, if there is any.
        fn segment(&self) -> Option<&Arc<Segment>> {
            self.tensors().iter().find(|tensor| tensor.len > 0).map(|tensor| &tensor.segment)
        }
        fn runs(&self) -> Runs {
            runs_of(self.tensors())
        }
        fn describe(&self) -> String {
            describe(self.tensors())
        }
    }

    /// A guard whose pages work on a stream may use, whatever becomes of the guard.
    pub trait OnStream {
        /// Its end behind a stream was refused, and nobody wants it any more: leaves no pins, or only such as stay for good.
        fn let_go(&mut self, refused: &Error);
    }
}
use sealed::{OnStream, Target};

/// A wish for pins: await it, or [`wait`](Self::wait) for it. Nothing happens before. Dropping it gives the wish up;
/// what is in flight for it goes on as a prefetch.
#[must_use = "nothing is pinned until this is awaited or waited for"]
#[derive(Debug)]
pub struct PinRequest<'a, T: Target> {
    target: T,
    runs: Option<Runs>,
    progress: Progress,
    marker: PhantomData<&'a ()>,
}

impl<T: Target> PinRequest<'_, T> {
    pub(crate) fn new(target: T) -> Self {
        Self { target, runs: None, progress: Progress::Start, marker: PhantomData }
    }

    /// Starts; the guard if everything was there. `nested` if the caller may hold guards.
    fn start(&mut self, nested: bool) -> Result<Option<T::Guard>> {
        self.target.check()?;
        let runs = self.target.runs();
        let Some(segment) = self.target.segment() else {
            return Ok(Some(self.target.guard(runs)));
        };
        let engine = &segment.shared.engine;
        engine.at_home()?;
        if let Runs::One(run) = &runs
            && T::PURPOSE != Purpose::Write
            && try_pin_run(engine, segment, *run)
        {
            return Ok(Some(self.target.guard(runs)));
        }
        let since = Instant::now();
        match engine.submit(runs.as_slice(), T::PURPOSE, nested)? {
            Received::Ready(after) => self.target.guard_after(runs, after).map(Some),
            Received::Waiting(Waiting { id, ticket, page }) => {
                self.progress = Progress::Waiting { id, ticket, since, page };
                self.runs = Some(runs);
                Ok(None)
            }
        }
    }

    fn finish(&mut self, result: Result<Granted>) -> Result<T::Guard> {
        let progress = std::mem::replace(&mut self.progress, Progress::Done);
        let Granted { cause, after } = result?;
        if let (Some(segment), Progress::Waiting { since, page, .. }) = (self.target.segment(), progress) {
            segment.shared.engine.stalled(cause, page, since, || self.target.describe());
        }
        let runs = self.runs.take().unwrap_or(Runs::Many(Vec::new()));
        self.target.guard_after(runs, after.map(event_at))
    }

    /// Blocks until the pages are pinned.
    ///
    /// # Errors
    /// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if they cannot be resident together; the failure of a fill;
    /// [`Poisoned`](ErrorKind::Poisoned) if a page's bytes were lost; [`Closed`](ErrorKind::Closed);
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if it would block in a waker or in a
    /// [closure on a stream](crate::ComputeStream::call), which run on threads that the pages may be waiting for.
    pub fn wait(self) -> Result<T::Guard> {
        match self.wait_until(None)? {
            Some(guard) => Ok(guard),
            None => Err(Error::new(ErrorKind::Internal, "a pin request ended without a result")),
        }
    }

    /// Blocks until the pages are pinned, but not for longer than `limit`: `None` then. What is in flight for them goes on
    /// as a prefetch. Pages that are there are pinned whatever the limit; with a limit of zero nothing else is.
    ///
    /// For callers who hold guards that others wait for, or who may be waiting for guards of their own: such a wait has no
    /// end.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    pub fn wait_timeout(self, limit: Duration) -> Result<Option<T::Guard>> {
        // A limit beyond what the clock can tell is none.
        self.wait_until(Instant::now().checked_add(limit))
    }

    fn wait_until(mut self, deadline: Option<Instant>) -> Result<Option<T::Guard>> {
        if let Some(guard) = self.start(Held::any())? {
            return Ok(Some(guard));
        }
        let Progress::Waiting { id, ticket, .. } = &self.progress else {
            return Err(Error::new(ErrorKind::Internal, "a pin request that neither waits nor is done"));
        };
        let (id, ticket) = (*id, ticket.clone());
        may_wait("a pin")?;
        let patient = Instant::now() + PATIENCE;
        let mut result = ticket.wait(Some(deadline.map_or(patient, |deadline| deadline.min(patient))));
        if result.is_none() && deadline.is_none_or(|deadline| deadline > patient) {
            if let Some(segment) = self.target.segment() {
                segment.shared.engine.take_for_nested(id);
            }
            result = ticket.wait(deadline);
        }
        // Without a result the request is dropped, which gives it up.
        result.map(|result| self.finish(result)).transpose()
    }
}

impl<T: Target> Future for PinRequest<'_, T> {
    type Output = Result<T::Guard>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Progress::Start = self.progress {
            // Which guards a task holds is not known.
            match self.start(true) {
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
        let Progress::Waiting { ticket, .. } = &self.progress else {
            return Poll::Ready(Err(Error::new(ErrorKind::InvalidArgument, "a pin request was polled after it ended")));
        };
        // The ticket's lock, too, may be held by a thread that a child does not have.
        self.target.segment().map_or(Ok(()), |segment| segment.shared.engine.at_home())?;
        match ticket.clone().poll(cx.waker()) {
            Poll::Ready(result) => Poll::Ready(self.finish(result)),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<T: Target> Drop for PinRequest<'_, T> {
    fn drop(&mut self) {
        let Progress::Waiting { id, ticket, .. } = &self.progress else { return };
        let Some(segment) = self.target.segment() else { return };
        // The pins may have come after all.
        if let Some(Ok(_)) = segment.shared.engine.cancel(*id, ticket)
            && let Some(runs) = self.runs.take()
        {
            self.target.give_back(runs);
        }
    }
}

fn unpin(segment: &Segment, run: PageRun) {
    let wanted = segment.words_of(run).iter().fold(false, |wanted, word| wanted | (word.unpin() == Unpin::Wanted));
    if wanted {
        segment.shared.engine.with(|pager, fx| pager.pump(fx));
    }
}

/// Refuses guards that would give slices of memory this process cannot access.
///
/// # Errors
/// `Unsupported` where device memory is not memory of this process.
fn addressable(tensor: &Tensor) -> Result<()> {
    if tensor.engine().host_addressable { Ok(()) } else { Err(out_of_reach(tensor)) }
}

#[cold]
fn out_of_reach(tensor: &Tensor) -> Error {
    let device = tensor.engine().device.name();
    let message = format!("the bytes of {tensor:?} are in the memory of {device}, not of this process");
    Error::new(ErrorKind::Unsupported, message)
        .remedy("pin them with pin_device or pin_device_mut, and copy, or give a kernel their address")
}

/// Target of [`Runtime::pin`](crate::Runtime::pin).
#[derive(Debug)]
pub struct Shared<'a>(pub(crate) &'a Tensor);

impl Target for Shared<'_> {
    type Guard = PinGuard;
    const PURPOSE: Purpose = Purpose::Read;
    fn tensors(&self) -> &[Tensor] {
        std::slice::from_ref(self.0)
    }
    fn check(&self) -> Result<()> {
        addressable(self.0)
    }
    fn runs(&self) -> Runs {
        Runs::One(self.0.run())
    }
    fn guard(&self, _: Runs) -> PinGuard {
        PinGuard { segment: self.0.segment.clone(), offset: self.0.offset, len: self.0.len, _held: Held::new() }
    }
}

/// Forbids the eviction of a tensor's pages while it lives, and gives its bytes.
#[must_use = "the pages are unpinned when the guard is dropped"]
pub struct PinGuard {
    segment: Arc<Segment>,
    offset: u64,
    len: u64,
    _held: Held,
}

impl PinGuard {
    /// The tensor's bytes.
    pub fn bytes(&self) -> &[u8] {
        slice(&self.segment, self.offset, self.len)
    }

    /// The tensor's bytes as values.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if their address or number does not fit the type.
    pub fn view<T: AnyBitPattern>(&self) -> Result<&[T]> {
        bytemuck::try_cast_slice(self.bytes()).map_err(cast_error::<T>)
    }
}

impl std::ops::Deref for PinGuard {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.bytes()
    }
}

impl Drop for PinGuard {
    fn drop(&mut self) {
        if self.len > 0 {
            unpin(&self.segment, self.segment.run(self.offset, self.len));
        }
    }
}

impl fmt::Debug for PinGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinGuard({:?}, {} bytes at {})", self.segment.id, self.len, self.offset)
    }
}

fn slice(segment: &Segment, offset: u64, len: u64) -> &[u8] {
    if len == 0 {
        return &[];
    }
    let start = segment.base.offset(offset).get() as *const u8;
    // SAFETY: the address is memory of this process (`addressable`). The guard that calls this holds pins on the pages of
    // `[offset, offset + len)`, which keep them mapped and unchanged (module documentation). The range lies within the segment, which whoever makes tensors sees to
    // (`Runtime::open_parsed` by `ModelHeader::check`, `Runtime::alloc`, `Tensor::rows`), and the guard holds the segment,
    // which keeps the reservation.
    unsafe { std::slice::from_raw_parts(start, len as usize) }
}

fn cast_error<T>(error: bytemuck::PodCastError) -> Error {
    let message = format!("the tensor's bytes are not a slice of {}: {error}", std::any::type_name::<T>());
    Error::new(ErrorKind::InvalidArgument, message).remedy("use bytes() and convert element by element")
}

fn writable(tensor: &Tensor) -> Result<()> {
    if tensor.is_writable() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidArgument, format!("{tensor:?} belongs to a model file and is read-only"))
        .remedy("allocate a read-write tensor and copy into it"))
}

/// Target of [`Runtime::pin_mut`](crate::Runtime::pin_mut).
#[derive(Debug)]
pub struct Exclusive<'a>(pub(crate) &'a Tensor);

impl Target for Exclusive<'_> {
    type Guard = PinGuardMut;
    const PURPOSE: Purpose = Purpose::Write;
    fn tensors(&self) -> &[Tensor] {
        std::slice::from_ref(self.0)
    }
    fn check(&self) -> Result<()> {
        addressable(self.0)?;
        writable(self.0)
    }
    fn runs(&self) -> Runs {
        Runs::One(self.0.run())
    }
    fn guard(&self, _: Runs) -> PinGuardMut {
        PinGuardMut { segment: self.0.segment.clone(), offset: self.0.offset, len: self.0.len, _held: Held::new() }
    }
}

/// The only guard of its pages: gives the tensor's bytes for writing. Its pages are dirty when it is dropped.
#[must_use = "the pages are unpinned when the guard is dropped"]
pub struct PinGuardMut {
    segment: Arc<Segment>,
    offset: u64,
    len: u64,
    _held: Held,
}

impl PinGuardMut {
    /// The tensor's bytes.
    pub fn bytes(&self) -> &[u8] {
        slice(&self.segment, self.offset, self.len)
    }

    /// The tensor's bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        let start = self.segment.base.offset(self.offset).get() as *mut u8;
        // SAFETY: as in `slice`, and the pages are locked by this guard alone: nobody else reads or writes them, and
        // `&mut self` makes this the only slice of it.
        unsafe { std::slice::from_raw_parts_mut(start, self.len as usize) }
    }

    /// The tensor's bytes as values.
    ///
    /// # Errors
    /// As [`PinGuard::view`].
    pub fn view<T: AnyBitPattern>(&self) -> Result<&[T]> {
        bytemuck::try_cast_slice(self.bytes()).map_err(cast_error::<T>)
    }

    /// The tensor's bytes as values, for writing.
    ///
    /// # Errors
    /// As [`PinGuard::view`].
    pub fn view_mut<T: AnyBitPattern + NoUninit>(&mut self) -> Result<&mut [T]> {
        bytemuck::try_cast_slice_mut(self.bytes_mut()).map_err(cast_error::<T>)
    }
}

impl Drop for PinGuardMut {
    fn drop(&mut self) {
        if self.len == 0 {
            return;
        }
        unlock(std::slice::from_ref(&self.segment), &[self.segment.run(self.offset, self.len)]);
    }
}

impl fmt::Debug for PinGuardMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinGuardMut({:?}, {} bytes at {})", self.segment.id, self.len, self.offset)
    }
}

/// Target of [`Runtime::pin_set`](crate::Runtime::pin_set).
#[derive(Debug)]
pub struct SharedSet<'a>(pub(crate) &'a [Tensor]);

impl Target for SharedSet<'_> {
    type Guard = PinSet;
    const PURPOSE: Purpose = Purpose::Read;
    fn tensors(&self) -> &[Tensor] {
        self.0
    }
    fn check(&self) -> Result<()> {
        of_one_runtime(self.0)?;
        self.0.first().map_or(Ok(()), addressable)
    }
    fn guard(&self, runs: Runs) -> PinSet {
        PinSet(Pinned::new(self.0, runs))
    }
}

fn of_one_runtime(tensors: &[Tensor]) -> Result<()> {
    let mut runtimes = tensors.iter().map(|tensor| Arc::as_ptr(&tensor.segment.shared));
    let first = runtimes.next();
    if runtimes.all(|other| Some(other) == first) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidArgument, "the tensors of a set belong to different runtimes")
        .remedy("pin the tensors of each runtime as a set of its own"))
}

fn runs_of(tensors: &[Tensor]) -> Runs {
    let mut runs: Vec<PageRun> = tensors.iter().map(Tensor::run).collect();
    PageRun::normalize(&mut runs);
    match runs[..] {
        [run] => Runs::One(run),
        _ => Runs::Many(runs),
    }
}

fn describe(tensors: &[Tensor]) -> String {
    match tensors {
        [] => String::new(),
        [one] => one.name().to_owned(),
        [first, .., last] => format!("{} .. {}", first.name(), last.name()),
    }
}

/// The pins of a set. Whoever has them gives them back, and knows which kind they are.
struct Pins {
    /// Each once.
    segments: Vec<Arc<Segment>>,
    runs: Runs,
}

impl Pins {
    fn unpin(&self) {
        for run in self.runs.as_slice() {
            if let Some(segment) = self.segments.iter().find(|segment| segment.id == run.segment) {
                unpin(segment, *run);
            }
        }
    }

    fn unlock(&self) {
        unlock(&self.segments, self.runs.as_slice());
    }

    /// Nobody can tell when these pages are not used any more: better memory that never comes back than wrong bytes. The
    /// segments stay with the pins, whose pages would go with them.
    fn keep(self, why: &Error) {
        tracing::error!(error = %why, "tensors used on a stream stay pinned for good: their use has no end that can be seen");
        std::mem::forget(self);
    }

    /// Leaves none.
    fn take(&mut self) -> Self {
        let none = Self { segments: Vec::new(), runs: Runs::Many(Vec::new()) };
        std::mem::replace(self, none)
    }
}

/// What every guard of a set holds.
struct Pinned {
    tensors: Vec<Tensor>,
    pins: Pins,
    _held: Held,
}

impl Pinned {
    fn new(tensors: &[Tensor], runs: Runs) -> Self {
        let mut segments: Vec<Arc<Segment>> = tensors.iter().map(|tensor| tensor.segment.clone()).collect();
        segments.sort_by_key(|segment| segment.id);
        segments.dedup_by_key(|segment| segment.id);
        Self { tensors: tensors.to_vec(), pins: Pins { segments, runs }, _held: Held::new() }
    }

    fn count(&self) -> usize {
        self.tensors.len()
    }

    fn tensor(&self, index: usize) -> Result<&Tensor> {
        self.tensors.get(index).ok_or_else(|| no_such_tensor(index, self.count()))
    }

    fn address(&self, index: usize) -> Option<u64> {
        self.tensors.get(index).map(Tensor::address)
    }

    /// Only for guards of addressable memory.
    fn bytes(&self, index: usize) -> Option<&[u8]> {
        self.tensors.get(index).map(|tensor| slice(&tensor.segment, tensor.offset, tensor.len))
    }

    /// As [`bytes`](Self::bytes).
    fn view<T: AnyBitPattern>(&self, index: usize) -> Result<&[T]> {
        let bytes = self.bytes(index).ok_or_else(|| no_such_tensor(index, self.count()))?;
        bytemuck::try_cast_slice(bytes).map_err(cast_error::<T>)
    }

    fn copy_out(&self, index: usize, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let len = bytes.len() as u64;
        let place = NonNull::from(bytes).cast();
        copy(self.tensor(index)?, offset, place, len, |host, device| StreamOp::CopyOut { device, host, len })
    }

    fn copy_in(&self, index: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        let len = bytes.len() as u64;
        // The copy only reads.
        let place = NonNull::from(bytes).cast();
        copy(self.tensor(index)?, offset, place, len, |host, device| StreamOp::CopyIn { host, device, len })
    }

    fn device_bytes(&self, index: usize) -> Option<DeviceBytes> {
        let tensor = self.tensors.get(index)?;
        let address = tensor.segment.base.offset(tensor.offset);
        Some(DeviceBytes { address, len: Bytes::new(tensor.len) })
    }

    /// Has `give_back` end these pins when a stream has come so far. Refused, they stay.
    fn end_on(&mut self, stream: &ComputeStream, give_back: fn(&Pins)) -> Result<()> {
        self.pins.segments.iter().try_for_each(|segment| of_the_streams_runtime(stream, segment))?;
        if let Err(error) = stream.can_mark() {
            if matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::Closed) || stream.is_lost() {
                return Err(error);
            }
            // A call that failed, and perhaps only once. The mark finds the end of the stream without it.
            tracing::debug!(%error, "ask whether a stream can be marked");
        }
        let pins = self.pins.take();
        stream.mark(move |ended| match ended {
            // A capture has begun since.
            Err(error) if error.kind() == ErrorKind::InvalidArgument => pins.keep(&error),
            _ => give_back(&pins),
        });
        Ok(())
    }

    /// See [`OnStream::let_go`].
    fn let_go(&mut self, refused: &Error, give_back: fn(&Pins)) {
        let pins = self.pins.take();
        let Some(segment) = pins.segments.first() else { return };
        if refused.kind() == ErrorKind::Closed || segment.shared.engine.device.lost().is_some() {
            // What the runtime submitted has ended, and its frames go to no other page any more.
            return give_back(&pins);
        }
        pins.keep(refused);
    }

    fn describe(&self, guard: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{guard}({} tensors)", self.count())
    }
}

/// Forbids the eviction of a set of tensors, pinned as a unit.
#[must_use = "the pages are unpinned when the guard is dropped"]
pub struct PinSet(Pinned);

impl PinSet {
    /// How many tensors the set has.
    pub fn count(&self) -> usize {
        self.0.count()
    }

    /// The bytes of the `index`th tensor of the set.
    pub fn bytes(&self, index: usize) -> Option<&[u8]> {
        self.0.bytes(index)
    }

    /// The bytes of the `index`th tensor of the set as values.
    ///
    /// # Errors
    /// As [`PinGuard::view`]; [`InvalidArgument`](ErrorKind::InvalidArgument) too if the set has no such tensor.
    pub fn view<T: AnyBitPattern>(&self, index: usize) -> Result<&[T]> {
        self.0.view(index)
    }
}

fn no_such_tensor(index: usize, count: usize) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("there is no tensor {index} in a set of {count}"))
        .remedy("count from 0, in the order in which the set was given")
}

/// Ends the locks of `runs`, whose segments are among `segments`. Their pages are dirty.
fn unlock(segments: &[Arc<Segment>], runs: &[PageRun]) {
    for run in runs {
        if let Some(segment) = segments.iter().find(|segment| segment.id == run.segment) {
            for word in segment.words_of(*run) {
                let _ = word.unlock();
            }
        }
    }
    if let Some(segment) = segments.first().filter(|_| !runs.is_empty()) {
        segment.shared.engine.with(|pager, fx| pager.unlocked(runs, fx));
    }
}

impl Drop for PinSet {
    fn drop(&mut self) {
        self.0.pins.unpin();
    }
}

impl fmt::Debug for PinSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.describe("PinSet", f)
    }
}

/// Refuses sets of which not every tensor can be written, or two share a byte.
fn disjoint_writable(tensors: &[Tensor]) -> Result<()> {
    of_one_runtime(tensors)?;
    tensors.iter().try_for_each(writable)?;
    // What makes the slices of the guard disjoint.
    let mut by_place: Vec<&Tensor> = tensors.iter().filter(|tensor| tensor.len > 0).collect();
    by_place.sort_by_key(|tensor| (tensor.segment.id, tensor.offset));
    for pair in by_place.windows(2) {
        if let [a, b] = pair
            && a.segment.id == b.segment.id
            && a.offset + a.len > b.offset
        {
            let what = format!(
                "two tensors of a set to write share bytes: {a:?} at byte {} of its allocation, and {b:?} at byte {}",
                a.offset, b.offset
            );
            return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("leave one of them out"));
        }
    }
    Ok(())
}

/// Target of [`Runtime::pin_set_mut`](crate::Runtime::pin_set_mut).
#[derive(Debug)]
pub struct ExclusiveSet<'a>(pub(crate) &'a [Tensor]);

impl Target for ExclusiveSet<'_> {
    type Guard = PinSetMut;
    const PURPOSE: Purpose = Purpose::Write;
    fn tensors(&self) -> &[Tensor] {
        self.0
    }
    fn check(&self) -> Result<()> {
        self.0.first().map_or(Ok(()), addressable)?;
        disjoint_writable(self.0)
    }
    fn guard(&self, runs: Runs) -> PinSetMut {
        PinSetMut(Pinned::new(self.0, runs))
    }
}

/// The only guard of the pages of a set of tensors, pinned as a unit: gives their bytes for writing. The pages are dirty
/// when it is dropped.
#[must_use = "the pages are unpinned when the guard is dropped"]
pub struct PinSetMut(
    /// No two of its tensors share a byte; see [`disjoint_writable`].
    Pinned,
);

impl PinSetMut {
    /// How many tensors the set has.
    pub fn count(&self) -> usize {
        self.0.count()
    }

    /// The bytes of the `index`th tensor of the set.
    pub fn bytes(&self, index: usize) -> Option<&[u8]> {
        self.0.bytes(index)
    }

    /// The bytes of the `index`th tensor of the set, for writing.
    pub fn bytes_mut(&mut self, index: usize) -> Option<&mut [u8]> {
        self.all_mut().nth(index)
    }

    /// The bytes of every tensor of the set, in order, for writing: what is computed from some of them can be written
    /// to others.
    pub fn all_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.0.tensors.iter().map(|tensor| {
            if tensor.len == 0 {
                return Default::default();
            }
            let start = tensor.segment.base.offset(tensor.offset).get() as *mut u8;
            // SAFETY: as in `slice`, and the pages are locked by this guard alone: nobody else reads or writes them. No
            // two tensors of the set share a byte, which `disjoint_writable` has seen to, and the iterator borrows the
            // guard exclusively and gives each once: no other slice overlaps this one.
            unsafe { std::slice::from_raw_parts_mut(start, tensor.len as usize) }
        })
    }

    /// The bytes of the `index`th tensor of the set as values.
    ///
    /// # Errors
    /// As [`PinSet::view`].
    pub fn view<T: AnyBitPattern>(&self, index: usize) -> Result<&[T]> {
        self.0.view(index)
    }

    /// The bytes of the `index`th tensor of the set as values, for writing.
    ///
    /// # Errors
    /// As [`PinSet::view`].
    pub fn view_mut<T: AnyBitPattern + NoUninit>(&mut self, index: usize) -> Result<&mut [T]> {
        let count = self.count();
        let bytes = self.bytes_mut(index).ok_or_else(|| no_such_tensor(index, count))?;
        bytemuck::try_cast_slice_mut(bytes).map_err(cast_error::<T>)
    }
}

impl Drop for PinSetMut {
    fn drop(&mut self) {
        self.0.pins.unlock();
    }
}

impl fmt::Debug for PinSetMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.describe("PinSetMut", f)
    }
}

/// Target of [`Runtime::pin_device`](crate::Runtime::pin_device).
#[derive(Debug)]
pub struct DeviceShared<'a>(pub(crate) &'a [Tensor]);

impl Target for DeviceShared<'_> {
    type Guard = DevicePin;
    const PURPOSE: Purpose = Purpose::Read;
    fn tensors(&self) -> &[Tensor] {
        self.0
    }
    fn check(&self) -> Result<()> {
        of_one_runtime(self.0)
    }
    fn guard(&self, runs: Runs) -> DevicePin {
        DevicePin(Pinned::new(self.0, runs))
    }
}

/// Where the bytes of a pinned tensor are on the device. They are all there when the guard is, and whoever gets them has no
/// event to wait for; with a [`StreamPin`] this holds for work on its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceBytes {
    /// Of the first byte; the same for the tensor's life.
    pub address: DeviceAddress,
    /// How many there are, without gaps.
    pub len: Bytes,
}

/// [`unpin_after`](DevicePin::unpin_after) was refused. The guard is here, and its pages are still pinned.
///
/// Made an [`Error`], as by `?`, it leaves them pinned for good, with an error in the log, because what uses them may go on:
/// unless the runtime was closed or the device lost, for then their frames go to no other page. So keep the guard, and give it
/// another stream, or drop it when the work has ended.
pub struct UnpinRefused<G> {
    /// To be dropped when the work has ended, or given another stream.
    pub guard: G,
    /// Why.
    pub error: Error,
}

impl<G> fmt::Debug for UnpinRefused<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UnpinRefused({:?})", self.error)
    }
}

impl<G> fmt::Display for UnpinRefused<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<G> std::error::Error for UnpinRefused<G> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<G: OnStream> From<UnpinRefused<G>> for Error {
    fn from(UnpinRefused { mut guard, error }: UnpinRefused<G>) -> Self {
        guard.let_go(&error);
        error
    }
}

impl OnStream for DevicePin {
    fn let_go(&mut self, refused: &Error) {
        self.0.let_go(refused, Pins::unpin);
    }
}

impl OnStream for DevicePinMut {
    fn let_go(&mut self, refused: &Error) {
        self.0.let_go(refused, Pins::unlock);
    }
}

impl OnStream for StreamPin {
    fn let_go(&mut self, refused: &Error) {
        self.pinned.let_go(refused, Pins::unpin);
    }
}

/// Forbids the eviction of tensors, pinned as a unit, on whichever device they are. When it is dropped the pages are
/// unpinned at once: work that uses their addresses must have ended. Where it runs on a stream,
/// [`unpin_after`](Self::unpin_after) leaves that to the runtime.
#[must_use = "the pages are unpinned when the guard is dropped"]
pub struct DevicePin(Pinned);

/// Copies to or from `len` bytes of a pinned tensor, from its byte `offset` on, and waits.
fn copy(
    tensor: &Tensor,
    offset: u64,
    bytes: NonNull<u8>,
    len: u64,
    op: impl FnOnce(HostPointer, DeviceAddress) -> StreamOp,
) -> Result<()> {
    // The callers' slice is borrowed until the copy has been reported, which `copy_and_wait` waits for.
    match ends_of_copy(tensor, offset, bytes, len)? {
        Some((host, device)) => tensor.engine().copy_and_wait(op(host, device)),
        None => Ok(()),
    }
}

/// Both ends of a copy of `len` bytes of a tensor, from its byte `offset` on; none of a copy of nothing. Whoever calls this
/// keeps the memory at `bytes` until the copy has been reported.
fn ends_of_copy(
    tensor: &Tensor,
    offset: u64,
    bytes: NonNull<u8>,
    len: u64,
) -> Result<Option<(HostPointer, DeviceAddress)>> {
    if offset.checked_add(len).is_none_or(|end| end > tensor.len) {
        let message = format!("{len} bytes at {offset} of {tensor:?}, which has {}", tensor.len);
        return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("copy bytes the tensor has"));
    }
    if len == 0 {
        return Ok(None);
    }
    // SAFETY: both callers hold the borrow of a slice of `len` bytes until the copy has been reported.
    let host = unsafe { HostPointer::new(bytes) };
    Ok(Some((host, tensor.segment.base.offset(tensor.offset + offset))))
}

/// Target of [`Runtime::pin_device_on`](crate::Runtime::pin_device_on).
#[derive(Debug)]
pub struct DeviceOnStream<'a>(pub(crate) &'a [Tensor], pub(crate) &'a ComputeStream);

impl Target for DeviceOnStream<'_> {
    type Guard = StreamPin;
    const PURPOSE: Purpose = Purpose::ReadOnStream;
    fn tensors(&self) -> &[Tensor] {
        self.0
    }
    fn check(&self) -> Result<()> {
        of_one_runtime(self.0)?;
        self.0.first().map_or(Ok(()), |tensor| of_the_streams_runtime(self.1, &tensor.segment))?;
        self.1.can_mark()
    }
    fn guard(&self, runs: Runs) -> StreamPin {
        StreamPin { pinned: Pinned::new(self.0, runs), stream: self.1.clone() }
    }
    fn guard_after(&self, runs: Runs, after: Option<EventId>) -> Result<StreamPin> {
        let mut guard = self.guard(runs);
        if let Some(Err(error)) = after.map(|event| self.1.wait_for(event)) {
            // Nothing on the stream has their addresses.
            guard.pinned.pins.take().unpin();
            return Err(error);
        }
        Ok(guard)
    }
    fn give_back(&self, runs: Runs) {
        Pinned::new(self.0, runs).pins.unpin();
    }
}

/// Refuses a stream of another runtime than the guard's.
fn of_the_streams_runtime(stream: &ComputeStream, segment: &Segment) -> Result<()> {
    if stream.belongs_to(&segment.shared) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidArgument, "the stream and the guard belong to different runtimes")
        .remedy("give it a stream of the guard's runtime: Runtime::compute_stream or adopt_stream"))
}

/// Forbids the eviction of tensors, pinned as a unit for work on one [`ComputeStream`], on whichever device they are. The
/// bytes need not be there yet: what is put on the stream from now on waits for them on the device, and no thread does.
/// Other streams, and the CPU, are not made to wait, so the addresses are for this stream and for what is ordered behind it
/// by events.
///
/// It ends when everything that is on the stream when it is dropped has ended; whoever drops it waits for nothing. While
/// the stream is captured into a graph nobody can tell when that is: [`unpin`](Self::unpin) refuses then, and a guard that
/// is dropped all the same leaves its pages pinned for good, with an error in the log; with them stay their tensors and the
/// runtime, with all the memory it has, also after it was closed. [`close`](crate::Runtime::close)
/// waits for the runtime's own streams; of adopted ones, what uses the pages of a guard that is dropped after it must have
/// ended.
///
/// If a fill fails on the device, the device is lost: [`ComputeStream::synchronize`] and every later call give the cause,
/// and what the stream has computed meanwhile is void.
#[must_use = "the pages are unpinned behind what is on the stream when the guard is dropped"]
pub struct StreamPin {
    pinned: Pinned,
    stream: ComputeStream,
}

impl StreamPin {
    /// How many tensors it holds.
    pub fn count(&self) -> usize {
        self.pinned.count()
    }

    /// The device address of the `index`th tensor.
    pub fn address(&self, index: usize) -> Option<u64> {
        self.pinned.address(index)
    }

    /// Where the `index`th tensor's bytes are, for work on the stream.
    pub fn device_bytes(&self, index: usize) -> Option<DeviceBytes> {
        self.pinned.device_bytes(index)
    }

    /// The stream.
    pub fn stream(&self) -> &ComputeStream {
        &self.stream
    }

    /// Unpins when everything that is on the stream by now has ended, and returns at once: what dropping it does, for those
    /// who want to know if it cannot be done.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) while the stream is being captured into a graph;
    /// [`Closed`](ErrorKind::Closed); what has cost the device. The guard comes back with it.
    pub fn unpin(mut self) -> std::result::Result<(), UnpinRefused<Self>> {
        self.end().map_err(|error| UnpinRefused { guard: self, error })
    }

    /// Leaves no pins, or is refused and leaves them.
    fn end(&mut self) -> Result<()> {
        if self.pinned.pins.segments.is_empty() {
            return Ok(());
        }
        self.pinned.end_on(&self.stream, Pins::unpin)
    }

    /// Copies bytes of the `index`th tensor from the device, from its byte `offset` on, behind everything that is on the
    /// stream, and waits for them.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for bytes the tensor does not have, in a waker or a closure, and while the stream
    /// is being captured; what the device says.
    pub fn copy_out(&self, index: usize, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let len = bytes.len() as u64;
        let place = NonNull::from(bytes).cast();
        let Some((host, device)) = ends_of_copy(self.pinned.tensor(index)?, offset, place, len)? else {
            return Ok(());
        };
        // The slice is borrowed until the copy has been reported, which this waits for.
        self.stream.run_and_wait(StreamOp::CopyOut { device, host, len }, "a copy")
    }
}

impl Drop for StreamPin {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            self.let_go(&error);
        }
    }
}

impl fmt::Debug for StreamPin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pinned.describe("StreamPin", f)
    }
}

impl DevicePin {
    /// How many tensors it holds.
    pub fn count(&self) -> usize {
        self.0.count()
    }

    /// The device address of the `index`th tensor.
    pub fn address(&self, index: usize) -> Option<u64> {
        self.0.address(index)
    }

    pub(crate) fn tensor(&self, index: usize) -> Result<&Tensor> {
        self.0.tensor(index)
    }

    /// Where the `index`th tensor's bytes are.
    pub fn device_bytes(&self, index: usize) -> Option<DeviceBytes> {
        self.0.device_bytes(index)
    }

    /// Unpins when everything that is on the stream by now has ended, and returns at once: what reads the tensors is on
    /// `stream`, or ordered before its end by events. If the device fails meanwhile, the pages are unpinned, and every
    /// later call says why.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a stream of another runtime, and while the stream is being
    /// captured into a graph; [`Closed`](ErrorKind::Closed); what has cost the device. The guard comes back with it; if it is
    /// not wanted, [see](UnpinRefused) what becomes of its pages. A call of the driver that fails, and leaves the device
    /// usable, is no reason: then the end of the stream is waited for in another way.
    pub fn unpin_after(mut self, stream: &ComputeStream) -> std::result::Result<(), UnpinRefused<Self>> {
        self.0.end_on(stream, Pins::unpin).map_err(|error| UnpinRefused { guard: self, error })
    }

    /// Copies bytes of the `index`th tensor from the device, from its byte `offset` on, and waits for them.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for bytes the tensor does not have, and in a waker or a closure; what the
    /// device says.
    pub fn copy_out(&self, index: usize, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.0.copy_out(index, offset, bytes)
    }
}

impl Drop for DevicePin {
    fn drop(&mut self) {
        self.0.pins.unpin();
    }
}

impl fmt::Debug for DevicePin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.describe("DevicePin", f)
    }
}

/// Target of [`Runtime::pin_device_mut`](crate::Runtime::pin_device_mut).
#[derive(Debug)]
pub struct DeviceExclusive<'a>(pub(crate) &'a [Tensor]);

impl Target for DeviceExclusive<'_> {
    type Guard = DevicePinMut;
    const PURPOSE: Purpose = Purpose::Write;
    fn tensors(&self) -> &[Tensor] {
        self.0
    }
    fn check(&self) -> Result<()> {
        disjoint_writable(self.0)
    }
    fn guard(&self, runs: Runs) -> DevicePinMut {
        DevicePinMut(Pinned::new(self.0, runs))
    }
}

/// The only guard of the pages of tensors, pinned as a unit, on whichever device they are: what is at their addresses may
/// be written. The pages are dirty when it ends; it ends as a [`DevicePin`] does.
#[must_use = "the pages are unpinned when the guard is dropped"]
pub struct DevicePinMut(Pinned);

impl DevicePinMut {
    /// How many tensors it holds.
    pub fn count(&self) -> usize {
        self.0.count()
    }

    /// The device address of the `index`th tensor.
    pub fn address(&self, index: usize) -> Option<u64> {
        self.0.address(index)
    }

    pub(crate) fn tensor(&self, index: usize) -> Result<&Tensor> {
        self.0.tensor(index)
    }

    /// Where the `index`th tensor's bytes are.
    pub fn device_bytes(&self, index: usize) -> Option<DeviceBytes> {
        self.0.device_bytes(index)
    }

    /// As [`DevicePin::unpin_after`], for what reads or writes the tensors.
    ///
    /// # Errors
    /// The same.
    pub fn unpin_after(mut self, stream: &ComputeStream) -> std::result::Result<(), UnpinRefused<Self>> {
        self.0.end_on(stream, Pins::unlock).map_err(|error| UnpinRefused { guard: self, error })
    }

    /// As [`DevicePin::copy_out`].
    ///
    /// # Errors
    /// The same.
    pub fn copy_out(&self, index: usize, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.0.copy_out(index, offset, bytes)
    }

    /// Copies bytes to the device, into the `index`th tensor from its byte `offset` on, and waits until they are there.
    ///
    /// # Errors
    /// As [`DevicePin::copy_out`].
    pub fn copy_in(&mut self, index: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        self.0.copy_in(index, offset, bytes)
    }
}

impl Drop for DevicePinMut {
    fn drop(&mut self) {
        self.0.pins.unlock();
    }
}

impl fmt::Debug for DevicePinMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.describe("DevicePinMut", f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread that has sent its guards away holds none when they have ended.
    #[test]
    fn regression_guards_that_end_elsewhere_are_not_held_for_ever() {
        let (first, second) = (Held::new(), Held::new());
        assert!(Held::any());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mine = Held::new();
                drop(first);
                assert!(Held::any());
                drop(mine);
                assert!(!Held::any());
            });
        });
        assert!(Held::any());
        drop(second);
        assert!(!Held::any());
        // Whose thread has ended is nobody's.
        drop(std::thread::scope(|scope| scope.spawn(Held::new).join()));
        assert!(!Held::any());
    }
}
