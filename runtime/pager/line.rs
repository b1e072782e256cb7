//! Lines of requests that wait for one thing: a page, or frames.
//!
//! # The bound
//!
//! A request that waits is *passed* when a later one gets what it waits for. [`PASSES_MAX`] of these are allowed, over all
//! lines it stands in together: one in several lines gets an equal part of the bound in each. A line counts passes once,
//! for everybody, and each request knows at which count its part is used up: so a pass costs the same however long the
//! line is.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Bound;

use slab::Slab;

use crate::ids::{PageId, RequestId};

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
    /// Those of them that only read the page which they wait for.
    readers: BTreeSet<Turn>,
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

    /// [`join`](Self::join) of one that only reads.
    pub(super) fn join_to_read(&mut self, turn: Turn, id: RequestId, part: u32) -> u64 {
        self.readers.insert(turn);
        self.join(turn, id, part)
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
        self.readers.remove(&turn);
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

    /// The first one behind `turn` that only reads.
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
///
/// # By how many
///
/// A request wants a frame for each of its pages that is absent. A page that only one of them wants is counted by that
/// request. One that several want may come and go as often as these are served: it is *common*, and none of them counts it.
/// Those that want the same common pages are a [`Group`], which counts how many of these are absent, for all of its members.
/// So a page that comes or goes costs a step for each group that wants it, however many requests that are.
///
/// Groups become finer as pages become common, and go with their last members; so do common pages, with their last groups.
#[derive(Debug, Default)]
pub(super) struct FrameLine {
    pub(super) line: Line,
    groups: Slab<Group>,
    /// A group by the sum of what its pages hash to; what is found is compared.
    by_pages: HashMap<u64, usize>,
    common: HashMap<PageId, Common>,
    /// Of each group with new ones, the one that wants the fewest frames, and how many.
    new: BTreeSet<(u32, Turn, usize)>,
    /// The groups with some that grow, by the fewest frames that one of these wants.
    growing: BTreeSet<(u32, usize)>,
    /// Those that have the floor as well.
    with_floor: BTreeSet<Turn>,
    /// How many wait for their scope's purse.
    with_purse: usize,
}

/// Requests that want the same common pages.
#[derive(Debug, Default)]
struct Group {
    pages: Vec<PageId>,
    hash: u64,
    /// How many of the pages are absent.
    absent: u32,
    members: usize,
    /// New ones by how many frames they want beside those.
    new: BTreeSet<(u32, Turn)>,
    /// Those that grow, in turn, by the same.
    growing: BTreeMap<u32, BTreeSet<Turn>>,
}

/// A page that several requests want.
#[derive(Debug)]
struct Common {
    absent: bool,
    groups: BTreeSet<usize>,
}

/// How many frames a request wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    /// Beside those that its group counts.
    pub(super) own: u32,
    /// None of one that does not wait for just any frames.
    pub(super) group: Option<usize>,
}

fn hash_of(page: PageId) -> u64 {
    let mut hasher = DefaultHasher::new();
    page.hash(&mut hasher);
    hasher.finish()
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
    pub(super) fn join(&mut self, turn: Turn, id: RequestId, part: u32, wanted: Wanted, source: Source) -> u64 {
        let new = match source {
            Source::New | Source::Growth => self.enter(turn, wanted),
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

    pub(super) fn leave(&mut self, turn: Turn, joined: u64, wanted: Wanted, source: Source) -> u32 {
        let was = match source {
            Source::New | Source::Growth => self.exit(turn, wanted, true),
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
            !self.line.is_empty()
                || self.groups.is_empty() && self.common.is_empty() && self.by_pages.is_empty() && self.with_purse == 0,
            "who waits for frames, by how many, outlives the line"
        );
        passed
    }

    /// How many frames that are.
    pub(super) fn count(&self, wanted: Wanted) -> u32 {
        wanted.own + wanted.group.map_or(0, |group| self.groups[group].absent)
    }

    /// It wants another number of frames now, or the same with another group.
    pub(super) fn changes(&mut self, turn: Turn, before: Wanted, now: Wanted) {
        if before.group.is_some() {
            let was = self.exit(turn, before, before.group != now.group) && self.enter(turn, now);
            invariant!(was, "{turn:?} wants {now:?}, and not {before:?} before");
        }
    }

    /// Takes a group out of the lists of groups, for a change.
    fn unlist(&mut self, at: usize) {
        let Group { absent, new, growing, .. } = &self.groups[at];
        if let Some((own, turn)) = new.first() {
            self.new.remove(&(own + absent, *turn, at));
        }
        if let Some((own, _)) = growing.first_key_value() {
            self.growing.remove(&(own + absent, at));
        }
    }

    fn list(&mut self, at: usize) {
        let Group { absent, new, growing, .. } = &self.groups[at];
        if let Some((own, turn)) = new.first() {
            self.new.insert((own + absent, *turn, at));
        }
        if let Some((own, _)) = growing.first_key_value() {
            self.growing.insert((own + absent, at));
        }
    }

    fn enter(&mut self, turn: Turn, wanted: Wanted) -> bool {
        let Some(at) = wanted.group else { return false };
        self.unlist(at);
        let group = &mut self.groups[at];
        let new = match turn.class {
            Class::Growing => group.growing.entry(wanted.own).or_default().insert(turn),
            _ => group.new.insert((wanted.own, turn)),
        };
        group.members += usize::from(new);
        self.list(at);
        new
    }

    /// `for_good` if it does not enter this group again at once: one that has no members goes then.
    fn exit(&mut self, turn: Turn, wanted: Wanted, for_good: bool) -> bool {
        let Some(at) = wanted.group else { return false };
        self.unlist(at);
        let group = &mut self.groups[at];
        let was = match turn.class {
            Class::Growing => {
                let turns = group.growing.get_mut(&wanted.own);
                let (was, last) = turns.map_or((false, false), |turns| (turns.remove(&turn), turns.is_empty()));
                if last {
                    group.growing.remove(&wanted.own);
                }
                was
            }
            _ => group.new.remove(&(wanted.own, turn)),
        };
        group.members -= usize::from(was);
        if group.members > 0 || !for_good {
            self.list(at);
            return was;
        }
        let Group { pages, hash, .. } = self.groups.remove(at);
        if self.by_pages.get(&hash) == Some(&at) {
            self.by_pages.remove(&hash);
        }
        for page in pages {
            let Some(common) = self.common.get_mut(&page) else { continue };
            common.groups.remove(&at);
            if common.groups.is_empty() {
                self.common.remove(&page);
            }
        }
        was
    }

    /// Whether groups count this page, and not requests.
    pub(super) fn is_common(&self, page: PageId) -> bool {
        self.common.contains_key(&page)
    }

    /// The group of those that want these common pages, and no others.
    pub(super) fn group_of(&mut self, pages: Vec<PageId>) -> usize {
        let hash = pages.iter().fold(0u64, |sum, page| sum.wrapping_add(hash_of(*page)));
        if let Some(at) = self.by_pages.get(&hash).copied()
            && self.groups[at].pages.len() == pages.len()
            && pages.iter().all(|page| self.common.get(page).is_some_and(|common| common.groups.contains(&at)))
        {
            return at;
        }
        let absent = pages.iter().filter(|page| self.common.get(page).is_some_and(|common| common.absent)).count();
        let absent = absent as u32;
        let at = self.groups.insert(Group { hash, absent, ..Group::default() });
        for page in &pages {
            if let Some(common) = self.common.get_mut(page) {
                common.groups.insert(at);
            }
        }
        self.groups[at].pages = pages;
        // Of two groups with the same pages one is found. Both are right.
        self.by_pages.entry(hash).or_insert(at);
        at
    }

    /// So many members of a group want a page that is becoming common, and is there: the group they are in from now on. They
    /// [change](Self::changes) over.
    pub(super) fn group_with(&mut self, at: usize, page: PageId, members: usize) -> usize {
        self.common.entry(page).or_insert(Common { absent: false, groups: BTreeSet::new() });
        let group = &mut self.groups[at];
        if members < group.members {
            let mut pages = group.pages.clone();
            pages.push(page);
            return self.group_of(pages);
        }
        // All of them: the pages of a large request come one after the other, and cost a step each.
        if self.by_pages.get(&group.hash) == Some(&at) {
            self.by_pages.remove(&group.hash);
        }
        group.pages.push(page);
        group.hash = group.hash.wrapping_add(hash_of(page));
        self.by_pages.entry(group.hash).or_insert(at);
        if let Some(common) = self.common.get_mut(&page) {
            common.groups.insert(at);
        }
        at
    }

    /// A page is absent, or there. Gives some of those that want no frame any more, if there are any.
    pub(super) fn turns(&mut self, page: PageId, absent: bool) -> Vec<RequestId> {
        let Some(common) = self.common.get_mut(&page).filter(|common| common.absent != absent) else {
            return Vec::new();
        };
        common.absent = absent;
        let groups: Vec<usize> = common.groups.iter().copied().collect();
        for at in &groups {
            self.unlist(*at);
            let count = &mut self.groups[*at].absent;
            *count = if absent { *count + 1 } else { *count - 1 };
            self.list(*at);
        }
        groups.into_iter().flat_map(|at| self.without_need(at)).collect()
    }

    /// The first of a group's new members, and of those that grow, as far as they want no frame.
    pub(super) fn without_need(&self, at: usize) -> impl Iterator<Item = RequestId> + use<> {
        let Group { absent, new, growing, .. } = &self.groups[at];
        let new = new.first().filter(|(own, _)| own + absent == 0).map(|(_, turn)| *turn);
        let growing = growing.first_key_value().filter(|(own, _)| *own + absent == 0);
        let growing = growing.and_then(|(_, turns)| turns.first().copied());
        let id = |turn: Option<Turn>| turn.and_then(|turn| self.line.get(turn));
        [id(growing), id(new)].into_iter().flatten()
    }

    /// The next that grows, behind `turn` and in turn, of those that want at most so many frames, or have the floor.
    pub(super) fn next_growing(&self, behind: Option<Turn>, most: u32) -> Option<(Turn, RequestId)> {
        let rest = (behind.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let groups = self.growing.range(..=(most, usize::MAX)).map(|(_, at)| &self.groups[*at]);
        let among = groups.flat_map(|group| group.growing.range(..=most - group.absent).map(|(_, turns)| turns));
        let next = among.chain([&self.with_floor]).filter_map(|turns| turns.range(rest).next()).min()?;
        self.line.get(*next).map(|id| (*next, id))
    }

    /// Of new ones who could go on if any of them can: who must not be passed again, the first, and the one that wants the
    /// fewest frames. One that wants none comes before the first: it takes none from it.
    pub(super) fn next_new(&self) -> impl Iterator<Item = RequestId> + use<> {
        let barring = self.line.barring();
        let first = self.line.next(Some(Turn { class: Class::Growing, age: u64::MAX })).map(|(_, id)| id);
        let first = first.filter(|first| barring != Some(*first));
        let least = self.new.first().and_then(|(need, turn, _)| Some((*need, self.line.get(*turn)?)));
        let least = least.filter(|(_, least)| barring != Some(*least) && first != Some(*least));
        let id = least.map(|(_, least)| least);
        let then = if least.is_some_and(|(need, _)| need == 0) { [id, first] } else { [first, id] };
        std::iter::once(barring).chain(then).flatten()
    }

    /// Everything that is kept twice agrees. `is_absent` says it of common pages.
    pub(super) fn check(&self, is_absent: impl Fn(PageId) -> bool) -> Result<(), String> {
        for (page, Common { absent, groups }) in &self.common {
            let right = *absent == is_absent(*page) && !groups.is_empty();
            let known = groups.iter().all(|at| self.groups.get(*at).is_some_and(|group| group.pages.contains(page)));
            if !right || !known {
                return Err(format!("{page:?} is common: absent {absent}, groups {groups:?}"));
            }
        }
        let (mut new, mut growing) = (BTreeSet::new(), BTreeSet::new());
        for (at, group) in &self.groups {
            let common = |page: &PageId| self.common.get(page).filter(|common| common.groups.contains(&at));
            let absent = group.pages.iter().filter(|page| common(page).is_some_and(|common| common.absent)).count();
            let members = group.new.len() + group.growing.values().map(BTreeSet::len).sum::<usize>();
            let known = group.pages.iter().all(|page| common(page).is_some());
            if (absent, members) != (group.absent as usize, group.members) || members == 0 || !known {
                return Err(format!("{absent} pages are absent of {group:?}"));
            }
            new.extend(group.new.first().map(|(own, turn)| (own + group.absent, *turn, at)));
            growing.extend(group.growing.keys().next().map(|own| (own + group.absent, at)));
        }
        if new != self.new || growing != self.growing {
            return Err(format!(
                "who wants the fewest frames: {new:?} {growing:?}, not {:?} {:?}",
                self.new, self.growing
            ));
        }
        Ok(())
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
