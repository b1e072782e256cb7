//! Copies on disk that nobody needs any more.

use super::table::PageEntry;
use super::{Backing, Residency};
use crate::ids::{MoveId, PageId};
use crate::page_move::Place;

/// What a read-write page has in its place on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskCopy {
    /// The newest bytes, or those that a writer who holds the page may leave as they are.
    Needed,
    /// Bytes that are read by nobody: the page was written or discarded since. That stays so until a move of the page
    /// to the disk.
    Spare,
    /// A move to the disk has not ended.
    Moving {
        /// The move.
        id: MoveId,
        /// Whether it was among the [`Effects::moves`](crate::Effects::moves) of a step. If not, it waits for its
        /// staging buffer.
        started: bool,
        /// Whether the bytes that it writes are the newest.
        newest: bool,
    },
}

impl Residency {
    /// What each of these pages, which are in order, has in its place on disk.
    pub(crate) fn disk_copies(&self, pages: &[PageId]) -> Vec<DiskCopy> {
        let mut copies: Vec<DiskCopy> = pages.iter().map(|page| self.disk_copy(*page)).collect();
        for (key, record) in self.moves.iter().filter(|(_, record)| record.to == Place::Disk) {
            if let Ok(at) = pages.binary_search(&record.page) {
                let (table, index) = (&self.segments[record.page.segment.index()], record.page.index);
                let stale = table.entries[index.index()].host_stale() || table.is_outdated(index);
                // A page that is written back from its device frame stays as it is until the move ends.
                let newest = matches!(record.from, Place::Device(_)) || !stale;
                copies[at] = DiskCopy::Moving { id: self.move_id(key), started: record.started, newest };
            }
        }
        copies
    }

    /// Gives up the copies in lower tiers of those pages that were written since, and that no writer holds.
    pub(crate) fn outdate(&mut self, pages: impl Iterator<Item = PageId>) {
        for page in pages {
            let Some(table) = self.segments.get(page.segment.index()) else { return };
            let Some(entry) = table.entries.get(page.index.index()) else { return };
            if table.backing != Backing::ReadWrite || !table.is_outdated(page.index) {
                continue;
            }
            if entry.host_busy() {
                // What becomes of the host copy is decided when its move ends.
                self.entry(page).set_on_disk(false);
            } else {
                self.outdate_copies(page);
            }
        }
    }

    fn disk_copy(&self, page: PageId) -> DiskCopy {
        let Some(table) = self.segments.get(page.segment.index()) else { return DiskCopy::Needed };
        let Some(entry) = table.entries.get(page.index.index()) else { return DiskCopy::Needed };
        // A page that is being filled from disk is not outdated, and on disk until it has been written.
        let newest = entry.on_disk() && !table.is_outdated(page.index);
        if table.backing != Backing::ReadWrite || newest { DiskCopy::Needed } else { DiskCopy::Spare }
    }
}
