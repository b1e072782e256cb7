//! How much of the transfers hides behind compute? A modelled link carries every page; the caller computes for a fixed
//! time on each. eta = (serial - measured) / (serial - ideal), where serial is compute plus transfer and ideal the
//! larger of the two.
//!
//! Parameters: `--size` (128MiB), `--budget` (32MiB), `--page` (2MiB), `--link` bytes per second (200MB), `--rounds`
//! (5), `--dir`. The link has to be slower than the disk.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::time::Duration;

use outcore::device::LinkModel;
use outcore::{Bytes, PageSize, Plan, PolicyKind, Runtime, Tensor};
use serde_json::json;
use support::{Random, Spread};

/// Seconds of a pass, those of its compute, and the bytes that crossed the link.
fn pass(runtime: &Runtime, tensors: &[Tensor], each: Duration) -> (f64, f64, u64) {
    let before = runtime.stats().traffic.link_in;
    let (seconds, computed) = support::pass(runtime, tensors, each);
    (seconds, computed, runtime.stats().traffic.link_in.saturating_sub(before).get())
}

fn main() {
    let size: Bytes = support::param("size", "128MiB");
    let budget: Bytes = support::param("budget", "32MiB");
    let page = PageSize::new(support::param("page", "2MiB")).unwrap();
    let bandwidth: Bytes = support::param("link", "200MB");
    let rounds: usize = support::param("rounds", "5");
    let dir = support::dir();
    let hardware = support::hardware(&dir);
    let count = size.get() / page.bytes();
    let file = support::model(&dir, count, page.bytes(), page.bytes());
    let link = LinkModel::new(bandwidth, Duration::from_micros(10), true).unwrap();
    let page_time = link.time_of(page.bytes()).as_secs_f64();

    let runtime =
        Runtime::builder().device_budget(budget).page_size(page).policy(PolicyKind::Plan).link(link).open().unwrap();
    let model = runtime.open_model(&file.0).unwrap();
    let tensors: Vec<Tensor> = (0..count).map(|n| model.tensor(&format!("t{n}")).unwrap()).collect();
    runtime.plan(Plan::Cycle(&tensors));
    pass(&runtime, &tensors, Duration::ZERO);
    // What a settled pass transfers decides how much compute makes each ratio.
    let (_, _, bytes) = pass(&runtime, &tensors, Duration::from_secs_f64(page_time));
    let transfer = bytes as f64 / page.bytes() as f64 * page_time;

    let ratios = [0.5, 1.0, 2.0];
    let mut etas = vec![Vec::new(); ratios.len()];
    let mut shown = vec![(0.0, 0.0, 0.0); ratios.len()];
    let mut random = Random::new(3);
    for _ in 0..rounds {
        let mut order = [0, 1, 2];
        random.shuffle(&mut order);
        for at in order {
            let each = Duration::from_secs_f64(ratios[at] * transfer / count as f64);
            // The first pass after a change of pace settles what is ahead.
            pass(&runtime, &tensors, each);
            let (measured, computed, bytes) = pass(&runtime, &tensors, each);
            let transfer = bytes as f64 / page.bytes() as f64 * page_time;
            let (serial, ideal) = (computed + transfer, computed.max(transfer));
            etas[at].push((serial - measured) / (serial - ideal));
            shown[at] = (computed, transfer, measured);
        }
    }
    println!(
        "overlap on a link of {bandwidth}/s, {size} through {budget} in pages of {}, {rounds} rounds; {hardware}",
        Bytes::new(page.bytes())
    );
    let mut results = Vec::new();
    for (at, ratio) in ratios.iter().enumerate() {
        let eta = Spread::of(&etas[at]);
        let (computed, transfer, measured) = shown[at];
        println!(
            "  compute:transfer {ratio:3.1}   eta {eta:.3}   (last: compute {computed:.3} s, transfer {transfer:.3} s, \
             pass {measured:.3} s)"
        );
        results.push(json!({ "ratio": ratio, "eta": eta.json(), "compute_s": computed, "transfer_s": transfer,
            "pass_s": measured }));
    }
    drop((tensors, model));
    runtime.close().unwrap();
    support::json_line(
        "overlap",
        &hardware,
        json!({ "link_bytes_per_second": bandwidth.get(), "results": results,
        "goal": 0.95 }),
    );
}
