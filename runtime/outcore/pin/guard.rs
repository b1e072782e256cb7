//! What every guard is made of, and can be made to.

#![allow(private_interfaces, reason = "the trait that names private types is sealed: nobody outside can call it")]

use super::sealed::Sealed;
use super::{Access, Hold, Write};
use crate::device::EventId;
use crate::error::Result;
use crate::pager::{PageRun, Purpose};
use crate::tensor::Tensor;

/// What a [`PinRequest`](crate::PinRequest) gives.
pub trait Guard: Sealed + Sized {
    /// What is pinned: tensors, and the stream if it is for work on one.
    #[doc(hidden)]
    type Of<'a>: Copy + Unpin;
    #[doc(hidden)]
    const PURPOSE: Purpose;
    #[doc(hidden)]
    fn tensors(of: Self::Of<'_>) -> &[Tensor];
    #[doc(hidden)]
    fn check(of: Self::Of<'_>) -> Result<()>;
    /// Makes a guard of pins. The pages' bytes are all there.
    #[doc(hidden)]
    fn new(of: Self::Of<'_>, runs: &[PageRun], hold: Hold) -> Self;
    /// Makes a guard of pins. Some pages' bytes are there only when `after` has happened, which matters only to guards
    /// that read on a stream. If this fails, it has given the pins back.
    #[doc(hidden)]
    fn new_after(of: Self::Of<'_>, runs: &[PageRun], hold: Hold, _after: Option<EventId>) -> Result<Self> {
        Ok(Self::new(of, runs, hold))
    }
    /// Gives back pins that nobody wants any more.
    #[doc(hidden)]
    fn give_back(of: Self::Of<'_>, runs: &[PageRun], hold: Hold) {
        drop(Self::new(of, runs, hold));
    }
}

/// A guard that exists when all bytes have come: any but a [`StreamPin`](crate::StreamPin).
pub trait Complete: Guard {
    /// What it allows.
    type Access: Access;
    /// The guard of the same tensors that allows writing.
    type Write: Complete<Access = Write> + for<'a> Guard<Of<'a> = Self::Of<'a>>;
}
