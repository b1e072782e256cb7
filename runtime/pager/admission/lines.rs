//! Who stands in which line, and who is tried when.

use super::Admission;
use super::admit::Blocked;
use super::line::{Class, Line, Source, Turn};
use super::request::{Request, Stage, Stand};
use super::scope::Scope;
use crate::effects::Effects;
use crate::ids::{PageId, RequestId, ScopeId};
use crate::residency::Residency;

impl Admission {
    /// Serves all requests that can go on.
    pub(crate) fn serve_lines(&mut self, res: &mut Residency, fx: &mut Effects) {
        loop {
            if let Some(page) = self.moved.pop() {
                self.serve_page(res, page, fx);
            } else if let Some(id) = self.nearly.pop() {
                if self.asks(id).is_some() {
                    self.attempt(res, id, fx);
                }
            } else if let Some(scope) = self.filled.pop() {
                self.serve_purse(res, scope, fx);
            } else if !self.serve_frames(res, fx) {
                return;
            }
        }
    }

    /// Tries the requests in a page's line, in order, until one finds this page in its way. Requests of holders are all
    /// tried, unless all wait for a copy of the page: what they wait for may have become another's. If a writer waits
    /// for readers, growing readers behind it are still tried: growth waits for those that hold the page, never for
    /// those that stand before it.
    fn serve_page(&mut self, res: &mut Residency, page: PageId, fx: &mut Effects) {
        // First the oldest request that must not be passed: those before it in the line may not pass it.
        if let Some(id) = self.page_lines.get(&page).and_then(Line::barring) {
            self.attempt(res, id, fx);
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
            if self.attempt(res, id, fx) == Some(Blocked::Page(page)) {
                if turn.class == Class::Holding && !res.is_copied(page) {
                    continue;
                }
                let writes = self.request_key(id).is_some_and(|key| self.requests[key].writes());
                beside_readers = writes && !res.word(page).load().exclusive;
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
    fn serve_purse(&mut self, res: &mut Residency, id: ScopeId, fx: &mut Effects) {
        self.fill_purses(res, fx);
        while let Some(request) = self.frame_line.first_of_purse(id) {
            let blocked = self.attempt(res, request, fx);
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
    fn serve_frames(&mut self, res: &mut Residency, fx: &mut Effects) -> bool {
        if !std::mem::take(&mut self.eased) || self.frame_line.line.is_empty() {
            return false;
        }
        let mut behind = None;
        while let Some((turn, id)) = self.frame_line.next_first(behind) {
            behind = Some(turn);
            if !matches!(self.attempt(res, id, fx), Some(Blocked::Frames { .. })) {
                self.eased = true;
                return true;
            }
        }
        let mut any = false;
        for (scope, id) in self.frame_line.first_of_purses() {
            let Some(key) = self.request_key(id).filter(|key| self.requests[*key].stage == Stage::Queued) else {
                continue;
            };
            // One of its pages may have come, or what brings its frames may have become another's.
            let purse = self.scope(Some(scope)).map_or(0, Scope::may_spend);
            let changed = Self::absent_of(res, self.requests[key].pages()) <= purse || self.holds(Some(scope));
            any |= changed && !matches!(self.attempt(res, id, fx), Some(Blocked::Frames { .. }));
        }
        if any {
            self.eased = true;
            return true;
        }
        let mut room = u32::MAX;
        for id in self.frame_line.tried(self.declarable(res) > 0) {
            let Some(key) = self.request_key(id) else { continue };
            let request = &self.requests[key];
            // Looked at at each event, so nothing is copied.
            let pages = request.runs.iter().flat_map(|run| run.pages());
            if Self::absent_of(res, pages) + request.frames > room || request.frames > self.declarable(res) {
                continue;
            }
            match self.attempt(res, id, fx) {
                Some(Blocked::Frames { room: there }) => room = room.min(there),
                _ => {
                    self.eased = true;
                    return true;
                }
            }
        }
        false
    }

    /// Puts a request in line, unless it stands there already.
    pub(super) fn stand(&mut self, res: &mut Residency, id: RequestId, key: usize, blocked: Blocked) {
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
        self.stand_anew(res, id, key, blocked, source);
    }

    /// Puts a request in line, whether it stands in one already or not. Pages and the gate stay closed for it in
    /// between: a pin that passed it then would not be counted.
    fn stand_anew(&mut self, res: &mut Residency, id: RequestId, key: usize, blocked: Blocked, source: Source) {
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
                    res.set_waited_for(page, true);
                    let line = self.page_lines.entry(page).or_default();
                    let joined = if writes { line.join(turn, id, part) } else { line.join_to_read(turn, id, part) };
                    stands.push((page, joined));
                }
                Stand::Pages(stands)
            }
        };
        self.requests[key].stand = stand;
        self.standing += 1;
        self.open_behind(res, before);
    }

    /// The frames that a request may get.
    pub(super) fn source_of(&self, key: usize) -> Source {
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
    pub(super) fn step_out(&mut self, res: &mut Residency, key: usize) {
        let stand = self.leave_lines(key);
        self.open_behind(res, stand);
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
    fn open_behind(&self, res: &mut Residency, stand: Stand) {
        match stand {
            Stand::Nowhere => {}
            Stand::Frames { .. } => {
                if self.frame_line.line.is_empty() {
                    self.gate.open();
                }
            }
            Stand::Pages(pages) => {
                for (page, _) in pages.into_iter().filter(|(page, _)| !self.page_lines.contains_key(page)) {
                    res.set_waited_for(page, false);
                }
            }
        }
    }

    /// The line in which a new request for these pages would pass one that must not be passed again.
    pub(super) fn barred(&self, turn: Turn, pages: &[PageId]) -> Option<Blocked> {
        if !turn.class.is_new() {
            return None;
        }
        if self.frame_line.line.bars(turn) {
            return Some(Blocked::Frames { room: u32::MAX });
        }
        let barred = |page: &&PageId| self.page_lines.get(page).is_some_and(|line| line.bars(turn));
        pages.iter().find(barred).map(|page| Blocked::Page(*page))
    }

    /// A waiting request's scope holds pins now: the request goes on, waits for moves, or is refused.
    pub(super) fn now_holds(&mut self, res: &mut Residency, id: RequestId) {
        let Some(key) = self.request_key(id) else { return };
        if self.requests[key].turn.class == Class::Holding || self.requests[key].stage != Stage::Queued {
            return;
        }
        self.change_class(res, id, key, Class::Holding);
        self.nearly.push(id);
    }

    /// Makes a request more or less urgent. It stands in the same line afterwards.
    pub(super) fn change_class(&mut self, res: &mut Residency, id: RequestId, key: usize, class: Class) {
        let blocked = match &self.requests[key].stand {
            Stand::Nowhere => None,
            Stand::Frames { .. } => Some(Blocked::Frames { room: u32::MAX }),
            Stand::Pages(pages) => pages.first().map(|(page, _)| Blocked::Page(*page)),
        };
        let before = self.leave_lines(key);
        self.requests[key].turn.class = class;
        if let Some(blocked) = blocked {
            self.stand_anew(res, id, key, blocked, self.source_of(key));
        }
        self.open_behind(res, before);
    }
}
