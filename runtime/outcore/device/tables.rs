//! The kernel's page tables for the addresses of a region, and how they are given back.
//!
//! The kernel frees the table of a [slot](KernelPages::slot) only when mappings that cover the whole slot go. A smaller
//! frame that leaves would leave its table behind, so a walk over many slots would leave a table in each. So whoever
//! takes the last frame out of a slot replaces the mappings of the whole slot, or of the whole table of tables if that
//! is empty too.

use std::ops::Range;

use crate::os::kernel_pages::KernelPages;

/// Counts what is in each slot of a region.
#[derive(Debug)]
pub(super) struct Tables {
    range: Range<u64>,
    /// Bytes described by one table (`slot`), and by a table of tables (`upper`).
    slot: u64,
    upper: u64,
    /// Frames in each slot, and slots in use in each table of tables. Zeros take no memory until they are touched.
    frames: Vec<u16>,
    slots: Vec<u16>,
}

impl Tables {
    /// For a region at these addresses.
    pub(super) fn new(range: Range<u64>, kernel: KernelPages) -> Self {
        let (slot, upper) = (kernel.slot(), kernel.upper());
        let count = |unit: u64| (range.end.div_ceil(unit) - range.start / unit) as usize;
        Self { frames: vec![0; count(slot)], slots: vec![0; count(upper)], range, slot, upper }
    }

    fn at(&self, unit: u64, address: u64) -> usize {
        (address / unit - self.range.start / unit) as usize
    }

    /// Notes that a frame's memory is at `[at, at + len)` now. Returns how many tables that takes.
    pub(super) fn enter(&mut self, at: u64, len: u64) -> u64 {
        let mut tables = 0;
        for slot in (at..at + len).step_by(self.slot.min(len) as usize) {
            let (frames, upper) = (self.at(self.slot, slot), self.at(self.upper, slot));
            self.frames[frames] += 1;
            if self.frames[frames] == 1 {
                tables += 1;
                self.slots[upper] += 1;
                tables += u64::from(self.slots[upper] == 1);
            }
        }
        tables
    }

    /// Notes that the frame has left. Returns how many tables [vacating](Self::around) gives back.
    pub(super) fn leave(&mut self, at: u64, len: u64) -> u64 {
        let mut tables = 0;
        for slot in (at..at + len).step_by(self.slot.min(len) as usize) {
            let (frames, upper) = (self.at(self.slot, slot), self.at(self.upper, slot));
            self.frames[frames] -= 1;
            if self.frames[frames] == 0 {
                tables += 1;
                self.slots[upper] -= 1;
                tables += u64::from(self.slots[upper] == 0);
            }
        }
        tables
    }

    /// The largest range around `[at, at + len)` that holds no frame and whose tables are freed with its mappings.
    /// `[at, at + len)` must hold no frame.
    pub(super) fn around(&self, at: u64, len: u64) -> Range<u64> {
        let within = |unit: u64| {
            let first = at / unit * unit;
            first.max(self.range.start)..(at + len).next_multiple_of(unit).min(self.range.end)
        };
        let empty = |counts: &[u16], unit: u64| {
            (at..at + len).step_by(unit.min(len) as usize).all(|at| counts[self.at(unit, at)] == 0)
        };
        if empty(&self.slots, self.upper) {
            within(self.upper)
        } else if empty(&self.frames, self.slot) {
            within(self.slot)
        } else {
            at..at + len
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_frame_of_a_slot_takes_the_table_with_it() {
        for kernel in KernelPages::ALL {
            let (slot, upper) = (kernel.slot(), kernel.upper());
            // It begins within a slot, as a region may.
            let range = 5 * upper - 3 * slot + 7 * kernel.page()..8 * upper - kernel.page();
            let mut tables = Tables::new(range.clone(), kernel);
            let len = 16 * kernel.page();
            let first = 5 * upper;
            let (near, next, far) = (first + slot, first + slot + len, first + 5 * slot);
            assert_eq!(tables.enter(near, len), 2);
            assert_eq!(tables.enter(next, len), 0);
            assert_eq!(tables.enter(far, len), 1);
            assert_eq!(tables.leave(near, len), 0);
            assert_eq!(tables.around(near, len), near..near + len);
            assert_eq!(tables.leave(next, len), 1);
            assert_eq!(tables.around(next, len), first + slot..first + 2 * slot);
            assert_eq!(tables.leave(far, len), 2);
            assert_eq!(tables.around(far, len), first..first + upper);
            // A frame of several slots.
            assert_eq!(tables.enter(first, 4 * slot), 5);
            assert_eq!(tables.leave(first, 4 * slot), 5);
            // At the ends only what is the region's.
            assert_eq!(tables.around(range.start, len), range.start..first);
            assert_eq!(tables.around(range.end - len, len), 7 * upper..range.end);
        }
    }
}
