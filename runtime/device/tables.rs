//! The kernel's page tables for the addresses of a region, and how they are given back.
//!
//! The kernel frees the table of a slot (2 MiB, with pages of 4 KiB) only when mappings that cover the whole slot go. A
//! smaller frame that leaves would leave its table behind, so a walk over many slots would leave a table in each. So
//! whoever takes the last frame out of a slot replaces the mappings of the whole slot, or of the GiB it is in if that
//! is empty too.

use std::ops::Range;

use super::sys::{self, Region};
use crate::ids::{Bytes, PageSize};

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
    pub(super) fn new(region: &Region) -> Self {
        let page = sys::system_page_bytes();
        let slot = page * (page / 8);
        let upper = slot * (page / 8);
        let range = region.base()..region.base() + region.len();
        let count = |unit: u64| (range.end.div_ceil(unit) - range.start / unit) as usize;
        Self { frames: vec![0; count(slot)], slots: vec![0; count(upper)], range, slot, upper }
    }

    /// Bytes of one table.
    pub(super) fn table_bytes() -> u64 {
        sys::system_page_bytes()
    }

    /// Bytes of the tables of the slots that a frame is in: the most that a frame can need for itself. Tables above
    /// them, one for each GiB of addresses, count for the addresses and not for the frame.
    pub(super) fn of_a_frame(frame: PageSize) -> Bytes {
        let page = sys::system_page_bytes();
        let slot = page * (page / 8);
        Bytes::new(frame.bytes().div_ceil(slot) * page)
    }

    /// Bytes of tables for a frame that shares its slots with frames right beside it: its share.
    pub(super) fn of_a_frame_among_others(frame: PageSize) -> Bytes {
        Bytes::new(frame.bytes() / (sys::system_page_bytes() / 8))
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
    fn a_frame_has_a_table_for_each_slot_it_is_in() {
        let page = sys::system_page_bytes();
        let tables = |len: u64| Tables::of_a_frame(PageSize::new(Bytes::new(len)).unwrap()).get() / page;
        let slot = page * page / 8;
        assert_eq!([page, slot / 2, slot, 4 * slot].map(tables), [1, 1, 1, 4]);
        let shared = Tables::of_a_frame_among_others(PageSize::new(Bytes::new(slot)).unwrap());
        assert_eq!(shared.get(), page);
    }

    #[test]
    fn the_last_frame_of_a_slot_takes_the_table_with_it() {
        let region = Region::reserve(3 << 30, 2 << 20, "a test").unwrap();
        let mut tables = Tables::new(&region);
        let page = sys::system_page_bytes();
        let (slot, upper) = (page * page / 8, page * page / 8 * page / 8);
        let first = region.base().next_multiple_of(upper);
        let (near, next, far) = (first + slot, first + slot + 16 * page, first + 5 * slot);
        let len = 16 * page;
        assert_eq!(tables.enter(near, len), 2);
        assert_eq!(tables.enter(next, len), 0);
        assert_eq!(tables.enter(far, len), 1);
        assert_eq!(tables.leave(near, len), 0);
        assert_eq!(tables.around(near, len), near..near + len);
        assert_eq!(tables.leave(next, len), 1);
        assert_eq!(tables.around(next, len), first + slot..first + 2 * slot);
        assert_eq!(tables.leave(far, len), 2);
        let end = region.base() + region.len();
        assert_eq!(tables.around(far, len), first..(first + upper).min(end));
        // A frame of several slots.
        assert_eq!(tables.enter(first, 4 * slot), 5);
        assert_eq!(tables.leave(first, 4 * slot), 5);
    }
}
