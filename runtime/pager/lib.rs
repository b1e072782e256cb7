//! The pager decides which page is where, who may use it, and what moves next.
//!
//! It is a pure state machine. Requests and completions go in. [`Effects`] come out: moves to start, and requests that
//! are done. It does no I/O, reads no clock and starts no threads. So the same code runs in the runtime, in tests that
//! enumerate every order of events, and under a virtual clock.
//!
//! # Invariants
//!
//! 1. A frame belongs to at most one page. A page has at most one device frame and one host frame.
//! 2. Frames in use never exceed the budget. A fill starts only when it owns its frame, and its staging buffer where it
//!    needs one.
//! 3. A request holds all its frames and pages or none: it is admitted as a unit (see `admit`). So two requests never
//!    wait for each other. [Scopes](scope) may, because they hold pins and ask for more.
//! 4. `purses <= free` and `awaiting + coming <= free - purses + transit`. The frames in purses exist. One frame is on
//!    its way for each admitted page that has none yet, and for each frame still to be set aside. Where a failure
//!    breaks this, the pump repairs it by choosing another victim.
//! 5. A dirty page's bytes exist in exactly one place until a write back has been confirmed.
//! 6. A pinned page stays where it is while its guard lives.
//! 7. A page whose fill has not ended is pinned only if it was *lent*: to a request for a stream, once the device has
//!    taken up the copy, for which the stream waits. If such a fill fails, the page keeps its frame, and is neither
//!    filled again nor evicted, until those pins have ended.
//! 8. `declared + floor <= frames`, where `frames` counts those that exist and are not leaving. So the frames that
//!    scopes declared, spent or not, exist beside the floor.
//!
//! # Locking
//!
//! A [`Pager`] is used under one latch. Only [`PageWord`]s are touched without it (see [`state`]), and only to pin and
//! unpin resident pages (see [`pin`]). Effects are carried out after the latch is released. `protect` is the exception:
//! the frame's next use must not overtake it.

#[macro_use]
#[doc(hidden)]
pub mod sync;

mod access;
mod admit;
mod bits;
mod by_class;
#[macro_use]
mod check;
mod deadlock;
pub mod error;
mod frames;
pub mod ids;
mod known;
mod line;
mod links;
mod lookahead;
mod moves;
mod numbers;
mod order;
pub mod pin;
pub mod policy;
#[doc(hidden)]
pub mod random;
mod reclaim;
mod request;
pub mod scope;
mod spare;
pub mod state;
mod steps;
mod table;
#[cfg(all(test, not(loom)))]
mod tests;
mod victims;
mod waiting;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use serde::Serialize;
use slab::Slab;

use access::Part;
pub use access::{Access, AccessLog, PageChain, PageUse, PageUses, Recorded, Recorder};
pub use by_class::ClassStats;
pub use error::{Error, ErrorKind, Result};
pub use ids::{
    Bytes, FileId, FillPoint, FrameId, HostFrameId, MoveId, PageId, PageIndex, PageSize, RequestId, ScopeId,
    SegmentClass, SegmentId, StagingId, Tier, WalkerId,
};
pub use line::PASSES_MAX;
pub use pin::Gate;
pub use policy::{Policy, PolicyKind, WalkerPlace};
pub use request::{Purpose, ScopePriority, Terms};
pub use scope::{Holdings, ScopeTerms};
pub use spare::DiskCopy;
pub use state::{PageWord, PageWords, Snapshot, State, TryPin, Unpin};
pub use waiting::{Holder, Waiter, WaitsFor, WhoWaits};

use admit::Request;
#[doc(hidden)]
pub use admit::closing;
use by_class::ByClass;
use deadlock::Members;
use frames::{DeviceFrames, HostFrames, StagingRing};
use line::{FrameLine, Line};
use moves::MoveRecord;
use numbers::PageNumbers;
use policy::opt::Trace;
use reclaim::Barren;
use scope::Scope;
use state::Illegal;
use table::{PageEntry, SegmentTable};
use victims::Victims;

/// How urgent a move is. The smallest goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Somebody waits for the page.
    Demand,
    /// A write back that somebody waits for.
    WriteBack,
    /// The plan will want the page.
    Prefetch,
    /// Somebody may want the page.
    Speculation,
    /// Nobody waits.
    Background,
}

/// One end of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The page's own bytes on disk: its place in the model file, or its slot in the scratch file.
    Disk,
    /// Nowhere: the page was never written and reads as zero bytes.
    Zero,
    /// A device frame.
    Device(FrameId),
    /// A host frame.
    Host(HostFrameId),
}

/// One planned copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Its id, given back at completion.
    pub id: MoveId,
    /// The page whose bytes move.
    pub page: PageId,
    /// Where the bytes are.
    pub from: Place,
    /// Where the bytes go.
    pub to: Place,
    /// The staging buffer that the bytes pass through, where disk and device cannot exchange bytes directly.
    pub staging: Option<StagingId>,
    /// Urgency at the start; may be raised later.
    pub priority: Priority,
}

/// A run of consecutive pages of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRun {
    /// The segment.
    pub segment: SegmentId,
    /// First page.
    pub first: PageIndex,
    /// Number of pages.
    pub count: u32,
}

impl PageRun {
    /// The pages, in order.
    pub fn pages(self) -> impl Iterator<Item = PageId> {
        (self.first.0..self.first.0 + self.count).map(move |n| PageId { segment: self.segment, index: PageIndex(n) })
    }

    /// Sorts runs and joins those that touch or overlap, so that each page appears once.
    pub fn normalize(runs: &mut Vec<PageRun>) {
        let joined = Self::join(runs);
        runs.truncate(joined);
    }

    /// [`normalize`](Self::normalize) in place: the joined runs come first. Returns how many there are.
    pub fn join(runs: &mut [PageRun]) -> usize {
        runs.sort_unstable();
        let mut joined = 0usize;
        for at in 0..runs.len() {
            let next = runs[at];
            if next.count == 0 {
                continue;
            }
            if let Some(run) = joined.checked_sub(1).map(|last| &mut runs[last])
                && run.segment == next.segment
                && next.first.0 <= run.first.0 + run.count
            {
                run.count = run.count.max(next.first.0 + next.count - run.first.0);
            } else {
                runs[joined] = next;
                joined += 1;
            }
        }
        joined
    }
}

/// Why a request had to wait. If several causes apply, the first one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitCause {
    /// It did not wait.
    #[default]
    None,
    /// A page had to come from disk.
    Disk,
    /// A page had to come from the host tier.
    Host,
    /// A page had to be filled with zero bytes.
    Zero,
    /// A prefetch of the page was under way, but had not ended.
    LatePrefetch,
    /// Every frame was pinned or in motion.
    Frames,
    /// A victim had to be written back, or copied down, first.
    WriteBack,
    /// A writer held the page, or readers that a writer must wait for.
    Guard,
}

impl WaitCause {
    /// All causes but [`None`](Self::None).
    pub const ALL: [Self; 7] =
        [Self::Disk, Self::Host, Self::Zero, Self::LatePrefetch, Self::Frames, Self::WriteBack, Self::Guard];

    /// The cause in words.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Disk => "disk fault",
            Self::Host => "host fault",
            Self::Zero => "zero fill",
            Self::LatePrefetch => "late prefetch",
            Self::Frames => "no free frame",
            Self::WriteBack => "write back of a victim",
            Self::Guard => "held by another guard",
        }
    }
}

/// What a request was granted: pins of all its pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Granted {
    /// What it waited for.
    pub cause: WaitCause,
    /// When the bytes of lent pages are there; `None` if no page was lent. Only for [requests for a
    /// stream](Purpose::ReadOnStream).
    pub after: Option<FillPoint>,
    /// Frames that the request has spent of its scope's purse. Given back with [`Pager::unspent`] when the pins have
    /// ended.
    pub spent: u32,
}

/// How a request was received.
#[derive(Debug)]
pub enum Submitted {
    /// Every page is pinned. The bytes of lent pages are there only [after](Granted::after) a point.
    Ready(Granted),
    /// [`Effects::done`] will name this request.
    Waiting(RequestId),
}

/// What the pager wants done, in the order of the fields, after the latch is released (except `protect`).
#[derive(Debug, Default)]
pub struct Effects {
    /// Frames whose bytes must no longer be reachable. Done before the latch is released.
    pub protect: Vec<FrameId>,
    /// Moves to start. Each is answered by [`Pager::complete`].
    pub moves: Vec<Move>,
    /// Moves already started that have become more urgent.
    pub raised: Vec<(MoveId, Priority)>,
    /// Frames whose memory goes back to the system. Each is answered by [`Pager::discarded`] or
    /// [`Pager::discard_refused`].
    pub discard: Vec<FrameId>,
    /// Requests that ended.
    pub done: Vec<(RequestId, Result<Granted, Error>)>,
    /// Segments that nothing refers to any more and that have nothing in flight.
    pub released: Vec<SegmentId>,
}

impl Effects {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.protect.is_empty()
            && self.moves.is_empty()
            && self.raised.is_empty()
            && self.discard.is_empty()
            && self.done.is_empty()
            && self.released.is_empty()
    }
}

/// Where a segment's pages come from when no tier holds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// A model file. Every page is always on disk, and none is ever dirty.
    File,
    /// Read-write memory: zero bytes until written, in the scratch file after the first write back.
    ReadWrite,
    /// A model file of which a program writes its own copy: every page is always on disk, in the model file until the
    /// first write back, in the scratch file after it.
    CopyOnWrite,
}

/// Sizes, in pages.
#[derive(Clone, Copy, Debug)]
pub struct PagerConfig {
    /// Frames of the device tier.
    pub frames: u32,
    /// Frames of the host tier.
    pub host_frames: u32,
    /// Buffers of the staging ring. Unused if `direct_io`.
    pub staging: u32,
    /// Whether disk and device frames exchange bytes directly.
    pub direct_io: bool,
    /// How many pages ahead of use fills start.
    pub lookahead: u32,
    /// Bytes of a page. Used in messages only.
    pub page_bytes: u64,
}

/// What the pager has counted since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PagerStats {
    /// Pages used: one count for each page of each pin.
    pub uses: u64,
    /// Uses that found the page resident since an earlier use.
    pub hits: u64,
    /// Uses that found the page filled ahead and ready.
    pub prefetched: u64,
    /// Uses that found the page being filled.
    pub late: u64,
    /// Uses that found the page absent.
    pub faults: u64,
    /// Fills from disk.
    pub fills_disk: u64,
    /// Fills from the host tier.
    pub fills_host: u64,
    /// Fills with zero bytes.
    pub fills_zero: u64,
    /// Pages that left the device tier.
    pub evictions: u64,
    /// Pages copied from the device tier to the host tier.
    pub demotions: u64,
    /// Dirty pages written to disk.
    pub write_backs: u64,
    /// Pages whose bytes were lost after repeated failures.
    pub poisoned: u64,
    /// Failed fills that were tried once more, because requests had come to wait for them after their moves had
    /// started.
    pub retried: u64,
    /// Requests that ended because scopes would have waited for each other forever.
    pub deadlocks: u64,
    /// Pins that took the latch although every page was resident: somebody waited for these pages or for frames, a
    /// writer or a move had one of the pages, or the scope itself had waiting requests. Not counted: the first use of a
    /// page that was filled ahead. That one takes the latch after it has pinned, to begin the next fill.
    pub latched_hits: u64,
}

impl std::ops::AddAssign for PagerStats {
    fn add_assign(&mut self, more: Self) {
        let Self {
            uses,
            hits,
            prefetched,
            late,
            faults,
            fills_disk,
            fills_host,
            fills_zero,
            evictions,
            demotions,
            write_backs,
            poisoned,
            retried,
            deadlocks,
            latched_hits,
        } = more;
        self.uses += uses;
        self.hits += hits;
        self.prefetched += prefetched;
        self.late += late;
        self.faults += faults;
        self.fills_disk += fills_disk;
        self.fills_host += fills_host;
        self.fills_zero += fills_zero;
        self.evictions += evictions;
        self.demotions += demotions;
        self.write_backs += write_backs;
        self.poisoned += poisoned;
        self.retried += retried;
        self.deadlocks += deadlocks;
        self.latched_hits += latched_hits;
    }
}

/// One pass in progress: what it has used, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WalkerStats {
    /// The walker.
    pub id: WalkerId,
    /// Pages it has used: one count for each page of each pin.
    pub uses: u64,
    /// Those uses that found the page resident since an earlier use, by this walker or another. Each spared one read.
    pub hits: u64,
    /// Where it is in each order that it follows. Empty if it follows none, or if the policy follows none.
    pub places: Vec<WalkerPlace>,
}

/// A walker's counts.
#[derive(Clone, Copy, Debug, Default)]
struct Walked {
    uses: u64,
    hits: u64,
}

/// Frames of a tier, now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FrameStats {
    /// Frames that pages occupy.
    pub used: u64,
    /// Frames of the budget that no page occupies.
    pub free: u64,
    /// Free frames without memory: no page has used them yet, or not since their memory was given back. On the host
    /// device, frames smaller than a huge page get memory together with their neighbours. Such neighbours may still be
    /// counted here.
    pub bare: u64,
    /// Bytes of used frames that hold nothing: a segment's last page may be short, and its frame is whole.
    pub tails: Bytes,
}

/// Bytes of used frames behind the ends of short last pages, by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tails {
    device: u64,
    host: u64,
}

/// Where a page is, for snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageView {
    /// The device tier's state.
    pub device: Snapshot,
    /// The device frame, if the page has one.
    pub frame: Option<FrameId>,
    /// Whether the host tier holds a valid copy.
    pub host: bool,
    /// Whether the disk holds a valid copy.
    pub disk: bool,
}

impl PageView {
    /// The fastest tier that has the page's bytes. `Disk` for a page that no tier has, because nothing was written to
    /// it yet.
    pub fn tier(&self) -> Tier {
        match self.host {
            _ if self.device.is_resident() => Tier::Device,
            true => Tier::Host,
            false => Tier::Disk,
        }
    }
}

/// The state machine. See the [module documentation](self).
#[derive(Debug)]
pub struct Pager {
    config: PagerConfig,
    segments: Slab<SegmentTable>,
    numbers: PageNumbers,
    frames: DeviceFrames,
    host: HostFrames,
    staging: StagingRing,
    policy: Box<dyn Policy>,
    classes: ByClass,
    requests: Slab<Request>,
    /// Requests that wait for frames.
    frame_line: FrameLine,
    /// Requests that wait for pages, by page. No line here is empty.
    page_lines: HashMap<PageId, Line>,
    /// For each watched page, the requests waiting for frames that watch it: see [`FrameLine`]. Watched pages are
    /// absent.
    watched: HashMap<PageId, BTreeSet<RequestId>>,
    /// Pages that only the request tried last keeps from being evicted, because it would pin them. Empty unless that
    /// request failed for want of frames.
    kept: Vec<PageId>,
    /// Pages whose lines are to be served, because something has happened to them.
    moved: Vec<PageId>,
    /// Requests to try again because what they wait for has changed, for example the line they stand in.
    nearly: Vec<RequestId>,
    /// Scopes whose purses are to be served: a frame has come, or one of their requests wants fewer.
    filled: Vec<ScopeId>,
    /// Whether a request wants fewer frames than when the line for frames was last served.
    eased: bool,
    /// How many times a request was looked at to see whether it can go on.
    looks: u64,
    /// Closed while a request waits for frames.
    gate: Arc<Gate>,
    scopes: Slab<Scope>,
    members: Members,
    /// Scopes that hold or claim more than when deadlocks were last looked for.
    grown: Vec<ScopeId>,
    /// Frames set aside for scopes that declared them and have not spent them: the sum of all purses.
    purses: u32,
    /// Frames on their way to purses.
    coming: u32,
    /// The scopes to whose purses these frames go, by key.
    coming_to: BTreeSet<usize>,
    /// Frames owed to purses.
    owed: u32,
    /// The scopes to whose purses they are owed, by key.
    owed_to: BTreeSet<usize>,
    /// Frames that open scopes have declared, spent or not.
    declared: u32,
    /// Frames kept for requests that can never be refused.
    floor: u32,
    barren: Barren,
    /// Requests that wait for the device tier to shrink to its budget.
    shrinking: Vec<RequestId>,
    /// Pages being filled.
    filling: HashMap<PageId, Fill>,
    /// Pages whose fill failed while they were lent. They keep their frames until those pins end.
    spoiled: Vec<PageId>,
    /// Filling pages that have no frame yet, most urgent first.
    awaiting: VecDeque<PageId>,
    /// Frames on their way to the free list: demotions and write backs of victims.
    transit: u32,
    /// Of those, the ones that nobody waits for.
    victims: Victims,
    moves: Slab<MoveRecord>,
    hints: VecDeque<lookahead::Hint>,
    /// Fills that nobody waits for, with or without a frame.
    prefetching: u32,
    /// The page used last. `None` if the policy has since been told of anything else.
    staying: Option<PageId>,
    /// Walkers that have begun and not ended, the default one included. The counts leave out `walked`.
    walkers: HashMap<WalkerId, Walked>,
    /// Counts of the current walker since it became the current one.
    walked: Walked,
    next_walker: u32,
    /// The current walker: the one the policy believes it hears of.
    walker: WalkerId,
    /// Segments whose pages can be dirty. While this is 0, no victim is dirty.
    writable: u32,
    /// How often [`pump`](Self::pump) has run. This is the pager's only clock.
    events: u64,
    /// Pages whose next write back is put off, and the event until which it is.
    put_off: HashMap<PageId, u64>,
    /// Pages whose bytes were lost, and why.
    lost: Vec<(PageId, Error)>,
    closing: bool,
    next_serial: u32,
    next_age: u64,
    /// How often a waiting request may be passed.
    passes: u32,
    /// Requests that stand in a line.
    standing: usize,
    stats: PagerStats,
    tails: Tails,
    trace: Trace,
    /// Uses that have not been taken yet. `None` if uses are not kept.
    uses: Option<PageUses>,
}

/// A fill under way.
#[derive(Debug)]
struct Fill {
    waiters: Vec<RequestId>,
    /// How many of the waiters, counted from the first, waited when the current move was started.
    own: usize,
    priority: Priority,
    moving: Option<MoveId>,
    /// When the bytes are there. Set once the device has taken up the copy.
    taken: Option<FillPoint>,
    /// Whether the fill is for a writer. The writer is then the only waiter.
    locked: bool,
    /// Whether the page has been lent during this fill.
    lent: bool,
    /// Why the move failed. Set only while the page is still lent.
    failed: Option<Error>,
}

impl Fill {
    /// Takes a request from the waiters. Returns whether it was one.
    fn leave(&mut self, waiter: RequestId) -> bool {
        let Some(at) = self.waiters.iter().position(|other| *other == waiter) else { return false };
        self.waiters.remove(at);
        self.own -= usize::from(at < self.own);
        true
    }
}

fn count_tail(sum: &mut u64, tail: u64, had: bool, has: bool) {
    match (had, has) {
        (false, true) => *sum += tail,
        (true, false) => *sum -= tail,
        _ => {}
    }
}

impl Pager {
    /// A pager with all frames free.
    pub fn new(config: PagerConfig, mut policy: Box<dyn Policy>) -> Self {
        policy.resize(config.frames, config.host_frames, config.lookahead);
        Self {
            frames: DeviceFrames::new(config.frames),
            host: HostFrames::new(config.host_frames),
            staging: StagingRing::new(config.staging),
            config,
            policy,
            classes: ByClass::default(),
            segments: Slab::new(),
            numbers: PageNumbers::default(),
            requests: Slab::new(),
            frame_line: FrameLine::default(),
            page_lines: HashMap::new(),
            watched: HashMap::new(),
            kept: Vec::new(),
            moved: Vec::new(),
            nearly: Vec::new(),
            filled: Vec::new(),
            eased: false,
            looks: 0,
            gate: Arc::new(Gate::default()),
            scopes: Slab::new(),
            members: Members::default(),
            grown: Vec::new(),
            purses: 0,
            coming: 0,
            coming_to: BTreeSet::new(),
            owed: 0,
            owed_to: BTreeSet::new(),
            declared: 0,
            floor: 0,
            barren: Barren::default(),
            shrinking: Vec::new(),
            filling: HashMap::new(),
            spoiled: Vec::new(),
            awaiting: VecDeque::new(),
            transit: 0,
            victims: Victims::default(),
            moves: Slab::new(),
            hints: VecDeque::new(),
            prefetching: 0,
            staying: None,
            walkers: HashMap::from([(WalkerId::DEFAULT, Walked::default())]),
            walked: Walked::default(),
            next_walker: 0,
            walker: WalkerId::DEFAULT,
            writable: 0,
            events: 0,
            put_off: HashMap::new(),
            lost: Vec::new(),
            closing: false,
            next_serial: 0,
            next_age: 0,
            passes: PASSES_MAX,
            standing: 0,
            stats: PagerStats::default(),
            tails: Tails::default(),
            trace: Trace::default(),
            uses: None,
        }
    }

    /// Replaces the bound [`PASSES_MAX`], for tests that follow every sequence.
    #[doc(hidden)]
    pub fn set_passes(&mut self, passes: u32) {
        self.passes = passes;
    }

    /// Adds a segment of `pages` pages. Returns its page words too: whoever pins the pages shares them.
    pub fn add_segment(&mut self, backing: Backing, class: SegmentClass, pages: u32) -> (SegmentId, PageWords) {
        let table = SegmentTable::new(backing, pages);
        let words = table.words.clone();
        self.writable += u32::from(backing != Backing::File);
        let segment = SegmentId(self.segments.insert(table) as u32);
        self.numbers.add(segment, pages);
        self.host.add_segment(segment, pages);
        self.classes.add(segment, class, pages, &self.numbers);
        self.policy.class(segment, class);
        self.policy.segment(segment, pages);
        (segment, words)
    }

    /// Whether a segment of `pages` pages can be [added](Self::add_segment). A pager holds fewer than 2^32 pages in
    /// all.
    pub fn has_room_for(&self, pages: u32) -> bool {
        self.numbers.has_room(pages)
    }

    fn traced(&mut self, page: PageId, hit: bool, write: bool) {
        if let Some(number) = self.numbers.number(page) {
            self.trace.push(number, hit);
        }
        if let Some(uses) = &mut self.uses {
            uses.push(PageUse { page, write });
        }
    }

    /// Declares the order of use of the default walker. `cyclic` means that it repeats. An empty order withdraws the
    /// plan.
    pub fn declare_plan(&mut self, order: &[PageRun], cyclic: bool, fx: &mut Effects) {
        self.declare_plan_of(WalkerId::DEFAULT, order, cyclic, fx);
    }

    /// Declares the order of use of a walker. Does nothing for a walker that has ended.
    pub fn declare_plan_of(&mut self, walker: WalkerId, order: &[PageRun], cyclic: bool, fx: &mut Effects) {
        if !self.is_walking(walker) {
            return;
        }
        self.staying = None;
        self.tells_of(walker);
        self.policy.declare_runs(order, cyclic);
        self.pump(fx);
    }

    /// Tells of a cycle that walkers may be seen to follow later.
    pub fn know_order(&mut self, order: &[PageRun]) {
        self.policy.know(order);
    }

    /// The walker's uses have no order.
    pub fn declare_unordered(&mut self, walker: WalkerId, fx: &mut Effects) {
        if self.is_walking(walker) {
            self.staying = None;
            self.tells_of(walker);
            self.policy.unordered();
            self.pump(fx);
        }
    }

    /// Begins a walker. Several may walk at a time, each in an order of its own.
    pub fn begin_walker(&mut self) -> WalkerId {
        self.next_walker = self.next_walker.wrapping_add(1).max(1);
        let walker = WalkerId(self.next_walker);
        self.walkers.insert(walker, Walked::default());
        walker
    }

    /// Ends a walker. Uses of it that are recorded later count as the default walker's.
    pub fn end_walker(&mut self, walker: WalkerId, fx: &mut Effects) {
        if walker != WalkerId::DEFAULT && self.is_walking(walker) {
            self.tells_of(WalkerId::DEFAULT);
            self.walkers.remove(&walker);
            self.expect_nothing(walker);
            self.policy.walker_ended(walker);
            self.pump(fx);
        }
    }

    /// How many walkers have begun and not ended, without the default one.
    pub fn walkers(&self) -> usize {
        self.walkers.len() - 1
    }

    /// The counts and the place of each walker: the default walker first, then the others in the order in which they
    /// began.
    pub fn walker_stats(&self) -> Vec<WalkerStats> {
        let mut all: Vec<WalkerStats> = self
            .walkers
            .iter()
            .map(|(id, walked)| {
                let Walked { uses, hits } = if *id == self.walker { self.walked } else { Walked::default() };
                WalkerStats { id: *id, uses: walked.uses + uses, hits: walked.hits + hits, places: Vec::new() }
            })
            .collect();
        all.sort_unstable_by_key(|walker| walker.id);
        for place in self.policy.places() {
            if let Ok(at) = all.binary_search_by_key(&place.walker, |walker| walker.id) {
                all[at].places.push(place);
            }
        }
        all
    }

    /// The order that a walker follows, or one cycle of it; empty if it follows none.
    pub fn order_of(&self, walker: WalkerId) -> Vec<PageId> {
        self.policy.order_of(walker)
    }

    fn is_walking(&self, walker: WalkerId) -> bool {
        self.walkers.contains_key(&walker)
    }

    /// Makes this walker the current one: the policy is told that what follows is this walker's.
    fn tells_of(&mut self, walker: WalkerId) {
        if walker == self.walker {
            return;
        }
        let walker = if self.is_walking(walker) { walker } else { WalkerId::DEFAULT };
        if walker != self.walker {
            let Walked { uses, hits } = std::mem::take(&mut self.walked);
            if let Some(before) = self.walkers.get_mut(&self.walker) {
                before.uses += uses;
                before.hits += hits;
            }
            self.walker = walker;
            self.staying = None;
            self.policy.walker(walker);
        }
    }

    /// Tells the policy that these pages are about to be used as a prefix chain: see [`Policy::chain`].
    pub fn chain(&mut self, runs: &[PageRun]) {
        let pages: Vec<PageId> = runs.iter().flat_map(|run| run.pages()).collect();
        self.policy.chain(&pages);
        if let Some(uses) = &mut self.uses {
            uses.push_chain(pages);
        }
    }

    /// Takes in uses that were logged without the latch. To be called first under each hold of the latch.
    pub fn record(&mut self, log: &AccessLog) {
        self.take_in(log, Part::Marked);
    }

    /// [`record`](Self::record) that misses no earlier use. For callers that count or want all uses.
    pub fn record_all(&mut self, log: &AccessLog) {
        self.take_in(log, Part::All);
    }

    /// [`record`](Self::record) of a part of the log, for callers in no hurry. Returns whether there is more.
    pub fn record_some(&mut self, log: &AccessLog) -> bool {
        self.take_in(log, Part::Some(1 << 10))
    }

    fn take_in(&mut self, log: &AccessLog, part: Part) -> bool {
        log.drain(part, |walker, used, count| {
            self.tells_of(walker);
            self.used(used.page(), used.is_first(), used.is_write(), count);
        })
    }

    /// The gate: it tells pins whether a request waits for frames.
    pub fn gate(&self) -> Arc<Gate> {
        self.gate.clone()
    }

    /// Acts on an edge of a page word, and returns whether it was taken. An illegal edge stops debug and `strict`
    /// builds at once. Other builds give up the page and the requests that wait for it, so that nothing goes on with an
    /// unknown state.
    fn took(&mut self, page: PageId, edge: Result<(), Illegal>, fx: &mut Effects) -> bool {
        let Err(illegal) = edge else { return true };
        invariant!(false, "{page:?}: {illegal}");
        self.condemn(page, &illegal, fx);
        false
    }

    fn condemn(&mut self, page: PageId, illegal: &Illegal, fx: &mut Effects) {
        let error = Error::new(ErrorKind::Internal, format!("page {} of {:?}: {illegal}", page.index.0, page.segment))
            .remedy("report this as a bug; the page's bytes are not trusted any more");
        self.word(page).condemn();
        self.left(page);
        self.stats.poisoned += 1;
        self.lost.push((page, error.clone()));
        for waiter in self.filling.remove(&page).map(|fill| fill.waiters).unwrap_or_default() {
            self.end(waiter, error.clone(), fx);
        }
        self.appeared(page);
        self.changed(page);
    }

    /// Counts `count` uses of a page in a row. `first_use`: the first of them is the page's first since it was filled
    /// ahead.
    fn used(&mut self, page: PageId, first_use: bool, write: bool, count: u32) {
        let first = u64::from(first_use);
        self.stats.uses += u64::from(count);
        self.stats.prefetched += first;
        self.stats.hits += u64::from(count) - first;
        self.walked.uses += u64::from(count);
        self.walked.hits += u64::from(count) - first;
        self.classes.used(page, u64::from(count), first);
        self.traced(page, !first_use, write);
        for _ in 1..count {
            if self.uses.is_none() && self.trace.is_full() {
                // The trace is full, and nobody keeps single uses.
                break;
            }
            self.traced(page, true, write);
        }
        // Neighbouring tensors share a page. The policy hears of such a stay once.
        if self.staying != Some(page) {
            self.policy.accessed(page);
            self.staying = Some(page);
        }
        if write {
            self.policy.written(page);
        }
    }

    /// A page has become resident in the device tier.
    fn entered(&mut self, page: PageId) {
        self.staying = None;
        self.classes.inserted(page, self.numbers.number(page));
        self.policy.inserted(page);
        self.may_go(page);
    }

    /// A page leaves the device tier, or its fill has failed.
    fn left(&mut self, page: PageId) {
        self.classes.removed(page, self.numbers.number(page));
        self.policy.removed(page);
    }

    /// What the tensors of each class have and use, of which there were any.
    pub fn classes(&self) -> Vec<ClassStats> {
        let share = |stats: ClassStats| ClassStats { share: self.policy.share(stats.class).map(u64::from), ..stats };
        self.classes.stats().map(share).collect()
    }

    /// The policy keeps so many frames for the tensors of these classes at least. Returns whether it does.
    pub fn keep_for_classes(&mut self, floors: &[(SegmentClass, u32)]) -> bool {
        self.policy.floors(floors)
    }

    /// The counters.
    pub fn stats(&self) -> PagerStats {
        self.stats
    }

    /// The first uses in order, up to a fixed number.
    pub fn trace(&self) -> Trace {
        self.trace.clone()
    }

    /// Keeps every use from now on, for [`take_uses`](Self::take_uses).
    pub fn keep_uses(&mut self) {
        self.uses.get_or_insert_default();
    }

    /// The uses since the last call. Empty unless they are [kept](Self::keep_uses).
    pub fn take_uses(&mut self) -> PageUses {
        self.uses.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The policy's name, and whether it follows a plan.
    pub fn policy_state(&self) -> (&'static str, bool) {
        (self.policy.name(), self.policy.has_plan())
    }

    /// Frames of the device tier: how many are in use, and how many exist within the budget.
    pub fn device_frames(&self) -> (u32, u32) {
        (self.frames.in_use(), self.frames.active())
    }

    /// Frames of the host tier: how many are in use, and how many exist.
    pub fn host_frames(&self) -> (u32, u32) {
        (self.host.in_use(), self.host.total())
    }

    /// How the frames of the device tier and of the host tier are used.
    pub fn frames(&self) -> (FrameStats, FrameStats) {
        let stats = |(used, total): (u32, u32), bare: u32, tails: u64| FrameStats {
            used: used.into(),
            free: total.saturating_sub(used).into(),
            bare: bare.into(),
            tails: Bytes::new(tails),
        };
        (
            stats(self.device_frames(), self.frames.bare_count(), self.tails.device),
            stats(self.host_frames(), self.host.bare_count(), self.tails.host),
        )
    }

    /// Says that no free frame has memory yet: the device takes it when a page first comes.
    pub fn frames_are_bare(&mut self) {
        self.frames.all_bare();
    }

    /// Sets how many bytes of a new segment's last page do not exist.
    pub fn set_tail(&mut self, segment: SegmentId, bytes: u64) {
        if let Some(table) = self.segments.get_mut(segment.index()) {
            invariant!(
                table.entries.last().is_none_or(|entry| entry.frame().is_none() && entry.host().is_none()),
                "a tail that was counted otherwise"
            );
            table.tail = bytes;
        }
    }

    fn place_frame(&mut self, page: PageId, frame: Option<FrameId>) {
        let tail = self.segments[page.segment.index()].tail_of(page.index);
        let entry = self.entry(page);
        let had = entry.frame().is_some();
        entry.set_frame(frame);
        count_tail(&mut self.tails.device, tail, had, frame.is_some());
    }

    fn place_host(&mut self, page: PageId, host: Option<HostFrameId>) {
        let tail = self.segments[page.segment.index()].tail_of(page.index);
        let entry = self.entry(page);
        let had = entry.host().is_some();
        entry.set_host(host);
        count_tail(&mut self.tails.host, tail, had, host.is_some());
    }

    /// The pages whose valid bytes only the device tier has, by segment, in order.
    pub fn only_on_device(&self) -> Vec<PageRun> {
        let mut runs = Vec::new();
        for (id, segment) in self.segments.iter().filter(|(_, segment)| !segment.dying) {
            let words = segment.words.iter().enumerate();
            let dirty = words.filter(|(_, word)| matches!(word.load().state, State::Dirty | State::WritingBack));
            let segment = SegmentId(id as u32);
            runs.extend(dirty.map(|(index, _)| PageRun { segment, first: PageIndex(index as u32), count: 1 }));
        }
        PageRun::normalize(&mut runs);
        runs
    }

    /// Where the pages of a segment are.
    pub fn view(&self, segment: SegmentId) -> Vec<PageView> {
        self.views(segment, 0..usize::MAX).collect()
    }

    /// Where these pages of a segment are. Pages that the segment does not have are left out.
    pub fn views(&self, segment: SegmentId, pages: Range<usize>) -> impl Iterator<Item = PageView> {
        let table = self.segments.get(segment.index());
        table.into_iter().flat_map(move |table| pages.clone().map_while(|page| table.view(page)))
    }

    /// Where a page is, or `None` if there is no such page.
    pub fn view_of(&self, page: PageId) -> Option<PageView> {
        self.segments.get(page.segment.index())?.view(page.index.index())
    }

    /// The page that a request for these pages would wait for, and the fastest tier that has its bytes. It is the first
    /// page that is not resident, or else the first of all. A page that has no bytes anywhere yet is made in the device
    /// tier.
    pub fn awaited(&self, runs: &[PageRun]) -> Option<(PageId, Tier)> {
        let pages = || runs.iter().flat_map(|run| run.pages());
        let absent = pages().find(|page| !self.word(*page).load().is_resident());
        let page = absent.or_else(|| pages().next())?;
        let entry = &self.segments[page.segment.index()].entries[page.index.index()];
        let tier = match (absent, entry.valid_host(), entry.on_disk()) {
            (None, ..) => Tier::Device,
            (_, Some(_), _) => Tier::Host,
            (_, None, true) => Tier::Disk,
            (_, None, false) => Tier::Device,
        };
        Some((page, tier))
    }

    /// The pages whose bytes were lost, with the causes. A page stays listed until its segment is gone.
    pub fn lost_pages(&self) -> &[(PageId, Error)] {
        &self.lost
    }

    /// Whether no move is in flight and no fill waits for a frame.
    pub fn is_idle(&self) -> bool {
        self.moves.is_empty() && self.awaiting.is_empty()
    }

    /// Whether [`close`](Self::close) was called.
    pub fn is_closing(&self) -> bool {
        self.closing
    }

    /// Stops admitting. Waiting requests fail with `error`, running fills are finished. No move begins afterwards,
    /// except those that already wait for a staging buffer.
    pub fn close(&mut self, error: &Error, fx: &mut Effects) {
        self.closing = true;
        self.hints.clear();
        self.end_all_queued(error, fx);
        for request in self.scopes.iter().filter_map(|(_, scope)| scope.reserving).collect::<Vec<_>>() {
            self.end(request, error.clone(), fx);
        }
        // A fill without a frame may never get one: guards that outlive the closing may hold all frames.
        let frameless = std::mem::take(&mut self.awaiting);
        for page in frameless.iter().copied() {
            let ended = self.word(page).fill_err().map(drop);
            self.took(page, ended, fx);
            // A write back of the host copy may have ended meanwhile. It left it to this fill to put the copy back in
            // its order.
            self.host_copy_read(page, false);
            let Some(fill) = self.filling.remove(&page) else { continue };
            if fill.priority > Priority::WriteBack {
                self.prefetching = self.prefetching.saturating_sub(1);
            }
            for waiter in fill.waiters {
                self.end(waiter, error.clone(), fx);
            }
        }
        // Such a fill may have been the last thing in flight of a segment that nobody refers to.
        for page in frameless {
            self.reap_segment(page.segment, fx);
        }
        self.pump(fx);
    }

    /// Does everything that has become possible.
    pub fn pump(&mut self, fx: &mut Effects) {
        self.events += 1;
        self.release_spoiled(fx);
        self.serve_awaiting(fx);
        self.fill_purses(fx);
        self.retire_frames(fx);
        self.serve_lines(fx);
        if !self.closing {
            self.keep_reserve(fx);
            self.look_ahead(fx);
        }
        // An admission that failed may have left frames free. A page that was evicted may be one that a request waits
        // for.
        self.serve_awaiting(fx);
        while !(self.moved.is_empty()
            && self.nearly.is_empty()
            && self.filled.is_empty()
            && self.grown.is_empty()
            && !self.eased)
        {
            self.look_at_grown(fx);
            self.serve_lines(fx);
            self.serve_awaiting(fx);
        }
        self.raise_victims(fx);
        invariant!(
            self.moved.is_empty() && self.nearly.is_empty() && self.filled.is_empty(),
            "somebody who may go on was not tried"
        );
        invariant!(
            self.gate.is_closed() != self.frame_line.line.is_empty(),
            "the gate does not say who waits for frames"
        );
        invariant!(
            self.frames.free_count() <= self.purses || self.awaiting.is_empty(),
            "a page awaits a frame that is free"
        );
        invariant!(self.purses <= self.frames.free_count(), "what was set aside is not there");
        invariant!(self.frames.free_count() <= self.purses || self.coming == 0, "a purse awaits a frame that is free");
    }

    /// Whether invariant 4 holds.
    fn keeps_promises(&self) -> bool {
        self.wanted() <= self.frames.free_count() + self.transit
    }

    fn word(&self, page: PageId) -> &PageWord {
        &self.segments[page.segment.index()].words[page.index.index()]
    }
}
