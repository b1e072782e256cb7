//! Page-locked host memory: what there is of it, and which ranges it covers.

use std::collections::BTreeMap;

#[derive(Default)]
pub struct Locked {
    pub blocks: BTreeMap<u64, Block>,
}

pub struct Block {
    pub len: u64,
    /// Allocated by the driver, or the program's own memory.
    pub allocated: bool,
    pub flags: u32,
    /// The context that it was made in.
    pub context: u64,
    /// The device that has page tables for it, and their bytes.
    pub tables: (i32, u64),
}

/// Kinds of memory an asynchronous copy may name on the host side.
pub enum HostSide {
    Locked,
    Pageable,
    /// Part of the range is page-locked.
    Mixed,
}

/// `CU_MEMHOSTREGISTER_PORTABLE`: locked for all contexts.
const PORTABLE: u32 = 1;

impl Block {
    /// Whether copies in this context see it as locked. Memory that the driver allocated is locked for all contexts,
    /// because addresses are unified; registered memory is not.
    fn is_locked_in(&self, context: Option<u64>) -> bool {
        self.allocated || self.flags & PORTABLE != 0 || context == Some(self.context)
    }
}

impl Locked {
    /// The block an address lies in.
    pub fn block(&self, address: u64) -> Option<&Block> {
        let (&start, block) = self.blocks.range(..=address).next_back()?;
        (address < start + block.len).then_some(block)
    }
    pub fn overlaps(&self, start: u64, len: u64) -> bool {
        self.blocks.range(..start + len).next_back().is_some_and(|(&s, block)| s + block.len > start)
    }
    /// Whether a range of host memory is locked for a context: as a whole, in part, or not at all.
    pub fn covers(&self, start: u64, len: u64, context: Option<u64>) -> HostSide {
        let block = self.blocks.range(..=start).next_back().filter(|(s, block)| start + len <= *s + block.len);
        if len == 0 || block.is_some_and(|(_, block)| block.is_locked_in(context)) {
            HostSide::Locked
        } else if block.is_some() {
            HostSide::Pageable
        } else if self.overlaps(start, len) {
            HostSide::Mixed
        } else {
            HostSide::Pageable
        }
    }
    /// Gives allocated memory back (after a reset: no work is left).
    pub fn close(&self) {
        for (&start, block) in self.blocks.iter().filter(|(_, block)| block.allocated) {
            unmap(start, block.len);
        }
    }
    pub fn leaks(&self) -> Vec<String> {
        let line = |(start, block): (&u64, &Block)| {
            let what = if block.allocated { "page-locked allocation" } else { "registration" };
            format!("{what} of {} bytes of host memory at {start:#x}", block.len)
        };
        self.blocks.iter().map(line).collect()
    }
}

pub fn unmap(start: u64, len: u64) {
    // SAFETY: a mapping made by cuMemHostAlloc, which is no longer in the table; no work uses it.
    unsafe { libc::munmap(start as *mut libc::c_void, len.next_multiple_of(4096) as usize) };
}
