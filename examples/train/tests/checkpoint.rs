//! A model that is there already has the loss that another engine finds for it, and is trained on from there.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod memory;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::BufReader;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use candle_core::{DType, Device, Tensor};
use memory::Memory;
use outcore::durable::DurableOptions;
use outcore::{Bytes, ErrorKind, PageSize, Runtime};
use outcore_lab::planning::{self, Checkpointing, Optimizer};
use outcore_lab::sim::{CaptureReader, CaptureStep};
use outcore_llm::synthetic::{Experts, Spec};
use outcore_llm::{Arch, KvType, Model, ModelFiles, Options, PlainWeights, Session, WeightType};
use train::checkpoint::{Checkpoint, extents};
use train::pass::{Micro, Pass};
use train::run::{AtNonFinite, Limits, Report, Settings, run};

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

fn settings(checkpoint: &Checkpoint) -> Settings {
    Settings {
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
    }
}

/// A state of small pages, of which so many are kept.
fn limits(state: PathBuf, frames: u64, steps: u64) -> Limits {
    let page = Bytes::kib(4);
    Limits {
        state,
        resume: true,
        steps,
        page,
        budget: Some(Bytes::new(frames * page.get())),
        commit_every: 2,
        non_finite: AtNonFinite::Stop,
        capture: None,
        store: None,
    }
}

#[test]
fn a_model_is_trained_on_in_any_memory() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, text) = (folder.path().join("model.gguf"), folder.path().join("text"));
    Spec { tied: true, dtype: WeightType::Q8_0, ..small() }.write_gguf(&path).unwrap();
    std::fs::write(&text, "the pages of a layer come up once forward\n and once back\u{2026}\n".repeat(40)).unwrap();
    let trained = |name: &str, frames: u64, steps: u64| {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let (settings, limits) = (settings(&checkpoint), limits(folder.path().join(name), frames, steps));
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

/// All that a folder has but the losses: parameters and what the rule keeps of them.
fn kept(state: &Path) -> BTreeMap<String, Vec<u8>> {
    let page = PageSize::new(Bytes::kib(4)).unwrap();
    let runtime = Runtime::builder().page_size(page).device_budget(Bytes::mib(8)).open().unwrap();
    let folder = runtime.open_durable(state, DurableOptions::default()).unwrap();
    let tensors = folder.tensors().into_iter().filter(|tensor| !tensor.name().starts_with("losses."));
    tensors.map(|tensor| (tensor.name().into(), runtime.pin(&tensor).wait().unwrap().bytes().to_vec())).collect()
}

/// The vector of a token that is in one window is infinite, so what is computed of it is no number. Before and behind
/// that step the training learns.
#[test]
fn a_step_whose_gradients_are_no_numbers_changes_no_parameter_and_the_training_goes_on() {
    const STEPS: u64 = 6;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, text) = (folder.path().join("model.gguf"), folder.path().join("text"));
    small().write_gguf(&path).unwrap();
    let rare = Checkpoint::open(&path).unwrap().tokenizer().unwrap().encode("~", false).unwrap();
    assert_eq!(rare.len(), 1);
    let embedding = ModelFiles::open(&path).unwrap().tensor("token_embd.weight").unwrap().clone();
    let at = embedding.offset + u64::from(rare[0]) * embedding.row_bytes;
    let vector = f32::INFINITY.to_le_bytes().repeat(embedding.cols as usize);
    OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&vector, at).unwrap();
    // 24 windows, each of which is used once in 6 steps.
    let before = "one page after the other, ".repeat(6);
    std::fs::write(&text, format!("{before}~{}", "as in the step before, ".repeat(10))).unwrap();
    let trained = |name: &str, frames: u64, steps: u64, non_finite: AtNonFinite| {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let settings = settings(&checkpoint);
        let limits = Limits { non_finite, commit_every: 1, ..limits(folder.path().join(name), frames, steps) };
        let mut said = Vec::new();
        let say = |what: &str| said.push(what.to_owned());
        let report = run(&text, Some(checkpoint), &settings, &limits, &AtomicBool::new(false), say, |_| {});
        report.map(|report| (report, said))
    };
    let bits = |report: &Report| report.losses.iter().map(|loss| loss.to_bits()).collect::<Vec<u32>>();
    let (whole, said) = trained("whole", 4096, STEPS, AtNonFinite::Skip).unwrap();
    let skipped = (1..).zip(&whole.losses).filter(|(_, loss)| !loss.is_finite()).map(|(step, _)| step);
    let skipped: Vec<u64> = skipped.collect();
    assert!(matches!(skipped[..], [step] if (2..STEPS).contains(&step)), "{:?}", whole.losses);
    let step = skipped[0];
    assert_eq!((whole.steps, whole.skipped_steps, whole.generation), (STEPS, 1, STEPS));
    assert!(serde_json::to_value(&whole).unwrap()["losses"][step as usize - 1].is_null());
    let told = format!("step {step} is skipped: the gradients of \"model.embed_tokens.weight\" are infinite");
    assert_eq!(said.iter().filter(|said| said.contains(&told)).count(), 1, "{said:?}");
    // In little memory, left before the step, on it and behind it.
    let mut states = Vec::new();
    for (frames, steps) in [(40, step - 1), (60, step), (40, step + 1)] {
        let (report, _) = trained("left", frames, steps, AtNonFinite::Skip).unwrap();
        assert_eq!(bits(&report), bits(&whole)[..steps as usize]);
        assert_eq!(report.skipped_steps, u64::from(steps >= step));
        states.push(kept(&folder.path().join("left")));
    }
    assert!(states[0].len() > 2 && states[0] == states[1] && states[1] != states[2]);
    let (left, _) = trained("left", 50, STEPS, AtNonFinite::Skip).unwrap();
    assert_eq!((bits(&left), left.losses_xxh3), (bits(&whole), whole.losses_xxh3.clone()));
    // A run that was ended by the step keeps what was before, and goes on if the step may be skipped.
    let error = trained("ended", 60, STEPS, AtNonFinite::Stop).unwrap_err();
    assert!(error.to_string().contains(&format!("in step {step} the gradients of \"model.embed_tokens")), "{error}");
    let (report, _) = trained("ended", 40, step - 1, AtNonFinite::Stop).unwrap();
    assert_eq!((report.generation, kept(&folder.path().join("ended"))), (step - 1, states[0].clone()));
    let (report, _) = trained("ended", 40, STEPS, AtNonFinite::Skip).unwrap();
    assert_eq!(report.losses_xxh3, whole.losses_xxh3);
}

/// Bytes of pages, by what they hold: of the tensors of a captured run, and of these those that were used.
fn captured(path: &Path) -> HashMap<String, [u64; 2]> {
    let mut reader = CaptureReader::new(BufReader::new(File::open(path).unwrap()), "capture").unwrap();
    let header = reader.header().clone();
    let mut used = HashSet::new();
    while let Some(step) = reader.step().unwrap() {
        if let CaptureStep::Use { page, .. } = step {
            used.insert(page);
        }
    }
    let (mut bytes, mut first) = (HashMap::<String, [u64; 2]>::new(), 0);
    // Pages are numbered through all segments.
    for segment in header.segments {
        let pages = first..first + u64::from(segment.pages);
        first = pages.end;
        let of = bytes.entry(segment.classes[0].class.clone()).or_default();
        of[0] += u64::from(segment.pages) * header.page_size.bytes();
        of[1] += used.iter().filter(|page| pages.contains(page)).count() as u64 * header.page_size.bytes();
    }
    bytes
}

/// `outcore plan MODEL --train --checkpoint layers` beside the pages that a training has used: within a tenth, which
/// is the rest of last pages and the losses.
#[test]
fn a_plan_says_what_pages_a_training_uses() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, text) = (folder.path().join("model.gguf"), folder.path().join("text"));
    std::fs::write(&text, "the pages of a layer come up once forward and once back\n".repeat(40)).unwrap();
    // The output matrix has gradients in all rows.
    Spec { tied: true, ..small() }.write_gguf(&path).unwrap();
    let shape = planning::Shape::of(&outcore::format::open(&path).unwrap(), None).unwrap();
    for (name, mixed, optimizer) in [("f32", false, Optimizer::Adam), ("mixed", true, Optimizer::AdamMixed)] {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let settings = Settings { mixed, ..settings(&checkpoint) };
        let capture = folder.path().join(format!("{name}.capture"));
        let limits = Limits { capture: Some(capture.clone()), ..limits(folder.path().join(name), 4096, 2) };
        run(&text, Some(checkpoint), &settings, &limits, &AtomicBool::new(false), |_| {}, |_| {}).unwrap();
        let train = planning::Work::Train { optimizer, checkpointing: Checkpointing::Layers };
        let (context, batch) = (settings.window as u64, settings.batch as u64);
        let job = planning::Job { shape: shape.clone(), work: train, context, batch, headroom_percent: 0 };
        let planned = job.memory(false).unwrap();
        // What computing takes is in no page.
        let computing = train::memory::bytes(train::memory::work(&settings.shape, settings.window, 1).computing());
        let vectors = planned.activations.get() - computing.get();
        let found = captured(&capture);
        let of = |classes: &[&str], which: usize| -> u64 { classes.iter().map(|class| found[*class][which]).sum() };
        let expected = if mixed {
            // What is kept of parameters in f32 is the optimizer's there.
            [(&["working copy"][..], planned.weights.get()), (&["parameters", "states"], planned.optimizer.get())]
        } else {
            [(&["parameters"][..], planned.weights.get()), (&["states"], planned.optimizer.get())]
        };
        let beside = [(&["gradients"][..], planned.gradients.get()), (&["activations"], vectors)];
        for (classes, planned) in expected.into_iter().chain(beside) {
            for (which, bytes) in ["they have", "were used"].into_iter().zip([of(classes, 0), of(classes, 1)]) {
                let off = bytes as f64 / planned as f64 - 1.0;
                assert!(off.abs() < 0.1, "{name}: {planned} bytes of {classes:?} are planned, and {bytes} {which}");
            }
        }
    }
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
    refused("phi3", &Spec::small(Arch::Phi3, WeightType::F32), "phi3");
    refused("glm4moe", &Spec::small(Arch::Glm4Moe, WeightType::F32), "glm4moe");
    refused("experts", &Spec { experts: Some(Experts { count: 4, used: 2, fused: false }), ..small() }, "experts");
    refused("wide", &Spec { head_dim: 32, ..small() }, "wider");
    let missing = Checkpoint::open(&folder.path().join("nowhere")).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound, "{missing}");
}
