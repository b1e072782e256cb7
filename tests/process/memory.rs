//! The promise: a process that streams takes at most its budgets, 64 bytes a page, and 32 MiB. O_DIRECT leaves the page
//! cache alone. A process can stream a model four times as large as its cgroup's limit.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

use harness::{Migrates, Scene, alone, scene_ended, whole_name};
use outcore::device::{Completion, Completions, Device, FrameId, Host};
use outcore::machine::{HugePages, LimitSource, Machine, MemoryLimit};
use outcore::store::{ScratchAllocation, StoreOptions};
use outcore::testing::{CallHook, HostDevice, HostDeviceConfig, Injected, IoCall, IoKind};
use outcore::{Bytes, DType, Error, ErrorKind, IoBackend, Lookahead, PageSize, Runtime, RuntimeBuilder, Tensor};
use outcore_testkit::harness;
use outcore_testkit::hooked::{DeviceCall, DeviceHook, Hooked};

use rustix::process::{Resource, Rlimit, setrlimit};

const MODEL: u64 = 256 << 20;
const DEVICE: u64 = 24 << 20;
const HOST: u64 = 16 << 20;
const PAGE: u64 = 256 << 10;
/// The cgroup's limit is a quarter of the model.
const LIMIT: u64 = MODEL / 4;

/// A model that is written in pieces, so that neither the test nor its children ever hold it.
fn model(dir: &Path) -> PathBuf {
    let path = dir.join("large.safetensors");
    let header = format!("{{\"w\":{{\"dtype\":\"U8\",\"shape\":[256,{}],\"data_offsets\":[0,{MODEL}]}}}}", MODEL / 256);
    let header = format!("{header:<width$}", width = header.len().next_multiple_of(8));
    let mut file = File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    for row in 0..256u64 {
        file.write_all(&vec![row as u8; (MODEL / 256) as usize]).unwrap();
    }
    file.sync_all().unwrap();
    path
}

/// A field of /proc/self/status, in bytes.
fn status(field: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// How much of a file the page cache holds.
fn cached(path: &Path) -> u64 {
    use std::os::fd::AsRawFd;
    let file = File::open(path).unwrap();
    let len = file.metadata().unwrap().len() as usize;
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory; it is never read.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    assert_ne!(at, libc::MAP_FAILED);
    let mut pages = vec![0u8; len.div_ceil(4096)];
    // SAFETY: the range is mapped, and `pages` has a byte for each of its pages.
    assert_eq!(unsafe { libc::mincore(at, len, pages.as_mut_ptr()) }, 0);
    // SAFETY: the mapping is this function's.
    unsafe { libc::munmap(at, len) };
    pages.iter().filter(|page| **page & 1 != 0).count() as u64 * 4096
}

/// Run by the tests below, in a process of its own.
#[test]
fn child_streams_a_large_model() {
    let Ok(io) = std::env::var("OUTCORE_CHILD_IO") else { return };
    let path = PathBuf::from(std::env::var_os("OUTCORE_CHILD_MODEL").unwrap());
    let io: IoBackend = io.parse().unwrap();
    let before = status("VmRSS:");
    let runtime = Runtime::builder()
        .page_size(PageSize::new(Bytes::new(PAGE)).unwrap())
        .device_budget(Bytes::new(DEVICE))
        .host_budget(Bytes::new(HOST))
        .io(io)
        .scratch_dir(path.parent().unwrap())
        .open()
        .unwrap();
    let tensor = runtime.open_model(&path).unwrap().tensor("w").unwrap();
    let table = runtime.alloc(DType::U8, &[256, MODEL / 1024]).unwrap();
    let cached_before = cached(&path);
    for pass in 0..2u8 {
        for row in 0..256u64 {
            let guard = runtime.pin(&tensor.rows(row..row + 1).unwrap()).wait().unwrap();
            assert!(guard.iter().all(|byte| *byte == row as u8), "row {row}");
            drop(guard);
            let mut guard = runtime.pin(&table.rows(row..row + 1).unwrap()).write().wait().unwrap();
            let expected = if pass == 0 { 0 } else { row as u8 };
            assert!(guard.bytes().iter().all(|byte| *byte == expected), "table row {row}");
            guard.bytes_mut().fill(row as u8);
        }
    }
    let pages = (MODEL + MODEL / 4) / PAGE;
    let allowed = before + DEVICE + HOST + 64 * pages + (32 << 20);
    let (peak, budgets) = (status("VmHWM:"), DEVICE + HOST);
    println!("peak {peak} of {allowed} allowed, {before} before, budgets {budgets}");
    assert!(peak <= allowed, "the process held {peak} bytes, {allowed} are allowed");
    let grown = cached(&path).saturating_sub(cached_before);
    println!("page cache grew by {grown}");
    if io != IoBackend::Buffered {
        assert_eq!(grown, 0, "{io} reads through the page cache");
    }
    drop((tensor, table));
    runtime.close().unwrap();
    scene_ended();
}

fn streams(io: IoBackend, path: &Path) -> Scene {
    let child = Scene::of("child_streams_a_large_model");
    child.tell("OUTCORE_CHILD_IO", io.to_string()).tell("OUTCORE_CHILD_MODEL", path)
}

#[test]
fn a_process_holds_what_it_was_given_and_little_more() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(dir.path());
    for io in IoBackend::CHOICES {
        let text = streams(io, &path).run().well(&io.to_string());
        let shown = text.lines().filter(|line| line.starts_with("peak") || line.starts_with("page cache"));
        eprintln!("{io}: {}", shown.collect::<Vec<_>>().join("; "));
    }
}

#[test]
fn a_model_four_times_the_cgroups_limit_streams() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(dir.path());
    for io in IoBackend::CHOICES {
        let child = streams(io, &path).by("scripts/cgroup_run.sh", &[&LIMIT.to_string()]);
        let Some(text) = child.run().well_or_skipped(&format!("a small cgroup on {io}")) else { return };
        eprintln!("{io}: {}", text.lines().find(|line| line.starts_with("cgroup_run:")).unwrap());
    }
}

/// A runtime keeps its scratch file on a disk unless it is told to keep it in memory, and its statistics say where the
/// file is.
#[test]
fn scratch_is_on_a_disk_unless_memory_is_asked_for() {
    let builder = || Runtime::builder().device_budget(Bytes::mib(8));
    let runtime = builder().open().unwrap();
    assert_eq!(runtime.stats().scratch, None);
    let tensor = runtime.alloc(DType::U8, &[1 << 20]).unwrap();
    let scratch = runtime.stats().scratch.unwrap();
    assert!(!scratch.in_memory && scratch.size >= Bytes::mib(1), "{scratch:?}");
    drop(tensor);
    let after = runtime.stats().scratch.unwrap();
    assert_eq!(after.free, after.size, "what the tensor had is free");
    runtime.close().unwrap();
    let asked = builder().scratch_dir("/dev/shm").open().unwrap();
    match asked.alloc(DType::U8, &[1 << 20]) {
        Ok(_tensor) => {
            let scratch = asked.stats().scratch.unwrap();
            assert_eq!(scratch.folder, Path::new("/dev/shm"));
            assert!(scratch.in_memory, "{scratch:?}");
        }
        Err(error) => eprintln!("SKIPPED /dev/shm: {error}"),
    }
    asked.close().unwrap();
}

/// When a file would exceed the limit on the size of files, the kernel ends the process by a signal.
#[test]
fn regression_an_allocation_beyond_the_limit_on_files_is_an_error() {
    alone("regression_an_allocation_beyond_the_limit_on_files_is_an_error", || {
        const LIMIT: u64 = 2 << 20;
        setrlimit(Resource::Fsize, Rlimit { current: Some(LIMIT), maximum: Some(LIMIT) }).unwrap();
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        for when in [ScratchAllocation::AtAlloc, ScratchAllocation::AtWriteBack] {
            for named in [true, false] {
                let builder = Runtime::builder().device_budget(Bytes::mib(1)).scratch_allocation(when);
                let builder = builder.page_size(PageSize::new(Bytes::new(PAGE)).unwrap());
                let runtime = if named { builder.scratch_dir(folder.path()) } else { builder }.open().unwrap();
                let refused = |bytes: u64| {
                    let error = runtime.alloc(DType::U8, &[bytes]).unwrap_err();
                    let text = error.to_string();
                    assert_eq!(error.kind(), ErrorKind::DiskFull, "{text}");
                    assert!(text.contains("2.0 MiB (ulimit -f)"), "{text}");
                    assert!(error.advice().is_some_and(|advice| advice.contains("raise that limit")), "{error:?}");
                };
                refused(16 << 20);
                // As much as the limit allows can be allocated, written and written back.
                let tensor = runtime.alloc(DType::U8, &[LIMIT]).unwrap();
                refused(1);
                for row in 0..8 {
                    runtime
                        .pin(&tensor.rows(row * PAGE..(row + 1) * PAGE).unwrap())
                        .write()
                        .wait()
                        .unwrap()
                        .bytes_mut()
                        .fill(7);
                }
                drop(tensor);
                drop(runtime.alloc(DType::U8, &[1]).unwrap());
                runtime.close().unwrap();
            }
        }
    });
}

/// A scratch budget is exact, on a disk as in memory, and what tensors give back may be taken again.
#[test]
fn a_scratch_budget_is_not_exceeded() {
    for folder in [Path::new(env!("CARGO_TARGET_TMPDIR")), Path::new("/dev/shm")] {
        let runtime = Runtime::builder()
            .page_size(PageSize::new(Bytes::new(PAGE)).unwrap())
            .device_budget(Bytes::mib(4))
            .host_budget(Bytes::mib(2))
            .scratch_dir(folder)
            .scratch_budget(Bytes::mib(8))
            .open()
            .unwrap();
        // Whole pages count.
        let first = match runtime.alloc(DType::U8, &[(6 << 20) - 1]) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                eprintln!("SKIPPED {}: {error}", folder.display());
                continue;
            }
            other => other.unwrap(),
        };
        let error = runtime.alloc(DType::U8, &[(2 << 20) + 1]).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::BudgetTooSmall, "{text}");
        assert!(text.contains("8.0 MiB") && text.contains("6.0 MiB") && text.contains("2.2 MiB"), "{text}");
        assert!(error.advice().is_some() && text.contains(folder.to_str().unwrap()), "{text}");
        let second = runtime.alloc(DType::U8, &[2 << 20]).unwrap();
        let stats = runtime.stats();
        let in_memory = stats.scratch.unwrap().in_memory;
        let scratch = if in_memory { Bytes::mib(8) } else { Bytes::ZERO };
        assert_eq!(
            (stats.memory.device, stats.memory.host, stats.memory.scratch),
            (Bytes::mib(4), Bytes::mib(2), scratch)
        );
        // A table of 4 KiB for each frame of the device tier, and for each 2 MiB of the host tier.
        assert_eq!(stats.memory.page_tables, Bytes::kib(4 * ((4 << 20) / PAGE + 1)));
        let sum = Bytes::mib(6) + stats.memory.staging + scratch + stats.memory.page_tables;
        assert_eq!(stats.memory.total(), sum);
        drop(first);
        let third = runtime.alloc(DType::U8, &[6 << 20]).unwrap();
        drop((second, third));
        assert_eq!(runtime.stats().memory.scratch, Bytes::ZERO);
        runtime.close().unwrap();
    }
}

/// Scratch in memory counts together with the budgets. Their sum may not exceed what the process may use.
#[test]
fn scratch_in_memory_is_refused_what_the_process_may_not_use() {
    let limit = MemoryLimit::detect().unwrap().limit;
    let runtime = Runtime::builder()
        .device_budget(Bytes::mib(64))
        .scratch_dir("/dev/shm")
        // So an allocation alone takes no memory.
        .scratch_allocation(ScratchAllocation::AtWriteBack)
        .open()
        .unwrap();
    match runtime.alloc(DType::U8, &[1]).map(|_| runtime.stats().scratch.unwrap().in_memory) {
        Ok(true) => {}
        other => return eprintln!("SKIPPED: /dev/shm is no folder in memory here: {other:?}"),
    }
    let largest = limit.get() - (64 << 20);
    let error = runtime.alloc(DType::U8, &[largest + 1]).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{text}");
    let named = [limit.to_string(), "64.0 MiB".into(), "/dev/shm".into()];
    assert!(named.iter().all(|part| text.contains(part)) && error.advice().is_some(), "{text}");
    let half = runtime.alloc(DType::U8, &[largest / 2]).unwrap();
    assert_eq!(runtime.alloc(DType::U8, &[largest / 2 + (4 << 20)]).unwrap_err().kind(), ErrorKind::OutOfMemory);
    drop(half);
    runtime.alloc(DType::U8, &[largest / 2 + (4 << 20)]).unwrap();
    runtime.close().unwrap();
}

/// When a budget was raised, scratch that was in memory already was not counted with it.
#[test]
fn regression_a_larger_budget_counts_with_scratch_in_memory() {
    let limit = MemoryLimit::detect().unwrap().limit;
    // Large pages, so that no limit on mappings is in the way.
    let runtime = Runtime::builder()
        .page_size(PageSize::new(Bytes::mib(16)).unwrap())
        .device_budget(Bytes::mib(64))
        .scratch_dir("/dev/shm")
        .scratch_allocation(ScratchAllocation::AtWriteBack)
        .open()
        .unwrap();
    let half = Bytes::new(limit.get() / 2);
    let Ok(tensor) = runtime.alloc(DType::U8, &[half.get()]) else {
        return eprintln!("SKIPPED: /dev/shm takes no {half}");
    };
    if !runtime.stats().scratch.unwrap().in_memory {
        return eprintln!("SKIPPED: /dev/shm is no folder in memory here");
    }
    let larger = half + Bytes::mib(64);
    let error = runtime.set_device_budget(larger).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{text}");
    let named = [limit.to_string(), larger.to_string(), "/dev/shm".into()];
    assert!(named.iter().all(|part| text.contains(part)) && error.advice().is_some(), "{text}");
    // The budget is unchanged, and the refused one does not count.
    assert_eq!(runtime.stats().device.budget, Bytes::mib(64));
    runtime.alloc(DType::U8, &[half.get() - (256 << 20)]).unwrap();
    // A larger budget that fits is accepted, and so is a smaller one.
    runtime.set_device_budget(Bytes::mib(128)).unwrap();
    runtime.set_device_budget(Bytes::mib(32)).unwrap();
    drop(tensor);
    runtime.set_device_budget(larger).unwrap();
    assert!(runtime.stats().device.budget > Bytes::new(half.get() / 2));
    runtime.close().unwrap();
}

/// The memory that the kernel counts for this process's anonymous mappings. Mappings of files, such as its own code,
/// are left out.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = text.lines().find(|line| line.starts_with("Anonymous:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Memory that a call may take or give back besides frames, of which this test knows nothing.
const TOLERANCE: u64 = 64 * 4096;

fn trimmed(runtime: &Runtime, bytes: Bytes) -> u64 {
    let before = resident();
    let given = runtime.trim(bytes).get();
    let gone = before.saturating_sub(resident());
    assert!(gone.abs_diff(given) <= TOLERANCE, "{given} were given back, and {gone} are gone: {:?}", runtime.stats());
    given
}

/// Run by the test below, in a process of its own.
#[test]
fn child_trims() {
    let Ok(page) = std::env::var("OUTCORE_CHILD_PAGE") else { return };
    let page: u64 = page.parse().unwrap();
    let (device, host) = (64 << 20, 32 << 20);
    let opened = resident();
    let runtime = Runtime::builder()
        .page_size(PageSize::new(Bytes::new(page)).unwrap())
        .device_budget(Bytes::new(device))
        .host_budget(Bytes::new(host))
        .scratch_dir(env!("CARGO_TARGET_TMPDIR"))
        // Pages that are filled ahead would take memory again.
        .lookahead(Lookahead::Off)
        .open()
        .unwrap();
    let frames = (device / page, host / page);
    let stats = runtime.stats();
    // Small frames get their memory together with their neighbours. Only the device knows which have memory, so none
    // counts as bare.
    let known = if page < 2 << 20 { 0 } else { frames.0 };
    assert_eq!((stats.device_frames.free, stats.device_frames.bare), (frames.0, known));
    // The host tier gets its memory in the background; no frame of the device tier has any.
    let given = runtime.trim(Bytes::new(device + host)).get();
    assert!(given <= host, "{given}");
    assert!(resident() <= opened + (4 << 20), "{} at first, {} now", opened, resident());
    assert_eq!(runtime.trim(Bytes::new(device + host)), Bytes::ZERO, "nothing is given back twice");
    assert_eq!(runtime.stats().host_frames.bare, frames.1);

    // Pages of a file are clean. Both tiers are full of them.
    let path = PathBuf::from(std::env::var_os("OUTCORE_CHILD_MODEL").unwrap());
    let tensor = runtime.open_model(&path).unwrap().tensor("w").unwrap();
    let read = |rows: std::ops::Range<u64>| {
        for row in rows {
            let guard = runtime.pin(&tensor.rows(row..row + 1).unwrap()).wait().unwrap();
            assert!(guard.iter().all(|byte| *byte == row as u8), "row {row}");
        }
    };
    read(0..255);
    let full = runtime.stats();
    assert_eq!((full.device.used, full.host.used), (Bytes::new(device), Bytes::new(host)), "{full:?}");

    // The host tier's copies go first, and then pages of the device tier.
    let given = trimmed(&runtime, Bytes::mib(10));
    assert_eq!(given, 10 << 20);
    assert_eq!(runtime.stats().device.used, Bytes::new(device));
    let given = trimmed(&runtime, Bytes::mib(50));
    assert_eq!(given, 50 << 20);
    let after = runtime.stats();
    assert_eq!((after.device.used.get(), after.device.budget.get()), (device - (28 << 20), device));
    assert_eq!((after.host.used.get(), after.host.budget.get()), (0, host));
    let all = trimmed(&runtime, Bytes::new(device + host));
    assert_eq!(all, device - (28 << 20));
    let empty = runtime.stats();
    assert_eq!((empty.device.used, empty.host.used), (Bytes::ZERO, Bytes::ZERO));
    assert_eq!((empty.device_frames.bare, empty.host_frames.bare), frames);
    assert_eq!(runtime.trim(Bytes::new(1)), Bytes::ZERO);

    // Pages are filled again, and take no more than the budgets.
    let before = resident();
    read(0..255);
    let grown = resident() - before;
    // What the policy remembers comes in addition.
    assert!((device + host..device + host + (4 << 20)).contains(&(grown + TOLERANCE)), "{grown}");

    // Pinned pages stay, and so do dirty ones.
    let pinned = runtime.pin(&tensor.rows(200..201).unwrap()).wait().unwrap();
    let table = runtime.alloc(DType::U8, &[page]).unwrap();
    runtime.pin(&table).write().wait().unwrap().bytes_mut().fill(7);
    trimmed(&runtime, Bytes::new(device + host));
    assert!(pinned.iter().all(|byte| *byte == 200));
    assert!(runtime.pin(&table).wait().unwrap().iter().all(|byte| *byte == 7));
    let left = tensor.rows(200..201).unwrap().page_count() + 1;
    assert_eq!(runtime.stats().device.used, Bytes::new(left * page));
    drop((pinned, table));
    // A write back that is under way ends first.
    while runtime.stats().device.used > Bytes::new((left - 1) * page) {
        std::thread::yield_now();
    }
    let given = trimmed(&runtime, Bytes::new(device + host));
    assert!(given >= left * page, "{given}");
    let stats = runtime.stats();
    assert_eq!((stats.device_frames.bare, stats.host_frames.bare), frames);
    drop(tensor);

    // A smaller budget limits the memory, whichever frames had memory before. So does a budget that grows again.
    let table = runtime.alloc(DType::U8, &[frames.0, page]).unwrap();
    let opened = resident();
    for count in [4, 2, 16] {
        runtime.set_device_budget(Bytes::new(count * page)).unwrap();
        for row in 0..frames.0 {
            drop(runtime.pin(&table.rows(row..row + 1).unwrap()).wait().unwrap());
        }
        let grown = resident().saturating_sub(opened);
        assert!(grown <= host + count * page + 4 * TOLERANCE, "{grown} in {count} frames");
    }
    drop(table);
    runtime.close().unwrap();
    scene_ended();
}

/// `trim` said that it had given back 50 MiB, but the frames had never had any memory.
#[test]
fn regression_trim_gives_back_what_it_says() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(dir.path());
    for page in [16 << 10, 256 << 10, 2 << 20] {
        let child = Scene::of("child_trims").tell("OUTCORE_CHILD_PAGE", page.to_string());
        child.tell("OUTCORE_CHILD_MODEL", &path).run().well(&format!("pages of {page}"));
    }
}

#[derive(Debug)]
struct Ignore;

impl Completions for Ignore {
    fn completed(&self, _done: &mut Vec<Completion>) {}
}

/// Run by the test below, in a control group of its own, which counts what the kernel has really got back. A huge page
/// of which a part is unmapped is charged as a whole, and the process's own counters do not show that.
#[test]
fn child_gives_parts_of_huge_pages_back() {
    const HUGE: u64 = 2 << 20;
    const BLOCKS: u64 = 64;
    /// The kernel counts in batches.
    const SLACK: u64 = 4 << 20;
    if std::env::var_os("OUTCORE_CHILD_PARTS").is_none() {
        return;
    }
    let page = 64 << 10;
    let config = HostDeviceConfig {
        page_size: PageSize::new(Bytes::new(page)).unwrap(),
        frames: (BLOCKS * HUGE / page) as u32,
        link: None,
        warm: false,
    };
    let charged = || MemoryLimit::detect().unwrap().usage.get();
    assert_ne!(MemoryLimit::detect().unwrap().source, LimitSource::Machine);
    let device = HostDevice::new(config, Arc::new(Ignore)).unwrap();
    let base = device.reserve(device.frame_count()).unwrap();
    let empty = charged();
    for n in 0..device.frame_count() {
        device.map(FrameId::new(n), base.offset(u64::from(n) * page)).unwrap();
    }
    let full = charged();
    // No frame was written, so what is charged are huge pages, which the kernel gives where it has any.
    if full.saturating_sub(empty) + SLACK < BLOCKS * HUGE {
        return println!("the child had no huge pages");
    }
    // One frame of each block stays, at a different place in each.
    let a_block = (HUGE / page) as u32;
    for n in (0..device.frame_count()).filter(|n| n % a_block != n / a_block % a_block) {
        device.discard(FrameId::new(n)).unwrap();
    }
    let (gone, discarded) = (full.saturating_sub(charged()), BLOCKS * (HUGE - page));
    println!("{gone} of {discarded} bytes are gone");
    assert!(gone + SLACK >= discarded, "of {discarded} bytes that were discarded {gone} are gone");
    // Frame 0 is left out: it has no memory before it is touched.
    for n in (1..device.frame_count()).filter(|n| n % a_block == n / a_block % a_block) {
        assert_eq!(device.frame_memory(FrameId::new(n)).unwrap(), Bytes::new(page));
    }
    device.close().unwrap();
    println!("the child ran");
}

/// Frames smaller than a huge page are parts of one. The kernel keeps the whole huge page until it is told to look for
/// unused parts.
#[test]
fn parts_of_huge_pages_are_given_back() {
    const TEST: &str = "parts_of_huge_pages_are_given_back";
    if Machine::detect().unwrap().huge_pages == HugePages::Never {
        return eprintln!("SKIPPED {TEST}: this kernel gives no huge pages");
    }
    // Memory that builds have left in pieces has few huge pages.
    drop(Migrates::start());
    let child = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/cgroup_run.sh"))
        .arg("1GiB")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &whole_name("child_gives_parts_of_huge_pages_back"), "--nocapture"])
        .env("OUTCORE_CHILD_PARTS", "1")
        .output()
        .unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    if child.status.code() == Some(77) || text.contains("the child had no huge pages") {
        return eprintln!("SKIPPED {TEST}: {text}");
    }
    assert!(child.status.success() && text.contains("the child ran"), "{text}");
}

/// A tier's contents are counted in frames, and the unused ends of frames (tails) in bytes.
#[test]
fn frames_and_tails_are_counted() {
    let page = 64 << 10;
    let runtime = Runtime::builder()
        .page_size(PageSize::new(Bytes::new(page)).unwrap())
        .device_budget(Bytes::new(8 * page))
        .host_budget(Bytes::new(4 * page))
        .scratch_dir(env!("CARGO_TARGET_TMPDIR"))
        .open()
        .unwrap();
    let seen = || {
        let stats = runtime.stats();
        let (device, host) = (stats.device_frames, stats.host_frames);
        assert_eq!((device.used * page, host.used * page), (stats.device.used.get(), stats.host.used.get()));
        ((device.used, device.free, device.tails.get()), (host.used, host.free, host.tails.get()))
    };
    assert_eq!(seen(), ((0, 8, 0), (0, 4, 0)));
    // Two pages and a byte; a byte; whole pages.
    let tensors = [2 * page + 1, 1, page].map(|len| runtime.alloc(DType::U8, &[len]).unwrap());
    assert_eq!(seen(), ((0, 8, 0), (0, 4, 0)));
    for tensor in &tensors {
        runtime.pin(tensor).write().wait().unwrap().bytes_mut().fill(1);
    }
    assert_eq!(seen(), ((5, 3, 2 * (page - 1)), (0, 4, 0)));
    // These rows are in the first page, which has no tail.
    drop(runtime.pin(&tensors[0].rows(0..page).unwrap()).wait().unwrap());
    runtime.evict(&tensors[1]);
    while seen() != ((4, 4, page - 1), (1, 3, page - 1)) {
        std::thread::yield_now();
    }
    // The page was never on disk. It moves up, and leaves no copy in the host tier.
    drop(runtime.pin(&tensors[1]).wait().unwrap());
    assert_eq!(seen(), ((5, 3, 2 * (page - 1)), (0, 4, 0)));
    drop(tensors);
    assert_eq!(seen(), ((0, 8, 0), (0, 4, 0)));
    runtime.close().unwrap();
}

/// Refuses to give memory back for as long as it is told to.
#[derive(Default)]
struct Keeping(AtomicBool);

impl DeviceHook for Keeping {
    fn before(&self, call: DeviceCall) -> outcore::Result<()> {
        if call == DeviceCall::Discard && self.0.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::TooManyMappings, "no mapping is left").remedy("raise vm.max_map_count"));
        }
        Ok(())
    }
}

/// Memory that the system refuses to take back stays. A smaller budget is then an error, and a trim gives back nothing.
#[test]
fn regression_memory_that_stays_is_not_counted_as_given_back() {
    let keeping = Arc::new(Keeping::default());
    let runtime = Runtime::builder()
        .page_size(PageSize::new(Bytes::new(PAGE)).unwrap())
        .device_budget(Bytes::new(8 * PAGE))
        .scratch_dir(env!("CARGO_TARGET_TMPDIR"))
        .lookahead(Lookahead::Off)
        .device(Hooked::new(Host, keeping.clone()))
        .open()
        .unwrap();
    let table = runtime.alloc(DType::U8, &[16, PAGE]).unwrap();
    let pass = |byte: u8| {
        for row in 0..16 {
            let mut guard = runtime.pin(&table.rows(row..row + 1).unwrap()).write().wait().unwrap();
            assert!(guard.bytes().iter().all(|old| *old == byte));
            guard.bytes_mut().fill(byte + 1);
        }
    };
    pass(0);
    keeping.0.store(true, Ordering::SeqCst);
    assert_eq!(runtime.trim(Bytes::new(8 * PAGE)), Bytes::ZERO);
    let refused = |frames: u64| {
        let error = runtime.set_device_budget(Bytes::new(frames * PAGE)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TooManyMappings, "{error}");
        assert!(error.advice().is_some_and(|advice| advice.contains("vm.max_map_count")), "{error}");
    };
    // The smaller budget limits the pages, although memory has stayed. Each new call asks the system again.
    refused(4);
    refused(4);
    pass(1);
    // Memory that has stayed serves a larger budget.
    runtime.set_device_budget(Bytes::new(6 * PAGE)).unwrap_err();
    runtime.set_device_budget(Bytes::new(8 * PAGE)).unwrap();
    pass(2);
    refused(3);
    keeping.0.store(false, Ordering::SeqCst);
    runtime.set_device_budget(Bytes::new(3 * PAGE)).unwrap();
    assert_eq!(runtime.stats().device.budget, Bytes::new(3 * PAGE));
    pass(3);
    drop(table);
    assert_eq!(runtime.trim(Bytes::new(8 * PAGE)), Bytes::new(3 * PAGE));
    runtime.close().unwrap();
}

/// Holds write calls until it is opened.
#[derive(Default)]
struct Gate {
    /// Whether it is open, and how many writes have come to it.
    state: Mutex<(bool, u32)>,
    changed: Condvar,
}

impl Gate {
    fn open(&self) {
        self.state.lock().unwrap().0 = true;
        self.changed.notify_all();
    }
    fn await_arrival(&self) {
        drop(self.changed.wait_while(self.state.lock().unwrap(), |(_, arrived)| *arrived == 0).unwrap());
    }
}

impl CallHook for Gate {
    fn before(&self, call: &IoCall) -> Injected {
        if call.kind == IoKind::Write {
            let mut state = self.state.lock().unwrap();
            state.1 += 1;
            self.changed.notify_all();
            drop(self.changed.wait_while(state, |(open, _)| !*open).unwrap());
        }
        Injected::Nothing
    }
}

/// A runtime whose scratch budget holds one tensor. The tensor's last handle was dropped while one of its pages is
/// being written.
fn with_room_on_its_way(set: impl FnOnce(RuntimeBuilder) -> RuntimeBuilder) -> (Runtime, Arc<Gate>) {
    let gate = Arc::new(Gate::default());
    let builder = Runtime::builder()
        .page_size(PageSize::new(Bytes::new(PAGE)).unwrap())
        .device_budget(Bytes::mib(4))
        .scratch_dir(env!("CARGO_TARGET_TMPDIR"))
        .scratch_budget(Bytes::mib(8))
        .store(StoreOptions::new(IoBackend::Threads).hook(gate.clone()));
    let runtime = set(builder).open().unwrap();
    let table = one_tensor(&runtime).unwrap();
    runtime.pin(&table.rows(0..4).unwrap()).write().wait().unwrap().bytes_mut().fill(1);
    runtime.evict(&table);
    gate.await_arrival();
    drop(table);
    (runtime, gate)
}

fn one_tensor(runtime: &Runtime) -> outcore::Result<Tensor> {
    runtime.alloc(DType::U8, &[6 << 20 >> 16, 1 << 16])
}

/// An allocation failed with the advice to drop tensors, which the program had just done.
#[test]
fn regression_room_that_is_on_its_way_back_is_waited_for() {
    let (runtime, gate) = with_room_on_its_way(|builder| builder);
    let tensor = std::thread::scope(|threads| {
        let allocated = threads.spawn(|| one_tensor(&runtime));
        gate.open();
        allocated.join().unwrap().unwrap()
    });
    let full = runtime.alloc(DType::U8, &[6 << 20]).unwrap_err();
    assert!(full.kind() == ErrorKind::BudgetTooSmall && !full.to_string().contains("way back"), "{full}");
    drop(tensor);
    runtime.close().unwrap();
}

/// An allocation waits for such room only for a limited time. In a closure on a stream, where it may not wait, it fails
/// at once.
#[test]
fn room_that_does_not_come_back_is_named() {
    let (runtime, gate) = with_room_on_its_way(|builder| builder.io_timeout(Some(Duration::from_millis(50))));
    let check = |error: Error| {
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::BudgetTooSmall, "{text}");
        assert!(text.contains("6.0 MiB of tensors that were dropped") && error.advice().is_some(), "{text}");
    };
    check(one_tensor(&runtime).unwrap_err());
    let stream = runtime.compute_stream().unwrap();
    let (tell, told) = mpsc::channel();
    let inside = runtime.clone();
    stream.call(move || tell.send(one_tensor(&inside).unwrap_err()).unwrap());
    let error = told.recv().unwrap();
    assert!(error.to_string().contains("cannot wait"), "{error}");
    check(error);
    stream.synchronize().unwrap();
    drop(stream);
    gate.open();
    runtime.close().unwrap();
}

/// Run by the test below, in a process of its own.
#[test]
fn child_has_many_walkers() {
    if std::env::var_os("OUTCORE_CHILD_WALKERS").is_none() {
        return;
    }
    const PAGES: u64 = 1024;
    const USES: u64 = 20_000;
    let page = 4 << 10;
    let runtime = Runtime::builder()
        .page_size(PageSize::new(Bytes::new(page)).unwrap())
        .device_budget(Bytes::new(PAGES * page))
        .scratch_dir(env!("CARGO_TARGET_TMPDIR"))
        .open()
        .unwrap();
    let table = runtime.alloc(DType::U8, &[PAGES, page]).unwrap();
    let rows: Vec<Tensor> = (0..PAGES).map(|row| table.rows(row..row + 1).unwrap()).collect();
    rows.iter().for_each(|row| runtime.pin(row).write().wait().unwrap().bytes_mut().fill(1));
    let before = resident();
    let walkers: Vec<_> = (0..500).map(|_| runtime.walker().unwrap()).collect();
    // In no order that repeats.
    let mut random = 1_u64;
    for _ in 0..USES / 100 {
        for walker in &walkers {
            for _ in 0..100 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                drop(runtime.pin(&rows[(random >> 33) as usize % rows.len()]).of(walker).wait().unwrap());
            }
        }
    }
    let grown = resident().saturating_sub(before);
    println!("500 walkers: {grown} bytes");
    assert!(grown <= 24 << 20, "{grown} bytes for what walkers have done");
    drop(walkers);
    drop((rows, table));
    runtime.close().unwrap();
    println!("the child ran");
}

/// The memory for the orders of all walkers together is limited.
#[test]
fn regression_many_walkers_stay_within_the_allowance() {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &whole_name("child_has_many_walkers"), "--nocapture"])
        .env("OUTCORE_CHILD_WALKERS", "1")
        .output()
        .unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success() && text.contains("the child ran"), "{text}");
    eprintln!("{}", text.lines().find(|line| line.starts_with("500 walkers")).unwrap());
}

/// Run by the test below, where the folder's file system is an overlay that keeps its files in memory.
#[test]
fn child_looks_at_an_overlay() {
    let Some(folder) = std::env::var_os("OUTCORE_CHILD_OVERLAY") else { return };
    let runtime = Runtime::builder().device_budget(Bytes::mib(8)).scratch_dir(folder).open().unwrap();
    let tensor = runtime.alloc(DType::U8, &[1 << 20]).unwrap();
    let stats = runtime.stats();
    assert!(stats.scratch.unwrap().in_memory);
    assert_eq!(stats.memory.scratch, Bytes::mib(2));
    drop(tensor);
    runtime.close().unwrap();
    println!("the child ran");
}

/// Live systems and some containers keep their files in memory, under an overlay. Scratch in such a folder counts as
/// memory.
#[test]
fn regression_an_overlay_in_memory_counts_as_memory() {
    let script = r#"
        set -e
        mount -t tmpfs none "$1" && mkdir "$1/lower" "$1/upper" "$1/work" "$1/all"
        mount -t overlay none -o "lowerdir=$1/lower,upperdir=$1/upper,workdir=$1/work" "$1/all" || exit 77
        OUTCORE_CHILD_OVERLAY="$1/all" exec "$2" --exact "$3" --nocapture
    "#;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(folder.path()).arg(std::env::current_exe().unwrap());
    command.arg(whole_name("child_looks_at_an_overlay"));
    let child = match command.output() {
        Ok(child) => child,
        Err(error) => return eprintln!("SKIPPED: {error}"),
    };
    let text = format!("{}{}", String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    let refused = text.contains("unshare failed") || text.contains("mount:");
    if child.status.code() == Some(77) || !child.status.success() && refused {
        return eprintln!("SKIPPED: no overlay can be mounted here: {text}");
    }
    assert!(child.status.success() && text.contains("the child ran"), "{text}");
}
