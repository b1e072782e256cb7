//! `outcore`: an out-of-core tensor runtime.
//!
//! A program uses tensors that together are larger than the memory it may use. outcore keeps them in fixed-size pages
//! across device memory, host memory and disk, brings each page up before it is needed, and takes it away when something
//! else needs the room. A tensor has one contiguous address from open to close; budgets are hard.
//!
//! - [`Runtime::builder`] opens a runtime: budgets, page size, [policy](PolicyKind), or
//!   [one of your own](RuntimeBuilder::custom_policy), [I/O backend](IoBackend).
//! - [`Runtime::open_model`] takes in a GGUF or safetensors model where it lies; [`Runtime::alloc`] makes a read-write
//!   tensor, which may be larger than memory.
//! - [`Runtime::pin`] and [`Runtime::pin_mut`] bring a [`Tensor`], or [some of its rows](Tensor::rows), into memory and
//!   give a guard: while it lives the bytes stay. Pins are futures of any executor, or block with
//!   [`wait`](PinRequest::wait).
//! - [`Runtime::plan`] declares the order of use, so that pages come before they are wanted. Without it outcore
//!   recognises an order that repeats.
//! - [`Runtime::stats`] says what happened: hits, the best possible hits, waiting by cause, bytes by link.
//!
//! ```
//! use outcore::{Bytes, DType, PageSize, Runtime};
//!
//! let runtime = Runtime::builder().page_size(PageSize::new(Bytes::kib(64))?).device_budget(Bytes::mib(1)).open()?;
//! let table = runtime.alloc(DType::F32, &[1024, 1024])?; // 4 MiB of zeros, in a budget of 1 MiB
//! for row in 0..1024 {
//!     let row = table.rows(row..row + 1)?;
//!     runtime.pin_mut(&row).wait()?.view_mut::<f32>()?.fill(0.5);
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
//! Every failure is one [`Error`]: a [kind](Error::kind) to match on, and a sentence that names the thing, the limit and
//! the remedy. The library prints nothing; it reports through [`tracing`].
//!
//! The modules that are public beside this surface are the parts it is made of: [`mod@format`] (headers of model files),
//! [`machine`] (what the machine gives), [`store`] (reads and writes), [`device`] (frames, streams), [`pager`] (the pure
//! state machine that decides). Their traits are documented with their contracts. Policies on traces, machines that are
//! not there, and what a job needs are the crate `outcore-lab`'s.

// The state machine that decides, a crate of its own; and its macro `invariant`.
#[macro_use]
pub extern crate outcore_pager as pager;

mod compute;
mod config;
pub mod device;
pub mod dlpack;
mod dtype;
pub mod format;
pub mod machine;
mod observe;
mod pin;
mod ranges;
mod runtime;
#[cfg(test)]
#[path = "../tests/harness/scene.rs"]
mod scene;
mod segment;
mod settings;
pub mod store;
mod tensor;
mod transfer;

use pager::{error, ids, random, sync};

pub use compute::ComputeStream;
pub use config::{DeviceBudget, DeviceChoice, Lookahead, RuntimeBuilder, Verify};
pub use device::{DeviceAddress, LinkModel, RawStream};
pub use dtype::DType;
pub use error::{Error, ErrorKind, Result};
pub use ids::{
    Bytes, FileId, FillPoint, FrameId, HostFrameId, MoveId, PageId, PageIndex, PageSize, RequestId, ScopeId,
    SegmentClass, SegmentId, StagingId, Tier, WalkerId,
};
pub use observe::{Lane, PageStalls, Span, StallStats, TierStalls, Traffic};
pub use pager::policy::opt::Optimum;
pub use pager::{
    FrameStats, PageChain, PageUse, PageUses, PagerStats, PolicyKind, ScopePriority, WaitCause, WaitsFor, WalkerPlace,
    WalkerStats,
};
pub use pin::{
    Access, DeviceBytes, DevicePin, DevicePinMut, PinGuard, PinGuardMut, PinRequest, PinSet, PinSetMut, Read, Scope,
    ScopeBuilder, ScopeRequest, StreamPin, UnpinRefused, Walker, Write,
};
pub use runtime::{MemoryStats, Model, Runtime, ScratchStats, SegmentView, Stats};
pub use settings::{Chosen, Settings};
pub use store::{DiskProfile, IoBackend, ScratchAllocation};
pub use tensor::Tensor;
pub use transfer::waiting::{Holder, ScopeName, Waiter, Waiting};

/// Rules of the runtime that the laboratory follows, so that both are the same. Not for programs: they change without
/// notice.
#[doc(hidden)]
pub mod shared {
    pub use crate::config::staging_pages;
    pub use crate::format::names::{Expert, Role, expert, role};
    pub use crate::settings::{HUGE_PAGES_LEAST, page_within};
    pub use crate::store::queue::{Depth, Lane, Queue};
}

/// The README's example has to compile; `tests/readme.rs` runs it.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
