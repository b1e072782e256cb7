//! Descriptors that outcore does not get by opening a name: rings, events, files without one. A library that shares its
//! process with a program, which may close what it does not know, is told of them.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::OnceLock;

static TOLD: OnceLock<fn(RawFd)> = OnceLock::new();

/// Has `tell` called with each such descriptor as soon as there is one, on whatever thread. Only the first call of this
/// counts. They are closed by `close` of the C library.
pub fn on_descriptor(tell: fn(RawFd)) {
    let _ = TOLD.set(tell);
}

/// Tells of a descriptor that was just made. Nobody else knows it yet.
pub fn made(descriptor: &impl AsRawFd) {
    if let Some(tell) = TOLD.get() {
        tell(descriptor.as_raw_fd());
    }
}
