//! Requests that are refused: what they ask for comes by no move.

use super::Admission;
use super::admit::Blocked;
use super::request::Request;
use super::scope::Scope;
use crate::error::{Error, ErrorKind};
use crate::ids::{PageId, ScopeId};
use crate::residency::Residency;
use crate::runs::pages_of;

/// How many scopes are looked at, at most, to name the one that holds a page.
const NAMES_LOOKED_AT: usize = 64;

impl Admission {
    /// Whether what is in a request's way comes by moves, and by ends of its own scope's pins behind a stream, whatever
    /// others hold.
    pub(super) fn comes_by_moves(&self, res: &Residency, key: usize, blocked: Blocked) -> bool {
        let request = &self.requests[key];
        let scope = self.scope(request.terms.scope);
        let Blocked::Frames { .. } = blocked else {
            let Blocked::Page(page) = blocked else { return false };
            return self.moves_away(res, page, request);
        };
        let needed = Self::absent_of(res, request.pages()) + request.frames;
        if let Some(scope) = scope.filter(|scope| scope.declared > 0) {
            let lacks = needed.saturating_sub(scope.comes_to_purse());
            let owed = || scope.owed.min(res.frames_in_moves() + self.frames_behind(res, Some(scope)));
            return lacks == 0 || scope.owed >= lacks && owed() >= lacks;
        }
        if request.frames > 0 && !self.may_declare(res, request.frames) {
            return false;
        }
        let there = res.frames().there + res.frames_in_moves() + self.frames_behind(res, scope);
        there >= res.promised(self.kept()) + self.floor + needed
    }

    /// Whether a page that is in the way of a request is so because it moves, or because of pins of the request's own
    /// scope that end behind a stream.
    pub(super) fn moves_away(&self, res: &Residency, page: PageId, request: &Request) -> bool {
        res.moves_away(page, || self.scope(request.terms.scope).map_or(0, |scope| scope.holdings().behind_of(page)))
    }

    /// Frames of pages that only pins of this scope hold which end behind a stream.
    fn frames_behind(&self, res: &Residency, scope: Option<&Scope>) -> u32 {
        let mut pages = scope.map(|scope| scope.holdings().behind()).unwrap_or_default();
        pages.sort_unstable();
        // The pins may have ended, and the pager has not been told yet.
        let only = |pins: &&[PageId]| res.word(pins[0]).load().pins as usize <= pins.len();
        pages.chunk_by(|a, b| a == b).filter(only).count() as u32
    }

    /// The error of a request that wants more than its scope has declared.
    pub(super) fn never_has(&self, res: &Residency, key: usize) -> Option<Error> {
        let request = &self.requests[key];
        let scope = self.scope(request.terms.scope).filter(|scope| scope.declared > 0 && scope.reserving.is_none())?;
        let total = pages_of(&request.runs);
        let beyond = total > u64::from(scope.declared) && Self::absent_of(res, request.pages()) > scope.declared;
        beyond.then(|| {
            let message = format!(
                "{} has reserved {}, and asks for {}",
                self.scope_name(request.terms.scope),
                res.pages_in_words(scope.declared.into()),
                res.pages_in_words(total)
            );
            Error::new(ErrorKind::BudgetTooSmall, message).remedy("reserve more, or pin fewer pages at a time")
        })
    }

    /// The error of a request whose scope holds pins, and that would wait for another holder.
    pub(super) fn busy(&self, res: &Residency, key: usize, blocked: Blocked) -> Error {
        let request = &self.requests[key];
        let id = request.terms.scope;
        let held = res.pages_in_words(self.scope(id).map_or(0, |scope| scope.holdings().pages()).into());
        let name = self.scope_name(id);
        let message = match blocked {
            Blocked::Page(page) => {
                let what = if request.writes() { "write" } else { "read" };
                let (index, segment, holder) = (page.index.0, page.segment, self.holder_of(res, page, id));
                format!("{name} holds {held} and asks to {what} page {index} of {segment:?}, which {holder}")
            }
            Blocked::Frames { .. } => {
                let wanted = Self::absent_of(res, request.pages()) + request.frames;
                let there = (res.frames().there).saturating_sub(res.promised(self.kept()) + self.floor);
                let there = self.scope(id).filter(|scope| scope.declared > 0).map_or(there, |scope| scope.purse);
                let itself = self.scope(id).map_or(0, |scope| scope.holdings().pages()) + wanted + self.floor;
                let (wanted, there) = (res.pages_in_words(wanted.into()), res.pages_in_words(there.into()));
                let budget = res.pages_in_words(res.frames().target.into());
                if itself > res.frames().target {
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
    fn holder_of(&self, res: &Residency, page: PageId, asks: Option<ScopeId>) -> String {
        match self.scope(asks).and_then(|scope| scope.holdings().holds(page)) {
            Some(true) => return "it has pinned to write itself".to_owned(),
            Some(false) => return "it has pinned itself".to_owned(),
            None => {}
        }
        let others = self.open_scopes().filter(|(id, _)| Some(*id) != asks).take(NAMES_LOOKED_AT);
        let holder = others.filter_map(|(id, scope)| Some((id, scope.holdings().holds(page)?)));
        let written = res.word(page).load().exclusive;
        match holder.max_by_key(|(_, writes)| *writes) {
            Some((id, writes)) => {
                format!("{} has pinned{}", self.scope_name(Some(id)), if writes { " to write" } else { "" })
            }
            None if res.fill_of(page).is_some() => "another request is filling".to_owned(),
            None if written => "a pin outside of scopes has to write".to_owned(),
            None => "a pin outside of scopes has".to_owned(),
        }
    }
}
