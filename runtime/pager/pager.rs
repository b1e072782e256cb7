//! The pager: its state, what it is told and asked, and the pump, which does what has become possible.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use slab::Slab;

use super::access::{AccessLog, PageUse, PageUses, Part};
use super::barren::Barren;
use super::by_class::{ByClass, ClassStats};
use super::config::PagerConfig;
use super::effects::Effects;
use super::fill::Fill;
use super::frames::{DeviceFrames, HostFrames, StagingRing};
use super::hint::Hint;
use super::line::{FrameLine, Line, PASSES_MAX};
use super::move_record::{MoveRecord, Priority};
use super::numbers::PageNumbers;
use super::pin::Gate;
use super::policy::Policy;
use super::policy::opt::Trace;
use super::request::Request;
use super::runs::PageRun;
use super::scope::Scope;
use super::state::{Illegal, PageWord, PageWords, State};
use super::stats::{FrameStats, PagerStats, Tails, Walked, WalkerStats};
use super::table::{Backing, PageEntry, PageView, SegmentTable};
use super::victims::Victims;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{
    Bytes, FrameId, HostFrameId, PageId, PageIndex, RequestId, ScopeId, SegmentClass, SegmentId, Tier, WalkerId,
};

/// The state machine. See the [documentation of the crate](crate).
#[derive(Debug)]
pub struct Pager {
    pub(super) config: PagerConfig,
    pub(super) segments: Slab<SegmentTable>,
    pub(super) numbers: PageNumbers,
    pub(super) frames: DeviceFrames,
    pub(super) host: HostFrames,
    pub(super) staging: StagingRing,
    pub(super) policy: Box<dyn Policy>,
    pub(super) classes: ByClass,
    pub(super) requests: Slab<Request>,
    /// Requests that wait for frames.
    pub(super) frame_line: FrameLine,
    /// Requests that wait for pages, by page. No line here is empty.
    pub(super) page_lines: HashMap<PageId, Line>,
    /// Pages whose lines are to be served, because something has happened to them.
    pub(super) moved: Vec<PageId>,
    /// Requests to try again because what they wait for has changed, for example the line they stand in.
    pub(super) nearly: Vec<RequestId>,
    /// Scopes whose purses are to be served: a frame has come, or one of their requests wants fewer.
    pub(super) filled: Vec<ScopeId>,
    /// Whether there may be more frames than when the line for frames was last served, or a request wants fewer.
    pub(super) eased: bool,
    /// How many times a request was looked at to see whether it can go on.
    pub(super) looks: u64,
    /// Closed while a request waits for frames.
    pub(super) gate: Arc<Gate>,
    pub(super) scopes: Slab<Scope>,
    /// Frames set aside for scopes that declared them and have not spent them: the sum of all purses.
    pub(super) purses: u32,
    /// Frames on their way to purses.
    pub(super) coming: u32,
    /// The scopes to whose purses these frames go, by key.
    pub(super) coming_to: BTreeSet<usize>,
    /// Frames owed to purses.
    pub(super) owed: u32,
    /// The scopes to whose purses they are owed, by key.
    pub(super) owed_to: BTreeSet<usize>,
    /// Frames that open scopes have declared, spent or not.
    pub(super) declared: u32,
    /// Frames kept for requests that can never be refused.
    pub(super) floor: u32,
    pub(super) barren: Barren,
    /// Requests that wait for the device tier to shrink to its budget.
    pub(super) shrinking: Vec<RequestId>,
    /// Pages being filled.
    pub(super) filling: HashMap<PageId, Fill>,
    /// Pages whose fill failed while they were lent. They keep their frames until those pins end.
    pub(super) spoiled: Vec<PageId>,
    /// Filling pages that have no frame yet, most urgent first.
    pub(super) awaiting: VecDeque<PageId>,
    /// Frames on their way to the free list: demotions and write backs of victims.
    pub(super) transit: u32,
    /// Of those, the ones that nobody waits for.
    pub(super) victims: Victims,
    pub(super) moves: Slab<MoveRecord>,
    pub(super) hints: VecDeque<Hint>,
    /// Fills that nobody waits for, with or without a frame.
    pub(super) prefetching: u32,
    /// The page used last. `None` if the policy has since been told of anything else.
    pub(super) staying: Option<PageId>,
    /// Walkers that have begun and not ended, the default one included. The counts leave out `walked`.
    pub(super) walkers: HashMap<WalkerId, Walked>,
    /// Counts of the current walker since it became the current one.
    pub(super) walked: Walked,
    pub(super) next_walker: u32,
    /// The current walker: the one the policy believes it hears of.
    pub(super) walker: WalkerId,
    /// Segments whose pages can be dirty. While this is 0, no victim is dirty.
    pub(super) writable: u32,
    /// How often [`pump`](Self::pump) has run. This is the pager's only clock.
    pub(super) events: u64,
    /// Pages whose next write back is put off, and the event until which it is.
    pub(super) put_off: HashMap<PageId, u64>,
    /// Pages whose bytes were lost, and why.
    pub(super) lost: Vec<(PageId, Error)>,
    pub(super) closing: bool,
    pub(super) next_serial: u32,
    pub(super) next_age: u64,
    /// How often a waiting request may be passed.
    pub(super) passes: u32,
    /// Requests that stand in a line.
    pub(super) standing: usize,
    pub(super) stats: PagerStats,
    pub(super) tails: Tails,
    pub(super) trace: Trace,
    /// Uses that have not been taken yet. `None` if uses are not kept.
    pub(super) uses: Option<PageUses>,
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
            moved: Vec::new(),
            nearly: Vec::new(),
            filled: Vec::new(),
            eased: false,
            looks: 0,
            gate: Arc::new(Gate::default()),
            scopes: Slab::new(),
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

    pub(super) fn traced(&mut self, page: PageId, hit: bool, write: bool) {
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

    pub(super) fn is_walking(&self, walker: WalkerId) -> bool {
        self.walkers.contains_key(&walker)
    }

    /// Makes this walker the current one: the policy is told that what follows is this walker's.
    pub(super) fn tells_of(&mut self, walker: WalkerId) {
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
    pub(super) fn took(&mut self, page: PageId, edge: Result<(), Illegal>, fx: &mut Effects) -> bool {
        let Err(illegal) = edge else { return true };
        invariant!(false, "{page:?}: {illegal}");
        self.condemn(page, &illegal, fx);
        false
    }

    pub(super) fn condemn(&mut self, page: PageId, illegal: &Illegal, fx: &mut Effects) {
        let error = Error::new(ErrorKind::Internal, format!("page {} of {:?}: {illegal}", page.index.0, page.segment))
            .remedy("report this as a bug; the page's bytes are not trusted any more");
        self.word(page).condemn();
        self.left(page);
        self.stats.poisoned += 1;
        self.lost.push((page, error.clone()));
        for waiter in self.filling.remove(&page).map(|fill| fill.waiters).unwrap_or_default() {
            self.end(waiter, error.clone(), fx);
        }
        self.changed(page);
    }

    /// Counts `count` uses of a page in a row. `first_use`: the first of them is the page's first since it was filled
    /// ahead.
    pub(super) fn used(&mut self, page: PageId, first_use: bool, write: bool, count: u32) {
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
    pub(super) fn entered(&mut self, page: PageId) {
        self.staying = None;
        self.classes.inserted(page, self.numbers.number(page));
        self.policy.inserted(page);
        self.may_go(page);
    }

    /// A page leaves the device tier, or its fill has failed.
    pub(super) fn left(&mut self, page: PageId) {
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

    pub(super) fn place_frame(&mut self, page: PageId, frame: Option<FrameId>) {
        let tail = self.segments[page.segment.index()].tail_of(page.index);
        let entry = self.entry(page);
        let had = entry.frame().is_some();
        entry.set_frame(frame);
        count_tail(&mut self.tails.device, tail, had, frame.is_some());
    }

    pub(super) fn place_host(&mut self, page: PageId, host: Option<HostFrameId>) {
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
        // A page whose write back was put off, and one that a policy has left out, can go without an event of its own.
        self.eased |= !self.put_off.is_empty() || self.barren.heard.is_none();
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
        while !(self.moved.is_empty() && self.nearly.is_empty() && self.filled.is_empty())
            || self.eased && !self.frame_line.line.is_empty()
        {
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
    pub(super) fn keeps_promises(&self) -> bool {
        self.wanted() <= self.frames.free_count() + self.transit
    }

    pub(super) fn word(&self, page: PageId) -> &PageWord {
        &self.segments[page.segment.index()].words[page.index.index()]
    }
}
