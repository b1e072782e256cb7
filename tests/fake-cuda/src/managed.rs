//! Managed memory: an allocation that the driver may move between the host and the device. Here it stays where it is,
//! and only what calls say of it is checked: moving it changes no byte and orders nothing that the program has not
//! ordered. The host cannot address it.

use crate::abi::*;
use crate::driver::{Guard, Need, enter};
use crate::memory;
use crate::stream;
use crate::work::Work;

/// CU_MEM_ATTACH_GLOBAL.
const GLOBAL: u32 = 1;
/// CU_MEM_LOCATION_TYPE_HOST.
const LOCATION_HOST: u32 = 2;

/// `CUmemLocation`, as it is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    kind: u32,
    id: i32,
}

/// Checks that the range lies in an allocation, and that there is such a side.
fn check(driver: &mut Guard, name: &str, address: u64, len: usize, to: Location) -> Outcome {
    if len == 0 || !matches!(to.kind, LOCATION_DEVICE | LOCATION_HOST) {
        return Err(ERROR_INVALID_VALUE);
    }
    if let Err(text) = driver.memory.resolve(address, len as u64, false) {
        driver.judge.find("address", &format!("{name}: {text}"));
        return Err(ERROR_INVALID_VALUE);
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocManaged(out: Out<u64>, bytes: usize, flags: u32) -> CuResult {
    enter("cuMemAllocManaged", Need::Context, |driver| {
        if flags != GLOBAL {
            return Err(ERROR_NOT_SUPPORTED);
        }
        let (address, _) = memory::allocate(driver, bytes)?;
        out.set(address)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAdvise_v2(address: u64, bytes: usize, advice: u32, to: Location) -> CuResult {
    enter("cuMemAdvise_v2", Need::Context, |driver| {
        if !(1..=6).contains(&advice) {
            return Err(ERROR_INVALID_VALUE);
        }
        check(driver, "cuMemAdvise", address, bytes, to)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPrefetchAsync_v2(address: u64, bytes: usize, to: Location, flags: u32, stream: u64) -> CuResult {
    enter("cuMemPrefetchAsync_v2", Need::Context, |driver| {
        let stream = stream::find(driver, "cuMemPrefetchAsync", stream)?;
        if flags != 0 {
            return Err(ERROR_INVALID_VALUE);
        }
        check(driver, "cuMemPrefetchAsync", address, bytes, to)?;
        stream::submit(driver, stream, Work::mark("cuMemPrefetchAsync"))
    })
}
