//! Checks of requests, lines and scopes.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};

use super::Admission;
use super::admit::Blocked;
use super::line::{Class, Line, Source};
use super::request::{Request, Stand};
use crate::ids::{PageId, RequestId, ScopeId};
use crate::residency::Residency;
use crate::state::State;
use crate::terms::Purpose;

impl Admission {
    /// Checks everything that is kept of requests, lines and scopes.
    pub(crate) fn check(&self, res: &Residency, untold: &dyn Fn(PageId) -> bool) -> Result<(), String> {
        self.check_requests(res)?;
        self.check_waiting(res, untold)
    }

    fn check_requests(&self, res: &Residency) -> Result<(), String> {
        let (mut waits, mut untaken): (HashMap<RequestId, u32>, HashMap<RequestId, u32>) = Default::default();
        for (page, waiters, taken, _) in res.fills() {
            for waiter in waiters {
                *waits.entry(*waiter).or_default() += 1;
                *untaken.entry(*waiter).or_default() += u32::from(!taken);
                let runs = self.request_runs(*waiter);
                let wants = runs.is_some_and(|runs| runs.iter().any(|run| run.contains(page)));
                ensure!(wants, "{waiter:?} waits for {page:?} without wanting it");
            }
        }
        let by_frames: usize = self.request_stages().filter(|(id, ..)| self.waits_for_frames(*id)).count();
        ensure!(self.frame_line.listed() == by_frames, "{by_frames} wait for frames: {:?}", self.frame_line);
        let fills: HashMap<PageId, (&[RequestId], bool)> =
            res.fills().map(|(page, waiters, _, locked)| (page, (waiters, locked))).collect();
        let mut pins: HashMap<PageId, u32> = HashMap::new();
        for (id, stage, remaining, exclusive) in self.request_stages() {
            let waiting = waits.get(&id).copied().unwrap_or(0);
            ensure!(remaining == waiting, "{id:?}: remaining {remaining}, but waits for {waiting}");
            if let Some(counted) = self.request_untaken(id) {
                let waiting = untaken.get(&id).copied().unwrap_or(0);
                ensure!(counted == waiting, "{id:?}: {counted} fills not taken up, but there are {waiting}");
                ensure!(stage != 1 || counted > 0, "{id:?} waits only for what could be lent");
            }
            let shrinking = self.shrinking.iter().filter(|other| **other == id).count();
            ensure!(shrinking == usize::from(stage == 2), "{id:?} in stage {stage} is in the wrong line");
            let (_, frames, pages) = self.request_stand(id).unwrap_or_else(|| unreachable!("it is live"));
            let stands = usize::from(frames) + pages.len();
            ensure!((stands > 0) == (stage == 0), "{id:?} in stage {stage} stands in {stands} lines");
            for (line, stands_there) in self.lines().map(|(page, line)| match page {
                None => (line, frames),
                Some(page) => (line, pages.contains(&page)),
            }) {
                let is_there = line.requests().filter(|other| *other == id).count();
                ensure!(is_there == usize::from(stands_there), "{id:?} is {is_there} times in a line");
            }
            let reserves = self.scopes.iter().any(|(_, scope)| scope.reserving == Some(id) && scope.coming > 0);
            ensure!(stage != 1 || remaining > 0 || reserves, "{id:?} waits for nothing");
            let pages = self.request_runs(id).into_iter().flatten().flat_map(|run| run.pages());
            for page in pages {
                let fill = fills.get(&page);
                let awaited = fill.is_some_and(|(waiters, _)| waiters.contains(&id));
                let alone = fill.is_none_or(|(waiters, locked)| *locked && waiters.len() == 1);
                ensure!(!awaited || !exclusive || alone, "{id:?} writes {page:?}, and is not alone: {fill:?}");
                if stage == 1 && !awaited {
                    *pins.entry(page).or_default() += 1;
                }
            }
        }
        for (page, held) in pins {
            let word = res.word(page).load();
            ensure!(word.pins >= held, "{page:?} has {} pins, requests hold {held}", word.pins);
        }
        self.check_scopes(res)?;
        let waiting: Vec<RequestId> =
            self.request_stages().filter(|(_, stage, ..)| *stage == 0).map(|(id, ..)| id).collect();
        ensure!(waiting.len() == self.standing, "{} requests wait, not {}", waiting.len(), self.standing);
        let standing: usize = self.lines().map(|(_, line)| line.len()).sum();
        ensure!(waiting.is_empty() == (standing == 0), "{} requests stand in {standing} places", waiting.len());
        for (segment, counted) in self.by_segment.iter().enumerate() {
            let runs = self.requests.iter().flat_map(|(_, request)| &request.runs);
            let live = runs.filter(|run| run.segment.index() == segment).count();
            ensure!(*counted as usize == live, "segment {segment}: {counted} requests, not {live}");
        }
        for page in res.page_ids() {
            let waited_for = self.page_lines.get(&page).is_some_and(|line| !line.is_empty());
            ensure!(res.is_waited_for(page) == waited_for, "{page:?}: waited for {waited_for}, and its flag");
        }
        Ok(())
    }

    fn check_scopes(&self, res: &Residency) -> Result<(), String> {
        let purses: u32 = self.scopes.iter().map(|(_, scope)| scope.purse).sum();
        let owed: u32 = self.scopes.iter().map(|(_, scope)| scope.owed).sum();
        let coming: u32 = self.scopes.iter().map(|(_, scope)| scope.coming).sum();
        let declared: u32 = self.scopes.iter().map(|(_, scope)| scope.declared).sum();
        ensure!(
            (purses, coming, owed, declared) == (self.purses, self.coming, self.owed, self.declared),
            "purses hold {purses}, {coming} are on their way, and they are owed {owed}, of {declared}"
        );
        for (id, scope) in self.open_scopes() {
            let paid: u32 = scope.paid.iter().map(|(_, frames)| frames).sum();
            let held = scope.holdings().paid();
            ensure!(held <= paid, "{id:?} has spent {held} for what it holds, of {paid} in all");
            let all = scope.purse + scope.coming + scope.owed + paid + self.being_spent(id);
            ensure!(
                all == scope.declared,
                "{id:?} has declared {} frames, and {all} are its: {scope:?}",
                scope.declared
            );
        }
        let active = res.device_frames().1;
        ensure!(
            declared == 0 || declared + self.floor <= active,
            "{declared} frames are declared beside a floor of {}, and there are {active}",
            self.floor
        );
        Ok(())
    }

    /// Checks that each request waiting for frames is listed where it is looked for, and that none could go on. The
    /// second is not checked while the end of a pin is still to be told.
    fn check_waiting(&self, res: &Residency, untold: &dyn Fn(PageId) -> bool) -> Result<(), String> {
        let all_told = !res.page_ids().any(untold);
        for (id, ..) in self.request_stages().filter(|(id, ..)| self.waits_for_frames(*id)) {
            let stands = || format!("{:?}, {:?}", self.asks(id), self.request_stand(id));
            ensure!(!self.is_misplaced(id), "{id:?} is not listed under what it waits for: {}", stands());
            ensure!(
                res.is_closing() || !all_told || !self.could_go_on(res, id),
                "{id:?} could go on, and waits: {}",
                stands()
            );
        }
        for (id, ..) in self.request_stages() {
            let waits = all_told && self.waits_for_a_holder(res, id);
            let stands = || {
                let stand = self.request_stand(id);
                let pages = stand.iter().flat_map(|(.., pages)| pages).map(|page| res.word(*page).load());
                (self.asks(id), pages.collect::<Vec<_>>(), stand.clone())
            };
            ensure!(!waits, "{id:?} holds pins and waits for others: {:?}", stands());
        }
        Ok(())
    }

    fn never_refused(&self, id: RequestId) -> bool {
        self.request_key(id).is_some_and(|key| self.requests[key].terms.never_refused)
    }

    /// For a live request for a stream: how many fills it waits for that the device has not taken up. Otherwise `None`.
    fn request_untaken(&self, id: RequestId) -> Option<u32> {
        let request = &self.requests[self.request_key(id)?];
        (request.terms.purpose == Purpose::ReadOnStream).then_some(request.untaken)
    }

    /// For checks: frames that a scope's requests have spent before they are granted.
    fn being_spent(&self, scope: ScopeId) -> u32 {
        let of = |(_, request): (usize, &Request)| (request.terms.scope == Some(scope)).then_some(request.spent);
        self.requests.iter().filter_map(of).sum()
    }

    /// For checks: how often a request was passed so far.
    fn request_passed(&self, id: RequestId) -> Option<u32> {
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

    /// For checks: whether a request that stands in a line waits for another holder, although its scope holds pins.
    fn waits_for_a_holder(&self, res: &Residency, id: RequestId) -> bool {
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
            Stand::Frames { .. } => self.comes_by_moves(res, key, Blocked::Frames { room: 0 }),
            Stand::Pages(pages) => self.a_page_comes(res, request, pages),
        };
        self.holds(request.terms.scope) && !comes
    }

    /// Whether a page for which a request stands in line is no longer in its way, or moves. A writer stands in the
    /// lines of all its pages, and is tried again when one that moves is there.
    fn a_page_comes(&self, res: &Residency, request: &Request, pages: &[(PageId, u64)]) -> bool {
        let mut in_the_way = pages.iter().filter(|(page, _)| res.is_in_the_way(*page, request.writes())).peekable();
        in_the_way.peek().is_none() || in_the_way.any(|(page, _)| self.moves_away(res, *page, request))
    }

    /// Whether a holder's request waits for a page that another holder has. May be asked while other threads pin: a
    /// page in whose line a request stands is closed to them. What a request for frames counts on is not, so that one
    /// is not looked at: it is refused when the moves that it waits for have ended.
    pub(crate) fn waits_for_a_page_held(&self, res: &Residency, id: RequestId) -> bool {
        let Some(request) = self.request_key(id).map(|key| &self.requests[key]) else { return false };
        match &request.stand {
            Stand::Pages(pages) => request.turn.class == Class::Holding && !self.a_page_comes(res, request, pages),
            _ => false,
        }
    }

    /// For checks: whether a request that waits for frames is not listed under its source.
    fn is_misplaced(&self, id: RequestId) -> bool {
        let Some(key) = self.request_key(id) else { return false };
        let Request { turn, terms, stand: Stand::Frames { source, .. }, .. } = self.requests[key] else {
            return false;
        };
        // Exception: the purse that a scope reserves is not its own before all frames are there.
        let later = self.scope(terms.scope).is_some_and(|scope| scope.reserving.is_some());
        source != self.source_of(key) && !later || !self.frame_line.is_listed(turn, source)
    }

    /// For checks: whether a request that waits for frames could go on now.
    fn could_go_on(&self, res: &Residency, id: RequestId) -> bool {
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
        let missing = Self::absent_of(res, pages.iter().copied());
        if self.barred(turn, &pages).is_some()
            || !pages.iter().all(|page| res.word(*page).load().state == State::Empty || res.could_pin(*page, writes))
        {
            return false;
        }
        let needed = missing + frames;
        let (purse, declared) = self.scope(terms.scope).map_or((0, 0), |scope| (scope.may_spend(), scope.declared));
        if declared > 0 {
            return needed <= purse;
        }
        if frames > 0 && !self.may_declare(res, frames) {
            return false;
        }
        let can_go = res.can_go_beside(&pages);
        let floor = if terms.never_refused { 0 } else { self.floor };
        let spent = purse.min(missing);
        res.frames().there + can_go + spent >= res.promised(self.kept()) + floor + needed
    }

    /// For checks: all lines; `None` stands for the line for frames.
    fn lines(&self) -> impl Iterator<Item = (Option<PageId>, &Line)> {
        let frames = std::iter::once((None, &self.frame_line.line));
        frames.chain(self.page_lines.iter().map(|(page, line)| (Some(*page), line)))
    }

    /// The live requests, the newest first.
    pub(crate) fn by_age(&self) -> Vec<RequestId> {
        let mut requests: Vec<RequestId> = self.request_stages().map(|(id, ..)| id).collect();
        requests.sort_unstable_by_key(|id| self.next_serial.wrapping_sub((id.0 >> 32) as u32));
        requests
    }

    /// Hashes what decides about later answers. `requests` are the live ones [by age](Self::by_age).
    pub(crate) fn fingerprint(&self, requests: &[RequestId], hasher: &mut impl Hasher) {
        for id in requests {
            let Some(key) = self.request_key(*id) else { continue };
            let Request { stage, remaining, runs, .. } = &self.requests[key];
            let writes = self.requests[key].writes();
            (*stage as u8, remaining, writes, runs, self.request_passed(*id)).hash(hasher);
            let (turn, frames, pages) = self.request_stand(*id).unwrap_or_else(|| unreachable!("it is live"));
            (turn.class, frames, pages).hash(hasher);
            (self.request_untaken(*id), self.never_refused(*id)).hash(hasher);
        }
        let rank = |id: &RequestId| requests.iter().position(|other| other == id);
        self.shrinking.iter().map(rank).collect::<Vec<_>>().hash(hasher);
        let mut scopes: Vec<_> =
            self.scopes.iter().map(|(_, scope)| (scope.purse, scope.coming, scope.owed, scope.declared)).collect();
        scopes.sort_unstable();
        (self.floor, scopes).hash(hasher);
    }
}
