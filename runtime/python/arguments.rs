//! Arguments, as Python gives them.

use pyo3::Borrowed;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFrozenSet, PySet, PyString};

/// Things in an order: what has a length and can be iterated over, but no text, set or dict. A `Vec` of PyO3's takes as
/// much memory as an object says that it is long, which may be more than there is.
#[derive(Debug)]
pub struct Many<T>(pub Vec<T>);

impl<'py, T: FromPyObjectOwned<'py>> FromPyObject<'_, 'py> for Many<T> {
    type Error = PyErr;

    fn extract(from: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let has_no_order = from.is_instance_of::<PyString>()
            || from.is_instance_of::<PySet>()
            || from.is_instance_of::<PyFrozenSet>()
            || from.is_instance_of::<PyDict>();
        if has_no_order {
            let kind = from.get_type().name()?;
            return Err(PyTypeError::new_err(format!(
                "a {kind} is no sequence: name things in an order, as a list does"
            )));
        }
        from.len()?;
        let mut things = Vec::new();
        for thing in from.try_iter()? {
            things.push(thing?.extract::<T>().map_err(Into::into)?);
        }
        Ok(Self(things))
    }
}

/// A number of things: whole, and not negative.
#[derive(Debug, Clone, Copy)]
pub struct Count(u64);

impl Count {
    pub fn get(self) -> u64 {
        self.0
    }
}

impl<'py> FromPyObject<'_, 'py> for Count {
    type Error = PyErr;

    fn extract(from: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match from.extract() {
            Ok(count) => Ok(Self(count)),
            Err(_) => Err(PyTypeError::new_err(format!("{} is no whole number from 0 on", from.repr()?))),
        }
    }
}

/// The extents of a tensor; a number is the only one.
#[derive(Debug)]
pub struct Shape(pub Vec<u64>);

impl<'py> FromPyObject<'_, 'py> for Shape {
    type Error = PyErr;

    fn extract(from: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(extent) = from.extract::<u64>() {
            return Ok(Self(vec![extent]));
        }
        match from.extract::<Many<Count>>() {
            Ok(Many(extents)) => Ok(Self(extents.into_iter().map(|Count(extent)| extent).collect())),
            Err(_) => {
                let what = from.repr()?;
                Err(PyTypeError::new_err(format!("{what} is no shape: it is whole numbers from 0 on, such as (3, 4)")))
            }
        }
    }
}
