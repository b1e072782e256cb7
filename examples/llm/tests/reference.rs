//! Small models that transformers has written, beside its logits and those of llama.cpp: `tests/reference/README.md`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use outcore::{Bytes, PageSize, PolicyKind, Runtime};
use outcore_lab::planning::Shape;
use outcore_llm::budget::Working;
use outcore_llm::kernels::Level;
use outcore_llm::synthetic::{ARCHS, Spec};
use outcore_llm::{
    Arch, Config, KvType, Logits, Model, ModelFiles, Options, PagedWeights, Part, Passes, PlainWeights, Session,
    WeightType, Weights, pass_bytes,
};
use outcore_testkit::harness::Rng;
use serde_json::{Value, json};

/// Of the largest logit: both engines compute in f32 too.
const TOLERANCE: f32 = 1e-4;
/// Of llama.cpp's logits of a Gemma, whose activation it takes from a table of 16-bit numbers.
const TOLERANCE_OF_TABLE: f32 = 1e-3;
/// Of the logits of transformers with experts' inputs rounded as here, at three positions of 96; at the others it is
/// [`TOLERANCE`]. Of two numbers that hardly differ one is rounded up and the other down at times.
const TOLERANCE_OF_ROUNDED: f32 = 0.02;
/// Of those of llama.cpp for weights in MXFP4 and BF16, at nine positions of ten: it rounds the inputs of both, and the
/// vector of a position may then draw another expert.
const TOLERANCE_OF_LLAMA_CPP_ROUNDED: f32 = 0.04;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference").join(name)
}

/// The numbers, of four bytes each, of a tensor in a model's `logits.safetensors`. `None` if there is none.
fn numbers<T>(model: &str, name: &str, read: impl Fn([u8; 4]) -> T) -> Option<Vec<T>> {
    numbers_of(&folder(model).join("logits.safetensors"), name, read)
}

fn numbers_of<T>(path: &Path, name: &str, read: impl Fn([u8; 4]) -> T) -> Option<Vec<T>> {
    let header = outcore::format::open(path).unwrap();
    let tensor = header.tensors.iter().find(|tensor| tensor.name == name)?;
    let bytes = std::fs::read(path).unwrap();
    let bytes = &bytes[tensor.offset as usize..(tensor.offset + tensor.len) as usize];
    Some(bytes.chunks_exact(4).map(|bytes| read(bytes.try_into().unwrap())).collect())
}

fn load(path: &Path) -> Arc<Model> {
    let files = ModelFiles::open(path).unwrap();
    let weights = Arc::new(PlainWeights::read(&files).unwrap().with_tile_bytes(5000));
    Arc::new(Model::load(&files, weights, Options { threads: 2, ..Options::default() }).unwrap())
}

/// Compares the logits at all positions, read in passes of each of these lengths.
fn compare(model: &str, path: &Path, passes: &[usize]) {
    compare_within(model, path, passes, TOLERANCE);
}

fn compare_within(model: &str, path: &Path, passes: &[usize], tolerance: f32) {
    let files = ModelFiles::open(path).unwrap();
    let weights = Arc::new(PlainWeights::read(&files).unwrap().with_tile_bytes(5000));
    compare_on(weights, &files, (model, path), passes, tolerance);
}

fn compare_on(
    weights: Arc<dyn Weights>,
    files: &ModelFiles,
    (model, path): (&str, &Path),
    passes: &[usize],
    tolerance: f32,
) {
    let tokens = numbers(model, "tokens", u32::from_le_bytes).unwrap();
    let logits_of = |engine: &'static str| Some((engine, numbers(model, engine, f32::from_le_bytes)?));
    let engines: Vec<_> = ["transformers", "llama_cpp"].into_iter().filter_map(logits_of).collect();
    assert!(!engines.is_empty());
    assert!(tokens.len() >= 64);
    let loaded = Arc::new(Model::load(files, weights, Options { threads: 2, ..Options::default() }).unwrap());
    for pass in passes {
        let mut session = Session::new(loaded.clone(), tokens.len(), KvType::F32).unwrap();
        let found: Vec<f32> = tokens.chunks(*pass).flat_map(|tokens| session.forward_all(tokens).unwrap()).collect();
        for (engine, expected) in &engines {
            assert_eq!(found.len(), expected.len());
            let largest = expected.iter().fold(0f32, |most, logit| most.max(logit.abs()));
            let worst = found.iter().zip(expected).fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest;
            let is_of_table = model.starts_with("gemma") && *engine == "llama_cpp";
            let most = if is_of_table { TOLERANCE_OF_TABLE } else { tolerance };
            assert!(worst <= most, "{}: {worst} from {engine}, in passes of {pass}", path.display());
        }
    }
}

#[test]
fn qwen3_moe_has_the_logits_of_its_engines() {
    for (model, file) in [
        ("qwen3moe", ""),
        ("qwen3moe", "fused"),
        ("qwen3moe", "model.gguf"),
        ("qwen3moe-unscaled", ""),
        ("qwen3moe-dense-layers", ""),
    ] {
        compare(model, &folder(model).join(file), &[1, 7, 96]);
    }
}

#[test]
fn qwen2_moe_has_the_logits_of_its_engines() {
    for file in ["", "model.gguf"] {
        compare("qwen2moe", &folder("qwen2moe").join(file), &[1, 96]);
    }
}

#[test]
fn olmoe_has_the_logits_of_its_engines() {
    for file in ["", "model.gguf"] {
        compare("olmoe", &folder("olmoe").join(file), &[1, 96]);
    }
}

#[test]
fn mixtral_has_the_logits_of_its_engines() {
    for file in ["", "model.gguf"] {
        compare("mixtral", &folder("mixtral").join(file), &[1, 96]);
    }
}

#[test]
fn weights_of_fp8_with_scales_of_blocks_have_the_logits_of_transformers() {
    let (name, path, passes) = ("qwen3moe-fp8", folder("qwen3moe-fp8"), [1, 7, 96]);
    // In tiles, where each expert is multiplied by itself; whole, where those of a pass are multiplied together.
    compare(name, &path, &passes);
    let files = ModelFiles::open(&path).unwrap();
    let whole = Arc::new(PlainWeights::read(&files).unwrap());
    compare_on(whole, &files, (name, &path), &passes, TOLERANCE);
    let page = PageSize::new(Bytes::kib(16)).unwrap();
    for frames in [12, 100] {
        let budget = Bytes::new(frames * page.bytes());
        let builder = Runtime::builder().page_size(page).device_budget(budget).policy(PolicyKind::Model);
        let runtime = builder.open().unwrap();
        let opened = runtime.open_parsed(files.header().clone()).unwrap();
        let weights = Arc::new(PagedWeights::open(&runtime, &opened, &files).unwrap());
        compare_on(weights, &files, (name, &path), &passes, TOLERANCE);
        drop(opened);
        runtime.close().unwrap();
    }
}

/// The value of a number of E4M3 that is neither subnormal nor none.
fn e4m3(byte: u8) -> f32 {
    let [sign, exponent, rest] = [byte >> 7, byte >> 3 & 15, byte & 7].map(f32::from);
    (1.0 - 2.0 * sign) * (exponent - 7.0).exp2() * (1.0 + rest / 8.0)
}

/// Writes a Phi-3 whose joined matrices have random numbers of FP8, with a scale for each block of so many rows and
/// columns; or the same values in F32.
fn write_phi(at: &Path, [rows_of, cols_of]: [usize; 2], in_fp8: bool) {
    let from = folder("phi-short");
    let mut config: Value = serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..end]).unwrap();
    let (mut all, mut data) = (serde_json::Map::new(), Vec::new());
    let mut put = |name: &str, dtype: &str, shape: Value, bytes: &[u8]| {
        let offsets = [data.len(), data.len() + bytes.len()];
        data.extend_from_slice(bytes);
        all.insert(name.into(), json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
    };
    let mut rng = Rng::new(5);
    for (name, tensor) in header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__") {
        if !["qkv_proj.weight", "gate_up_proj.weight"].iter().any(|end| name.ends_with(end)) {
            let [first, last] = [0, 1].map(|nth| end + tensor["data_offsets"][nth].as_u64().unwrap() as usize);
            put(name, tensor["dtype"].as_str().unwrap(), tensor["shape"].clone(), &bytes[first..last]);
            continue;
        }
        let [rows, cols] = [0, 1].map(|nth| tensor["shape"][nth].as_u64().unwrap() as usize);
        let numbers: Vec<u8> = (0..rows * cols).map(|_| ((rng.below(2) << 7) | (32 + rng.below(32))) as u8).collect();
        let (down, across) = (rows.div_ceil(rows_of), cols.div_ceil(cols_of));
        let scales: Vec<f32> = (0..down * across).map(|_| 0.01 + rng.below(100) as f32 / 1000.0).collect();
        if in_fp8 {
            put(name, "F8_E4M3", json!([rows, cols]), &numbers);
            let scales: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            put(&format!("{name}_scale_inv"), "F32", json!([down, across]), &scales);
        } else {
            let scale = |at: usize| scales[at / cols / rows_of * across + at % cols / cols_of];
            let values = numbers.iter().enumerate().map(|(at, number)| e4m3(*number) * scale(at));
            put(name, "F32", json!([rows, cols]), &values.flat_map(f32::to_le_bytes).collect::<Vec<_>>());
        }
    }
    if in_fp8 {
        config["quantization_config"] = json!({
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [rows_of, cols_of],
        });
    }
    let text = Value::Object(all).to_string();
    let text = format!("{text:width$}", width = text.len().next_multiple_of(8));
    let whole = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &data].concat();
    std::fs::write(at.join("model.safetensors"), whole).unwrap();
    std::fs::write(at.join("config.json"), config.to_string()).unwrap();
}

/// Queries, keys and values lie in one matrix, and blocks of scales go from one into the next; so do gate and up.
#[test]
fn joined_matrices_of_fp8_have_the_scales_of_their_own_rows() {
    let tokens: Vec<u32> = (0..40).map(|n| n * 7 % 250).collect();
    let logits = |files: &ModelFiles, weights: Arc<dyn Weights>, pass: usize| -> Vec<f32> {
        let model = Model::load(files, weights, Options { threads: 2, ..Options::default() }).unwrap();
        let mut session = Session::new(Arc::new(model), 64, KvType::F32).unwrap();
        tokens.chunks(pass).flat_map(|tokens| session.forward_all(tokens).unwrap()).collect()
    };
    for block in [[128, 128], [28, 40], [7, 64], [1, 1]] {
        let folders = [true, false].map(|in_fp8| {
            let folder = tempfile::tempdir().unwrap();
            write_phi(folder.path(), block, in_fp8);
            folder
        });
        let [fp8, plain] = folders.each_ref().map(|folder| ModelFiles::open(folder.path()).unwrap());
        let read = |files: &ModelFiles| PlainWeights::read(files).unwrap();
        let wanted = logits(&plain, Arc::new(read(&plain)), 40);
        let largest = wanted.iter().fold(0f32, |most, logit| most.max(logit.abs()));
        assert!(largest > 0.1 && largest.is_finite(), "{largest}");
        for (tile, pass) in [(u64::MAX, 40), (700, 7), (1, 1)] {
            let found = logits(&fp8, Arc::new(read(&fp8).with_tile_bytes(tile)), pass);
            let worst = found.iter().zip(&wanted).fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest;
            assert!(found.len() == wanted.len() && worst < 1e-5, "{block:?}, tiles of {tile} bytes: {worst}");
        }
    }
}

/// Writes a model anew, with what `change` makes of its configuration and of the header and the bytes of its tensors,
/// and returns why it cannot be loaded.
fn refused_of(from: &Path, change: impl FnOnce(&mut Value, &mut Value, &mut [u8])) -> String {
    let at = tempfile::tempdir().unwrap();
    let mut config = serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    let mut bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header = serde_json::from_slice(&bytes[8..end]).unwrap();
    change(&mut config, &mut header, &mut bytes[end..]);
    let text = header.to_string();
    let whole = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &bytes[end..]].concat();
    std::fs::write(at.path().join("model.safetensors"), whole).unwrap();
    std::fs::write(at.path().join("config.json"), config.to_string()).unwrap();
    let files = match ModelFiles::open(at.path()) {
        Ok(files) => files,
        Err(error) => return error.in_full(),
    };
    let weights = Arc::new(PlainWeights::read(&files).unwrap());
    Model::load(&files, weights, Options { threads: 1, ..Options::default() }).unwrap_err().in_full()
}

#[test]
fn weights_of_fp8_that_are_scaled_otherwise_are_refused_by_name() {
    let refused = |change: &dyn Fn(&mut Value, &mut Value, &mut [u8])| refused_of(&folder("qwen3moe-fp8"), change);
    const MATRIX: &str = "model.layers.1.mlp.experts.2.up_proj.weight";
    let scales = format!("{MATRIX}_scale_inv");
    let of_config =
        |key: &str, value: Value| refused(&|config, _, _| config["quantization_config"][key] = value.clone());
    for (key, value) in [
        ("quant_method", json!("gptq")),
        ("activation_scheme", json!("static")),
        ("weight_block_size", Value::Null),
        ("weight_block_size", json!([128])),
        ("weight_block_size", json!([128, 0])),
        ("fmt", json!("e5m2")),
        ("kv_cache_scheme", json!({ "num_bits": 8 })),
    ] {
        let why = of_config(key, value);
        assert!(why.contains("quantization_config") && why.contains(key), "{why}");
    }
    let why = of_config("weight_block_size", json!([64, 128]));
    assert!(why.contains("_scale_inv") && why.contains("3 x 2"), "{why}");
    let why = refused(&|config, _, _| config["quantization_config"] = Value::Null);
    assert!(why.contains("F8_E4M3") && why.contains("quantization_config"), "{why}");
    // Another name: the one is missing.
    let why = refused(&|_, header, _| {
        let moved = header.as_object_mut().unwrap().remove(&scales).unwrap();
        header["model.other"] = moved;
    });
    assert!(why.contains(&scales), "{why}");
    let why = refused(&|_, header, _| header[&scales]["shape"] = json!([4, 1]));
    assert!(why.contains(&scales) && why.contains("2 x 2"), "{why}");
    for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let why = refused(&|_, header, bytes| {
            let at = header[&scales]["data_offsets"][0].as_u64().unwrap() as usize;
            bytes[at + 8..at + 12].copy_from_slice(&wrong.to_le_bytes());
        });
        assert!(why.contains(&scales) && why.contains("block 1, 0"), "{why}");
    }
    // The embeddings in FP8, in half of their bytes; the others are another tensor's.
    let why = refused(&|_, header, _| {
        let embeddings = &mut header["model.embed_tokens.weight"];
        let [start, end] = [0, 1].map(|nth| embeddings["data_offsets"][nth].as_u64().unwrap());
        let middle = (start + end) / 2;
        embeddings["dtype"] = json!("F8_E4M3");
        embeddings["data_offsets"] = json!([start, middle]);
        let rest = json!({ "dtype": "BF16", "shape": [(end - middle) / 2], "data_offsets": [middle, end] });
        header["model.rest"] = rest;
    });
    assert!(why.contains("embed_tokens") && why.contains("F8_E4M3"), "{why}");
}

#[test]
fn gpt_oss_has_the_logits_of_its_engines() {
    let folder = folder("gpt-oss");
    compare("gpt-oss", &folder.join("model.gguf"), &[1, 7, 96]);
    for file in ["mxfp4.gguf", "mxfp4"] {
        let found = logits_of(&folder.join(file), "gpt-oss");
        let [of_transformers, of_llama_cpp] =
            ["transformers_rounded", "llama_cpp_rounded"].map(|engine| apart("gpt-oss", engine, &found));
        assert!(is_near(&of_transformers), "{file}: {of_transformers:?}");
        assert!(of_llama_cpp[86] <= TOLERANCE_OF_LLAMA_CPP_ROUNDED, "{file}: {of_llama_cpp:?}");
    }
}

/// The logits at all positions of the tokens of a model.
fn logits_of(path: &Path, model: &str) -> Vec<f32> {
    let tokens = numbers(model, "tokens", u32::from_le_bytes).unwrap();
    Session::new(load(path), tokens.len(), KvType::F32).unwrap().forward_all(&tokens).unwrap()
}

/// Whether logits so far [apart] are those of an engine that rounds as this one does.
fn is_near(apart: &[f32]) -> bool {
    apart[92] <= TOLERANCE && apart[95] <= TOLERANCE_OF_ROUNDED
}

/// How far logits are from those of an engine, at each of 96 positions, in parts of the largest logit: ascending.
fn apart(model: &str, engine: &str, found: &[f32]) -> Vec<f32> {
    let expected = numbers(model, engine, f32::from_le_bytes).unwrap();
    assert_eq!((found.len(), expected.len() % 96), (expected.len(), 0));
    let largest = expected.iter().fold(0f32, |most, logit| most.max(logit.abs()));
    let vocab = expected.len() / 96;
    let positions = found.chunks(vocab).zip(expected.chunks(vocab));
    let worst = |(a, b): (&[f32], &[f32])| a.iter().zip(b).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
    let mut apart: Vec<f32> = positions.map(|both| worst(both) / largest).collect();
    apart.sort_unstable_by(f32::total_cmp);
    apart
}

/// Neither the form of a file nor how much of it is held changes a bit.
#[test]
fn gpt_oss_in_mxfp4_has_the_bits_of_its_gguf() {
    let tokens = numbers("gpt-oss", "tokens", u32::from_le_bytes).unwrap();
    let logits = |files: &ModelFiles, weights: Arc<dyn Weights>, pass: usize, level: Option<Level>| -> Vec<f32> {
        let model = Arc::new(Model::load(files, weights, Options { threads: 2, level }).unwrap());
        let mut session = Session::new(model, tokens.len(), KvType::F32).unwrap();
        tokens.chunks(pass).flat_map(|tokens| session.forward_all(tokens).unwrap()).collect()
    };
    let of_gguf = ModelFiles::open(folder("gpt-oss").join("mxfp4.gguf")).unwrap();
    let files = ModelFiles::open(folder("gpt-oss").join("mxfp4")).unwrap();
    // Routers, norms, biases and sinks have four bytes an element there, in place of two.
    let shorter = 2 * (512 + 8 + 2 * 64 + 320 + 4 + 3 * 128) + 64;
    assert_eq!(pass_bytes(&files).unwrap() + 2 * shorter, pass_bytes(&of_gguf).unwrap());
    // Beside pages, the scales of a matrix are copied, and each thread has rows in another form.
    let working = |files| Working::of(&Config::new(files).unwrap(), 96, 96, KvType::F32, 96, 2).fixed.get();
    assert_eq!(working(&files) - working(&of_gguf), 64 * 2 + 2 * (64 << 10));
    for level in [Level::Scalar, Level::Avx2, Level::Avx512] {
        let whole = |files: &ModelFiles| Arc::new(PlainWeights::read(files).unwrap());
        let expected = logits(&of_gguf, whole(&of_gguf), 96, Some(level));
        for pass in [1, 7, 96] {
            assert!(logits(&files, whole(&files), pass, Some(level)) == expected, "{level:?}, in passes of {pass}");
            // In tiles of rows, where each expert is multiplied by itself.
            for tile in [1, 300, 5000] {
                let tiled = Arc::new(PlainWeights::read(&files).unwrap().with_tile_bytes(tile));
                assert!(logits(&files, tiled, pass, Some(level)) == expected, "{level:?}, {pass}, tiles of {tile}");
            }
        }
    }
    let expected = logits(&of_gguf, Arc::new(PlainWeights::read(&of_gguf).unwrap()), 96, None);
    // So many vectors that each expert has work for all threads at each of its steps.
    let model = Model::load(&files, Arc::new(PlainWeights::read(&files).unwrap()), Options::default()).unwrap();
    let model = Arc::new(model);
    let begin = |_| Session::new(model.clone(), tokens.len(), KvType::F32).unwrap();
    let mut sessions: Vec<Session> = (0..16).map(begin).collect();
    let part = |session| Part { session, tokens: &tokens, logits: Logits::All, sampler: None };
    let mut parts: Vec<_> = sessions.iter_mut().map(part).collect();
    let (outputs, _) = model.pass(&mut parts).unwrap();
    assert!(outputs.iter().all(|output| output.logits == expected));
    let page = PageSize::new(Bytes::kib(16)).unwrap();
    for frames in [8, 100] {
        let budget = Bytes::new(frames * page.bytes());
        let builder = Runtime::builder().page_size(page).device_budget(budget).policy(PolicyKind::Model);
        let runtime = builder.open().unwrap();
        let opened = runtime.open_parsed(files.header().clone()).unwrap();
        for pass in [1, 7, 96] {
            let weights = Arc::new(PagedWeights::open(&runtime, &opened, &files).unwrap());
            assert!(logits(&files, weights, pass, None) == expected, "{frames} frames, in passes of {pass}");
        }
        drop(opened);
        runtime.close().unwrap();
    }
}

/// Its configuration is the one that gpt-oss is published with: bounds of YaRN are not rounded. Those of the other are,
/// and each is far from what it would be with the other's.
#[test]
fn gpt_oss_as_published_has_the_logits_of_transformers() {
    let found = logits_of(&folder("gpt-oss-untruncated"), "gpt-oss-untruncated");
    let of_transformers = apart("gpt-oss-untruncated", "transformers_rounded", &found);
    assert!(is_near(&of_transformers), "{of_transformers:?}");
    for (model, inner) in [("gpt-oss", "mxfp4"), ("gpt-oss-untruncated", "")] {
        let (from, at) = (folder(model).join(inner), tempfile::tempdir().unwrap());
        std::fs::copy(from.join("model.safetensors"), at.path().join("model.safetensors")).unwrap();
        let mut config: Value = serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
        let truncate = config["rope_scaling"]["truncate"].as_bool().unwrap();
        config["rope_scaling"]["truncate"] = json!(!truncate);
        std::fs::write(at.path().join("config.json"), config.to_string()).unwrap();
        // At every position but the first few, which hardly turn.
        let far = apart(model, "transformers_rounded", &logits_of(at.path(), model));
        assert!(far[5] > 50.0 * TOLERANCE && far[48] > 5.0 * TOLERANCE_OF_ROUNDED, "{model}: {far:?}");
    }
}

#[test]
fn experts_of_gpt_oss_in_another_form_are_refused_by_name() {
    const STEM: &str = "model.layers.1.mlp.experts.gate_up_proj";
    let [blocks, scales] = ["blocks", "scales"].map(|part| format!("{STEM}_{part}"));
    let refused = |change: &dyn Fn(&mut Value, &mut Value)| {
        refused_of(&folder("gpt-oss").join("mxfp4"), |config, header, _| change(config, header))
    };
    for name in [&blocks, &scales, &format!("{STEM}_bias")] {
        let why = refused(&|_, header| {
            let moved = header.as_object_mut().unwrap().remove(name).unwrap();
            // A type that is known: a tensor that is not used comes after one that is missing.
            let bytes = moved["data_offsets"].clone();
            let len = bytes[1].as_u64().unwrap() - bytes[0].as_u64().unwrap();
            header["model.other"] = json!({ "dtype": "F8_E4M3", "shape": [len], "data_offsets": bytes });
        });
        assert!(why.contains(name), "{why}");
    }
    // 8 experts of 64 rows and 2 blocks.
    for (name, shape, wanted) in [
        (&scales, json!([8, 32, 4]), "512 x 2"),
        (&scales, json!([8, 128]), "512 x 2"),
        (&blocks, json!([8, 32, 4, 16]), "512 x 64"),
        (&blocks, json!([8, 128, 1, 16]), "512 x 64"),
    ] {
        let why = refused(&|_, header| header[name]["shape"] = shape.clone());
        assert!(why.contains(name) && why.contains(wanted), "{why}");
    }
    // Bytes that are no blocks of 16.
    let why = refused(&|_, header| header[&blocks]["shape"] = json!([8, 64, 1, 32]));
    assert!(why.contains(&blocks) && why.contains("U8"), "{why}");
    let why = refused(&|_, header| {
        header[&scales]["dtype"] = json!("F8_E4M3");
    });
    assert!(why.contains(&scales) && why.contains("F8_E4M3"), "{why}");
    // As transformers writes what it has made of it.
    let why = refused(&|_, header| {
        let both = [&blocks, &scales].map(|name| header.as_object_mut().unwrap().remove(name).unwrap());
        for (nth, mut moved) in both.into_iter().enumerate() {
            moved["dtype"] = json!("F8_E4M3");
            header[["model.other", STEM][nth]] = moved;
        }
    });
    assert!(why.contains(STEM) && why.contains("GGUF"), "{why}");
    let why = refused(&|config, _| config["quantization_config"]["quant_method"] = json!("awq"));
    assert!(why.contains("quant_method") && why.contains("mxfp4"), "{why}");
    let why = refused(&|config, _| config["rope_scaling"] = Value::Null);
    assert!(why.contains("rope_scaling"), "{why}");
    let why = refused(&|config, _| config["rope_scaling"]["truncate"] = json!("often"));
    assert!(why.contains("truncate"), "{why}");
    // The same bytes as two numbers of four bytes, for four heads.
    const SINKS: &str = "model.layers.1.self_attn.sinks";
    let why = refused(&|_, header| {
        (header[SINKS]["dtype"], header[SINKS]["shape"]) = (json!("F32"), json!([2]));
    });
    assert!(why.contains(SINKS) && why.contains("1 x 2") && why.contains("1 x 4"), "{why}");
    // Twice as many experts, in the biases alone.
    let name = format!("{STEM}_bias");
    let why = refused(&|_, header| header[&name]["shape"] = json!([16, 32]));
    assert!(why.contains(&name) && why.contains("16 x 32") && why.contains("8 x 64"), "{why}");
}

#[test]
fn gemma_has_the_logits_of_its_engines() {
    for model in ["gemma2", "gemma3"] {
        for file in ["", "model.gguf"] {
            compare(model, &folder(model).join(file), &[1, 7, 96]);
        }
    }
}

#[test]
fn a_window_in_all_layers_has_the_logits_of_transformers() {
    for model in ["mistral-window", "phi-window"] {
        compare(model, &folder(model), &[1, 7, 96]);
    }
}

/// The tokens are more than the original context of one, and fewer than that of the other.
#[test]
fn phi_has_the_logits_of_its_engines() {
    for model in ["phi-long", "phi-short"] {
        for file in ["", "model.gguf"] {
            compare(model, &folder(model).join(file), &[1, 7, 96]);
        }
    }
}

/// One has a layer behind the others, which predicts further tokens; the other has weights of experts that do not sum
/// up to one, and neither biases nor norms of heads.
#[test]
fn glm_has_the_logits_of_its_engines() {
    for (model, file) in [
        ("glm4moe", ""),
        ("glm4moe", "fused"),
        ("glm4moe", "model.gguf"),
        ("glm4moe-unscaled", ""),
        ("glm4moe-unscaled", "model.gguf"),
    ] {
        compare(model, &folder(model).join(file), &[1, 7, 96]);
    }
}

/// What `outcore plan` counts for a pass of one token is what a pass uses, but for the row of the embedding, and for
/// what is held beside the pages.
#[test]
fn plans_count_what_a_pass_uses() {
    let all = [
        ("qwen3moe", &["", "fused", "model.gguf"][..]),
        ("qwen3moe-dense-layers", &[""]),
        ("qwen3moe-fp8", &[""]),
        ("qwen2moe", &["", "model.gguf"]),
        ("olmoe", &["", "model.gguf"]),
        ("mixtral", &["", "model.gguf"]),
        ("gpt-oss", &["model.gguf", "mxfp4.gguf", "mxfp4"]),
        ("gpt-oss-untruncated", &[""]),
        ("gemma2", &["", "model.gguf"]),
        ("gemma3", &["", "model.gguf"]),
        ("mistral-window", &[""]),
        ("phi-long", &["", "model.gguf"]),
        ("phi-window", &[""]),
        ("glm4moe", &["", "fused", "model.gguf"]),
        ("glm4moe-unscaled", &["", "model.gguf"]),
    ];
    let mut paths: Vec<PathBuf> =
        all.iter().flat_map(|(name, files)| files.iter().map(|file| folder(name).join(file))).collect();
    let made = tempfile::tempdir().unwrap();
    for arch in ARCHS {
        let path = made.path().join(format!("{arch:?}.gguf"));
        Spec { tied: arch == Arch::Qwen2, ..Spec::small(arch, WeightType::Q8_0) }.write_gguf(&path).unwrap();
        paths.push(path);
    }
    let config = |path: &Path| std::fs::read_to_string(path.join("config.json")).ok();
    for path in paths {
        let files = ModelFiles::open(&path).unwrap();
        let shape = Shape::of(files.header(), config(&path).as_deref()).unwrap();
        let (row, mut held) = (embedding_row(&files), 0);
        for tensor in files.tensors() {
            let is_held = tensor.name.starts_with("rope_f") || tensor.name.ends_with("_scale_inv");
            let bytes = if is_held { tensor.rows * tensor.row_bytes } else { 0 };
            // Scales count as the experts do that they are of.
            let experts = shape.experts.filter(|_| outcore::format::expert(&tensor.name).is_some());
            held += experts.map_or(bytes, |experts| bytes * experts.active / experts.count);
        }
        let wanted = outcore_llm::pass_bytes(&files).unwrap() - row + held;
        assert_eq!(shape.used_by(1).round() as u64, wanted, "{}", path.display());
        assert_eq!(shape.layers as usize, Config::new(&files).unwrap().layers, "{}", path.display());
    }
}

/// Bytes of a row of the embedding.
fn embedding_row(files: &ModelFiles) -> u64 {
    let names = ["token_embd.weight", "model.embed_tokens.weight"];
    names.iter().find_map(|name| files.tensor(name)).unwrap().row_bytes
}

/// A session takes the factors for long sequences if it has room for one, whoever shares its passes.
#[test]
fn the_room_of_a_session_chooses_its_rotary_factors() {
    let model = load(&folder("phi-long").join("model.gguf"));
    let tokens: Vec<u32> = (0..60).map(|n| n * 7 % 250).collect();
    let session = |capacity| Session::new(model.clone(), capacity, KvType::F32).unwrap();
    let [short, still_short, long, longer] = [60, 64, 65, 4096].map(|room| session(room).forward_all(&tokens).unwrap());
    assert!(short == still_short && long == longer);
    assert_ne!(short, long);
    let mut both = [session(64), session(65)];
    let part = |session| Part { session, tokens: &tokens, logits: Logits::All, sampler: None };
    let mut parts: Vec<Part<'_, Session>> = both.iter_mut().map(part).collect();
    let (together, _) = model.pass(&mut parts).unwrap();
    assert!(together.iter().map(|output| &output.logits).eq([&short, &long]));
}

/// Hidden states, read beside sessions that want logits or nothing, which get the bits that they get alone.
#[test]
fn hidden_states_are_those_of_transformers_in_any_company() {
    let tokens = numbers("qwen3moe", "tokens", u32::from_le_bytes).unwrap();
    let path = folder("qwen3moe").join("hidden.safetensors");
    let expected = numbers_of(&path, "hidden", f32::from_le_bytes).unwrap();
    let largest = expected.iter().fold(0f32, |most, number| most.max(number.abs()));
    for file in ["", "model.gguf"] {
        let model = load(&folder("qwen3moe").join(file));
        let (dim, vocab) = (model.config().dim, model.config().vocab);
        assert_eq!(expected.len(), tokens.len() * dim);
        let session = || Session::new(model.clone(), tokens.len(), KvType::F32).unwrap();
        let logits = session().forward_all(&tokens).unwrap();
        for pass in [1, 7, 96] {
            let wants = [Logits::HiddenAll, Logits::All, Logits::HiddenLast, Logits::None, Logits::Last];
            let mut sessions = wants.map(|_| session());
            let mut found: Vec<f32> = Vec::new();
            let mut end = 0;
            for tokens in tokens.chunks(pass) {
                let first = end;
                end += tokens.len();
                let parts = sessions.iter_mut().zip(wants);
                let mut parts: Vec<_> =
                    parts.map(|(session, logits)| Part { session, tokens, logits, sampler: None }).collect();
                let (given, _) = model.pass(&mut parts).unwrap();
                let given: Vec<_> = given.iter().map(|output| &output.logits).collect();
                let [hidden, all, last, none, of_last] = given[..] else { panic!("{} parts", given.len()) };
                assert!(all == &logits[first * vocab..end * vocab] && none.is_empty(), "{file}, in passes of {pass}");
                assert!(*of_last == logits[(end - 1) * vocab..end * vocab], "{file}, in passes of {pass}");
                assert!(hidden.len() == tokens.len() * dim && hidden.ends_with(last) && last.len() == dim);
                found.extend(hidden);
            }
            let worst = found.iter().zip(&expected).fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest;
            assert!(worst <= TOLERANCE, "{file}: {worst}, in passes of {pass}");
            // Alone, where nobody wants logits.
            let mut alone = session();
            let mut part = [Part { session: &mut alone, tokens: &tokens, logits: Logits::HiddenAll, sampler: None }];
            assert!(model.pass(&mut part).unwrap().0[0].logits == found, "{file}");
        }
    }
}
