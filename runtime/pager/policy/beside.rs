//! Pages that no followed plan names, while plans decide what leaves: how many frames they have, and which of them go.
//!
//! At first they have none of their own: of a plan's pages it is known that they are used again. Frames move to them
//! once they have shown that they would have had more hits with these frames than the plans lose: see
//! [`division`](super::division). While they have frames of their own, they leave as by policy [`auto`](super::auto).

use super::auto::{AutoPolicy, Learned};
use super::division::{Division, Gift, Holding};
use super::kv::KvPolicy;
use super::lirs::LirsPolicy;
use super::outside::Outside;
use super::{Policy, Take, Want};
use crate::bits::Bits;
use crate::ids::{PageId, SegmentClass, SegmentId};
use crate::numbers::PageNumbers;
use crate::order::Order;
use crate::steps::step;

/// Up to this many pages may all be in the sample; of more pages, at most twice as many are. Any page may be on either
/// side, so each is in two tables.
const SAMPLED_PAGES: u64 = 1 << 10;
/// The sides: pages that followed plans name, and the others.
pub(super) const NAMED: usize = 0;
pub(super) const UNNAMED: usize = 1;

/// Sizes that the policy of the unnamed pages is told.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) frames: u32,
    pub(super) unit: u32,
}

/// See the [module documentation](self).
#[derive(Debug)]
pub(super) struct Beside {
    division: Division<2>,
    /// Frames for unnamed pages.
    room: u32,
    /// Frames that each side has at least.
    floors: [u32; 2],
    sizes: Sizes,
    /// Orders the resident unnamed pages while they have room.
    policy: Option<Box<AutoPolicy>>,
    /// The numbers of the pages that `policy` orders.
    ordered: Bits,
    learned: Option<Learned>,
}

/// The policy of a side's small caches. They show what frames are worth to it, not which pages stay.
fn model_of(side: usize) -> Box<dyn Policy> {
    match side {
        // Swept pages have hits with a part of their frames, as plans have, and it need not be told the order.
        NAMED => Box::<LirsPolicy>::default(),
        _ => Box::<KvPolicy>::default(),
    }
}

impl Beside {
    pub(super) fn new(sizes: Sizes, numbers: &PageNumbers) -> Self {
        let division = Division::new(SAMPLED_PAGES);
        let (policy, ordered, learned) = (None, Bits::default(), None);
        let mut this = Self { division, room: 0, floors: [0; 2], sizes, policy, ordered, learned };
        this.fit(numbers);
        this
    }

    /// Each side has so many frames at least. Returns whether frames have moved.
    pub(super) fn keep(&mut self, floors: [u32; 2]) -> bool {
        self.floors = floors;
        let before = self.room;
        self.bound();
        self.resized();
        self.room != before
    }

    /// Sees to it that both sides have their least; where there are too few frames, that of the unnamed comes first.
    fn bound(&mut self) {
        let most = self.sizes.frames.saturating_sub(self.floors[NAMED]);
        self.room = self.room.min(most).max(self.floors[UNNAMED]).min(self.sizes.frames);
    }

    fn fit(&mut self, numbers: &PageNumbers) {
        self.division.fit(self.sizes.frames, numbers.end() as u64);
        let all = numbers.segments().map(|(segment, pages)| (segment, SegmentClass::Other, pages));
        [NAMED, UNNAMED].into_iter().for_each(|side| self.division.watch(side, all.clone(), || model_of(side)));
    }

    pub(super) fn room(&self) -> u32 {
        self.room
    }

    /// Offers unnamed pages, if they have room.
    pub(super) fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<Option<PageId>> {
        Some(self.policy.as_mut()?.victim(want, take))
    }

    /// An unnamed page is resident. Its number is this.
    pub(super) fn inserted(&mut self, page: PageId, number: u32) {
        if let Some(policy) = &mut self.policy {
            policy.inserted(page);
            self.ordered.reach(number as usize + 1);
            self.ordered.insert(number as usize);
        }
    }

    /// A page is no more resident.
    pub(super) fn removed(&mut self, page: PageId, number: u32) {
        if let Some(policy) = &mut self.policy {
            policy.removed(page);
            self.ordered.remove(number as usize);
        }
    }

    /// There are so many frames now. Room stays in proportion.
    pub(super) fn resize(&mut self, sizes: Sizes, numbers: &PageNumbers) {
        let before = std::mem::replace(&mut self.sizes, sizes).frames;
        if before != sizes.frames {
            self.room = (u64::from(self.room) * u64::from(sizes.frames) / u64::from(before.max(1))) as u32;
            self.division.clear();
            self.fit(numbers);
            self.bound();
        }
        self.resized();
    }

    fn resized(&mut self) {
        if self.room == 0
            && let Some(policy) = self.policy.take()
        {
            self.learned = Some(policy.learned());
        }
        if let Some(policy) = &mut self.policy {
            policy.resize(self.room.max(1), 0, 0);
            policy.unit(self.sizes.unit.min(self.room.max(1)));
        }
    }

    pub(super) fn segment(&mut self, segment: SegmentId, pages: u32, numbers: &PageNumbers) {
        for side in [NAMED, UNNAMED] {
            self.division.segment(side, segment, SegmentClass::Other, pages);
        }
        // More pages may need a smaller part in the sample.
        self.fit(numbers);
        if let Some(policy) = &mut self.policy {
            policy.segment(segment, pages);
        }
    }

    pub(super) fn forget(&mut self, segment: SegmentId) {
        [NAMED, UNNAMED].into_iter().for_each(|side| self.division.forget(side, segment));
        if let Some(policy) = &mut self.policy {
            policy.forget(segment);
        }
    }

    pub(super) fn chain(&mut self, pages: &[PageId]) {
        self.division.chain(UNNAMED, pages);
        if let Some(policy) = &mut self.policy {
            policy.chain(pages);
        }
    }

    pub(super) fn wrote(&mut self, side: usize, page: PageId) {
        self.division.wrote(side, page);
    }

    /// A page is used. Returns whether it is time to [judge](Self::judge).
    pub(super) fn used(&mut self, side: usize, page: PageId) -> bool {
        if side == UNNAMED
            && let Some(policy) = &mut self.policy
        {
            policy.accessed(page);
        }
        self.division.used(side, page)
    }

    /// Moves frames to the side that would have gained by them. Plans name so many of `pages`. Returns whether frames
    /// have moved.
    pub(super) fn judge(&mut self, planned: u64, pages: u64) -> bool {
        let holdings = [
            Holding { share: self.sizes.frames - self.room, least: self.floors[NAMED], pages: planned },
            Holding { share: self.room, least: self.floors[UNNAMED], pages: pages.saturating_sub(planned) },
        ];
        match self.division.judge(&holdings) {
            Some(Gift { from: NAMED, frames, .. }) => self.room += frames,
            Some(Gift { frames, .. }) => self.room -= frames,
            None => return false,
        }
        self.resized();
        true
    }

    /// The resident unnamed pages are those of this list now.
    pub(super) fn reconcile(&mut self, outside: &Outside, recency: &Order) {
        if self.room == 0 {
            return;
        }
        let numbers = recency.numbers();
        if self.policy.is_none() {
            let mut policy = Box::new(self.learned.take().map_or_else(AutoPolicy::default, AutoPolicy::after));
            numbers.segments().for_each(|(segment, pages)| policy.segment(segment, pages));
            self.policy = Some(policy);
            self.ordered = Bits::new(numbers.end());
            self.resized();
            // In order of use.
            let listed = |page: &PageId| numbers.number(*page).filter(|number| outside.contains(*number));
            recency.pages().for_each(|page| listed(&page).into_iter().for_each(|number| self.comes(page, number)));
            return;
        }
        step(self.ordered.len() + outside.len());
        let mut next = self.ordered.first_from(0);
        while let Some(number) = next {
            if !outside.contains(number as u32) {
                self.removed(numbers.page(number as u32), number as u32);
            }
            next = self.ordered.first_from(number + 1);
        }
        for number in outside.numbers() {
            if !self.ordered.contains(number as usize) {
                self.comes(numbers.page(number), number);
            }
        }
    }

    /// A resident page is unnamed from now on.
    fn comes(&mut self, page: PageId, number: u32) {
        if let Some(policy) = &mut self.policy {
            policy.accessed(page);
        }
        self.inserted(page, number);
    }

    pub(super) fn check(&self, outside: &Outside, numbers: &PageNumbers) -> Result<(), String> {
        let Some(policy) = &self.policy else { return Ok(()) };
        policy.check()?;
        let tracked = policy.tracked();
        let is_listed = |page: &PageId| numbers.number(*page).is_some_and(|number| outside.contains(number));
        match tracked.len() == outside.len() && tracked.iter().all(is_listed) {
            true => Ok(()),
            false => Err(format!("{} pages are outside of plans, but auto knows others", outside.len())),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::super::PolicyKind;
    use super::super::bare::BareCache;
    use super::*;
    use crate::ids::PageIndex;

    const WEIGHTS: SegmentId = SegmentId(3);
    const KEYS: SegmentId = SegmentId(0);

    fn page(segment: SegmentId, index: u32) -> PageId {
        PageId { segment, index: PageIndex(index) }
    }

    /// A cache of 64 frames: 60 pages of weights, whose order is declared or not, and 40 of another class.
    fn cache(class: SegmentClass, declared: bool) -> BareCache {
        let mut cache = BareCache::new(PolicyKind::Plan.build(), 64);
        cache.segment(WEIGHTS, SegmentClass::Weights, 60);
        cache.segment(KEYS, class, 40);
        if declared {
            cache.declare(&(0..60).map(|n| page(WEIGHTS, n)).collect::<Vec<_>>());
        }
        cache
    }

    /// The misses of the last of 60 passes, each of which uses all weights, with `swept` pages of the other class swept
    /// `times` times in the middle of it.
    fn misses(cache: &mut BareCache, swept: u32, times: u32) -> u32 {
        let weights = |range: std::ops::Range<u32>| range.map(|n| page(WEIGHTS, n));
        let mut missed = 0;
        for _ in 0..60 {
            let others = (0..swept * times).map(|n| page(KEYS, n % swept));
            let pass = weights(0..30).chain(others).chain(weights(30..60));
            missed = pass.map(|used| u32::from(!cache.used(used, false).unwrap())).sum();
        }
        missed
    }

    /// While a plan decided what leaves, pages that it does not name went first, however often they were used.
    #[test]
    fn regression_pages_that_no_plan_names_get_frames_that_they_are_worth() {
        for declared in [true, false] {
            let mut cache = cache(SegmentClass::KeysAndValues, declared);
            for _ in 0..2 {
                let long = misses(&mut cache, 40, 8);
                assert!(long <= 50, "declared {declared}: {long} misses, of 36 at least");
                let short = misses(&mut cache, 2, 2);
                assert!(short <= 4, "declared {declared}: {short} misses where all fits");
            }
        }
    }

    /// A floor is there from the first pass on, and for as long as it is set.
    #[test]
    fn kept_frames_are_there_at_once_and_go_back_when_they_are_not_kept() {
        for declared in [true, false] {
            let mut cache = cache(SegmentClass::KeysAndValues, declared);
            misses(&mut cache, 0, 0);
            let class = SegmentClass::KeysAndValues;
            assert!(cache.floors(&[(class, 20)]));
            let pass = |cache: &mut BareCache| {
                let keys = (0..20).filter(|n| !cache.used(page(KEYS, *n), false).unwrap()).count();
                (keys, (0..60).filter(|n| !cache.used(page(WEIGHTS, *n), false).unwrap()).count())
            };
            pass(&mut cache);
            for _ in 0..3 {
                let (keys, weights) = pass(&mut cache);
                assert!(keys == 0 && weights <= 24, "declared {declared}: {keys} and {weights} misses, of 0 and 16");
            }
            assert!(cache.floors(&[(class, 0)]));
            misses(&mut cache, 0, 0);
            assert_eq!(misses(&mut cache, 0, 0), 0, "declared {declared}");
        }
    }

    /// A plan's pages stay where others are worth less.
    #[test]
    fn pages_that_are_used_once_take_no_frames_from_a_plan() {
        let mut cache = cache(SegmentClass::KeysAndValues, true);
        cache.segment(KEYS, SegmentClass::KeysAndValues, 60 * 30);
        let mut missed = 0;
        for pass in 0..60 {
            missed = 0;
            for n in 0..60 {
                missed += u32::from(!cache.used(page(WEIGHTS, n), false).unwrap());
                if n % 2 == 0 {
                    cache.used(page(KEYS, pass * 30 + n / 2), false).unwrap();
                }
            }
        }
        assert!(missed <= 2, "{missed} of a plan that fits");
    }

    /// A walker of a declared order lost its place among keys and values, and its plan was left.
    #[test]
    fn regression_keys_and_values_do_not_lead_a_walker_astray() {
        let mut policy = PolicyKind::Plan.build();
        policy.resize(64, 0, 0);
        policy.class(WEIGHTS, SegmentClass::Weights);
        policy.segment(WEIGHTS, 60);
        policy.class(KEYS, SegmentClass::KeysAndValues);
        policy.segment(KEYS, 40);
        policy.declare(&(0..60).map(|n| page(WEIGHTS, n)).collect::<Vec<_>>(), true);
        (0..30).for_each(|n| policy.accessed(page(WEIGHTS, n)));
        (0..1000).for_each(|n| policy.accessed(page(KEYS, n % 40)));
        assert_eq!(policy.places().iter().map(|place| place.next).collect::<Vec<_>>(), [30]);
    }
}
