//! Signals that end a program which does not handle them: Ctrl-C, `kill`, a terminal that closes. What is said at the
//! end, and the report, come first; then the process ends by the same signal.
//!
//! The handler wakes a thread, by a semaphore, and returns: the thread that it interrupts may hold any lock. A program
//! that sets a handler of its own later replaces this one, and one that calls the handler it replaced finds that this
//! does nothing then, as the default action would not have been called either.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicI32, AtomicI64, Ordering};
use std::sync::{Once, mpsc};
use std::time::Duration;

use crate::pool::{self, say};

const SIGNALS: [c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];
/// Whoever signals again after so many milliseconds does not wait for the end of what is said.
const PATIENCE: i64 = 500;
/// How long `exit` waits for the signal that came before it.
const SOON: Duration = Duration::from_secs(2);

/// How long a signal waits for what is said before it.
const MOST: Duration = Duration::from_secs(5);

/// The signal by which the process is about to end; 0 if there is none.
static ASKED: AtomicI32 = AtomicI32::new(0);
static ASKED_AT: AtomicI64 = AtomicI64::new(0);
/// The process that has the thread.
static PROCESS: AtomicI32 = AtomicI32::new(0);
static WAKE: Wake = Wake(UnsafeCell::new(MaybeUninit::uninit()));

struct Wake(UnsafeCell<MaybeUninit<libc::sem_t>>);

// SAFETY: only `sem_init` writes to it, before there is a thread or a handler that uses it. All threads may call
// `sem_post` and `sem_wait`.
unsafe impl Sync for Wake {}

impl Wake {
    fn get(&self) -> *mut libc::sem_t {
        self.0.get().cast()
    }
}

/// Has signals that would end the program at once end it later, when a first file is mapped.
pub fn follow() {
    static FOLLOWED: Once = Once::new();
    FOLLOWED.call_once(|| {
        let by_default = SIGNALS.into_iter().filter(|signal| handler(*signal) == libc::SIG_DFL);
        let signals = Vec::from_iter(by_default);
        // The first process of a container is not ended by signals that it does not handle.
        // SAFETY: a plain question.
        let own = unsafe { libc::getpid() };
        if signals.is_empty() || own == 1 {
            return;
        }
        // SAFETY: the semaphore is this library's, and nobody uses it yet.
        if unsafe { libc::sem_init(WAKE.get(), 0, 0) } != 0 {
            return;
        }
        PROCESS.store(own, Ordering::Release);
        let thread = std::thread::Builder::new().name("outcore-signals".to_owned());
        if let Err(cause) = thread.spawn(serve) {
            return say(&format!(
                "a signal will end the program without a word: no thread ({cause}); raise `ulimit -u`"
            ));
        }
        for signal in signals {
            // SAFETY: a handler of the signature that goes without `SA_SIGINFO`; sets that live here.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = own_handler();
                action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
                libc::sigfillset(&mut action.sa_mask);
                libc::sigaction(signal, &action, std::ptr::null_mut());
            }
        }
    });
}

fn own_handler() -> libc::sighandler_t {
    asked as extern "C" fn(c_int) as libc::sighandler_t
}

/// What a signal does now. May be called in a handler.
fn handler(signal: c_int) -> libc::sighandler_t {
    // SAFETY: a plain question, with a place for the answer.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut action);
        action.sa_sigaction
    }
}

/// Only calls that a handler may make.
extern "C" fn asked(signal: c_int) {
    // SAFETY: this thread's own errno; calls that may be made in a handler, and a semaphore that is there while this is
    // a handler.
    unsafe {
        let errno = *libc::__errno_location();
        if handler(signal) == own_handler() {
            let mut now: libc::timespec = std::mem::zeroed();
            libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now);
            let now = now.tv_sec * 1000 + now.tv_nsec / 1_000_000;
            if libc::getpid() != PROCESS.load(Ordering::Acquire) {
                // A child by `fork`, or by `vfork` until it becomes another program, does not have the thread.
                by_default(signal);
            } else if ASKED.compare_exchange(0, signal, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                ASKED_AT.store(now, Ordering::Relaxed);
                libc::sem_post(WAKE.get());
            } else if now - ASKED_AT.load(Ordering::Relaxed) >= PATIENCE {
                by_default(signal);
            }
        }
        *libc::__errno_location() = errno;
    }
}

/// Ends the process by this signal, as soon as this thread takes it.
///
/// # Safety
/// The signal's handler is this library's.
unsafe fn by_default(signal: c_int) {
    // SAFETY: as the caller promised; both may be called in a handler.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

/// All signals are blocked here.
fn serve() {
    // SAFETY: the semaphore was made before this thread.
    while unsafe { libc::sem_wait(WAKE.get()) } != 0 {}
    tell();
    let signal = ASKED.load(Ordering::Acquire);
    // SAFETY: plain calls, on sets that live here. A handler that the program has set by now runs on its threads.
    unsafe {
        if handler(signal) == own_handler() {
            let mut only: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut only);
            libc::sigaddset(&mut only, signal);
            by_default(signal);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &only, std::ptr::null_mut());
        }
        libc::kill(libc::getpid(), signal);
    }
}

/// Says what happened, for as long as whoever sent the signal may be made to wait.
fn tell() {
    let (done, told) = mpsc::channel();
    let say = move || {
        pool::tell(SOON);
        // Nobody waits any more.
        let _ = done.send(());
    };
    // Without a thread nothing is said.
    if std::thread::Builder::new().name("outcore-telling".to_owned()).spawn(say).is_ok() {
        let _ = told.recv_timeout(MOST);
    }
}

/// At the end of the program: the signal that came before decides how the process ends.
pub fn wait_for_the_end() {
    // SAFETY: a plain question.
    if ASKED.load(Ordering::Acquire) != 0 && unsafe { libc::getpid() } == PROCESS.load(Ordering::Acquire) {
        // The process is gone before this is over.
        std::thread::sleep(SOON);
    }
}
