//! Moves: how they are started, and how they end.

use super::Residency;
use super::move_record::MoveRecord;
use crate::effects::Effects;
use crate::error::Result;
use crate::ids::{MoveId, PageId};
use crate::page_move::{Move, Place, Priority};
use crate::steps::step;

impl Residency {
    pub(super) fn move_id(&self, key: usize) -> MoveId {
        MoveId::of(key as u32, self.moves[key].serial)
    }

    pub(super) fn move_key(&self, id: MoveId) -> Option<usize> {
        let key = id.parts().0 as usize;
        self.moves.get(key).filter(|record| MoveId::of(key as u32, record.serial) == id).map(|_| key)
    }

    /// The page that a move copies, and its two ends.
    pub(crate) fn page_of_move(&self, id: MoveId) -> Option<(PageId, Place, Place)> {
        let record = &self.moves[self.move_key(id)?];
        Some((record.page, record.from, record.to))
    }

    pub(super) fn start_move(
        &mut self,
        page: PageId,
        from: Place,
        to: Place,
        priority: Priority,
        fx: &mut Effects,
    ) -> MoveId {
        self.next_serial = self.next_serial.wrapping_add(1);
        let record = MoveRecord { page, from, to, priority, staging: None, started: false, serial: self.next_serial };
        let key = self.moves.insert(record);
        let id = self.move_id(key);
        self.segments[page.segment.index()].in_flight += 1;
        let through_staging = match (from, to) {
            (Place::Disk, Place::Device(_)) | (Place::Device(_), Place::Disk) => !self.config.direct_io,
            _ => false,
        };
        if through_staging {
            self.staging.wait(id, priority);
            self.serve_staging(fx);
        } else {
            self.emit(key, fx);
        }
        id
    }

    fn emit(&mut self, key: usize, fx: &mut Effects) {
        let id = self.move_id(key);
        let record = &mut self.moves[key];
        record.started = true;
        fx.moves.push(Move {
            id,
            page: record.page,
            from: record.from,
            to: record.to,
            staging: record.staging,
            priority: record.priority,
        });
    }

    fn serve_staging(&mut self, fx: &mut Effects) {
        while let Some((id, buffer)) = self.staging.next() {
            let Some(key) = self.move_key(id) else {
                self.staging.give(buffer);
                continue;
            };
            self.moves[key].staging = Some(buffer);
            self.emit(key, fx);
        }
    }

    pub(super) fn raise_move(&mut self, key: usize, priority: Priority, fx: &mut Effects) {
        let id = self.move_id(key);
        self.moves[key].priority = priority;
        if self.moves[key].started {
            fx.raised.push((id, priority));
        } else {
            self.staging.raise(id, priority);
            self.serve_staging(fx);
        }
    }

    /// Makes background moves urgent whose frames somebody now waits for, the oldest first: as many as there are
    /// demanded pages without a frame, and `others` more. Moves that are urgent already count too.
    pub(crate) fn raise_victims(&mut self, others: usize, fx: &mut Effects) {
        if self.victims.len() == 0 {
            return;
        }
        let wanted = self.place_among_awaiting(Priority::WriteBack).saturating_add(others);
        let urgent = self.transit as usize - self.victims.len();
        for _ in urgent..wanted {
            step(1);
            let Some(id) = self.victims.take_oldest() else { return };
            if let Some(key) = self.move_key(id) {
                self.raise_move(key, Priority::WriteBack, fx);
            }
        }
    }

    /// Ends a move. Returns its page, which has [settled](Self::settled) once its waiters have heard of the end. `None`
    /// if there is no such move.
    pub(crate) fn complete(&mut self, id: MoveId, result: Result<()>, fx: &mut Effects) -> Option<PageId> {
        let key = self.move_key(id)?;
        let record = self.moves.remove(key);
        if let Place::Device(_) = record.from {
            self.victims.remove(record.page);
        }
        if let Some(buffer) = record.staging {
            self.staging.give(buffer);
            self.serve_staging(fx);
        }
        self.segments[record.page.segment.index()].in_flight -= 1;
        match (record.from, record.to) {
            (from, Place::Device(frame)) => self.filled(record.page, from, frame, result, fx),
            (Place::Device(frame), Place::Host(host)) => self.copied_down(&record, frame, host, result, fx),
            (Place::Device(frame), _) => self.written_back(&record, frame, result, fx),
            (Place::Host(host), _) => self.host_written_back(record.page, host, result),
            _ => invariant!(false, "a move from {:?} to {:?}", record.from, record.to),
        }
        Some(record.page)
    }

    /// The end of a page's move has been told.
    pub(crate) fn settled(&mut self, page: PageId, fx: &mut Effects) {
        // Some ends of a host copy's move do not report that the page has changed.
        self.may_go(page);
        self.reap_segment(page.segment, fx);
    }
}
