//! `outcore`: an out-of-core tensor runtime.

mod config;
pub mod device;
mod dtype;
mod error;
pub mod format;
mod ids;
pub mod machine;
mod observe;
pub mod pager;
mod pin;
mod runtime;
mod segment;
pub mod store;
mod sync;
mod tensor;
mod transfer;

pub use config::{Lookahead, RuntimeBuilder, Verify};
pub use device::LinkModel;
pub use dtype::DType;
pub use error::{Error, ErrorKind, Result};
pub use ids::{
    Bytes, FileId, FrameId, HostFrameId, MoveId, PageId, PageIndex, PageSize, RequestId, SegmentId, StagingId,
};
pub use observe::{Lane, Span, StallStats, Traffic};
pub use pager::{PagerStats, PolicyKind, WaitCause};
pub use pin::{PinGuard, PinGuardMut, PinRequest, PinSet};
pub use runtime::{Model, Runtime, SegmentView, Stats};
pub use store::IoBackend;
pub use tensor::Tensor;
