//! Raw calls of the kernel, functions of the C library behind the ones here, and what the kernel says of this process.

use std::ffi::{CStr, c_int, c_long};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of a page of the kernel.
pub use outcore::os::kernel_pages::system_page_bytes as page_size;

/// This length up to the end of its last page.
pub fn whole_pages(len: u64) -> u64 {
    len.next_multiple_of(page_size())
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
