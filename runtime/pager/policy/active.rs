//! A plan that is followed: the order of its pages, which of them are resident, and where its walkers are in it.
//!
//! # When a page is used next
//!
//! Each walker that has still to come to position `p` of the order wants the page there. A walker that is `d` uses
//! before it, and makes one use in `w` of all, is there after `d * w` uses: the page's *distance* for this walker. The
//! page's distance is the least of these. Distances are counted in uses, never by a clock, so distances in different
//! plans compare.
//!
//! Between the places of two neighbouring walkers, distances grow with the position. So the resident pages of each such
//! stretch, from its end downwards, are in order of next use, farthest first. A search for the farthest of all merges
//! as many sorted lists as there are walkers.

use smallvec::SmallVec;

use super::Take;
use super::place::{NEVER, ORDER_LEAST, Place, RESYNC_RUN, Stretch, UseBehind};
use super::standing::Standing;
use crate::PageRun;
use crate::bits::Bits;
use crate::ids::{PageId, WalkerId};
use crate::numbers::PageNumbers;
use crate::steps::step;

/// Held pages that are offered again at each search.
pub(super) const RETURNING: usize = 4;

/// A plan being followed. Pages go by their numbers; times are uses of one walker since it joined the plan.
///
/// A page that is used once a cycle takes 4 bytes in `order`, 4 in `at`, 1 in `keep`, and a few bits. Tables by page
/// reach from the smallest named number to the largest.
#[derive(Debug)]
pub(super) struct Active {
    /// The pages in order of use. Position `p` of it is time `p`, `p + n`, `p + 2n` ... of a cycle of `n`.
    pub(super) order: Vec<u32>,
    /// The smallest number named. Tables by page begin here.
    base: u32,
    /// By page: its only position in `order`; or [`REPEATED`] and where in `repeats` its positions are; or
    /// [`UNPLANNED`].
    at: Vec<u32>,
    /// For each page with several positions: how many, then the positions in order.
    repeats: Vec<u32>,
    /// Pages named.
    pub(super) planned: u32,
    pub(super) cyclic: bool,
    /// Whether the plan was declared; otherwise it was recognised.
    pub(super) declared: bool,
    /// Tells the plan from others that this policy has had.
    pub(super) serial: u64,
    /// The runs of pages that the plan was declared as, if they are few, and the position at which they begin.
    pub(super) runs: (Box<[PageRun]>, usize),
    keep: Vec<Keep>,
    /// How many pages are to be kept in the device tier.
    pub(super) keeping: usize,
    /// How many of the other pages are to be kept in the host tier.
    pub(super) hosting: usize,
    /// The place of each walker that follows the plan; by walker.
    pub(super) places: Vec<Place>,
    /// When the last walker left: the count of plans that had been left by then.
    pub(super) left: u64,
    /// Resident pages by the position of their next use, by class. In a plan that is no cycle, a page that is not used
    /// again is at its last position. So positions from the one before a walker's place downwards, to the place of the
    /// walker behind it, are in order of next use, farthest first.
    streamed: Bits,
    kept: Bits,
    /// Resident pages of either class that were offered and not taken, most likely because they are pinned. If they
    /// were offered every time, every search would begin with all of them. A few come back at each search. A search
    /// that must find a page offers all of them last.
    pub(super) held: Bits,
    /// The position from which the next held pages come back.
    returning: usize,
    /// Positions whose page is used twice in a row: its bytes belong to two tensors that are used one after the other.
    twice: Bits,
}

/// An order of use, ready for a plan: a page that is used twice in a row makes one step.
#[derive(Debug)]
pub(super) struct Steps {
    order: Vec<u32>,
    cyclic: bool,
    again_at_once: Vec<usize>,
    /// Uses that the steps were made of.
    pub(super) of: usize,
}

impl Steps {
    pub(super) fn new(pages: impl Iterator<Item = u32>, cyclic: bool) -> Self {
        let mut steps = Self::begin(pages.size_hint().0, cyclic);
        pages.for_each(|number| steps.push(number));
        steps.end()
    }

    fn begin(capacity: usize, cyclic: bool) -> Self {
        Self { order: Vec::with_capacity(capacity), cyclic, again_at_once: Vec::new(), of: 0 }
    }

    fn push(&mut self, number: u32) {
        self.of += 1;
        if self.order.last() == Some(&number) {
            self.last_again();
        } else {
            self.order.push(number);
        }
    }

    /// The page of the last step is used once more.
    fn last_again(&mut self) {
        self.again_at_once.extend(self.order.len().checked_sub(1));
    }

    /// Returns the finished steps.
    fn end(mut self) -> Self {
        if self.cyclic && self.order.len() > 1 && self.order.first() == self.order.last() {
            self.order.pop();
        }
        step(self.order.len());
        self
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Keep {
    Device,
    Host,
    Streamed,
}

const UNPLANNED: u32 = u32::MAX;
const REPEATED: u32 = 1 << 31;
impl Active {
    /// `None` if the order is empty, or too long for `at`.
    pub(super) fn new(steps: Steps) -> Option<Self> {
        let Steps { mut order, cyclic, again_at_once, .. } = steps;
        step(order.len());
        order.shrink_to_fit();
        if order.len() >= (REPEATED / 2) as usize {
            return None;
        }
        let base = *order.iter().min()?;
        let numbers = (order.iter().max()? - base) as usize + 1;
        let mut at = vec![UNPLANNED; numbers];
        let mut planned = 0;
        let mut again = Vec::new();
        for (position, number) in order.iter().enumerate() {
            let known = &mut at[(*number - base) as usize];
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
            at[(positions[0].0 - base) as usize] = REPEATED | repeats.len() as u32;
            repeats.push(positions.len() as u32);
            repeats.extend(positions.iter().map(|(_, position)| *position));
        }
        let mut twice = Bits::new(order.len());
        again_at_once
            .into_iter()
            .filter(|position| *position < order.len())
            .for_each(|position| twice.insert(position));
        Some(Self {
            twice,
            keep: vec![Keep::Streamed; numbers],
            keeping: 0,
            hosting: 0,
            streamed: Bits::new(order.len()),
            kept: Bits::new(order.len()),
            held: Bits::new(order.len()),
            returning: 0,
            order,
            base,
            at,
            repeats,
            planned,
            cyclic,
            declared: false,
            serial: 0,
            runs: Default::default(),
            places: Vec::new(),
            left: 0,
        })
    }

    pub(super) fn len(&self) -> u64 {
        self.order.len() as u64
    }

    fn entry(&self, number: u32) -> Option<u32> {
        let at = self.at.get(number.wrapping_sub(self.base) as usize)?;
        (*at != UNPLANNED).then_some(*at)
    }

    /// Whether the plan names the page. The page may be of a segment that is younger than the plan.
    pub(super) fn names(&self, number: u32) -> bool {
        self.entry(number).is_some()
    }

    /// Whether the plan names any of these pages.
    pub(super) fn names_any(&self, numbers: &std::ops::Range<usize>) -> bool {
        let base = self.base as usize;
        let (start, end) = (numbers.start.saturating_sub(base), numbers.end.saturating_sub(base));
        self.at.get(start..end.min(self.at.len())).is_some_and(|at| at.iter().any(|at| *at != UNPLANNED))
    }

    /// The index of a named page in the tables by page.
    pub(super) fn index(&self, number: u32) -> usize {
        (number - self.base) as usize
    }

    pub(super) fn keep(&self, number: u32) -> Option<Keep> {
        self.names(number).then(|| self.keep[self.index(number)])
    }

    fn is_repeated(&self, number: u32) -> bool {
        self.at[self.index(number)] & REPEATED != 0
    }

    /// The positions of a page the plan names.
    pub(super) fn positions(&self, number: u32) -> &[u32] {
        let at = &self.at[self.index(number)];
        if at & REPEATED == 0 {
            return std::slice::from_ref(at);
        }
        let from = (at & !REPEATED) as usize;
        &self.repeats[from + 1..from + 1 + self.repeats[from] as usize]
    }

    /// The position at which these steps begin in the plan; `None` if they are another order.
    pub(super) fn beginning_of(&self, steps: &Steps) -> Option<usize> {
        if self.cyclic != steps.cyclic || self.order.len() != steps.order.len() {
            return None;
        }
        let first = *steps.order.first().filter(|first| self.names(**first))?;
        let turned = |start: &usize| {
            let (head, tail) = self.order.split_at(*start);
            let (later, sooner) = steps.order.split_at(tail.len());
            (self.cyclic || *start == 0) && later == tail && sooner == head
        };
        self.positions(first).iter().map(|position| *position as usize).find(turned)
    }

    /// Remembers the runs that the plan was declared as and where they begin, unless they are many.
    pub(super) fn declared_as(&mut self, runs: &[PageRun], start: usize) {
        if runs.len() <= self.order.len() / 4 {
            self.runs = (runs.into(), start);
        }
    }

    /// Returns the plan without these pages, which are gone, and with no page filed; `None` if no page is left. Walkers
    /// keep their places; some may have [nothing left](Self::exhausted).
    pub(super) fn without(&mut self, gone: &std::ops::Range<usize>) -> Option<Self> {
        let left = |number: &u32| !gone.contains(&(*number as usize));
        let mut steps = Steps::begin(self.order.len(), self.cyclic);
        // By position: the step of the first use that is left from there on. Two uses that become neighbours may be one
        // step.
        let mut moved: Vec<usize> = Vec::with_capacity(self.order.len() + 1);
        for (at, number) in self.order.iter().enumerate().filter(|(_, number)| left(number)) {
            steps.push(*number);
            if self.twice.contains(at) {
                steps.last_again();
            }
            moved.resize(at + 1, steps.order.len() - 1);
        }
        moved.resize(self.order.len() + 1, steps.order.len());
        let mut plan = Self::new(steps.end())?;
        (plan.declared, plan.serial, plan.left) = (self.declared, self.serial, self.left);
        plan.places = std::mem::take(&mut self.places);
        let (old, new) = (self.len(), plan.len());
        for place in &mut plan.places {
            let next = if !plan.cyclic && place.cursor >= old { self.order.len() } else { place.place };
            let to = moved[next] as u64;
            // After the end of a cycle comes its first step; the last step may have become a part of it.
            place.cursor = if plan.cyclic && to >= new { 0 } else { to };
            place.place = (place.cursor % new) as usize;
            place.scan = place.cursor;
            place.behind.clear();
            // The next expected use is not mistaken for the second use of the page used last.
            let expected = plan.order[place.place];
            place.last_used = place.last_used.filter(|number| left(number) && *number != expected);
            place.stays &= place.last_used.is_some();
            place.stray = None;
        }
        Some(plan)
    }

    pub(super) fn place_of(&self, walker: WalkerId) -> Option<usize> {
        self.places.binary_search_by_key(&walker, |place| place.walker).ok()
    }

    /// Whether this plan decides what leaves once it, or it and others, name more pages than fit: it was declared, or a
    /// walker has followed it for so many uses.
    pub(super) fn is_believed(&self, uses: u64) -> bool {
        self.declared || self.places.iter().any(|place| place.is_known() && place.followed >= uses)
    }

    /// Whether this plan alone decides what leaves, with so many frames: see `PlanPolicy::a_plan_decides`.
    pub(super) fn decides(&self, frames: u32, uses: u64) -> bool {
        self.declared || self.planned > frames && self.is_believed(uses)
    }

    /// Whether the next uses of any walker are known.
    pub(super) fn is_followed(&self) -> bool {
        self.places.iter().any(Place::is_known)
    }

    /// For this walker, the position of a page's next use at or after its place; if there is none, the page's last
    /// position.
    fn next_position_of(&self, place: &Place, number: u32) -> u32 {
        let at = place.place as u32;
        let positions = self.positions(number);
        let later = positions.partition_point(|position| *position < at);
        let none = if self.cyclic { 0 } else { positions.len() - 1 };
        positions[if later < positions.len() { later } else { none }]
    }

    /// For this walker, the time of the first use at or after its place that has this position.
    fn time_of(&self, place: &Place, position: u32) -> u64 {
        let pass = place.cursor - place.place as u64;
        match position {
            later if later as usize >= place.place => pass + u64::from(later),
            earlier if self.cyclic => pass + self.len() + u64::from(earlier),
            _ => NEVER,
        }
    }

    pub(super) fn next_use(&self, at: usize, number: u32) -> u64 {
        let place = &self.places[at];
        self.time_of(place, self.next_position_of(place, number))
    }

    /// The position at which a resident page is filed: that of its next use by any walker.
    fn next_position(&self, number: u32, standing: Option<&Standing>) -> u32 {
        let positions = self.positions(number);
        if let [only] = positions {
            return *only;
        }
        match self.places.as_slice() {
            [] => positions[0],
            [alone] => self.next_position_of(alone, number),
            _ => {
                let found;
                let standing = match standing {
                    Some(standing) => standing,
                    None => {
                        found = self.standing();
                        &found
                    }
                };
                let next = positions.iter().min_by_key(|position| standing.distance_at(**position));
                next.copied().unwrap_or(positions[0])
            }
        }
    }

    /// Whether the walker has come to the end of a plan that is no cycle.
    pub(super) fn exhausted(&self, at: usize) -> bool {
        !self.cyclic && self.places[at].cursor >= self.len()
    }

    /// Files a resident page. Pass `standing` if it is known where walkers [stand](Self::standing).
    pub(super) fn file(&mut self, number: u32, standing: Option<&Standing>) {
        if self.filed(number) > 0 {
            // It was filed before.
            return;
        }
        let position = self.next_position(number, standing) as usize;
        match self.keep[self.index(number)] {
            Keep::Device => self.kept.insert(position),
            _ => self.streamed.insert(position),
        }
    }

    /// Whether a page is filed at this position.
    fn has_at(&self, position: usize) -> bool {
        self.streamed.contains(position) || self.kept.contains(position) || self.held.contains(position)
    }

    /// At how many of its positions a named page is filed: at one if it is resident, otherwise at none.
    fn filed(&self, number: u32) -> usize {
        self.positions(number).iter().filter(|position| self.has_at(**position as usize)).count()
    }

    /// Checks that each resident page that the plan names is filed exactly once, and that no other page is filed.
    /// `resident` are all resident pages. A named page that is not filed would never be offered.
    pub(super) fn check(&self, resident: impl Iterator<Item = u32>) -> Result<(), String> {
        let mut named = 0;
        for number in resident.filter(|number| self.names(*number)) {
            named += 1;
            let filed = self.filed(number);
            if filed != 1 {
                return Err(format!("page number {number} is filed {filed} times in a plan that names it"));
            }
        }
        if self.resident() != named {
            return Err(format!("a plan has {} pages filed, but {named} of its own are resident", self.resident()));
        }
        Ok(())
    }

    /// Takes a page out of the lists. Returns whether it was in one.
    fn unfile(&mut self, number: u32) -> bool {
        (0..self.positions(number).len()).fold(false, |found, nth| {
            let position = self.positions(number)[nth] as usize;
            self.unfile_at(position) || found
        })
    }

    /// Returns whether a page was filed at this position.
    fn unfile_at(&mut self, position: usize) -> bool {
        self.streamed.remove(position) || self.kept.remove(position) || self.held.remove(position)
    }

    /// Files a page again: its next use has changed.
    pub(super) fn refile_page(&mut self, number: u32, standing: &Standing) {
        if self.unfile(number) {
            self.file(number, Some(standing));
        }
    }

    /// A named page has left the device tier.
    pub(super) fn removed(&mut self, number: u32) {
        if !self.unfile(number) {
            return;
        }
        for at in 0..self.places.len() {
            let next = self.next_use(at, number);
            let behind = self.times_behind(at, number);
            let place = &mut self.places[at];
            if next < place.scan {
                // All pages from the cursor up to this one are resident.
                place.scan = next.max(place.cursor);
            }
            behind.into_iter().for_each(|time| place.behind.gone(time));
        }
    }

    /// The times of a page's uses that lie between the first part that this walker has passed over and its place.
    fn times_behind(&self, at: usize, number: u32) -> SmallVec<[u64; 2]> {
        let place = &self.places[at];
        let Some(first) = place.behind.parts().first().map(|part| part.start) else { return SmallVec::new() };
        let positions = self.positions(number);
        let pass = place.cursor - place.place as u64;
        let mut times = SmallVec::new();
        // Of the pass before this one, and of this one.
        let ends = [(pass.checked_sub(self.len()), self.len()), (Some(pass), place.place as u64)];
        for (begun, end) in ends.into_iter().filter_map(|(begun, end)| Some((begun?, end))) {
            let from = first.saturating_sub(begun);
            let later = positions.partition_point(|position| u64::from(*position) < from);
            let within = positions[later..].iter().map(|position| u64::from(*position)).take_while(|at| *at < end);
            times.extend(within.map(|position| begun + position));
        }
        step(1 + times.len());
        times
    }

    /// After how many of its own uses this walker wants a page that it has passed over; `None` if it has not.
    pub(super) fn uses_before_behind(&self, at: usize, number: u32) -> Option<u64> {
        let times = self.times_behind(at, number);
        times.into_iter().filter_map(|time| self.places[at].behind.uses_before(time)).min()
    }

    /// After how many uses of all walkers a walker wants a page that it has passed over; `None` if none has.
    pub(super) fn wanted_behind(&self, number: u32) -> Option<u64> {
        let known = self.places.iter().enumerate().filter(|(_, place)| place.is_known());
        known.filter_map(|(at, place)| Some(self.uses_before_behind(at, number)? * place.weight)).min()
    }

    pub(super) fn resident(&self) -> usize {
        self.streamed.len() + self.kept.len() + self.held.len()
    }

    /// Refiles pages with several positions: their next uses may change when walkers change.
    pub(super) fn settle(&mut self) {
        let (mut at, standing) = (0, self.standing());
        while let Some(positions) = self.repeats.get(at) {
            let number = self.order[self.repeats[at + 1] as usize];
            at += 1 + *positions as usize;
            self.refile_page(number, &standing);
        }
    }

    fn resident_numbers(&self) -> Vec<u32> {
        (0..self.order.len()).filter(|position| self.has_at(*position)).map(|position| self.order[position]).collect()
    }

    /// Divides the pages: keeps `device` of them in the device tier and `host` in the host tier, evenly spread in order
    /// of first use. Pages used several times a cycle come first.
    pub(super) fn divide(&mut self, device: usize, host: usize) {
        if (self.keeping, self.hosting) == (device, host) {
            return;
        }
        step(self.order.len());
        let (resident, standing) = (self.resident_numbers(), self.standing());
        (self.keeping, self.hosting) = (device, host);
        self.streamed.clear();
        self.kept.clear();
        self.held.clear();
        self.keep.fill(Keep::Streamed);
        let often = self.at.iter().filter(|at| **at != UNPLANNED && **at & REPEATED != 0).count();
        let once = self.planned as usize - often;
        let of_often = often.min(device);
        self.choose(Keep::Device, often, of_often, |plan, number| plan.is_repeated(number));
        let of_once = once.min(device - of_often);
        self.choose(Keep::Device, once, of_once, |plan, number| !plan.is_repeated(number));
        let rest = self.planned as usize - of_often - of_once;
        self.choose(Keep::Host, rest, host, |plan, number| plan.keep[plan.index(number)] == Keep::Streamed);
        for number in resident {
            self.file(number, Some(&standing));
        }
    }

    /// Keeps `count` pages, evenly spread in order of first use over the `of` pages for which `among` holds.
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
                let index = self.index(number);
                self.keep[index] = keep;
            }
            place += 1;
        }
    }

    /// Records a walker's use of a named page. Returns whether the walker has skipped pages.
    pub(super) fn advance(&mut self, at: usize, number: u32) -> bool {
        let n = self.len();
        let repeated = self.is_repeated(number);
        let place = &mut self.places[at];
        let left_out = place.behind.come_to(place.cursor);
        if place.last_used == Some(number) {
            // Reported twice in a row, because other walkers made uses in between.
            place.stays = false;
            let position = place.place.checked_sub(1).unwrap_or(self.order.len() - 1);
            if self.order[position] == number {
                self.twice.insert(position);
            }
            return left_out;
        }
        if !repeated && self.order[place.place] == number && (self.cyclic || place.cursor < n) {
            // Nearly every use takes this path. The page's next use is at this position again.
            place.judge(true);
            place.last_used = Some(number);
            place.stays = self.twice.contains(place.place);
            self.go_to(at, self.places[at].cursor + 1);
            return left_out;
        }
        let near = (n / 8).max(8);
        let (cursor, scan) = (place.cursor, place.scan);
        let position = self.next_use(at, number);
        let distance = position - cursor;
        let mut skips = left_out;
        let behind = if distance > 0 { self.used_behind(at, number) } else { None };
        if let Some((time, found)) = behind {
            let before = time.checked_sub(1).map(|before| self.order[(before % n) as usize]);
            let place = &mut self.places[at];
            match found {
                // Where threads take turns. A run of uses behind the place may also be another order.
                UseBehind::Next if place.last_used != before => place.judge(true),
                UseBehind::Begins => place.judge(false),
                UseBehind::Next | UseBehind::Again => {}
            }
            place.stray = None;
        } else if distance <= near && position < NEVER {
            self.step_to(at, position);
            let place = &mut self.places[at];
            if distance == 0 {
                place.judge(true);
            } else {
                skips = true;
                place.judge(false);
                if place.suspended {
                    place.behind.clear();
                } else if n >= ORDER_LEAST {
                    place.behind.passed_over(cursor, position, scan, n);
                }
            }
        } else {
            let cyclic = self.cyclic;
            let place = &mut self.places[at];
            place.judge(false);
            let run = match place.stray {
                Some((at, run)) if at + 1 == position || (cyclic && (at + 1) % n == position % n) => run + 1,
                _ => 1,
            };
            place.stray = Some((position, run));
            if run >= RESYNC_RUN && position < NEVER {
                self.step_to(at, position);
                skips = true;
                let place = &mut self.places[at];
                place.behind.clear();
                if place.suspended {
                    place.resume();
                }
            }
        }
        let place = &mut self.places[at];
        (place.last_used, place.stays) = (Some(number), false);
        skips
    }

    /// Records a walker's use of a page behind its place. Returns its time; `None` if it was not expected there.
    fn used_behind(&mut self, at: usize, number: u32) -> Option<(u64, UseBehind)> {
        let times = self.times_behind(at, number);
        times.into_iter().find_map(|time| Some((time, self.places[at].behind.used(time)?)))
    }

    /// Records a walker's use at time `now`.
    fn step_to(&mut self, at: usize, now: u64) {
        let n = self.len();
        let (from, to) = (self.places[at].place, (now % n) as usize);
        self.go_to(at, now + 1);
        // Each page at a position that was passed, used or skipped, is filed at its next use.
        if from <= to {
            self.refile(from, to);
        } else {
            self.refile(from, self.order.len() - 1);
            self.refile(0, to);
        }
    }

    /// Sets the time at which a walker's next use is expected.
    pub(super) fn go_to(&mut self, at: usize, cursor: u64) {
        let (n, end) = (self.len(), self.order.len());
        let place = &mut self.places[at];
        let one = cursor == place.cursor + 1;
        place.place = if one { place.place + 1 } else { (cursor % n) as usize };
        if place.place == end {
            place.place = 0;
        }
        place.cursor = cursor;
        place.scan = place.scan.max(cursor);
        place.stray = None;
    }

    /// Refiles pages at positions `from` to `to`, which a walker has passed.
    fn refile(&mut self, from: usize, to: usize) {
        let mut position = from;
        loop {
            let classes = [&self.streamed, &self.kept, &self.held];
            let next = classes.into_iter().filter_map(|class| class.first_from(position)).min();
            let Some(passed) = next.filter(|passed| *passed <= to) else { return };
            let number = self.order[passed];
            if self.is_repeated(number) {
                // Also at the end of this walker's plan: other walkers may still follow it.
                self.unfile_at(passed);
                self.file(number, None);
            }
            position = passed + 1;
        }
    }

    /// For this walker, the missing page that it is to use next, and after how many uses of all walkers it is wanted.
    pub(super) fn next_missing(&mut self, at: usize, present: impl Fn(u32) -> bool) -> Option<(u64, u32)> {
        let (n, order) = (self.len(), &self.order);
        let Place { cursor, scan, behind, weight, .. } = &mut self.places[at];
        let end = if self.cyclic { *cursor + n } else { n };
        let ahead = (*cursor, end, scan);
        // Where no use has come, there may be no other thread.
        let behind = behind.parts_mut().iter_mut().filter(|part| part.is_used());
        let behind = behind.map(|part| (part.start, part.end, &mut part.scan));
        let missing = behind.chain([ahead]).filter_map(|(start, end, scan)| {
            while *scan < end {
                let number = order[(*scan % n) as usize];
                if !present(number) {
                    return Some(((*scan - start) * *weight, number));
                }
                *scan += 1;
            }
            None
        });
        missing.min_by_key(|(distance, _)| *distance)
    }

    /// A named page is being filled ahead of use.
    pub(super) fn filling(&mut self, number: u32) {
        let n = self.len();
        for place in &mut self.places {
            if self.order[(place.scan % n) as usize] == number {
                // If the fill fails, it is not repeated: the request that uses the page reports the failure.
                place.scan += 1;
            }
            for part in place.behind.parts_mut() {
                if part.scan < part.end && self.order[(part.scan % n) as usize] == number {
                    part.scan += 1;
                }
            }
        }
    }

    /// The ranges of positions that the known walkers have found resident ahead of them, or have passed over: sorted
    /// and disjoint.
    pub(super) fn reached(&self) -> Vec<(usize, usize)> {
        let n = self.order.len();
        let mut all = Vec::new();
        for place in self.places.iter().filter(|place| place.is_known()) {
            let ahead = (place.cursor, place.scan.min(place.cursor + self.len()));
            let behind = place.behind.parts().iter().map(|part| (part.start, part.end));
            for (from, to) in behind.chain([ahead]) {
                let start = (from % self.len()) as usize;
                let end = start + (to - from) as usize;
                all.push((start, end.min(n)));
                if self.cyclic && end > n {
                    all.push((0, end - n));
                }
            }
        }
        all.sort_unstable();
        all.dedup_by(|next, one| {
            let joins = next.0 <= one.1;
            one.1 = if joins { one.1.max(next.1) } else { one.1 };
            joins
        });
        all
    }

    /// Whether a position of the page is within [`reached`](Self::reached) ranges.
    pub(super) fn is_reached(&self, number: u32, reached: &[(usize, usize)]) -> bool {
        self.names(number)
            && self.positions(number).iter().any(|position| {
                let before = reached.partition_point(|(start, _)| *start <= *position as usize);
                before > 0 && (*position as usize) < reached[before - 1].1
            })
    }

    /// Offers pages of one class but for `staying`, farthest next use first, down to but not including `floor`, where
    /// one walker follows the plan. Adds the positions of pages that were not taken to `skipped`.
    fn offer(
        &self,
        at: usize,
        class: &Bits,
        (numbers, staying): (&PageNumbers, &[u32]),
        floor: Option<u64>,
        skipped: &mut Vec<usize>,
        take: &mut dyn FnMut(PageId) -> Take,
    ) -> Result<Option<PageId>, Stopped> {
        let place = &self.places[at];
        for (mut end, start) in [(place.place, 0), (self.order.len(), place.place)] {
            while let Some(position) = class.last_below(end).filter(|position| *position >= start) {
                if floor.is_some_and(|floor| self.time_of(place, position as u32) <= floor) {
                    return Ok(None);
                }
                end = position;
                let number = self.order[position];
                if staying.binary_search(&number).is_ok() {
                    continue;
                }
                let page = numbers.page(number);
                match take(page) {
                    Take::Yes => return Ok(Some(page)),
                    Take::Skip => skipped.push(position),
                    Take::Stop => return Err(Stopped),
                }
            }
        }
        Ok(None)
    }

    /// Files a few of the held pages again, so that they are offered again.
    pub(super) fn bring_back(&mut self, standing: Option<&Standing>) {
        for _ in 0..RETURNING.min(self.held.len()) {
            let Some(position) = self.held.first_from(self.returning).or_else(|| self.held.first_from(0)) else {
                break;
            };
            self.held.remove(position);
            self.file(self.order[position], standing);
            self.returning = position + 1;
        }
    }

    /// Offers victims where one walker follows the plan: streamed pages; then, if `for_kept`, kept pages; last, if
    /// `must`, held pages and those in `staying`.
    pub(super) fn victim(
        &mut self,
        at: usize,
        (numbers, staying): (&PageNumbers, &[u32]),
        floor: Option<u64>,
        for_kept: bool,
        must: bool,
        take: &mut dyn FnMut(PageId) -> Take,
    ) -> (Result<Option<PageId>, Stopped>, Vec<usize>) {
        self.bring_back(None);
        let mut skipped = Vec::new();
        let but_staying = (numbers, staying);
        let mut found = self.offer(at, &self.streamed, but_staying, floor, &mut skipped, take);
        if for_kept && matches!(found, Ok(None)) {
            found = self.offer(at, &self.kept, but_staying, floor, &mut skipped, take);
        }
        if must && matches!(found, Ok(None)) {
            found = self.offer(at, &self.held, but_staying, floor, &mut Vec::new(), take);
        }
        if must && matches!(found, Ok(None)) {
            found = offer_each(staying.iter().copied(), numbers, take);
        }
        (found, skipped)
    }

    /// Holds the pages at these positions, which could not be taken.
    pub(super) fn hold(&mut self, positions: impl IntoIterator<Item = usize>) {
        for position in positions {
            if self.streamed.remove(position) || self.kept.remove(position) {
                self.held.insert(position);
            }
        }
    }

    /// The position of the next page of a stretch: of the pages that are left, the one used last.
    pub(super) fn next_of(&self, stretch: &mut Stretch) -> Option<usize> {
        step(1);
        let class = if stretch.kept { &self.kept } else { &self.streamed };
        let position = class.last_below(stretch.end).filter(|position| *position >= stretch.start)?;
        stretch.end = position;
        Some(position)
    }

    /// The pages that were offered and not taken.
    pub(super) fn held_numbers(&self) -> impl Iterator<Item = u32> {
        let positions = std::iter::successors(self.held.first_from(0), |position| self.held.first_from(position + 1));
        positions.map(|position| self.order[position])
    }

    /// Whether the page was offered and not taken.
    pub(super) fn is_held(&self, number: u32) -> bool {
        self.names(number) && self.positions(number).iter().any(|position| self.held.contains(*position as usize))
    }

    /// Resident pages that a walker is about to use a second time.
    pub(super) fn staying(&self) -> impl Iterator<Item = u32> {
        let known = self.places.iter().filter(|place| place.stays && place.is_known());
        known.filter_map(|place| place.last_used).filter(|number| self.filed(*number) > 0)
    }

    /// Resident pages that are expected behind a walker: those of the pages filled `ahead`, and those at the end of a
    /// part, of which another thread has used its share. Sorted.
    pub(super) fn expected_behind(&self, ahead: &Bits) -> SmallVec<[u32; 8]> {
        let mut pages = SmallVec::new();
        for (at, place) in self.places.iter().enumerate().filter(|(_, place)| place.is_known()) {
            let parts = place.behind.parts();
            if parts.is_empty() {
                continue;
            }
            pages.extend(parts.iter().map(|part| self.order[(part.end % self.len()) as usize]));
            let mut next = ahead.first_from(0);
            while let Some(number) = next {
                next = ahead.first_from(number + 1);
                let number = number as u32;
                if self.names(number) && self.uses_before_behind(at, number).is_some() {
                    pages.push(number);
                }
            }
        }
        pages.retain(|number: &mut u32| self.names(*number) && self.filed(*number) > 0);
        pages.sort_unstable();
        pages.dedup();
        pages
    }
}

impl Active {
    pub(super) fn standing(&self) -> Standing {
        Standing::new(&self.places, self.order.len(), self.cyclic)
    }
}

pub(super) struct Stopped;

/// Offers pages in order until one is taken.
pub(super) fn offer_each(
    mut pages: impl Iterator<Item = u32>,
    numbers: &PageNumbers,
    take: &mut dyn FnMut(PageId) -> Take,
) -> Result<Option<PageId>, Stopped> {
    let ended = pages.find_map(|number| {
        step(1);
        let page = numbers.page(number);
        match take(page) {
            Take::Yes => Some(Ok(Some(page))),
            Take::Skip => None,
            Take::Stop => Some(Err(Stopped)),
        }
    });
    ended.unwrap_or(Ok(None))
}

/// `count` of `n` places, evenly spread; all of them if `count >= n`.
pub(super) fn spread(n: usize, count: usize) -> impl Iterator<Item = usize> {
    let count = count.min(n);
    (0..count).map(move |i| (2 * i + 1) * n / (2 * count))
}
