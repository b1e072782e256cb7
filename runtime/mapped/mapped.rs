//! A file as a slice.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::fs::{self, File};
use std::future::Future;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use outcore::format::{self, ModelHeader, TensorHeader};
use outcore::store::{QueueDepth, StoreOptions};
use outcore::{
    Bytes, DeviceBudget, Error, ErrorKind, IoBackend, PageSize, Result, Runtime, RuntimeBuilder, Tensor, Tier, Walker,
};
use parking_lot::Mutex;

use crate::device::{self, Core, Faulting, NAME};
use crate::experts::{ExpertId, Experts, LayerExperts};
use crate::faults::{self, FLOOR, Handler, Held, Pins, Request};
use crate::foresight::Foresight;
use crate::layers::{self, Layers, There};
use crate::live;
use crate::options::MapOptions;
use crate::order;
use crate::telling::Tell;
use crate::uses::{Uses, run};

/// The name of the only tensor of a file that is opened as bytes.
const BYTES: &str = format::BYTES;

/// How many pages that were published last stay pinned at most, where pages are used one by one.
const KEPT: usize = 16;

/// Frames that a runtime has at least where a file is mapped. Two of them are left to touches.
pub const LEAST_FRAMES: u64 = 4;

/// Smaller pages cost more to bring than their bytes; larger ones are huge pages already.
const EXPERT_PAGE_LEAST: u64 = 64 << 10;
const EXPERT_PAGE_MOST: u64 = 2 << 20;

/// After so long without a frame, whoever tells of experts waits no longer: guards of its own may be in the way.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Bytes of experts that the disk is asked for at a time.
const IN_FLIGHT: u64 = 8 << 20;

/// Faults between looks at whether the walker follows an order.
const LOOK: u64 = 32;

/// Uses of experts that nobody told of, after which it is believed that nobody tells.
const UNTOLD_MAX: u64 = 64;

#[derive(Debug)]
struct Pages {
    runtime: Runtime,
    core: Arc<Core>,
    start: u64,
    /// Uses of this mapping that have an order.
    uses: Uses,
    /// Uses of experts: they have none.
    drawn: Walker,
    experts: Experts,
    /// The first page of each expert. It is hidden after use, so that each use of the expert is seen.
    firsts: HashSet<u32>,
    /// Uses of experts since one was [told of](Mapped::expert_hint); more than [`UNTOLD_MAX`] if none was.
    untold: AtomicU64,
    /// Offsets of the pages that are [expected](Mapped::expect_experts).
    expected: Mutex<Vec<u64>>,
    foresight: Mutex<Foresight>,
    /// Whether experts are expected by what followed before: not if the program predicts what its router will choose.
    foresees: AtomicBool,
    /// The file's name, without its folder.
    name: String,
    layers: Layers,
    /// What [`Mapped::experts`] says.
    hints: AtomicU64,
    told: AtomicU64,
    touched: AtomicU64,
    /// Faults so far.
    faults: AtomicU64,
    /// The whole file.
    bytes: Tensor,
    page: u64,
    /// Frames of the runtime at the last look: its budget may change.
    frames: AtomicUsize,
    failure: Mutex<Option<Error>>,
    tell: OnceLock<fn(&Error)>,
    private: bool,
    written: Arc<Written>,
    own: Weak<Self>,
}

impl Pages {
    fn run(&self, first: u32, end: u32) -> Option<Tensor> {
        run(&self.bytes, self.page, first, end)
    }

    /// Pages in ascending order, as few tensors.
    fn runs(&self, pages: &[u32]) -> Vec<Tensor> {
        pages.chunk_by(|a, b| a + 1 == *b).filter_map(|run| self.run(*run.first()?, run.last()? + 1)).collect()
    }

    fn offsets(&self, pages: &[u32]) -> Vec<u64> {
        pages.iter().map(|page| u64::from(*page) * self.page).collect()
    }

    /// The pin of pages in ascending order, by one of the walkers. A page that was `touched` may have a frame that
    /// guards of the program leave.
    fn request(&self, pages: &[u32], of_expert: bool, touched: bool) -> Option<Request> {
        let (tensors, offsets) = (self.runs(pages), self.offsets(pages));
        // Owned by the request, which outlives this call.
        let this = self.own.upgrade().filter(|_| !tensors.is_empty())?;
        let pins = Box::pin(async move {
            let walker = if of_expert { &this.drawn } else { this.uses.walker() };
            let request = walker.pin_set(&tensors);
            let pins = if touched { request.never_refused().await } else { request.await };
            pins.map(Pins::Read)
        });
        Some(Request { pages: offsets, writes: false, pins })
    }

    fn check_experts(&self, layer: u32, experts: &[u32]) -> Result<()> {
        let has = |expert: &&u32| self.experts.has(ExpertId { layer, expert: **expert });
        experts.iter().find(|expert| !has(expert)).map_or(Ok(()), |unknown| {
            let message = format!("the file has no expert {unknown} in layer {layer}");
            Err(Error::new(ErrorKind::InvalidArgument, message)
                .remedy("tell of experts that the router of this model can choose"))
        })
    }

    fn check_layers(&self, layers: &[LayerExperts<'_>]) -> Result<()> {
        layers.iter().try_for_each(|LayerExperts { layer, experts }| self.check_experts(*layer, experts))
    }

    /// These experts are told of, whose pages begin at `offsets`. What is used next is what the program expects, if it
    /// does; or all of the next layer, if it is most of this one, as batches of many tokens use it; or what followed
    /// before.
    fn look_ahead(&self, now: LayerExperts<'_>, next: Option<&[LayerExperts<'_>]>, offsets: &[u64]) {
        let mut foresight = self.foresight.lock();
        foresight.used(now.layer, now.experts);
        let is_most = || {
            let of_layer = self.experts.in_layer(now.layer).count();
            of_layer > 0 && now.experts.len() * 4 >= of_layer * 3
        };
        let worth = if let Some(next) = next {
            self.foresees.store(false, Ordering::Relaxed);
            self.worth_a_read(&mut foresight, next)
        } else if is_most() {
            let layer = now.layer.saturating_add(1);
            vec![(layer, self.experts.in_layer(layer).collect())]
        } else if let Some((layer, experts)) = foresight.after_used().filter(|_| self.foresees.load(Ordering::Relaxed))
        {
            self.worth_a_read(&mut foresight, &[LayerExperts { layer, experts: &experts }])
        } else {
            return;
        };
        drop(foresight);
        self.expect(&worth, offsets);
    }

    /// What of a prediction is worth a read.
    fn worth_a_read(&self, foresight: &mut Foresight, layers: &[LayerExperts<'_>]) -> Vec<(u32, Vec<u32>)> {
        let is_there = |id| {
            // Not at an end, where a neighbour may have brought the page.
            let place = self.experts.pieces(id).next().map(|piece| piece.start.midpoint(piece.end));
            place.is_none_or(|at| self.core.has_frame(self.address((at / self.page) as u32)))
        };
        let worth = foresight.predicts(layers, is_there);
        layers.iter().map(|layer| layer.layer).zip(worth).collect()
    }

    /// These experts are likely to be used soon, in this order of layers, and nothing else is. The pages that begin at
    /// `now`, ascending, are waited for already.
    fn expect(&self, layers: &[(u32, Vec<u32>)], now: &[u64]) {
        let (mut pages, mut left) = (Vec::new(), self.may_keep());
        for (layer, experts) in layers {
            let of_layer = self.pages_of_experts(*layer, experts, left);
            left -= of_layer.len();
            pages.extend(of_layer);
        }
        let offsets = self.offsets(&pages);
        // Published as soon as they are there, which costs the program nothing then. If uses are not told of, the first
        // page of each stays hidden, so that its use is seen.
        let told = self.untold.load(Ordering::Relaxed) <= UNTOLD_MAX;
        let seen = |offset: &u64| told || !self.firsts.contains(&((offset / self.page) as u32));
        let shown: Vec<u64> = offsets.into_iter().filter(seen).collect();
        let mut expected = self.expected.lock();
        if pages.is_empty() && expected.is_empty() {
            return;
        }
        self.core.want_no_more(self.start, expected.iter().filter(|page| now.binary_search(page).is_err()));
        self.core.want_all(self.start, &shown);
        *expected = shown;
        // Wakers of the program's may run in what follows, and may tell of experts themselves.
        drop(expected);
        self.drawn.expect(&self.runs(&pages));
    }

    /// The pages of these experts of a layer, ascending, as far as they are not more than `most`.
    fn pages_of_experts(&self, layer: u32, experts: &[u32], most: usize) -> Vec<u32> {
        let mut pages = BTreeSet::new();
        for id in experts.iter().map(|expert| ExpertId { layer, expert: *expert }) {
            let of_expert = self.experts.pages(id, self.page);
            if pages.len() + of_expert.iter().filter(|page| !pages.contains(*page)).count() > most {
                break;
            }
            pages.extend(of_expert);
        }
        pages.into_iter().collect()
    }

    fn count_frames(&self) {
        let frames = self.runtime.stats().device_frames;
        self.frames.store((frames.used + frames.free) as usize, Ordering::Relaxed);
    }

    fn address(&self, index: u32) -> u64 {
        self.start + u64::from(index) * self.page
    }

    /// There is a fault on this page, of an expert or not.
    fn count_fault(&self, index: u32, of_expert: bool) {
        if self.faults.fetch_add(1, Ordering::Relaxed) % LOOK == LOOK - 1 {
            self.count_frames();
        }
        if !of_expert {
            self.tell_of_the_unseen(index);
        }
    }

    /// There is a fault on this page. Tells the policy of the pages that were used since the fault before.
    fn tell_of_the_unseen(&self, index: u32) {
        let was_there = self.core.is_published(self.address(index));
        for passed in self.uses.fault(index, was_there, |page| self.core.is_published(self.address(page))) {
            if let Some(page) = self.run(passed, passed + 1) {
                // A page that is there is pinned at the first look. If it is on its way out, the use is not worth a
                // wait.
                let mut request = pin!(self.uses.walker().pin(&page));
                drop(request.as_mut().poll(&mut Context::from_waker(Waker::noop())));
            }
        }
        if !was_there {
            self.uses
                .look_at_some(|page| self.core.hide(self.address(page), || self.pins(u64::from(page) * self.page) > 0));
        }
        if self.faults.load(Ordering::Relaxed).is_multiple_of(LOOK) {
            self.uses.look(&self.runtime, self.frames.load(Ordering::Relaxed));
        }
    }
}

impl Handler for Pages {
    fn requests(&self, offset: u64) -> Vec<Request> {
        let page = (offset / self.page) as u32;
        let expert = self.experts.at(offset);
        self.count_fault(page, expert.is_some());
        let mut requests = Vec::from_iter(self.request(&[page], expert.is_some(), true));
        // A pin of several pages would wait for those that are written.
        if let Some(expert) = expert.filter(|_| !self.private) {
            self.touched.fetch_add(1, Ordering::Relaxed);
            let untold = self.untold.fetch_add(1, Ordering::Relaxed) > UNTOLD_MAX;
            if untold && self.foresees.load(Ordering::Relaxed) {
                let mut foresight = self.foresight.lock();
                let next = if foresight.touched(expert) { foresight.after_touched() } else { None };
                let worth = next.map(|(layer, experts)| {
                    self.worth_a_read(&mut foresight, &[LayerExperts { layer, experts: &experts }])
                });
                drop(foresight);
                if let Some(worth) = worth {
                    self.expect(&worth, &[]);
                }
            }
            let all = self.experts.pages(expert, self.page);
            if all.len() > 1 && all.len() <= self.frames.load(Ordering::Relaxed) / 8 {
                requests.extend(self.request(&all, true, false));
            }
        }
        requests
    }

    fn request_to_write(&self, offset: u64) -> Option<Request> {
        let page = (offset / self.page) as u32;
        let of_expert = self.experts.at(offset).is_some();
        self.count_fault(page, of_expert);
        let (tensor, this) = (self.run(page, page + 1)?, self.own.upgrade()?);
        let pins = Box::pin(async move {
            let walker = if of_expert { &this.drawn } else { this.uses.walker() };
            walker.pin_set_mut(std::slice::from_ref(&tensor)).never_refused().await.map(Pins::Write)
        });
        Some(Request { pages: self.offsets(&[page]), writes: true, pins })
    }

    fn is_private(&self) -> bool {
        self.private
    }

    fn will_be_written(&self, offset: u64) {
        self.written.add(offset);
    }

    fn hides(&self, page: u64) -> bool {
        let index = (page / self.page) as u32;
        if self.experts.at(page).is_some() {
            return self.untold.load(Ordering::Relaxed) > UNTOLD_MAX && self.firsts.contains(&index);
        }
        self.uses.let_go(index)
    }

    fn shown(&self, page: u64, took: Duration) {
        if self.experts.at(page).is_none() {
            self.uses.shown(took);
        }
    }

    fn pins(&self, page: u64) -> u32 {
        let index = (page / self.page) as u32;
        self.run(index, index + 1).map_or(0, |page| page.pins())
    }

    fn may_keep(&self) -> usize {
        let frames = self.frames.load(Ordering::Relaxed);
        // Beside the pages of turns, and one that is on its way.
        if self.experts.is_empty() { (frames / 16).clamp(2, KEPT) } else { (frames / 4).max(1) }
    }

    fn turns(&self) -> usize {
        // Each has two pages: a quarter of the frames, and half where there are four.
        (self.frames.load(Ordering::Relaxed) / 8).max(1)
    }

    fn failed(&self, offset: Option<u64>, error: Error) -> Tell {
        self.failure.lock().get_or_insert(error.clone());
        let tell = self.tell.get().copied();
        // The signal has the address that was touched, so the reason names the page's.
        let error = match offset {
            Some(offset) => error.context(format!("the page at {:#x}", self.start + offset)),
            None => error,
        };
        Box::new(move || {
            tracing::error!(%error, "a page that was touched could not be read");
            if let Some(tell) = tell {
                tell(&error);
            }
        })
    }
}

/// Waits for `request` on this thread; `None` if pages have been `missing` for [`WAIT_MAX`], which are those without a
/// frame. A page that has one comes, or fails.
fn wait_for<T>(request: impl Future<Output = Result<T>>, missing: impl Fn() -> usize) -> Option<Result<T>> {
    let mut request = pin!(request);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut since = Instant::now();
    loop {
        if let Poll::Ready(result) = request.as_mut().poll(&mut Context::from_waker(&waker)) {
            return Some(result);
        }
        thread::park_timeout(WAIT_MAX / 4);
        if missing() == 0 {
            since = Instant::now();
        } else if since.elapsed() >= WAIT_MAX {
            return None;
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// The header of the model that a file is, or is a part of, and the tensors that lie in the file.
fn model_of(path: &Path) -> Option<(ModelHeader, u32)> {
    // What is no model has no order, and a part of a model whose other parts are missing is none.
    let header = format::open(path).ok()?;
    let path = path.canonicalize().ok()?;
    let file = header.files.iter().position(|file| file.path.canonicalize().is_ok_and(|other| other == path))?;
    Some((header, file as u32))
}

/// The page size for this model: `None` if it has no experts, so that the runtime's own choice fits.
///
/// A file keeps experts beside each other, and the pages at both ends of a matrix bring parts of its neighbours. With
/// an eighth of a matrix to a page these are a tenth of what is read.
fn page_size_for(path: &Path) -> Option<PageSize> {
    let (header, file) = model_of(path)?;
    let piece = Experts::of(header.tensors.iter().filter(|tensor| tensor.file == file)).largest_piece()?;
    let page = (piece / 8).max(1).next_power_of_two().clamp(EXPERT_PAGE_LEAST, EXPERT_PAGE_MOST);
    PageSize::new(Bytes::new(page)).ok()
}

/// A builder for a runtime that maps this file: the device [`Faulting`], the policy
/// [`Model`](outcore::PolicyKind::Model), and for a model with experts the page size that fits them.
///
/// # Errors
/// As for [`Faulting::new`].
pub fn builder_for(path: impl AsRef<Path>) -> Result<RuntimeBuilder> {
    Ok(builder_on(Faulting::new()?, path))
}

/// As [`builder_for`], with a device whose [mechanism](crate::Mechanism) was chosen.
pub fn builder_on(device: Faulting, path: impl AsRef<Path>) -> RuntimeBuilder {
    let builder = Runtime::builder().device(device);
    let Some(page_size) = page_size_for(path.as_ref()) else { return builder };
    // As many bytes on their way as larger pages would have.
    let depth = QueueDepth::new((IN_FLIGHT / page_size.bytes()).clamp(16, 64) as u32);
    let builder = builder.page_size(page_size);
    depth.into_iter().fold(builder, |builder, depth| builder.store(StoreOptions::new(IoBackend::Auto).depth(depth)))
}

/// The runtime of [`Mapped::map`]. Its pages fit the first file.
fn own_runtime(first: &Path) -> Result<&'static Runtime> {
    static OWN: Mutex<Option<&'static Runtime>> = Mutex::new(None);
    let mut own = OWN.lock();
    if let Some(runtime) = *own {
        return Ok(runtime);
    }
    let budget = DeviceBudget::Free { percent: 50, headroom: Bytes::mib(256) };
    let builder = builder_for(first)?.device_budget(budget);
    // It lives as long as the process: a mapping may be a static.
    Ok(own.insert(Box::leak(Box::new(builder.open()?))))
}

/// The name of an open file, by which pages of it can be read, and options that map this file only.
///
/// # Errors
/// `NotFound` if it has none any more.
fn named(file: &File) -> Result<(PathBuf, MapOptions)> {
    let io = |what: &str, cause| Error::io(what.to_owned(), cause).remedy("map a regular file that is open");
    let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .map_err(|cause| io("ask for the name of an open file", cause))?;
    let here = file.metadata().map_err(|cause| io("look at an open file", cause))?;
    let named = fs::metadata(&path).is_ok_and(|there| (there.dev(), there.ino()) == (here.dev(), here.ino()));
    if !named {
        return Err(replaced(&path));
    }
    Ok((path, MapOptions::new().only(here)))
}

fn replaced(path: &Path) -> Error {
    let message = format!("{} is not the file that was opened: that was removed, replaced or changed", path.display());
    Error::new(ErrorKind::NotFound, message).remedy("open the file anew, and map that")
}

/// A file as a plain slice of bytes, read-only, whose pages come from the frames of a runtime.
///
/// A touch of a page that is not there waits until the runtime has read it. Pages go as those of tensors do, by the
/// runtime's policy and budget. Dropping it gives its pages back.
///
/// No handler of a signal may touch it: what the handler interrupts may hold a lock for which the page waits, such as
/// that of the allocator.
///
/// Every page that can be read has the bytes that the file had when it was opened, or as much of it as the runtime can
/// tell: a file that changes while it is mapped is an error. Where a page cannot be read, because the disk fails or the
/// file has changed, the thread that touches it gets SIGBUS, as with `mmap`; [`failure`](Self::failure) says why.
///
/// System calls that are given an address in the slice (`write(2)`) end with `EFAULT` for pages that are not there,
/// unless the process may handle the kernel's faults too (root, or `vm.unprivileged_userfaultfd`):
/// [`system_calls_wait`](Self::system_calls_wait). Pages that are pinned are there. A child by `fork` does not have the
/// range.
///
/// At least four frames are needed. Two of them are left to touches: guards of the runtime's tensors can have the
/// others, and no more than these. Do not close descriptors that others have opened: pages come by some.
pub struct Mapped {
    pages: Arc<Pages>,
    core: Arc<Core>,
    start: u64,
    len: usize,
}

impl Mapped {
    /// Maps a whole open file on a runtime of this process's own, in place of `memmap2::Mmap::map`.
    ///
    /// The runtime is opened by the first call, and stays. It may use half of the memory that is available then, for
    /// all files that are mapped so. Programs that want another budget open a runtime, and call [`open`](Self::open).
    ///
    /// # Errors
    /// As for [`open`](Self::open), and [`NotFound`](ErrorKind::NotFound) if the file has no name any more, because it
    /// was removed or replaced: pages are read again later, by its name.
    pub fn map(file: &File) -> Result<Self> {
        let (path, options) = named(file)?;
        options.open(own_runtime(&path)?, path)
    }

    /// Maps a whole file, of any format. Reads nothing yet.
    ///
    /// # Errors
    /// - [`InvalidArgument`](ErrorKind::InvalidArgument) if the runtime's device is not [`Faulting`](crate::Faulting),
    ///   or the path is no regular file;
    /// - [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if the runtime has less than four frames;
    /// - [`NotFound`](ErrorKind::NotFound), [`PermissionDenied`](ErrorKind::PermissionDenied),
    ///   [`OutOfMemory`](ErrorKind::OutOfMemory) as for [`Runtime::open_model`].
    pub fn open(runtime: &Runtime, path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(runtime, path.as_ref(), &MapOptions::new(), false)
    }

    pub(crate) fn open_with(runtime: &Runtime, path: &Path, options: &MapOptions, private: bool) -> Result<Self> {
        let frames = runtime.stats().device_frames;
        let frames = frames.used + frames.free;
        if frames < LEAST_FRAMES {
            let message = format!("a mapped file needs {LEAST_FRAMES} frames, and the device budget holds {frames}");
            return Err(
                Error::new(ErrorKind::BudgetTooSmall, message).remedy("raise the budget, or choose smaller pages")
            );
        }
        let header = format::open_bytes(path)?;
        // The name may lead elsewhere since it was asked for. From here on this state of the file is compared.
        if let Some(wanted) = &options.file
            && !header.files.iter().all(|file| outcore::rules::had_state(file, wanted))
        {
            return Err(replaced(path));
        }
        let model = if private { runtime.open_private(header)? } else { runtime.open_parsed(header)? };
        let bytes = model.tensor(BYTES)?;
        let start = bytes.address();
        let Some(core) = device::find(start) else {
            let message = format!("files are mapped on the device {NAME}, and this runtime has another");
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .remedy("open the runtime with `Runtime::builder().device(outcore_mapped::Faulting::new()?)`"));
        };
        let len = usize::try_from(bytes.size().get())
            .map_err(|_| Error::new(ErrorKind::OutOfMemory, "the file is larger than this process's addresses"))?;
        if private {
            core.make_private(start)?;
        }
        let page = core.page();
        let drawn = runtime.walker()?;
        let model = model_of(path);
        let tensors: Vec<&TensorHeader> = match &model {
            Some((header, file)) => header.tensors.iter().filter(|tensor| tensor.file == *file).collect(),
            None => Vec::new(),
        };
        // A model whose output is its embedding uses that as a matrix, after the last layer.
        let has_output = model.iter().any(|(header, _)| {
            header.tensors.iter().any(|tensor| outcore::rules::role(&tensor.name) == outcore::rules::Role::Output)
        });
        let experts = Experts::of(tensors.iter().copied());
        let layers = Layers::of(&tensors, &experts);
        let order = order::of(&tensors, has_output).into_iter().filter(|range| range.end <= bytes.size().get());
        let order: Vec<Tensor> = order.map(|range| bytes.rows(range)).collect::<Result<_>>()?;
        drawn.unordered();
        let place = options.place(path, page, bytes.size().get().div_ceil(page) as u32);
        let uses = Uses::new(runtime, &bytes, &order, place)?;
        let pages = Arc::new_cyclic(|own| Pages {
            runtime: runtime.clone(),
            core: core.clone(),
            start,
            uses,
            drawn,
            firsts: experts.firsts(page).collect(),
            experts,
            untold: AtomicU64::new(UNTOLD_MAX + 1),
            expected: Mutex::default(),
            foresight: Mutex::default(),
            foresees: AtomicBool::new(true),
            name: path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
            layers,
            hints: AtomicU64::new(0),
            told: AtomicU64::new(0),
            touched: AtomicU64::new(0),
            faults: AtomicU64::new(0),
            bytes,
            page,
            frames: AtomicUsize::new(frames as usize),
            failure: Mutex::new(None),
            tell: OnceLock::new(),
            private,
            written: Arc::new(Written::new(page, if private { len as u64 } else { 0 })),
            own: own.clone(),
        });
        let handler: Weak<dyn Handler> = Arc::downgrade(&(pages.clone() as Arc<dyn Handler>));
        core.in_turn(|| {
            runtime.keep_frames(FLOOR)?;
            core.handle(start, len as u64, handler);
            Ok::<(), Error>(())
        })?;
        Ok(Self { pages, core, start, len })
    }

    /// Whether the file has experts of a mixture.
    pub fn has_experts(&self) -> bool {
        !self.pages.experts.is_empty()
    }

    /// Whether the file has this expert of a mixture, by the layer's and the expert's number in the model.
    pub fn has_expert(&self, layer: u32, expert: u32) -> bool {
        self.pages.experts.has(ExpertId { layer, expert })
    }

    /// These experts of a layer are used next, in this order: for programs that know what the router has chosen.
    ///
    /// All that is missing of them is read at once. The call returns when it is there, so that the products that follow
    /// meet no fault. Together they may have a quarter of the frames: what is more comes when it is touched.
    ///
    /// # Errors
    /// - [`InvalidArgument`](ErrorKind::InvalidArgument) if the file has no such expert: see
    ///   [`has_expert`](Self::has_expert);
    /// - [`WouldDeadlock`](ErrorKind::WouldDeadlock) if guards have held the frames for so long that they may be the
    ///   caller's own;
    /// - those of [`PinRequest::wait`](outcore::pin::PinRequest::wait).
    ///
    /// Nothing is lost then: what is missing is read when it is touched.
    pub fn expert_hint(&self, layer: u32, experts: &[u32]) -> Result<()> {
        self.hint(LayerExperts { layer, experts }, None)
    }

    /// As [`expert_hint`](Self::expert_hint) of `now`, and as [`expect_experts`](Self::expect_experts) of `next`: the
    /// disk goes on with these as soon as it has no more of `now` to read.
    ///
    /// # Errors
    /// As for both. If `next` has an expert that the file has not, nothing is read.
    pub fn expert_hint_before(&self, now: LayerExperts<'_>, next: &[LayerExperts<'_>]) -> Result<()> {
        self.pages.check_layers(next)?;
        self.hint(now, Some(next))
    }

    fn hint(&self, now: LayerExperts<'_>, next: Option<&[LayerExperts<'_>]>) -> Result<()> {
        let (known, LayerExperts { layer, experts }) = (&self.pages, now);
        known.check_experts(layer, experts)?;
        outcore::rules::may_wait("experts")?;
        // Tokens of a batch may name the same ones.
        let mut seen = HashSet::new();
        let experts: Vec<u32> = experts.iter().copied().filter(|expert| seen.insert(*expert)).collect();
        let (now, experts) = (LayerExperts { layer, experts: &experts }, &experts);
        known.count_frames();
        let pages = known.pages_of_experts(layer, experts, known.may_keep());
        known.untold.store(0, Ordering::Relaxed);
        known.hints.fetch_add(1, Ordering::Relaxed);
        known.told.fetch_add(experts.len() as u64, Ordering::Relaxed);
        let (tensors, offsets) = (known.runs(&pages), known.offsets(&pages));
        self.core.want_all(self.start, &offsets);
        let mut request = pin!(known.drawn.pin_set(&tensors));
        // What is needed goes to the disk before what is expected.
        let begun = match tensors.is_empty() {
            true => None,
            false => Some(request.as_mut().poll(&mut Context::from_waker(Waker::noop()))),
        };
        known.look_ahead(now, next, &offsets);
        let Some(begun) = begun else { return Ok(()) };
        let missing = || offsets.iter().filter(|page| !self.core.has_frame(self.start + **page)).count();
        let come = match begun {
            Poll::Ready(result) => Some(result),
            Poll::Pending => wait_for(request, missing),
        };
        let shown = come
            .unwrap_or_else(|| {
                let frames = known.frames.load(Ordering::Relaxed);
                let message = format!(
                    "these experts of layer {layer} need {} pages, {} of which have waited for frames for {} s: others \
                     have them pinned, of {frames} frames in all",
                    offsets.len(),
                    missing(),
                    WAIT_MAX.as_secs()
                );
                Err(Error::new(ErrorKind::WouldDeadlock, message)
                    .remedy("let guards go before you tell of experts, or raise the device budget"))
            })
            .and_then(|pins| self.core.show_all(self.start, &offsets).map(|()| pins));
        match shown {
            Ok(pins) => {
                let handler: Weak<dyn Handler> = known.own.clone();
                let held = Held { range: self.start, pages: offsets, handler, told: true, _pins: Pins::Read(pins) };
                self.core.bell().keeper().keep(&self.core, held, known.may_keep());
                // So that the thread sees that something is kept, and lets it go in time.
                self.core.bell().ring();
                Ok(())
            }
            Err(error) => {
                self.core.want_no_more(self.start, offsets.iter());
                Err(error)
            }
        }
    }

    /// These experts of the layers to come are likely to be used, in this order of layers: for programs that predict
    /// what the router will choose. They take the place of all that was expected before.
    ///
    /// What is missing of them is read while nothing else waits for the disk, and stays until it was used or something
    /// else is expected, as long as other pages can go. Returns at once. Together they may have a quarter of the
    /// frames: what is more is left out.
    ///
    /// Of each layer the most likely comes first. What is predicted is compared with what is [told](Self::expert_hint)
    /// later, by its place and by how many layers ahead it was. Where less than three quarters of what was missing were
    /// right lately, nothing is read.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the file has no such expert: see
    /// [`has_expert`](Self::has_expert).
    pub fn expect_experts(&self, layers: &[LayerExperts<'_>]) -> Result<()> {
        let known = &self.pages;
        known.check_layers(layers)?;
        known.foresees.store(false, Ordering::Relaxed);
        known.count_frames();
        let worth = known.worth_a_read(&mut known.foresight.lock(), layers);
        known.expect(&worth, &[]);
        Ok(())
    }

    /// Whether experts are expected by what followed before, as they are unless the program has
    /// [predicted](Self::expect_experts) some itself.
    pub fn foresee(&self, on: bool) {
        self.pages.foresees.store(on, Ordering::Relaxed);
        if !on {
            self.pages.expect(&[], &[]);
        }
    }

    /// Lets the frames go that are kept behind their use, of all files on this runtime, but for the last two uses.
    /// Before the runtime's budget is lowered: kept frames stay until others are.
    pub fn let_go(&self) {
        self.core.bell().keeper().let_go();
    }

    /// Pages of this file that stay pinned after [`let_go`](Self::let_go), at most.
    pub fn most_pinned(&self) -> u64 {
        let Pages { experts, page, .. } = &*self.pages;
        let of_experts = experts.ids().map(|id| experts.pages(id, *page).len());
        2 * of_experts.max().unwrap_or(1) as u64
    }

    /// Keeps the order in which the program uses the file for the next start, if it was learned, in the user's cache
    /// folder. Dropping the mapping does so too, and so does the runtime once the order has held for one more pass:
    /// this is for programs that end without either. See [`MapOptions::keep_order`].
    pub fn keep_order(&self) {
        self.pages.uses.keep(&self.pages.runtime);
    }

    /// How the use of experts was known so far. All zero for a file without experts.
    pub fn experts(&self) -> live::Experts {
        let Pages { hints, told, touched, .. } = &*self.pages;
        let [hints, told, touched] = [hints, told, touched].map(|count| count.load(Ordering::Relaxed));
        live::Experts { hints, told, touched }
    }

    /// What of the file is in memory now, by layer. It holds up the runtime no longer than
    /// [`Runtime::snapshot`] does.
    pub fn look(&self) -> live::File {
        let Pages { runtime, bytes, page, layers, experts, .. } = &*self.pages;
        let pages = runtime.snapshot(bytes).pages;
        let there = pages.iter().map(|page| match (page.tier(), page.device.fresh) {
            (Tier::Device, true) => There::Ahead,
            (Tier::Device, false) => There::Used,
            _ => There::No,
        });
        let there: Vec<There> = there.collect();
        let len = bytes.size().get();
        let each: Vec<live::Held> = (0..len.div_ceil(*page))
            .map(|index| layers::held(&(index * page..((index + 1) * page).min(len)), &there, *page))
            .collect();
        live::File {
            name: self.pages.name.clone(),
            held: layers::held(&(0..len), &there, *page),
            cells: layers::cells(&each),
            parts: layers.look(experts, &there, *page),
        }
    }

    /// Whether system calls that are given an address in the slice wait for pages. Otherwise they end with `EFAULT` for
    /// those that are not there.
    pub fn system_calls_wait(&self) -> bool {
        self.core.uffd().handles_the_kernel()
    }

    /// The file as a tensor of bytes. Pins of it are pins of the same memory: a page that is pinned is there.
    pub fn tensor(&self) -> &Tensor {
        &self.pages.bytes
    }

    /// Has `tell` called with the reason before a thread gets SIGBUS, since the signal may end the process. Only the
    /// first call of this counts. `tell` runs on a thread of its own, for which the signal waits for a tenth of a
    /// second at most.
    pub fn on_failure(&self, tell: fn(&Error)) {
        let _ = self.pages.tell.set(tell);
    }

    /// Why a page could not be read, if one could not: the first failure.
    pub fn failure(&self) -> Option<Error> {
        self.pages.failure.lock().clone()
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapped").field("tensor", &self.pages.bytes).finish_non_exhaustive()
    }
}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range belongs to the segment of `pages.bytes`, which lives as long as `self`, and has `len` bytes
        // of the file. It is registered with userfaultfd: a page that is not there is filled before the access goes on,
        // or the thread gets a signal. Nobody writes a file's segment but through `MappedMut`, as there: a page that is
        // taken away comes back with the same bytes, since the store compares the file's identity at each read.
        unsafe { std::slice::from_raw_parts(ptr::with_exposed_provenance(self.start as usize), self.len) }
    }
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // A child by fork has neither the range nor the thread, and locks may be held for ever.
        if !self.core.bell().is_at_home() {
            return;
        }
        self.keep_order();
        let Self { core, pages, start, .. } = self;
        core.in_turn(|| {
            core.leave(*start);
            if !core.has_handlers() {
                // A runtime that is closed keeps nothing for anybody.
                let _ = pages.runtime.keep_frames(0);
            }
        });
        faults::forget(&self.core, self.start);
    }
}

/// Which pages of a [`MappedMut`] file were written. It takes no lock and no memory to look at it, so a child by `fork`
/// can.
#[derive(Debug)]
pub struct Written {
    page: u64,
    len: u64,
    bits: Box<[AtomicU64]>,
}

impl Written {
    fn new(page: u64, len: u64) -> Self {
        Self { page, len, bits: (0..len.div_ceil(page).div_ceil(64)).map(|_| AtomicU64::new(0)).collect() }
    }

    /// The page that begins here is about to be written.
    fn add(&self, offset: u64) {
        let page = offset / self.page;
        if let Some(bits) = self.bits.get((page / 64) as usize) {
            bits.fetch_or(1 << (page % 64), Ordering::Release);
        }
    }

    fn has(&self, page: u64) -> bool {
        self.bits.get((page / 64) as usize).is_some_and(|bits| bits.load(Ordering::Acquire) >> (page % 64) & 1 == 1)
    }

    /// The pages, as ranges of bytes of the file, ascending.
    pub fn parts(&self) -> impl Iterator<Item = Range<u64>> {
        let written = (0..self.len.div_ceil(self.page)).filter(|page| self.has(*page));
        written.map(|page| page * self.page..((page + 1) * self.page).min(self.len))
    }
}

/// A file as a plain slice of bytes that can be written, in place of `memmap2::MmapMut::map_copy`: what is written is
/// seen here alone, and the file is never changed.
///
/// Pages come and go as those of a [`Mapped`] file do. A page that was written goes to the runtime's scratch file, and
/// comes from there. The scratch file takes room for a page when the page leaves memory for the first time. If the disk
/// has none, the page stays in memory, and the write is tried again; after eight tries, or three while somebody waits
/// for its frame, its bytes are lost: the thread that touches it next gets SIGBUS, and
/// [`Runtime::health`](outcore::Runtime::health) says why.
///
/// It has a range and pages of its own. A page that is also mapped elsewhere is in memory twice.
///
/// Dropping it loses what was written. A child by `fork` does not have the range. What is read into it with `O_DIRECT`
/// may be lost: such writes are no faults.
pub struct MappedMut(pub(crate) Mapped);

impl MappedMut {
    /// Maps a whole open file on a runtime of this process's own, which [`Mapped::map`] uses too.
    ///
    /// # Errors
    /// As for [`open`](Self::open) and [`Mapped::map`].
    pub fn map(file: &File) -> Result<Self> {
        let (path, options) = named(file)?;
        options.open_private(own_runtime(&path)?, path)
    }

    /// Maps a whole file, of any format. Reads nothing yet.
    ///
    /// # Errors
    /// - As for [`Mapped::open`];
    /// - [`Unsupported`](ErrorKind::Unsupported) where the kernel does not tell of writes
    ///   ([`Faulting::maps_private`](crate::Faulting::maps_private));
    /// - those of the scratch file, as for [`Runtime::open_private`].
    pub fn open(runtime: &Runtime, path: impl AsRef<Path>) -> Result<Self> {
        MapOptions::new().open_private(runtime, path)
    }

    /// Which pages were written. It outlives the mapping.
    pub fn written(&self) -> Arc<Written> {
        self.0.pages.written.clone()
    }

    /// As [`Mapped::let_go`].
    pub fn let_go(&self) {
        self.0.let_go();
    }

    /// As [`Mapped::most_pinned`].
    pub fn most_pinned(&self) -> u64 {
        self.0.most_pinned()
    }

    /// As [`Mapped::keep_order`].
    pub fn keep_order(&self) {
        self.0.keep_order();
    }

    /// As [`Mapped::look`].
    pub fn look(&self) -> live::File {
        self.0.look()
    }

    /// As [`Mapped::system_calls_wait`].
    pub fn system_calls_wait(&self) -> bool {
        self.0.system_calls_wait()
    }

    /// As [`Mapped::on_failure`].
    pub fn on_failure(&self, tell: fn(&Error)) {
        self.0.on_failure(tell);
    }

    /// As [`Mapped::failure`].
    pub fn failure(&self) -> Option<Error> {
        self.0.failure()
    }
}

impl fmt::Debug for MappedMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedMut").field("tensor", &self.0.pages.bytes).finish_non_exhaustive()
    }
}

impl Deref for MappedMut {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for MappedMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `Mapped::deref`, and `&mut self` makes this the only slice of the range. Nobody else writes it:
        // there are no pins of its tensor but those of the thread of faults. A page is dirty before it can be written,
        // so it comes back as it was left.
        unsafe { std::slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut(self.0.start as usize), self.0.len) }
    }
}

impl AsRef<[u8]> for MappedMut {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for MappedMut {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}
