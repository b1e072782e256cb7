//! For the pages of key-value caches: recency, worth more the more often a page was used.

use super::classes::Classes;
use super::{Policy, Take, Want, offer_each};
use crate::ids::{PageId, SegmentId};
use crate::pager::numbers::{PageNumbers, fit};

/// Evicts the page with the least `last use + 1.5 * gap * log2(uses)`, in uses of pages. `gap` is the geometric mean of the
/// time after which a chain is taken up again. So a page that was used twice outlasts one that was used once by one and a
/// half gaps, and each doubling is worth as much again.
///
/// Uses are counted for as long as the segment lives, also while the page is not resident. The last page of a
/// [chain](Policy::chain) that nobody used before goes first: most likely it holds an unfinished block, which no other
/// chain can have in common.
///
/// One queue for each quarter of an octave of counts, in order of use; a search looks at the first page of each. 15 bytes
/// a page.
#[derive(Debug)]
pub(super) struct KvPolicy {
    numbers: PageNumbers,
    /// By page: when it was used last, in uses, which wrap.
    last: Vec<u32>,
    /// By page: how often it was used.
    count: Vec<u16>,
    /// By page: of a resident one its class, and [`PENDING`].
    state: Vec<u8>,
    classes: Classes<CLASSES>,
    now: u32,
    gap: Gap,
    /// Whether chains are told of.
    chains: bool,
    /// The end of the chain that is being used, if it was never used before.
    end: Option<u32>,
}

/// The class of what goes first, and of each count from 1 to 2^16 - 1.
const CLASSES: usize = 60;
const FIRST: usize = 0;
/// Of a resident page: it was filled ahead and not used yet. Of another: it was missed, and comes.
const PENDING: u8 = 1 << 7;
const CLASS: u8 = PENDING - 1;
/// What is a fraction is counted in so many parts.
const ONE: u64 = 256;

/// Counts below 8 each have a class, others share one with those of the same quarter of an octave.
pub(super) fn class_of(count: u16) -> usize {
    match count {
        0..8 => usize::from(count),
        _ => {
            let octave = count.ilog2();
            4 * octave as usize - 4 + usize::from(count >> (octave - 2) & 3)
        }
    }
}

/// The least count of a class.
fn count_of(class: usize) -> u64 {
    match class {
        0..8 => class as u64,
        _ => (4 + class as u64 % 4) << (class / 4 - 1),
    }
}

/// The logarithm to base 2 of `n`, at least 1, in parts; between powers of two it is a straight line, which is at most 0.09
/// below it.
fn log2(n: u64) -> u64 {
    let octave = n.ilog2();
    u64::from(octave) * ONE + ((u128::from(n - (1 << octave)) * u128::from(ONE)) >> octave) as u64
}

/// The inverse of [`log2`].
fn exp2(log: u64) -> u64 {
    let (octave, part) = ((log / ONE).min(55), log % ONE);
    (1 << octave) + (((1u64 << octave) * part) / ONE)
}

/// The geometric mean of gaps, of which those seen last count most.
#[derive(Debug)]
pub(super) struct Gap {
    /// The mean of logarithms, in parts of parts.
    mean: u64,
    seen: u64,
}

impl Gap {
    /// Gaps after which an old one counts a third of a new one.
    const MEMORY: u64 = 512;
    /// So many gaps weigh as much as what was assumed.
    const ASSUMED: u64 = 32;

    pub(super) fn assume(gap: u64) -> Self {
        Self { mean: log2(gap.max(1)) * ONE, seen: Self::ASSUMED }
    }

    pub(super) fn saw(&mut self, gap: u64) {
        self.seen = (self.seen + 1).min(Self::MEMORY);
        let log = log2(gap.max(1)) * ONE;
        self.mean = self.mean - self.mean / self.seen + log / self.seen;
    }

    /// By how many uses a page of this class outlasts one that was used once.
    pub(super) fn worth(&self, class: usize) -> u64 {
        exp2(self.mean / ONE) * log2(count_of(class).max(1)) * 3 / (2 * ONE)
    }
}

impl Default for KvPolicy {
    fn default() -> Self {
        Self {
            numbers: PageNumbers::default(),
            last: Vec::new(),
            count: Vec::new(),
            state: Vec::new(),
            classes: Classes::default(),
            now: 0,
            gap: Gap::assume(1),
            chains: false,
            end: None,
        }
    }
}

impl KvPolicy {
    fn fit(&mut self) {
        let end = self.numbers.end();
        self.classes.fit(end);
        fit(&mut self.last, end, 0);
        fit(&mut self.count, end, 0);
        fit(&mut self.state, end, 0);
    }

    fn is_pending(&self, number: u32) -> bool {
        self.state[number as usize] & PENDING != 0
    }

    fn unlink(&mut self, number: u32) {
        self.classes.remove(number, usize::from(self.state[number as usize] & CLASS));
    }

    /// Puts a page that is in no list behind the others of this class.
    fn link(&mut self, number: u32, class: usize) {
        self.classes.push_last(number, class);
        let state = &mut self.state[number as usize];
        *state = *state & PENDING | class as u8;
    }

    fn since(&self, number: u32) -> u32 {
        self.now.wrapping_sub(self.last[number as usize])
    }

    fn count_use(&mut self, number: u32) {
        let count = self.count[number as usize];
        if count > 0 && !self.chains {
            self.gap.saw(self.since(number).into());
        }
        self.count[number as usize] = count.saturating_add(1);
        self.last[number as usize] = self.now;
    }

    fn missed(&mut self, number: u32) {
        self.count_use(number);
        self.state[number as usize] |= PENDING;
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

    /// The deepest page that was used before tells after what time the chain is taken up again. The first page does not:
    /// often all chains begin with it.
    fn chain(&mut self, pages: &[PageId]) {
        self.chains = true;
        let is_known = |number: &u32| self.count[*number as usize] > 0;
        let numbers = || pages.iter().filter_map(|page| self.numbers.number(*page));
        let deepest = numbers().take_while(is_known).skip(1).last().map(|number| self.since(number));
        self.end = numbers().next_back().filter(|number| !is_known(number));
        if let Some(gap) = deepest {
            self.gap.saw(gap.into());
        }
    }

    fn accessed(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        self.now = self.now.wrapping_add(1);
        match (self.classes.contains(number), self.is_pending(number)) {
            (true, false) => {
                self.count_use(number);
                self.unlink(number);
                self.link(number, class_of(self.count[number as usize]));
            }
            (true, true) => self.state[number as usize] &= !PENDING,
            (false, false) => self.missed(number),
            (false, true) => {}
        }
    }

    fn inserted(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        if self.classes.contains(number) {
            return;
        }
        let wanted = self.is_pending(number);
        if !wanted {
            self.missed(number);
        }
        let unfinished = self.end == Some(number) && self.count[number as usize] == 1;
        self.link(number, if unfinished { FIRST } else { class_of(self.count[number as usize]) });
        if wanted {
            self.state[number as usize] &= !PENDING;
        }
    }

    fn removed(&mut self, page: PageId) {
        let Some(number) = self.numbers.number(page) else { return };
        if self.classes.contains(number) {
            self.unlink(number);
        }
        self.state[number as usize] = 0;
    }

    fn forget(&mut self, segment: SegmentId) {
        for number in self.numbers.of_segment(segment) {
            if self.classes.contains(number as u32) {
                self.unlink(number as u32);
            }
            (self.state[number], self.count[number]) = (0, 0);
            self.end = self.end.filter(|end| *end as usize != number);
        }
        self.numbers.remove(segment);
        self.fit();
    }

    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        let Self { numbers, last, state, classes, now, gap, .. } = self;
        if want == Want::Memory {
            return offer_each(classes.pages(numbers), take);
        }
        let value = |class: usize, number: u32| match class {
            FIRST => i64::MIN,
            _ => gap.worth(class) as i64 - i64::from(now.wrapping_sub(last[number as usize])),
        };
        let least = |classes: &Classes<CLASSES>| {
            classes.firsts().min_by_key(|(class, number)| value(*class, *number)).map(|(_, number)| number)
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
    fn counts_have_classes_in_their_order() {
        let classes: Vec<usize> = (1..=u16::MAX).map(class_of).collect();
        assert!(classes.is_sorted() && classes.windows(2).all(|pair| pair[1] - pair[0] <= 1));
        assert_eq!((classes[0], classes[6], classes[7], classes[9]), (1, 7, 8, 9));
        assert_eq!(classes.last(), Some(&(CLASSES - 1)));
        assert!((1..=u16::MAX).all(|count| count_of(class_of(count)) <= count.into()));
        assert!((1..CLASSES).all(|class| class_of(count_of(class) as u16) == class));
    }

    #[test]
    fn logarithms_are_near_and_their_inverse_is_one() {
        for n in (1..4_000).chain([1 << 20, (1 << 32) - 1, 1 << 40]) {
            let exact = (n as f64).log2();
            let found = log2(n) as f64 / ONE as f64;
            assert!(found <= exact + 1e-9 && found > exact - 0.1, "{n}: {found}, not {exact}");
            let back = exp2(log2(n));
            assert!(back <= n && (n - back) as f64 <= n as f64 / 128.0, "{n}: {back}");
        }
    }

    #[test]
    fn the_mean_gap_is_found() {
        let mut gap = Gap::assume(10);
        for _ in 0..4_000 {
            gap.saw(200);
            gap.saw(800);
        }
        // Twice as many uses are worth 1.5 gaps of 400.
        let worth = gap.worth(class_of(2));
        assert!((520..=660).contains(&worth), "{worth}");
        assert_eq!((gap.worth(class_of(1)), gap.worth(class_of(4))), (0, 2 * worth));
    }

    #[test]
    fn a_page_of_several_chains_outlasts_younger_ones() {
        let mut policy = policy(500);
        come(&mut policy, 0);
        policy.accessed(page(0));
        (1..40).for_each(|index| come(&mut policy, index));
        assert_eq!((0..39).map(|_| victim(&mut policy)).collect::<Vec<_>>(), (1..40).collect::<Vec<_>>());
        // But not for ever: by as many uses as its second one is worth.
        (40..340).for_each(|index| come(&mut policy, index));
        let worth = policy.gap.worth(class_of(2));
        // Of two that are worth the same the one that was used less goes first.
        let older = (40..340).filter(|index| u64::from(policy.since(*index)) + worth >= policy.since(0).into()).count();
        assert!((10..290).contains(&older), "{older}");
        assert_eq!((0..).take_while(|_| victim(&mut policy) != 0).count(), older);
    }

    #[test]
    fn the_unfinished_end_of_a_chain_goes_first() {
        let mut policy = policy(20);
        let run = |policy: &mut KvPolicy, chain: &[u32]| {
            policy.chain(&chain.iter().map(|index| page(*index)).collect::<Vec<_>>());
            chain.iter().for_each(|index| come(policy, *index));
        };
        run(&mut policy, &[0, 1, 2]);
        // It goes on where the end has become another page, with more in it.
        run(&mut policy, &[0, 1, 3, 4]);
        assert_eq!([victim(&mut policy), victim(&mut policy), victim(&mut policy)], [2, 4, 3]);
        // An end that comes a second time is the end of others too.
        run(&mut policy, &[0, 1, 4]);
        run(&mut policy, &[7, 8]);
        assert_eq!([victim(&mut policy), victim(&mut policy)], [8, 7]);
    }
}
