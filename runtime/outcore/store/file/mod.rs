//! Files as a store holds them: opened for direct I/O where that works, and known by an identity.

pub(crate) mod changes;
pub(crate) mod descriptors;

use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::{Error, ErrorKind, Result};
use crate::ids::Bytes;
use crate::os::descriptors::making;
use crate::store::IO_ALIGNMENT;
use crate::store::file::changes::Watch;
use crate::store::file::descriptors::{Descriptors, Number};
use crate::store::source::caught::CaughtSource;

/// What a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileUse {
    /// A model file: read only, its identity checked at every read.
    Model,
    /// The scratch file: read and written, no identity.
    Scratch,
}

/// Identifies one state of a file: if a field changes, the file has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// The device the file is on.
    pub device: u64,
    /// The file's number on that device.
    pub inode: u64,
    /// Length in bytes.
    pub size: u64,
    /// Time of the last change of content: seconds since 1970.
    pub modified_seconds: i64,
    /// The rest of that time, in nanoseconds.
    pub modified_nanoseconds: i64,
}

impl FileIdentity {
    /// The identity of an open file now.
    ///
    /// # Errors
    /// The error of `fstat`.
    pub fn of(file: &File) -> io::Result<Self> {
        file.metadata().map(|meta| Self::known_by(&meta))
    }

    fn known_by(meta: &Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
            size: meta.size(),
            modified_seconds: meta.mtime(),
            modified_nanoseconds: meta.mtime_nsec(),
        }
    }

    /// What differs in `now`, in words; `None` if nothing does.
    pub fn difference(&self, now: &Self) -> Option<String> {
        let mut changes = Vec::new();
        if (self.device, self.inode) != (now.device, now.inode) {
            changes.push(format!(
                "it is another file (device:inode {}:{}, was {}:{})",
                now.device, now.inode, self.device, self.inode
            ));
        }
        if self.size != now.size {
            changes.push(format!("its size went from {} to {} bytes", self.size, now.size));
        }
        let time = |of: &Self| (of.modified_seconds, of.modified_nanoseconds);
        if time(self) != time(now) {
            changes.push(format!(
                "its modification time went from {}.{:09} to {}.{:09}",
                self.modified_seconds, self.modified_nanoseconds, now.modified_seconds, now.modified_nanoseconds
            ));
        }
        (!changes.is_empty()).then(|| changes.join(", "))
    }
}

/// Whether files are opened with O_DIRECT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DirectIo {
    /// A file system that refuses O_DIRECT is an error.
    Required,
    /// A file on a file system that refuses O_DIRECT goes through the page cache.
    Preferred,
    /// All files go through the page cache.
    Never,
}

/// A file in a store. Closed when the last operation that names it has ended.
pub(crate) struct OpenFile {
    content: Content,
    path: PathBuf,
    direct: bool,
    writable: bool,
    remote: bool,
    identity: Option<Identity>,
    /// The time of the last change of any kind, up to which the file is known to be unchanged.
    changed: Mutex<ChangeTime>,
    /// Tells whether it was written, if the system can.
    watch: Option<Watch>,
}

/// Seconds since 1970 and nanoseconds.
type ChangeTime = (i64, i64);

fn change_time(of: &Metadata) -> ChangeTime {
    (of.ctime(), of.ctime_nsec())
}

/// Where a file's bytes come from.
enum Content {
    /// A file that stays open: it may have no name any more, or a file system that may not answer serves it.
    Kept(Arc<File>),
    /// A file that may be closed, and is opened again by its path.
    Closable(Arc<Descriptors>, Number),
    Source(Arc<CaughtSource>),
}

/// What tells one state of a file or a source from another.
enum Identity {
    File(FileIdentity),
    Source(u64),
}

impl OpenFile {
    /// # Errors
    /// If the source panics.
    pub fn of_source(source: Arc<CaughtSource>) -> Result<Self> {
        let identity = Some(Identity::Source(source.identity()?));
        let (path, content) = (source.name().into(), Content::Source(source));
        let (changed, watch) = (Mutex::default(), None);
        Ok(Self { content, path, direct: false, writable: false, remote: true, identity, changed, watch })
    }

    /// The source that has the bytes; none for a file, which the kernel reads.
    pub fn source(&self) -> Option<&CaughtSource> {
        match &self.content {
            Content::Source(source) => Some(source),
            _ => None,
        }
    }

    pub fn open(file: File, path: PathBuf, usage: FileUse, direct: DirectIo, table: &Arc<Descriptors>) -> Result<Self> {
        let failed = |cause| Error::io(format!("open {}", path.display()), cause);
        let kind = file.metadata().map_err(failed)?.file_type();
        if !(kind.is_file() || kind.is_block_device()) {
            return Err(not_a_file(&path));
        }
        // Watched first: what is written after that is seen.
        let watch =
            if usage == FileUse::Model { table.changes().and_then(|changes| changes.watch(&file)) } else { None };
        let meta = file.metadata().map_err(failed)?;
        let identity = (usage == FileUse::Model).then(|| Identity::File(FileIdentity::known_by(&meta)));
        let (writable, remote) = (usage == FileUse::Scratch, is_remote(&filesystem_name(&file)));
        let direct_file = match direct {
            DirectIo::Never => None,
            DirectIo::Required | DirectIo::Preferred => match open_direct(&file, writable) {
                Ok(direct_file) => Some(direct_file),
                // Only the file system may refuse it: what the process lacks is not the file's fault.
                Err(cause) if matches!(cause.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => {
                    return Err(failed(cause).remedy("see how many files a process may have open (ulimit -n)"));
                }
                Err(cause) if direct == DirectIo::Required => return Err(direct_refused(&file, &path, cause)),
                Err(cause) => {
                    tracing::info!(
                        path = %path.display(),
                        filesystem = filesystem_name(&file),
                        %cause,
                        "no direct I/O for this file: going through the page cache"
                    );
                    None
                }
            },
        };
        let direct = direct_file.is_some();
        let file = direct_file.unwrap_or(file);
        stop_readahead(&file, direct);
        // A later change of the current folder changes nothing.
        let named =
            std::path::absolute(&path).ok().filter(|path| !(path.starts_with("/proc") || path.starts_with("/dev")));
        let (content, path) = match named.filter(|_| usage == FileUse::Model && !remote) {
            Some(named) => (Content::Closable(Arc::clone(table), table.add(file)), named),
            None => (Content::Kept(Arc::new(file)), path),
        };
        let changed = Mutex::new(change_time(&meta));
        Ok(Self { content, path, direct, writable, remote, identity, changed, watch })
    }

    /// The file, for an operation that begins: opened again if it was closed. `None` for a source.
    ///
    /// # Errors
    /// `ModelChanged` if its path has another file by now, or the file has changed; errors of opening it.
    pub fn handle(&self) -> Result<Option<Arc<File>>> {
        if let Some(file) = self.handle_now() {
            return Ok(Some(file));
        }
        let Content::Closable(table, number) = &self.content else { return Ok(None) };
        let again = || {
            let flags = libc::O_NONBLOCK | if self.direct { libc::O_DIRECT } else { 0 };
            let file = OpenOptions::new().read(true).custom_flags(flags).open(&self.path)?;
            stop_readahead(&file, self.direct);
            Ok(file)
        };
        let file = table.open(again).map_err(|cause| {
            let error = Error::io(format!("open {} again", self.path.display()), cause);
            error.remedy(
                "leave the model's files where they are while they are in use, and see how many a process may have open \
                 (ulimit -n)",
            )
        })?;
        self.check_identity(Some(&file))?;
        Ok(Some(table.put(*number, file)))
    }

    /// The file if it is open. Never waits for the system. `None` for a source.
    pub fn handle_now(&self) -> Option<Arc<File>> {
        match &self.content {
            Content::Kept(file) => Some(Arc::clone(file)),
            Content::Closable(table, number) => table.get(*number),
            Content::Source(_) => None,
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
    pub fn is_direct(&self) -> bool {
        self.direct
    }
    pub fn is_writable(&self) -> bool {
        self.writable
    }
    /// Whether another machine or a program serves the file, so that even a question about it may stay unanswered.
    pub fn is_remote(&self) -> bool {
        self.remote
    }
    pub fn has_identity(&self) -> bool {
        self.identity.is_some()
    }

    /// Fails if the file, of which an operation has this handle, has changed since it was taken in. Never fails for a
    /// file without identity.
    pub fn check_identity(&self, handle: Option<&File>) -> Result<()> {
        let difference = match (&self.identity, &self.content, handle) {
            (Some(Identity::File(then)), _, Some(file)) => {
                let now = file
                    .metadata()
                    .map_err(|cause| Error::io(format!("check that {} is unchanged", self.path.display()), cause))?;
                then.difference(&FileIdentity::known_by(&now)).or_else(|| self.written_behind(change_time(&now)))
            }
            (Some(Identity::Source(then)), Content::Source(source), _) => {
                let now = source.identity()?;
                (*then != now).then(|| format!("its identity went from {then:#x} to {now:#x}"))
            }
            _ => None,
        };
        match difference {
            None => Ok(()),
            Some(what) => Err(Error::new(
                ErrorKind::ModelChanged,
                format!("{} changed while it was open: {what}", self.path.display()),
            )
            .remedy("reopen the model")),
        }
    }

    /// Says if the file was written, and its modification time put back, before this time of its last change.
    fn written_behind(&self, now: ChangeTime) -> Option<String> {
        let mut changed = self.changed.lock();
        if *changed == now {
            return None;
        }
        if self.watch.as_ref().is_some_and(Watch::is_written) {
            return Some("it was written, and its modification time was put back".to_owned());
        }
        // It has another name, or other rights.
        *changed = now;
        None
    }

    /// Drops a range from the page cache, so that buffered I/O takes no memory outside the budgets. Dirty pages start
    /// to be written out; a later call drops them.
    pub fn drop_cache(&self, handle: Option<&File>, offset: u64, len: u32) {
        if let Some(file) = handle
            && !self.direct
        {
            advise(file, offset, u64::from(len), libc::POSIX_FADV_DONTNEED);
        }
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        if let Content::Closable(table, number) = &self.content {
            table.forget(*number);
        }
    }
}

impl fmt::Debug for OpenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenFile").field("path", &self.path).field("direct", &self.direct).finish_non_exhaustive()
    }
}

/// Pages are read whole and in an order of our own: what the kernel reads ahead of them would be thrown away. Direct
/// I/O has no read-ahead.
fn stop_readahead(file: &File, direct: bool) {
    if !direct {
        advise(file, 0, 0, libc::POSIX_FADV_RANDOM);
    }
}

fn advise(file: &File, offset: u64, len: u64, advice: libc::c_int) {
    // SAFETY: the descriptor is open for as long as `file` is borrowed; the call touches no memory of ours.
    // It is advice: a refusal changes nothing but the size of the page cache.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), offset as libc::off_t, len as libc::off_t, advice) };
}

/// The alignment that O_DIRECT needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectAlignment {
    /// Memory addresses are multiples of this.
    pub memory: Bytes,
    /// File offsets and lengths are multiples of this.
    pub offset: Bytes,
}

impl DirectAlignment {
    /// Why operations, which are multiples of [`IO_ALIGNMENT`], cannot be direct; `None` if they can.
    fn refusal(self) -> Option<String> {
        let fits = |needed: Bytes| needed == Bytes::ZERO || IO_ALIGNMENT.is_multiple_of(needed.get());
        let least = Bytes::new(IO_ALIGNMENT);
        let Self { memory, offset } = self;
        (!(fits(memory) && fits(offset))).then(|| {
            format!("it needs offsets in multiples of {offset} and memory in multiples of {memory}, more than {least}")
        })
    }
}

/// `STATX_DIOALIGN` of a file, where the kernel tells (Linux 6.1 on).
pub(crate) fn direct_alignment(file: &File) -> Option<DirectAlignment> {
    // SAFETY: statx is plain data, for which all zero bytes is a value.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    let (fd, mask) = (file.as_raw_fd(), libc::STATX_DIOALIGN);
    // SAFETY: the descriptor is open, the path is an empty C string, and `stat` is valid for writing.
    if unsafe { libc::statx(fd, c"".as_ptr(), libc::AT_EMPTY_PATH, mask, &raw mut stat) } != 0 {
        return None;
    }
    (stat.stx_mask & mask != 0 && stat.stx_dio_offset_align != 0).then(|| DirectAlignment {
        memory: Bytes::new(stat.stx_dio_mem_align.into()),
        offset: Bytes::new(stat.stx_dio_offset_align.into()),
    })
}

/// Opens the same file again with O_DIRECT, and reads once to see that it works.
pub(crate) fn open_direct(file: &File, writable: bool) -> io::Result<File> {
    // Through /proc, because the path may name another file by now, or none.
    let reopened = OpenOptions::new()
        .read(true)
        .write(writable)
        .custom_flags(libc::O_DIRECT)
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let direct = match reopened {
        Ok(direct) => direct,
        Err(cause) if cause.raw_os_error() == Some(libc::EINVAL) => return Err(cause),
        // No /proc, or a descriptor to a file that may not be opened anew: change the flags of the one we have.
        Err(_) => {
            let ours = making(|| file.try_clone())?;
            set_direct(&ours)?;
            ours
        }
    };
    if let Some(why) = direct_alignment(&direct).and_then(DirectAlignment::refusal) {
        return Err(io::Error::new(io::ErrorKind::Unsupported, why));
    }
    let mut page = AlignedPage([0; IO_ALIGNMENT as usize]);
    loop {
        // SAFETY: `page` is valid for IO_ALIGNMENT bytes and outlives the call, which blocks.
        let got = unsafe { libc::pread(direct.as_raw_fd(), page.0.as_mut_ptr().cast(), page.0.len(), 0) };
        if got >= 0 {
            return Ok(direct);
        }
        let cause = io::Error::last_os_error();
        if cause.kind() != io::ErrorKind::Interrupted {
            return Err(cause);
        }
    }
}

/// Opens a file for reading, without waiting where the path is a pipe.
pub(crate) fn open_to_read(path: &Path) -> Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    file.map_err(|cause| Error::io(format!("open {}", path.display()), cause))
}

pub(crate) fn not_a_file(path: &Path) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("{} is not a regular file", path.display()))
        .remedy("give the path of a file, not of a directory, pipe or socket")
}

/// The `statvfs` of the file system of `file`.
pub(crate) fn file_system(file: &File) -> Option<libc::statvfs> {
    // SAFETY: statvfs is plain data, for which all zero bytes is a value.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, and `stat` is valid for writing.
    let answer = unsafe { libc::fstatvfs(file.as_raw_fd(), &raw mut stat) };
    (answer == 0).then_some(stat)
}

#[repr(C, align(4096))]
struct AlignedPage([u8; IO_ALIGNMENT as usize]);

fn set_direct(file: &File) -> io::Result<()> {
    // SAFETY: F_GETFL on an open descriptor touches no memory of ours.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: F_SETFL on an open descriptor touches no memory of ours.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags | libc::O_DIRECT) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn direct_refused(file: &File, path: &Path, cause: io::Error) -> Error {
    let why = match cause.kind() {
        io::ErrorKind::Unsupported => format!(" for outcore: {cause}"),
        _ if cause.raw_os_error() == Some(libc::EINVAL) => String::new(),
        _ => return Error::io(format!("open {} for direct I/O", path.display()), cause),
    };
    let what = format!("the file system of {} ({}) does not support O_DIRECT", path.display(), filesystem_name(file));
    Error::new(ErrorKind::Unsupported, what + &why)
        .remedy("use the I/O backend `buffered` (RuntimeBuilder::io), or a file system such as ext4 or xfs")
        .caused_by(cause)
}

/// The name of an overlay file system that keeps its files in memory.
const OVERLAY_IN_MEMORY: &str = "overlayfs in memory";

/// Whether a file system of this [name](filesystem_name) keeps its files in memory.
pub(crate) fn is_memory(filesystem: &str) -> bool {
    matches!(filesystem, "tmpfs" | "ramfs" | OVERLAY_IN_MEMORY)
}

/// Whether the file system of `file` says where on a disk its bytes are.
fn has_extents(file: &File) -> bool {
    /// `struct fiemap` with room for no extent: then the kernel only counts them.
    #[repr(C)]
    struct Count {
        start: u64,
        length: u64,
        flags: u32,
        mapped: u32,
        room: u32,
        reserved: u32,
    }
    const FS_IOC_FIEMAP: libc::Ioctl = libc::_IOWR::<Count>(b'f' as u32, 11);
    let mut count = Count { start: 0, length: u64::MAX, flags: 0, mapped: 0, room: 0, reserved: 0 };
    // SAFETY: the descriptor is open, and the kernel writes no more than `count`, which has room for no extent.
    unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP, &raw mut count) == 0 }
}

/// Whether another machine, or a program on this one, serves a file system of this [name](filesystem_name).
pub(crate) fn is_remote(filesystem: &str) -> bool {
    matches!(filesystem, "nfs" | "fuse" | "9p" | "lustre" | "smb" | "ceph" | "gpfs" | "afs" | "orangefs")
}

/// The name of a file's file system, such as `"ext4"`; [`OVERLAY_IN_MEMORY`]; or the magic number of one without a name
/// here.
pub(crate) fn filesystem_name(file: &File) -> String {
    // SAFETY: statfs is plain data, for which all zero bytes is a value.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, and `stat` is valid for writing.
    if unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut stat) } != 0 {
        return "unknown".into();
    }
    let name = match stat.f_type as u64 {
        0xEF53 => "ext4",
        0x5846_5342 => "xfs",
        0x9123_683E => "btrfs",
        0x0102_1994 => "tmpfs",
        0x8584_58F6 => "ramfs",
        // An overlay keeps its files in another file system and does not say in which. Of the file systems it can use,
        // those on a disk have extents, except ZFS, which is taken for memory.
        0x794C_7630 if file.metadata().is_ok_and(|meta| meta.is_file()) && !has_extents(file) => OVERLAY_IN_MEMORY,
        0x794C_7630 => "overlayfs",
        0x6969 => "nfs",
        0x6573_5546 => "fuse",
        0x2FC1_2FC1 => "zfs",
        0xF2F5_2010 => "f2fs",
        0x0102_1997 => "9p",
        0x9FA0 => "proc",
        0x0BD0_0BD0 => "lustre",
        0xFF53_4D42 | 0xFE53_4D42 => "smb",
        0x00C3_6400 => "ceph",
        0x4750_4653 => "gpfs",
        0x5346_414F | 0x6B41_4653 => "afs",
        0x2003_0528 => "orangefs",
        magic => return format!("type {magic:#x}"),
    };
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn difference_names_each_change() {
        let then = FileIdentity { device: 1, inode: 2, size: 30, modified_seconds: 4, modified_nanoseconds: 5 };
        assert_eq!(then.difference(&then), None);
        let shorter = FileIdentity { size: 29, ..then };
        assert_eq!(then.difference(&shorter).unwrap(), "its size went from 30 to 29 bytes");
        let all = FileIdentity { inode: 3, size: 29, modified_nanoseconds: 6, ..then };
        assert_eq!(then.difference(&all).unwrap().matches(", its ").count(), 2);
    }

    #[test]
    fn direct_io_in_larger_blocks_than_ours_is_refused() {
        let of = |memory, offset| DirectAlignment { memory: Bytes::new(memory), offset: Bytes::new(offset) }.refusal();
        for (memory, offset) in [(1, 512), (4, 4096), (512, 512), (4096, 4096), (0, 4096)] {
            assert_eq!(of(memory, offset), None);
        }
        let blocks = of(512, 16 << 10).unwrap();
        assert!(blocks.contains("16.0 KiB") && blocks.contains("more than 4.0 KiB"), "{blocks}");
        assert!(of(8192, 512).is_some());
        let file = tempfile::tempfile().unwrap();
        let error = direct_refused(&file, Path::new("a"), io::Error::new(io::ErrorKind::Unsupported, blocks));
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("16.0 KiB"), "{error}");
    }

    #[test]
    fn a_disk_has_extents_and_memory_has_none() {
        let named = |folder: &std::path::Path| {
            let file = tempfile::tempfile_in(folder).ok()?;
            Some((filesystem_name(&file), has_extents(&file)))
        };
        for folder in [std::path::Path::new(env!("CARGO_MANIFEST_DIR")), "/dev/shm".as_ref()] {
            match named(folder) {
                Some((name, extents)) if matches!(name.as_str(), "tmpfs" | "ext4" | "xfs" | "btrfs") => {
                    assert_eq!(extents, !is_memory(&name), "{name}");
                }
                other => eprintln!("SKIPPED {}: {other:?}", folder.display()),
            }
        }
    }

    #[test]
    fn refusal_of_direct_io_is_an_error_only_where_required() {
        let open = |direct| {
            let path = PathBuf::from("/proc/version");
            OpenFile::open(File::open(&path).unwrap(), path, FileUse::Model, direct, &Arc::new(Descriptors::new()))
        };
        let error = open(DirectIo::Required).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let text = error.to_string();
        let named = text.contains("/proc/version") && text.contains("proc)");
        assert!(named && text.contains("I/O backend `buffered`"), "{text}");
        assert!(!open(DirectIo::Preferred).unwrap().is_direct());
        assert!(!open(DirectIo::Never).unwrap().is_direct());
    }
}
