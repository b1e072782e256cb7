//! Making frames free, by eviction, demotion and write back.

use std::collections::{BTreeSet, VecDeque};

use smallvec::SmallVec;

use super::table::PageEntry;
use super::{Kept, Residency};
use crate::effects::Effects;
use crate::ids::{FrameId, HostFrameId, PageId};
use crate::page_move::{Place, Priority};
use crate::policy::{Take, Want};
use crate::state::{BeginEvict, Claim, PageWord, Snapshot, State};

/// How many pages the policy may offer before a page is taken that is known to be free. So where nearly all pages are
/// pinned, a victim costs at most this many looks, not one for each pinned page.
const LOOKS: usize = 32;

/// The state in which a victim was taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taken {
    Clean,
    Dirty,
}

/// Begins to take a page down, unless something forbids it. `must_stay` if it is dirty.
fn begin_to_take(word: &PageWord, must_stay: bool) -> Option<Taken> {
    match word.begin_evict() {
        BeginEvict::Won => Some(Taken::Clean),
        // Newer bytes are not written beside older ones. The word itself is asked again, because a writer may come at
        // any time.
        BeginEvict::Dirty if !must_stay && word.begin_last_write_back() == Claim::Won => Some(Taken::Dirty),
        _ => None,
    }
}

impl Residency {
    /// Makes one more frame free, or puts one in transit. Returns `false` if every frame is pinned, in motion, or worth
    /// more than what wants it.
    ///
    /// Pages whose write back has just failed are passed over. If somebody waits and there is nothing else, they are
    /// tried all the same.
    pub(crate) fn reclaim(&mut self, kept: Kept, want: Want, fx: &mut Effects) -> bool {
        // A page that is put off can go again without an event of its own.
        if self.put_off.is_empty()
            && let Some(found) = self.reclaim_heard(kept, want, fx)
        {
            return found;
        }
        let last_resort = Self::is_urgent(kept, want) && !self.put_off.is_empty();
        self.reclaim_among(kept, want, false, usize::MAX, fx)
            || last_resort && self.reclaim_among(kept, want, true, usize::MAX, fx)
    }

    /// [`reclaim`](Self::reclaim) among listed pages only. `None` if it is not known that no other page can go, or if
    /// the list does not decide.
    fn reclaim_heard(&mut self, kept: Kept, want: Want, fx: &mut Effects) -> Option<bool> {
        let any = matches!(want, Want::Demand | Want::Room);
        if !any {
            // Only the policy knows which pages are worth less than what is wanted, or may be given for memory.
            return self.barren.heard.as_ref()?.is_empty().then_some(false);
        }
        while let Some(page) = self.barren.heard.as_mut()?.pop_front() {
            // The policy's order counts, as long as it soon offers a page that can go.
            if self.can_go(page) && self.reclaim_among(kept, want, false, LOOKS, fx) {
                if let Some(heard) = &mut self.barren.heard {
                    heard.push_front(page);
                }
                return Some(true);
            }
            // This attempt marks a pinned page.
            if let Some(taken) = self.take_page(page) {
                self.take_down(kept, page, taken, want, fx);
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

    /// Has the next search for a victim look at this page, without saying that there may be more frames. Enough by
    /// itself for a page that was kept only by a request that was tried in vain; otherwise see
    /// [`may_go`](Self::may_go).
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
        let may_be_written = !entry.host_busy() && !table.frozen;
        let leaves = word.state == State::Clean || word.state == State::Dirty && may_be_written;
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
            let entry = self.entry_of(*page);
            let word = self.word(*page).load();
            // The end of the move will list it, and that of the commit all pages.
            let committed = word.state == State::Dirty && self.segments[page.segment.index()].frozen;
            let moves = word.state == State::WritingBack || entry.held_back() || entry.host_busy() || committed;
            let untold = word.pins > 0 && !word.wanted && !moves;
            untold || self.can_go(*page)
        })
    }

    /// For checks: the pages that a search would look at. `None` if it would look at all.
    pub(crate) fn heard(&self) -> Option<BTreeSet<PageId>> {
        self.barren.heard.as_ref().map(|heard| heard.iter().copied().collect())
    }

    /// How many resident pages the policy has: those that are no victims yet.
    pub(super) fn resident(&self) -> usize {
        let filling = self.filling.len() - self.awaiting.len();
        (self.frames.in_use() as usize).saturating_sub(filling + self.transit as usize)
    }

    /// Whether somebody waits for the frame that is wanted.
    fn is_urgent(kept: Kept, want: Want) -> bool {
        want.is_demand() || want == Want::Room && kept.shrinks
    }

    /// Takes one of the first `looks` pages that the policy offers.
    fn reclaim_among(&mut self, kept: Kept, want: Want, with_put_off: bool, looks: usize, fx: &mut Effects) -> bool {
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
            taken = begin_to_take(word, entry.host_busy() || table.frozen).map(|taken| (page, taken));
            if taken.is_some() { Take::Yes } else { Take::Skip }
        });
        match taken {
            Some((page, taken)) => {
                self.take_down(kept, page, taken, want, fx);
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
    pub(super) fn reclaim_page(&mut self, kept: Kept, page: PageId, fx: &mut Effects) -> bool {
        if self.is_put_off(page) {
            return false;
        }
        let Some(taken) = self.take_page(page) else { return false };
        self.take_down(kept, page, taken, Want::Room, fx);
        true
    }

    /// Begins to take this page down if nothing forbids it.
    fn take_page(&mut self, page: PageId) -> Option<Taken> {
        let table = self.segments.get(page.segment.index())?;
        let (word, entry) = (table.words.get(page.index.index())?, table.entries.get(page.index.index())?);
        if entry.held_back() {
            return None;
        }
        begin_to_take(word, entry.host_busy() || table.frozen)
    }

    fn take_down(&mut self, kept: Kept, page: PageId, taken: Taken, want: Want, fx: &mut Effects) {
        self.left(page);
        if taken == Taken::Dirty {
            self.outdate_copies(page);
        }
        let Some(frame) = self.entry(page).frame() else {
            invariant!(false, "resident page {page:?} without a frame");
            return;
        };
        let priority = if Self::is_urgent(kept, want) { Priority::WriteBack } else { Priority::Background };
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
            if self.took(page, evicted) {
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
}
