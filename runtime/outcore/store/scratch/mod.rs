//! The scratch file: dirty pages that have no frame are written there.
//!
//! # Invariants
//!
//! 1. A slot belongs to one [`SlotRun`] or is free. Runs are contiguous, so a tensor's pages are one range of the file.
//!    Free neighbours are one free range.
//! 2. Every slot of a run has its blocks from [`reserve`](ScratchFile::reserve) on, so a write back does not find the
//!    disk full. Exceptions: [`ScratchAllocation::AtWriteBack`] was asked for, or the file system does not preallocate.
//! 3. A free slot has no blocks, where the file system can punch holes: a run's room is given back before its slots are
//!    free. So no run finds bytes of an earlier one. Where holes cannot be punched the bytes stay in the file, but
//!    nobody sees them: the pager reads no slot that was not written as a whole since its segment was made.
//! 4. A slot's checksum belongs to its run, and is that of the bytes last recorded for the slot. A slot without one was
//!    not written since it was reserved or wiped.
//!
//! # Locks
//!
//! `growing` is the turn to take room: one thread at a time chooses a run and takes its room. So a thread that finds
//! the disk full gives back what it took before another one looks. The system calls that take room are made under this
//! lock, in slices. `slots` guards which slots are free, and is never held during a system call. Reading or writing a
//! page, recording a checksum and comparing with one take neither lock.

pub(crate) mod place;

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
#[cfg(any(test, feature = "testing"))]
use twox_hash::XxHash3_64;

use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, PageSize};
use crate::os::descriptors::making;
use crate::os::limits::effective_user;
use crate::os::limits::longest_file;
use crate::ranges::FreeRanges;
use crate::store::backend::operation::{CallHook, Injected, RoomCall, RoomKind};
use crate::store::file::{file_system, filesystem_name, is_memory, is_remote};

/// Room is taken and given back in slices of this many bytes. The kernel holds up reads and writes of a file while it
/// changes the file's room; they go on between two slices.
const SLICE: u64 = 64 << 20;
/// Zeros that are written at a time, where the file system cannot make them.
const ZEROS: usize = 1 << 20;
/// Names tried before giving up on finding one that is free.
const NAMES: u32 = 16;

/// When a tensor's room in the scratch file is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ScratchAllocation {
    /// All of it when the tensor is allocated. The allocation fails if the disk has no room. Once allocated, the tensor
    /// can always be written back.
    #[default]
    AtAlloc,
    /// Page by page, when a page is written back for the first time. A tensor that never leaves memory takes no room,
    /// and tensors may be larger than the disk.
    ///
    /// The price is that a full disk is found late, by a write back, long after the bytes were written. The page then
    /// stays in memory, dirty, and other pages go in its place. The write is tried again, later every time, so room
    /// that is freed in time costs no bytes. After eight tries, or three for somebody who waits for that very frame,
    /// this page alone is given up. Its bytes are lost, and every later pin of it ends with
    /// [`Poisoned`](ErrorKind::Poisoned). [`Runtime::health`](crate::Runtime::health) and
    /// [`Runtime::close`](crate::Runtime::close) name the page and say that the disk was full
    /// ([`DiskFull`](ErrorKind::DiskFull)).
    AtWriteBack,
}

/// How a scratch file is made.
#[derive(Clone, Default)]
pub struct ScratchOptions {
    /// When room is taken.
    pub allocation: ScratchAllocation,
    /// Sees every call that takes room or gives it back.
    pub hook: Option<Arc<dyn CallHook>>,
}

impl fmt::Debug for ScratchOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScratchOptions").field("allocation", &self.allocation).finish_non_exhaustive()
    }
}

/// A page-sized place in the scratch file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotIndex(u64);

#[cfg(any(test, feature = "testing"))]
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
    page_size: PageSize,
    in_memory: bool,
    options: ScratchOptions,
    /// The process that made the file. A child by `fork` has copies of the runs, but the file is not the child's.
    owner: u32,
    /// The file system does not preallocate.
    sparse: AtomicBool,
    /// The file system does not punch holes: free slots keep their room.
    keeps: AtomicBool,
    /// The file system does not make zeros of a range by itself: they are written. Where it punches no holes, and where
    /// it does not keep the range's room.
    writes_zeros: [AtomicBool; 2],
    /// The turn to take room.
    growing: Mutex<()>,
    slots: Mutex<Slots>,
    leaving: Mutex<Leaving>,
    /// Signalled when room that `leaving` counted has been given back.
    left: Condvar,
}

/// Room that is on its way back: its tensors are gone, but moves of their pages have not ended, or it is being given
/// back now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Leaving {
    pub(crate) bytes: Bytes,
    /// How often such room has come back.
    times: u64,
}

#[derive(Debug, Default)]
struct Slots {
    /// How many slots exist.
    count: u64,
    free: FreeRanges,
}

/// How large a scratch file is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScratchRoom {
    /// Its length.
    pub size: Bytes,
    /// Bytes that its file system has allocated to it, by the file system's own count.
    pub allocated: Bytes,
    /// Bytes of its length that no run holds.
    pub free: Bytes,
}

impl ScratchFile {
    /// As [`create_with`](Self::create_with), without options.
    ///
    /// # Errors
    /// As [`create_with`](Self::create_with).
    #[cfg(any(test, feature = "testing"))]
    pub fn create(directory: &Path, page_size: PageSize) -> Result<Self> {
        Self::create_with(directory, page_size, ScratchOptions::default())
    }

    /// Creates a scratch file in `directory` for pages of `page_size`, readable and writable by its owner only. It has
    /// no name, and its space is free as soon as the process ends, however it ends.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] or [`ErrorKind::PermissionDenied`] if the directory does not take files;
    /// [`ErrorKind::Io`] for any other error of the operating system.
    pub fn create_with(directory: &Path, page_size: PageSize, options: ScratchOptions) -> Result<Self> {
        let failed = |cause| {
            Error::io(format!("create the scratch file in {}", directory.display()), cause)
                .remedy("give a directory that exists and may be written to")
        };
        let file = making(|| create_unnamed(directory)).map_err(failed)?;
        let in_memory = is_memory(&filesystem_name(&file));
        Ok(Self(Arc::new(Inner {
            file,
            directory: directory.into(),
            page_size,
            in_memory,
            options,
            owner: process::id(),
            sparse: AtomicBool::new(false),
            keeps: AtomicBool::new(false),
            writes_zeros: Default::default(),
            growing: Mutex::new(()),
            slots: Mutex::default(),
            leaving: Mutex::default(),
            left: Condvar::new(),
        })))
    }

    /// A handle on the file, for [`Store::add_file`](crate::store::Store::add_file).
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if the process has no file descriptor left.
    pub fn handle(&self) -> Result<File> {
        making(|| self.0.file.try_clone()).map_err(|cause| {
            Error::io(format!("open the scratch file in {} again", self.0.directory.display()), cause)
                .remedy("raise the limit on open files (ulimit -n)")
        })
    }

    /// The directory it is in.
    pub fn directory(&self) -> &Path {
        &self.0.directory
    }

    /// As [`reserve_if`](Self::reserve_if), whatever the file holds.
    ///
    /// # Errors
    /// As [`reserve_if`](Self::reserve_if).
    #[cfg(any(test, feature = "testing"))]
    pub fn reserve(&self, bytes: Bytes) -> Result<SlotRun> {
        self.reserve_if(bytes, self.0.options.allocation, |_, _| Ok(()))
    }

    /// Reserves contiguous slots for `bytes` bytes, if `allows` agrees. It is told the bytes that the file holds and
    /// the bytes that it would hold more. One thread at a time asks and takes room, so no two are told the same; reads
    /// and writes of the file's other pages go on meanwhile. Room is taken when `allocation` says.
    ///
    /// # Errors
    /// [`ErrorKind::DiskFull`] if the file system has no room, or the file may not be so long. Then nothing is
    /// reserved, and room that was taken is given back. [`ErrorKind::InvalidArgument`] for no bytes, or more than a
    /// file can have; [`ErrorKind::OutOfMemory`] if there is no memory for the checksums.
    pub(crate) fn reserve_if(
        &self,
        bytes: Bytes,
        allocation: ScratchAllocation,
        allows: impl FnOnce(Bytes, Bytes) -> Result<()>,
    ) -> Result<SlotRun> {
        let inner = &*self.0;
        let wanted = inner.page_size.pages_for(bytes.get());
        if wanted == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, "no scratch space was asked for")
                .remedy("reserve at least 1 byte"));
        }
        let too_large = || {
            Error::new(ErrorKind::InvalidArgument, format!("{wanted} pages of scratch space exceed a file's size"))
                .remedy("reserve less")
        };
        let page = inner.page_size.bytes();
        let _turn = inner.growing.lock();
        allows(self.held(), Bytes::new(wanted.checked_mul(page).ok_or_else(too_large)?))?;
        let (first, before) = {
            let mut slots = inner.slots.lock();
            let before = slots.count;
            (slots.take(wanted, i64::MAX as u64 / page).ok_or_else(too_large)?, before)
        };
        // From here on, dropping the run gives everything back.
        let leaves = AtomicBool::new(false);
        let checksums_later = Box::default();
        let mut run =
            SlotRun { scratch: self.clone(), first, count: wanted, allocation, checksums: checksums_later, leaves };
        let most = longest_file();
        let fits = run.offset() + run.len() <= most;
        let refused =
            if fits { inner.take_room(allocation, run.offset(), run.len()).err().map(Some) } else { Some(None) };
        if let Some(cause) = refused {
            let wish = run.len();
            drop(run);
            inner.shorten(before);
            return Err(match cause {
                Some(cause) => inner.cannot_take(wish, cause),
                None => inner.may_not_take(wish, most),
            });
        }
        run.checksums = checksums(wanted)?;
        Ok(run)
    }

    /// Asks `allows` about the bytes that the file holds, while nobody takes more. The next call of
    /// [`reserve_if`](Self::reserve_if) sees what has come of it.
    pub(crate) fn ask(&self, allows: impl FnOnce(Bytes) -> Result<()>) -> Result<()> {
        let _turn = self.0.growing.lock();
        allows(self.held())
    }

    /// The byte of the file at which a slot starts.
    pub fn offset_of(&self, slot: SlotIndex) -> u64 {
        slot.0 * self.0.page_size.bytes()
    }

    /// Whether its file system is in memory. Then writing back to it frees no memory.
    pub fn is_in_memory(&self) -> bool {
        self.0.in_memory
    }

    /// The size of the file now, also while it grows.
    pub fn room(&self) -> ScratchRoom {
        let page = self.0.page_size.bytes();
        let (count, free) = {
            let slots = self.0.slots.lock();
            (slots.count, slots.free.total())
        };
        // In units of 512 bytes, whatever the file system's blocks are.
        let allocated = self.0.file.metadata().map_or(0, |meta| meta.blocks().saturating_mul(512));
        ScratchRoom { size: Bytes::new(count * page), allocated: Bytes::new(allocated), free: Bytes::new(free * page) }
    }

    /// The bytes that count in the scratch budget: all that runs hold, whether written or not; and free slots, where
    /// they keep their room.
    pub fn held(&self) -> Bytes {
        let slots = self.0.slots.lock();
        let free = if self.0.keeps.load(Ordering::Relaxed) { 0 } else { slots.free.total() };
        Bytes::new((slots.count - free) * self.0.page_size.bytes())
    }

    /// Whether another machine or program serves its file system.
    pub(crate) fn is_remote(&self) -> bool {
        is_remote(&filesystem_name(&self.0.file))
    }

    /// The room that is on its way back.
    pub(crate) fn leaving(&self) -> Leaving {
        *self.0.leaving.lock()
    }

    /// Waits until room has come back since `seen`, or until `deadline`. True if room has come back.
    pub(crate) fn await_room(&self, seen: Leaving, deadline: Option<Instant>) -> bool {
        let mut leaving = self.0.leaving.lock();
        while leaving.times == seen.times {
            match deadline {
                None => self.0.left.wait(&mut leaving),
                Some(deadline) => {
                    if self.0.left.wait_until(&mut leaving, deadline).timed_out() {
                        break;
                    }
                }
            }
        }
        leaving.times != seen.times
    }

    /// The length of the file.
    #[cfg(any(test, feature = "testing"))]
    pub fn size(&self) -> Bytes {
        self.room().size
    }

    /// Bytes of the file that no run holds.
    #[cfg(any(test, feature = "testing"))]
    pub fn free(&self) -> Bytes {
        self.room().free
    }

    /// The checksum of a page's bytes, to be [recorded](SlotRun::record) when they are in their slot.
    #[cfg(any(test, feature = "testing"))]
    pub fn checksum(bytes: &[u8]) -> u64 {
        XxHash3_64::oneshot(bytes)
    }
}

/// A place for each slot's checksum; 0 is "not recorded". Memory is taken where it is used: with room taken late, there
/// may be more pages than there is memory for their checksums.
fn checksums(count: u64) -> Result<Box<[AtomicU64]>> {
    bytemuck::try_zeroed_slice_box(count as usize).map_err(|()| {
        Error::new(ErrorKind::OutOfMemory, format!("no memory for the checksums of {count} pages"))
            .remedy("choose larger pages")
    })
}

/// The ranges of `SLICE` bytes or less that `[offset, offset + len)` is made of.
pub(in crate::store) fn slices(offset: u64, len: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..len).step_by(SLICE as usize).map(move |done| (offset + done, SLICE.min(len - done)))
}

impl Inner {
    /// Takes the room of a range, if now is the time, and makes the file at least as long as that. The caller has the
    /// turn.
    fn take_room(&self, allocation: ScratchAllocation, offset: u64, len: u64) -> io::Result<()> {
        let end = offset + len;
        if allocation == ScratchAllocation::AtAlloc && !self.sparse.load(Ordering::Relaxed) {
            match self.preallocate(offset, len) {
                Err(cause) if is_unsupported(&cause) => {
                    if !self.sparse.swap(true, Ordering::Relaxed) {
                        tracing::info!(
                            directory = %self.directory.display(),
                            "the file system does not preallocate: a write back may find the disk full"
                        );
                    }
                }
                taken => return taken,
            }
        }
        // Nobody else changes the length: only the thread that has the turn does.
        if self.file.metadata()?.len() < end { self.file.set_len(end) } else { Ok(()) }
    }

    fn preallocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check_room(len)?;
        for (offset, len) in slices(offset, len) {
            self.ask(RoomCall { kind: RoomKind::Take, offset, len })?;
            fallocate(&self.file, 0, offset, len)?;
        }
        Ok(())
    }

    /// Refuses at once a request that the file system cannot meet. Slice by slice, it would first take all the room
    /// there is from everybody.
    fn check_room(&self, len: u64) -> io::Result<()> {
        let root = effective_user() == 0;
        let fits = || file_system(&self.file).is_none_or(|stat| stat.f_blocks == 0 || len <= obtainable(&stat, root));
        if fits() {
            return Ok(());
        }
        // Some file systems give freed room back only once the change is on the disk.
        // SAFETY: the descriptor is open; the call touches no memory of ours. If it fails, so does what follows.
        unsafe { libc::syncfs(self.file.as_raw_fd()) };
        if fits() { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ENOSPC)) }
    }

    /// Gives the room of a range back, where the file system can. Nobody uses the range, and it is not yet free.
    fn give_room_back(&self, offset: u64, len: u64) {
        if self.keeps.load(Ordering::Relaxed) {
            return;
        }
        for (offset, len) in slices(offset, len) {
            let punched = self.ask(RoomCall { kind: RoomKind::GiveBack, offset, len }).and_then(|()| {
                fallocate(&self.file, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, offset, len)
            });
            match punched {
                Ok(()) => {}
                Err(cause) if is_unsupported(&cause) => {
                    if !self.keeps.swap(true, Ordering::Relaxed) {
                        tracing::info!(
                            directory = %self.directory.display(),
                            "the file system punches no holes: the scratch file keeps the room of tensors that are \
                             gone for later ones"
                        );
                    }
                    return;
                }
                Err(cause) => {
                    tracing::warn!(directory = %self.directory.display(), %cause, "the scratch file keeps freed room");
                    return;
                }
            }
        }
    }

    /// A range holds zeros from now on. Nobody reads or writes it meanwhile. Where room was taken at once it stays.
    fn wipe(&self, allocation: ScratchAllocation, offset: u64, len: u64) -> io::Result<()> {
        // A hole is taken anew by the next write back, which might find the disk full. So a range that must keep its
        // room is not punched.
        let has_room = allocation == ScratchAllocation::AtAlloc && !self.sparse.load(Ordering::Relaxed);
        let mode = if has_room { libc::FALLOC_FL_ZERO_RANGE } else { libc::FALLOC_FL_PUNCH_HOLE };
        let writes_zeros = &self.writes_zeros[usize::from(has_room)];
        for (offset, len) in slices(offset, len) {
            if !writes_zeros.load(Ordering::Relaxed) {
                let made = self.ask(RoomCall { kind: RoomKind::Wipe, offset, len });
                match made.and_then(|()| fallocate(&self.file, mode | libc::FALLOC_FL_KEEP_SIZE, offset, len)) {
                    Ok(()) => continue,
                    Err(cause) if is_unsupported(&cause) => writes_zeros.store(true, Ordering::Relaxed),
                    Err(cause) => return Err(cause),
                }
            }
            self.write_zeros(offset, len)?;
        }
        Ok(())
    }

    fn write_zeros(&self, offset: u64, len: u64) -> io::Result<()> {
        let zeros = vec![0; ZEROS.min(len as usize)];
        for done in (0..len).step_by(ZEROS) {
            let part = (len - done).min(ZEROS as u64) as usize;
            self.file.write_all_at(&zeros[..part], offset + done)?;
        }
        // The store may read and write past the kernel's cache.
        self.file.sync_data()
    }

    fn ask(&self, call: RoomCall) -> io::Result<()> {
        match self.options.hook.as_ref().map(|hook| hook.before_room(&call)) {
            Some(Injected::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
            _ => Ok(()),
        }
    }

    /// Undoes growth that failed: makes the slots `count` again, and the file as long as these. The caller has the
    /// turn, so nobody has slots beyond.
    fn shorten(&self, count: u64) {
        self.slots.lock().shorten(count);
        let end = count * self.page_size.bytes();
        // If this fails, the file is too long and holds nothing there.
        if self.file.metadata().is_ok_and(|meta| meta.len() > end)
            && let Err(cause) = self.file.set_len(end)
        {
            tracing::debug!(%cause, "the scratch file stays longer than it is used");
        }
    }

    fn cannot_take(&self, wanted: u64, cause: io::Error) -> Error {
        let free = file_system(&self.file).map(|stat| Bytes::new(obtainable(&stat, false)));
        let free = free.map_or_else(|| "an unknown amount".into(), |free| free.to_string());
        let what = format!(
            "take {} for the scratch file in {}: {free} is free",
            Bytes::new(wanted),
            self.directory.display(),
        );
        Error::io(what, cause).remedy("free space there, or give another scratch directory")
    }

    fn may_not_take(&self, wanted: u64, most: u64) -> Error {
        let (wanted, most) = (Bytes::new(wanted), Bytes::new(most));
        let message = format!(
            "take {wanted} for the scratch file in {}: no file of this process may be longer than {most} (ulimit -f)",
            self.directory.display(),
        );
        Error::new(ErrorKind::DiskFull, message).remedy("raise that limit, or have smaller read-write tensors")
    }
}

pub(in crate::store) fn is_unsupported(cause: &io::Error) -> bool {
    matches!(cause.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS))
}

impl Slots {
    /// Takes `wanted` contiguous slots: the first of the shortest free ranges that are long enough, or a range at the
    /// end of the file, which then grows. `None` if there would be more than `most` slots.
    fn take(&mut self, wanted: u64, most: u64) -> Option<u64> {
        if let Some(first) = self.free.take(wanted) {
            return Some(first);
        }
        let at_end = self.free.last().filter(|last| last.end == self.count);
        let first = at_end.as_ref().map_or(self.count, |last| last.start);
        let end = first.checked_add(wanted).filter(|&end| end <= most)?;
        if at_end.is_some() {
            self.free.remove(first);
        }
        self.count = end;
        Some(first)
    }

    /// Makes slots free and joins them with their free neighbours.
    fn give_back(&mut self, first: u64, count: u64) {
        self.free.give(first, count, &(0..self.count));
    }

    /// Cuts off free slots at the end until there are `count`.
    fn shorten(&mut self, count: u64) {
        let Some(last) = self.free.last() else { return };
        if count >= self.count || last.end != self.count || last.start > count {
            return;
        }
        self.free.remove(last.start);
        self.count = count;
        if last.start < count {
            self.give_back(last.start, count - last.start);
        }
    }
}

/// Contiguous slots of a scratch file. Dropping the run gives their room back, slice by slice, and then frees the
/// slots. No operation may still be using them then.
#[derive(Debug)]
#[must_use = "the slots are free again when the run is dropped"]
pub struct SlotRun {
    scratch: ScratchFile,
    first: u64,
    count: u64,
    /// When its room is taken.
    allocation: ScratchAllocation,
    /// Of each slot; 0 is "not recorded".
    checksums: Box<[AtomicU64]>,
    /// Whether `Inner::leaving` counts its room.
    leaves: AtomicBool,
}

impl SlotRun {
    /// Notes that the tensor is gone, and that the room will come back.
    pub(crate) fn leave(&self) {
        if !self.leaves.swap(true, Ordering::Relaxed) {
            let mut leaving = self.scratch.0.leaving.lock();
            leaving.bytes = leaving.bytes + Bytes::new(self.len());
        }
    }

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

    fn len(&self) -> u64 {
        self.count * self.scratch.0.page_size.bytes()
    }

    fn place(&self, slot: SlotIndex) -> Option<&AtomicU64> {
        self.checksums.get(usize::try_from(slot.0.checked_sub(self.first)?).ok()?)
    }

    /// Records the checksum of what one of its slots holds from now on.
    pub fn record(&self, slot: SlotIndex, checksum: u64) {
        if let Some(place) = self.place(slot) {
            place.store(noted(checksum), Ordering::Release);
        }
    }

    /// Notes that one of its slots is about to be written. Until that is [recorded](Self::record) nothing should be
    /// read there, and would not pass.
    pub(crate) fn touch(&self, slot: SlotIndex) {
        if let Some(place) = self.place(slot) {
            let _ = place.compare_exchange(0, noted(0), Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Whether something was, or may have been, written to one of its slots since it was reserved or wiped.
    pub(crate) fn was_written(&self, slot: SlotIndex) -> bool {
        self.place(slot).is_some_and(|place| place.load(Ordering::Acquire) != 0)
    }

    /// Makes these slots hold zeros, as if they had never been written. They keep their room. Nobody reads or writes
    /// them meanwhile. `slots` are in order; neighbours are wiped together.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] for errors of the operating system. Slots that were not wiped count as written.
    pub(crate) fn wipe(&self, slots: &[SlotIndex]) -> Result<()> {
        let page = self.scratch.0.page_size.bytes();
        for run in slots.chunk_by(|one, next| one.0 + 1 == next.0) {
            let (offset, len) = (self.scratch.offset_of(run[0]), run.len() as u64 * page);
            self.scratch.0.wipe(self.allocation, offset, len).map_err(|cause| {
                let directory = self.scratch.0.directory.display();
                Error::io(format!("wipe {} of the scratch file in {directory}", Bytes::new(len)), cause)
                    .remedy("check the disk; try again, or close the runtime: the file goes with it")
            })?;
            run.iter().filter_map(|slot| self.place(*slot)).for_each(|place| place.store(0, Ordering::Release));
        }
        Ok(())
    }

    /// Compares the checksum of bytes that were read from one of its slots with the recorded one. A slot without a
    /// record always passes.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] if they differ.
    pub fn verify(&self, slot: SlotIndex, read: u64) -> Result<()> {
        let written = self.place(slot).map_or(0, |place| place.load(Ordering::Acquire));
        if written == 0 || noted(read) == written {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "slot {slot} of the scratch file in {} came back changed: checksum {read:016x}, \
                 written as {written:016x}",
                self.scratch.0.directory.display()
            ),
        )
        .remedy("check the disk and the memory; put the scratch file on another disk"))
    }
}

/// A checksum as it is kept: 1 in place of 0, which is "not recorded".
fn noted(checksum: u64) -> u64 {
    checksum.max(1)
}

impl Drop for SlotRun {
    fn drop(&mut self) {
        let scratch = &*self.scratch.0;
        if process::id() != scratch.owner {
            return;
        }
        scratch.give_room_back(self.offset(), self.len());
        scratch.slots.lock().give_back(self.first, self.count);
        if *self.leaves.get_mut() {
            let mut leaving = scratch.leaving.lock();
            leaving.bytes = leaving.bytes.saturating_sub(Bytes::new(self.count * scratch.page_size.bytes()));
            leaving.times += 1;
            scratch.left.notify_all();
        }
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

pub(in crate::store) fn fallocate(file: &File, mode: libc::c_int, offset: u64, len: u64) -> io::Result<()> {
    loop {
        // SAFETY: the descriptor is open; the call touches no memory of ours.
        if unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as libc::off_t, len as libc::off_t) } == 0 {
            return Ok(());
        }
        let cause = io::Error::last_os_error();
        if cause.kind() != io::ErrorKind::Interrupted {
            return Err(cause);
        }
    }
}

/// Bytes that a file can still have. File systems keep some for root.
fn obtainable(stat: &libc::statvfs, root: bool) -> u64 {
    in_bytes(if root { stat.f_bfree } else { stat.f_bavail }, stat)
}

fn in_bytes(blocks: u64, stat: &libc::statvfs) -> u64 {
    blocks.saturating_mul(stat.f_frsize)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;
    use crate::store::backend::operation::IoCall;

    fn scratch(directory: &Path) -> ScratchFile {
        ScratchFile::create(directory, PageSize::new(Bytes::kib(64)).unwrap()).unwrap()
    }

    #[test]
    fn it_has_no_name() {
        let directory = tempfile::tempdir().unwrap();
        let entries = || fs::read_dir(directory.path()).unwrap().count();
        let unnamed = scratch(directory.path());
        let meta = unnamed.handle().unwrap().metadata().unwrap();
        assert_eq!((entries(), meta.nlink(), meta.mode() & 0o777), (0, 0, 0o600));
        // The file that is made where file systems have no unnamed files.
        let (_file, path) = create_named(directory.path()).unwrap();
        assert_eq!((entries(), fs::metadata(path).unwrap().mode() & 0o777), (1, 0o600));
    }

    /// With room taken late, there may be more pages than there is memory for their checksums.
    #[test]
    fn regression_checksums_take_no_memory_until_they_are_used() {
        const PAGES: u64 = 1 << 26;
        let test = "store::scratch::tests::regression_checksums_take_no_memory_until_they_are_used";
        outcore_testkit::harness::alone(test, || {
            let status = || fs::read_to_string("/proc/self/status").unwrap();
            let peak = || status().lines().find_map(|line| line.strip_prefix("VmHWM:").map(str::to_owned)).unwrap();
            let kib = |text: String| text.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
            let before = kib(peak());
            let directory = tempfile::tempdir().unwrap();
            let options = ScratchOptions { allocation: ScratchAllocation::AtWriteBack, ..ScratchOptions::default() };
            let page = PageSize::new(Bytes::kib(4)).unwrap();
            let scratch = ScratchFile::create_with(directory.path(), page, options).unwrap();
            let run = scratch.reserve(Bytes::kib(4 * PAGES)).unwrap();
            run.record(run.slot(PAGES - 1).unwrap(), 7);
            assert!(run.verify(run.slot(PAGES - 1).unwrap(), 8).is_err());
            let grown = kib(peak()) - before;
            assert!(grown < 64 << 10, "{grown} KiB for {PAGES} checksums");
        });
    }

    /// Bytes that the file system has allocated, with what it needs to keep track of them.
    fn allocated(scratch: &ScratchFile) -> u64 {
        scratch.room().allocated.get()
    }

    /// Whether free room goes back here. Where it does not, the test says so.
    fn punches(scratch: &ScratchFile, test: &str) -> bool {
        let keeps = scratch.0.keeps.load(Ordering::Relaxed) || scratch.0.sparse.load(Ordering::Relaxed);
        if keeps {
            eprintln!("SKIPPED {test}: the file system preallocates or punches nothing");
        }
        !keeps
    }

    #[test]
    fn takes_what_is_asked_for_and_gives_it_back() {
        let directory = tempfile::tempdir().unwrap();
        let scratch = scratch(directory.path());
        let a = scratch.reserve(Bytes::new(1)).unwrap();
        assert_eq!((a.slot_count(), scratch.size()), (1, Bytes::kib(64)));
        let b = scratch.reserve(Bytes::mib(2)).unwrap();
        let size = Bytes::kib(33 * 64);
        assert_eq!((b.slot_count(), b.offset(), scratch.size()), (32, 65536, size));
        assert_eq!(b.slot(32), None);
        assert!(!punches(&scratch, "room") || allocated(&scratch) >= size.get());
        drop(a);
        drop(b);
        assert_eq!((scratch.free(), scratch.size()), (size, size));
        assert!(!punches(&scratch, "room") || allocated(&scratch) < 64 << 10, "{:?}", scratch.room());
        let all = scratch.reserve(size).unwrap();
        assert_eq!((all.offset(), scratch.size(), scratch.free()), (0, size, Bytes::ZERO));
        assert!(!punches(&scratch, "room") || allocated(&scratch) >= size.get(), "what was given back is taken again");
    }

    /// Only root may have the room that file systems keep for it. Others must not take all the rest before they are
    /// refused.
    #[test]
    fn regression_what_is_kept_for_root_is_refused_to_others_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let scratch = scratch(directory.path());
        let mut stat = file_system(&scratch.0.file).unwrap();
        (stat.f_frsize, stat.f_blocks, stat.f_bfree, stat.f_bavail) = (4096, 1000, 200, 150);
        assert_eq!((obtainable(&stat, true), obtainable(&stat, false)), (200 * 4096, 150 * 4096));
    }

    #[test]
    fn what_a_run_held_is_gone_when_its_slots_are_free() {
        let directory = tempfile::tempdir().unwrap();
        let scratch = scratch(directory.path());
        let runs = [(); 3].map(|()| scratch.reserve(Bytes::kib(128)).unwrap());
        let file = scratch.handle().unwrap();
        for run in &runs {
            file.write_all_at(&[0xAB; 128 << 10], run.offset()).unwrap();
        }
        let [a, b, c] = runs;
        let (offset, mut bytes) = (b.offset(), vec![1; 128 << 10]);
        drop(b);
        if !punches(&scratch, "bytes") {
            return;
        }
        file.read_exact_at(&mut bytes, offset).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
        let again = scratch.reserve(Bytes::kib(128)).unwrap();
        assert_eq!(again.offset(), offset);
        file.read_exact_at(&mut bytes, offset).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
        for run in [a, c] {
            file.read_exact_at(&mut bytes, run.offset()).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 0xAB), "a neighbour lost bytes");
        }
    }

    /// How the hook of these tests answers calls for room.
    type Answer = dyn Fn(&RoomCall) -> Injected + Send + Sync;

    struct Room(Box<Answer>);

    impl CallHook for Room {
        fn before(&self, _: &IoCall) -> Injected {
            Injected::Nothing
        }
        fn before_room(&self, call: &RoomCall) -> Injected {
            (self.0)(call)
        }
    }

    fn hooked(directory: &Path, answer: impl Fn(&RoomCall) -> Injected + Send + Sync + 'static) -> ScratchFile {
        let hook: Arc<dyn CallHook> = Arc::new(Room(Box::new(answer)));
        let options = ScratchOptions { hook: Some(hook), ..ScratchOptions::default() };
        ScratchFile::create_with(directory, PageSize::new(Bytes::kib(64)).unwrap(), options).unwrap()
    }

    const SLICES: u64 = 4;

    #[test]
    fn a_slice_that_finds_the_disk_full_gives_back_what_the_others_took() {
        for failing in 0..SLICES {
            let directory = tempfile::tempdir().unwrap();
            let base = AtomicU64::new(u64::MAX);
            let scratch = hooked(directory.path(), move |call| {
                if call.kind == RoomKind::GiveBack || call.len < SLICE {
                    return Injected::Nothing;
                }
                let slice = (call.offset - base.fetch_min(call.offset, Ordering::Relaxed).min(call.offset)) / SLICE;
                if slice == failing { Injected::Errno(libc::ENOSPC) } else { Injected::Nothing }
            });
            let kept = scratch.reserve(Bytes::mib(1)).unwrap();
            scratch.handle().unwrap().write_all_at(&[7; 1 << 20], kept.offset()).unwrap();
            let before = (scratch.size(), scratch.free());
            let error = scratch.reserve(Bytes::new(SLICES * SLICE)).unwrap_err();
            let text = error.to_string();
            assert_eq!(error.kind(), ErrorKind::DiskFull, "{text}");
            let named = text.contains(directory.path().to_str().unwrap()) && text.contains("256.0 MiB");
            assert!(named && text.contains("is free") && error.advice().is_some(), "{text}");
            assert_eq!((scratch.size(), scratch.free()), before, "slice {failing}");
            assert_eq!(scratch.handle().unwrap().metadata().unwrap().len(), before.0.get());
            assert!(!punches(&scratch, "a full disk") || allocated(&scratch) < 2 << 20, "{:?}", scratch.room());
            let mut bytes = vec![0; 1 << 20];
            scratch.handle().unwrap().read_exact_at(&mut bytes, kept.offset()).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 7), "what was there is there");
            assert_eq!(scratch.reserve(Bytes::mib(1)).unwrap().offset(), 1 << 20);
        }
    }

    /// The second gets its turn when the first has given back what it took.
    #[test]
    fn one_that_fails_fails_no_other_and_no_two_get_the_same_slots() {
        let directory = tempfile::tempdir().unwrap();
        let taken = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&taken);
        // A disk of two slices.
        let scratch = hooked(directory.path(), move |call| {
            let full = match call.kind {
                RoomKind::Take => count.fetch_add(call.len, Ordering::SeqCst) + call.len > 2 * SLICE,
                RoomKind::GiveBack => {
                    let left = |taken: u64| Some(taken.saturating_sub(call.len));
                    let _ = count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left);
                    false
                }
                RoomKind::Wipe => false,
            };
            if full { Injected::Errno(libc::ENOSPC) } else { Injected::Nothing }
        });
        for _ in 0..8 {
            taken.store(0, Ordering::SeqCst);
            let runs: Vec<_> = std::thread::scope(|scope| {
                let ask = |bytes: u64| {
                    scope.spawn({
                        let scratch = &scratch;
                        move || scratch.reserve(Bytes::new(bytes))
                    })
                };
                let asked: Vec<_> = [SLICE, 4 * SLICE, 64 << 10, 4 * SLICE, 1 << 20].map(ask).into_iter().collect();
                asked.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let fit = |at: usize| runs[at].as_ref().unwrap();
            let mut spans = [0, 2, 4].map(|at| (fit(at).first, fit(at).first + fit(at).count));
            spans.sort_unstable();
            assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{spans:?}");
            for at in [1, 3] {
                assert_eq!(runs[at].as_ref().unwrap_err().kind(), ErrorKind::DiskFull);
            }
        }
        assert_eq!(scratch.free(), scratch.size());
    }

    /// Faults take no lock that allocations hold: else this would never end.
    #[test]
    fn pages_are_checked_and_recorded_between_the_slices_of_an_allocation() {
        let directory = tempfile::tempdir().unwrap();
        let run: Arc<std::sync::OnceLock<SlotRun>> = Arc::default();
        let (used, got_through) = (Arc::clone(&run), Arc::new(AtomicU64::new(0)));
        let count = Arc::clone(&got_through);
        let scratch = hooked(directory.path(), move |call| {
            let Some(run) = used.get().filter(|_| call.kind == RoomKind::Take) else { return Injected::Nothing };
            let count = &count;
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    let slot = run.slot(1).unwrap();
                    run.verify(slot, ScratchFile::checksum(b"page")).unwrap();
                    run.record(slot, ScratchFile::checksum(b"page"));
                    // Nor does a look at the room have to wait.
                    assert!(run.scratch.room().size >= Bytes::kib(128));
                    count.fetch_add(1, Ordering::SeqCst);
                });
            });
            Injected::Nothing
        });
        let first = scratch.reserve(Bytes::kib(128)).unwrap();
        first.record(first.slot(1).unwrap(), ScratchFile::checksum(b"page"));
        run.set(first).unwrap();
        let large = scratch.reserve(Bytes::new(SLICES * SLICE)).unwrap();
        assert_eq!(got_through.load(Ordering::SeqCst), SLICES);
        drop(large);
    }

    #[test]
    fn a_file_system_that_punches_nothing_keeps_the_room_for_the_next() {
        let directory = tempfile::tempdir().unwrap();
        let asked = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&asked);
        let scratch = hooked(directory.path(), move |call| match call.kind {
            RoomKind::Take | RoomKind::Wipe => Injected::Nothing,
            RoomKind::GiveBack => {
                count.fetch_add(1, Ordering::SeqCst);
                Injected::Errno(libc::EOPNOTSUPP)
            }
        });
        for _ in 0..3 {
            let run = scratch.reserve(Bytes::mib(1)).unwrap();
            assert_eq!(run.offset(), 0);
        }
        assert_eq!(asked.load(Ordering::SeqCst), 1, "it is asked once");
        assert!(allocated(&scratch) >= 1 << 20 || scratch.0.sparse.load(Ordering::Relaxed));
        assert_eq!((scratch.size(), scratch.free()), (Bytes::mib(1), Bytes::mib(1)));
    }

    /// Where the file system makes zeros, and where it does not.
    #[test]
    fn what_is_wiped_is_zeros_and_keeps_its_room() {
        for unsupported in [None, Some(libc::EOPNOTSUPP), Some(libc::ENOSYS)] {
            let directory = tempfile::tempdir().unwrap();
            let scratch = hooked(directory.path(), move |call| match (call.kind, unsupported) {
                (RoomKind::Wipe, Some(errno)) => Injected::Errno(errno),
                _ => Injected::Nothing,
            });
            let run = scratch.reserve(Bytes::kib(8 * 64)).unwrap();
            let slots: Vec<SlotIndex> = (0..8).map(|n| run.slot(n).unwrap()).collect();
            let file = scratch.handle().unwrap();
            file.write_all_at(&[0xAB; 512 << 10], run.offset()).unwrap();
            file.sync_data().unwrap();
            slots.iter().for_each(|slot| run.touch(*slot));
            let before = allocated(&scratch);
            let wiped = [1, 2, 3, 6].map(|n: usize| slots[n]);
            run.wipe(&wiped).unwrap();
            let mut page = vec![1; 64 << 10];
            for slot in &slots {
                file.read_exact_at(&mut page, scratch.offset_of(*slot)).unwrap();
                let gone = wiped.contains(slot);
                assert!(page.iter().all(|byte| *byte == if gone { 0 } else { 0xAB }), "{slot}, {unsupported:?}");
                assert_eq!(run.was_written(*slot), !gone);
            }
            assert!(allocated(&scratch) >= before, "{:?}", scratch.room());
            run.wipe(&[]).unwrap();
        }
    }

    #[test]
    fn what_cannot_be_wiped_counts_as_written() {
        let directory = tempfile::tempdir().unwrap();
        let scratch = hooked(directory.path(), |call| match call.kind {
            RoomKind::Wipe => Injected::Errno(libc::EIO),
            _ => Injected::Nothing,
        });
        let run = scratch.reserve(Bytes::kib(64)).unwrap();
        let slot = run.slot(0).unwrap();
        run.record(slot, ScratchFile::checksum(b"page"));
        let error = run.wipe(&[slot]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("wipe 64.0 KiB") && text.contains(directory.path().to_str().unwrap()), "{text}");
        assert!(run.was_written(slot));
        run.verify(slot, ScratchFile::checksum(b"page")).unwrap();
    }

    #[test]
    fn room_is_taken_at_the_write_back_where_that_was_chosen() {
        let directory = tempfile::tempdir().unwrap();
        let options = ScratchOptions { allocation: ScratchAllocation::AtWriteBack, ..ScratchOptions::default() };
        let page = PageSize::new(Bytes::kib(64)).unwrap();
        let scratch = ScratchFile::create_with(directory.path(), page, options).unwrap();
        // More than the disk has.
        let large = scratch.reserve(Bytes::gib(1 << 10)).unwrap();
        assert_eq!((scratch.size(), allocated(&scratch)), (Bytes::gib(1 << 10), 0));
        scratch.handle().unwrap().write_all_at(&[1; 64 << 10], large.offset() + (1 << 30)).unwrap();
        assert!(allocated(&scratch) >= 64 << 10);
        // And what is wiped takes none.
        let slot = large.slot((1 << 30) / (64 << 10)).unwrap();
        large.touch(slot);
        large.wipe(&[slot]).unwrap();
        assert!(!punches(&scratch, "room") || allocated(&scratch) < 64 << 10, "{:?}", scratch.room());
        drop(large);
        assert!(!punches(&scratch, "room") || allocated(&scratch) < 64 << 10, "{:?}", scratch.room());
    }

    #[test]
    fn a_full_disk_names_directory_wish_and_room() {
        let directory = tempfile::tempdir().unwrap();
        let scratch = scratch(directory.path());
        let kept = scratch.reserve(Bytes::mib(2)).unwrap();
        // A request larger than the disk is refused before anything is taken from others.
        let error = scratch.reserve(Bytes::new(1 << 50)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DiskFull, "{error}");
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
        run.verify(slot, ScratchFile::checksum(b"anything")).unwrap();
        run.record(slot, ScratchFile::checksum(b"page"));
        run.verify(slot, ScratchFile::checksum(b"page")).unwrap();
        let error = run.verify(slot, ScratchFile::checksum(b"pagf")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("slot 1 "), "{error}");
        assert!(error.to_string().contains(&format!("{:016x}", ScratchFile::checksum(b"page"))), "{error}");
        drop(run);
        let next = scratch.reserve(Bytes::kib(128)).unwrap();
        assert_eq!(next.slot(1), Some(slot));
        next.verify(slot, ScratchFile::checksum(b"anything")).unwrap();
    }

    /// The cost of an allocation must not grow with the number of free ranges: with a look at each of them, some
    /// hundred thousand tensors cost milliseconds.
    #[test]
    fn regression_many_free_ranges_cost_an_allocation_nothing() {
        const RANGES: u64 = 1 << 19;
        let mut slots = Slots::default();
        assert_eq!(slots.take(2 * RANGES, u64::MAX), Some(0));
        (0..RANGES).for_each(|nth| slots.give_back(2 * nth, 1));
        let begun = Instant::now();
        for nth in 0..1 << 16 {
            // None is long enough.
            assert_eq!(slots.take(2, u64::MAX), Some(2 * RANGES + 2 * nth));
            assert_eq!(slots.free.total(), RANGES);
        }
        // A look at each takes minutes, and this takes milliseconds.
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    }

    #[test]
    fn a_directory_that_is_not_there() {
        let error = ScratchFile::create(Path::new("/nowhere/at/all"), PageSize::DEFAULT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Runs never overlap, never leave the file, and free space is what they do not hold.
        #[test]
        fn runs_are_disjoint(
            steps in prop::collection::vec((any::<bool>(), 1u64..40, any::<prop::sample::Index>()), 1..60)
        ) {
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
                prop_assert_eq!(held + slots.free.total(), slots.count);
                let joined =
                    slots.free.ranges().zip(slots.free.ranges().skip(1)).all(|(one, next)| one.end < next.start);
                prop_assert!(joined);
            }
        }
    }
}
