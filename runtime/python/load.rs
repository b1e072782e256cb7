//! Tensors in ordinary memory of the process, for `outcore.load_file`.

use std::path::PathBuf;

use outcore::store::StoreOptions;
use outcore::{Error, ErrorKind, IoBackend, Result, format};
use parking_lot::Mutex;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};

use crate::capsule::{self, Asked};
use crate::error::OrRaise;
use crate::open::safetensors;

/// A tensor in memory of its own, which it gives to the first library that takes it by DLPack.
#[pyclass(frozen, module = "outcore")]
#[derive(Debug)]
pub struct LoadedTensor {
    dtype: outcore::DType,
    shape: Vec<u64>,
    nbytes: usize,
    /// `None` once it was given.
    memory: Mutex<Option<outcore::load::LoadedTensor>>,
}

impl LoadedTensor {
    fn new(tensor: outcore::load::LoadedTensor) -> Self {
        let (dtype, shape, nbytes) = (tensor.dtype(), tensor.shape().to_owned(), tensor.bytes().len());
        Self { dtype, shape, nbytes, memory: Mutex::new(Some(tensor)) }
    }
}

#[pymethods]
impl LoadedTensor {
    /// The element type as safetensors names it, such as "BF16".
    #[getter]
    fn dtype(&self) -> String {
        self.dtype.to_string()
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        capsule::CPU
    }

    /// A capsule for `from_dlpack`, on the CPU, which may be written and owns the memory. There is one.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        Asked { on_stream: stream.is_some(), max_version, dl_device, copy }.check(|| "the tensor".to_owned())?;
        match self.memory.lock().take() {
            Some(tensor) => capsule::of(py, tensor.into_dlpack().or_raise()?),
            None => {
                let why = "the tensor was given already: keep what took it, or load the file again";
                Err(PyBufferError::new_err(why))
            }
        }
    }

    fn __repr__(&self) -> String {
        format!("<outcore loaded tensor {} {:?}>", self.dtype, self.shape)
    }
}

/// Loads the tensors of a file, or of a folder's model, by name. Waits for the disk without the GIL, and handles
/// signals meanwhile.
#[pyfunction]
pub fn load(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let mut raised = None;
    let mut go_on = || -> Result<()> {
        // An interpreter that is ending attaches nobody.
        match Python::try_attach(|py| py.check_signals()) {
            Some(Ok(())) => return Ok(()),
            Some(Err(exception)) => raised = Some(exception),
            None => {}
        }
        Err(Error::new(ErrorKind::Closed, "the load was interrupted"))
    };
    let loaded = py.detach(|| {
        let header = safetensors(&path, |path| format::open_alone(path))?;
        let loaded = outcore::load::load(&header, &StoreOptions::new(IoBackend::Auto), &mut go_on);
        loaded.map_err(|error| error.context(format_args!("load {}", path.display())))
    });
    if let Some(raised) = raised {
        return Err(raised);
    }
    let tensors = PyDict::new(py);
    for tensor in loaded.or_raise()? {
        let name = tensor.name().to_owned();
        tensors.set_item(name, LoadedTensor::new(tensor))?;
    }
    Ok(tensors)
}
