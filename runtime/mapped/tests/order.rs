//! The promise: the order in which a program uses a file is learned in a few passes, and known from the start the next
//! time; and where there is no order, looking for one costs next to nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::{Path, PathBuf};

use outcore::{Bytes, PageSize, PolicyKind, Runtime};
use outcore_mapped::{Faulting, MapOptions, Mapped};
use outcore_testkit::harness::Rng;

const PAGE: u64 = 16 << 10;

/// The byte at this place of every file here that has no header.
fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn file(folder: &Path, pages: u32) -> PathBuf {
    let path = folder.join("file");
    let bytes: Vec<u8> = (0..u64::from(pages) * PAGE).map(byte).collect();
    fs::write(&path, bytes).unwrap();
    path
}

/// A runtime of so many frames; `None` where the kernel has no such userfaultfd, which is said.
fn runtime(frames: u64) -> Option<Runtime> {
    let device = match Faulting::new() {
        Ok(device) => device,
        Err(error) => {
            eprintln!("SKIPPED: {error}");
            return None;
        }
    };
    let builder = Runtime::builder().device(device).page_size(PageSize::new(Bytes::new(PAGE)).unwrap());
    let builder = builder.device_budget(Bytes::new(frames * PAGE)).policy(PolicyKind::Model);
    Some(builder.scratch_dir(env!("CARGO_TARGET_TMPDIR")).open().unwrap())
}

/// Uses pages in this order. Returns how many of the uses found their page neither there nor on its way.
fn pass(runtime: &Runtime, mapped: &Mapped, order: &[u32]) -> u64 {
    let before = runtime.stats().pager.faults;
    for page in order {
        let at = u64::from(*page) * PAGE + 77;
        assert_eq!(mapped[at as usize], byte(at), "page {page}");
    }
    runtime.stats().pager.faults - before
}

/// All pages in random order, and every fifth of them once more, somewhere else.
fn shuffled(pages: u32, seed: u64) -> Vec<u32> {
    let mut random = Rng::new(seed);
    let mut order: Vec<u32> = (0..pages).chain((0..pages).step_by(5)).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.below(at as u64 + 1) as usize);
    }
    order.dedup();
    order
}

#[test]
fn an_order_that_was_learned_is_followed_from_the_first_pass_the_next_time() {
    let folder = folder();
    let (path, notes) = (file(folder.path(), 300), folder.path().join("notes"));
    let order = shuffled(300, 1);
    let start = |options: MapOptions, passes: usize| {
        let runtime = runtime(100)?;
        let mapped = options.open(&runtime, &path).unwrap();
        let faults: Vec<u64> = (0..passes).map(|_| pass(&runtime, &mapped, &order)).collect();
        drop(mapped);
        runtime.close().unwrap();
        Some(faults)
    };
    let options = MapOptions::new().orders_in(&notes);
    let Some(first) = start(options.clone(), 6) else { return };
    let again = start(options.clone(), 2).unwrap();
    let off = start(options.keep_order(false), 1).unwrap();
    eprintln!("{first:?} {again:?} {off:?}");
    assert!(first[0] > 200 && off[0] > 200, "{first:?} {off:?}");
    assert!(first[3..].iter().all(|faults| *faults < 20), "{first:?}");
    assert!(again.iter().all(|faults| *faults < 20), "{again:?}");
}
