//! Pins: guards, and the scopes and walkers that pin for a task or a pass.

use std::ffi::{c_char, c_void};
use std::ptr;
use std::time::Duration;

use outcore::pin::{HostPin, HostPins};
use outcore::{
    Bytes, Error, ErrorKind, PinGuard, PinRequest, PinSet, Read, Result, Scope, ScopePriority, Tensor, Walker, Write,
};

use crate::call::{call, done, free, outcore_error, outcore_status, quiet};
use crate::handles::{Kind, held};
use crate::raw::{self, Extensible, Out};
use crate::runtime::outcore_runtime;
use crate::tensor::{outcore_tensor, tensors_of};

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
    /// The walker whose uses its pins are. NULL: none.
    pub walker: *const outcore_walker,
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

/// Who pins.
trait Pinner {
    fn pin<'a>(&'a self, tensor: &'a Tensor) -> PinRequest<'a, HostPin<'a, Read>>;
    fn pin_mut<'a>(&'a self, tensor: &'a Tensor) -> PinRequest<'a, HostPin<'a, Write>>;
    fn pin_set<'a>(&'a self, tensors: &'a [Tensor]) -> PinRequest<'a, HostPins<'a, Read>>;
    fn pin_set_mut<'a>(&'a self, tensors: &'a [Tensor]) -> PinRequest<'a, HostPins<'a, Write>>;
}

/// The four calls of a type that has them, by a field.
macro_rules! pins_by {
    ($kind:ty, $field:ident) => {
        impl Pinner for $kind {
            fn pin<'a>(&'a self, tensor: &'a Tensor) -> PinRequest<'a, HostPin<'a, Read>> {
                self.$field.pin(tensor)
            }
            fn pin_mut<'a>(&'a self, tensor: &'a Tensor) -> PinRequest<'a, HostPin<'a, Write>> {
                self.$field.pin_mut(tensor)
            }
            fn pin_set<'a>(&'a self, tensors: &'a [Tensor]) -> PinRequest<'a, HostPins<'a, Read>> {
                self.$field.pin_set(tensors)
            }
            fn pin_set_mut<'a>(&'a self, tensors: &'a [Tensor]) -> PinRequest<'a, HostPins<'a, Write>> {
                self.$field.pin_set_mut(tensors)
            }
        }
    };
}
pins_by!(outcore_runtime, runtime);
pins_by!(outcore_scope, scope);
pins_by!(outcore_walker, walker);

/// How a call pins.
#[derive(Clone, Copy)]
struct How {
    writes: bool,
    /// How long it may wait; `None`: until the pages are there.
    limit: Option<Duration>,
}

const READ: How = How { writes: false, limit: None };
const WRITE: How = How { writes: true, limit: None };

impl How {
    fn within(self, nanoseconds: u64) -> Self {
        Self { limit: Some(Duration::from_nanos(nanoseconds)), ..self }
    }
}

/// Waits for a request as long as it may take, and gives its guard.
macro_rules! wait {
    ($request:expr, $limit:expr) => {
        match $limit {
            None => $request.wait().map(|guard| Some(outcore_guard::from(guard))),
            Some(limit) => $request.wait_timeout(limit).map(|guard| guard.map(outcore_guard::from)),
        }
    };
}

fn pin_one<P: Pinner>(by: &P, tensor: &Tensor, how: How) -> Result<Option<outcore_guard>> {
    match how.writes {
        false => wait!(by.pin(tensor), how.limit),
        true => wait!(by.pin_mut(tensor), how.limit),
    }
}

fn pin_all<P: Pinner>(by: &P, tensors: &[Tensor], how: How) -> Result<Option<outcore_guard>> {
    match how.writes {
        false => wait!(by.pin_set(tensors), how.limit),
        true => wait!(by.pin_set_mut(tensors), how.limit),
    }
}

/// The places that each call that pins has.
struct Places {
    guard: Out<*mut outcore_guard>,
    error: Out<*mut outcore_error>,
}

impl Places {
    /// # Safety
    /// Each is NULL, or may be written until the call returns.
    unsafe fn new(guard: *mut *mut outcore_guard, error: *mut *mut outcore_error) -> Self {
        // SAFETY: the same promise.
        unsafe { Self { guard: Out::handle(guard), error: Out::handle(error) } }
    }

    fn give(self, pin: impl FnOnce() -> Result<Option<outcore_guard>>) -> outcore_status {
        let Self { guard, error } = self;
        call(error, || match pin()? {
            Some(pinned) => guard.give("guard", pinned).map(|()| OUTCORE_OK),
            None => Ok(OUTCORE_NOT_READY),
        })
    }

    fn one<P: Kind + Pinner>(self, by: (*const P, &str), tensor: *const outcore_tensor, how: How) -> outcore_status {
        self.give(|| pin_one(&*held(by.0, by.1)?, &held(tensor, "tensor")?.tensor, how))
    }

    /// # Safety
    /// `tensors` is NULL or has `count` handles.
    unsafe fn all<P: Kind + Pinner>(
        self,
        by: (*const P, &str),
        (tensors, count): (*const *mut outcore_tensor, usize),
        how: How,
    ) -> outcore_status {
        // SAFETY: the caller's promise.
        self.give(|| pin_all(&*held(by.0, by.1)?, &unsafe { tensors_of(tensors, count)? }, how))
    }
}

/// Pins a tensor for reading: brings its pages into memory, and keeps them there until `outcore_unpin`. Waits as long
/// as that takes, at the disk and for guards of others. Any number of guards may read a tensor.
///
/// A thread that holds guards and asks for more should do so in a scope, or for all at once with `outcore_pin_set`:
/// otherwise threads may wait for each other for ever, which outcore cannot tell.
///
/// `*guard` is the caller's, to be ended with `outcore_unpin`. It needs neither `tensor` nor `runtime` any more.
///
/// Errors: `OUTCORE_BUDGET_TOO_SMALL` if its pages can never be there together (pin rows of it), `OUTCORE_IO`,
/// `OUTCORE_TIMED_OUT`, `OUTCORE_MODEL_CHANGED`, `OUTCORE_POISONED`, `OUTCORE_CLOSED`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_pin(
    runtime: *const outcore_runtime,
    tensor: *const outcore_tensor,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    unsafe { Places::new(guard, error) }.one((runtime, "runtime"), tensor, READ)
}

/// Pins a tensor from `outcore_alloc` for writing. No other guard has its pages meanwhile. Otherwise as `outcore_pin`.
///
/// Errors: as for `outcore_pin`; `OUTCORE_INVALID_ARGUMENT` for a tensor of a model, which is never written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_pin_mut(
    runtime: *const outcore_runtime,
    tensor: *const outcore_tensor,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    unsafe { Places::new(guard, error) }.one((runtime, "runtime"), tensor, WRITE)
}

/// As `outcore_pin`, and waits for at most `timeout_ns` nanoseconds. Returns `OUTCORE_NOT_READY`, with `*guard` NULL
/// and no error, if they pass; reads that began go on. With 0 it pins what is in memory, and waits for nothing.
///
/// Errors: as for `outcore_pin`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_pin_timeout(
    runtime: *const outcore_runtime,
    tensor: *const outcore_tensor,
    timeout_ns: u64,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    unsafe { Places::new(guard, error) }.one((runtime, "runtime"), tensor, READ.within(timeout_ns))
}

/// As `outcore_pin_mut`, with the limit of `outcore_pin_timeout`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_pin_mut_timeout(
    runtime: *const outcore_runtime,
    tensor: *const outcore_tensor,
    timeout_ns: u64,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    unsafe { Places::new(guard, error) }.one((runtime, "runtime"), tensor, WRITE.within(timeout_ns))
}

/// As `outcore_pin` for what is in memory, and waits for nothing: `outcore_pin_timeout` with 0. Returns
/// `OUTCORE_NOT_READY` if a page is missing; it is then on its way, if there is room, as after `outcore_prefetch`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_pin_try(
    runtime: *const outcore_runtime,
    tensor: *const outcore_tensor,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    unsafe { Places::new(guard, error) }.one((runtime, "runtime"), tensor, READ.within(0))
}

/// Pins several tensors for reading as a unit: all or none. So two threads that need sets never hold half each. The
/// tensors are those of `outcore_guard_data_at`, in the same order.
///
/// Errors: as for `outcore_pin`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_pin_set(
    runtime: *const outcore_runtime,
    tensors: *const *mut outcore_tensor,
    count: usize,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written, and that arrays are whole.
    unsafe { Places::new(guard, error).all((runtime, "runtime"), (tensors, count), READ) }
}

/// Pins several tensors from `outcore_alloc` for writing as a unit. No two of them may share a byte.
///
/// Errors: as for `outcore_pin_mut`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_pin_set_mut(
    runtime: *const outcore_runtime,
    tensors: *const *mut outcore_tensor,
    count: usize,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written, and that arrays are whole.
    unsafe { Places::new(guard, error).all((runtime, "runtime"), (tensors, count), WRITE) }
}

/// As `outcore_pin_set`, with the limit of `outcore_pin_timeout`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_pin_set_timeout(
    runtime: *const outcore_runtime,
    tensors: *const *mut outcore_tensor,
    count: usize,
    timeout_ns: u64,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written, and that arrays are whole.
    unsafe { Places::new(guard, error).all((runtime, "runtime"), (tensors, count), READ.within(timeout_ns)) }
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

/// Opens a scope, for a task that holds guards and asks for more. `options` may be NULL.
///
/// With `reserve` it waits until so much is set aside, and its pins draw on that. Without, it pins as it goes. While it
/// holds guards, its pins never wait for guards of others: if these have what a pin asks for, it returns
/// `OUTCORE_BUSY` at once, and the scope keeps what it holds. Then unpin all its guards and try again, pin what is
/// needed with `outcore_scope_pin_set`, or `reserve` it. A scope without guards waits as `outcore_pin` does.
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
        let mut builder = match options.walker.is_null() {
            true => runtime.runtime.scope(),
            false => held(options.walker, "options.walker")?.walker.scope(),
        };
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

/// As `outcore_pin`, in a scope.
///
/// Errors: as for `outcore_pin`; `OUTCORE_BUSY` if the scope holds guards, and others have the pages or the frames;
/// `OUTCORE_BUDGET_TOO_SMALL` beyond what the scope reserved.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_scope_pin(
    scope: *const outcore_scope,
    tensor: *const outcore_tensor,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    unsafe { Places::new(guard, error) }.one((scope, "scope"), tensor, READ)
}

/// As `outcore_pin_mut`, in a scope.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_scope_pin_mut(
    scope: *const outcore_scope,
    tensor: *const outcore_tensor,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    unsafe { Places::new(guard, error) }.one((scope, "scope"), tensor, WRITE)
}

/// As `outcore_pin_set`, in a scope.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_scope_pin_set(
    scope: *const outcore_scope,
    tensors: *const *mut outcore_tensor,
    count: usize,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written, and that arrays are whole.
    unsafe { Places::new(guard, error).all((scope, "scope"), (tensors, count), READ) }
}

/// As `outcore_pin_set_mut`, in a scope.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_scope_pin_set_mut(
    scope: *const outcore_scope,
    tensors: *const *mut outcore_tensor,
    count: usize,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written, and that arrays are whole.
    unsafe { Places::new(guard, error).all((scope, "scope"), (tensors, count), WRITE) }
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

/// Ends a pass. NULL is allowed. Its guards and scopes stay. Returns `OUTCORE_INVALID_ARGUMENT`, and does nothing, if
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
        match cyclic {
            0 => walker.walker.plan_once(&tensors),
            _ => walker.walker.plan(&tensors),
        }
        Ok(())
    })
}

/// As `outcore_pin`, as a use of the walker.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_walker_pin(
    walker: *const outcore_walker,
    tensor: *const outcore_tensor,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    unsafe { Places::new(guard, error) }.one((walker, "walker"), tensor, READ)
}

/// As `outcore_pin_mut`, as a use of the walker.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_walker_pin_mut(
    walker: *const outcore_walker,
    tensor: *const outcore_tensor,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written.
    unsafe { Places::new(guard, error) }.one((walker, "walker"), tensor, WRITE)
}

/// As `outcore_pin_set`, as a use of the walker.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_walker_pin_set(
    walker: *const outcore_walker,
    tensors: *const *mut outcore_tensor,
    count: usize,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written, and that arrays are whole.
    unsafe { Places::new(guard, error).all((walker, "walker"), (tensors, count), READ) }
}

/// As `outcore_pin_set_mut`, as a use of the walker.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn outcore_walker_pin_set_mut(
    walker: *const outcore_walker,
    tensors: *const *mut outcore_tensor,
    count: usize,
    guard: *mut *mut outcore_guard,
    error: *mut *mut outcore_error,
) -> outcore_status {
    // SAFETY: the header asks that places for results are NULL or may be written, and that arrays are whole.
    unsafe { Places::new(guard, error).all((walker, "walker"), (tensors, count), WRITE) }
}
