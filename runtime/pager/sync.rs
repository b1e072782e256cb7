//! Internal assertions, and what threads share. Atomics come from the standard library, or under `--cfg loom` from
//! loom, which explores every interleaving.

/// Asserts what only a bug in this crate can make false. Checked in debug builds and with the feature `strict`.
#[doc(hidden)]
#[macro_export]
macro_rules! invariant {
    ($holds:expr, $($message:tt)+) => {
        if cfg!(any(debug_assertions, feature = "strict")) {
            assert!($holds, $($message)+);
        }
    };
}

use std::sync::{MutexGuard, PoisonError};

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};

/// A lock that no panic poisons: what it guards is whole after each step of its owner.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A value with cache lines of its own, those fetched together with it included. So a thread that reads a neighbouring
/// value never waits because another thread writes this one.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Alone<T>(pub T);

impl<T> std::ops::Deref for Alone<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}
