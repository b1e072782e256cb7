//! A runtime, as Python opens it.

use std::path::PathBuf;
use std::sync::Arc;

use outcore::{DType, Error, ErrorKind, PageSize, Plan};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arguments::{Many, Shape};
use crate::error::{OrRaise, raise};
use crate::model::Size;
use crate::open::refuse_pickles;
use crate::opened::Opened;
use crate::paged::{Model, Tensor};
use crate::pins::Pin;
use crate::stats;

/// Tensors of files and of a program, in `memory` for pages. Threads may share it.
#[pyclass(frozen, module = "outcore")]
#[derive(Debug)]
pub struct Runtime {
    opened: Arc<Opened>,
}

impl Runtime {
    /// # Errors
    /// `InvalidArgument` if one of the tensors is of another runtime.
    fn own(&self, tensors: &[PyRef<'_, Tensor>]) -> outcore::Result<Vec<outcore::Tensor>> {
        let own = tensors.iter().enumerate().map(|(at, tensor)| {
            tensor.of(&self.opened).cloned().ok_or_else(|| {
                let message = format!("tensor {at} of {} is of another runtime", tensors.len());
                Error::new(ErrorKind::InvalidArgument, message).remedy("name tensors that this runtime loaded or made")
            })
        });
        own.collect()
    }

    fn several(&self, tensors: &[PyRef<'_, Tensor>], writes: bool) -> PyResult<Pin> {
        let tensors = self.own(tensors).or_raise()?;
        Ok(Pin::of_several(self.opened.clone(), tensors, writes))
    }
}

#[pymethods]
impl Runtime {
    /// Opens one. Tensors that `zeros` makes go to a file in the folder `scratch` where they do not fit.
    #[new]
    #[pyo3(signature = (memory, *, page_size = None, scratch = None))]
    fn new(py: Python<'_>, memory: Size, page_size: Option<Size>, scratch: Option<PathBuf>) -> PyResult<Self> {
        let mut builder = outcore::Runtime::builder().device_budget(memory.bytes().or_raise()?);
        if let Some(size) = page_size {
            builder = builder.page_size(size.bytes().and_then(PageSize::new).or_raise()?);
        }
        if let Some(folder) = scratch {
            builder = builder.scratch_dir(folder);
        }
        let runtime = py.detach(|| builder.open()).or_raise()?;
        Ok(Self { opened: Arc::new(Opened::new(runtime)) })
    }

    /// Opens a model where it lies: a file of GGUF or safetensors, an index, or a folder. Reads headers only.
    fn load(&self, py: Python<'_>, path: PathBuf) -> PyResult<Model> {
        self.opened.usable().or_raise()?;
        let open = || {
            refuse_pickles(&path)?;
            self.opened.runtime().open_model(&path)
        };
        let model = py.detach(open).or_raise()?;
        Ok(Model::new(self.opened.clone(), model))
    }

    /// A tensor of zeros that can be written, and may be larger than the memory.
    fn zeros(&self, py: Python<'_>, shape: Shape, dtype: &str) -> PyResult<Tensor> {
        self.opened.usable().or_raise()?;
        let dtype = dtype.parse::<DType>().or_raise()?;
        let tensor = py.detach(|| self.opened.runtime().alloc(dtype, &shape.0)).or_raise()?;
        Ok(Tensor::new(self.opened.clone(), tensor))
    }

    /// A pin of several tensors to read, all or none. Its block has a tuple of views.
    fn pin(&self, tensors: Many<PyRef<'_, Tensor>>) -> PyResult<Pin> {
        self.several(&tensors.0, false)
    }

    /// A pin of several tensors to write, all or none. No two may share a byte.
    fn pin_mut(&self, tensors: Many<PyRef<'_, Tensor>>) -> PyResult<Pin> {
        self.several(&tensors.0, true)
    }

    /// Declares that tensors are used in this order, again and again, or `once`. An empty order withdraws the plan;
    /// `None` says that there is no order.
    #[pyo3(signature = (order, *, once = false))]
    fn plan(&self, py: Python<'_>, order: Option<Many<PyRef<'_, Tensor>>>, once: bool) -> PyResult<()> {
        self.opened.usable().or_raise()?;
        let order = order.map(|order| self.own(&order.0)).transpose().or_raise()?;
        let plan = match &order {
            None if once => {
                let error = Error::new(ErrorKind::InvalidArgument, "no order cannot come once");
                return Err(raise(error.remedy("name tensors, or leave out once=True")));
            }
            None => Plan::Unordered,
            Some(order) if once => Plan::Once(order),
            Some(order) => Plan::Cycle(order),
        };
        py.detach(|| self.opened.runtime().plan(plan));
        Ok(())
    }

    /// Tells that these tensors are used soon, in this order. A hint: where there is no room nothing happens.
    fn prefetch(&self, py: Python<'_>, tensors: Many<PyRef<'_, Tensor>>) -> PyResult<()> {
        self.opened.usable().or_raise()?;
        let tensors = self.own(&tensors.0).or_raise()?;
        py.detach(|| self.opened.runtime().prefetch(&tensors));
        Ok(())
    }

    /// What the runtime counted, by the names that the Rust API has. Sizes are in bytes, times in seconds.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.opened.usable().or_raise()?;
        stats::of(py, &self.opened.runtime().stats(), &self.opened.counts())
    }

    /// Bytes of a page.
    #[getter]
    fn page_size(&self) -> u64 {
        self.opened.page()
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.opened.is_closed()
    }

    /// Ends it: who waits gets an error, what is under way is finished. Views that other libraries have stay valid.
    /// Raises what was lost since it was opened. Closing it again does nothing, and so does a child by `fork`.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if !self.opened.is_at_home() || !self.opened.begin_close() {
            return Ok(());
        }
        let runtime = self.opened.runtime().clone();
        py.detach(|| runtime.close()).or_raise()
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        let state = if self.is_closed() { "closed" } else { "open" };
        format!("<outcore runtime, {state}>")
    }
}
