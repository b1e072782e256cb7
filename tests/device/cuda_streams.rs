//! The caller's kernels on streams beside the runtime's, over the emulated driver. A guard that ends behind a kernel
//! keeps its pages until the kernel has ended, and operations keep their order. No GPU takes part.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};

use control::{Fake, Launch, Reach};
use cuda_calls::{Locked, allocate, copy_out, free};
use cudarc::driver::sys::{self, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaFunction, CudaGraph, CudaStream, DriverError};
use cudarc::nvrtc::Ptx;
use harness::{Rng, cuda_builder as builder, fail_every_call, fail_every_call_with, until as wait_for, watched};
use models::synthetic;
use outcore::device::{Completion, Completions, Device, DeviceAddress, RawStream, StreamOp, Token};
use outcore::dlpack::DLDeviceType;
use outcore::{Bytes, ComputeStream, DType, ErrorKind, PageSize, Result, Runtime, StreamPin, Tensor};
use outcore_cuda::CudaDeviceConfig;
use outcore_pager::State;
use outcore_testkit::{cuda_calls, fake_cuda as control, harness, models};

const PAGE: u64 = 2 << 20;
/// An error that says nothing about the device (`CUDA_ERROR_ILLEGAL_STATE`).
const REFUSED: u32 = 401;

/// `copy(const void* from, void* to, u64 len)`, without the body.
const COPY: &str = ".version 9.0\n.target sm_90\n.address_size 64\n\n.visible .entry copy(\n\t.param .u64 copy_param_0,\n\
    \t.param .u64 copy_param_1,\n\t.param .u64 copy_param_2\n)\n{\n\tret;\n}\n";

fn register_copy(fake: &Fake) {
    let reach = |launch: &Launch| {
        let len = launch.parameter(2);
        vec![Reach::read(launch.parameter(0), len), Reach::write(launch.parameter(1), len)]
    };
    fake.register_kernel("copy", reach, |launch| {
        let len = launch.parameter(2) as usize;
        let from = launch.read::<u8>(launch.parameter(0), len).to_vec();
        launch.write::<u8>(launch.parameter(1), len).copy_from_slice(&from);
    });
}

/// A program beside the runtime, with a stream of its own.
struct Foreign {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    copy: CudaFunction,
}

impl Foreign {
    fn new(fake: &Fake) -> Self {
        register_copy(fake);
        let context = cuda_calls::context();
        let copy = context.load_module(Ptx::from_src(COPY)).unwrap().load_function("copy").unwrap();
        Self { stream: context.new_stream().unwrap(), context, copy }
    }

    fn adopt(&self, runtime: &Runtime) -> Result<ComputeStream> {
        // SAFETY: the tests drop what is returned before this.
        unsafe { runtime.adopt_stream(RawStream::new(self.stream.cu_stream().cast())) }
    }

    /// Launches the kernel on any stream.
    fn launch(&self, stream: RawStream, from: DeviceAddress, to: u64, len: u64) {
        self.launch_at(stream, from.get(), to, len);
    }

    fn launch_at(&self, stream: RawStream, from: u64, to: u64, len: u64) {
        self.try_launch(stream, from, to, len).unwrap();
    }

    /// If a call fails, nothing is launched.
    fn try_launch(&self, stream: RawStream, from: u64, to: u64, len: u64) -> std::result::Result<(), DriverError> {
        let mut parameters = [&raw const from, &raw const to, &raw const len].map(|p| p.cast_mut().cast());
        self.context.bind_to_thread()?;
        // SAFETY: the parameters are the kernel's; the driver has read them when it returns.
        unsafe {
            cudarc::driver::result::launch_kernel(
                self.copy.cu_function(),
                (1, 1, 1),
                (32, 1, 1),
                0,
                stream.as_ptr().cast(),
                &mut parameters,
            )
        }
    }

    fn begin_capture(&self) {
        self.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
    }

    fn end_capture(&self) -> Option<CudaGraph> {
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        self.stream.end_capture(flags).unwrap()
    }

    /// What is at a device address, once everything on the stream has ended.
    fn read(&self, address: u64, len: u64) -> Vec<u8> {
        let back = Locked::new(&self.context, len as usize);
        copy_out(&self.stream, back.pointer(), address, len as usize).unwrap();
        self.stream.synchronize().unwrap();
        back.bytes().to_vec()
    }
}

fn bytes_of(n: u64) -> Vec<u8> {
    (0..PAGE).map(|at| (at * 31 / 251 + n * 7) as u8).collect()
}

/// Read-write tensors of one page each, with different bytes.
fn pages(runtime: &Runtime, count: u64) -> Vec<Tensor> {
    let tensor = |n| {
        let tensor = runtime.alloc(DType::U8, &[PAGE]).unwrap();
        runtime.pin(&tensor).write().on_device().wait().unwrap().copy_in(0, 0, &bytes_of(n)).unwrap();
        tensor
    };
    (0..count).map(tensor).collect()
}

/// Whether the future would have to be waited for.
fn is_pending(future: std::pin::Pin<&mut impl Future>) -> bool {
    future.poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

#[test]
fn a_guard_ends_behind_the_kernel_that_uses_it() {
    let Some(fake) = Fake::load_or_skip("a_guard_ends_behind_the_kernel_that_uses_it") else { return };
    {
        let foreign = Foreign::new(&fake);
        let runtime = builder(2, 1).open().unwrap();
        let tensors = pages(&runtime, 4);
        let stream = foreign.adopt(&runtime).unwrap();
        let result = allocate(PAGE as usize);
        for round in 0..4 {
            let (first, others) =
                (&tensors[round..=round], [tensors[(round + 1) % 4].clone(), tensors[(round + 2) % 4].clone()]);
            let guard = runtime.pin(first).on_device().wait().unwrap();
            let bytes = guard.device_bytes(0).unwrap();
            assert_eq!((bytes.address.get(), bytes.len), (first[0].address(), Bytes::new(PAGE)));
            fake.hold_stream(foreign.stream.cu_stream(), true);
            foreign.launch(stream.raw().unwrap(), bytes.address, result, PAGE);
            guard.unpin_after(&stream).unwrap();
            // A request for both frames waits. The other frame serves all other tensors in turn.
            assert_eq!(runtime.evict(&first[0]), 0, "the kernel has not run yet");
            {
                let mut both = pin!(runtime.pin(&others).on_device());
                assert!(is_pending(both.as_mut()));
            }
            for other in tensors.iter().filter(|tensor| tensor.address() != first[0].address()) {
                let mut byte = [0; 5];
                runtime.pin(other).on_device().wait().unwrap().copy_out(0, 77, &mut byte).unwrap();
            }
            let both = runtime.pin(&others).on_device();
            fake.hold_stream(foreign.stream.cu_stream(), false);
            drop(both.wait().unwrap());
            assert!(foreign.read(result, PAGE) == bytes_of(round as u64), "round {round}");
        }
        free(result).unwrap();
        drop((stream, tensors));
        runtime.close().unwrap();
    }
    fake.finish();
}

/// Shows that the test above can fail: the judge finds a guard that ends too early.
#[test]
fn a_guard_that_ends_too_early_is_found() {
    let Some(fake) = Fake::load_or_skip("a_guard_that_ends_too_early_is_found") else { return };
    {
        let foreign = Foreign::new(&fake);
        let runtime = builder(2, 1).open().unwrap();
        let tensors = pages(&runtime, 3);
        let stream = foreign.adopt(&runtime).unwrap();
        let result = allocate(PAGE as usize);
        let guard = runtime.pin(&tensors[..1]).on_device().wait().unwrap();
        fake.hold_stream(foreign.stream.cu_stream(), true);
        foreign.launch(stream.raw().unwrap(), guard.device_bytes(0).unwrap().address, result, PAGE);
        drop(guard);
        drop(runtime.pin(&tensors[1..]).on_device().wait().unwrap());
        fake.hold_stream(foreign.stream.cu_stream(), false);
        let findings = fake.take_findings();
        assert!(findings.iter().any(|finding| finding.starts_with("in-flight: cuMemUnmap")), "{findings:#?}");
        foreign.stream.synchronize().unwrap();
        free(result).unwrap();
        drop((stream, tensors));
        runtime.close().unwrap();
        // There may be more findings, because the judge follows the frame to its next page.
        fake.take_findings();
    }
    fake.finish();
}

#[test]
fn what_a_kernel_writes_is_written_back_after_it() {
    let Some(fake) = Fake::load_or_skip("what_a_kernel_writes_is_written_back_after_it") else { return };
    fake.set_delay(1500, 11);
    {
        let foreign = Foreign::new(&fake);
        let runtime = builder(2, 0).open().unwrap();
        let tensors = pages(&runtime, 3);
        let (adopted, made) = (foreign.adopt(&runtime).unwrap(), runtime.compute_stream().unwrap());
        for (n, stream) in [&adopted, &made, &adopted].into_iter().enumerate() {
            let (from, to) = (&tensors[n..=n], [tensors[(n + 1) % 3].clone()]);
            let (read, written) =
                (runtime.pin(from).on_device().wait().unwrap(), runtime.pin(&to).write().on_device().wait().unwrap());
            let (source, target) = (read.device_bytes(0).unwrap(), written.device_bytes(0).unwrap());
            foreign.launch(stream.raw().unwrap(), source.address, target.address.get(), PAGE);
            read.unpin_after(stream).unwrap();
            written.unpin_after(stream).unwrap();
            // Nobody waits for the kernel here; the next guard of a page does.
        }
        for tensor in &tensors {
            let mut bytes = vec![0; PAGE as usize];
            runtime.pin(tensor).on_device().wait().unwrap().copy_out(0, 0, &mut bytes).unwrap();
            assert!(bytes == bytes_of(0));
        }
        drop((adopted, made, tensors));
        runtime.close().unwrap();
    }
    fake.finish();
}

#[test]
fn closing_waits_for_guards_that_end_behind_kernels() {
    let Some(fake) = Fake::load_or_skip("closing_waits_for_guards_that_end_behind_kernels") else { return };
    {
        let foreign = Foreign::new(&fake);
        let result = allocate(PAGE as usize);
        for last_owner in [false, true] {
            let runtime = builder(2, 0).open().unwrap();
            let tensors = pages(&runtime, 2);
            let stream = foreign.adopt(&runtime).unwrap();
            let guard = runtime.pin(&tensors).on_device().wait().unwrap();
            fake.hold_stream(foreign.stream.cu_stream(), true);
            foreign.launch(stream.raw().unwrap(), guard.device_bytes(1).unwrap().address, result, PAGE);
            guard.unpin_after(&stream).unwrap();
            if last_owner {
                // Only the guard that waits for the kernel keeps the runtime alive.
                drop((stream, tensors, runtime));
                fake.hold_stream(foreign.stream.cu_stream(), false);
            } else {
                std::thread::scope(|scope| {
                    let closing = scope.spawn(|| runtime.close());
                    fake.hold_stream(foreign.stream.cu_stream(), false);
                    closing.join().unwrap().unwrap();
                });
                drop((stream, tensors));
            }
            assert!(foreign.read(result, PAGE) == bytes_of(1));
        }
        free(result).unwrap();
    }
    fake.expect_clean();
    // The last owner was dropped on a thread of the device, so the runtime closes on another thread.
    wait_for("what the runtime made to be given back", || {
        let left = fake.check_leaks();
        fake.take_findings();
        left == 0
    });
    fake.finish();
}

#[test]
fn a_kernel_that_faults_is_the_cause_of_every_later_error() {
    let Some(fake) = Fake::load_or_skip("a_kernel_that_faults_is_the_cause_of_every_later_error") else { return };
    {
        let foreign = Foreign::new(&fake);
        let runtime = builder(2, 0).open().unwrap();
        let tensors = pages(&runtime, 3);
        let stream = foreign.adopt(&runtime).unwrap();
        let guard = runtime.pin(&tensors[..1]).on_device().wait().unwrap();
        let beyond = guard.device_bytes(0).unwrap().address.offset(1 << 30);
        fake.hold_stream(foreign.stream.cu_stream(), true);
        foreign.launch(stream.raw().unwrap(), beyond, tensors[0].address(), 16);
        guard.unpin_after(&stream).unwrap();
        fake.hold_stream(foreign.stream.cu_stream(), false);
        let error = stream.synchronize().unwrap_err();
        assert!(error.to_string().contains("ILLEGAL_ADDRESS"), "{error}");
        let error = runtime.pin(&tensors[1..]).on_device().wait().map(drop).unwrap_err();
        assert!(error.to_string().contains("ILLEGAL_ADDRESS"), "{error}");
        drop((stream, tensors));
        let error = runtime.close().unwrap_err();
        assert!(error.to_string().contains("ILLEGAL_ADDRESS"), "{error}");
    }
    fake.take_findings();
}

#[test]
fn streams_that_cannot_be_used_are_refused_and_the_guard_comes_back() {
    let Some(fake) = Fake::load_or_skip("streams_that_cannot_be_used_are_refused_and_the_guard_comes_back") else {
        return;
    };
    {
        let foreign = Foreign::new(&fake);
        let (runtime, other) = (builder(2, 0).open().unwrap(), builder(2, 0).open().unwrap());
        let tensors = pages(&runtime, 1);
        let stream = foreign.adopt(&runtime).unwrap();
        let theirs = other.compute_stream().unwrap();
        let guard = runtime.pin(&tensors).on_device().wait().unwrap();
        let refused = guard.unpin_after(&theirs).unwrap_err();
        assert_eq!(refused.error.kind(), ErrorKind::InvalidArgument);
        assert!(refused.error.advice().is_some() && refused.to_string().contains("different runtimes"), "{refused}");
        assert_eq!(runtime.evict(&tensors[0]), 0, "still pinned");
        foreign.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
        let refused = refused.guard.unpin_after(&stream).unwrap_err();
        assert!(
            refused.error.kind() == ErrorKind::InvalidArgument && refused.to_string().contains("captured"),
            "{refused}"
        );
        assert_eq!(stream.synchronize().unwrap_err().kind(), ErrorKind::InvalidArgument);
        let graph =
            foreign.stream.end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
        drop(graph.unwrap());
        refused.guard.unpin_after(&stream).unwrap();
        stream.synchronize().unwrap();

        // SAFETY: the per-thread default stream always exists.
        let refused = unsafe { runtime.adopt_stream(RawStream::new(std::ptr::without_provenance_mut(2))) }.unwrap_err();
        assert!(refused.kind() == ErrorKind::InvalidArgument && refused.advice().is_some(), "{refused}");
        fake.set_devices(2);
        let elsewhere = CudaContext::new(1).unwrap();
        let on_another = elsewhere.new_stream().unwrap();
        // SAFETY: the stream lives until the end of the block.
        let refused = unsafe { runtime.adopt_stream(RawStream::new(on_another.cu_stream().cast())) }.unwrap_err();
        assert!(refused.kind() == ErrorKind::InvalidArgument && refused.to_string().contains("context"), "{refused}");
        let findings = fake.take_findings();
        assert!(findings.iter().all(|finding| finding.starts_with("context")), "{findings:#?}");

        let host = Runtime::builder().device_budget(Bytes::mib(4)).open().unwrap();
        assert_eq!(foreign.adopt(&host).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(host.compute_stream().unwrap().raw().unwrap_err().kind(), ErrorKind::Unsupported);
        let guard = runtime.pin(&tensors).on_device().wait().unwrap();
        runtime.clone().close().unwrap();
        let refused = guard.unpin_after(&stream).unwrap_err();
        assert_eq!(refused.error.kind(), ErrorKind::Closed);
        assert_eq!(runtime.compute_stream().unwrap_err().kind(), ErrorKind::Closed);
        drop((refused, stream, theirs, tensors));
        host.close().unwrap();
        other.close().unwrap();
    }
    fake.finish();
}

#[test]
fn streams_are_used_again_and_adopted_ones_stay_their_owners() {
    let Some(fake) = Fake::load_or_skip("streams_are_used_again_and_adopted_ones_stay_their_owners") else { return };
    {
        let foreign = Foreign::new(&fake);
        let runtime = builder(2, 0).open().unwrap();
        let made = runtime.compute_stream().unwrap();
        let handle = made.raw().unwrap();
        assert_ne!(runtime.compute_stream().unwrap().raw().unwrap(), handle, "it is in use");
        made.synchronize().unwrap();
        drop(made);
        let before = fake.calls("cuStreamCreateWithPriority");
        for _ in 0..100 {
            runtime.compute_stream().unwrap().synchronize().unwrap();
        }
        assert_eq!(fake.calls("cuStreamCreateWithPriority"), before);
        for _ in 0..100 {
            let stream = foreign.adopt(&runtime).unwrap();
            assert_eq!(stream.raw().unwrap().as_ptr(), foreign.stream.cu_stream().cast());
            stream.synchronize().unwrap();
        }
        let destroyed = fake.calls("cuStreamDestroy");
        runtime.close().unwrap();
        assert_eq!(fake.calls("cuStreamSynchronize"), fake.calls("cuStreamDestroy") - destroyed, "only its own");
        foreign.stream.synchronize().unwrap();
    }
    fake.finish();
}

#[test]
fn whatever_call_fails_no_page_goes_from_under_a_stream() {
    if Fake::load_or_skip("whatever_call_fails_no_page_goes_from_under_a_stream").is_none() {
        return;
    }
    kernels_read_while_calls_fail(|guard, stream| Ok(guard.unpin_after(stream)?));
}

#[test]
fn whatever_call_fails_no_page_goes_from_under_a_dlpack_consumer() {
    if Fake::load_or_skip("whatever_call_fails_no_page_goes_from_under_a_dlpack_consumer").is_none() {
        return;
    }
    // A view that is dropped calls its own deleter.
    kernels_read_while_calls_fail(|guard, stream| guard.into_dlpack(0, Some(stream)).map(drop));
}

/// Kernels read pinned pages, `end` ends the pin behind them, and the pages are evicted at once. The judge knows what
/// each kernel reads. It counts a kernel as ended only after somebody has waited for it or asked about it.
fn kernels_read_while_calls_fail(
    end: impl Fn(outcore::DevicePin, &ComputeStream) -> Result<()> + Send + Sync + 'static,
) {
    let file = synthetic(&[3 << 20, 1 << 20]);
    let (runs, failed) = fail_every_call_with(
        |fake| (Foreign::new(fake), allocate(PAGE as usize)),
        move |(foreign, result)| {
            let runtime = builder(2, 0).open()?;
            let used = (|| {
                let model = runtime.open_model(&file.path)?;
                let tensors = [model.tensor("t0")?, model.tensor("t1")?];
                let stream = runtime.compute_stream()?;
                let raw = stream.raw()?;
                for at in [0, 1, 0] {
                    let guard = runtime.pin(&tensors[at..=at]).on_device().wait()?;
                    stream.call(|| ());
                    // A kernel that is not launched reads nothing, so the error does not matter.
                    let _ = foreign.try_launch(raw, tensors[at].address(), *result, 1 << 20);
                    end(guard, &stream)?;
                    runtime.evict(&tensors[at]);
                }
                stream.synchronize()
            })();
            let closed = runtime.close();
            used.and(closed)
        },
    );
    assert!(runs > 20 && failed > 6, "{runs} runs, of which {failed} failed");
}

/// When a driver call failed while a pin was being ended, the pin ended at once, and its pages were evicted while the
/// kernel still read them.
#[test]
fn regression_a_call_that_fails_does_not_end_a_pin_before_its_kernel() {
    let name = "regression_a_call_that_fails_does_not_end_a_pin_before_its_kernel";
    let Some(fake) = Fake::load_or_skip(name) else { return };
    type End = fn(outcore::DevicePin, &ComputeStream) -> Result<()>;
    let ends: [End; 2] =
        [|guard, stream| Ok(guard.unpin_after(stream)?), |guard, stream| guard.into_dlpack(0, Some(stream)).map(drop)];
    for end in ends {
        for (call, count) in
            [("cuCtxPushCurrent", 1), ("cuCtxPushCurrent", 2), ("cuStreamIsCapturing", 1), ("cuEventRecord", 1)]
        {
            let foreign = Foreign::new(&fake);
            let runtime = builder(1, 0).open().unwrap();
            let tensors = pages(&runtime, 2);
            let stream = foreign.adopt(&runtime).unwrap();
            let result = allocate(PAGE as usize);
            let guard = runtime.pin(&tensors[..1]).on_device().wait().unwrap();
            fake.hold_stream(foreign.stream.cu_stream(), true);
            foreign.launch(stream.raw().unwrap(), guard.device_bytes(0).unwrap().address, result, PAGE);
            let fired = fake.fired();
            (1..=count).for_each(|n| fake.fail_nth(call, n, REFUSED));
            end(guard, &stream).unwrap();
            assert_eq!(fake.fired() - fired, count, "{call}");
            assert_eq!(runtime.evict(&tensors[0]), 0, "{call}: the kernel has not run");
            let mut next = Box::pin(runtime.pin(&tensors[1..]).on_device());
            assert!(is_pending(next.as_mut()), "{call}");
            fake.hold_stream(foreign.stream.cu_stream(), false);
            drop(wait_for_future(next).unwrap());
            assert!(foreign.read(result, PAGE) == bytes_of(0), "{call}");
            free(result).unwrap();
            drop((stream, tensors));
            runtime.close().unwrap();
            fake.expect_clean();
        }
    }
    fake.finish();
}

/// `?` made an error of the refusal. This dropped the guard in it, and the guard's pages were evicted while a kernel
/// used them.
#[test]
fn regression_a_refused_guard_that_becomes_an_error_keeps_its_pages() {
    let Some(fake) = Fake::load_or_skip("regression_a_refused_guard_that_becomes_an_error_keeps_its_pages") else {
        return;
    };
    {
        let foreign = Foreign::new(&fake);
        let runtime = builder(2, 0).open().unwrap();
        let tensors = pages(&runtime, 2);
        let stream = foreign.adopt(&runtime).unwrap();
        let result = allocate(PAGE as usize);
        let read = runtime.pin(&tensors[..1]).on_device().wait().unwrap();
        let written = runtime.pin(&tensors[1..]).write().on_device().wait().unwrap();
        fake.hold_stream(foreign.stream.cu_stream(), true);
        foreign.launch(stream.raw().unwrap(), read.device_bytes(0).unwrap().address, result, PAGE);
        foreign.begin_capture();
        let errors: [outcore::Error; 2] =
            [read.unpin_after(&stream).unwrap_err().into(), written.unpin_after(&stream).unwrap_err().into()];
        assert!(errors.iter().all(|error| error.kind() == ErrorKind::InvalidArgument), "{errors:?}");
        assert!(is_pending(pin!(runtime.pin(&tensors[..1]).write().on_device()).as_mut()), "it is still read");
        assert!(is_pending(pin!(runtime.pin(&tensors[1..]).on_device()).as_mut()), "it is still written");
        drop(foreign.end_capture());
        fake.hold_stream(foreign.stream.cu_stream(), false);
        stream.synchronize().unwrap();
        assert_eq!(runtime.evict(&tensors[0]) + runtime.evict(&tensors[1]), 0, "pinned for good");
        // In a closed runtime no frame goes to another page, so there the guard ends.
        let other = builder(1, 0).open().unwrap();
        let theirs = pages(&other, 1);
        let of_theirs = other.compute_stream().unwrap();
        let guard = other.pin(&theirs).on_device().wait().unwrap();
        other.clone().close().unwrap();
        let error: outcore::Error = guard.unpin_after(&of_theirs).unwrap_err().into();
        assert_eq!(error.kind(), ErrorKind::Closed);
        assert_eq!(other.observe().snapshot(&theirs[0]).pages[0].device.pins, 0);
        free(result).unwrap();
        drop((stream, tensors, of_theirs, theirs, other));
        runtime.close().unwrap();
        fake.expect_clean();
        assert!(fake.check_leaks() > 0, "with what is pinned for good the runtime stays");
    }
    fake.take_findings();
}

/// A captured closure ran, and was freed, at each launch of the graph. The event behind it made the device count as
/// lost.
#[test]
fn regression_a_closure_is_no_part_of_a_graph() {
    let Some(fake) = Fake::load_or_skip("regression_a_closure_is_no_part_of_a_graph") else { return };
    {
        let foreign = Foreign::new(&fake);
        let runtime = builder(2, 0).open().unwrap();
        let tensors = pages(&runtime, 1);
        let (stream, made) = (foreign.adopt(&runtime).unwrap(), runtime.compute_stream().unwrap());
        // `made` is the runtime's own stream. A caller that has its handle can capture it.
        let raw = made.raw().unwrap();
        let result = allocate(PAGE as usize);
        let ran = Arc::new(AtomicBool::new(false));
        let run = || {
            let ran = Arc::clone(&ran);
            move || ran.store(true, Ordering::Release)
        };
        let guard = runtime.pin(&tensors).on_device().wait().unwrap();
        foreign.begin_capture();
        foreign.launch(stream.raw().unwrap(), guard.device_bytes(0).unwrap().address, result, PAGE);
        stream.call(run());
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives as long as `made`.
        unsafe { cudarc::driver::result::stream::begin_capture(raw.as_ptr().cast(), mode) }.unwrap();
        made.call(run());
        // SAFETY: as above; the graph is destroyed below.
        let empty = unsafe { cudarc::driver::result::stream::end_capture(raw.as_ptr().cast()) }.unwrap();
        // SAFETY: it was made above, and nothing was made of it.
        unsafe { cudarc::driver::result::graph::destroy(empty) }.unwrap();
        let graph = foreign.end_capture().unwrap();
        for _ in 0..2 {
            graph.launch().unwrap();
        }
        for refused in [&stream, &made] {
            let error = refused.synchronize().unwrap_err();
            assert!(error.kind() == ErrorKind::InvalidArgument && error.advice().is_some(), "{error}");
            assert!(error.to_string().contains("captured"), "{error}");
        }
        assert!(foreign.read(result, PAGE) == bytes_of(0));
        assert!(!ran.load(Ordering::Acquire) && Arc::strong_count(&ran) == 1, "what was refused is gone");
        // The device goes on, and so do the streams.
        guard.unpin_after(&stream).unwrap();
        let again = foreign.adopt(&runtime).unwrap();
        again.call(run());
        again.synchronize().unwrap();
        assert!(ran.load(Ordering::Acquire));
        free(result).unwrap();
        drop((graph, stream, made, again, tensors));
        runtime.close().unwrap();
    }
    fake.finish();
}

/// As above, but the capture begins after the device has asked whether the stream is captured.
#[test]
fn regression_a_capture_that_begins_under_a_submission_does_no_harm() {
    let name = "regression_a_capture_that_begins_under_a_submission_does_no_harm";
    if Fake::load_or_skip(name).is_none() {
        return;
    }
    watched(name, || {
        let fake = Fake::load();
        for call in ["cuLaunchHostFunc", "cuEventRecord"] {
            let foreign = Foreign::new(&fake);
            let runtime = builder(2, 0).open().unwrap();
            let tensors = pages(&runtime, 2);
            let stream = foreign.adopt(&runtime).unwrap();
            let runs = Arc::new(AtomicU32::new(0));
            let guard = runtime.pin(&tensors[..1]).on_device().wait().unwrap();
            let before = fake.calls(call);
            fake.hold_calls(call, true);
            std::thread::scope(|scope| {
                let submitted = scope.spawn(|| {
                    let runs = Arc::clone(&runs);
                    stream.call(move || _ = runs.fetch_add(1, Ordering::Relaxed));
                });
                wait_for("the call", || fake.calls(call) > before);
                foreign.begin_capture();
                fake.hold_calls(call, false);
                submitted.join().unwrap();
            });
            let graph = foreign.end_capture();
            // What was submitted has an end, whether it ran or not.
            let outcome = stream.synchronize();
            let captured = call == "cuLaunchHostFunc";
            assert_eq!(outcome.is_err(), captured, "{outcome:?}");
            for _ in 0..2 {
                graph.iter().for_each(|graph| graph.launch().unwrap());
            }
            foreign.stream.synchronize().unwrap();
            assert_eq!(runs.load(Ordering::Relaxed), u32::from(!captured));
            guard.unpin_after(&stream).unwrap();
            drop(runtime.pin(&tensors).on_device().wait().unwrap());
            drop((graph, stream, tensors));
            runtime.close().unwrap();
            drop(foreign);
            fake.expect_clean();
        }
        fake.finish();
    });
}

/// The legacy default stream waits for streams that are not made non-blocking. While one of them is captured, anything
/// on the default stream would spoil that capture, and is refused.
#[test]
fn regression_the_default_stream_is_left_alone_while_a_stream_it_waits_for_is_captured() {
    let name = "regression_the_default_stream_is_left_alone_while_a_stream_it_waits_for_is_captured";
    if Fake::load_or_skip(name).is_none() {
        return;
    }
    watched(name, || {
        let fake = Fake::load();
        let foreign = Foreign::new(&fake);
        let runtime = builder(2, 2).open().unwrap();
        let tensors = pages(&runtime, 2);
        // SAFETY: the default stream is always there.
        let default = unsafe { runtime.adopt_stream(RawStream::new(std::ptr::null_mut())) }.unwrap();
        let result = allocate(PAGE as usize);
        let mut blocking = std::ptr::null_mut();
        foreign.context.bind_to_thread().unwrap();
        // SAFETY: a place for the result; the stream is destroyed below.
        unsafe { sys::cuStreamCreate(&raw mut blocking, 0) }.result().unwrap();
        let guard = runtime.pin(&tensors[..1]).on_device().wait().unwrap();
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream was made above.
        unsafe { cudarc::driver::result::stream::begin_capture(blocking, mode) }.unwrap();
        let refused = guard.unpin_after(&default).unwrap_err();
        assert_eq!(refused.error.kind(), ErrorKind::InvalidArgument);
        assert!(default.synchronize().is_err());
        let address = refused.guard.device_bytes(0).unwrap().address;
        foreign.launch(RawStream::new(blocking.cast()), address, result, PAGE);
        // SAFETY: as above; the graph is destroyed, and the stream after it.
        unsafe {
            let graph = cudarc::driver::result::stream::end_capture(blocking).unwrap();
            cudarc::driver::result::graph::destroy(graph).unwrap();
            cudarc::driver::result::stream::destroy(blocking).unwrap();
        }
        // Then it serves like any other, also for copies.
        refused.guard.unpin_after(&default).unwrap();
        let guard = runtime.pin(&tensors[1..]).on(&default).wait().unwrap();
        foreign.launch(RawStream::new(std::ptr::null_mut()), guard.device_bytes(0).unwrap().address, result, PAGE);
        drop(guard);
        let again = runtime.pin(&tensors[..1]).on_device().wait().unwrap();
        drop(again);
        default.synchronize().unwrap();
        assert!(foreign.read(result, PAGE).len() as u64 == PAGE);
        free(result).unwrap();
        drop((default, tensors));
        runtime.close().unwrap();
        drop(foreign);
        fake.finish();
    });
}

/// A wait for the whole context spoils a capture of any of its streams. The end of a mark whose event was captured is
/// found in another way, and only when the capture has ended.
#[test]
fn regression_a_capture_between_a_mark_and_its_event_stays_valid() {
    let name = "regression_a_capture_between_a_mark_and_its_event_stays_valid";
    if Fake::load_or_skip(name).is_none() {
        return;
    }
    watched(name, || {
        let fake = Fake::load();
        for forgotten in [false, true] {
            let foreign = Foreign::new(&fake);
            let runtime = builder(2, 2).open().unwrap();
            let tensors = pages(&runtime, 1);
            let stream = foreign.adopt(&runtime).unwrap();
            let result = allocate(PAGE as usize);
            let guard = runtime.pin(&tensors).on_device().wait().unwrap();
            let address = guard.device_bytes(0).unwrap().address;
            let before = fake.calls("cuEventRecord");
            fake.hold_calls("cuEventRecord", true);
            std::thread::scope(|scope| {
                let ends = scope.spawn(|| guard.unpin_after(&stream).unwrap());
                wait_for("the call", || fake.calls("cuEventRecord") > before);
                foreign.begin_capture();
                fake.hold_calls("cuEventRecord", false);
                ends.join().unwrap();
            });
            // The reaper asks again and again whether the capture has ended.
            let asked = fake.calls("cuStreamIsCapturing");
            wait_for("the reaper", || fake.calls("cuStreamIsCapturing") > asked + 3);
            foreign.launch(stream.raw().unwrap(), address, result, PAGE);
            let graph = foreign.end_capture().expect("a graph with the kernel");
            if forgotten {
                drop(stream);
            } else {
                wait_for("the end of the pin", || tensors[0].pins() == 0);
                drop(stream);
            }
            graph.launch().unwrap();
            foreign.stream.synchronize().unwrap();
            assert!(foreign.read(result, PAGE) == bytes_of(0));
            free(result).unwrap();
            drop((graph, tensors));
            runtime.close().unwrap();
        }
        fake.finish();
    });
}

fn pin_copy(runtime: &Runtime, tensor: &Tensor, bytes: &[u8]) {
    runtime.pin(tensor).write().on_device().wait().unwrap().copy_in(0, 0, bytes).unwrap();
}

/// Whether any page of the tensor's segment has a valid frame.
fn is_resident(runtime: &Runtime, tensor: &Tensor) -> bool {
    runtime.observe().snapshot(tensor).pages.iter().any(|page| page.device.is_resident())
}

#[test]
fn a_captured_graph_stays_valid_after_evict_and_refill() {
    let Some(fake) = Fake::load_or_skip("a_captured_graph_stays_valid_after_evict_and_refill") else { return };
    fake.set_delay(300, 5);
    let file = synthetic(&[5 << 20, 3 << 20]);
    {
        let foreign = Foreign::new(&fake);
        let runtime = builder(7, 2).open().unwrap();
        let model = runtime.open_model(&file.path).unwrap();
        let weights = [model.tensor("t0").unwrap()];
        let at = model.header().tensor("t0").unwrap().offset as usize;
        let expected = &file.bytes[at..at + (5 << 20)];
        let output = [runtime.alloc(DType::U8, &[5 << 20]).unwrap()];
        let stream = foreign.adopt(&runtime).unwrap();

        let (read, written) = (
            runtime.pin(&weights).on_device().wait().unwrap(),
            runtime.pin(&output).write().on_device().wait().unwrap(),
        );
        let (from, to) = (read.device_bytes(0).unwrap(), written.device_bytes(0).unwrap());
        // This capture mode forbids the most. The runtime goes on meanwhile.
        foreign.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
        foreign.launch(stream.raw().unwrap(), from.address, to.address.get(), from.len.get() / 2);
        let elsewhere = [model.tensor("t1").unwrap().rows((2 << 20)..(2 << 20) + 100).unwrap()];
        drop(runtime.pin(&elsewhere).on_device().wait().unwrap());
        let half = from.len.get() / 2;
        foreign.launch(
            stream.raw().unwrap(),
            from.address.offset(half),
            to.address.get() + half,
            from.len.get() - half,
        );
        let graph = foreign
            .stream
            .end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
            .unwrap()
            .unwrap();
        drop((read, written));

        let others = pages(&runtime, 7);
        for round in 0..3 {
            // Evicts everything: other pages take all frames, in a different order each round.
            let away: Vec<Tensor> = (0..7).map(|n| others[(n * 5 + round) % 7].clone()).collect();
            drop(runtime.pin(&away).on_device().wait().unwrap());
            assert!(!is_resident(&runtime, &weights[0]) && !is_resident(&runtime, &output[0]));
            pin_copy(&runtime, &output[0], &vec![round as u8; 5 << 20]);

            let (read, written) = (
                runtime.pin(&weights).on_device().wait().unwrap(),
                runtime.pin(&output).write().on_device().wait().unwrap(),
            );
            assert_eq!((read.device_bytes(0), written.device_bytes(0)), (Some(from), Some(to)), "one address for life");
            graph.launch().unwrap();
            read.unpin_after(&stream).unwrap();
            written.unpin_after(&stream).unwrap();
            let mut bytes = vec![0; 5 << 20];
            runtime.pin(&output).on_device().wait().unwrap().copy_out(0, 0, &mut bytes).unwrap();
            assert!(bytes == expected, "round {round}");
        }
        fake.expect_clean();

        // Without pins the pages are not mapped when the graph runs, and the driver reports that.
        drop(runtime.pin(&others).on_device().wait().unwrap());
        graph.launch().unwrap();
        let error = stream.synchronize().unwrap_err();
        assert!(error.to_string().contains("ILLEGAL_ADDRESS"), "{error}");
        let findings = fake.take_findings();
        assert!(!findings.is_empty() && findings.iter().all(|finding| finding.starts_with("address")), "{findings:#?}");
        drop((stream, output, weights, elsewhere, model, others));
        runtime.close().unwrap_err();
    }
    fake.take_findings();
}

#[test]
fn a_dlpack_consumer_reads_on_its_own_stream() {
    let Some(fake) = Fake::load_or_skip("a_dlpack_consumer_reads_on_its_own_stream") else { return };
    {
        let foreign = Foreign::new(&fake);
        let runtime = builder(2, 1).open().unwrap();
        let tensors = pages(&runtime, 3);
        let stream = foreign.adopt(&runtime).unwrap();
        let result = allocate(PAGE as usize);
        let rows = [tensors[1].reshape(&[4, PAGE / 4]).unwrap().rows(1..3).unwrap()];
        let view = runtime.pin(&rows).on_device().wait().unwrap().into_dlpack(0, Some(&stream)).unwrap();
        let tensor = *view.tensor();
        assert_eq!((tensor.device.device_type, tensor.device.device_id), (DLDeviceType::kDLCUDA, 0));
        assert_eq!((tensor.ndim, tensor.data as u64), (2, rows[0].address()));
        // The consumer has only the structure.
        let managed = view.into_raw();
        fake.hold_stream(foreign.stream.cu_stream(), true);
        let raw = RawStream::new(foreign.stream.cu_stream().cast());
        foreign.launch_at(raw, tensor.data as u64, result, PAGE / 2);
        // SAFETY: a consumer gives back what it was given, once.
        unsafe { managed.as_ref().deleter.unwrap()(managed.as_ptr()) };
        assert_eq!(runtime.evict(&tensors[1]), 0, "its kernel has not run");
        let others = [tensors[0].clone(), tensors[2].clone()];
        let both = runtime.pin(&others).on_device();
        fake.hold_stream(foreign.stream.cu_stream(), false);
        drop(both.wait().unwrap());
        assert!(foreign.read(result, PAGE / 2) == bytes_of(1)[PAGE as usize / 4..][..PAGE as usize / 2]);
        free(result).unwrap();
        drop((stream, rows, others, tensors));
        runtime.close().unwrap();
    }
    fake.finish();
}

#[test]
fn kernels_on_many_streams_under_pressure_see_the_right_bytes() {
    let Some(fake) = Fake::load_or_skip("kernels_on_many_streams_under_pressure_see_the_right_bytes") else { return };
    for (seed, frames, host) in [(1, 3, 0), (2, 4, 2), (3, 5, 12)] {
        fake.set_delay(800, seed);
        let foreign = Foreign::new(&fake);
        let runtime = builder(frames, host).open().unwrap();
        let tensors = pages(&runtime, 8);
        let legacy = RawStream::new(std::ptr::null_mut());
        let streams = [
            foreign.adopt(&runtime).unwrap(),
            runtime.compute_stream().unwrap(),
            runtime.compute_stream().unwrap(),
            // SAFETY: the default stream always exists.
            unsafe { runtime.adopt_stream(legacy) }.unwrap(),
        ];
        // For each tensor, the tensor whose initial bytes it holds now.
        let mut holds: Vec<u64> = (0..8).collect();
        let mut random = Rng::new(seed);
        for _ in 0..120 {
            let (from, to) = (random.below(8) as usize, random.below(8) as usize);
            if from == to {
                runtime.prefetch(&tensors[from]);
                continue;
            }
            let stream = &streams[random.below(4) as usize];
            let read = runtime.pin(&tensors[from..=from]).on_device().wait().unwrap();
            let written = runtime.pin(&tensors[to..=to]).write().on_device().wait().unwrap();
            let (source, target) = (read.device_bytes(0).unwrap(), written.device_bytes(0).unwrap());
            foreign.launch(stream.raw().unwrap(), source.address, target.address.get(), PAGE);
            read.unpin_after(stream).unwrap();
            written.unpin_after(stream).unwrap();
            holds[to] = holds[from];
        }
        for (tensor, holds) in tensors.iter().zip(holds) {
            let mut bytes = vec![0; PAGE as usize];
            runtime.pin(tensor).on_device().wait().unwrap().copy_out(0, 0, &mut bytes).unwrap();
            assert!(bytes == bytes_of(holds), "seed {seed}");
        }
        assert!(runtime.stats().pager.evictions > 20, "{:?}", runtime.stats().pager);
        drop((streams, tensors));
        runtime.close().unwrap();
    }
    fake.finish();
}

/// Where a page's bytes are when a stream wants them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    OnDisk,
    InHostMemory,
    /// Read-write, and not written yet.
    Nowhere,
}

/// A tensor of one page, which is not resident, and the bytes it must read as.
fn absent(runtime: &Runtime, before: Before, file: &models::Synthetic) -> (Tensor, Vec<u8>) {
    if before == Before::Nowhere {
        return (runtime.alloc(DType::U8, &[PAGE]).unwrap(), vec![0; PAGE as usize]);
    }
    let model = runtime.open_model(&file.path).unwrap();
    let header = model.header().tensor("t0").unwrap();
    // The file's second page is the first that has only bytes of `t0`.
    let start = PAGE - header.offset;
    let tensor = model.tensor("t0").unwrap().rows(start..start + PAGE).unwrap();
    let bytes = file.bytes[PAGE as usize..2 * PAGE as usize].to_vec();
    if before == Before::InHostMemory {
        drop(runtime.pin(&tensor).on_device().wait().unwrap());
        runtime.evict(&tensor);
        let page = || runtime.observe().snapshot(&tensor).pages[1];
        wait_for("the page to leave for host memory", || page().device.state == State::Empty);
        assert!(page().host);
    }
    (tensor, bytes)
}

/// The state and the pins of the segment's second page, which is the one that `absent` gives, or of its only page.
fn state_of(runtime: &Runtime, tensor: &Tensor) -> (State, u32) {
    let pages = runtime.observe().snapshot(tensor).pages;
    let page = pages[pages.len().min(2) - 1];
    (page.device.state, page.device.pins)
}

#[test]
fn a_pin_for_a_stream_is_there_while_every_stream_is_held_up() {
    let Some(fake) = Fake::load_or_skip("a_pin_for_a_stream_is_there_while_every_stream_is_held_up") else { return };
    let file = synthetic(&[3 * PAGE as usize]);
    for before in [Before::OnDisk, Before::InHostMemory, Before::Nowhere] {
        let foreign = Foreign::new(&fake);
        let runtime = builder(2, 2).open().unwrap();
        let (tensor, expected) = absent(&runtime, before, &file);
        let one = std::slice::from_ref(&tensor);
        let stream = foreign.adopt(&runtime).unwrap();
        let result = allocate(PAGE as usize);
        fake.hold(true);
        // From here on no stream copies anything.
        let pin = runtime.pin(one).on(&stream).wait().unwrap();
        assert_eq!(state_of(&runtime, &tensor), (State::Filling, 1), "{before:?}");
        // A pin for the host waits for the bytes. A pin for a stream does not.
        let mut bytes_there = Box::pin(runtime.pin(one).on_device());
        assert!(is_pending(bytes_there.as_mut()));
        let another = runtime.compute_stream().unwrap();
        drop(runtime.pin(one).on(&another).wait().unwrap());
        let bytes = pin.device_bytes(0).unwrap();
        foreign.launch(stream.raw().unwrap(), bytes.address, result, bytes.len.get());
        pin.unpin().unwrap();
        assert_eq!(state_of(&runtime, &tensor), (State::Filling, 2), "{before:?}: nothing has ended");
        assert_eq!(runtime.evict(&tensor), 0);
        fake.hold(false);
        assert!(foreign.read(result, PAGE) == expected, "{before:?}");
        stream.synchronize().unwrap();
        another.synchronize().unwrap();
        let Poll::Ready(guard) = bytes_there.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
            panic!("the fill has ended");
        };
        assert_eq!(state_of(&runtime, &tensor).1, 1, "{before:?}: the streams' pins have ended");
        drop(guard);
        assert_eq!(runtime.evict(&tensor), 1);
        free(result).unwrap();
        drop(bytes_there);
        drop((stream, another, tensor));
        runtime.close().unwrap();
        drop(foreign);
        fake.finish();
    }
}

/// The pin is dropped without `unpin`. The page stays for the fill and for the kernel.
#[test]
fn a_pin_that_is_dropped_before_its_bytes_are_there_keeps_the_page() {
    let Some(fake) = Fake::load_or_skip("a_pin_that_is_dropped_before_its_bytes_are_there_keeps_the_page") else {
        return;
    };
    let file = synthetic(&[7 * PAGE as usize]);
    {
        let foreign = Foreign::new(&fake);
        let runtime = builder(2, 0).open().unwrap();
        let model = runtime.open_model(&file.path).unwrap();
        let start = PAGE - model.header().tensor("t0").unwrap().offset;
        let page = |n: u64| model.tensor("t0").unwrap().rows(start + n * PAGE..start + (n + 1) * PAGE).unwrap();
        let tensors: Vec<Tensor> = (0..6).map(page).collect();
        let stream = foreign.adopt(&runtime).unwrap();
        let result = allocate(PAGE as usize);
        for round in 0..6 {
            let (first, others) =
                (&tensors[round..=round], [tensors[(round + 1) % 6].clone(), tensors[(round + 2) % 6].clone()]);
            fake.hold(true);
            let pin = runtime.pin(first).on(&stream).wait().unwrap();
            foreign.launch(stream.raw().unwrap(), pin.device_bytes(0).unwrap().address, result, PAGE);
            drop(pin);
            // Both frames are wanted, and one is still the page's.
            let mut both = pin!(runtime.pin(&others).on(&stream));
            assert!(is_pending(both.as_mut()));
            fake.hold(false);
            let both = wait_for_future(both);
            let at = (round + 1) * PAGE as usize;
            assert!(foreign.read(result, PAGE) == file.bytes[at..at + PAGE as usize], "round {round}");
            drop(both.unwrap());
        }
        free(result).unwrap();
        drop((stream, tensors, model));
        runtime.close().unwrap();
    }
    fake.finish();
}

fn wait_for_future<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

#[test]
fn a_fill_that_fails_behind_a_pin_costs_the_device_and_nobody_waits_for_ever() {
    if Fake::load_or_skip("a_fill_that_fails_behind_a_pin_costs_the_device_and_nobody_waits_for_ever").is_none() {
        return;
    }
    const LAUNCH_FAILED: u32 = 719;
    watched("a_fill_that_fails_behind_a_pin_costs_the_device_and_nobody_waits_for_ever", || {
        let file = synthetic(&[3 * PAGE as usize]);
        for ended in [false, true] {
            let fake = Fake::load();
            {
                let foreign = Foreign::new(&fake);
                let runtime = builder(2, 0).open().unwrap();
                let (tensor, _) = absent(&runtime, Before::OnDisk, &file);
                let one = std::slice::from_ref(&tensor);
                let stream = foreign.adopt(&runtime).unwrap();
                let result = allocate(PAGE as usize);
                fake.hold(true);
                let pin = runtime.pin(one).on(&stream).wait().unwrap();
                foreign.launch(stream.raw().unwrap(), pin.device_bytes(0).unwrap().address, result, PAGE);
                let (mut kept, mut waiting) = (Some(pin), Box::pin(runtime.pin(one).on_device()));
                assert!(is_pending(waiting.as_mut()));
                if ended {
                    kept.take().unwrap().unpin().unwrap();
                }
                fake.fail_nth("work", 1, LAUNCH_FAILED);
                fake.hold(false);
                let failed = |error: outcore::Error| {
                    assert!(error.to_string().contains("LAUNCH_FAILED"), "{error}");
                };
                failed(stream.synchronize().unwrap_err());
                failed(wait_for_future(waiting).map(drop).unwrap_err());
                // As long as the page is lent it is not filled again.
                failed(runtime.pin(one).on_device().wait().map(drop).unwrap_err());
                failed(runtime.pin(one).on(&stream).wait().map(drop).unwrap_err());
                drop(kept);
                wait_for("the frame to be given back", || state_of(&runtime, &tensor) == (State::Empty, 0));
                drop((stream, tensor));
                failed(runtime.close().unwrap_err());
            }
            fake.take_findings();
        }
    });
}

#[test]
fn a_pin_for_a_stream_that_is_captured_is_refused() {
    let Some(fake) = Fake::load_or_skip("a_pin_for_a_stream_that_is_captured_is_refused") else { return };
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let file = synthetic(&[3 * PAGE as usize]);
    {
        let foreign = Foreign::new(&fake);
        let runtime = builder(3, 0).open().unwrap();
        let (tensor, _) = absent(&runtime, Before::OnDisk, &file);
        let one = std::slice::from_ref(&tensor);
        let stream = foreign.adopt(&runtime).unwrap();
        let is_captured = |error: &outcore::Error| {
            error.kind() == ErrorKind::InvalidArgument && error.to_string().contains("captured")
        };

        let early = runtime.pin(one).on(&stream).wait().unwrap();
        fake.hold(true);
        // Two pages: a lone one would be mapped on this thread.
        let late = [runtime.alloc(DType::U8, &[2 * PAGE]).unwrap()];
        let mut request = Box::pin(runtime.pin(&late).on(&stream));
        // Whether it waits for the mapping or not, the capture begins before the stream waits for the fill.
        fake.hold_calls("cuMemMap", true);
        assert!(is_pending(request.as_mut()));
        foreign.stream.begin_capture(mode).unwrap();
        fake.hold_calls("cuMemMap", false);
        assert!(is_captured(&wait_for_future(request).map(drop).unwrap_err()));
        assert!(is_captured(&runtime.pin(one).on(&stream).wait().map(drop).unwrap_err()));
        assert!(is_captured(&early.copy_out(0, 0, &mut [0]).unwrap_err()));
        let refused = early.unpin().unwrap_err();
        assert!(is_captured(&refused.error));
        assert_eq!(state_of(&runtime, &tensor).1, 1, "the guard has come back");
        drop(foreign.stream.end_capture(flags).unwrap());
        fake.hold(false);
        refused.guard.unpin().unwrap();
        stream.synchronize().unwrap();
        assert_eq!(state_of(&runtime, &tensor).1, 0);
        let unpinned = || runtime.observe().snapshot(&late[0]).pages.iter().all(|page| page.device.pins == 0);
        assert!(unpinned(), "of the request that failed nothing is left");
        drop((stream, tensor, late));
        runtime.close().unwrap();
    }
    fake.finish();
    {
        // The pin is dropped while its stream is captured. Nobody knows how long the graph will use the pages, so they
        // stay pinned.
        let foreign = Foreign::new(&fake);
        let runtime = builder(2, 0).open().unwrap();
        let (tensor, _) = absent(&runtime, Before::OnDisk, &file);
        let stream = foreign.adopt(&runtime).unwrap();
        let pin = runtime.pin(&tensor).on(&stream).wait().unwrap();
        foreign.stream.begin_capture(mode).unwrap();
        drop(pin);
        drop(foreign.stream.end_capture(flags).unwrap());
        stream.synchronize().unwrap();
        assert_eq!(state_of(&runtime, &tensor).1, 1, "pinned for good");
        drop((stream, tensor));
        runtime.close().unwrap();
        fake.expect_clean();
        assert!(fake.check_leaks() > 0);
    }
    fake.take_findings();
}

#[test]
fn kernels_on_many_streams_run_ahead_of_the_copies_and_see_the_right_bytes() {
    let Some(fake) = Fake::load_or_skip("kernels_on_many_streams_run_ahead_of_the_copies_and_see_the_right_bytes")
    else {
        return;
    };
    let file = synthetic(&[9 * PAGE as usize]);
    for (seed, frames, host) in [(1, 3, 0), (2, 4, 2), (3, 6, 12)] {
        fake.set_delay(800, seed);
        let foreign = Foreign::new(&fake);
        let runtime = builder(frames, host).open().unwrap();
        let model = runtime.open_model(&file.path).unwrap();
        let start = PAGE - model.header().tensor("t0").unwrap().offset;
        let page = |n: u64| model.tensor("t0").unwrap().rows(start + n * PAGE..start + (n + 1) * PAGE).unwrap();
        let weights: Vec<Tensor> = (0..8).map(page).collect();
        let memory = pages(&runtime, 4);
        let streams =
            [foreign.adopt(&runtime).unwrap(), runtime.compute_stream().unwrap(), runtime.compute_stream().unwrap()];
        // What each page of read-write memory holds now: a page of the model, or its own bytes.
        let mut holds: Vec<Vec<u8>> = (0..4).map(bytes_of).collect();
        let mut random = Rng::new(seed);
        for _ in 0..150 {
            let (stream, to) = (&streams[random.below(3) as usize], random.below(4) as usize);
            let from = random.below(12) as usize;
            let (source, bytes) = match from.checked_sub(8) {
                Some(other) if other == to => {
                    runtime.prefetch(random.pick(&weights));
                    continue;
                }
                Some(other) => (&memory[other..=other], holds[other].clone()),
                None => (&weights[from..=from], file.bytes[(from + 1) * PAGE as usize..][..PAGE as usize].to_vec()),
            };
            let written = runtime.pin(&memory[to..=to]).write().on_device().wait().unwrap();
            let read = runtime.pin(source).on(stream).wait().unwrap();
            let (at, target) = (read.device_bytes(0).unwrap().address, written.device_bytes(0).unwrap().address);
            foreign.launch(stream.raw().unwrap(), at, target.get(), PAGE);
            if random.one_in(2) {
                read.unpin().unwrap();
            } else {
                drop(read);
            }
            written.unpin_after(stream).unwrap();
            holds[to] = bytes;
        }
        for (tensor, holds) in memory.iter().zip(holds) {
            let mut bytes = vec![0; PAGE as usize];
            let pin = runtime.pin(tensor).on(&streams[1]).wait().unwrap();
            pin.copy_out(0, 0, &mut bytes).unwrap();
            assert!(bytes == holds, "seed {seed}");
        }
        assert!(runtime.stats().pager.evictions > 20, "{:?}", runtime.stats().pager);
        drop((streams, weights, memory, model));
        runtime.close().unwrap();
        fake.expect_clean();
    }
    fake.finish();
}

/// Shows that the tests above can fail: the judge finds a kernel on another stream, which does not wait for the fill.
#[test]
fn a_kernel_on_another_stream_than_the_pins_is_found() {
    let Some(fake) = Fake::load_or_skip("a_kernel_on_another_stream_than_the_pins_is_found") else { return };
    let file = synthetic(&[3 * PAGE as usize]);
    {
        let foreign = Foreign::new(&fake);
        let runtime = builder(2, 0).open().unwrap();
        let (tensor, _) = absent(&runtime, Before::OnDisk, &file);
        let (stream, wrong) = (runtime.compute_stream().unwrap(), runtime.compute_stream().unwrap());
        let result = allocate(PAGE as usize);
        fake.hold(true);
        let pin: StreamPin = runtime.pin(&tensor).on(&stream).wait().unwrap();
        foreign.launch(wrong.raw().unwrap(), pin.device_bytes(0).unwrap().address, result, PAGE);
        let findings = fake.take_findings();
        assert!(findings.iter().any(|finding| finding.starts_with("race")), "{findings:#?}");
        fake.hold(false);
        wrong.synchronize().unwrap();
        drop(pin);
        free(result).unwrap();
        drop((stream, wrong, tensor));
        runtime.close().unwrap();
    }
    fake.take_findings();
}

#[test]
fn whatever_call_fails_a_stream_gets_the_files_bytes_or_an_error() {
    if Fake::load_or_skip("whatever_call_fails_a_stream_gets_the_files_bytes_or_an_error").is_none() {
        return;
    }
    let file = synthetic(&[3 << 20, 1 << 20]);
    let (runs, failed) = fail_every_call(move || {
        let runtime = builder(2, 1).open()?;
        let used = (|| {
            let model = runtime.open_model(&file.path)?;
            let tensors = [model.tensor("t0")?, model.tensor("t1")?];
            let stream = runtime.compute_stream()?;
            for at in [0, 1, 0] {
                let pin = runtime.pin(&tensors[at..=at]).on(&stream).wait()?;
                let mut bytes = vec![0; 1 << 20];
                pin.copy_out(0, 0, &mut bytes)?;
                let offset = model.header().tensor(&format!("t{at}"))?.offset as usize;
                assert!(bytes == file.bytes[offset..offset + (1 << 20)], "wrong bytes");
                stream.call(|| ());
                pin.unpin()?;
            }
            stream.synchronize()
        })();
        let closed = runtime.close();
        used.and(closed)
    });
    assert!(runs > 20 && failed > 6, "{runs} runs, of which {failed} failed");
}

/// Guards, tensors and streams that a closure dropped called the driver from its own thread, which CUDA forbids.
#[test]
fn regression_what_a_closure_drops_or_asks_for_makes_no_call_there() {
    if Fake::load_or_skip("regression_what_a_closure_drops_or_asks_for_makes_no_call_there").is_none() {
        return;
    }
    watched("regression_what_a_closure_drops_or_asks_for_makes_no_call_there", || {
        let fake = Fake::load();
        {
            let foreign = Foreign::new(&fake);
            let runtime = builder(3, 0).open().unwrap();
            let tensors = pages(&runtime, 3);
            let stream = foreign.adopt(&runtime).unwrap();
            let [first, second, third] = [0, 1, 2].map(|at| runtime.pin(&tensors[at..=at]).on_device().wait().unwrap());
            let on_stream = runtime.pin(&tensors[..1]).on(&stream).wait().unwrap();
            // Not written yet: its page has only to be mapped and zeroed once there is a frame.
            let wanted = [runtime.alloc(DType::U8, &[PAGE]).unwrap()];
            let mut waiting = Box::pin(runtime.pin(&wanted).on_device());
            assert!(is_pending(waiting.as_mut()));
            let gone = runtime.alloc(DType::U8, &[PAGE]).unwrap();
            let another = runtime.compute_stream().unwrap();
            let (tell, told) = std::sync::mpsc::channel();
            let (inner, own) = (runtime.clone(), stream.clone());
            stream.call(move || {
                drop((first, on_stream, gone));
                second.unpin_after(&own).unwrap();
                third.unpin_after(&another).unwrap();
                let refused = [
                    inner.alloc(DType::U8, &[PAGE]).map(drop).unwrap_err(),
                    inner.compute_stream().map(drop).unwrap_err(),
                ];
                let later = tell.clone();
                own.call(move || later.send(Vec::new()).unwrap());
                tell.send(refused.to_vec()).unwrap();
                drop((inner, another, own));
            });
            let refused = told.recv().unwrap();
            assert_eq!(refused.len(), 2);
            for error in refused {
                assert!(error.kind() == ErrorKind::InvalidArgument && error.advice().is_some(), "{error}");
                assert!(error.to_string().contains("closure"), "{error}");
            }
            assert!(told.recv().unwrap().is_empty(), "what a closure puts on the stream runs behind it");
            let guard = wait_for_future(waiting).unwrap();
            let mut byte = [1];
            guard.copy_out(0, 7, &mut byte).unwrap();
            assert_eq!(byte, [0]);
            drop(guard);
            stream.synchronize().unwrap();
            wait_for("the pins to end", || (0..3).all(|at| state_of(&runtime, &tensors[at]).1 == 0));
            drop((stream, tensors, wanted));
            runtime.close().unwrap();
        }
        fake.finish();

        // A closure that drops the last handle of the runtime.
        {
            let runtime = builder(1, 1).open().unwrap();
            let tensors = pages(&runtime, 1);
            let stream = runtime.compute_stream().unwrap();
            let (go, gone) = std::sync::mpsc::channel::<()>();
            let guard = runtime.pin(&tensors).on_device().wait().unwrap();
            let on = stream.clone();
            stream.call(move || {
                let _ = gone.recv();
                drop((on, guard, tensors, runtime));
            });
            drop(stream);
            go.send(()).unwrap();
        }
        wait_for("what the runtime made to be given back", || {
            let left = fake.check_leaks();
            let findings = fake.take_findings();
            assert!(findings.iter().all(|finding| finding.starts_with("leak")), "{findings:#?}");
            left == 0
        });
        fake.finish();
    });
}

/// A copy to pageable memory was left to the driver. The thread that submitted it waited for everything on the stream
/// while it held the stream's lock. The reaper then waited for that lock, and everybody waited for the reaper.
#[test]
fn regression_a_copy_on_an_adopted_stream_holds_up_nobody_else() {
    if Fake::load_or_skip("regression_a_copy_on_an_adopted_stream_holds_up_nobody_else").is_none() {
        return;
    }
    watched("regression_a_copy_on_an_adopted_stream_holds_up_nobody_else", || {
        let fake = Fake::load();
        {
            let foreign = Foreign::new(&fake);
            let may_end = Arc::new(AtomicBool::new(false));
            let end = Arc::clone(&may_end);
            fake.register_kernel(
                "copy",
                |_| Vec::new(),
                move |_| {
                    while !end.load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                },
            );
            let runtime = builder(2, 0).open().unwrap();
            let tensors = pages(&runtime, 1);
            let stream = foreign.adopt(&runtime).unwrap();
            let pins = [(); 2].map(|()| runtime.pin(&tensors).on(&stream).wait().unwrap());
            foreign.launch_at(stream.raw().unwrap(), 0, 0, 0);
            let [ended, pin] = pins;
            // Now the reaper asks about the stream.
            ended.unpin().unwrap();
            let before = fake.calls("cuMemcpyDtoHAsync");
            let bytes = std::thread::scope(|scope| {
                let copying = scope.spawn(|| {
                    let mut bytes = vec![0; PAGE as usize];
                    pin.copy_out(0, 0, &mut bytes).map(|()| bytes)
                });
                wait_for("the copy", || fake.calls("cuMemcpyDtoHAsync") > before);
                let other = [runtime.alloc(DType::U8, &[PAGE]).unwrap()];
                drop(runtime.pin(&other).on_device().wait().unwrap());
                assert!(!may_end.load(Ordering::Acquire), "the kernel still runs");
                may_end.store(true, Ordering::Release);
                copying.join().unwrap().unwrap()
            });
            assert!(bytes == bytes_of(0));
            drop(pin);
            stream.synchronize().unwrap();
            // New streams use the buffers of forgotten ones.
            drop(stream);
            let locked = fake.calls("cuMemHostAlloc");
            for _ in 0..3 {
                let again = foreign.adopt(&runtime).unwrap();
                let pin = runtime.pin(&tensors).on(&again).wait().unwrap();
                pin.copy_out(0, 0, &mut [0; 5]).unwrap();
                drop(pin);
                again.synchronize().unwrap();
            }
            assert_eq!(fake.calls("cuMemHostAlloc"), locked);
            drop(tensors);
            runtime.close().unwrap();
        }
        fake.finish();
    });
}

/// Notes whether a kernel had run when a mark was reported.
#[derive(Default)]
struct Marks {
    ran: Arc<AtomicBool>,
    told: AtomicBool,
    after: AtomicBool,
}

impl Completions for Marks {
    fn completed(&self, _done: &mut Vec<Completion>) {
        self.after.store(self.ran.load(Ordering::Acquire), Ordering::Release);
        self.told.store(true, Ordering::Release);
    }
}

/// A mark for which the driver gave no event was reported at once, so the pins that it was to end ended too early.
#[test]
fn regression_a_mark_that_the_driver_refuses_is_behind_what_others_put_on_the_stream() {
    let name = "regression_a_mark_that_the_driver_refuses_is_behind_what_others_put_on_the_stream";
    let Some(fake) = Fake::load_or_skip(name) else { return };
    {
        let foreign = Foreign::new(&fake);
        let marks = Arc::new(Marks::default());
        let ran = Arc::clone(&marks.ran);
        fake.register_kernel("copy", |_| Vec::new(), move |_| ran.store(true, Ordering::Release));
        let page_size = PageSize::new(Bytes::new(PAGE)).unwrap();
        let config = CudaDeviceConfig { device: Default::default(), page_size, frames: 1 };
        let device = config.open(marks.clone()).unwrap();
        // SAFETY: the stream outlives the device.
        let stream = unsafe { device.adopt_stream(RawStream::new(foreign.stream.cu_stream().cast())) }.unwrap();
        fake.hold_stream(foreign.stream.cu_stream(), true);
        foreign.launch_at(device.raw_stream(stream).unwrap(), 0, 0, 0);
        let before = fake.calls("cuEventRecord");
        fake.fail_nth("cuCtxPushCurrent", 1, REFUSED);
        device.submit(stream, StreamOp::Mark, Some(Token(1)));
        wait_for("the mark, or another event behind the kernel", || {
            marks.told.load(Ordering::Acquire) || fake.calls("cuEventRecord") > before
        });
        fake.hold_stream(foreign.stream.cu_stream(), false);
        wait_for("the mark", || marks.told.load(Ordering::Acquire));
        assert!(marks.after.load(Ordering::Acquire), "the kernel had not run");
        device.close().unwrap();
    }
    fake.finish();
}
