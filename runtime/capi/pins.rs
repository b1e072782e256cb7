//! Pins: guards, and the scopes and walkers that pin for a task or a pass.

use std::ffi::{c_char, c_void};
use std::ptr;
use std::time::Duration;

use outcore::pin::{Complete, Guard, Tensors};
use outcore::{
    Bytes, Error, ErrorKind, PinGuard, PinRequest, PinSet, Read, Result, Scope, ScopePriority, Walker, Write,
};

use crate::call::{call, done, free, outcore_error, outcore_status, quiet};
use crate::handles::{Held, Kind, held};
use crate::raw::{self, Extensible, Out};
use crate::runtime::outcore_runtime;
use crate::tensor::{outcore_tensor, plan_of, tensors_of};

use outcore_status::{OUTCORE_NOT_READY, OUTCORE_OK};

/// Pinned tensors: while it lives their bytes stay where they are. End it with `outcore_unpin`.
pub struct outcore_guard {
    first: Piece,
    /// The other tensors of a set.
    others: Vec<Piece>,
    writes: bool,
    _kept: Kept,
}

impl Kind for outcore_guard {
    const NUMBER: usize = 5;
}

/// What one task holds and may still ask for. Close it with `outcore_scope_close`.
pub struct outcore_scope {
    scope: Scope,
}

impl Kind for outcore_scope {
    const NUMBER: usize = 6;
}

/// One of several passes over a model, each with its own place in its own plan. Close it with `outcore_walker_close`.
pub struct outcore_walker {
    walker: Walker,
}

impl Kind for outcore_walker {
    const NUMBER: usize = 7;
}

/// How to open a scope. Set `size` to `sizeof(outcore_scope_options)` and leave zero what shall have its default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct outcore_scope_options {
    /// sizeof(outcore_scope_options)
    pub size: usize,
    /// A name, for errors and `outcore_waiting`. NULL: none.
    pub label: *const c_char,
    /// "interactive" (the default), or "batch", which is served after it.
    pub priority: *const c_char,
    /// The most bytes that the scope pins at a time, counted in whole pages, a page once for each pin of it. They are
    /// set aside before it opens. 0: it sets nothing aside and pins as it goes.
    pub reserve: u64,
}

// SAFETY: `repr(C)`, `size` comes first, and all fields are numbers and pointers, which may be zero.
unsafe impl Extensible for outcore_scope_options {
    const NAME: &'static str = "outcore_scope_options";
}

/// Where the bytes of a tensor are while it is pinned.
#[derive(Clone, Copy)]
struct Piece {
    address: usize,
    len: usize,
}

impl Piece {
    fn of(bytes: &[u8]) -> Self {
        Self { address: bytes.as_ptr().expose_provenance(), len: bytes.len() }
    }

    fn of_mut(bytes: &mut [u8]) -> Self {
        Self { address: bytes.as_mut_ptr().expose_provenance(), len: bytes.len() }
    }
}

/// Guards of Rust, which are kept for what their drop does.
#[expect(dead_code, reason = "they are only dropped")]
enum Kept {
    One(PinGuard<Read>),
    OneToWrite(PinGuard<Write>),
    Set(PinSet<Read>),
    SetToWrite(PinSet<Write>),
}

impl From<PinGuard<Read>> for outcore_guard {
    fn from(guard: PinGuard<Read>) -> Self {
        Self { first: Piece::of(guard.bytes()), others: Vec::new(), writes: false, _kept: Kept::One(guard) }
    }
}

impl From<PinGuard<Write>> for outcore_guard {
    fn from(mut guard: PinGuard<Write>) -> Self {
        let first = Piece::of_mut(guard.bytes_mut());
        Self { first, others: Vec::new(), writes: true, _kept: Kept::OneToWrite(guard) }
    }
}

const NO_BYTES: Piece = Piece { address: 0, len: 0 };

impl From<PinSet<Read>> for outcore_guard {
    fn from(set: PinSet<Read>) -> Self {
        let mut pieces = (0..set.count()).filter_map(|at| set.bytes(at).ok()).map(Piece::of);
        let (first, others) = (pieces.next().unwrap_or(NO_BYTES), pieces.collect());
        Self { first, others, writes: false, _kept: Kept::Set(set) }
    }
}

impl From<PinSet<Write>> for outcore_guard {
    fn from(mut set: PinSet<Write>) -> Self {
        let mut pieces = set.all_mut().map(Piece::of_mut);
        let (first, others) = (pieces.next().unwrap_or(NO_BYTES), pieces.collect());
        Self { first, others, writes: true, _kept: Kept::SetToWrite(set) }
    }
}

impl outcore_guard {
    fn piece(&self, index: usize) -> Option<Piece> {
        if index == 0 { Some(self.first) } else { self.others.get(index - 1).copied() }
    }
}

/// How to pin. Set `size` to `sizeof(outcore_pin_options)` and leave zero what shall have its default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct outcore_pin_options {
    /// sizeof(outcore_pin_options)
    pub size: usize,
    /// The scope of the task, if it holds guards and asks for more. NULL: none.
    pub scope: *const outcore_scope,
    /// The walker whose use this is. NULL: none.
    pub walker: *const outcore_walker,
    /// The most nanoseconds that the call may wait, if `has_timeout` is not 0. A limit of 0 pins what is in memory, and
    /// waits for nothing.
    pub timeout_ns: u64,
    /// Not 0: `timeout_ns` is the limit. 0: the call waits until the pages are there.
    pub has_timeout: i32,
    /// Not 0: to write. No other guard has the pages meanwhile. Only tensors from `outcore_alloc` can be written.
    pub writes: i32,
}

// SAFETY: `repr(C)`, `size` comes first, and all fields are numbers and pointers, which may be zero.
unsafe impl Extensible for outcore_pin_options {
    const NAME: &'static str = "outcore_pin_options";
}

/// Waits for a request as long as it may take, and gives its guard.
fn wait<G: Guard>(request: PinRequest<'_, G>, limit: Option<Duration>) -> Result<Option<outcore_guard>>
where
    outcore_guard: From<G>,
{
    let guard = match limit {
        None => Some(request.wait()?),
        Some(limit) => request.wait_timeout(limit)?,
    };
    Ok(guard.map(outcore_guard::from))
}

/// Pins one tensor, or several.
///
/// # Safety
/// `options` is NULL, or has as many bytes as its field `size` says.
unsafe fn pin<T: Tensors + ?Sized>(
    runtime: *const outcore_runtime,
    tensors: &T,
    options: *const outcore_pin_options,
) -> Result<Option<outcore_guard>>
where
    outcore_guard: From<T::Guard> + From<<T::Guard as Complete>::Write>,
{
    let runtime = held(runtime, "runtime")?;
    if options.is_null() {
        return wait(runtime.runtime.pin(tensors), None);
    }
    // SAFETY: the caller's promise.
    let options = unsafe { raw::read(options, "options")? };
    let scope = given(options.scope, "options.scope")?;
    let walker = given(options.walker, "options.walker")?;
    let limit = match (options.has_timeout, options.timeout_ns) {
        (0, 0) => None,
        (0, given) => {
            let message = format!("options.timeout_ns is {given}, and options.has_timeout is 0");
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("set has_timeout for a limit"));
        }
        (_, limit) => Some(Duration::from_nanos(limit)),
    };
    let mut request = runtime.runtime.pin(tensors);
    if let Some(scope) = &scope {
        request = request.in_scope(&scope.scope);
    }
    if let Some(walker) = &walker {
        request = request.of(&walker.walker);
    }
    if options.writes == 0 { wait(request, limit) } else { wait(request.write(), limit) }
}

/// A handle that may be NULL.
fn given<T: Kind>(handle: *const T, name: &str) -> Result<Option<Held<T>>> {
    if handle.is_null() { Ok(None) } else { held(handle, name).map(Some) }
}

/// Writes the guard, and says whether there is one.
fn give(guard: &Out<*mut outcore_guard>, pinned: Option<outcore_guard>) -> Result<outcore_status> {
    match pinned {
        Some(pinned) => guard.give("guard", pinned).map(|()| OUTCORE_OK),
        None => Ok(OUTCORE_NOT_READY),
    }
}

/// Pins a tensor: brings its pages into memory, and keeps them there until `outcore_unpin`. `options` may be NULL: then
/// it is pinned for reading, outside of scopes, and the call waits as long as that takes, at the disk and for guards of
/// others. Any number of guards may read a tensor; one may write it.
///
/// With a limit it returns `OUTCORE_NOT_READY` if that passes, with `*guard` NULL and no error; reads that
/// began go on, and with a limit of 0 a missing page is on its way, if there is room.
///
/// A thread that holds guards and asks for more should do so in a scope, or for all at once with `outcore_pin_set`:
/// otherwise threads may wait for each other for ever, which outcore cannot tell.
///
/// `*guard` is the caller's, to be ended with `outcore_unpin`. It needs neither `tensor` nor `runtime` any more.
///
/// Errors: `OUTCORE_BUDGET_TOO_SMALL` if its pages can never be there together (pin rows of it), or are more than the
/// scope reserved; `OUTCORE_BUSY` if the scope holds guards, and others have the pages or the frames; `OUTCORE_IO`,
/// `OUTCORE_TIMED_OUT`, `OUTCORE_MODEL_CHANGED`, `OUTCORE_POISONED`, `OUTCORE_CLOSED`; `OUTCORE_INVALID_ARGUMENT` to
/// write a tensor of a model, and for a scope or a walker of another runtime.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_pin(
    runtime: *const outcore_runtime,
    tensor: *const outcore_tensor,
    options: *const outcore_pin_options,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let (guard, error) = unsafe { (Out::handle(guard), Out::handle(error)) };
    call(error, || {
        let tensor = held(tensor, "tensor")?;
        // SAFETY: the header asks that options are whole.
        give(&guard, unsafe { pin(runtime, &tensor.tensor, options)? })
    })
}

/// Pins several tensors as a unit: all or none. So two threads that need sets never hold half each. The tensors are
/// those of `outcore_guard_data_at`, in the same order. Of those to write no two may share a byte. Otherwise as
/// `outcore_pin`.
///
/// Errors: as for `outcore_pin`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_pin_set(
    runtime: *const outcore_runtime,
    tensors: *const *mut outcore_tensor,
    count: usize,
    options: *const outcore_pin_options,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let (guard, error) = unsafe { (Out::handle(guard), Out::handle(error)) };
    call(error, || {
        // SAFETY: the header asks that arrays are whole.
        let tensors = unsafe { tensors_of(tensors, count)? };
        // SAFETY: the header asks that options are whole.
        give(&guard, unsafe { pin(runtime, &tensors, options)? })
    })
}

/// Ends a guard: nobody may use its bytes from here on. NULL is allowed. Returns `OUTCORE_INVALID_ARGUMENT`, and does
/// nothing, if it was ended before.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_unpin(guard: *mut outcore_guard) -> outcore_status {
    free(guard)
}

fn piece(guard: *const outcore_guard, index: usize, to_write: bool) -> Piece {
    quiet(NO_BYTES, || {
        let guard = held(guard, "guard")?;
        Ok(guard.piece(index).filter(|_| guard.writes || !to_write).unwrap_or(NO_BYTES))
    })
}

/// The bytes that a guard has pinned; of a set, those of its first tensor. They may be read until it is ended. NULL if
/// `guard` is no living guard.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_guard_data(guard: *const outcore_guard) -> *const c_void {
    ptr::with_exposed_provenance(piece(guard, 0, false).address)
}

/// The same, to be written; NULL if the guard is for reading only.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_guard_data_mut(guard: *const outcore_guard) -> *mut c_void {
    ptr::with_exposed_provenance_mut(piece(guard, 0, true).address)
}

/// How many bytes there are. 0 if `guard` is no living guard.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_guard_length(guard: *const outcore_guard) -> usize {
    piece(guard, 0, false).len
}

/// How many tensors a guard has pinned. 0 if `guard` is no living guard.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_guard_count(guard: *const outcore_guard) -> usize {
    quiet(0, || {
        let guard = held(guard, "guard")?;
        Ok(if guard.first.address == 0 { 0 } else { 1 + guard.others.len() })
    })
}

/// The bytes of a tensor of a set, by its index. NULL if there is none.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_guard_data_at(guard: *const outcore_guard, index: usize) -> *const c_void {
    ptr::with_exposed_provenance(piece(guard, index, false).address)
}

/// The same, to be written; NULL if the guard is for reading only.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_guard_data_mut_at(guard: *const outcore_guard, index: usize) -> *mut c_void {
    ptr::with_exposed_provenance_mut(piece(guard, index, true).address)
}

/// How many bytes a tensor of a set has, by its index. 0 if there is none.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_guard_length_at(guard: *const outcore_guard, index: usize) -> usize {
    piece(guard, index, false).len
}

/// Opens a scope, for a task that holds guards and asks for more: it names the scope in `outcore_pin_options`.
/// `options` may be NULL.
///
/// With `reserve` it waits until so much is set aside, and its pins draw on that. Without, it pins as it goes. While it
/// holds guards, its pins never wait for guards of others: if these have what a pin asks for, it returns
/// `OUTCORE_BUSY` at once, and the scope keeps what it holds. Then unpin all its guards and try again, pin what is
/// needed with `outcore_pin_set`, or `reserve` it. A scope without guards waits as `outcore_pin` does.
///
/// `*scope` is the caller's, to be closed with `outcore_scope_close`. Guards may outlive it. One scope is for one task:
/// its pins should not wait for each other's end.
///
/// Errors: `OUTCORE_BUDGET_TOO_SMALL` if there can never be so much, `OUTCORE_CLOSED`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_scope_open(
    runtime: *const outcore_runtime,
    options: *const outcore_scope_options,
    scope: *mut *mut outcore_scope,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let (scope, error) = unsafe { (Out::handle(scope), Out::handle(error)) };
    done(error, || {
        let runtime = held(runtime, "runtime")?;
        if options.is_null() {
            return scope.give("scope", outcore_scope { scope: runtime.runtime.scope().open()? });
        }
        // SAFETY: the header asks that options are whole, and that texts end with a zero.
        let (options, label, priority) = unsafe {
            let options = raw::read(options, "options")?;
            let label = raw::text(options.label, "options.label")?;
            (options, label, raw::text(options.priority, "options.priority")?)
        };
        let mut builder = runtime.runtime.scope();
        if let Some(label) = label {
            builder = builder.label(label);
        }
        builder = match priority {
            None | Some("interactive") => builder,
            Some("batch") => builder.priority(ScopePriority::Batch),
            Some(other) => {
                let message = format!("options.priority {other:?} does not exist");
                return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("choose interactive or batch"));
            }
        };
        let opened = match options.reserve {
            0 => builder.open()?,
            bytes => builder.reserve(Bytes::new(bytes)).wait()?,
        };
        scope.give("scope", outcore_scope { scope: opened })
    })
}

/// Closes a scope: what was set aside for it is given back. NULL is allowed. Its guards stay. Returns
/// `OUTCORE_INVALID_ARGUMENT`, and does nothing, if it was closed before.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_scope_close(scope: *mut outcore_scope) -> outcore_status {
    free(scope)
}

/// Bytes of the pages that a scope has pinned, a page once for each pin. 0 if `scope` is no living scope.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_scope_held(scope: *const outcore_scope) -> u64 {
    quiet(0, || Ok(held(scope, "scope")?.scope.held().get()))
}

/// Begins a pass over a model, for programs with several passes at a time. A program with one needs no walker.
///
/// `*walker` is the caller's, to be closed with `outcore_walker_close`.
///
/// Errors: `OUTCORE_CLOSED`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_walker_open(
    runtime: *const outcore_runtime,
    walker: *mut *mut outcore_walker,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let (walker, error) = unsafe { (Out::handle(walker), Out::handle(error)) };
    done(error, || walker.give("walker", outcore_walker { walker: held(runtime, "runtime")?.runtime.walker()? }))
}

/// Ends a pass. NULL is allowed. Its guards stay. Returns `OUTCORE_INVALID_ARGUMENT`, and does nothing, if
/// it was closed before.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_walker_close(walker: *mut outcore_walker) -> outcore_status {
    free(walker)
}

/// Declares the order in which a walker will use tensors from now on: as `outcore_plan` for pins without one. Walkers
/// that declare the same order share one plan.
///
/// Errors: `OUTCORE_INVALID_ARGUMENT` only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_walker_plan(
    walker: *const outcore_walker,
    tensors: *const *mut outcore_tensor,
    count: usize,
    cyclic: i32,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    let error = unsafe { Out::handle(error) };
    done(error, || {
        let walker = held(walker, "walker")?;
        // SAFETY: the header asks that arrays have as many elements as is said.
        let tensors = unsafe { tensors_of(tensors, count)? };
        walker.walker.plan(plan_of(&tensors, cyclic));
        Ok(())
    })
}
