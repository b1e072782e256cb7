//! A process that exits with a live runtime: it ends at once, with its own status, and nothing is printed. Over the
//! emulated driver, which answers no call any more once exit handlers run; no GPU takes part.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use control::Fake;
use harness::{cuda_builder as builder, until};
use outcore::DType;
use outcore_testkit::{fake_cuda as control, harness};

const PAGE: u64 = 2 << 20;
const CHILD: &str = "OUTCORE_TEST_EXIT";

#[test]
fn regression_a_process_exits_with_a_live_runtime() {
    let Some(fake) = Fake::load_or_skip("regression_a_process_exits_with_a_live_runtime") else { return };
    drop(fake);
    for n in 0..20 {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "cuda_exit::streams_until_the_process_exits", "--ignored", "--nocapture"])
            .env(CHILD, n.to_string())
            .env("FAKECUDA_EXIT", "live")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let (out, err) = (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
        assert!(child.status.success(), "child {n}: {:?}\n{out}\n{err}", child.status);
        assert!(err.is_empty() && out.contains("1 passed"), "child {n}:\n{out}\n{err}");
        harness::progress();
    }
}

/// Leaves the runtime, and threads that stream through it, to the end of the process.
#[test]
#[ignore = "a part of another test, which runs it in a process of its own"]
fn streams_until_the_process_exits() {
    let passes: u32 = std::env::var(CHILD).unwrap().parse().unwrap();
    // What is logged as an error, or as a warning, is printed.
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .init();
    let fake = Fake::load();
    let runtime = builder(4, 16).open().unwrap();
    let tensors: Vec<_> = (0..12).map(|_| runtime.alloc(DType::U8, &[PAGE]).unwrap()).collect();
    let stream = runtime.compute_stream().unwrap();
    let shared = Arc::new((runtime, tensors, stream, AtomicU32::new(0)));
    for thread in 0..3 {
        let shared = Arc::clone(&shared);
        std::thread::spawn(move || {
            let (runtime, tensors, stream, pinned) = &*shared;
            for n in thread.. {
                let tensor = std::slice::from_ref(&tensors[n % tensors.len()]);
                match thread {
                    0 => drop(runtime.pin(tensor).on_device().wait().unwrap()),
                    1 => drop(runtime.pin(tensor).write().on_device().wait().unwrap()),
                    _ => runtime
                        .pin(tensor)
                        .on(stream)
                        .wait()
                        .unwrap()
                        .unpin()
                        .unwrap_or_else(|refused| panic!("{refused:?}")),
                }
                pinned.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    until("the pass", || shared.3.load(Ordering::Relaxed) >= 20 + passes);
    std::mem::forget((shared, fake));
}
