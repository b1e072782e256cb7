//! Tells the process that opened a runtime from a child of it by `fork`, which has a copy of its memory and none of its
//! threads.

use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::error::{Error, ErrorKind, Result};

/// A page that is zeroed in a child (`MADV_WIPEONFORK`), whichever call forked it. Looking at it is one load; asking
/// for the process's id is a system call. `None` if the kernel has no such pages.
static PAGE: OnceLock<Option<&'static AtomicU64>> = OnceLock::new();

/// The mark of the next process: greater than the marks of all ancestors whose memory this process has.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// The open runtimes of this process. A child inherits its parent's value.
static OPEN: Openings = Openings(AtomicU64::new(0));

/// How many runtimes are open (lower half), and in which process (upper half). It is one word, so that no thread sees
/// one without the other.
#[derive(Debug)]
struct Openings(AtomicU64);

impl Openings {
    fn of(word: u64) -> (u32, u32) {
        ((word >> 32) as u32, word as u32)
    }

    fn word(process: u32, open: u32) -> u64 {
        u64::from(process) << 32 | u64::from(open)
    }

    /// Counts one more. False if runtimes are open in another process: this one has a copy of their memory.
    fn open(&self, process: u32) -> bool {
        let more = |word| match Self::of(word) {
            (by, open) if by == process => Some(Self::word(process, open.saturating_add(1))),
            (_, 0) => Some(Self::word(process, 1)),
            _ => None,
        };
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Counts one fewer of this process.
    fn close(&self, process: u32) {
        let fewer = |word| match Self::of(word) {
            (by, open) if by == process => Some(Self::word(process, open.saturating_sub(1))),
            _ => None,
        };
        // Runtimes of another process do not end here.
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer);
    }
}

/// A runtime that is open in this process.
#[derive(Debug)]
pub(crate) struct Opened {
    mark: ProcessMark,
    counted: AtomicBool,
}

impl Opened {
    /// # Errors
    /// `Unsupported` in a child by `fork` of a process that had runtimes open. Lists of waiting threads in this
    /// process's memory hold threads of the parent, which the child does not have. So whatever waits in these lists may
    /// wait for ever.
    pub(crate) fn here() -> Result<Self> {
        let mark = ProcessMark::here();
        if !OPEN.open(mark.short()) {
            return Err(Error::new(ErrorKind::Unsupported, "this process is a fork of one that had a runtime open")
                .remedy(
                    "exec a program in the child, or fork before the parent opens a runtime, or after it has closed it",
                ));
        }
        Ok(Self { mark, counted: AtomicBool::new(true) })
    }

    /// Notes that the runtime's threads have ended.
    pub(crate) fn closed(&self) {
        if self.is_here() && self.counted.swap(false, Ordering::Relaxed) {
            OPEN.close(self.mark.short());
        }
    }
}

impl std::ops::Deref for Opened {
    type Target = ProcessMark;
    #[inline]
    fn deref(&self) -> &ProcessMark {
        &self.mark
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.closed();
    }
}

/// Names the process in which it was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessMark {
    page: Option<&'static AtomicU64>,
    mark: u64,
    id: u32,
}

impl ProcessMark {
    /// The mark of this process.
    fn here() -> Self {
        let page = *PAGE.get_or_init(wiped_on_fork);
        let mark = page.map_or(0, |page| {
            // Zero means that this is the first call in this process.
            let new = NEXT.fetch_add(1, Ordering::Relaxed);
            page.compare_exchange(0, new, Ordering::Relaxed, Ordering::Relaxed).map_or_else(|known| known, |_| new)
        });
        Self { page, mark, id: std::process::id() }
    }

    /// Whether this is the process in which the mark was made.
    #[inline]
    pub(crate) fn is_here(&self) -> bool {
        match self.page {
            Some(page) => page.load(Ordering::Relaxed) == self.mark,
            None => self.id == std::process::id(),
        }
    }

    /// A number that differs between processes with copies of the same memory.
    fn short(&self) -> u32 {
        if self.page.is_some() { self.mark as u32 } else { self.id }
    }

    /// The id of the marked process.
    pub(crate) const fn id(&self) -> u32 {
        self.id
    }
}

fn wiped_on_fork() -> Option<&'static AtomicU64> {
    let len = usize::try_from(crate::os::kernel_pages::system_page_bytes()).ok()?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: new memory, which nobody else knows.
    let page = unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the page is this function's, and is not in use yet.
    if unsafe { libc::madvise(page, len, libc::MADV_WIPEONFORK) } != 0 {
        // SAFETY: as above.
        unsafe { libc::munmap(page, len) };
        return None;
    }
    // SAFETY: the page is zeroed and aligned, stays for good, and is only used as this atomic number.
    NonNull::new(page.cast::<AtomicU64>()).map(|page| unsafe { page.as_ref() })
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    /// Threads opened a process's first runtimes at once: one saw another's count before it saw whose count it was.
    #[test]
    fn regression_the_first_runtimes_of_a_process_may_open_at_once() {
        const THREADS: u32 = 4;
        for process in 1..2000 {
            // Left by a parent that had closed all its runtimes.
            let open = Openings(AtomicU64::new(Openings::word(process - 1, 0)));
            let at_once = Barrier::new(THREADS as usize);
            thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| {
                        at_once.wait();
                        assert!(open.open(process));
                    });
                }
            });
            assert_eq!(Openings::of(open.0.load(Ordering::Relaxed)), (process, THREADS));
            assert!(!open.open(process + 1), "a child opened one beside its parent's");
            open.close(process + 1);
            (0..THREADS).for_each(|_| open.close(process));
            assert!(open.open(process + 1));
        }
    }
}
