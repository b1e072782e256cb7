//! What a runtime counted, as a dict.

use std::fmt::Write as _;

use outcore::{Error, ErrorKind, Stats};
use pyo3::prelude::*;

use crate::error::raise;

/// A dict with the names that the Rust API has, and what this crate counts itself.
pub fn of<'py>(py: Python<'py>, stats: &Stats, own: &[(&str, u64)]) -> PyResult<Bound<'py, PyAny>> {
    let mut text = serde_json::to_string(stats)
        .map_err(|cause| raise(Error::new(ErrorKind::Internal, format!("statistics are no JSON: {cause}"))))?;
    // The object's last bracket makes room for what is added.
    text.pop();
    for (name, count) in own {
        let _ = write!(text, ",\"{name}\":{count}");
    }
    text.push('}');
    py.import("json")?.call_method1("loads", (text,))
}
