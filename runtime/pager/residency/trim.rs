//! The budget, the reserve, and memory that goes back to the system.

use super::table::PageEntry;
use super::{Backing, Kept, Residency};
use crate::effects::Effects;
use crate::ids::{FrameId, HostFrameId, PageId};
use crate::page_move::{Place, Priority};
use crate::policy::Want;
use crate::state::Claim;

impl Residency {
    /// Frames, free or in transit, that are spoken for by admitted pages, by scopes that declared them, or by a
    /// shrinking budget.
    pub(crate) fn promised(&self, kept: Kept) -> u32 {
        self.wanted(kept) + self.leaving(kept)
    }

    /// [`promised`](Self::promised) without the shrinking budget's frames.
    pub(crate) fn wanted(&self, kept: Kept) -> u32 {
        self.awaiting.len() as u32 + kept.purses + kept.coming
    }

    /// Frames that a shrinking budget takes as soon as they are free. Frames that scopes have declared stay until the
    /// scopes end.
    fn leaving(&self, kept: Kept) -> u32 {
        self.frames.active().saturating_sub(self.frames.target.max(kept.least))
    }

    /// Whether the frame of a page that is being evicted is promised to nobody.
    pub(super) fn can_rescue(&self, kept: Kept) -> bool {
        self.frames.free_count() + self.transit > self.promised(kept)
    }

    /// Writes the host tier's oldest dirty copy to disk while nobody waits, so that the host tier can take more.
    fn clean_host(&mut self, fx: &mut Effects) {
        if self.host.total() == 0 || self.host.has_free() {
            return;
        }
        let candidate = self.host.victim(|candidate| {
            let table = &self.segments[candidate.segment.index()];
            let entry = &table.entries[candidate.index.index()];
            // A page that a writer holds may have newer bytes, or not.
            let written = table.words[candidate.index.index()].load().exclusive;
            !entry.host_busy() && !written && (!entry.host_dirty() || !self.is_put_off(candidate))
        });
        let Some(page) = candidate else {
            return;
        };
        if self.segments[page.segment.index()].is_outdated(page.index) {
            return self.drop_host_copy(page);
        }
        let entry = self.entry(page);
        let Some(frame) = entry.host() else { return };
        if entry.host_dirty() {
            entry.set_host_busy(true);
            self.host.left(page);
            self.start_move(page, Place::Host(frame), Place::Disk, Priority::Background, fx);
        }
    }

    /// Keeps a few frames free or on their way while pages may be dirty, so that the next fault does not wait for a
    /// write back.
    pub(crate) fn keep_reserve(&mut self, kept: Kept, fx: &mut Effects) {
        self.clean_host(fx);
        let reserve = (self.frames.active() / 8).min(8);
        while self.frames.free_count() + self.transit < self.wanted(kept) + reserve {
            if self.writable == 0 || !self.reclaim(kept, Want::Reserve, fx) {
                break;
            }
        }
    }

    /// Takes frames out of a smaller budget as they become free.
    pub(crate) fn retire_frames(&mut self, kept: Kept, fx: &mut Effects) {
        while self.leaving(kept) > 0 {
            if self.frames.retire() {
                continue;
            }
            if self.frames.free_count() > kept.purses
                && let Some(frame) = self.frames.discard()
            {
                fx.discard.push(frame);
                continue;
            }
            if self.closing || self.transit >= self.leaving(kept) || !self.reclaim(kept, Want::Room, fx) {
                break;
            }
        }
    }

    /// Changes the device budget. Returns how many frames must exist in all.
    pub(crate) fn set_frames(&mut self, frames: u32) -> u32 {
        self.frames.target = frames;
        self.config.frames = frames;
        self.policy.resize(frames, self.host.total(), self.config.lookahead);
        self.eased = true;
        self.frames.grow()
    }

    /// Evicts these pages, except where something forbids it. Returns how many evictions it began.
    pub(crate) fn evict(&mut self, kept: Kept, pages: impl Iterator<Item = PageId>, fx: &mut Effects) -> u32 {
        let mut count = 0;
        for page in pages {
            count += u32::from(!self.closing && self.reclaim_page(kept, page, fx));
        }
        count
    }

    /// Drops the copies of these pages below the device tier, where nothing needs them. What is dirty need not be
    /// written: it is clean from here on, and the disk has nothing of it. Returns how many pages lost their bytes.
    pub(crate) fn discard_bytes(&mut self, pages: impl Iterator<Item = PageId>, fx: &mut Effects) -> u32 {
        let mut count = 0;
        for page in pages {
            let segment = &self.segments[page.segment.index()];
            if segment.backing != Backing::ReadWrite || page.index.index() >= segment.entries.len() {
                continue;
            }
            if !segment.fillable(page.index) {
                self.need_not_write(page, fx);
                continue;
            }
            let entry = segment.entries[page.index.index()];
            let somewhere = entry.on_disk() || entry.host().is_some();
            // A host copy that is newer than the disk's may be there to overwrite that one.
            if somewhere && !entry.host_busy() && !entry.host_dirty() {
                self.forget_failures(page);
                self.drop_host_copy(page);
                self.entry(page).set_on_disk(false);
                count += 1;
            }
        }
        count
    }

    /// A page that is dirty, and that no writer holds, becomes clean without a write.
    fn need_not_write(&mut self, page: PageId, fx: &mut Effects) {
        let entry = *self.entry_of(page);
        let Some(frame) = entry.frame().filter(|_| !entry.host_busy() && !entry.held_back()) else { return };
        if self.word(page).begin_write_back() == Claim::Won {
            self.outdate_copies(page);
            self.now_clean(page, frame, fx);
        }
    }

    /// Gives the memory of up to `count` device frames back to the system. Evicts pages for that if `evicting`.
    pub(crate) fn trim(&mut self, kept: Kept, count: u32, evicting: bool, fx: &mut Effects) -> u32 {
        let mut given = 0;
        self.discard_again(fx);
        while given < count && !self.closing {
            let promised = self.wanted(kept) + kept.floor;
            let spare = self.frames.free_count() > promised && self.frames.free_count() > self.frames.bare_count();
            let may = spare || evicting && self.reclaim(kept, Want::Memory, fx);
            if !may {
                break;
            }
            let Some(frame) = self.frames.discard_warm() else { break };
            if self.leaving(kept) > 0 {
                // A shrinking budget has waited for this frame: it must not come back.
                self.frames.retire();
            }
            fx.discard.push(frame);
            given += 1;
        }
        given
    }

    /// Picks up to `count` host frames whose memory goes back to the system.
    pub(crate) fn trim_host(&mut self, count: u32) -> Vec<HostFrameId> {
        let mut given = Vec::new();
        while given.len() < count as usize && !self.closing {
            if let Some(frame) = self.host.discard_warm() {
                given.push(frame);
                continue;
            }
            let Self { host, segments, .. } = self;
            let may = |page: PageId| segments[page.segment.index()].may_leave_host(page.index);
            let Some(victim) = host.victim(may) else { break };
            self.drop_host_copy(victim);
        }
        given
    }

    /// Notes that the memory of these host frames is back with the system.
    pub(crate) fn host_discarded(&mut self, frames: &[HostFrameId]) {
        self.host.discarded(frames);
    }

    /// Notes that a discarded frame's memory is back with the system.
    pub(crate) fn discarded(&mut self, frame: FrameId) {
        self.frames.discarded(frame);
        self.eased = true;
    }

    /// Notes that the system has not taken a frame's memory. Returns whether the frame was to leave the budget.
    pub(crate) fn discard_refused(&mut self, frame: FrameId) -> bool {
        self.eased = true;
        self.frames.discard_refused(frame)
    }

    /// Offers the system again the memory that it has [refused](Self::discard_refused).
    pub(crate) fn discard_again(&mut self, fx: &mut Effects) {
        fx.discard.extend(self.frames.discard_again());
    }
}
