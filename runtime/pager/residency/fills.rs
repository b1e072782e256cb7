//! Fills: how they begin, and how they end.

use super::fill::Fill;
use super::move_record::MoveRecord;
use super::table::PageEntry;
use super::{Change, Kept, Residency};
use crate::effects::Effects;
use crate::error::{Error, Result};
use crate::ids::{FillPoint, FrameId, MoveId, PageId, RequestId};
use crate::page_move::{Place, Priority};
use crate::state::Claim;
use crate::steps::step;

impl Residency {
    /// Starts the fill of an admitted page that has its frame now.
    fn start_fill(&mut self, page: PageId, frame: FrameId, fx: &mut Effects) {
        let priority = self.filling.get(&page).map_or(Priority::Prefetch, |fill| fill.priority);
        self.place_frame(page, Some(frame));
        let entry = self.entry(page);
        let from = match (entry.valid_host(), entry.on_disk()) {
            (Some(host), _) => Place::Host(host),
            (None, true) => Place::Disk,
            (None, false) => Place::Zero,
        };
        if let Place::Host(_) = from {
            // The copy cannot be chosen as a host victim while it is read.
            self.host.left(page);
        }
        let id = self.start_move(page, from, Place::Device(frame), priority, fx);
        if let Some(fill) = self.filling.get_mut(&page) {
            fill.moving = Some(id);
            fill.own = fill.waiters.len();
        }
    }

    /// A free frame that is not set aside.
    fn take_frame(&mut self, kept: Kept) -> Option<FrameId> {
        if self.frames.free_count() > kept.purses { self.frames.take() } else { None }
    }

    /// Gives frames to admitted pages that wait for one.
    pub(crate) fn serve_awaiting(&mut self, kept: Kept, fx: &mut Effects) {
        while let Some(page) = self.awaiting.front().copied() {
            let Some(frame) = self.take_frame(kept) else { break };
            self.awaiting.pop_front();
            self.start_fill(page, frame, fx);
        }
    }

    /// Makes a fill at least this urgent.
    pub(crate) fn raise(&mut self, page: PageId, priority: Priority, fx: &mut Effects) {
        let Some(fill) = self.filling.get_mut(&page) else { return };
        if fill.priority <= priority {
            return;
        }
        if fill.priority > Priority::WriteBack && priority <= Priority::WriteBack {
            self.prefetching = self.prefetching.saturating_sub(1);
        }
        fill.priority = priority;
        match fill.moving {
            Some(id) => {
                if let Some(key) = self.move_key(id) {
                    self.raise_move(key, priority, fx);
                }
            }
            None => {
                if let Some(at) = self.awaiting.iter().position(|waiting| *waiting == page) {
                    self.awaiting.remove(at);
                    self.enqueue_awaiting(page, priority);
                }
            }
        }
    }

    /// How many pages in line for a frame are at least as urgent.
    pub(super) fn place_among_awaiting(&self, priority: Priority) -> usize {
        self.awaiting.partition_point(|page| {
            step(1);
            self.filling.get(page).is_some_and(|fill| fill.priority <= priority)
        })
    }

    /// Puts a page in line for a frame, behind pages that are at least as urgent.
    fn enqueue_awaiting(&mut self, page: PageId, priority: Priority) {
        let at = self.place_among_awaiting(priority);
        self.awaiting.insert(at, page);
    }

    /// Begins the fill of an empty page. A frame is there for it, or on its way. `locked` means that the waiter is a
    /// writer. Returns whether the fill has begun; if not, the page had to be given up.
    pub(super) fn admit_fill(
        &mut self,
        kept: Kept,
        page: PageId,
        waiter: Option<RequestId>,
        locked: bool,
        priority: Priority,
        fx: &mut Effects,
    ) -> bool {
        // The caller saw Empty under this hold of the latch.
        let begun = self.word(page).begin_fill();
        if !self.took(page, begun) {
            return false;
        }
        // A request that waits for frames may want this page.
        self.eased = true;
        if priority > Priority::WriteBack {
            self.prefetching += 1;
        }
        let waiters = waiter.into_iter().collect();
        let fill = Fill { waiters, own: 0, priority, moving: None, taken: None, locked, lent: false, failed: None };
        self.filling.insert(page, fill);
        match self.take_frame(kept) {
            Some(frame) => self.start_fill(page, frame, fx),
            None => self.enqueue_awaiting(page, priority),
        }
        true
    }

    /// Notes that the device has taken up the copy of a fill. Who waits for it is among the [changes](Change).
    pub(crate) fn taken(&mut self, id: MoveId, point: FillPoint) {
        let Some(key) = self.move_key(id) else { return };
        let MoveRecord { page, to: Place::Device(_), .. } = self.moves[key] else { return };
        let Some(fill) = self.filling.get_mut(&page).filter(|fill| fill.taken.is_none()) else { return };
        fill.taken = Some(point);
        self.changes.extend(fill.waiters.iter().map(|waiter| Change::Taken(*waiter)));
    }

    pub(super) fn filled(&mut self, page: PageId, from: Place, frame: FrameId, result: Result<()>, fx: &mut Effects) {
        if let Err(error) = &result
            && self.tries_again(page, from, frame, error, fx)
        {
            return;
        }
        let Some(mut fill) = self.filling.remove(&page) else { return };
        if fill.priority > Priority::WriteBack {
            self.prefetching = self.prefetching.saturating_sub(1);
        }
        if let Place::Host(_) = from {
            self.host_copy_read(page, result.is_ok());
        }
        let waiters = std::mem::take(&mut fill.waiters);
        let dirty = matches!(from, Place::Host(_)) && self.entry(page).host_dirty();
        if let Err(error) = result {
            self.left(page);
            let ended = self.word(page).fill_err();
            if ended == Ok(Claim::Blocked) {
                let priority = Priority::Demand;
                let spoiled = Fill { moving: None, priority, failed: Some(error.clone()), ..fill };
                self.filling.insert(page, spoiled);
                self.spoiled.push(page);
            } else if self.took(page, ended.map(drop)) {
                self.unfilled(page, frame, fx);
            }
            self.changes.extend(waiters.into_iter().map(|waiter| Change::Ended(waiter, error.clone())));
            // Admission hears of it after the ends of those that waited, which have let go of what they held by then.
            self.changed(page);
            return;
        }
        match from {
            Place::Host(_) => self.stats.fills_host += 1,
            Place::Disk => self.stats.fills_disk += 1,
            _ => self.stats.fills_zero += 1,
        }
        if dirty {
            // The device may change the page from here on. So the host copy must not stay as the newest beyond this
            // move.
            self.drop_host_copy(page);
            self.forget_failures(page);
        }
        // A page filled with zeros has no copy below. That is right: an empty read-write page reads as zero bytes.
        let pins = waiters.len() as u32;
        let word = self.word(page);
        let filled = match fill {
            Fill { locked: true, .. } => word.fill_ok_locked(dirty),
            Fill { lent: true, .. } => word.fill_ok_lent(pins, dirty),
            _ => word.fill_ok(pins, dirty),
        };
        if !self.took(page, filled) {
            let error = self.lost_error(page);
            self.changes.extend(waiters.into_iter().map(|waiter| Change::Ended(waiter, error.clone())));
            return;
        }
        self.changed(page);
        self.entered(page);
        let taken = fill.taken.is_some();
        self.changes.extend(waiters.into_iter().map(|waiter| Change::Ready(waiter, taken)));
    }

    /// Tries a failed fill once more for requests that came to wait after its move had started. Requests for which the
    /// move was started get its error. Returns whether there is another try.
    fn tries_again(&mut self, page: PageId, from: Place, frame: FrameId, error: &Error, fx: &mut Effects) -> bool {
        let Some(fill) = self.filling.get_mut(&page) else { return false };
        if fill.own == fill.waiters.len() || fill.lent || self.closing {
            return false;
        }
        let had_theirs: Vec<RequestId> = fill.waiters.drain(..fill.own).collect();
        if fill.taken.take().is_some() {
            self.changes.extend(fill.waiters.iter().map(|waiter| Change::Untaken(*waiter)));
        }
        self.stats.retried += 1;
        if let Place::Host(_) = from {
            self.host_copy_read(page, false);
        }
        self.start_fill(page, frame, fx);
        self.changes.extend(had_theirs.into_iter().map(|waiter| Change::Ended(waiter, error.clone())));
        true
    }

    /// Takes the frame back from a page that was not filled.
    fn unfilled(&mut self, page: PageId, frame: FrameId, fx: &mut Effects) {
        self.place_frame(page, None);
        self.frames.give(frame);
        fx.protect.push(frame);
    }

    /// Takes the frames of pages whose fill failed while they were lent, once their pins have ended.
    pub(crate) fn release_spoiled(&mut self, fx: &mut Effects) {
        if self.spoiled.is_empty() {
            return;
        }
        let mut ended = Vec::new();
        for page in std::mem::take(&mut self.spoiled) {
            match self.word(page).fill_err() {
                Ok(Claim::Blocked) => self.spoiled.push(page),
                edge => ended.push((page, edge.map(drop))),
            }
        }
        for (page, edge) in ended {
            self.filling.remove(&page);
            // A page in an unknown state keeps its frame.
            if self.took(page, edge)
                && let Some(frame) = self.entry(page).frame()
            {
                self.unfilled(page, frame, fx);
            }
            self.changed(page);
            self.reap_segment(page.segment, fx);
        }
    }
}
