//! What a runtime reports: counters, where time went, who waits for what, and what was chosen.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde::{Serialize, Serializer};

use crate::ids::{Bytes, PageSize, SegmentId, Tier};
use crate::pager::{PageView, Pager};
use crate::shared::Shared;
use crate::store::{IoBackend, ScratchRoom};
use crate::tensor::Tensor;

// For the crates beside outcore, and not for programs: it changes without notice.
#[doc(hidden)]
pub use crate::config::staging_pages;
pub use crate::engine::waiting::{Holder, ScopeName, Waiter, Waiting};
#[doc(inline)]
pub use crate::ids::{RequestId, ScopeId};
pub use crate::memory::MemoryStats;
pub use crate::observe::{Lane, PageStalls, Span, StallStats, TierStalls, TraceRows, Traffic};
#[doc(inline)]
pub use crate::pager::policy::opt::Optimum;
#[doc(inline)]
pub use crate::pager::{ClassStats, FrameStats, PageUse, PageUses, PagerStats, WaitCause, WaitsFor, WalkerStats};
pub use crate::settings::{Chosen, Settings};
// For the crates beside outcore, and not for programs: it changes without notice.
#[doc(hidden)]
pub use crate::settings::{HUGE_PAGES_LEAST, page_within};

/// Counters of a runtime since it was opened.
///
/// Serialized, each field has its own name. [`Bytes`] and [`PageSize`] are numbers of bytes. Durations are seconds with
/// a fraction. Paths are text.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Stats {
    /// Uses, hits, faults, fills, evictions. A use that has not reached the policy yet counts as a hit.
    pub pager: PagerStats,
    /// Bytes and busy time by link.
    pub traffic: Traffic,
    /// Waiting, by cause and tier.
    pub stalls: Vec<StallStats>,
    /// The policy in use.
    pub policy: &'static str,
    /// The caller's own policy that `policy` has replaced. It panicked, or it offered nothing although a page could go.
    pub policy_replaced: Option<&'static str>,
    /// Whether the policy followed a plan, declared or recognised, at the last use that has reached it.
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
    pub device: TierUse,
    /// Host-tier memory in frames now, and the budget.
    pub host: TierUse,
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
    /// [Walkers](crate::Runtime::walker) that have begun and not ended. [`Observe::walkers`] says what each has used,
    /// and where it is.
    pub walkers: usize,
    /// How many requests wait for what others hold. A smaller budget that waits for guards is one of them.
    pub waiting: usize,
    /// What the tensors of each class have in device memory, and how their pages were found. A use that has
    /// not reached the policy yet is not counted here. Classes without tensors are left out.
    pub classes: Vec<ClassStats>,
    /// Requests that have waited for a second or more: what each waits for, and who holds it. One line for each, as
    /// [`Observe::waiting`] prints it, updated once a second. Empty if there are none.
    pub long_waits: String,
}

impl Stats {
    /// Hits over all uses; 0 where there were none. To compare with the best possible use [`Optimum::actual_ratio`]: a
    /// long run has more uses than an [`optimum`](Observe::optimum) covers.
    pub fn hit_ratio(&self) -> f64 {
        if self.pager.uses == 0 { 0.0 } else { self.pager.hits as f64 / self.pager.uses as f64 }
    }

    /// Time callers waited, for any cause.
    pub fn stall_time(&self) -> Duration {
        self.stalls.iter().map(|stall| stall.time).sum()
    }

    pub(crate) fn of(shared: &Shared) -> Self {
        let engine = &shared.engine;
        let page = shared.page_size.bytes();
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
        Self {
            pager,
            traffic: (Observe { shared }).traffic(),
            stalls: engine.observer.stalls(),
            policy,
            policy_replaced: engine.replaced_policy().map(|replaced| replaced.name),
            planned,
            io: engine.store.backend(),
            buffered_files: if in_a_child { Vec::new() } else { engine.store.buffered_files() },
            page_size: shared.page_size,
            settings: shared.settings(device.1),
            lookahead: bytes(lookahead),
            device: TierUse { used: bytes(device.0), budget: bytes(device.1) },
            host: TierUse { used: bytes(host.0), budget: shared.host_budget },
            device_frames,
            host_frames,
            memory: shared.memory(shared.scratch_in_memory()),
            page_tables: if in_a_child { Bytes::ZERO } else { engine.device.page_tables() },
            scratch: ScratchStats::of(shared),
            spans_dropped: engine.observer.dropped(),
            read_retries: engine.store.retries(),
            walkers,
            classes,
            waiting,
            long_waits: long_waits.to_string(),
        }
    }
}

/// Memory of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TierUse {
    /// In frames now.
    pub used: Bytes,
    /// The most that may be.
    pub budget: Bytes,
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

impl ScratchStats {
    fn of(shared: &Shared) -> Option<Self> {
        shared.engine.usable().ok()?;
        let scratch = shared.scratch.try_lock()?;
        let (file, _) = scratch.as_ref()?;
        let ScratchRoom { size, allocated, free } = file.room();
        let (folder, in_memory) = (file.directory().to_owned(), file.is_in_memory());
        Some(Self { folder, size, allocated, free, in_memory })
    }
}

fn one_as_text<S: Serializer>(path: &Path, to: S) -> std::result::Result<S::Ok, S::Error> {
    to.serialize_str(&path.to_string_lossy())
}

/// Paths need not be UTF-8, which JSON is.
fn as_text<S: Serializer>(paths: &[PathBuf], to: S) -> std::result::Result<S::Ok, S::Error> {
    to.collect_seq(paths.iter().map(|path| path.to_string_lossy()))
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

/// A look at a runtime: what takes longer, or is asked for less often, than [`Runtime::stats`](crate::Runtime::stats).
#[derive(Clone, Copy, Debug)]
pub struct Observe<'a> {
    pub(crate) shared: &'a Shared,
}

impl Observe<'_> {
    /// Lists the requests that wait, what they wait for, and who holds it: look here if nothing goes on. Printed, it
    /// has a line for each. The call looks at every page, so do not make it in a loop. It holds up no other thread
    /// while it looks.
    pub fn waiting(&self) -> Waiting {
        self.shared.engine.waiting()
    }

    /// What each pass in progress has used, and where it is. First comes what is pinned without a
    /// [`Walker`](crate::Walker), then walkers in the order in which they began. Takes longer the more there are.
    pub fn walkers(&self) -> Vec<WalkerStats> {
        self.shared.engine.recorded(|pager| pager.walker_stats()).unwrap_or_default()
    }

    /// The most hits that any policy could have had, and the hits there were, on the same uses: the first 262,144. It
    /// assumes as many frames as the budget ever allowed, and that every page comes on demand. Takes up to a tenth of a
    /// second of the calling thread, and holds up no other.
    pub fn optimum(&self) -> Optimum {
        // A copy shares all but the last few thousand uses, so the latch is soon free again.
        let trace = self.shared.engine.recorded(|pager| pager.trace()).unwrap_or_default();
        trace.optimum(self.shared.most_frames.load(Ordering::Relaxed))
    }

    /// The pages that were waited for longest, at most `most`, the worst first. Only pages of tensors that still exist
    /// count. Looks at every page of every tensor that was ever waited for: a millisecond for a million pages. It holds
    /// up no other thread.
    pub fn worst_pages(&self, most: usize) -> Vec<PageStalls> {
        self.shared.engine.worst_pages(most)
    }

    /// Bytes and busy time by link: the part of [`Runtime::stats`](crate::Runtime::stats) that needs no lock on the
    /// pager.
    pub fn traffic(&self) -> Traffic {
        if self.shared.engine.usable().is_ok() { self.shared.engine.observer.traffic() } else { Traffic::default() }
    }

    /// Whether the policy is following a plan, declared or recognised.
    pub fn is_planned(&self) -> bool {
        self.shared.engine.with(|pager, _| pager.policy_state().1).unwrap_or(false)
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
        if self.shared.engine.usable().is_ok() { self.shared.engine.observer.take_timeline() } else { Vec::new() }
    }

    /// The uses of pages since the last call, in order, if the runtime was opened to [keep
    /// them](crate::RuntimeBuilder::keep_uses). There is room for [`PageUses::MAX`]. Later ones are counted, and lost.
    pub fn take_uses(&self) -> PageUses {
        self.shared.engine.recorded(Pager::take_uses).unwrap_or_default()
    }

    /// Adds a span of the caller's own work to the timeline.
    pub fn add_span(&self, lane: Lane, what: &'static str, start: Instant, end: Instant) {
        if self.shared.engine.usable().is_ok() {
            self.shared.engine.observer.span(lane, what, start, end, String::new);
        }
    }
}

/// Pages that [`Observe::snapshot`] looks at under one hold of the latch: some ten microseconds.
const SNAPSHOT_SLICE: usize = 1024;
