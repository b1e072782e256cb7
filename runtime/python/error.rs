//! Errors as Python's `outcore.Error`, which `outcore/_error.py` defines.

use outcore::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// The name of a kind, as `Error.kind` has it.
fn name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::InvalidArgument => "invalid_argument",
        ErrorKind::NotFound => "not_found",
        ErrorKind::PermissionDenied => "permission_denied",
        ErrorKind::Format => "format",
        ErrorKind::Unsupported => "unsupported",
        ErrorKind::BudgetTooSmall => "budget_too_small",
        ErrorKind::Busy => "busy",
        ErrorKind::OutOfMemory => "out_of_memory",
        ErrorKind::TooManyMappings => "too_many_mappings",
        ErrorKind::Io => "io",
        ErrorKind::TimedOut => "timed_out",
        ErrorKind::Device => "device",
        ErrorKind::DiskFull => "disk_full",
        ErrorKind::Corrupt => "corrupt",
        ErrorKind::ModelChanged => "model_changed",
        ErrorKind::Poisoned => "poisoned",
        ErrorKind::Closed => "closed",
        // Kinds may be added; what has no name here yet is still an error.
        ErrorKind::Internal | _ => "internal",
    }
}

/// The exception for an error.
pub fn raise(error: Error) -> PyErr {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    Python::attach(|py| {
        let mut message = error.to_string();
        if let Some(remedy) = error.advice() {
            // The whole line ends with the remedy in brackets.
            message.truncate(message.len().saturating_sub(remedy.len() + " ()".len()));
        }
        let arguments = (message, name(error.kind()), error.advice().map(str::to_owned), error.is_transient());
        match CLASS.import(py, "outcore._error", "Error") {
            Ok(class) => PyErr::from_type(class.clone(), arguments),
            Err(missing) => missing,
        }
    })
}

/// A result for Python.
pub trait OrRaise<T> {
    fn or_raise(self) -> PyResult<T>;
}

impl<T> OrRaise<T> for outcore::Result<T> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(raise)
    }
}
