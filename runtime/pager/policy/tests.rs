//! Compares every policy with a slow version written from its paper. What the pager may expect of all policies is
//! checked in `tests/pager/policies.rs`.

use std::collections::{BTreeSet, HashMap};

use proptest::prelude::*;

use super::kv::{Gap, Kinds, Worth, class_of, log2};
use super::sketch::Sketch;
use super::{Policy, PolicyKind, Take, Want};
use crate::ids::{PageId, PageIndex, SegmentId};

fn page(number: u32) -> PageId {
    PageId { segment: SegmentId(0), index: PageIndex(number) }
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

fn take(list: &mut Vec<u32>, page: u32) -> bool {
    let at = list.iter().position(|other| *other == page);
    at.map(|at| list.remove(at)).is_some()
}

/// Least recently used: oldest first.
struct Line {
    frames: usize,
    line: Vec<u32>,
}

impl Model for Line {
    fn has(&self, page: u32) -> bool {
        self.line.contains(&page)
    }
    fn hit(&mut self, page: u32) {
        take(&mut self.line, page);
        self.line.push(page);
    }
    fn miss(&mut self, page: u32) -> Option<u32> {
        let victim = (self.line.len() == self.frames).then(|| self.line.remove(0));
        self.line.push(page);
        victim
    }
}

/// The paper's full version; oldest first.
#[derive(Default)]
struct TwoQModel {
    frames: usize,
    a1in: Vec<u32>,
    a1out: Vec<u32>,
    am: Vec<u32>,
}

impl Model for TwoQModel {
    fn has(&self, page: u32) -> bool {
        self.a1in.contains(&page) || self.am.contains(&page)
    }
    fn hit(&mut self, page: u32) {
        if take(&mut self.am, page) {
            self.am.push(page);
        }
    }
    fn miss(&mut self, page: u32) -> Option<u32> {
        let (k_in, k_out) = ((self.frames / 4).max(1), (self.frames / 2).max(1));
        let remembered = take(&mut self.a1out, page);
        let mut victim = None;
        if self.a1in.len() + self.am.len() == self.frames {
            if self.a1in.len() > k_in || self.am.is_empty() {
                let old = self.a1in.remove(0);
                self.a1out.push(old);
                if self.a1out.len() > k_out {
                    self.a1out.remove(0);
                }
                victim = Some(old);
            } else {
                victim = Some(self.am.remove(0));
            }
        }
        if remembered {
            self.am.push(page)
        } else {
            self.a1in.push(page)
        }
        victim
    }
}

/// The paper's algorithm with the two changes that the policy's documentation names; oldest first.
#[derive(Default)]
struct S3FifoModel {
    frames: usize,
    small: Vec<(u32, u32)>,
    main: Vec<(u32, u32)>,
    ghost: Vec<u32>,
    evicted: bool,
}

impl S3FifoModel {
    fn share(&self) -> usize {
        (self.frames / 10).max(1)
    }
    fn evict_small(&mut self) -> Option<u32> {
        while !self.small.is_empty() {
            let (page, uses) = self.small.remove(0);
            if uses > 1 {
                self.main.push((page, 0));
                continue;
            }
            self.ghost.push(page);
            if self.ghost.len() > self.frames * 9 / 10 {
                self.ghost.remove(0);
            }
            return Some(page);
        }
        None
    }
    fn evict_main(&mut self) -> Option<u32> {
        while !self.main.is_empty() {
            let (page, uses) = self.main.remove(0);
            if uses == 0 {
                return Some(page);
            }
            self.main.push((page, uses.min(3) - 1));
        }
        None
    }
}

impl Model for S3FifoModel {
    fn has(&self, page: u32) -> bool {
        self.small.iter().chain(&self.main).any(|(other, _)| *other == page)
    }
    fn hit(&mut self, page: u32) {
        for (_, uses) in self.small.iter_mut().chain(&mut self.main).filter(|(other, _)| *other == page) {
            *uses += 1;
        }
    }
    fn miss(&mut self, page: u32) -> Option<u32> {
        let remembered = take(&mut self.ghost, page);
        let mut victim = None;
        if self.small.len() + self.main.len() == self.frames {
            self.evicted = true;
            let from_main = self.main.len() > self.frames - self.share();
            victim = if from_main { None } else { self.evict_small() };
            victim = victim.or_else(|| self.evict_main());
        }
        let spare = !self.evicted && self.small.len() >= self.share();
        if remembered || spare {
            self.main.push((page, 0))
        } else {
            self.small.push((page, 0))
        }
        victim
    }
}

/// The four cases of the paper; least recently used first.
#[derive(Default)]
struct ArcModel {
    c: usize,
    p: f64,
    t1: Vec<u32>,
    t2: Vec<u32>,
    b1: Vec<u32>,
    b2: Vec<u32>,
}

impl ArcModel {
    fn replace(&mut self, page: u32) -> u32 {
        let t1 = self.t1.len() as f64;
        if !self.t1.is_empty() && (t1 > self.p || self.b2.contains(&page) && t1 == self.p) || self.t2.is_empty() {
            let old = self.t1.remove(0);
            self.b1.push(old);
            old
        } else {
            let old = self.t2.remove(0);
            self.b2.push(old);
            old
        }
    }
    fn full(&self) -> bool {
        self.t1.len() + self.t2.len() == self.c
    }
}

impl Model for ArcModel {
    fn has(&self, page: u32) -> bool {
        self.t1.contains(&page) || self.t2.contains(&page)
    }
    fn hit(&mut self, page: u32) {
        let _ = take(&mut self.t1, page) || take(&mut self.t2, page);
        self.t2.push(page);
    }
    fn miss(&mut self, page: u32) -> Option<u32> {
        let (b1, b2) = (self.b1.len() as f64, self.b2.len() as f64);
        if self.b1.contains(&page) || self.b2.contains(&page) {
            if self.b1.contains(&page) {
                let delta = if b1 >= b2 { 1.0 } else { b2 / b1 };
                self.p = (self.p + delta).min(self.c as f64);
            } else {
                let delta = if b2 >= b1 { 1.0 } else { b1 / b2 };
                self.p = (self.p - delta).max(0.0);
            }
            // Here pages only leave for others, so a page with ghosts has a full cache.
            let victim = self.replace(page);
            let _ = take(&mut self.b1, page) || take(&mut self.b2, page);
            self.t2.push(page);
            return Some(victim);
        }
        let (l1, l2) = (self.t1.len() + self.b1.len(), self.t2.len() + self.b2.len());
        let mut victim = None;
        if l1 == self.c {
            if self.t1.len() < self.c {
                self.b1.remove(0);
                victim = Some(self.replace(page));
            } else {
                victim = Some(self.t1.remove(0));
            }
        } else if l1 + l2 >= self.c {
            if l1 + l2 == 2 * self.c {
                self.b2.remove(0);
            }
            victim = self.full().then(|| self.replace(page));
        }
        self.t1.push(page);
        victim
    }
}

/// Stack and queue as in the paper; the bottom and the front first. `left` has the pages that have left and are in the
/// stack, in the order in which they left.
#[derive(Default)]
struct LirsModel {
    frames: usize,
    stack: Vec<u32>,
    queue: Vec<u32>,
    lir: BTreeSet<u32>,
    left: Vec<u32>,
}

impl LirsModel {
    fn lir_max(&self) -> usize {
        self.frames - (self.frames / 100).max(1)
    }
    fn prune(&mut self) {
        while self.stack.first().is_some_and(|bottom| !self.lir.contains(bottom)) {
            let bottom = self.stack.remove(0);
            take(&mut self.left, bottom);
        }
    }
    fn make_lir(&mut self, page: u32) {
        take(&mut self.stack, page);
        self.stack.push(page);
        self.lir.insert(page);
        if self.lir.len() > self.lir_max() {
            let at = self.stack.iter().position(|page| self.lir.contains(page)).unwrap();
            let bottom = self.stack.remove(at);
            self.lir.remove(&bottom);
            self.queue.push(bottom);
        }
        self.prune();
    }
    fn limit(&mut self) {
        while self.stack.len() > 2 * self.frames && !self.left.is_empty() {
            let oldest = self.left.remove(0);
            take(&mut self.stack, oldest);
        }
    }
}

impl Model for LirsModel {
    fn has(&self, page: u32) -> bool {
        self.lir.contains(&page) || self.queue.contains(&page)
    }
    fn hit(&mut self, page: u32) {
        let stacked = take(&mut self.stack, page);
        self.stack.push(page);
        if !self.lir.contains(&page) {
            take(&mut self.queue, page);
            if stacked { self.make_lir(page) } else { self.queue.push(page) }
        }
        self.prune();
        self.limit();
    }
    fn miss(&mut self, page: u32) -> Option<u32> {
        let stacked = take(&mut self.stack, page);
        take(&mut self.left, page);
        let mut victim = None;
        if self.lir.len() + self.queue.len() == self.frames {
            let front = self.queue.remove(0);
            if self.stack.contains(&front) {
                self.left.push(front);
            }
            victim = Some(front);
        }
        if stacked || self.lir.len() < self.lir_max() {
            self.make_lir(page);
        } else {
            self.stack.push(page);
            self.queue.push(page);
            self.prune();
        }
        self.limit();
        victim
    }
}

/// Window and segments, least recently used first. Asks the policy's sketch how often pages were used; the sketch has
/// its own tests.
struct WTinyLfuModel {
    frames: usize,
    window: Vec<u32>,
    probation: Vec<u32>,
    protected: Vec<u32>,
    sketch: Sketch,
}

impl WTinyLfuModel {
    fn window_max(&self) -> usize {
        (self.frames / 100).max(1)
    }
}

impl Model for WTinyLfuModel {
    fn has(&self, page: u32) -> bool {
        [&self.window, &self.probation, &self.protected].iter().any(|list| list.contains(&page))
    }
    fn hit(&mut self, page: u32) {
        self.sketch.count(page);
        if take(&mut self.window, page) {
            self.window.push(page);
            return;
        }
        let _ = take(&mut self.probation, page) || take(&mut self.protected, page);
        self.protected.push(page);
        if self.protected.len() > (self.frames - self.window_max()) * 4 / 5 {
            let demoted = self.protected.remove(0);
            self.probation.push(demoted);
        }
    }
    fn miss(&mut self, page: u32) -> Option<u32> {
        self.sketch.count(page);
        let full = self.window.len() + self.probation.len() + self.protected.len() == self.frames;
        self.window.push(page);
        if self.window.len() <= self.window_max() {
            return None;
        }
        let candidate = self.window.remove(0);
        if !full {
            self.probation.push(candidate);
            return None;
        }
        let main = if self.probation.is_empty() { &mut self.protected } else { &mut self.probation };
        if main.is_empty() || self.sketch.estimate(candidate) <= self.sketch.estimate(main[0]) {
            return Some(candidate);
        }
        let victim = main.remove(0);
        self.probation.push(candidate);
        Some(victim)
    }
}

/// A page that was used.
#[derive(Clone, Default)]
struct KvPage {
    last: u64,
    count: u16,
    there: bool,
    class: usize,
    /// When it came to its class.
    since: u64,
    kind: Option<u8>,
    next: Option<u32>,
}

/// Every page ever used. Learns gaps and kinds of requests by the policy's code, which has its own tests.
struct KvModel {
    frames: usize,
    pages: HashMap<u32, KvPage>,
    now: u64,
    /// How many pages came to a class.
    came: u64,
    gap: Gap,
    kinds: Kinds,
    /// The request in progress, and whether its last page is new.
    chain: Option<(Vec<u32>, u8, i64, bool)>,
}

impl KvModel {
    fn new(frames: usize) -> Self {
        let gap = Gap::assume(frames as u64);
        Self { frames, pages: HashMap::new(), now: 0, came: 0, gap, kinds: Kinds::new(), chain: None }
    }
    fn comes_to(&mut self, page: u32, class: usize) {
        self.came += 1;
        self.pages.entry(page).and_modify(|known| (known.class, known.since) = (class, self.came));
    }
    fn chain(&mut self, chain: &[u32]) {
        let known = chain.iter().take_while(|page| self.pages.contains_key(page)).count();
        let kind = Kinds::of(chain.len(), known);
        let ends_new = chain.last().is_some_and(|page| !self.pages.contains_key(page));
        self.chain = Some((chain.to_vec(), kind, self.kinds.bonus(kind), ends_new));
        if known > 1 {
            self.gap.saw(self.now - self.pages[&chain[known - 1]].last);
        }
        for pair in chain[..known].windows(2).chain((known > 0).then(|| chain.get(known - 1..known + 1)).flatten()) {
            let Some(before) = self.pages.get(&pair[0]) else { continue };
            let mut left = before.next.filter(|next| *next != pair[1] && self.pages[next].count == before.count);
            while let Some(page) = left {
                if self.pages[&page].there && self.pages[&page].class > 0 {
                    self.comes_to(page, 0);
                }
                left = self.pages.get_mut(&page).and_then(|page| page.next.take());
            }
            self.pages.entry(pair[0]).and_modify(|page| page.next = Some(pair[1]));
        }
        if chain.iter().any(|page| !self.has(*page)) {
            for page in chain.iter().filter(|page| self.has(**page)).copied().collect::<Vec<_>>() {
                self.pages.entry(page).and_modify(|known| known.last = self.now);
                self.comes_to(page, self.pages[&page].class);
            }
        }
    }
    fn used(&mut self, page: u32) {
        self.now += 1;
        let before = self.pages.get(&page).cloned().unwrap_or_default();
        let mut known = KvPage { last: self.now, count: before.count + 1, ..before };
        let (mut bonus, mut first) = (0, false);
        match &self.chain {
            None if before.count > 0 => self.gap.saw(self.now - before.last),
            None => {}
            Some((chain, kind, worth, ends_new)) => {
                first = before.count == 0 && *ends_new && chain.last() == Some(&page);
                if before.count > 0 {
                    self.kinds.again(before.count, before.kind);
                }
                known.kind = Some(*kind).filter(|_| !first && chain[0] != page);
                self.kinds.used(known.count, known.kind);
                bonus = known.kind.map_or(0, |_| *worth);
                let at = chain.iter().position(|other| *other == page);
                known.next = at.and_then(|at| chain.get(at + 1)).copied().or(known.next);
            }
        }
        let class = if first { 0 } else { class_of(log2(known.count.into()) as i64 + bonus) };
        self.pages.insert(page, known);
        self.comes_to(page, class);
    }
}

impl Model for KvModel {
    fn has(&self, page: u32) -> bool {
        self.pages.get(&page).is_some_and(|page| page.there)
    }
    fn hit(&mut self, page: u32) {
        self.used(page);
    }
    fn miss(&mut self, page: u32) -> Option<u32> {
        self.used(page);
        let there = self.pages.iter().filter(|(_, known)| known.there);
        let full = there.clone().count() == self.frames;
        let worth = Worth::new(self.gap.uses());
        // The first class goes in its order; of the others, the page worth least, and among equals the oldest.
        let least = there.min_by_key(|(_, known)| match known.class {
            0 => (i64::MIN, 0, 0, known.since),
            class => (worth.of(class, (self.now - known.last) as u32), known.last, class, known.since),
        });
        let victim = least.map(|(page, _)| *page).filter(|_| full);
        if let Some(victim) = victim {
            self.pages.entry(victim).and_modify(|known| known.there = false);
        }
        self.pages.entry(page).and_modify(|known| known.there = true);
        victim
    }
}

fn model(kind: PolicyKind, frames: usize) -> Box<dyn Model> {
    match kind {
        PolicyKind::Lru => Box::new(Line { frames, line: Vec::new() }),
        PolicyKind::TwoQ => Box::new(TwoQModel { frames, ..TwoQModel::default() }),
        // One class has all frames.
        PolicyKind::S3Fifo | PolicyKind::Shares => Box::new(S3FifoModel { frames, ..S3FifoModel::default() }),
        PolicyKind::Arc => Box::new(ArcModel { c: frames, ..ArcModel::default() }),
        PolicyKind::Lirs => Box::new(LirsModel { frames, ..LirsModel::default() }),
        PolicyKind::WTinyLfu => {
            let mut sketch = Sketch::default();
            sketch.reset(frames as u32);
            let (window, probation, protected) = (Vec::new(), Vec::new(), Vec::new());
            Box::new(WTinyLfuModel { frames, window, probation, protected, sketch })
        }
        PolicyKind::Kv => Box::new(KvModel::new(frames)),
        // Victims of plans are compared in their own tests, and so is what `auto` follows.
        PolicyKind::Plan | PolicyKind::Model | PolicyKind::Auto => unreachable!("{kind} has no model"),
    }
}

fn demand(policy: &mut dyn Policy) -> Option<u32> {
    policy.victim(Want::Demand, &mut |_| Take::Yes).map(|page| page.index.0)
}

fn compare(kind: PolicyKind, frames: usize, uses: &[u32]) -> Result<(), TestCaseError> {
    let mut model = model(kind, frames);
    let mut policy = kind.build();
    policy.resize(frames as u32, 0, 0);
    policy.segment(SegmentId(0), uses.iter().max().map_or(1, |last| last + 1));
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

/// Chains, each of which begins with some pages of an earlier one and goes on with new pages.
fn chains() -> impl Strategy<Value = Vec<Vec<u32>>> {
    let part = (
        any::<prop::sample::Index>(),
        any::<prop::sample::Index>(),
        prop_oneof![3 => 0usize..3, 1 => 3usize..9],
        any::<bool>(),
    );
    prop::collection::vec(part, 1..60).prop_map(|parts| {
        let mut chains: Vec<Vec<u32>> = vec![vec![0, 1, 2]];
        let mut new = 3;
        for (of, kept, added, whole) in parts {
            let of = of.get(&chains);
            let kept = if whole { of.len() - 1 } else { kept.index(of.len()) };
            let chain = of[..=kept.min(of.len() - 1)].iter().copied().chain(new..new + added as u32).collect();
            new += added as u32;
            chains.push(chain);
        }
        chains
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

    #[test]
    fn kv_is_its_model_with_chains(frames in 1usize..40, chains in chains()) {
        let mut model = KvModel::new(frames);
        let mut policy = PolicyKind::Kv.build();
        policy.resize(frames as u32, 0, 0);
        policy.segment(SegmentId(0), chains.concat().iter().max().map_or(1, |last| last + 1));
        let mut resident = BTreeSet::new();
        for (at, chain) in chains.iter().enumerate() {
            policy.chain(&chain.iter().map(|number| page(*number)).collect::<Vec<_>>());
            model.chain(chain);
            for number in chain.iter().copied() {
                policy.accessed(page(number));
                if resident.contains(&number) {
                    model.hit(number);
                    continue;
                }
                let victim = (resident.len() == frames).then(|| demand(&mut *policy)).flatten();
                if let Some(victim) = victim {
                    prop_assert!(resident.remove(&victim), "chain {}: {} is not there", at, victim);
                    policy.removed(page(victim));
                }
                policy.inserted(page(number));
                resident.insert(number);
                prop_assert_eq!(victim, model.miss(number), "chain {} at page {}", at, number);
            }
        }
    }
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
                    compare(PolicyKind::$kind, frames, &uses)?;
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
                    compare(PolicyKind::$kind, frames, &uses)?;
                }
            }
        }
    )*};
}

victims_are_those_of_the_paper! {
    lru Lru
    s3fifo S3Fifo
    two_q TwoQ
    arc Arc
    lirs Lirs
    wtinylfu WTinyLfu
    kv Kv
    shares_of_one Shares
}

/// A page that was filled ahead and then used was used once.
#[test]
fn a_fill_ahead_and_its_use_are_one_use() {
    let mut policy = PolicyKind::Arc.build();
    policy.resize(3, 0, 0);
    policy.segment(SegmentId(0), 4);
    policy.inserted(page(0));
    policy.accessed(page(0));
    for number in [1, 2] {
        policy.accessed(page(number));
        policy.inserted(page(number));
    }
    policy.accessed(page(2));
    assert_eq!(demand(&mut *policy), Some(0), "the oldest of those used once");
}

/// Not every search begins with pinned pages.
#[test]
fn pages_that_cannot_be_taken_are_not_offered_first_again() {
    const PINNED: u32 = 500;
    // If the first to go is the page used last, or is chosen by count, pinned pages are offered again.
    for kind in [PolicyKind::Lru, PolicyKind::TwoQ, PolicyKind::Arc] {
        let mut policy = kind.build();
        policy.resize(1_000, 0, 0);
        policy.segment(SegmentId(0), 2_000);
        for number in 0..1_000 {
            policy.accessed(page(number));
            policy.inserted(page(number));
        }
        let mut offers = 0;
        for number in 1_000..1_400 {
            policy.accessed(page(number));
            let victim = policy.victim(Want::Demand, &mut |page| {
                offers += 1;
                if page.index.0 < PINNED { Take::Skip } else { Take::Yes }
            });
            policy.removed(victim.unwrap());
            policy.inserted(page(number));
        }
        assert!(offers <= 400 + 2 * PINNED, "{kind}: {offers} offers");
    }
}

#[test]
fn names_are_found_and_others_refused_with_the_closest() {
    for kind in PolicyKind::ALL {
        assert_eq!(kind.name().parse::<PolicyKind>().unwrap(), kind);
        assert_eq!(kind.build().name(), kind.name());
    }
    let message = "s3-fifo".parse::<PolicyKind>().unwrap_err().to_string();
    for part in ["\"s3-fifo\"", "the closest name is s3fifo", "lru, plan, model, s3fifo", "wtinylfu"] {
        assert!(message.contains(part), "{message}");
    }
}
