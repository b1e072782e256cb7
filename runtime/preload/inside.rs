//! What this library does on a thread of the program's: without signals, and without a panic that leaves it. What it
//! maps and closes meanwhile is its own.

use std::cell::Cell;
use std::panic::AssertUnwindSafe;

use outcore::os::signals::without_signals;

thread_local! {
    /// Whether this thread is in [`ours`]: what this library maps for itself is the kernel's.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is in [`ours`], where it takes no signals.
pub fn is_inside() -> bool {
    INSIDE.try_with(Cell::get).unwrap_or(false)
}

/// Whether this thread is in [`ours`], or ends: then it has no such variable.
pub fn is_inside_or_ends() -> bool {
    INSIDE.try_with(Cell::get).unwrap_or(true)
}

/// Runs `run`; a panic is the same as "not ours". This thread takes no signals meanwhile: a handler that touches a
/// mapped page waits for the thread of faults, and that one for the locks that are held here. Threads that are started
/// here take none for good: no handler of the program's runs on them.
pub fn ours<T>(run: impl FnOnce() -> Option<T>) -> Option<T> {
    // While a thread ends, it has no such variable, and maps no model.
    if is_inside_or_ends() {
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
