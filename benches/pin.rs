//! What does a pin of resident pages cost? Pin and unpin through the public API, compared with the two atomic additions
//! that any counted pin needs; and how long the longest pins take, compared with an empty loop.
//!
//! Parameters: `--pins` per round (1000000), `--rounds` (9), `--cases`, a part of the names of the cases to run (all).

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::future::Future;
use std::hint::black_box;
use std::pin::pin;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use outcore::{Bytes, DType, PageSize, Runtime, Tensor};
use serde_json::json;
use support::{Random, Spread};

/// What is pinned, and how.
#[derive(Clone, Copy)]
enum Way<'a> {
    Read(&'a Tensor),
    /// In another runtime than the other ways.
    Apart(&'a Runtime, &'a Tensor),
    Write(&'a Tensor),
    Async(&'a Tensor),
    Set(&'a [Tensor]),
    SetMut(&'a [Tensor]),
    /// Another tensor each time.
    Walk(&'a [Tensor]),
    /// In a scope.
    Scope(&'a Tensor),
}

impl Way<'_> {
    fn pins(self, runtime: &Runtime, count: u64) {
        let scope = runtime.scope().open().unwrap();
        for n in 0..count {
            match self {
                Self::Read(tensor) => drop(black_box(runtime.pin(black_box(tensor)).wait().unwrap())),
                Self::Apart(apart, tensor) => drop(black_box(apart.pin(black_box(tensor)).wait().unwrap())),
                Self::Write(tensor) => drop(black_box(runtime.pin(black_box(tensor)).write().wait().unwrap())),
                Self::Set(tensors) => drop(black_box(runtime.pin(black_box(tensors)).wait().unwrap())),
                Self::SetMut(tensors) => drop(black_box(runtime.pin(black_box(tensors)).write().wait().unwrap())),
                Self::Scope(tensor) => drop(black_box(runtime.pin(black_box(tensor)).in_scope(&scope).wait().unwrap())),
                Self::Walk(tensors) => {
                    let tensor = &tensors[n as usize % tensors.len()];
                    drop(black_box(runtime.pin(black_box(tensor)).wait().unwrap()));
                }
                Self::Async(tensor) => {
                    let request = pin!(runtime.pin(black_box(tensor)));
                    let Poll::Ready(guard) = request.poll(&mut Context::from_waker(Waker::noop())) else {
                        panic!("a resident page was waited for");
                    };
                    drop(black_box(guard.unwrap()));
                }
            }
        }
    }
}

/// Nanoseconds per pin and unpin, of each of the threads.
fn time<'a>(threads: &[Way<'a>], runtime: &Runtime, count: u64) -> f64 {
    if let [way] = threads {
        let start = Instant::now();
        way.pins(runtime, count);
        return start.elapsed().as_nanos() as f64 / count as f64;
    }
    let barrier = Barrier::new(threads.len());
    let nanos = std::thread::scope(|scope| {
        let run = |way: Way<'a>| {
            let barrier = &barrier;
            scope.spawn(move || {
                barrier.wait();
                let start = Instant::now();
                way.pins(runtime, count);
                start.elapsed().as_nanos() as f64
            })
        };
        let running: Vec<_> = threads.iter().copied().map(run).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).sum::<f64>()
    });
    nanos / threads.len() as f64 / count as f64
}

const TAIL: &str = "1 in 10,000 takes longer than, 2 threads";

fn atomics(count: u64) -> f64 {
    let word = AtomicU64::new(0);
    let start = Instant::now();
    for _ in 0..count {
        black_box(&word).fetch_add(1, Ordering::Acquire);
        black_box(&word).fetch_sub(1, Ordering::Release);
    }
    start.elapsed().as_nanos() as f64 / count as f64
}

/// Times each of `count` steps on each of two threads. Returns the nanoseconds that one step in 10,000 exceeds.
fn slowest(count: u64, step: impl Fn(usize, u64) + Sync) -> f64 {
    let barrier = Barrier::new(2);
    let mut times: Vec<u64> = std::thread::scope(|scope| {
        let run = |thread| {
            let (step, barrier) = (&step, &barrier);
            scope.spawn(move || {
                let mut times = vec![0u64; count as usize];
                barrier.wait();
                for (n, time) in times.iter_mut().enumerate() {
                    let start = Instant::now();
                    step(thread, n as u64);
                    *time = start.elapsed().as_nanos() as u64;
                }
                times
            })
        };
        let running: Vec<_> = (0..2).map(run).collect();
        running.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let at = times.len() - 1 - times.len() / 10_000;
    *times.select_nth_unstable(at).1 as f64
}

fn main() {
    let count: u64 = support::param("pins", "1000000");
    let rounds: usize = support::param("rounds", "9");
    let wanted: String = support::param("cases", "");
    let hardware = support::hardware(&support::dir());
    let page = PageSize::DEFAULT;
    let open = || {
        Runtime::builder().device_budget(Bytes::mib(128)).scratch_dir(support::dir()).page_size(page).open().unwrap()
    };
    let runtime = open();
    let alloc = |pages: u64| runtime.alloc(DType::U8, &[pages * page.bytes()]).unwrap();
    let (one, other, many) = (alloc(1), alloc(1), alloc(16));
    // A second runtime shows what two threads cost that share nothing.
    let second = open();
    let apart = second.alloc(DType::U8, &[page.bytes()]).unwrap();
    let set: Vec<Tensor> = (0..8).map(|_| alloc(1)).collect();
    let rows: Vec<Tensor> =
        (0..8).map(|n| many.rows(2 * n * page.bytes()..(2 * n + 1) * page.bytes()).unwrap()).collect();
    for tensor in [&one, &other, &many].into_iter().chain(&set) {
        drop(runtime.pin(tensor).write().wait().unwrap());
    }
    drop(second.pin(&apart).write().wait().unwrap());
    let before = runtime.stats().pager.latched_hits;
    let mut cases: Vec<(&str, Vec<Way<'_>>, u64)> = vec![
        ("1 page", vec![Way::Read(&one)], count),
        ("1 page, async", vec![Way::Async(&one)], count),
        ("1 page, to write", vec![Way::Write(&one)], count),
        ("1 page, in a scope", vec![Way::Scope(&one)], count),
        ("1 page, another each time", vec![Way::Walk(&set)], count),
        ("16 pages", vec![Way::Read(&many)], count / 8),
        ("a set of 1", vec![Way::Set(&set[..1])], count),
        ("a set of 2", vec![Way::Set(&set[..2])], count),
        ("a set of 4", vec![Way::Set(&set[..4])], count / 2),
        ("a set of 8", vec![Way::Set(&set)], count / 4),
        ("a set of 2 of one allocation", vec![Way::Set(&rows[..2])], count),
        ("a set of 8 of one allocation", vec![Way::Set(&rows)], count / 4),
        ("a set of 2, to write", vec![Way::SetMut(&set[..2])], count),
        ("1 page, 2 threads, a runtime each", vec![Way::Read(&one), Way::Apart(&second, &apart)], 4 * count),
        ("1 page, 2 threads, one each", vec![Way::Read(&one), Way::Read(&other)], 4 * count),
        ("1 page, 2 threads, the same", vec![Way::Read(&one), Way::Read(&one)], 4 * count),
    ];
    cases.retain(|(name, ..)| name.contains(&wanted));
    let mut measured = vec![Vec::new(); cases.len() + 1];
    let (mut tails, mut empty) = (Vec::new(), Vec::new());
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
        if TAIL.contains(&wanted) {
            let pins = |thread: usize, n: u64| {
                let tensor = &set[4 * thread + n as usize % 4];
                drop(black_box(runtime.pin(tensor).wait().unwrap()));
            };
            tails.push(slowest(count, pins));
            empty.push(slowest(count, |_, n| {
                black_box(n);
            }));
        }
    }
    let latched = runtime.stats().pager.latched_hits - before;
    println!("pin and unpin of resident pages, ns: median [least - most] of {rounds} rounds; {hardware}");
    let names: Vec<&str> = cases.iter().map(|(name, ..)| *name).chain(["two atomic additions"]).collect();
    let mut results = serde_json::Map::new();
    for (name, rounds) in names.iter().zip(&measured) {
        let spread = Spread::of(rounds);
        println!("  {name:28} {spread:.1}");
        results.insert((*name).to_owned(), spread.json());
    }
    let mut slowest = None;
    if !tails.is_empty() {
        let (tail, bare) = (Spread::of(&tails), Spread::of(&empty));
        println!("  {TAIL}: {tail:.0}; of an empty loop: {bare:.0}");
        slowest = Some(json!({ "pin": tail.json(), "empty": bare.json() }));
    }
    println!("  pins of resident pages that took the latch: {latched}");
    drop(cases);
    drop((one, other, many, set, rows, apart));
    second.close().unwrap();
    runtime.close().unwrap();
    let goals = json!({ "page": 40, "async": 60, "write": 60, "further_tensor": 25, "slowest_less_empty": 2000 });
    let measured =
        json!({ "nanoseconds": results, "slowest_1_in_10000": slowest, "latched": latched, "goals_ns": goals });
    support::json_line("pin", &hardware, measured);
}
