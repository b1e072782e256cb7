//! Prompts on a GPU with cuBLASLt, which a library of the tests stands in for (`tests/fake-cublaslt`) over the emulated
//! driver; and what is refused for want of a GPU, a driver or libraries that suit. Where `OUTCORE_TEST_GPU` names a
//! GPU, its own cuBLASLt multiplies in the tests in `on_a_gpu`; the others are about the emulated driver.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "cuda/common.rs"]
mod common;
#[path = "cuda/cublaslt.rs"]
mod cublaslt;
#[path = "cuda/emulated.rs"]
mod emulated;
#[path = "cuda/refusals.rs"]
mod refusals;

use std::path::Path;
use std::sync::Arc;

use common::{PAGE, assert_near, expected, gguf};
use cublaslt::{CublasLt, driver_with_library, finish, no_library};
use emulated::{Driver, driver};
use outcore::{Bytes, Runtime};
use outcore_llm::kernels::{ActKind, act_kind};
use outcore_llm::synthetic::Spec;
use outcore_llm::{Arch, CudaModel, CudaSession, Gpu, KvType, ModelFiles, ON_GPU, PagedWeights, WeightType};

fn spec(arch: Arch, dtype: WeightType) -> Spec {
    Spec { ffn_dim: 512, vocab: 1000, ..common::spec(arch, dtype) }
}

/// More tokens than own kernels serve better.
fn prompt() -> Vec<u32> {
    (0..30).map(|n| (n * n * 7 + 3) % 1000).collect()
}

/// Runs `body` with a session of a model on a GPU, in passes of `pass` tokens.
fn on<T>(driver: &Driver, gpu: Gpu, files: &ModelFiles, pass: usize, body: impl FnOnce(&mut CudaSession) -> T) -> T {
    let runtime = Runtime::builder().device(driver.device.clone()).device_budget(Bytes::new(6 * PAGE)).open().unwrap();
    let model = runtime.open_parsed(files.header().clone()).unwrap();
    let weights = Arc::new(PagedWeights::open(&runtime, &model, files).unwrap());
    drop(model);
    let model = Arc::new(CudaModel::load(files, weights, Arc::new(gpu)).unwrap());
    let done = body(&mut CudaSession::new(model, 64, pass, KvType::F32).unwrap());
    runtime.close().unwrap();
    done
}

fn gpu(driver: &Driver) -> Gpu {
    Gpu::open(&driver.device, driver.kernels.as_deref()).unwrap()
}

fn with_library(test: &str) -> Option<(Driver, Option<&'static CublasLt>)> {
    let (driver, library) = driver_with_library(test)?;
    if !gpu(&driver).has_cublaslt() {
        no_library(test);
        return None;
    }
    Some((driver, library))
}

/// The prompt in one pass and in two, and the token behind it.
fn assert_same_logits(driver: &Driver, library: Option<&CublasLt>, what: &str, files: &ModelFiles, dtype: WeightType) {
    // The CPU rounds the activations that meet some types to eight bits. Weights and activations have 11 bits in f16,
    // and 8 in bf16, in which BF16 weights are multiplied where they lie.
    let tolerance = match (act_kind(dtype), dtype) {
        (ActKind::Plain, WeightType::BF16) => 1e-2,
        (ActKind::Plain, _) => 2e-3,
        _ => 3e-2,
    };
    let (want, tokens) = expected(files, &prompt(), 1);
    for pass in [prompt().len(), 17] {
        let what = format!("{what}, cuBLASLt, passes of {pass}");
        on(driver, gpu(driver), files, pass, |session| {
            assert_near(&what, session.forward(&prompt()).unwrap(), &want[0], tolerance);
            if let Some(library) = library {
                assert!(library.products() >= 14, "{what}: the library multiplied nothing");
                assert!(library.least_alignment() >= 16, "{what}");
            }
            assert_near(&what, session.forward(&tokens).unwrap(), &want[1], tolerance);
            assert!(library.is_none_or(|library| library.products() == 0), "{what}: of one token");
        });
    }
}

/// Moves the tensors of a safetensors file to an address that is `rest` more than a multiple of 16.
fn move_tensors(path: &Path, rest: usize) {
    let bytes = std::fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let spaces = (rest + 16 - (8 + header) % 16) % 16;
    let mut moved = ((header + spaces) as u64).to_le_bytes().to_vec();
    moved.extend(&bytes[8..8 + header]);
    moved.extend(vec![b' '; spaces]);
    moved.extend(&bytes[8 + header..]);
    std::fs::write(path, moved).unwrap();
}

/// What runs on a GPU as it does on the emulated driver.
mod on_a_gpu {
    use super::*;

    #[test]
    fn prompts_of_every_weight_type_give_the_logits_of_the_cpu_with_cublaslt() {
        let Some((driver, library)) =
            with_library("prompts_of_every_weight_type_give_the_logits_of_the_cpu_with_cublaslt")
        else {
            return;
        };
        let folder = tempfile::tempdir().unwrap();
        for dtype in ON_GPU {
            let files = gguf(folder.path(), &spec(Arch::Llama, dtype));
            assert_same_logits(&driver, library, &dtype.to_string(), &files, dtype);
        }
        for (arch, dtype) in [(Arch::Qwen2, WeightType::Q8_0), (Arch::Qwen3, WeightType::F16)] {
            let files = gguf(folder.path(), &spec(arch, dtype));
            assert_same_logits(&driver, library, &format!("{arch:?}, {dtype}"), &files, dtype);
        }
        finish(&driver, library);
    }

    /// Tensors of safetensors files begin at multiples of 8. Those that begin at no multiple of 16 get to the library
    /// as tiles.
    #[test]
    fn weights_at_any_multiple_of_eight_reach_cublaslt_at_multiples_of_sixteen() {
        let Some((driver, library)) =
            with_library("weights_at_any_multiple_of_eight_reach_cublaslt_at_multiples_of_sixteen")
        else {
            return;
        };
        let folder = tempfile::tempdir().unwrap();
        for dtype in [WeightType::F16, WeightType::BF16, WeightType::F32] {
            for rest in [0, 8] {
                let place = folder.path().join(format!("{dtype}-{rest}"));
                spec(Arch::Llama, dtype).write_safetensors(&place, 1).unwrap();
                move_tensors(&place.join("model.safetensors"), rest);
                let files = ModelFiles::open(&place).unwrap();
                assert_same_logits(&driver, library, &format!("{dtype}, {rest} bytes behind 16"), &files, dtype);
            }
        }
        finish(&driver, library);
    }

    /// The order of a library's sums depends on how many vectors it gets; that of own kernels does not.
    #[test]
    fn without_cublaslt_how_a_prompt_is_cut_changes_no_bit() {
        let Some((driver, library)) = with_library("without_cublaslt_how_a_prompt_is_cut_changes_no_bit") else {
            return;
        };
        let folder = tempfile::tempdir().unwrap();
        let files = gguf(folder.path(), &spec(Arch::Llama, WeightType::Q4_K));
        let logits = |pass| {
            let gpu = gpu(&driver).without_cublaslt();
            assert!(!gpu.has_cublaslt());
            on(&driver, gpu, &files, pass, |session| session.forward(&prompt()).unwrap().to_vec())
        };
        let whole = logits(prompt().len());
        for pass in [1, 9, 16] {
            assert_eq!(logits(pass), whole, "{pass} at a time");
        }
        assert!(library.is_none_or(|library| library.products() == 0));
        finish(&driver, library);
    }
}
