//! Lines of requests that wait for one thing: a page, or frames.
//!
//! # The bound
//!
//! A request that waits is *passed* when a later one gets what it waits for. [`PASSES_MAX`] of these are allowed, over all
//! lines it stands in together: one in several lines gets an equal part of the bound in each. A line counts passes once,
//! for everybody, and each request knows at which count its part is used up: so a pass costs the same however long the
//! line is.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use crate::ids::RequestId;

/// How often a waiting request may be passed by later ones.
pub const PASSES_MAX: u32 = 16;

/// A request's place among all others: what is urgent first, then what came first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Turn {
    pub(super) class: Class,
    /// Counts requests; one that came later has a greater one.
    pub(super) age: u64,
}

/// Who is served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Class {
    /// Its scope holds pins that others may wait for, or it can never be refused: passes everybody, and is not counted.
    Growing,
    /// New, and somebody waits for an answer.
    Interactive,
    /// New, and nobody does.
    Batch,
}

/// Requests that wait for one thing.
#[derive(Debug, Default)]
pub(super) struct Line {
    turns: BTreeMap<Turn, (RequestId, u64)>,
    ages: BTreeSet<u64>,
    /// At which count of passes a request's part of the bound is used up.
    limits: BTreeSet<(u64, u64)>,
    /// Ages of requests whose part is used up.
    barring: BTreeSet<u64>,
    passes: u64,
}

impl Line {
    pub(super) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.turns.len()
    }

    /// Joins; it may be passed `part` more times in this line. Returns the count to [leave](Self::leave) with.
    pub(super) fn join(&mut self, turn: Turn, id: RequestId, part: u32) -> u64 {
        let limit = self.passes + u64::from(part);
        let before = self.turns.insert(turn, (id, limit));
        invariant!(before.is_none(), "{turn:?} joins a line twice");
        self.ages.insert(turn.age);
        self.limits.insert((limit, turn.age));
        self.bar();
        self.passes
    }

    /// Leaves. Returns how often it was passed since it joined.
    pub(super) fn leave(&mut self, turn: Turn, joined: u64) -> u32 {
        invariant!(self.turns.contains_key(&turn), "{turn:?} leaves a line that it does not stand in");
        invariant!(joined <= self.passes, "{turn:?} joined at pass {joined} of {}", self.passes);
        if let Some((_, limit)) = self.turns.remove(&turn) {
            self.limits.remove(&(limit, turn.age));
        }
        self.ages.remove(&turn.age);
        self.barring.remove(&turn.age);
        invariant!(
            self.turns.len() == self.ages.len() && self.turns.len() == self.limits.len() + self.barring.len(),
            "a line of {} has {} ages, {} limits and {} that must not be passed",
            self.turns.len(),
            self.ages.len(),
            self.limits.len(),
            self.barring.len()
        );
        self.passed_since(joined)
    }

    /// Passes since the count was `joined`.
    pub(super) fn passed_since(&self, joined: u64) -> u32 {
        (self.passes - joined) as u32
    }

    /// Whether a new request of this turn would pass one that must not be passed again.
    pub(super) fn bars(&self, turn: Turn) -> bool {
        turn.class != Class::Growing && self.barring.first().is_some_and(|oldest| *oldest < turn.age)
    }

    /// A request of this turn got what the line waits for.
    pub(super) fn pass(&mut self, turn: Turn) {
        if turn.class != Class::Growing && self.ages.first().is_some_and(|oldest| *oldest < turn.age) {
            self.passes += 1;
            self.bar();
        }
    }

    fn bar(&mut self) {
        while let Some((limit, age)) = self.limits.first().copied().filter(|(limit, _)| *limit <= self.passes) {
            self.limits.remove(&(limit, age));
            self.barring.insert(age);
        }
    }

    /// The first one behind `turn`; the first of all without one.
    pub(super) fn next(&self, behind: Option<Turn>) -> Option<(Turn, RequestId)> {
        let next = match behind {
            None => self.turns.first_key_value(),
            Some(turn) => self.turns.range((Bound::Excluded(turn), Bound::Unbounded)).next(),
        };
        next.map(|(turn, (id, _))| (*turn, *id))
    }

    pub(super) fn get(&self, turn: Turn) -> Option<RequestId> {
        self.turns.get(&turn).map(|(id, _)| *id)
    }

    /// The oldest request that must not be passed again.
    pub(super) fn barring(&self) -> Option<RequestId> {
        let oldest = *self.barring.first()?;
        // New requests have one of two classes.
        [Class::Interactive, Class::Batch, Class::Growing]
            .into_iter()
            .find_map(|class| self.get(Turn { class, age: oldest }))
    }

    pub(super) fn requests(&self) -> impl Iterator<Item = RequestId> {
        self.turns.values().map(|(id, _)| *id)
    }
}

/// Requests that wait for frames, also by how many they want.
#[derive(Debug, Default)]
pub(super) struct FrameLine {
    pub(super) line: Line,
    /// New ones by how many frames they want.
    new: BTreeSet<(u32, Turn)>,
    /// Those that grow, in turn, by how many frames they want.
    growing: BTreeMap<u32, BTreeSet<Turn>>,
    /// Those that have the floor as well.
    with_floor: BTreeSet<Turn>,
    /// How many wait for their scope's purse.
    with_purse: usize,
}

/// Which frames a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// Any, in line with others.
    New,
    /// Any, past new ones.
    Growth,
    /// The floor's too.
    Floor,
    /// Those of its scope's purse: it is tried when one comes, and not with the line.
    Purse,
}

impl FrameLine {
    pub(super) fn join(&mut self, turn: Turn, id: RequestId, part: u32, need: u32, source: Source) -> u64 {
        let new = match source {
            Source::New => self.new.insert((need, turn)),
            Source::Growth => self.growing.entry(need).or_default().insert(turn),
            Source::Floor => self.with_floor.insert(turn),
            Source::Purse => {
                self.with_purse += 1;
                true
            }
        };
        invariant!(new, "{turn:?} joins the line for frames twice");
        invariant!((source == Source::New) == (turn.class != Class::Growing), "{turn:?} waits for {source:?}");
        self.line.join(turn, id, part)
    }

    pub(super) fn leave(&mut self, turn: Turn, joined: u64, need: u32, source: Source) -> u32 {
        let was = match source {
            Source::New => self.new.remove(&(need, turn)),
            Source::Growth => self.shrink(need, turn),
            Source::Floor => self.with_floor.remove(&turn),
            Source::Purse => {
                let was = self.with_purse > 0;
                self.with_purse -= usize::from(was);
                was
            }
        };
        invariant!(was, "{turn:?} leaves a line for frames that it does not stand in");
        let passed = self.line.leave(turn, joined);
        invariant!(
            !self.line.is_empty() || self.new.is_empty() && self.growing.is_empty() && self.with_purse == 0,
            "who waits for frames, by how many, outlives the line"
        );
        passed
    }

    fn shrink(&mut self, need: u32, turn: Turn) -> bool {
        let Some(turns) = self.growing.get_mut(&need) else { return false };
        let was = turns.remove(&turn);
        if turns.is_empty() {
            self.growing.remove(&need);
        }
        was
    }

    /// It wants another number of frames now.
    pub(super) fn wants(&mut self, turn: Turn, before: u32, need: u32) {
        if self.new.remove(&(before, turn)) {
            self.new.insert((need, turn));
        } else if self.shrink(before, turn) {
            self.growing.entry(need).or_default().insert(turn);
        }
    }

    /// The next that grows, behind `turn` and in turn, of those that want at most so many frames, or have the floor.
    pub(super) fn next_growing(&self, behind: Option<Turn>, most: u32) -> Option<(Turn, RequestId)> {
        let rest = (behind.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let among = self.growing.range(..=most).map(|(_, turns)| turns).chain([&self.with_floor]);
        let next = among.filter_map(|turns| turns.range(rest).next()).min()?;
        self.line.get(*next).map(|id| (*next, id))
    }

    /// Of new ones who could go on if any of them can: who must not be passed again, the first, and the one that wants the
    /// fewest frames.
    pub(super) fn next_new(&self) -> impl Iterator<Item = RequestId> + use<> {
        let least = self.new.first().and_then(|(_, turn)| self.line.get(*turn));
        let first = self.line.next(Some(Turn { class: Class::Growing, age: u64::MAX })).map(|(_, id)| id);
        let first = first.filter(|first| self.line.barring() != Some(*first));
        let least = least.filter(|least| self.line.barring() != Some(*least) && first != Some(*least));
        [self.line.barring(), first, least].into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(class: Class, age: u64) -> Turn {
        Turn { class, age }
    }

    #[test]
    fn a_request_is_passed_as_often_as_its_part_says() {
        let mut line = Line::default();
        let waiting = turn(Class::Batch, 1);
        let joined = line.join(waiting, RequestId(1), 2);
        for age in 2..4 {
            assert!(!line.bars(turn(Class::Interactive, age)));
            line.pass(turn(Class::Interactive, age));
        }
        assert!(line.bars(turn(Class::Interactive, 4)));
        assert!(!line.bars(turn(Class::Growing, 5)), "who holds pins passes");
        assert!(!line.bars(turn(Class::Batch, 0)), "who came before does not pass");
        assert_eq!(line.leave(waiting, joined), 2);
        assert!(!line.bars(turn(Class::Interactive, 4)) && line.is_empty());
    }

    #[test]
    fn an_older_request_passes_nobody() {
        let mut line = Line::default();
        let joined = line.join(turn(Class::Batch, 5), RequestId(1), 1);
        line.pass(turn(Class::Batch, 4));
        line.pass(turn(Class::Growing, 9));
        assert_eq!(line.leave(turn(Class::Batch, 5), joined), 0);
    }
}
