//! The program `generate`, as users and scripts meet it: what it prints, what it refuses, and that nothing but the
//! weights decides its words.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::sync::LazyLock;

use outcore::PolicyKind;
use outcore_lab::sim::{CaptureReader, CaptureStep, Trace, TraceOptions};
use outcore_llm::synthetic::{Experts, Spec};
use outcore_llm::{Arch, ModelFiles, WeightType};
use serde_json::Value;
use tempfile::TempDir;

mod drafts;
mod hub;

const GENERATE: &str = env!("CARGO_BIN_EXE_generate");
const MIB: u64 = 1 << 20;

/// Models that many tests share.
struct Models {
    folder: TempDir,
    /// A GGUF file of less than a megabyte, with tokenizer and chat template.
    small: PathBuf,
    /// A folder of about 40 MB in three shards, without a tokenizer: nothing ends its text early.
    large: PathBuf,
}

static MODELS: LazyLock<Models> = LazyLock::new(|| {
    // On a disk, not in a memory file system: the way to the disk is what is tested.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (small, large) = (folder.path().join("small.gguf"), folder.path().join("large"));
    spec().write_gguf(&small).unwrap();
    let dims =
        Spec { dim: 512, ffn_dim: 1408, layers: 8, dtype: WeightType::BF16, vocab: 2000, context: 65536, ..spec() };
    dims.write_safetensors(&large, 3).unwrap();
    Models { folder, small, large }
});

fn spec() -> Spec {
    Spec {
        arch: Arch::Llama,
        dtype: WeightType::Q8_0,
        layers: 2,
        dim: 128,
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        ffn_dim: 256,
        vocab: 300,
        context: 64,
        tied: true,
        seed: 7,
        experts: None,
        window: 20,
    }
}

/// The fetched model. Some tests know its size and its words.
fn real_model() -> Option<PathBuf> {
    there(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/SmolLM2-135M-Instruct.Q4_1.gguf"))
}

/// The fetched model, or the one that the environment names.
fn any_real_model() -> Option<PathBuf> {
    std::env::var_os("OUTCORE_MODEL").map_or_else(real_model, |path| there(PathBuf::from(path)))
}

fn there(path: PathBuf) -> Option<PathBuf> {
    if path.exists() {
        return Some(path);
    }
    eprintln!("SKIPPED: {} is absent; scripts/fetch_model.sh gets the usual one", path.display());
    None
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(GENERATE);
    command.args(args).stdin(Stdio::null()).env_remove("RUST_LOG");
    // Tests must not depend on what the user's programs remember of disks.
    command.env("XDG_CACHE_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"));
    command
}

fn generate(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

/// Standard output of a run that must succeed.
fn stdout_of(output: &Output) -> &str {
    let (out, err) = (std::str::from_utf8(&output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {err}", output.status);
    out
}

fn last_line(out: &str) -> Value {
    serde_json::from_str(out.lines().last().unwrap()).unwrap()
}

/// The JSON line of a run that must succeed.
fn json_of(args: &[&str]) -> Value {
    let mut all = args.to_vec();
    all.push("--json");
    let run = last_line(stdout_of(&generate(&all)));
    assert!(run["peak_device_bytes"].as_u64().unwrap() <= run["device_budget_bytes"].as_u64().unwrap(), "{run}");
    assert!(run["peak_host_bytes"].as_u64().unwrap() <= run["host_budget_bytes"].as_u64().unwrap(), "{run}");
    run
}

/// What must not depend on where the weights are.
fn words(run: &Value) -> [&Value; 4] {
    ["prompt_tokens", "tokens", "text", "logits_xxh3"].map(|key| run.get(key).unwrap())
}

/// Runs `base` with each of `settings`, the first being the one the others are compared with.
fn same_words(base: &[&str], settings: &[String]) {
    let mut first: Option<Value> = None;
    for setting in settings {
        let mut args = base.to_vec();
        args.extend(setting.split_whitespace());
        let run = json_of(&args);
        let first = first.get_or_insert_with(|| run.clone());
        assert_eq!(words(first), words(&run), "{setting}");
    }
}

fn files_len(path: &Path) -> u64 {
    if path.is_file() {
        return path.metadata().unwrap().len();
    }
    std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
}

const REAL: [&str; 4] = ["--prompt", "Explain virtual memory.", "--tokens", "6"];
const LARGE: [&str; 4] = ["--prompt-tokens", "5,17,300,1999,5", "--tokens", "6"];

/// Settings that cover each value of each option, and the pairs that share code.
fn some_settings(len: u64, resident: u64) -> Vec<String> {
    let part = |percent: u64| len * percent / 100;
    vec![
        format!("--device-budget {resident}"),
        format!("--device-budget {} --policy plan --page-size 2MiB", part(75)),
        format!("--device-budget {} --policy lru --page-size 64KiB --io threads", part(75)),
        format!("--device-budget {} --policy lru --page-size 256KiB --prefetch off --threads 1", part(50)),
        format!("--device-budget {} --policy plan --page-size 1MiB --io buffered --threads 2", part(50)),
        format!("--device-budget {} --policy plan --page-size 64KiB --host-budget 16MiB", part(25)),
        format!("--device-budget {} --policy lru --page-size 512KiB --host-budget 24MiB --io threads", part(25)),
        format!("--device-budget {} --policy plan --page-size 128KiB --io auto --verify always", part(10)),
        format!("--device-budget {} --policy lru --page-size 64KiB --io buffered --prefetch 1MiB", part(10)),
        format!("--device-budget {} --policy lru --page-size 4MiB --host-budget 16MiB", 32 * MIB),
        format!("--device-budget {} --policy plan --page-size 8MiB", 32 * MIB),
        format!("--device-budget {} --policy plan --page-size 16MiB", 32 * MIB),
    ]
}

/// Every combination of the values.
fn all_settings(len: u64, resident: u64) -> Vec<String> {
    let mut all = vec![format!("--device-budget {resident}")];
    for percent in [75, 50, 25, 10] {
        let budget = len * percent / 100;
        let pages = [64 << 10, 256 << 10, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB];
        for page in pages.into_iter().filter(|page| budget >= 2 * page) {
            for policy in PolicyKind::ALL {
                let ways = [
                    ("auto", 0, "auto", 1),
                    ("auto", 16, "off", 2),
                    ("threads", 0, "off", 1),
                    ("buffered", 16, "auto", 2),
                ];
                // If a policy fills nothing ahead by itself, half of the ways are the same.
                let ways = if [PolicyKind::Lru, PolicyKind::Plan].contains(&policy) { &ways[..] } else { &ways[1..3] };
                for (io, host, prefetch, threads) in ways {
                    all.push(format!(
                        "--device-budget {budget} --page-size {page} --policy {policy} --io {io} --host-budget {host}MiB \
                         --prefetch {prefetch} --threads {threads}"
                    ));
                }
            }
        }
    }
    all
}

#[test]
fn the_real_model_says_the_same_in_every_budget() {
    let Some(model) = any_real_model() else { return };
    let base = [&["--model", text(&model)][..], &REAL].concat();
    let len = files_len(&model);
    same_words(&base, &some_settings(len, 2 * len));
}

#[test]
fn a_sharded_model_says_the_same_in_every_budget() {
    let base = [&["--model", text(&MODELS.large)][..], &LARGE].concat();
    same_words(&base, &some_settings(files_len(&MODELS.large), 200 * MIB));
}

fn mixture(arch: Arch) -> Spec {
    Spec { arch, experts: Some(Experts { count: 16, used: 3, fused: false }), ..spec() }
}

#[test]
fn mixtures_say_the_same_in_every_budget() {
    for arch in [Arch::Llama, Arch::Qwen2Moe, Arch::Qwen3Moe, Arch::Olmoe, Arch::GptOss, Arch::Glm4Moe] {
        let path = place(&format!("mixture-{}.gguf", arch.gguf_name()));
        mixture(arch).write_gguf(&path).unwrap();
        let base = ["--model", text(&path), "--prompt", "Explain virtual memory.", "--tokens", "12"];
        let len = files_len(&path);
        // A quarter is fewer frames than a layer has experts.
        let settings = [
            format!("--device-budget {}", 2 * len),
            format!("--device-budget {} --page-size 64KiB", len / 2),
            format!("--device-budget {} --page-size 64KiB --threads 1", len / 4),
            format!("--device-budget {} --page-size 64KiB --policy lru --io threads", len / 4),
            format!("--device-budget {} --page-size 64KiB --policy plan --prefetch off", len / 4),
        ];
        same_words(&base, &settings);
    }
}

#[test]
fn mixtures_that_cannot_be_run_are_refused() {
    let path = place("honest-mixture.gguf");
    mixture(Arch::Qwen3Moe).write_gguf(&path).unwrap();
    let honest = std::fs::read(&path).unwrap();
    let run = |model: &str| generate(&["--model", model, "--prompt", "Hi", "--tokens", "2"]);
    let lies: [(&str, u32, &[&str]); 5] = [
        ("qwen3moe.expert_count", 15, &["ffn_gate_inp.weight", "16", "15", "fetch the model again"]),
        ("qwen3moe.expert_count", 0, &["qwen3moe.expert_count"]),
        ("qwen3moe.expert_used_count", 17, &["qwen3moe.expert_used_count is 17", "16"]),
        ("qwen3moe.expert_used_count", 0, &["qwen3moe.expert_used_count is 0"]),
        ("qwen3moe.expert_feed_forward_length", 255, &["ffn_gate_exps.weight", "4080"]),
    ];
    for (n, (key, value, wanted)) in lies.into_iter().enumerate() {
        let mut lie = honest.clone();
        let at = find(&lie, key.as_bytes(), 0) + key.len() + 4;
        lie[at..at + 4].copy_from_slice(&value.to_le_bytes());
        refused(&run(&file(&format!("mixture-lie-{n}.gguf"), &lie)), wanted);
    }
    // A router of infinite scores: the pass ends, and names it.
    let files = ModelFiles::open(&path).unwrap();
    let router = files.tensor("blk.1.ffn_gate_inp.weight").unwrap();
    let mut broken = honest.clone();
    let at = router.offset as usize;
    broken[at..at + router.row_bytes as usize].copy_from_slice(&f32::NAN.to_le_bytes().repeat(router.cols as usize));
    refused(&run(&file("broken-router.gguf", &broken)), &["blk.1.ffn_gate_inp.weight", "no numbers", "fetch it again"]);
}

#[test]
fn every_policy_says_the_same() {
    let model = &MODELS.large;
    let base = [&["--model", text(model)][..], &LARGE].concat();
    let part = |percent: u64| files_len(model) * percent / 100;
    let settings = PolicyKind::ALL.into_iter().flat_map(|policy| {
        [
            format!("--device-budget {} --policy {policy} --page-size 256KiB", part(25)),
            format!(
                "--device-budget {} --policy {policy} --page-size 1MiB --host-budget 8MiB --prefetch off",
                part(50)
            ),
        ]
    });
    same_words(&base, &settings.collect::<Vec<_>>());
}

#[test]
#[ignore = "some minutes: every setting with every other"]
fn every_setting_says_the_same() {
    if let Some(model) = any_real_model() {
        let base = [&["--model", text(&model)][..], &REAL].concat();
        let len = files_len(&model);
        same_words(&base, &all_settings(len, 2 * len));
    }
    let base = [&["--model", text(&MODELS.large)][..], &LARGE].concat();
    same_words(&base, &all_settings(files_len(&MODELS.large), 200 * MIB));
}

#[test]
fn a_seed_decides_what_chance_does() {
    let small = text(&MODELS.small);
    let run = |seed| {
        let args = ["--model", small, "--prompt", "ab", "--tokens", "12", "--temperature", "1.5", "--seed", seed];
        json_of(&args)["tokens"].clone()
    };
    assert_eq!(run("1"), run("1"));
    assert_ne!(run("1"), run("2"));
}

#[test]
fn the_last_line_holds_what_the_contract_names() {
    let args = ["--model", text(&MODELS.small), "--prompt", "Hello there", "--max-tokens", "5", "--chat"];
    let run = json_of(&args);
    for key in ["model", "device", "policy", "io", "text", "logits_xxh3"] {
        assert!(run[key].is_string(), "{key}: {}", run[key]);
    }
    for key in [
        "page_bytes",
        "device_budget_bytes",
        "host_budget_bytes",
        "disk_read_bytes",
        "disk_written_bytes",
        "link_bytes",
        "peak_device_bytes",
        "peak_host_bytes",
        "peak_rss_bytes",
    ] {
        assert!(run[key].is_u64(), "{key}: {}", run[key]);
    }
    for key in ["ttft_s", "decode_tok_s", "pass_s_median", "compute_s", "stall_s"] {
        assert!(run[key].as_f64().unwrap() >= 0.0, "{key}: {}", run[key]);
    }
    for key in ["hit_ratio", "opt_hit_ratio", "overlap"] {
        assert!((0.0..=1.0).contains(&run[key].as_f64().unwrap()), "{key}: {}", run[key]);
    }
    for key in ["prompt_tokens", "tokens"] {
        assert!(run[key].as_array().unwrap().iter().all(Value::is_u64), "{key}: {}", run[key]);
    }
    assert_eq!(run["interrupted"], false);
    assert_eq!(run["device"], "host");
    let model = files_len(&MODELS.small);
    let memory = &run["memory"];
    let weights: u64 = memory["weights"].as_array().unwrap().iter().map(|class| class["bytes"].as_u64().unwrap()).sum();
    assert!(weights <= model && weights > model / 2, "{run}");
    assert_eq!((model + memory["tail_bytes"].as_u64().unwrap()) % run["page_bytes"].as_u64().unwrap(), 0, "{run}");
    for key in ["keys_values_bytes", "activations_bytes"] {
        assert!(memory[key].as_u64().unwrap() > 0, "{key}: {run}");
    }
    assert!(run["disk_read_bytes"].as_u64().unwrap() >= model / 2, "{run}");

    let output = generate(&args);
    assert_eq!(stdout_of(&output), run["text"].as_str().unwrap());
    let summary = String::from_utf8(output.stderr).unwrap();
    for part in ["tokens", "most in use", "read from disk", "page uses"] {
        assert!(summary.contains(part), "{summary}");
    }
}

#[test]
fn a_control_group_of_130_megabytes_holds_the_real_model() {
    let Some(model) = real_model() else { return };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/cgroup_run.sh");
    let args = ["130MB", GENERATE, "--model", text(&model), "--prompt", "Explain paging.", "--tokens", "4", "--json"];
    let output = Command::new(script).args(args).stdin(Stdio::null()).output().unwrap();
    if output.status.code() == Some(77) {
        eprintln!("SKIPPED: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let run = last_line(stdout_of(&output));
    let report = String::from_utf8(output.stderr).unwrap();
    assert!(report.contains("oom_kills=0"), "{report}");
    assert!(run["peak_rss_bytes"].as_u64().unwrap() < 130_000_000, "{run}");
}

#[test]
fn memory_limits_the_whole_process() {
    let Some(model) = real_model() else { return };
    let run = json_of(&["--model", text(&model), "--prompt", "Explain paging.", "--tokens", "3", "--memory", "120MiB"]);
    assert!(run["peak_rss_bytes"].as_u64().unwrap() <= 120 * MIB, "{run}");
    assert!(run["device_budget_bytes"].as_u64().unwrap() < 100 * MIB, "{run}");
}

/// Ids of a prompt, separated by commas.
fn long_prompt(tokens: u32) -> String {
    let ids: Vec<String> = (0..tokens).map(|n| (n * 7919 % 1999).to_string()).collect();
    ids.join(",")
}

#[test]
fn regression_memory_limits_the_whole_process_when_the_prompt_is_long() {
    let Some(model) = real_model() else { return };
    let prompt = long_prompt(1001);
    for memory in [85, 110] {
        let limit = format!("{memory}MiB");
        let args = ["--model", text(&model), "--prompt-tokens", &prompt, "--tokens", "1", "--memory", &limit];
        let run = json_of(&args);
        assert!(run["peak_rss_bytes"].as_u64().unwrap() <= memory * MIB, "{limit}: {run}");
    }
}

#[test]
fn how_a_prompt_is_cut_into_passes_changes_no_word() {
    let prompt = long_prompt(300);
    let base = ["--model", text(&MODELS.large), "--prompt-tokens", &prompt, "--tokens", "3"];
    // The less memory there is, the less room keys, values and the process leave for activations.
    let settings: Vec<String> = [400, 60, 48].iter().map(|memory| format!("--memory {memory}MiB")).collect();
    same_words(&base, &settings);
}

/// A refusal: exit code 1, nothing on standard output, and one line that says all of `wanted`.
fn refused(output: &Output, wanted: &[&str]) {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert_eq!(out, "", "{err}");
    assert_eq!(err.lines().count(), 1, "{err}");
    assert!(err.starts_with("generate: "), "{err}");
    assert!(!err.contains("panicked"), "{err}");
    for part in wanted {
        assert!(err.contains(part), "{part:?} is not in: {err}");
    }
}

fn place(name: &str) -> PathBuf {
    MODELS.folder.path().join(name)
}

/// Writes `bytes` as a file of its own and returns its path.
fn file(name: &str, bytes: &[u8]) -> String {
    let path = place(name);
    std::fs::write(&path, bytes).unwrap();
    text(&path).to_owned()
}

fn find(bytes: &[u8], what: &[u8], from: usize) -> usize {
    from + bytes[from..].windows(what.len()).position(|window| window == what).unwrap()
}

#[test]
fn models_that_cannot_be_run_are_refused() {
    let whole = std::fs::read(&MODELS.small).unwrap();
    let run = |model: &str| generate(&["--model", model, "--prompt", "Hi", "--tokens", "2"]);

    let gone = place("gone.gguf");
    refused(&run(text(&gone)), &["gone.gguf", "No such file", "check the path"]);
    refused(&run(&file("empty.gguf", b"")), &["empty.gguf", "empty"]);
    let nothing = place("nothing-here");
    std::fs::create_dir(&nothing).unwrap();
    refused(&run(text(&nothing)), &["nothing-here"]);
    refused(&run(&file("words.gguf", b"These are only words, and no model at all.")), &["words.gguf"]);
    refused(&run(&file("cut-header.gguf", &whole[..3000])), &["cut-header.gguf"]);
    refused(&run(&file("cut-data.gguf", &whole[..whole.len() - 4096])), &["cut-data.gguf"]);

    let mut foreign = whole.clone();
    let name = find(&foreign, b"llama", find(&foreign, b"general.architecture", 0));
    foreign[name..name + 5].copy_from_slice(b"mamba");
    refused(&run(&file("foreign.gguf", &foreign)), &["mamba", "supported", "qwen2"]);

    let mut untyped = whole.clone();
    let name = b"output_norm.weight";
    // After the name of a vector come its number of extents, the extent and the type.
    let at = find(&untyped, name, 0) + name.len() + 4 + 8;
    untyped[at..at + 4].copy_from_slice(&99u32.to_le_bytes());
    refused(&run(&file("untyped.gguf", &untyped)), &["untyped.gguf", "output_norm.weight", "99"]);

    let incomplete = place("incomplete");
    spec_of_shards().write_safetensors(&incomplete, 2).unwrap();
    std::fs::remove_file(incomplete.join("model-00002-of-00002.safetensors")).unwrap();
    let ids = ["--model", text(&incomplete), "--prompt-tokens", "1,2", "--tokens", "2"];
    refused(&generate(&ids), &["model-00002-of-00002.safetensors"]);
    std::fs::remove_file(incomplete.join("config.json")).unwrap();
    refused(&generate(&ids), &["incomplete"]);
}

/// The small model with other values for some of its keys. These values are of four bytes.
fn lying(name: &str, lies: &[(&str, [u8; 4])]) -> String {
    let mut bytes = std::fs::read(&MODELS.small).unwrap();
    for (key, value) in lies {
        // After a key come its value's type and the value.
        let at = find(&bytes, key.as_bytes(), 0) + key.len() + 4;
        bytes[at..at + 4].copy_from_slice(value);
    }
    file(name, &bytes)
}

#[test]
fn regression_gguf_configurations_that_lie_are_refused() {
    let run = |model: &str| generate(&["--model", model, "--prompt", "Hi", "--tokens", "2"]);
    let lies: [(&str, [u8; 4], &[&str]); 12] = [
        ("llama.block_count", 1u32.to_le_bytes(), &["counts 1 layers", "blk.1."]),
        ("llama.block_count", 3u32.to_le_bytes(), &["no tensor", "blk.2.", "fetch it again"]),
        ("llama.rope.freq_base", f32::NAN.to_le_bytes(), &["llama.rope.freq_base", "NaN"]),
        ("llama.rope.freq_base", f32::INFINITY.to_le_bytes(), &["llama.rope.freq_base", "inf"]),
        ("llama.rope.freq_base", 0f32.to_le_bytes(), &["llama.rope.freq_base", "above 0"]),
        ("llama.attention.layer_norm_rms_epsilon", f32::NAN.to_le_bytes(), &["rms_epsilon", "NaN"]),
        ("llama.attention.layer_norm_rms_epsilon", (-1e-5f32).to_le_bytes(), &["rms_epsilon", "above 0"]),
        ("llama.attention.head_count", [0; 4], &["llama.attention.head_count is 0"]),
        ("llama.embedding_length", [255; 4], &["llama.embedding_length is 4294967295"]),
        ("llama.rope.dimension_count", 31u32.to_le_bytes(), &["of heads of 32 elements, 31"]),
        ("llama.attention.head_count_kv", 3u32.to_le_bytes(), &["3 key heads", "4 query heads"]),
        ("llama.feed_forward_length", 288u32.to_le_bytes(), &["ffn_gate.weight", "288", "fetch the model again"]),
    ];
    for (n, (key, value, wanted)) in lies.into_iter().enumerate() {
        let name = format!("lie-{n}.gguf");
        refused(&run(&lying(&name, &[(key, value)])), &[&[name.as_str()], wanted].concat());
    }
}

#[test]
fn regression_json_configurations_that_lie_are_refused() {
    let folder = place("lies");
    spec_of_shards().write_safetensors(&folder, 1).unwrap();
    let path = folder.join("config.json");
    let honest: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let run = || generate(&["--model", text(&folder), "--prompt-tokens", "1,2", "--tokens", "2"]);
    let lies: [(&str, Value, &[&str]); 11] = [
        ("num_hidden_layers", 1.into(), &["counts 1 layers", "model.layers.1."]),
        ("hidden_size", u64::MAX.into(), &["hidden_size is 18446744073709551615"]),
        ("num_attention_heads", 0.into(), &["num_attention_heads is 0"]),
        ("num_attention_heads", (-4).into(), &["num_attention_heads is -4"]),
        ("rms_norm_eps", 0.into(), &["rms_norm_eps is 0", "above 0"]),
        ("rms_norm_eps", "1e-5".into(), &["rms_norm_eps", "above 0"]),
        ("rope_theta", (-1.0).into(), &["rope_theta is -1.0", "above 0"]),
        ("partial_rotary_factor", 0.5.into(), &["partial_rotary_factor"]),
        ("rope_scaling", serde_json::json!({"type": "linear", "factor": 0}), &["factor is 0"]),
        ("quantization_config", serde_json::json!({"quant_method": "gptq"}), &["quantization_config", "BF16"]),
        ("model_type", "mamba".into(), &["mamba", "qwen2", "run another model"]),
    ];
    for (key, value, wanted) in lies {
        let mut lie = honest.clone();
        lie[key] = value;
        std::fs::write(&path, lie.to_string()).unwrap();
        refused(&run(), &[&["config.json"], wanted].concat());
    }
    let mut harmless = honest.clone();
    for (key, value) in
        [("quantization_config", Value::Null), ("partial_rotary_factor", 1.0.into()), ("rope_scaling", Value::Null)]
    {
        harmless[key] = value;
    }
    std::fs::write(&path, harmless.to_string()).unwrap();
    stdout_of(&run());
    std::fs::remove_file(&path).unwrap();
    refused(&run(), &["config.json", "No such file", "beside its safetensors files"]);
}

#[test]
fn a_path_need_not_be_text() {
    use std::os::unix::ffi::OsStrExt;
    let path = MODELS.folder.path().join(std::ffi::OsStr::from_bytes(b"caf\xe9.gguf"));
    std::fs::copy(&MODELS.small, &path).unwrap();
    let mut command = command(&["--prompt", "Hi", "--tokens", "2", "--json", "--model"]);
    let run = last_line(stdout_of(&command.arg(&path).output().unwrap()));
    assert!(run["model"].as_str().unwrap().contains("caf"), "{run}");
}

#[test]
fn output_that_nobody_takes_is_explained_and_logs_hold_no_colours() {
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let mut command = command(&["--model", text(&MODELS.small), "--prompt", "Hi", "--tokens", "2", "--json"]);
    let output = command.env("RUST_LOG", "info").stdout(full()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("standard output") && said.contains("check where it goes"), "{said}");
    assert!(said.contains("ready") && !said.contains('\u{1b}'), "{said:?}");
}

#[test]
fn regression_the_other_programs_explain_themselves_too() {
    let out = place("never.gguf");
    let run = |program: &str, args: &[&str]| Command::new(program).args(args).output().unwrap();
    let odd = run(env!("CARGO_BIN_EXE_make_model"), &[text(&out), "--dim", "2050"]);
    let gone = run(env!("CARGO_BIN_EXE_llm-bench"), &[text(&out)]);
    for (output, wanted) in [(odd, ["make_model: rows of", "2050 elements"]), (gone, ["llm-bench: ", "check the path"])]
    {
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
        assert!(wanted.iter().all(|part| said.contains(part)), "{said}");
    }
}

fn spec_of_shards() -> Spec {
    Spec { dtype: WeightType::F16, ..spec() }
}

#[test]
fn arguments_that_cannot_be_meant_are_refused() {
    let model = text(&MODELS.small);
    let refused = |args: &[&str], wanted: &[&str]| {
        let mut all = vec!["--model", model];
        all.extend(args);
        refused(&generate(&all), wanted);
        // Programs get no half of an answer either: standard output stays empty.
        all.push("--json");
        refused(&generate(&all), wanted);
    };
    let say = ["--prompt", "Hi"];
    let with = |more: &[&'static str]| [&say[..], more].concat();
    refused(&with(&["--tokens", "2", "--page-size", "3MiB"]), &["power of two"]);
    refused(&with(&["--tokens", "2", "--page-size", "2KiB"]), &["power of two", "4"]);
    refused(&with(&["--device-budget", "64KiB", "--page-size", "64KiB", "--tokens", "2"]), &["64.0 KiB", "at least"]);
    refused(&with(&["--device-budget", "0", "--tokens", "2"]), &["budget"]);
    refused(&with(&["--tokens", "2", "--memory", "1MiB"]), &["1.0 MiB", "give at least"]);
    refused(
        &with(&["--tokens", "2", "--memory", "40MiB", "--device-budget", "40MiB"]),
        &["40.0 MiB", "--memory", "--device-budget"],
    );
    refused(
        &with(&["--tokens", "2", "--device-budget", "16MiB", "--host-budget", "4000GiB"]),
        &["3.9 TiB", "give less"],
    );
    refused(&with(&["--tokens", "0"]), &["--tokens 0", "at least 1"]);
    refused(&with(&["--tokens", "64"]), &["context of 64", "at most 62"]);
    refused(&with(&["--temperature", "-1"]), &["--temperature"]);
    refused(&with(&["--temperature", "NaN"]), &["--temperature"]);
    for size in ["12XB", "MiB", "-5MiB", "1e30GiB", ""] {
        let option = format!("--device-budget={size}");
        refused(&["--prompt", "Hi", &option], &["--device-budget"]);
    }
    refused(&with(&["--threads", "20000"]), &["--threads 20000", "1024", "one a core"]);
    refused(&with(&["--tokens", "2", "--host-budget", "1KiB"]), &["--host-budget 1.0 KiB", "give at least", "or 0"]);
    refused(&with(&["--policy", "best"]), &["best", "plan"]);
    refused(&with(&["--io", "magic"]), &["magic", "threads"]);
    refused(&with(&["--prefetch", "some"]), &["some"]);
    refused(&with(&["--verify", "maybe"]), &["maybe", "always"]);
    refused(&with(&["--device", "toaster"]), &["toaster", "host"]);
    refused(&with(&["--device", "host", "--kernels", "k.ptx"]), &["--kernels", "--device cuda"]);
    refused(&with(&["--tokens", "2", "--timeline", "/nowhere/at/all.json"]), &["/nowhere/at/all.json", "No such file"]);
    refused(&["--prompt", ""], &["empty"]);
    refused(&[], &["--prompt", "required"]);
    refused(&["--prompt", &"x".repeat(70)], &["70 tokens", "context is 64"]);
    refused(&["--prompt", "Hi", "--prompt-tokens", "1"], &["--prompt-tokens"]);
    refused(&["--prompt-tokens", "1", "--chat"], &["--chat"]);
    refused(&["--prompt-tokens", "5,300", "--tokens", "2"], &["300", "0 to 299"]);
    refused(&["--prompt-tokens", "5,-1"], &["-1"]);
    refused(&["--prompt-tokens", "5,x"], &["x"]);
    refused(&["--prompt-tokens", ""], &["--prompt-tokens"]);
}

/// `make test` builds the program once without the feature, for this test.
#[cfg(not(feature = "cuda"))]
#[test]
fn a_gpu_is_refused_without_the_feature() {
    let output = generate(&["--model", text(&MODELS.small), "--prompt", "Hi", "--device", "cuda:1"]);
    refused(&output, &["cuda:1", "feature `cuda`", "--device host"]);
}

#[test]
fn a_model_without_words_takes_ids_only() {
    let wordless = place("wordless.gguf");
    Spec { vocab: 200, ..spec() }.write_gguf(&wordless).unwrap();
    let model = text(&wordless);
    refused(&generate(&["--model", model, "--prompt", "Hi", "--tokens", "2"]), &["okeni"]);
    let run = json_of(&["--model", model, "--prompt-tokens", "1,2", "--tokens", "2"]);
    assert_eq!((run["tokens"].as_array().unwrap().len(), &run["text"]), (2, &Value::from("")));

    let mut plain = std::fs::read(&MODELS.small).unwrap();
    let key = find(&plain, b"tokenizer.chat_template", 0);
    plain[key..key + 23].copy_from_slice(b"tokenizer.some_template");
    let plain = file("plain.gguf", &plain);
    refused(&generate(&["--model", &plain, "--prompt", "Hi", "--chat"]), &["chat template", "--chat"]);
}

#[test]
fn a_backend_that_the_file_system_refuses_is_an_error_and_auto_finds_another() {
    let folder = place("ramfs");
    std::fs::create_dir(&folder).unwrap();
    // ramfs has no direct I/O; the mount is seen by this shell and its children only.
    let script = r#"mount -t ramfs none "$1" && cp "$2" "$1/m.gguf" || exit 77
        shift 2; exec "$@""#;
    let run = |io| {
        let args = ["--mount", "sh", "-c", script, "sh", text(&folder), text(&MODELS.small), GENERATE];
        let model = folder.join("m.gguf");
        let more = ["--model", text(&model), "--prompt", "Hi", "--tokens", "2", "--io", io, "--json"];
        Command::new("unshare").args(args).args(more).stdin(Stdio::null()).output()
    };
    match run("auto") {
        Ok(output) if output.status.success() => {
            last_line(stdout_of(&output));
            refused(&run("threads").unwrap(), &["O_DIRECT", "m.gguf"]);
        }
        other => eprintln!("SKIPPED: no ramfs can be mounted here: {other:?}"),
    }
}

#[test]
fn a_reader_that_goes_away_is_an_error_and_no_panic() {
    let mut child = command(&["--model", text(&MODELS.large), "--prompt-tokens", "1", "--tokens", "2", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1), "{said}");
    assert!(said.contains("standard output") && !said.contains("panicked"), "{said}");
}

/// Waits until a program, run with `RUST_LOG=info`, has begun its passes; the rest of what it says.
fn until_ready(child: &mut Child) -> BufReader<ChildStderr> {
    until(child, "ready")
}

/// Reads what a program logs, up to a line with `what` in it.
fn until(child: &mut Child, what: &str) -> BufReader<ChildStderr> {
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains(what) {
        line.clear();
        assert_ne!(stderr.read_line(&mut line).unwrap(), 0, "it ended without {what:?}");
    }
    stderr
}

fn interrupt(child: &Child) {
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
}

/// The report of a program that is interrupted once it has logged `what`.
fn interrupted(mut child: Child, what: &str) -> Value {
    let mut stderr = until(&mut child, what);
    interrupt(&child);
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{rest}");
    assert!(rest.contains("interrupt again") && rest.contains("most in use") && !rest.contains("panicked"), "{rest}");
    let run = last_line(std::str::from_utf8(&output.stdout).unwrap());
    assert_eq!(run["interrupted"], true);
    run
}

#[test]
fn an_interrupt_ends_the_run_with_its_summary() {
    let (timeline, capture) = (place("interrupted.json"), place("interrupted.trace"));
    let child = command(&["--model", text(&MODELS.large), "--prompt-tokens", "1", "--tokens", "60000", "--json"])
        .args(["--device-budget", "8MiB", "--timeline", text(&timeline), "--capture", text(&capture)])
        .env("RUST_LOG", "info")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A capture holds whole passes.
    let run = interrupted(child, "first token");
    assert!(run["tokens"].as_array().unwrap().len() < 60000);
    check_timeline(&timeline, f64::INFINITY);
    let captured = Trace::open(&capture, &TraceOptions::default(), &mut |_| ()).unwrap();
    assert!(captured.about().unwrap().ends_with("(the run was interrupted)"), "{:?}", captured.about());
}

#[test]
fn regression_an_interrupt_ends_a_pass() {
    let prompt = long_prompt(5000);
    // Enough memory for the prompt as one pass.
    let child = command(&["--model", text(&MODELS.large), "--prompt-tokens", &prompt, "--tokens", "3", "--json"])
        .env("RUST_LOG", "info")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let run = interrupted(child, "ready");
    assert_eq!(run["tokens"].as_array().unwrap().len(), 0, "{run}");
}

#[test]
fn a_model_that_is_cut_short_while_it_runs_is_an_error() {
    let model = place("cut");
    std::fs::create_dir(&model).unwrap();
    for entry in std::fs::read_dir(&MODELS.large).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    let mut child = command(&["--model", text(&model), "--prompt-tokens", "1", "--tokens", "60000"])
        .args(["--device-budget", "8MiB"])
        .env("RUST_LOG", "info")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = until_ready(&mut child);
    let shard = model.join("model-00002-of-00003.safetensors");
    std::fs::File::options().write(true).open(shard).unwrap().set_len(1 << 20).unwrap();
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1), "{rest}");
    for word in ["model-00002-of-00003", "changed", "reopen the model"] {
        assert!(rest.contains(word), "no {word:?} in {rest}");
    }
    assert!(!rest.contains("panicked"), "{rest}");
}

/// Checks where a timeline says that pages were: times in order, as many rows as the files have pages (at most 256),
/// and shares of at most 100 percent.
fn check_residency(residency: &Value, longest_us: f64) {
    let pages: u64 = residency["files"].as_array().unwrap().iter().map(|file| file["pages"].as_u64().unwrap()).sum();
    let samples = residency["samples"].as_array().unwrap();
    assert!(pages > 0 && (1..=400).contains(&samples.len()), "{pages} pages, {} samples", samples.len());
    let mut before = 0.0;
    let mut most = 0;
    for sample in samples {
        let time = sample["ts"].as_f64().unwrap();
        assert!((before..=longest_us).contains(&time), "{time} after {before}");
        before = time;
        let shares = |tier: &str| -> Vec<u64> {
            sample[tier].as_array().unwrap().iter().map(|percent| percent.as_u64().unwrap()).collect()
        };
        let (device, host) = (shares("device"), shares("host"));
        assert_eq!((device.len() as u64, host.len() as u64), (pages.min(256), pages.min(256)));
        assert!(device.iter().zip(&host).all(|(device, host)| device + host <= 100));
        most = most.max(device.iter().filter(|percent| **percent > 0).count());
    }
    // A run that is interrupted may end before its first page comes.
    assert!(most > 0 || longest_us.is_infinite(), "no page was ever seen in device memory");
}

/// Reads a timeline; returns the lanes that have spans.
fn check_timeline(path: &Path, longest_us: f64) -> HashSet<String> {
    let timeline: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    check_residency(&timeline["residency"], longest_us);
    let events = timeline["traceEvents"].as_array().unwrap();
    let (mut named, mut drawn) = (HashSet::new(), HashSet::new());
    let mut last: std::collections::HashMap<u64, f64> = std::collections::HashMap::new();
    for event in events {
        assert!(event["name"].is_string() && event["pid"].is_u64(), "{event}");
        let row = event["tid"].as_u64().unwrap();
        match event["ph"].as_str().unwrap() {
            "X" => {
                let (start, length) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
                assert!(start >= 0.0 && length >= 0.0 && start + length <= longest_us, "{event}");
                // Spans of a row follow each other; a thousandth of a microsecond is what the numbers resolve.
                assert!(start + 0.001 >= *last.get(&row).unwrap_or(&0.0), "{event}");
                last.insert(row, start + length);
                drawn.insert(event["cat"].as_str().unwrap().to_owned());
            }
            "M" if event["name"] == "thread_name" => {
                named.insert(event["args"]["name"].as_str().unwrap().to_owned());
            }
            "M" => {}
            other => panic!("phase {other}: {event}"),
        }
    }
    for lane in ["disk", "link", "pass", "stall"] {
        assert!(named.contains(lane), "{named:?}");
    }
    drawn
}

#[test]
fn a_timeline_shows_what_the_run_did() {
    let path = place("timeline.json");
    let since = std::time::Instant::now();
    json_of(
        &[
            &["--model", text(&MODELS.large), "--device-budget", "16MiB", "--host-budget", "16MiB"][..],
            &["--prefetch", "off", "--timeline", text(&path)],
            &LARGE,
        ]
        .concat(),
    );
    let drawn = check_timeline(&path, since.elapsed().as_secs_f64() * 1e6);
    for lane in ["disk", "link", "pass", "stall"] {
        assert!(drawn.contains(lane), "{drawn:?}");
    }
}

/// All experts that a token has drawn are asked for at once, each in one part of the file for each of its matrices.
#[test]
fn a_timeline_shows_that_experts_are_read_at_once() {
    let (model, path) = (place("read-at-once.gguf"), place("read-at-once.json"));
    let experts = Some(Experts { count: 32, used: 4, fused: false });
    let spec = Spec { experts, layers: 4, dim: 256, ffn_dim: 256, ..mixture(Arch::Qwen3Moe) };
    spec.write_gguf(&model).unwrap();
    let budget = format!("{}", files_len(&model) / 3);
    let args = ["--model", text(&model), "--prompt-tokens", "100", "--tokens", "12", "--page-size", "64KiB"];
    let more = ["--device-budget", &budget, "--prefetch", "off", "--timeline", text(&path)];
    let run = json_of(&[&args[..], &more].concat());
    let timeline: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let spans = timeline["traceEvents"].as_array().unwrap().iter().filter(|event| event["cat"] == "disk");
    // An end before a beginning at the same time: these two do not overlap.
    let mut ends: Vec<(f64, i64)> = spans
        .flat_map(|span| {
            let start = span["ts"].as_f64().unwrap();
            [(start, 1), (start + span["dur"].as_f64().unwrap(), -1)]
        })
        .collect();
    ends.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let (mut now, mut most) = (0, 0);
    for (_, change) in ends {
        now += change;
        most = most.max(now);
    }
    let depth = run["settings"]["depth"]["value"].as_i64().unwrap();
    assert!(most >= depth.min(4), "{most} reads at once, of {depth}");
}

#[test]
fn plan_has_the_hits_of_the_optimum_on_a_capture_of_the_real_model() {
    let Some(model) = any_real_model() else { return };
    let path = place("real.trace");
    let args = ["--prompt", "Once upon a time there was", "--tokens", "12", "--device-budget", "48MiB"];
    json_of(&[&args[..], &["--model", text(&model), "--capture", text(&path)]].concat());
    let mut trace = Trace::open(&path, &TraceOptions::default(), &mut |_| ()).unwrap();
    assert!(trace.passes() >= 4, "it ended after {} passes", trace.passes());
    for percent in [10, 25, 50, 75, 90] {
        let frames = NonZeroU32::new(trace.pages() * percent / 100).unwrap();
        let best = trace.optimum(frames, &mut |_| ()).unwrap().hits as f64;
        let plan = trace.replay_declared(PolicyKind::Plan.build(), frames, &mut |_| ()).unwrap().hits as f64;
        assert!(plan >= 0.99 * best, "with room for {percent} %: {plan} of {best}");
    }
}

#[test]
fn a_capture_has_every_use_of_a_run() {
    let path = place("run.trace");
    // Pages small enough that some hold nothing but attention.
    let small = ["--device-budget", "16MiB", "--page-size", "128KiB"];
    let model = ["--model", text(&MODELS.large), "--capture", text(&path)];
    let run = json_of(&[&model[..], &small, &LARGE].concat());
    let file = BufReader::new(std::fs::File::open(&path).unwrap());
    let mut reader = CaptureReader::new(file, "run.trace").unwrap();
    let header = reader.header().clone();
    assert_eq!(header.page_size.bytes(), run["page_bytes"].as_u64().unwrap());
    assert_eq!(header.segments.len(), 3, "a segment for each shard");
    let classes: HashSet<_> =
        header.segments.iter().flat_map(|segment| &segment.classes).map(|run| &*run.class).collect();
    assert!(classes.contains("attention") && classes.contains("feed-forward"), "{classes:?}");
    let (mut uses, mut passes, mut in_pass) = (0u64, Vec::new(), Vec::new());
    while let Some(step) = reader.step().unwrap() {
        match step {
            CaptureStep::Use { page, write } => {
                assert!(!write, "nothing writes weights");
                uses += 1;
                in_pass.push(page);
            }
            CaptureStep::Pass => passes.push(std::mem::take(&mut in_pass)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(uses, run["uses"].as_u64().unwrap());
    assert_eq!(
        passes.len(),
        run["tokens"].as_array().unwrap().len(),
        "a pass for the prompt, and one for each other token"
    );
    // Of all that a pass uses, only the embedding depends on its token.
    let weights = |pass: &Vec<u64>| pass.iter().copied().collect::<HashSet<_>>();
    let common = passes[1..].iter().map(weights).reduce(|all, pass| &all & &pass).unwrap();
    assert!(common.len() + 2 >= weights(&passes[1]).len(), "{} of {}", common.len(), weights(&passes[1]).len());

    let bad = ["--prompt", "Hi", "--tokens", "2", "--model", text(&MODELS.small), "--capture"];
    refused(&generate(&[&bad[..], &[text(&MODELS.small)]].concat()), &["a file of the model", "--capture"]);
    refused(&generate(&[&bad[..], &["/dev/full"]].concat()), &["/dev/full", "no regular file", "--capture"]);
    let both = [&bad[..], &[text(&path), "--timeline", text(&path)]].concat();
    refused(&generate(&both), &["something else is written there", "--capture"]);
    let both = place("both");
    let both = [&bad[..], &[text(&both), "--timeline", text(&both)]].concat();
    refused(&generate(&both), &["something else is written there"]);
}

#[test]
fn regression_a_timeline_never_takes_the_place_of_a_model() {
    let folder = place("timelines");
    std::fs::create_dir(&folder).unwrap();
    let victim = folder.join("victim.gguf");
    std::fs::copy(&MODELS.small, &victim).unwrap();
    let (linked, named) = (folder.join("linked.json"), folder.join("named.json"));
    std::fs::hard_link(&victim, &linked).unwrap();
    std::os::unix::fs::symlink(&victim, &named).unwrap();
    let names = || {
        let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        names.collect::<std::collections::BTreeSet<_>>()
    };
    let before = names();
    let args = ["--prompt", "Hi", "--tokens", "2", "--model", text(&victim), "--timeline"];
    for path in [&victim, &linked, &named] {
        refused(&generate(&[&args[..], &[text(path)]].concat()), &["a file of the model", "--timeline"]);
    }
    for path in ["/dev/full", text(&folder)] {
        refused(&generate(&[&args[..], &[path]].concat()), &[path, "no regular file", "--timeline"]);
    }
    assert_eq!(std::fs::read(&victim).unwrap(), std::fs::read(&MODELS.small).unwrap());
    // A run that fails leaves the old file as it was, and makes no new one.
    let old = folder.join("old.json");
    std::fs::write(&old, "old").unwrap();
    refused(&generate(&[&args[..], &[text(&old), "--page-size", "3MiB"]].concat()), &["power of two"]);
    assert_eq!(std::fs::read(&old).unwrap(), b"old");
    std::fs::remove_file(&old).unwrap();
    assert_eq!(names(), before);

    let shards = place("timelines-of-shards");
    spec_of_shards().write_safetensors(&shards, 2).unwrap();
    for file in ["config.json", "model.safetensors.index.json", "model-00002-of-00002.safetensors"] {
        let file = shards.join(file);
        let ids = ["--model", text(&shards), "--prompt-tokens", "1,2", "--tokens", "2", "--timeline", text(&file)];
        refused(&generate(&ids), &["a file of the model"]);
    }
}

#[test]
fn help_and_version_are_no_errors() {
    for option in ["--help", "--version"] {
        let output = generate(&[option]);
        assert!(stdout_of(&output).contains(if option == "--help" { "--device-budget" } else { "0." }));
        assert!(output.stderr.is_empty());
    }
}
