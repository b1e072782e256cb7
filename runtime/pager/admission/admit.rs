//! Requests: sets of pages that are admitted, filled and pinned as a unit.
//!
//! A request takes all it needs in one step, or nothing: pins and locks of resident pages, and frames for the others.
//! Once admitted, it waits for moves only, and moves end. Otherwise it stands in the [`Line`](super::line::Line) of
//! what was missing first, a page or frames, and is tried again when that line moves. So a step costs only what it
//! changes, however many requests wait.
//!
//! A reader stands in the line of the page that is in its way. A writer stands in the lines of all its pages. So
//! readers that come one after the other cannot keep it from having all of them at once.

use super::Admission;
use super::line::Class;
use super::request::{Request, Stage};
use crate::effects::Effects;
use crate::error::Error;
use crate::granted::{Granted, WaitCause};
use crate::ids::{FillPoint, PageId, RequestId};
use crate::policy::Want;
use crate::residency::{Reached, Residency};
use crate::terms::{Purpose, Terms};

/// Why a request was not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blocked {
    /// Frames are missing: no request can have more than `room`. `u32::MAX`: it was short of something else.
    Frames {
        room: u32,
    },
    Page(PageId),
}

/// Why nothing was taken.
enum Stopped {
    Blocked(Blocked, WaitCause),
    /// The request can never have what it asks for.
    Never(Error),
}

/// What a request has found of its pages.
#[derive(Default)]
struct Reach {
    /// They are pinned or locked.
    pinned: Vec<PageId>,
    /// They are being filled.
    joined: Vec<PageId>,
    /// They have to be filled.
    missing: Vec<PageId>,
    /// How many frames the scope's own purse pays.
    spent: u32,
}

impl Admission {
    /// Tries a new request, which stands in no line yet.
    pub(crate) fn try_new(&mut self, res: &mut Residency, id: RequestId, fx: &mut Effects) {
        self.attempt(res, id, fx);
    }

    /// Admits a request, or puts it in the line of what is in its way. Returns what that is. A request whose scope
    /// holds pins is refused if that is another holder.
    pub(super) fn attempt(&mut self, res: &mut Residency, id: RequestId, fx: &mut Effects) -> Option<Blocked> {
        let key = self.request_key(id)?;
        self.looks += 1;
        let Request { terms, turn, .. } = self.requests[key];
        // The scope may have got pins, or let go of all, or given up what it reserved. Whoever holds pins passes those
        // that may not be passed again, so that is known before the try.
        let growth = self.class_of_growth(terms.scope);
        if growth == Some(Class::Holding) && turn.class != Class::Holding {
            self.change_class(res, id, key, Class::Holding);
        }
        let (blocked, cause) = self.try_admit(res, id, key, fx).err()?;
        // One look says whether the scope is a holder: another thread may let go of its last pin at any time, and pins
        // that it gets later are reported, because it waits.
        let is_holder = growth == Some(Class::Holding);
        if is_holder && !self.comes_by_moves(res, key, blocked) {
            self.refuse_as_busy(res, id, key, blocked, fx);
            return None;
        }
        if let Some(error) = self.never_has(res, key) {
            self.end(res, id, error, fx);
            return None;
        }
        let request = &mut self.requests[key];
        request.cause = earlier(request.cause, cause);
        let class = growth.unwrap_or_else(|| self.class_beside_growth(&terms));
        if !turn.class.is_new() && class != turn.class && class != Class::Holding {
            if let Some(scope) = self.scope_mut(terms.scope) {
                scope.all_hold = false;
            }
            self.change_class(res, id, key, class);
        }
        self.stand(res, id, key, blocked);
        // Before the pages were closed, another holder may have pinned one without the latch.
        if is_holder && !self.comes_by_moves(res, key, blocked) {
            self.refuse_as_busy(res, id, key, blocked, fx);
            return None;
        }
        Some(blocked)
    }

    fn refuse_as_busy(&mut self, res: &mut Residency, id: RequestId, key: usize, blocked: Blocked, fx: &mut Effects) {
        self.stats.busy += 1;
        let error = self.busy(res, key, blocked);
        self.end(res, id, error, fx);
    }

    /// Takes everything the request needs, or takes nothing and returns what was in the way.
    fn try_admit(
        &mut self,
        res: &mut Residency,
        id: RequestId,
        key: usize,
        fx: &mut Effects,
    ) -> Result<(), (Blocked, WaitCause)> {
        let pages: Vec<PageId> = self.requests[key].pages().collect();
        let Request { terms, turn, .. } = self.requests[key];
        if let Some(blocked) = self.barred(turn, &pages) {
            let cause = if matches!(blocked, Blocked::Page(_)) { WaitCause::Guard } else { WaitCause::Frames };
            return Err((blocked, cause));
        }
        let mut reach = Reach { pinned: Vec::with_capacity(pages.len()), ..Reach::default() };
        let writes = terms.purpose == Purpose::Write;
        let reached = self.reach(res, &mut reach, &pages, writes, fx);
        match reached.and_then(|()| self.find_frames(res, key, &mut reach, fx)) {
            Ok(()) => self.take_all(res, id, key, &pages, reach, fx),
            Err(stopped) => {
                res.undo(&reach.pinned, writes);
                match stopped {
                    Stopped::Blocked(blocked, cause) => return Err((blocked, cause)),
                    Stopped::Never(error) => self.end(res, id, error, fx),
                }
            }
        }
        Ok(())
    }

    /// Pins or locks the pages that are there, and lists the others.
    fn reach(
        &mut self,
        res: &mut Residency,
        reach: &mut Reach,
        pages: &[PageId],
        writes: bool,
        fx: &mut Effects,
    ) -> Result<(), Stopped> {
        for page in pages.iter().copied() {
            let reached = res.reach(self.kept(), page, writes);
            self.hear(res, fx);
            match reached {
                Reached::Missing => reach.missing.push(page),
                Reached::Filling => reach.joined.push(page),
                Reached::Pinned => reach.pinned.push(page),
                Reached::Lost(error) => return Err(Stopped::Never(error)),
                Reached::Blocked { cause, pinned } => {
                    if pinned {
                        reach.pinned.push(page);
                    }
                    return Err(Stopped::Blocked(Blocked::Page(page), cause));
                }
            }
        }
        Ok(())
    }

    /// Makes sure that there are frames for the missing pages, and for a purse.
    fn find_frames(
        &mut self,
        res: &mut Residency,
        key: usize,
        reach: &mut Reach,
        fx: &mut Effects,
    ) -> Result<(), Stopped> {
        let Request { terms, frames, .. } = self.requests[key];
        let missing = reach.missing.len() as u32;
        let needed = missing + frames;
        let (purse, declared) = self.scope(terms.scope).map_or((0, 0), |scope| (scope.may_spend(), scope.declared));
        let spent = purse.min(missing);
        if declared > 0 && needed > spent {
            // The scope pays from its purse only. What the purse lacks was spent, and comes back before anybody else
            // gets a frame. Otherwise pins that end behind a stream could add up to more than the scope declared.
            return Err(Stopped::Blocked(Blocked::Frames { room: u32::MAX }, res.frames().cause()));
        }
        let floor = if terms.never_refused { 0 } else { self.floor };
        if frames > 0 && !self.may_declare(res, frames) {
            // However many frames are free now: scopes that declared frames may be owed some of them.
            return Err(Stopped::Blocked(Blocked::Frames { room: u32::MAX }, WaitCause::Frames));
        }
        // Frames paid from the purse are there, whatever a smaller budget waits for.
        while needed > spent && res.frames().there + spent < res.promised(self.kept()) + floor + needed {
            if !self.reclaim(res, Want::Demand, fx) {
                // Pages that only this request's own pins keep from being evicted: they could go for others.
                let own = reach.pinned.iter().filter(|page| res.word(**page).load().pins == 1);
                let kept = own.count() as u32;
                let there = res.frames().there.saturating_sub(res.promised(self.kept()) + floor);
                return Err(Stopped::Blocked(Blocked::Frames { room: there + kept }, res.frames().cause()));
            }
        }
        reach.spent = spent;
        Ok(())
    }

    /// Takes what was found: the request stands in no line any more, its frames are its own, and its fills begin.
    fn take_all(
        &mut self,
        res: &mut Residency,
        id: RequestId,
        key: usize,
        pages: &[PageId],
        reach: Reach,
        fx: &mut Effects,
    ) {
        let Request { terms, turn, frames, .. } = self.requests[key];
        let Reach { joined, missing, spent, .. } = reach;
        self.step_out(res, key);
        self.ends_waiting(terms.scope, id);
        self.frame_line.line.pass(turn);
        // A holder may have counted on what this request gets, a page that moves for example.
        self.eased |= self.frame_line.has_others();
        for page in pages {
            if let Some(line) = self.page_lines.get_mut(page) {
                line.pass(turn);
                // A writer of a holder may have waited there for pins of its own scope only. From now on it would wait
                // for another holder.
                let has_holder = line.next(None).is_some_and(|(first, _)| first.class == Class::Holding);
                if has_holder && self.moved.last() != Some(page) {
                    self.moved.push(*page);
                }
            }
        }
        let needed = missing.len() as u32 + frames;
        let short = res.frames().free < res.promised(self.kept()) + needed - spent;
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
        let writes = terms.purpose == Purpose::Write;
        for page in joined.into_iter().chain(missing) {
            let filling = res.fill_for(self.kept(), page, id, writes, fx);
            self.hear(res, fx);
            match filling {
                Ok(taken) => self.requests[key].untaken -= u32::from(taken),
                Err(error) => return self.end(res, id, error, fx),
            }
        }
        if frames > 0 {
            self.set_aside_for(terms.scope, frames, id);
            self.serve_awaiting(res, fx);
        } else if self.requests[key].remaining == 0 {
            self.all_ready(res, id, key, fx);
        } else {
            self.lend_if_taken(res, id, key, fx);
        }
    }

    /// Notes that a fill this request waited for has ended, and that the request holds its pin. `taken` means that the
    /// request was told before that the device took it up.
    pub(super) fn page_ready(&mut self, res: &mut Residency, id: RequestId, taken: bool, fx: &mut Effects) {
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
            self.all_ready(res, id, key, fx);
        } else {
            self.lend_if_taken(res, id, key, fx);
        }
    }

    /// Notes that the device has taken up a fill this request waits for.
    pub(super) fn page_taken(&mut self, res: &mut Residency, id: RequestId, fx: &mut Effects) {
        let Some(key) = self.request_key(id) else { return };
        self.requests[key].untaken -= 1;
        self.lend_if_taken(res, id, key, fx);
    }

    /// Grants a request for a stream once the device has taken up all fills that it still waits for. Their pages are
    /// lent.
    fn lend_if_taken(&mut self, res: &mut Residency, id: RequestId, key: usize, fx: &mut Effects) {
        let Request { terms: Terms { purpose: Purpose::ReadOnStream, .. }, untaken: 0, .. } = self.requests[key] else {
            return;
        };
        match res.lend(id, self.requests[key].pages()) {
            Some(after) => self.grant(res, id, key, after, fx),
            None => self.hear(res, fx),
        }
    }

    /// Notes that a fill this request waits for starts anew: the device has not taken it up.
    pub(super) fn untake(&mut self, id: RequestId) {
        if let Some(key) = self.request_key(id) {
            self.requests[key].untaken += 1;
        }
    }

    fn all_ready(&mut self, res: &mut Residency, id: RequestId, key: usize, fx: &mut Effects) {
        if self.requests[key].writes() {
            for page in self.requests[key].pages() {
                if let Err(error) = res.begin_write(page) {
                    self.hear(res, fx);
                    return self.end(res, id, error, fx);
                }
            }
        }
        self.grant(res, id, key, None, fx);
    }

    fn grant(&mut self, res: &mut Residency, id: RequestId, key: usize, after: Option<FillPoint>, fx: &mut Effects) {
        let Request { terms, spent, cause, .. } = self.requests[key];
        invariant!(
            self.requests[key].pages().all(|page| res.word(page).load().pins > 0),
            "{id:?} is granted without all its pins"
        );
        let runs = std::mem::take(&mut self.requests[key].runs);
        self.acquired(res, &terms, &runs, spent);
        // These pages are the scope's claim from here on, until the pins end.
        self.requests[key].claimed = 0;
        self.requests[key].runs = runs;
        self.finish(id, Ok(Granted { cause, after, spent }), fx);
    }

    /// Grants a request for a purse: all frames that the scope declared are set aside.
    pub(super) fn reserved(&mut self, res: &mut Residency, id: RequestId, fx: &mut Effects) {
        if let Some(key) = self.request_key(id) {
            self.grant(res, id, key, None, fx);
        }
    }
}

/// The first cause that is not `None`.
pub(crate) fn earlier(first: WaitCause, next: WaitCause) -> WaitCause {
    if first == WaitCause::None { next } else { first }
}
