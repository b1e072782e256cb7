//! `outcore`: an out-of-core tensor runtime.

pub mod device;
mod dtype;
mod error;
pub mod format;
mod ids;
pub mod machine;
pub mod store;

pub use dtype::DType;
pub use error::{Error, ErrorKind, Result};
pub use ids::{
    Bytes, FileId, FrameId, HostFrameId, MoveId, PageId, PageIndex, PageSize, RequestId, SegmentId, StagingId,
};
