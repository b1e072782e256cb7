//! Scopes: what one task holds and may still ask for.
//!
//! A scope is the unit of admission. Its first pins, or the frames it [reserves](crate::Pager::reserve), are *new* and
//! wait in line. Requests it makes while it holds pins are *growth*. Growth passes the line, because others may wait
//! for just these pins.
//!
//! A scope that declares how much it will need gets its frames set aside at the start, in a purse. It spends them on
//! pages that are missing. When the pins end, the purse is filled again before anybody else gets a frame.
//!
//! # Deadlocks
//!
//! Only growth holds pins and waits. When growth has to wait, the pager checks each scope that waits and holds pins or
//! a purse: can it go on once those before it let go of their frames and page locks? If not, one of the scopes that
//! wait for each other forever gets [`WouldDeadlock`](crate::ErrorKind::WouldDeadlock). A pin outside of scopes is
//! assumed to end. `deadlock` finds the answer.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::known::Known;
use super::request::ScopePriority;
use super::runs::PageRun;
use crate::ids::{PageId, RequestId, SegmentId};
use crate::sync::{AtomicU64, Mutex, Ordering};

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
    /// Frames that the scope has spent for these runs, out of those it declared.
    paid: u32,
    /// How many requests of the scope wait.
    waiting: u32,
    /// What changed since the pager counted last, while the scope waits. So a pin costs the pager only what it changes.
    changes: Vec<((PageRun, bool), Change)>,
    /// Whether `changes` is incomplete, so that the pager must count anew.
    uncounted: bool,
}

/// A run that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct HeldRun {
    run: PageRun,
    exclusive: bool,
    /// Whether it counts among the pages the scope was opened for. `false` for pins that could not be refused.
    claimed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Came,
    Went,
}

/// The holdings of a waiting scope, or their changes. The `bool` says whether the run is held exclusively.
pub(super) enum Counted {
    Anew(Vec<(PageRun, bool)>),
    Since(Vec<((PageRun, bool), Change)>),
}

impl Held {
    fn runs(&self) -> Vec<(PageRun, bool)> {
        self.runs.iter().map(|held| (held.run, held.exclusive)).collect()
    }

    fn changed(&mut self, run: (PageRun, bool), change: Change) {
        if self.waiting == 0 || self.uncounted {
            return;
        }
        if self.changes.len() > self.runs.len() + 16 {
            self.count_anew();
        } else {
            self.changes.push((run, change));
        }
    }

    fn count_anew(&mut self) {
        self.uncounted = true;
        self.changes.clear();
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
        self.add_paid(runs, exclusive, 0, true)
    }

    /// [`add`](Self::add) for pins that could [not be refused](super::Terms::never_refused) and so were not claimed.
    #[must_use]
    pub fn add_unclaimed(&self, runs: &[PageRun], exclusive: bool) -> bool {
        self.add_paid(runs, exclusive, 0, false)
    }

    /// [`add`](Self::add) for pins on which the scope has spent `spent` frames.
    pub(super) fn add_paid(&self, runs: &[PageRun], exclusive: bool, spent: u32, claimed: bool) -> bool {
        let mut held = self.held.lock();
        for run in runs {
            held.runs.add(HeldRun { run: *run, exclusive, claimed });
            held.pages += run.count;
            held.changed((*run, exclusive), Change::Came);
        }
        held.paid += spent;
        held.waiting > 0
    }

    /// Drops all pins of a segment that goes. Nobody can end them, because their guards or requests were forgotten.
    pub(super) fn forget(&self, segment: SegmentId, spent: u32) {
        let mut held = self.held.lock();
        held.count_anew();
        held.paid = held.paid.saturating_sub(spent);
        let gone = |held: &HeldRun| held.run.segment == segment && held.claimed;
        self.unclaim(held.runs.iter().filter(gone).map(|held| held.run.count).sum());
        held.runs.retain(|held| held.run.segment != segment);
        held.pages = held.runs.iter().map(|held| held.run.count).sum();
    }

    /// Removes pins, and what was spent for them. Called before the pins end, so that every page listed here is pinned.
    pub fn remove(&self, runs: &[PageRun], exclusive: bool, spent: u32) {
        self.take_out(runs, exclusive, spent, true);
    }

    /// [`remove`](Self::remove) for pins that could [not be refused](super::Terms::never_refused).
    pub fn remove_unclaimed(&self, runs: &[PageRun], exclusive: bool, spent: u32) {
        self.take_out(runs, exclusive, spent, false);
    }

    fn take_out(&self, runs: &[PageRun], exclusive: bool, spent: u32, claimed: bool) {
        let mut held = self.held.lock();
        let before = held.pages;
        for run in runs {
            if held.runs.remove(HeldRun { run: *run, exclusive, claimed }) {
                held.pages -= run.count;
                held.changed((*run, exclusive), Change::Went);
            }
        }
        held.paid = held.paid.saturating_sub(spent);
        if claimed {
            self.unclaim(before - held.pages);
        }
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

    pub(super) fn runs(&self) -> Vec<(PageRun, bool)> {
        self.held.lock().runs()
    }

    /// The next [count](Self::count) tells all that the scope holds.
    pub(super) fn count_anew(&self) {
        self.held.lock().count_anew();
    }

    pub(super) fn waits(&self, more: bool) {
        let mut held = self.held.lock();
        if held.waiting == 0 {
            held.count_anew();
        }
        held.waiting = if more { held.waiting + 1 } else { held.waiting.saturating_sub(1) };
    }

    /// What the scope holds: only the changes since the last count, if they are complete. Also what was spent for it.
    pub(super) fn count(&self) -> (Counted, u32) {
        let mut held = self.held.lock();
        let counted = if std::mem::take(&mut held.uncounted) {
            Counted::Anew(held.runs())
        } else {
            Counted::Since(std::mem::take(&mut held.changes))
        };
        (counted, held.paid)
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
    /// What the search for deadlocks knows of it.
    pub(super) known: Known,
    /// Whether all its waiting requests are known to be growth.
    pub(super) all_grow: bool,
    /// Whether it is listed in `Pager::grown`.
    pub(super) grown: bool,
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
            known: Known::default(),
            all_grow: false,
            grown: false,
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

    /// Frames that are the scope's beside the pages it holds: in its purse, on their way, owed, or spent for pages that
    /// it does not hold yet, or holds no longer. Nobody else ever gets one of them.
    pub(super) fn claim(&self) -> u32 {
        self.declared.saturating_sub(self.holdings.paid())
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
            HeldRun { run, exclusive: false, claimed: true }
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
