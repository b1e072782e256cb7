//! Memory of this library's own.
//!
//! A thread may touch a page in a handler of a signal that came while it was in the C library's `malloc`, or in `fork`,
//! which holds all locks of that. So nothing that answers a fault may wait for these locks. Here each thread has a heap
//! of its own, and no lock is held while the program's code runs.
//!
//! What Rust does when a thread ends is kept here too: the C library would take memory for each entry.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use mimalloc::MiMalloc;

#[global_allocator]
static MEMORY: MiMalloc = MiMalloc;

type Destructor = unsafe extern "C" fn(*mut c_void);

/// What is to be done when a thread ends, the last one first.
struct Entry {
    destructor: Destructor,
    value: *mut c_void,
    next: *mut Entry,
}

thread_local! {
    /// Has no destructor itself.
    static LAST: Cell<*mut Entry> = const { Cell::new(ptr::null_mut()) };
}

/// The key whose destructor is called when a thread ends; none if the process has no more keys.
fn key() -> Option<libc::pthread_key_t> {
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    *KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: the place for a key, and a function of the signature.
        (unsafe { libc::pthread_key_create(&mut key, Some(run_all)) } == 0).then_some(key)
    })
}

/// As the C library's `__cxa_thread_atexit_impl`, for the variables of threads that this library has: the build gives
/// it that name within the library. The program and its other libraries keep the C library's.
///
/// # Safety
/// `destructor` may be called with `value` when this thread ends.
#[unsafe(no_mangle)]
unsafe extern "C" fn outcore_at_thread_exit(
    destructor: Destructor,
    value: *mut c_void,
    _library: *mut c_void,
) -> c_int {
    let Some(key) = key() else { return -1 };
    // SAFETY: the layout of an entry is not empty. The value of the key is no pointer that anybody follows.
    unsafe {
        let entry = MEMORY.alloc(Layout::new::<Entry>()).cast::<Entry>();
        if entry.is_null() || libc::pthread_setspecific(key, ptr::without_provenance(1)) != 0 {
            return -1;
        }
        entry.write(Entry { destructor, value, next: LAST.get() });
        LAST.set(entry);
    }
    0
}

/// Called by the C library when a thread ends. What is added meanwhile is run too.
unsafe extern "C" fn run_all(_: *mut c_void) {
    while let Some(entry) = ptr::NonNull::new(LAST.get()) {
        // SAFETY: made by `outcore_at_thread_exit` for this thread, and taken out of the list here.
        unsafe {
            let Entry { destructor, value, next } = entry.read();
            LAST.set(next);
            MEMORY.dealloc(entry.as_ptr().cast(), Layout::new::<Entry>());
            destructor(value);
        }
    }
}
