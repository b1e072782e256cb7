//! Scopes: opening and closing them, and what they claim.

use std::sync::Arc;

use super::Admission;
use super::line::Class;
use super::scope::{Holdings, Scope, ScopeTerms};
use crate::effects::Effects;
use crate::error::{Error, ErrorKind};
use crate::ids::{Bytes, RequestId, ScopeId};
use crate::residency::Residency;
use crate::runs::{PageRun, pages_of};
use crate::terms::{Purpose, Terms};

impl Admission {
    pub(super) fn scope_id(&self, key: usize) -> ScopeId {
        ScopeId::of(key, self.scopes[key].serial)
    }

    pub(super) fn scope_key(&self, id: ScopeId) -> Option<usize> {
        let (key, serial) = id.parts();
        self.scopes.get(key).filter(|scope| scope.serial == serial).map(|_| key)
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
    pub(crate) fn open_scope(&mut self, terms: ScopeTerms) -> (ScopeId, Arc<Holdings>) {
        self.next_serial = self.next_serial.wrapping_add(1);
        let scope = Scope::new(terms, self.next_serial);
        let holdings = scope.holdings().clone();
        let key = self.scopes.insert(scope);
        (self.scope_id(key), holdings)
    }

    /// Ends a scope, and its waiting requests.
    pub(crate) fn close_scope(&mut self, res: &mut Residency, id: ScopeId, fx: &mut Effects) {
        let Some(key) = self.scope_key(id) else { return };
        let reserving = self.scopes[key].reserving;
        for request in self.scopes[key].waiting.clone().into_iter().chain(reserving) {
            let error = Error::new(ErrorKind::Closed, format!("{} has ended", self.scope_name(Some(id))));
            self.end(res, request, error, fx);
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
    }

    /// Whether a request of this scope grows it.
    pub(super) fn grows(&self, id: Option<ScopeId>) -> bool {
        self.class_of_growth(id).is_some()
    }

    /// Whether this scope holds pins. Then its requests never wait for other holders.
    pub(super) fn holds(&self, id: Option<ScopeId>) -> bool {
        self.scope(id).is_some_and(|scope| !scope.holdings.is_empty())
    }

    /// Records a granted request in its scope's holdings, with the frames spent on it.
    pub(super) fn acquired(&mut self, res: &mut Residency, terms: &Terms, runs: &[PageRun], spent: u32) {
        let (id, exclusive) = (terms.scope, terms.purpose == Purpose::Write);
        let Some(scope) = self.scope_mut(id) else { return };
        if let Some(first) = runs.first().filter(|_| spent > 0) {
            scope.paid.push((*first, spent));
        }
        if scope.holdings.add_paid(runs, exclusive, spent)
            && let Some(id) = id
        {
            self.look_again(res, id);
        }
    }

    /// The waiting requests of a scope.
    fn waiting_of(&self, id: ScopeId) -> Vec<RequestId> {
        self.scope(Some(id)).map(|scope| scope.waiting.iter().copied().collect()).unwrap_or_default()
    }

    /// A scope got pins while it waits. From now on its waiting requests wait for no other holder.
    fn look_again(&mut self, res: &mut Residency, id: ScopeId) {
        let Some(scope) = self.scope_mut(Some(id)) else { return };
        if std::mem::replace(&mut scope.all_hold, true) {
            return;
        }
        for request in self.waiting_of(id) {
            self.now_holds(res, request);
        }
    }

    /// Claims the pages of a request for its scope. Refuses them if the scope's own pins exclude them, or if they are
    /// more than the scope was opened for.
    pub(super) fn claim(&self, res: &Residency, terms: &Terms, runs: &[PageRun]) -> Result<(), Error> {
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
            let size = |pages: u64| Bytes::new(pages * res.page_bytes());
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
    pub(crate) fn unclaim(&self, id: Option<ScopeId>, pages: u32) {
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
        if self.holds(id) {
            return Some(Class::Holding);
        }
        self.scope(id).is_some_and(|scope| scope.declared > 0).then_some(Class::Growing)
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
    pub(crate) fn holds_more(&mut self, res: &mut Residency, id: ScopeId) {
        self.stats.latched_hits += 1;
        self.look_again(res, id);
    }
}
