//! DLPack structures in capsules: the only raw pointers that this crate gives to Python.

use std::ffi::CStr;

use outcore::dlpack::{DLManagedTensorVersioned, DlpackView};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

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
