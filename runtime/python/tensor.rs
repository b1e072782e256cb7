//! A tensor of a mapped model, as other libraries see it.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use crate::capsule::{self, Asked};
use crate::error::OrRaise;
use crate::open::Open;

/// A tensor of a mapped model: where it is, and what its bytes mean. It has the same address as long as anything of the
/// model lives. It pins nothing: a page that is touched and not there is read then.
#[pyclass(frozen, module = "outcore")]
#[derive(Debug)]
pub struct MappedTensor {
    open: Arc<Open>,
    /// Its place among the header's tensors.
    at: usize,
}

impl MappedTensor {
    pub fn new(open: Arc<Open>, at: usize) -> Self {
        Self { open, at }
    }

    fn header(&self) -> &outcore::format::TensorHeader {
        self.open.header(self.at)
    }
}

#[pymethods]
impl MappedTensor {
    #[getter]
    fn name(&self) -> &str {
        &self.header().name
    }

    /// The element type as safetensors names it, such as "BF16".
    #[getter]
    fn dtype(&self) -> String {
        self.header().dtype.to_string()
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.header().shape)
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.header().len
    }

    /// The address of its first byte.
    #[getter]
    fn address(&self) -> u64 {
        let header = self.header();
        self.open.file(header.file).tensor().address() + header.offset
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        capsule::CPU
    }

    /// A capsule for `from_dlpack`, read-only, on the CPU, and never a copy.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let asked = Asked { on_stream: stream.is_some(), max_version, dl_device, copy };
        asked.check(|| format!("the tensor {} of a mapped model", self.header().name))?;
        let header = self.header();
        let view = self.open.file(header.file).dlpack(header.offset..header.end(), header.dtype, &header.shape);
        capsule::of(py, view.or_raise()?)
    }

    fn __repr__(&self) -> String {
        let header = self.header();
        format!("<outcore tensor {} {} {:?}>", header.name, header.dtype, header.shape)
    }
}
