//! What does it cost the host device to move a frame to another page? For each page size: a `map`, a `map` and a
//! touch of every 4 KiB, and what making a page inaccessible costs in the two ways there are: `mprotect`, which a
//! `strict` build pays at eviction, and a fresh inaccessible mapping, which every move pays for the place it leaves.
//!
//! Every thread of a process pays too while its address space changes; this measures a process with one busy thread.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

use std::ffi::c_void;
use std::fs;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Instant;

use outcore::device::{Completion, Completions, Device, DeviceAddress, FrameId};
use outcore::testing::{HostDevice, HostDeviceConfig};
use outcore::{Bytes, PageSize};

const ROUNDS: usize = 5;
const FRAMES: u32 = 16;
const PAGES: u32 = 61;
const MAPS_PER_ROUND: u64 = 320;

struct Ignore;

impl Completions for Ignore {
    fn completed(&self, _done: &mut Vec<Completion>) {}
}

fn touch(at: DeviceAddress, len: u64) {
    for offset in (0..len).step_by(4096) {
        // SAFETY: the page was just mapped and this thread alone uses it.
        unsafe { ((at.get() + offset) as *mut u8).write_volatile(1) };
    }
}

/// Median, least and most microseconds of `work`, per call.
fn measure(calls: u64, mut work: impl FnMut(u64)) -> String {
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|round| {
            let start = Instant::now();
            (0..calls).for_each(|n| work(round as u64 * calls + n));
            start.elapsed().as_secs_f64() * 1e6 / calls as f64
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    format!("{:8.1} [{:.1}-{:.1}]", rounds[ROUNDS / 2], rounds[0], rounds[ROUNDS - 1])
}

/// Prices one way of making a touched range inaccessible, and of making it usable again, without a device.
fn price_of_closing(len: u64, fresh: bool) -> String {
    let size = len as usize;
    let align = 2 << 20;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping of this function's own.
    let start = unsafe { libc::mmap(null_mut(), size + align, libc::PROT_NONE, flags, -1, 0) } as usize;
    let base = start.next_multiple_of(align) as *mut c_void;
    let (open, shut) = (libc::PROT_READ | libc::PROT_WRITE, libc::PROT_NONE);
    let text = measure(MAPS_PER_ROUND, |_| {
        // SAFETY: inside the mapping above, which nobody else uses.
        unsafe {
            libc::mprotect(base, size, open);
            if fresh {
                libc::mmap(base, size, shut, flags | libc::MAP_FIXED, -1, 0);
            } else {
                libc::mprotect(base, size, shut);
            }
        }
    });
    // SAFETY: as above.
    unsafe { libc::munmap(start as *mut c_void, size + align) };
    text
}

fn main() {
    println!("us per page: median [least-most] of {ROUNDS} rounds of {MAPS_PER_ROUND} pages");
    for bytes in [Bytes::kib(64), Bytes::kib(256), Bytes::mib(2), Bytes::mib(16)] {
        let page_size = PageSize::new(bytes).unwrap();
        let config = HostDeviceConfig { page_size, frames: FRAMES, link: None, warm: false };
        let device = HostDevice::new(config, Arc::new(Ignore)).unwrap();
        let base = device.reserve(PAGES).unwrap();
        let at = |n: u64| base.offset(n * 7 % u64::from(PAGES) * page_size.bytes());
        let frame = |n: u64| FrameId::new((n % u64::from(FRAMES)) as u32);
        for n in 0..u64::from(FRAMES) {
            device.map(frame(n), at(n)).unwrap();
            touch(at(n), page_size.bytes());
        }
        let map = measure(MAPS_PER_ROUND, |n| device.map(frame(n), at(n + 20)).unwrap());
        let first = ROUNDS as u64 * MAPS_PER_ROUND + 20;
        let mapped = measure(MAPS_PER_ROUND, |n| {
            device.map(frame(n), at(n + first)).unwrap();
            touch(at(n + first), page_size.bytes());
        });
        // Protecting a frame a second time costs nothing, so each frame is mapped again, where it is, after each time.
        let last = first + ROUNDS as u64 * MAPS_PER_ROUND - u64::from(FRAMES);
        let protect = measure(MAPS_PER_ROUND, |n| {
            let n = n % u64::from(FRAMES);
            device.protect(frame(n)).unwrap();
            device.map(frame(n), at(n + last)).unwrap();
        });
        println!(
            "{bytes:>9}: map {map}, map and touch {mapped}, protect and map in place {protect}{}",
            if outcore::device::parts::strict() { "" } else { " (protect does nothing: not strict)" }
        );
        println!(
            "           empty range: mprotect open and shut {}, mprotect open and fresh mapping {}",
            price_of_closing(page_size.bytes(), false),
            price_of_closing(page_size.bytes(), true)
        );
    }
    println!("{} mappings", fs::read_to_string("/proc/self/maps").unwrap().lines().count());
}
