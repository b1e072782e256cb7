//! Lines of requests that wait for one thing: a page, or frames.
//!
//! # The bound
//!
//! A waiting request is *passed* when a later one gets what it waits for. It may be passed [`PASSES_MAX`] times, over
//! all lines it stands in together: a request in several lines gets an equal part of the bound in each. A line counts
//! passes once, for all that stand in it, and each request knows at which count its part is used up. So a pass costs
//! the same however long the line is.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use smallvec::SmallVec;

use crate::ids::{RequestId, ScopeId};

/// How often a waiting request may be passed by later ones.
pub const PASSES_MAX: u32 = 16;

/// A request's place among all others: urgent ones first, then older ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Turn {
    pub(super) class: Class,
    /// Number of the request: a later one has a greater number.
    pub(super) age: u64,
}

/// How urgent a request is. The first class is served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Class {
    /// Its scope holds pins that others may wait for. It waits for moves only, and passes all others. Such passes are
    /// not counted.
    Holding,
    /// Its scope has frames of its own, or it can never be refused. It passes new requests, and such passes are not
    /// counted.
    Growing,
    /// New, and somebody waits for an answer.
    Interactive,
    /// New, and nobody waits for an answer.
    Batch,
}

impl Class {
    /// Whether it may be passed a bounded number of times, and passes others in turn.
    pub(super) fn is_new(self) -> bool {
        matches!(self, Self::Interactive | Self::Batch)
    }
}

/// Requests that wait for one thing.
#[derive(Debug, Default)]
pub(super) struct Line {
    turns: BTreeMap<Turn, (RequestId, u64)>,
    /// The turns that only read the page which they wait for.
    readers: BTreeSet<Turn>,
    ages: BTreeSet<u64>,
    /// For each request whose part of the bound is left: the count of passes at which it is used up, and the age.
    limits: BTreeSet<(u64, u64)>,
    /// Ages of requests whose part is used up: they must not be passed again.
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

    /// [`join`](Self::join) for a request that only reads.
    pub(super) fn join_to_read(&mut self, turn: Turn, id: RequestId, part: u32) -> u64 {
        self.readers.insert(turn);
        self.join(turn, id, part)
    }

    /// Joins the line. The request may be passed `part` more times here. Returns the count to [leave](Self::leave)
    /// with.
    pub(super) fn join(&mut self, turn: Turn, id: RequestId, part: u32) -> u64 {
        let limit = self.passes + u64::from(part);
        let before = self.turns.insert(turn, (id, limit));
        invariant!(before.is_none(), "{turn:?} joins a line twice");
        self.ages.insert(turn.age);
        self.limits.insert((limit, turn.age));
        self.bar();
        self.passes
    }

    /// Leaves the line. Returns how often the request was passed since it joined.
    pub(super) fn leave(&mut self, turn: Turn, joined: u64) -> u32 {
        invariant!(self.turns.contains_key(&turn), "{turn:?} leaves a line that it does not stand in");
        invariant!(joined <= self.passes, "{turn:?} joined at pass {joined} of {}", self.passes);
        if let Some((_, limit)) = self.turns.remove(&turn) {
            self.limits.remove(&(limit, turn.age));
        }
        self.ages.remove(&turn.age);
        self.barring.remove(&turn.age);
        self.readers.remove(&turn);
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

    /// How many passes there were since the count was `joined`.
    pub(super) fn passed_since(&self, joined: u64) -> u32 {
        (self.passes - joined) as u32
    }

    /// Whether a new request with this turn would pass one that must not be passed again.
    pub(super) fn bars(&self, turn: Turn) -> bool {
        turn.class.is_new() && self.barring.first().is_some_and(|oldest| *oldest < turn.age)
    }

    /// Notes that a request with this turn got what the line waits for.
    pub(super) fn pass(&mut self, turn: Turn) {
        if turn.class.is_new() && self.ages.first().is_some_and(|oldest| *oldest < turn.age) {
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

    /// The first request behind `turn`, or the first of all if that is `None`.
    pub(super) fn next(&self, behind: Option<Turn>) -> Option<(Turn, RequestId)> {
        let next = match behind {
            None => self.turns.first_key_value(),
            Some(turn) => self.turns.range((Bound::Excluded(turn), Bound::Unbounded)).next(),
        };
        next.map(|(turn, (id, _))| (*turn, *id))
    }

    /// The first request behind `turn` that only reads.
    pub(super) fn next_reader(&self, behind: Turn) -> Option<(Turn, RequestId)> {
        let turn = *self.readers.range((Bound::Excluded(behind), Bound::Unbounded)).next()?;
        self.get(turn).map(|id| (turn, id))
    }

    pub(super) fn get(&self, turn: Turn) -> Option<RequestId> {
        self.turns.get(&turn).map(|(id, _)| *id)
    }

    /// The oldest request that must not be passed again.
    pub(super) fn barring(&self) -> Option<RequestId> {
        let oldest = *self.barring.first()?;
        [Class::Interactive, Class::Batch, Class::Growing, Class::Holding]
            .into_iter()
            .find_map(|class| self.get(Turn { class, age: oldest }))
    }

    pub(super) fn requests(&self) -> impl Iterator<Item = RequestId> {
        self.turns.values().map(|(id, _)| *id)
    }
}

/// Requests that wait for frames.
///
/// # In order
///
/// New requests stand in the order of their turns. When there may be frames again, only the first few are tried: the
/// one that must not be passed again, and [`WINDOW`] more. So a request that wants few frames goes past one that wants
/// many, the line counts that, and an event costs the same however many wait.
///
/// Requests that set frames aside stand apart. They are tried only if their frames may be declared, and those that may
/// not keep nobody else from being tried.
#[derive(Debug, Default)]
pub(super) struct FrameLine {
    pub(super) line: Line,
    /// The turns by what they wait for. No set is empty.
    by_source: BTreeMap<Source, BTreeSet<Turn>>,
}

/// How many new requests are tried when there may be frames again.
const WINDOW: usize = 1 + PASSES_MAX as usize;

/// The frames that a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    /// Any frame, in line with others.
    New,
    /// Any frame that may be declared, in line with others.
    Reserving,
    /// Any frame, past new requests; also the floor's, if it can never be refused. Such requests are few: of scopes
    /// that hold pins while moves bring frames, and of faults.
    First,
    /// Frames of its scope's purse, behind older requests of that scope. It is tried when one comes there, not when the
    /// line is served.
    Purse(ScopeId),
}

impl FrameLine {
    pub(super) fn join(&mut self, turn: Turn, id: RequestId, part: u32, source: Source) -> u64 {
        let new = self.by_source.entry(source).or_default().insert(turn);
        invariant!(new, "{turn:?} joins the line for frames twice");
        self.line.join(turn, id, part)
    }

    pub(super) fn leave(&mut self, turn: Turn, joined: u64, source: Source) -> u32 {
        let was = self.by_source.get_mut(&source).is_some_and(|turns| turns.remove(&turn));
        invariant!(was, "{turn:?} leaves a line for frames that it does not stand in");
        if self.of(source).next().is_none() {
            self.by_source.remove(&source);
        }
        self.line.leave(turn, joined)
    }

    /// The turns that wait for these frames, in order.
    fn of(&self, source: Source) -> impl Iterator<Item = Turn> {
        self.by_source.get(&source).into_iter().flatten().copied()
    }

    /// The next request behind `behind` that passes new ones, in turn.
    pub(super) fn next_first(&self, behind: Option<Turn>) -> Option<(Turn, RequestId)> {
        let rest = (behind.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let next = *self.by_source.get(&Source::First)?.range(rest).next()?;
        self.line.get(next).map(|id| (next, id))
    }

    /// Whether a request waits that passes new ones, or waits for a purse.
    pub(super) fn has_others(&self) -> bool {
        self.by_source.range(Source::First..).next().is_some()
    }

    /// The oldest request that waits for a scope's purse.
    pub(super) fn first_of_purse(&self, scope: ScopeId) -> Option<RequestId> {
        self.line.get(self.of(Source::Purse(scope)).next()?)
    }

    /// The oldest request that waits for each purse.
    pub(super) fn first_of_purses(&self) -> Vec<(ScopeId, RequestId)> {
        let first = |source: &Source| {
            let Source::Purse(scope) = *source else { return None };
            self.first_of_purse(scope).map(|id| (scope, id))
        };
        self.by_source
            .range((Bound::Excluded(Source::First), Bound::Unbounded))
            .filter_map(|(at, _)| first(at))
            .collect()
    }

    /// The new requests that are tried when there may be frames again: the one that must not be passed again, and the
    /// first that may pass it. With `declares`, also those that set frames aside.
    pub(super) fn tried(&self, declares: bool) -> SmallVec<[RequestId; 36]> {
        let sources = [Some(Source::New), declares.then_some(Source::Reserving)].into_iter().flatten();
        let first = sources.flat_map(|source| self.of(source).take(WINDOW)).filter(|turn| !self.line.bars(*turn));
        self.line.barring().into_iter().chain(first.filter_map(|turn| self.line.get(turn))).collect()
    }

    /// For checks: whether a request is listed there.
    pub(super) fn is_listed(&self, turn: Turn, source: Source) -> bool {
        self.of(source).any(|other| other == turn)
    }

    /// For checks: how many requests are listed by source.
    pub(super) fn listed(&self) -> usize {
        self.by_source.values().map(BTreeSet::len).sum()
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
