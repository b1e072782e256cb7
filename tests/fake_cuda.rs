//! The emulated CUDA driver behaves as cudarc, unmodified, expects a driver to.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "fake-cuda/control.rs"]
mod control;
mod cuda_calls;

use std::sync::mpsc;

use control::{Fake, Reach};
use cuda_calls::*;
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, DevicePtr, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

/// Fails if anything was found, or is left of what the test made.
fn finish(fake: &Fake) {
    fake.check_leaks();
    fake.expect_clean();
}

/// What cudarc's safe interface offers, with its own events, on two streams.
#[test]
fn safe_interface() {
    let fake = Fake::load();
    {
        let context = CudaContext::new(0).unwrap();
        assert_eq!(context.name().unwrap(), "Emulated CUDA device 0");
        let (first, second) = (context.new_stream().unwrap(), context.new_stream_with_priority(-1).unwrap());
        let expected: Vec<u32> = (0..1000).collect();
        let device = first.clone_htod(&expected).unwrap();
        let ready = first.record_event(None).unwrap();
        second.wait(&ready).unwrap();
        let copy = second.clone_dtod(&device).unwrap();
        assert_eq!(second.clone_dtoh(&copy).unwrap(), expected);
    }
    // cudarc copies plain slices, which are pageable.
    for finding in fake.take_findings() {
        assert!(finding.starts_with("pageable"), "{finding}");
    }
    finish(&fake);
}
