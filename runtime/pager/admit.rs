//! Requests: sets of pages that are admitted, filled and pinned as a unit.
//!
//! A request takes all it needs in one step, or nothing: pins and locks of resident pages, and frames for the others.
//! Once admitted, it waits for moves only, and moves end. Otherwise it stands in the [`Line`] of what was missing
//! first, a page or frames, and is tried again when that line moves. So a step costs only what it changes, however many
//! requests wait.
//!
//! A reader stands in the line of the page that is in its way. A writer stands in the lines of all its pages. So
//! readers that come one after the other cannot keep it from having all of them at once.

use super::line::{Class, Line, Source, Turn};
use super::policy::Want;
use super::request::{Purpose, Request, ScopePriority, Stage, Stand, Terms};
use super::runs::pages_of;
use super::scope::Scope;
use super::state::{Claim, State, TryPin};
use super::table::{Entry, PageEntry};
use super::{Effects, Granted, PageRun, Pager, Place, Priority, Submitted, WaitCause};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, MoveId, PageId, RequestId, ScopeId, SegmentId};

/// A move that takes too long.
struct LateMove<'a> {
    page: PageId,
    /// Whether it writes a frame's bytes down, after which the frame is free.
    frees: bool,
    /// Whether it fills a frame.
    fills: bool,
    error: &'a Error,
}

/// Why a request was not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blocked {
    /// Frames are missing: no request can have more than `room`. `u32::MAX`: it was short of something else.
    Frames {
        room: u32,
    },
    Page(PageId),
}

/// How many scopes are looked at, at most, to name the one that holds a page.
const NAMES_LOOKED_AT: usize = 1024;

impl Pager {
    fn request_id(&self, key: usize) -> RequestId {
        RequestId(key as u64 | u64::from(self.requests[key].serial) << 32)
    }

    fn request_key(&self, id: RequestId) -> Option<usize> {
        let key = id.0 as u32 as usize;
        self.requests.get(key).filter(|request| u64::from(request.serial) == id.0 >> 32).map(|_| key)
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

    pub(super) fn never_refused(&self, id: RequestId) -> bool {
        self.request_key(id).is_some_and(|key| self.requests[key].terms.never_refused)
    }

    /// For a live request for a stream: how many fills it waits for that the device has not taken up. Otherwise `None`.
    pub(super) fn request_untaken(&self, id: RequestId) -> Option<u32> {
        let request = &self.requests[self.request_key(id)?];
        (request.terms.purpose == Purpose::ReadOnStream).then_some(request.untaken)
    }

    /// Every live request: its stage as a number, how many fills it waits for, and whether it writes.
    pub(super) fn request_stages(&self) -> impl Iterator<Item = (RequestId, u8, u32, bool)> {
        self.requests
            .iter()
            .map(|(key, request)| (self.request_id(key), request.stage as u8, request.remaining, request.writes()))
    }

    /// For checks: frames that a scope's requests have spent before they are granted.
    pub(super) fn being_spent(&self, scope: ScopeId) -> u32 {
        let of = |(_, request): (usize, &Request)| (request.terms.scope == Some(scope)).then_some(request.spent);
        self.requests.iter().filter_map(of).sum()
    }

    /// For checks: how often a request was passed so far.
    pub(super) fn request_passed(&self, id: RequestId) -> Option<u32> {
        let request = &self.requests[self.request_key(id)?];
        let since = match &request.stand {
            Stand::Nowhere => 0,
            Stand::Frames { joined, .. } => self.frame_line.line.passed_since(*joined),
            Stand::Pages(pages) => {
                let of =
                    |(page, joined): &(PageId, u64)| self.page_lines.get(page).map(|line| line.passed_since(*joined));
                pages.iter().filter_map(of).sum()
            }
        };
        Some(request.passed + since)
    }

    /// Whether a request is growth.
    #[doc(hidden)]
    pub fn is_growth(&self, id: RequestId) -> bool {
        self.request_key(id).is_some_and(|key| !self.requests[key].turn.class.is_new())
    }

    /// For checks: whether a request that stands in a line waits for another holder, although its scope holds pins.
    pub(super) fn waits_for_a_holder(&self, id: RequestId) -> bool {
        let Some(key) = self.request_key(id) else { return false };
        let request = &self.requests[key];
        let comes = match &request.stand {
            Stand::Nowhere => true,
            // It waits for an older one of its scope.
            Stand::Frames { source: Source::Purse(scope), .. }
                if self.frame_line.first_of_purse(*scope) != Some(id) =>
            {
                true
            }
            Stand::Frames { .. } => self.comes_by_moves(key, Blocked::Frames { room: 0 }),
            // A writer stands in the lines of all its pages. It is tried again when one that moves is there.
            Stand::Pages(pages) => {
                let mut in_the_way = pages.iter().filter(|(page, _)| self.is_in_the_way(*page, request)).peekable();
                in_the_way.peek().is_none() || in_the_way.any(|(page, _)| self.moves_away(*page, request))
            }
        };
        self.holds(request.terms.scope) && !comes
    }

    /// Whether a request waits for frames, and the pages in whose lines it stands.
    #[doc(hidden)]
    pub fn stands(&self, id: RequestId) -> Option<(bool, Vec<PageId>)> {
        self.request_stand(id).map(|(_, frames, pages)| (frames, pages))
    }

    /// Whether a request stands in the line for frames.
    pub(super) fn waits_for_frames(&self, id: RequestId) -> bool {
        self.request_key(id).is_some_and(|key| matches!(self.requests[key].stand, Stand::Frames { .. }))
    }

    /// How many frames a request wants beyond those its scope has set aside.
    pub(super) fn frames_short(&self, id: RequestId) -> u32 {
        let Some(key) = self.request_key(id) else { return 0 };
        let request = &self.requests[key];
        let purse = self.scope(request.terms.scope).map_or(0, Scope::may_spend);
        (self.absent_of(request.pages()) + request.frames).saturating_sub(purse)
    }

    /// For checks: whether a request that waits for frames is not listed under its source.
    pub(super) fn is_misplaced(&self, id: RequestId) -> bool {
        let Some(key) = self.request_key(id) else { return false };
        let Request { turn, terms, stand: Stand::Frames { source, .. }, .. } = self.requests[key] else { return false };
        // Exception: the purse that a scope reserves is not its own before all frames are there.
        let later = self.scope(terms.scope).is_some_and(|scope| scope.reserving.is_some());
        source != self.source_of(key) && !later || !self.frame_line.is_listed(turn, source)
    }

    /// For checks: whether a request that waits for frames could go on now.
    pub(super) fn could_go_on(&self, id: RequestId) -> bool {
        let Some(key) = self.request_key(id) else { return false };
        let Request { terms, turn, frames, stand: Stand::Frames { source, .. }, .. } = self.requests[key] else {
            return false;
        };
        let is_tried = match source {
            Source::First => true,
            Source::Purse(scope) => self.frame_line.first_of_purse(scope) == Some(id),
            Source::New | Source::Reserving => self.frame_line.tried(true).contains(&id),
        };
        if !is_tried {
            return false;
        }
        let pages: Vec<PageId> = self.requests[key].pages().collect();
        let writes = terms.purpose == Purpose::Write;
        let is_there = |page: &PageId| {
            let word = self.word(*page).load();
            let entry = self.segments[page.segment.index()].entries[page.index.index()];
            let free = if writes { word.pins == 0 && !entry.copying_out() } else { !word.exclusive };
            matches!(word.state, State::Clean | State::Dirty) && free
        };
        let missing = self.absent_of(pages.iter().copied());
        if self.barred(turn, &pages).is_some() || !pages.iter().all(|page| self.is_absent(*page) || is_there(page)) {
            return false;
        }
        let needed = missing + frames;
        let (purse, declared) = self.scope(terms.scope).map_or((0, 0), |scope| (scope.may_spend(), scope.declared));
        if declared > 0 {
            return needed <= purse;
        }
        if frames > 0 && !self.may_declare(frames) {
            return false;
        }
        let others = |page: &PageId| !pages.contains(page) && self.can_go_for_good(*page);
        let can_go = self.policy.tracked().iter().filter(|page| others(page)).count() as u32;
        let floor = if terms.never_refused { 0 } else { self.floor };
        let spent = purse.min(missing);
        self.frames.free_count() + self.transit + can_go + spent >= self.promised() + floor + needed
    }

    /// How many times a request was looked at to see whether it can go on.
    #[doc(hidden)]
    pub fn looks(&self) -> u64 {
        self.looks
    }

    /// How many of these pages are absent.
    fn absent_of(&self, pages: impl Iterator<Item = PageId>) -> u32 {
        pages.filter(|page| self.is_absent(*page)).count() as u32
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

    fn add_request(&mut self, runs: Vec<PageRun>, frames: u32, terms: Terms, stage: Stage) -> RequestId {
        self.next_serial = self.next_serial.wrapping_add(1);
        self.next_age += 1;
        let id = RequestId(self.requests.vacant_key() as u64 | u64::from(self.next_serial) << 32);
        let growth = if stage == Stage::Queued { self.begins_to_wait(terms.scope, id) } else { None };
        let class = growth.unwrap_or_else(|| self.class_beside_growth(&terms));
        for run in &runs {
            self.segments[run.segment.index()].requests += 1;
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
    fn class_beside_growth(&self, terms: &Terms) -> Class {
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
            if let Some(table) = self.segments.get_mut(run.segment.index()) {
                table.requests -= 1;
            }
        }
        self.unclaim(request.terms.scope, request.claimed);
        self.ends_waiting(request.terms.scope, id);
        request
    }

    /// Asks for pins of all these pages as a unit. `runs` must be [normalized](PageRun::normalize).
    ///
    /// # Errors
    /// - `BudgetTooSmall`: the pages can never be resident together, or are more than the scope was opened for.
    /// - `Busy`: the scope holds pins, and others hold what it asks for, or its own pins are in the way.
    /// - `InvalidArgument`: the request can never be refused, and has a scope.
    /// - `Poisoned`: the bytes of a page were lost.
    /// - `Closed`: the pager is closing, or the scope has ended.
    pub fn submit(&mut self, runs: &[PageRun], terms: impl Into<Terms>, fx: &mut Effects) -> Result<Submitted> {
        let terms = terms.into();
        if self.closing {
            return Err(closing());
        }
        let total = pages_of(runs);
        let frames = self.frames_for(&terms);
        if total > u64::from(frames) {
            return Err(too_large(total, frames, self.config.page_bytes));
        }
        self.claim(&terms, runs)?;
        let writes = terms.purpose == Purpose::Write;
        self.tells_of(terms.walker);
        let mut cause = WaitCause::None;
        for page in runs.iter().flat_map(|run| run.pages()) {
            let snapshot = self.word(page).load();
            cause = earlier(cause, self.cause_for(page, snapshot.state));
            if snapshot.is_resident() || snapshot.state == State::Evicting {
                self.used(page, snapshot.fresh, writes, 1);
            } else {
                self.missed(page, snapshot.state, writes);
            }
            if snapshot.state == State::Poisoned {
                self.unclaim(terms.scope, total as u32);
                return Err(self.lost_error(page));
            }
        }
        // Every page was resident or being evicted.
        self.stats.latched_hits += u64::from(cause == WaitCause::None && total > 0);
        self.policy.unit(total as u32);
        let id = self.add_request(runs.to_vec(), 0, terms, Stage::Queued);
        self.enter(id, cause, fx)
    }

    /// Sets aside the frames that a scope says it needs. Waits in line like a request for as many pages.
    ///
    /// # Errors
    /// - `BudgetTooSmall`: there are never so many frames.
    /// - `Closed`: the pager is closing.
    /// - `InvalidArgument`: the scope was not opened for a number of pages, has pins, has reserved before, or has
    ///   ended.
    pub fn reserve(&mut self, scope: ScopeId, frames: u32, fx: &mut Effects) -> Result<Submitted> {
        if self.closing {
            return Err(closing());
        }
        if self.scope(Some(scope)).is_none_or(|scope| scope.holdings().at_most().is_none()) || self.grows(Some(scope)) {
            return Err(Error::new(ErrorKind::InvalidArgument, "a scope says what it needs once, before it pins")
                .remedy("open another scope for more"));
        }
        if self.waits_to_declare(scope) {
            let message = format!("{} waits for what it has declared already", self.scope_name(Some(scope)));
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .remedy("declare all that a scope needs at once, or open another scope for more"));
        }
        let most = self.frames_for(&Terms::default());
        if frames > most {
            return Err(too_large(u64::from(frames), most, self.config.page_bytes));
        }
        let terms = Terms { scope: Some(scope), ..Terms::default() };
        let id = self.add_request(Vec::new(), frames, terms, Stage::Queued);
        self.enter(id, WaitCause::None, fx)
    }

    /// Tries a new request. If it cannot be admitted, it stands in line.
    fn enter(&mut self, id: RequestId, cause: WaitCause, fx: &mut Effects) -> Result<Submitted> {
        if let Some(key) = self.request_key(id) {
            self.requests[key].cause = cause;
        }
        // Older requests and pages first get what has become possible meanwhile.
        self.serve_awaiting(fx);
        self.fill_purses(fx);
        self.retire_frames(fx);
        self.attempt(id, fx);
        self.pump(fx);
        // A request that is ready at once is returned here, not listed in the effects.
        if let Some(at) = fx.done.iter().position(|(done, _)| *done == id) {
            let (_, result) = fx.done.swap_remove(at);
            return Ok(Submitted::Ready(result?));
        }
        Ok(Submitted::Waiting(id))
    }

    /// The most frames that a request can have. At least what its scope declared, even if the budget has shrunk.
    fn frames_for(&self, terms: &Terms) -> u32 {
        let declared = self.scope(terms.scope).map_or(0, |scope| scope.declared);
        self.frames.target.saturating_sub(if terms.never_refused { 0 } else { self.floor }).max(declared)
    }

    fn missed(&mut self, page: PageId, state: State, write: bool) {
        self.stats.uses += 1;
        self.walked.uses += 1;
        self.classes.missed(page);
        if state == State::Filling {
            self.stats.late += 1;
        } else {
            self.stats.faults += 1;
        }
        self.traced(page, false, write);
        self.staying = None;
        self.policy.accessed(page);
        if write {
            self.policy.written(page);
        }
    }

    fn cause_for(&mut self, page: PageId, state: State) -> WaitCause {
        match state {
            State::Empty => {
                let entry = self.entry(page);
                match (entry.valid_host(), entry.on_disk()) {
                    (Some(_), _) => WaitCause::Host,
                    (None, true) => WaitCause::Disk,
                    (None, false) => WaitCause::Zero,
                }
            }
            State::Filling => WaitCause::LatePrefetch,
            _ => WaitCause::None,
        }
    }

    /// Waits until the device tier fits its budget.
    pub fn await_budget(&mut self, fx: &mut Effects) -> Submitted {
        if self.frames.existing() <= self.frames.target {
            return Submitted::Ready(Granted::default());
        }
        let id = self.add_request(Vec::new(), 0, Terms::default(), Stage::Shrinking);
        self.shrinking.push(id);
        self.discard_again(fx);
        self.pump(fx);
        if let Some(at) = fx.done.iter().position(|(done, _)| *done == id) {
            let _ = fx.done.swap_remove(at);
            return Submitted::Ready(Granted::default());
        }
        Submitted::Waiting(id)
    }

    /// Ends a request that nobody waits for any more. It releases what it holds. Fills under way go on as prefetches.
    pub fn cancel(&mut self, id: RequestId, fx: &mut Effects) {
        let Some(key) = self.request_key(id) else { return };
        self.withdraw(id, key);
        self.remove_request(key);
        self.pump(fx);
    }

    /// Ends a request with an error, whatever it waits for.
    pub(super) fn end(&mut self, id: RequestId, error: Error, fx: &mut Effects) {
        let Some(key) = self.request_key(id) else { return };
        self.withdraw(id, key);
        self.finish(id, Err(error), fx);
    }

    /// Makes a request wait for nothing and hold nothing.
    fn withdraw(&mut self, id: RequestId, key: usize) {
        match self.requests[key].stage {
            Stage::Queued => self.step_out(key),
            Stage::Shrinking => self.shrinking.retain(|waiting| *waiting != id),
            Stage::Filling => self.give_up(id, key),
        }
    }

    /// Ends the requests for pages of a segment that goes. A request that still exists was forgotten, not dropped.
    pub(super) fn cancel_all_of(&mut self, segment: SegmentId, fx: &mut Effects) {
        if self.segments.get(segment.index()).is_none_or(|table| table.requests == 0) {
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
            self.end(id, gone, fx);
        }
    }

    /// Grants a request for a purse: all frames that the scope declared are set aside.
    pub(super) fn reserved(&mut self, id: RequestId, fx: &mut Effects) {
        if let Some(key) = self.request_key(id) {
            self.grant(id, key, None, fx);
        }
    }

    /// Releases every pin, lock and wait of an admitted request.
    fn give_up(&mut self, id: RequestId, key: usize) {
        if self.requests[key].frames > 0 {
            let scope = self.requests[key].terms.scope;
            self.unreserve(scope);
        }
        let writes = self.requests[key].writes();
        let pages: Vec<PageId> = self.requests[key].pages().collect();
        for page in pages {
            let waits = self.filling.get_mut(&page).is_some_and(|fill| {
                let waited = fill.leave(id);
                fill.locked &= !(writes && waited);
                waited
            });
            let word = self.word(page).load();
            // A page of an admitted request is either filling or pinned by it. A failed fill has left it Empty.
            if !waits && word.pins > 0 && word.is_resident() {
                // The next pump serves whoever waited for this.
                let _ = if writes { self.word(page).unlock() } else { self.word(page).unpin() };
            }
            self.changed(page);
        }
        let (scope, spent) = (self.requests[key].terms.scope, std::mem::take(&mut self.requests[key].spent));
        self.owe(scope, spent);
    }

    /// Notes that a fill this request waited for has ended, and that the request holds its pin. `taken` means that the
    /// request was told before that the device took it up.
    pub(super) fn page_ready(&mut self, id: RequestId, taken: bool, fx: &mut Effects) {
        let Some(key) = self.request_key(id) else { return };
        let Request { stage, remaining, untaken, .. } = self.requests[key];
        invariant!(
            stage == Stage::Filling && remaining > 0,
            "{id:?} in {stage:?} waits for {remaining} fills, and one has ended"
        );
        invariant!(taken || untaken > 0, "{id:?} has heard of all fills that were taken up, and of one more");
        self.requests[key].remaining -= 1;
        if !taken {
            self.requests[key].untaken -= 1;
        }
        if self.requests[key].remaining == 0 {
            self.all_ready(id, key, fx);
        } else {
            self.lend_if_taken(id, key, fx);
        }
    }

    /// Notes that the device has taken up a fill this request waits for.
    pub(super) fn page_taken(&mut self, id: RequestId, fx: &mut Effects) {
        let Some(key) = self.request_key(id) else { return };
        self.requests[key].untaken -= 1;
        self.lend_if_taken(id, key, fx);
    }

    /// Grants a request for a stream once the device has taken up all fills that it still waits for. Their pages are
    /// lent.
    fn lend_if_taken(&mut self, id: RequestId, key: usize, fx: &mut Effects) {
        let Request { terms: Terms { purpose: Purpose::ReadOnStream, .. }, untaken: 0, .. } = self.requests[key] else {
            return;
        };
        let awaited = |page: &PageId| self.filling.get(page).is_some_and(|fill| fill.waiters.contains(&id));
        let lent: Vec<PageId> = self.requests[key].pages().filter(awaited).collect();
        for (count, page) in lent.iter().enumerate() {
            let edge = self.word(*page).lend();
            if edge == Ok(Claim::Won) {
                continue;
            }
            lent[..count].iter().for_each(|page| self.word(*page).unpin_quiet());
            // The word's pin count is at its limit: the request waits for its fills to end, as others do. If the page
            // is given up, all that wait for its fill are ended, this request included.
            self.took(*page, edge.map(drop), fx);
            return;
        }
        let mut after = None;
        for page in lent {
            if let Some(fill) = self.filling.get_mut(&page) {
                fill.leave(id);
                fill.lent = true;
                after = after.max(fill.taken);
            }
        }
        self.grant(id, key, after, fx);
    }

    /// Notes that a fill this request waits for starts anew: the device has not taken it up.
    pub(super) fn untake(&mut self, id: RequestId) {
        if let Some(key) = self.request_key(id) {
            self.requests[key].untaken += 1;
        }
    }

    fn all_ready(&mut self, id: RequestId, key: usize, fx: &mut Effects) {
        if self.requests[key].writes() {
            for page in self.requests[key].pages() {
                let began = self.word(page).begin_write();
                if !self.took(page, began, fx) {
                    let error = self.lost_error(page);
                    return self.end(id, error, fx);
                }
                // An earlier failed write back no longer matters: its bytes are out of date.
                self.forget_failures(page);
            }
        }
        self.grant(id, key, None, fx);
    }

    fn grant(&mut self, id: RequestId, key: usize, after: Option<crate::ids::FillPoint>, fx: &mut Effects) {
        let Request { terms, spent, cause, .. } = self.requests[key];
        invariant!(
            self.requests[key].pages().all(|page| self.word(page).load().pins > 0),
            "{id:?} is granted without all its pins"
        );
        let runs = std::mem::take(&mut self.requests[key].runs);
        self.acquired(&terms, &runs, spent);
        // These pages are the scope's claim from here on, until the pins end.
        self.requests[key].claimed = 0;
        self.requests[key].runs = runs;
        self.finish(id, Ok(Granted { cause, after, spent }), fx);
    }

    /// Removes a request and reports its result.
    pub(super) fn finish(&mut self, id: RequestId, result: Result<Granted>, fx: &mut Effects) {
        if let Some(key) = self.request_key(id) {
            self.remove_request(key);
            fx.done.push((id, result));
        }
    }

    /// Pins of these pages have ended: a writer's, or pins that somebody waits for. Requests in the pages' lines may go
    /// on.
    pub fn released(&mut self, runs: &[PageRun], fx: &mut Effects) {
        for page in runs.iter().flat_map(|run| run.pages()) {
            self.changed(page);
        }
        self.pump(fx);
    }

    /// Something has happened to a page: the next [pump](Self::pump) serves its line.
    pub(super) fn changed(&mut self, page: PageId) {
        if self.page_lines.contains_key(&page) {
            self.moved.push(page);
        }
        self.may_go(page);
    }

    fn is_absent(&self, page: PageId) -> bool {
        self.word(page).load().state == State::Empty
    }

    /// Serves all requests that can go on.
    pub(super) fn serve_lines(&mut self, fx: &mut Effects) {
        loop {
            if let Some(page) = self.moved.pop() {
                self.serve_page(page, fx);
            } else if let Some(id) = self.nearly.pop() {
                if self.asks(id).is_some() {
                    self.attempt(id, fx);
                }
            } else if let Some(scope) = self.filled.pop() {
                self.serve_purse(scope, fx);
            } else if !self.serve_frames(fx) {
                return;
            }
        }
    }

    /// Tries the requests in a page's line, in order, until one finds this page in its way. Requests of holders are all
    /// tried: what they wait for may have become another's. If a writer waits for readers, growing readers behind it
    /// are still tried: growth waits for those that hold the page, never for those that stand before it.
    fn serve_page(&mut self, page: PageId, fx: &mut Effects) {
        // First the oldest request that must not be passed: those before it in the line may not pass it.
        if let Some(id) = self.page_lines.get(&page).and_then(Line::barring) {
            self.attempt(id, fx);
        }
        let mut behind = None;
        let mut beside_readers = false;
        loop {
            let Some(line) = self.page_lines.get(&page) else { return };
            let next = if let Some(turn) = behind.filter(|_| beside_readers) {
                line.next_reader(turn).filter(|(turn, _)| !turn.class.is_new())
            } else {
                line.next(behind)
            };
            let Some((turn, id)) = next else { return };
            behind = Some(turn);
            if self.attempt(id, fx) == Some(Blocked::Page(page)) && turn.class != Class::Holding {
                let writes = self.request_key(id).is_some_and(|key| self.requests[key].writes());
                beside_readers = writes && !self.word(page).load().exclusive;
                if !beside_readers {
                    return;
                }
            }
        }
    }

    /// A frame has come to a scope's purse, or a request of the scope wants fewer.
    pub(super) fn purse_filled(&mut self, scope: ScopeId) {
        if self.filled.last() != Some(&scope) {
            self.filled.push(scope);
        }
    }

    /// Tries the requests that wait for a purse, in order, until one stays.
    fn serve_purse(&mut self, id: ScopeId, fx: &mut Effects) {
        self.fill_purses(fx);
        while let Some(request) = self.frame_line.first_of_purse(id) {
            let blocked = self.attempt(request, fx);
            if matches!(blocked, Some(Blocked::Frames { .. })) {
                return;
            }
        }
    }

    /// Tries the requests for which there may be frames. Returns whether one of them went on, or now waits for
    /// something else.
    ///
    /// Requests that pass new ones are all tried, in turn: none waits for those before it. Of new ones, only the first
    /// few. One that fails says how many frames there can be, and those that want more are then not tried.
    fn serve_frames(&mut self, fx: &mut Effects) -> bool {
        if !std::mem::take(&mut self.eased) || self.frame_line.line.is_empty() {
            return false;
        }
        let mut behind = None;
        while let Some((turn, id)) = self.frame_line.next_first(behind) {
            behind = Some(turn);
            if !matches!(self.attempt(id, fx), Some(Blocked::Frames { .. })) {
                self.eased = true;
                return true;
            }
        }
        for (scope, id) in self.frame_line.first_of_purses() {
            let Some(key) = self.request_key(id) else { continue };
            // One of its pages may have come, or what brings its frames may have become another's.
            let purse = self.scope(Some(scope)).map_or(0, Scope::may_spend);
            let changed = self.absent_of(self.requests[key].pages()) <= purse || self.holds(Some(scope));
            if changed && !matches!(self.attempt(id, fx), Some(Blocked::Frames { .. })) {
                self.eased = true;
                return true;
            }
        }
        let mut room = u32::MAX;
        for id in self.frame_line.tried(self.declarable() > 0) {
            let Some(key) = self.request_key(id) else { continue };
            let request = &self.requests[key];
            if self.absent_of(request.pages()) + request.frames > room || request.frames > self.declarable() {
                continue;
            }
            match self.attempt(id, fx) {
                Some(Blocked::Frames { room: there }) => room = room.min(there),
                _ => {
                    self.eased = true;
                    return true;
                }
            }
        }
        false
    }

    /// Admits a request, or puts it in the line of what is in its way. Returns what that is. A request whose scope
    /// holds pins is refused if that is another holder.
    fn attempt(&mut self, id: RequestId, fx: &mut Effects) -> Option<Blocked> {
        let key = self.request_key(id)?;
        self.looks += 1;
        let (blocked, cause) = self.try_admit(id, key, fx).err()?;
        let Request { terms, turn, .. } = self.requests[key];
        let refused = if self.holds(terms.scope) && !self.comes_by_moves(key, blocked) {
            self.stats.busy += 1;
            Some(self.busy(key, blocked))
        } else {
            self.never_has(key)
        };
        if let Some(error) = refused {
            self.end(id, error, fx);
            return None;
        }
        let request = &mut self.requests[key];
        request.cause = earlier(request.cause, cause);
        let class = self.class_of_growth(terms.scope);
        if turn.class == Class::Holding && class != Some(Class::Holding) {
            // The scope has let go of all its pins meanwhile.
            if let Some(scope) = self.scope_mut(terms.scope) {
                scope.all_hold = false;
            }
            self.change_class(id, key, class.unwrap_or_else(|| self.class_beside_growth(&terms)));
        }
        self.stand(id, key, blocked);
        Some(blocked)
    }

    /// Whether what is in a request's way comes by moves, and by ends of its own scope's pins behind a stream, whatever
    /// others hold.
    fn comes_by_moves(&self, key: usize, blocked: Blocked) -> bool {
        let request = &self.requests[key];
        let scope = self.scope(request.terms.scope);
        let Blocked::Frames { .. } = blocked else {
            let Blocked::Page(page) = blocked else { return false };
            return self.moves_away(page, request);
        };
        let needed = self.absent_of(request.pages()) + request.frames;
        if let Some(scope) = scope.filter(|scope| scope.declared > 0) {
            return needed <= scope.comes_to_purse() + scope.owed.min(self.frames_in_moves());
        }
        if request.frames > 0 && !self.may_declare(request.frames) {
            return false;
        }
        let there = self.frames.free_count() + self.transit + self.frames_in_moves() + self.frames_behind(scope);
        there >= self.promised() + self.floor + needed
    }

    /// Whether a page is in the way of a request.
    fn is_in_the_way(&self, page: PageId, request: &Request) -> bool {
        let word = self.word(page).load();
        match word.state {
            State::Empty | State::Poisoned => false,
            State::Filling => self.filling.get(&page).is_some_and(|fill| {
                fill.failed.is_none() && (fill.locked || request.writes() && (fill.lent || !fill.waiters.is_empty()))
            }),
            State::Evicting => true,
            _ if request.writes() => {
                word.pins > 0 || word.state == State::WritingBack || self.entry_of(page).copying_out()
            }
            _ => word.exclusive || self.entry_of(page).evict_after(),
        }
    }

    /// Whether a page that is in the way of a request is so because it moves, or because of pins of the request's own
    /// scope that end behind a stream.
    fn moves_away(&self, page: PageId, request: &Request) -> bool {
        let word = self.word(page).load();
        let entry = self.entry_of(page);
        if word.state == State::WritingBack || entry.copying_out() {
            // Who has pinned it too counts once the move has ended.
            return true;
        }
        if word.pins > 0 {
            let behind = self.scope(request.terms.scope).map_or(0, |scope| scope.holdings().behind_of(page));
            return word.pins <= behind && self.filling.get(&page).is_none_or(|fill| fill.waiters.is_empty());
        }
        word.state != State::Filling
    }

    /// Frames of unpinned pages that can go, or be used, once the moves under way have ended.
    fn frames_in_moves(&self) -> u32 {
        let comes = |page: PageId| {
            let word = self.word(page).load();
            match word.state {
                State::Filling => self.filling.get(&page).is_some_and(|fill| fill.waiters.is_empty() && !fill.lent),
                State::Clean | State::Dirty | State::WritingBack => {
                    word.pins == 0 && !self.entry_of(page).evict_after()
                }
                _ => false,
            }
        };
        self.moves.iter().filter(|(_, record)| comes(record.page)).count() as u32
    }

    /// Frames of pages that only pins of this scope hold which end behind a stream.
    fn frames_behind(&self, scope: Option<&Scope>) -> u32 {
        let mut pages = scope.map(|scope| scope.holdings().behind()).unwrap_or_default();
        pages.sort_unstable();
        // The pins may have ended, and the pager has not been told yet.
        let only = |pins: &&[PageId]| self.word(pins[0]).load().pins as usize <= pins.len();
        pages.chunk_by(|a, b| a == b).filter(only).count() as u32
    }

    /// The error of a request that wants more than its scope has declared.
    fn never_has(&self, key: usize) -> Option<Error> {
        let request = &self.requests[key];
        let scope = self.scope(request.terms.scope).filter(|scope| scope.declared > 0 && scope.reserving.is_none())?;
        let total = pages_of(&request.runs);
        let beyond = total > u64::from(scope.declared) && self.absent_of(request.pages()) > scope.declared;
        beyond.then(|| {
            let message = format!(
                "{} has reserved {}, and asks for {}",
                self.scope_name(request.terms.scope),
                self.pages_in_words(scope.declared.into()),
                self.pages_in_words(total)
            );
            Error::new(ErrorKind::BudgetTooSmall, message).remedy("reserve more, or pin fewer pages at a time")
        })
    }

    /// The error of a request whose scope holds pins, and that would wait for another holder.
    fn busy(&self, key: usize, blocked: Blocked) -> Error {
        let request = &self.requests[key];
        let id = request.terms.scope;
        let held = self.pages_in_words(self.scope(id).map_or(0, |scope| scope.holdings().pages()).into());
        let name = self.scope_name(id);
        let message = match blocked {
            Blocked::Page(page) => {
                let what = if request.writes() { "write" } else { "read" };
                let (index, segment, holder) = (page.index.0, page.segment, self.holder_of(page, id));
                format!("{name} holds {held} and asks to {what} page {index} of {segment:?}, which {holder}")
            }
            Blocked::Frames { .. } => {
                let wanted = self.absent_of(request.pages()) + request.frames;
                let there = (self.frames.free_count() + self.transit).saturating_sub(self.promised() + self.floor);
                let there = self.scope(id).filter(|scope| scope.declared > 0).map_or(there, |scope| scope.purse);
                let itself = self.scope(id).map_or(0, |scope| scope.holdings().pages()) + wanted + self.floor;
                let (wanted, there) = (self.pages_in_words(wanted.into()), self.pages_in_words(there.into()));
                let budget = self.pages_in_words(self.frames.target.into());
                if itself > self.frames.target {
                    let message =
                        format!("{name} holds {held} itself and asks for {wanted} more, of a budget of {budget}");
                    return Error::new(ErrorKind::Busy, message)
                        .remedy("let guards go first, and open a scope of its own for each thread or task");
                }
                format!(
                    "{name} holds {held} and asks for {wanted}, but others hold all but {there} of a budget of {budget}"
                )
            }
        };
        Error::new(ErrorKind::Busy, message).remedy(
            "drop the scope's guards and try again, pin what is needed together as a set, or reserve the most that the \
             scope will need",
        )
    }

    /// Who has a page, in words.
    fn holder_of(&self, page: PageId, asks: Option<ScopeId>) -> String {
        match self.scope(asks).and_then(|scope| scope.holdings().holds(page)) {
            Some(true) => return "it has pinned to write itself".to_owned(),
            Some(false) => return "it has pinned itself".to_owned(),
            None => {}
        }
        let others = self.open_scopes().filter(|(id, _)| Some(*id) != asks).take(NAMES_LOOKED_AT);
        let holder = others.filter_map(|(id, scope)| Some((id, scope.holdings().holds(page)?)));
        let written = self.word(page).load().exclusive;
        match holder.max_by_key(|(_, writes)| *writes) {
            Some((id, writes)) => {
                format!("{} has pinned{}", self.scope_name(Some(id)), if writes { " to write" } else { "" })
            }
            None if self.filling.contains_key(&page) => "another request is filling".to_owned(),
            None if written => "a pin outside of scopes has to write".to_owned(),
            None => "a pin outside of scopes has".to_owned(),
        }
    }

    /// For example "3 pages (6.0 MiB)".
    fn pages_in_words(&self, pages: u64) -> String {
        let noun = if pages == 1 { "page" } else { "pages" };
        format!("{pages} {noun} ({})", Bytes::new(pages * self.config.page_bytes))
    }

    fn entry_of(&self, page: PageId) -> &Entry {
        &self.segments[page.segment.index()].entries[page.index.index()]
    }

    /// Puts a request in line, unless it stands there already.
    fn stand(&mut self, id: RequestId, key: usize, blocked: Blocked) {
        let source = self.source_of(key);
        match (&self.requests[key].stand, blocked) {
            (Stand::Frames { source: before, .. }, Blocked::Frames { .. }) if *before == source => return,
            (Stand::Pages(pages), Blocked::Page(page))
                if self.requests[key].writes() || pages.iter().any(|(other, _)| *other == page) =>
            {
                return;
            }
            _ => {}
        }
        self.stand_anew(id, key, blocked, source);
    }

    /// Puts a request in line, whether it stands in one already or not. Pages and the gate stay closed for it in
    /// between: a pin that passed it then would not be counted.
    fn stand_anew(&mut self, id: RequestId, key: usize, blocked: Blocked, source: Source) {
        let before = self.leave_lines(key);
        let Request { turn, passed, .. } = self.requests[key];
        let left = self.passes.saturating_sub(passed);
        let stand = match blocked {
            Blocked::Frames { .. } => {
                self.gate.close();
                Stand::Frames { source, joined: self.frame_line.join(turn, id, left, source) }
            }
            Blocked::Page(page) => {
                let pages: Vec<PageId> =
                    if self.requests[key].writes() { self.requests[key].pages().collect() } else { vec![page] };
                let part = left / pages.len() as u32;
                let writes = self.requests[key].writes();
                let mut stands = Vec::with_capacity(pages.len());
                for page in pages {
                    self.word(page).close();
                    let line = self.page_lines.entry(page).or_default();
                    let joined = if writes { line.join(turn, id, part) } else { line.join_to_read(turn, id, part) };
                    stands.push((page, joined));
                }
                Stand::Pages(stands)
            }
        };
        self.requests[key].stand = stand;
        self.standing += 1;
        self.open_behind(before);
    }

    /// The frames that a request may get.
    fn source_of(&self, key: usize) -> Source {
        let Request { turn, terms, frames, .. } = &self.requests[key];
        let declared = self.scope(terms.scope).is_some_and(|scope| scope.declared > 0);
        match (turn.class, terms.scope.filter(|_| declared)) {
            (Class::Interactive | Class::Batch, _) if *frames > 0 => Source::Reserving,
            (Class::Interactive | Class::Batch, _) => Source::New,
            (Class::Holding | Class::Growing, Some(scope)) => Source::Purse(scope),
            (Class::Holding | Class::Growing, None) => Source::First,
        }
    }

    /// Takes a request out of the lines it stands in.
    fn step_out(&mut self, key: usize) {
        let stand = self.leave_lines(key);
        self.open_behind(stand);
    }

    /// Takes a request out of the lines it stands in, and returns where it stood. Pages and the gate stay closed.
    fn leave_lines(&mut self, key: usize) -> Stand {
        let turn = self.requests[key].turn;
        let mut passed = 0;
        let stand = std::mem::replace(&mut self.requests[key].stand, Stand::Nowhere);
        self.standing -= usize::from(!matches!(stand, Stand::Nowhere));
        match &stand {
            Stand::Nowhere => {}
            Stand::Frames { source, joined } => {
                passed = self.frame_line.leave(turn, *joined, *source);
                // Requests behind it are tried from now on.
                self.eased = true;
                if let Source::Purse(scope) = source {
                    self.purse_filled(*scope);
                }
            }
            Stand::Pages(pages) => {
                for (page, joined) in pages {
                    let Some(line) = self.page_lines.get_mut(page) else { continue };
                    passed += line.leave(turn, *joined);
                    if line.is_empty() {
                        self.page_lines.remove(page);
                    } else {
                        // It may have been in the way of the others.
                        self.moved.push(*page);
                    }
                }
            }
        }
        self.requests[key].passed += passed;
        stand
    }

    /// Opens the pages or the gate that were closed for a request which stood here, unless others still stand there.
    fn open_behind(&self, stand: Stand) {
        match stand {
            Stand::Nowhere => {}
            Stand::Frames { .. } => {
                if self.frame_line.line.is_empty() {
                    self.gate.open();
                }
            }
            Stand::Pages(pages) => {
                for (page, _) in pages {
                    if self.segments.contains(page.segment.index()) {
                        self.reopen(page);
                    }
                }
            }
        }
    }

    /// The line in which a new request for these pages would pass one that must not be passed again.
    fn barred(&self, turn: Turn, pages: &[PageId]) -> Option<Blocked> {
        if !turn.class.is_new() {
            return None;
        }
        if self.frame_line.line.bars(turn) {
            return Some(Blocked::Frames { room: u32::MAX });
        }
        let barred = |page: &&PageId| self.page_lines.get(page).is_some_and(|line| line.bars(turn));
        pages.iter().find(barred).map(|page| Blocked::Page(*page))
    }

    /// Takes everything the request needs, or takes nothing and returns what was in the way.
    fn try_admit(&mut self, id: RequestId, key: usize, fx: &mut Effects) -> Result<(), (Blocked, WaitCause)> {
        let pages: Vec<PageId> = self.requests[key].pages().collect();
        let Request { terms, turn, frames, .. } = self.requests[key];
        let writes = terms.purpose == Purpose::Write;
        if let Some(blocked) = self.barred(turn, &pages) {
            let cause = if matches!(blocked, Blocked::Page(_)) { WaitCause::Guard } else { WaitCause::Frames };
            return Err((blocked, cause));
        }
        let mut pinned = Vec::with_capacity(pages.len());
        let mut joined = Vec::new();
        let mut missing = Vec::new();
        let mut blocked = None;
        for page in pages.iter().copied() {
            let state = self.word(page).load().state;
            let copying_out = self.entry(page).copying_out();
            match state {
                State::Empty => missing.push(page),
                State::Filling => match self.filling.get(&page) {
                    Some(fill) if fill.failed.is_some() => {
                        // The fill cannot be tried again while the page is lent, and nobody knows when that ends.
                        let error = fill.failed.clone().unwrap_or_else(closing);
                        self.undo(&pinned, writes);
                        self.end(id, error, fx);
                        return Ok(());
                    }
                    Some(fill) if fill.locked || writes && (fill.lent || !fill.waiters.is_empty()) => {
                        blocked = Some((Blocked::Page(page), WaitCause::Guard));
                    }
                    _ => joined.push(page),
                },
                State::Poisoned => {
                    self.undo(&pinned, writes);
                    let error = self.lost_error(page);
                    self.end(id, error, fx);
                    return Ok(());
                }
                State::Evicting if !writes && self.can_rescue() => {
                    let rescued = self.word(page).rescue();
                    // Its frame will not become free, whatever its state is now.
                    self.transit -= 1;
                    self.victims.remove(page);
                    if !self.took(page, rescued, fx) {
                        self.undo(&pinned, writes);
                        let error = self.lost_error(page);
                        self.end(id, error, fx);
                        return Ok(());
                    }
                    self.entered(page);
                    self.eased = true;
                    pinned.push(page);
                }
                State::Evicting => blocked = Some((Blocked::Page(page), WaitCause::WriteBack)),
                // The victim was rescued, and its copy down still reads the frame.
                _ if writes && copying_out => blocked = Some((Blocked::Page(page), WaitCause::WriteBack)),
                _ if writes => match self.word(page).lock() {
                    Claim::Won => pinned.push(page),
                    Claim::Blocked => {
                        let written = state == State::WritingBack;
                        let cause = if written { WaitCause::WriteBack } else { WaitCause::Guard };
                        blocked = Some((Blocked::Page(page), cause));
                    }
                },
                _ => match self.word(page).try_pin_latched() {
                    TryPin::Hit | TryPin::FirstUse => {
                        pinned.push(page);
                        if self.entry(page).evict_after() && !self.spare(page) {
                            blocked = Some((Blocked::Page(page), WaitCause::WriteBack));
                        }
                    }
                    TryPin::Busy => blocked = Some((Blocked::Page(page), WaitCause::Guard)),
                },
            }
            if blocked.is_some() {
                break;
            }
        }
        let needed = missing.len() as u32 + frames;
        let (purse, declared) = self.scope(terms.scope).map_or((0, 0), |scope| (scope.may_spend(), scope.declared));
        let spent = purse.min(missing.len() as u32);
        if blocked.is_none() && declared > 0 && needed > spent {
            // The scope pays from its purse only. What the purse lacks was spent, and comes back before anybody else
            // gets a frame. Otherwise pins that end behind a stream could add up to more than the scope declared.
            let cause = if self.transit > 0 { WaitCause::WriteBack } else { WaitCause::Frames };
            blocked = Some((Blocked::Frames { room: u32::MAX }, cause));
        }
        let floor = if terms.never_refused { 0 } else { self.floor };
        if blocked.is_none() && frames > 0 && !self.may_declare(frames) {
            // However many frames are free now: scopes that declared frames may be owed some of them.
            blocked = Some((Blocked::Frames { room: u32::MAX }, WaitCause::Frames));
        }
        // Frames paid from the purse are there, whatever a smaller budget waits for.
        while blocked.is_none()
            && needed > spent
            && self.frames.free_count() + self.transit + spent < self.promised() + floor + needed
        {
            if !self.reclaim(Want::Demand, fx) {
                let cause = if self.transit > 0 { WaitCause::WriteBack } else { WaitCause::Frames };
                // Pages that only this request's own pins keep from being evicted: they could go for others.
                let own = pinned.iter().copied().filter(|page| self.word(*page).load().pins == 1);
                let kept = own.count() as u32;
                let there = (self.frames.free_count() + self.transit).saturating_sub(self.promised() + floor);
                let room = there + kept;
                blocked = Some((Blocked::Frames { room }, cause));
            }
        }
        if let Some(blocked) = blocked {
            self.undo(&pinned, writes);
            return Err(blocked);
        }
        self.step_out(key);
        self.ends_waiting(terms.scope, id);
        self.frame_line.line.pass(turn);
        for page in &pages {
            if let Some(line) = self.page_lines.get_mut(page) {
                line.pass(turn);
            }
        }
        let short = self.frames.free_count() < self.promised() + needed - spent;
        if let Some(scope) = self.scope_mut(terms.scope) {
            scope.purse -= spent;
            self.purses -= spent;
        }
        let request = &mut self.requests[key];
        request.stage = Stage::Filling;
        request.remaining = missing.len() as u32 + joined.len() as u32;
        request.untaken = request.remaining;
        request.spent = spent;
        if short {
            request.cause = earlier(request.cause, WaitCause::WriteBack);
        }
        for page in joined {
            if let Some(fill) = self.filling.get_mut(&page) {
                fill.waiters.push(id);
                fill.locked = writes;
                self.requests[key].untaken -= u32::from(fill.taken.is_some());
            }
            self.raise(page, Priority::Demand, fx);
        }
        for page in missing {
            if !self.admit_fill(page, Some(id), writes, Priority::Demand, fx) {
                let error = self.lost_error(page);
                self.end(id, error, fx);
                return Ok(());
            }
        }
        if frames > 0 {
            self.set_aside_for(terms.scope, frames, id);
            self.serve_awaiting(fx);
        } else if self.requests[key].remaining == 0 {
            self.all_ready(id, key, fx);
        } else {
            self.lend_if_taken(id, key, fx);
        }
        Ok(())
    }

    /// Gives back the pins or locks of a request that is not admitted after all.
    fn undo(&mut self, pinned: &[PageId], writes: bool) {
        for page in pinned {
            if writes {
                // A request that met the lock meanwhile stands in the page's line, and stood there before.
                let _ = self.word(*page).unlock();
            } else {
                self.word(*page).unpin_quiet();
            }
            // A search for frames may have met this pin, and its end is not told. A later pin of the page may carry no
            // mark either.
            self.hear_of(*page);
        }
    }

    /// A waiting request's scope holds pins now: the request goes on, waits for moves, or is refused.
    pub(super) fn now_holds(&mut self, id: RequestId) {
        let Some(key) = self.request_key(id) else { return };
        if self.requests[key].turn.class == Class::Holding || self.requests[key].stage != Stage::Queued {
            return;
        }
        self.change_class(id, key, Class::Holding);
        self.nearly.push(id);
    }

    /// Makes a request more or less urgent. It stands in the same line afterwards.
    fn change_class(&mut self, id: RequestId, key: usize, class: Class) {
        let blocked = match &self.requests[key].stand {
            Stand::Nowhere => None,
            Stand::Frames { .. } => Some(Blocked::Frames { room: u32::MAX }),
            Stand::Pages(pages) => pages.first().map(|(page, _)| Blocked::Page(*page)),
        };
        let before = self.leave_lines(key);
        self.requests[key].turn.class = class;
        if let Some(blocked) = blocked {
            self.stand_anew(id, key, blocked, self.source_of(key));
        }
        self.open_behind(before);
    }

    /// Spares a victim that is being written back, because an admission wants the page, unless its frame is promised.
    /// If it stayed in transit, the admission could count on the very frame that its own pin holds.
    fn spare(&mut self, page: PageId) -> bool {
        let may = self.can_rescue();
        if may {
            self.transit -= 1;
            self.victims.remove(page);
            self.entry(page).set_evict_after(false);
            self.reopen(page);
            self.entered(page);
        }
        may
    }

    /// Opens a page to pins without the latch, unless a request still waits for it or it is still a victim.
    pub(super) fn reopen(&self, page: PageId) {
        let evict_after = self.segments[page.segment.index()].entries[page.index.index()].evict_after();
        if !self.page_lines.contains_key(&page) && !evict_after {
            self.word(page).reopen();
        }
    }

    /// Frames, free or in transit, that are spoken for by admitted pages, by scopes that declared them, or by a
    /// shrinking budget.
    pub(super) fn promised(&self) -> u32 {
        self.wanted() + self.leaving()
    }

    /// [`promised`](Self::promised) without the shrinking budget's frames.
    pub(super) fn wanted(&self) -> u32 {
        self.awaiting.len() as u32 + self.purses + self.coming
    }

    /// Frames that a shrinking budget takes as soon as they are free. Frames that scopes have declared stay until the
    /// scopes end.
    pub(super) fn leaving(&self) -> u32 {
        self.frames.active().saturating_sub(self.frames_beside(self.declared))
    }

    /// How many frames exist while scopes have declared `declared` of them. Also after the budget has shrunk, the
    /// declared frames are the scopes', and the floor is there beside them.
    pub(super) fn frames_beside(&self, declared: u32) -> u32 {
        self.frames.target.max(if declared > 0 { declared + self.floor } else { 0 })
    }

    /// Whether the frame of a page that is being evicted is promised to nobody.
    fn can_rescue(&self) -> bool {
        self.frames.free_count() + self.transit > self.promised()
    }

    /// How many requests wait for something that others hold.
    pub fn waiting_count(&self) -> usize {
        self.standing + self.shrinking.len()
    }

    /// Handles moves that take too long, each given with its error. Requests of `waiting` that wait for one of these
    /// moves end with that error. The moves go on, and keep their frames and buffers.
    pub fn overdue(&mut self, moves: &[(MoveId, Error)], waiting: &[RequestId], fx: &mut Effects) {
        let late: Vec<LateMove<'_>> = moves.iter().filter_map(|(id, error)| self.late_move(*id, error)).collect();
        for id in waiting {
            if let Some(late) = self.waits_for_page(*id, &late) {
                self.end(*id, late.error.clone(), fx);
            }
        }
        // Once the requests of a late read have ended, its frame goes to anybody as soon as the read ends, if it ever
        // does.
        let reads: Vec<&LateMove<'_>> = late
            .iter()
            .filter(|late| late.fills && self.filling.get(&late.page).is_some_and(|fill| fill.waiters.is_empty()))
            .collect();
        for id in waiting {
            if let Some(read) = reads.first()
                && self.has_frames_but_for(*id, reads.len() as u32)
            {
                self.end(*id, read.error.clone(), fx);
            }
        }
        self.pump(fx);
    }

    fn late_move<'a>(&self, id: MoveId, error: &'a Error) -> Option<LateMove<'a>> {
        let (page, from, to) = self.page_of_move(id)?;
        let (frees, fills) = (matches!(from, Place::Device(_)), matches!(to, Place::Device(_)));
        Some(LateMove { page, frees, fills, error })
    }

    /// The first of these moves that a request waits for: one of a page that it wants, or one that frees a frame it
    /// could get.
    fn waits_for_page<'a, 'b>(&self, id: RequestId, late: &'b [LateMove<'a>]) -> Option<&'b LateMove<'a>> {
        let Request { frames, stage, stand, .. } = &self.requests[self.request_key(id)?];
        let frees = || late.iter().find(|late| late.frees);
        let of = |page: PageId| late.iter().find(move |late| late.page == page);
        match (stage, stand) {
            (Stage::Filling, _) if *frames > 0 => frees(),
            (Stage::Filling, _) => self.requests[self.request_key(id)?].pages().find_map(|page| {
                let fill = self.filling.get(&page)?;
                of(page).or_else(|| if fill.moving.is_none() { frees() } else { None })
            }),
            (Stage::Queued, Stand::Pages(pages)) => pages.iter().find_map(|(page, _)| of(*page)),
            // A request for a smaller budget only stops waiting: the budget stays as it was set.
            (Stage::Queued | Stage::Shrinking, _) => frees(),
        }
    }

    /// Whether a request waits for frames and would have them with `more` more; for a smaller budget, whether it would
    /// then be met. Otherwise others are in its way, and it waits for them however long that takes.
    fn has_frames_but_for(&self, id: RequestId, more: u32) -> bool {
        let Some(key) = self.request_key(id) else { return false };
        let Request { terms, stage, stand, frames, .. } = &self.requests[key];
        let there = self.frames.free_count() + self.transit + more;
        match (stage, stand) {
            (Stage::Queued, Stand::Frames { .. }) => {
                let own = self.scope(terms.scope).map_or(0, |scope| scope.purse + scope.coming);
                let lacks = self.absent_of(self.requests[key].pages()) + frames;
                lacks + self.wanted().saturating_sub(own) <= there
            }
            (Stage::Shrinking, _) => self.promised() <= there,
            _ => false,
        }
    }

    /// Ends waiting requests that a smaller budget can never hold.
    pub(super) fn refuse_oversized(&mut self, fx: &mut Effects) {
        let queued: Vec<RequestId> =
            self.request_stages().filter(|(_, stage, ..)| *stage == Stage::Queued as u8).map(|(id, ..)| id).collect();
        for id in queued {
            let Some(key) = self.request_key(id) else { continue };
            let Request { frames, terms, .. } = self.requests[key];
            let total = pages_of(&self.requests[key].runs) + u64::from(frames);
            let most = self.frames_for(&terms);
            if total > u64::from(most) {
                let error = too_large(total, most, self.config.page_bytes);
                self.end(id, error, fx);
            }
        }
    }

    /// Ends every request that stands in a line or waits for a smaller budget.
    pub(super) fn end_all_queued(&mut self, error: &Error, fx: &mut Effects) {
        let queued: Vec<RequestId> =
            self.request_stages().filter(|(_, stage, ..)| *stage != Stage::Filling as u8).map(|(id, ..)| id).collect();
        for id in queued {
            self.end(id, error.clone(), fx);
        }
    }

    /// For checks: all lines; `None` stands for the line for frames.
    pub(super) fn lines(&self) -> impl Iterator<Item = (Option<PageId>, &Line)> {
        let frames = std::iter::once((None, &self.frame_line.line));
        frames.chain(self.page_lines.iter().map(|(page, line)| (Some(*page), line)))
    }
}

/// The error of every call once a runtime is being closed.
pub fn closing() -> Error {
    Error::new(ErrorKind::Closed, "the runtime is closing, or is closed")
        .remedy("open a new one, or close this one later")
}

/// The first cause that is not `None`.
fn earlier(first: WaitCause, next: WaitCause) -> WaitCause {
    if first == WaitCause::None { next } else { first }
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
