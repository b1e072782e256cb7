//! What does it cost to look at a runtime? The time of `stats()`, and of the calls that are separate because they take
//! longer, with many pages in several segments and after many uses; and how long a snapshot of a large segment holds up
//! others.
//!
//! The time for which the latch is held cannot be seen from outside. So another thread calls `stats()`, which takes the
//! latch, again and again. Its longest call is reported beside its longest call without a snapshot: if the machine did
//! something else, both are long.
//!
//! Parameters: `--pages` (1000000) in `--segments` (4), `--uses` (1000000), `--snapshot-pages` (3300000), `--rounds`
//! (9), `--dir`. The files are holes.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::fs;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use outcore::{Bytes, Lookahead, Model, PageSize, PolicyKind, Runtime, Tensor};
use serde_json::json;
use support::{Made, Random, Spread};

const PAGE: u64 = 4096;
/// Pages of one pin: enough that 10^6 uses take seconds only.
const UNIT: u64 = 512;
const FRAMES: u64 = 16 * UNIT;

/// A model of one tensor of so many rows of a page each, that takes no room on disk.
fn hole(dir: &Path, number: u64, pages: u64) -> Made {
    let made = Made(dir.join(format!("outcore-bench-stats-{}-{number}.safetensors", std::process::id())));
    let entry =
        format!("{{\"t\":{{\"dtype\":\"U8\",\"shape\":[{pages},{PAGE}],\"data_offsets\":[0,{}]}}}}", pages * PAGE);
    let header = format!("{entry:width$}", width = PAGE as usize - 8);
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    fs::write(&made.0, &bytes).unwrap();
    fs::OpenOptions::new().write(true).open(&made.0).unwrap().set_len((pages + 1) * PAGE).unwrap();
    made
}

fn open(policy: PolicyKind) -> Runtime {
    let builder = Runtime::builder().page_size(PageSize::new(Bytes::new(PAGE)).unwrap()).policy(policy);
    builder.device_budget(Bytes::new(FRAMES * PAGE)).lookahead(Lookahead::Off).open().unwrap()
}

fn table(runtime: &Runtime, made: &Made) -> (Model, Tensor) {
    let model = runtime.open_model(&made.0).unwrap();
    let table = model.tensor("t").unwrap();
    (model, table)
}

fn micros(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e6
}

/// The longest call of `stats()` while `work` runs, and how long that took, in microseconds.
fn longest_beside(runtime: &Runtime, work: impl FnOnce()) -> (f64, f64) {
    let (done, ready) = (AtomicBool::new(false), Barrier::new(2));
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            ready.wait();
            while !done.load(Ordering::Relaxed) {
                let start = Instant::now();
                drop(runtime.stats());
                longest = longest.max(start.elapsed());
            }
            longest.as_secs_f64() * 1e6
        });
        ready.wait();
        let start = Instant::now();
        work();
        let took = micros(start);
        done.store(true, Ordering::Relaxed);
        (watch.join().unwrap(), took)
    })
}

fn main() {
    let pages: u64 = support::param("pages", "1000000");
    let segments: u64 = support::param("segments", "4");
    let uses: u64 = support::param("uses", "1000000");
    let large: u64 = support::param("snapshot-pages", "3300000");
    let rounds: usize = support::param("rounds", "9");
    let dir = support::dir();
    let hardware = support::hardware(&dir);
    println!("looking at a runtime, {rounds} rounds; {hardware}");
    println!("  {pages} pages in {segments} segments, after {uses} uses, us:");
    let mut results = serde_json::Map::new();
    for policy in [PolicyKind::Lru, PolicyKind::Plan] {
        let runtime = open(policy);
        let made: Vec<Made> = (0..segments).map(|n| hole(&dir, n, pages / segments)).collect();
        let tables: Vec<(Model, Tensor)> = made.iter().map(|made| table(&runtime, made)).collect();
        let mut random = Random::new(7);
        let units = pages / segments / UNIT;
        for _ in 0..uses / UNIT {
            let (at, unit) = (random.next() % segments, random.next() % units);
            let (_, table) = &tables[at as usize];
            drop(runtime.pin(&table.rows(unit * UNIT..(unit + 1) * UNIT).unwrap()).wait().unwrap());
        }
        let resident = tables[0].1.rows(0..1).unwrap();
        drop(runtime.pin(&resident).wait().unwrap());
        let mut times = [const { Vec::new() }; 4];
        for _ in 0..rounds {
            // The policy has not been told of these uses yet, so that the next call is as slow as it can be.
            (0..4000).for_each(|_| drop(runtime.pin(&resident).wait().unwrap()));
            let mut time = |at: usize, call: &dyn Fn()| {
                let start = Instant::now();
                call();
                times[at].push(micros(start));
            };
            time(0, &|| drop(runtime.stats()));
            time(1, &|| drop(runtime.stats()));
            time(2, &|| drop(runtime.observe().worst_pages(16)));
            time(3, &|| _ = runtime.observe().optimum());
        }
        let told = ["stats, after 4000 hits", "stats, again", "worst_pages", "optimum"];
        let mut of_policy = serde_json::Map::new();
        for (name, times) in told.into_iter().zip(&times) {
            let spread = Spread::of(times);
            println!("    {:5} {name:24} {spread:.1}", policy.name());
            of_policy.insert(name.to_owned(), spread.json());
        }
        results.insert(policy.name().to_owned(), of_policy.into());
        drop(tables);
        runtime.close().unwrap();
    }
    let runtime = open(PolicyKind::Lru);
    let made = hole(&dir, segments, large);
    let (model, table) = table(&runtime, &made);
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..rounds {
        let (beside, took) = longest_beside(&runtime, || drop(runtime.observe().snapshot(&table)));
        let (alone, _) = longest_beside(&runtime, || std::thread::sleep(Duration::from_secs_f64(took / 1e6)));
        for (times, time) in times.iter_mut().zip([took, beside, alone]) {
            times.push(time);
        }
    }
    println!("  a snapshot of {large} pages, us:");
    let mut of_snapshot = serde_json::Map::new();
    for (name, times) in ["snapshot", "longest stats beside it", "longest stats alone"].into_iter().zip(&times) {
        let spread = Spread::of(times);
        println!("    {name:30} {spread:.1}");
        of_snapshot.insert(name.to_owned(), spread.json());
    }
    results.insert("snapshot".to_owned(), of_snapshot.into());
    drop((model, table));
    runtime.close().unwrap();
    let sizes = json!({ "pages": pages, "segments": segments, "uses": uses, "snapshot_pages": large });
    support::json_line("stats", &hardware, json!({ "unit": "us", "sizes": sizes, "results": results, "goal_us": 20 }));
}
