//! The operations on a folder that a store needs, on the system's files and in memory. Tests put their own between, to
//! record them and to have them fail.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use outcore::os::folder::Access;
use outcore::os::folder::Folder;
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fallocate};

/// The name of the file that is locked, with the folder.
pub const LOCK: &str = "lock";

/// A folder.
pub trait Files: Debug + Send + Sync {
    /// Opens a file of this folder.
    ///
    /// # Errors
    /// What the system says. [`io::ErrorKind::NotFound`] if there is none.
    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn OpenFile>>;
    /// Gives a file another name. A file that had that name is gone.
    ///
    /// # Errors
    /// What the system says.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file.
    ///
    /// # Errors
    /// What the system says.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// The names of all files.
    ///
    /// # Errors
    /// What the system says.
    fn list(&self) -> io::Result<Vec<String>>;
    /// When this returns, files that were made, renamed and removed stay so.
    ///
    /// # Errors
    /// What the system says.
    fn sync_folder(&self) -> io::Result<()>;
    /// Holds the folder until what is returned is dropped. `None` if somebody else does. Those who only read may hold
    /// it together.
    ///
    /// # Errors
    /// What the system says.
    fn lock(&self, access: Access) -> io::Result<Option<Box<dyn Any + Send + Sync>>>;
}

/// An open file.
pub trait OpenFile: Debug + Send + Sync {
    /// Fills `into` with the file's bytes from `at` on.
    ///
    /// # Errors
    /// What the system says. [`io::ErrorKind::UnexpectedEof`] if the file ends before.
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()>;
    /// Writes all these bytes.
    ///
    /// # Errors
    /// What the system says. Some bytes may have been written.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;
    /// When this returns, what was written stays so, and the file's length too.
    ///
    /// # Errors
    /// What the system says. What was written since the last success may be lost.
    fn sync(&self) -> io::Result<()>;
    /// As [`sync`](Self::sync), and what was erased stays so too.
    ///
    /// # Errors
    /// As [`sync`](Self::sync).
    fn sync_all(&self) -> io::Result<()>;
    /// Makes zeros of this range, and gives its room back to the file system where that is possible.
    ///
    /// # Errors
    /// What the system says.
    fn erase(&self, at: u64, len: u64) -> io::Result<()>;
    /// Cuts the file to this length.
    ///
    /// # Errors
    /// What the system says.
    fn cut(&self, len: u64) -> io::Result<()>;
    /// The file's length in bytes.
    ///
    /// # Errors
    /// What the system says.
    fn length(&self) -> io::Result<u64>;
}

impl Files for Folder {
    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn OpenFile>> {
        Ok(Arc::new(Self::open(self, name, access)?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Self::rename(self, from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        Self::remove(self, name)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        // A name that is not UTF-8 is none of a store's.
        self.names()
    }

    fn sync_folder(&self) -> io::Result<()> {
        self.sync()
    }

    fn lock(&self, access: Access) -> io::Result<Option<Box<dyn Any + Send + Sync>>> {
        let lock = Self::lock(self, LOCK, access)?;
        Ok(lock.map(|lock| Box::new(lock) as Box<dyn Any + Send + Sync>))
    }
}

impl OpenFile for File {
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.read_exact_at(into, at)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn sync_all(&self) -> io::Result<()> {
        File::sync_all(self)
    }

    fn erase(&self, at: u64, len: u64) -> io::Result<()> {
        if fallocate(self, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len).is_ok() {
            return Ok(());
        }
        // Not every file system makes holes.
        let zeros = vec![0; len.min(1 << 20) as usize];
        let mut done = 0;
        while done < len {
            let part = (len - done).min(zeros.len() as u64);
            self.write_all_at(&zeros[..part as usize], at + done)?;
            done += part;
        }
        Ok(())
    }

    fn cut(&self, len: u64) -> io::Result<()> {
        self.set_len(len)
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }
}

/// A folder in memory, for tests.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    files: Arc<Mutex<BTreeMap<String, Arc<InMemory>>>>,
    held: Arc<AtomicBool>,
}

impl Memory {
    /// A folder with these files.
    pub fn with(files: impl IntoIterator<Item = (String, Vec<u8>)>) -> Self {
        let memory = Self::default();
        memory.files.lock().extend(files.into_iter().map(|(name, bytes)| (name, Arc::new(InMemory(bytes.into())))));
        memory
    }

    /// All files.
    pub fn contents(&self) -> BTreeMap<String, Vec<u8>> {
        self.files.lock().iter().map(|(name, file)| (name.clone(), file.0.lock().clone())).collect()
    }
}

#[derive(Debug)]
struct InMemory(Mutex<Vec<u8>>);

struct Held(Arc<AtomicBool>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Files for Memory {
    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn OpenFile>> {
        let mut files = self.files.lock();
        let old = files.get(name).cloned();
        match (access, old) {
            (Access::Create, Some(_)) => Err(io::ErrorKind::AlreadyExists.into()),
            (Access::Read | Access::Write, None) => Err(io::ErrorKind::NotFound.into()),
            (Access::Read | Access::Write, Some(file)) => Ok(file),
            (Access::Create | Access::Replace, _) => {
                let file = Arc::new(InMemory(Mutex::default()));
                files.insert(name.to_owned(), file.clone());
                Ok(file)
            }
        }
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut files = self.files.lock();
        let file = files.remove(from).ok_or(io::ErrorKind::NotFound)?;
        files.insert(to.to_owned(), file);
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.files.lock().remove(name).map(drop).ok_or(io::ErrorKind::NotFound.into())
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.files.lock().keys().cloned().collect())
    }

    fn sync_folder(&self) -> io::Result<()> {
        Ok(())
    }

    fn lock(&self, _: Access) -> io::Result<Option<Box<dyn Any + Send + Sync>>> {
        let free = !self.held.swap(true, Ordering::Acquire);
        Ok(free.then(|| Box::new(Held(self.held.clone())) as Box<dyn Any + Send + Sync>))
    }
}

impl OpenFile for InMemory {
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        let bytes = self.0.lock();
        let from = bytes.get(at as usize..).and_then(|rest| rest.get(..into.len()));
        into.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, from: &[u8], at: u64) -> io::Result<()> {
        let mut bytes = self.0.lock();
        let end = at as usize + from.len();
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[at as usize..end].copy_from_slice(from);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync_all(&self) -> io::Result<()> {
        Ok(())
    }

    fn erase(&self, at: u64, len: u64) -> io::Result<()> {
        let mut bytes = self.0.lock();
        let end = bytes.len().min((at + len) as usize);
        if let Some(range) = bytes.get_mut(at as usize..end) {
            range.fill(0);
        }
        Ok(())
    }

    fn cut(&self, len: u64) -> io::Result<()> {
        self.0.lock().resize(len as usize, 0);
        Ok(())
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.0.lock().len() as u64)
    }
}
