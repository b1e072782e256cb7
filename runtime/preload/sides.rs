//! Who makes and closes descriptors at a time: threads of the program, or threads that run this library's code.
//!
//! A program may close numbers that it does not know. Whether a number is the library's is looked up before the kernel
//! closes it. If the library made or closed descriptors between the two, the kernel could close one that the library
//! has just got, and the library one that the program has. So while a thread is on one side, none is on the other.
//!
//! A thread on a side takes no signals: a handler that closes a descriptor never waits for the thread that it
//! interrupted. The call that a thread makes there may take as long as a file system or a peer wants. A thread that has
//! waited for [`LONGEST`] goes on without the other side's leave, and so do all others until that side is empty.

use std::ptr;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

use outcore::os::signals::without_signals;

use crate::sys::{errno, kernel, set_errno};

const LONGEST: Duration = Duration::from_secs(1);

/// How many threads are on each side, whether one is stuck, and whether somebody waits.
struct Sides(AtomicU32);

/// Some thread waits.
const WAITS: u32 = 1 << 31;

/// Where a side has its bits.
#[derive(Clone, Copy)]
struct Side {
    /// One thread.
    one: u32,
    /// The bits of the count.
    count: u32,
    /// Somebody has waited for long until this side is empty. Nobody does so again before it is.
    stuck: u32,
}

const PROGRAM: Side = Side { one: 1, count: (1 << 18) - 1, stuck: 1 << 30 };
const LIBRARY: Side = Side { one: 1 << 18, count: ((1 << 11) - 1) << 18, stuck: 1 << 29 };

static SIDES: Sides = Sides(AtomicU32::new(0));

/// No thread is on a side: in a child by `fork`, the threads that were there are not.
pub fn begin_anew() {
    SIDES.0.store(0, Relaxed);
}

/// Runs a call that makes or closes descriptors of this library's.
pub fn as_library<T>(call: impl FnOnce() -> T) -> T {
    without_signals(|| {
        let _there = SIDES.enter_as_library(LONGEST);
        call()
    })
}

/// Runs a call of the program's that closes descriptors.
pub fn as_program<T>(call: impl FnOnce() -> T) -> T {
    without_signals(|| {
        let _there = SIDES.enter_as_program(LONGEST);
        call()
    })
}

/// A thread on a side: it counts one there.
struct There<'a>(&'a Sides, Side);

impl Drop for There<'_> {
    fn drop(&mut self) {
        let (Sides(word), Side { one, count, stuck }) = (self.0, self.1);
        let before = word.fetch_sub(one, Release);
        if (before - one) & count != 0 {
            return;
        }
        if before & (WAITS | stuck) != 0 {
            word.fetch_and(!(WAITS | stuck), Relaxed);
        }
        if before & WAITS != 0 {
            // SAFETY: the word is there, and the call changes no memory.
            unsafe { futex(word, libc::FUTEX_WAKE, i32::MAX as u32, None) };
        }
    }
}

impl Sides {
    /// It counts itself before it waits, so that it gets its turn however many threads of the program's come.
    fn enter_as_library(&self, longest: Duration) -> There<'_> {
        self.0.fetch_add(LIBRARY.one, Acquire);
        self.wait(PROGRAM, longest);
        There(self, LIBRARY)
    }

    /// It counts itself when the library's threads have left.
    fn enter_as_program(&self, longest: Duration) -> There<'_> {
        let free = |seen: u32| (seen & LIBRARY.count == 0).then_some(seen + PROGRAM.one);
        while self.0.fetch_update(Acquire, Relaxed, free).is_err() {
            if !self.wait(LIBRARY, longest) {
                self.0.fetch_add(PROGRAM.one, Acquire);
                break;
            }
        }
        There(self, PROGRAM)
    }

    /// Waits until nobody is on a side. Whether that is so.
    fn wait(&self, Side { count, stuck, .. }: Side, longest: Duration) -> bool {
        let (Self(word), mut end) = (self, None);
        loop {
            let seen = word.load(Acquire);
            if seen & count == 0 {
                return true;
            }
            if seen & stuck != 0 {
                return false;
            }
            let now = Instant::now();
            let left = end.get_or_insert(now + longest).saturating_duration_since(now);
            if left.is_zero() {
                word.fetch_or(stuck, Relaxed);
                return false;
            }
            if seen & WAITS != 0 || word.compare_exchange(seen, seen | WAITS, Relaxed, Relaxed).is_ok() {
                // SAFETY: the word is there, and the call changes no memory.
                unsafe { futex(word, libc::FUTEX_WAIT, seen | WAITS, Some(left)) };
            }
        }
    }
}

/// The system call, which may end for any reason, or for none.
///
/// # Safety
/// That of futex(2).
unsafe fn futex(word: &AtomicU32, operation: i32, value: u32, most: Option<Duration>) {
    let most =
        most.map(|most| libc::timespec { tv_sec: most.as_secs() as libc::time_t, tv_nsec: most.subsec_nanos().into() });
    let most = most.as_ref().map_or(ptr::null(), ptr::from_ref);
    let operation = operation | libc::FUTEX_PRIVATE_FLAG;
    let before = errno();
    // SAFETY: as the caller promised; the time lives here.
    unsafe { kernel(libc::SYS_futex, [word.as_ptr() as u64, operation as u64, value.into(), most as u64, 0, 0]) };
    set_errno(before);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn nobody() -> Sides {
        Sides(AtomicU32::new(0))
    }

    /// Threads of one side count up, and those of the other down: the count never has the other side's sign.
    #[test]
    fn nobody_is_on_a_side_while_somebody_is_on_the_other() {
        let (sides, there) = (nobody(), AtomicI64::new(0));
        let work = |is_library: bool| {
            let by = if is_library { 1 } else { -1 };
            for _ in 0..5000 {
                let entered = if is_library { sides.enter_as_library(MINUTE) } else { sides.enter_as_program(MINUTE) };
                let before = there.fetch_add(by, Ordering::SeqCst);
                assert!(before * by >= 0, "{before} threads of the other side");
                std::thread::yield_now();
                there.fetch_sub(by, Ordering::SeqCst);
                drop(entered);
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| work(true));
                scope.spawn(|| work(false));
            }
        });
        assert_eq!(sides.0.load(Ordering::SeqCst) & !WAITS, 0);
    }

    #[test]
    fn threads_of_one_side_are_there_together() {
        let sides = nobody();
        drop((sides.enter_as_library(MINUTE), sides.enter_as_library(MINUTE)));
        drop((sides.enter_as_program(MINUTE), sides.enter_as_program(MINUTE)));
    }

    /// A call that never ends on one side delays the other once, and does not stop it.
    #[test]
    fn who_has_waited_for_long_goes_on_and_so_do_others() {
        const SHORT: Duration = Duration::from_millis(20);
        let sides = nobody();
        let stays = sides.enter_as_library(MINUTE);
        drop(sides.enter_as_program(SHORT));
        // These would wait for a minute.
        (0..3).for_each(|_| drop(sides.enter_as_program(MINUTE)));
        drop(stays);
        assert_eq!(sides.0.load(Ordering::SeqCst), 0);
        let stays = sides.enter_as_program(MINUTE);
        drop(sides.enter_as_library(SHORT));
        drop(stays);
        assert_eq!(sides.0.load(Ordering::SeqCst), 0);
        drop(sides.enter_as_program(MINUTE));
        drop(sides.enter_as_library(MINUTE));
    }
}
