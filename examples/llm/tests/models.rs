//! Small synthetic models of every architecture: both containers agree, and nothing but the weights decides the result.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use outcore::{Bytes, PageSize, PolicyKind, Runtime};
use outcore_llm::kernels::Level;
use outcore_llm::synthetic::{ARCHS, Experts, Spec};
use outcore_llm::{
    Arch, Arrivals, ChatTemplate, Error, KvType, Logits, Message, Model, ModelFiles, Options, PagedWeights, Part,
    Passes, PlainWeights, Result, Rows, Sampler, Session, Step, TensorId, Tokenizer, WeightInfo, WeightType, Weights,
    argmax,
};

const PROMPT: [u32; 9] = [72, 101, 108, 108, 111, 72, 5, 299, 0];

fn spec(arch: Arch, dtype: WeightType) -> Spec {
    // In Qwen3 a head is not dim / heads.
    let head_dim = if matches!(arch, Arch::Qwen3 | Arch::Qwen3Moe) { 128 } else { 64 };
    Spec { head_dim, tied: arch == Arch::Qwen2, ..Spec::small(arch, dtype) }
}

fn gguf(folder: &Path, spec: &Spec) -> ModelFiles {
    let path = folder.join(format!("{:?}-{}.gguf", spec.arch, spec.dtype));
    spec.write_gguf(&path).unwrap();
    ModelFiles::open(path).unwrap()
}

/// Logits after the prompt read in one pass, and after one more token.
fn run(files: &ModelFiles, tile_bytes: u64, options: Options, kv: KvType) -> Vec<f32> {
    let weights = PlainWeights::read(files).unwrap().with_tile_bytes(tile_bytes);
    run_on(files, Arc::new(weights), options, kv)
}

fn run_on(files: &ModelFiles, weights: Arc<dyn Weights>, options: Options, kv: KvType) -> Vec<f32> {
    let model = Model::load(files, weights, options).unwrap();
    let mut session = Session::new(Arc::new(model), 32, kv).unwrap();
    let mut logits = session.forward(&PROMPT).unwrap();
    // Not the most probable one: which of two that are nearly as probable, rounding would decide.
    logits.extend(session.forward(&[7]).unwrap());
    logits
}

fn threads(n: usize) -> Options {
    Options { threads: n, ..Options::default() }
}

fn assert_close(a: &[f32], b: &[f32], tolerance: f32) {
    assert_eq!(a.len(), b.len());
    let scale = a.iter().fold(0f32, |m, v| m.max(v.abs()));
    assert!(scale.is_finite() && scale > 0.0);
    let worst = a.iter().zip(b).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
    assert!(worst <= tolerance * scale, "differs by {worst} of {scale}");
}

#[test]
fn tiles_and_threads_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    for dtype in WeightType::ALL {
        let files = gguf(folder.path(), &spec(Arch::Llama, dtype));
        let whole = run(&files, u64::MAX, threads(1), KvType::F32);
        assert_eq!(whole, run(&files, 1, threads(2), KvType::F32), "{dtype}: one row at a time");
        assert_eq!(whole, run(&files, 5000, threads(3), KvType::F32), "{dtype}: tiles of 5000 bytes");
    }
}

/// Each part of a pass gets the logits and the token that it asks for, with the bits that it would get alone.
#[test]
fn a_ragged_pass_gives_each_part_what_it_wants() {
    let folder = tempfile::tempdir().unwrap();
    let files = gguf(folder.path(), &spec(Arch::Qwen3, WeightType::Q8_0));
    let weights = Arc::new(PlainWeights::read(&files).unwrap());
    let model = Arc::new(Model::load(&files, weights, threads(2)).unwrap());
    let vocab = model.config().vocab;
    let new = || Session::new(model.clone(), 32, KvType::F32).unwrap();
    let (wants, lengths) = ([Logits::None, Logits::Last, Logits::All], [1, 4, 9]);
    let cases = lengths.into_iter().flat_map(|len| wants.map(|logits| [(len, logits, false), (len, logits, true)]));
    let cases: Vec<(usize, Logits, bool)> = cases.flatten().collect();
    let mut sessions: Vec<Session> = cases.iter().map(|_| new()).collect();
    let mut samplers: Vec<Sampler> = (0..cases.len() as u64).map(|seed| Sampler::new(1.0, seed)).collect();
    let parts = sessions.iter_mut().zip(&mut samplers).zip(&cases);
    let mut parts: Vec<Part<'_, Session>> = parts
        .map(|((session, sampler), (len, logits, chooses))| {
            let sampler = chooses.then_some(sampler);
            Part { session, tokens: &PROMPT[..*len], logits: *logits, sampler }
        })
        .collect();
    let (outputs, time) = model.pass(&mut parts).unwrap();
    assert!(time.total >= time.waited && outputs.len() == cases.len());
    for (nth, (output, (len, logits, chooses))) in outputs.iter().zip(&cases).enumerate() {
        let all = new().forward_all(&PROMPT[..*len]).unwrap();
        let last = &all[all.len() - vocab..];
        let want: &[f32] = match logits {
            Logits::None => &[],
            Logits::Last => last,
            Logits::All => &all,
            Logits::HiddenLast | Logits::HiddenAll => panic!("not among the cases"),
        };
        assert!(output.logits == want, "{len} tokens, {logits:?}");
        let next = chooses.then(|| Sampler::new(1.0, nth as u64).sample(last));
        assert_eq!((output.next, sessions[nth].len()), (next, *len), "{len} tokens, {logits:?}");
    }
    // One that cannot be read is named, and the others are as before.
    let (one, other) = sessions.split_at_mut(1);
    let bad = [vocab as u32];
    fn part<'a>(session: &'a mut Session, tokens: &'a [u32]) -> Part<'a, Session> {
        Part { session, tokens, logits: Logits::Last, sampler: None }
    }
    let error = model.pass(&mut [part(&mut one[0], &PROMPT), part(&mut other[0], &bad)]).unwrap_err();
    assert_eq!((error.part, one[0].len(), other[0].len()), (Some(1), 1, 1), "{:?}", error.error);
    // Hidden states choose no token.
    let mut parts = [&mut one[0], &mut other[0]].map(|session| part(session, &PROMPT));
    (parts[1].logits, parts[1].sampler) = (Logits::HiddenAll, Some(&mut samplers[0]));
    let error = model.pass(&mut parts).unwrap_err();
    assert!(matches!(&error.error, Error::Invalid(what) if what.contains("sampler")), "{:?}", error.error);
    assert_eq!((error.part, one[0].len(), other[0].len()), (Some(1), 1, 1));
}

/// Matrices that lie behind each other in a tensor begin and end within tiles.
#[test]
fn tiles_of_joined_matrices_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    for dtype in [WeightType::F32, WeightType::Q4_0] {
        let files = gguf(folder.path(), &spec(Arch::Phi3, dtype));
        let whole = run(&files, u64::MAX, threads(1), KvType::F32);
        for bytes in [1, 5000, 70_001] {
            assert_eq!(whole, run(&files, bytes, threads(2), KvType::F32), "{dtype}: tiles of {bytes} bytes");
        }
    }
}

#[test]
fn reading_at_once_equals_reading_one_by_one() {
    let folder = tempfile::tempdir().unwrap();
    use WeightType::{BF16, IQ4_NL, IQ4_XS, MXFP4, Q4_1, Q6_K};
    let kinds = [Q4_1, Q6_K, IQ4_NL, IQ4_XS, MXFP4, BF16];
    for (arch, dtype) in ARCHS.into_iter().flat_map(|arch| kinds.map(|dtype| (arch, dtype))) {
        let files = gguf(folder.path(), &spec(arch, dtype));
        let model = Model::load(&files, Arc::new(PlainWeights::read(&files).unwrap()), threads(2)).unwrap();
        let model = Arc::new(model);
        let all = Session::new(Arc::clone(&model), 16, KvType::F32).unwrap().forward_all(&PROMPT).unwrap();
        let mut single = Session::new(model, 16, KvType::F32).unwrap();
        let one_by_one: Vec<f32> = PROMPT.iter().flat_map(|t| single.forward(&[*t]).unwrap()).collect();
        assert_eq!(all, one_by_one, "{arch:?} {dtype}");
    }
}

#[test]
fn both_containers_give_the_same_logits() {
    let folder = tempfile::tempdir().unwrap();
    for arch in [Arch::Llama, Arch::Qwen2, Arch::Qwen3, Arch::Qwen3Moe] {
        for (dtype, shards) in [(WeightType::F32, 1), (WeightType::F16, 3)] {
            let spec = spec(arch, dtype);
            let place = folder.path().join(format!("{arch:?}-{dtype}"));
            spec.write_safetensors(&place, shards).unwrap();
            let from_folder = ModelFiles::open(&place).unwrap();
            assert_eq!(from_folder.paths().len(), shards);
            let a = run(&gguf(folder.path(), &spec), u64::MAX, threads(2), KvType::F32);
            let b = run(&from_folder, u64::MAX, threads(2), KvType::F32);
            // Norms are F32 in GGUF, and the order of sums differs where rows are permuted.
            assert_close(&a, &b, if dtype == WeightType::F32 { 1e-4 } else { 5e-3 });
        }
    }
}

/// Each expert in tensors of its own, or all of a layer in two: the bytes are the same, and so are all bits.
#[test]
fn experts_may_be_stored_in_either_way() {
    let folder = tempfile::tempdir().unwrap();
    let logits = [false, true].map(|fused| {
        let experts = Some(Experts { count: 8, used: 3, fused });
        let place = folder.path().join(fused.to_string());
        Spec { experts, ..spec(Arch::Qwen3Moe, WeightType::BF16) }.write_safetensors(&place, 2).unwrap();
        run(&ModelFiles::open(&place).unwrap(), 5000, threads(2), KvType::F32)
    });
    assert_eq!(logits[0], logits[1]);
}

/// With frames for a few experts only, they come and go: no bit changes.
#[test]
fn experts_in_few_pages_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let page = PageSize::new(Bytes::kib(64)).unwrap();
    let mixture =
        |arch| Spec { experts: Some(Experts { count: 32, used: 4, fused: false }), ..spec(arch, WeightType::Q8_0) };
    for arch in [Arch::Llama, Arch::Qwen2Moe, Arch::Qwen3Moe, Arch::Olmoe, Arch::GptOss, Arch::Glm4Moe] {
        let files = gguf(folder.path(), &mixture(arch));
        let expected = run(&files, u64::MAX, threads(2), KvType::F32);
        for frames in [3, 12, 40, 400] {
            let budget = Bytes::new(frames * page.bytes());
            let builder = Runtime::builder().page_size(page).device_budget(budget).policy(PolicyKind::Model);
            let runtime = builder.open().unwrap();
            let opened = runtime.open_parsed(files.header().clone()).unwrap();
            let weights = Arc::new(PagedWeights::open(&runtime, &opened, &files).unwrap());
            assert_eq!(run_on(&files, weights, threads(2), KvType::F32), expected, "{arch:?}, {frames} frames");
            drop(opened);
            runtime.close().unwrap();
        }
    }
}

/// Each pass holds experts while it waits for others, of which all together are more than there is room for.
#[test]
fn passes_of_several_threads_do_not_wait_for_each_other_s_experts() {
    let folder = tempfile::tempdir().unwrap();
    let experts = Some(Experts { count: 32, used: 4, fused: false });
    let files = gguf(folder.path(), &Spec { experts, ..spec(Arch::Qwen3Moe, WeightType::Q8_0) });
    let expected = run(&files, u64::MAX, threads(1), KvType::F32);
    let page = PageSize::new(Bytes::kib(64)).unwrap();
    for frames in [12, 20, 40] {
        let budget = Bytes::new(frames * page.bytes());
        let builder = Runtime::builder().page_size(page).device_budget(budget).policy(PolicyKind::Model);
        let runtime = builder.open().unwrap();
        let opened = runtime.open_parsed(files.header().clone()).unwrap();
        std::thread::scope(|scope| {
            let pass = || {
                let weights = Arc::new(PagedWeights::open(&runtime, &opened, &files).unwrap());
                for _ in 0..3 {
                    assert_eq!(run_on(&files, weights.clone(), threads(1), KvType::F32), expected, "{frames} frames");
                }
            };
            let passes: Vec<_> = (0..4).map(|_| scope.spawn(pass)).collect();
            passes.into_iter().for_each(|pass| pass.join().unwrap());
        });
        drop(opened);
        runtime.close().unwrap();
    }
}

/// Weights in pages, which look before each use that follows the first pass whether what every token uses is there.
struct Staying {
    inner: PagedWeights,
    files: ModelFiles,
    segment: outcore::Tensor,
    /// The pages that each pass uses, of experts the drawn ones aside.
    shared: Vec<usize>,
    passes: AtomicUsize,
    /// Names of tensors that were asked for when a page of theirs was not there, and how many pages had left.
    seen: Mutex<(Vec<String>, HashSet<usize>)>,
}

impl Staying {
    fn look(&self, steps: &[Step]) {
        if self.passes.load(Ordering::Relaxed) < 2 {
            return;
        }
        let pages = self.inner.runtime().observe().snapshot(&self.segment).pages;
        let page = self.inner.runtime().stats().page_size;
        let mut seen = self.seen.lock().unwrap();
        seen.1.extend(self.shared.iter().filter(|at| pages[**at].frame.is_none()));
        for (id, rows) in steps {
            let info = &self.files.tensors()[id.0 as usize];
            if is_shared(&info.name) && pages_of(info, rows, page).any(|at| pages[at].frame.is_none()) {
                seen.0.push(info.name.clone());
            }
        }
    }
}

/// Embeddings go by the token, and experts by the router.
fn is_shared(name: &str) -> bool {
    !name.contains("_exps.") && !name.starts_with("token_embd")
}

fn pages_of(info: &WeightInfo, rows: &Range<u64>, page: PageSize) -> Range<usize> {
    let bytes = info.byte_range(rows).unwrap();
    (bytes.start / page.bytes()) as usize..bytes.end.div_ceil(page.bytes()) as usize
}

impl Weights for Staying {
    fn rows(&self, tensor: TensorId, rows: Range<u64>) -> Result<Rows<'_>> {
        self.look(&[(tensor, rows.clone())]);
        self.inner.rows(tensor, rows)
    }

    fn tile_rows(&self, tensor: TensorId) -> u64 {
        self.inner.tile_rows(tensor)
    }

    fn will_use(&self, order: &[Step]) {
        self.passes.fetch_add(1, Ordering::Relaxed);
        self.inner.will_use(order);
    }

    fn draw(&self, experts: &[Vec<Step>], foreseen: &[Step]) -> Result<Option<Box<dyn Arrivals + '_>>> {
        self.look(&[]);
        self.inner.draw(experts, foreseen)
    }

    fn drawn(&self, steps: &[Step], foreseen: &[Step]) {
        self.inner.drawn(steps, foreseen);
    }

    fn foresees(&self) -> bool {
        self.inner.foresees()
    }
}

/// With room for it and for the experts of two layers of eight.
#[test]
fn what_every_token_uses_never_leaves() {
    let folder = tempfile::tempdir().unwrap();
    let page = PageSize::new(Bytes::kib(16)).unwrap();
    for arch in [Arch::Qwen2Moe, Arch::Qwen3Moe, Arch::GptOss] {
        let experts = Some(Experts { count: 16, used: 2, fused: false });
        let spec = Spec { experts, layers: 8, dim: 128, ffn_dim: 128, ..spec(arch, WeightType::Q8_0) };
        let files = gguf(folder.path(), &spec);
        let expected = run(&files, u64::MAX, threads(2), KvType::F32);
        let all =
            files.tensors().iter().flat_map(|info| pages_of(info, &(0..info.rows), page).map(move |at| (info, at)));
        let shared: HashSet<usize> = all.clone().filter(|(info, _)| is_shared(&info.name)).map(|(_, at)| at).collect();
        let of_layer = all.filter(|(info, _)| info.name.starts_with("blk.1.") && !is_shared(&info.name));
        let of_layer = of_layer.map(|(_, at)| at).collect::<HashSet<usize>>();
        let frames = (shared.len() + 2 * of_layer.len()) as u64;
        let builder = Runtime::builder().page_size(page).device_budget(Bytes::new(frames * page.bytes()));
        let runtime = builder.host_budget(Bytes::ZERO).policy(PolicyKind::Model).open().unwrap();
        let opened = runtime.open_parsed(files.header().clone()).unwrap();
        let weights = Arc::new(Staying {
            inner: PagedWeights::open(&runtime, &opened, &files).unwrap(),
            segment: opened.tensor(&files.tensors()[0].name).unwrap(),
            files: files.clone(),
            shared: shared.into_iter().collect(),
            passes: AtomicUsize::new(0),
            seen: Mutex::default(),
        });
        let model = Arc::new(Model::load(&files, weights.clone(), threads(2)).unwrap());
        let mut session = Session::new(model, 64, KvType::F32).unwrap();
        let mut logits = session.forward(&PROMPT).unwrap();
        logits.extend(session.forward(&[7]).unwrap());
        assert_eq!(logits, expected);
        (0..40).for_each(|n| drop(session.forward(&[n * 7 % 250]).unwrap()));
        let faults = runtime.stats().pager.faults;
        let (faulted, left) = std::mem::take(&mut *weights.seen.lock().unwrap());
        assert_eq!((faulted, left), (Vec::new(), HashSet::new()), "{arch:?} in {frames} frames, {faults} faults");
        drop((session, weights, opened));
        runtime.close().unwrap();
    }
}

#[test]
fn vector_kernels_and_half_caches_stay_near_the_portable_result() {
    let folder = tempfile::tempdir().unwrap();
    for dtype in WeightType::ALL {
        let files = gguf(folder.path(), &spec(Arch::Qwen3, dtype));
        let scalar = Options { threads: 1, level: Some(Level::Scalar) };
        let portable = run(&files, u64::MAX, scalar, KvType::F32);
        for level in [Level::Avx2, Level::Avx512] {
            let options = Options { threads: 2, level: Some(level) };
            assert_close(&portable, &run(&files, u64::MAX, options, KvType::F32), 0.02);
        }
        assert_close(&portable, &run(&files, u64::MAX, threads(2), KvType::F16), 0.02);
    }
}

#[test]
fn quantised_models_stay_near_the_exact_one() {
    let folder = tempfile::tempdir().unwrap();
    let exact = run(&gguf(folder.path(), &spec(Arch::Llama, WeightType::F32)), u64::MAX, threads(1), KvType::F32);
    let close = run(&gguf(folder.path(), &spec(Arch::Llama, WeightType::Q8_0)), u64::MAX, threads(1), KvType::F32);
    assert_close(&exact[..300], &close[..300], 0.05);
}

/// Plain weights that check what the model promised.
struct Checked {
    inner: PlainWeights,
    left: Mutex<Vec<Step>>,
}

impl Weights for Checked {
    fn rows(&self, tensor: TensorId, rows: Range<u64>) -> Result<Rows<'_>> {
        assert_eq!(self.left.lock().unwrap().pop(), Some((tensor, rows.clone())));
        self.inner.rows(tensor, rows)
    }

    fn tile_rows(&self, tensor: TensorId) -> u64 {
        self.inner.tile_rows(tensor)
    }

    fn will_use(&self, order: &[Step]) {
        let mut left = self.left.lock().unwrap();
        assert_eq!(*left, [], "a pass ended early");
        *left = order.iter().rev().cloned().collect();
    }

    fn foresees(&self) -> bool {
        true
    }

    fn drawn(&self, steps: &[Step], _foreseen: &[Step]) {
        let distinct: HashSet<&Step> = steps.iter().collect();
        assert!(!steps.is_empty() && distinct.len() == steps.len(), "an expert is used twice in a pass");
        self.left.lock().unwrap().extend(steps.iter().rev().cloned());
    }
}

#[test]
fn weights_are_used_once_and_in_the_declared_order() {
    let folder = tempfile::tempdir().unwrap();
    for arch in ARCHS {
        let files = gguf(folder.path(), &spec(arch, WeightType::Q4_1));
        let inner = PlainWeights::read(&files).unwrap().with_tile_bytes(10_000);
        let weights = Arc::new(Checked { inner, left: Mutex::default() });
        run_on(&files, Arc::clone(&weights) as Arc<dyn Weights>, threads(2), KvType::F32);
        assert_eq!(*weights.left.lock().unwrap(), []);
    }
}

/// Weights of which only so many are given, and what was drawn last.
struct GivenUp {
    inner: PlainWeights,
    left: AtomicUsize,
    drawn: Mutex<[usize; 2]>,
}

impl Weights for GivenUp {
    fn rows(&self, tensor: TensorId, rows: Range<u64>) -> Result<Rows<'_>> {
        let left = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        left.map_err(|_| Error::Cancelled)?;
        self.inner.rows(tensor, rows)
    }

    fn tile_rows(&self, tensor: TensorId) -> u64 {
        self.inner.tile_rows(tensor)
    }

    fn will_use(&self, _order: &[Step]) {}

    fn foresees(&self) -> bool {
        true
    }

    fn drawn(&self, steps: &[Step], foreseen: &[Step]) {
        *self.drawn.lock().unwrap() = [steps.len(), foreseen.len()];
    }
}

#[test]
fn regression_a_pass_that_is_given_up_expects_no_experts() {
    let folder = tempfile::tempdir().unwrap();
    let files = gguf(folder.path(), &spec(Arch::Qwen3Moe, WeightType::Q8_0));
    let left = AtomicUsize::new(usize::MAX);
    let weights = Arc::new(GivenUp { inner: PlainWeights::read(&files).unwrap(), left, drawn: Mutex::default() });
    let model = Arc::new(Model::load(&files, Arc::clone(&weights) as Arc<dyn Weights>, threads(1)).unwrap());
    let mut session = Session::new(model.clone(), 32, KvType::F32).unwrap();
    let mut given = 0;
    loop {
        weights.left.store(given, Ordering::SeqCst);
        let ended = session.forward(&PROMPT);
        let drawn = *weights.drawn.lock().unwrap();
        if ended.is_ok() {
            assert!(drawn[0] > 0 && given > 20, "{given}: {drawn:?}");
            break;
        }
        assert_eq!((drawn, session.len()), ([0, 0], 0), "{given} rows were given");
        given += 1;
    }
}

/// Each token that was met for the first time waited for the disk, even late in a run in which everything fits.
#[test]
fn regression_where_everything_fits_new_tokens_wait_for_no_disk() {
    let folder = tempfile::tempdir().unwrap();
    let files = gguf(folder.path(), &Spec { vocab: 3000, ..spec(Arch::Llama, WeightType::F32) });
    let page = PageSize::new(Bytes::kib(64)).unwrap();
    let runtime =
        Runtime::builder().page_size(page).device_budget(Bytes::mib(32)).host_budget(Bytes::ZERO).open().unwrap();
    let opened = runtime.open_parsed(files.header().clone()).unwrap();
    let weights: Arc<dyn Weights> = Arc::new(PagedWeights::open(&runtime, &opened, &files).unwrap());
    run_on(&files, weights, threads(1), KvType::F32);
    // No deadline: each page that comes is progress.
    let (mut most, mut since) = (0, Instant::now());
    for info in files.tensors() {
        let tensor = opened.tensor(&info.name).unwrap();
        let bytes = info.byte_range(&(0..info.rows)).unwrap();
        let pages = (bytes.start / page.bytes()) as usize..bytes.end.div_ceil(page.bytes()) as usize;
        loop {
            let seen = runtime.observe().snapshot(&tensor).pages;
            if seen[pages.clone()].iter().all(|page| page.frame.is_some()) {
                break;
            }
            let present = seen.iter().filter(|page| page.frame.is_some()).count();
            if present > most {
                (most, since) = (present, Instant::now());
            }
            assert!(since.elapsed() < Duration::from_secs(150), "pages of {} stay away", info.name);
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_refused_pass_leaves_the_session_usable() {
    let folder = tempfile::tempdir().unwrap();
    let files = gguf(folder.path(), &spec(Arch::Llama, WeightType::Q8_0));
    let model = Model::load(&files, Arc::new(PlainWeights::read(&files).unwrap()), threads(1)).unwrap();
    let mut session = Session::new(Arc::new(model), 10, KvType::F32).unwrap();
    let first = session.forward(&PROMPT).unwrap();
    assert!(session.forward(&[]).is_err());
    assert!(session.forward(&[300]).is_err());
    assert!(session.forward(&[1, 2]).is_err());
    assert_eq!(session.len(), PROMPT.len());
    session.truncate(0).unwrap();
    assert_eq!(session.forward(&PROMPT).unwrap(), first);
}

#[test]
fn a_foreign_architecture_is_refused_with_a_list() {
    let folder = tempfile::tempdir().unwrap();
    spec(Arch::Llama, WeightType::F32).write_safetensors(folder.path(), 1).unwrap();
    let config = folder.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap().replace("\"llama\"", "\"mamba\"");
    std::fs::write(&config, text).unwrap();
    let files = ModelFiles::open(folder.path()).unwrap();
    let weights = Arc::new(PlainWeights::read(&files).unwrap());
    let message = Model::load(&files, weights, threads(1)).unwrap_err().to_string();
    assert!(message.contains("mamba") && message.contains("qwen3"), "{message}");
}

#[test]
fn damaged_files_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("whole.gguf");
    spec(Arch::Llama, WeightType::Q4_0).write_gguf(&path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let cut = folder.path().join("cut.gguf");
    for len in [0, 3, 40, 5000, bytes.len() - 1000] {
        std::fs::write(&cut, &bytes[..len]).unwrap();
        assert!(ModelFiles::open(&cut).is_err(), "{len} bytes");
    }
    let lonely = folder.path().join("model.safetensors");
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    std::fs::write(&lonely, u64::MAX.to_le_bytes()).unwrap();
    assert!(ModelFiles::open(&lonely).is_err());
}

#[test]
fn synthetic_vocabulary_round_trips_any_text() {
    let folder = tempfile::tempdir().unwrap();
    let files = gguf(folder.path(), &spec(Arch::Llama, WeightType::Q8_0));
    let tokenizer = Tokenizer::load(&files).unwrap();
    let text = "tabs\tand  spaces, \u{e9}\u{4e2d}\u{1f980}\n";
    let ids = tokenizer.encode(text, true).unwrap();
    assert_eq!(tokenizer.decode(&ids), text);
    let mut stream = tokenizer.stream();
    let pieces: Vec<String> = ids.iter().map(|id| stream.push(*id)).collect();
    assert!(pieces.contains(&"\u{1f980}".to_owned()), "a character appears whole: {pieces:?}");
    let template = ChatTemplate::load(&files, &tokenizer).unwrap().unwrap();
    let prompt = template.render(&[Message::new("user", "hi")], true).unwrap();
    assert_eq!(prompt, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    let ids = tokenizer.encode(&prompt, false).unwrap();
    assert_eq!((ids[0], tokenizer.is_end(259), tokenizer.decode(&ids)), (258, true, "user\nhi\nassistant\n".into()));
}

#[test]
fn sampling_repeats_with_its_seed_and_respects_its_limits() {
    let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
    let draw = |mut sampler: Sampler| (0..200).map(|_| sampler.sample(&logits)).collect::<Vec<u32>>();
    assert_eq!(draw(Sampler::new(0.8, 5)), draw(Sampler::new(0.8, 5)));
    assert_ne!(draw(Sampler::new(0.8, 5)), draw(Sampler::new(0.8, 6)));
    let best = argmax(&logits);
    assert!(draw(Sampler::greedy()).iter().all(|t| *t == best));
    assert!(draw(Sampler::new(2.0, 1).top_k(1)).iter().all(|t| *t == best));
    assert!(draw(Sampler::new(2.0, 1).top_p(1e-6)).iter().all(|t| *t == best));
    assert!(draw(Sampler::new(2.0, 1)).iter().any(|t| *t != best));
}

#[test]
fn regression_a_pass_that_is_cancelled_leaves_the_session_as_it_was() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let files = gguf(folder.path(), &spec(Arch::Llama, WeightType::Q8_0));
    let runtime = Runtime::builder().device_budget(Bytes::mib(1)).page_size(PageSize::new(Bytes::kib(64)).unwrap());
    let runtime = runtime.open().unwrap();
    let paged = runtime.open_parsed(files.header().clone()).unwrap();
    let cancel = Arc::new(AtomicBool::new(false));
    let weights = Arc::new(PagedWeights::open(&runtime, &paged, &files).unwrap().cancelled_by(cancel.clone()));
    let model = Arc::new(Model::load(&files, weights, Options::default()).unwrap());
    let mut session = Session::new(model.clone(), 32, KvType::F32).unwrap();
    session.forward(&PROMPT).unwrap();

    cancel.store(true, Ordering::Relaxed);
    assert!(matches!(session.forward(&[1, 2, 3]), Err(Error::Cancelled)));
    assert_eq!(session.len(), PROMPT.len());
    cancel.store(false, Ordering::Relaxed);
    let logits = session.forward(&[1, 2, 3]).unwrap();
    let mut whole = Session::new(model, 32, KvType::F32).unwrap();
    assert_eq!(logits, whole.forward(&[&PROMPT[..], &[1, 2, 3]].concat()).unwrap());
}
