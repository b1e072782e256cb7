//! Frames divided among classes of tensors, each with its own policy.
//!
//! A class has a share of the frames. A page has to go from the class that is furthest beyond its share. Shares follow
//! the moves of pages that frames save: see [`division`](super::division).

use super::auto::AutoPolicy;
use super::division::{Division, Holding};
use super::kv::KvPolicy;
use super::lirs::LirsPolicy;
use super::plan::PlanPolicy;
use super::s3fifo::S3FifoPolicy;
use super::{Policy, PolicyKind, Take, WalkerPlace, Want};
use crate::ids::{PageId, SegmentClass, SegmentId, WalkerId};
use crate::numbers::{PageNumbers, fit};

const CLASSES: usize = SegmentClass::ALL.len();

/// Up to this many pages may all be in the sample; of more pages, at most twice as many are.
const SAMPLED_PAGES: u64 = 1 << 12;
/// A new class begins with this part of all frames.
const STEP: u32 = 16;

/// The state of one class.
#[derive(Debug)]
struct Part {
    policy: Box<dyn Policy>,
    /// Walkers that have declared an order. While there is one, `policy` is one that follows plans.
    planners: Vec<WalkerId>,
    /// Whether the class's plan found no frame for the page that it named, and nothing has changed since.
    refused: bool,
    resident: u32,
    /// Frames. Once frames were divided, the shares of the classes that have pages add up to all frames; other classes
    /// have none.
    share: u32,
    /// The share that the class had when its last page went.
    had: u32,
    /// Pages of its segments.
    pages: u64,
}

impl Part {
    fn planned(&self) -> bool {
        !self.planners.is_empty()
    }
}

/// See the [module documentation](self). Takes one byte a page beyond the class's policy; with several classes, up
/// to 32 times 21 bytes more for each page of the sample.
#[derive(Debug)]
pub(super) struct SharesPolicy {
    numbers: PageNumbers,
    /// By page number.
    resident: Vec<bool>,
    /// By segment: its class and its pages.
    segments: Vec<Option<(SegmentClass, u32)>>,
    /// The class of a segment that is about to be added.
    announced: Option<(SegmentId, SegmentClass)>,
    parts: [Part; CLASSES],
    /// By class: frames that are kept for it at least, if it has as many pages.
    floors: [u32; CLASSES],
    /// Frames, host frames, lookahead.
    sizes: (u32, u32, u32),
    /// What frames are worth to each class.
    division: Division<CLASSES>,
    /// Whether frames were divided: they are not before the first eviction.
    divided: bool,
    /// The class of the page that was wanted last, if it has not come yet, as far as is known.
    coming: Option<usize>,
    /// The walker that uses and plans belong to now.
    walker: WalkerId,
}

/// A policy for a class without a declared order.
fn own(class: SegmentClass) -> Box<dyn Policy> {
    match class {
        // Sweeps, experts in demand, conversations, contexts that are longer than their share: by turns.
        SegmentClass::Weights | SegmentClass::KeysAndValues => Box::new(AutoPolicy::of(class)),
        _ => model_of(class),
    }
}

/// The policy of a class's small caches. They show what frames are worth to it, not which pages stay.
fn model_of(class: SegmentClass) -> Box<dyn Policy> {
    match class {
        SegmentClass::KeysAndValues => Box::<KvPolicy>::default(),
        SegmentClass::Other => Box::<S3FifoPolicy>::default(),
        // Swept over and over: the pages that stay must not depend on recency. Like a plan, LIRS keeps a part of swept
        // pages; it need not be told the order.
        _ => Box::<LirsPolicy>::default(),
    }
}

impl Default for SharesPolicy {
    fn default() -> Self {
        let part = |class| Part {
            policy: own(class),
            planners: Vec::new(),
            refused: false,
            resident: 0,
            share: 0,
            had: 0,
            pages: 0,
        };
        Self {
            numbers: PageNumbers::default(),
            resident: Vec::new(),
            segments: Vec::new(),
            announced: None,
            parts: SegmentClass::ALL.map(part),
            floors: [0; CLASSES],
            sizes: (0, 0, 0),
            division: Division::new(SAMPLED_PAGES),
            divided: false,
            coming: None,
            walker: WalkerId::DEFAULT,
        }
    }
}

impl SharesPolicy {
    fn class_of(&self, segment: SegmentId) -> usize {
        let known = self.segments.get(segment.index()).copied().flatten();
        known.map_or(SegmentClass::Other, |(class, _)| class) as usize
    }

    /// The classes that have pages.
    fn there(&self) -> impl Iterator<Item = usize> {
        (0..CLASSES).filter(|class| self.parts[*class].pages > 0)
    }

    /// Of the classes that have pages, the one with most frames.
    fn largest(&self) -> Option<usize> {
        self.there().max_by_key(|class| self.parts[*class].share)
    }

    /// The frames that a class has at least: less than its floor if it has fewer pages, or if all floors together are
    /// more than the frames.
    fn least(&self, class: usize) -> u32 {
        let all: u64 = self.floors.iter().map(|floor| u64::from(*floor)).sum();
        let (floor, frames) = (u64::from(self.floors[class]), u64::from(self.sizes.0));
        let floor = if all > frames { floor * frames / all } else { floor };
        floor.min(self.parts[class].pages) as u32
    }

    /// Gives classes below their floors frames of those that have most above theirs.
    fn keep_floors(&mut self) {
        for class in 0..CLASSES {
            while self.divided && self.parts[class].share < self.least(class) {
                let above = |of: &usize| self.parts[*of].share.saturating_sub(self.least(*of));
                let from = self.there().filter(|of| *of != class).max_by_key(above);
                let Some(from) = from.filter(|of| above(of) > 0) else { break };
                let taken = above(&from).min(self.least(class) - self.parts[class].share);
                self.parts[from].share -= taken;
                self.parts[class].share += taken;
            }
        }
    }

    /// Tells a class's policy its sizes.
    fn resized(&mut self, class: usize) {
        let (frames, host, lookahead) = self.sizes;
        let plans = self.parts.iter().filter(|part| part.planned()).count().max(1) as u32;
        let part = &mut self.parts[class];
        // A plan reserves host frames for pages of its own.
        let host = if part.planned() { host / plans } else { host };
        part.policy.resize(if self.divided { part.share.max(1) } else { frames }, host, lookahead);
    }

    /// Adjusts shares and small caches after a change of classes: frames of classes that went go to the largest, and
    /// each of several classes has small caches.
    fn settle(&mut self) {
        self.division.fit(self.sizes.0, self.parts.iter().map(|part| part.pages).sum());
        if self.divided {
            let mut left = 0;
            for part in self.parts.iter_mut().filter(|part| part.pages == 0) {
                left += std::mem::take(&mut part.share);
            }
            match self.largest() {
                Some(largest) => self.parts[largest].share += left,
                None => self.divided = false,
            }
        }
        let several = self.divided && self.there().count() > 1;
        for class in 0..CLASSES {
            if self.parts[class].pages == 0 {
                self.division.ignore(class);
            } else if several {
                let known = |(number, known): (usize, &Option<(SegmentClass, u32)>)| {
                    let (of, pages) = (*known)?;
                    (of as usize == class).then_some((SegmentId(number as u32), of, pages))
                };
                let segments = self.segments.iter().enumerate().filter_map(known);
                self.division.watch(class, segments, || model_of(SegmentClass::ALL[class]));
            }
            self.resized(class);
        }
    }

    /// Divides the frames, at the first eviction: each class gets a sixteenth of all, and the rest goes by the frames
    /// that classes hold.
    fn divide(&mut self) {
        let taken: u32 = self.there().map(|class| self.parts[class].resident).sum();
        if taken == 0 {
            // Pages that are on their way say nothing yet.
            return;
        }
        self.divided = true;
        let least = self.sizes.0 / STEP;
        let rest = self.sizes.0 - least * self.there().count() as u32;
        let mut left = rest;
        for class in 0..CLASSES {
            let part = &mut self.parts[class];
            if part.pages > 0 {
                let share = (u64::from(rest) * u64::from(part.resident) / u64::from(taken)) as u32;
                left -= share;
                part.share = least + share;
            }
        }
        // The frames that rounding left.
        if let Some(largest) = self.largest() {
            self.parts[largest].share += left;
        }
        self.keep_floors();
        self.settle();
    }

    /// A class has its first segment: gives it the share that it had before, or a sixteenth, from the largest class.
    fn admit(&mut self, class: usize) {
        if !self.divided {
            return;
        }
        let wanted = match self.parts[class].had {
            0 => self.sizes.0 / STEP,
            had => had,
        };
        let Some(largest) = self.largest().filter(|largest| *largest != class) else { return };
        let above = self.parts[largest].share.saturating_sub(self.least(largest));
        let taken = wanted.min(self.parts[largest].share / 2).min(above);
        self.parts[largest].share -= taken;
        self.parts[class].share += taken;
    }

    /// Moves frames to the class that would have gained most by them, if that is more than what the move costs.
    fn judge(&mut self) {
        let holdings = std::array::from_fn(|class| Holding {
            share: self.parts[class].share,
            least: self.least(class),
            pages: self.parts[class].pages,
        });
        if let Some(gift) = self.division.judge(&holdings) {
            self.parts[gift.from].share -= gift.frames;
            self.parts[gift.to].share += gift.frames;
            self.resized(gift.from);
            self.resized(gift.to);
        }
    }

    /// Replaces a class's policy by another one, and tells it of segments and resident pages.
    fn swap(&mut self, class: usize, policy: Box<dyn Policy>) {
        let part = &mut self.parts[class];
        let pages = part.policy.tracked();
        part.policy = policy;
        part.policy.walker(self.walker);
        self.resized(class);
        for (number, known) in self.segments.iter().enumerate() {
            if let Some((_, pages)) = known.filter(|(of, _)| *of as usize == class) {
                self.parts[class].policy.segment(SegmentId(number as u32), pages);
            }
        }
        pages.into_iter().for_each(|page| self.parts[class].policy.inserted(page));
    }

    /// Records whether a walker has a plan of pages of this class. The class's policy follows plans while any walker
    /// has one.
    fn plans(&mut self, class: usize, walker: WalkerId, has_one: bool) {
        let planners = &mut self.parts[class].planners;
        let before = planners.is_empty();
        planners.retain(|planner| *planner != walker);
        if has_one {
            planners.push(walker);
        }
        let after = planners.is_empty();
        if before != after {
            self.swap(class, if after { own(SegmentClass::ALL[class]) } else { Box::new(PlanPolicy::new()) });
        }
    }

    /// How many frames a class has beyond its share, with the page that comes.
    fn excess(&self, class: usize, coming: Option<usize>) -> i64 {
        let part = &self.parts[class];
        i64::from(part.resident) + i64::from(coming == Some(class)) - i64::from(part.share)
    }
}

impl Policy for SharesPolicy {
    fn name(&self) -> &'static str {
        PolicyKind::Shares.name()
    }

    fn resize(&mut self, frames: u32, host_frames: u32, lookahead: u32) {
        let before = std::mem::replace(&mut self.sizes, (frames, host_frames, lookahead)).0;
        if self.divided && before != frames {
            // In proportion; the largest class gets the frames that rounding left.
            let mut left = frames;
            for part in &mut self.parts {
                part.share = (u64::from(part.share) * u64::from(frames) / u64::from(before.max(1))) as u32;
                left -= part.share;
            }
            if let Some(largest) = self.largest() {
                self.parts[largest].share += left;
            }
            self.division.clear();
            self.keep_floors();
        }
        self.settle();
    }

    fn floors(&mut self, floors: &[(SegmentClass, u32)]) -> bool {
        for (class, frames) in floors {
            self.floors[*class as usize] = *frames;
        }
        self.keep_floors();
        self.settle();
        true
    }

    fn share(&self, class: SegmentClass) -> Option<u32> {
        self.divided.then_some(self.parts[class as usize].share)
    }

    fn unit(&mut self, pages: u32) {
        self.parts.iter_mut().for_each(|part| part.policy.unit(pages));
    }

    fn class(&mut self, segment: SegmentId, class: SegmentClass) {
        self.announced = Some((segment, class));
    }

    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.forget(segment);
        let announced = self.announced.take().filter(|(of, _)| *of == segment);
        let class = announced.map_or(SegmentClass::Other, |(_, class)| class);
        if self.segments.len() <= segment.index() {
            self.segments.resize(segment.index() + 1, None);
        }
        self.numbers.add(segment, pages);
        fit(&mut self.resident, self.numbers.end(), false);
        self.division.segment(class as usize, segment, class, pages);
        let part = &mut self.parts[class as usize];
        part.policy.segment(segment, pages);
        let first = part.pages == 0;
        if first {
            self.admit(class as usize);
        }
        self.parts[class as usize].pages += u64::from(pages);
        self.segments[segment.index()] = Some((class, pages));
        let before = self.parts[class as usize].share;
        self.keep_floors();
        if first || self.parts[class as usize].share != before {
            self.settle();
        }
    }

    fn chain(&mut self, pages: &[PageId]) {
        let Some(first) = pages.first() else { return };
        let class = self.class_of(first.segment);
        self.parts[class].policy.chain(pages);
        self.division.chain(class, pages);
    }

    fn accessed(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        let class = self.class_of(page.segment);
        if !self.resident[number as usize] {
            self.coming = Some(class);
        }
        let part = &mut self.parts[class];
        part.refused = false;
        part.policy.accessed(page);
        if self.division.used(class, page) {
            self.judge();
        }
    }

    fn written(&mut self, page: PageId) {
        self.division.wrote(self.class_of(page.segment), page);
    }

    fn inserted(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        let class = self.class_of(page.segment);
        let part = &mut self.parts[class];
        part.resident += u32::from(!std::mem::replace(&mut self.resident[number as usize], true));
        part.refused = false;
        part.policy.inserted(page);
        self.coming = self.coming.filter(|coming| *coming != class);
    }

    fn removed(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        let class = self.class_of(page.segment);
        let part = &mut self.parts[class];
        part.resident -= u32::from(std::mem::take(&mut self.resident[number as usize]));
        part.policy.removed(page);
        // A frame is free, or another class has it.
        self.parts.iter_mut().for_each(|part| part.refused = false);
    }

    fn forget(&mut self, segment: SegmentId) {
        let Some((class, pages)) = self.segments.get_mut(segment.index()).and_then(Option::take) else { return };
        let part = &mut self.parts[class as usize];
        for number in self.numbers.of_segment(segment) {
            part.resident -= u32::from(std::mem::take(&mut self.resident[number]));
        }
        part.pages -= u64::from(pages);
        part.policy.forget(segment);
        self.division.forget(class as usize, segment);
        self.numbers.remove(segment);
        fit(&mut self.resident, self.numbers.end(), false);
        if part.pages == 0 {
            part.had = part.share;
            self.settle();
        }
    }

    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        // Shrinking or giving back memory does not mean that no frame is free.
        if !self.divided && !matches!(want, Want::Room | Want::Memory) {
            self.divide();
        }
        let coming = match want {
            Want::Planned(page) => Some(self.class_of(page.segment)),
            Want::Demand => self.coming,
            _ => None,
        };
        let mut order: [usize; CLASSES] = std::array::from_fn(|class| class);
        // A class with no more than its floor comes last, also where pages of others are on their way and not counted.
        let at_floor = |class: usize| self.parts[class].resident <= self.least(class);
        order.sort_unstable_by_key(|class| (at_floor(*class), -self.excess(*class, coming)));
        let within = coming.is_none_or(|class| self.excess(class, coming) <= 0);
        let mut stopped = false;
        for class in order {
            // A fill ahead may take a frame that another class has beyond its share, if its own class stays within its
            // share: otherwise two plans could take the same frame from each other for ever. Within a share, only the
            // class itself knows whether a page is worth less than the one to come.
            let want = match want {
                Want::Planned(_) if coming == Some(class) => want,
                Want::Planned(_) if within && self.excess(class, coming) > 0 => Want::Hint,
                Want::Planned(_) => continue,
                want => want,
            };
            let found = self.parts[class].policy.victim(want, &mut |page| {
                let answer = take(page);
                stopped |= answer == Take::Stop;
                answer
            });
            if found.is_some() || stopped {
                return found;
            }
        }
        if let (Want::Planned(_), Some(class)) = (want, coming) {
            self.parts[class].refused = true;
        }
        None
    }

    fn walker(&mut self, walker: WalkerId) {
        self.walker = walker;
        self.parts.iter_mut().for_each(|part| part.policy.walker(walker));
    }

    fn walker_ended(&mut self, walker: WalkerId) {
        for class in 0..CLASSES {
            self.parts[class].policy.walker_ended(walker);
            self.plans(class, walker, false);
        }
        self.settle();
    }

    fn declare(&mut self, order: &[PageId], cyclic: bool) {
        let walker = self.walker;
        for class in 0..CLASSES {
            let own: Vec<PageId> = order.iter().copied().filter(|page| self.class_of(page.segment) == class).collect();
            self.plans(class, walker, !own.is_empty());
            self.parts[class].refused = false;
            self.parts[class].policy.declare(&own, cyclic);
        }
        self.settle();
    }

    fn unordered(&mut self) {
        let walker = self.walker;
        for class in 0..CLASSES {
            self.parts[class].policy.unordered();
            self.plans(class, walker, false);
        }
        self.settle();
    }

    fn expected(&mut self, pages: &[PageId]) {
        for class in 0..CLASSES {
            let own: Vec<PageId> = pages.iter().copied().filter(|page| self.class_of(page.segment) == class).collect();
            self.parts[class].policy.expected(&own);
        }
    }

    fn has_plan(&self) -> bool {
        self.parts.iter().any(|part| part.policy.has_plan())
    }

    fn places(&self) -> Vec<WalkerPlace> {
        self.parts.iter().flat_map(|part| part.policy.places()).collect()
    }

    fn order_of(&self, walker: WalkerId) -> Vec<PageId> {
        let orders = self.parts.iter().map(|part| part.policy.order_of(walker));
        // Of orders in several classes, nobody knows how they interleave.
        let mut orders = orders.filter(|order| !order.is_empty());
        let first = orders.next().unwrap_or_default();
        if orders.next().is_some() { Vec::new() } else { first }
    }

    fn next_fill(&mut self, present: &dyn Fn(PageId) -> bool) -> Option<PageId> {
        self.parts.iter_mut().filter(|part| !part.refused).find_map(|part| part.policy.next_fill(present))
    }

    fn filling(&mut self, page: PageId) {
        let class = self.class_of(page.segment);
        self.parts[class].policy.filling(page);
    }

    fn worth_host(&self, page: PageId) -> bool {
        self.parts[self.class_of(page.segment)].policy.worth_host(page)
    }

    fn host_victim(&self, candidate: PageId, incoming: PageId) -> bool {
        let (of, to) = (self.class_of(candidate.segment), self.class_of(incoming.segment));
        if of == to {
            return self.parts[of].policy.host_victim(candidate, incoming);
        }
        // Each plan has its own host frames.
        !(self.parts[of].planned() && self.parts[to].planned() && self.parts[of].policy.worth_host(candidate))
    }

    fn tracked(&self) -> Vec<PageId> {
        self.parts.iter().flat_map(|part| part.policy.tracked()).collect()
    }

    fn check(&self) -> Result<(), String> {
        self.parts.iter().try_for_each(|part| part.policy.check())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use std::collections::BTreeSet;

    use super::super::bare::BareCache;
    use super::*;
    use crate::ids::PageIndex;

    const WEIGHTS: SegmentId = SegmentId(3);
    const TABLE: SegmentId = SegmentId(0);

    fn page(segment: SegmentId, index: u32) -> PageId {
        PageId { segment, index: PageIndex(index) }
    }

    /// Numbers without an order (Knuth's multiplicative hash).
    fn scattered(n: u32) -> u32 {
        n.wrapping_mul(2_654_435_761) >> 8
    }

    #[test]
    fn a_class_alone_is_as_its_own_policy() {
        for class in SegmentClass::ALL {
            let mut caches = [PolicyKind::Shares.build(), own(class)].map(|policy| BareCache::new(policy, 40));
            caches.iter_mut().for_each(|cache| cache.segment(TABLE, class, 300));
            let mut hits = 0;
            for n in 0..20_000 {
                // Pages in demand, and sweeps.
                let number = if n % 3 == 0 { n / 3 % 60 } else { scattered(n) % (1 + scattered(n / 7) % 300) };
                let [shared, own] = caches.each_mut().map(|cache| cache.used(page(TABLE, number), false).unwrap());
                assert_eq!(shared, own, "{class:?}, use {n}");
                hits += u32::from(own);
            }
            assert!(hits > 1000, "{class:?}: {hits}");
        }
    }

    /// Sweeps over `swept` pages beside as many uses of a table, none of which comes twice. Returns the hit ratio of
    /// the sweeps in the last quarter.
    fn swept_hits(mut cache: BareCache, class: SegmentClass, swept: u32, sweeps: u32) -> f64 {
        let pages = swept * sweeps;
        cache.segment(WEIGHTS, SegmentClass::Weights, swept);
        cache.segment(TABLE, class, pages);
        let (mut hits, mut uses) = (0, 0);
        for sweep in 0..sweeps {
            for index in 0..swept {
                let hit = cache.used(page(WEIGHTS, index), false).unwrap();
                cache.used(page(TABLE, sweep * swept + index), false).unwrap();
                if sweep > sweeps * 3 / 4 {
                    hits += u32::from(hit);
                    uses += 1;
                }
            }
        }
        f64::from(hits) / f64::from(uses)
    }

    #[test]
    fn frames_go_where_they_are_worth_more() {
        for (frames, swept) in [(100, 95), (5000, 4500)] {
            let shared =
                swept_hits(BareCache::new(PolicyKind::Shares.build(), frames), SegmentClass::Other, swept, 400);
            assert!(shared > 0.9, "{shared} of {frames} frames");
            let lru = swept_hits(BareCache::new(PolicyKind::Lru.build(), frames), SegmentClass::Other, swept, 8);
            assert!(lru < 0.1, "without shares the table takes the room: {lru}");
        }
    }

    #[test]
    fn a_floor_is_kept_whatever_others_gain() {
        let seen_again = |floor: u32| {
            let mut policy = SharesPolicy::default();
            policy.resize(100, 0, 0);
            assert!(policy.floors(&[(SegmentClass::KeysAndValues, floor)]));
            let mut cache = BareCache::new(Box::new(policy), 100);
            cache.segment(TABLE, SegmentClass::KeysAndValues, 200);
            cache.segment(WEIGHTS, SegmentClass::Weights, 95);
            (0..30).for_each(|index| _ = cache.used(page(TABLE, index), false).unwrap());
            // Whoever has more frames of these has more hits.
            for n in 0..200 * 95 {
                cache.used(page(WEIGHTS, n % 95), false).unwrap();
            }
            (0..30).filter(|index| cache.used(page(TABLE, *index), false).unwrap()).count()
        };
        assert_eq!(seen_again(30), 30);
        assert!(seen_again(0) < 10);
    }

    #[test]
    fn floors_are_kept_in_proportion_and_of_pages_that_there_are() {
        let mut policy = SharesPolicy::default();
        policy.resize(48, 0, 0);
        add(&mut policy, WEIGHTS, SegmentClass::Weights, 60);
        add(&mut policy, TABLE, SegmentClass::KeysAndValues, 6);
        policy.floors(&[(SegmentClass::Weights, 30), (SegmentClass::KeysAndValues, 10)]);
        (0..48).for_each(|index| comes(&mut policy, page(WEIGHTS, index)));
        policy.victim(Want::Demand, &mut |_| Take::Yes);
        shares_are_all_frames(&policy, 48);
        assert!(share(&policy, SegmentClass::KeysAndValues) >= 6 && share(&policy, SegmentClass::Weights) >= 30);
        policy.resize(20, 0, 0);
        shares_are_all_frames(&policy, 20);
        assert!(share(&policy, SegmentClass::KeysAndValues) >= 5 && share(&policy, SegmentClass::Weights) >= 15);
        add(&mut policy, TABLE, SegmentClass::KeysAndValues, 100);
        policy.resize(80, 0, 0);
        shares_are_all_frames(&policy, 80);
        assert!(share(&policy, SegmentClass::KeysAndValues) >= 10 && share(&policy, SegmentClass::Weights) >= 30);
    }

    fn add(policy: &mut SharesPolicy, segment: SegmentId, class: SegmentClass, pages: u32) {
        policy.class(segment, class);
        policy.segment(segment, pages);
    }

    fn comes(policy: &mut SharesPolicy, page: PageId) {
        policy.accessed(page);
        policy.inserted(page);
    }

    fn share(policy: &SharesPolicy, class: SegmentClass) -> u32 {
        policy.parts[class as usize].share
    }

    fn shares_are_all_frames(policy: &SharesPolicy, frames: u32) {
        assert_eq!(policy.there().map(|class| policy.parts[class].share).sum::<u32>(), frames);
        assert!(policy.parts.iter().all(|part| part.pages > 0 || part.share == 0));
    }

    #[test]
    fn shares_are_all_frames_whatever_changes() {
        let mut policy = SharesPolicy::default();
        policy.resize(48, 0, 0);
        add(&mut policy, WEIGHTS, SegmentClass::Weights, 60);
        add(&mut policy, TABLE, SegmentClass::KeysAndValues, 60);
        (0..48).for_each(|n| comes(&mut policy, page(WEIGHTS, n)));
        assert!(!policy.divided, "there was no need to");
        policy.accessed(page(TABLE, 0));
        let gone = policy.victim(Want::Demand, &mut |_| Take::Yes).unwrap();
        assert_eq!(gone.segment, WEIGHTS, "it has all there is");
        policy.removed(gone);
        policy.inserted(page(TABLE, 0));
        assert_eq!((share(&policy, SegmentClass::Weights), share(&policy, SegmentClass::KeysAndValues)), (45, 3));
        for frames in [48, 7, 1, 333, 20_000, 48] {
            policy.resize(frames, 0, 0);
            shares_are_all_frames(&policy, frames);
        }
        // A class that comes later gets a little; when it comes again, the share that it had.
        let moments = SegmentId(1);
        add(&mut policy, moments, SegmentClass::Optimizer, 10);
        assert_eq!(share(&policy, SegmentClass::Optimizer), 3);
        policy.parts[SegmentClass::Optimizer as usize].share += 9;
        policy.parts[SegmentClass::Weights as usize].share -= 9;
        policy.forget(moments);
        shares_are_all_frames(&policy, 48);
        add(&mut policy, moments, SegmentClass::Optimizer, 10);
        assert_eq!(share(&policy, SegmentClass::Optimizer), 12);
        shares_are_all_frames(&policy, 48);
        policy.forget(moments);
        policy.tracked().into_iter().filter(|page| page.segment == WEIGHTS).for_each(|page| policy.removed(page));
        policy.forget(WEIGHTS);
        assert_eq!(share(&policy, SegmentClass::KeysAndValues), 48, "one class has all");
        assert_eq!(policy.tracked(), [page(TABLE, 0)]);
    }

    /// Sweeps over keys and values bring no hit below 40 frames, which is far more than a class begins with.
    #[test]
    fn frames_follow_a_load_that_changes() {
        let mut cache = BareCache::new(PolicyKind::Shares.build(), 64);
        cache.segment(WEIGHTS, SegmentClass::Weights, 60);
        cache.segment(TABLE, SegmentClass::KeysAndValues, 40);
        // Misses of the last of these rounds.
        let mut misses = |swept: u32, times: u32| {
            let mut missed = 0;
            for _ in 0..40 {
                missed = 0;
                for used in (0..60).map(|n| page(WEIGHTS, n)).chain((0..swept * times).map(|n| page(TABLE, n % swept)))
                {
                    missed += u32::from(!cache.used(used, false).unwrap());
                }
            }
            missed
        };
        for _ in 0..2 {
            let long = misses(40, 8);
            assert!(long <= 45, "{long} misses, of 36 at least");
            let short = misses(2, 2);
            assert!(short <= 4, "{short} misses where all fits");
        }
    }

    #[test]
    fn regression_nothing_is_divided_while_all_is_on_its_way() {
        let mut policy = SharesPolicy::default();
        policy.resize(8, 0, 0);
        add(&mut policy, WEIGHTS, SegmentClass::Weights, 20);
        add(&mut policy, TABLE, SegmentClass::KeysAndValues, 20);
        (0..9).for_each(|n| policy.accessed(page(WEIGHTS, n)));
        assert_eq!(policy.victim(Want::Demand, &mut |_| Take::Yes), None);
        assert!(!policy.divided);
        (0..8).for_each(|n| policy.inserted(page(WEIGHTS, n)));
        assert!(policy.victim(Want::Demand, &mut |_| Take::Yes).is_some());
        shares_are_all_frames(&policy, 8);
        assert_eq!(share(&policy, SegmentClass::Other), 0);
    }

    #[test]
    fn regression_small_caches_outlive_other_classes() {
        let mut policy = SharesPolicy::default();
        policy.resize(32, 0, 0);
        add(&mut policy, WEIGHTS, SegmentClass::Weights, 40);
        add(&mut policy, TABLE, SegmentClass::Other, 40);
        (0..32).for_each(|n| comes(&mut policy, page(WEIGHTS, n)));
        policy.victim(Want::Demand, &mut |_| Take::Skip);
        (0..4).for_each(|_| policy.accessed(page(WEIGHTS, 0)));
        let hits = |policy: &SharesPolicy| policy.division.hits(0);
        assert_eq!(hits(&policy), 3);
        // As in a step of a program that has activations.
        for _ in 0..3 {
            add(&mut policy, SegmentId(7), SegmentClass::Activations, 4);
            policy.forget(SegmentId(7));
        }
        assert_eq!(hits(&policy), 3);
    }

    #[test]
    fn regression_a_plan_that_is_refused_does_not_keep_others_from_filling() {
        let mut policy = SharesPolicy::default();
        policy.resize(4, 0, 2);
        add(&mut policy, WEIGHTS, SegmentClass::Weights, 8);
        add(&mut policy, TABLE, SegmentClass::Other, 8);
        (0..4).for_each(|n| comes(&mut policy, page(WEIGHTS, n)));
        let order: Vec<PageId> = (0..8).map(|n| page(WEIGHTS, n)).chain((0..8).map(|n| page(TABLE, n))).collect();
        policy.declare(&order, true);
        let absent = |page: PageId| page.segment == WEIGHTS && page.index.0 < 4;
        let first = policy.next_fill(&absent).unwrap();
        assert_eq!(first.segment, WEIGHTS);
        assert_eq!(policy.victim(Want::Planned(first), &mut |_| Take::Skip), None);
        assert_eq!(policy.next_fill(&absent).unwrap().segment, TABLE);
        policy.accessed(page(WEIGHTS, 0));
        assert_eq!(policy.next_fill(&absent).unwrap().segment, WEIGHTS, "what it would evict may be another page now");
    }

    #[test]
    fn a_hint_takes_nothing_that_a_plan_keeps() {
        let mut policy = SharesPolicy::default();
        policy.resize(16, 0, 1);
        add(&mut policy, WEIGHTS, SegmentClass::Weights, 32);
        add(&mut policy, TABLE, SegmentClass::Other, 8);
        let order: Vec<PageId> = (0..32).map(|n| page(WEIGHTS, n)).collect();
        policy.declare(&order, true);
        (0..16).for_each(|n| comes(&mut policy, page(WEIGHTS, 2 * n)));
        policy.accessed(page(TABLE, 0));
        let offered = |policy: &mut SharesPolicy, want| {
            let mut offered = 0;
            policy.victim(want, &mut |_| {
                offered += 1;
                Take::Skip
            });
            offered
        };
        let (hint, demand) = (offered(&mut policy, Want::Hint), offered(&mut policy, Want::Demand));
        assert!(hint < demand && demand == 16, "{hint} of {demand}");
    }

    #[test]
    fn a_segment_that_is_added_again_is_a_new_one() {
        let mut policy = SharesPolicy::default();
        policy.resize(8, 0, 0);
        add(&mut policy, WEIGHTS, SegmentClass::Weights, 6);
        (0..6).for_each(|n| comes(&mut policy, page(WEIGHTS, n)));
        add(&mut policy, WEIGHTS, SegmentClass::KeysAndValues, 4);
        let pages = |class: SegmentClass| (policy.parts[class as usize].pages, policy.parts[class as usize].resident);
        assert_eq!((pages(SegmentClass::Weights), pages(SegmentClass::KeysAndValues)), ((0, 0), (4, 0)));
        (0..6).for_each(|n| policy.removed(page(WEIGHTS, n)));
        policy.inserted(page(SegmentId(99), 0));
        assert_eq!(policy.parts.iter().map(|part| part.resident).sum::<u32>(), 0);
    }

    #[test]
    fn a_declared_order_is_its_classes_own() {
        let mut policy = SharesPolicy::default();
        policy.resize(4, 0, 2);
        add(&mut policy, WEIGHTS, SegmentClass::Weights, 8);
        add(&mut policy, TABLE, SegmentClass::Other, 8);
        for n in [0, 1] {
            policy.accessed(page(WEIGHTS, n));
            policy.inserted(page(WEIGHTS, n));
            policy.inserted(page(TABLE, n));
        }
        let before: BTreeSet<PageId> = policy.tracked().into_iter().collect();
        let order: Vec<PageId> = (0..8).map(|n| page(WEIGHTS, n)).collect();
        policy.declare(&order, true);
        assert!(
            policy.has_plan() && policy.parts[0].planned() && !policy.parts[SegmentClass::Other as usize].planned()
        );
        assert_eq!(policy.tracked().into_iter().collect::<BTreeSet<_>>(), before);
        let next = policy.next_fill(&|page| before.contains(&page)).unwrap();
        assert_eq!(next.segment, WEIGHTS);
        // The table is at its share, so a fill ahead takes nothing from it.
        policy.divide();
        let mut offered = Vec::new();
        policy.victim(Want::Planned(next), &mut |page| {
            offered.push(page.segment);
            Take::Skip
        });
        assert!(!offered.contains(&TABLE), "{offered:?}");
        policy.declare(&[], false);
        assert!(!policy.has_plan() && !policy.parts[0].planned());
        assert_eq!(policy.tracked().into_iter().collect::<BTreeSet<_>>(), before);
    }
}
