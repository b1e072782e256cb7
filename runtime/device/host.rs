//! The host device: a device without a GPU, in ordinary memory.
//!
//! A frame is a mapping of its own. `map` moves it with `mremap` to the address of the page it is to hold, which
//! costs page-table edits instead of the zeroing and refaulting that giving memory back and taking it again costs.
//! The streams' threads copy.
//!
//! # Invariants
//!
//! 1. A frame is in one place: nowhere (it has no memory), at its home in the pool, or behind one page of a
//!    reservation; the reservation's `occupants` say the same thing from the other side.
//! 2. Every address of the pools and reservations that no frame is behind is inaccessible.
//! 3. Frames and the gaps between them are at most two mappings a frame, so [`HostDevice::new`] can check the kernel's
//!    limit once.
//!
//! # Locking
//!
//! One lock guards all places: the kernel serialises changes of one address space anyway. The warmer works on one
//! frame, a slice at a time, without the lock; `map` of that frame waits for the slice, all others go ahead.

use std::collections::BTreeMap;
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};

use super::link::{Direction, LinkModel, LinkSchedule};
use super::stream::{Copier, STREAMS_MAX, Stream, closed, event_of, event_parts, report_apart};
use super::sys::{self, HUGE_PAGE_BYTES, Region};
use super::{Completions, Device, DeviceAddress, EventId, StreamId, StreamKind, StreamOp, Token};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, FrameId, PageSize};
use crate::machine;

/// The warmer touches this many bytes at a time: 5 ms on a machine that brings memory in at 0.4 GB/s, and one huge
/// page. It is the longest a `map` waits for the warmer.
const WARM_SLICE_BYTES: u64 = 2 << 20;
/// Mappings left to the rest of the process when the kernel's limit is checked.
const MAPPINGS_FOR_OTHERS: u64 = 1024;
/// A modelled copy spins for the last moment before its end, because a sleep ends up to this much late.
const SPIN: Duration = Duration::from_micros(50);
/// Marks a page of a reservation that no frame is behind.
const NO_FRAME: u32 = u32::MAX;

/// What a host device is made of.
#[derive(Clone, Debug)]
pub struct HostDeviceConfig {
    /// Bytes of a page and of a frame.
    pub page_size: PageSize,
    /// How many frames exist at first.
    pub frames: u32,
    /// Makes copies take as long as over this link. The store then has to pass through host memory, as it would with
    /// a GPU.
    pub link: Option<LinkModel>,
    /// Brings the frames' memory in from a background thread, so that the first use of a frame finds it there.
    pub warm: bool,
}

impl Default for HostDeviceConfig {
    /// No frames, pages of [`PageSize::DEFAULT`], no link, warm.
    fn default() -> Self {
        Self { page_size: PageSize::DEFAULT, frames: 0, link: None, warm: true }
    }
}

#[derive(Debug)]
struct Frame {
    /// Where the frame waits when no page has it; its own for life.
    home: u64,
    /// Where its memory is; `None` while it has none.
    at: Option<u64>,
    accessible: bool,
    /// The warmer is touching a slice of it.
    warming: bool,
    /// It has been mapped once; the warmer leaves it alone.
    used: bool,
}

#[derive(Debug)]
struct Reservation {
    region: Region,
    occupants: Vec<u32>,
}

/// A page of a reservation.
#[derive(Clone, Copy)]
struct Slot {
    base: u64,
    page: usize,
}

#[derive(Debug, Default)]
struct Layout {
    frames: Vec<Frame>,
    /// Keeps the frames' homes.
    pools: Vec<Region>,
    reservations: BTreeMap<u64, Reservation>,
}

impl Layout {
    fn frame(&mut self, frame: FrameId) -> Result<&mut Frame> {
        let count = self.frames.len();
        self.frames.get_mut(frame.index()).ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidArgument,
                format!("{frame:?} does not exist: the host device has {count} frames"),
            )
        })
    }

    fn slot(&self, address: u64, page: PageSize) -> Option<Slot> {
        let (&base, reservation) = self.reservations.range(..=address).next_back()?;
        let offset = address - base;
        (offset < reservation.region.len()).then(|| Slot { base, page: page.page_of(offset) as usize })
    }

    fn occupant(&self, slot: Slot) -> Option<FrameId> {
        let occupant = *self.reservations.get(&slot.base)?.occupants.get(slot.page)?;
        (occupant != NO_FRAME).then_some(FrameId::new(occupant))
    }

    fn occupy(&mut self, slot: Slot, frame: Option<FrameId>) {
        let page = self.reservations.get_mut(&slot.base).and_then(|r| r.occupants.get_mut(slot.page));
        if let Some(page) = page {
            *page = frame.map_or(NO_FRAME, FrameId::get);
        }
    }

    /// Notes that `frame` is now at `to`, and that nothing is where it was.
    fn placed(&mut self, frame: FrameId, to: Option<u64>, accessible: bool, page: PageSize) {
        let Some(state) = self.frames.get_mut(frame.index()) else { return };
        let from = std::mem::replace(&mut state.at, to);
        state.accessible = accessible;
        if let Some(slot) = from.and_then(|at| self.slot(at, page)) {
            self.occupy(slot, None);
        }
        if let Some(slot) = to.and_then(|at| self.slot(at, page)) {
            self.occupy(slot, Some(frame));
        }
    }
}

#[derive(Debug)]
struct Core {
    page_size: PageSize,
    huge: bool,
    layout: Mutex<Layout>,
    /// Signalled when the warmer lets go of a frame.
    warmed: Condvar,
    /// Tells the warmer to stop.
    stopping: AtomicBool,
    /// The modelled link, and the moment its times count from.
    link: Option<(Mutex<LinkSchedule>, Instant)>,
}

impl Core {
    fn page_bytes(&self) -> u64 {
        self.page_size.bytes()
    }

    fn refused(&self, what: String, cause: std::io::Error) -> Error {
        let error = Error::io(what, cause);
        if error.kind() != ErrorKind::OutOfMemory {
            return error;
        }
        error.remedy("give the device fewer or larger pages, raise vm.max_map_count, or free memory")
    }

    /// Contract rule 1; `frame` is not being warmed.
    fn map(&self, layout: &mut Layout, frame: FrameId, address: u64, slot: Slot) -> Result<()> {
        let (page, len) = (self.page_size, self.page_bytes());
        let state = layout.frame(frame)?;
        state.used = true;
        let (from, accessible) = (state.at, state.accessible);
        if from != Some(address) {
            if let Some(other) = layout.occupant(slot) {
                let home = layout.frame(other)?.home;
                // SAFETY: the core owns both ranges (invariant 1); the caller of `map` keeps operations away from
                // `address`, and nobody knows a home.
                unsafe { sys::relocate(address, home, len) }
                    .map_err(|e| self.refused(format!("move {other:?} out of the way"), e))?;
                let accessible = layout.frame(other)?.accessible;
                layout.placed(other, Some(home), accessible, page);
            }
            match from {
                // SAFETY: as above, for the frame's place and `address`, which nothing is behind now.
                Some(from) => unsafe { sys::relocate(from, address, len) },
                // SAFETY: as above.
                None => unsafe { sys::commit(address, len, self.huge) },
            }
            .map_err(|e| self.refused(format!("map {frame:?}"), e))?;
            layout.placed(frame, Some(address), accessible || from.is_none(), page);
        }
        if !layout.frame(frame)?.accessible {
            // SAFETY: the frame is behind `address`, which the core owns.
            unsafe { sys::set_access(address, len, true) }
                .map_err(|e| self.refused(format!("make {frame:?} accessible"), e))?;
            layout.frame(frame)?.accessible = true;
        }
        Ok(())
    }

    /// Refuses a range that is not wholly mapped: better an error than a fault in somebody else's process.
    fn check_mapped(&self, address: DeviceAddress, len: u64) -> Result<()> {
        let layout = self.layout.lock();
        let refuse = || {
            let message = format!("a copy of {} names device memory that is not mapped", Bytes::new(len));
            Error::new(ErrorKind::InvalidArgument, message).remedy("map the pages before the copy is submitted")
        };
        let last = address.get().checked_add(len.saturating_sub(1)).ok_or_else(refuse)?;
        let mut at = address.get();
        while at <= last {
            let occupant = layout.slot(at, self.page_size).and_then(|slot| layout.occupant(slot));
            let frame = occupant.and_then(|frame| layout.frames.get(frame.index()));
            if !frame.is_some_and(|frame| frame.accessible) {
                return Err(refuse());
            }
            at = match (at | (self.page_bytes() - 1)).checked_add(1) {
                Some(next) => next,
                None => break,
            };
        }
        Ok(())
    }

    /// When a copy that starts now ends on the modelled link.
    fn deadline(&self, direction: Direction, len: u64) -> Option<Instant> {
        let (schedule, epoch) = self.link.as_ref()?;
        let end = schedule.lock().admit(epoch.elapsed(), direction, len);
        epoch.checked_add(end)
    }

    /// Touches the frames in order until all are warm or the device stops.
    fn warm(&self) {
        let mut next = 0;
        let mut layout = self.layout.lock();
        while !self.stopping.load(Ordering::Relaxed) && next < layout.frames.len() {
            let Some(frame) = layout.frames.get_mut(next).filter(|frame| !frame.used && frame.at.is_none()) else {
                next += 1;
                continue;
            };
            let home = frame.home;
            frame.warming = true;
            // SAFETY: homes are the core's, and the frame has no memory yet, so nothing is there.
            let mut outcome = unsafe { sys::commit(home, self.page_bytes(), self.huge) };
            if outcome.is_ok() {
                frame.at = Some(home);
                frame.accessible = true;
            }
            let mut offset = 0;
            while outcome.is_ok() && offset < self.page_bytes() {
                let len = WARM_SLICE_BYTES.min(self.page_bytes() - offset);
                drop(layout);
                // SAFETY: committed above; `warming` keeps the frame at home, where nobody else uses it.
                outcome = unsafe { sys::populate(home + offset, len) };
                offset += len;
                layout = self.layout.lock();
                if layout.frames.get(next).is_none_or(|frame| frame.used) || self.stopping.load(Ordering::Relaxed) {
                    break;
                }
            }
            if let Some(frame) = layout.frames.get_mut(next) {
                frame.warming = false;
            }
            self.warmed.notify_all();
            if let Err(cause) = outcome {
                tracing::warn!(frame = next, %cause, "cannot warm frames up; first uses will be slower");
                return;
            }
            next += 1;
        }
    }
}

impl Copier for Core {
    fn run(&self, op: StreamOp, before_wait: &mut dyn FnMut()) -> Result<()> {
        let (direction, len) = match op {
            StreamOp::CopyIn { len, .. } => (Some(Direction::In), len),
            StreamOp::CopyOut { len, .. } => (Some(Direction::Out), len),
            _ => (None, 0),
        };
        let deadline = direction.and_then(|direction| self.deadline(direction, len));
        match op {
            StreamOp::CopyIn { host, device, len } => {
                self.check_mapped(device, len)?;
                // SAFETY: `device` was checked; contract rule 5 keeps both ranges alive and unused by others.
                unsafe { ptr::copy_nonoverlapping(host.as_ptr(), pointer(device), len as usize) };
            }
            StreamOp::CopyOut { device, host, len } => {
                self.check_mapped(device, len)?;
                // SAFETY: as above.
                unsafe { ptr::copy_nonoverlapping(pointer(device), host.as_ptr(), len as usize) };
            }
            StreamOp::Zero { device, len } => {
                self.check_mapped(device, len)?;
                // SAFETY: as above.
                unsafe { ptr::write_bytes(pointer(device), 0, len as usize) };
            }
            StreamOp::Call(_) | StreamOp::Mark => {
                return Err(Error::new(ErrorKind::Internal, "what is no copy reached the copier"));
            }
        }
        if let Some(deadline) = deadline.filter(|deadline| *deadline > Instant::now()) {
            before_wait();
            wait_until(deadline);
        }
        Ok(())
    }
}

fn pointer(address: DeviceAddress) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address.get() as usize)
}

fn wait_until(deadline: Instant) {
    let left = deadline.saturating_duration_since(Instant::now());
    thread::sleep(left.saturating_sub(SPIN));
    while Instant::now() < deadline {
        std::hint::spin_loop();
    }
}

/// A device in ordinary memory. See the [device contract](super) and `runtime/device/host.rs`.
///
/// ```
/// use std::sync::Arc;
/// use outcore::device::{Completion, Completions, Device, HostDevice, HostDeviceConfig};
/// use outcore::FrameId;
///
/// struct Ignore;
/// impl Completions for Ignore {
///     fn completed(&self, _done: &mut Vec<Completion>) {}
/// }
///
/// let device = HostDevice::new(HostDeviceConfig { frames: 1, ..Default::default() }, Arc::new(Ignore))?;
/// let segment = device.reserve(1000)?;
/// let seventh = segment.offset(7 * device.page_size().bytes());
/// device.map(FrameId::new(0), seventh)?;
/// device.close()?;
/// # Ok::<(), outcore::Error>(())
/// ```
pub struct HostDevice {
    core: Arc<Core>,
    sink: Arc<dyn Completions>,
    streams: RwLock<Streams>,
    warmer: Mutex<Option<JoinHandle<()>>>,
    warm: bool,
}

#[derive(Debug, Default)]
struct Streams {
    all: Vec<Arc<Stream>>,
    closed: bool,
}

impl fmt::Debug for HostDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostDevice")
            .field("page_size", &self.core.page_size)
            .field("frames", &self.frame_count())
            .field("streams", &self.streams.read().all)
            .finish_non_exhaustive()
    }
}

impl HostDevice {
    /// How many frames a kernel that allows a process `max_map_count` mappings lets a host device have.
    pub const fn frames_allowed(max_map_count: u64) -> u64 {
        max_map_count.saturating_sub(MAPPINGS_FOR_OTHERS) / 2
    }

    /// A device that reports completions to `sink`.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`] if a page is smaller than the kernel's, or the frames need more mappings than
    ///   `vm.max_map_count` allows.
    /// - [`ErrorKind::Unsupported`] if the kernel cannot move mappings (before Linux 5.7).
    /// - [`ErrorKind::OutOfMemory`] if the kernel gives no address space.
    pub fn new(config: HostDeviceConfig, sink: Arc<dyn Completions>) -> Result<Self> {
        let kernel_page = sys::system_page_bytes();
        let page_size = config.page_size;
        if page_size.bytes() < kernel_page {
            let message = format!("pages of {page_size:?} are smaller than the kernel's, {}", Bytes::new(kernel_page));
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .remedy(format!("choose pages of at least {}", Bytes::new(kernel_page))));
        }
        sys::probe_relocate()?;
        let core = Arc::new(Core {
            page_size,
            huge: page_size.bytes() >= HUGE_PAGE_BYTES,
            layout: Mutex::default(),
            warmed: Condvar::new(),
            stopping: AtomicBool::new(false),
            link: config.link.map(|model| (Mutex::new(LinkSchedule::new(model)), Instant::now())),
        });
        let warmer = Mutex::new(None);
        let device = Self { core, sink, streams: RwLock::default(), warmer, warm: config.warm };
        device.grow_frames(config.frames)?;
        Ok(device)
    }

    /// Starts the warmer over, for new frames.
    fn start_warmer(&self) {
        let mut warmer = self.warmer.lock();
        if self.streams.read().closed {
            return;
        }
        if let Some(previous) = warmer.take() {
            self.core.stopping.store(true, Ordering::Relaxed);
            let _ = previous.join();
        }
        self.core.stopping.store(false, Ordering::Relaxed);
        let core = Arc::clone(&self.core);
        match thread::Builder::new().name("host-warm".into()).spawn(move || core.warm()) {
            Ok(thread) => *warmer = Some(thread),
            Err(cause) => {
                tracing::warn!(%cause, "cannot start the thread that warms frames; first uses will be slower")
            }
        }
    }

    fn stop_warmer(&self) {
        let mut warmer = self.warmer.lock();
        self.core.stopping.store(true, Ordering::Relaxed);
        let thread = warmer.take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that warms frames panicked");
        }
    }
}

impl Streams {
    fn get(&self, index: usize) -> Result<&Arc<Stream>> {
        let count = self.all.len();
        self.all.get(index).ok_or_else(|| {
            let message = format!("stream {index} does not exist: the host device has {count} streams");
            Error::new(ErrorKind::InvalidArgument, message)
        })
    }
}

/// Refuses a number of frames that could need more mappings than the kernel allows.
fn check_mappings(frames: u32, page: PageSize, limit: u64) -> Result<()> {
    let needed = 2 * u64::from(frames) + MAPPINGS_FOR_OTHERS;
    if needed <= limit {
        return Ok(());
    }
    let message = format!(
        "{frames} frames of {} may need {needed} mappings, but the kernel allows {limit} (vm.max_map_count)",
        Bytes::new(page.bytes())
    );
    let memory = Bytes::new(u64::from(frames).saturating_mul(page.bytes()));
    let fitting = HostDevice::frames_allowed(limit);
    let larger = memory.get().div_ceil(fitting.max(1)).checked_next_power_of_two();
    let pages = larger.and_then(|bytes| PageSize::new(Bytes::new(bytes)).ok());
    let or_pages = pages.map(|p| format!(", or use pages of {}", Bytes::new(p.bytes()))).unwrap_or_default();
    Err(Error::new(ErrorKind::InvalidArgument, message)
        .remedy(format!("run `sysctl -w vm.max_map_count={}`{or_pages}", needed.next_power_of_two())))
}

impl Device for HostDevice {
    fn name(&self) -> &str {
        "host"
    }

    fn page_size(&self) -> PageSize {
        self.core.page_size
    }

    fn direct_io(&self) -> bool {
        self.core.link.is_none()
    }

    fn host_addressable(&self) -> bool {
        true
    }

    fn reserve(&self, pages: u32) -> Result<DeviceAddress> {
        if pages == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, "cannot reserve a segment of 0 pages"));
        }
        let len = u64::from(pages) * self.core.page_bytes();
        let region = Region::reserve(len, self.core.page_bytes().max(HUGE_PAGE_BYTES), "a segment")?;
        let base = region.base();
        let reservation = Reservation { region, occupants: vec![NO_FRAME; pages as usize] };
        self.core.layout.lock().reservations.insert(base, reservation);
        Ok(DeviceAddress(base))
    }

    fn release(&self, base: DeviceAddress, pages: u32) -> Result<()> {
        let mut layout = self.core.layout.lock();
        let reservation = layout
            .reservations
            .remove(&base.get())
            .ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "the range to release was never reserved"))?;
        let refuse = |message: String| Err(Error::new(ErrorKind::InvalidArgument, message));
        let reserved = reservation.occupants.len();
        if reserved != pages as usize {
            layout.reservations.insert(base.get(), reservation);
            return refuse(format!("a range of {reserved} pages cannot be released as one of {pages}"));
        }
        // Free frames may still be behind the range: they keep their memory, at home.
        let occupants: Vec<FrameId> =
            reservation.occupants.iter().filter(|id| **id != NO_FRAME).map(|id| FrameId::new(*id)).collect();
        layout.reservations.insert(base.get(), reservation);
        for frame in occupants {
            let state = layout.frame(frame)?;
            let (Some(at), home, accessible) = (state.at, state.home, state.accessible) else { continue };
            // SAFETY: the frame is at `at`, which nobody uses any more, as the caller says; nobody knows a home.
            unsafe { sys::relocate(at, home, self.core.page_bytes()) }
                .map_err(|e| self.core.refused(format!("move {frame:?} home"), e))?;
            layout.placed(frame, Some(home), accessible, self.core.page_size);
        }
        layout.reservations.remove(&base.get());
        Ok(())
    }

    fn frame_count(&self) -> u32 {
        self.core.layout.lock().frames.len() as u32
    }

    fn grow_frames(&self, count: u32) -> Result<()> {
        let page = self.core.page_size;
        {
            let mut layout = self.core.layout.lock();
            let new = u64::from(count).saturating_sub(layout.frames.len() as u64);
            if new == 0 {
                return Ok(());
            }
            match machine::max_map_count() {
                Ok(limit) => check_mappings(count, page, limit)?,
                Err(error) => tracing::warn!(%error, "cannot check the limit on mappings"),
            }
            let align = page.bytes().max(HUGE_PAGE_BYTES);
            let pool = Region::reserve(new * page.bytes(), align, "the frames of the host device")?;
            let homes = (0..new).map(|i| pool.base() + i * page.bytes());
            let fresh = |home| Frame { home, at: None, accessible: false, warming: false, used: false };
            layout.frames.extend(homes.map(fresh));
            layout.pools.push(pool);
        }
        if self.warm {
            self.start_warmer();
        }
        Ok(())
    }

    fn map(&self, frame: FrameId, address: DeviceAddress) -> Result<()> {
        let core = &self.core;
        let mut layout = core.layout.lock();
        layout.frame(frame)?.used = true;
        while layout.frame(frame)?.warming {
            core.warmed.wait(&mut layout);
        }
        let aligned = address.get().is_multiple_of(core.page_bytes());
        let slot = layout.slot(address.get(), core.page_size).filter(|_| aligned).ok_or_else(|| {
            let message = format!("{frame:?} cannot be mapped to {address:?}: not a page of a reserved range");
            Error::new(ErrorKind::InvalidArgument, message)
        })?;
        core.map(&mut layout, frame, address.get(), slot)
    }

    fn protect(&self, frame: FrameId) -> Result<()> {
        if !cfg!(feature = "strict") {
            return Ok(());
        }
        let core = &self.core;
        let mut layout = core.layout.lock();
        let state = layout.frame(frame)?;
        // A frame at home is behind no page, so there is nothing to protect.
        let Some(at) = state.at.filter(|at| *at != state.home && state.accessible) else { return Ok(()) };
        // SAFETY: the frame is behind `at`; the caller says that nobody uses it any more.
        unsafe { sys::set_access(at, core.page_bytes(), false) }
            .map_err(|e| core.refused(format!("protect {frame:?}"), e))?;
        state.accessible = false;
        Ok(())
    }

    fn makes_bare_frames(&self) -> bool {
        // Where frames are warmed, they get memory at any time.
        !self.warm
    }

    fn frame_memory(&self, frame: FrameId) -> Result<Bytes> {
        let core = &self.core;
        let mut layout = core.layout.lock();
        let resident = layout.frame(frame)?.at.map_or(Ok(0), |at| sys::resident(at, core.page_bytes()));
        resident.map(Bytes::new).map_err(|cause| core.refused(format!("ask for the memory of {frame:?}"), cause))
    }

    fn discard(&self, frame: FrameId) -> Result<()> {
        let core = &self.core;
        let mut layout = core.layout.lock();
        layout.frame(frame)?.used = true;
        while layout.frame(frame)?.warming {
            core.warmed.wait(&mut layout);
        }
        if let Some(at) = layout.frame(frame)?.at {
            // SAFETY: the frame is at `at`; the caller says that nobody uses it any more.
            unsafe { sys::vacate(at, core.page_bytes()) }.map_err(|e| core.refused(format!("discard {frame:?}"), e))?;
            layout.placed(frame, None, false, core.page_size);
        }
        Ok(())
    }

    fn create_stream(&self, kind: StreamKind) -> Result<StreamId> {
        let mut streams = self.streams.write();
        let index = streams.all.len();
        if streams.closed {
            return Err(closed("host"));
        }
        if index >= STREAMS_MAX {
            let message = format!("the host device has its limit of {STREAMS_MAX} streams");
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("reuse streams"));
        }
        let name = match kind {
            StreamKind::Fill => "fill",
            StreamKind::WriteBack => "back",
            StreamKind::Compute => "comp",
        };
        let copier = Arc::clone(&self.core) as Arc<dyn Copier>;
        let stream = Stream::start(format!("host-{name}-{index}"), copier, Arc::clone(&self.sink))?;
        streams.all.push(Arc::new(stream));
        Ok(StreamId(index as u32))
    }

    fn can_mark(&self, stream: StreamId) -> Result<()> {
        let streams = self.streams.read();
        if streams.closed { Err(closed("host")) } else { streams.get(stream.0 as usize).map(drop) }
    }

    fn submit(&self, stream: StreamId, op: StreamOp, token: Option<Token>) -> Option<EventId> {
        let streams = self.streams.read();
        let queued = match streams.get(stream.0 as usize) {
            Ok(stream) => stream.submit(op, token).map_err(|token| (token, closed("host"))),
            Err(error) => Err((token, error)),
        };
        drop(streams);
        match queued {
            Ok(number) => token.map(|_| event_of(stream, number)),
            Err((token, error)) => {
                report_apart(&self.sink, token, error);
                None
            }
        }
    }

    fn record(&self, stream: StreamId) -> Result<EventId> {
        let count = self.streams.read().get(stream.0 as usize)?.record();
        Ok(event_of(stream, count))
    }

    fn wait(&self, stream: StreamId, event: EventId) -> Result<()> {
        let streams = self.streams.read();
        let (recorded, count) = event_parts(event);
        streams.get(stream.0 as usize)?.wait(streams.get(recorded as usize)?, count)
    }

    fn poll(&self, event: EventId) -> Result<Poll<()>> {
        let (stream, count) = event_parts(event);
        self.streams.read().get(stream as usize)?.poll(count)
    }

    fn close(&self) -> Result<()> {
        self.streams.write().closed = true;
        self.stop_warmer();
        // Not under the lock: what the streams still run may call the device.
        let streams = self.streams.read().all.clone();
        for stream in &streams {
            stream.begin_close();
        }
        // All are joined before the first failure is returned.
        streams.iter().map(|stream| stream.join()).fold(Ok(()), Result::and)
    }
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::error!(%error, "the host device ended with a failure");
        }
    }
}
