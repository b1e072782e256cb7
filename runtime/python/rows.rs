//! A tensor of which a pass uses some rows, such as an embedding.

use std::ops::Range;
use std::sync::Arc;

use outcore::{Error, ErrorKind, Result};
use pyo3::prelude::*;

use crate::arguments::Many;
use crate::error::OrRaise;
use crate::group::{Announced, Whose, pages};
use crate::open::Open;

/// A table of rows. It is never pinned whole: the rows that are used are announced, page by page.
#[pyclass(frozen, module = "outcore")]
#[derive(Debug)]
pub struct Rows {
    open: Arc<Open>,
    bytes: outcore::Tensor,
    rows: u64,
    announced: Announced,
}

impl Rows {
    /// # Errors
    /// `NotFound` for a name that the model has not; `InvalidArgument` for a tensor without rows.
    pub fn new(open: Arc<Open>, name: &str) -> Result<Self> {
        let bytes = open.bytes(name)?;
        let rows = open.rows_of(name)?;
        if rows == 0 || !bytes.size().get().is_multiple_of(rows) {
            let message = format!("the tensor {name} has no rows that could be announced");
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("announce it whole, by a group"));
        }
        Ok(Self { open, bytes, rows, announced: Announced::default() })
    }

    /// The bytes of these rows, by page: neighbours are one range.
    fn ranges(&self, rows: &[i64]) -> Vec<Range<u64>> {
        let (row, page) = (self.bytes.size().get() / self.rows, self.open.page());
        // What is no row raises nothing here: the library that looks it up says what is wrong.
        let valid = rows.iter().filter_map(|at| u64::try_from(*at).ok()).filter(|at| *at < self.rows);
        let begin = self.bytes.address();
        let mut ranges: Vec<Range<u64>> = valid.map(|at| at * row..(at + 1) * row).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, range| {
            let joins = (begin + next.start) / page <= (begin + range.end).saturating_sub(1) / page;
            if joins {
                range.end = range.end.max(next.end);
            }
            joins
        });
        ranges
    }

    fn let_go(&self, whose: Whose) -> bool {
        let left = self.announced.leave(&self.open, whose);
        if left && self.open.leaves() {
            self.open.runtime().evict(&self.bytes);
        }
        left
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        self.announced.end(&self.open);
    }
}

#[pymethods]
impl Rows {
    /// Announces these rows. Where they need more than half of the pages that groups may have, nothing is announced,
    /// and `False` returned: their pages come as they are touched.
    fn enter(&self, py: Python<'_>, rows: Many<i64>) -> PyResult<bool> {
        let ranges = self.ranges(&rows.0).into_iter().map(|range| self.bytes.rows(range));
        let tensors = ranges.collect::<Result<Vec<_>>>().or_raise()?;
        let pages = pages(&tensors, self.open.page());
        if pages > self.open.room().pages() / 2 {
            self.open.usable().or_raise()?;
            self.announced.enter_without(&self.open);
            return Ok(false);
        }
        self.announced.enter(py, &self.open, &tensors, pages)?;
        Ok(true)
    }

    /// Lets them go: what this thread announced last, or another one where it has announced nothing.
    fn leave(&self) {
        self.let_go(Whose::Any);
    }

    /// Lets go all that this thread announced.
    fn unwind(&self) {
        while self.let_go(Whose::Own) {}
    }

    /// As `enter`, before a module's pass. What it announces is ended by `after`, also where this fails.
    fn before(&self, py: Python<'_>, rows: Many<i64>) -> PyResult<bool> {
        self.enter(py, rows).inspect_err(|_| self.announced.enter_without(&self.open))
    }

    /// As `leave`, behind a module's pass, which is in the same thread.
    fn after(&self) {
        self.let_go(Whose::Own);
    }
}
