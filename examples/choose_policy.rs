//! Which policy suits a program: `cargo run --release --example choose_policy`.
//!
//! The program runs once and records which pages it used. Every policy is tried on that record, beside the best
//! possible. The program then runs again under the policy that won, which shows whether the record predicted its hits.

use std::num::NonZeroU32;

use outcore::{Bytes, DType, Lookahead, PageSize, PolicyKind, Result, Runtime};
use outcore_lab::sim::{Counts, Trace};

const PAGE: u64 = 64 << 10;
const FRAMES: NonZeroU32 = NonZeroU32::new(96).unwrap();

fn main() -> Result<()> {
    let (mut trace, lru) = run(PolicyKind::Lru)?;
    println!("{} pages, {} uses, {FRAMES} frames", trace.pages(), trace.uses());

    // `plan` needs a declared order or a cycle, so it is not a choice for every program.
    let mut tried = Vec::new();
    for kind in PolicyKind::ALL.into_iter().filter(|kind| *kind != PolicyKind::Plan) {
        tried.push((kind, trace.replay(kind.build(), FRAMES, &mut |_| ())?));
    }
    tried.sort_by_key(|(_, counts)| counts.misses());
    let best_of_all = trace.optimum(FRAMES, &mut |_| ())?;
    print("opt", best_of_all, best_of_all);
    for (kind, counts) in &tried {
        print(&kind.to_string(), *counts, best_of_all);
    }

    let (kind, forecast) = tried[0];
    let (_, seen) = run(kind)?;
    println!("\nlru, as it ran: {:.1} % hits", 100.0 * lru);
    println!("{kind}, as it ran: {:.1} % hits, forecast {:.1} %", 100.0 * seen, 100.0 * forecast.hit_ratio());
    Ok(())
}

fn print(name: &str, counts: Counts, best: Counts) {
    let more = counts.misses() as f64 / best.misses() as f64;
    println!("{name:>9} {:5.1} % hits, {more:.2} times the fills of the best", 100.0 * counts.hit_ratio());
}

/// Runs the program under a policy: what it used, and the ratio of hits.
fn run(policy: PolicyKind) -> Result<(Trace, f64)> {
    // Nothing is filled ahead, so that only what stays resident is compared.
    let rt = Runtime::builder()
        .page_size(PageSize::new(Bytes::new(PAGE))?)
        .device_budget(Bytes::new(PAGE * u64::from(FRAMES.get())))
        .lookahead(Lookahead::Off)
        .policy(policy)
        .keep_uses(true)
        .open()?;
    program(&rt)?;
    let (uses, stats) = (rt.observe().take_uses(), rt.stats());
    rt.close()?;
    assert_eq!(uses.dropped, 0, "a longer run takes its uses from time to time");
    let id = |page: &outcore::policy::PageId| u64::from(page.segment.get()) << 32 | u64::from(page.index.get());
    Ok((Trace::from_ids(uses.uses.iter().map(|used| id(&used.page)))?, stats.hit_ratio()))
}

/// Stands for your program: in each step, a sweep over some weights, and look-ups in a table of which some rows are in
/// demand.
fn program(rt: &Runtime) -> Result<()> {
    let weights = rt.alloc(DType::U8, &[32, PAGE])?;
    let table = rt.alloc(DType::U8, &[256, PAGE])?;
    let mut sum = 0_u64;
    let mut use_row = |tensor: &outcore::Tensor, row: u64| -> Result<()> {
        let piece = tensor.rows(row..row + 1)?;
        sum += u64::from(rt.pin(&piece).wait()?.bytes()[0]);
        Ok(())
    };
    let mut place = 0.0_f64;
    for _ in 0..60 {
        for row in 0..32 {
            use_row(&weights, row)?;
        }
        for _ in 0..64 {
            // The golden ratio's multiples are spread evenly; their cubes crowd at the table's beginning.
            place = (place + 0.618_033_988_749_895).fract();
            use_row(&table, (place.powi(3) * 256.0) as u64)?;
        }
    }
    assert_eq!(sum, 0, "what was never written is zero");
    Ok(())
}
