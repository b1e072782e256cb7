//! The promise: what would exceed the kernel's limit on mappings ends in an error that names the limit. Small tensors
//! cost no mappings, however many there are. Page tables go with the pages they were for.
//!
//! Each scene runs in a process of its own, whose mappings are its own.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use harness::{Scene, alone, is_child, scene_ended};
use outcore::store::StoreOptions;
use outcore::testing::{CallHook, HostDevice, Injected, IoCall, RoomCall};
use outcore::{Bytes, DType, Error, ErrorKind, IoBackend, PageSize, Result, Runtime, Tensor};
use outcore_testkit::harness;

const SMALL: Bytes = Bytes::kib(4);

fn limit() -> u64 {
    fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap()
}

/// Whether the limit is low enough to be reached in a test. If not, says that the test is skipped.
fn limit_is_near(test: &str) -> bool {
    let near = limit() <= 1 << 17;
    if !near {
        eprintln!("SKIPPED {test}: vm.max_map_count is {}", limit());
    }
    near
}

fn mappings() -> u64 {
    fs::read_to_string("/proc/self/maps").unwrap().lines().count() as u64
}

/// A field of /proc/self/status, in bytes.
fn status(field: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// A device budget for so many frames and their page tables. The first 16 MiB of page tables do not count.
fn budget_of(frames: u64, page: Bytes) -> Bytes {
    let tables = HostDevice::tables_of_a_frame(PageSize::new(page).unwrap());
    Bytes::new(frames * page.get() + (frames * tables.get()).saturating_sub(16 << 20))
}

fn open(page: Bytes, budget: Bytes) -> Result<Runtime> {
    Runtime::builder()
        .page_size(PageSize::new(page)?)
        .device_budget(budget)
        .scratch_dir(env!("CARGO_TARGET_TMPDIR"))
        .open()
}

fn set(rt: &Runtime, tensor: &Tensor, byte: u8) -> Result<()> {
    rt.pin(tensor).write().wait()?.bytes_mut().fill(byte);
    Ok(())
}

fn holds(rt: &Runtime, tensor: &Tensor, byte: u8) -> Result<bool> {
    Ok(rt.pin(tensor).wait()?.bytes().iter().all(|found| *found == byte))
}

/// Mappings that the test takes itself, so that the process may have only `left` more.
struct Others(Vec<(usize, usize)>);

impl Others {
    fn leaving(left: u64) -> Self {
        let mut others = Self(Vec::new());
        // Counting mappings may itself take memory, and so mappings. So this is repeated.
        for _ in 0..4 {
            let more = limit().saturating_sub(mappings() + left);
            others.add(more as usize);
        }
        others
    }

    /// Adds pages that each differ in protection from their neighbours, so that each is a mapping.
    fn add(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        let len = count * 4096;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping of this test's own.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        for page in (1..count).step_by(2) {
            // SAFETY: inside the mapping just made.
            let done = unsafe { libc::mprotect(at.byte_add(page * 4096), 4096, libc::PROT_READ) };
            if done != 0 {
                break;
            }
        }
        self.0.push((at as usize, len));
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        for (at, len) in self.0.drain(..) {
            // SAFETY: the mapping is this test's.
            unsafe { libc::munmap(at as *mut libc::c_void, len) };
        }
    }
}

/// An error for want of mappings says how many there are, how many there may be, and what to do.
fn check_named(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::TooManyMappings, "{error}");
    let advice = error.advice().unwrap_or_default();
    assert!(error.to_string().contains(&limit().to_string()), "{error}");
    assert!(advice.contains("sysctl -w vm.max_map_count="), "{error}");
}

/// With the frames that the limit allows and 4,000 tensors of one page, every fault was refused, and threads could not
/// start.
#[test]
fn regression_small_tensors_take_no_mappings_from_frames() {
    const TEST: &str = "regression_small_tensors_take_no_mappings_from_frames";
    if !limit_is_near(TEST) {
        return;
    }
    alone(TEST, || {
        let frames = HostDevice::frames_allowed(limit()) - 200;
        let start = Instant::now();
        let rt = open(SMALL, budget_of(frames, SMALL)).unwrap();
        assert_eq!(rt.stats().device_frames.free, frames);
        let small: Vec<Tensor> = (0..4000).map(|_| rt.alloc(DType::U8, &[SMALL.get()]).unwrap()).collect();
        // Scattered over a range twice as large, so that frames have gaps between them.
        let large = rt.alloc(DType::U8, &[2 * frames, SMALL.get()]).unwrap();
        for row in 0..frames {
            set(&rt, &large.rows(2 * row..2 * row + 1).unwrap(), row as u8).unwrap();
        }
        println!("{} mappings of {} with {frames} frames in use, {:?}", mappings(), limit(), start.elapsed());
        for (n, tensor) in small.iter().enumerate() {
            set(&rt, tensor, n as u8).unwrap();
        }
        for (n, tensor) in small.iter().enumerate() {
            assert!(holds(&rt, tensor, n as u8).unwrap());
        }
        println!("small ones: {:?}", start.elapsed());
        for row in (0..frames).step_by(7) {
            assert!(holds(&rt, &large.rows(2 * row..2 * row + 1).unwrap(), row as u8).unwrap());
        }
        let threads: Vec<_> = (0..32).map(|_| thread::Builder::new().spawn(|| ()).unwrap()).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        drop((small, large));
        rt.close().unwrap();
    });
}

fn small_tensors(count: u64) {
    let frames = 4096;
    let before = status("VmRSS:");
    let rt = open(SMALL, Bytes::new(frames * SMALL.get())).unwrap();
    let start = Instant::now();
    let tensors: Vec<Tensor> = (0..count).map(|_| rt.alloc(DType::U8, &[SMALL.get()]).unwrap()).collect();
    let per_tensor = (status("VmRSS:") - before).saturating_sub(frames * SMALL.get()) / count;
    println!("{count} tensors: {:?} to make, {per_tensor} bytes each, {} mappings", start.elapsed(), mappings());
    // Twice as many as there are frames.
    let some = || (0..count).step_by((count / (2 * frames)).max(1) as usize);
    for n in some() {
        set(&rt, &tensors[n as usize], n as u8).unwrap();
    }
    for n in some() {
        assert!(holds(&rt, &tensors[n as usize], n as u8).unwrap(), "tensor {n}");
    }
    let mut addresses: Vec<u64> = tensors.iter().map(Tensor::address).collect();
    addresses.sort_unstable();
    assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] >= SMALL.get()), "two tensors share an address");
    println!("used after {:?}, {} mappings, {}", start.elapsed(), mappings(), rt.stats().page_tables);
    assert!(mappings() < 2 * frames + 512, "{} mappings", mappings());
    drop(tensors);
    println!("dropped after {:?}", start.elapsed());
    assert!(per_tensor < 1200, "a tensor takes {per_tensor} bytes");
    rt.close().unwrap();
    println!("closed after {:?}", start.elapsed());
}

#[test]
fn a_hundred_thousand_small_tensors() {
    alone("a_hundred_thousand_small_tensors", || small_tensors(100_000));
}

#[test]
#[ignore = "a minute and 4 GB of disk: make soak"]
fn a_million_small_tensors() {
    alone("a_million_small_tensors", || small_tensors(1_000_000));
}

/// Counts what is asked of the scratch file's file system.
#[derive(Default)]
struct Asked(AtomicU64);

impl CallHook for Asked {
    fn before(&self, _: &IoCall) -> Injected {
        Injected::Nothing
    }
    fn before_room(&self, _: &RoomCall) -> Injected {
        self.0.fetch_add(1, Ordering::Relaxed);
        Injected::Nothing
    }
}

/// Counts what takes the time: calls of the file system, and mappings.
#[test]
fn an_alloc_asks_the_system_for_as_much_however_many_tensors_there_are() {
    alone("an_alloc_asks_the_system_for_as_much_however_many_tensors_there_are", || {
        let asked = Arc::new(Asked::default());
        let store = StoreOptions::new(IoBackend::Threads).hook(asked.clone());
        let builder = Runtime::builder().page_size(PageSize::new(SMALL).unwrap()).device_budget(Bytes::mib(1));
        let rt = builder.scratch_dir(env!("CARGO_TARGET_TMPDIR")).store(store).open().unwrap();
        let mut tensors = Vec::new();
        let mut some = |count: u64| {
            let before = (asked.0.load(Ordering::Relaxed), mappings());
            tensors.extend((0..count).map(|_| rt.alloc(DType::U8, &[2 * SMALL.get()]).unwrap()));
            (asked.0.load(Ordering::Relaxed) - before.0, mappings().saturating_sub(before.1))
        };
        let (first, _) = some(100);
        some(8000);
        let (last, new) = some(100);
        // There are no calls if the file system does not preallocate.
        assert!(first == last && last <= 100, "{first} calls of the file system for 100 tensors, and then {last}");
        assert!(new < 8, "{new} mappings for 100 tensors");
        // To drop the tensors would take longer than the rest of the test. They end with the process.
        std::mem::forget(tensors);
    });
}

/// Addresses of tensors that are gone are used again, and arenas that nobody uses are given back.
#[test]
fn addresses_are_used_again() {
    alone("addresses_are_used_again", || {
        let rt = open(Bytes::kib(64), Bytes::mib(4)).unwrap();
        let kept: Vec<Tensor> = (0..64).map(|_| rt.alloc(DType::U8, &[64 << 10]).unwrap()).collect();
        kept.iter().for_each(|tensor| set(&rt, tensor, 3).unwrap());
        let before = mappings();
        for round in 0..200_u64 {
            let pages = 1 + round * 7 % 50;
            let tensor = rt.alloc(DType::U8, &[pages, 64 << 10]).unwrap();
            set(&rt, &tensor, round as u8).unwrap();
            assert!(holds(&rt, &tensor, round as u8).unwrap());
        }
        let large = rt.alloc(DType::U8, &[3 << 30]);
        drop(large.unwrap());
        assert!(kept.iter().all(|tensor| holds(&rt, tensor, 3).unwrap()));
        assert!(mappings() < before + 256, "{before} mappings became {}", mappings());
        drop(kept);
        rt.close().unwrap();
    });
}

/// With 120 mappings left, before the runtime is opened or after, calls end in errors that say so, and the process does
/// not abort.
#[test]
fn regression_few_mappings_left_are_errors() {
    const TEST: &str = "regression_few_mappings_left_are_errors";
    if !limit_is_near(TEST) {
        return;
    }
    alone(TEST, || {
        let others = Others::leaving(120);
        check_named(&open(SMALL, Bytes::mib(4)).unwrap_err());
        drop(others);

        let rt = open(SMALL, Bytes::mib(8)).unwrap();
        // Every second page, so that no two frames are neighbours.
        let rows = rt.alloc(DType::U8, &[3000, SMALL.get()]).unwrap();
        let tensors: Vec<Tensor> = (0..1500).map(|row| rows.rows(2 * row..2 * row + 1).unwrap()).collect();
        set(&rt, &tensors[0], 1).unwrap();
        let others = Others::leaving(120);
        println!("{} mappings of {}", mappings(), limit());
        let results: Vec<Result<()>> = thread::scope(|scope| {
            let parts: Vec<_> = tensors[1..]
                .chunks(500)
                .map(|part| {
                    let rt = &rt;
                    scope.spawn(move || part.iter().map(|tensor| set(rt, tensor, 1)).collect::<Vec<_>>())
                })
                .collect();
            parts.into_iter().flat_map(|part| part.join().unwrap()).collect()
        });
        let refused: Vec<&Error> = results.iter().filter_map(|result| result.as_ref().err()).collect();
        assert!(refused.len() > 500, "{} of {} refused", refused.len(), results.len());
        println!("{} of {} refused; the first: {}", refused.len(), results.len(), refused[0]);
        refused.iter().for_each(|error| check_named(error));
        // Threads can start, memory can be allocated, and resident pages are still there.
        thread::Builder::new().spawn(|| vec![1_u8; 1 << 20].len()).unwrap().join().unwrap();
        assert!(holds(&rt, &tensors[0], 1).unwrap());
        check_named(&rt.alloc(DType::U8, &[2 << 30]).unwrap_err());
        check_named(&open(SMALL, Bytes::mib(4)).unwrap_err());
        drop(others);
        // The runtime looks for room again only a few times a second.
        let unused = rows.rows(1..2).unwrap();
        while let Err(error) = set(&rt, &unused, 2) {
            check_named(&error);
            thread::yield_now();
        }
        for tensor in &tensors {
            set(&rt, tensor, 2).unwrap();
        }
        assert!(tensors.iter().all(|tensor| holds(&rt, tensor, 2).unwrap()));
        drop((rows, unused, tensors));
        rt.close().unwrap();
    });
}

/// Seventy thousand small tensors, with hardly any mappings left, aborted the process after an error with the wrong
/// remedy.
#[test]
fn regression_seventy_thousand_small_tensors_beside_little_room() {
    const TEST: &str = "regression_seventy_thousand_small_tensors_beside_little_room";
    if !limit_is_near(TEST) {
        return;
    }
    alone(TEST, || {
        let rt = open(SMALL, Bytes::mib(1)).unwrap();
        let first = rt.alloc(DType::U8, &[SMALL.get()]).unwrap();
        let others = Others::leaving(2000);
        let tensors: Vec<Tensor> = (0..70_000).map(|_| rt.alloc(DType::U8, &[SMALL.get()]).unwrap()).collect();
        for tensor in tensors.iter().step_by(100) {
            set(&rt, tensor, 9).unwrap();
        }
        assert!(tensors.iter().step_by(100).all(|tensor| holds(&rt, tensor, 9).unwrap()));
        drop((others, first, tensors));
        rt.close().unwrap();
    });
}

/// A file of `rows` rows of `row` bytes, a page each, of which none has a block on disk.
fn sparse_model(dir: &Path, rows: u64, row: u64) -> std::path::PathBuf {
    let path = dir.join("sparse.safetensors");
    let header = format!("{{\"w\":{{\"dtype\":\"U8\",\"shape\":[{rows},{row}],\"data_offsets\":[0,{}]}}}}", rows * row);
    let header = format!("{header:<width$}", width = row as usize - 8);
    let mut file = File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len((rows + 1) * row).unwrap();
    path
}

/// Reads one page of 64 KiB in every 2 MiB of a model. Page tables stay within what a process may take beside its
/// budget.
fn walk(size: u64) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let rows = size / (64 << 10);
    let path = sparse_model(dir.path(), rows, 64 << 10);
    let (budget, held) = (Bytes::mib(64), |field: &str| status(field) + status("VmPTE:"));
    let (before, tables_before) = (held("VmRSS:"), status("VmPTE:"));
    let rt = open(Bytes::kib(64), budget).unwrap();
    let tensor = rt.open_model(&path).unwrap().tensor("w").unwrap();
    let start = Instant::now();
    for row in (0..rows).step_by(32) {
        assert!(holds(&rt, &tensor.rows(row..row + 1).unwrap(), 0).unwrap());
    }
    let grown = held("VmHWM:") - before;
    let allowed = budget.get() + 64 * rows + (32 << 20);
    let tables = rt.stats().page_tables;
    println!(
        "{} walked in {:?}: grown by {}, {} allowed; tables {}, of which the device counts {tables}",
        Bytes::new(size),
        start.elapsed(),
        Bytes::new(grown),
        Bytes::new(allowed),
        Bytes::new(status("VmPTE:"))
    );
    assert!(grown <= allowed, "the process grew by {grown} bytes, {allowed} are allowed");
    // The tables of the frames, one table for each GiB of addresses, and a few at the ends.
    let most = rt.stats().memory.page_tables.get() + 4096 * ((size + budget.get()) / (1 << 30) + 4);
    assert!(tables > Bytes::ZERO && tables.get() <= most, "{tables} of {most}");
    let there = status("VmPTE:") - tables_before;
    assert!(there <= most + (1 << 20), "there are {there} bytes of tables, and {most} were expected at most");
    assert!(tables.get() <= status("VmPTE:") + (1 << 20), "{tables} are counted, there are {}", status("VmPTE:"));
    drop(tensor);
    assert!(rt.stats().page_tables.get() <= 4096 * (budget.get() / (2 << 20) + 8), "{}", rt.stats().page_tables);
    rt.close().unwrap();
}

#[test]
fn page_tables_of_a_sparse_walk_are_given_back() {
    alone("page_tables_of_a_sparse_walk_are_given_back", || walk(64 << 30));
}

/// With small pages, page tables take as much memory as the pages. A budget covers both, except for 16 MiB of tables.
/// Here every page needs a table of its own, which uses the budget up and does not exceed it.
#[test]
fn page_tables_of_small_pages_are_within_the_budget() {
    alone("page_tables_of_small_pages_are_within_the_budget", || {
        let (budget, beside) = (Bytes::mib(24), Bytes::mib(16));
        let frames = (budget + beside).get() / (2 * SMALL.get());
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let (slots, a_slot) = (frames + 512, (2 << 20) / SMALL.get());
        let path = sparse_model(dir.path(), slots * a_slot, SMALL.get());
        let rt = open(SMALL, budget).unwrap();
        let stats = rt.stats();
        assert_eq!(stats.device.budget, Bytes::new(frames * SMALL.get()));
        assert_eq!(stats.memory.device + stats.memory.page_tables, budget + beside);
        let tensor = rt.open_model(path).unwrap().tensor("w").unwrap();
        let before = status("VmPTE:");
        for slot in 0..slots {
            assert!(holds(&rt, &tensor.rows(slot * a_slot..slot * a_slot + 1).unwrap(), 0).unwrap());
        }
        let stats = rt.stats();
        assert_eq!(stats.device_frames.used, frames);
        // One table for each GiB of addresses comes in addition.
        let (upper, there) = (Bytes::new(4096 * (slots / 512 + 4)), Bytes::new(status("VmPTE:") - before));
        println!(
            "{there} of tables, {} counted, {} at most, {upper} above",
            stats.page_tables, stats.memory.page_tables
        );
        assert!(stats.page_tables <= stats.memory.page_tables + upper);
        assert!(stats.page_tables.get() >= frames * 4096, "a table for each frame");
        // The memory in which the runtime keeps the states of its pages has page tables too.
        assert!(there <= stats.memory.page_tables + upper + Bytes::mib(1), "{there} of tables");
        drop(tensor);
        rt.close().unwrap();
    });
}

#[test]
#[ignore = "minutes: make soak"]
fn page_tables_of_a_walk_of_a_tebibyte_are_given_back() {
    alone("page_tables_of_a_walk_of_a_tebibyte_are_given_back", || walk(1 << 40));
}

/// Reads every page of a model of 200 GiB, in pages of 64 KiB, with a device budget of 1 MiB. The page tables that such
/// a walk could leave behind are more than this control group may hold.
#[test]
#[ignore = "minutes, and memory cgroups: make soak"]
fn a_walk_of_200_gib_lives_in_320_mb() {
    const TEST: &str = "a_walk_of_200_gib_lives_in_320_mb";
    if !is_child(TEST) {
        let child = Scene::of(TEST).by("scripts/cgroup_run.sh", &["320MB"]).run();
        if let Some(text) = child.well_or_skipped(TEST) {
            println!("{text}");
        }
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (rows, row) = (200 << 14, 64 << 10);
    let path = sparse_model(dir.path(), rows, row);
    let rt = open(Bytes::kib(64), Bytes::mib(1)).unwrap();
    let tensor = rt.open_model(&path).unwrap().tensor("w").unwrap();
    let start = Instant::now();
    for at in 0..rows {
        let bytes = rt.pin(&tensor.rows(at..at + 1).unwrap()).wait().unwrap();
        assert!(bytes.iter().step_by(4096).all(|byte| *byte == 0), "row {at}");
    }
    println!(
        "walked in {:?}: at most {}, page tables {}",
        start.elapsed(),
        Bytes::new(status("VmHWM:")),
        Bytes::new(status("VmPTE:"))
    );
    drop(tensor);
    rt.close().unwrap();
    scene_ended();
}
