//! Devices: where frames live, and the streams that copy into and out of them.
//!
//! A [`Device`] owns three things: address ranges (one per segment, reserved for life), frames (physical room for one
//! page each), and streams (queues of operations that run in order). It knows nothing of tiers, policies or pages in
//! flight: the pager decides, the transfer engine calls.
//!
//! # Contract (every device passes `tests/device/suite.rs`)
//!
//! 1. `map(frame, address)` puts `frame` behind `address`; the frame's bytes travel with it. The address that the frame
//!    was behind before then holds nothing, and any access there faults. A frame that was behind `address` keeps its
//!    memory, and is behind no address until it is mapped again. The caller guarantees that no operation in flight
//!    touches either address. A device may carry this out after the call has returned, in order, and before the
//!    operations that are submitted later. If it then fails, the operations that name the address fail.
//! 2. `protect(frame)` makes the frame's address inaccessible until the next `map` of that frame. A device on which
//!    this costs time may do nothing, unless it was built `strict`.
//! 3. `discard(frame)` gives the frame's physical memory back to the system. Its bytes are lost, and any access to its
//!    address faults. After a later `map` the content is arbitrary but readable.
//! 4. `submit` does not wait for the operation. It may wait until a driver's queue has room; then other streams and
//!    completions go on. Operations of one stream run in submission order; two streams are ordered only by events. An
//!    operation with a token reports to the device's [`Completions`] exactly once. If the call refuses it, because the
//!    device is closed or has no such stream, that is before `submit` returns.
//! 5. Memory named by a submitted operation is borrowed until its completion is reported, even if nobody waits for the
//!    operation any more.
//! 6. `poll` has three answers: `Ready`, `Pending`, or an error. A failure is never reported as `Pending`. An operation
//!    that fails reports to its token; one without a token fails every later event of its stream.
//! 7. An operation with a token is *taken up* when the device can no longer refuse it. From then on only the loss of
//!    the device keeps it from ending well, provided that what it names is mapped and valid. A closure is the
//!    exception: it may panic. `submit` returns the event behind the operation if it was taken up in the call. It
//!    returns none if the operation has to wait for its page. When that operation is taken up, the device tells its
//!    [`Completions`]; it does not if the operation is refused. Being told is not guaranteed: an operation may end
//!    without. Of two events of one stream the later one is the greater.
//! 8. An adopted stream stays its owner's: the device records events on it, does nothing else of its own accord, and
//!    never destroys it. `forget_stream` waits for no work, but as `submit` it may wait until a driver's queue has
//!    room; tokens submitted before are still reported. A mark that a closure has submitted is reported behind the work
//!    on the stream, even if the stream is forgotten right after. While a stream is being captured into a graph, every
//!    operation on it is refused, so none becomes part of the graph.
//! 9. `close` waits for everything submitted, then joins its threads. Afterwards `submit` refuses with
//!    [`ErrorKind::Closed`]. Mappings stay until the device is dropped. The last owner may go on one of the device's
//!    own threads, in the receiver of completions or in a closure. A drop there does not wait for that thread, which
//!    ends when nothing is left for it. Nor does a `close`, unless it refuses.

mod ballast;
mod factory;
pub(crate) mod host;
mod link;
mod mappings;
pub mod parts;
pub(crate) mod slab;
mod stream;
pub mod streams;
mod sys;
mod tables;

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::task::Poll;

use dlpack_ffi::DLDevice;

use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, PageSize};
use crate::os::machine::MemoryLimit;

#[doc(inline)]
pub use crate::ids::{FillPoint, FrameId, HostFrameId, StagingId};
pub(crate) use crate::os::kernel_pages::KernelPages;
pub(crate) use crate::os::process::Opened;
pub use factory::{DeviceFactory, DeviceSettings, Host};
// For the crates beside outcore, and not for programs: it changes without notice.
#[doc(hidden)]
pub use host::HostDevice;
pub(crate) use host::HostDeviceConfig;
pub use link::{Direction, LinkModel, LinkSchedule};
pub(crate) use slab::{HostSlab, HostSlabConfig};

/// A device address. On a device whose memory is [addressable](Device::host_addressable) it is an ordinary pointer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceAddress(pub(crate) u64);

impl DeviceAddress {
    /// An address that a device gave, from its number.
    pub const fn new(address: u64) -> Self {
        Self(address)
    }
    /// The address `bytes` after this one.
    pub const fn offset(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
    /// The raw address.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Debug for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// The driver's handle of a stream (a `CUstream`), as an opaque pointer. A null handle is the legacy default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawStream(*mut c_void);

impl RawStream {
    /// Wraps a handle.
    pub const fn new(handle: *mut c_void) -> Self {
        Self(handle)
    }
    /// The handle, to be cast to the driver's type.
    pub const fn as_ptr(self) -> *mut c_void {
        self.0
    }
}

// SAFETY: a handle is a name; the driver's functions may be called with it from any thread. Whoever has the stream
// adopted promises that it exists (`Device::adopt_stream`).
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

/// A queue of device operations that run in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamId(pub(crate) u32);

impl StreamId {
    /// The stream with this number of a device.
    pub const fn new(number: u32) -> Self {
        Self(number)
    }
    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// A point on a stream's timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventId(pub(crate) u64);

impl EventId {
    /// Bits that count items; the other bits are the stream.
    const COUNT_BITS: u32 = 44;
    /// How many streams [`of`](Self::of) tells apart.
    pub const STREAMS_MAX: usize = 1 << (64 - Self::COUNT_BITS);

    /// The event after the first `count` items of a stream, for devices that count the items of each stream. A count
    /// has 44 bits, and nothing has to be freed.
    pub const fn of(stream: StreamId, count: u64) -> Self {
        Self((stream.0 as u64) << Self::COUNT_BITS | count)
    }
    /// The stream and the count of an event that [`of`](Self::of) made.
    pub const fn parts(self) -> (StreamId, u64) {
        (StreamId((self.0 >> Self::COUNT_BITS) as u32), self.0 & ((1 << Self::COUNT_BITS) - 1))
    }
    /// The event with this number of a device. Of two events of one stream the later one has the greater number.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }
    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Names an operation in flight: completions carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

/// The end of one operation.
#[derive(Debug)]
pub struct Completion {
    /// The operation.
    pub token: Token,
    /// How it ended.
    pub result: Result<()>,
}

/// Receives completions, on threads of the device or the store. Those of operations that a device refuses come on the
/// thread that submits them, within the call: so it takes no lock that is held over [`submit`](Device::submit). Must
/// not block.
pub trait Completions: Send + Sync {
    /// These operations have ended; their memory is no longer borrowed. May drain `done`.
    fn completed(&self, done: &mut Vec<Completion>);

    /// Whether reporting the end of this operation takes so long that other reports should not wait for it. A store
    /// that has one thread for many reports then hands this one to another thread. Must not block.
    fn takes_long(&self, _token: Token) -> bool {
        false
    }

    /// The device has taken up an operation that had to wait when it was submitted (rule 7 of the [contract](self)).
    /// The operation has ended when `end` has happened, which may already be so.
    fn taken_up(&self, _token: Token, _end: EventId) {}
}

/// Host memory an operation reads or writes.
#[derive(Clone, Copy, Debug)]
pub struct HostPointer(pub(crate) NonNull<u8>);

impl HostPointer {
    /// The memory at `pointer`.
    ///
    /// # Safety
    /// Whoever puts the pointer into an operation keeps the operation's whole range valid, and free of conflicting
    /// accesses, from submission until completion.
    pub const unsafe fn new(pointer: NonNull<u8>) -> Self {
        Self(pointer)
    }
    /// The memory of a page on a device whose frames the store can reach; `None` for address 0.
    pub(crate) fn of_page(address: DeviceAddress) -> Option<Self> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(address.get() as usize)).map(Self)
    }
    /// The hash of the first `len` bytes. Only for memory of a move whose operation is complete or not yet submitted:
    /// the pager lets nobody else touch it, and it is at least a page long.
    pub(crate) fn checksum(self, len: u64) -> u64 {
        // SAFETY: the constructor's promise covers the range, and the caller's move owns it (above), so nobody writes.
        let bytes = unsafe { std::slice::from_raw_parts(self.0.as_ptr(), len as usize) };
        twox_hash::XxHash3_64::oneshot(bytes)
    }
    /// Fills bytes `from..to` with zeros. Only for memory of a move, as for [`checksum`](Self::checksum).
    pub(crate) fn zero(self, from: u64, to: u64) {
        let len = to.saturating_sub(from) as usize;
        // SAFETY: the constructor's promise covers the range, and the caller's move owns it (above).
        unsafe { std::ptr::write_bytes(self.0.as_ptr().add(from as usize), 0, len) };
    }
    /// The memory `bytes` after this, which belongs to the same operation.
    pub fn offset(self, bytes: u64) -> Self {
        // Within the operation's range, which does not wrap around; the constructor's promise covers it.
        Self(self.0.map_addr(|at| at.saturating_add(bytes as usize)))
    }
    /// The raw pointer.
    pub const fn as_ptr(self) -> *mut u8 {
        self.0.as_ptr()
    }
}

// SAFETY: a pointer is only an address; rule 5 of the device and store contracts says who keeps the memory alive and
// unaliased while an operation uses it (the in-flight table).
unsafe impl Send for HostPointer {}
// SAFETY: as above; sharing the address grants no access.
unsafe impl Sync for HostPointer {}

/// A range of host memory that a device [locks](Device::lock_host).
#[derive(Clone, Copy, Debug)]
pub struct HostRegion {
    /// The first byte.
    pub base: HostPointer,
    /// Its length.
    pub len: Bytes,
}

/// One operation on a stream. Lengths are in bytes.
pub enum StreamOp {
    /// Host memory to device memory.
    CopyIn {
        /// Source.
        host: HostPointer,
        /// Destination, mapped.
        device: DeviceAddress,
        /// Bytes.
        len: u64,
    },
    /// Device memory to host memory.
    CopyOut {
        /// Source, mapped.
        device: DeviceAddress,
        /// Destination.
        host: HostPointer,
        /// Bytes.
        len: u64,
    },
    /// Fill device memory with zero bytes.
    Zero {
        /// Destination, mapped.
        device: DeviceAddress,
        /// Bytes.
        len: u64,
    },
    /// Run a closure on the stream's timeline. It must not wait for closures of another stream, which may run on the
    /// same thread. On a CUDA device it must not wait for any other work of the device, nor for a thread that does: a
    /// test that did so never ended on an H100 (CUDA's documentation of `cuLaunchHostFunc` forbids it). Nor must it
    /// call the CUDA driver there. The device makes no such call there either: within a closure it queues `map`,
    /// `submit`, `release` and `discard`, and refuses what it cannot queue.
    Call(Box<dyn FnOnce() + Send>),
    /// Do nothing. It ends when everything before it on the stream has ended, also what others put there.
    Mark,
}

impl fmt::Debug for StreamOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CopyIn { device, len, .. } => write!(f, "CopyIn({device:?}, {len})"),
            Self::CopyOut { device, len, .. } => write!(f, "CopyOut({device:?}, {len})"),
            Self::Zero { device, len } => write!(f, "Zero({device:?}, {len})"),
            Self::Call(_) => f.write_str("Call"),
            Self::Mark => f.write_str("Mark"),
        }
    }
}

/// The direction of a stream's work. A device may map it to priorities or copy engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StreamKind {
    /// Host to device copies.
    Fill,
    /// Device to host copies.
    WriteBack,
    /// The caller's compute.
    Compute,
}

fn no_handles(device: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("streams of the device {device} have no handle of a driver"))
        .remedy("put closures on the stream, or use a CUDA device")
}

/// See the [module documentation](self) for the contract.
pub trait Device: Send + Sync + fmt::Debug {
    /// Such as `"host"`, `"cuda:0"`, `"sim"`.
    fn name(&self) -> &str;
    /// Bytes of a page and of a frame.
    fn page_size(&self) -> PageSize;
    /// Whether the store may read into and write from mapped device addresses directly.
    fn direct_io(&self) -> bool;
    /// Whether this process may access mapped device addresses as memory. If not, bytes are copied in and out.
    fn host_addressable(&self) -> bool;

    /// What DLPack calls this device; `None` if it has no name there. Memory that this process
    /// [may access](Self::host_addressable) is the CPU's there, whatever this says.
    fn dlpack(&self) -> Option<DLDevice> {
        None
    }

    /// The node of the machine's memory that is nearest to the device for copies, if it is known.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// Reserves a contiguous address range of `pages` pages, aligned to the page size, inaccessible until mapped.
    fn reserve(&self, pages: u32) -> Result<DeviceAddress>;
    /// Gives a range back. Frames that are still behind it are free: they move away and keep their memory.
    fn release(&self, base: DeviceAddress, pages: u32) -> Result<()>;

    /// How much memory further frames could take now. The default is for a device in this machine's memory: what this
    /// process may use and does not use yet.
    fn free_memory(&self) -> Result<Bytes> {
        MemoryLimit::detect().map(|memory| memory.free())
    }
    /// Bytes of page tables that the kernel keeps for the device's addresses, in this process. It is counted as frames
    /// come and go, not looked up. Two parts make it up: the tables of the frames, each at most
    /// [`tables_of_a_frame`](HostDevice::tables_of_a_frame); and one table for each table of tables (1 GiB of
    /// addresses, with pages of 4 KiB) that has a frame. The default is none.
    fn page_tables(&self) -> Bytes {
        Bytes::ZERO
    }
    /// How many frames exist: ids `0..count`. On the host device a new frame takes no memory; mapping and filling it
    /// does. On a GPU a new frame takes its memory.
    fn frame_count(&self) -> u32;
    /// Makes frames `0..count` exist. Never removes frames.
    fn grow_frames(&self, count: u32) -> Result<()>;
    /// Contract rule 1.
    fn map(&self, frame: FrameId, address: DeviceAddress) -> Result<()>;
    /// As [`map`](Self::map), for a single page that the caller waits for. A device that maps after the call has
    /// returned may map within this call, and save the hand-over. Do not call it on a thread that reports completions:
    /// it would delay them.
    fn map_here(&self, frame: FrameId, address: DeviceAddress) -> Result<()> {
        self.map(frame, address)
    }
    /// These frames are about to be [mapped](Self::map) at these addresses, each by a call of its own. They are behind
    /// other pages, or behind none; nobody uses them there any more. A device for which it is cheaper to take several
    /// frames away at once does so here. By default nothing happens.
    fn map_soon(&self, _frames: &[(FrameId, DeviceAddress)]) {}
    /// Where the operations of a fill write the bytes of the frame that is behind `address`. By default at that
    /// address. A device that shows pages to the program only when they are [published](Self::publish) gives another.
    ///
    /// # Errors
    /// `Internal` if the frame is not behind that address.
    fn fill_address(&self, _frame: FrameId, address: DeviceAddress) -> Result<DeviceAddress> {
        Ok(address)
    }
    /// A fill has ended well: from now on whoever touches the page's address finds the bytes there. By default they
    /// have been there all along. Called once for each fill, before anybody is told of its end, also on threads that
    /// report completions: it does not wait.
    ///
    /// # Errors
    /// The device's. Then the fill has failed.
    fn filled(&self, _frame: FrameId, _address: DeviceAddress) -> Result<()> {
        Ok(())
    }
    /// As [`filled`](Self::filled), for fills that have ended together. Returns a result for each, in their order.
    fn filled_all(&self, pages: &[(FrameId, DeviceAddress)]) -> Vec<Result<()>> {
        pages.iter().map(|(frame, address)| self.filled(*frame, *address)).collect()
    }
    /// The bytes of a filled frame must be at its page's address now, for operations that read them there. They stay
    /// until the frame is mapped elsewhere, protected or discarded. By default they are there.
    ///
    /// # Errors
    /// The device's. Then the operation has failed.
    fn publish(&self, _frame: FrameId, _address: DeviceAddress) -> Result<()> {
        Ok(())
    }
    /// Whether the device is told of [pins](Self::pinned): it may hide pages whose bytes are there. Asked once.
    fn hides_pages(&self) -> bool {
        false
    }
    /// Somebody has just pinned these pages, whose bytes are there: they must be at their addresses until the pins end.
    /// What cannot be shown now is shown when it is touched. Called at every pin, on the caller's thread, if the device
    /// [hides pages](Self::hides_pages).
    fn pinned(&self, _first: DeviceAddress, _pages: u32) {}
    /// Contract rule 2.
    fn protect(&self, frame: FrameId) -> Result<()>;
    /// Whether frames have no memory when they are made, and get it when they are mapped or later.
    fn makes_bare_frames(&self) -> bool {
        false
    }
    /// How much memory a frame has now. The default is a page.
    fn frame_memory(&self, _frame: FrameId) -> Result<Bytes> {
        Ok(Bytes::new(self.page_size().bytes()))
    }
    /// Contract rule 3.
    fn discard(&self, frame: FrameId) -> Result<()>;

    /// Locks host memory, so that the device copies from and to it directly. Rule 5 of the contract covers the memory
    /// until [`unlock_host`](Self::unlock_host) returns. The default locks it in memory and does no more.
    fn lock_host(&self, memory: HostRegion) -> Result<()> {
        sys::lock(memory.base.as_ptr() as u64, memory.len.get()).map_err(|cause| sys::lock_refused(memory.len, cause))
    }
    /// Undoes a [`lock_host`](Self::lock_host) of the same range. No operation in flight uses it.
    fn unlock_host(&self, _memory: HostRegion) -> Result<()> {
        Ok(())
    }

    /// A new stream.
    fn create_stream(&self, kind: StreamKind) -> Result<StreamId>;
    /// Adopts a stream that somebody else owns, under contract rule 8. By default it is refused.
    ///
    /// # Safety
    /// The handle is that of a stream, and stays so until [`forget_stream`](Self::forget_stream) or
    /// [`close`](Self::close) has returned. A closure on a stream may not wait, so if one forgets this stream, the
    /// handle stays that of a stream until `close` has returned.
    ///
    /// # Errors
    /// `Unsupported` if streams have no handles; `InvalidArgument` for a stream of another GPU or context.
    unsafe fn adopt_stream(&self, _raw: RawStream) -> Result<StreamId> {
        Err(no_handles(self.name()))
    }
    /// Forgets an adopted stream: its id and its events are not used any more.
    fn forget_stream(&self, _stream: StreamId) {}
    /// The handle of a stream, for whoever puts work on it. By default there is none.
    ///
    /// # Errors
    /// `Unsupported` if streams have no handles.
    fn raw_stream(&self, _stream: StreamId) -> Result<RawStream> {
        Err(no_handles(self.name()))
    }
    /// Whether a [`StreamOp::Mark`] on this stream would work now.
    ///
    /// # Errors
    /// `InvalidArgument` while the stream is being captured into a graph, because nothing that is put on it runs.
    /// `Closed`. Any other kind means that the device could not tell; it is asked again when the mark is put on the
    /// stream.
    fn can_mark(&self, stream: StreamId) -> Result<()>;
    /// Queues `op`. If `token` is given, its completion is reported, and the event behind it is returned if it was
    /// taken up (contract rule 7).
    fn submit(&self, stream: StreamId, op: StreamOp, token: Option<Token>) -> Option<EventId>;
    /// Marks the current end of `stream`.
    fn record(&self, stream: StreamId) -> Result<EventId>;
    /// Makes later work on `stream` wait for `event`.
    fn wait(&self, stream: StreamId, event: EventId) -> Result<()>;
    /// Contract rule 6.
    fn poll(&self, event: EventId) -> Result<Poll<()>>;

    /// The failure that cost the device, if there was one. Nothing runs on the device any more.
    fn lost(&self) -> Option<Error> {
        None
    }

    /// Contract rule 9.
    fn close(&self) -> Result<()>;
}
