//! The table of requests: how they come, and how they end.

use super::Admission;
use super::line::{Class, Turn};
use super::request::{Request, Stage, Stand};
use super::scope::Scope;
use crate::effects::Effects;
use crate::error::{Error, ErrorKind, Result};
use crate::granted::{Granted, WaitCause};
use crate::ids::{Bytes, PageId, RequestId, ScopeId, SegmentId};
use crate::residency::Residency;
use crate::runs::{PageRun, pages_of};
use crate::state::State;
use crate::terms::{Purpose, ScopePriority, Terms};

impl Admission {
    /// Whether a request may be made: it asks for no more than there can be, and its scope may ask. The scope then has
    /// claimed the pages.
    pub(crate) fn may_ask(&self, res: &Residency, terms: &Terms, runs: &[PageRun]) -> Result<()> {
        let (total, frames) = (pages_of(runs), self.frames_for(res, terms));
        if total > u64::from(frames) {
            return Err(too_large(total, frames, res.page_bytes()));
        }
        self.claim(res, terms, runs)
    }

    /// Takes in a request for pins. It is to be [tried](Self::try_new) next.
    pub(crate) fn ask(&mut self, runs: &[PageRun], terms: Terms, cause: WaitCause) -> RequestId {
        // Every page was resident or being evicted.
        self.stats.latched_hits += u64::from(cause == WaitCause::None && pages_of(runs) > 0);
        let id = self.add_request(runs.to_vec(), 0, terms, Stage::Queued);
        if let Some(key) = self.request_key(id) {
            self.requests[key].cause = cause;
        }
        id
    }

    /// Takes in a request to set frames aside. It is to be [tried](Self::try_new) next.
    pub(crate) fn ask_frames(&mut self, res: &Residency, scope: ScopeId, frames: u32) -> Result<RequestId> {
        if self.scope(Some(scope)).is_none_or(|scope| scope.holdings().at_most().is_none()) || self.grows(Some(scope)) {
            return Err(Error::new(ErrorKind::InvalidArgument, "a scope says what it needs once, before it pins")
                .remedy("open another scope for more"));
        }
        if self.waits_to_declare(scope) {
            let message = format!("{} waits for what it has declared already", self.scope_name(Some(scope)));
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .remedy("declare all that a scope needs at once, or open another scope for more"));
        }
        let most = self.frames_for(res, &Terms::default());
        if frames > most {
            return Err(too_large(u64::from(frames), most, res.page_bytes()));
        }
        let terms = Terms { scope: Some(scope), ..Terms::default() };
        Ok(self.add_request(Vec::new(), frames, terms, Stage::Queued))
    }

    /// Takes in a request that waits until the device tier fits its budget.
    pub(crate) fn ask_budget(&mut self) -> RequestId {
        let id = self.add_request(Vec::new(), 0, Terms::default(), Stage::Shrinking);
        self.shrinking.push(id);
        id
    }

    fn request_id(&self, key: usize) -> RequestId {
        RequestId::of(key, self.requests[key].serial)
    }

    pub(super) fn request_key(&self, id: RequestId) -> Option<usize> {
        let (key, serial) = id.parts();
        self.requests.get(key).filter(|request| request.serial == serial).map(|_| key)
    }

    pub(super) fn request_runs(&self, id: RequestId) -> Option<&[PageRun]> {
        self.request_key(id).map(|key| self.requests[key].runs.as_slice())
    }

    /// The scope, the pages, the purpose and the frames of a request that stands in a line.
    pub(super) fn asks(&self, id: RequestId) -> Option<(Option<ScopeId>, &[PageRun], Purpose, u32)> {
        let request = &self.requests[self.request_key(id)?];
        let queued = request.stage == Stage::Queued;
        queued.then_some((request.terms.scope, request.runs.as_slice(), request.terms.purpose, request.frames))
    }

    pub(super) fn request_terms(&self, id: RequestId) -> Option<(Option<ScopeId>, Purpose)> {
        self.request_key(id).map(|key| (self.requests[key].terms.scope, self.requests[key].terms.purpose))
    }

    /// Every live request: its stage as a number, how many fills it waits for, and whether it writes.
    pub(super) fn request_stages(&self) -> impl Iterator<Item = (RequestId, u8, u32, bool)> {
        self.requests
            .iter()
            .map(|(key, request)| (self.request_id(key), request.stage as u8, request.remaining, request.writes()))
    }

    /// A request's turn, whether it waits for frames, and the pages in whose lines it stands.
    pub(super) fn request_stand(&self, id: RequestId) -> Option<(Turn, bool, Vec<PageId>)> {
        let request = &self.requests[self.request_key(id)?];
        let (frames, pages) = match &request.stand {
            Stand::Nowhere => (false, Vec::new()),
            Stand::Frames { .. } => (true, Vec::new()),
            Stand::Pages(pages) => (false, pages.iter().map(|(page, _)| *page).collect()),
        };
        Some((request.turn, frames, pages))
    }

    /// Whether a request is growth.
    pub(crate) fn is_growth(&self, id: RequestId) -> bool {
        self.request_key(id).is_some_and(|key| !self.requests[key].turn.class.is_new())
    }

    /// Whether a request waits for frames, and the pages in whose lines it stands.
    pub(crate) fn stands(&self, id: RequestId) -> Option<(bool, Vec<PageId>)> {
        self.request_stand(id).map(|(_, frames, pages)| (frames, pages))
    }

    /// Whether a request stands in the line for frames.
    pub(crate) fn waits_for_frames(&self, id: RequestId) -> bool {
        self.request_key(id).is_some_and(|key| matches!(self.requests[key].stand, Stand::Frames { .. }))
    }

    /// How many frames a request wants beyond those its scope has set aside.
    pub(crate) fn frames_short(&self, res: &Residency, id: RequestId) -> u32 {
        let Some(key) = self.request_key(id) else { return 0 };
        let request = &self.requests[key];
        let purse = self.scope(request.terms.scope).map_or(0, Scope::may_spend);
        (Self::absent_of(res, request.pages()) + request.frames).saturating_sub(purse)
    }

    /// How many times a request was looked at to see whether it can go on.
    pub(crate) fn looks(&self) -> u64 {
        self.looks
    }

    /// How many of these pages are absent.
    pub(super) fn absent_of(res: &Residency, pages: impl Iterator<Item = PageId>) -> u32 {
        pages.filter(|page| res.word(*page).load().state == State::Empty).count() as u32
    }

    fn add_request(&mut self, runs: Vec<PageRun>, frames: u32, terms: Terms, stage: Stage) -> RequestId {
        self.next_serial = self.next_serial.wrapping_add(1);
        self.next_age += 1;
        let id = RequestId::of(self.requests.vacant_key(), self.next_serial);
        let growth = if stage == Stage::Queued { self.begins_to_wait(terms.scope, id) } else { None };
        let class = growth.unwrap_or_else(|| self.class_beside_growth(&terms));
        for run in &runs {
            let at = run.segment.index();
            if self.by_segment.len() <= at {
                self.by_segment.resize(at + 1, 0);
            }
            self.by_segment[at] += 1;
        }
        let claimed = pages_of(&runs) as u32;
        self.requests.insert(Request {
            runs,
            terms,
            frames,
            turn: Turn { class, age: self.next_age },
            stage,
            stand: Stand::Nowhere,
            passed: 0,
            remaining: 0,
            untaken: 0,
            spent: 0,
            claimed,
            cause: WaitCause::None,
            serial: self.next_serial,
        });
        id
    }

    /// How urgent a request is that is no growth.
    pub(super) fn class_beside_growth(&self, terms: &Terms) -> Class {
        match self.scope(terms.scope).map_or(terms.priority, |scope| scope.priority) {
            _ if terms.never_refused => Class::Growing,
            ScopePriority::Interactive => Class::Interactive,
            ScopePriority::Batch => Class::Batch,
        }
    }

    fn remove_request(&mut self, key: usize) -> Request {
        let id = self.request_id(key);
        let request = self.requests.remove(key);
        invariant!(request.stand == Stand::Nowhere, "{id:?} is over, and stands in {:?}", request.stand);
        for run in &request.runs {
            self.by_segment[run.segment.index()] -= 1;
        }
        self.unclaim(request.terms.scope, request.claimed);
        self.ends_waiting(request.terms.scope, id);
        request
    }

    /// The most frames that a request can have. At least what its scope declared, even if the budget has shrunk.
    fn frames_for(&self, res: &Residency, terms: &Terms) -> u32 {
        let declared = self.scope(terms.scope).map_or(0, |scope| scope.declared);
        res.frames().target.saturating_sub(if terms.never_refused { 0 } else { self.floor }).max(declared)
    }

    /// Ends a request that nobody waits for any more.
    pub(crate) fn cancel(&mut self, res: &mut Residency, id: RequestId, fx: &mut Effects) {
        let Some(key) = self.request_key(id) else { return };
        self.withdraw(res, id, key, fx);
        self.remove_request(key);
    }

    /// Ends a request with an error, whatever it waits for.
    pub(crate) fn end(&mut self, res: &mut Residency, id: RequestId, error: Error, fx: &mut Effects) {
        let Some(key) = self.request_key(id) else { return };
        self.withdraw(res, id, key, fx);
        self.finish(id, Err(error), fx);
    }

    /// Makes a request wait for nothing and hold nothing.
    fn withdraw(&mut self, res: &mut Residency, id: RequestId, key: usize, fx: &mut Effects) {
        match self.requests[key].stage {
            Stage::Queued => self.step_out(res, key),
            Stage::Shrinking => self.shrinking.retain(|waiting| *waiting != id),
            Stage::Filling => self.give_up(res, id, key, fx),
        }
    }

    /// Ends the requests for pages of a segment that goes. A request that still exists was forgotten, not dropped.
    pub(crate) fn cancel_all_of(&mut self, res: &mut Residency, segment: SegmentId, fx: &mut Effects) {
        if self.by_segment.get(segment.index()).is_none_or(|requests| *requests == 0) {
            return;
        }
        let forgotten: Vec<RequestId> = self
            .requests
            .iter()
            .filter(|(_, request)| request.runs.iter().any(|run| run.segment == segment))
            .map(|(key, _)| self.request_id(key))
            .collect();
        for id in forgotten {
            let gone = Error::new(ErrorKind::NotFound, "the tensor of a request that was forgotten is gone");
            self.end(res, id, gone, fx);
        }
    }

    /// Releases every pin, lock and wait of an admitted request.
    fn give_up(&mut self, res: &mut Residency, id: RequestId, key: usize, fx: &mut Effects) {
        if self.requests[key].frames > 0 {
            let scope = self.requests[key].terms.scope;
            self.unreserve(scope);
        }
        let writes = self.requests[key].writes();
        for page in self.requests[key].pages() {
            res.let_go(page, id, writes);
        }
        self.hear(res, fx);
        let (scope, spent) = (self.requests[key].terms.scope, std::mem::take(&mut self.requests[key].spent));
        self.owe(scope, spent);
    }

    /// Removes a request and reports its result.
    pub(super) fn finish(&mut self, id: RequestId, result: Result<Granted>, fx: &mut Effects) {
        if let Some(key) = self.request_key(id) {
            self.remove_request(key);
            fx.done.push((id, result));
        }
    }

    /// How many requests wait for something that others hold.
    pub(crate) fn waiting_count(&self) -> usize {
        self.standing + self.shrinking.len()
    }

    /// Ends waiting requests that a smaller budget can never hold.
    pub(crate) fn refuse_oversized(&mut self, res: &mut Residency, fx: &mut Effects) {
        let queued: Vec<RequestId> =
            self.request_stages().filter(|(_, stage, ..)| *stage == Stage::Queued as u8).map(|(id, ..)| id).collect();
        for id in queued {
            let Some(key) = self.request_key(id) else { continue };
            let Request { frames, terms, .. } = self.requests[key];
            let total = pages_of(&self.requests[key].runs) + u64::from(frames);
            let most = self.frames_for(res, &terms);
            if total > u64::from(most) {
                let error = too_large(total, most, res.page_bytes());
                self.end(res, id, error, fx);
            }
        }
    }

    /// Ends every request that stands in a line, or waits for a purse or a smaller budget.
    pub(crate) fn end_all_queued(&mut self, res: &mut Residency, error: &Error, fx: &mut Effects) {
        let queued: Vec<RequestId> =
            self.request_stages().filter(|(_, stage, ..)| *stage != Stage::Filling as u8).map(|(id, ..)| id).collect();
        for id in queued {
            self.end(res, id, error.clone(), fx);
        }
        for id in self.scopes.iter().filter_map(|(_, scope)| scope.reserving).collect::<Vec<_>>() {
            self.end(res, id, error.clone(), fx);
        }
    }
}

/// The error of every call once a runtime is being closed.
pub fn closing() -> Error {
    Error::new(ErrorKind::Closed, "the runtime is closing, or is closed")
        .remedy("open a new one, or close this one later")
}

fn too_large(pages: u64, frames: u32, page_bytes: u64) -> Error {
    let need = Bytes::new(pages * page_bytes);
    let have = Bytes::new(u64::from(frames) * page_bytes);
    Error::new(
        ErrorKind::BudgetTooSmall,
        format!("{pages} pages ({need}) are wanted at once, but the device budget holds {frames} ({have})"),
    )
    .remedy(format!("raise the device budget to at least {need}, pin fewer rows at a time, or choose smaller pages"))
}
