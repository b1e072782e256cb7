//! Mapped files: a range of addresses behind which pages come and go.
//!
//! Hints about a mapped file belong here too, behind the functions that open and describe one.

use std::ffi::{c_char, c_void};
use std::ptr;

use ::outcore_mapped::{LayerExperts, Mapped};
use outcore::{Error, ErrorKind};

use crate::call::{done, free, outcore_error, outcore_status, quiet};
use crate::handles::{Kind, held};
use crate::options::FAULTING;
use crate::raw::{self, Out};
use crate::runtime::outcore_runtime;
use crate::tensor::outcore_tensor;

/// A file as a range of addresses: a touch of a page that is not there waits until it has been read. Close it with
/// `outcore_mapped_close`.
pub struct outcore_mapped {
    mapped: Mapped,
}

impl Kind for outcore_mapped {
    const NUMBER: usize = 8;
}

/// Maps a whole file, of any format, for reading. The runtime's device must be "faulting". Reads nothing yet. Files of
/// one model share its order of use and its experts: map each. A file whose model is not whole is mapped alone.
///
/// `*mapped` is the caller's, to be closed with `outcore_mapped_close`.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` for another device or no regular file, `OUTCORE_BUDGET_TOO_SMALL` if the budget
/// has less than four pages, `OUTCORE_NOT_FOUND`, `OUTCORE_PERMISSION_DENIED`, `OUTCORE_CLOSED`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_mapped_open(
    runtime: *const outcore_runtime,
    path: *const c_char,
    mapped: *mut *mut outcore_mapped,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let (mapped, error) = unsafe { (Out::handle(mapped), Out::handle(error)) };
    done(error, || {
        let runtime = held(runtime, "runtime")?;
        // SAFETY: the header asks that texts end with a zero.
        let path = unsafe { raw::path(path) }.ok_or_else(|| raw::null("path"))?;
        if !runtime.faulting {
            let message = format!("files are mapped on the device {FAULTING:?}, and this runtime has another");
            let remedy = format!("open a runtime with options.device {FAULTING:?}");
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy(remedy));
        }
        mapped.give("mapped", outcore_mapped { mapped: Mapped::open(&runtime.runtime, path)? })
    })
}

/// The first address of a mapped file. It is the same until the file is closed, and may be read from any thread. A page
/// that cannot be read is SIGBUS, as with mmap. NULL if `mapped` is no living mapped file.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_mapped_data(mapped: *const outcore_mapped) -> *const c_void {
    quiet(ptr::null(), || Ok(held(mapped, "mapped")?.mapped.as_ptr().cast()))
}

/// How many bytes a mapped file has. 0 if `mapped` is no living mapped file.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_mapped_length(mapped: *const outcore_mapped) -> usize {
    quiet(0, || Ok(held(mapped, "mapped")?.mapped.len()))
}

/// 1 if the model of a mapped file has this expert, by the layer's and the expert's number in the model; else 0.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_mapped_has_expert(mapped: *const outcore_mapped, layer: u32, expert: u32) -> i32 {
    quiet(0, || Ok(i32::from(held(mapped, "mapped")?.mapped.has_expert(layer, expert))))
}

/// These `count` experts of a layer are used next, in this order: for programs that know what the router has chosen.
/// All that is missing of them is read at once. The call returns when it is there. Together they may have a quarter of
/// the frames: what is more comes when it is touched.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` if its model has no such expert, or there is no such mapped file; `OUTCORE_BUSY`
/// if guards have held the frames for a second; those of `outcore_pin`. Nothing is lost then: what is missing is read
/// when it is touched.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_mapped_expert_hint(
    mapped: *const outcore_mapped,
    layer: u32,
    experts: *const u32,
    count: usize,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let error = unsafe { Out::handle(error) };
    done(error, || {
        // SAFETY: the header asks that arrays have as many elements as is said.
        let experts = unsafe { raw::array(experts, count, "experts") }?;
        held(mapped, "mapped")?.mapped.expert_hint(layer, experts)
    })
}

/// Experts of one layer of a mixture, by their numbers in the model.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct outcore_layer_experts {
    /// The layer's number in the model.
    pub layer: u32,
    /// The experts' numbers in the layer. NULL if there are none.
    pub experts: *const u32,
    /// How many experts there are.
    pub count: usize,
}

/// The layers of an array that the caller lends.
///
/// # Safety
/// There are `count` of them from `first` on, each with an array of as many experts as it says.
unsafe fn layers<'a>(first: *const outcore_layer_experts, count: usize) -> outcore::Result<Vec<LayerExperts<'a>>> {
    // SAFETY: as the caller promised.
    let layers = unsafe { raw::array(first, count, "layers") }?;
    let of = |layer: &outcore_layer_experts| {
        // SAFETY: as the caller promised.
        let experts = unsafe { raw::array(layer.experts, layer.count, "experts") }?;
        Ok(LayerExperts { layer: layer.layer, experts })
    };
    layers.iter().map(of).collect()
}

/// As `outcore_mapped_expert_hint` of `now`, and as `outcore_mapped_expect_experts` of the `count` layers at `next`:
/// the disk goes on with these as soon as it has no more of `now` to read.
///
/// Errors: as for both. If the file has not an expert of `next`, nothing is read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_mapped_expert_hint_before(
    mapped: *const outcore_mapped,
    now: *const outcore_layer_experts,
    next: *const outcore_layer_experts,
    count: usize,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let error = unsafe { Out::handle(error) };
    done(error, || {
        // SAFETY: the header asks that arrays have as many elements as is said; `now` is one of a single layer.
        let (now, next) = unsafe { (layers(now, 1)?, layers(next, count)?) };
        now.iter().try_for_each(|now| held(mapped, "mapped")?.mapped.expert_hint_before(*now, &next))
    })
}

/// These experts of the `count` layers at `layers` are likely to be used soon, in this order of layers, and of each
/// layer the most likely first: for programs that predict what the router will choose. They take the place of all that
/// was expected before. What is missing of them is read while nothing else waits for the disk. Returns at once.
/// Together they may have a quarter of the frames: what is more is left out. Each is compared with what is told later,
/// and what is seldom right is not read.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` if its model has no such expert, or there is no such mapped file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_mapped_expect_experts(
    mapped: *const outcore_mapped,
    layers: *const outcore_layer_experts,
    count: usize,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let error = unsafe { Out::handle(error) };
    done(error, || {
        // SAFETY: the header asks that arrays have as many elements as is said.
        let layers = unsafe { self::layers(layers, count) }?;
        held(mapped, "mapped")?.mapped.expect_experts(&layers)
    })
}

/// Why a page could not be read: the first failure. Returns `OUTCORE_OK` if all could.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_mapped_failure(
    mapped: *const outcore_mapped,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let error = unsafe { Out::handle(error) };
    done(error, || held(mapped, "mapped")?.mapped.failure().map_or(Ok(()), Err))
}

/// A mapped file as a tensor of bytes, with the same addresses: a page of it that is pinned is there.
///
/// `*tensor` is the caller's, to be freed with `outcore_tensor_free`.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_mapped_tensor(
    mapped: *const outcore_mapped,
    tensor: *mut *mut outcore_tensor,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let (tensor, error) = unsafe { (Out::handle(tensor), Out::handle(error)) };
    done(error, || tensor.give("tensor", outcore_tensor::new(held(mapped, "mapped")?.mapped.tensor().clone())))
}

/// Closes a mapped file. NULL is allowed. Nobody may touch its addresses from here on, nor be in a touch of one.
/// Returns `OUTCORE_INVALID_ARGUMENT`, and does nothing, if it was closed before.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_mapped_close(mapped: *mut outcore_mapped) -> outcore_status {
    free(mapped)
}
