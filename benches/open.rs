//! How long does it take to open a model, and how much of it is read? The files have the headers of many tensors, and
//! their data is a hole, so that only the header costs time.
//!
//! Parameters: `--tensors` (5000), `--tokens` in the GGUF vocabulary (150000), `--rounds` (9), `--dir`.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::fs;
use std::path::Path;
use std::time::Instant;

use outcore::{Bytes, Runtime};
use serde_json::json;
use support::{Made, Random, Spread};

const TENSOR: u64 = 32 << 20;

fn gguf(tensors: u64, tokens: u64) -> (Vec<u8>, u64) {
    let mut out = b"GGUF".to_vec();
    let string = |out: &mut Vec<u8>, text: &str| {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    };
    out.extend(3u32.to_le_bytes());
    out.extend(tensors.to_le_bytes());
    out.extend(2u64.to_le_bytes());
    string(&mut out, "general.architecture");
    out.extend(8u32.to_le_bytes());
    string(&mut out, "llama");
    string(&mut out, "tokenizer.ggml.tokens");
    out.extend(9u32.to_le_bytes());
    out.extend(8u32.to_le_bytes());
    out.extend(tokens.to_le_bytes());
    (0..tokens).for_each(|n| string(&mut out, &format!("token{n}")));
    for n in 0..tensors {
        string(&mut out, &format!("blk.{}.ffn_{}.weight", n / 9, n % 9));
        out.extend(2u32.to_le_bytes());
        out.extend(4096u64.to_le_bytes());
        out.extend((TENSOR / 4096 / 2).to_le_bytes());
        out.extend(1u32.to_le_bytes());
        out.extend((n * TENSOR).to_le_bytes());
    }
    out.resize(out.len().next_multiple_of(32), 0);
    let len = out.len() as u64 + tensors * TENSOR;
    (out, len)
}

fn safetensors(tensors: u64) -> (Vec<u8>, u64) {
    let entry = |n: u64| {
        format!(
            "\"model.layers.{}.mlp.{}.weight\":{{\"dtype\":\"BF16\",\"shape\":[4096,4096],\"data_offsets\":[{},{}]}}",
            n / 9,
            n % 9,
            n * TENSOR,
            (n + 1) * TENSOR
        )
    };
    let header = format!("{{{}}}", (0..tensors).map(entry).collect::<Vec<_>>().join(","));
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    let len = out.len() as u64 + tensors * TENSOR;
    (out, len)
}

fn make(dir: &Path, name: &str, (header, len): (Vec<u8>, u64)) -> (Made, u64) {
    let made = Made(dir.join(format!("outcore-bench-open-{}.{name}", std::process::id())));
    fs::write(&made.0, &header).unwrap();
    fs::OpenOptions::new().write(true).open(&made.0).unwrap().set_len(len).unwrap();
    (made, header.len() as u64)
}

/// Bytes this process has read with system calls.
fn read_so_far() -> u64 {
    let text = fs::read_to_string("/proc/self/io").unwrap();
    text.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

fn main() {
    let tensors: u64 = support::param("tensors", "5000");
    let tokens: u64 = support::param("tokens", "150000");
    let rounds: usize = support::param("rounds", "9");
    let dir = support::dir();
    let hardware = support::hardware(&dir);
    let made = [make(&dir, "gguf", gguf(tensors, tokens)), make(&dir, "safetensors", safetensors(tensors))];
    let runtime = Runtime::builder().device_budget(Bytes::mib(64)).open().unwrap();
    let mut times = vec![Vec::new(); made.len()];
    let mut reads = vec![0; made.len()];
    let mut random = Random::new(5);
    for _ in 0..rounds {
        let mut order = [0, 1];
        random.shuffle(&mut order);
        for at in order {
            let (before, start) = (read_so_far(), Instant::now());
            let model = runtime.open_model(&made[at].0.0).unwrap();
            times[at].push(start.elapsed().as_secs_f64() * 1e3);
            reads[at] = read_so_far() - before;
            assert_eq!(model.header().tensors.len() as u64, tensors);
        }
    }
    println!("opening {tensors} tensors ({}), {rounds} rounds; {hardware}", Bytes::new(tensors * TENSOR));
    let mut results = serde_json::Map::new();
    for (at, name) in ["gguf", "safetensors"].into_iter().enumerate() {
        let spread = Spread::of(&times[at]);
        let (read, header) = (Bytes::new(reads[at]), Bytes::new(made[at].1));
        println!("  {name:12} {spread:.1} ms   {read} read, the header has {header}; goal 50 ms");
        let result = json!({ "ms": spread.json(), "read_bytes": read.get(), "header_bytes": header.get() });
        results.insert(name.to_owned(), result);
    }
    runtime.close().unwrap();
    support::json_line("open", &hardware, json!({ "tensors": tensors, "results": results, "goal_ms": 50 }));
}
