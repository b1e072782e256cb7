//! Pages that are pinned for Python, and what is told of them.
//!
//! A DLPack view's deleter may drop them on any thread, without the GIL. So that takes no lock of this crate, and
//! touches no object of Python.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use outcore::{DType, DevicePin, Error, ErrorKind, Result, Scope, Write};

use crate::holder::Holder;
use crate::opened::Opened;

/// What keeps the pages, and says who may use them.
#[derive(Debug)]
pub enum Pages {
    Read(DevicePin),
    Write(DevicePin<Write>),
}

/// A pinned tensor as other libraries are told of it.
#[derive(Debug)]
pub struct Given {
    pub address: u64,
    pub dtype: DType,
    pub shape: Vec<u64>,
}

/// Pages that are pinned as a unit, until it is dropped.
#[derive(Debug)]
pub struct Pinned {
    /// Those of `tensors`.
    pages: Pages,
    tensors: Arc<[outcore::Tensor]>,
    /// The pins are of this scope, which the next pins of the thread find.
    _scope: Arc<Scope>,
    opened: Arc<Opened>,
    /// The thread that entered the block.
    by: Arc<Holder>,
    /// Whether the block has ended.
    left: AtomicBool,
}

impl Pinned {
    /// Of the calling thread.
    pub fn new(pages: Pages, tensors: Arc<[outcore::Tensor]>, scope: Arc<Scope>, opened: Arc<Opened>) -> Self {
        let by = Holder::current();
        by.pinned();
        opened.pinned();
        Self { pages, tensors, _scope: scope, opened, by, left: AtomicBool::new(false) }
    }

    /// The block has ended. To be told once.
    pub fn leave(&self) {
        self.left.store(true, Ordering::Relaxed);
        self.opened.left();
    }

    pub fn is_writable(&self) -> bool {
        matches!(self.pages, Pages::Write(_))
    }

    /// What its tensor number `at` is to other libraries: all of its bytes, and no others. A type that is stored in
    /// blocks is given as bytes, those of a row in the last extent.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such tensor.
    pub fn given(&self, at: usize) -> Result<Given> {
        let address = match &self.pages {
            Pages::Read(pages) => pages.address(at),
            Pages::Write(pages) => pages.address(at),
        };
        let (Some(address), Some(tensor)) = (address, self.tensors.get(at)) else {
            let message = format!("there is no tensor {at} in a pin of {}", self.tensors.len());
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        };
        let (dtype, shape) = (tensor.dtype(), tensor.shape());
        if dtype.block_elements() == 1 {
            return Ok(Given { address, dtype, shape: shape.to_vec() });
        }
        let bytes_of_rows = shape.split_last().and_then(|(row, rows)| {
            let row = dtype.bytes_for(*row)?;
            Some(rows.iter().copied().chain([row]).collect())
        });
        // Blocks that begin in one row and end in the next have no rows.
        let shape = bytes_of_rows.unwrap_or_else(|| vec![tensor.size().get()]);
        Ok(Given { address, dtype: DType::U8, shape })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.by.unpinned();
        self.opened.unpinned(*self.left.get_mut());
    }
}
