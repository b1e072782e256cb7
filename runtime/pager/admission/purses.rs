//! Frames that are set aside: purses, and the floor.

use super::Admission;
use crate::effects::Effects;
use crate::error::{Error, ErrorKind};
use crate::ids::{Bytes, RequestId, ScopeId, SegmentId};
use crate::policy::Want;
use crate::residency::Residency;
use crate::runs::PageRun;

impl Admission {
    /// Makes one more frame free, or puts one in transit.
    pub(super) fn reclaim(&mut self, res: &mut Residency, want: Want, fx: &mut Effects) -> bool {
        let found = res.reclaim(self.kept(), want, fx);
        self.hear(res, fx);
        found
    }

    /// Gives frames to admitted pages that wait for one, and to purses.
    pub(crate) fn serve_awaiting(&mut self, res: &mut Residency, fx: &mut Effects) {
        self.hand_out(res, fx);
        // Restores invariant 4 after a rescue or a failed write back.
        while !res.is_closing() && !self.keeps_promises(res) {
            if !self.reclaim(res, Want::Demand, fx) {
                break;
            }
            self.hand_out(res, fx);
        }
    }

    fn hand_out(&mut self, res: &mut Residency, fx: &mut Effects) {
        res.serve_awaiting(self.kept(), fx);
        while let Some(request) = self.take_aside(res) {
            self.reserved(res, request, fx);
        }
    }

    /// Whether invariant 4 holds.
    fn keeps_promises(&self, res: &Residency) -> bool {
        res.wanted(self.kept()) <= res.frames().there
    }

    /// Whether `frames` more may be declared. Together, scopes declare at most the frames beside the floor. This
    /// compares sums, not free frames: a frame owed to a scope may be free, or about to be.
    pub(super) fn may_declare(&self, res: &Residency, frames: u32) -> bool {
        frames <= self.declarable(res)
    }

    /// How many frames may still be declared.
    pub(super) fn declarable(&self, res: &Residency) -> u32 {
        res.frames().target.saturating_sub(self.declared + self.floor)
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
    fn take_aside(&mut self, res: &mut Residency) -> Option<RequestId> {
        while self.coming > 0 && res.frames().free > self.purses {
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

    /// Pins have ended for which the scope had spent `frames` of its purse.
    pub(crate) fn unspent(&mut self, id: ScopeId, runs: &[PageRun], frames: u32) {
        let paid = runs.first().map(|first| (*first, frames));
        if let Some(scope) = self.scope_mut(Some(id))
            && let Some(at) = scope.paid.iter().position(|other| Some(*other) == paid)
        {
            scope.paid.swap_remove(at);
            self.owe(Some(id), frames);
        }
    }

    /// Handles a segment that goes while some of its pages have pins that nobody can end. Scopes hold these pins no
    /// longer, and are owed the frames spent on them. Otherwise a later segment with the same number would inherit
    /// both.
    pub(crate) fn forget_pins_of(&mut self, segment: SegmentId) {
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
    pub(crate) fn fill_purses(&mut self, res: &mut Residency, fx: &mut Effects) {
        while self.owed > 0 && !res.is_closing() {
            while res.frames().there <= res.wanted(self.kept()) + self.floor {
                if !self.reclaim(res, Want::Demand, fx) {
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
            self.serve_awaiting(res, fx);
        }
    }

    /// Frames set aside for scopes and not spent: in purses, or on their way to them.
    pub(crate) fn set_aside(&self) -> u32 {
        self.purses + self.coming
    }

    /// Frames that scopes have declared: set aside for them, spent by them, or owed to them.
    pub(crate) fn declared(&self) -> u32 {
        self.declared
    }

    /// Keeps this many frames for requests that can never be refused.
    ///
    /// # Errors
    /// `BudgetTooSmall` if no frame would be left for others, or fewer than scopes have declared.
    pub(crate) fn set_floor(&mut self, res: &Residency, frames: u32) -> Result<(), Error> {
        let others = self.declared.max(1);
        if frames > self.floor && frames + others > res.frames().target || frames >= res.frames().target {
            let (have, page) = (res.frames().target, res.page_bytes());
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
        Ok(())
    }
}
