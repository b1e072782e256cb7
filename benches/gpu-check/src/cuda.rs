//! What the probes ask of the CUDA driver, and of cuBLAS where it is there.
//!
//! # Invariants
//!
//! 1. Host memory that copies use belongs to a [`HostMemory`]. It is freed, and its bytes are looked at, only after the
//!    whole context has been waited for; so no copy can outlive its memory.
//! 2. Device memory and addresses go back after the context has been waited for, and are never dereferenced here.
//! 3. Nothing of cudarc is called before `outcore_cuda::cuda_devices` has found a driver and a GPU: it panics where
//!    the library is missing.

use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use cudarc::cublas::{CudaBlas, sys as blas};
use cudarc::driver::sys::{self, CUevent_flags, CUresult};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaModule, CudaStream, DriverError, LaunchConfig, PushKernelArg, result,
};
use cudarc::nvrtc::Ptx;

use outcore::device::RawStream;
use outcore::{ComputeStream, DevicePin, Runtime, StreamPin, Tensor};

use crate::Failure;

type Result<T = ()> = std::result::Result<T, Failure>;

fn named<T>(what: &'static str, outcome: std::result::Result<T, DriverError>) -> Result<T> {
    outcome.map_err(|error| {
        let text = error.error_string().map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
        Failure::Cuda { what, code: format!("{:?}", error.0), text }
    })
}

fn check(what: &'static str, code: CUresult) -> Result {
    named(what, code.result())
}

/// A GPU's primary context, current on the thread that opened it. The runtime's device uses the same.
#[derive(Clone, Debug)]
pub(crate) struct Gpu {
    context: Arc<CudaContext>,
}

impl Gpu {
    pub(crate) fn open(ordinal: u32) -> Result<Self> {
        // Answers with an error, and a remedy, where there is no driver or no GPU.
        let count = outcore_cuda::cuda_devices()?.len();
        if ordinal as usize >= count {
            return Err(Failure::Impossible(format!("there is no GPU {ordinal}: the driver sees {count}")));
        }
        let context = named("open the GPU", CudaContext::new(ordinal as usize))?;
        // SAFETY: everything that is submitted is ordered by streams and events here.
        unsafe { context.disable_event_tracking() };
        Ok(Self { context })
    }

    /// Makes the context current on the calling thread.
    pub(crate) fn enter(&self) -> Result {
        named("enter the context", self.context.bind_to_thread())
    }

    pub(crate) fn synchronize(&self) -> Result {
        self.enter()?;
        named("wait for the GPU", result::ctx::synchronize())
    }

    /// Free and total bytes of the GPU's memory.
    pub(crate) fn memory(&self) -> Result<(u64, u64)> {
        self.enter()?;
        let (free, total) = named("ask for free memory", result::mem_get_info())?;
        Ok((free as u64, total as u64))
    }

    pub(crate) fn stream(&self) -> Result<Stream> {
        Ok(Stream { stream: named("create a stream", self.context.new_stream())?, gpu: self.clone() })
    }

    pub(crate) fn event(&self, kind: EventKind) -> Result<Event> {
        let flags = match kind {
            EventKind::Timed => CUevent_flags::CU_EVENT_DEFAULT,
            EventKind::Plain => CUevent_flags::CU_EVENT_DISABLE_TIMING,
            EventKind::Blocking => CUevent_flags::CU_EVENT_BLOCKING_SYNC,
        };
        Ok(Event(named("create an event", self.context.new_event(Some(flags)))?))
    }

    pub(crate) fn kernels(&self) -> Result<Kernels> {
        self.enter()?;
        let module = named("load the kernels", self.context.load_module(Ptx::from_src(include_str!("kernels.ptx"))))?;
        let function = |name| named("find a kernel", module.load_function(name));
        let processors = self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(Kernels {
            spin: function("outcore_spin")?,
            sum: function("outcore_sum")?,
            trap: function("outcore_trap")?,
            _module: module,
            processors: processors.max(1) as u32,
        })
    }

    fn attribute(&self, which: sys::CUdevice_attribute) -> Result<i32> {
        named("ask for an attribute", self.context.attribute(which))
    }

    fn location(&self) -> sys::CUmemLocation {
        sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.context.cu_device() }
    }

    fn allocation(&self) -> sys::CUmemAllocationProp {
        sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: self.location(),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        }
    }

    /// The smallest physical allocation.
    pub(crate) fn granularity(&self) -> Result<u64> {
        self.enter()?;
        let (mut bytes, prop) = (0, self.allocation());
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: both pointers are to locals of the types asked for.
        let code = unsafe { sys::cuMemGetAllocationGranularity(&raw mut bytes, &raw const prop, minimum) };
        check("ask for the allocation granularity", code)?;
        Ok(bytes as u64)
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum EventKind {
    /// With a time; who waits spins.
    Timed,
    /// Without a time; who waits spins.
    Plain,
    /// With a time; who waits sleeps.
    Blocking,
}

/// A point on a stream's timeline.
#[derive(Debug)]
pub(crate) struct Event(CudaEvent);

impl Event {
    pub(crate) fn synchronize(&self) -> Result {
        named("wait for an event", self.0.synchronize())
    }
    /// Whether it has happened.
    pub(crate) fn happened(&self) -> Result<bool> {
        named("ask about an event", self.0.try_is_complete())
    }
    /// Seconds from this event to a later one; both have a time. Waits for both.
    pub(crate) fn seconds_to(&self, end: &Self) -> Result<f64> {
        Ok(f64::from(named("ask for the time between events", self.0.elapsed_ms(&end.0))?) / 1e3)
    }
}

/// A non-blocking stream.
#[derive(Debug)]
pub(crate) struct Stream {
    stream: Arc<CudaStream>,
    gpu: Gpu,
}

impl Stream {
    pub(crate) fn record(&self, event: &Event) -> Result {
        named("record an event", event.0.record(&self.stream))
    }
    pub(crate) fn wait(&self, event: &Event) -> Result {
        named("make a stream wait", self.stream.wait(&event.0))
    }
    pub(crate) fn synchronize(&self) -> Result {
        named("wait for a stream", self.stream.synchronize())
    }

    /// The stream as the runtime knows it, for pins that end after its work.
    pub(crate) fn adopted_by(&self, runtime: &Runtime) -> Result<Adopted<'_>> {
        let raw = RawStream::new(self.stream.cu_stream().cast());
        // SAFETY: the handle is this stream's, which is borrowed for as long as the result lives.
        let stream = unsafe { runtime.adopt_stream(raw) }?;
        Ok(Adopted { stream, _of: PhantomData })
    }

    /// Copies `len` bytes from `offset` of host memory to a device address.
    pub(crate) fn copy_in(&self, host: &HostMemory, offset: u64, device: u64, len: u64) -> Result {
        let from = host.at(offset, len)?;
        // SAFETY: the range lies in the host memory, which outlives the copy (invariant 1); the driver checks the
        // address.
        check("copy to the GPU", unsafe {
            sys::cuMemcpyHtoDAsync_v2(device, from.cast_const().cast(), len as usize, self.stream.cu_stream())
        })
    }

    /// Copies `len` bytes from a device address to `offset` of host memory. Nobody can read that memory before the copy
    /// has ended (invariant 1).
    pub(crate) fn copy_out(&self, device: u64, host: &HostMemory, offset: u64, len: u64) -> Result {
        let to = host.at(offset, len)?;
        // SAFETY: as for `copy_in`; the memory is looked at only after the context was waited for.
        check("copy from the GPU", unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.cast(), device, len as usize, self.stream.cu_stream())
        })
    }

    /// Copies pieces of `len` bytes, from each offset of host memory to the device address beside it, by one call.
    ///
    /// # Errors
    /// [`Failure::Impossible`] if the driver has no such call (it came with CUDA 12.8, in this form with 13.0).
    pub(crate) fn copy_in_batch(&self, host: &HostMemory, pieces: &[(u64, u64)], len: u64) -> Result {
        self.gpu.enter()?;
        if !driver_has(c"cuMemcpyBatchAsync_v2") {
            return Err(Failure::Impossible("the driver has no cuMemcpyBatchAsync_v2, which CUDA 13.0 brought".into()));
        }
        let mut to: Vec<u64> = pieces.iter().map(|(_, device)| *device).collect();
        let mut from =
            pieces.iter().map(|(offset, _)| Ok(host.at(*offset, len)? as u64)).collect::<Result<Vec<_>>>()?;
        let mut sizes = vec![len as usize; pieces.len()];
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 },
            dstLocHint: sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 },
            flags: 0,
        };
        let mut first = 0;
        // SAFETY: the lists have the length that is said and are read during the call; the host ranges lie in memory
        // that outlives the copies (invariant 1); the driver checks the addresses.
        check("copy a batch to the GPU", unsafe {
            sys::cuMemcpyBatchAsync_v2(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                sizes.as_mut_ptr(),
                pieces.len(),
                &raw mut attributes,
                &raw mut first,
                1,
                self.stream.cu_stream(),
            )
        })
    }

    /// Copies `len` bytes from one device address to another.
    pub(crate) fn copy_within(&self, from: u64, to: u64, len: u64) -> Result {
        self.gpu.enter()?;
        // SAFETY: concerns addresses that the driver checks.
        check("copy on the GPU", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, len as usize, self.stream.cu_stream()) })
    }

    /// Puts a closure on the stream that raises a counter by one.
    pub(crate) fn call(&self, counter: &'static AtomicU64) -> Result {
        unsafe extern "C" fn raise(counter: *mut c_void) {
            // SAFETY: `call` passed a counter that lives for ever, and it is only read through a shared reference.
            unsafe { &*counter.cast_const().cast::<AtomicU64>() }.fetch_add(1, Ordering::Relaxed);
        }
        self.gpu.enter()?;
        let counter = std::ptr::from_ref(counter).cast_mut().cast();
        // SAFETY: the function takes a counter that lives for ever, calls no driver and waits for nothing.
        check("put a closure on a stream", unsafe {
            sys::cuLaunchHostFunc(self.stream.cu_stream(), Some(raise), counter)
        })
    }

    /// Fills `len` bytes at a device address with zeros.
    pub(crate) fn zero(&self, device: u64, len: u64) -> Result {
        self.gpu.enter()?;
        // SAFETY: concerns device memory only, whose addresses the driver checks.
        check("zero memory of the GPU", unsafe {
            sys::cuMemsetD8Async(device, 0, len as usize, self.stream.cu_stream())
        })
    }
}

/// A stream that a runtime has adopted.
pub(crate) struct Adopted<'a> {
    stream: ComputeStream,
    _of: PhantomData<&'a Stream>,
}

impl Adopted<'_> {
    /// Pins for the stream: work that is put on it from now on finds the bytes.
    pub(crate) fn pin(&self, runtime: &Runtime, tensors: &[Tensor]) -> Result<StreamPin> {
        Ok(runtime.pin(tensors).on(&self.stream).wait()?)
    }

    /// Unpins after everything that is on the stream by now.
    pub(crate) fn unpin(&self, guard: DevicePin) -> Result {
        guard.unpin_after(&self.stream).map_err(|refused| {
            // The refusal holds the guard, which must not be dropped before the work has ended.
            let ended = self.stream.synchronize();
            ended.err().unwrap_or(refused.error).into()
        })
    }
}

/// Host memory the GPU may copy from and to.
#[derive(Debug)]
pub(crate) struct HostMemory {
    start: *mut u8,
    len: u64,
    owner: Owner,
    gpu: Gpu,
}

// SAFETY: the address belongs to this value alone. Shared references only name it to the driver, which takes calls of
// any thread; the bytes are reached through `&mut self`, after the context was waited for (invariant 1).
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

#[derive(Debug)]
enum Owner {
    /// The driver: `cuMemHostAlloc`.
    Driver,
    /// This process; and the slices that are registered, as first byte and length.
    Process { memory: Vec<u8>, registered: Vec<(u64, u64)> },
}

/// Registered memory starts at a multiple of this.
const HUGE_PAGE: usize = 2 << 20;

impl HostMemory {
    /// Memory that the driver allocates and locks.
    pub(crate) fn alloc(gpu: &Gpu, len: u64) -> Result<Self> {
        gpu.enter()?;
        // SAFETY: asks for new memory, without flags; it is freed in `drop`.
        let start = named("allocate locked host memory", unsafe { result::malloc_host(len as usize, 0) })?;
        Ok(Self { start: start.cast(), len, owner: Owner::Driver, gpu: gpu.clone() })
    }

    /// Memory of this process, not yet locked. `touch` makes the kernel give it now.
    pub(crate) fn plain(gpu: &Gpu, len: u64, touch: bool) -> Self {
        let room = len as usize + HUGE_PAGE;
        // Zeroed memory comes untouched from the kernel.
        let mut memory = vec![0_u8; room];
        if touch {
            memory.fill(1);
        }
        let skip = memory.as_ptr().align_offset(HUGE_PAGE);
        let start = memory.as_mut_ptr().wrapping_add(skip);
        Self { start, len, owner: Owner::Process { memory, registered: Vec::new() }, gpu: gpu.clone() }
    }

    /// Locks `len` bytes from `offset` on. Can be called from several threads through [`lock_slices`].
    fn register(gpu: &Gpu, at: u64, len: u64) -> Result {
        gpu.enter()?;
        let start: *mut c_void = std::ptr::with_exposed_provenance_mut(at as usize);
        // SAFETY: the range belongs to a `HostMemory` that is borrowed by the caller; locking changes no byte.
        check("lock host memory", unsafe { sys::cuMemHostRegister_v2(start, len as usize, 0) })
    }

    /// Locks all of it, in slices of at most `slice` bytes, on `threads` threads.
    pub(crate) fn lock_slices(&mut self, slice: u64, threads: usize) -> Result {
        let base = self.start.expose_provenance() as u64;
        let slices: Vec<(u64, u64)> =
            (0..self.len).step_by(slice as usize).map(|at| (base + at, slice.min(self.len - at))).collect();
        let gpu = self.gpu.clone();
        let done: Vec<(Vec<(u64, u64)>, Result)> = std::thread::scope(|scope| {
            let part = |first: usize| {
                let (gpu, slices) = (gpu.clone(), &slices);
                scope.spawn(move || {
                    let mut locked = Vec::new();
                    for (at, len) in slices.iter().skip(first).step_by(threads) {
                        if let Err(failure) = Self::register(&gpu, *at, *len) {
                            return (locked, Err(failure));
                        }
                        locked.push((*at, *len));
                    }
                    (locked, Ok(()))
                })
            };
            let workers: Vec<_> = (0..threads).map(part).collect();
            let ended = |worker: std::thread::ScopedJoinHandle<'_, _>| {
                worker.join().unwrap_or_else(|_| (Vec::new(), Err(Failure::Impossible("a thread panicked".into()))))
            };
            workers.into_iter().map(ended).collect()
        });
        let mut outcome = Ok(());
        if let Owner::Process { registered, .. } = &mut self.owner {
            for (locked, result) in done {
                registered.extend(locked);
                outcome = outcome.and(result);
            }
        }
        outcome
    }

    /// Takes the memory out of what `fork` gives to a child.
    pub(crate) fn keep_from_children(&self) -> Result {
        // SAFETY: advice about memory that is ours; it changes no byte of this process.
        let refused = unsafe { libc::madvise(self.start.cast(), self.len as usize, libc::MADV_DONTFORK) };
        if refused == 0 {
            return Ok(());
        }
        Err(Failure::io("keep memory from children", std::io::Error::last_os_error()))
    }

    /// Undoes all locking.
    pub(crate) fn unlock(&mut self) -> Result {
        self.gpu.synchronize()?;
        let Owner::Process { registered, .. } = &mut self.owner else { return Ok(()) };
        while let Some((at, _)) = registered.pop() {
            let start: *mut c_void = std::ptr::with_exposed_provenance_mut(at as usize);
            // SAFETY: registered above, once, and no copy uses it: the context was waited for.
            check("unlock host memory", unsafe { sys::cuMemHostUnregister(start) })?;
        }
        Ok(())
    }

    fn at(&self, offset: u64, len: u64) -> Result<*mut u8> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.start.wrapping_add(offset as usize)),
            _ => Err(Failure::Impossible(format!("{len} bytes at {offset} of host memory that has {}", self.len))),
        }
    }

    /// Its bytes, once nothing is in flight.
    pub(crate) fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        self.gpu.synchronize()?;
        // SAFETY: `len` bytes of memory that is ours, initialised by the kernel; no copy is in flight (invariant 1),
        // and none can be submitted while the slice borrows it.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start, self.len as usize) })
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let ended = match self.owner {
            Owner::Driver => self.gpu.synchronize().and_then(|()| {
                // SAFETY: from `cuMemHostAlloc`, freed once, after everything has ended (invariant 1).
                named("free locked host memory", unsafe { result::free_host(self.start.cast()) })
            }),
            Owner::Process { .. } => self.unlock(),
        };
        if let Err(failure) = ended {
            eprintln!("gpu-probe: {failure}");
            // Memory that a copy may still use must not go back.
            if let Owner::Process { memory, .. } = &mut self.owner {
                std::mem::forget(std::mem::take(memory));
            }
        }
    }
}

/// Memory of the GPU.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    pub(crate) address: u64,
    gpu: Gpu,
}

impl DeviceMemory {
    pub(crate) fn new(gpu: &Gpu, len: u64) -> Result<Self> {
        gpu.enter()?;
        // SAFETY: asks for new memory; freed in `drop`.
        let address = named("allocate memory of the GPU", unsafe { result::malloc_sync(len as usize) })?;
        Ok(Self { address, gpu: gpu.clone() })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let ended = self.gpu.synchronize().and_then(|()| {
            // SAFETY: from `cuMemAlloc`, freed once, after everything has ended (invariant 2).
            named("free memory of the GPU", unsafe { result::free_sync(self.address) })
        });
        if let Err(failure) = ended {
            eprintln!("gpu-probe: {failure}");
        }
    }
}

/// Physical memory of the GPU, behind no address of its own.
#[derive(Debug)]
pub(crate) struct Physical {
    handle: u64,
    len: u64,
    gpu: Gpu,
}

impl Physical {
    pub(crate) fn create(gpu: &Gpu, len: u64) -> Result<Self> {
        gpu.enter()?;
        let (mut handle, prop) = (0, gpu.allocation());
        // SAFETY: `handle` is a place for the result, and `prop` says what is wanted.
        check("take memory of the GPU", unsafe {
            sys::cuMemCreate(&raw mut handle, len as usize, &raw const prop, 0)
        })?;
        Ok(Self { handle, len, gpu: gpu.clone() })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        let ended = self.gpu.enter().and_then(|()| {
            // SAFETY: concerns device memory only; ranges that still map it keep it (the driver counts).
            check("give memory of the GPU back", unsafe { sys::cuMemRelease(self.handle) })
        });
        if let Err(failure) = ended {
            eprintln!("gpu-probe: {failure}");
        }
    }
}

/// A range of device addresses.
#[derive(Debug)]
pub(crate) struct Range {
    base: u64,
    len: u64,
    /// What is mapped, as offset and length.
    mapped: Vec<(u64, u64)>,
    access: sys::CUmemAccessDesc,
    gpu: Gpu,
}

impl Range {
    pub(crate) fn reserve(gpu: &Gpu, len: u64) -> Result<Self> {
        gpu.enter()?;
        let mut base = 0;
        // SAFETY: `base` is a place for the result.
        check("reserve device addresses", unsafe { sys::cuMemAddressReserve(&raw mut base, len as usize, 0, 0, 0) })?;
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location: gpu.location(), flags };
        Ok(Self { base, len, mapped: Vec::new(), access, gpu: gpu.clone() })
    }

    /// The device address at an offset.
    pub(crate) fn address(&self, offset: u64) -> u64 {
        self.base + offset
    }

    pub(crate) fn map(&mut self, offset: u64, memory: &Physical) -> Result {
        self.map_part(offset, memory, 0, memory.len)
    }

    /// Maps a part of a handle. The documentation of `cuMemMap` demands that it begin at 0.
    pub(crate) fn map_part(&mut self, offset: u64, memory: &Physical, from: u64, len: u64) -> Result {
        // SAFETY: concerns device addresses only; a wrong range or handle is refused.
        check("map memory of the GPU", unsafe {
            sys::cuMemMap(self.base + offset, len as usize, from as usize, memory.handle, 0)
        })?;
        self.mapped.push((offset, len));
        Ok(())
    }

    pub(crate) fn allow(&self, offset: u64, len: u64) -> Result {
        // SAFETY: one description is passed; else concerns device addresses only.
        check("allow access to memory of the GPU", unsafe {
            sys::cuMemSetAccess(self.base + offset, len as usize, &raw const self.access, 1)
        })
    }

    pub(crate) fn unmap(&mut self, offset: u64, len: u64) -> Result {
        // SAFETY: concerns device addresses only; a wrong range is refused.
        check("unmap memory of the GPU", unsafe { sys::cuMemUnmap(self.base + offset, len as usize) })?;
        self.mapped.retain(|(at, _)| !(offset..offset + len).contains(at));
        Ok(())
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        let ended = self.gpu.synchronize().and_then(|()| {
            while let Some((offset, len)) = self.mapped.last().copied() {
                self.unmap(offset, len)?;
            }
            // SAFETY: concerns device addresses only; reserved with this length, freed once.
            check("free device addresses", unsafe { sys::cuMemAddressFree(self.base, self.len as usize) })
        });
        if let Err(failure) = ended {
            eprintln!("gpu-probe: {failure}");
        }
    }
}

/// Memory that the driver moves between the host and the GPU: managed memory, which this process never touches itself.
#[derive(Debug)]
pub(crate) struct Managed {
    pub(crate) address: u64,
    len: u64,
    gpu: Gpu,
}

/// Where managed memory is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Host,
    Device,
}

impl Managed {
    /// # Errors
    /// [`Failure::Impossible`] if the driver cannot move it ahead of use (`cuMemPrefetchAsync_v2` came with 12.2).
    pub(crate) fn new(gpu: &Gpu, len: u64) -> Result<Self> {
        gpu.enter()?;
        if !driver_has(c"cuMemPrefetchAsync_v2") || !driver_has(c"cuMemAdvise_v2") {
            return Err(Failure::Impossible("the driver has no cuMemPrefetchAsync_v2, which CUDA 12.2 brought".into()));
        }
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS;
        if gpu.attribute(attribute)? == 0 {
            return Err(Failure::Impossible("this GPU does not move managed memory by pages".into()));
        }
        let mut address = 0;
        let global = sys::CUmemAttach_flags_enum::CU_MEM_ATTACH_GLOBAL as u32;
        // SAFETY: asks for new memory; freed in `drop`.
        check("allocate managed memory", unsafe { sys::cuMemAllocManaged(&raw mut address, len as usize, global) })?;
        Ok(Self { address, len, gpu: gpu.clone() })
    }

    fn location(&self, side: Side) -> sys::CUmemLocation {
        match side {
            Side::Host => sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST, id: 0 },
            Side::Device => self.gpu.location(),
        }
    }

    /// Where the memory lies when nothing else was asked for, with the GPU's page tables kept in step, so that a kernel
    /// never faults on what was moved ahead.
    pub(crate) fn advise(&self, home: Side) -> Result {
        use sys::CUmem_advise_enum as Advice;
        let of = [
            (Advice::CU_MEM_ADVISE_SET_PREFERRED_LOCATION, self.location(home)),
            (Advice::CU_MEM_ADVISE_SET_ACCESSED_BY, self.location(Side::Device)),
        ];
        self.gpu.enter()?;
        of.into_iter().try_for_each(|(advice, location)| {
            // SAFETY: concerns this allocation only.
            let code = unsafe { sys::cuMemAdvise_v2(self.address, self.len as usize, advice, location) };
            check("advise the driver on managed memory", code)
        })
    }

    /// Moves a range to a side, in the stream's order.
    pub(crate) fn prefetch(&self, stream: &Stream, offset: u64, len: u64, to: Side) -> Result {
        self.gpu.enter()?;
        // SAFETY: concerns managed memory, whose range the driver checks.
        check("move managed memory", unsafe {
            sys::cuMemPrefetchAsync_v2(
                self.address + offset,
                len as usize,
                self.location(to),
                0,
                stream.stream.cu_stream(),
            )
        })
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        let ended = self.gpu.synchronize().and_then(|()| {
            // SAFETY: from `cuMemAllocManaged`, freed once, after everything has ended (invariant 2).
            named("free managed memory", unsafe { result::free_sync(self.address) })
        });
        if let Err(failure) = ended {
            eprintln!("gpu-probe: {failure}");
        }
    }
}

/// Seconds from `fork` until a child that leaves at once was waited for.
pub(crate) fn fork_and_wait() -> Result<f64> {
    let start = Instant::now();
    // SAFETY: the child calls `_exit` and nothing else, which a child of a process with threads may.
    let child = unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::_exit(0);
        }
        child
    };
    let failed = |what: &str| Failure::io(what, std::io::Error::last_os_error());
    if child < 0 {
        return Err(failed("fork"));
    }
    // SAFETY: the child is ours, and nobody else waits for it; its status is not asked for.
    if unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) } != child {
        return Err(failed("wait for a child"));
    }
    Ok(start.elapsed().as_secs_f64())
}

/// Threads of a block of our kernels.
const THREADS: u32 = 256;

/// Our own kernels: see kernels.ptx.
#[derive(Debug)]
pub(crate) struct Kernels {
    spin: CudaFunction,
    sum: CudaFunction,
    trap: CudaFunction,
    _module: Arc<CudaModule>,
    processors: u32,
}

impl Kernels {
    /// Bytes that [`spin`](Self::spin) writes.
    pub(crate) fn spin_bytes(&self) -> u64 {
        u64::from(self.processors * THREADS) * 8
    }

    fn config(&self, blocks: u32) -> LaunchConfig {
        LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 }
    }

    /// Keeps every multiprocessor busy for `iterations` steps. `out` has [`spin_bytes`](Self::spin_bytes).
    pub(crate) fn spin(&self, stream: &Stream, iterations: u64, out: &DeviceMemory) -> Result {
        let mut launch = stream.stream.launch_builder(&self.spin);
        launch.arg(&iterations).arg(&out.address);
        // SAFETY: the arguments are those of the kernel; it touches device memory only, which the driver checks.
        named("launch a kernel", unsafe { launch.launch(self.config(self.processors)) }.map(drop))
    }

    /// Writes a word at a device address that nothing may be mapped at: one thread of [`spin`](Self::spin).
    pub(crate) fn stray(&self, stream: &Stream, address: u64) -> Result {
        let mut launch = stream.stream.launch_builder(&self.spin);
        launch.arg(&0_u64).arg(&address);
        let one = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: as for `spin`: a stray address is an error of the driver's, which ends the use of the GPU.
        named("launch a kernel", unsafe { launch.launch(one) }.map(drop))
    }

    /// A kernel that ends by a trap.
    pub(crate) fn trap(&self, stream: &Stream) -> Result {
        let mut launch = stream.stream.launch_builder(&self.trap);
        let one = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the kernel has no arguments and touches nothing.
        named("launch a kernel", unsafe { launch.launch(one) }.map(drop))
    }

    /// Adds the words of `len` bytes at a device address to the word at `out`, with `rounds` steps of work for each.
    /// `out` has 16 bytes.
    pub(crate) fn sum(&self, stream: &Stream, data: u64, len: u64, rounds: u64, out: u64) -> Result {
        let words = len / 8;
        let mut launch = stream.stream.launch_builder(&self.sum);
        launch.arg(&data).arg(&words).arg(&rounds).arg(&out);
        // SAFETY: as for `spin`.
        named("launch a kernel", unsafe { launch.launch(self.config(self.processors * 8)) }.map(drop))
    }
}

/// cuBLAS on one stream.
#[derive(Debug)]
pub(crate) struct Blas {
    handle: CudaBlas,
}

/// A product `y[m, n] = x[m, k] * w[n, k]^T` of bf16 values, rows one after another, accumulated in f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) m: u32,
    pub(crate) n: u32,
    pub(crate) k: u32,
    pub(crate) x: u64,
    pub(crate) w: u64,
    pub(crate) y: u64,
}

impl Blas {
    /// # Errors
    /// [`Failure::Impossible`] where the library is not found, or refuses the driver.
    pub(crate) fn load(stream: &Stream) -> Result<Self> {
        // SAFETY: looks for a library; its initialisers are trusted as the driver is.
        if !unsafe { blas::is_culib_present() } {
            return Err(Failure::Impossible("libcublas is not found".into()));
        }
        let handle = CudaBlas::new(stream.stream.clone());
        Ok(Self { handle: handle.map_err(|error| Failure::Impossible(format!("cuBLAS does not start: {error:?}")))? })
    }

    pub(crate) fn multiply(&self, product: Product) -> Result {
        let Product { m, n, k, x, w, y } = product;
        let (one, zero) = (1.0_f32, 0.0_f32);
        let pointer = |address: u64| std::ptr::without_provenance::<c_void>(address as usize);
        let kind = blas::cudaDataType::CUDA_R_16BF;
        // By columns, `w` is k x n, `x` is k x m and `y` is n x m.
        // SAFETY: the handle lives; alpha and beta are read during the call; else concerns device memory only.
        let outcome = unsafe {
            cudarc::cublas::result::gemm_ex(
                *self.handle.handle(),
                blas::cublasOperation_t::CUBLAS_OP_T,
                blas::cublasOperation_t::CUBLAS_OP_N,
                n as i32,
                m as i32,
                k as i32,
                (&raw const one).cast(),
                pointer(w),
                kind,
                k as i32,
                pointer(x),
                kind,
                k as i32,
                (&raw const zero).cast(),
                pointer(y).cast_mut(),
                kind,
                n as i32,
                blas::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                blas::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        };
        outcome.map_err(|error| Failure::Cuda {
            what: "multiply matrices with cuBLAS",
            code: format!("{error:?}"),
            text: String::new(),
        })
    }
}

/// Whether libcublas is there, in words.
pub(crate) fn cublas_found() -> bool {
    // SAFETY: looks for a library; its initialisers are trusted as the driver is.
    unsafe { blas::is_culib_present() }
}

/// Whether the driver has a function of this name. cudarc panics where one is missing.
fn driver_has(name: &CStr) -> bool {
    // SAFETY: the driver's library is loaded (invariant 3); the symbol is only looked up, not called.
    unsafe { sys::culib().get::<*const c_void>(name.to_bytes_with_nul()) }.is_ok()
}
