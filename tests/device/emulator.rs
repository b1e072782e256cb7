//! The emulated CUDA driver behaves as cudarc, unmodified, expects a driver to.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use super::emulator_judge::{launch, reader};
use control::{Fake, Reach};
use cuda_calls::*;
use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use outcore_testkit::harness::until;
use outcore_testkit::{cuda_calls, fake_cuda as control};

/// What cudarc's safe interface offers, with its own events, on two streams.
#[test]
fn safe_interface() {
    let fake = Fake::load();
    {
        let context = CudaContext::new(0).unwrap();
        assert_eq!(context.name().unwrap(), "Emulated CUDA device 0");
        let (first, second) = (context.new_stream().unwrap(), context.new_stream_with_priority(-1).unwrap());
        let expected: Vec<u32> = (0..1000).collect();
        let device = first.clone_htod(&expected).unwrap();
        let ready = first.record_event(None).unwrap();
        second.wait(&ready).unwrap();
        let copy = second.clone_dtod(&device).unwrap();
        assert_eq!(second.clone_dtoh(&copy).unwrap(), expected);
    }
    // cudarc copies plain slices, which are pageable.
    for finding in fake.take_findings() {
        assert!(finding.starts_with("pageable"), "{finding}");
    }
    fake.finish();
}

/// Bare work behind a host function ran when its turn came, with addresses that meant nothing.
#[test]
fn regression_bare_work_behind_other_work_does_nothing() {
    let fake = Fake::load();
    {
        let context = context();
        let stream = context.new_stream().unwrap();
        let kernel = reader(&fake, &context);
        fake.set_bare(true);
        let (begin, begun) = mpsc::channel::<()>();
        host_function(&stream, move || _ = begun.recv()).unwrap();
        // Nothing is at this address.
        launch(&stream, &kernel, 1, 16).unwrap();
        begin.send(()).unwrap();
        stream.synchronize().unwrap();
    }
    fake.finish();
}

#[test]
fn bytes_go_there_and_back_on_two_streams() {
    let fake = Fake::load();
    {
        let context = context();
        let (first, second) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let (source, back) = (Locked::filled(&context, 4096, 7), Locked::new(&context, 4096));
        let (a, b) = (allocate(4096), allocate(4096));
        let filled = event(&context);
        copy_in(&first, a, source.pointer(), 4096).unwrap();
        fill(&first, a + 100, 9, 50).unwrap();
        fill_words(&first, a + 200, 0x0102_0304, 2).unwrap();
        filled.record(&first).unwrap();
        second.wait(&filled).unwrap();
        copy_within(&second, b, a, 4096).unwrap();
        copy_out(&second, back.pointer(), b, 4096).unwrap();
        second.synchronize().unwrap();
        let mut expected = vec![7; 4096];
        expected[100..150].fill(9);
        expected[200..208].copy_from_slice(&[4, 3, 2, 1, 4, 3, 2, 1]);
        assert_eq!(back.bytes(), expected);
        free(a).unwrap();
        free(b).unwrap();
    }
    fake.finish();
}

#[test]
fn an_event_stands_for_the_last_record_before_the_question() {
    let fake = Fake::load();
    {
        let context = context();
        let stream = context.new_stream().unwrap();
        let event = event(&context);
        assert!(event.try_is_complete().unwrap(), "never recorded");
        event.record(&stream).unwrap();
        event.synchronize().unwrap();
        fake.hold_stream(stream.cu_stream(), true);
        assert!(event.try_is_complete().unwrap(), "the stream is held, but the event is behind it");
        event.record(&stream).unwrap();
        assert!(!event.try_is_complete().unwrap());
        // A wait uses the record that there is when it is called. `early` had none, so its later record does not hold
        // `other` up.
        let other = context.new_stream().unwrap();
        let early = context.new_event(None).unwrap();
        other.wait(&early).unwrap();
        early.record(&stream).unwrap();
        other.synchronize().unwrap();
        fake.hold_stream(stream.cu_stream(), false);
        event.synchronize().unwrap();
        assert!(event.try_is_complete().unwrap());
    }
    fake.finish();
}

#[test]
fn timed_events_measure_and_others_refuse() {
    let fake = Fake::load();
    {
        let context = context();
        let stream = context.new_stream().unwrap();
        let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let (start, end) = (stream.record_event(timed).unwrap(), stream.record_event(timed).unwrap());
        end.synchronize().unwrap();
        assert!(start.elapsed_ms(&end).unwrap() >= 0.0);
        let (start, end) = (stream.record_event(None).unwrap(), stream.record_event(None).unwrap());
        end.synchronize().unwrap();
        assert_eq!(start.elapsed_ms(&end).unwrap_err().0, CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    fake.finish();
}

#[test]
fn a_host_function_runs_in_its_place_on_the_stream() {
    let fake = Fake::load();
    {
        let context = context();
        let stream = context.new_stream().unwrap();
        let (send, receive) = mpsc::channel();
        fake.hold(true);
        for i in 0..3 {
            let send = send.clone();
            host_function(&stream, move || send.send(i).unwrap()).unwrap();
        }
        assert!(receive.try_recv().is_err());
        fake.hold(false);
        assert_eq!([receive.recv().unwrap(), receive.recv().unwrap(), receive.recv().unwrap()], [0, 1, 2]);
        stream.synchronize().unwrap();
    }
    fake.finish();
}

/// A frame keeps its bytes when it moves to another address; two addresses may show one frame.
#[test]
fn frames_move_between_addresses() {
    let fake = Fake::load();
    {
        let context = context();
        let stream = context.new_stream().unwrap();
        assert_eq!(granularity(), FRAME);
        let base = reserve(4).unwrap();
        let frame = create().unwrap();
        let at = |n: usize| base + (n * FRAME) as u64;
        map(at(0), frame).unwrap();
        map(at(2), frame).unwrap();
        fill(&stream, at(0), 5, FRAME).unwrap();
        let back = Locked::new(&context, 2);
        copy_out(&stream, back.pointer(), at(2) + 77, 1).unwrap();
        stream.synchronize().unwrap();
        unmap(at(0)).unwrap();
        unmap(at(2)).unwrap();
        map(at(3), frame).unwrap();
        // SAFETY: within the two bytes.
        copy_out(&stream, unsafe { back.pointer().add(1) }, at(3) + 1000, 1).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(back.bytes(), [5, 5]);
        unmap(at(3)).unwrap();
        release(frame).unwrap();
        unreserve(base, 4).unwrap();
        assert_eq!(fake.used_bytes(0), 0);
    }
    fake.finish();
}

#[test]
fn one_call_sets_access_for_a_run_of_frames_and_work_crosses_them() {
    let fake = Fake::load();
    {
        let context = context();
        let stream = context.new_stream().unwrap();
        let base = reserve(3).unwrap();
        let frames: Vec<u64> = (0..3).map(|_| create().unwrap()).collect();
        for (n, &frame) in frames.iter().enumerate() {
            map_only(base + (n * FRAME) as u64, frame).unwrap();
        }
        set_access(base, 3).unwrap();
        let len = 2 * FRAME + 2000;
        let (source, back) = (Locked::filled(&context, len, 3), Locked::new(&context, len));
        copy_in(&stream, base + 1000, source.pointer(), len).unwrap();
        copy_out(&stream, back.pointer(), base + 1000, len).unwrap();
        stream.synchronize().unwrap();
        assert!(back.bytes() == source.bytes());
        for (n, &frame) in frames.iter().enumerate() {
            unmap(base + (n * FRAME) as u64).unwrap();
            release(frame).unwrap();
        }
        unreserve(base, 3).unwrap();
    }
    fake.finish();
}

#[test]
fn the_devices_memory_is_as_large_as_was_said() {
    let fake = Fake::load();
    fake.set_device_bytes(2 * FRAME as u64);
    {
        let context = context();
        assert_eq!(context.total_mem().unwrap(), 2 * FRAME);
        let frames = [create().unwrap(), create().unwrap()];
        assert_eq!(context.mem_get_info().unwrap().0, 0);
        assert_eq!(create().unwrap_err(), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        frames.into_iter().for_each(|frame| release(frame).unwrap());
        release(create().unwrap()).unwrap();
    }
    fake.finish();
}

#[test]
fn registered_memory_is_page_locked() {
    let fake = Fake::load();
    {
        let context = context();
        let stream = context.new_stream().unwrap();
        let device = allocate(8192);
        let (source, back) = (vec![6; 8192], vec![0; 8192]);
        register(&source).unwrap();
        register(&back).unwrap();
        assert_eq!(register(&source[100..200]).unwrap_err(), CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        copy_in(&stream, device, source.as_ptr(), 8192).unwrap();
        copy_out(&stream, back.as_ptr().cast_mut(), device, 8192).unwrap();
        stream.synchronize().unwrap();
        // SAFETY: the device wrote here behind the compiler's back; it has ended.
        assert_eq!(unsafe { std::ptr::read_volatile(&raw const back[8191]) }, 6);
        unregister(&source).unwrap();
        unregister(&back).unwrap();
        free(device).unwrap();
    }
    fake.finish();
}

#[test]
fn a_batch_copies_each_way() {
    let fake = Fake::load();
    {
        let context = context();
        let stream = context.new_stream().unwrap();
        let (source, back) = (Locked::filled(&context, 4096, 1), Locked::new(&context, 4096));
        let (a, b) = (allocate(4096), allocate(4096));
        fill(&stream, b, 2, 4096).unwrap();
        let batch = [(a, source.pointer() as u64, 4096), (back.pointer() as u64, b, 4096)];
        copy_batch(&stream, &batch).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(back.bytes(), [2; 4096]);
        copy_batch(&stream, &[(back.pointer() as u64, a, 4096)]).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(back.bytes(), [1; 4096]);
        assert_eq!(copy_batch(&context.default_stream(), &batch).unwrap_err(), CUresult::CUDA_ERROR_INVALID_VALUE);
        free(a).unwrap();
        free(b).unwrap();
    }
    fake.finish();
}

/// What nvcc prints for `axpy(float a, const float* x, float* y, int n)`, without the body.
const AXPY: &str = ".version 9.0\n.target sm_90\n.address_size 64\n\n.visible .entry axpy(\n\t.param .f32 axpy_param_0,\n\
    \t.param .u64 .ptr .align 1 axpy_param_1, // x\n\t.param .u64 .ptr .align 1 axpy_param_2,\n\t.param .u32 axpy_param_3\n)\n{\n\tret;\n}\n";

fn register_axpy(fake: &Fake) {
    let reach = |launch: &control::Launch| {
        let (x, y, bytes) = (launch.parameter(1), launch.parameter(2), launch.parameter(3) * 4);
        vec![Reach::read(x, bytes), Reach::write(y, bytes)]
    };
    fake.register_kernel("axpy", reach, |launch| {
        let (a, n) = (f32::from_bits(launch.parameter(0) as u32), launch.parameter(3) as usize);
        let (x, y) = (launch.read::<f32>(launch.parameter(1), n), launch.write::<f32>(launch.parameter(2), n));
        y.iter_mut().zip(x).for_each(|(y, x)| *y += a * x);
    });
}

#[test]
fn a_kernel_runs_what_was_registered_under_its_name() {
    let fake = Fake::load();
    register_axpy(&fake);
    {
        let context = context();
        let stream = context.new_stream().unwrap();
        let module = context.load_module(Ptx::from_src(AXPY)).unwrap();
        let missing = module.load_function("axpby").unwrap_err();
        assert_eq!(missing.0, CUresult::CUDA_ERROR_NOT_FOUND);
        let function = module.load_function("axpy").unwrap();
        // The vectors span two frames: kernels see what is contiguous on the device as contiguous.
        let base = reserve(2).unwrap();
        let frames = [create().unwrap(), create().unwrap()];
        map(base, frames[0]).unwrap();
        map(base + FRAME as u64, frames[1]).unwrap();
        let n = FRAME / 4;
        let (x, y) = (base, base + FRAME as u64 / 2);
        fill_words(&stream, x, 2f32.to_bits(), n / 4).unwrap();
        fill_words(&stream, y, 1f32.to_bits(), n).unwrap();
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the arguments are the kernel's parameters; the vectors are mapped.
        unsafe { stream.launch_builder(&function).arg(&0.5f32).arg(&x).arg(&y).arg(&(n as u32 / 4)).launch(config) }
            .unwrap();
        let back = Locked::new(&context, n * 4);
        copy_out(&stream, back.pointer(), y, n * 4).unwrap();
        stream.synchronize().unwrap();
        let floats: &[f32] = bytemuck::cast_slice(back.bytes());
        assert_eq!((floats[0], floats[n / 4 - 1], floats[n / 4]), (2.0, 2.0, 1.0));
        for (n, frame) in frames.into_iter().enumerate() {
            unmap(base + (n * FRAME) as u64).unwrap();
            release(frame).unwrap();
        }
        unreserve(base, 2).unwrap();
    }
    fake.finish();
}

/// A captured graph is launched twice; between the launches another frame takes the address.
#[test]
fn each_launch_of_a_graph_uses_the_mappings_of_that_moment() {
    let fake = Fake::load();
    {
        let context = context();
        let stream = context.new_stream().unwrap();
        let side = context.new_stream().unwrap();
        let page = Mapped::new();
        let back = Locked::new(&context, FRAME);
        let (fork, join) = (event(&context), event(&context));
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        fork.record(&stream).unwrap();
        side.wait(&fork).unwrap();
        fill(&side, page.address, 8, FRAME / 2).unwrap();
        join.record(&side).unwrap();
        stream.wait(&join).unwrap();
        copy_out(&stream, back.pointer(), page.address, FRAME).unwrap();
        let graph = stream
            .end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
            .unwrap()
            .unwrap();
        assert_eq!(fake.calls("work"), 0, "capturing runs nothing");
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        assert_eq!((back.bytes()[0], back.bytes()[FRAME - 1]), (8, 0));
        let other = create().unwrap();
        unmap(page.address).unwrap();
        map(page.address, other).unwrap();
        fill(&stream, page.address, 3, FRAME).unwrap();
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        assert_eq!((back.bytes()[0], back.bytes()[FRAME - 1]), (8, 3));
        release(other).unwrap();
        page.give_back();
    }
    fake.finish();
}

/// Launches of kernels and of graphs wait for room as all else does (`cuda_queue` has the rest). Other streams go on.
#[test]
fn launches_of_kernels_and_graphs_wait_for_room_in_a_full_queue() {
    const DEPTH: usize = 4;
    let fake = Fake::load();
    fake.set_queue_depth(DEPTH as u64);
    {
        let context = context();
        let (full, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let kernel = reader(&fake, &context);
        let page = Mapped::new();
        full.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        fill(&full, page.address, 8, FRAME).unwrap();
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = full.end_capture(flags).unwrap().unwrap();
        for is_graph in [false, true] {
            let started = AtomicUsize::new(0);
            fake.hold_stream(full.cu_stream().cast::<u8>(), true);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    context.bind_to_thread().unwrap();
                    until("a launch that waits for room", || fake.waiting_for_room() == 1);
                    assert!(started.load(Ordering::SeqCst) <= DEPTH + 1, "{started:?}");
                    launch(&other, &kernel, page.address, 0).unwrap();
                    other.synchronize().unwrap();
                    fake.hold_stream(full.cu_stream().cast::<u8>(), false);
                });
                for _ in 0..3 * DEPTH {
                    match is_graph {
                        true => graph.launch().unwrap(),
                        false => launch(&full, &kernel, page.address, 8).unwrap(),
                    }
                    started.fetch_add(1, Ordering::SeqCst);
                }
            });
            full.synchronize().unwrap();
            assert_eq!(started.load(Ordering::SeqCst), 3 * DEPTH);
        }
        drop(graph);
        page.give_back();
    }
    fake.finish();
}

/// A stream may be destroyed with work on it; the context still waits for that work.
#[test]
fn a_destroyed_stream_finishes_its_work() {
    let fake = Fake::load();
    {
        let context = context();
        let stream = context.new_stream().unwrap();
        let page = Mapped::new();
        let back = Locked::new(&context, 1);
        fake.set_delay(2000, 7);
        fill(&stream, page.address, 4, FRAME).unwrap();
        copy_out(&stream, back.pointer(), page.address, 1).unwrap();
        drop(stream);
        context.synchronize().unwrap();
        assert_eq!(back.bytes(), [4]);
        page.give_back();
    }
    fake.finish();
}

#[test]
fn the_nth_call_fails_and_the_others_do_not() {
    let fake = Fake::load();
    {
        let context = context();
        let stream = context.new_stream().unwrap();
        fake.fail_nth("cuMemCreate", 2, CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32);
        let first = create().unwrap();
        assert_eq!(create().unwrap_err(), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let third = create().unwrap();
        assert_eq!((fake.calls("cuMemCreate"), fake.fired()), (3, 1));
        fake.fail_from("cuMemcpyBatchAsync_v2", 1, CUresult::CUDA_ERROR_NOT_SUPPORTED as u32);
        for _ in 0..2 {
            assert_eq!(copy_batch(&stream, &[]).unwrap_err(), CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        release(first).unwrap();
        release(third).unwrap();
    }
    fake.finish();
}

/// Run `n` fails its `n`th call, for each `n` until a run has fewer calls.
#[test]
fn any_call_can_fail() {
    let fake = Fake::load();
    let program = || -> Result {
        let context = CudaContext::new(0).map_err(|error| error.0)?;
        let stream = context.new_stream().map_err(|error| error.0)?;
        stream.synchronize().map_err(|error| error.0)
    };
    let mut failures = 0;
    for n in 1.. {
        assert!(n < 100, "the program makes few calls");
        fake.fail_nth("*", n, CUresult::CUDA_ERROR_SYSTEM_NOT_READY as u32);
        let before = fake.fired();
        let result = program();
        if fake.fired() == before {
            result.unwrap();
            break;
        }
        failures += 1;
        assert!(result.is_ok() || result == Err(CUresult::CUDA_ERROR_SYSTEM_NOT_READY), "{result:?}");
    }
    assert!(failures >= 6, "{failures}");
    // Objects that could not be destroyed are left over.
    fake.check_leaks();
    assert!(fake.take_findings().iter().all(|line| line.starts_with("leak")));
}

/// Work that fails on the device takes the context with it: everything after it fails, and host functions do not run.
#[test]
fn a_failure_on_the_device_is_for_good() {
    let fake = Fake::load();
    let context = context();
    let stream = context.new_stream().unwrap();
    let device = allocate(4096);
    let (send, receive) = mpsc::channel::<()>();
    fake.fail_nth("work", 1, CUresult::CUDA_ERROR_ECC_UNCORRECTABLE as u32);
    fake.hold(true);
    fill(&stream, device, 1, 4096).unwrap();
    host_function(&stream, move || send.send(()).unwrap()).unwrap();
    fake.hold(false);
    assert_eq!(stream.synchronize().unwrap_err().0, CUresult::CUDA_ERROR_ECC_UNCORRECTABLE);
    assert_eq!(context.new_stream().unwrap_err().0, CUresult::CUDA_ERROR_ECC_UNCORRECTABLE);
    assert!(receive.try_recv().is_err());
    fake.expect_clean();
}

#[test]
fn the_device_can_be_lost_while_the_host_waits() {
    let fake = Fake::load();
    let context = context();
    let stream = context.new_stream().unwrap();
    let event = event(&context);
    fake.hold(true);
    event.record(&stream).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| event.synchronize().unwrap_err().0);
        fake.lose_device(CUresult::CUDA_ERROR_UNKNOWN as u32);
        assert_eq!(waiting.join().unwrap(), CUresult::CUDA_ERROR_UNKNOWN);
    });
    assert_eq!(event.try_is_complete().unwrap_err().0, CUresult::CUDA_ERROR_UNKNOWN);
}

/// Work that was running when the device was lost went on after the program had been told. It used memory that the
/// program had freed since.
#[test]
fn regression_no_work_outlasts_the_news_of_a_lost_device() {
    let fake = Fake::load();
    let (begun, begins) = mpsc::channel();
    let ended = Arc::new(AtomicU64::new(0));
    let sum = ended.clone();
    fake.register_kernel(
        "axpy",
        |_| Vec::new(),
        move |_| {
            begun.send(()).unwrap();
            // Computes for a while.
            let found = (0..50_000_000u64).fold(1, |x, n| std::hint::black_box(x ^ n.wrapping_mul(x)));
            sum.store(found | 1, Ordering::SeqCst);
        },
    );
    let context = context();
    let stream = context.new_stream().unwrap();
    let function = context.load_module(Ptx::from_src(AXPY)).unwrap().load_function("axpy").unwrap();
    let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the arguments are the kernel's parameters; it touches no memory.
    unsafe { stream.launch_builder(&function).arg(&0.5f32).arg(&0u64).arg(&0u64).arg(&0u32).launch(config) }.unwrap();
    begins.recv().unwrap();
    fake.lose_device(CUresult::CUDA_ERROR_UNKNOWN as u32);
    assert_eq!(context.new_stream().unwrap_err().0, CUresult::CUDA_ERROR_UNKNOWN);
    assert_ne!(ended.load(Ordering::SeqCst), 0, "the kernel still runs");
    fake.take_findings();
}

#[test]
fn a_machine_may_have_no_device_or_several() {
    let fake = Fake::load();
    fake.set_devices(0);
    assert_eq!(CudaContext::new(0).unwrap_err().0, CUresult::CUDA_ERROR_NO_DEVICE);
    fake.set_devices(2);
    assert_eq!(CudaContext::device_count().unwrap(), 2);
    let (first, second) = (CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap());
    assert_ne!(first.uuid().unwrap().bytes, second.uuid().unwrap().bytes);
    assert_eq!(CudaContext::new(2).unwrap_err().0, CUresult::CUDA_ERROR_INVALID_DEVICE);
    fake.set_driver_version(12080);
    let mut version = 0;
    // SAFETY: the out-parameter is a local.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().unwrap();
    assert_eq!(version, 12080);
}

/// Copies of one direction share the link; only that it is used is checked here, not how fast it is.
#[test]
fn late_and_slow_work_gives_the_same_bytes() {
    let fake = Fake::load();
    fake.set_delay(200, 42);
    fake.set_link(1 << 30, 1 << 30);
    {
        let context = context();
        let streams: Vec<_> = (0..3).map(|_| context.new_stream().unwrap()).collect();
        let device = allocate(3 * 4096);
        let buffers: Vec<_> = (1..4).map(|byte| Locked::filled(&context, 4096, byte)).collect();
        let back = Locked::new(&context, 3 * 4096);
        for (n, (stream, buffer)) in streams.iter().zip(&buffers).enumerate() {
            copy_in(stream, device + n as u64 * 4096, buffer.pointer(), 4096).unwrap();
            let copied = stream.record_event(None).unwrap();
            streams[0].wait(&copied).unwrap();
        }
        copy_out(&streams[0], back.pointer(), device, 3 * 4096).unwrap();
        streams[0].synchronize().unwrap();
        for (n, part) in back.bytes().chunks(4096).enumerate() {
            assert!(part.iter().all(|&byte| usize::from(byte) == n + 1));
        }
        free(device).unwrap();
    }
    fake.finish();
}

/// Runs the test `child` in a process of its own.
fn child(part: &str, variables: &[(&str, &str)]) -> std::process::Output {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "emulator::child_process", "--ignored", "--nocapture"]).env("FAKE_CUDA_TEST_PART", part);
    command.envs(variables.iter().copied()).output().unwrap()
}

#[test]
#[ignore = "a part of other tests, which run it in a process of its own"]
fn child_process() {
    let fake = Fake::load();
    match std::env::var("FAKE_CUDA_TEST_PART").unwrap_or_default().as_str() {
        "touch" => {
            let _context = context();
            let page = Mapped::new();
            // SAFETY: none: the point is that this faults.
            let byte = unsafe { std::ptr::read_volatile(page.address as *const u8) };
            println!("read {byte}");
        }
        "leak" => {
            std::mem::forget(context().new_stream().unwrap());
            std::mem::forget(fake);
        }
        "environment" => {
            assert_eq!(CudaContext::device_count().unwrap_err().0, CUresult::CUDA_ERROR_SYSTEM_NOT_READY);
            let context = CudaContext::new(0).unwrap();
            assert_eq!(context.total_mem().unwrap(), 64 << 20);
        }
        "absent" => assert_eq!(CudaContext::new(0).unwrap_err().0, CUresult::CUDA_ERROR_NO_DEVICE),
        _ => {}
    }
}

#[test]
fn the_host_cannot_touch_device_memory() {
    use std::os::unix::process::ExitStatusExt;
    let output = child("touch", &[]);
    assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{output:?}");
}

#[test]
fn what_is_left_at_exit_is_printed() {
    let output = child("leak", &[]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("leak: stream 1 was not given back"), "{text}");
    assert!(text.contains("2 finding(s) at exit"), "{text}");
}

#[test]
fn variables_set_the_start() {
    let variables = [("FAKECUDA_MEM_MB", "64"), ("FAKECUDA_FAIL", "cuInit:1:802")];
    let output = child("environment", &variables);
    assert!(output.status.success(), "{output:?}");
    let output = child("absent", &[("FAKECUDA_NO_DEVICE", "1")]);
    assert!(output.status.success(), "{output:?}");
}
