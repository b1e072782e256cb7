//! The calls of the CUDA driver that the device makes, each checked and named in its error. cudarc's types stay within
//! this file.
//!
//! # Invariants
//!
//! 1. Nothing of cudarc is called before [`load`] has found the driver's library and [`require`] the functions that are
//!    used: cudarc panics where one is missing.
//! 2. Every call that needs a context is made with the device's own context current ([`CudaDriver::enter`]), and the
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
use outcore::dlpack::DLDeviceType;
use outcore::{Bytes, Error, ErrorKind, Result, machine};
use outcore_gpu::{BatchedCopy, Driver, Failure, Locked, Outcome};

use crate::select::{CudaDeviceInfo, CudaDeviceSelector};

/// CUDA 12.0. It has every function used here; older drivers were not examined.
const OLDEST_DRIVER: i32 = 12000;
/// CUDA 12.2: since then the driver tells which node of host memory is nearest.
const NUMA_DRIVER: i32 = 12020;
/// CUDA 13.0: since then one call can carry several copies, in the form used here.
const BATCHES_DRIVER: (u32, u32) = (13, 0);

/// An error of the driver during `what`.
fn failed(what: impl Into<String>, error: DriverError) -> Error {
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
        CUresult::CUDA_ERROR_INVALID_CONTEXT | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED => {
            "the context that all code of this process shares was destroyed: other code has reset the GPU \
             (cudaDeviceReset), which it must not while a runtime is open"
        }
        CUresult::CUDA_ERROR_CONTAINED => {
            "the GPU has contained an error of its hardware, or of an access over NVLink, to this process (Xid 94 in \
             the kernel log)"
        }
        CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK => {
            "a kernel of this process ended without freeing its tensor memory: look for it with compute-sanitizer"
        }
        CUresult::CUDA_ERROR_UNKNOWN => {
            "the driver knows no better name for what happened, and does not recover from it: look for its own account \
             in the kernel log (Xid)"
        }
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

/// Errors after which every later call in the context returns an error too.
const LOST: [CUresult; 19] = [
    // Calls are made with the device's own context current: if that is none, it was destroyed by others.
    CUresult::CUDA_ERROR_INVALID_CONTEXT,
    CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
    CUresult::CUDA_ERROR_CONTAINED,
    CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE,
    CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
    CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
    CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUresult::CUDA_ERROR_ASSERT,
    CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
    CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
    CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
    CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE,
    CUresult::CUDA_ERROR_INVALID_PC,
    CUresult::CUDA_ERROR_LAUNCH_FAILED,
    CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK,
    CUresult::CUDA_ERROR_UNKNOWN,
    CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE,
    CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED,
    CUresult::CUDA_ERROR_EXTERNAL_DEVICE,
];

/// Whether an error of the driver (`CUresult`) means that the GPU is lost to this process: only a new process can use
/// it again.
pub fn is_device_lost(code: u32) -> bool {
    LOST.iter().any(|lost| *lost as u32 == code)
}

fn is_fatal(error: DriverError) -> bool {
    is_device_lost(error.0 as u32)
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

/// A stream of the driver; destroyed by [`Driver::destroy_stream`] if it was made here.
#[derive(Debug)]
pub struct StreamHandle(Handle<sys::CUstream_st>);

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD_STREAM: usize = 2;

/// An event of the driver, without a time; destroyed by [`Driver::destroy_event`].
#[derive(Debug)]
pub struct EventHandle(Handle<sys::CUevent_st>);

/// While this lives, a context is current on this thread, and captures of graphs do not limit its calls.
#[derive(Debug)]
#[must_use]
pub struct Current<'a> {
    /// The thread's own capture mode, if it was changed.
    mode: Option<sys::CUstreamCaptureMode>,
    stays: PhantomData<(&'a CudaDriver, *const ())>,
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

/// The CUDA driver's calls for one GPU, in its primary context, which frameworks use too.
#[derive(Debug)]
pub struct CudaDriver {
    device: sys::CUdevice,
    batches: bool,
    raw: Handle<sys::CUctx_st>,
    prop: sys::CUmemAllocationProp,
}

// SAFETY: the pointer in `prop` is null and stays so.
unsafe impl Send for CudaDriver {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for CudaDriver {}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        // SAFETY: retained in `open`, released once.
        if let Err(error) = unsafe { result::primary_ctx::release(self.device) } {
            tracing::debug!(error = %failed("release the CUDA context", error));
        }
    }
}

type Call<T = ()> = std::result::Result<T, DriverError>;

/// The failure of a call of the driver, by its code.
fn failure(what: impl Into<String>, error: DriverError) -> Failure {
    let exiting = error.0 == CUresult::CUDA_ERROR_DEINITIALIZED;
    Failure { fatal: is_fatal(error), captured: is_of_capture(error), exiting, error: failed(what, error) }
}

fn named<T>(what: &str, outcome: Call<T>) -> Outcome<T> {
    outcome.map_err(|error| failure(what, error))
}

impl CudaDriver {
    /// Retains the primary context of the GPU. For devices with another driver around this one.
    #[doc(hidden)]
    pub fn open(gpu: &CudaDeviceInfo) -> Result<Self> {
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
}

/// Physical memory of the GPU.
#[derive(Clone, Copy, Debug)]
pub struct MemoryHandle(sys::CUmemGenericAllocationHandle);

const fn size(len: Bytes) -> usize {
    len.get() as usize
}

impl Driver for CudaDriver {
    type Current<'a> = Current<'a>;
    type Stream = StreamHandle;
    type Event = EventHandle;
    type Memory = MemoryHandle;

    const NAME: &'static str = "CUDA";
    const DLPACK: Option<DLDeviceType> = Some(DLDeviceType::kDLCUDA);
    const WHEN_LOST: &'static str = "start the program again: CUDA does not let this process use the GPU any more. The \
                                     kernel log may have more about it (Xid)";
    const WHO_HOLDS_MEMORY: &'static str =
        "`nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv` lists the processes";

    /// Makes the context current on this thread.
    fn enter(&self) -> Outcome<Self::Current<'_>> {
        // SAFETY: the context lives as long as `self`. The returned value, which stays on this thread, pops it.
        named("enter the CUDA context", unsafe { sys::cuCtxPushCurrent_v2(self.raw.0) }.result())?;
        let mut current = Current { mode: None, stays: PhantomData };
        current.mode = Some(exchange_capture_mode(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?);
        Ok(current)
    }

    fn granularity(&self, _: &Self::Current<'_>) -> Outcome<Bytes> {
        let mut bytes = 0;
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: both pointers are to values of the types asked for.
        let outcome = unsafe { sys::cuMemGetAllocationGranularity(&raw mut bytes, &raw const self.prop, minimum) };
        named("ask for the allocation granularity", outcome.result())?;
        Ok(Bytes::new(bytes as u64))
    }

    fn memory(&self, _: &Self::Current<'_>) -> Outcome<(Bytes, Bytes)> {
        let (free, total) = named("ask for the GPU's free memory", result::mem_get_info())?;
        Ok((Bytes::new(free as u64), Bytes::new(total as u64)))
    }

    // Virtual memory. These calls concern only device addresses, which are no memory of this program.

    fn reserve(&self, _: &Self::Current<'_>, len: Bytes, align: Bytes) -> Outcome<DeviceAddress> {
        let mut base = 0;
        // SAFETY: `base` is a place for the result.
        let outcome = unsafe { sys::cuMemAddressReserve(&raw mut base, size(len), size(align), 0, 0) };
        named("reserve device addresses", outcome.result())?;
        Ok(DeviceAddress::new(base))
    }
    fn free_addresses(&self, _: &Self::Current<'_>, base: DeviceAddress, len: Bytes) -> Outcome {
        // SAFETY: concerns device addresses only; a wrong range is refused.
        named("free device addresses", unsafe { sys::cuMemAddressFree(base.get(), size(len)) }.result())
    }
    fn create(&self, _: &Self::Current<'_>, len: Bytes) -> Outcome<Self::Memory> {
        let mut handle = 0;
        // SAFETY: `handle` is a place for the result, and `prop` describes the memory.
        let outcome = unsafe { sys::cuMemCreate(&raw mut handle, size(len), &raw const self.prop, 0) };
        named("take memory of the GPU", outcome.result())?;
        Ok(MemoryHandle(handle))
    }
    fn release(&self, _: &Self::Current<'_>, memory: Self::Memory) -> Outcome {
        // SAFETY: concerns device memory only; a wrong handle is refused.
        named("give memory of the GPU back", unsafe { sys::cuMemRelease(memory.0) }.result())
    }
    fn map(&self, _: &Self::Current<'_>, at: DeviceAddress, len: Bytes, memory: Self::Memory) -> Outcome {
        // SAFETY: concerns device addresses only; a wrong range or handle is refused.
        named("map memory of the GPU", unsafe { sys::cuMemMap(at.get(), size(len), 0, memory.0, 0) }.result())
    }
    fn allow_access(&self, _: &Self::Current<'_>, at: DeviceAddress, len: Bytes) -> Outcome {
        let access = sys::CUmemAccessDesc {
            location: self.prop.location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: one description is passed; otherwise this concerns device addresses only.
        let outcome = unsafe { sys::cuMemSetAccess(at.get(), size(len), &raw const access, 1) };
        named("allow the GPU access to its memory", outcome.result())
    }
    fn unmap(&self, _: &Self::Current<'_>, at: DeviceAddress, len: Bytes) -> Outcome {
        // SAFETY: concerns device addresses only; a wrong range is refused.
        named("unmap memory of the GPU", unsafe { sys::cuMemUnmap(at.get(), size(len)) }.result())
    }

    // Host memory.

    fn lock(&self, _: &Self::Current<'_>, base: HostPointer, len: Bytes) -> Outcome {
        // Without this flag the memory is locked for this context alone, and another GPU's copies are staged.
        let portable = sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the maker of the pointer promises that the memory stays until it is unlocked (`Device::lock_host`).
        let outcome = unsafe { sys::cuMemHostRegister_v2(base.as_ptr().cast(), size(len), portable) };
        named("lock host memory for the GPU", outcome.result())
    }
    fn unlock(&self, _: &Self::Current<'_>, base: HostPointer) -> Outcome {
        // SAFETY: the caller of `Device::unlock_host` promises that no operation uses it.
        let outcome = unsafe { sys::cuMemHostUnregister(base.as_ptr().cast()) };
        named("unlock host memory", outcome.result())
    }
    fn alloc_locked(&self, _: &Self::Current<'_>, len: Bytes) -> Outcome<Locked> {
        // SAFETY: asks for new memory. No flags, because the CPU reads it too.
        let base = named("take locked host memory", unsafe { result::malloc_host(size(len), 0) })?;
        let Some(base) = std::ptr::NonNull::new(base.cast()) else {
            return named("take locked host memory", Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)));
        };
        // SAFETY: new memory, which is freed when the value is given back, after the last operation on its stream.
        Ok(unsafe { Locked::new(HostPointer::new(base)) })
    }
    fn free_locked(&self, _: &Self::Current<'_>, memory: Locked) -> Outcome {
        // SAFETY: `alloc_locked` made it, it is consumed, and its stream is idle.
        named("free locked host memory", unsafe { result::free_host(memory.base().as_ptr().cast()) })
    }

    // Streams and events.

    fn priorities(&self, _: &Self::Current<'_>) -> Outcome<(i32, i32)> {
        named("ask for stream priorities", result::stream::get_priority_range())
    }
    fn create_stream(&self, _: &Self::Current<'_>, priority: i32) -> Outcome<Self::Stream> {
        let kind = result::stream::StreamKind::NonBlocking;
        let raw = named("create a CUDA stream", result::stream::create_with_priority(kind, priority))?;
        Ok(StreamHandle(Handle(raw)))
    }
    unsafe fn adopt_stream(&self, _: &Self::Current<'_>, raw: RawStream) -> Outcome<Self::Stream> {
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
    fn raw_stream(&self, stream: &Self::Stream) -> RawStream {
        RawStream::new(stream.0.0.cast())
    }
    fn is_capturing(&self, _: &Self::Current<'_>, stream: &Self::Stream) -> Outcome<bool> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is not destroyed while it is borrowed; `status` is a place for the result.
        let outcome = unsafe { sys::cuStreamIsCapturing(stream.0.0, &raw mut status) };
        // The legacy default stream, while a stream is captured that it would wait for: work on it is refused, and
        // spoils that capture.
        if outcome == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
            return Ok(true);
        }
        named("ask whether a CUDA stream is captured", outcome.result())?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }
    fn finish(&self, _: &Self::Current<'_>) -> Outcome {
        named("wait for the GPU", result::ctx::synchronize())
    }
    fn destroy_stream(&self, _: &Self::Current<'_>, stream: Self::Stream) -> Outcome {
        // SAFETY: `create_stream` made it, and it is consumed.
        named("destroy a CUDA stream", unsafe { result::stream::destroy(stream.0.0) })
    }
    fn finish_stream(&self, _: &Self::Current<'_>, stream: &Self::Stream) -> Outcome {
        // SAFETY: the stream is not destroyed while it is borrowed.
        named("wait for a CUDA stream", unsafe { result::stream::synchronize(stream.0.0) })
    }
    fn create_event(&self, _: &Self::Current<'_>) -> Outcome<Self::Event> {
        // Not CU_EVENT_BLOCKING_SYNC: such an event wakes a thread of the driver whenever it happens, whether anybody
        // waits for it or not.
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a place for the result.
        named("create a CUDA event", unsafe { sys::cuEventCreate(&raw mut raw, flags) }.result())?;
        Ok(EventHandle(Handle(raw)))
    }
    fn destroy_event(&self, _: &Self::Current<'_>, event: Self::Event) -> Outcome {
        // SAFETY: `create_event` made it, and it is consumed.
        named("destroy a CUDA event", unsafe { result::event::destroy(event.0.0) })
    }
    fn record(&self, _: &Self::Current<'_>, event: &Self::Event, stream: &Self::Stream) -> Outcome {
        // SAFETY: neither is destroyed while it is borrowed.
        named("record a CUDA event", unsafe { result::event::record(event.0.0, stream.0.0) })
    }
    fn wait(&self, _: &Self::Current<'_>, stream: &Self::Stream, event: &Self::Event) -> Outcome {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: neither is destroyed while it is borrowed.
        named("make a CUDA stream wait", unsafe { result::stream::wait_event(stream.0.0, event.0.0, flags) })
    }
    fn happened(&self, _: &Self::Current<'_>, event: &Self::Event) -> Outcome<bool> {
        // SAFETY: the event is not destroyed while it is borrowed.
        match unsafe { result::event::query(event.0.0) } {
            Ok(()) => Ok(true),
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => named("ask about a CUDA event", Err(error)),
        }
    }
    fn finish_event(&self, _: &Self::Current<'_>, event: &Self::Event) -> Outcome {
        // SAFETY: the event is not destroyed while it is borrowed.
        named("wait for a CUDA event", unsafe { result::event::synchronize(event.0.0) })
    }

    // Operations.

    unsafe fn copy_in(
        &self,
        _: &Self::Current<'_>,
        stream: &Self::Stream,
        host: HostPointer,
        device: DeviceAddress,
        len: Bytes,
    ) -> Outcome {
        let source = host.as_ptr().cast_const().cast();
        // SAFETY: the caller's promise; the device checks its own addresses.
        let outcome = unsafe { sys::cuMemcpyHtoDAsync_v2(device.get(), source, size(len), stream.0.0) };
        named("copy to the GPU", outcome.result())
    }
    unsafe fn copy_out(
        &self,
        _: &Self::Current<'_>,
        stream: &Self::Stream,
        device: DeviceAddress,
        host: HostPointer,
        len: Bytes,
    ) -> Outcome {
        let target = host.as_ptr().cast();
        // SAFETY: the caller's promise; the device checks its own addresses.
        let outcome = unsafe { sys::cuMemcpyDtoHAsync_v2(target, device.get(), size(len), stream.0.0) };
        named("copy from the GPU", outcome.result())
    }
    fn has_batches(&self) -> bool {
        self.batches
    }
    unsafe fn copy_batch(&self, _: &Self::Current<'_>, stream: &Self::Stream, copies: &[BatchedCopy]) -> Outcome {
        let mut to: Vec<u64> = copies.iter().map(BatchedCopy::target).collect();
        let mut from: Vec<u64> = copies.iter().map(BatchedCopy::source).collect();
        let mut lens: Vec<usize> = copies.iter().map(|copy| size(copy.len)).collect();
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
    fn zero(&self, _: &Self::Current<'_>, stream: &Self::Stream, device: DeviceAddress, len: Bytes) -> Outcome {
        // SAFETY: concerns device memory only, whose addresses the device checks.
        let outcome = unsafe { sys::cuMemsetD8Async(device.get(), 0, size(len), stream.0.0) };
        named("zero memory of the GPU", outcome.result())
    }
    unsafe fn call(
        &self,
        _: &Self::Current<'_>,
        stream: &Self::Stream,
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
        for code in [
            R::CUDA_ERROR_DEVICE_UNAVAILABLE,
            R::CUDA_ERROR_MPS_CLIENT_TERMINATED,
            R::CUDA_ERROR_EXTERNAL_DEVICE,
            R::CUDA_ERROR_CONTAINED,
            R::CUDA_ERROR_TENSOR_MEMORY_LEAK,
            R::CUDA_ERROR_UNKNOWN,
            R::CUDA_ERROR_INVALID_CONTEXT,
            R::CUDA_ERROR_CONTEXT_IS_DESTROYED,
        ] {
            assert!(is_fatal(DriverError(code)) && !is_of_capture(DriverError(code)), "{code:?}");
        }
        for code in [R::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, R::CUDA_ERROR_CAPTURED_EVENT] {
            assert!(is_of_capture(DriverError(code)) && !is_fatal(DriverError(code)), "{code:?}");
        }
    }
}
