//! What this library does on a thread of the program's: without signals, and without a panic that leaves it. What it
//! maps and closes meanwhile is its own.

use std::cell::Cell;
use std::io;
use std::panic::AssertUnwindSafe;

use outcore::os::signals::without_signals;

thread_local! {
    /// Whether this thread is in [`ours`]: what this library maps for itself is the kernel's.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    /// Whether this is one of the runtime's threads, as soon as somebody has asked.
    static OWN: Cell<Option<bool>> = const { Cell::new(None) };
}

/// Whether this thread is in [`ours`], where it takes no signals.
pub fn is_inside() -> bool {
    INSIDE.try_with(Cell::get).unwrap_or(false)
}

/// Whether what this thread does is the library's: it is in [`ours`], or one of the runtime's, which are known by their
/// names.
pub fn is_library() -> bool {
    let by_name = || {
        let mut name = [0u8; 16];
        // SAFETY: a buffer of the 16 bytes that the kernel writes.
        let said = unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
        said == 0 && ["outcore-", "faulting-"].iter().any(|own| name.starts_with(own.as_bytes()))
    };
    let is_own = |own: &Cell<Option<bool>>| {
        let is_own = own.get().unwrap_or_else(by_name);
        own.set(Some(is_own));
        is_own
    };
    is_inside() || OWN.try_with(is_own).unwrap_or_else(|_| by_name())
}

/// Starts a thread of the library's. Its name begins with `outcore-`.
pub fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    debug_assert!(name.starts_with("outcore-"));
    std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
}

/// Runs `run`; a panic is the same as "not ours". This thread takes no signals meanwhile: a handler that touches a
/// mapped page waits for the thread of faults, and that one for the locks that are held here. Threads that are started
/// here take none for good: no handler of the program's runs on them.
pub fn ours<T>(run: impl FnOnce() -> Option<T>) -> Option<T> {
    if is_inside() {
        return None;
    }
    without_signals(|| {
        let _ = INSIDE.try_with(|inside| inside.set(true));
        let result = without_panic(run);
        let _ = INSIDE.try_with(|inside| inside.set(false));
        result
    })
}

pub fn do_ours(run: impl FnOnce()) {
    let _ = ours(|| {
        run();
        Some(())
    });
}

/// Runs `run`; a panic is the same as `None`. Nothing unwinds into the program.
pub fn without_panic<T>(run: impl FnOnce() -> Option<T>) -> Option<T> {
    std::panic::catch_unwind(AssertUnwindSafe(run)).ok().flatten()
}
