//! Updates on a GPU, where the host cannot address the pages: kernels with the arithmetic of the host, bit for bit.

use std::path::Path;
use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, CUresult};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, DevicePtrMut, DeviceRepr, DriverError, LaunchArgs,
    LaunchConfig, PinnedHostSlice, PushKernelArg, result,
};
use cudarc::nvrtc::Ptx;
use outcore::device::RawStream;
use outcore::pin::{DeviceBytes, DevicePin};
use outcore::{ComputeStream, DType, Error, ErrorKind, Read, Result, Runtime, Write};
use outcore_cuda::{CudaDeviceSelector, cuda_device, is_device_lost};
use parking_lot::Mutex;

use crate::device::{Added, CopiedPart, Failed, GradientsOnDevice, OnDevice, UpdatedPart};
use crate::gradients::{CHUNK, PARTIAL};
use crate::rule::DeviceRule;

/// The kernels, for the oldest GPUs that are supported. `scripts/kernels_ptx.py` makes the file, and lint compares it
/// with the source.
const PTX: &str = include_str!("cuda/kernels.ptx");
/// As in `kernels.cu`.
const INTERFACE: &str = "train_interface_1";
const THREADS: u32 = 256;
/// As many blocks fill every GPU. Where there are more elements, each lane takes several.
const BLOCKS: u64 = 4096;
/// Elements that are copied to the GPU at a time.
const STAGED: usize = 1 << 20;
/// The oldest generation that the kernels are compiled for.
const CAPABILITY_MIN: (u32, u32) = (8, 0);

/// The kernels of [`AdamW`](crate::AdamW) and [`Sgd`](crate::Sgd) on a GPU, for
/// [`OptimizerBuilder::cuda`](crate::OptimizerBuilder::cuda). One may be used by several optimizers, one launch behind
/// the other.
///
/// They run in the GPU's primary context. Making and dropping these, or an optimizer with them, leaves it the current
/// one of the thread; other calls of an optimizer leave the thread's as it was.
#[derive(Clone)]
pub struct CudaKernels {
    loaded: Arc<Loaded>,
}

struct Loaded {
    name: String,
    stream: Arc<CudaStream>,
    adamw: CudaFunction,
    sgd: CudaFunction,
    narrow: CudaFunction,
    /// Of `f32`, and of `bf16`.
    add: [CudaFunction; 2],
    squares: [CudaFunction; 2],
}

impl std::fmt::Debug for CudaKernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaKernels").field("device", &self.loaded.name).finish_non_exhaustive()
    }
}

/// What the driver refused while doing `what`.
fn failed(what: impl std::fmt::Display, error: DriverError) -> Error {
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
    let message = format!("{what}: {:?} ({text})", error.0);
    match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::new(ErrorKind::OutOfMemory, message)
            .remedy("choose a smaller device budget, or end what else uses the GPU"),
        code if is_device_lost(code as u32) => Error::new(ErrorKind::Device, message).remedy(
            "the GPU is lost to this process: start the program again, and if it recurs look for Xid lines in the kernel's log \
             (dmesg)",
        ),
        _ => Error::new(ErrorKind::Device, message)
            .remedy("try again; if it recurs, see that the driver is well (nvidia-smi, dmesg) and no older than CUDA 12.0"),
    }
}

impl CudaKernels {
    /// Loads the kernels on the GPU that `device` means. They are part of the program; the driver compiles them for the
    /// GPU, and keeps the result.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) if there is no CUDA driver, or if the GPU or the driver is too old;
    /// [`NotFound`](ErrorKind::NotFound) if there is no such GPU; [`Device`](ErrorKind::Device) for what the driver
    /// refuses.
    pub fn open(device: &CudaDeviceSelector) -> Result<Self> {
        Self::load(device, Ptx::from_src(PTX), "this program's own PTX")
    }

    /// As [`open`](Self::open), from a file with PTX, a cubin or a fatbin of the kernels.
    ///
    /// # Safety
    /// The file was compiled from this version's `cuda/kernels.cu`. Its kernels are given addresses of pages, and other
    /// ones may do anything with the GPU's memory; what can be checked is that the names are there.
    ///
    /// # Errors
    /// Also those of reading it; [`Unsupported`](ErrorKind::Unsupported) if it lacks a kernel.
    pub unsafe fn open_from(device: &CudaDeviceSelector, file: &Path) -> Result<Self> {
        let image = std::fs::read(file).map_err(|cause| {
            Error::io(format!("read the kernels in {}", file.display()), cause)
                .remedy("name a file of compiled kernels")
        })?;
        // PTX is text; the driver reads it to its first zero byte.
        let image = match String::from_utf8(image) {
            Ok(text) if !text.contains('\0') => Ptx::from_src(text),
            Ok(text) => Ptx::from_binary(text.into_bytes()),
            Err(error) => Ptx::from_binary(error.into_bytes()),
        };
        Self::load(device, image, &file.display().to_string())
    }

    fn load(device: &CudaDeviceSelector, image: Ptx, origin: &str) -> Result<Self> {
        // This looks for libcuda; cudarc panics where there is none.
        let info = cuda_device(device)?;
        let name = format!("cuda:{}", info.ordinal);
        if info.capability < CAPABILITY_MIN {
            let ((major, minor), (least, minor_least)) = (info.capability, CAPABILITY_MIN);
            let message =
                format!("{name} has compute capability {major}.{minor}, and the kernels need {least}.{minor_least}");
            return Err(Error::new(ErrorKind::Unsupported, message).remedy("use a GPU of 2020 or newer, or the host"));
        }
        let context =
            CudaContext::new(info.ordinal as usize).map_err(|e| failed(format!("open a context on {name}"), e))?;
        // SAFETY: the events would order streams that share a buffer. There is one stream here.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(|e| failed(format!("make a stream on {name}"), e))?;
        let module = context.load_module(image).map_err(|error| match error.0 {
            CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
            | CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU
            | CUresult::CUDA_ERROR_INVALID_PTX
            | CUresult::CUDA_ERROR_INVALID_IMAGE => {
                let message = format!("the kernels from {origin} do not suit {name} or its driver: {:?}", error.0);
                Error::new(ErrorKind::Unsupported, message).remedy("update the driver, or compile them for this GPU")
            }
            _ => failed(format!("load the kernels from {origin}"), error),
        })?;
        let find = |kernel: &str| find(&module, origin, kernel);
        find(INTERFACE)?;
        let loaded = Loaded {
            adamw: find("train_adamw")?,
            sgd: find("train_sgd")?,
            narrow: find("train_narrow")?,
            add: [find("train_add_f32")?, find("train_add_bf16")?],
            squares: [find("train_squares_f32")?, find("train_squares_bf16")?],
            name,
            stream,
        };
        Ok(Self { loaded: Arc::new(loaded) })
    }

    /// The kernels for the pages of a runtime, where blocks have so many positions.
    pub(crate) fn adopt(&self, runtime: &Runtime, block: u64) -> Result<OnGpu> {
        let stream = &self.loaded.stream;
        // SAFETY: `OnGpu` has the kernels, which own the stream, and drops the adopted one first. No clone leaves it.
        let adopted = unsafe { runtime.adopt_stream(RawStream::new(stream.cu_stream().cast())) }
            .map_err(|error| error.context("have the kernels of updates on the runtime's device"))?;
        let chunks = block as usize / CHUNK + 2;
        let context = stream.context();
        // SAFETY: what is read of them was written before: values by the host and a copy, sums by a kernel and a copy.
        let taken = unsafe {
            (
                stream.alloc(STAGED),
                stream.alloc(chunks),
                context.alloc_pinned_with_flags(STAGED, 0),
                context.alloc_pinned_with_flags(chunks, 0),
            )
        };
        let staging = Staging {
            values: taken.0.map_err(|e| failed("take GPU memory for gradients on their way", e))?,
            sums: taken.1.map_err(|e| failed("take GPU memory for sums", e))?,
            values_of_host: taken.2.map_err(|e| failed("take locked host memory for gradients on their way", e))?,
            sums_of_host: taken.3.map_err(|e| failed("take locked host memory for sums", e))?,
        };
        Ok(OnGpu { adopted, staging: Mutex::new(staging), kernels: self.clone() })
    }
}

/// The kernel `name` of a module that comes from `origin`.
fn find(module: &Arc<CudaModule>, origin: &str, name: &str) -> Result<CudaFunction> {
    module.load_function(name).map_err(|error| match error.0 {
        CUresult::CUDA_ERROR_NOT_FOUND => {
            Error::new(ErrorKind::Unsupported, format!("there is no kernel {name} in {origin}"))
                .remedy("compile the kernels of this version of the crate")
        }
        _ => failed(format!("find the kernel {name} in {origin}"), error),
    })
}

/// The kernels for the pages of a runtime.
#[derive(Debug)]
pub(crate) struct OnGpu {
    adopted: ComputeStream,
    staging: Mutex<Staging>,
    kernels: CudaKernels,
}

#[derive(Debug)]
struct Staging {
    values: CudaSlice<f32>,
    sums: CudaSlice<f64>,
    /// The same in locked host memory: the driver copies no other without waiting. Nothing is on its way from or to
    /// these when the lock is free.
    values_of_host: PinnedHostSlice<f32>,
    sums_of_host: PinnedHostSlice<f64>,
}

/// `struct Gradients` of `kernels.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct RawGradients {
    at: u64,
    count: u64,
    narrow: u32,
    factor: f32,
}

/// `struct Adamw` of `kernels.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct RawAdamW {
    p: u64,
    m: u64,
    v: u64,
    working: u64,
    kept: f32,
    weight: f32,
    second: f32,
    weight_of_square: f32,
    size: f32,
    root: f32,
    epsilon: f32,
    padding: u32,
}

/// `struct Sgd` of `kernels.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct RawSgd {
    p: u64,
    b: u64,
    working: u64,
    rate: f32,
    decay: f32,
    momentum: f32,
    padding: u32,
}

// SAFETY: plain numbers without padding that has no name, laid out as the kernels' structures; this module keeps both
// alike.
unsafe impl DeviceRepr for RawGradients {}
// SAFETY: as above.
unsafe impl DeviceRepr for RawAdamW {}
// SAFETY: as above.
unsafe impl DeviceRepr for RawSgd {}

/// Bytes of a pinned tensor.
#[derive(Clone, Copy)]
struct Place(DeviceBytes);

impl Place {
    /// The `index`th tensor of a pin.
    fn of(bytes: Option<DeviceBytes>) -> Result<Self> {
        bytes.map(Self).ok_or_else(|| other_sizes("a pin lacks a tensor"))
    }

    /// The address of so many elements of `size` bytes from the `first` on.
    fn at(self, first: u64, elements: u64, size: u64) -> Result<u64> {
        let end = first.checked_add(elements).and_then(|end| end.checked_mul(size));
        match end {
            Some(end) if end <= self.0.len.get() => Ok(self.0.address.get() + first * size),
            _ => Err(other_sizes("a tensor has fewer elements than a kernel would access")),
        }
    }
}

fn other_sizes(what: &str) -> Error {
    Error::new(ErrorKind::Internal, what).remedy("report this as a bug")
}

/// Which kernel of two it is, and the bytes of an element.
fn kind_of(dtype: DType) -> (usize, u64) {
    if dtype == DType::BF16 { (1, 2) } else { (0, 4) }
}

/// Blocks of a kernel whose lanes go on to further elements.
fn blocks_for(elements: u64) -> u64 {
    elements.div_ceil(u64::from(THREADS)).min(BLOCKS)
}

/// A use of the stream. When it ends, everything that was put on the stream has ended, and the context that was current
/// on the thread before is so again.
struct Work<'a> {
    gpu: &'a OnGpu,
    before: Option<CUcontext>,
    has_launched: bool,
    has_finished: bool,
}

impl<'a> Work<'a> {
    fn begin(gpu: &'a OnGpu) -> Result<Self> {
        let refused = |e| failed("use the GPU", e);
        let before = result::ctx::get_current().map_err(refused)?;
        let work = Self { gpu, before, has_launched: false, has_finished: false };
        gpu.stream().context().bind_to_thread().map_err(refused)?;
        Ok(work)
    }

    fn stream(&self) -> &'a Arc<CudaStream> {
        self.gpu.stream()
    }

    fn loaded(&self) -> &'a Loaded {
        &self.gpu.kernels.loaded
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// The arguments are what the kernel's source declares, and their addresses are of memory of the sizes that the
    /// kernel accesses. It stays, and nobody else accesses it, before this work ends.
    unsafe fn launch(&mut self, what: &str, launch: &mut LaunchArgs<'_>, blocks: u64) -> Result<()> {
        let blocks = u32::try_from(blocks.max(1)).map_err(|_| other_sizes("a launch has too many blocks"))?;
        let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the caller's promise.
        unsafe { launch.launch(config) }.map_err(|e| failed(what, e))?;
        self.has_launched = true;
        Ok(())
    }

    /// Waits for what is on the stream.
    fn wait(&mut self) -> Result<()> {
        self.gpu.adopted.synchronize()?;
        self.has_finished = true;
        Ok(())
    }

    /// Waits, and says how it went: the error of what was launched comes first.
    fn end(&mut self, launched: Result<()>) -> Result<(), Failed> {
        let finished = self.wait();
        launched.and(finished).map_err(|error| Failed { error, has_changed: self.has_launched })
    }
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        // A panic, or a runtime that does not wait any more: it was closed.
        if !self.has_finished {
            // SAFETY: the stream lives as long as its kernels. It fails if the GPU is lost: then nothing runs on it.
            let _ = unsafe { result::stream::synchronize(self.stream().cu_stream()) };
        }
        let before = self.before.unwrap_or(std::ptr::null_mut());
        if before != self.stream().context().cu_ctx() {
            // SAFETY: it was the thread's before, and whoever made it current keeps it.
            let _ = unsafe { result::ctx::set_current(before) };
        }
    }
}

impl Work<'_> {
    fn update(
        &mut self,
        part: &UpdatedPart,
        pins: &DevicePin<Write>,
        gradients: GradientsOnDevice<'_>,
        working: Option<Place>,
    ) -> Result<()> {
        let UpdatedPart { rule, at, first, offset, elements } = *part;
        let (narrow, size) = kind_of(gradients.dtype);
        let read = gradients.pin.map(|pin| Place::of(pin.device_bytes(0))?.at(offset, elements, size)).transpose()?;
        let gradients =
            RawGradients { at: read.unwrap_or(0), count: elements, narrow: narrow as u32, factor: gradients.factor };
        let kept = |number: usize| Place::of(pins.device_bytes(first + number))?.at(0, elements, 4);
        let working = working.map(|working| working.at(offset, elements, 2)).transpose()?.unwrap_or(0);
        let (loaded, blocks) = (self.loaded(), blocks_for(elements));
        match rule {
            DeviceRule::AdamW(rule) => {
                let f = rule.factors(at);
                let raw = RawAdamW {
                    p: kept(0)?,
                    m: kept(1)?,
                    v: kept(2)?,
                    working,
                    kept: f.kept,
                    weight: f.weight,
                    second: f.second,
                    weight_of_square: f.weight_of_square,
                    size: f.size,
                    root: f.root,
                    epsilon: f.epsilon,
                    padding: 0,
                };
                let mut launch = self.stream().launch_builder(&loaded.adamw);
                launch.arg(&raw).arg(&gradients);
                // SAFETY: the kernel's parameters. Each address is of as many elements of a pinned tensor, which the
                // caller keeps pinned until this work has ended, to write where the kernel does.
                unsafe { self.launch("update by AdamW", &mut launch, blocks) }
            }
            DeviceRule::Sgd(rule) => {
                let raw = RawSgd {
                    p: kept(0)?,
                    b: if rule.momentum == 0.0 { 0 } else { kept(1)? },
                    working,
                    rate: at.rate as f32,
                    decay: rule.weight_decay as f32,
                    momentum: rule.momentum as f32,
                    padding: 0,
                };
                let mut launch = self.stream().launch_builder(&loaded.sgd);
                launch.arg(&raw).arg(&gradients);
                // SAFETY: as above.
                unsafe { self.launch("update by SGD", &mut launch, blocks) }
            }
        }
    }

    fn narrow(&mut self, part: &CopiedPart, from: Place, to: Place) -> Result<()> {
        let count = part.positions.end - part.positions.start;
        let from = from.at(0, count, 4)?;
        let to = to.at(part.positions.start, count, 2)?;
        let mut launch = self.stream().launch_builder(&self.loaded().narrow);
        launch.arg(&from).arg(&to).arg(&count);
        // SAFETY: the kernel's parameters; both tensors have as many elements, and the caller keeps them pinned until
        // this work has ended.
        unsafe { self.launch("make a working copy", &mut launch, blocks_for(count)) }
    }

    fn add(
        &mut self,
        gradients: Place,
        dtype: DType,
        added: &Added<'_>,
        chunks: usize,
        staging: &mut Staging,
    ) -> Result<()> {
        let (kind, size) = kind_of(dtype);
        let (loaded, stream) = (self.loaded(), self.stream());
        let locked = |e| failed("use locked host memory", e);
        let values_at = staging.values.device_ptr_mut(stream).0;
        for (number, values) in added.values.chunks(STAGED).enumerate() {
            if number > 0 {
                self.wait()?;
                self.has_finished = false;
            }
            let staged = &mut staging.values_of_host.as_mut_slice().map_err(locked)?[..values.len()];
            staged.copy_from_slice(values);
            // SAFETY: there is room for as many values. Nobody writes to the locked ones before the stream has been
            // waited for, here or by the caller.
            unsafe { result::memcpy_htod_async(values_at, staged, stream.cu_stream()) }
                .map_err(|e| failed("copy gradients to the GPU", e))?;
            let count = values.len() as u64;
            let to = gradients.at((added.first + number * STAGED) as u64, count, size)?;
            let mut launch = stream.launch_builder(&loaded.add[kind]);
            launch.arg(&to).arg(&values_at).arg(&count).arg(&added.factor);
            // SAFETY: the kernel's parameters. The caller keeps the gradients pinned to write, and the staged values
            // locked, until this work has ended.
            unsafe { self.launch("add gradients", &mut launch, blocks_for(count)) }?;
        }
        let (count, head) = (added.whole.len() as u64, added.head as u32);
        let from = gradients.at(added.whole.start as u64, count, size)?;
        if chunks > staging.sums.len() {
            return Err(other_sizes("a block has more sums than there is room for"));
        }
        let sums_at = staging.sums.device_ptr_mut(stream).0;
        let mut launch = stream.launch_builder(&loaded.squares[kind]);
        launch.arg(&from).arg(&sums_at).arg(&count).arg(&head);
        let lanes = (chunks * PARTIAL) as u64;
        // SAFETY: the kernel's parameters. It writes as many sums as `count` and `head` make chunks, for which there is
        // room.
        unsafe { self.launch("sum up squares", &mut launch, lanes.div_ceil(u64::from(THREADS))) }?;
        let sums = &mut staging.sums_of_host.as_mut_slice().map_err(locked)?[..chunks];
        // SAFETY: the kernel before writes as many, and the caller waits for the stream before it reads them.
        unsafe { result::memcpy_dtoh_async(sums, sums_at, stream.cu_stream()) }
            .map_err(|e| failed("copy sums from the GPU", e))
    }
}

/// Makes the context current: cudarc frees memory and unloads modules in whichever is.
fn bind(stream: &CudaStream) {
    // SAFETY: the stream keeps its context.
    let _ = unsafe { result::ctx::set_current(stream.context().cu_ctx()) };
}

impl Drop for Loaded {
    fn drop(&mut self) {
        bind(&self.stream);
    }
}

impl Drop for OnGpu {
    fn drop(&mut self) {
        bind(self.stream());
    }
}

impl OnGpu {
    fn stream(&self) -> &Arc<CudaStream> {
        &self.kernels.loaded.stream
    }
}

impl OnDevice for OnGpu {
    fn update(
        &self,
        parts: &[UpdatedPart],
        pins: &mut DevicePin<Write>,
        gradients: GradientsOnDevice<'_>,
        has_working_copy: bool,
    ) -> Result<(), Failed> {
        let last = pins.count().checked_sub(1).filter(|_| has_working_copy);
        let working = last.map(|last| Place::of(pins.device_bytes(last))).transpose()?;
        let mut work = Work::begin(self)?;
        let launched = parts.iter().try_for_each(|part| work.update(part, pins, gradients, working));
        work.end(launched)
    }

    fn narrow(&self, parts: &[CopiedPart], from: &DevicePin<Read>, to: &mut DevicePin<Write>) -> Result<()> {
        let to = Place::of(to.device_bytes(0))?;
        let mut work = Work::begin(self)?;
        let launched = parts
            .iter()
            .enumerate()
            .try_for_each(|(index, part)| work.narrow(part, Place::of(from.device_bytes(index))?, to));
        Ok(work.end(launched)?)
    }

    fn clear(&self, gradients: &mut DevicePin<Write>) -> Result<()> {
        let Place(DeviceBytes { address, len }) = Place::of(gradients.device_bytes(0))?;
        let mut work = Work::begin(self)?;
        // SAFETY: as many bytes are pinned there to write until the work has ended.
        let cleared =
            unsafe { result::memset_d8_async(address.get(), 0, len.get() as usize, self.stream().cu_stream()) };
        Ok(work.end(cleared.map_err(|e| failed("clear gradients", e)))?)
    }

    fn add(
        &self,
        gradients: &mut DevicePin<Write>,
        dtype: DType,
        added: &Added<'_>,
        sums: &mut [f64],
    ) -> Result<(), Failed> {
        let gradients = Place::of(gradients.device_bytes(0))?;
        // The work ends before the lock is free: nothing may be on its way from or to the staging then.
        let mut staging = self.staging.lock();
        let mut work = Work::begin(self)?;
        let launched = work.add(gradients, dtype, added, sums.len(), &mut staging);
        work.end(launched)?;
        let of_host = staging.sums_of_host.as_slice();
        let of_host = of_host.map_err(|e| Failed { error: failed("use locked host memory", e), has_changed: true })?;
        sums.copy_from_slice(&of_host[..sums.len()]);
        Ok(())
    }
}
