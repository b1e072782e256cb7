//! What does it cost to check pages of model files against hashes? A file of several times the budget is read in
//! passes: without checks, with checks at the second read, and with checks at every read after the first.
//!
//! If there are checks, the first pass learns the hashes and the second one checks them. From the third on, `first` has
//! nothing left to check. The rate is the disk's as long as the disk is slower than hashing on the store's thread. The
//! processor time shows the cost in any case.
//!
//! Parameters: `--size` of the file (1GiB), `--budget` (128MiB), `--page` (2MiB), `--rounds` (5), `--dir`.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::time::Instant;

use outcore::{Bytes, PageSize, PolicyKind, Runtime, Tensor, Verify};
use serde_json::json;
use support::{Random, Spread};

const MODES: [Verify; 3] = [Verify::Off, Verify::First, Verify::Always];
const PASSES: usize = 3;

/// For each pass, GiB read in a second and nanoseconds of the processor for each KiB.
fn passes(path: &std::path::Path, page: PageSize, budget: Bytes, verify: Verify) -> [(f64, f64); PASSES] {
    // With LRU, pages used in a cycle have been evicted before their next use: every pass reads all of them.
    let builder = Runtime::builder().page_size(page).device_budget(budget).policy(PolicyKind::Lru);
    let runtime = builder.verify(verify).open().unwrap();
    let model = runtime.open_model(path).unwrap();
    let count = model.header().tensors.len();
    let tensors: Vec<Tensor> = (0..count).map(|n| model.tensor(&format!("t{n}")).unwrap()).collect();
    let ahead = (budget.get() / page.bytes() / 4).max(1) as usize;
    let found = [(); PASSES].map(|()| {
        let (before, cpu, start) = (runtime.observe().traffic().disk_read, support::cpu_seconds(), Instant::now());
        tensors.iter().take(ahead).for_each(|tensor| runtime.prefetch(tensor));
        for (n, tensor) in tensors.iter().enumerate() {
            if let Some(next) = tensors.get(n + ahead) {
                runtime.prefetch(next);
            }
            drop(runtime.pin(tensor).wait().unwrap());
        }
        let (seconds, cpu) = (start.elapsed().as_secs_f64(), support::cpu_seconds() - cpu);
        let bytes = runtime.observe().traffic().disk_read.saturating_sub(before).get();
        (support::gib_s(bytes, seconds), cpu * 1e9 / (bytes as f64 / 1024.0))
    });
    drop((tensors, model));
    runtime.close().unwrap();
    found
}

fn main() {
    let size: Bytes = support::param("size", "1GiB");
    let budget: Bytes = support::param("budget", "128MiB");
    let page = PageSize::new(support::param("page", "2MiB")).unwrap();
    let rounds: usize = support::param("rounds", "5");
    let dir = support::dir();
    let hardware = support::hardware(&dir);
    let made = support::model(&dir, size.get() / page.bytes(), page.bytes(), page.bytes());
    println!("{size} in pages of {}, budget {budget}, {rounds} rounds; {hardware}", Bytes::new(page.bytes()));
    let mut found = vec![[const { (Vec::new(), Vec::new()) }; PASSES]; MODES.len()];
    let mut random = Random::new(3);
    for _ in 0..rounds {
        let mut order = [0, 1, 2];
        random.shuffle(&mut order);
        for at in order {
            let of_passes = passes(&made.0, page, budget, MODES[at]);
            for ((rates, costs), (rate, cost)) in found[at].iter_mut().zip(of_passes) {
                rates.push(rate);
                costs.push(cost);
            }
        }
    }
    let mut results = serde_json::Map::new();
    for (mode, of_passes) in MODES.iter().zip(&found) {
        let mut of_mode = Vec::new();
        for (n, (rates, costs)) in of_passes.iter().enumerate() {
            let (rate, cost) = (Spread::of(rates), Spread::of(costs));
            println!(
                "  {:7} pass {}  {rate:.2} GiB/s   {cost:.0} ns of the processor for a KiB",
                mode.to_string(),
                n + 1
            );
            of_mode.push(json!({ "gib_per_second": rate.json(), "cpu_ns_per_kib": cost.json() }));
        }
        results.insert(mode.to_string(), of_mode.into());
    }
    let sizes = json!({ "bytes": size.get(), "budget": budget.get(), "page": page.bytes() });
    support::json_line("verify", &hardware, json!({ "sizes": sizes, "results": results }));
}
