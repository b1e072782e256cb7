//! Memory of this library's own.
//!
//! A thread may touch a page in a handler of a signal that came while it was in the C library's `malloc`, or in `fork`,
//! which holds all locks of that. So nothing that answers a fault may wait for these locks: here is an allocator with a
//! lock of its own. Whoever has that takes no signals meanwhile, so it is given back soon. `fork` takes it too, so that
//! a child finds it free.
//!
//! What Rust does when a thread ends is kept here too: the C library would take memory for each entry.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::{Cell, UnsafeCell};
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use dlmalloc::Dlmalloc;
use outcore::os::signals::without_signals;

use crate::inside;

#[global_allocator]
static MEMORY: Memory = Memory { is_locked: AtomicBool::new(false), heap: UnsafeCell::new(Dlmalloc::new()) };

struct Memory {
    is_locked: AtomicBool,
    heap: UnsafeCell<Dlmalloc>,
}

// SAFETY: `heap` is used by whoever has set `is_locked` alone.
unsafe impl Sync for Memory {}

thread_local! {
    /// Whether this thread blocks all signals, once that was asked. Threads of this library always do. Of the
    /// program's, those that did when they first came here are taken to do so for good.
    static BLOCKS: Cell<Option<bool>> = const { Cell::new(None) };
}

/// Whether this thread takes no signals now.
fn takes_no_signals() -> bool {
    let asked = |blocks: &Cell<Option<bool>>| {
        let all = blocks.get().unwrap_or_else(|| {
            let now = mask(libc::SIG_BLOCK, None);
            // SAFETY: a set that is filled, and numbers of signals.
            SIGNALS.iter().all(|signal| unsafe { libc::sigismember(&now, *signal) } == 1)
        });
        blocks.set(Some(all));
        all
    };
    inside::is_inside() || BLOCKS.try_with(asked).unwrap_or(false)
}

/// Changes what this thread blocks, and returns what it blocked before.
fn mask(how: c_int, set: Option<&libc::sigset_t>) -> libc::sigset_t {
    let mut before = MaybeUninit::uninit();
    // SAFETY: `sigemptyset` fills the set, also if `pthread_sigmask` should not.
    unsafe {
        libc::sigemptyset(before.as_mut_ptr());
        libc::pthread_sigmask(how, set.map_or(ptr::null(), ptr::from_ref), before.as_mut_ptr());
        before.assume_init()
    }
}

/// Of which programs have handlers.
const SIGNALS: [c_int; 8] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGALRM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGPROF,
    libc::SIGCHLD,
];

impl Memory {
    /// No lock of a library's: those may need memory themselves. It is held for a few hundred instructions.
    fn lock(&self) {
        while self.is_locked.swap(true, Ordering::Acquire) {
            // SAFETY: a plain call.
            unsafe { libc::sched_yield() };
        }
    }

    fn unlock(&self) {
        self.is_locked.store(false, Ordering::Release);
    }

    fn with<T>(&self, run: impl FnOnce(&mut Dlmalloc) -> T) -> T {
        let run = || {
            self.lock();
            // SAFETY: this thread has the lock, and `run` does not come back here.
            let result = run(unsafe { &mut *self.heap.get() });
            self.unlock();
            result
        };
        if takes_no_signals() { run() } else { without_signals(run) }
    }
}

// SAFETY: that of `Dlmalloc`, for which the caller's promises are passed on.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promised.
        self.with(|heap| unsafe { heap.malloc(layout.size(), layout.align()) })
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promised.
        self.with(|heap| unsafe { heap.calloc(layout.size(), layout.align()) })
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        self.with(|heap| unsafe { heap.free(at, layout.size(), layout.align()) });
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as the caller promised.
        self.with(|heap| unsafe { heap.realloc(at, layout.size(), layout.align(), size) })
    }
}

thread_local! {
    /// What this thread had blocked before it forked.
    static BEFORE_FORK: Cell<Option<libc::sigset_t>> = const { Cell::new(None) };
}

extern "C" fn before_fork() {
    // Until the fork is over: a handler that came in between would wait for a page, and that for this lock.
    let mut all = MaybeUninit::uninit();
    // SAFETY: the call fills the set.
    let all = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        all.assume_init()
    };
    let _ = BEFORE_FORK.try_with(|before| before.set(Some(mask(libc::SIG_SETMASK, Some(&all)))));
    MEMORY.lock();
}

extern "C" fn after_fork() {
    MEMORY.unlock();
    if let Ok(Some(before)) = BEFORE_FORK.try_with(Cell::take) {
        mask(libc::SIG_SETMASK, Some(&before));
    }
}

/// Has `fork` take the lock. Called before other handlers of this library for `fork` are set: theirs find it free.
pub fn follow_forks() {
    // SAFETY: functions of the C library's signature, which do not unwind.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
}

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

/// As the C library's `__cxa_thread_atexit_impl`, for the variables of threads that this library has: the linker has
/// calls of that name within the library come here. The program and its other libraries keep the C library's.
///
/// # Safety
/// `destructor` may be called with `value` when this thread ends.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap___cxa_thread_atexit_impl(
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
        // SAFETY: made by `__wrap___cxa_thread_atexit_impl` for this thread, and taken out of the list here.
        unsafe {
            let Entry { destructor, value, next } = entry.read();
            LAST.set(next);
            MEMORY.dealloc(entry.as_ptr().cast(), Layout::new::<Entry>());
            destructor(value);
        }
    }
}
