//! The host tier of a runtime on a GPU: what locking it means for other GPUs, and what it takes of the GPU's memory.

use std::sync::Arc;

use cuda_calls::*;
use cudarc::driver::{CudaContext, result, sys};
use outcore::device::Device;
use outcore::testing::{HostSlab, HostSlabConfig};
use outcore::{Bytes, DeviceBudget, PageSize, Runtime};
use outcore_cuda::{CudaDeviceConfig, CudaDeviceSelector};
use outcore_testkit::cuda_calls;
use outcore_testkit::fake_cuda::Fake;
use outcore_testkit::harness::{small_pages, until};

use super::cuda_rig::{PAGE, Rig, Sink};

const PORTABLE: u32 = sys::CU_MEMHOSTREGISTER_PORTABLE;

/// The free memory of the current context's GPU.
fn free() -> u64 {
    result::mem_get_info().unwrap().0 as u64
}

/// The emulated driver: memory that was registered for one context is pageable in another.
#[test]
fn memory_is_locked_for_other_gpus_only_if_it_was_registered_so() {
    let fake = Fake::load();
    fake.set_devices(2);
    for portable in [true, false] {
        let memory = vec![0u8; 64 << 10];
        let (first, second) = (CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap());
        first.bind_to_thread().unwrap();
        register_as(&memory, if portable { PORTABLE } else { 0 }).unwrap();
        for (context, own) in [(&first, true), (&second, false)] {
            context.bind_to_thread().unwrap();
            let (stream, to) = (context.new_stream().unwrap(), allocate(4096));
            copy_in(&stream, to, memory.as_ptr(), 4096).unwrap();
            stream.synchronize().unwrap();
            free_memory(to);
            if portable || own {
                fake.expect_clean();
            } else {
                fake.take_only("pageable");
            }
        }
        first.bind_to_thread().unwrap();
        unregister(&memory).unwrap();
    }
    fake.finish();
}

fn free_memory(address: u64) {
    cuda_calls::free(address).unwrap();
}

/// The host tier was registered for the first GPU's context alone: copies of another GPU were staged.
#[test]
fn regression_the_host_tier_is_locked_for_every_gpu() {
    let Some(fake) = Fake::load_or_skip("regression_the_host_tier_is_locked_for_every_gpu") else { return };
    fake.set_devices(2);
    let rig = Rig::new(1);
    {
        let second = CudaContext::new(1).unwrap();
        second.bind_to_thread().unwrap();
        let (stream, to) = (second.new_stream().unwrap(), allocate(PAGE as usize));
        copy_in(&stream, to, rig.host(3, Some(7)).as_ptr(), PAGE as usize).unwrap();
        stream.synchronize().unwrap();
        free_memory(to);
    }
    rig.finish(&fake);
}

/// The emulated driver: page tables for registered memory take a 512th of it, until it is unregistered.
#[test]
fn registered_memory_takes_page_tables_of_its_gpu() {
    let fake = Fake::load();
    {
        let _context = context();
        let memory = vec![0u8; 4 << 20];
        let before = free();
        register(&memory).unwrap();
        assert_eq!(before - free(), (4 << 20) / 512);
        unregister(&memory).unwrap();
        assert_eq!(free(), before);
        fake.set_device_bytes(4096);
        register(&memory).unwrap_err();
        fake.set_device_bytes(8192);
        register(&memory).unwrap();
        unregister(&memory).unwrap();
    }
    fake.finish();
}

/// A budget of all free memory left nothing for the GPU's page tables: the host tier then stayed unlocked.
#[test]
fn regression_a_share_of_free_memory_leaves_room_for_page_tables_of_the_host_tier() {
    const TEST: &str = "regression_a_share_of_free_memory_leaves_room_for_page_tables_of_the_host_tier";
    const HAS: u64 = 32 << 20;
    const HOST: u64 = 256 << 20;
    let Some(fake) = small_pages(TEST) else { return };
    fake.set_device_bytes(HAS);
    let page = PageSize::new(Bytes::kib(64)).unwrap();
    let builder = Runtime::builder().device(CudaDeviceSelector::default()).page_size(page);
    let all: DeviceBudget = "100%".parse().unwrap();
    let runtime = builder.device_budget(all).host_budget(Bytes::new(HOST)).staging(Bytes::mib(1)).open().unwrap();
    let budget = runtime.stats().device.budget.get();
    let tables = (HOST + (1 << 20)) / 512;
    assert!(budget > HAS - tables - 2 * page.bytes() && budget + tables <= HAS, "{budget} of {HAS}");
    // The staging buffers are one slice, and the host tier has slices of 8 MiB.
    until("the host tier is locked", || fake.calls("cuMemHostRegister_v2") == 1 + HOST / (8 << 20));
    {
        let _context = context();
        until("the last slice is registered", || free() == HAS - budget - tables);
    }
    runtime.close().unwrap();
    fake.finish();
}

/// The driver may refuse to lock memory with the error for what it does not know, which other calls give when the GPU
/// is lost.
#[test]
fn regression_memory_that_the_driver_will_not_lock_does_not_cost_the_device() {
    const UNKNOWN: u32 = 999;
    const TEST: &str = "regression_memory_that_the_driver_will_not_lock_does_not_cost_the_device";
    let Some(fake) = Fake::load_or_skip(TEST) else { return };
    {
        fake.fail_nth("cuMemHostRegister", 1, UNKNOWN);
        let rig = Rig::new(2);
        assert_eq!((fake.fired(), rig.slab.locked_bytes()), (1, Bytes::ZERO));
        assert!(rig.device.lost().is_none());
        rig.map(1, 1);
        rig.copy_in(1, 7, 1);
        rig.sink.take(1).pop().unwrap().1.unwrap();
        assert_eq!(rig.byte_at(1), Some(7));
        rig.finish(&fake);
    }
    // If the GPU is lost, other calls fail too.
    fake.lose_at("cuMemHostRegister", 1, UNKNOWN);
    let page_size = PageSize::new(Bytes::new(PAGE)).unwrap();
    let config = CudaDeviceConfig { device: CudaDeviceSelector::default(), page_size, frames: 2 };
    let device = Arc::new(config.open(Arc::new(Sink::default())).unwrap());
    let slab = HostSlab::new(HostSlabConfig { page_size, frames: 2, staging: 0, lock: true }, device.clone()).unwrap();
    slab.wait_locked();
    assert!(device.lost().unwrap().to_string().contains("UNKNOWN"));
    drop((slab, device));
    fake.take_findings();
}
