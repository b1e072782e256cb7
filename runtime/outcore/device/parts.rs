//! What devices with streams of their own have in common, for authors of a [`Device`](super::Device): reports,
//! closures, and errors that read the same on every device. [`EventId::of`](super::EventId::of) numbers their events.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{Completion, Completions, Token};
use crate::error::{Error, ErrorKind, Result, caught};

/// Completions are reported after at most this many operations.
pub const BATCH_OPERATIONS_MAX: usize = 64;

/// Whether frames that are [protected](super::Device::protect) must be inaccessible: with the feature `strict`. A build
/// for tests is also strict in a process that has `OUTCORE_STRICT=1` in its environment.
pub fn strict() -> bool {
    #[cfg(feature = "testing")]
    {
        static IS_SET: std::sync::LazyLock<bool> =
            std::sync::LazyLock::new(|| std::env::var_os("OUTCORE_STRICT").is_some_and(|value| value == "1"));
        cfg!(feature = "strict") || *IS_SET
    }
    #[cfg(not(feature = "testing"))]
    cfg!(feature = "strict")
}

/// Reports the completions and clears the list. If the receiver panics, that is logged, and the device goes on.
pub fn report(sink: &dyn Completions, done: &mut Vec<Completion>) {
    if done.is_empty() {
        return;
    }
    // A panic here is the caller's bug. It must not end the stream, because every waiter would be lost with it.
    if catch_unwind(AssertUnwindSafe(|| sink.completed(done))).is_err() {
        tracing::error!("the receiver of completions panicked");
    }
    done.clear();
}

/// Reports that [`submit`](super::Device::submit) refuses an operation, with `error`. Call it before `submit` returns,
/// with no lock held: the receiver may call the device. Without a token the error is logged.
pub fn report_refusal(sink: &dyn Completions, token: Option<Token>, error: Error) {
    match token {
        Some(token) => report(sink, &mut vec![Completion { token, result: Err(error) }]),
        None => tracing::warn!(%error, "a stream operation was not run"),
    }
}

/// Runs the closure of a [`StreamOp::Call`](super::StreamOp::Call).
///
/// # Errors
/// [`Internal`](ErrorKind::Internal) with the closure's message, if it panics.
pub fn run_call(call: Box<dyn FnOnce() + Send>) -> Result<()> {
    caught(call).map_err(|panic| {
        Error::new(ErrorKind::Internal, format!("a closure on a stream panicked: {panic}"))
            .remedy("see to the closure: what it was to do has not been done")
    })
}

/// The error with which a submission to a closed device completes.
pub fn closed(device: &str) -> Error {
    Error::new(ErrorKind::Closed, format!("the device {device} is closed"))
        .remedy("close the runtime only when nothing is asked of it any more")
}

/// The error for an event that this device has not recorded.
pub fn unknown_event() -> Error {
    Error::new(ErrorKind::InvalidArgument, "the event was not recorded on this device")
        .remedy("wait for events on the device that recorded them")
}

/// The error for a modelled link that was asked of a device with a link of its own.
pub fn has_a_link(device: &str) -> Error {
    let message = format!("a modelled link was asked for, and the device {device} has a link of its own");
    Error::new(ErrorKind::InvalidArgument, message).remedy("leave the link out, or use the host device")
}
