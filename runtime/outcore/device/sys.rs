//! Address space: the few memory calls that the host device and the host tier need.
//!
//! # Invariants
//!
//! 1. A [`Region`] owns its range for life: nothing else in the process is placed there, because every change inside it
//!    replaces a mapping in one call. Only a call that fails because the kernel is short of memory for itself may leave
//!    a hole. The caller then [refills](refill) the range, or never touches it again.
//! 2. A range that is [moved](relocate) lies within one mapping, as `mremap` requires: it was committed in one call, or
//!    moved there in one, and since then was changed only as a whole.

use std::ffi::c_void;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};

use super::mappings::{self, Claim};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::Bytes;
pub(super) use crate::os::kernel_pages::system_page_bytes;

const RESERVE_FLAGS: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

fn size(len: u64) -> io::Result<usize> {
    usize::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))
}

fn pointer(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A reserved address range; unmapped on drop.
#[derive(Debug)]
pub(super) struct Region {
    base: u64,
    len: u64,
    /// Its share of the process's mappings.
    #[allow(dead_code, reason = "held")]
    claim: Option<Claim>,
}

impl Region {
    /// Reserves `len` bytes of inaccessible address space at a multiple of `align`, for `what`.
    ///
    /// # Errors
    /// [`ErrorKind::TooManyMappings`] if the process has too many; [`ErrorKind::OutOfMemory`] if the kernel gives no
    /// addresses.
    pub(super) fn reserve(len: u64, align: u64, what: &str) -> Result<Self> {
        if len == 0 {
            return Ok(Self { base: align, len: 0, claim: None });
        }
        let named = format!("{} of addresses for {what}", Bytes::new(len));
        let claim = Claim::of_region(&named)?;
        let refuse = |cause: io::Error| {
            mappings::shortage(&named, &cause, 0).unwrap_or_else(|| {
                Error::new(ErrorKind::OutOfMemory, format!("cannot reserve {named}"))
                    .remedy("raise the address-space limit (ulimit -v), or use fewer or smaller segments")
                    .caused_by(cause)
            })
        };
        let too_large = || refuse(io::Error::from_raw_os_error(libc::ENOMEM));
        let padded = len.checked_add(align).ok_or_else(too_large)?;
        let padded_size = size(padded).map_err(refuse)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe { libc::mmap(ptr::null_mut(), padded_size, libc::PROT_NONE, RESERVE_FLAGS, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(refuse(io::Error::last_os_error()));
        }
        let start = start.expose_provenance() as u64;
        // This cannot overflow: the kernel has given the whole padded range.
        let base = start.checked_next_multiple_of(align).unwrap_or(start);
        // SAFETY: the two ends are of the mapping just made.
        unsafe { unmap(start, base - start) };
        // SAFETY: as above.
        unsafe { unmap(base + len, padded - (base - start) - len) };
        mappings::register(base, len);
        Ok(Self { base, len, claim: Some(claim) })
    }

    pub(super) fn base(&self) -> u64 {
        self.base
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        mappings::unregister(self.base);
        // SAFETY: the region owns this range (invariant 1), and its owner drops it only when nothing points inside.
        unsafe { unmap(self.base, self.len) };
    }
}

/// Gives a range of addresses back.
///
/// # Safety
/// The range is the caller's, and nothing points inside.
unsafe fn unmap(base: u64, len: u64) {
    if len == 0 {
        return;
    }
    // SAFETY: the caller's promise.
    if unsafe { libc::munmap(pointer(base), len as usize) } != 0 {
        let cause = io::Error::last_os_error();
        tracing::error!(bytes = len, %cause, "cannot give an address range back");
    }
}

/// Puts fresh zeroed memory at `address`, replacing what was there. Nothing is committed until it is touched.
///
/// # Safety
/// The range lies in a [`Region`] of the caller's, and nobody uses what is behind it.
pub(super) unsafe fn commit(address: u64, len: u64, huge: bool) -> io::Result<()> {
    #[cfg(test)]
    refused()?;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = RESERVE_FLAGS | libc::MAP_FIXED;
    // SAFETY: the caller owns the range and nobody uses it.
    let got = unsafe { libc::mmap(pointer(address), size(len)?, prot, flags, -1, 0) };
    if got == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
    // A kernel without huge pages refuses the advice, which has no effect then.
    // SAFETY: advice about a range the caller owns; it changes no content.
    let _ = unsafe { libc::madvise(pointer(address), size(len)?, advice) };
    Ok(())
}

/// Gives the memory of a range back and makes the range inaccessible. The range merges with the inaccessible ranges
/// beside it, which keeps the number of mappings down.
///
/// # Safety
/// As for [`commit`].
pub(super) unsafe fn vacate(address: u64, len: u64) -> io::Result<()> {
    #[cfg(test)]
    refused()?;
    let flags = RESERVE_FLAGS | libc::MAP_FIXED;
    // SAFETY: the caller owns the range and nobody uses it.
    let got = unsafe { libc::mmap(pointer(address), size(len)?, libc::PROT_NONE, flags, -1, 0) };
    if got == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A refusal that a test sets for the calling thread.
#[cfg(test)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Every [`commit`] and every [`vacate`].
    Call,
    /// The same, and [`is_mapped`] finds nothing mapped in the range at that moment.
    CallAndRange,
}

#[cfg(test)]
thread_local! {
    static REFUSED: std::cell::Cell<Option<Refusal>> = const { std::cell::Cell::new(None) };
}

/// Runs `call` with this refusal in force.
#[cfg(test)]
pub(super) fn refusing<T>(refusal: Refusal, call: impl FnOnce() -> T) -> T {
    REFUSED.set(Some(refusal));
    let answer = call();
    REFUSED.set(None);
    answer
}

#[cfg(test)]
fn refused() -> io::Result<()> {
    REFUSED.get().map_or(Ok(()), |_| Err(io::Error::from_raw_os_error(libc::ENOMEM)))
}

/// Makes a committed range accessible or not; its content stays.
///
/// # Safety
/// The range lies in a [`Region`] of the caller's; when it becomes inaccessible nobody uses it.
pub(super) unsafe fn set_access(address: u64, len: u64, accessible: bool) -> io::Result<()> {
    let prot = if accessible { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
    // SAFETY: the caller owns the range.
    check(unsafe { libc::mprotect(pointer(address), size(len)?, prot) })
}

/// Makes a range that was never committed readable: it holds zeros, which take no memory.
///
/// # Safety
/// The range lies in a [`Region`] of the caller's.
pub(super) unsafe fn set_readable(address: u64, len: u64) -> io::Result<()> {
    // SAFETY: the caller owns the range.
    check(unsafe { libc::mprotect(pointer(address), size(len)?, libc::PROT_READ) })
}

/// Moves the memory behind `from` to `to`, replacing what was there. On success `from` holds nothing any more and is
/// still accessible: the caller [vacates](vacate) it. On failure nothing has moved; [`is_mapped`] tells whether `to` is
/// still the caller's.
///
/// # Safety
/// Both ranges lie in [`Region`]s of the caller's, and nobody uses them. `from` is within one mapping (invariant 2).
pub(super) unsafe fn relocate(from: u64, to: u64, len: u64) -> io::Result<()> {
    let len_size = size(len)?;
    // MREMAP_DONTUNMAP keeps the source range mapped: otherwise another thread's mmap could land in the hole before
    // it is reserved again.
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    // SAFETY: the caller owns both ranges and nobody uses them.
    let got = unsafe { libc::mremap(pointer(from), len_size, len_size, flags, pointer(to)) };
    if got == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Reserves a range again in which nothing is mapped. A [move](relocate) that failed may have unmapped its target
/// before.
///
/// # Errors
/// EEXIST if something is mapped there: the caller's own reservation if there was no hole, or else anybody's memory.
/// Other errors are the kernel's.
pub(super) fn refill(address: u64, len: u64) -> io::Result<()> {
    let reserve = RESERVE_FLAGS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: NOREPLACE changes nothing that is mapped.
    let got = unsafe { libc::mmap(pointer(address), size(len)?, libc::PROT_NONE, reserve, -1, 0) };
    if got == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether this kernel can move a mapping and keep its place reserved.
pub(super) fn probe_relocate() -> Result<()> {
    let page = system_page_bytes();
    let region = Region::reserve(2 * page, page, "a probe")?;
    // SAFETY: the region is ours and nobody else knows its addresses.
    let moved = unsafe { commit(region.base(), page, false) }
        // SAFETY: as above.
        .and_then(|()| unsafe { relocate(region.base(), region.base() + page, page) });
    moved.map_err(|cause| {
        Error::new(ErrorKind::Unsupported, "this kernel cannot move memory with mremap(MREMAP_DONTUNMAP)")
            .remedy("the host device needs Linux 5.7 or newer, outside sandboxes that replace the kernel (gVisor)")
            .caused_by(cause)
    })
}

/// Brings in the memory of a committed range, without changing its content. On kernels without `MADV_POPULATE_WRITE`
/// (before 5.14) it writes zeros, so the range must not hold anything yet.
///
/// # Safety
/// The range is committed, stays where it is during the call, and is used by nobody else.
pub(super) unsafe fn populate(address: u64, len: u64) -> io::Result<()> {
    // SAFETY: the range is committed; populating changes no content.
    let populated = check(unsafe { libc::madvise(pointer(address), size(len)?, libc::MADV_POPULATE_WRITE) });
    match populated {
        Err(cause) if cause.raw_os_error() == Some(libc::EINVAL) => {
            for offset in (0..len).step_by(system_page_bytes() as usize) {
                // SAFETY: inside the committed range, which the caller alone uses.
                unsafe { pointer(address + offset).cast::<u8>().write_volatile(0) };
            }
            Ok(())
        }
        other => other,
    }
}

/// Brings in the memory of a committed range, a huge page of `huge` bytes at a time, and splits it into small pages
/// that lie side by side. Each part can then go back to the system by itself; a huge page stays whole as long as any
/// part of it is in use.
///
/// # Errors
/// The kernel's. The range may still be in huge pages then.
///
/// # Safety
/// As for [`populate`], and nothing has been written to the range.
pub(super) unsafe fn populate_side_by_side(address: u64, len: u64, huge: u64) -> io::Result<()> {
    // SAFETY: the caller's promise.
    unsafe { populate(address, len) }?;
    let mark = |byte: u8| {
        for offset in (0..len).step_by(system_page_bytes() as usize) {
            // SAFETY: inside the committed range, which the caller alone uses.
            unsafe { pointer(address + offset).cast::<u8>().write_volatile(byte) };
        }
    };
    // Since Linux 6.12 a split drops pages that hold only zeros.
    mark(1);
    // Keeps the kernel from joining the pages again.
    // SAFETY: advice about a range the caller owns; it changes no content.
    let _ = unsafe { libc::madvise(pointer(address), size(len)?, libc::MADV_NOHUGEPAGE) };
    let page = system_page_bytes();
    for start in (address..address + len).step_by(huge as usize) {
        // The kernel splits a huge page when a part of it is advised to be cold. It skips a page that something else,
        // such as its own migration, holds at that moment. For small pages it only notes the advice.
        for part in [start, start + huge / 2] {
            // SAFETY: advice, which changes no content.
            check(unsafe { libc::madvise(pointer(part), size(page)?, libc::MADV_COLD) })?;
        }
    }
    mark(0);
    Ok(())
}

/// Whether this kernel splits its huge pages, of `huge` bytes, when [`populate_side_by_side`] asks for it. A process
/// finds this out once, or in several threads at once. There is no lock: a child by `fork` would wait for ever for a
/// thread of its parent that was finding out.
pub(super) fn splits_huge_pages(huge: u64) -> bool {
    const UNKNOWN: u8 = 0;
    const NO: u8 = 1;
    const YES: u8 = 2;
    static SPLITS: AtomicU8 = AtomicU8::new(UNKNOWN);
    const TRIED: u64 = 2;
    let try_it = || {
        let before = huge_pages_split();
        let tried = Region::reserve(TRIED * huge, huge, "a probe").and_then(|region| {
            // SAFETY: the region is ours and nobody else knows its addresses.
            let made = unsafe { commit(region.base(), region.len(), true) }
                // SAFETY: as above, and committed.
                .and_then(|()| unsafe { populate_side_by_side(region.base(), region.len(), huge) });
            made.map_err(|cause| Error::io("try how huge pages are split", cause))
        });
        // Others may split some at the same time. That is rare and harmless: blocks that are made as huge pages may
        // stay whole.
        let splits = tried.is_ok() && before.zip(huge_pages_split()).is_some_and(|(was, is)| is >= was + TRIED);
        if !splits {
            tracing::debug!(
                ?tried,
                "huge pages are not split here: frames smaller than one are made of scattered pages"
            );
        }
        SPLITS.store(if splits { YES } else { NO }, Ordering::Relaxed);
        splits
    };
    match SPLITS.load(Ordering::Relaxed) {
        UNKNOWN => try_it(),
        known => known == YES,
    }
}

/// How many huge pages the kernel has split since it was started.
fn huge_pages_split() -> Option<u64> {
    let counters = std::fs::read_to_string("/proc/vmstat").ok()?;
    counters.lines().find_map(|line| line.strip_prefix("thp_split_page ")?.trim().parse().ok())
}

/// How many bytes of a range of private memory the system has provided.
pub(super) fn resident(address: u64, len: u64) -> io::Result<u64> {
    let page = system_page_bytes();
    let mut pages = vec![0_u8; size(len.div_ceil(page))?];
    // SAFETY: the kernel writes a byte for each page of the range, for which there is room, and does not change the
    // range.
    check(unsafe { libc::mincore(pointer(address), size(len)?, pages.as_mut_ptr()) })?;
    Ok(pages.iter().filter(|page| **page & 1 != 0).count() as u64 * page)
}

/// Whether anything is mapped at the beginning of a page, accessible or not.
pub(super) fn is_mapped(address: u64) -> bool {
    #[cfg(test)]
    if REFUSED.get() == Some(Refusal::CallAndRange) {
        return false;
    }
    let mut page = 0_u8;
    // SAFETY: the kernel writes one byte for a range of one page, and does not change the range.
    let answer = check(unsafe { libc::mincore(pointer(address), system_page_bytes() as usize, &raw mut page) });
    answer.err().and_then(|cause| cause.raw_os_error()) != Some(libc::ENOMEM)
}

/// Gives the memory of a committed range back, and leaves it accessible: it reads as zeros, and gets memory again when
/// it is touched. If the range was locked, that memory is locked too.
///
/// # Safety
/// The range lies in a [`Region`] of the caller's, and nobody uses what is behind it.
pub(super) unsafe fn empty(address: u64, len: u64) -> io::Result<()> {
    let (at, bytes) = (pointer(address), size(len)?);
    // SAFETY: the caller owns the range, and nobody uses it.
    let emptied = check(unsafe { libc::madvise(at, bytes, libc::MADV_DONTNEED_LOCKED) });
    if emptied.as_ref().err().and_then(io::Error::raw_os_error) != Some(libc::EINVAL) {
        return emptied;
    }
    // Before Linux 5.18 locked memory has to be unlocked first.
    // SAFETY: unlocking changes no content.
    check(unsafe { libc::munlock(at, bytes) })?;
    // SAFETY: as for the first call.
    check(unsafe { libc::madvise(at, bytes, libc::MADV_DONTNEED) })?;
    // If it was not locked, or locking is not allowed, it goes on unlocked.
    let _ = lock_when_touched(address, len);
    Ok(())
}

/// Keeps a committed range `out` of children that the process forks from now on, or lets them have it again. Where it
/// is kept out, nothing is mapped in a child.
pub(super) fn keep_out_of_children(address: u64, len: u64, out: bool) -> io::Result<()> {
    let advice = if out { libc::MADV_DONTFORK } else { libc::MADV_DOFORK };
    // SAFETY: advice that changes no content in this process; a range that is not mapped is refused.
    check(unsafe { libc::madvise(pointer(address), size(len)?, advice) })
}

/// Locks the memory that a committed range has, and gets from now on; brings nothing in.
pub(super) fn lock_when_touched(address: u64, len: u64) -> io::Result<()> {
    // SAFETY: locking changes no content, and an unmapped range is refused.
    check(unsafe { libc::mlock2(pointer(address), size(len)?, libc::MLOCK_ONFAULT as libc::c_uint) })
}

/// Locks a committed range in memory.
pub(super) fn lock(address: u64, len: u64) -> io::Result<()> {
    // SAFETY: locking changes no content, and an unmapped range is refused.
    check(unsafe { libc::mlock(pointer(address), size(len)?) })
}

/// The error for a refused lock of host memory.
pub(super) fn lock_refused(len: Bytes, cause: io::Error) -> Error {
    Error::io(format!("lock {len} of host memory"), cause)
        .remedy("RLIMIT_MEMLOCK does not allow more locked memory; raise it (`ulimit -l`) or grant CAP_IPC_LOCK")
}

/// Prefers memory of one node of the machine for a range, as far as the node has room, when the range is first touched.
pub(super) fn prefer_node(address: u64, len: u64, node: u32) -> io::Result<()> {
    let mut nodes = [0_u64; 16];
    let limit = nodes.len() * 64;
    let Some(word) = nodes.get_mut(node as usize / 64) else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    *word = 1 << (node % 64);
    // SAFETY: a preference for a range; it changes no content, and the kernel reads as many bits as are given. It
    // counts one less than it is told.
    let outcome = unsafe {
        libc::syscall(libc::SYS_mbind, pointer(address), size(len)?, libc::MPOL_PREFERRED, nodes.as_ptr(), limit + 1, 0)
    };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Lowers the calling thread's priority: other threads that have work go first, and it still makes progress.
pub(super) fn stand_back() {
    // SAFETY: sets a scheduling property of the calling thread only (on Linux, 0 is the thread and not the process).
    let _ = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 10) };
}

/// Lets timers of the calling thread fire on time instead of up to 50 us late.
pub(super) fn exact_timers() {
    // SAFETY: sets a scheduling property of the calling thread only.
    let _ = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
}
