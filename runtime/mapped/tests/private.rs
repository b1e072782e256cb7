//! The promise: a file that is mapped to be written privately has the file's bytes and what was written over them,
//! however often its pages have left memory; nobody else sees what was written.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::thread;

use outcore::{Bytes, IoBackend, PageSize, PolicyKind, Runtime, RuntimeBuilder};
use outcore_mapped::{Faulting, Mapped, MappedMut, Mechanism};
use outcore_testkit::harness::{Rng, Scene, is_child, progress, scene_ended, until, watched};

const PAGE: u64 = 64 << 10;
const THREADS: u64 = 8;
/// Bytes that belong to one thread: each page has some of each.
const STRIPE: usize = 192;

/// Runs each of these where other pages are moved, and where they are copied.
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
    eight_threads_find_what_they_wrote_in_any_budget
    two_private_mappings_and_a_shared_one_do_not_see_each_other
    a_write_is_the_first_touch_of_a_page
    what_is_written_behind_the_end_of_the_file_stays
    what_the_kernel_writes_there_stays
    writers_of_one_page_all_get_their_turn
    large_pages_are_written_too
    a_private_mapping_that_is_dropped_leaves_nothing
    tensors_and_private_mappings_share_the_frames
    any_policy_may_decide
    a_write_after_the_runtime_is_closed_is_a_signal
    a_child_by_fork_drops_a_private_mapping
    a_page_is_in_memory_once
}

fn bytes(len: u64) -> Vec<u8> {
    (0..len).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

fn file(folder: &Path, len: u64) -> (PathBuf, Vec<u8>) {
    let (path, bytes) = (folder.join("file"), bytes(len));
    fs::write(&path, &bytes).unwrap();
    (path, bytes)
}

/// The builder, or `None` where the kernel cannot do that, which is said.
fn builder_of(by: Mechanism, page: u64, frames: u64) -> Option<RuntimeBuilder> {
    match Faulting::with_mechanism(by) {
        Ok(device) if device.maps_private() => Some(
            Runtime::builder()
                .device(device)
                .page_size(PageSize::new(Bytes::new(page)).unwrap())
                .device_budget(Bytes::new(frames * page))
                .scratch_dir(env!("CARGO_TARGET_TMPDIR")),
        ),
        Ok(_) => {
            eprintln!("SKIPPED: userfaultfd does not tell of writes here");
            None
        }
        Err(error) => {
            eprintln!("SKIPPED: {error}");
            None
        }
    }
}

fn builder(by: Mechanism, frames: u64) -> Option<RuntimeBuilder> {
    builder_of(by, PAGE, frames)
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// The bytes of a mapping, for threads that each have bytes of their own.
#[derive(Clone, Copy)]
struct Raw(*mut u8, usize);

// SAFETY: each thread reads and writes bytes that no other thread does, and all end before the mapping does.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl Raw {
    fn of(mapped: &mut MappedMut) -> Self {
        Self(mapped.as_mut_ptr(), mapped.len())
    }

    fn read(self, start: usize, len: usize) -> Vec<u8> {
        assert!(start + len <= self.1);
        // SAFETY: within the mapping; as above.
        unsafe { std::slice::from_raw_parts(self.0.add(start), len) }.to_vec()
    }

    fn write(self, start: usize, bytes: &[u8]) {
        assert!(start + bytes.len() <= self.1);
        // SAFETY: within the mapping; as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.add(start), bytes.len()) }
    }
}

/// Has eight threads read and write their stripes in random places. Each compares with what it knows, which is put
/// into `known` at the end.
fn hammer(raw: Raw, known: &mut [u8], rounds: u64, seed: u64) {
    let before = &*known;
    let after: Vec<Vec<u8>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|n| {
                scope.spawn(move || {
                    let (mut random, mut own) = (Rng::new(seed * THREADS + n), before.to_vec());
                    let stripes = own.len().div_ceil(STRIPE) as u64;
                    let mut at = random.below(stripes);
                    for round in 0..rounds {
                        at = match n % 4 {
                            0 => (at + PAGE / STRIPE as u64 + 1) % stripes,
                            _ => random.below(stripes),
                        };
                        let stripe = (at - at % THREADS + n).min(stripes - 1);
                        if stripe % THREADS != n {
                            continue;
                        }
                        let start = stripe as usize * STRIPE;
                        let end = (start + STRIPE).min(own.len());
                        assert!(raw.read(start, end - start) == own[start..end], "thread {n}, round {round}: {start}");
                        if random.below(3) > 0 {
                            own[start..end].fill((round + n) as u8);
                            own[start] = n as u8;
                            raw.write(start, &own[start..end]);
                        }
                        progress();
                    }
                    own
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (at, stripe) in known.chunks_mut(STRIPE).enumerate() {
        let (own, start) = (&after[at % THREADS as usize], at * STRIPE);
        stripe.copy_from_slice(&own[start..start + stripe.len()]);
    }
}

fn eight_threads_find_what_they_wrote_in_any_budget(by: Mechanism) {
    watched("writers", move || {
        let folder = folder();
        let (path, original) = file(folder.path(), 40 * PAGE + 77);
        for frames in [4, 5, 8, 20, 48] {
            let Some(builder) = builder(by, frames) else { return };
            let runtime = builder.open().unwrap();
            let mut mapped = MappedMut::open(&runtime, &path).unwrap();
            assert_eq!(mapped.written().parts().count(), 0);
            let mut known = original.clone();
            for round in 0..3 {
                hammer(Raw::of(&mut mapped), &mut known, 150, frames + round);
                assert!(mapped[..] == known[..], "{frames} frames, round {round}");
            }
            let stats = runtime.stats();
            assert!(stats.traffic.peak_device <= Bytes::new(frames * PAGE), "{stats:?}");
            assert_eq!(stats.pager.write_backs > 0, frames < 41, "{frames}: {stats:?}");
            assert!(mapped.written().parts().count() > 0 && mapped.failure().is_none());
            drop(mapped);
            runtime.close().unwrap();
            assert!(fs::read(&path).unwrap() == original, "the file was written");
        }
    });
}

fn two_private_mappings_and_a_shared_one_do_not_see_each_other(by: Mechanism) {
    watched("two mappings", move || {
        let folder = folder();
        let (path, original) = file(folder.path(), 30 * PAGE + 5);
        let Some(builder) = builder(by, 9) else { return };
        let runtime = builder.open().unwrap();
        let shared = Mapped::open(&runtime, &path).unwrap();
        let mut copies = [0, 1].map(|_| (MappedMut::open(&runtime, &path).unwrap(), original.clone()));
        for round in 0..3 {
            for (seed, (mapped, known)) in (2 * round..).zip(&mut copies) {
                hammer(Raw::of(mapped), known, 60, seed);
            }
            assert!(shared[..] == original[..], "round {round}");
            for (mapped, known) in &copies {
                assert!(mapped[..] == known[..], "round {round}");
            }
        }
        assert!(copies[0].1 != copies[1].1);
        drop((shared, copies));
        runtime.close().unwrap();
        assert!(fs::read(&path).unwrap() == original);
    });
}

fn a_write_is_the_first_touch_of_a_page(by: Mechanism) {
    let folder = folder();
    let (path, mut known) = file(folder.path(), 20 * PAGE);
    let Some(builder) = builder(by, 6) else { return };
    let runtime = builder.open().unwrap();
    let mut mapped = MappedMut::open(&runtime, &path).unwrap();
    // One byte of each page, and then a value across each boundary.
    for page in 0..20 {
        let at = (page * PAGE + 100) as usize;
        (mapped[at], known[at]) = (page as u8, page as u8);
    }
    for page in 1..20 {
        let at = (page * PAGE - 4) as usize;
        let value = 0x0102_0304_0506_0708_u64 * page;
        // SAFETY: within the mapping; any address will do.
        unsafe { mapped.as_mut_ptr().add(at).cast::<u64>().write_unaligned(value) };
        known[at..at + 8].copy_from_slice(&value.to_ne_bytes());
    }
    for _ in 0..3 {
        assert!(mapped[..] == known[..]);
    }
    // What is only read is never written back.
    let before = runtime.stats().pager.write_backs;
    assert!(mapped[..] == known[..] && before >= 20 - 6);
    drop(mapped);
    runtime.close().unwrap();
}

/// As of a mapping of the kernel: the last page is whole, and begins as zeros behind the end.
fn what_is_written_behind_the_end_of_the_file_stays(by: Mechanism) {
    let folder = folder();
    let (path, original) = file(folder.path(), 12 * PAGE + 100);
    let Some(builder) = builder(by, 4) else { return };
    let runtime = builder.open().unwrap();
    let mut mapped = MappedMut::open(&runtime, &path).unwrap();
    let behind = |mapped: &mut MappedMut| mapped.as_mut_ptr().wrapping_add(original.len());
    for round in 0..3u8 {
        // Every frame has held other bytes.
        mapped[..12 * PAGE as usize].fill(round + 1);
        for at in 0..PAGE as usize - 100 {
            // SAFETY: the rest of the last page, which the range has.
            let found = unsafe { behind(&mut mapped).add(at).read_volatile() };
            assert_eq!(found, if at == 7 { round } else { 0 }, "{at} bytes behind the end, round {round}");
        }
        // SAFETY: as above.
        unsafe { behind(&mut mapped).add(7).write_volatile(round + 1) };
        assert!(mapped[12 * PAGE as usize..] == original[12 * PAGE as usize..]);
    }
    drop(mapped);
    runtime.close().unwrap();
    assert!(fs::read(&path).unwrap() == original);
}

/// Where the process may handle the kernel's faults, as root may.
fn what_the_kernel_writes_there_stays(by: Mechanism) {
    use std::io::Read;
    let folder = folder();
    let (path, mut known) = file(folder.path(), 20 * PAGE);
    let Some(builder) = builder(by, 6) else { return };
    let runtime = builder.open().unwrap();
    let mut mapped = MappedMut::open(&runtime, &path).unwrap();
    for turn in 0..3 {
        let mut file = fs::File::open(&path).unwrap();
        let start = (turn * 3 * PAGE + 77) as usize;
        let end = start + 5 * PAGE as usize;
        match file.read_exact(&mut mapped[start..end]) {
            Ok(()) => known[start..end].copy_from_slice(&bytes(5 * PAGE)),
            Err(cause) if cause.raw_os_error() == Some(libc::EFAULT) => {
                return eprintln!("SKIPPED: this process may not handle the kernel's faults");
            }
            Err(cause) => panic!("{cause}"),
        }
        assert!(mapped[..] == known[..], "turn {turn}");
    }
    assert!(mapped[..] == known[..]);
    drop(mapped);
    runtime.close().unwrap();
}

/// All threads write the same few pages, which are written back as fast as they are written.
fn writers_of_one_page_all_get_their_turn(by: Mechanism) {
    watched("writers of one page", move || {
        let folder = folder();
        let (path, original) = file(folder.path(), 6 * PAGE);
        let Some(builder) = builder(by, 4) else { return };
        let runtime = builder.open().unwrap();
        let mut mapped = MappedMut::open(&runtime, &path).unwrap();
        let raw = Raw::of(&mut mapped);
        thread::scope(|scope| {
            for n in 0..THREADS {
                scope.spawn(move || {
                    for round in 0..300u64 {
                        let at = (round % 6 * PAGE + n * 8) as usize;
                        let before = if round < 6 { original_at(at) } else { (round - 6).to_ne_bytes().to_vec() };
                        assert!(raw.read(at, 8) == before, "thread {n}, round {round}");
                        raw.write(at, &round.to_ne_bytes());
                        progress();
                    }
                });
            }
            let runtime = &runtime;
            scope.spawn(move || {
                for _ in 0..200 {
                    runtime.trim(Bytes::new(3 * PAGE));
                    progress();
                }
            });
        });
        for n in 0..THREADS {
            for page in 0..6 {
                let at = (page * PAGE + n * 8) as usize;
                assert_eq!(mapped[at..at + 8], (294 + page).to_ne_bytes());
            }
        }
        assert!(mapped[100..PAGE as usize] == original[100..PAGE as usize]);
        drop(mapped);
        runtime.close().unwrap();
    });
}

fn original_at(at: usize) -> Vec<u8> {
    (at..at + 8).map(|at| ((at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

fn large_pages_are_written_too(by: Mechanism) {
    watched("large pages", move || {
        let folder = folder();
        let page = 2 << 20;
        let (path, mut known) = file(folder.path(), 9 * page + 12_345);
        let Some(builder) = builder_of(by, page, 4) else { return };
        let runtime = builder.open().unwrap();
        let mut mapped = MappedMut::open(&runtime, &path).unwrap();
        hammer(Raw::of(&mut mapped), &mut known, 40, 1);
        for _ in 0..2 {
            assert!(mapped[..] == known[..]);
        }
        assert!(runtime.stats().traffic.peak_device <= Bytes::new(4 * page));
        drop(mapped);
        runtime.close().unwrap();
    });
}

fn a_private_mapping_that_is_dropped_leaves_nothing(by: Mechanism) {
    let folder = folder();
    let (path, original) = file(folder.path(), 20 * PAGE);
    let Some(builder) = builder(by, 8) else { return };
    let runtime = builder.open().unwrap();
    for round in 0..10 {
        let mut mapped = MappedMut::open(&runtime, &path).unwrap();
        assert!(mapped[..] == original[..], "round {round} finds what was written before");
        mapped.fill(round);
        assert!(mapped.iter().all(|byte| *byte == round));
    }
    // Write backs that are still going on have theirs until they end.
    until("giving the frames back", || runtime.stats().device_frames.used == 0);
    until("giving the room back", || runtime.stats().scratch.is_some_and(|scratch| scratch.free == scratch.size));
    runtime.close().unwrap();
}

fn tensors_and_private_mappings_share_the_frames(by: Mechanism) {
    watched("tensors beside a private mapping", move || {
        let folder = folder();
        let (path, mut known) = file(folder.path(), 30 * PAGE);
        let Some(builder) = builder(by, 12) else { return };
        let runtime = builder.open().unwrap();
        let own = runtime.alloc(outcore::DType::U8, &[20, PAGE]).unwrap();
        let mut mapped = MappedMut::open(&runtime, &path).unwrap();
        for round in 0..3u8 {
            for row in 0..20 {
                let part = own.rows(row..row + 1).unwrap();
                let mut guard = runtime.pin(&part).write().wait().unwrap();
                let before = if round == 0 { 0 } else { row as u8 + round };
                assert!(guard.bytes().iter().all(|byte| *byte == before), "row {row}, round {round}");
                guard.bytes_mut().fill(row as u8 + round + 1);
            }
            hammer(Raw::of(&mut mapped), &mut known, 60, u64::from(round));
        }
        assert!(mapped[..] == known[..]);
        drop((mapped, own));
        runtime.close().unwrap();
    });
}

fn any_policy_may_decide(by: Mechanism) {
    watched("any policy", move || {
        let folder = folder();
        let (path, original) = file(folder.path(), 30 * PAGE);
        for policy in PolicyKind::ALL {
            let Some(builder) = builder(by, 10) else { return };
            let runtime = builder.policy(policy).open().unwrap();
            let (mut mapped, mut known) = (MappedMut::open(&runtime, &path).unwrap(), original.clone());
            hammer(Raw::of(&mut mapped), &mut known, 40, 3);
            assert!(mapped[..] == known[..], "{policy:?}");
            drop(mapped);
            runtime.close().unwrap();
        }
    });
}

#[test]
fn an_open_file_is_mapped_privately_without_a_runtime() {
    if !Faulting::new().is_ok_and(|device| device.maps_private()) {
        return eprintln!("SKIPPED: userfaultfd does not tell of writes here");
    }
    let folder = folder();
    let (path, original) = file(folder.path(), 3 * PAGE + 1);
    let mut mapped = MappedMut::map(&fs::File::open(&path).unwrap()).unwrap();
    assert!(mapped[..] == original[..]);
    mapped[3 * PAGE as usize] = !original[3 * PAGE as usize];
    assert!(mapped[..] != original[..] && fs::read(&path).unwrap() == original);
}

const MECHANISM: &str = "OUTCORE_TEST_MECHANISM";

fn mechanism_of_the_parent() -> Mechanism {
    let name = std::env::var(MECHANISM).unwrap();
    [Mechanism::Move, Mechanism::Copy].into_iter().find(|mechanism| mechanism.to_string() == name).unwrap()
}

fn a_write_after_the_runtime_is_closed_is_a_signal(by: Mechanism) {
    if builder(by, 4).is_some() {
        let child = "child_writes_after_the_runtime_is_closed";
        let ended = Scene::of(child).tell(MECHANISM, by.to_string()).run();
        assert_eq!(ended.status.signal(), Some(libc::SIGBUS), "{}", ended.text);
    }
}

#[test]
#[ignore = "the process of a test"]
fn child_writes_after_the_runtime_is_closed() {
    if !is_child("child_writes_after_the_runtime_is_closed") {
        return;
    }
    // SAFETY: plain: what does not end is another signal.
    unsafe { libc::alarm(30) };
    let folder = folder();
    let (path, original) = file(folder.path(), 20 * PAGE);
    let runtime = builder(mechanism_of_the_parent(), 8).unwrap().open().unwrap();
    let mut mapped = MappedMut::open(&runtime, &path).unwrap();
    // It is there, and protected.
    assert!(mapped[..PAGE as usize] == original[..PAGE as usize]);
    runtime.close().unwrap();
    // What is there can be written, and stays: no page goes any more.
    mapped[0] = !original[0];
    assert!(mapped[0] != original[0] && mapped[1..PAGE as usize] == original[1..PAGE as usize]);
    for page in 0..20 {
        mapped[(page * PAGE) as usize] = 1;
    }
    panic!("a page was written that nobody could bring");
}

fn a_child_by_fork_drops_a_private_mapping(by: Mechanism) {
    let folder = folder();
    let (path, _) = file(folder.path(), 20 * PAGE);
    let Some(builder) = builder(by, 8) else { return };
    let runtime = builder.open().unwrap();
    let mut mapped = MappedMut::open(&runtime, &path).unwrap();
    mapped.fill(7);
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
    assert!(mapped.iter().all(|byte| *byte == 7));
    drop(std::mem::ManuallyDrop::into_inner(mapped));
    runtime.close().unwrap();
}

fn a_page_is_in_memory_once(by: Mechanism) {
    if builder(by, 4).is_some() {
        let ended = Scene::of("child_measures_its_memory").tell(MECHANISM, by.to_string()).run();
        ended.well("the memory of a process");
    }
}

#[test]
#[ignore = "the process of a test"]
fn child_measures_its_memory() {
    if !is_child("child_measures_its_memory") {
        return;
    }
    const BUDGET: u64 = 24 << 20;
    let folder = folder();
    let path = folder.path().join("file");
    let file = fs::File::create(&path).unwrap();
    file.set_len(96 << 20).unwrap();
    let resident = || outcore::machine::ProcessMemory::now().unwrap().resident.get();
    for page in [PAGE, 2 << 20] {
        let before = resident();
        let runtime = builder_of(mechanism_of_the_parent(), page, BUDGET / page).unwrap().open().unwrap();
        let (shared, mut private) = (Mapped::open(&runtime, &path).unwrap(), MappedMut::open(&runtime, &path).unwrap());
        let mut most = 0;
        for round in 0..2u8 {
            for at in (0..96 << 20).step_by(page as usize) {
                assert_eq!((shared[at], private[at]), (0, round));
                private[at] = round + 1;
                most = most.max(resident());
            }
        }
        // A page that is being copied, and what threads and tables take.
        let more = most.saturating_sub(before + BUDGET);
        assert!(more <= page + (7 << 20), "{page}: {more} more than the budget");
        assert!(most >= before + BUDGET / 2, "{page}: {most} says nothing");
        drop((shared, private));
        runtime.close().unwrap();
    }
    scene_ended();
}

/// What a page would have that the disk did not take is never taken for its bytes.
#[test]
fn a_full_scratch_disk_is_a_signal_with_a_reason_and_never_other_bytes() {
    if builder(Mechanism::Copy, 4).is_none() {
        return;
    }
    for kind in ["tmpfs", "ext4"] {
        let child = "child_writes_more_than_the_disk_takes";
        let ended = Scene::of(child).by("scripts/small_fs_run.sh", &[kind, "16"]).run();
        ended.well_or_skipped(&format!("{child} on {kind}"));
    }
}

extern "C" fn at_the_signal(_: libc::c_int) {
    // The thread touched a page whose bytes are lost: the scene ends as it should, if the reason was said before.
    let told = TOLD.load(std::sync::atomic::Ordering::SeqCst);
    if told {
        let text = "the child ran\n";
        // SAFETY: a buffer of that length.
        unsafe { libc::write(1, text.as_ptr().cast(), text.len()) };
    }
    // SAFETY: plain.
    unsafe { libc::_exit(if told { 0 } else { 1 }) };
}

static TOLD: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

#[test]
fn child_writes_more_than_the_disk_takes() {
    let Some(dir) = std::env::var_os("OUTCORE_SMALL_FS") else { return };
    // SAFETY: plain: what does not end is a signal; the handler calls what a handler may call.
    unsafe {
        libc::alarm(120);
        libc::signal(libc::SIGBUS, at_the_signal as *const () as libc::sighandler_t);
    }
    let folder = folder();
    let (path, original) = file(folder.path(), 640 * PAGE);
    let builder = builder(Mechanism::Move, 8).or_else(|| builder(Mechanism::Copy, 8)).unwrap();
    let runtime = builder.scratch_dir(dir).io(IoBackend::Buffered).open().unwrap();
    // The file is larger than the disk: what is not written takes no room.
    let mut mapped = MappedMut::open(&runtime, &path).unwrap();
    mapped.on_failure(|error| {
        let text = error.to_string();
        let cause = std::error::Error::source(error).map(ToString::to_string).unwrap_or_default();
        eprintln!("told: {text}: {cause}");
        TOLD.store((text + &cause).contains("could not be written back"), std::sync::atomic::Ordering::SeqCst);
    });
    // As much as fits is right.
    mapped[..100 * PAGE as usize].fill(1);
    assert!(mapped[..100 * PAGE as usize].iter().all(|byte| *byte == 1));
    assert!(mapped[100 * PAGE as usize..] == original[100 * PAGE as usize..]);
    for page in 100..640 {
        mapped[(page * PAGE) as usize] = page as u8;
    }
    for page in 100..640 {
        assert_eq!(mapped[(page * PAGE) as usize], page as u8, "page {page} has other bytes");
    }
    scene_ended();
    panic!("the disk took more than it has");
}
