//! Which pages are hidden, so that their next use is seen.
//!
//! A page that the program sees raises no fault, so its uses go unnoticed. Where an order is followed, that is no loss.
//! Where none is, each page is hidden again after use, until an order is found: *learning*. If none is found in some
//! passes, uses have no order that could be learned, and a fault for each of them would be paid for ever. From then on
//! a few pages are looked at, as CLOCK does (F. J. Corbato, "A paging experiment with the Multics system", MIT Project
//! MAC report MAC-M-384, 1968): a hand goes over the pages that are there, in the order in which their last use was
//! seen, and hides them; whoever is touched before it leaves is used once more, and goes to the end of the queue. The
//! hand goes on only where pages have to leave, and as far as the time that its faults take allows.
//!
//! Times are since some moment, and given by the caller.

use std::collections::VecDeque;
use std::time::Duration;

/// Uses of each page that is used at all, after which an order would have been found: a pass and a quarter, of a page
/// that a pass uses three times.
const PATIENCE: u64 = 4;
const PATIENCE_MAX: u64 = 64;
/// Uses that are seen before anything is concluded from them.
const USES_LEAST: u64 = 256;
/// Faults of pages that are hidden to be looked at may take one of this many parts of the time.
const PART: u32 = 100;
/// The most time that is saved up for them.
const SAVED: Duration = Duration::from_millis(20);
/// After learning in vain, it is tried again after so many times the time that its faults took.
const AGAIN: u32 = 200;
/// The same where the pattern of faults is another one now.
const CHANGED: u32 = 20;
/// Faults that are compared with those before, and the difference that counts, in parts of a window.
const WINDOW: u32 = 256;
const DIFFERENCE: u32 = 4;
/// Pages that are hidden for one that is read.
const HIDES: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// An order is followed: nothing is hidden.
    Following,
    /// Every page is hidden after use.
    Learning,
    /// A few pages are hidden for a look.
    Looking,
}

/// Faults that needed a read: how many, and how many of them were of the page behind the one before.
#[derive(Clone, Copy, Debug, Default)]
struct Pattern {
    faults: u32,
    steps: u32,
    last: u32,
}

impl Pattern {
    fn differs(&self, other: &Self) -> bool {
        self.steps.abs_diff(other.steps) > WINDOW / DIFFERENCE
    }
}

#[derive(Debug)]
pub struct Looks {
    mode: Mode,
    /// Of the phase of learning: uses, pages used, a bit for each, and the time that faults took.
    uses: u64,
    pages: u64,
    used: Vec<u64>,
    took: Duration,
    patience: u64,
    /// When learning ended in vain, and the pattern of faults then.
    ended: Duration,
    before: Option<Pattern>,
    pattern: Pattern,
    /// Pages that the program sees, by their last use that was seen.
    queue: VecDeque<u32>,
    /// Frames that there are for pages.
    frames: usize,
    /// Until when the time for looks is counted, and what is left of it. Below nothing, none is made.
    counted: Duration,
    left: i64,
}

impl Looks {
    /// Of a file of so many pages, of which an order is known, or not.
    pub fn new(pages: u32, has_order: bool) -> Self {
        Self {
            mode: if has_order { Mode::Following } else { Mode::Learning },
            uses: 0,
            pages: 0,
            // Zeros take no memory until they are touched.
            used: vec![0; pages.div_ceil(64) as usize],
            took: Duration::ZERO,
            patience: PATIENCE,
            ended: Duration::ZERO,
            before: None,
            pattern: Pattern::default(),
            queue: VecDeque::new(),
            frames: 0,
            counted: Duration::ZERO,
            left: 0,
        }
    }

    /// Whether every use is seen.
    pub fn is_learning(&self) -> bool {
        self.mode == Mode::Learning
    }

    /// Whether only a few pages are looked at.
    pub fn is_looking(&self) -> bool {
        self.mode == Mode::Looking
    }

    /// Whether the walker follows an order, as it is now, and how many frames there are.
    pub fn follows(&mut self, follows: bool, frames: usize, now: Duration) {
        self.frames = frames;
        match (follows, self.mode) {
            (true, Mode::Learning | Mode::Looking) => {
                (self.mode, self.patience, self.before) = (Mode::Following, PATIENCE, None);
                self.queue = VecDeque::new();
            }
            (false, Mode::Following) => self.learn(PATIENCE),
            (false, Mode::Learning) if self.uses > USES_LEAST.max(self.patience * self.pages) => self.look(now),
            (false, Mode::Looking) => {
                let passed = now.saturating_sub(self.ended);
                if passed > AGAIN * self.took && self.pattern.faults > 0 {
                    self.learn((2 * self.patience).min(PATIENCE_MAX));
                }
            }
            _ => {}
        }
    }

    fn learn(&mut self, patience: u64) {
        self.mode = Mode::Learning;
        (self.uses, self.pages, self.took, self.patience) = (0, 0, Duration::ZERO, patience);
        self.used.fill(0);
        self.queue = VecDeque::new();
    }

    fn look(&mut self, now: Duration) {
        self.mode = Mode::Looking;
        (self.ended, self.counted, self.left) = (now, now, 0);
        (self.before, self.pattern) = (None, Pattern::default());
    }

    /// There was a fault of this page. If it `was_there`, it had been hidden.
    pub fn fault(&mut self, page: u32, was_there: bool, now: Duration) {
        match self.mode {
            Mode::Following => {}
            Mode::Learning => {
                self.uses += 1;
                if let Some(word) = self.used.get_mut(page as usize / 64) {
                    let bit = 1 << (page % 64);
                    self.pages += u64::from(*word & bit == 0);
                    *word |= bit;
                }
            }
            Mode::Looking => {
                if !was_there {
                    self.read(page, now);
                }
            }
        }
    }

    /// A page was read because it was touched.
    fn read(&mut self, page: u32, now: Duration) {
        let pattern = &mut self.pattern;
        pattern.faults += 1;
        pattern.steps += u32::from(pattern.last.checked_add(1) == Some(page));
        pattern.last = page;
        if pattern.faults < WINDOW {
            return;
        }
        let new = std::mem::replace(pattern, Pattern { last: page, ..Pattern::default() });
        let changed = self.before.is_some_and(|before| before.differs(&new));
        if changed && now.saturating_sub(self.ended) > CHANGED * self.took {
            self.learn(PATIENCE);
        } else if !changed {
            self.before = Some(new);
        }
    }

    /// A hidden page was shown to a thread that touched it, which took this long.
    pub fn shown(&mut self, took: Duration) {
        match self.mode {
            Mode::Following => {}
            Mode::Learning => self.took += took,
            Mode::Looking => self.left -= took.as_nanos() as i64,
        }
    }

    /// A page that was used is let go. Returns whether it is to be hidden.
    pub fn let_go(&mut self, page: u32) -> bool {
        if self.mode == Mode::Looking {
            self.queue.push_back(page);
            // What is that long ago has left.
            let over = self.queue.len().saturating_sub(2 * self.frames);
            self.queue.drain(..over);
        }
        self.mode == Mode::Learning
    }

    /// A page was read, and others leave for it: how many are to be hidden now.
    pub fn may_hide(&mut self, now: Duration) -> u32 {
        if self.mode != Mode::Looking {
            return 0;
        }
        let passed = now.saturating_sub(self.counted) / PART;
        self.counted = now;
        self.left = (self.left + passed.as_nanos() as i64).min(SAVED.as_nanos() as i64);
        if self.left > 0 { HIDES } else { 0 }
    }

    /// The page that the hand comes to.
    pub fn next(&mut self) -> Option<u32> {
        self.queue.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const LOOK: Duration = Duration::from_micros(50);

    /// A file of which pages are used, each use a millisecond after the one before; all are there, unless they are told
    /// to be read.
    struct Program {
        looks: Looks,
        now: Duration,
        /// Faults of hidden pages.
        shown: u32,
        hidden: Vec<bool>,
    }

    impl Program {
        fn new(pages: u32, has_order: bool) -> Self {
            Self {
                looks: Looks::new(pages, has_order),
                now: Duration::ZERO,
                shown: 0,
                hidden: vec![true; pages as usize],
            }
        }

        fn uses(&mut self, page: u32, is_read: bool) {
            self.now += MS;
            let hidden = std::mem::take(&mut self.hidden[page as usize]);
            if !hidden && !is_read {
                return;
            }
            if !is_read {
                self.shown += 1;
                self.looks.shown(LOOK);
            }
            self.looks.fault(page, !is_read, self.now);
            if is_read {
                for _ in 0..self.looks.may_hide(self.now) {
                    if let Some(page) = self.looks.next() {
                        self.hidden[page as usize] = true;
                    }
                }
            }
            self.hidden[page as usize] = self.looks.let_go(page);
            self.looks.follows(false, 400, self.now);
        }
    }

    fn numbers(below: u32, count: usize) -> impl Iterator<Item = u32> {
        let mut state = 1_u32;
        std::iter::repeat_with(move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % below
        })
        .take(count)
    }

    #[test]
    fn where_all_pages_are_there_looking_ends() {
        let mut program = Program::new(500, false);
        numbers(500, 2500).for_each(|page| program.uses(page, false));
        assert!(program.shown > 2000, "{}", program.shown);
        // Each page is shown once more, and then nothing costs anything.
        numbers(500, 10_000).for_each(|page| program.uses(page, false));
        let before = program.shown;
        numbers(500, 100_000).for_each(|page| program.uses(page, false));
        assert_eq!(program.shown, before);
    }

    #[test]
    fn looks_take_one_of_a_hundred_parts_of_the_time() {
        let mut program = Program::new(1000, false);
        numbers(1000, 10_000).for_each(|page| program.uses(page, page % 2 == 0));
        let (shown, since) = (program.shown, program.now);
        numbers(1000, 400_000).for_each(|page| program.uses(page, page % 2 == 0));
        let took = LOOK * (program.shown - shown);
        assert!(took <= (program.now - since) / 50, "{took:?} of {:?}", program.now - since);
        assert!(took >= (program.now - since) / 300, "{took:?} of {:?}", program.now - since);
    }

    #[test]
    fn another_pattern_of_faults_is_learned_anew() {
        let mut program = Program::new(10_000, false);
        numbers(100, 450).for_each(|page| program.uses(page, page % 2 == 0));
        assert_eq!(program.looks.mode, Mode::Looking);
        numbers(10_000, 1200).for_each(|page| program.uses(page, page % 2 == 0));
        assert_eq!(program.looks.mode, Mode::Looking);
        (0..2 * WINDOW).for_each(|page| program.uses(page, true));
        assert_eq!(program.looks.mode, Mode::Learning);
    }

    #[test]
    fn an_order_that_is_followed_and_left_again() {
        let mut looks = Looks::new(10, true);
        assert!(!looks.let_go(3));
        looks.follows(false, 4, MS);
        assert!(looks.let_go(3));
        looks.follows(true, 4, MS);
        assert!(!looks.let_go(3) && looks.may_hide(100 * MS) == 0);
    }
}
