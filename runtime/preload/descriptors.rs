//! Descriptors of this library stay open, whatever the program closes: some programs close all that they do not know.
//!
//! A descriptor is marked by whoever made it, before anybody else can know its number: the replaced functions that open
//! files mark what they open while the runtime opens something on this thread ([`protecting`]), and the runtime tells
//! of what it makes by other calls. The mark goes before the descriptor is closed ([`release`]). So no descriptor of
//! the program's is ever marked, unless the program has closed a marked one by a raw system call; a function that gets
//! such a number for the program takes the mark off.
//!
//! Threads that this library [starts](start_thread) mark all that they open, and so do those of the runtime, which are
//! known by their names.

use std::cell::Cell;
use std::ffi::{c_int, c_uint};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use outcore::os::descriptors::on_descriptor;

/// Descriptors from here on are not protected: a process that has so many does not count them up to close them.
const MOST: usize = 1 << 16;

/// One bit for each descriptor of this library.
static OWNED: [AtomicU64; MOST / 64] = [const { AtomicU64::new(0) }; MOST / 64];

fn place(fd: c_int) -> Option<(&'static AtomicU64, u64)> {
    let at = usize::try_from(fd).ok()?;
    Some((OWNED.get(at / 64)?, 1 << (at % 64)))
}

thread_local! {
    /// Whether what this thread opens by name is the library's.
    static PROTECTS: Cell<bool> = const { Cell::new(false) };
}

/// Sets [`PROTECTS`] until it is dropped, and then to what it was before.
struct Protects(bool);

impl Protects {
    fn new() -> Self {
        Self(PROTECTS.try_with(|protects| protects.replace(true)).unwrap_or(false))
    }
}

impl Drop for Protects {
    fn drop(&mut self) {
        let _ = PROTECTS.try_with(|protects| protects.set(self.0));
    }
}

/// Runs `open`, and protects what it opens. The caller takes no signals, so no handler of the program's opens a file of
/// its own meanwhile on this thread.
pub fn protecting<T>(open: impl FnOnce() -> T) -> T {
    on_descriptor(protect);
    let _until = Protects::new();
    open()
}

/// Starts a thread of the library's, and protects all that it opens.
pub fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let protected = move || {
        let _until = Protects::new();
        work();
    };
    std::thread::Builder::new().name(name.to_owned()).spawn(protected).map(drop)
}

/// This thread has opened a file: for the library, or for the program.
pub fn opened(fd: c_int) {
    if PROTECTS.try_with(Cell::get).unwrap_or(false) || is_own_thread() {
        protect(fd);
    } else if is_ours(fd) {
        release(fd);
    }
}

pub fn protect(fd: c_int) {
    if let Some((word, bit)) = place(fd) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// Whether a descriptor is this library's.
pub fn is_ours(fd: c_int) -> bool {
    place(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

/// The library closes it itself.
pub fn release(fd: c_int) {
    if let Some((word, bit)) = place(fd) {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// Whether this is one of the runtime's threads, by its name: they close what they opened.
pub fn is_own_thread() -> bool {
    let mut name = [0u8; 16];
    // SAFETY: a buffer of the 16 bytes that the kernel writes.
    let told = unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    told == 0 && ["outcore-", "faulting-", "iou-"].iter().any(|own| name.starts_with(own.as_bytes()))
}

/// The parts of a range of descriptors that are not this library's: first and last.
pub fn others(first: c_uint, last: c_uint) -> Vec<(c_uint, c_uint)> {
    let (mut parts, mut from) = (Vec::new(), first);
    for fd in (first..=last.min(MOST as c_uint - 1)).filter(|fd| is_ours(*fd as c_int)) {
        if from < fd {
            parts.push((from, fd - 1));
        }
        from = fd + 1;
    }
    if from <= last {
        parts.push((from, last));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_closed_leaves_what_is_ours() {
        [60_000, 60_001, 60_005].into_iter().for_each(protect);
        assert_eq!(others(59_990, c_uint::MAX), [(59_990, 59_999), (60_002, 60_004), (60_006, c_uint::MAX)]);
        assert_eq!(others(60_000, 60_001), []);
        release(60_001);
        assert_eq!(others(60_000, 60_001), [(60_001, 60_001)]);
        assert!(is_ours(60_005) && !is_ours(60_006) && !is_ours(-1) && !is_ours(c_int::MAX));
    }

    /// A file that a thread of the runtime's had open for a moment was closed by the program, and then by the thread.
    #[test]
    fn regression_what_a_thread_of_the_runtime_opens_is_ours() {
        for (name, fd, is_its) in [("outcore-keeper", 49_000, true), ("faulting-7", 49_001, true), ("x", 49_002, false)]
        {
            let thread = std::thread::Builder::new().name(name.to_owned());
            assert!(thread.spawn(move || opened(fd)).is_ok_and(|opens| opens.join().is_ok()));
            assert_eq!(is_ours(fd), is_its, "{name}");
        }
    }

    #[test]
    fn regression_what_a_thread_of_the_library_opens_is_ours() {
        let (done, ended) = std::sync::mpsc::channel();
        let opens = move || {
            // What is opened for a moment changes nothing of what comes later.
            protecting(|| ());
            opened(50_000);
            let _ = done.send(());
        };
        assert!(start_thread("of the library", opens).is_ok() && ended.recv().is_ok());
        assert!(std::thread::spawn(|| opened(50_001)).join().is_ok());
        assert!(is_ours(50_000) && !is_ours(50_001));
        // The program has got the number by a call that the library does not see closed.
        opened(50_000);
        assert!(!is_ours(50_000));
    }
}
