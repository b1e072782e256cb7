//! Threads of the library take no signals.
//!
//! A handler of the program's runs on any thread that takes the signal. On a thread that others wait for, it could wait
//! for what only that thread brings: a page of a mapped file, or a lock that it holds. A thread inherits the mask of
//! the one that starts it.

use std::mem::MaybeUninit;
use std::ptr;

/// The caller's mask, until it is dropped.
struct Masked(libc::sigset_t);

impl Drop for Masked {
    fn drop(&mut self) {
        // SAFETY: a plain call on a set that lives here.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

/// Calls `run` while this thread takes no signals; the mask is restored in any case.
pub fn without_signals<T>(run: impl FnOnce() -> T) -> T {
    let (mut all, mut before) = (MaybeUninit::<libc::sigset_t>::uninit(), MaybeUninit::<libc::sigset_t>::uninit());
    // SAFETY: `sigfillset` fills the first set, and `pthread_sigmask` the second one if it succeeds, as it does for
    // valid arguments.
    let masked = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        let done = libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        (done == 0).then(|| Masked(before.assume_init()))
    };
    let result = run();
    drop(masked);
    result
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    fn is_blocked(signal: i32) -> bool {
        let mut now = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: the first call fills the set that the second one reads.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), now.as_mut_ptr());
            libc::sigismember(now.as_ptr(), signal) == 1
        }
    }

    #[test]
    fn a_thread_that_is_started_takes_none_and_the_mask_is_restored_after_a_panic() {
        let started = without_signals(|| std::thread::spawn(|| is_blocked(libc::SIGUSR1)));
        assert!(started.join().is_ok_and(|blocked| blocked) && !is_blocked(libc::SIGUSR1));
        assert!(catch_unwind(|| without_signals(|| panic!("a panic of a test"))).is_err());
        assert!(!is_blocked(libc::SIGUSR1));
    }
}
