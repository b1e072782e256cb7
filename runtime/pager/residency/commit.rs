//! Segments whose bytes on disk are committed as a whole, and taken back as a whole.

use super::Residency;
use super::table::PageEntry;
use crate::effects::Effects;
use crate::ids::{PageId, PageIndex, SegmentId};
use crate::page_move::{Place, Priority};
use crate::state::{BeginEvict, Claim, State};

/// Why the bytes of segments cannot be committed, or taken back, just now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unwritten {
    /// How many pages move. Their ends are to be waited for.
    pub moving: u32,
    /// A page whose pin is in the way.
    pub pinned: Option<PageId>,
    /// A page whose bytes were lost.
    pub lost: Option<PageId>,
}

/// What of a page was committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Whether the disk has any bytes of it. If not, they are zeros.
    pub on_disk: bool,
    /// Whether it was written to disk since.
    pub is_older: bool,
}

impl Unwritten {
    /// Whether nothing is in the way.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl Residency {
    fn pages_of(&self, segment: SegmentId) -> impl Iterator<Item = PageId> + use<> {
        let count = self.segments.get(segment.index()).map_or(0, |table| table.entries.len());
        (0..count as u32).map(move |index| PageId { segment, index: PageIndex(index) })
    }

    /// Begins to write back what is not on disk yet of these segments. The pages stay where they are. If all is there,
    /// the segments are frozen: nothing of them is written to disk until they are [thawed](Self::thaw).
    pub(crate) fn freeze(&mut self, segments: &[SegmentId], fx: &mut Effects) -> Unwritten {
        let mut left = Unwritten::default();
        for page in segments.iter().flat_map(|segment| self.pages_of(*segment)).collect::<Vec<_>>() {
            self.write_back_page(page, &mut left, fx);
        }
        if left.is_none() {
            self.set_frozen(segments, true);
        }
        left
    }

    /// Ends a [freeze](Self::freeze).
    pub(crate) fn thaw(&mut self, segments: &[SegmentId]) {
        self.set_frozen(segments, false);
        // Any page may be able to go now.
        self.barren.heard = None;
        self.eased = true;
    }

    /// The pages of these segments that are being written to disk. Pages on their way to the host tier are among them.
    pub(crate) fn write_backs_of(&self, segments: &[SegmentId]) -> Vec<PageId> {
        let leaves = |page: &PageId| {
            matches!(self.word(*page).load().state, State::WritingBack | State::Evicting)
                || self.entry_of(*page).host_busy()
        };
        segments.iter().flat_map(|segment| self.pages_of(*segment)).filter(leaves).collect()
    }

    /// Whether a fill of the page is under way, and not only waits for a frame.
    fn is_filled_now(&self, page: PageId) -> bool {
        self.filling.get(&page).is_some_and(|fill| fill.moving.is_some())
    }

    fn set_frozen(&mut self, segments: &[SegmentId], frozen: bool) {
        for segment in segments {
            if let Some(table) = self.segments.get_mut(segment.index()) {
                table.frozen = frozen;
            }
        }
    }

    /// Unpinned dirty pages that stay in their frames only until their segment is thawed.
    pub(super) fn frozen_pages(&self) -> usize {
        let frozen = self.segments.iter().filter(|(_, table)| table.frozen).flat_map(|(_, table)| table.words.iter());
        frozen.map(|word| word.load()).filter(|word| word.state == State::Dirty && word.pins == 0).count()
    }

    fn write_back_page(&mut self, page: PageId, left: &mut Unwritten, fx: &mut Effects) {
        let word = self.word(page).load();
        let entry = *self.entry_of(page);
        let host_is_newer = entry.host_dirty() && !entry.host_stale();
        match word.state {
            State::Poisoned => left.lost = Some(page),
            State::Dirty if word.exclusive => left.pinned = Some(page),
            State::WritingBack => left.moving += 1,
            State::Dirty => {
                // Newer bytes are not written beside older ones.
                if entry.host_busy() || entry.held_back() {
                    left.moving += 1;
                    return;
                }
                if self.word(page).begin_write_back() != Claim::Won {
                    // A writer has come meanwhile.
                    left.pinned = Some(page);
                    return;
                }
                left.moving += 1;
                self.outdate_copies(page);
                if let Some(frame) = self.entry(page).frame() {
                    self.start_move(page, Place::Device(frame), Place::Disk, Priority::WriteBack, fx);
                }
            }
            _ if !host_is_newer => {}
            _ => {
                left.moving += 1;
                // While it is read for a fill, the copy is in no order, and that fill makes the page dirty.
                if let (Some(host), false, false) = (entry.host(), entry.host_busy(), self.is_filled_now(page)) {
                    self.entry(page).set_host_busy(true);
                    self.host.left(page);
                    self.start_move(page, Place::Host(host), Place::Disk, Priority::WriteBack, fx);
                }
            }
        }
    }

    /// Forgets what was written to these segments since they were last committed. Unless something is in the way: then
    /// nothing has changed.
    pub(crate) fn roll_back(
        &mut self,
        segments: &[SegmentId],
        committed: &dyn Fn(PageId) -> Committed,
        fx: &mut Effects,
    ) -> Unwritten {
        let mut left = Unwritten::default();
        let pages: Vec<PageId> = segments.iter().flat_map(|segment| self.pages_of(*segment)).collect();
        // From here on nobody pins one of them without the latch. Before any is looked at: a writer of two pages would
        // be seen at one of them only.
        pages.iter().for_each(|page| self.word(*page).close());
        let mut written = Vec::new();
        for page in pages.iter().copied() {
            let word = self.word(page).load();
            let entry = *self.entry_of(page);
            let committed = committed(page);
            // A page that is only read has what was committed, wherever it moves.
            let is_newer = matches!(word.state, State::Dirty | State::WritingBack | State::Poisoned);
            if !is_newer && !committed.is_older && !entry.host_dirty() {
                continue;
            }
            let moves = matches!(word.state, State::WritingBack | State::Evicting) || self.is_filled_now(page);
            if moves || entry.host_busy() || entry.held_back() {
                left.moving += 1;
            } else if word.pins > 0 {
                left.pinned = Some(page);
            }
            written.push((page, committed.on_disk));
        }
        if left.is_none() {
            written.into_iter().for_each(|(page, on_disk)| self.take_back(page, on_disk, fx));
        }
        pages.into_iter().for_each(|page| self.reopen(page));
        left
    }

    /// Gives up a page's bytes in all tiers.
    fn take_back(&mut self, page: PageId, on_disk: bool, fx: &mut Effects) {
        self.forget_failures(page);
        let word = self.word(page);
        let begun = match word.load().state {
            State::Dirty => word.begin_discard() == Claim::Won,
            State::Clean => word.begin_evict() == BeginEvict::Won,
            State::Poisoned => {
                let revived = word.revive();
                self.lost.retain(|(lost, _)| *lost != page);
                // A page whose state was unknown has its frame yet.
                if let (true, Some(frame)) = (self.took(page, revived), self.entry(page).frame()) {
                    self.vacate(page, frame, fx);
                }
                false
            }
            _ => false,
        };
        if begun {
            self.left(page);
            let evicted = self.word(page).evicted();
            if let (true, Some(frame)) = (self.took(page, evicted), self.entry(page).frame()) {
                self.vacate(page, frame, fx);
            }
        }
        self.drop_host_copy(page);
        self.entry(page).set_on_disk(on_disk);
        self.changed(page);
    }
}
