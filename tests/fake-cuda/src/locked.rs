//! Page-locked host memory: allocated here, or registered.

use crate::abi::*;
use crate::driver::{Driver, Guard, Need, enter};
use crate::judge::Space;
use crate::memory::settle;
use crate::state::locked::{Block, unmap};

/// A GPU's page tables have eight bytes for each 4 KiB of registered memory (measured on an H100).
const TABLES_SHARE: u64 = 512;

/// Host memory is unlocked while work uses it that the host does not know to have ended: a finding, and a wait. Says
/// whether the work may still be running afterwards.
fn in_flight(driver: &mut Guard, name: &str, start: u64, len: u64) -> bool {
    let known = driver.known.clone();
    let Some(op) = driver.judge.unfinished(Space::Host, start, start + len, &known) else { return false };
    let text = format!(
        "{name} was called while {} (operation {}) may still use the memory: nothing told the host that it ended",
        op.what, op.number
    );
    driver.judge.find("in-flight", &text);
    let mut uses = known;
    for (timeline, submitted) in driver.timelines.iter().map(|timeline| timeline.submitted).enumerate().skip(1) {
        uses.raise(timeline, submitted);
    }
    settle(driver, &uses)
}

fn allocate(driver: &mut Driver, bytes: usize, flags: u32) -> Outcome<u64> {
    if bytes == 0 {
        return Err(ERROR_INVALID_VALUE);
    }
    let context = driver.contexts.required()?;
    let len = bytes.next_multiple_of(4096);
    let flags_of_map = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    let start =
        unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags_of_map, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(ERROR_OUT_OF_MEMORY);
    }
    driver.judge.forget(Space::Host, start as u64, (start as usize + len) as u64);
    let block = Block { len: bytes as u64, allocated: true, flags, context, tables: (0, 0) };
    driver.locked.blocks.insert(start as u64, block);
    Ok(start as u64)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostAlloc(out: Out<u64>, bytes: usize, flags: u32) -> CuResult {
    enter("cuMemHostAlloc", Need::Context, |driver| {
        if flags > 7 {
            return Err(ERROR_INVALID_VALUE);
        }
        out.set(allocate(driver, bytes, flags)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocHost_v2(out: Out<u64>, bytes: usize) -> CuResult {
    enter("cuMemAllocHost_v2", Need::Context, |driver| out.set(allocate(driver, bytes, 0)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(start: u64) -> CuResult {
    enter("cuMemFreeHost", Need::Context, |driver| {
        let Some(len) = driver.locked.blocks.get(&start).filter(|block| block.allocated).map(|block| block.len) else {
            driver.judge.find(
                "address",
                "cuMemFreeHost was given something that cuMemHostAlloc did not return, or that was freed",
            );
            return Err(ERROR_INVALID_VALUE);
        };
        let running = in_flight(driver, "cuMemFreeHost", start, len);
        driver.locked.blocks.remove(&start);
        driver.judge.forget(Space::Host, start, start + len);
        // Memory that held-back work will still touch stays mapped, so that there is a finding and no crash.
        if !running {
            unmap(start, len);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(start: u64, bytes: usize, flags: u32) -> CuResult {
    enter("cuMemHostRegister_v2", Need::Context, |driver| {
        if start == 0 || bytes == 0 || flags > 15 {
            return Err(ERROR_INVALID_VALUE);
        }
        if driver.locked.overlaps(start, bytes as u64) {
            return Err(ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        }
        let context = driver.contexts.required()?;
        let device = driver.contexts.device_of(context).ok_or(ERROR_INVALID_CONTEXT)?;
        let (len, capacity) = (bytes as u64, driver.config.device_bytes);
        let tables = (device, len.div_ceil(TABLES_SHARE));
        driver.memory.take_tables(tables, capacity)?;
        driver.judge.forget(Space::Host, start, start + len);
        driver.locked.blocks.insert(start, Block { len, allocated: false, flags, context, tables });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(start: u64) -> CuResult {
    enter("cuMemHostUnregister", Need::Context, |driver| {
        let block = driver.locked.blocks.get(&start).filter(|block| !block.allocated);
        let Some((len, tables)) = block.map(|block| (block.len, block.tables)) else {
            driver.judge.find("address", "cuMemHostUnregister was given memory that is not registered, or no longer");
            return Err(ERROR_HOST_MEMORY_NOT_REGISTERED);
        };
        in_flight(driver, "cuMemHostUnregister", start, len);
        driver.locked.blocks.remove(&start);
        driver.memory.give_tables_back(tables);
        driver.judge.forget(Space::Host, start, start + len);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostGetDevicePointer_v2(out: Out<u64>, start: u64, _flags: u32) -> CuResult {
    // Unified addressing: the device uses the host's address.
    enter("cuMemHostGetDevicePointer_v2", Need::Context, |driver| {
        driver.locked.block(start).ok_or(ERROR_INVALID_VALUE)?;
        out.set(start)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostGetFlags(out: Out<u32>, start: u64) -> CuResult {
    enter("cuMemHostGetFlags", Need::Context, |driver| {
        out.set(driver.locked.block(start).ok_or(ERROR_INVALID_VALUE)?.flags)
    })
}
