//! The page sizes of the kernel that this process runs on, and what follows from them.
//!
//! x86-64 has pages of 4 KiB. Kernels for 64-bit ARM are built for 4, 16 or 64 KiB. A page table fills one page, so it
//! describes 2 MiB, 32 MiB or 512 MiB of addresses; a transparent huge page has as many bytes. All sizes that depend on
//! this are functions of `KernelPages`.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, PageSize};
use crate::os::machine;

/// The most memory that is brought in at once while somebody may wait for it: 5 ms on a machine that brings memory in
/// at 0.4 GB/s.
pub(crate) const AT_ONCE: u64 = 2 << 20;

/// Bytes of an entry in a page table, on every 64-bit machine.
const ENTRY_BYTES: u64 = 8;

/// The kernel's own page size.
pub fn system_page_bytes() -> u64 {
    // SAFETY: sysconf has no preconditions.
    let n = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // It always answers; if it did not, the largest page of any kernel would do for all.
    u64::try_from(n).unwrap_or(64 << 10)
}

/// The kernel's page sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelPages {
    /// Bytes of a page.
    page: u64,
    /// Bytes of a transparent huge page; `None` on kernels without them.
    huge: Option<u64>,
}

impl KernelPages {
    /// The sizes of this machine's kernel.
    pub fn here() -> Self {
        const UNKNOWN: u64 = 0;
        const NONE: u64 = 1;
        // Not a lock: a child by `fork` would wait for ever for a thread of its parent that was asking.
        static HUGE: AtomicU64 = AtomicU64::new(UNKNOWN);
        if HUGE.load(Ordering::Relaxed) == UNKNOWN {
            HUGE.store(machine::huge_page().map_or(NONE, Bytes::get), Ordering::Relaxed);
        }
        let huge = Some(HUGE.load(Ordering::Relaxed)).filter(|huge| *huge != NONE);
        Self { page: system_page_bytes(), huge }
    }

    /// Another kernel's sizes in bytes, both powers of two.
    #[cfg(test)]
    pub const fn of(page: u64, huge: Option<u64>) -> Self {
        Self { page, huge }
    }

    /// The kernels that there are: pages of 4, 16 and 64 KiB, with huge pages and without.
    #[cfg(test)]
    pub const ALL: [Self; 6] = [
        Self::of(4 << 10, Some(2 << 20)),
        Self::of(16 << 10, Some(32 << 20)),
        Self::of(64 << 10, Some(512 << 20)),
        Self::of(4 << 10, None),
        Self::of(16 << 10, None),
        Self::of(64 << 10, None),
    ];

    /// Bytes of a page.
    pub const fn page(self) -> u64 {
        self.page
    }

    /// Bytes of addresses that one page table describes.
    pub const fn slot(self) -> u64 {
        self.page * (self.page / ENTRY_BYTES)
    }

    /// Bytes of addresses that one table of page tables describes.
    pub const fn upper(self) -> u64 {
        self.slot() * (self.page / ENTRY_BYTES)
    }

    /// Bytes of the tables of the slots that a frame is in: the most that a frame can need for itself. Tables above
    /// them count for the addresses and not for the frame.
    pub const fn tables_of_a_frame(self, frame: PageSize) -> Bytes {
        Bytes::new(frame.bytes().div_ceil(self.slot()) * self.page)
    }

    /// Bytes of tables for a frame that shares its slots with frames right beside it: its share.
    pub const fn tables_among_others(self, frame: PageSize) -> Bytes {
        Bytes::new(frame.bytes() / (self.page / ENTRY_BYTES))
    }

    /// Bytes of a huge page, if one is brought in [at once](AT_ONCE).
    pub fn quick_huge(self) -> Option<u64> {
        self.huge.filter(|huge| *huge <= AT_ONCE)
    }

    /// Whether a frame consists of huge pages.
    pub fn in_huge_pages(self, frame: PageSize) -> bool {
        self.huge.is_some_and(|huge| frame.bytes() >= huge)
    }

    /// Whether frames that lie side by side for good are put into huge pages. Not if a huge page has more bytes than a
    /// frame and cannot be brought in at once.
    pub fn puts_in_huge_pages(self, frame: PageSize) -> bool {
        self.quick_huge().is_some() || self.in_huge_pages(frame)
    }

    /// Bytes of a block: a huge page that is cut into frames. `None` if frames get their memory one by one.
    ///
    /// Blocks serve disks, which take a request of a limited number of pieces: 127 is usual. A frame of 2 MiB has 512
    /// scattered pages of 4 KiB. It has 128 of 16 KiB and 32 of 64 KiB, where a huge page would take long to come.
    pub fn block(self, frame: PageSize) -> Option<u64> {
        self.quick_huge().filter(|huge| frame.bytes() < *huge)
    }

    /// What the addresses of frames' memory are multiples of.
    pub fn alignment(self, frame: PageSize) -> u64 {
        frame.bytes().max(self.page).max(self.quick_huge().unwrap_or(0))
    }

    /// Refuses pages that the kernel cannot map one by one.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if pages of this size are smaller than the kernel's.
    pub fn check(self, page_size: PageSize) -> Result<()> {
        if page_size.bytes() >= self.page {
            return Ok(());
        }
        let (asked, least) = (Bytes::new(page_size.bytes()), Bytes::new(self.page));
        let message = format!("pages of {asked} are smaller than this kernel's, which have {least}");
        Err(Error::new(ErrorKind::InvalidArgument, message).remedy(format!("choose pages of at least {least}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    fn size(bytes: u64) -> PageSize {
        PageSize::new(Bytes::new(bytes)).unwrap()
    }

    #[test]
    fn a_table_describes_what_fills_it() {
        let kernels = KernelPages::ALL.map(|kernel| (kernel.slot(), kernel.upper()));
        let sizes = [(2 * MIB, MIB << 10), (32 * MIB, MIB << 16), (512 * MIB, MIB << 22)];
        assert_eq!(kernels[..3], sizes);
        assert_eq!(kernels[3..], sizes);
        // A huge page takes the place of one table.
        for kernel in &KernelPages::ALL[..3] {
            assert_eq!(kernel.huge, Some(kernel.slot()));
        }
    }

    #[test]
    fn a_frame_has_a_table_for_each_slot_it_is_in() {
        for kernel in KernelPages::ALL {
            let page = kernel.page();
            let tables = |len: u64| kernel.tables_of_a_frame(size(len)).get() / page;
            assert_eq!([page, 2 * MIB, kernel.slot() / 2, kernel.slot()].map(tables), [1; 4]);
            assert_eq!(tables(2 * kernel.slot()), 2);
            assert_eq!(kernel.tables_among_others(size(kernel.slot())).get(), page);
            assert_eq!(kernel.tables_among_others(size(page)).get(), ENTRY_BYTES);
        }
    }

    #[test]
    fn only_a_huge_page_that_comes_quickly_is_cut_into_frames() {
        let [four, sixteen, sixty_four, bare, ..] = KernelPages::ALL;
        assert_eq!([64 * KIB, MIB].map(|frame| four.block(size(frame))), [Some(2 * MIB); 2]);
        assert_eq!([2 * MIB, 4 * MIB].map(|frame| four.block(size(frame))), [None; 2]);
        for kernel in [sixteen, sixty_four, bare] {
            for frame in [64 * KIB, 2 * MIB, 64 * MIB, 1024 * MIB] {
                assert_eq!(kernel.block(size(frame)), None, "{kernel:?} {frame}");
            }
        }
    }

    #[test]
    fn frames_are_in_huge_pages_where_they_fill_them() {
        let [four, sixteen, sixty_four, bare, ..] = KernelPages::ALL;
        for (kernel, huge) in [(four, 2 * MIB), (sixteen, 32 * MIB), (sixty_four, 512 * MIB)] {
            assert!(kernel.in_huge_pages(size(huge)) && kernel.in_huge_pages(size(2 * huge)));
            assert!(!kernel.in_huge_pages(size(huge / 2)));
            assert!(kernel.puts_in_huge_pages(size(huge)));
            assert_eq!(kernel.puts_in_huge_pages(size(huge / 2)), kernel == four);
        }
        assert!(!bare.in_huge_pages(size(1024 * MIB)) && !bare.puts_in_huge_pages(size(1024 * MIB)));
    }

    /// Whatever is committed, protected or moved begins and ends at a page of the kernel, and at a huge page if it
    /// consists of such.
    #[test]
    fn memory_is_aligned_for_the_kernel() {
        for kernel in KernelPages::ALL {
            for frame in (12..=30).map(|power| size(1 << power)).filter(|frame| kernel.check(*frame).is_ok()) {
                let at = kernel.alignment(frame);
                assert!(at.is_multiple_of(frame.bytes()) && at.is_multiple_of(kernel.page()), "{kernel:?} {frame:?}");
                let huge = kernel.huge.filter(|_| kernel.puts_in_huge_pages(frame));
                assert!(huge.is_none_or(|huge| at.is_multiple_of(huge)), "{kernel:?} {frame:?}");
                assert!(at <= frame.bytes().max(AT_ONCE), "{kernel:?} {frame:?}");
            }
        }
    }

    #[test]
    fn pages_smaller_than_the_kernels_are_refused() {
        let [four, sixteen, sixty_four, ..] = KernelPages::ALL;
        assert!(four.check(size(4 * KIB)).is_ok() && sixty_four.check(size(64 * KIB)).is_ok());
        for (kernel, asked, own) in [(sixteen, 4, "16.0 KiB"), (sixteen, 8, "16.0 KiB"), (sixty_four, 32, "64.0 KiB")] {
            let error = kernel.check(size(asked * KIB)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            let text = error.to_string();
            assert!(text.contains(&format!("{asked}.0 KiB")) && text.contains(own), "{text}");
            assert!(error.advice().is_some_and(|advice| advice.contains(own)), "{error:?}");
        }
    }

    #[test]
    fn this_kernel_is_asked() {
        let here = KernelPages::here();
        assert!(here.page().is_power_of_two() && here == KernelPages::here());
        if let Some(huge) = here.huge {
            assert_eq!(huge % here.page(), 0);
        }
    }
}
