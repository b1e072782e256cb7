//! Following plans: the orders in which pages will be used, declared or recognised.
//!
//! A plan is followed by walkers: passes in progress, each at its own place. Uses that no walker was named for are the
//! default walker's. Walkers that declare the same order, or are seen to use pages in an order that is known, follow one
//! plan.
//!
//! # Which pages stay
//!
//! On a cycle of `n` pages with `m < n` frames, evicting the page whose next use is farthest (Belady) is optimal for
//! faults on demand. With fills ahead of use it is not enough: a filler that always fetches the next missing page
//! replaces each page right after its use and moves all `n` pages every pass, and a resident block of consecutive pages
//! leaves the disk idle while it is computed on. So the frames are divided: `s` of them stream, the other `m - s` keep
//! pages for good, chosen so that the streamed pages lie evenly among them. Each pass then moves `n - (m - s)` pages,
//! and every stall can hide behind resident compute. Pages used more than once a cycle are kept first.
//!
//! Behind each walker there is a gap: the pages it has used and that the next walker behind it has still to use. To keep all
//! pages of a gap takes as many frames as the gap is long, and saves the next walker all of its fills. So gaps are kept
//! whole, the shortest in time first, as long as frames last; in the first that does not fit (the *marginal* one) a part of the
//! pages is kept, evenly spread as above; what is used later than that is not kept. One walker alone has one gap, the whole
//! cycle. Walkers that are close together have one long gap behind the last of them, and short ones between them.
//!
//! # Which page goes
//!
//! In this order: pages that no followed plan names, least recently used first; pages that are used later than those of the
//! marginal gap; streamed pages of the marginal gap; kept ones; and the rest; of each, those with the farthest next use by any
//! walker first; last of all, a page that two tensors share of which a walker has used the first. A fill ahead of use never takes a page that is used sooner than what it fills, and never a kept page for a
//! streamed one.
//!
//! Where nothing is filled ahead and there is no host tier, no page is kept: all go by farthest next use.
//!
//! # When the order changes
//!
//! Each use is compared with the one that is expected of its walker. Small skips move its place; strays are ignored; a new
//! position that holds for a few uses is taken over. When most uses are unexpected the walker is suspended, and its place
//! counts for nothing, until either a few uses in a row follow the plan again, or it is seen to follow another plan, or its
//! recorder has recognised a new cycle. While no walker follows any plan, pages leave in LRU order and nothing is filled ahead.
//!
//! A walker's speed is the share of all uses that are its own, of late. One that makes none stands still, and counts for
//! nothing until it goes on.

use slab::Slab;
use smallvec::SmallVec;

use super::active::{Active, Keep, NEVER, Place, RESYNC_RUN, Stopped, Stretch};
use super::cycle::CycleRecorder;
use super::{Policy, Take, WalkerPlace, Want};
use crate::ids::{PageId, SegmentId, WalkerId};
use crate::pager::order::Order;

/// Cycles of a plan that nobody declared which are remembered; twice as many each time that one ends, up to so many.
const DOUBT: u64 = 4;
const DOUBT_MAX: u64 = 1 << 10;
/// Frames beyond the lookahead and one unit that streaming keeps, for uses the plan does not name.
const STREAM_SLACK: u32 = 2;
/// Plans kept that nobody follows any more: the next pass over a model need not be learned anew.
const LEFT: usize = 4;
/// Uses after which speeds are looked at: an eighth of all planned pages, within these bounds.
const EPOCH_MIN: u64 = 64;
const EPOCH_MAX: u64 = 1 << 16;
/// The speed of a walker that makes every use.
const FULL_SPEED: u64 = 1 << 16;
/// The weight of a walker of full speed: so fine are speeds told apart.
const FULL_WEIGHT: u64 = 1 << 4;

/// Follows the orders in which pages will be used, declared or recognised; falls back to least recently used.
#[derive(Debug)]
pub struct PlanPolicy {
    frames: u32,
    host_frames: u32,
    lookahead: u32,
    unit: u32,
    /// Every resident page, in order of use.
    recency: Order,
    plans: Slab<Active>,
    walkers: Vec<Walk>,
    /// The one that uses belong to now.
    current: usize,
    /// Uses since speeds were looked at; only counted where there are several walkers.
    uses: u64,
    epoch: u64,
    /// Plans that were left so far.
    left: u64,
    /// Uses that each walker's recorder may remember.
    share: usize,
}

/// A walker, whether it follows a plan or not.
#[derive(Debug)]
struct Walk {
    id: WalkerId,
    plan: Option<usize>,
    recorder: CycleRecorder,
    /// How many cycles of a recognised plan have to be followed before uses are no longer remembered. Until then it may be
    /// a part of a longer cycle which repeats within it.
    doubt: u64,
    /// Of a walker that follows none: the plan and the position of its last use, and how many before it came in that order.
    lead: Option<(usize, usize, u32)>,
    /// Of late, its share of all uses, of [`FULL_SPEED`].
    speed: u64,
    /// Uses since speeds were looked at.
    uses: u64,
}

impl Walk {
    fn new(id: WalkerId, share: usize) -> Self {
        let recorder = CycleRecorder::new(share);
        Self { id, plan: None, recorder, doubt: DOUBT, lead: None, speed: 0, uses: 0 }
    }
}

/// Where the gaps behind walkers are divided, by the distance of the pages at their ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bounds {
    /// Gaps up to here are kept whole.
    whole: u64,
    /// The marginal gap ends here; [`NEVER`] if none is longer.
    marginal: u64,
    /// The plan the marginal gap is in, and how many of its pages are to be kept.
    keeps: Option<(usize, usize)>,
}

/// A page that may go.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    plan: usize,
    stretch: Stretch,
    position: usize,
    distance: u64,
}

/// A search for a page that may go, by where all walkers are.
#[derive(Debug)]
struct Search {
    bounds: Bounds,
    /// Pages that are used so soon, or sooner, do not go.
    floor: Option<u64>,
    for_kept: bool,
    /// Positions of pages that could not be taken, and their plans.
    skipped: SmallVec<[(usize, usize); 8]>,
    /// Positions at which pages are not used next: by now they are used sooner at another one, or by another plan.
    misplaced: SmallVec<[(usize, usize); 8]>,
}

impl Bounds {
    /// The one of the highest rank goes first; of one rank, that of the greatest distance.
    fn rank(&self, candidate: &Candidate) -> u8 {
        match candidate.distance {
            later if later > self.marginal => 3,
            soon if soon <= self.whole => 0,
            _ if candidate.stretch.kept => 1,
            _ => 2,
        }
    }
}

/// The most pages of one unit that are streamed, when `frames` of `pages` are resident and the streamed lie evenly among
/// the kept.
fn streamed_of_unit(unit: u32, frames: u32, pages: u32) -> u32 {
    let streamed = u64::from(unit) * u64::from(pages - frames.min(pages)) / u64::from(pages.max(1));
    (streamed as u32 + 2).min(unit)
}

/// How many pages stay for good, of a plan that names `pages`, with `frames` in the device tier, fills that start
/// `lookahead` pages ahead, and requests that pin `unit` pages at most. The others stream.
fn stay(frames: u32, pages: u32, lookahead: u32, unit: u32) -> u32 {
    if pages <= frames {
        return frames;
    }
    let streaming = lookahead.saturating_add(streamed_of_unit(unit, frames, pages)).saturating_add(STREAM_SLACK);
    frames.saturating_sub(streaming)
}

/// How many pages a pass finds resident, of one that uses each of `pages` once and nothing else: those that
/// stay, and what the frames hold that streaming keeps for uses the plan does not name. Where those do not come, the
/// pages used longest ago remain in them, and these are the ones that come next.
pub(crate) fn found(frames: u32, pages: u32, lookahead: u32, unit: u32) -> u32 {
    let stay = stay(frames, pages, lookahead, unit);
    if stay < frames { (stay + STREAM_SLACK).min(frames) } else { stay }
}

impl PlanPolicy {
    /// Without a plan.
    pub fn new() -> Self {
        let share = CycleRecorder::share(1);
        Self {
            frames: 0,
            host_frames: 0,
            lookahead: 0,
            unit: 1,
            recency: Order::new(),
            plans: Slab::new(),
            walkers: vec![Walk::new(WalkerId::DEFAULT, share)],
            current: 0,
            uses: 0,
            epoch: EPOCH_MIN,
            left: 0,
            share,
        }
    }

    /// The only place that is known of any walker, if there is one only: its plan, and which of its places.
    fn alone(&self) -> Option<(usize, usize)> {
        let mut known = self.plans.iter().flat_map(|(plan, active)| {
            let places = active.places.iter().enumerate().filter(|(_, place)| place.is_known());
            places.map(move |(at, _)| (plan, at))
        });
        let first = known.next()?;
        known.next().is_none().then_some(first)
    }

    /// Whether pages are kept at all: where nothing is filled ahead, and no tier holds what others lack, Belady's rule alone
    /// is best.
    fn on_demand(&self) -> bool {
        self.lookahead == 0 && self.host_frames == 0
    }

    /// Chooses the pages of a plan that stay.
    fn divide(&mut self, plan: usize, keeps: usize) {
        let all: u64 = self.plans.iter().map(|(_, active)| u64::from(active.planned)).sum();
        let active = &mut self.plans[plan];
        let host = u64::from(self.host_frames) * u64::from(active.planned) / all.max(1);
        active.divide(keeps, host as usize);
    }

    /// Chooses the pages that stay, after sizes have changed or plans have come and gone.
    fn divide_all(&mut self) {
        let alone = self.alone();
        for plan in self.plans.iter().map(|(plan, _)| plan).collect::<Vec<_>>() {
            let planned = self.plans[plan].planned;
            let known = alone.is_none_or(|(alone, _)| alone == plan);
            let keeps =
                if self.on_demand() || !known { 0 } else { stay(self.frames, planned, self.lookahead, self.unit) };
            self.divide(plan, keeps as usize);
        }
        if alone.is_none() {
            self.follow_gaps(0);
        }
    }

    /// Chooses the pages that stay in the marginal gap, if that would make a difference of more than so many.
    fn follow_gaps(&mut self, slack: usize) {
        if let Some((plan, keeps)) = self.bounds().keeps
            && keeps.abs_diff(self.plans[plan].keeping) > slack
        {
            self.divide(plan, keeps);
        }
    }

    /// Which gaps behind walkers can be kept.
    fn bounds(&self) -> Bounds {
        // Its distance, how many pages it has, and its plan.
        let mut gaps: SmallVec<[(u64, usize, usize); 16]> = SmallVec::new();
        let mut planned = 0;
        for (plan, active) in &self.plans {
            let standing = active.standing();
            planned += if standing.is_empty() { 0 } else { active.planned };
            let n = active.order.len();
            for (nth, place) in standing.iter().enumerate() {
                let (before, turned) = match nth.checked_sub(1) {
                    Some(nth) => (standing[nth], 0),
                    None => (standing[standing.len() - 1], n),
                };
                if nth == 0 && !active.cyclic {
                    gaps.push((NEVER, n, plan));
                    continue;
                }
                let last = (place + n - 1) % n;
                gaps.push((active.distance_at(last as u32), place + turned - before, plan));
            }
        }
        gaps.sort_unstable();
        let mut left = self.frames as usize;
        if !self.on_demand() {
            let unit = streamed_of_unit(self.unit, self.frames, planned) * gaps.len() as u32;
            left = left.saturating_sub((self.lookahead + unit + STREAM_SLACK) as usize);
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

    /// The current walker follows this order from here on, or a part of it that comes `after` its beginning.
    fn follow(&mut self, order: impl Iterator<Item = u32>, cyclic: bool, declared: bool) {
        self.leave(self.current, declared);
        let Some(new) = Active::new(order, cyclic) else { return };
        let known = self.plans.iter().find_map(|(plan, active)| Some((plan, new.begins_in(active)?)));
        let (plan, start) = known.unwrap_or_else(|| {
            let plan = self.plans.insert(new);
            let active = &mut self.plans[plan];
            for number in self.recency.present_numbers() {
                if active.names(number) {
                    active.file(number);
                }
            }
            (plan, 0)
        });
        self.plans[plan].declared |= declared;
        self.join(plan, start);
    }

    /// The current walker is at this position of a plan.
    fn join(&mut self, plan: usize, position: usize) {
        let active = &mut self.plans[plan];
        let mut place = Place::new(self.walkers[self.current].id, 1);
        if active.declared {
            place.followed = u64::MAX;
        }
        active.places.push(place);
        active.go_to(active.places.len() - 1, position as u64);
        // Afterwards, because a plan that nobody follows may have to go.
        self.leave(self.current, false);
        let walk = &mut self.walkers[self.current];
        (walk.plan, walk.lead) = (Some(plan), None);
        self.set_off();
        self.weigh();
        self.forget_left();
        self.share_memory();
        self.divide_all();
    }

    /// A walker no longer follows its plan. One that nobody follows is kept for the next who does, unless it is `gone` for good.
    fn leave(&mut self, walker: usize, gone: bool) {
        let walk = &mut self.walkers[walker];
        let Some(plan) = walk.plan.take() else { return };
        walk.recorder.clear();
        let active = &mut self.plans[plan];
        active.places.retain(|place| place.walker != walk.id);
        active.settle();
        if active.places.is_empty() {
            self.left += 1;
            active.left = self.left;
            if gone || !active.cyclic {
                self.remove_plan(plan);
            }
        }
        self.weigh();
        self.forget_left();
        self.share_memory();
        self.divide_all();
    }

    /// Divides what recorders may remember among the walkers that may have something to record.
    fn share_memory(&mut self) {
        let declared = |walk: &Walk| walk.plan.is_some_and(|plan| self.plans[plan].declared);
        let share = CycleRecorder::share(self.walkers.iter().filter(|walk| !declared(walk)).count());
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
        for walk in &mut self.walkers {
            walk.plan = walk.plan.filter(|own| *own != plan);
            walk.lead = walk.lead.filter(|lead| lead.0 != plan);
        }
    }

    /// The current walker, which stood still, is taken to go as fast as the others.
    fn set_off(&mut self) {
        let moving = self.walkers.iter().filter(|walk| walk.speed > 0).count() as u64;
        let walk = &mut self.walkers[self.current];
        if walk.speed == 0 {
            walk.speed = FULL_SPEED / (moving + 1);
        }
    }

    /// Of each walker that follows a plan, its weight.
    #[cfg(test)]
    pub(super) fn weights(&self) -> Vec<(WalkerId, u64)> {
        let places = self.plans.iter().flat_map(|(_, active)| active.places.iter());
        places.filter(|place| !place.suspended).map(|place| (place.walker, place.weight)).collect()
    }

    /// What a step of each walker is worth, by its speed.
    fn weigh(&mut self) {
        for walk in &self.walkers {
            let Some(active) = walk.plan.and_then(|plan| self.plans.get_mut(plan)) else { continue };
            let Some(at) = active.place_of(walk.id) else { continue };
            let place = &mut active.places[at];
            let was_known = place.is_known();
            place.weight = (FULL_SPEED * FULL_WEIGHT).checked_div(walk.speed).unwrap_or(0);
            if place.is_known() != was_known {
                active.settle();
            }
        }
    }

    /// Counts a use of the current walker, where there are several.
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

    /// Whether the current walker, which follows no plan, is seen to follow one: then it is in it.
    fn finds_a_plan(&mut self, number: u32) -> bool {
        let walk = &mut self.walkers[self.current];
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
            self.join(plan, position + 1);
            return true;
        }
        let own = walk.plan;
        let named = self.plans.iter().find(|(plan, active)| Some(*plan) != own && active.names(number));
        walk.lead = named.map(|(plan, active)| (plan, active.positions(number)[0] as usize, 1));
        false
    }

    /// The first plan that is followed and names the page.
    fn planned(&self, number: u32) -> Option<&Active> {
        let mut plans = self.plans.iter().map(|(_, active)| active);
        plans.find(|active| active.names(number) && active.is_followed())
    }

    /// In how many uses, of all walkers, one of them uses the page; and in which plan.
    fn distance(&self, number: u32) -> Option<(u64, usize)> {
        let named = self.plans.iter().filter(|(_, active)| active.names(number) && active.is_followed());
        named.map(|(plan, active)| (active.distance(number), plan)).min()
    }

    fn keep(&self, page: PageId) -> Option<Keep> {
        let number = self.recency.numbers().number(page)?;
        self.planned(number).and_then(|active| active.keep(number))
    }

    /// Offers pages that no followed plan names.
    fn victim_outside(&self, must: bool, take: &mut dyn FnMut(PageId) -> Take) -> Result<Option<PageId>, Stopped> {
        let followed = || self.plans.iter().map(|(_, active)| active).filter(|active| active.is_followed());
        let resident: usize = followed().map(Active::resident).sum();
        // Pages that two plans name are counted twice: then one has to look.
        let overlap = followed().count() > 1 && self.recency.len() <= resident;
        if self.recency.len() <= resident && !overlap {
            return Ok(None);
        }
        let numbers = self.recency.numbers();
        let mut looks = if overlap && !must { OVERLAP_LOOKS } else { usize::MAX };
        let mut stopped = false;
        let found = self.recency.offer(&mut |page| {
            // Pages outside the plans are few; skipping the others costs one look each.
            if numbers.number(page).is_some_and(|number| self.planned(number).is_some()) {
                looks -= 1;
                return if looks == 0 { Take::Stop } else { Take::Skip };
            }
            let taken = take(page);
            stopped |= taken == Take::Stop;
            taken
        });
        if stopped { Err(Stopped) } else { Ok(found) }
    }

    /// Offers pages by where all walkers are.
    fn victim_of_all(&mut self, want: Want, must: bool, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        let bounds = self.bounds();
        let number = match want {
            Want::Planned(page) => Some(self.recency.numbers().number(page)),
            _ => None,
        };
        // What is to be filled, by its distance, and whether it may take a kept page's frame.
        let (floor, for_kept) = match number {
            None => (None, want != Want::Hint),
            Some(number) => match number.and_then(|number| Some((number, self.distance(number)?))) {
                None => return None,
                Some((number, (distance, plan))) => {
                    let kept = self.plans[plan].keep(number) == Some(Keep::Device);
                    (Some(distance), kept || distance <= bounds.whole)
                }
            },
        };
        let followed: SmallVec<[usize; 8]> =
            self.plans.iter().filter(|(_, active)| active.is_followed()).map(|(plan, _)| plan).collect();
        for plan in &followed {
            self.plans[*plan].bring_back();
        }
        let mut search = Search { bounds, floor, for_kept, skipped: SmallVec::new(), misplaced: SmallVec::new() };
        let mut found = self.search(&followed, &mut search, take);
        if must && matches!(found, Ok(None)) && !search.misplaced.is_empty() {
            // They have their right place now.
            found = self.search(&followed, &mut search, take);
        }
        if must && matches!(found, Ok(None)) {
            found = self.victim_held(&followed, take);
        }
        if want != Want::Memory {
            for (plan, position) in search.skipped {
                self.plans[plan].hold([position]);
            }
        }
        found.ok().flatten()
    }

    /// Offers the pages of all stretches between walkers, merged.
    fn search(
        &mut self,
        followed: &[usize],
        search: &mut Search,
        take: &mut dyn FnMut(PageId) -> Take,
    ) -> Result<Option<PageId>, Stopped> {
        let Search { bounds, floor, for_kept, skipped, misplaced } = search;
        let plans = &self.plans;
        let mut candidates: SmallVec<[Candidate; 32]> = SmallVec::new();
        let next = |plan: usize, mut stretch: Stretch| {
            let (position, distance) = plans[plan].next_of(&mut stretch)?;
            let candidate = Candidate { plan, stretch, position, distance };
            let worth = floor.is_none_or(|floor| distance > floor);
            let allowed = *for_kept || !stretch.kept || bounds.rank(&candidate) != 1;
            (worth && allowed).then_some(candidate)
        };
        for plan in followed {
            candidates.extend(plans[*plan].stretches().filter_map(|stretch| next(*plan, stretch)));
        }
        misplaced.clear();
        let mut found = Ok(None);
        loop {
            let by = |(_, candidate): &(usize, &Candidate)| (bounds.rank(candidate), candidate.distance);
            let Some((at, candidate)) = candidates.iter().enumerate().max_by_key(by) else { break };
            let candidate = *candidate;
            match next(candidate.plan, candidate.stretch) {
                Some(next) => candidates[at] = next,
                None => {
                    candidates.swap_remove(at);
                }
            }
            let place = (candidate.plan, candidate.position);
            let number = plans[candidate.plan].order[candidate.position];
            if self.distance(number) != Some((candidate.distance, candidate.plan)) {
                misplaced.push(place);
                continue;
            }
            let mut others = followed.iter().map(|plan| &plans[*plan]);
            if skipped.contains(&place) || others.any(|active| active.is_held(number) || active.stays(number)) {
                continue;
            }
            let page = self.recency.numbers().page(number);
            match take(page) {
                Take::Yes => found = Ok(Some(page)),
                Take::Skip => {
                    skipped.push(place);
                    continue;
                }
                Take::Stop => found = Err(Stopped),
            }
            break;
        }
        for (plan, position) in misplaced {
            let active = &mut self.plans[*plan];
            active.refile_page(active.order[*position]);
        }
        found
    }

    /// Offers, in no order, the pages that no search offers: those that could not be taken at earlier ones, and those that
    /// their walkers are about to use once more. Each once, however many plans name it.
    fn victim_held(&self, plans: &[usize], take: &mut dyn FnMut(PageId) -> Take) -> Result<Option<PageId>, Stopped> {
        let held_in = |plans: &[usize], number: u32| plans.iter().any(|plan| self.plans[*plan].is_held(number));
        let staying = plans.iter().flat_map(|plan| self.plans[*plan].staying());
        let mut staying: SmallVec<[u32; 8]> = staying.filter(|number| !held_in(plans, *number)).collect();
        staying.sort_unstable();
        staying.dedup();
        for number in staying {
            let page = self.recency.numbers().page(number);
            match take(page) {
                Take::Yes => return Ok(Some(page)),
                Take::Skip => {}
                Take::Stop => return Err(Stopped),
            }
        }
        for (nth, plan) in plans.iter().enumerate() {
            let active = &self.plans[*plan];
            let mut next = active.held.first_from(0);
            while let Some(position) = next {
                next = active.held.first_from(position + 1);
                let number = active.order[position];
                if held_in(&plans[..nth], number) {
                    continue;
                }
                let page = self.recency.numbers().page(number);
                match take(page) {
                    Take::Yes => return Ok(Some(page)),
                    Take::Skip => {}
                    Take::Stop => return Err(Stopped),
                }
            }
        }
        Ok(None)
    }
}

/// Pages of plans that are looked at for one outside, where plans have pages in common.
const OVERLAP_LOOKS: usize = 64;

impl Default for PlanPolicy {
    fn default() -> Self {
        Self::new()
    }
}

impl Policy for PlanPolicy {
    fn name(&self) -> &'static str {
        "plan"
    }

    fn resize(&mut self, frames: u32, host_frames: u32, lookahead: u32) {
        (self.frames, self.host_frames, self.lookahead) = (frames, host_frames, lookahead);
        self.divide_all();
    }

    fn unit(&mut self, pages: u32) {
        // A unit the size of the memory would leave nothing to keep; what it needs, it takes on demand.
        let pages = pages.min((self.frames / 4).max(1));
        if pages > self.unit {
            self.unit = pages;
            self.divide_all();
        }
    }

    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.recency.add_segment(segment, pages);
    }

    fn walker(&mut self, walker: WalkerId) {
        let known = self.walkers.iter().position(|walk| walk.id == walker);
        self.current = known.unwrap_or(self.walkers.len());
        if known.is_none() {
            self.walkers.push(Walk::new(walker, self.share));
            self.share_memory();
        }
    }

    fn walker_ended(&mut self, walker: WalkerId) {
        let Some(at) = self.walkers.iter().position(|walk| walk.id == walker) else { return };
        self.leave(at, false);
        if walker != WalkerId::DEFAULT {
            self.walkers.remove(at);
            self.current = 0;
            self.share_memory();
        }
        if self.walkers.len() == 1 {
            // Nobody is left to compare it with.
            self.walkers[0].speed = FULL_SPEED;
            self.weigh();
            self.divide_all();
        }
    }

    fn accessed(&mut self, page: PageId) {
        let Some(number) = self.recency.numbers().number(page) else { return };
        self.recency.touch(page);
        self.count();
        let walk = &mut self.walkers[self.current];
        if let Some(plan) = walk.plan
            && let Some(at) = self.plans[plan].place_of(walk.id)
        {
            let active = &mut self.plans[plan];
            let followed = !active.places[at].suspended;
            if active.names(number) {
                active.advance(at, number);
            } else {
                active.places[at].judge(false);
            }
            let suspended = active.places[at].suspended;
            if followed && suspended {
                walk.doubt = (2 * walk.doubt).min(DOUBT_MAX);
            }
            if followed == suspended && active.places.len() > 1 {
                active.settle();
            }
            if active.exhausted(at) {
                self.leave(self.current, true);
            } else if !suspended {
                let doubted = active.places[at].followed < active.len().saturating_mul(walk.doubt);
                if doubted && walk.recorder.may_be_a_part(active.len()) {
                    walk.recorder.push_believed(number);
                } else if !walk.recorder.is_empty() {
                    walk.recorder.clear();
                }
                return;
            }
        }
        if self.finds_a_plan(number) {
            return;
        }
        if let Some(order) = self.walkers[self.current].recorder.push(number) {
            self.follow(order.into_iter(), true, false);
        }
    }

    fn inserted(&mut self, page: PageId) {
        self.recency.insert(page);
        let Some(number) = self.recency.numbers().number(page) else { return };
        for (_, active) in &mut self.plans {
            if active.names(number) {
                active.file(number);
            }
        }
    }

    fn removed(&mut self, page: PageId) {
        self.recency.remove(page);
        let Some(number) = self.recency.numbers().number(page) else { return };
        for (_, active) in &mut self.plans {
            if active.names(number) {
                active.removed(number);
            }
        }
    }

    fn forget(&mut self, segment: SegmentId) {
        let numbers = self.recency.numbers().of_segment(segment);
        for walk in &mut self.walkers {
            walk.recorder.forget(numbers.clone());
        }
        let named = |active: &Active| numbers.clone().any(|number| active.names(number as u32));
        let gone: Vec<usize> = self.plans.iter().filter(|(_, active)| named(active)).map(|(plan, _)| plan).collect();
        for plan in &gone {
            self.remove_plan(*plan);
        }
        self.recency.remove_segment(segment);
        if !gone.is_empty() {
            self.divide_all();
        }
    }

    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        if !self.has_plan() {
            return self.recency.offer_for(want, take);
        }
        // What nobody waits for is not worth a look at everything.
        let must = matches!(want, Want::Demand | Want::Room | Want::Memory);
        match self.victim_outside(must, take) {
            Ok(None) => {}
            found => return found.ok().flatten(),
        }
        let Some((plan, at)) = self.alone() else { return self.victim_of_all(want, must, take) };
        let active = &mut self.plans[plan];
        let numbers = self.recency.numbers();
        let (floor, for_kept) = match want {
            Want::Planned(page) => match numbers.number(page).filter(|number| active.names(*number)) {
                Some(number) => (Some(active.next_use(at, number)), active.keep(number) == Some(Keep::Device)),
                None => (Some(0), false),
            },
            Want::Hint => (None, false),
            _ => (None, true),
        };
        let (found, skipped) = active.victim(at, numbers, floor, for_kept, must, take);
        if want != Want::Memory {
            active.hold(skipped);
        }
        found.ok().flatten()
    }

    fn declare(&mut self, order: &[PageId], cyclic: bool) {
        let walk = &mut self.walkers[self.current];
        walk.recorder.clear();
        walk.doubt = DOUBT;
        if order.is_empty() {
            self.leave(self.current, true);
            return;
        }
        let numbers = self.recency.numbers().clone();
        self.follow(order.iter().filter_map(|page| numbers.number(*page)), cyclic, true);
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
            }));
        }
        all
    }

    fn next_fill(&mut self, present: &dyn Fn(PageId) -> bool) -> Option<PageId> {
        let ahead: usize = self.plans.iter().map(|(_, active)| active.ahead.len()).sum();
        if ahead >= self.lookahead as usize {
            return None;
        }
        let numbers = self.recency.numbers();
        let mut next: Option<(u64, u32)> = None;
        for (_, active) in &mut self.plans {
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
    }

    fn worth_host(&self, page: PageId) -> bool {
        self.keep(page) != Some(Keep::Streamed)
    }

    fn tracked(&self) -> Vec<PageId> {
        self.recency.pages().collect()
    }

    fn check(&self) -> Result<(), String> {
        self.plans.iter().try_for_each(|(_, active)| active.check(self.recency.present_numbers()))
    }

    fn host_victim(&self, candidate: PageId, incoming: PageId) -> bool {
        self.keep(candidate) != Some(Keep::Host) || self.keep(incoming).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::super::active::RETURNING;
    use super::*;
    use crate::ids::PageIndex;
    use std::collections::HashSet;

    fn page(n: u32) -> PageId {
        PageId { segment: SegmentId(0), index: PageIndex(n) }
    }

    fn policy() -> PlanPolicy {
        let mut policy = PlanPolicy::new();
        policy.segment(SegmentId(0), 4096);
        policy
    }

    /// The plan the only walker follows, unless it is suspended.
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
        let mut resident: HashSet<PageId> = HashSet::new();
        let mut fills = Vec::new();
        for _ in 0..passes {
            let mut count = 0;
            for number in 0..n {
                let used = page(number);
                policy.accessed(used);
                if !resident.contains(&used) {
                    count += 1;
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
            fills.push(count);
        }
        fills
    }

    /// A page that was held aside, because it could not be taken, was counted once more when it was told of again, and pages
    /// that the plan does not name were not offered.
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

    /// A page that a plan names twice was filed nowhere once a walker had used it last, although another one follows the plan:
    /// it was in nobody's list, nor outside of plans, and its frame was lost for good.
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

    /// A part of the pass that repeats at once was taken for the pass whenever it came: while it was followed nothing was
    /// remembered, and the pass was never seen whole.
    #[test]
    fn regression_a_part_that_repeats_does_not_hide_the_pass() {
        let mut policy = policy();
        policy.resize(64, 0, 0);
        for repeats in [3, 12] {
            let pass: Vec<u32> = (0..300).chain((300..340).cycle().take(40 * repeats)).chain(340..600).collect();
            for (at, n) in pass.iter().cycle().take(40 * pass.len()).enumerate() {
                policy.accessed(page(*n));
                // Each time that the part is believed it is believed later.
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
                let key = |n: &u32| (plan.keep(*n) == Some(Keep::Device), std::cmp::Reverse(next(*n)));
                assert!(offered.is_sorted_by_key(key), "{order:?} at {cursor}: {offered:?}");
                assert!(resident.iter().all(|n| plan.next_use(0, *n) == (next(*n) as u64).min(NEVER)));
            }
        }
    }

    /// Pages that are pinned do not lengthen every search, and are found again when they no longer are.
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
