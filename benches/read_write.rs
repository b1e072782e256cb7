//! A read-write tensor larger than memory: how near does working on it come to the disk's mixed rate? Every page is
//! read, changed and written back. In turns with that, the store makes raw mixed reads and writes of the same blocks.
//! Then the tensor is read back and verified.
//!
//! And how long does a fault take while room is taken for a large tensor in the same file? Faults of one page are
//! timed, in turns with and without another thread that allocates and drops without end.
//!
//! Parameters: `--size` (4GiB), `--budget` (512MiB), `--page` (2MiB), `--depth` of the raw run (16), `--raw` bytes of a
//! raw run, and of the tensor whose pages fault (1GiB), `--alloc` bytes that are allocated beside faults (4GiB),
//! `--faults` of a round (300), `--rounds` (3), `--dir`.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

#[path = "support/raw.rs"]
mod raw;
mod support;

use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use outcore::{Bytes, DType, Lookahead, PageSize, Plan, PolicyKind, Runtime, Tensor};
use raw::Raw;
use serde_json::{Value, json};
use support::{Random, Spread, gib_s};

/// What a pass did: seconds, bytes read, bytes written.
struct Pass {
    seconds: f64,
    read: u64,
    written: u64,
}

fn pass(runtime: &Runtime, pages: &[Tensor], mut work: impl FnMut(&Tensor, u64)) -> Pass {
    let before = runtime.stats().traffic;
    let start = Instant::now();
    for (n, page) in pages.iter().enumerate() {
        work(page, n as u64);
    }
    let seconds = start.elapsed().as_secs_f64();
    let after = runtime.stats().traffic;
    Pass {
        seconds,
        read: after.disk_read.saturating_sub(before.disk_read).get(),
        written: after.disk_written.saturating_sub(before.disk_written).get(),
    }
}

/// The value of every word of page `n` after `generation` writing passes. No other page or generation has it.
fn value(generation: u64, n: u64) -> u64 {
    generation << 32 | n
}

/// Microseconds of each of `count` faults, one after the other.
fn faults(runtime: &Runtime, pages: &mut impl Iterator<Item = Tensor>, count: usize) -> Vec<f64> {
    let fault = |page: Tensor| {
        let start = Instant::now();
        drop(runtime.pin(&page).wait().unwrap());
        start.elapsed().as_secs_f64() * 1e6
    };
    pages.take(count).map(fault).collect()
}

/// The same while another thread allocates a tensor and drops it, again and again; and the seconds of each `alloc`.
fn faults_beside_alloc(
    runtime: &Runtime,
    pages: &mut impl Iterator<Item = Tensor>,
    count: usize,
    bytes: Bytes,
) -> (Vec<f64>, Vec<f64>) {
    let (done, begun) = (AtomicBool::new(false), Barrier::new(2));
    std::thread::scope(|scope| {
        let allocates = scope.spawn(|| {
            let mut took = Vec::new();
            begun.wait();
            while !done.load(Ordering::Relaxed) {
                let start = Instant::now();
                let tensor = runtime.alloc(DType::U8, &[bytes.get()]).unwrap();
                took.push(start.elapsed().as_secs_f64());
                drop(tensor);
            }
            took
        });
        begun.wait();
        let faults = faults(runtime, pages, count);
        done.store(true, Ordering::Relaxed);
        (faults, allocates.join().unwrap())
    })
}

/// Faults with and without an `alloc` beside them: medians and worst of each round.
fn beside_alloc(dir: &Path, page: PageSize, written: Bytes, rounds: u64) -> Value {
    let bytes: Bytes = support::param("alloc", "4GiB");
    let count: usize = support::param("faults", "300");
    // With LRU, pages used in a cycle are never hit: every pin is a fault.
    let builder = Runtime::builder().device_budget(Bytes::new(16 * page.bytes())).page_size(page);
    let runtime = builder.policy(PolicyKind::Lru).lookahead(Lookahead::Off).scratch_dir(dir).open().unwrap();
    let table = runtime.alloc(DType::U8, &[page.pages_for(written.get()), page.bytes()]).unwrap();
    let row = |n: u64| table.rows(n..n + 1).unwrap();
    let rows = table.shape()[0];
    for n in 0..rows {
        runtime.pin(&row(n)).write().wait().unwrap().bytes_mut().fill(n as u8);
    }
    let mut pages = (0..rows).cycle().map(row);
    // These faults write back the pages that are still dirty.
    drop(faults(&runtime, &mut pages, rows as usize));
    let mut random = Random::new(9);
    let (mut medians, mut worst, mut allocs) = ([const { Vec::new() }; 2], [const { Vec::new() }; 2], Vec::new());
    for _ in 0..rounds {
        let mut order = [false, true];
        random.shuffle(&mut order);
        for beside in order {
            let before = runtime.stats().pager.faults;
            let times = if beside {
                let (times, took) = faults_beside_alloc(&runtime, &mut pages, count, bytes);
                allocs.extend(took);
                times
            } else {
                faults(&runtime, &mut pages, count)
            };
            assert_eq!(runtime.stats().pager.faults - before, count as u64);
            let spread = Spread::of(&times);
            medians[usize::from(beside)].push(spread.median);
            worst[usize::from(beside)].push(spread.most);
        }
    }
    drop(pages);
    drop(table);
    runtime.close().unwrap();
    let [(alone, alone_worst), (beside, beside_worst)] =
        [0, 1].map(|n| (Spread::of(&medians[n]), Spread::of(&worst[n])));
    let alloc = Spread::of(&allocs);
    println!("  faults of {}, us, medians of {rounds} rounds of {count}:", Bytes::new(page.bytes()));
    println!("    alone              {alone:.0}   the worst {alone_worst:.0}");
    println!("    beside an alloc    {beside:.0}   the worst {beside_worst:.0}");
    println!("    alloc of {bytes}  {alloc:.3} s, {} times", allocs.len());
    json!({ "alone": alone.json(), "alone_worst": alone_worst.json(), "beside": beside.json(),
        "beside_worst": beside_worst.json(), "alloc_bytes": bytes.get(), "alloc_s": alloc.json(), "allocs": allocs.len() })
}

fn main() {
    let size: Bytes = support::param("size", "4GiB");
    let budget: Bytes = support::param("budget", "512MiB");
    let page = PageSize::new(support::param("page", "2MiB")).unwrap();
    let depth: u32 = support::param("depth", "16");
    let raw_bytes: Bytes = support::param("raw", "1GiB");
    let rounds: u64 = support::param("rounds", "3");
    let dir = support::dir();
    let hardware = support::hardware(&dir);

    let raw = Raw::open(&dir, page, depth, raw_bytes.get());
    let runtime = Runtime::builder()
        .device_budget(budget)
        .page_size(page)
        .policy(PolicyKind::Plan)
        .scratch_dir(&dir)
        .open()
        .unwrap();
    let count = size.get() / page.bytes();
    let tensor = runtime.alloc(DType::U64, &[count, page.bytes() / 8]).unwrap();
    let pages: Vec<Tensor> = (0..count).map(|n| tensor.rows(n..n + 1).unwrap()).collect();
    runtime.plan(Plan::Cycle(&pages));

    let fill = |page: &Tensor, value: u64| {
        runtime.pin(page).write().wait().unwrap().view_mut::<u64>().unwrap().fill(value);
    };
    let first = pass(&runtime, &pages, |page, n| fill(page, value(1, n)));
    let (mut passes, mut raws, mut wrong) = (Vec::new(), Vec::new(), 0u64);
    let mut random = Random::new(4);
    let mut generation = 1;
    for _ in 0..rounds {
        let mut order = [true, false];
        random.shuffle(&mut order);
        for ours in order {
            if !ours {
                raws.push(raw.mixed(raw_bytes.get()));
                continue;
            }
            passes.push(pass(&runtime, &pages, |page, n| {
                let mut guard = runtime.pin(page).write().wait().unwrap();
                let words = guard.view_mut::<u64>().unwrap();
                wrong += u64::from(words[0] != value(generation, n));
                words.fill(value(generation + 1, n));
            }));
            generation += 1;
        }
    }
    let check = pass(&runtime, &pages, |page, n| {
        let guard = runtime.pin(page).wait().unwrap();
        wrong += u64::from(guard.view::<u64>().unwrap().iter().any(|word| *word != value(generation, n)));
    });
    assert_eq!(wrong, 0, "pages came back with other bytes");

    let rates: Vec<f64> = passes.iter().map(|pass| gib_s(pass.read + pass.written, pass.seconds)).collect();
    let written: Vec<f64> = passes.iter().map(|pass| pass.written as f64 / size.get() as f64).collect();
    let (rate, raw_rate, written) = (Spread::of(&rates), Spread::of(&raws), Spread::of(&written));
    let share = rate.median / raw_rate.median;
    println!("{size} under {budget}, pages of {}, {rounds} rounds; {hardware}", Bytes::new(page.bytes()));
    println!("  raw mixed          {raw_rate:.2} GiB/s");
    println!("  read, change       {rate:.2} GiB/s   {share:.3} of raw; goal 0.85");
    println!("  written in a pass  {written:.3} of the tensor");
    let of = |pass: &Pass| gib_s(pass.read + pass.written, pass.seconds);
    println!("  first writing      {:9.2} GiB/s, {} written", of(&first), Bytes::new(first.written));
    println!("  read back          {:9.2} GiB/s, {} read, verified", of(&check), Bytes::new(check.read));
    drop((tensor, pages));
    runtime.close().unwrap();
    let beside = beside_alloc(&dir, page, raw_bytes, rounds);
    support::json_line(
        "read_write",
        &hardware,
        json!({ "tensor_bytes": size.get(), "budget_bytes": budget.get(), "page_bytes": page.bytes(),
            "raw_gib_per_second": raw_rate.json(), "gib_per_second": rate.json(), "share": share, "goal": 0.85,
            "written_per_pass": written.json(), "first_write_gib_per_second": of(&first),
            "read_back_gib_per_second": of(&check), "verified": true, "fault_us": beside }),
    );
}
