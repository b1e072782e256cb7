//! The runtime: open, allocate, pin, plan, budgets, close.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::budget::{device_frames_of, host_frames_of};
use crate::config::{DeviceBudget, PolicyChoice, RuntimeBuilder, staging_pages};
use crate::device::{DeviceAddress, DeviceSettings, HostSlab, HostSlabConfig, Opened};
use crate::dtype::DType;
use crate::engine::{Engine, Parts, SegmentIo, Sink, Source, may_wait};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, SegmentClass, WalkerId};
use crate::memory::check_host_budget;
use crate::observe::{Observer, PageWaits};
use crate::pager::{Backing, Pager, PagerConfig};
use crate::pin::{PinRequest, Plan, ScopeBuilder, Tensors, Walker};
use crate::segment::Segment;
use crate::shared::Shared;
use crate::stats::{Observe, Stats};
use crate::store::{QueueDepth, ScratchOptions, Store};
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

    pub(crate) fn engine(&self) -> &Engine {
        &self.shared.engine
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
        let slots = self.shared.reserve_scratch(Bytes::new(bytes), self.shared.scratch_options.allocation)?;
        let label = format!("{dtype} {shape:?}");
        let source = |_| Ok(Source::Scratch { slots, label });
        let segment = self.add_segment(Backing::ReadWrite, class, bytes, source)?;
        Ok(Tensor::new(segment, 0, bytes, dtype, shape, ""))
    }

    pub(crate) fn still_open(&self) -> Result<()> {
        let closing = self.engine().change(|pager, _| pager.is_closing())?;
        if closing { Err(crate::pager::closing()) } else { Ok(()) }
    }

    /// `source` comes last of what can fail: nothing that it took into the store is left there without a segment.
    pub(crate) fn add_segment(
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

    /// Whether device memory is memory of this process. If so, guards give slices. If not, pin
    /// [`on_device`](PinRequest::on_device), which gives addresses and copies.
    pub fn host_addressable(&self) -> bool {
        self.engine().host_addressable
    }

    /// Pins the pages of [one tensor, or of several](Tensors): brings them into memory, and keeps them there while the
    /// guard lives. The request can still say [to write](PinRequest::write), [by device
    /// address](PinRequest::on_device), [for a stream](PinRequest::on), [in a scope](PinRequest::in_scope) or [of a
    /// walker](PinRequest::of); see [`mod@crate::pin`] for which guard to use.
    ///
    /// Several tensors are pinned as a unit, all or none: two callers that need sets never hold half each. The request
    /// is refused if the pages can never be resident together. If only guards of others are in the way, it waits for
    /// them, and holds nothing meanwhile. At most 16 later requests ([`PASSES_MAX`](crate::pager::PASSES_MAX)) pass it.
    /// A tensor of another runtime is [refused](ErrorKind::InvalidArgument).
    ///
    /// If you hold guards and need more, pin in [a scope](Self::scope): outcore cannot tell that guards outside of
    /// scopes wait for each other.
    ///
    /// ```
    /// use outcore::{Bytes, DType, Runtime};
    ///
    /// let runtime = Runtime::builder().device_budget(Bytes::mib(4)).open()?;
    /// let [one, other] = [runtime.alloc(DType::U8, &[1000])?, runtime.alloc(DType::U8, &[1000])?];
    /// runtime.pin(&one).write().wait()?.bytes_mut().fill(7);
    /// assert_eq!(runtime.pin(&one).wait()?.bytes()[990], 7);
    /// let both = [one, other];
    /// assert_eq!(runtime.pin(&both).wait()?.bytes(1)?[990], 0);
    /// // On any device: addresses, and copies.
    /// let guard = runtime.pin(&both).on_device().wait()?;
    /// let mut bytes = [0; 10];
    /// guard.copy_out(0, 990, &mut bytes)?;
    /// assert_eq!((bytes, guard.address(0)), ([7; 10], Some(both[0].address())));
    /// # drop((guard, both));
    /// # runtime.close()?;
    /// # Ok::<(), outcore::Error>(())
    /// ```
    #[inline]
    pub fn pin<'a, T: Tensors + ?Sized>(&self, tensors: &'a T) -> PinRequest<'a, T::Guard> {
        PinRequest::new(tensors.of(), &self.shared)
    }

    /// A builder of scopes. A task that holds guards and needs more pins in a scope: see [`Scope`](crate::Scope).
    pub fn scope(&self) -> ScopeBuilder {
        ScopeBuilder::new(self.shared.clone())
    }

    /// Begins a pass over a model, for programs with several passes at a time: see [`Walker`].
    ///
    /// # Errors
    /// [`Closed`](ErrorKind::Closed) in a fork of the process that opened the runtime.
    pub fn walker(&self) -> Result<Walker> {
        Walker::begin(&self.shared)
    }

    /// Suggests that tensors will be used soon, in this order. A hint: where there is no room for them, nothing
    /// happens. Tensors of another runtime are left out.
    pub fn prefetch(&self, tensors: &(impl Tensors + ?Sized)) {
        let runs = Tensor::runs_of(tensors.as_slice(), &self.shared);
        self.engine().with(|pager, fx| pager.prefetch(&runs, fx));
    }

    /// Declares how tensors pinned without a [`Walker`] will be used. An empty order withdraws the plan. Each walker
    /// has [a plan of its own](Walker::plan). A policy that follows no plans ignores it. Tensors of other runtimes are
    /// left out.
    pub fn plan(&self, plan: Plan<'_>) {
        plan.declare(WalkerId::DEFAULT, &self.shared);
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
        let runs = Tensor::runs_of(blocks, &self.shared);
        self.engine().with(|pager, _| pager.chain(&runs));
    }

    /// Evicts the pages of tensors, as far as no guard forbids it. Dirty pages are written back first, in the
    /// background. Returns how many pages it set in motion: none of a tensor of another runtime.
    pub fn evict(&self, tensors: &(impl Tensors + ?Sized)) -> u32 {
        let runs = Tensor::runs_of(tensors.as_slice(), &self.shared);
        let evict = |pager: &mut Pager, fx: &mut _| runs.iter().map(|run| pager.evict(run.pages(), fx)).sum();
        self.engine().with(evict).unwrap_or(0)
    }

    /// Tells that the bytes of tensors are of no use any more: they will be written anew. Pages that lie entirely in
    /// one and have neither a device frame nor a newer copy in the host tier than on disk are filled with zeros the
    /// next time, not read. Those that have a frame leave it without being written, unless a guard writes them or they
    /// are on their way to a lower tier. So until they are written, each page has its old bytes or zeros. Returns how
    /// many pages lost their bytes at once: none of a tensor of another runtime, of a file or of a durable folder. The
    /// scratch file keeps what it has of them until they are written back or [wiped](Self::wipe).
    ///
    /// ```
    /// use outcore::{Bytes, DType, PageSize, Runtime};
    ///
    /// let page = PageSize::new(Bytes::kib(64))?;
    /// let runtime = Runtime::builder().page_size(page).device_budget(Bytes::kib(512)).open()?;
    /// let [one, other] = [runtime.alloc(DType::U8, &[512 << 10])?, runtime.alloc(DType::U8, &[512 << 10])?];
    /// runtime.pin(&one).write().wait()?.bytes_mut().fill(1);
    /// // There is room for one of them.
    /// runtime.pin(&other).write().wait()?.bytes_mut().fill(2);
    /// assert_eq!(runtime.discard(&one), 8);
    /// assert_eq!(runtime.pin(&one).wait()?.bytes()[0], 0);
    /// assert_eq!(runtime.stats().traffic.disk_read, Bytes::ZERO);
    /// # drop([one, other]);
    /// # runtime.close()?;
    /// # Ok::<(), outcore::Error>(())
    /// ```
    pub fn discard(&self, tensors: &(impl Tensors + ?Sized)) -> u32 {
        let runs = Tensor::whole_pages_of(tensors.as_slice(), &self.shared);
        let discard = |pager: &mut Pager, fx: &mut _| runs.iter().map(|run| pager.discard_bytes(run.pages(), fx)).sum();
        self.engine().with(discard).unwrap_or(0)
    }

    /// Makes zeros of what the scratch file has of tensors besides their newest bytes: what pages had when they were
    /// last written back, if they were [discarded](Self::discard) or written since. Without this it stays in the file
    /// until the page is written back again, or the tensor is dropped. What tensors have now is not changed. Only pages
    /// that lie entirely in a tensor are wiped; tensors of files, durable folders and other runtimes are left out.
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
    /// runtime.pin(&one).write().wait()?.bytes_mut().fill(1);
    /// // There is room for one of them: the first one is written to the scratch file.
    /// runtime.pin(&other).write().wait()?.bytes_mut().fill(2);
    /// runtime.discard(&one);
    /// runtime.wipe(&one)?;
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
    pub fn wipe(&self, tensors: &(impl Tensors + ?Sized)) -> Result<()> {
        self.engine().wipe(&mut Tensor::whole_pages_of(tensors.as_slice(), &self.shared))
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
        let lookahead = self.shared.page_size.pages_for(self.shared.settings(frames).lookahead.value.get()) as u32;
        let raising = self.shared.allow_frames(frames, budget)?;
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

    /// Counters. Takes microseconds, however many pages and uses there are. What takes longer is in
    /// [`observe`](Self::observe).
    pub fn stats(&self) -> Stats {
        Stats::of(&self.shared)
    }

    /// What the runtime knows of itself, in more detail than [`stats`](Self::stats): who waits, where pages are, where
    /// time went.
    pub fn observe(&self) -> Observe<'_> {
        Observe { shared: &self.shared }
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
