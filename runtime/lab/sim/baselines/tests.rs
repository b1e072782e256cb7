//! Compares each baseline with a slow version written from its paper. What the pager may expect of all policies is
//! checked in `runtime/pager/tests/pager/policies.rs`, and what they cost in `cost.rs` beside it.

use std::collections::{BTreeSet, HashMap};

use proptest::prelude::*;

use super::Baseline;
use crate::ids::{PageId, PageIndex, SegmentId};
use crate::pager::policy::{Policy, Take, Want};
use crate::sim::AnyPolicy;

fn page(number: u32) -> PageId {
    PageId { segment: SegmentId::new(0), index: PageIndex::new(number) }
}

/// A cache that brings in missing pages, written so that it can be seen to be right. Returns the page that it evicts
/// for a use.
trait Model {
    fn has(&self, page: u32) -> bool;
    /// The page was resident.
    fn hit(&mut self, page: u32);
    /// The page was not resident, and is now.
    fn miss(&mut self, page: u32) -> Option<u32>;
}

/// Most recently used, and first in first out: oldest first.
struct Line {
    frames: usize,
    line: Vec<u32>,
    newest_goes: bool,
}

impl Model for Line {
    fn has(&self, page: u32) -> bool {
        self.line.contains(&page)
    }
    fn hit(&mut self, page: u32) {
        if self.newest_goes {
            self.line.retain(|other| *other != page);
            self.line.push(page);
        }
    }
    fn miss(&mut self, page: u32) -> Option<u32> {
        let full = self.line.len() == self.frames;
        let victim = full.then(|| self.line.remove(if self.newest_goes { self.line.len() - 1 } else { 0 }));
        self.line.push(page);
        victim
    }
}

/// Frames in a ring, and a hand.
struct Ring {
    frames: usize,
    ring: Vec<(u32, bool)>,
    hand: usize,
}

impl Model for Ring {
    fn has(&self, page: u32) -> bool {
        self.ring.iter().any(|(other, _)| *other == page)
    }
    fn hit(&mut self, page: u32) {
        self.ring.iter_mut().filter(|(other, _)| *other == page).for_each(|(_, used)| *used = true);
    }
    fn miss(&mut self, page: u32) -> Option<u32> {
        if self.ring.len() < self.frames {
            self.ring.push((page, false));
            return None;
        }
        while self.ring[self.hand].1 {
            self.ring[self.hand].1 = false;
            self.hand = (self.hand + 1) % self.frames;
        }
        let (victim, _) = std::mem::replace(&mut self.ring[self.hand], (page, false));
        self.hand = (self.hand + 1) % self.frames;
        Some(victim)
    }
}

/// The algorithm of the NSDI paper; the newest page first.
struct SieveModel {
    frames: usize,
    queue: Vec<(u32, bool)>,
    hand: Option<u32>,
}

impl Model for SieveModel {
    fn has(&self, page: u32) -> bool {
        self.queue.iter().any(|(other, _)| *other == page)
    }
    fn hit(&mut self, page: u32) {
        self.queue.iter_mut().filter(|(other, _)| *other == page).for_each(|(_, visited)| *visited = true);
    }
    fn miss(&mut self, page: u32) -> Option<u32> {
        let mut victim = None;
        if self.queue.len() == self.frames {
            let tail = self.queue.len() - 1;
            let mut at =
                self.hand.and_then(|hand| self.queue.iter().position(|(page, _)| *page == hand)).unwrap_or(tail);
            while self.queue[at].1 {
                self.queue[at].1 = false;
                at = at.checked_sub(1).unwrap_or(tail);
            }
            self.hand = at.checked_sub(1).map(|before| self.queue[before].0);
            victim = Some(self.queue.remove(at).0);
        }
        self.queue.insert(0, (page, false));
        victim
    }
}

/// Each page's count, and since when the page has it.
struct LfuModel {
    frames: usize,
    pages: Vec<(u32, u32, u64)>,
    now: u64,
    uses: usize,
}

impl LfuModel {
    fn used(&mut self) {
        self.now += 1;
        self.uses += 1;
        if self.uses == (10 * self.frames).max(4096) {
            self.uses = 0;
            self.pages.sort_by_key(|(_, count, since)| (*count, *since));
            for (_, count, since) in &mut self.pages {
                *count /= 2;
                *since = self.now;
                self.now += 1;
            }
        }
    }
}

impl Model for LfuModel {
    fn has(&self, page: u32) -> bool {
        self.pages.iter().any(|(other, ..)| *other == page)
    }
    fn hit(&mut self, page: u32) {
        self.used();
        for (_, count, since) in self.pages.iter_mut().filter(|(other, ..)| *other == page) {
            (*count, *since) = ((*count + 1).min(63), self.now);
        }
    }
    fn miss(&mut self, page: u32) -> Option<u32> {
        self.used();
        let mut victim = None;
        if self.pages.len() == self.frames {
            victim = self.pages.iter().min_by_key(|(_, count, since)| (*count, *since)).map(|(page, ..)| *page);
            self.pages.retain(|(page, ..)| Some(*page) != victim);
        }
        self.pages.push((page, 1, self.now));
        victim
    }
}

fn model(kind: Baseline, frames: usize) -> Box<dyn Model> {
    match kind {
        Baseline::Fifo => Box::new(Line { frames, line: Vec::new(), newest_goes: false }),
        Baseline::Mru => Box::new(Line { frames, line: Vec::new(), newest_goes: true }),
        Baseline::Clock => Box::new(Ring { frames, ring: Vec::new(), hand: 0 }),
        Baseline::Sieve => Box::new(SieveModel { frames, queue: Vec::new(), hand: None }),
        Baseline::Lfu => Box::new(LfuModel { frames, pages: Vec::new(), now: 0, uses: 0 }),
        Baseline::Random => unreachable!("a random page has no order"),
    }
}

fn demand(policy: &mut dyn Policy) -> Option<u32> {
    policy.victim(Want::Demand, &mut |_| Take::Yes).map(|page| page.index.get())
}

fn compare(kind: Baseline, frames: usize, uses: &[u32]) -> Result<(), TestCaseError> {
    let mut model = model(kind, frames);
    let mut policy = kind.build();
    policy.resize(frames as u32, 0, 0);
    policy.segment(SegmentId::new(0), uses.iter().max().map_or(1, |last| last + 1));
    let mut resident = BTreeSet::new();
    for (at, number) in uses.iter().copied().enumerate() {
        policy.accessed(page(number));
        prop_assert_eq!(resident.contains(&number), model.has(number), "{} at use {} of page {}", kind, at, number);
        if resident.contains(&number) {
            model.hit(number);
            continue;
        }
        let mut victim = None;
        if resident.len() == frames {
            victim = demand(&mut *policy);
            if let Some(victim) = victim {
                prop_assert!(resident.remove(&victim), "{} at use {}: {} is not there", kind, at, victim);
                policy.removed(page(victim));
            }
        }
        policy.inserted(page(number));
        resident.insert(number);
        prop_assert_eq!(victim, model.miss(number), "{} at use {} of page {}", kind, at, number);
    }
    Ok(())
}

/// Few pages often, all pages now and then, and runs.
fn trace(pages: u32, len: usize) -> impl Strategy<Value = Vec<u32>> {
    let few = (pages / 8).max(1);
    let one = prop_oneof![4 => 0..few, 3 => 0..pages, 1 => few..pages.max(few + 1)];
    let part = prop_oneof![
        6 => one.prop_map(|page| vec![page]),
        1 => (0..pages, 1..pages.max(2) / 2 + 2)
            .prop_map(move |(from, run)| (from..from + run).map(|n| n % pages).collect()),
    ];
    prop::collection::vec(part, 0..len).prop_map(|parts| parts.concat())
}

/// Tests each policy by itself, so that every wrong policy is reported.
macro_rules! victims_are_those_of_the_paper {
    ($($name:ident $kind:ident)*) => {$(
        mod $name {
            use super::*;

            proptest! {
                #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

                #[test]
                fn with_few_frames(
                    (frames, uses) in (1usize..24, 2u32..60)
                        .prop_flat_map(|(frames, pages)| (Just(frames), trace(pages, 300)))
                ) {
                    compare(Baseline::$kind, frames, &uses)?;
                }
            }

            proptest! {
                #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(16) })]

                /// Enough frames that a hundredth is more than one page, and for ageing.
                #[test]
                fn with_many_frames(
                    (frames, uses) in (150usize..420)
                        .prop_flat_map(|frames| (Just(frames), trace(3 * frames as u32, 700)))
                ) {
                    compare(Baseline::$kind, frames, &uses)?;
                }
            }
        }
    )*};
}

victims_are_those_of_the_paper! {
    fifo Fifo
    clock Clock
    lfu Lfu
    sieve Sieve
    mru Mru
}

#[test]
fn random_takes_every_page_about_as_often() {
    let mut policy = Baseline::Random.build();
    policy.segment(SegmentId::new(0), 10);
    (0..10).for_each(|number| policy.inserted(page(number)));
    let mut taken: HashMap<u32, u32> = HashMap::new();
    for _ in 0..20_000 {
        let victim = demand(&mut *policy).unwrap();
        *taken.entry(victim).or_default() += 1;
        policy.removed(page(victim));
        policy.inserted(page(victim));
    }
    // 2000 each; the standard deviation is 42.
    assert!((0..10).all(|number| (1_800..2_200).contains(&taken[&number])), "{taken:?}");
}

#[test]
fn lfu_counts_to_63_and_forgets_by_halves() {
    let mut policy = Baseline::Lfu.build();
    policy.segment(SegmentId::new(0), 2);
    let used = |policy: &mut dyn Policy, number, times| (0..times).for_each(|_| policy.accessed(page(number)));
    let coming = |policy: &mut dyn Policy, number, times| {
        used(policy, number, 1);
        policy.inserted(page(number));
        used(policy, number, times - 1);
    };
    coming(&mut *policy, 0, 63);
    coming(&mut *policy, 1, 62);
    let goes = |policy: &mut dyn Policy| policy.victim(Want::Memory, &mut |_| Take::Yes).map(|page| page.index.get());
    assert_eq!(goes(&mut *policy), Some(1), "62 uses are fewer than 63");
    used(&mut *policy, 1, 2);
    assert_eq!(goes(&mut *policy), Some(0), "64 uses count as 63, and the other has had it for longer");
    used(&mut *policy, 1, 4096);
    for _ in 0..6 {
        // Six halvings leave nothing of any count; only later uses count.
        used(&mut *policy, 1, 4096);
    }
    policy.removed(page(1));
    coming(&mut *policy, 1, 1);
    assert_eq!(goes(&mut *policy), Some(0), "what was used often once does not stay for ever");
}

/// A page that was filled ahead and then used was used once.
#[test]
fn a_fill_ahead_and_its_use_are_one_use() {
    for kind in [Baseline::Clock, Baseline::Sieve, Baseline::Lfu] {
        let mut policy = kind.build();
        policy.resize(3, 0, 0);
        policy.segment(SegmentId::new(0), 4);
        policy.inserted(page(0));
        policy.accessed(page(0));
        for number in [1, 2] {
            policy.accessed(page(number));
            policy.inserted(page(number));
        }
        policy.accessed(page(2));
        assert_eq!(demand(&mut *policy), Some(0), "{kind}: the oldest of those used once");
    }
}

/// Not every search begins with pinned pages.
#[test]
fn pages_that_cannot_be_taken_are_not_offered_first_again() {
    const PINNED: u32 = 500;
    // If the first to go is the page used last, or is chosen by count, pinned pages are offered again.
    for kind in [Baseline::Fifo, Baseline::Clock, Baseline::Sieve] {
        let mut policy = kind.build();
        policy.resize(1_000, 0, 0);
        policy.segment(SegmentId::new(0), 2_000);
        for number in 0..1_000 {
            policy.accessed(page(number));
            policy.inserted(page(number));
        }
        let mut offers = 0;
        for number in 1_000..1_400 {
            policy.accessed(page(number));
            let victim = policy.victim(Want::Demand, &mut |page| {
                offers += 1;
                if page.index.get() < PINNED { Take::Skip } else { Take::Yes }
            });
            policy.removed(victim.unwrap());
            policy.inserted(page(number));
        }
        assert!(offers <= 400 + 2 * PINNED, "{kind}: {offers} offers");
    }
}

#[test]
fn names_are_those_of_the_policies() {
    for kind in Baseline::ALL {
        assert_eq!((kind.build().name(), AnyPolicy::find(kind.name(), &[]).unwrap()), (kind.name(), kind.into()));
    }
}
