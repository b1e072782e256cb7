//! Tensors: what they are, and hints about their use.

use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use outcore::{Plan, Result, Tensor};

use crate::call::{c_text, done, free, outcore_error, outcore_status};
use crate::handles::{Kind, held};
use crate::raw::{self, Extensible, Out};
use crate::runtime::outcore_runtime;

/// A tensor, or some of its rows. It holds no bytes: pin it to use them. Free it with `outcore_tensor_free`.
pub struct outcore_tensor {
    pub(crate) tensor: Tensor,
    // Made when they are asked for: most tensors are rows that nobody asks.
    name: OnceLock<CString>,
    dtype: OnceLock<CString>,
}

impl Kind for outcore_tensor {
    const NUMBER: usize = 4;
}

impl outcore_tensor {
    pub(crate) fn new(tensor: Tensor) -> Self {
        Self { tensor, name: OnceLock::new(), dtype: OnceLock::new() }
    }
}

/// What a tensor is. Set `size` to `sizeof(outcore_tensor_info)` before the call. Texts and `shape` live until the
/// tensor is freed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct outcore_tensor_info {
    /// sizeof(outcore_tensor_info)
    pub size: usize,
    /// Its name; "" for one from `outcore_alloc`.
    pub name: *const c_char,
    /// Its element type as files call it, such as "F32" or "Q4_K".
    pub dtype: *const c_char,
    /// Its extents, outermost first: as many as `rank`.
    pub shape: *const u64,
    /// How many extents it has.
    pub rank: usize,
    /// Its bytes.
    pub bytes: u64,
    /// How many pages it touches.
    pub pages: u64,
    /// Bytes of a page.
    pub page_size: u64,
    /// Its address for life. Only pinned bytes may be accessed there.
    pub address: u64,
    /// 1 if it can be pinned for writing, otherwise 0.
    pub writable: u32,
    /// The elements of a block of its type; 1 for plain types.
    pub block_elements: u32,
    /// The bytes of a block.
    pub block_bytes: u64,
}

// SAFETY: `repr(C)`, `size` comes first, and all fields are numbers and pointers.
unsafe impl Extensible for outcore_tensor_info {
    const NAME: &'static str = "outcore_tensor_info";
}

/// The tensors that an array of handles names.
///
/// # Safety
/// `tensors` is NULL or has `count` handles.
pub(crate) unsafe fn tensors_of(tensors: *const *mut outcore_tensor, count: usize) -> Result<Vec<Tensor>> {
    // SAFETY: the caller's promise.
    let handles = unsafe { raw::array(tensors, count, "tensors")? };
    let each = |(at, handle): (usize, &*mut outcore_tensor)| {
        // The name is made for the error only.
        held(*handle, "a tensor").or_else(|_| held(*handle, &format!("tensors[{at}]"))).map(|one| one.tensor.clone())
    };
    handles.iter().enumerate().map(each).collect()
}

/// Writes what a tensor is to `*info`, whose field `size` the caller has set.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_tensor_describe(
    tensor: *const outcore_tensor,
    info: *mut outcore_tensor_info,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let error = unsafe { Out::handle(error) };
    done(error, || {
        let held = held(tensor, "tensor")?;
        let tensor = &held.tensor;
        let (dtype, shape) = (tensor.dtype(), tensor.shape());
        let found = outcore_tensor_info {
            size: size_of::<outcore_tensor_info>(),
            name: held.name.get_or_init(|| c_text(tensor.name())).as_ptr(),
            dtype: held.dtype.get_or_init(|| c_text(dtype.name())).as_ptr(),
            shape: shape.as_ptr(),
            rank: shape.len(),
            bytes: tensor.size().get(),
            pages: tensor.page_count(),
            page_size: tensor.page_size().bytes(),
            address: tensor.address(),
            writable: u32::from(tensor.is_writable()),
            block_elements: u32::try_from(dtype.block_elements()).unwrap_or(u32::MAX),
            block_bytes: dtype.block_bytes(),
        };
        // SAFETY: the header asks that the structure is NULL or has the bytes that its field `size` says.
        unsafe { raw::write(info, "info", &found) }
    })
}

/// Rows `first` to `end` (without `end`) of the outermost extent, as a tensor of their own. To pin it brings only the
/// pages that it touches. So an expert of a tensor of experts is rows `n` to `n + 1`.
///
/// `*rows` is the caller's, to be freed with `outcore_tensor_free`; it does not need `tensor` any more.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` if it has no such rows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_tensor_rows(
    tensor: *const outcore_tensor,
    first: u64,
    end: u64,
    rows: *mut *mut outcore_tensor,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let (rows, error) = unsafe { (Out::handle(rows), Out::handle(error)) };
    done(error, || rows.give("rows", outcore_tensor::new(held(tensor, "tensor")?.tensor.rows(first..end)?)))
}

/// Allocates a read-write tensor of zeros, which may be larger than memory: what does not fit goes to a scratch file.
/// `dtype` is a name such as "F32", `shape` has `rank` extents, outermost first.
///
/// `*tensor` is the caller's, to be freed with `outcore_tensor_free`. Its bytes are gone with its last handle.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` for a type or a shape that is none, `OUTCORE_DISK_FULL`,
/// `OUTCORE_BUDGET_TOO_SMALL` beyond the scratch budget, `OUTCORE_CLOSED`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_alloc(
    runtime: *const outcore_runtime,
    dtype: *const c_char,
    shape: *const u64,
    rank: usize,
    tensor: *mut *mut outcore_tensor,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let (tensor, error) = unsafe { (Out::handle(tensor), Out::handle(error)) };
    done(error, || {
        let runtime = held(runtime, "runtime")?;
        // SAFETY: the header asks that texts end with a zero.
        let dtype = unsafe { raw::text(dtype, "dtype")? }.ok_or_else(|| raw::null("dtype"))?;
        // SAFETY: the header asks that arrays have as many elements as is said.
        let shape = unsafe { raw::array(shape, rank, "shape")? };
        tensor.give("tensor", outcore_tensor::new(runtime.runtime.alloc(dtype.parse()?, shape)?))
    })
}

/// Frees a handle of a tensor. NULL is allowed. Guards and rows of it stay. Returns `OUTCORE_INVALID_ARGUMENT`, and
/// does nothing, if it was freed before.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_tensor_free(tensor: *mut outcore_tensor) -> outcore_status {
    free(tensor)
}

/// Suggests that a tensor will be used soon. A hint: where there is no room for it, nothing happens. Does not wait.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_prefetch(
    runtime: *const outcore_runtime,
    tensor: *const outcore_tensor,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let error = unsafe { Out::handle(error) };
    done(error, || {
        held(runtime, "runtime")?.runtime.prefetch(&held(tensor, "tensor")?.tensor);
        Ok(())
    })
}

/// Evicts a tensor's pages, as far as no guard forbids it. `pages` may be NULL; otherwise it gets how many it were.
/// Does not wait: what was written is written back in the background.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_evict(
    runtime: *const outcore_runtime,
    tensor: *const outcore_tensor,
    pages: *mut u32,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let (pages, error) = unsafe { (Out::new(pages), Out::handle(error)) };
    done(error, || {
        pages.put(held(runtime, "runtime")?.runtime.evict(&held(tensor, "tensor")?.tensor));
        Ok(())
    })
}

/// The plan that a call declares: repeated for ever if `cyclic` is not 0.
pub fn plan_of(tensors: &[Tensor], cyclic: i32) -> Plan<'_> {
    if cyclic == 0 { Plan::Once(tensors) } else { Plan::Cycle(tensors) }
}

/// Declares the order in which tensors will be used by pins without a walker, so that pages come before they are
/// wanted; repeated for ever if `cyclic` is not 0. With `count` 0 the plan is withdrawn. A policy that follows no plans
/// ignores it.
///
/// The handles may be freed afterwards.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_plan(
    runtime: *const outcore_runtime,
    tensors: *const *mut outcore_tensor,
    count: usize,
    cyclic: i32,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let error = unsafe { Out::handle(error) };
    done(error, || {
        let runtime = held(runtime, "runtime")?;
        // SAFETY: the header asks that arrays have as many elements as is said.
        let tensors = unsafe { tensors_of(tensors, count)? };
        runtime.runtime.plan(plan_of(&tensors, cyclic));
        Ok(())
    })
}
