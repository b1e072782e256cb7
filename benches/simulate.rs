//! Is a simulated machine like a real one, and how large may it be?
//!
//! - `reality`: passes on the host device behind a modelled link, and simulated passes with the same model, budget,
//!   page size, policy and compute. The result is the ratio of their seconds. The disk's latency and rate are measured
//!   first, by the runtime itself. For policy `plan`, also what `outcore plan` forecasts for as many bytes.
//! - `scale`: one pass of a trillion parameters in 10^7 pages over eight simulated GPUs: seconds and memory.
//! - `faults`: processor time of a fault in the pager, from 10^3 to 10^7 pages.
//!
//! Parameters: `--part` (all, or one of these), `--size` (128MiB), `--link` bytes per second (200MB), `--rounds` (3),
//! `--dir`. The link has to be slower than the disk.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::fs;
use std::num::NonZeroU32;
use std::path::Path;
use std::time::{Duration, Instant};

use outcore::device::LinkModel;
use outcore::policy::{PageIndex, SegmentClass, SegmentId};
use outcore::store::QueueDepth;
use outcore::{Bytes, DType, Lookahead, PageSize, Plan, PolicyKind, Runtime, Tensor, format};
use outcore_lab::planning::{self, Bandwidth, Compute, Given, Job, KvType, Parameters, Resources, Shape, Work};
use outcore_lab::sim::{
    AnyPolicy, Baseline, ComputeModel, DiskModel, Even, MachineModel, Settings, Workload, simulate,
};
use outcore_pager::{Backing, Effects, PageRun, PageWord, Pager, PagerConfig, Purpose};
use serde_json::{Value, json};
use support::{Spread, pass};

fn tensors_of(runtime: &Runtime, path: &Path, count: u64) -> Vec<Tensor> {
    let model = runtime.open_model(path).unwrap();
    (0..count).map(|n| model.tensor(&format!("t{n}")).unwrap()).collect()
}

/// What the disk does for a runtime without a link: its rate when it streams, and what a single page takes beyond that.
fn disk(path: &Path, count: u64, page: PageSize) -> DiskModel {
    let seconds = |lookahead: Lookahead, policy: PolicyKind| {
        let budget = Bytes::new(16 * page.bytes());
        let runtime = Runtime::builder()
            .device_budget(budget)
            .page_size(page)
            .policy(policy)
            .lookahead(lookahead)
            .open()
            .unwrap();
        let tensors = tensors_of(&runtime, path, count);
        if policy == PolicyKind::Plan {
            runtime.plan(Plan::Cycle(&tensors));
        }
        let passes: Vec<f64> = (0..4).map(|_| pass(&runtime, &tensors, Duration::ZERO).0).collect();
        let pages = runtime.stats().pager.fills_disk as f64 / 4.0;
        drop(tensors);
        runtime.close().unwrap();
        Spread::of(&passes).median / pages
    };
    let streamed = seconds(Lookahead::Auto, PolicyKind::Plan);
    let alone = seconds(Lookahead::Off, PolicyKind::Lru);
    let read = Bytes::new((page.bytes() as f64 / streamed) as u64);
    let latency = Duration::from_secs_f64((alone - streamed).max(0.0));
    DiskModel { read, write: read, latency, depth: QueueDepth::DEFAULT }
}

/// Seconds of a pass that `outcore plan` forecasts for a model of `size` bytes with `room` bytes for its weights.
fn forecast(size: Bytes, room: Bytes, link: LinkModel, disk: DiskModel, computed: f64) -> f64 {
    let given = Given::new(Parameters::new(size.get()).unwrap(), DType::U8);
    let shape = Shape::estimate(&given).unwrap();
    let job = Job { shape, work: Work::Infer { kv: KvType::F16 }, context: 1, batch: 1, headroom_percent: 0 };
    let memory = job.memory(true).unwrap();
    assert_eq!(memory.weights, size);
    let resources = Resources {
        device: room + memory.activations + memory.scratch + memory.kv,
        host: Bytes::ZERO,
        disk: Bandwidth::new(disk.read).unwrap(),
        disk_write: None,
        disk_latency: disk.latency,
        disk_depth: disk.depth,
        link: Some(Bandwidth::new(link.bandwidth()).unwrap()),
        link_shared: false,
        link_latency: link.latency(),
        compute: Some(Compute::Seconds(computed)),
    };
    planning::forecast(&job, &resources).unwrap().run.unwrap().pass_s().unwrap()
}

struct Point {
    page: Bytes,
    /// Frames, in percent of the model's pages.
    budget: u64,
    policy: AnyPolicy,
    /// Pages of a tensor. Each step uses one tensor.
    tensor: u64,
    /// Compute of a step, as a multiple of the time that its pages take on the link.
    ratio: f64,
}

fn points() -> Vec<Point> {
    let mut points = Vec::new();
    for page in [Bytes::mib(1), Bytes::mib(2)] {
        for budget in [25, 60] {
            for (policy, ratio) in [(PolicyKind::Plan, 0.2), (PolicyKind::Plan, 1.0), (PolicyKind::Lru, 0.2)] {
                points.push(Point { page, budget, policy: policy.into(), tensor: 1, ratio });
            }
        }
    }
    let policies = [PolicyKind::Plan.into(), Baseline::Mru.into(), PolicyKind::S3Fifo.into()];
    for (policy, ratio) in policies.into_iter().zip([0.5, 0.5, 0.0]) {
        points.push(Point { page: Bytes::mib(1), budget: 40, policy, tensor: 3, ratio });
    }
    points
}

fn reality(size: Bytes, bandwidth: Bytes, rounds: usize) -> Value {
    let dir = support::dir();
    let link = LinkModel::new(bandwidth, Duration::from_micros(10), true).unwrap();
    println!(
        "simulated over measured seconds a pass: {size} over a link of {bandwidth}/s, {rounds} rounds of a median"
    );
    println!(
        "  page     budget  policy  pages a step  compute  measured s                       simulated s   ratio  to the least  forecast"
    );
    let (mut results, mut ratios, mut forecasts, mut disks) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for point in points() {
        let page = PageSize::new(point.page).unwrap();
        let len = point.tensor * page.bytes();
        let count = size.get() / len;
        let file = support::model(&dir, count, len, page.bytes());
        // Measured beside each point, since a shared disk changes. In the probe's file each tensor is one page.
        let probed = support::model(&dir, size.get() / page.bytes(), page.bytes(), page.bytes());
        let disk = disk(&probed.0, size.get() / page.bytes(), page);
        drop(probed);
        disks.push(disk);
        let budget = Bytes::new(size.get() / page.bytes() * point.budget / 100 * page.bytes());
        let each = link.time_of(len).mul_f64(point.ratio);
        let builder = Runtime::builder().device_budget(budget).page_size(page).link(link);
        let runtime = point.policy.set_on(builder).open().unwrap();
        let tensors = tensors_of(&runtime, &file.0, count);
        runtime.plan(Plan::Cycle(&tensors));
        for _ in 0..2 {
            pass(&runtime, &tensors, each);
        }
        let measured: Vec<(f64, f64)> = (0..rounds).map(|_| pass(&runtime, &tensors, each)).collect();
        drop(tensors);
        runtime.close().unwrap();
        // A sleep takes longer than asked for. The machine does that, so the simulation is given the measured time.
        let computed = Spread::of(&measured.iter().map(|(_, computed)| *computed).collect::<Vec<_>>()).median;
        let measured = Spread::of(&measured.iter().map(|(seconds, _)| *seconds).collect::<Vec<_>>());
        let machine = MachineModel {
            name: "this one".to_owned(),
            devices: NonZeroU32::MIN,
            device_memory: budget,
            host_memory: Bytes::ZERO,
            unified_memory: false,
            link: Some(link),
            disk,
            compute: ComputeModel {
                bandwidth: Bytes::new(1 << 60),
                flops: None,
                step: Duration::from_secs_f64(computed / count as f64),
            },
            jitter: 0.0,
        };
        let settings = Settings {
            policy: point.policy,
            page_size: page,
            step_pages: Some(NonZeroU32::MAX),
            passes: NonZeroU32::new(rounds as u32 + 3).unwrap(),
            ..Settings::new(budget, Bytes::ZERO)
        };
        let workload = Workload::of_model(&format::open(&file.0).unwrap(), None).unwrap();
        let simulated = simulate(&workload, &machine, &settings).unwrap().median().as_secs_f64();
        let ratio = simulated / measured.median;
        // Other work on the machine can only make a pass longer.
        let of_least = simulated / measured.least;
        let forecast = (point.policy == PolicyKind::Plan.into())
            .then(|| forecast(size, budget, link, disk, computed) / measured.median);
        forecasts.extend(forecast);
        let told = forecast.map_or_else(String::new, |forecast| format!("{forecast:.3}"));
        println!(
            "  {:7}  {:4} %  {:7} {:12}  {:7.2}  {measured:.3}  {simulated:13.3}  {ratio:6.3}  {of_least:6.3}  {told:>12}",
            point.page.to_string(),
            point.budget,
            point.policy.name(),
            point.tensor,
            point.ratio
        );
        ratios.push(ratio);
        results.push(json!({ "page_bytes": point.page.get(), "budget_percent": point.budget,
            "policy": point.policy.name(), "pages_a_step": point.tensor, "compute_ratio": point.ratio,
            "measured_s": measured.json(), "simulated_s": simulated, "ratio": ratio,
            "ratio_to_least": of_least, "forecast_ratio": forecast }));
    }
    let within = ratios.iter().filter(|ratio| (**ratio - 1.0).abs() <= 0.05).count();
    let worst = ratios.iter().map(|ratio| (ratio - 1.0).abs()).fold(0.0, f64::max);
    let near = forecasts.iter().filter(|ratio| (**ratio - 1.0).abs() <= 0.1).count();
    let rates: Vec<f64> = disks.iter().map(|disk| disk.read.get() as f64 / 1e9).collect();
    println!(
        "  within 5 %: {within} of {}; the worst is {:.1} % off; disk {:.2} GB/s",
        ratios.len(),
        100.0 * worst,
        Spread::of(&rates)
    );
    println!("  forecasts within 10 %: {near} of {}: {:.3}", forecasts.len(), Spread::of(&forecasts));
    json!({ "points": results, "within_5_percent": within, "worst": worst, "goal": 0.05,
        "forecasts_within_10_percent": near, "forecasts": forecasts.len(),
        "disk_gb_s": Spread::of(&rates).json() })
}

/// The most memory this process has had, in bytes.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

fn scale() -> Value {
    const PAGES: u64 = 10_000_000;
    let page = Bytes::kib(256);
    let params = PAGES * page.get() / 2;
    let model = Even { params, dtype: DType::BF16, layers: 64, experts: Some((256, 256)) };
    let workload = Workload::even(model).unwrap();
    let machine = MachineModel::named("dgx-h200").unwrap();
    let settings = Settings {
        page_size: PageSize::new(page).unwrap(),
        passes: NonZeroU32::MIN,
        steps_ahead: 1,
        ..Settings::new(Bytes::gib(100), Bytes::gib(1000))
    };
    let (start, cpu) = (Instant::now(), support::cpu_seconds());
    let done = simulate(&workload, &machine, &settings).unwrap();
    let (seconds, cpu, peak) = (start.elapsed().as_secs_f64(), support::cpu_seconds() - cpu, peak());
    println!(
        "  {:.2e} parameters in {} pages on 8 GPUs: a pass of {:.1} s takes {seconds:.1} s, {cpu:.1} s of the processor, \
         and {}; {} events, {} faults",
        params as f64,
        done.pages,
        done.first().as_secs_f64(),
        Bytes::new(peak),
        done.events,
        done.pager.uses - done.pager.hits
    );
    json!({ "parameters": params, "pages": done.pages, "devices": 8, "seconds": seconds, "cpu_s": cpu, "peak_bytes": peak,
        "events": done.events, "pass_s": done.first().as_secs_f64(), "goal_s": 60, "goal_bytes": 4u64 << 30 })
}

fn fault(pager: &mut Pager, fx: &mut Effects, words: &[PageWord], index: u32) {
    let page = PageRun { segment: SegmentId::new(0), first: PageIndex::new(index), count: 1 };
    pager.submit(&[page], Purpose::Read, fx).unwrap();
    while let Some(planned) = fx.moves.pop() {
        pager.complete(planned.id, Ok(()), fx);
    }
    *fx = Effects::default();
    let _ = words[index as usize].unpin();
}

/// Processor nanoseconds for each fault of a cycle of `pages` through half as many frames. With a plan there is about
/// one hit for each fault, and its cost is included. With LRU there are no hits.
fn fault_nanos(policy: PolicyKind, pages: u32, rounds: usize) -> Spread {
    // At least two cycles, because the faults of one cycle come all in a row.
    let uses = (2 * pages as usize).max(800_000);
    let config =
        PagerConfig { frames: pages / 2, host_frames: 0, staging: 0, direct_io: true, lookahead: 0, page_bytes: 4096 };
    let mut pager = Pager::new(config, policy.build());
    let (segment, words) = pager.add_segment(Backing::File, SegmentClass::Weights, pages);
    let mut fx = Effects::default();
    if policy == PolicyKind::Plan {
        pager.declare_plan(&[PageRun { segment, first: PageIndex::new(0), count: pages }], true, &mut fx);
    }
    let mut order = (0..pages).cycle();
    order.by_ref().take(2 * pages as usize).for_each(|index| fault(&mut pager, &mut fx, &words, index));
    let mut round = || {
        let before = pager.stats().faults;
        let start = support::cpu_seconds();
        order.by_ref().take(uses).for_each(|index| fault(&mut pager, &mut fx, &words, index));
        (support::cpu_seconds() - start) * 1e9 / (pager.stats().faults - before) as f64
    };
    Spread::of(&(0..rounds).map(|_| round()).collect::<Vec<_>>())
}

fn faults(rounds: usize) -> Value {
    println!(
        "  ns of the processor for a fault, half of the pages resident; the last column is over that of 10^3 pages"
    );
    let mut results = Vec::new();
    for policy in [PolicyKind::Plan, PolicyKind::Lru] {
        let mut least = None;
        for power in 3..=7 {
            let pages = 10u32.pow(power);
            let nanos = fault_nanos(policy, pages, rounds);
            let ratio = nanos.median / *least.get_or_insert(nanos.median);
            println!("  {:5} {pages:9} pages {nanos:.0}  {ratio:.2}", policy.name());
            results.push(json!({ "policy": policy.name(), "pages": pages, "ns": nanos.json(), "ratio": ratio }));
        }
    }
    json!({ "points": results, "goal_ratio": 1.3 })
}

fn main() {
    let part: String = support::param("part", "all");
    let size: Bytes = support::param("size", "128MiB");
    let link: Bytes = support::param("link", "200MB");
    let rounds: usize = support::param("rounds", "3");
    let hardware = support::hardware(&support::dir());
    let wanted = |name: &str| part == "all" || part == name;
    println!("simulated machines; {hardware}");
    // First, because the peak is that of the process so far.
    let scale = wanted("scale").then(scale);
    let faults = wanted("faults").then(|| faults(rounds));
    let reality = wanted("reality").then(|| reality(size, link, rounds));
    support::json_line("simulate", &hardware, json!({ "scale": scale, "faults": faults, "reality": reality }));
}
