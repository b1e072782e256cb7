//! The operations on a folder that a store needs, on the system's files and in memory. Tests put their own between, to
//! record them and to have them fail.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, OFlags, fallocate};

/// The name of the file that is locked.
const LOCK: &str = "lock";

/// How [`Files::open`] opens a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// There must be such a file.
    Read,
    /// There must be such a file.
    Write,
    /// There must be no such file yet.
    Create,
    /// An old one is emptied.
    Replace,
}

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

/// A folder of the system's.
#[derive(Debug)]
pub struct Disk(PathBuf);

impl Disk {
    /// This folder, which is made if there is none. Nobody else can look into a folder that is made here.
    ///
    /// # Errors
    /// What the system says.
    pub fn make(folder: &Path) -> io::Result<Self> {
        let absolute = std::path::absolute(folder)?;
        let mut missing: Vec<&Path> = absolute.ancestors().take_while(|path| !path.exists()).collect();
        while let Some(path) = missing.pop() {
            match fs::DirBuilder::new().mode(0o700).create(path) {
                Err(cause) if cause.kind() != io::ErrorKind::AlreadyExists => return Err(cause),
                _ => {}
            }
            // A folder is an entry of the one above, which must last too.
            File::open(path.parent().unwrap_or(path))?.sync_all()?;
        }
        Self::existing(&absolute)
    }

    /// This folder, if there is one.
    ///
    /// # Errors
    /// What the system says.
    pub fn existing(folder: &Path) -> io::Result<Self> {
        if !fs::metadata(folder)?.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        Ok(Self(folder.to_owned()))
    }

    fn file(&self, name: &str, access: Access) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(access != Access::Read).mode(0o600);
        // Neither links nor pipes are a store's.
        options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32);
        match access {
            Access::Create => options.create_new(true),
            Access::Replace => options.create(true).truncate(true),
            Access::Read | Access::Write => &mut options,
        };
        let file = options.open(self.0.join(name))?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        Ok(file)
    }
}

/// A locked file. It is unlocked by hand, because a child that is just being started has it open too for a moment.
#[derive(Debug)]
struct Locked(File);

impl Drop for Locked {
    fn drop(&mut self) {
        if let Err(cause) = self.0.unlock() {
            tracing::debug!(%cause, "a folder stays locked until its file is closed everywhere");
        }
    }
}

impl Files for Disk {
    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn OpenFile>> {
        Ok(Arc::new(self.file(name, access)?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.0.join(from), self.0.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.0.join(name))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        // A name that is no text is none of ours.
        let names = fs::read_dir(&self.0)?.map(|entry| Ok(entry?.file_name().into_string().ok()));
        names.filter_map(Result::transpose).collect()
    }

    fn sync_folder(&self) -> io::Result<()> {
        File::open(&self.0)?.sync_all()
    }

    fn lock(&self, access: Access) -> io::Result<Option<Box<dyn Any + Send + Sync>>> {
        let file = self.file(LOCK, access)?;
        // Several may look into it at once.
        let locked = if access == Access::Read { file.try_lock_shared() } else { file.try_lock() };
        match locked {
            Ok(()) => Ok(Some(Box::new(Locked(file)))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(cause)) => Err(cause),
        }
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
