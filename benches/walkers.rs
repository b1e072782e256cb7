//! Several clients walk over one model that does not fit, or each over one of several models. Each client is at its own
//! place. Measured: passes a second, hits beside the best possible on the very same uses, and bytes read. Three ways:
//! one plan for all uses (`default`), a walker for each client that declares its order (`walkers`), and a walker for
//! each client that declares nothing (`learned`).
//!
//! `hits` are uses whose page was resident. `found` are all uses that needed no fill of their own: also those whose
//! page was being filled for another client. The best possible fills every missing page at its use, so `found` is
//! compared with it.
//!
//! Parameters: `--clients` (8), `--models` (1), `--pages` of a model (256), `--page` in KiB (2048), `--budget` in
//! percent of the models (50), `--seconds` a round (4), `--rounds` (5), `--compute`: the average microseconds that a
//! device computes on a page, without the processor (0), `--ways`: a part of the names of the ways to run (all),
//! `--lookahead` in pages (chosen by the runtime).

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use outcore::{Bytes, Lookahead, Model, PageSize, Plan, Runtime, Tensor, Walker};
use serde_json::json;
use support::{Made, Random, Spread};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// All uses are the default walker's, and its plan is declared.
    Default,
    /// Each client is a walker that declares its order.
    Walkers,
    /// Each client is a walker whose order is learned.
    Learned,
}

#[derive(Clone, Debug)]
struct Settings {
    page: PageSize,
    budget: Bytes,
    clients: usize,
    seconds: f64,
    compute: Duration,
    lookahead: Option<u64>,
}

/// What a round gave.
#[derive(Clone, Copy, Debug)]
struct Round {
    passes: f64,
    hits: f64,
    found: f64,
    optimum: f64,
    read: f64,
}

fn round(settings: &Settings, files: &[Made], way: Way, random: &mut Random) -> Round {
    let mut builder = Runtime::builder().device_budget(settings.budget).page_size(settings.page);
    if let Some(pages) = settings.lookahead {
        builder = builder.lookahead(Lookahead::Bytes(Bytes::new(pages * settings.page.bytes())));
    }
    let runtime = builder.open().unwrap();
    let models: Vec<Model> = files.iter().map(|file| runtime.open_model(&file.0).unwrap()).collect();
    let count = models[0].header().tensors.len();
    let of = |model: &Model| (0..count).map(|n| model.tensor(&format!("t{n}")).unwrap()).collect();
    let orders: Vec<Vec<Tensor>> = models.iter().map(of).collect();
    if way == Way::Default {
        runtime.plan(Plan::Cycle(&orders.concat()));
    }
    let walkers: Vec<Option<Walker>> = (0..settings.clients)
        .map(|client| {
            let walker = (way != Way::Default).then(|| runtime.walker().unwrap());
            if let Some(walker) = walker.as_ref().filter(|_| way == Way::Walkers) {
                walker.plan(Plan::Cycle(&orders[client % orders.len()]));
            }
            walker
        })
        .collect();
    let (ended, used) = (AtomicBool::new(false), AtomicU64::new(0));
    let barrier = Barrier::new(settings.clients + 1);
    let (seconds, measured) = std::thread::scope(|scope| {
        for (client, walker) in walkers.iter().enumerate() {
            let (mut at, tensors) = (random.next() as usize % count, &orders[client % orders.len()]);
            let (runtime, mut random) = (&runtime, Random::new(random.next()));
            let (ended, used, barrier) = (&ended, &used, &barrier);
            scope.spawn(move || {
                barrier.wait();
                while !ended.load(Ordering::Relaxed) {
                    let tensor = &tensors[at];
                    let guard = match walker {
                        Some(walker) => runtime.pin(tensor).of(walker).wait().unwrap(),
                        None => runtime.pin(tensor).wait().unwrap(),
                    };
                    black_box(guard.bytes()[0]);
                    if settings.compute > Duration::ZERO {
                        std::thread::sleep(settings.compute.mul_f64(0.5 + random.next() as f64 / u64::MAX as f64));
                    }
                    used.fetch_add(1, Ordering::Relaxed);
                    at = (at + 1) % count;
                }
            });
        }
        barrier.wait();
        // The first fills and the learning are not measured: they happen once in a program's life.
        std::thread::sleep(Duration::from_secs_f64(settings.seconds / 2.0));
        let (start, uses, stats) = (Instant::now(), used.load(Ordering::Relaxed), runtime.stats());
        std::thread::sleep(Duration::from_secs_f64(settings.seconds));
        let (end, after) = (used.load(Ordering::Relaxed), runtime.stats());
        let seconds = start.elapsed().as_secs_f64();
        ended.store(true, Ordering::Relaxed);
        let read = (after.pager.fills_disk - stats.pager.fills_disk) as f64 * settings.page.bytes() as f64;
        (seconds, ((end - uses) as f64, read))
    });
    // These count all uses, not only those of the measured seconds: so does the optimum, for the first 262,144.
    let (optimum, stats) = (runtime.observe().optimum(), runtime.stats().pager);
    let (uses, read) = measured;
    drop((walkers, orders, models));
    runtime.close().unwrap();
    Round {
        passes: uses / count as f64 / seconds,
        hits: optimum.actual_ratio(),
        found: 1.0 - stats.fills_disk as f64 / stats.uses as f64,
        optimum: optimum.ratio(),
        read: read / seconds / 1e9,
    }
}

fn main() {
    let dir = support::dir();
    let models: usize = support::param("models", "1");
    let pages: u64 = support::param("pages", "256");
    let page = PageSize::new(Bytes::kib(support::param("page", "2048"))).unwrap();
    let percent: u64 = support::param("budget", "50");
    let lookahead: u64 = support::param("lookahead", "0");
    let settings = Settings {
        page,
        budget: Bytes::new(models as u64 * pages * percent / 100 * page.bytes()),
        clients: support::param("clients", "8"),
        seconds: support::param("seconds", "4"),
        compute: Duration::from_micros(support::param("compute", "0")),
        lookahead: (lookahead > 0).then_some(lookahead),
    };
    let rounds: usize = support::param("rounds", "5");
    let wanted: String = support::param("ways", "");
    let hardware = support::hardware(&dir);
    let files: Vec<Made> = (0..models).map(|_| support::model(&dir, pages, page.bytes(), page.bytes())).collect();
    let mut ways = vec![("default", Way::Default), ("walkers", Way::Walkers), ("learned", Way::Learned)];
    ways.retain(|(name, _)| name.contains(&wanted));
    let mut results: Vec<Vec<Round>> = vec![Vec::new(); ways.len()];
    for number in 0..rounds {
        let mut order: Vec<usize> = (0..ways.len()).collect();
        let mut random = Random::new(number as u64 + 1);
        random.shuffle(&mut order);
        let phases = random.next();
        for way in order {
            results[way].push(round(&settings, &files, ways[way].1, &mut Random::new(phases)));
        }
    }
    println!(
        "{} clients over {models} x {pages} pages of {} KiB, {percent} % of them fit, {} us of computing a page: median [least - most] of \
         {rounds} rounds; {hardware}",
        settings.clients,
        page.bytes() >> 10,
        settings.compute.as_micros()
    );
    let mut json = serde_json::Map::new();
    for ((name, _), rounds) in ways.iter().zip(&results) {
        let of = |value: fn(&Round) -> f64| Spread::of(&rounds.iter().map(value).collect::<Vec<_>>());
        let (passes, hits, best, read) = (of(|r| r.passes), of(|r| r.hits), of(|r| r.optimum), of(|r| r.read));
        let (found, share) = (of(|r| r.found), of(|r| r.found / r.optimum));
        println!("  {name}");
        for (what, spread) in [
            ("passes/s", passes),
            ("hits", hits),
            ("found", found),
            ("optimum", best),
            ("found/optimum", share),
            ("GB/s read", read),
        ] {
            println!("    {what:15} {spread:.3}");
        }
        json.insert(
            (*name).to_owned(),
            json!({ "passes_per_s": passes.json(), "hits": hits.json(), "optimum": best.json(),
                    "found": found.json(), "found_of_optimum": share.json(), "read_gb_per_s": read.json() }),
        );
    }
    let measured = json!({ "clients": settings.clients, "models": models, "pages": pages, "budget_percent": percent, "ways": json });
    support::json_line("walkers", &hardware, measured);
}
