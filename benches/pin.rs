//! What does a pin of resident pages cost? Pin and unpin through the public API, beside the two atomic additions that
//! any counted pin needs.
//!
//! Parameters: `--pins` per round (1000000), `--rounds` (9).

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use outcore::{Bytes, DType, PageSize, Runtime, Tensor};
use serde_json::json;
use support::{Random, Spread};

fn pins(runtime: &Runtime, tensor: &Tensor, count: u64) {
    for _ in 0..count {
        drop(black_box(runtime.pin(black_box(tensor)).wait().unwrap()));
    }
}

/// Nanoseconds per pin and unpin, of each of the threads.
fn time(threads: &[&Tensor], runtime: &Runtime, count: u64) -> f64 {
    if let [tensor] = threads {
        let start = Instant::now();
        pins(runtime, tensor, count);
        return start.elapsed().as_nanos() as f64 / count as f64;
    }
    let barrier = Barrier::new(threads.len());
    let nanos = std::thread::scope(|scope| {
        let run = |tensor: &&Tensor| {
            let tensor = (*tensor).clone();
            let (runtime, barrier) = (&*runtime, &barrier);
            scope.spawn(move || {
                barrier.wait();
                let start = Instant::now();
                pins(runtime, &tensor, count);
                start.elapsed().as_nanos() as f64
            })
        };
        let running: Vec<_> = threads.iter().map(run).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).sum::<f64>()
    });
    nanos / threads.len() as f64 / count as f64
}

fn atomics(count: u64) -> f64 {
    let word = AtomicU64::new(0);
    let start = Instant::now();
    for _ in 0..count {
        black_box(&word).fetch_add(1, Ordering::Acquire);
        black_box(&word).fetch_sub(1, Ordering::Release);
    }
    start.elapsed().as_nanos() as f64 / count as f64
}

fn main() {
    let count: u64 = support::param("pins", "1000000");
    let rounds: usize = support::param("rounds", "9");
    let hardware = support::hardware(&support::dir());
    let page = PageSize::DEFAULT;
    let runtime =
        Runtime::builder().device_budget(Bytes::mib(64)).scratch_dir(support::dir()).page_size(page).open().unwrap();
    let one = runtime.alloc(DType::U8, &[page.bytes()]).unwrap();
    let other = runtime.alloc(DType::U8, &[page.bytes()]).unwrap();
    let many = runtime.alloc(DType::U8, &[16 * page.bytes()]).unwrap();
    for tensor in [&one, &other, &many] {
        drop(runtime.pin(tensor).wait().unwrap());
    }
    let cases: [(&str, Vec<&Tensor>, u64); 4] = [
        ("1 page", vec![&one], count),
        ("16 pages", vec![&many], count / 8),
        ("1 page, 2 threads, one each", vec![&one, &other], count / 2),
        ("1 page, 2 threads, the same", vec![&one, &one], count / 2),
    ];
    let mut measured = vec![Vec::new(); cases.len() + 1];
    let mut random = Random::new(1);
    for _ in 0..rounds {
        let mut order: Vec<usize> = (0..=cases.len()).collect();
        random.shuffle(&mut order);
        for case in order {
            measured[case].push(match cases.get(case) {
                Some((_, threads, count)) => time(threads, &runtime, *count),
                None => atomics(count),
            });
        }
    }
    println!("pin and unpin of resident pages, ns: median [least - most] of {rounds} rounds; {hardware}");
    let names: Vec<&str> = cases.iter().map(|(name, ..)| *name).chain(["two atomic additions"]).collect();
    let mut results = serde_json::Map::new();
    for (name, rounds) in names.iter().zip(&measured) {
        let spread = Spread::of(rounds);
        println!("  {name:28} {spread:.1}");
        results.insert((*name).to_owned(), spread.json());
    }
    drop((one, other, many));
    runtime.close().unwrap();
    support::json_line("pin", &hardware, json!({ "nanoseconds": results, "goal_ns": 60 }));
}
