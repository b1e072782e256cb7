//! DLPack structures in capsules: the only raw pointers that this crate gives to Python.

use std::ffi::CStr;
use std::sync::Arc;

use outcore::Result;
use outcore::dlpack::{DLManagedTensorVersioned, DlpackView};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::pinned::{Given, Pinned};

/// The CPU's memory, in DLPack's numbers.
pub const CPU: (i32, i32) = (1, 0);

/// The name of a capsule with a structure of DLPack 1. A consumer renames the capsule, and calls the deleter itself.
const NAME: &CStr = c"dltensor_versioned";

/// Gives back what nobody consumed.
unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with a capsule that is being destroyed. Its name is asked for first, so no error is set
    // while another one may be raised.
    let pointer = unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 0 {
            return;
        }
        ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr())
    };
    if let Some(pointer) = std::ptr::NonNull::new(pointer.cast::<DLManagedTensorVersioned>()) {
        // SAFETY: `of` put it there by `into_raw`, and no consumer has renamed the capsule: nobody has called its
        // deleter.
        drop(unsafe { DlpackView::from_raw(pointer) });
    }
}

/// The view in a capsule, for a consumer that knows DLPack 1.
pub fn of(py: Python<'_>, view: DlpackView) -> PyResult<Bound<'_, PyCapsule>> {
    let pointer = view.into_raw();
    // SAFETY: the structure lives until its deleter is called, which `destroy` or the consumer does, on any thread.
    let capsule = unsafe { PyCapsule::new_with_pointer_and_destructor(py, pointer.cast(), NAME, Some(destroy)) };
    if capsule.is_err() {
        // SAFETY: there is no capsule that could give it to anybody.
        drop(unsafe { DlpackView::from_raw(pointer) });
    }
    capsule
}

/// What a consumer asks of `__dlpack__`.
#[derive(Debug)]
pub struct Asked {
    pub on_stream: bool,
    pub max_version: Option<(u32, u32)>,
    pub dl_device: Option<(i32, i32)>,
    pub copy: Option<bool>,
}

impl Asked {
    /// # Errors
    /// A `BufferError` for what a view in the CPU's memory cannot be; `what` is viewed.
    pub fn check(&self, what: impl Fn() -> String) -> PyResult<()> {
        let refused = if self.on_stream {
            "is in the CPU's memory, where there are no streams: pass stream=None"
        } else if self.max_version.is_none_or(|(major, _)| major < 1) {
            "is given by DLPack 1 only, which can say that it is read-only: pass max_version=(1, 0)"
        } else if self.dl_device.is_some_and(|device| device != CPU) {
            "is in the CPU's memory: take it there, and copy it by the library that you use"
        } else if self.copy == Some(true) {
            "is given as it lies: copy it by the library that you use"
        } else {
            return Ok(());
        };
        Err(PyBufferError::new_err(format!("{} {refused}", what())))
    }
}

/// A view of a pinned tensor, number `at` of its pins, which it keeps. It may be written if it is pinned to write.
///
/// # Errors
/// As for [`DlpackView::of_memory`]; `InvalidArgument` if there is no such tensor.
pub fn of_pages(pinned: Arc<Pinned>, at: usize) -> Result<DlpackView> {
    let Given { address, dtype, shape } = pinned.given(at)?;
    if pinned.is_writable() {
        // SAFETY: `given` names the bytes of a tensor that `pinned` keeps in memory. It is pinned to write, so no other
        // pin has its pages, and nobody in this process makes slices of them: only consumers use them.
        unsafe { DlpackView::of_memory_mut(address, dtype, &shape, pinned) }
    } else {
        // SAFETY: `given` names the bytes of a tensor that `pinned` keeps in memory, and unchanged: pages that are
        // pinned to read are not written.
        unsafe { DlpackView::of_memory(address, dtype, &shape, pinned) }
    }
}
