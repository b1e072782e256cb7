//! What one call pins: a tensor, or several.

use super::Read;
use super::guard::{Complete, Guard};
use super::host::{PinGuard, PinSet};
use super::sealed::Sealed;
use crate::tensor::Tensor;

/// One tensor, or several: what one call pins, prefetches or evicts.
pub trait Tensors: Sealed {
    /// The guard that [`Runtime::pin`](crate::Runtime::pin) gives to read: a [`PinGuard`](crate::PinGuard) of one
    /// tensor, a [`PinSet`](crate::PinSet) of several.
    type Guard: Complete<Access = Read>;
    #[doc(hidden)]
    fn of(&self) -> <Self::Guard as Guard>::Of<'_>;
    #[doc(hidden)]
    #[inline]
    fn as_slice(&self) -> &[Tensor] {
        Self::Guard::tensors(self.of())
    }
}

impl Sealed for Tensor {}
impl Tensors for Tensor {
    type Guard = PinGuard;
    #[inline]
    fn of(&self) -> &Tensor {
        self
    }
}

impl Sealed for [Tensor] {}
impl Tensors for [Tensor] {
    type Guard = PinSet;
    fn of(&self) -> &[Tensor] {
        self
    }
}

impl<const N: usize> Sealed for [Tensor; N] {}
impl<const N: usize> Tensors for [Tensor; N] {
    type Guard = PinSet;
    fn of(&self) -> &[Tensor] {
        self
    }
}

impl Sealed for Vec<Tensor> {}
impl Tensors for Vec<Tensor> {
    type Guard = PinSet;
    fn of(&self) -> &[Tensor] {
        self
    }
}
