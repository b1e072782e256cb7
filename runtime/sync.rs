//! Atomics, from the standard library or, under `--cfg loom`, from loom, which explores every interleaving of them.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
