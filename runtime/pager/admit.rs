//! Requests: sets of pages that are admitted, filled and pinned as a unit.
//!
//! A request takes all it needs in one step, or nothing: pins and locks of resident pages, and frames for the others.
//! Once admitted, it waits for moves only, and moves end. Otherwise it stands in the [`Line`] of what was missing
//! first, a page or frames, and is tried again when that line moves. So a step costs only what it changes, however many
//! requests wait.
//!
//! A reader stands in the line of the page that is in its way. A writer stands in the lines of all its pages. So
//! readers that come one after the other cannot keep it from having all of them at once.

use super::line::{Class, Line, Room, Source, Turn, Wanted};
use super::policy::Want;
use super::request::{Purpose, Request, ScopePriority, Stage, Stand, Terms};
use super::runs::pages_of;
use super::scope::Scope;
use super::state::{Claim, State, TryPin};
use super::table::PageEntry;
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
    /// Frames are missing. A request that grows can have at most `room`; fewer, if some of these would come from pages
    /// that it wants itself. `u32::MAX`: the request was short of something else than frames.
    Frames {
        room: u32,
    },
    Page(PageId),
}

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
        self.request_key(id).is_some_and(|key| self.requests[key].turn.class == Class::Growing)
    }

    /// Whether a request waits for frames, and the pages in whose lines it stands.
    #[doc(hidden)]
    pub fn stands(&self, id: RequestId) -> Option<(bool, Vec<PageId>)> {
        self.request_stand(id).map(|(_, frames, pages)| (frames.is_some(), pages))
    }

    /// Whether a request stands in the line for frames.
    pub(super) fn waits_for_frames(&self, id: RequestId) -> bool {
        self.request_key(id).is_some_and(|key| matches!(self.requests[key].stand, Stand::Frames { .. }))
    }

    /// For checks: how many frames a request that waits for its scope's purse lacks there. It is tried only when a
    /// frame comes to the purse.
    pub(super) fn lacks_in_purse(&self, id: RequestId) -> Option<i64> {
        let request = &self.requests[self.request_key(id)?];
        let Stand::Frames { source: Source::Purse(_), .. } = request.stand else { return None };
        let purse = self.scope(request.terms.scope).map_or(0, Scope::may_spend);
        Some(i64::from(self.absent_of(request.pages())) - i64::from(purse))
    }

    /// How many frames a request wants beyond those its scope has set aside.
    pub(super) fn frames_short(&self, id: RequestId) -> u32 {
        let Some(key) = self.request_key(id) else { return 0 };
        let request = &self.requests[key];
        let purse = self.scope(request.terms.scope).map_or(0, Scope::may_spend);
        (self.absent_of(request.pages()) + request.frames).saturating_sub(purse)
    }

    /// For checks, of a request that waits for frames: the least it wants, how many it lacks, the absent pages it
    /// watches, and the pages it keeps.
    pub(super) fn watches(&self, id: RequestId) -> Option<(u32, u32, Vec<PageId>, &[PageId])> {
        let request = &self.requests[self.request_key(id)?];
        let Stand::Frames { wanted, .. } = &request.stand else { return None };
        let pages = request.pages().filter(|page| self.is_watched(*page, id)).collect();
        Some((wanted.least, self.absent_of(request.pages()) + request.frames, pages, &wanted.kept))
    }

    /// For checks: whether a request that waits for frames stands behind one that must not be passed again.
    pub(super) fn waits_behind(&self, id: RequestId) -> bool {
        let stand = self.request_key(id).map(|key| &self.requests[key].stand);
        matches!(stand, Some(Stand::Frames { source: Source::Behind, .. }))
    }

    /// For checks: whether a request that waits for frames is not listed under its source.
    pub(super) fn is_misplaced(&self, id: RequestId) -> bool {
        let Some(key) = self.request_key(id) else { return false };
        let Request { turn, terms, stand: Stand::Frames { wanted, source, .. }, .. } = &self.requests[key] else {
            return false;
        };
        let right = self.source_of(key);
        // Exceptions: a request that now stands behind another one learns so when it is looked at. The purse that a
        // scope reserves is not its own before all frames are there.
        let later = (*source, right) == (Source::New, Source::Behind)
            || self.scope(terms.scope).is_some_and(|scope| scope.reserving.is_some());
        *source != right && !later || !self.frame_line.is_listed(*turn, wanted, *source)
    }

    /// For checks: whether a request that waits for frames could go on now.
    pub(super) fn could_go_on(&self, id: RequestId) -> bool {
        let Some(key) = self.request_key(id) else { return false };
        let Request { terms, turn, frames, stand: Stand::Frames { .. }, .. } = self.requests[key] else { return false };
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
        if declared > 0 && !terms.never_refused {
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

    /// For checks: watched pages, and by how many requests.
    pub(super) fn watched(&self) -> impl Iterator<Item = (PageId, usize)> {
        self.watched.iter().map(|(page, by)| (*page, by.len()))
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

    /// For checks: a request's turn, the least frames it wants if it waits for frames, and the pages in whose lines it
    /// stands.
    pub(super) fn request_stand(&self, id: RequestId) -> Option<(Turn, Option<u32>, Vec<PageId>)> {
        let request = &self.requests[self.request_key(id)?];
        let (frames, pages) = match &request.stand {
            Stand::Nowhere => (None, Vec::new()),
            Stand::Frames { wanted, .. } => (Some(wanted.least), Vec::new()),
            Stand::Pages(pages) => (None, pages.iter().map(|(page, _)| *page).collect()),
        };
        Some((request.turn, frames, pages))
    }

    fn add_request(&mut self, runs: Vec<PageRun>, frames: u32, terms: Terms, stage: Stage) -> RequestId {
        self.next_serial = self.next_serial.wrapping_add(1);
        self.next_age += 1;
        let id = RequestId(self.requests.vacant_key() as u64 | u64::from(self.next_serial) << 32);
        let grows = stage == Stage::Queued && self.begins_to_wait(terms.scope, id);
        let class = match terms.scope {
            _ if terms.never_refused || grows => Class::Growing,
            Some(_) => class_of(self.scope(terms.scope).map_or(terms.priority, |scope| scope.priority)),
            None => class_of(terms.priority),
        };
        for run in &runs {
            self.segments[run.segment.index()].requests += 1;
        }
        let claimed = if terms.never_refused { 0 } else { pages_of(&runs) as u32 };
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
    /// - `WouldDeadlock`: the scope's own pins are in the way.
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
                self.unclaim(terms.scope, if terms.never_refused { 0 } else { total as u32 });
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
        let waits = |pager: &Self| {
            let request = &pager.requests[pager.request_key(id)?];
            (request.stage == Stage::Queued).then_some(request.terms.scope)
        };
        self.pump(fx);
        if let Some(Some(scope)) = waits(self)
            && self.break_deadlocks(scope, fx)
        {
            self.pump(fx);
        }
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
            Stage::Queued => self.step_out(id, key),
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

    /// A page is no longer absent. Each request that watches it watches another absent page instead, or wants one frame
    /// fewer.
    pub(super) fn appeared(&mut self, page: PageId) {
        for id in self.watched.remove(&page).unwrap_or_default() {
            self.looks += 1;
            self.came(id, page);
        }
    }

    /// A page that this request watches is no longer absent.
    fn came(&mut self, id: RequestId, page: PageId) {
        let Some(key) = self.request_key(id) else { return };
        let request = &self.requests[key];
        let Stand::Frames { wanted, source, .. } = &request.stand else { return };
        if *source == Source::New {
            self.frame_line.looked();
            if self.frame_line.line.bars(request.turn) {
                return self.waits_on(id, key, Source::Behind, u32::MAX);
            }
        }
        // In a circle, so that a page which comes and goes is not watched again at once.
        let behind = request.pages().filter(|other| *other > page);
        let circle = behind.chain(request.pages().filter(|other| *other < page));
        let other = circle.into_iter().find(|other| self.is_absent(*other) && !self.is_watched(*other, id));
        if let Some(other) = other {
            self.watched.entry(other).or_default().insert(id);
            return;
        }
        let now = Wanted { least: wanted.least.saturating_sub(1), ..wanted.clone() };
        let source = *source;
        match source {
            Source::Purse(scope) => self.purse_filled(scope),
            _ => self.eased = true,
        }
        self.wants(key, now, source);
    }

    /// Sets the least frames and the source of a request that stands in the line for frames.
    fn wants(&mut self, key: usize, now: Wanted, from: Source) {
        let Request { turn, stand: Stand::Frames { wanted, source, .. }, .. } = &mut self.requests[key] else { return };
        if *wanted != now || *source != from {
            self.frame_line.changes(*turn, (wanted, *source), (&now, from));
            (*wanted, *source) = (now, from);
        }
    }

    /// Makes a request watch up to `most` of its absent pages. Returns how many it watches.
    fn watch(&mut self, id: RequestId, key: usize, most: u32) -> u32 {
        let pages = || self.requests[key].pages();
        let mut watched = pages().filter(|page| self.is_watched(*page, id)).count() as u32;
        let absent = pages().filter(|page| self.is_absent(*page) && !self.is_watched(*page, id));
        let more: Vec<PageId> = absent.take(most.saturating_sub(watched) as usize).collect();
        for page in more {
            watched += 1;
            self.watched.entry(page).or_default().insert(id);
        }
        watched
    }

    fn unwatch(&mut self, id: RequestId, key: usize) {
        if self.watched.is_empty() {
            return;
        }
        for page in self.requests[key].pages() {
            if let Some(by) = self.watched.get_mut(&page)
                && by.remove(&id)
                && by.is_empty()
            {
                self.watched.remove(&page);
            }
        }
    }

    fn is_watched(&self, page: PageId, id: RequestId) -> bool {
        self.watched.get(&page).is_some_and(|by| by.contains(&id))
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

    /// Tries the requests in a page's line, in order, until one finds this page in its way. If that is a writer that
    /// waits for readers, growing readers behind it are still tried: growth waits for those that hold the page, never
    /// for those that stand before it.
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
                line.next_reader(turn).filter(|(turn, _)| turn.class == Class::Growing)
            } else {
                line.next(behind)
            };
            let Some((turn, id)) = next else { return };
            behind = Some(turn);
            if self.attempt(id, fx) == Some(Blocked::Page(page)) {
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

    /// Tries the requests that wait for a purse, the one that wants the fewest frames first, while the purse may be
    /// enough.
    fn serve_purse(&mut self, scope: ScopeId, fx: &mut Effects) {
        loop {
            let purse = self.scope(Some(scope)).map_or(0, Scope::may_spend);
            let Some(id) = self.frame_line.next_of_purse(scope, purse) else { return };
            self.attempt(id, fx);
        }
    }

    /// Tries the requests for which the frames may be enough. Returns whether one of them went on, or now waits for
    /// something else.
    ///
    /// Growing requests are tried in turn, past each other: none waits for those before it. A request that fails says
    /// how many frames there can be. Requests that want more are then not tried.
    fn serve_frames(&mut self, fx: &mut Effects) -> bool {
        self.eased = false;
        if self.frame_line.line.is_empty() {
            return false;
        }
        self.frame_line.begin();
        while let Some(id) = self.frame_line.next_to_wake() {
            let Some(key) = self.request_key(id) else { break };
            self.looks += 1;
            self.kept.clear();
            // It is tried as soon as one frame may be enough.
            self.waits_on(id, key, Source::New, 0);
        }
        let (mut behind, mut room) = (None, None);
        while let Some((turn, id)) = self.frame_line.next_growing(behind, room.as_ref()) {
            behind = Some(turn);
            if !self.lacks_frames(id, &mut room, fx) {
                return true;
            }
        }
        let mut room = None;
        for id in self.frame_line.next_new() {
            if !self.lacks_frames(id, &mut room, fx) {
                return true;
            }
        }
        // The least a request wants may be too low. So if it fails, the next one is tried all the same.
        let mut behind = None;
        while let Some((place, id)) = self.frame_line.next_least(behind, room.as_ref()) {
            behind = Some(place);
            self.frame_line.looked();
            if !self.lacks_frames(id, &mut room, fx) {
                return true;
            }
        }
        let mut behind = None;
        while let Some((place, id)) = self.frame_line.next_reserving(behind, room.as_ref(), self.declarable()) {
            behind = Some(place);
            self.frame_line.looked();
            if !self.lacks_frames(id, &mut room, fx) {
                return true;
            }
        }
        false
    }

    /// Tries a request. Returns whether it stays for want of frames, and then sets `room` to how many frames there can
    /// be. `room` stays as it is if the request was short of something else, or can never be refused: such a request
    /// also has the floor, so its count says nothing about others.
    fn lacks_frames(&mut self, id: RequestId, room: &mut Option<Room>, fx: &mut Effects) -> bool {
        let Some(Blocked::Frames { room: frames }) = self.attempt(id, fx) else { return false };
        if frames < u32::MAX && !self.never_refused(id) {
            *room = Some(Room { frames, kept: self.kept.clone() });
        }
        true
    }

    /// Admits a request, or puts it in the line of what is in its way. Returns what that is.
    fn attempt(&mut self, id: RequestId, fx: &mut Effects) -> Option<Blocked> {
        let key = self.request_key(id)?;
        self.looks += 1;
        self.kept.clear();
        match self.try_admit(id, key, fx) {
            Ok(()) => None,
            Err((blocked, cause)) => {
                let request = &mut self.requests[key];
                request.cause = earlier(request.cause, cause);
                self.stand(id, key, blocked);
                Some(blocked)
            }
        }
    }

    /// Puts a request in line, unless it stands there already.
    fn stand(&mut self, id: RequestId, key: usize, blocked: Blocked) {
        let source = self.source_of(key);
        match (&self.requests[key].stand, blocked) {
            (Stand::Frames { source: before, .. }, Blocked::Frames { room })
                if *before == source || before.is_new() && source.is_new() =>
            {
                return self.waits_on(id, key, source, room);
            }
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
        let before = self.leave_lines(id, key);
        let Request { turn, passed, .. } = self.requests[key];
        let left = self.passes.saturating_sub(passed);
        let stand = match blocked {
            Blocked::Frames { room } => {
                let wanted = self.wanted_of(id, key, source, &[], room);
                self.gate.close();
                let joined = self.frame_line.join(turn, id, left, &wanted, source);
                Stand::Frames { wanted, source, joined }
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

    /// Updates what a waiting request wants at least, and its source: it is known not to go on with `room` frames.
    fn waits_on(&mut self, id: RequestId, key: usize, source: Source, room: u32) {
        let Stand::Frames { wanted, .. } = &self.requests[key].stand else { return };
        let kept = wanted.kept.clone();
        if source == Source::Behind {
            self.unwatch(id, key);
        }
        let now = self.wanted_of(id, key, source, &kept, room);
        self.wants(key, now, source);
    }

    /// The least that a request wants which does not go on with `room` frames. Makes it watch as many pages.
    fn wanted_of(&mut self, id: RequestId, key: usize, source: Source, kept: &[PageId], room: u32) -> Wanted {
        let reserves = self.requests[key].frames > 0;
        let kept = self.frame_line.kept(source, kept, &self.kept);
        let own = self.kept.iter().filter(|page| kept.binary_search(page).is_ok()).count() as u32;
        let enough = match source {
            // It is not tried at all.
            Source::Behind => return Wanted { least: 0, kept, reserves },
            // It is tried only when a frame comes to the purse, or one of these pages comes.
            Source::Purse(_) => u32::MAX,
            // It was short of something else than frames.
            _ if room == u32::MAX => 1,
            _ => room.saturating_sub(own) + 1,
        };
        let least = self.watch(id, key, enough) + self.requests[key].frames;
        Wanted { least, kept, reserves }
    }

    /// The frames that a request may get.
    fn source_of(&self, key: usize) -> Source {
        let Request { turn, terms, .. } = &self.requests[key];
        let declared = self.scope(terms.scope).is_some_and(|scope| scope.declared > 0);
        match (turn.class, terms.scope.filter(|_| declared)) {
            (Class::Interactive | Class::Batch, _) => self.frame_line.source_of_new(*turn),
            (Class::Growing, _) if terms.never_refused => Source::Floor,
            (Class::Growing, Some(scope)) => Source::Purse(scope),
            (Class::Growing, None) => Source::Growth,
        }
    }

    /// Takes a request out of the lines it stands in.
    fn step_out(&mut self, id: RequestId, key: usize) {
        let stand = self.leave_lines(id, key);
        self.open_behind(stand);
    }

    /// Takes a request out of the lines it stands in, and returns where it stood. Pages and the gate stay closed.
    fn leave_lines(&mut self, id: RequestId, key: usize) -> Stand {
        let turn = self.requests[key].turn;
        let mut passed = 0;
        let stand = std::mem::replace(&mut self.requests[key].stand, Stand::Nowhere);
        self.standing -= usize::from(!matches!(stand, Stand::Nowhere));
        match &stand {
            Stand::Nowhere => {}
            Stand::Frames { wanted, source, joined } => {
                passed = self.frame_line.leave(turn, *joined, wanted, *source);
                self.unwatch(id, key);
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
        if turn.class == Class::Growing {
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
                    self.appeared(page);
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
        let from_purse = purse.min(missing.len() as u32);
        // A request that can never be refused uses the floor first, and leaves the purse to the pins it was declared
        // for.
        let mut spent = if terms.never_refused { 0 } else { from_purse };
        if blocked.is_none() && declared > 0 && !terms.never_refused && needed > spent {
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
                if spent < from_purse {
                    let wanted = self.promised() + floor + needed;
                    spent = from_purse.min(wanted - self.frames.free_count() - self.transit);
                    continue;
                }
                let cause = if self.transit > 0 { WaitCause::WriteBack } else { WaitCause::Frames };
                // Pages that only this request's own pins keep from being evicted: they could go for others.
                let own = pinned.iter().copied().filter(|page| self.word(*page).load().pins == 1);
                self.kept = own.collect();
                let there = (self.frames.free_count() + self.transit).saturating_sub(self.promised() + floor);
                let room = there + self.kept.len() as u32;
                blocked = Some((Blocked::Frames { room }, cause));
            }
        }
        if let Some(blocked) = blocked {
            self.undo(&pinned, writes);
            return Err(blocked);
        }
        self.step_out(id, key);
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
            self.may_go(*page);
        }
    }

    /// Makes a waiting request growth, because its scope holds pins now.
    pub(super) fn make_growing(&mut self, id: RequestId) {
        let Some(key) = self.request_key(id) else { return };
        if self.requests[key].turn.class == Class::Growing || self.requests[key].stage != Stage::Queued {
            return;
        }
        // `kept` belongs to the request tried last.
        self.kept.clear();
        let blocked = match &self.requests[key].stand {
            Stand::Nowhere => None,
            Stand::Frames { .. } => Some(Blocked::Frames { room: u32::MAX }),
            Stand::Pages(pages) => pages.first().map(|(page, _)| Blocked::Page(*page)),
        };
        let before = self.leave_lines(id, key);
        self.requests[key].turn.class = Class::Growing;
        if let Some(blocked) = blocked {
            self.stand_anew(id, key, blocked, self.source_of(key));
        }
        self.open_behind(before);
        self.nearly.push(id);
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

    /// Ends waiting requests that a smaller budget can never hold. Then looks for scopes that the smaller budget makes
    /// wait for each other.
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
        self.look_at_all(fx);
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

fn class_of(priority: ScopePriority) -> Class {
    match priority {
        ScopePriority::Interactive => Class::Interactive,
        ScopePriority::Batch => Class::Batch,
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
