//! Whose turn it is, where more threads touch pages than frames can serve at once.
//!
//! An instruction may need two pages at a time, at the boundary between them. If other threads' pages took the place
//! of the first while the second is read, no thread would ever get on. So a thread has a turn: the last two pages that
//! were brought for it stay pinned. There are as many turns as leave most frames free; other threads wait in line. A
//! turn ends when its thread touches a third page, which says that it got on, or after a time, since a thread may
//! touch nothing more. A thread that lost its turn before it could use it makes that time longer.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A thread waits for the page of this address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub address: u64,
    pub thread: u64,
    /// Whether it is a write that waits.
    pub writes: bool,
}

/// Pages that an instruction may need at once.
pub const AT_ONCE: usize = 2;
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(256);
/// Turns that ended by time, of which is known whether they were too short.
const PAST: usize = 64;

#[derive(Debug)]
struct Turn {
    thread: u64,
    /// The oldest first.
    pages: VecDeque<u64>,
    /// The one of them that the thread waits for.
    waits: Option<u64>,
    /// Whether it is a write that waits for it.
    writes: bool,
    /// Since when all of them are there; `None` while one is on its way.
    since: Option<Instant>,
}

/// The turns, and the threads in line.
#[derive(Debug)]
pub struct Turns {
    turns: Vec<Turn>,
    line: VecDeque<Fault>,
    past: VecDeque<(u64, VecDeque<u64>)>,
    least: Duration,
}

impl Default for Turns {
    fn default() -> Self {
        Self { turns: Vec::new(), line: VecDeque::new(), past: VecDeque::new(), least: SHORTEST }
    }
}

impl Turns {
    /// Whether the thread may have this page now; otherwise it is in line. There are at most `most` turns.
    pub fn may_have(&mut self, fault: Fault, page: u64, most: usize) -> bool {
        let Fault { thread, .. } = fault;
        if let Some(at) = self.past.iter().position(|(of, pages)| *of == thread && pages.contains(&page)) {
            self.past.remove(at);
            self.least = (self.least * 2).min(LONGEST);
        }
        // A thread waits for one page at a time. What it waited for before, it has got.
        let waits = self.line.iter().position(|other| other.thread == thread);
        if let Some(waiting) = waits.and_then(|at| self.line.get_mut(at)) {
            *waiting = fault;
            return false;
        }
        let Some(at) = self.turns.iter().position(|turn| turn.thread == thread) else {
            if self.turns.len() < most.max(1) && self.line.is_empty() {
                self.begin(fault, page);
                return true;
            }
            self.line.push_back(fault);
            return false;
        };
        let turn = &mut self.turns[at];
        if !turn.pages.contains(&page) && turn.pages.len() == AT_ONCE {
            self.least = (self.least - self.least / 16).max(SHORTEST);
            if !self.line.is_empty() {
                self.turns.swap_remove(at);
                self.line.push_back(fault);
                return false;
            }
            turn.pages.pop_front();
        }
        if !turn.pages.contains(&page) {
            turn.pages.push_back(page);
        }
        (turn.waits, turn.writes, turn.since) = (Some(page), fault.writes, None);
        true
    }

    fn begin(&mut self, fault: Fault, page: u64) {
        let Fault { thread, writes, .. } = fault;
        self.turns.push(Turn { thread, pages: VecDeque::from([page]), waits: Some(page), writes, since: None });
    }

    /// Who is in line first.
    pub fn first_in_line(&self) -> Option<Fault> {
        self.line.front().copied()
    }

    /// The next thread in line whose turn it is now. `page_of` is the page of an address.
    pub fn next(&mut self, most: usize, now: Instant, page_of: impl Fn(u64) -> u64) -> Option<Fault> {
        if self.line.is_empty() {
            return None;
        }
        if self.turns.len() >= most.max(1) {
            let ended = self.turns.iter().position(|turn| turn.since.is_some_and(|since| now >= since + self.least))?;
            let turn = self.turns.swap_remove(ended);
            self.past.push_back((turn.thread, turn.pages));
            if self.past.len() > PAST {
                self.past.pop_front();
            }
        }
        let fault = self.line.pop_front()?;
        self.begin(fault, page_of(fault.address));
        Some(fault)
    }

    /// How long until [`next`](Self::next) may have something new to say; `None` if only an event can change that.
    pub fn until_next(&self, now: Instant) -> Option<Duration> {
        if self.line.is_empty() {
            return None;
        }
        self.turns.iter().filter_map(|turn| turn.since).map(|since| (since + self.least).duration_since(now)).min()
    }

    /// The page is there, or can never be. Who waits in line for it is awake again.
    pub fn ended(&mut self, page: u64, now: Instant, page_of: impl Fn(u64) -> u64) {
        self.line.retain(|fault| page_of(fault.address) != page);
        // A thread that waits for its other page goes on waiting.
        let ends = |turn: &&mut Turn| turn.pages.contains(&page) && turn.waits.is_none_or(|waits| waits == page);
        for turn in self.turns.iter_mut().filter(ends) {
            (turn.waits, turn.since) = (None, Some(now));
        }
    }

    /// Leaves one turn, of a thread that waits if there is one. The threads of the others are in line again.
    pub fn leave_one(&mut self) {
        let first = self.turns.iter().position(|turn| turn.waits.is_some()).unwrap_or(0);
        if !self.turns.is_empty() {
            self.turns.swap(0, first);
        }
        for turn in self.turns.drain(1.min(self.turns.len())..) {
            self.line.extend(turn.waits.map(|address| Fault { address, thread: turn.thread, writes: turn.writes }));
        }
    }

    /// Whether nobody is in line.
    pub fn is_line_empty(&self) -> bool {
        self.line.is_empty()
    }

    /// Forgets the turns and the threads in line whose addresses are not to be kept.
    pub fn keep(&mut self, keep: impl Fn(u64) -> bool) {
        self.line.retain(|fault| keep(fault.address));
        self.turns.retain(|turn| turn.pages.iter().all(|page| keep(*page)));
    }

    /// The pages of all turns.
    pub fn pages(&self) -> Vec<u64> {
        self.turns.iter().flat_map(|turn| turn.pages.iter().copied()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(thread: u64, address: u64) -> Fault {
        Fault { address, thread, writes: false }
    }

    fn asks(turns: &mut Turns, thread: u64, page: u64) -> bool {
        turns.may_have(fault(thread, page), page, 1)
    }

    #[test]
    fn two_pages_stay_until_a_third_is_touched() {
        let (mut turns, now) = (Turns::default(), Instant::now());
        assert!(asks(&mut turns, 1, 10) && !asks(&mut turns, 2, 20));
        turns.ended(10, now, |page| page);
        // The second page of the first thread passes the line.
        assert!(asks(&mut turns, 1, 11));
        turns.ended(11, now, |page| page);
        assert_eq!((turns.pages(), turns.next(1, now, |page| page)), (vec![10, 11], None));
        // The third does not.
        assert!(!asks(&mut turns, 1, 12));
        assert_eq!(turns.next(1, now, |page| page), Some(fault(2, 20)));
        assert_eq!((turns.pages(), turns.next(1, now, |page| page)), (vec![20], None));
    }

    #[test]
    fn alone_a_thread_never_waits() {
        let mut turns = Turns::default();
        assert!((0..9).all(|page| asks(&mut turns, 1, page)));
        assert_eq!(turns.pages(), [7, 8]);
    }

    #[test]
    fn a_turn_ends_by_time_once_its_pages_are_there_and_later_if_that_was_too_soon() {
        let (mut turns, now) = (Turns::default(), Instant::now());
        assert!(asks(&mut turns, 1, 10) && !asks(&mut turns, 2, 20));
        assert_eq!((turns.next(1, now + LONGEST, |page| page), turns.until_next(now)), (None, None));
        turns.ended(10, now, |page| page);
        assert_eq!(turns.until_next(now), Some(SHORTEST));
        assert_eq!(turns.next(1, now + SHORTEST, |page| page), Some(fault(2, 20)));
        // The first had no time to use its page.
        assert!(!asks(&mut turns, 1, 10));
        turns.ended(20, now, |page| page);
        assert_eq!(turns.until_next(now), Some(2 * SHORTEST));
    }

    #[test]
    fn one_turn_is_left_and_it_is_of_a_thread_that_waits() {
        let (mut turns, now) = (Turns::default(), Instant::now());
        for thread in 1..=3 {
            assert!(turns.may_have(fault(thread, 10 * thread), 10 * thread, 3));
            turns.ended(10 * thread, now, |page| page);
        }
        assert!(turns.may_have(fault(2, 21), 21, 3) && turns.may_have(fault(3, 31), 31, 3));
        turns.leave_one();
        assert_eq!((turns.pages(), turns.first_in_line()), (vec![20, 21], Some(fault(3, 31))));
        turns.ended(21, now, |page| page);
        assert_eq!(turns.next(1, now + SHORTEST, |page| page), Some(fault(3, 31)));
        assert!(turns.is_line_empty());
    }

    /// A page that was there may go while its thread still has the turn, and be touched again.
    #[test]
    fn regression_a_thread_that_waits_for_the_older_of_its_pages_is_put_in_line_for_that() {
        let (mut turns, now) = (Turns::default(), Instant::now());
        for page in [10, 11] {
            assert!(turns.may_have(fault(1, page), page, 2));
            turns.ended(page, now, |page| page);
        }
        assert!(turns.may_have(fault(2, 20), 20, 2));
        assert!(turns.may_have(fault(1, 10), 10, 2));
        // What comes for somebody else does not end its wait.
        turns.ended(11, now, |page| page);
        turns.turns.swap(0, 1);
        turns.leave_one();
        assert_eq!((turns.pages(), turns.first_in_line()), (vec![20], Some(fault(1, 10))));
    }

    #[test]
    fn who_waits_for_a_page_that_comes_leaves_the_line() {
        let (mut turns, now) = (Turns::default(), Instant::now());
        assert!(asks(&mut turns, 1, 10) && !asks(&mut turns, 2, 10) && !asks(&mut turns, 3, 30));
        // A thread that touches something else waits for that.
        assert!(!asks(&mut turns, 3, 31));
        turns.ended(10, now, |page| page);
        assert_eq!(turns.next(1, now + SHORTEST, |page| page), Some(fault(3, 31)));
        assert_eq!(turns.next(1, now + SHORTEST, |page| page), None);
    }
}
