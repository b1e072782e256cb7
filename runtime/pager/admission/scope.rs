//! Scopes: what one task holds and may still ask for.
//!
//! A scope is the unit of admission. Its first pins, or the frames it [reserves](crate::Pager::reserve), are *new* and
//! wait in line. Requests it makes while it holds pins, or has reserved frames, are *growth*: they pass the line,
//! because others may wait for just these pins.
//!
//! A scope that reserves has its frames set aside at the start, in a purse. It spends them on pages that are missing.
//! When the pins end, the purse is filled again before anybody else gets a frame.
//!
//! A request whose scope holds pins never waits for another holder: it is refused with
//! [`Busy`](crate::ErrorKind::Busy). A pin outside of scopes is taken to hold nothing, whatever else its thread has
//! pinned. `docs/liveness.md` has the rules, and why no request waits for ever.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use crate::ids::{PageId, RequestId, SegmentId};
use crate::runs::PageRun;
use crate::sync::{AtomicU64, Mutex, Ordering};
use crate::terms::ScopePriority;

/// The pins of one scope. Whoever pins for the scope keeps them up to date; the pager reads them when a request has to
/// wait.
#[derive(Debug, Default)]
pub struct Holdings {
    held: Mutex<Held>,
    /// How many pages the scope was opened for. `None` if it did not say.
    at_most: Option<u32>,
    /// How many of those pages are pinned or asked for. A plain count: no other data is published with it.
    claimed: AtomicU64,
}

/// Held runs. The first few are searched from the end, because the last one is the likeliest to go. The others are in a
/// hash map.
#[derive(Debug, Default)]
struct Runs {
    few: Vec<HeldRun>,
    many: HashMap<HeldRun, u32>,
    /// How many runs are in `many`, repetitions included.
    counted: usize,
}

impl Runs {
    const FEW: usize = 32;

    fn add(&mut self, run: HeldRun) {
        if self.few.len() < Self::FEW {
            self.few.push(run);
        } else {
            *self.many.entry(run).or_default() += 1;
            self.counted += 1;
        }
    }

    /// Returns whether the run was there.
    fn remove(&mut self, run: HeldRun) -> bool {
        if let Some(at) = self.few.iter().rposition(|other| *other == run) {
            self.few.swap_remove(at);
            return true;
        }
        let Some(times) = self.many.get_mut(&run) else { return false };
        *times -= 1;
        if *times == 0 {
            self.many.remove(&run);
        }
        self.counted -= 1;
        true
    }

    fn iter(&self) -> impl Iterator<Item = HeldRun> {
        let many = self.many.iter().flat_map(|(run, times)| (0..*times).map(|_| *run));
        self.few.iter().copied().chain(many)
    }

    fn retain(&mut self, stays: impl Fn(&HeldRun) -> bool) {
        self.few.retain(&stays);
        self.many.retain(|run, _| stays(run));
        self.counted = self.many.values().map(|times| *times as usize).sum();
    }

    fn len(&self) -> usize {
        self.few.len() + self.counted
    }
}

#[derive(Debug, Default)]
struct Held {
    runs: Runs,
    pages: u32,
    /// Frames that the scope has spent for these runs, out of those it reserved.
    paid: u32,
    /// Pins that the task has let go of, and that end behind a stream.
    behind: Runs,
    /// How many requests of the scope wait.
    waiting: u32,
}

/// A run that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct HeldRun {
    run: PageRun,
    exclusive: bool,
}

impl Held {
    /// Removes pins, and what was spent for them. Returns how many pages went.
    fn remove(&mut self, runs: &[PageRun], exclusive: bool, spent: u32) -> u32 {
        let before = self.pages;
        for run in runs {
            if self.runs.remove(HeldRun { run: *run, exclusive }) {
                self.pages -= run.count;
            }
        }
        self.paid = self.paid.saturating_sub(spent);
        before - self.pages
    }
}

impl Holdings {
    fn new(at_most: Option<u32>) -> Self {
        Self { at_most, ..Self::default() }
    }

    /// Claims this many of the pages the scope was opened for, before they are pinned. So threads that pin at the same
    /// time do not exceed that number together. Returns `false` if fewer are left. Claimed pages are then
    /// [added](Self::add) or [given up](Self::unclaim).
    #[must_use]
    pub fn claim(&self, pages: u32) -> bool {
        let Some(most) = self.at_most else { return true };
        let fits = |claimed: u64| Some(claimed + u64::from(pages)).filter(|all| *all <= u64::from(most));
        self.claimed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    /// Gives up claimed pages that were not pinned, or whose pins have ended.
    pub fn unclaim(&self, pages: u32) {
        if self.at_most.is_some() {
            let claimed = self.claimed.fetch_sub(u64::from(pages), Ordering::Relaxed);
            invariant!(claimed >= u64::from(pages), "{pages} pages are given up, of {claimed} that were claimed");
        }
    }

    /// Adds pins. `exclusive` means a writer's. Returns whether the scope has waiting requests: the caller then has the
    /// pager [look again](crate::Pager::holds_more).
    #[must_use]
    pub fn add(&self, runs: &[PageRun], exclusive: bool) -> bool {
        self.add_paid(runs, exclusive, 0)
    }

    /// [`add`](Self::add) for pins on which the scope has spent `spent` frames.
    pub(super) fn add_paid(&self, runs: &[PageRun], exclusive: bool, spent: u32) -> bool {
        let mut held = self.held.lock();
        for run in runs {
            held.runs.add(HeldRun { run: *run, exclusive });
            held.pages += run.count;
        }
        held.paid += spent;
        held.waiting > 0
    }

    /// Drops all pins of a segment that goes. Nobody can end them, because their guards or requests were forgotten.
    pub(super) fn forget(&self, segment: SegmentId, spent: u32) {
        let mut held = self.held.lock();
        held.paid = held.paid.saturating_sub(spent);
        let stays = |held: &HeldRun| held.run.segment != segment;
        self.unclaim(held.runs.iter().filter(|held| !stays(held)).map(|held| held.run.count).sum());
        held.runs.retain(stays);
        held.behind.retain(stays);
        held.pages = held.runs.iter().map(|held| held.run.count).sum();
    }

    /// Removes pins, and what was spent for them. Called before the pins end, so that every page listed here is pinned.
    pub fn remove(&self, runs: &[PageRun], exclusive: bool, spent: u32) {
        let gone = self.held.lock().remove(runs, exclusive, spent);
        self.unclaim(gone);
    }

    /// [`remove`](Self::remove) for pins that end behind a stream. [`passed`](Self::passed) follows, right after they
    /// have ended.
    pub fn leave_behind(&self, runs: &[PageRun], exclusive: bool, spent: u32) {
        let mut held = self.held.lock();
        let gone = held.remove(runs, exclusive, spent);
        runs.iter().for_each(|run| held.behind.add(HeldRun { run: *run, exclusive }));
        drop(held);
        self.unclaim(gone);
    }

    /// The stream has passed, and pins that were [left behind](Self::leave_behind) have ended. Returns whether the
    /// scope has waiting requests: the pager must then hear of the [end](crate::Pager::released) of these pins.
    #[must_use]
    pub fn passed(&self, runs: &[PageRun], exclusive: bool) -> bool {
        let mut held = self.held.lock();
        for run in runs {
            held.behind.remove(HeldRun { run: *run, exclusive });
        }
        held.waiting > 0
    }

    /// Pins that were [left behind](Self::leave_behind) never end. What was spent for them is not waited for. Returns
    /// what [`passed`](Self::passed) does.
    #[must_use]
    pub fn kept(&self, runs: &[PageRun], exclusive: bool, spent: u32) -> bool {
        self.held.lock().paid += spent;
        self.passed(runs, exclusive)
    }

    /// How many pages the scope was opened for. `None` if it did not say.
    pub(super) fn at_most(&self) -> Option<u32> {
        self.at_most
    }

    /// How many of the pages the scope was opened for are pinned or asked for.
    pub(super) fn claimed(&self) -> u64 {
        self.claimed.load(Ordering::Relaxed)
    }

    /// How many pages are held. A page that is pinned twice counts twice.
    pub fn pages(&self) -> u32 {
        self.held.lock().pages
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held.lock().runs.len() == 0
    }

    /// The runs that are held, and whether by a writer.
    pub(super) fn runs(&self) -> Vec<(PageRun, bool)> {
        self.held.lock().runs.iter().map(|held| (held.run, held.exclusive)).collect()
    }

    /// Whether a page is held, and if so, whether by a writer.
    pub(super) fn holds(&self, page: PageId) -> Option<bool> {
        self.held.lock().runs.iter().find(|held| held.run.contains(page)).map(|held| held.exclusive)
    }

    /// The pages of pins that end behind a stream, once for each pin.
    pub(super) fn behind(&self) -> Vec<PageId> {
        self.held.lock().behind.iter().flat_map(|held| held.run.pages()).collect()
    }

    /// How many pins of a page end behind a stream.
    pub(super) fn behind_of(&self, page: PageId) -> u32 {
        self.held.lock().behind.iter().filter(|held| held.run.contains(page)).count() as u32
    }

    pub(super) fn waits(&self, more: bool) {
        let mut held = self.held.lock();
        held.waiting = if more { held.waiting + 1 } else { held.waiting.saturating_sub(1) };
    }

    /// Frames spent for what the scope holds.
    pub(super) fn paid(&self) -> u32 {
        self.held.lock().paid
    }

    /// The first page on which the scope's own pins exclude the request, if there is one.
    pub(super) fn excludes(&self, runs: &[PageRun], write: bool) -> Option<PageId> {
        let held = self.held.lock();
        let overlaps = |a: &PageRun, b: &PageRun| {
            a.segment == b.segment && a.first.0 < b.first.0 + b.count && b.first.0 < a.first.0 + a.count
        };
        let run = held
            .runs
            .iter()
            .filter(|held| write || held.exclusive)
            .find_map(|held| runs.iter().find(|run| overlaps(&held.run, run)).copied())?;
        run.pages().next()
    }
}

/// The properties of a scope.
#[derive(Clone, Debug, Default)]
pub struct ScopeTerms {
    /// A name for messages. May be empty.
    pub label: String,
    /// How early its requests are served.
    pub priority: ScopePriority,
    /// The most pages that it will have pinned at one time. `None` if it does not say.
    pub at_most: Option<u32>,
}

/// A scope that is open.
#[derive(Debug)]
pub(super) struct Scope {
    label: Arc<str>,
    pub(super) priority: ScopePriority,
    /// Frames set aside for it and not spent.
    pub(super) purse: u32,
    /// Frames on their way to its purse.
    pub(super) coming: u32,
    /// Frames owed to its purse: it has spent them, their pins have ended, and nothing is on its way yet.
    pub(super) owed: u32,
    /// All frames that were set aside for it, spent or not.
    pub(super) declared: u32,
    /// What it has spent of them for each granted request, with the first run of that request.
    pub(super) paid: Vec<(PageRun, u32)>,
    /// The request that waits until all declared frames are set aside.
    pub(super) reserving: Option<RequestId>,
    pub(super) holdings: Arc<Holdings>,
    /// Its waiting requests.
    pub(super) waiting: BTreeSet<RequestId>,
    /// Whether all its waiting requests are known to be those of a holder.
    pub(super) all_hold: bool,
    pub(super) serial: u32,
}

impl Scope {
    /// A scope that holds nothing yet.
    pub(super) fn new(terms: ScopeTerms, serial: u32) -> Self {
        let ScopeTerms { label, priority, at_most } = terms;
        Self {
            label: label.into(),
            priority,
            purse: 0,
            coming: 0,
            owed: 0,
            declared: 0,
            paid: Vec::new(),
            reserving: None,
            holdings: Arc::new(Holdings::new(at_most)),
            waiting: BTreeSet::new(),
            all_hold: false,
            serial,
        }
    }

    pub(super) fn label(&self) -> &Arc<str> {
        &self.label
    }

    pub(super) fn holdings(&self) -> &Arc<Holdings> {
        &self.holdings
    }

    /// Frames it may spend now. None before all declared frames are there: if the request for them were given up
    /// meanwhile, spent frames would belong to nobody.
    pub(super) fn may_spend(&self) -> u32 {
        if self.reserving.is_some() { 0 } else { self.purse }
    }

    /// Frames that come to its purse, or are there, whatever others hold: in the purse, on their way, or spent for pins
    /// that end behind a stream. While it waits for what it declares, all of that is on its way.
    pub(super) fn comes_to_purse(&self) -> u32 {
        let spent: u32 = self.paid.iter().map(|(_, frames)| frames).sum();
        self.purse + self.coming + spent.saturating_sub(self.holdings.paid())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PageIndex;

    #[test]
    fn regression_guards_that_go_in_the_order_they_came_are_not_looked_for_among_all() {
        let run = |index: u32| {
            let run = PageRun { segment: SegmentId(0), first: PageIndex(index), count: 1 };
            HeldRun { run, exclusive: false }
        };
        let mut runs = Runs::default();
        for index in (0..8000).chain(0..8000) {
            runs.add(run(index));
            assert!(runs.few.len() <= Runs::FEW, "so many are looked through for each that goes");
        }
        assert_eq!((runs.len(), runs.iter().count()), (16_000, 16_000));
        for (gone, index) in (0..8000).chain(0..8000).enumerate() {
            assert!(runs.remove(run(index)), "{index} was there");
            assert_eq!(runs.len(), 15_999 - gone);
        }
        assert!(!runs.remove(run(0)) && runs.many.is_empty());
    }
}
