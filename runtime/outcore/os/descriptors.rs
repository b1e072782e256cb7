//! Descriptors that outcore makes other than by `open`: rings, events, files without a name, listings of a folder.
//!
//! A library that shares its process with a program, which may close what it does not know, runs each such call itself
//! and sees what it made.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::OnceLock;

/// Runs a call that makes descriptors, and learns which one stays open, if one does.
pub type Around = fn(&mut dyn FnMut() -> Option<RawFd>);

static AROUND: OnceLock<Around> = OnceLock::new();

/// Has `around` run each such call from now on, on whatever thread. Only the first call of this counts. The descriptors
/// are closed by `close` of the C library.
pub fn on_descriptors(around: Around) {
    let _ = AROUND.set(around);
}

/// Runs `make`, which makes a descriptor.
///
/// # Errors
/// Those of `make`.
pub fn making<T: AsRawFd, E>(make: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    run(make, |made| made.as_ref().ok().map(AsRawFd::as_raw_fd))
}

/// Runs `work`, which makes descriptors other than by `open`, and closes them again.
pub fn undisturbed<T>(work: impl FnMut() -> T) -> T {
    run(work, |_| None)
}

fn run<T>(mut work: impl FnMut() -> T, left: impl Fn(&T) -> Option<RawFd>) -> T {
    let mut result = None;
    if let Some(around) = AROUND.get() {
        around(&mut || left(result.insert(work())));
    }
    result.unwrap_or_else(work)
}
