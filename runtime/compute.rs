//! Compute streams: where the caller's work on the device is in order.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::device::{EventId, RawStream, StreamId, StreamOp};
use crate::error::{Error, Result};
use crate::runtime::{Runtime, Shared};
use crate::transfer::{Engine, run_closure};

struct Inner {
    shared: Arc<Shared>,
    id: StreamId,
    adopted: bool,
    /// Of a closure on it.
    failure: Arc<OnceLock<Error>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let engine = &self.shared.engine;
        if !engine.is_at_home() {
            return;
        }
        if self.adopted {
            engine.device.forget_stream(self.id);
        } else {
            engine.return_stream(self.id);
        }
    }
}

/// A stream for work of the caller's: a queue whose entries run in order, beside the streams on which outcore copies.
/// Kernels go there by its [handle](Self::raw), closures by [`call`](Self::call); guards of what they use end
/// [behind them](crate::DevicePin::unpin_after). Cheap to clone; all clones are one stream.
///
/// ```
/// use outcore::{Bytes, DType, Runtime};
///
/// let runtime = Runtime::builder().device_budget(Bytes::mib(4)).open()?;
/// let tensors = [runtime.alloc(DType::U8, &[1000])?];
/// let stream = runtime.compute_stream()?;
/// let guard = runtime.pin_device(&tensors).wait()?;
/// let bytes = guard.device_bytes(0);
/// stream.call(move || assert!(bytes.is_some())); // in place of a kernel that is given their address
/// guard.unpin_after(&stream)?; // returns at once; the pages stay until the closure has run
/// stream.synchronize()?;
/// # drop((stream, tensors));
/// # runtime.close()?;
/// # Ok::<(), outcore::Error>(())
/// ```
#[derive(Clone)]
pub struct ComputeStream(Arc<Inner>);

impl Runtime {
    /// A stream for work of the caller's, of normal priority, which waits for nothing of other streams. One that the
    /// last owner has dropped is used again.
    ///
    /// # Errors
    /// What the device says; [`Closed`](crate::ErrorKind::Closed).
    pub fn compute_stream(&self) -> Result<ComputeStream> {
        let id = self.shared.engine.take_stream()?;
        Ok(ComputeStream::new(self.shared.clone(), id, false))
    }

    /// Takes in a stream that the caller owns and goes on to own: outcore records events on it, makes it wait for fills of
    /// what is [pinned for it](Self::pin_device_on), and puts nothing else there that it is not told to.
    ///
    /// # Safety
    /// The handle is that of a stream, and stays so until the last clone of what is returned has been dropped, or
    /// [`close`](Runtime::close) has returned.
    ///
    /// # Errors
    /// [`Unsupported`](crate::ErrorKind::Unsupported) on the host device, which has no handles;
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a stream that is not in the primary context of the
    /// runtime's GPU, and for the per-thread default stream; what the device says.
    pub unsafe fn adopt_stream(&self, raw: RawStream) -> Result<ComputeStream> {
        self.shared.engine.usable()?;
        // SAFETY: the caller's promise, which covers the life of the value returned; it forgets the stream when it goes.
        let id = unsafe { self.shared.engine.device.adopt_stream(raw) }?;
        Ok(ComputeStream::new(self.shared.clone(), id, true))
    }
}

impl ComputeStream {
    fn new(shared: Arc<Shared>, id: StreamId, adopted: bool) -> Self {
        Self(Arc::new(Inner { shared, id, adopted, failure: Arc::default() }))
    }

    fn engine(&self) -> &Engine {
        &self.0.shared.engine
    }

    pub(crate) fn belongs_to(&self, shared: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.0.shared, shared)
    }

    pub(crate) fn can_mark(&self) -> Result<()> {
        self.engine().usable()?;
        self.engine().device.can_mark(self.0.id)
    }

    /// Runs `then` when everything that is on the stream has ended, on a thread of the device. It is given an
    /// `InvalidArgument` if the stream was being captured by then: what uses it has no end that can be seen. With any other
    /// error, nothing runs there any more.
    pub(crate) fn mark(&self, then: impl FnOnce(Result<()>) + Send + 'static) {
        self.engine().run(self.0.id, StreamOp::Mark, Box::new(then));
    }

    /// Makes what is put on the stream from now on wait for an event of the device.
    ///
    /// # Errors
    /// As for [`can_mark`](Self::can_mark); what the device says.
    pub(crate) fn wait_for(&self, event: EventId) -> Result<()> {
        // A wait for what is not captured would spoil a capture.
        self.can_mark()?;
        self.engine().device.wait(self.0.id, event)
    }

    /// Puts an operation on the stream, and waits for its end.
    ///
    /// # Errors
    /// What the device says; `InvalidArgument` in a waker or a closure on a stream, and while the stream is being captured.
    pub(crate) fn run_and_wait(&self, op: StreamOp, what: &str) -> Result<()> {
        self.can_mark()?;
        self.engine().run_and_wait(self.0.id, op, what)
    }

    /// Whether nothing runs on the device any more: it is lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.engine().usable().is_err() || self.engine().device.lost().is_some()
    }

    /// The driver's handle, for whoever launches kernels. It may be used for as long as a clone of this lives.
    ///
    /// # Errors
    /// [`Unsupported`](crate::ErrorKind::Unsupported) on the host device, which has no handles.
    pub fn raw(&self) -> Result<RawStream> {
        self.engine().usable()?;
        self.engine().device.raw_stream(self.0.id)
    }

    /// Puts a closure on the stream. It must not wait for work of another stream (calls of outcore that would block there
    /// are refused), and on a CUDA device must not call the CUDA driver: what of outcore is dropped or used there makes no such call, and what cannot do without one is refused.
    /// If it panics, [`synchronize`](Self::synchronize) says so; also if it is not run because the stream is
    /// being captured into a graph, of which closures cannot be a part.
    pub fn call(&self, closure: impl FnOnce() + Send + 'static) {
        let (failure, shared) = (Arc::clone(&self.0.failure), Arc::clone(&self.0.shared));
        let at_end = move |result: Result<()>| {
            if let Err(error) = result {
                let _ = failure.set(error);
            }
            // So the closure, which may not wait and may not call the driver, is never the runtime's last owner.
            drop(shared);
        };
        self.engine().run(self.0.id, StreamOp::Call(Box::new(move || run_closure(closure))), Box::new(at_end));
    }

    /// Waits until everything that is on the stream has ended. Only after it has succeeded do results count of work that
    /// uses tensors [pinned for the stream](Runtime::pin_device_on): a fill that it waited for may have failed with the
    /// device.
    ///
    /// # Errors
    /// The first failure of a closure; of the device; what [`DevicePin::unpin_after`](crate::DevicePin::unpin_after)
    /// refuses; [`InvalidArgument`](crate::ErrorKind::InvalidArgument) in a waker and in a closure on a stream.
    pub fn synchronize(&self) -> Result<()> {
        self.run_and_wait(StreamOp::Mark, "a stream")?;
        // Reported before the mark was.
        self.0.failure.get().map_or(Ok(()), |error| Err(error.clone()))
    }
}

impl fmt::Debug for ComputeStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let adopted = if self.0.adopted { ", adopted" } else { "" };
        write!(f, "ComputeStream({:?} of {}{adopted})", self.0.id, self.engine().device.name())
    }
}
