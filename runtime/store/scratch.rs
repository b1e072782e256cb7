//! The scratch file: where dirty pages go that no frame has room for.
//!
//! # Invariants
//!
//! 1. The file only grows, and every slot below its end has its blocks: a write-back into a reserved slot does not find
//!    the disk full (on file systems that preallocate).
//! 2. A slot belongs to one [`SlotRun`] or is free. Runs are contiguous, so that a tensor's pages are one range of the
//!    file. Free neighbours are one free range.
//! 3. A slot's checksum is that of the bytes last recorded for it since it was reserved.
//!
//! One lock guards the slots. It is held while the file grows, and never while a page is read or written.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::mem;
use std::num::NonZeroU64;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use twox_hash::XxHash3_64;

use super::file::{filesystem_name, is_memory};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, PageSize};

/// The file grows by multiples of this.
const EXTENT: u64 = 2 << 20;
/// Names tried before giving up on finding one that is free.
const NAMES: u32 = 16;

/// A page-sized place in the scratch file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotIndex(u64);

impl SlotIndex {
    /// The slot's number, from the start of the file.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for SlotIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A scratch file and its slots. Cheap to clone; the file goes when the last clone and the last run are gone.
#[derive(Clone, Debug)]
pub struct ScratchFile(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    file: File,
    directory: PathBuf,
    /// Where the file can be found, if it was to persist.
    path: Option<PathBuf>,
    page_size: PageSize,
    in_memory: bool,
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    /// How many exist.
    count: u64,
    /// Free ranges: first slot to number of slots.
    free: BTreeMap<u64, u64>,
    checksums: Vec<Option<NonZeroU64>>,
    /// The file system does not preallocate.
    sparse: bool,
}

impl ScratchFile {
    /// Creates a scratch file in `directory` for pages of `page_size`, readable and writable by its owner only. Unless
    /// it is to `persist`, it has no name, and its space is free as soon as the process ends, however it ends.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] or [`ErrorKind::PermissionDenied`] if the directory does not take files;
    /// [`ErrorKind::Io`] for what else the operating system reports.
    pub fn create(directory: &Path, page_size: PageSize, persist: bool) -> Result<Self> {
        let failed = |cause| {
            Error::io(format!("create the scratch file in {}", directory.display()), cause)
                .remedy("give a directory that exists and may be written to")
        };
        let (file, path) = if persist {
            create_named(directory).map(|(file, path)| (file, Some(path)))
        } else {
            create_unnamed(directory).map(|file| (file, None))
        }
        .map_err(failed)?;
        let in_memory = is_memory(&filesystem_name(&file));
        let inner = Inner { file, directory: directory.into(), path, page_size, in_memory, slots: Mutex::default() };
        Ok(Self(Arc::new(inner)))
    }

    /// A handle on the file, for [`Store::add_file`](super::Store::add_file).
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if the process has no file descriptor left.
    pub fn handle(&self) -> Result<File> {
        self.0.file.try_clone().map_err(|cause| {
            Error::io(format!("open the scratch file in {} again", self.0.directory.display()), cause)
                .remedy("raise the limit on open files (ulimit -n)")
        })
    }

    /// Where the file is, or for a file without a name the directory it is in: for messages.
    pub fn path(&self) -> &Path {
        self.0.path.as_deref().unwrap_or(&self.0.directory)
    }

    /// Reserves contiguous slots for `bytes` bytes, growing the file where no free run is long enough.
    ///
    /// # Errors
    /// [`ErrorKind::DiskFull`] if the file system has no room; nothing is then reserved.
    /// [`ErrorKind::InvalidArgument`] for no bytes, or more than a file can have.
    pub fn reserve(&self, bytes: Bytes) -> Result<SlotRun> {
        let wanted = self.0.page_size.pages_for(bytes.get());
        if wanted == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, "no scratch space was asked for")
                .remedy("reserve at least 1 byte"));
        }
        let mut slots = self.0.slots.lock();
        let first = match slots.take(wanted) {
            Some(first) => first,
            None => {
                self.0.grow(&mut slots, wanted)?;
                slots.take(wanted).ok_or_else(|| {
                    Error::new(ErrorKind::Internal, format!("the scratch file grew by less than {wanted} slots"))
                        .remedy("report this as a bug")
                })?
            }
        };
        drop(slots);
        Ok(SlotRun { scratch: self.clone(), first, count: wanted })
    }

    /// The byte of the file at which a slot starts.
    pub fn offset_of(&self, slot: SlotIndex) -> u64 {
        slot.0 * self.0.page_size.bytes()
    }

    /// Whether its file system is memory: then what is written back to it leaves no memory.
    pub fn is_in_memory(&self) -> bool {
        self.0.in_memory
    }

    /// Its length, and what of that no run holds; nothing while it grows, which takes long.
    pub(crate) fn room(&self) -> Option<(Bytes, Bytes)> {
        let slots = self.0.slots.try_lock()?;
        let page = self.0.page_size.bytes();
        Some((Bytes::new(slots.count * page), Bytes::new(slots.free_count() * page)))
    }

    /// The length of the file.
    pub fn size(&self) -> Bytes {
        Bytes::new(self.0.slots.lock().count * self.0.page_size.bytes())
    }

    /// What of the file no run holds.
    pub fn free(&self) -> Bytes {
        Bytes::new(self.0.slots.lock().free_count() * self.0.page_size.bytes())
    }

    /// The checksum of a page's bytes, to be [recorded](Self::record) when they are in their slot.
    pub fn checksum(bytes: &[u8]) -> u64 {
        XxHash3_64::oneshot(bytes)
    }

    /// Notes what a slot holds from now on.
    pub fn record(&self, slot: SlotIndex, checksum: u64) {
        if let Some(place) = self.0.slots.lock().checksums.get_mut(slot.0 as usize) {
            *place = Some(noted(checksum));
        }
    }

    /// Compares bytes that were read from a slot with what was recorded for it. A slot nothing was recorded for holds
    /// nothing to compare with.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] if they differ.
    pub fn verify(&self, slot: SlotIndex, read: u64) -> Result<()> {
        let Some(written) = self.0.slots.lock().checksums.get(slot.0 as usize).copied().flatten() else {
            return Ok(());
        };
        if noted(read) == written {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "slot {slot} of the scratch file in {} came back changed: checksum {read:016x}, written as {written:016x}",
                self.0.directory.display()
            ),
        )
        .remedy("check the disk and the memory; put the scratch file on another disk"))
    }
}

/// A checksum as it is kept, in 8 bytes a slot: 0 is 1.
fn noted(checksum: u64) -> NonZeroU64 {
    NonZeroU64::new(checksum).unwrap_or(NonZeroU64::MIN)
}

impl Inner {
    /// Adds slots until the last free run has `wanted`.
    fn grow(&self, slots: &mut Slots, wanted: u64) -> Result<()> {
        let page = self.page_size.bytes();
        let at_end = slots.free.last_key_value().filter(|&(first, count)| first + count == slots.count);
        let missing = wanted - at_end.map_or(0, |(_, count)| *count);
        let old = slots.count * page;
        let new = missing
            .checked_mul(page)
            .and_then(|bytes| bytes.checked_next_multiple_of(EXTENT.max(page)))
            .and_then(|bytes| bytes.checked_add(old))
            .filter(|&end| end <= i64::MAX as u64)
            .ok_or_else(|| {
                Error::new(ErrorKind::InvalidArgument, format!("{wanted} pages of scratch space exceed a file's size"))
                    .remedy("reserve less")
            })?;
        self.extend(slots, old, new)?;
        let added = (new - old) / page;
        slots.give_back(slots.count, added);
        slots.count += added;
        let more = slots.count as usize - slots.checksums.len();
        if slots.checksums.capacity() - slots.checksums.len() < more {
            // Doubling would take twice the memory for a while.
            let spare = slots.checksums.len() / 8;
            slots.checksums.reserve_exact(more.max(spare));
        }
        slots.checksums.resize(slots.count as usize, None);
        Ok(())
    }

    fn extend(&self, slots: &mut Slots, old: u64, new: u64) -> Result<()> {
        if !slots.sparse {
            match preallocate(&self.file, old, new - old) {
                Ok(()) => return Ok(()),
                Err(cause) if matches!(cause.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS)) => {
                    tracing::info!(
                        directory = %self.directory.display(),
                        "the file system does not preallocate: a write-back may find the disk full"
                    );
                    slots.sparse = true;
                }
                Err(cause) => {
                    // What was allocated before the disk was full is of no use. If it cannot be given back, it stays
                    // with the file and is used when the file grows next.
                    if let Err(kept) = self.file.set_len(old) {
                        tracing::info!(%kept, "the scratch file keeps what it was given");
                    }
                    return Err(self.cannot_extend(new - old, cause));
                }
            }
        }
        self.file.set_len(new).map_err(|cause| self.cannot_extend(new - old, cause))
    }

    fn cannot_extend(&self, wanted: u64, cause: io::Error) -> Error {
        let free = free_space(&self.file).map_or_else(|| "an unknown amount".into(), |free| free.to_string());
        let what = format!(
            "extend the scratch file in {} by {}: {free} is free",
            self.directory.display(),
            Bytes::new(wanted)
        );
        Error::io(what, cause).remedy("free space there, or give another scratch directory")
    }
}

impl Slots {
    fn free_count(&self) -> u64 {
        self.free.values().sum()
    }

    /// The first run of `wanted` free slots, which are then no longer free.
    fn take(&mut self, wanted: u64) -> Option<u64> {
        let (first, count) = self.free.iter().find(|&(_, &count)| count >= wanted).map(|(&f, &c)| (f, c))?;
        self.free.remove(&first);
        if count > wanted {
            self.free.insert(first + wanted, count - wanted);
        }
        Some(first)
    }

    /// Makes slots free and joins them with their free neighbours.
    fn give_back(&mut self, mut first: u64, mut count: u64) {
        if let Some((&before, &len)) = self.free.range(..first).next_back()
            && before + len == first
        {
            self.free.remove(&before);
            first = before;
            count += len;
        }
        if let Some(len) = self.free.remove(&(first + count)) {
            count += len;
        }
        self.free.insert(first, count);
    }
}

/// Contiguous slots of a scratch file, free again when dropped. No operation may still be using them then.
#[derive(Debug)]
#[must_use = "the slots are free again when the run is dropped"]
pub struct SlotRun {
    scratch: ScratchFile,
    first: u64,
    count: u64,
}

impl SlotRun {
    /// How many slots the run has: at least one.
    pub fn slot_count(&self) -> u64 {
        self.count
    }

    /// The `n`th slot of the run, if there is one.
    pub fn slot(&self, n: u64) -> Option<SlotIndex> {
        (n < self.count).then(|| SlotIndex(self.first + n))
    }

    /// The byte of the file at which the run starts.
    pub fn offset(&self) -> u64 {
        self.scratch.offset_of(SlotIndex(self.first))
    }
}

impl Drop for SlotRun {
    fn drop(&mut self) {
        let mut slots = self.scratch.0.slots.lock();
        for place in slots.checksums.iter_mut().skip(self.first as usize).take(self.count as usize) {
            *place = None;
        }
        slots.give_back(self.first, self.count);
    }
}

fn create_unnamed(directory: &Path) -> io::Result<File> {
    let unnamed = OpenOptions::new()
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC)
        .open(directory);
    match unnamed {
        // File systems without unnamed files, and kernels that take the flag for O_DIRECTORY.
        Err(cause) if matches!(cause.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL)) => {
            let (file, path) = create_named(directory)?;
            fs::remove_file(path)?;
            Ok(file)
        }
        other => other,
    }
}

fn create_named(directory: &Path) -> io::Result<(File, PathBuf)> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let mut taken = None;
    for _ in 0..NAMES {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!("outcore-{}-{number}.scratch", process::id()));
        let created = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_CLOEXEC)
            .open(&path);
        match created {
            Ok(file) => return Ok((file, path)),
            Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => taken = Some(cause),
            Err(cause) => return Err(cause),
        }
    }
    Err(taken.unwrap_or_else(|| io::ErrorKind::AlreadyExists.into()))
}

fn preallocate(file: &File, offset: u64, len: u64) -> io::Result<()> {
    loop {
        // SAFETY: the descriptor is open; the call touches no memory of ours.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, offset as libc::off_t, len as libc::off_t) } == 0 {
            return Ok(());
        }
        let cause = io::Error::last_os_error();
        if cause.kind() != io::ErrorKind::Interrupted {
            return Err(cause);
        }
    }
}

/// What the owner of the process may still write to the file system of `file`.
fn free_space(file: &File) -> Option<Bytes> {
    // SAFETY: statvfs is plain data, for which all zero bytes is a value.
    let mut stat: libc::statvfs = unsafe { mem::zeroed() };
    // SAFETY: the descriptor is open, and `stat` is valid for writing.
    let answer = unsafe { libc::fstatvfs(file.as_raw_fd(), &raw mut stat) };
    (answer == 0).then(|| Bytes::new(stat.f_bavail.saturating_mul(stat.f_frsize)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use proptest::prelude::*;

    use super::*;

    fn scratch(directory: &Path) -> ScratchFile {
        ScratchFile::create(directory, PageSize::new(Bytes::kib(64)).unwrap(), false).unwrap()
    }

    #[test]
    fn unnamed_unless_it_is_to_persist() {
        let directory = tempfile::tempdir().unwrap();
        let entries = || fs::read_dir(directory.path()).unwrap().count();
        let unnamed = scratch(directory.path());
        let meta = unnamed.handle().unwrap().metadata().unwrap();
        assert_eq!((entries(), meta.nlink(), meta.mode() & 0o777), (0, 0, 0o600));
        let named = ScratchFile::create(directory.path(), PageSize::DEFAULT, true).unwrap();
        assert_eq!(entries(), 1);
        assert_eq!(fs::metadata(named.path()).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn grows_by_extents_and_reuses_what_is_free() {
        let directory = tempfile::tempdir().unwrap();
        let scratch = scratch(directory.path());
        let a = scratch.reserve(Bytes::new(1)).unwrap();
        assert_eq!((a.slot_count(), scratch.size()), (1, Bytes::mib(2)));
        assert!(scratch.handle().unwrap().metadata().unwrap().blocks() * 512 >= 2 << 20);
        let b = scratch.reserve(Bytes::mib(2)).unwrap();
        assert_eq!((b.slot_count(), b.offset(), scratch.size()), (32, 65536, Bytes::mib(4)));
        assert_eq!(b.slot(32), None);
        drop(a);
        drop(b);
        assert_eq!(scratch.free(), Bytes::mib(4));
        let all = scratch.reserve(Bytes::mib(4)).unwrap();
        assert_eq!((all.offset(), scratch.size()), (0, Bytes::mib(4)));
    }

    #[test]
    fn a_full_disk_names_directory_wish_and_room() {
        let directory = tempfile::tempdir().unwrap();
        let scratch = scratch(directory.path());
        let kept = scratch.reserve(Bytes::mib(2)).unwrap();
        let error = scratch.reserve(Bytes::new(1 << 50)).unwrap_err();
        // ext4 reports a file too large for it as EFBIG before it looks for room.
        assert!(matches!(error.kind(), ErrorKind::DiskFull | ErrorKind::Io), "{error}");
        let text = error.to_string();
        assert!(text.contains(directory.path().to_str().unwrap()) && text.contains("free"), "{text}");
        assert_eq!(scratch.size(), Bytes::mib(2));
        assert_eq!(kept.slot_count(), 32);
        assert_eq!(scratch.reserve(Bytes::ZERO).unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(scratch.reserve(Bytes::new(u64::MAX)).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn checksums_tell_changed_bytes_and_end_with_the_run() {
        let directory = tempfile::tempdir().unwrap();
        let scratch = scratch(directory.path());
        let run = scratch.reserve(Bytes::kib(128)).unwrap();
        let slot = run.slot(1).unwrap();
        scratch.verify(slot, ScratchFile::checksum(b"anything")).unwrap();
        scratch.record(slot, ScratchFile::checksum(b"page"));
        scratch.verify(slot, ScratchFile::checksum(b"page")).unwrap();
        let error = scratch.verify(slot, ScratchFile::checksum(b"pagf")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("slot 1 "), "{error}");
        assert!(error.to_string().contains(&format!("{:016x}", ScratchFile::checksum(b"page"))), "{error}");
        drop(run);
        scratch.verify(slot, ScratchFile::checksum(b"anything")).unwrap();
    }

    #[test]
    fn a_directory_that_is_not_there() {
        let error = ScratchFile::create(Path::new("/nowhere/at/all"), PageSize::DEFAULT, false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Runs never overlap, never leave the file, and free space is what they do not hold.
        #[test]
        fn runs_are_disjoint(steps in prop::collection::vec((any::<bool>(), 1u64..40, any::<prop::sample::Index>()), 1..60)) {
            let directory = tempfile::tempdir().unwrap();
            let scratch = scratch(directory.path());
            let mut runs: Vec<SlotRun> = Vec::new();
            for (keep, pages, which) in steps {
                if keep || runs.is_empty() {
                    runs.push(scratch.reserve(Bytes::kib(64 * pages)).unwrap());
                } else {
                    drop(runs.swap_remove(which.index(runs.len())));
                }
                let mut spans: Vec<_> = runs.iter().map(|r| (r.first, r.first + r.count)).collect();
                spans.sort_unstable();
                prop_assert!(spans.windows(2).all(|w| w[0].1 <= w[1].0));
                let slots = scratch.0.slots.lock();
                let held: u64 = runs.iter().map(|r| r.count).sum();
                prop_assert_eq!(held + slots.free.values().sum::<u64>(), slots.count);
                let joined = slots.free.iter().zip(slots.free.iter().skip(1)).all(|((f, c), (g, _))| f + c < *g);
                prop_assert!(joined);
            }
        }
    }
}
