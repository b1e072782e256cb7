//! Checks of the tables of pages, frames and moves.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::{Hash, Hasher};

use super::move_record::MoveRecord;
use super::table::PageEntry;
use super::{Backing, Kept, Residency};
use crate::ids::{PageId, PageIndex, RequestId, SegmentId};
use crate::page_move::{Place, Priority};
use crate::state::State;
use crate::stats::Tails;

/// How many moves of each kind a page has.
#[derive(Default)]
struct Touching {
    fill: u32,
    demotion: u32,
    write_back: u32,
    host_write_back: u32,
}

impl Residency {
    /// Checks everything that is kept of pages, frames and moves.
    pub(crate) fn check(&self, kept: Kept, untold: &dyn Fn(PageId) -> bool) -> Result<(), String> {
        self.frames.check()?;
        let touching = self.check_moves()?;
        let victims = self.check_pages(&touching)?;
        ensure!(victims == self.transit, "transit is {}, but {victims} victims are in motion", self.transit);
        let hidden = self.hidden(untold);
        ensure!(hidden.is_none(), "{hidden:?} can go, or its pin's end is not told, and no search would find it");
        ensure!(self.changes.is_empty() && self.arrivals.is_empty() && !self.eased, "{:?} were not told", self.changes);
        self.check_fills(kept)
    }

    /// Every page.
    pub(crate) fn page_ids(&self) -> impl Iterator<Item = PageId> {
        self.segments.iter().flat_map(|(segment, table)| {
            let page = move |index| PageId { segment: SegmentId(segment as u32), index: PageIndex(index as u32) };
            (0..table.entries.len()).map(page)
        })
    }

    fn check_moves(&self) -> Result<HashMap<PageId, Touching>, String> {
        let mut touching: HashMap<PageId, Touching> = HashMap::new();
        let mut in_flight: HashMap<usize, u32> = HashMap::new();
        let mut staged = 0;
        for (_, record) in &self.moves {
            let MoveRecord { page, from, to, staging, started, .. } = record;
            *in_flight.entry(page.segment.index()).or_default() += 1;
            let ends = touching.entry(*page).or_default();
            match (from, to) {
                (_, Place::Device(_)) => ends.fill += 1,
                (Place::Device(_), Place::Host(_)) => ends.demotion += 1,
                (Place::Device(_), _) => ends.write_back += 1,
                _ => ends.host_write_back += 1,
            }
            let meets_disk = matches!(from, Place::Disk) || matches!(to, Place::Disk);
            let meets_device = matches!(from, Place::Device(_)) || matches!(to, Place::Device(_));
            let needs = meets_disk && meets_device && !self.config.direct_io;
            ensure!(staging.is_some() == (needs && *started), "staging of {record:?}");
            ensure!(*started || needs, "{record:?} waits for nothing");
            staged += u32::from(staging.is_some());
        }
        self.check_victims()?;
        for (segment, table) in &self.segments {
            let counted = in_flight.get(&segment).copied().unwrap_or(0);
            ensure!(table.in_flight == counted, "segment {segment}: in_flight {} not {counted}", table.in_flight);
        }
        self.staging.check(staged)?;
        Ok(touching)
    }

    /// Checks that the victims nobody waits for are known, oldest first.
    fn check_victims(&self) -> Result<(), String> {
        let frees = |page: PageId| {
            let entry = self.entry_of(page);
            entry.evict_after() || self.word(page).load().state == State::Evicting
        };
        let background = self.moves.iter().map(|(_, record)| record).filter(|record| {
            matches!(record.from, Place::Device(_)) && record.priority == Priority::Background && frees(record.page)
        });
        let mut moves: Vec<(u32, PageId)> = background.map(|record| (record.serial, record.page)).collect();
        moves.sort_unstable_by_key(|(serial, _)| std::cmp::Reverse(self.next_serial.wrapping_sub(*serial)));
        let known = self.victims.iter().map(|(page, id)| ((id.0 >> 32) as u32, page));
        ensure!(known.eq(moves.iter().copied()), "victims in the background are {:?}, not {moves:?}", self.victims);
        Ok(())
    }

    /// Checks every page. Returns how many victims are in motion.
    fn check_pages(&self, touching: &HashMap<PageId, Touching>) -> Result<u32, String> {
        let none = Touching::default();
        let (mut owned, mut hosted, mut victims) = (HashSet::new(), HashSet::new(), 0);
        self.policy.check()?;
        let tracked = self.policy.tracked();
        let policy: BTreeSet<PageId> = tracked.iter().copied().collect();
        ensure!(policy.len() == tracked.len(), "the policy tracks a page twice");
        let mut expected = BTreeSet::new();
        let mut tails = Tails::default();
        for page in self.page_ids() {
            let entry = *self.entry_of(page);
            let word = self.word(page).load();
            let moves = touching.get(&page).unwrap_or(&none);
            let filling = self.filling.get(&page);
            let tail = self.segments[page.segment.index()].tail_of(page.index);
            tails.device += tail * u64::from(entry.frame().is_some());
            tails.host += tail * u64::from(entry.host().is_some());
            if let Some(frame) = entry.frame() {
                ensure!(owned.insert(frame), "{frame:?} has two pages");
                ensure!(self.frames.is_owned(frame), "{frame:?} of {page:?} is not owned");
            }
            if let Some(host) = entry.host() {
                ensure!(hosted.insert(host), "{host:?} has two pages");
            }
            ensure!(
                filling.is_some() == (word.state == State::Filling),
                "{page:?}: {:?}, fill {filling:?}",
                word.state
            );
            let frame_wanted = match word.state {
                State::Empty | State::Poisoned => false,
                State::Filling => filling.is_some_and(|fill| fill.moving.is_some() || fill.failed.is_some()),
                _ => true,
            };
            ensure!(entry.frame().is_some() == frame_wanted, "{page:?}: {:?}, frame {:?}", word.state, entry.frame());
            let lent = filling.is_some_and(|fill| fill.lent && (fill.taken.is_some() || fill.failed.is_some()));
            ensure!(word.pins == 0 || word.is_resident() || lent, "{page:?}: {} pins, {:?}", word.pins, word.state);
            let can_be_locked = word.pins == 1 && matches!(word.state, State::Clean | State::Dirty);
            ensure!(!word.exclusive || can_be_locked, "{page:?}: {word:?}");
            let waited_for = entry.waited_for();
            let closed = waited_for || entry.evict_after();
            ensure!(word.closed == closed, "{page:?}: closed {}, waited for {waited_for}", word.closed);
            let held = entry.copying_out() || entry.failures().0 > 0;
            ensure!(word.held == held, "{page:?}: held {}, {entry:?}", word.held);
            let moving = filling.is_some_and(|fill| fill.moving.is_some());
            ensure!(moves.fill == u32::from(moving), "{page:?}: fill moves");
            let copying = moves.demotion > 0;
            ensure!(entry.copying_out() == copying, "{page:?}: copying_out {}", entry.copying_out());
            ensure!(moves.demotion + moves.write_back + moves.fill <= 1, "{page:?}: two moves of one frame");
            match word.state {
                State::Evicting => ensure!(copying, "{page:?}: evicting, but nothing is copied"),
                State::WritingBack => ensure!(copying || moves.write_back == 1, "{page:?}: nothing is written back"),
                _ => ensure!(moves.write_back == 0, "{page:?}: written back while {:?}", word.state),
            }
            ensure!(!entry.evict_after() || word.state == State::WritingBack, "{page:?}: evict_after {:?}", word.state);
            let victim = word.state == State::Evicting || entry.evict_after();
            victims += u32::from(victim);
            if word.is_resident() && !victim {
                expected.insert(page);
            }
            ensure!(entry.host_busy() == (copying || moves.host_write_back > 0), "{page:?}: host_busy");
            ensure!(entry.put_off() == self.put_off.contains_key(&page), "{page:?}: put off {}", entry.put_off());
            ensure!(entry.host().is_some() || !entry.host_busy(), "{page:?}: busy without a host frame");
            ensure!(!entry.host_stale() || entry.host_busy(), "{page:?}: stale, but no move");
            let on_its_way = word.state == State::Filling && filling.is_some_and(|fill| fill.failed.is_none());
            let leaves = entry.host().is_some() && !entry.host_busy() && !on_its_way;
            let ordered = self.host.ordered(page);
            ensure!(!leaves || ordered, "{page:?}: its host copy never leaves");
            ensure!(!ordered || entry.host().is_some() && !entry.host_busy(), "{page:?}: ordered without a copy");
            // Invariant 5: the newest bytes are somewhere.
            let below = entry.on_disk() || entry.valid_host().is_some() && !copying;
            let zero = !entry.on_disk() && entry.host().is_none() && word.generation == 0;
            ensure!(
                word.state != State::Clean || below || zero || !self.written(page),
                "{page:?}: clean, but nowhere below"
            );
        }
        ensure!(owned.len() as u32 == self.frames.in_use(), "frames in use {}", self.frames.in_use());
        self.host.check(hosted.len() as u32)?;
        ensure!(hosted.len() as u32 == self.host.in_use(), "host frames in use {} not {hosted:?}", self.host.in_use());
        ensure!(tails == self.tails, "the tails of resident pages have {tails:?}, not {:?}", self.tails);
        ensure!(policy == expected, "the policy tracks {policy:?}, resident are {expected:?}");
        Ok(victims)
    }

    /// Whether a page may have bytes other than zero. Read-write pages are left out: tests that write check those.
    fn written(&self, page: PageId) -> bool {
        !matches!(self.segments[page.segment.index()].backing, Backing::ReadWrite | Backing::Durable)
    }

    fn check_fills(&self, kept: Kept) -> Result<(), String> {
        let urgency = |page: &PageId| self.filling.get(page).map(|fill| fill.priority);
        ensure!(self.awaiting.iter().is_sorted_by_key(urgency), "{:?} do not await by urgency", self.awaiting);
        let mut awaiting = BTreeSet::new();
        for page in &self.awaiting {
            ensure!(awaiting.insert(*page), "{page:?} awaits twice");
            let fill = self.filling.get(page);
            ensure!(fill.is_some_and(|fill| fill.moving.is_none()), "{page:?} awaits a frame, but {fill:?}");
        }
        let free = self.frames.free_count();
        ensure!(self.awaiting.is_empty() || free <= kept.purses, "a free frame while pages await one");
        ensure!(kept.coming == 0 || free <= kept.purses, "a free frame while purses await one");
        ensure!(kept.purses <= free, "{} frames are set aside, and {free} are free", kept.purses);
        let mut prefetching = 0;
        let spoiled: BTreeSet<PageId> = self.spoiled.iter().copied().collect();
        ensure!(spoiled.len() == self.spoiled.len(), "a page is spoiled twice");
        ensure!(spoiled.iter().all(|page| self.filling.contains_key(page)), "a page is spoiled and not filling");
        for (page, fill) in &self.filling {
            let stands = [fill.moving.is_some(), awaiting.contains(page), fill.failed.is_some()];
            ensure!(stands.into_iter().filter(|holds| *holds).count() == 1, "{page:?} stands {stands:?}");
            ensure!(spoiled.contains(page) == fill.failed.is_some(), "{page:?}: {fill:?} and its line");
            ensure!(fill.failed.is_none() || fill.lent && fill.waiters.is_empty(), "{page:?}: {fill:?} is for nobody");
            ensure!(fill.taken.is_none() || !awaiting.contains(page), "{page:?}: {fill:?} is taken up without a frame");
            prefetching += u32::from(fill.priority > Priority::WriteBack);
            ensure!(
                fill.priority <= Priority::WriteBack || fill.waiters.is_empty(),
                "{page:?}: {fill:?} is no prefetch"
            );
            if let Some(id) = fill.moving {
                let record = self.moves.get(id.0 as u32 as usize);
                ensure!(record.is_some_and(|record| record.page == *page), "{page:?}: its move is {record:?}");
            }
        }
        ensure!(prefetching == self.prefetching, "prefetching is {}, not {prefetching}", self.prefetching);
        Ok(())
    }

    /// For checks: the fills, each with those who wait for it, whether the device has taken it up, and whether it is
    /// for a writer.
    pub(crate) fn fills(&self) -> impl Iterator<Item = (PageId, &[RequestId], bool, bool)> {
        self.filling.iter().map(|(page, fill)| (*page, fill.waiters.as_slice(), fill.taken.is_some(), fill.locked))
    }

    /// For checks: whether a page is closed because requests wait for it.
    pub(crate) fn is_waited_for(&self, page: PageId) -> bool {
        self.entry_of(page).waited_for()
    }

    /// For checks: whether a request could pin or lock this page now.
    pub(crate) fn could_pin(&self, page: PageId, writes: bool) -> bool {
        let word = self.word(page).load();
        let free = if writes { word.pins == 0 && !self.entry_of(page).copying_out() } else { !word.exclusive };
        matches!(word.state, State::Clean | State::Dirty) && free
    }

    /// For checks: how many resident pages but these can go and are not put off.
    pub(crate) fn can_go_beside(&self, pages: &[PageId]) -> u32 {
        let others = |page: &PageId| !pages.contains(page) && self.can_go_for_good(*page);
        self.policy.tracked().iter().filter(|page| others(page)).count() as u32
    }

    /// How many hints wait for their fills.
    pub(crate) fn hint_count(&self) -> usize {
        self.hints.len()
    }

    /// For tests: as if there had been so many moves.
    #[cfg(test)]
    pub(crate) fn set_move_count(&mut self, moves: u32) {
        self.next_serial = moves;
    }

    /// Hashes what decides about later answers. Moves count by age, not by id. `request` gives a request's rank.
    pub(crate) fn fingerprint(&self, request: impl Fn(&RequestId) -> Option<usize>, hasher: &mut impl Hasher) {
        let mut moves: Vec<(usize, &MoveRecord)> = self.moves.iter().collect();
        moves.sort_unstable_by_key(|(_, record)| self.next_serial.wrapping_sub(record.serial));
        let moving = |id: u64| moves.iter().position(|(key, _)| *key == id as u32 as usize);
        self.heard().hash(hasher);
        for page in self.page_ids() {
            let word = self.word(page).load();
            let entry = *self.entry_of(page);
            (word.state, word.pins, word.exclusive, word.wanted, word.closed, word.fresh, word.held).hash(hasher);
            format!("{entry:?}").hash(hasher);
            let fill = self.filling.get(&page).map(|fill| {
                let waiters: Vec<_> = fill.waiters.iter().map(&request).collect();
                let lent = (fill.taken.is_some(), fill.lent, fill.failed.is_some());
                (waiters, fill.priority, fill.moving.map(|id| moving(id.0)), lent, fill.locked, fill.own)
            });
            let put_off = self.put_off.get(&page).map(|until| until.saturating_sub(self.events));
            (fill, put_off).hash(hasher);
        }
        for (_, record) in &moves {
            let MoveRecord { page, from, to, priority, staging, started, .. } = record;
            (page, from, to, priority, staging, started).hash(hasher);
        }
        (&self.awaiting, &self.spoiled, &self.hints, self.closing).hash(hasher);
        if self.policy.name() == "lru" {
            self.policy.tracked().hash(hasher);
        } else {
            format!("{:?}", self.policy).hash(hasher);
        }
        let (buffers, waiting) = self.staging.waiting_for_check();
        let waiting: Vec<_> = waiting.into_iter().map(|(priority, id)| (priority, moving(u64::from(id)))).collect();
        (buffers, waiting).hash(hasher);
        format!("{:?} {:?}", self.frames, self.host.order_for_check()).hash(hasher);
    }
}
