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
//! Where nothing is filled ahead and there is no host tier, no page is kept: all go by farthest next use.
//!
//! # When the order changes
//!
//! Each use is compared with the expected one. Small skips move the cursor; strays are ignored; a new position that
//! holds for a few uses is taken over. When most uses are unexpected the plan is suspended: pages leave in LRU order and
//! nothing is filled ahead, until either a few uses in a row follow the plan again, or the recorder has recognised a new
//! cycle, which takes its place.

use super::cycle::CycleRecorder;
use super::{Policy, Take, Want};
use crate::ids::{PageId, SegmentId};
use crate::pager::bits::Bits;
use crate::pager::numbers::PageNumbers;
use crate::pager::order::Order;

/// Consecutive uses at a new position after which the cursor moves there.
const RESYNC_RUN: u32 = 3;
/// Confidence goes up or down by one a use: 64 unexpected uses in a row suspend a plan.
const CONFIDENCE_MAX: i32 = 64;
/// Cycles of a plan that nobody declared which are remembered; twice as many each time that one ends, up to so many.
const DOUBT: u64 = 4;
const DOUBT_MAX: u64 = 1 << 10;
/// Frames beyond the lookahead and one unit that streaming keeps, for uses the plan does not name.
const STREAM_SLACK: u32 = 2;
/// Pages that could not be taken which are tried again at each search.
const RETURNING: usize = 4;

/// Follows the order in which pages will be used, declared or recognised; falls back to least recently used.
#[derive(Debug)]
pub struct PlanPolicy {
    frames: u32,
    host_frames: u32,
    lookahead: u32,
    unit: u32,
    /// Every resident page, in order of use.
    recency: Order,
    recorder: CycleRecorder,
    plan: Option<Active>,
    /// How many cycles of a recognised plan have to be followed before uses are no longer remembered. Until then it may be
    /// a part of a longer cycle which repeats within it.
    doubt: u64,
}

/// A plan being followed. Pages go by their numbers; times are uses since it was taken up.
///
/// For a page that is used once a cycle this takes 4 bytes in `order`, 4 in `at`, 1 in `keep`, and a few bits.
#[derive(Debug)]
struct Active {
    /// The pages in order of use. Position `p` of it is time `p`, `p + n`, `p + 2n` ... of a cycle of `n`.
    order: Vec<u32>,
    /// By page: its one position in `order`; or, with [`REPEATED`], where in `repeats` they are; or [`UNPLANNED`].
    at: Vec<u32>,
    /// For each page with several positions, how many, then the positions in order.
    repeats: Vec<u32>,
    /// Pages named.
    planned: u32,
    cyclic: bool,
    keep: Vec<Keep>,
    /// The next expected use.
    cursor: u64,
    /// `cursor` modulo the length of the order.
    place: usize,
    /// Everything from the cursor up to here is resident or on its way.
    scan: u64,
    last_used: Option<u32>,
    stray: Option<(u64, u32)>,
    confidence: i32,
    suspended: bool,
    /// Expected uses since it was recognised or resumed.
    followed: u64,
    /// Filled ahead, not used yet; by page.
    ahead: Bits,
    /// Resident pages by the position of their next use, by class. A page that is not used again, because the plan is
    /// no cycle, is at the last position it had. So positions from the one before the cursor downwards, round the end
    /// to the cursor, are in order of next use, farthest first.
    streamed: Bits,
    kept: Bits,
    /// Resident pages of either class that were offered and could not be taken, most likely because they are pinned:
    /// were they offered every time, every search would begin with all of them. A few come back at each search, and all
    /// that are left before one that somebody waits for is given up.
    held: Bits,
    /// Where the next of them come back from.
    returning: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Keep {
    Device,
    Host,
    Streamed,
}

const UNPLANNED: u32 = u32::MAX;
const REPEATED: u32 = 1 << 31;
/// Later than every use.
const NEVER: u64 = u64::MAX - 1;

impl Active {
    /// `None` if the order is longer than its numbers reach.
    fn new(pages: impl Iterator<Item = u32>, cyclic: bool, numbers: usize) -> Option<Self> {
        let mut order: Vec<u32> = Vec::with_capacity(pages.size_hint().0);
        for number in pages {
            if order.last() != Some(&number) {
                order.push(number);
            }
        }
        if cyclic && order.len() > 1 && order.first() == order.last() {
            order.pop();
        }
        order.shrink_to_fit();
        if order.len() >= (REPEATED / 2) as usize {
            return None;
        }
        let mut at = vec![UNPLANNED; numbers];
        let mut planned = 0;
        let mut again = Vec::new();
        for (position, number) in order.iter().enumerate() {
            let known = &mut at[*number as usize];
            match *known {
                UNPLANNED => {
                    planned += 1;
                    *known = position as u32;
                }
                first => {
                    if first & REPEATED == 0 {
                        again.push((*number, first));
                        *known = first | REPEATED;
                    }
                    again.push((*number, position as u32));
                }
            }
        }
        again.sort_unstable();
        let mut repeats = Vec::with_capacity(again.len() * 3 / 2);
        for positions in again.chunk_by(|a, b| a.0 == b.0) {
            at[positions[0].0 as usize] = REPEATED | repeats.len() as u32;
            repeats.push(positions.len() as u32);
            repeats.extend(positions.iter().map(|(_, position)| *position));
        }
        Some(Self {
            keep: vec![Keep::Streamed; numbers],
            streamed: Bits::new(order.len()),
            kept: Bits::new(order.len()),
            held: Bits::new(order.len()),
            returning: 0,
            order,
            at,
            repeats,
            planned,
            cyclic,
            cursor: 0,
            place: 0,
            scan: 0,
            last_used: None,
            stray: None,
            confidence: CONFIDENCE_MAX,
            suspended: false,
            followed: 0,
            ahead: Bits::new(numbers),
        })
    }

    fn len(&self) -> u64 {
        self.order.len() as u64
    }

    /// Whether the plan names the page. It may be a page of a segment that is younger than the plan.
    fn names(&self, number: u32) -> bool {
        self.at.get(number as usize).is_some_and(|at| *at != UNPLANNED)
    }

    fn keep(&self, number: u32) -> Option<Keep> {
        self.names(number).then(|| self.keep[number as usize])
    }

    /// The positions of a page the plan names.
    fn positions(&self, number: u32) -> &[u32] {
        let at = &self.at[number as usize];
        if at & REPEATED == 0 {
            return std::slice::from_ref(at);
        }
        let from = (at & !REPEATED) as usize;
        &self.repeats[from + 1..from + 1 + self.repeats[from] as usize]
    }

    /// The position of a page's next use at or after the cursor; its last one if there is none.
    fn next_position(&self, number: u32) -> u32 {
        let at = self.place as u32;
        let positions = self.positions(number);
        let later = positions.partition_point(|position| *position < at);
        let none = if self.cyclic { 0 } else { positions.len() - 1 };
        positions[if later < positions.len() { later } else { none }]
    }

    /// The time of the first use at or after the cursor that has this position.
    fn time_of(&self, position: u32) -> u64 {
        let pass = self.cursor - self.place as u64;
        match position {
            later if later as usize >= self.place => pass + u64::from(later),
            earlier if self.cyclic => pass + self.len() + u64::from(earlier),
            _ => NEVER,
        }
    }

    fn next_use(&self, number: u32) -> u64 {
        self.time_of(self.next_position(number))
    }

    /// Whether the plan has anything left to say.
    fn exhausted(&self) -> bool {
        !self.cyclic && self.cursor >= self.len()
    }

    /// The page is resident.
    fn file(&mut self, number: u32) {
        let position = self.next_position(number) as usize;
        if self.held.contains(position) {
            // It was told of before.
            return;
        }
        match self.keep[number as usize] {
            Keep::Device => self.kept.insert(position),
            _ => self.streamed.insert(position),
        }
    }

    /// The page is not resident any more. When it would have been used, if it was.
    fn unfile(&mut self, number: u32) -> Option<u64> {
        let position = self.next_position(number);
        self.unfile_at(position as usize).then(|| self.time_of(position))
    }

    /// Whether there was a page at this position.
    fn unfile_at(&mut self, position: usize) -> bool {
        self.streamed.remove(position) || self.kept.remove(position) || self.held.remove(position)
    }

    fn resident(&self) -> usize {
        self.streamed.len() + self.kept.len() + self.held.len()
    }

    /// Divides the pages: `device` of them are kept there, `host` in the host tier, evenly spread in order of first use,
    /// those used most often first.
    fn divide(&mut self, device: usize, host: usize) {
        let resident: Vec<u32> = (0..self.order.len())
            .filter(|at| self.streamed.contains(*at) || self.kept.contains(*at) || self.held.contains(*at))
            .map(|position| self.order[position])
            .collect();
        self.streamed.clear();
        self.kept.clear();
        self.held.clear();
        self.keep.fill(Keep::Streamed);
        let often = self.at.iter().filter(|at| **at != UNPLANNED && **at & REPEATED != 0).count();
        let once = self.planned as usize - often;
        let of_often = often.min(device);
        self.choose(Keep::Device, often, of_often, |plan, number| plan.at[number as usize] & REPEATED != 0);
        let of_once = once.min(device - of_often);
        self.choose(Keep::Device, once, of_once, |plan, number| plan.at[number as usize] & REPEATED == 0);
        let rest = self.planned as usize - of_often - of_once;
        self.choose(Keep::Host, rest, host, |plan, number| plan.keep[number as usize] == Keep::Streamed);
        for number in resident {
            self.file(number);
        }
    }

    /// Keeps `count` of the `of` pages that are `among` in order of first use.
    fn choose(&mut self, keep: Keep, of: usize, count: usize, among: impl Fn(&Self, u32) -> bool) {
        let mut places = spread(of, count).peekable();
        let mut place = 0;
        for position in 0..self.order.len() {
            if places.peek().is_none() {
                break;
            }
            let number = self.order[position];
            if self.positions(number)[0] as usize != position || !among(self, number) {
                continue;
            }
            if places.next_if_eq(&place).is_some() {
                self.keep[number as usize] = keep;
            }
            place += 1;
        }
    }

    /// A use was expected, or not.
    fn judge(&mut self, expected: bool) {
        self.confidence = (self.confidence + if expected { 1 } else { -1 }).clamp(0, CONFIDENCE_MAX);
        self.followed = self.followed.saturating_add(expected.into());
        if self.confidence == 0 {
            self.suspended = true;
        } else if self.suspended && self.confidence >= RESYNC_RUN as i32 {
            self.resume();
        }
    }

    fn resume(&mut self) {
        self.suspended = false;
        self.followed = 0;
        self.confidence = CONFIDENCE_MAX / 2;
    }

    /// Takes in a use of a page the plan names.
    fn advance(&mut self, number: u32) {
        let n = self.len();
        if self.last_used == Some(number) {
            return;
        }
        let repeated = self.at[number as usize] & REPEATED != 0;
        if !repeated && self.order[self.place] == number && !self.exhausted() {
            // Almost every use is this one. Its page's next use is at this position again.
            self.go_to(self.cursor + 1);
            self.judge(true);
            self.last_used = Some(number);
            self.ahead.remove(number as usize);
            return;
        }
        let near = (n / 8).max(8);
        let position = self.next_use(number);
        let distance = position - self.cursor;
        if distance <= near && position < NEVER {
            self.step_to(position);
            self.judge(distance == 0);
        } else {
            self.judge(false);
            let run = match self.stray {
                Some((at, run)) if at + 1 == position || (self.cyclic && (at + 1) % n == position % n) => run + 1,
                _ => 1,
            };
            self.stray = Some((position, run));
            if run >= RESYNC_RUN && position < NEVER {
                self.step_to(position);
                if self.suspended {
                    self.resume();
                }
            }
        }
        self.last_used = Some(number);
        self.ahead.remove(number as usize);
    }

    /// The use at time `now` has happened.
    fn step_to(&mut self, now: u64) {
        let n = self.len();
        let (from, to) = (self.place, (now % n) as usize);
        self.go_to(now + 1);
        // What is at a position that has passed, used or skipped, goes where its next use is.
        if from <= to {
            self.refile(from, to);
        } else {
            self.refile(from, self.order.len() - 1);
            self.refile(0, to);
        }
    }

    /// The next use is expected at this time.
    fn go_to(&mut self, cursor: u64) {
        let steps = cursor - self.cursor;
        self.place = if steps == 1 { self.place + 1 } else { (cursor % self.len()) as usize };
        if self.place == self.order.len() {
            self.place = 0;
        }
        self.cursor = cursor;
        self.scan = self.scan.max(cursor);
        self.stray = None;
    }

    fn refile(&mut self, from: usize, to: usize) {
        let mut position = from;
        loop {
            let classes = [&self.streamed, &self.kept, &self.held];
            let next = classes.into_iter().filter_map(|class| class.first_from(position)).min();
            let Some(passed) = next.filter(|passed| *passed <= to) else { return };
            let number = self.order[passed];
            self.ahead.remove(number as usize);
            if self.at[number as usize] & REPEATED != 0 {
                self.unfile_at(passed);
                if !self.exhausted() {
                    self.file(number);
                }
            }
            position = passed + 1;
        }
    }

    /// Pages by farthest next use, of one class, down to but not including `floor`. The positions of those that could
    /// not be taken go to `skipped`.
    fn offer(
        &self,
        class: &Bits,
        numbers: &PageNumbers,
        floor: Option<u64>,
        skipped: &mut Vec<usize>,
        take: &mut dyn FnMut(PageId) -> Take,
    ) -> Result<Option<PageId>, Stopped> {
        for (mut end, start) in [(self.place, 0), (self.order.len(), self.place)] {
            while let Some(position) = class.last_below(end).filter(|position| *position >= start) {
                if floor.is_some_and(|floor| self.time_of(position as u32) <= floor) {
                    return Ok(None);
                }
                let page = numbers.page(self.order[position]);
                match take(page) {
                    Take::Yes => return Ok(Some(page)),
                    Take::Skip => skipped.push(position),
                    Take::Stop => return Err(Stopped),
                }
                end = position;
            }
        }
        Ok(None)
    }

    /// Offers what a frame may be taken from: streamed pages, then kept ones if it is `for_kept`, and in the end those
    /// that could not be taken before, if it `must` be found.
    fn victim(
        &mut self,
        numbers: &PageNumbers,
        floor: Option<u64>,
        for_kept: bool,
        must: bool,
        take: &mut dyn FnMut(PageId) -> Take,
    ) -> (Result<Option<PageId>, Stopped>, Vec<usize>) {
        for _ in 0..RETURNING.min(self.held.len()) {
            let Some(position) = self.held.first_from(self.returning).or_else(|| self.held.first_from(0)) else {
                break;
            };
            self.held.remove(position);
            self.file(self.order[position]);
            self.returning = position + 1;
        }
        let mut skipped = Vec::new();
        let mut found = self.offer(&self.streamed, numbers, floor, &mut skipped, take);
        if for_kept && matches!(found, Ok(None)) {
            found = self.offer(&self.kept, numbers, floor, &mut skipped, take);
        }
        if must && matches!(found, Ok(None)) {
            found = self.offer(&self.held, numbers, floor, &mut Vec::new(), take);
        }
        (found, skipped)
    }

    /// The pages at these positions could not be taken.
    fn hold(&mut self, positions: Vec<usize>) {
        for position in positions {
            if self.streamed.remove(position) || self.kept.remove(position) {
                self.held.insert(position);
            }
        }
    }
}

struct Stopped;

/// `count` of `n` places, evenly spread; all of them if `count >= n`.
fn spread(n: usize, count: usize) -> impl Iterator<Item = usize> {
    let count = count.min(n);
    (0..count).map(move |i| (2 * i + 1) * n / (2 * count))
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
        Self {
            frames: 0,
            host_frames: 0,
            lookahead: 0,
            unit: 1,
            recency: Order::new(),
            recorder: CycleRecorder::default(),
            plan: None,
            doubt: DOUBT,
        }
    }

    fn divide(&mut self) {
        let frames = self.frames;
        let host = self.host_frames as usize;
        if let Some(plan) = &mut self.plan {
            // Where nothing is filled ahead, and no tier holds what others lack, Belady's rule alone is best.
            let on_demand = self.lookahead == 0 && host == 0;
            let device = if on_demand { 0 } else { stay(frames, plan.planned, self.lookahead, self.unit) };
            plan.divide(device as usize, host);
        }
    }

    fn follow(&mut self, order: impl Iterator<Item = u32>, cyclic: bool) {
        self.plan = Active::new(order, cyclic, self.recency.numbers().end()).filter(|plan| plan.len() > 0);
        if let Some(plan) = &mut self.plan {
            for number in self.recency.present_numbers() {
                if plan.names(number) {
                    plan.file(number);
                }
            }
        }
        self.divide();
    }

    /// A page that the plan names, by its number.
    fn planned(&self, page: PageId) -> Option<(&Active, u32)> {
        let number = self.recency.numbers().number(page)?;
        self.plan.as_ref().filter(|plan| plan.names(number)).map(|plan| (plan, number))
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

    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.recency.add_segment(segment, pages);
    }

    fn accessed(&mut self, page: PageId) {
        let Some(number) = self.recency.numbers().number(page) else { return };
        self.recency.touch(page);
        if let Some(plan) = &mut self.plan {
            let followed = !plan.suspended;
            if plan.names(number) {
                plan.advance(number);
            } else {
                plan.judge(false);
            }
            if followed && plan.suspended {
                self.doubt = (2 * self.doubt).min(DOUBT_MAX);
            }
            if plan.exhausted() {
                self.drop_plan();
            } else if !plan.suspended {
                let doubted = plan.followed < plan.len().saturating_mul(self.doubt);
                if doubted && CycleRecorder::may_be_a_part(plan.len()) {
                    self.recorder.push_believed(number);
                } else if !self.recorder.is_empty() {
                    self.recorder.clear();
                }
                return;
            }
        }
        if let Some(order) = self.recorder.push(number) {
            self.follow(order.into_iter(), true);
        }
    }

    fn inserted(&mut self, page: PageId) {
        self.recency.insert(page);
        if let Some(plan) = &mut self.plan
            && let Some(number) = self.recency.numbers().number(page)
            && plan.names(number)
        {
            plan.file(number);
        }
    }

    fn removed(&mut self, page: PageId) {
        self.recency.remove(page);
        if let Some(plan) = &mut self.plan
            && let Some(number) = self.recency.numbers().number(page)
            && plan.names(number)
        {
            let next = plan.unfile(number);
            plan.ahead.remove(number as usize);
            if let Some(next) = next.filter(|next| *next < plan.scan) {
                // All from the cursor up to here is resident but this page.
                plan.scan = next.max(plan.cursor);
            }
        }
    }

    fn forget(&mut self, segment: SegmentId) {
        let numbers = self.recency.numbers().of_segment(segment);
        self.recorder.forget(numbers.clone());
        if self.plan.as_ref().is_some_and(|plan| numbers.into_iter().any(|number| plan.names(number as u32))) {
            self.drop_plan();
        }
        self.recency.remove_segment(segment);
    }

    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        if !self.has_plan() {
            return self.recency.offer_for(want, take);
        }
        let (floor, for_kept) = match want {
            Want::Planned(page) => match self.planned(page) {
                Some((plan, number)) => (Some(plan.next_use(number)), plan.keep(number) == Some(Keep::Device)),
                None => (Some(0), false),
            },
            Want::Hint => (None, false),
            _ => (None, true),
        };
        let plan = self.plan.as_mut()?;
        let numbers = self.recency.numbers();
        // Pages outside the plan are few; skipping the others costs one look each.
        let outside = self.recency.len() > plan.resident();
        if outside {
            let mut stopped = false;
            let found = self.recency.offer(&mut |page| {
                if numbers.number(page).is_some_and(|number| plan.names(number)) {
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
        // What nobody waits for is not worth a look at everything.
        let must = matches!(want, Want::Demand | Want::Room | Want::Memory);
        let (found, skipped) = plan.victim(numbers, floor, for_kept, must, take);
        if want != Want::Memory {
            plan.hold(skipped);
        }
        found.ok().flatten()
    }

    fn declare(&mut self, order: &[PageId], cyclic: bool) {
        self.drop_plan();
        self.doubt = DOUBT;
        if !order.is_empty() {
            let numbers = self.recency.numbers().clone();
            self.follow(order.iter().filter_map(|page| numbers.number(*page)), cyclic);
            if let Some(plan) = &mut self.plan {
                plan.followed = u64::MAX;
            }
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
            let page = self.recency.numbers().page(plan.order[(plan.scan % n) as usize]);
            if !present(page) {
                return Some(page);
            }
            plan.scan += 1;
        }
        None
    }

    fn filling(&mut self, page: PageId) {
        if let Some(plan) = &mut self.plan
            && let Some(number) = self.recency.numbers().number(page)
            && plan.names(number)
        {
            plan.ahead.insert(number as usize);
            if plan.order[(plan.scan % plan.len()) as usize] == number {
                // Should the fill fail, it is not tried again and again: whoever uses the page hears of it.
                plan.scan += 1;
            }
        }
    }

    fn worth_host(&self, page: PageId) -> bool {
        self.planned(page).is_none_or(|(plan, number)| plan.keep(number) != Some(Keep::Streamed))
    }

    fn tracked(&self) -> Vec<PageId> {
        self.recency.pages().collect()
    }

    fn host_victim(&self, candidate: PageId, incoming: PageId) -> bool {
        let class = |page: PageId| self.planned(page).and_then(|(plan, number)| plan.keep(number));
        class(candidate) != Some(Keep::Host) || class(incoming).is_none()
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn places_are_spread_evenly() {
        let spread = |n, count| super::spread(n, count).collect::<Vec<usize>>();
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
                    let plan = policy.plan.as_ref().filter(|plan| !plan.suspended).expect("the pass is followed");
                    assert_eq!(plan.order.len(), pass.len(), "at use {at}");
                }
            }
            assert!(policy.recorder.is_empty(), "what is believed needs no record");
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
                let Some(plan) = policy.plan.as_ref().filter(|plan| !plan.suspended) else { break };
                let cursor = plan.cursor as usize;
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
                let plan = policy.plan.as_ref().unwrap();
                let key = |n: &u32| (plan.keep(*n) == Some(Keep::Device), std::cmp::Reverse(next(*n)));
                assert!(offered.is_sorted_by_key(key), "{order:?} at {cursor}: {offered:?}");
                assert!(resident.iter().all(|n| plan.next_use(*n) == (next(*n) as u64).min(NEVER)));
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
