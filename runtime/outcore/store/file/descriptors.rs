//! Open descriptors of model files. Of a model in thousands of files only those used last are open; the others are
//! opened again when an operation begins.
//!
//! # Invariants
//!
//! 1. A file that is opened again is the one it was: its identity is compared before anything is read (`mod.rs`).
//! 2. An operation that has begun holds its descriptor. So a file that is closed to make room is closed when the last
//!    such operation has ended. One that waits holds none.
//! 3. The lock is held for no call of the kernel.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::sync::{Arc, OnceLock};

use lru::LruCache;
use parking_lot::{Mutex, MutexGuard};

use crate::os::limits::most_descriptors;
use crate::store::file::changes::Changes;

/// The descriptors of one store.
pub(crate) struct Descriptors {
    table: Mutex<Table>,
    changes: OnceLock<Option<Arc<Changes>>>,
}

struct Table {
    next: u64,
    open: LruCache<Number, Arc<File>>,
}

/// A file's number in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Number(u64);

/// The fewest files that are open.
const LEAST: usize = 16;
/// Where the system sets no limit.
const MOST: usize = 1 << 16;

impl Descriptors {
    /// Keeps half of the descriptors that this process may have, at most.
    pub fn new() -> Self {
        let half = usize::try_from(most_descriptors() / 2).unwrap_or(MOST);
        Self::of(NonZeroUsize::new(half.clamp(LEAST, MOST)).unwrap_or(NonZeroUsize::MIN))
    }

    pub fn of(most: NonZeroUsize) -> Self {
        Self { table: Mutex::new(Table { next: 0, open: LruCache::new(most) }), changes: OnceLock::new() }
    }

    /// What tells whether files were written, if the system can.
    pub fn changes(&self) -> Option<&Arc<Changes>> {
        self.changes.get_or_init(Changes::new).as_ref()
    }

    /// Takes an open file in.
    pub fn add(&self, file: File) -> Number {
        let mut table = self.table.lock();
        let number = Number(table.next);
        table.next += 1;
        insert(table, number, Arc::new(file));
        number
    }

    /// The file, if it is open.
    pub fn get(&self, number: Number) -> Option<Arc<File>> {
        self.table.lock().open.get(&number).map(Arc::clone)
    }

    /// Opens a file. If the process has no descriptor left, half of those here are closed, and it is tried again.
    ///
    /// # Errors
    /// Those of `open`.
    pub fn open(&self, open: impl Fn() -> io::Result<File>) -> io::Result<File> {
        match open() {
            Err(cause) if no_descriptor_left(&cause) => {
                self.close_half();
                open()
            }
            opened => opened,
        }
    }

    /// Takes a file in that was opened again. If another thread was first, its file is returned, and this one closed.
    pub fn put(&self, number: Number, file: File) -> Arc<File> {
        let file = Arc::new(file);
        let mut table = self.table.lock();
        if let Some(first) = table.open.get(&number) {
            return Arc::clone(first);
        }
        insert(table, number, Arc::clone(&file));
        file
    }

    /// Closes the half of the files that was used longest ago. Those of operations under way are closed as these end.
    pub fn close_half(&self) {
        let mut table = self.table.lock();
        let half = table.open.len().div_ceil(2);
        let closed: Vec<_> = (0..half).filter_map(|_| table.open.pop_lru()).collect();
        drop(table);
        drop(closed);
    }

    /// Forgets a file.
    pub fn forget(&self, number: Number) {
        let closed = self.table.lock().open.pop(&number);
        drop(closed);
    }
}

/// Whether a call failed because the process, or the system, has as many descriptors as it may.
pub fn no_descriptor_left(cause: &io::Error) -> bool {
    matches!(cause.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// Puts a file in. The one that makes room for it is closed after the lock was given up (invariant 3).
fn insert(mut table: MutexGuard<'_, Table>, number: Number, file: Arc<File>) {
    let closed = table.open.push(number, file);
    drop(table);
    drop(closed);
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::error::ErrorKind;
    use crate::store::file::{DirectIo, FileUse, OpenFile};

    #[test]
    fn files_used_last_stay_open_and_others_are_opened_again() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = |name: &str| folder.path().join(name);
        let table = Arc::new(Descriptors::of(NonZeroUsize::new(2).unwrap()));
        let open = |path: &Path| {
            fs::write(path, [7; 5000]).unwrap();
            let file = File::open(path).unwrap();
            OpenFile::open(file, path.to_owned(), FileUse::Model, DirectIo::Preferred, &table).unwrap()
        };
        let [a, b, c] = ["a", "b", "c"].map(|name| open(&path(name)));
        let open_now = || table.table.lock().open.len();
        assert_eq!(open_now(), 2);
        for file in [&a, &b, &c, &a] {
            let held = file.handle().unwrap();
            assert!(held.is_some() && file.check_identity(held.as_deref()).is_ok());
            assert_eq!(open_now(), 2);
        }
        // One that was replaced meanwhile is not read, and one that is gone is named.
        fs::write(path("new"), [8; 5000]).unwrap();
        fs::rename(path("new"), path("b")).unwrap();
        assert!(c.handle().is_ok());
        let error = b.handle().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ModelChanged);
        assert!(error.to_string().contains("another file"), "{error}");
        fs::remove_file(path("b")).unwrap();
        let error = b.handle().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("/b again"), "{error}");
        // A file that is open needs no name.
        assert!(a.handle().is_ok());
        fs::remove_file(path("a")).unwrap();
        assert!(a.handle().is_ok());
        drop(a);
        assert_eq!(open_now(), 1);
    }

    #[test]
    fn without_a_descriptor_left_half_are_closed() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let table = Descriptors::of(NonZeroUsize::new(8).unwrap());
        fs::write(folder.path().join("a"), "a").unwrap();
        let open = || File::open(folder.path().join("a"));
        let numbers: Vec<Number> = (0..8).map(|_| table.add(open().unwrap())).collect();
        table.forget(numbers[7]);
        let tries = std::cell::Cell::new(0);
        let refused_once = || {
            tries.set(tries.get() + 1);
            if tries.get() == 1 { Err(io::Error::from_raw_os_error(libc::EMFILE)) } else { open() }
        };
        let opened = table.open(refused_once).unwrap();
        assert_eq!((tries.get(), table.table.lock().open.len()), (2, 7 - 4));
        let first = table.put(numbers[7], opened);
        assert!(Arc::ptr_eq(&table.put(numbers[7], open().unwrap()), &first));
        let error = table.open(|| Err(io::Error::from_raw_os_error(libc::ENOENT))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
