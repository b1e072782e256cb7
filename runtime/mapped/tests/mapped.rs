//! The promise: a mapped file has the file's bytes, wherever and from however many threads it is touched, in as few
//! frames as it was given; what cannot be read is a signal, never other bytes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use outcore::store::StoreOptions;
use outcore::testing::IoKind;
use outcore::{Bytes, ErrorKind, IoBackend, Lookahead, PageSize, PolicyKind, Runtime, RuntimeBuilder, Tier};
use outcore_mapped::{Faulting, LayerExperts, MapOptions, Mapped, Mechanism};
use outcore_testkit::harness::{Fault, Faults, Rng, Scene, is_child, until};

const PAGE: u64 = 64 << 10;
const MECHANISMS: [Mechanism; 2] = [Mechanism::Move, Mechanism::Copy];

/// Runs each of these where pages are moved, and where they are copied.
macro_rules! in_each_mechanism {
    ($($test:ident)*) => {
        mod moved {
            $(#[test] fn $test() { super::$test(super::Mechanism::Move); })*
        }
        mod copied {
            $(#[test] fn $test() { super::$test(super::Mechanism::Copy); })*
        }
    };
}

in_each_mechanism! {
    a_file_reads_as_it_is_in_four_frames
    sixteen_threads_see_the_files_bytes_in_any_budget
    mappings_pins_and_tensors_share_the_frames
    a_scope_that_pins_what_is_mapped_leaves_touches_their_frames
    what_cannot_be_mapped_is_refused
    behind_the_end_of_a_file_there_are_zeros
    a_page_of_a_file_that_changed_is_a_signal_and_never_other_bytes
    a_disk_that_cannot_read_is_a_signal_and_what_it_reads_later_is_there
    a_tensor_that_is_not_pinned_is_a_signal
    a_page_that_was_lost_is_there_when_it_is_pinned
    a_mapping_that_is_dropped_leaves_nothing
    any_policy_may_decide
    a_touch_of_a_part_of_an_expert_brings_all_of_it
    experts_come_whole_whether_they_are_told_of_or_touched
    experts_that_a_file_has_not_are_refused
    expected_experts_are_read_ahead
    behind_most_of_a_layer_all_of_the_next_is_read_ahead
    many_threads_tell_and_touch
    regression_a_name_that_leads_elsewhere_by_now_is_not_mapped
    regression_a_budget_of_no_more_than_the_kept_pages_ends_no_touch
    regression_a_budget_shrinks_below_the_experts_that_are_kept
    regression_a_touch_after_the_runtime_is_closed_is_a_signal
    regression_a_header_with_a_billion_experts_takes_no_memory
    regression_a_child_by_fork_drops_a_mapping
    regression_touches_end_though_guards_have_all_frames_that_they_can_have
    regression_to_tell_of_experts_beside_own_guards_ends
    regression_frames_without_memory_are_no_mappings_of_their_own
}

/// The byte at this place of every file here.
fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

fn file(folder: &Path, len: u64) -> PathBuf {
    let path = folder.join("file");
    let file = File::create(&path).unwrap();
    for start in (0..len).step_by(1 << 20) {
        let bytes: Vec<u8> = (start..(start + (1 << 20)).min(len)).map(byte).collect();
        file.write_all_at(&bytes, start).unwrap();
    }
    path
}

/// The builder, or `None` where the kernel has no such userfaultfd, which is said.
fn builder(by: Mechanism, frames: u64) -> Option<RuntimeBuilder> {
    builder_of(by, PAGE, frames)
}

fn builder_of(by: Mechanism, page: u64, frames: u64) -> Option<RuntimeBuilder> {
    match Faulting::with_mechanism(by) {
        Ok(device) => Some(
            Runtime::builder()
                .device(device)
                .page_size(PageSize::new(Bytes::new(page)).unwrap())
                .device_budget(Bytes::new(frames * page))
                .scratch_dir(env!("CARGO_TARGET_TMPDIR")),
        ),
        Err(error) => {
            eprintln!("SKIPPED: {error}");
            None
        }
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn a_file_reads_as_it_is_in_four_frames(by: Mechanism) {
    for (page, frames) in [(PAGE, 4), (2 << 20, 4), (PAGE, 1000)] {
        let folder = folder();
        let len = 9 * page + 4321;
        let path = file(folder.path(), len);
        let Some(builder) = builder_of(by, page, frames) else { return };
        let runtime = builder.open().unwrap();
        let mapped = Mapped::open(&runtime, &path).unwrap();
        assert_eq!(mapped.len() as u64, len);
        for _ in 0..3 {
            assert!(mapped.iter().zip(0..).all(|(found, at)| *found == byte(at)));
        }
        assert!(runtime.stats().traffic.peak_device <= Bytes::new(frames * page));
        drop(mapped);
        runtime.close().unwrap();
    }
}

/// Reads ranges in random, cyclic and stride order from many threads.
fn hammer(mapped: &Mapped, threads: u64, rounds: u64, seed: u64) {
    let len = mapped.len() as u64;
    let read = AtomicU64::new(0);
    thread::scope(|scope| {
        for n in 0..threads {
            let read = &read;
            scope.spawn(move || {
                let mut random = Rng::new(seed + n);
                let mut at = n * len / threads;
                for round in 0..rounds {
                    at = match n % 3 {
                        0 => random.below(len),
                        1 => (at + PAGE) % len,
                        _ => (at + 7 * PAGE + 13) % len,
                    };
                    let end = (at + random.below(300) + 1).min(len);
                    let found = &mapped[at as usize..end as usize];
                    assert!(
                        found.iter().zip(at..).all(|(found, at)| *found == byte(at)),
                        "thread {n}, round {round}: {at}"
                    );
                    read.fetch_add(end - at, Ordering::Relaxed);
                }
            });
        }
    });
    assert!(read.into_inner() > 0);
}

fn sixteen_threads_see_the_files_bytes_in_any_budget(by: Mechanism) {
    let folder = folder();
    let path = file(folder.path(), 60 * PAGE + 77);
    for frames in [4, 8, 32, 64] {
        let Some(builder) = builder(by, frames) else { return };
        let runtime = builder.open().unwrap();
        let mapped = Mapped::open(&runtime, &path).unwrap();
        hammer(&mapped, 16, 300, frames);
        let stats = runtime.stats();
        assert!(stats.traffic.peak_device <= Bytes::new(frames * PAGE), "{stats:?}");
        assert_eq!(stats.pager.evictions > 0, frames < 61, "{frames}: {stats:?}");
        drop(mapped);
        runtime.close().unwrap();
    }
}

fn mappings_pins_and_tensors_share_the_frames(by: Mechanism) {
    let folder = folder();
    let path = file(folder.path(), 40 * PAGE);
    let Some(builder) = builder(by, 16) else { return };
    let runtime = builder.open().unwrap();
    let (one, two) = (Mapped::open(&runtime, &path).unwrap(), Mapped::open(&runtime, &path).unwrap());
    let own = runtime.alloc(outcore::DType::U8, &[20, PAGE]).unwrap();
    for row in 0..20 {
        runtime.pin(&own.rows(row..row + 1).unwrap()).write().wait().unwrap().bytes_mut().fill(row as u8 + 1);
    }
    // A pinned page is there, at the same address.
    let third = one.tensor().rows(3 * PAGE..4 * PAGE).unwrap();
    let guard = runtime.pin(&third).wait().unwrap();
    assert_eq!(guard.as_ptr(), one[3 * PAGE as usize..].as_ptr());
    hammer(&one, 4, 200, 1);
    hammer(&two, 4, 200, 2);
    assert!(guard.iter().zip(3 * PAGE..).all(|(found, at)| *found == byte(at)));
    for row in 0..20 {
        let bytes = runtime.pin(&own.rows(row..row + 1).unwrap()).wait().unwrap();
        assert!(bytes.iter().all(|byte| *byte == row as u8 + 1), "row {row}");
    }
    drop((guard, third, one));
    hammer(&two, 4, 100, 3);
    drop((two, own));
    runtime.close().unwrap();
}

fn what_cannot_be_mapped_is_refused(by: Mechanism) {
    let folder = folder();
    let path = file(folder.path(), 10 * PAGE);
    let Some(few) = builder(by, 3) else { return };
    let runtime = few.open().unwrap();
    assert_eq!(Mapped::open(&runtime, &path).unwrap_err().kind(), ErrorKind::BudgetTooSmall);
    runtime.close().unwrap();
    let host = Runtime::builder().device_budget(Bytes::mib(16)).open().unwrap();
    let error = Mapped::open(&host, &path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("Faulting::new"), "{error}");
    host.close().unwrap();
    let runtime = builder(by, 8).unwrap().open().unwrap();
    assert_eq!(Mapped::open(&runtime, folder.path()).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(Mapped::open(&runtime, folder.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
    std::fs::write(folder.path().join("empty"), []).unwrap();
    assert_eq!(Mapped::open(&runtime, folder.path().join("empty")).unwrap_err().kind(), ErrorKind::Format);
    runtime.close().unwrap();
}

/// The name of an open file was compared, and then opened: by then it could be another file's.
fn regression_a_name_that_leads_elsewhere_by_now_is_not_mapped(by: Mechanism) {
    let folder = folder();
    let path = file(folder.path(), 10 * PAGE);
    let Some(builder) = builder(by, 8) else { return };
    let runtime = builder.open().unwrap();
    let only = MapOptions::new().only(std::fs::metadata(&path).unwrap());
    drop(only.open(&runtime, &path).unwrap());
    std::fs::rename(&path, folder.path().join("old")).unwrap();
    file(folder.path(), 10 * PAGE);
    assert_eq!(only.open(&runtime, &path).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(only.open_private(&runtime, &path).unwrap_err().kind(), ErrorKind::NotFound);
    runtime.close().unwrap();
}

fn behind_the_end_of_a_file_there_are_zeros(by: Mechanism) {
    let folder = folder();
    let (long, short) = (file(folder.path(), 12 * PAGE), folder.path().join("short"));
    std::fs::write(&short, (0..2 * PAGE + 100).map(byte).collect::<Vec<u8>>()).unwrap();
    let Some(builder) = builder(by, 4) else { return };
    let runtime = builder.open().unwrap();
    // Every frame has held other bytes.
    let other = Mapped::open(&runtime, &long).unwrap();
    hammer(&other, 2, 100, 1);
    let mapped = Mapped::open(&runtime, &short).unwrap();
    for _ in 0..3 {
        let last = &mapped[2 * PAGE as usize..];
        assert!(last.iter().zip(2 * PAGE..).all(|(found, at)| *found == byte(at)));
        for at in 100..PAGE as usize {
            // SAFETY: the rest of the last page, which the range has.
            let behind = unsafe { last.as_ptr().add(at).read_volatile() };
            assert_eq!(behind, 0, "{at} bytes into the last page");
        }
        hammer(&other, 2, 50, 2);
    }
    drop((mapped, other));
    runtime.close().unwrap();
}

const MECHANISM: &str = "OUTCORE_TEST_MECHANISM";

/// Ends with the signal that this child gets.
fn signal_of(by: Mechanism, child: &str) -> Option<i32> {
    Scene::of(child).tell(MECHANISM, by.to_string()).run().status.signal()
}

fn mechanism_of_the_parent() -> Mechanism {
    let name = std::env::var(MECHANISM).unwrap();
    MECHANISMS.into_iter().find(|mechanism| mechanism.to_string() == name).unwrap()
}

fn a_page_of_a_file_that_changed_is_a_signal_and_never_other_bytes(by: Mechanism) {
    if builder(by, 4).is_some() {
        assert_eq!(signal_of(by, "child_touches_a_file_that_changed"), Some(libc::SIGBUS));
    }
}

#[test]
#[ignore = "the process of a test"]
fn child_touches_a_file_that_changed() {
    if !is_child("child_touches_a_file_that_changed") {
        return;
    }
    let folder = folder();
    let path = file(folder.path(), 20 * PAGE);
    let runtime = builder(mechanism_of_the_parent(), 8).unwrap().open().unwrap();
    let mapped = Mapped::open(&runtime, &path).unwrap();
    assert_eq!(mapped[0], byte(0));
    // The same length, and other bytes.
    std::fs::write(&path, vec![1; 20 * PAGE as usize]).unwrap();
    assert_eq!(mapped[15 * PAGE as usize], byte(15 * PAGE), "bytes of another file");
}

/// A builder whose store can be told to fail.
fn builder_that_fails(by: Mechanism, frames: u64) -> Option<(RuntimeBuilder, Arc<Faults>)> {
    let faults = Faults::new();
    let store = StoreOptions::new(IoBackend::Auto).hook(faults.clone());
    builder(by, frames).map(|builder| (builder.store(store), faults))
}

fn a_disk_that_cannot_read_is_a_signal_and_what_it_reads_later_is_there(by: Mechanism) {
    let folder = folder();
    let Some((builder, faults)) = builder_that_fails(by, 8) else { return };
    assert_eq!(signal_of(by, "child_touches_what_the_disk_cannot_read"), Some(libc::SIGBUS));
    let runtime = builder.open().unwrap();
    let mapped = Mapped::open(&runtime, file(folder.path(), 20 * PAGE)).unwrap();
    is_the_files(&mapped, 0, 4 * PAGE);
    faults.all(IoKind::Read, Fault::Errno(libc::EIO));
    let error = runtime.pin(&mapped.tensor().rows(9 * PAGE..10 * PAGE).unwrap()).wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    // What is there stays there.
    is_the_files(&mapped, 3 * PAGE, PAGE);
    faults.off();
    is_the_files(&mapped, 0, 20 * PAGE);
    assert!(mapped.failure().is_none(), "{:?}", mapped.failure());
    drop(mapped);
    runtime.close().unwrap();
}

#[test]
#[ignore = "the process of a test"]
fn child_touches_what_the_disk_cannot_read() {
    if !is_child("child_touches_what_the_disk_cannot_read") {
        return;
    }
    let folder = folder();
    let (builder, faults) = builder_that_fails(mechanism_of_the_parent(), 8).unwrap();
    let runtime = builder.open().unwrap();
    let mapped = Mapped::open(&runtime, file(folder.path(), 20 * PAGE)).unwrap();
    is_the_files(&mapped, 0, 2 * PAGE);
    faults.all(IoKind::Read, Fault::Errno(libc::EIO));
    is_the_files(&mapped, 9 * PAGE, PAGE);
}

fn a_tensor_that_is_not_pinned_is_a_signal(by: Mechanism) {
    if builder(by, 4).is_some() {
        assert_eq!(signal_of(by, "child_touches_a_tensor_without_a_pin"), Some(libc::SIGBUS));
    }
}

#[test]
#[ignore = "the process of a test"]
fn child_touches_a_tensor_without_a_pin() {
    if !is_child("child_touches_a_tensor_without_a_pin") {
        return;
    }
    let runtime = builder(mechanism_of_the_parent(), 8).unwrap().open().unwrap();
    let tensor = runtime.alloc(outcore::DType::U8, &[PAGE]).unwrap();
    let address = std::ptr::with_exposed_provenance::<u8>(tensor.address() as usize);
    // SAFETY: not sound, on purpose: nothing is there, and the process is to end here.
    let found = unsafe { address.read_volatile() };
    panic!("it read {found}");
}

/// The kernel's own access to a page that nobody brings is an error, where a thread's is a signal.
fn a_page_that_was_lost_is_there_when_it_is_pinned(by: Mechanism) {
    let folder = folder();
    let Some(builder) = builder(by, 8) else { return };
    let runtime = builder.open().unwrap();
    let tensor = runtime.alloc(outcore::DType::U8, &[4, PAGE]).unwrap();
    let other = File::create(folder.path().join("other")).unwrap();
    let write = |row: u64| {
        let address = std::ptr::with_exposed_provenance::<libc::c_void>((tensor.address() + row * PAGE) as usize);
        // SAFETY: the kernel reads a byte there, or says that it cannot.
        let written = unsafe { libc::write(std::os::fd::AsRawFd::as_raw_fd(&other), address, 1) };
        if written < 0 { Err(std::io::Error::last_os_error().raw_os_error()) } else { Ok(written) }
    };
    for round in 0..3 {
        for row in 0..4 {
            assert_eq!(write(row), Err(Some(libc::EFAULT)), "row {row}, round {round}");
        }
        for row in 0..4 {
            let part = tensor.rows(row..row + 1).unwrap();
            let mut guard = runtime.pin(&part).write().wait().unwrap();
            assert!(guard.bytes().iter().all(|byte| *byte == 10 * round), "row {row}, round {round}");
            guard.bytes_mut().fill(10 * round + 10);
            assert_eq!(write(row), Ok(1));
        }
        runtime.evict(&tensor);
        outcore_testkit::harness::until("the pages leave", || runtime.stats().device_frames.used == 0);
        // Until its frame is another page's, what has left may still be seen.
        runtime.trim(Bytes::new(8 * PAGE));
    }
    drop(tensor);
    runtime.close().unwrap();
}

fn a_mapping_that_is_dropped_leaves_nothing(by: Mechanism) {
    let folder = folder();
    let path = file(folder.path(), 20 * PAGE);
    let Some(builder) = builder(by, 8) else { return };
    let runtime = builder.open().unwrap();
    // Dropped and mapped again: nothing is left of the first.
    for round in 0..20 {
        let mapped = Mapped::open(&runtime, &path).unwrap();
        hammer(&mapped, 3, 20, round);
        assert!(mapped.failure().is_none());
    }
    assert_eq!(runtime.stats().device_frames.used, 0, "{:?}", runtime.stats());
    runtime.close().unwrap();
}

fn any_policy_may_decide(by: Mechanism) {
    let folder = folder();
    let path = file(folder.path(), 40 * PAGE);
    for policy in PolicyKind::ALL {
        let Some(builder) = builder(by, 12) else { return };
        let runtime = builder.policy(policy).open().unwrap();
        let mapped = Mapped::open(&runtime, &path).unwrap();
        hammer(&mapped, 5, 60, 9);
        drop(mapped);
        runtime.close().unwrap();
    }
}

const LAYERS: u64 = 3;
const EXPERTS: u64 = 16;
/// Bytes of one matrix of one expert: three pages and a bit.
const PIECE: u64 = 3 * PAGE + 4096;

/// A mixture of experts as a safetensors file: each layer has one matrix that all tokens use, and the experts' two,
/// fused. Returns where the first byte of each piece is: layer, expert, matrix.
fn mixture(folder: &Path) -> (PathBuf, impl Fn(u64, u64, u64) -> u64) {
    let mut entries = Vec::new();
    let mut at = 0;
    for layer in 0..LAYERS {
        for (name, shape) in [
            ("attn_q.weight", vec![PAGE / 64, 64]),
            ("ffn_up_exps.weight", vec![EXPERTS, PIECE / 64, 64]),
            ("ffn_down_exps.weight", vec![EXPERTS, PIECE / 64, 64]),
        ] {
            let len: u64 = shape.iter().product();
            entries.push(format!(
                r#""blk.{layer}.{name}":{{"dtype":"U8","shape":{shape:?},"data_offsets":[{at},{}]}}"#,
                at + len
            ));
            at += len;
        }
    }
    let header = format!("{{{}}}", entries.join(","));
    let data = 8 + header.len() as u64;
    let path = file(folder, data + at);
    let written = File::options().write(true).open(&path).unwrap();
    written.write_all_at(&(header.len() as u64).to_le_bytes(), 0).unwrap();
    written.write_all_at(header.as_bytes(), 8).unwrap();
    let place = move |layer, expert, matrix| {
        data + layer * (PAGE + 2 * EXPERTS * PIECE) + PAGE + (matrix * EXPERTS + expert) * PIECE
    };
    (path, place)
}

fn is_the_files(mapped: &Mapped, start: u64, len: u64) {
    let found = &mapped[start as usize..(start + len) as usize];
    assert!(found.iter().zip(start..).all(|(found, at)| *found == byte(at)), "at {start}");
}

fn a_touch_of_a_part_of_an_expert_brings_all_of_it(by: Mechanism) {
    let folder = folder();
    let (path, place) = mixture(folder.path());
    let Some(builder) = builder(by, 200) else { return };
    let runtime = builder.open().unwrap();
    let mapped = Mapped::open(&runtime, &path).unwrap();
    // One byte in the middle of one matrix of one expert.
    is_the_files(&mapped, place(1, 5, 1) + PAGE, 1);
    // Both matrices of that expert come, without a further touch; of its neighbour, what it shares pages with.
    let is_there = |expert| {
        let pages = runtime.observe().snapshot(mapped.tensor()).pages;
        let of_matrix = |matrix| place(1, expert, matrix) / PAGE..(place(1, expert, matrix) + PIECE).div_ceil(PAGE);
        [0, 1].into_iter().flat_map(of_matrix).all(|page| pages[page as usize].tier() == Tier::Device)
    };
    let started = std::time::Instant::now();
    while !is_there(5) {
        assert!(started.elapsed().as_secs() < 60, "{:?}", runtime.stats());
        thread::yield_now();
    }
    assert!(!is_there(4) && !is_there(6));
    drop(mapped);
    runtime.close().unwrap();
}

fn experts_come_whole_whether_they_are_told_of_or_touched(by: Mechanism) {
    let folder = folder();
    let (path, place) = mixture(folder.path());
    for (frames, told) in [(24, true), (24, false), (100, true), (100, false), (500, true), (500, false)] {
        let Some(builder) = builder(by, frames) else { return };
        let runtime = builder.open().unwrap();
        let mapped = Mapped::open(&runtime, &path).unwrap();
        let mut random = Rng::new(frames);
        for _ in 0..40 {
            for layer in 0..LAYERS {
                is_the_files(&mapped, place(layer, 0, 0) - PAGE, PAGE);
                let drawn = [random.below(EXPERTS), random.below(EXPERTS / 4)];
                if told {
                    let experts = drawn.map(|expert| expert as u32);
                    let next = [1, 2].map(|ahead| ((layer + ahead) % LAYERS) as u32);
                    // A prediction, which is wrong mostly.
                    let guess = [random.below(EXPERTS) as u32, 0];
                    let next = next.map(|layer| LayerExperts { layer, experts: &guess });
                    match random.below(2) {
                        0 => {
                            let now = LayerExperts { layer: layer as u32, experts: &experts };
                            mapped.expert_hint_before(now, &next).unwrap();
                        }
                        _ => {
                            mapped.expert_hint(layer as u32, &experts).unwrap();
                            mapped.expect_experts(&next).unwrap();
                        }
                    }
                }
                for (expert, matrix) in drawn.into_iter().flat_map(|expert| [(expert, 0), (expert, 1)]) {
                    is_the_files(&mapped, place(layer, expert, matrix), PIECE);
                }
            }
        }
        assert!(runtime.stats().traffic.peak_device <= Bytes::new(frames * PAGE));
        drop(mapped);
        runtime.close().unwrap();
    }
}

#[test]
fn a_runtime_that_nobody_gave_a_policy_knows_what_a_model_is() {
    let Ok(device) = Faulting::new() else { return eprintln!("SKIPPED: no userfaultfd") };
    let builder = Runtime::builder().device(device).device_budget(Bytes::mib(16));
    for (builder, name) in [(builder.clone(), "model"), (builder.policy(PolicyKind::Plan), "plan")] {
        let runtime = builder.open().unwrap();
        assert_eq!(runtime.stats().policy, name);
        runtime.close().unwrap();
    }
}

fn experts_that_a_file_has_not_are_refused(by: Mechanism) {
    let folder = folder();
    let (path, _) = mixture(folder.path());
    let Some(builder) = builder(by, 100) else { return };
    let runtime = builder.open().unwrap();
    let mapped = Mapped::open(&runtime, &path).unwrap();
    assert!(mapped.has_expert(2, EXPERTS as u32 - 1) && !mapped.has_expert(0, EXPERTS as u32));
    for (layer, expert) in [(0, EXPERTS as u32), (LAYERS as u32, 0), (u32::MAX, u32::MAX)] {
        let error = mapped.expert_hint(layer, &[0, expert]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.to_string().contains(&layer.to_string()), "{error}");
        let unknown = LayerExperts { layer, experts: &[expert] };
        let known = LayerExperts { layer: 0, experts: &[0] };
        for error in [
            mapped.expect_experts(&[known, unknown]).unwrap_err(),
            mapped.expert_hint_before(known, &[unknown]).unwrap_err(),
            mapped.expert_hint_before(unknown, &[known]).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
    }
    // More than fits is no error, nor is none, nor the same twice.
    let all: Vec<u32> = (0..EXPERTS as u32).chain(0..EXPERTS as u32).collect();
    mapped.expert_hint(0, &all).unwrap();
    mapped.expert_hint(0, &[]).unwrap();
    mapped.expert_hint(0, &[3, 3]).unwrap();
    let of = |layer, experts| LayerExperts { layer, experts };
    mapped.expect_experts(&[of(1, &all), of(0, &all), of(1, &[])]).unwrap();
    mapped.expert_hint_before(of(0, &all), &[of(1, &all); 100]).unwrap();
    mapped.expert_hint_before(of(0, &[]), &[of(1, &[]); 100]).unwrap();
    mapped.expect_experts(&[]).unwrap();
    drop(mapped);
    runtime.close().unwrap();
}

/// What a program expects is read although nobody waits for it, and is there when it is told of or touched.
fn expected_experts_are_read_ahead(by: Mechanism) {
    let folder = folder();
    let (path, place) = mixture(folder.path());
    let Some(builder) = builder(by, 100) else { return };
    let runtime = builder.open().unwrap();
    let mapped = Mapped::open(&runtime, &path).unwrap();
    // All frames are in use.
    (0..EXPERTS).for_each(|expert| is_the_files(&mapped, place(0, expert, 0), PIECE));
    let of = |layer, experts| LayerExperts { layer, experts };
    mapped.expect_experts(&[of(1, &[7]), of(2, &[2])]).unwrap();
    let of_matrix = |place: u64| place / PAGE..(place + PIECE).div_ceil(PAGE);
    let pages = [(1, 7, 0), (1, 7, 1), (2, 2, 0), (2, 2, 1)]
        .map(|(layer, expert, matrix)| of_matrix(place(layer, expert, matrix)));
    let pages: Vec<u64> = pages.into_iter().flatten().collect();
    ends("a fill ahead", || {
        let here =
            |page: &u64| runtime.observe().snapshot(mapped.tensor()).pages[*page as usize].tier() == Tier::Device;
        while !pages.iter().all(here) {
            thread::yield_now();
        }
    });
    let read = runtime.stats().traffic.disk_read;
    mapped.expert_hint_before(of(1, &[7]), &[of(2, &[2])]).unwrap();
    is_the_files(&mapped, place(2, 2, 1), PIECE);
    is_the_files(&mapped, place(1, 7, 0), PIECE);
    assert_eq!(runtime.stats().traffic.disk_read, read);
    drop(mapped);
    runtime.close().unwrap();
}

/// Who uses most of a layer is a batch of many tokens, and uses most of the next one.
fn behind_most_of_a_layer_all_of_the_next_is_read_ahead(by: Mechanism) {
    let folder = folder();
    let (path, place) = mixture(folder.path());
    let Some(builder) = builder(by, 500) else { return };
    let runtime = builder.open().unwrap();
    let mapped = Mapped::open(&runtime, &path).unwrap();
    let most: Vec<u32> = (0..EXPERTS as u32 * 3 / 4).collect();
    mapped.expert_hint(0, &most).unwrap();
    let last = place(1, EXPERTS - 1, 1) + PIECE;
    let next = (place(1, 0, 0) / PAGE) as usize..last.div_ceil(PAGE) as usize;
    ends("a fill ahead", || {
        let here = || runtime.observe().snapshot(mapped.tensor()).pages;
        while !here()[next.clone()].iter().all(|page| page.tier() == Tier::Device) {
            thread::yield_now();
        }
    });
    let read = runtime.stats().traffic.disk_read;
    (0..EXPERTS).for_each(|expert| is_the_files(&mapped, place(1, expert, 1), PIECE));
    assert_eq!(runtime.stats().traffic.disk_read, read);
    drop(mapped);
    runtime.close().unwrap();
}

/// Threads that tell and threads that touch go over two mappings of one file: neither waits for what the other holds.
fn many_threads_tell_and_touch(by: Mechanism) {
    let folder = folder();
    let (path, place) = mixture(folder.path());
    let Some(builder) = builder(by, 80) else { return };
    let runtime = builder.open().unwrap();
    let files = [Mapped::open(&runtime, &path).unwrap(), Mapped::open(&runtime, &path).unwrap()];
    thread::scope(|scope| {
        for n in 0..8 {
            let (mapped, place) = (&files[n as usize % 2], &place);
            scope.spawn(move || {
                let mut random = Rng::new(n);
                for _ in 0..100 {
                    let (layer, expert) = (random.below(LAYERS), random.below(EXPERTS));
                    if n < 5 {
                        mapped.expert_hint(layer as u32, &[expert as u32, (expert as u32 + 1) % 16]).unwrap();
                    }
                    is_the_files(mapped, place(layer, expert, random.below(2)), PIECE);
                }
            });
        }
    });
    assert!(runtime.stats().traffic.peak_device <= Bytes::new(80 * PAGE));
    drop(files);
    runtime.close().unwrap();
}

/// What `memmap2::Mmap::map` does, with a runtime of its own.
#[test]
fn an_open_file_is_mapped_without_a_runtime() {
    if Faulting::new().is_err() {
        eprintln!("SKIPPED: no userfaultfd");
        return;
    }
    let folder = folder();
    let path = file(folder.path(), 9 * PAGE + 5);
    let open = File::open(&path).unwrap();
    let (one, two) = (Mapped::map(&open).unwrap(), Mapped::map(&open).unwrap());
    drop(open);
    for mapped in [&one, &two] {
        assert_eq!(mapped.len() as u64, 9 * PAGE + 5);
        assert!(mapped.iter().zip(0..).all(|(found, at)| *found == byte(at)));
    }
    // A name that is another file's now, or nobody's, is not mapped.
    let open = File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(Mapped::map(&open).unwrap_err().kind(), ErrorKind::NotFound);
    std::fs::write(&path, b"another").unwrap();
    assert_eq!(Mapped::map(&open).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(Mapped::map(&File::open(folder.path()).unwrap()).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

/// Runs `run` on another thread, and fails if it does not end: a wait without an end is what these tests look for.
fn ends<T: Send>(what: &str, run: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let (tell, told) = std::sync::mpsc::channel::<()>();
        let thread = scope.spawn(move || {
            let result = run();
            drop(tell);
            result
        });
        if told.recv_timeout(std::time::Duration::from_secs(60)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            // The scope would wait for the thread, so the process ends here.
            eprintln!("{what} did not end");
            std::process::exit(101);
        }
        thread.join().unwrap()
    })
}

/// The pages that the fault thread keeps pinned were all frames of the smaller budget: no touch came back.
fn regression_a_budget_of_no_more_than_the_kept_pages_ends_no_touch(by: Mechanism) {
    let folder = folder();
    let path = file(folder.path(), 300 * PAGE);
    let Some(builder) = builder(by, 256) else { return };
    let runtime = builder.open().unwrap();
    let mapped = Mapped::open(&runtime, &path).unwrap();
    for budget in [16, 4] {
        for page in 0..40 {
            is_the_files(&mapped, page * PAGE, 1);
        }
        ends("a smaller budget", || runtime.set_device_budget(Bytes::new(budget * PAGE)).unwrap());
        ends("a touch", || is_the_files(&mapped, 100 * PAGE, 100 * PAGE));
    }
    drop(mapped);
    runtime.close().unwrap();
}

/// Frames that lose their memory, here and there, split the mapping of all homes: a process has some ten thousands of
/// mappings only.
fn regression_frames_without_memory_are_no_mappings_of_their_own(by: Mechanism) {
    let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let folder = folder();
    let path = file(folder.path(), 600 * PAGE);
    let Some(builder) = builder(by, 512) else { return };
    let runtime = builder.open().unwrap();
    let mapped = Mapped::open(&runtime, &path).unwrap();
    is_the_files(&mapped, 0, 512 * PAGE);
    let (before, mut most, mut random) = (mappings(), 0, Rng::new(3));
    for budget in [300, 512, 300] {
        // Which frames go depends on the order of use.
        (0..400).for_each(|_| is_the_files(&mapped, random.below(600) * PAGE, 1));
        runtime.set_device_budget(Bytes::new(budget * PAGE)).unwrap();
        most = mappings().max(most);
    }
    is_the_files(&mapped, 0, 600 * PAGE);
    // Other tests map files beside this one.
    assert!(most < before + 100, "{before} mappings before, up to {most} after");
    drop(mapped);
    runtime.close().unwrap();
}

/// As above, of experts: whether they were told of or touched.
fn regression_a_budget_shrinks_below_the_experts_that_are_kept(by: Mechanism) {
    let folder = folder();
    let (path, place) = mixture(folder.path());
    for told in [true, false] {
        let Some(builder) = builder(by, 200) else { return };
        let runtime = builder.open().unwrap();
        let mapped = Mapped::open(&runtime, &path).unwrap();
        for expert in 0..EXPERTS {
            if told {
                mapped.expert_hint(1, &[expert as u32]).unwrap();
            }
            is_the_files(&mapped, place(1, expert, 0), PIECE);
        }
        ends("a smaller budget", || runtime.set_device_budget(Bytes::new(6 * PAGE)).unwrap());
        ends("a touch", || (0..EXPERTS).for_each(|expert| is_the_files(&mapped, place(2, expert, 0), PIECE)));
        drop(mapped);
        runtime.close().unwrap();
    }
}

fn regression_a_touch_after_the_runtime_is_closed_is_a_signal(by: Mechanism) {
    if builder(by, 4).is_some() {
        assert_eq!(signal_of(by, "child_touches_after_the_runtime_is_closed"), Some(libc::SIGBUS));
    }
}

#[test]
#[ignore = "the process of a test"]
fn child_touches_after_the_runtime_is_closed() {
    if !is_child("child_touches_after_the_runtime_is_closed") {
        return;
    }
    // SAFETY: plain: what does not end is another signal.
    unsafe { libc::alarm(30) };
    let folder = folder();
    let path = file(folder.path(), 20 * PAGE);
    let runtime = builder(mechanism_of_the_parent(), 8).unwrap().open().unwrap();
    let mapped = Mapped::open(&runtime, &path).unwrap();
    is_the_files(&mapped, 0, 2 * PAGE);
    runtime.close().unwrap();
    is_the_files(&mapped, 0, 20 * PAGE);
}

/// A header that calls each byte of a large tensor an expert took as many entries of a table.
fn regression_a_header_with_a_billion_experts_takes_no_memory(by: Mechanism) {
    let folder = folder();
    let experts = 1u64 << 27;
    let header = format!(
        r#"{{"blk.0.ffn_up_exps.weight":{{"dtype":"U8","shape":[{experts},1,1],"data_offsets":[0,{experts}]}}}}"#
    );
    let path = folder.path().join("sparse");
    let written = File::create(&path).unwrap();
    written.write_all_at(&(header.len() as u64).to_le_bytes(), 0).unwrap();
    written.write_all_at(header.as_bytes(), 8).unwrap();
    written.set_len(8 + header.len() as u64 + experts).unwrap();
    let Some(builder) = builder(by, 8) else { return };
    let runtime = builder.open().unwrap();
    let before = outcore::machine::ProcessMemory::now().unwrap().peak;
    let mapped = ends("to map a file", || Mapped::open(&runtime, &path).unwrap());
    let after = outcore::machine::ProcessMemory::now().unwrap().peak;
    assert!(after.get() - before.get() < 256 << 20, "{before} before, {after} after");
    assert!(mapped[mapped.len() - 1] == 0);
    drop(mapped);
    runtime.close().unwrap();
}

/// A child by `fork` has no thread that could answer.
fn regression_a_child_by_fork_drops_a_mapping(by: Mechanism) {
    let folder = folder();
    let path = file(folder.path(), 20 * PAGE);
    let Some(builder) = builder(by, 8) else { return };
    let runtime = builder.open().unwrap();
    let mapped = Mapped::open(&runtime, &path).unwrap();
    is_the_files(&mapped, 0, 20 * PAGE);
    let mut mapped = std::mem::ManuallyDrop::new(mapped);
    // SAFETY: the child only drops the mapping, and ends; what does not end is a signal.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above. The child's copy is dropped once.
        unsafe {
            libc::alarm(20);
            std::mem::ManuallyDrop::drop(&mut mapped);
            libc::_exit(0);
        }
    }
    let mut status = 0;
    // SAFETY: the child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status), "the child ended with signal {}", libc::WTERMSIG(status));
    is_the_files(&mapped, 0, 20 * PAGE);
    drop(std::mem::ManuallyDrop::into_inner(mapped));
    runtime.close().unwrap();
}

/// Whether the kernel has a page at this address, so that nobody meets a fault there.
fn is_visible(bytes: &[u8]) -> bool {
    let mut there = 0;
    let first = bytes.as_ptr().cast_mut().cast();
    // SAFETY: one page of the machine, and one byte for it.
    assert_eq!(unsafe { libc::mincore(first, 4096, &mut there) }, 0);
    there & 1 == 1
}

/// Where no order is known, pages are hidden behind their use, so that the next use is seen. A system call that is
/// given an address in a hidden page fails. What was copied is never hidden.
#[test]
fn regression_a_page_that_is_pinned_is_not_hidden() {
    let folder = folder();
    let path = file(folder.path(), 100 * PAGE);
    let Some(builder) = builder(Mechanism::Move, 80) else { return };
    let runtime = builder.lookahead(Lookahead::Bytes(Bytes::new(4 * PAGE))).open().unwrap();
    let mapped = Mapped::open(&runtime, &path).unwrap();
    let page = |at: u64| mapped.tensor().rows(at * PAGE..(at + 1) * PAGE).unwrap();
    is_the_files(&mapped, 3 * PAGE, 1);
    let third = page(3);
    let guard = runtime.pin(&third).wait().unwrap();
    // Many pages later the one behind the guard is not kept any more.
    (10..60).for_each(|at| is_the_files(&mapped, at * PAGE, 1));
    assert!(is_visible(&guard), "it was hidden, though it is pinned");
    assert!(!is_visible(&mapped[10 * PAGE as usize..]), "nothing is hidden here, so this test shows nothing");
    // Nor is a page that was filled ahead of its first pin.
    let ahead = page(80);
    runtime.prefetch(&ahead);
    until("a page that was hinted at", || runtime.observe().snapshot(&ahead).pages[80].tier() == Tier::Device);
    let other = runtime.pin(&ahead).wait().unwrap();
    assert!(is_visible(&other), "it was hidden, though it is pinned");
    drop((guard, other, third, ahead, mapped));
    runtime.close().unwrap();
}

/// Pins one page after the other for as long as there are frames.
fn all_that_can_be_had(runtime: &Runtime, pages: &[outcore::Tensor]) -> Vec<outcore::PinGuard> {
    pages.iter().map_while(|page| runtime.pin(page).wait_timeout(Duration::from_millis(300)).unwrap()).collect()
}

/// Guards of a program had all frames, and a touch of the same program waited for them.
fn regression_touches_end_though_guards_have_all_frames_that_they_can_have(by: Mechanism) {
    let folder = folder();
    let path = file(folder.path(), 100 * PAGE);
    for (frames, threads) in [(4, 1), (4, 5), (9, 3), (64, 16)] {
        let Some(builder) = builder(by, frames) else { return };
        let runtime = builder.open().unwrap();
        let mapped = Mapped::open(&runtime, &path).unwrap();
        let pages: Vec<_> = (0..100).map(|at| mapped.tensor().rows(at * PAGE..(at + 1) * PAGE).unwrap()).collect();
        let guards = all_that_can_be_had(&runtime, &pages);
        assert_eq!(guards.len() as u64, frames - 2, "all but those for touches");
        // Each thread needs two pages at once.
        let across = |n: u64| {
            for at in (70 + n % 3..99).rev() {
                let place = (at * PAGE) as usize - 4;
                let expected = u64::from_le_bytes(std::array::from_fn(|byte| self::byte((place + byte) as u64)));
                // SAFETY: eight bytes of the slice.
                let found = unsafe { mapped.as_ptr().add(place).cast::<u64>().read_unaligned() };
                assert_eq!(found, expected);
            }
        };
        let all = || thread::scope(|scope| (0..threads).for_each(|n| drop(scope.spawn(move || across(n)))));
        ends("touches beside guards", all);
        drop(guards);
        drop((pages, mapped));
        // Without a mapped file guards may have all.
        let own = runtime.alloc(outcore::DType::U8, &[frames, PAGE]).unwrap();
        drop(ends("a pin of all frames", || runtime.pin(&own).write().wait().unwrap()));
        drop(own);
        runtime.close().unwrap();
    }
}

/// A scope gets no more than the frames beside those that are kept for touches, and is told so at once.
fn a_scope_that_pins_what_is_mapped_leaves_touches_their_frames(by: Mechanism) {
    let folder = folder();
    let path = file(folder.path(), 20 * PAGE);
    let Some(builder) = builder(by, 8) else { return };
    let runtime = builder.open().unwrap();
    let mapped = Mapped::open(&runtime, &path).unwrap();
    let pages: Vec<_> = (0..20).map(|at| mapped.tensor().rows(at * PAGE..(at + 1) * PAGE).unwrap()).collect();
    let too_much = runtime.scope().reserve(Bytes::new(7 * PAGE)).wait().unwrap_err();
    assert_eq!(too_much.kind(), ErrorKind::BudgetTooSmall, "{too_much}");
    let scope = runtime.scope().open().unwrap();
    let mut guards = Vec::new();
    let told = loop {
        match runtime.pin(&pages[guards.len()]).in_scope(&scope).wait() {
            Ok(guard) => guards.push(guard),
            Err(error) => break error,
        }
    };
    assert_eq!((told.kind(), guards.len()), (ErrorKind::Busy, 6), "{told}");
    ends("touches beside a scope", || is_the_files(&mapped, 0, 20 * PAGE));
    drop(guards);
    ends("a pin in the scope", || drop(runtime.pin(&pages[19]).in_scope(&scope).wait().unwrap()));
    drop((scope, pages, mapped));
    runtime.close().unwrap();
}

/// Guards of whoever tells of experts had the frames that these need.
fn regression_to_tell_of_experts_beside_own_guards_ends(by: Mechanism) {
    let folder = folder();
    let (path, _) = mixture(folder.path());
    let Some(builder) = builder(by, 64) else { return };
    let runtime = builder.open().unwrap();
    let mapped = Mapped::open(&runtime, &path).unwrap();
    let pages: Vec<_> = (0..62).map(|at| mapped.tensor().rows(at * PAGE..(at + 1) * PAGE).unwrap()).collect();
    let guards = all_that_can_be_had(&runtime, &pages);
    assert_eq!(guards.len(), 62);
    let error = ends("to tell of an expert", || mapped.expert_hint(LAYERS as u32 - 1, &[7]).unwrap_err());
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    let text = error.to_string();
    assert!(text.contains("64 frames") && text.contains("let guards go"), "{text}");
    drop(guards);
    mapped.expert_hint(LAYERS as u32 - 1, &[7]).unwrap();
    drop((pages, mapped));
    runtime.close().unwrap();
}
