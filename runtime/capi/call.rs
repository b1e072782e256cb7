//! What every call has: a status, an error, and that no panic leaves it.

use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use outcore::{Error, ErrorKind, Result};

use crate::handles::{Kind, held, keep, taken};
use crate::raw::Out;

/// How a call ended. `OUTCORE_OK` is 0. Later versions may add numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum outcore_status {
    /// The call did what it is for.
    OUTCORE_OK = 0,
    /// An argument is outside what the call accepts: NULL, a handle that was freed, a name that does not exist.
    OUTCORE_INVALID_ARGUMENT = 1,
    /// A file, a tensor or another named thing does not exist.
    OUTCORE_NOT_FOUND = 2,
    /// The operating system refused access.
    OUTCORE_PERMISSION_DENIED = 3,
    /// A model file's header is malformed, truncated or wrong.
    OUTCORE_FORMAT = 4,
    /// The input is well-formed, but this library, or this machine's kernel, does not handle it.
    OUTCORE_UNSUPPORTED = 5,
    /// A budget cannot hold what was asked for as one unit.
    OUTCORE_BUDGET_TOO_SMALL = 6,
    /// A scope that holds guards asks for what others hold. It keeps what it holds. Unpin all its guards and try again,
    /// pin what is needed as one set, or reserve it.
    OUTCORE_BUSY = 7,
    /// The operating system would not give memory or address space.
    OUTCORE_OUT_OF_MEMORY = 8,
    /// The process would need more memory mappings than the kernel allows it.
    OUTCORE_TOO_MANY_MAPPINGS = 9,
    /// Reading or writing failed.
    OUTCORE_IO = 10,
    /// Reading or writing took longer than the runtime's limit.
    OUTCORE_TIMED_OUT = 11,
    /// A device or its driver failed.
    OUTCORE_DEVICE = 12,
    /// The file system that holds the scratch file is full.
    OUTCORE_DISK_FULL = 13,
    /// Bytes read back differ from the bytes that were written or first read.
    OUTCORE_CORRUPT = 14,
    /// A model file changed while it was open.
    OUTCORE_MODEL_CHANGED = 15,
    /// The page's only valid bytes were lost to an earlier failure.
    OUTCORE_POISONED = 16,
    /// The runtime is closing or closed, or belongs to the process that this one was forked from.
    OUTCORE_CLOSED = 17,
    /// A broken internal invariant: a bug in outcore.
    OUTCORE_INTERNAL = 18,
    /// The time limit of this call passed, or it was not to wait. Nothing failed, and there is no error.
    OUTCORE_NOT_READY = 100,
}

use outcore_status::*;

impl From<ErrorKind> for outcore_status {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::InvalidArgument => OUTCORE_INVALID_ARGUMENT,
            ErrorKind::NotFound => OUTCORE_NOT_FOUND,
            ErrorKind::PermissionDenied => OUTCORE_PERMISSION_DENIED,
            ErrorKind::Format => OUTCORE_FORMAT,
            ErrorKind::Unsupported => OUTCORE_UNSUPPORTED,
            ErrorKind::BudgetTooSmall => OUTCORE_BUDGET_TOO_SMALL,
            ErrorKind::Busy => OUTCORE_BUSY,
            ErrorKind::OutOfMemory => OUTCORE_OUT_OF_MEMORY,
            ErrorKind::TooManyMappings => OUTCORE_TOO_MANY_MAPPINGS,
            ErrorKind::Io => OUTCORE_IO,
            ErrorKind::TimedOut => OUTCORE_TIMED_OUT,
            ErrorKind::Device => OUTCORE_DEVICE,
            ErrorKind::DiskFull => OUTCORE_DISK_FULL,
            ErrorKind::Corrupt => OUTCORE_CORRUPT,
            ErrorKind::ModelChanged => OUTCORE_MODEL_CHANGED,
            ErrorKind::Poisoned => OUTCORE_POISONED,
            ErrorKind::Closed => OUTCORE_CLOSED,
            // `ErrorKind` may grow; what has no number here yet is still an error.
            ErrorKind::Internal | _ => OUTCORE_INTERNAL,
        }
    }
}

/// Why a call failed: a status, a sentence that names the thing and the limit, and what can be done about it.
///
/// Free it with `outcore_error_free`.
pub struct outcore_error {
    status: outcore_status,
    transient: bool,
    message: CString,
    remedy: Option<CString>,
    text: CString,
}

impl Kind for outcore_error {
    const NUMBER: usize = 1;
}

/// Text for C, which ends at the first zero. Names in files may have one within: it becomes a question mark.
pub fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "?")).unwrap_or_default()
}

impl outcore_error {
    fn new(error: &Error) -> Self {
        let mut message = error.to_string();
        if let Some(remedy) = error.advice() {
            // The whole line ends with the remedy in brackets.
            message.truncate(message.len().saturating_sub(remedy.len() + " ()".len()));
        }
        Self {
            status: error.kind().into(),
            transient: error.is_transient(),
            message: c_text(&message),
            remedy: error.advice().map(c_text),
            text: c_text(&error.to_string()),
        }
    }
}

/// Runs the body of a call. A panic becomes an error, like others: it never reaches the caller's frames.
///
/// The body sees nothing again that a panic left half changed: the runtime gives itself up if it panics, and what this
/// crate keeps changes in single steps.
fn caught<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message").to_owned();
        // Its drop could panic too.
        std::mem::forget(payload);
        let message = format!("outcore panicked: {text}");
        Err(Error::new(ErrorKind::Internal, message).remedy("close the runtime, and report it: this is a bug"))
    })
}

/// Runs a call that may fail: gives its status, and the error to whoever has a place for it.
pub fn call(error: Out<*mut outcore_error>, body: impl FnOnce() -> Result<outcore_status>) -> outcore_status {
    match caught(body) {
        Ok(status) => status,
        Err(failure) => {
            error.put(caught(|| keep(outcore_error::new(&failure))).unwrap_or(ptr::null_mut()));
            failure.kind().into()
        }
    }
}

/// As [`call`], for what gives nothing beyond success.
pub fn done(error: Out<*mut outcore_error>, body: impl FnOnce() -> Result<()>) -> outcore_status {
    call(error, || body().map(|()| OUTCORE_OK))
}

/// Runs a call that has no place for an error: whoever asks with a wrong handle gets `otherwise`.
pub fn quiet<T>(otherwise: T, body: impl FnOnce() -> Result<T>) -> T {
    caught(body).unwrap_or(otherwise)
}

/// Ends a handle; NULL is none. The object goes as soon as no other call uses it.
pub fn free<T: Kind>(handle: *mut T) -> outcore_status {
    match caught(|| if handle.is_null() { Ok(()) } else { taken(handle, "the handle").map(drop) }) {
        Ok(()) => OUTCORE_OK,
        Err(error) => error.kind().into(),
    }
}

/// The name of a status, such as "budget too small". Never NULL, also for numbers that are no status. The text lives as
/// long as the process.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_status_name(status: i32) -> *const c_char {
    const NAMES: [&CStr; 19] = [
        c"ok",
        c"invalid argument",
        c"not found",
        c"permission denied",
        c"format",
        c"unsupported",
        c"budget too small",
        c"busy",
        c"out of memory",
        c"too many mappings",
        c"input or output failed",
        c"timed out",
        c"device failed",
        c"disk full",
        c"corrupt",
        c"model changed",
        c"poisoned",
        c"closed",
        c"internal",
    ];
    let name = match usize::try_from(status) {
        Ok(100) => c"not ready",
        Ok(number) => NAMES.get(number).copied().unwrap_or(c"unknown status"),
        Err(_) => c"unknown status",
    };
    name.as_ptr()
}

fn of_error<T>(error: *const outcore_error, otherwise: T, get: impl FnOnce(&outcore_error) -> T) -> T {
    quiet(otherwise, || held(error, "error").map(|error| get(&error)))
}

/// The status that the failed call returned; `OUTCORE_INVALID_ARGUMENT` if `error` is no living error.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_error_status(error: *const outcore_error) -> outcore_status {
    of_error(error, OUTCORE_INVALID_ARGUMENT, |error| error.status)
}

/// What failed, and why, without the remedy. The text lives until the error is freed. NULL if `error` is no living
/// error.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_error_message(error: *const outcore_error) -> *const c_char {
    of_error(error, ptr::null(), |error| error.message.as_ptr())
}

/// What can be done about it, or NULL if nothing is known. The text lives until the error is freed.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_error_remedy(error: *const outcore_error) -> *const c_char {
    of_error(error, ptr::null(), |error| error.remedy.as_ref().map_or(ptr::null(), |remedy| remedy.as_ptr()))
}

/// Message and remedy on one line, for a log. The text lives until the error is freed. NULL if `error` is no living
/// error.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_error_text(error: *const outcore_error) -> *const c_char {
    of_error(error, ptr::null(), |error| error.text.as_ptr())
}

/// 1 if the same call, unchanged, may succeed later: a disk may recover, room may be freed. Otherwise 0.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_error_is_transient(error: *const outcore_error) -> i32 {
    of_error(error, 0, |error| i32::from(error.transient))
}

/// Frees an error and its texts. NULL is allowed. Returns `OUTCORE_INVALID_ARGUMENT`, and does nothing, if it was freed
/// before.
#[unsafe(no_mangle)]
pub extern "C" fn outcore_error_free(error: *mut outcore_error) -> outcore_status {
    free(error)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    fn said(text: *const c_char) -> String {
        assert!(!text.is_null());
        // SAFETY: texts of errors end with a zero and live until the error is freed, which is later.
        unsafe { CStr::from_ptr(text) }.to_str().expect("errors are UTF-8").to_owned()
    }

    fn fails(body: impl FnOnce() -> Result<outcore_status>) -> (outcore_status, *mut outcore_error) {
        let mut error = ptr::null_mut();
        // SAFETY: a variable, which outlives the call.
        let status = call(unsafe { Out::handle(&raw mut error) }, body);
        (status, error)
    }

    #[test]
    fn a_panic_is_an_error_like_others() {
        let (status, error) = fails(|| panic!("on purpose, number {}", 7));
        assert_eq!((status, outcore_error_status(error)), (OUTCORE_INTERNAL, OUTCORE_INTERNAL));
        assert_eq!(said(outcore_error_message(error)), "outcore panicked: on purpose, number 7");
        assert_eq!(outcore_error_free(error), OUTCORE_OK);
        assert_eq!(quiet(5, || panic!("on purpose")), 5);
    }

    #[test]
    fn an_error_says_message_and_remedy_apart_and_together() {
        let cause = io::Error::from_raw_os_error(28);
        let (status, error) = fails(|| Err(Error::io("write\0page 7", cause).remedy("free some (\u{e9})")));
        assert_eq!(status, OUTCORE_DISK_FULL);
        assert_eq!(outcore_error_is_transient(error), 1);
        let (message, remedy) = (said(outcore_error_message(error)), said(outcore_error_remedy(error)));
        assert!(message.starts_with("write?page 7: No space left"), "{message}");
        assert_eq!(remedy, "free some (\u{e9})");
        assert_eq!(said(outcore_error_text(error)), format!("{message} ({remedy})"));
        assert_eq!(outcore_error_free(error), OUTCORE_OK);

        let (_, error) = fails(|| Err(Error::new(ErrorKind::Closed, "closed")));
        assert!(outcore_error_remedy(error).is_null());
        assert_eq!(said(outcore_error_message(error)), "closed");
        assert_eq!(outcore_error_free(error), OUTCORE_OK);
    }

    #[test]
    fn every_kind_of_error_has_a_status_and_a_name_of_its_own() {
        let kinds = [
            ErrorKind::InvalidArgument,
            ErrorKind::NotFound,
            ErrorKind::PermissionDenied,
            ErrorKind::Format,
            ErrorKind::Unsupported,
            ErrorKind::BudgetTooSmall,
            ErrorKind::Busy,
            ErrorKind::OutOfMemory,
            ErrorKind::TooManyMappings,
            ErrorKind::Io,
            ErrorKind::TimedOut,
            ErrorKind::Device,
            ErrorKind::DiskFull,
            ErrorKind::Corrupt,
            ErrorKind::ModelChanged,
            ErrorKind::Poisoned,
            ErrorKind::Closed,
            ErrorKind::Internal,
        ];
        let statuses = kinds.map(|kind| outcore_status::from(kind) as i32);
        assert_eq!(statuses.to_vec(), (1..=18).collect::<Vec<i32>>());
        let mut names: Vec<_> = (0..=18).chain([100, 101]).map(|status| said(outcore_status_name(status))).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 21);
    }
}
