//! Which process this is: the one that opened a runtime, or a child of it by `fork`, which has a copy of its memory and
//! none of its threads.

use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::error::{Error, ErrorKind, Result};

/// A page that a child finds zeroed (`MADV_WIPEONFORK`), whatever it was forked by: looking at it is one load, where asking
/// for the process's id is a system call. `None` where the kernel has no such pages.
static PAGE: OnceLock<Option<&'static AtomicU64>> = OnceLock::new();

/// Greater than the mark of every process this one descends from, whose memory it has.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Runtimes that are open. A child has the number that its parent had.
static OPEN: AtomicU64 = AtomicU64::new(0);
/// The id of the process that opened them.
static OPENED_BY: AtomicU32 = AtomicU32::new(0);

/// A runtime that is open in this process.
#[derive(Debug)]
pub(crate) struct Opened {
    mark: ProcessMark,
    counted: AtomicBool,
}

impl Opened {
    /// # Errors
    /// `Unsupported` in a child by `fork` of a process that had runtimes open. Threads of the parent stood in this
    /// process's lists of waiting threads; the child has the lists and not the threads, so what waits in it may wait for ever.
    pub(crate) fn here() -> Result<Self> {
        let elsewhere = match PAGE.get().copied().flatten() {
            Some(page) => page.load(Ordering::Relaxed) == 0,
            None => OPENED_BY.load(Ordering::Relaxed) != std::process::id(),
        };
        if elsewhere && OPEN.load(Ordering::Relaxed) > 0 {
            return Err(Error::new(ErrorKind::Unsupported, "this process is a fork of one that had a runtime open")
                .remedy(
                    "exec a program in the child, or fork before the parent opens a runtime, or after it has closed it",
                ));
        }
        OPENED_BY.store(std::process::id(), Ordering::Relaxed);
        OPEN.fetch_add(1, Ordering::Relaxed);
        Ok(Self { mark: ProcessMark::here(), counted: AtomicBool::new(true) })
    }

    /// Its threads have ended.
    pub(crate) fn closed(&self) {
        if self.is_here() && self.counted.swap(false, Ordering::Relaxed) {
            OPEN.fetch_sub(1, Ordering::Relaxed);
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

/// The process in which it was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessMark {
    page: Option<&'static AtomicU64>,
    mark: u64,
    id: u32,
}

impl ProcessMark {
    /// Of this process.
    fn here() -> Self {
        let page = *PAGE.get_or_init(wiped_on_fork);
        let mark = page.map_or(0, |page| {
            // Zero: the first call in this process.
            let new = NEXT.fetch_add(1, Ordering::Relaxed);
            page.compare_exchange(0, new, Ordering::Relaxed, Ordering::Relaxed).map_or_else(|known| known, |_| new)
        });
        Self { page, mark, id: std::process::id() }
    }

    /// Whether this is that process.
    #[inline]
    pub(crate) fn is_here(&self) -> bool {
        match self.page {
            Some(page) => page.load(Ordering::Relaxed) == self.mark,
            None => self.id == std::process::id(),
        }
    }

    /// The id of that process.
    pub(crate) const fn id(&self) -> u32 {
        self.id
    }
}

fn wiped_on_fork() -> Option<&'static AtomicU64> {
    let len = usize::try_from(super::sys::system_page_bytes()).ok()?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: new memory, of which nobody else knows.
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
