//! Making frames free, by eviction, demotion and write back; and changing the budget.

use std::collections::{BTreeSet, VecDeque};

use smallvec::SmallVec;

use super::policy::{Take, Want};
use super::state::{BeginEvict, Claim, PageWord, Snapshot, State};
use super::table::PageEntry;
use super::{Backing, Effects, Granted, Pager, Place, Priority};
use crate::ids::{FrameId, HostFrameId, PageId};

/// How many pages the policy may offer before a page is taken that is known to be free. So where nearly all pages are
/// pinned, a victim costs at most this many looks, not one for each pinned page.
const LOOKS: usize = 32;

/// The state in which a victim was taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taken {
    Clean,
    Dirty,
}

/// Begins to take a page down, unless something forbids it.
fn begin_to_take(word: &PageWord, host_busy: bool) -> Option<Taken> {
    match word.begin_evict() {
        BeginEvict::Won => Some(Taken::Clean),
        // Newer bytes are not written beside older ones. The word itself is asked again, because a writer may come at
        // any time.
        BeginEvict::Dirty if !host_busy && word.begin_last_write_back() == Claim::Won => Some(Taken::Dirty),
        _ => None,
    }
}

impl Pager {
    /// Makes one more frame free, or puts one in transit. Returns `false` if every frame is pinned, in motion, or worth
    /// more than what wants it.
    ///
    /// Pages whose write back has just failed are passed over. If somebody waits and there is nothing else, they are
    /// tried all the same.
    pub(super) fn reclaim(&mut self, want: Want, fx: &mut Effects) -> bool {
        // A page that is put off can go again without an event of its own.
        if self.put_off.is_empty()
            && let Some(found) = self.reclaim_heard(want, fx)
        {
            return found;
        }
        let last_resort = self.is_urgent(want) && !self.put_off.is_empty();
        self.reclaim_among(want, false, usize::MAX, fx) || last_resort && self.reclaim_among(want, true, usize::MAX, fx)
    }

    /// [`reclaim`](Self::reclaim) among listed pages only. `None` if it is not known that no other page can go, or if
    /// the list does not decide.
    fn reclaim_heard(&mut self, want: Want, fx: &mut Effects) -> Option<bool> {
        let any = matches!(want, Want::Demand | Want::Room);
        if !any {
            // Only the policy knows which pages are worth less than what is wanted, or may be given for memory.
            return self.barren.heard.as_ref()?.is_empty().then_some(false);
        }
        while let Some(page) = self.barren.heard.as_mut()?.pop_front() {
            // The policy's order counts, as long as it soon offers a page that can go.
            if self.can_go(page) && self.reclaim_among(want, false, LOOKS, fx) {
                if let Some(heard) = &mut self.barren.heard {
                    heard.push_front(page);
                }
                return Some(true);
            }
            // This attempt marks a pinned page.
            if let Some(taken) = self.take_page(page) {
                self.take_down(page, taken, want, fx);
                return Some(true);
            }
        }
        Some(false)
    }

    /// Lists a page that may be able to go: something has happened to it, or it has become resident.
    pub(super) fn may_go(&mut self, page: PageId) {
        self.eased = true;
        self.hear_of(page);
    }

    /// [`may_go`](Self::may_go) for a page that was kept only by a request that was tried in vain.
    pub(super) fn hear_of(&mut self, page: PageId) {
        let Some(heard) = &mut self.barren.heard else { return };
        heard.push_back(page);
        if heard.len() > self.frames.active().max(64) as usize {
            // A search of all pages costs no more than going through this list.
            self.barren.heard = None;
        }
    }

    /// Whether a page is resident and nothing forbids its eviction just now.
    fn can_go(&self, page: PageId) -> bool {
        let Some(table) = self.segments.get(page.segment.index()) else { return false };
        let index = page.index.index();
        let (Some(word), Some(entry)) = (table.words.get(index), table.entries.get(index)) else { return false };
        let word = word.load();
        let leaves = word.state == State::Clean || word.state == State::Dirty && !entry.host_busy();
        leaves && word.pins == 0 && !entry.held_back()
    }

    /// For checks: whether a resident page can go and is not put off.
    pub(super) fn can_go_for_good(&self, page: PageId) -> bool {
        self.can_go(page) && !self.put_off.contains_key(&page)
    }

    /// For checks: a page that no search would find although it can go, or whose pin's end will not be told.
    pub(super) fn hidden(&self, to_be_told: &dyn Fn(PageId) -> bool) -> Option<PageId> {
        let heard = self.barren.heard.as_ref()?;
        self.policy.tracked().into_iter().filter(|page| !heard.contains(page) && !to_be_told(*page)).find(|page| {
            let entry = &self.segments[page.segment.index()].entries[page.index.index()];
            let word = self.word(*page).load();
            // The end of the move will list it.
            let moves = word.state == State::WritingBack || entry.held_back() || entry.host_busy();
            let untold = word.pins > 0 && !word.wanted && !moves;
            untold || self.can_go(*page)
        })
    }

    /// For checks: the pages that a search would look at. `None` if it would look at all.
    pub(super) fn heard(&self) -> Option<BTreeSet<PageId>> {
        self.barren.heard.as_ref().map(|heard| heard.iter().copied().collect())
    }

    /// How many resident pages the policy has: those that are no victims yet.
    fn resident(&self) -> usize {
        let filling = self.filling.len() - self.awaiting.len();
        (self.frames.in_use() as usize).saturating_sub(filling + self.transit as usize)
    }

    /// Whether somebody waits for the frame that is wanted.
    fn is_urgent(&self, want: Want) -> bool {
        want.is_demand() || want == Want::Room && !self.shrinking.is_empty()
    }

    /// Takes one of the first `looks` pages that the policy offers.
    fn reclaim_among(&mut self, want: Want, with_put_off: bool, looks: usize, fx: &mut Effects) -> bool {
        // Whether to find out if the policy offers every resident page. `seen` collects those it offered.
        let all = looks == usize::MAX && self.put_off.is_empty() && matches!(want, Want::Demand | Want::Room);
        let mut seen: SmallVec<[PageId; LOOKS]> = SmallVec::new();
        let resident = self.resident();
        let mut offered = 0;
        let Self { policy, segments, put_off, events, .. } = self;
        // Whether a page was really taken counts, not what the policy returns: it may be a user's policy.
        let mut taken = None;
        policy.victim(want, &mut |page: PageId| {
            if taken.is_some() || offered == looks {
                return Take::Stop;
            }
            offered += 1;
            let Some(table) = segments.get(page.segment.index()) else { return Take::Skip };
            let (Some(word), Some(entry)) =
                (table.words.get(page.index.index()), table.entries.get(page.index.index()))
            else {
                return Take::Skip;
            };
            if all && word.load().is_resident() && !entry.evict_after() {
                seen.push(page);
            }
            if entry.held_back() {
                return Take::Skip;
            }
            if !with_put_off && entry.put_off() && put_off.get(&page).is_some_and(|until| *events < *until) {
                return Take::Skip;
            }
            if want == Want::Memory && word.load().state != State::Clean {
                return Take::Skip;
            }
            if want == Want::Reserve {
                let Snapshot { state, fresh, .. } = word.load();
                if state == State::Clean {
                    // A clean page that would go first is as good as a free frame.
                    return Take::Stop;
                }
                if fresh {
                    // The page was filled ahead, and would be filled again. Where all other pages are pinned, that
                    // would repeat without end.
                    return Take::Skip;
                }
            }
            taken = begin_to_take(word, entry.host_busy()).map(|taken| (page, taken));
            if taken.is_some() { Take::Yes } else { Take::Skip }
        });
        match taken {
            Some((page, taken)) => {
                self.take_down(page, taken, want, fx);
                true
            }
            None => {
                // A user's policy may leave pages out, and offer others twice.
                seen.sort_unstable();
                seen.dedup();
                if all && seen.len() >= resident {
                    self.barren.heard = Some(VecDeque::new());
                }
                false
            }
        }
    }

    /// Evicts this page if nothing forbids it.
    pub(super) fn reclaim_page(&mut self, page: PageId, fx: &mut Effects) -> bool {
        if self.is_put_off(page) {
            return false;
        }
        let Some(taken) = self.take_page(page) else { return false };
        self.take_down(page, taken, Want::Room, fx);
        true
    }

    /// Begins to take this page down if nothing forbids it.
    fn take_page(&mut self, page: PageId) -> Option<Taken> {
        let table = self.segments.get(page.segment.index())?;
        let (word, entry) = (table.words.get(page.index.index())?, table.entries.get(page.index.index())?);
        if entry.held_back() {
            return None;
        }
        begin_to_take(word, entry.host_busy())
    }

    fn take_down(&mut self, page: PageId, taken: Taken, want: Want, fx: &mut Effects) {
        self.left(page);
        if taken == Taken::Dirty {
            self.outdate_copies(page);
        }
        let Some(frame) = self.entry(page).frame() else {
            invariant!(false, "resident page {page:?} without a frame");
            return;
        };
        let priority = if self.is_urgent(want) { Priority::WriteBack } else { Priority::Background };
        // Memory is wanted now. A copy to the host tier would take time, and more memory.
        let copied = want != Want::Memory && self.entry(page).host().is_none();
        let host = if copied { self.host_room(page) } else { None };
        if let Some(host) = host {
            self.place_host(page, Some(host));
            let entry = self.entry(page);
            entry.set_host_busy(true);
            entry.set_copying_out(true);
            self.word(page).hold();
            let entry = self.entry(page);
            entry.set_evict_after(taken == Taken::Dirty);
            self.start_victim(page, frame, Place::Host(host), priority, fx);
        } else if taken == Taken::Dirty {
            self.entry(page).set_evict_after(true);
            self.start_victim(page, frame, Place::Disk, priority, fx);
        } else {
            let evicted = self.word(page).evicted();
            if self.took(page, evicted, fx) {
                self.vacate(page, frame, fx);
            }
        }
    }

    /// Starts the move that a victim's frame waits for.
    fn start_victim(&mut self, page: PageId, frame: FrameId, to: Place, priority: Priority, fx: &mut Effects) {
        self.transit += 1;
        let id = self.start_move(page, Place::Device(frame), to, priority, fx);
        if priority == Priority::Background {
            self.victims.add(page, id);
        }
    }

    /// Gives up the copies in lower tiers: the device tier has newer bytes. A writer leaves no trace but the page's
    /// state.
    pub(super) fn outdate_copies(&mut self, page: PageId) {
        self.entry(page).set_on_disk(false);
        self.drop_host_copy(page);
    }

    /// A host frame for `page`, if one is free or held by a clean copy that may go at once.
    fn host_room(&mut self, page: PageId) -> Option<HostFrameId> {
        if self.host.total() == 0 || !self.policy.worth_host(page) {
            return None;
        }
        if let Some(host) = self.host.take() {
            return Some(host);
        }
        let Self { host, segments, policy, .. } = self;
        let victim = host.victim(|candidate| {
            segments[candidate.segment.index()].may_leave_host(candidate.index) && policy.host_victim(candidate, page)
        })?;
        self.drop_host_copy(victim);
        self.host.take()
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
    pub(super) fn keep_reserve(&mut self, fx: &mut Effects) {
        self.clean_host(fx);
        let reserve = (self.frames.active() / 8).min(8);
        while self.frames.free_count() + self.transit < self.awaiting.len() as u32 + self.purses + self.coming + reserve
        {
            if self.writable == 0 || !self.reclaim(Want::Reserve, fx) {
                break;
            }
        }
    }

    /// Takes frames out of a smaller budget as they become free.
    pub(super) fn retire_frames(&mut self, fx: &mut Effects) {
        while self.leaving() > 0 {
            if self.frames.retire() {
                continue;
            }
            if self.frames.free_count() > self.purses
                && let Some(frame) = self.frames.discard()
            {
                fx.discard.push(frame);
                continue;
            }
            if self.closing || self.transit >= self.leaving() || !self.reclaim(Want::Room, fx) {
                break;
            }
        }
        if self.frames.existing() <= self.frames.target {
            for id in std::mem::take(&mut self.shrinking) {
                self.finish(id, Ok(Granted::default()), fx);
            }
        }
    }

    /// Changes the device budget. Growing takes effect at once. Shrinking evicts, and frames leave as their pages can.
    /// Returns how many frames must exist in all.
    pub fn set_frames(&mut self, frames: u32, fx: &mut Effects) -> u32 {
        self.frames.target = frames;
        self.config.frames = frames;
        self.policy.resize(frames, self.host.total(), self.config.lookahead);
        let exist = self.frames.grow();
        self.eased = true;
        self.refuse_oversized(fx);
        self.pump(fx);
        exist
    }

    /// Evicts these pages, except where something forbids it. Returns how many evictions it began.
    pub fn evict(&mut self, pages: impl Iterator<Item = PageId>, fx: &mut Effects) -> u32 {
        let mut count = 0;
        for page in pages {
            count += u32::from(!self.closing && self.reclaim_page(page, fx));
        }
        self.pump(fx);
        count
    }

    /// The bytes of these pages are of no use any more. Copies below the device tier are dropped, where no move uses
    /// them and no write back of the host copy is due: a page that has no frame reads as zero bytes then, and is filled
    /// without a read. A page that is resident, on its way or not read-write stays as it is. Returns how many pages
    /// lost their bytes.
    pub fn discard_bytes(&mut self, pages: impl Iterator<Item = PageId>, fx: &mut Effects) -> u32 {
        let mut count = 0;
        for page in pages {
            let segment = &self.segments[page.segment.index()];
            if segment.backing != Backing::ReadWrite || !segment.fillable(page.index) {
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
        self.pump(fx);
        count
    }

    /// Gives the memory of up to `count` device frames back to the system. First come free frames that may have memory,
    /// then frames of clean unused pages, which it evicts. Dirty pages are passed over, and no page is copied to the
    /// host tier. The budget stays. Returns how many frames lose their memory.
    pub fn trim(&mut self, count: u32, fx: &mut Effects) -> u32 {
        self.trim_frames(count, true, fx)
    }

    /// [`trim`](Self::trim) that evicts nothing.
    pub fn trim_free(&mut self, count: u32, fx: &mut Effects) -> u32 {
        self.trim_frames(count, false, fx)
    }

    /// Picks up to `count` host frames whose memory goes back to the system. First come free frames that may have
    /// memory, then frames of copies whose bytes are elsewhere too, which it drops. Answered by
    /// [`host_discarded`](Self::host_discarded).
    pub fn trim_host(&mut self, count: u32) -> Vec<HostFrameId> {
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
    pub fn host_discarded(&mut self, frames: &[HostFrameId], fx: &mut Effects) {
        self.host.discarded(frames);
        self.pump(fx);
    }

    fn trim_frames(&mut self, count: u32, evicting: bool, fx: &mut Effects) -> u32 {
        let mut given = 0;
        self.discard_again(fx);
        while given < count && !self.closing {
            let promised = self.awaiting.len() as u32 + self.purses + self.coming + self.floor;
            let spare = self.frames.free_count() > promised && self.frames.free_count() > self.frames.bare_count();
            let may = spare || evicting && self.reclaim(Want::Memory, fx);
            if !may {
                break;
            }
            let Some(frame) = self.frames.discard_warm() else { break };
            if self.leaving() > 0 {
                // A shrinking budget has waited for this frame: it must not come back.
                self.frames.retire();
            }
            fx.discard.push(frame);
            given += 1;
        }
        given
    }
}
