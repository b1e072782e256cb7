//! Which process this is.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The process whose memory this is.
static PROCESS: AtomicU32 = AtomicU32::new(0);
static IN_CHILD: AtomicBool = AtomicBool::new(false);

/// This process has begun: the library was loaded, or it is a new child by `fork`.
pub fn begins() {
    PROCESS.store(std::process::id(), Ordering::SeqCst);
}

/// Whether this process, a child by `fork`, has nothing of this library.
pub fn is_a_child(has_nothing: bool) {
    IN_CHILD.store(has_nothing, Ordering::Relaxed);
}

/// Whether this process is a child by `fork` of one that has mapped files here, or was about to.
pub fn in_a_child() -> bool {
    IN_CHILD.load(Ordering::Relaxed)
}

/// Whether the caller is no child by `vfork`, which has the memory of its parent.
pub fn is_this_process() -> bool {
    PROCESS.load(Ordering::SeqCst) == std::process::id()
}
