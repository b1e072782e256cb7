//! Copies and fills.

use crate::abi::*;
use crate::driver::{Guard, Need, enter};
use crate::judge::{Space, Touch};
use crate::reach::Reach;
use crate::state::locked::HostSide;
use crate::stream;
use crate::work::{Action, Copy, Work};

/// Which side must be device memory; `None` where the addresses themselves say (unified addressing).
#[derive(Clone, Copy)]
enum Way {
    In,
    Out,
    Within,
    Any,
}

fn check_way(driver: &mut Guard, name: &str, way: Way, copy: Copy) -> Outcome {
    let (to, from) = (driver.memory.is_device(copy.to), driver.memory.is_device(copy.from));
    let fits = match way {
        Way::In => to && !from,
        Way::Out => !to && from,
        Way::Within => to && from,
        Way::Any => true,
    };
    if fits && copy.to != 0 && copy.from != 0 {
        return Ok(());
    }
    let side = |device| if device { "device" } else { "host" };
    let text = format!(
        "{name} was told to copy from {} memory at {:#x} to {} memory at {:#x}",
        side(from),
        copy.from,
        side(to),
        copy.to
    );
    driver.judge.find("address", &text);
    Err(ERROR_INVALID_VALUE)
}

fn reach(copies: &[Copy]) -> Vec<Reach> {
    let both = |copy: &Copy| {
        [
            Reach { address: copy.from, len: copy.len, write: false },
            Reach { address: copy.to, len: copy.len, write: true },
        ]
    };
    copies.iter().flat_map(both).collect()
}

/// How host memory stands, with a finding where an asynchronous call should not have been given it.
fn host_side(driver: &mut Guard, name: &str, address: u64, len: u64) -> Outcome<HostSide> {
    let side = driver.locked.covers(address, len, driver.contexts.current());
    match side {
        HostSide::Locked => {}
        HostSide::Pageable => {
            let text = format!(
                "{name} was given {len} bytes of host memory that is not page-locked for this context; it copies synchronously"
            );
            driver.judge.find("pageable", &text);
        }
        HostSide::Mixed => {
            let text = format!(
                "{name} was given {len} bytes of host memory that is only partly page-locked, or of two allocations"
            );
            driver.judge.find("pageable", &text);
            return Err(ERROR_INVALID_VALUE);
        }
    }
    Ok(side)
}

/// An asynchronous copy, or several that are not ordered among each other.
fn copy_async(driver: &mut Guard, name: &str, way: Way, mut copies: Vec<Copy>, stream: u64) -> Outcome {
    let handle = stream::find(driver, name, stream)?;
    copies.retain(|copy| copy.len > 0);
    let mut staged = Vec::new();
    let mut wait = false;
    for copy in &mut copies {
        check_way(driver, name, way, *copy)?;
        for (address, source) in [(copy.from, true), (copy.to, false)] {
            if driver.memory.is_device(address)
                || !matches!(host_side(driver, name, address, copy.len)?, HostSide::Pageable)
            {
                continue;
            }
            if source {
                // The driver takes a copy of pageable memory before it returns.
                driver.host_touch(name, &[Touch { space: Space::Host, start: address, len: copy.len, write: false }]);
                // SAFETY: the caller promises `len` readable bytes at the source until the call returns.
                let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, copy.len as usize) }.to_vec();
                copy.from = bytes.as_ptr() as u64;
                staged.push(bytes);
            } else {
                wait = true;
            }
        }
    }
    if copies.is_empty() {
        return Ok(());
    }
    let staged_at: Vec<u64> = staged.iter().map(|bytes| bytes.as_ptr() as u64).collect();
    let mut reach = reach(&copies);
    reach.retain(|reach| !staged_at.contains(&reach.address));
    let work = Work::new(name, reach, Action::Copies { copies, staged: staged.into() });
    stream::submit(driver, handle, work)?;
    let capturing = driver.streams.get(&handle).is_some_and(|stream| stream.capture.is_some());
    let timeline = driver.streams.get(&handle).map(|stream| stream.timeline).ok_or(ERROR_INVALID_HANDLE)?;
    let held = driver.held || driver.timelines[timeline].held;
    if wait && !capturing && !held {
        stream::synchronize(driver, timeline)?;
    }
    Ok(())
}

fn one(name: &'static str, way: Way, copy: Copy, stream: u64) -> CuResult {
    enter(name, Need::Context, |driver| copy_async(driver, name, way, vec![copy], stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, len: usize, stream: u64) -> CuResult {
    one("cuMemcpyHtoDAsync_v2", Way::In, Copy { to, from, len: len as u64 }, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, len: usize, stream: u64) -> CuResult {
    one("cuMemcpyDtoHAsync_v2", Way::Out, Copy { to, from, len: len as u64 }, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: u64) -> CuResult {
    one("cuMemcpyDtoDAsync_v2", Way::Within, Copy { to, from, len: len as u64 }, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyAsync(to: u64, from: u64, len: usize, stream: u64) -> CuResult {
    one("cuMemcpyAsync", Way::Any, Copy { to, from, len: len as u64 }, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyPeerAsync(
    to: u64,
    _to_ctx: u64,
    from: u64,
    _from_ctx: u64,
    len: usize,
    stream: u64,
) -> CuResult {
    one("cuMemcpyPeerAsync", Way::Within, Copy { to, from, len: len as u64 }, stream)
}

/// A synchronous call: on the legacy default stream, and the host waits.
fn now(driver: &mut Guard, work: Work) -> Outcome {
    let handle = stream::find(driver, &work.what.clone(), 0)?;
    stream::submit(driver, handle, work)?;
    let timeline = driver.streams.get(&handle).map(|stream| stream.timeline).ok_or(ERROR_INVALID_HANDLE)?;
    stream::synchronize(driver, timeline)
}

fn one_now(name: &'static str, way: Way, copy: Copy) -> CuResult {
    enter(name, Need::Context, |driver| {
        if copy.len == 0 {
            return Ok(());
        }
        check_way(driver, name, way, copy)?;
        now(driver, Work::new(name, reach(&[copy]), Action::Copies { copies: vec![copy], staged: Default::default() }))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoD_v2(to: u64, from: u64, len: usize) -> CuResult {
    one_now("cuMemcpyHtoD_v2", Way::In, Copy { to, from, len: len as u64 })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoH_v2(to: u64, from: u64, len: usize) -> CuResult {
    one_now("cuMemcpyDtoH_v2", Way::Out, Copy { to, from, len: len as u64 })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, len: usize) -> CuResult {
    one_now("cuMemcpyDtoD_v2", Way::Within, Copy { to, from, len: len as u64 })
}

/// Copies of one batch are not ordered among each other.
fn overlaps_within(copies: &[Copy]) -> bool {
    let overlap = |a: u64, a_len: u64, b: u64, b_len: u64| a < b + b_len && b < a + a_len;
    copies.iter().enumerate().any(|(i, a)| {
        copies.iter().enumerate().any(|(j, b)| {
            (i < j && overlap(a.to, a.len, b.to, b.len)) || (i != j && overlap(a.to, a.len, b.from, b.len))
        })
    })
}

struct Batch {
    to: In<u64>,
    from: In<u64>,
    sizes: In<usize>,
    count: usize,
    attributes: In<MemcpyAttributes>,
    indices: In<usize>,
    attribute_count: usize,
    stream: u64,
}

fn batch(name: &'static str, batch: &Batch) -> CuResult {
    enter(name, Need::Context, |driver| {
        // The legacy default stream is refused, and each group of copies must say which attributes it has.
        if batch.stream <= 1 || batch.count == 0 || batch.attribute_count == 0 || batch.attribute_count > batch.count {
            return Err(ERROR_INVALID_VALUE);
        }
        let indices = batch.indices.list(batch.attribute_count)?;
        if indices[0] != 0 || !indices.is_sorted_by(|a, b| a < b) || indices.iter().any(|&index| index >= batch.count) {
            return Err(ERROR_INVALID_VALUE);
        }
        if batch.attributes.list(batch.attribute_count)?.iter().any(|a| !matches!(a.source_order, 1..=3)) {
            return Err(ERROR_INVALID_VALUE);
        }
        let mut copies = Vec::with_capacity(batch.count);
        for i in 0..batch.count {
            copies.push(Copy { to: batch.to.at(i)?, from: batch.from.at(i)?, len: batch.sizes.at(i)? as u64 });
        }
        if copies.iter().any(|copy| copy.len == 0) {
            return Err(ERROR_INVALID_VALUE);
        }
        if overlaps_within(&copies) {
            driver
                .judge
                .find("race", &format!("{name} was given copies that overlap; the copies of a batch are not ordered"));
        }
        copy_async(driver, name, Way::Any, copies, batch.stream)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyBatchAsync_v2(
    to: In<u64>,
    from: In<u64>,
    sizes: In<usize>,
    count: usize,
    attributes: In<MemcpyAttributes>,
    indices: In<usize>,
    attribute_count: usize,
    stream: u64,
) -> CuResult {
    batch("cuMemcpyBatchAsync_v2", &Batch { to, from, sizes, count, attributes, indices, attribute_count, stream })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyBatchAsync(
    to: In<u64>,
    from: In<u64>,
    sizes: In<usize>,
    count: usize,
    attributes: In<MemcpyAttributes>,
    indices: In<usize>,
    attribute_count: usize,
    failed: Out<usize>,
    stream: u64,
) -> CuResult {
    failed.set_if_wanted(usize::MAX);
    batch("cuMemcpyBatchAsync", &Batch { to, from, sizes, count, attributes, indices, attribute_count, stream })
}

fn fill_work(driver: &mut Guard, name: &str, address: u64, pattern: u32, width: u8, count: u64) -> Outcome<Work> {
    let len = count.checked_mul(u64::from(width)).ok_or(ERROR_INVALID_VALUE)?;
    if !address.is_multiple_of(u64::from(width)) {
        return Err(ERROR_INVALID_VALUE);
    }
    if !driver.memory.is_device(address) {
        driver.judge.find("address", &format!("{name} was given {address:#x}, which is not device memory"));
        return Err(ERROR_INVALID_VALUE);
    }
    Ok(Work::new(name, vec![Reach { address, len, write: true }], Action::Fill { address, count, pattern, width }))
}

fn fill(name: &'static str, address: u64, pattern: u32, width: u8, count: usize, stream: Option<u64>) -> CuResult {
    enter(name, Need::Context, |driver| {
        if count == 0 {
            return Ok(());
        }
        let work = fill_work(driver, name, address, pattern, width, count as u64)?;
        match stream {
            Some(stream) => {
                let handle = stream::find(driver, name, stream)?;
                stream::submit(driver, handle, work)
            }
            None => now(driver, work),
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(address: u64, value: u8, count: usize, stream: u64) -> CuResult {
    fill("cuMemsetD8Async", address, u32::from(value), 1, count, Some(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD16Async(address: u64, value: u16, count: usize, stream: u64) -> CuResult {
    fill("cuMemsetD16Async", address, u32::from(value), 2, count, Some(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32Async(address: u64, value: u32, count: usize, stream: u64) -> CuResult {
    fill("cuMemsetD32Async", address, value, 4, count, Some(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8_v2(address: u64, value: u8, count: usize) -> CuResult {
    fill("cuMemsetD8_v2", address, u32::from(value), 1, count, None)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32_v2(address: u64, value: u32, count: usize) -> CuResult {
    fill("cuMemsetD32_v2", address, value, 4, count, None)
}
