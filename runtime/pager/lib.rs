//! The pager decides which page is where, who may use it, and what moves next.
//!
//! It is a pure state machine. Requests and completions go in. [`Effects`] come out: moves to start, and requests that
//! are done. It does no I/O, reads no clock and starts no threads. So the same code runs in the runtime, in tests that
//! enumerate every order of events, and under a virtual clock.
//!
//! # Invariants
//!
//! 1. A frame belongs to at most one page. A page has at most one device frame and one host frame.
//! 2. Frames in use never exceed the budget. A fill starts only when it owns its frame, and its staging buffer where it
//!    needs one.
//! 3. A request holds all its frames and pages or none: it is admitted as a unit (see `admission`). A request whose
//!    [scope] holds pins never waits for another holder (`docs/liveness.md`).
//! 4. `purses <= free` and `awaiting + coming <= free - purses + transit`. The frames in purses exist. One frame is on
//!    its way for each admitted page that has none yet, and for each frame still to be set aside. Where a failure
//!    breaks this, the pump repairs it by choosing another victim.
//! 5. A dirty page's bytes exist in exactly one place until a write back has been confirmed.
//! 6. A pinned page stays where it is while its guard lives.
//! 7. A page whose fill has not ended is pinned only if it was *lent*: to a request for a stream, once the device has
//!    taken up the copy, for which the stream waits. If such a fill fails, the page keeps its frame, and is neither
//!    filled again nor evicted, until those pins have ended.
//! 8. `declared + floor <= frames`, where `frames` counts those that exist and are not leaving. So the frames that
//!    scopes declared, spent or not, exist beside the floor.
//!
//! # Locking
//!
//! A [`Pager`] is used under one latch. Only [`PageWord`]s are touched without it (see [`state`]), and only to pin and
//! unpin resident pages (see [`pin`]). Effects are carried out after the latch is released. `protect` is the exception:
//! the frame's next use must not overtake it.

#[macro_use]
#[doc(hidden)]
pub mod sync;
#[macro_use]
mod check;

mod admission;
mod bits;
mod by_class;
mod config;
mod effects;
pub mod error;
mod granted;
pub mod ids;
mod links;
mod numbers;
mod order;
mod page_move;
mod pager;
pub mod policy;
#[doc(hidden)]
pub mod random;
mod reported;
mod residency;
mod runs;
mod stats;
mod steps;
mod terms;
#[cfg(all(test, not(loom)))]
mod tests;
mod usage;
mod views;
mod word;

#[doc(hidden)]
pub use admission::closing;
pub use admission::{Holder, PASSES_MAX, Waiter, WaitsFor, WhoWaits, scope};
pub use by_class::ClassStats;
pub use config::PagerConfig;
pub use effects::Effects;
pub use error::{Error, ErrorKind, Result};
pub use granted::{Granted, Submitted, WaitCause};
pub use ids::{
    Bytes, FileId, FillPoint, FrameId, HostFrameId, MoveId, PageId, PageIndex, PageSize, RequestId, ScopeId,
    SegmentClass, SegmentId, StagingId, Tier, WalkerId,
};
pub use page_move::{Move, Place, Priority};
pub use pager::Pager;
pub use pin::Gate;
pub use policy::{Policy, PolicyKind, WalkerPlace};
pub use residency::{Backing, Committed, DiskCopy, PageView, Unwritten};
pub use runs::PageRun;
pub use scope::{Holdings, ScopeTerms};
pub use state::{PageWord, PageWords, Snapshot, State, TryPin, Unpin};
pub use stats::{FrameStats, PagerStats, WalkerStats};
pub use terms::{Purpose, ScopePriority, Terms};
pub use word::access::{Access, AccessLog, PageChain, PageUse, PageUses, Recorded, Recorder};
pub use word::{pin, state};
