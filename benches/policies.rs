//! What does a use cost a policy? Every policy with a million resident pages, driven without a pager: hits in random
//! order, a skewed order in which many uses miss, evict and bring in, and a declared cycle over 5/4 as many pages,
//! which only `plan` and `model` follow. Memory is slowest when it is read in random order. So the report also shows
//! what one random read and write of an array of 8 bytes a page costs. Times are processor time.
//!
//! Parameters: `--pages` resident (1000000), `--uses` per round (2000000), `--rounds` (5), `--policy` (all; or one
//! name).

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::hint::black_box;
use std::num::NonZeroU32;

use outcore::policy::{PageId, PageIndex, SegmentId};
use outcore_lab::sim::{AnyPolicy, Trace};
use outcore_pager::ids::SegmentClass;
use outcore_pager::policy::Policy;
use outcore_pager::policy::bare::BareCache;
use serde_json::json;
use support::{Random, Spread};

fn page(number: u32) -> PageId {
    PageId { segment: SegmentId::new(0), index: PageIndex::new(number) }
}

/// Nanoseconds of the processor for each of `uses`, since `start`.
fn nanos(start: f64, uses: usize) -> f64 {
    (support::cpu_seconds() - start) * 1e9 / uses as f64
}

fn full(kind: AnyPolicy, pages: u32) -> Box<dyn Policy> {
    let mut policy = kind.build();
    policy.resize(pages, 0, 0);
    policy.segment(SegmentId::new(0), pages);
    for number in 0..pages {
        policy.accessed(page(number));
        policy.inserted(page(number));
    }
    policy
}

fn hits(policy: &mut dyn Policy, order: &[u32]) -> f64 {
    let start = support::cpu_seconds();
    for number in order {
        policy.accessed(page(*number));
    }
    nanos(start, order.len())
}

/// Nanoseconds for each use of a cycle over more pages than fit, whose order is declared.
fn cycle(kind: AnyPolicy, frames: u32, uses: usize) -> f64 {
    let pages: Vec<PageId> = (0..frames + frames / 4).map(page).collect();
    let mut cache = BareCache::new(kind.build(), frames);
    cache.segment(SegmentId::new(0), SegmentClass::Weights, pages.len() as u32);
    cache.declare(&pages);
    // Frames fill in the first pass.
    for page in &pages {
        cache.used(*page, false).unwrap();
    }
    let start = support::cpu_seconds();
    for page in pages.iter().cycle().take(uses) {
        black_box(cache.used(*page, false).unwrap());
    }
    nanos(start, uses)
}

/// Hit ratio and nanoseconds.
fn misses(kind: AnyPolicy, trace: &mut Trace, frames: u32) -> (f64, f64) {
    let policy = kind.build();
    let start = support::cpu_seconds();
    let counts = trace.replay(policy, NonZeroU32::new(frames).unwrap(), &mut |_| ()).unwrap();
    (counts.hit_ratio(), nanos(start, counts.uses as usize))
}

fn main() {
    let pages: u32 = support::param("pages", "1000000");
    let uses: usize = support::param("uses", "2000000");
    let rounds: usize = support::param("rounds", "5");
    let only: String = support::param("policy", "all");
    let hardware = support::hardware(&support::dir());
    let mut random = Random::new(1);
    let order: Vec<u32> = (0..uses).map(|_| (random.next() % u64::from(pages)) as u32).collect();
    // A random number below another random number: small ones are likelier.
    let skewed = |random: &mut Random| {
        let most = 4 * u64::from(pages);
        let end = random.next() % most + 1;
        random.next() % end
    };
    let mut trace = Trace::from_ids((0..uses * 2).map(|_| skewed(&mut random))).unwrap();
    println!("ns of the processor for a use of {pages} pages: median [least - most] of {rounds} rounds; {hardware}");
    println!(
        "  {:10} {:30} {:30} {:9} {:30}",
        "policy", "hits", "skewed, with misses", "hit ratio", "a declared cycle"
    );
    let mut results = serde_json::Map::new();
    let mut memory = vec![0u64; pages as usize];
    let reads: Vec<f64> = (0..rounds)
        .map(|_| {
            let start = support::cpu_seconds();
            for number in &order {
                memory[*number as usize] += 1;
            }
            black_box(&memory);
            nanos(start, order.len())
        })
        .collect();
    let reads = Spread::of(&reads);
    println!("  {:10} {reads:.1}", "an array");
    for kind in AnyPolicy::all(&[]).filter(|kind| only == "all" || only == kind.name()) {
        let mut policy = full(kind, pages);
        let (mut hit, mut miss, mut cyclic, mut ratio) = (Vec::new(), Vec::new(), Vec::new(), 0.0);
        for _ in 0..rounds {
            hit.push(hits(&mut *policy, &order));
            let (found, ns) = misses(kind, &mut trace, pages);
            ratio = found;
            miss.push(ns);
            cyclic.push(cycle(kind, pages, uses));
        }
        let [hit, miss, cyclic] = [&hit, &miss, &cyclic].map(|ns| Spread::of(ns));
        println!("  {:10} {hit:.1} {miss:.1} {ratio:.4}    {cyclic:.1}", kind.name());
        results.insert(
            kind.name().to_owned(),
            json!({
                "hit_ns": hit.json(),
                "skewed_ns": miss.json(),
                "skewed_hit_ratio": ratio,
                "cycle_ns": cyclic.json(),
            }),
        );
    }
    support::json_line(
        "policies",
        &hardware,
        json!({ "pages": pages, "array_ns": reads.json(), "policies": results, "goal_ns": 100 }),
    );
}
