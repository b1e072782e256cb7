//! Descriptors of this library stay open, whatever the program closes: some programs close all that they do not know.
//!
//! A descriptor is marked by whoever made it, on the library's [side](crate::sides), so before a thread of the program
//! can close it: the replaced functions that open files mark what the library's code opens, and the runtime reports
//! what it makes by other calls. The mark goes as the descriptor is closed. So no descriptor of the program's is ever
//! marked, unless the program has closed a marked one by a raw system call; a function that gets such a number for the
//! program takes the mark off.

use std::ffi::{c_int, c_uint};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use outcore::os::descriptors::{making, on_descriptors};

use crate::inside::is_library;
use crate::process::{in_a_child, is_this_process};
use crate::sides::{as_library, as_program};
use crate::sys::{kernel, set_errno};

/// Descriptors from here on are not protected: a process that has so many does not count them up to close them.
const MOST: usize = 1 << 16;

/// One bit for each descriptor of this library.
static OWNED: [AtomicU64; MOST / 64] = [const { AtomicU64::new(0) }; MOST / 64];

fn place(fd: c_int) -> Option<(&'static AtomicU64, u64)> {
    let at = usize::try_from(fd).ok()?;
    Some((OWNED.get(at / 64)?, 1 << (at % 64)))
}

/// Whether the library may have descriptors: from then on the program's are closed on its side.
static HAS_ANY: AtomicBool = AtomicBool::new(false);

/// The library is about to make its first descriptors. What the program is closing just now is not waited for.
pub fn begin() {
    HAS_ANY.store(true, Ordering::SeqCst);
    on_descriptors(make_protected);
}

fn make_protected(make: &mut dyn FnMut() -> Option<RawFd>) {
    as_library(|| make().into_iter().for_each(protect));
}

/// Whether the marks are those of this process's descriptors. A child by `vfork` has the marks of its parent, and
/// descriptors of its own.
fn are_of_this_process() -> bool {
    HAS_ANY.load(Ordering::SeqCst) && is_this_process() && !in_a_child()
}

/// Runs `open`, a function of the C library's, for the library or for the program. `of` is the descriptor that it got.
pub fn opening<T>(open: impl FnOnce() -> T, of: impl FnOnce(&T) -> c_int) -> T {
    if !are_of_this_process() {
        return open();
    }
    if is_library() {
        return as_library(|| {
            let opened = open();
            protect(of(&opened));
            opened
        });
    }
    let opened = open();
    let fd = of(&opened);
    if is_ours(fd) {
        release(fd);
    }
    opened
}

/// Closes a descriptor, or replaces it, by `of_kernel`: any for the library, and any but the library's for the program.
/// The program gets `refusal` for one of the library's.
pub fn closing(fd: c_int, refusal: c_int, of_kernel: impl Fn() -> c_int) -> c_int {
    if !are_of_this_process() {
        return of_kernel();
    }
    if is_library() {
        return as_library(|| {
            release(fd);
            of_kernel()
        });
    }
    as_program(|| {
        if is_ours(fd) {
            set_errno(refusal);
            return -1;
        }
        of_kernel()
    })
}

/// Closes a range of descriptors by `of_kernel`, which gets the first and the last one of each part that is not this
/// library's, until one is refused.
pub fn closing_range(first: c_uint, last: c_uint, of_kernel: impl Fn(c_uint, c_uint) -> c_int) -> c_int {
    if !are_of_this_process() {
        return of_kernel(first, last);
    }
    as_program(|| others(first, last, of_kernel))
}

/// A copy of a descriptor, where programs that close what they do not know by raw system calls look last.
///
/// # Errors
/// Those of fcntl(2).
pub fn copied_high(file: &impl AsRawFd) -> io::Result<OwnedFd> {
    making(|| {
        // SAFETY: a copy of a descriptor that is open.
        let high = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 64) };
        if high < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the copy that was just made, of which nobody else knows.
        Ok(unsafe { OwnedFd::from_raw_fd(high) })
    })
}

/// Closes a descriptor of the library's.
pub fn close(fd: c_int) {
    as_library(|| {
        release(fd);
        // SAFETY: a descriptor that the caller owns.
        unsafe { kernel(libc::SYS_close, [fd as i64 as u64, 0, 0, 0, 0, 0]) };
    });
}

/// The program has closed this descriptor of the library's by a raw system call, and may have another one there.
pub fn lost(fd: c_int) {
    as_library(|| release(fd));
}

fn protect(fd: c_int) {
    if let Some((word, bit)) = place(fd) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// Whether a descriptor is this library's.
fn is_ours(fd: c_int) -> bool {
    place(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

fn release(fd: c_int) {
    if let Some((word, bit)) = place(fd) {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// Calls `part` for each part of a range that has no mark, until a result is not 0.
fn others(first: c_uint, last: c_uint, mut part: impl FnMut(c_uint, c_uint) -> c_int) -> c_int {
    let mut from = first;
    let words = OWNED.iter().zip((0..).step_by(64)).skip(first as usize / 64);
    for (word, base) in words.take_while(|(_, base)| *base <= last) {
        let mut marks = word.load(Ordering::Relaxed);
        while marks != 0 {
            let fd = base + marks.trailing_zeros();
            marks &= marks - 1;
            if fd < from || fd > last {
                continue;
            }
            if from < fd {
                let result = part(from, fd - 1);
                if result != 0 {
                    return result;
                }
            }
            from = fd + 1;
        }
    }
    if from <= last { part(from, last) } else { 0 }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn parts(first: c_uint, last: c_uint) -> Vec<(c_uint, c_uint)> {
        let mut parts = Vec::new();
        others(first, last, |first, last| {
            parts.push((first, last));
            0
        });
        parts
    }

    #[test]
    fn what_is_closed_leaves_what_is_ours() {
        [60_000, 60_001, 60_005].into_iter().for_each(protect);
        assert_eq!(parts(59_990, c_uint::MAX), [(59_990, 59_999), (60_002, 60_004), (60_006, c_uint::MAX)]);
        assert_eq!(parts(60_000, 60_001), []);
        assert_eq!(parts(60_005, 60_005), []);
        assert_eq!(parts(c_uint::MAX, c_uint::MAX), [(c_uint::MAX, c_uint::MAX)]);
        release(60_001);
        assert_eq!(parts(60_000, 60_001), [(60_001, 60_001)]);
        assert!(is_ours(60_005) && !is_ours(60_006) && !is_ours(-1) && !is_ours(c_int::MAX));
        // The first refusal ends it.
        let calls = Cell::new(0);
        let refused = others(59_990, c_uint::MAX, |_, _| {
            calls.set(calls.get() + 1);
            -1
        });
        assert_eq!((refused, calls.get()), (-1, 1));
    }

    /// A file that a thread of the runtime's had open for a moment was closed by the program, and then by the thread.
    #[test]
    fn regression_what_a_thread_of_the_runtime_opens_is_ours() {
        begin();
        for (name, fd, is_its) in [("outcore-keeper", 49_000, true), ("faulting-7", 49_001, true), ("x", 49_002, false)]
        {
            let thread = std::thread::Builder::new().name(name.to_owned());
            let opens = thread.spawn(move || opening(|| fd, |fd| *fd));
            assert!(opens.is_ok_and(|opens| opens.join().is_ok()));
            assert_eq!(is_ours(fd), is_its, "{name}");
            assert_eq!(closing(fd, libc::EBADF, || 0), if is_its { -1 } else { 0 });
        }
    }

    /// A number that a thread of the runtime's has got between the look of one that closes it and the kernel's call, or
    /// has not marked yet.
    #[test]
    fn regression_what_is_being_opened_is_not_closed_by_the_program() {
        const FIRST: c_int = 900;
        // SAFETY: only this test has descriptors from here on.
        let of_kernel = |fd: c_int| move || unsafe { kernel(libc::SYS_close, [fd as u64, 0, 0, 0, 0, 0]) as c_int };
        // SAFETY: as above.
        let range = |first: c_uint, last: c_uint| unsafe {
            kernel(libc::SYS_close_range, [first.into(), last.into(), 0, 0, 0, 0]) as c_int
        };
        let opens = move || {
            for _ in 0..20_000 {
                // SAFETY: a copy of a descriptor, closed below.
                let fd = opening(|| unsafe { libc::fcntl(2, libc::F_DUPFD_CLOEXEC, FIRST) }, |fd| *fd);
                // SAFETY: a plain question.
                let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
                assert!(fd >= FIRST && flags >= 0, "{fd} was closed");
                assert_eq!(closing(fd, libc::EBADF, of_kernel(fd)), 0, "{fd} was closed");
            }
        };
        begin();
        let opens = std::thread::Builder::new().name("outcore-opens".to_owned()).spawn(opens);
        while opens.as_ref().is_ok_and(|opens| !opens.is_finished()) {
            (FIRST..FIRST + 3).for_each(|fd| _ = closing(fd, libc::EBADF, of_kernel(fd)));
            closing_range(FIRST as c_uint, FIRST as c_uint + 9, range);
        }
        assert!(opens.is_ok_and(|opens| opens.join().is_ok()));
    }

    #[test]
    fn what_the_library_opens_on_a_thread_of_the_program_is_ours() {
        begin();
        let opened = crate::inside::ours(|| Some(opening(|| 50_000, |fd| *fd)));
        assert!(opened.is_some() && is_ours(50_000));
        assert_eq!(crate::inside::ours(|| Some(closing(50_000, libc::EBADF, || 0))), Some(0));
        assert!(!is_ours(50_000));
        // The program has got the number by a call that the library does not see closed.
        protect(50_000);
        opening(|| 50_000, |fd| *fd);
        assert!(!is_ours(50_000));
    }
}
