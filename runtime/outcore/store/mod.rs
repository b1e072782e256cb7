//! Where pages come from and go: files, read and written past the page cache; [sources](PageSource) of your own; what a
//! disk needs for its full rate ([`DiskProfile`]), and how that is measured.

// `engine.rs` is the one `Store`: files, checks, the queue, callers' reads, the end of an operation. A backend is only
// the loop that takes operations off the queue and gives them to the kernel (`backend/uring.rs`, `backend/threads.rs`).
// `backend/queue.rs` decides which operation may start, `backend/operation.rs` what a result from the kernel means.
// `file/` opens files, sees whether they changed, and keeps those open that were used last. `durable/` decides where
// pages are written that outlive the process.

pub(crate) mod backend;
pub(crate) mod contract;
pub(crate) mod durable;
mod engine;
pub(crate) mod file;
mod options;
pub(crate) mod probe;
pub(crate) mod scratch;
pub(crate) mod source;

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::device::{Completion, Completions};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::Bytes;
use crate::pager::Priority;

pub(crate) use self::backend::operation::{IoKind, IoOp};
pub(crate) use self::backend::own_read::OwnRead;
pub use self::backend::queue::QueueDepth;
// For the crates beside outcore, and not for programs: it changes without notice.
#[doc(hidden)]
pub use self::backend::queue::{Depth, Lane, Queue};
pub(crate) use self::contract::Store;
pub(crate) use self::file::FileUse;
pub(crate) use self::file::descriptors::no_descriptor_left;
pub use self::file::{DirectAlignment, FileIdentity};
pub use self::options::StoreOptions;
pub use self::probe::disk::DiskProfile;
pub use self::probe::{BackendProbe, FileProbe, Latency, ReadPoint, probe_backend, probe_file};
pub use self::scratch::ScratchAllocation;
pub(crate) use self::scratch::place::scratch_on_a_disk;
pub(crate) use self::scratch::{ScratchFile, ScratchOptions, ScratchRoom, SlotIndex, SlotRun};
pub use self::source::PageSource;
pub(crate) use self::source::caught::CaughtSource;
#[doc(inline)]
pub use crate::ids::FileId;

/// Offsets, lengths and buffers of operations are multiples of this many bytes, whatever the kernel's page size is:
/// enough for O_DIRECT on every common file system and device. A file that needs more is not read with O_DIRECT.
pub const IO_ALIGNMENT: u64 = 4096;

/// A page that passes through staging moves in chunks of this size: its operations of the store and of the link have
/// this many bytes. One read of this size keeps a disk as busy as larger ones do (`benches/store_latency.rs`). A link
/// reaches 0.94 of its rate with such copies (`docs/results/2026-11-26-h100.md`), which is more than a disk delivers.
/// Smaller chunks would cost more operations. A page of this size or less moves as one.
pub(crate) const CHUNK: Bytes = Bytes::mib(2);

/// An operation fails after this many EINTR and EAGAIN answers without progress. A loop without an end would look like
/// a hang.
const MAX_REPEATS: u32 = 10_000;

/// How files are read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum IoBackend {
    /// The first backend below that works here.
    Auto,
    /// io_uring with O_DIRECT.
    IoUring,
    /// A pool of threads calling `pread`/`pwrite` with O_DIRECT.
    Threads,
    /// A pool of threads calling `pread`/`pwrite` through the page cache.
    Buffered,
}

impl IoBackend {
    /// All backends but `Auto`, in the order in which `Auto` tries them.
    pub const CHOICES: [Self; 3] = [Self::IoUring, Self::Threads, Self::Buffered];
}

impl fmt::Display for IoBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::IoUring => "io_uring",
            Self::Threads => "threads",
            Self::Buffered => "buffered",
        })
    }
}

impl FromStr for IoBackend {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.trim().to_ascii_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            "io_uring" | "uring" => Ok(Self::IoUring),
            "threads" => Ok(Self::Threads),
            "buffered" => Ok(Self::Buffered),
            _ => Err(Error::new(ErrorKind::InvalidArgument, format!("I/O backend {text:?} is not known"))
                .remedy("choose auto, io_uring, threads or buffered")),
        }
    }
}
