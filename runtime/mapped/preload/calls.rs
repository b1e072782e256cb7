//! The functions of the C library that are replaced.

use std::cell::Cell;
use std::ffi::{c_int, c_uchar, c_uint, c_void};

use crate::fragments;
use crate::opens;
use crate::pool::{self, Request, kernel};

thread_local! {
    /// Whether this thread is in [`ours`]: what this library maps for itself is the kernel's.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `run`; a panic is the same as "not ours".
pub fn ours<T>(run: impl FnOnce() -> Option<T>) -> Option<T> {
    // While a thread ends, it has no such variable, and maps no model.
    if INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(true) {
        return None;
    }
    let result = pool::without_panic(run);
    let _ = INSIDE.try_with(|inside| inside.set(false));
    result
}

pub fn do_ours(run: impl FnOnce()) {
    let _ = ours(|| {
        run();
        Some(())
    });
}

fn set_errno(number: c_int) {
    // SAFETY: this thread's own errno.
    unsafe { *libc::__errno_location() = number };
}

fn in_range(address: *mut c_void) -> bool {
    pool::holds(address as u64)
}

/// # Safety
/// That of mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    let fixed = flags & libc::MAP_FIXED != 0;
    if fixed && flags & libc::MAP_FIXED_NOREPLACE == 0 && pool::overlaps(address as u64, len as u64) {
        do_ours(|| fragments::refuse_over(address as u64, len as u64));
        set_errno(libc::ENOMEM);
        return libc::MAP_FAILED;
    }
    let wanted = fd >= 0
        && prot & libc::PROT_READ != 0
        && !fixed
        && flags & (libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE) == 0;
    if wanted {
        let found = ours(|| {
            let offset = u64::try_from(offset).ok()?;
            let private = flags & libc::MAP_TYPE == libc::MAP_PRIVATE;
            pool::map(&Request { fd, len: len as u64, offset, writable: prot & libc::PROT_WRITE != 0, private })
        });
        if let Some(found) = found {
            return found as *mut c_void;
        }
    }
    if fd >= 0 && flags & libc::MAP_ANONYMOUS == 0 && len as u64 >= pool::LEAST {
        opens::mapped_elsewhere(fd);
    }
    let arguments = [address as u64, len as u64, prot as u64, flags as u64, fd as i64 as u64, offset as u64];
    // SAFETY: as the caller promised.
    unsafe { kernel(libc::SYS_mmap, arguments) as *mut c_void }
}

/// # Safety
/// That of mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: as the caller promised.
    unsafe { mmap(address, len, prot, flags, fd, offset) }
}

/// # Safety
/// That of munmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(address: *mut c_void, len: usize) -> c_int {
    if in_range(address) {
        if !(address as u64).is_multiple_of(pool::page_size()) || len == 0 {
            set_errno(libc::EINVAL);
            return -1;
        }
        do_ours(|| fragments::unmap(address as u64, len as u64));
        return 0;
    }
    // SAFETY: as the caller promised.
    unsafe { kernel(libc::SYS_munmap, [address as u64, len as u64, 0, 0, 0, 0]) as c_int }
}

/// # Safety
/// That of madvise(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int {
    if in_range(address) {
        return 0;
    }
    // SAFETY: as the caller promised.
    unsafe { kernel(libc::SYS_madvise, [address as u64, len as u64, advice as u64, 0, 0, 0]) as c_int }
}

/// # Safety
/// That of posix_madvise(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int {
    // POSIX_MADV_DONTNEED loses nothing, unlike MADV_DONTNEED, so the C library ignores it too.
    if in_range(address) || advice == libc::POSIX_MADV_DONTNEED {
        return 0;
    }
    // SAFETY: as the caller promised.
    let result = unsafe { kernel(libc::SYS_madvise, [address as u64, len as u64, advice as u64, 0, 0, 0]) };
    if result == 0 { 0 } else { std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL) }
}

/// # Safety
/// That of mlock(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(address: *const c_void, len: usize) -> c_int {
    if in_range(address.cast_mut()) {
        return 0;
    }
    // SAFETY: as the caller promised.
    unsafe { kernel(libc::SYS_mlock, [address as u64, len as u64, 0, 0, 0, 0]) as c_int }
}

/// # Safety
/// That of mlock2(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(address: *const c_void, len: usize, flags: c_uint) -> c_int {
    if in_range(address.cast_mut()) {
        return 0;
    }
    // SAFETY: as the caller promised.
    unsafe { kernel(libc::SYS_mlock2, [address as u64, len as u64, flags.into(), 0, 0, 0]) as c_int }
}

/// # Safety
/// That of mlockall(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    // It would bring in all pages of the files, and wait for ever where they are more than the frames.
    if flags & libc::MCL_CURRENT != 0 && pool::holds_any() {
        do_ours(fragments::refuse_lock);
        set_errno(libc::ENOMEM);
        return -1;
    }
    // SAFETY: as the caller promised.
    unsafe { kernel(libc::SYS_mlockall, [flags as u64, 0, 0, 0, 0, 0]) as c_int }
}

/// # Safety
/// That of munlock(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munlock(address: *const c_void, len: usize) -> c_int {
    if in_range(address.cast_mut()) {
        return 0;
    }
    // SAFETY: as the caller promised.
    unsafe { kernel(libc::SYS_munlock, [address as u64, len as u64, 0, 0, 0, 0]) as c_int }
}

/// # Safety
/// That of mprotect(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(address: *mut c_void, len: usize, prot: c_int) -> c_int {
    if in_range(address) {
        // Pages stay readable, and writable where they were mapped so. Whoever asks for less gets that; a mapping that
        // was read-only stays so.
        if prot & libc::PROT_WRITE == 0 || pool::is_private(address as u64) {
            return 0;
        }
        set_errno(libc::EACCES);
        return -1;
    }
    // SAFETY: as the caller promised.
    unsafe { kernel(libc::SYS_mprotect, [address as u64, len as u64, prot as u64, 0, 0, 0]) as c_int }
}

/// # Safety
/// That of mincore(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mincore(address: *mut c_void, len: usize, vector: *mut c_uchar) -> c_int {
    if in_range(address) {
        // SAFETY: the caller's vector has a byte for each page.
        unsafe { vector.write_bytes(1, len.div_ceil(pool::page_size() as usize)) };
        return 0;
    }
    // SAFETY: as the caller promised.
    unsafe { kernel(libc::SYS_mincore, [address as u64, len as u64, vector as u64, 0, 0, 0]) as c_int }
}

/// The C library's has the last argument only with `MREMAP_FIXED`. On the processors that Rust calls `x86_64` and
/// `aarch64`, a variable argument is where a fifth one is, and it is looked at with that flag only.
///
/// # Safety
/// That of mremap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    wanted: *mut c_void,
) -> *mut c_void {
    let fixed = flags & libc::MREMAP_FIXED != 0;
    let wanted = if fixed { wanted as u64 } else { 0 };
    if in_range(old) {
        let moved = ours(|| Some(fragments::remap(old as u64, old_len as u64, new_len as u64, flags, wanted)));
        match moved.unwrap_or(Err(libc::ENOMEM)) {
            Ok(address) => return address as *mut c_void,
            Err(number) => {
                set_errno(number);
                return libc::MAP_FAILED;
            }
        }
    }
    if fixed && pool::overlaps(wanted, new_len as u64) {
        do_ours(|| fragments::refuse_over(wanted, new_len as u64));
        set_errno(libc::ENOMEM);
        return libc::MAP_FAILED;
    }
    let arguments = [old as u64, old_len as u64, new_len as u64, flags as u64, wanted, 0];
    // SAFETY: as the caller promised.
    unsafe { kernel(libc::SYS_mremap, arguments) as *mut c_void }
}

/// # Safety
/// That of posix_fadvise(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_fadvise(fd: c_int, offset: i64, len: i64, advice: c_int) -> c_int {
    // To fill the page cache with a file that is mapped here would take the memory twice.
    if advice == libc::POSIX_FADV_WILLNEED && ours(|| Some(pool::is_mapped(fd))) == Some(true) {
        return 0;
    }
    let arguments = [fd as i64 as u64, offset as u64, len as u64, advice as u64, 0, 0];
    // The function returns its error, and leaves errno alone.
    // SAFETY: this thread's own errno.
    let before = unsafe { *libc::__errno_location() };
    // SAFETY: as the caller promised.
    let result = unsafe { kernel(libc::SYS_fadvise64, arguments) };
    let error = if result == 0 { 0 } else { std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL) };
    set_errno(before);
    error
}

/// # Safety
/// That of posix_fadvise(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_fadvise64(fd: c_int, offset: i64, len: i64, advice: c_int) -> c_int {
    // SAFETY: as the caller promised.
    unsafe { posix_fadvise(fd, offset, len, advice) }
}

/// # Safety
/// That of readahead(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readahead(fd: c_int, offset: i64, count: usize) -> isize {
    if ours(|| Some(pool::is_mapped(fd))) == Some(true) {
        return 0;
    }
    // SAFETY: as the caller promised.
    unsafe { kernel(libc::SYS_readahead, [fd as i64 as u64, offset as u64, count as u64, 0, 0, 0]) as isize }
}
