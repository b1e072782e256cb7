//! The calls of the CUDA driver that the device makes, each checked and named in its error. cudarc's types stay within
//! this file.
//!
//! # Invariants
//!
//! 1. Nothing of cudarc is called before [`load`] has found the driver's library and [`require`] the functions that are
//!    used: cudarc panics where one is missing.
//! 2. Every call that needs a context is made with the device's own context current ([`Context::enter`]), and the
//!    caller's current context is restored afterwards. So is the caller's capture mode: while somebody captures a
//!    graph, calls from other threads may be forbidden and spoil the capture, unless the calling thread has set the
//!    relaxed mode.
//! 3. Handles are destroyed once, by their owner, after everything that uses them has ended.

use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::sync::OnceLock;

use cudarc::driver::sys::CUresult;
use cudarc::driver::{DriverError, result, sys};

use outcore::device::{DeviceAddress, HostPointer, RawStream};
use outcore::{Bytes, Error, ErrorKind, Result, machine};

use crate::select::{CudaDeviceInfo, CudaDeviceSelector};

/// CUDA 12.0. It has every function used here; older drivers were not examined.
const OLDEST_DRIVER: i32 = 12000;
/// CUDA 12.2: since then the driver tells which node of host memory is nearest.
const NUMA_DRIVER: i32 = 12020;
/// CUDA 13.0: since then one call can carry several copies, in the form used here.
const BATCHES_DRIVER: (u32, u32) = (13, 0);

/// An error of the driver during `what`.
pub(crate) fn failed(what: impl Into<String>, error: DriverError) -> Error {
    let kind = match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => ErrorKind::OutOfMemory,
        CUresult::CUDA_ERROR_NO_DEVICE | CUresult::CUDA_ERROR_INVALID_DEVICE => ErrorKind::NotFound,
        CUresult::CUDA_ERROR_NOT_SUPPORTED
        | CUresult::CUDA_ERROR_STUB_LIBRARY
        | CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        | CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => ErrorKind::Unsupported,
        CUresult::CUDA_ERROR_NOT_PERMITTED | CUresult::CUDA_ERROR_OPERATING_SYSTEM => ErrorKind::PermissionDenied,
        _ => ErrorKind::Device,
    };
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
    let message = format!("{}: {:?} ({text})", what.into(), error.0);
    let remedy = match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => "choose a smaller device budget, or end what else uses the GPU's memory",
        CUresult::CUDA_ERROR_NO_DEVICE => "check that the GPU is visible here (nvidia-smi, CUDA_VISIBLE_DEVICES)",
        CUresult::CUDA_ERROR_STUB_LIBRARY => "a stub libcuda.so comes before the driver's own: check LD_LIBRARY_PATH",
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "the driver's library and kernel module differ: reboot or reinstall"
        }
        CUresult::CUDA_ERROR_NOT_SUPPORTED => {
            "install a newer NVIDIA driver; if that does not help, this GPU or its mode lacks it: use the host device"
        }
        CUresult::CUDA_ERROR_NOT_PERMITTED | CUresult::CUDA_ERROR_OPERATING_SYSTEM => {
            "check this process's rights and limits (the GPU's device files, `ulimit -l`)"
        }
        _ => "look for the driver's own account in the kernel log (Xid)",
    };
    Error::new(kind, message).remedy(remedy)
}

/// Whether an error means that the context is lost: every later call would return an error too.
fn is_fatal(error: DriverError) -> bool {
    use CUresult as R;
    matches!(
        error.0,
        R::CUDA_ERROR_DEINITIALIZED
            | R::CUDA_ERROR_ECC_UNCORRECTABLE
            | R::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | R::CUDA_ERROR_ILLEGAL_ADDRESS
            | R::CUDA_ERROR_LAUNCH_TIMEOUT
            | R::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | R::CUDA_ERROR_ASSERT
            | R::CUDA_ERROR_HARDWARE_STACK_ERROR
            | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | R::CUDA_ERROR_MISALIGNED_ADDRESS
            | R::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | R::CUDA_ERROR_INVALID_PC
            | R::CUDA_ERROR_LAUNCH_FAILED
            | R::CUDA_ERROR_DEVICE_UNAVAILABLE
            | R::CUDA_ERROR_MPS_CLIENT_TERMINATED
            | R::CUDA_ERROR_EXTERNAL_DEVICE
    )
}

/// Whether an error is about a capture into a graph. It says nothing about the device; a call that ends with it has
/// done nothing.
fn is_of_capture(error: DriverError) -> bool {
    use CUresult as R;
    matches!(
        error.0,
        R::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            | R::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            | R::CUDA_ERROR_STREAM_CAPTURE_MERGE
            | R::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
            | R::CUDA_ERROR_STREAM_CAPTURE_UNJOINED
            | R::CUDA_ERROR_STREAM_CAPTURE_ISOLATION
            | R::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
            | R::CUDA_ERROR_CAPTURED_EVENT
            | R::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
    )
}

static LIBRARY: OnceLock<Handle<c_void>> = OnceLock::new();

/// Whether the driver's library has a function. cudarc panics if a missing one is called.
fn has_function(name: &CStr) -> bool {
    // SAFETY: the handle is that of a library that is never closed, and the name is a C string.
    LIBRARY.get().is_some_and(|library| !unsafe { libc::dlsym(library.0, name.as_ptr()) }.is_null())
}

/// The functions that are called before the driver's version is known, and for the texts of errors.
const NEEDED_FIRST: [&CStr; 3] = [c"cuInit", c"cuDriverGetVersion", c"cuGetErrorString"];

/// Every other function that is called here, also by cudarc's functions. Only `cuMemcpyBatchAsync_v2` is not among
/// them: it is looked for where it would be used.
const NEEDED: [&CStr; 42] = [
    c"cuCtxGetStreamPriorityRange",
    c"cuCtxPopCurrent_v2",
    c"cuCtxPushCurrent_v2",
    c"cuCtxSynchronize",
    c"cuDeviceGet",
    c"cuDeviceGetAttribute",
    c"cuDeviceGetCount",
    c"cuDeviceGetName",
    c"cuDeviceGetPCIBusId",
    c"cuDeviceGetUuid_v2",
    c"cuDevicePrimaryCtxRelease_v2",
    c"cuDevicePrimaryCtxRetain",
    c"cuDeviceTotalMem_v2",
    c"cuEventCreate",
    c"cuEventDestroy_v2",
    c"cuEventQuery",
    c"cuEventRecord",
    c"cuEventSynchronize",
    c"cuLaunchHostFunc",
    c"cuMemAddressFree",
    c"cuMemAddressReserve",
    c"cuMemCreate",
    c"cuMemFreeHost",
    c"cuMemGetAllocationGranularity",
    c"cuMemGetInfo_v2",
    c"cuMemHostAlloc",
    c"cuMemHostRegister_v2",
    c"cuMemHostUnregister",
    c"cuMemMap",
    c"cuMemRelease",
    c"cuMemSetAccess",
    c"cuMemUnmap",
    c"cuMemcpyDtoHAsync_v2",
    c"cuMemcpyHtoDAsync_v2",
    c"cuMemsetD8Async",
    c"cuStreamCreateWithPriority",
    c"cuStreamDestroy_v2",
    c"cuStreamGetCtx",
    c"cuStreamIsCapturing",
    c"cuStreamSynchronize",
    c"cuStreamWaitEvent",
    c"cuThreadExchangeStreamCaptureMode",
];

/// # Errors
/// [`ErrorKind::Unsupported`] if one of the functions is missing.
fn require(functions: &[&CStr], is_there: impl Fn(&CStr) -> bool) -> Result<()> {
    let Some(missing) = functions.iter().find(|name| !is_there(name)) else { return Ok(()) };
    let message = format!("the CUDA driver's library has no function {}", missing.to_string_lossy());
    Err(Error::new(ErrorKind::Unsupported, message).remedy(
        "check that the libcuda.so that is found first (LD_LIBRARY_PATH) is the NVIDIA driver's own, and install a \
         newer driver if it is",
    ))
}

/// Loads the driver's library, once; it stays loaded.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if there is none.
fn load() -> Result<()> {
    if LIBRARY.get().is_some() {
        return Ok(());
    }
    // The names that cudarc looks for, in its order. Its own check does not exist where another crate links the
    // library.
    let names =
        [c"libcuda.so", c"libcuda.so.13", c"libcuda.so.12", c"libcuda.so.11", c"libcuda.so.10", c"libcuda.so.1"];
    for name in names {
        // SAFETY: the name is a C string. The driver's initialisers are trusted as the driver is.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if !library.is_null() {
            // Never closed: cudarc keeps addresses of its functions.
            let _ = LIBRARY.set(Handle(library));
            return Ok(());
        }
    }
    Err(Error::new(ErrorKind::Unsupported, "there is no CUDA driver here: libcuda.so.1 cannot be loaded")
        .remedy("install the NVIDIA driver (in a container: start it with the GPU), or use the host device"))
}

/// Starts the driver, and checks that it is new enough and has all functions.
fn start() -> Result<i32> {
    load()?;
    require(&NEEDED_FIRST, has_function)?;
    result::init().map_err(|error| failed("start the CUDA driver", error))?;
    let mut version = 0;
    // SAFETY: `version` is a valid place for the result.
    let outcome = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    outcome.result().map_err(|error| failed("ask for the CUDA driver's version", error))?;
    if version < OLDEST_DRIVER {
        let dotted = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
        let message = format!("the NVIDIA driver is too old: it supports CUDA {}", dotted(version));
        return Err(Error::new(ErrorKind::Unsupported, message)
            .remedy(format!("install one that supports CUDA {} or newer", dotted(OLDEST_DRIVER))));
    }
    require(&NEEDED, has_function)?;
    Ok(version)
}

/// The GPUs of this machine.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if there is no driver, or it is too old; [`ErrorKind::NotFound`] if there is no GPU;
/// other errors of the driver.
pub fn cuda_devices() -> Result<Vec<CudaDeviceInfo>> {
    let version = start()?;
    let count = result::device::get_count().map_err(|error| failed("count the GPUs", error))?;
    (0..count).map(|ordinal| info(ordinal, version)).collect()
}

fn info(ordinal: i32, version: i32) -> Result<CudaDeviceInfo> {
    use sys::CUdevice_attribute as A;
    let about = |what: &str| format!("ask for the {what} of GPU {ordinal}");
    let device = result::device::get(ordinal).map_err(|error| failed(format!("open GPU {ordinal}"), error))?;
    let attribute = |which: A, what: &str| {
        // SAFETY: `device` is the driver's.
        unsafe { result::device::get_attribute(device, which) }.map_err(|error| failed(about(what), error))
    };
    let uuid = result::device::get_uuid(device).map_err(|error| failed(about("UUID"), error))?;
    let digits: String = uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    let mut pci = [0_u8; 32];
    // SAFETY: the buffer has the given length.
    let outcome = unsafe { sys::cuDeviceGetPCIBusId(pci.as_mut_ptr().cast(), pci.len() as i32, device) };
    outcome.result().map_err(|error| failed(about("PCI address"), error))?;
    let pci = pci.split(|byte| *byte == 0).next().unwrap_or_default();
    // SAFETY: `device` is the driver's.
    let memory = unsafe { result::device::total_mem(device) }.map_err(|error| failed(about("memory"), error))?;
    let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, "compute capability")?;
    let minor = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, "compute capability")?;
    let pci = String::from_utf8_lossy(pci).to_ascii_lowercase();
    // An older driver cannot answer this; the kernel may. Only speed depends on it.
    let node = if version >= NUMA_DRIVER { attribute(A::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, "node").ok() } else { None };
    let numa_node = node.and_then(|node| u32::try_from(node).ok());
    Ok(CudaDeviceInfo {
        ordinal: ordinal as u32,
        name: result::device::get_name(device).map_err(|error| failed(about("name"), error))?,
        uuid: format!(
            "GPU-{}-{}-{}-{}-{}",
            &digits[..8],
            &digits[8..12],
            &digits[12..16],
            &digits[16..20],
            &digits[20..]
        ),
        numa_node: numa_node.or_else(|| machine::numa_node_of(&pci)),
        pci,
        memory: Bytes::new(memory as u64),
        capability: (major as u32, minor as u32),
        virtual_memory: attribute(
            A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            "virtual memory management",
        )? != 0,
        driver: (version as u32 / 1000, version as u32 % 1000 / 10),
    })
}

/// The GPU that a selector names.
///
/// # Errors
/// As [`cuda_devices`]; [`ErrorKind::NotFound`] if there is no such GPU.
pub fn cuda_device(selector: &CudaDeviceSelector) -> Result<CudaDeviceInfo> {
    let mut found = cuda_devices()?;
    if let Some(at) = found.iter().position(|gpu| selector.means(gpu)) {
        return Ok(found.swap_remove(at));
    }
    let there: Vec<_> = found.iter().map(|gpu| format!("{} ({}, {})", gpu.ordinal, gpu.uuid, gpu.pci)).collect();
    let message = format!("there is no GPU {selector}: the CUDA driver sees {}", there.join(", "));
    let remedy = if matches!(selector, CudaDeviceSelector::Uuid(uuid) if uuid.starts_with("MIG")) {
        format!("a process sees only instances that CUDA_VISIBLE_DEVICES names: set it to {selector} before the start")
    } else {
        "name one of those, and check CUDA_VISIBLE_DEVICES, which can hide others".to_owned()
    };
    Err(Error::new(ErrorKind::NotFound, message).remedy(remedy))
}

/// A handle of the driver.
#[derive(Debug)]
struct Handle<T>(*mut T);

// SAFETY: the driver's handles are opaque, and its functions may be called from any thread; owners ensure invariant 3.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

/// A stream of the driver; destroyed by [`Context::destroy_stream`] if it was made here.
#[derive(Debug)]
pub(crate) struct StreamHandle(Handle<sys::CUstream_st>);

impl StreamHandle {
    pub(crate) fn raw(&self) -> RawStream {
        RawStream::new(self.0.0.cast())
    }
}

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD_STREAM: usize = 2;

/// An event of the driver, without a time; destroyed by [`Context::destroy_event`].
#[derive(Debug)]
pub(crate) struct EventHandle(Handle<sys::CUevent_st>);

/// Page-locked memory; freed by [`Context::free_locked`].
#[derive(Debug)]
pub(crate) struct Locked {
    pub(crate) base: HostPointer,
}

/// While this lives, a context is current on this thread, and captures of graphs do not limit its calls.
#[must_use]
pub(crate) struct Current<'a> {
    /// The thread's own capture mode, if it was changed.
    mode: Option<sys::CUstreamCaptureMode>,
    stays: PhantomData<(&'a Context, *const ())>,
}

/// Sets this thread's capture mode; returns the earlier one.
fn exchange_capture_mode(mut mode: sys::CUstreamCaptureMode) -> Outcome<sys::CUstreamCaptureMode> {
    // SAFETY: `mode` is a value of the type asked for, and a place for the result.
    let outcome = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    named("set the thread's mode of capture", outcome.result())?;
    Ok(mode)
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Some(Err(failure)) = self.mode.map(exchange_capture_mode) {
            tracing::debug!(error = %failure.error);
        }
        let mut popped = std::ptr::null_mut();
        // SAFETY: `enter` pushed a context on this thread, which this value has not left; `popped` is a place for it.
        let outcome = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
        if let Err(error) = outcome.result() {
            tracing::debug!(error = %failed("restore the current CUDA context", error));
        }
    }
}

/// One of several copies between locked host memory and the device, by unified addresses. Lengths are in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchedCopy {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) len: u64,
}

/// The primary context of one GPU, which frameworks use too.
#[derive(Debug)]
pub(crate) struct Context {
    device: sys::CUdevice,
    batches: bool,
    raw: Handle<sys::CUctx_st>,
    prop: sys::CUmemAllocationProp,
}

// SAFETY: the pointer in `prop` is null and stays so.
unsafe impl Send for Context {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained in `open`, released once.
        if let Err(error) = unsafe { result::primary_ctx::release(self.device) } {
            tracing::debug!(error = %failed("release the CUDA context", error));
        }
    }
}

type Call<T = ()> = std::result::Result<T, DriverError>;

/// The failure of a call of the driver.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) error: Error,
    /// The device is lost.
    pub(crate) fatal: bool,
    /// A capture forbids the call, or the call asks about something captured.
    pub(crate) captured: bool,
}

impl Failure {
    fn of(what: impl Into<String>, error: DriverError) -> Self {
        Self { fatal: is_fatal(error), captured: is_of_capture(error), error: failed(what, error) }
    }

    /// The failure for not waiting for a stream that is being captured, because the wait would spoil the capture.
    pub(crate) fn captured(error: Error) -> Self {
        Self { error, fatal: false, captured: true }
    }
}

/// A refusal of this crate's, not of the driver's.
impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, fatal: false, captured: false }
    }
}

pub(crate) type Outcome<T = ()> = std::result::Result<T, Failure>;

fn named<T>(what: &str, outcome: Call<T>) -> Outcome<T> {
    outcome.map_err(|error| Failure::of(what, error))
}

impl Context {
    /// Retains the primary context of GPU `ordinal`.
    pub(crate) fn open(gpu: &CudaDeviceInfo) -> Result<Self> {
        let ordinal = gpu.ordinal;
        let open = |error| failed(format!("open GPU {ordinal}"), error);
        let device = result::device::get(ordinal as i32).map_err(open)?;
        // SAFETY: `device` is the driver's; `Drop` releases.
        let raw = unsafe { result::primary_ctx::retain(device) }.map_err(open)?;
        let location = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device };
        let prop = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location,
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let batches = gpu.driver >= BATCHES_DRIVER && has_function(c"cuMemcpyBatchAsync_v2");
        Ok(Self { device, batches, raw: Handle(raw), prop })
    }

    /// Makes the context current on this thread.
    pub(crate) fn enter(&self) -> Outcome<Current<'_>> {
        // SAFETY: the context lives as long as `self`. The returned value, which stays on this thread, pops it.
        named("enter the CUDA context", unsafe { sys::cuCtxPushCurrent_v2(self.raw.0) }.result())?;
        let mut current = Current { mode: None, stays: PhantomData };
        current.mode = Some(exchange_capture_mode(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?);
        Ok(current)
    }

    pub(crate) fn granularity(&self, _: &Current<'_>) -> Outcome<u64> {
        let mut bytes = 0;
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: both pointers are to values of the types asked for.
        let outcome = unsafe { sys::cuMemGetAllocationGranularity(&raw mut bytes, &raw const self.prop, minimum) };
        named("ask for the allocation granularity", outcome.result())?;
        Ok(bytes as u64)
    }

    /// Free and total bytes.
    pub(crate) fn memory(&self, _: &Current<'_>) -> Outcome<(u64, u64)> {
        let (free, total) = named("ask for the GPU's free memory", result::mem_get_info())?;
        Ok((free as u64, total as u64))
    }

    // Virtual memory. These calls concern only device addresses, which are no memory of this program.

    pub(crate) fn reserve(&self, _: &Current<'_>, len: u64, align: u64) -> Outcome<u64> {
        let mut base = 0;
        // SAFETY: `base` is a place for the result.
        let outcome = unsafe { sys::cuMemAddressReserve(&raw mut base, len as usize, align as usize, 0, 0) };
        named("reserve device addresses", outcome.result())?;
        Ok(base)
    }
    pub(crate) fn free_addresses(&self, _: &Current<'_>, base: u64, len: u64) -> Outcome {
        // SAFETY: concerns device addresses only; a wrong range is refused.
        named("free device addresses", unsafe { sys::cuMemAddressFree(base, len as usize) }.result())
    }
    pub(crate) fn create(&self, _: &Current<'_>, len: u64) -> Outcome<u64> {
        let mut handle = 0;
        // SAFETY: `handle` is a place for the result, and `prop` describes the memory.
        let outcome = unsafe { sys::cuMemCreate(&raw mut handle, len as usize, &raw const self.prop, 0) };
        named("take memory of the GPU", outcome.result())?;
        Ok(handle)
    }
    pub(crate) fn release(&self, _: &Current<'_>, handle: u64) -> Outcome {
        // SAFETY: concerns device memory only; a wrong handle is refused.
        named("give memory of the GPU back", unsafe { sys::cuMemRelease(handle) }.result())
    }
    pub(crate) fn map(&self, _: &Current<'_>, address: u64, len: u64, handle: u64) -> Outcome {
        // SAFETY: concerns device addresses only; a wrong range or handle is refused.
        named("map memory of the GPU", unsafe { sys::cuMemMap(address, len as usize, 0, handle, 0) }.result())
    }
    pub(crate) fn allow_access(&self, _: &Current<'_>, address: u64, len: u64) -> Outcome {
        let access = sys::CUmemAccessDesc {
            location: self.prop.location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: one description is passed; otherwise this concerns device addresses only.
        let outcome = unsafe { sys::cuMemSetAccess(address, len as usize, &raw const access, 1) };
        named("allow the GPU access to its memory", outcome.result())
    }
    pub(crate) fn unmap(&self, _: &Current<'_>, address: u64, len: u64) -> Outcome {
        // SAFETY: concerns device addresses only; a wrong range is refused.
        named("unmap memory of the GPU", unsafe { sys::cuMemUnmap(address, len as usize) }.result())
    }

    // Host memory.

    pub(crate) fn lock(&self, _: &Current<'_>, base: HostPointer, len: u64) -> Outcome {
        // SAFETY: the maker of the pointer promises that the memory stays until it is unlocked (`Device::lock_host`).
        let outcome = unsafe { sys::cuMemHostRegister_v2(base.as_ptr().cast(), len as usize, 0) };
        named("lock host memory for the GPU", outcome.result())
    }
    pub(crate) fn unlock(&self, _: &Current<'_>, base: HostPointer) -> Outcome {
        // SAFETY: the caller of `Device::unlock_host` promises that no operation uses it.
        let outcome = unsafe { sys::cuMemHostUnregister(base.as_ptr().cast()) };
        named("unlock host memory", outcome.result())
    }
    pub(crate) fn alloc_locked(&self, _: &Current<'_>, len: usize) -> Outcome<Locked> {
        // SAFETY: asks for new memory. No flags, because the CPU reads it too.
        let base = named("take locked host memory", unsafe { result::malloc_host(len, 0) })?;
        let Some(base) = std::ptr::NonNull::new(base.cast()) else {
            return named("take locked host memory", Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)));
        };
        // SAFETY: the memory is freed after the last operation on its stream has ended.
        Ok(Locked { base: unsafe { HostPointer::new(base) } })
    }
    pub(crate) fn free_locked(&self, _: &Current<'_>, memory: Locked) -> Outcome {
        // SAFETY: `alloc_locked` made it, it is consumed, and its stream is idle.
        named("free locked host memory", unsafe { result::free_host(memory.base.as_ptr().cast()) })
    }

    // Streams and events.

    /// The lowest and the highest priority of a stream.
    pub(crate) fn priorities(&self, _: &Current<'_>) -> Outcome<(i32, i32)> {
        named("ask for stream priorities", result::stream::get_priority_range())
    }
    pub(crate) fn create_stream(&self, _: &Current<'_>, priority: i32) -> Outcome<StreamHandle> {
        let kind = result::stream::StreamKind::NonBlocking;
        let raw = named("create a CUDA stream", result::stream::create_with_priority(kind, priority))?;
        Ok(StreamHandle(Handle(raw)))
    }
    /// A stream that somebody else made.
    ///
    /// # Safety
    /// The handle is that of a stream, and stays valid as long as the returned value is used.
    pub(crate) unsafe fn adopt_stream(&self, _: &Current<'_>, raw: RawStream) -> Outcome<StreamHandle> {
        let stream: sys::CUstream = raw.as_ptr().cast();
        if raw.as_ptr() as usize == PER_THREAD_STREAM {
            let message = "the per-thread default stream is another one on each thread, so it cannot be adopted";
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("create a stream").into());
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: the caller's promise; `context` is a place for the result.
        let outcome = unsafe { sys::cuStreamGetCtx(stream, &raw mut context) };
        named("ask for the context of a stream", outcome.result())?;
        if context != self.raw.0 {
            let message = format!("a stream that is not in the primary context of GPU {} was given", self.device);
            return Err(Error::new(ErrorKind::InvalidArgument, message)
                .remedy("create it on that GPU, in the primary context, which the CUDA runtime and cudarc use")
                .into());
        }
        Ok(StreamHandle(Handle(stream)))
    }
    /// Whether operations put on the stream go into a graph instead of running.
    pub(crate) fn is_capturing(&self, _: &Current<'_>, stream: &StreamHandle) -> Outcome<bool> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is not destroyed while it is borrowed; `status` is a place for the result.
        let outcome = unsafe { sys::cuStreamIsCapturing(stream.0.0, &raw mut status) };
        named("ask whether a CUDA stream is captured", outcome.result())?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }
    /// Waits for everything in the context.
    pub(crate) fn finish(&self, _: &Current<'_>) -> Outcome {
        named("wait for the GPU", result::ctx::synchronize())
    }
    pub(crate) fn destroy_stream(&self, _: &Current<'_>, stream: StreamHandle) -> Outcome {
        // SAFETY: `create_stream` made it, and it is consumed.
        named("destroy a CUDA stream", unsafe { result::stream::destroy(stream.0.0) })
    }
    pub(crate) fn finish_stream(&self, _: &Current<'_>, stream: &StreamHandle) -> Outcome {
        // SAFETY: the stream is not destroyed while it is borrowed.
        named("wait for a CUDA stream", unsafe { result::stream::synchronize(stream.0.0) })
    }
    pub(crate) fn create_event(&self, _: &Current<'_>) -> Outcome<EventHandle> {
        let flags =
            sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32 | sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a place for the result. Blocking: waiting threads sleep instead of spinning.
        named("create a CUDA event", unsafe { sys::cuEventCreate(&raw mut raw, flags) }.result())?;
        Ok(EventHandle(Handle(raw)))
    }
    pub(crate) fn destroy_event(&self, _: &Current<'_>, event: EventHandle) -> Outcome {
        // SAFETY: `create_event` made it, and it is consumed.
        named("destroy a CUDA event", unsafe { result::event::destroy(event.0.0) })
    }
    pub(crate) fn record(&self, _: &Current<'_>, event: &EventHandle, stream: &StreamHandle) -> Outcome {
        // SAFETY: neither is destroyed while it is borrowed.
        named("record a CUDA event", unsafe { result::event::record(event.0.0, stream.0.0) })
    }
    pub(crate) fn wait(&self, _: &Current<'_>, stream: &StreamHandle, event: &EventHandle) -> Outcome {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: neither is destroyed while it is borrowed.
        named("make a CUDA stream wait", unsafe { result::stream::wait_event(stream.0.0, event.0.0, flags) })
    }
    /// Whether the event has happened. Only the answer "not ready" means that it has not.
    pub(crate) fn happened(&self, _: &Current<'_>, event: &EventHandle) -> Outcome<bool> {
        // SAFETY: the event is not destroyed while it is borrowed.
        match unsafe { result::event::query(event.0.0) } {
            Ok(()) => Ok(true),
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => named("ask about a CUDA event", Err(error)),
        }
    }
    pub(crate) fn finish_event(&self, _: &Current<'_>, event: &EventHandle) -> Outcome {
        // SAFETY: the event is not destroyed while it is borrowed.
        named("wait for a CUDA event", unsafe { result::event::synchronize(event.0.0) })
    }

    // Operations.

    /// # Safety
    /// The host memory stays valid, and is not written, until the copy has ended.
    pub(crate) unsafe fn copy_in(
        &self,
        _: &Current<'_>,
        stream: &StreamHandle,
        host: HostPointer,
        device: DeviceAddress,
        len: u64,
    ) -> Outcome {
        let source = host.as_ptr().cast_const().cast();
        // SAFETY: the caller's promise; the device checks its own addresses.
        let outcome = unsafe { sys::cuMemcpyHtoDAsync_v2(device.get(), source, len as usize, stream.0.0) };
        named("copy to the GPU", outcome.result())
    }
    /// # Safety
    /// The host memory stays valid, and is not accessed, until the copy has ended.
    pub(crate) unsafe fn copy_out(
        &self,
        _: &Current<'_>,
        stream: &StreamHandle,
        device: DeviceAddress,
        host: HostPointer,
        len: u64,
    ) -> Outcome {
        let target = host.as_ptr().cast();
        // SAFETY: the caller's promise; the device checks its own addresses.
        let outcome = unsafe { sys::cuMemcpyDtoHAsync_v2(target, device.get(), len as usize, stream.0.0) };
        named("copy from the GPU", outcome.result())
    }
    /// Whether [`copy_batch`](Self::copy_batch) can be called.
    pub(crate) fn has_batches(&self) -> bool {
        self.batches
    }
    /// Carries out several copies, in no order among each other. Only if the driver [has batches](Self::has_batches).
    ///
    /// # Safety
    /// The host memory of all of them is locked, stays valid, and is accessed by nobody else until they have ended.
    pub(crate) unsafe fn copy_batch(&self, _: &Current<'_>, stream: &StreamHandle, copies: &[BatchedCopy]) -> Outcome {
        let mut to: Vec<u64> = copies.iter().map(|copy| copy.to).collect();
        let mut from: Vec<u64> = copies.iter().map(|copy| copy.from).collect();
        let mut lens: Vec<usize> = copies.iter().map(|copy| copy.len as usize).collect();
        // The hints are for memory that the driver moves by itself.
        let nowhere = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        let (to, from, lens, count) = (to.as_mut_ptr(), from.as_mut_ptr(), lens.as_mut_ptr(), copies.len());
        let mut first = 0;
        let (attributes, first) = (&raw mut attributes, &raw mut first);
        // SAFETY: the caller's promise; the lists have the given length, and one attribute is for all copies.
        let outcome = unsafe { sys::cuMemcpyBatchAsync_v2(to, from, lens, count, attributes, first, 1, stream.0.0) };
        named("copy a batch", outcome.result())
    }
    pub(crate) fn zero(&self, _: &Current<'_>, stream: &StreamHandle, device: DeviceAddress, len: u64) -> Outcome {
        // SAFETY: concerns device memory only, whose addresses the device checks.
        let outcome = unsafe { sys::cuMemsetD8Async(device.get(), 0, len as usize, stream.0.0) };
        named("zero memory of the GPU", outcome.result())
    }
    /// # Safety
    /// `function` may be called with `argument` on any thread, as often as graphs that captured it are launched. It
    /// neither panics nor calls the driver.
    pub(crate) unsafe fn call(
        &self,
        _: &Current<'_>,
        stream: &StreamHandle,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> Outcome {
        // SAFETY: the caller's promise; the stream is not destroyed while it is borrowed.
        let outcome = unsafe { result::stream::launch_host_function(stream.0.0, function, argument) };
        named("put a closure on a CUDA stream", outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// cudarc panics if a missing one of these is called.
    #[test]
    fn regression_a_driver_without_a_function_is_refused_by_its_name() {
        for functions in [&NEEDED_FIRST[..], &NEEDED[..]] {
            require(functions, |_| true).unwrap();
            for hidden in functions {
                let error = require(functions, |name| name != *hidden).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Unsupported);
                let named = format!(" {} ", error).contains(&format!(" {}", hidden.to_string_lossy()));
                assert!(named && error.advice().is_some(), "{error}");
            }
        }
    }

    #[test]
    fn every_function_that_is_called_by_name_is_needed() {
        let mut called = 0;
        for part in include_str!("driver.rs").split("sys::cu").skip(1) {
            let Some((name, _)) = part.split_once('(') else { continue };
            if !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') || name == "MemcpyBatchAsync_v2" {
                continue;
            }
            let is_named = |needed: &&CStr| needed.to_bytes().strip_prefix(b"cu") == Some(name.as_bytes());
            assert!(NEEDED.iter().chain(&NEEDED_FIRST).any(is_named), "cu{name}");
            called += 1;
        }
        assert!(called > 20, "{called}");
    }

    #[test]
    fn what_takes_the_context_with_it_is_fatal_and_captures_are_not() {
        use CUresult as R;
        for code in
            [R::CUDA_ERROR_DEVICE_UNAVAILABLE, R::CUDA_ERROR_MPS_CLIENT_TERMINATED, R::CUDA_ERROR_EXTERNAL_DEVICE]
        {
            assert!(is_fatal(DriverError(code)) && !is_of_capture(DriverError(code)), "{code:?}");
        }
        for code in [R::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, R::CUDA_ERROR_CAPTURED_EVENT] {
            assert!(is_of_capture(DriverError(code)) && !is_fatal(DriverError(code)), "{code:?}");
        }
    }
}
