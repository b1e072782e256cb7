//! Loads tensors into ordinary memory of the program, past the page cache.
//!
//! For programs that want all of a model in memory, and want it to be theirs: [`load`] reads its files with many large
//! reads in flight, as a runtime reads pages, and gives each tensor with its bytes. There is no runtime, no budget
//! and no page afterwards. A tensor's memory goes back to the system when the tensor is dropped.
//!
//! ```no_run
//! use outcore::store::StoreOptions;
//! use outcore::{IoBackend, format, load};
//!
//! let header = format::open("model.safetensors")?;
//! for mut tensor in load::load(&header, &StoreOptions::new(IoBackend::Auto), &mut || Ok(()))? {
//!     println!("{} {} {:?}", tensor.name(), tensor.dtype(), tensor.shape());
//!     tensor.bytes_mut().fill(0);
//! }
//! # Ok::<(), outcore::Error>(())
//! ```

// The bytes of large tensors are read to where they stay (`layout.rs`), into memory that other threads have the system
// provide just ahead of the reads (`memory.rs`): zeroing it takes about as long as reading. The caller's thread submits
// the reads, takes in their ends, and moves or copies what does not lie at an aligned address.

mod layout;
mod memory;

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::mem;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use self::layout::{Layout, Piece, Region};
use self::memory::{ALIGNMENT, Mapping, Memory, Place};
use crate::device::{Completion, Completions, Token};
use crate::dlpack::DlpackView;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result, caught};
use crate::format::{FileState, ModelFile, ModelHeader, TensorHeader};
use crate::ids::{Bytes, FileId};
use crate::os::kernel_pages::system_page_bytes;
use crate::os::machine::MemoryLimit;
use crate::os::process::Opened;
use crate::os::signals::without_signals;
use crate::pager::Priority;
use crate::store::file::open_to_read;
use crate::store::{FileUse, IO_ALIGNMENT, IoKind, IoOp, QueueDepth, Store, StoreOptions};

/// Reads in flight, unless the options say otherwise.
const DEPTH: u32 = 16;
/// Reads that are submitted and have not ended, for each that may be in flight: the store never waits for the caller.
const SUBMITTED: usize = 2;
/// Bytes that a thread touches at a time. A call for more would hold up other threads that map memory.
const TOUCHED_AT_ONCE: u64 = 2 << 20;
/// Most threads that touch memory. One provides several GB/s.
const MOST_TOUCHERS: usize = 4;
/// How often the caller is asked whether to go on.
const ASK: Duration = Duration::from_millis(20);
/// How long a load that failed waits, without any read ending, for reads that are in flight.
const GIVE_UP: Duration = Duration::from_secs(5);

/// A tensor in memory of its own.
pub struct LoadedTensor {
    name: String,
    dtype: DType,
    shape: Vec<u64>,
    memory: Memory,
}

impl LoadedTensor {
    fn new(header: &TensorHeader, memory: Memory) -> Self {
        Self { name: header.name.clone(), dtype: header.dtype, shape: header.shape.clone(), memory }
    }

    /// Its name in the header.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its extents, outermost first.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Its bytes, as the file has them. The first is at an address that is a multiple of 64.
    pub fn bytes(&self) -> &[u8] {
        self.memory.bytes()
    }

    /// The same, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory.bytes_mut()
    }

    /// A view for another library, which may write and which owns the memory from then on. DLPack cannot describe types
    /// that are stored in blocks: they are given as bytes, which the last extent counts if it is whole blocks.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) for extents that DLPack cannot say. The memory is gone then.
    pub fn into_dlpack(self) -> Result<DlpackView> {
        let (elements, bytes) = (self.dtype.block_elements(), self.dtype.block_bytes());
        if elements == 1 {
            return self.memory.into_dlpack(self.dtype, &self.shape);
        }
        let mut shape = self.shape;
        match shape.last_mut() {
            Some(last) if last.is_multiple_of(elements) => *last = *last / elements * bytes,
            _ => shape = vec![self.memory.bytes().len() as u64],
        }
        self.memory.into_dlpack(DType::U8, &shape)
    }
}

impl fmt::Debug for LoadedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedTensor")
            .field("name", &self.name)
            .field("dtype", &self.dtype)
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

/// Loads all tensors of a header, in its order. Waits for the disk; `go_on` is asked fifty times a second, on this
/// thread, and ends the load by an error.
///
/// Reads go past the page cache where the file system allows it. Where it does not, and the backend is
/// [`Auto`](crate::IoBackend::Auto), they go through it, and their bytes are dropped from it. The memory is anonymous,
/// in huge pages where the kernel has such. A tensor of 64 KiB or more takes up to 8 KiB more than its bytes.
///
/// # Errors
/// - [`OutOfMemory`](ErrorKind::OutOfMemory) if the tensors take more than this process may take, before anything is
///   read; swap is not counted;
/// - [`ModelChanged`](ErrorKind::ModelChanged) if a file is no longer what it was when its header was read, or changes;
/// - [`InvalidArgument`](ErrorKind::InvalidArgument) if the header was changed and contradicts the files;
/// - [`Unsupported`](ErrorKind::Unsupported) in a child by `fork` of a process that had a runtime open or was loading;
/// - those of opening the files and the store, of the first read that failed, and that of `go_on`.
///
/// An error returns when all reads have ended. If the disk ends none for five seconds, it returns all the same, and the
/// memory stays reserved, because the kernel may still write there.
pub fn load(
    header: &ModelHeader,
    options: &StoreOptions,
    go_on: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<LoadedTensor>> {
    header.check()?;
    // Dropped when the store's threads have ended, or were given up.
    let _open = Opened::here()?;
    let layout = Layout::of(header, system_page_bytes().max(IO_ALIGNMENT));
    let depth = options.asked_depth().unwrap_or(DEPTH);
    let most = depth as usize * SUBMITTED;
    fits(&layout, most)?;
    let mapping = |len, huge| {
        Mapping::new(len, huge).map_err(|cause| {
            let message = format!("the system gives no addresses for {} of tensors", Bytes::new(len));
            Error::new(ErrorKind::OutOfMemory, message)
                .remedy("raise the address-space limit (ulimit -v)")
                .caused_by(cause)
        })
    };
    let (kept, copied) = (mapping(layout.kept, true)?, mapping(layout.copied, false)?);
    let (tell, events) = mpsc::channel();
    let options = match options.asked_depth() {
        Some(_) => options.clone(),
        None => options.clone().depth_ahead(QueueDepth::new(DEPTH)?),
    };
    let store = options.open(Arc::new(ToChannel(tell.clone())))?;
    let files = header.files.iter().map(|file| add(&*store, file)).collect::<Result<Vec<_>>>()?;
    let place = |region: &Region| {
        let mapping = if region.copied { &copied } else { &kept };
        Reading::new(mapping.place(region.at, region.room), region, header)
    };
    let readings = layout.regions.iter().map(place).collect();
    let mut load = Load { header, layout: &layout, store: &*store, files, most, readings, tensors: Vec::new() };
    load.tensors.resize_with(header.tensors.len(), || None);
    let touching = Touching { memory: &kept, len: layout.kept, next: AtomicU64::new(0), over: AtomicBool::new(false) };
    let outcome = thread::scope(|scope| {
        let started = touching.start(scope, &tell);
        drop(tell);
        // A panic, as of the caller's question, must not free memory that the kernel writes to.
        let run = caught(|| load.run(&events, started, go_on));
        let panicked = |what| Err(Error::new(ErrorKind::Internal, format!("a load panicked: {what}")));
        let outcome = run.unwrap_or_else(panicked);
        touching.over.store(true, Ordering::Relaxed);
        outcome
    });
    let limit = if outcome.is_ok() { options.close_limit } else { GIVE_UP.min(options.close_limit) };
    if let Err(error) = store.close_within(limit) {
        // The kernel may still write there.
        mem::forget((mem::take(&mut load.readings), kept, copied));
        return Err(outcome.err().unwrap_or(error));
    }
    outcome.map_err(|error| match error.kind() {
        ErrorKind::ModelChanged => error.remedy("load it again when nothing writes it any more"),
        _ => error,
    })?;
    load.finish()
}

/// Refuses more than this process may take.
fn fits(layout: &Layout, most: usize) -> Result<()> {
    // Of the regions that are copied, those have memory that are being read.
    let passing = layout.copied.min(most as u64 * layout::PIECE);
    let needed = Bytes::new(layout.kept.saturating_add(layout.copies).saturating_add(passing));
    // Where the limit cannot be read, the kernel will say.
    let Ok(memory) = MemoryLimit::detect() else { return Ok(()) };
    if needed <= memory.free() {
        return Ok(());
    }
    let (limit, free) = (memory.limit, memory.free());
    let message = format!("the tensors take {needed} of memory, and of the {limit} of this process {free} are free");
    Err(Error::new(ErrorKind::OutOfMemory, message)
        .remedy("free memory or raise the limit, or leave the model on disk and page it"))
}

/// Gives a file to the store, if it is still the one whose header was read.
fn add(store: &dyn Store, file: &ModelFile) -> Result<FileId> {
    let handle = open_to_read(&file.path)?;
    let now = handle.metadata().map_err(|cause| Error::io(format!("look at {}", file.path.display()), cause))?;
    if FileState::of(&now) != file.state {
        return Err(file.changed_since());
    }
    store.add_file(handle, file.path.clone(), FileUse::Model)
}

/// What the caller's thread waits for.
enum Event {
    /// A slice of memory is there, or could not be had.
    Touched(u64, io::Result<()>),
    /// A read has ended.
    Read(Completion),
}

struct ToChannel(mpsc::Sender<Event>);

impl Completions for ToChannel {
    fn completed(&self, done: &mut Vec<Completion>) {
        for completion in done.drain(..) {
            // Nobody listens after a failure.
            drop(self.0.send(Event::Read(completion)));
        }
    }
}

/// Threads that touch memory, slice by slice.
struct Touching<'a> {
    memory: &'a Mapping,
    len: u64,
    /// The first slice that no thread has taken.
    next: AtomicU64,
    /// Whether nobody needs it any more.
    over: AtomicBool,
}

impl Touching<'_> {
    /// Starts the threads. False if the system starts none.
    fn start<'scope>(&'scope self, scope: &'scope thread::Scope<'scope, '_>, tell: &mpsc::Sender<Event>) -> bool {
        let slices = usize::try_from(self.len.div_ceil(TOUCHED_AT_ONCE)).unwrap_or(usize::MAX);
        let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(MOST_TOUCHERS).min(slices);
        let start = |_| {
            let tell = tell.clone();
            let thread = thread::Builder::new().name("outcore-touch".into());
            without_signals(|| thread.spawn_scoped(scope, move || self.serve(&tell))).is_ok()
        };
        (0..threads).filter(|n| start(*n)).count() > 0
    }

    fn serve(&self, tell: &mpsc::Sender<Event>) {
        while !self.over.load(Ordering::Relaxed) {
            let slice = self.next.fetch_add(1, Ordering::Relaxed);
            let start = slice * TOUCHED_AT_ONCE;
            if start >= self.len {
                return;
            }
            let touched = self.memory.touch(start, (self.len - start).min(TOUCHED_AT_ONCE));
            let failed = touched.is_err();
            if tell.send(Event::Touched(slice, touched)).is_err() || failed {
                return;
            }
        }
    }
}

/// A region that is being read.
struct Reading {
    /// `None` once its tensors are there.
    place: Option<Place>,
    /// Bytes that have not come.
    left: u64,
    /// Of a region that stays: the first byte of its tensor, how many it has, and by how many they move down.
    first: u64,
    len: u64,
    by: u64,
    /// Where moving goes on, and the pieces behind that which have come. Each moves when those before it have: it
    /// overwrites their last bytes.
    moved: u64,
    came: BTreeSet<u64>,
}

impl Reading {
    fn new(place: Place, region: &Region, header: &ModelHeader) -> Self {
        let alone = header.tensors.get(region.tensors.start).filter(|_| !region.copied);
        let (first, len) = alone.map_or((0, 0), |tensor| (tensor.offset - region.start, tensor.len));
        let by = first % ALIGNMENT;
        Self { place: Some(place), left: region.len, first, len, by, moved: 0, came: BTreeSet::new() }
    }

    /// A piece has come. True if it was the last.
    fn came(&mut self, piece: Piece) -> bool {
        self.left -= u64::from(piece.len);
        if self.by > 0
            && let Some(place) = &mut self.place
        {
            self.came.insert(piece.offset);
            while self.came.remove(&self.moved) {
                let end = self.moved + layout::PIECE;
                let (from, to) = (self.moved.max(self.first), end.min(self.first + self.len));
                place.shift_down(from, to.saturating_sub(from), self.by);
                self.moved = end;
            }
        }
        self.left == 0
    }
}

struct Load<'a> {
    header: &'a ModelHeader,
    layout: &'a Layout,
    store: &'a dyn Store,
    files: Vec<FileId>,
    /// Most reads that are submitted at a time.
    most: usize,
    readings: Vec<Reading>,
    tensors: Vec<Option<Memory>>,
}

impl Load<'_> {
    /// Reads all pieces. On an error, reads may be in flight.
    fn run(
        &mut self,
        events: &mpsc::Receiver<Event>,
        touched_ahead: bool,
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let pieces = &self.layout.pieces;
        let mut touched = BTreeSet::new();
        // Up to here memory is there. Where no thread touches it, the kernel does as it reads.
        let mut there = if touched_ahead { 0 } else { u64::MAX };
        let (mut next, mut ended) = (0, 0);
        let mut asked = Instant::now();
        go_on()?;
        while ended < pieces.len() {
            while next - ended < self.most
                && let Some(piece) = pieces.get(next).filter(|piece| self.memory_end(piece) <= there)
            {
                self.submit(next as u64, piece);
                next += 1;
            }
            match events.recv_timeout(ASK.saturating_sub(asked.elapsed())) {
                Ok(Event::Read(Completion { token, result })) => {
                    result?;
                    ended += 1;
                    self.came(pieces[token.0 as usize]);
                }
                Ok(Event::Touched(slice, result)) => {
                    result.map_err(|cause| {
                        let message =
                            format!("the system has no memory for {} of tensors", Bytes::new(self.layout.kept));
                        Error::new(ErrorKind::OutOfMemory, message)
                            .remedy("free memory or raise the limit")
                            .caused_by(cause)
                    })?;
                    touched.insert(slice * TOUCHED_AT_ONCE);
                    while touched.remove(&there) {
                        there += TOUCHED_AT_ONCE;
                    }
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(
                        Error::new(ErrorKind::Internal, "the store reports no more").remedy("report this as a bug")
                    );
                }
            }
            if asked.elapsed() >= ASK {
                go_on()?;
                asked = Instant::now();
            }
        }
        Ok(())
    }

    /// The end of a piece's memory, as far as it is touched ahead.
    fn memory_end(&self, piece: &Piece) -> u64 {
        let region = &self.layout.regions[piece.region];
        if region.copied { 0 } else { region.at + piece.offset + u64::from(piece.len) }
    }

    fn submit(&self, number: u64, piece: &Piece) {
        let region = &self.layout.regions[piece.region];
        let place = self.readings[piece.region].place.as_ref();
        let (Some(place), Some(file)) = (place, self.files.get(region.file as usize)) else { return };
        self.store.submit(IoOp {
            token: Token(number),
            kind: IoKind::Read,
            file: *file,
            offset: region.start + piece.offset,
            buffer: place.pointer(piece.offset),
            len: piece.len,
            valid: piece.valid,
            priority: Priority::Prefetch,
        });
    }

    /// A piece has come.
    fn came(&mut self, piece: Piece) {
        let reading = &mut self.readings[piece.region];
        if !reading.came(piece) {
            return;
        }
        let (region, Some(place)) = (&self.layout.regions[piece.region], reading.place.take()) else { return };
        if !region.copied {
            let (first, len) = (reading.first - reading.by, reading.len);
            self.tensors[region.tensors.start] = Some(Memory::Pages { place, first, len });
            return;
        }
        let tensors = self.header.tensors.iter().zip(&mut self.tensors);
        for (tensor, memory) in tensors.skip(region.tensors.start).take(region.tensors.len()) {
            let bytes = if tensor.len == 0 { &[][..] } else { place.bytes(tensor.offset - region.start, tensor.len) };
            *memory = Some(Memory::copied(bytes));
        }
    }

    fn finish(self) -> Result<Vec<LoadedTensor>> {
        let made = self.header.tensors.iter().zip(self.tensors).map(|(header, memory)| match memory {
            Some(memory) => Ok(LoadedTensor::new(header, memory)),
            None if header.len == 0 => Ok(LoadedTensor::new(header, Memory::copied(&[]))),
            None => Err(Error::new(ErrorKind::Internal, format!("the tensor {} was not read", header.name))
                .remedy("report this as a bug")),
        });
        made.collect()
    }
}
