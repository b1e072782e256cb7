//! Models and tensors in the pages of a runtime.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arguments::Count;
use crate::error::OrRaise;
use crate::opened::Opened;
use crate::pins::Pin;

/// A model whose tensors are in the pages of a runtime.
#[pyclass(frozen, module = "outcore")]
#[derive(Debug)]
pub struct Model {
    opened: Arc<Opened>,
    model: outcore::Model,
}

impl Model {
    pub fn new(opened: Arc<Opened>, model: outcore::Model) -> Self {
        Self { opened, model }
    }
}

#[pymethods]
impl Model {
    /// The names of its tensors, in the order of the files.
    fn names(&self) -> Vec<String> {
        self.model.header().tensors.iter().map(|tensor| tensor.name.clone()).collect()
    }

    /// The tensor of this name.
    fn tensor(&self, name: &str) -> PyResult<Tensor> {
        let tensor = self.model.tensor(name).or_raise()?;
        Ok(Tensor::new(self.opened.clone(), tensor))
    }

    fn __contains__(&self, name: &str) -> bool {
        self.model.contains(name)
    }

    fn __repr__(&self) -> String {
        let header = self.model.header();
        let path = header.files.first().map(|file| file.path.display().to_string()).unwrap_or_default();
        format!("<outcore model of {} tensors, {path}>", header.tensors.len())
    }
}

/// A tensor in the pages of a runtime: where it is, and what its bytes mean. It holds no bytes: pin it to use them.
#[pyclass(frozen, module = "outcore")]
#[derive(Debug)]
pub struct Tensor {
    opened: Arc<Opened>,
    tensor: outcore::Tensor,
}

impl Tensor {
    pub fn new(opened: Arc<Opened>, tensor: outcore::Tensor) -> Self {
        Self { opened, tensor }
    }

    /// The tensor, if it is of this runtime.
    pub fn of(&self, opened: &Arc<Opened>) -> Option<&outcore::Tensor> {
        Arc::ptr_eq(&self.opened, opened).then_some(&self.tensor)
    }
}

#[pymethods]
impl Tensor {
    /// Its name in its model; empty for one that `zeros` made.
    #[getter]
    fn name(&self) -> &str {
        self.tensor.name()
    }

    /// The element type, such as "BF16" or "Q4_K".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.tensor.dtype().name()
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.tensor.shape())
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.tensor.size().get()
    }

    /// The address of its first byte, which it has for life. Only what is pinned may be accessed there.
    #[getter]
    fn address(&self) -> u64 {
        self.tensor.address()
    }

    /// How many pages it touches.
    #[getter]
    fn pages(&self) -> u64 {
        self.tensor.page_count()
    }

    /// Whether it can be pinned to write. Tensors of files cannot.
    #[getter]
    fn is_writable(&self) -> bool {
        self.tensor.is_writable()
    }

    /// The rows from `start` to before `stop` of its first dimension: a tensor, of which a pin brings only the pages
    /// that it has a part of.
    fn rows(&self, start: Count, stop: Count) -> PyResult<Self> {
        let rows = self.tensor.rows(start.get()..stop.get()).or_raise()?;
        Ok(Self::new(self.opened.clone(), rows))
    }

    /// A pin to read.
    fn pin(&self) -> Pin {
        Pin::of_one(self.opened.clone(), self.tensor.clone(), false)
    }

    /// A pin to write, which no other pin shares pages with.
    fn pin_mut(&self) -> Pin {
        Pin::of_one(self.opened.clone(), self.tensor.clone(), true)
    }

    fn __repr__(&self) -> String {
        format!("<outcore {:?}>", self.tensor)
    }
}
