//! The files of a store. Of a model in thousands of files only those used last are open; the others are opened again
//! when an operation names them.
//!
//! # Invariants
//!
//! 1. A file that is opened again is the one it was: its identity is compared before anything is read.
//! 2. An operation holds the file that it names. So a file whose place another one takes is closed when the last operation
//!    that names it has ended.
//! 3. The lock is held for no call of the kernel.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use lru::LruCache;
use parking_lot::Mutex;

use super::file::{OpenFile, Origin, most_descriptors};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::FileId;

pub(super) struct Files(Mutex<Table>);

struct Table {
    next: u32,
    known: HashMap<FileId, Known>,
    /// Those that are open and may be closed.
    open: LruCache<FileId, Arc<OpenFile>>,
}

enum Known {
    /// A scratch file, which may have no name any more, or a source.
    Kept(Arc<OpenFile>),
    /// Where it is opened again.
    Origin(Arc<Origin>),
}

/// A file, and what taking it out changed: the backend has to be told.
pub(super) struct Taken {
    pub file: Arc<OpenFile>,
    /// It was opened for this.
    pub opened: bool,
    /// Closed to make room.
    pub closed: Option<FileId>,
}

/// The fewest files that are open: below it, operations in flight would open each other's again and again.
const LEAST: usize = 16;
/// Where the system sets no limit.
const MOST: usize = 1 << 16;

/// How many files may be open: half of what this process may have.
fn may_be_open() -> NonZeroUsize {
    let half = usize::try_from(most_descriptors() / 2).unwrap_or(MOST);
    NonZeroUsize::new(half.clamp(LEAST, MOST)).unwrap_or(NonZeroUsize::MIN)
}

impl Files {
    pub fn new() -> Self {
        Self(Mutex::new(Table { next: 0, known: HashMap::new(), open: LruCache::new(may_be_open()) }))
    }

    /// Takes a file in. Returns its id, and the file that was closed to make room.
    pub fn add(&self, file: &Arc<OpenFile>) -> Result<(FileId, Option<FileId>)> {
        let mut table = self.0.lock();
        let id = FileId::new(table.next);
        table.next = table.next.checked_add(1).ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "this store has taken in 2^32 files").remedy("open a new store")
        })?;
        let closed = match file.origin() {
            Some(origin) => {
                table.known.insert(id, Known::Origin(Arc::new(origin)));
                table.open.push(id, Arc::clone(file)).map(|(closed, _)| closed)
            }
            None => {
                table.known.insert(id, Known::Kept(Arc::clone(file)));
                None
            }
        };
        Ok((id, closed))
    }

    /// The file, if it is open.
    pub fn if_open(&self, id: FileId) -> Option<Arc<OpenFile>> {
        let mut table = self.0.lock();
        if let Some(file) = table.open.get(&id) {
            return Some(Arc::clone(file));
        }
        match table.known.get(&id) {
            Some(Known::Kept(file)) => Some(Arc::clone(file)),
            _ => None,
        }
    }

    /// The file, opened again if need be.
    ///
    /// # Errors
    /// `NotFound` if it is not in the store; `ModelChanged` if its path has another file by now; of opening it.
    pub fn take(&self, id: FileId) -> Result<Taken> {
        if let Some(file) = self.if_open(id) {
            return Ok(Taken { file, opened: false, closed: None });
        }
        let gone = || {
            Error::new(ErrorKind::NotFound, format!("{id:?} is not in the store"))
                .remedy("add the file first, and remove it after its last operation")
        };
        let origin = match self.0.lock().known.get(&id) {
            Some(Known::Origin(origin)) => Arc::clone(origin),
            Some(Known::Kept(file)) => return Ok(Taken { file: Arc::clone(file), opened: false, closed: None }),
            None => return Err(gone()),
        };
        let file = Arc::new(OpenFile::again(&origin)?);
        let mut table = self.0.lock();
        if !table.known.contains_key(&id) {
            return Err(gone());
        }
        // Another thread may have opened it meanwhile.
        if let Some(file) = table.open.get(&id) {
            return Ok(Taken { file: Arc::clone(file), opened: false, closed: None });
        }
        let closed = table.open.push(id, Arc::clone(&file)).map(|(closed, _)| closed);
        Ok(Taken { file, opened: true, closed })
    }

    /// Forgets a file. False if it was not there.
    pub fn remove(&self, id: FileId) -> bool {
        let mut table = self.0.lock();
        let open = table.open.pop(&id);
        let known = table.known.remove(&id);
        drop(table);
        // Files are closed here, without the lock.
        drop(open);
        known.is_some()
    }

    /// The files that go through the page cache, in the order in which they came.
    pub fn buffered(&self) -> Vec<std::path::PathBuf> {
        let table = self.0.lock();
        let path = |known: &Known| match known {
            Known::Kept(file) => (!file.is_direct()).then(|| file.path().to_owned()),
            Known::Origin(origin) => (!origin.direct).then(|| origin.path.clone()),
        };
        let mut found: Vec<_> = table.known.iter().filter_map(|(id, known)| Some((*id, path(known)?))).collect();
        drop(table);
        found.sort_by_key(|(id, _)| *id);
        found.into_iter().map(|(_, path)| path).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::path::Path;

    use super::*;
    use crate::store::FileUse;
    use crate::store::file::DirectIo;

    fn opened(path: &Path) -> Arc<OpenFile> {
        let file = File::open(path).unwrap();
        Arc::new(OpenFile::open(file, path.to_owned(), FileUse::Model, DirectIo::Preferred).unwrap())
    }

    /// With room for two open files.
    fn two() -> Files {
        let open = LruCache::new(NonZeroUsize::new(2).unwrap());
        Files(Mutex::new(Table { next: 0, known: HashMap::new(), open }))
    }

    #[test]
    fn files_used_last_stay_open_and_others_are_opened_again() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = |name: &str| folder.path().join(name);
        let files = two();
        let mut ids = Vec::new();
        for name in ["a", "b", "c"] {
            fs::write(path(name), [7; 5000]).unwrap();
            ids.push(files.add(&opened(&path(name))).unwrap());
        }
        assert_eq!(ids.iter().map(|(_, closed)| *closed).collect::<Vec<_>>(), [None, None, Some(ids[0].0)]);
        let [(a, _), (b, _), (c, _)] = ids[..] else { unreachable!() };
        assert!(files.if_open(a).is_none() && files.if_open(c).is_some());
        let again = files.take(a).unwrap();
        assert_eq!((again.opened, again.closed), (true, Some(b)));
        assert!(!files.take(a).unwrap().opened);
        // One that was replaced meanwhile is not read, and one that is gone is named.
        fs::write(path("new"), [8; 5000]).unwrap();
        fs::rename(path("new"), path("b")).unwrap();
        let error = files.take(b).map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ModelChanged);
        assert!(error.to_string().contains("another file"), "{error}");
        fs::remove_file(path("b")).unwrap();
        let error = files.take(b).map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("again"), "{error}");
        assert!(files.remove(b) && !files.remove(b));
        assert_eq!(files.take(b).map(|_| ()).unwrap_err().kind(), ErrorKind::NotFound);
        // A file that is open needs no name.
        fs::remove_file(path("a")).unwrap();
        assert!(files.take(a).is_ok());
    }
}
