//! How near to the disk's rate does a stream of pages come? A file is streamed through a small device budget with a
//! declared plan. In turns with that, in shuffled order, the store reads the same file raw, in the same blocks.
//!
//! Parameters: `--size` of the file (2GiB), `--budget` (256MiB), `--page` (2MiB), `--depth` of the raw reads (32),
//! `--rounds` (5), `--io` (auto), `--dir`.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use outcore::store::{QueueDepth, probe_file};
use outcore::{Bytes, IoBackend, PageSize, Plan, PolicyKind, Runtime, Tensor};
use serde_json::{Value, json};
use support::{Random, Spread, gib_s};

/// Rates in GiB/s and shares of a core, by round.
#[derive(Default)]
struct Series {
    rate: Vec<f64>,
    cpu: Vec<f64>,
}

impl Series {
    fn push(&mut self, bytes: u64, seconds: f64, cpu: f64) {
        self.rate.push(gib_s(bytes, seconds));
        self.cpu.push(cpu / seconds);
    }
    fn report(&self, name: &str) -> Value {
        let (rate, cpu) = (Spread::of(&self.rate), Spread::of(&self.cpu));
        println!("  {name:10} {rate:.2} GiB/s   {cpu:.2} of a core");
        json!({ "gib_per_second": rate.json(), "cores": cpu.json() })
    }
}

fn raw(path: &Path, io: IoBackend, page: PageSize, depth: QueueDepth, bytes: u64) -> (u64, f64, f64) {
    // A point reads at most 512 MiB.
    let points = bytes.div_ceil(Bytes::mib(512).get()) as usize;
    let block = [Bytes::new(page.bytes())];
    let probe = probe_file(path, io, &block, &vec![depth; points], Bytes::mib(512)).unwrap();
    let sum = |of: &dyn Fn(&outcore::store::ReadPoint) -> f64| probe.points.iter().map(of).sum::<f64>();
    (
        probe.points.iter().map(|point| point.bytes.get()).sum(),
        sum(&|point| point.elapsed.as_secs_f64()),
        sum(&|point| point.cpu.as_secs_f64()),
    )
}

fn stream(runtime: &Runtime, tensors: &[Tensor]) -> (u64, f64, f64) {
    let (before, cpu) = (runtime.stats().traffic.disk_read, support::cpu_seconds());
    let start = Instant::now();
    for tensor in tensors {
        drop(runtime.pin(tensor).wait().unwrap());
    }
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), support::cpu_seconds() - cpu);
    (runtime.stats().traffic.disk_read.saturating_sub(before).get(), seconds, cpu)
}

fn fio(path: &Path, page: PageSize, depth: QueueDepth) -> Option<f64> {
    let output = Command::new("fio")
        .args(["--name=r", "--ioengine=io_uring", "--direct=1", "--rw=read", "--runtime=5", "--output-format=json"])
        // The probe and the runtime do the same.
        .args(["--readonly", "--fixedbufs=1", "--registerfiles=1"])
        .arg(format!("--filename={}", path.display()))
        .args([format!("--bs={}", page.bytes()), format!("--iodepth={depth}")])
        .output()
        .ok()?;
    let report: Value = serde_json::from_slice(&output.stdout).ok()?;
    Some(report["jobs"][0]["read"]["bw_bytes"].as_f64()? / Bytes::gib(1).get() as f64)
}

fn main() {
    let size: Bytes = support::param("size", "2GiB");
    let budget: Bytes = support::param("budget", "256MiB");
    let page = PageSize::new(support::param("page", "2MiB")).unwrap();
    let depth = QueueDepth::new(support::param("depth", "32")).unwrap();
    let rounds: usize = support::param("rounds", "5");
    let io: IoBackend = support::param("io", "auto");
    let dir = support::dir();
    let hardware = support::hardware(&dir);
    let count = size.get() / page.bytes();
    let file = support::model(&dir, count, page.bytes(), page.bytes());

    let runtime =
        Runtime::builder().device_budget(budget).page_size(page).policy(PolicyKind::Plan).io(io).open().unwrap();
    let model = runtime.open_model(&file.0).unwrap();
    let tensors: Vec<Tensor> = (0..count).map(|n| model.tensor(&format!("t{n}")).unwrap()).collect();
    runtime.plan(Plan::Cycle(&tensors));
    // Frames are touched for the first time here.
    stream(&runtime, &tensors);

    let (mut raws, mut streams, mut fios) = (Series::default(), Series::default(), Vec::new());
    let mut ratios = Vec::new();
    let mut random = Random::new(2);
    for _ in 0..rounds {
        let mut order = [0, 1, 2];
        random.shuffle(&mut order);
        for what in order {
            match what {
                0 => {
                    let (bytes, seconds, cpu) = raw(&file.0, io, page, depth, size.get());
                    raws.push(bytes, seconds, cpu);
                }
                1 => {
                    let (bytes, seconds, cpu) = stream(&runtime, &tensors);
                    streams.push(bytes, seconds, cpu);
                }
                _ => fios.extend(fio(&file.0, page, depth)),
            }
        }
        ratios.push(streams.rate[streams.rate.len() - 1] / raws.rate[raws.rate.len() - 1]);
    }
    println!("{size} through {budget} in pages of {}, {rounds} rounds; {hardware}", Bytes::new(page.bytes()));
    let raw_report = raws.report("raw reads");
    let stream_report = streams.report("outcore");
    let fio_report = if fios.is_empty() {
        println!("  fio        not installed");
        Value::Null
    } else {
        let spread = Spread::of(&fios);
        println!("  fio        {spread:.2} GiB/s");
        spread.json()
    };
    let share = Spread::of(&streams.rate).median / Spread::of(&raws.rate).median;
    let ratio = Spread::of(&ratios);
    println!("  outcore / raw: {share:.3} of medians; by round {ratio:.3}; goal 0.95");
    let backend = runtime.stats().io.to_string();
    drop((tensors, model));
    runtime.close().unwrap();
    support::json_line(
        "disk_to_device",
        &hardware,
        json!({ "io": backend, "file_bytes": size.get(), "budget_bytes": budget.get(), "page_bytes": page.bytes(),
            "depth": depth.get(), "raw": raw_report, "outcore": stream_report, "fio_gib_per_second": fio_report,
            "share": share, "share_by_round": ratio.json(), "goal": 0.95, "goal_cores": 0.3 }),
    );
}
