//! The transfer engine: carries out what the pager decides.
//!
//! # Threads
//!
//! The engine has two threads of its own: the keeper, and one that gives back room of the scratch file while there is
//! some to give. The thread that changed the pager carries out the effects, after it has released the latch: a caller
//! whose page is missing, the store's thread with a completed read, a thread of the device with a completed copy, or
//! the keeper. Nothing here blocks: the store and the streams only queue.
//!
//! # Invariants
//!
//! 1. A move has at most one operation in flight; the move's id is the operation's token. A large page that passes
//!    through staging is an exception: it moves in [chunks], each with at most one operation in flight and a token of
//!    its own. Tokens from [`CALLER_TOKENS`] on belong to operations of callers: copies that callers wait for, and ends
//!    of work that pins wait for.
//! 2. Memory that an operation uses belongs to a frame or staging buffer that the pager has given to that move. It is
//!    returned to the pager only when all operations of the move have been reported complete.
//! 3. All fills are copied on one stream. So a stream that waits for several copies before it uses lent pages waits
//!    only for the last one: a [`FillPoint`] stands for that event.
//! 4. The latch is never held while the store, the device, a waker or the observer is called, except for
//!    [`Device::protect`].
//! 5. All work that changes the engine, or has the device do something for it, is [contained](Engine::contain): if it
//!    panics, the engine is [given up](latch), and nobody waits for it any more.

mod chunks;
mod durable;
mod ends;
mod keeper;
mod latch;
mod recording;
mod room;
pub(crate) mod ticket;
pub(crate) mod waiting;
mod wipe;

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak, mpsc};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};

use crate::device::{
    Completion, Completions, Device, DeviceAddress, EventId, HostPointer, HostSlab, Opened, StreamId, StreamKind,
    StreamOp, Token,
};
use crate::error::{Error, ErrorKind, Result, caught};
use crate::format::ModelHeader;
use crate::ids::{
    Bytes, FileId, FillPoint, FrameId, MoveId, PageId, PageIndex, RequestId, ScopeId, SegmentId, Tier, WalkerId,
};
use crate::observe::{Observer, PageStalls, PageWaits, Resource, Waited};
use crate::pager::pin::{self, Pinned, Words};
use crate::pager::policy::guarded::{Fate, Replaced};
use crate::pager::{
    Access, AccessLog, Effects, Gate, Granted, Move, PageRun, PageWord, Pager, Place, Priority, Purpose, Recorded,
    Recorder, Submitted, Terms, WaitCause,
};
use crate::store::durable::folder::DurableFolder;
use crate::store::{IO_ALIGNMENT, IoKind, IoOp, OwnRead, ScratchFile, SlotIndex, SlotRun, Store};
use crate::verify::Verify;

use chunks::{Chunks, is_chunk, move_of};
use ends::Ends;
use keeper::Keeper;
use latch::{Held, Latch, News};
use recording::RuntimeName;
use room::RoomKeeper;
use ticket::Ticket;
use wipe::Wipes;

/// A segment as the engine knows it: where its pages are.
#[derive(Debug)]
pub(crate) struct SegmentIo {
    pub(crate) base: DeviceAddress,
    pub(crate) pages: u32,
    /// Bytes of the segment; the last page may be short.
    pub(crate) len: u64,
    pub(crate) source: Source,
    pub(crate) waits: PageWaits,
}

#[derive(Debug)]
pub(crate) enum Source {
    /// A model file, read in place.
    File(FromFile),
    /// Slots of the scratch file. The label is for messages.
    Scratch { slots: InScratch, label: String },
    /// A model file, and slots of the scratch file for the pages of it that were written.
    CopyOnWrite { file: FromFile, copies: InScratch, written: Written },
    /// Pages of a durable folder.
    Durable(InFolder),
}

/// Pages of a durable folder, from `first` on. The label is for messages.
#[derive(Debug)]
pub(crate) struct InFolder {
    pub(crate) folder: Arc<DurableFolder>,
    pub(crate) first: u32,
    pub(crate) label: String,
}

impl InFolder {
    fn page(&self, page: PageIndex) -> u32 {
        self.first + page.get()
    }
}

/// A model file in the store.
#[derive(Debug)]
pub(crate) struct FromFile {
    pub(crate) file: FileId,
    pub(crate) model: Arc<ModelHeader>,
    pub(crate) index: u32,
    pub(crate) learned: Option<LearnedHashes>,
}

/// A slot of the scratch file for each page.
#[derive(Debug)]
pub(crate) struct InScratch {
    pub(crate) file: FileId,
    pub(crate) scratch: ScratchFile,
    pub(crate) slots: SlotRun,
}

/// The pages that have been written back, a bit for each. A page's bit is set once its slot has its bytes, and never
/// cleared: a page has one move at a time, so no fill begins between the two.
#[derive(Debug)]
pub(crate) struct Written(Box<[AtomicU64]>);

impl Written {
    pub(crate) fn new(pages: u32) -> Self {
        Self((0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    fn place(&self, page: PageIndex) -> Option<(&AtomicU64, u64)> {
        self.0.get(page.index() / 64).map(|word| (word, 1 << (page.index() % 64)))
    }

    fn has(&self, page: PageIndex) -> bool {
        self.place(page).is_some_and(|(word, bit)| word.load(Ordering::Acquire) & bit != 0)
    }

    fn add(&self, page: PageIndex) {
        if let Some((word, bit)) = self.place(page) {
            word.fetch_or(bit, Ordering::Release);
        }
    }
}

/// Where the bytes of a page are on disk.
enum Below<'a> {
    File(&'a FromFile),
    Slot(&'a InScratch),
    Folder(&'a InFolder),
}

impl Source {
    /// Where a fill finds the page's bytes.
    fn read_from(&self, page: PageIndex) -> Below<'_> {
        match self {
            Self::File(file) => Below::File(file),
            Self::CopyOnWrite { file, written, .. } if !written.has(page) => Below::File(file),
            Self::CopyOnWrite { copies: slots, .. } | Self::Scratch { slots, .. } => Below::Slot(slots),
            Self::Durable(in_folder) => Below::Folder(in_folder),
        }
    }

    /// The slots of the scratch file that write backs go to.
    fn slots(&self) -> Option<&InScratch> {
        match self {
            Self::File(_) | Self::Durable(_) => None,
            Self::CopyOnWrite { copies: slots, .. } | Self::Scratch { slots, .. } => Some(slots),
        }
    }

    /// The model file that it was opened for.
    fn file(&self) -> Option<&FromFile> {
        match self {
            Self::File(file) | Self::CopyOnWrite { file, .. } => Some(file),
            Self::Scratch { .. } | Self::Durable(_) => None,
        }
    }

    /// The folder that it belongs to.
    fn folder(&self) -> Option<&InFolder> {
        match self {
            Self::Durable(in_folder) => Some(in_folder),
            _ => None,
        }
    }

    /// "model.gguf", or "a read-write tensor F32 [1024, 1024]".
    fn name(&self) -> String {
        match self {
            Self::File(file) => file.path(),
            Self::CopyOnWrite { file, .. } => format!("a private copy of {}", file.path()),
            Self::Scratch { label, .. } => format!("a read-write tensor {label}"),
            Self::Durable(InFolder { label, .. }) => format!("the durable {label}"),
        }
    }

    /// The names of the tensors with bytes in `[start, end)`.
    fn tensors(&self, start: u64, end: u64) -> String {
        match self {
            Self::File(file) | Self::CopyOnWrite { file, .. } => file.tensors(start, end),
            Self::Scratch { label, .. } | Self::Durable(InFolder { label, .. }) => label.clone(),
        }
    }
}

impl FromFile {
    fn path(&self) -> String {
        let file = self.model.files.get(self.index as usize);
        file.map(|file| file.path.display().to_string()).unwrap_or_default()
    }

    fn tensors(&self, start: u64, end: u64) -> String {
        let mut tensors = self.model.tensors_in(self.index, start, end);
        let first = tensors.next().map(|t| t.name.clone()).unwrap_or_default();
        match tensors.count() {
            0 => first,
            more => format!("{first} and {more} more"),
        }
    }
}

/// The outcome of submitting a request.
#[derive(Debug)]
pub(crate) enum Received {
    /// Every page is pinned.
    Ready(Granted),
    Waiting(Waiting),
}

/// Hashing this many bytes takes so long that other completions should not wait for it.
const LONG_HASH: u64 = 512 << 10;

/// The event behind the copies that a stream has to wait for.
pub(crate) fn event_at(point: FillPoint) -> EventId {
    EventId(point.get())
}

/// A request that has to wait.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) id: RequestId,
    pub(crate) ticket: Arc<Ticket>,
    /// The page it waits for first, and the tier that holds it.
    pub(crate) page: Option<(PageId, Tier)>,
}

/// A hash per page, learned when the page is first read. 0 is "not learned".
#[derive(Debug)]
pub(crate) struct LearnedHashes {
    hashes: Vec<AtomicU64>,
    /// Set once a page has been read again and found equal.
    confirmed: Vec<AtomicU64>,
    always: bool,
}

impl LearnedHashes {
    pub(crate) fn new(verify: Verify, pages: u32) -> Option<Self> {
        if verify == Verify::Off {
            return None;
        }
        let zeros = |count: u32| (0..count).map(|_| AtomicU64::new(0)).collect();
        Some(Self { hashes: zeros(pages), confirmed: zeros(pages.div_ceil(64)), always: verify == Verify::Always })
    }

    /// Whether the page is to be compared when it is read again.
    fn asks(&self, page: PageIndex) -> bool {
        let (word, bit) = (page.index() / 64, 1u64 << (page.index() % 64));
        self.always || self.confirmed[word].load(Ordering::Relaxed) & bit == 0
    }

    fn check(&self, page: PageIndex, hash: impl FnOnce() -> u64) -> Result<(), (u64, u64)> {
        if !self.asks(page) {
            return Ok(());
        }
        let (word, bit) = (page.index() / 64, 1u64 << (page.index() % 64));
        let hash = hash().max(1);
        match self.hashes[page.index()].compare_exchange(0, hash, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Ok(()),
            Err(learned) if learned == hash => {
                self.confirmed[word].fetch_or(bit, Ordering::Relaxed);
                Ok(())
            }
            Err(learned) => Err((learned, hash)),
        }
    }
}

/// A move's operation in flight.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    planned: Move,
    stage: Stage,
    since: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Reading,
    Writing,
    CopyingIn,
    CopyingOut,
    Zeroing,
}

impl Stage {
    fn resource(self) -> Option<Resource> {
        match self {
            Self::Reading => Some(Resource::DiskRead),
            Self::Writing => Some(Resource::DiskWrite),
            Self::CopyingIn => Some(Resource::LinkIn),
            Self::CopyingOut => Some(Resource::LinkOut),
            Self::Zeroing => None,
        }
    }
}

/// What follows an operation of a move.
enum Next {
    Nothing,
    Write,
    /// A copy up, with the point behind it if the device has taken it up.
    Copy(Option<FillPoint>),
}

#[derive(Debug)]
struct Latched {
    pager: Pager,
    tickets: HashMap<RequestId, Arc<Ticket>>,
}

impl Latched {
    /// The outcome of a request, with a ticket if it has to wait.
    fn received(&mut self, submitted: Result<Submitted>, page: Option<(PageId, Tier)>) -> Result<Received> {
        Ok(match submitted? {
            Submitted::Ready(granted) => Received::Ready(granted),
            Submitted::Waiting(id) => {
                let ticket = Arc::new(Ticket::default());
                self.tickets.insert(id, ticket.clone());
                Received::Waiting(Waiting { id, ticket, page })
            }
        })
    }
}

/// Receives completions for an engine that is made later than its device and its store.
#[derive(Debug, Default)]
pub(crate) struct Sink(OnceLock<Weak<Engine>>);

impl Completions for Sink {
    fn completed(&self, done: &mut Vec<Completion>) {
        // Without an engine, no operation that is still reported matters.
        if let Some(engine) = self.0.get().and_then(Weak::upgrade) {
            let _marked = Marked::begin(Inside::Waker);
            engine.completed(done);
        } else {
            done.clear();
        }
    }

    fn takes_long(&self, token: Token) -> bool {
        self.0.get().and_then(Weak::upgrade).is_some_and(|engine| engine.takes_long(token))
    }

    fn taken_up(&self, token: Token, end: EventId) {
        if let Some(engine) = self.0.get().and_then(Weak::upgrade) {
            let _marked = Marked::begin(Inside::Waker);
            engine.taken_up(token, end);
        }
    }
}

thread_local! {
    static INSIDE: Cell<Option<Inside>> = const { Cell::new(None) };
}

/// The kind of caller's code that a thread of a store or a device is running.
#[derive(Clone, Copy, Debug)]
enum Inside {
    Waker,
    Closure,
}

/// Marks a thread of a store or a device while it runs a caller's code. That code must not wait for completions that
/// this thread has yet to report, nor for work behind it on a stream.
struct Marked {
    before: Option<Inside>,
}

impl Marked {
    fn begin(inside: Inside) -> Self {
        Self { before: INSIDE.replace(Some(inside)) }
    }
}

impl Drop for Marked {
    fn drop(&mut self) {
        INSIDE.set(self.before);
    }
}

/// Runs a caller's closure on a stream's thread.
pub(crate) fn run_closure(closure: impl FnOnce()) {
    let _marked = Marked::begin(Inside::Closure);
    closure();
}

/// Whether this thread is one of a store or a device that is running a caller's code.
fn is_inside() -> bool {
    INSIDE.get().is_some()
}

/// Refuses a wait that might never end.
///
/// # Errors
/// `InvalidArgument` in a waker, and in a closure on a stream.
pub fn may_wait(what: &str) -> Result<()> {
    let (place, remedy) = match INSIDE.get() {
        None => return Ok(()),
        Some(Inside::Waker) => ("a waker", "let the waker wake a task or a thread, and wait there"),
        Some(Inside::Closure) => ("a closure on a stream", "wait first, and put the closure on the stream then"),
    };
    let message = format!("{what} cannot be waited for in {place}: it may be waiting for this very thread");
    Err(Error::new(ErrorKind::InvalidArgument, message).remedy(remedy))
}

/// Whether a call leaves one of the reads that it causes to its caller, and the read.
#[derive(Debug, Default)]
pub(crate) enum Own {
    /// The store carries out every read.
    #[default]
    Unwanted,
    /// The caller waits afterwards and does nothing else, so it can carry out a read itself.
    Wanted,
    /// The read, to be [run](OwnRead::run) before the caller waits. The store has it if this is dropped.
    Begun(OwnRead),
}

/// Runs wakers, which are the caller's code. If one panics, the others are still woken. None may wait: a read or
/// another task may be waiting for this thread, even if it is the caller's own.
fn wake_all(wakers: Vec<Waker>) {
    if wakers.is_empty() {
        return;
    }
    let _marked = Marked::begin(Inside::Waker);
    for waker in wakers {
        if let Err(panic) = caught(|| waker.wake()) {
            tracing::error!(panic, "a waker panicked: its task may not have been woken");
        }
    }
}

pub(crate) struct Parts {
    pub(crate) process: Opened,
    pub(crate) pager: Pager,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) process_memory: bool,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) slab: HostSlab,
    pub(crate) observer: Observer,
    pub(crate) sink: Arc<Sink>,
    /// Whether a policy of the caller's has panicked.
    pub(crate) fate: Option<Fate>,
    pub(crate) io_timeout: Option<Duration>,
    /// The bytes of a chunk of a page that moves in chunks.
    pub(crate) chunk: Bytes,
}

/// See the [module documentation](self).
pub(crate) struct Engine {
    /// The process that opened the runtime. It is checked before any lock is taken: in a child, threads that the child
    /// does not have may hold locks.
    process: Opened,
    latch: Latch,
    idle: Condvar,
    log: AccessLog,
    name: RuntimeName,
    gate: Arc<Gate>,
    keeper: Keeper,
    room: RoomKeeper,
    /// How long a read or a write may take before the requests that wait for it get an error.
    io_timeout: Option<Duration>,
    /// Text about requests that have waited long for what others hold, as of the keeper's last look.
    long_waits: Mutex<Arc<str>>,
    pub(crate) device: Arc<dyn Device>,
    /// Whether frames of the device tier are this machine's memory.
    pub(crate) process_memory: bool,
    pub(crate) store: Arc<dyn Store>,
    slab: HostSlab,
    fills: StreamId,
    write_backs: StreamId,
    in_flight: Mutex<HashMap<MoveId, InFlight>>,
    /// How far the moves in chunks are. Each is in `in_flight`, too.
    chunks: Mutex<HashMap<MoveId, Chunks>>,
    chunk: Bytes,
    wipes: Wipes,
    ends: Ends,
    callers: Mutex<Callers>,
    segments: RwLock<Vec<Option<Arc<SegmentIo>>>>,
    pub(crate) observer: Observer,
    failures: Mutex<Failures>,
    fate: Option<Fate>,
    /// Whether the policy's panic was logged.
    fate_told: AtomicBool,
    page_bytes: u64,
    /// Whether device memory is memory of this process; asked at every pin.
    pub(crate) host_addressable: bool,
    /// Whether the device is told of pins; asked at every pin.
    pub(crate) hides_pages: bool,
    /// The device accepts no more operations. Callers that would wait for one are refused with its name.
    closed: AtomicBool,
}

/// The first token of callers' operations; ids of moves are smaller.
const CALLER_TOKENS: u64 = 1 << 63;

/// Runs after an operation of a caller's: on a thread of the device, or within the call if that is refused, with no
/// lock held. It must not wait.
type AtEnd = Box<dyn FnOnce(Result<()>) + Send>;

/// Operations of callers.
#[derive(Default)]
struct Callers {
    /// For copies between the device and a caller's memory.
    copies: Option<StreamId>,
    /// Compute streams that nobody uses now.
    unused: Vec<StreamId>,
    next: u64,
    pending: HashMap<u64, AtEnd>,
}

impl fmt::Debug for Callers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Callers({} operations pending)", self.pending.len())
    }
}

/// Failures that no call has reported.
#[derive(Debug, Default)]
struct Failures {
    /// Pages whose bytes were lost, first to last, whether or not their tensors still exist.
    lost: Vec<Failure>,
    /// Further lost pages, by number of pages and bytes; nothing else is known of them.
    more: (u64, u64),
    /// Whether the pages that were lost with the device are noted.
    device_lost: bool,
    /// Pages whose newest bytes are in the host tier because the disk did not take them, with the last attempt's error.
    held: BTreeMap<PageId, Failure>,
}

#[derive(Clone, Debug)]
struct Failure {
    /// "page 7 of model.gguf", "pages 7 to 9 of ...".
    what: String,
    pages: u64,
    bytes: u64,
    error: Error,
}

impl Failure {
    /// "page 7 of ... is lost (2.0 MiB)".
    fn told(&self) -> Error {
        let verb = if self.pages == 1 { "is" } else { "are" };
        self.error.clone().context(format!("{} {verb} lost ({})", self.what, Bytes::new(self.bytes)))
    }
}

impl Failures {
    /// How many failures of each kind are kept. More lost pages are counted. More held pages are dropped; a later
    /// failed attempt may note them.
    const MOST: usize = 64;
    /// How many failures one message names.
    const NAMED: usize = 8;

    fn lose(&mut self, failure: Failure) {
        if self.lost.len() < Self::MOST {
            self.lost.push(failure);
        } else {
            self.more.0 += failure.pages;
            self.more.1 += failure.bytes;
        }
    }

    fn hold(&mut self, page: PageId, failure: Failure) {
        if self.held.len() < Self::MOST || self.held.contains_key(&page) {
            self.held.insert(page, failure);
        }
    }
}

/// Prints nothing that is behind a lock: it may be called in a child by `fork`.
impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("process", &self.process.id()).field("name", &self.name).finish_non_exhaustive()
    }
}

impl Engine {
    pub(crate) fn new(parts: Parts) -> Result<Arc<Self>> {
        let Parts { process, pager, device, process_memory, store, slab, observer, sink, fate, io_timeout, chunk } =
            parts;
        let engine = Arc::new(Self {
            gate: pager.gate(),
            process,
            latch: Latch::new(Latched { pager, tickets: HashMap::new() }),
            idle: Condvar::new(),
            log: AccessLog::new(),
            name: RuntimeName::new(),
            keeper: Keeper::default(),
            room: RoomKeeper::default(),
            io_timeout,
            long_waits: Mutex::new(Arc::from("")),
            fills: device.create_stream(StreamKind::Fill)?,
            write_backs: device.create_stream(StreamKind::WriteBack)?,
            page_bytes: device.page_size().bytes(),
            host_addressable: device.host_addressable(),
            hides_pages: device.hides_pages(),
            device,
            process_memory,
            store,
            slab,
            in_flight: Mutex::new(HashMap::new()),
            chunks: Mutex::default(),
            chunk,
            wipes: Wipes::default(),
            ends: Ends::default(),
            callers: Mutex::default(),
            segments: RwLock::new(Vec::new()),
            observer,
            failures: Mutex::default(),
            fate,
            fate_told: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        });
        let _ = sink.0.set(Arc::downgrade(&engine));
        Keeper::start(&engine);
        Ok(engine)
    }

    /// Checks that this process opened the runtime, rather than being a child of it, and that nothing in the engine has
    /// panicked.
    ///
    /// # Errors
    /// `Closed` in a child; `Internal` after a panic.
    #[inline]
    pub(crate) fn usable(&self) -> Result<()> {
        if self.process.is_here() { self.latch.is_sound() } else { Err(self.in_a_child()) }
    }

    /// Whether this is the process that opened the runtime.
    #[inline]
    pub(crate) fn is_at_home(&self) -> bool {
        self.process.is_here()
    }

    #[cold]
    fn in_a_child(&self) -> Error {
        let message = format!("the runtime is that of process {}, and this is a fork of it", self.process.id());
        Error::new(ErrorKind::Closed, message)
            .remedy("exec a program in the child, or fork first and open the runtime in the child")
    }

    /// Runs work that changes the engine, or has the device do something for it. If it panics, the engine is given up,
    /// and the error says so.
    ///
    /// # Errors
    /// As for [`usable`](Self::usable); those of `work`.
    fn contain<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.usable()?;
        caught(work).unwrap_or_else(|panic| Err(self.give_up(&panic)))
    }

    /// Gives the engine up after a panic: nothing is admitted any more, and everyone who waits gets the error.
    #[cold]
    fn give_up(&self, panic: &str) -> Error {
        let (error, tickets) = self.latch.give_up(panic);
        // From now on pins of resident pages take the latch too, and learn of it.
        self.gate.close();
        self.idle.notify_all();
        self.wipes.give_up();
        self.ends.give_up();
        drop(News::failed(tickets, &error));
        log(|| tracing::error!(panic, "the runtime is given up: something in it panicked"));
        error
    }

    /// Changes the state under the latch and carries out the effects.
    ///
    /// # Errors
    /// As for [`usable`](Self::usable); then nothing changes any more.
    fn step<T>(&self, change: impl FnOnce(&mut Latched, &mut Effects) -> T) -> Result<T> {
        self.step_with(&mut Own::Unwanted, change)
    }

    /// As [`step`](Self::step), and may leave a read to the caller.
    ///
    /// # Errors
    /// As for [`step`](Self::step).
    fn step_with<T>(&self, own: &mut Own, change: impl FnOnce(&mut Latched, &mut Effects) -> T) -> Result<T> {
        self.contain(|| {
            // Delivered after the latch is released, at the latest at the end of this closure, also after a panic.
            let mut news = News::default();
            let mut fx = Effects::default();
            let mut latched = self.latch.hold()?;
            latched.pager.record(&self.log);
            let result = change(&mut latched, &mut fx);
            self.settle(latched, fx, &mut news, own)?;
            Ok(result)
        })
    }

    /// Does something under the latch that has no effects.
    ///
    /// # Errors
    /// As for [`usable`](Self::usable).
    fn hold<T>(&self, work: impl FnOnce(&mut Latched) -> T) -> Result<T> {
        self.contain(|| {
            let mut latched = self.latch.hold()?;
            let result = work(&mut latched);
            latched.release();
            Ok(result)
        })
    }

    /// Changes the pager under the latch and carries out the effects.
    ///
    /// # Errors
    /// As for [`usable`](Self::usable); then nothing changes.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut Pager, &mut Effects) -> T) -> Result<T> {
        self.step(|latched, fx| change(&mut latched.pager, fx))
    }

    /// [`change`](Self::change) for callers that do not need the error.
    pub(crate) fn with<T>(&self, change: impl FnOnce(&mut Pager, &mut Effects) -> T) -> Option<T> {
        self.change(change).ok()
    }

    /// Calls `take` under the latch, after the pager has seen all uses before this call. `None` if the engine is not
    /// [usable](Self::usable).
    pub(crate) fn recorded<T>(&self, take: impl FnOnce(&mut Pager) -> T) -> Option<T> {
        let taken = self.hold(|latched| {
            latched.pager.record_all(&self.log);
            take(&mut latched.pager)
        });
        taken.ok()
    }

    /// Looks at the pager under the latch. Uses recorded without the latch stay in the log. `None` if the engine is not
    /// [usable](Self::usable).
    pub(crate) fn look<T>(&self, look: impl FnOnce(&Pager) -> T) -> Option<T> {
        self.hold(|latched| look(&latched.pager)).ok()
    }

    /// How many requests wait for what others hold, and a text about those that have waited for a second.
    pub(crate) fn waits(&self) -> (usize, Arc<str>) {
        let Some(waiting) = self.look(Pager::waiting_count) else { return (0, "".into()) };
        (waiting, self.long_waits.lock().clone())
    }

    /// How many recorded uses the pager has not seen.
    pub(crate) fn unseen(&self) -> u64 {
        self.log.len()
    }

    /// Pins a resident page without the latch.
    //
    // Without closures, which are not always inlined: passing values through memory costs more than the pin.
    #[inline(always)]
    pub(crate) fn try_pin_page(&self, page: PageId, word: &PageWord, purpose: Purpose, walker: WalkerId) -> bool {
        if !self.process.is_here() {
            return false;
        }
        let Some(used) = pin::page(&self.gate, page, word, purpose) else { return false };
        let mut named = recording::take(self.name, &self.log);
        let recorded = named.recorder.record_of(walker, used);
        recording::give_back(named);
        if recorded != Recorded::Ok || used.is_first() {
            self.pinned_page_slowly(walker, used, recorded);
        }
        true
    }

    #[cold]
    fn pinned_page_slowly(&self, walker: WalkerId, used: Access, recorded: Recorded) {
        let mut crowded = false;
        match recorded {
            Recorded::Ok => {}
            Recorded::High => crowded = true,
            Recorded::Full => {
                let mut named = recording::take(self.name, &self.log);
                self.record_late(&mut named.recorder, walker, used);
                recording::give_back(named);
            }
        }
        self.pinned_first(used.is_first(), crowded);
    }

    /// Pins resident pages without the latch: all of them, or none.
    pub(crate) fn try_pin(&self, words: &[Words<'_>], purpose: Purpose, walker: WalkerId) -> bool {
        if !self.process.is_here() {
            return false;
        }
        let mut crowded = false;
        let mut named = recording::take(self.name, &self.log);
        let recorder = &mut named.recorder;
        let pinned = pin::pin(&self.gate, words, purpose, |access| match recorder.record_of(walker, access) {
            Recorded::Ok => {}
            Recorded::High => crowded = true,
            Recorded::Full => self.record_late(recorder, walker, access),
        });
        recording::give_back(named);
        match pinned {
            Pinned::All { reached } => {
                if reached || crowded {
                    self.pinned_first(reached, crowded);
                }
                true
            }
            Pinned::None { wanted } => {
                if wanted {
                    let runs: Vec<PageRun> = words.iter().map(|(run, _)| *run).collect();
                    self.with(|pager, fx| pager.released(&runs, fx));
                }
                false
            }
        }
    }

    /// Records a use after the pager has emptied a full ring.
    #[cold]
    fn record_late(&self, recorder: &mut Recorder, walker: WalkerId, access: Access) {
        // This has no effects, so no caller's code runs here. In an engine that was given up, uses need no counting.
        let _ = self.hold(|latched| latched.pager.record_all(&self.log));
        let _ = recorder.record_of(walker, access);
    }

    /// After a pin: has the pager look further ahead if the pin `reached` pages filled ahead, or the keeper empty a
    /// `crowded` ring.
    #[cold]
    fn pinned_first(&self, reached: bool, crowded: bool) {
        if reached {
            // The pager may start fills further ahead.
            self.with(|pager, fx| pager.pump(fx));
        } else if crowded {
            self.keeper.hurry();
        }
    }

    /// Submits a request, of a scope if it has one. May leave a read to the caller.
    pub(crate) fn submit(&self, runs: &[PageRun], terms: Terms, own: &mut Own) -> Result<Received> {
        self.step_with(own, |latched, fx| {
            let page = latched.pager.awaited(runs);
            let submitted = latched.pager.submit(runs, terms, fx);
            latched.received(submitted, page)
        })?
    }

    /// Keeps this many frames for requests that can never be refused.
    pub(crate) fn set_floor(&self, frames: u32) -> Result<()> {
        self.change(|pager, fx| pager.set_floor(frames, fx))?
    }

    /// Requests the frames that a scope is to reserve.
    pub(crate) fn reserve(&self, scope: ScopeId, frames: u32) -> Result<Received> {
        self.step(|latched, fx| {
            let submitted = latched.pager.reserve(scope, frames, fx);
            latched.received(submitted, None)
        })?
    }

    /// Waits until the device tier is within its budget.
    pub(crate) fn await_budget(&self) -> Result<()> {
        let received = self.step(|latched, fx| {
            if latched.pager.is_closing() {
                return Err(Error::new(ErrorKind::Closed, "the runtime was closed"));
            }
            let submitted = latched.pager.await_budget(fx);
            latched.received(Ok(submitted), None)
        })?;
        match received? {
            Received::Ready(_) => Ok(()),
            Received::Waiting(waiting) => waiting.ticket.wait(None).map_or(Ok(()), |result| result.map(|_| ())),
        }
    }

    /// Withdraws a request. Returns its result if that was already there: the caller then owns its pins.
    pub(crate) fn cancel(&self, id: RequestId, ticket: &Ticket) -> Option<Result<Granted>> {
        let waited = self.step(|latched, fx| {
            let waited = latched.tickets.remove(&id).is_some();
            if waited {
                latched.pager.cancel(id, fx);
            }
            waited
        });
        match waited {
            // The ticket left the table under the latch; its result is delivered after the latch is released.
            Ok(false) => ticket.wait(None),
            Ok(true) | Err(_) => None,
        }
    }

    /// Releases the latch and carries out the effects, and those of moves that could not be started. It is a loop, so
    /// that a device on which every move fails needs no stack.
    ///
    /// Wakers come last. They run code of the caller's on this thread. By then every move is under way and every result
    /// is in its ticket, so whatever they drop or cancel finds nothing half done. If one panics, the others are still
    /// woken.
    ///
    /// # Errors
    /// As for [`usable`](Self::usable), if the engine was given up in the meantime.
    fn settle<'a>(&'a self, mut latched: Held<'a>, mut fx: Effects, news: &mut News, own: &mut Own) -> Result<()> {
        loop {
            // Under the latch, so that it cannot affect the frame's next page. It only narrows access.
            let protect = |frame: FrameId| self.device.protect(frame).err().map(|error| (frame, error));
            let unprotected: Vec<_> = fx.protect.drain(..).filter_map(protect).collect();
            let (in_use, _) = latched.pager.device_frames();
            let (host, _) = latched.pager.host_frames();
            for (id, result) in fx.done.drain(..) {
                news.done.extend(latched.tickets.remove(&id).map(|ticket| (ticket, result)));
            }
            // Under the latch, because the next segment may get the same id as soon as it is released.
            let released: Vec<_> = fx.released.drain(..).filter_map(|id| self.forget(id)).collect();
            if latched.pager.is_idle() {
                self.idle.notify_all();
            }
            latched.release();
            for (frame, error) in unprotected {
                log(|| tracing::warn!(%error, ?frame, "protect a vacated frame"));
            }
            self.observer
                .in_use(Bytes::new(u64::from(in_use) * self.page_bytes), Bytes::new(u64::from(host) * self.page_bytes));
            news.tell();
            let (mut taken, mut ended) = (Vec::new(), Vec::new());
            let lone = fx.moves.len() == 1;
            if !lone {
                self.tell_of_fills(&fx.moves);
            }
            for planned in fx.moves.drain(..) {
                match self.start(planned, lone, own) {
                    Ok(point) => taken.extend(point.map(|point| (planned.id, point))),
                    Err(error) => ended.push((planned, Err(error.context(self.describe(planned.page))))),
                }
            }
            for (id, priority) in fx.raised.drain(..) {
                // The raised priority is for the later operations of this move.
                let stage = self.in_flight.lock().get_mut(&id).map(|entry| {
                    entry.planned.priority = priority;
                    entry.stage
                });
                // A store without an operation of this move need not be woken.
                if stage.is_none_or(|stage| matches!(stage, Stage::Reading | Stage::Writing)) {
                    self.tokens_of(id).into_iter().for_each(|token| self.store.raise(token, priority));
                }
            }
            for io in released {
                self.release(io);
            }
            let discarded: Vec<_> = fx.discard.drain(..).map(|frame| (frame, self.discard(frame))).collect();
            if ended.is_empty() && discarded.is_empty() && taken.is_empty() {
                break;
            }
            latched = self.latch.hold()?;
            latched.pager.record(&self.log);
            for (id, point) in taken {
                latched.pager.taken(id, point, &mut fx);
            }
            for (frame, discarded) in discarded {
                tell_of_discard(&mut latched.pager, frame, discarded, &mut fx);
            }
            for (planned, result) in ended {
                self.complete(&mut latched.pager, planned, result, &mut fx);
            }
        }
        wake_all(std::mem::take(&mut news.wakers));
        if let Some(replaced) = self.replaced_policy()
            && !self.fate_told.swap(true, Ordering::Relaxed)
        {
            log(|| tracing::error!(error = %replaced.told(), "a policy was replaced"));
        }
        Ok(())
    }

    /// Gives memory back to the system, up to `bytes` and then to the end of a page; returns how much. Free frames come
    /// first, then duplicates in the host tier, then clean pages of the device tier. The host tier takes part only
    /// where the device's memory is this machine's, too.
    pub(crate) fn trim(&self, bytes: Bytes) -> Bytes {
        let trimmed = self.contain(|| {
            let mut given = self.trim_device(bytes, false);
            if self.process_memory {
                given = given + self.trim_host(bytes.saturating_sub(given));
            }
            Ok(given + self.trim_device(bytes.saturating_sub(given), true))
        });
        trimmed.unwrap_or_default()
    }

    fn pages_of(&self, bytes: Bytes) -> u32 {
        u32::try_from(bytes.get().div_ceil(self.page_bytes)).unwrap_or(u32::MAX)
    }

    /// Gives a frame's memory back.
    ///
    /// # Errors
    /// Errors of the device; the frame keeps its memory.
    fn discard(&self, frame: FrameId) -> Result<()> {
        let discarded = self.device.discard(frame);
        if let Err(error) = &discarded {
            log(|| tracing::warn!(%error, ?frame, "a frame keeps its memory"));
        }
        discarded
    }

    fn trim_device(&self, bytes: Bytes, evicting: bool) -> Bytes {
        let mut given = Bytes::ZERO;
        // Each frame is asked for at most once: frames may get memory again meanwhile, so the loop might never end.
        let mut left = self.look(|pager| pager.device_frames().1).unwrap_or(0);
        while given < bytes && left > 0 {
            let count = self.pages_of(bytes.saturating_sub(given)).min(left);
            // These frames are set apart for this call: the pager gives them to no page until it is told that they are
            // discarded.
            let frames = self.with(|pager, fx| {
                if evicting {
                    pager.trim(count, fx)
                } else {
                    pager.trim_free(count, fx)
                };
                std::mem::take(&mut fx.discard)
            });
            let frames = frames.unwrap_or_default();
            if frames.is_empty() {
                break;
            }
            left -= (frames.len() as u32).min(left);
            let discard = |frame: FrameId| {
                let memory = self.device.frame_memory(frame).unwrap_or_default();
                let discarded = self.discard(frame);
                given = given + if discarded.is_ok() { memory } else { Bytes::ZERO };
                (frame, discarded)
            };
            let discarded: Vec<_> = frames.into_iter().map(discard).collect();
            self.with(|pager, fx| {
                for (frame, discarded) in discarded {
                    tell_of_discard(pager, frame, discarded, fx);
                }
            });
        }
        given
    }

    fn trim_host(&self, bytes: Bytes) -> Bytes {
        let mut given = Bytes::ZERO;
        let mut left = self.look(|pager| pager.host_frames().1).unwrap_or(0);
        while given < bytes && left > 0 {
            let count = self.pages_of(bytes.saturating_sub(given)).min(left);
            let frames = self.with(|pager, _| pager.trim_host(count)).unwrap_or_default();
            if frames.is_empty() {
                break;
            }
            given = given + self.slab.give_back(&frames);
            left -= (frames.len() as u32).min(left);
            self.with(|pager, fx| pager.host_discarded(&frames, fx));
        }
        given
    }

    /// What the caller's policy did, if it was replaced.
    pub(crate) fn replaced_policy(&self) -> Option<&Replaced> {
        self.fate.as_ref()?.get()
    }

    pub(crate) fn add_segment_io(&self, id: SegmentId, io: SegmentIo) {
        let mut segments = self.segments.write();
        if segments.len() <= id.index() {
            segments.resize_with(id.index() + 1, || None);
        }
        segments[id.index()] = Some(Arc::new(io));
    }

    fn segment_io(&self, id: SegmentId) -> Result<Arc<SegmentIo>> {
        let found = self.segments.read().get(id.index()).cloned().flatten();
        found.ok_or_else(|| Error::new(ErrorKind::Internal, format!("{id:?} is not known to the transfer engine")))
    }

    /// Removes a segment that nobody uses any more.
    pub(crate) fn remove_segment(&self, id: SegmentId) {
        if !self.process.is_here() {
            return;
        }
        // Before the pager is told, because the segment's room may be given back before that call returns.
        if let Ok(io) = self.segment_io(id)
            && let Some(InScratch { slots, .. }) = io.source.slots()
        {
            slots.leave();
        }
        self.with(|pager, fx| pager.remove_segment(id, fx));
    }

    /// How long a read or a write may take before the requests that wait for it get an error.
    pub(crate) fn io_timeout(&self) -> Option<Duration> {
        self.io_timeout
    }

    fn forget(&self, id: SegmentId) -> Option<Arc<SegmentIo>> {
        self.failures.lock().held.retain(|page, _| page.segment != id);
        self.segments.write().get_mut(id.index()).and_then(Option::take)
    }

    /// Gives back what a segment had. None of its pages has an operation in flight, or will have one: the pager
    /// releases a segment only when no move names one of its pages, and a move ends when the store or the device has
    /// reported its operation. So its slots of the scratch file can be given back.
    fn release(&self, io: Arc<SegmentIo>) {
        if let Some(FromFile { file, .. }) = io.source.file() {
            self.store.remove_file(*file);
        }
        if let Err(error) = self.device.release(io.base, io.pages) {
            log(|| tracing::warn!(%error, base = ?io.base, "release a segment's addresses"));
        }
        if is_inside() && io.source.slots().is_some() {
            self.room.give_back(io);
        }
    }

    fn address(&self, io: &SegmentIo, page: PageId) -> DeviceAddress {
        io.base.offset(u64::from(page.index.get()) * self.page_bytes)
    }

    /// How many bytes of the page exist.
    fn valid(&self, io: &SegmentIo, page: PageId) -> u64 {
        (io.len - (u64::from(page.index.get()) * self.page_bytes).min(io.len)).min(self.page_bytes)
    }

    /// Tells the device which frames the moves that are about to start will fill.
    fn tell_of_fills(&self, moves: &[Move]) {
        let frame_of = |planned: &Move| match planned.to {
            Place::Device(frame) => {
                let io = self.segment_io(planned.page.segment).ok()?;
                Some((frame, self.address(&io, planned.page)))
            }
            _ => None,
        };
        let frames: Vec<_> = moves.iter().filter_map(frame_of).collect();
        if frames.len() > 1 {
            self.device.map_soon(&frames);
        }
    }

    /// Submits the first operation of a move. `lone` means that no other move is started now. If the operation is the
    /// copy of a fill and the device has taken it up, returns the point behind it.
    fn start(&self, planned: Move, lone: bool, own: &mut Own) -> Result<Option<FillPoint>> {
        let io = self.segment_io(planned.page.segment)?;
        let address = self.address(&io, planned.page);
        if let Place::Device(frame) = planned.to {
            // For a page that somebody waits for, nothing hides the time of the mapping, unless a read comes first.
            if lone && planned.priority == Priority::Demand && planned.from != Place::Disk && !is_inside() {
                self.device.map_here(frame, address)?;
            } else {
                self.device.map(frame, address)?;
            }
        }
        if let Place::Device(frame) = planned.from {
            self.device.publish(frame, address)?;
        }
        if self.start_in_chunks(planned, &io, own)? {
            return Ok(None);
        }
        let address = self.bytes_at(planned, address)?;
        match (planned.from, planned.to) {
            (Place::Disk, Place::Device(_)) => {
                self.read(planned, &io, self.io_buffer(planned, address)?, own)?;
                Ok(None)
            }
            (Place::Zero, _) => {
                let op = StreamOp::Zero { device: address, len: self.page_bytes };
                Ok(self.copy(planned, Stage::Zeroing, op))
            }
            (Place::Host(host), Place::Device(_)) => {
                let host = self.slab.pointer(host).ok_or_else(|| missing_frame(host))?;
                let op = StreamOp::CopyIn { host, device: address, len: self.page_bytes };
                Ok(self.copy(planned, Stage::CopyingIn, op))
            }
            (Place::Device(_), Place::Host(host)) => {
                let host = self.slab.pointer(host).ok_or_else(|| missing_frame(host))?;
                let op = StreamOp::CopyOut { device: address, host, len: self.page_bytes };
                Ok(self.copy(planned, Stage::CopyingOut, op))
            }
            (Place::Device(_), _) => match planned.staging {
                Some(staging) => {
                    let host = self.slab.staging(staging).ok_or_else(|| missing_frame(staging))?;
                    let op = StreamOp::CopyOut { device: address, host, len: self.page_bytes };
                    Ok(self.copy(planned, Stage::CopyingOut, op))
                }
                None => {
                    self.write_page(planned, &io, self.io_buffer(planned, address)?)?;
                    Ok(None)
                }
            },
            (Place::Host(_), _) => {
                self.write_page(planned, &io, self.io_buffer(planned, address)?)?;
                Ok(None)
            }
            (Place::Disk, _) => {
                Err(Error::new(ErrorKind::Internal, format!("no way from {:?} to {:?}", planned.from, planned.to)))
            }
        }
    }

    /// Runs a copy between pinned pages and a caller's memory, and waits for it.
    ///
    /// # Errors
    /// Errors of the device; `InvalidArgument` in a waker or a closure on a stream.
    pub(crate) fn copy_and_wait(&self, op: StreamOp) -> Result<()> {
        self.usable()?;
        let stream = {
            let mut callers = self.callers.lock();
            match callers.copies {
                Some(stream) => stream,
                None => *callers.copies.insert(self.device.create_stream(StreamKind::Compute)?),
            }
        };
        self.run_and_wait(stream, op, "a copy")
    }

    /// Puts an operation of a caller's on a stream, and waits for its end.
    ///
    /// # Errors
    /// Errors of the device; `InvalidArgument` in a waker or a closure on a stream.
    pub(crate) fn run_and_wait(&self, stream: StreamId, op: StreamOp, what: &str) -> Result<()> {
        self.usable()?;
        may_wait(what)?;
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, format!("{what} on a runtime that was closed")));
        }
        let (tell, told) = mpsc::sync_channel(1);
        // The channel has room for one result, and there is only one.
        self.run(stream, op, Box::new(move |result| drop(tell.try_send(result))));
        // The device reports every token once, in every case; until then the memory stays borrowed.
        told.recv().unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, format!("{what} was never reported"))))
    }

    /// Puts an operation of a caller's on a stream. `at_end` runs once, in every case.
    pub(crate) fn run(&self, stream: StreamId, op: StreamOp, at_end: AtEnd) {
        if let Err(error) = self.usable() {
            return at_end(Err(error));
        }
        let token = {
            let mut callers = self.callers.lock();
            callers.next += 1;
            let token = CALLER_TOKENS + callers.next;
            callers.pending.insert(token, at_end);
            token
        };
        let submitted = self.contain(|| {
            self.device.submit(stream, op, Some(Token(token)));
            Ok(())
        });
        if let Err(error) = submitted {
            let at_end = self.callers.lock().pending.remove(&token);
            if let Some(at_end) = at_end {
                at_end(Err(error));
            }
        }
    }

    /// A stream for work of a caller's, with nothing on it.
    pub(crate) fn take_stream(&self) -> Result<StreamId> {
        self.usable()?;
        let unused = std::mem::take(&mut self.callers.lock().unused);
        let is_idle = |stream: &StreamId| {
            let end = self.device.can_mark(*stream).and_then(|()| self.device.record(*stream));
            matches!(end.and_then(|end| self.device.poll(end)), Ok(Poll::Ready(())))
        };
        let (mut idle, busy): (Vec<_>, Vec<_>) = unused.into_iter().partition(is_idle);
        let stream = idle.pop();
        self.callers.lock().unused.extend(idle.into_iter().chain(busy));
        stream.map_or_else(|| self.device.create_stream(StreamKind::Compute), Ok)
    }

    /// Returns a stream for later use. Work that is on it goes on.
    pub(crate) fn return_stream(&self, stream: StreamId) {
        if self.process.is_here() {
            self.callers.lock().unused.push(stream);
        }
    }

    fn enter(&self, planned: Move, stage: Stage) {
        let since = stage.resource().map_or_else(Instant::now, |resource| self.observer.begin(resource));
        self.in_flight.lock().insert(planned.id, InFlight { planned, stage, since });
    }

    /// Submits the copy of a move; as [`start`](Self::start).
    fn copy(&self, planned: Move, stage: Stage, op: StreamOp) -> Option<FillPoint> {
        self.enter(planned, stage);
        let token = Some(Token(planned.id.get()));
        if stage == Stage::CopyingOut {
            self.device.submit(self.write_backs, op, token);
            return None;
        }
        self.device.submit(self.fills, op, token).map(|end| FillPoint::new(end.0))
    }

    /// The read or write of a whole page.
    fn operation(&self, planned: Move, kind: IoKind, io: &SegmentIo, buffer: HostPointer) -> Result<IoOp> {
        let page = planned.page.index;
        let below = match (kind, io.source.slots()) {
            (IoKind::Write, Some(slots)) => Below::Slot(slots),
            _ => io.source.read_from(page),
        };
        let (file, offset, valid) = match below {
            Below::Folder(in_folder) => {
                let (folder, page) = (&in_folder.folder, in_folder.page(page));
                let at = if kind == IoKind::Write { folder.write_at(page)? } else { folder.read_at(page)? };
                (folder.file(), at, self.page_bytes)
            }
            Below::File(from) => (from.file, u64::from(page.get()) * self.page_bytes, self.valid(io, planned.page)),
            Below::Slot(InScratch { file, scratch, slots }) => {
                (*file, scratch.offset_of(slot(slots, page)?), self.page_bytes)
            }
        };
        Ok(IoOp {
            token: Token(planned.id.get()),
            kind,
            file,
            offset,
            buffer,
            len: valid.next_multiple_of(IO_ALIGNMENT) as u32,
            valid: valid as u32,
            priority: planned.priority,
        })
    }

    fn read(&self, planned: Move, io: &SegmentIo, buffer: HostPointer, own: &mut Own) -> Result<()> {
        let op = self.operation(planned, IoKind::Read, io, buffer)?;
        self.enter(planned, Stage::Reading);
        self.submit_read(op, own);
        Ok(())
    }

    fn write_page(&self, planned: Move, io: &SegmentIo, buffer: HostPointer) -> Result<()> {
        let op = self.operation(planned, IoKind::Write, io, buffer)?;
        if let Some(op) = self.wipes.keep(planned.id, planned.page, op, || self.enter(planned, Stage::Writing)) {
            self.write(planned.page, op);
        }
        Ok(())
    }

    fn submit_read(&self, op: IoOp, own: &mut Own) {
        if !matches!(own, Own::Wanted) {
            return self.store.submit(op);
        }
        if let Some(read) = self.store.begin(op) {
            *own = Own::Begun(read);
        }
    }

    /// Has the store write to a page's slot.
    fn write(&self, page: PageId, op: IoOp) {
        if let Ok(io) = self.segment_io(page.segment)
            && let Some(InScratch { slots, .. }) = io.source.slots()
            && let Some(slot) = slots.slot(u64::from(page.index.get()))
        {
            slots.touch(slot);
        }
        self.store.submit(op);
    }

    /// Tells the pager that the device has taken up an operation that waited for its page.
    fn taken_up(&self, token: Token, end: EventId) {
        if token.0 < CALLER_TOKENS {
            let point = if is_chunk(token) { self.chunk_taken(token, end) } else { Some(FillPoint::new(end.0)) };
            // The pager ignores this for a write back, which also waits for mappings that change around it.
            if let Some(point) = point {
                self.with(|pager, fx| pager.taken(move_of(token), point, fx));
            }
        }
    }

    /// Whether completing this operation of the store means hashing many bytes.
    fn takes_long(&self, token: Token) -> bool {
        if self.page_bytes < LONG_HASH || token.0 >= CALLER_TOKENS {
            return false;
        }
        let Some(entry) = self.in_flight.lock().get(&move_of(token)).copied() else { return false };
        let page = entry.planned.page;
        if !self.may_hash(token, entry.stage == Stage::Reading) {
            return false;
        }
        self.segment_io(page.segment).is_ok_and(|io| match (entry.stage, io.source.read_from(page.index)) {
            (Stage::Reading, Below::File(from)) => {
                from.learned.as_ref().is_some_and(|learned| learned.asks(page.index))
            }
            _ => true,
        })
    }

    fn completed(&self, done: &mut Vec<Completion>) {
        // Callers' operations come first, so that a panic in the rest cannot keep the news from them: they lend memory
        // until they get it.
        for Completion { token, result } in done.extract_if(.., |ended| ended.token.0 >= CALLER_TOKENS) {
            let at_end = self.callers.lock().pending.remove(&token.0);
            // Values that `at_end` drops may be the caller's.
            if let Some(Err(panic)) = at_end.map(|at_end| caught(|| at_end(result))) {
                tracing::error!(panic, "the code that runs after an operation on a stream panicked");
            }
        }
        if !done.is_empty() {
            // On an error, everyone who waits has been told already.
            let _ = self.contain(|| self.moves_ended(done));
        }
    }

    fn moves_ended(&self, done: &mut Vec<Completion>) -> Result<()> {
        let mut taken = Vec::new();
        let mut ended = Vec::with_capacity(done.len());
        for Completion { token, result } in done.drain(..) {
            if is_chunk(token) {
                self.chunk_ended(token, result, &mut taken, &mut ended);
                continue;
            }
            let id = MoveId::new(token.0);
            let Some(entry) = self.in_flight.lock().remove(&id) else { continue };
            if let Some(resource) = entry.stage.resource() {
                let bytes = if result.is_ok() { self.moved_bytes(&entry) } else { 0 };
                self.observer.end(resource, entry.since, bytes, || format!("{:?}", entry.planned.page));
            }
            match result.and_then(|()| self.next_stage(&entry)) {
                Ok(Next::Copy(point)) => taken.extend(point.map(|point| (id, point))),
                Ok(Next::Write) => {}
                Ok(Next::Nothing) => ended.push((entry.planned, Ok(()))),
                Err(error) => ended.push((entry.planned, Err(error))),
            }
        }
        self.tell_of_filled(&mut ended);
        for (planned, result) in &mut ended {
            if let Err(error) = result {
                *result = Err(error.clone().context(self.describe(planned.page)));
            }
        }
        if ended.is_empty() && taken.is_empty() {
            return Ok(());
        }
        self.change(|pager, fx| {
            for (id, point) in taken {
                pager.taken(id, point, fx);
            }
            for (planned, result) in ended {
                self.complete(pager, planned, result, fx);
            }
        })
    }

    /// Tells the pager that a move has ended, and notes failures that nobody else is told: a page that was given up,
    /// and a copy in the host tier that the disk does not take.
    fn complete(&self, pager: &mut Pager, planned: Move, result: Result<()>, fx: &mut Effects) {
        let Move { id, page, from, to, .. } = planned;
        let error = result.as_ref().err().cloned();
        if error.is_some() {
            // This may have to come before the page is given up.
            self.note_lost_device(pager);
        }
        let lost = pager.stats().poisoned;
        pager.complete(id, result, fx);
        self.wipes.ended(page);
        if (error.is_some() || self.ends.are_watched())
            && let Ok(io) = self.segment_io(page.segment)
            && let Some(in_folder) = io.source.folder()
        {
            if let (Some(error), Place::Disk) = (&error, to) {
                in_folder.folder.not_written(page, error.clone());
            }
            self.ends.news();
        }
        match error {
            Some(error) if pager.stats().poisoned > lost => {
                let mut failures = self.failures.lock();
                // If the device is lost, all such pages are noted already.
                if !failures.device_lost {
                    failures.lose(self.failure(PageRun { segment: page.segment, first: page.index, count: 1 }, error));
                }
            }
            Some(error) if matches!((from, to), (Place::Host(_), Place::Disk)) => {
                let run = PageRun { segment: page.segment, first: page.index, count: 1 };
                let gone = fx.released.contains(&page.segment);
                // Not if the device tier has newer bytes by now.
                if !gone && pager.awaited(&[run]).is_some_and(|(_, tier)| tier == Tier::Host) {
                    self.failures.lock().hold(page, self.failure(run, error));
                }
            }
            // The page was written, or it is in the device tier and will be written from there.
            None if matches!(from, Place::Host(_)) => drop(self.failures.lock().held.remove(&page)),
            _ => {}
        }
    }

    fn failure(&self, run: PageRun, error: Error) -> Failure {
        let (first, pages) = (run.first.get(), u64::from(run.count));
        let bytes_of = |io: &SegmentIo| run.pages().map(|page| self.valid(io, page)).sum();
        let bytes = self.segment_io(run.segment).map_or(pages * self.page_bytes, |io| bytes_of(&io));
        let what = match self.segment_io(run.segment) {
            Ok(io) if pages > 1 => format!("pages {first} to {} of {}", first + run.count - 1, io.source.name()),
            _ => self.describe(PageId { segment: run.segment, index: run.first }),
        };
        Failure { what, pages, bytes, error }
    }

    /// Notes, once, the pages that are lost with the device: their only valid bytes were there.
    fn note_lost_device(&self, pager: &Pager) {
        let Some(error) = self.device.lost() else { return };
        if std::mem::replace(&mut self.failures.lock().device_lost, true) {
            return;
        }
        for run in pager.only_on_device() {
            let failure = self.failure(run, error.clone());
            self.failures.lock().lose(failure);
        }
    }

    fn moved_bytes(&self, entry: &InFlight) -> u64 {
        match (entry.stage, self.segment_io(entry.planned.page.segment)) {
            (Stage::Reading, Ok(io)) => self.valid(&io, entry.planned.page),
            _ => self.page_bytes,
        }
    }

    /// "page 7 of model.gguf (blk.0.attn_q.weight)".
    fn describe(&self, page: PageId) -> String {
        let Ok(io) = self.segment_io(page.segment) else {
            return format!("page {} of a tensor that is gone", page.index.get());
        };
        let name = io.source.name();
        match io.source.file() {
            Some(_) => format!("page {} of {name} ({})", page.index.get(), self.tensors_of(&io, page.index)),
            None => format!("page {} of {name}", page.index.get()),
        }
    }

    fn tensors_of(&self, io: &SegmentIo, page: PageIndex) -> String {
        let start = u64::from(page.get()) * self.page_bytes;
        io.source.tensors(start, start + self.page_bytes)
    }

    /// Notes that somebody has waited for a page since `since`.
    pub(crate) fn stalled(
        &self,
        cause: WaitCause,
        page: Option<(PageId, Tier)>,
        since: Instant,
        detail: impl FnOnce() -> String,
    ) {
        let tier = page.map_or(Tier::Device, |(_, tier)| tier);
        let time = self.observer.stall(cause, tier, since, detail);
        if let Some((page, tier)) = page
            && let Ok(io) = self.segment_io(page.segment)
        {
            io.waits.add(io.pages, page.index, cause, tier, time);
        }
    }

    /// The `most` pages of the existing segments that were waited for longest.
    pub(crate) fn worst_pages(&self, most: usize) -> Vec<PageStalls> {
        if !self.process.is_here() {
            return Vec::new();
        }
        let segments: Vec<_> = self.segments.read().iter().cloned().enumerate().collect();
        let mut worst: Vec<(usize, &Arc<SegmentIo>, Waited)> = Vec::new();
        for (id, io) in segments.iter().filter_map(|(id, io)| Some((*id, io.as_ref()?))) {
            worst.extend(io.waits.waited().map(|waited| (id, io, waited)));
            worst.sort_by_key(|(id, _, waited)| (std::cmp::Reverse(waited.time), *id, waited.page));
            worst.truncate(most);
        }
        let named = |(id, io, waited): (usize, &Arc<SegmentIo>, Waited)| PageStalls {
            page: PageId { segment: SegmentId::new(id as u32), index: waited.page },
            tensor: self.tensors_of(io, waited.page),
            count: waited.count,
            time: waited.time,
            cause: waited.cause,
            name: waited.cause.name(),
            tier: waited.tier,
        };
        worst.into_iter().map(named).collect()
    }

    /// Where a move's operations find the bytes of a page whose address is this one.
    fn bytes_at(&self, planned: Move, address: DeviceAddress) -> Result<DeviceAddress> {
        match planned.to {
            Place::Device(frame) => self.device.fill_address(frame, address),
            _ => Ok(address),
        }
    }

    /// Tells the device of the fills that have ended well.
    fn tell_of_filled(&self, ended: &mut [(Move, Result<()>)]) {
        let mut filled = Vec::with_capacity(ended.len());
        let mut places = Vec::with_capacity(ended.len());
        for (at, (planned, result)) in ended.iter_mut().enumerate() {
            if let (Place::Device(frame), Ok(())) = (planned.to, &result) {
                match self.segment_io(planned.page.segment) {
                    Ok(io) => {
                        filled.push((frame, self.address(&io, planned.page)));
                        places.push(at);
                    }
                    Err(error) => *result = Err(error),
                }
            }
        }
        if !filled.is_empty() {
            for (at, told) in places.into_iter().zip(self.device.filled_all(&filled)) {
                ended[at].1 = told;
            }
        }
    }

    /// Goes on with a move whose operation succeeded: submits the next one.
    fn next_stage(&self, entry: &InFlight) -> Result<Next> {
        let planned = entry.planned;
        let io = self.segment_io(planned.page.segment)?;
        let address = self.bytes_at(planned, self.address(&io, planned.page))?;
        match entry.stage {
            Stage::Reading => {
                let buffer = self.io_buffer(planned, address)?;
                self.check(&io, planned.page, buffer)?;
                self.zero_the_rest(&io, planned.page, buffer);
                if planned.staging.is_none() {
                    return Ok(Next::Nothing);
                }
                let op = StreamOp::CopyIn { host: buffer, device: address, len: self.page_bytes };
                Ok(Next::Copy(self.copy(planned, Stage::CopyingIn, op)))
            }
            Stage::CopyingOut if planned.to == Place::Disk => {
                if planned.staging.is_none() {
                    return Ok(Next::Nothing);
                }
                self.write_page(planned, &io, self.io_buffer(planned, address)?)?;
                Ok(Next::Write)
            }
            Stage::Writing => self.written(entry).map(|()| Next::Nothing),
            _ => Ok(Next::Nothing),
        }
    }

    /// A page has been written to its slot.
    fn written(&self, entry: &InFlight) -> Result<()> {
        let planned = entry.planned;
        let io = self.segment_io(planned.page.segment)?;
        let address = self.bytes_at(planned, self.address(&io, planned.page))?;
        if let Some(InScratch { slots, .. }) = io.source.slots() {
            // The page is WritingBack, or its host copy is busy: its bytes are still the ones that were written.
            let buffer = self.io_buffer(planned, address)?;
            slots.record(slot(slots, planned.page.index)?, buffer.checksum(self.page_bytes));
        }
        if let Some(in_folder) = io.source.folder() {
            let buffer = self.io_buffer(planned, address)?;
            in_folder.folder.written(in_folder.page(planned.page.index), buffer.checksum(self.page_bytes));
        }
        if let Source::CopyOnWrite { written, .. } = &io.source {
            written.add(planned.page.index);
        }
        Ok(())
    }

    /// After a read: makes zeros of what a page has behind the end of its file, if it may be written. What is written
    /// there stays, so it has to begin as zeros.
    fn zero_the_rest(&self, io: &SegmentIo, page: PageId, buffer: HostPointer) {
        if let (Source::CopyOnWrite { .. }, Below::File(_)) = (&io.source, io.source.read_from(page.index)) {
            buffer.zero(self.valid(io, page), self.page_bytes);
        }
    }

    /// The memory that the store reads into, or writes from.
    fn io_buffer(&self, planned: Move, address: DeviceAddress) -> Result<HostPointer> {
        match (planned.from, planned.staging) {
            (Place::Host(host), _) => self.slab.pointer(host).ok_or_else(|| missing_frame(host)),
            (_, Some(staging)) => self.slab.staging(staging).ok_or_else(|| missing_frame(staging)),
            (_, None) => device_pointer(address),
        }
    }

    /// Compares the bytes read with the hash or checksum that is known for them.
    fn check(&self, io: &SegmentIo, page: PageId, buffer: HostPointer) -> Result<()> {
        match io.source.read_from(page.index) {
            Below::File(FromFile { learned: None, .. }) => Ok(()),
            Below::File(FromFile { learned: Some(learned), .. }) => {
                let hash = || buffer.checksum(self.valid(io, page));
                learned.check(page.index, hash).map_err(|(expected, found)| {
                    let message = format!(
                        "{} has other bytes than when it was first read (hash {expected:016x}, now {found:016x})",
                        io.source.name()
                    );
                    Error::new(ErrorKind::Corrupt, message)
                        .remedy("the disk or the memory is failing, or the file was changed behind its time stamp")
                })
            }
            Below::Slot(InScratch { slots, .. }) => {
                slots.verify(slot(slots, page.index)?, buffer.checksum(self.page_bytes))
            }
            Below::Folder(in_folder) => {
                in_folder.folder.verify(in_folder.page(page.index), buffer.checksum(self.page_bytes))
            }
        }
    }

    /// [`shut_down`](Self::shut_down) for the last owner, wherever it is dropped.
    pub(crate) fn shut_down_at_last(self: &Arc<Self>) {
        if !self.process.is_here() {
            // There are no threads to end, and the ring and the files are the parent's. The child's copy of all that
            // goes when the child ends.
            return std::mem::forget(self.clone());
        }
        let close = |engine: &Arc<Self>| {
            if let Err(error) = engine.shut_down() {
                tracing::warn!(%error, "close the runtime");
            }
        };
        if !is_inside() {
            return close(self);
        }
        let engine = self.clone();
        if let Err(cause) = std::thread::Builder::new().name("outcore-close".into()).spawn(move || close(&engine)) {
            tracing::error!(%cause, "no thread to close the runtime: its memory stays");
            // Operations in flight use the memory.
            std::mem::forget(self.clone());
        }
    }

    /// Stops admitting, waits for everything in flight, stops the threads.
    pub(crate) fn shut_down(self: &Arc<Self>) -> Result<()> {
        if !self.process.is_here() {
            return Err(self.in_a_child());
        }
        may_wait("the end of a runtime")?;
        // A second close does not wait again for a disk that does not answer.
        let again = self.closed.load(Ordering::Acquire);
        let limit = if again { Duration::ZERO } else { self.store.close_limit() };
        match self.drained(limit) {
            Ok(true) => {}
            Ok(false) => {
                let told = |cause: Option<Error>| {
                    cause.unwrap_or_else(|| {
                        Error::new(
                            ErrorKind::Io,
                            "the disk, or a source, answered too late for the runtime to close in order",
                        )
                        .remedy("let it wait for longer (RuntimeBuilder::close_within)")
                    })
                };
                return Err(self.abandon(Duration::ZERO, told));
            }
            // What may still be in use is not given back.
            Err(given_up) => return Err(self.abandon(limit, |_| given_up)),
        }
        self.keeper.stop();
        self.closed.store(true, Ordering::Release);
        let store = self.store.close();
        let device = self.device.close();
        // After the streams have ended: closures on them may drop tensors.
        let room = if again || self.room.drain(limit) {
            Ok(())
        } else {
            let what = "the disk has not taken back the room of tensors that were dropped";
            Err(Error::new(ErrorKind::Io, what).remedy("check the disk that the scratch file is on"))
        };
        self.process.closed();
        self.with(|pager, _| self.note_lost_device(pager));
        store.and(device).and(room)
    }

    /// Stops admitting, and waits for everything in flight. Returns whether all of it has ended; false if the disk
    /// completes nothing within `limit`. With a limit of zero it does not wait.
    ///
    /// # Errors
    /// As for [`usable`](Self::usable).
    fn drained(&self, limit: Duration) -> Result<bool> {
        let closed = Error::new(ErrorKind::Closed, "the runtime was closed");
        self.change(|pager, fx| pager.close(&closed, fx))?;
        let mut latched = self.latch.hold()?;
        while !latched.pager.is_idle() {
            let ended = self.store.ended();
            let late = latched.wait_for(&self.idle, limit, &self.latch)?;
            let stands = limit.is_zero() || (self.store.outstanding() > 0 && self.store.ended() == ended);
            if late && !latched.pager.is_idle() && stands {
                latched.release();
                return Ok(false);
            }
        }
        latched.release();
        Ok(true)
    }

    /// Ends although something is, or may be, in flight. Memory that the kernel or the device may still touch is never
    /// given back. Returns the error that everyone who waits gets; `told` makes it from the store's.
    fn abandon(self: &Arc<Self>, limit: Duration, told: impl FnOnce(Option<Error>) -> Error) -> Error {
        let tickets = self.hold(|latched| std::mem::take(&mut latched.tickets)).unwrap_or_default();
        self.keeper.stop();
        self.closed.store(true, Ordering::Release);
        let error = told(self.store.close_within(limit).err());
        self.ends.give_up();
        // Frames, staging buffers and address ranges belong to the engine.
        std::mem::forget(self.clone());
        drop(News::failed(tickets.into_values(), &error));
        error
    }

    /// Errors that no call has reported.
    pub(crate) fn health(&self) -> Vec<Error> {
        if !self.process.is_here() {
            return vec![self.in_a_child()];
        }
        let given_up = self.usable().err();
        if self.device.lost().is_some() {
            self.with(|pager, _| self.note_lost_device(pager));
        }
        let failures = self.failures.lock();
        let lost = failures.lost.iter().map(Failure::told);
        let (pages, bytes) = failures.more;
        let more = (pages > 0).then(|| {
            let bytes = Bytes::new(bytes);
            let what = format!("{pages} more pages ({bytes}) are lost; their errors were not kept");
            Error::new(ErrorKind::Poisoned, what).remedy("see the first ones")
        });
        let held = failures.held.values().map(|held| {
            let what = format!("{} cannot be written and stays in host memory", held.what);
            held.error.clone().context(what)
        });
        let policy = self.replaced_policy().map(Replaced::told);
        given_up.into_iter().chain(lost).chain(more).chain(held).chain(policy).collect()
    }

    /// All losses since the start as one error; its cause is the first one's.
    pub(crate) fn lost(&self) -> Option<Error> {
        let failures = self.failures.lock();
        let first = failures.lost.first()?;
        if failures.lost.len() == 1 {
            return Some(first.told());
        }
        let sum = |of: fn(&Failure) -> u64| failures.lost.iter().map(of).sum::<u64>();
        let (count, bytes) = (sum(|lost| lost.pages) + failures.more.0, sum(|lost| lost.bytes) + failures.more.1);
        let named: Vec<&str> = failures.lost.iter().take(Failures::NAMED).map(|lost| lost.what.as_str()).collect();
        let rest = count - failures.lost.iter().take(Failures::NAMED).map(|lost| lost.pages).sum::<u64>();
        let rest = if rest > 0 { format!(" and {rest} more") } else { String::new() };
        let (bytes, named) = (Bytes::new(bytes), named.join(", "));
        let what = format!("{count} pages are lost ({bytes}): {named}{rest}; the first, because of");
        Some(Error::new(first.error.kind(), what).caused_by(first.error.clone()))
    }
}

fn tell_of_discard(pager: &mut Pager, frame: FrameId, discarded: Result<()>, fx: &mut Effects) {
    match discarded {
        Ok(()) => pager.discarded(frame, fx),
        Err(error) => pager.discard_refused(frame, &error, fx),
    }
}

/// Logs through `tracing`. Its subscriber is the caller's: it may call the runtime, so never log under the latch; and
/// if it panics, the rest must go on.
fn log(say: impl FnOnce()) {
    let _ = caught(say);
}

fn slot(slots: &SlotRun, page: PageIndex) -> Result<SlotIndex> {
    slots.slot(u64::from(page.get())).ok_or_else(|| {
        Error::new(ErrorKind::Internal, format!("no scratch slot for {page:?} of {}", slots.slot_count()))
    })
}

fn missing_frame(what: impl std::fmt::Debug) -> Error {
    Error::new(ErrorKind::Internal, format!("{what:?} does not exist in the host slab"))
}

/// On a device whose frames the store can reach, an address is a pointer.
fn device_pointer(address: DeviceAddress) -> Result<HostPointer> {
    HostPointer::of_page(address).ok_or_else(|| Error::new(ErrorKind::Internal, "a segment at address 0"))
}
