//! A GPU to compute on: the runtime's own (primary) context, a stream, the kernels, cuBLASLt where it is installed.

use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cudarc::driver::sys::{self, CUdevice_attribute};
use cudarc::driver::{CudaContext, CudaStream, DeviceRepr, DriverError, result};
use outcore::device::RawStream;
use outcore::{Bytes, ComputeStream, Error, ErrorKind, Runtime};
use outcore_cuda::{CudaDeviceInfo, CudaDeviceSelector, cuda_device};

use super::compile;
use super::failed::failed;
use super::kernels::Kernels;
use super::prompt::Prompts;
use crate::error::Result;

/// The oldest generation whose instructions the kernels use: they copy to shared memory without waiting.
const CAPABILITY_MIN: (u32, u32) = (8, 0);

/// A GPU that is ready to compute. [`CudaModel`](super::CudaModel)s run on it.
pub struct Gpu {
    info: CudaDeviceInfo,
    pub(super) kernels: Kernels,
    /// Where cuBLASLt multiplies prompts.
    pub(super) prompts: Option<Prompts>,
    pub(super) stream: Arc<CudaStream>,
    pub(super) context: Arc<CudaContext>,
    /// How often a thread waited for the stream.
    waits: AtomicU64,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu")
            .field("info", &self.info)
            .field("cublaslt", &self.prompts.is_some())
            .finish_non_exhaustive()
    }
}

impl Gpu {
    /// Opens the GPU that `device` means and loads the kernels: from `kernels`, a PTX, cubin or fatbin file of
    /// `scripts/check_kernels.sh`; or compiled by NVRTC, whose results are kept in the user's cache folder; or, without
    /// it, from PTX that is part of the program.
    ///
    /// # Errors
    /// `Unsupported` if there is no CUDA driver, if the GPU or the driver is too old, or if the kernels do not suit the
    /// GPU; `NotFound` if there is no such GPU or file; `Device` for what the driver refuses. Each with a remedy.
    pub fn open(device: &CudaDeviceSelector, kernels: Option<&Path>) -> Result<Self> {
        // This looks for libcuda; cudarc panics where there is none.
        let info = cuda_device(device)?;
        let name = format!("cuda:{}", info.ordinal);
        if info.capability < CAPABILITY_MIN {
            let ((major, minor), (least, minor_least)) = (info.capability, CAPABILITY_MIN);
            let message = format!(
                "{name} ({}) has compute capability {major}.{minor}, and the kernels need {least}.{minor_least}",
                info.name
            );
            return Err(Error::new(ErrorKind::Unsupported, message)
                .remedy("use a GPU of the generation Ampere (2020) or newer, or --device host")
                .into());
        }
        let context =
            CudaContext::new(info.ordinal as usize).map_err(|e| failed(format!("open a context on {name}"), e))?;
        // SAFETY: the events would order streams that share a buffer. There is one stream here, and weights are ordered
        // by their pins.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(|e| failed(format!("make a stream on {name}"), e))?;
        let code = compile::kernels(&info, kernels)?;
        let kernels = Kernels::load(&context, &stream, &code)?;
        let prompts = Prompts::open(&kernels, &stream)?;
        Ok(Self { info, kernels, prompts, stream, context, waits: AtomicU64::new(0) })
    }

    /// Whether cuBLASLt multiplies matrices with the many vectors of a prompt; else this program's kernels do.
    pub fn has_cublaslt(&self) -> bool {
        self.prompts.is_some()
    }

    /// The same GPU, on which this program's kernels compute all products: the same bits however prompts are cut.
    #[must_use]
    pub fn without_cublaslt(mut self) -> Self {
        self.prompts = None;
        self
    }

    /// What the driver says of it.
    pub fn info(&self) -> &CudaDeviceInfo {
        &self.info
    }

    /// Memory of the GPU that nobody has taken.
    ///
    /// # Errors
    /// `Device` if the driver does not say.
    pub fn free_memory(&self) -> Result<Bytes> {
        let (free, _) = self.context.mem_get_info().map_err(|e| failed("ask for the GPU's free memory", e))?;
        Ok(Bytes::new(free as u64))
    }

    /// Bytes a second that the GPU's memory can give, from its clock and the width of its bus; `None` if the driver
    /// does not say. Memory of today's GPUs moves two words a clock.
    pub fn bandwidth(&self) -> Option<u64> {
        let of = |which| self.context.attribute(which).ok().and_then(|value| u64::try_from(value).ok());
        let kilohertz = of(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?;
        let bits = of(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?;
        let rate = kilohertz.checked_mul(1000 * 2)?.checked_mul(bits / 8)?;
        (rate > 0).then_some(rate)
    }

    /// How often a thread has waited for the stream so far.
    pub(super) fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    /// Waits until everything on the stream has ended.
    pub(super) fn finish(&self) -> Result<()> {
        self.waits.fetch_add(1, Ordering::Relaxed);
        Ok(self.stream.synchronize().map_err(|e| failed("wait for the GPU", e))?)
    }
}

/// A GPU's stream as a runtime knows it.
#[derive(Debug)]
pub(super) struct Adopted {
    stream: ComputeStream,
    _gpu: Arc<Gpu>,
}

impl Adopted {
    /// Has `runtime` adopt the stream of `gpu`.
    ///
    /// # Errors
    /// `Unsupported` or `InvalidArgument` if the runtime's pages are not on that GPU.
    pub fn new(gpu: &Arc<Gpu>, runtime: &Runtime) -> Result<Self> {
        // SAFETY: the GPU owns the stream, and this drops the adopted one first. Clones of that are in pins only, which
        // end before the session or the model that has this.
        let stream = unsafe { runtime.adopt_stream(RawStream::new(gpu.stream.cu_stream().cast())) }?;
        Ok(Self { stream, _gpu: gpu.clone() })
    }
}

impl Deref for Adopted {
    type Target = ComputeStream;

    fn deref(&self) -> &ComputeStream {
        &self.stream
    }
}

/// Locked host memory, which copies on the GPU's stream may use. cudarc's own type asks the driver for an event at
/// every access.
pub(super) struct Locked<T> {
    place: NonNull<T>,
    len: usize,
    gpu: Arc<Gpu>,
}

// SAFETY: the memory belongs to this alone, and the driver frees it from any thread.
unsafe impl<T: Send> Send for Locked<T> {}
// SAFETY: shared access only reads.
unsafe impl<T: Sync> Sync for Locked<T> {}

impl<T: DeviceRepr + Default + Copy> Locked<T> {
    /// Room for `len` elements, all of them `T::default()`.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn new(gpu: &Arc<Gpu>, len: usize) -> Result<Self> {
        let locking = |e| failed("take locked host memory", e);
        gpu.context.bind_to_thread().map_err(locking)?;
        let len = len.max(1);
        // SAFETY: what is allocated is written below before it is read.
        let place = unsafe { result::malloc_host(len * size_of::<T>(), 0) }.map_err(locking)?;
        let place = NonNull::new(place.cast::<T>()).ok_or_else(|| {
            Error::new(ErrorKind::Device, "the driver gave no locked host memory").remedy("try again")
        })?;
        for nth in 0..len {
            // SAFETY: there is room for `len` elements, and the driver aligns to a page.
            unsafe { place.add(nth).write(T::default()) };
        }
        Ok(Self { place, len, gpu: gpu.clone() })
    }
}

impl<T> Locked<T> {
    /// Queues the copy of as many elements as there are, from the device address `from`.
    ///
    /// # Safety
    /// There are as many elements at `from`, and nobody looks at this memory before the stream was waited for.
    pub unsafe fn fill_from(&self, from: u64) -> std::result::Result<(), DriverError> {
        let (to, bytes) = (self.place.as_ptr().cast(), self.len * size_of::<T>());
        // SAFETY: the caller's promise; the memory is this one's.
        unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, bytes, self.gpu.stream.cu_stream()) }.result()
    }
}

impl<T> Deref for Locked<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `new` wrote `len` elements. Who queues a copy to them waits for the stream before it reads.
        unsafe { std::slice::from_raw_parts(self.place.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Locked<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above; who queues a copy from them waits for the stream before it writes.
        unsafe { std::slice::from_raw_parts_mut(self.place.as_ptr(), self.len) }
    }
}

impl<T> Drop for Locked<T> {
    fn drop(&mut self) {
        // SAFETY: `new` took it from this driver, and its owner waits for the stream before it drops this.
        let freed =
            self.gpu.context.bind_to_thread().and_then(|()| unsafe { result::free_host(self.place.as_ptr().cast()) });
        if let Err(error) = freed {
            tracing::debug!(?error, "locked memory is not given back to a GPU that fails");
        }
    }
}

/// Processor time that this thread has taken.
pub(super) fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists on every Linux, and `time` is a timespec.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) } != 0;
    if failed { Duration::ZERO } else { Duration::new(time.tv_sec as u64, time.tv_nsec as u32) }
}

/// Queues the copy of the elements at `from` to locked memory, as many as fit that.
pub(super) fn copy_out<T: DeviceRepr>(from: u64, to: &Locked<T>) -> Result<()> {
    // SAFETY: `from` is a place in the session's memory with room for as many; the session does not look at its locked
    // memory before it has waited for the stream, and nobody else has it.
    let copied = unsafe { to.fill_from(from) };
    Ok(copied.map_err(|e| failed("copy a result from the GPU", e))?)
}

/// Queues the copy of elements in locked memory to `to`.
pub(super) fn copy_in<T: DeviceRepr>(gpu: &Gpu, from: &[T], to: u64) -> Result<()> {
    // SAFETY: `to` is a place in the session's memory with room for as many; `from` is locked memory of the session,
    // which is not written to before the stream has been waited for.
    let copied = unsafe { result::memcpy_htod_async(to, from, gpu.stream.cu_stream()) };
    Ok(copied.map_err(|e| failed("copy to the GPU", e))?)
}
