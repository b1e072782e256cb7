//! Victims: making frames free, by eviction, demotion and write back; the budget.

use std::collections::{BTreeSet, VecDeque};

use smallvec::SmallVec;

use super::policy::{Take, Want};
use super::state::{BeginEvict, Claim, PageWord, Snapshot, State};
use super::{Effects, Granted, Pager, Place, Priority};
use crate::ids::{HostFrameId, PageId};

/// Pages offered by the policy before one is taken that is known to be free. So where nearly all pages are pinned, a victim
/// costs so many looks and not one for each of them.
const LOOKS: usize = 32;

/// What is known of victims since a search has offered every resident page and none could go.
///
/// # Invariant
///
/// Once such a search was made, a resident page that is not listed here cannot go, and that changes only with an event that
/// lists it: it is pinned and `wanted`, so the end of the pin is [told](Pager::released); or a move uses it, or its host copy,
/// and ends. A page that comes is listed, because its pins are not marked.
#[derive(Debug, Default)]
pub(super) struct Barren {
    /// Pages that may go, or may be pinned without a mark; what was heard of first comes first. `None` before a search.
    heard: Option<VecDeque<PageId>>,
}

/// What a policy's candidate turned out to be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taken {
    Clean,
    Dirty,
}

/// Takes a page from whoever could use it, if nothing forbids it.
fn begin_to_take(word: &PageWord, host_busy: bool) -> Option<Taken> {
    match word.begin_evict() {
        BeginEvict::Won => Some(Taken::Clean),
        // Newer bytes are not written beside older ones. Asked of the word that was dirty: a writer comes at any time.
        BeginEvict::Dirty if !host_busy && word.begin_last_write_back() == Claim::Won => Some(Taken::Dirty),
        _ => None,
    }
}

impl Pager {
    /// Makes one more frame free, or puts one in transit. `false` if every frame is pinned, in motion, or worth more
    /// than what wants it.
    ///
    /// Pages whose write back has just failed are passed over. Where somebody waits and there is nothing else, they are
    /// tried again all the same.
    pub(super) fn reclaim(&mut self, want: Want, fx: &mut Effects) -> bool {
        // A page that is put off comes back by itself, without an event of its own.
        if self.put_off.is_empty()
            && let Some(found) = self.reclaim_heard(want, fx)
        {
            return found;
        }
        let last_resort = self.is_urgent(want) && !self.put_off.is_empty();
        self.reclaim_among(want, false, usize::MAX, fx) || last_resort && self.reclaim_among(want, true, usize::MAX, fx)
    }

    /// [`reclaim`](Self::reclaim) where nothing but what is listed can go. `None` if that is not known, or not enough to
    /// know.
    fn reclaim_heard(&mut self, want: Want, fx: &mut Effects) -> Option<bool> {
        let any = matches!(want, Want::Demand | Want::Room);
        if !any {
            // Worth less than what is wanted, or clean, is the policy's business.
            return self.barren.heard.as_ref()?.is_empty().then_some(false);
        }
        while let Some(page) = self.barren.heard.as_mut()?.pop_front() {
            // The policy's order counts, as far as it comes to a page that can go.
            if self.can_go(page) && self.reclaim_among(want, false, LOOKS, fx) {
                if let Some(heard) = &mut self.barren.heard {
                    heard.push_front(page);
                }
                return Some(true);
            }
            // What is pinned is marked by this.
            if let Some(taken) = self.take_page(page) {
                self.take_down(page, taken, want, fx);
                return Some(true);
            }
        }
        Some(false)
    }

    /// Something has happened to a page, or it is there now: it may be one that can go.
    pub(super) fn may_go(&mut self, page: PageId) {
        let Some(heard) = &mut self.barren.heard else { return };
        heard.push_back(page);
        if heard.len() > self.frames.active().max(64) as usize {
            // A search of all pages costs no more than to go on with this.
            self.barren.heard = None;
        }
    }

    /// Whether a page is resident and nothing forbids that it goes, just now.
    fn can_go(&self, page: PageId) -> bool {
        let Some(table) = self.segments.get(page.segment.index()) else { return false };
        let index = page.index.index();
        let (Some(word), Some(entry)) = (table.words.get(index), table.entries.get(index)) else { return false };
        let word = word.load();
        let leaves = word.state == State::Clean || word.state == State::Dirty && !entry.host_busy();
        leaves && word.pins == 0 && !entry.held_back()
    }

    /// For checks: whether a resident page can go, and is not put off.
    pub(super) fn can_go_for_good(&self, page: PageId) -> bool {
        self.can_go(page) && !self.put_off.contains_key(&page)
    }

    /// For checks: pages that can go, or whose pin's end will not be told, and that no search would find.
    pub(super) fn hidden(&self, to_be_told: &dyn Fn(PageId) -> bool) -> Option<PageId> {
        let heard = self.barren.heard.as_ref()?;
        self.policy.tracked().into_iter().filter(|page| !heard.contains(page) && !to_be_told(*page)).find(|page| {
            let entry = &self.segments[page.segment.index()].entries[page.index.index()];
            let word = self.word(*page).load();
            // The end of the move lists it.
            let moves = word.state == State::WritingBack || entry.held_back() || entry.host_busy();
            let untold = word.pins > 0 && !word.wanted && !moves;
            untold || self.can_go(*page)
        })
    }

    /// For checks: pages that a search would look at, if that is all it would.
    pub(super) fn heard(&self) -> Option<BTreeSet<PageId>> {
        self.barren.heard.as_ref().map(|heard| heard.iter().copied().collect())
    }

    /// Resident pages that are no victims yet: those the policy has.
    fn resident(&self) -> usize {
        let filling = self.filling.len() - self.awaiting.len();
        (self.frames.in_use() as usize).saturating_sub(filling + self.transit as usize)
    }

    /// Whether somebody waits for what a frame is wanted for.
    fn is_urgent(&self, want: Want) -> bool {
        want.is_demand() || want == Want::Room && !self.shrinking.is_empty()
    }

    /// Takes one of the pages that the policy offers, of the first `looks`.
    fn reclaim_among(&mut self, want: Want, with_put_off: bool, looks: usize, fx: &mut Effects) -> bool {
        // Whether to find out that this was all, and what of it there has been.
        let all = looks == usize::MAX && self.put_off.is_empty() && matches!(want, Want::Demand | Want::Room);
        let mut seen: SmallVec<[PageId; LOOKS]> = SmallVec::new();
        let resident = self.resident();
        let mut offered = 0;
        let Self { policy, segments, put_off, events, .. } = self;
        // What was taken counts, not what the policy says was: policies may be the user's.
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
                    // A clean page at the head of the line is as good as a free frame.
                    return Take::Stop;
                }
                if fresh {
                    // It was filled ahead, and would be again: where all else is pinned, up and down without end.
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
                // A policy of the user's may leave pages out, and offer others twice.
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
        self.policy.removed(page);
        if taken == Taken::Dirty {
            self.outdate_copies(page);
        }
        let Some(frame) = self.entry(page).frame() else {
            invariant!(false, "resident page {page:?} without a frame");
            return;
        };
        let priority = if self.is_urgent(want) { Priority::WriteBack } else { Priority::Background };
        // Whoever wants memory now is not served by a copy that takes its time, into more memory.
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
            self.transit += 1;
            self.start_move(page, Place::Device(frame), Place::Host(host), priority, fx);
        } else if taken == Taken::Dirty {
            self.entry(page).set_evict_after(true);
            self.transit += 1;
            self.start_move(page, Place::Device(frame), Place::Disk, priority, fx);
        } else {
            let evicted = self.word(page).evicted();
            if self.took(page, evicted, fx) {
                self.vacate(page, frame, fx);
            }
        }
    }

    /// The device tier has newer bytes than any copy below: a writer leaves no other trace than the page's state.
    fn outdate_copies(&mut self, page: PageId) {
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

    /// Writes the host tier's oldest dirty copies to disk while nobody waits, so that it can take more.
    fn clean_host(&mut self, fx: &mut Effects) {
        if self.host.total() == 0 || self.host.has_free() {
            return;
        }
        let candidate = self.host.victim(|candidate| {
            let table = &self.segments[candidate.segment.index()];
            let entry = &table.entries[candidate.index.index()];
            // What a writer has in its hands may be newer, or not.
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

    /// Keeps a few frames free or on their way while dirty pages are being made, so that the next fault does not have
    /// to wait for a write back.
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

    /// Takes frames out of the budget as they become free.
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

    /// Changes the device budget. Growing takes effect at once; returns how many frames must exist in all. Shrinking
    /// evicts, and frames leave as their pages can.
    pub fn set_frames(&mut self, frames: u32, fx: &mut Effects) -> u32 {
        self.frames.target = frames;
        self.config.frames = frames;
        self.policy.resize(frames, self.host.total(), self.config.lookahead);
        let exist = self.frames.grow();
        self.refuse_oversized(fx);
        self.pump(fx);
        exist
    }

    /// Evicts these pages, as far as nothing forbids it. Returns how many it set in motion.
    pub fn evict(&mut self, pages: impl Iterator<Item = PageId>, fx: &mut Effects) -> u32 {
        let mut count = 0;
        for page in pages {
            count += u32::from(!self.closing && self.reclaim_page(page, fx));
        }
        self.pump(fx);
        count
    }

    /// Gives the memory of up to `count` device frames back to the system: of free ones that may have some, and then of
    /// those of clean pages nobody uses, which it evicts; dirty ones are passed over, and none is copied to the host tier. The
    /// budget stays. Returns how many frames' memory goes.
    pub fn trim(&mut self, count: u32, fx: &mut Effects) -> u32 {
        self.trim_frames(count, true, fx)
    }

    /// [`trim`](Self::trim) that evicts nothing.
    pub fn trim_free(&mut self, count: u32, fx: &mut Effects) -> u32 {
        self.trim_frames(count, false, fx)
    }

    /// Host frames whose memory goes back to the system, up to `count`: free ones that may have some, and then those of copies
    /// that are elsewhere too, which it drops. Answered by [`host_discarded`](Self::host_discarded).
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

    /// The memory of these host frames is back with the system.
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
                // A budget that shrinks has waited for it: it must not come back.
                self.frames.retire();
            }
            fx.discard.push(frame);
            given += 1;
        }
        given
    }
}
