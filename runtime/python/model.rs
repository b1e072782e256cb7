//! A model whose files are mapped on a runtime of its own.

use std::sync::Arc;

use outcore::{Bytes, Error, ErrorKind, Result};
use parking_lot::Mutex;
use pyo3::Borrowed;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::arguments::Many;
use crate::error::OrRaise;
use crate::group::Group;
use crate::open::{Open, Place, open};
use crate::rows::Rows;
use crate::tensor::MappedTensor;

/// A number of bytes, or text such as "8GiB".
#[derive(Debug)]
pub enum Size {
    Number(u64),
    Text(String),
}

impl<'py> FromPyObject<'_, 'py> for Size {
    type Error = PyErr;

    fn extract(from: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(bytes) = from.extract() {
            return Ok(Self::Number(bytes));
        }
        if let Ok(text) = from.extract() {
            return Ok(Self::Text(text));
        }
        let what = from.repr()?;
        let message = format!("{what} is no size: it is a number of bytes, not negative, or text such as \"8GiB\"");
        Err(PyTypeError::new_err(message))
    }
}

impl Size {
    pub fn bytes(&self) -> Result<Bytes> {
        match self {
            Self::Number(bytes) => Ok(Bytes::new(*bytes)),
            Self::Text(text) => text.parse(),
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for Place {
    type Error = PyErr;

    fn extract(from: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let Ok(parts) = from.cast::<PyDict>() else { return Ok(Self::One(from.extract()?)) };
        let parts = parts.iter().map(|(name, path)| Ok((name.extract()?, path.extract()?)));
        Ok(Self::Parts(parts.collect::<PyResult<_>>()?))
    }
}

/// The safetensors of a folder or a file, or of several that have names, mapped on one runtime with `memory` for pages.
/// Threads may share it.
#[pyclass(frozen, module = "outcore")]
#[derive(Debug)]
pub struct MappedModel {
    open: Mutex<Option<Arc<Open>>>,
    place: Arc<Place>,
}

impl MappedModel {
    fn open(&self) -> Result<Arc<Open>> {
        let open = self.open.lock().clone().ok_or_else(|| {
            let message = format!("the model in {} was closed", self.place);
            Error::new(ErrorKind::Closed, message).remedy("open it anew")
        })?;
        open.at_home()?;
        Ok(open)
    }
}

#[pymethods]
impl MappedModel {
    /// Maps them. Reads headers, and measures the disk where nobody has done so. Of a dict of parts, the tensors of
    /// each have its name and a dot before their own.
    #[new]
    #[pyo3(signature = (path, memory, *, page_size = None, check = false))]
    fn new(py: Python<'_>, path: Place, memory: Size, page_size: Option<Size>, check: bool) -> PyResult<Self> {
        let memory = memory.bytes().or_raise()?;
        let page_size = page_size.map(|size| size.bytes()).transpose().or_raise()?;
        let place = Arc::new(path);
        let open = py.detach(|| open(place.clone(), memory, page_size, check)).or_raise()?;
        Ok(Self { open: Mutex::new(Some(Arc::new(open))), place })
    }

    /// The names of its tensors, in the order of the files.
    fn names(&self) -> PyResult<Vec<String>> {
        Ok(self.open().or_raise()?.tensors().iter().map(|tensor| tensor.name.clone()).collect())
    }

    /// The tensor of this name.
    fn tensor(&self, name: &str) -> PyResult<MappedTensor> {
        let open = self.open().or_raise()?;
        let at = open.at(name).or_raise()?;
        Ok(MappedTensor::new(open, at))
    }

    /// A set of tensors that are used together.
    fn group(&self, names: Many<String>) -> PyResult<Group> {
        let open = self.open().or_raise()?;
        Group::new(open, &names.0).or_raise()
    }

    /// A tensor of which rows are used: those of its first dimension.
    fn rows(&self, name: &str) -> PyResult<Rows> {
        let open = self.open().or_raise()?;
        Rows::new(open, name).or_raise()
    }

    /// Declares that a pass uses these groups in this order, again and again.
    fn declare(&self, py: Python<'_>, groups: Many<PyRef<'_, Group>>) -> PyResult<()> {
        let open = self.open().or_raise()?;
        if let Some(at) = groups.0.iter().position(|group| !group.is_of(&open)) {
            let message = format!("group {at} of the order is of another model than {}", self.place);
            let error = Error::new(ErrorKind::InvalidArgument, message);
            return Err(error.remedy("declare groups that this model made, on each model its own")).or_raise();
        }
        let order: Vec<outcore::Tensor> = groups.0.iter().flat_map(|group| group.tensors().iter().cloned()).collect();
        py.detach(|| open.declare(&order));
        Ok(())
    }

    /// Touches of pages that nobody announced and that were not there: how many, and the names of the tensors of the
    /// last of them, each with how often it was seen.
    fn touches<'py>(&self, py: Python<'py>) -> PyResult<(u64, Bound<'py, PyDict>)> {
        let open = self.open().or_raise()?;
        let (mut count, names) = (0, PyDict::new(py));
        for (number, file) in open.files().iter().enumerate() {
            let touches = file.touches();
            count += touches.count;
            for offset in touches.last {
                let tensors = open.tensors();
                let at = tensors.partition_point(|tensor| (tensor.file as usize, tensor.end()) <= (number, offset));
                let name = tensors.get(at).filter(|tensor| tensor.file as usize == number).map_or("", |of| &of.name);
                let seen = names.get_item(name)?.map_or(Ok(0_u64), |seen| seen.extract())?;
                names.set_item(name, seen + 1)?;
            }
        }
        Ok((count, names))
    }

    /// What the runtime counted, by the names that the Rust API has. Sizes are in bytes, times in seconds.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let open = self.open().or_raise()?;
        let own = [("groups_refused", open.refused()), ("pages_for_groups", open.room().pages())];
        crate::stats::of(py, &open.runtime().stats(), &own)
    }

    /// Bytes of a page.
    #[getter]
    fn page_size(&self) -> PyResult<u64> {
        Ok(self.open().or_raise()?.page())
    }

    /// How many pages groups may have at a time.
    #[getter]
    fn most_pages(&self) -> PyResult<u64> {
        Ok(self.open().or_raise()?.room().pages())
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.open.lock().is_none()
    }

    /// Ends it. Groups announce nothing more. Its memory goes as soon as the last tensor of it does: those that other
    /// libraries have can be read until then.
    fn close(&self, py: Python<'_>) {
        let open = self.open.lock().take();
        if let Some(open) = open {
            open.close();
            py.detach(|| drop(open));
        }
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let state = if self.is_closed() { "closed" } else { "open" };
        format!("<outcore model {}, {state}>", self.place)
    }
}
