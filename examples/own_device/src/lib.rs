//! A device that outcore does not know: an accelerator with memory of its own, which the processor reaches only by
//! copies.
//!
//! The memory is emulated by boxes of bytes. What is real is the contract of [`Device`]: addresses that are reserved
//! for life, frames that move between them, streams that run in order, completions that are reported exactly once. One
//! thread runs the operations of all streams in the order in which they were submitted. So each stream is in order, and
//! an event that was recorded has always been passed before anything that was submitted later runs.
//!
//! ```
//! use outcore::{Bytes, DType, PageSize, Runtime};
//! use outcore_own_device::Accelerator;
//!
//! let builder = Runtime::builder().device(Accelerator).page_size(PageSize::new(Bytes::kib(64))?);
//! let runtime = builder.device_budget(Bytes::mib(1)).open()?;
//! let tensors = [runtime.alloc(DType::U8, &[1 << 19])?];
//! runtime.pin(&tensors).write().on_device().wait()?.copy_in(0, 1000, &[7; 10])?;
//! let mut bytes = [0; 10];
//! runtime.pin(&tensors).on_device().wait()?.copy_out(0, 1000, &mut bytes)?;
//! assert_eq!(bytes, [7; 10]);
//! # drop(tensors);
//! # runtime.close()?;
//! # Ok::<(), outcore::Error>(())
//! ```

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::thread::{self, JoinHandle};

use outcore::device::parts::{closed, has_a_link, report, report_refusal, run_call};
use outcore::device::{
    Completion, Completions, Device, DeviceAddress, DeviceFactory, DeviceSettings, EventId, FrameId, StreamId,
    StreamKind, StreamOp, Token,
};
use outcore::{Error, ErrorKind, PageSize, Result};

const NAME: &str = "accelerator";

/// Opens an accelerator for each runtime.
#[derive(Clone, Copy, Debug)]
pub struct Accelerator;

impl DeviceFactory for Accelerator {
    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn open(&self, settings: DeviceSettings, completions: Arc<dyn Completions>) -> Result<Arc<dyn Device>> {
        if settings.link.is_some() {
            return Err(has_a_link(NAME));
        }
        let shared = Arc::new(Shared {
            page_size: settings.page_size,
            memory: Mutex::new(Memory { next: settings.page_size.bytes(), ..Memory::default() }),
            queue: Mutex::default(),
            changed: Condvar::new(),
            completions,
        });
        let worker = {
            let shared = shared.clone();
            let spawned = thread::Builder::new().name(NAME.into()).spawn(move || shared.run());
            spawned.map_err(|cause| {
                Error::io("start the accelerator's thread", cause).remedy("raise the limit on threads (ulimit -u)")
            })?
        };
        let device = Opened { shared, worker: Mutex::new(Some(worker)) };
        device.grow_frames(settings.frames)?;
        Ok(Arc::new(device))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An event is a stream and a count of operations of all streams, in one number. Stream numbers are below this.
const STREAMS_MAX: u32 = 1 << 16;

/// The event after the first `count` operations, for a stream.
fn event(stream: StreamId, count: u64) -> EventId {
    EventId::new(count * u64::from(STREAMS_MAX) + u64::from(stream.get()))
}

/// Frames, and which address each is behind.
#[derive(Default)]
struct Memory {
    frames: Vec<Frame>,
    /// Frames by the address of the page that they are behind.
    behind: HashMap<u64, FrameId>,
    /// The first address that was never reserved.
    next: u64,
}

#[derive(Default)]
struct Frame {
    /// None before the first use, and after a discard.
    bytes: Option<Box<[u8]>>,
    address: Option<u64>,
}

impl Memory {
    fn frame(&mut self, frame: FrameId) -> Result<&mut Frame> {
        let count = self.frames.len();
        self.frames.get_mut(frame.index()).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, format!("{frame:?} does not exist: there are {count} frames"))
                .remedy("grow the frames first")
        })
    }

    /// Calls `visit` with each part of `len` bytes from `address` on that lies in one frame, and where it begins.
    fn each_part(
        &mut self,
        page: u64,
        address: DeviceAddress,
        len: u64,
        mut visit: impl FnMut(&mut [u8], usize),
    ) -> Result<()> {
        let mut done = 0;
        while done < len {
            let at = address.get() + done;
            let within = at % page;
            let part = (page - within).min(len - done);
            let frame = self.behind.get(&(at - within)).copied();
            let frame = frame.and_then(|frame| self.frames.get_mut(frame.index())).ok_or_else(|| {
                Error::new(ErrorKind::InvalidArgument, format!("no frame is behind the address {at:#x}"))
                    .remedy("map the pages before the operation is submitted")
            })?;
            let bytes = frame.bytes.get_or_insert_with(|| vec![0; page as usize].into_boxed_slice());
            visit(&mut bytes[within as usize..(within + part) as usize], done as usize);
            done += part;
        }
        Ok(())
    }
}

/// Operations that were submitted, in order.
#[derive(Default)]
struct Queue {
    waiting: VecDeque<(StreamId, StreamOp, Option<Token>)>,
    /// All that were ever submitted.
    submitted: u64,
    ended: u64,
    streams: u32,
    /// The first failure of each stream that had no token to report it, and how many operations had ended with it.
    failed: HashMap<StreamId, (u64, Error)>,
    closing: bool,
}

struct Shared {
    page_size: PageSize,
    memory: Mutex<Memory>,
    queue: Mutex<Queue>,
    /// Something was submitted, or the device closes.
    changed: Condvar,
    completions: Arc<dyn Completions>,
}

impl Shared {
    /// The worker: runs one operation after the other until the device closes and nothing is left.
    fn run(&self) {
        let mut queue = lock(&self.queue);
        loop {
            let Some((stream, op, token)) = queue.waiting.pop_front() else {
                if queue.closing {
                    return;
                }
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(queue);
            let result = self.carry_out(op);
            let mut ended = lock(&self.queue);
            ended.ended += 1;
            if let (None, Err(error)) = (token, &result) {
                let count = ended.ended;
                ended.failed.entry(stream).or_insert_with(|| (count, error.clone()));
            }
            drop(ended);
            if let Some(token) = token {
                // The receiver may panic, and may drop the last owner of the device.
                report(&*self.completions, &mut vec![Completion { token, result }]);
            }
            queue = lock(&self.queue);
        }
    }

    fn carry_out(&self, op: StreamOp) -> Result<()> {
        let page = self.page_size.bytes();
        match op {
            StreamOp::CopyIn { host, device, len } => {
                lock(&self.memory).each_part(page, device, len, |bytes, done| {
                    // SAFETY: the operation's memory is valid for `len` bytes and nobody writes it until its completion
                    // is reported (rule 5 of the contract); `done + bytes.len() <= len`. The frame's bytes are this
                    // device's.
                    unsafe {
                        std::ptr::copy_nonoverlapping(host.as_ptr().add(done), bytes.as_mut_ptr(), bytes.len());
                    }
                })
            }
            StreamOp::CopyOut { device, host, len } => {
                lock(&self.memory).each_part(page, device, len, |bytes, done| {
                    // SAFETY: as above, and nobody else reads or writes the operation's memory until then.
                    unsafe {
                        std::ptr::copy_nonoverlapping(bytes.as_ptr(), host.as_ptr().add(done), bytes.len());
                    }
                })
            }
            StreamOp::Zero { device, len } => lock(&self.memory).each_part(page, device, len, |bytes, _| bytes.fill(0)),
            StreamOp::Call(closure) => run_call(closure),
            StreamOp::Mark => Ok(()),
        }
    }
}

/// An accelerator that a runtime has opened.
struct Opened {
    shared: Arc<Shared>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

impl Opened {
    /// The queue, if the device is open.
    fn open_queue(&self) -> Result<MutexGuard<'_, Queue>> {
        let queue = lock(&self.shared.queue);
        if queue.closing { Err(closed(NAME)) } else { Ok(queue) }
    }
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accelerator").field("page_size", &self.shared.page_size).finish_non_exhaustive()
    }
}

impl Device for Opened {
    fn name(&self) -> &str {
        NAME
    }

    fn page_size(&self) -> PageSize {
        self.shared.page_size
    }

    fn direct_io(&self) -> bool {
        false
    }

    fn host_addressable(&self) -> bool {
        false
    }

    fn reserve(&self, pages: u32) -> Result<DeviceAddress> {
        let mut memory = lock(&self.shared.memory);
        let base = memory.next;
        let end = self.shared.page_size.bytes().checked_mul(pages.into()).and_then(|len| base.checked_add(len));
        memory.next = end.ok_or_else(|| {
            Error::new(ErrorKind::OutOfMemory, "the accelerator has no addresses left").remedy("open a new runtime")
        })?;
        Ok(DeviceAddress::new(base))
    }

    fn release(&self, base: DeviceAddress, pages: u32) -> Result<()> {
        let mut memory = lock(&self.shared.memory);
        for page in 0..u64::from(pages) {
            let address = base.offset(page * self.shared.page_size.bytes()).get();
            if let Some(frame) = memory.behind.remove(&address) {
                memory.frame(frame)?.address = None;
            }
        }
        Ok(())
    }

    fn frame_count(&self) -> u32 {
        lock(&self.shared.memory).frames.len() as u32
    }

    fn grow_frames(&self, count: u32) -> Result<()> {
        let mut memory = lock(&self.shared.memory);
        let count = memory.frames.len().max(count as usize);
        memory.frames.resize_with(count, Frame::default);
        Ok(())
    }

    fn map(&self, frame: FrameId, address: DeviceAddress) -> Result<()> {
        let mut memory = lock(&self.shared.memory);
        if let Some(before) = memory.frame(frame)?.address.replace(address.get()) {
            memory.behind.remove(&before);
        }
        match memory.behind.insert(address.get(), frame) {
            Some(other) if other != frame => memory.frame(other)?.address = None,
            _ => {}
        }
        Ok(())
    }

    fn protect(&self, _frame: FrameId) -> Result<()> {
        Ok(())
    }

    fn discard(&self, frame: FrameId) -> Result<()> {
        let mut memory = lock(&self.shared.memory);
        let frame = memory.frame(frame)?;
        frame.bytes = None;
        if let Some(address) = frame.address.take() {
            memory.behind.remove(&address);
        }
        Ok(())
    }

    fn create_stream(&self, _kind: StreamKind) -> Result<StreamId> {
        let mut queue = self.open_queue()?;
        if queue.streams + 1 == STREAMS_MAX {
            return Err(Error::new(ErrorKind::OutOfMemory, format!("an accelerator has {} streams", STREAMS_MAX - 1))
                .remedy("use streams again"));
        }
        queue.streams += 1;
        Ok(StreamId::new(queue.streams))
    }

    fn can_mark(&self, _stream: StreamId) -> Result<()> {
        self.open_queue().map(drop)
    }

    fn submit(&self, stream: StreamId, op: StreamOp, token: Option<Token>) -> Option<EventId> {
        let Ok(mut queue) = self.open_queue() else {
            report_refusal(&*self.shared.completions, token, closed(NAME));
            return None;
        };
        queue.waiting.push_back((stream, op, token));
        queue.submitted += 1;
        self.shared.changed.notify_one();
        Some(event(stream, queue.submitted))
    }

    fn record(&self, stream: StreamId) -> Result<EventId> {
        Ok(event(stream, self.open_queue()?.submitted))
    }

    fn wait(&self, _stream: StreamId, _event: EventId) -> Result<()> {
        // Everything submitted before the event runs before everything submitted from now on.
        self.open_queue().map(drop)
    }

    fn poll(&self, event: EventId) -> Result<Poll<()>> {
        let (stream, count) = (StreamId::new(event.get() as u32 % STREAMS_MAX), event.get() / u64::from(STREAMS_MAX));
        let queue = lock(&self.shared.queue);
        match queue.failed.get(&stream) {
            Some((failed, error)) if *failed <= count => Err(error.clone()),
            _ => Ok(if queue.ended >= count { Poll::Ready(()) } else { Poll::Pending }),
        }
    }

    fn close(&self) -> Result<()> {
        lock(&self.shared.queue).closing = true;
        self.shared.changed.notify_one();
        let worker = lock(&self.worker).take();
        // On the worker itself, which is inside a receiver of completions or a closure, nobody can wait for it.
        let foreign = worker.filter(|worker| worker.thread().id() != thread::current().id());
        match foreign.map(JoinHandle::join) {
            Some(Err(_)) => Err(Error::new(ErrorKind::Internal, "the accelerator's thread panicked")
                .remedy("look for the panic in what the program printed")),
            _ => Ok(()),
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // Nobody is left to be told.
        drop(self.close());
    }
}
