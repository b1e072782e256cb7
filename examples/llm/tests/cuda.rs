//! The forward pass on a GPU over an emulated driver that judges it (`tests/fake-cuda`): logits are the CPU's,
//! `generate` gives the same words, and what is not possible is refused with a remedy. The kernels run from their own
//! source, compiled for the CPU (`cuda/emulated.rs`). No GPU takes part, unless `OUTCORE_TEST_GPU` names one. The tests
//! in `on_a_gpu`, here, in `blocks` and in `graphs`, then run there; the others are about the emulated driver.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "cuda/blocks.rs"]
mod blocks;
#[path = "cuda/common.rs"]
mod common;
#[path = "cuda/cublaslt.rs"]
mod cublaslt;
#[path = "cuda/emulated.rs"]
mod emulated;
#[path = "cuda/graphs.rs"]
mod graphs;
#[path = "cuda/host_time.rs"]
mod host_time;

use std::io::{BufRead, BufReader, Read};
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use common::{PAGE, assert_near, expected, gguf, spec};
use cublaslt::{CublasLt, finish};
use emulated::{Driver, driver, driver_library, folder, kernel_library, ptx_file, skipped};
use outcore::{Bytes, ErrorKind, Lookahead, PageSize, Runtime};
use outcore_llm::kernels::{ActKind, act_kind};
use outcore_llm::synthetic::Spec;
use outcore_llm::{
    Arch, CudaModel, CudaSession, Error, Gpu, KvType, Logits, Model, ModelFiles, ON_GPU, Options, PagedWeights, Part,
    Passes, PlainWeights, Result, Sampler, Session, WeightType, argmax,
};
use outcore_testkit::hooked::{DeviceCall, DeviceHook, Hooked};
use serde_json::Value;

fn generate_program() -> PathBuf {
    program("generate")
}

/// A program, which cargo puts into the folder above that of the tests. It is found from the place of this test, which
/// is packed for other machines too and must not hold a path of the machine that built it.
fn program(name: &str) -> PathBuf {
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    deps.parent().unwrap().join(name)
}

const PROMPT: [u32; 9] = [72, 101, 108, 108, 111, 72, 5, 299, 0];

/// A model whose passes do not take long where every lane of a kernel is a fiber.
fn small(arch: Arch, dtype: WeightType) -> Spec {
    Spec { ffn_dim: 512, vocab: 1000, ..spec(arch, dtype) }
}

/// The page size of a test: a GPU's, or `emulated`, in which a small model has many pages.
fn page_size(driver: &Driver, emulated: Bytes) -> PageSize {
    let Some(fake) = &driver.fake else { return PageSize::new(Bytes::new(PAGE)).unwrap() };
    fake.set_granularity(4096);
    PageSize::new(emulated).unwrap()
}

/// A session whose runtime ends with it. Without this, a runtime may end on a thread that still has to report its last
/// operations. The driver's context would then end after the test that used it.
struct OnGpu {
    session: Option<CudaSession>,
    runtime: Runtime,
}

impl Deref for OnGpu {
    type Target = CudaSession;

    fn deref(&self) -> &CudaSession {
        self.session.as_ref().unwrap()
    }
}

impl DerefMut for OnGpu {
    fn deref_mut(&mut self) -> &mut CudaSession {
        self.session.as_mut().unwrap()
    }
}

impl Drop for OnGpu {
    fn drop(&mut self) {
        self.session.take();
        // On a lost device this fails. Such a test expects that.
        drop(self.runtime.clone().close());
    }
}

/// The GPU, where a cuBLASLt can be loaded and the tests ask for own kernels: these give the same bits however a
/// prompt is cut. `prompts.rs` tests the library.
fn own_kernels(driver: &Driver) -> Result<Gpu> {
    if driver.fake.is_some() {
        CublasLt::load("own_kernels");
    }
    Ok(Gpu::open(&driver.device, driver.kernels.as_deref())?.without_cublaslt())
}

/// A session on the GPU, with its weights in `frames` pages.
fn session(driver: &Driver, files: &ModelFiles, frames: u64, pass: usize) -> Result<OnGpu> {
    let gpu = own_kernels(driver)?;
    let runtime = Runtime::builder().device(driver.device.clone()).device_budget(Bytes::new(frames * PAGE)).open()?;
    let mut opened = OnGpu { session: None, runtime };
    let model = opened.runtime.open_parsed(files.header().clone())?;
    let weights = Arc::new(PagedWeights::open(&opened.runtime, &model, files)?);
    drop(model);
    let model = Arc::new(CudaModel::load(files, weights, Arc::new(gpu))?);
    opened.session = Some(CudaSession::new(model, 32, pass, KvType::F32)?);
    Ok(opened)
}

/// The same passes on the GPU. The CPU rounds the activations that meet some types to eight bits, the GPU never does.
fn assert_same_logits(driver: &Driver, what: &str, files: &ModelFiles, dtype: WeightType, pass: usize) {
    let tolerance = if act_kind(dtype) == ActKind::Plain { 1e-3 } else { 3e-2 };
    let (want, tokens) = expected(files, &PROMPT, 2);
    let mut session = session(driver, files, 4, pass).unwrap();
    assert_near(what, session.forward(&PROMPT).unwrap(), &want[0], tolerance);
    for (token, want) in tokens.iter().zip(&want[1..]) {
        assert_near(what, session.forward(&[*token]).unwrap(), want, tolerance);
    }
    assert_eq!(session.len(), PROMPT.len() + tokens.len());
}

/// What runs on a GPU as it does on the emulated driver.
mod on_a_gpu {
    use super::*;

    /// A GPU computes passes of one sequence. Others are refused by name, and change nothing.
    #[test]
    fn a_pass_of_one_sequence_gives_what_the_session_gives() {
        let Some(driver) = driver("a_pass_of_one_sequence_gives_what_the_session_gives") else { return };
        let folder = tempfile::tempdir().unwrap();
        let files = gguf(folder.path(), &Spec { layers: 1, ..small(Arch::Llama, WeightType::Q8_0) });
        let mut session = session(&driver, &files, 4, PROMPT.len()).unwrap();
        let want = session.forward(&PROMPT).unwrap().to_vec();
        let next = session.sample(&mut Sampler::new(1.0, 7)).unwrap();
        let model = session.model().clone();
        let mut other = CudaSession::new(model.clone(), 32, 4, KvType::F32).unwrap();
        for (logits, chooses) in [Logits::None, Logits::Last].into_iter().flat_map(|l| [(l, false), (l, true)]) {
            session.truncate(0).unwrap();
            let mut sampler = Sampler::new(1.0, 7);
            let sampler = chooses.then_some(&mut sampler);
            let part = Part { session: &mut *session, tokens: &PROMPT, logits, sampler };
            let (outputs, time) = model.pass(&mut [part]).unwrap();
            let [output] = &outputs[..] else { panic!("{} outputs", outputs.len()) };
            assert_eq!(output.next, chooses.then_some(next), "{logits:?}");
            assert!(output.logits == if logits == Logits::None { &[][..] } else { &want[..] }, "{logits:?}");
            assert!(time.total >= time.waited && session.len() == PROMPT.len());
        }
        fn part(session: &mut CudaSession, logits: Logits) -> Part<'_, CudaSession> {
            Part { session, tokens: &PROMPT, logits, sampler: None }
        }
        let refused = [
            ("2 sequences", model.pass(&mut [part(&mut session, Logits::Last), part(&mut other, Logits::Last)])),
            ("after each of 9 tokens", model.pass(&mut [part(&mut other, Logits::All)])),
            ("hidden states", model.pass(&mut [part(&mut other, Logits::HiddenLast)])),
            ("hidden states", model.pass(&mut [part(&mut other, Logits::HiddenAll)])),
        ];
        for (what, refused) in refused {
            let Err(Error::Outcore(error)) = refused.map_err(|failed| failed.error) else { panic!("{what}") };
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.advice().is_some_and(|advice| advice.contains("--device host")), "{error}");
            assert!(error.to_string().contains(what), "{error}");
        }
        assert_eq!((session.len(), other.len()), (PROMPT.len(), 0));
        drop((session, other, model));
        driver.finish();
    }

    #[test]
    fn every_weight_type_gives_the_logits_of_the_cpu() {
        let Some(driver) = driver("every_weight_type_gives_the_logits_of_the_cpu") else { return };
        let folder = tempfile::tempdir().unwrap();
        for dtype in ON_GPU {
            let files = gguf(folder.path(), &Spec { layers: 1, ..small(Arch::Llama, dtype) });
            assert_same_logits(&driver, &dtype.to_string(), &files, dtype, PROMPT.len());
        }
        driver.finish();
    }

    #[test]
    fn every_architecture_gives_the_logits_of_the_cpu_from_either_container() {
        let Some(driver) = driver("every_architecture_gives_the_logits_of_the_cpu_from_either_container") else {
            return;
        };
        let folder = tempfile::tempdir().unwrap();
        for (arch, dtype) in
            [(Arch::Qwen2, WeightType::F32), (Arch::Qwen3, WeightType::F16), (Arch::Llama, WeightType::BF16)]
        {
            let spec = small(arch, dtype);
            let files = gguf(folder.path(), &spec);
            assert_same_logits(&driver, &format!("{arch:?} as GGUF"), &files, dtype, PROMPT.len());
            let shards = folder.path().join(format!("{arch:?}"));
            spec.write_safetensors(&shards, 2).unwrap();
            let files = ModelFiles::open(&shards).unwrap();
            // A prompt that takes several passes, the last of one token.
            assert_same_logits(&driver, &format!("{arch:?} as safetensors"), &files, dtype, 4);
        }
        driver.finish();
    }

    #[test]
    fn how_a_prompt_is_cut_changes_no_bit() {
        let Some(driver) = driver("how_a_prompt_is_cut_changes_no_bit") else { return };
        let library = driver.fake.as_ref().and_then(|_| CublasLt::load("how_a_prompt_is_cut_changes_no_bit"));
        if library.is_some() {
            assert!(Gpu::open(&driver.device, driver.kernels.as_deref()).unwrap().has_cublaslt());
        }
        let folder = tempfile::tempdir().unwrap();
        let files = gguf(folder.path(), &small(Arch::Llama, WeightType::Q4_K));
        let logits = |pass| session(&driver, &files, 4, pass).unwrap().forward(&PROMPT).unwrap().to_vec();
        let whole = logits(PROMPT.len());
        for pass in [1, 2, 8] {
            assert_eq!(logits(pass), whole, "{pass} at a time");
        }
        assert!(library.is_none_or(|library| library.products() == 0), "the library multiplied");
        finish(&driver, library);
    }

    #[test]
    fn a_session_refuses_what_it_has_no_room_for_and_goes_on() {
        let Some(driver) = driver("a_session_refuses_what_it_has_no_room_for_and_goes_on") else { return };
        let folder = tempfile::tempdir().unwrap();
        let files = gguf(folder.path(), &spec(Arch::Llama, WeightType::Q8_0));
        {
            let mut session = session(&driver, &files, 4, 8).unwrap();
            assert!(matches!(session.forward(&[]), Err(Error::Invalid(_))));
            assert!(matches!(session.forward(&[5000]), Err(Error::Invalid(_))));
            assert!(matches!(session.forward(&[1; 33]), Err(Error::Invalid(_))));
            assert_eq!(session.len(), 0);
            let best = argmax(session.forward(&PROMPT).unwrap());
            assert_eq!(session.sample(&mut Sampler::greedy()).unwrap(), best);
            // The host draws from the best few.
            assert_eq!(session.sample(&mut Sampler::new(1.0, 1).top_k(1)).unwrap(), best);
        }
        driver.finish();
    }

    /// Wherever a pass is given up: what was launched is waited for, the session is as it was before, and goes on.
    #[test]
    fn a_pass_that_is_given_up_leaves_the_session_as_it_was() {
        let Some(driver) = driver("a_pass_that_is_given_up_leaves_the_session_as_it_was") else { return };
        let folder = tempfile::tempdir().unwrap();
        let files = gguf(folder.path(), &spec(Arch::Llama, WeightType::Q8_0));
        let want = session(&driver, &files, 4, 8).unwrap().forward(&PROMPT).unwrap().to_vec();
        // The model has three pages, the budget two: a pass maps at least as many as the model has.
        for maps in [1, 2, 3] {
            let flag = Arc::new(AtomicBool::new(false));
            let hook = Raising { left: AtomicU32::new(maps), flag: flag.clone() };
            let gpu = Arc::new(own_kernels(&driver).unwrap());
            let runtime = Runtime::builder()
                .device(Hooked::new(driver.device.clone(), Arc::new(hook)))
                .device_budget(Bytes::new(2 * PAGE))
                .lookahead(Lookahead::Off)
                .open()
                .unwrap();
            let model = runtime.open_parsed(files.header().clone()).unwrap();
            let weights = PagedWeights::open(&runtime, &model, &files).unwrap().cancelled_by(flag.clone());
            let cuda = CudaModel::load(&files, Arc::new(weights), gpu).unwrap();
            let mut session = CudaSession::new(Arc::new(cuda), 32, 8, KvType::F32).unwrap();
            assert!(!flag.load(Ordering::SeqCst), "the flag is raised before the pass");
            assert!(matches!(session.forward(&PROMPT), Err(Error::Cancelled)), "{maps} pages into the pass");
            assert!(session.is_empty() && flag.swap(false, Ordering::SeqCst));
            assert_eq!(session.forward(&PROMPT).unwrap(), want, "{maps} pages into the pass");
            assert_eq!(session.len(), PROMPT.len());
        }
        driver.finish();
    }

    /// Callers tell this error from others.
    #[test]
    fn a_missing_gpu_is_not_found() {
        let Some(driver) = driver("a_missing_gpu_is_not_found") else { return };
        let error = Gpu::open(&"9".parse().unwrap(), driver.kernels.as_deref()).unwrap_err();
        assert!(matches!(&error, Error::Outcore(inner) if inner.kind() == ErrorKind::NotFound), "{error}");
        driver.finish();
    }
}

/// Whichever call of the driver fails: there is an error, nothing is left behind, and nothing is in the wrong order.
#[test]
fn a_call_that_fails_is_an_error_and_leaves_nothing() {
    const UNKNOWN: u32 = 999;
    let Some(driver) = driver("a_call_that_fails_is_an_error_and_leaves_nothing") else { return };
    let Some(fake) = &driver.fake else { return };
    // Calls of the library are not counted: it makes no handle, and is done without.
    let library = CublasLt::load("a_call_that_fails_is_an_error_and_leaves_nothing");
    let refuse = |what| library.iter().for_each(|library| library.refuse(what));
    refuse(1);
    let folder = tempfile::tempdir().unwrap();
    let small = Spec { layers: 1, vocab: 400, ..spec(Arch::Qwen2, WeightType::Q8_0) };
    let files = gguf(folder.path(), &small);
    let run = || {
        session(&driver, &files, 3, 8).and_then(|mut session| {
            session.forward(&PROMPT)?;
            session.sample(&mut Sampler::greedy())
        })
    };
    let calls =
        ["cuModuleLoadData", "cuModuleGetFunction", "cuMemAllocAsync", "cuLaunchKernel", "cuMemcpyDtoHAsync_v2"];
    let before = calls.map(|call| fake.calls(call));
    run().unwrap();
    let made: Vec<u64> = calls.iter().zip(before).map(|(call, before)| fake.calls(call) - before).collect();
    for (call, made) in calls.iter().zip(made) {
        assert!(made > 0, "{call} is never called");
        for nth in [1, made.div_ceil(3), made.div_ceil(2), made] {
            fake.fail_nth(call, nth, UNKNOWN);
            let error = run().unwrap_err();
            assert!(error.to_string().contains("CUDA_ERROR_UNKNOWN"), "{call} {nth} of {made}: {error}");
            let Error::Outcore(inner) = &error else { panic!("{call} {nth} of {made}: {error}") };
            assert!(inner.advice().is_some(), "what to do about it? {call} {nth} of {made}: {error}");
            driver.finish();
        }
    }
    run().unwrap();
    refuse(0);
    driver.finish();
}

/// The only remedy is to start again, and the error says so.
#[test]
fn a_gpu_that_is_lost_in_a_pass_says_what_to_do() {
    const ILLEGAL_ADDRESS: u32 = 700;
    let Some(driver) = driver("a_gpu_that_is_lost_in_a_pass_says_what_to_do") else { return };
    let Some(fake) = &driver.fake else { return };
    let folder = tempfile::tempdir().unwrap();
    let files = gguf(folder.path(), &Spec { layers: 1, vocab: 400, ..spec(Arch::Llama, WeightType::F16) });
    {
        let mut session = session(&driver, &files, 3, 8).unwrap();
        fake.lose_at("cuLaunchKernel", 3, ILLEGAL_ADDRESS);
        let error = session.forward(&PROMPT).map(drop).unwrap_err();
        let Error::Outcore(error) = &error else { panic!("{error}") };
        assert!(error.to_string().contains("ILLEGAL_ADDRESS"), "{error}");
        assert!(error.advice().is_some_and(|advice| advice.contains("start the program again")), "{error}");
    }
    // A lost device cannot be asked to give things back.
    fake.take_findings();
}

// ---- the program ----

fn real_model(test: &str) -> Option<PathBuf> {
    // Cargo says where the package is to the tests that it runs.
    let package = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let path = package.join("../../models/SmolLM2-135M-Instruct.Q4_1.gguf");
    if path.is_file() {
        return Some(path);
    }
    skipped(test, "model", &format!("{} is absent; scripts/fetch_model.sh gets it", path.display()));
    None
}

/// `generate` with the emulated driver and the kernels in it; its caches in `folder`.
fn generate(folder: &Path, args: &[&str]) -> Option<Command> {
    on_emulated("generate", folder, args)
}

/// A program in the same way.
fn on_emulated(name: &str, folder: &Path, args: &[&str]) -> Option<Command> {
    let Some(driver) = driver_library() else {
        skipped(name, "emulated", "the emulated CUDA driver is not beside this test");
        return None;
    };
    let kernels = kernel_library(name)?;
    let mut command = Command::new(program(name));
    command.args(args).stdin(Stdio::null()).env_remove("RUST_LOG").env("XDG_CACHE_HOME", folder);
    command.env("LD_PRELOAD", format!("{}:{}", driver.display(), kernels.display()));
    Some(command)
}

/// The JSON line of a run that must succeed, and in which the judge must find nothing.
fn json_of(output: &Output) -> Value {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {err}", output.status);
    assert!(!err.contains("fake CUDA"), "{err}");
    serde_json::from_str(out.lines().last().unwrap()).unwrap()
}

#[test]
fn generate_gives_the_words_of_the_cpu_in_a_budget_smaller_than_the_model() {
    const NAME: &str = "generate_gives_the_words_of_the_cpu_in_a_budget_smaller_than_the_model";
    let (Some(model), Some(kernels)) = (real_model(NAME), ptx_file(NAME)) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (model, kernels) = (model.to_str().unwrap(), kernels.to_str().unwrap());
    let args =
        ["--model", model, "--prompt", "Virtual memory is", "--tokens", "16", "--device-budget", "32MiB", "--json"];
    let on_gpu = [&args[..], &["--device", "cuda:0", "--kernels", kernels]].concat();
    let Some(mut command) = generate(folder.path(), &on_gpu) else { return };
    let got = json_of(&command.output().unwrap());
    let mut on_cpu = Command::new(generate_program());
    on_cpu.args(args).stdin(Stdio::null()).env("XDG_CACHE_HOME", folder.path());
    let want = json_of(&on_cpu.output().unwrap());
    for field in ["prompt_tokens", "tokens", "text"] {
        assert_eq!(got[field], want[field], "{field}");
    }
    assert_eq!(got["tokens"].as_array().unwrap().len(), 16);
    assert_eq!(got["device"], "cuda:0");
    assert!(got["peak_device_bytes"].as_u64().unwrap() <= 32 << 20, "{got}");
    assert!(got["link_bytes"].as_u64().unwrap() > 16 * (60 << 20), "{got}");
    let keys = |run: &Value| run.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&got), keys(&want));
}

/// A prompt of `tokens` tokens, for `--prompt-tokens`.
fn long_prompt(tokens: u32) -> String {
    (0..tokens).map(|n| (n * 7919 % 4999).to_string()).collect::<Vec<_>>().join(",")
}

/// The activations of a long prompt in one pass left a small GPU no room for pages.
#[test]
fn regression_a_long_prompt_leaves_a_gpu_room_for_pages() {
    let Some(kernels) = ptx_file("regression_a_long_prompt_leaves_a_gpu_room_for_pages") else { return };
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("m.gguf");
    Spec { context: 256, layers: 1, ..spec(Arch::Llama, WeightType::Q8_0) }.write_gguf(&model).unwrap();
    let prompt = long_prompt(120);
    let args =
        ["--model", model.to_str().unwrap(), "--prompt-tokens", &prompt, "--tokens", "2", "--json", "--logits-hash"];
    let on_gpu = [&args[..], &["--device", "cuda", "--kernels", kernels.to_str().unwrap()]].concat();
    let run = |memory: &str, more: &[&str]| {
        let mut command = generate(folder.path(), &[&on_gpu[..], more].concat())?;
        Some(json_of(&command.env("FAKECUDA_MEM_MB", memory).output().unwrap()))
    };
    // A budget beyond the model's pages is cut down to them.
    let Some(whole) = run("1000", &["--device-budget", "500MiB"]) else { return };
    let pages = std::fs::metadata(&model).unwrap().len().next_multiple_of(PAGE);
    assert_eq!(whole["device_budget_bytes"].as_u64(), Some(pages), "{whole}");
    // The driver and cuBLASLt leave room for two pages of this, if the prompt is read in parts.
    let cut = run("102", &[]).unwrap();
    assert_eq!(cut["device_budget_bytes"].as_u64().map(|bytes| bytes / PAGE), Some(2), "{cut}");
    let activations = |run: &Value| run["memory"]["activations_bytes"].as_u64().unwrap();
    assert!(activations(&cut) < activations(&whole), "the prompt was read in one pass: {cut}");
    for field in ["tokens", "logits_xxh3"] {
        assert!(!whole[field].is_null() && cut[field] == whole[field], "{field}: {cut}");
    }
}

/// In blocks of a pool, keys and values compete with the weights for frames. No budget changes a bit.
#[test]
fn generate_keeps_keys_and_values_in_pages_of_a_gpu() {
    let Some(kernels) = ptx_file("generate_keeps_keys_and_values_in_pages_of_a_gpu") else { return };
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("m.gguf");
    Spec { kv_heads: 4, vocab: 2000, ..spec(Arch::Llama, WeightType::F32) }.write_gguf(&model).unwrap();
    let args = ["--model", model.to_str().unwrap(), "--prompt-tokens", "5,9,2,77,1999,4", "--tokens", "6", "--json"];
    let args = [&args[..], &["--paged-kv", "--logits-hash"]].concat();
    let on_gpu = [&args[..], &["--device", "cuda", "--kernels", kernels.to_str().unwrap()]].concat();
    let run = |more: &[&str]| {
        let mut command = generate(folder.path(), &[&on_gpu[..], more].concat())?;
        Some(json_of(&command.output().unwrap()))
    };
    let Some(whole) = run(&[]) else { return };
    // Two blocks for each of two layers.
    let pages = std::fs::metadata(&model).unwrap().len().div_ceil(PAGE) + 2 * 2;
    assert_eq!(whole["device_budget_bytes"].as_u64(), Some(pages * PAGE), "{whole}");
    assert_eq!(whole["memory"]["keys_values_bytes"], 0);
    let mut on_cpu = Command::new(generate_program());
    let want = json_of(&on_cpu.args(&args).stdin(Stdio::null()).output().unwrap());
    assert_eq!(whole["tokens"], want["tokens"]);
    let few = run(&["--device-budget", "8MiB"]).unwrap();
    assert!(few["disk_written_bytes"].as_u64() > Some(0), "no block was ever written back: {few}");
    assert!(few["peak_device_bytes"].as_u64() <= Some(8 << 20), "{few}");
    for field in ["tokens", "logits_xxh3"] {
        assert!(!whole[field].is_null() && few[field] == whole[field], "{field}: {few}");
    }
    // Rows of which 256 tokens do not fill a page of a GPU.
    let small = folder.path().join("small.gguf");
    spec(Arch::Llama, WeightType::F32).write_gguf(&small).unwrap();
    let args = [&["--model", small.to_str().unwrap()], &on_gpu[2..]].concat();
    let few = json_of(&generate(folder.path(), &args).unwrap().output().unwrap());
    assert_eq!(few["tokens"].as_array().map(Vec::len), Some(6), "{few}");
}

/// What a token takes is reported where a GPU computes, and is null on the host.
#[test]
fn generate_reports_what_a_token_takes_of_a_gpu() {
    const NAME: &str = "generate_reports_what_a_token_takes_of_a_gpu";
    const FIELDS: [&str; 11] = [
        "bandwidth_share",
        "device_bytes",
        "gpu_seconds",
        "gpu_stall_seconds",
        "graph_launches",
        "graph_nodes",
        "host_seconds",
        "launches",
        "pins",
        "synchronisations",
        "waiting_seconds",
    ];
    let Some(kernels) = ptx_file(NAME) else { return };
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("m.gguf");
    Spec { vocab: 300, ..spec(Arch::Llama, WeightType::Q8_0) }.write_gguf(&model).unwrap();
    let args = ["--model", model.to_str().unwrap(), "--prompt-tokens", "5,9,2", "--tokens", "6", "--json"];
    let run = |more: &[&str]| {
        let mut command = generate(folder.path(), &[&args[..], more].concat())?;
        Some(json_of(&command.output().unwrap()))
    };
    let on_gpu = ["--device", "cuda", "--kernels", kernels.to_str().unwrap(), "--repeat", "2"];
    let Some(graphs) = run(&on_gpu) else { return };
    let launches = run(&[&on_gpu[..], &["--no-graphs"]].concat()).unwrap();
    let stalls = run(&[&on_gpu[..], &["--time-stalls"]].concat()).unwrap();
    let old = generate(folder.path(), &[&args[..], &on_gpu].concat()).unwrap();
    let old = json_of(&{ old }.env("FAKECUDA_DRIVER_VERSION", "12070").output().unwrap());
    let host = run(&[]).unwrap();
    let per_token = |run: &Value| {
        let all = run["per_token"].as_object().unwrap().clone();
        let mut fields: Vec<&str> = all.keys().map(String::as_str).collect();
        fields.sort_unstable();
        assert_eq!(fields, FIELDS, "{run}");
        FIELDS.map(|field| all[field].as_f64())
    };
    let repeats = |run: &Value| {
        let repeats = run["repeats"].as_array().unwrap();
        for times in repeats {
            for field in ["ttft_s", "decode_tok_s", "pass_s_median"] {
                assert!(times[field].as_f64() > Some(0.0), "{field}: {run}");
            }
        }
        let last = &repeats[repeats.len() - 1];
        for field in ["host_seconds", "gpu_seconds", "waiting_seconds"] {
            assert_eq!(last[field], run["per_token"][field], "{field}: {run}");
        }
        // The other fields are those of the last time.
        assert_eq!(last["ttft_s"], run["ttft_s"], "{run}");
        repeats.len()
    };
    assert_eq!((repeats(&graphs), repeats(&launches), repeats(&host)), (2, 2, 1));
    assert_eq!(per_token(&host), [None; 11]);
    assert!(host["device_bandwidth_bytes_per_s"].is_null(), "{host}");
    for run in [&graphs, &launches, &stalls, &old] {
        // The emulated GPU's clock and the width of its bus, two words a clock.
        assert_eq!(run["device_bandwidth_bytes_per_s"].as_u64(), Some(3_201_000 * 1000 * 2 * (6144 / 8)), "{run}");
        let [share, bytes, gpu, stalled, _, _, host, launches, pins, waits, waiting] = per_token(run);
        let wall = 1.0 / run["decode_tok_s"].as_f64().unwrap();
        if std::ptr::eq(run, &raw const old) {
            // This driver has no function for the time between events.
            assert_eq!([share, gpu, stalled], [None; 3], "{run}");
        } else {
            assert!(gpu > Some(0.0) && gpu <= Some(wall), "{run}");
            let rate = run["device_bandwidth_bytes_per_s"].as_f64().unwrap();
            let wanted = bytes.unwrap() / gpu.unwrap() / rate;
            assert!((share.unwrap() / wanted - 1.0).abs() < 1e-9 && share < Some(1.0), "{run}");
            assert_eq!(stalled.is_some(), std::ptr::eq(run, &raw const stalls), "{run}");
            assert!(stalled <= gpu, "{run}");
        }
        assert!(waiting > Some(0.0) && waiting <= Some(wall), "{run}");
        // A token reads each weight but those of the other tokens' embeddings.
        assert!(bytes > Some(0.5 * run["pass_bytes"].as_f64().unwrap()), "{run}");
        assert!(host > Some(0.0) && launches.is_some() && pins.is_some(), "{run}");
        assert_eq!(waits, Some(1.0), "{run}");
        assert_eq!(run["tokens"], graphs["tokens"]);
    }
    let [_, _, _, _, graph_launches, graph_nodes, ..] = per_token(&graphs);
    assert!(graph_launches > Some(0.0) && graph_nodes > graph_launches, "{graphs}");
    let [_, _, _, _, no_graphs, no_nodes, ..] = per_token(&launches);
    assert_eq!((no_graphs, no_nodes), (Some(0.0), Some(0.0)), "{launches}");
    assert!(per_token(&launches)[7] > per_token(&graphs)[7], "as many launches with graphs: {graphs}");
}

/// The limits of a token of a resident model, as the in-core baseline counts them from end to end.
#[test]
fn llm_bench_counts_few_launches_and_one_wait_a_token() {
    const TOKENS: usize = 3;
    let Some(kernels) = ptx_file("llm_bench_counts_few_launches_and_one_wait_a_token") else { return };
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("m.gguf");
    let spec = Spec { vocab: 300, ..spec(Arch::Qwen3, WeightType::F16) };
    spec.write_gguf(&model).unwrap();
    let tokens = TOKENS.to_string();
    let args = [model.to_str().unwrap(), "--ids", "5,9,2", "--tokens", &tokens, "--json"];
    let run = |more: &[&str]| {
        let mut command = on_emulated("llm-bench", folder.path(), &[&args[..], more].concat())?;
        Some(json_of(&command.output().unwrap()))
    };
    let on_gpu = ["--cuda", "0", "--kernels", kernels.to_str().unwrap()];
    let Some(graphs) = run(&on_gpu) else { return };
    let launches = run(&[&on_gpu[..], &["--no-graphs"]].concat()).unwrap();
    let host = run(&[]).unwrap();
    let counts = |run: &Value| {
        ["launches", "graph_launches", "synchronisations", "pins"]
            .map(|field| run["per_token"][field].as_f64().unwrap())
    };
    let [none, graph_launches, waits, pins] = counts(&graphs);
    assert!(none == 0.0 && graph_launches > 0.0 && graph_launches <= 3.0, "{graphs}");
    assert_eq!([waits, pins], [1.0, 0.0], "{graphs}");
    let [each, graph_launches, waits, pins] = counts(&launches);
    // Beside the layers: the embedding, the logits, the choice.
    assert!(each > 3.0 && each - 3.0 <= (7 * spec.layers) as f64, "{launches}");
    assert_eq!([graph_launches, waits, pins], [0.0, 1.0, 0.0], "{launches}");
    // A graph has the launches, and copies of the token's inputs and result.
    for (run, nodes) in [(&graphs, each..=each + 3.0), (&launches, 0.0..=0.0)] {
        let token = |field: &str| run["per_token"][field].as_f64().unwrap_or(-1.0);
        assert!(nodes.contains(&token("graph_nodes")), "{run}");
        assert!(token("host_seconds") > 0.0 && token("device_bytes") > 0.0, "{run}");
    }
    assert!(host["per_token"].is_null() && host["device"] == "host" && graphs["device"] == "cuda:0", "{host}");
    assert_eq!(graphs["tokens"].as_array().map(Vec::len), Some(1 + TOKENS), "{graphs}");
    assert!(launches["tokens"] == graphs["tokens"] && host["tokens"] == graphs["tokens"], "{launches}, {host}");
    for run in [&graphs, &launches, &host] {
        for field in ["prefill_tok_s", "decode_tok_s", "decode_tok_s_median"] {
            assert!(run[field].as_f64() > Some(0.0), "{field}: {run}");
        }
    }
}

/// Raises a flag when `left` pages have been mapped.
struct Raising {
    left: AtomicU32,
    flag: Arc<AtomicBool>,
}

impl DeviceHook for Raising {
    fn before(&self, call: DeviceCall) -> outcore::Result<()> {
        if call == DeviceCall::Map && self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.flag.store(true, Ordering::SeqCst);
        }
        Ok(())
    }
}

/// The program reports what was done, and the judge finds nothing.
#[test]
fn an_interrupt_ends_a_pass_on_a_gpu() {
    let Some(kernels) = ptx_file("an_interrupt_ends_a_pass_on_a_gpu") else { return };
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("m.gguf");
    Spec { context: 512, ..spec(Arch::Llama, WeightType::Q8_0) }.write_gguf(&model).unwrap();
    let (prompt, model) = (long_prompt(300), model.to_str().unwrap());
    // Pages come and go throughout a pass, so that the pass waits for its own kernels from beginning to end. The first
    // kernel runs until the program has been interrupted.
    let pipe = folder.path().join("gate");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let args = ["--model", model, "--prompt-tokens", &prompt, "--tokens", "100", "--json", "--device-budget", "4MiB"];
    let on_gpu = [&args[..], &["--device", "cuda", "--kernels", kernels.to_str().unwrap()]].concat();
    let Some(mut command) = generate(folder.path(), &on_gpu) else { return };
    // Open for reading too, so that opening does not wait for the kernel. A kernel that begins later finds no pipe.
    let gate = std::fs::File::options().read(true).write(true).open(&pipe).unwrap();
    command.env("RUST_LOG", "info").env("FAKECUDA_GATE", &pipe);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    let mut until = |word: &str| {
        while !said.contains(word) {
            assert_ne!(stderr.read_line(&mut said).unwrap(), 0, "it ended and did not say {word:?}: {said}");
        }
    };
    until("ready");
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    until("interrupt again");
    std::fs::remove_file(&pipe).unwrap();
    drop(gate);
    stderr.read_to_string(&mut said).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(!said.contains("fake CUDA") && !said.contains("panicked"), "{said}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["interrupted"], true);
    assert_eq!(report["tokens"].as_array().unwrap().len(), 0, "{report}");
}

/// A refusal: one line of error that has every part of `wanted` in it.
fn refused(output: &Output, wanted: &[&str]) {
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{err}");
    let told: Vec<&str> = err.lines().filter(|line| line.starts_with("generate: ")).collect();
    assert!(told.len() == 1 && wanted.iter().all(|part| told[0].contains(part)), "wanted {wanted:?}: {err}");
}

#[test]
fn what_cannot_run_on_a_gpu_says_why_and_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("m.gguf");
    spec(Arch::Llama, WeightType::Q8_0).write_gguf(&model).unwrap();
    let Some(kernels) = ptx_file("what_cannot_run_on_a_gpu_says_why_and_what_to_do") else { return };
    let (model, kernels) = (model.to_str().unwrap(), kernels.to_str().unwrap());
    let base = ["--model", model, "--prompt-tokens", "1,2", "--tokens", "2", "--device"];
    let run = |more: &[&str], set: &[(&str, &str)]| {
        let mut command = generate(folder.path(), &[&base[..], more].concat())?;
        Some(command.envs(set.iter().copied()).output().unwrap())
    };
    let with_kernels = ["cuda", "--kernels", kernels];
    let Some(output) = run(&with_kernels, &[("FAKECUDA_NO_DEVICE", "1")]) else { return };
    refused(&output, &["CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"]);
    let refuse = |more: &[&str], set: &[(&str, &str)], wanted: &[&str]| refused(&run(more, set).unwrap(), wanted);
    refuse(&["cuda:7", "--kernels", kernels], &[], &["no GPU 7", "sees 0 (GPU-", "CUDA_VISIBLE_DEVICES"]);
    refuse(&with_kernels, &[("FAKECUDA_DRIVER_VERSION", "11080")], &["11.8", "12.0"]);
    refuse(&["cuda", "--kernels", "/nowhere/k.ptx"], &[], &["/nowhere/k.ptx", "check_kernels.sh"]);
    refuse(&["cuda", "--kernels", model], &[], &["m.gguf", "check_kernels.sh"]);
    let others = folder.path().join("others.ptx");
    std::fs::write(&others, ".version 9.0\n.target sm_90\n.entry other()\n{\n ret;\n}\n").unwrap();
    refuse(&["cuda", "--kernels", others.to_str().unwrap()], &[], &["others.ptx", "no kernel", "check_kernels.sh"]);
    let before = folder.path().join("before.ptx");
    let text = std::fs::read_to_string(kernels).unwrap();
    assert!(text.contains("kernels_interface_"));
    std::fs::write(&before, text.replace("kernels_interface_", "kernels_interface_of_before_")).unwrap();
    refuse(
        &["cuda", "--kernels", before.to_str().unwrap()],
        &[],
        &["before.ptx", "kernels_interface_", "other sources"],
    );
    let budget = |size: &'static str| [&with_kernels[..], &["--device-budget", size]].concat();
    refuse(&budget("1MiB"), &[], &["1.0 MiB", "2.0 MiB", "at least"]);
    refuse(&budget("2MiB"), &[], &["2.0 MiB", "at least"]);
    // Of a budget larger than the model, only the model's pages count.
    refuse(&budget("8GiB"), &[("FAKECUDA_MEM_MB", "100")], &["6.0 MiB of the model's pages", "100.0 MiB", "at most"]);
    refuse(&[&with_kernels[..], &["--page-size", "64KiB"]].concat(), &[], &["2.0 MiB", "page"]);
    refuse(&[&with_kernels[..], &["--memory", "20MiB"]].concat(), &[], &["--memory 20.0 MiB", "more --memory"]);
    refuse(&with_kernels, &[("FAKECUDA_MEM_MB", "64")], &["64.0 MiB", "GPU has", "leaves no page"]);
    refuse(&["host", "--kernels", kernels], &[], &["--kernels", "--device cuda"]);
    refuse(&["host", "--time-stalls"], &[], &["--time-stalls", "--device cuda"]);
}

/// Where cargo's tests find the libraries of `scripts/fetch_nvcc.sh`.
fn nvrtc(test: &str) -> Option<PathBuf> {
    let folder = folder().join("../nvcc/nvidia/cu13/lib");
    if folder.join("libnvrtc.so.13").exists() {
        return Some(folder);
    }
    skipped(test, "nvrtc", &format!("no NVRTC at {}; scripts/fetch_nvcc.sh gets it", folder.display()));
    None
}

/// The PTX in the program is of the sources that the emulated driver runs: names and parameters agree.
#[test]
fn without_nvrtc_the_program_has_kernels_of_its_own() {
    if machine_has(&["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11"]) {
        eprintln!("SKIPPED: there is an NVRTC on this machine's library path");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("m.gguf");
    spec(Arch::Llama, WeightType::Q4_K).write_gguf(&model).unwrap();
    let args =
        ["--model", model.to_str().unwrap(), "--prompt-tokens", "1,2,3", "--tokens", "2", "--device", "cuda", "--json"];
    let Some(mut command) = generate(folder.path(), &args) else { return };
    let output = command.output().unwrap();
    assert_eq!(json_of(&output)["tokens"].as_array().map(Vec::len), Some(2));
    assert!(!folder.path().join("outcore").exists(), "nothing was compiled, and yet there is a cache");
    // Nor is there a cuBLASLt, unless the machine has one.
    let is_said = |output: &Output| {
        let stderr = String::from_utf8_lossy(&output.stderr);
        ["no cuBLASLt", "install NVIDIA's cuBLAS", "LD_LIBRARY_PATH"].iter().all(|part| stderr.contains(part))
    };
    assert!(is_said(&output) != machine_has(&["libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12"]));
    let Some(mut command) = generate(folder.path(), &[&args[..], &["--deterministic"]].concat()) else { return };
    assert!(!is_said(&command.output().unwrap()));
}

/// Whether a library by one of these names is on the machine's path. Asked of another process: tests have loaded
/// stand-ins into this one, which would be found by the same names.
fn machine_has(names: &[&str]) -> bool {
    let loads = |name: &&str| {
        let script = "import ctypes, sys\ntry:\n    ctypes.CDLL(sys.argv[1])\nexcept OSError:\n    sys.exit(3)";
        let status = Command::new("python3").args(["-c", script, name]).status().unwrap();
        assert!(matches!(status.code(), Some(0 | 3)), "{status}");
        status.success()
    };
    names.iter().any(loads)
}

/// NVRTC compiles the real source, and the emulated driver runs the kernels of that PTX: names and parameters agree.
#[test]
fn kernels_are_compiled_once_and_a_damaged_cache_entry_again() {
    let Some(nvrtc) = nvrtc("kernels_are_compiled_once_and_a_damaged_cache_entry_again") else { return };
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("m.gguf");
    spec(Arch::Llama, WeightType::Q4_K).write_gguf(&model).unwrap();
    let args =
        ["--model", model.to_str().unwrap(), "--prompt-tokens", "1,2,3", "--tokens", "2", "--device", "cuda", "--json"];
    let run = || {
        let mut command = generate(folder.path(), &args)?;
        Some(json_of(&command.env("LD_LIBRARY_PATH", &nvrtc).output().unwrap()))
    };
    let Some(first) = run() else { return };
    let entries = || -> Vec<PathBuf> {
        std::fs::read_dir(folder.path().join("outcore")).unwrap().map(|entry| entry.unwrap().path()).collect()
    };
    let [entry] = &entries()[..] else { panic!("one entry: {:?}", entries()) };
    let (made, text) = (entry.metadata().unwrap().modified().unwrap(), std::fs::read(entry).unwrap());
    assert!(text.starts_with(b"// xxh3 "));
    assert_eq!(run().unwrap()["tokens"], first["tokens"]);
    assert_eq!(entry.metadata().unwrap().modified().unwrap(), made, "compiled again");
    std::fs::write(entry, &text[..text.len() / 2]).unwrap();
    assert_eq!(run().unwrap()["tokens"], first["tokens"]);
    assert!(std::fs::read(entry).unwrap() == text, "the damaged entry was not replaced");
    assert_eq!(entries().len(), 1);
}

#[test]
fn without_a_driver_the_gpu_is_refused() {
    let refusal = {
        let mut command = Command::new(generate_program());
        command.args(["--model", "m.gguf", "--prompt-tokens", "1", "--device", "cuda"]).stdin(Stdio::null());
        // Cargo's own folders, where no driver is: the emulated one is not called libcuda.so there.
        command.output().unwrap()
    };
    let err = String::from_utf8_lossy(&refusal.stderr);
    if !err.contains("libcuda") {
        eprintln!("SKIPPED: this machine has a CUDA driver: {err}");
        return;
    }
    refused(&refusal, &["no CUDA driver", "libcuda.so.1"]);
}
