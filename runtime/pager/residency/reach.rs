//! What requests do with pages: they pin or lock them, have them filled, and let them go.

use super::table::PageEntry;
use super::{Arrival, Change, Kept, Residency};
use crate::effects::Effects;
use crate::error::{Error, ErrorKind};
use crate::granted::WaitCause;
use crate::ids::{FillPoint, PageId, RequestId};
use crate::page_move::Priority;
use crate::state::{Claim, Illegal, State, TryPin};

/// What a request finds when it reaches for a page.
#[derive(Debug)]
pub(crate) enum Reached {
    /// The page has to be filled.
    Missing,
    /// The page is being filled, and the request may wait for that.
    Filling,
    /// The page is pinned or locked now.
    Pinned,
    /// The page is in the way. `pinned`: it is pinned all the same.
    Blocked { cause: WaitCause, pinned: bool },
    /// The request can never have the page.
    Lost(Error),
}

impl Residency {
    /// Pins or locks a page for a request, if nothing is in the way.
    pub(crate) fn reach(&mut self, kept: Kept, page: PageId, writes: bool) -> Reached {
        let blocked = |cause| Reached::Blocked { cause, pinned: false };
        let state = self.word(page).load().state;
        match state {
            State::Empty => Reached::Missing,
            State::Filling => match self.filling.get(&page) {
                // The fill cannot be tried again while the page is lent, and nobody knows when that ends.
                Some(fill) if fill.failed.is_some() => fill.failed.clone().map_or(Reached::Filling, Reached::Lost),
                Some(fill) if fill.excludes(writes) => blocked(WaitCause::Guard),
                _ => Reached::Filling,
            },
            State::Poisoned => Reached::Lost(self.lost_error(page)),
            State::Evicting if !writes && self.can_rescue(kept) => {
                let rescued = self.word(page).rescue();
                // Its frame will not become free, whatever its state is now.
                self.transit -= 1;
                self.victims.remove(page);
                if !self.took(page, rescued) {
                    return Reached::Lost(self.lost_error(page));
                }
                self.entered(page);
                self.eased = true;
                Reached::Pinned
            }
            State::Evicting => blocked(WaitCause::WriteBack),
            // The victim was rescued, and its copy down still reads the frame.
            _ if writes && self.entry_of(page).copying_out() => blocked(WaitCause::WriteBack),
            _ if writes => match self.word(page).lock() {
                Claim::Won => Reached::Pinned,
                Claim::Blocked if state == State::WritingBack => blocked(WaitCause::WriteBack),
                Claim::Blocked => blocked(WaitCause::Guard),
            },
            _ => match self.word(page).try_pin_latched() {
                TryPin::Hit | TryPin::FirstUse if self.entry_of(page).evict_after() && !self.spare(kept, page) => {
                    Reached::Blocked { cause: WaitCause::WriteBack, pinned: true }
                }
                TryPin::Hit | TryPin::FirstUse => Reached::Pinned,
                TryPin::Busy => blocked(WaitCause::Guard),
            },
        }
    }

    /// Spares a victim that is being written back, because an admission wants the page, unless its frame is promised.
    /// If it stayed in transit, the admission could count on the very frame that its own pin holds.
    fn spare(&mut self, kept: Kept, page: PageId) -> bool {
        let may = self.can_rescue(kept);
        if may {
            self.transit -= 1;
            self.victims.remove(page);
            self.entry(page).set_evict_after(false);
            self.reopen(page);
            self.entered(page);
        }
        may
    }

    /// Gives back the pins or locks of a request that is not admitted after all.
    pub(crate) fn undo(&mut self, pinned: &[PageId], writes: bool) {
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

    /// Has a page filled for a request, which waits for that. Returns whether the device has taken the fill up.
    pub(crate) fn fill_for(
        &mut self,
        kept: Kept,
        page: PageId,
        request: RequestId,
        writes: bool,
        fx: &mut Effects,
    ) -> Result<bool, Error> {
        if let Some(fill) = self.filling.get_mut(&page) {
            fill.waiters.push(request);
            fill.locked = writes;
            let taken = fill.taken.is_some();
            self.raise(page, Priority::Demand, fx);
            return Ok(taken);
        }
        let begun = self.admit_fill(kept, page, Some(request), writes, Priority::Demand, fx);
        if begun { Ok(false) } else { Err(self.lost_error(page)) }
    }

    /// Lends a request those of its pages that are being filled. Returns when their bytes are there, or `None` if not
    /// all can be lent.
    pub(crate) fn lend(
        &mut self,
        request: RequestId,
        pages: impl Iterator<Item = PageId>,
    ) -> Option<Option<FillPoint>> {
        let awaited = |page: &PageId| self.filling.get(page).is_some_and(|fill| fill.waiters.contains(&request));
        let lent: Vec<PageId> = pages.filter(awaited).collect();
        for (count, page) in lent.iter().enumerate() {
            let edge = self.word(*page).lend();
            if edge == Ok(Claim::Won) {
                continue;
            }
            lent[..count].iter().for_each(|page| self.word(*page).unpin_quiet());
            // The word's pin count is at its limit: the request waits for its fills to end, as others do. If the page
            // is given up, all that wait for its fill are ended, this request included.
            self.took(*page, edge.map(drop));
            return None;
        }
        let mut after = None;
        for page in lent {
            if let Some(fill) = self.filling.get_mut(&page) {
                fill.leave(request);
                fill.lent = true;
                after = after.max(fill.taken);
            }
        }
        Some(after)
    }

    /// A writer gets a page that it has locked.
    pub(crate) fn begin_write(&mut self, page: PageId) -> Result<(), Error> {
        let began = self.word(page).begin_write();
        if !self.took(page, began) {
            return Err(self.lost_error(page));
        }
        // An earlier failed write back no longer matters: its bytes are out of date.
        self.forget_failures(page);
        Ok(())
    }

    /// An admitted request gives up a page: its pin, its lock, or its wait for the fill.
    pub(crate) fn let_go(&mut self, page: PageId, request: RequestId, writes: bool) {
        let waits = self.filling.get_mut(&page).is_some_and(|fill| {
            let waited = fill.leave(request);
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

    /// Requests wait for a page from now on, or no longer. Meanwhile it is closed to pins without the latch.
    pub(crate) fn set_waited_for(&mut self, page: PageId, on: bool) {
        if !self.segments.contains(page.segment.index()) {
            return;
        }
        self.entry(page).set_waited_for(on);
        if on {
            self.word(page).close();
        } else {
            self.reopen(page);
        }
    }

    /// Opens a page to pins without the latch, unless a request still waits for it or it is still a victim.
    pub(super) fn reopen(&self, page: PageId) {
        let entry = self.entry_of(page);
        if !entry.waited_for() && !entry.evict_after() {
            self.word(page).reopen();
        }
    }

    /// Whether a page is in the way of a request.
    pub(crate) fn is_in_the_way(&self, page: PageId, writes: bool) -> bool {
        let word = self.word(page).load();
        match word.state {
            State::Empty | State::Poisoned => false,
            State::Filling => {
                self.filling.get(&page).is_some_and(|fill| fill.failed.is_none() && fill.excludes(writes))
            }
            State::Evicting => true,
            _ if writes => word.pins > 0 || self.is_copied(page),
            _ => word.exclusive || self.entry_of(page).evict_after(),
        }
    }

    /// Whether a page that is in the way of a request is so because it moves, or because of pins of the request's own
    /// scope that end behind a stream. `behind` says how many of those there are.
    pub(crate) fn moves_away(&self, page: PageId, behind: impl FnOnce() -> u32) -> bool {
        if self.is_copied(page) {
            // Who has pinned it too counts once the move has ended.
            return true;
        }
        // A fill that nobody waits for any more was ahead of use, or its page was lent.
        let is_anothers_fill = self.filling.get(&page).is_some_and(|fill| !fill.waiters.is_empty());
        // Before the pins are counted: a stream that passes in between ends pins, and that end is told. The other way
        // round its pins would be taken for another holder's.
        let behind = behind();
        !is_anothers_fill && self.word(page).load().pins <= behind
    }

    /// Whether the page is being copied down or written back.
    pub(crate) fn is_copied(&self, page: PageId) -> bool {
        self.word(page).load().state == State::WritingBack || self.entry_of(page).copying_out()
    }

    /// Frames that can be had once the moves and the commits under way have ended: those of unpinned pages that move,
    /// or that may not be written to disk meanwhile, those promised to fills ahead of use, and those whose memory goes
    /// back to the system.
    pub(crate) fn frames_in_moves(&self) -> u32 {
        let comes = |page: PageId| {
            let word = self.word(page).load();
            match word.state {
                // Pins of a page that is being filled are loans.
                State::Filling => word.pins == 0 && self.is_filled_ahead(page),
                State::Clean | State::Dirty | State::WritingBack => {
                    word.pins == 0 && !self.entry_of(page).evict_after()
                }
                _ => false,
            }
        };
        let moving = self.moves.iter().filter(|(_, record)| comes(record.page)).count();
        let ahead = self.awaiting.iter().filter(|page| self.is_filled_ahead(**page)).count();
        (moving + ahead + self.frozen_pages()) as u32 + self.frames.coming_back()
    }

    fn is_filled_ahead(&self, page: PageId) -> bool {
        self.filling.get(&page).is_some_and(|fill| fill.waiters.is_empty())
    }

    /// Whether a page is being filled, and if so, whether that waits for a frame, and whether it is for nobody.
    pub(crate) fn fill_of(&self, page: PageId) -> Option<(bool, bool)> {
        self.filling.get(&page).map(|fill| (fill.moving.is_none(), fill.waiters.is_empty()))
    }

    /// What a request waits for that finds a page in this state.
    pub(crate) fn cause_for(&self, page: PageId, state: State) -> WaitCause {
        match state {
            State::Empty => {
                let entry = self.entry_of(page);
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

    /// Something has happened to a page.
    pub(crate) fn changed(&mut self, page: PageId) {
        let entry = self.segments.get(page.segment.index()).and_then(|table| table.entries.get(page.index.index()));
        if entry.is_some_and(PageEntry::waited_for) {
            self.changes.push_back(Change::Page(page));
        }
        self.may_go(page);
    }

    /// A page has become resident in the device tier.
    pub(super) fn entered(&mut self, page: PageId) {
        self.arrivals.push(Arrival::Came(page, self.numbers.number(page)));
        self.policy.inserted(page);
        self.may_go(page);
    }

    /// A page leaves the device tier, or its fill has failed.
    pub(super) fn left(&mut self, page: PageId) {
        self.arrivals.push(Arrival::Left(page, self.numbers.number(page)));
        self.policy.removed(page);
    }

    /// Acts on an edge of a page word, and returns whether it was taken. An illegal edge stops debug and `strict`
    /// builds at once. Other builds give up the page and the requests that wait for it, so that nothing goes on with an
    /// unknown state.
    pub(super) fn took(&mut self, page: PageId, edge: Result<(), Illegal>) -> bool {
        let Err(illegal) = edge else { return true };
        invariant!(false, "{page:?}: {illegal}");
        self.condemn(page, &illegal);
        false
    }

    /// Gives up a page in an unknown state.
    pub(crate) fn condemn(&mut self, page: PageId, illegal: &Illegal) {
        let error = Error::new(ErrorKind::Internal, format!("page {} of {:?}: {illegal}", page.index.0, page.segment))
            .remedy("report this as a bug; the page's bytes are not trusted any more");
        self.word(page).condemn();
        self.left(page);
        self.stats.poisoned += 1;
        self.lost.push((page, error.clone()));
        let waiters = self.filling.remove(&page).map(|fill| fill.waiters).unwrap_or_default();
        self.changes.extend(waiters.into_iter().map(|waiter| Change::Ended(waiter, error.clone())));
        self.changed(page);
    }
}
