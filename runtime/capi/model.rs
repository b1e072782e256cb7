//! Models: files of tensors, opened in place.

use std::ffi::{CString, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::ptr;
use std::sync::OnceLock;

use outcore::format::TensorHeader;
use outcore::{Error, ErrorKind, Model, Result};

use crate::call::{c_text, done, free, outcore_error, outcore_status, quiet};
use crate::handles::{Kind, held};
use crate::raw::{self, Out};
use crate::runtime::outcore_runtime;
use crate::tensor::outcore_tensor;

/// An open model: its tensors by name and in the order of its header. Close it with `outcore_model_close`.
pub struct outcore_model {
    model: Model,
    names: OnceLock<Vec<CString>>,
    files: OnceLock<Vec<CString>>,
}

impl Kind for outcore_model {
    const NUMBER: usize = 3;
}

impl outcore_model {
    fn header(&self, index: usize) -> Result<&TensorHeader> {
        let tensors = &self.model.header().tensors;
        tensors.get(index).ok_or_else(|| {
            let message = format!("index is {index}, and the model has {} tensors", tensors.len());
            Error::new(ErrorKind::InvalidArgument, message).remedy("count from 0 to outcore_model_count, without it")
        })
    }
}

/// Opens a GGUF or safetensors file where it lies; or a model in several files, by its index or by any of the files; or
/// the one model in a folder. Reads headers only. Files of one model are one list of tensors: those of its first file
/// come first.
///
/// `*model` is the caller's, to be closed with `outcore_model_close`.
///
/// Errors: `OUTCORE_NOT_FOUND`, which names the file that is missing, `OUTCORE_PERMISSION_DENIED`, `OUTCORE_FORMAT`,
/// also for files that are not of one model and for an index that names a file outside of its folder,
/// `OUTCORE_INVALID_ARGUMENT` for a folder with several models, `OUTCORE_UNSUPPORTED` for a type of element that is not
/// known, `OUTCORE_CLOSED`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_model_open(
    runtime: *const outcore_runtime,
    path: *const c_char,
    model: *mut *mut outcore_model,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let (model, error) = unsafe { (Out::handle(model), Out::handle(error)) };
    done(error, || {
        let runtime = held(runtime, "runtime")?;
        // SAFETY: the header asks that texts end with a zero.
        let path = unsafe { raw::path(path) }.ok_or_else(|| raw::null("path"))?;
        let opened = runtime.runtime.open_model(path)?;
        model.give("model", outcore_model { model: opened, names: OnceLock::new(), files: OnceLock::new() })
    })
}

/// Closes a model. NULL is allowed. Tensors and guards of it stay. Returns `OUTCORE_INVALID_ARGUMENT`, and does
/// nothing, if it was closed before.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_model_close(model: *mut outcore_model) -> outcore_status {
    free(model)
}

/// How many tensors a model has. 0 if `model` is no living model.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_model_count(model: *const outcore_model) -> usize {
    quiet(0, || Ok(held(model, "model")?.model.header().tensors.len()))
}

/// The name of a tensor by its index, in the order of the header. It lives until the model is closed. NULL if there is
/// no such tensor, or `model` is no living model.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_model_name(model: *const outcore_model, index: usize) -> *const c_char {
    quiet(ptr::null(), || {
        let model = held(model, "model")?;
        let all = || model.model.header().tensors.iter().map(|tensor| c_text(&tensor.name)).collect();
        Ok(model.names.get_or_init(all).get(index).map_or(ptr::null(), |name| name.as_ptr()))
    })
}

/// A tensor by its name.
///
/// `*tensor` is the caller's, to be freed with `outcore_tensor_free`; it does not need `model` any more.
///
/// Errors: `OUTCORE_NOT_FOUND`, which names a similar tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_model_tensor(
    model: *const outcore_model,
    name: *const c_char,
    tensor: *mut *mut outcore_tensor,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let (tensor, error) = unsafe { (Out::handle(tensor), Out::handle(error)) };
    done(error, || {
        let model = held(model, "model")?;
        // SAFETY: the header asks that texts end with a zero.
        let name = unsafe { raw::text(name, "name")? }.ok_or_else(|| raw::null("name"))?;
        tensor.give("tensor", outcore_tensor::new(model.model.tensor(name)?))
    })
}

/// A tensor by its index, in the order of the header: for names that are no text of C.
///
/// `*tensor` is the caller's, to be freed with `outcore_tensor_free`; it does not need `model` any more.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` if there is no such tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_model_tensor_at(
    model: *const outcore_model,
    index: usize,
    tensor: *mut *mut outcore_tensor,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let (tensor, error) = unsafe { (Out::handle(tensor), Out::handle(error)) };
    done(error, || {
        let model = held(model, "model")?;
        let found = model.model.tensor(&model.header(index)?.name)?;
        tensor.give("tensor", outcore_tensor::new(found))
    })
}

/// Where a tensor's bytes lie, by its index: the file, by its number within the model, and the first byte there. Each
/// place may be NULL.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` if there is no such tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_model_place(
    model: *const outcore_model,
    index: usize,
    file: *mut u32,
    offset: *mut u64,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let (file, offset, error) = unsafe { (Out::new(file), Out::new(offset), Out::handle(error)) };
    done(error, || {
        let model = held(model, "model")?;
        let header = model.header(index)?;
        file.put(header.file);
        offset.put(header.offset);
        Ok(())
    })
}

/// The path of a file of the model, by its number. It lives until the model is closed. NULL if there is no such file,
/// or `model` is no living model.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_model_file(model: *const outcore_model, file: u32) -> *const c_char {
    quiet(ptr::null(), || {
        let model = held(model, "model")?;
        let bytes = |path: &OsStr| CString::new(path.as_bytes()).unwrap_or_default();
        let all = || model.model.header().files.iter().map(|file| bytes(file.path.as_os_str())).collect();
        Ok(model.files.get_or_init(all).get(file as usize).map_or(ptr::null(), |path| path.as_ptr()))
    })
}
