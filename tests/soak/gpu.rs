//! The program beside the runtime: its kernels, memory of its own on the GPU and on the host, and copies between them.
//!
//! # Invariants
//!
//! 1. Memory of a [`Room`] is freed, and the host's part is looked at, only after the streams that use it have been
//!    waited for. [`Room::wait`] does so, and `drop` waits for the whole context.
//! 2. Device addresses are given to the driver, which checks them, and never followed here.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUstream};
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, DriverError, result};
use cudarc::nvrtc::Ptx;
use outcore::device::RawStream;
use outcore::{ComputeStream, Runtime};

use crate::failure::{Failure, Result};

/// The kernels' text.
pub const KERNELS: &str = include_str!("kernels.ptx");

fn named<T>(what: &'static str, outcome: std::result::Result<T, DriverError>) -> Result<T> {
    outcome.map_err(|error| Failure::Driver { what, code: format!("{:?}", error.0) })
}

/// The primary context of a GPU, and the kernels in it.
pub struct Gpu {
    context: Arc<CudaContext>,
    sum: CudaFunction,
    table_sum: CudaFunction,
    stamp: CudaFunction,
    /// Blocks of a launch. Its steps are the same for every thread.
    blocks: u32,
    steps: u64,
    _module: Arc<CudaModule>,
}

const THREADS: u32 = 128;

impl Gpu {
    pub fn open(ordinal: u32, blocks: u32, steps: u64) -> Result<Self> {
        // Answers with an error where there is no driver; cudarc would panic.
        let count = outcore_cuda::cuda_devices()?.len();
        if ordinal as usize >= count {
            return Err(Failure::NoGpu(ordinal, count));
        }
        let context = named("open the GPU", CudaContext::new(ordinal as usize))?;
        // SAFETY: everything that is submitted here is ordered by the streams that are named at each place.
        unsafe { context.disable_event_tracking() };
        let module = named("load the kernels", context.load_module(Ptx::from_src(KERNELS)))?;
        let function = |name| named("find a kernel", module.load_function(name));
        let (sum, table_sum, stamp) = (function("soak_sum")?, function("soak_table_sum")?, function("soak_stamp")?);
        Ok(Self { context, sum, table_sum, stamp, blocks, steps, _module: module })
    }

    /// Lets this thread call the driver.
    pub fn enter(&self) -> Result {
        named("enter the context", self.context.bind_to_thread())
    }

    pub fn stream(&self) -> Result<Own> {
        Ok(Own(named("create a stream", self.context.new_stream())?))
    }

    fn launch<const N: usize>(&self, kernel: &CudaFunction, stream: RawStream, values: [u64; N]) -> Result {
        let mut parameters = values.each_ref().map(|value| std::ptr::from_ref(value).cast_mut().cast::<c_void>());
        // SAFETY: the kernels' parameters are words, as many as the callers below pass; the driver has read them when
        // it returns. What kernels touch is device memory, which the driver checks (invariant 2).
        named("launch a kernel", unsafe {
            result::launch_kernel(
                kernel.cu_function(),
                (self.blocks, 1, 1),
                (THREADS, 1, 1),
                0,
                handle(stream),
                &mut parameters,
            )
        })
    }

    /// Adds the sum of `words` words to the word at `out`.
    pub fn sum(&self, stream: RawStream, from: u64, words: u64, out: u64) -> Result {
        self.launch(&self.sum, stream, [from, words, out, self.steps])
    }

    /// The same for blocks whose addresses are in a table.
    pub fn table_sum(&self, stream: RawStream, table: u64, count: u64, words: u64, out: u64) -> Result {
        self.launch(&self.table_sum, stream, [table, count, words, out, self.steps])
    }

    /// Stamps `words` words from word `first` of `to` on.
    pub fn stamp(&self, stream: RawStream, to: u64, (first, words): (u64, u64), factor: u64, stamp: u64) -> Result {
        self.launch(&self.stamp, stream, [to, first, words, factor, stamp, self.steps])
    }
}

fn handle(stream: RawStream) -> CUstream {
    stream.as_ptr().cast()
}

/// Waits for everything on a stream, without asking the runtime.
pub fn wait_for(stream: RawStream) -> Result {
    // SAFETY: the handle is that of a stream which the soak holds for as long as it runs.
    named("wait for a stream", unsafe { result::stream::synchronize(handle(stream)) })
}

/// A stream of the program's own.
pub struct Own(Arc<CudaStream>);

impl Own {
    pub fn raw(&self) -> RawStream {
        RawStream::new(self.0.cu_stream().cast())
    }

    /// The stream as the runtime knows it.
    pub fn adopted_by<'a>(&'a self, runtime: &Runtime) -> Result<Adopted<'a>> {
        // SAFETY: the handle is this stream's, which is borrowed for as long as the result lives.
        Ok(Adopted { stream: unsafe { runtime.adopt_stream(self.raw()) }?, _of: self })
    }
}

/// A stream that a runtime has adopted, and which lives for as long.
pub struct Adopted<'a> {
    pub stream: ComputeStream,
    _of: &'a Own,
}

/// Words in device memory, and the same number in locked host memory.
pub struct Room {
    pub device: u64,
    host: *mut u64,
    words: usize,
    context: Arc<CudaContext>,
}

impl Room {
    pub fn new(gpu: &Gpu, words: usize) -> Result<Self> {
        gpu.enter()?;
        // SAFETY: asks for new memory; freed in `drop`.
        let device = named("allocate memory of the GPU", unsafe { result::malloc_sync(words * 8) })?;
        // SAFETY: as above.
        let host = unsafe { result::malloc_host(words * 8, 0) }.inspect_err(|_| {
            // SAFETY: allocated above, and used by nobody.
            let _ = unsafe { result::free_sync(device) };
        });
        let host = named("allocate locked host memory", host)?.cast();
        Ok(Self { device, host, words, context: gpu.context.clone() })
    }

    /// The device address of a word.
    pub fn at(&self, word: usize) -> u64 {
        assert!(word < self.words, "the room has {} words", self.words);
        self.device + word as u64 * 8
    }

    /// Sets words of the host's part that no copy is using.
    pub fn set(&mut self, first: usize, values: &[u64]) {
        assert!(first + values.len() <= self.words, "the room has {} words", self.words);
        // SAFETY: within what was allocated; the caller sets each word once between two waits (invariant 1).
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.host.add(first), values.len()) };
    }

    /// Copies words of the host's part to a device address, in the order of a stream.
    pub fn copy_in(&self, stream: RawStream, first: usize, count: usize, to: u64) -> Result {
        assert!(first + count <= self.words, "the room has {} words", self.words);
        // SAFETY: the words lie in the room, which outlives the copy (invariant 1); the driver checks the address.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, self.host.add(first).cast(), count * 8, handle(stream)) };
        named("copy to the GPU", code.result())
    }

    /// Fills the device's part with bytes.
    pub fn fill(&self, stream: RawStream, byte: u8) -> Result {
        // SAFETY: concerns device memory only, which is the room's.
        let code = unsafe { sys::cuMemsetD8Async(self.device, byte, self.words * 8, handle(stream)) };
        named("fill memory of the GPU", code.result())
    }

    /// Copies the device's part to the host's, and waits for it. Everything that uses the room has ended, or is on
    /// this stream.
    pub fn read(&mut self, stream: RawStream) -> Result<Vec<u64>> {
        // SAFETY: the host's part is as large as the device's, and is the room's until the copy has ended.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(self.host.cast(), self.device, self.words * 8, handle(stream)) };
        named("copy from the GPU", code.result())?;
        wait_for(stream)?;
        // SAFETY: allocated with this length, and written by the copy that has ended.
        Ok(unsafe { std::slice::from_raw_parts(self.host, self.words) }.to_vec())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // If the device is lost nothing runs any more, and the driver keeps what it cannot free.
        let _ = self.context.bind_to_thread().and_then(|()| result::ctx::synchronize());
        // SAFETY: both were allocated in `new`, and what used them has ended (invariant 1).
        let _ = unsafe { result::free_sync(self.device) };
        // SAFETY: as above.
        let _ = unsafe { result::free_host(self.host.cast()) };
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kernels_are_those_of_the_source() {
        let source = include_bytes!("kernels.cu");
        let fnv = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3);
        let hash = source.iter().fold(0xCBF2_9CE4_8422_2325, fnv);
        let line = format!("// Source: {hash:016x}\n");
        assert!(super::KERNELS.contains(&line), "run scripts/soak_kernels.sh: kernels.ptx is not of {}", line.trim());
    }
}
