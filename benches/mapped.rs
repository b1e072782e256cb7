//! What does a mapped file cost beside the kernel's mapping?
//!
//! - `touch`: the first read of a page that was read ahead of use, and is hidden: a fault, but no read of the disk.
//!   `again`: the next read of it.
//! - `take_away`: dropping a mapping whose pages are all visible, for each page.
//! - `open`, `end`: opening a sparse file, and dropping it again; beside that, both by `memmap2`.
//! - `resident`: reading all bytes of a file that is all in memory, after a first pass; beside that, `memmap2`.
//!
//! Rounds of both sides alternate. Parameters: `--pages` (64KiB,2MiB), `--rounds` (7), `--size` of the file that is
//! read (256MiB), `--open`, the size of the sparse one (100GB), `--dir`. Skips where there is no fitting userfaultfd.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::fs::File;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use outcore::{Bytes, PageSize, PolicyKind, Runtime, Tier};
use outcore_mapped::{Faulting, Mapped};
use serde_json::json;
use support::{Made, Spread, gib_s};

fn runtime(page: u64, budget: u64) -> Runtime {
    Runtime::builder()
        .device(Faulting::new().unwrap())
        .page_size(PageSize::new(Bytes::new(page)).unwrap())
        .device_budget(Bytes::new(budget))
        .policy(PolicyKind::Model)
        .open()
        .unwrap()
}

fn by_the_kernel(path: &Path) -> memmap2::Mmap {
    // SAFETY: a file of this bench, which nobody writes while it is mapped.
    unsafe { memmap2::Mmap::map(&File::open(path).unwrap()) }.unwrap()
}

fn micros(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e6
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Reads all pages ahead of use, and waits until they are there, hidden.
fn fill(runtime: &Runtime, mapped: &Mapped) {
    runtime.prefetch(mapped.tensor());
    while !runtime.observe().snapshot(mapped.tensor()).pages.iter().all(|page| page.tier() == Tier::Device) {
        std::thread::yield_now();
    }
    // A page is there before its reader has told the device, which a pin waits for.
    drop(runtime.pin(&mapped.tensor().rows(0..1).unwrap()).wait().unwrap());
}

/// Microseconds of a touch of a hidden page, of the touch after it, and of taking a page away: medians of a round.
fn pages(path: &Path, page: u64, size: u64) -> [f64; 3] {
    let runtime = runtime(page, size + 64 * page);
    let mapped = Mapped::open(&runtime, path).unwrap();
    fill(&runtime, &mapped);
    let read = runtime.stats().traffic.disk_read;
    let (mut first, mut again) = (Vec::new(), Vec::new());
    for at in (page..size).step_by(page as usize) {
        for times in [&mut first, &mut again] {
            let start = Instant::now();
            black_box(mapped[at as usize]);
            times.push(micros(start));
        }
    }
    assert_eq!(runtime.stats().traffic.disk_read, read, "a page was not there");
    let start = Instant::now();
    drop(mapped);
    let away = micros(start) / size.div_ceil(page) as f64;
    runtime.close().unwrap();
    [median(first), median(again), away]
}

/// Gibibytes a second of one pass.
fn pass(bytes: &[u8]) -> f64 {
    let start = Instant::now();
    let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
    black_box(words.fold(0, u64::wrapping_add));
    gib_s(bytes.len() as u64, start.elapsed().as_secs_f64())
}

fn main() {
    let sizes: String = support::param("pages", "64KiB,2MiB");
    let sizes: Vec<Bytes> = sizes.split(',').map(|size| size.parse().unwrap()).collect();
    let rounds: usize = support::param("rounds", "7");
    let size: Bytes = support::param("size", "256MiB");
    let sparse: Bytes = support::param("open", "100GB");
    let dir = support::dir();
    let hardware = support::hardware(&dir);
    if let Err(error) = Faulting::new() {
        println!("SKIPPED: {error}");
        return support::json_line("mapped", &hardware, json!({ "skipped": error.to_string() }));
    }
    let file = support::model(&dir, 16, size.get() / 16, 4096);
    let hole = Made(dir.join(format!("outcore-bench-{}.hole", std::process::id())));
    File::create(&hole.0).unwrap().set_len(sparse.get()).unwrap();
    let len = std::fs::metadata(&file.0).unwrap().len();
    println!("medians [least - most] of {rounds} rounds; {hardware}");
    let mut rows = Vec::new();
    for page in sizes {
        let mut samples: [Vec<f64>; 8] = Default::default();
        let resident = runtime(page.get(), len + 64 * page.get());
        let (ours, kernels) = (Mapped::open(&resident, &file.0).unwrap(), by_the_kernel(&file.0));
        for bytes in [&ours[..], &kernels[..]] {
            pass(bytes);
        }
        let opener = runtime(page.get(), 64 * page.get());
        for _ in 0..rounds {
            let start = Instant::now();
            let opened = Mapped::open(&opener, &hole.0).unwrap();
            samples[3].push(micros(start));
            let start = Instant::now();
            drop(opened);
            samples[4].push(micros(start));
            let start = Instant::now();
            drop(by_the_kernel(&hole.0));
            samples[5].push(micros(start));
            samples[6].push(pass(&ours));
            samples[7].push(pass(&kernels));
        }
        drop((ours, kernels));
        resident.close().unwrap();
        opener.close().unwrap();
        for _ in 0..rounds {
            for (samples, found) in samples.iter_mut().zip(pages(&file.0, page.get(), len)) {
                samples.push(found);
            }
        }
        let [touch, again, away, open, end, kernel, read, read_kernel] = samples.map(|rounds| Spread::of(&rounds));
        println!("pages of {page}:");
        println!("  touch of a hidden page {touch} us, the next touch {again:.3} us");
        println!("  taking a page away     {away} us");
        println!("  opening {sparse}      {open} us, and its end {end} us; both by memmap2 {kernel} us");
        println!("  reading what is there  {read} GiB/s, memmap2 {read_kernel} GiB/s");
        rows.push(json!({ "page_bytes": page.get(), "touch_us": touch.json(), "again_us": again.json(),
            "take_away_us": away.json(), "open_us": open.json(), "end_us": end.json(), "open_and_end_memmap2_us": kernel.json(),
            "resident_gib_s": read.json(), "resident_memmap2_gib_s": read_kernel.json() }));
    }
    support::json_line("mapped", &hardware, json!({ "rows": rows, "open_bytes": sparse.get(), "bytes": len }));
}
