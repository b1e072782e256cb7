//! `outcore`: an out-of-core tensor runtime.
//!
//! A program uses tensors that together are larger than the memory it may use. outcore keeps them in fixed-size pages
//! across device memory, host memory and disk, brings each page up before it is needed, and takes it away when
//! something else needs the room. A tensor has one contiguous address from open to close; budgets are hard.
//!
//! - [`Runtime::builder`] opens a runtime: budgets, page size, [policy](PolicyKind), or
//!   [one of your own](RuntimeBuilder::custom_policy), [I/O backend](IoBackend).
//! - [`Runtime::open_model`] takes in a GGUF or safetensors model where it lies; [`Runtime::alloc`] makes a read-write
//!   tensor, which may be larger than memory.
//! - [`Runtime::pin`] brings a [`Tensor`], [some of its rows](Tensor::rows), or several tensors into memory and gives a
//!   guard: while it lives the bytes stay. Pins are futures of any executor, or block with
//!   [`wait`](PinRequest::wait).
//! - [`Runtime::plan`] declares the order of use, so that pages come before they are wanted. Without it outcore
//!   recognises an order that repeats.
//! - [`Runtime::stats`] says what happened: hits, waiting by cause, bytes by link. [`Runtime::observe`] also tells the
//!   best possible hits, who waits for what, and where pages are.
//!
//! ```
//! use outcore::{Bytes, DType, PageSize, Runtime};
//!
//! let runtime = Runtime::builder().page_size(PageSize::new(Bytes::kib(64))?).device_budget(Bytes::mib(1)).open()?;
//! let table = runtime.alloc(DType::F32, &[1024, 1024])?; // 4 MiB of zeros, in a budget of 1 MiB
//! for row in 0..1024 {
//!     let row = table.rows(row..row + 1)?;
//!     runtime.pin(&row).write().wait()?.view_mut::<f32>()?.fill(0.5);
//! }
//! let mut sum = 0.0;
//! for row in 0..1024 {
//!     let row = table.rows(row..row + 1)?;
//!     sum += runtime.pin(&row).wait()?.view::<f32>()?.iter().sum::<f32>();
//! }
//! assert_eq!(sum, 0.5 * 1024.0 * 1024.0);
//! assert!(runtime.stats().traffic.peak_device <= Bytes::mib(1));
//! runtime.close()?;
//! # Ok::<(), outcore::Error>(())
//! ```
//!
//! Every failure is one [`Error`]: a [kind](Error::kind) to match on, and a sentence that names the thing, the limit
//! and the remedy. The library prints nothing; it reports through [`tracing`].
//!
//! Beside what is named here there are [`mod@pin`] (which guard to use), [`mod@stats`] (what a runtime tells of
//! itself), [`mod@policy`] (for a policy of your own), [`mod@format`] (headers of model files), [`mod@load`] (tensors
//! in ordinary memory), [`machine`] (what the machine gives), [`mod@device`] and [`store`] (for a device or a source of
//! pages of your own), and [`dlpack`]. A GPU's memory is the crate `outcore-cuda`'s. Policies on traces, machines that
//! are not there, and what a job needs are the crate `outcore-lab`'s.

// The state machine that decides, a crate of its own; and its macro `invariant`.
#[macro_use]
extern crate outcore_pager as pager;

mod budget;
mod compute;
mod config;
pub mod device;
pub mod dlpack;
mod dtype;
pub mod durable;
mod engine;
pub mod format;
pub mod load;
mod lookahead;
mod memory;
mod model;
mod observe;
#[doc(hidden)]
pub mod os;
pub mod pin;
mod ranges;
mod runtime;
mod segment;
mod settings;
mod shared;
pub mod stats;
pub mod store;
mod streams;
mod tensor;
mod verify;

use pager::{error, ids, sync};

pub use compute::ComputeStream;
pub use config::{DeviceBudget, RuntimeBuilder};
pub use dtype::DType;
#[doc(inline)]
pub use error::{Error, ErrorKind, Result};
#[doc(inline)]
pub use ids::{Bytes, PageSize, Tier};
pub use lookahead::Lookahead;
pub use model::Model;
#[doc(inline)]
pub use os::machine;
#[doc(inline)]
pub use pager::{PolicyKind, ScopePriority};
pub use pin::{DevicePin, PinGuard, PinRequest, PinSet, Plan, Read, Scope, ScopeBuilder, StreamPin, Walker, Write};
pub use runtime::Runtime;
#[doc(inline)]
pub use stats::Stats;
pub use store::IoBackend;
pub use tensor::Tensor;
pub use verify::Verify;

/// Which page goes when a frame is needed: the trait of policies, and the names of pages that it speaks of.
///
/// [`RuntimeBuilder::custom_policy`] opens a runtime with a policy of your own; `docs/extending.md` shows one.
pub mod policy {
    #[doc(inline)]
    pub use crate::ids::{PageId, PageIndex, SegmentClass, SegmentId, WalkerId};
    #[doc(inline)]
    pub use crate::pager::PageChain;
    #[doc(inline)]
    pub use crate::pager::policy::{Policy, PolicyKind, Take, WalkerPlace, Want};
}

/// What the tests of outcore and of its extensions use: the parts below the runtime. It changes without notice.
#[cfg(any(test, feature = "testing"))]
pub mod testing {
    pub use crate::device::host::{HostDevice, HostDeviceConfig};
    pub use crate::device::slab::{HostSlab, HostSlabConfig};
    pub use crate::store::backend::operation::{
        CallHook, FolderCall, Injected, IoCall, IoKind, IoOp, RoomCall, RoomKind,
    };
    pub use crate::store::backend::own_read::OwnRead;
    pub use crate::store::contract::Store;
    pub use crate::store::file::{DirectIo, FileUse};
    pub use crate::store::probe::open_store;
    pub use crate::store::scratch::{ScratchFile, ScratchOptions, ScratchRoom, SlotIndex, SlotRun};
}

/// The README's example has to compile; `tests/runtime/readme.rs` runs it.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

/// The programs in the guide to extensions, which run as they stand.
#[cfg(doctest)]
#[doc = include_str!("../../docs/extending.md")]
struct Extending;
