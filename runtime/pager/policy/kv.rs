//! For the pages of key-value caches: ranks pages by how often and how they were used, and by how long ago.

use std::cmp::Reverse;

use super::classes::Classes;
use super::{Policy, Take, Want, offer_each};
use crate::ids::{PageId, SegmentId};
use crate::numbers::{PageNumbers, fit};

/// Evicts the page that is worth least. A page's worth is the logarithm of its uses. It stays the same for one gap; a
/// page that was not used for `x` gaps has lost `4/3 (x^(3/4) - 1)`. The gap is the geometric mean of the time, in uses
/// of pages, after which a chain is taken up again. In the first gap waiting tells nothing, because no conversation
/// goes on at once. After it, a page that has waited for long is nearer to its next use than one that was just used.
///
/// [Chains](Policy::chain) tell more than counts:
///
/// - The last page of a chain, if it was never used before, goes first: most likely it holds an unfinished block, which
///   no other chain can have in common.
/// - So do pages that a chain has left: all earlier uses of the page before them went on to them; then the chain came
///   there and went another way.
/// - A use is worth more or less than one, by the [kind](Kinds) of its request.
/// - Pages of a chain that is about to be used are not evicted for others of the same chain.
///
/// Uses are counted for as long as the segment lives, also while the page is not resident. There is one queue for each
/// eighth of an octave of worth, in order of use; a search looks at the first page of each. 15 bytes a page, 20 where
/// chains are declared.
#[derive(Debug)]
pub(super) struct KvPolicy {
    pub(super) numbers: PageNumbers,
    /// By page: when it was used last, in uses. Wraps.
    last: Vec<u32>,
    /// By page: how often it was used.
    count: Vec<u16>,
    /// By page: [`PENDING`], and its class if it is resident or on its way.
    state: Vec<u8>,
    /// By page, once a chain was declared: the kind of the request that used it last, or [`NO_KIND`].
    kind: Vec<u8>,
    /// By page, once a chain was declared: the page after it in the chain that used it last, or [`NONE`]. That page may
    /// be gone.
    next: Vec<u32>,
    classes: Classes<CLASSES>,
    now: u32,
    gap: Gap,
    kinds: Kinds,
    /// Whether chains are declared.
    chains: bool,
    /// The chain in use: its kind, and its uses' bonus in parts. `root` is its first page; `end` is its last page, if
    /// that was never used before.
    request: (u8, i64),
    root: Option<u32>,
    end: Option<u32>,
    /// Pages are only counted: none is in a class.
    asleep: bool,
}

/// Classes: one for pages that go first, the others by worth.
const CLASSES: usize = 64;
const FIRST: usize = 0;
/// The class of one use.
const ONCE: usize = 17;
/// Classes to an octave.
const STEPS: i64 = 8;
/// Of a resident page: it was filled ahead and not used yet. Of another: it was missed, and comes.
const PENDING: u8 = 1 << 7;
const CLASS: u8 = PENDING - 1;
/// Parts of a whole: fractions are counted in 256ths.
const ONE: u64 = 256;
const NO_KIND: u8 = u8::MAX;
const NONE: u32 = u32::MAX;

/// The class for a worth of `log`, a logarithm of uses in parts. Classes reach from two octaves below one use to 53
/// uses; worths beyond these are in the first and the last class.
pub(super) fn class_of(log: i64) -> usize {
    let steps = (log * STEPS + ONE as i64 / 2).div_euclid(ONE as i64);
    (ONCE as i64 + steps).clamp(FIRST as i64 + 1, CLASSES as i64 - 1) as usize
}

/// Four times the error, in parts, of linear interpolation in the middle between two powers of two.
const BEND: u64 = 88;

/// The logarithm to base 2 of `n` (at least 1), in parts; within 0.02.
pub(super) fn log2(n: u64) -> u64 {
    let octave = n.ilog2();
    let part = ((u128::from(n - (1 << octave)) * u128::from(ONE)) >> octave) as u64;
    u64::from(octave) * ONE + part + part * (ONE - part) * BEND / (ONE * ONE)
}

/// The inverse of [`log2`].
fn exp2(log: u64) -> u64 {
    let (octave, part) = ((log / ONE).min(47), log % ONE);
    let part = part * ONE - part * (ONE - part) * BEND / ONE;
    (1 << octave) + (((1u64 << octave) * part) / (ONE * ONE))
}

/// The geometric mean of gaps; recent gaps count most.
#[derive(Debug)]
pub(super) struct Gap {
    /// The mean of logarithms, in 256ths of a part.
    mean: u64,
    seen: u64,
}

impl Gap {
    /// After this many newer gaps, a gap counts a third of a new one.
    const MEMORY: u64 = 512;
    /// The assumed gap weighs as much as this many observed ones.
    const ASSUMED: u64 = 32;

    pub(super) fn assume(gap: u64) -> Self {
        Self { mean: log2(gap.max(1)) * ONE, seen: Self::ASSUMED }
    }

    pub(super) fn saw(&mut self, gap: u64) {
        self.seen = (self.seen + 1).min(Self::MEMORY);
        let log = log2(gap.max(1)) * ONE;
        self.mean = self.mean - self.mean / self.seen + log / self.seen;
    }

    pub(super) fn uses(&self) -> f64 {
        exp2(self.mean / ONE) as f64
    }
}

/// The worth of pages by class and age. Ages and the gap are in uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Worth {
    gap: f64,
    step: f64,
    inverse: f64,
}

impl Worth {
    pub(super) fn new(gap: f64) -> Self {
        Self { gap, step: gap / STEPS as f64, inverse: 1.0 / gap }
    }

    /// After `x` gaps, more than one, a page has lost `4/3 (x^(3/4) - 1)` octaves: one a gap at first, and less once it
    /// has outlived most. Square roots are the same to the last bit on every machine, powers are not.
    pub(super) fn of(&self, class: usize, age: u32) -> i64 {
        let worth = self.step * (class as f64 - ONCE as f64);
        let root = (f64::from(age) * self.inverse).max(1.0).sqrt();
        (worth - self.gap * (root * root.sqrt() - 1.0) * (4.0 / 3.0)) as i64
    }
}

/// Estimates how much a use is worth by the kind of its request: how often pages are used again after a request of the
/// kind, compared with all pages that have as many uses.
///
/// Kinds are by how much a request adds. A request that takes up a chain and adds little is a turn of a conversation,
/// which goes on. A request that adds much has a long text of its own behind a beginning that many share. If it shares
/// no more than its first page, its kind is by its length.
#[derive(Debug)]
pub(super) struct Kinds {
    /// By number of uses: how many pages came to have as many, and how many of these were used again.
    counts: [Tally; COUNTS],
    /// By kind: how many uses such requests made, and how many of these pages were used again. `expected`: how many
    /// should have been, in parts.
    kinds: [Tally; KINDS],
    expected: [u64; KINDS],
}

const KINDS: usize = 16;
const COUNTS: usize = 32;

#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    uses: u64,
    again: u64,
}

impl Tally {
    /// At this many uses all counts are halved, so that old uses count less.
    const MOST: u64 = 1 << 17;

    /// Returns whether it halved.
    fn halve_if_full(&mut self) -> bool {
        let full = self.uses >= Self::MOST;
        if full {
            (self.uses, self.again) = (self.uses / 2, self.again / 2);
        }
        full
    }
}

impl Kinds {
    /// With this many uses, evidence about a count weighs as much as the assumption; about a kind, with `MANY`.
    const FEW: u64 = 128;
    const MANY: u64 = 1024;

    pub(super) fn new() -> Self {
        Self { counts: [Tally::default(); COUNTS], kinds: [Tally::default(); KINDS], expected: [0; KINDS] }
    }

    /// The kind of a request for `pages` pages, if the first `known` of them were used before.
    pub(super) fn of(pages: usize, known: usize) -> u8 {
        let octave = |n: usize| n.max(1).ilog2().min(7) as u8;
        match known {
            0..2 => KINDS as u8 - 1 - octave(pages),
            _ => octave(pages / (pages - known).max(1)),
        }
    }

    fn count(count: u16) -> usize {
        usize::from(count).min(COUNTS - 1)
    }

    /// The probability, in parts, that a page with this many uses is used again. Before any evidence, `n / (n + 2)` is
    /// assumed for `n` uses.
    fn likely(&self, count: u16) -> u64 {
        let tally = self.counts[Self::count(count)];
        let assumed = Self::FEW * u64::from(count) * ONE / (u64::from(count) + 2);
        ((tally.again * ONE + assumed) / (tally.uses.max(tally.again) + Self::FEW)).min(ONE - ONE / 16)
    }

    /// A page is used again that had `count` uses, the last by a request of this kind.
    pub(super) fn again(&mut self, count: u16, kind: Option<u8>) {
        self.counts[Self::count(count)].again += 1;
        if let Some(kind) = kind {
            self.kinds[usize::from(kind)].again += 1;
        }
    }

    /// A page has `count` uses now, the last by a request of this kind.
    pub(super) fn used(&mut self, count: u16, kind: Option<u8>) {
        let tally = &mut self.counts[Self::count(count)];
        tally.halve_if_full();
        tally.uses += 1;
        if let Some(kind) = kind.map(usize::from) {
            self.expected[kind] += self.likely(count);
            let tally = &mut self.kinds[kind];
            tally.uses += 1;
            if tally.halve_if_full() {
                self.expected[kind] /= 2;
            }
        }
    }

    /// By how many parts a use by such a request is worth more than another use: half the logarithm of the ratio of the
    /// odds of one more use. Half, because uses of one chain are not independent, so the counts overstate the evidence.
    pub(super) fn bonus(&self, kind: u8) -> i64 {
        let (tally, expected) = (self.kinds[usize::from(kind)], self.expected[usize::from(kind)]);
        if tally.uses == 0 {
            return 0;
        }
        let all = (tally.uses + Self::MANY) * ONE;
        let assumed = Self::MANY * expected / tally.uses;
        let odds = |again: u64| {
            let again = again.clamp(1, all - all / 16);
            log2(again) as i64 - log2(all - again) as i64
        };
        (odds(tally.again * ONE + assumed) - odds(expected + assumed)) / 2
    }
}

impl Default for KvPolicy {
    fn default() -> Self {
        Self {
            numbers: PageNumbers::default(),
            last: Vec::new(),
            count: Vec::new(),
            state: Vec::new(),
            kind: Vec::new(),
            next: Vec::new(),
            classes: Classes::default(),
            now: 0,
            gap: Gap::assume(1),
            kinds: Kinds::new(),
            chains: false,
            request: (NO_KIND, 0),
            root: None,
            end: None,
            asleep: false,
        }
    }
}

impl KvPolicy {
    fn fit(&mut self) {
        let end = self.numbers.end();
        if !self.asleep {
            self.classes.fit(end);
        }
        fit(&mut self.last, end, 0);
        fit(&mut self.count, end, 0);
        fit(&mut self.state, end, 0);
        if self.chains {
            fit(&mut self.kind, end, NO_KIND);
            fit(&mut self.next, end, NONE);
        }
    }

    /// The time, in uses.
    pub(super) fn now(&self) -> u32 {
        self.now
    }

    /// How often the page was used.
    pub(super) fn uses(&self, number: u32) -> u16 {
        self.count[number as usize]
    }

    /// Takes the gap that `all` has measured, in uses of one page in 2^`octaves`. In a sample itself, a page that is
    /// used very often would determine it.
    pub(super) fn gap_of_a_sample(&mut self, all: &Self, octaves: u32) {
        self.gap.mean = all.gap.mean.saturating_sub(u64::from(octaves) * ONE * ONE);
    }

    /// The chain that was declared last has more pages than were named.
    pub(super) fn goes_on_after_chain(&mut self) {
        self.end = None;
    }

    /// From now on pages are only counted, by [`note`](Self::note).
    pub(super) fn sleep(&mut self) {
        self.asleep = true;
        self.classes = Classes::default();
    }

    /// Pages are ordered again; resident ones are to be [restored](Self::restore).
    pub(super) fn wake(&mut self) {
        self.asleep = false;
        self.classes.fit(self.numbers.end());
    }

    /// A page is used, while pages are only counted.
    pub(super) fn note(&mut self, number: u32) {
        self.now = self.now.wrapping_add(1);
        let class = self.count_use(number);
        self.state[number as usize] = class as u8;
    }

    /// A resident page, after [`wake`](Self::wake), in order of use.
    pub(super) fn restore(&mut self, number: u32) {
        let class = if self.count[number as usize] == 0 { ONCE } else { self.class_at(number) };
        self.state[number as usize] = 0;
        self.link(number, class);
    }

    /// A page that was missed comes, after [`wake`](Self::wake).
    pub(super) fn comes(&mut self, number: u32) {
        self.state[number as usize] |= PENDING;
    }

    fn is_pending(&self, number: u32) -> bool {
        self.state[number as usize] & PENDING != 0
    }

    fn class_at(&self, number: u32) -> usize {
        usize::from(self.state[number as usize] & CLASS)
    }

    fn unlink(&mut self, number: u32) {
        self.classes.remove(number, self.class_at(number));
    }

    /// Puts a page that is in no class behind the others of this class.
    fn link(&mut self, number: u32, class: usize) {
        self.classes.push_last(number, class);
        self.set_class(number, class);
    }

    fn set_class(&mut self, number: u32, class: usize) {
        let state = &mut self.state[number as usize];
        *state = *state & PENDING | class as u8;
    }

    fn has(&self, number: u32) -> bool {
        !self.asleep && self.classes.contains(number)
    }

    /// Uses since the page was used last.
    pub(super) fn since(&self, number: u32) -> u32 {
        self.now.wrapping_sub(self.last[number as usize])
    }

    /// Counts a use of a page. Returns the page's class.
    fn count_use(&mut self, number: u32) -> usize {
        let at = number as usize;
        let before = self.count[at];
        let count = before.saturating_add(1);
        let is_end = before == 0 && self.end == Some(number);
        if self.chains {
            if before > 0 {
                self.kinds.again(before, Some(self.kind[at]).filter(|kind| *kind != NO_KIND));
            }
            // Every request begins with the first page, whatever the page's last request was.
            let kind = Some(self.request.0).filter(|_| !is_end && self.root != Some(number));
            self.kinds.used(count, kind);
            self.kind[at] = kind.unwrap_or(NO_KIND);
        } else if before > 0 {
            self.gap.saw(self.since(number).into());
        }
        self.count[at] = count;
        self.last[at] = self.now;
        let bonus = if !self.chains || self.kind[at] == NO_KIND { 0 } else { self.request.1 };
        if is_end { FIRST } else { class_of(log2(count.into()) as i64 + bonus) }
    }

    fn missed(&mut self, number: u32) {
        let class = self.count_use(number);
        self.set_class(number, class);
        self.state[number as usize] |= PENDING;
    }

    /// A chain goes on from `number` to `to`. If all uses of `number` so far went on to another page, that way is left
    /// for good: each turn of a conversation is taken up from the newest.
    fn goes_on(&mut self, number: u32, to: u32) {
        let left = std::mem::replace(&mut self.next[number as usize], to);
        let count = |number: u32| self.count.get(number as usize).copied();
        if left == to || count(left).is_none() || count(left) != count(number) {
            return;
        }
        let mut page = left;
        // Following a link removes it, so that the loop ends even if a chain names a page twice.
        while let Some(next) = self.next.get_mut(page as usize) {
            let next = std::mem::replace(next, NONE);
            if self.asleep {
                self.set_class(page, FIRST);
            } else if self.classes.contains(page) && self.class_at(page) != FIRST {
                self.unlink(page);
                self.link(page, FIRST);
            }
            page = next;
        }
    }

    /// Moves pages that are about to be used to the end of their class, so that missing pages of the same chain do not
    /// come in their place.
    fn spare(&mut self, pages: &[PageId]) {
        let is_there = |page: &PageId| self.numbers.number(*page).is_some_and(|number| self.has(number));
        if pages.iter().all(is_there) {
            return;
        }
        for page in pages {
            let Some(number) = self.numbers.number(*page).filter(|number| self.has(*number)) else {
                continue;
            };
            let class = self.class_at(number);
            self.unlink(number);
            self.last[number as usize] = self.now;
            self.link(number, class);
        }
    }
}

impl Policy for KvPolicy {
    fn name(&self) -> &'static str {
        "kv"
    }

    fn resize(&mut self, frames: u32, _host_frames: u32, _lookahead: u32) {
        if self.gap.seen == Gap::ASSUMED {
            self.gap = Gap::assume(frames.into());
        }
    }

    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.numbers.add(segment, pages);
        self.fit();
    }

    /// Observes the gap after which the chain is taken up again: that of the deepest page used before. The first page
    /// does not tell, because often all chains begin with it.
    fn chain(&mut self, pages: &[PageId]) {
        if !self.chains {
            self.chains = true;
            self.fit();
        }
        let is_known = |number: &u32| self.count[*number as usize] > 0;
        let numbers = || pages.iter().filter_map(|page| self.numbers.number(*page));
        let known = numbers().take_while(is_known).count();
        let deepest = numbers().take(known).skip(1).last().map(|number| self.since(number));
        self.end = numbers().next_back().filter(|number| !is_known(number));
        self.root = numbers().next();
        let kind = Kinds::of(numbers().count(), known);
        self.request = (kind, self.kinds.bonus(kind));
        if let Some(gap) = deepest {
            self.gap.saw(gap.into());
        }
        let mut before = None;
        for page in pages {
            let Some(number) = self.numbers.number(*page) else { continue };
            if let Some(before) = before.replace(number) {
                self.goes_on(before, number);
            }
        }
        self.spare(pages);
    }

    fn accessed(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        self.now = self.now.wrapping_add(1);
        match (self.has(number), self.is_pending(number)) {
            (true, false) => {
                let class = self.count_use(number);
                self.unlink(number);
                self.link(number, class);
            }
            (true, true) => self.state[number as usize] &= !PENDING,
            (false, false) => self.missed(number),
            (false, true) => {}
        }
    }

    fn inserted(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        if self.has(number) {
            return;
        }
        let wanted = self.is_pending(number);
        if !wanted {
            self.missed(number);
        }
        self.link(number, self.class_at(number));
        if wanted {
            self.state[number as usize] &= !PENDING;
        }
    }

    fn removed(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        if self.has(number) {
            self.unlink(number);
        }
        self.state[number as usize] = 0;
    }

    fn forget(&mut self, segment: SegmentId) {
        for number in self.numbers.of_segment(segment) {
            if self.has(number as u32) {
                self.unlink(number as u32);
            }
            (self.state[number], self.count[number]) = (0, 0);
            if self.chains {
                (self.kind[number], self.next[number]) = (NO_KIND, NONE);
            }
            self.end = self.end.filter(|end| *end as usize != number);
            self.root = self.root.filter(|root| *root as usize != number);
        }
        self.numbers.remove(segment);
        self.fit();
    }

    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        let Self { numbers, last, state, classes, now, gap, .. } = self;
        if want == Want::Memory {
            return offer_each(classes.pages(numbers), take);
        }
        let by_age = Worth::new(gap.uses());
        let worth = |class: usize, number: u32| {
            let age = now.wrapping_sub(last[number as usize]);
            let worth = if class == FIRST { i64::MIN } else { by_age.of(class, age) };
            (worth, Reverse(age))
        };
        let least = |classes: &Classes<CLASSES>| {
            classes.firsts().min_by_key(|(class, number)| worth(*class, *number)).map(|(_, number)| number)
        };
        classes.offer(numbers, |number| usize::from(state[number as usize] & CLASS), least, take)
    }

    fn tracked(&self) -> Vec<PageId> {
        self.classes.pages(&self.numbers).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PageIndex;

    fn page(index: u32) -> PageId {
        PageId { segment: SegmentId(0), index: PageIndex(index) }
    }

    fn policy(pages: u32) -> KvPolicy {
        let mut policy = KvPolicy::default();
        policy.resize(64, 0, 0);
        policy.segment(SegmentId(0), pages);
        policy
    }

    fn victim(policy: &mut KvPolicy) -> u32 {
        let page = policy.victim(Want::Demand, &mut |_| Take::Yes).unwrap();
        policy.removed(page);
        page.index.0
    }

    fn come(policy: &mut KvPolicy, index: u32) {
        policy.accessed(page(index));
        policy.inserted(page(index));
    }

    #[test]
    fn worth_has_classes_in_its_order() {
        let classes: Vec<usize> = (-2_000..5_000).map(class_of).collect();
        assert!(classes.is_sorted() && classes.windows(2).all(|pair| pair[1] - pair[0] <= 1));
        assert_eq!((classes[0], classes.last()), (FIRST + 1, Some(&(CLASSES - 1))));
        let of = |count: u64| class_of(log2(count) as i64);
        assert_eq!([1, 2, 3, 4, 8].map(of), [ONCE, ONCE + 8, ONCE + 13, ONCE + 16, ONCE + 24]);
    }

    #[test]
    fn logarithms_are_near_and_their_inverse_is_one() {
        for n in (1..4_000).chain([1 << 20, (1 << 32) - 1, 1 << 40]) {
            let exact = (n as f64).log2();
            let found = log2(n) as f64 / ONE as f64;
            assert!((found - exact).abs() < 0.02, "{n}: {found}, not {exact}");
            let back = exp2(log2(n));
            assert!(back.abs_diff(n) as f64 <= 1.0 + n as f64 / 64.0, "{n}: {back}");
        }
    }

    #[test]
    fn the_mean_gap_is_found() {
        let mut gap = Gap::assume(10);
        for _ in 0..4_000 {
            gap.saw(200);
            gap.saw(800);
        }
        let found = gap.uses();
        assert!((360.0..=440.0).contains(&found), "{found}");
        let worth = Worth::new(found);
        let gaps = |class, age: f64| worth.of(class, (age * found) as u32) as f64 / found;
        // In the first gap nothing is lost; then half of the uses with each gap, and later less.
        assert_eq!([gaps(ONCE, 0.0), gaps(ONCE, 1.0), gaps(ONCE + 8, 1.0)], [0.0, 0.0, 1.0]);
        for (age, lost) in [(1.1, 0.099), (2.0, 0.909), (4.0, 2.438), (16.0, 9.333)] {
            assert!((gaps(ONCE + 8, age) - 1.0 + lost).abs() < 0.02, "{age}: {}", gaps(ONCE + 8, age));
        }
    }

    #[test]
    fn a_page_of_several_chains_outlasts_younger_ones() {
        let mut policy = policy(500);
        come(&mut policy, 0);
        policy.accessed(page(0));
        (1..40).for_each(|index| come(&mut policy, index));
        assert_eq!((0..39).map(|_| victim(&mut policy)).collect::<Vec<_>>(), (1..40).collect::<Vec<_>>());
        // But only for as long as its second use outweighs its age.
        (40..340).for_each(|index| come(&mut policy, index));
        let by_age = Worth::new(policy.gap.uses());
        let worth = by_age.of(ONCE + 8, policy.since(0));
        let lost = |index: &u32| by_age.of(ONCE, policy.since(*index));
        let older = (40..340).filter(|index| lost(index) < worth).count();
        assert!((10..290).contains(&older), "{older}");
        assert_eq!((0..).take_while(|_| victim(&mut policy) != 0).count(), older);
    }

    fn run(policy: &mut KvPolicy, chain: &[u32]) {
        policy.chain(&chain.iter().map(|index| page(*index)).collect::<Vec<_>>());
        for index in chain {
            policy.accessed(page(*index));
            policy.inserted(page(*index));
        }
    }

    #[test]
    fn what_a_chain_has_left_goes_first() {
        let mut policy = policy(40);
        run(&mut policy, &[0, 1, 2, 3, 4]);
        run(&mut policy, &[0, 1, 2, 3, 4, 5, 6]);
        // The chain is taken up before its end, and goes another way.
        run(&mut policy, &[0, 1, 2, 8, 9]);
        assert_eq!([victim(&mut policy), victim(&mut policy)], [6, 3]);
        assert_eq!([victim(&mut policy), victim(&mut policy)], [4, 5]);
        // Where several chains go different ways, none is left.
        run(&mut policy, &[0, 11, 12, 13]);
        run(&mut policy, &[0, 1, 2, 8, 19, 20]);
        assert_eq!([victim(&mut policy), victim(&mut policy)], [9, 13]);
        assert!(policy.tracked().contains(&page(12)) && policy.class_at(11) == policy.class_at(12));
    }

    #[test]
    fn a_chain_that_names_a_page_twice_ends() {
        let mut policy = policy(8);
        run(&mut policy, &[1, 2, 1, 2, 3]);
        run(&mut policy, &[1, 3, 1, 1, 2]);
        run(&mut policy, &[1, 4, 5]);
        assert_eq!(policy.tracked().len(), 5);
    }

    #[test]
    fn a_page_about_to_be_used_is_not_evicted_for_its_chain() {
        let mut policy = policy(40);
        run(&mut policy, &[0, 1, 2, 3, 4]);
        run(&mut policy, &[7, 8, 9]);
        assert_eq!([victim(&mut policy), victim(&mut policy)], [4, 9]);
        policy.chain(&[0, 1, 2, 3, 5].map(page));
        assert_eq!([victim(&mut policy), victim(&mut policy), victim(&mut policy)], [7, 8, 0]);
    }

    #[test]
    fn kinds_of_requests_that_are_taken_up_are_worth_more() {
        assert_eq!([Kinds::of(16, 0), Kinds::of(17, 1), Kinds::of(1, 1)], [11, 11, 15]);
        assert_eq!([Kinds::of(16, 15), Kinds::of(16, 12), Kinds::of(16, 2), Kinds::of(9, 9)], [4, 2, 0, 3]);
        let mut kinds = Kinds::new();
        assert_eq!(kinds.bonus(3), 0);
        for at in 0..20_000 {
            let (kind, again) = if at % 2 == 0 { (3, at % 8 < 6) } else { (5, at % 16 < 2) };
            kinds.used(1, Some(kind));
            if again {
                kinds.again(1, Some(kind));
            }
        }
        // Of the pages of kind 3, three quarters are used again; of kind 5, an eighth.
        let (more, less) = (kinds.bonus(3), kinds.bonus(5));
        assert!(more > 64 && less < -128, "{more} {less}");
        // Few uses change little.
        let mut few = Kinds::new();
        (0..20).for_each(|_| few.used(1, Some(3)));
        assert!((-16..0).contains(&few.bonus(3)), "{}", few.bonus(3));
    }

    #[test]
    fn the_unfinished_end_of_a_chain_goes_first() {
        let mut policy = policy(20);
        run(&mut policy, &[0, 1, 2]);
        // The chain goes on with another page in place of its end.
        run(&mut policy, &[0, 1, 3, 4]);
        assert_eq!([victim(&mut policy), victim(&mut policy), victim(&mut policy)], [2, 4, 3]);
        // An end that is used a second time is the end of several chains.
        run(&mut policy, &[0, 1, 4]);
        run(&mut policy, &[7, 8]);
        assert_eq!([victim(&mut policy), victim(&mut policy)], [8, 7]);
    }
}
