//! Headers of model files: what is read, and what is refused.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod fuzz_corpus;
mod headers;
