//! Allocations of device memory, and what a program may ask of an address.

use crate::abi::*;
use crate::clock::Clock;
use crate::driver::{Driver, Guard, Need, enter, wait_at_most};
use crate::judge::Space;
use crate::stream;
use crate::work::{Action, Work};

/// What cuMemAlloc aligns to.
const ALIGN: u64 = 512;

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
    !wait_at_most(driver, limit, |driver| !stream::really_running(driver, uses))
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
    let size = (bytes as u64).next_multiple_of(ALIGN);
    let physical = driver.memory.create_physical(device, size, capacity)?;
    // Page-aligned, with a gap behind, so that the shadow can be mapped and an overrun is found.
    let placed = driver.memory.reserve(size, 4096, Some(physical)).and_then(|address| {
        driver.memory.leave_gap();
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
    match driver.memory.allocation(address) {
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
        let (start, len) = driver.memory.allocation_around(address).ok_or(ERROR_NOT_FOUND)?;
        base.set_if_wanted(start);
        size.set_if_wanted(len as usize);
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
