//! The promise of `strict` processes: using a tensor's address without a pin faults at once.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::os::unix::process::ExitStatusExt;

use harness::{HOST, Scene, Setting, check_at_rest};
use outcore::{DType, Runtime, Tensor};
use outcore_testkit::{harness, models};

fn read(tensor: &Tensor) -> u8 {
    // SAFETY: there is none; in the child this read is to fault, and in the parent the page is pinned.
    unsafe { std::ptr::with_exposed_provenance::<u8>(tensor.address() as usize).read_volatile() }
}

fn resident(setting: &Setting) -> (models::Synthetic, Runtime, Tensor) {
    let file = models::synthetic(&[50_000]);
    let runtime = setting.builder(None).open().unwrap();
    let tensor = runtime.open_model(&file.path).unwrap().tensor("t0").unwrap();
    let guard = runtime.pin(&tensor).wait().unwrap();
    assert_eq!(read(&tensor), guard[0]);
    drop(guard);
    (file, runtime, tensor)
}

/// Run by the test below: reads an evicted page's address and is killed.
#[test]
fn child_reads_what_was_evicted() {
    let Ok(which) = std::env::var("OUTCORE_CHILD_SETTING") else { return };
    let (_file, runtime, tensor) = resident(&Setting::tiers(HOST)[which.parse::<usize>().unwrap()]);
    assert_eq!(runtime.evict(&tensor), tensor.page_count() as u32);
    // With a host tier the page is copied down first. Its frame goes when the copy ends.
    while runtime.observe().snapshot(&tensor).pages[0].frame.is_some() {
        std::thread::yield_now();
    }
    println!("evicted");
    println!("read {}", read(&tensor));
}

#[test]
fn a_use_after_evict_faults_at_once() {
    for which in 0..Setting::tiers(HOST).len() {
        let child = Scene::of("child_reads_what_was_evicted")
            .tell("OUTCORE_STRICT", "1")
            .tell("OUTCORE_CHILD_SETTING", which.to_string())
            .run();
        let text = child.text;
        assert!(text.contains("evicted") && !text.contains("read "), "{text}");
        assert_eq!(child.status.signal(), Some(libc::SIGSEGV), "{:?}: {text}", child.status);
    }
}

#[test]
fn a_pin_makes_the_page_accessible_again() {
    for setting in Setting::tiers(HOST) {
        let (file, runtime, tensor) = resident(&setting);
        for _ in 0..3 {
            runtime.evict(&tensor);
            let guard = runtime.pin(&tensor).wait().unwrap();
            assert!(guard.bytes() == &file.bytes[file.bytes.len() - 50_000..]);
            assert_eq!(read(&tensor), guard[0]);
        }
        // Frames that were behind inaccessible pages serve new ones.
        let table = runtime.alloc(DType::U8, &[6 * (16 << 10)]).unwrap();
        runtime.pin(&table).write().wait().unwrap().bytes_mut().fill(1);
        check_at_rest(runtime, vec![tensor, table], "strict");
    }
}
