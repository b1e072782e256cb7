//! The functions of the C library that are replaced.

use std::ffi::{c_int, c_uchar, c_void};

use crate::pool::{self, kernel};

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
    let wanted = fd >= 0
        && prot == libc::PROT_READ
        && flags & (libc::MAP_FIXED | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE) == 0;
    if wanted && let Some(found) = pool::without_panic(|| pool::map(fd, len as u64, u64::try_from(offset).ok()?)) {
        return found as *mut c_void;
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
        // The pages go as others need their frames.
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
        // Pages stay readable. Whoever asks for less, or for a writable file, gets what a read-only file would give.
        if prot & libc::PROT_WRITE == 0 {
            return 0;
        }
        // SAFETY: this thread's own errno.
        unsafe { *libc::__errno_location() = libc::EACCES };
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
