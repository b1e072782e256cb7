//! What the tests and benches of outcore share: settings and devices of a runtime under test, devices that are
//! simulated or made to fail, a watchdog, replayable randomness, injected failures, processes of their own, model files
//! that are made here, and the emulated CUDA driver.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![allow(missing_debug_implementations, reason = "nothing prints these")]
#![allow(clippy::new_without_default, clippy::should_implement_trait, reason = "the names are the plain ones")]

pub mod cuda_calls;
pub mod emulated_kernels;
pub mod fake_cuda;
pub mod harness;
pub mod headers;
pub mod hooked;
pub mod models;
pub mod planted;
pub mod sim;
pub mod soak_kernels;
