//! A folder as the transfer engine uses it: where a page is read, and where it is written.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};

use super::files::{self, FolderFiles};
use super::generation::Generation;
use super::ledger::Ledger;
use super::manifest::{self, Failed, Terms};
use super::table::Table;
use super::tree::Ref;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, FileId, PageId, SegmentId};
use crate::pager::Committed;
use crate::store::backend::operation::CallHook;
use crate::store::{FileUse, Store};

/// An open folder, in a store. It leaves the store with the last handle.
#[derive(Debug)]
pub(crate) struct DurableFolder {
    /// The process that opened it.
    owner: u32,
    path: PathBuf,
    page_bytes: u64,
    files: FolderFiles,
    file: FileId,
    store: Arc<dyn Store>,
    ledger: Mutex<Ledger>,
    /// Its segments, and the first page of each.
    segments: RwLock<Vec<(SegmentId, u32)>>,
    /// The turn to commit, to roll back and to add tensors.
    pub(crate) turn: Mutex<()>,
    /// Why a page could not be written, since somebody last asked.
    unwritten: Mutex<HashMap<PageId, Error>>,
    /// Why nothing can be committed any more.
    broken: OnceLock<Error>,
}

fn no_room(path: &Path, slots: u64, page_bytes: u64, cause: io::Error) -> Error {
    let room = Bytes::new(slots.saturating_mul(page_bytes));
    let remedy = match cause.raw_os_error() {
        Some(_) => "free space on that disk, keep fewer generations, or use another folder",
        None => "raise that limit",
    };
    Error::io(format!("take {room} for the pages of {}", path.display()), cause).remedy(remedy)
}

impl DurableFolder {
    /// Opens a folder and takes its pages into a store. Returns its table, too.
    ///
    /// # Errors
    /// As for [`files::open`].
    pub(crate) fn open(
        path: PathBuf,
        terms: Terms,
        store: &Arc<dyn Store>,
        hook: Option<Arc<dyn CallHook>>,
    ) -> Result<(Self, Table)> {
        let (files, opened) = files::open(&path, terms, hook)?;
        for (generation, error) in &opened.lost {
            let generation = generation.map(Generation::get);
            let folder = path.display();
            tracing::warn!(%folder, generation, %error, "a generation cannot be read, or was never complete");
        }
        let mut ledger = opened.ledger;
        let page_bytes = ledger.head().page_bytes;
        // More generations may be kept from now on.
        let (pages, slots) = (ledger.page_count(), ledger.slots_for(ledger.page_count()));
        let has = ledger.room().0;
        let all = slots.max(has);
        files.take_pages(all.saturating_mul(page_bytes)).map_err(|cause| no_room(&path, all, page_bytes, cause))?;
        if has < slots {
            ledger.grow(pages);
        }
        let table = Table::read(ledger.table(), ledger.page_count() as u64, page_bytes)?;
        let handle = files.pages().map_err(|cause| {
            Error::io(format!("open the pages of {} again", path.display()), cause)
                .remedy("raise the limit on open files (ulimit -n)")
        })?;
        let file = store.add_file(handle, files::named(&path), FileUse::Scratch)?;
        let folder = Self {
            owner: process::id(),
            path,
            page_bytes,
            files,
            file,
            store: store.clone(),
            ledger: Mutex::new(ledger),
            segments: RwLock::default(),
            turn: Mutex::new(()),
            unwritten: Mutex::default(),
            broken: OnceLock::new(),
        };
        Ok((folder, table))
    }

    /// The folder's path, for messages.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The file of its slots in the store.
    pub(crate) fn file(&self) -> FileId {
        self.file
    }

    /// The newest generation, and those that are kept beside it.
    pub(crate) fn generations(&self) -> Vec<Generation> {
        self.ledger.lock().kept().collect()
    }

    /// The note of the last commit.
    pub(crate) fn note(&self) -> Vec<u8> {
        self.ledger.lock().note().to_vec()
    }

    /// A segment holds the pages from `first` on.
    pub(crate) fn add_segment(&self, segment: SegmentId, first: u32) {
        self.segments.write().push((segment, first));
    }

    pub(crate) fn segments(&self) -> Vec<SegmentId> {
        self.segments.read().iter().map(|(segment, _)| *segment).collect()
    }

    /// Makes room for `more` pages behind those that there are. Returns the first.
    ///
    /// # Errors
    /// `DiskFull` if the disk has no room for them in each generation that is kept, and in the next one; then nothing
    /// has changed. `InvalidArgument` for more than 2^32 pages.
    pub(crate) fn add_pages(&self, more: u32) -> Result<u32> {
        let (first, slots) = {
            let ledger = self.ledger.lock();
            (ledger.page_count(), ledger.slots_for(ledger.page_count() + more as usize))
        };
        let all = u32::try_from(first).ok().and_then(|first| first.checked_add(more)).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, format!("{first} and {more} pages are more than a folder holds"))
                .remedy("choose larger pages")
        })?;
        let taken = self.files.take_pages(slots.saturating_mul(self.page_bytes));
        taken.map_err(|cause| no_room(&self.path, slots, self.page_bytes, cause))?;
        self.ledger.lock().grow(all as usize);
        Ok(first as u32)
    }

    /// Takes back the pages from `first` on, which were added last and never used.
    pub(crate) fn drop_pages(&self, first: u32) {
        self.ledger.lock().shrink(first as usize);
    }

    /// Whether the disk has bytes of a page.
    pub(crate) fn has(&self, page: u32) -> bool {
        self.ledger.lock().page(page).is_some()
    }

    fn at(&self, page: u32) -> Result<Ref> {
        self.ledger.lock().page(page).ok_or_else(|| {
            Error::new(ErrorKind::Internal, format!("page {page} of {} was never written", self.path.display()))
                .remedy("report this as a bug")
        })
    }

    /// The first byte of a page in the file.
    ///
    /// # Errors
    /// `Internal` if it was never written.
    pub(crate) fn read_at(&self, page: u32) -> Result<u64> {
        Ok(self.at(page)?.place * self.page_bytes)
    }

    /// The first byte in the file of the slot that a page is to be written to.
    ///
    /// # Errors
    /// As for [`usable`](Self::usable); `Internal` if there is no slot.
    pub(crate) fn write_at(&self, page: u32) -> Result<u64> {
        self.usable()?;
        Ok(self.ledger.lock().begin_write(page)? * self.page_bytes)
    }

    /// A page was written to its slot.
    pub(crate) fn written(&self, page: u32, sum: u64) {
        self.ledger.lock().end_write(page, sum);
    }

    /// A page could not be written.
    pub(crate) fn not_written(&self, page: PageId, error: Error) {
        self.unwritten.lock().insert(page, error);
    }

    /// The pages that could not be written since the last call, and why.
    pub(crate) fn take_unwritten(&self) -> HashMap<PageId, Error> {
        std::mem::take(&mut self.unwritten.lock())
    }

    /// Compares the sum of bytes that were read with that of the bytes that were written.
    ///
    /// # Errors
    /// `Corrupt` if they differ.
    pub(crate) fn verify(&self, page: u32, read: u64) -> Result<()> {
        let Ref { place, sum } = self.at(page)?;
        if sum == read {
            return Ok(());
        }
        let folder = self.path.display();
        let what = format!("slot {place} of {folder} came back changed: checksum {read:016x}, written as {sum:016x}");
        Err(Error::new(ErrorKind::Corrupt, what)
            .remedy("check the disk and the memory; open an older generation, if one is kept"))
    }

    /// # Errors
    /// If nothing can be committed any more: the last commit has left it open what is durable.
    pub(crate) fn usable(&self) -> Result<()> {
        self.broken.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// What was committed of a page of one of its segments.
    pub(crate) fn committed(&self, page: PageId) -> Committed {
        let segments = self.segments.read();
        let first = segments.iter().find(|(segment, _)| *segment == page.segment).map(|(_, first)| *first);
        first.map_or(Committed { on_disk: false, is_older: false }, |first| {
            self.ledger.lock().committed_page(first + page.index.get())
        })
    }

    /// Forgets what was written since the last commit. No page is being written.
    pub(crate) fn roll_back(&self) {
        self.ledger.lock().roll_back();
    }

    /// Makes what was written durable, with the table and the note. No page is written meanwhile.
    ///
    /// # Errors
    /// For errors of the system, theirs.
    pub(crate) fn commit(&self, table: &Table, note: &[u8]) -> Result<Generation> {
        let named = |error: Error| error.context(format!("the durable folder {}", self.path.display()));
        let table = table.write()?;
        match manifest::commit(&self.files, &self.ledger, &table, note) {
            Ok(generation) => Ok(generation),
            Err(Failed::Before(error)) => Err(named(error)),
            Err(Failed::Unknown(error)) => {
                let error = named(error).remedy("close it and open it again: then it is known what is durable");
                Err(self.broken.get_or_init(|| error).clone())
            }
        }
    }
}

impl Drop for DurableFolder {
    fn drop(&mut self) {
        // In a child by `fork`, the store is the parent's.
        if process::id() == self.owner {
            self.store.remove_file(self.file);
        }
    }
}
