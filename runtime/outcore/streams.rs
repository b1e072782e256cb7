//! The facade's streams: its own, and those that it adopts.

use crate::compute::ComputeStream;
use crate::device::RawStream;
use crate::error::Result;
use crate::runtime::Runtime;

impl Runtime {
    /// A stream for work of the caller's. It has normal priority and does not wait for other streams. A stream that its
    /// last owner has dropped is used again.
    ///
    /// # Errors
    /// Errors of the device; [`Closed`](crate::ErrorKind::Closed).
    pub fn compute_stream(&self) -> Result<ComputeStream> {
        let id = self.shared.engine.take_stream()?;
        Ok(ComputeStream::new(self.shared.clone(), id, false))
    }

    /// Adopts a stream, which stays the caller's. outcore records events on it, makes it wait for fills of tensors that
    /// are [pinned for it](crate::PinRequest::on), and puts nothing else on it unasked.
    ///
    /// # Safety
    /// The handle is that of a stream, and stays valid until the last clone of the returned stream has been dropped, or
    /// [`close`](Runtime::close) has returned. If the last clone is dropped in a closure on a stream, which may not
    /// wait for calls that use the handle, it stays valid until `close` has returned.
    ///
    /// # Errors
    /// [`Unsupported`](crate::ErrorKind::Unsupported) on the host device, which has no handles;
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a stream that is not in the primary context of the
    /// runtime's GPU, and for the per-thread default stream; errors of the device.
    pub unsafe fn adopt_stream(&self, raw: RawStream) -> Result<ComputeStream> {
        self.shared.engine.usable()?;
        // SAFETY: the caller's promise, which covers the life of the returned value; its drop forgets the stream.
        let id = unsafe { self.shared.engine.device.adopt_stream(raw) }?;
        Ok(ComputeStream::new(self.shared.clone(), id, true))
    }
}
