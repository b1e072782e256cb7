//! The store: bytes of files, by whatever way the system allows.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod fallback;
mod many_files;
mod model_changed;
mod suite;
