//! Guards that give device addresses and copies, on any device.

#![allow(private_interfaces, reason = "the trait that names private types is sealed: nobody outside can call it")]
#![allow(
    clippy::result_large_err,
    reason = "who is refused gets the guard back, without an allocation that could fail"
)]

use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

use super::guard::{Complete, Guard};
use super::sealed::Sealed;
use super::{Access, Hold, Pins, Read, Write, disjoint_writable, no_such_tensor, of_one_runtime};
use crate::compute::ComputeStream;
use crate::device::{DeviceAddress, EventId, HostPointer, StreamOp};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::Bytes;
use crate::pager::{PageRun, Purpose};
use crate::segment::Segment;
use crate::tensor::Tensor;

/// Tensors that are pinned on the device, and their pins.
struct Pinned {
    tensors: Vec<Tensor>,
    pins: Pins,
}

impl Pinned {
    fn new(tensors: &[Tensor], runs: &[PageRun], exclusive: bool, hold: Hold) -> Self {
        Self { tensors: tensors.to_vec(), pins: Pins::new(tensors, runs, exclusive, hold) }
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

    /// Makes these pins end when the stream has got this far. If it is refused, the pins stay.
    ///
    /// The pins leave the scope at once. Whoever waits for them then waits for the stream, which needs nothing of the
    /// task.
    fn end_on(&mut self, stream: &ComputeStream) -> Result<()> {
        self.pins.segments.iter().try_for_each(|segment| of_the_streams_runtime(stream, segment))?;
        if let Err(error) = stream.can_mark() {
            if matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::Closed) || stream.is_lost() {
                return Err(error);
            }
            // A driver call failed, perhaps only once. The mark finds the end of the stream without it.
            tracing::debug!(%error, "ask whether a stream can be marked");
        }
        let pins = self.pins.take();
        pins.leave_behind();
        stream.mark(move |ended| match ended {
            // A capture has begun since `can_mark`.
            Err(error) if error.kind() == ErrorKind::InvalidArgument => pins.keep_behind(&error),
            _ => pins.end_behind(),
        });
        Ok(())
    }

    /// Disposes of pins that were refused an end behind a stream. They end if no other page can get their frames, and
    /// otherwise stay for good.
    fn let_go(&mut self, refused: &Error) {
        let pins = self.pins.take();
        let Some(any) = pins.segments.first() else { return };
        if refused.kind() == ErrorKind::Closed || any.shared.engine.device.lost().is_some() {
            // What the runtime submitted has ended, and no other page gets its frames any more.
            return pins.end();
        }
        pins.keep(refused);
    }

    fn describe(&self, guard: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{guard}({} tensors)", self.count())
    }
}

/// A guard whose pages may still be used by work on a stream after the guard is dropped.
trait OnStream {
    fn pinned(&mut self) -> &mut Pinned;
}

/// Where the bytes of a pinned tensor are on the device. All of them are there as soon as the guard is, so there is no
/// event to wait for. With a [`StreamPin`] this holds for work on its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceBytes {
    /// Address of the first byte; it stays the same for the tensor's life.
    pub address: DeviceAddress,
    /// How many bytes there are, without gaps.
    pub len: Bytes,
}

/// [`unpin_after`](DevicePin::unpin_after) was refused. The guard is here, and its pages are still pinned.
///
/// Keep the guard and give it another stream, or drop it when the work has ended. Turning this into an [`Error`], as
/// `?` does, leaves the pages pinned for good, with an error in the log, because work on the device may still use them.
/// The exceptions are a closed runtime and a lost device: then no other page gets the frames, and the pages are
/// unpinned.
pub struct UnpinRefused<G> {
    /// The guard: drop it when the work has ended, or give it another stream.
    pub guard: G,
    /// The reason.
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

#[allow(private_bounds, reason = "guards are of this crate")]
impl<G: OnStream> From<UnpinRefused<G>> for Error {
    fn from(UnpinRefused { mut guard, error }: UnpinRefused<G>) -> Self {
        guard.pinned().let_go(&error);
        error
    }
}

impl<A: Access> OnStream for DevicePin<A> {
    fn pinned(&mut self) -> &mut Pinned {
        &mut self.pinned
    }
}

impl OnStream for StreamPin {
    fn pinned(&mut self) -> &mut Pinned {
        &mut self.pinned
    }
}

/// Forbids the eviction of tensors, pinned as a unit, on any device. Dropping it unpins the pages at once, so work that
/// uses their addresses must have ended. For work on a stream, [`unpin_after`](Self::unpin_after) leaves the unpinning
/// to the runtime.
///
/// With access [`Write`] no other guard can have its pages, and the memory at their addresses may be written. The pages
/// are dirty when it ends.
#[must_use = "the pages are unpinned when the guard is dropped"]
pub struct DevicePin<A: Access = Read> {
    pinned: Pinned,
    access: PhantomData<A>,
}

/// Carries out a copy to or from `len` bytes of a pinned tensor, from its byte `offset` on, and waits for it.
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

/// Both ends of a copy of `len` bytes of a tensor, from its byte `offset` on; None if there is nothing to copy. The
/// caller keeps the memory at `bytes` until the copy has been reported.
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

/// Refuses a stream of another runtime than the guard's.
fn of_the_streams_runtime(stream: &ComputeStream, segment: &Segment) -> Result<()> {
    if stream.belongs_to(&segment.shared) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidArgument, "the stream and the guard belong to different runtimes")
        .remedy("give it a stream of the guard's runtime: Runtime::compute_stream or adopt_stream"))
}

/// Forbids the eviction of tensors, pinned as a unit for work on one [`ComputeStream`], on any device. The bytes need
/// not be there yet: work that is put on the stream from now on waits for them on the device, and no thread waits.
/// Other streams and the CPU do not wait, so use the addresses only on this stream, and in work that is ordered behind
/// it by events.
///
/// When the guard is dropped, its pages are unpinned as soon as everything on the stream at that time has ended; the
/// drop does not wait. While the stream is captured into a graph, nothing can tell when that is. [`unpin`](Self::unpin)
/// refuses then. A guard that is dropped all the same leaves its pages pinned for good, with an error in the log; their
/// tensors and the runtime with all its memory then stay too, even after it was closed.
/// [`close`](crate::Runtime::close) waits for the runtime's own streams. On adopted streams, work that uses the pages
/// must have ended before a guard is dropped after `close`.
///
/// If a fill fails on the device, the device is lost: [`ComputeStream::synchronize`] and every later call give the
/// cause, and what the stream has computed meanwhile is void.
#[must_use = "the pages are unpinned behind what is on the stream when the guard is dropped"]
pub struct StreamPin {
    pinned: Pinned,
    stream: ComputeStream,
}

impl Sealed for StreamPin {}

impl Guard for StreamPin {
    type Of<'a> = (&'a [Tensor], &'a ComputeStream);
    const PURPOSE: Purpose = Purpose::ReadOnStream;
    fn tensors<'a>((tensors, _): Self::Of<'a>) -> &'a [Tensor] {
        tensors
    }
    fn check((tensors, stream): Self::Of<'_>) -> Result<()> {
        of_one_runtime(tensors)?;
        tensors.first().map_or(Ok(()), |tensor| of_the_streams_runtime(stream, &tensor.segment))?;
        stream.can_mark()
    }
    fn new((tensors, stream): Self::Of<'_>, runs: &[PageRun], hold: Hold) -> Self {
        Self { pinned: Pinned::new(tensors, runs, false, hold), stream: stream.clone() }
    }
    fn new_after(of: Self::Of<'_>, runs: &[PageRun], hold: Hold, after: Option<EventId>) -> Result<Self> {
        let mut guard = Self::new(of, runs, hold);
        if let Some(Err(error)) = after.map(|event| guard.stream.wait_for(event)) {
            // Nothing on the stream has been given their addresses yet.
            guard.pinned.pins.take().end();
            return Err(error);
        }
        Ok(guard)
    }
    fn give_back((tensors, _): Self::Of<'_>, runs: &[PageRun], hold: Hold) {
        Pins::new(tensors, runs, false, hold).end();
    }
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

    /// Unpins when everything that is on the stream by now has ended, and returns at once. Dropping the guard does the
    /// same; this returns an error if it cannot be done.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) while the stream is being captured into a graph;
    /// [`Closed`](ErrorKind::Closed); the reason for which the device was lost. The guard comes back with the error.
    pub fn unpin(mut self) -> std::result::Result<(), UnpinRefused<Self>> {
        self.end().map_err(|error| UnpinRefused { guard: self, error })
    }

    /// Ends the pins behind the stream, or is refused and leaves them.
    fn end(&mut self) -> Result<()> {
        if self.pinned.pins.runs.is_empty() {
            return Ok(());
        }
        self.pinned.end_on(&self.stream)
    }

    /// Copies bytes of the `index`th tensor from the device, from its byte `offset` on. The copy runs behind everything
    /// that is on the stream, and this waits for it.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for bytes the tensor does not have, in a waker or a closure, and
    /// while the stream is being captured; errors of the device.
    pub fn copy_out(&self, index: usize, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let len = bytes.len() as u64;
        let place = NonNull::from(bytes).cast();
        let Some((host, device)) = ends_of_copy(self.pinned.tensor(index)?, offset, place, len)? else {
            return Ok(());
        };
        // The slice is borrowed until the copy has been reported: this waits for that.
        self.stream.run_and_wait(StreamOp::CopyOut { device, host, len }, "a copy")
    }
}

impl Drop for StreamPin {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            self.pinned.let_go(&error);
        }
    }
}

impl fmt::Debug for StreamPin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pinned.describe("StreamPin", f)
    }
}

impl<A: Access> Sealed for DevicePin<A> {}

impl<A: Access> Guard for DevicePin<A> {
    type Of<'a> = &'a [Tensor];
    const PURPOSE: Purpose = A::PURPOSE;
    fn tensors(of: Self::Of<'_>) -> &[Tensor] {
        of
    }
    fn check(of: Self::Of<'_>) -> Result<()> {
        of_one_runtime(of)?;
        if A::PURPOSE == Purpose::Write { disjoint_writable(of) } else { Ok(()) }
    }
    fn new(of: Self::Of<'_>, runs: &[PageRun], hold: Hold) -> Self {
        Self { pinned: Pinned::new(of, runs, A::PURPOSE == Purpose::Write, hold), access: PhantomData }
    }
}

impl<A: Access> Complete for DevicePin<A> {
    type Access = A;
    type Write = DevicePin<Write>;
}

impl<A: Access> DevicePin<A> {
    /// How many tensors it holds.
    pub fn count(&self) -> usize {
        self.pinned.count()
    }

    /// The device address of the `index`th tensor.
    pub fn address(&self, index: usize) -> Option<u64> {
        self.pinned.address(index)
    }

    pub(crate) fn tensor(&self, index: usize) -> Result<&Tensor> {
        self.pinned.tensor(index)
    }

    /// Where the `index`th tensor's bytes are.
    pub fn device_bytes(&self, index: usize) -> Option<DeviceBytes> {
        self.pinned.device_bytes(index)
    }

    /// Unpins when everything that is on `stream` by now has ended, and returns at once. The work that uses the tensors
    /// must be on `stream`, or ordered before its end by events. If the device fails meanwhile, the pages are unpinned,
    /// and every later call gives the reason.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a stream of another runtime, and while the stream is being
    /// captured into a graph; [`Closed`](ErrorKind::Closed); the reason for which the device was lost. The guard comes
    /// back with the error; [`UnpinRefused`] says what happens to its pages. A failed driver call that leaves the
    /// device usable is no error: the end of the stream is then found in another way.
    pub fn unpin_after(mut self, stream: &ComputeStream) -> std::result::Result<(), UnpinRefused<Self>> {
        self.pinned.end_on(stream).map_err(|error| UnpinRefused { guard: self, error })
    }

    /// Copies bytes of the `index`th tensor from the device, from its byte `offset` on, and waits for them.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for bytes the tensor does not have, and in a waker or a closure;
    /// errors of the device.
    pub fn copy_out(&self, index: usize, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.pinned.copy_out(index, offset, bytes)
    }
}

impl DevicePin<Write> {
    /// Copies bytes to the device, into the `index`th tensor from its byte `offset` on, and waits until they are there.
    ///
    /// # Errors
    /// As [`copy_out`](DevicePin::copy_out).
    pub fn copy_in(&mut self, index: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        self.pinned.copy_in(index, offset, bytes)
    }
}

impl<A: Access> Drop for DevicePin<A> {
    fn drop(&mut self) {
        self.pinned.pins.end();
    }
}

impl<A: Access> fmt::Debug for DevicePin<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pinned.describe(if A::PURPOSE == Purpose::Write { "DevicePin<Write>" } else { "DevicePin" }, f)
    }
}
