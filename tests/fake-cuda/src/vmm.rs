//! Virtual memory management: address reservations, physical allocations, and mapping the one to the other.

use crate::abi::*;
use crate::driver::{Guard, Need, enter};
use crate::judge::Space;
use crate::memory::in_flight;

fn multiple(driver: &Guard, value: u64) -> bool {
    value != 0 && value.is_multiple_of(driver.config.granularity)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAllocationGranularity(out: Out<usize>, prop: In<MemAllocationProp>, _which: u32) -> CuResult {
    enter("cuMemGetAllocationGranularity", Need::Init, |driver| {
        check_prop(driver, &prop)?;
        out.set(driver.config.granularity as usize)
    })
}

fn check_prop(driver: &Guard, prop: &In<MemAllocationProp>) -> Outcome<i32> {
    let prop = prop.get()?;
    let device = prop.location.id;
    if prop.kind != 1 || prop.location.kind != LOCATION_DEVICE {
        return Err(ERROR_INVALID_VALUE);
    }
    let known = usize::try_from(device).is_ok_and(|device| device < driver.config.devices);
    if known { Ok(device) } else { Err(ERROR_INVALID_DEVICE) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressReserve(out: Out<u64>, size: usize, align: usize, _hint: u64, flags: u64) -> CuResult {
    enter("cuMemAddressReserve", Need::Init, |driver| {
        let granularity = driver.config.granularity;
        let align = if align == 0 { granularity } else { align as u64 };
        if !multiple(driver, size as u64) || !align.is_power_of_two() || flags != 0 {
            return Err(ERROR_INVALID_VALUE);
        }
        out.set(driver.memory.reserve(size as u64, align.max(granularity), None)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressFree(address: u64, size: usize) -> CuResult {
    enter("cuMemAddressFree", Need::Init, |driver| {
        let whole = driver.memory.range(address).is_some_and(|range| range.is_reservation_of(size as u64));
        if !whole {
            driver.judge.find("address", "cuMemAddressFree was given something else than a whole reservation");
            return Err(ERROR_INVALID_VALUE);
        }
        if !driver.memory.mapped_within(address, size as u64).is_empty() {
            driver.judge.find("address", "cuMemAddressFree was called while memory is mapped in the range");
            return Err(ERROR_INVALID_VALUE);
        }
        driver.memory.free_range(address);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemCreate(out: Out<u64>, size: usize, prop: In<MemAllocationProp>, flags: u64) -> CuResult {
    enter("cuMemCreate", Need::Init, |driver| {
        let device = check_prop(driver, &prop)?;
        if !multiple(driver, size as u64) || flags != 0 {
            return Err(ERROR_INVALID_VALUE);
        }
        let capacity = driver.config.device_bytes;
        out.set(driver.memory.create_physical(device, size as u64, capacity)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(handle: u64) -> CuResult {
    enter("cuMemRelease", Need::Init, |driver| {
        if !driver.memory.owns(handle) {
            driver.judge.find("address", "cuMemRelease was given a handle that does not exist, or was released before");
            return Err(ERROR_INVALID_VALUE);
        }
        // Allowed while it is mapped: the memory goes with the last mapping, and that is where use in flight is found.
        if driver.memory.release_physical(handle) {
            driver.judge.forget_space(Space::Device(handle));
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: u64) -> CuResult {
    enter("cuMemMap", Need::Init, |driver| {
        let size = size as u64;
        let offset = offset as u64;
        if flags != 0 || offset != 0 || !multiple(driver, size) || !address.is_multiple_of(driver.config.granularity) {
            // The real driver, too, demands that the offset be 0.
            return Err(ERROR_INVALID_VALUE);
        }
        if !driver.memory.owns(handle) || size > driver.memory.size_of(handle) {
            driver
                .judge
                .find("address", "cuMemMap was given a handle that does not exist, was released, or is too small");
            return Err(ERROR_INVALID_VALUE);
        }
        if !driver.memory.reserved(address, size) {
            driver.judge.find(
                "address",
                &format!("cuMemMap was given {address:#x}, which is not reserved over the whole length"),
            );
            return Err(ERROR_INVALID_VALUE);
        }
        if !driver.memory.mapped_within(address, size).is_empty() {
            driver.judge.find("address", &format!("cuMemMap was given {address:#x}, where memory is mapped already"));
            return Err(ERROR_INVALID_VALUE);
        }
        driver.memory.map(address, size, handle, offset, 0)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemSetAccess(address: u64, size: usize, descriptors: In<MemAccessDesc>, count: usize) -> CuResult {
    enter("cuMemSetAccess", Need::Init, |driver| {
        for descriptor in descriptors.list(count)? {
            if descriptor.location.kind != LOCATION_DEVICE || !matches!(descriptor.flags, 0 | 1 | 3) {
                return Err(ERROR_INVALID_VALUE);
            }
            let Some(mappings) = driver.memory.exactly(address, size as u64) else {
                let text = format!(
                    "cuMemSetAccess was given {address:#x} and {size} bytes, which mappings do not exactly cover"
                );
                driver.judge.find("address", &text);
                return Err(ERROR_INVALID_VALUE);
            };
            for mapping in mappings {
                if descriptor.flags != 3 {
                    let uses = driver.memory.uses(mapping);
                    in_flight(driver, "cuMemSetAccess took access away", &uses);
                }
                driver.memory.set_access(mapping, descriptor.flags);
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAccess(flags: Out<u64>, _location: In<MemLocation>, address: u64) -> CuResult {
    enter("cuMemGetAccess", Need::Init, |driver| {
        flags.set(u64::from(driver.memory.access_of(address).ok_or(ERROR_INVALID_VALUE)?))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemUnmap(address: u64, size: usize) -> CuResult {
    enter("cuMemUnmap", Need::Init, |driver| {
        let Some(mappings) = driver.memory.exactly(address, size as u64).filter(|found| !found.is_empty()) else {
            let text =
                format!("cuMemUnmap was given {address:#x} and {size} bytes, which mappings do not exactly cover");
            driver.judge.find("address", &text);
            return Err(ERROR_INVALID_VALUE);
        };
        for mapping in mappings {
            let uses = driver.memory.uses(mapping);
            let running = in_flight(driver, &format!("cuMemUnmap took {mapping:#x} away"), &uses);
            if let Some(gone) = driver.memory.unmap(mapping, running) {
                driver.judge.forget_space(Space::Device(gone));
            }
        }
        Ok(())
    })
}
