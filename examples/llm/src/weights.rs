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

/// An expert that has arrived: its place among those that were drawn, and its rows in the order of their names.
pub type Arrived<'a> = (usize, Vec<Rows<'a>>);

/// Experts that were drawn, as they arrive.
pub trait Arrivals {
    /// Some of the experts at the places `among` that nobody has taken yet: those that have arrived, and that `fits`
    /// takes, which is asked about one after the other. Blocks until there is one; empty only if all of them were
    /// taken. `fits` must take the first that it is asked about.
    fn next(&mut self, among: Range<usize>, fits: &mut dyn FnMut(usize) -> bool) -> Result<Vec<Arrived<'_>>>;
}

/// Gives a model the bytes of its weights, and decides what is resident.
///
/// Contract: between two calls of [`Weights::will_use`] the model asks for the declared steps in the declared order,
/// one at a time, each once, and drops a guard before it asks for the next. Between two of them it may
/// [draw](Weights::draw) experts, or ask for the steps of [`Weights::drawn`]. The bytes of a row are the file's bytes.
pub trait Weights: Send + Sync {
    /// The bytes of rows `rows` of `tensor`. Blocks until they are resident.
    fn rows(&self, tensor: TensorId, rows: Range<u64>) -> Result<Rows<'_>>;

    /// How many rows of `tensor` may be held at once, at least 1. Must not change while the model is open.
    fn tile_rows(&self, tensor: TensorId) -> u64;

    /// Declares the order in which a pass that starts now will use the weights: all but experts, which are drawn.
    fn will_use(&self, order: &[Step]);

    /// Asks for the rows of all experts that a router has drawn, those of each expert together. `None` if one of them
    /// has more rows than may be held at once: then the model asks for them by [`rows`](Self::rows). What probably
    /// follows is `foreseen`: nobody may come to wait because of that.
    fn draw(&self, _experts: &[Vec<Step>], _foreseen: &[Step]) -> Result<Option<Box<dyn Arrivals + '_>>> {
        Ok(None)
    }

    /// Says which rows of an expert are used next, each once, in this order. Then probably those of `foreseen` follow:
    /// nobody may come to wait because of that. A pass that is given up says that none are.
    fn drawn(&self, _steps: &[Step], _foreseen: &[Step]) {}

    /// Whether it pays to foresee what routers will draw.
    fn foresees(&self) -> bool {
        false
    }

    /// How long callers have waited for bytes, of [`Weights::rows`] or of [`Arrivals::next`], since the weights were
    /// opened.
    fn waited(&self) -> Duration {
        Duration::ZERO
    }
}
