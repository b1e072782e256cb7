//! How a token is launched: how many kernels, graphs, pins and waits it takes, and that none of this changes a bit.

use std::time::Duration;

use outcore_llm::{PassCounts, Timing};

use super::*;

/// CUDA_ERROR_OUT_OF_MEMORY.
const OUT_OF_MEMORY: u32 = 2;
/// Frames for the whole model of [`small`] and more.
const AMPLE: u64 = 32;
const PAGE_OF_EMULATED: Bytes = Bytes::kib(512);
/// Fewer than the model has pages.
const FEW: u64 = 4;

/// A session on the GPU with keys and values in elements of `kv`.
fn session_of(driver: &Driver, files: &ModelFiles, frames: u64, kv: KvType, graphs: bool) -> OnGpu {
    session_in(driver, files, page_size(driver, PAGE_OF_EMULATED), frames, kv, graphs)
}

/// The same with frames for pages of a size.
fn session_in(driver: &Driver, files: &ModelFiles, page: PageSize, frames: u64, kv: KvType, graphs: bool) -> OnGpu {
    let gpu = own_kernels(driver).unwrap();
    let builder = Runtime::builder().device(driver.device.clone()).page_size(page);
    let runtime = builder.device_budget(Bytes::new(frames * page.bytes())).open().unwrap();
    let mut opened = OnGpu { session: None, runtime };
    let model = opened.runtime.open_parsed(files.header().clone()).unwrap();
    let weights = Arc::new(PagedWeights::open(&opened.runtime, &model, files).unwrap());
    drop(model);
    let model = Arc::new(CudaModel::load(files, weights, Arc::new(gpu)).unwrap());
    let mut session = CudaSession::new(model, 40, 16, kv).unwrap();
    session.use_graphs(graphs);
    opened.session = Some(session);
    opened
}

/// What `tokens` tokens take, each chosen from the one before, in calls of the session.
fn counted(session: &mut CudaSession, first: u32, tokens: u64) -> (Vec<u32>, PassCounts) {
    let (before, mut sampler) = (session.counts(), Sampler::greedy());
    let mut said = vec![first];
    for _ in 0..tokens {
        said.push(session.next(&said[said.len() - 1..], &mut sampler).unwrap());
    }
    (said, session.counts() - before)
}

/// Logits after a prompt and after tokens behind it, and what the last few took.
fn logits(session: &mut CudaSession) -> Vec<Vec<f32>> {
    let mut found = vec![session.forward(&PROMPT).unwrap().to_vec()];
    for token in [7, 999, 0, 7] {
        found.push(session.forward(&[token]).unwrap().to_vec());
    }
    found
}

/// What runs on a GPU as it does on the emulated driver.
mod on_a_gpu {
    use super::*;

    #[test]
    fn graphs_and_residence_change_no_bit() {
        let Some(driver) = driver("graphs_and_residence_change_no_bit") else { return };
        let folder = tempfile::tempdir().unwrap();
        let cases = [
            (Arch::Llama, WeightType::Q8_0, KvType::F16),
            (Arch::Qwen2, WeightType::F32, KvType::F32),
            (Arch::Qwen3, WeightType::Q4_K, KvType::F16),
        ];
        for (arch, dtype, kv) in cases {
            let files = gguf(folder.path(), &small(arch, dtype));
            let mut first = None;
            for (frames, graphs) in [(AMPLE, false), (AMPLE, true), (FEW, false), (FEW, true), (2, true)] {
                let mut session = session_of(&driver, &files, frames, kv, graphs);
                let found = logits(&mut session);
                let counts = session.counts();
                assert_eq!(counts.graph_launches > 0, graphs, "{counts:?}");
                let what = format!("{arch:?}, {dtype}, {frames} frames, graphs: {graphs}");
                assert!(*first.get_or_insert(found.clone()) == found, "{what}");
            }
        }
        driver.finish();
    }

    /// Half the memory for keys and values moves the logits by what half precision rounds.
    #[test]
    fn keys_and_values_of_sixteen_bits_give_nearly_the_same_logits() {
        let Some(driver) = driver("keys_and_values_of_sixteen_bits_give_nearly_the_same_logits") else { return };
        let folder = tempfile::tempdir().unwrap();
        let files = gguf(folder.path(), &small(Arch::Llama, WeightType::F32));
        let run = |kv| logits(&mut session_of(&driver, &files, AMPLE, kv, true));
        let (halves, floats) = (run(KvType::F16), run(KvType::F32));
        assert_ne!(halves, floats);
        for (halves, floats) in halves.iter().zip(&floats) {
            assert_near("keys and values of 16 bits", halves, floats, 2e-3);
        }
        let config = outcore_llm::Config::new(&files).unwrap();
        let memory = |kv| CudaSession::memory(&config, 32, 1, kv).unwrap().get();
        let keys = 2 * config.layers * config.kv_heads * config.head_dim * 32;
        assert_eq!(memory(KvType::F32) - memory(KvType::F16), 2 * keys as u64);
        driver.finish();
    }

    /// The random numbers go to the GPU as the CPU draws them: the same seed gives the same tokens, with graphs and
    /// without.
    #[test]
    fn a_seed_gives_the_tokens_of_the_cpu() {
        let Some(driver) = driver("a_seed_gives_the_tokens_of_the_cpu") else { return };
        let folder = tempfile::tempdir().unwrap();
        let files = gguf(folder.path(), &small(Arch::Llama, WeightType::F32));
        for graphs in [false, true] {
            let mut session = session_of(&driver, &files, AMPLE, KvType::F32, graphs);
            let (mut device, mut host) = (Sampler::new(0.8, 3), Sampler::new(0.8, 3));
            let mut token = vec![11, 400];
            for nth in 0..12 {
                let chosen = session.next(&token, &mut device).unwrap();
                assert_eq!(chosen, host.sample(session.logits().unwrap()), "token {nth}, graphs: {graphs}");
                token = vec![chosen];
            }
        }
        driver.finish();
    }
}

/// Launches, graphs, waits and pins of a token where everything is resident: in counts of the emulated driver.
#[test]
fn a_token_of_a_resident_model_takes_few_calls() {
    const TOKENS: u64 = 3;
    let Some(driver) = driver("a_token_of_a_resident_model_takes_few_calls") else { return };
    let Some(fake) = &driver.fake else { return };
    let folder = tempfile::tempdir().unwrap();
    for arch in [Arch::Llama, Arch::Qwen2, Arch::Qwen3] {
        let spec = small(arch, WeightType::Q8_0);
        let files = gguf(folder.path(), &spec);
        let calls = || {
            let waits = ["cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cuMemcpyDtoH_v2"];
            let of = |names: &[&str]| names.iter().map(|name| fake.calls(name)).sum::<u64>();
            let copies = of(&["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"]);
            [of(&["cuLaunchKernel"]), of(&["cuGraphLaunch"]), of(&waits), copies, of(&["cuStreamBeginCapture_v2"])]
        };
        let mut said = Vec::new();
        for graphs in [false, true] {
            let mut session = session_of(&driver, &files, AMPLE, KvType::F16, graphs);
            let first = session.next(&PROMPT, &mut Sampler::greedy()).unwrap();
            let (before, _) = counted(&mut session, first, 3);
            let made = calls();
            let (tokens, counts) = counted(&mut session, before[3], TOKENS);
            let [launches, graph_launches, waits, copies, captures] = {
                let now = calls();
                std::array::from_fn(|nth| now[nth] - made[nth])
            };
            let what = format!("{arch:?}, graphs: {graphs}, {counts:?}");
            assert_eq!((counts.passes, counts.pins, captures), (TOKENS, 0, 0), "{what}");
            assert_eq!((waits, counts.synchronisations), (TOKENS, TOKENS), "{what}");
            assert_eq!((launches, graph_launches), (counts.launches, counts.graph_launches), "{what}");
            if graphs {
                assert!(launches == 0 && copies == 0 && graph_launches <= 3 * TOKENS, "{what}, {copies} copies");
                // The kernels of layers, embedding, logits and choice; the copies of what goes in and of the token.
                assert!(counts.graph_nodes <= (7 * spec.layers + 3 + 3) * TOKENS, "{what}");
            } else {
                assert!(launches <= (7 * spec.layers + 3) * TOKENS && copies <= 3 * TOKENS, "{what}, {copies} copies");
            }
            said.push((before, tokens));
        }
        assert_eq!(said[0], said[1], "{arch:?}");
    }
    driver.finish();
}

/// Timing changes no bit and adds no wait and no launch: only two records of events for a pass, and two for each pin.
#[test]
fn times_on_the_gpu_take_no_wait_of_their_own() {
    const TOKENS: u64 = 2;
    let Some(driver) = driver("times_on_the_gpu_take_no_wait_of_their_own") else { return };
    let Some(fake) = &driver.fake else { return };
    let folder = tempfile::tempdir().unwrap();
    // Small pages, of which a third of the frames hold a layer where not all frames hold the model.
    let page = page_size(&driver, Bytes::kib(64));
    let files = gguf(folder.path(), &Spec { layers: 4, vocab: 300, ..spec(Arch::Llama, WeightType::Q8_0) });
    let pages: u64 = files.header().files.iter().map(|file| page.pages_for(file.len)).sum();
    for (streams, graphs) in [(false, true), (false, false), (true, true)] {
        let frames = if streams { pages * 3 / 4 } else { pages };
        let mut session = session_in(&driver, &files, page, frames, KvType::F16, graphs);
        let first = session.next(&PROMPT, &mut Sampler::greedy()).unwrap();
        counted(&mut session, first, 2);
        let wakers = fake.blocking_events();
        let mut untimed = None;
        for timing in [Timing::Off, Timing::Passes, Timing::Stalls] {
            let what = format!("streams: {streams}, graphs: {graphs}, {timing:?}");
            session.truncate(PROMPT.len()).unwrap();
            session.time(timing);
            let names =
                ["cuStreamSynchronize", "cuEventSynchronize", "cuLaunchKernel", "cuGraphLaunch", "cuEventRecord"];
            let before = names.map(|name| fake.calls(name));
            let (mut said, mut wall, counts) = (vec![first], Duration::ZERO, session.counts());
            for _ in 0..TOKENS {
                said.push(session.next(&said[said.len() - 1..], &mut Sampler::greedy()).unwrap());
                wall += session.last_pass().total;
            }
            let counts = session.counts() - counts;
            let calls: [u64; 5] = std::array::from_fn(|nth| fake.calls(names[nth]) - before[nth]);
            let [synchronised, waited_for_events, launches, graph_launches, records] = calls;
            assert_eq!((synchronised, waited_for_events, counts.synchronisations), (TOKENS, 0, TOKENS), "{what}");
            assert_eq!((launches, graph_launches), (counts.launches, counts.graph_launches), "{what}");
            if !streams {
                let wanted = if timing == Timing::Off { 0 } else { 2 * TOKENS };
                assert_eq!((counts.pins, records), (0, wanted), "{what}");
            } else {
                assert!(counts.pins > 0, "{what}");
            }
            let took = (said, launches, graph_launches, counts.graph_nodes, counts.pins);
            assert_eq!(*untimed.get_or_insert(took.clone()), took, "{what}");
            assert!(counts.waiting > Duration::ZERO && counts.waiting <= wall, "{what}: {counts:?} in {wall:?}");
            assert_eq!(counts.gpu > Duration::ZERO, timing != Timing::Off, "{what}: {counts:?}");
            assert!(counts.gpu <= wall, "{what}: {counts:?} in {wall:?}");
            assert_eq!(counts.stalled > Duration::ZERO, timing == Timing::Stalls && streams, "{what}: {counts:?}");
            assert!(counts.stalled <= counts.gpu, "{what}: {counts:?}");
        }
        assert_eq!(fake.blocking_events(), wakers, "an event wakes a thread of the driver");
    }
    driver.finish();
}

/// The time of a pass is counted by the call that waits for it, and not that of a pass that ended in an error.
#[test]
fn the_time_of_a_pass_is_its_own() {
    let Some(driver) = driver("the_time_of_a_pass_is_its_own") else { return };
    let Some(fake) = &driver.fake else { return };
    let folder = tempfile::tempdir().unwrap();
    let files = gguf(folder.path(), &Spec { vocab: 300, ..spec(Arch::Llama, WeightType::Q8_0) });
    let mut session = session_of(&driver, &files, AMPLE, KvType::F16, true);
    session.time(Timing::Passes);
    let records = || fake.calls("cuEventRecord");
    let mut sampler = Sampler::greedy();
    for _ in 0..3 {
        session.next(&[7], &mut sampler).unwrap();
    }
    let (counts, made) = (session.counts(), records());
    session.read(&[5, 6]).unwrap();
    assert_eq!((session.counts() - counts).gpu, Duration::ZERO);
    // The copy of the logits is a span of its own: the GPU is idle between the two calls.
    session.logits().unwrap();
    assert_eq!(records() - made, 4);
    assert!((session.counts() - counts).gpu > Duration::ZERO);

    fake.fail_nth("cuGraphLaunch", 1, OUT_OF_MEMORY);
    assert!(session.next(&[8], &mut sampler).is_err());
    let (counts, made) = (session.counts(), records());
    session.next(&[8], &mut sampler).unwrap();
    assert_eq!(records() - made, 2, "the span of the pass before goes on");
    let took = (session.counts() - counts).gpu;
    assert!(took > Duration::ZERO && took <= session.last_pass().total, "{took:?}");
    drop(session);
    driver.finish();
}

/// One pin a layer, one more for the embedding, and one for the logits, where the budget is less than the model.
#[test]
fn a_token_of_a_streamed_model_takes_a_pin_and_a_graph_a_layer() {
    const TOKENS: u64 = 4;
    let Some(driver) = driver("a_token_of_a_streamed_model_takes_a_pin_and_a_graph_a_layer") else { return };
    let Some(fake) = &driver.fake else { return };
    let folder = tempfile::tempdir().unwrap();
    // Small pages, of which a third of the frames hold a layer, and not all frames the model.
    let page = page_size(&driver, Bytes::kib(64));
    let spec = Spec { layers: 6, vocab: 300, ..spec(Arch::Llama, WeightType::Q8_0) };
    let files = gguf(folder.path(), &spec);
    let bytes: u64 = files.header().files.iter().map(|file| file.len).sum();
    {
        let mut session = session_in(&driver, &files, page, bytes * 3 / 4 / page.bytes(), KvType::F16, true);
        let runtime = session.runtime.clone();
        let first = session.next(&PROMPT, &mut Sampler::greedy()).unwrap();
        let (before, _) = counted(&mut session, first, 2);
        let captures = fake.calls("cuStreamBeginCapture_v2");
        let evictions = runtime.stats().pager.evictions;
        let (_, counts) = counted(&mut session, before[2], TOKENS);
        assert!(runtime.stats().pager.evictions > evictions, "everything stayed");
        assert_eq!(fake.calls("cuStreamBeginCapture_v2"), captures, "captured again");
        assert_eq!(counts.synchronisations, TOKENS, "{counts:?}");
        assert!(counts.pins <= (spec.layers + 2) * TOKENS, "{counts:?}");
        assert!(counts.graph_launches <= (spec.layers + 2) * TOKENS, "{counts:?}");
        // The embedding.
        assert_eq!(counts.launches, TOKENS, "{counts:?}");
        session.session.take();
        runtime.close().unwrap();
    }
    driver.finish();
}

/// A graph outlives every eviction of the weights that it reads, and what comes back to their addresses. Nothing is
/// computed here: `graphs_and_residence_change_no_bit` does that.
#[test]
fn a_hundred_thousand_evictions_need_no_second_capture() {
    const EVICTIONS: u64 = 100_000;
    let Some(driver) = driver("a_hundred_thousand_evictions_need_no_second_capture") else { return };
    let Some(fake) = &driver.fake else { return };
    let folder = tempfile::tempdir().unwrap();
    fake.set_bare(true);
    let page = page_size(&driver, Bytes::kib(4));
    let spec = Spec { layers: 4, vocab: 64, ..spec(Arch::Llama, WeightType::Q8_0) };
    let files = gguf(folder.path(), &spec);
    let bytes: u64 = files.header().files.iter().map(|file| file.len).sum();
    {
        let mut session = session_in(&driver, &files, page, bytes / 2 / page.bytes(), KvType::F16, true);
        let runtime = session.runtime.clone();
        let mut sampler = Sampler::greedy();
        session.next(&[1], &mut sampler).unwrap();
        let (captures, launches) = (fake.calls("cuStreamBeginCapture_v2"), fake.calls("cuGraphLaunch"));
        let mut passes = 0;
        while runtime.stats().pager.evictions < EVICTIONS {
            session.truncate(0).unwrap();
            for _ in 0..30 {
                session.next(&[1], &mut sampler).unwrap();
                passes += 1;
            }
        }
        assert_eq!(fake.calls("cuStreamBeginCapture_v2"), captures, "captured again within {passes} passes");
        assert!(fake.calls("cuGraphLaunch") - launches >= passes * spec.layers, "{passes} passes were no graphs");
        session.session.take();
        runtime.close().unwrap();
    }
    driver.finish();
}

/// A smaller budget waits for the pins of a session that has all weights; the session's next passes let them go.
#[test]
fn a_budget_can_shrink_below_a_model_that_a_session_has_pinned() {
    let Some(driver) = driver("a_budget_can_shrink_below_a_model_that_a_session_has_pinned") else { return };
    if driver.fake.is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let files = gguf(folder.path(), &small(Arch::Llama, WeightType::Q8_0));
    let want = logits(&mut session_of(&driver, &files, FEW, KvType::F16, true));
    let mut session = session_of(&driver, &files, AMPLE, KvType::F16, true);
    assert!(logits(&mut session) == want);
    let (runtime, page) = (session.runtime.clone(), page_size(&driver, PAGE_OF_EMULATED).bytes());
    std::thread::scope(|scope| {
        let shrinking = scope.spawn(|| runtime.set_device_budget(Bytes::new(2 * page)));
        while !shrinking.is_finished() {
            session.truncate(0).unwrap();
            assert!(logits(&mut session) == want);
        }
        shrinking.join().unwrap().unwrap();
    });
    assert!(runtime.stats().device.budget == Bytes::new(2 * page));
    session.truncate(0).unwrap();
    assert!(logits(&mut session) == want);
    // A parked session holds nothing.
    runtime.set_device_budget(Bytes::new(AMPLE * page)).unwrap();
    session.truncate(0).unwrap();
    assert!(logits(&mut session) == want);
    session.park().unwrap();
    runtime.set_device_budget(Bytes::new(2 * page)).unwrap();
    drop((session, runtime));
    driver.finish();
}

/// Between two passes the budget may become less than a layer takes, or than one matrix, and then more again. Passes
/// are divided for the frames that there are, and graphs are captured again for another division only.
#[test]
fn passes_are_divided_for_the_frames_that_there_are() {
    /// For the whole model.
    const WHOLE: u64 = 64;
    /// A layer takes about ten, most of its matrices two or more, and a segment has a third of them.
    const SOME: u64 = 16;
    const LEAST: u64 = 3;
    let Some(driver) = driver("passes_are_divided_for_the_frames_that_there_are") else { return };
    let Some(fake) = &driver.fake else { return };
    let folder = tempfile::tempdir().unwrap();
    let page = page_size(&driver, Bytes::kib(64));
    let files = gguf(folder.path(), &small(Arch::Qwen2, WeightType::Q8_0));
    let want = logits(&mut session_in(&driver, &files, page, WHOLE, KvType::F16, false));
    for budgets in [[WHOLE, LEAST, SOME, WHOLE], [LEAST, WHOLE, LEAST, SOME]] {
        let mut session = session_in(&driver, &files, page, budgets[0], KvType::F16, true);
        let runtime = session.runtime.clone();
        for frames in budgets {
            // Weights that are pinned for the session would hold up a smaller budget.
            session.park().unwrap();
            runtime.set_device_budget(Bytes::new(frames * page.bytes())).unwrap();
            let what = format!("{frames} frames of {budgets:?}");
            let again = |session: &mut OnGpu| {
                session.truncate(0).unwrap();
                let before = session.counts();
                assert!(logits(session) == want, "{what}");
                session.counts() - before
            };
            let first = again(&mut session);
            assert!(first.graph_launches > 0, "{what}: {first:?}");
            if frames == WHOLE {
                // Each pass asks for what is not there yet.
                let resident = (0..100).any(|_| again(&mut session).pins == 0);
                assert!(resident, "{what}: the model never stays");
            }
            let captures = fake.calls("cuStreamBeginCapture_v2");
            let counts = again(&mut session);
            assert_eq!(fake.calls("cuStreamBeginCapture_v2"), captures, "{what}: captured again");
            assert_eq!(counts.pins == 0, frames == WHOLE, "{what}: {counts:?}");
        }
        assert!(runtime.stats().pager.evictions > 0);
    }
    driver.finish();
}
