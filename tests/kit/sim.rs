//! The simulated device: real bytes, streams on a virtual clock.
//!
//! Frames are memory of the process that no pointer leads to; device addresses are numbers. On the host device the
//! kernel catches wrong accesses, and a GPU faults. Here every access is checked, and errors say in words what was
//! wrong. So is rule 1 of the contract, which no other device can check: nothing is mapped elsewhere while an operation
//! uses it.
//!
//! An operation takes the time that a link model says, or none, on a clock that only moves from event to event. A seed
//! chooses which of several streams goes on first where nothing orders them. With an [owned](SimClock::Owned) clock
//! there is no thread: the same calls give the same completions in the same order at the same times, bit for bit, and a
//! simulator can use the device as one of its sources of events. With a [free](SimClock::Free) clock a thread moves the
//! clock whenever there is work, for code that waits; the order then also depends on when work arrives.
//!
//! # Invariants
//!
//! 1. A frame has memory or none, and is behind one page of a reservation or none; the reservation's `occupants` say
//!    the same from the other side. Addresses are never used twice, so an address that was released is never valid
//!    again.
//! 2. A copy is resolved to frames when it is submitted, and counts as a user of each until it has ended; a frame with
//!    users stays where it is. Bytes move at the copy's end, so code that uses them too early is found out.
//! 3. The first item of a busy stream is running: it is in `running`, or is a closure that has been taken to be run.
//!    Only `step` takes items out.
//! 4. Closures and the sink are called with no lock held.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::task::Poll;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use outcore::device::parts::{closed, report, report_refusal, run_call, strict, unknown_event};
use outcore::device::{
    Completion, Completions, Device, DeviceAddress, DeviceFactory, DeviceSettings, Direction, EventId, FrameId,
    HostPointer, HostRegion, LinkModel, LinkSchedule, StreamId, StreamKind, StreamOp, Token,
};
use outcore::{Bytes, Error, ErrorKind, PageSize, Result};
use outcore_pager::random::Random;
use parking_lot::{Condvar, Mutex};

/// Marks a page of a reservation without a frame.
const NO_FRAME: u32 = u32::MAX;
/// The first device address: a multiple of every page size, no pointer of this process, and no small number.
const FIRST_ADDRESS: u64 = 1 << 56;
/// The content of memory that nobody has written: not zero, because code might rely on zeros.
const UNWRITTEN: u8 = 0xD7;
const NAME: &str = "sim";

/// Who moves the clock of a [`SimDevice`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SimClock {
    /// A thread of the device, whenever there is work.
    #[default]
    Free,
    /// The caller, by [`SimDevice::advance`]; closures run and completions are reported on its thread.
    Owned,
}

/// Settings of a simulated device.
#[derive(Clone, Debug)]
pub struct SimDeviceConfig {
    /// Bytes of a page and of a frame.
    pub page_size: PageSize,
    /// How many frames exist at first.
    pub frames: u32,
    /// How long copies take; without a link, no time.
    pub link: Option<LinkModel>,
    /// Chooses among streams that nothing orders.
    pub seed: u64,
    /// Who moves the clock.
    pub clock: SimClock,
}

impl Default for SimDeviceConfig {
    /// No frames, pages of [`PageSize::DEFAULT`], no link, seed 0, a free clock.
    fn default() -> Self {
        Self { page_size: PageSize::DEFAULT, frames: 0, link: None, seed: 0, clock: SimClock::Free }
    }
}

#[derive(Debug, Default)]
struct Frame {
    bytes: Option<Box<[u8]>>,
    at: Option<u64>,
    /// How many operations that have not ended use the frame.
    users: u32,
    protected: bool,
}

/// A part of a range of addresses that lies in one frame.
#[derive(Clone, Copy, Debug)]
struct Piece {
    frame: FrameId,
    offset: usize,
    len: usize,
}

#[derive(Debug)]
struct Layout {
    page: u64,
    frames: Vec<Frame>,
    /// The frames behind the pages of each reservation, by its base address.
    reservations: BTreeMap<u64, Vec<u32>>,
    next: u64,
}

fn refuse<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidArgument, message))
}

impl Layout {
    fn frame(&mut self, frame: FrameId) -> Result<&mut Frame> {
        let count = self.frames.len();
        match self.frames.get_mut(frame.index()) {
            Some(frame) => Ok(frame),
            None => refuse(format!("{frame:?} does not exist: the simulated device has {count} frames")),
        }
    }

    /// A frame, if no operation uses it.
    fn idle(&mut self, frame: FrameId, what: &str) -> Result<&mut Frame> {
        let state = self.frame(frame)?;
        if state.users > 0 {
            let message = format!("{what} of {frame:?}: {} operations that have not ended use it", state.users);
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("wait for their completions first"));
        }
        Ok(state)
    }

    fn occupant(&mut self, address: u64) -> Option<&mut u32> {
        let (base, occupants) = self.reservations.range_mut(..=address).next_back()?;
        occupants.get_mut(usize::try_from((address - base) / self.page).ok()?)
    }

    fn reserve(&mut self, pages: u32) -> Result<u64> {
        if pages == 0 {
            return refuse("cannot reserve a segment of 0 pages");
        }
        // One page stays free between ranges, so that an access beyond the end of one is not in the next.
        let end = (u64::from(pages) + 1).checked_mul(self.page).and_then(|len| self.next.checked_add(len));
        let end = end.ok_or_else(|| {
            Error::new(ErrorKind::OutOfMemory, format!("no addresses are left for {pages} pages"))
                .remedy("open a new device, or choose smaller pages")
        })?;
        let base = std::mem::replace(&mut self.next, end);
        self.reservations.insert(base, vec![NO_FRAME; pages as usize]);
        Ok(base)
    }

    fn release(&mut self, base: u64, pages: u32) -> Result<()> {
        let Some(occupants) = self.reservations.get(&base) else {
            return refuse("the range to release was never reserved");
        };
        let reserved = occupants.len();
        if reserved != pages as usize {
            return refuse(format!("a range of {reserved} pages cannot be released as one of {pages}"));
        }
        let behind: Vec<u32> = occupants.iter().copied().filter(|frame| *frame != NO_FRAME).collect();
        for frame in &behind {
            self.idle(FrameId::new(*frame), "the release of the address")?;
        }
        for frame in behind {
            self.frame(FrameId::new(frame))?.at = None;
        }
        self.reservations.remove(&base);
        Ok(())
    }

    /// Takes an idle frame from its address.
    fn vacate(&mut self, frame: FrameId) -> Result<()> {
        if let Some(at) = self.frame(frame)?.at.take()
            && let Some(occupant) = self.occupant(at)
        {
            *occupant = NO_FRAME;
        }
        Ok(())
    }

    fn map(&mut self, frame: FrameId, address: u64) -> Result<()> {
        let page = self.page as usize;
        let (at, protected) = {
            let state = self.frame(frame)?;
            (state.at, state.protected)
        };
        let aligned = address.is_multiple_of(self.page);
        let Some(occupant) = self.occupant(address).filter(|_| aligned).map(|occupant| *occupant) else {
            return refuse(format!("{frame:?} cannot be mapped to {address:#x}: not a page of a reserved range"));
        };
        if at == Some(address) && !protected {
            return Ok(());
        }
        self.idle(frame, "the mapping")?;
        if occupant != NO_FRAME && occupant != frame.get() {
            self.idle(FrameId::new(occupant), "the displacement")?;
            self.vacate(FrameId::new(occupant))?;
        }
        self.vacate(frame)?;
        let state = self.frame(frame)?;
        state.bytes.get_or_insert_with(|| vec![UNWRITTEN; page].into_boxed_slice());
        state.at = Some(address);
        state.protected = false;
        if let Some(occupant) = self.occupant(address) {
            *occupant = frame.get();
        }
        Ok(())
    }

    /// The frames behind a range; counts one more user of each.
    fn take(&mut self, address: DeviceAddress, len: u64) -> Result<Vec<Piece>> {
        let unmapped = || {
            let message = format!("a copy of {} names device memory that is not mapped", Bytes::new(len));
            Error::new(ErrorKind::InvalidArgument, message).remedy("map the pages before the copy is submitted")
        };
        let end = address.get().checked_add(len).ok_or_else(unmapped)?;
        let mut pieces = Vec::new();
        let mut at = address.get();
        while at < end {
            let frame = self.occupant(at).map(|occupant| *occupant).filter(|frame| *frame != NO_FRAME);
            let frame = FrameId::new(frame.ok_or_else(unmapped)?);
            if self.frame(frame)?.protected {
                return Err(unmapped());
            }
            // Reservations and frames begin at multiples of a page.
            let offset = at % self.page;
            let part = (self.page - offset).min(end - at);
            pieces.push(Piece { frame, offset: offset as usize, len: part as usize });
            at += part;
        }
        for piece in &pieces {
            self.frame(piece.frame)?.users += 1;
        }
        Ok(pieces)
    }

    /// Calls `work` with each piece's bytes and their offset in the whole, and ends the use of the frames.
    fn give(&mut self, pieces: &[Piece], mut work: impl FnMut(&mut [u8], usize)) -> Result<()> {
        let mut at = 0;
        for piece in pieces {
            let state = self.frame(piece.frame)?;
            state.users -= 1;
            let bytes =
                state.bytes.as_deref_mut().and_then(|bytes| bytes.get_mut(piece.offset..piece.offset + piece.len));
            let Some(bytes) = bytes else {
                return Err(Error::new(ErrorKind::Internal, format!("{:?} lost its memory in use", piece.frame)));
            };
            work(bytes, at);
            at += piece.len;
        }
        Ok(())
    }
}

type Call = Box<dyn FnOnce() + Send>;

/// An entry of a stream's queue.
enum Item {
    Copy {
        direction: Direction,
        host: HostPointer,
        len: u64,
        pieces: Vec<Piece>,
    },
    Zero {
        pieces: Vec<Piece>,
    },
    Call(Call),
    Mark,
    /// Waits for this many items of another stream.
    Wait(u32, u64),
    /// An operation that was wrong when it was submitted; it fails in its turn.
    Wrong(Error),
}

#[derive(Default)]
struct Queue {
    items: VecDeque<(Item, Option<Token>)>,
    queued: u64,
    ended: u64,
    busy: bool,
    /// The first failure that was not reported by token, and the number of its item.
    failure: Option<(u64, Error)>,
}

/// The outcome of one step of the clock.
enum Step {
    /// An operation ended, with its completion if it has a token.
    Ended(Option<Completion>),
    /// A closure is to be run.
    Call(u32, Call),
}

struct State {
    now: Duration,
    random: Random,
    link: Option<LinkSchedule>,
    layout: Layout,
    streams: Vec<Queue>,
    /// When the first items of busy streams end. Equal times are ordered at random.
    running: BinaryHeap<Reverse<(Duration, u64, u32)>>,
    /// Closures that have returned, by stream, with their results.
    returned: VecDeque<(u32, Result<()>)>,
    closing: bool,
}

impl State {
    fn stream(&mut self, index: u32) -> Result<&mut Queue> {
        let count = self.streams.len();
        match self.streams.get_mut(index as usize) {
            Some(stream) => Ok(stream),
            None => refuse(format!("stream {index} does not exist: the simulated device has {count} streams")),
        }
    }

    /// Starts every item that can start now. The streams are tried in random order, which decides the order on the
    /// link.
    fn start(&mut self) {
        loop {
            let waiting =
                self.streams.iter().enumerate().filter(|(_, stream)| !stream.busy && !stream.items.is_empty());
            let mut waiting: Vec<u32> = waiting.map(|(index, _)| index as u32).collect();
            self.random.shuffle(&mut waiting);
            let mut passed = false;
            for index in waiting {
                passed |= self.start_first(index);
            }
            // A stream that has passed a wait has more to start, and may let others pass theirs.
            if !passed {
                return;
            }
        }
    }

    /// Starts the first item of a stream that is not busy. Returns whether it was a wait that is over.
    fn start_first(&mut self, index: u32) -> bool {
        let crossing = match self.streams[index as usize].items.front() {
            None => return false,
            Some((Item::Wait(other, count), _)) => {
                let over = self.streams[*other as usize].ended >= *count;
                if over {
                    let stream = &mut self.streams[index as usize];
                    stream.items.pop_front();
                    stream.ended += 1;
                }
                return over;
            }
            Some((Item::Copy { direction, len, .. }, _)) => Some((*direction, *len)),
            Some(_) => None,
        };
        let end = match (&mut self.link, crossing) {
            (Some(link), Some((direction, len))) => link.admit(self.now, direction, len),
            _ => self.now,
        };
        self.streams[index as usize].busy = true;
        self.running.push(Reverse((end, self.random.next_u64(), index)));
        false
    }

    /// The time at which the next operation ends.
    fn next(&mut self) -> Option<Duration> {
        if !self.returned.is_empty() {
            return Some(self.now);
        }
        self.start();
        self.running.peek().map(|Reverse((end, ..))| *end)
    }

    /// Ends the next operation.
    fn step(&mut self) -> Option<Step> {
        if let Some((index, result)) = self.returned.pop_front() {
            let token = self.streams[index as usize].items.pop_front().and_then(|(_, token)| token);
            return Some(Step::Ended(self.ended(index, token, result)));
        }
        self.start();
        let Reverse((end, _, index)) = self.running.pop()?;
        self.now = self.now.max(end);
        let stream = &mut self.streams[index as usize];
        if let Some((item @ Item::Call(_), _)) = stream.items.front_mut()
            && let Item::Call(call) = std::mem::replace(item, Item::Mark)
        {
            // The item keeps its place until the closure has returned.
            return Some(Step::Call(index, call));
        }
        let (item, token) = stream.items.pop_front()?;
        let result = self.run(item);
        Some(Step::Ended(self.ended(index, token, result)))
    }

    fn run(&mut self, item: Item) -> Result<()> {
        match item {
            Item::Copy { direction, host, pieces, .. } => self.layout.give(&pieces, |bytes, at| {
                let (host, device) = (host.offset(at as u64).as_ptr(), bytes.as_mut_ptr());
                let (from, to) = match direction {
                    Direction::In => (host.cast_const(), device),
                    Direction::Out => (device.cast_const(), host),
                };
                // SAFETY: contract rule 5 keeps the operation's host memory valid, and unused by others, until the
                // operation is reported, which comes later; a frame's memory belongs to the device alone.
                unsafe { std::ptr::copy_nonoverlapping(from, to, bytes.len()) };
            }),
            Item::Zero { pieces } => self.layout.give(&pieces, |bytes, _| bytes.fill(0)),
            Item::Mark => Ok(()),
            Item::Wrong(error) => Err(error),
            Item::Call(_) | Item::Wait(..) => {
                Err(Error::new(ErrorKind::Internal, "a simulated stream was to run neither a copy nor a fill"))
            }
        }
    }

    /// Notes the end of a stream's first item, which has been taken out.
    fn ended(&mut self, index: u32, token: Option<Token>, result: Result<()>) -> Option<Completion> {
        let stream = &mut self.streams[index as usize];
        stream.busy = false;
        stream.ended += 1;
        match (token, result) {
            (Some(token), result) => Some(Completion { token, result }),
            (None, Err(error)) => {
                stream.failure.get_or_insert((stream.ended, error));
                None
            }
            (None, Ok(())) => None,
        }
    }

    fn is_idle(&self) -> bool {
        self.streams.iter().all(|stream| stream.items.is_empty())
    }

    fn first_failure(&self) -> Result<()> {
        let failures = self.streams.iter().filter_map(|stream| stream.failure.as_ref());
        failures.map(|(_, error)| Err(error.clone())).next().unwrap_or(Ok(()))
    }
}

struct Core {
    page_size: PageSize,
    clock: SimClock,
    state: Mutex<State>,
    /// Signalled when there is work, and when the device closes.
    changed: Condvar,
    calls: Mutex<VecDeque<(u32, Call)>>,
    called: Condvar,
    sink: Arc<dyn Completions>,
}

thread_local! {
    /// Whether a closure of a stream is running on this thread.
    static IN_CLOSURE: Cell<bool> = const { Cell::new(false) };
}

impl Core {
    fn run_call(&self, index: u32, call: Call) {
        let outside = IN_CLOSURE.replace(true);
        let result = run_call(call);
        IN_CLOSURE.set(outside);
        self.state.lock().returned.push_back((index, result));
        self.changed.notify_all();
    }

    /// Ends the next operation, if any is running.
    fn step(&self) -> Option<()> {
        let step = self.state.lock().step()?;
        match step {
            Step::Ended(completion) => report(&*self.sink, &mut completion.into_iter().collect()),
            Step::Call(index, call) if self.clock == SimClock::Free => {
                self.calls.lock().push_back((index, call));
                self.called.notify_one();
            }
            Step::Call(index, call) => self.run_call(index, call),
        }
        Some(())
    }

    /// The thread of a free clock.
    fn run(&self) {
        loop {
            while self.step().is_some() {}
            let mut state = self.state.lock();
            if state.next().is_some() {
                continue;
            }
            if state.closing && state.is_idle() {
                break;
            }
            self.changed.wait(&mut state);
        }
        // A thread that has looked at the queue and is about to wait holds this lock.
        drop(self.calls.lock());
        self.called.notify_all();
    }

    /// The thread that runs closures with a free clock. A closure that waits delays other closures, as it may on a GPU,
    /// but no copies.
    fn run_calls(&self) {
        loop {
            let next = {
                let mut calls = self.calls.lock();
                loop {
                    if let Some(next) = calls.pop_front() {
                        break Some(next);
                    }
                    let state = self.state.lock();
                    if state.closing && state.is_idle() {
                        break None;
                    }
                    drop(state);
                    self.called.wait(&mut calls);
                }
            };
            match next {
                Some((index, call)) => self.run_call(index, call),
                None => return,
            }
        }
    }
}

/// A device without a machine. See the [device contract](outcore::device) and the [module](self).
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use std::time::Duration;
/// use outcore::device::{Completion, Completions, Device, FrameId};
/// use outcore_testkit::sim::{SimClock, SimDevice, SimDeviceConfig};
/// use outcore::device::{LinkModel, StreamKind, StreamOp, Token};
/// use outcore::Bytes;
///
/// #[derive(Default)]
/// struct Log(Mutex<Vec<Token>>);
/// impl Completions for Log {
///     fn completed(&self, done: &mut Vec<Completion>) {
///         self.0.lock().unwrap().extend(done.drain(..).map(|completion| completion.token));
///     }
/// }
///
/// let log = Arc::new(Log::default());
/// let link = LinkModel::new(Bytes::gib(16), Duration::from_micros(10), true)?;
/// let config = SimDeviceConfig { frames: 1, link: Some(link), clock: SimClock::Owned, ..Default::default() };
/// let device = SimDevice::new(config, log.clone())?;
/// let segment = device.reserve(10)?;
/// device.map(FrameId::new(0), segment)?;
/// let fills = device.create_stream(StreamKind::Fill)?;
/// device.submit(fills, StreamOp::Zero { device: segment, len: 4096 }, Some(Token(7)));
/// assert!(log.0.lock().unwrap().is_empty(), "the clock has not moved");
/// assert_eq!(device.advance(), Some(Duration::ZERO));
/// assert_eq!(*log.0.lock().unwrap(), [Token(7)]);
/// assert_eq!(device.advance(), None);
/// device.close()?;
/// # Ok::<(), outcore::Error>(())
/// ```
pub struct SimDevice {
    core: Arc<Core>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl fmt::Debug for SimDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.core.state.lock();
        f.debug_struct("SimDevice")
            .field("page_size", &self.core.page_size)
            .field("frames", &state.layout.frames.len())
            .field("streams", &state.streams.len())
            .field("now", &state.now)
            .finish_non_exhaustive()
    }
}

impl SimDevice {
    /// A device that reports completions to `sink`.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if a free clock gets no thread.
    pub fn new(config: SimDeviceConfig, sink: Arc<dyn Completions>) -> Result<Self> {
        let SimDeviceConfig { page_size, frames, link, seed, clock } = config;
        let page = page_size.bytes();
        let layout = Layout { page, frames: Vec::new(), reservations: BTreeMap::new(), next: FIRST_ADDRESS };
        let state = State {
            now: Duration::ZERO,
            random: Random(seed),
            link: link.map(LinkSchedule::new),
            layout,
            streams: Vec::new(),
            running: BinaryHeap::new(),
            returned: VecDeque::new(),
            closing: false,
        };
        let core = Arc::new(Core {
            page_size,
            clock,
            state: Mutex::new(state),
            changed: Condvar::new(),
            calls: Mutex::default(),
            called: Condvar::new(),
            sink,
        });
        let device = Self { core, threads: Mutex::default() };
        device.grow_frames(frames)?;
        if clock == SimClock::Free {
            let (clock, closures) = (Arc::clone(&device.core), Arc::clone(&device.core));
            device.start_thread("sim-clock", move || clock.run())?;
            device.start_thread("sim-call", move || closures.run_calls())?;
        }
        Ok(device)
    }

    fn start_thread(&self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = thread::Builder::new().name(name.to_owned()).spawn(run).map_err(|cause| {
            Error::io(format!("start the thread {name}"), cause).remedy("raise the thread limit (ulimit -u)")
        })?;
        self.threads.lock().push(thread);
        Ok(())
    }

    /// Accepts no more operations, and lets the queued ones end.
    fn begin_close(&self) {
        self.core.state.lock().closing = true;
        self.core.changed.notify_all();
        self.core.called.notify_all();
    }
}

/// The clock, for tests that move it.
impl SimDevice {
    /// The time on the device's clock.
    pub fn now(&self) -> Duration {
        self.core.state.lock().now
    }

    /// The time at which the next operation ends, if any is running; `now` if a completion is due.
    pub fn next_event(&self) -> Option<Duration> {
        self.core.state.lock().next()
    }

    /// Moves the clock to the end of the next operation, and ends it: its bytes move, and its completion is reported
    /// before this returns the time. Does nothing and returns `None` if no operation is running.
    pub fn advance(&self) -> Option<Duration> {
        self.core.step().map(|()| self.now())
    }

    /// Ends, one after the other, all operations that end by `time`. Then sets the clock to `time`, unless it was later
    /// before.
    pub fn advance_to(&self, time: Duration) {
        while self.next_event().is_some_and(|next| next <= time) {
            self.advance();
        }
        let mut state = self.core.state.lock();
        state.now = state.now.max(time);
    }
}

impl Device for SimDevice {
    fn name(&self) -> &str {
        NAME
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

    fn reserve(&self, pages: u32) -> Result<DeviceAddress> {
        self.core.state.lock().layout.reserve(pages).map(DeviceAddress::new)
    }

    fn release(&self, base: DeviceAddress, pages: u32) -> Result<()> {
        self.core.state.lock().layout.release(base.get(), pages)
    }

    fn frame_count(&self) -> u32 {
        self.core.state.lock().layout.frames.len() as u32
    }

    fn grow_frames(&self, count: u32) -> Result<()> {
        let frames = &mut self.core.state.lock().layout.frames;
        let count = frames.len().max(count as usize);
        frames.resize_with(count, Frame::default);
        Ok(())
    }

    fn map(&self, frame: FrameId, address: DeviceAddress) -> Result<()> {
        self.core.state.lock().layout.map(frame, address.get())
    }

    fn protect(&self, frame: FrameId) -> Result<()> {
        let mut state = self.core.state.lock();
        let frame = state.layout.idle(frame, "the protection")?;
        frame.protected = strict();
        Ok(())
    }

    fn makes_bare_frames(&self) -> bool {
        true
    }

    fn frame_memory(&self, frame: FrameId) -> Result<Bytes> {
        let layout = &mut self.core.state.lock().layout;
        let has = layout.idle(frame, "the memory")?.bytes.is_some();
        Ok(if has { Bytes::new(self.core.page_size.bytes()) } else { Bytes::ZERO })
    }

    fn discard(&self, frame: FrameId) -> Result<()> {
        let layout = &mut self.core.state.lock().layout;
        layout.idle(frame, "the discarding")?.bytes = None;
        layout.vacate(frame)
    }

    /// Locked memory is not copied faster here.
    fn lock_host(&self, _: HostRegion) -> Result<()> {
        Ok(())
    }

    fn create_stream(&self, _: StreamKind) -> Result<StreamId> {
        let mut state = self.core.state.lock();
        if state.closing {
            return Err(closed(NAME));
        }
        let index = state.streams.len();
        if index >= EventId::STREAMS_MAX {
            let message = format!("the simulated device has its limit of {} streams", EventId::STREAMS_MAX);
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("reuse streams"));
        }
        state.streams.push(Queue::default());
        Ok(StreamId::new(index as u32))
    }

    fn can_mark(&self, stream: StreamId) -> Result<()> {
        let mut state = self.core.state.lock();
        if state.closing { Err(closed(NAME)) } else { state.stream(stream.get()).map(drop) }
    }

    fn submit(&self, stream: StreamId, op: StreamOp, token: Option<Token>) -> Option<EventId> {
        let mut state = self.core.state.lock();
        let known = if state.closing { Err(closed(NAME)) } else { state.stream(stream.get()).map(drop) };
        if let Err(error) = known {
            drop(state);
            report_refusal(&*self.core.sink, token, error);
            return None;
        }
        let item = match op {
            StreamOp::CopyIn { host, device, len } => {
                let direction = Direction::In;
                state.layout.take(device, len).map(|pieces| Item::Copy { direction, host, len, pieces })
            }
            StreamOp::CopyOut { device, host, len } => {
                let direction = Direction::Out;
                state.layout.take(device, len).map(|pieces| Item::Copy { direction, host, len, pieces })
            }
            StreamOp::Zero { device, len } => state.layout.take(device, len).map(|pieces| Item::Zero { pieces }),
            StreamOp::Call(call) => Ok(Item::Call(call)),
            StreamOp::Mark => Ok(Item::Mark),
        };
        let good = item.is_ok();
        let mut taken_up = None;
        if let Ok(queue) = state.stream(stream.get()) {
            queue.items.push_back((item.unwrap_or_else(Item::Wrong), token));
            queue.queued += 1;
            taken_up = token.filter(|_| good).map(|_| EventId::of(stream, queue.queued));
        }
        drop(state);
        self.core.changed.notify_all();
        taken_up
    }

    fn record(&self, stream: StreamId) -> Result<EventId> {
        let queued = self.core.state.lock().stream(stream.get())?.queued;
        Ok(EventId::of(stream, queued))
    }

    fn wait(&self, stream: StreamId, event: EventId) -> Result<()> {
        let (other, count) = event.parts();
        let (other, own) = (other.get(), stream.get());
        let mut state = self.core.state.lock();
        if count > state.stream(other)?.queued {
            return Err(unknown_event());
        }
        let closing = state.closing;
        let waiting = state.stream(own)?;
        if other == own {
            return Ok(());
        }
        if closing {
            return Err(closed(NAME));
        }
        waiting.items.push_back((Item::Wait(other, count), None));
        waiting.queued += 1;
        drop(state);
        self.core.changed.notify_all();
        Ok(())
    }

    fn poll(&self, event: EventId) -> Result<Poll<()>> {
        let (stream, count) = event.parts();
        let mut state = self.core.state.lock();
        let stream = state.stream(stream.get())?;
        if count > stream.queued {
            return Err(unknown_event());
        }
        match &stream.failure {
            Some((at, error)) if *at <= count => Err(error.clone()),
            _ if stream.ended >= count => Ok(Poll::Ready(())),
            _ => Ok(Poll::Pending),
        }
    }

    fn close(&self) -> Result<()> {
        if IN_CLOSURE.get() {
            let message =
                "the simulated device cannot be closed by a closure on one of its streams: it would wait for itself";
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("close it from a thread of your own"));
        }
        self.begin_close();
        if self.core.clock == SimClock::Owned {
            while self.core.step().is_some() {}
        }
        let threads = std::mem::take(&mut *self.threads.lock());
        // A receiver of completions may hold the device's last owner; its thread cannot wait for itself.
        let own = threads.iter().any(|thread| thread.thread().id() == thread::current().id());
        for thread in threads {
            if !own && thread.join().is_err() {
                return Err(Error::new(ErrorKind::Internal, "a thread of the simulated device panicked"));
            }
        }
        self.core.state.lock().first_failure()
    }
}

impl Drop for SimDevice {
    fn drop(&mut self) {
        if IN_CLOSURE.get() {
            // The threads hold the core, and end by themselves.
            return self.begin_close();
        }
        if let Err(error) = self.close() {
            tracing::debug!(%error, "close the simulated device");
        }
    }
}

/// Opens simulated devices with a [free](SimClock::Free) clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Simulated {
    /// Chooses among streams that nothing orders.
    pub seed: u64,
}

impl DeviceFactory for Simulated {
    fn name(&self) -> String {
        format!("sim:{}", self.seed)
    }

    fn open(&self, settings: DeviceSettings, completions: Arc<dyn Completions>) -> Result<Arc<dyn Device>> {
        let DeviceSettings { page_size, frames, link, .. } = settings;
        let config = SimDeviceConfig { page_size, frames, link, seed: self.seed, clock: SimClock::Free };
        Ok(Arc::new(SimDevice::new(config, completions)?))
    }

    fn is_process_memory(&self) -> bool {
        true
    }
}
