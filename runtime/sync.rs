//! Internal assertions, and what threads share. Atomics come from the standard library or, under `--cfg loom`, from loom,
//! which explores every interleaving of them.

/// What can only be false because of a bug in this crate. Checked in debug builds and with the feature `strict`.
macro_rules! invariant {
    ($holds:expr, $($message:tt)+) => {
        if cfg!(any(debug_assertions, feature = "strict")) {
            assert!($holds, $($message)+);
        }
    };
}

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};

/// On cache lines of its own, and those that are fetched with them: threads that read what is beside it never wait because
/// another one writes this.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Alone<T>(pub(crate) T);

impl<T> std::ops::Deref for Alone<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}
