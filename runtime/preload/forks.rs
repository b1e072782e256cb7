//! Children by `fork`. One of a process that has mapped files, or was about to, has nothing of this library: no thread,
//! no lock that would ever be given up, and the files themselves where the ranges were.
//!
//! What runs in a child here takes no lock: a thread that is not there may have it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::{answer, memory, process, ranges, sides};

/// Whether nothing is left to be said of this process: it was said, or is not for a child to say.
static REPORTED: AtomicBool = AtomicBool::new(false);
/// Whether children have nothing of this library.
static NOTHING_FOR_CHILDREN: AtomicBool = AtomicBool::new(false);
/// How many threads there are in [`Beginning`].
static BEGINNING: AtomicUsize = AtomicUsize::new(0);

/// While there is one, its thread may hold a lock, or be in an initializer, that others wait for before there is a
/// pool. In a child by `fork` nobody would ever give these up.
///
/// The count is raised before any of them is taken, and a child has what its parent's threads have written up to some
/// moment. So a child in which one of them is taken finds a count that is not 0, and leaves all files to the kernel.
pub struct Beginning(());

impl Beginning {
    pub fn new() -> Self {
        follow();
        BEGINNING.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Beginning {
    fn drop(&mut self) {
        BEGINNING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Has the C library tell of children by `fork`. It is called when the library is loaded, so before any other thread
/// can fork; other libraries that map a file before that may be first.
pub fn follow() {
    static FOLLOWED: AtomicBool = AtomicBool::new(false);
    // No `Once`: a child would wait for the thread that its parent had there.
    if !FOLLOWED.load(Ordering::Relaxed) && !FOLLOWED.swap(true, Ordering::Relaxed) {
        process::begins();
        memory::follow_forks();
        // SAFETY: the function has the C library's signature and does not unwind.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    }
}

/// The process has a pool, or could not open one: from now on its children have nothing of this library. The caller is
/// in [`Beginning`].
pub fn leave_children_nothing() {
    NOTHING_FOR_CHILDREN.store(true, Ordering::SeqCst);
}

/// Whether it is left to the caller to say what happened. True once in a process, and never in a child that has nothing
/// of this library.
pub fn is_first_to_report() -> bool {
    !REPORTED.swap(true, Ordering::Relaxed)
}

/// Called in a child, by the thread that has forked.
extern "C" fn in_child() {
    process::begins();
    sides::begin_anew();
    answer::leave();
    ranges::leave_to_kernel();
    // A child of a process that has no pool, and opens none just now, may have one.
    let has_nothing = BEGINNING.load(Ordering::SeqCst) > 0 || NOTHING_FOR_CHILDREN.load(Ordering::SeqCst);
    process::is_a_child(has_nothing);
    REPORTED.store(has_nothing, Ordering::Relaxed);
}
