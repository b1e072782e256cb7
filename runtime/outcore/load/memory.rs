//! Fresh memory that reads fill, and that tensors then own.
//!
//! # Invariants
//!
//! 1. A [`Place`] owns its pages of a [`Mapping`]: no other place has them. Only the reads that its owner submits write
//!    there besides it, and the owner waits for their ends before it calls what looks at the bytes or moves them.
//! 2. A mapping lives as long as any of its places. Until then its addresses stay mapped, readable and writable.
//! 3. What the system has not provided of a mapping, or has taken back, reads as zeros: no byte is uninitialised.

use std::io;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use memmap2::{Advice, MmapOptions, MmapRaw, UncheckedAdvice};

use crate::device::HostPointer;
use crate::dlpack::DlpackView;
use crate::dtype::DType;
use crate::error::Result;
use crate::os::kernel_pages::{KernelPages, system_page_bytes};

/// What the address of each tensor is a multiple of, in bytes: as wide as the vectors of any processor.
pub(super) const ALIGNMENT: u64 = 64;

/// Anonymous memory of this process. Its pages are given out as [`Place`]s.
#[derive(Debug)]
pub(super) struct Mapping {
    memory: MmapRaw,
    /// Bytes before its first.
    skip: usize,
    len: usize,
}

impl Mapping {
    /// Addresses for `len` bytes, in huge pages if that is asked for and the kernel has such.
    ///
    /// # Errors
    /// The kernel's, if it gives no addresses.
    pub fn new(len: u64, huge: bool) -> io::Result<Arc<Self>> {
        let huge = KernelPages::here().quick_huge().filter(|bytes| huge && len >= *bytes);
        let too_large = || io::Error::from_raw_os_error(libc::ENOMEM);
        let room = len.max(system_page_bytes()).checked_add(huge.unwrap_or(0)).ok_or_else(too_large)?;
        let room = usize::try_from(room).map_err(|_| too_large())?;
        let memory = MmapRaw::from(MmapOptions::new().len(room).map_anon()?);
        let skip = huge.map_or(0, |huge| memory.as_ptr().align_offset(huge as usize));
        let len = len as usize;
        // A refusal costs time and nothing else.
        let _ = match huge {
            Some(_) => memory.advise_range(Advice::HugePage, skip, len),
            None => Ok(()),
        };
        Ok(Arc::new(Self { memory, skip, len }))
    }

    fn at(&self, offset: u64) -> *mut u8 {
        invariant!(offset <= self.len as u64, "byte {offset} lies behind a mapping of {}", self.len);
        self.memory.as_mut_ptr().wrapping_add(self.skip + (offset as usize).min(self.len))
    }

    /// Has the system provide memory for a range, without changing its content. Any thread may, at any time.
    ///
    /// # Errors
    /// The kernel's, such as that there is none.
    pub fn touch(&self, offset: u64, len: u64) -> io::Result<()> {
        let populated = self.memory.advise_range(Advice::PopulateWrite, self.skip + offset as usize, len as usize);
        match populated {
            // Before Linux 5.14 there is no such advice.
            Err(cause) if cause.raw_os_error() == Some(libc::EINVAL) => {
                for at in (offset..offset + len).step_by(system_page_bytes() as usize) {
                    // SAFETY: a byte of the mapping (invariant 2), which this leaves as it is.
                    unsafe { AtomicU8::from_ptr(self.at(at)) }.fetch_or(0, Ordering::Relaxed);
                }
                Ok(())
            }
            other => other,
        }
    }

    /// The pages of a range, which begins and ends at pages of the kernel's and of which nobody has a place.
    pub fn place(self: &Arc<Self>, at: u64, len: u64) -> Place {
        assert!(at + len <= self.len as u64, "a place ends at {}, behind a mapping of {}", at + len, self.len);
        Place { mapping: Arc::clone(self), at, len }
    }
}

/// Pages of a mapping that belong to this value. They go back to the system when it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    mapping: Arc<Mapping>,
    at: u64,
    len: u64,
}

impl Place {
    /// The memory from a byte of it on, for reads.
    pub fn pointer(&self, offset: u64) -> HostPointer {
        HostPointer(NonNull::new(self.mapping.at(self.at + offset)).unwrap_or(NonNull::dangling()))
    }

    fn check(&self, from: u64, len: u64) {
        let end = from.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "{len} bytes from {from} on lie behind a place of {}",
            self.len
        );
    }

    /// Moves bytes to addresses that are lower by `by`.
    pub fn shift_down(&mut self, from: u64, len: u64, by: u64) {
        self.check(from, len);
        assert!(by <= from, "bytes move from {from} to {by} before");
        let source = self.mapping.at(self.at + from);
        // SAFETY: both ranges are of this place, which is borrowed mutably and not being read into (invariant 1). They
        // may overlap.
        unsafe { std::ptr::copy(source, source.wrapping_sub(by as usize), len as usize) };
    }

    pub fn bytes(&self, from: u64, len: u64) -> &[u8] {
        self.check(from, len);
        // SAFETY: bytes of this place, which is borrowed and not being read into (invariants 1 and 3).
        unsafe { slice::from_raw_parts(self.mapping.at(self.at + from), len as usize) }
    }

    fn bytes_mut(&mut self, from: u64, len: u64) -> &mut [u8] {
        self.check(from, len);
        // SAFETY: bytes of this place, which is borrowed mutably and not being read into (invariants 1 and 3).
        unsafe { slice::from_raw_parts_mut(self.mapping.at(self.at + from), len as usize) }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let (offset, len) = (self.mapping.skip + self.at as usize, self.len as usize);
        // SAFETY: the pages are this place's, which nobody borrows any more (invariant 1): to have zeros there harms
        // nobody.
        let given_back = unsafe { self.mapping.memory.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, len) };
        // If the kernel refuses, the memory goes with the mapping. It does where the program has locked it.
        if let Err(cause) = given_back {
            tracing::debug!(bytes = self.len, %cause, "memory of a tensor goes with the last of its file");
        }
    }
}

/// [`ALIGNMENT`] bytes.
#[repr(align(64))]
#[derive(Clone, Copy)]
pub(super) struct Line(#[allow(dead_code, reason = "used as bytes")] [u8; ALIGNMENT as usize]);

// SAFETY: an array of bytes as long as the struct's alignment, for which zeros are a value.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: as above; it has no padding, and any bytes are a value.
unsafe impl bytemuck::Pod for Line {}

/// The bytes of one tensor.
pub(super) enum Memory {
    /// So many bytes of a place, from this one on.
    Pages { place: Place, first: u64, len: u64 },
    /// So many bytes.
    Heap { lines: Box<[Line]>, len: usize },
}

impl Memory {
    /// A copy.
    pub fn copied(bytes: &[u8]) -> Self {
        let mut lines = vec![Line([0; ALIGNMENT as usize]); bytes.len().div_ceil(size_of::<Line>())].into_boxed_slice();
        bytemuck::cast_slice_mut(&mut lines)[..bytes.len()].copy_from_slice(bytes);
        Self::Heap { lines, len: bytes.len() }
    }

    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Pages { place, first, len } => place.bytes(*first, *len),
            Self::Heap { lines, len } => &bytemuck::cast_slice(lines)[..*len],
        }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Pages { place, first, len } => place.bytes_mut(*first, *len),
            Self::Heap { lines, len } => &mut bytemuck::cast_slice_mut(lines)[..*len],
        }
    }

    /// A view that owns the memory.
    ///
    /// # Errors
    /// Those of [`DlpackView::of_memory_mut`].
    pub fn into_dlpack(mut self, dtype: DType, shape: &[u64]) -> Result<DlpackView> {
        let bytes = self.bytes_mut();
        let (address, len) = (bytes.as_mut_ptr().expose_provenance() as u64, bytes.len() as u64);
        let elements = shape.iter().fold(1u64, |product, extent| product.saturating_mul(*extent));
        assert_eq!(dtype.bytes_for(elements), Some(len), "a tensor of another size");
        // SAFETY: there are as many bytes. They stay where they are when `self` moves: a place's are its mapping's, a
        // box's its own. `self` goes to the view, and nothing else refers to them.
        unsafe { DlpackView::of_memory_mut(address, dtype, shape, self) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident() -> u64 {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * system_page_bytes()
    }

    #[test]
    fn a_place_gives_its_pages_back_and_its_neighbours_stay() {
        outcore_testkit::harness::alone(
            "load::memory::tests::a_place_gives_its_pages_back_and_its_neighbours_stay",
            || {
                const LEN: u64 = 64 << 20;
                let unit = system_page_bytes();
                let mapping = Mapping::new(LEN, true).unwrap();
                let before = resident();
                mapping.touch(0, LEN).unwrap();
                let filled = resident();
                assert!(filled >= before + LEN - (1 << 20), "{before} {filled}");
                // Neither begins nor ends at a huge page.
                let (first, len) = (5 * unit, 48 << 20);
                let [mut low, mut middle, high] = [(0, first), (first, len), (first + len, LEN - first - len)]
                    .map(|(at, len)| mapping.place(at, len));
                middle.bytes_mut(0, len).fill(7);
                low.bytes_mut(first - 1, 1)[0] = 8;
                drop(middle);
                assert!(resident() + len < filled + (1 << 20), "{filled} {}", resident());
                assert_eq!((low.bytes(first - 1, 1)[0], high.bytes(0, 1)[0]), (8, 0));
                drop((low, high));
                drop(mapping);
            },
        );
    }

    #[test]
    fn bytes_move_down_over_themselves() {
        let mapping = Mapping::new(64 << 10, false).unwrap();
        let mut place = mapping.place(0, 64 << 10);
        let expected: Vec<u8> = (0..40_000_u32).map(|n| (n % 251) as u8).collect();
        place.bytes_mut(4104, 40_000).copy_from_slice(&expected);
        place.shift_down(4104, 30_000, 8);
        place.shift_down(34_104, 10_000, 8);
        assert!(place.bytes(4096, 40_000) == expected);
    }

    #[test]
    fn copies_are_aligned_and_may_be_empty() {
        for len in [0, 1, 63, 64, 65, 4097] {
            let bytes: Vec<u8> = (0..len).map(|n| n as u8).collect();
            let mut memory = Memory::copied(&bytes);
            assert_eq!(memory.bytes(), bytes);
            assert!((memory.bytes_mut().as_ptr() as u64).is_multiple_of(ALIGNMENT));
        }
    }

    #[test]
    fn more_than_any_machine_has_is_an_error() {
        assert!(Mapping::new(1 << 60, true).is_err() && Mapping::new(u64::MAX, false).is_err());
    }
}
