//! Lines of requests that wait for one thing: a page, or frames.
//!
//! # The bound
//!
//! A waiting request is *passed* when a later one gets what it waits for. It may be passed [`PASSES_MAX`] times, over
//! all lines it stands in together: a request in several lines gets an equal part of the bound in each. A line counts
//! passes once, for all that stand in it, and each request knows at which count its part is used up. So a pass costs
//! the same however long the line is.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;

use crate::ids::{PageId, RequestId, ScopeId};

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
    /// Its scope holds pins that others may wait for, or it can never be refused. It passes all others, and such passes
    /// are not counted.
    Growing,
    /// New, and somebody waits for an answer.
    Interactive,
    /// New, and nobody waits for an answer.
    Batch,
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
    /// Requests with a smaller age are not passed by later ones of their class.
    in_order: u64,
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
        let oldest = self.barring.first().copied();
        let of_its_class = || self.first_of(turn.class).map(|first| first.age).filter(|age| *age < self.in_order);
        turn.class != Class::Growing
            && (oldest.is_some_and(|age| age < turn.age) || of_its_class().is_some_and(|age| age < turn.age))
    }

    fn first_of(&self, class: Class) -> Option<Turn> {
        let (first, _) = self.turns.range(Turn { class, age: 0 }..).next()?;
        (first.class == class).then_some(*first)
    }

    /// Notes that a request with this turn got what the line waits for.
    pub(super) fn pass(&mut self, turn: Turn) {
        if turn.class != Class::Growing && self.ages.first().is_some_and(|oldest| *oldest < turn.age) {
            self.passes += 1;
            self.bar();
        }
    }

    /// From now on, a request that stands here is not passed by later ones of its class. Urgent requests still go
    /// before others.
    fn put_in_order(&mut self) {
        self.in_order = self.ages.last().map_or(self.in_order, |last| last + 1);
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
        // Growing requests come last: new ones have one of the first two classes.
        [Class::Interactive, Class::Batch, Class::Growing]
            .into_iter()
            .find_map(|class| self.get(Turn { class, age: oldest }))
    }

    pub(super) fn requests(&self) -> impl Iterator<Item = RequestId> {
        self.turns.values().map(|(id, _)| *id)
    }
}

/// Requests that wait for frames, also listed by the least number of frames they want.
///
/// # The least number
///
/// A request wants a frame for each of its absent pages. It *watches* some of these pages: one more than there were
/// frames for it when it was last tried. While they stay absent, it is useless to try it again with as few frames. When
/// a watched page comes, the request watches another absent page instead; if there is none, its least number goes down
/// by one. When a page goes, nothing is done. So a request never wants fewer frames than it watches pages. If it wants
/// more, it is tried too early, and then watches more.
///
/// A page that comes costs one step for each request that watches it. A request that wants a page of its own, beside
/// pages that come and go, watches its own after at most as many steps as it has pages.
///
/// # In order
///
/// A new request that would pass one that must not be passed again stands *behind* that one: it watches nothing, and is
/// not tried until that one has gone. So where many requests want the same pages, a page that comes costs a step only
/// for those that may go on. These are few: after [`PASSES_MAX`] passes, all that stood here are behind the oldest.
///
/// Where no request passes another, because all want too much, looks at new requests are paid for. Each request that
/// comes or goes brings [`LOOKS_EACH`]; each event leaves at least [`LOOKS_OF_EVENT`]. When these are spent, the
/// requests that stand here go in order, each class by itself. So the number of looks that a new request costs is
/// bounded, whatever the requests want.
///
/// Requests that set frames aside are listed apart. They are looked at only if their frames may be declared.
///
/// # Kept pages
///
/// An unpinned page could be evicted for a request, unless the request wants that page itself. Pages of which this was
/// so when the request was tried are the ones it *keeps*. Requests that keep the same pages are listed together. Where
/// these pages are all the frames there can be, the whole list is skipped in one step. A request in none of these lists
/// counts as one that keeps nothing: it may be tried in vain, but is never skipped where it could go on.
#[derive(Debug, Default)]
pub(super) struct FrameLine {
    pub(super) line: Line,
    /// New requests that pass no request which must not be passed again, or of which that is not known yet.
    new: ByKept,
    /// New requests that set frames aside, by how many.
    reserving: BTreeSet<(u32, Turn)>,
    /// New requests that would pass one which must not be passed again.
    behind: BTreeSet<Turn>,
    /// Looks at new requests that are paid for.
    credit: u64,
    /// Growing requests.
    growing: ByKept,
    /// Growing requests that may use the floor.
    with_floor: BTreeSet<Turn>,
    /// Requests that wait for their scope's purse, by the least frames they want of it.
    with_purse: HashMap<ScopeId, BTreeSet<(u32, Turn)>>,
}

/// Requests by the pages they keep, and by the least frames they want.
#[derive(Debug, Default)]
struct ByKept(BTreeMap<Vec<PageId>, BTreeMap<u32, BTreeSet<Turn>>>);

/// The least frames that a request wants: as many as it watches pages, plus those it is to set aside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) least: u32,
    /// The pages that it keeps itself, sorted.
    pub(super) kept: Vec<PageId>,
    /// Whether it sets frames aside.
    pub(super) reserves: bool,
}

/// The frames that there can be, according to a request that failed. `kept` lists the pages among them that this
/// request kept itself.
#[derive(Clone, Debug)]
pub(super) struct Room {
    pub(super) frames: u32,
    pub(super) kept: Vec<PageId>,
}

/// How many sets of kept pages are told apart, and how many pages a set may have. Beyond that, requests are listed with
/// those that keep nothing.
const KEPT: usize = 16;
const KEPT_PAGES: usize = 8;

/// Looks that each new request brings when it comes, and again when it goes.
const LOOKS_EACH: u64 = 64;
/// The least number of looks available each time the line is served.
const LOOKS_OF_EVENT: u64 = 16;

/// The frames that a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// Any frame, in line with others.
    New,
    /// Any frame, once a request that must not be passed again has gone.
    Behind,
    /// Any frame, past new requests.
    Growth,
    /// Any frame, the floor's included.
    Floor,
    /// Frames of its scope's purse. It is tried when one comes there, not when the line is served.
    Purse(ScopeId),
}

impl Source {
    pub(super) fn is_new(self) -> bool {
        matches!(self, Self::New | Self::Behind)
    }
}

/// The most frames that there can be for a request that keeps these pages.
fn most_for(kept: &[PageId], room: Option<&Room>) -> u32 {
    room.map_or(u32::MAX, |room| {
        let own = room.kept.iter().filter(|page| kept.binary_search(page).is_ok()).count();
        room.frames.saturating_sub(own as u32)
    })
}

impl ByKept {
    fn insert(&mut self, turn: Turn, wanted: &Wanted) -> bool {
        let by_least = self.0.entry(wanted.kept.clone()).or_default();
        by_least.entry(wanted.least).or_default().insert(turn)
    }

    fn remove(&mut self, turn: Turn, wanted: &Wanted) -> bool {
        let Some(by_least) = self.0.get_mut(&wanted.kept) else { return false };
        let Some(turns) = by_least.get_mut(&wanted.least) else { return false };
        let was = turns.remove(&turn);
        if turns.is_empty() {
            by_least.remove(&wanted.least);
        }
        if by_least.is_empty() {
            self.0.remove(&wanted.kept);
        }
        was
    }

    /// The next turn behind `behind` for which there may be enough frames.
    fn next(&self, behind: Option<Turn>, room: Option<&Room>) -> Option<Turn> {
        let rest = (behind.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let of_one = |(kept, by_least): (&Vec<PageId>, &BTreeMap<u32, BTreeSet<Turn>>)| {
            let least = by_least.range(..=most_for(kept, room));
            least.filter_map(|(_, turns)| turns.range(rest).next()).min().copied()
        };
        self.0.iter().filter_map(of_one).min()
    }

    /// The next request behind `behind` by least frames wanted, if there may be enough frames for it.
    fn next_least(&self, behind: Option<(u32, Turn)>, room: Option<&Room>) -> Option<(u32, Turn)> {
        let of_one = |(kept, by_least): (&Vec<PageId>, &BTreeMap<u32, BTreeSet<Turn>>)| {
            let most = most_for(kept, room);
            let at_last = behind.and_then(|(least, turn)| {
                let turns = by_least.get(&least).filter(|_| least <= most)?;
                turns.range((Bound::Excluded(turn), Bound::Unbounded)).next().map(|turn| (least, *turn))
            });
            let from = behind.map_or(0, |(least, _)| least.saturating_add(1));
            at_last.or_else(|| {
                let (least, turns) = by_least.range(from..).next().filter(|(least, _)| **least <= most)?;
                turns.first().map(|turn| (*least, *turn))
            })
        };
        self.0.iter().filter_map(of_one).min()
    }

    fn contains(&self, turn: Turn, wanted: &Wanted) -> bool {
        let by_least = self.0.get(&wanted.kept);
        by_least.and_then(|by_least| by_least.get(&wanted.least)).is_some_and(|turns| turns.contains(&turn))
    }

    fn len(&self) -> usize {
        self.0.values().flat_map(BTreeMap::values).map(BTreeSet::len).sum()
    }

    /// The pages by which a request is told apart that keeps `pages`, and kept `before` earlier. Empty if it is not
    /// told apart.
    fn kept(&self, before: &[PageId], pages: &[PageId]) -> Vec<PageId> {
        let mut all: Vec<PageId> = before.iter().chain(pages).copied().collect();
        all.sort_unstable();
        all.dedup();
        if all.len() > KEPT_PAGES {
            all = pages.to_vec();
            all.sort_unstable();
        }
        let told_apart = all.len() <= KEPT_PAGES && (self.0.len() < KEPT || self.0.contains_key(&all));
        if told_apart { all } else { Vec::new() }
    }
}

impl FrameLine {
    pub(super) fn join(&mut self, turn: Turn, id: RequestId, part: u32, wanted: &Wanted, source: Source) -> u64 {
        let new = self.list(turn, wanted, source);
        invariant!(new, "{turn:?} joins the line for frames twice");
        invariant!(source.is_new() == (turn.class != Class::Growing), "{turn:?} waits for {source:?}");
        self.pay(source);
        self.line.join(turn, id, part)
    }

    /// Credits looks for a new request that comes or goes. The credit is bounded by what the requests that stand here
    /// brought.
    fn pay(&mut self, source: Source) {
        if source.is_new() {
            let most = 2 * LOOKS_EACH * (self.line.len() as u64 + 1);
            self.credit = (self.credit + LOOKS_EACH).min(most);
        }
    }

    pub(super) fn leave(&mut self, turn: Turn, joined: u64, wanted: &Wanted, source: Source) -> u32 {
        let was = self.unlist(turn, wanted, source);
        invariant!(was, "{turn:?} leaves a line for frames that it does not stand in");
        let passed = self.line.leave(turn, joined);
        self.pay(source);
        if self.line.is_empty() {
            self.credit = 0;
            invariant!(self.listed() == 0, "who waits for frames, by how many, outlives the line");
        }
        passed
    }

    /// Lists a request anew: it is known to want another least number of frames, or it begins or ends to stand behind
    /// another one.
    pub(super) fn changes(&mut self, turn: Turn, before: (&Wanted, Source), now: (&Wanted, Source)) {
        let was = self.unlist(turn, before.0, before.1) && self.list(turn, now.0, now.1);
        invariant!(was, "{turn:?} wants {now:?}, and not {before:?} before");
    }

    /// Where a new request with this turn stands.
    pub(super) fn source_of_new(&self, turn: Turn) -> Source {
        if self.line.bars(turn) { Source::Behind } else { Source::New }
    }

    /// Begins to serve the line.
    pub(super) fn begin(&mut self) {
        self.credit = self.credit.max(LOOKS_OF_EVENT);
    }

    /// Notes a look at a new request, in vain as far as is known.
    pub(super) fn looked(&mut self) {
        match self.credit.checked_sub(1) {
            Some(left) => self.credit = left,
            None => self.line.put_in_order(),
        }
    }

    /// A request behind another one that it would no longer pass.
    pub(super) fn next_to_wake(&self) -> Option<RequestId> {
        let first = |class| {
            let turn = *self.behind.range(Turn { class, age: 0 }..).next()?;
            (turn.class == class && !self.line.bars(turn)).then(|| self.line.get(turn))?
        };
        first(Class::Interactive).or_else(|| first(Class::Batch))
    }

    fn list(&mut self, turn: Turn, wanted: &Wanted, source: Source) -> bool {
        match source {
            Source::New if wanted.reserves => self.reserving.insert((wanted.least, turn)),
            Source::New => self.new.insert(turn, wanted),
            Source::Behind => self.behind.insert(turn),
            Source::Growth => self.growing.insert(turn, wanted),
            Source::Floor => self.with_floor.insert(turn),
            Source::Purse(scope) => self.with_purse.entry(scope).or_default().insert((wanted.least, turn)),
        }
    }

    fn unlist(&mut self, turn: Turn, wanted: &Wanted, source: Source) -> bool {
        match source {
            Source::New if wanted.reserves => self.reserving.remove(&(wanted.least, turn)),
            Source::New => self.new.remove(turn, wanted),
            Source::Behind => self.behind.remove(&turn),
            Source::Growth => self.growing.remove(turn, wanted),
            Source::Floor => self.with_floor.remove(&turn),
            Source::Purse(scope) => {
                let Some(turns) = self.with_purse.get_mut(&scope) else { return false };
                let was = turns.remove(&(wanted.least, turn));
                if turns.is_empty() {
                    self.with_purse.remove(&scope);
                }
                was
            }
        }
    }

    /// The pages by which a request that was tried in vain is told apart from now on.
    pub(super) fn kept(&self, source: Source, before: &[PageId], pages: &[PageId]) -> Vec<PageId> {
        match source {
            Source::Growth => self.growing.kept(before, pages),
            Source::New => self.new.kept(before, pages),
            Source::Behind | Source::Floor | Source::Purse(_) => Vec::new(),
        }
    }

    /// The next growing request behind `behind`, in turn, for which there may be enough frames. Requests that may use
    /// the floor are all tried: what one of them may take of its scope's purse says nothing about another.
    pub(super) fn next_growing(&self, behind: Option<Turn>, room: Option<&Room>) -> Option<(Turn, RequestId)> {
        let rest = (behind.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let next = [self.growing.next(behind, room), self.with_floor.range(rest).next().copied()];
        let next = next.into_iter().flatten().min()?;
        self.line.get(next).map(|id| (next, id))
    }

    /// The request that wants the fewest frames of a scope's purse, if it wants at most `most`.
    pub(super) fn next_of_purse(&self, scope: ScopeId, most: u32) -> Option<RequestId> {
        let (_, turn) = self.with_purse.get(&scope)?.first().filter(|(least, _)| *least <= most)?;
        self.line.get(*turn)
    }

    /// New requests that are tried whatever they want: the one that must not be passed again, one that wants no frame,
    /// and the first. A request that wants no frame takes none from the others.
    pub(super) fn next_new(&self) -> impl Iterator<Item = RequestId> + use<> {
        let barring = self.line.barring();
        let first = self.line.next(Some(Turn { class: Class::Growing, age: u64::MAX }));
        let first = first.filter(|(turn, _)| !self.line.bars(*turn)).map(|(_, id)| id);
        let first = first.filter(|first| barring != Some(*first));
        let none = self.next_least(None, Some(&Room { frames: 0, kept: Vec::new() })).map(|(_, id)| id);
        [barring, none.filter(|none| barring != Some(*none) && first != Some(*none)), first].into_iter().flatten()
    }

    /// The next new request behind `behind` by least frames wanted, if there may be enough frames for it.
    pub(super) fn next_least(
        &self,
        behind: Option<(u32, Turn)>,
        room: Option<&Room>,
    ) -> Option<((u32, Turn), RequestId)> {
        let place = self.new.next_least(behind, room)?;
        self.line.get(place.1).map(|id| (place, id))
    }

    /// The next request behind `behind` that sets frames aside, if there may be enough frames for it and `declared`
    /// allows them.
    pub(super) fn next_reserving(
        &self,
        behind: Option<(u32, Turn)>,
        room: Option<&Room>,
        declared: u32,
    ) -> Option<((u32, Turn), RequestId)> {
        let rest = (behind.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let most = most_for(&[], room).min(declared);
        let place = *self.reserving.range(rest).next().filter(|(least, _)| *least <= most)?;
        self.line.get(place.1).map(|id| (place, id))
    }

    /// For checks: whether a request is listed there.
    pub(super) fn is_listed(&self, turn: Turn, wanted: &Wanted, source: Source) -> bool {
        match source {
            Source::New if wanted.reserves => self.reserving.contains(&(wanted.least, turn)),
            Source::New => self.new.contains(turn, wanted),
            Source::Behind => self.behind.contains(&turn),
            Source::Growth => self.growing.contains(turn, wanted),
            Source::Floor => self.with_floor.contains(&turn),
            Source::Purse(scope) => {
                self.with_purse.get(&scope).is_some_and(|turns| turns.contains(&(wanted.least, turn)))
            }
        }
    }

    /// For checks: how many requests are listed by source.
    pub(super) fn listed(&self) -> usize {
        let of_purses: usize = self.with_purse.values().map(BTreeSet::len).sum();
        self.new.len()
            + self.reserving.len()
            + self.behind.len()
            + self.growing.len()
            + self.with_floor.len()
            + of_purses
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

    #[test]
    fn in_order_means_each_class_by_itself() {
        let mut line = Line::default();
        line.join(turn(Class::Batch, 1), RequestId(1), 16);
        line.join(turn(Class::Interactive, 2), RequestId(2), 16);
        line.put_in_order();
        assert!(line.bars(turn(Class::Batch, 3)) && line.bars(turn(Class::Interactive, 3)));
        assert!(!line.bars(turn(Class::Interactive, 2)), "who is urgent goes before who is not");
        assert!(!line.bars(turn(Class::Growing, 3)), "who holds pins passes");
        line.leave(turn(Class::Interactive, 2), 0);
        assert!(!line.bars(turn(Class::Interactive, 3)) && line.bars(turn(Class::Batch, 3)));
        // Requests that come later may be passed as before.
        line.leave(turn(Class::Batch, 1), 0);
        line.join(turn(Class::Batch, 3), RequestId(3), 16);
        assert!(!line.bars(turn(Class::Batch, 4)));
    }
}
