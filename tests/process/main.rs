//! What a process has: memory, locked memory, mappings.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod mappings;
mod memlock;
mod memory;
