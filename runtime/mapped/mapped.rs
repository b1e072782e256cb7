//! A file as a slice.

use std::collections::HashSet;
use std::fmt;
use std::fs::{self, File, Metadata};
use std::future::Future;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use outcore::dlpack::DlpackView;
use outcore::format;
use outcore::store::{QueueDepth, StoreOptions};
use outcore::{
    Bytes, DType, DeviceBudget, Error, ErrorKind, IoBackend, PageSize, Result, Runtime, RuntimeBuilder, Tensor, Tier,
};
use parking_lot::Mutex;

use crate::device::{self, Core, Faulting, NAME};
use crate::experts::{ExpertId, Experts, LayerExperts};
use crate::faults::{self, FLOOR};
use crate::handler::{Handler, Pins, Request};
use crate::joined;
use crate::keeper::Held;
use crate::layers::{self, Layers, There};
use crate::live;
use crate::model::{Model, UNTOLD_MAX};
use crate::options::MapOptions;
use crate::outline::Outline;
use crate::remembered::Identity;
use crate::telling::Tell;

/// The name of the only tensor of a file that is opened as bytes.
const BYTES: &str = format::BYTES;

/// Frames that a runtime has at least where a file is mapped. Two of them are left to touches.
pub const LEAST_FRAMES: u64 = 4;

/// Smaller pages cost more to bring than their bytes; larger ones are huge pages already.
const EXPERT_PAGE_LEAST: u64 = 64 << 10;
const EXPERT_PAGE_MOST: u64 = 2 << 20;

/// After so long without a frame, whoever tells of experts waits no longer: guards of its own may be in the way.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Bytes of experts that the disk is asked for at a time.
const IN_FLIGHT: u64 = 8 << 20;

/// Touches that are remembered where uses are announced.
const TOUCHES_MOST: usize = 256;

/// Faults between looks at whether the walker follows an order.
const LOOK: u64 = 32;

#[derive(Debug)]
struct Pages {
    runtime: Runtime,
    core: Arc<Core>,
    start: u64,
    /// What it shares with the other files of its model.
    model: Arc<Model>,
    /// Its number there, and the number of its first page in the row.
    file: usize,
    first: u32,
    /// The experts in this file.
    experts: Experts,
    /// The file's name, without its folder.
    name: String,
    layers: Layers,
    /// What [`Mapped::experts`] says.
    hints: AtomicU64,
    told: AtomicU64,
    touched: AtomicU64,
    /// The whole file.
    bytes: Tensor,
    page: u64,
    /// What [`Mapped::touches`] says.
    touches: Mutex<live::Touches>,
    failure: Mutex<Option<Error>>,
    tell: OnceLock<fn(&Error)>,
    private: bool,
    written: Arc<Written>,
    own: Weak<Self>,
}

impl Pages {
    /// The number in the row of the page that begins here.
    fn number(&self, offset: u64) -> u32 {
        self.first + (offset / self.page) as u32
    }

    /// Where pages of this file begin, by their numbers.
    fn offsets(&self, pages: &[u32]) -> Vec<u64> {
        pages.iter().map(|page| u64::from(page - self.first) * self.page).collect()
    }

    /// The pin of pages of this file in ascending order, by one of the walkers. A page that was `touched` may have a
    /// frame that guards of the program leave.
    fn request(&self, pages: &[u32], of_expert: bool, touched: bool) -> Option<Request> {
        let (tensors, offsets) = (self.model.members.runs(pages), self.offsets(pages));
        // Owned by the request, which outlives this call.
        let this = self.own.upgrade().filter(|_| !tensors.is_empty())?;
        let pins = Box::pin(async move {
            let part = this.model.part();
            let walker = if of_expert { &this.model.drawn } else { part.uses.walker() };
            let request = this.runtime.pin(&tensors).of(walker);
            let pins = if touched { request.never_refused().await } else { request.await };
            pins.map(Pins::Read)
        });
        Some(Request { pages: offsets, writes: false, pins })
    }

    /// There is a fault on this page, of an expert or not, because this byte was touched.
    fn count_fault(&self, page: u32, of_expert: bool, offset: u64) {
        if self.model.options.is_announced() {
            return self.touches.lock().add(offset);
        }
        let faults = self.model.faults.fetch_add(1, Ordering::Relaxed);
        if faults % LOOK == LOOK - 1 {
            self.model.count_frames(&self.runtime);
        }
        if !of_expert {
            self.tell_of_the_unseen(page, (faults + 1).is_multiple_of(LOOK));
        }
    }

    /// There is a fault on this page. Tells the policy of the pages that were used since the fault before, and looks
    /// now and then which order is followed.
    fn tell_of_the_unseen(&self, page: u32, look: bool) {
        let part = self.model.part();
        let (uses, members, page) = (&*part.uses, part.uses.members(), page + part.page);
        let is_published = |page| members.address(page).is_some_and(|address| self.core.is_published(address));
        let was_there = is_published(page);
        let unseen = uses.fault(page, was_there, is_published);
        for passed in &unseen {
            if let Some(page) = members.run(*passed..passed + 1) {
                // A page that is there is pinned at the first look. If it is on its way out, the use is not worth a
                // wait.
                let mut request = pin!(self.runtime.pin(&page).of(uses.walker()));
                drop(request.as_mut().poll(&mut Context::from_waker(Waker::noop())));
            }
        }
        if !was_there {
            uses.look_at_some(|page| {
                let pins = || members.run(page..page + 1).map_or(0, |page| page.pins());
                members.address(page).is_some_and(|address| self.core.hide(address, || pins() > 0))
            });
        }
        if look {
            uses.look(&self.runtime, self.model.frames.load(Ordering::Relaxed));
        }
        let in_turn = self.core.turns.lock().used(part.id(), 1 + unseen.len() as u64, uses.pass());
        if let Some(orders) = in_turn {
            joined::use_in_turn(&self.runtime, &self.core, orders);
        }
    }

    /// Notes that an expert is used which nobody has told of; what follows it is expected.
    fn foresee(&self, expert: ExpertId) {
        let (model, core) = (&*self.model, &*self.core);
        let untold = model.untold.fetch_add(1, Ordering::Relaxed) > UNTOLD_MAX;
        if !untold || !model.foresees.load(Ordering::Relaxed) {
            return;
        }
        let mut foresight = model.foresight.lock();
        let next = if foresight.touched(expert) { foresight.after_touched() } else { None };
        let worth = next.map(|(layer, experts)| {
            model.worth_a_read(core, &mut foresight, &[LayerExperts { layer, experts: &experts }])
        });
        drop(foresight);
        if let Some(worth) = worth {
            model.expect(core, &worth, &[]);
        }
    }
}

impl live::Touches {
    fn add(&mut self, offset: u64) {
        self.count += 1;
        if self.last.len() == TOUCHES_MOST {
            self.last.pop_front();
        }
        self.last.push_back(offset);
    }
}

impl Handler for Pages {
    fn requests(&self, offset: u64) -> Vec<Request> {
        let page = self.number(offset);
        let expert = self.experts.at(offset);
        self.count_fault(page, expert.is_some(), offset);
        let mut requests = Vec::from_iter(self.request(&[page], expert.is_some(), true));
        // A pin of several pages would wait for those that are written.
        if let Some(expert) = expert.filter(|_| !self.private) {
            self.touched.fetch_add(1, Ordering::Relaxed);
            // Of a scan, what follows is the next page: the expert's other matrices are used much later.
            if self.model.expert_scan.lock().used(page, expert) {
                return requests;
            }
            self.foresee(expert);
            let all: Vec<u32> = self.experts.pages(expert, self.page).iter().map(|page| self.first + page).collect();
            if all.len() > 1 && all.len() <= self.model.frames.load(Ordering::Relaxed) / 8 {
                requests.extend(self.request(&all, true, false));
            }
        }
        requests
    }

    fn request_to_write(&self, offset: u64) -> Option<Request> {
        let page = self.number(offset);
        let of_expert = self.experts.at(offset).is_some();
        self.count_fault(page, of_expert, offset);
        let (tensor, this) = (self.model.members.run(page..page + 1)?, self.own.upgrade()?);
        let pins = Box::pin(async move {
            let part = this.model.part();
            let walker = if of_expert { &this.model.drawn } else { part.uses.walker() };
            this.runtime.pin(std::slice::from_ref(&tensor)).write().of(walker).never_refused().await.map(Pins::Write)
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
        let number = self.number(page);
        if self.model.options.is_announced() {
            return false;
        }
        if self.experts.at(page).is_some() {
            return !self.model.is_told() && self.model.firsts.contains(&number);
        }
        let part = self.model.part();
        part.uses.let_go(number + part.page)
    }

    fn shown(&self, page: u64, took: Duration) {
        if self.experts.at(page).is_none() {
            self.model.part().uses.shown(took);
        }
    }

    fn pins(&self, page: u64) -> u32 {
        let number = self.number(page);
        self.model.members.run(number..number + 1).map_or(0, |page| page.pins())
    }

    fn may_keep(&self) -> usize {
        self.model.may_keep()
    }

    fn turns(&self) -> usize {
        // Each has two pages: a quarter of the frames, and half where there are four.
        (self.model.frames.load(Ordering::Relaxed) / 8).max(1)
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

/// The page size for this model: `None` if it has no experts, so that the runtime's own choice fits.
///
/// A file keeps experts beside each other, and the pages at both ends of a matrix bring parts of its neighbours. With
/// an eighth of a matrix to a page these are a tenth of what is read.
fn page_size_for(path: &Path) -> Option<PageSize> {
    let file = fs::metadata(path).ok()?;
    let (outline, _) = Outline::of(path, Identity::of(&file), PageSize::DEFAULT.bytes());
    let piece = outline.experts.largest_piece()?;
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
    Ok((name_in_hub(&path, &here).unwrap_or(path), MapOptions::new().only(here)))
}

/// The link by which a file of the cache of Hugging Face's hub is known. There a file is named by its hash, in `blobs`,
/// and links lead to it from `snapshots/REVISION/`: only their names say which files are parts of one model.
fn name_in_hub(path: &Path, file: &Metadata) -> Option<PathBuf> {
    /// Revisions and files that are looked at.
    const REVISIONS_MAX: usize = 16;
    const FILES_MAX: usize = 4096;
    let blobs = path.parent().filter(|folder| folder.file_name().is_some_and(|name| name == "blobs"))?;
    let entries = |folder: PathBuf| fs::read_dir(folder).into_iter().flatten().flatten();
    let revisions = entries(blobs.parent()?.join("snapshots")).take(REVISIONS_MAX);
    let links = revisions.flat_map(|revision| entries(revision.path()).take(FILES_MAX));
    let leads_here = |link: &PathBuf| {
        fs::read_link(link).is_ok_and(|target| target.file_name() == path.file_name())
            && fs::metadata(link).is_ok_and(|found| (found.dev(), found.ino()) == (file.dev(), file.ino()))
    };
    links.map(|link| link.path()).find(leads_here)
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
    /// The runtime is opened by the first call, and stays. Its pages may take half of the memory that the process may
    /// still use then (of its control group, or of the machine), but leave 256 MiB of that free: one budget for all
    /// files that are mapped so, by [`MappedMut::map`] too. Pages take memory as they are touched. Programs that want
    /// another budget open a runtime, and call [`open`](Self::open).
    ///
    /// An error converts to an [`std::io::Error`] and back, so a program that handles those of `memmap2` needs no
    /// change:
    ///
    /// ```no_run
    /// fn weights(path: &str) -> std::io::Result<outcore_mapped::Mapped> {
    ///     Ok(outcore_mapped::Mapped::map(&std::fs::File::open(path)?)?)
    /// }
    /// # weights("model.gguf").map(drop).map_err(outcore::Error::from)?;
    /// # Ok::<(), outcore::Error>(())
    /// ```
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

    fn open_with(runtime: &Runtime, path: &Path, options: &MapOptions, private: bool) -> Result<Self> {
        let frames = runtime.stats().device_frames;
        let frames = frames.used + frames.free;
        if frames < LEAST_FRAMES {
            let message = format!("a mapped file needs {LEAST_FRAMES} frames, and the device budget holds {frames}");
            return Err(
                Error::new(ErrorKind::BudgetTooSmall, message).remedy("raise the budget, or choose smaller pages")
            );
        }
        // Pages are read by the name of the file itself: a link may lead elsewhere later.
        let is_link = !path.starts_with("/proc") && fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink());
        let own_path = if is_link { fs::canonicalize(path).ok() } else { None };
        let header = format::open_bytes(own_path.as_deref().unwrap_or(path))?;
        // The name may lead elsewhere since it was asked for. From here on this state of the file is compared.
        if let Some(wanted) = &options.file
            && !header.files.iter().all(|file| file.had_state(wanted))
        {
            return Err(replaced(path));
        }
        let found = fs::metadata(path).ok().filter(|found| {
            let same = |file: &format::ModelFile| file.had_state(found);
            header.files.iter().all(same)
        });
        let Some(found) = found.map(|found| Identity::of(&found)) else { return Err(replaced(path)) };
        let opened = if private { runtime.open_private(header)? } else { runtime.open_parsed(header)? };
        let bytes = opened.tensor(BYTES)?;
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
        let (model, file) = joined::join(runtime, &core, (path, found), &bytes, private, options)?;
        model.frames.store(frames as usize, Ordering::Relaxed);
        let tensors = model.outline.tensors(file);
        let announced = options.is_announced();
        let experts = if announced { Experts::default() } else { Experts::of(tensors.iter().copied()) };
        let layers = Layers::of(&tensors, &experts);
        drop(tensors);
        let pages = Arc::new_cyclic(|own| Pages {
            runtime: runtime.clone(),
            core: core.clone(),
            start,
            file,
            first: model.outline.row.first(file),
            model,
            experts,
            name: path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
            layers,
            hints: AtomicU64::new(0),
            told: AtomicU64::new(0),
            touched: AtomicU64::new(0),
            bytes,
            page,
            touches: Mutex::default(),
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

    /// Whether the file, or another one of its model, has experts of a mixture.
    pub fn has_experts(&self) -> bool {
        !self.pages.model.outline.experts.is_empty()
    }

    /// Whether the file's model has this expert of a mixture, by the layer's and the expert's number in the model.
    pub fn has_expert(&self, layer: u32, expert: u32) -> bool {
        self.pages.model.outline.experts.has(ExpertId { layer, expert })
    }

    /// Whether both are files of one model, which share an order of use and what is known of experts: parts that are
    /// named by one index, or by one name with their number and count (`model-00001-of-00004.gguf`), mapped in the same
    /// way on one runtime.
    pub fn is_of_model_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.pages.model, &other.pages.model)
    }

    /// What the file shares with the others of its model.
    pub fn whole(&self) -> live::Whole {
        let (model, part) = (&self.pages.model, self.pages.model.part());
        live::Whole {
            id: part.id(),
            ordered: part.uses.members().row().files() as u64,
            files: model.outline.files.len() as u64,
            mapped: model.members.count() as u64,
            order: part.uses.order(),
            first: model.outline.files.first().map_or((0, 0), Identity::file),
            uses: part.uses.count(),
            alone: model.outline.alone.clone(),
        }
    }

    /// These experts of a layer are used next, in this order: for programs that know what the router has chosen.
    ///
    /// All that is missing of them is read at once, in all files of the model that are mapped. The call returns when it
    /// is there, so that the products that follow meet no fault. Together they may have a quarter of the frames: what
    /// is more comes when it is touched.
    ///
    /// # Errors
    /// - [`InvalidArgument`](ErrorKind::InvalidArgument) if the model has no such expert: see
    ///   [`has_expert`](Self::has_expert);
    /// - [`Busy`](ErrorKind::Busy) if guards have held the frames for a second, so that they may be the caller's own;
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
    /// As for both. If `next` has an expert that the model has not, nothing is read.
    pub fn expert_hint_before(&self, now: LayerExperts<'_>, next: &[LayerExperts<'_>]) -> Result<()> {
        self.pages.model.check_layers(next)?;
        self.hint(now, Some(next))
    }

    fn hint(&self, now: LayerExperts<'_>, next: Option<&[LayerExperts<'_>]>) -> Result<()> {
        let LayerExperts { layer, experts } = now;
        let (known, core) = (&*self.pages, &*self.core);
        let model = &*known.model;
        model.check_experts(layer, experts)?;
        outcore::pin::may_wait("experts")?;
        // Tokens of a batch may name the same ones.
        let mut seen = HashSet::new();
        let experts: Vec<u32> = experts.iter().copied().filter(|expert| seen.insert(*expert)).collect();
        let (now, experts) = (LayerExperts { layer, experts: &experts }, &experts);
        model.count_frames(&known.runtime);
        let pages = model.pages_of_experts(layer, experts, model.may_keep());
        model.untold.store(0, Ordering::Relaxed);
        known.hints.fetch_add(1, Ordering::Relaxed);
        known.told.fetch_add(experts.len() as u64, Ordering::Relaxed);
        let addresses = model.addresses(&pages);
        core.want_all(&addresses);
        // Most experts lie in one file. Pages of two files are held apart.
        let file = |page: &u32| model.members.row().place(*page).0;
        let parts: Vec<&[u32]> = pages.chunk_by(|a, b| file(a) == file(b)).collect();
        let tensors: Vec<Vec<Tensor>> = parts.iter().map(|pages| model.members.runs(pages)).collect();
        let mut requests: Vec<_> =
            tensors.iter().map(|tensors| Box::pin(known.runtime.pin(tensors).of(&model.drawn))).collect();
        // What is needed goes to the disk before what is expected.
        let mut context = Context::from_waker(Waker::noop());
        let begun: Vec<_> = requests.iter_mut().map(|request| request.as_mut().poll(&mut context)).collect();
        model.look_ahead(core, now, next, &addresses);
        let missing = || addresses.iter().filter(|page| !core.has_frame(**page)).count();
        let come = requests.into_iter().zip(begun).map(|(request, begun)| match begun {
            Poll::Ready(result) => result,
            Poll::Pending => wait_for(request, missing).unwrap_or_else(|| {
                let frames = model.frames.load(Ordering::Relaxed);
                let message = format!(
                    "these experts of layer {layer} need {} pages, {} of which have waited for frames for {} s: others \
                     have them pinned, of {frames} frames in all",
                    addresses.len(),
                    missing(),
                    WAIT_MAX.as_secs()
                );
                Err(Error::new(ErrorKind::Busy, message)
                    .remedy("let guards go before you tell of experts, or raise the device budget"))
            }),
        });
        let shown = come.collect::<Result<Vec<_>>>().and_then(|pins| core.show_all(&addresses).map(|()| pins));
        let pins = shown.inspect_err(|_| core.want_no_more(addresses.iter()))?;
        for (pages, pins) in parts.into_iter().zip(pins) {
            let addresses = model.addresses(pages);
            let Some((handler, range)) = addresses.first().and_then(|first| core.handler(*first)) else { continue };
            let pages = addresses.iter().map(|page| page - range).collect();
            let held = Held { range, pages, handler, told: true, _pins: Pins::Read(pins) };
            core.keep(held, model.may_keep());
        }
        if !addresses.is_empty() {
            // So that the thread sees that something is kept, and lets it go in time.
            core.bell().ring();
        }
        Ok(())
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
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the model has no such expert: see
    /// [`has_expert`](Self::has_expert).
    pub fn expect_experts(&self, layers: &[LayerExperts<'_>]) -> Result<()> {
        let (model, core) = (&*self.pages.model, &*self.core);
        model.check_layers(layers)?;
        model.foresees.store(false, Ordering::Relaxed);
        model.count_frames(&self.pages.runtime);
        let worth = model.worth_a_read(core, &mut model.foresight.lock(), layers);
        model.expect(core, &worth, &[]);
        Ok(())
    }

    /// Whether experts are expected by what followed before, as they are unless the program has
    /// [predicted](Self::expect_experts) some itself.
    pub fn foresee(&self, on: bool) {
        let model = &*self.pages.model;
        model.foresees.store(on, Ordering::Relaxed);
        if !on {
            model.expect(&self.core, &[], &[]);
        }
    }

    /// Lets the frames go that are kept behind their use, of all files on this runtime, but for the last two uses.
    /// Before the runtime's budget is lowered: kept frames stay until others are.
    pub fn let_go(&self) {
        self.core.bell().keeper().let_go();
    }

    /// Pages of this file's model that stay pinned after [`let_go`](Self::let_go), at most.
    pub fn most_pinned(&self) -> u64 {
        let (experts, page) = (&self.pages.model.outline.experts, self.pages.page);
        let of_experts = experts.ids().map(|id| experts.pages(id, page).len());
        2 * of_experts.max().unwrap_or(1) as u64
    }

    /// Keeps the order in which the program uses the file, and the others of its model, for the next start, if it was
    /// learned, in the user's cache folder. Dropping the mapping does so too, and so does the runtime once the order
    /// has held for one more pass: this is for programs that end without either. See [`MapOptions::keep_order`].
    pub fn keep_order(&self) {
        self.pages.model.part().uses.keep(&self.pages.runtime);
        self.pages.model.keep_what_is_true();
    }

    /// How the use of experts was known so far. All zero for a file without experts.
    pub fn experts(&self) -> live::Experts {
        let Pages { hints, told, touched, .. } = &*self.pages;
        let [hints, told, touched] = [hints, told, touched].map(|count| count.load(Ordering::Relaxed));
        live::Experts { hints, told, touched }
    }

    /// What of the file is in memory now, by layer. It holds up the runtime no longer than
    /// [`Observe::snapshot`](outcore::stats::Observe::snapshot) does.
    pub fn look(&self) -> live::File {
        let Pages { runtime, bytes, page, layers, experts, .. } = &*self.pages;
        let pages = runtime.observe().snapshot(bytes).pages;
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
            whole: self.whole(),
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

    /// Touches of pages that were not there, where uses are [announced](MapOptions::announced): how many, and the bytes
    /// that were touched last. Otherwise none are counted.
    ///
    /// A page that is there is touched unseen, so what nobody announces may count in one pass and not in another.
    pub fn touches(&self) -> live::Touches {
        self.pages.touches.lock().clone()
    }

    /// The bytes of `range` as elements of this type, for another library: a DLPack view that pins nothing. It keeps
    /// the mapping, so that its addresses stay what they are; a page of it that is not there comes when it is touched,
    /// or is pinned before.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the file has no such bytes, their number is not that of the
    /// type and the shape, or their address does not fit the type; [`Unsupported`](ErrorKind::Unsupported) for types
    /// that are stored in blocks.
    pub fn dlpack(self: &Arc<Self>, range: Range<u64>, dtype: DType, shape: &[u64]) -> Result<DlpackView> {
        let elements = shape.iter().try_fold(1_u64, |product, extent| product.checked_mul(*extent));
        let takes = elements.and_then(|elements| dtype.bytes_for(elements));
        let has = range.end.checked_sub(range.start).filter(|_| range.end <= self.len as u64);
        if takes.is_none() || takes != has {
            let message = format!("{dtype} of shape {shape:?} is not what bytes {range:?} of {} are", self.pages.name);
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("name bytes as the file's header does"));
        }
        // SAFETY: as in `deref`: the range lies in the file's, and its bytes can be read as long as the mapping lives,
        // which the view owns a share of. They do not change. Whoever maps it to be written has no `Arc` of this.
        unsafe { DlpackView::of_memory(self.start + range.start, dtype, shape, self.clone()) }
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
        self.pages.model.leave(&self.core, self.pages.file);
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
pub struct MappedMut(Mapped);

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

    /// As [`Mapped::whole`].
    pub fn whole(&self) -> live::Whole {
        self.0.whole()
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

impl MapOptions {
    /// As [`Mapped::open`].
    ///
    /// # Errors
    /// As for [`Mapped::open`].
    pub fn open(&self, runtime: &Runtime, path: impl AsRef<Path>) -> Result<Mapped> {
        Mapped::open_with(runtime, path.as_ref(), self, false)
    }

    /// As [`MappedMut::open`].
    ///
    /// # Errors
    /// As for [`MappedMut::open`].
    pub fn open_private(&self, runtime: &Runtime, path: impl AsRef<Path>) -> Result<MappedMut> {
        Mapped::open_with(runtime, path.as_ref(), self, true).map(MappedMut)
    }
}
