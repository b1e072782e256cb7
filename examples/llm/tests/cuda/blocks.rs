//! Keys and values in blocks of a pool, on a GPU: logits are those of the CPU's blocks, and neither passes, waves,
//! memory nor other sessions change a bit of them.

use std::sync::Arc;

use outcore::{DType, PolicyKind};
use outcore_kv::{KvLayout, KvPool, KvShape, StoreOptions, TenantId, Token};
use outcore_llm::{PagedKeys, paged_kv};
use outcore_testkit::harness::until;

use super::*;

const PAGE_OF_EMULATED: Bytes = Bytes::kib(16);
const TENANT: TenantId = TenantId::new(1);
/// Longer than the pool has blocks for.
const CONTEXT: u64 = 1 << 17;
/// Frames for everything.
const AMPLE: u64 = 800;
/// Frames for a few blocks and the weights of a step.
const FEW: u64 = 24;

/// Rows such that pages of 2 MiB have blocks of 1024 tokens, and the emulated GPU's pages of 16 KiB such of 8.
fn shape(arch: Arch) -> Spec {
    let head_dim = if arch == Arch::Qwen3 { 128 } else { 64 };
    Spec { layers: 3, heads: 512 / head_dim, kv_heads: 256 / head_dim, head_dim, ..spec(arch, WeightType::F32) }
}

fn files(folder: &Path, arch: Arch) -> ModelFiles {
    gguf(folder, &Spec { ffn_dim: 256, vocab: 300, context: CONTEXT, ..shape(arch) })
}

/// Tokens of a block.
fn each(driver: &Driver) -> usize {
    if driver.fake.is_some() { 8 } else { 1024 }
}

/// Tokens that fill six blocks and begin one.
fn prompt(driver: &Driver, seed: u32) -> Vec<u32> {
    (0..6 * each(driver) as u32 + 5).map(|n| (n * n * 7 + n * seed + seed) % 300).collect()
}

fn tokens(ids: &[u32]) -> Vec<Token> {
    ids.iter().copied().map(Token::new).collect()
}

fn pool(runtime: &Runtime, config: &outcore_llm::Config, blocks: u32) -> KvPool {
    let layout = paged_kv::layout(config, runtime, 1 << 20).unwrap();
    assert_eq!(layout.group_layers(), 1);
    KvPool::open(runtime, layout, b"synthetic", blocks).unwrap()
}

/// Runs `body` with a model and a pool of 60 blocks on a GPU that has `frames` frames.
fn on_gpu<T>(driver: &Driver, files: &ModelFiles, frames: u64, body: impl FnOnce(&Arc<CudaModel>, &KvPool) -> T) -> T {
    let page = page_size(driver, PAGE_OF_EMULATED);
    let gpu = own_kernels(driver).unwrap();
    let builder = Runtime::builder().device(driver.device.clone()).page_size(page).policy(PolicyKind::Kv);
    let runtime = builder.device_budget(Bytes::new(frames * page.bytes())).open().unwrap();
    let done = {
        let model = runtime.open_parsed(files.header().clone()).unwrap();
        let weights = Arc::new(PagedWeights::open(&runtime, &model, files).unwrap());
        let model = Arc::new(CudaModel::load(files, weights, Arc::new(gpu)).unwrap());
        body(&model, &pool(&runtime, model.config(), 60))
    };
    runtime.close().unwrap();
    done
}

/// A session that begins with what the pool has of a prompt.
fn begin(model: &Arc<CudaModel>, pool: &KvPool, prompt: &[u32], pass: usize) -> CudaSession {
    let keys = PagedKeys::new(pool.begin(TENANT, &tokens(prompt)).unwrap());
    CudaSession::paged(model.clone(), keys, pass).unwrap()
}

/// A session that has read a prompt, and the logits after it.
fn read(model: &Arc<CudaModel>, pool: &KvPool, prompt: &[u32], pass: usize) -> (CudaSession, Vec<f32>) {
    let mut session = begin(model, pool, prompt, pass);
    let logits = session.forward(&prompt[session.len()..]).unwrap().to_vec();
    (session, logits)
}

/// The next tokens, each the likeliest, and the logits after the last one.
fn words(session: &mut CudaSession, mut logits: Vec<f32>, count: usize) -> (Vec<u32>, Vec<f32>) {
    let mut said = Vec::new();
    for _ in 0..count {
        said.push(argmax(&logits));
        logits = session.forward(&said[said.len() - 1..]).unwrap().to_vec();
    }
    (said, logits)
}

/// What runs on a GPU as it does on the emulated driver.
mod on_a_gpu {
    use super::*;

    #[test]
    fn logits_are_those_of_the_blocks_of_the_cpu() {
        let Some(driver) = driver("logits_are_those_of_the_blocks_of_the_cpu") else { return };
        let folder = tempfile::tempdir().unwrap();
        for arch in [Arch::Llama, Arch::Qwen3] {
            let files = files(folder.path(), arch);
            let prompt = prompt(&driver, 3);
            let page = page_size(&driver, PAGE_OF_EMULATED);
            let runtime =
                Runtime::builder().page_size(page).device_budget(Bytes::new(100 * page.bytes())).open().unwrap();
            let cpu = Model::load(&files, Arc::new(PlainWeights::read(&files).unwrap()), Options::default()).unwrap();
            let blocks = pool(&runtime, cpu.config(), 60);
            let keys = PagedKeys::new(blocks.begin(TENANT, &[]).unwrap());
            let mut cpu = Session::paged(Arc::new(cpu), keys).unwrap();
            let mut want = cpu.forward(&prompt).unwrap();
            on_gpu(&driver, &files, AMPLE, |model, pool| {
                let (mut session, mut got) = read(model, pool, &prompt, prompt.len());
                for nth in 0..4 {
                    assert_near(&format!("{arch:?}, {nth} tokens behind the prompt"), &got, &want, 1e-3);
                    let token = argmax(&want);
                    want = cpu.forward(&[token]).unwrap();
                    got = session.forward(&[token]).unwrap().to_vec();
                }
                assert_eq!((session.len(), session.capacity()), (prompt.len() + 4, CONTEXT as usize));
            });
            drop((cpu, blocks));
            runtime.close().unwrap();
        }
        driver.finish();
    }

    /// In few frames most blocks of the context are elsewhere at any time.
    #[test]
    fn passes_waves_and_memory_change_no_bit() {
        let Some(driver) = driver("passes_waves_and_memory_change_no_bit") else { return };
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), Arch::Llama);
        let (prompt, each) = (prompt(&driver, 5), each(&driver));
        let mut first = None;
        for (pass, frames) in [(prompt.len(), AMPLE), (each - 3, AMPLE), (prompt.len(), FEW), (2 * each + 1, 14)] {
            let found = on_gpu(&driver, &files, frames, |model, pool| {
                let (mut session, logits) = read(model, pool, &prompt, pass);
                let (said, last) = words(&mut session, logits.clone(), 3);
                let stats = pool.runtime().stats();
                if frames <= FEW {
                    let context = 3 * 7 * stats.page_size.bytes();
                    assert!(stats.device.budget.get() <= context + 3 * stats.page_size.bytes(), "{:?}", stats.device);
                    assert!(stats.traffic.disk_written.get() > 0, "no block was ever written back");
                }
                assert!(session.last_pass().total >= session.last_pass().waited);
                (logits, said, last)
            });
            assert!(*first.get_or_insert(found.clone()) == found, "passes of {pass}, {frames} frames");
        }
        driver.finish();
    }

    /// All layers' rows lie in one block, which each layer writes to while the one before is still read.
    #[test]
    fn how_many_layers_a_block_has_changes_no_bit() {
        let Some(driver) = driver("how_many_layers_a_block_has_changes_no_bit") else { return };
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), Arch::Llama);
        let (prompt, each) = (prompt(&driver, 11), each(&driver));
        on_gpu(&driver, &files, AMPLE, |model, pool| {
            let (_, want) = read(model, pool, &prompt, 2 * each);
            let layout = pool.layout();
            let layout = KvLayout::with(*layout.shape(), layout.page_size(), layout.block_tokens(), 3).unwrap();
            let pool = KvPool::open(pool.runtime(), layout, b"", 20).unwrap();
            let (_, got) = read(model, &pool, &prompt, 2 * each);
            assert!(got == want);
        });
        driver.finish();
    }

    #[test]
    fn forks_and_parked_sessions_go_on_as_if_nothing_had_been() {
        let Some(driver) = driver("forks_and_parked_sessions_go_on_as_if_nothing_had_been") else { return };
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), Arch::Llama);
        let prompt = prompt(&driver, 7);
        on_gpu(&driver, &files, AMPLE, |model, pool| {
            let (mut session, logits) = read(model, pool, &prompt, prompt.len());
            let mut fork = session.fork().unwrap().unwrap();
            let mut other = session.fork().unwrap().unwrap();
            let said = words(&mut session, logits.clone(), 4);
            // It has the logits of the prompt, and its own block behind the shared ones.
            assert_eq!(fork.sample(&mut Sampler::greedy()).unwrap(), argmax(&logits));
            other.forward(&[1, 2, 3]).unwrap();
            assert_eq!(words(&mut fork, logits.clone(), 4), said);
            fork.truncate(prompt.len()).unwrap();
            fork.park().unwrap();
            // They are written back first.
            let on_device = || pool.tiers(TENANT, &tokens(&prompt)).unwrap().iter().map(|tiers| tiers[0]).sum::<u64>();
            until("no page is on the GPU", || on_device() == 0);
            assert_eq!(words(&mut fork, logits.clone(), 4), said);
            // Others find the prompt's blocks.
            let (found, again) = read(model, pool, &prompt, prompt.len());
            assert!(pool.stats().found >= 6, "{:?}", pool.stats());
            assert!(again == logits && found.len() == prompt.len());
            // More than the pool has room for.
            let len = session.len();
            let error = session.forward(&vec![1; 60 * each(&driver)]).map(drop).unwrap_err();
            assert!(error.to_string().contains("blocks of the pool"), "{error}");
            assert_eq!(session.len(), len);
            session.truncate(prompt.len()).unwrap();
            assert_eq!(words(&mut session, logits.clone(), 4), said);
        });
        // What has its keys and values in memory of its own has no forks, and is not parked.
        {
            let mut plain = session(&driver, &files, 4, 8).unwrap();
            plain.forward(&PROMPT[..5]).unwrap();
            assert!(plain.fork().unwrap().is_none() && plain.park().is_ok());
        }
        driver.finish();
    }

    /// A sequence whose complete blocks turn out to be those of another one uses the other's from then on, and its own
    /// are free: the table of the kernels has to follow.
    #[test]
    fn sequences_that_read_the_same_side_by_side_go_on_alike() {
        let Some(driver) = driver("sequences_that_read_the_same_side_by_side_go_on_alike") else { return };
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), Arch::Llama);
        let prompt = &prompt(&driver, 17)[..2 * each(&driver) + 3];
        for graphs in [false, true] {
            on_gpu(&driver, &files, AMPLE, |model, pool| {
                let mut sessions = [begin(model, pool, prompt, 64), begin(model, pool, prompt, 64)];
                let [first, second] = &mut sessions;
                assert!(first.is_empty() && second.is_empty());
                first.use_graphs(graphs);
                second.use_graphs(graphs);
                let logits = first.forward(prompt).unwrap().to_vec();
                assert!(second.forward(prompt).unwrap() == logits);
                assert!(pool.stats().joined > 0, "{:?}", pool.stats());
                // Somebody else takes the blocks that are free now.
                let other: Vec<u32> = (0..prompt.len() as u32).map(|n| (n * 11 + 7) % 300).collect();
                let mut third = begin(model, pool, &other, 64);
                third.forward(&other).unwrap();
                assert_eq!(words(first, logits.clone(), 3), words(second, logits, 3), "graphs: {graphs}");
            });
        }
        driver.finish();
    }

    #[test]
    fn a_prompt_is_not_computed_again_after_a_restart() {
        let Some(driver) = driver("a_prompt_is_not_computed_again_after_a_restart") else { return };
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), Arch::Llama);
        let prompt = prompt(&driver, 13);
        let run = || {
            on_gpu(&driver, &files, AMPLE, |model, pool| {
                let store = (&*folder.path().join("kv"), StoreOptions::new());
                let (runtime, layout) = (pool.runtime(), pool.layout().clone());
                let pool = KvPool::open_with_store(runtime, layout, b"synthetic", 20, store).unwrap();
                let found = begin(model, &pool, &prompt, 1).len();
                let (_, logits) = read(model, &pool, &prompt, prompt.len());
                pool.save(true).unwrap();
                (found, logits)
            })
        };
        let (before, after) = (run(), run());
        assert_eq!((before.0, after.0), (0, 6 * each(&driver)));
        assert!(before.1 == after.1);
        driver.finish();
    }

    /// The CPU has read a long text, whose keys and values come from a store. Its next tokens are those of a GPU that
    /// has frames for a tenth of them, and for all of them: then a token is a graph.
    #[test]
    fn a_long_context_goes_through_few_frames() {
        const TOKENS: u32 = 2048;
        let Some(driver) = driver("a_long_context_goes_through_few_frames") else { return };
        let folder = tempfile::tempdir().unwrap();
        let (page, each) = (page_size(&driver, PAGE_OF_EMULATED), each(&driver));
        let small =
            Spec { layers: 1, heads: 4, kv_heads: 4, ffn_dim: 256, vocab: 300, ..spec(Arch::Llama, WeightType::F32) };
        let files = gguf(folder.path(), &Spec { context: 1 << 14, ..small });
        let prompt: Vec<u32> = (0..TOKENS + 5).map(|n| (n * n * 7 + n) % 300).collect();
        let (blocks, kept) = (TOKENS / each as u32 + 4, folder.path().join("kv"));
        let store = || (&*kept, StoreOptions::new());
        let runtime = Runtime::builder()
            .page_size(page)
            .device_budget(Bytes::new(u64::from(blocks + 8) * page.bytes()))
            .open()
            .unwrap();
        let (mut want, mut said) = (Vec::new(), Vec::new());
        {
            let cpu = Model::load(&files, Arc::new(PlainWeights::read(&files).unwrap()), Options::default()).unwrap();
            let layout = paged_kv::layout(cpu.config(), &runtime, 1 << 20).unwrap();
            let pool = KvPool::open_with_store(&runtime, layout, b"synthetic", blocks, store()).unwrap();
            let keys = PagedKeys::new(pool.begin(TENANT, &[]).unwrap());
            let mut cpu = Session::paged(Arc::new(cpu), keys).unwrap();
            want.push(cpu.forward(&prompt).unwrap());
            for _ in 0..2 {
                said.push(argmax(want.last().unwrap()));
                want.push(cpu.forward(&said[said.len() - 1..]).unwrap());
            }
            pool.save(true).unwrap();
        }
        runtime.close().unwrap();
        let mut first = None;
        for (frames, graphs) in [(u64::from(TOKENS) / each as u64 / 10, false), (4 * u64::from(blocks), true)] {
            let frames = frames.max(FEW);
            let found = on_gpu(&driver, &files, frames, |model, pool| {
                let (runtime, layout) = (pool.runtime(), pool.layout().clone());
                let pool = KvPool::open_with_store(runtime, layout, b"synthetic", blocks, store()).unwrap();
                let mut session = begin(model, &pool, &prompt, 8);
                assert_eq!(session.len(), TOKENS as usize);
                let mut found = vec![session.forward(&prompt[TOKENS as usize..]).unwrap().to_vec()];
                let before = session.counts();
                for token in &said {
                    found.push(session.forward(&[*token]).unwrap().to_vec());
                }
                let counts = session.counts() - before;
                // All but the embedding is in graphs, or there is a launch for each wave.
                let launches = counts.launches / counts.passes;
                assert!(if graphs { launches == 1 } else { launches > 20 }, "{frames} frames: {counts:?}");
                found
            });
            for (found, want) in found.iter().zip(&want) {
                assert_near(&format!("{TOKENS} tokens in {frames} frames"), found, want, 1e-3);
            }
            assert!(*first.get_or_insert(found.clone()) == found, "{frames} frames");
        }
        driver.finish();
    }

    #[test]
    fn pools_that_do_not_suit_are_refused() {
        let Some(driver) = driver("pools_that_do_not_suit_are_refused") else { return };
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), Arch::Llama);
        on_gpu(&driver, &files, AMPLE, |model, pool| {
            let page = pool.runtime().stats().page_size;
            let refusal = |runtime: &Runtime, shape: KvShape, tokens: u32| {
                let layout = KvLayout::with(shape, page, tokens, 1).unwrap();
                let pool = KvPool::open(runtime, layout, b"", 4).unwrap();
                let keys = PagedKeys::new(pool.begin(TENANT, &[]).unwrap());
                CudaSession::paged(model.clone(), keys, 8).map(drop).unwrap_err().in_full()
            };
            let tokens = each(&driver) as u32;
            let halves = refusal(pool.runtime(), KvShape::new(3, 4, 64, DType::BF16).unwrap(), 2 * tokens);
            assert!(halves.contains("BF16") && halves.contains("3 layers of 4 heads of 64 F32 or F16"), "{halves}");
            let deeper = refusal(pool.runtime(), KvShape::new(4, 4, 64, DType::F32).unwrap(), tokens);
            assert!(deeper.contains("4 layers") && deeper.contains("paged_kv::layout"), "{deeper}");
            // Blocks in this machine's memory.
            let host = Runtime::builder().page_size(page).device_budget(Bytes::new(8 * page.bytes())).open().unwrap();
            let elsewhere = refusal(&host, KvShape::new(3, 4, 64, DType::F32).unwrap(), tokens);
            assert!(elsewhere.contains("GPU"), "{elsewhere}");
            host.close().unwrap();
        });
        driver.finish();
    }
}

/// A raised flag ends a pass between two of its waves, too.
#[test]
fn a_pass_over_blocks_that_is_given_up_leaves_the_session_as_it_was() {
    let Some(driver) = driver("a_pass_over_blocks_that_is_given_up_leaves_the_session_as_it_was") else { return };
    let folder = tempfile::tempdir().unwrap();
    let files = files(folder.path(), Arch::Llama);
    let (page, prompt, flag) =
        (page_size(&driver, PAGE_OF_EMULATED), prompt(&driver, 9), Arc::new(AtomicBool::new(false)));
    // A page is mapped whenever one comes, of the weights or of a block.
    let hook = Raising { left: AtomicU32::new(0), flag: flag.clone() };
    let hook = Arc::new(hook);
    let runtime = Runtime::builder()
        .device(Hooked::new(driver.device.clone(), hook.clone()))
        .page_size(page)
        .device_budget(Bytes::new(FEW * page.bytes()))
        .open()
        .unwrap();
    {
        let model = runtime.open_parsed(files.header().clone()).unwrap();
        let weights = PagedWeights::open(&runtime, &model, &files).unwrap().cancelled_by(flag.clone());
        let gpu = Arc::new(own_kernels(&driver).unwrap());
        let model = Arc::new(CudaModel::load(&files, Arc::new(weights), gpu).unwrap());
        let pool = pool(&runtime, model.config(), 60);
        let (mut session, want) = read(&model, &pool, &prompt, 50);
        for maps in [1, 150] {
            session.truncate(0).unwrap();
            hook.left.store(maps, Ordering::SeqCst);
            assert!(matches!(session.forward(&prompt), Err(Error::Cancelled)), "{maps} pages into the pass");
            assert!(session.is_empty() && flag.swap(false, Ordering::SeqCst));
            assert!(session.forward(&prompt).unwrap() == want, "{maps} pages into the pass");
        }
    }
    runtime.close().unwrap();
    driver.finish();
}

/// Wherever a launch fails: what was launched is waited for, the session is as it was before, and goes on.
#[test]
fn a_launch_that_fails_leaves_the_session_as_it_was() {
    const UNKNOWN: u32 = 999;
    let Some(driver) = driver("a_launch_that_fails_leaves_the_session_as_it_was") else { return };
    let Some(fake) = &driver.fake else { return };
    let folder = tempfile::tempdir().unwrap();
    let files = files(folder.path(), Arch::Llama);
    // Two passes: one within a block, one that begins in it and ends in the next.
    let prompt = &prompt(&driver, 9)[..10];
    on_gpu(&driver, &files, AMPLE, |model, pool| {
        let launches = || fake.calls("cuLaunchKernel");
        let before = launches();
        let (mut session, want) = read(model, pool, prompt, 6);
        let made = launches() - before;
        for nth in (1..=made).step_by(made as usize / 3) {
            session.truncate(0).unwrap();
            fake.fail_nth("cuLaunchKernel", nth, UNKNOWN);
            let error = session.forward(prompt).map(drop).unwrap_err();
            assert!(error.to_string().contains("CUDA_ERROR_UNKNOWN"), "{nth} of {made}: {error}");
            assert!(session.is_empty());
            assert!(session.forward(prompt).unwrap() == want, "{nth} of {made}");
        }
    });
    driver.finish();
}
