//! Moves: how they are started, and what follows when they end.

use super::fill::Fill;
use super::move_record::MoveRecord;
use super::state::{BeginEvict, Claim, State};
use super::table::{Entry, PageEntry};
use super::{Effects, Move, Pager, Place, Priority};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{FillPoint, FrameId, HostFrameId, MoveId, PageId, RequestId};
use crate::steps::step;

/// How many write backs of one page may fail in a row while somebody waits for its frame and there is no other. Then
/// its bytes are given up: requests for the frame go on, and requests for the page get the error.
const URGENT_ATTEMPTS: u8 = 3;
/// The same limit for all write backs in a row, those included that nobody waited for. After each failure the next one
/// is put off, twice as long every time. So a disk that fails for a while costs no bytes.
const ATTEMPTS: u8 = 8;
/// For how many events the next write back is put off after the first failure.
const PUT_OFF: u64 = 64;

impl Pager {
    pub(super) fn entry(&mut self, page: PageId) -> &mut Entry {
        &mut self.segments[page.segment.index()].entries[page.index.index()]
    }

    pub(super) fn move_id(&self, key: usize) -> MoveId {
        MoveId::of(key as u32, self.moves[key].serial)
    }

    fn move_key(&self, id: MoveId) -> Option<usize> {
        let key = id.parts().0 as usize;
        self.moves.get(key).filter(|record| MoveId::of(key as u32, record.serial) == id).map(|_| key)
    }

    /// The page that a move copies, and its two ends.
    pub(super) fn page_of_move(&self, id: MoveId) -> Option<(PageId, Place, Place)> {
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

    /// Starts the fill of an admitted page that has its frame now.
    pub(super) fn start_fill(&mut self, page: PageId, frame: FrameId, fx: &mut Effects) {
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
    fn take_frame(&mut self) -> Option<FrameId> {
        if self.frames.free_count() > self.purses { self.frames.take() } else { None }
    }

    /// Gives frames to admitted pages that wait for one, and to purses.
    pub(super) fn serve_awaiting(&mut self, fx: &mut Effects) {
        while let Some(page) = self.awaiting.front().copied() {
            let Some(frame) = self.take_frame() else { break };
            self.awaiting.pop_front();
            self.start_fill(page, frame, fx);
        }
        while let Some(request) = self.take_aside() {
            self.reserved(request, fx);
        }
        // Restores invariant 4 after a rescue or a failed write back.
        while !self.closing && !self.keeps_promises() {
            if !self.reclaim(super::policy::Want::Demand, fx) {
                break;
            }
            if let Some(page) = self.awaiting.front().copied()
                && let Some(frame) = self.take_frame()
            {
                self.awaiting.pop_front();
                self.start_fill(page, frame, fx);
            }
            while let Some(request) = self.take_aside() {
                self.reserved(request, fx);
            }
        }
    }

    /// Makes a fill at least this urgent.
    pub(super) fn raise(&mut self, page: PageId, priority: Priority, fx: &mut Effects) {
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

    fn raise_move(&mut self, key: usize, priority: Priority, fx: &mut Effects) {
        let id = self.move_id(key);
        self.moves[key].priority = priority;
        if self.moves[key].started {
            fx.raised.push((id, priority));
        } else {
            self.staging.raise(id, priority);
            self.serve_staging(fx);
        }
    }

    /// Makes background moves urgent whose frames somebody now waits for, the oldest first. As many as there are
    /// demanded pages and purses without a frame; all, if a request or a smaller budget waits for frames. Moves that
    /// are urgent already count too.
    pub(super) fn raise_victims(&mut self, fx: &mut Effects) {
        if self.victims.len() == 0 {
            return;
        }
        let wanted = if self.frame_line.line.is_empty() && self.page_lines.is_empty() && self.shrinking.is_empty() {
            self.place_among_awaiting(Priority::WriteBack) + (self.coming + self.owed) as usize
        } else {
            usize::MAX
        };
        let urgent = self.transit as usize - self.victims.len();
        for _ in urgent..wanted {
            step(1);
            let Some(id) = self.victims.take_oldest() else { return };
            if let Some(key) = self.move_key(id) {
                self.raise_move(key, Priority::WriteBack, fx);
            }
        }
    }

    /// How many pages in line for a frame are at least as urgent.
    fn place_among_awaiting(&self, priority: Priority) -> usize {
        self.awaiting.partition_point(|page| {
            step(1);
            self.filling.get(page).is_some_and(|fill| fill.priority <= priority)
        })
    }

    /// Puts a page in line for a frame, behind pages that are at least as urgent.
    pub(super) fn enqueue_awaiting(&mut self, page: PageId, priority: Priority) {
        let at = self.place_among_awaiting(priority);
        self.awaiting.insert(at, page);
    }

    /// Begins the fill of an empty page. A frame is there for it, or on its way. `locked` means that the waiter is a
    /// writer. Returns whether the fill has begun; if not, the page had to be given up.
    pub(super) fn admit_fill(
        &mut self,
        page: PageId,
        waiter: Option<RequestId>,
        locked: bool,
        priority: Priority,
        fx: &mut Effects,
    ) -> bool {
        // The caller saw Empty under this hold of the latch.
        let begun = self.word(page).begin_fill();
        if !self.took(page, begun, fx) {
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
        match self.take_frame() {
            Some(frame) => self.start_fill(page, frame, fx),
            None => self.enqueue_awaiting(page, priority),
        }
        true
    }

    /// Notes that the device has taken up the copy of a fill: it cannot be refused any more, its bytes have been
    /// checked, and they are there once `point` has passed. Requests for streams then have what they wait for. Starts
    /// no move. Ignores ids of other moves, and unknown ids, because the move may have ended already.
    pub fn taken(&mut self, id: MoveId, point: FillPoint, fx: &mut Effects) {
        let Some(key) = self.move_key(id) else { return };
        let MoveRecord { page, to: Place::Device(_), .. } = self.moves[key] else { return };
        let Some(fill) = self.filling.get_mut(&page).filter(|fill| fill.taken.is_none()) else { return };
        fill.taken = Some(point);
        for waiter in fill.waiters.clone() {
            self.page_taken(waiter, fx);
        }
    }

    /// Ends a move. Ignores unknown ids, so that a completion reported twice does no harm.
    pub fn complete(&mut self, id: MoveId, result: Result<()>, fx: &mut Effects) {
        let Some(key) = self.move_key(id) else { return };
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
        // Some ends of a host copy's move do not report that the page has changed.
        self.may_go(record.page);
        self.reap_segment(record.page.segment, fx);
        self.pump(fx);
    }

    fn filled(&mut self, page: PageId, from: Place, frame: FrameId, result: Result<()>, fx: &mut Effects) {
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
            } else if self.took(page, ended.map(drop), fx) {
                self.unfilled(page, frame, fx);
            }
            for waiter in waiters {
                self.end(waiter, error.clone(), fx);
            }
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
        if !self.took(page, filled, fx) {
            waiters.into_iter().for_each(|waiter| self.end(waiter, self.lost_error(page), fx));
            return;
        }
        self.changed(page);
        self.entered(page);
        for waiter in waiters {
            self.page_ready(waiter, fill.taken.is_some(), fx);
        }
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
            for waiter in fill.waiters.clone() {
                self.untake(waiter);
            }
        }
        self.stats.retried += 1;
        if let Place::Host(_) = from {
            self.host_copy_read(page, false);
        }
        self.start_fill(page, frame, fx);
        for waiter in had_theirs {
            self.end(waiter, error.clone(), fx);
        }
        true
    }

    /// Takes the frame back from a page that was not filled.
    fn unfilled(&mut self, page: PageId, frame: FrameId, fx: &mut Effects) {
        self.place_frame(page, None);
        self.frames.give(frame);
        fx.protect.push(frame);
    }

    /// Takes the frames of pages whose fill failed while they were lent, once their pins have ended.
    pub(super) fn release_spoiled(&mut self, fx: &mut Effects) {
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
            if self.took(page, edge, fx)
                && let Some(frame) = self.entry(page).frame()
            {
                self.unfilled(page, frame, fx);
            }
            self.changed(page);
            self.reap_segment(page.segment, fx);
        }
    }

    pub(super) fn host_copy_read(&mut self, page: PageId, ok: bool) {
        let entry = self.entry(page);
        if entry.host().is_some() && !entry.host_busy() {
            self.host.entered(page);
            if ok {
                self.host.duplicated(page);
            }
        }
    }

    /// Drops the host copy. If a move uses it, it goes when the move ends.
    pub(super) fn drop_host_copy(&mut self, page: PageId) {
        let entry = self.entry(page);
        if entry.host_busy() {
            entry.set_host_stale(true);
        } else if let Some(host) = entry.host() {
            entry.set_host_dirty(false);
            self.place_host(page, None);
            self.host.left(page);
            self.host.give(host);
        }
    }

    /// Ends a demotion: a victim's page, clean or dirty, was copied into a host frame.
    fn copied_down(
        &mut self,
        record: &MoveRecord,
        frame: FrameId,
        host: HostFrameId,
        result: Result<()>,
        fx: &mut Effects,
    ) {
        let page = record.page;
        let state = self.word(page).load().state;
        let was_dirty = state == State::WritingBack;
        let entry = self.entry(page);
        entry.set_host_busy(false);
        entry.set_copying_out(false);
        if entry.failures().0 == 0 {
            self.word(page).release();
        }
        self.changed(page);
        let entry = self.entry(page);
        let stale = entry.host_stale();
        entry.set_host_stale(false);
        if result.is_err() || stale {
            entry.set_host_dirty(false);
            self.place_host(page, None);
            self.host.give(host);
        } else {
            entry.set_host_dirty(was_dirty);
            self.stats.demotions += 1;
            self.host.entered(page);
        }
        if was_dirty {
            match result {
                Ok(()) => self.now_clean(page, frame, fx),
                Err(error) => self.write_back_failed(record, frame, &error, fx),
            }
        } else if state == State::Evicting {
            self.transit -= 1;
            let evicted = self.word(page).evicted();
            if self.took(page, evicted, fx) {
                self.vacate(page, frame, fx);
            }
        } else {
            // The page was rescued while it was copied: the host copy is now a duplicate.
            self.host.duplicated(page);
        }
    }

    fn written_back(&mut self, record: &MoveRecord, frame: FrameId, result: Result<()>, fx: &mut Effects) {
        let page = record.page;
        match result {
            Ok(()) => {
                self.stats.write_backs += 1;
                self.entry(page).set_on_disk(true);
                self.now_clean(page, frame, fx);
            }
            Err(error) => self.write_back_failed(record, frame, &error, fx),
        }
    }

    /// Takes a page from WritingBack to Clean, and releases its frame if it was a victim.
    fn now_clean(&mut self, page: PageId, frame: FrameId, fx: &mut Effects) {
        self.forget_failures(page);
        let entry = self.entry(page);
        let evict = entry.evict_after();
        entry.set_evict_after(false);
        self.changed(page);
        self.transit -= u32::from(evict);
        let clean = self.word(page).write_back_ok();
        if !self.took(page, clean, fx) || !evict {
            self.reopen(page);
            return;
        }
        let begun = self.word(page).begin_evict();
        // Not earlier: the frame is promised, and whoever pinned the page now would keep it.
        self.reopen(page);
        if begun == BeginEvict::Won {
            let evicted = self.word(page).evicted();
            if self.took(page, evicted, fx) {
                self.vacate(page, frame, fx);
            }
        } else {
            self.entered(page);
        }
    }

    /// Clears a page's failed write backs: one has succeeded, or the bytes that failed are out of date.
    pub(super) fn forget_failures(&mut self, page: PageId) {
        let entry = self.entry(page);
        entry.set_failures(0, 0);
        let copying_out = entry.copying_out();
        if !copying_out {
            self.word(page).release();
        }
        let entry = self.entry(page);
        if entry.put_off() {
            entry.set_put_off(false);
            self.put_off.remove(&page);
        }
    }

    /// Counts a failed write back of this page. The next one that nobody waits for comes later.
    fn put_off(&mut self, page: PageId) {
        let entry = self.entry(page);
        let (all, urgent) = entry.failures();
        entry.set_failures(all.saturating_add(1), urgent);
        entry.set_put_off(true);
        self.word(page).hold();
        let entry = self.entry(page);
        let wait = PUT_OFF << (entry.failures().0 - 1).min(ATTEMPTS);
        self.put_off.insert(page, self.events + wait);
    }

    /// Whether this page's next write back is still put off.
    pub(super) fn is_put_off(&self, page: PageId) -> bool {
        let entry = &self.segments[page.segment.index()].entries[page.index.index()];
        entry.put_off() && self.put_off.get(&page).is_some_and(|until| self.events < *until)
    }

    fn write_back_failed(&mut self, record: &MoveRecord, frame: FrameId, error: &Error, fx: &mut Effects) {
        let page = record.page;
        self.put_off(page);
        let entry = self.entry(page);
        let (all, urgent) = entry.failures();
        let urgent = urgent + u8::from(record.priority <= Priority::WriteBack);
        entry.set_failures(all, urgent);
        let give_up = urgent >= URGENT_ATTEMPTS || all >= ATTEMPTS;
        let evict = entry.evict_after();
        entry.set_evict_after(false);
        self.reopen(page);
        if evict {
            self.transit -= 1;
        }
        self.changed(page);
        let failed = self.word(page).write_back_err();
        if !self.took(page, failed, fx) {
            return;
        }
        if give_up && self.word(page).poison() == Claim::Won {
            self.stats.poisoned += 1;
            self.left(page);
            self.forget_failures(page);
            self.lost.push((page, error.clone()));
            self.vacate(page, frame, fx);
        } else if evict {
            self.entered(page);
        }
    }

    /// Takes a frame from its page.
    pub(super) fn vacate(&mut self, page: PageId, frame: FrameId, fx: &mut Effects) {
        self.stats.evictions += 1;
        self.changed(page);
        self.place_frame(page, None);
        self.frames.give(frame);
        fx.protect.push(frame);
    }

    fn host_written_back(&mut self, page: PageId, host: HostFrameId, result: Result<()>) {
        let entry = self.entry(page);
        entry.set_host_busy(false);
        if entry.host_stale() {
            entry.set_host_stale(false);
            entry.set_host_dirty(false);
            self.place_host(page, None);
            self.host.give(host);
            return;
        }
        match result {
            Ok(()) => {
                entry.set_host_dirty(false);
                entry.set_on_disk(true);
                self.forget_failures(page);
                self.stats.write_backs += 1;
            }
            // The copy stays, dirty: nothing is lost, and it will be tried again.
            Err(_) => self.put_off(page),
        }
        // While the page is being filled, a move may be reading this copy: `filled` then puts it back in its order. If
        // the fill has already failed, it is done here.
        let failed = || self.filling.get(&page).is_some_and(|fill| fill.failed.is_some());
        if self.word(page).load().state != State::Filling || failed() {
            self.host.entered(page);
        }
    }

    /// Removes a segment that nothing refers to any more. Its frames go back, and it ends when nothing of it is in
    /// flight.
    pub fn remove_segment(&mut self, segment: crate::ids::SegmentId, fx: &mut Effects) {
        self.cancel_all_of(segment, fx);
        if let Some(table) = self.segments.get_mut(segment.index()) {
            table.dying = true;
            // Guards and requests keep their segment alive. So nobody has these pins any more.
            if table.words.iter().any(|word| word.load().pins > 0) {
                self.forget_pins_of(segment);
            }
        }
        self.hints.retain(|hint| hint.page.segment != segment);
        self.reap_segment(segment, fx);
        self.pump(fx);
    }

    pub(super) fn reap_segment(&mut self, segment: crate::ids::SegmentId, fx: &mut Effects) {
        let Some(table) = self.segments.get(segment.index()) else { return };
        let waits = |page: &PageId| page.segment == segment;
        let unsettled = self.awaiting.iter().any(waits) || self.spoiled.iter().any(waits);
        if !table.dying || table.in_flight > 0 || unsettled {
            return;
        }
        let count = table.entries.len() as u32;
        for index in 0..count {
            let page = PageId { segment, index: crate::ids::PageIndex(index) };
            if *self.entry(page) == Entry::default() {
                // Nothing was ever here.
                continue;
            }
            if let Some(frame) = self.entry(page).frame() {
                self.left(page);
                self.vacate(page, frame, fx);
            }
            self.drop_host_copy(page);
            self.forget_failures(page);
        }
        self.policy.forget(segment);
        self.classes.forget(segment, count);
        self.host.remove_segment(segment);
        self.numbers.remove(segment);
        self.lost.retain(|(page, _)| page.segment != segment);
        let table = self.segments.remove(segment.index());
        self.writable -= u32::from(table.backing != super::Backing::File);
        fx.released.push(segment);
    }

    /// Notes that a discarded frame's memory is back with the system.
    pub fn discarded(&mut self, frame: FrameId, fx: &mut Effects) {
        self.frames.discarded(frame);
        self.eased = true;
        self.pump(fx);
    }

    /// Notes that the system has not taken a frame's memory. A frame that was to leave the budget still is, and no page
    /// gets it meanwhile. Whoever waits for the smaller budget gets the error.
    pub fn discard_refused(&mut self, frame: FrameId, error: &Error, fx: &mut Effects) {
        if self.frames.discard_refused(frame) {
            for id in std::mem::take(&mut self.shrinking) {
                self.finish(id, Err(error.clone()), fx);
            }
        }
        self.pump(fx);
    }

    /// Offers the system again the memory that it has [refused](Self::discard_refused).
    pub fn discard_again(&mut self, fx: &mut Effects) {
        fx.discard.extend(self.frames.discard_again());
    }

    /// The error of a page whose bytes were lost.
    pub(super) fn lost_error(&self, page: PageId) -> Error {
        let cause = self.lost.iter().find(|(lost, _)| *lost == page).map(|(_, cause)| cause.clone());
        let message =
            format!("page {} of read-write {:?} could not be written back and is lost", page.index.0, page.segment);
        let error = Error::new(ErrorKind::Poisoned, message).remedy("see the cause; allocate the tensor again");
        match cause {
            Some(cause) => error.caused_by(cause),
            None => error,
        }
    }
}
