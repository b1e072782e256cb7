//! What computes where the host cannot address the pages.

#![cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "CUDA is the only such device"))]

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use outcore::pin::DevicePin;
use outcore::{DType, Error, Read, Result, Write};

use crate::rule::{DeviceRule, Moment};

/// A part that is updated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpdatedPart {
    pub rule: DeviceRule,
    pub at: Moment,
    /// What the pins have of it from this tensor on: the parameter, and then its states, in `f32`.
    pub first: usize,
    /// The position of its first element in the block.
    pub offset: u64,
    pub elements: u64,
}

/// A part of which the working copy is made.
#[derive(Clone, Debug)]
pub(crate) struct CopiedPart {
    /// Its positions in the block.
    pub positions: Range<u64>,
}

/// The gradients of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GradientsOnDevice<'a> {
    /// `None` if they are zeros.
    pub pin: Option<&'a DevicePin<Read>>,
    pub dtype: DType,
    /// What each is multiplied by.
    pub factor: f32,
}

/// What is added to the gradients of a part. Elements are counted from the first one that is pinned.
#[derive(Debug)]
pub(crate) struct Added<'a> {
    pub first: usize,
    pub values: &'a [f32],
    pub factor: f32,
    /// The chunks that the values lie in, as far as they are the part's.
    pub whole: Range<usize>,
    /// Elements of the first of these chunks.
    pub head: usize,
}

/// Why a device did not do what it was given.
#[derive(Debug)]
pub(crate) struct Failed {
    pub error: Error,
    /// Whether some elements may have changed: work had been put on the device.
    pub has_changed: bool,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self { error, has_changed: false }
    }
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Self {
        failed.error
    }
}

/// What computes in place of the host, and how.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    pub kernels: Arc<dyn OnDevice>,
    /// By group.
    pub rules: Vec<DeviceRule>,
}

/// A device's kernels. What they do has the bits of the host, but for which NaN a NaN is. It has ended when a call
/// returns or unwinds.
pub(crate) trait OnDevice: Debug + Send + Sync {
    /// Updates parts of a block. The last tensor of the pins is the block's working copy if `has_working_copy`.
    fn update(
        &self,
        parts: &[UpdatedPart],
        pins: &mut DevicePin<Write>,
        gradients: GradientsOnDevice<'_>,
        has_working_copy: bool,
    ) -> Result<(), Failed>;

    /// Makes `bf16` of the parts of a block, each of which is a tensor of `from`.
    fn narrow(&self, parts: &[CopiedPart], from: &DevicePin<Read>, to: &mut DevicePin<Write>) -> Result<()>;

    /// Makes the tensor of a pin zeros.
    fn clear(&self, gradients: &mut DevicePin<Write>) -> Result<()>;

    /// Adds values to the gradients of a pin. Writes the sum of the squares of each chunk to `sums`.
    fn add(
        &self,
        gradients: &mut DevicePin<Write>,
        dtype: DType,
        added: &Added<'_>,
        sums: &mut [f64],
    ) -> Result<(), Failed>;
}
