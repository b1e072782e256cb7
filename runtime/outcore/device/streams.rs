//! Streams for devices whose copies the processor makes, for authors of a [`Device`](super::Device).

use std::fmt;
use std::sync::Arc;
use std::task::Poll;

use parking_lot::RwLock;

use super::parts::{closed, report_refusal};
pub use super::stream::Copier;
use super::stream::Stream;
use super::{Completions, EventId, StreamId, StreamKind, StreamOp, Token};
use crate::error::{Error, ErrorKind, Result};

/// The streams of a device whose copies the processor makes: each has a thread of its own, which hands the copies of
/// its queue to a [`Copier`] in order and reports them. The methods are those of [`Device`](super::Device), whose
/// contract they keep.
pub struct Streams {
    device: &'static str,
    copier: Arc<dyn Copier>,
    sink: Arc<dyn Completions>,
    open: RwLock<Open>,
}

#[derive(Debug, Default)]
struct Open {
    all: Vec<Arc<Stream>>,
    closed: bool,
}

impl Open {
    fn get(&self, device: &str, id: StreamId) -> Result<&Arc<Stream>> {
        let (index, count) = (id.get(), self.all.len());
        self.all.get(index as usize).ok_or_else(|| {
            let message = format!("stream {index} does not exist: the device {device} has {count} streams");
            Error::new(ErrorKind::InvalidArgument, message).remedy("give a stream that this device has made")
        })
    }
}

impl fmt::Debug for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.open.read().all).finish()
    }
}

impl Streams {
    /// No streams yet. `device` names the device in messages, and its threads.
    pub fn new(device: &'static str, copier: Arc<dyn Copier>, sink: Arc<dyn Completions>) -> Self {
        Self { device, copier, sink, open: RwLock::default() }
    }

    /// See [`Device::create_stream`](super::Device::create_stream).
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument` if there are [so many](EventId::STREAMS_MAX) already; `Io` without a thread.
    pub fn create(&self, kind: StreamKind) -> Result<StreamId> {
        let mut open = self.open.write();
        let index = open.all.len();
        if open.closed {
            return Err(closed(self.device));
        }
        if index >= EventId::STREAMS_MAX {
            let message = format!("the device {} has its limit of {} streams", self.device, EventId::STREAMS_MAX);
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("reuse streams"));
        }
        let name = match kind {
            StreamKind::Fill => "fill",
            StreamKind::WriteBack => "back",
            StreamKind::Compute => "comp",
        };
        let name = format!("{}-{name}-{index}", self.device);
        let stream = Stream::start(name, Arc::clone(&self.copier), Arc::clone(&self.sink))?;
        open.all.push(Arc::new(stream));
        Ok(StreamId(index as u32))
    }

    /// See [`Device::can_mark`](super::Device::can_mark).
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument` for a stream that does not exist.
    pub fn can_mark(&self, stream: StreamId) -> Result<()> {
        let open = self.open.read();
        if open.closed { Err(closed(self.device)) } else { open.get(self.device, stream).map(drop) }
    }

    /// See [`Device::submit`](super::Device::submit).
    pub fn submit(&self, stream: StreamId, op: StreamOp, token: Option<Token>) -> Option<EventId> {
        // Without the lock: a closure that is refused is dropped, and may own what calls the device then.
        let found = self.open.read().get(self.device, stream).cloned();
        let queued = match found {
            Ok(stream) => stream.submit(op, token).map_err(|token| (token, closed(self.device))),
            Err(error) => Err((token, error)),
        };
        match queued {
            Ok(number) => token.map(|_| EventId::of(stream, number)),
            Err((token, error)) => {
                report_refusal(&*self.sink, token, error);
                None
            }
        }
    }

    /// See [`Device::record`](super::Device::record).
    ///
    /// # Errors
    /// `InvalidArgument` for a stream that does not exist.
    pub fn record(&self, stream: StreamId) -> Result<EventId> {
        let count = self.open.read().get(self.device, stream)?.record();
        Ok(EventId::of(stream, count))
    }

    /// See [`Device::wait`](super::Device::wait).
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument` for a stream or an event that does not exist.
    pub fn wait(&self, stream: StreamId, event: EventId) -> Result<()> {
        let open = self.open.read();
        let (recorded, count) = event.parts();
        let waits = open.get(self.device, stream)?;
        waits
            .wait(open.get(self.device, recorded)?, count)
            .map_err(|error| error.unwrap_or_else(|| closed(self.device)))
    }

    /// See [`Device::poll`](super::Device::poll).
    ///
    /// # Errors
    /// The failure of the stream; `InvalidArgument` for an event that does not exist.
    pub fn poll(&self, event: EventId) -> Result<Poll<()>> {
        let (stream, count) = event.parts();
        self.open.read().get(self.device, stream)?.poll(count)
    }

    /// Whether [`close`](Self::close) has begun.
    pub fn is_closed(&self) -> bool {
        self.open.read().closed
    }

    /// Refuses all that comes from now on.
    pub fn begin_close(&self) {
        self.open.write().closed = true;
    }

    /// Waits for everything that was submitted, then joins the threads. Returns the first failure that no token
    /// reported.
    ///
    /// # Errors
    /// The failure of a stream.
    pub fn close(&self) -> Result<()> {
        self.begin_close();
        // Not under the lock: closures that still run on the streams may call the device.
        let streams = self.open.read().all.clone();
        for stream in &streams {
            stream.begin_close();
        }
        // Joins all of them before returning the first failure.
        streams.iter().map(|stream| stream.join()).fold(Ok(()), Result::and)
    }
}
