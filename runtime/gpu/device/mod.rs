//! The device over a driver: frames in the memory of one GPU, reached by its copy engines.
//!
//! A segment is a range of device addresses that the driver reserves once. A frame is a physical allocation that is
//! mapped behind the page it holds. Copies from and to host memory run at full speed once the memory is locked
//! ([`Device::lock_host`]); other memory goes through a small locked buffer of the stream.
//!
//! # Failure
//!
//! If the driver refuses a call, the operation that needed it fails. The device is poisoned by a
//! [fatal](Failure::fatal) failure, and by any error from waiting for the end of an operation: everything later then
//! fails with that first error, and the process goes on.
//!
//! # Exit
//!
//! A process may exit with a live runtime. Its threads then run on while the driver [shuts down](Failure::exiting), for
//! as long as exit handlers take. Nothing has failed, so nobody is to hear of a failure: whoever calls the device is
//! held back for [`EXIT`], and so are reports. If the process still lives after that, an exit handler waits for this
//! device. Then all that is outstanding ends with an error, so that nothing waits for ever.
//!
//! # Locking
//!
//! Calls of the driver may wait (rule 2 of its [contract](Driver)): a submission waits while the driver's queue is
//! full. So these locks are held over such calls, and each holds up only those who want the same:
//!
//! - a stream's `submission`, which keeps submissions to that stream in order;
//! - `growing`, which lets one caller at a time make frames;
//! - a stream's `asking`, which the reaper holds while it asks about a capture, after a failure. That waits for no
//!   work. Whoever forgets the stream takes it for a moment.
//!
//! Whoever forgets an adopted stream waits for its submissions, and so may wait until the driver's queue has room. On a
//! thread on which the driver runs a closure it takes none of these locks: the driver may need the closure to end
//! first.
//!
//! All others are held for moments, and never over a call of the driver. A thread takes them in this order, after the
//! ones above: the list of streams; the state of one stream; one of the mapper's, the reaper's, the event pool's. The
//! reaper takes only these. So does whoever asks for a result.

mod frames;
mod mapper;
mod pace;
mod reaper;
mod stream;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use outcore::device::parts::{closed, report_refusal, strict};
use outcore::device::{
    Completions, Device, DeviceAddress, EventId, FrameId, HostPointer, HostRegion, RawStream, StreamId, StreamKind,
    StreamOp, Token,
};
use outcore::dlpack::DLDevice;
use outcore::{Bytes, Error, ErrorKind, PageSize, Result};
use parking_lot::{Mutex, RwLock};

use crate::driver::{Driver, Failure, Locked, Outcome};
use frames::Layout;
use mapper::{Deferred, GiveBack, Mapper};
use reaper::Reaper;
use stream::{BOUNCE_BYTES, IN_HOST_FUNCTION, Stream};

/// Settings of a [`GpuDevice`].
#[derive(Clone, Debug)]
pub struct GpuConfig {
    /// What users call the device: `cuda:0`. Devices of one name are on one GPU.
    pub name: String,
    /// The GPU's number, as its driver counts.
    pub number: u32,
    /// The node of the machine's memory that is nearest to it, if that is known.
    pub numa_node: Option<u32>,
    /// Bytes of a page and of a frame: a multiple of the driver's [granularity](Driver::granularity).
    pub page_size: PageSize,
    /// How many frames exist at first. Their memory is taken at once.
    pub frames: u32,
}

#[derive(Debug)]
struct Streams<D: Driver> {
    all: Vec<Arc<Stream<D>>>,
    closed: bool,
}

impl<D: Driver> Streams<D> {
    /// The number of a new stream: that of a forgotten stream that has ended, or the next.
    fn place(&self, device: &str) -> Result<usize> {
        if self.closed {
            return Err(closed(device));
        }
        let spent = self.all.iter().position(|stream| stream.is_spent());
        let place = spent.unwrap_or(self.all.len());
        if place >= EventId::STREAMS_MAX {
            let message = format!("{device} has its limit of {} streams", EventId::STREAMS_MAX);
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("reuse streams"));
        }
        Ok(place)
    }
}

/// How long the device keeps still when the driver has shut down: longer than a process takes to exit.
const EXIT: Duration = Duration::from_secs(1);

struct Core<D: Driver> {
    name: String,
    number: u32,
    numa_node: Option<u32>,
    page_size: PageSize,
    /// The lowest and the highest priority of a stream.
    priorities: (i32, i32),
    mapper: Mapper<D>,
    /// Held by whoever makes frames.
    growing: Mutex<()>,
    reaper: Reaper<D>,
    /// Whether several copies may go to the driver in one call.
    batches: AtomicBool,
    /// Events for reuse.
    events: Mutex<Vec<D::Event>>,
    /// Locked buffers of adopted streams that were forgotten.
    bounces: Mutex<Vec<Locked>>,
    /// Host memory that is locked: length by address.
    locked: RwLock<BTreeMap<u64, u64>>,
    streams: RwLock<Streams<D>>,
    poison: OnceLock<Error>,
    /// When the driver was found to have shut down.
    exiting: OnceLock<Instant>,
    /// Declared, and so dropped, after everything that lives in it.
    driver: D,
    /// Dropped last: when it goes, nothing is left.
    sink: Arc<dyn Completions>,
}

impl<D: Driver> fmt::Debug for Core<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("name", &self.name)
            .field("page_size", &self.page_size)
            .field("streams", &self.streams.read().all)
            .field("poison", &self.poison)
            .finish_non_exhaustive()
    }
}

impl<D: Driver> Core<D> {
    /// Fails with the first error that cost the device.
    fn healthy(&self) -> Result<()> {
        match self.poison.get() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Marks the device as lost, with `error` as the cause unless it is lost already. Returns the first cause.
    fn poison(&self, error: Error) -> Error {
        let name = &self.name;
        let poison = self.poison.get_or_init(|| {
            let error = Error::new(ErrorKind::Device, format!("the GPU {name} failed, and what was on it is lost"))
                .caused_by(error)
                .remedy(D::WHEN_LOST);
            tracing::error!(%error);
            error
        });
        poison.clone()
    }

    /// Takes the device for lost because of a failure, or notes that the process exits.
    fn lose(&self, failure: Failure) -> Error {
        if !failure.exiting {
            return self.poison(failure.error);
        }
        self.exiting.get_or_init(Instant::now);
        let poison = self.poison.get_or_init(|| {
            let message = format!("the process is exiting, and its {} driver has shut down", D::NAME);
            let error = Error::new(ErrorKind::Closed, message).caused_by(failure.error);
            error.remedy("close the runtime before the end of `main`, if anything waits for it then")
        });
        poison.clone()
    }

    fn note(&self, failure: Failure) -> Error {
        if failure.fatal || failure.exiting { self.lose(failure) } else { failure.error }
    }

    fn done<T>(&self, outcome: Outcome<T>) -> Result<T> {
        outcome.map_err(|failure| self.note(failure)).inspect_err(|_| self.keep_still())
    }

    /// If the process exits, gives it the time to.
    fn keep_still(&self) {
        if let Some(since) = self.exiting.get() {
            thread::sleep(EXIT.saturating_sub(since.elapsed()));
        }
    }

    /// # Errors
    /// The first error that cost the device; a refusal in a closure on a stream; errors of the driver.
    fn enter(&self) -> Result<D::Current<'_>> {
        self.healthy().inspect_err(|_| self.keep_still())?;
        self.not_in_closure()?;
        self.done(self.driver.enter())
    }

    /// Refuses calls of the driver, and waits for it, on a thread on which the driver runs a closure.
    fn not_in_closure(&self) -> Result<()> {
        if !IN_HOST_FUNCTION.get() {
            return Ok(());
        }
        let message = format!("a closure on a stream of {} made a call that needs the {} driver", self.name, D::NAME);
        Err(Error::new(ErrorKind::InvalidArgument, message).remedy(
            "let the closure wake a task or a thread, and do it there: the driver must not be called by closures",
        ))
    }

    /// Takes frames from where they are, at once, and then takes out of the layout what is to be given back.
    fn vacate_and<T>(
        &self,
        vacate: impl FnOnce(&mut Layout<D>) -> Result<Vec<FrameId>>,
        take: impl FnOnce(&mut Layout<D>) -> T,
    ) -> Result<T> {
        self.not_in_closure()?;
        let mut state = self.mapper.lock();
        let frames = vacate(&mut state.layout)?;
        let (mut state, vacated) = self.mapper.settle(self, state, &frames);
        vacated?;
        Ok(take(&mut state.layout))
    }

    /// Gives a reservation back.
    fn release(&self, base: u64, pages: u32) -> Result<()> {
        // Out of the layout first: once the driver has the addresses, it may give them to another reservation.
        let taken =
            self.vacate_and(|layout| layout.vacate_range(base, pages), |layout| layout.take_reservation(base))?;
        let len = Bytes::new(u64::from(pages) * self.page_size.bytes());
        let free = |current| self.done(self.driver.free_addresses(&current, DeviceAddress::new(base), len));
        self.enter().and_then(free).inspect_err(|_| self.mapper.lock().layout.put_reservation(base, taken))
    }

    /// Gives the memory of a frame back, unless the frame is wanted behind an address by then.
    fn discard_unwanted(&self, frame: FrameId) -> Result<()> {
        let memory = self.vacate_and(
            |layout| Ok(if layout.is_wanted(frame) { Vec::new() } else { vec![frame] }),
            |layout| if layout.is_wanted(frame) { None } else { layout.take_memory(frame) },
        )?;
        self.release_memory(frame, memory)
    }

    /// Gives the memory of a frame back.
    fn discard(&self, frame: FrameId) -> Result<()> {
        let memory =
            self.vacate_and(|layout| layout.vacate(frame).map(|()| vec![frame]), |layout| layout.take_memory(frame))?;
        self.release_memory(frame, memory)
    }

    fn release_memory(&self, frame: FrameId, memory: Option<D::Memory>) -> Result<()> {
        let Some(memory) = memory else { return Ok(()) };
        let release = |current| self.done(self.driver.release(&current, memory));
        self.enter().and_then(release).inspect_err(|error| {
            if !self.mapper.lock().layout.put_memory(frame, memory) {
                tracing::warn!(%error, "memory of a frame that has new memory by now stays with the driver");
            }
        })
    }

    /// A bounce buffer for a stream: an unused one, or a new one.
    fn take_bounce(&self, current: &D::Current<'_>) -> Result<Locked> {
        let unused = self.bounces.lock().pop();
        unused.map_or_else(|| self.done(self.driver.alloc_locked(current, Bytes::new(BOUNCE_BYTES as u64))), Ok)
    }

    /// Submits operations to a stream, in order. Returns those with tokens that it has taken up; if it is closed, the
    /// tokens of those that it refuses, which are to be [reported](Self::refuse).
    fn hand_over(
        &self,
        id: StreamId,
        stream: &Arc<Stream<D>>,
        ops: Vec<(StreamOp, Option<Token>)>,
    ) -> std::result::Result<Vec<(Token, EventId)>, Vec<Option<Token>>> {
        let taken_up = stream.submit_all(self, ops)?;
        Ok(taken_up.into_iter().map(|(token, number)| (token, EventId::of(id, number))).collect())
    }

    /// Reports operations that a closed stream has refused.
    fn refuse(&self, tokens: Vec<Option<Token>>) {
        tokens.into_iter().for_each(|token| report_refusal(&*self.sink, token, closed(&self.name)));
    }

    fn take_event(&self, current: &D::Current<'_>) -> Result<D::Event> {
        let pooled = self.events.lock().pop();
        pooled.map_or_else(|| self.done(self.driver.create_event(current)), Ok)
    }

    fn return_event(&self, event: D::Event) {
        self.events.lock().push(event);
    }

    /// Gives up an owner's part of an event. The last one's makes it free for reuse.
    fn give_back(&self, event: Arc<D::Event>) {
        if let Some(event) = Arc::into_inner(event) {
            self.return_event(event);
        }
    }

    /// Bytes of frames that other devices of this process have on the same GPU.
    fn other_frames(&self) -> Bytes {
        let others: Vec<_> = OPEN.lock().iter().filter_map(Weak::upgrade).collect();
        let own = std::ptr::from_ref(self).cast::<()>();
        let others = others.iter().filter(|other| Arc::as_ptr(other).cast() != own && other.gpu() == self.name);
        Bytes::new(others.map(|other| other.held()).sum())
    }

    /// Whether a range of host memory lies in one piece that was locked.
    fn is_locked(&self, host: HostPointer, len: u64) -> bool {
        let start = host.as_ptr() as u64;
        let locked = self.locked.read();
        locked.range(..=start).next_back().is_some_and(|(base, size)| start + len <= base + size)
    }
}

impl<D: Driver> Drop for Core<D> {
    fn drop(&mut self) {
        // The reaper held the core: it has ended, and so has everything that was in flight.
        for stream in std::mem::take(&mut self.streams.get_mut().all) {
            if let Some(stream) = Arc::into_inner(stream) {
                stream.destroy(self);
            }
        }
        let current = match self.driver.enter() {
            Ok(current) => current,
            Err(failure) => return not_given_back(&failure),
        };
        for event in self.events.get_mut().drain(..) {
            self.driver.destroy_event(&current, event).unwrap_or_else(|failure| not_given_back(&failure));
        }
        for bounce in self.bounces.get_mut().drain(..) {
            self.driver.free_locked(&current, bounce).unwrap_or_else(|failure| not_given_back(&failure));
        }
        self.mapper.get_mut().clear(&self.driver, &current);
    }
}

/// Logs that something was not given back to the driver. At the exit of the process nothing has to be.
fn not_given_back(failure: &Failure) {
    let error = &failure.error;
    if failure.exiting {
        tracing::debug!(%error, "left to the end of the process");
    } else {
        tracing::warn!(%error, "something of the GPU's was not given back");
    }
}

/// The error if there is not enough memory for frames: what there is, and who could make room.
fn no_room<D: Driver>(name: &str, new: Bytes, held: Bytes, free: Bytes, total: Bytes, others: Bytes) -> Error {
    let mut message = format!("{new} more for frames are asked of {name}, which has {free} free of {total}");
    let most = held + free;
    let mut remedy = format!("choose a device budget of at most {most}");
    if others > Bytes::ZERO {
        message += &format!("; other runtimes of this process hold {others}");
        remedy += ", lower theirs (set_device_budget)";
    }
    remedy += ", or end what else uses the GPU's memory: ";
    remedy += D::WHO_HOLDS_MEMORY;
    Error::new(ErrorKind::OutOfMemory, message).remedy(remedy)
}

/// The devices of this process, for [`Core::other_frames`].
static OPEN: Mutex<Vec<Weak<dyn Frames>>> = Mutex::new(Vec::new());

/// What devices tell each other, whatever their drivers.
trait Frames: Send + Sync {
    /// The GPU's name.
    fn gpu(&self) -> &str;
    /// Bytes that frames have.
    fn held(&self) -> u64;
}

impl<D: Driver> Frames for Core<D> {
    fn gpu(&self) -> &str {
        &self.name
    }
    fn held(&self) -> u64 {
        self.mapper.lock().layout.held()
    }
}

/// A device in the memory of one GPU, over a [`Driver`]. See the [device contract](outcore::device).
pub struct GpuDevice<D: Driver> {
    core: Arc<Core<D>>,
}

impl<D: Driver> fmt::Debug for GpuDevice<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuDevice").field("core", &self.core).finish()
    }
}

impl<D: Driver> GpuDevice<D> {
    /// A device that reports completions to `sink`.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`] if a page is no multiple of the driver's granularity.
    /// - [`ErrorKind::OutOfMemory`] if the frames need more than is free.
    /// - Other refusals of the driver.
    pub fn new(driver: D, config: GpuConfig, sink: Arc<dyn Completions>) -> Result<Self> {
        let GpuConfig { name, number, numa_node, page_size, frames } = config;
        let plain = |failure: Failure| failure.error;
        let (granularity, priorities) = {
            let current = driver.enter().map_err(plain)?;
            let granularity = driver.granularity(&current).map_err(plain)?;
            (granularity, driver.priorities(&current).map_err(plain)?)
        };
        if !page_size.bytes().is_multiple_of(granularity.get().max(1)) {
            let page = Bytes::new(page_size.bytes());
            let message = format!("pages of {page} do not suit {name}, which allocates multiples of {granularity}");
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .remedy(format!("choose pages of {granularity}, or a multiple")));
        }
        let device = Self {
            core: Arc::new(Core {
                name,
                number,
                numa_node,
                page_size,
                priorities,
                mapper: Mapper::new(Layout::new(page_size)),
                growing: Mutex::default(),
                reaper: Reaper::new(),
                batches: AtomicBool::new(driver.has_batches()),
                events: Mutex::default(),
                bounces: Mutex::default(),
                locked: RwLock::default(),
                streams: RwLock::new(Streams { all: Vec::new(), closed: false }),
                poison: OnceLock::new(),
                exiting: OnceLock::new(),
                driver,
                sink,
            }),
        };
        let mut open = OPEN.lock();
        open.retain(|core| core.strong_count() > 0);
        let core: Weak<Core<D>> = Arc::downgrade(&device.core);
        open.push(core);
        drop(open);
        device.grow_frames(frames)?;
        Mapper::start(&device.core)?;
        Reaper::start(&device.core)?;
        Ok(device)
    }

    fn stream(&self, index: u32) -> Result<Arc<Stream<D>>> {
        let streams = self.core.streams.read();
        let count = streams.all.len();
        streams.all.get(index as usize).cloned().ok_or_else(|| {
            let message = format!("stream {index} does not exist: {} has {count} streams", self.core.name);
            Error::new(ErrorKind::InvalidArgument, message).remedy("name a stream that this device has made or adopted")
        })
    }

    /// Adds the stream that `make` makes. It gets the number of a forgotten stream that has ended, or a new number.
    fn add_stream(&self, make: impl FnOnce() -> Result<Arc<Stream<D>>>) -> Result<StreamId> {
        let core = &self.core;
        // Without the lock, because the driver makes it.
        core.streams.read().place(&core.name)?;
        let stream = make()?;
        let mut streams = core.streams.write();
        let place = match streams.place(&core.name) {
            Ok(place) => place,
            Err(error) => {
                drop(streams);
                if let Some(stream) = Arc::into_inner(stream) {
                    stream.destroy(core);
                }
                return Err(error);
            }
        };
        match streams.all.get_mut(place) {
            Some(forgotten) => {
                let spent = std::mem::replace(forgotten, stream);
                drop(streams);
                core.bounces.lock().extend(spent.take_bounce());
                if let Err(error) = spent.failure() {
                    tracing::debug!(%error, "a stream that was forgotten had failed");
                }
            }
            None => streams.all.push(stream),
        }
        Ok(StreamId::new(place as u32))
    }
}

impl<D: Driver> Device for GpuDevice<D> {
    fn name(&self) -> &str {
        &self.core.name
    }

    fn page_size(&self) -> PageSize {
        self.core.page_size
    }

    fn direct_io(&self) -> bool {
        false
    }

    fn host_addressable(&self) -> bool {
        false
    }

    fn dlpack(&self) -> Option<DLDevice> {
        Some(DLDevice { device_type: D::DLPACK?, device_id: i32::try_from(self.core.number).ok()? })
    }

    fn numa_node(&self) -> Option<u32> {
        self.core.numa_node
    }

    fn reserve(&self, pages: u32) -> Result<DeviceAddress> {
        if pages == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, "cannot reserve a segment of 0 pages")
                .remedy("reserve at least one page"));
        }
        let core = &self.core;
        let current = core.enter()?;
        let base = core.done(frames::reserve(&core.driver, &current, pages, core.page_size.bytes()))?;
        core.mapper.lock().layout.add_reservation(base, pages);
        Ok(DeviceAddress::new(base))
    }

    fn release(&self, base: DeviceAddress, pages: u32) -> Result<()> {
        // A closure that drops a tensor leads here.
        let later = || self.core.mapper.give_back_later(GiveBack::Addresses(base.get(), pages));
        if IN_HOST_FUNCTION.get() && later()? {
            return Ok(());
        }
        self.core.release(base.get(), pages)
    }

    fn free_memory(&self) -> Result<Bytes> {
        let core = &self.core;
        let current = core.enter()?;
        core.done(core.driver.memory(&current)).map(|(free, _)| free)
    }

    fn frame_count(&self) -> u32 {
        self.core.mapper.lock().layout.frame_count()
    }

    fn grow_frames(&self, count: u32) -> Result<()> {
        let core = &self.core;
        let _growing = core.growing.lock();
        let more = count.saturating_sub(self.frame_count());
        if more == 0 {
            return Ok(());
        }
        let current = core.enter()?;
        let (free, total) = core.done(core.driver.memory(&current))?;
        let page = Bytes::new(core.page_size.bytes());
        let new = Bytes::new(u64::from(more) * page.get());
        let refused = || {
            let held = Bytes::new(core.mapper.lock().layout.held());
            no_room::<D>(&core.name, new, held, free, total, core.other_frames())
        };
        if new > free {
            return Err(refused());
        }
        // Free memory may be in pieces, or gone by now.
        let made = frames::create(&core.driver, &current, more, page).map_err(|failure| match core.note(failure) {
            error if error.kind() == ErrorKind::OutOfMemory => refused().caused_by(error),
            error => error,
        })?;
        core.mapper.lock().layout.add_frames(made);
        Ok(())
    }

    fn map(&self, frame: FrameId, address: DeviceAddress) -> Result<()> {
        self.core.mapper.map(&self.core, frame, address.get(), false)
    }

    fn map_here(&self, frame: FrameId, address: DeviceAddress) -> Result<()> {
        self.core.mapper.map(&self.core, frame, address.get(), true)
    }

    fn protect(&self, frame: FrameId) -> Result<()> {
        // Left out in a closure, because it only narrows access.
        if !strict() || IN_HOST_FUNCTION.get() {
            return Ok(());
        }
        self.core.vacate_and(|layout| layout.vacate(frame).map(|()| vec![frame]), |_| ())
    }

    fn discard(&self, frame: FrameId) -> Result<()> {
        if IN_HOST_FUNCTION.get() && self.core.mapper.give_back_later(GiveBack::Memory(frame))? {
            return Ok(());
        }
        self.core.discard(frame)
    }

    fn lock_host(&self, memory: HostRegion) -> Result<()> {
        let core = &self.core;
        let current = core.enter()?;
        let mut outcome = core.driver.lock(&current, memory.base, memory.len);
        if let Err(failure) = &mut outcome {
            // Drivers have an error for what they do not know, and memory that is not locked is only copied more
            // slowly. A lost device gives its error again.
            failure.fatal = failure.fatal && core.driver.memory(&current).is_err();
        }
        core.done(outcome).map_err(|error| {
            error.remedy(
                "the driver may lock as much as the kernel lets it: raise `ulimit -l`, or choose a smaller host tier",
            )
        })?;
        core.locked.write().insert(memory.base.as_ptr() as u64, memory.len.get());
        Ok(())
    }

    fn unlock_host(&self, memory: HostRegion) -> Result<()> {
        let core = &self.core;
        core.locked.write().remove(&(memory.base.as_ptr() as u64));
        core.not_in_closure()?;
        let current = core.done(core.driver.enter())?;
        core.done(core.driver.unlock(&current, memory.base))
    }

    fn create_stream(&self, kind: StreamKind) -> Result<StreamId> {
        let core = &self.core;
        let (lowest, highest) = core.priorities;
        let priority = match kind {
            StreamKind::Fill => highest,
            StreamKind::WriteBack => lowest,
            StreamKind::Compute => 0.clamp(highest.min(lowest), lowest.max(highest)),
        };
        self.add_stream(|| Stream::create(core, priority))
    }

    unsafe fn adopt_stream(&self, raw: RawStream) -> Result<StreamId> {
        // SAFETY: the caller's promise.
        self.add_stream(|| unsafe { Stream::adopt(&self.core, raw) })
    }

    fn forget_stream(&self, stream: StreamId) {
        if let Ok(stream) = self.stream(stream.get()) {
            stream.forget(&self.core);
        }
    }

    fn raw_stream(&self, stream: StreamId) -> Result<RawStream> {
        Ok(self.stream(stream.get())?.raw(&self.core))
    }

    fn can_mark(&self, stream: StreamId) -> Result<()> {
        self.stream(stream.get())?.can_mark(&self.core)
    }

    fn submit(&self, id: StreamId, op: StreamOp, token: Option<Token>) -> Option<EventId> {
        let core = &self.core;
        let stream = match self.stream(id.get()) {
            Ok(stream) => stream,
            Err(error) => {
                report_refusal(&*core.sink, token, error);
                return None;
            }
        };
        let Deferred { stream, op, token, .. } = core.mapper.defer(Deferred { id, stream, op, token })?;
        if IN_HOST_FUNCTION.get() {
            // The mapper, which would hand it on, has ended.
            core.refuse(vec![token]);
            return None;
        }
        match core.hand_over(id, &stream, vec![(op, token)]) {
            Ok(taken_up) => taken_up.into_iter().next().map(|(_, end)| end),
            Err(refused) => {
                core.refuse(refused);
                None
            }
        }
    }

    fn record(&self, stream: StreamId) -> Result<EventId> {
        let recorded = self.stream(stream.get())?;
        self.core.not_in_closure()?;
        self.core.mapper.catch_up(&recorded);
        let number = recorded.record(&self.core)?;
        Ok(EventId::of(stream, number))
    }

    fn wait(&self, stream: StreamId, event: EventId) -> Result<()> {
        let (recorded, number) = event.parts();
        let (other, waiting) = (self.stream(recorded.get())?, self.stream(stream.get())?);
        self.core.not_in_closure()?;
        self.core.mapper.catch_up(&waiting);
        waiting.wait(&self.core, &other, number)
    }

    fn poll(&self, event: EventId) -> Result<Poll<()>> {
        let (stream, number) = event.parts();
        self.stream(stream.get())?.poll(&self.core, number)
    }

    fn lost(&self) -> Option<Error> {
        self.core.healthy().err()
    }

    fn close(&self) -> Result<()> {
        if IN_HOST_FUNCTION.get() {
            let message = format!(
                "{} cannot be closed by a closure on one of its streams: it would wait for itself",
                self.core.name
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("close it from a thread of your own"));
        }
        self.core.streams.write().closed = true;
        // Operations that wait for mappings are submitted before the streams are closed.
        self.core.mapper.begin_close();
        let mapped = self.core.mapper.join();
        let streams = self.core.streams.read().all.clone();
        for stream in &streams {
            stream.begin_close();
        }
        self.core.reaper.begin_close();
        let reported = self.core.reaper.join();
        let ended = streams.iter().map(|stream| stream.failure()).fold(Ok(()), Result::and);
        mapped.and(reported).and(ended).and(self.core.healthy())
    }
}

impl<D: Driver> Drop for GpuDevice<D> {
    fn drop(&mut self) {
        if IN_HOST_FUNCTION.get() {
            // A closure held the last owner. Its own stream cannot be waited for here. The threads end by themselves,
            // and the last of them gives everything back.
            self.core.streams.write().closed = true;
            self.core.mapper.begin_close();
            self.core.streams.read().all.iter().for_each(|stream| stream.begin_close());
            self.core.reaper.begin_close();
            return;
        }
        match self.close() {
            Err(error) if self.core.exiting.get().is_some() => tracing::debug!(%error),
            Err(error) => tracing::error!(%error, "the {} device ended with a failure", D::NAME),
            Ok(()) => {}
        }
    }
}
