//! Signals that end a program which does not handle them: Ctrl-C, `kill`, a terminal that closes. What is said at the
//! end, and the report, come first; then the process ends by the same signal.
//!
//! The handler wakes a thread, by a semaphore, and stays: by the default action, nothing of the program would run any
//! more. The thread that takes a signal of its own process runs no further. It waits at most for [`MOST`], as it may
//! hold a lock that telling waits for. A signal from outside holds it for [`PATIENCE`] only, for the same reason.
//!
//! The program does not see the handler: `sigaction`, `signal` and their kin report the default action, and a program
//! that sets the default action gets this handler again. A handler that the program sets takes its place.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Once, mpsc};
use std::time::Duration;

use crate::inside;
use crate::sys::{next, say, set_errno};

const SIGNALS: [c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];
/// Milliseconds after which a second signal does not wait for the end of what is said, and after which the handler of a
/// signal from outside returns.
const PATIENCE: i64 = 500;
/// How long `exit` waits for the signal that came before it.
const SOON: Duration = Duration::from_secs(2);

/// How long a signal waits for what is said before it.
const MOST: Duration = Duration::from_secs(5);

/// The signal by which the process is about to end; 0 if there is none.
static ASKED: AtomicI32 = AtomicI32::new(0);
static ASKED_AT: AtomicI64 = AtomicI64::new(0);
/// The process that has the thread; 0 as long as there is none.
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

/// Says what happened; who comes second waits until it was said. The time is how long is waited for a file that is just
/// being mapped.
pub type Tell = fn(Duration);

/// Has signals that would end the program at once end it later, when a first file is mapped: `tell` comes before.
pub fn follow(tell: Tell) {
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
        if let Err(cause) = inside::start_thread("outcore-signals", move || serve(tell)) {
            return say(&format!(
                "a signal will end the program without a word: no thread ({cause}); raise `ulimit -u`"
            ));
        }
        PROCESS.store(own, Ordering::Release);
        let action = own_action();
        for signal in signals {
            // SAFETY: the action lives here, and its handler has the signature that its flags name.
            unsafe { real_action(signal, &action, std::ptr::null_mut()) };
        }
    });
}

fn own_handler() -> libc::sighandler_t {
    asked as extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) as libc::sighandler_t
}

fn own_action() -> libc::sigaction {
    // SAFETY: all zeros are an action; the set lives here.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = own_handler();
        action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK | libc::SA_SIGINFO;
        libc::sigfillset(&mut action.sa_mask);
        action
    }
}

fn default_action() -> libc::sigaction {
    // SAFETY: all zeros are an action, the default one.
    unsafe { std::mem::zeroed() }
}

/// The C library's sigaction(2), which [`sigaction`] stands before.
///
/// # Safety
/// That of sigaction(2).
unsafe fn real_action(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    type Action = unsafe extern "C" fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int;
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    match next(c"sigaction", &NEXT) {
        0 => {
            set_errno(libc::ENOSYS);
            -1
        }
        // SAFETY: the C library's function of this name, which has this signature; for the rest, the caller's promise.
        next => unsafe { std::mem::transmute::<usize, Action>(next)(signal, new, old) },
    }
}

/// Whether this process has the thread that a signal wakes.
fn is_followed() -> bool {
    // SAFETY: a plain question.
    PROCESS.load(Ordering::Acquire) == unsafe { libc::getpid() }
}

/// # Safety
/// That of sigaction(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    let own = own_action();
    // SAFETY: as the caller promised: each is null or an action.
    unsafe {
        let is_default = SIGNALS.contains(&signal) && new.as_ref().is_some_and(|new| new.sa_sigaction == libc::SIG_DFL);
        let new = if is_default && is_followed() { &raw const own } else { new };
        let done = real_action(signal, new, old);
        if let Some(old) = old.as_mut().filter(|old| done == 0 && old.sa_sigaction == own.sa_sigaction) {
            *old = default_action();
        }
        done
    }
}

/// The functions of the C library by which a handler is set, besides `sigaction`. A program that is compiled for plain
/// C calls the third where its source says `signal`.
static SETTERS: [Setter; 6] = [
    Setter::new(c"signal"),
    Setter::new(c"sysv_signal"),
    Setter::new(c"__sysv_signal"),
    Setter::new(c"bsd_signal"),
    Setter::new(c"ssignal"),
    Setter::new(c"sigset"),
];

struct Setter {
    name: &'static CStr,
    next: AtomicUsize,
}

impl Setter {
    const fn new(name: &'static CStr) -> Self {
        Self { name, next: AtomicUsize::new(0) }
    }

    /// Sets what a signal does, as this function of the C library does it.
    ///
    /// # Safety
    /// That of signal(2).
    unsafe fn set(&self, signal: c_int, new: libc::sighandler_t) -> libc::sighandler_t {
        type Set = unsafe extern "C" fn(c_int, libc::sighandler_t) -> libc::sighandler_t;
        let next = next(self.name, &self.next);
        if next == 0 {
            set_errno(libc::ENOSYS);
            return libc::SIG_ERR;
        }
        // SAFETY: the C library's function of this name, which has this signature; for the rest, the caller's promise.
        let old = unsafe { std::mem::transmute::<usize, Set>(next)(signal, new) };
        if new == libc::SIG_DFL && old != libc::SIG_ERR && SIGNALS.contains(&signal) && is_followed() {
            // SAFETY: the action lives here, and its handler has the signature that its flags name.
            unsafe { real_action(signal, &own_action(), std::ptr::null_mut()) };
        }
        if old == own_handler() { libc::SIG_DFL } else { old }
    }
}

macro_rules! setters {
    ($($nth:literal $name:ident)*) => {$(
        /// # Safety
        /// That of signal(2).
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(number: c_int, new: libc::sighandler_t) -> libc::sighandler_t {
            // SAFETY: as the caller promised.
            unsafe { SETTERS[$nth].set(number, new) }
        }
    )*};
}

setters! { 0 signal 1 sysv_signal 2 __sysv_signal 3 bsd_signal 4 ssignal 5 sigset }

/// Looks the C library's own functions up, before a handler may need one: that takes locks of the loader.
pub fn prepare() {
    handler(libc::SIGTERM);
    SETTERS.iter().for_each(|setter| _ = next(setter.name, &setter.next));
}

/// A signal to this process comes to this thread, if it takes it: by the default action, the process would end before
/// the call returns.
///
/// # Safety
/// That of kill(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kill(process: libc::pid_t, signal: c_int) -> c_int {
    // SAFETY: plain calls, and sets that live here.
    unsafe {
        let is_own = SIGNALS.contains(&signal) && process == libc::getpid() && is_followed();
        if is_own && handler(signal) == own_handler() {
            let mut blocked: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut blocked);
            if libc::sigismember(&blocked, signal) == 0 {
                return libc::syscall(libc::SYS_tgkill, process, libc::gettid(), signal) as c_int;
            }
        }
        libc::syscall(libc::SYS_kill, process, signal) as c_int
    }
}

/// What a signal does now. May be called in a handler.
fn handler(signal: c_int) -> libc::sighandler_t {
    let mut action = default_action();
    // SAFETY: a plain question, with a place for the answer.
    unsafe { real_action(signal, std::ptr::null(), &mut action) };
    action.sa_sigaction
}

/// Milliseconds of a clock that only runs. May be called in a handler.
fn now() -> i64 {
    // SAFETY: a plain question, with a place for the answer.
    unsafe {
        let mut now: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now);
        now.tv_sec * 1000 + now.tv_nsec / 1_000_000
    }
}

/// Only calls that a handler may make.
extern "C" fn asked(signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // Whoever found this by a system call of its own may call it as an earlier handler, with one argument.
    if handler(signal) != own_handler() {
        return;
    }
    // SAFETY: this thread's own errno; calls that may be made in a handler, a semaphore that is there while this is a
    // handler, and what the kernel says of the signal, which has a sender where its code is not positive.
    unsafe {
        let errno = *libc::__errno_location();
        let is_own = info.as_ref().is_some_and(|info| info.si_code <= 0 && info.si_pid() == libc::getpid());
        if !is_followed() {
            // A child by `fork`, or by `vfork` until it becomes another program, does not have the thread.
            by_default(signal);
        } else if ASKED.compare_exchange(0, signal, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            ASKED_AT.store(now(), Ordering::Relaxed);
            libc::sem_post(WAKE.get());
        } else if now() - ASKED_AT.load(Ordering::Relaxed) >= PATIENCE {
            by_default(signal);
        }
        stay(signal, is_own);
        *libc::__errno_location() = errno;
    }
}

/// Keeps this thread for [`PATIENCE`], or until the process ends: after [`MOST`], by this signal. Another signal that
/// would end the process is taken without a handler: on a small stack there is no room for one in another.
fn stay(signal: c_int, until_the_end: bool) {
    let begin = now();
    let most = if until_the_end { MOST.as_millis() as i64 + PATIENCE } else { PATIENCE };
    // SAFETY: a set and a time that live here, and a system call that reads them: the C library's own function would
    // end a thread that is to be cancelled. The handler is this library's.
    unsafe {
        let mut signals: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut signals);
        for signal in SIGNALS {
            libc::sigaddset(&mut signals, signal);
        }
        while now() - begin < most {
            let time = libc::timespec { tv_sec: 0, tv_nsec: PATIENCE * 1_000_000 / 10 };
            let (signals, time) = (&raw const signals, &raw const time);
            // The kernel's set is of eight bytes.
            let taken = libc::syscall(libc::SYS_rt_sigtimedwait, signals, std::ptr::null::<c_void>(), time, 8);
            if taken > 0 && now() - ASKED_AT.load(Ordering::Relaxed) >= PATIENCE {
                by_default(taken as c_int);
            }
        }
        if until_the_end {
            by_default(signal);
        }
    }
}

/// Ends the process by this signal.
///
/// # Safety
/// The signal's handler is this library's.
unsafe fn by_default(signal: c_int) {
    // SAFETY: as the caller promised; all may be called in a handler. The set and the action live here.
    unsafe {
        real_action(signal, &default_action(), std::ptr::null_mut());
        libc::raise(signal);
        let mut only: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut only);
        libc::sigaddset(&mut only, signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &only, std::ptr::null_mut());
    }
}

/// All signals are blocked here.
fn serve(tell: Tell) {
    // SAFETY: the semaphore was made before this thread.
    while unsafe { libc::sem_wait(WAKE.get()) } != 0 {}
    tell_in_time(tell);
    let signal = ASKED.load(Ordering::Acquire);
    // SAFETY: the handler is this library's; a plain call. A handler that the program has set by now runs on its
    // threads.
    unsafe {
        if handler(signal) == own_handler() {
            by_default(signal);
        }
        libc::syscall(libc::SYS_kill, libc::getpid(), signal);
    }
}

/// Says what happened, for as long as whoever sent the signal may be made to wait.
fn tell_in_time(tell: Tell) {
    let (done, told) = mpsc::channel();
    let say = move || {
        tell(SOON);
        // Nobody waits any more.
        let _ = done.send(());
    };
    // Without a thread nothing is said.
    if inside::start_thread("outcore-telling", say).is_ok() {
        let _ = told.recv_timeout(MOST);
    }
}

/// At the end of the program: the signal that came before decides how the process ends.
pub fn wait_for_the_end() {
    if ASKED.load(Ordering::Acquire) != 0 && is_followed() {
        // The process is gone before this is over.
        std::thread::sleep(SOON);
    }
}
