//! The driver calls that tests of the emulated CUDA driver make: cudarc's raw ones, with Rust's types around them.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream};

pub type Result<T = ()> = std::result::Result<T, CUresult>;

fn check(code: CUresult) -> Result {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(code) }
}

/// The smallest frame the driver maps.
pub const FRAME: usize = 2 << 20;

/// A context without cudarc's own events, and thus without its help in ordering.
pub fn context() -> Arc<CudaContext> {
    let context = CudaContext::new(0).unwrap();
    // SAFETY: the tests order what they submit themselves; that is what they are about.
    unsafe { context.disable_event_tracking() };
    context
}

pub fn event(context: &Arc<CudaContext>) -> CudaEvent {
    context.new_event(None).unwrap()
}

/// Runs `work` with the context pushed, as a library does that must not change its caller's current context.
pub fn in_context<T>(context: &Arc<CudaContext>, work: impl FnOnce() -> T) -> T {
    // SAFETY: the context lives for the call, and is popped again below.
    check(unsafe { sys::cuCtxPushCurrent_v2(context.cu_ctx()) }).unwrap();
    let result = work();
    let mut popped = std::ptr::null_mut();
    // SAFETY: the out-parameter is a local.
    check(unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) }).unwrap();
    result
}

/// Resets the first GPU, as `cudaDeviceReset` does.
pub fn reset_device() -> Result {
    // SAFETY: the call takes a number. Whoever uses the context afterwards gets an error.
    check(unsafe { sys::cuDevicePrimaryCtxReset_v2(0) })
}

pub fn record(event: &CudaEvent, stream: &CudaStream) -> Result {
    // SAFETY: both live for the call.
    check(unsafe { sys::cuEventRecord(event.cu_event(), stream.cu_stream()) })
}

pub fn synchronize(event: &CudaEvent) -> Result {
    // SAFETY: the event lives for the call.
    check(unsafe { sys::cuEventSynchronize(event.cu_event()) })
}

/// Page-locked memory of the driver.
pub struct Locked {
    start: *mut u8,
    len: usize,
    context: Arc<CudaContext>,
}

impl Locked {
    pub fn new(context: &Arc<CudaContext>, len: usize) -> Self {
        context.bind_to_thread().unwrap();
        // SAFETY: allocates; freed in `drop` or by `free`.
        let start = unsafe { cudarc::driver::result::malloc_host(len, 0) }.unwrap();
        Self { start: start.cast(), len, context: context.clone() }
    }
    pub fn filled(context: &Arc<CudaContext>, len: usize, byte: u8) -> Self {
        let mut new = Self::new(context, len);
        new.bytes_mut().fill(byte);
        new
    }
    pub fn pointer(&self) -> *mut u8 {
        self.start
    }
    /// May be called only after the copies that write here were waited for.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with this length, initialised by mmap; the test waits before it looks.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and before anything is submitted.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // SAFETY: from cuMemHostAlloc, freed once.
        let _ = unsafe { cudarc::driver::result::free_host(self.start.cast::<c_void>()) };
    }
}

/// Registers memory of the test's own.
pub fn register(memory: &[u8]) -> Result {
    register_as(memory, 0)
}

pub fn register_as(memory: &[u8], flags: u32) -> Result {
    // SAFETY: locks pages; changes no byte.
    check(unsafe { sys::cuMemHostRegister_v2(memory.as_ptr().cast_mut().cast(), memory.len(), flags) })
}

pub fn unregister(memory: &[u8]) -> Result {
    // SAFETY: unlocks pages; changes no byte.
    check(unsafe { sys::cuMemHostUnregister(memory.as_ptr().cast_mut().cast()) })
}

fn prop() -> sys::CUmemAllocationProp {
    // SAFETY: a C structure whose fields are all numbers and pointers.
    let mut prop: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    prop.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = location();
    prop
}

fn location() -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 }
}

pub fn granularity() -> usize {
    let mut bytes = 0;
    let which = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: the out-parameters are locals.
    check(unsafe { sys::cuMemGetAllocationGranularity(&raw mut bytes, &prop(), which) }).unwrap();
    bytes
}

/// Reserves addresses for `frames` frames.
pub fn reserve(frames: usize) -> Result<CUdeviceptr> {
    let mut address = 0;
    // SAFETY: the out-parameter is a local.
    check(unsafe { sys::cuMemAddressReserve(&raw mut address, frames * FRAME, 0, 0, 0) })?;
    Ok(address)
}

pub fn unreserve(address: CUdeviceptr, frames: usize) -> Result {
    // SAFETY: gives addresses back.
    check(unsafe { sys::cuMemAddressFree(address, frames * FRAME) })
}

/// Physical memory for one frame.
pub fn create() -> Result<u64> {
    let mut handle = 0;
    // SAFETY: the out-parameters are locals.
    check(unsafe { sys::cuMemCreate(&raw mut handle, FRAME, &prop(), 0) })?;
    Ok(handle)
}

pub fn release(handle: u64) -> Result {
    // SAFETY: gives a handle back.
    check(unsafe { sys::cuMemRelease(handle) })
}

pub fn map_only(address: CUdeviceptr, handle: u64) -> Result {
    // SAFETY: changes device mappings only.
    check(unsafe { sys::cuMemMap(address, FRAME, 0, handle, 0) })
}

pub fn set_access(address: CUdeviceptr, frames: usize) -> Result {
    let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let access = sys::CUmemAccessDesc { location: location(), flags };
    // SAFETY: one descriptor, a local.
    check(unsafe { sys::cuMemSetAccess(address, frames * FRAME, &raw const access, 1) })
}

pub fn map(address: CUdeviceptr, handle: u64) -> Result {
    map_only(address, handle)?;
    set_access(address, 1)
}

pub fn unmap(address: CUdeviceptr) -> Result {
    // SAFETY: changes device mappings only.
    check(unsafe { sys::cuMemUnmap(address, FRAME) })
}

/// One frame behind one address of its own.
pub struct Mapped {
    pub address: CUdeviceptr,
    pub handle: u64,
}

impl Mapped {
    pub fn new() -> Self {
        let (address, handle) = (reserve(1).unwrap(), create().unwrap());
        map(address, handle).unwrap();
        Self { address, handle }
    }
    pub fn give_back(self) {
        unmap(self.address).unwrap();
        release(self.handle).unwrap();
        unreserve(self.address, 1).unwrap();
    }
}

pub fn allocate(len: usize) -> CUdeviceptr {
    let mut address = 0;
    // SAFETY: the out-parameter is a local.
    check(unsafe { sys::cuMemAlloc_v2(&raw mut address, len) }).unwrap();
    address
}

pub fn free(address: CUdeviceptr) -> Result {
    // SAFETY: gives device memory back.
    check(unsafe { sys::cuMemFree_v2(address) })
}

pub fn copy_in(stream: &CudaStream, to: CUdeviceptr, from: *const u8, len: usize) -> Result {
    // SAFETY: the tests keep `from` alive until the copy has ended (or hold the stream, and it never runs).
    check(unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), len, stream.cu_stream()) })
}

pub fn copy_out(stream: &CudaStream, to: *mut u8, from: CUdeviceptr, len: usize) -> Result {
    // SAFETY: as for `copy_in`.
    check(unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, len, stream.cu_stream()) })
}

pub fn copy_within(stream: &CudaStream, to: CUdeviceptr, from: CUdeviceptr, len: usize) -> Result {
    // SAFETY: device memory only.
    check(unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, len, stream.cu_stream()) })
}

pub fn fill(stream: &CudaStream, address: CUdeviceptr, byte: u8, len: usize) -> Result {
    // SAFETY: device memory only.
    check(unsafe { sys::cuMemsetD8Async(address, byte, len, stream.cu_stream()) })
}

pub fn fill_words(stream: &CudaStream, address: CUdeviceptr, word: u32, count: usize) -> Result {
    // SAFETY: device memory only.
    check(unsafe { sys::cuMemsetD32Async(address, word, count, stream.cu_stream()) })
}

/// Copies `(to, from, len)`, each either way, in one call.
pub fn copy_batch(stream: &CudaStream, copies: &[(u64, u64, usize)]) -> Result {
    let (mut to, mut from): (Vec<u64>, Vec<u64>) = copies.iter().map(|copy| (copy.0, copy.1)).unzip();
    let mut sizes: Vec<usize> = copies.iter().map(|copy| copy.2).collect();
    // SAFETY: a C structure whose fields are all numbers.
    let mut attributes: sys::CUmemcpyAttributes = unsafe { std::mem::zeroed() };
    attributes.srcAccessOrder = sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    attributes.srcLocHint = location();
    attributes.dstLocHint = location();
    let mut index = 0;
    // SAFETY: the arrays are as long as the counts say; memory as for `copy_in`.
    check(unsafe {
        sys::cuMemcpyBatchAsync_v2(
            to.as_mut_ptr(),
            from.as_mut_ptr(),
            sizes.as_mut_ptr(),
            copies.len(),
            &raw mut attributes,
            &raw mut index,
            1,
            stream.cu_stream(),
        )
    })
}

extern "C" fn call(argument: *mut c_void) {
    // SAFETY: made from a box by `host_function`, and the driver calls once.
    let function = unsafe { Box::from_raw(argument.cast::<Box<dyn FnOnce() + Send>>()) };
    function();
}

/// Runs a closure on the stream's timeline. It leaks if the stream never gets there.
pub fn host_function(stream: &CudaStream, function: impl FnOnce() + Send + 'static) -> Result {
    let function: Box<Box<dyn FnOnce() + Send>> = Box::new(Box::new(function));
    let argument = Box::into_raw(function).cast::<c_void>();
    // SAFETY: `call` takes what `argument` points to.
    check(unsafe { sys::cuLaunchHostFunc(stream.cu_stream(), Some(call), argument) })
}
