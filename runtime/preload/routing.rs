//! Reads which experts llama.cpp has chosen, before it uses them.
//!
//! llama.cpp's scheduler calls a function for tensors that a program wants to see (ggml-backend.h,
//! `ggml_backend_sched_set_eval_callback`). libllama sets it through the dynamic linker, so the function here stands in
//! between. Where the program wants to see nothing, it is told of the tensors `ffn_moe_topk-N`: the experts that each
//! token uses in layer `N`. They are computed before the experts' products begin, so all of them are fetched at once.
//!
//! Only functions that ggml exports are called. Where one is missing, nothing is set. `OUTCORE_RUN_ROUTING=off` leaves
//! all of it out: what experts cost that nobody tells of can then be measured.

use std::collections::HashSet;
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;
use std::sync::OnceLock;

use outcore_mapped::live::Routing;

use parking_lot::Mutex;

use crate::engine::libraries;
use crate::experts::{RouterInput, can_predict, experts};
use crate::inside::{do_ours, ours, without_panic};
use crate::routing_state::{has_experts, note};
use crate::settings::reads_routing;
use crate::sys::say;

/// What ggml calls for each tensor: with `ask`, whether it is wanted; without, that it is computed. `false` ends the
/// computation in the second case.
type Callback = Option<unsafe extern "C" fn(tensor: *mut c_void, ask: bool, data: *mut c_void) -> bool>;

/// The names of tensors with the chosen experts begin so; the layer's number follows.
const CHOSEN: &[u8] = b"ffn_moe_topk-";
/// The names of what routers are given.
const GIVEN: [&[u8]; 2] = [b"ffn_norm-", b"attn_post_norm-"];
/// What a router is given is looked at up to this many bytes: a few tokens.
const GIVEN_MAX: usize = 1 << 20;
/// Ids of this many bytes are looked at. A batch of 16,384 tokens with 256 experts has as many.
const IDS_MAX: usize = 16 << 20;

#[derive(Clone, Copy)]
struct Ggml {
    set_callback: unsafe extern "C" fn(*mut c_void, Callback, *mut c_void),
    name: unsafe extern "C" fn(*const c_void) -> *const c_char,
    bytes: unsafe extern "C" fn(*const c_void) -> usize,
    elements: unsafe extern "C" fn(*const c_void) -> i64,
    rows: unsafe extern "C" fn(*const c_void) -> i64,
    get: unsafe extern "C" fn(*const c_void, *mut c_void, usize, usize),
}

static GGML: OnceLock<Option<Ggml>> = OnceLock::new();
/// What the last router was given, until it has chosen.
static INPUT: Mutex<Option<RouterInput>> = Mutex::new(None);

/// A function of the libraries that are loaded, behind this one. A library that was loaded by `dlopen` without
/// RTLD_GLOBAL is found too. ggml may lie in a library of another name, but not in the program itself: the program
/// calls its own functions, and no others.
fn find(name: &CStr) -> Option<*mut c_void> {
    let own = ggml_backend_sched_set_eval_callback as *const () as *mut c_void;
    // SAFETY: a plain question.
    let next = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if !next.is_null() && next != own {
        return Some(next);
    }
    let (named, others): (Vec<CString>, Vec<CString>) =
        libraries().into_iter().partition(|name| name.to_bytes().windows(4).any(|part| part == b"ggml"));
    named.iter().chain(&others).filter(|library| !library.is_empty()).find_map(|library| {
        // SAFETY: only a library that is loaded already is opened. Where the function is, the handle stays: the library
        // stays as long.
        let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            return None;
        }
        // SAFETY: a handle that is open, and a string that ends.
        let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
        let found = Some(found).filter(|found| !found.is_null() && *found != own);
        if found.is_none() {
            // SAFETY: the handle that was opened above.
            unsafe { libc::dlclose(handle) };
        }
        found
    })
}

fn ggml() -> Option<Ggml> {
    *GGML.get_or_init(|| {
        let found = [
            c"ggml_backend_sched_set_eval_callback",
            c"ggml_get_name",
            c"ggml_nbytes",
            c"ggml_nelements",
            c"ggml_nrows",
            c"ggml_backend_tensor_get",
        ];
        let mut functions = [ptr::null_mut(); 6];
        for (function, name) in functions.iter_mut().zip(found) {
            *function = find(name)?;
        }
        let [set_callback, name, bytes, elements, rows, get] = functions;
        // SAFETY: each has the signature that ggml.h and ggml-backend.h give it, unchanged since these exist.
        unsafe {
            Some(Ggml {
                set_callback: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*mut c_void, Callback, *mut c_void),
                >(set_callback),
                name: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_void) -> *const c_char>(name),
                bytes: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_void) -> usize>(bytes),
                elements: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_void) -> i64>(elements),
                rows: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_void) -> i64>(rows),
                get: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_void, *mut c_void, usize, usize)>(
                    get,
                ),
            })
        }
    })
}

/// # Safety
/// That of the function of the same name in ggml-backend.h.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ggml_backend_sched_set_eval_callback(
    scheduler: *mut c_void,
    callback: Callback,
    data: *mut c_void,
) {
    let found = without_panic(|| ggml().map(|ggml| (ggml, callback.is_none() && has_experts() && reads_routing())));
    // Before a file with experts is mapped, it does not matter.
    if has_experts() {
        note(match found {
            None => Routing::NoFunctions,
            Some(_) if callback.is_some() => Routing::OwnCallback,
            // Until a layer is computed.
            Some((_, true)) => Routing::NothingChosen,
            Some((_, false)) => Routing::Off,
        });
    }
    match found {
        Some((ggml, true)) => {
            // SAFETY: as the caller promised; `see` has the signature and needs no data.
            unsafe { (ggml.set_callback)(scheduler, Some(see), ptr::null_mut()) }
        }
        // SAFETY: as the caller promised.
        Some((ggml, false)) => unsafe { (ggml.set_callback)(scheduler, callback, data) },
        // Nobody but ggml itself could have called this, so it is there. If it cannot be found, a program that wants to
        // see tensors sees none.
        None => say("ggml's functions were not found: experts are read as they are touched"),
    }
}

/// The layer of a tensor whose name begins so.
fn layer_of(name: &[u8], begins: &[u8]) -> Option<u32> {
    std::str::from_utf8(name.strip_prefix(begins)?).ok()?.parse().ok()
}

unsafe extern "C" fn see(tensor: *mut c_void, ask: bool, _data: *mut c_void) -> bool {
    // Asked: whether the tensor is of interest. Told: whether to go on, always.
    without_panic(|| {
        let ggml = ggml()?;
        // SAFETY: a tensor of ggml's, whose name is a string that ends.
        let name = unsafe { CStr::from_ptr((ggml.name)(tensor)) }.to_bytes();
        if let Some(layer) = layer_of(name, CHOSEN) {
            if !ask {
                // SAFETY: a tensor that is computed, as ggml promises.
                let (chosen, used) = unsafe { chosen(ggml, tensor) }?;
                let input = ours(|| INPUT.lock().take());
                experts(layer, &chosen, used, input.as_ref());
            }
            return Some(());
        }
        let layer = GIVEN.iter().find_map(|given| layer_of(name, given)).filter(|layer| can_predict(*layer))?;
        if !ask {
            // SAFETY: as above.
            let given = unsafe { given(ggml, tensor, layer) };
            do_ours(|| *INPUT.lock() = given);
        }
        Some(())
    })
    .is_some()
        || !ask
}

/// What a router is given, for a few tokens.
///
/// # Safety
/// `tensor` is one of ggml's, and computed.
unsafe fn given(ggml: Ggml, tensor: *mut c_void, layer: u32) -> Option<RouterInput> {
    // SAFETY: as the caller promised.
    let (bytes, elements, rows) = unsafe { ((ggml.bytes)(tensor), (ggml.elements)(tensor), (ggml.rows)(tensor)) };
    let (elements, tokens) = (usize::try_from(elements).ok()?, usize::try_from(rows).ok()?);
    // Numbers of 32 bits, one behind the other.
    if bytes > GIVEN_MAX || bytes != elements * size_of::<f32>() {
        return None;
    }
    let mut numbers = vec![0f32; elements];
    // SAFETY: the buffer has as many bytes.
    unsafe { (ggml.get)(tensor, numbers.as_mut_ptr().cast(), 0, bytes) };
    Some(RouterInput { layer, numbers, tokens })
}

/// The experts in a tensor of ids, ascending, each once: llama.cpp goes through them in this order; and how many each
/// token uses.
///
/// # Safety
/// `tensor` is one of ggml's, and computed.
unsafe fn chosen(ggml: Ggml, tensor: *mut c_void) -> Option<(Vec<u32>, usize)> {
    // SAFETY: as the caller promised.
    let (bytes, elements, rows) = unsafe { ((ggml.bytes)(tensor), (ggml.elements)(tensor), (ggml.rows)(tensor)) };
    let (elements, rows) = (usize::try_from(elements).ok()?, usize::try_from(rows).ok()?);
    if bytes > IDS_MAX || !bytes.is_multiple_of(size_of::<i32>()) || rows == 0 || !elements.is_multiple_of(rows) {
        return None;
    }
    let mut ids = vec![0i32; bytes / size_of::<i32>()];
    // SAFETY: the buffer has as many bytes.
    unsafe { (ggml.get)(tensor, ids.as_mut_ptr().cast(), 0, bytes) };
    Some((experts_in(&ids, elements / rows, rows)?, elements / rows))
}

/// The tensor is a view of the sorted experts of each token: rows of `used` ids, a fixed step apart.
fn experts_in(ids: &[i32], used: usize, rows: usize) -> Option<Vec<u32>> {
    let step = match rows {
        1 => used,
        more => ids.len().checked_sub(used)? / (more - 1),
    };
    if used == 0 || step < used {
        return None;
    }
    let all: HashSet<u32> =
        ids.chunks(step).filter_map(|row| row.get(..used)).flatten().filter_map(|id| u32::try_from(*id).ok()).collect();
    let mut all = Vec::from_iter(all);
    all.sort_unstable();
    Some(all)
}
