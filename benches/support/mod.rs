//! What the benches share: parameters, the machine in one line, medians with spread, files to read, processor time.

#![allow(dead_code, reason = "each bench uses its own part")]
#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use outcore::{Bytes, Runtime, Tensor};
/// Numbers without a pattern, the same in every run.
pub use outcore_testkit::harness::Rng as Random;
use serde_json::{Map, Value, json};

/// `--name value` on the command line, else `OUTCORE_BENCH_NAME` in the environment, else `default`.
pub fn param<T: FromStr>(name: &str, default: &str) -> T {
    let flag = format!("--{name}");
    let given = std::env::args().skip_while(|argument| *argument != flag).nth(1);
    let variable = format!("OUTCORE_BENCH_{}", name.to_uppercase().replace('-', "_"));
    let text = given.or_else(|| std::env::var(variable).ok()).unwrap_or_else(|| default.to_owned());
    text.parse().unwrap_or_else(|_| panic!("--{name} {text}: not understood; the default is {default}"))
}

/// Where files are made: `--dir`, else the build's folder for temporary files.
pub fn dir() -> PathBuf {
    param::<PathBuf>("dir", env!("CARGO_TARGET_TMPDIR"))
}

/// Processor, kernel and file system.
pub fn hardware(dir: &Path) -> String {
    let machine = outcore::machine::Machine::detect().unwrap();
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let dir = fs::canonicalize(dir).unwrap();
    let mount = mounts
        .lines()
        .filter_map(|line| {
            let mut parts = line.split(' ');
            let (device, place, kind) = (parts.next()?, parts.next()?, parts.next()?);
            dir.starts_with(place).then(|| (place.len(), format!("{kind} on {device}")))
        })
        .max();
    format!(
        "{} x {}, {} memory, Linux {}, {}",
        machine.cpus,
        model.map_or(std::env::consts::ARCH, |(_, name)| name),
        machine.memory.limit,
        machine.kernel,
        mount.map_or_else(|| "unknown file system".to_owned(), |(_, what)| what),
    )
}

/// Median, least and most of several rounds.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

impl Spread {
    pub fn of(rounds: &[f64]) -> Self {
        let mut rounds = rounds.to_vec();
        rounds.sort_by(f64::total_cmp);
        Self { median: rounds[rounds.len() / 2], least: rounds[0], most: rounds[rounds.len() - 1] }
    }
    pub fn json(&self) -> Value {
        json!({ "median": self.median, "least": self.least, "most": self.most })
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let digits = f.precision().unwrap_or(1);
        write!(f, "{:9.digits$} [{:.digits$} - {:.digits$}]", self.median, self.least, self.most)
    }
}

/// The last line of every bench.
pub fn json_line(bench: &str, hardware: &str, results: Value) {
    let mut line = Map::new();
    line.insert("bench".to_owned(), json!(bench));
    line.insert("hardware".to_owned(), json!(hardware));
    if let Value::Object(results) = results {
        line.extend(results);
    }
    println!("{}", Value::Object(line));
}

/// Processor seconds of this process, all threads, to 10 ms.
pub fn cpu_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let after_name = stat.rsplit_once(')').unwrap().1;
    let ticks: Vec<f64> = after_name.split_whitespace().skip(11).take(2).map(|n| n.parse().unwrap()).collect();
    // USER_HZ is 100 on every Linux.
    (ticks[0] + ticks[1]) / 100.0
}

/// A file that is removed at the end.
pub struct Made(pub PathBuf);

impl Drop for Made {
    fn drop(&mut self) {
        drop(fs::remove_file(&self.0));
    }
}

/// A safetensors file of `count` tensors `t0, t1, ...` of `len` bytes each, the first of which begins at a multiple of
/// `align`. Its bytes are noise, and on disk.
pub fn model(dir: &Path, count: u64, len: u64, align: u64) -> Made {
    static MADE: AtomicU32 = AtomicU32::new(0);
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let made = Made(dir.join(format!("outcore-bench-{}-{number}.safetensors", std::process::id())));
    let entry = |n: u64| {
        format!("\"t{n}\":{{\"dtype\":\"U8\",\"shape\":[{len}],\"data_offsets\":[{},{}]}}", n * len, (n + 1) * len)
    };
    let mut header = format!("{{{}}}", (0..count).map(entry).collect::<Vec<_>>().join(","));
    let padded = (header.len() as u64 + 8).next_multiple_of(align) as usize - 8;
    header.extend(std::iter::repeat_n(' ', padded - header.len()));
    let mut file = BufWriter::with_capacity(1 << 20, File::create(&made.0).unwrap());
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let mut random = Random::new(count);
    let block: Vec<u8> = (0..1 << 17).flat_map(|_| random.next().to_le_bytes()).collect();
    let mut left = count * len;
    while left > 0 {
        let part = left.min(block.len() as u64);
        file.write_all(&block[..part as usize]).unwrap();
        left -= part;
    }
    file.into_inner().unwrap().sync_all().unwrap();
    made
}

/// GiB per second.
pub fn gib_s(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / seconds / Bytes::gib(1).get() as f64
}

/// Computes: holds the caller until `time` has passed. It sleeps for most of that time, as a caller that waits for a
/// device does. So a machine with few processors measures overlap, and not how its threads are scheduled.
pub fn compute(time: Duration) {
    const SPIN: Duration = Duration::from_micros(200);
    let start = Instant::now();
    std::thread::sleep(time.saturating_sub(SPIN));
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// Pins one tensor after the other and computes with each: seconds of the pass, and of its compute.
pub fn pass(runtime: &Runtime, tensors: &[Tensor], each: Duration) -> (f64, f64) {
    let start = Instant::now();
    let mut computed = Duration::ZERO;
    for tensor in tensors {
        let guard = runtime.pin(tensor).wait().unwrap();
        let begin = Instant::now();
        compute(each);
        computed += begin.elapsed();
        drop(guard);
    }
    (start.elapsed().as_secs_f64(), computed.as_secs_f64())
}
