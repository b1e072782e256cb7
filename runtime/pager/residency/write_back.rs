//! Copies down and write backs: how they end.

use super::Residency;
use super::move_record::MoveRecord;
use super::table::PageEntry;
use crate::effects::Effects;
use crate::error::{Error, Result};
use crate::ids::{FrameId, HostFrameId, PageId};
use crate::page_move::Priority;
use crate::state::{BeginEvict, Claim, State};

/// How many write backs of one page may fail in a row while somebody waits for its frame and there is no other. Then
/// its bytes are given up: requests for the frame go on, and requests for the page get the error.
const URGENT_ATTEMPTS: u8 = 3;
/// The same limit for all write backs in a row, those included that nobody waited for. After each failure the next one
/// is put off, twice as long every time. So a disk that fails for a while costs no bytes.
const ATTEMPTS: u8 = 8;
/// For how many events the next write back is put off after the first failure.
const PUT_OFF: u64 = 64;

impl Residency {
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
    pub(super) fn copied_down(
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
            if self.took(page, evicted) {
                self.vacate(page, frame, fx);
            }
        } else {
            // The page was rescued while it was copied: the host copy is now a duplicate.
            self.host.duplicated(page);
        }
    }

    pub(super) fn written_back(&mut self, record: &MoveRecord, frame: FrameId, result: Result<()>, fx: &mut Effects) {
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
    pub(super) fn now_clean(&mut self, page: PageId, frame: FrameId, fx: &mut Effects) {
        self.forget_failures(page);
        let entry = self.entry(page);
        let evict = entry.evict_after();
        entry.set_evict_after(false);
        self.changed(page);
        self.transit -= u32::from(evict);
        let clean = self.word(page).write_back_ok();
        if !self.took(page, clean) || !evict {
            self.reopen(page);
            return;
        }
        let begun = self.word(page).begin_evict();
        // Not earlier: the frame is promised, and whoever pinned the page now would keep it.
        self.reopen(page);
        if begun == BeginEvict::Won {
            let evicted = self.word(page).evicted();
            if self.took(page, evicted) {
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
    pub(super) fn put_off(&mut self, page: PageId) {
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
        self.entry_of(page).put_off() && self.put_off.get(&page).is_some_and(|until| self.events < *until)
    }

    fn write_back_failed(&mut self, record: &MoveRecord, frame: FrameId, error: &Error, fx: &mut Effects) {
        let page = record.page;
        if !self.entry(page).evict_after() {
            // Nobody wants the frame, so the page stays as it was, however often that fails.
            self.changed(page);
            let failed = self.word(page).write_back_err();
            self.took(page, failed);
            return;
        }
        self.put_off(page);
        let entry = self.entry(page);
        let (all, urgent) = entry.failures();
        let urgent = urgent + u8::from(record.priority <= Priority::WriteBack);
        entry.set_failures(all, urgent);
        let give_up = urgent >= URGENT_ATTEMPTS || all >= ATTEMPTS;
        entry.set_evict_after(false);
        self.reopen(page);
        self.transit -= 1;
        self.changed(page);
        let failed = self.word(page).write_back_err();
        if !self.took(page, failed) {
            return;
        }
        if give_up && self.word(page).poison() == Claim::Won {
            self.stats.poisoned += 1;
            self.left(page);
            self.forget_failures(page);
            self.lost.push((page, error.clone()));
            self.vacate(page, frame, fx);
        } else {
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

    pub(super) fn host_written_back(&mut self, page: PageId, host: HostFrameId, result: Result<()>) {
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
}
