//! Host memory that a GPU has locked is absent in children: the kernel would copy all of it at once for each.

use std::fs;
use std::sync::Arc;

use outcore::device::{Completion, Completions, Device, HostFrameId, HostPointer, StagingId};
use outcore::testing::{HostDevice, HostDeviceConfig, HostSlab, HostSlabConfig};
use outcore::{Bytes, PageSize};
use outcore_cuda::CudaDeviceConfig;

use super::harness::small_pages;
use super::{ONE_AT_A_TIME, Steps, fork};

const PAGE: u64 = 1 << 20;
/// The device locks its slices of 8 MiB one after the other.
const FRAMES: u32 = 20;

struct Ignore;

impl Completions for Ignore {
    fn completed(&self, _done: &mut Vec<Completion>) {}
}

fn slab_of(device: Arc<dyn Device>) -> HostSlab {
    let page_size = PageSize::new(Bytes::new(PAGE)).unwrap();
    let slab = HostSlab::new(HostSlabConfig { page_size, frames: FRAMES, staging: 2, lock: true }, device).unwrap();
    slab.wait_locked();
    slab
}

fn on_cuda() -> Arc<dyn Device> {
    let page_size = PageSize::new(Bytes::new(PAGE)).unwrap();
    let config = CudaDeviceConfig { device: Default::default(), page_size, frames: 1 };
    Arc::new(config.open(Arc::new(Ignore)).unwrap())
}

fn on_host() -> Arc<dyn Device> {
    let page_size = PageSize::new(Bytes::new(PAGE)).unwrap();
    let config = HostDeviceConfig { page_size, ..HostDeviceConfig::default() };
    Arc::new(HostDevice::new(config, Arc::new(Ignore)).unwrap())
}

fn frame(slab: &HostSlab, n: u32) -> HostPointer {
    slab.pointer(HostFrameId::new(n)).unwrap()
}

/// Whether the kernel keeps this memory out of children, as it says itself.
fn is_kept_out(memory: HostPointer) -> bool {
    let (at, mut inside) = (memory.as_ptr() as u64, false);
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    for line in maps.lines() {
        let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
        let number = |text| u64::from_str_radix(text, 16).ok();
        if let Some((Some(start), Some(end))) = range.map(|(start, end)| (number(start), number(end))) {
            inside = (start..end).contains(&at);
        } else if inside && let Some(flags) = line.strip_prefix("VmFlags:") {
            return flags.split_whitespace().any(|flag| flag == "dc");
        }
    }
    panic!("nothing is mapped at {at:#x}");
}

/// Whether anything is mapped there. A child may ask.
fn is_mapped(memory: HostPointer) -> bool {
    let mut page = 0u8;
    // SAFETY: the kernel writes one byte for a range of one page, and does not change the range.
    unsafe { libc::mincore(memory.as_ptr().cast(), 4096, &raw mut page) == 0 }
}

/// Forks, and checks in the child which of these pages are there.
fn check_in_a_child(what: &str, pages: &[(HostPointer, bool)]) {
    let mut steps = None;
    if let Some(child) = fork(&mut steps) {
        return child.watch(what);
    }
    if let Some(steps) = steps {
        let mut steps = Steps(steps);
        for (memory, expected) in pages {
            steps.check("a page of the host tier is where it should be", is_mapped(*memory) == *expected);
        }
        steps.end(0);
    }
}

/// A fork copied the whole tier, at once.
#[test]
fn regression_a_registered_host_tier_is_absent_in_a_child() {
    let Some(fake) = small_pages("regression_a_registered_host_tier_is_absent_in_a_child") else { return };
    let _one = ONE_AT_A_TIME.lock();
    for (device, out) in [(on_cuda as fn() -> Arc<dyn Device>, true), (on_host, false)] {
        let device = device();
        let slab = slab_of(device.clone());
        let last = slab.frame_count() - 1;
        let memory = [frame(&slab, 0), frame(&slab, last), slab.staging(StagingId::new(1)).unwrap()];
        assert_eq!(memory.map(is_kept_out), [out; 3], "{}", device.name());
        check_in_a_child(device.name(), &memory.map(|page| (page, !out)));
        // The parent has all of it.
        assert_eq!(memory.map(is_mapped), [true; 3]);
        drop(slab);
        assert_eq!(memory.map(is_mapped), [false; 3]);
        device.close().unwrap();
    }
    fake.finish();
}

/// What the driver did not lock is copied on write, as ever: children have it.
#[test]
fn memory_whose_lock_was_refused_is_in_children() {
    const OUT_OF_MEMORY: u32 = 2;
    let Some(fake) = small_pages("memory_whose_lock_was_refused_is_in_children") else { return };
    let _one = ONE_AT_A_TIME.lock();
    let device = on_cuda();
    // The first is the staging buffers', the second the first slice of frames.
    fake.fail_from("cuMemHostRegister_v2", 3, OUT_OF_MEMORY);
    let slab = slab_of(device.clone());
    assert_eq!(slab.locked_bytes(), Bytes::new(10 * PAGE));
    let memory = [frame(&slab, 7), frame(&slab, 8), frame(&slab, FRAMES - 1)];
    assert_eq!(memory.map(is_kept_out), [true, false, false]);
    let [first, second, last] = memory;
    check_in_a_child("after a refusal", &[(first, false), (second, true), (last, true)]);
    drop(slab);
    device.close().unwrap();
    drop(device);
    fake.finish();
}
