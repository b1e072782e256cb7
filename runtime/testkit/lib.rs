//! What the tests and benches of outcore share: settings and devices of a runtime under test, devices that are simulated
//! or made to fail, a watchdog, replayable randomness, injected failures, processes of their own, model files that are
//! made here, and the emulated CUDA driver.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![allow(missing_debug_implementations, missing_docs, reason = "nothing prints these")]

pub mod cuda_calls;
pub mod fake_cuda;
pub mod harness;
pub mod headers;
pub mod hooked;
pub mod models;
pub mod sim;
