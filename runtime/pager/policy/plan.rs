//! Following plans: the orders in which pages will be used, declared or recognised.
//!
//! Walkers follow a plan: passes in progress, each at its own place. Uses without a named walker are the default
//! walker's. Walkers that declare the same order, or that are seen to use pages in a known order, follow one plan.
//!
//! # Which pages stay
//!
//! On a cycle of `n` pages with `m < n` frames, evicting the page whose next use is farthest (Belady) is optimal for
//! faults on demand. With fills ahead of use it is not enough. A filler that always fetches the next missing page
//! replaces each page right after its use, and moves all `n` pages every pass. And a resident block of consecutive
//! pages leaves the disk idle while it is computed on. So the frames are divided: `s` of them stream, the other `m - s`
//! keep pages for good, chosen so that the streamed pages lie evenly among them. Each pass then moves `n - (m - s)`
//! pages, and every stall can hide behind resident compute. Pages used more than once a cycle are kept first.
//!
//! Behind each walker there is a gap: the pages that it has used and that the next walker behind it has still to use.
//! Keeping all pages of a gap takes as many frames as the gap has pages, and saves the next walker all of its fills. So
//! gaps are kept whole, the shortest in time first, as long as frames last. Of the first gap that does not fit (the
//! *marginal* one) a part of the pages is kept, evenly spread as above. Pages that are used later than that are not
//! kept. A walker alone has one gap, the whole cycle. Walkers that are close together have one long gap behind the last
//! of them, and short gaps between them.
//!
//! # Which page goes
//!
//! In this order; within groups 2 to 5, pages with the farthest next use by any walker go first:
//!
//! 1. pages that no followed plan names, beyond the frames that are [theirs](super::beside), which are none at first:
//!    least recently used first, or, if some are theirs, as by policy `auto`; as policy `model`, the one with the least
//!    [score](super::scores) first;
//! 2. pages that are used later than those of the marginal gap;
//! 3. streamed pages of the marginal gap;
//! 4. kept pages of the marginal gap;
//! 5. pages of gaps that are kept whole;
//! 6. a page that was filled ahead and is expected behind a walker, or that two parts of a tensor share; if there are
//!    several walkers, a page that two tensors share, of which one has used only the first.
//!
//! A fill ahead of use never takes a page that is used sooner than the page it fills, and never a kept page for a
//! streamed one.
//!
//! Where nothing is filled ahead and there is no host tier, no page is kept: all pages go by farthest next use.
//!
//! # When the order changes
//!
//! Each use is compared with the one that is expected of its walker, but for keys and values that no plan names: they
//! come in between, as many as there are, and are part of no order that is recognised. A small skip moves the walker's
//! place, and what it passed over is expected [behind](super::place::Behind) it for a while: threads that share a
//! tensor begin at parts of it. Strays are ignored. A new position that holds for a few uses is taken over. When most
//! uses are unexpected the walker is suspended, and its place is ignored. That ends when a few uses in a row follow the
//! plan again, when the walker is seen to follow another plan, or when its recorder has recognised a new cycle.
//!
//! # Without an order
//!
//! While no walker follows a plan, pages leave as by policy [`auto`](super::auto), and nothing is filled ahead. So they
//! do while all plans that are followed were recognised and fit, beside all keys and values: such a cycle may be a
//! beginning that many requests share, and says nothing about other pages.
//!
//! A repeated part of a trace may look like a cycle. So recognised plans are judged: their *merit* is the pages that
//! did not have to move, beyond those of `auto`'s shadow, while they decided what leaves and shortly after; a page that
//! was filled ahead has moved. A plan that is followed for as many uses in a row as there are frames, all as expected,
//! is no such part, and a debt from before is forgiven. If the merit falls too low, recognised plans are put on
//! *probation*: each one has to be followed for some time before it decides what leaves and is filled ahead. Each
//! further failure makes that time longer.
//!
//! That policy is made at the first search for a page without a declared plan, or when a chain is declared: until then
//! it would cost time and memory for nothing. It starts with the resident pages, in order of use. It is told of all
//! uses until a plan has decided what leaves for a while; then it is dropped, except for which candidate was live. For
//! the first uses after such a plan, pages leave in LRU order. Policy `model` does without `auto`: before there are
//! plans it goes by scores, and while all walkers are suspended by recency.
//!
//! # Speeds
//!
//! A walker's speed is its recent share of all uses. A walker without uses stands still, and is ignored until it goes
//! on.

use std::collections::BinaryHeap;

use slab::Slab;
use smallvec::SmallVec;

use super::active::{Active, Keep, Steps, Stopped, offer_each};
use super::auto::{AutoPolicy, Learned};
use super::beside::{Beside, NAMED, Sizes, UNNAMED};
use super::cycle::CycleRecorder;
use super::names::Names;
use super::outside::{Offered, Outside};
use super::place::{NEVER, Place, RESYNC_RUN, Stretch};
use super::standing::Standing;
use super::{Policy, Take, WalkerPlace, Want};
use crate::PageRun;
use crate::bits::Bits;
use crate::ids::{PageId, SegmentClass, SegmentId, WalkerId};
use crate::numbers::PageNumbers;
use crate::order::Order;
use crate::steps::step;

/// How many cycles of a recognised plan are followed before its uses are no longer recorded. Doubled each time that the
/// walker strays from such a plan, up to `DOUBT_MAX`.
const DOUBT: u64 = 4;
const DOUBT_MAX: u64 = 1 << 10;
/// Frames that streaming keeps beyond the lookahead and one unit, for uses that the plan does not name.
const STREAM_SLACK: u32 = 2;
/// Places of a page in a plan at which a walker that follows none is looked for.
const LEADS: usize = 8;
/// How many plans without walkers are kept, so that the next pass need not be learned again.
const LEFT: usize = 4;
/// Uses between looks at speeds: an eighth of all planned pages, within these bounds.
const EPOCH_MIN: u64 = 64;
const EPOCH_MAX: u64 = 1 << 16;
/// After a plan, `auto` is made once as many uses as this part of the resident pages followed none. So a use pays for
/// telling it of this many pages at the most, however often plans end.
const AFTERWARDS: usize = 8;
/// Once so many uses in a row for each frame followed plans, `auto` is of no use any more.
const KEPT: u64 = 4;
/// The merit of recognised plans, in parts of the frames: below the least they have failed, and more than the most does
/// not count. On a cycle, the hits of a pass may come at its end, and those of the shadow at its beginning. So a good
/// plan may be behind by a part of the frames.
const MERIT_MIN: f64 = -1.0;
const MERIT_MAX: f64 = 1.0;
/// For so many uses for each frame after a recognised plan, hits still count for or against it: pages that it let go
/// are missed.
const BLAMED: u64 = 2;
/// The longest probation of a recognised plan, in uses for each frame; the first is one. Each is so many times as long
/// as the one before.
const PROBATION_MAX: u64 = 16;
const PROBATION_GROWS: u64 = 4;
/// The speed of a walker that makes every use.
const FULL_SPEED: u64 = 1 << 16;
/// The weight of a walker of full speed: the resolution of speeds.
const FULL_WEIGHT: u64 = 1 << 4;

/// Follows the orders in which pages will be used, declared or recognised. Where there is none, pages leave as by
/// [`PolicyKind::Auto`](super::PolicyKind::Auto).
#[derive(Debug)]
pub struct PlanPolicy {
    frames: u32,
    host_frames: u32,
    lookahead: u32,
    unit: u32,
    /// Every resident page, in order of use.
    recency: Order,
    names: Names,
    plans: Slab<Active>,
    /// The resident pages that no plan of `followed` names.
    outside: Outside,
    /// How many frames are for the pages of `outside`, and which of them go; made once one of them has missed.
    beside: Option<Box<Beside>>,
    /// Frames that pages of plans, and the others, have at least.
    floors: [u32; 2],
    /// The page that was wanted last, if it has not come.
    coming: Option<u32>,
    keys: Keys,
    /// Orders the resident pages, which are those of `recency`, where no plan decides what leaves.
    auto: Option<Box<AutoPolicy>>,
    /// What the last one had learned, while there is none.
    learned: Option<Learned>,
    /// Uses in a row for which a plan decided what leaves, and for which none did.
    planned: usize,
    unplanned: usize,
    /// How many uses a recognised plan has to be followed before it decides what leaves.
    probation: u64,
    /// What recognised plans brought since they last failed, in hits for each frame.
    merit: f64,
    /// The plans that were followed at the last search for a page; `None` if one of them is gone.
    followed: Option<SmallVec<[usize; 8]>>,
    /// Pages filled ahead and not used yet, by number.
    ahead: Bits,
    /// Pages that walkers expect to use, and have not used yet, by number. They are outside of plans, mostly.
    expected: Bits,
    /// Whether pages may be filled ahead for a walker that has passed them, or whose place is not known.
    astray: bool,
    /// Sorted by id: the default walker is first.
    walkers: Vec<Walk>,
    /// The walker that uses belong to now.
    current: usize,
    /// Uses since the last look at speeds; counted only while there are several walkers.
    uses: u64,
    epoch: u64,
    /// How many plans have been left so far.
    left: u64,
    /// How many plans there have been so far.
    serials: u64,
    /// How many uses each walker's recorder may remember.
    share: usize,
}

/// The segments of keys and values.
#[derive(Debug, Default)]
struct Keys {
    /// One that is about to be added.
    announced: Option<SegmentId>,
    /// By segment: its pages if it is one of them, or 0.
    segments: Vec<u32>,
    pages: u64,
}

impl Keys {
    fn has(&self, segment: SegmentId) -> bool {
        self.segments.get(segment.index()).is_some_and(|pages| *pages > 0)
    }

    fn add(&mut self, segment: SegmentId, pages: u32) {
        self.remove(segment);
        if self.announced.take() == Some(segment) {
            if self.segments.len() <= segment.index() {
                self.segments.resize(segment.index() + 1, 0);
            }
            self.segments[segment.index()] = pages;
            self.pages += u64::from(pages);
        }
    }

    fn remove(&mut self, segment: SegmentId) {
        let pages = self.segments.get_mut(segment.index()).map_or(0, std::mem::take);
        self.pages -= u64::from(pages);
    }

    /// Frames that they leave to other pages, if all of them are resident.
    fn left(&self, frames: u32) -> u32 {
        u64::from(frames).saturating_sub(self.pages) as u32
    }
}

/// A walker, whether it follows a plan or not.
#[derive(Debug)]
struct Walk {
    id: WalkerId,
    plan: Option<usize>,
    recorder: CycleRecorder,
    /// How many cycles of a recognised plan the walker has to follow before its uses are no longer recorded. Until then
    /// the plan may be a part of a longer cycle, repeated within it.
    doubt: u64,
    /// For a walker that follows no plan: the plan and the position of its last use, and how many uses in a row came in
    /// that order.
    lead: Option<(usize, usize, u32)>,
    /// For a walker that follows no plan: the page used last.
    last: Option<u32>,
    /// The walker's recent share of all uses, in parts of [`FULL_SPEED`].
    speed: u64,
    /// Uses since the last look at speeds.
    uses: u64,
    /// Whether its uses have no order, as the program says: then nothing is recognised.
    unordered: bool,
    /// Pages that it expects to use, by number.
    expected: Vec<u32>,
    /// Whether the walker's uses may be recorded: not while it follows a declared plan and has never strayed from it.
    records: bool,
}

impl Walk {
    fn new(id: WalkerId, share: usize) -> Self {
        let recorder = CycleRecorder::new(share);
        Self {
            id,
            plan: None,
            recorder,
            doubt: DOUBT,
            lead: None,
            last: None,
            speed: 0,
            uses: 0,
            unordered: false,
            expected: Vec::new(),
            records: true,
        }
    }
}

/// How gaps behind walkers are divided, by the distance of the page at the end of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bounds {
    /// Gaps up to this distance are kept whole.
    whole: u64,
    /// The distance at which the marginal gap ends; [`NEVER`] if no gap is longer.
    marginal: u64,
    /// The marginal gap's plan, and how many of the plan's pages are to be kept.
    keeps: Option<(usize, usize)>,
}

/// A page that may go. The greatest candidate goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u8,
    distance: u64,
    /// The index of its plan among the followed plans.
    nth: usize,
    position: usize,
    stretch: Stretch,
}

/// The followed plans, and where their walkers stand.
type Followed = SmallVec<[(usize, Standing); 2]>;

/// A search for a page that may go, by the places of all walkers.
#[derive(Debug)]
struct Search {
    bounds: Bounds,
    /// Pages with this distance or less do not go.
    floor: Option<u64>,
    for_kept: bool,
    /// Pages that a walker is about to use a second time.
    staying: SmallVec<[u32; 8]>,
    /// Pages that could not be taken: the index of the plan among the followed ones, and the position.
    skipped: Vec<(usize, usize)>,
    /// The same, of positions at which the page is not used next: another position or another plan now uses it sooner.
    misplaced: Vec<(usize, usize)>,
}

impl Bounds {
    /// The rank of a page: the highest goes first, and within a rank the greatest distance.
    fn rank(&self, distance: u64, kept: bool) -> u8 {
        match distance {
            later if later > self.marginal => 3,
            soon if soon <= self.whole => 0,
            _ if kept => 1,
            _ => 2,
        }
    }
}

/// The most pages of one unit that are streamed, if `frames` of `pages` are resident and the streamed pages lie evenly
/// among the kept ones.
fn streamed_of_unit(unit: u32, frames: u32, pages: u32) -> u32 {
    let streamed = u64::from(unit) * u64::from(pages - frames.min(pages)) / u64::from(pages.max(1));
    (streamed as u32 + 2).min(unit)
}

/// How many pages of a plan that names `pages` stay for good, with `frames` in the device tier, fills that start
/// `lookahead` pages ahead, and requests that pin at most `unit` pages. The other pages stream.
fn stay(frames: u32, pages: u32, lookahead: u32, unit: u32) -> u32 {
    if pages <= frames {
        return frames;
    }
    let streaming = lookahead.saturating_add(streamed_of_unit(unit, frames, pages)).saturating_add(STREAM_SLACK);
    frames.saturating_sub(streaming)
}

/// How many pages a pass finds resident if it uses each of `pages` once and nothing else: the pages that stay, and the
/// pages in the frames that streaming keeps for uses that the plan does not name. Without such uses these frames hold
/// the pages used longest ago, which are the next to be used.
pub fn found(frames: u32, pages: u32, lookahead: u32, unit: u32) -> u32 {
    let stay = stay(frames, pages, lookahead, unit);
    if stay < frames { (stay + STREAM_SLACK).min(frames) } else { stay }
}

/// Whether a search for this purpose has to offer every page before it gives up. A frame for which no request waits is
/// not worth a look at all pages.
fn must_offer_all(want: Want) -> bool {
    matches!(want, Want::Demand | Want::Room | Want::Memory)
}

fn is_expected(page: PageId, expected: &Bits, numbers: &PageNumbers) -> bool {
    numbers.number(page).is_some_and(|number| expected.contains(number as usize))
}

/// Whether none of these plans names the page.
fn none_names(plans: &Slab<Active>, of: &[usize], number: u32) -> bool {
    !of.iter().any(|plan| plans[*plan].names(number))
}

impl PlanPolicy {
    /// Makes a policy without a plan.
    pub fn new() -> Self {
        Self::with(Outside::new())
    }

    /// Makes a policy without a plan, by which pages that no plan names go by how often and how lately they were used.
    pub fn of_model() -> Self {
        Self::with(Outside::by_worth())
    }

    fn with(outside: Outside) -> Self {
        let share = CycleRecorder::share(1);
        Self {
            frames: 0,
            host_frames: 0,
            lookahead: 0,
            unit: 1,
            recency: Order::new(),
            names: Names::default(),
            plans: Slab::new(),
            outside,
            beside: None,
            floors: [0; 2],
            coming: None,
            keys: Keys::default(),
            auto: None,
            learned: None,
            planned: 0,
            unplanned: usize::MAX,
            probation: 0,
            merit: 0.0,
            followed: None,
            ahead: Bits::default(),
            expected: Bits::default(),
            astray: false,
            walkers: vec![Walk::new(WalkerId::DEFAULT, share)],
            current: 0,
            uses: 0,
            epoch: EPOCH_MIN,
            left: 0,
            serials: 0,
            share,
        }
    }

    /// If the place of exactly one walker is known: its plan, and its index among the plan's places.
    fn alone(&self) -> Option<(usize, usize)> {
        let mut known = self.plans.iter().flat_map(|(plan, active)| {
            let places = active.places.iter().enumerate().filter(|(_, place)| place.is_known());
            places.map(move |(at, _)| (plan, at))
        });
        let first = known.next()?;
        known.next().is_none().then_some(first)
    }

    fn resize_beside(&mut self) {
        if let Some(beside) = &mut self.beside {
            beside.resize(Sizes { frames: self.frames, unit: self.unit }, self.recency.numbers());
        }
    }

    /// Frames for pages of plans.
    fn for_plans(&self) -> u32 {
        self.frames - self.beside.as_ref().map_or(0, |beside| beside.room())
    }

    /// Whether Belady's rule alone is best, so that no page is kept: nothing is filled ahead and there is no host tier.
    fn on_demand(&self) -> bool {
        self.lookahead == 0 && self.host_frames == 0
    }

    /// Chooses the pages that stay, after plans, walkers or sizes have changed. With several walkers, a change of at
    /// most a sixteenth of a plan is `tolerated`.
    fn divide_all(&mut self, tolerated: bool) {
        let alone = self.alone();
        let bounds = self.bounds(&self.standing());
        let all: u64 = self.plans.iter().map(|(_, active)| u64::from(active.planned)).sum();
        let frames = self.for_plans();
        for (plan, active) in &mut self.plans {
            let streams = self.lookahead > 0 || self.host_frames > 0;
            let keeps = match bounds.keeps {
                _ if !streams || alone.is_some_and(|(alone, _)| alone != plan) => 0,
                Some((marginal, keeps)) if alone.is_none() && marginal == plan => keeps,
                _ => stay(frames, active.planned, self.lookahead, self.unit) as usize,
            };
            let tolerated =
                tolerated && alone.is_none() && keeps.abs_diff(active.keeping) <= active.planned as usize / 16;
            let keeps = if tolerated { active.keeping } else { keeps };
            let host = u64::from(self.host_frames) * u64::from(active.planned) / all.max(1);
            active.divide(keeps, host as usize);
        }
    }

    /// Where the walkers of the followed plans stand.
    fn standing(&self) -> Followed {
        let all = self.plans.iter().map(|(plan, active)| (plan, active.standing()));
        all.filter(|(_, standing)| !standing.is_empty()).collect()
    }

    /// Which gaps behind walkers are kept.
    fn bounds(&self, followed: &Followed) -> Bounds {
        // For each gap: its distance, how many pages it has, and its plan.
        let mut gaps: SmallVec<[(u64, usize, usize); 16]> = SmallVec::new();
        for (plan, standing) in followed {
            gaps.extend(standing.gaps().map(|(distance, pages)| (distance, pages, *plan)));
        }
        gaps.sort_unstable();
        let frames = self.for_plans();
        let mut left = frames as usize;
        if !self.on_demand() {
            let planned = followed.iter().map(|(plan, _)| self.plans[*plan].planned).fold(0, u32::saturating_add);
            let unit = (streamed_of_unit(self.unit, frames, planned) as usize).saturating_mul(gaps.len());
            left = left.saturating_sub(unit.saturating_add(self.lookahead as usize + STREAM_SLACK as usize));
        }
        let mut whole = 0;
        for (nth, (distance, pages, plan)) in gaps.iter().enumerate() {
            if *pages > left {
                let keeps = self.plans[*plan].planned as usize * left / pages;
                let marginal = if nth + 1 == gaps.len() { NEVER } else { *distance };
                let keeps = if self.on_demand() { 0 } else { keeps };
                return Bounds { whole, marginal, keeps: Some((*plan, keeps)) };
            }
            left -= pages;
            whole = *distance;
        }
        Bounds { whole: NEVER, marginal: NEVER, keeps: None }
    }

    /// Makes the current walker follow this order from here on. Returns the plan, and the position in it.
    fn follow(&mut self, steps: Steps, declared: bool) -> Option<(usize, usize)> {
        let known = self.plans.iter().find_map(|(plan, active)| Some((plan, active.beginning_of(&steps)?)));
        let found = known.or_else(|| Some((self.add_plan(steps)?, 0)));
        match found {
            Some((plan, start)) => {
                self.plans[plan].declared |= declared;
                self.join(plan, start, declared);
            }
            None => self.leave(self.current, declared),
        }
        found
    }

    /// Adds a plan that nobody follows yet. `None` if there is nothing to follow.
    fn add_plan(&mut self, steps: Steps) -> Option<usize> {
        let mut new = Active::new(steps)?;
        self.file_all(&mut new);
        self.serials += 1;
        new.serial = self.serials;
        Some(self.plans.insert(new))
    }

    /// Forgets the current walker's recorded uses: its order is declared now.
    fn begin_anew(&mut self) {
        let walk = &mut self.walkers[self.current];
        walk.recorder.clear();
        (walk.doubt, walk.unordered) = (DOUBT, false);
    }

    /// Files the resident pages in a new plan.
    fn file_all(&self, active: &mut Active) {
        let standing = active.standing();
        step(self.recency.len());
        for number in self.recency.present_numbers().filter(|number| active.names(*number)).collect::<Vec<_>>() {
            active.file(number, Some(&standing));
        }
    }

    /// Puts the current walker at this position of a plan. The plan that it leaves is removed if it is `gone` for good
    /// and has no other walker.
    fn join(&mut self, plan: usize, position: usize, gone: bool) {
        self.take_out(self.current, gone, Some(plan));
        let walk = &mut self.walkers[self.current];
        let active = &mut self.plans[plan];
        let mut place = Place::new(walk.id, 1);
        if active.declared {
            place.followed = u64::MAX;
        }
        (walk.plan, walk.lead, walk.records) = (Some(plan), None, !active.declared);
        let at = active.places.partition_point(|other| other.walker < place.walker);
        active.places.insert(at, place);
        active.go_to(at, position as u64);
        self.set_off();
        self.walkers_changed();
        self.plans[plan].settle();
    }

    /// Takes a walker out of its plan. A plan without walkers is kept for the next one, unless it is `gone` for good.
    fn leave(&mut self, walker: usize, gone: bool) {
        if self.walkers[walker].plan.is_some() {
            self.take_out(walker, gone, None);
            self.walkers_changed();
        }
    }

    /// Takes walkers out of plans that they have finished.
    fn leave_ended(&mut self) {
        for walker in 0..self.walkers.len() {
            let walk = &self.walkers[walker];
            let ended = walk.plan.is_some_and(|plan| {
                let active = &self.plans[plan];
                active.place_of(walk.id).is_some_and(|at| active.exhausted(at))
            });
            if ended {
                self.leave(walker, true);
            }
        }
    }

    /// Takes a walker out of its plan. A plan without walkers is removed if it is `gone` or no cycle, unless it is
    /// `kept`.
    fn take_out(&mut self, walker: usize, gone: bool, kept: Option<usize>) {
        let walk = &mut self.walkers[walker];
        let Some(plan) = walk.plan.take() else { return };
        walk.recorder.clear();
        walk.records = true;
        self.astray = true;
        let active = &mut self.plans[plan];
        active.places.retain(|place| place.walker != walk.id);
        active.settle();
        if active.places.is_empty() {
            self.left += 1;
            active.left = self.left;
            if kept != Some(plan) && (gone || !active.cyclic) {
                self.remove_plan(plan);
            }
        }
    }

    /// Walkers have joined plans or left them: adjusts weights, plans and shares.
    fn walkers_changed(&mut self) {
        self.weigh();
        self.forget_left();
        self.share_memory();
        self.divide_all(true);
    }

    /// Divides the recorders' memory among the walkers that may have uses to record. Called when their number changes.
    fn share_memory(&mut self) {
        let share = CycleRecorder::share(self.walkers.iter().filter(|walk| walk.records).count());
        if share != self.share {
            self.share = share;
            self.walkers.iter_mut().for_each(|walk| walk.recorder.remember_most(share));
        }
    }

    fn forget_left(&mut self) {
        let left = self.plans.iter().filter(|(_, active)| active.places.is_empty());
        let (count, oldest) = (left.clone().count(), left.min_by_key(|(_, active)| active.left));
        if let Some((oldest, _)) = oldest.filter(|_| count > LEFT) {
            self.remove_plan(oldest);
        }
    }

    fn remove_plan(&mut self, plan: usize) {
        self.plans.remove(plan);
        if self.followed.as_ref().is_some_and(|followed| followed.contains(&plan)) {
            self.followed = None;
        }
        for walk in &mut self.walkers {
            walk.records |= walk.plan == Some(plan);
            walk.plan = walk.plan.filter(|own| *own != plan);
            walk.lead = walk.lead.filter(|lead| lead.0 != plan);
        }
    }

    /// The index of a walker, or where it would be.
    fn find_walker(&self, walker: WalkerId) -> Result<usize, usize> {
        self.walkers.binary_search_by_key(&walker, |walk| walk.id)
    }

    /// The current walker stood still: assume that it goes as fast as the others.
    fn set_off(&mut self) {
        let moving = self.walkers.iter().filter(|walk| walk.speed > 0).count() as u64;
        let walk = &mut self.walkers[self.current];
        if walk.speed == 0 {
            walk.speed = FULL_SPEED / (moving + 1);
        }
    }

    /// Bytes that all recorders have allocated.
    #[cfg(test)]
    pub(super) fn recorded_bytes(&self) -> usize {
        self.walkers.iter().map(|walk| walk.recorder.bytes()).sum()
    }

    /// Of each walker that follows a plan, its weight.
    #[cfg(test)]
    pub(super) fn weights(&self) -> Vec<(WalkerId, u64)> {
        let places = self.plans.iter().flat_map(|(_, active)| active.places.iter());
        places.filter(|place| !place.suspended).map(|place| (place.walker, place.weight)).collect()
    }

    /// Sets the weight of each walker's place, by its speed.
    fn weigh(&mut self) {
        let mut changed: SmallVec<[usize; 8]> = SmallVec::new();
        for walk in &self.walkers {
            let Some(plan) = walk.plan else { continue };
            let active = &mut self.plans[plan];
            let Some(at) = active.place_of(walk.id) else { continue };
            let place = &mut active.places[at];
            let was_known = place.is_known();
            place.weight = (FULL_SPEED * FULL_WEIGHT).checked_div(walk.speed).unwrap_or(0);
            if place.is_known() != was_known && !changed.contains(&plan) {
                changed.push(plan);
            }
            self.astray |= was_known && !place.is_known();
        }
        for plan in changed {
            self.plans[plan].settle();
        }
    }

    /// Counts a use of the current walker, if there are several.
    fn count(&mut self) {
        if self.walkers.len() == 1 {
            return;
        }
        let walk = &mut self.walkers[self.current];
        walk.uses += 1;
        self.uses += 1;
        if walk.speed == 0 {
            self.set_off();
            self.weigh();
        }
        if self.uses < self.epoch {
            return;
        }
        for walk in &mut self.walkers {
            let share = walk.uses * FULL_SPEED / self.uses;
            walk.speed = (3 * walk.speed + share) / 4;
            walk.uses = 0;
        }
        self.uses = 0;
        let planned: u64 =
            self.plans.iter().filter(|(_, active)| active.is_followed()).map(|(_, active)| active.len()).sum();
        self.epoch = (planned / 8).clamp(EPOCH_MIN, EPOCH_MAX);
        self.weigh();
        self.follow_gaps(planned as usize / 16);
    }

    /// Chooses anew the pages that stay in the marginal gap, if their number changes by more than `slack`.
    fn follow_gaps(&mut self, slack: usize) {
        if let Some((plan, keeps)) = self.bounds(&self.standing()).keeps {
            let active = &mut self.plans[plan];
            if keeps.abs_diff(active.keeping) > slack {
                active.divide(keeps, active.hosting);
            }
        }
    }

    /// If the current walker, which follows no plan, is seen to follow a known one, it joins that plan. Returns whether
    /// it did.
    fn finds_a_plan(&mut self, number: u32) -> bool {
        let walk = &mut self.walkers[self.current];
        let last = walk.last.replace(number);
        let next = walk.lead.filter(|(plan, position, _)| {
            let active = &self.plans[*plan];
            let next = position + 1;
            let next = if next == active.order.len() && active.cyclic { 0 } else { next };
            active.order.get(next) == Some(&number)
        });
        if let Some((plan, position, run)) = next {
            let position = (position + 1) % self.plans[plan].order.len();
            if run + 1 < RESYNC_RUN {
                walk.lead = Some((plan, position, run + 1));
                return false;
            }
            self.join(plan, position + 1, false);
            return true;
        }
        let own = walk.plan;
        let others = || self.plans.iter().filter(|(plan, active)| Some(*plan) != own && active.names(number));
        // Of several plans that name the page, one in which it comes behind the page used last.
        let behind = others().find_map(|(plan, active)| {
            let before = |position: usize| match position.checked_sub(1) {
                Some(before) => Some(active.order[before]),
                None => active.order.last().copied().filter(|_| active.cyclic),
            };
            let mut positions = active.positions(number).iter().take(LEADS).map(|position| *position as usize);
            let position = positions.find(|position| last.is_some() && before(*position) == last)?;
            Some((plan, position, 2))
        });
        let first = || others().next().map(|(plan, active)| (plan, active.positions(number)[0] as usize, 1));
        walk.lead = behind.or_else(first);
        false
    }

    /// The first plan that is followed and names the page.
    fn planned(&self, number: u32) -> Option<&Active> {
        let mut plans = self.plans.iter().map(|(_, active)| active);
        plans.find(|active| active.names(number) && active.is_followed())
    }

    /// After how many uses of all walkers one of them uses the page, and the index of its plan among the followed ones.
    fn distance(&self, number: u32, followed: &Followed) -> Option<(u64, usize)> {
        let named = followed.iter().enumerate().filter(|(_, (plan, _))| self.plans[*plan].names(number));
        named.map(|(nth, (plan, standing))| (standing.distance(self.plans[*plan].positions(number)), nth)).min()
    }

    fn keep(&self, page: PageId) -> Option<Keep> {
        let number = self.recency.numbers().number(page)?;
        self.planned(number).and_then(|active| active.keep(number))
    }

    /// Lists the resident pages outside of followed plans, unless that list is up to date.
    fn find_outside(&mut self) {
        let is_followed = |(plan, active): (usize, &Active)| active.is_followed().then_some(plan);
        let followed = self.plans.iter().filter_map(is_followed);
        if self.followed.as_ref().is_some_and(|known| followed.clone().eq(known.iter().copied())) {
            return;
        }
        let followed: SmallVec<[usize; 8]> = followed.collect();
        self.outside.clear();
        step(self.recency.len());
        let end = self.recency.numbers().end();
        for number in self.recency.present_numbers() {
            if none_names(&self.plans, &followed, number) {
                self.outside.insert(number, end);
            }
        }
        self.followed = Some(followed);
        if let Some(beside) = &mut self.beside {
            beside.reconcile(&self.outside, &self.recency);
        }
    }

    /// A page is used while plans decide what leaves: counts what its side would have with other frames.
    fn use_beside(&mut self, page: PageId, number: u32) {
        if self.beside.is_none() || !self.a_plan_decides() {
            return;
        }
        let side = self.side(number);
        let Some(beside) = self.beside.as_mut() else { return };
        if !beside.used(side, page) {
            return;
        }
        let followed = self.plans.iter().filter(|(_, active)| active.is_followed());
        let planned = followed.map(|(_, active)| u64::from(active.planned)).sum();
        if beside.judge(planned, self.recency.numbers().end() as u64) {
            beside.reconcile(&self.outside, &self.recency);
            self.divide_all(false);
        }
    }

    /// The side of a page: whether a followed plan names it.
    fn side(&self, number: u32) -> usize {
        if self.planned(number).is_some() { NAMED } else { UNNAMED }
    }

    /// From now on it is watched what pages outside of plans would have with other frames.
    fn begin_beside(&mut self) {
        if self.beside.is_none() && !self.outside.is_by_worth() {
            let sizes = Sizes { frames: self.frames, unit: self.unit };
            let mut beside = Beside::new(sizes, self.recency.numbers());
            beside.keep(self.floors);
            self.beside = Some(Box::new(beside));
        }
    }

    /// Whether a page outside of plans goes before those of plans: these pages have more frames than are theirs, with
    /// the one that comes.
    fn outside_first(&mut self, want: Want) -> bool {
        let comes = want == Want::Demand && self.coming.is_some_and(|number| self.side(number) == UNNAMED);
        if comes {
            self.begin_beside();
        }
        let room = self.beside.as_ref().map_or(0, |beside| beside.room());
        self.outside.len() + usize::from(comes) > room as usize
    }

    /// Offers pages outside of plans: a few of the held ones, and all others. Pages that are expected are passed over.
    fn victim_outside(
        &mut self,
        want: Want,
        take: &mut dyn FnMut(PageId) -> Take,
    ) -> (Result<Option<PageId>, Stopped>, Option<Offered>) {
        let (expected, numbers) = (&self.expected, self.recency.numbers());
        let mut stopped = false;
        let mut unless_expected = |page| {
            let answer = if is_expected(page, expected, numbers) { Take::Skip } else { take(page) };
            stopped |= answer == Take::Stop;
            answer
        };
        // `auto` knows no plan, and the page to be filled is worth more than those that are beyond their room.
        let without_plan = if matches!(want, Want::Planned(_)) { Want::Hint } else { want };
        let beside = self.beside.as_mut();
        let Some(found) = beside.and_then(|beside| beside.victim(without_plan, &mut unless_expected)) else {
            let (found, offered) = self.outside.offer(want, numbers, &mut unless_expected);
            return (found, Some(offered));
        };
        (if stopped { Err(Stopped) } else { Ok(found) }, None)
    }

    /// Whether a page outside of plans is resident and expected.
    fn expects(&self, number: u32) -> bool {
        self.expected.contains(number as usize) && self.outside.contains(number)
    }

    /// Whether the page belongs in the list of pages outside of followed plans, if that list exists.
    fn is_outside(&self, number: u32) -> bool {
        self.followed.as_ref().is_some_and(|followed| none_names(&self.plans, followed, number))
    }

    /// Whether what leaves is decided by plans that are followed: some are declared, or those that are past their
    /// probation name more pages than fit. A recognised cycle that fits may be a beginning that many requests share;
    /// its pages stay by their uses.
    fn a_plan_decides(&self) -> bool {
        let mut planned: u32 = 0;
        let by_worth = self.outside.is_by_worth();
        let believed = |active: &&Active| active.is_followed() && (by_worth || active.is_believed(self.probation));
        self.plans.iter().map(|(_, active)| active).filter(believed).any(|active| {
            planned = planned.saturating_add(active.planned);
            by_worth || active.declared || planned > self.keys.left(self.frames)
        })
    }

    /// The policy of pages without an order. If there is none, makes one, which starts with the resident pages.
    fn auto(&mut self) -> &mut AutoPolicy {
        let Self { auto, learned, recency, .. } = self;
        auto.get_or_insert_with(|| {
            step(recency.len());
            let mut auto = Box::new(learned.take().map_or_else(AutoPolicy::default, AutoPolicy::after));
            auto.resize(self.frames, self.host_frames, self.lookahead);
            auto.unit(self.unit);
            recency.numbers().segments().for_each(|(segment, pages)| auto.segment(segment, pages));
            for page in recency.pages() {
                auto.accessed(page);
                auto.inserted(page);
            }
            auto
        })
    }

    /// Tells `auto` of a use, if it is there, and judges recognised plans by it.
    fn tell_auto(&mut self, page: PageId) {
        let Some(auto) = &mut self.auto else { return };
        auto.accessed(page);
        let (behind, frames) = (auto.behind(), u64::from(self.frames));
        if self.unplanned as u64 <= BLAMED * frames {
            self.merit = (self.merit - behind).min(MERIT_MAX);
        }
        if self.planned as u64 == frames {
            self.merit = self.merit.max(0.0);
        }
        if self.merit < MERIT_MIN {
            self.merit = 0.0;
            self.probation = (PROBATION_GROWS * self.probation).clamp(frames, PROBATION_MAX * frames);
            for (_, active) in self.plans.iter_mut().filter(|(_, active)| !active.declared) {
                active.places.iter_mut().for_each(|place| place.followed = 0);
            }
        } else if self.planned as u64 > KEPT * frames {
            self.learned = self.auto.take().map(|auto| auto.learned());
            self.merit = MERIT_MAX;
            self.probation /= 2;
        }
    }

    /// Offers pages where no plan decides. Pages that are expected come last.
    fn victim_unplanned(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        // A search for memory changes no order. And a plan may go on after a few other uses.
        let soon = want == Want::Memory || self.unplanned < self.recency.len() / AFTERWARDS;
        if self.outside.is_by_worth() || soon && self.auto.is_none() {
            return self.recency.offer_for(want, take);
        }
        self.auto();
        let Self { auto: Some(auto), expected, recency, .. } = self else { return None };
        if expected.len() == 0 {
            return auto.victim(want, take);
        }
        let (mut passed, mut stopped) = (Vec::new(), false);
        let found = auto.victim(want, &mut |page| {
            if is_expected(page, expected, recency.numbers()) {
                passed.push(page);
                return Take::Skip;
            }
            let answer = take(page);
            stopped |= answer == Take::Stop;
            answer
        });
        if found.is_some() || stopped || !must_offer_all(want) {
            return found;
        }
        super::offer_each(passed.into_iter(), take)
    }

    /// Offers pages of plans by the places of all walkers.
    fn victim_of_all(
        &mut self,
        want: Want,
        must: bool,
        take: &mut dyn FnMut(PageId) -> Take,
    ) -> Result<Option<PageId>, Stopped> {
        let followed = self.standing();
        let bounds = self.bounds(&followed);
        let number = match want {
            Want::Planned(page) => Some(self.recency.numbers().number(page)),
            _ => None,
        };
        // The distance of the page to be filled, and whether it may take a kept page's frame.
        let (floor, for_kept) = match number {
            None => (None, want != Want::Hint),
            Some(number) => match number.and_then(|number| Some((number, self.distance(number, &followed)?))) {
                None => return Ok(None),
                Some((number, (distance, nth))) => {
                    let behind = followed.iter().filter_map(|(plan, _)| {
                        let active = &self.plans[*plan];
                        active.names(number).then(|| active.wanted_behind(number)).flatten()
                    });
                    let distance = behind.fold(distance, u64::min);
                    let kept = self.plans[followed[nth].0].keep(number) == Some(Keep::Device);
                    (Some(distance), kept || distance <= bounds.whole)
                }
            },
        };
        for (plan, standing) in &followed {
            self.plans[*plan].bring_back(Some(standing));
        }
        let mut staying: SmallVec<[u32; 8]> =
            followed.iter().flat_map(|(plan, _)| self.plans[*plan].staying()).collect();
        for (plan, _) in &followed {
            staying.extend(self.plans[*plan].expected_behind(&self.ahead));
        }
        staying.sort_unstable();
        staying.dedup();
        let (skipped, misplaced) = (Vec::new(), Vec::new());
        let mut search = Search { bounds, floor, for_kept, staying, skipped, misplaced };
        let mut found = self.search(&followed, &mut search, take);
        if must && matches!(found, Ok(None)) && !search.misplaced.is_empty() {
            // Misplaced pages have been filed anew.
            found = self.search(&followed, &mut search, take);
        }
        if must && matches!(found, Ok(None)) {
            found = self.victim_held(&followed, &search.staying, take);
        }
        if want != Want::Memory {
            for (nth, position) in search.skipped {
                self.plans[followed[nth].0].hold([position]);
            }
        }
        found
    }

    /// Offers the pages of all stretches between walkers, merged.
    fn search(
        &mut self,
        followed: &Followed,
        search: &mut Search,
        take: &mut dyn FnMut(PageId) -> Take,
    ) -> Result<Option<PageId>, Stopped> {
        let Search { bounds, floor, for_kept, staying, skipped, misplaced } = search;
        let plans = &self.plans;
        let next = |nth: usize, mut stretch: Stretch| {
            let (plan, standing) = &followed[nth];
            let position = plans[*plan].next_of(&mut stretch)?;
            let distance = standing.distance_at(position as u32);
            let rank = bounds.rank(distance, stretch.kept);
            let worth = floor.is_none_or(|floor| distance > floor);
            let allowed = *for_kept || !stretch.kept || rank != 1;
            (worth && allowed).then_some(Candidate { rank, distance, nth, position, stretch })
        };
        let mut candidates: BinaryHeap<Candidate> = BinaryHeap::new();
        for (nth, (_, standing)) in followed.iter().enumerate() {
            candidates.extend(standing.stretches().filter_map(|stretch| next(nth, stretch)));
        }
        misplaced.clear();
        // An earlier search may have offered these.
        skipped.sort_unstable();
        let before = skipped.len();
        let mut found = Ok(None);
        while let Some(candidate) = candidates.pop() {
            candidates.extend(next(candidate.nth, candidate.stretch));
            let place = (candidate.nth, candidate.position);
            let number = plans[followed[candidate.nth].0].order[candidate.position];
            if self.distance(number, followed) != Some((candidate.distance, candidate.nth)) {
                misplaced.push(place);
                continue;
            }
            let mut others = followed.iter().map(|(plan, _)| &plans[*plan]);
            let offered = skipped[..before].binary_search(&place).is_ok();
            if offered || staying.binary_search(&number).is_ok() || others.any(|active| active.is_held(number)) {
                continue;
            }
            found = offer_each([number].into_iter(), self.recency.numbers(), take);
            if !matches!(found, Ok(None)) {
                break;
            }
            skipped.push(place);
        }
        for (nth, position) in misplaced {
            let (plan, standing) = &followed[*nth];
            let active = &mut self.plans[*plan];
            active.refile_page(active.order[*position], standing);
        }
        found
    }

    /// Offers, in no order, the pages that `search` does not offer: held pages, and pages in `staying`, which walkers
    /// are about to use once more. Each page is offered once, however many plans name it.
    fn victim_held(
        &self,
        followed: &Followed,
        staying: &[u32],
        take: &mut dyn FnMut(PageId) -> Take,
    ) -> Result<Option<PageId>, Stopped> {
        let held_in =
            |followed: &[(usize, Standing)], number| followed.iter().any(|(plan, _)| self.plans[*plan].is_held(number));
        let numbers = self.recency.numbers();
        let staying = staying.iter().copied().filter(|number| !held_in(followed, *number));
        let held = followed.iter().enumerate().flat_map(|(nth, (plan, _))| {
            let held = self.plans[*plan].held_numbers();
            held.filter(move |number| !held_in(&followed[..nth], *number))
        });
        offer_each(staying.chain(held), numbers, take)
    }

    /// Offers pages of plans by the known places of walkers.
    fn victim_planned(
        &mut self,
        want: Want,
        must: bool,
        take: &mut dyn FnMut(PageId) -> Take,
    ) -> Result<Option<PageId>, Stopped> {
        let Some((plan, at)) = self.alone() else { return self.victim_of_all(want, must, take) };
        let active = &mut self.plans[plan];
        let numbers = self.recency.numbers();
        let (floor, for_kept) = match want {
            Want::Planned(page) => match numbers.number(page).filter(|number| active.names(*number)) {
                Some(number) => {
                    let next = active.next_use(at, number);
                    let behind = active.uses_before_behind(at, number).map(|uses| active.places[at].cursor + uses);
                    (Some(behind.map_or(next, |behind| next.min(behind))), active.keep(number) == Some(Keep::Device))
                }
                None => (Some(0), false),
            },
            Want::Hint => (None, false),
            _ => (None, true),
        };
        let staying = active.expected_behind(&self.ahead);
        let (found, skipped) = active.victim(at, (numbers, &staying), floor, for_kept, must, take);
        if want != Want::Memory {
            active.hold(skipped);
        }
        found
    }

    /// Pages filled ahead for a walker that has passed them, or whose place is not known, do not count as ahead, unless
    /// another walker comes to them.
    fn drop_astray(&mut self) {
        if !std::mem::take(&mut self.astray) || self.ahead.len() == 0 {
            return;
        }
        let reached: Vec<_> = self.plans.iter().map(|(_, active)| (active, active.reached())).collect();
        let mut next = self.ahead.first_from(0);
        while let Some(number) = next {
            next = self.ahead.first_from(number + 1);
            if !reached.iter().any(|(active, reached)| active.is_reached(number as u32, reached)) {
                self.ahead.remove(number);
            }
        }
    }
}

impl Default for PlanPolicy {
    fn default() -> Self {
        Self::new()
    }
}

impl Policy for PlanPolicy {
    fn name(&self) -> &'static str {
        if self.outside.is_by_worth() { "model" } else { "plan" }
    }

    fn resize(&mut self, frames: u32, host_frames: u32, lookahead: u32) {
        (self.frames, self.host_frames, self.lookahead) = (frames, host_frames, lookahead);
        if let Some(auto) = &mut self.auto {
            auto.resize(frames, host_frames, lookahead);
        }
        self.resize_beside();
        self.divide_all(false);
    }

    fn unit(&mut self, pages: u32) {
        // A unit as large as the memory would leave nothing to keep. A larger request takes what it needs on demand.
        let pages = pages.min((self.frames / 4).max(1));
        if pages > self.unit {
            self.unit = pages;
            if let Some(auto) = &mut self.auto {
                auto.unit(pages);
            }
            self.resize_beside();
            self.divide_all(false);
        }
    }

    fn class(&mut self, segment: SegmentId, class: SegmentClass) {
        self.keys.announced = (class == SegmentClass::KeysAndValues).then_some(segment);
    }

    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.keys.add(segment, pages);
        self.recency.add_segment(segment, pages);
        let numbers = self.recency.numbers();
        self.outside.fit(numbers.end());
        if self.names.add(segment, numbers.of_segment(segment).len() as u32) {
            self.walkers.iter_mut().for_each(|walk| walk.recorder.clear());
        }
        if let Some(auto) = &mut self.auto {
            auto.segment(segment, pages);
        }
        if let Some(beside) = &mut self.beside {
            beside.segment(segment, pages, self.recency.numbers());
        }
    }

    /// Weights are what plans name.
    fn floors(&mut self, floors: &[(SegmentClass, u32)]) -> bool {
        if self.outside.is_by_worth() {
            return false;
        }
        let sum = |weights: bool| {
            let of_side = floors.iter().filter(|(class, _)| (*class == SegmentClass::Weights) == weights);
            of_side.fold(0u32, |sum, (_, frames)| sum.saturating_add(*frames))
        };
        let mut new = [0; 2];
        (new[NAMED], new[UNNAMED]) = (sum(true), sum(false));
        self.floors = new;
        if new[UNNAMED] > 0 {
            self.begin_beside();
        }
        let Some(beside) = &mut self.beside else { return true };
        if beside.keep(new) {
            if self.followed.is_some() {
                beside.reconcile(&self.outside, &self.recency);
            }
            self.divide_all(false);
        }
        true
    }

    fn chain(&mut self, pages: &[PageId]) {
        let soon = self.unplanned < self.recency.len() / AFTERWARDS;
        if !self.outside.is_by_worth() && !soon && (self.auto.is_some() || !self.a_plan_decides()) {
            self.auto().chain(pages);
        }
        if let Some(beside) = &mut self.beside {
            beside.chain(pages);
        }
    }

    fn written(&mut self, page: PageId) {
        if self.beside.is_some()
            && let Some(number) = self.recency.numbers().number(page)
        {
            let side = self.side(number);
            self.beside.iter_mut().for_each(|beside| beside.wrote(side, page));
        }
    }

    fn walker(&mut self, walker: WalkerId) {
        let found = self.find_walker(walker);
        self.current = found.unwrap_or_else(|at| at);
        if let Err(at) = found {
            self.walkers.insert(at, Walk::new(walker, self.share));
            self.share_memory();
        }
    }

    fn walker_ended(&mut self, walker: WalkerId) {
        let Ok(at) = self.find_walker(walker) else { return };
        self.leave(at, false);
        for number in self.walkers[at].expected.drain(..) {
            self.expected.remove(number as usize);
        }
        if walker != WalkerId::DEFAULT {
            self.walkers.remove(at);
            self.current = 0;
            self.share_memory();
        }
        if self.walkers.len() == 1 {
            // There is no other walker to compare its speed with.
            self.walkers[0].speed = FULL_SPEED;
            self.weigh();
            self.divide_all(true);
        }
    }

    fn accessed(&mut self, page: PageId) {
        let Some(number) = self.recency.numbers().number(page) else { return };
        if !self.recency.contains(page) {
            self.coming = Some(number);
        }
        self.recency.touch(page);
        if self.outside.is_by_worth() && !self.plans.iter().any(|(_, active)| active.names(number)) {
            // Before the first search nobody has listed them, and all that is resident may be one.
            let room = if self.followed.is_some() { self.outside.len() } else { self.recency.len() };
            self.outside.count(number, room);
        }
        self.outside.touch(number);
        self.ahead.remove(number as usize);
        self.expected.remove(number as usize);
        self.use_beside(page, number);
        self.count();
        // Keys and values that no plan names come in between: they say nothing about a walker's place.
        let between = self.keys.has(page.segment) && !self.plans.iter().any(|(_, active)| active.names(number));
        // Several plans are followed by as many walkers.
        let several = self.walkers.len() > 1;
        let walk = &mut self.walkers[self.current];
        if let Some(plan) = walk.plan
            && let Some(at) = self.plans[plan].place_of(walk.id)
        {
            let active = &mut self.plans[plan];
            let followed = !active.places[at].suspended;
            let confidence = active.places[at].confidence;
            if active.names(number) {
                // Pages that the walker skips may have been filled for it, or be on their way.
                self.astray |= active.advance(at, number);
            } else if !between {
                active.places[at].judge(false);
            }
            let suspended = active.places[at].suspended;
            if followed && suspended {
                walk.doubt = (2 * walk.doubt).min(DOUBT_MAX);
                self.astray = true;
            }
            if followed == suspended && active.places.len() > 1 {
                active.settle();
            }
            if active.exhausted(at) {
                self.leave(self.current, true);
            } else if !suspended {
                if between {
                    self.tell_auto(page);
                    return;
                }
                let decides = active.decides(self.keys.left(self.frames), self.probation) || several;
                (self.planned, self.unplanned) = match decides {
                    // A use that was not expected ends the row.
                    true if active.places[at].confidence < confidence => (0, 0),
                    true => (self.planned.saturating_add(1), 0),
                    false => (0, self.unplanned.saturating_add(1)),
                };
                let doubted = active.places[at].followed < active.len().saturating_mul(walk.doubt);
                if doubted && walk.recorder.may_be_a_part(active.len()) {
                    walk.recorder.push_believed(self.names.name(page));
                } else if !walk.recorder.is_empty() {
                    walk.recorder.clear();
                }
                self.tell_auto(page);
                return;
            }
        }
        (self.planned, self.unplanned) = (0, self.unplanned.saturating_add(1));
        self.tell_auto(page);
        if between || self.walkers[self.current].unordered || self.finds_a_plan(number) {
            return;
        }
        let walk = &mut self.walkers[self.current];
        if !std::mem::replace(&mut walk.records, true) {
            self.share_memory();
        }
        let name = self.names.name(page);
        if let Some(names) = self.walkers[self.current].recorder.push(name) {
            let numbers = self.recency.numbers();
            let pages = names.into_iter().filter_map(|name| numbers.number(self.names.page(name)?));
            self.follow(Steps::new(pages, true), false);
        }
    }

    fn inserted(&mut self, page: PageId) {
        self.recency.insert(page);
        if let Some(auto) = &mut self.auto {
            auto.inserted(page);
        }
        let Some(number) = self.recency.numbers().number(page) else { return };
        let mut outside = self.followed.is_some();
        for (plan, active) in &mut self.plans {
            if active.names(number) {
                active.file(number, None);
                outside &= self.followed.as_ref().is_some_and(|followed| !followed.contains(&plan));
            }
        }
        self.coming = self.coming.filter(|coming| *coming != number);
        if outside {
            self.outside.insert(number, self.recency.numbers().end());
            if let Some(beside) = &mut self.beside {
                beside.inserted(page, number);
            }
        }
    }

    fn removed(&mut self, page: PageId) {
        self.recency.remove(page);
        if let Some(auto) = &mut self.auto {
            auto.removed(page);
        }
        let Some(number) = self.recency.numbers().number(page) else { return };
        for (_, active) in &mut self.plans {
            if active.names(number) {
                active.removed(number);
            }
        }
        self.outside.remove(number);
        self.ahead.remove(number as usize);
        if let Some(beside) = &mut self.beside {
            beside.removed(page, number);
        }
    }

    fn forget(&mut self, segment: SegmentId) {
        let gone = self.recency.numbers().of_segment(segment);
        self.outside.forget(gone.clone());
        // Numbers are used again.
        for marked in [&mut self.ahead, &mut self.expected] {
            while let Some(number) = marked.first_from(gone.start).filter(|number| *number < gone.end) {
                marked.remove(number);
            }
        }
        for walk in &mut self.walkers {
            walk.expected.retain(|number| !gone.contains(&(*number as usize)));
        }
        self.recency.remove_segment(segment);
        self.keys.remove(segment);
        if let Some(auto) = &mut self.auto {
            auto.forget(segment);
        }
        if let Some(beside) = &mut self.beside {
            beside.forget(segment);
        }
        self.coming = self.coming.filter(|number| !gone.contains(&(*number as usize)));
        self.outside.fit(self.recency.numbers().end());
        self.names.remove(segment);
        let named = |active: &Active| active.names_any(&gone);
        let plans: Vec<usize> = self.plans.iter().filter(|(_, active)| named(active)).map(|(plan, _)| plan).collect();
        for plan in &plans {
            match self.plans[*plan].without(&gone) {
                Some(mut left) => {
                    self.file_all(&mut left);
                    self.plans[*plan] = left;
                    self.walkers.iter_mut().for_each(|walk| walk.lead = walk.lead.filter(|lead| lead.0 != *plan));
                }
                None => self.remove_plan(*plan),
            }
        }
        if !plans.is_empty() {
            self.astray = true;
            self.leave_ended();
            self.share_memory();
            self.divide_all(false);
        }
    }

    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        // Without any plan all pages are outside of plans.
        let by_worth = self.outside.is_by_worth() && self.plans.is_empty();
        let decides = match want {
            Want::Planned(_) => self.has_plan(),
            _ => self.a_plan_decides(),
        };
        if !decides && !by_worth {
            return self.victim_unplanned(want, take);
        }
        let must = must_offer_all(want);
        let declared = || self.plans.iter().any(|(_, active)| active.declared && active.is_followed());
        let proven = self.planned as u64 > KEPT * u64::from(self.frames);
        if self.auto.is_none() && !self.outside.is_by_worth() && !proven && !declared() {
            // What was recognised is judged from the beginning.
            self.auto();
        }
        self.find_outside();
        let outside_first = self.outside_first(want);
        let (mut found, mut offered) = (Ok(None), None);
        if outside_first {
            (found, offered) = self.victim_outside(want, take);
        }
        if matches!(found, Ok(None)) {
            found = self.victim_planned(want, must, take);
        }
        if !outside_first && !matches!(want, Want::Planned(_)) && matches!(found, Ok(None)) {
            (found, offered) = self.victim_outside(want, take);
        }
        if must
            && matches!(found, Ok(None))
            && let Some(offered) = &offered
        {
            let (expected, numbers) = (&self.expected, self.recency.numbers());
            let mut unless_expected = |page| if is_expected(page, expected, numbers) { Take::Skip } else { take(page) };
            found = self.outside.offer_held(offered, numbers, &mut unless_expected);
        }
        // Pages that are expected are offered at the last.
        if must && matches!(found, Ok(None)) {
            let mut expected: Vec<u32> = self
                .walkers
                .iter()
                .flat_map(|walk| &walk.expected)
                .copied()
                .filter(|number| self.expects(*number))
                .collect();
            expected.sort_unstable();
            expected.dedup();
            step(expected.len());
            found = offer_each(expected.into_iter(), self.recency.numbers(), take);
        }
        found.ok().flatten()
    }

    fn expected(&mut self, pages: &[PageId]) {
        let walk = &mut self.walkers[self.current];
        for number in walk.expected.drain(..) {
            self.expected.remove(number as usize);
        }
        walk.expected.extend(pages.iter().filter_map(|page| self.recency.numbers().number(*page)));
        for number in &walk.expected {
            self.expected.reach(*number as usize + 1);
            self.expected.insert(*number as usize);
        }
    }

    fn unordered(&mut self) {
        self.leave(self.current, true);
        let walk = &mut self.walkers[self.current];
        (walk.unordered, walk.lead, walk.last) = (true, None, None);
        walk.recorder.clear();
        self.share_memory();
    }

    fn declare(&mut self, order: &[PageId], cyclic: bool) {
        self.begin_anew();
        let numbers = self.recency.numbers();
        let steps = Steps::new(order.iter().filter_map(|page| numbers.number(*page)), cyclic);
        self.follow(steps, true);
    }

    fn declare_runs(&mut self, order: &[PageRun], cyclic: bool) {
        self.begin_anew();
        step(order.len());
        let same = |active: &Active| active.declared && active.cyclic == cyclic && *active.runs.0 == *order;
        if !order.is_empty()
            && let Some((plan, start)) =
                self.plans.iter().find(|(_, active)| same(active)).map(|(plan, active)| (plan, active.runs.1))
        {
            self.join(plan, start, true);
            return;
        }
        let numbers = self.recency.numbers();
        let pages = order.iter().flat_map(|run| run.pages());
        let steps = Steps::new(pages.filter_map(|page| numbers.number(page)), cyclic);
        // If some of the pages do not exist yet, the same runs will name more pages once they do.
        let all = steps.of == order.iter().map(|run| run.count as usize).sum::<usize>();
        if let Some((plan, start)) = self.follow(steps, true).filter(|_| all) {
            self.plans[plan].declared_as(order, start);
        }
    }

    fn know(&mut self, order: &[PageRun]) {
        let numbers = self.recency.numbers();
        let pages = order.iter().flat_map(|run| run.pages());
        let steps = Steps::new(pages.filter_map(|page| numbers.number(page)), true);
        if self.plans.iter().any(|(_, active)| active.beginning_of(&steps).is_some()) {
            return;
        }
        if let Some(plan) = self.add_plan(steps) {
            self.left += 1;
            (self.plans[plan].declared, self.plans[plan].left) = (true, self.left);
            self.forget_left();
            self.divide_all(true);
        }
    }

    fn has_plan(&self) -> bool {
        self.plans.iter().any(|(_, active)| active.is_followed())
    }

    fn places(&self) -> Vec<WalkerPlace> {
        let mut all = Vec::new();
        for (_, active) in &self.plans {
            let following = || active.places.iter().filter(|place| !place.suspended);
            let (pages, followers) = (active.len(), following().count() as u64);
            all.extend(following().map(|at| WalkerPlace {
                walker: at.walker,
                next: at.place as u64,
                pages,
                followers,
                order: active.serial,
                declared: active.declared,
                expected: at.followed,
            }));
        }
        all
    }

    fn order_of(&self, walker: WalkerId) -> Vec<PageId> {
        let walk = self.find_walker(walker).ok().map(|at| &self.walkers[at]);
        let Some(active) = walk.and_then(|walk| walk.plan).map(|plan| &self.plans[plan]) else { return Vec::new() };
        if active.place_of(walker).is_none_or(|at| active.places[at].suspended) {
            return Vec::new();
        }
        let numbers = self.recency.numbers();
        active.order.iter().map(|number| numbers.page(*number)).collect()
    }

    fn next_fill(&mut self, present: &dyn Fn(PageId) -> bool) -> Option<PageId> {
        self.drop_astray();
        if self.ahead.len() >= self.lookahead as usize {
            return None;
        }
        let numbers = self.recency.numbers();
        let mut next: Option<(u64, u32)> = None;
        let probation = self.probation;
        for (_, active) in self.plans.iter_mut().filter(|(_, active)| active.is_believed(probation)) {
            for at in 0..active.places.len() {
                if active.places[at].is_known() {
                    let missing = active.next_missing(at, |number| present(numbers.page(number)));
                    next = next.into_iter().chain(missing).min_by_key(|(distance, _)| *distance);
                }
            }
        }
        next.map(|(_, number)| numbers.page(number))
    }

    fn filling(&mut self, page: PageId) {
        let Some(number) = self.recency.numbers().number(page) else { return };
        for (_, active) in &mut self.plans {
            if active.names(number) {
                active.filling(number);
            }
        }
        self.ahead.reach(number as usize + 1);
        self.ahead.insert(number as usize);
    }

    fn worth_host(&self, page: PageId) -> bool {
        self.keep(page) != Some(Keep::Streamed)
    }

    fn tracked(&self) -> Vec<PageId> {
        self.auto.as_ref().map_or_else(|| self.recency.pages().collect(), |auto| auto.tracked())
    }

    fn check(&self) -> Result<(), String> {
        if self.followed.is_some() {
            let mut outside = self.recency.present_numbers().filter(|number| self.is_outside(*number));
            let count = outside.by_ref().take_while(|number| self.outside.contains(*number)).count();
            if count != self.outside.len() || outside.next().is_some() {
                return Err(format!(
                    "{} pages are listed as outside of plans, but not all that are",
                    self.outside.len()
                ));
            }
        }
        if let Some(beside) = self.beside.as_ref().filter(|_| self.followed.is_some()) {
            beside.check(&self.outside, self.recency.numbers())?;
        }
        if let Some(auto) = &self.auto {
            auto.check()?;
            let tracked = auto.tracked();
            if tracked.len() != self.recency.len() || !tracked.iter().all(|page| self.recency.contains(*page)) {
                return Err(format!("{} pages are resident, but auto knows others", self.recency.len()));
            }
        }
        self.plans.iter().try_for_each(|(_, active)| active.check(self.recency.present_numbers()))
    }

    fn host_victim(&self, candidate: PageId, incoming: PageId) -> bool {
        self.keep(candidate) != Some(Keep::Host) || self.keep(incoming).is_none()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::super::PolicyKind;
    use super::super::active::RETURNING;
    use super::super::bare::BareCache;
    use super::*;
    use crate::ids::{PageIndex, SegmentClass};
    use crate::random::Random;
    use std::collections::HashSet;

    fn page(n: u32) -> PageId {
        PageId { segment: SegmentId(0), index: PageIndex(n) }
    }

    fn policy() -> PlanPolicy {
        let mut policy = PlanPolicy::new();
        policy.segment(SegmentId(0), 4096);
        policy
    }

    /// The plan that the only walker follows, unless it is suspended.
    fn own(policy: &PlanPolicy) -> Option<&Active> {
        policy.plans.iter().map(|(_, active)| active).find(|active| active.is_followed())
    }

    #[test]
    fn places_are_spread_evenly() {
        let spread = |n, count| super::super::active::spread(n, count).collect::<Vec<usize>>();
        assert_eq!(spread(10, 5), [1, 3, 5, 7, 9]);
        assert_eq!(spread(4, 9), [0, 1, 2, 3]);
        assert_eq!(spread(7, 0), [0usize; 0]);
        let gaps: Vec<usize> = spread(100, 30).windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(gaps.iter().all(|gap| (3..=4).contains(gap)));
    }

    /// Runs passes over `n` pages with `frames` frames and immediate fills; returns fills per pass.
    fn fills_per_pass(policy: &mut PlanPolicy, n: u32, frames: u32, passes: u32) -> Vec<u32> {
        let pass: Vec<u32> = (0..n).collect();
        fills_of(policy, frames, &vec![pass; passes as usize])
    }

    /// The same for passes that use these pages.
    fn fills_of(policy: &mut PlanPolicy, frames: u32, passes: &[Vec<u32>]) -> Vec<u32> {
        fills_and_misses(policy, frames, passes).into_iter().map(|(fills, _)| fills).collect()
    }

    /// The fills of each pass, and how many uses had to wait for theirs.
    fn fills_and_misses(policy: &mut PlanPolicy, frames: u32, passes: &[Vec<u32>]) -> Vec<(u32, u32)> {
        let mut resident: HashSet<PageId> = HashSet::new();
        let mut fills = Vec::new();
        for pass in passes {
            let (mut count, mut misses) = (0, 0);
            for number in pass {
                let used = page(*number);
                policy.accessed(used);
                if !resident.contains(&used) {
                    (count, misses) = (count + 1, misses + 1);
                    if resident.len() as u32 == frames {
                        let victim = policy
                            .victim(Want::Demand, &mut |v| if v == used { Take::Skip } else { Take::Yes })
                            .unwrap();
                        policy.removed(victim);
                        resident.remove(&victim);
                    }
                    resident.insert(used);
                    policy.inserted(used);
                }
                while let Some(next) = policy.next_fill(&|p| resident.contains(&p)) {
                    if resident.len() as u32 == frames {
                        let Some(victim) = policy.victim(Want::Planned(next), &mut |v| {
                            if v == used { Take::Skip } else { Take::Yes }
                        }) else {
                            break;
                        };
                        policy.removed(victim);
                        resident.remove(&victim);
                    }
                    count += 1;
                    resident.insert(next);
                    policy.inserted(next);
                    policy.filling(next);
                }
            }
            fills.push((count, misses));
        }
        fills
    }

    /// A held page that was reported again was counted twice, and pages that the plan does not name were not offered.
    #[test]
    fn regression_a_page_that_is_told_of_twice_is_counted_once() {
        let mut policy = policy();
        policy.resize(4, 0, 1);
        policy.declare(&[page(0), page(1)], true);
        policy.inserted(page(1));
        assert_eq!(policy.victim(Want::Demand, &mut |_| Take::Skip), None);
        policy.inserted(page(1));
        policy.inserted(page(9));
        assert_eq!(
            policy.victim(Want::Demand, &mut |v| if v == page(9) { Take::Yes } else { Take::Skip }),
            Some(page(9))
        );
    }

    /// After a walker's last use of a page that the plan names twice, the page was filed nowhere, although another
    /// walker followed the plan. Its frame was lost for good.
    #[test]
    fn regression_a_walkers_end_takes_no_page_from_the_others() {
        let mut policy = policy();
        policy.resize(3, 0, 0);
        let order = [0, 1, 2, 0].map(page);
        for walker in [1, 2] {
            policy.walker(WalkerId(walker));
            policy.declare(&order, false);
        }
        policy.accessed(page(0));
        (0..3).for_each(|n| policy.inserted(page(n)));
        policy.walker(WalkerId(1));
        order.into_iter().for_each(|used| policy.accessed(used));
        assert_eq!(policy.check(), Ok(()));
        let mut offered = HashSet::new();
        policy.victim(Want::Demand, &mut |victim| {
            offered.insert(victim);
            Take::Skip
        });
        assert_eq!(offered, (0..3).map(page).collect());
    }

    /// When a segment of a plan was dropped, the plan forgot which pages two tensors share.
    #[test]
    fn regression_pages_that_tensors_share_stay_when_another_tensor_is_dropped() {
        let scratch = PageId { segment: SegmentId(1), index: PageIndex(0) };
        for order in [vec![page(0), page(0), page(1), scratch], vec![page(0), scratch, page(0), page(1)]] {
            for uses in [0, 1] {
                let mut policy = policy();
                policy.segment(SegmentId(1), 1);
                policy.resize(8, 0, 1);
                policy.declare(&order, true);
                order[..uses].iter().for_each(|page| policy.accessed(*page));
                policy.inserted(page(0));
                policy.forget(SegmentId(1));
                if uses == 0 || order[1] == scratch {
                    policy.accessed(page(0));
                }
                assert_eq!(own(&policy).unwrap().staying().count(), 1, "{order:?}, {uses} uses");
            }
        }
    }

    #[test]
    fn every_use_makes_room_for_the_next_fill_ahead() {
        let mut policy = policy();
        policy.resize(64, 0, 4);
        let order: Vec<PageId> = (0..40).map(page).collect();
        policy.declare(&order, true);
        let mut resident: HashSet<PageId> = HashSet::new();
        for used in order {
            while let Some(next) = policy.next_fill(&|p| resident.contains(&p)) {
                policy.filling(next);
                policy.inserted(next);
                resident.insert(next);
            }
            assert!(resident.contains(&used), "{used:?} was not filled ahead");
            policy.accessed(used);
        }
    }

    #[test]
    fn a_declared_cycle_streams_only_what_does_not_fit() {
        let mut policy = policy();
        policy.resize(64, 0, 4);
        let order: Vec<PageId> = (0..100).map(page).collect();
        policy.declare(&order, true);
        let fills = fills_per_pass(&mut policy, 100, 64, 6);
        let streamed = 100 - (64 - 4 - 1 - STREAM_SLACK);
        for pass in &fills[2..] {
            assert!((36..=streamed + 1).contains(pass), "{fills:?}");
        }
    }

    /// A pass over matrices of `matrix` pages, each of which `threads` threads share: they begin at its parts, and make
    /// their uses in any order. Where parts do not begin with a page, two threads use it.
    fn shared_by_threads(n: u32, matrix: u32, threads: u32, random: &mut Random) -> Vec<u32> {
        let mut uses = Vec::new();
        for start in (0..n).step_by(matrix as usize) {
            let pages = matrix.min(n - start);
            let part = |thread: u32| thread * pages / threads..((thread + 1) * pages).div_ceil(threads);
            let mut parts: Vec<_> = (0..threads).map(part).collect();
            while !parts.is_empty() {
                let at = random.below(parts.len() as u32) as usize;
                match parts[at].next() {
                    Some(page) => uses.push(start + page),
                    None => drop(parts.swap_remove(at)),
                }
            }
        }
        uses
    }

    /// A thread's first use of its part was taken for a jump, and what lay before it for passed: pages that were filled
    /// ahead for the other threads left before they were used, and were filled again.
    #[test]
    fn regression_threads_that_share_a_tensor_stream_only_what_does_not_fit() {
        for (matrix, threads, most, waits) in [
            (11, 2, 1.01, 0.01),
            (4, 2, 1.01, 0.01),
            (30, 2, 1.01, 0.01),
            (120, 2, 1.01, 0.05),
            (100, 4, 1.05, 0.05),
            (16, 16, 1.1, 0.05),
            (64, 16, 1.3, 0.3),
        ] {
            let mut policy = policy();
            policy.resize(430, 0, 16);
            let order: Vec<PageId> = (0..700).map(page).collect();
            policy.declare(&order, true);
            let mut random = Random(u64::from(matrix + threads));
            let passes: Vec<_> = (0..8).map(|_| shared_by_threads(700, matrix, threads, &mut random)).collect();
            let found = fills_and_misses(&mut policy, 430, &passes);
            let streamed = f64::from(7 * (700 - (430 - 16 - 1 - STREAM_SLACK)));
            // The first pass fills all.
            let sum = |of: &dyn Fn(&(u32, u32)) -> u32| f64::from(found[1..].iter().map(of).sum::<u32>()) / streamed;
            let (fills, misses) = (sum(&|pass| pass.0), sum(&|pass| pass.1));
            let what = format!("{threads} threads, {matrix} pages: {fills}, {misses} of what does not fit, {found:?}");
            assert!(fills <= most && misses <= waits, "{what}");
            assert!(policy.has_plan());
        }
    }

    /// In an order that comes once, what was passed over has no next use. Nothing made room for it, and nothing more
    /// was filled ahead.
    #[test]
    fn regression_threads_that_share_a_tensor_of_an_order_that_comes_once_do_not_wait() {
        for (matrix, threads) in [(60, 2), (120, 2), (100, 4)] {
            let mut policy = policy();
            policy.resize(200, 0, 16);
            let order: Vec<PageId> = (0..1000).map(page).collect();
            policy.declare(&order, false);
            let pass = shared_by_threads(1000, matrix, threads, &mut Random(3));
            let found = fills_and_misses(&mut policy, 200, &[pass]);
            assert!(found[0].0 <= 1010 && found[0].1 <= 80, "{threads} threads, {matrix} pages: {found:?}");
        }
    }

    /// A program that leaves out most of what was declared: each jump over it looked like another thread's, for ever.
    #[test]
    fn regression_a_program_that_leaves_out_most_of_an_order_is_learned_anew() {
        for stride in [2, 3] {
            let mut policy = policy();
            policy.resize(200, 0, 16);
            let order: Vec<PageId> = (0..700).map(page).collect();
            policy.declare(&order, true);
            let pass: Vec<u32> = (0..700).step_by(stride).collect();
            let fills = fills_of(&mut policy, 200, &vec![pass.clone(); 12]);
            let missing = (pass.len() as u32).saturating_sub(200 - 16 - 1 - STREAM_SLACK);
            assert!(*fills.last().unwrap() <= missing + 10, "every {stride}th page: {fills:?}");
            // Each page once more, after the next one.
            let mut policy = self::policy();
            policy.resize(200, 0, 16);
            policy.declare(&order, true);
            let again: Vec<u32> = pass.windows(2).flat_map(|pair| [pair[1], pair[0]]).collect();
            let fills = fills_of(&mut policy, 200, &vec![again; 12]);
            assert!(*fills.last().unwrap() <= missing + 20, "every {stride}th page, twice: {fills:?}");
        }
    }

    #[test]
    fn an_undeclared_cycle_is_learned_and_relearned_when_it_changes() {
        let mut policy = policy();
        policy.resize(64, 0, 4);
        let fills = fills_per_pass(&mut policy, 100, 64, 6);
        assert!(policy.has_plan());
        assert!(fills[5] <= 46, "{fills:?}");
        let fills = fills_per_pass(&mut policy, 80, 64, 8);
        assert!(policy.has_plan());
        assert!(fills[7] <= 26, "{fills:?}");
    }

    /// A repeated part of the pass was taken for the whole pass each time. While it was followed nothing was recorded,
    /// so the pass was never recognised.
    #[test]
    fn regression_a_part_that_repeats_does_not_hide_the_pass() {
        let mut policy = policy();
        policy.resize(64, 0, 0);
        for repeats in [3, 12] {
            let pass: Vec<u32> = (0..300).chain((300..340).cycle().take(40 * repeats)).chain(340..600).collect();
            for (at, n) in pass.iter().cycle().take(40 * pass.len()).enumerate() {
                policy.accessed(page(*n));
                // Each time, the part has to repeat for longer before it is believed.
                if at >= if repeats < 4 { 2 } else { 4 } * pass.len() {
                    let plan = own(&policy).expect("the pass is followed");
                    assert_eq!(plan.order.len(), pass.len(), "at use {at}");
                }
            }
            assert!(policy.walkers[0].recorder.is_empty(), "what is believed needs no record");
            policy.declare(&[], false);
        }
    }

    /// A page that was filled ahead and then used must make room for the next one.
    #[test]
    fn regression_lookahead_goes_on_after_its_first_window() {
        let mut policy = policy();
        policy.resize(64, 0, 4);
        let order: Vec<PageId> = (0..100).map(page).collect();
        policy.declare(&order, true);
        let mut present = HashSet::new();
        for n in 0..100 {
            while let Some(next) = policy.next_fill(&|page| present.contains(&page)) {
                present.insert(next);
                policy.filling(next);
                policy.inserted(next);
            }
            assert!(present.contains(&page(n)), "page {n} was not filled ahead");
            policy.accessed(page(n));
        }
    }

    #[test]
    fn a_plan_survives_a_stretch_of_other_uses() {
        let mut policy = policy();
        policy.resize(64, 0, 4);
        let order: Vec<PageId> = (0..100).map(page).collect();
        policy.declare(&order, true);
        fills_per_pass(&mut policy, 100, 64, 2);
        // An embedding of many rows: pages the plan does not name, and pages it names elsewhere.
        for n in 0..200u32 {
            policy.accessed(page(if n % 2 == 0 { 1000 + n * 7 } else { n * 37 % 100 }));
        }
        assert!(!policy.has_plan());
        for n in 0..4 {
            policy.accessed(page(n));
        }
        assert!(policy.has_plan());
    }

    /// Passes over layers, each of which uses a few pages that are drawn, small numbers more often.
    fn drawn(passes: u32) -> Vec<u32> {
        let mut random = Random(5);
        let draw = |at: u32| {
            let most = random.below(64);
            at % 40 * 64 + random.below(most + 1)
        };
        (0..passes * 40 * 4).map(|n| n / 4).map(draw).collect()
    }

    /// Hits of each policy with this many frames.
    fn hits_of<const N: usize>(uses: &[u32], frames: u32, kinds: [PolicyKind; N]) -> [u32; N] {
        kinds.map(|kind| {
            let mut cache = BareCache::new(kind.build(), frames);
            cache.segment(SegmentId(0), SegmentClass::Weights, 40 * 64);
            uses.iter().map(|n| u32::from(cache.used(page(*n), false).unwrap())).sum()
        })
    }

    /// What is used has no order, and less fits than a pass uses.
    #[test]
    fn without_an_order_hits_are_those_of_auto() {
        let kinds = [PolicyKind::Plan, PolicyKind::Auto, PolicyKind::Lru];
        let [plan, auto, lru] = hits_of(&drawn(600), 120, kinds);
        assert!(plan * 100 >= auto * 98 && auto > 2 * lru, "{plan} hits; auto {auto}, lru {lru}");
    }

    /// A few pages of a range that was once used in order, among pages that are used by their popularity. Three uses in
    /// the old order were taken for it each time, and the popular pages left.
    #[test]
    fn regression_parts_of_an_old_order_cost_few_hits() {
        let mut random = Random(7);
        let mut uses: Vec<u32> = (1000..1150).chain(1000..1150).collect();
        for _ in 0..2000 {
            uses.extend((0..30).map(|_| {
                let most = random.below(400);
                random.below(most + 1)
            }));
            let first = 1000 + random.below(140);
            uses.extend(first..first + 6);
        }
        let [plan, auto] = hits_of(&uses, 120, [PolicyKind::Plan, PolicyKind::Auto]);
        assert!(plan * 100 >= auto * 98, "{plan} hits; auto {auto}");
    }

    /// What is recognised after a probation decides again.
    #[test]
    fn a_long_order_ends_the_probation() {
        let (mut policy, mut resident) = (policy(), HashSet::new());
        policy.resize(100, 0, 0);
        policy.probation = 400;
        let cycle: Vec<u32> = (300..450).collect();
        (0..3).for_each(|_| {
            use_each(&mut policy, &mut resident, 100, &cycle);
        });
        assert!(policy.has_plan() && !policy.a_plan_decides());
        (0..8).for_each(|_| {
            use_each(&mut policy, &mut resident, 100, &cycle);
        });
        assert!(policy.a_plan_decides() && policy.auto.is_none() && policy.probation == 200);
        // As many as the optimum.
        assert!(use_each(&mut policy, &mut resident, 100, &cycle) >= 99);
    }

    /// Uses pages one after the other with this many frames; returns hits.
    fn use_each(policy: &mut PlanPolicy, resident: &mut HashSet<u32>, frames: usize, uses: &[u32]) -> usize {
        let mut hits = 0;
        for number in uses.iter().copied() {
            policy.accessed(page(number));
            if !resident.insert(number) {
                hits += 1;
                continue;
            }
            if resident.len() > frames {
                let gone = policy.victim(Want::Demand, &mut |_| Take::Yes).unwrap();
                policy.removed(gone);
                resident.remove(&gone.index.0);
            }
            policy.inserted(page(number));
        }
        assert_eq!(policy.check(), Ok(()));
        hits
    }

    #[test]
    fn auto_is_there_until_a_plan_is_followed_for_a_while() {
        let (mut policy, mut resident) = (policy(), HashSet::new());
        policy.resize(100, 0, 0);
        let mut random = Random(1);
        let mut any = |uses: usize| (0..uses).map(|_| random.below(300)).collect::<Vec<u32>>();
        let cycle: Vec<u32> = (300..450).collect();
        use_each(&mut policy, &mut resident, 100, &(0..100).collect::<Vec<_>>());
        assert!(policy.auto.is_none(), "all fits so far");
        for _ in 0..3 {
            use_each(&mut policy, &mut resident, 100, &any(400));
            assert!(policy.auto.is_some() && !policy.has_plan());
            policy.declare(&cycle.iter().copied().map(page).collect::<Vec<_>>(), true);
            use_each(&mut policy, &mut resident, 100, &cycle);
            assert!(policy.auto.is_some() && policy.has_plan());
            (0..KEPT).for_each(|_| {
                use_each(&mut policy, &mut resident, 100, &cycle);
            });
            assert!(policy.auto.is_none());
            // As many as the optimum.
            assert!(use_each(&mut policy, &mut resident, 100, &cycle) >= 99);
            policy.declare(&[], false);
            assert!(!policy.has_plan());
            use_each(&mut policy, &mut resident, 100, &any(10));
            assert!(policy.auto.is_none(), "the plan might go on");
        }
    }

    #[test]
    fn without_a_plan_expected_pages_go_last() {
        let (mut policy, mut resident) = (policy(), HashSet::new());
        policy.resize(20, 0, 0);
        use_each(&mut policy, &mut resident, 20, &(0..60).collect::<Vec<_>>());
        assert!(policy.auto.is_some());
        let expected: HashSet<u32> = resident.iter().copied().filter(|n| n % 3 == 0).collect();
        policy.expected(&expected.iter().copied().map(page).collect::<Vec<_>>());
        let offered = |policy: &mut PlanPolicy, want| {
            let mut offered = Vec::new();
            policy.victim(want, &mut |page| {
                offered.push(page.index.0);
                Take::Skip
            });
            offered
        };
        let all = offered(&mut policy, Want::Demand);
        assert_eq!(all[20 - expected.len()..].iter().copied().collect::<HashSet<_>>(), expected);
        assert_eq!(all.iter().copied().collect::<HashSet<_>>(), resident);
        assert!(offered(&mut policy, Want::Hint).iter().all(|n| !expected.contains(n)));
    }

    #[test]
    fn model_has_no_auto() {
        let (mut policy, mut resident) = (PlanPolicy::of_model(), HashSet::new());
        policy.segment(SegmentId(0), 4096);
        policy.resize(120, 0, 0);
        policy.chain(&[page(1), page(2)]);
        use_each(&mut policy, &mut resident, 120, &drawn(20));
        assert!(policy.auto.is_none());
    }

    #[test]
    fn a_unit_needs_streaming_frames_for_its_streamed_pages_only() {
        assert_eq!(streamed_of_unit(4, 900, 1000), 2);
        assert_eq!(streamed_of_unit(40, 900, 1000), 6);
        assert_eq!(streamed_of_unit(4, 100, 1000), 4);
        assert_eq!(streamed_of_unit(1, 0, 7), 1);
    }

    #[test]
    fn everything_fits_nothing_moves() {
        let mut policy = policy();
        policy.resize(100, 0, 8);
        let order: Vec<PageId> = (0..100).map(page).collect();
        policy.declare(&order, true);
        assert_eq!(fills_per_pass(&mut policy, 100, 100, 3), [100, 0, 0]);
    }

    /// Victims come in the order of their next uses, farthest first, whatever is resident, used, skipped or repeated.
    #[test]
    fn victims_are_those_used_farthest_in_the_future() {
        let mut x = 7u32;
        let mut random = |below: u32| {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (x >> 8) % below
        };
        for round in 0..200u32 {
            let cyclic = round % 2 == 0;
            let length = 2 + random(if round % 3 == 0 { 70 } else { 9 });
            let mut order: Vec<u32> = Vec::new();
            while (order.len() as u32) < length {
                let n = random(1 + length * 2 / 3);
                if order.last() != Some(&n) && !(order.len() as u32 == length - 1 && order.first() == Some(&n)) {
                    order.push(n);
                } else if length < 4 {
                    order.push(100 + order.len() as u32);
                }
            }
            let mut policy = policy();
            policy.resize(8, 0, 2);
            policy.declare(&order.iter().map(|n| page(*n)).collect::<Vec<_>>(), cyclic);
            let mut resident: HashSet<u32> = HashSet::new();
            for _ in 0..100 {
                let n = order[random(order.len() as u32) as usize];
                match random(4) {
                    0 if resident.remove(&n) => policy.removed(page(n)),
                    0 | 1 => {
                        resident.insert(n);
                        policy.inserted(page(n));
                    }
                    _ => policy.accessed(page(n)),
                }
                let Some(plan) = own(&policy) else { break };
                let cursor = plan.places[0].cursor as usize;
                let next = |n: u32| {
                    let uses = (cursor..cursor + order.len()).filter(|at| cyclic || *at < order.len());
                    uses.into_iter().find(|at| order[at % order.len()] == n).unwrap_or(usize::MAX)
                };
                let mut offered = Vec::new();
                policy.victim(Want::Memory, &mut |victim| {
                    offered.push(victim.index.0);
                    Take::Skip
                });
                assert_eq!(offered.iter().copied().collect::<HashSet<_>>(), resident, "{order:?}");
                let plan = own(&policy).unwrap();
                let behind = plan.expected_behind(&policy.ahead);
                let rank = |n: &u32| (behind.contains(n), !behind.contains(n) && plan.keep(*n) == Some(Keep::Device));
                let key = |n: &u32| (rank(n), (!behind.contains(n)).then(|| std::cmp::Reverse(next(*n))));
                assert!(offered.is_sorted_by_key(key), "{order:?} at {cursor}: {offered:?}");
                assert!(resident.iter().all(|n| plan.next_use(0, *n) == (next(*n) as u64).min(NEVER)));
            }
        }
    }

    /// Pinned pages do not lengthen every search, and are found again once they are unpinned.
    #[test]
    fn regression_pinned_pages_are_not_offered_at_every_search() {
        let mut policy = policy();
        policy.resize(2000, 0, 2);
        policy.declare(&(0..4000).map(page).collect::<Vec<_>>(), true);
        for n in 0..2000 {
            policy.accessed(page(n));
            policy.inserted(page(n));
        }
        // The pages used last are those used farthest in the future.
        let pinned = |n: u32| n >= 1000;
        let mut offers = 0;
        for _ in 0..900 {
            let victim = policy.victim(Want::Demand, &mut |victim| {
                offers += 1;
                if pinned(victim.index.0) { Take::Skip } else { Take::Yes }
            });
            let victim = victim.unwrap();
            assert!(!pinned(victim.index.0));
            policy.removed(victim);
        }
        assert!(offers < 900 * (1 + RETURNING as u32) + 2 * 1000, "{offers} offers for 900 victims");
        for _ in 0..1100 {
            let victim = policy.victim(Want::Demand, &mut |_| Take::Yes).unwrap();
            policy.removed(victim);
        }
        assert_eq!(policy.victim(Want::Demand, &mut |_| Take::Yes), None);
    }
}
