//! The kernel's page tables for the ranges of files, and how they are given back.
//!
//! A table describes 2 MiB of addresses (a *slot*) and takes 4 KiB. The kernel keeps it when the last page of the slot
//! has been moved away, so a walk over a large file would leave one for each slot: 2 GiB for a file of 1 TiB. From
//! Linux 6.14 on, on processors where it can, the kernel frees the tables of a range that is told to hold nothing
//! (`MADV_DONTNEED`), and the mapping stays registered. Where it does not, tables are counted, and stay until the range
//! goes.
//!
//! One call for many neighbouring slots costs little more than one for a single slot, most of it for interrupting other
//! processors. So [`KEPT`] empty slots are kept, which a walk soon fills again or extends.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::OnceLock;

use outcore::Bytes;
use parking_lot::Mutex;
use rustix::param::page_size;

use crate::memory::Region;

/// Empty slots whose tables are kept: 4 MiB of tables.
const KEPT: usize = 1 << 10;
/// Runs of neighbouring slots that are given back at a time, so that nobody waits long.
const RUNS: usize = 2;

/// Bytes that one table describes: as many entries of 8 bytes as a page has room for.
fn slot_bytes() -> u64 {
    let page = page_size() as u64;
    page / 8 * page
}

#[derive(Debug, Default)]
struct Slots {
    /// Ranges of files: first address, and the one behind the last.
    ranges: BTreeMap<u64, u64>,
    /// By slots that have a table: how many pages are there, those that are poisoned among them.
    pages: HashMap<u64, u32>,
    /// Slots that have a table and no page.
    empty: BTreeSet<u64>,
    /// Pages that are poisoned, and how long they are.
    poisoned: BTreeMap<u64, u64>,
    /// Bytes of homes that have memory. They lie side by side.
    homes: u64,
}

/// Counts what is in each slot of all ranges. Every page that comes or goes is told of under the lock of the device's
/// layout.
#[derive(Debug)]
pub struct Tables {
    slots: Mutex<Slots>,
    slot: u64,
    frees: bool,
}

impl Tables {
    pub fn new() -> Self {
        Self { slots: Mutex::default(), slot: slot_bytes(), frees: kernel_frees() }
    }

    /// Bytes of the tables of all ranges.
    pub fn held(&self) -> Bytes {
        let slots = self.slots.lock();
        Bytes::new((slots.pages.len() as u64 + slots.homes.div_ceil(self.slot)) * page_size() as u64)
    }

    /// A home has memory, or none any more.
    pub fn home(&self, len: u64, has_memory: bool) {
        let homes = &mut self.slots.lock().homes;
        *homes = if has_memory { *homes + len } else { homes.saturating_sub(len) };
    }

    fn slots_of(&self, at: u64, len: u64) -> Range<u64> {
        at / self.slot..(at + len).div_ceil(self.slot)
    }

    pub fn add_range(&self, start: u64, len: u64) {
        self.slots.lock().ranges.insert(start, start + len);
    }

    /// The addresses are the kernel's again, and their tables with them.
    pub fn remove_range(&self, start: u64) {
        let mut slots = self.slots.lock();
        let Some(end) = slots.ranges.remove(&start) else { return };
        let poisoned: Vec<_> = slots.poisoned.range(start..end).map(|(at, len)| (*at, *len)).collect();
        for (at, len) in poisoned {
            slots.poisoned.remove(&at);
            self.uncount(&mut slots, at, len);
        }
        // A slot at one of the ends may have pages of another range.
        let mine = self.slots_of(start, end - start);
        let whole = start.div_ceil(self.slot)..end / self.slot;
        slots.pages.retain(|slot, pages| !(whole.contains(slot) || (mine.contains(slot) && *pages == 0)));
        slots.empty.retain(|slot| !mine.contains(slot));
    }

    /// A page is there now.
    pub fn enter(&self, at: u64, len: u64) {
        let mut slots = self.slots.lock();
        if slots.poisoned.remove(&at).is_none() {
            self.count(&mut slots, at, len);
        }
    }

    fn count(&self, slots: &mut Slots, at: u64, len: u64) {
        for slot in self.slots_of(at, len) {
            *slots.pages.entry(slot).or_default() += 1;
            slots.empty.remove(&slot);
        }
    }

    fn uncount(&self, slots: &mut Slots, at: u64, len: u64) {
        for slot in self.slots_of(at, len) {
            if let Some(pages) = slots.pages.get_mut(&slot) {
                *pages -= 1;
                if *pages == 0 {
                    slots.empty.insert(slot);
                }
            }
        }
    }

    /// A page that is not there is marked as poisoned. The mark lives in the table.
    pub fn poison(&self, at: u64, len: u64) {
        let mut slots = self.slots.lock();
        if slots.poisoned.insert(at, len).is_none() {
            self.count(&mut slots, at, len);
        }
    }

    /// Whether a page is marked as lost, so that its touch is no fault.
    pub fn is_poisoned(&self, at: u64) -> bool {
        self.slots.lock().poisoned.contains_key(&at)
    }

    /// A page is there no more. Gives tables back if too many slots are empty: the caller holds the lock under which
    /// pages come.
    pub fn leave(&self, at: u64, len: u64) {
        let mut slots = self.slots.lock();
        self.uncount(&mut slots, at, len);
        if self.frees && slots.empty.len() > KEPT {
            self.give_back(&mut slots);
        }
    }

    fn give_back(&self, slots: &mut Slots) {
        for _ in 0..RUNS {
            let Some(first) = slots.empty.first().copied() else { return };
            let mut end = first;
            while slots.empty.remove(&end) {
                slots.pages.remove(&end);
                end += 1;
            }
            let (start, end) = (first * self.slot, end * self.slot);
            // At the ends of a range, a slot is another mapping's too.
            let Some((range, range_end)) = slots.ranges.range(..end).next_back() else { continue };
            let (start, end) =
                (start.max(range.next_multiple_of(self.slot)), end.min(range_end / self.slot * self.slot));
            if start < end
                && let Err(error) = Region::give_back_empty(start, end - start)
            {
                tracing::debug!(%error, "page tables stay");
            }
        }
    }
}

/// Whether this kernel frees the tables of ranges that are told to hold nothing. It is tried, once.
fn kernel_frees() -> bool {
    static FREES: OnceLock<bool> = OnceLock::new();
    const SLOTS: u64 = 32;
    *FREES.get_or_init(|| {
        let slot = slot_bytes();
        let Ok(region) = Region::new(SLOTS * slot, slot) else { return false };
        for nth in 0..SLOTS {
            region.touch(region.start() + nth * slot, page_size() as u64);
        }
        let before = tables_of_the_process();
        let told = region.give_back(region.start(), region.len());
        let after = tables_of_the_process();
        // Other threads come by a few meanwhile.
        told.is_ok()
            && before.zip(after).is_some_and(|(before, after)| after + SLOTS / 2 * page_size() as u64 <= before)
    })
}

/// Bytes of all page tables of this process.
fn tables_of_the_process() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;

    #[test]
    fn tables_go_with_the_pages_of_many_slots_and_poisoned_pages_hold_theirs() {
        let (tables, page) = (Tables::new(), page_size() as u64);
        let slot = tables.slot;
        // It begins and ends within a slot.
        let count = KEPT as u64 + 40;
        let region = Region::new((count + 2) * slot, slot).unwrap();
        let (start, len) = (region.start() + 3 * page, count * slot);
        tables.add_range(start, len);
        let at = |nth: u64| start + nth * slot;
        let held = || tables.held().get() / page;
        tables.poison(at(7) + page, page);
        for nth in 0..count {
            tables.enter(at(nth), page);
            tables.enter(at(nth) + 9 * page, page);
        }
        assert_eq!(held(), count);
        for nth in 0..count {
            tables.leave(at(nth), page);
        }
        assert_eq!(held(), count);
        for nth in 0..count {
            tables.leave(at(nth) + 9 * page, page);
        }
        if tables.frees {
            assert!(held() <= KEPT as u64 + 1, "{}", held());
            // The poisoned page's slot was passed over.
            assert!(tables.slots.lock().pages.contains_key(&(at(7) / slot)));
        } else {
            assert_eq!(held(), count);
        }
        // A page that is filled after all is one page.
        tables.enter(at(7) + page, page);
        tables.leave(at(7) + page, page);
        assert!(tables.slots.lock().poisoned.is_empty());
        tables.remove_range(start);
        assert_eq!(held(), 0);
    }

    /// The slot was forgotten with the first range, and the pages that the other one had in it came to less than none.
    #[test]
    fn regression_a_range_that_goes_leaves_the_pages_of_its_neighbour() {
        let (tables, page) = (Tables::new(), page_size() as u64);
        let slot = tables.slot;
        let middle = 9 * slot + 3 * page;
        tables.add_range(8 * slot, middle - 8 * slot);
        tables.add_range(middle, 2 * slot);
        tables.enter(middle, page);
        tables.enter(middle + page, page);
        tables.enter(middle - page, page);
        tables.poison(middle - 2 * page, page);
        tables.leave(middle - page, page);
        tables.remove_range(8 * slot);
        assert_eq!(tables.held().get(), page);
        tables.enter(middle + 2 * page, page);
        (0..3).for_each(|nth| tables.leave(middle + nth * page, page));
        assert!(tables.slots.lock().pages.values().all(|pages| *pages == 0));
        tables.remove_range(middle);
        assert_eq!(tables.held().get(), 0);
    }

    #[test]
    fn a_page_larger_than_a_slot_has_several() {
        let tables = Tables::new();
        let slot = tables.slot;
        tables.add_range(8 * slot, 80 * slot);
        tables.enter(16 * slot, 4 * slot);
        assert_eq!(tables.held().get(), 4 * page_size() as u64);
        tables.leave(16 * slot, 4 * slot);
        assert_eq!(tables.slots.lock().empty.len(), 4);
    }
}
