//! Files that a program uses in turn, one pass over each after the other, without their being parts of one model.
//!
//! Each of them repeats its own order, but while one is used the others stand still: only together do they have an
//! order in which it is known what comes next. Two threads that go over a file each are something else: their uses mix,
//! and a turn of one of them is short.

use std::collections::VecDeque;

/// The most files that are looked for in turn.
const FILES_MAX: usize = 64;
/// Rounds in which turns were the same, where each turn is known to be most of a pass, and where passes are not known.
const ROUNDS: usize = 2;
const ROUNDS_UNKNOWN: usize = 3;
/// The fewest uses of a turn where passes are not known.
const USES_LEAST: u64 = 64;

/// Uses of one file, or of files with one order, in a row.
#[derive(Clone, Copy, Debug)]
struct Turn {
    of: u64,
    uses: u64,
    /// Uses of a pass, if they are known.
    pass: Option<u64>,
}

impl Turn {
    fn may_be_a_pass(&self) -> bool {
        self.uses >= self.pass.map_or(USES_LEAST, |pass| (pass / 4 * 3).max(1))
    }

    fn is_as(&self, other: &Self) -> bool {
        self.of == other.of && self.uses.abs_diff(other.uses) <= self.uses.max(other.uses) / 4
    }
}

/// The turns so far.
#[derive(Debug, Default)]
pub struct Turns {
    now: Option<Turn>,
    past: VecDeque<Turn>,
}

impl Turns {
    /// There were so many uses of what has this number, whose passes have so many uses if they are known. Returns the
    /// numbers of those that are used in turn, once that is seen, in the order of their turns.
    pub fn used(&mut self, of: u64, uses: u64, pass: Option<u64>) -> Option<Vec<u64>> {
        if let Some(now) = &mut self.now
            && now.of == of
        {
            now.uses += uses;
            now.pass = pass.or(now.pass);
            return None;
        }
        let ended = self.now.replace(Turn { of, uses, pass })?;
        self.past.push_back(ended);
        if self.past.len() > ROUNDS_UNKNOWN * FILES_MAX {
            self.past.pop_front();
        }
        let past = self.past.make_contiguous();
        // How many turns ago this one began last.
        let round = past.iter().rev().position(|turn| turn.of == of)? + 1;
        let known = past[past.len() - round..].iter().all(|turn| turn.pass.is_some());
        let rounds = if known { ROUNDS } else { ROUNDS_UNKNOWN };
        let last = past.get(past.len().checked_sub(round * rounds)?..)?;
        let (first, others) = last.split_at(round);
        let in_turn = (2..=FILES_MAX).contains(&round)
            && first.iter().enumerate().all(|(at, turn)| first[..at].iter().all(|other| other.of != turn.of))
            && last.iter().all(Turn::may_be_a_pass)
            && others.iter().enumerate().all(|(at, turn)| turn.is_as(&first[at % round]));
        in_turn.then(|| first.iter().map(|turn| turn.of).collect())
    }

    /// A file is mapped no more: what came before tells nothing, and its number may be another one's.
    pub fn forget(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::Turns;

    /// Turns of so many uses, each of which is told of alone. Returns at which turn it was seen, and what.
    fn seen(turns: impl IntoIterator<Item = (u64, u64)>, pass: Option<u64>) -> Option<(usize, Vec<u64>)> {
        let mut all = Turns::default();
        turns.into_iter().enumerate().find_map(|(at, (of, uses))| {
            (0..uses).filter_map(|_| all.used(of, 1, pass)).next().map(|found| (at, found))
        })
    }

    #[test]
    fn files_in_turn_are_seen_after_two_rounds_or_three() {
        let round = [(7, 100), (3, 80), (9, 120)];
        let turns = || round.into_iter().cycle().take(30);
        assert_eq!(seen(turns(), Some(100)), Some((6, vec![7, 3, 9])));
        assert_eq!(seen(turns(), None), Some((9, vec![7, 3, 9])));
        // Something else first.
        let turns = [(1, 500), (7, 100)].into_iter().chain(turns());
        assert!(seen(turns, None).is_some());
    }

    #[test]
    fn what_is_mixed_or_changes_is_not() {
        // Turns are a part of a pass.
        assert_eq!(seen([(1, 70), (2, 70)].into_iter().cycle().take(100), Some(100)), None);
        assert_eq!(seen([(1, 20), (2, 20)].into_iter().cycle().take(100), None), None);
        // Each turn is another number of passes.
        let turns = (0..100).flat_map(|n| [(1, 100 + 100 * (n * 7 % 5)), (2, 100)]);
        assert_eq!(seen(turns, Some(100)), None);
        // One file alone, and one that is used twice in a round.
        assert_eq!(seen([(1, 1000)], Some(100)), None);
        assert_eq!(seen([(1, 100), (2, 100), (1, 100), (3, 100)].into_iter().cycle().take(100), Some(100)), None);
    }
}
