//! Conversations and long contexts whose keys and values are larger than the memory for them.
//!
//! `cargo bench -p outcore-llm --bench paged_kv -- MODEL.gguf` takes a real model for the conversations. Without one, a
//! synthetic model of the shape of SmolLM2-135M does.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench ends where something fails")]

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use outcore::store::DiskProfile;
use outcore::{Bytes, PageSize, PolicyKind, Runtime};
use outcore_kv::{ActiveOptions, KvPool, Sequence, StoreOptions, TenantId, Token};
use outcore_llm::synthetic::Spec;
use outcore_llm::{
    Arch, Config, Model, ModelFiles, Options, PagedKeys, PagedWeights, PlainWeights, Session, WeightType, argmax,
    paged_kv,
};
use outcore_testkit::harness::Rng;

const TENANT: TenantId = TenantId::new(1);
const CONVERSATIONS: usize = 32;
const TURNS: usize = 6;
/// Tokens that are asked, and answered, in a turn.
const ASKED: usize = 40;
const SAID: usize = 16;
const LENGTH: usize = TURNS * (ASKED + SAID);
/// How many conversations' keys and values the device has room for.
const ROOM: usize = 4;
const PASS: usize = 64;

/// The shape of SmolLM2-135M; its weights are of no use.
fn synthetic(folder: &Path) -> PathBuf {
    let path = folder.join("shape.gguf");
    let spec = Spec {
        arch: Arch::Llama,
        dtype: WeightType::Q8_0,
        layers: 30,
        dim: 576,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        ffn_dim: 1536,
        vocab: 4096,
        context: 1 << 16,
        tied: true,
        seed: 7,
        experts: None,
        window: 20,
    };
    spec.write_gguf(&path).unwrap();
    path
}

fn load(path: &Path) -> Arc<Model> {
    let files = ModelFiles::open(path).unwrap();
    let weights = Arc::new(PlainWeights::read(&files).unwrap());
    Arc::new(Model::load(&files, weights, Options::default()).unwrap())
}

fn runtime(device: u64, scratch: &Path, policy: PolicyKind) -> Runtime {
    let page = PageSize::new(Bytes::kib(64)).unwrap();
    let builder = Runtime::builder().page_size(page).device_budget(Bytes::new(device)).policy(policy);
    builder.scratch_dir(scratch).open().unwrap()
}

fn tokens(ids: &[u32]) -> Vec<Token> {
    ids.iter().copied().map(Token::new).collect()
}

/// What somebody asks in a turn: nobody else asks it.
fn asked(who: usize, turn: usize, vocab: u32) -> Vec<u32> {
    let mut random = Rng::new((who * TURNS + turn + 1) as u64);
    (0..ASKED).map(|_| random.below(vocab.into()) as u32).collect()
}

/// Computes these tokens behind those that there are, and says some. Returns what is said.
fn turn(session: &mut Session, ask: &[u32]) -> Vec<u32> {
    let mut logits = Vec::new();
    for part in ask.chunks(PASS) {
        logits = session.forward(part).unwrap();
    }
    let mut said = Vec::new();
    for _ in 0..SAID {
        said.push(argmax(&logits));
        logits = session.forward(&said[said.len() - 1..]).unwrap();
    }
    said
}

/// Each conversation by itself, in as much memory as it needs.
fn alone(model: &Arc<Model>, folder: &Path, vocab: u32) -> (Vec<Vec<u32>>, f64) {
    let begin = Instant::now();
    let mut answers = Vec::new();
    for who in 0..CONVERSATIONS {
        let runtime = runtime(256 << 20, folder, PolicyKind::Kv);
        let layout = paged_kv::layout(model.config(), &runtime, LENGTH as u64).unwrap();
        let pool = KvPool::open(&runtime, layout, b"bench", 64).unwrap();
        let keys = PagedKeys::new(pool.begin(TENANT, &[]).unwrap());
        let mut session = Session::paged(model.clone(), keys).unwrap();
        answers.push((0..TURNS).flat_map(|n| turn(&mut session, &asked(who, n, vocab))).collect());
        drop((session, pool));
        runtime.close().unwrap();
    }
    (answers, begin.elapsed().as_secs_f64())
}

/// All conversations in turn, on a device that has room for some: each begins anew at each turn, with all that was said
/// before, and is gone afterwards.
fn together(model: &Arc<Model>, folder: &Path, vocab: u32, answers: &[Vec<u32>]) {
    let probe = runtime(1 << 20, folder, PolicyKind::Kv);
    let layout = paged_kv::layout(model.config(), &probe, LENGTH as u64).unwrap();
    probe.close().unwrap();
    let each = LENGTH.div_ceil(layout.block_tokens() as usize) + 1;
    let block = layout.block_room().get() * u64::from(layout.groups());
    let runtime = runtime((ROOM * each) as u64 * block, folder, PolicyKind::Kv);
    let blocks = (CONVERSATIONS * each + 64) as u32;
    let store = folder.join("store");
    let pool = KvPool::open_with_store(&runtime, layout, b"bench", blocks, (&store, StoreOptions::new())).unwrap();
    pool.set_active(ActiveOptions::default().blocks_most((ROOM * each) as u32));
    let mut history: Vec<Vec<u32>> = vec![Vec::new(); CONVERSATIONS];
    let mut said: Vec<Vec<u32>> = vec![Vec::new(); CONVERSATIONS];
    let (begin, mut whole, mut again) = (Instant::now(), 0, 0);
    for n in 0..TURNS {
        for who in 0..CONVERSATIONS {
            let ask = asked(who, n, vocab);
            let prompt = [&history[who][..], &ask].concat();
            let permit = pool.admit(TENANT, LENGTH as u64).unwrap().wait().unwrap();
            let mut sequence: Sequence = pool.begin(TENANT, &tokens(&prompt)).unwrap();
            sequence.activate(permit).unwrap();
            let each = pool.layout().block_tokens() as usize;
            // Whole blocks of what was there before, of which all exist somewhere.
            let there = history[who].len() / each * each;
            whole += there;
            again += there.saturating_sub(sequence.len() as usize);
            let found = sequence.len() as usize;
            let mut session = Session::paged(model.clone(), PagedKeys::new(sequence)).unwrap();
            let answer = turn(&mut session, &prompt[found..]);
            // The last token's keys and values are there too.
            history[who] = [prompt, answer.clone()].concat();
            said[who].extend(answer);
        }
    }
    let took = begin.elapsed().as_secs_f64();
    let same = said.iter().zip(answers).filter(|(said, alone)| said == alone).count();
    let stats = pool.stats();
    let traffic = runtime.stats().traffic;
    println!("{CONVERSATIONS} conversations of {TURNS} turns, room for {ROOM}: {took:.1} s");
    println!("  answers as when alone: {same} of {CONVERSATIONS}");
    println!(
        "  tokens computed again, of {whole} whose blocks exist: {again} ({:.2} %)",
        100.0 * again as f64 / whole as f64
    );
    println!("  blocks found {}, of {} asked for", stats.found, stats.asked);
    println!("  from disk {}, to disk {}", traffic.disk_read, traffic.disk_written);
    drop(pool);
    runtime.close().unwrap();
}

/// Seconds that reading `len` bytes takes at the rate of the disk that has this folder.
fn at_the_disks_rate(folder: &Path, len: f64) -> f64 {
    let path = folder.join("probe");
    if !path.exists() {
        let mut file = File::create(&path).unwrap();
        (0..1024u32).for_each(|nth| file.write_all(&vec![nth as u8; 1 << 20]).unwrap());
        file.sync_all().unwrap();
    }
    let disk = DiskProfile::measure(&path).unwrap().expect("a disk whose rate can be measured");
    len / disk.bytes_per_second.get() as f64
}

/// A context of 32,768 tokens, of which 4,096 have room beside the weights: the time of a token, and what it moves. The
/// page size and all else are as `generate` chooses.
fn long_context(path: &Path, folder: &Path) {
    const CONTEXT: usize = 32 << 10;
    const KEPT: u64 = 4 << 10;
    let files = ModelFiles::open(path).unwrap();
    let config = Config::new(&files).unwrap();
    let token = 2 * (config.kv_heads * config.head_dim * size_of::<f32>() * config.layers) as u64;
    let weights = std::fs::metadata(path).unwrap().len();
    let budget = weights + KEPT * token;
    for policy in [PolicyKind::Plan, PolicyKind::Kv] {
        let builder = Runtime::builder().for_model(files.header()).device_budget(Bytes::new(budget)).policy(policy);
        let chosen = builder.settings().unwrap().page_size.value;
        let least = PageSize::new(Bytes::kib(64)).unwrap();
        let page = paged_kv::page_size(&config, CONTEXT as u64, [least, chosen]);
        let runtime = builder.page_size(page).scratch_dir(folder).open().unwrap();
        let opened = runtime.open_parsed(files.header().clone()).unwrap();
        let weights_of = Arc::new(PagedWeights::open(&runtime, &opened, &files).unwrap());
        let model = Arc::new(Model::load(&files, weights_of, Options::default()).unwrap());
        let layout = paged_kv::layout(&config, &runtime, CONTEXT as u64).unwrap();
        let blocks = (CONTEXT / layout.block_tokens() as usize + 4) as u32;
        let pool = KvPool::open(&runtime, layout, b"bench", blocks).unwrap();
        let mut sequence = pool.begin(TENANT, &[]).unwrap();
        // What a prompt would have left there: its computing is not measured.
        let step = pool.layout().block_tokens() as usize;
        for start in (0..CONTEXT - 64).step_by(step) {
            let ids: Vec<u32> = (start..(start + step).min(CONTEXT - 64)).map(|n| n as u32 % 4096).collect();
            let positions = sequence.append(&tokens(&ids)).unwrap();
            for group in 0..pool.layout().groups() {
                let mut blocks = sequence.write(group, positions.clone()).unwrap();
                let mut guard = blocks.pin().wait().unwrap();
                for bytes in guard.all_mut() {
                    let value = (0.01 * ((group + start as u32) % 97) as f32).to_le_bytes();
                    bytes.chunks_exact_mut(4).for_each(|number| number.copy_from_slice(&value));
                }
            }
            sequence.commit(positions.end).unwrap();
        }
        let mut session = Session::paged(model, PagedKeys::new(sequence)).unwrap();
        // What is dirty is written.
        for n in 0..6 {
            session.forward(&[n]).unwrap();
        }
        let must = (CONTEXT as u64 * token + weights - budget) as f64;
        let mut ratios = Vec::new();
        for n in 0..16 {
            let before = runtime.stats().traffic;
            let begin = Instant::now();
            session.forward(&[n]).unwrap();
            let took = begin.elapsed().as_secs_f64();
            let moved = (runtime.stats().traffic.disk_read.get() - before.disk_read.get()) as f64;
            let least = at_the_disks_rate(folder, must);
            ratios.push((took / least, took, moved / must));
        }
        ratios.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (ratio, took, moved) = ratios[ratios.len() / 2];
        println!(
            "a token behind {CONTEXT}, room for {KEPT}, policy {}, pages of {}: {took:.3} s, {ratio:.2} [{:.2} - {:.2}] of \
             what must be moved at the disk's rate; {moved:.2} of that was read",
            policy.name(),
            Bytes::new(page.bytes()),
            ratios[0].0,
            ratios[ratios.len() - 1].0,
        );
        drop((session, pool, opened));
        runtime.close().unwrap();
    }
}

fn main() {
    let given = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).map(PathBuf::from);
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let shape = synthetic(folder.path());
    long_context(&shape, folder.path());
    let path = given.unwrap_or(shape);
    let model = load(&path);
    let vocab = model.config().vocab as u32;
    let (answers, took) = alone(&model, folder.path(), vocab);
    println!("each of {CONVERSATIONS} conversations alone: {took:.1} s");
    together(&model, folder.path(), vocab, &answers);
}
