//! Device memory: physical room, device addresses, and which room is behind which address.
//!
//! Three address ranges. The program gets device addresses from a range that nothing can be read from (a host access
//! faults). The shadow is as large; where a device address is mapped and accessible, its shadow is mapped too, and
//! kernels work there, because they need what is contiguous on the device to be contiguous for them. The window holds
//! all physical room once and for all; copies work there, so that no mistake of the program can make them fault.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::abi::*;
use crate::clock::{Clock, TimelineId};

/// Addresses reserved for each of the three ranges.
const SPAN: u64 = 4 << 40;

#[derive(Default)]
pub struct Memory {
    ground: Option<Ground>,
    physical: HashMap<u64, Physical>,
    /// Bytes of each device's page tables for registered host memory.
    tables: HashMap<i32, u64>,
    /// Free room in the window, by offset.
    free: BTreeMap<u64, u64>,
    end: u64,
    ranges: BTreeMap<u64, Range>,
    mappings: BTreeMap<u64, Mapping>,
    /// Where to look for the next free device addresses: they are used again only when all were used once.
    cursor: u64,
    next_physical: u64,
    /// No kernel will run: shadows are left alone.
    pub shadowless: bool,
}

struct Ground {
    base: u64,
    shadow: u64,
    window: u64,
    file: OwnedFd,
}

struct Physical {
    /// Offset in the window.
    at: u64,
    size: u64,
    device: i32,
    mappings: u32,
    /// Not yet given back by the program.
    owned: bool,
    /// An asynchronous free that will give it back is queued.
    going: bool,
}

pub struct Range {
    size: u64,
    /// `Some` for what cuMemAlloc made: the allocation's physical room.
    allocation: Option<u64>,
}

impl Range {
    pub fn is_reservation_of(&self, size: u64) -> bool {
        self.allocation.is_none() && self.size == size
    }
}

struct Mapping {
    size: u64,
    physical: u64,
    /// Offset in the physical allocation.
    offset: u64,
    access: u32,
    /// The last operation of each timeline that uses the mapping.
    uses: Clock,
}

/// A part of a device address range within one mapping.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub mapping: u64,
    pub physical: u64,
    /// Offset in the physical allocation.
    pub offset: u64,
    /// Offset in the window.
    pub at: u64,
    pub len: u64,
}

fn reserve(file: Option<&OwnedFd>) -> Outcome<u64> {
    let (protection, flags, fd) = match file {
        Some(file) => (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, file.as_raw_fd()),
        None => (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
    };
    let flags = flags | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), SPAN as usize, protection, flags, fd, 0) };
    if address == libc::MAP_FAILED {
        return Err(ERROR_OUT_OF_MEMORY);
    }
    // SAFETY: advice about our own new mapping: a core dump shall not walk terabytes of holes.
    unsafe { libc::madvise(address, SPAN as usize, libc::MADV_DONTDUMP) };
    Ok(address as u64)
}

impl Ground {
    fn new() -> Outcome<Self> {
        // SAFETY: the name is a C string; the result is checked.
        let fd = unsafe { libc::memfd_create(c"fakecuda".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(ERROR_OPERATING_SYSTEM);
        }
        // SAFETY: the descriptor is new and nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: plain system call on our own descriptor.
        if unsafe { libc::ftruncate(file.as_raw_fd(), SPAN as i64) } != 0 {
            return Err(ERROR_OPERATING_SYSTEM);
        }
        Ok(Self { base: reserve(None)?, shadow: reserve(None)?, window: reserve(Some(&file))?, file })
    }
}

fn round_up(value: u64, to: u64) -> u64 {
    value.div_ceil(to) * to
}

impl Memory {
    fn ground(&mut self) -> Outcome<&Ground> {
        if self.ground.is_none() {
            let ground = Ground::new()?;
            self.cursor = ground.base;
            self.ground = Some(ground);
        }
        self.ground.as_ref().ok_or(ERROR_OUT_OF_MEMORY)
    }
    /// Unmaps everything (after a reset: no work is left).
    pub fn close(&self) {
        if let Some(ground) = &self.ground {
            for address in [ground.base, ground.shadow, ground.window] {
                // SAFETY: our own mapping; the streams' threads have ended, so nobody uses it.
                unsafe { libc::munmap(address as *mut libc::c_void, SPAN as usize) };
            }
        }
    }
    pub fn window(&self) -> usize {
        self.ground.as_ref().map_or(0, |ground| ground.window as usize)
    }
    /// Whether an address is a device's, mapped or not.
    pub fn is_device(&self, address: u64) -> bool {
        self.ground.as_ref().is_some_and(|ground| (ground.base..ground.base + SPAN).contains(&address))
    }
    /// Where a kernel finds device address `address`.
    pub fn shadow_of(&self, address: u64) -> Option<u64> {
        self.ground.as_ref().filter(|_| self.is_device(address)).map(|ground| address - ground.base + ground.shadow)
    }
    pub fn size_of(&self, physical: u64) -> u64 {
        self.physical.get(&physical).map_or(0, |physical| physical.size)
    }
    pub fn owns(&self, physical: u64) -> bool {
        self.physical.get(&physical).is_some_and(|physical| physical.owned)
    }
    /// Takes memory of a device for page tables of its own; `capacity` is what the device has.
    pub fn take_tables(&mut self, (device, bytes): (i32, u64), capacity: u64) -> Outcome {
        if self.taken_bytes(device) + bytes > capacity {
            return Err(ERROR_OUT_OF_MEMORY);
        }
        *self.tables.entry(device).or_default() += bytes;
        Ok(())
    }
    pub fn give_tables_back(&mut self, (device, bytes): (i32, u64)) {
        if let Some(taken) = self.tables.get_mut(&device) {
            *taken -= bytes;
        }
    }
    /// What is not free: physical room, and page tables.
    pub fn taken_bytes(&self, device: i32) -> u64 {
        self.used_bytes(device) + self.tables.get(&device).copied().unwrap_or(0)
    }
    /// The physical room there is.
    pub fn used_bytes(&self, device: i32) -> u64 {
        self.physical.values().filter(|physical| physical.device == device).map(|physical| physical.size).sum()
    }

    /// Physical room of `size` bytes; `capacity` is what the device has.
    pub fn create_physical(&mut self, device: i32, size: u64, capacity: u64) -> Outcome<u64> {
        self.ground()?;
        if self.taken_bytes(device).checked_add(size).is_none_or(|total| total > capacity) {
            return Err(ERROR_OUT_OF_MEMORY);
        }
        let room = round_up(size, 4096);
        let found = self.free.iter().find(|(_, len)| **len >= room).map(|(&at, &len)| (at, len));
        let at = match found {
            Some((at, len)) => {
                self.free.remove(&at);
                if len > room {
                    self.free.insert(at + room, len - room);
                }
                at
            }
            None => {
                if self.end + room > SPAN {
                    return Err(ERROR_OUT_OF_MEMORY);
                }
                self.end += room;
                self.end - room
            }
        };
        self.next_physical += 1;
        let id = self.next_physical;
        self.physical.insert(id, Physical { at, size, device, mappings: 0, owned: true, going: false });
        Ok(id)
    }
    /// The program gives the room back; it is free once it is behind no address. Says whether it is.
    pub fn release_physical(&mut self, id: u64) -> bool {
        if let Some(physical) = self.physical.get_mut(&id) {
            physical.owned = false;
        }
        self.collect(id)
    }
    /// The program may no longer name it, though work in front of its free still uses it.
    pub fn will_go(&mut self, id: u64) {
        if let Some(physical) = self.physical.get_mut(&id) {
            physical.going = true;
        }
    }
    fn collect(&mut self, id: u64) -> bool {
        let Some(physical) = self.physical.get(&id).filter(|physical| !physical.owned && physical.mappings == 0) else {
            return false;
        };
        let (at, room) = (physical.at, round_up(physical.size, 4096));
        self.physical.remove(&id);
        self.free.insert(at, room);
        if let Some(ground) = &self.ground {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            // SAFETY: plain system call on our own descriptor; the room belongs to nobody now.
            unsafe { libc::fallocate(ground.file.as_raw_fd(), mode, at as i64, room as i64) };
        }
        true
    }

    /// Device addresses that nothing lies at.
    pub fn reserve(&mut self, size: u64, align: u64, allocation: Option<u64>) -> Outcome<u64> {
        let base = self.ground()?.base;
        for from in [self.cursor, base] {
            let mut at = round_up(from, align);
            for (&start, range) in self.ranges.range(..) {
                if start + range.size > at && at + size > start {
                    at = round_up(start + range.size, align);
                }
            }
            if at + size <= base + SPAN {
                self.ranges.insert(at, Range { size, allocation });
                self.cursor = at + size;
                return Ok(at);
            }
        }
        Err(ERROR_OUT_OF_MEMORY)
    }
    pub fn range(&self, address: u64) -> Option<&Range> {
        self.ranges.get(&address)
    }
    /// The physical room of the allocation that begins at an address.
    pub fn allocation(&self, address: u64) -> Option<u64> {
        self.ranges.get(&address)?.allocation
    }
    /// Where the allocation that holds an address begins, and its size.
    pub fn allocation_around(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, range) = self.ranges.range(..=address).next_back()?;
        (address < start + range.size && range.allocation.is_some()).then_some((start, range.size))
    }
    /// Leaves a page behind the addresses that were reserved last.
    pub fn leave_gap(&mut self) {
        self.cursor += 4096;
    }
    pub fn free_range(&mut self, address: u64) {
        self.ranges.remove(&address);
    }
    /// Whether a reservation (not an allocation) holds all of the range.
    pub fn reserved(&self, address: u64, size: u64) -> bool {
        self.ranges
            .range(..=address)
            .next_back()
            .is_some_and(|(&start, range)| range.allocation.is_none() && address + size <= start + range.size)
    }
    pub fn mapped_within(&self, address: u64, size: u64) -> Vec<u64> {
        let before_end = self.mappings.range(..address + size).rev();
        before_end.take_while(|(start, mapping)| *start + mapping.size > address).map(|(&start, _)| start).collect()
    }

    /// Puts room behind addresses; nobody can access it yet.
    pub fn map(&mut self, address: u64, size: u64, physical: u64, offset: u64, access: u32) -> Outcome {
        let room = self.physical.get_mut(&physical).ok_or(ERROR_INVALID_VALUE)?;
        room.mappings += 1;
        let at = room.at + offset;
        self.mappings.insert(address, Mapping { size, physical, offset, access, uses: Clock::default() });
        if self.shadowless {
            return Ok(());
        }
        let Some(ground) = &self.ground else { return Err(ERROR_INVALID_VALUE) };
        let shadow = (address - ground.base + ground.shadow) as *mut libc::c_void;
        // SAFETY: `address..address+size` lies within a range of ours that nothing else is mapped in, so its shadow,
        // too, is ours; the room lies within the file.
        let mapped = unsafe {
            let flags = libc::MAP_SHARED | libc::MAP_FIXED;
            libc::mmap(
                shadow,
                round_up(size, 4096) as usize,
                protection(access),
                flags,
                ground.file.as_raw_fd(),
                at as i64,
            )
        };
        if mapped == libc::MAP_FAILED { Err(ERROR_MAP_FAILED) } else { Ok(()) }
    }
    /// The mappings that exactly cover a range, in order.
    pub fn exactly(&self, address: u64, size: u64) -> Option<Vec<u64>> {
        let mut at = address;
        let mut found = Vec::new();
        while at < address + size {
            found.push(at);
            at += self.mappings.get(&at)?.size;
        }
        (at == address + size).then_some(found)
    }
    pub fn set_access(&mut self, mapping: u64, access: u32) {
        let Some(found) = self.mappings.get_mut(&mapping) else { return };
        found.access = access;
        if self.shadowless {
            return;
        }
        let Some(ground) = &self.ground else { return };
        let shadow = (mapping - ground.base + ground.shadow) as *mut libc::c_void;
        // SAFETY: the shadow of a mapping that exists is mapped and ours.
        unsafe { libc::mprotect(shadow, round_up(found.size, 4096) as usize, protection(access)) };
    }
    pub fn access_of(&self, address: u64) -> Option<u32> {
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        (address < start + mapping.size).then_some(mapping.access)
    }
    pub fn uses(&self, mapping: u64) -> Clock {
        self.mappings.get(&mapping).map(|mapping| mapping.uses.clone()).unwrap_or_default()
    }
    /// Takes the room away; `keep_shadow` where a kernel may still be in it. Says which room is free now.
    pub fn unmap(&mut self, address: u64, keep_shadow: bool) -> Option<u64> {
        let mapping = self.mappings.remove(&address)?;
        if let Some(ground) = self.ground.as_ref().filter(|_| !keep_shadow && !self.shadowless) {
            let shadow = (address - ground.base + ground.shadow) as *mut libc::c_void;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
            // SAFETY: replaces our own mapping of the shadow by inaccessible memory; no work uses it.
            unsafe { libc::mmap(shadow, round_up(mapping.size, 4096) as usize, libc::PROT_NONE, flags, -1, 0) };
        }
        if let Some(physical) = self.physical.get_mut(&mapping.physical) {
            physical.mappings -= 1;
        }
        self.collect(mapping.physical).then_some(mapping.physical)
    }

    pub fn used(&mut self, mapping: u64, timeline: TimelineId, number: u64) {
        if let Some(mapping) = self.mappings.get_mut(&mapping) {
            mapping.uses.raise(timeline, number);
        }
    }

    /// The pieces behind a range of device addresses, or in words why it may not be accessed.
    pub fn resolve(&self, address: u64, len: u64, write: bool) -> Result<Vec<Piece>, String> {
        let mut pieces = Vec::new();
        let mut at = address;
        let end = address.checked_add(len).ok_or("the range wraps around")?;
        while at < end {
            let found = self.mappings.range(..=at).next_back().filter(|(start, mapping)| at < *start + mapping.size);
            let Some((&start, mapping)) = found else { return Err(self.why_not(at)) };
            if mapping.access & 1 == 0 {
                return Err(format!("{at:#x} is mapped, but no access was set"));
            }
            if write && mapping.access != 3 {
                return Err(format!("{at:#x} may only be read"));
            }
            let part = (start + mapping.size).min(end) - at;
            let offset = mapping.offset + (at - start);
            let room = self.physical.get(&mapping.physical).map_or(0, |physical| physical.at);
            pieces.push(Piece { mapping: start, physical: mapping.physical, offset, at: room + offset, len: part });
            at += part;
        }
        Ok(pieces)
    }
    fn why_not(&self, at: u64) -> String {
        match self.ranges.range(..=at).next_back().filter(|(start, range)| at < *start + range.size) {
            Some((start, range)) if range.allocation.is_none() => {
                format!("{at:#x} is reserved (offset {} of its range), but nothing is mapped there", at - start)
            }
            _ if at < self.cursor => format!("{at:#x} lies in memory that was freed"),
            _ => format!("{at:#x} was never allocated or reserved"),
        }
    }

    /// What the program has not given back.
    pub fn leaks(&self) -> Vec<String> {
        let sorted = |mut lines: Vec<String>| {
            lines.sort();
            lines
        };
        let ranges = self.ranges.iter().map(|(start, range)| match range.allocation {
            Some(_) => format!("device allocation of {} bytes at {start:#x}", range.size),
            None => format!("address reservation of {} bytes at {start:#x}", range.size),
        });
        let allocations: Vec<u64> = self.ranges.values().filter_map(|range| range.allocation).collect();
        let mappings = self.mappings.iter().filter(|(_, mapping)| !allocations.contains(&mapping.physical));
        let mappings = mappings.map(|(start, mapping)| format!("mapping of {} bytes at {start:#x}", mapping.size));
        let rooms = self
            .physical
            .iter()
            .filter(|(id, physical)| physical.owned && !physical.going && !allocations.contains(id));
        let rooms = rooms.map(|(id, physical)| format!("physical allocation {id} of {} bytes", physical.size));
        [sorted(ranges.collect()), sorted(mappings.collect()), sorted(rooms.collect())].concat()
    }
}

fn protection(access: u32) -> i32 {
    match access {
        3 => libc::PROT_READ | libc::PROT_WRITE,
        1 => libc::PROT_READ,
        _ => libc::PROT_NONE,
    }
}
