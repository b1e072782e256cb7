//! How long does a fault wait while everybody else is busy? Demand misses are timed on a quiet runtime, then while
//! hinted fills and write backs keep the disk saturated.
//!
//! Parameters: `--size` of the model (1GiB), `--table` of the read-write tensor (256MiB), `--budget` (128MiB), `--page`
//! (2MiB), `--misses` of each kind (300), `--rounds` (3), `--dir`.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use outcore::store::Latency;
use outcore::{Bytes, DType, PageSize, PolicyKind, Runtime, Tensor};
use serde_json::json;
use support::{Spread, gib_s};

/// Times of misses. A page is used again only after all others, so it has been evicted by then.
fn misses(runtime: &Runtime, pages: &[Tensor], at: &mut usize, count: usize) -> Latency {
    let mut times: Vec<Duration> = (0..count)
        .map(|_| {
            // Odd, so that the steps reach every page where their number is a power of two.
            *at += 37;
            let start = Instant::now();
            drop(runtime.pin(&pages[*at % pages.len()]).wait().unwrap());
            start.elapsed()
        })
        .collect();
    Latency::of(&mut times).unwrap()
}

fn main() {
    let size: Bytes = support::param("size", "1GiB");
    let table: Bytes = support::param("table", "256MiB");
    let budget: Bytes = support::param("budget", "128MiB");
    let page = PageSize::new(support::param("page", "2MiB")).unwrap();
    let count: usize = support::param("misses", "300");
    let rounds: usize = support::param("rounds", "3");
    let dir = support::dir();
    let hardware = support::hardware(&dir);
    let pages = size.get() / page.bytes();
    let file = support::model(&dir, pages, page.bytes(), page.bytes());

    let runtime = Runtime::builder()
        .device_budget(budget)
        .page_size(page)
        .policy(PolicyKind::Lru)
        .scratch_dir(&dir)
        .open()
        .unwrap();
    let model = runtime.open_model(&file.0).unwrap();
    let all: Vec<Tensor> = (0..pages).map(|n| model.tensor(&format!("t{n}")).unwrap()).collect();
    let (demanded, hinted) = all.split_at(all.len() / 2);
    let rows = table.get() / page.bytes();
    let allocate = || -> Vec<Tensor> {
        let table = runtime.alloc(DType::U64, &[rows, page.bytes() / 8]).unwrap();
        (0..rows).map(|n| table.rows(n..n + 1).unwrap()).collect()
    };
    // Frames and scratch extents are used for the first time here.
    for row in &allocate() {
        runtime.pin(row).write().wait().unwrap().bytes_mut()[0] = 1;
    }
    for page in &all {
        drop(runtime.pin(page).wait().unwrap());
    }

    let (mut at, mut quiet, mut busy, mut load) = (0, Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        quiet.push(misses(&runtime, demanded, &mut at, count));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for page in hinted.iter().cycle() {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    runtime.prefetch(page);
                    std::thread::sleep(Duration::from_micros(500));
                }
            });
            scope.spawn(|| {
                // Fresh pages are dirty but were never read, so they cost the disk only their write back.
                while !stop.load(Ordering::Relaxed) {
                    let table = allocate();
                    for row in table.iter().take_while(|_| !stop.load(Ordering::Relaxed)) {
                        runtime.pin(row).write().wait().unwrap().bytes_mut()[0] = 1;
                    }
                }
            });
            std::thread::sleep(Duration::from_millis(500));
            let (before, start) = (runtime.stats().traffic, Instant::now());
            busy.push(misses(&runtime, demanded, &mut at, count));
            let (after, seconds) = (runtime.stats().traffic, start.elapsed().as_secs_f64());
            let bytes = after.disk_read.saturating_sub(before.disk_read)
                + after.disk_written.saturating_sub(before.disk_written);
            load.push(gib_s(bytes.get(), seconds));
            stop.store(true, Ordering::Relaxed);
        });
    }
    let micros = |of: &dyn Fn(&Latency) -> Duration, rounds: &[Latency]| {
        Spread::of(&rounds.iter().map(|latency| of(latency).as_secs_f64() * 1e6).collect::<Vec<_>>())
    };
    let causes: Vec<String> = runtime
        .stats()
        .stalls
        .iter()
        .filter(|stall| stall.count > 0)
        .map(|stall| format!("{} {} x {:.1?}", stall.name, stall.count, stall.time / stall.count as u32))
        .collect();
    let (median, p99) = (|latency: &Latency| latency.median, |latency: &Latency| latency.p99);
    let quiet = (micros(&median, &quiet), micros(&p99, &quiet));
    let busy = (micros(&median, &busy), micros(&p99, &busy));
    let load = Spread::of(&load);
    let factor = busy.1.median / quiet.0.median;
    println!("{count} misses of {} a round, {rounds} rounds; {hardware}", Bytes::new(page.bytes()));
    println!("  quiet      median {:.0} us   p99 {:.0} us", quiet.0, quiet.1);
    println!("  saturated  median {:.0} us   p99 {:.0} us   disk {load:.2} GiB/s", busy.0, busy.1);
    println!("  mean waits: {}", causes.join(", "));
    println!("  p99 saturated / median quiet: {factor:.2}; goal 3");
    drop((all, model));
    runtime.close().unwrap();
    support::json_line(
        "demand_latency",
        &hardware,
        json!({ "page_bytes": page.bytes(), "quiet_median_us": quiet.0.json(), "quiet_p99_us": quiet.1.json(),
            "saturated_median_us": busy.0.json(), "saturated_p99_us": busy.1.json(),
            "disk_gib_per_second": load.json(), "factor": factor, "goal": 3.0 }),
    );
}
