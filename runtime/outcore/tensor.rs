//! Tensors: named, typed, shaped byte ranges of segments.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::dtype::DType;
use crate::engine::Engine;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, PageIndex, PageSize};
use crate::pager::{Backing, PageRun};
use crate::segment::Segment;
use crate::shared::Shared;

/// A handle to a tensor, or to some of its rows. It holds no bytes: [pin](crate::Runtime::pin) it to use them. Its
/// address stays the same as long as any handle lives.
#[derive(Clone)]
pub struct Tensor {
    pub(crate) segment: Arc<Segment>,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    dtype: DType,
    shape: Arc<[u64]>,
    name: Arc<str>,
}

impl Tensor {
    pub(crate) fn new(segment: Arc<Segment>, offset: u64, len: u64, dtype: DType, shape: &[u64], name: &str) -> Self {
        Self { segment, offset, len, dtype, shape: shape.into(), name: name.into() }
    }

    /// The tensor's name; empty for one that was allocated.
    pub fn name(&self) -> &str {
        &self.name
    }
    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// Its extents, outermost first.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }
    /// Its size.
    pub fn size(&self) -> Bytes {
        Bytes::new(self.len)
    }
    /// Whether it can be pinned for writing.
    #[inline]
    pub fn is_writable(&self) -> bool {
        self.segment.backing != Backing::File
    }
    /// Its address for life. Only pinned bytes may be accessed there.
    pub fn address(&self) -> u64 {
        self.segment.base.offset(self.offset).get()
    }
    /// How many pages it touches.
    pub fn page_count(&self) -> u64 {
        u64::from(self.run().count)
    }

    /// Splits tensors into sets that each fit in `pages` pages, in order. A larger tensor is split into row ranges.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if a tensor has no rows and does not fit;
    /// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if a single row does not.
    pub fn waves(tensors: &[Self], pages: u32) -> Result<Vec<Vec<Self>>> {
        let mut waves: Vec<Vec<Self>> = Vec::new();
        let mut used = 0u64;
        for tensor in tensors {
            let mut parts = Vec::new();
            if tensor.page_count() <= u64::from(pages) {
                parts.push(tensor.clone());
            } else {
                let step = tensor.rows_within(pages)?;
                let rows = tensor.shape().first().copied().unwrap_or(0);
                for start in (0..rows).step_by(step as usize) {
                    parts.push(tensor.rows(start..(start + step).min(rows))?);
                }
            }
            for part in parts {
                let count = part.page_count();
                if count > u64::from(pages) {
                    let page = tensor.page_size().bytes();
                    let have = Bytes::new(u64::from(pages).saturating_mul(page));
                    let what = format!(
                        "a row of {tensor:?} has {} in {count} pages, but a wave has {pages} ({have})",
                        part.size()
                    );
                    return Err(Error::new(ErrorKind::BudgetTooSmall, what).remedy(format!(
                        "make waves of at least {count} pages, or reshape the tensor to shorter rows"
                    )));
                }
                match waves.last_mut() {
                    Some(wave) if used + count <= u64::from(pages) => wave.push(part),
                    _ => {
                        waves.push(vec![part]);
                        used = 0;
                    }
                }
                used += count;
            }
        }
        Ok(waves)
    }

    /// Whether it belongs to this runtime. A runtime acts on no other tensors: to pin them is an error, and hints about
    /// them are passed over.
    #[inline]
    pub(crate) fn is_of(&self, runtime: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.segment.shared, runtime)
    }

    /// The pages of those tensors that are of this runtime.
    pub(crate) fn runs_of(tensors: &[Self], runtime: &Arc<Shared>) -> Vec<PageRun> {
        tensors.iter().filter(|tensor| tensor.is_of(runtime)).map(Self::run).collect()
    }

    /// The pages of which all bytes are those tensors' that are of this runtime.
    pub(crate) fn whole_pages_of(tensors: &[Self], runtime: &Arc<Shared>) -> Vec<PageRun> {
        let ours = tensors.iter().filter(|tensor| tensor.is_of(runtime));
        ours.map(Self::whole_pages).filter(|run| run.count > 0).collect()
    }

    /// The engine of the runtime it belongs to.
    pub(crate) fn engine(&self) -> &Engine {
        &self.segment.shared.engine
    }

    pub(crate) fn run(&self) -> PageRun {
        self.segment.run(self.offset, self.len)
    }

    /// The pages of which all bytes are its own.
    pub(crate) fn whole_pages(&self) -> PageRun {
        let size = self.segment.page_size.bytes();
        let (first, end) = (self.offset.div_ceil(size), (self.offset + self.len) / size);
        let count = end.saturating_sub(first) as u32;
        PageRun { segment: self.segment.id, first: PageIndex::new(first as u32), count }
    }

    /// The same bytes with other extents.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the number of elements differs.
    pub fn reshape(&self, shape: &[u64]) -> Result<Self> {
        let count = |shape: &[u64]| shape.iter().try_fold(1u64, |product, extent| product.checked_mul(*extent));
        if count(shape) != count(&self.shape) {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("{self:?} cannot be reshaped to {shape:?}"))
                .remedy("choose extents with the same product"));
        }
        Ok(Self { shape: shape.into(), ..self.clone() })
    }

    fn row_bytes(&self) -> Result<u64> {
        match self.shape.first() {
            Some(rows) if *rows > 0 && self.len.is_multiple_of(*rows) => Ok(self.len / rows),
            _ => Err(Error::new(ErrorKind::InvalidArgument, format!("{self:?} has no rows that can be addressed"))
                .remedy("pin it as a whole")),
        }
    }

    /// Rows `range` of the outermost extent, as a tensor. Pinning it fills only the pages it covers.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the range is not within the outermost extent.
    pub fn rows(&self, range: Range<u64>) -> Result<Self> {
        let row = self.row_bytes()?;
        let rows = self.shape[0];
        if range.start > range.end || range.end > rows {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("rows {}..{} of {self:?}, which has {rows}", range.start, range.end),
            )
            .remedy("ask for rows the tensor has"));
        }
        let mut shape = self.shape.to_vec();
        shape[0] = range.end - range.start;
        Ok(Self {
            segment: self.segment.clone(),
            offset: self.offset + range.start * row,
            len: shape[0] * row,
            dtype: self.dtype,
            shape: shape.into(),
            name: self.name.clone(),
        })
    }

    /// How many rows fit in `pages` pages wherever they begin; at least one.
    pub fn rows_within(&self, pages: u32) -> Result<u64> {
        let row = self.row_bytes()?;
        let page = self.segment.page_size.bytes();
        // A range of n bytes touches at most n / P + 2 pages wherever it begins; one less if n is a multiple of P.
        let bytes = u64::from(pages).saturating_sub(1) * page;
        Ok((bytes / row.max(1)).clamp(1, self.shape[0]))
    }

    /// The most pins that one of its pages has now.
    #[doc(hidden)]
    pub fn pins(&self) -> u32 {
        let words = self.segment.words_of(self.run());
        words.iter().map(|word| word.load().pins).max().unwrap_or(0)
    }

    /// The page size of the runtime it belongs to.
    pub fn page_size(&self) -> PageSize {
        self.segment.page_size
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tensor {:?} {} {:?}", self.name, self.dtype, self.shape)
    }
}
