//! Commits of durable folders, and the way back to them.

use std::collections::HashSet;
use std::time::Instant;

use super::Engine;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{PageId, SegmentId};
use crate::pager::{Effects, Pager, Unwritten};
use crate::store::durable::folder::DurableFolder;
use crate::store::durable::generation::Generation;
use crate::store::durable::table::Table;

/// Segments of which nothing is written to disk. Ended when it is dropped.
struct Frozen<'a> {
    engine: &'a Engine,
    segments: &'a [SegmentId],
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.engine.with(|pager, fx| pager.end_commit(self.segments, fx));
    }
}

impl Engine {
    /// Writes what is not on disk yet of a folder's tensors, and makes it durable with this table and this note.
    ///
    /// # Errors
    /// `Busy` if a writer holds a page of them; `Poisoned` if the bytes of a page were lost; `TimedOut` if the disk
    /// does not answer. Errors of the disk: then nothing is lost that is in memory. As for [`usable`](Self::usable).
    pub(crate) fn commit(&self, folder: &DurableFolder, table: &Table, note: &[u8]) -> Result<Generation> {
        folder.usable()?;
        let segments = folder.segments();
        // A write that began before may yet fail for what the disk had then. Its page is written again.
        let mut earlier: HashSet<PageId> = self.change(|pager, _| {
            folder.take_unwritten();
            pager.write_backs_of(&segments).into_iter().collect()
        })?;
        let begin = |pager: &mut Pager, fx: &mut Effects| pager.begin_commit(&segments, fx);
        let failed = || folder.take_unwritten().into_iter().find(|(page, _)| !earlier.remove(page));
        self.when_nothing_moves(folder, "commit", begin, failed)?;
        let _frozen = Frozen { engine: self, segments: &segments };
        folder.commit(table, note)
    }

    /// Forgets what was written to a folder's tensors since the last commit.
    ///
    /// # Errors
    /// `Busy` if somebody holds such a page; otherwise as for [`commit`](Self::commit).
    pub(crate) fn roll_back(&self, folder: &DurableFolder) -> Result<()> {
        folder.usable()?;
        let segments = folder.segments();
        let roll_back = |pager: &mut Pager, fx: &mut Effects| {
            let left = pager.roll_back(&segments, &|page| folder.committed(page), fx);
            if left.is_none() {
                // Under the same hold of the latch: what is filled from here on is what was committed.
                folder.roll_back();
            }
            left
        };
        // What cannot be written is to be forgotten.
        self.when_nothing_moves(folder, "roll back", roll_back, || None)?;
        self.failures.lock().held.retain(|page, _| !segments.contains(&page.segment));
        Ok(())
    }

    /// Calls `attempt` under the latch until nothing is in its way, or `failed` says why that will not be. Waits for
    /// moves, and for nothing else.
    fn when_nothing_moves(
        &self,
        folder: &DurableFolder,
        what: &str,
        mut attempt: impl FnMut(&mut Pager, &mut Effects) -> Unwritten,
        mut failed: impl FnMut() -> Option<(PageId, Error)>,
    ) -> Result<()> {
        let mut watch = self.ends.watch();
        let path = folder.path().display();
        let (mut since, mut least) = (Instant::now(), u32::MAX);
        loop {
            if let Some((_, error)) = failed() {
                return Err(error.context(format!("{what} {path}")));
            }
            let attempt = |pager: &mut Pager, fx: &mut Effects| (!pager.is_closing()).then(|| attempt(pager, fx));
            let left = self.change(attempt)?.ok_or_else(crate::pager::closing)?;
            if left.is_none() {
                return Ok(());
            }
            if let Some(page) = left.lost {
                let message = format!("{what} {path}: {} was lost", self.describe(page));
                return Err(Error::new(ErrorKind::Poisoned, message)
                    .remedy("roll back to the last commit, or open the folder again"));
            }
            if let Some(page) = left.pinned {
                return Err(self.is_held(page, what, folder));
            }
            if left.moving < least {
                (since, least) = (Instant::now(), left.moving);
            }
            let deadline = self.io_timeout.and_then(|limit| since.checked_add(limit));
            let late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if late || !watch.wait(deadline) || self.ends.is_given_up() {
                let message = format!("{what} {path}: {} pages are still on their way", left.moving);
                return Err(Error::new(ErrorKind::TimedOut, message).remedy("check the drive; try again"));
            }
        }
    }

    fn is_held(&self, page: PageId, what: &str, folder: &DurableFolder) -> Error {
        let message = format!("{what} {}: {} is pinned", folder.path().display(), self.describe(page));
        Error::new(ErrorKind::Busy, message).remedy("drop the pins of its tensors first, and try again")
    }
}
