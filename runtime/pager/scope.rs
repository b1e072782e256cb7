//! Scopes: what one task holds and may still ask for.
//!
//! A scope is the unit of admission: its first pins, or what it [reserves](Pager::open_scope), are *new* and wait in line;
//! what it asks for while it holds pins is *growth*, which passes the line, because others may wait for just these pins.
//! A scope that declares how much it will need gets its frames set aside at the start, in a purse, and spends them on
//! pages that are missing; with the pin's end the purse is filled again before anybody else gets a frame.
//!
//! # Deadlocks
//!
//! Only growth holds and waits. Whenever growth has to wait, `break_deadlocks` looks at the scopes that hold pins
//! or a purse, and wait, and takes away, one after the other, those that could go on if all others but the rest let go: by frames, and
//! by locks of pages. Whoever remains waits for each other for ever: one of them gets
//! [`WouldDeadlock`](ErrorKind::WouldDeadlock). A pin outside of scopes is taken for one that ends.
//!
//! Before a scope waits there is no circle, so a new one goes through this scope. It is looked at first: with what all of
//! the others hold, are there frames for it, and for those whose pages it waits for, and for those whose pages these wait
//! for? If that comes to an end everywhere, all go on in the other direction, and nobody else is looked at.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::Write;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Effects, PageRun, Pager, Purpose};
use crate::error::{Error, ErrorKind};
use crate::ids::{Bytes, PageId, RequestId, ScopeId, SegmentId};
use crate::sync::{AtomicU64, Ordering};

/// Which scopes and pins are served first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ScopePriority {
    /// Somebody waits for an answer.
    #[default]
    Interactive,
    /// Nobody does. Served when no interactive scope waits, or after 16 of these have gone first.
    Batch,
}

/// What a scope holds: kept by whoever pins for it, looked at by the pager when somebody has to wait.
#[derive(Debug, Default)]
pub struct Holdings {
    held: Mutex<Held>,
    /// The pages it was opened for, if it said so.
    at_most: Option<u32>,
    /// Those of them that are pinned or asked for. A count, which publishes nothing.
    claimed: AtomicU64,
}

#[derive(Debug, Default)]
struct Held {
    runs: Vec<(PageRun, bool)>,
    pages: u32,
    /// What its scope has spent for these of what it declared.
    paid: u32,
    /// Requests of the scope that wait.
    waiting: u32,
    /// What has come and gone since the pager counted last, while the scope waits: so that a pin costs the pager what it changes.
    changes: Vec<(PageRun, Change)>,
    /// There is more that has changed than is held: the pager counts anew.
    uncounted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Came,
    Went,
}

/// What a scope that waits holds, for who counts it.
enum Counted {
    Anew(Vec<(PageRun, bool)>),
    Since(Vec<(PageRun, Change)>),
}

impl Held {
    fn changed(&mut self, run: PageRun, change: Change) {
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

    /// Claims so many of the pages that the scope was opened for, before they are pinned: threads that pin at once do not
    /// have more than these together. `false` if there are not so many. What is claimed is then [added](Self::add), or
    /// [given up](Self::unclaim).
    #[must_use]
    pub fn claim(&self, pages: u32) -> bool {
        let Some(most) = self.at_most else { return true };
        let fits = |claimed: u64| Some(claimed + u64::from(pages)).filter(|all| *all <= u64::from(most));
        self.claimed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    /// So many pages that were claimed are not pinned, or not any more.
    pub fn unclaim(&self, pages: u32) {
        if self.at_most.is_some() {
            let claimed = self.claimed.fetch_sub(u64::from(pages), Ordering::Relaxed);
            invariant!(claimed >= u64::from(pages), "{pages} pages are given up, of {claimed} that were claimed");
        }
    }

    /// Adds pins, `exclusive` ones of a writer. Returns whether the scope waits for others meanwhile: then the caller has
    /// the pager [look again](Pager::holds_more).
    #[must_use]
    pub fn add(&self, runs: &[PageRun], exclusive: bool) -> bool {
        self.add_paid(runs, exclusive, 0)
    }

    /// [`add`](Self::add) of pins for which the scope has spent so many frames.
    fn add_paid(&self, runs: &[PageRun], exclusive: bool, spent: u32) -> bool {
        let mut held = self.held.lock();
        for run in runs {
            held.runs.push((*run, exclusive));
            held.pages += run.count;
            held.changed(*run, Change::Came);
        }
        held.paid += spent;
        held.waiting > 0
    }

    /// A segment goes that has pins nobody can end, because their guards or requests were forgotten: they are not held.
    fn forget(&self, segment: SegmentId, spent: u32) {
        let mut held = self.held.lock();
        held.count_anew();
        held.paid = held.paid.saturating_sub(spent);
        let before = held.pages;
        held.runs.retain(|(run, _)| run.segment != segment);
        held.pages = held.runs.iter().map(|(run, _)| run.count).sum();
        self.unclaim(before - held.pages);
    }

    /// Takes them away again, with what was spent for them. Called before the pins end, so that what is listed here is pinned.
    pub fn remove(&self, runs: &[PageRun], exclusive: bool, spent: u32) {
        let mut held = self.held.lock();
        let before = held.pages;
        for run in runs {
            // The last one is the likeliest to end.
            if let Some(at) = held.runs.iter().rposition(|other| *other == (*run, exclusive)) {
                held.runs.swap_remove(at);
                held.pages -= run.count;
                held.changed(*run, Change::Went);
            }
        }
        held.paid = held.paid.saturating_sub(spent);
        self.unclaim(before - held.pages);
    }

    /// The pages the scope was opened for, if it said so.
    pub(super) fn at_most(&self) -> Option<u32> {
        self.at_most
    }

    /// Pages held, one that is pinned twice counted twice.
    pub fn pages(&self) -> u32 {
        self.held.lock().pages
    }

    fn is_empty(&self) -> bool {
        self.held.lock().runs.is_empty()
    }

    pub(super) fn runs(&self) -> Vec<(PageRun, bool)> {
        self.held.lock().runs.clone()
    }

    fn waits(&self, more: bool) {
        let mut held = self.held.lock();
        if held.waiting == 0 {
            held.count_anew();
        }
        held.waiting = if more { held.waiting + 1 } else { held.waiting.saturating_sub(1) };
    }

    /// What it holds, for who has counted before; and what was spent for it.
    fn count(&self) -> (Counted, u32) {
        let mut held = self.held.lock();
        let counted = if std::mem::take(&mut held.uncounted) {
            Counted::Anew(held.runs.clone())
        } else {
            Counted::Since(std::mem::take(&mut held.changes))
        };
        (counted, held.paid)
    }

    /// What was spent for what it holds.
    pub(super) fn paid(&self) -> u32 {
        self.held.lock().paid
    }

    /// Whether the scope itself has a page of these pinned in a way that excludes the request.
    fn excludes(&self, runs: &[PageRun], write: bool) -> Option<PageId> {
        let held = self.held.lock();
        let overlaps = |a: &PageRun, b: &PageRun| {
            a.segment == b.segment && a.first.0 < b.first.0 + b.count && b.first.0 < a.first.0 + a.count
        };
        let (_, run) = held
            .runs
            .iter()
            .filter(|(_, exclusive)| write || *exclusive)
            .find_map(|(held, _)| runs.iter().find(|run| overlaps(held, run)).map(|run| (held, *run)))?;
        run.pages().next()
    }
}

/// What a scope is like.
#[derive(Clone, Debug, Default)]
pub struct ScopeTerms {
    /// For messages; may be empty.
    pub label: String,
    /// When it is served.
    pub priority: ScopePriority,
    /// The pages it will have pinned at one time, if it says so.
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
    /// Frames it has spent whose pins have ended, and that are not on their way.
    pub(super) owed: u32,
    /// All frames that were set aside for it, spent or not.
    pub(super) declared: u32,
    /// What it has spent of them on pins that have been granted, by the first run of these.
    pub(super) paid: Vec<(PageRun, u32)>,
    /// The request that waits until all that it declared is set aside.
    pub(super) reserving: Option<RequestId>,
    holdings: Arc<Holdings>,
    /// Its requests that wait, the oldest first.
    waiting: BTreeSet<RequestId>,
    /// Its pages, and how often it has each, as far as they are counted among what stuck scopes hold.
    counted: HashMap<PageId, u32>,
    /// Its claim, as far as it is counted likewise.
    counted_claim: u32,
    /// All its requests that wait are known to be growth.
    all_grow: bool,
    serial: u32,
}

impl Scope {
    pub(super) fn label(&self) -> &Arc<str> {
        &self.label
    }

    pub(super) fn holdings(&self) -> &Arc<Holdings> {
        &self.holdings
    }

    /// Frames it may spend now. None before all that it declares are there: were the request for them given up meanwhile,
    /// what was spent would be nobody's.
    pub(super) fn may_spend(&self) -> u32 {
        if self.reserving.is_some() { 0 } else { self.purse }
    }

    /// Frames that are its beside the pages it holds: in its purse, on their way, owed, or spent for pages that it does not
    /// hold yet, or not any more. None of them is ever anybody else's.
    fn claim(&self) -> u32 {
        self.declared.saturating_sub(self.holdings.paid())
    }
}

/// Scopes that hold pins and wait.
#[derive(Debug, Default)]
pub(super) struct Stuck {
    /// Who of them holds a page. What they have let go of since they began to wait may still be here.
    pages: HashMap<PageId, HashSet<usize>>,
    /// What they [claim](Scope::claim) beside these.
    claims: u32,
}

impl Stuck {
    fn lets_go(&mut self, page: PageId, key: usize) {
        if let Some(holders) = self.pages.get_mut(&page) {
            holders.remove(&key);
            if holders.is_empty() {
                self.pages.remove(&page);
            }
        }
    }
}

impl Pager {
    fn scope_id(&self, key: usize) -> ScopeId {
        ScopeId(key as u64 | u64::from(self.scopes[key].serial) << 32)
    }

    pub(super) fn scope_key(&self, id: ScopeId) -> Option<usize> {
        let key = id.0 as u32 as usize;
        self.scopes.get(key).filter(|scope| u64::from(scope.serial) == id.0 >> 32).map(|_| key)
    }

    pub(super) fn scope(&self, id: Option<ScopeId>) -> Option<&Scope> {
        self.scope_key(id?).map(|key| &self.scopes[key])
    }

    pub(super) fn scope_mut(&mut self, id: Option<ScopeId>) -> Option<&mut Scope> {
        self.scope_key(id?).map(|key| &mut self.scopes[key])
    }

    pub(super) fn open_scopes(&self) -> impl Iterator<Item = (ScopeId, &Scope)> {
        self.scopes.iter().map(|(key, scope)| (self.scope_id(key), scope))
    }

    /// Opens a scope, and gives what its pins are kept in. One that says how much it needs has to ask for it before it pins:
    /// see [`reserve`](Self::reserve).
    pub fn open_scope(&mut self, terms: ScopeTerms) -> (ScopeId, Arc<Holdings>) {
        self.next_serial = self.next_serial.wrapping_add(1);
        let ScopeTerms { label, priority, at_most } = terms;
        let holdings = Arc::new(Holdings::new(at_most));
        let (purse, coming, owed, declared, reserving) = (0, 0, 0, 0, None);
        let (waiting, serial) = (BTreeSet::new(), self.next_serial);
        let scope = Scope {
            label: label.into(),
            priority,
            purse,
            coming,
            owed,
            declared,
            paid: Vec::new(),
            reserving,
            holdings: holdings.clone(),
            waiting,
            counted: HashMap::new(),
            counted_claim: 0,
            all_grow: false,
            serial,
        };
        let key = self.scopes.insert(scope);
        (self.scope_id(key), holdings)
    }

    /// A scope ends: what was set aside for it is anybody's. Its pins may outlive it; they are then nobody's, like those
    /// outside of scopes, and its requests end with `Closed`.
    pub fn close_scope(&mut self, id: ScopeId, fx: &mut Effects) {
        let Some(key) = self.scope_key(id) else { return };
        let reserving = self.scopes[key].reserving;
        for request in self.scopes[key].waiting.clone().into_iter().chain(reserving) {
            let error = Error::new(ErrorKind::Closed, format!("{} has ended", self.scope_name(Some(id))));
            self.end(request, error, fx);
        }
        let before = self.frames_beside(self.declared);
        let scope = self.scopes.remove(key);
        self.purses -= scope.purse;
        self.coming -= scope.coming;
        self.owed -= scope.owed;
        self.declared -= scope.declared;
        self.coming_to.remove(&key);
        self.owed_to.remove(&key);
        invariant!(scope.counted.is_empty() && scope.waiting.is_empty(), "{id:?} has ended and waits");
        if self.frames_beside(self.declared) < before {
            // A budget that had been made smaller takes these frames: for others it shrinks now.
            self.look_at_all(fx);
        }
        self.pump(fx);
    }

    /// Whether one more scope may declare so many frames: together scopes declare no more than there are beside the floor. Asked
    /// of the sum and not of what is free: a frame that a scope is owed may be free, or about to be.
    pub(super) fn may_declare(&self, frames: u32) -> bool {
        self.declared + frames + self.floor <= self.frames.target
    }

    /// So many frames, free or in transit, are to be this scope's.
    pub(super) fn set_aside_for(&mut self, id: Option<ScopeId>, frames: u32, request: RequestId) {
        let Some(key) = id.and_then(|id| self.scope_key(id)) else { return };
        self.coming_to.insert(key);
        if let Some(scope) = self.scopes.get_mut(key) {
            scope.coming += frames;
            scope.declared += frames;
            scope.reserving = Some(request);
            self.coming += frames;
            self.declared += frames;
        }
    }

    /// A request for a purse is given up: nothing is set aside for its scope.
    pub(super) fn unreserve(&mut self, id: Option<ScopeId>) {
        let Some(scope) = self.scope_mut(id) else { return };
        // It may hold pins and wait for more all the same.
        scope.holdings.held.lock().count_anew();
        let (purse, coming) = (std::mem::take(&mut scope.purse), std::mem::take(&mut scope.coming));
        let declared = std::mem::take(&mut scope.declared);
        scope.reserving = None;
        let waiting = scope.waiting.clone();
        self.purses -= purse;
        self.coming -= coming;
        self.declared -= declared;
        if let Some(key) = id.and_then(|id| self.scope_key(id)) {
            self.coming_to.remove(&key);
        }
        // They wait for frames in line now.
        self.nearly.extend(waiting);
    }

    /// Puts free frames into the purses they are meant for. Returns the request that has all its frames now, if there is one.
    pub(super) fn take_aside(&mut self) -> Option<RequestId> {
        while self.coming > 0 && self.frames.free_count() > self.purses {
            let key = *self.coming_to.first()?;
            let scope = &mut self.scopes[key];
            (scope.coming, scope.purse) = (scope.coming - 1, scope.purse + 1);
            (self.coming, self.purses) = (self.coming - 1, self.purses + 1);
            invariant!(
                scope.purse + scope.coming + scope.owed <= scope.declared,
                "a purse holds more than was declared"
            );
            let full = scope.coming == 0;
            let reserving = if full { scope.reserving.take() } else { None };
            // Its own frames may be what somebody of it waits for.
            self.purse_filled(self.scope_id(key));
            if full {
                self.coming_to.remove(&key);
            }
            if reserving.is_some() {
                // Those that began to wait before it declared anything stand elsewhere.
                let waiting = self.scopes[key].waiting.iter().copied();
                let near: Vec<RequestId> = waiting.filter(|request| self.waits_for_frames(*request)).collect();
                self.nearly.extend(near);
                return reserving;
            }
        }
        None
    }

    /// A guard of a scope with a purse has ended, for whose pages it had spent so many frames. Told under the same hold of the latch
    /// in which its pages are unpinned: these frames are the scope's, and nobody else is to get one before it is known.
    pub fn unspent(&mut self, id: ScopeId, runs: &[PageRun], frames: u32, fx: &mut Effects) {
        let paid = runs.first().map(|first| (*first, frames));
        if let Some(scope) = self.scope_mut(Some(id))
            && let Some(at) = scope.paid.iter().position(|other| Some(*other) == paid)
        {
            scope.paid.swap_remove(at);
            self.owe(Some(id), frames);
        }
        self.pump(fx);
    }

    /// A segment goes, and some of its pages have pins that nobody can end. No scope holds them any more, and what was spent
    /// for them is owed: a later segment may have the same number.
    pub(super) fn forget_pins_of(&mut self, segment: SegmentId) {
        for (key, scope) in &mut self.scopes {
            let (gone, paid) = scope.paid.drain(..).partition(|(run, _)| run.segment == segment);
            scope.paid = paid;
            let gone: Vec<(PageRun, u32)> = gone;
            let frames: u32 = gone.iter().map(|(_, frames)| frames).sum();
            scope.holdings.forget(segment, frames);
            if frames > 0 {
                self.owed_to.insert(key);
            }
            scope.owed += frames;
            self.owed += frames;
        }
    }

    pub(super) fn owe(&mut self, id: Option<ScopeId>, frames: u32) {
        let Some(key) = id.and_then(|id| self.scope_key(id)).filter(|_| frames > 0) else { return };
        let scope = &mut self.scopes[key];
        scope.owed += frames;
        invariant!(scope.purse + scope.coming + scope.owed <= scope.declared, "a scope is owed more than it declared");
        self.owed += frames;
        self.owed_to.insert(key);
    }

    /// Fills purses that are owed frames, before anybody else gets one, and before a smaller budget does.
    pub(super) fn fill_purses(&mut self, fx: &mut Effects) {
        while self.owed > 0 && !self.closing {
            while self.frames.free_count() + self.transit <= self.wanted() + self.floor {
                if !self.reclaim(super::policy::Want::Demand, fx) {
                    return;
                }
            }
            let Some(key) = self.owed_to.first().copied() else { return };
            let scope = &mut self.scopes[key];
            (scope.owed, scope.coming) = (scope.owed - 1, scope.coming + 1);
            if scope.owed == 0 {
                self.owed_to.remove(&key);
            }
            self.coming_to.insert(key);
            (self.owed, self.coming) = (self.owed - 1, self.coming + 1);
            // Others have one frame fewer to hope for.
            self.look_again(self.scope_id(key));
            self.serve_awaiting(fx);
        }
    }

    /// Frames set aside for scopes that declared what they need, or on their way to that, and not spent.
    pub fn set_aside(&self) -> u32 {
        self.purses + self.coming
    }

    /// Frames that scopes have declared: set aside for them, spent, or owed to them.
    #[doc(hidden)]
    pub fn declared(&self) -> u32 {
        self.declared
    }

    /// Sets so many frames aside for requests that can never be refused.
    ///
    /// # Errors
    /// `BudgetTooSmall` if no frame would be left for others, or not what scopes have declared.
    pub fn set_floor(&mut self, frames: u32, fx: &mut Effects) -> Result<(), Error> {
        let others = self.declared.max(1);
        if frames > self.floor && frames + others > self.frames.target || frames >= self.frames.target {
            let (have, page) = (self.frames.target, self.config.page_bytes);
            let budget = Bytes::new(u64::from(have) * page);
            let message = match self.declared {
                0 => format!("{frames} frames set aside leave none of a budget of {have} pages ({budget})"),
                declared => format!(
                    "{frames} frames set aside do not leave the {declared} that scopes have declared of a budget of {have} \
                     pages ({budget})"
                ),
            };
            let need = Bytes::new((u64::from(frames) + u64::from(others)) * page);
            return Err(Error::new(ErrorKind::BudgetTooSmall, message)
                .remedy(format!("raise the device budget to at least {need}")));
        }
        self.floor = frames;
        self.refuse_oversized(fx);
        self.pump(fx);
        Ok(())
    }

    /// Whether a request of this scope grows it.
    pub(super) fn grows(&self, id: Option<ScopeId>) -> bool {
        self.scope(id).is_some_and(|scope| scope.declared > 0 || !scope.holdings.is_empty())
    }

    /// The scope a request was granted to has it, and has spent so many frames for it.
    pub(super) fn acquired(&mut self, id: Option<ScopeId>, runs: &[PageRun], exclusive: bool, spent: u32) {
        let Some(scope) = self.scope_mut(id) else { return };
        if let Some(first) = runs.first().filter(|_| spent > 0) {
            scope.paid.push((*first, spent));
        }
        if scope.holdings.add_paid(runs, exclusive, spent)
            && let Some(id) = id
        {
            self.look_again(id);
        }
    }

    /// The requests of a scope that wait.
    fn waiting_of(&self, id: ScopeId) -> Vec<RequestId> {
        self.scope(Some(id)).map(|scope| scope.waiting.iter().copied().collect()).unwrap_or_default()
    }

    /// A scope that waits has more than it had: what it waits for is growth now, and may close a circle.
    fn look_again(&mut self, id: ScopeId) {
        if !self.grown.contains(&id) {
            self.grown.push(id);
        }
        let Some(scope) = self.scope_mut(Some(id)) else { return };
        if std::mem::replace(&mut scope.all_grow, true) {
            return;
        }
        for request in self.waiting_of(id) {
            self.make_growing(request);
        }
    }

    /// Looks for circles that scopes have closed by getting more while they waited.
    pub(super) fn look_at_grown(&mut self, fx: &mut Effects) {
        for id in std::mem::take(&mut self.grown) {
            self.break_deadlocks(id, fx);
        }
    }

    /// Looks for circles that may have been closed anywhere.
    pub(super) fn look_at_all(&mut self, fx: &mut Effects) {
        let waiting = |(id, scope): (ScopeId, &Scope)| (!scope.waiting.is_empty()).then_some(id);
        let all: Vec<ScopeId> = self.open_scopes().filter_map(waiting).collect();
        for id in all {
            self.break_deadlocks(id, fx);
        }
    }

    /// What is asked for is refused if the scope itself is in its own way, or wants more than it said. If not, it is claimed.
    pub(super) fn claim(&self, id: Option<ScopeId>, runs: &[PageRun], purpose: Purpose) -> Result<(), Error> {
        let Some(wanted) = id else { return Ok(()) };
        let Some(scope) = self.scope(id) else {
            return Err(Error::new(ErrorKind::Closed, format!("{wanted:?} has ended")).remedy("open another scope"));
        };
        if let Some(page) = scope.holdings.excludes(runs, purpose == Purpose::Write) {
            let what = if purpose == Purpose::Write { "write" } else { "read" };
            let message = format!(
                "{} asks to {what} page {} of {:?}, which it has pinned itself",
                self.scope_name(id),
                page.index.0,
                page.segment
            );
            return Err(Error::new(ErrorKind::WouldDeadlock, message)
                .remedy("drop that guard first, or pin for writing from the start"));
        }
        let (asked, Holdings { at_most, claimed, .. }) = (pages_of(runs), &*scope.holdings);
        if !scope.holdings.claim(asked as u32) {
            let most = u64::from(at_most.unwrap_or(u32::MAX));
            let size = |pages: u64| Bytes::new(pages * self.config.page_bytes);
            let message = format!(
                "{} was opened for {most} pages ({}); it has {} pinned or asked for, and asks for {asked} more ({})",
                self.scope_name(id),
                size(most),
                claimed.load(Ordering::Relaxed),
                size(asked)
            );
            return Err(
                Error::new(ErrorKind::BudgetTooSmall, message).remedy("open the scope for more, or drop guards first")
            );
        }
        Ok(())
    }

    /// What was claimed for a request of this scope is not pinned.
    pub(super) fn unclaim(&self, id: Option<ScopeId>, pages: u32) {
        if let Some(scope) = self.scope(id) {
            scope.holdings.unclaim(pages);
        }
    }

    /// `scope 3 "chat 17"`.
    pub(super) fn scope_name(&self, id: Option<ScopeId>) -> String {
        match (id, self.scope(id)) {
            (Some(id), Some(scope)) if !scope.label.is_empty() => format!("scope {} {:?}", id.0 as u32, scope.label),
            (Some(id), _) => format!("scope {}", id.0 as u32),
            (None, _) => "a pin outside of scopes".to_owned(),
        }
    }

    /// A request has begun to wait.
    pub(super) fn begins_to_wait(&mut self, scope: Option<ScopeId>, request: RequestId) {
        let grows = self.is_growth(request);
        let Some(scope) = self.scope_mut(scope) else { return };
        if scope.waiting.contains(&request) {
            return;
        }
        scope.all_grow = grows && (scope.all_grow || scope.waiting.is_empty());
        scope.waiting.insert(request);
        scope.holdings.waits(true);
    }

    /// A request waits no more.
    pub(super) fn ends_waiting(&mut self, id: Option<ScopeId>, request: RequestId) {
        let Some(scope) = self.scope_mut(id) else { return };
        if !scope.waiting.remove(&request) {
            return;
        }
        scope.holdings.waits(false);
        if scope.waiting.is_empty()
            && let Some(key) = id.and_then(|id| self.scope_key(id))
        {
            self.uncount(key);
        }
    }

    /// A scope does not wait, or is to be counted anew.
    fn uncount(&mut self, key: usize) {
        self.stuck.claims -= std::mem::take(&mut self.scopes[key].counted_claim);
        for page in std::mem::take(&mut self.scopes[key].counted).into_keys() {
            self.stuck.lets_go(page, key);
        }
    }

    /// Counts what a scope that waits holds now, among what all that wait hold.
    fn count(&mut self, key: usize) {
        let (counted, paid) = self.scopes[key].holdings.count();
        let changes: Vec<(PageRun, Change)> = match counted {
            Counted::Since(changes) => changes,
            Counted::Anew(runs) => {
                self.uncount(key);
                runs.into_iter().map(|(run, _)| (run, Change::Came)).collect()
            }
        };
        let scope = &mut self.scopes[key];
        for (run, change) in changes {
            for page in run.pages() {
                let times = scope.counted.entry(page).or_default();
                if change == Change::Came {
                    *times += 1;
                    self.stuck.pages.entry(page).or_default().insert(key);
                    continue;
                }
                invariant!(*times > 0, "{page:?} is let go of by who does not hold it");
                *times -= 1;
                if *times == 0 {
                    scope.counted.remove(&page);
                    self.stuck.lets_go(page, key);
                }
            }
        }
        let claim = scope.declared.saturating_sub(paid);
        self.stuck.claims = self.stuck.claims - scope.counted_claim + claim;
        scope.counted_claim = claim;
    }

    /// A scope that waits has got more pins without the latch.
    pub fn holds_more(&mut self, id: ScopeId, fx: &mut Effects) {
        self.stats.latched_hits += 1;
        self.look_again(id);
        self.pump(fx);
    }

    /// Whether this scope, which has to wait, might close a circle: never wrong in saying no.
    fn might_deadlock(&mut self, id: ScopeId) -> bool {
        let Some(key) = self.scope_key(id).filter(|key| !self.scopes[*key].waiting.is_empty()) else { return false };
        self.count(key);
        let scope = &self.scopes[key];
        let holds = !scope.counted.is_empty() || scope.counted_claim > 0;
        holds && !self.is_seen_to_go_on(key)
    }

    /// Whether this scope goes on: all do that are in its way, and all in theirs. It is followed as far as nobody comes twice,
    /// and everybody would have frames while all that wait keep theirs; beyond that the answer is no.
    fn is_seen_to_go_on(&self, start: usize) -> bool {
        let Some(first) = self.in_the_way_of(start) else { return false };
        // Of those who have been met, whether they go on.
        let mut met: HashMap<usize, bool> = HashMap::from([(start, false)]);
        let mut path = vec![(start, first)];
        while let Some((at, others)) = path.last_mut() {
            let Some(next) = others.pop() else {
                met.insert(*at, true);
                path.pop();
                continue;
            };
            match met.get(&next) {
                Some(true) => {}
                Some(false) => return false,
                None => {
                    let Some(theirs) = self.in_the_way_of(next) else { return false };
                    met.insert(next, false);
                    path.push((next, theirs));
                }
            }
        }
        true
    }

    /// The scopes that wait and hold pages that this one waits for; none if it might be short of frames as long as all of
    /// them keep what they have, or is in its own way.
    fn in_the_way_of(&self, key: usize) -> Option<Vec<usize>> {
        let scope = &self.scopes[key];
        let held = self.stuck.pages.len() as u64 + u64::from(self.stuck.claims - scope.counted_claim);
        let mut others = Vec::new();
        for request in &scope.waiting {
            let Some((_, runs, purpose, reserves)) = self.asks(*request) else { continue };
            let mut wanted = u64::from(reserves) + u64::from(self.floor_for(*request));
            for page in runs.iter().flat_map(|run| run.pages()) {
                match self.stuck.pages.get(&page) {
                    None => wanted += 1,
                    Some(holders) if purpose == Purpose::Write || self.word(page).load().exclusive => {
                        if holders.contains(&key) {
                            return None;
                        }
                        others.extend(holders);
                    }
                    Some(_) => {}
                }
            }
            if held + wanted > u64::from(self.frames.target) || reserves > 0 && !self.may_declare(reserves) {
                return None;
            }
        }
        Some(others)
    }

    /// Frames that a request leaves alone.
    fn floor_for(&self, request: RequestId) -> u32 {
        if self.never_refused(request) { 0 } else { self.floor }
    }

    /// Ends one of the requests that wait for each other for ever, and again until there are none. Whether there was one.
    pub(super) fn break_deadlocks(&mut self, scope: ScopeId, fx: &mut Effects) -> bool {
        let mut any = false;
        if self.might_deadlock(scope) {
            while let Some((victim, error)) = self.find_deadlock() {
                self.stats.deadlocks += 1;
                self.end(victim, error, fx);
                any = true;
            }
        }
        any
    }

    /// Who waits for each other, and which request is to end.
    fn find_deadlock(&self) -> Option<(RequestId, Error)> {
        let mut nodes: Vec<Node<'_>> = Vec::new();
        // How many of the nodes hold a page, and whether one has it for itself.
        let mut holders: HashMap<PageId, (u32, bool)> = HashMap::new();
        for (key, scope) in self.scopes.iter().filter(|(_, scope)| !scope.waiting.is_empty()) {
            let runs = scope.holdings.runs();
            let held: HashMap<PageId, bool> =
                runs.iter().flat_map(|(run, exclusive)| run.pages().map(|page| (page, *exclusive))).collect();
            let claim = scope.claim();
            if held.is_empty() && claim == 0 {
                continue;
            }
            for (page, exclusive) in &held {
                let holder = holders.entry(*page).or_default();
                *holder = (holder.0 + 1, holder.1 || *exclusive);
            }
            nodes.push(Node { id: self.scope_id(key), scope, held, claim });
        }
        let mut claims: u64 = nodes.iter().map(|node| u64::from(node.claim)).sum();
        loop {
            let before = nodes.len();
            let declared: u32 = nodes.iter().map(|node| node.scope.declared).sum();
            let frames = self.frames_beside(declared);
            nodes.retain(|node| {
                let all = HeldByAll { pages: &holders, claims, frames, declared };
                let stays = node.scope.waiting.iter().any(|request| !self.goes_on(node, *request, &all));
                if !stays {
                    claims -= u64::from(node.claim);
                    for page in node.held.keys() {
                        if let Some((count, _)) = holders.get_mut(page) {
                            *count -= 1;
                            if *count == 0 {
                                holders.remove(page);
                            }
                        }
                    }
                }
                stays
            });
            if nodes.is_empty() {
                return None;
            }
            if nodes.len() == before {
                break;
            }
        }
        // Who is in its own way is told of it: nobody else can do anything about that.
        if let Some(told) = nodes.iter().find_map(|node| self.in_its_own_way(node)) {
            return Some(told);
        }
        // Of those that are in each other's way, the one that costs the least: no reservation, no answer waited for, the
        // youngest. One that gives up helps if it holds what no other one does.
        let declared = nodes.iter().map(|node| node.scope.declared).sum();
        let all = HeldByAll { pages: &holders, claims, frames: self.frames.target, declared };
        let victim = nodes
            .iter()
            .filter_map(|node| {
                let Node { id, scope, held, .. } = node;
                let mut refusable = scope.waiting.iter().rev().copied().filter(|request| !self.never_refused(*request));
                let any = refusable.clone().next()?;
                let request = refusable.find(|request| !self.goes_on(node, *request, &all)).unwrap_or(any);
                let alone = |page: &PageId| holders.get(page).is_some_and(|(count, _)| *count == 1);
                let helps = node.claim > 0 || held.keys().any(alone);
                Some(((helps, scope.holdings.at_most.is_none(), scope.priority, scope.serial), *id, request))
            })
            .max_by_key(|(cost, ..)| *cost);
        let (_, chosen, request) = victim?;
        let mut message = String::new();
        for node in nodes.iter().take(NAMED) {
            let asked: u64 =
                node.scope.waiting.iter().filter_map(|id| self.asks(*id)).map(|(_, runs, ..)| pages_of(runs)).sum();
            let _ = write!(
                message,
                "{} holds {} and asks for {}; ",
                self.scope_name(Some(node.id)),
                self.pages_in_words(node.held.len() as u64),
                self.pages_in_words(asked)
            );
        }
        if nodes.len() > NAMED {
            let _ = write!(message, "{} more scopes do likewise; ", nodes.len() - NAMED);
        }
        let _ = write!(
            message,
            "the budget is {}: they wait for each other, and {} gives up",
            self.pages_in_words(u64::from(self.frames.target)),
            self.scope_name(Some(chosen))
        );
        Some((
            request,
            Error::new(ErrorKind::WouldDeadlock, message).remedy(
                "drop the scope's guards and try again, pin what is needed together as a set, or open the scope for the \
                 most it will need, so that it is admitted as a unit",
            ),
        ))
    }

    /// Whether a request that waits could be admitted if nobody held anything but `all`.
    fn goes_on(&self, node: &Node<'_>, request: RequestId, all: &HeldByAll<'_>) -> bool {
        let Some((_, runs, purpose, reserves)) = self.asks(request) else { return true };
        let mut wanted = u64::from(reserves);
        for page in runs.iter().flat_map(|run| run.pages()) {
            match all.pages.get(&page) {
                None => wanted += 1,
                // Whoever has it: the scope itself as well.
                Some((_, locked)) if purpose == Purpose::Write || *locked => return false,
                Some(_) => {}
            }
        }
        // It wants none, or they are in its purse, whatever a smaller budget waits for.
        if wanted <= u64::from(node.scope.purse + node.scope.coming) {
            return true;
        }
        let others = all.claims - u64::from(node.claim);
        let declares = reserves == 0 || all.declared + reserves + self.floor <= self.frames.target;
        let floor = u64::from(self.floor_for(request));
        declares && all.pages.len() as u64 + wanted + floor + others <= u64::from(all.frames)
    }

    /// Which of a scope's requests waits for what the scope itself holds, and an error that says so.
    fn in_its_own_way(&self, node: &Node<'_>) -> Option<(RequestId, Error)> {
        let budget = u64::from(self.frames.target);
        let most = u64::from(self.frames_beside(node.scope.declared));
        let told =
            node.scope.waiting.iter().copied().filter(|request| !self.never_refused(*request)).find_map(|request| {
                let (_, runs, purpose, reserves) = self.asks(request)?;
                let pages = || runs.iter().flat_map(|run| run.pages());
                let writes = purpose == Purpose::Write;
                let what = if writes { "write" } else { "read" };
                if let Some(page) = pages().find(|page| node.held.get(page).is_some_and(|locked| writes || *locked)) {
                    let has = if node.held[&page] {
                        "which it has pinned to write itself"
                    } else {
                        "which it has pinned itself"
                    };
                    let (index, segment) = (page.index.0, page.segment);
                    return Some((request, format!("asks to {what} page {index} of {segment:?}, {has}")));
                }
                let held = node.held.len() as u64;
                let more = pages().filter(|page| !node.held.contains_key(page)).count() as u64 + u64::from(reserves);
                (held + more + u64::from(self.floor_for(request)) > most).then(|| {
                    let (held, more, budget) =
                        (self.pages_in_words(held), self.pages_in_words(more), self.pages_in_words(budget));
                    (request, format!("holds {held} itself and asks for {more} more, of a budget of {budget}"))
                })
            });
        let (request, what) = told?;
        let message = format!("{} {what}: it would wait for itself", self.scope_name(Some(node.id)));
        let error = Error::new(ErrorKind::WouldDeadlock, message)
            .remedy("let guards go first, and open a scope of its own for each thread or task");
        Some((request, error))
    }

    /// "3 pages (6.0 MiB)".
    fn pages_in_words(&self, pages: u64) -> String {
        let noun = if pages == 1 { "page" } else { "pages" };
        format!("{pages} {noun} ({})", Bytes::new(pages * self.config.page_bytes))
    }
}

/// A scope that holds, and waits.
struct Node<'a> {
    id: ScopeId,
    scope: &'a Scope,
    /// Its pages, and whether it has them for itself.
    held: HashMap<PageId, bool>,
    /// See [`Scope::claim`].
    claim: u32,
}

/// What some scopes hold, all together.
struct HeldByAll<'a> {
    /// By how many of them, and whether one has the page for itself.
    pages: &'a HashMap<PageId, (u32, bool)>,
    /// What they claim beside these.
    claims: u64,
    /// Of so many frames.
    frames: u32,
    /// How many of these they have declared.
    declared: u32,
}

/// Scopes named in one message.
const NAMED: usize = 4;

pub(super) fn pages_of(runs: &[PageRun]) -> u64 {
    runs.iter().map(|run| u64::from(run.count)).sum()
}
