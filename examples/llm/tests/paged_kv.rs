//! Keys and values in pages: an answer never depends on who else is served, on how a prompt is cut into passes, on
//! threads, or on memory.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Arc;

use outcore::{Bytes, PageSize, PolicyKind, Runtime};
use outcore_kv::{ActiveOptions, Extent, KvLayout, KvPool, StoreOptions, TenantId, Token};
use outcore_llm::synthetic::{Experts, Spec};
use outcore_llm::{
    Arch, KvType, Model, ModelFiles, Options, PagedKeys, PagedWeights, PlainWeights, Session, WeightType, Weights,
    argmax, paged_kv,
};

const TENANT: TenantId = TenantId::new(1);

fn model(folder: &Path, threads: usize) -> Arc<Model> {
    model_of(folder, Arch::Llama, WeightType::Q8_0, threads)
}

fn model_of(folder: &Path, arch: Arch, dtype: WeightType, threads: usize) -> Arc<Model> {
    let path = folder.join(format!("{}-{dtype}.gguf", arch.gguf_name()));
    if !path.exists() {
        // A window that begins and ends within blocks.
        let spec = Spec { layers: 3, context: 2048, window: 41, ..Spec::small(arch, dtype) };
        spec.write_gguf(&path).unwrap();
    }
    let files = ModelFiles::open(path).unwrap();
    let weights = Arc::new(PlainWeights::read(&files).unwrap());
    Arc::new(Model::load(&files, weights, Options { threads, ..Options::default() }).unwrap())
}

fn runtime(pages: u64) -> Runtime {
    let page = PageSize::new(Bytes::kib(16)).unwrap();
    let budget = Bytes::new(pages * page.bytes());
    Runtime::builder().page_size(page).device_budget(budget).policy(PolicyKind::Kv).open().unwrap()
}

fn pool(model: &Model, runtime: &Runtime, blocks: u32) -> KvPool {
    let layout = paged_kv::layout(model.config(), runtime, 0).unwrap();
    assert_eq!((layout.group_layers(), layout.block_tokens()), (1, 16));
    KvPool::open(runtime, layout, b"synthetic", blocks).unwrap()
}

/// The layout of a pool that does not know what passes read.
fn without_windows(layout: &KvLayout) -> KvLayout {
    KvLayout::with(*layout.shape(), layout.page_size(), layout.block_tokens(), layout.group_layers()).unwrap()
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|n| (n * n * 7 + n * seed + seed) % 300).collect()
}

fn tokens(ids: &[u32]) -> Vec<Token> {
    ids.iter().copied().map(Token::new).collect()
}

/// A session with the blocks of this prompt that are there; the rest is computed in passes of `pass` tokens. Returns
/// the last logits, too.
fn begin(model: &Arc<Model>, pool: &KvPool, prompt: &[u32], pass: usize) -> (Session, Vec<f32>) {
    let keys = PagedKeys::new(pool.begin(TENANT, &tokens(prompt)).unwrap());
    let mut session = Session::paged(model.clone(), keys).unwrap();
    let mut logits = Vec::new();
    for part in prompt[session.len()..].chunks(pass) {
        logits = session.forward(part).unwrap();
    }
    (session, logits)
}

/// The next tokens, each the likeliest.
fn words(session: &mut Session, mut logits: Vec<f32>, count: usize) -> Vec<u32> {
    let mut said = Vec::new();
    for _ in 0..count {
        said.push(argmax(&logits));
        logits = session.forward(&said[said.len() - 1..]).unwrap();
    }
    said
}

#[test]
fn passes_threads_and_memory_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = prompt(3, 333);
    for arch in [Arch::Llama, Arch::GptOss, Arch::Gemma2, Arch::Phi3] {
        let mut first: Option<Vec<f32>> = None;
        for (pass, threads, pages) in [(333, 1, 400), (1, 2, 400), (7, 3, 16), (100, 1, 8), (333, 2, 8)] {
            let model = model_of(folder.path(), arch, WeightType::Q8_0, threads);
            let runtime = runtime(pages);
            let pool = pool(&model, &runtime, 64);
            let (session, logits) = begin(&model, &pool, &prompt, pass);
            match &first {
                Some(first) => {
                    assert!(*first == logits, "{arch:?}: passes of {pass}, {threads} threads, {pages} pages")
                }
                None => first = Some(logits),
            }
            drop((session, pool));
            runtime.close().unwrap();
        }
    }
}

/// The sums go in another order. With weights of other types a difference is rounded to one of 1/127 at times.
#[test]
fn logits_are_those_of_a_session_in_memory_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    for arch in [Arch::Llama, Arch::GptOss, Arch::Gemma2, Arch::Gemma3, Arch::Phi3] {
        let (model, runtime) = (model_of(folder.path(), arch, WeightType::F32, 2), runtime(64));
        let pool = pool(&model, &runtime, 64);
        let prompt = prompt(3, 333);
        let (session, paged) = begin(&model, &pool, &prompt, 100);
        // As much room as a session in pages has, by which Phi-3 chooses how it turns heads.
        let logits = Session::new(model, 2048, KvType::F32).unwrap().forward(&prompt).unwrap();
        let scale = logits.iter().fold(0f32, |most, value| most.max(value.abs()));
        let worst = logits.iter().zip(&paged).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(worst <= 1e-4 * scale, "{arch:?}: {worst} of {scale}");
        drop((session, pool));
        runtime.close().unwrap();
    }
}

/// Weights and blocks are in the same few frames, and each pass holds some of both while it waits for others.
#[test]
fn passes_of_several_threads_share_frames_with_keys_and_values() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mixture.gguf");
    let experts = Some(Experts { count: 32, used: 4, fused: false });
    Spec { experts, context: 2048, ..Spec::small(Arch::Qwen3Moe, WeightType::Q8_0) }.write_gguf(&path).unwrap();
    let files = ModelFiles::open(path).unwrap();
    let model = |weights: Arc<dyn Weights>| {
        Arc::new(Model::load(&files, weights, Options { threads: 1, ..Options::default() }).unwrap())
    };
    let plain = model(Arc::new(PlainWeights::read(&files).unwrap()));
    let open = |frames: u64| {
        let page = PageSize::new(Bytes::kib(64)).unwrap();
        let budget = Bytes::new(frames * page.bytes());
        let runtime =
            Runtime::builder().page_size(page).device_budget(budget).policy(PolicyKind::Model).open().unwrap();
        let layout = paged_kv::layout(plain.config(), &runtime, 0).unwrap();
        assert_eq!(layout.block_tokens(), 64);
        (KvPool::open(&runtime, layout, b"synthetic", 64).unwrap(), runtime)
    };
    let answer = |model: &Arc<Model>, pool: &KvPool, seed: u32| {
        let (mut session, logits) = begin(model, pool, &prompt(seed, 150), 60);
        (words(&mut session, logits.clone(), 4), logits)
    };
    let (pool, runtime) = open(400);
    let wanted: Vec<_> = (1..5).map(|seed| answer(&plain, &pool, seed)).collect();
    drop(pool);
    runtime.close().unwrap();
    for frames in [16, 40] {
        let (pool, runtime) = open(frames);
        let opened = runtime.open_parsed(files.header().clone()).unwrap();
        std::thread::scope(|scope| {
            for (seed, wanted) in (1..).zip(&wanted) {
                let (pool, runtime, opened, files, model, answer) = (&pool, &runtime, &opened, &files, &model, &answer);
                scope.spawn(move || {
                    let model = model(Arc::new(PagedWeights::open(runtime, opened, files).unwrap()));
                    assert!(answer(&model, pool, seed) == *wanted, "{frames} frames, thread {seed}");
                });
            }
        });
        let stats = runtime.stats();
        assert!(stats.traffic.disk_written > Bytes::ZERO || frames > 16, "keys and values stayed: {stats:?}");
        drop((pool, opened));
        runtime.close().unwrap();
    }
}

/// Many conversations at once, some with the same beginning, on a device that holds a few of their blocks.
#[test]
fn each_answer_is_that_of_running_alone() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path(), 2);
    let shared = prompt(5, 100);
    let prompts: Vec<Vec<u32>> = (0..6).map(|n| [shared.clone(), prompt(n, 20 + 9 * n)].concat()).collect();
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| {
            let runtime = runtime(400);
            let pool = pool(&model, &runtime, 64);
            let (mut session, logits) = begin(&model, &pool, prompt, 64);
            let said = words(&mut session, logits, 12);
            drop((session, pool));
            runtime.close().unwrap();
            said
        })
        .collect();

    let runtime = runtime(24);
    let pool = pool(&model, &runtime, 128);
    let mut all: Vec<_> = prompts.iter().map(|prompt| begin(&model, &pool, prompt, 33)).collect();
    assert!(pool.stats().found >= 5 * 6, "{:?}", pool.stats());
    let mut said = vec![Vec::new(); all.len()];
    for turn in 0..12 {
        for ((session, logits), said) in all.iter_mut().zip(&mut said) {
            said.push(argmax(logits));
            *logits = session.forward(&said[turn..]).unwrap();
        }
    }
    assert_eq!(said, alone);
    drop(all);
    drop(pool);
    runtime.close().unwrap();
}

#[test]
fn forks_and_refused_passes_leave_what_others_say() {
    [Arch::Llama, Arch::GptOss].into_iter().for_each(forks_and_refused_passes);
}

fn forks_and_refused_passes(arch: Arch) {
    let folder = tempfile::tempdir().unwrap();
    let (model, runtime) = (model_of(folder.path(), arch, WeightType::Q8_0, 1), runtime(64));
    let pool = pool(&model, &runtime, 40);
    let (mut session, logits) = begin(&model, &pool, &prompt(1, 90), 90);
    let mut fork = session.fork().unwrap();
    let first = words(&mut session, logits.clone(), 6);
    assert_eq!(words(&mut fork, logits.clone(), 6), first);
    fork.truncate(90).unwrap();
    assert_eq!(words(&mut fork, logits.clone(), 6), first);
    fork.truncate(90).unwrap();
    fork.park().unwrap();
    assert_eq!(words(&mut fork, logits, 6), first);
    // More than the pool has room for.
    let len = session.len();
    assert!(session.forward(&prompt(2, 900)).is_err());
    assert_eq!(session.len(), len);
    assert!(session.forward(&[5]).is_ok());
    assert!(Session::new(model, 8, KvType::F32).unwrap().fork().is_none());
    drop((session, fork, pool));
    runtime.close().unwrap();
}

#[test]
fn a_prompt_is_not_computed_again_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (model, prompt) = (model_of(folder.path(), Arch::GptOss, WeightType::Q8_0, 1), prompt(9, 200));
    let mut before = None;
    // What is stored does not depend on windows: a block has all layers.
    for (windows, found) in [(true, 0), (false, 192), (true, 192)] {
        let runtime = runtime(64);
        let layout = paged_kv::layout(model.config(), &runtime, 0).unwrap();
        let layout = if windows { layout } else { without_windows(&layout) };
        let store = (folder.path().join("kv"), StoreOptions::new());
        let pool = KvPool::open_with_store(&runtime, layout, b"synthetic", 64, (&store.0, store.1)).unwrap();
        assert_eq!(pool.begin(TENANT, &tokens(&prompt)).unwrap().len(), found);
        let (mut session, logits) = begin(&model, &pool, &prompt, 50);
        let said = words(&mut session, logits, 8);
        assert_eq!(*before.get_or_insert(said.clone()), said);
        pool.save(true).unwrap();
        drop((session, pool));
        runtime.close().unwrap();
    }
}

/// A long answer of a model with windows, in less memory than it has keys and values: a pool that knows the windows
/// gives the same bits by fewer bytes.
#[test]
fn a_pool_that_knows_the_windows_reads_and_writes_less() {
    let folder = tempfile::tempdir().unwrap();
    let model = model_of(folder.path(), Arch::GptOss, WeightType::Q8_0, 1);
    let answer = |windows: bool, pages: u64| {
        let page = PageSize::new(Bytes::kib(16)).unwrap();
        let budget = Bytes::new(pages * page.bytes());
        let builder = Runtime::builder().page_size(page).device_budget(budget).policy(PolicyKind::Plan);
        let runtime = builder.open().unwrap();
        let layout = paged_kv::layout(model.config(), &runtime, 0).unwrap();
        let with: Vec<_> = (0..3).map(|group| layout.window_of(group).map(|window| window.tokens())).collect();
        assert_eq!(with, [Some(41), None, Some(41)]);
        let layout = if windows { layout } else { without_windows(&layout) };
        let pool = KvPool::open(&runtime, layout, b"synthetic", 64).unwrap();
        let mut sequence = pool.begin(TENANT, &[]).unwrap();
        sequence.plan_passes().unwrap();
        let mut session = Session::paged(model.clone(), PagedKeys::new(sequence)).unwrap();
        let mut logits = Vec::new();
        for part in prompt(3, 400).chunks(50) {
            logits = session.forward(part).unwrap();
        }
        let said = words(&mut session, logits, 200);
        let traffic = runtime.stats().traffic;
        drop((session, pool));
        runtime.close().unwrap();
        (said, traffic.disk_read, traffic.disk_written)
    };
    let (said, ..) = answer(false, 200);
    // 38 blocks of three layers at the end, of which two need four each.
    let (within, whole) = (answer(true, 64), answer(false, 64));
    assert_eq!([&within.0, &whole.0], [&said; 2]);
    assert!(within.1.get() * 10 < whole.1.get(), "read {} and {}", within.1, whole.1);
    assert!(within.2 <= whole.2, "written {} and {}", within.2, whole.2);
}

#[test]
fn a_permit_for_a_model_with_windows_counts_what_its_passes_use() {
    let folder = tempfile::tempdir().unwrap();
    let (model, runtime) = (model_of(folder.path(), Arch::GptOss, WeightType::Q8_0, 1), runtime(200));
    let pool = pool(&model, &runtime, 200);
    pool.set_active(ActiveOptions::default().blocks_most(60).reserve(0));
    // 50 blocks of three layers. Two of them see 41 tokens: with passes of 30, positions of six blocks at most.
    let extent = Extent::new(800).in_passes_of(30);
    let permits = [(); 2].map(|()| pool.admit(TENANT, extent).unwrap().wait().unwrap());
    let layout = pool.layout().clone();
    assert!(permits.iter().all(|permit| permit.bytes() == Bytes::new((50 + 2 * 6) * layout.block_room().get())));
    let mut sessions: Vec<_> = permits
        .into_iter()
        .map(|permit| {
            let mut sequence = pool.begin(TENANT, &[]).unwrap();
            sequence.activate(permit).unwrap();
            Session::paged(model.clone(), PagedKeys::new(sequence)).unwrap()
        })
        .collect();
    for (seed, session) in (1..).zip(&mut sessions) {
        for part in prompt(seed, 800).chunks(30) {
            session.forward(part).unwrap();
        }
        let error = session.forward(&prompt(seed, 300)).unwrap_err();
        assert!(error.to_string().contains("has a permit for 20.67"), "{error}");
        assert_eq!(session.len(), 800);
    }
    assert_eq!((pool.stats().used, pool.stats().active, pool.stats().active_most), (100, 42, 60));
    drop((sessions, pool));
    runtime.close().unwrap();
}
