//! What pages without an order are worth, by how often and how lately they were used.
//!
//! Each use of a page counts, and what it counts halves with time. So the score of a page with uses at times `t` is
//! `sum(2^-((now - t) / h))`, where `h` is the half-life. A short half-life is recency, a long one is frequency, and
//! there are all degrees between them (D. Lee et al., "LRFU: a spectrum of policies that subsumes the least recently
//! used and least frequently used policies", IEEE Transactions on Computers 50(12), 2001). Time is counted in uses, in
//! units of the pages that there is room for.
//!
//! Which half-life fits depends on the program. So each is tried on a sample of the pages, in a cache of its own that
//! holds no bytes, and the one with the most hits lately decides (as in miniature simulations: C. Waldspurger et al.,
//! "Cache modeling and optimization using miniature simulations", USENIX ATC 2017).
//!
//! Scores are kept as logarithms, `log2(sum(2^(t / h)))`: without `now`, so that they change only at a use.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::bits::Bits;
use crate::steps::step;

/// The half-lives that are tried, in rooms: as many uses as there is room for pages.
const HALF_LIVES: [f64; 3] = [1.0, 8.0, 64.0];
const TRIALS: usize = HALF_LIVES.len();
/// Which of them decides at first.
const FIRST: usize = 1;
/// A trial has room for at least this many pages, or for all.
const SAMPLE_ROOM: usize = 128;
const SHIFT_MAX: u32 = 6;
/// Uses of the sample between looks at the trials, in rooms of a trial.
const LOOK: u64 = 2;
/// Another half-life decides if it had a hit more in so many uses.
const BETTER: u64 = 64;
/// Room that time is counted by, at the least.
const ROOM_LEAST: usize = 16;
/// Scores have 16 bits behind the point.
const ONE: f64 = 65536.0;
/// Where time is set back to, in half-lives, when it would leave the range of scores, and what is then left of it.
const TIME_MAX: f64 = 60_000.0;
const TIME_LEFT: f64 = 1_000.0;

/// A page's score by each half-life. 0 if it was never used, or not for ages.
type Score = [u32; TRIALS];

/// A cache of the sample that holds no bytes.
#[derive(Debug, Default)]
struct Trial {
    here: BTreeSet<(u32, u32)>,
    marks: Bits,
    /// Hits, of which each look takes half.
    hits: u64,
}

impl Trial {
    fn has(&self, number: u32) -> bool {
        self.marks.contains(number as usize)
    }

    fn add(&mut self, number: u32, score: u32) {
        self.here.insert((score, number));
        self.marks.reach(number as usize + 1);
        self.marks.insert(number as usize);
    }

    fn remove(&mut self, number: u32, score: u32) {
        self.here.remove(&(score, number));
        self.marks.remove(number as usize);
    }
}

/// The scores of all pages.
#[derive(Debug)]
pub(super) struct Scores {
    /// By number; 12 bytes a page.
    scores: Vec<Score>,
    /// Time in half-lives.
    now: [f64; TRIALS],
    trials: [Trial; TRIALS],
    /// The half-life that decides.
    chosen: usize,
    room: usize,
    /// Pages whose hashed number has this many zeros are in the sample.
    shift: u32,
    /// Uses of the sample since the last look, and what is left of those before.
    uses: u64,
    before: u64,
}

/// The score of a page that had this one, and is used now.
fn used_again(score: u32, now: f64) -> u32 {
    let now = (now * ONE) as u32;
    let (most, least) = (score.max(now), score.min(now));
    // log2(2^most + 2^least).
    let more = (-f64::from(most - least) / ONE).exp2().ln_1p() * std::f64::consts::LOG2_E;
    if score == 0 { now } else { most.saturating_add((more * ONE) as u32) }
}

impl Scores {
    pub(super) fn new() -> Self {
        Self {
            scores: Vec::new(),
            now: [1.0; TRIALS],
            trials: Default::default(),
            chosen: FIRST,
            room: ROOM_LEAST,
            shift: 0,
            uses: 0,
            before: 0,
        }
    }

    /// The page's place in the order of worth: the least goes first.
    pub(super) fn place(&self, number: u32) -> u32 {
        self.scores.get(number as usize).map_or(0, |score| score[self.chosen])
    }

    fn is_sampled(&self, number: u32) -> bool {
        let hashed = u64::from(number).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        hashed.trailing_zeros() >= self.shift
    }

    /// There is room for so many pages.
    pub(super) fn fit(&mut self, room: usize) {
        self.room = room.max(ROOM_LEAST);
        let shift = (self.room / SAMPLE_ROOM).checked_ilog2().unwrap_or(0).min(SHIFT_MAX);
        if shift != self.shift {
            self.shift = shift;
            self.trials = Default::default();
            (self.uses, self.before) = (0, 0);
        }
    }

    /// The page is used. Whether places have changed other than this page's.
    pub(super) fn used(&mut self, number: u32) -> bool {
        let at = number as usize;
        if at >= self.scores.len() {
            self.scores.resize(at + 1, [0; TRIALS]);
        }
        let before = self.scores[at];
        for nth in 0..TRIALS {
            self.now[nth] += 1.0 / (HALF_LIVES[nth] * self.room as f64);
            self.scores[at][nth] = used_again(before[nth], self.now[nth]);
        }
        let mut changed = false;
        if self.is_sampled(number) {
            let room = (self.room >> self.shift).max(1);
            for (nth, trial) in self.trials.iter_mut().enumerate() {
                if trial.has(number) {
                    trial.hits += 1;
                    trial.remove(number, before[nth]);
                }
                while trial.here.len() >= room {
                    let Some((score, gone)) = trial.here.first().copied() else { break };
                    trial.remove(gone, score);
                }
                trial.add(number, self.scores[at][nth]);
            }
            self.uses += 1;
            changed = self.uses >= LOOK * room as u64 && self.look();
        }
        for nth in 0..TRIALS {
            if self.now[nth] > TIME_MAX {
                self.set_back(nth);
                changed |= nth == self.chosen;
            }
        }
        changed
    }

    /// Whether another half-life decides from now on.
    fn look(&mut self) -> bool {
        let uses = self.uses + self.before;
        let best = (0..TRIALS).max_by_key(|nth| self.trials[*nth].hits).unwrap_or(self.chosen);
        let better = self.trials[best].hits > self.trials[self.chosen].hits + uses / BETTER;
        if better {
            self.chosen = best;
        }
        self.trials.iter_mut().for_each(|trial| trial.hits /= 2);
        (self.uses, self.before) = (0, uses / 2);
        better
    }

    /// Sets time back. Scores of pages that were not used for ages become 0.
    fn set_back(&mut self, nth: usize) {
        let less = self.now[nth] - TIME_LEFT;
        self.now[nth] = TIME_LEFT;
        step(self.scores.len());
        self.scores.iter_mut().for_each(|score| score[nth] = score[nth].saturating_sub((less * ONE) as u32));
        let scores = &self.scores;
        let here = std::mem::take(&mut self.trials[nth].here);
        self.trials[nth].here = here.into_iter().map(|(_, number)| (scores[number as usize][nth], number)).collect();
    }

    /// These numbers are those of other pages from now on, or of none.
    pub(super) fn forget(&mut self, numbers: Range<usize>) {
        for at in numbers.start..numbers.end.min(self.scores.len()) {
            let score = std::mem::take(&mut self.scores[at]);
            for (nth, trial) in self.trials.iter_mut().enumerate() {
                if trial.has(at as u32) {
                    trial.remove(at as u32, score[nth]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{FIRST, HALF_LIVES, ONE, Scores, TIME_LEFT, TIME_MAX, used_again};

    /// Each use counts, and what it counted halves with each half-life.
    #[test]
    fn a_score_is_the_sum_of_what_is_left_of_each_use() {
        let mut score = 0;
        let mut uses = Vec::new();
        for now in [1.0, 1.5, 1.5, 4.0, 30.0, 31.0] {
            score = used_again(score, now);
            uses.push(now);
            let sum: f64 = uses.iter().map(|at: &f64| at.exp2()).sum();
            assert!((f64::from(score) / ONE - sum.log2()).abs() < 1e-3, "{now}: {score}");
        }
    }

    #[test]
    fn the_order_outlives_a_step_back_in_time() {
        let mut scores = Scores::new();
        for number in 0..40 {
            scores.used(number);
            scores.now[FIRST] += 1.0;
        }
        let before: Vec<u32> = (0..40).map(|number| scores.place(number)).collect();
        scores.now[FIRST] = TIME_MAX;
        scores.scores.iter_mut().for_each(|score| score[FIRST] += ((TIME_MAX - 42.0) * ONE) as u32);
        assert!(scores.used(40));
        assert!(before.is_sorted() && (0..41).map(|number| scores.place(number)).is_sorted());
        assert!(scores.place(0) > 0 && scores.place(40) < (2.0 * TIME_LEFT * ONE) as u32);
    }

    /// One use after the other, of 300 pages with room for 100, drawn by `draw` from the number of the use.
    fn chosen(draw: impl Fn(u64) -> u32) -> f64 {
        let mut scores = Scores::new();
        scores.fit(100);
        for use_ in 0..40_000 {
            scores.used(draw(use_));
        }
        HALF_LIVES[scores.chosen]
    }

    fn random(n: u64) -> u64 {
        let mixed = n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 33
    }

    #[test]
    fn the_half_life_follows_the_uses() {
        // Half of the uses are of 40 pages, always the same: how often counts.
        let often = chosen(|n| (if n % 2 == 0 { random(n) % 40 } else { 40 + random(n) % 260 }) as u32);
        assert!(often >= 8.0, "{often}");
        // What was used lately is used again, and something else later.
        let lately = chosen(|n| ((n / 200 * 20 + random(n) % 90) % 300) as u32);
        assert!(lately <= 1.0, "{lately}");
    }

    #[test]
    fn numbers_are_given_to_other_pages() {
        let mut scores = Scores::new();
        scores.fit(16);
        for round in 0..100 {
            for number in 0..30 {
                scores.used(number + round % 3);
            }
            scores.forget(10..20);
            assert_eq!(scores.place(15), 0);
        }
        assert!(scores.place(25) > 0);
        for (nth, trial) in scores.trials.iter().enumerate() {
            let fits =
                |(score, number): &(u32, u32)| trial.has(*number) && scores.scores[*number as usize][nth] == *score;
            assert!(trial.here.len() <= 16 && trial.here.iter().all(fits), "{trial:?}");
        }
    }
}
