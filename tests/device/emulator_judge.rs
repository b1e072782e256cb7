//! The emulated CUDA driver finds the mistake in a program, and finds nothing in the same program without the mistake.
//!
//! Each test is a pair. The wrong half is written so that the work happens to run in the order the program hoped for,
//! or does not run at all: what is found does not depend on timing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::Arc;

use control::{Fake, Reach};
use cuda_calls::*;
use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use outcore_testkit::{cuda_calls, fake_cuda as control};

/// Runs a program both ways. The wrong one must have one finding, of the kind; the right one none and no leak.
fn pair(kind: &str, program: impl Fn(&Fake, bool)) {
    for right in [false, true] {
        let fake = Fake::load();
        program(&fake, right);
        if right {
            fake.check_leaks();
            fake.expect_clean();
        } else {
            fake.run_dry();
            fake.take_only(kind);
        }
    }
}

fn two_streams(context: &Arc<CudaContext>) -> (Arc<CudaStream>, Arc<CudaStream>) {
    (context.new_stream().unwrap(), context.new_stream().unwrap())
}

/// A kernel that reads `len` bytes and does nothing.
pub(super) fn reader(fake: &Fake, context: &Arc<CudaContext>) -> CudaFunction {
    let reach = |launch: &control::Launch| vec![Reach::read(launch.parameter(0), launch.parameter(1))];
    fake.register_kernel("reader", reach, |_| {});
    let ptx = ".version 9.0\n.target sm_90\n.visible .entry reader(.param .u64 p, .param .u64 n) { ret; }";
    context.load_module(Ptx::from_src(ptx)).unwrap().load_function("reader").unwrap()
}

pub(super) fn launch(stream: &Arc<CudaStream>, function: &CudaFunction, address: u64, len: u64) -> Result {
    let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the arguments are the kernel's parameters.
    unsafe { stream.launch_builder(function).arg(&address).arg(&len).launch(config) }.map(drop).map_err(|error| error.0)
}

#[test]
fn use_without_waiting_for_the_fill() {
    pair("race", |fake, right| {
        let context = context();
        let (fills, compute) = two_streams(&context);
        let kernel = reader(fake, &context);
        let page = Mapped::new();
        let source = Locked::filled(&context, FRAME, 1);
        let filled = event(&context);
        copy_in(&fills, page.address, source.pointer(), FRAME).unwrap();
        filled.record(&fills).unwrap();
        // By luck the fill has ended; the program has no way to know.
        fake.run_dry();
        if right {
            compute.wait(&filled).unwrap();
        }
        launch(&compute, &kernel, page.address + 100, 50).unwrap();
        compute.synchronize().unwrap();
        fills.synchronize().unwrap();
        page.give_back();
    });
}

/// The event is recorded before the fill, so waiting for it orders nothing.
#[test]
fn event_recorded_too_early() {
    pair("race", |fake, right| {
        let context = context();
        let (fills, compute) = two_streams(&context);
        let kernel = reader(fake, &context);
        let page = Mapped::new();
        let filled = event(&context);
        if !right {
            filled.record(&fills).unwrap();
        }
        fill(&fills, page.address, 1, FRAME).unwrap();
        if right {
            filled.record(&fills).unwrap();
        }
        compute.wait(&filled).unwrap();
        launch(&compute, &kernel, page.address, 1).unwrap();
        compute.synchronize().unwrap();
        fills.synchronize().unwrap();
        page.give_back();
    });
}

/// A host that saw the event complete may submit without a wait.
#[test]
fn the_host_orders_by_what_it_saw() {
    pair("race", |fake, right| {
        let context = context();
        let (fills, compute) = two_streams(&context);
        let kernel = reader(fake, &context);
        let page = Mapped::new();
        fill(&fills, page.address, 1, FRAME).unwrap();
        let filled = fills.record_event(None).unwrap();
        fake.run_dry();
        if right {
            assert!(filled.try_is_complete().unwrap());
        }
        launch(&compute, &kernel, page.address, 1).unwrap();
        compute.synchronize().unwrap();
        fills.synchronize().unwrap();
        page.give_back();
    });
}

/// A frame with two addresses is one piece of memory: it is filled through one before its last use through the other.
#[test]
fn frame_filled_at_its_new_address_before_its_last_use() {
    pair("race", |fake, right| {
        let context = context();
        let (fills, compute) = two_streams(&context);
        let kernel = reader(fake, &context);
        let base = reserve(2).unwrap();
        let (old, new) = (base, base + FRAME as u64);
        let frame = create().unwrap();
        map(old, frame).unwrap();
        fill(&compute, old, 1, FRAME).unwrap();
        launch(&compute, &kernel, old, 10).unwrap();
        let last_use = compute.record_event(None).unwrap();
        map(new, frame).unwrap();
        if right {
            fills.wait(&last_use).unwrap();
        }
        fill(&fills, new, 2, FRAME).unwrap();
        compute.synchronize().unwrap();
        fills.synchronize().unwrap();
        unmap(old).unwrap();
        unmap(new).unwrap();
        release(frame).unwrap();
        unreserve(base, 2).unwrap();
    });
}

#[test]
fn frame_unmapped_before_its_last_use() {
    pair("in-flight", |fake, right| {
        let context = context();
        let compute = context.new_stream().unwrap();
        let kernel = reader(fake, &context);
        let page = Mapped::new();
        launch(&compute, &kernel, page.address, FRAME as u64).unwrap();
        let last_use = compute.record_event(None).unwrap();
        fake.run_dry();
        if right {
            last_use.synchronize().unwrap();
        }
        page.give_back();
        compute.synchronize().unwrap();
    });
}

/// The whole mistake: a frame is unmapped before its last use has ended, mapped at another page, and filled. Both the
/// unmapping and the fill are found.
#[test]
fn frame_moved_before_its_last_use() {
    for right in [false, true] {
        let fake = Fake::load();
        {
            let context = context();
            let (fills, compute) = two_streams(&context);
            let kernel = reader(&fake, &context);
            let base = reserve(2).unwrap();
            let (old, new) = (base, base + FRAME as u64);
            let frame = create().unwrap();
            map(old, frame).unwrap();
            launch(&compute, &kernel, old, 10).unwrap();
            let last_use = compute.record_event(None).unwrap();
            fake.run_dry();
            if right {
                last_use.synchronize().unwrap();
            }
            unmap(old).unwrap();
            map(new, frame).unwrap();
            fill(&fills, new, 2, FRAME).unwrap();
            fills.synchronize().unwrap();
            compute.synchronize().unwrap();
            unmap(new).unwrap();
            release(frame).unwrap();
            unreserve(base, 2).unwrap();
        }
        let found = fake.take_findings();
        let kinds: Vec<&str> = found.iter().filter_map(|line| line.split(':').next()).collect();
        assert_eq!(kinds, if right { vec![] } else { vec!["in-flight", "race"] }, "{found:#?}");
        assert_eq!(fake.check_leaks(), 0);
    }
}

/// As above, but the stream has really not reached the last use. There is a finding, and no crash.
#[test]
fn frame_unmapped_while_its_last_use_is_held_back() {
    let fake = Fake::load();
    let context = context();
    let compute = context.new_stream().unwrap();
    let page = Mapped::new();
    fake.hold(true);
    fill(&compute, page.address, 1, FRAME).unwrap();
    page.give_back();
    fake.hold(false);
    compute.synchronize().unwrap();
    fake.take_only("in-flight");
}

#[test]
fn page_locked_memory_freed_in_flight() {
    pair("in-flight", |fake, right| {
        let context = context();
        let stream = context.new_stream().unwrap();
        let page = Mapped::new();
        let source = Locked::filled(&context, FRAME, 1);
        fake.hold(!right);
        copy_in(&stream, page.address, source.pointer(), FRAME).unwrap();
        if right {
            stream.synchronize().unwrap();
        }
        drop(source);
        fake.hold(false);
        stream.synchronize().unwrap();
        page.give_back();
    });
}

#[test]
fn memory_unregistered_in_flight() {
    pair("in-flight", |fake, right| {
        let context = context();
        let stream = context.new_stream().unwrap();
        let page = Mapped::new();
        let source = vec![1; FRAME];
        register(&source).unwrap();
        copy_in(&stream, page.address, source.as_ptr(), FRAME).unwrap();
        fake.run_dry();
        if right {
            stream.synchronize().unwrap();
        }
        unregister(&source).unwrap();
        stream.synchronize().unwrap();
        page.give_back();
    });
}

#[test]
fn asynchronous_copy_of_pageable_memory() {
    pair("pageable", |_, right| {
        let context = context();
        let stream = context.new_stream().unwrap();
        let page = Mapped::new();
        let source = vec![1; 4096];
        if right {
            register(&source).unwrap();
        }
        copy_in(&stream, page.address, source.as_ptr(), source.len()).unwrap();
        stream.synchronize().unwrap();
        if right {
            unregister(&source).unwrap();
        }
        page.give_back();
    });
}

#[test]
fn copy_that_runs_over_the_end_of_page_locked_memory() {
    pair("pageable", |_, right| {
        let context = context();
        let stream = context.new_stream().unwrap();
        let page = Mapped::new();
        let source = vec![1; 8192];
        register(&source[..4096]).unwrap();
        let len = if right { 4096 } else { 4097 };
        assert_eq!(copy_in(&stream, page.address, source.as_ptr(), len).is_ok(), right);
        stream.synchronize().unwrap();
        unregister(&source[..4096]).unwrap();
        page.give_back();
    });
}

/// Two streams write to one staging buffer; the device memory differs.
#[test]
fn staging_buffer_reused_too_early() {
    pair("race", |fake, right| {
        let context = context();
        let (fills, write_backs) = two_streams(&context);
        let (a, b) = (Mapped::new(), Mapped::new());
        let staging = Locked::filled(&context, FRAME, 1);
        fill(&write_backs, b.address, 2, FRAME).unwrap();
        copy_in(&fills, a.address, staging.pointer(), FRAME).unwrap();
        fake.run_dry();
        if right {
            fills.synchronize().unwrap();
        }
        copy_out(&write_backs, staging.pointer(), b.address, FRAME).unwrap();
        fills.synchronize().unwrap();
        write_backs.synchronize().unwrap();
        a.give_back();
        b.give_back();
    });
}

/// Host code reads what an asynchronous copy writes; a host function on the stream is in order.
#[test]
fn host_reads_before_the_copy_has_ended() {
    pair("race", |fake, right| {
        let context = context();
        let stream = context.new_stream().unwrap();
        let page = Mapped::new();
        let back = Locked::new(&context, FRAME);
        copy_out(&stream, back.pointer(), page.address, FRAME).unwrap();
        fake.run_dry();
        if right {
            stream.synchronize().unwrap();
        }
        fake.host_access(back.pointer(), 10, false);
        stream.synchronize().unwrap();
        page.give_back();
    });
}

#[test]
fn host_function_runs_after_what_is_before_it() {
    let fake = Fake::load();
    {
        let context = context();
        let (first, second) = two_streams(&context);
        let page = Mapped::new();
        let (done, wait) = std::sync::mpsc::channel();
        fill(&first, page.address, 1, FRAME).unwrap();
        host_function(&first, move || done.send(()).unwrap()).unwrap();
        wait.recv().unwrap();
        // The function told the host, so the host may go on without an event.
        fill(&second, page.address, 2, FRAME).unwrap();
        second.synchronize().unwrap();
        page.give_back();
        first.synchronize().unwrap();
    }
    fake.check_leaks();
    fake.expect_clean();
}

#[test]
fn driver_call_in_a_host_function() {
    let fake = Fake::load();
    let context = context();
    let stream = context.new_stream().unwrap();
    let (send, receive) = std::sync::mpsc::channel();
    host_function(&stream, move || {
        let mut free = (0, 0);
        // SAFETY: the out-parameters are locals.
        send.send(unsafe { sys::cuMemGetInfo_v2(&raw mut free.0, &raw mut free.1) }).unwrap();
    })
    .unwrap();
    assert_eq!(receive.recv().unwrap(), CUresult::CUDA_ERROR_NOT_PERMITTED);
    stream.synchronize().unwrap();
    fake.take_only("misuse");
}

#[test]
fn access_where_nothing_is_mapped() {
    for (wrong, word) in [("reserved", "nothing is mapped"), ("no access", "no access was set"), ("freed", "freed")] {
        let fake = Fake::load();
        let context = context();
        let stream = context.new_stream().unwrap();
        let page = Mapped::new();
        let base = reserve(1).unwrap();
        let address = match wrong {
            "reserved" => base,
            "no access" => {
                map_only(base, page.handle).unwrap();
                base
            }
            _ => {
                let address = allocate(4096);
                free(address).unwrap();
                address
            }
        };
        assert_eq!(fill(&stream, address, 1, 16).unwrap_err(), CUresult::CUDA_ERROR_INVALID_VALUE);
        assert!(fake.take_only("address").contains(word));
        // A page that is mapped and accessible, up to its last byte and no further.
        fill(&stream, page.address + FRAME as u64 - 16, 1, 16).unwrap();
        fake.expect_clean();
        assert!(fill(&stream, page.address + FRAME as u64 - 16, 1, 17).is_err());
        fake.take_only("address");
        stream.synchronize().unwrap();
    }
}

/// A kernel that strays faults on the device; the context is lost with it.
#[test]
fn kernel_reads_where_nothing_is_mapped() {
    let fake = Fake::load();
    let context = context();
    let stream = context.new_stream().unwrap();
    let kernel = reader(&fake, &context);
    let page = Mapped::new();
    launch(&stream, &kernel, page.address, FRAME as u64).unwrap();
    stream.synchronize().unwrap();
    fake.expect_clean();
    launch(&stream, &kernel, page.address, FRAME as u64 + 1).unwrap();
    assert_eq!(stream.synchronize().unwrap_err().0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    fake.take_only("address");
}

#[test]
fn mapping_errors() {
    let fake = Fake::load();
    let context = context();
    let base = reserve(2).unwrap();
    let frame = create().unwrap();
    map(base, frame).unwrap();
    assert!(map_only(base, frame).is_err(), "mapped already");
    fake.take_only("address");
    assert!(map_only(base + 2 * FRAME as u64, frame).is_err(), "not reserved");
    fake.take_only("address");
    assert!(unreserve(base, 2).is_err(), "still mapped");
    fake.take_only("address");
    assert!(unmap(base + FRAME as u64).is_err(), "not mapped");
    fake.take_only("address");
    // A handle may be released while it is mapped; then it cannot be mapped again.
    release(frame).unwrap();
    fake.expect_clean();
    assert!(map_only(base + FRAME as u64, frame).is_err());
    fake.take_only("address");
    unmap(base).unwrap();
    unreserve(base, 2).unwrap();
    assert_eq!(fake.used_bytes(0), 0);
    drop(context);
    assert_eq!(fake.check_leaks(), 0);
}

#[test]
fn what_is_not_given_back() {
    let fake = Fake::load();
    let context = context();
    let stream = context.new_stream().unwrap();
    std::mem::forget(event(&context));
    drop(stream);
    let kept = context.clone();
    assert_eq!(fake.check_leaks(), 2);
    let found = fake.take_findings();
    assert!(found[0].contains("primary context") && found[1].contains("event"), "{found:?}");
    let page = Mapped::new();
    let locked = Locked::new(&context, 10);
    assert_eq!(fake.check_leaks(), 6, "context, event, reservation, mapping, physical memory, page-locked memory");
    fake.take_findings();
    drop(locked);
    page.give_back();
    assert_eq!(fake.check_leaks(), 2);
    fake.take_findings();
    drop(kept);
}

#[test]
fn call_without_a_context() {
    let fake = Fake::load();
    let context = context();
    let page = Mapped::new();
    let stream = context.new_stream().unwrap();
    std::thread::scope(|scope| {
        let code = scope.spawn(|| fill(&stream, page.address, 1, 1).unwrap_err()).join().unwrap();
        assert_eq!(code, CUresult::CUDA_ERROR_INVALID_CONTEXT);
        fake.take_only("context");
        scope.spawn(|| {
            context.bind_to_thread().unwrap();
            fill(&stream, page.address, 1, 1).unwrap();
        });
    });
    stream.synchronize().unwrap();
    page.give_back();
}

#[test]
fn stream_of_another_context() {
    let fake = Fake::load();
    fake.set_devices(2);
    let (first, second) = (CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap());
    let stream = first.new_stream().unwrap();
    second.bind_to_thread().unwrap();
    let event = event(&second);
    // SAFETY: handles that exist.
    let code = unsafe { sys::cuEventRecord(event.cu_event(), stream.cu_stream()) };
    assert_eq!(code, CUresult::CUDA_ERROR_INVALID_HANDLE);
    fake.take_only("context");
}

/// The copies of a batch are not ordered, so they must not touch.
#[test]
fn copies_of_a_batch_that_overlap() {
    pair("race", |_, right| {
        let context = context();
        let stream = context.new_stream().unwrap();
        let (page, source) = (Mapped::new(), Locked::new(&context, 8192));
        let from = source.pointer() as u64;
        let second = if right { page.address + 4096 } else { page.address + 4095 };
        copy_batch(&stream, &[(page.address, from, 4096), (second, from + 4096, 4096)]).unwrap();
        stream.synchronize().unwrap();
        page.give_back();
    });
}

/// Two branches of a graph are two streams to the judge, whatever order they run in.
#[test]
fn branches_of_a_graph_that_nothing_orders() {
    pair("race", |_, right| {
        let context = context();
        let (stream, side) = two_streams(&context);
        let page = Mapped::new();
        let (fork, join) = (event(&context), event(&context));
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        fork.record(&stream).unwrap();
        side.wait(&fork).unwrap();
        fill(&side, page.address, 1, 100).unwrap();
        join.record(&side).unwrap();
        if right {
            stream.wait(&join).unwrap();
        }
        fill(&stream, page.address + 50, 2, 100).unwrap();
        stream.wait(&join).unwrap();
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags).unwrap().unwrap();
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        drop(graph);
        page.give_back();
    });
}

#[test]
fn stream_ordered_memory_used_on_another_stream() {
    pair("race", |_, right| {
        let context = context();
        let (first, second) = two_streams(&context);
        let mut address = 0;
        // SAFETY: the out-parameter is a local.
        unsafe { sys::cuMemAllocAsync(&raw mut address, 4096, first.cu_stream()) }.result().unwrap();
        let made = first.record_event(None).unwrap();
        second.wait(&made).unwrap();
        fill(&second, address, 1, 4096).unwrap();
        let used = second.record_event(None).unwrap();
        if right {
            first.wait(&used).unwrap();
        }
        // SAFETY: allocated above, freed once.
        unsafe { sys::cuMemFreeAsync(address, first.cu_stream()) }.result().unwrap();
        first.synchronize().unwrap();
        second.synchronize().unwrap();
    });
}

/// While a stream is captured in the default mode, no thread may ask or wait, unless it has set its own mode to
/// relaxed.
#[test]
fn asking_while_a_stream_is_captured() {
    pair("capture", |_, right| {
        let context = context();
        let (stream, other) = two_streams(&context);
        let page = Mapped::new();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
        fill(&stream, page.address, 1, 100).unwrap();
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        if right {
            // SAFETY: a mode, and a place for the one before.
            unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result().unwrap();
        }
        // SAFETY: the stream exists.
        assert_eq!(unsafe { sys::cuStreamQuery(other.cu_stream()) }.result().is_ok(), right);
        if right {
            // SAFETY: as above.
            unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result().unwrap();
        }
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        assert_eq!(stream.end_capture(flags).is_ok(), right, "the capture is spoiled");
        page.give_back();
    });
}
