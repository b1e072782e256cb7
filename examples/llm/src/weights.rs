//! The interface between a model and the code that makes its bytes resident.

use std::fmt;
use std::ops::{Deref, Range};
use std::time::Duration;

use crate::dtype::WeightType;
use crate::error::{Error, Result};

/// A tensor of an open model: an index into [`ModelFiles::tensors`](crate::ModelFiles::tensors).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub u32);

/// What a model file says about one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightInfo {
    /// Its number.
    pub id: TensorId,
    /// Its name in the file.
    pub name: String,
    /// How its elements are stored.
    pub dtype: WeightType,
    /// Outer extent; 1 for a vector.
    pub rows: u64,
    /// Inner extent, contiguous.
    pub cols: u64,
    /// Index of its file in [`ModelFiles::paths`](crate::ModelFiles::paths).
    pub file: u32,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes of one row.
    pub row_bytes: u64,
}

impl WeightInfo {
    /// Where rows `rows` lie in the file, or an error naming the tensor where it has no such rows.
    pub fn byte_range(&self, rows: &Range<u64>) -> Result<Range<u64>> {
        if rows.start > rows.end || rows.end > self.rows {
            return Err(Error::Invalid(format!("tensor {:?} has {} rows, not {rows:?}", self.name, self.rows)));
        }
        Ok(self.offset + rows.start * self.row_bytes..self.offset + rows.end * self.row_bytes)
    }
}

/// Bytes of consecutive rows, resident for as long as this lives.
pub struct Rows<'a>(Box<dyn Deref<Target = [u8]> + Send + Sync + 'a>);

impl<'a> Rows<'a> {
    /// Wraps whatever keeps the bytes where they are, such as a page pin.
    pub fn new(guard: impl Deref<Target = [u8]> + Send + Sync + 'a) -> Self {
        Self(Box::new(guard))
    }
}

impl Deref for Rows<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Rows<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rows({} bytes)", self.len())
    }
}

/// One step of a pass: these rows of this tensor.
pub type Step = (TensorId, Range<u64>);

/// Gives a model the bytes of its weights, and decides what is resident.
///
/// Contract: between two calls of [`Weights::will_use`] the model asks for the declared steps in the declared order,
/// one at a time, each once, and drops a guard before it asks for the next. After [`Weights::drawn`] it asks for those
/// steps before it goes on, or has them by [`Weights::resident`] instead. The bytes of a row are the file's bytes.
pub trait Weights: Send + Sync {
    /// The bytes of rows `rows` of `tensor`. Blocks until they are resident.
    fn rows(&self, tensor: TensorId, rows: Range<u64>) -> Result<Rows<'_>>;

    /// How many rows of `tensor` may be held at once, at least 1. Must not change while the model is open.
    fn tile_rows(&self, tensor: TensorId) -> u64;

    /// Declares the order in which a pass that starts now will use the weights: all but experts, which are drawn.
    fn will_use(&self, order: &[Step]);

    /// Says which rows are used next, each once, in this order: those of the experts that a router has drawn. They come
    /// between two steps that were declared. The next router will probably draw those of `foreseen`: nobody may come to
    /// wait because of that.
    fn drawn(&self, _steps: &[Step], _foreseen: &[Step]) {}

    /// The bytes of all these rows, which a router has drawn, if all are resident now, and room allows that they are
    /// held together. Then they are no part of [`drawn`](Self::drawn).
    fn resident(&self, _steps: &[Step]) -> Option<Vec<Rows<'_>>> {
        None
    }

    /// Whether it pays to foresee what routers will draw.
    fn foresees(&self) -> bool {
        false
    }

    /// How long callers of [`Weights::rows`] have waited for bytes, since the weights were opened.
    fn waited(&self) -> Duration {
        Duration::ZERO
    }
}
