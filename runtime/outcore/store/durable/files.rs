//! The files of a folder on a disk.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::fstatvfs;
use rustix::io::Errno;

use super::ledger::Ledger;
use super::manifest::{self, Files, Opened, Part, Terms};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, PageSize};
use crate::os::folder::{Access, Folder, FolderLock};
use crate::os::limits::{effective_user, longest_file};
use crate::store::backend::operation::{CallHook, FolderCall, Injected};
use crate::store::file::{filesystem_name, is_memory, is_remote};
use crate::store::scratch::{fallocate, is_unsupported, slices};

const LOCK: &str = "lock";
const MANIFEST: &str = "manifest";
/// The manifest's name until the folder is whole.
const NEW: &str = "manifest.new";
const PAGES: &str = "pages";

/// An open folder, which no other process has open.
pub(crate) struct FolderFiles {
    path: PathBuf,
    manifest: File,
    pages: File,
    hook: Option<Arc<dyn CallHook>>,
    /// The file system has taken no room in advance, and that was said.
    sparse: AtomicBool,
    /// Dropped last.
    _lock: FolderLock,
}

impl fmt::Debug for FolderFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FolderFiles").field("manifest", &self.manifest).finish_non_exhaustive()
    }
}

impl FolderFiles {
    fn new(path: &Path, manifest: File, pages: File, hook: Option<Arc<dyn CallHook>>, lock: FolderLock) -> Self {
        Self { path: path.to_owned(), manifest, pages, hook, sparse: AtomicBool::new(false), _lock: lock }
    }

    /// Has a hook see all further calls.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn set_hook(&mut self, hook: Arc<dyn CallHook>) {
        self.hook = Some(hook);
    }

    /// Tells the hook of a call that comes next.
    ///
    /// # Errors
    /// What the hook has in place of that call.
    pub(crate) fn ask(&self, call: FolderCall) -> io::Result<()> {
        match self.hook.as_ref().map(|hook| hook.before_folder(call)) {
            Some(Injected::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
            _ => Ok(()),
        }
    }

    fn file(&self, part: Part) -> &File {
        match part {
            Part::Manifest => &self.manifest,
            Part::Pages => &self.pages,
        }
    }

    /// Takes room for so many bytes of pages.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn take_pages(&self, bytes: u64) -> io::Result<()> {
        self.take_room(Part::Pages, bytes)
    }

    /// A handle on the file of pages, for [`Store::add_file`](crate::store::Store::add_file).
    ///
    /// # Errors
    /// If the process has no file descriptor left.
    pub(crate) fn pages(&self) -> io::Result<File> {
        self.pages.try_clone()
    }
}

impl Files for FolderFiles {
    fn read(&self, part: Part, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match self.file(part).read_at(&mut bytes[done..], offset + done as u64) {
                Ok(0) => {
                    bytes[done..].fill(0);
                    return Ok(());
                }
                Ok(read) => done += read,
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => return Err(cause),
            }
        }
        Ok(())
    }

    fn write(&self, part: Part, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.ask(FolderCall::Write)?;
        self.file(part).write_all_at(bytes, offset)
    }

    fn sync(&self, part: Part) -> io::Result<()> {
        self.ask(match part {
            Part::Pages => FolderCall::SyncPages,
            Part::Manifest => FolderCall::SyncManifest,
        })?;
        self.file(part).sync_data()
    }

    fn length(&self, part: Part) -> io::Result<u64> {
        Ok(self.file(part).metadata()?.len())
    }

    fn take_room(&self, part: Part, bytes: u64) -> io::Result<()> {
        let (file, before) = (self.file(part), self.length(part)?);
        // A write beyond it would end the process by a signal, also within a file that is longer already.
        let most = longest_file();
        if bytes > most {
            let what = format!("no file of this process may be longer than {} (ulimit -f)", Bytes::new(most));
            return Err(io::Error::new(io::ErrorKind::StorageFull, what));
        }
        if bytes <= before {
            return Ok(());
        }
        self.ask(FolderCall::TakeRoom)?;
        // First, so that a request that cannot be met takes no room from anybody, even for a moment.
        let disk = fstatvfs(file)?;
        if u128::from(bytes - before) > u128::from(disk.f_bavail) * u128::from(disk.f_frsize) {
            return Err(Errno::NOSPC.into());
        }
        for (from, len) in slices(before, bytes - before) {
            match fallocate(file, 0, from, len) {
                Ok(()) => {}
                Err(cause) if is_unsupported(&cause) => {
                    if !self.sparse.swap(true, Ordering::Relaxed) {
                        tracing::info!(
                            folder = %self.path.display(),
                            "the file system does not preallocate: a write back or a commit may find the disk full"
                        );
                    }
                    return file.set_len(bytes);
                }
                Err(cause) => {
                    file.set_len(before)?;
                    return Err(cause);
                }
            }
        }
        Ok(())
    }
}

/// Opens the folder at `path`, and makes it if there is none.
///
/// # Errors
/// `PermissionDenied` if another process has it open, or if it is another user's, or others may write there.
/// `Unsupported` on a network file system, in memory, and for another version of the format. `InvalidArgument` if it
/// holds other things, or pages of another size. `Corrupt` if it is damaged. `NotFound` if the generation that was
/// asked for is not kept. For errors of the system, theirs.
pub(crate) fn open(path: &Path, terms: Terms, hook: Option<Arc<dyn CallHook>>) -> Result<(FolderFiles, Opened)> {
    let named = |error: Error| error.context(format!("open the durable folder {}", path.display()));
    open_files(path, terms, hook).map_err(named)
}

fn open_files(path: &Path, terms: Terms, hook: Option<Arc<dyn CallHook>>) -> Result<(FolderFiles, Opened)> {
    let io = |what: &str| {
        let what = what.to_owned();
        move |cause| Error::io(what, cause).remedy("give a folder on a local disk that this user may write to")
    };
    // A folder that is to have a certain generation is there.
    let folder = match terms.from {
        Some(_) => Folder::existing(path).map_err(io("find it"))?,
        None => Folder::make(path).map_err(io("make it"))?,
    };
    let filesystem = check_place(&folder)?;
    if copies_on_write(&filesystem) {
        tracing::warn!(
            folder = %path.display(),
            filesystem,
            "this file system keeps no room that was taken: a write back or a commit may find the disk full"
        );
    }
    let lock = folder.lock(LOCK, Access::Replace).map_err(io("lock it"))?.ok_or_else(is_open)?;
    let names = folder.names().map_err(io("list it"))?;
    if !names.iter().any(|name| name == MANIFEST) {
        if let Some(other) = names.iter().find(|name| ![LOCK, NEW, PAGES].contains(&name.as_str())) {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("it holds {other:?}, and no manifest"))
                .remedy("give a folder that is empty, does not exist, or was made for durable tensors"));
        }
        if let Some(from) = terms.from {
            return Err(Error::new(
                ErrorKind::NotFound,
                format!("it has no generation {from}: nothing was committed there"),
            )
            .remedy("open it without a generation"));
        }
        // What is there was not made to its end, so nothing was ever committed there.
        let pages = folder.open(PAGES, Access::Replace).map_err(io("make the file of pages"))?;
        let manifest = folder.open(NEW, Access::Replace).map_err(io("make the manifest"))?;
        let files = FolderFiles::new(path, manifest, pages, hook, lock);
        let number = draw_number().map_err(io("draw a number for it"))?;
        let ledger = Ledger::new(number, terms.page_bytes.unwrap_or(PageSize::DEFAULT.bytes()), terms.keep);
        manifest::create(&files, &ledger).map_err(io("write the manifest"))?;
        let named = files.ask(FolderCall::Name).and_then(|()| folder.rename(NEW, MANIFEST));
        let synced = named.and_then(|()| files.ask(FolderCall::SyncFolder)).and_then(|()| folder.sync());
        synced.map_err(io("name the manifest"))?;
        let opened = manifest::open(&files, terms)?;
        return Ok((files, opened));
    }
    let manifest = folder.open(MANIFEST, Access::Write).map_err(io("open the manifest"))?;
    let pages = folder.open(PAGES, Access::Write).map_err(io("open the file of pages"))?;
    let files = FolderFiles::new(path, manifest, pages, hook, lock);
    let opened = manifest::open(&files, terms)?;
    check_length(&files, &opened.ledger)?;
    Ok((files, opened))
}

/// Opens a folder that is there, to read it beside others who do so.
///
/// # Errors
/// As for [`open`]; `NotFound` if there is none.
pub(crate) fn open_to_read(path: &Path, terms: Terms) -> Result<(FolderFiles, Opened)> {
    let io = |cause| Error::io("find it", cause).remedy("give a folder that was made for durable tensors");
    let named = |error: Error| error.context(format!("read the durable folder {}", path.display()));
    let open = || {
        let folder = Folder::existing(path).map_err(io)?;
        check_place(&folder)?;
        let lock = folder.lock(LOCK, Access::Read).map_err(io)?.ok_or_else(is_open)?;
        let manifest = folder.open(MANIFEST, Access::Read).map_err(io)?;
        let pages = folder.open(PAGES, Access::Read).map_err(io)?;
        let files = FolderFiles::new(path, manifest, pages, None, lock);
        let opened = manifest::open(&files, terms)?;
        check_length(&files, &opened.ledger)?;
        Ok((files, opened))
    };
    open().map_err(named)
}

fn is_open() -> Error {
    Error::new(ErrorKind::PermissionDenied, "another process, or another part of this one, has it open")
        .remedy("close it there, or use another folder")
}

/// 16 bytes that no other folder has.
fn draw_number() -> io::Result<[u8; 16]> {
    let mut number = [0; 16];
    io::Read::read_exact(&mut File::open("/dev/urandom")?, &mut number)?;
    Ok(number)
}

/// Whether a file system of this name writes nothing in place. Room that was taken in advance serves the first write
/// there; each later one takes new room before the old one is given back.
fn copies_on_write(filesystem: &str) -> bool {
    matches!(filesystem, "btrfs" | "zfs")
}

/// Whether a folder may hold what nobody else may change, and keeps it. Returns the name of its file system.
fn check_place(folder: &Folder) -> Result<String> {
    let metadata = folder.file().metadata().map_err(|cause| Error::io("look at it", cause).remedy("check the disk"))?;
    let user = effective_user();
    if metadata.uid() != user {
        let what = format!("it is user {}'s, and this process is user {user}'s", metadata.uid());
        return Err(Error::new(ErrorKind::PermissionDenied, what).remedy("give a folder of this user's"));
    }
    if metadata.mode() & 0o022 != 0 {
        let what = format!("other users may write there (mode {:o})", metadata.mode() & 0o7777);
        return Err(Error::new(ErrorKind::PermissionDenied, what).remedy("take that right away: chmod go-w"));
    }
    let filesystem = filesystem_name(folder.file());
    if is_memory(&filesystem) {
        let what = format!("it is in memory ({filesystem}), where nothing outlives the machine's power");
        return Err(Error::new(ErrorKind::Unsupported, what).remedy("give a folder on a disk"));
    }
    if is_remote(&filesystem) {
        let what = format!("it is on {filesystem}, which does not say when bytes are durable");
        return Err(Error::new(ErrorKind::Unsupported, what).remedy("give a folder on a local disk"));
    }
    Ok(filesystem)
}

/// Whether the file of pages is as long as the head says.
fn check_length(files: &FolderFiles, ledger: &Ledger) -> Result<()> {
    let head = ledger.head();
    let len =
        files.pages.metadata().map_err(|cause| Error::io("look at its files", cause).remedy("check the disk"))?.len();
    let expected = head.slots.saturating_mul(head.page_bytes);
    if len < expected {
        let what = format!("its file of pages has {len} bytes, and {expected} belong to it");
        return Err(Error::new(ErrorKind::Corrupt, what).remedy("restore the folder from a copy"));
    }
    Ok(())
}

/// The folder's path, for messages.
pub(crate) fn named(path: &Path) -> PathBuf {
    path.join(PAGES)
}
