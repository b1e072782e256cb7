//! Raw calls of the kernel, functions of the C library behind the ones here, and what the kernel says of this process.

use std::ffi::{CStr, c_int, c_long};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of a page of the kernel.
pub fn page_size() -> u64 {
    // SAFETY: a plain question.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

/// This length up to the end of its last page.
pub fn whole_pages(len: u64) -> u64 {
    len.next_multiple_of(page_size())
}

/// How many descriptors this process may have.
pub fn most_descriptors() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is valid for writing. If the call fails, it stays as it is.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    limit.rlim_cur
}

/// A system call. It takes all arguments as 64 bits: of shorter ones the C library's `syscall`, whose arguments are
/// variadic, would pass on whatever the upper half of their place on the stack holds.
///
/// # Safety
/// That of the call.
pub unsafe fn kernel(number: c_long, arguments: [u64; 6]) -> c_long {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: as the caller promised.
    unsafe { libc::syscall(number, a, b, c, d, e, f) }
}

/// The C library's own function of this name.
pub fn next(name: &CStr, known: &AtomicUsize) -> usize {
    match known.load(Ordering::Relaxed) {
        0 => {
            // SAFETY: a plain question.
            let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) } as usize;
            known.store(found, Ordering::Relaxed);
            found
        }
        found => found,
    }
}

pub fn set_errno(number: c_int) {
    // SAFETY: this thread's own errno.
    unsafe { *libc::__errno_location() = number };
}

pub fn errno() -> c_int {
    // SAFETY: this thread's own errno.
    unsafe { *libc::__errno_location() }
}

/// Lines on standard error, in one piece, without the program's stdio.
pub fn say(lines: &str) {
    let line = format!("outcore: {}\n", lines.replace('\n', "\noutcore: "));
    // SAFETY: `write` gets a buffer of that many bytes. That nobody reads it is no error here.
    let _ = unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
}
