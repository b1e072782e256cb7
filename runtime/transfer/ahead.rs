//! Follows what limits a pass with the lookahead.
//!
//! Where the disk limits a pass, as many pages ahead of use suffice as the disk needs in flight for its full rate; each
//! page more is a page less that stays. Where the pass keeps step with the disk, more pages ahead are needed, to read
//! while the program computes (`docs/decisions/0022-settings-by-the-disk.md`).
//!
//! The disk tells which it is: if it has work nearly all the time, it limits the pass. Several windows of reads have to
//! agree before the lookahead changes, so that neither a pause of the program nor a small model's first pass decides.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Reads in a window.
const READS: u32 = 64;
/// Windows in a row that have to agree that the disk limits the pass.
const LIMITED_WINDOWS: u32 = 4;
/// Windows in a row that have to agree that the pass keeps step.
const KEEPING_WINDOWS: u32 = 2;
/// The disk limits the pass if it is busy for at least this part of a window.
const LIMITS: f64 = 0.8;
/// The pass keeps step with the disk if the disk is busy for at most this part of a window.
const KEEPS_STEP: f64 = 0.65;
/// The least time between the first two changes. It doubles with each change: a change makes the policy divide its plans
/// anew, which takes time that grows with the pages.
const PAUSE: Duration = Duration::from_millis(250);
/// How often it doubles.
const DOUBLINGS: u32 = 5;

/// The lookaheads to choose between, in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AheadRange {
    /// Where the disk limits the pass.
    pub least: u32,
    /// Where the pass keeps step with the disk.
    pub full: u32,
}

/// Chooses between the two.
#[derive(Debug, Default)]
pub(super) struct Ahead(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    range: Option<AheadRange>,
    /// Whether `least` is chosen.
    limited: bool,
    /// Reads of this window.
    reads: u32,
    /// When this window began, and how long the disk had been busy by then.
    since: Option<(Instant, Duration)>,
    /// Windows in a row that ask for a change.
    votes: u32,
    changed: Option<Instant>,
    changes: u32,
}

impl Ahead {
    /// Chooses between these from now on, beginning with `full`; `None` leaves the lookahead as it is.
    pub fn choose_between(&self, range: Option<AheadRange>) {
        let range = range.filter(|range| range.least < range.full);
        *self.0.lock() = State { range, ..State::default() };
    }

    /// `reads` have ended. Returns the lookahead to change to, in pages. `busy` is how long the disk has been busy in
    /// all.
    pub fn follow(&self, reads: u32, now: Instant, busy: impl FnOnce() -> Duration) -> Option<u32> {
        let mut state = self.0.lock();
        let range = state.range?;
        state.reads += reads;
        if state.since.is_some() && state.reads < READS {
            return None;
        }
        let busy = busy();
        let (began, busy_before) = state.since.replace((now, busy)).unwrap_or((now, busy));
        state.reads = 0;
        let window = now.saturating_duration_since(began);
        if window.is_zero() {
            return None;
        }
        let part = busy.saturating_sub(busy_before).as_secs_f64() / window.as_secs_f64();
        let asks = if state.limited { part <= KEEPS_STEP } else { part >= LIMITS };
        state.votes = if asks { state.votes + 1 } else { 0 };
        let pause = PAUSE * (1 << state.changes.saturating_sub(1).min(DOUBLINGS));
        let rested = state.changed.is_none_or(|changed| now.saturating_duration_since(changed) >= pause);
        if state.votes < if state.limited { KEEPING_WINDOWS } else { LIMITED_WINDOWS } || !rested {
            return None;
        }
        state.limited = !state.limited;
        state.changes += 1;
        (state.votes, state.changed) = (0, Some(now));
        Some(if state.limited { range.least } else { range.full })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Windows of a pass: what is chosen after each, where the disk is busy for so many of 100 ms.
    fn chosen(ahead: &Ahead, now: &mut Instant, busy: &mut Duration, percent: &[u64]) -> Vec<Option<u32>> {
        let window = |part: &u64| {
            *now += Duration::from_millis(100);
            *busy += Duration::from_millis(*part);
            ahead.follow(READS, *now, || *busy)
        };
        percent.iter().map(window).collect()
    }

    #[test]
    fn the_lookahead_follows_what_limits_the_pass() {
        let (mut now, mut busy) = (Instant::now(), Duration::ZERO);
        let ahead = Ahead::default();
        assert_eq!(ahead.follow(1000, now, || busy), None, "there is nothing to choose between");
        ahead.choose_between(Some(AheadRange { least: 2, full: 9 }));
        assert_eq!(ahead.follow(1, now, || busy), None, "the first window begins");
        let mut after = |percent: &[u64]| chosen(&ahead, &mut now, &mut busy, percent);
        // Four windows in a row decide.
        assert_eq!(after(&[90, 95, 100, 70, 95, 90, 81]), [None; 7]);
        assert_eq!(after(&[95]), [Some(2)]);
        // A pause of the program is one window, and a pass that is limited a little less stays limited.
        assert_eq!(after(&[5, 99, 75, 70, 70, 99]), [None; 6]);
        assert_eq!(after(&[50, 65]), [None, Some(9)]);
        assert_eq!(after(&[50, 70, 79, 70]), [None; 4]);
    }

    #[test]
    fn pauses_between_changes_grow_and_small_windows_are_collected() {
        let (mut now, mut busy) = (Instant::now(), Duration::ZERO);
        let ahead = Ahead::default();
        ahead.choose_between(Some(AheadRange { least: 2, full: 9 }));
        let mut until = |chosen: u32, part: u64| {
            let mut step = || {
                now += Duration::from_millis(1);
                busy += Duration::from_millis(part);
                ahead.follow(1, now, || busy) == Some(chosen)
            };
            (1..100_000).find(|_| step())
        };
        // Of one read a millisecond. The first window begins with the first read.
        assert_eq!(until(2, 1), Some(1 + 4 * 64));
        let pauses =
            [(9, 0), (2, 1), (9, 0), (2, 1), (9, 0), (2, 1), (9, 0)].map(|(chosen, part)| until(chosen, part).unwrap());
        for (pause, least) in pauses.into_iter().zip([250, 500, 1000, 2000, 4000, 8000, 8000]) {
            assert!((least..least + 64).contains(&pause), "{pause} for {least}");
        }
    }

    #[test]
    fn ranges_without_a_choice_are_left_alone() {
        let (now, ahead) = (Instant::now(), Ahead::default());
        for range in [None, Some(AheadRange { least: 4, full: 4 }), Some(AheadRange { least: 8, full: 4 })] {
            ahead.choose_between(range);
            assert!(
                (0..10).all(|n| ahead.follow(READS, now + Duration::from_secs(n), || Duration::from_secs(n)).is_none())
            );
        }
    }
}
