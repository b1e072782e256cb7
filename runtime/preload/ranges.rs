//! The ranges of addresses that mapped files have. They are looked at without a lock: by the functions that replace
//! those of the C library, and in children by `fork`.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use outcore::os::limits::most_descriptors;
use outcore_mapped::Written;

use crate::sys::{kernel, whole_pages};

/// The range of addresses that all mapped files lie in, so that other calls are told apart without a lock.
static LOWEST: AtomicU64 = AtomicU64::new(u64::MAX);
static HIGHEST: AtomicU64 = AtomicU64::new(0);

/// A mapped range for a child by `fork`, which gets the file itself there.
pub struct Slot {
    start: AtomicU64,
    len: AtomicU64,
    /// Plus one; 0 if the slot is free.
    descriptor: AtomicU64,
    /// Of a range that the program writes: which pages it has written.
    written: AtomicPtr<Written>,
}

impl Slot {
    const fn new() -> Self {
        let (start, len, descriptor) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        Self { start, len, descriptor, written: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// `own` is a descriptor of this library's.
    pub fn fill(&self, start: u64, len: u64, own: c_int, written: Option<&Arc<Written>>) {
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        let written = written.map_or(std::ptr::null_mut(), |written| Arc::as_ptr(written).cast_mut());
        self.written.store(written, Ordering::Relaxed);
        self.descriptor.store((own + 1) as u64, Ordering::Release);
        LOWEST.fetch_min(start, Ordering::Relaxed);
        HIGHEST.fetch_max(start + len, Ordering::Relaxed);
    }

    pub fn clear(&self) {
        let own = self.descriptor.swap(0, Ordering::AcqRel);
        if own > 0 {
            // SAFETY: a descriptor of this library's, of which nobody knows any more.
            unsafe { libc::close((own - 1) as c_int) };
        }
    }
}

/// The most files that are mapped at a time.
pub const FILES_MAX: usize = 256;
/// One in so many of the descriptors that this process may have is taken by a mapped file.
const DESCRIPTORS_PART: u64 = 4;
static FOR_CHILDREN: [Slot; FILES_MAX] = [const { Slot::new() }; FILES_MAX];

/// How many files may be mapped here. Each takes a descriptor, and the store keeps some of those that it reads by: the
/// rest is the program's.
pub fn files_most() -> usize {
    usize::try_from(most_descriptors() / DESCRIPTORS_PART).unwrap_or(FILES_MAX).clamp(1, FILES_MAX)
}

pub fn free_slot() -> Option<&'static Slot> {
    let is_free = |slot: &&Slot| slot.descriptor.load(Ordering::Acquire) == 0;
    FOR_CHILDREN.iter().take(files_most()).find(is_free)
}

/// Whether this address lies in a mapping that the program writes.
pub fn is_private(address: u64) -> bool {
    let of = |slot: &&Slot| range_of(slot).is_some_and(|(start, end, _)| (start..end).contains(&address));
    FOR_CHILDREN.iter().find(of).is_some_and(|slot| !slot.written.load(Ordering::Relaxed).is_null())
}

/// The first address and the descriptor of the mapped file that has this address.
pub fn descriptor_of(address: u64) -> Option<(u64, u64)> {
    FOR_CHILDREN.iter().find_map(|slot| {
        let (start, end, fd) = range_of(slot)?;
        (start..end).contains(&address).then_some((start, fd))
    })
}

/// First address, the one behind the last, and the descriptor of a file.
fn range_of(slot: &Slot) -> Option<(u64, u64, u64)> {
    let fd = slot.descriptor.load(Ordering::Acquire).checked_sub(1)?;
    let start = slot.start.load(Ordering::Relaxed);
    Some((start, start + slot.len.load(Ordering::Relaxed), fd))
}

/// The first address of a mapped file that has any of these addresses.
pub fn overlapped(address: u64, len: u64) -> Option<u64> {
    let end = address.saturating_add(len);
    if end <= LOWEST.load(Ordering::Relaxed) || address >= HIGHEST.load(Ordering::Relaxed) {
        return None;
    }
    let found = |slot| range_of(slot).filter(|(start, behind, _)| address < *behind && *start < end);
    FOR_CHILDREN.iter().find_map(found).map(|(start, ..)| start)
}

/// The part of these addresses that belongs to the first mapped file that has any: its beginning and its end.
pub fn first_part(address: u64, end: u64) -> Option<(u64, u64)> {
    let parts = FOR_CHILDREN.iter().filter_map(range_of).filter(|(start, behind, _)| address < *behind && *start < end);
    parts.map(|(start, behind, _)| (start.max(address), behind.min(end))).min()
}

/// Whether a mapped file has any of these addresses.
pub fn overlaps(address: u64, len: u64) -> bool {
    overlapped(address, len).is_some()
}

/// Whether any file is mapped here.
pub fn holds_any() -> bool {
    HIGHEST.load(Ordering::Relaxed) > 0
}

/// Whether this address lies in a mapped file.
pub fn holds(address: u64) -> bool {
    overlaps(address, 1)
}

/// Whether system calls wait for pages too. The same for all files.
static KERNEL_WAITS: AtomicBool = AtomicBool::new(false);

/// A file was mapped, and this is known of it: whether system calls wait for its pages.
pub fn set_kernel_waits(wait: bool) {
    KERNEL_WAITS.store(wait, Ordering::Relaxed);
}

/// Whether system calls wait for pages of mapped files.
pub fn kernel_waits() -> bool {
    KERNEL_WAITS.load(Ordering::Relaxed)
}

/// Called in a child by `fork`. It has nothing of these ranges, and no thread that could answer for them: it gets the
/// files themselves. Pages that its parent has written are not to be had here, and what the file has there would be
/// other bytes: access to them is SIGSEGV.
pub fn leave_to_kernel() {
    for slot in &FOR_CHILDREN {
        let Some((start, end, fd)) = range_of(slot) else { continue };
        // SAFETY: null, or of an `Arc` that is dropped after the slot is cleared. The child has a copy of both.
        let written = unsafe { slot.written.load(Ordering::Relaxed).as_ref() };
        let prot = if written.is_some() { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
        // SAFETY: the raw call, at addresses that this process does not have, of a descriptor that is ours.
        unsafe { kernel(libc::SYS_mmap, [start, end - start, prot as u64, flags as u64, fd, 0]) };
        for part in written.into_iter().flat_map(Written::parts) {
            let (first, len) = (start + part.start, whole_pages(part.end - part.start));
            // SAFETY: the raw call, on a part of what was just mapped.
            unsafe { kernel(libc::SYS_mprotect, [first, len, libc::PROT_NONE as u64, 0, 0, 0]) };
        }
    }
    // From now on all of it is the kernel's.
    LOWEST.store(u64::MAX, Ordering::Relaxed);
    HIGHEST.store(0, Ordering::Relaxed);
}
