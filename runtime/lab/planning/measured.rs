//! Forecasts beside passes that were measured: those of `docs/results` on 2 cores of an AMD EPYC, with a virtual disk.

use std::time::Duration;

use super::forecast::forecast_as;
use super::simulated::Extent;
use super::*;
use crate::ids::Bytes;
use crate::sim::MachineModel;
use crate::store::QueueDepth;
use outcore::DType;

/// A pass that was measured, and the forecast of it.
struct Point {
    what: String,
    measured_s: f64,
    run: Run,
}

impl Point {
    fn ratio(&self) -> f64 {
        self.run.pass_s().unwrap() / self.measured_s
    }
}

/// The table of `docs/planning.md`, one line a point.
fn table(points: &[Point]) -> String {
    let line = |point: &Point| {
        let Point { what, measured_s, run } = point;
        let [pass, measured] = [run.pass_s().unwrap(), *measured_s].map(|s| s * 1e3);
        let read = run.paged.disk_read.get() as f64 / 1e6;
        format!("| {what} | {pass:.0} | {measured:.0} | {:.2} | {read:.0} |\n", point.ratio())
    };
    points.iter().map(line).collect()
}

fn job(shape: Shape) -> Job {
    Job { shape, work: Work::Infer { kv: KvType::F16 }, context: 64, batch: 1, headroom_percent: 0 }
}

fn gb_s(rate: f64) -> Bandwidth {
    Bandwidth::new(Bytes::new((rate * 1e9) as u64)).unwrap()
}

/// Forecasts `job` with `room` bytes for pages.
fn forecast_with(job: &Job, room: u64, resources: Resources) -> Run {
    let memory = job.memory(resources.link.is_some()).unwrap();
    let device = Bytes::new(room) + memory.activations + memory.scratch + memory.kv;
    forecast(job, &Resources { device, ..resources }).unwrap().run.unwrap()
}

/// Passes over 128 MiB on the host device behind a modelled link of 200 MB/s and 10 us, from
/// `docs/results/2026-11-21-2-cores.md`: MiB of a page, percent of the pages with a frame, time of computing over the
/// time of all pages on the link, seconds. The disk gave 1.13 GB/s.
const BEHIND_A_LINK: [(u64, u64, f64, f64); 9] = [
    (1, 25, 0.2, 0.5446),
    (1, 25, 1.0, 0.6979),
    (1, 60, 0.2, 0.3230),
    (1, 60, 1.0, 0.6834),
    (2, 25, 0.2, 0.5529),
    (2, 25, 1.0, 0.6808),
    (2, 60, 0.2, 0.3206),
    (2, 60, 1.0, 0.6763),
    (1, 40, 0.5, 0.4371),
];

fn behind_a_link() -> Vec<Point> {
    let size = 128 << 20;
    let of = |(page, percent, computing, measured_s): (u64, u64, f64, f64)| {
        let job = job(Shape::estimate(&Given::new(Parameters::new(size).unwrap(), DType::U8)).unwrap());
        let pages = 128 / page;
        let resources = Resources {
            link: Some(gb_s(0.2)),
            link_latency: Duration::from_micros(10),
            compute: Some(Compute::Seconds(computing * (size as f64 / 200e6 + pages as f64 * 10e-6))),
            ..host(1.13)
        };
        let run = forecast_with(&job, (pages * percent / 100) * (page << 20), resources);
        Point { what: format!("{page} MiB, {percent} %, {computing}"), measured_s, run }
    };
    BEHIND_A_LINK.into_iter().map(of).collect()
}

/// A host without a link, with a disk of this rate in GB/s.
fn host(disk: f64) -> Resources {
    Resources {
        device: Bytes::ZERO,
        host: Bytes::ZERO,
        disk: gb_s(disk),
        disk_write: None,
        disk_latency: Duration::ZERO,
        disk_depth: QueueDepth::DEFAULT,
        link: None,
        link_shared: false,
        link_latency: Duration::ZERO,
        compute: None,
    }
}

/// A shape of the sizes that `make_model` gives the synthetic models of the results.
fn synthetic(used: u64, dtype: DType, [layers, hidden, ffn]: [u64; 3]) -> Shape {
    let shape = KnownModel::find("llama-3.2-1b").unwrap().shape(dtype);
    let used = Bytes::new(used);
    Shape { layers, hidden, heads: 32, kv_heads: 4, ffn, vocab: 32_000, weights: used, used, ..shape }
}

const Q8: &str = "1.24 GB Q8_0";
const BF16: &str = "1.3 GB bf16";
const SMOLLM2: &str = "SmolLM2-135M Q4_1";

fn model(name: &str) -> Shape {
    match name {
        Q8 => synthetic(1_136_765_056, DType::Q8_0, [22, 2048, 5632]),
        BF16 => synthetic(1_188_143_104, DType::BF16, [12, 2048, 5632]),
        // The file has its embedding, which is its output too, in another type than the rest.
        _ => {
            let used = Bytes::new(96_577_920);
            let shape = KnownModel::find("smollm2-135m").unwrap().shape(DType::Q4_1);
            Shape { weights: used, used, ..shape }
        }
    }
}

/// Passes of `generate` in a memory cgroup, of the three runs whose results there are (`docs/results` has the newest,
/// its history the others): the run's commit; the model; bytes of pages; the disk's GB/s; tokens a second with
/// everything resident, and as measured.
const ON_THE_HOST: [(&str, &str, u64, f64, f64, f64); 12] = [
    ("e43a734", Q8, 641_800_000, 1.979, 11.11, 3.606),
    ("e43a734", Q8, 935_800_000, 1.979, 11.11, 7.615),
    ("e43a734", BF16, 965_000_000, 2.298, 20.34, 6.409),
    ("e43a734", SMOLLM2, 85_000_000, 1.916, 71.21, 37.24),
    ("6f3558d", Q8, 641_800_000, 2.291, 13.17, 4.255),
    ("6f3558d", Q8, 935_800_000, 2.291, 13.17, 8.307),
    ("6f3558d", BF16, 965_000_000, 2.582, 18.77, 9.104),
    ("6f3558d", SMOLLM2, 85_000_000, 1.886, 69.60, 32.36),
    ("644acba", Q8, 641_800_000, 2.620, 12.32, 4.114),
    ("644acba", Q8, 935_800_000, 2.620, 12.32, 8.863),
    ("644acba", BF16, 965_000_000, 2.176, 18.23, 8.338),
    ("644acba", SMOLLM2, 85_000_000, 2.041, 77.34, 36.22),
];

/// Passes of `generate` in a memory cgroup, of one day, with everything recorded: the model; bytes of pages that the
/// runtime held; the disk's GB/s by `outcore probe`, whose latency was 202 us, the median of the six times that the
/// runtime had measured it; milliseconds of a pass with everything resident, and in that room;
/// medians of three rounds in turns.
const RECORDED: [(&str, u64, f64, f64, f64); 6] = [
    (SMOLLM2, 67_372_248, 2.598, 9.84, 21.45),
    (SMOLLM2, 86_719_376, 2.598, 9.84, 17.97),
    (Q8, 649_056_524, 2.680, 64.9, 223.5),
    (Q8, 942_797_313, 2.680, 64.9, 104.7),
    (BF16, 691_103_356, 2.475, 66.0, 226.3),
    (BF16, 999_640_455, 2.475, 66.0, 103.9),
];

fn recorded() -> Vec<Point> {
    let of = |(name, room, disk, resident, streamed): (&str, u64, f64, f64, f64)| {
        let compute = Some(Compute::Seconds(resident / 1e3));
        let resources = Resources { compute, disk_latency: Duration::from_micros(202), ..host(disk) };
        let what = format!("recorded, {name}, {} MB", room / 1_000_000);
        Point { what, measured_s: streamed / 1e3, run: forecast_with(&job(model(name)), room, resources) }
    };
    RECORDED.into_iter().map(of).collect()
}

fn on_the_host() -> Vec<Point> {
    let of = |(run, name, room, disk, resident, streamed): (&str, &str, u64, f64, f64, f64)| {
        let resources = Resources { compute: Some(Compute::Seconds(1.0 / resident)), ..host(disk) };
        let what = format!("{run}, {name}, {} MB", room / 1_000_000);
        Point { what, measured_s: 1.0 / streamed, run: forecast_with(&job(model(name)), room, resources) }
    };
    ON_THE_HOST.into_iter().map(of).collect()
}

/// Another day, the disk at about 5.5 GB/s: bytes of pages, the disk's time over that of computing, the pass over the
/// longer of the two.
const FAST_DISK: [(u64, f64, f64); 3] = [(441_800_000, 3.0, 1.10), (641_800_000, 1.6, 1.40), (935_800_000, 0.8, 1.22)];

fn fast_disk() -> Vec<Point> {
    let of = |(room, times, pass): (u64, f64, f64)| {
        let job = job(model(Q8));
        let disk_s = (job.shape.used.get() - room) as f64 / 5.5e9;
        let compute_s = disk_s / times;
        let resources = Resources { compute: Some(Compute::Seconds(compute_s)), ..host(5.5) };
        let what = format!("disk of 5.5 GB/s, {} MB", room / 1_000_000);
        Point { what, measured_s: pass * disk_s.max(compute_s), run: forecast_with(&job, room, resources) }
    };
    FAST_DISK.into_iter().map(of).collect()
}

/// Points that are more than a tenth off. `docs/planning.md` has the reasons.
const FAR: [&str; 6] = [
    "e43a734, 1.3 GB bf16, 965 MB",
    "e43a734, SmolLM2-135M Q4_1, 85 MB",
    "6f3558d, SmolLM2-135M Q4_1, 85 MB",
    "644acba, SmolLM2-135M Q4_1, 85 MB",
    "disk of 5.5 GB/s, 641 MB",
    "recorded, SmolLM2-135M Q4_1, 86 MB",
];

#[test]
fn forecasts_are_near_what_was_measured() {
    let points = [behind_a_link(), on_the_host(), fast_disk(), recorded()];
    let points: Vec<Point> = points.into_iter().flatten().collect();
    let table = table(&points);
    println!("{table}");
    for point in &points {
        let near = (point.ratio() - 1.0).abs() <= 0.1;
        assert_eq!(near, !FAR.contains(&&*point.what), "{}: {:.3}\n{table}", point.what, point.ratio());
    }
    // Bytes do not depend on other work: what was read in a pass at 1000 and 700 MB.
    for (room, measured) in [(935_800_000, 230e6), (641_800_000, 538e6)] {
        let read = forecast_with(&job(model(Q8)), room, host(2.0)).paged.disk_read.get() as f64;
        assert!((read / measured - 1.0).abs() < 0.05, "{room}: {read}");
    }
}

/// A part of a job takes as large a part of the time, and moves as large a part of the bytes, as the whole job does.
#[test]
fn a_part_is_as_the_whole() {
    let of = |name: &str| Resources::of(&MachineModel::named(name).unwrap()).unwrap();
    let (gpu, laptop) = (of("rtx4090"), of("laptop"));
    let train = Work::Train { optimizer: Optimizer::AdamMixed, checkpointing: Checkpointing::Full };
    let infer = Work::Infer { kv: KvType::F16 };
    // The model, its work, the sequences; the resources, GiB of the device and of the host; how far off it may be.
    let cases = [
        ("llama-3.1-8b", infer, 1, gpu, 5, 64, 0.02),
        ("llama-3.1-8b", infer, 1, gpu, 5, 0, 0.02),
        ("qwen3-32b", infer, 1, laptop, 8, 0, 0.02),
        ("smollm2-1.7b", train, 1, gpu, 12, 8, 0.1),
        // What moves depends on what has been learnt of the classes, or on what is drawn.
        ("llama-3.1-8b", infer, 64, gpu, 9, 16, 0.15),
        ("mixtral-8x7b", infer, 1, gpu, 16, 64, 0.12),
        ("mixtral-8x7b", infer, 4, gpu, 8, 12, 0.12),
        ("qwen3-30b-a3b", infer, 1, laptop, 12, 0, 0.12),
    ];
    for (name, work, batch, resources, device, host, within) in cases {
        let dtype = if work == infer { DType::Q4_K } else { DType::BF16 };
        let shape = KnownModel::find(name).unwrap().shape(dtype);
        let job = Job { shape, work, context: 1024, batch, headroom_percent: 20 };
        let resources = Resources { device: Bytes::gib(device), host: Bytes::gib(host), ..resources };
        let [part, whole] = [Extent::Usual, Extent::Whole].map(|extent| {
            let run = forecast_as(&job, &resources, extent).unwrap().run.unwrap();
            assert!(!run.is_resident(), "{name}");
            let moved = [run.paged.filled, run.paged.copied_down, run.paged.disk_read, run.paged.disk_written];
            (run.pass_s().unwrap(), moved.map(|bytes| bytes.get() as f64), run.paged.used.get() as f64)
        });
        println!("{name} {batch}: {part:?} {whole:?}");
        assert!((part.0 / whole.0 - 1.0).abs() < within, "{name}: {part:?} {whole:?}");
        let off = part.1.iter().zip(whole.1).map(|(part, whole)| (part - whole).abs()).fold(0.0, f64::max);
        assert!(off < within * whole.2, "{name}: {part:?} {whole:?}");
    }
}
