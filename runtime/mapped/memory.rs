//! Ranges of addresses of this process.

use std::ffi::c_void;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr;

use outcore::{Bytes, Error, ErrorKind, Result};
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munlock, munmap,
};

/// A range of private, readable and writable addresses, without memory at first; aligned as it was asked to be.
#[derive(Debug)]
pub struct Region {
    whole: u64,
    whole_len: u64,
    start: u64,
    len: u64,
}

impl Region {
    /// # Errors
    /// `OutOfMemory` if there are not so many addresses.
    pub fn new(len: u64, align: u64) -> Result<Self> {
        let none = || {
            Error::new(ErrorKind::OutOfMemory, format!("no addresses for {} of pages", Bytes::new(len)))
                .remedy("raise the limit on addresses (ulimit -v), or map less")
        };
        let whole_len = len.checked_add(align).ok_or_else(none)?;
        let size = usize::try_from(whole_len).map_err(|_| none())?;
        // A process that locks what it will map (`mlockall`) gets all memory of a mapping at once: zeros, where pages
        // are to come. Of what it may not touch it gets none, and what is unlocked stays without.
        // SAFETY: a new range, wherever the kernel likes.
        let whole = unsafe {
            mmap_anonymous(ptr::null_mut(), size, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE)
        };
        let mapped = whole.map_err(|_| none())?;
        let whole = mapped.expose_provenance() as u64;
        let this = Self { whole, whole_len, start: whole.next_multiple_of(align), len };
        // SAFETY: the range that was just made, of which nobody knows. `this` unmaps it where one of these fails.
        let opened = unsafe {
            munlock(mapped, size).and_then(|()| mprotect(mapped, size, MprotectFlags::READ | MprotectFlags::WRITE))
        };
        opened.map_err(|cause| Error::io("make a range of addresses accessible", io::Error::from(cause)))?;
        this.keep_to_this_process(this.start, len)?;
        Ok(this)
    }

    pub fn start(&self) -> u64 {
        self.start
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    /// Asks for huge pages, where the kernel has them. A refusal costs speed only.
    pub fn want_huge_pages(&self) {
        let _ = self.advise(self.start, self.len, Advice::LinuxHugepage);
    }

    /// Asks for no huge pages: of a part of one that is given back, the kernel keeps the memory. A refusal costs memory
    /// only, where the kernel makes huge pages unasked.
    pub fn refuse_huge_pages(&self) {
        let _ = self.advise(self.start, self.len, Advice::LinuxNoHugepage);
    }

    /// Gives the memory of a part of the region back, and what marks it as poisoned.
    ///
    /// # Errors
    /// `Io`.
    pub fn give_back(&self, start: u64, len: u64) -> Result<()> {
        self.advise(start, len, Advice::LinuxDontNeed)
    }

    /// Forbids all access, for good.
    pub fn forbid(&self) {
        let address = ptr::with_exposed_provenance_mut::<c_void>(self.start as usize);
        // SAFETY: the region's own range; whoever accesses it from now on gets a signal, which is what is wanted.
        if let Err(cause) = unsafe { mprotect(address, self.len as usize, MprotectFlags::empty()) } {
            tracing::error!(%cause, "a range without its pages could not be forbidden");
        }
    }

    /// Has the kernel give back the page tables of a range that holds no memory, where it does that.
    ///
    /// # Errors
    /// `Io`.
    pub fn give_back_empty(start: u64, len: u64) -> Result<()> {
        let address = ptr::with_exposed_provenance_mut::<c_void>(start as usize);
        // SAFETY: a part of a region in which nothing is, as `super::tables` counts: the advice loses nothing.
        unsafe { madvise(address, len as usize, Advice::LinuxDontNeed) }
            .map_err(|cause| Error::io("give page tables back", io::Error::from(cause)))
    }

    /// Brings memory in for a part of the region, which has none and is registered nowhere.
    pub fn touch(&self, start: u64, len: u64) {
        debug_assert!(self.holds(start, len), "no part of the region");
        // One call in place of a fault for each page of the kernel's; before Linux 5.14 there is none.
        if self.advise(start, len, Advice::LinuxPopulateWrite).is_ok() {
            return;
        }
        for at in (start..start + len).step_by(rustix::param::page_size()) {
            // SAFETY: within the region, which is readable and writable; the caller has this part to itself.
            unsafe { ptr::with_exposed_provenance_mut::<u8>(at as usize).write_volatile(0) };
        }
    }

    /// Puts a mapping of an empty file in place of a part of the region: access to it raises SIGBUS. What was there is
    /// gone.
    ///
    /// # Errors
    /// `Io`.
    pub fn bury(&self, start: u64, len: u64, empty: BorrowedFd<'_>) -> Result<()> {
        let place = self.place(start, len);
        // Writable too: a write that is forbidden would be another signal.
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a part of the region, whose bytes are not needed. Nothing of it is mapped elsewhere.
        let mapped = unsafe { mmap(place, len as usize, access, MapFlags::SHARED | MapFlags::FIXED, empty, 0) };
        mapped.map_err(|cause| Error::io("mark a page as lost", io::Error::from(cause)))?;
        self.keep_to_this_process(start, len)
    }

    /// Undoes [`bury`](Self::bury). The part has no memory then, and is registered nowhere.
    ///
    /// # Errors
    /// `Io`.
    pub fn unbury(&self, start: u64, len: u64) -> Result<()> {
        let place = self.place(start, len);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: a part of the region that has nothing but the mark. As in `new`, what is locked gets memory at once,
        // so it is made accessible when it is not locked.
        let opened = unsafe {
            mmap_anonymous(place, len as usize, ProtFlags::empty(), flags)
                .and_then(|place| munlock(place, len as usize).map(|()| place))
                .and_then(|place| mprotect(place, len as usize, MprotectFlags::READ | MprotectFlags::WRITE))
        };
        opened.map_err(|cause| Error::io("take the mark of a lost page away", io::Error::from(cause)))?;
        self.keep_to_this_process(start, len)
    }

    /// A child, and a core dump, would have zeros where pages are not in memory, so they have nothing there.
    fn keep_to_this_process(&self, start: u64, len: u64) -> Result<()> {
        self.advise(start, len, Advice::LinuxDontFork)?;
        self.advise(start, len, Advice::LinuxDontDump)
    }

    fn place(&self, start: u64, len: u64) -> *mut c_void {
        debug_assert!(self.holds(start, len), "no part of the region");
        ptr::with_exposed_provenance_mut(start as usize)
    }

    fn holds(&self, start: u64, len: u64) -> bool {
        start >= self.start && start.saturating_add(len) <= self.start + self.len
    }

    fn advise(&self, start: u64, len: u64, advice: Advice) -> Result<()> {
        let address = self.place(start, len);
        // SAFETY: a part of the region. Its bytes are not needed where the advice loses them: see the callers.
        unsafe { madvise(address, len as usize, advice) }
            .map_err(|cause| Error::io("advise the kernel about pages", io::Error::from(cause)))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let address = ptr::with_exposed_provenance_mut::<c_void>(self.whole as usize);
        // SAFETY: the region's own range; whoever drops it has ended all use of it.
        if let Err(cause) = unsafe { munmap(address, self.whole_len as usize) } {
            tracing::warn!(%cause, "a range of addresses was not given back");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use std::os::fd::AsFd;

    use super::*;

    /// What the kernel says of the mapping that begins at `start` (`VmFlags` of proc(5)).
    fn flags(start: u64) -> Vec<String> {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mapping = maps.split_once(&format!("\n{start:x}-")).unwrap().1;
        let flags = mapping.lines().find_map(|line| line.strip_prefix("VmFlags: ")).unwrap();
        flags.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn regression_core_dumps_and_children_have_nothing_in_place_of_pages() {
        const PAGE: u64 = 64 << 10;
        let region = Region::new(4 * PAGE, PAGE).unwrap();
        let (start, lost) = (region.start(), region.start() + PAGE);
        let is_kept = |start| ["dd", "dc"].iter().all(|flag| flags(start).iter().any(|found| found == flag));
        assert!(is_kept(start), "{:?}", flags(start));
        region.bury(lost, PAGE, tempfile::tempfile().unwrap().as_fd()).unwrap();
        assert!(is_kept(lost), "{:?}", flags(lost));
        // One mapping again, whose parts have the same flags.
        region.unbury(lost, PAGE).unwrap();
        assert!(is_kept(start), "{:?}", flags(start));
    }
}
