//! A model that is there already has the loss that another engine finds for it, and is trained on from there.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod memory;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use candle_core::{DType, Device, Tensor};
use memory::Memory;
use outcore::{Bytes, ErrorKind};
use outcore_lab::planning::{self, Checkpointing, Optimizer};
use outcore_llm::synthetic::{Experts, Spec};
use outcore_llm::{Arch, KvType, Model, ModelFiles, Options, PlainWeights, Session, WeightType};
use train::checkpoint::{Checkpoint, extents};
use train::pass::{Micro, Pass};
use train::run::{Limits, Settings, run};

const TOKENS: [u32; 13] = [72, 101, 7, 299, 0, 54, 101, 101, 12, 13, 200, 72, 5];

fn small() -> Spec {
    Spec { dim: 64, head_dim: 16, ffn_dim: 96, ..Spec::small(Arch::Llama, WeightType::F32) }
}

/// The mean loss of the tokens behind the first one, by the engine of `outcore-llm`.
fn expected(path: &Path) -> f64 {
    let files = ModelFiles::open(path).unwrap();
    let weights = Arc::new(PlainWeights::read(&files).unwrap());
    let model = Model::load(&files, weights, Options::default()).unwrap();
    let mut session = Session::new(Arc::new(model), 64, KvType::F32).unwrap();
    let losses = TOKENS.windows(2).map(|pair| {
        let logits: Vec<f64> = session.forward(&pair[..1]).unwrap().iter().map(|logit| f64::from(*logit)).collect();
        let largest = logits.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = logits.iter().map(|logit| (logit - largest).exp()).sum();
        largest + sum.ln() - logits[pair[1] as usize]
    });
    losses.sum::<f64>() / (TOKENS.len() - 1) as f64
}

fn found(path: &Path) -> f64 {
    let checkpoint = Checkpoint::open(path).unwrap();
    let mut memory = Memory::default();
    for parameter in checkpoint.shape().all() {
        let (rows, _) = extents(&parameter);
        let values = checkpoint.rows(&parameter, 0..rows).unwrap();
        let tensor = Tensor::from_vec(values, parameter.1, &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
        memory.parameters.insert(parameter.0, tensor);
    }
    let count = TOKENS.len() - 1;
    let micro = Micro { inputs: TOKENS[..count].into(), targets: TOKENS[1..].into() };
    Pass::new(checkpoint.shape(), count, DType::F64).unwrap().run(&mut memory, &[micro]).unwrap()
}

#[test]
fn the_loss_is_that_of_the_other_engine() {
    let folder = tempfile::tempdir().unwrap();
    for (number, (tied, dtype)) in
        [(false, WeightType::F32), (true, WeightType::F32), (true, WeightType::Q8_0)].into_iter().enumerate()
    {
        let spec = Spec { tied, dtype, ..small() };
        let path = folder.path().join(format!("{number}.gguf"));
        spec.write_gguf(&path).unwrap();
        let (found, expected) = (found(&path), expected(&path));
        // The other engine rounds what it multiplies with weights of 8 bits.
        let off = if dtype == WeightType::F32 { 1e-5 } else { 1e-2 };
        assert!((found - expected).abs() < off * expected, "{tied} {dtype}: {found}, {expected}");
    }
    let shards = folder.path().join("shards");
    std::fs::create_dir(&shards).unwrap();
    small().write_safetensors(&shards, 2).unwrap();
    let (found, expected) = (found(&shards), expected(&shards));
    assert!((found - expected).abs() < 1e-5 * expected, "{found}, {expected}");
}

#[test]
fn a_model_is_trained_on_in_any_memory() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, text) = (folder.path().join("model.gguf"), folder.path().join("text"));
    Spec { tied: true, dtype: WeightType::Q8_0, ..small() }.write_gguf(&path).unwrap();
    std::fs::write(&text, "the pages of a layer come up once forward\n and once back\u{2026}\n".repeat(40)).unwrap();
    let settings = |checkpoint: &Checkpoint| Settings {
        shape: checkpoint.shape().clone(),
        model: Some(checkpoint.id()),
        window: 16,
        batch: 4,
        micro: 2,
        mixed: false,
        seed: 1,
        rate: 1e-3,
        warm_up: 0,
        clip: 1.0,
        weight_decay: 0.0,
    };
    let trained = |name: &str, frames: u64, steps: u64| {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let settings = settings(&checkpoint);
        let (page, state) = (Bytes::kib(4), folder.path().join(name));
        let budget = Some(Bytes::new(frames * page.get()));
        let limits = Limits { state, resume: true, steps, page, budget, commit_every: 2, capture: None };
        run(&text, Some(checkpoint), &settings, &limits, &AtomicBool::new(false), |_| {}, |_| {})
    };
    let whole = trained("whole", 4096, 5).unwrap();
    assert!(whole.losses[4] < whole.losses[0], "{:?}", whole.losses);
    trained("little", 40, 3).unwrap();
    assert_eq!(trained("little", 70, 5).unwrap().losses, whole.losses);
    // Another model of the same shape.
    Spec { tied: true, dtype: WeightType::Q8_0, seed: 9, ..small() }.write_gguf(&path).unwrap();
    let error = trained("whole", 4096, 6).unwrap_err();
    assert!(error.to_string().contains("has model"), "{error}");
}

/// `outcore plan MODEL --train --checkpoint layers`, class by class.
#[test]
fn a_plan_says_what_a_training_takes() {
    let folder = tempfile::tempdir().unwrap();
    for (tied, dtype) in [(false, WeightType::F32), (true, WeightType::Q8_0)] {
        let path = folder.path().join("model.gguf");
        Spec { tied, dtype, ..small() }.write_gguf(&path).unwrap();
        let trained = Checkpoint::open(&path).unwrap().shape().clone();
        let shape = planning::Shape::of(&outcore::format::open(&path).unwrap(), None).unwrap();
        // What passes read, gradients, and what only the step uses: all in f32, and with `--mixed`.
        for (optimizer, classes) in [(Optimizer::Adam, [4, 4, 8]), (Optimizer::AdamMixed, [2, 2, 12])] {
            let train = planning::Work::Train { optimizer, checkpointing: Checkpointing::Layers };
            let job = planning::Job { shape: shape.clone(), work: train, context: 16, batch: 4, headroom_percent: 0 };
            let planned = job.memory(false).unwrap();
            let each = classes.map(|bytes| Bytes::new(bytes * trained.parameters()));
            assert_eq!([planned.weights, planned.gradients, planned.optimizer], each);
            let work = train::memory::work(&trained, 16, 1);
            assert_eq!(planned.activations, train::memory::bytes(work.kept(4) + work.computing()));
        }
    }
}

#[test]
fn models_of_other_kinds_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |name: &str, spec: &Spec, named: &str| {
        let path = folder.path().join(name);
        spec.write_gguf(&path).unwrap();
        let error = Checkpoint::open(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains(named) && error.to_string().contains(name), "{error}");
    };
    refused("qwen2", &Spec::small(Arch::Qwen2, WeightType::F32), "qwen2");
    refused("qwen3", &Spec::small(Arch::Qwen3, WeightType::F32), "qwen3");
    refused("experts", &Spec { experts: Some(Experts { count: 4, used: 2 }), ..small() }, "experts");
    refused("wide", &Spec { head_dim: 32, ..small() }, "wider");
    let missing = Checkpoint::open(&folder.path().join("nowhere")).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound, "{missing}");
}
