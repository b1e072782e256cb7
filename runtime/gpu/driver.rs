//! What the logic of this crate asks of a GPU's driver.

use std::ffi::c_void;
use std::fmt;

use outcore::device::{DeviceAddress, Direction, HostPointer, RawStream};
use outcore::dlpack::DLDeviceType;
use outcore::{Bytes, Error};

/// The result of a call of the driver.
pub type Outcome<T = ()> = std::result::Result<T, Failure>;

/// The failure of a call of the driver.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What users read.
    pub error: Error,
    /// The device is lost: every later call would fail too.
    pub fatal: bool,
    /// A capture into a graph forbids the call, or the call asks about something captured. It says nothing about the
    /// device; the call has done nothing.
    pub captured: bool,
    /// The process is exiting: the driver has shut down and answers no call any more. That is the end of any program
    /// that returns from `main` with an open runtime, and no fault of the device.
    pub exiting: bool,
}

impl Failure {
    /// The failure for not waiting for a stream that is being captured, because the wait would spoil the capture.
    pub(crate) fn captured(error: Error) -> Self {
        Self { error, fatal: false, captured: true, exiting: false }
    }
}

/// A refusal: neither is the device lost, nor is it about a capture.
impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, fatal: false, captured: false, exiting: false }
    }
}

/// Page-locked host memory that the driver has made.
#[derive(Debug)]
pub struct Locked {
    base: HostPointer,
}

impl Locked {
    /// Memory of the driver's, by its first byte.
    ///
    /// # Safety
    /// The memory stays, and is used by nobody else, until the value is given to [`Driver::free_locked`].
    pub const unsafe fn new(base: HostPointer) -> Self {
        Self { base }
    }
    /// The first byte.
    pub const fn base(&self) -> HostPointer {
        self.base
    }
}

/// One of several copies that go to the driver in one call.
#[derive(Clone, Copy, Debug)]
pub struct BatchedCopy {
    /// Which way.
    pub direction: Direction,
    /// Locked host memory.
    pub host: HostPointer,
    /// Mapped device memory.
    pub device: DeviceAddress,
    /// How much.
    pub len: Bytes,
}

impl BatchedCopy {
    /// The address that is read.
    pub fn source(&self) -> u64 {
        match self.direction {
            Direction::In => self.host.as_ptr() as u64,
            Direction::Out => self.device.get(),
        }
    }
    /// The address that is written.
    pub fn target(&self) -> u64 {
        match self.direction {
            Direction::In => self.device.get(),
            Direction::Out => self.host.as_ptr() as u64,
        }
    }
}

/// The driver of one GPU: its virtual memory, its streams and its events.
///
/// # Contract
///
/// 1. Any thread may call, as long as it holds a [`Current`](Self::Current). [`GpuDevice`](crate::GpuDevice) holds none
///    while it runs others' code.
/// 2. Calls that put something on a stream may wait until the driver's queue has room: [`record`](Self::record),
///    [`wait`](Self::wait), [`copy_in`](Self::copy_in), [`copy_out`](Self::copy_out),
///    [`copy_batch`](Self::copy_batch), [`zero`](Self::zero) and [`call`](Self::call). That lasts until enough of what
///    is queued has ended. CUDA has room for about 1000 operations. [`finish`](Self::finish),
///    [`finish_stream`](Self::finish_stream), [`finish_event`](Self::finish_event), and copies of host memory that is
///    not locked wait for work to end. No other call waits for the device, and while one of these waits, calls from
///    other threads go on.
/// 3. Operations of one stream run in the order of the calls. An event covers what was on its stream when it was
///    recorded.
/// 4. A call may fail with the error of earlier work. If the GPU is lost by that, the failure is
///    [fatal](Failure::fatal). If the driver has shut down because the process exits, every call
///    [says so](Failure::exiting).
/// 5. Handles are consumed by what destroys them. [`GpuDevice`](crate::GpuDevice) destroys each once, after everything
///    that uses it has ended, and drops the driver last.
/// 6. Where streams can be captured into graphs, calls that this crate makes neither fail nor spoil a capture of
///    another stream; [`finish`](Self::finish) may. A driver without graphs answers `false` to [`is_capturing`](Self::is_capturing).
pub trait Driver: fmt::Debug + Send + Sync + Sized + 'static {
    /// While it lives, this thread may call the driver. It stays on its thread.
    type Current<'a>
    where
        Self: 'a;
    /// A stream.
    type Stream: fmt::Debug + Send + Sync;
    /// An event, without a time. It is asked about, so its completion need not wake anybody: a driver that can make
    /// events of both kinds makes those that wake nobody.
    type Event: fmt::Debug + Send + Sync;
    /// Physical memory of the GPU, for one frame.
    type Memory: fmt::Debug + Copy + Send + Sync;

    /// What messages call the driver; in lower case, the beginning of names of threads.
    const NAME: &'static str;
    /// What DLPack calls GPUs of this driver, if it has a name for them.
    const DLPACK: Option<DLDeviceType>;
    /// What to do when the device is lost, as the remedy of an error.
    const WHEN_LOST: &'static str;
    /// How to find out who uses the GPU's memory, as the end of a remedy.
    const WHO_HOLDS_MEMORY: &'static str;

    /// Lets this thread call the driver.
    fn enter(&self) -> Outcome<Self::Current<'_>>;

    /// Bytes of which allocations and mappings are multiples.
    fn granularity(&self, current: &Self::Current<'_>) -> Outcome<Bytes>;
    /// Free memory of the GPU, and all of it.
    fn memory(&self, current: &Self::Current<'_>) -> Outcome<(Bytes, Bytes)>;

    /// Reserves device addresses, aligned if the driver can.
    fn reserve(&self, current: &Self::Current<'_>, len: Bytes, align: Bytes) -> Outcome<DeviceAddress>;
    /// Gives a reservation back. Nothing is mapped in it.
    fn free_addresses(&self, current: &Self::Current<'_>, base: DeviceAddress, len: Bytes) -> Outcome;
    /// Takes memory of the GPU. Without room: [`OutOfMemory`](outcore::ErrorKind::OutOfMemory).
    fn create(&self, current: &Self::Current<'_>, len: Bytes) -> Outcome<Self::Memory>;
    /// Gives memory back that is mapped nowhere.
    fn release(&self, current: &Self::Current<'_>, memory: Self::Memory) -> Outcome;
    /// Maps memory at reserved addresses, where nothing is. It cannot be accessed yet.
    fn map(&self, current: &Self::Current<'_>, at: DeviceAddress, len: Bytes, memory: Self::Memory) -> Outcome;
    /// Lets the GPU read and write a mapped range, which lies in one reservation and may hold several mappings.
    fn allow_access(&self, current: &Self::Current<'_>, at: DeviceAddress, len: Bytes) -> Outcome;
    /// Unmaps a range, which lies in one reservation and may hold several mappings. Memory and addresses stay.
    fn unmap(&self, current: &Self::Current<'_>, at: DeviceAddress, len: Bytes) -> Outcome;

    /// Locks host memory for the GPU's copies. It stays until it is [unlocked](Self::unlock).
    fn lock(&self, current: &Self::Current<'_>, base: HostPointer, len: Bytes) -> Outcome;
    /// Unlocks it. No operation uses it.
    fn unlock(&self, current: &Self::Current<'_>, base: HostPointer) -> Outcome;
    /// New locked memory, which the processor reads and writes too.
    fn alloc_locked(&self, current: &Self::Current<'_>, len: Bytes) -> Outcome<Locked>;
    /// Gives it back. No operation uses it.
    fn free_locked(&self, current: &Self::Current<'_>, memory: Locked) -> Outcome;

    /// The lowest and the highest priority of a stream. The numbers may go either way.
    fn priorities(&self, current: &Self::Current<'_>) -> Outcome<(i32, i32)>;
    /// A stream that waits for no other unless it is told to.
    fn create_stream(&self, current: &Self::Current<'_>, priority: i32) -> Outcome<Self::Stream>;
    /// A stream that somebody else made. It is never destroyed here.
    ///
    /// # Errors
    /// [`InvalidArgument`](outcore::ErrorKind::InvalidArgument) for a stream of another GPU.
    ///
    /// # Safety
    /// The handle is that of a stream, and stays valid as long as the returned value is used.
    unsafe fn adopt_stream(&self, current: &Self::Current<'_>, raw: RawStream) -> Outcome<Self::Stream>;
    /// The handle of a stream, for others.
    fn raw_stream(&self, stream: &Self::Stream) -> RawStream;
    /// Whether operations put on the stream go into a graph instead of running.
    fn is_capturing(&self, current: &Self::Current<'_>, stream: &Self::Stream) -> Outcome<bool>;
    /// Waits for everything that this process has on the GPU. It may spoil captures of any stream: it is called only
    /// after another failure, and not while a stream that this crate knows is being captured.
    fn finish(&self, current: &Self::Current<'_>) -> Outcome;
    /// Waits for everything on the stream.
    fn finish_stream(&self, current: &Self::Current<'_>, stream: &Self::Stream) -> Outcome;
    /// Destroys a stream that was [created](Self::create_stream).
    fn destroy_stream(&self, current: &Self::Current<'_>, stream: Self::Stream) -> Outcome;

    /// A new event.
    fn create_event(&self, current: &Self::Current<'_>) -> Outcome<Self::Event>;
    /// Destroys it.
    fn destroy_event(&self, current: &Self::Current<'_>, event: Self::Event) -> Outcome;
    /// Puts the event behind everything on the stream.
    fn record(&self, current: &Self::Current<'_>, event: &Self::Event, stream: &Self::Stream) -> Outcome;
    /// Makes later operations on the stream wait for the event.
    fn wait(&self, current: &Self::Current<'_>, stream: &Self::Stream, event: &Self::Event) -> Outcome;
    /// Whether the event has happened. "Not yet" is no failure, and a failure is no "not yet".
    fn happened(&self, current: &Self::Current<'_>, event: &Self::Event) -> Outcome<bool>;
    /// Waits for the event, after the driver has refused to say whether it has happened. The wait may cost processor
    /// time.
    fn finish_event(&self, current: &Self::Current<'_>, event: &Self::Event) -> Outcome;

    /// Queues a copy to the device.
    ///
    /// # Safety
    /// The host memory stays valid, and is not written, until the copy has ended.
    unsafe fn copy_in(
        &self,
        current: &Self::Current<'_>,
        stream: &Self::Stream,
        host: HostPointer,
        device: DeviceAddress,
        len: Bytes,
    ) -> Outcome;
    /// Queues a copy from the device.
    ///
    /// # Safety
    /// The host memory stays valid, and is not accessed, until the copy has ended.
    unsafe fn copy_out(
        &self,
        current: &Self::Current<'_>,
        stream: &Self::Stream,
        device: DeviceAddress,
        host: HostPointer,
        len: Bytes,
    ) -> Outcome;
    /// Whether [`copy_batch`](Self::copy_batch) can be called.
    fn has_batches(&self) -> bool {
        false
    }
    /// Queues several copies, in no order among each other. Called only where the driver [has
    /// batches](Self::has_batches). After an error of the kind [`Unsupported`](outcore::ErrorKind::Unsupported) it is
    /// not called again.
    ///
    /// # Safety
    /// The host memory of all of them is locked, stays valid, and is accessed by nobody else until they have ended.
    unsafe fn copy_batch(
        &self,
        _current: &Self::Current<'_>,
        _stream: &Self::Stream,
        _copies: &[BatchedCopy],
    ) -> Outcome {
        let error = Error::new(outcore::ErrorKind::Unsupported, "this driver takes one copy at a time");
        Err(error.into())
    }
    /// Queues zeros for device memory.
    fn zero(&self, current: &Self::Current<'_>, stream: &Self::Stream, device: DeviceAddress, len: Bytes) -> Outcome;
    /// Queues a call of `function` on a thread of the driver's. It may never be called, if the device is lost.
    ///
    /// # Safety
    /// `function` may be called with `argument` on any thread, as often as graphs that captured it are launched. It
    /// neither panics nor calls the driver.
    unsafe fn call(
        &self,
        current: &Self::Current<'_>,
        stream: &Self::Stream,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> Outcome;
}
