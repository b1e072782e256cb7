//! Pins end at the right point of a GPU's own timeline. Kernels that read late show it, on the caller's streams and the
//! runtime's, with pins for a stream, graphs and DLPack. The same tests run over the emulated driver
//! (`tests/fake-cuda`), which judges the order, and in `cuda_real` on the machine's own driver, if
//! `OUTCORE_REAL_CUDA=1` asks for it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::Arc;

use control::{Fake, Launch, Reach};
use cuda_calls::{Locked, allocate, copy_out, fill, free};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream};
use cudarc::nvrtc::Ptx;
use harness::{cuda_builder, watched};
use models::{Synthetic, synthetic};
use outcore::device::RawStream;
use outcore::dlpack::DLDeviceType;
use outcore::{ComputeStream, DType, Runtime, Tensor};
use outcore_testkit::{cuda_calls, fake_cuda as control, harness, models};

const PAGE: u64 = 2 << 20;

macro_rules! on_both_drivers {
    ($($test:ident)*) => {
        mod emulated {
            $(#[test] fn $test() {
                let Some(fake) = super::Fake::load_or_skip(stringify!($test)) else { return };
                fake.set_delay(400, 9);
                super::register(&fake);
                super::$test();
                fake.finish();
            })*
        }
        mod cuda_real {
            $(#[test] fn $test() {
                if super::control::real_is_wanted() {
                    super::watched(stringify!($test), super::$test);
                } else {
                    eprintln!("SKIPPED {}: OUTCORE_REAL_CUDA is not 1", stringify!($test));
                }
            })*
        }
    };
}

on_both_drivers! {
    pins_end_behind_kernels_on_a_stream_of_the_callers
    what_kernels_write_on_a_stream_of_the_runtimes_is_kept
    a_pin_for_a_stream_is_read_behind_its_copies
    a_captured_graph_stays_valid_after_evict_and_refill
    a_dlpack_consumer_reads_until_it_gives_back
}

/// Tells the emulated driver what to run in place of the kernel.
fn register(fake: &Fake) {
    let reach = |launch: &Launch| {
        let len = launch.parameter(2) * 8;
        vec![Reach::read(launch.parameter(0), len), Reach::write(launch.parameter(1), len)]
    };
    fake.register_kernel("slow_copy", reach, |launch| {
        let words = launch.parameter(2) as usize;
        let from = launch.read::<u64>(launch.parameter(0), words).to_vec();
        launch.write::<u64>(launch.parameter(1), words).copy_from_slice(&from);
    });
}

fn open(frames: u64, host: u64) -> Runtime {
    cuda_builder(frames, host).open().unwrap()
}

/// A program beside the runtime, with a stream and device memory of its own.
struct Foreign {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    slow_copy: CudaFunction,
    results: u64,
    len: u64,
}

impl Foreign {
    /// With room for results of `len` bytes.
    fn new(len: u64) -> Self {
        let context = cuda_calls::context();
        let module = context.load_module(Ptx::from_src(include_str!("slow_copy.ptx"))).unwrap();
        let slow_copy = module.load_function("slow_copy").unwrap();
        let (stream, results) = (context.new_stream().unwrap(), allocate(len as usize));
        let foreign = Self { context, stream, slow_copy, results, len };
        foreign.forget();
        foreign
    }

    fn adopt(&self, runtime: &Runtime) -> ComputeStream {
        // SAFETY: the tests drop what is returned before this, which owns the stream.
        unsafe { runtime.adopt_stream(RawStream::new(self.stream.cu_stream().cast())) }.unwrap()
    }

    /// Overwrites the results, after everything that is on the stream, so that the next round cannot find old ones.
    fn forget(&self) {
        fill(&self.stream, self.results, 0xEE, self.len as usize).unwrap();
    }

    /// Copies `len` bytes, a multiple of 8, some milliseconds after everything before it on the stream.
    fn copy(&self, stream: RawStream, from: u64, to: u64, len: u64) {
        let (words, steps) = (len / 8, 200_000_u64);
        let mut parameters =
            [&raw const from, &raw const to, &raw const words, &raw const steps].map(|p| p.cast_mut().cast());
        self.context.bind_to_thread().unwrap();
        // SAFETY: the parameters are the kernel's; the driver has read them when it returns.
        unsafe {
            cudarc::driver::result::launch_kernel(
                self.slow_copy.cu_function(),
                (64, 1, 1),
                (128, 1, 1),
                0,
                stream.as_ptr().cast(),
                &mut parameters,
            )
        }
        .unwrap();
    }

    /// The results, once everything on the stream has ended.
    fn read(&self) -> Vec<u8> {
        let back = Locked::new(&self.context, self.len as usize);
        copy_out(&self.stream, back.pointer(), self.results, self.len as usize).unwrap();
        self.stream.synchronize().unwrap();
        back.bytes().to_vec()
    }

    fn end(self) {
        self.stream.synchronize().unwrap();
        free(self.results).unwrap();
    }
}

fn bytes_of(n: u64) -> Vec<u8> {
    (0..PAGE).map(|at| (at * 31 / 251 + n * 7) as u8).collect()
}

/// Read-write tensors of one page each, with different bytes.
fn pages(runtime: &Runtime, count: u64) -> Vec<Tensor> {
    let tensor = |n| {
        let tensor = runtime.alloc(DType::U8, &[PAGE]).unwrap();
        write(runtime, &tensor, &bytes_of(n));
        tensor
    };
    (0..count).map(tensor).collect()
}

fn write(runtime: &Runtime, tensor: &Tensor, bytes: &[u8]) {
    runtime.pin(tensor).write().on_device().wait().unwrap().copy_in(0, 0, bytes).unwrap();
}

fn read(runtime: &Runtime, tensor: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0xEE; tensor.size().get() as usize];
    runtime.pin(tensor).on_device().wait().unwrap().copy_out(0, 0, &mut bytes).unwrap();
    bytes
}

fn tensors_of(runtime: &Runtime, file: &Synthetic, count: usize) -> Vec<(Tensor, Vec<u8>)> {
    let model = runtime.open_model(&file.path).unwrap();
    let tensor = |n: usize| {
        let tensor = model.tensor(&format!("t{n}")).unwrap();
        let at = model.header().tensor(&format!("t{n}")).unwrap().offset as usize;
        (tensor.clone(), file.bytes[at..at + tensor.size().get() as usize].to_vec())
    };
    (0..count).map(tensor).collect()
}

/// There are twice as many tensors as frames, and nobody waits for the kernels. If a pin ended too early, the kernel
/// would find other bytes.
fn pins_end_behind_kernels_on_a_stream_of_the_callers() {
    let foreign = Foreign::new(4 * PAGE);
    let runtime = open(2, 1);
    let tensors = pages(&runtime, 4);
    let stream = foreign.adopt(&runtime);
    for pass in 0..3 {
        for (n, tensor) in (0..4).zip(&tensors) {
            let guard = runtime.pin(tensor).on_device().wait().unwrap();
            let from = guard.device_bytes(0).unwrap().address.get();
            foreign.copy(stream.raw().unwrap(), from, foreign.results + n * PAGE, PAGE);
            guard.unpin_after(&stream).unwrap();
        }
        let results = foreign.read();
        for (n, result) in (0..4).zip(results.chunks(PAGE as usize)) {
            assert!(result == bytes_of(n), "tensor {n} in pass {pass}");
        }
        foreign.forget();
    }
    assert!(runtime.stats().pager.evictions >= 10, "{:?}", runtime.stats().pager);
    drop((stream, tensors));
    runtime.close().unwrap();
    foreign.end();
}

/// Each kernel reads what the one before it wrote, through pages that leave for the disk in between.
fn what_kernels_write_on_a_stream_of_the_runtimes_is_kept() {
    let foreign = Foreign::new(PAGE);
    let runtime = open(2, 0);
    let tensors = pages(&runtime, 4);
    let streams = [runtime.compute_stream().unwrap(), foreign.adopt(&runtime)];
    for n in 0..3 {
        let (from, to) = (&tensors[n..=n], &tensors[n + 1..=n + 1]);
        let (source, target) =
            (runtime.pin(from).on_device().wait().unwrap(), runtime.pin(to).write().on_device().wait().unwrap());
        let stream = &streams[n % 2];
        let (read, written) = (source.device_bytes(0).unwrap(), target.device_bytes(0).unwrap());
        foreign.copy(stream.raw().unwrap(), read.address.get(), written.address.get(), PAGE);
        source.unpin_after(stream).unwrap();
        target.unpin_after(stream).unwrap();
    }
    for (n, tensor) in tensors.iter().enumerate() {
        assert!(read(&runtime, tensor) == bytes_of(0), "tensor {n}");
    }
    drop((streams, tensors));
    runtime.close().unwrap();
    foreign.end();
}

/// Passes over a model larger than the budget. Nobody waits for a copy or a kernel before the end of a pass.
fn a_pin_for_a_stream_is_read_behind_its_copies() {
    const LEN: u64 = 3 << 19;
    let file = synthetic(&[LEN as usize; 12]);
    for (frames, host) in [(4, 0), (4, 4), (6, 12)] {
        let foreign = Foreign::new(12 * LEN);
        let runtime = open(frames, host);
        let tensors = tensors_of(&runtime, &file, 12);
        let stream = foreign.adopt(&runtime);
        for pass in 0..3 {
            for (n, (tensor, _)) in (0..).zip(&tensors) {
                let pin = runtime.pin(tensor).on(&stream).wait().unwrap();
                let bytes = pin.device_bytes(0).unwrap();
                assert_eq!((bytes.address.get(), bytes.len.get()), (tensor.address(), LEN));
                foreign.copy(stream.raw().unwrap(), bytes.address.get(), foreign.results + n * LEN, LEN);
                match n % 2 {
                    0 => pin.unpin().unwrap(),
                    _ => drop(pin),
                }
            }
            stream.synchronize().unwrap();
            let results = foreign.read();
            for (n, result) in results.chunks(LEN as usize).enumerate() {
                assert!(result == tensors[n].1, "tensor {n} in pass {pass}, {frames} frames, {host} in host memory");
            }
            foreign.forget();
        }
        let stats = runtime.stats();
        assert!(stats.pager.evictions > 10 && stats.traffic.peak_device <= stats.device.budget, "{stats:?}");
        drop((stream, tensors));
        runtime.close().unwrap();
        foreign.end();
    }
}

fn a_captured_graph_stays_valid_after_evict_and_refill() {
    const LEN: u64 = 5 << 20;
    let file = synthetic(&[LEN as usize]);
    let foreign = Foreign::new(LEN);
    let runtime = open(7, 2);
    let (weights, expected) = tensors_of(&runtime, &file, 1).remove(0);
    let output = runtime.alloc(DType::U8, &[LEN]).unwrap();
    let stream = foreign.adopt(&runtime);
    let pinned = || {
        let source = runtime.pin(&weights).on_device().wait().unwrap();
        (source, runtime.pin(&output).write().on_device().wait().unwrap())
    };
    let (source, target) = pinned();
    let (from, to) = (source.device_bytes(0).unwrap(), target.device_bytes(0).unwrap());
    // This capture mode forbids the most.
    foreign.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    foreign.copy(stream.raw().unwrap(), from.address.get(), to.address.get(), LEN);
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = foreign.stream.end_capture(flags).unwrap().unwrap();
    drop((source, target));

    let others = pages(&runtime, 7);
    for round in 0..3 {
        // Evicts everything: other pages take all frames, in a different order each round.
        let away: Vec<Tensor> = (0..7).map(|n| others[(n * 5 + round) % 7].clone()).collect();
        drop(runtime.pin(&away).on_device().wait().unwrap());
        let resident =
            |tensor: &Tensor| runtime.observe().snapshot(tensor).pages.iter().any(|page| page.device.is_resident());
        assert!(!resident(&weights) && !resident(&output));
        write(&runtime, &output, &vec![round as u8; LEN as usize]);
        let (source, target) = pinned();
        assert_eq!((source.device_bytes(0), target.device_bytes(0)), (Some(from), Some(to)), "one address for life");
        graph.launch().unwrap();
        source.unpin_after(&stream).unwrap();
        target.unpin_after(&stream).unwrap();
        assert!(read(&runtime, &output) == expected, "round {round}");
    }
    drop(graph);
    drop((stream, weights, output, others));
    runtime.close().unwrap();
    foreign.end();
}

/// The consumer's kernel reads the view's bytes while other requests want the frame.
fn a_dlpack_consumer_reads_until_it_gives_back() {
    let foreign = Foreign::new(PAGE / 2);
    let runtime = open(2, 1);
    let tensors = pages(&runtime, 4);
    let stream = foreign.adopt(&runtime);
    for round in 0..3 {
        let rows = [tensors[1].reshape(&[4, PAGE / 4]).unwrap().rows(1..3).unwrap()];
        let view = runtime.pin(&rows).on_device().wait().unwrap().into_dlpack(0, Some(&stream)).unwrap();
        let tensor = *view.tensor();
        assert_eq!((tensor.device.device_type, tensor.device.device_id), (DLDeviceType::kDLCUDA, 0));
        assert_eq!((tensor.ndim, tensor.data as u64), (2, rows[0].address()));
        // The consumer has only the structure.
        let managed = view.into_raw();
        let raw = RawStream::new(foreign.stream.cu_stream().cast());
        foreign.copy(raw, tensor.data as u64, foreign.results, PAGE / 2);
        // SAFETY: a consumer gives back what it was given, once.
        unsafe { managed.as_ref().deleter.unwrap()(managed.as_ptr()) };
        // Other tensors take both frames.
        drop(runtime.pin(&tensors[2..]).on_device().wait().unwrap());
        let expected = &bytes_of(1)[PAGE as usize / 4..][..PAGE as usize / 2];
        assert!(foreign.read() == expected, "round {round}");
        foreign.forget();
    }
    drop((stream, tensors));
    runtime.close().unwrap();
    foreign.end();
}
