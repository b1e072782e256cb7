//! What do blocks of keys and values cost beside their bytes, and how soon is a sequence back?
//!
//! - `append`: room for one token more, and its commit, of a sequence that grows to `--tokens`.
//! - `fork`: another sequence with the same tokens, and its end.
//! - `match`: finding the blocks of a prompt of `--prompt` blocks among `--blocks` that are known; `begin` uses them
//!   too.
//! - `tables`: memory of the tables for each block.
//! - `restore`: a sequence of `--restore` bytes comes back from disk, group by group: until its first group is there,
//!   and until all of it is, in parts of the time that these bytes take at the disk's rate. That is measured in each
//!   round.
//!
//! Parameters: `--blocks` (1000000), `--prompt` (1000), `--tokens` (100000), `--restore` (64MiB), `--rounds` (7),
//! `--dir`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::fs::File;
use std::hint::black_box;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use outcore::store::{DiskProfile, ScratchAllocation};
use outcore::{Bytes, DType, PageSize, PolicyKind, Runtime};
use outcore_kv::{KvLayout, KvPool, KvShape, Sequence, TenantId, Token};
use serde_json::json;
use support::{Made, Spread};

/// Bytes of a file by which the disk is measured.
const PROBED: u64 = 512 << 20;

const TENANT: TenantId = TenantId::new(1);

fn tokens(from: u32, count: u32) -> Vec<Token> {
    (from..from + count).map(Token::new).collect()
}

fn nanos(since: Instant, count: u64) -> f64 {
    since.elapsed().as_secs_f64() * 1e9 / count as f64
}

/// A pool with this many blocks, of one small page each, of which only tables are used.
fn of_tables(blocks: u32) -> (Runtime, KvPool) {
    let page = PageSize::new(Bytes::kib(4)).unwrap();
    let runtime = Runtime::builder()
        .page_size(page)
        .device_budget(Bytes::mib(8))
        .scratch_allocation(ScratchAllocation::AtWriteBack)
        .open()
        .unwrap();
    let layout = KvLayout::with(KvShape::new(1, 1, 64, DType::F16).unwrap(), page, 16, 1).unwrap();
    let pool = KvPool::open(&runtime, layout, b"bench", blocks).unwrap();
    (runtime, pool)
}

fn said(pool: &KvPool, tokens: &[Token]) -> Sequence {
    let mut sequence = pool.begin(TENANT, &[]).unwrap();
    let end = sequence.append(tokens).unwrap().end;
    sequence.commit(end).unwrap();
    sequence
}

/// Seconds that reading `len` bytes takes at the rate of the disk that has this file.
fn at_the_disks_rate(path: &Path, len: u64) -> f64 {
    let disk = DiskProfile::measure(path).unwrap().expect("a disk whose rate can be measured");
    len as f64 / disk.bytes_per_second.get() as f64
}

/// Has the sequence leave all memory, and waits for that.
fn park(runtime: &Runtime, sequence: &mut Sequence) {
    sequence.park().unwrap();
    while runtime.stats().device_frames.used > 0 {
        std::thread::yield_now();
    }
}

/// Seconds until the first group is there, and until all groups are.
fn restore(sequence: &Sequence, groups: u32) -> (f64, f64) {
    let start = Instant::now();
    sequence.resume(0).unwrap();
    let mut first = 0.0;
    for group in 0..groups {
        if group + 1 < groups {
            sequence.resume(group + 1).unwrap();
        }
        drop(black_box(sequence.read(group, 0..sequence.len()).unwrap().pin().wait().unwrap()));
        if group == 0 {
            first = start.elapsed().as_secs_f64();
        }
    }
    (first, start.elapsed().as_secs_f64())
}

fn main() {
    let blocks: u32 = support::param("blocks", "1000000");
    let prompt: u32 = support::param("prompt", "1000");
    let count: u32 = support::param("tokens", "100000");
    let size: Bytes = support::param("restore", "64MiB");
    let rounds: usize = support::param("rounds", "7");
    let dir = support::dir();
    let hardware = support::hardware(&dir);
    let mut samples: [Vec<f64>; 8] = Default::default();

    let (runtime, pool) = of_tables(blocks);
    let each = pool.layout().block_tokens();
    // None of them makes way for what the rounds append.
    let known = (blocks - (rounds as u32 + 1) * count.div_ceil(each)) / prompt * prompt;
    for first in (0..known).step_by(prompt as usize) {
        drop(said(&pool, &tokens(first * each, prompt * each)));
    }
    for round in 0..rounds as u32 {
        let mut sequence = pool.begin(TENANT, &[]).unwrap();
        let fresh = tokens(u32::MAX - count * (round + 2), count);
        let start = Instant::now();
        for token in fresh.chunks(1) {
            let end = sequence.append(token).unwrap().end;
            sequence.commit(end).unwrap();
        }
        samples[0].push(nanos(start, fresh.len() as u64));
        const FORKS: u64 = 10_000;
        let start = Instant::now();
        (0..FORKS).for_each(|_| drop(black_box(sequence.fork())));
        samples[1].push(nanos(start, FORKS));
        // Somewhere among those that are known: nobody has looked there for long.
        let nth = (u64::from(round) * 0x9E37_79B9 % u64::from(known / prompt)) as u32;
        let wanted = tokens(nth * prompt * each, prompt * each + 1);
        let start = Instant::now();
        let found = pool.found(TENANT, &wanted);
        samples[2].push(nanos(start, 1000));
        assert_eq!(found, u64::from(prompt * each), "round {round}");
        let nth = (nth + 7) % (known / prompt);
        let wanted = tokens(nth * prompt * each, prompt * each + 1);
        let start = Instant::now();
        let begun = pool.begin(TENANT, &wanted).unwrap();
        samples[3].push(nanos(start, 1000));
        assert_eq!(begun.len(), u64::from(prompt * each));
    }
    let per_block = pool.stats().tables.get() as f64 / f64::from(blocks);
    drop(pool);
    runtime.close().unwrap();

    // SmolLM2-135M's shape, in F32: 138 KiB a token.
    let shape = KvShape::new(30, 3, 64, DType::F32).unwrap();
    let page = PageSize::DEFAULT;
    let layout = KvLayout::new(shape, page).unwrap();
    let groups = layout.groups();
    let blocks = size.get().div_ceil(layout.block_room().get() * u64::from(groups)) as u32;
    let bytes = u64::from(blocks) * u64::from(groups) * layout.block_room().get();
    let budget = Bytes::new(bytes + 64 * page.bytes());
    // A policy that looks for orders would read what was parked again, ahead of a use that it expects.
    let builder = Runtime::builder().page_size(page).device_budget(budget).policy(PolicyKind::Kv).scratch_dir(&dir);
    let runtime = builder.open().unwrap();
    let pool = KvPool::open(&runtime, layout, b"bench", blocks).unwrap();
    let mut sequence = pool.begin(TENANT, &[]).unwrap();
    let all = sequence.append(&tokens(0, blocks * pool.layout().block_tokens())).unwrap();
    for group in 0..groups {
        let mut blocks = sequence.write(group, all.clone()).unwrap();
        let mut guard = blocks.pin().wait().unwrap();
        guard.all_mut().enumerate().for_each(|(nth, bytes)| bytes.fill(nth as u8));
    }
    sequence.commit(all.end).unwrap();
    let plain = Made(dir.join(format!("outcore-bench-{}.kv", std::process::id())));
    let mut file = File::create(&plain.0).unwrap();
    (0..PROBED >> 20).for_each(|nth| file.write_all(&vec![nth as u8; 1 << 20]).unwrap());
    file.sync_all().unwrap();
    for _ in 0..rounds {
        park(&runtime, &mut sequence);
        let took = at_the_disks_rate(&plain.0, bytes);
        let (first, whole) = restore(&sequence, groups);
        samples[4].push(first / (took / f64::from(groups)));
        samples[5].push(whole / took);
        samples[6].push(took * 1e3);
        samples[7].push(whole * 1e3);
    }
    let [append, fork, found, begin, first, whole, plain_ms, whole_ms] = samples.map(|rounds| Spread::of(&rounds));
    println!("medians [least - most] of {rounds} rounds; {hardware}");
    println!("append one token        {append} ns; fork {fork} ns");
    println!("match {prompt} blocks   {found} us, begin with them {begin} us, among {known}");
    println!("tables                  {per_block:.0} bytes a block");
    println!("restore {} of {groups} groups  {whole_ms} ms, at the disk's rate {plain_ms} ms", Bytes::new(bytes));
    println!("  the first group       {first:.2} of its share, all {whole:.2} of the whole");
    let results = json!({ "append_ns": append.json(), "fork_ns": fork.json(), "match_us": found.json(),
        "begin_us": begin.json(), "table_bytes": per_block, "restore_first": first.json(),
        "restore": whole.json(), "restore_bytes": bytes, "groups": groups });
    drop((sequence, pool));
    runtime.close().unwrap();
    support::json_line("kv", &hardware, results);
}
