//! Steps of AdamW over parameters, moments and gradients that are paged. Larger than the budget: how near do they come
//! to the disk's mixed rate, how many bytes do they move beside the formula, and what does a commit after each add? In
//! memory: how near do they come to a loop over the same bytes?
//!
//! In turns in each round: the store's raw mixed reads and writes of pages; a step in the scratch file; a step in a
//! durable folder; a step and a commit in another. Then, in memory, a loop that reads four arrays and writes three, and
//! a step.
//!
//! Parameters: `--parameters` in units of 2^20 (128), `--budget` (256MiB), `--page` (2MiB), `--lookahead` (auto),
//! `--resident` parameters of the part in memory in the same units (8; 0 leaves it out), `--raw` bytes of a raw run
//! (1GiB), `--depth` of it (16), `--rounds` (7), `--ways` of a step (scratch,durable,commits), `--dir`. The disk takes
//! 66 bytes for each parameter in all three ways, besides the raw run; 26 in a durable folder. It says so first, and
//! all is gone behind it.
//!
//! A step moves 26 bytes a parameter where memory keeps nothing: 12 of parameters and moments and 2 of gradients are
//! read, 12 are written. What stays in memory from one step to the next need not be read: the budget, less what is read
//! ahead and what threads update.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

#[path = "support/raw.rs"]
mod raw;
mod support;

use std::path::Path;
use std::time::Instant;

use outcore::durable::DurableOptions;
use outcore::{Bytes, DType, Lookahead, PageSize, PolicyKind, Runtime};
use outcore_train::{AdamW, Group, Optimizer, Schedule};
use raw::Raw;
use serde_json::{Value, json};
use support::{Spread, dir, gib_s, hardware, json_line, param};

/// An optimizer of one large parameter, and its runtime.
struct Trained {
    runtime: Runtime,
    optimizer: Optimizer,
    parameters: u64,
}

/// What a step and a commit did.
#[derive(Clone, Copy)]
struct Step {
    seconds: f64,
    commit_seconds: f64,
    read: u64,
    written: u64,
    commit_written: u64,
    /// What the kernel has counted of the process, reads and writes, without the commit. With several ways open, what
    /// the others move in the background is in it.
    by_kernel: u64,
}

/// Bytes that the process has read from disks and written to them, by the kernel's count.
fn by_kernel() -> u64 {
    let io = std::fs::read_to_string("/proc/self/io").unwrap();
    let fields = io.lines().filter_map(|line| line.split_once(": "));
    fields
        .filter(|(name, _)| matches!(*name, "read_bytes" | "write_bytes"))
        .map(|(_, n)| n.parse::<u64>().unwrap())
        .sum()
}

/// What a runtime is opened with.
#[derive(Clone, Copy)]
struct Sizes {
    budget: Bytes,
    page: PageSize,
    lookahead: Lookahead,
}

fn open(
    parameters: u64,
    Sizes { budget, page, lookahead }: Sizes,
    dir: &Path,
    folder: Option<&Path>,
    gradients: DType,
) -> Trained {
    let runtime = Runtime::builder()
        .page_size(page)
        .device_budget(budget)
        .lookahead(lookahead)
        .policy(PolicyKind::Plan)
        .scratch_dir(dir)
        .open()
        .unwrap();
    let group = Group::new(AdamW::default(), Schedule::constant(1e-3)).parameter("weights", &[parameters]);
    let builder = Optimizer::builder(&runtime).group(group).gradients(gradients);
    let optimizer = match folder {
        None => builder.open(),
        Some(folder) => builder.open_in(&runtime.open_durable(folder, DurableOptions::default()).unwrap()),
    };
    let optimizer = optimizer.unwrap();
    let mut trained = Trained { runtime, optimizer, parameters };
    // The first step reads zeros that are not on disk.
    trained.step(folder.is_some());
    trained
}

impl Trained {
    fn accumulate(&self) {
        let values = vec![0.25f32; 1 << 20];
        for first in (0..self.parameters).step_by(values.len()) {
            let len = (self.parameters - first).min(values.len() as u64);
            self.optimizer.accumulate("weights", first, &values[..len as usize], 1.0).unwrap();
        }
    }

    fn step(&mut self, commits: bool) -> Step {
        self.accumulate();
        let traffic = |runtime: &Runtime| {
            let traffic = runtime.stats().traffic;
            (traffic.disk_read.get(), traffic.disk_written.get())
        };
        let kernel = by_kernel();
        let (before, start) = (traffic(&self.runtime), Instant::now());
        self.optimizer.step(1.0).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        let by_kernel = by_kernel() - kernel;
        let (between, start) = (traffic(&self.runtime), Instant::now());
        if commits {
            self.optimizer.commit(&Value::Null).unwrap();
        }
        let commit_seconds = start.elapsed().as_secs_f64();
        let after = traffic(&self.runtime);
        Step {
            seconds,
            commit_seconds,
            read: between.0 - before.0,
            written: between.1 - before.1,
            commit_written: after.1 - between.1,
            by_kernel,
        }
    }
}

/// Reads four arrays and writes three of them, on as many threads as there are: GiB/s of both together.
fn stream(arrays: &mut [Vec<f32>; 4]) -> f64 {
    let threads = std::thread::available_parallelism().unwrap().get();
    let bytes = arrays[0].len() as u64 * 28;
    let share = arrays[0].len().div_ceil(threads);
    let start = Instant::now();
    std::thread::scope(|scope| {
        let [a, b, c, d] = arrays;
        let parts = a.chunks_mut(share).zip(b.chunks_mut(share)).zip(c.chunks_mut(share)).zip(d.chunks(share));
        for (((a, b), c), d) in parts {
            scope.spawn(move || {
                for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
                    *b = 0.5 * *b + d;
                    *c = 0.5 * *c + d;
                    *a += *b - *c;
                }
            });
        }
    });
    gib_s(bytes, start.elapsed().as_secs_f64())
}

fn main() {
    let parameters = param::<u64>("parameters", "128") << 20;
    let budget: Bytes = param("budget", "256MiB");
    let page = PageSize::new(param("page", "2MiB")).unwrap();
    let resident = param::<u64>("resident", "8") << 20;
    let raw_bytes = param::<Bytes>("raw", "1GiB").get();
    let (depth, rounds) = (param("depth", "16"), param::<usize>("rounds", "7"));
    let dir = dir();
    let hardware = hardware(&dir);
    println!("{hardware}; {parameters} parameters, budget {budget}, pages of {}", page.bytes());

    let scene = tempfile::tempdir_in(&dir).unwrap();
    let raw = Raw::open(&dir, page, depth, raw_bytes);
    let folder = |name: &str| scene.path().join(name);
    let sizes = Sizes { budget, page, lookahead: param("lookahead", "auto") };
    let of = |folder: Option<&Path>| open(parameters, sizes, &dir, folder, DType::BF16);
    let wanted: String = param("ways", "scratch,durable,commits");
    let way = |name| match name {
        "scratch" => (name, false, of(None)),
        "durable" => (name, false, of(Some(&folder("without")))),
        "commits" => (name, true, of(Some(&folder("with")))),
        _ => panic!("there is no way {name:?} to make a step: scratch, durable or commits"),
    };
    let of_way = |name| if name == "scratch" { 14 } else { 26 };
    let room = wanted.split(',').map(of_way).sum::<u64>() * parameters + raw_bytes;
    println!("the disk takes up to {} until the end", Bytes::new(room));
    let mut ways: Vec<_> = wanted.split(',').map(way).collect();
    let all = parameters as f64 * 26.0;
    // Of a block two pages of the parameters and of each moment, and one of the gradients; the optimizer takes no more
    // threads than half of the frames can hold blocks for.
    let frames = (budget.get() / page.bytes()) as u32;
    let cores = std::thread::available_parallelism().unwrap().get() as u64;
    let threads = cores.min(u64::from(frames) / 2 / 7).max(1);
    let in_flight = (u64::from(sizes.lookahead.pages(page, frames)) + 7 * threads) * page.bytes();
    let kept = budget.get().saturating_sub(in_flight).min(parameters * 14);
    let formula = all - kept as f64;
    let (mut disk, mut steps) = (Vec::new(), vec![Vec::new(); ways.len()]);
    for _ in 0..rounds {
        disk.push(raw.mixed(raw_bytes));
        for (steps, (_, commits, trained)) in steps.iter_mut().zip(&mut ways) {
            steps.push(trained.step(*commits));
        }
    }
    let spread = |values: Vec<f64>| Spread::of(&values);
    let mut results = serde_json::Map::new();
    println!("the store's mixed reads and writes: {:.2} GiB/s", spread(disk.clone()).median);
    for (steps, (name, ..)) in steps.iter().zip(&ways) {
        let each = |of: &dyn Fn(&Step) -> f64| steps.iter().map(of).collect::<Vec<_>>();
        let rate = |step: &Step| gib_s(step.read + step.written, step.seconds);
        let share = steps.iter().zip(&disk).map(|(step, disk)| rate(step) / disk).collect();
        let share = spread(share);
        let seconds = spread(each(&|step| step.seconds));
        let commit = spread(each(&|step| step.commit_seconds));
        let moved = spread(each(&|step| (step.read + step.written) as f64 / formula));
        let extra = spread(each(&|step| step.commit_written as f64 / budget.get() as f64));
        let counted = spread(each(&|step| step.by_kernel as f64 / (step.read + step.written) as f64));
        println!(
            "{name:8} {:.2} s a step, {:.2} of the store's rate [{:.2} - {:.2}], {:.1} bytes a parameter, {:.3} of the \
             formula's [{:.3} - {:.3}], by the kernel {:.3} of these; a commit {:.2} s, {:.2} of the budget written",
            seconds.median,
            share.median,
            share.least,
            share.most,
            moved.median * formula / parameters as f64,
            moved.median,
            moved.least,
            moved.most,
            counted.median,
            commit.median,
            extra.median
        );
        let result = json!({
            "seconds": seconds.json(), "share_of_disk": share.json(), "bytes_of_formula": moved.json(),
            "commit_seconds": commit.json(), "commit_written_of_budget": extra.json(),
            "by_kernel_of_bytes": counted.json(),
        });
        results.insert((*name).into(), result);
    }
    drop(ways);
    drop(raw);
    results.insert("disk_gib_s".into(), spread(disk).json());
    if resident > 0 {
        results.insert("in_memory".into(), in_memory(resident, sizes, &dir, rounds));
    }
    json_line("optimizer", &hardware, Value::Object(results));
}

/// A step beside a loop over the same bytes.
fn in_memory(resident: u64, sizes: Sizes, dir: &Path, rounds: usize) -> Value {
    let sizes = Sizes { budget: Bytes::new(resident * 16 + (64 << 20)), ..sizes };
    let mut trained = open(resident, sizes, dir, None, DType::F32);
    let mut arrays = [0.5f32, 0.25, 0.125, 1.0].map(|value| vec![value; resident as usize]);
    let (mut loops, mut shares) = (Vec::new(), Vec::new());
    for _ in 0..3 * rounds {
        let loop_rate = stream(&mut arrays);
        let rate = gib_s(resident * 28, trained.step(false).seconds);
        loops.push(loop_rate);
        shares.push(rate / loop_rate);
    }
    let (loops, shares) = (Spread::of(&loops), Spread::of(&shares));
    println!(
        "in memory: {:.2} of a loop over the same bytes [{:.2} - {:.2}], which makes {:.1} GiB/s",
        shares.median, shares.least, shares.most, loops.median
    );
    json!({ "share_of_loop": shares.json(), "loop_gib_s": loops.json() })
}
