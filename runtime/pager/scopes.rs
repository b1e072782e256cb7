//! Scopes of a pager: opening and closing them, filling their purses, and what they claim.

use std::sync::Arc;

use super::line::Class;
use super::policy::Want;
use super::request::{Purpose, Terms};
use super::runs::{PageRun, pages_of};
use super::scope::{Holdings, Scope, ScopeTerms};
use super::{Effects, Pager};
use crate::error::{Error, ErrorKind};
use crate::ids::{Bytes, RequestId, ScopeId, SegmentId};

impl Pager {
    pub(super) fn scope_id(&self, key: usize) -> ScopeId {
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

    /// Opens a scope. Returns its id, and the holdings in which its pins are kept. A scope that says how much it needs
    /// must [`reserve`](Self::reserve) it before it pins.
    pub fn open_scope(&mut self, terms: ScopeTerms) -> (ScopeId, Arc<Holdings>) {
        self.next_serial = self.next_serial.wrapping_add(1);
        let scope = Scope::new(terms, self.next_serial);
        let holdings = scope.holdings().clone();
        let key = self.scopes.insert(scope);
        (self.scope_id(key), holdings)
    }

    /// Ends a scope. What was set aside for it is free for anybody. Its waiting requests end with `Closed`. Its pins
    /// may outlive it and then count as pins outside of scopes.
    pub fn close_scope(&mut self, id: ScopeId, fx: &mut Effects) {
        let Some(key) = self.scope_key(id) else { return };
        let reserving = self.scopes[key].reserving;
        for request in self.scopes[key].waiting.clone().into_iter().chain(reserving) {
            let error = Error::new(ErrorKind::Closed, format!("{} has ended", self.scope_name(Some(id))));
            self.end(request, error, fx);
        }
        let scope = self.scopes.remove(key);
        self.purses -= scope.purse;
        self.coming -= scope.coming;
        self.owed -= scope.owed;
        self.declared -= scope.declared;
        self.coming_to.remove(&key);
        self.owed_to.remove(&key);
        self.eased = true;
        invariant!(scope.waiting.is_empty(), "{id:?} has ended and waits");
        self.pump(fx);
    }

    /// Whether `frames` more may be declared. Together, scopes declare at most the frames beside the floor. This
    /// compares sums, not free frames: a frame owed to a scope may be free, or about to be.
    pub(super) fn may_declare(&self, frames: u32) -> bool {
        frames <= self.declarable()
    }

    /// How many frames may still be declared.
    pub(super) fn declarable(&self) -> u32 {
        self.frames.target.saturating_sub(self.declared + self.floor)
    }

    /// Whether a request of the scope waits to declare frames.
    pub(super) fn waits_to_declare(&self, id: ScopeId) -> bool {
        let declares = |request: &RequestId| self.asks(*request).is_some_and(|(.., frames)| frames > 0);
        self.scope(Some(id)).is_some_and(|scope| scope.waiting.iter().any(declares))
    }

    /// Sets `frames`, free or in transit, aside for this scope.
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

    /// Gives up a request for a purse: nothing is set aside for its scope.
    pub(super) fn unreserve(&mut self, id: Option<ScopeId>) {
        let Some(scope) = self.scope_mut(id) else { return };
        let (purse, coming) = (std::mem::take(&mut scope.purse), std::mem::take(&mut scope.coming));
        let declared = std::mem::take(&mut scope.declared);
        scope.reserving = None;
        let waiting = scope.waiting.clone();
        self.purses -= purse;
        self.coming -= coming;
        self.declared -= declared;
        self.eased = true;
        if let Some(key) = id.and_then(|id| self.scope_key(id)) {
            self.coming_to.remove(&key);
        }
        // These requests now wait for frames in line.
        self.nearly.extend(waiting);
    }

    /// Puts free frames into the purses they are meant for. Returns a request to reserve that now has all its frames,
    /// if there is one.
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
            // A request of this scope may wait for its own frames.
            self.purse_filled(self.scope_id(key));
            if full {
                self.coming_to.remove(&key);
            }
            if reserving.is_some() {
                // Requests that began to wait before the scope declared anything stand in another line.
                let waiting = self.scopes[key].waiting.iter().copied();
                let near: Vec<RequestId> = waiting.filter(|request| self.waits_for_frames(*request)).collect();
                self.nearly.extend(near);
                return reserving;
            }
        }
        None
    }

    /// [`released`](Self::released) for a guard on whose pages its scope had spent `frames` of its purse. Called under
    /// the same hold of the latch that unpins the pages: the frames belong to the scope, so nobody else may get one
    /// before that.
    pub fn unspent(&mut self, id: ScopeId, runs: &[PageRun], frames: u32, fx: &mut Effects) {
        for page in runs.iter().flat_map(|run| run.pages()) {
            self.changed(page);
        }
        let paid = runs.first().map(|first| (*first, frames));
        if let Some(scope) = self.scope_mut(Some(id))
            && let Some(at) = scope.paid.iter().position(|other| Some(*other) == paid)
        {
            scope.paid.swap_remove(at);
            self.owe(Some(id), frames);
        }
        self.pump(fx);
    }

    /// Handles a segment that goes while some of its pages have pins that nobody can end. Scopes hold these pins no
    /// longer, and are owed the frames spent on them. Otherwise a later segment with the same number would inherit
    /// both.
    pub(super) fn forget_pins_of(&mut self, segment: SegmentId) {
        let mut indebted = Vec::new();
        for (key, scope) in &mut self.scopes {
            let (gone, paid) = scope.paid.drain(..).partition(|(run, _)| run.segment == segment);
            scope.paid = paid;
            let gone: Vec<(PageRun, u32)> = gone;
            let frames: u32 = gone.iter().map(|(_, frames)| frames).sum();
            scope.holdings.forget(segment, frames);
            if frames > 0 {
                self.owed_to.insert(key);
                indebted.push(key);
            }
            scope.owed += frames;
            self.owed += frames;
        }
        for key in indebted {
            self.purse_filled(self.scope_id(key));
        }
    }

    pub(super) fn owe(&mut self, id: Option<ScopeId>, frames: u32) {
        let Some(key) = id.and_then(|id| self.scope_key(id)).filter(|_| frames > 0) else { return };
        let scope = &mut self.scopes[key];
        scope.owed += frames;
        invariant!(scope.purse + scope.coming + scope.owed <= scope.declared, "a scope is owed more than it declared");
        self.owed += frames;
        self.owed_to.insert(key);
        // If others share the pages that were paid for, these frames may not come before the others let go.
        self.purse_filled(self.scope_id(key));
    }

    /// Fills purses that are owed frames, before anybody else gets one and before a smaller budget takes one.
    pub(super) fn fill_purses(&mut self, fx: &mut Effects) {
        while self.owed > 0 && !self.closing {
            while self.frames.free_count() + self.transit <= self.wanted() + self.floor {
                if !self.reclaim(Want::Demand, fx) {
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
            self.serve_awaiting(fx);
        }
    }

    /// Frames set aside for scopes and not spent: in purses, or on their way to them.
    pub fn set_aside(&self) -> u32 {
        self.purses + self.coming
    }

    /// Frames that scopes have declared: set aside for them, spent by them, or owed to them.
    #[doc(hidden)]
    pub fn declared(&self) -> u32 {
        self.declared
    }

    /// Keeps this many frames for requests that can never be refused.
    ///
    /// # Errors
    /// `BudgetTooSmall` if no frame would be left for others, or fewer than scopes have declared.
    pub fn set_floor(&mut self, frames: u32, fx: &mut Effects) -> Result<(), Error> {
        let others = self.declared.max(1);
        if frames > self.floor && frames + others > self.frames.target || frames >= self.frames.target {
            let (have, page) = (self.frames.target, self.config.page_bytes);
            let budget = Bytes::new(u64::from(have) * page);
            let message = match self.declared {
                0 => format!("{frames} frames set aside leave none of a budget of {have} pages ({budget})"),
                declared => format!(
                    "{frames} frames set aside do not leave the {declared} that scopes have declared of a budget of \
                     {have} pages ({budget})"
                ),
            };
            let need = Bytes::new((u64::from(frames) + u64::from(others)) * page);
            return Err(Error::new(ErrorKind::BudgetTooSmall, message)
                .remedy(format!("raise the device budget to at least {need}")));
        }
        self.floor = frames;
        self.eased = true;
        self.refuse_oversized(fx);
        self.pump(fx);
        Ok(())
    }

    /// Whether a request of this scope grows it.
    pub(super) fn grows(&self, id: Option<ScopeId>) -> bool {
        self.scope(id).is_some_and(|scope| scope.declared > 0) || self.holds(id)
    }

    /// Whether this scope holds pins. Then its requests never wait for other holders.
    pub(super) fn holds(&self, id: Option<ScopeId>) -> bool {
        self.scope(id).is_some_and(|scope| !scope.holdings.is_empty())
    }

    /// Records a granted request in its scope's holdings, with the frames spent on it.
    pub(super) fn acquired(&mut self, terms: &Terms, runs: &[PageRun], spent: u32) {
        let (id, exclusive) = (terms.scope, terms.purpose == Purpose::Write);
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

    /// The waiting requests of a scope.
    fn waiting_of(&self, id: ScopeId) -> Vec<RequestId> {
        self.scope(Some(id)).map(|scope| scope.waiting.iter().copied().collect()).unwrap_or_default()
    }

    /// A scope got pins while it waits. From now on its waiting requests wait for no other holder.
    fn look_again(&mut self, id: ScopeId) {
        let Some(scope) = self.scope_mut(Some(id)) else { return };
        if std::mem::replace(&mut scope.all_hold, true) {
            return;
        }
        for request in self.waiting_of(id) {
            self.now_holds(request);
        }
    }

    /// Claims the pages of a request for its scope. Refuses them if the scope's own pins exclude them, or if they are
    /// more than the scope was opened for.
    pub(super) fn claim(&self, terms: &Terms, runs: &[PageRun]) -> Result<(), Error> {
        let Terms { scope: id, purpose, never_refused, .. } = *terms;
        let Some(wanted) = id else { return Ok(()) };
        if never_refused {
            return Err(Error::new(ErrorKind::InvalidArgument, "a pin that can never be refused belongs to no scope")
                .remedy("pin it outside of scopes"));
        }
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
            return Err(
                Error::new(ErrorKind::Busy, message).remedy("drop that guard first, or pin for writing from the start")
            );
        }
        let (asked, holdings) = (pages_of(runs), scope.holdings());
        if !holdings.claim(asked as u32) {
            let most = u64::from(holdings.at_most().unwrap_or(u32::MAX));
            let size = |pages: u64| Bytes::new(pages * self.config.page_bytes);
            let message = format!(
                "{} was opened for {most} pages ({}); it has {} pinned or asked for, and asks for {asked} more ({})",
                self.scope_name(id),
                size(most),
                holdings.claimed(),
                size(asked)
            );
            return Err(
                Error::new(ErrorKind::BudgetTooSmall, message).remedy("open the scope for more, or drop guards first")
            );
        }
        Ok(())
    }

    /// Gives up what was claimed for a request of this scope: it is not pinned.
    pub(super) fn unclaim(&self, id: Option<ScopeId>, pages: u32) {
        if let Some(scope) = self.scope(id) {
            scope.holdings.unclaim(pages);
        }
    }

    /// For example `scope 3 "chat 17"`.
    pub(super) fn scope_name(&self, id: Option<ScopeId>) -> String {
        match (id, self.scope(id)) {
            (Some(id), Some(scope)) if !scope.label().is_empty() => {
                format!("scope {} {:?}", id.0 as u32, scope.label())
            }
            (Some(id), _) => format!("scope {}", id.0 as u32),
            (None, _) => "a pin outside of scopes".to_owned(),
        }
    }

    /// Notes that a request of this scope may have to wait. Returns how urgent it is. That is decided here, once the
    /// pager knows of all the scope's pins; pins that the scope gets later [count too](Self::holds_more).
    pub(super) fn begins_to_wait(&mut self, id: Option<ScopeId>, request: RequestId) -> Option<Class> {
        let scope = self.scope_mut(id)?;
        let begins = scope.waiting.insert(request);
        invariant!(begins, "{request:?} begins to wait twice");
        scope.holdings.waits(true);
        let class = self.class_of_growth(id);
        let holds = class == Some(Class::Holding);
        if let Some(scope) = self.scope_mut(id) {
            scope.all_hold = holds && (scope.all_hold || scope.waiting.len() == 1);
        }
        class
    }

    /// How urgent a request of this scope is if it is growth.
    pub(super) fn class_of_growth(&self, id: Option<ScopeId>) -> Option<Class> {
        let grows = || self.grows(id).then_some(Class::Growing);
        if self.holds(id) { Some(Class::Holding) } else { grows() }
    }

    /// Notes that a request waits no more.
    pub(super) fn ends_waiting(&mut self, id: Option<ScopeId>, request: RequestId) {
        let Some(scope) = self.scope_mut(id) else { return };
        if !scope.waiting.remove(&request) {
            return;
        }
        scope.holdings.waits(false);
    }

    /// Notes that a waiting scope got more pins without the latch.
    pub fn holds_more(&mut self, id: ScopeId, fx: &mut Effects) {
        self.stats.latched_hits += 1;
        self.look_again(id);
        self.pump(fx);
    }
}
