//! A CUDA device with a defect, to see that a test finds it. The defect lies between the device and its driver: calls
//! are left out, answered too early, or given another frame. Nothing else knows of it.

use std::collections::{BTreeMap, HashSet};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use outcore::device::{Completions, Device, DeviceAddress, DeviceFactory, DeviceSettings, HostPointer, RawStream};
use outcore::dlpack::DLDeviceType;
use outcore::{Bytes, PageSize, Result};
use outcore_cuda::{CudaDeviceSelector, CudaDriver, cuda_device};
use outcore_gpu::{BatchedCopy, Driver, GpuConfig, GpuDevice, Locked, Outcome};
use parking_lot::Mutex;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defect {
    /// A pin that ends on a stream counts as over at once, although work on the stream goes on.
    PinEndsEarly,
    /// The stream of a pin does not wait for the copies that fill the pages.
    FillNotWaitedFor,
    /// Now and then the frame of a page is also mapped at the neighbour's address, in place of the neighbour's own.
    NeighboursFrame,
    /// A copy to the device counts as ended when it was submitted, so the host memory that it reads is used again. What
    /// is put on other streams from then on still waits for the copy.
    StagingReused,
}

/// Opens the first GPU with a defect, or with none to compare with.
#[derive(Clone, Debug)]
pub struct Planted {
    defect: Option<Defect>,
    /// How often it has shown.
    fired: Arc<AtomicU64>,
}

impl Planted {
    pub fn new(defect: Option<Defect>) -> Self {
        Self { defect, fired: Arc::default() }
    }
    /// How often the defect has shown so far.
    pub fn fired(&self) -> u64 {
        self.fired.load(Ordering::Relaxed)
    }
}

impl DeviceFactory for Planted {
    fn name(&self) -> String {
        DeviceFactory::name(&CudaDeviceSelector::default())
    }
    fn usual_page(&self) -> PageSize {
        CudaDeviceSelector::default().usual_page()
    }
    fn open(&self, settings: DeviceSettings, completions: Arc<dyn Completions>) -> Result<Arc<dyn Device>> {
        let gpu = cuda_device(&CudaDeviceSelector::default())?;
        let config = GpuConfig {
            name: format!("cuda:{}", gpu.ordinal),
            number: gpu.ordinal,
            numa_node: gpu.numa_node,
            page_size: settings.page_size,
            frames: settings.frames,
        };
        let driver = PlantedDriver {
            driver: CudaDriver::open(&gpu)?,
            defect: self.defect,
            fired: self.fired.clone(),
            page: settings.page_size.bytes(),
            others: Mutex::default(),
            frames: Mutex::default(),
            maps: AtomicU64::new(0),
        };
        Ok(Arc::new(GpuDevice::new(driver, config, completions)?))
    }
}

type Memory = <CudaDriver as Driver>::Memory;
type Current<'a> = <CudaDriver as Driver>::Current<'a>;

/// One in this many frames that have a neighbour is the neighbour's.
const NEIGHBOURS: u64 = 8;

#[derive(Debug)]
struct PlantedDriver {
    driver: CudaDriver,
    defect: Option<Defect>,
    fired: Arc<AtomicU64>,
    page: u64,
    /// Streams other than those of fills.
    others: Mutex<Vec<Weak<PlantedStream>>>,
    frames: Mutex<Frames>,
    maps: AtomicU64,
}

/// The frame at each address; and those that the device has given back, by name.
#[derive(Debug, Default)]
struct Frames {
    mapped: BTreeMap<u64, Memory>,
    gone: HashSet<String>,
}

#[derive(Debug)]
struct PlantedStream {
    stream: <CudaDriver as Driver>::Stream,
    /// Whether it has the priority of fills.
    fills: bool,
    /// Whether the program puts work on it.
    shared: AtomicBool,
}

#[derive(Debug)]
struct PlantedEvent {
    event: <CudaDriver as Driver>::Event,
    /// Whether it counts as happened from the start.
    early: AtomicBool,
}

impl PlantedDriver {
    fn stream(&self, stream: <CudaDriver as Driver>::Stream, fills: bool, shared: bool) -> Arc<PlantedStream> {
        let stream = Arc::new(PlantedStream { stream, fills, shared: AtomicBool::new(shared) });
        if !fills {
            self.others.lock().push(Arc::downgrade(&stream));
        }
        stream
    }

    fn fire(&self) {
        self.fired.fetch_add(1, Ordering::Relaxed);
    }

    /// The frame to be mapped in place of `memory`.
    fn frame_for(&self, at: DeviceAddress, memory: Memory) -> Memory {
        if self.defect != Some(Defect::NeighboursFrame) {
            return memory;
        }
        let frames = self.frames.lock();
        let neighbours = [at.get() + self.page, at.get() - self.page];
        let found = neighbours.iter().find_map(|address| frames.mapped.get(address));
        let Some(found) = found.filter(|found| !frames.gone.contains(&format!("{found:?}"))) else { return memory };
        if self.maps.fetch_add(1, Ordering::Relaxed) % NEIGHBOURS != NEIGHBOURS - 1 {
            return memory;
        }
        self.fire();
        *found
    }
}

impl Driver for PlantedDriver {
    type Current<'a> = Current<'a>;
    type Stream = Arc<PlantedStream>;
    type Event = PlantedEvent;
    type Memory = Memory;

    const NAME: &'static str = CudaDriver::NAME;
    const DLPACK: Option<DLDeviceType> = CudaDriver::DLPACK;
    const WHEN_LOST: &'static str = CudaDriver::WHEN_LOST;
    const WHO_HOLDS_MEMORY: &'static str = CudaDriver::WHO_HOLDS_MEMORY;

    fn enter(&self) -> Outcome<Current<'_>> {
        self.driver.enter()
    }
    fn granularity(&self, current: &Current<'_>) -> Outcome<Bytes> {
        self.driver.granularity(current)
    }
    fn memory(&self, current: &Current<'_>) -> Outcome<(Bytes, Bytes)> {
        self.driver.memory(current)
    }
    fn reserve(&self, current: &Current<'_>, len: Bytes, align: Bytes) -> Outcome<DeviceAddress> {
        self.driver.reserve(current, len, align)
    }
    fn free_addresses(&self, current: &Current<'_>, base: DeviceAddress, len: Bytes) -> Outcome {
        self.driver.free_addresses(current, base, len)
    }
    fn create(&self, current: &Current<'_>, len: Bytes) -> Outcome<Memory> {
        let memory = self.driver.create(current, len)?;
        self.frames.lock().gone.remove(&format!("{memory:?}"));
        Ok(memory)
    }
    fn release(&self, current: &Current<'_>, memory: Memory) -> Outcome {
        self.frames.lock().gone.insert(format!("{memory:?}"));
        self.driver.release(current, memory)
    }
    fn map(&self, current: &Current<'_>, at: DeviceAddress, len: Bytes, memory: Memory) -> Outcome {
        let memory = self.frame_for(at, memory);
        self.driver.map(current, at, len, memory)?;
        self.frames.lock().mapped.insert(at.get(), memory);
        Ok(())
    }
    fn allow_access(&self, current: &Current<'_>, at: DeviceAddress, len: Bytes) -> Outcome {
        self.driver.allow_access(current, at, len)
    }
    fn unmap(&self, current: &Current<'_>, at: DeviceAddress, len: Bytes) -> Outcome {
        self.driver.unmap(current, at, len)?;
        let end = at.get() + len.get();
        self.frames.lock().mapped.retain(|address, _| !(at.get()..end).contains(address));
        Ok(())
    }
    fn lock(&self, current: &Current<'_>, base: HostPointer, len: Bytes) -> Outcome {
        self.driver.lock(current, base, len)
    }
    fn unlock(&self, current: &Current<'_>, base: HostPointer) -> Outcome {
        self.driver.unlock(current, base)
    }
    fn alloc_locked(&self, current: &Current<'_>, len: Bytes) -> Outcome<Locked> {
        self.driver.alloc_locked(current, len)
    }
    fn free_locked(&self, current: &Current<'_>, memory: Locked) -> Outcome {
        self.driver.free_locked(current, memory)
    }
    fn priorities(&self, current: &Current<'_>) -> Outcome<(i32, i32)> {
        self.driver.priorities(current)
    }
    fn create_stream(&self, current: &Current<'_>, priority: i32) -> Outcome<Arc<PlantedStream>> {
        let (lowest, highest) = self.driver.priorities(current)?;
        let fills = priority == highest && lowest != highest;
        Ok(self.stream(self.driver.create_stream(current, priority)?, fills, false))
    }
    unsafe fn adopt_stream(&self, current: &Current<'_>, raw: RawStream) -> Outcome<Arc<PlantedStream>> {
        // SAFETY: the caller's promise is the one that the driver asks for.
        Ok(self.stream(unsafe { self.driver.adopt_stream(current, raw) }?, false, true))
    }
    fn raw_stream(&self, stream: &Arc<PlantedStream>) -> RawStream {
        // Only streams of the program's have their handles given away.
        stream.shared.store(true, Ordering::Relaxed);
        self.driver.raw_stream(&stream.stream)
    }
    fn is_capturing(&self, current: &Current<'_>, stream: &Arc<PlantedStream>) -> Outcome<bool> {
        self.driver.is_capturing(current, &stream.stream)
    }
    fn finish(&self, current: &Current<'_>) -> Outcome {
        self.driver.finish(current)
    }
    fn finish_stream(&self, current: &Current<'_>, stream: &Arc<PlantedStream>) -> Outcome {
        self.driver.finish_stream(current, &stream.stream)
    }
    fn destroy_stream(&self, current: &Current<'_>, stream: Arc<PlantedStream>) -> Outcome {
        match Arc::into_inner(stream) {
            Some(stream) => self.driver.destroy_stream(current, stream.stream),
            // Somebody looks at it at this very moment. It is lost, and nothing else.
            None => Ok(()),
        }
    }
    fn create_event(&self, current: &Current<'_>) -> Outcome<PlantedEvent> {
        Ok(PlantedEvent { event: self.driver.create_event(current)?, early: AtomicBool::new(false) })
    }
    fn destroy_event(&self, current: &Current<'_>, event: PlantedEvent) -> Outcome {
        self.driver.destroy_event(current, event.event)
    }
    fn record(&self, current: &Current<'_>, event: &PlantedEvent, stream: &Arc<PlantedStream>) -> Outcome {
        self.driver.record(current, &event.event, &stream.stream)?;
        let early = match self.defect {
            Some(Defect::PinEndsEarly) => stream.shared.load(Ordering::Relaxed),
            Some(Defect::StagingReused) => stream.fills,
            _ => false,
        };
        event.early.store(early, Ordering::Relaxed);
        Ok(())
    }
    fn wait(&self, current: &Current<'_>, stream: &Arc<PlantedStream>, event: &PlantedEvent) -> Outcome {
        if self.defect == Some(Defect::FillNotWaitedFor) && stream.shared.load(Ordering::Relaxed) {
            self.fire();
            return Ok(());
        }
        self.driver.wait(current, &stream.stream, &event.event)
    }
    fn happened(&self, current: &Current<'_>, event: &PlantedEvent) -> Outcome<bool> {
        if !event.early.load(Ordering::Relaxed) {
            return self.driver.happened(current, &event.event);
        }
        if self.defect == Some(Defect::StagingReused) {
            // Only the host memory is free too early: whatever reads the page finds the bytes.
            let streams: Vec<_> = self.others.lock().iter().filter_map(Weak::upgrade).collect();
            for stream in &streams {
                self.driver.wait(current, &stream.stream, &event.event)?;
            }
        }
        self.fire();
        Ok(true)
    }
    fn finish_event(&self, current: &Current<'_>, event: &PlantedEvent) -> Outcome {
        self.driver.finish_event(current, &event.event)
    }
    unsafe fn copy_in(
        &self,
        current: &Current<'_>,
        stream: &Arc<PlantedStream>,
        host: HostPointer,
        device: DeviceAddress,
        len: Bytes,
    ) -> Outcome {
        // SAFETY: the caller's promise, which a planted defect breaks on purpose: the host memory stays allocated.
        unsafe { self.driver.copy_in(current, &stream.stream, host, device, len) }
    }
    unsafe fn copy_out(
        &self,
        current: &Current<'_>,
        stream: &Arc<PlantedStream>,
        device: DeviceAddress,
        host: HostPointer,
        len: Bytes,
    ) -> Outcome {
        // SAFETY: the caller's promise.
        unsafe { self.driver.copy_out(current, &stream.stream, device, host, len) }
    }
    fn has_batches(&self) -> bool {
        self.driver.has_batches()
    }
    unsafe fn copy_batch(&self, current: &Current<'_>, stream: &Arc<PlantedStream>, copies: &[BatchedCopy]) -> Outcome {
        // SAFETY: as for `copy_in`.
        unsafe { self.driver.copy_batch(current, &stream.stream, copies) }
    }
    fn zero(&self, current: &Current<'_>, stream: &Arc<PlantedStream>, device: DeviceAddress, len: Bytes) -> Outcome {
        self.driver.zero(current, &stream.stream, device, len)
    }
    unsafe fn call(
        &self,
        current: &Current<'_>,
        stream: &Arc<PlantedStream>,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> Outcome {
        // SAFETY: the caller's promise.
        unsafe { self.driver.call(current, &stream.stream, function, argument) }
    }
}
