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
use crate::driver::{Driver, Guard, Need, enter};
use crate::judge::Space;
use crate::stream;
use crate::work::{Action, Work};

/// What cuMemAlloc aligns to.
const ALIGN: u64 = 512;
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
    fn taken_bytes(&self, device: i32) -> u64 {
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

/// Memory is about to go away while work may use it that the host does not know to have ended: a finding, and then a
/// wait, as the real driver often does. Says whether the work may still be running afterwards.
pub fn in_flight(driver: &mut Guard, what: &str, uses: &Clock) -> bool {
    let Some((timeline, number)) = uses.ahead_of(&driver.known).next() else { return false };
    let text = format!(
        "{what} while operation {number} on {} may still use it: nothing told the host that it ended",
        driver.timelines[timeline].label
    );
    driver.judge.find("in-flight", &text);
    settle(driver, uses)
}

/// Waits a little for work to end, unless a test holds streams back. Says whether it may still be running.
pub fn settle(driver: &mut Guard, uses: &Clock) -> bool {
    if driver.held || driver.timelines.iter().any(|timeline| timeline.held) {
        return stream::really_running(driver, uses);
    }
    let limit = std::time::Duration::from_secs(5);
    !crate::driver::wait_at_most(driver, limit, |driver| !stream::really_running(driver, uses))
}

fn device_of_current(driver: &Driver) -> Outcome<i32> {
    driver.contexts.device_of(driver.contexts.required()?).ok_or(ERROR_INVALID_CONTEXT)
}

pub fn allocate(driver: &mut Guard, bytes: usize) -> Outcome<(u64, u64)> {
    if bytes == 0 {
        return Err(ERROR_INVALID_VALUE);
    }
    let device = device_of_current(driver)?;
    let capacity = driver.config.device_bytes;
    let size = round_up(bytes as u64, ALIGN);
    let physical = driver.memory.create_physical(device, size, capacity)?;
    // Page-aligned, with a gap behind, so that the shadow can be mapped and an overrun is found.
    let placed = driver.memory.reserve(size, 4096, Some(physical)).and_then(|address| {
        driver.memory.cursor += 4096;
        driver.memory.map(address, size, physical, 0, 3).map(|()| address)
    });
    match placed {
        Ok(address) => Ok((address, physical)),
        Err(code) => {
            driver.memory.release_physical(physical);
            Err(code)
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc_v2(out: Out<u64>, bytes: usize) -> CuResult {
    enter("cuMemAlloc_v2", Need::Context, |driver| {
        let (address, _) = allocate(driver, bytes)?;
        out.set(address)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocAsync(out: Out<u64>, bytes: usize, stream: u64) -> CuResult {
    enter("cuMemAllocAsync", Need::Context, |driver| {
        let stream = stream::find(driver, "cuMemAllocAsync", stream)?;
        let (address, physical) = allocate(driver, bytes)?;
        // The memory exists from this point of the stream on: earlier or unordered work must not touch it.
        let work = Work { whole: Some(physical), ..Work::mark("cuMemAllocAsync") };
        stream::submit(driver, stream, work)?;
        out.set(address)
    })
}

/// The physical room of the allocation at `address`, or a finding.
fn allocation(driver: &mut Guard, name: &str, address: u64) -> Outcome<u64> {
    match driver.memory.range(address).and_then(|range| range.allocation) {
        Some(physical) => Ok(physical),
        None => {
            let text =
                format!("{name} was given {address:#x}, where no allocation begins (never made, or freed before)");
            driver.judge.find("address", &text);
            Err(ERROR_INVALID_VALUE)
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> CuResult {
    enter("cuMemFree_v2", Need::Context, |driver| {
        if address == 0 {
            return Ok(());
        }
        let physical = allocation(driver, "cuMemFree", address)?;
        let uses = driver.memory.uses(address);
        let running = in_flight(driver, "cuMemFree was called", &uses);
        driver.memory.unmap(address, running);
        driver.memory.free_range(address);
        driver.judge.forget_space(Space::Device(physical));
        driver.memory.release_physical(physical);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeAsync(address: u64, stream: u64) -> CuResult {
    enter("cuMemFreeAsync", Need::Context, |driver| {
        let stream = stream::find(driver, "cuMemFreeAsync", stream)?;
        let physical = allocation(driver, "cuMemFreeAsync", address)?;
        let work = Work { whole: Some(physical), ..Work::new("cuMemFreeAsync", Vec::new(), Action::Release(physical)) };
        stream::submit(driver, stream, work)?;
        // Later calls may not name the address; work in front of the free still works in the room. The shadow stays
        // until the addresses are used again, for kernels that have not run yet.
        driver.memory.will_go(physical);
        driver.memory.unmap(address, true);
        driver.memory.free_range(address);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) -> CuResult {
    enter("cuMemGetInfo_v2", Need::Context, |driver| {
        let device = device_of_current(driver)?;
        let capacity = driver.config.device_bytes;
        free.set(capacity.saturating_sub(driver.memory.taken_bytes(device)) as usize)?;
        total.set(capacity as usize)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAddressRange_v2(base: Out<u64>, size: Out<usize>, address: u64) -> CuResult {
    enter("cuMemGetAddressRange_v2", Need::Context, |driver| {
        let found = driver.memory.ranges.range(..=address).next_back();
        let found = found.filter(|(start, range)| address < *start + range.size && range.allocation.is_some());
        let (&start, range) = found.ok_or(ERROR_NOT_FOUND)?;
        base.set_if_wanted(start);
        size.set_if_wanted(range.size as usize);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuPointerGetAttribute(data: usize, which: i32, address: u64) -> CuResult {
    enter("cuPointerGetAttribute", Need::Context, |driver| {
        let mapped = driver.memory.access_of(address).is_some();
        let locked = driver.locked.block(address).is_some();
        if !mapped && !locked {
            return Err(ERROR_INVALID_VALUE);
        }
        match which {
            // Memory type: host or device.
            2 => Out::<u32>::at(data).set(if mapped { 2 } else { 1 }),
            3 if mapped => Out::<u64>::at(data).set(address),
            4 if locked => Out::<u64>::at(data).set(address),
            8 => Out::<u32>::at(data).set(0),
            9 => Out::<i32>::at(data).set(device_of_current(driver)?),
            _ => Err(ERROR_NOT_SUPPORTED),
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetDefaultMemPool(pool: Out<u64>, device: i32) -> CuResult {
    enter("cuDeviceGetDefaultMemPool", Need::Init, |_| pool.set(POOL + device as u64))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetMemPool(pool: Out<u64>, device: i32) -> CuResult {
    enter("cuDeviceGetMemPool", Need::Init, |_| pool.set(POOL + device as u64))
}

/// Handle of the only pool a device has.
const POOL: u64 = 0x1000;

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolTrimTo(_pool: u64, _keep: usize) -> CuResult {
    enter("cuMemPoolTrimTo", Need::Init, |_| Ok(()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolSetAttribute(_pool: u64, _which: u32, _value: usize) -> CuResult {
    enter("cuMemPoolSetAttribute", Need::Init, |_| Ok(()))
}
