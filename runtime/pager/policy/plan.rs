//! Following a plan: the order in which pages will be used, declared or recognised.
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
//! # Which page goes
//!
//! In this order: pages the plan does not name, least recently used first; streamed pages, farthest next use first;
//! kept pages, farthest next use first. A fill ahead of use never takes a page that is used sooner than what it fills,
//! and never a kept page for a streamed one.
//!
//! # When the order changes
//!
//! Each use is compared with the expected one. Small skips move the cursor; strays are ignored; a new position that
//! holds for a few uses is taken over. When most uses are unexpected the plan is suspended: pages leave in LRU order and
//! nothing is filled ahead, until either a few uses in a row follow the plan again, or the recorder has recognised a new
//! cycle, which takes its place.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::cycle::CycleRecorder;
use super::lru::LruOrder;
use super::{PageHashing, Policy, Take, Want};
use crate::ids::{PageId, SegmentId};

/// Consecutive uses at a new position after which the cursor moves there.
const RESYNC_RUN: u32 = 3;
/// Confidence goes up or down by one a use: 64 unexpected uses in a row suspend a plan.
const CONFIDENCE_MAX: i32 = 64;
/// Frames beyond the lookahead and one unit that streaming keeps, for uses the plan does not name.
const STREAM_SLACK: u32 = 2;

/// Follows the order in which pages will be used, declared or recognised; falls back to least recently used.
#[derive(Debug)]
pub struct PlanPolicy {
    frames: u32,
    host_frames: u32,
    lookahead: u32,
    unit: u32,
    /// Every resident page, in order of use.
    recency: LruOrder,
    recorder: CycleRecorder,
    plan: Option<Active>,
}

/// A plan being followed. Times are uses since it was taken up.
#[derive(Debug)]
struct Active {
    pages: Vec<PageId>,
    number: HashMap<PageId, u32, PageHashing>,
    /// The order, as indices into `pages`.
    order: Vec<u32>,
    /// For page `i`, its positions in `order` are `positions[starts[i]..starts[i + 1]]`.
    starts: Vec<u32>,
    positions: Vec<u32>,
    cyclic: bool,
    keep: Vec<Keep>,
    /// The next expected use.
    cursor: u64,
    /// Everything from the cursor up to here is resident or on its way.
    scan: u64,
    last_used: Option<u32>,
    stray: Option<(u64, u32)>,
    confidence: i32,
    suspended: bool,
    /// Filled ahead, not used yet.
    ahead: HashSet<u32>,
    /// Resident pages by next use, by class.
    streamed: BTreeSet<(u64, u32)>,
    kept: BTreeSet<(u64, u32)>,
    /// The next use under which a resident page is filed.
    filed: Vec<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Keep {
    Device,
    Host,
    Streamed,
}

const NOT_FILED: u64 = u64::MAX;

impl Active {
    fn new(order: &[PageId], cyclic: bool) -> Self {
        let mut pages = Vec::new();
        let mut number = HashMap::default();
        let mut indices: Vec<u32> = Vec::with_capacity(order.len());
        for page in order {
            let index = *number.entry(*page).or_insert_with(|| {
                pages.push(*page);
                pages.len() as u32 - 1
            });
            if indices.last() != Some(&index) {
                indices.push(index);
            }
        }
        if cyclic && indices.len() > 1 && indices.first() == indices.last() {
            indices.pop();
        }
        let mut starts = vec![0u32; pages.len() + 1];
        for index in &indices {
            starts[*index as usize + 1] += 1;
        }
        for at in 1..starts.len() {
            starts[at] += starts[at - 1];
        }
        let mut fill = starts.clone();
        let mut positions = vec![0u32; indices.len()];
        for (at, index) in indices.iter().enumerate() {
            positions[fill[*index as usize] as usize] = at as u32;
            fill[*index as usize] += 1;
        }
        Self {
            keep: vec![Keep::Streamed; pages.len()],
            filed: vec![NOT_FILED; pages.len()],
            pages,
            number,
            order: indices,
            starts,
            positions,
            cyclic,
            cursor: 0,
            scan: 0,
            last_used: None,
            stray: None,
            confidence: CONFIDENCE_MAX,
            suspended: false,
            ahead: HashSet::new(),
            streamed: BTreeSet::new(),
            kept: BTreeSet::new(),
        }
    }

    fn len(&self) -> u64 {
        self.order.len() as u64
    }

    fn positions(&self, index: u32) -> &[u32] {
        &self.positions[self.starts[index as usize] as usize..self.starts[index as usize + 1] as usize]
    }

    /// When page `index` is next used at or after `from`; `u64::MAX - 1` if never again.
    fn next_use(&self, index: u32, from: u64) -> u64 {
        let n = self.len();
        let (pass, at) = (from / n, (from % n) as u32);
        let positions = self.positions(index);
        let later = positions.partition_point(|position| *position < at);
        match positions.get(later) {
            Some(position) => pass * n + u64::from(*position),
            None if self.cyclic => (pass + 1) * n + u64::from(positions[0]),
            None => NOT_FILED - 1,
        }
    }

    /// Whether the plan has anything left to say.
    fn exhausted(&self) -> bool {
        !self.cyclic && self.cursor >= self.len()
    }

    fn file(&mut self, index: u32, next: u64) {
        self.unfile(index);
        self.filed[index as usize] = next;
        self.class(index).insert((next, index));
    }

    fn unfile(&mut self, index: u32) {
        let next = self.filed[index as usize];
        if next != NOT_FILED {
            self.class(index).remove(&(next, index));
            self.filed[index as usize] = NOT_FILED;
        }
    }

    fn class(&mut self, index: u32) -> &mut BTreeSet<(u64, u32)> {
        match self.keep[index as usize] {
            Keep::Device => &mut self.kept,
            _ => &mut self.streamed,
        }
    }

    /// Divides the pages: `device` of them are kept there, `host` in the host tier, evenly spread in order of first use,
    /// those used most often first.
    fn divide(&mut self, device: usize, host: usize) {
        let filed: Vec<(u32, u64)> = (0..self.pages.len() as u32)
            .filter(|index| self.filed[*index as usize] != NOT_FILED)
            .map(|index| (index, self.filed[index as usize]))
            .collect();
        self.streamed.clear();
        self.kept.clear();
        self.filed.fill(NOT_FILED);
        self.keep.fill(Keep::Streamed);
        let often: Vec<usize> = (0..self.pages.len()).filter(|i| self.positions(*i as u32).len() > 1).collect();
        let once: Vec<usize> = (0..self.pages.len()).filter(|i| self.positions(*i as u32).len() == 1).collect();
        let of_often = spread(often.len(), device);
        for at in of_often.iter() {
            self.keep[often[*at]] = Keep::Device;
        }
        for at in spread(once.len(), device - of_often.len()) {
            self.keep[once[at]] = Keep::Device;
        }
        let rest: Vec<usize> = (0..self.pages.len()).filter(|i| self.keep[*i] == Keep::Streamed).collect();
        for at in spread(rest.len(), host) {
            self.keep[rest[at]] = Keep::Host;
        }
        for (index, next) in filed {
            self.file(index, next);
        }
    }

    /// A use was expected, or not.
    fn judge(&mut self, expected: bool) {
        self.confidence = (self.confidence + if expected { 1 } else { -1 }).clamp(0, CONFIDENCE_MAX);
        if self.confidence == 0 {
            self.suspended = true;
        } else if self.suspended && self.confidence >= RESYNC_RUN as i32 {
            self.resume();
        }
    }

    fn resume(&mut self) {
        self.suspended = false;
        self.confidence = CONFIDENCE_MAX / 2;
    }

    /// Takes in a use of a page the plan names.
    fn advance(&mut self, index: u32) {
        let n = self.len();
        if self.last_used == Some(index) {
            return;
        }
        let near = (n / 8).max(8);
        let position = self.next_use(index, self.cursor);
        let distance = position - self.cursor;
        if distance <= near && position < NOT_FILED - 1 {
            self.step_to(position);
            self.judge(distance == 0);
        } else {
            self.judge(false);
            let run = match self.stray {
                Some((at, run)) if at + 1 == position || (self.cyclic && (at + 1) % n == position % n) => run + 1,
                _ => 1,
            };
            self.stray = Some((position, run));
            if run >= RESYNC_RUN && position < NOT_FILED - 1 {
                self.step_to(position);
                if self.suspended {
                    self.resume();
                }
            }
        }
        self.last_used = Some(index);
        self.ahead.remove(&index);
        if self.filed[index as usize] != NOT_FILED {
            let next = self.next_use(index, self.cursor);
            self.file(index, next);
        }
    }

    /// The use at `position` has happened.
    fn step_to(&mut self, position: u64) {
        let skipped = position - self.cursor;
        self.cursor = position + 1;
        self.scan = self.scan.max(self.cursor);
        self.stray = None;
        if skipped > 0 {
            // What was skipped is filed under a use that will not come; file it under the one that will.
            let passed: Vec<u32> = self
                .streamed
                .range(..(self.cursor, 0))
                .chain(self.kept.range(..(self.cursor, 0)))
                .map(|(_, index)| *index)
                .collect();
            for index in passed {
                let next = self.next_use(index, self.cursor);
                self.file(index, next);
                self.ahead.remove(&index);
            }
        }
    }

    /// Pages by farthest next use, of one class, down to but not including `floor`.
    fn offer(
        &self,
        class: &BTreeSet<(u64, u32)>,
        floor: Option<u64>,
        take: &mut dyn FnMut(PageId) -> Take,
    ) -> Result<Option<PageId>, Stopped> {
        for (next, index) in class.iter().rev() {
            if floor.is_some_and(|floor| *next <= floor) {
                break;
            }
            let page = self.pages[*index as usize];
            match take(page) {
                Take::Yes => return Ok(Some(page)),
                Take::Skip => {}
                Take::Stop => return Err(Stopped),
            }
        }
        Ok(None)
    }
}

struct Stopped;

/// `count` of `n` places, evenly spread; all of them if `count >= n`.
fn spread(n: usize, count: usize) -> Vec<usize> {
    let count = count.min(n);
    (0..count).map(|i| (2 * i + 1) * n / (2 * count)).collect()
}

/// The most pages of one unit that are streamed, when `frames` of `pages` are resident and the streamed lie evenly among
/// the kept.
fn streamed_of_unit(unit: u32, frames: u32, pages: u32) -> u32 {
    let streamed = u64::from(unit) * u64::from(pages - frames.min(pages)) / u64::from(pages.max(1));
    (streamed as u32 + 2).min(unit)
}

impl PlanPolicy {
    /// Without a plan.
    pub fn new() -> Self {
        Self {
            frames: 0,
            host_frames: 0,
            lookahead: 0,
            unit: 1,
            recency: LruOrder::new(),
            recorder: CycleRecorder::default(),
            plan: None,
        }
    }

    fn divide(&mut self) {
        let frames = self.frames;
        let host = self.host_frames as usize;
        if let Some(plan) = &mut self.plan {
            let pages = plan.pages.len() as u32;
            let device = if pages <= frames {
                frames
            } else {
                frames.saturating_sub(self.lookahead + streamed_of_unit(self.unit, frames, pages) + STREAM_SLACK)
            };
            plan.divide(device as usize, host);
        }
    }

    fn follow(&mut self, order: &[PageId], cyclic: bool) {
        let mut plan = Active::new(order, cyclic);
        for page in self.recency.pages() {
            if let Some(index) = plan.number.get(&page).copied() {
                let next = plan.next_use(index, 0);
                plan.file(index, next);
            }
        }
        self.plan = Some(plan);
        self.divide();
    }

    fn drop_plan(&mut self) {
        self.plan = None;
        self.recorder.clear();
    }
}

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
        self.divide();
    }

    fn unit(&mut self, pages: u32) {
        // A unit the size of the memory would leave nothing to keep; what it needs, it takes on demand.
        let pages = pages.min((self.frames / 4).max(1));
        if pages > self.unit {
            self.unit = pages;
            self.divide();
        }
    }

    fn accessed(&mut self, page: PageId) {
        self.recency.touch(page);
        if let Some(plan) = &mut self.plan {
            match plan.number.get(&page).copied() {
                Some(index) => plan.advance(index),
                None => plan.judge(false),
            }
            if plan.exhausted() {
                self.drop_plan();
            } else if !plan.suspended {
                return;
            }
        }
        if let Some(order) = self.recorder.push(page) {
            self.recorder.clear();
            self.follow(&order, true);
        }
    }

    fn inserted(&mut self, page: PageId) {
        self.recency.insert(page);
        if let Some(plan) = &mut self.plan
            && let Some(index) = plan.number.get(&page).copied()
        {
            let next = plan.next_use(index, plan.cursor);
            plan.file(index, next);
        }
    }

    fn removed(&mut self, page: PageId) {
        self.recency.remove(page);
        if let Some(plan) = &mut self.plan
            && let Some(index) = plan.number.get(&page).copied()
        {
            let next = plan.filed[index as usize];
            plan.unfile(index);
            plan.ahead.remove(&index);
            if next < plan.scan {
                // All from the cursor up to here is resident but this page.
                plan.scan = next.max(plan.cursor);
            }
        }
    }

    fn forget(&mut self, segment: SegmentId) {
        self.recorder.forget(segment);
        if self.plan.as_ref().is_some_and(|plan| plan.pages.iter().any(|page| page.segment == segment)) {
            self.drop_plan();
        }
    }

    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        let Some(plan) = self.plan.as_ref().filter(|plan| !plan.suspended) else {
            return self.recency.offer_all(take);
        };
        let floor = match want {
            Want::Planned(page) => Some(plan.number.get(&page).map_or(0, |index| plan.next_use(*index, plan.cursor))),
            _ => None,
        };
        let for_kept = match want {
            Want::Planned(page) => {
                plan.number.get(&page).is_some_and(|index| plan.keep[*index as usize] == Keep::Device)
            }
            Want::Hint => false,
            _ => true,
        };
        // Pages outside the plan are few; skipping the others costs one lookup each.
        let outside = self.recency.len() > plan.streamed.len() + plan.kept.len();
        if outside {
            let mut stopped = false;
            let found = self.recency.offer(&mut |page| {
                if plan.number.contains_key(&page) {
                    return Take::Skip;
                }
                let taken = take(page);
                stopped |= taken == Take::Stop;
                taken
            });
            if found.is_some() || stopped {
                return found;
            }
        }
        match plan.offer(&plan.streamed, floor, take) {
            Err(Stopped) => return None,
            Ok(Some(page)) => return Some(page),
            Ok(None) => {}
        }
        if !for_kept {
            return None;
        }
        plan.offer(&plan.kept, floor, take).ok().flatten()
    }

    fn declare(&mut self, order: &[PageId], cyclic: bool) {
        self.drop_plan();
        if !order.is_empty() {
            self.follow(order, cyclic);
        }
    }

    fn has_plan(&self) -> bool {
        self.plan.as_ref().is_some_and(|plan| !plan.suspended)
    }

    fn next_fill(&mut self, present: &dyn Fn(PageId) -> bool) -> Option<PageId> {
        let lookahead = self.lookahead as usize;
        let plan = self.plan.as_mut().filter(|plan| !plan.suspended)?;
        let n = plan.len();
        let end = if plan.cyclic { plan.cursor + n } else { n };
        while plan.ahead.len() < lookahead && plan.scan < end {
            let page = plan.pages[plan.order[(plan.scan % n) as usize] as usize];
            if !present(page) {
                return Some(page);
            }
            plan.scan += 1;
        }
        None
    }

    fn filling(&mut self, page: PageId) {
        if let Some(plan) = &mut self.plan
            && let Some(index) = plan.number.get(&page).copied()
        {
            plan.ahead.insert(index);
            if plan.order[(plan.scan % plan.len()) as usize] == index {
                // Should the fill fail, it is not tried again and again: whoever uses the page hears of it.
                plan.scan += 1;
            }
        }
    }

    fn worth_host(&self, page: PageId) -> bool {
        let Some(plan) = &self.plan else { return true };
        plan.number.get(&page).is_none_or(|index| plan.keep[*index as usize] != Keep::Streamed)
    }

    fn tracked(&self) -> Vec<PageId> {
        self.recency.pages().collect()
    }

    fn host_victim(&self, candidate: PageId, incoming: PageId) -> bool {
        let Some(plan) = &self.plan else { return true };
        let class = |page: PageId| plan.number.get(&page).map(|index| plan.keep[*index as usize]);
        class(candidate) != Some(Keep::Host) || class(incoming).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PageIndex;

    fn page(n: u32) -> PageId {
        PageId { segment: SegmentId(0), index: PageIndex(n) }
    }

    #[test]
    fn places_are_spread_evenly() {
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

    #[test]
    fn every_use_makes_room_for_the_next_fill_ahead() {
        let mut policy = PlanPolicy::new();
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
        let mut policy = PlanPolicy::new();
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
        let mut policy = PlanPolicy::new();
        policy.resize(64, 0, 4);
        let fills = fills_per_pass(&mut policy, 100, 64, 6);
        assert!(policy.has_plan());
        assert!(fills[5] <= 46, "{fills:?}");
        let fills = fills_per_pass(&mut policy, 80, 64, 8);
        assert!(policy.has_plan());
        assert!(fills[7] <= 26, "{fills:?}");
    }

    /// A page that was filled ahead and then used must make room for the next one.
    #[test]
    fn regression_lookahead_goes_on_after_its_first_window() {
        let mut policy = PlanPolicy::new();
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
        let mut policy = PlanPolicy::new();
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
    fn everything_fits_nothing_moves() {
        let mut policy = PlanPolicy::new();
        policy.resize(100, 0, 8);
        let order: Vec<PageId> = (0..100).map(page).collect();
        policy.declare(&order, true);
        assert_eq!(fills_per_pass(&mut policy, 100, 100, 3), [100, 0, 0]);
    }
}
