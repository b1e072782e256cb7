//! The invariants as code, for tests: whatever the pager keeps twice must agree.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::move_record::MoveRecord;
use super::state::State;
use super::stats::Tails;
use super::table::PageEntry;
use super::{Pager, Place, Priority};
use crate::ids::{PageId, PageIndex, RequestId, SegmentId};

macro_rules! ensure {
    ($holds:expr, $($message:tt)*) => {
        if !$holds {
            return Err(format!($($message)*));
        }
    };
}

/// How many moves of each kind a page has.
#[derive(Default)]
struct Touching {
    fill: u32,
    demotion: u32,
    write_back: u32,
    host_write_back: u32,
}

impl Pager {
    /// Checks every invariant of the [module documentation](super), and that all tables agree. The caller holds the
    /// latch and has carried out the effects. Pins must not change meanwhile.
    ///
    /// # Errors
    /// The first check that fails.
    #[doc(hidden)]
    pub fn check_invariants(&self) -> Result<(), String> {
        self.check_invariants_beside(&|_| false)
    }

    /// [`check_invariants`](Self::check_invariants) while the pager is about to be told that pins of `untold` pages
    /// have ended.
    ///
    /// # Errors
    /// The first check that fails.
    #[doc(hidden)]
    pub fn check_invariants_beside(&self, untold: &dyn Fn(PageId) -> bool) -> Result<(), String> {
        self.frames.check()?;
        let touching = self.check_moves()?;
        let victims = self.check_pages(&touching)?;
        ensure!(victims == self.transit, "transit is {}, but {victims} victims are in motion", self.transit);
        let hidden = self.hidden(untold);
        ensure!(hidden.is_none(), "{hidden:?} can go, or its pin's end is not told, and no search would find it");
        self.check_fills()?;
        self.check_requests()?;
        self.check_waiting(untold)
    }

    fn page_ids(&self) -> impl Iterator<Item = PageId> {
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
            let entry = &self.segments[page.segment.index()].entries[page.index.index()];
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
            let entry = self.segments[page.segment.index()].entries[page.index.index()];
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
            let waited_for = self.page_lines.get(&page).is_some_and(|line| !line.is_empty());
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
        self.segments[page.segment.index()].backing != super::Backing::ReadWrite
    }

    fn check_fills(&self) -> Result<(), String> {
        let urgency = |page: &PageId| self.filling.get(page).map(|fill| fill.priority);
        ensure!(self.awaiting.iter().is_sorted_by_key(urgency), "{:?} do not await by urgency", self.awaiting);
        let mut awaiting = BTreeSet::new();
        for page in &self.awaiting {
            ensure!(awaiting.insert(*page), "{page:?} awaits twice");
            let fill = self.filling.get(page);
            ensure!(fill.is_some_and(|fill| fill.moving.is_none()), "{page:?} awaits a frame, but {fill:?}");
        }
        let free = self.frames.free_count();
        ensure!(self.awaiting.is_empty() || free <= self.purses, "a free frame while pages await one");
        ensure!(self.coming == 0 || free <= self.purses, "a free frame while purses await one");
        ensure!(self.purses <= free, "{} frames are set aside, and {free} are free", self.purses);
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

    fn check_requests(&self) -> Result<(), String> {
        let (mut waits, mut untaken): (HashMap<RequestId, u32>, HashMap<RequestId, u32>) = Default::default();
        for (page, fill) in &self.filling {
            for waiter in &fill.waiters {
                *waits.entry(*waiter).or_default() += 1;
                *untaken.entry(*waiter).or_default() += u32::from(fill.taken.is_none());
                let runs = self.request_runs(*waiter);
                let wants = runs.is_some_and(|runs| runs.iter().any(|run| run.pages().any(|wanted| wanted == *page)));
                ensure!(wants, "{waiter:?} waits for {page:?} without wanting it");
            }
        }
        let by_frames: usize = self.request_stages().filter(|(id, ..)| self.waits_for_frames(*id)).count();
        ensure!(self.frame_line.listed() == by_frames, "{by_frames} wait for frames: {:?}", self.frame_line);
        let mut pins: HashMap<PageId, u32> = HashMap::new();
        for (id, stage, remaining, exclusive) in self.request_stages() {
            let waiting = waits.get(&id).copied().unwrap_or(0);
            ensure!(remaining == waiting, "{id:?}: remaining {remaining}, but waits for {waiting}");
            if let Some(counted) = self.request_untaken(id) {
                let waiting = untaken.get(&id).copied().unwrap_or(0);
                ensure!(counted == waiting, "{id:?}: {counted} fills not taken up, but there are {waiting}");
                ensure!(stage != 1 || counted > 0, "{id:?} waits only for what could be lent");
            }
            let shrinking = self.shrinking.iter().filter(|other| **other == id).count();
            ensure!(shrinking == usize::from(stage == 2), "{id:?} in stage {stage} is in the wrong line");
            let (_, frames, pages) = self.request_stand(id).unwrap_or_else(|| unreachable!("it is live"));
            let stands = usize::from(frames) + pages.len();
            ensure!((stands > 0) == (stage == 0), "{id:?} in stage {stage} stands in {stands} lines");
            for (line, stands_there) in self.lines().map(|(page, line)| match page {
                None => (line, frames),
                Some(page) => (line, pages.contains(&page)),
            }) {
                let is_there = line.requests().filter(|other| *other == id).count();
                ensure!(is_there == usize::from(stands_there), "{id:?} is {is_there} times in a line");
            }
            let reserves = self.scopes.iter().any(|(_, scope)| scope.reserving == Some(id) && scope.coming > 0);
            ensure!(stage != 1 || remaining > 0 || reserves, "{id:?} waits for nothing");
            let pages = self.request_runs(id).into_iter().flatten().flat_map(|run| run.pages());
            for page in pages {
                let fill = self.filling.get(&page);
                let awaited = fill.is_some_and(|fill| fill.waiters.contains(&id));
                let alone = fill.is_none_or(|fill| fill.locked && fill.waiters.len() == 1);
                ensure!(!awaited || !exclusive || alone, "{id:?} writes {page:?}, and is not alone: {fill:?}");
                if stage == 1 && !awaited {
                    *pins.entry(page).or_default() += 1;
                }
            }
        }
        for (page, held) in pins {
            let word = self.word(page).load();
            ensure!(word.pins >= held, "{page:?} has {} pins, requests hold {held}", word.pins);
        }
        let purses: u32 = self.scopes.iter().map(|(_, scope)| scope.purse).sum();
        let owed: u32 = self.scopes.iter().map(|(_, scope)| scope.owed).sum();
        let coming: u32 = self.scopes.iter().map(|(_, scope)| scope.coming).sum();
        let declared: u32 = self.scopes.iter().map(|(_, scope)| scope.declared).sum();
        ensure!(
            (purses, coming, owed, declared) == (self.purses, self.coming, self.owed, self.declared),
            "purses hold {purses}, {coming} are on their way, and they are owed {owed}, of {declared}"
        );
        for (id, scope) in self.open_scopes() {
            let paid: u32 = scope.paid.iter().map(|(_, frames)| frames).sum();
            let held = scope.holdings().paid();
            ensure!(held <= paid, "{id:?} has spent {held} for what it holds, of {paid} in all");
            let all = scope.purse + scope.coming + scope.owed + paid + self.being_spent(id);
            ensure!(
                all == scope.declared,
                "{id:?} has declared {} frames, and {all} are its: {scope:?}",
                scope.declared
            );
        }
        let active = self.frames.active();
        ensure!(
            declared == 0 || declared + self.floor <= active,
            "{declared} frames are declared beside a floor of {}, and there are {active}",
            self.floor
        );
        let waiting: Vec<RequestId> =
            self.request_stages().filter(|(_, stage, ..)| *stage == 0).map(|(id, ..)| id).collect();
        ensure!(waiting.len() == self.standing, "{} requests wait, not {}", waiting.len(), self.standing);
        let standing: usize = self.lines().map(|(_, line)| line.len()).sum();
        ensure!(waiting.is_empty() == (standing == 0), "{} requests stand in {standing} places", waiting.len());
        for (segment, table) in &self.segments {
            let of = |id: RequestId| {
                let runs = self.request_runs(id).unwrap_or_default();
                runs.iter().filter(|run| run.segment.index() == segment).count()
            };
            let counted: usize = self.request_stages().map(|(id, ..)| of(id)).sum();
            ensure!(
                table.requests as usize == counted,
                "segment {segment}: {} requests, not {counted}",
                table.requests
            );
        }
        Ok(())
    }

    /// Checks that each request waiting for frames is listed where it is looked for, and that none could go on. The
    /// second is not checked while the end of a pin is still to be told.
    fn check_waiting(&self, untold: &dyn Fn(PageId) -> bool) -> Result<(), String> {
        let all_told = !self.page_ids().any(untold);
        for (id, ..) in self.request_stages().filter(|(id, ..)| self.waits_for_frames(*id)) {
            let stands = || format!("{:?}, {:?}", self.asks(id), self.request_stand(id));
            ensure!(!self.is_misplaced(id), "{id:?} is not listed under what it waits for: {}", stands());
            ensure!(self.closing || !all_told || !self.could_go_on(id), "{id:?} could go on, and waits: {}", stands());
        }
        for (id, ..) in self.request_stages() {
            // A scope that got lent pages is looked at with the next event, at the latest when their fills end.
            let waits = all_told && !self.nearly.contains(&id) && self.waits_for_a_holder(id);
            let stands = || {
                let stand = self.request_stand(id);
                let pages = stand.iter().flat_map(|(.., pages)| pages).map(|page| self.word(*page).load());
                (self.asks(id), pages.collect::<Vec<_>>(), stand.clone())
            };
            ensure!(!waits, "{id:?} holds pins and waits for others: {:?}", stands());
        }
        Ok(())
    }

    /// How many hints wait for their fills.
    #[doc(hidden)]
    pub fn hint_count(&self) -> usize {
        self.hints.len()
    }

    /// A number that two pagers share if they will answer every sequence of events alike. Requests and moves count by
    /// age, not by id. Counters for users are left out. For a policy other than LRU, its `Debug` output counts.
    #[doc(hidden)]
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let mut requests: Vec<_> = self.request_stages().collect();
        requests.sort_unstable_by_key(|(id, ..)| self.next_serial.wrapping_sub((id.0 >> 32) as u32));
        // A request that is gone has no rank.
        let request = |id: &RequestId| requests.iter().position(|(other, ..)| other == id);
        let mut moves: Vec<(usize, &MoveRecord)> = self.moves.iter().collect();
        moves.sort_unstable_by_key(|(_, record)| self.next_serial.wrapping_sub(record.serial));
        let moving = |id: u64| moves.iter().position(|(key, _)| *key == id as u32 as usize);
        self.heard().hash(&mut hasher);
        for page in self.page_ids() {
            let word = self.word(page).load();
            let entry = self.segments[page.segment.index()].entries[page.index.index()];
            (word.state, word.pins, word.exclusive, word.wanted, word.closed, word.fresh, word.held).hash(&mut hasher);
            format!("{entry:?}").hash(&mut hasher);
            let fill = self.filling.get(&page).map(|fill| {
                let waiters: Vec<_> = fill.waiters.iter().map(request).collect();
                let lent = (fill.taken.is_some(), fill.lent, fill.failed.is_some());
                (waiters, fill.priority, fill.moving.map(|id| moving(id.0)), lent, fill.locked, fill.own)
            });
            let put_off = self.put_off.get(&page).map(|until| until.saturating_sub(self.events));
            (fill, put_off).hash(&mut hasher);
        }
        for (_, record) in &moves {
            let MoveRecord { page, from, to, priority, staging, started, .. } = record;
            (page, from, to, priority, staging, started).hash(&mut hasher);
        }
        for (id, stage, remaining, exclusive) in &requests {
            (stage, remaining, exclusive, self.request_runs(*id), self.request_passed(*id)).hash(&mut hasher);
            let (turn, frames, pages) = self.request_stand(*id).unwrap_or_else(|| unreachable!("it is live"));
            (turn.class, frames, pages).hash(&mut hasher);
            (self.request_untaken(*id), self.never_refused(*id)).hash(&mut hasher);
        }
        self.shrinking.iter().map(request).collect::<Vec<_>>().hash(&mut hasher);
        let mut scopes: Vec<_> =
            self.scopes.iter().map(|(_, scope)| (scope.purse, scope.coming, scope.owed, scope.declared)).collect();
        scopes.sort_unstable();
        (&self.awaiting, &self.spoiled, &self.hints, self.staying, self.floor, scopes, self.closing).hash(&mut hasher);
        if self.policy.name() == "lru" {
            self.policy.tracked().hash(&mut hasher);
        } else {
            format!("{:?}", self.policy).hash(&mut hasher);
        }
        let (buffers, waiting) = self.staging.waiting_for_check();
        let waiting: Vec<_> = waiting.into_iter().map(|(priority, id)| (priority, moving(u64::from(id)))).collect();
        (buffers, waiting).hash(&mut hasher);
        format!("{:?} {:?}", self.frames, self.host.order_for_check()).hash(&mut hasher);
        hasher.finish()
    }
}
