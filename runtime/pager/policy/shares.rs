//! Frames divided among classes of tensors, each with a policy of its own.
//!
//! A class has a share of the frames, and a page has to go from the class that is furthest beyond its share. Shares follow
//! what frames are worth: for each class two caches without bytes, one somewhat smaller than its share and one somewhat
//! larger, see a sample of its uses, and the difference of their hits is what it would gain by more frames and lose by fewer.
//! Every so often the class that would lose least gives some to the one that would gain most. Pages have one size, so that a
//! hit more is as many bytes less to move, whichever class it is of.
//!
//! # Sources
//!
//! Shares by marginal hits: H. S. Stone, J. Turek and J. L. Wolf, "Optimal partitioning of cache memory", IEEE Transactions on
//! Computers 41(9), 1992. Small caches that see a sample: C. Waldspurger, T. Saemundsson, I. Ahmad and N. Park, "Cache modeling
//! and optimization using miniature simulations", USENIX ATC 2017. What is of this crate: the sample is of every so many pages
//! of a segment, because chains and sweeps are in order there.

use super::bare::BareCache;
use super::{Policy, PolicyKind, Take, Want};
use crate::ids::{PageId, PageIndex, SegmentClass, SegmentId};
use crate::pager::numbers::{PageNumbers, fit};

const CLASSES: usize = SegmentClass::ALL.len();

/// Frames of all small caches together, about: enough that a difference of their hits says something.
const SAMPLED_FRAMES: u32 = 512;
/// The small caches are this part of their frames smaller and larger.
const STEP: u32 = 16;
/// A class gives this part of all frames at a time.
const GIFT: u32 = 32;
/// Sampled hits more that a class must gain than the other loses before frames move: less may be chance.
const NOISE: u64 = 8;
/// Uses between gifts: as many as there are frames, times this, but not fewer than a thousand.
const EPOCH: u32 = 2;
const EPOCH_MIN: u32 = 1024;

/// What is a class's own.
#[derive(Debug)]
struct Part {
    policy: Box<dyn Policy>,
    /// `policy` follows a declared order.
    planned: bool,
    resident: u32,
    share: u32,
    /// Pages of its segments.
    pages: u64,
    /// With fewer frames and with more; none where no other class could give or take any.
    small: Option<[Miniature; 2]>,
}

impl Part {
    /// Hits that the larger of the small caches has beyond the smaller's.
    fn worth(&self) -> u64 {
        self.small.as_ref().map_or(0, |[less, more]| more.hits.saturating_sub(less.hits))
    }
}

/// A small cache, and what it hit since shares were looked at last.
#[derive(Debug)]
struct Miniature {
    cache: BareCache,
    hits: u64,
}

/// See the [module documentation](self). A byte a page beyond what its class's policy takes; where there are several classes,
/// twice that and a byte more for each page of the sample.
#[derive(Debug)]
pub(super) struct SharesPolicy {
    numbers: PageNumbers,
    /// By page number.
    resident: Vec<bool>,
    /// By segment: its class and its pages.
    segments: Vec<Option<(SegmentClass, u32)>>,
    parts: [Part; CLASSES],
    /// Frames, host frames, lookahead.
    sizes: (u32, u32, u32),
    /// Of 2 to the power of this pages, one is in the sample.
    shift: u32,
    /// Shares were given out: before there was a need to evict, there was none to divide.
    divided: bool,
    uses: u32,
    /// The class of the page that was used last and is not resident: it comes next, as a rule.
    coming: Option<usize>,
    sampled: Vec<PageId>,
}

/// What suits a class, where no order was declared.
const fn policy_of(class: SegmentClass) -> PolicyKind {
    match class {
        SegmentClass::KeysAndValues => PolicyKind::Kv,
        SegmentClass::Other => PolicyKind::S3Fifo,
        // Swept over and over: what stays must not depend on how long ago it was used.
        _ => PolicyKind::Lirs,
    }
}

impl Default for SharesPolicy {
    fn default() -> Self {
        let part = |class| Part {
            policy: policy_of(class).build(),
            planned: false,
            resident: 0,
            share: 0,
            pages: 0,
            small: None,
        };
        Self {
            numbers: PageNumbers::default(),
            resident: Vec::new(),
            segments: Vec::new(),
            parts: SegmentClass::ALL.map(part),
            sizes: (0, 0, 0),
            shift: 0,
            divided: false,
            uses: 0,
            coming: None,
            sampled: Vec::new(),
        }
    }
}

impl SharesPolicy {
    fn class_of(&self, segment: SegmentId) -> usize {
        let known = self.segments.get(segment.index()).copied().flatten();
        known.map_or(SegmentClass::Other, |(class, _)| class) as usize
    }

    /// The page as the small caches know it, if it is in the sample.
    fn sample(&self, page: PageId) -> Option<PageId> {
        // Segments begin at different places, so that small ones are not all in the sample, or none of them.
        let place = page.index.0.wrapping_add(page.segment.0);
        let index = PageIndex(page.index.0 >> self.shift);
        (place & ((1 << self.shift) - 1) == 0).then_some(PageId { segment: page.segment, index })
    }

    /// Frames of a class's small caches.
    fn small(&self, class: usize) -> [u32; 2] {
        let (all, own) = (self.sizes.0 >> self.shift, self.parts[class].share >> self.shift);
        let step = (all / STEP).max(1);
        [own.saturating_sub(step), own + step]
    }

    /// A share has changed.
    fn resized(&mut self, class: usize) {
        let (_, host, lookahead) = self.sizes;
        let small = self.small(class);
        let part = &mut self.parts[class];
        part.policy.resize(part.share.max(1), host, lookahead);
        for (small, frames) in part.small.iter_mut().flatten().zip(small) {
            // They have policies of this crate, which offer every page there is.
            let _ = small.cache.resize(frames);
        }
    }

    /// Small caches anew, because the sample or the classes that there are changed.
    fn rebuild(&mut self) {
        let several = self.parts.iter().filter(|part| part.pages > 0).count() > 1;
        for class in 0..CLASSES {
            let there = several && self.divided && self.parts[class].pages > 0;
            let new = |frames| {
                let mut cache = BareCache::new(policy_of(SegmentClass::ALL[class]).build(), frames);
                for (number, known) in self.segments.iter().enumerate() {
                    if let Some((of, pages)) = known.filter(|(of, _)| *of as usize == class) {
                        cache.segment(SegmentId(number as u32), of, (pages >> self.shift) + 1);
                    }
                }
                Miniature { cache, hits: 0 }
            };
            let small = there.then(|| self.small(class).map(new));
            self.parts[class].small = small;
        }
    }

    /// There are no more free frames: every class has what it took.
    fn divide(&mut self) {
        self.divided = true;
        let taken: u32 = self.parts.iter().map(|part| part.resident).sum();
        let mut left = self.sizes.0;
        for class in 0..CLASSES {
            let part = &mut self.parts[class];
            part.share = (u64::from(self.sizes.0) * u64::from(part.resident) / u64::from(taken.max(1))) as u32;
            left -= part.share;
        }
        // What rounding left goes to the largest.
        if let Some(most) = (0..CLASSES).max_by_key(|class| self.parts[*class].share) {
            self.parts[most].share += left;
        }
        self.uses = 0;
        self.rebuild();
        (0..CLASSES).for_each(|class| self.resized(class));
    }

    /// Moves frames to where they are worth most.
    fn give(&mut self) {
        let gift = (self.sizes.0 / GIFT).max(1);
        let worth = |class: &usize| self.parts[*class].worth();
        let there = || (0..CLASSES).filter(|class| self.parts[*class].pages > 0);
        let from = there().filter(|class| self.parts[*class].share > 0).min_by_key(worth);
        let wants = |class: &usize| self.parts[*class].pages > u64::from(self.parts[*class].share);
        let to = there().filter(wants).max_by_key(worth);
        if let (Some(from), Some(to)) = (from, to) {
            let (least, most) = (worth(&from), worth(&to));
            // Where both are near, moving frames costs what they hold.
            if from != to && most > least + least / 4 + NOISE {
                let gift = gift.min(self.parts[from].share);
                self.parts[from].share -= gift;
                self.parts[to].share += gift;
                self.resized(from);
                self.resized(to);
            }
        }
        for small in self.parts.iter_mut().flat_map(|part| &mut part.small).flatten() {
            small.hits = 0;
        }
    }

    /// A class's policy anew, of another kind: it is told of what is there.
    fn swap(&mut self, class: usize, kind: PolicyKind) {
        let (_, host, lookahead) = self.sizes;
        let part = &mut self.parts[class];
        let pages = part.policy.tracked();
        part.policy = kind.build();
        part.policy.resize(if self.divided { part.share } else { self.sizes.0 }, host, lookahead);
        for (number, known) in self.segments.iter().enumerate() {
            let Some((of, pages)) = *known else { continue };
            if of as usize == class {
                part.policy.segment(SegmentId(number as u32), pages);
            }
        }
        pages.into_iter().for_each(|page| part.policy.inserted(page));
    }
}

impl Policy for SharesPolicy {
    fn name(&self) -> &'static str {
        PolicyKind::Shares.name()
    }

    fn resize(&mut self, frames: u32, host_frames: u32, lookahead: u32) {
        let before = std::mem::replace(&mut self.sizes, (frames, host_frames, lookahead));
        let shift = (frames / SAMPLED_FRAMES).max(1).ilog2();
        if self.divided {
            // In proportion, and what rounding leaves to the largest.
            let mut left = frames;
            for part in &mut self.parts {
                part.share = (u64::from(part.share) * u64::from(frames) / u64::from(before.0.max(1))) as u32;
                left -= part.share;
            }
            if let Some(most) = self.parts.iter_mut().max_by_key(|part| part.share) {
                most.share += left;
            }
        }
        if std::mem::replace(&mut self.shift, shift) != shift {
            self.rebuild();
        }
        if self.divided {
            (0..CLASSES).for_each(|class| self.resized(class));
        } else {
            self.parts.iter_mut().for_each(|part| part.policy.resize(frames, host_frames, lookahead));
        }
    }

    fn unit(&mut self, pages: u32) {
        self.parts.iter_mut().for_each(|part| part.policy.unit(pages));
    }

    fn class(&mut self, segment: SegmentId, class: SegmentClass) {
        if self.segments.len() <= segment.index() {
            self.segments.resize(segment.index() + 1, None);
        }
        self.segments[segment.index()] = Some((class, 0));
    }

    fn segment(&mut self, segment: SegmentId, pages: u32) {
        let class =
            self.segments.get(segment.index()).copied().flatten().map_or(SegmentClass::Other, |(class, _)| class);
        self.class(segment, class);
        self.segments[segment.index()] = Some((class, pages));
        self.numbers.add(segment, pages);
        fit(&mut self.resident, self.numbers.end(), false);
        let part = &mut self.parts[class as usize];
        part.policy.segment(segment, pages);
        let first = part.pages == 0;
        part.pages += u64::from(pages);
        if first {
            self.rebuild();
        } else {
            for small in part.small.iter_mut().flatten() {
                small.cache.segment(segment, class, (pages >> self.shift) + 1);
            }
        }
    }

    fn chain(&mut self, pages: &[PageId]) {
        let Some(first) = pages.first() else { return };
        let class = self.class_of(first.segment);
        self.parts[class].policy.chain(pages);
        let mut sampled = std::mem::take(&mut self.sampled);
        sampled.clear();
        sampled.extend(pages.iter().filter_map(|page| self.sample(*page)));
        if !sampled.is_empty() {
            for small in self.parts[class].small.iter_mut().flatten() {
                small.cache.chain(&sampled);
            }
        }
        self.sampled = sampled;
    }

    fn accessed(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        let class = self.class_of(page.segment);
        if !self.resident[number as usize] {
            self.coming = Some(class);
        }
        self.parts[class].policy.accessed(page);
        if self.parts[class].small.is_none() {
            return;
        }
        if let Some(sampled) = self.sample(page) {
            for small in self.parts[class].small.iter_mut().flatten() {
                small.hits += u64::from(small.cache.used(sampled).unwrap_or(false));
            }
        }
        self.uses += 1;
        if self.uses >= (self.sizes.0.saturating_mul(EPOCH)).max(EPOCH_MIN) {
            self.uses = 0;
            self.give();
        }
    }

    fn inserted(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        let part = &mut self.parts[self.class_of(page.segment)];
        part.resident += u32::from(!std::mem::replace(&mut self.resident[number as usize], true));
        part.policy.inserted(page);
    }

    fn removed(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        let class = self.class_of(page.segment);
        let part = &mut self.parts[class];
        part.resident -= u32::from(std::mem::take(&mut self.resident[number as usize]));
        part.policy.removed(page);
    }

    fn forget(&mut self, segment: SegmentId) {
        let Some((class, pages)) = self.segments.get_mut(segment.index()).and_then(Option::take) else { return };
        let part = &mut self.parts[class as usize];
        part.pages -= u64::from(pages);
        part.policy.forget(segment);
        for small in part.small.iter_mut().flatten() {
            small.cache.forget(segment);
        }
        if part.pages == 0 {
            self.rebuild();
        }
        self.numbers.remove(segment);
        fit(&mut self.resident, self.numbers.end(), false);
    }

    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        // Room that is given back is no sign that there is none.
        if !self.divided && !matches!(want, Want::Room | Want::Memory) {
            self.divide();
        }
        let coming = match want {
            Want::Planned(page) => Some(self.class_of(page.segment)),
            _ => self.coming,
        };
        let excess = |part: &Part, class: usize| {
            i64::from(part.resident) + i64::from(coming == Some(class)) - i64::from(part.share)
        };
        let mut order: [usize; CLASSES] = std::array::from_fn(|class| class);
        order.sort_unstable_by_key(|class| -excess(&self.parts[*class], *class));
        let within = coming.is_none_or(|class| excess(&self.parts[class], class) <= 0);
        let mut stopped = false;
        for class in order {
            let beyond = excess(&self.parts[class], class) > 0;
            // A fill ahead may take what another class has beyond its share, if its own class stays within its share: or two
            // plans could take the same frame from each other for ever. Of what is within a share, only the class itself can
            // say whether it is worth less than the page that is to come.
            let want = match want {
                Want::Planned(_) | Want::Hint if coming != Some(class) && beyond && within => Want::Demand,
                Want::Planned(_) | Want::Hint if coming != Some(class) => continue,
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
        None
    }

    fn declare(&mut self, order: &[PageId], cyclic: bool) {
        for class in 0..CLASSES {
            let own: Vec<PageId> = order.iter().copied().filter(|page| self.class_of(page.segment) == class).collect();
            if own.is_empty() == self.parts[class].planned {
                let kind = if own.is_empty() { policy_of(SegmentClass::ALL[class]) } else { PolicyKind::Plan };
                self.swap(class, kind);
            }
            self.parts[class].planned = !own.is_empty();
            self.parts[class].policy.declare(&own, cyclic);
        }
    }

    fn has_plan(&self) -> bool {
        self.parts.iter().any(|part| part.policy.has_plan())
    }

    fn next_fill(&mut self, present: &dyn Fn(PageId) -> bool) -> Option<PageId> {
        self.parts.iter_mut().find_map(|part| part.policy.next_fill(present))
    }

    fn filling(&mut self, page: PageId) {
        let class = self.class_of(page.segment);
        self.parts[class].policy.filling(page);
    }

    fn worth_host(&self, page: PageId) -> bool {
        self.parts[self.class_of(page.segment)].policy.worth_host(page)
    }

    fn host_victim(&self, candidate: PageId, incoming: PageId) -> bool {
        let class = self.class_of(incoming.segment);
        class != self.class_of(candidate.segment) || self.parts[class].policy.host_victim(candidate, incoming)
    }

    fn tracked(&self) -> Vec<PageId> {
        self.parts.iter().flat_map(|part| part.policy.tracked()).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use std::collections::BTreeSet;

    use super::*;

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
            let mut caches = [PolicyKind::Shares, policy_of(class)].map(|kind| BareCache::new(kind.build(), 40));
            caches.iter_mut().for_each(|cache| cache.segment(TABLE, class, 300));
            let mut hits = 0;
            for n in 0..20_000 {
                // Some in demand, and sweeps.
                let number = if n % 3 == 0 { n / 3 % 60 } else { scattered(n) % (1 + scattered(n / 7) % 300) };
                let [shared, own] = caches.each_mut().map(|cache| cache.used(page(TABLE, number)).unwrap());
                assert_eq!(shared, own, "{class:?}, use {n}");
                hits += u32::from(own);
            }
            assert!(hits > 1000, "{class:?}: {hits}");
        }
    }

    /// A sweep over `swept` pages beside as many uses of a table, of which none comes twice: hits of the last sweeps.
    fn swept_hits(mut cache: BareCache, class: SegmentClass, swept: u32, sweeps: u32) -> f64 {
        let pages = swept * sweeps;
        cache.segment(WEIGHTS, SegmentClass::Weights, swept);
        cache.segment(TABLE, class, pages);
        let (mut hits, mut uses) = (0, 0);
        for sweep in 0..sweeps {
            for index in 0..swept {
                let hit = cache.used(page(WEIGHTS, index)).unwrap();
                cache.used(page(TABLE, sweep * swept + index)).unwrap();
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
    fn shares_are_all_frames_whatever_changes() {
        let mut policy = SharesPolicy::default();
        let sum = |policy: &SharesPolicy| policy.parts.iter().map(|part| part.share).sum::<u32>();
        policy.resize(50, 0, 0);
        for (segment, class) in [(WEIGHTS, SegmentClass::Weights), (TABLE, SegmentClass::KeysAndValues)] {
            policy.class(segment, class);
            policy.segment(segment, 60);
        }
        for n in 0..50 {
            policy.accessed(page(WEIGHTS, n));
            policy.inserted(page(WEIGHTS, n));
        }
        assert_eq!(sum(&policy), 0, "there was no need to divide");
        policy.accessed(page(TABLE, 0));
        let gone = policy.victim(Want::Demand, &mut |_| Take::Yes).unwrap();
        assert_eq!(gone.segment, WEIGHTS, "it has all there is");
        policy.removed(gone);
        policy.inserted(page(TABLE, 0));
        for frames in [50, 7, 1, 333, 20_000, 50] {
            policy.resize(frames, 0, 0);
            assert_eq!(sum(&policy), frames);
        }
        // A class that comes later, and one that goes.
        policy.class(SegmentId(1), SegmentClass::Optimizer);
        policy.segment(SegmentId(1), 10);
        assert!(policy.parts[SegmentClass::Optimizer as usize].small.is_some());
        for page in policy.tracked().into_iter().filter(|page| page.segment == WEIGHTS) {
            policy.removed(page);
        }
        policy.forget(WEIGHTS);
        policy.forget(SegmentId(1));
        assert!(policy.parts.iter().all(|part| part.small.is_none()), "one class has nobody to share with");
        assert_eq!(policy.tracked(), [page(TABLE, 0)]);
    }

    #[test]
    fn a_declared_order_is_its_classes_own() {
        let mut policy = SharesPolicy::default();
        policy.resize(4, 0, 2);
        for (segment, class) in [(WEIGHTS, SegmentClass::Weights), (TABLE, SegmentClass::Other)] {
            policy.class(segment, class);
            policy.segment(segment, 8);
        }
        for n in [0, 1] {
            policy.accessed(page(WEIGHTS, n));
            policy.inserted(page(WEIGHTS, n));
            policy.inserted(page(TABLE, n));
        }
        let before: BTreeSet<PageId> = policy.tracked().into_iter().collect();
        let order: Vec<PageId> = (0..8).map(|n| page(WEIGHTS, n)).collect();
        policy.declare(&order, true);
        assert!(policy.has_plan() && policy.parts[0].planned && !policy.parts[SegmentClass::Other as usize].planned);
        assert_eq!(policy.tracked().into_iter().collect::<BTreeSet<_>>(), before);
        let next = policy.next_fill(&|page| before.contains(&page)).unwrap();
        assert_eq!(next.segment, WEIGHTS);
        // The table is at its share, and a fill ahead takes nothing of it.
        policy.divide();
        let mut offered = Vec::new();
        policy.victim(Want::Planned(next), &mut |page| {
            offered.push(page.segment);
            Take::Skip
        });
        assert!(!offered.contains(&TABLE), "{offered:?}");
        policy.declare(&[], false);
        assert!(!policy.has_plan() && !policy.parts[0].planned);
        assert_eq!(policy.tracked().into_iter().collect::<BTreeSet<_>>(), before);
    }
}
