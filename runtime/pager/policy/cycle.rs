//! Recognising that the order of use repeats.
//!
//! A pass over a model uses its pages in one order, and the next pass does so again. On a cycle of period `d` each use
//! is that of `d` uses ago. The few exceptions (an embedding row that differs from pass to pass) do not count against
//! it. Pages alone do not tell `d`, because some are used several times a pass. So the search is for an earlier place
//! where the last few uses came in the same order. The latest such place counts: if a part of the pass repeats at once,
//! that part is taken for the pass.

use std::collections::VecDeque;

/// The most uses remembered: a longer cycle is not recognised. 1 MiB.
const HISTORY: usize = 1 << 18;
/// Uses that all recorders of a policy may remember together. 8 MiB.
const ALL: usize = 8 * HISTORY;
/// The fewest uses that are worth remembering.
const LEAST: usize = 1 << 10;
/// How many uses in a row must be the same before a period is considered.
const CONTEXT: usize = 8;
/// Places of recent uses that are remembered. `near` has one for each of the last uses, but at most one for four uses
/// remembered. `far`, for longer cycles, has one for sixteen, chosen by the hash of the uses before. 68 KiB at most.
const NEAR: usize = 1 << 10;
const NEAR_PER: usize = 4;
const FAR_PER: usize = 16;
/// The bits of a context's mixed hash that choose uses for `far`.
const CHOSEN_SHIFT: u32 = 60;
/// The fewest uses that must agree, however short the cycle is.
const AGREE_MIN: u64 = 16;

/// The base of the hash of a context, and the power of it that belongs to the use before the context. Any odd numbers
/// with bits all over will do.
const BASE: u64 = 0xD6E8_FEB8_6659_FD93;
const LEAVING: u64 = BASE.wrapping_pow(CONTEXT as u32);

/// A period that the uses may follow.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    period: u64,
    /// Uses that were those of a period ago, and other uses.
    same: u64,
    other: u64,
}

/// Pages go by their [names](super::names::Names).
#[derive(Debug)]
pub(super) struct CycleRecorder {
    /// The most uses it may remember: a power of two, or 0.
    most: usize,
    history: VecDeque<u32>,
    /// Uses so far.
    now: u64,
    /// A polynomial of the last uses (R. M. Karp and M. O. Rabin, "Efficient randomized pattern-matching algorithms",
    /// IBM Journal of Research and Development 31(2), 1987).
    context: u64,
    /// By the hash of a context: when the use was that it led to, modulo 2^32; 0 if there was none. Contexts may share
    /// an entry; the last one stays.
    near: Vec<u32>,
    far: Vec<u32>,
    candidate: Option<Candidate>,
}

impl CycleRecorder {
    /// How many uses each recorder may remember if there are this many.
    pub(super) fn share(recorders: usize) -> usize {
        let each = ALL / recorders.max(1);
        if each < LEAST { 0 } else { 1 << each.min(HISTORY).ilog2() }
    }

    /// A recorder of at most `most` uses, as [`share`](Self::share) returns it.
    pub(super) fn new(most: usize) -> Self {
        let (near, far) = (Vec::new(), Vec::new());
        Self { most, history: VecDeque::new(), now: 0, context: 0, near, far, candidate: None }
    }

    /// Sets the most uses to remember. Older uses are forgotten.
    pub(super) fn remember_most(&mut self, most: usize) {
        if most == self.most {
            return;
        }
        self.most = most;
        self.history.drain(..self.history.len().saturating_sub(most));
        self.history.shrink_to(most);
        (self.near, self.far) = (Vec::new(), Vec::new());
        self.candidate = self.candidate.filter(|candidate| candidate.period < self.history.len() as u64);
    }

    /// Records a use. Once the order repeats, returns one period of it, which ends with this use.
    pub(super) fn push(&mut self, page: u32) -> Option<Vec<u32>> {
        let found = self.remember(page)?;
        let Some(candidate) = &mut self.candidate else {
            self.candidate = found.map(|period| Candidate { period, same: 0, other: 0 });
            return None;
        };
        let same = ago(&self.history, candidate.period) == Some(page);
        candidate.same += u64::from(same);
        candidate.other += u64::from(!same);
        if candidate.other > 2 + candidate.same / 8 {
            self.candidate = None;
        } else if same && candidate.same >= AGREE_MIN.max(candidate.period / 4) {
            let start = self.history.len() - candidate.period as usize;
            let period = self.history.range(start..).copied().collect();
            self.candidate = None;
            return Some(period);
        }
        None
    }

    /// Records a use as [`push`](Self::push) does, while the period returned last is still believed.
    pub(super) fn push_believed(&mut self, page: u32) {
        self.remember(page);
    }

    /// Whether a cycle of `uses` uses may be a part of a longer one that can be recognised.
    pub(super) fn may_be_a_part(&self, uses: u64) -> bool {
        uses <= self.most as u64 / 8
    }

    /// Whether nothing is remembered.
    pub(super) fn is_empty(&self) -> bool {
        self.history.is_empty()
    }

    /// Records a use. `None` if the page was the last one used already; otherwise what [`look_back`](Self::look_back)
    /// found.
    fn remember(&mut self, page: u32) -> Option<Option<u64>> {
        // Neighbouring tensors share a page: one stay, not two uses.
        if self.history.back() == Some(&page) || self.most == 0 {
            return None;
        }
        self.now += 1;
        if self.history.len() == self.most {
            self.history.pop_front();
        }
        self.history.push_back(page);
        let leaving = ago(&self.history, CONTEXT as u64).map_or(0, |page| u64::from(page) + 1);
        self.context = self
            .context
            .wrapping_mul(BASE)
            .wrapping_add(u64::from(page) + 1)
            .wrapping_sub(leaving.wrapping_mul(LEAVING));
        Some(self.look_back())
    }

    /// Records this use under its context. Returns how many uses ago the same context led to the same uses, unless
    /// there is a candidate already.
    fn look_back(&mut self) -> Option<u64> {
        if self.history.len() < CONTEXT {
            return None;
        }
        if self.near.is_empty() {
            (self.near, self.far) = (vec![0; NEAR.min(self.most / NEAR_PER)], vec![0; self.most / FAR_PER]);
        }
        let Self { history, near, far, most, .. } = self;
        let (near_len, far_len) = (near.len(), far.len());
        // The polynomial's high bits depend on all of it.
        let mixed = (self.context ^ self.context >> 32).wrapping_mul(BASE);
        let now = self.now as u32;
        let mut before = std::mem::replace(&mut near[(mixed >> 32) as usize % near_len], now);
        // An older entry is more likely to be another context's.
        let mut reach = 4 * near_len as u32;
        if mixed >> CHOSEN_SHIFT == 0 {
            let far = std::mem::replace(&mut far[(mixed >> 32) as usize % far_len], now);
            if before == 0 || now.wrapping_sub(before) > reach {
                (before, reach) = (far, *most as u32);
            }
        }
        let period = now.wrapping_sub(before);
        if self.candidate.is_some() || before == 0 || period > reach {
            return None;
        }
        let period = u64::from(period);
        let same = (0..CONTEXT as u64).all(|back| ago(history, back) == ago(history, period + back));
        same.then_some(period)
    }

    /// Bytes that it has allocated.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        4 * (self.history.capacity() + self.near.capacity() + self.far.capacity())
    }

    pub(super) fn clear(&mut self) {
        *self = Self::new(self.most);
    }
}

/// The page that was used this many uses before the last one.
fn ago(history: &VecDeque<u32>, uses: u64) -> Option<u32> {
    let back = usize::try_from(uses).ok()?.checked_add(1)?;
    history.len().checked_sub(back).map(|at| history[at])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    const PAGES: usize = 2_000;

    #[test]
    fn a_cycle_with_a_changing_page_in_it_is_recognised_in_its_second_pass() {
        let mut recorder = CycleRecorder::new(HISTORY);
        let mut found = None;
        for (at, n) in (0..3).flat_map(|pass| std::iter::once(1000 + pass * 7).chain(0..100)).enumerate() {
            if let Some(plan) = recorder.push(n) {
                found = Some((at, plan));
                break;
            }
        }
        let (at, plan) = found.expect("the cycle is recognised");
        assert!(at < 2 * 101, "only at use {at}");
        assert_eq!(plan.len(), 101);
    }

    /// How many uses it takes to recognise the passes, and the period.
    fn recognised(uses: impl Iterator<Item = u32>) -> Option<(usize, usize)> {
        let mut recorder = CycleRecorder::new(HISTORY);
        uses.enumerate().find_map(|(at, page)| recorder.push(page).map(|plan| (at + 1, plan.len())))
    }

    #[test]
    fn pages_may_come_several_times_in_a_pass() {
        // Two tensors that share pages with their neighbours, as the norms and the projections of a layer do.
        let layer = |layer: u32| [5 * layer, 5 * layer + 1, 5 * layer, 5 * layer + 2, 5 * layer + 1, 5 * layer + 3];
        let pass: Vec<u32> = (0..50).flat_map(layer).collect();
        let (at, period) = recognised(pass.iter().copied().cycle().take(900)).expect("recognised");
        assert!((300..=480).contains(&at) && period == 300, "{period} at use {at}");
        // Forward, and backward.
        let pass: Vec<u32> = (0..100).chain((0..100).rev()).collect();
        let (at, period) = recognised(pass.into_iter().cycle().take(600)).expect("recognised");
        // At both ends a page is used twice in a row.
        assert!((198..=330).contains(&at) && period == 198, "{period} at use {at}");
    }

    #[test]
    fn an_embedding_that_is_the_output_too_does_not_hide_the_cycle() {
        // A page of the embedding, the layers, then all of the embedding.
        let pass = |n: u32| std::iter::once(n * 37 % 110).chain(110..370).chain(0..110);
        let (at, period) = recognised((0..4).flat_map(pass)).expect("recognised");
        assert!(at <= 2 * 371 && (370..=372).contains(&period), "{period} at use {at}");
    }

    #[test]
    fn cycles_of_any_length_are_recognised_soon() {
        for pages in [9, 16, 25, 60, 200, 1000, 1900] {
            for before in [0, 3000] {
                let mut random = Random(u64::from(pages + before));
                let others: Vec<u32> = (0..before).map(|_| random.below(PAGES as u32)).collect();
                let uses = others.into_iter().chain((0..pages).cycle().take((3 * pages as usize).max(60)));
                let (at, period) = recognised(uses).unwrap_or_else(|| panic!("{pages} pages after {before} uses"));
                assert_eq!(period as u32, pages);
                // A pass, the context of a place that is remembered, and a quarter of a pass that agrees.
                let latest = before as usize + 5 * pages as usize / 4 + 100;
                assert!(at <= latest, "{pages} pages, use {at}");
            }
        }
    }

    #[test]
    fn random_use_is_not_a_cycle() {
        let mut recorder = CycleRecorder::new(HISTORY);
        let mut x = 12345u32;
        for _ in 0..20_000 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            assert!(recorder.push((x >> 16) % 500).is_none());
        }
    }

    #[test]
    fn recorders_share_their_memory() {
        for recorders in [0, 1, 8, 9, 64, 500, 2048, 2049, 1_000_000] {
            let most = CycleRecorder::share(recorders);
            assert!(most <= HISTORY && most * recorders <= ALL);
            let mut recorder = CycleRecorder::new(most);
            let mut random = Random(1);
            (0..HISTORY + 100).for_each(|_| assert!(recorder.push(random.below(1 << 30)).is_none()));
            assert!(recorder.bytes() <= most * 4 * 21 / 16, "{} of {most}", recorder.bytes());
            assert_eq!(most >= LEAST, recorders <= ALL / LEAST);
            // A smaller share holds at once, and what is left is enough to go on.
            recorder.remember_most(most / 2);
            assert!(recorder.bytes() <= most / 2 * 4 * 21 / 16);
            if most / 2 < LEAST {
                continue;
            }
            let pages = LEAST as u32 / 4;
            let found = (0..4 * pages).find_map(|n| recorder.push(n % pages));
            assert_eq!(found.map(|plan| plan.len()), Some(pages as usize), "{recorders}");
        }
    }
}
