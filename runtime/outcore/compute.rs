//! Compute streams: queues for the caller's work on the device.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::device::{EventId, RawStream, StreamId, StreamOp};
use crate::engine::{Engine, run_closure};
use crate::error::{Error, Result};
use crate::shared::Shared;

struct Inner {
    shared: Arc<Shared>,
    id: StreamId,
    adopted: bool,
    /// The first failure of a closure on the stream.
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
/// Kernels go on it by its [handle](Self::raw), closures by [`call`](Self::call). Guards of the tensors they use end
/// [behind them](crate::DevicePin::unpin_after). Cheap to clone; all clones are one stream.
///
/// ```
/// use outcore::{Bytes, DType, Runtime};
///
/// let runtime = Runtime::builder().device_budget(Bytes::mib(4)).open()?;
/// let tensor = runtime.alloc(DType::U8, &[1000])?;
/// let stream = runtime.compute_stream()?;
/// let guard = runtime.pin(&tensor).on_device().wait()?;
/// let bytes = guard.device_bytes(0);
/// stream.call(move || assert!(bytes.is_some())); // in place of a kernel that is given their address
/// guard.unpin_after(&stream)?; // returns at once; the pages stay until the closure has run
/// stream.synchronize()?;
/// # drop((stream, tensor));
/// # runtime.close()?;
/// # Ok::<(), outcore::Error>(())
/// ```
#[derive(Clone)]
pub struct ComputeStream(Arc<Inner>);

impl ComputeStream {
    pub(crate) fn new(shared: Arc<Shared>, id: StreamId, adopted: bool) -> Self {
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

    /// Runs `then`, on a thread of the device, when everything that is on the stream has ended; within this call if the
    /// device refuses the mark. `then` gets an `InvalidArgument` if the stream was being captured by then: nothing can
    /// tell when work on it ends. With any other error, nothing runs on the stream any more.
    pub(crate) fn mark(&self, then: impl FnOnce(Result<()>) + Send + 'static) {
        self.engine().run(self.0.id, StreamOp::Mark, Box::new(then));
    }

    /// Makes work that is put on the stream from now on wait for an event of the device.
    ///
    /// # Errors
    /// As for [`can_mark`](Self::can_mark); errors of the device.
    pub(crate) fn wait_for(&self, event: EventId) -> Result<()> {
        // In a capture, a wait for an event that is not captured would spoil the capture.
        self.can_mark()?;
        self.engine().device.wait(self.0.id, event)
    }

    /// Puts an operation on the stream, and waits for its end.
    ///
    /// # Errors
    /// Errors of the device; `InvalidArgument` in a waker or a closure on a stream, and while the stream is being
    /// captured.
    pub(crate) fn run_and_wait(&self, op: StreamOp, what: &str) -> Result<()> {
        self.can_mark()?;
        self.engine().run_and_wait(self.0.id, op, what)
    }

    /// Whether the device is lost, so that nothing runs on it any more.
    pub(crate) fn is_lost(&self) -> bool {
        self.engine().usable().is_err() || self.engine().device.lost().is_some()
    }

    /// The driver's handle, for launching kernels. It may be used as long as a clone of this stream lives.
    ///
    /// # Errors
    /// [`Unsupported`](crate::ErrorKind::Unsupported) on the host device, which has no handles.
    pub fn raw(&self) -> Result<RawStream> {
        self.engine().usable()?;
        self.engine().device.raw_stream(self.0.id)
    }

    /// Puts a closure on the stream. It must not wait for work of another stream: calls of outcore that would block in
    /// it are refused. On a CUDA device it must not call the CUDA driver: dropping or using outcore's values there
    /// makes no such call, and calls that need one are refused. If the closure panics, or does not run because the
    /// stream is being captured into a graph, which cannot contain closures, [`synchronize`](Self::synchronize) returns
    /// the error.
    pub fn call(&self, closure: impl FnOnce() + Send + 'static) {
        let (failure, shared) = (Arc::clone(&self.0.failure), Arc::clone(&self.0.shared));
        let at_end = move |result: Result<()>| {
            if let Err(error) = result {
                let _ = failure.set(error);
            }
            // Dropped here, so that the closure, which must not wait or call the driver, is never the runtime's last
            // owner.
            drop(shared);
        };
        self.engine().run(self.0.id, StreamOp::Call(Box::new(move || run_closure(closure))), Box::new(at_end));
    }

    /// Waits until everything that is on the stream has ended. Results of work with tensors [pinned for the
    /// stream](crate::PinRequest::on) are valid only after this has succeeded: a fill that it waited for may have
    /// failed, and the device with it.
    ///
    /// # Errors
    /// The first failure of a closure; the loss of the device; errors that
    /// [`DevicePin::unpin_after`](crate::DevicePin::unpin_after) returns too;
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) in a waker and in a closure on a stream.
    pub fn synchronize(&self) -> Result<()> {
        self.run_and_wait(StreamOp::Mark, "a stream")?;
        // A closure's failure is reported before the mark behind it.
        self.0.failure.get().map_or(Ok(()), |error| Err(error.clone()))
    }
}

impl fmt::Debug for ComputeStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let adopted = if self.0.adopted { ", adopted" } else { "" };
        write!(f, "ComputeStream({:?} of {}{adopted})", self.0.id, self.engine().device.name())
    }
}
