//! Recognising that the order of use repeats.
//!
//! A pass over a model uses its pages in one order, and the next pass again: on a cycle of period `d` each use is that of
//! `d` uses ago. The few that are not (an embedding row that differs from pass to pass) do not count against it. What `d` is,
//! pages alone do not tell, for some are used several times a pass; so it is sought where the last few uses came in the same
//! order before.

use std::collections::VecDeque;
use std::ops::Range;

use crate::pager::numbers::fit;

/// Uses remembered: a cycle longer than this is not recognised. 1 MiB.
const HISTORY: usize = 1 << 18;
/// Uses in a row that have to be the same for a period to be looked at.
const CONTEXT: usize = 8;
/// Of so many uses, one is remembered by what came before it.
const LANDMARK: u64 = 16;
/// Landmarks that can be found. 64 KiB.
const LANDMARKS: usize = HISTORY / LANDMARK as usize;
/// The fewest uses that have to agree, however short the cycle.
const AGREE_MIN: u64 = 16;

/// A period that uses may follow.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    period: u64,
    /// Uses that were those of a period ago, and others.
    same: u64,
    other: u64,
}

/// Pages go by their numbers.
#[derive(Debug, Default)]
pub(super) struct CycleRecorder {
    history: VecDeque<u32>,
    /// Uses so far.
    now: u64,
    /// By page: whether it is in the history, or was.
    known: Vec<bool>,
    /// By a hash of the uses that led to it: when a landmark was. Another may have taken its place.
    landmarks: Vec<u64>,
    candidate: Option<Candidate>,
}

impl CycleRecorder {
    /// Takes in a use; pages have numbers below `numbers`. Returns one period of the order, ending with this use, once
    /// it repeats.
    pub(super) fn push(&mut self, page: u32, numbers: usize) -> Option<Vec<u32>> {
        if self.history.back() == Some(&page) {
            // Neighbouring tensors share a page: one stay, not two uses.
            return None;
        }
        if self.known.len() < numbers {
            fit(&mut self.known, numbers, false);
        }
        let known = std::mem::replace(self.known.get_mut(page as usize)?, true);
        self.now += 1;
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(page);
        if let Some(candidate) = &mut self.candidate {
            let same = ago(&self.history, candidate.period) == Some(page);
            candidate.same += u64::from(same);
            candidate.other += u64::from(!same);
            if candidate.other > 2 + candidate.same / 8 {
                self.candidate = None;
            } else if same && candidate.same >= AGREE_MIN.max(candidate.period / 4) {
                let start = self.history.len() - candidate.period as usize;
                return Some(self.history.range(start..).copied().collect());
            }
        }
        if known || self.now % LANDMARK == 0 {
            self.look_back();
        }
        None
    }

    /// Looks for a landmark that what led to this use has led to before, and makes this use one, now and then.
    fn look_back(&mut self) {
        if self.history.len() < CONTEXT {
            return;
        }
        let context = || self.history.range(self.history.len() - CONTEXT..);
        // FNV-1a over words: the history decides whether a place is the one that was meant.
        let hash = context().fold(0xCBF2_9CE4_8422_2325_u64, |hash, page| {
            (hash ^ u64::from(*page)).wrapping_mul(0x0000_0100_0000_01B3)
        });
        let place = (hash ^ hash >> 32) as usize % LANDMARKS;
        let before = self.landmarks.get(place).copied().unwrap_or(0);
        if self.candidate.is_none() && before > 0 && before < self.now {
            let period = self.now - before;
            let then = (0..CONTEXT as u64).rev().map(|back| ago(&self.history, period + back));
            if context().copied().map(Some).eq(then) {
                self.candidate = Some(Candidate { period, same: 0, other: 0 });
            }
        }
        if self.now % LANDMARK == 0 {
            if self.landmarks.is_empty() {
                self.landmarks = vec![0; LANDMARKS];
            }
            self.landmarks[place] = self.now;
        }
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// The pages with these numbers are gone.
    pub(super) fn forget(&mut self, numbers: Range<usize>) {
        let known = numbers.start.min(self.known.len())..numbers.end.min(self.known.len());
        if self.known[known].contains(&true) {
            self.clear();
        }
    }
}

/// The page that was used so many uses before the last one.
fn ago(history: &VecDeque<u32>, uses: u64) -> Option<u32> {
    let back = usize::try_from(uses).ok()?.checked_add(1)?;
    history.len().checked_sub(back).map(|at| history[at])
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: usize = 2_000;

    #[test]
    fn a_cycle_with_a_changing_page_in_it_is_recognised_in_its_second_pass() {
        let mut recorder = CycleRecorder::default();
        let mut found = None;
        for (at, n) in (0..3).flat_map(|pass| std::iter::once(1000 + pass * 7).chain(0..100)).enumerate() {
            if let Some(plan) = recorder.push(n, PAGES) {
                found = Some((at, plan));
                break;
            }
        }
        let (at, plan) = found.expect("the cycle is recognised");
        assert!(at < 2 * 101, "only at use {at}");
        assert_eq!(plan.len(), 101);
    }

    /// How many uses it takes to recognise passes, and the period.
    fn recognised(uses: impl Iterator<Item = u32>) -> Option<(usize, usize)> {
        let mut recorder = CycleRecorder::default();
        uses.enumerate().find_map(|(at, page)| recorder.push(page, PAGES).map(|plan| (at + 1, plan.len())))
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
    fn random_use_is_not_a_cycle() {
        let mut recorder = CycleRecorder::default();
        let mut x = 12345u32;
        for _ in 0..20_000 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            assert!(recorder.push((x >> 16) % 500, PAGES).is_none());
        }
    }
}
