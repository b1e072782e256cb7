//! The facade: open, allocate, pin, prefetch, plan, look, close.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};

use crate::budget::{device_frames_of, host_frames_of};
use crate::compute::ComputeStream;
use crate::config::{DeviceBudget, PolicyChoice, RuntimeBuilder, staging_pages};
use crate::device::{DeviceAddress, DeviceSettings, HostSlab, HostSlabConfig, Opened};
use crate::dtype::DType;
use crate::engine::waiting::Waiting;
use crate::engine::{Engine, FromFile, InScratch, LearnedHashes, Parts, SegmentIo, Sink, Source, Written, may_wait};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{self, FileState, ModelFile, ModelHeader};
use crate::ids::{Bytes, FileId, PageSize, SegmentClass, SegmentId, Tier};
use crate::observe::{Lane, Observer, PageStalls, PageWaits, Span, StallStats, Traffic};
use crate::os::machine::MemoryLimit;
use crate::pager::policy::opt::Optimum;
use crate::pager::{
    Backing, ClassStats, FrameStats, PageRun, PageUses, PageView, Pager, PagerConfig, PagerStats, WalkerStats,
};
use crate::pin::{DevicePins, DevicePinsOn, HostPin, HostPins, PinRequest, Read, ScopeBuilder, Walker, Write};
use crate::segment::Segment;
use crate::settings::Settings;
use crate::shared::{Raising, Shared};
use crate::store::{
    CaughtSource, FileUse, IoBackend, PageSource, QueueDepth, ScratchAllocation, ScratchFile, ScratchOptions,
    ScratchRoom, SlotRun, Store, no_descriptor_left, scratch_on_a_disk,
};
use crate::tensor::Tensor;

/// An open runtime: tiers, store, policy. Cheap to clone; all clones are one runtime.
///
/// # Forks
///
/// A runtime belongs to the process that opened it. A child by `fork` has a copy of the memory and none of the threads.
/// In the child nothing hangs, and nothing reaches the parent:
///
/// - Calls that can fail end with [`Closed`](ErrorKind::Closed), pins of resident pages too. Calls that cannot fail do
///   nothing and report nothing: counters of pages and bytes are zero, and a snapshot has no pages.
///   [`health`](Self::health) says why.
/// - Inherited guards can be read on devices of this process's memory. They are a copy: what the child writes stays in
///   the child. Other inherited tensor memory must not be touched: as always, access needs a guard. Host memory that a
///   GPU has locked for its copies is not in a child at all.
/// - Dropping handles, guards and requests has no effect. The threads, the ring and the scratch file are the parent's.
///   The child's copy of the memory goes when the child ends or calls `exec`.
///
/// A child may open a runtime of its own if its parent had none open at the fork. Otherwise opening one ends with
/// [`Unsupported`](ErrorKind::Unsupported). The reason: the child copies the process's locks and lists of waiting
/// threads. Threads of the parent may hold these locks or stand in these lists, and the child does not have those
/// threads. So a wait in the child might never end.
///
/// A `fork` while reads are in flight does not harm the child. It may harm the parent (`O_DIRECT` in open(2)): a kernel
/// before 6.3 does not copy pinned pages at the fork, and bytes that are read while the child lives may be lost. On
/// such kernels fork when nothing is in flight, or start programs with [`std::process::Command`], which shares the
/// memory until `exec`.
#[derive(Clone, Debug)]
pub struct Runtime {
    pub(crate) shared: Arc<Shared>,
}

/// A model file, or several, opened in place.
#[derive(Clone, Debug)]
pub struct Model {
    header: Arc<ModelHeader>,
    tensors: Arc<HashMap<String, Tensor>>,
}

impl Model {
    /// What the headers say.
    pub fn header(&self) -> &ModelHeader {
        &self.header
    }

    /// A tensor by name.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) if the model has no tensor of that name.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        match self.tensors.get(name) {
            Some(tensor) => Ok(tensor.clone()),
            // The header's error knows similar names.
            None => Err(self
                .header
                .tensor(name)
                .err()
                .unwrap_or_else(|| Error::new(ErrorKind::NotFound, format!("the model has no tensor {name:?}")))),
        }
    }

    /// Whether the model has a tensor of that name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }
}

/// Counters of a runtime since it was opened.
///
/// Serialized, each field has its own name. [`Bytes`] and [`PageSize`] are numbers of bytes. Durations are seconds with
/// a fraction. A pair of memory in use and budget is an object `{"used": ..., "budget": ...}`. Paths are text.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Stats {
    /// Uses, hits, faults, fills, evictions. A use that the policy has not been told of yet counts as a hit.
    pub pager: PagerStats,
    /// Bytes and busy time by link.
    pub traffic: Traffic,
    /// Waiting, by cause and tier.
    pub stalls: Vec<StallStats>,
    /// The policy in use.
    pub policy: &'static str,
    /// The caller's own policy that `policy` has replaced. It panicked, or it offered nothing although a page could go.
    pub policy_replaced: Option<&'static str>,
    /// Whether the policy followed a plan, declared or recognised, at the last use that it was told of.
    pub planned: bool,
    /// The I/O backend in use.
    pub io: IoBackend,
    /// Open files that are read through the page cache because their file system refuses O_DIRECT. Only an
    /// automatically chosen backend does that; a backend asked for by name refuses such files.
    #[serde(serialize_with = "as_text")]
    pub buffered_files: Vec<PathBuf>,
    /// Bytes of a page.
    pub page_size: PageSize,
    /// What was chosen where nothing was set, and why. It follows the device budget.
    pub settings: Settings,
    /// How far ahead of use fills start. It follows the device budget.
    pub lookahead: Bytes,
    /// Device memory in frames now, and the budget.
    #[serde(serialize_with = "used_of_budget")]
    pub device: (Bytes, Bytes),
    /// Host-tier memory in frames now, and the budget.
    #[serde(serialize_with = "used_of_budget")]
    pub host: (Bytes, Bytes),
    /// Frames of the device tier.
    pub device_frames: FrameStats,
    /// Frames of the host tier.
    pub host_frames: FrameStats,
    /// Page tables that the kernel has now for device memory. If the tables of all frames may exceed 16 MiB, the excess
    /// counts in the budget, which then holds fewer frames. A GPU has none.
    pub page_tables: Bytes,
    /// The scratch file of read-write tensors, once there is one. `None` in a child by `fork`.
    pub scratch: Option<ScratchStats>,
    /// The memory of this machine that the runtime may take.
    pub memory: MemoryStats,
    /// Spans that were dropped because the kept timeline was full.
    pub spans_dropped: u64,
    /// Reads that failed and were tried again.
    pub read_retries: u64,
    /// [Walkers](Runtime::walker) that have begun and not ended. [`Runtime::walkers`] says what each has used, and
    /// where it is.
    pub walkers: usize,
    /// How many requests wait for what others hold. A smaller budget that waits for guards is one of them.
    pub waiting: usize,
    /// What the tensors of each class have in device memory, and how their pages were found. A use that the policy has
    /// not been told of yet is not counted here. Classes without tensors are left out.
    pub classes: Vec<ClassStats>,
    /// Requests that have waited for a second or more: what each waits for, and who holds it. One line for each, as
    /// [`Runtime::waiting`] prints it, updated once a second. Empty if there are none.
    pub long_waits: String,
}

impl Stats {
    /// Hits over all uses; 0 where there were none. To compare with the best possible use [`Optimum::actual_ratio`]: a
    /// long run has more uses than an [`optimum`](Runtime::optimum) covers.
    pub fn hit_ratio(&self) -> f64 {
        if self.pager.uses == 0 { 0.0 } else { self.pager.hits as f64 / self.pager.uses as f64 }
    }

    /// Time callers waited, for any cause.
    pub fn stall_time(&self) -> Duration {
        self.stalls.iter().map(|stall| stall.time).sum()
    }
}

/// The state of the scratch file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ScratchStats {
    /// Where it is.
    #[serde(serialize_with = "one_as_text")]
    pub folder: PathBuf,
    /// Its length. It does not shrink when tensors are dropped: the file then has holes.
    pub size: Bytes,
    /// The room that the file system has allocated to it, as the file system reports it, its own records included. It
    /// grows while a tensor is being allocated.
    pub allocated: Bytes,
    /// The part of its length that no tensor holds. It takes no room if the file system can punch holes.
    pub free: Bytes,
    /// Whether the folder is in memory. Only a folder that was [named](crate::RuntimeBuilder::scratch_dir) may be.
    pub in_memory: bool,
}

/// Memory of this machine that a runtime takes when its tiers are full. A table in `docs/architecture.md` says what
/// counts in which budget, and what counts in none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct MemoryStats {
    /// The device budget. Zero if the device tier is a GPU's memory.
    pub device: Bytes,
    /// The host budget.
    pub host: Bytes,
    /// The staging ring.
    pub staging: Bytes,
    /// The room that read-write tensors hold in a scratch file in memory, written or not. Zero if the scratch file is
    /// on a disk.
    pub scratch: Bytes,
    /// The most that page tables can take: those of the device tier's frames (zero for a GPU), plus those of the host
    /// tier. [`Stats::page_tables`] is what the device tier's frames have now.
    pub page_tables: Bytes,
}

impl MemoryStats {
    /// The sum.
    pub fn total(&self) -> Bytes {
        self.device + self.host + self.staging + self.scratch + self.page_tables
    }
}

/// Has the policy keep frames for classes of tensors, of so many frames of so many bytes.
fn keep_for_classes(pager: &mut Pager, floors: &[(SegmentClass, Bytes)], (frames, page): (u32, u64)) -> Result<()> {
    let kept: Vec<_> = floors.iter().map(|(class, floor)| (*class, floor.get().div_ceil(page))).collect();
    let all = kept.iter().fold(0u64, |all, (_, pages)| all.saturating_add(*pages));
    if all > u64::from(frames) {
        let [all, budget] = [all, frames.into()].map(|frames| Bytes::new(frames.saturating_mul(page)));
        let message = format!("{all} are kept for classes of tensors, and the device budget has frames for {budget}");
        return Err(Error::new(ErrorKind::BudgetTooSmall, message)
            .remedy("keep less for classes of tensors, or raise the device budget"));
    }
    let kept: Vec<_> = kept.into_iter().map(|(class, pages)| (class, pages as u32)).collect();
    if pager.keep_for_classes(&kept) {
        return Ok(());
    }
    let message = format!("the policy {} keeps no frames for classes of tensors", pager.policy_state().0);
    Err(Error::new(ErrorKind::InvalidArgument, message)
        .remedy("choose PolicyKind::Plan or PolicyKind::Shares, or keep no frames for classes"))
}

fn one_as_text<S: Serializer>(path: &Path, to: S) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_str(&path.to_string_lossy())
}

/// Paths need not be UTF-8, which JSON is.
fn as_text<S: Serializer>(paths: &[PathBuf], to: S) -> std::result::Result<S::Ok, S::Error> {
    to.collect_seq(paths.iter().map(|path| path.to_string_lossy()))
}

fn used_of_budget<S: Serializer>((used, budget): &(Bytes, Bytes), to: S) -> std::result::Result<S::Ok, S::Error> {
    let mut pair = to.serialize_struct("Memory", 2)?;
    pair.serialize_field("used", used)?;
    pair.serialize_field("budget", budget)?;
    pair.end()
}

/// Where a segment's pages are.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SegmentView {
    /// The segment.
    pub id: SegmentId,
    /// Its pages, in order.
    pub pages: Vec<PageView>,
}

impl Runtime {
    /// A builder: every setting has a default.
    pub fn builder() -> RuntimeBuilder {
        RuntimeBuilder::new()
    }

    pub(crate) fn open(config: RuntimeBuilder) -> Result<Self> {
        let process = Opened::here()?;
        let wanted = config.wanted();
        let chosen = wanted.page_size();
        let page_size = chosen.value;
        let page_bytes = page_size.bytes();
        let host_frames = host_frames_of(config.host_budget, page_size)?;
        check_host_budget(config.host_budget)?;
        let frame_tables = config.device.tables_of_a_frame(page_size);
        // A share is of what the open device has free; its frames are made then.
        let known = match config.device_budget {
            DeviceBudget::Bytes(budget) => Some(config.device_frames(budget, page_size)?),
            DeviceBudget::Free { .. } => None,
        };
        let frames = known.unwrap_or(0);
        let sink = Arc::new(Sink::default());
        let settings = DeviceSettings { page_size, frames, link: config.link, warm: config.warm };
        let device = config.device.open(settings, sink.clone())?;
        let direct_io = device.direct_io();
        let staging = if direct_io { 0 } else { staging_pages(config.staging, page_size) };
        let frames = match known {
            Some(frames) => frames,
            None => {
                let host = u64::from(host_frames) + u64::from(staging);
                let tables = config.device.tables_of_host_memory(Bytes::new(host * page_bytes));
                let budget = config.device_budget.of(device.free_memory()?.saturating_sub(tables));
                // Of no more than there was the page size was chosen.
                let budget = wanted.budget.map_or(budget, |chosen_for| budget.min(chosen_for));
                let frames = config.device_frames(budget, page_size)?;
                device.grow_frames(frames)?;
                frames
            }
        };
        let slab_config = HostSlabConfig { page_size, frames: host_frames, staging, lock: host_frames + staging > 0 };
        let slab = HostSlab::new(slab_config, device.clone())?;
        let settings = wanted.settings(chosen, Some(frames));
        let store = match wanted.depth {
            Some(_) => config.store.clone(),
            None => config.store.clone().depth_ahead(QueueDepth::new(settings.depth.value)?),
        };
        let store: Arc<dyn Store> = store.open(sink.clone())?;
        let scratch_options = ScratchOptions { allocation: config.scratch_allocation, hook: config.store.hook };
        let pager_config = PagerConfig {
            frames,
            host_frames,
            staging,
            direct_io,
            lookahead: page_size.pages_for(settings.lookahead.value.get()) as u32,
            page_bytes,
        };
        let policy = config.policy.clone().unwrap_or_else(|| PolicyChoice::Kind(config.device.default_policy()));
        let (policy, fate) = policy.build()?;
        let mut pager = Pager::new(pager_config, policy);
        if !config.class_floors.is_empty() {
            keep_for_classes(&mut pager, &config.class_floors, (frames, page_bytes))?;
        }
        if device.makes_bare_frames() {
            pager.frames_are_bare();
        }
        if config.keep_uses {
            pager.keep_uses();
        }
        let observer = Observer::new(config.timeline);
        let engine = Engine::new(Parts {
            process,
            pager,
            device,
            process_memory: config.device.is_process_memory(),
            store,
            slab,
            observer,
            sink,
            fate,
            io_timeout: config.io_timeout,
            chunk: config.chunk,
        })?;
        Ok(Self {
            shared: Arc::new(Shared {
                engine,
                page_size,
                verify: config.verify,
                scratch_dir: config.scratch_dir,
                scratch_options,
                scratch_budget: config.scratch_budget,
                staging: Bytes::new(u64::from(staging) * page_bytes),
                frame_tables,
                model_dir: OnceLock::new(),
                scratch: Mutex::new(None),
                host_budget: Bytes::new(u64::from(host_frames) * page_bytes),
                wanted,
                chosen: settings.page_size.clone(),
                settings: Mutex::new((frames, settings)),
                most_frames: AtomicU32::new(frames),
                raising: Mutex::default(),
            }),
        })
    }

    fn engine(&self) -> &Engine {
        &self.shared.engine
    }

    /// Opens a model. `path` is a GGUF or safetensors file, one file of a split model, an `index.json`, or a folder
    /// with one of them. Reads headers only.
    ///
    /// # Errors
    /// As [`format::open`]; [`ModelChanged`](ErrorKind::ModelChanged) if a file is replaced meanwhile;
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) if there is no address space for it.
    pub fn open_model(&self, path: impl AsRef<Path>) -> Result<Model> {
        self.open_parsed(self.with_descriptors(|| format::open(path.as_ref()))?)
    }

    /// Opens files. If the process has no descriptor left, the store closes some of its files, and it is tried again.
    fn with_descriptors<T>(&self, open: impl Fn() -> Result<T>) -> Result<T> {
        match open() {
            Err(error) if lacks_descriptors(&error) => {
                self.engine().store.spare_descriptors();
                open()
            }
            opened => opened,
        }
    }

    /// Opens a model whose headers were read before, for example to choose budgets by them. They are not read again.
    ///
    /// ```no_run
    /// use outcore::{Bytes, Runtime, format};
    ///
    /// let header = format::open("model.gguf")?;
    /// let budget = Bytes::new(header.tensor_bytes() / 4);
    /// let runtime = Runtime::builder().device_budget(budget).open()?;
    /// let model = runtime.open_parsed(header)?;
    /// # Ok::<(), outcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ModelChanged`](ErrorKind::ModelChanged) if a file is no longer what it was when its header was read;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the header was changed and contradicts the files;
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) if there is no address space for it.
    pub fn open_parsed(&self, header: impl Into<Arc<ModelHeader>>) -> Result<Model> {
        self.open_backed(header.into(), Backing::File)
    }

    /// Opens a model whose tensors can be pinned for writing. The files are never written: a page that was written goes
    /// to the scratch file when it leaves memory, and comes from there. All other handles of the files, of this runtime
    /// too, keep the files' bytes. What was written is gone when the last handle is dropped.
    ///
    /// The scratch file takes room when a page is written back for the first time, as with
    /// [`ScratchAllocation::AtWriteBack`]. If there is none, the page stays in memory, and the write is tried again:
    /// see there. In the [scratch budget](RuntimeBuilder::scratch_budget) all pages of the files count from now on.
    ///
    /// ```no_run
    /// use outcore::{Bytes, Runtime, format};
    ///
    /// let runtime = Runtime::builder().device_budget(Bytes::gib(1)).open()?;
    /// let model = runtime.open_private(format::open("model.safetensors")?)?;
    /// let weight = model.tensor("lm_head.weight")?;
    /// runtime.pin_mut(&weight).wait()?.bytes_mut().fill(0);
    /// # Ok::<(), outcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`open_parsed`](Self::open_parsed); [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) and
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) as for [`alloc`](Self::alloc), if every page were written.
    pub fn open_private(&self, header: impl Into<Arc<ModelHeader>>) -> Result<Model> {
        self.open_backed(header.into(), Backing::CopyOnWrite)
    }

    fn open_backed(&self, header: Arc<ModelHeader>, backing: Backing) -> Result<Model> {
        if let Some(dir) = header.files.first().and_then(|file| file.path.parent()) {
            self.shared.model_dir.get_or_init(|| dir.to_owned());
        }
        self.open_with(header, backing, &|file| {
            let failed = |cause| {
                let remedy =
                    "leave the model's files where they are, and see how many a process may have open (ulimit -n)";
                Error::io(format!("open {}", file.path.display()), cause).remedy(remedy)
            };
            self.with_descriptors(|| {
                let handle = File::open(&file.path).map_err(failed)?;
                let now = handle.metadata().map_err(failed)?;
                if FileState::of(&now) != file.state {
                    return Err(changed_since(file));
                }
                self.engine().store.add_file(handle, file.path.clone(), FileUse::Model)
            })
        })
    }

    /// Opens a model whose bytes come from a [source](PageSource), such as an object store or a decompressor. The model
    /// is in one file, GGUF or safetensors. Reads of a source block threads of its own, and hold up no reads of files.
    ///
    /// # Errors
    /// As for [`open_model`](Self::open_model). [`Unsupported`](ErrorKind::Unsupported) for a model in several files.
    pub fn open_source(&self, source: Arc<dyn PageSource>) -> Result<Model> {
        let source = Arc::new(CaughtSource::new(source)?);
        let header = Arc::new(format::open_caught(&source)?);
        self.open_with(header, Backing::File, &|file| {
            let store = &self.engine().store;
            let id = store.add_source(source.clone())?;
            // The store has taken its identity: a change from here on is noticed there.
            let state = FileState::of_source(&source);
            let same = state.and_then(|state| if state == file.state { Ok(id) } else { Err(changed_since(file)) });
            if same.is_err() {
                store.remove_file(id);
            }
            same
        })
    }

    /// Opens a model whose header was read; `add` takes its files into the store.
    fn open_with(
        &self,
        header: Arc<ModelHeader>,
        backing: Backing,
        add: &dyn Fn(&ModelFile) -> Result<FileId>,
    ) -> Result<Model> {
        self.still_open()?;
        // Its fields are public, and what tensors say becomes slices of memory.
        header.check()?;
        let mut segments = Vec::with_capacity(header.files.len());
        for (index, file) in header.files.iter().enumerate() {
            segments.push(self.add_segment(backing, SegmentClass::Weights, file.len, |pages| {
                let copies = match backing {
                    Backing::CopyOnWrite => Some(self.reserve_copies(pages)?),
                    _ => None,
                };
                let learned = LearnedHashes::new(self.shared.verify, pages);
                let file = FromFile { file: add(file)?, model: header.clone(), index: index as u32, learned };
                Ok(match copies {
                    Some(copies) => Source::CopyOnWrite { file, copies, written: Written::new(pages) },
                    None => Source::File(file),
                })
            })?);
        }
        let mut tensors = HashMap::with_capacity(header.tensors.len());
        for tensor in &header.tensors {
            let segment = segments.get(tensor.file as usize).ok_or_else(|| {
                Error::new(ErrorKind::Internal, format!("tensor {:?} is in a file that is not open", tensor.name))
            })?;
            let handle =
                Tensor::new(segment.clone(), tensor.offset, tensor.len, tensor.dtype, &tensor.shape, &tensor.name);
            tensors.insert(tensor.name.clone(), handle);
        }
        Ok(Model { header, tensors: Arc::new(tensors) })
    }

    /// Allocates a read-write tensor of zeros. It may be larger than memory: what does not fit goes to a scratch file.
    /// Its room in that file is taken now, unless [`scratch_allocation`](RuntimeBuilder::scratch_allocation) says
    /// otherwise, and is given back when the last handle is dropped. Taking much room takes time; other threads' faults
    /// go on meanwhile.
    ///
    /// If the room is refused while room of dropped tensors is still being given back, the call waits for that and
    /// tries again. It waits as long as a read or a write [may take](RuntimeBuilder::io_timeout). In a waker or a
    /// closure on a stream it does not wait, and the refusal stands.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the shape's size overflows or does not fill whole blocks of
    /// the type. [`TooManyMappings`](ErrorKind::TooManyMappings) if the kernel allows the process no more mappings. For
    /// room in the scratch file: [`DiskFull`](ErrorKind::DiskFull) if the file cannot grow;
    /// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if its [budget](RuntimeBuilder::scratch_budget) does not allow it;
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) if the file is in memory, and this process may not use as much.
    pub fn alloc(&self, dtype: DType, shape: &[u64]) -> Result<Tensor> {
        self.alloc_for(SegmentClass::Other, dtype, shape)
    }

    /// As [`alloc`](Self::alloc), for data of class `class`. The policy [`shares`](crate::PolicyKind::Shares) treats
    /// classes apart.
    ///
    /// # Errors
    /// As for [`alloc`](Self::alloc).
    pub fn alloc_for(&self, class: SegmentClass, dtype: DType, shape: &[u64]) -> Result<Tensor> {
        let elements = shape.iter().try_fold(1u64, |product, extent| product.checked_mul(*extent));
        let bytes = elements.and_then(|n| dtype.bytes_for(n)).filter(|n| *n <= i64::MAX as u64).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, format!("a tensor of {dtype} {shape:?} has no size in bytes"))
                .remedy("choose extents whose product is a whole number of blocks and fits in memory addresses")
        })?;
        if bytes == 0 {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("a tensor of {dtype} {shape:?} has no elements"),
            )
            .remedy("choose extents of at least 1"));
        }
        self.still_open()?;
        let slots = self.reserve_scratch(Bytes::new(bytes), self.shared.scratch_options.allocation)?;
        let label = format!("{dtype} {shape:?}");
        let source = |_| Ok(Source::Scratch { slots, label });
        let segment = self.add_segment(Backing::ReadWrite, class, bytes, source)?;
        Ok(Tensor::new(segment, 0, bytes, dtype, shape, ""))
    }

    fn still_open(&self) -> Result<()> {
        let closing = self.engine().change(|pager, _| pager.is_closing())?;
        if closing { Err(crate::pager::closing()) } else { Ok(()) }
    }

    /// Places for the written pages of a file. Which pages these are is known when they are written back, and room is
    /// taken then.
    fn reserve_copies(&self, pages: u32) -> Result<InScratch> {
        let bytes = Bytes::new(u64::from(pages) * self.shared.page_size.bytes());
        self.reserve_scratch(bytes, ScratchAllocation::AtWriteBack)
    }

    /// Room for a tensor in the scratch file, which is made for the first one.
    fn reserve_scratch(&self, bytes: Bytes, allocation: ScratchAllocation) -> Result<InScratch> {
        let (page_size, options) = (self.shared.page_size, &self.shared.scratch_options);
        let allows = |file: &ScratchFile, held, more| self.allow_scratch(file, held, more);
        let reserve = |file: &ScratchFile| file.reserve_if(bytes, allocation, |held, more| allows(file, held, more));
        let mut scratch = self.shared.scratch.lock();
        if let Some((file, id)) = scratch.clone() {
            drop(scratch);
            let slots = self.when_there_is_room(&file, || reserve(&file))?;
            return Ok(InScratch { file: id, scratch: file, slots });
        }
        // Under the lock: as long as nothing is in it, another folder may be better.
        let (file, slots) = match &self.shared.scratch_dir {
            None => scratch_on_a_disk(page_size, self.shared.model_dir.get().map(PathBuf::as_path), options, reserve)?,
            Some(dir) => {
                let file = ScratchFile::create_with(dir, page_size, options.clone())?;
                if file.is_in_memory() {
                    tracing::warn!(
                        dir = %dir.display(),
                        "the scratch file is in memory: what is written back leaves none, and counts as memory"
                    );
                }
                let slots = reserve(&file)?;
                (file, slots)
            }
        };
        let id = self.engine().store.add_file(file.handle()?, file.directory().to_owned(), FileUse::Scratch)?;
        *scratch = Some((file.clone(), id));
        Ok(InScratch { file: id, scratch: file, slots })
    }

    /// Reserves again for as long as it is refused while room of tensors that were dropped is on its way back.
    fn when_there_is_room(&self, file: &ScratchFile, reserve: impl Fn() -> Result<SlotRun>) -> Result<SlotRun> {
        let deadline = self.engine().io_timeout().and_then(|limit| Instant::now().checked_add(limit));
        loop {
            let leaving = file.leaving();
            let error = match reserve() {
                Err(error) if leaving.bytes > Bytes::ZERO => error,
                done => return done,
            };
            let kinds = [ErrorKind::DiskFull, ErrorKind::BudgetTooSmall, ErrorKind::OutOfMemory];
            if !kinds.contains(&error.kind()) {
                return Err(error);
            }
            let there = format!("{} of tensors that were dropped are on their way back", leaving.bytes);
            if let Err(refused) = may_wait("room in the scratch file") {
                let remedy = refused.advice().unwrap_or_default();
                return Err(error.context(format!("{there}, which this thread cannot wait for")).remedy(remedy));
            }
            if !file.await_room(leaving, deadline) {
                return Err(error.context(format!("{there}, and the disk does not get on with them")));
            }
        }
    }

    /// Whether the scratch file may hold so much more.
    fn allow_scratch(&self, scratch: &ScratchFile, held: Bytes, more: Bytes) -> Result<()> {
        let folder = scratch.directory().display();
        let sum = |parts: &[Bytes]| {
            parts.iter().fold(Bytes::ZERO, |sum, part| Bytes::new(sum.get().saturating_add(part.get())))
        };
        if let Some(budget) = self.shared.scratch_budget.filter(|budget| sum(&[held, more]) > *budget) {
            let message = format!("a scratch budget of {budget} holds no {more} more in {folder}, which has {held}");
            return Err(Error::new(ErrorKind::BudgetTooSmall, message)
                .remedy("let tensors go, or give a larger one (RuntimeBuilder::scratch_budget)"));
        }
        if !scratch.is_in_memory() {
            return Ok(());
        }
        let raising = self.shared.raising.lock().iter().copied().max().unwrap_or(0);
        let frames = self.device_frames().max(raising);
        fits_memory(self.memory_of(frames, sum(&[held, more])), || format!("{more} more of scratch in {folder}"))
    }

    /// Whether scratch in memory leaves room for a device tier of `frames`. They count from here on in either case.
    fn allow_frames(&self, frames: u32, budget: Bytes) -> Result<Raising<'_>> {
        // Before the file is asked for: whoever makes one from now on finds this.
        let raising = Raising::new(&self.shared.raising, frames);
        let scratch = self.shared.scratch.lock().as_ref().map(|(file, _)| file.clone());
        let in_memory = scratch.filter(|file| file.is_in_memory() && self.engine().process_memory);
        if let Some(scratch) = in_memory.filter(|_| frames > self.device_frames()) {
            let folder = scratch.directory().display();
            let what = || format!("a device budget of {budget}, beside scratch in {folder}");
            scratch.ask(|held| fits_memory(self.memory_of(frames, held), what))?;
        }
        Ok(raising)
    }

    /// Frames that the device tier may have now.
    fn device_frames(&self) -> u32 {
        self.engine().look(Pager::device_frames).unwrap_or_default().1
    }

    /// What of this machine's memory is the runtime's, if its scratch file has so much of it.
    fn memory(&self, scratch: Bytes) -> MemoryStats {
        self.memory_of(self.device_frames(), scratch)
    }

    /// The same with a device tier of `frames`.
    fn memory_of(&self, frames: u32, scratch: Bytes) -> MemoryStats {
        let Shared { host_budget: host, staging, frame_tables, page_size, .. } = &*self.shared;
        let of_frames = |each: u64| Bytes::new(u64::from(frames) * each);
        let device = if self.engine().process_memory { of_frames(page_size.bytes()) } else { Bytes::ZERO };
        let host_tables = page_size.pages_for(host.get()) * HostSlab::tables_of_a_frame(*page_size).get();
        let page_tables = of_frames(frame_tables.get()) + Bytes::new(host_tables);
        MemoryStats { device, host: *host, staging: *staging, scratch, page_tables }
    }

    /// `source` comes last of what can fail: nothing that it took into the store is left there without a segment.
    fn add_segment(
        &self,
        backing: Backing,
        class: SegmentClass,
        len: u64,
        source: impl FnOnce(u32) -> Result<Source>,
    ) -> Result<Arc<Segment>> {
        let page_size = self.shared.page_size;
        let pages = u32::try_from(page_size.pages_for(len).max(1)).map_err(|_| {
            Error::new(
                ErrorKind::InvalidArgument,
                format!("{} is too large for pages of {page_size:?}", Bytes::new(len)),
            )
            .remedy("choose larger pages")
        })?;
        let engine = self.engine();
        if !engine.change(|pager, _| pager.has_room_for(pages))? {
            let message = format!("{pages} pages more than the runtime has are more than 2^32 in all");
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("choose larger pages"));
        }
        let base: DeviceAddress = engine.device.reserve(pages)?;
        let source = source(pages).inspect_err(|_| {
            if let Err(error) = engine.device.release(base, pages) {
                tracing::warn!(%error, ?base, "release a segment's addresses");
            }
        })?;
        let tail = u64::from(pages) * page_size.bytes() - len;
        let (id, words) = engine.change(|pager, _| {
            let added = pager.add_segment(backing, class, pages);
            pager.set_tail(added.0, tail);
            added
        })?;
        engine.add_segment_io(id, SegmentIo { base, pages, len, source, waits: PageWaits::default() });
        Ok(Arc::new(Segment { id, base, page_size, backing, words, shared: self.shared.clone() }))
    }

    /// Whether device memory is memory of this process. If so, [`pin`](Self::pin) and the calls like it give slices. If
    /// not, [`pin_device`](Self::pin_device) gives addresses and copies.
    pub fn host_addressable(&self) -> bool {
        self.engine().host_addressable
    }

    /// Pins a tensor's pages for reading. The request is refused if they can never be resident together. If only guards
    /// of others are in the way, it waits for them, and holds nothing meanwhile. At most 16 later requests
    /// ([`PASSES_MAX`](crate::pager::PASSES_MAX)) pass it.
    ///
    /// A tensor of another runtime is [refused](ErrorKind::InvalidArgument), here and in the other methods that pin.
    ///
    /// If you need several tensors at once, pin them as [a set](Self::pin_set). If you hold guards and need more, pin
    /// in [a scope](Self::scope): outcore cannot tell that guards outside of scopes wait for each other.
    #[inline]
    pub fn pin<'a>(&self, tensor: &'a Tensor) -> PinRequest<'a, HostPin<'a, Read>> {
        PinRequest::new(HostPin::new(tensor), &self.shared)
    }

    /// Pins a read-write tensor's pages for writing. No other guard has them meanwhile. Waits and refuses as
    /// [`pin`](Self::pin) does.
    #[inline]
    pub fn pin_mut<'a>(&self, tensor: &'a Tensor) -> PinRequest<'a, HostPin<'a, Write>> {
        PinRequest::new(HostPin::new(tensor), &self.shared)
    }

    /// Pins several tensors' pages for reading, as a unit: all or none. So two callers that need sets can never hold
    /// half each.
    pub fn pin_set<'a>(&self, tensors: &'a [Tensor]) -> PinRequest<'a, HostPins<'a, Read>> {
        PinRequest::new(HostPins::new(tensors), &self.shared)
    }

    /// Pins several read-write tensors' pages for writing, as a unit. No two of them may share a byte; they may share a
    /// page.
    pub fn pin_set_mut<'a>(&self, tensors: &'a [Tensor]) -> PinRequest<'a, HostPins<'a, Write>> {
        PinRequest::new(HostPins::new(tensors), &self.shared)
    }

    /// Lists the requests that wait, what they wait for, and who holds it: look here if nothing goes on. Printed, it
    /// has a line for each. The call looks at every page, so do not make it in a loop. It holds up no other thread
    /// while it looks.
    pub fn waiting(&self) -> Waiting {
        self.engine().waiting()
    }

    /// A builder of scopes. A task that holds guards and needs more pins in a scope: see [`Scope`](crate::Scope).
    pub fn scope(&self) -> ScopeBuilder {
        ScopeBuilder::new(self.shared.clone())
    }

    /// What each pass in progress has used, and where it is. First comes what is pinned without a [`Walker`], then
    /// walkers in the order in which they began. Takes longer the more there are.
    pub fn walkers(&self) -> Vec<WalkerStats> {
        self.engine().recorded(|pager| pager.walker_stats()).unwrap_or_default()
    }

    /// Begins a pass over a model, for programs with several passes at a time: see [`Walker`].
    ///
    /// # Errors
    /// [`Closed`](ErrorKind::Closed) in a fork of the process that opened the runtime.
    pub fn walker(&self) -> Result<Walker> {
        Walker::begin(&self.shared)
    }

    /// Pins several tensors' pages for reading on the device, as a unit. It works on every device: the guard gives
    /// device addresses, and copies bytes to the host on request. For one tensor pass `std::slice::from_ref(&tensor)`.
    ///
    /// ```
    /// use outcore::{Bytes, DType, Runtime};
    ///
    /// let runtime = Runtime::builder().device_budget(Bytes::mib(4)).open()?;
    /// let tensors = [runtime.alloc(DType::U8, &[1000])?];
    /// runtime.pin_device_mut(&tensors).wait()?.copy_in(0, 990, &[7; 10])?;
    /// let guard = runtime.pin_device(&tensors).wait()?;
    /// let mut bytes = [0; 20];
    /// guard.copy_out(0, 980, &mut bytes)?;
    /// assert_eq!((bytes[9], bytes[10]), (0, 7));
    /// assert_eq!(guard.address(0), Some(tensors[0].address()));
    /// # drop((guard, tensors));
    /// # runtime.close()?;
    /// # Ok::<(), outcore::Error>(())
    /// ```
    pub fn pin_device<'a>(&self, tensors: &'a [Tensor]) -> PinRequest<'a, DevicePins<'a, Read>> {
        PinRequest::new(DevicePins::new(tensors), &self.shared)
    }

    /// Pins several tensors' pages for reading by work on `stream`, as a unit. The guard may come before the bytes are
    /// there: the bytes were read and checked, and the device has taken up the copies. The stream is made to wait for
    /// the copies; no thread waits for the device. When the guard is dropped, the pins end once the stream has got that
    /// far.
    ///
    /// ```
    /// use outcore::{Bytes, DType, Runtime};
    ///
    /// let runtime = Runtime::builder().device_budget(Bytes::mib(4)).open()?;
    /// let tensors = [runtime.alloc(DType::U8, &[1000])?];
    /// let stream = runtime.compute_stream()?;
    /// let guard = runtime.pin_device_on(&tensors, &stream).wait()?;
    /// let bytes = guard.device_bytes(0);
    /// stream.call(move || assert!(bytes.is_some())); // in place of a kernel, which finds the bytes there
    /// drop(guard); // returns at once; the pages stay until the closure has run
    /// stream.synchronize()?; // results count from here on
    /// # drop((stream, tensors));
    /// # runtime.close()?;
    /// # Ok::<(), outcore::Error>(())
    /// ```
    ///
    /// The request fails as others do. It also fails with [`InvalidArgument`](ErrorKind::InvalidArgument) for a stream
    /// of another runtime, and for one that is being captured into a graph.
    pub fn pin_device_on<'a>(
        &self,
        tensors: &'a [Tensor],
        stream: &'a ComputeStream,
    ) -> PinRequest<'a, DevicePinsOn<'a>> {
        PinRequest::new(DevicePinsOn::new(tensors, stream), &self.shared)
    }

    /// As [`pin_device`](Self::pin_device), for writing, of read-write tensors. No two of them may share a byte.
    pub fn pin_device_mut<'a>(&self, tensors: &'a [Tensor]) -> PinRequest<'a, DevicePins<'a, Write>> {
        PinRequest::new(DevicePins::new(tensors), &self.shared)
    }

    /// Splits tensors into sets that each fit in `pages` pages, in order. A larger tensor is split into row ranges.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if a tensor has no rows and does not fit;
    /// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if a single row does not.
    pub fn waves(&self, tensors: &[Tensor], pages: u32) -> Result<Vec<Vec<Tensor>>> {
        let mut waves: Vec<Vec<Tensor>> = Vec::new();
        let mut used = 0u64;
        for tensor in tensors {
            let mut parts = Vec::new();
            if tensor.page_count() <= u64::from(pages) {
                parts.push(tensor.clone());
            } else {
                let step = tensor.rows_within(pages)?;
                let rows = tensor.shape().first().copied().unwrap_or(0);
                for start in (0..rows).step_by(step as usize) {
                    parts.push(tensor.rows(start..(start + step).min(rows))?);
                }
            }
            for part in parts {
                let count = part.page_count();
                if count > u64::from(pages) {
                    let page = self.shared.page_size.bytes();
                    let have = Bytes::new(u64::from(pages).saturating_mul(page));
                    let what = format!(
                        "a row of {tensor:?} has {} in {count} pages, but a wave has {pages} ({have})",
                        part.size()
                    );
                    return Err(Error::new(ErrorKind::BudgetTooSmall, what).remedy(format!(
                        "make waves of at least {count} pages, or reshape the tensor to shorter rows"
                    )));
                }
                match waves.last_mut() {
                    Some(wave) if used + count <= u64::from(pages) => wave.push(part),
                    _ => {
                        waves.push(vec![part]);
                        used = 0;
                    }
                }
                used += count;
            }
        }
        Ok(waves)
    }

    /// Suggests that a tensor will be used soon. A hint: where there is no room for it, nothing happens. A tensor of
    /// another runtime is left out.
    pub fn prefetch(&self, tensor: &Tensor) {
        if tensor.is_of(&self.shared) {
            let run = tensor.run();
            self.engine().with(|pager, fx| pager.prefetch(&[run], fx));
        }
    }

    /// As [`prefetch`](Self::prefetch) for each of these tensors, in this order, in one step.
    pub fn prefetch_all(&self, tensors: &[Tensor]) {
        let runs = self.runs_of_ours(tensors);
        self.engine().with(|pager, fx| pager.prefetch(&runs, fx));
    }

    /// Declares the order in which tensors pinned without a [`Walker`] will be used, again and again, as in passes over
    /// a model. An empty order withdraws the plan. Each walker has [an order of its own](Walker::plan). A policy that
    /// follows no plans ignores it. Tensors of other runtimes are left out.
    pub fn plan(&self, order: &[Tensor]) {
        self.declare(order, true);
    }

    /// As [`plan`](Self::plan), for an order that is used once.
    pub fn plan_once(&self, order: &[Tensor]) {
        self.declare(order, false);
    }

    fn declare(&self, order: &[Tensor], cyclic: bool) {
        let runs = self.runs_of_ours(order);
        self.engine().with(|pager, fx| pager.declare_plan(&runs, cyclic, fx));
    }

    fn runs_of_ours(&self, tensors: &[Tensor]) -> Vec<PageRun> {
        let ours = tensors.iter().filter(|tensor| tensor.is_of(&self.shared));
        ours.map(Tensor::run).collect()
    }

    /// Tells that a request is about to use these tensors: blocks of keys and values, from the beginning of a sequence
    /// on. Each block depends on those before it. The last one is usually not full yet. Uses in between, such as one
    /// for each layer, need not be told.
    ///
    /// The policies `kv` and `shares` learn from it when conversations go on. They let an unfinished block that no
    /// other sequence can share go first. The others ignore it. Tensors of other runtimes are left out.
    ///
    /// ```
    /// use outcore::policy::SegmentClass;
    /// use outcore::{Bytes, DType, PolicyKind, Runtime};
    ///
    /// let rt = Runtime::builder().device_budget(Bytes::mib(64)).policy(PolicyKind::Kv).open()?;
    /// let pool = rt.alloc_for(SegmentClass::KeysAndValues, DType::F16, &[128, 1 << 20])?;
    /// // A conversation whose keys and values are in blocks 7, 30 and 31 goes on.
    /// let blocks = [7, 30, 31].map(|block| pool.rows(block..block + 1));
    /// let blocks = blocks.into_iter().collect::<Result<Vec<_>, _>>()?;
    /// rt.chain(&blocks);
    /// for block in &blocks {
    ///     let guard = rt.pin(block).wait()?;
    ///     assert_eq!(guard.bytes().len(), 2 << 20);
    /// }
    /// # Ok::<(), outcore::Error>(())
    /// ```
    pub fn chain(&self, blocks: &[Tensor]) {
        let runs = self.runs_of_ours(blocks);
        self.engine().with(|pager, _| pager.chain(&runs));
    }

    /// Evicts a tensor's pages, as far as no guard forbids it. Dirty pages are written back first, in the background.
    /// Returns how many pages it set in motion: none of a tensor of another runtime.
    pub fn evict(&self, tensor: &Tensor) -> u32 {
        if !tensor.is_of(&self.shared) {
            return 0;
        }
        let run = tensor.run();
        self.engine().with(|pager, fx| pager.evict(run.pages(), fx)).unwrap_or(0)
    }

    /// Tells that the bytes of a tensor are of no use any more: it will be written anew. Pages that lie entirely in it
    /// and have neither a device frame nor a newer copy in the host tier than on disk are filled with zeros the next
    /// time, not read. Other pages stay as they are. So until it is written, each page has its old bytes or zeros.
    /// Returns how many pages lost their bytes: none of a tensor of another runtime or of a file. The scratch file
    /// keeps what it has of them until they are written back or [wiped](Self::wipe).
    ///
    /// ```
    /// use outcore::{Bytes, DType, PageSize, Runtime};
    ///
    /// let page = PageSize::new(Bytes::kib(64))?;
    /// let runtime = Runtime::builder().page_size(page).device_budget(Bytes::kib(512)).open()?;
    /// let [one, other] = [runtime.alloc(DType::U8, &[512 << 10])?, runtime.alloc(DType::U8, &[512 << 10])?];
    /// runtime.pin_mut(&one).wait()?.bytes_mut().fill(1);
    /// // There is room for one of them.
    /// runtime.pin_mut(&other).wait()?.bytes_mut().fill(2);
    /// assert_eq!(runtime.discard(&one), 8);
    /// assert_eq!(runtime.pin(&one).wait()?.bytes()[0], 0);
    /// assert_eq!(runtime.stats().traffic.disk_read, Bytes::ZERO);
    /// # drop([one, other]);
    /// # runtime.close()?;
    /// # Ok::<(), outcore::Error>(())
    /// ```
    pub fn discard(&self, tensor: &Tensor) -> u32 {
        if !tensor.is_of(&self.shared) {
            return 0;
        }
        let run = tensor.whole_pages();
        self.engine().with(|pager, fx| pager.discard_bytes(run.pages(), fx)).unwrap_or(0)
    }

    /// Makes zeros of what the scratch file has of tensors besides their newest bytes: what pages had when they were
    /// last written back, if they were [discarded](Self::discard) or written since. Without this it stays in the file
    /// until the page is written back again, or the tensor is dropped. What tensors have now is not changed. Only pages
    /// that lie entirely in a tensor are wiped; tensors of files and of other runtimes are left out.
    ///
    /// Waits for write backs of these pages that are under way, and holds up others. A page that a guard is writing
    /// counts as not written until the guard ends.
    ///
    /// The file system is asked for zeros. Where it cannot make them without writing, they are written. As with a file
    /// that is removed, a disk that is read without its file system may still have the bytes.
    ///
    /// ```
    /// use outcore::{Bytes, DType, PageSize, Runtime};
    ///
    /// let page = PageSize::new(Bytes::kib(64))?;
    /// let runtime = Runtime::builder().page_size(page).device_budget(Bytes::kib(512)).open()?;
    /// let [one, other] = [runtime.alloc(DType::U8, &[512 << 10])?, runtime.alloc(DType::U8, &[512 << 10])?];
    /// runtime.pin_mut(&one).wait()?.bytes_mut().fill(1);
    /// // There is room for one of them: the first one is written to the scratch file.
    /// runtime.pin_mut(&other).wait()?.bytes_mut().fill(2);
    /// runtime.discard(&one);
    /// runtime.wipe(&[one.clone()])?;
    /// # drop([one, other]);
    /// # runtime.close()?;
    /// # Ok::<(), outcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// - Errors of the disk. Then some of it may still be there.
    /// - [`TimedOut`](ErrorKind::TimedOut) if a write back takes longer than the
    ///   [runtime waits](crate::RuntimeBuilder::io_timeout).
    /// - [`InvalidArgument`](ErrorKind::InvalidArgument) in a waker or a closure on a stream: it might wait for that
    ///   very thread.
    pub fn wipe(&self, tensors: &[Tensor]) -> Result<()> {
        let ours = tensors.iter().filter(|tensor| tensor.is_of(&self.shared));
        self.engine().wipe(&mut ours.map(Tensor::whole_pages).filter(|run| run.count > 0).collect())
    }

    /// Tells that what is below the device tier is outdated where pages of a tensor were written, so that it can be
    /// [wiped](Self::wipe) even while guards write them again.
    #[doc(hidden)]
    pub fn outdate(&self, tensor: &Tensor) -> Result<()> {
        if !tensor.is_of(&self.shared) {
            return Ok(());
        }
        let run = tensor.whole_pages();
        self.engine().change(|pager, fx| pager.outdate(run.pages(), fx))
    }

    /// Gives `bytes` of memory, to the end of a page, back to the system before it returns, or as much as it can.
    /// Returns how much it was, as the system counts it.
    ///
    /// First goes the memory of free frames, of the device tier and of the host tier. Then go copies in the host tier
    /// that are also on disk or in the device tier. Then go clean pages of the device tier that nobody uses. Nothing is
    /// written back or copied for it, and dirty pages stay.
    ///
    /// On a GPU only the GPU's memory is given back: its driver has locked the host tier. The staging ring always
    /// stays. A page of the host tier smaller than a huge page of 2 MiB is a part of one. The kernel frees a huge page
    /// only when all of it was given back, or when memory runs short.
    ///
    /// Budgets do not change: frames get memory again when pages come, and what was locked is locked again then. If an
    /// order of use is known, fills ahead go on and take some of the memory again, at most the
    /// [lookahead](Stats::lookahead).
    pub fn trim(&self, bytes: Bytes) -> Bytes {
        self.engine().trim(bytes)
    }

    /// Changes the device budget. Growing takes effect at once. Shrinking returns when the memory has been given back.
    /// It waits for guards that are in the way, and for the ends of scopes that [set
    /// aside](crate::ScopeBuilder::reserve) more.
    ///
    /// # Errors
    /// - [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if the new budget holds no page. Waiting requests that could
    ///   never be served with it end with that error too.
    /// - An error of the device, such as [`TooManyMappings`](ErrorKind::TooManyMappings), for growing, if frames cannot
    ///   be made. The budget is then as before.
    /// - An error of the device for shrinking, if the system does not take memory back. The budget is then the new one,
    ///   and nobody gets the frames in question. The system is asked again by the next call of this, by
    ///   [`trim`](Self::trim), and once a second.
    /// - [`OutOfMemory`](ErrorKind::OutOfMemory) for growing, if a scratch file in memory leaves too little of what
    ///   this process may use. The check waits for an allocation there that is under way.
    /// - [`TimedOut`](ErrorKind::TimedOut) if a write that makes room, or a read into a frame that is to go, takes
    ///   longer than the [runtime waits](crate::RuntimeBuilder::io_timeout). The budget is then the new one, and is met
    ///   as writes end.
    /// - [`InvalidArgument`](ErrorKind::InvalidArgument) for shrinking in a waker or a closure on a stream: it might
    ///   wait for that very thread. The budget is then as before.
    pub fn set_device_budget(&self, budget: Bytes) -> Result<()> {
        let frames = device_frames_of(budget, self.shared.page_size, self.shared.frame_tables)?;
        if frames == 0 {
            return Err(Error::new(ErrorKind::BudgetTooSmall, format!("a device budget of {budget} holds no page"))
                .remedy(format!("give at least {}", Bytes::new(self.shared.page_size.bytes()))));
        }
        let engine = self.engine();
        engine.usable()?;
        let lookahead = self.shared.page_size.pages_for(self.settings(frames).lookahead.value.get()) as u32;
        let raising = self.allow_frames(frames, budget)?;
        // Frames exist on the device before the pager may hand them out.
        let most = engine.device.frame_count().max(frames);
        engine.device.grow_frames(most)?;
        engine.change(|pager, fx| {
            if frames < pager.device_frames().1 {
                may_wait("a smaller budget")?;
            }
            pager.set_lookahead(lookahead);
            pager.set_frames(frames, fx);
            self.shared.most_frames.fetch_max(frames, Ordering::Relaxed);
            Ok::<(), Error>(())
        })??;
        drop(raising);
        // Elsewhere a smaller budget may still be waited for; this one has been met.
        if may_wait("a budget").is_err() { Ok(()) } else { engine.await_budget() }
    }

    /// Keeps frames for classes of tensors from now on, in place of those that were kept before: see
    /// [`RuntimeBuilder::class_floor`](crate::RuntimeBuilder::class_floor). For whoever knows how much is in use, such
    /// as a server that writes so many answers at a time.
    ///
    /// # Errors
    /// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if that is more than the device budget;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the policy keeps no frames for classes.
    pub fn keep_for_classes(&self, floors: &[(SegmentClass, Bytes)]) -> Result<()> {
        let page = self.shared.page_size.bytes();
        self.engine().change(|pager, _| keep_for_classes(pager, floors, (pager.device_frames().1, page)))?
    }

    /// Keeps so many frames for [requests that can never be refused](crate::pin::PinRequest::never_refused): pins that
    /// are none of these leave them.
    ///
    /// # Errors
    /// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if that leaves no frame, or too few for scopes that reserved.
    #[doc(hidden)]
    pub fn keep_frames(&self, frames: u32) -> Result<()> {
        self.engine().set_floor(frames)
    }

    /// Counters. Takes microseconds, however many pages and uses there are. What takes longer has a call of its own
    /// ([`optimum`](Self::optimum), [`worst_pages`](Self::worst_pages)).
    pub fn stats(&self) -> Stats {
        let engine = self.engine();
        let page = self.shared.page_size.bytes();
        let seen = engine.look(|pager| {
            // Counted here, and not recorded: to tell the policy of thousands of uses takes too long.
            let unseen = engine.unseen();
            let (state, lookahead) = (pager.policy_state(), pager.lookahead());
            let tiers = (pager.device_frames(), pager.host_frames(), pager.frames());
            (pager.stats(), unseen, state, lookahead, tiers, (pager.walkers(), pager.classes()))
        });
        let (waiting, long_waits) = engine.waits();
        let in_a_child = !engine.is_at_home();
        let (mut pager, unseen, (policy, planned), lookahead, tiers, (walkers, classes)) =
            seen.unwrap_or((PagerStats::default(), 0, ("none", false), 0, Default::default(), Default::default()));
        let (device, host, (device_frames, host_frames)) = tiers;
        pager.uses += unseen;
        pager.hits += unseen;
        let bytes = |frames: u32| Bytes::new(u64::from(frames) * page);
        Stats {
            pager,
            traffic: self.traffic(),
            stalls: engine.observer.stalls(),
            policy,
            policy_replaced: engine.replaced_policy().map(|replaced| replaced.name),
            planned,
            io: engine.store.backend(),
            buffered_files: if in_a_child { Vec::new() } else { engine.store.buffered_files() },
            page_size: self.shared.page_size,
            settings: self.settings(device.1),
            lookahead: bytes(lookahead),
            device: (bytes(device.0), bytes(device.1)),
            host: (bytes(host.0), self.shared.host_budget),
            device_frames,
            host_frames,
            memory: self.memory(self.scratch_in_memory()),
            page_tables: if in_a_child { Bytes::ZERO } else { engine.device.page_tables() },
            scratch: self.scratch_stats(),
            spans_dropped: engine.observer.dropped(),
            read_retries: engine.store.retries(),
            walkers,
            classes,
            waiting,
            long_waits: long_waits.to_string(),
        }
    }

    /// The settings for a device tier of `frames`. Writing the reasons takes longer than the rest of
    /// [`stats`](Self::stats), so they are kept as long as they hold.
    fn settings(&self, frames: u32) -> Settings {
        let found = || self.shared.wanted.settings(self.shared.chosen.clone(), Some(frames));
        if !self.engine().is_at_home() {
            return found();
        }
        let mut last = self.shared.settings.lock();
        if last.0 != frames {
            // The store keeps the depth that it was opened with.
            let depth = last.1.depth.clone();
            *last = (frames, Settings { depth, ..found() });
        }
        last.1.clone()
    }

    /// What the scratch file in memory holds. Zero in a child by `fork`: a thread that is not there may hold the file's
    /// lock.
    fn scratch_in_memory(&self) -> Bytes {
        if !self.engine().is_at_home() {
            return Bytes::ZERO;
        }
        let scratch = self.shared.scratch.try_lock();
        let file = scratch.as_deref().and_then(Option::as_ref).map(|(file, _)| file);
        file.filter(|file| file.is_in_memory()).map_or(Bytes::ZERO, ScratchFile::held)
    }

    fn scratch_stats(&self) -> Option<ScratchStats> {
        self.engine().usable().ok()?;
        let scratch = self.shared.scratch.try_lock()?;
        let (file, _) = scratch.as_ref()?;
        let ScratchRoom { size, allocated, free } = file.room();
        let (folder, in_memory) = (file.directory().to_owned(), file.is_in_memory());
        Some(ScratchStats { folder, size, allocated, free, in_memory })
    }

    /// The most hits that any policy could have had, and the hits there were, on the same uses: the first 262,144. It
    /// assumes as many frames as the budget ever allowed, and that every page comes on demand. Takes up to a tenth of a
    /// second of the calling thread, and holds up no other.
    pub fn optimum(&self) -> Optimum {
        // A copy shares all but the last few thousand uses, so the latch is soon free again.
        let trace = self.engine().recorded(|pager| pager.trace()).unwrap_or_default();
        trace.optimum(self.shared.most_frames.load(Ordering::Relaxed))
    }

    /// The pages that were waited for longest, at most `most`, the worst first. Only pages of tensors that still exist
    /// count. Looks at every page of every tensor that was ever waited for: a millisecond for a million pages. It holds
    /// up no other thread.
    pub fn worst_pages(&self, most: usize) -> Vec<PageStalls> {
        self.engine().worst_pages(most)
    }

    /// Bytes and busy time by link: the part of [`stats`](Self::stats) that needs no lock on the pager.
    pub fn traffic(&self) -> Traffic {
        if self.engine().usable().is_ok() { self.engine().observer.traffic() } else { Traffic::default() }
    }

    /// Whether the policy is following a plan, declared or recognised.
    pub fn is_planned(&self) -> bool {
        self.engine().with(|pager, _| pager.policy_state().1).unwrap_or(false)
    }

    /// Where the pages of a tensor's segment are, whatever runtime it is of.
    ///
    /// The pages are read in slices of 1024. Between two slices other threads may pin, fill and evict, so only the
    /// pages of one slice are of one moment. In a larger segment a page that moves meanwhile may be seen in its old
    /// place, and another page already in the frame that the first one had.
    pub fn snapshot(&self, tensor: &Tensor) -> SegmentView {
        let (id, engine) = (tensor.segment.id, tensor.engine());
        let count = tensor.segment.words.len();
        let mut pages = Vec::with_capacity(count);
        // Apart, because the first touch of new memory is slow, and not for under the latch.
        let mut slice = Vec::with_capacity(count.min(SNAPSHOT_SLICE));
        for first in (0..count).step_by(SNAPSHOT_SLICE) {
            let _ = engine.look(|pager| slice.extend(pager.views(id, first..first + SNAPSHOT_SLICE)));
            pages.append(&mut slice);
        }
        SegmentView { id, pages }
    }

    /// How many of a tensor's pages each of [`Tier::ALL`] has, whatever runtime it is of. A page counts in the fastest
    /// tier that has its bytes, and one that was never written as on disk. All pages are of one moment, which holds up
    /// other threads: ask for a few pages at a time.
    pub fn tiers(&self, tensor: &Tensor) -> [u64; Tier::ALL.len()] {
        let (id, run) = (tensor.segment.id, tensor.run());
        let first = run.first.get() as usize;
        let mut tiers = [0; Tier::ALL.len()];
        let _ = tensor.engine().look(|pager| {
            pager.views(id, first..first + run.count as usize).for_each(|page| tiers[page.tier() as usize] += 1);
        });
        tiers
    }

    /// The spans kept since the last call, if the runtime was opened with a timeline.
    pub fn take_timeline(&self) -> Vec<Span> {
        if self.engine().usable().is_ok() { self.engine().observer.take_timeline() } else { Vec::new() }
    }

    /// The uses of pages since the last call, in order, if the runtime was opened to [keep
    /// them](RuntimeBuilder::keep_uses). There is room for [`PageUses::MAX`]. Later ones are counted, and lost.
    pub fn take_uses(&self) -> PageUses {
        self.engine().recorded(Pager::take_uses).unwrap_or_default()
    }

    /// Adds a span of the caller's own work to the timeline.
    pub fn add_span(&self, lane: Lane, what: &'static str, start: Instant, end: Instant) {
        if self.engine().usable().is_ok() {
            self.engine().observer.span(lane, what, start, end, String::new);
        }
    }

    /// Failures that no caller was told of, in this order:
    ///
    /// 1. That the runtime was given up, if something in it panicked.
    /// 2. Pages of read-write tensors whose bytes were lost, how many bytes, and why, also of tensors that are gone. Up
    ///    to 64 errors are kept; one more says how many pages were lost beyond these. Pages in a row that were lost
    ///    with a device share one error.
    /// 3. Pages that stay in host memory because the disk does not take them. Up to 64.
    /// 4. The caller's own policy, if it was [replaced](crate::policy::Policy): it panicked, or it offered nothing
    ///    although a page could go. That loses no bytes.
    pub fn health(&self) -> Vec<Error> {
        self.engine().health()
    }

    /// Stops the runtime. Waiting requests end with [`Closed`](ErrorKind::Closed). Operations in flight are finished,
    /// and the threads end. Guards stay valid until they are dropped.
    ///
    /// # Errors
    /// - What was lost since the runtime was opened, as one error that names the pages; its cause is the first one's.
    /// - [`Io`](ErrorKind::Io) if the disk does not answer within the [limit](RuntimeBuilder::close_within). The memory
    ///   of what is in flight then stays reserved.
    /// - [`Internal`](ErrorKind::Internal) if something in the runtime panicked. The runtime was given up then: every
    ///   call since has ended with that error, and all of its memory stays reserved.
    /// - [`InvalidArgument`](ErrorKind::InvalidArgument) in a waker or a closure on a stream. Nothing is closed then.
    pub fn close(self) -> Result<()> {
        may_wait("the end of a runtime")?;
        let closed = self.shared.engine.shut_down();
        // Afterwards, because what was in flight may have failed.
        match (self.engine().lost(), closed) {
            (None, closed) => closed,
            (Some(lost), Ok(())) => Err(lost),
            // A device that failed may be why both did; then it is said already.
            (Some(lost), Err(closed)) if lost.to_string().contains(&closed.to_string()) => Err(lost),
            (Some(lost), Err(closed)) => Err(lost.context(format!("closing failed ({closed}), and before that"))),
        }
    }
}

/// Pages that [`Runtime::snapshot`] looks at under one hold of the latch: some ten microseconds.
const SNAPSHOT_SLICE: usize = 1024;

/// Refuses memory, scratch included, that exceeds what this process may use.
fn fits_memory(memory: MemoryStats, what: impl Fn() -> String) -> Result<()> {
    // Where the limit cannot be read, the kernel will say.
    let Ok(limit) = MemoryLimit::detect().map(|memory| memory.limit) else { return Ok(()) };
    if memory.total() <= limit {
        return Ok(());
    }
    let MemoryStats { device, host, staging, scratch, page_tables } = memory;
    let message = format!(
        "{} would be too much memory, of which this process may use {limit}: the scratch file would have {scratch}, the budgets \
         {device} for the device tier and {host} for the host tier, staging {staging}, and page tables {page_tables}",
        what()
    );
    Err(Error::new(ErrorKind::OutOfMemory, message)
        .remedy("name a scratch folder on a disk, let tensors go, or choose smaller budgets"))
}

/// The host tier is locked, and so takes its memory whether it is used or not.
fn check_host_budget(budget: Bytes) -> Result<()> {
    if budget == Bytes::ZERO {
        return Ok(());
    }
    // Where the limit cannot be read, the kernel will say.
    let Ok(memory) = MemoryLimit::detect() else { return Ok(()) };
    if budget <= memory.limit {
        return Ok(());
    }
    let message = format!("a host budget of {budget} is more than the {} this process may use", memory.limit);
    Err(Error::new(ErrorKind::OutOfMemory, message)
        .remedy(format!("choose a host budget well below {}, or none: pages then go to disk", memory.limit)))
}

impl RuntimeBuilder {
    /// Opens the runtime.
    ///
    /// # Errors
    /// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if the device budget holds no page;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the closure of [`custom_policy`](Self::custom_policy) panics;
    /// errors of the device and the store if they cannot be opened.
    pub fn open(self) -> Result<Runtime> {
        Runtime::open(self)
    }
}

fn lacks_descriptors(error: &Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<io::Error>());
    cause.is_some_and(no_descriptor_left)
}

fn changed_since(file: &ModelFile) -> Error {
    let message = format!("{} changed after its header was read", file.path.display());
    Error::new(ErrorKind::ModelChanged, message).remedy("open the model again")
}
