//! Devices: where frames live, and the streams that copy into and out of them.
//!
//! A [`Device`] owns three things: address ranges (one per segment, reserved for life), frames (physical room for one
//! page each), and streams (queues of operations that run in order). It knows nothing of tiers, policies or pages in
//! flight: the pager decides, the transfer engine calls.
//!
//! # Contract (every device passes `tests/device/suite.rs`)
//!
//! 1. `map(frame, address)` puts `frame` behind `address`; the bytes the frame held travel with it. Afterwards the
//!    address the frame was behind before holds nothing and any access there faults. A frame that was behind
//!    `address` keeps its memory but is behind no address until it is mapped again. The caller guarantees that no
//!    operation in flight touches either address. A device may do this behind the call, in order, ahead of the
//!    operations that are submitted after it: then a refusal is the failure of those that name the address.
//! 2. `protect(frame)` makes the frame's address inaccessible until the next `map` of that frame; a device for which
//!    this costs time may do nothing unless it was built `strict`.
//! 3. `discard(frame)` gives the frame's physical memory back to the system; its bytes are lost, any access to its
//!    address faults, and a later `map` brings an arbitrary but readable content.
//! 4. `submit` never blocks on the device. Operations of one stream run in submission order; two streams are ordered
//!    only by events. An operation with a token reports to the device's [`Completions`] exactly once.
//! 5. Memory named by a submitted operation is borrowed until its completion is reported; dropping a waiter elsewhere
//!    changes nothing.
//! 6. `poll` is three-valued: `Ready`, `Pending`, or an error. A failure is never reported as "not ready". An
//!    operation that fails reports to its token; one without a token fails every later event of its stream.
//! 7. An operation with a token that the device has *taken up* cannot be refused any more: only the loss of the device
//!    keeps it from ending well, if what it names is mapped and valid and it is no closure, which may panic. `submit`
//!    returns the event behind it. Where it returns none, because the operation waits for its page, the device's
//!    [`Completions`] are told when it is taken up; of one that is refused they are not. Of two events of one stream the
//!    later one is the greater. To be told is no promise: an operation may end without.
//! 8. An adopted stream stays its owner's: the device records events on it and nothing else of its own accord, and never
//!    destroys it. `forget_stream` waits for nothing; tokens submitted before are reported all the same. On a stream that is
//!    being captured into a graph every operation is refused, so that none becomes part of the graph.
//! 9. `close` waits for everything submitted, then joins its threads. Afterwards `submit` completes with
//!    [`ErrorKind::Closed`], not on the caller's stack. Mappings stay until the device is dropped. The last owner may go
//!    on one of the device's own threads, in the receiver of completions or in a closure. A drop there does not wait for
//!    that thread, which ends when nothing is left for it. Nor does a `close`, unless it refuses.

mod ballast;
mod factory;
pub(crate) mod host;
mod kernel_pages;
mod link;
mod mappings;
pub mod parts;
mod process;
pub(crate) mod slab;
mod stream;
mod sys;
mod tables;

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::task::Poll;

use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, PageSize};
use crate::machine::MemoryLimit;

#[doc(inline)]
pub use crate::ids::{FillPoint, FrameId, HostFrameId, StagingId};
pub use factory::{DeviceFactory, DeviceSettings, Host};
pub(crate) use host::{HostDevice, HostDeviceConfig};
pub(crate) use kernel_pages::KernelPages;
pub use link::{Direction, LinkModel, LinkSchedule};
pub(crate) use process::Opened;
pub(crate) use slab::{HostSlab, HostSlabConfig};

/// A device address. On a device whose memory is [addressable](Device::host_addressable) it is an ordinary pointer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceAddress(pub(crate) u64);

impl DeviceAddress {
    /// The address that a device gave this number.
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

/// The handle of a stream of the driver, a `CUstream`, as a pointer nobody looks behind. A null handle is the legacy
/// default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawStream(*mut c_void);

impl RawStream {
    /// The handle as its owner has it.
    pub const fn new(handle: *mut c_void) -> Self {
        Self(handle)
    }
    /// The handle, to be cast to the type that whoever calls the driver has for it.
    pub const fn as_ptr(self) -> *mut c_void {
        self.0
    }
}

// SAFETY: a handle is a name; the driver's functions may be called with it from any thread. That the stream exists is the
// promise of whoever has it adopted (`Device::adopt_stream`).
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

/// A queue of device operations that run in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamId(pub(crate) u32);

impl StreamId {
    /// The stream to which a device gave this number.
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

    /// The event of the first `count` items of a stream, for devices that count the items of each stream: a count fits 44
    /// bits, and nothing has to be freed.
    pub const fn of(stream: StreamId, count: u64) -> Self {
        Self((stream.0 as u64) << Self::COUNT_BITS | count)
    }
    /// The stream and the count of an event that [`of`](Self::of) made.
    pub const fn parts(self) -> (StreamId, u64) {
        (StreamId((self.0 >> Self::COUNT_BITS) as u32), self.0 & ((1 << Self::COUNT_BITS) - 1))
    }
    /// The event to which a device gave this number. Of two events of one stream the later one has the greater number.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }
    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Names an operation in flight to whoever is told of its completion.
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

/// Told of completions, from threads of the device or the store. Must not block, and must not call back into the
/// caller while holding a lock the caller may hold.
pub trait Completions: Send + Sync {
    /// These operations have ended; their memory is no longer borrowed. May drain `done`.
    fn completed(&self, done: &mut Vec<Completion>);

    /// Whether to report the end of this operation takes so long that others' reports should not wait for it. A store that
    /// has one thread for many reports then has another one do it. Must not block.
    fn takes_long(&self, _token: Token) -> bool {
        false
    }

    /// The device has taken up an operation that had to wait when it was submitted (rule 7 of the [contract](self)); it has
    /// ended when `end` has happened, and may have by now.
    fn taken_up(&self, _token: Token, _end: EventId) {}
}

/// Host memory an operation reads or writes.
#[derive(Clone, Copy, Debug)]
pub struct HostPointer(pub(crate) NonNull<u8>);

impl HostPointer {
    /// The memory at `pointer`.
    ///
    /// # Safety
    /// Whoever puts the pointer into an operation must keep the operation's whole range valid, and free of other
    /// accesses that conflict with it, from submission until completion.
    pub const unsafe fn new(pointer: NonNull<u8>) -> Self {
        Self(pointer)
    }
    /// The memory of a page on a device whose frames the store can reach; `None` for address 0.
    pub(crate) fn of_page(address: DeviceAddress) -> Option<Self> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(address.get() as usize)).map(Self)
    }
    /// The hash of the first `len` bytes. Only for memory that belongs to a move whose operation is complete or not
    /// yet submitted: the pager lets nobody else touch it, and it is at least a page long.
    pub(crate) fn checksum(self, len: u64) -> u64 {
        // SAFETY: the constructor's promise covers the range, and the caller's move owns it (above), so nobody writes.
        let bytes = unsafe { std::slice::from_raw_parts(self.0.as_ptr(), len as usize) };
        twox_hash::XxHash3_64::oneshot(bytes)
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
    /// Run a closure on the stream's timeline. It must not wait for closures of another stream, which may run on the same
    /// thread, and on a CUDA device it must not call the CUDA driver. There the device makes no such call either, whatever
    /// of it the closure uses: `map`, `submit`, `release` and `discard` are queued, what cannot be is refused.
    Call(Box<dyn FnOnce() + Send>),
    /// Do nothing: it has ended when everything that is on the stream before it has, also what others put there.
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

/// Which way a stream's work goes; a device may map it to priorities or copy engines.
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
    /// `"host"`, `"cuda:0"`, `"sim"`.
    fn name(&self) -> &str;
    /// Bytes of a page and of a frame.
    fn page_size(&self) -> PageSize;
    /// Whether the store may read into and write from mapped device addresses directly.
    fn direct_io(&self) -> bool;
    /// Whether this process may access mapped device addresses as memory. Where it may not, bytes come and go by copies.
    fn host_addressable(&self) -> bool;

    /// The GPU's number, as the driver counts; `None` where memory is not a GPU's.
    fn gpu(&self) -> Option<u32> {
        None
    }

    /// The node of the machine's memory from which copies to the device are shortest, if it is known.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// Reserves a contiguous address range of `pages` pages, aligned to the page size, inaccessible until mapped.
    fn reserve(&self, pages: u32) -> Result<DeviceAddress>;
    /// Gives a range back. Frames still behind it are free: they move away and keep their memory.
    fn release(&self, base: DeviceAddress, pages: u32) -> Result<()>;

    /// How much memory more frames could take now. By default what this process may use of the machine's, and does not.
    fn free_memory(&self) -> Result<Bytes> {
        MemoryLimit::detect().map(|memory| memory.free())
    }
    /// Bytes of page tables that the kernel keeps for the device's addresses, of this process's memory. Counted as frames come
    /// and go, and not looked up: those of the frames, of which each has at most [so many](HostDevice::tables_of_a_frame), and one
    /// for each table of tables (1 GiB of addresses, with pages of 4 KiB) in which a frame is. By default none.
    fn page_tables(&self) -> Bytes {
        Bytes::ZERO
    }
    /// How many frames exist: ids `0..count`. On the host device creating frames commits no memory, mapping
    /// and filling them does; on a GPU the memory is taken when they are created.
    fn frame_count(&self) -> u32;
    /// Makes frames `0..count` exist (grow only).
    fn grow_frames(&self, count: u32) -> Result<()>;
    /// Contract rule 1.
    fn map(&self, frame: FrameId, address: DeviceAddress) -> Result<()>;
    /// As [`map`](Self::map), for a lone page that the caller waits for: where a device maps behind the call, it may do so
    /// within it, and spare itself the hand-over. Not on a thread that reports completions, which would come late.
    fn map_here(&self, frame: FrameId, address: DeviceAddress) -> Result<()> {
        self.map(frame, address)
    }
    /// Contract rule 2.
    fn protect(&self, frame: FrameId) -> Result<()>;
    /// Whether frames have no memory when they are made, and get it when they are first mapped or later.
    fn makes_bare_frames(&self) -> bool {
        false
    }
    /// How much memory a frame has now. By default a page.
    fn frame_memory(&self, _frame: FrameId) -> Result<Bytes> {
        Ok(Bytes::new(self.page_size().bytes()))
    }
    /// Contract rule 3.
    fn discard(&self, frame: FrameId) -> Result<()>;

    /// Locks host memory, so that the device copies from and to it directly; rule 5 of the contract covers it until
    /// [`unlock_host`](Self::unlock_host) returns. By default it is locked in memory and no more.
    fn lock_host(&self, memory: HostRegion) -> Result<()> {
        sys::lock(memory.base.as_ptr() as u64, memory.len.get()).map_err(|cause| sys::lock_refused(memory.len, cause))
    }
    /// Undoes a [`lock_host`](Self::lock_host) of the same range. No operation in flight uses it.
    fn unlock_host(&self, _memory: HostRegion) -> Result<()> {
        Ok(())
    }

    /// A new stream.
    fn create_stream(&self, kind: StreamKind) -> Result<StreamId>;
    /// Takes in a stream that somebody else owns, under contract rule 8. By default there are none.
    ///
    /// # Safety
    /// The handle is that of a stream, and stays so until [`forget_stream`](Self::forget_stream) or
    /// [`close`](Self::close) has returned.
    ///
    /// # Errors
    /// `Unsupported` where streams have no handles; `InvalidArgument` for a stream of another GPU or context.
    unsafe fn adopt_stream(&self, _raw: RawStream) -> Result<StreamId> {
        Err(no_handles(self.name()))
    }
    /// Lets go of an adopted stream: its id and its events are not used any more.
    fn forget_stream(&self, _stream: StreamId) {}
    /// The handle of a stream, for whoever puts work on it. By default there is none.
    ///
    /// # Errors
    /// `Unsupported` where streams have no handles.
    fn raw_stream(&self, _stream: StreamId) -> Result<RawStream> {
        Err(no_handles(self.name()))
    }
    /// Whether [`StreamOp::Mark`] would mean anything on this stream now.
    ///
    /// # Errors
    /// `InvalidArgument` while the stream is being captured into a graph: nothing that is put on it runs. `Closed`. With
    /// another kind the device could not tell; it is asked again when the mark is put there.
    fn can_mark(&self, stream: StreamId) -> Result<()>;
    /// Queues `op`; where `token` is given, its completion is reported, and the event behind it returned if it has been
    /// taken up (contract rule 7).
    fn submit(&self, stream: StreamId, op: StreamOp, token: Option<Token>) -> Option<EventId>;
    /// Marks the current end of `stream`.
    fn record(&self, stream: StreamId) -> Result<EventId>;
    /// Makes later work on `stream` wait for `event`.
    fn wait(&self, stream: StreamId, event: EventId) -> Result<()>;
    /// Contract rule 6.
    fn poll(&self, event: EventId) -> Result<Poll<()>>;

    /// The failure that has cost the device, if one has: nothing runs on it any more.
    fn lost(&self) -> Option<Error> {
        None
    }

    /// Contract rule 9.
    fn close(&self) -> Result<()>;
}
