//! Products of stored matrices with 1, 16 and 256 vectors, by type of weight, beside ggml's in turns.
//!
//! `cargo bench -p outcore-llm --bench kernels -- [PEER] [TYPE...]`: PEER is the program that `make peers` builds of
//! `benches/compare/ggml_matmul.c`. Matrices together exceed the processor's cache. OUTCORE_BENCH_ROUNDS (15) says how
//! many times each is measured.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench ends where something fails")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use outcore_llm::kernels::{self, ActKind, Acts, Fours, Level, Quantised};
use outcore_llm::{Pool, WeightType, quants};

const COLUMNS: usize = 2048;
const ROWS: usize = 5632;
/// Bytes of weights that one measurement reads.
const BYTES: usize = 256 << 20;
const TYPES: [WeightType; 11] = [
    WeightType::Q8_0,
    WeightType::Q4_0,
    WeightType::Q4_1,
    WeightType::Q4_K,
    WeightType::Q5_K,
    WeightType::Q6_K,
    WeightType::IQ4_NL,
    WeightType::IQ4_XS,
    WeightType::MXFP4,
    WeightType::BF16,
    WeightType::F16,
];

/// ggml in a process of its own, which computes when it is given a line.
struct Peer {
    child: Child,
    to: ChildStdin,
    from: BufReader<std::process::ChildStdout>,
}

impl Peer {
    fn new(program: &str, dtype: WeightType, matrices: usize, m: usize, threads: usize) -> Self {
        // ggml writes the K of its types large, and all else small.
        let name = dtype.to_string().to_lowercase().replace("_k", "_K");
        let sizes = [COLUMNS, ROWS, matrices, m, threads].map(|n| n.to_string());
        let mut command = Command::new(program);
        let mut child =
            command.arg(name).args(sizes).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the peer runs");
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, to, from }
    }

    fn seconds(&mut self) -> f64 {
        self.to.write_all(b"go\n").unwrap();
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        line.trim().parse().expect("the peer says seconds")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn numbers(len: usize, mut state: u32) -> Vec<f32> {
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// How long one product of every matrix takes; each begins with the vectors as numbers, as ggml's does.
fn ours(pool: &Pool, dtype: WeightType, matrices: &[u8], x: &[f32], m: usize, out: &mut [f32]) -> f64 {
    let level = Level::detect();
    let started = Instant::now();
    for matrix in matrices.chunks_exact(COLUMNS / dtype.block_elements() * dtype.block_bytes() * ROWS) {
        let (quantised, fours);
        let acts = match kernels::act_kind(dtype) {
            ActKind::Plain => {
                fours = Fours::new(level, x, m, pool);
                Acts::Plain(x, &fours)
            }
            ActKind::Q8 => {
                quantised = Quantised::new(level, x, m, pool);
                Acts::Q8(&quantised)
            }
        };
        kernels::rows_dot_on(pool, level, dtype, COLUMNS, matrix, acts, m, out);
    }
    started.elapsed().as_secs_f64()
}

/// What reading the same bytes takes.
fn read(pool: &Pool, bytes: &[u8]) -> f64 {
    let started = Instant::now();
    let mut sums = vec![[0u8; 128]; bytes.len().div_ceil(1 << 20)];
    pool.run_chunks(&mut sums, 1, |i, sum| {
        for bytes in bytes[i << 20..bytes.len().min((i + 1) << 20)].as_chunks::<128>().0 {
            sum[0].iter_mut().zip(bytes).for_each(|(sum, byte)| *sum ^= byte);
        }
    });
    std::hint::black_box(sums);
    started.elapsed().as_secs_f64()
}

fn median(values: &mut [f64]) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    let at = |part: f64| values[((values.len() - 1) as f64 * part).round() as usize];
    (at(0.25), at(0.5), at(0.75))
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let (types, peers): (Vec<_>, Vec<_>) = args.into_iter().partition(|arg| arg.parse::<WeightType>().is_ok());
    let types: Vec<WeightType> = types.iter().map(|t| t.parse().unwrap()).collect();
    let peer = peers.first();
    let rounds = std::env::var("OUTCORE_BENCH_ROUNDS").map_or(15, |n| n.parse().unwrap());
    let pool = Pool::new(0).unwrap();
    println!("{} threads, {:?}, {COLUMNS} columns, {ROWS} rows", pool.threads(), Level::detect());
    println!("type  vectors  read GB/s  ours GB/s  Gop/s    ggml GB/s  ours/ggml (quartiles)");
    let mut found = serde_json::Map::new();
    for dtype in TYPES.into_iter().filter(|t| types.is_empty() || types.contains(t)) {
        let size = COLUMNS / dtype.block_elements() * dtype.block_bytes() * ROWS;
        let count = BYTES.div_ceil(size);
        let mut matrix = Vec::new();
        quants::quantise(dtype, &numbers(COLUMNS * ROWS, 1), &mut matrix);
        let matrices = matrix.repeat(count);
        for m in [1, 16, 256] {
            let x = numbers(m * COLUMNS, 2);
            let mut out = vec![0f32; ROWS * m];
            let mut peer = peer.map(|program| Peer::new(program, dtype, count, m, pool.threads()));
            let (mut reads, mut own, mut theirs, mut ratios) = (vec![], vec![], vec![], vec![]);
            for round in 0..rounds + 1 {
                let read = read(&pool, &matrices);
                let took = ours(&pool, dtype, &matrices, &x, m, &mut out);
                let other = peer.as_mut().map(Peer::seconds);
                // OpenMP's threads spin for a while when they have nothing to do.
                std::thread::sleep(Duration::from_millis(30));
                // The first round warms both.
                if round > 0 {
                    reads.push(read);
                    own.push(took);
                    theirs.extend(other);
                    ratios.extend(other.map(|other| other / took));
                }
            }
            let rate = |values: &mut [f64]| (size * count) as f64 / median(values).1 / 1e9;
            let mut row = serde_json::json!({
                "read_gb_s": rate(&mut reads), "ours_gb_s": rate(&mut own), "rounds": own.len(),
            });
            let operations = 2.0 * (COLUMNS * ROWS * count * m) as f64;
            let gop = operations / median(&mut own).1 / 1e9;
            let name = dtype.to_string();
            print!("{name:<6} {m:>6} {:>10.1} {:>10.1} {gop:>6.0}", rate(&mut reads), rate(&mut own));
            if !ratios.is_empty() {
                let (low, middle, high) = median(&mut ratios);
                print!(" {:>12.1} {middle:>9.2} ({low:.2} to {high:.2})", rate(&mut theirs));
                row["ggml_gb_s"] = rate(&mut theirs).into();
                row["times_ggml"] = vec![low, middle, high].into();
            }
            println!();
            found.insert(format!("{dtype}, {m}"), row);
        }
    }
    println!("{}", serde_json::json!({"bench": "kernels", "threads": pool.threads(), "products": found}));
}
