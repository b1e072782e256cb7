//! The promise: for good input the command line reports what is true; for bad input it says what is wrong and what to
//! do, without a panic.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "cli/export.rs"]
mod export;
#[path = "cli/replay.rs"]
mod replay;
#[path = "cli/state.rs"]
mod state;

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use outcore::policy::{PageId, PageIndex, SegmentId};
use outcore::stats::PageUse;
use outcore::{Bytes, PageSize, Plan, PolicyKind, Runtime};
use outcore_lab::sim::{AnyPolicy, CaptureHeader, CaptureWriter, CapturedSegment, ClassRun};
use outcore_testkit::{headers, models};
use serde_json::Value;

/// Returns the program, with a cache folder that is not the user's.
fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_outcore"));
    command.env("XDG_CACHE_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"));
    command
}

fn outcore(arguments: &[&str]) -> Output {
    program().args(arguments).output().unwrap()
}

fn text(arguments: &[&str]) -> String {
    let output = outcore(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the output, which must be one JSON object.
fn json(arguments: &[&str]) -> Value {
    let text = text(arguments);
    assert_eq!(text.lines().count(), 1, "one line: {text}");
    let value: Value = serde_json::from_str(&text).unwrap();
    assert!(value.is_object());
    value
}

/// Checks that it fails with this status and one message that holds all of `parts`.
fn refused(arguments: &[&str], status: i32, parts: &[&str]) {
    let output = outcore(arguments);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {message}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    assert!(!message.contains("panicked") && !message.contains("RUST_BACKTRACE"), "{message}");
    for part in parts {
        assert!(message.contains(part), "{arguments:?}: {part:?} is not in {message:?}");
    }
    if status == 1 {
        assert!(message.starts_with("outcore: ") && message.lines().count() == 1, "{message:?}");
    }
}

fn string(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[test]
fn inspect_counts_tensors_types_and_pages() {
    let dir = scratch();
    let path = dir.path().join("rich.gguf");
    fs::write(&path, headers::rich_gguf().bytes()).unwrap();
    let found = json(&["inspect", string(&path), "--json", "--page-size", "4KiB", "--tensors"]);
    let file_bytes = fs::metadata(&path).unwrap().len();
    assert_eq!(found["format"], "GGUF");
    assert_eq!(found["file_bytes"], file_bytes);
    assert_eq!(found["tensor_count"], 6);
    assert_eq!(found["tied_tensors"], 1, "output.weight has the bytes of token_embd.weight");
    assert_eq!(found["metadata"]["architecture"], "llama");
    assert_eq!(found["metadata"]["vocabulary"], "4");
    assert_eq!(found["tensors"].as_array().unwrap().len(), 6);
    assert_eq!(found["largest"][0]["bytes"], 400);
    let types: u64 = found["dtypes"].as_array().unwrap().iter().map(|kind| kind["bytes"].as_u64().unwrap()).sum();
    assert_eq!(found["tensor_bytes"], types);
    let pages = file_bytes.div_ceil(4096);
    assert_eq!(found["pages"], pages);
    assert_eq!(found["tail_waste_bytes"], pages * 4096 - file_bytes);
    assert_eq!(found["budgets"].as_array().unwrap().len(), 5);
    assert!(json(&["inspect", string(&path), "--json"]).get("tensors").is_none());

    let table = text(&["inspect", string(&path), "--tensors", "--budget", "1GiB"]);
    for part in ["GGUF", "blk.0.ffn.weight", "2 x 256", "architecture", "llama", "1.0 GiB", "100.0 %"] {
        assert!(table.contains(part), "{part:?} is not in\n{table}");
    }
    assert!(table.lines().all(|line| line.chars().all(|c| !c.is_control())), "{table:?}");
}

#[test]
fn inspect_says_which_page_size_it_assumes() {
    let model = models::synthetic(&[5000, 70_000]);
    let table = text(&["inspect", string(&model.path), "--page-size", "64KiB"]);
    assert!(table.contains("assumed") && table.contains("pages of 64.0 KiB (--page-size)"), "{table}");
}

#[test]
fn inspect_counts_pages_that_tensors_share() {
    // Two tensors begin in the first page. The second one ends in the second page, where the third one lies.
    let file = models::synthetic(&[1000, 4000, 100, 20_000]);
    let found = json(&["inspect", string(&file.path), "--page-size", "4KiB", "--json"]);
    let start = file.bytes.len() as u64 - 25_100;
    let page = |offset: u64| (start + offset) / 4096;
    assert_eq!((page(0), page(1000), page(4999), page(5000), page(25_099)), (0, 0, 1, 1, 6));
    assert_eq!(found["shared_pages"], 2);
    assert_eq!(found["tensor_pages"], 7);
    assert_eq!(found["minimum_budget_bytes"], 4096, "every row is one byte");
    assert_eq!(found["whole_tensor_budget_bytes"], 6 * 4096);
    assert_eq!(found["format"], "safetensors");
}

#[test]
fn inspect_reads_folders_and_the_config_beside_safetensors() {
    let dir = scratch();
    fs::write(dir.path().join("model.safetensors"), headers::rich_safetensors()).unwrap();
    fs::write(dir.path().join("config.json"), r#"{"model_type":"qwen2","num_hidden_layers":24,"x":[1]}"#).unwrap();
    let found = json(&["inspect", string(dir.path()), "--json"]);
    assert_eq!(found["metadata"]["architecture"], "qwen2");
    assert_eq!(found["metadata"]["layers"], "24");
    assert_eq!(found["metadata"]["format"], "pt");
    // The config is only shown: a damaged one changes nothing else.
    fs::write(dir.path().join("config.json"), "{").unwrap();
    assert_eq!(json(&["inspect", string(dir.path()), "--json"])["metadata"]["format"], "pt");
}

#[test]
fn inspect_says_what_budgets_hold() {
    let lengths = [300_000; 40];
    let file = models::synthetic(&lengths);
    let total = file.bytes.len() as u64;
    let path = string(&file.path);
    let found =
        json(&["inspect", path, "--page-size", "64KiB", "--json", "--budget", "16MiB,6MiB", "--budget", "4KiB"]);
    let budgets = found["budgets"].as_array().unwrap();
    assert_eq!(budgets.len(), 3);
    assert_eq!(budgets[0]["bytes_streamed_per_pass"], 0);
    assert_eq!(budgets[0]["resident_share"], 1.0);
    assert_eq!(budgets[2]["runs"], false);
    assert_eq!(budgets[2]["frames"], 0);
    let streamed = budgets[1]["bytes_streamed_per_pass"].as_u64().unwrap();
    assert!(streamed > total - Bytes::mib(6).get() && streamed < total, "{streamed} of {total}");

    // Compared with what the runtime does.
    let runtime = Runtime::builder()
        .page_size(PageSize::new(Bytes::kib(64)).unwrap())
        .device_budget(Bytes::mib(6))
        .policy(PolicyKind::Plan)
        .open()
        .unwrap();
    let model = runtime.open_model(&file.path).unwrap();
    let tensors: Vec<_> = (0..lengths.len()).map(|n| model.tensor(&format!("t{n}")).unwrap()).collect();
    runtime.plan(Plan::Cycle(&tensors));
    let mut read = Vec::new();
    for _ in 0..5 {
        for tensor in &tensors {
            drop(runtime.pin(tensor).wait().unwrap());
        }
        read.push(runtime.stats().traffic.disk_read.get());
    }
    let passes = (read[4] - read[1]) as f64 / 3.0;
    assert!((passes / streamed as f64 - 1.0).abs() < 0.1, "inspect says {streamed}, the runtime read {passes}");

    let table = text(&["inspect", path, "--budget", "1KiB"]);
    assert!(table.contains("too small"), "{table}");
}

#[test]
fn the_least_budget_runs_and_less_does_not() {
    let file = models::synthetic(&[5000, 70_000, 9000]);
    let found = json(&["inspect", string(&file.path), "--page-size", "4KiB", "--json"]);
    let least = found["whole_tensor_budget_bytes"].as_u64().unwrap();
    for (budget, fits) in [(least, true), (least - 4096, false)] {
        let runtime = Runtime::builder()
            .page_size(PageSize::new(Bytes::kib(4)).unwrap())
            .device_budget(Bytes::new(budget))
            .open()
            .unwrap();
        let model = runtime.open_model(&file.path).unwrap();
        let pinned = (0..3).all(|n| runtime.pin(&model.tensor(&format!("t{n}")).unwrap()).wait().is_ok());
        assert_eq!(pinned, fits, "{budget}");
    }
}

#[test]
fn inspect_refuses_what_is_not_a_model() {
    let dir = scratch();
    let at = |name: &str| dir.path().join(name);
    refused(&["inspect", string(&at("none.gguf"))], 1, &["none.gguf", "check the path"]);
    refused(&["inspect", string(dir.path())], 1, &[string(dir.path())]);
    fs::write(at("empty.gguf"), "").unwrap();
    refused(&["inspect", string(&at("empty.gguf"))], 1, &["empty.gguf is empty"]);
    fs::write(at("text"), "hello, this is no model at all").unwrap();
    refused(&["inspect", string(&at("text"))], 1, &["not a model"]);
    let whole = headers::rich_gguf().bytes();
    for len in [5, 30, 400, whole.len() - 1] {
        fs::write(at("cut.gguf"), &whole[..len]).unwrap();
        refused(&["inspect", string(&at("cut.gguf")), "--json"], 1, &["cut.gguf", "incomplete"]);
    }
    fs::write(at("deep.safetensors"), headers::safetensors(&"[".repeat(100_000), 0)).unwrap();
    refused(&["inspect", string(&at("deep.safetensors"))], 1, &["deep.safetensors"]);
}

#[test]
fn escape_sequences_in_a_model_do_not_reach_the_terminal() {
    let dir = scratch();
    let path = dir.path().join("rude.gguf");
    let rude = headers::GgufFile::default().kv("general.architecture", headers::Kv::str("\u{1b}[31mred")).tensor(
        "\u{1b}[2Jgone\n",
        &[8],
        0,
        32,
    );
    fs::write(&path, rude.bytes()).unwrap();
    let table = text(&["inspect", string(&path), "--tensors"]);
    assert!(!table.contains('\u{1b}') && table.contains("gone\\n"), "{table:?}");
}

/// A GGUF model of the Llama family with `layers` layers: 64 wide, 4 heads of 16, 2 of keys and values, 128 tokens.
fn small_llama(layers: u32, without: &str) -> headers::GgufFile {
    use headers::Kv;
    let mut file = headers::GgufFile::default().kv("general.architecture", Kv::str("llama"));
    for (key, value) in [
        ("block_count", layers),
        ("embedding_length", 64),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("feed_forward_length", 256),
        ("context_length", 2048),
    ] {
        if key != without {
            file = file.kv(&format!("llama.{key}"), Kv::U32(value));
        }
    }
    // F16 is 1, F32 is 0.
    file = file.tensor("token_embd.weight", &[64, 128], 1, 64 * 128 * 2);
    for layer in 0..layers {
        for (name, rows, columns) in
            [("attn_q", 64, 64), ("attn_k", 32, 64), ("ffn_gate", 256, 64), ("ffn_up", 256, 64), ("ffn_down", 64, 256)]
        {
            file = file.tensor(&format!("blk.{layer}.{name}.weight"), &[columns, rows], 1, rows * columns * 2);
        }
    }
    file.tensor("output.weight", &[64, 128], 0, 64 * 128 * 4)
}

#[test]
fn plan_counts_a_models_classes_from_its_header() {
    let dir = scratch();
    let path = dir.path().join("small.gguf");
    fs::write(&path, small_llama(3, "").bytes()).unwrap();
    let run = |more: &[&str]| {
        let fixed = ["plan", string(&path), "--device-memory", "1GiB", "--disk", "1GB/s", "--json"];
        json(&[&fixed[..], more].concat())
    };
    let found = run(&["--context", "100", "--batch", "3"]);
    let layer = 64 * 64 + 32 * 64 + 3 * 256 * 64;
    let parameters = 3 * layer + 2 * 64 * 128;
    assert_eq!(found["shape"]["parameters"], parameters);
    assert_eq!(found["shape"]["dtype"], "F16");
    assert_eq!((&found["shape"]["vocab"], &found["shape"]["gated"]), (&Value::from(128), &Value::from(true)));
    assert_eq!(found["memory"]["weights_bytes"], 2 * (parameters - 64 * 128) + 4 * 64 * 128);
    assert_eq!(found["memory"]["kv_bytes"], 2 * 3 * 2 * 16 * 2 * 100 * 3);
    assert_eq!(found["memory"]["gradients_bytes"], 0);
    assert_eq!(found["pass"]["paged_bytes"], 2 * 3 * layer + 4 * 64 * 128, "the embedding is read by rows");
    assert_eq!((&found["fit"], &found["pass"]["pass_s"]), (&Value::from("resident"), &Value::Null));
    assert!(found["assumed"].to_string().contains("--machine or --compute"), "{found}");
    assert_eq!(
        run(&["--kv", "q8"])["memory"]["kv_bytes"],
        2 * 3 * 2 * 16 * 2048 * 34 / 32,
        "of the model's own context"
    );

    let trained = run(&["--train", "--optimizer", "adam", "--context", "64", "--checkpoint", "full"]);
    let classes = ["weights_bytes", "gradients_bytes", "optimizer_bytes"].map(|class| &trained["memory"][class]);
    assert_eq!(classes, [4 * parameters, 4 * parameters, 8 * parameters].map(Value::from).each_ref());
    assert_eq!(trained["recommended"]["scratch_file_bytes"], 16 * parameters);
    assert_eq!((&trained["pass"]["tokens"], &trained["memory"]["kv_bytes"]), (&Value::from(64), &Value::from(0)));

    let table = text(&["plan", string(&path), "--device-memory", "1GiB", "--disk", "1GB/s", "--context", "9999"]);
    for part in [
        "GGUF",
        "keys and values",
        "headroom",
        "more than the 2048",
        "nothing moves",
        "plan: every page has a frame",
        "--machine or --compute",
    ] {
        assert!(table.contains(part), "{part:?} is not in\n{table}");
    }
}

#[test]
fn plan_reads_the_config_beside_safetensors() {
    let dir = scratch();
    fs::write(dir.path().join("model.safetensors"), headers::rich_safetensors()).unwrap();
    let config = dir.path().join("config.json");
    let run = ["plan", string(dir.path()), "--device-memory", "1GiB", "--disk", "1GB/s", "--json"];
    refused(&run, 1, &["config.json", "beside"]);
    let good = r#"{"num_hidden_layers":24,"hidden_size":64,"num_attention_heads":4,"num_key_value_heads":1,
        "head_dim":32,"intermediate_size":96,"vocab_size":1000,"max_position_embeddings":512}"#;
    fs::write(&config, good).unwrap();
    let found = json(&run);
    assert_eq!(found["memory"]["kv_bytes"], 2 * 24 * 32 * 2 * 512);
    assert_eq!(found["format"], "safetensors");
    for (key, bad) in [
        ("num_hidden_layers", good.replace("\"num_hidden_layers\":24,", "")),
        ("num_hidden_layers", good.replace(":24", ":0")),
        ("hidden_size", good.replace(":64", ":\"64\"")),
        ("num_key_value_heads", good.replace(":1,", ":[1,2],")),
        ("3 heads of keys and values", good.replace(":1,", ":3,")),
        ("config.json", good[..40].to_owned()),
        ("config.json", "[]".to_owned()),
        ("kv_lora_rank", good.replace("{", "{\"kv_lora_rank\":512,")),
    ] {
        fs::write(&config, bad).unwrap();
        refused(&run, 1, &[key, "("]);
    }
}

/// `plan` says the same stream as the pager and its policy, which `inspect` runs.
#[test]
fn plan_and_inspect_agree_on_what_streams() {
    let dir = scratch();
    let path = dir.path().join("small.gguf");
    fs::write(&path, small_llama(300, "").bytes()).unwrap();
    for memory in ["8MiB", "16MiB", "24MiB"] {
        let found = json(&[
            "plan",
            string(&path),
            "--device-memory",
            memory,
            "--disk",
            "1GB/s",
            "--headroom",
            "0",
            "--context",
            "1",
            "--json",
        ]);
        assert_eq!(found["fit"], "streamed");
        let [budget, page] = ["device_budget_bytes", "page_bytes"].map(|key| found["recommended"][key].to_string());
        let inspected = json(&["inspect", string(&path), "--page-size", &page, "--budget", &budget, "--json"]);
        let simulated = inspected["budgets"][0]["bytes_streamed_per_pass"].as_f64().unwrap();
        let planned = found["pass"]["disk_read_bytes"].as_f64().unwrap();
        // `inspect` pins a tensor of one or two pages at once; `plan` assumes units of a 32nd of the frames, and at
        // least two pages. That many more pages may stream, or the last, which is short.
        let [budget, page] = [&budget, &page].map(|bytes| bytes.parse::<f64>().unwrap());
        let pages = (planned - simulated) / page;
        assert!(
            (-1.0..(budget / page / 32.0).max(2.0)).contains(&pages),
            "{memory}: {planned} planned, {simulated} simulated"
        );
        let disk_s = found["pass"]["disk_s"].as_f64().unwrap();
        assert!((disk_s / planned * 1e9 - 1.0).abs() < 1e-3, "{disk_s}");
    }
}

#[test]
fn plan_needs_no_file() {
    let llama =
        ["--params", "69B", "--layers", "80", "--hidden", "8192", "--heads", "64", "--kv-heads", "8", "--ffn", "28672"];
    let limits = ["--device-memory", "48GiB", "--host-memory", "60GiB", "--disk", "2GB/s", "--link", "20GB/s"];
    let run = |more: &[&'static str]| -> Vec<&'static str> { [&["plan"][..], &llama[..], &limits, more].concat() };
    let found = json(&run(&["--vocab", "32000", "--context", "4096", "--target", "100", "--json"]));
    assert_eq!(found["memory"]["kv_bytes"].as_u64(), Some(320 << 10 << 12));
    assert_eq!(found["memory"]["weights_bytes"], 138_000_000_000u64);
    assert_eq!((&found["fit"], &found["pass"]["bottleneck"]), (&Value::from("streamed"), &Value::from("disk")));
    let pass = &found["pass"];
    let seconds = pass["disk_read_bytes"].as_f64().unwrap() / 2e9;
    assert!((1.0..1.01).contains(&(pass["pass_s"].as_f64().unwrap() / seconds)), "{pass}");
    assert!((0.99..=1.0).contains(&(pass["tokens_per_s"].as_f64().unwrap() * seconds)), "{pass}");
    let changes = found["changes"].as_array().unwrap();
    assert!(
        changes.iter().any(|change| change["change"] == "weights in Q8_0" && change["speedup"].as_f64() > Some(2.0))
    );
    assert_eq!(found["target"]["reached"], false);
    assert!(found["model"].is_null());

    let table = text(&run(&["--target", "1"]));
    for part in ["vocabulary: 32000 (estimate)", "bound by disk", "at most", "host memory", "to reach 1.00 tok/s"] {
        assert!(table.contains(part), "{part:?} is not in\n{table}");
    }
    let table = text(&run(&["--target", "0.01", "--compute", "80ms"]));
    assert!(table.contains("0.010 tok/s are reached") && !table.contains("at most"), "{table}");

    // A job that does not run reports what it takes, and no forecast.
    let small = ["plan", "--params", "7B", "--device-memory", "8GiB", "--disk", "2GB/s", "--train"];
    let found = json(&[&small[..], &["--json"]].concat());
    assert_eq!(
        (&found["fit"], &found["pass"], &found["recommended"]),
        (&Value::from("too small"), &Value::Null, &Value::Null)
    );
    assert!(found["changes"].as_array().unwrap().iter().any(|change| change["change"] == "full checkpointing"));
    let table = text(&small);
    assert!(table.contains("does not run") && !table.contains("a step of"), "{table}");
}

/// With the machine's rates every job has a time, and an option that is given wins over the machine.
#[test]
fn plan_predicts_on_a_machine() {
    let llama =
        ["--params", "69B", "--layers", "80", "--hidden", "8192", "--heads", "64", "--kv-heads", "8", "--gated"];
    let fixed = ["plan", "--ffn", "28672", "--vocab", "32000", "--json", "--context", "4096", "--machine", "h200"];
    let run = |more: &[&'static str]| json(&[&fixed[..], &llama, more].concat());
    let near = |value: &Value, wanted: f64| {
        let found = value.as_f64().unwrap_or_else(|| panic!("{value} is no number, but {wanted}"));
        assert!((found / wanted - 1.0).abs() < 1e-6, "{found}, not {wanted}");
    };
    // Resident: weights and cache at 4.8 TB/s.
    let found = run(&["--dtype", "q8_0"]);
    let bytes = found["memory"]["weights_bytes"].as_f64().unwrap() + f64::from(320 << 22);
    assert_eq!((&found["fit"], &found["pass"]["bottleneck"]), (&Value::from("resident"), &Value::from("compute")));
    // Each of the tensors is a step of 5 us.
    let seconds = bytes / 4.8e12 + 561.0 * 5e-6;
    near(&found["pass"]["pass_s"], seconds);
    near(&found["pass"]["tokens_per_s"], 1.0 / seconds);
    near(&found["pass"]["flops"], 2.0 * 69e9 + 4.0 * 80.0 * 8192.0 * 4096.0);
    assert_eq!([&found["pass"]["compute_from"], &found["pass"]["compute_by"]], ["machine", "memory"]);
    assert_eq!(found["resources"]["device_bytes"], 141_000_000_000u64);
    assert_eq!(found["resources"]["disk_write_bytes_per_second"], 3_500_000_000u64);
    assert_eq!(
        (&found["resources"]["machine"], &found["resources"]["compute_s"]),
        (&Value::from("h200"), &Value::Null)
    );
    assert!(found["changes"][0]["change"] == "a batch of 2", "{}", found["changes"]);

    // Trained: its operations at 989 TFLOP/s; one forward pass more with full checkpointing.
    let train = run(&["--train", "--device-memory", "3TB", "--checkpoint", "full"]);
    let operations = 4096.0 * (8.0 * 69e9 + 4.0 / 3.0 * 12.0 * 80.0 * 8192.0 * 4096.0);
    near(&train["pass"]["flops"], operations);
    near(&train["pass"]["compute_s"], operations / 989e12);
    assert_eq!((&train["fit"], &train["pass"]["compute_by"]), (&Value::from("resident"), &Value::from("operations")));

    // Options win, one by one.
    let given = run(&["--device-memory", "40GB", "--host-memory", "7GB", "--disk", "1GB/s", "--link", "10GB/s"]);
    let resources = &given["resources"];
    let of = |key: &str| resources[key].as_u64().unwrap();
    assert_eq!([of("device_bytes"), of("host_bytes")], [40_000_000_000, 7_000_000_000]);
    assert_eq!([of("disk_bytes_per_second"), of("disk_write_bytes_per_second")], [1_000_000_000; 2]);
    assert_eq!([of("link_bytes_per_second"), of("flops_per_second")], [10_000_000_000, 989_000_000_000_000]);
    let read_s = given["pass"]["disk_read_bytes"].as_f64().unwrap() / 1e9;
    assert!((given["pass"]["disk_s"].as_f64().unwrap() / read_s - 1.0).abs() < 1e-3, "{given}");
    let timed = run(&["--compute", "2s"]);
    assert_eq!(
        (&timed["pass"]["compute_s"], &timed["pass"]["compute_from"]),
        (&Value::from(2.0), &Value::from("given"))
    );

    let table = text(&["plan", "--params", "7B", "--train", "--machine", "dgx-h200", "--context", "1024"]);
    for part in ["one of the 8 devices of dgx-h200", "tok/s, bound by", "989 TFLOP/s", "kernels are slower"] {
        assert!(table.contains(part), "{part:?} is not in\n{table}");
    }
    // What a pass does adds up to it.
    let parts = run(&["--device-memory", "40GB"])["pass"].clone();
    let of = |key: &str| parts[key].as_f64().unwrap();
    assert!(of("waited_s") > 0.0 && of("pass_s") - of("waited_s") >= 0.95 * of("compute_s"), "{parts}");
    let streams = text(&["plan", "--params", "69B", "--machine", "h200", "--device-memory", "40GB"]);
    let resident = text(&["plan", "--params", "1B", "--device-memory", "40GB", "--disk", "1GB/s"]);
    for part in ["compute, by memory", "link", "disk", "computing, with steps", "waiting for pages", "the whole pass"] {
        assert!(streams.contains(part), "{part:?} is not in\n{streams}");
    }
    assert!(resident.contains("the whole pass") && resident.contains("not known"), "{resident}");
    assert!(resident.contains("device memory: given by --device-memory"), "{resident}");
    let table = text(&["plan", "--params", "1B", "--machine", "laptop", "--target", "1"]);
    for part in ["laptop has one memory for both", "1.00 tok/s are within what the machine can"] {
        assert!(table.contains(part), "{part:?} is not in\n{table}");
    }
}

/// `plan` and `simulate` take compute time from the same machine.
#[test]
fn plan_and_simulate_agree_on_computing() {
    let dir = scratch();
    let path = dir.path().join("mine.json");
    let machine = r#"{"name": "mine", "devices": 1, "device_memory": 32e9, "host_memory": 0, "link": null,
        "disk": {"read_bytes_per_second": 2e9, "write_bytes_per_second": 1e9, "latency_us": 0, "depth": 8},
        "compute": {"bytes_per_second": 1e11, "flops_per_second": 1e15, "step_us": 0}, "jitter": 0}"#;
    fs::write(&path, machine).unwrap();
    let model = ["--params", "1B", "--layers", "16", "--machine", string(&path), "--json"];
    let planned = json(&[&["plan", "--context", "1"][..], &model].concat());
    let simulated = json(&[&["simulate"][..], &model].concat());
    let ratio = planned["pass"]["pass_s"].as_f64().unwrap() / simulated["median_pass_s"].as_f64().unwrap();
    assert!((ratio - 1.0).abs() < 0.001, "{ratio}");
}

#[test]
fn plan_shows_what_checkpointing_saves() {
    let fixed = ["plan", "--params", "7B", "--train", "--device-memory", "200GiB", "--disk", "2GB/s"];
    let with = |setting: &'static str| [&fixed[..], &["--context", "2048", "--checkpoint", setting]].concat();
    for setting in ["none", "selective", "full", "layers"] {
        let found = json(&[&with(setting)[..], &["--json"]].concat());
        let all = found["memory"]["activations_by_checkpointing"].as_array().unwrap();
        let names: Vec<&str> = all.iter().map(|one| one["checkpointing"].as_str().unwrap()).collect();
        assert_eq!(names, ["none", "selective", "full", "layers"]);
        let chosen: Vec<&Value> = all.iter().filter(|one| one["chosen"] == true).collect();
        assert_eq!(chosen.len(), 1);
        assert_eq!(chosen[0]["checkpointing"], setting);
        assert_eq!(chosen[0]["bytes"], found["memory"]["activations_bytes"]);
        assert!(all[..3].is_sorted_by(|a, b| a["bytes"].as_u64() > b["bytes"].as_u64()), "{all:?}");
        let table = text(&with(setting));
        let lines: Vec<&str> = table.lines().filter(|line| line.ends_with("chosen")).collect();
        assert!(lines.len() == 1 && lines[0].trim().starts_with(setting), "{table}");
    }
    let infer = json(&["plan", "--params", "7B", "--device-memory", "20GiB", "--disk", "2GB/s", "--json"]);
    assert!(infer["memory"]["activations_by_checkpointing"].is_null());
}

/// A GGUF model of two layers of 16 experts each, 64 wide.
fn small_mixture(count: u32, used: Option<u32>) -> headers::GgufFile {
    use headers::Kv;
    let mut file = small_llama(2, "").kv("llama.expert_count", Kv::U32(count));
    if let Some(used) = used {
        file = file.kv("llama.expert_used_count", Kv::U32(used));
    }
    file = file.kv("llama.expert_feed_forward_length", Kv::U32(32));
    for layer in 0..2 {
        for name in ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"] {
            file = file.tensor(&format!("blk.{layer}.{name}.weight"), &[64, 32, 16], 1, 64 * 32 * 16 * 2);
        }
    }
    file
}

#[test]
fn plan_counts_experts_in_memory_and_active_ones_in_a_pass() {
    let dir = scratch();
    let path = dir.path().join("mixture.gguf");
    let fixed = ["plan", string(&path), "--machine", "laptop", "--context", "1", "--json"];
    let run = |file: headers::GgufFile, more: &[&'static str]| {
        fs::write(&path, file.bytes()).unwrap();
        json(&[&fixed[..], more].concat())
    };
    let dense = run(small_llama(2, ""), &[]);
    assert!(dense["shape"]["experts"].is_null());
    let of = |value: &Value, class: &str, key: &str| value[class][key].as_f64().unwrap();
    let experts = f64::from(2 * 3 * 64 * 32 * 16);
    let found = run(small_mixture(16, Some(2)), &[]);
    let both = |class, key| of(&found, class, key) - of(&dense, class, key);
    assert_eq!([both("memory", "weights_bytes"), both("pass", "paged_bytes")], [2.0 * experts; 2], "memory holds all");
    assert_eq!(both("pass", "used_bytes"), 2.0 * experts / 8.0, "a token uses two of sixteen");
    assert_eq!(both("pass", "traffic_bytes"), 2.0 * experts / 8.0);
    assert_eq!(both("pass", "flops"), 2.0 * experts / 8.0, "two for each parameter");
    let told = &found["shape"]["experts"];
    assert_eq!([&told["count"], &told["active"], &told["ffn"]], [16, 2, 32]);
    assert_eq!(told["weights_bytes"].as_f64(), Some(2.0 * experts));
    // Four sequences draw 16 (1 - (14/16)^4) of them, and take four times the operations.
    let four = run(small_mixture(16, Some(2)), &["--batch", "4"]);
    let drawn = 16.0 * (1.0 - 0.875f64.powi(4));
    assert!((told_used(&four) - drawn).abs() < 1e-9, "{four}");
    assert_eq!(of(&four, "pass", "flops"), 4.0 * of(&found, "pass", "flops"));
    let used = of(&four, "pass", "used_bytes") - of(&dense, "pass", "used_bytes");
    assert!((used - 2.0 * experts * drawn / 16.0).abs() <= 1.0, "{used}");
    // What streams with few frames is simulated.
    let small = run(small_mixture(16, Some(2)), &["--device-memory", "512KiB", "--headroom", "0"]);
    assert_eq!(small["fit"], "streamed");
    assert!(of(&small, "pass", "filled_bytes") > 0.0);
    assert_eq!(
        (&small["pass"]["filled_ahead"], &small["recommended"]["policy"]),
        (&Value::from(false), &Value::from("kv"))
    );
    assert!(small["recommended"]["policy_because"].as_str().unwrap().contains("experts"));
    fs::write(&path, small_mixture(16, Some(2)).bytes()).unwrap();
    let small = ["plan", string(&path), "--machine", "laptop", "--device-memory", "512KiB", "--headroom", "0"];
    let table = text(&[&small[..], &["--context", "1"]].concat());
    for part in ["16 a layer, 2 for each token", "if experts are drawn evenly", "kv: which experts"] {
        assert!(table.contains(part), "{part:?} is not in\n{table}");
    }
    // Without the key all experts are used, and the output says so. A count of 0 means a dense model.
    let all = run(small_mixture(16, None), &[]);
    assert_eq!((told_used(&all), &all["pass"]["used_bytes"]), (16.0, &all["pass"]["paged_bytes"]));
    assert!(all["assumed"].to_string().contains("llama.expert_used_count"), "{all}");
    assert!(run(small_mixture(0, Some(0)), &[])["shape"]["experts"].is_null());
    // Experts that no tensor's name shows do no harm.
    let nameless = small_llama(2, "").kv("llama.expert_count", headers::Kv::U32(16));
    let nameless = run(nameless.kv("llama.expert_used_count", headers::Kv::U32(2)), &["--device-memory", "300KiB"]);
    assert_eq!(
        (&nameless["pass"]["filled_ahead"], &nameless["recommended"]["policy"]),
        (&Value::from(true), &Value::from("plan"))
    );
    assert!(nameless["assumed"].to_string().contains("no expert was found"), "{nameless}");
    for (count, used, parts) in [
        (16, 17, &["llama.expert_used_count is 17", "16 experts"][..]),
        (16, 0, &["llama.expert_used_count is 0", "from 1"]),
        (u32::MAX, 2, &["llama.expert_count is 4294967295", "from 0 to"]),
    ] {
        fs::write(&path, small_mixture(count, Some(used)).bytes()).unwrap();
        refused(&fixed, 1, parts);
    }
}

/// The expected use of experts is what a pager fills when they are drawn.
#[test]
fn plan_and_simulate_agree_on_experts() {
    use headers::Kv;
    let dir = scratch();
    let path = dir.path().join("mixture.gguf");
    let mut file = small_llama(0, "block_count").kv("llama.block_count", Kv::U32(8));
    for (key, value) in [("expert_count", 16), ("expert_used_count", 2), ("expert_feed_forward_length", 1024)] {
        file = file.kv(&format!("llama.{key}"), Kv::U32(value));
    }
    let tensor = 64 * 1024 * 16 * 2;
    let mut at = 64 * 128 * 6;
    for layer in 0..8 {
        for name in ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"] {
            file = file.info(&format!("blk.{layer}.{name}.weight"), &[64, 1024, 16], 1, at);
            at += tensor;
        }
    }
    // Only headers are read.
    let header = file.header();
    fs::write(&path, &header).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(header.len() as u64 + 64 + at).unwrap();
    for memory in ["12MiB", "24MiB"] {
        let machine = ["--machine", "laptop", "--json"];
        let limits = ["--device-memory", memory, "--headroom", "0", "--context", "1"];
        let found = json(&[&["plan", string(&path)][..], &machine, &limits].concat());
        assert_eq!((&found["fit"], &found["recommended"]["policy"]), (&Value::from("streamed"), &Value::from("kv")));
        let [budget, page] = ["device_budget_bytes", "page_bytes"].map(|key| found["recommended"][key].to_string());
        let read = |passes| {
            let how = ["--policy", "kv", "--device-budget", &budget, "--page-size", &page, "--passes", passes];
            let simulated = json(&[&["simulate", string(&path)][..], &machine, &how].concat());
            simulated["disk_read"]["bytes"].as_f64().unwrap()
        };
        let simulated = (read("300") - read("100")) / 200.0;
        let planned = found["pass"]["disk_read_bytes"].as_f64().unwrap();
        assert!((0.8..1.2).contains(&(planned / simulated)), "{memory}: {planned} planned, {simulated} simulated");
    }
}

fn told_used(found: &Value) -> f64 {
    found["shape"]["experts"]["used_per_pass"].as_f64().unwrap()
}

#[test]
fn plan_reads_experts_beside_safetensors() {
    let dir = scratch();
    let (mut entries, mut at) = (Vec::new(), 0);
    let mut tensor = |name: &str, elements: u64| {
        let end = at + 2 * elements;
        entries.push(format!(r#""{name}":{{"dtype":"BF16","shape":[{elements}],"data_offsets":[{at},{end}]}}"#));
        at = end;
    };
    for expert in 0..4 {
        tensor(&format!("model.layers.0.block_sparse_moe.experts.{expert}.w1.weight"), 3000);
    }
    tensor("model.layers.0.self_attn.q_proj.weight", 1000);
    let header = format!("{{{}}}", entries.join(","));
    fs::write(dir.path().join("model.safetensors"), headers::safetensors(&header, at as usize)).unwrap();
    let config = |experts: &str| {
        let text = format!(
            r#"{{"num_hidden_layers":1,"hidden_size":64,"num_attention_heads":4,
            "intermediate_size":96,"vocab_size":10{experts}}}"#
        );
        fs::write(dir.path().join("config.json"), text).unwrap();
    };
    let run = ["plan", string(dir.path()), "--machine", "rtx4090", "--json"];
    for (count, active) in [
        ("num_local_experts", "num_experts_per_tok"),
        ("num_experts", "num_experts_per_tok"),
        ("n_routed_experts", "num_experts_per_tok"),
    ] {
        config(&format!(r#","{count}":4,"{active}":1"#));
        let found = json(&run);
        assert_eq!(found["memory"]["weights_bytes"], 26_000);
        assert_eq!(found["pass"]["used_bytes"], 8_000, "{count}");
        assert_eq!(found["shape"]["experts"]["active_parameters"], 4_000);
    }
    config(
        r#","num_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":24,"shared_expert_intermediate_size":48"#,
    );
    let told = &json(&run)["shape"]["experts"];
    assert_eq!([&told["ffn"], &told["shared_ffn"], &told["active"]], [24, 48, 2]);
    config(r#","num_experts":0"#);
    assert!(json(&run)["shape"]["experts"].is_null());
    config(r#","num_experts":4"#);
    assert!(json(&run)["assumed"].to_string().contains("num_experts_per_tok"));
    for (bad, parts) in [
        (r#","num_experts":4,"num_experts_per_tok":5"#, ["num_experts_per_tok is 5", "the 4 experts"]),
        (r#","num_experts":4,"num_experts_per_tok":0"#, ["num_experts_per_tok is 0", "from 1"]),
        (r#","num_experts":"4""#, ["num_experts", "not a whole number"]),
        (r#","num_experts":99999999999"#, ["num_experts is 99999999999", "from 0 to"]),
    ] {
        config(bad);
        refused(&run, 1, &parts);
    }
}

#[test]
fn plan_refuses_machines_and_experts_that_cannot_be() {
    let described = |more: &[&'static str]| [&["plan", "--params", "7B"], more].concat();
    let on = |more: &[&'static str]| [&["plan", "--params", "7B", "--machine", "rtx4090"], more].concat();
    refused(&described(&["--machine", "h20"]), 1, &["\"h20\"", "rtx4090", "the closest name is h200"]);
    refused(&described(&["--machine", "none.json"]), 1, &["none.json", "check the path"]);
    refused(
        &on(&["--experts", "8", "--active-experts", "9"]),
        1,
        &["active experts is 9", "the 8 experts", "(give from 1"],
    );
    refused(&on(&["--experts", "0"]), 2, &["0 is not from 1"]);
    refused(&on(&["--experts", "8", "--active-experts", "0"]), 2, &["0 is not from 1"]);
    refused(&on(&["--active-experts", "2"]), 2, &["--experts"]);
    refused(&on(&["--expert-ffn", "2"]), 2, &["--experts"]);
    refused(&on(&["--experts", "1000000", "--expert-ffn", "100000"]), 1, &["1000000 experts", "smaller experts"]);

    let dir = scratch();
    let path = dir.path().join("mine.json");
    let whole = r#"{"name": "mine", "devices": 1, "device_memory": 24e9, "host_memory": 0, "link": null,
        "disk": {"read_bytes_per_second": 2e9, "write_bytes_per_second": 1e9, "latency_us": 0, "depth": 8},
        "compute": {"bytes_per_second": 1e11, "flops_per_second": 1e13, "step_us": 0}, "jitter": 0}"#;
    let run = ["plan", "--params", "1B", "--machine", string(&path), "--context", "512"];
    for (from, to, parts) in [
        ("\"device_memory\": 24e9, ", "", &["mine.json", "device_memory is missing"][..]),
        ("\"flops_per_second\": 1e13", "\"flops_per_second\": 0", &["compute.flops_per_second is 0", "from 1 to"]),
        (
            "flops_per_second",
            "flop_per_second",
            &["compute.flop_per_second does not exist", "is compute.flops_per_second"],
        ),
        ("\"link\": null", "\"link\": null, \"unified_memory\": 1", &["unified_memory is 1", "true or false"]),
        ("\"jitter\": 0}", "", &["mine.json", "not JSON"]),
    ] {
        fs::write(&path, whole.replacen(from, to, 1)).unwrap();
        refused(&run, 1, parts);
    }
    // Without a rate of operations, a pass takes as long as its bytes, and a step has no time. The output says so in
    // both cases.
    fs::write(&path, whole.replacen("\"flops_per_second\": 1e13, ", "", 1)).unwrap();
    let infer = json(&[&run[..], &["--json"]].concat());
    assert!(infer["pass"]["pass_s"].as_f64() > Some(0.02) && infer["assumed"].to_string().contains("flops_per_second"));
    let step = json(&[&run[..], &["--json", "--train", "--device-memory", "1TB"]].concat());
    assert!(step["pass"]["pass_s"].is_null() && step["assumed"].to_string().contains("flops_per_second"), "{step}");
}

#[test]
fn plan_refuses_bad_input() {
    let dir = scratch();
    let path = dir.path().join("small.gguf");
    let whole = small_llama(2, "").bytes();
    fs::write(&path, &whole).unwrap();
    let good = ["plan", string(&path), "--device-memory", "1GiB", "--disk", "1GB/s"];
    let with = |more: &[&'static str]| [&good[..], more].concat();
    for (more, parts) in [
        (&["--params", "7B"][..], &["MODEL", "--params"][..]),
        (&["--layers", "7"], &["--layers", "MODEL"]),
        (&["--host-memory", "lots"], &["lots", "512MiB"]),
        (&["--host-memory", "-5GiB"], &["-5GiB", "not understood"]),
        (&["--link", "16Gb/s"], &["a small b means bits", "2GB/s"]),
        (&["--link", "0GB/s"], &["0 bytes per second"]),
        (&["--link", "-1GB/s"], &["-1GB/s", "not understood"]),
        (&["--context", "0"], &["0 is not from 1"]),
        (&["--context", "-3"], &["-3", "whole number"]),
        (&["--batch", "1.5"], &["1.5", "whole number"]),
        (&["--train", "--infer"], &["--infer", "--train"]),
        (&["--train", "--kv", "f16"], &["--kv", "--train"]),
        (&["--optimizer", "adam"], &["--train"]),
        (&["--train", "--optimizer", "adamw"], &["adamw", "the closest name is adam"]),
        (&["--kv", "q4"], &["q4", "f16", "q8"]),
        (&["--target", "0"], &["above 0"]),
        (&["--compute", "5"], &["80ms"]),
        (&["--compute", "-5ms"], &["-5ms"]),
        (&["--headroom", "20%"], &["--headroom"]),
    ] {
        refused(&with(more), 2, parts);
    }
    refused(&["plan", string(&path), "--device-memory", "0", "--disk", "1GB/s"], 2, &["0 bytes", "24GiB"]);
    refused(&["plan", string(&path), "--device-memory", "1GiB", "--disk", "2GB"], 2, &["2GB", "2GB/s"]);
    refused(&["plan", string(&path), "--link", "20GB/s"], 1, &["--link", "--device-memory"]);
    for budget in ["700", "4095"] {
        let parts = ["has no unit", &format!("{budget}MB"), &format!("{budget}MiB")];
        refused(&["plan", string(&path), "--device-memory", budget, "--disk", "1GB/s"], 2, &parts);
    }
    refused(&["plan", "--device-memory", "1GiB", "--disk", "2GB/s"], 2, &["MODEL"]);
    let described = |more: &[&'static str]| [&["plan", "--device-memory", "1GiB", "--disk", "2GB/s"], more].concat();
    refused(&described(&["--params", "70 dozen"]), 2, &["70 dozen", "7B"]);
    refused(&described(&["--params", "7B", "--dtype", "bf17"]), 2, &["bf17", "BF16"]);
    refused(&described(&["--params", "7B", "--heads", "8", "--kv-heads", "3"]), 1, &["3 heads of keys", "check both"]);
    let uneven = described(&["--params", "7B", "--heads", "7", "--hidden", "4096"]);
    refused(&uneven, 1, &["7 heads do not divide a hidden size of 4096"]);
    refused(
        &described(&["--params", "7B", "--batch", "1000000000000", "--context", "1000000000000"]),
        1,
        &["keys and values"],
    );
    refused(&described(&["--params", "7B", "--dtype", "q4_k", "--train", "--optimizer", "sgd"]), 1, &["Q4_K", "BF16"]);

    refused(
        &["plan", string(&dir.path().join("none")), "--device-memory", "1GiB", "--disk", "1GB/s"],
        1,
        &["none", "path"],
    );
    let near = "the closest names are llama-3.3-70b, llama-3.2-1b, llama-3.2-3b";
    refused(&["plan", "llama-3.3-7b", "--machine", "h200"], 1, &["llama-3.3-7b", near, "qwen3-8b"]);
    // Nothing is measured for a model that is not known.
    refused(&["plan", "llama-3.3-7b"], 1, &["llama-3.3-7b", near]);
    refused(&["simulate", "llama-3.3-7b"], 1, &["llama-3.3-7b", near]);
    refused(&["plan", "gone.gguf", "--machine", "h200"], 1, &["gone.gguf", "path"]);
    refused(&with(&["--dtype", "q4_k"]), 1, &["small.gguf", "leave --dtype out"]);
    for len in [5, 30, 400, whole.len() - 1] {
        fs::write(&path, &whole[..len]).unwrap();
        refused(&good, 1, &["small.gguf", "incomplete"]);
    }
    for key in ["block_count", "embedding_length", "attention.head_count", "feed_forward_length"] {
        fs::write(&path, small_llama(2, key).bytes()).unwrap();
        refused(&with(&["--json"]), 1, &[&format!("llama.{key}"), "small.gguf", "describe the model"]);
    }
    fs::write(&path, small_llama(2, "attention.head_count_kv").bytes()).unwrap();
    assert_eq!(json(&with(&["--json"]))["shape"]["kv_heads"], 4, "as many as there are heads");
    let odd = |key: &str, value| small_llama(2, key).kv(&format!("llama.{key}"), value).bytes();
    for (bytes, parts) in [
        (odd("block_count", headers::Kv::U32(0)), ["llama.block_count", "from 1"]),
        (odd("block_count", headers::Kv::str("two")), ["llama.block_count", "\"two\""]),
        (odd("attention.head_count", headers::Kv::U32(65)), ["65 heads", "check both"]),
        (
            odd("attention.head_count_kv", headers::Kv::Array(4, vec![headers::Kv::U32(2), headers::Kv::U32(1)])),
            ["llama.attention.head_count_kv", "layers that differ"],
        ),
    ] {
        fs::write(&path, bytes).unwrap();
        refused(&good, 1, &parts);
    }
}

/// Where no machine is named, memory, disk and copies of this one are measured, and each number says where it comes
/// from. What a run has noted of the disk is used, until `doctor` deletes it.
#[test]
fn this_machine_is_one() {
    let (dir, cache) = (scratch(), scratch());
    let path = dir.path().join("small.gguf");
    // So many bytes say how fast their disk is.
    fs::write(&path, [small_llama(2, "").bytes(), vec![7; 40 << 20]].concat()).unwrap();
    let run = |arguments: &[&str]| {
        let output = program().env("XDG_CACHE_HOME", cache.path()).args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let examine = || run(&["doctor", "--dir", string(dir.path()), "--json"])["directories"][0].clone();
    let disk = examine();
    let given = ["plan", string(&path), "--disk", "1GB/s", "--json"];
    let from = |found: &Value, what: &str| {
        let sources = found["resources"]["sources"].as_array().unwrap().clone();
        let source = sources.iter().find(|source| source["what"] == what);
        source.unwrap_or_else(|| panic!("{what}: {found}"))["from"].as_str().unwrap().to_owned()
    };
    let found = run(&given);
    assert_eq!(
        (from(&found, "disk"), &found["resources"]["machine"]),
        ("given by --disk".into(), &"this machine".into())
    );
    assert!(from(&found, "device memory").starts_with("what is free now of "), "{found}");
    assert!(from(&found, "computing").contains("copies") || from(&found, "computing").contains("copy"), "{found}");
    for rate in ["device_bytes", "disk_bytes_per_second", "memory_bytes_per_second"] {
        assert!(found["resources"][rate].as_u64().unwrap() > 0, "{rate}: {found}");
    }
    // The memory of a GPU is another, and the machine's is the host's.
    let gpu = run(&[&given[..], &["--device-memory", "1GiB", "--link", "9GB/s"]].concat());
    assert_eq!(gpu["resources"]["machine"], Value::Null, "nothing is left to measure");

    let asked = ["plan", string(&path), "--json"];
    let simulated = ["simulate", string(&path), "--device-budget", "1MiB", "--page-size", "4KiB", "--json"];
    if disk["in_memory"] == true || disk["direct"] == false {
        return refused(&asked, 1, &["cannot be measured", "--disk", "--machine"]);
    }
    let measured = format!("measured now, by reading {}", path.canonicalize().unwrap().display());
    assert_eq!(from(&run(&asked), "disk"), measured);
    let gpu = run(&["plan", string(&path), "--device-memory", "1GiB", "--link", "9GB/s", "--json"]);
    assert!(from(&gpu, "disk").starts_with("noted by an earlier run, of the disk that has "), "{gpu}");
    assert!(gpu["resources"]["host_bytes"].as_u64().unwrap() > 0, "{gpu}");
    assert!(from(&gpu, "host memory").starts_with("what is free now"), "{gpu}");
    assert!(gpu["pass"]["compute_s"].is_null() && gpu["resources"]["memory_bytes_per_second"].is_null(), "{gpu}");
    let found = run(&simulated);
    assert_eq!(found["machine"], "this machine");
    let sources = found["sources"].to_string();
    for part in ["what is free now", "a read begins after", "noted by an earlier run", "a step takes 20 us"] {
        assert!(sources.contains(part), "{part:?} is not in {sources}");
    }
    examine();
    assert_eq!(from(&run(&asked), "disk"), measured, "doctor deletes the note");

    // A model that is no file is taken to be in the current folder, and nothing is left there.
    let folder = scratch();
    let output = program().current_dir(folder.path()).args(["plan", "smollm2-135m"]).output().unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(fs::read_dir(folder.path()).unwrap().next().is_none());
    for part in ["this machine: ", "device memory: what is free now", "disk: ", "computing: ", "waiting for pages"] {
        assert!(table.contains(part), "{part:?} is not in\n{table}");
    }
}

/// A well-known model needs no file, and no sizes.
#[test]
fn plan_knows_models_by_name() {
    let plan = |dtype: &str| {
        json(&["plan", "Llama-3.3-70B", "--dtype", dtype, "--machine", "h200", "--context", "8192", "--json"])
    };
    let found = plan("q4_k");
    assert_eq!((found["shape"]["kv_heads"].as_u64(), found["shape"]["layers"].as_u64()), (Some(8), Some(80)));
    assert_eq!(found["shape"]["parameters"].as_u64(), Some(70_553_706_496));
    // 2 x 80 layers x 8 heads x 128 elements x 2 bytes x 8192 tokens.
    assert_eq!(found["memory"]["kv_bytes"].as_u64(), Some(2 * 80 * 8 * 128 * 2 * 8192));
    assert_eq!(plan("bf16")["shape"]["dtype"], "BF16");
}

/// Requests of three conversations in turn, each longer than before.
fn made_trace() -> String {
    let line = |turn: u64, who: u64| {
        let ids: Vec<u64> = (0..=turn).map(|block| who * 1_000 + block).collect();
        format!("{{\"timestamp\": {turn}, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": {ids:?}}}\n")
    };
    (0..30).flat_map(|turn| (0..3).map(move |who| line(turn, who))).collect()
}

#[test]
fn policies_compares_them_with_the_optimum() {
    let dir = scratch();
    let path = dir.path().join("made.jsonl");
    fs::write(&path, made_trace()).unwrap();
    let found = json(&["policies", "--trace", string(&path), "--capacity", "10,90", "--json"]);
    assert_eq!((found["uses"].as_u64(), found["pages"].as_u64()), (Some(3 * 30 * 31 / 2), Some(90)));
    let capacities = found["capacities"].as_array().unwrap();
    assert_eq!(capacities.len(), 2);
    for (capacity, pages) in capacities.iter().zip([10, 90]) {
        assert_eq!(capacity["pages"], pages);
        let policies = capacity["policies"].as_array().unwrap();
        assert_eq!(policies.len(), AnyPolicy::all(&[]).count());
        let best = capacity["optimum"]["hit_ratio"].as_f64().unwrap();
        for policy in policies {
            let name = &policy["policy"];
            let ratio = policy["hit_ratio"].as_f64().unwrap();
            assert_eq!(policy["hits"].as_u64().unwrap() + policy["misses"].as_u64().unwrap(), 1395, "{name}");
            assert!((policy["regret"].as_f64().unwrap() - (best - ratio)).abs() < 1e-9 && ratio <= best, "{name}");
            assert!(policy["ns_per_use"].as_f64().unwrap() > 0.0);
            if pages == 90 {
                assert_eq!(policy["misses"], 90, "{name}: everything fits");
            }
        }
    }
    // LRU forgets a conversation before its next turn; the optimum keeps some of it.
    assert_eq!(capacities[0]["policies"][0]["policy"], "lru");
    assert!(capacities[0]["policies"][0]["regret"].as_f64().unwrap() > 0.1);
    let table = text(&["policies", "--trace", string(&path), "--capacity", "10", "--policy", "2q,lru,2q"]);
    for part in [
        "1395 uses, 90 of which write, of 90 pages",
        "with room for 10",
        "optimum",
        "2q",
        "lru",
        "hit ratio",
        "pages written",
    ] {
        assert!(table.contains(part), "{part:?} is not in\n{table}");
    }
    assert_eq!((table.matches("2q").count(), table.contains("sieve")), (1, false), "{table}");
}

/// One trace in the forms that others write finds the same in each.
#[test]
fn policies_reads_the_forms_of_others() {
    let dir = scratch();
    let ids: Vec<u64> = (0..4000u64).map(|n| n * n % 331).collect();
    let lines: String = ids.iter().map(|id| format!("{id}\n")).collect();
    let table: String = ids.iter().enumerate().map(|(at, id)| format!("{at},{id},4096\n")).collect();
    let record = |id: &u64| [&0u32.to_le_bytes()[..], &id.to_le_bytes(), &[0; 12]].concat();
    let records: Vec<u8> = ids.iter().flat_map(record).collect();
    let with_names = format!("time,obj_id,size\n{table}");
    let lis: String = ids.iter().enumerate().map(|(at, id)| format!("{id} 1 0 {at}\n")).collect();
    let forms: [(&str, &[u8], &[&str]); 5] = [
        ("ids.txt", lines.as_bytes(), &[]),
        ("table.csv", table.as_bytes(), &["--column", "2"]),
        ("names.csv", with_names.as_bytes(), &[]),
        ("w01.oracleGeneral.bin", &records, &[]),
        ("P1.lis", lis.as_bytes(), &[]),
    ];
    let found = forms.map(|(name, bytes, more)| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        let asked = ["policies", "--trace", string(&path), "--capacity", "50", "--policy", "lru,arc", "--json"];
        let mut found = json(&[&asked[..], more].concat());
        assert_eq!((found["uses"].as_u64(), found["writes"].as_u64()), (Some(4000), Some(0)), "{name}");
        found["capacities"][0]["policies"]
            .as_array_mut()
            .unwrap()
            .drain(..)
            .map(|policy| policy["hits"].clone())
            .collect()
    });
    assert!(found.iter().all(|hits: &Vec<Value>| *hits == found[0] && hits.len() == 2), "{found:?}");
}

#[test]
fn policies_refuses_bad_input() {
    let dir = scratch();
    let path = dir.path().join("made.jsonl");
    let trace = string(&path);
    let run = |capacity, policy| ["policies", "--trace", trace, "--capacity", capacity, "--policy", policy];
    refused(&run("10", "lru"), 1, &["made.jsonl", "check the path"]);
    fs::write(&path, made_trace()).unwrap();
    refused(&run("10", "s3-fifo"), 2, &["\"s3-fifo\"", "the closest name is s3fifo", "wtinylfu"]);
    refused(
        &run("10", "plan-declard"),
        2,
        &["the closest name is plan-declared", "wtinylfu", "all, opt, plan-declared"],
    );
    refused(&run("0", "lru"), 2, &["capacity \"0\" holds no page", "from 1 up"]);
    refused(&run("-1", "lru"), 2, &["capacity \"-1\" is not understood", "from 1 up"]);
    refused(&run("5,many", "lru"), 2, &["capacity \"many\" is not understood"]);
    refused(&run("4294967296", "lru"), 2, &["more than 4294967295 pages"]);
    // Memory is taken for pages that exist, not for the capacity.
    assert!(text(&run("4294967295", "wtinylfu")).contains("with room for 4294967295"));
    let optimum = text(&run("10", "opt"));
    assert!(optimum.contains("optimum") && !optimum.contains("lru"), "{optimum}");
    refused(&["policies", "--workload", "kv", "--uses", "4294967295"], 1, &["more than the 4294967294", "fewer"]);
    refused(&["policies"], 2, &["--trace"]);
    refused(&["policies", "--trace", trace, "--policy", "plan-declared"], 1, &["plan-declared", "has none"]);
    refused(&["policies", "--workload", "decoed"], 2, &["\"decoed\"", "the closest name is decode", "prefill, moe"]);
    refused(&["policies", "--workload", "kv", "--trace", trace], 2, &["--trace", "--workload"]);
    refused(&["policies", "--workload", "kv", "--uses", "0"], 1, &["0 uses", "at least 1"]);
    refused(&["policies", "--workload", "kv", "--model", "m.gguf"], 1, &["m.gguf"]);
    // A truncated header, and one whose tensors are in no layers.
    let model = models::synthetic(&[5000, 70_000]);
    let decode = ["policies", "--workload", "decode", "--model", string(&model.path)];
    refused(&decode, 1, &["numbered layers", "give another one"]);
    // A drawing must not replace the model that it was made from.
    for over in [&model.path, &model.dir.path().join(".").join("model.safetensors")] {
        let drawn = [&decode[..], &["--svg", string(over)]].concat();
        refused(&drawn, 1, &["it is a file of the model", "--svg"]);
        assert_eq!(fs::read(&model.path).unwrap(), model.bytes);
    }
    for part in [0, 4, 8, 60] {
        fs::write(&model.path, &model.bytes[..part]).unwrap();
        refused(&decode, 1, &["model.safetensors"]);
    }
    refused(&["policies", "--trace", trace, "--svg", trace], 1, &["it is the trace", "--svg"]);
    refused(&["policies", "--trace", trace, "--svg", string(dir.path())], 1, &["no regular file", "--svg"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), made_trace());
    let good = made_trace();
    for (bad, part) in [
        (good[..good.len() - 4].to_owned(), "line 90 of the trace"),
        (format!("{good}[1, 2]\n"), "line 91 of the trace"),
        (format!("{good}{{\"hash_ids\": [\"1\"]}}\n"), "line 91 of the trace"),
    ] {
        fs::write(&path, bad).unwrap();
        refused(&run("10", "lru"), 1, &[part, "made.jsonl", "expected one JSON object a line"]);
    }
    for (bad, part) in [
        (String::new(), "is empty"),
        ("9".repeat(20 << 20), "longer than 16 MiB"),
        ("1,2\n3,4\n".to_owned(), "say which column"),
        ("a\0b".to_owned(), "name its form: capture, mooncake, text, oracle-general, lis"),
    ] {
        fs::write(&path, bad).unwrap();
        refused(&run("10", "lru"), 1, &[part, "made.jsonl"]);
    }
    refused(&["policies", "--trace", string(dir.path()), "--capacity", "1"], 1, &["read the trace"]);
    refused(&["policies", "--workload", "kv", "--column", "2"], 2, &["--column", "--workload"]);
    refused(&["policies", "--trace", trace, "--format", "paper"], 2, &["\"paper\"", "mooncake"]);
    refused(&["policies", "--trace", trace, "--column", "0"], 2, &["\"0\"", "from 1"]);
}

const SIMULATED: [&str; 7] = ["simulate", "--params", "7B", "--layers", "32", "--machine", "rtx4090"];

fn simulated(more: &[&'static str]) -> Vec<&'static str> {
    SIMULATED.iter().chain(more).copied().collect()
}

#[test]
fn simulate_tells_how_long_passes_take_elsewhere() {
    let found = json(&simulated(&["--json", "--passes", "3", "--device-budget", "6GB"]));
    assert_eq!(found["machine"], "rtx4090");
    assert_eq!(found["passes_s"].as_array().unwrap().len(), 3);
    let seconds = |name: &str| found[name].as_f64().unwrap();
    let (speed, pass) = (seconds("tokens_per_s"), seconds("median_pass_s"));
    assert!((speed * pass - 1.0).abs() < 1e-9 && found["sources"].is_null(), "{found}");
    // 14 GB less the resident part, over a disk of 7.45 GB/s. The first pass reads everything.
    assert!((1.8..2.2).contains(&seconds("first_pass_s")), "{found}");
    assert!((1.0..1.5).contains(&seconds("median_pass_s")), "{found}");
    assert!(found["disk_read"]["utilisation"].as_f64().unwrap() > 0.9, "{found}");
    assert!(found["stalls"].as_array().unwrap().iter().any(|stall| stall["tier"] == "disk"), "{found}");
    // Another seed gives another run, the same seed the same run.
    let with = |seed| text(&simulated(&["--json", "--device-budget", "6GB", "--seed", seed]));
    assert_eq!(with("7"), with("7"));
    assert_ne!(with("7"), with("8"));
    let table = text(&simulated(&["--device-budget", "6GB"]));
    for part in ["7000000000 parameters of BF16", "median of the others", "tok/s", "host to device", "late prefetch"] {
        assert!(table.contains(part), "{part}: {table}");
    }
}

/// A model that is known by name has the weights that `plan` counts, and takes about as long as that forecasts. Its
/// embedding is the output matrix too: `simulate` counts the rows of one that is not, and `plan` does not.
#[test]
fn simulate_knows_models_by_name() {
    let known = ["--dtype", "q4_k", "--machine", "rtx4090", "--json"];
    for model in ["llama-3.2-3b", "qwen3-0.6b"] {
        let planned = json(
            &[&["plan", model, "--device-memory", "1GiB", "--host-memory", "0", "--context", "64"][..], &known]
                .concat(),
        );
        let [budget, page] = ["device_budget_bytes", "page_bytes"].map(|key| planned["recommended"][key].to_string());
        let policy = planned["recommended"]["policy"].as_str().unwrap();
        let how = ["--device-budget", &budget, "--page-size", &page, "--policy", policy, "--passes", "24"];
        let found = json(&[&["simulate", model][..], &known, &how].concat());
        assert_eq!(found["model_bytes"], planned["memory"]["weights_bytes"]);
        assert_eq!(found["model"], format!("{model} in Q4_K"));
        let ratio = planned["pass"]["pass_s"].as_f64().unwrap() / found["median_pass_s"].as_f64().unwrap();
        assert!((0.9..1.1).contains(&ratio), "{model}: {ratio}");
    }
}

#[test]
fn simulate_keeps_what_happened_when_that_is_asked_for() {
    let run = |more: &[&'static str]| {
        text(&simulated(&[&["--json", "--device-budget", "6GB", "--host-budget", "2GB"][..], more].concat()))
    };
    let (without, with) = (run(&["--passes", "2"]), run(&["--passes", "2", "--timeline"]));
    assert_eq!(with, run(&["--passes", "2", "--timeline"]), "bit for bit");
    let (mut found, without): (Value, Value) =
        (serde_json::from_str(&with).unwrap(), serde_json::from_str(&without).unwrap());
    let timeline = found.as_object_mut().unwrap().remove("timeline").unwrap();
    assert_eq!(found, without, "nothing else differs");
    let names: Vec<_> = timeline["lanes"].as_array().unwrap().iter().map(|lane| lane["name"].as_str()).collect();
    let all = ["compute", "stalled", "link up", "link down", "disk read", "disk write"].map(Some);
    assert_eq!(names, all);
    assert!(timeline["lanes"][0]["spans"].as_array().unwrap().len() > 30, "steps");
    let ratio = |name: &str| timeline[name].as_f64().unwrap();
    assert!(ratio("hit_ratio") > 0.0 && ratio("hit_ratio") <= ratio("opt_hit_ratio"));
    assert_eq!(timeline["ratio_uses"], found["uses"]);
    assert_eq!(timeline["residency"]["files"][0]["pages"], found["pages"]);
    assert!(timeline["residency"]["samples"].as_array().unwrap().len() > 100);
    assert_eq!(timeline["peak_device_frames"], found["frames"]);
    assert_eq!(found["weights"], serde_json::json!([{"class": "other", "bytes": found["model_bytes"]}]));
    let pages = found["pages"].as_u64().unwrap() * found["page_bytes"].as_u64().unwrap();
    assert_eq!(found["tail_bytes"].as_u64().unwrap(), pages - found["model_bytes"].as_u64().unwrap());
    assert_eq!(found["ceiling"]["disk_read_bytes_per_second"].as_f64().unwrap(), 7.45e9);
    // The size is bounded, however long the run.
    let long = run(&["--passes", "300", "--timeline"]);
    assert!(long.len() < 2 << 20 && with.len() < 2 << 20, "{} {}", with.len(), long.len());
    refused(&simulated(&["--timeline"]), 2, &["--json"]);
}

#[test]
fn simulate_reads_real_headers_and_machine_files() {
    let dir = scratch();
    let model = dir.path().join("model.gguf");
    fs::write(&model, headers::rich_gguf().bytes()).unwrap();
    let machine = dir.path().join("mine.json");
    let fields = r#"{"name": "mine", "devices": 2, "device_memory": 1e9, "host_memory": 1e9, "link": null,
        "disk": {"read_bytes_per_second": 1e9, "write_bytes_per_second": 1e9, "latency_us": 100, "depth": 8},
        "compute": {"bytes_per_second": 1e10, "step_us": 1}, "jitter": 0}"#;
    fs::write(&machine, fields).unwrap();
    let run = |more: &[&str]| {
        let mut arguments = vec!["simulate", string(&model), "--machine", string(&machine), "--page-size", "4KiB"];
        arguments.extend(more);
        json(&arguments)
    };
    let found = run(&["--json", "--host-budget", "1MiB"]);
    assert_eq!((&found["machine"], &found["devices"]), (&Value::from("mine"), &Value::from(2)));
    assert!(found["first_pass_s"].as_f64().unwrap() > 0.0);
    // Bad files.
    let refuse = |path: &Path, parts: &[&str]| {
        refused(&["simulate", string(&model), "--machine", string(path)], 1, parts);
    };
    refuse(&dir.path().join("none.json"), &["none.json", "check the path"]);
    for (from, to, parts) in [
        ("\"latency_us\": 100, ", "", &["mine.json", "disk.latency_us is missing"][..]),
        ("1e10", "-5", &["compute.bytes_per_second is -5", "from 1 to"]),
        ("\"depth\": 8", "\"depth\": \"8\"", &["disk.depth is \"8\", not a number"]),
        ("\"jitter\"", "\"jiter\"", &["jiter does not exist", "the closest is jitter"]),
        ("\"jitter\"", "\"devices\": 2, \"jitter\"", &["a field is there twice", "\"devices\""]),
        ("\"depth\": 8", "\"depth\": 8, \"depth\": 9", &["a field is there twice", "\"depth\""]),
        ("{\"name\"", "\"name\"", &["mine.json", "not JSON"]),
    ] {
        fs::write(&machine, fields.replacen(from, to, 1)).unwrap();
        refuse(&machine, parts);
    }
    // A truncated header.
    let bytes = fs::read(&model).unwrap();
    fs::write(&model, &bytes[..200]).unwrap();
    refused(&["simulate", string(&model), "--machine", "laptop"], 1, &["model.gguf"]);
}

#[test]
fn simulate_refuses_bad_input() {
    refused(&["simulate", "m", "--machine", "h20"], 1, &["\"h20\"", "rtx4090", "the closest name is h200"]);
    refused(&["simulate", "m", "--machine", "h200"], 1, &["\"m\" is neither a file nor a model", "llama-3.3-70b"]);
    // As hubs name models.
    refused(
        &["plan", "meta-llama/Llama-3.3-7B", "--machine", "h200"],
        1,
        &["\"Llama-3.3-7B\" is neither", "llama-3.3-70b"],
    );
    refused(&["simulate", "m.gguf", "--machine", "h200"], 1, &["m.gguf", "check the path"]);
    let dense = ["simulate", "llama-3.2-1b", "--machine", "h200", "--experts-used", "2"];
    refused(&dense, 1, &["llama-3.2-1b has no experts"]);
    let more = ["simulate", "mixtral-8x7b", "--machine", "h200", "--experts-used", "9"];
    refused(&more, 1, &["9 of 8 experts"]);
    refused(&["simulate", "--params", "1B", "--machine", "/dev/zero"], 1, &["/dev/zero has more than"]);
    refused(&["simulate", "--machine", "h200"], 2, &["MODEL"]);
    refused(&simulated(&["--passes", "0"]), 2, &["0 passes", "at least 1"]);
    refused(&simulated(&["--passes", "many"]), 2, &["\"many\"", "whole number"]);
    refused(&simulated(&["--policy", "plann"]), 2, &["the closest name is plan"]);
    refused(&simulated(&["--device-budget", "25GB"]), 1, &["more than machine rtx4090 has"]);
    refused(&simulated(&["--device-budget", "1MiB"]), 1, &["holds no page of 2.0 MiB"]);
    let large = simulated(&["--device-budget", "64MiB", "--step", "1GiB"]);
    refused(&large, 1, &["are wanted at once, but the device budget holds 32"]);
    refused(&simulated(&["--experts", "4", "--experts-used", "5"]), 1, &["5 of 4 experts"]);
    refused(&simulated(&["--experts", "4", "--experts-used", "0"]), 1, &["0 of 4 experts"]);
    refused(&simulated(&["--experts-used", "2"]), 1, &["--experts-used 2", "give --experts"]);
    refused(&simulated(&["--lookahead", "much"]), 2, &["\"much\"", "or auto, or off"]);
    let layers = ["simulate", "--params", "7B", "--machine", "h200", "--layers", "4000000000"];
    refused(&layers, 1, &["4000000000 layers", "16777216"]);
    refused(&["simulate", "--params", "lots", "--machine", "h200"], 2, &["\"lots\"", "70B"]);
    refused(&["simulate", "--params", "1B", "--layers", "0", "--machine", "h200"], 1, &["at least one layer"]);
}

/// A capture of passes over two files, of which one page in ten is of no class.
fn made_capture() -> Vec<u8> {
    let segment = |id: u32| {
        let classes = vec![ClassRun { first: 0, pages: 9, class: format!("class {id}") }];
        CapturedSegment { id: SegmentId::new(id), name: format!("{id}.gguf"), pages: 10, classes }
    };
    let header = CaptureHeader {
        page_size: PageSize::new(Bytes::kib(64)).unwrap(),
        about: "made by a test".into(),
        segments: vec![segment(3), segment(5)],
    };
    let mut writer = CaptureWriter::new(Vec::new(), &header).unwrap();
    for _ in 0..20 {
        for page in 0..20 {
            let segment = SegmentId::new(if page < 10 { 3 } else { 5 });
            let page = PageId { segment, index: PageIndex::new(page % 10) };
            writer.used(PageUse { page, write: page.index.get() == 7 }).unwrap();
        }
        writer.pass().unwrap();
    }
    writer.finish().unwrap()
}

#[test]
fn policies_reads_captures_and_draws_them() {
    let dir = scratch();
    let (path, svg) = (dir.path().join("made.trace"), dir.path().join("made.svg"));
    let capture = made_capture();
    fs::write(&path, &capture).unwrap();
    let found = json(&["policies", "--trace", string(&path), "--capacity", "10,20", "--svg", string(&svg), "--json"]);
    assert_eq!((&found["uses"], &found["pages"], &found["passes"]), (&400.into(), &20.into(), &20.into()));
    assert_eq!((&found["page_bytes"], &found["about"]), (&65536.into(), &"made by a test".into()));
    let classes: Vec<_> = found["classes"].as_array().unwrap().iter().map(|class| class["pages"].as_u64()).collect();
    assert_eq!(classes, [Some(9), Some(9), Some(2)], "two of two files, and what has none");
    let ten = &found["capacities"][0];
    assert_eq!(ten["policies"][0]["policy"], "lru");
    assert_eq!((&ten["policies"][0]["hits"], &ten["policies"][0]["bytes_moved"]), (&0.into(), &(400 * 65536).into()));
    assert_eq!(ten["optimum"]["bytes_moved"], ten["optimum"]["misses"].as_u64().unwrap() * 65536);
    // Two pages a pass are written, and evicted before the next pass; the last one is resident at the end.
    assert_eq!((&found["writes"], &ten["policies"][0]["bytes_written"]), (&40.into(), &(39 * 65536).into()));
    assert!(ten["optimum"]["written_back"].as_u64().unwrap() < 39);
    assert_eq!(found["capacities"][1]["policies"][0]["written_back"], 0, "everything fits");
    assert!(
        found["lru"]
            .as_array()
            .unwrap()
            .iter()
            .all(|point| { point["hit_ratio"].as_f64().unwrap() == if point["pages"] == 20 { 0.95 } else { 0.0 } })
    );
    let drawn = fs::read_to_string(&svg).unwrap();
    assert!(drawn.starts_with("<svg ") && drawn.trim_end().ends_with("</svg>"), "{drawn}");
    for part in ["capacity in pages", "miss ratio", "optimum", "lru, every capacity", "wtinylfu"] {
        assert!(drawn.contains(part), "{part:?} is not drawn");
    }
    let table = text(&["policies", "--trace", string(&path), "--policy", "plan,lru"]);
    for part in [
        "20 pages of 64.0 KiB, 1.2 MiB in all, in 20 passes",
        "made by a test",
        "class 5",
        "a pass",
        "written",
        "with room for 18",
    ] {
        assert!(table.contains(part), "{part:?} is not in\n{table}");
    }

    let names = |found: &Value| -> Vec<String> {
        let policies = found["capacities"][0]["policies"].as_array().unwrap();
        policies.iter().map(|policy| policy["policy"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&found).len(), AnyPolicy::all(&[]).count() + 1, "and plan, which is told the order");
    let args = ["policies", "--trace", string(&path), "--capacity", "10", "--policy", "plan-declared,lru", "--json"];
    let found = json(&args);
    assert_eq!(names(&found), ["plan-declared", "lru"]);
    assert_eq!(found["capacities"][0]["policies"][0]["hits"], found["capacities"][0]["optimum"]["hits"]);

    refused(&["policies", "--trace", string(&path), "--page-size", "2MiB"], 1, &["64.0 KiB", "2.0 MiB", "--page-size"]);
    for (bad, part) in [
        (capture[..capture.len() - 1].to_vec(), "is incomplete"),
        (capture[..40].to_vec(), "is incomplete"),
        ([&capture[..], b"x"].concat(), "follows its end"),
        (capture.iter().map(|byte| byte ^ u8::from(*byte == b'\n')).collect(), "made.trace"),
    ] {
        fs::write(&path, bad).unwrap();
        refused(&["policies", "--trace", string(&path), "--svg", string(&svg)], 1, &[part, "made.trace"]);
        assert_eq!(fs::read_to_string(&svg).unwrap(), drawn, "what was there stays");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "nothing else is left");
}

/// A model of twelve layers. Sorted by name, the tenth would come before the second.
fn dense_model() -> models::Synthetic {
    let mut model = models::synthetic(&[]);
    let mut entries = vec![
        "\"model.embed_tokens.weight\":{\"dtype\":\"U8\",\"shape\":[64,512],\"data_offsets\":[0,32768]}".to_owned(),
    ];
    let mut end = 32_768;
    for layer in 0..12 {
        let name = format!("model.layers.{layer}.self_attn.q_proj.weight");
        let next = end + 9000;
        entries.push(format!("\"{name}\":{{\"dtype\":\"U8\",\"shape\":[90,100],\"data_offsets\":[{end},{next}]}}"));
        end = next;
    }
    model.bytes = headers::safetensors(&format!("{{{}}}", entries.join(",")), end);
    fs::write(&model.path, &model.bytes).unwrap();
    model
}

#[test]
fn policies_makes_workloads() {
    for name in ["decode", "prefill", "moe", "kv", "train", "mixed"] {
        let run = |seed| {
            json(&["policies", "--workload", name, "--uses", "30000", "--policy", "lru,fifo", "--seed", seed, "--json"])
        };
        let (one, again) = (run("1"), run("1"));
        assert_eq!(one["uses"], 30000, "{name}");
        assert_eq!((&one["lru"], &one["classes"]), (&again["lru"], &again["classes"]), "{name}");
        let curve = one["lru"].as_array().unwrap();
        for capacity in one["capacities"].as_array().unwrap() {
            let at = curve.iter().find(|point| point["pages"] == capacity["pages"]).unwrap();
            assert_eq!(at["hit_ratio"], capacity["policies"][0]["hit_ratio"], "{name}: {}", capacity["pages"]);
        }
    }
    let model = models::synthetic(&[5000, 70_000]);
    let path = string(&model.path);
    refused(&["policies", "--workload", "decode", "--model", path], 1, &["numbered layers", "give another"]);
    let layers = dense_model();
    let path = string(&layers.path);
    let found =
        json(&["policies", "--workload", "decode", "--model", path, "--page-size", "4KiB", "--uses", "5000", "--json"]);
    let pages = found["pages"].as_u64().unwrap();
    let bytes = fs::metadata(&layers.path).unwrap().len();
    assert!(pages > 20 && pages <= bytes.div_ceil(4096), "{pages} pages of {bytes} bytes");
    refused(&["policies", "--workload", "moe", "--model", path], 1, &["needs a model with experts"]);
}

const GENERATED: &str = r#"{"model":"<b>m</b>.gguf","device":"host","policy":"plan","io":"io_uring","page_bytes":65536,
"device_budget_bytes":1048576,"host_budget_bytes":0,"prompt_tokens":[1,2],"tokens":[3],"ttft_s":0.5,"decode_tok_s":9.5,
"pass_s_median":0.1,"compute_s":0.6,"stall_s":0.4,"overlap":0.5,"disk_read_bytes":10485760,"disk_written_bytes":0,
"link_bytes":0,"disk_busy_s":2.0,"link_busy_s":0.0,"hit_ratio":0.25,"opt_hit_ratio":0.5,"ratio_uses":99,
"peak_device_bytes":1048576,"peak_host_bytes":0,"peak_rss_bytes":5242880,"interrupted":false,
"memory":{"weights":[{"class":"attention","bytes":100000},{"class":"norm","bytes":50000}],"tail_bytes":46608,
"keys_values_bytes":2097152,"activations_bytes":1048576},
"stalls":{"disk fault":{"count":4,"seconds":0.4},"zero fill":{"count":0,"seconds":0.0}}}"#;

const TIMELINE: &str = r#"{"traceEvents":[{"name":"read","cat":"disk","ph":"X","ts":0,"dur":1500000,"pid":1,"tid":3000},
{"name":"pass","cat":"compute","ph":"X","ts":500000,"dur":1000000,"pid":1,"tid":0},
{"name":"late prefetch","cat":"stall","ph":"X","ts":500000,"dur":300000,"pid":1,"tid":1000},
{"name":"thread_name","ph":"M","pid":1,"tid":0,"args":{"name":"compute"}}]}"#;

const RESIDENCY: &str = r#"{"page_bytes":65536,"files":[{"name":"<i>m</i>.gguf","bytes":150000,"pages":3}],"samples":[
{"ts":0,"device":[0,0,0],"host":[0,0,0]},{"ts":500000,"device":[100,0,0],"host":[0,50,0]},
{"ts":1000000,"device":[100,100,0],"host":[0,0,25]}]}"#;

/// A timeline that says where pages were.
fn timeline_with(residency: &str) -> String {
    format!("{},\"residency\":{residency}}}", TIMELINE.strip_suffix('}').unwrap())
}

/// What `outcore run --report` writes besides: two samples, a layer with experts.
const MAPPED: &str = r#"{"samples":[
{"at":0.5,"uses":10,"hits":5,"prefetched":1,"late":1,"faults":3,"evictions":2,"read_bytes":1048576,"read_seconds":0.1,
"budget_bytes":2097152,"used_bytes":1048576,"stalls":[]},
{"at":1.0,"uses":30,"hits":20,"prefetched":2,"late":2,"faults":6,"evictions":5,"read_bytes":3145728,"read_seconds":0.3,
"budget_bytes":1048576,"used_bytes":1048576,"stalls":[]},
{"at":1.5,"uses":60,"hits":45,"prefetched":3,"late":3,"faults":9,"evictions":9,"read_bytes":6291456,"read_seconds":0.5,
"budget_bytes":1048576,"used_bytes":1048576,"stalls":[]}],
"end":{"process":7,"page_bytes":65536,"policy":"model","planned":true,
"memory":{"process_limit_bytes":9437184,"resident_bytes":8388608,"frames_bytes":1048576},
"counts":{"at":1.5,"uses":60,"hits":45,"prefetched":3,"late":3,"faults":9,"evictions":9,"read_bytes":6291456,
"read_seconds":0.5,"budget_bytes":1048576,"used_bytes":1048576,
"stalls":[{"cause":"disk fault","count":9,"seconds":0.3}]},
"optimum":{"uses":60,"hit_ratio":0.75,"best":0.875},"routing":"off","experts":{"hints":0,"told":0,"touched":4},
"files":[{"name":"<i>m</i>.gguf","held":{"bytes":4194304,"used":917504,"ahead":131072},"cells":[100,0],
"parts":[{"name":"layer 0","held":{"bytes":2097152,"used":917504,"ahead":131072},
"experts":{"count":4,"held":{"bytes":2097152,"used":0,"ahead":0},"cells":[0,0,0,0]}}]}]}}"#;

/// A timeline as `outcore run --report` writes it.
fn timeline_of_run() -> String {
    format!("{},\"run\":{MAPPED}}}", TIMELINE.strip_suffix('}').unwrap())
}

const PROBED: &str = r#"{"file":"disk.bin","memcpy_bytes_per_second":9000000000,
"points":[{"block_bytes":65536,"depth":8,"bytes_per_second":10485760},
{"block_bytes":65536,"depth":1,"bytes_per_second":1}]}"#;

/// Writes a file of this text and returns its path.
fn place(dir: &Path, name: &str, text: impl AsRef<[u8]>) -> String {
    let path = dir.join(name);
    fs::write(&path, text).unwrap();
    string(&path).to_owned()
}

/// Returns the JSON of a short simulation.
fn simulated_run(more: &[&str]) -> String {
    let short = ["simulate", "--params", "1B", "--machine", "rtx4090", "--device-budget", "1GiB", "--json"];
    text(&[&short[..], &["--host-budget", "256MiB"], more].concat())
}

/// Returns the page of these inputs.
fn page_of(dir: &Path, inputs: &[String]) -> String {
    let page = dir.join("report.html");
    let mut arguments = vec!["report", "-o", string(&page)];
    arguments.extend(inputs.iter().map(String::as_str));
    text(&arguments);
    fs::read_to_string(page).unwrap()
}

/// Returns a page of all kinds of inputs.
fn made_page(dir: &Path) -> String {
    let one_line = GENERATED.replace('\n', "");
    let inputs = [
        place(dir, "run.json", format!("words of the model\n{one_line}\n")),
        place(dir, "timeline.json", timeline_with(RESIDENCY)),
        place(dir, "simulated.json", simulated_run(&["--timeline"])),
        place(dir, "mapped.json", timeline_of_run()),
        place(dir, "found.json", text(&["policies", "--workload", "kv", "--uses", "3000", "--json"])),
        "--probe".to_owned(),
        place(dir, "probe.json", PROBED),
    ];
    page_of(dir, &inputs)
}

#[test]
fn report_reads_captures() {
    let dir = scratch();
    let (run, page) = (dir.path().join("run.trace"), dir.path().join("report.html"));
    let capture = made_capture();
    fs::write(&run, &capture).unwrap();
    let done = json(&["report", string(&run), "-o", string(&page), "--json"]);
    let parts = ["hit ratio beside the optimum", "memory by class", "hit ratio by capacity and policy"];
    assert_eq!(done["parts"], serde_json::json!(parts));
    let html = fs::read_to_string(&page).unwrap();
    well_formed(&html);
    assert!(html.contains("Captured from: made by a test") && html.contains("wtinylfu"));
    assert_eq!(html.matches(">written</th>").count(), 2, "of the optimum, and of the best policy");
    fs::write(&run, &capture[..capture.len() / 2]).unwrap();
    refused(&["report", string(&run), "-o", string(&page)], 1, &["run.trace", "incomplete"]);
    assert_eq!(fs::read_to_string(&page).unwrap(), html, "what was there stays");
}

/// Checks that every element is closed in order; the contents of scripts and styles are skipped.
fn well_formed(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = page.strip_prefix("<!doctype html>").unwrap();
    while let Some(at) = rest.find('<') {
        rest = &rest[at..];
        if let Some(comment) = rest.strip_prefix("<!--") {
            rest = comment.split_once("-->").unwrap().1;
            continue;
        }
        let (tag, after) = rest[1..].split_once('>').unwrap();
        rest = after;
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "{:?} ends", name);
            continue;
        }
        let name = tag.split([' ', '\n']).next().unwrap();
        assert!(!name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric()), "<{tag}>");
        assert_eq!(tag.matches('"').count() % 2, 0, "<{tag}>");
        if name == "meta" {
            continue;
        }
        open.push(name);
        if ["script", "style"].contains(&name) {
            rest = &rest[rest.find(&format!("</{name}>")).unwrap()..];
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn report_makes_a_page_that_needs_nothing_else() {
    let dir = scratch();
    let page = made_page(dir.path());
    well_formed(&page);
    for part in [
        "The run",
        "Timeline: ",
        "Stalls by cause",
        "Bandwidth by link",
        "Hit ratio beside the optimum",
        "Memory by class",
        "Hit ratio by capacity and policy",
        "&lt;b&gt;m&lt;",
        "5.0 MiB&#x2f;s",
        "10.0 MiB&#x2f;s",
        "width: 66.67%",
        "50.0 %",
        "disk fault",
        "late prefetch",
        "0.2500",
        "keys and values",
        "1.500 s",
        "id=\"timeline-0\"",
        "Where pages were: ",
        "33.3 %",
        "45.5 KiB beyond their ends, 23.71 % of all pages",
        "no fragmentation",
        "activations, logits, threads",
        "id=\"residency-0\"",
        "id=\"residency-1\"",
        "on rtx4090, simulated",
        "link down",
        "Keys, values and activations are not simulated",
        "of its ceiling",
        "id=\"simulated-0\"",
        "id=\"policies-0\"",
        "Leon Sorokin",
    ] {
        assert!(page.contains(part), "{part:?} is not in the page");
    }
    assert!(!page.contains("Left out") && !page.contains("zero fill") && !page.contains("<b>"));
    // The chart library names its home once, in a comment.
    assert_eq!(page.matches("://").count(), 1, "an address");
    for loads in ["src=", "href=", "url(", "@import", "fetch(", "XMLHttpRequest", "import("] {
        assert!(!page.contains(loads), "{loads}");
    }
    assert!(page.contains("default-src 'none'"));
    let data = page.split_once("id=\"data\">").unwrap().1.split_once("</script>").unwrap().0;
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["timelines"][0]["lanes"].as_array().unwrap().len(), 3);
    assert_eq!(data["timelines"][0]["residency"]["samples"][1]["device"], serde_json::json!([100, 0, 0]));
    assert_eq!(data["policies"][0]["uses"], 3000);
    let bars = data["bars"].as_array().unwrap();
    let of = |id: &str| bars.iter().find(|bars| bars["id"] == id).unwrap_or_else(|| panic!("no bars {id}"));
    assert_eq!(of("stalls-0")["labels"], serde_json::json!(["disk fault"]));
    // Half of the probe's rate over the 2 s in which the disk had work; all of it over the 1 s of the passes.
    assert_eq!(of("links-0")["series"][1]["values"][0], 0.5);
    assert_eq!(
        of("memory-0")["series"][1]["values"],
        serde_json::json!([1048576.0, 0.0, 2097152.0, 1048576.0, 1048576.0])
    );
    assert_eq!(of("memory-1")["labels"], serde_json::json!(["attention", "norm"]));
    assert_eq!(of("optimum-0")["series"][0]["values"], serde_json::json!([0.25, 0.5]));
    for bars in bars.iter().chain(data["lines"].as_array().unwrap()) {
        assert!(page.contains(&format!("id={}", bars["id"])), "{bars}");
    }
    // Between the samples: 15 hits in 20 uses, and 2 MiB in half a second.
    assert_eq!(data["lines"][0]["series"][0]["values"][0], 0.75);
    assert_eq!(data["lines"][1]["series"][0]["values"][0], 4194304.0);
}

#[test]
fn report_says_where_a_ceiling_comes_from() {
    let dir = scratch();
    let linked = GENERATED
        .replace("\"link_bytes\":0,", "\"link_bytes\":5242880,")
        .replace("\"link_busy_s\":0.0", "\"link_busy_s\":1.0");
    let probe = ["--probe".to_owned(), place(dir.path(), "probe.json", PROBED)];
    let page = |run: &str, probe: &[String]| {
        let run = place(dir.path(), "run.json", run);
        page_of(dir.path(), &[&[run][..], probe].concat())
    };
    let has = |page: &str, parts: &[&str]| {
        for part in parts {
            assert!(page.contains(part), "{part:?} is not in the page");
        }
    };
    has(
        &page(GENERATED, &[]),
        &["disk&#x27;s ceiling is not known: run `outcore probe", "give that file with `--probe`", "not known"],
    );
    assert!(!page(GENERATED, &[]).contains("link&#x27;s ceiling"), "a link that carried nothing needs none");
    has(&page(&linked, &[]), &["link&#x27;s ceiling is not known: give `--probe`"]);
    has(&page(&linked, &probe), &["what `outcore probe` read of disk.bin", "what one thread copied", "8.4 GiB&#x2f;s"]);
    let on_gpu = linked.replace("\"device\":\"host\"", "\"device\":\"cuda:0\"");
    has(&page(&on_gpu, &probe), &["link&#x27;s ceiling is not known: add", "link_bytes_per_second"]);
    let with = |ceiling: &str| on_gpu.replacen('{', &format!("{{\"ceiling\":{ceiling},"), 1);
    let told = page(&with("{\"disk_bytes_per_second\":20971520,\"link_bytes_per_second\":10485760}"), &probe);
    has(&told, &["20.0 MiB&#x2f;s", "25.0 %", "50.0 %", "The disk&#x27;s ceiling is what the run&#x27;s JSON says"]);
    // A run of an earlier release.
    let (before, after) = (GENERATED.find("\"memory\"").unwrap(), GENERATED.find("\"stalls\"").unwrap());
    let old = format!("{}{}", &GENERATED[..before], &GENERATED[after..]);
    has(&page(&old, &[]), &["JSON is of an earlier release", "Tail waste: not known", "no fragmentation"]);
    // Bad input is named.
    let refuse = |run: &str, probe: &str, parts: &[&str]| {
        let (run, out) = (place(dir.path(), "run.json", run), dir.path().join("refused.html"));
        refused(&["report", &run, "--probe", probe, "-o", string(&out)], 1, parts);
        assert!(!out.exists());
    };
    refuse(&with("{\"disc\":1}"), &probe[1], &["run.json", "unknown field `disc`"]);
    refuse(&with("{\"disk_bytes_per_second\":0}"), &probe[1], &["run.json", "nonzero"]);
    let timeline = place(dir.path(), "timeline.json", TIMELINE);
    refuse(GENERATED, &timeline, &["timeline.json, given with --probe", "outcore probe --json"]);
    refuse(GENERATED, string(&dir.path().join("none.json")), &["none.json", "check the path"]);
    let half = place(dir.path(), "half.json", &PROBED[..PROBED.len() / 2]);
    refuse(GENERATED, &half, &["half.json", "cut off"]);
    let run = place(dir.path(), "run.json", GENERATED);
    refused(&["report", &run, "--probe", &probe[1], "-o", &probe[1]], 1, &["it is what is reported on"]);
}

#[test]
fn report_of_a_simulation_has_all_that_one_of_a_run_has() {
    let dir = scratch();
    let (run, page) = (dir.path().join("simulated.json"), dir.path().join("report.html"));
    let simulation = simulated_run(&["--timeline"]);
    fs::write(&run, &simulation).unwrap();
    let done = json(&["report", string(&run), "-o", string(&page), "--json"]);
    let parts = [
        "what a simulation found",
        "timeline by lane",
        "residency over time",
        "stalls by cause",
        "bandwidth by link",
        "hit ratio beside the optimum",
        "memory by class",
    ];
    assert_eq!(done["parts"], serde_json::json!(parts));
    // The page says that it shows the first of several devices.
    fs::write(
        &run,
        text(&[
            "simulate",
            "--params",
            "4B",
            "--machine",
            "dgx-h200",
            "--device-budget",
            "256MiB",
            "--timeline",
            "--json",
        ]),
    )
    .unwrap();
    text(&["report", string(&run), "-o", string(&page)]);
    let html = fs::read_to_string(&page).unwrap();
    well_formed(&html);
    assert!(html.contains("the first of 8 devices"));
    // The page says what was not recorded, and how to record it.
    fs::write(&run, simulated_run(&[])).unwrap();
    text(&["report", string(&run), "-o", string(&page)]);
    let html = fs::read_to_string(&page).unwrap();
    assert!(html.contains("simulate with `--json --timeline`") && html.contains("timeline by lane: needs"));
    // JSON of an earlier release works too.
    let mut old: Value = serde_json::from_str(&simulation).unwrap();
    for new in ["weights", "tail_bytes", "ceiling", "timeline"] {
        old.as_object_mut().unwrap().remove(new).unwrap();
    }
    fs::write(&run, old.to_string()).unwrap();
    text(&["report", string(&run), "-o", string(&page)]);
    let html = fs::read_to_string(&page).unwrap();
    assert!(html.contains("Ceilings are not known: simulate again") && html.contains("Tail waste: not known"));
    // Altered JSON is refused.
    let refuse = |from: &str, to: &str, part: &str| {
        let bad = simulation.replacen(from, to, 1);
        assert_ne!(bad, simulation, "{from}");
        fs::write(&run, bad).unwrap();
        refused(&["report", string(&run), "-o", string(&page)], 1, &["simulated.json", part]);
    };
    refuse("\"spans\":[[0,", "\"spans\":[[9,", "a kind that lane");
    refuse("\"kinds\"", "\"sorts\"", "missing field `kinds`");
    refuse("\"device\":[", "\"device\":[0,", "a residency that is uneven");
    refuse("\"disk_read_bytes_per_second\":", "\"disk_read_bytes_per_second\":-", "outcore simulate --json");
    assert_eq!(fs::read_to_string(&page).unwrap(), html, "what was there stays");
}

#[test]
fn report_of_a_program_has_hits_reads_and_layers() {
    let dir = scratch();
    let (run, page) = (dir.path().join("run.json"), dir.path().join("report.html"));
    fs::write(&run, timeline_of_run()).unwrap();
    let probe = place(dir.path(), "probe.json", PROBED);
    let done = json(&["report", string(&run), "--probe", &probe, "-o", string(&page), "--json"]);
    let parts = [
        "what a run was",
        "timeline by lane",
        "hits, reads and budget over time",
        "layers in memory at the end",
        "stalls by cause",
        "bandwidth by link",
        "hit ratio beside the optimum",
    ];
    assert_eq!(done["parts"], serde_json::json!(parts));
    let html = fs::read_to_string(&page).unwrap();
    well_formed(&html);
    for part in [
        "&lt;i&gt;m&lt;&#x2f;i&gt;.gguf (4.0 MiB)",
        "45 (75.0 %)",
        "6.0 MiB, 12.0 MiB/s while reading",
        "8.0 MiB of 9.0 MiB",
        "was not read: OUTCORE_RUN_ROUTING=off",
        "layer 0, 4 experts",
        "12.0 MiB/s of 10.0 MiB/s",
        "0.8750",
        "Budget over time",
    ] {
        assert!(html.contains(part) || html.contains(&part.replace('/', "&#x2f;")), "{part:?} is not in the page");
    }
    // Two of them on a page are told apart.
    let other = place(dir.path(), "other.json", timeline_of_run());
    text(&["report", string(&run), &other, "-o", string(&page)]);
    let html = fs::read_to_string(&page).unwrap();
    well_formed(&html);
    assert!(html.contains("The run, in ") && html.contains("id=\"layers-1\"") && html.contains("id=\"room-1\""));
    // Altered JSON is refused.
    for (from, to, part) in [
        ("\"used\":917504", "\"used\":4294967296", "a run that is uneven"),
        ("\"at\":0.5", "\"at\":7.5", "a run that is uneven"),
        ("\"end\":", "\"start\":", "missing field `end`"),
        ("\"routing\":\"off\"", "\"routing\":\"some\"", "unknown variant"),
    ] {
        let bad = timeline_of_run().replacen(from, to, 1);
        assert_ne!(bad, timeline_of_run(), "{from}");
        fs::write(&run, bad).unwrap();
        refused(&["report", string(&run), "-o", string(&page)], 1, &["run.json", part]);
    }
}

#[test]
fn report_says_what_it_leaves_out() {
    let dir = scratch();
    let (run, page) = (dir.path().join("run.json"), dir.path().join("report.html"));
    fs::write(&run, TIMELINE).unwrap();
    let done = json(&["report", string(&run), "-o", string(&page), "--json"]);
    assert_eq!(done["parts"], serde_json::json!(["timeline by lane", "stalls by cause"]));
    assert_eq!(done["left_out"].as_array().unwrap().len(), 9);
    let html = fs::read_to_string(&page).unwrap();
    well_formed(&html);
    assert_eq!(done["bytes"], html.len());
    assert!(html.contains("Left out") && html.contains("memory by class: needs the last line of `generate --json`"));
    // A file's name is escaped everywhere.
    let odd = dir.path().join("</script><h1>x.json");
    assert!(fs::write(&odd, TIMELINE).is_err(), "a name holds no slash");
    let odd = dir.path().join("<script>x&y.json");
    fs::write(&odd, TIMELINE.replace("late prefetch", "</script><script>alert(1)")).unwrap();
    text(&["report", string(&odd), "-o", string(&page)]);
    let html = fs::read_to_string(&page).unwrap();
    well_formed(&html);
    assert!(!html.contains("<script>alert") && !html.contains("<script>x"));
}

#[test]
fn report_refuses_bad_input() {
    let dir = scratch();
    let (run, page) = (dir.path().join("run.json"), dir.path().join("report.html"));
    let arguments = ["report", string(&run), "-o", string(&page)];
    refused(&arguments, 1, &["run.json", "check the path"]);
    fs::write(&page, "old").unwrap();
    for (bad, part) in [
        (String::new(), "cut off, or empty"),
        (TIMELINE[..TIMELINE.len() / 2].to_owned(), "cut off"),
        (GENERATED.replace("\"model\"", "\"name\""), "missing field `model`"),
        ("{\"a\": 1}".to_owned(), "another kind: it has a"),
        ("[]".to_owned(), "is no JSON object"),
        ("\u{fffd}".to_owned(), "is no JSON object"),
        ("{\"traceEvents\": []}".to_owned(), "has no spans"),
        (timeline_with("{}"), "missing field `page_bytes`"),
        (timeline_with(&RESIDENCY.replace("[0,50,0]", "[0,50]")), "a residency that is uneven"),
        ("9".repeat(20 << 20), "is no JSON object"),
    ] {
        fs::write(&run, bad).unwrap();
        refused(&arguments, 1, &[part, "run.json"]);
    }
    assert_eq!(fs::read_to_string(&page).unwrap(), "old", "what was there stays");
    fs::write(&run, TIMELINE).unwrap();
    let linked = dir.path().join("linked.json");
    fs::hard_link(&run, &linked).unwrap();
    for same in [&run, &linked] {
        refused(&["report", string(&run), "-o", string(same)], 1, &["it is what is reported on", "--output"]);
    }
    assert_eq!(fs::read_to_string(&run).unwrap(), TIMELINE);
    refused(&["report", string(&run), "-o", string(&dir.path().join("none/x.html"))], 1, &["none/x.html", "folder"]);
    refused(&["report", string(&run)], 2, &["--output"]);
    // An endless file is not read to its end.
    refused(&["report", "/dev/zero", "-o", string(&page)], 1, &["/dev/zero is not a regular file"]);
    let large = dir.path().join("large.json");
    fs::File::create(&large).unwrap().set_len((256 << 20) + 1).unwrap();
    refused(&["report", string(&large), "-o", string(&page)], 1, &["more than 256.0 MiB"]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 4, "nothing else is left");
}

/// Returns the browser, if there is one.
fn browser() -> Option<std::path::PathBuf> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let named = std::env::var_os("OUTCORE_CHROMIUM").map(std::path::PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found =
        std::env::split_paths(&path).flat_map(|dir| names.map(|name| dir.join(name))).find(|path| path.is_file());
    named.or(found)
}

/// Returns what a browser with these arguments prints and logs for the page in `dir`.
fn browsed(browser: &Path, dir: &Path, arguments: &[&str]) -> (String, String) {
    // A browser that does not end has failed.
    let mut command = Command::new("timeout");
    command.arg("120").arg(browser);
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--lang=en-US", "--enable-logging=stderr"]);
    command.args(["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]);
    command.args(["--hide-scrollbars", "--window-size=1366,2000"]).args(arguments);
    command.arg(format!("--user-data-dir={}", string(&dir.join("profile"))));
    let output = command.arg(format!("file://{}", string(&dir.join("report.html")))).output().unwrap();
    let [drawn, said] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(!said.contains("CONSOLE"), "{said}");
    (drawn, said)
}

/// A script that, when all is drawn, counts the pixels of each chart that are neither clear nor grey; grids and texts
/// are grey.
const COUNT: &str = r#"<script>
for (const place of document.querySelectorAll(".chart")) {
  const canvas = place.querySelector("canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set();
  let pixels = 0;
  for (let at = 0; at < data.length; at += 4) {
    const [r, g, b, a] = data.slice(at, at + 4);
    if (a < 64 || Math.max(r, g, b) - Math.min(r, g, b) < 10) continue;
    pixels++;
    colours.add((r << 16) | (g << 8) | b);
  }
  place.dataset.pixels = pixels;
  place.dataset.colours = colours.size;
}
</script>"#;

/// Returns for each chart of a page its id, its number of coloured pixels, and its number of colours.
fn charts(browser: &Path, dir: &Path, page: &str) -> Vec<(String, u64, u64)> {
    fs::write(dir.join("report.html"), page.replace("</body>", &format!("{COUNT}</body>"))).unwrap();
    let (drawn, said) = browsed(browser, dir, &["--dump-dom"]);
    assert!(drawn.contains("data-drawn=\"all\""), "{drawn}{said}");
    let mut charts = Vec::new();
    for place in drawn.split("<div class=\"chart\"").skip(1) {
        let tag = place.split_once('>').unwrap().0;
        let value = |name: &str| {
            let from = tag.split_once(&format!("{name}=\"")).unwrap_or_else(|| panic!("no {name} in {tag}")).1;
            from.split_once('"').unwrap().0.to_owned()
        };
        charts.push((value("id"), value("data-pixels").parse().unwrap(), value("data-colours").parse().unwrap()));
    }
    charts
}

/// Returns the width, the height and the bytes (red, green, blue) of an image that the browser wrote.
fn pixels(png: &[u8]) -> (usize, usize, Vec<u8>) {
    use std::io::Read;
    let number = |at: usize| u32::from_be_bytes(png[at..at + 4].try_into().unwrap()) as usize;
    assert!(png.starts_with(b"\x89PNG\r\n\x1a\n"));
    let (width, height, deep, colours) = (number(16), number(20), png[24], png[25]);
    let each = match (deep, colours) {
        (8, 2) => 3,
        (8, 6) => 4,
        other => panic!("pixels of another form: {other:?}"),
    };
    let (mut at, mut packed) = (8, Vec::new());
    while at < png.len() {
        let len = number(at);
        if &png[at + 4..at + 8] == b"IDAT" {
            packed.extend_from_slice(&png[at + 8..at + 8 + len]);
        }
        at += 12 + len;
    }
    let mut lines = Vec::new();
    flate2::read::ZlibDecoder::new(&packed[..]).read_to_end(&mut lines).unwrap();
    let stride = width * each;
    let mut all = vec![0_u8; stride * height];
    for row in 0..height {
        let line = &lines[row * (stride + 1)..(row + 1) * (stride + 1)];
        for x in 0..stride {
            let left = if x >= each { all[row * stride + x - each] } else { 0 };
            let up = if row > 0 { all[(row - 1) * stride + x] } else { 0 };
            let corner = if row > 0 && x >= each { all[(row - 1) * stride + x - each] } else { 0 };
            let guess = match line[0] {
                0 => 0,
                1 => left,
                2 => up,
                3 => ((u16::from(left) + u16::from(up)) / 2) as u8,
                _ => {
                    let sum = i16::from(left) + i16::from(up) - i16::from(corner);
                    *[left, up, corner].iter().min_by_key(|near| (sum - i16::from(**near)).abs()).unwrap()
                }
            };
            all[row * stride + x] = line[x + 1].wrapping_add(guess);
        }
    }
    let colours = all.chunks(each).flat_map(|pixel| pixel[..3].to_vec()).collect();
    (width, height, colours)
}

/// A browser draws all charts of a page of each kind of input. None is blank, and the browser logs nothing.
#[test]
fn report_is_drawn_by_a_browser() {
    let Some(browser) = browser() else {
        let required = std::env::var("OUTCORE_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|one| one == "browser"), "skips, though OUTCORE_REQUIRE names browser");
        eprintln!("SKIPPED: no Chromium on PATH; OUTCORE_CHROMIUM can name one");
        return;
    };
    let dir = scratch();
    let place = |name: &str, bytes: &[u8]| place(dir.path(), name, bytes);
    let run = place("run.json", GENERATED.replace('\n', "").as_bytes());
    let timeline = place("timeline.json", timeline_with(RESIDENCY).as_bytes());
    let found = text(&["policies", "--workload", "moe", "--uses", "20000", "--json"]);
    let kinds: [(&[String], &[&str]); 6] = [
        (
            &[place("mapped.json", timeline_of_run().as_bytes())],
            &["timeline-0", "hits-0", "reads-0", "room-0", "layers-0", "stalls-0", "links-0", "optimum-0"],
        ),
        (
            &[run, timeline],
            &["timeline-0", "residency-0", "stalls-0", "stalls-1", "links-0", "optimum-0", "memory-0", "memory-1"],
        ),
        (
            &[place("simulated.json", simulated_run(&["--timeline"]).as_bytes())],
            &["simulated-0", "timeline-0", "residency-0", "stalls-0", "links-0", "optimum-0", "memory-0", "memory-1"],
        ),
        (
            &[place("short.json", simulated_run(&[]).as_bytes())],
            &["simulated-0", "stalls-0", "links-0", "memory-0", "memory-1"],
        ),
        (&[place("found.json", found.as_bytes())], &["optimum-0", "memory-0", "policies-0"]),
        (&[place("run.trace", &made_capture())], &["optimum-0", "memory-0", "policies-0"]),
    ];
    for (inputs, expected) in kinds {
        let page = page_of(dir.path(), inputs);
        let charts = charts(&browser, dir.path(), &page);
        let ids: Vec<&str> = charts.iter().map(|(id, ..)| id.as_str()).collect();
        assert_eq!(ids, expected, "of {inputs:?}");
        for (id, pixels, colours) in &charts {
            assert!(*pixels > 200 && *colours > 0, "{id} of {inputs:?} is blank: {pixels} pixels, {colours} colours");
        }
        let timeline = charts.iter().find(|(id, ..)| id == "timeline-0");
        assert!(timeline.is_none_or(|(.., colours)| *colours >= 3), "{charts:?}");
    }
    // The page as a user sees it, down to the first charts: tables of two runs come before them.
    made_page(dir.path());
    let shot = dir.path().join("page.png");
    browsed(&browser, dir.path(), &[&format!("--screenshot={}", string(&shot))]);
    let (width, height, bytes) = pixels(&fs::read(&shot).unwrap());
    assert_eq!((width, height), (1366, 2000));
    let dark = bytes.chunks(3).filter(|pixel| pixel.iter().any(|value| *value < 128)).count();
    let coloured =
        bytes.chunks(3).filter(|pixel| pixel.iter().max().unwrap() - pixel.iter().min().unwrap() > 40).count();
    assert!(dark > 2000 && coloured > 500, "{dark} dark and {coloured} coloured pixels of a page");
    let right = bytes.chunks(3 * width).filter(|line| line[3 * (width - 8)..].iter().any(|value| *value < 250)).count();
    assert_eq!(right, 0, "nothing runs out of the window");
}

#[test]
fn a_misspelt_command_line_is_explained() {
    refused(&[], 2, &["Usage"]);
    refused(&["inspekt"], 2, &["inspect"]);
    refused(&["inspect"], 2, &["MODEL"]);
    refused(&["inspect", "m", "--page-size", "3MiB"], 2, &["3145728", "power of two"]);
    refused(&["inspect", "m", "--budget", "lots"], 2, &["lots", "512MiB"]);
    refused(&["probe"], 2, &["--file"]);
    refused(&["probe", "--file", "m", "--io", "mmap"], 2, &["mmap", "io_uring"]);
    refused(&["probe", "--file", "m", "--size", "1GiB"], 2, &["--file", "--size"]);
    assert!(text(&["--version"]).starts_with("outcore 0."));
    for command in ["doctor", "probe", "inspect", "plan", "policies", "report", "simulate", "top"] {
        assert!(text(&[command, "--help"]).contains("--json"), "{command}");
    }
    for command in ["inspect", "verify", "export", "import"] {
        assert!(text(&["state", command, "--help"]).contains("--json"), "state {command}");
    }
}

#[test]
fn doctor_examines_a_directory_and_leaves_nothing_in_it() {
    let dir = scratch();
    let found = json(&["doctor", "--dir", string(dir.path()), "--json"]);
    assert!(fs::read_dir(dir.path()).unwrap().next().is_none());
    assert!(found["memory"]["limit_bytes"].as_u64().unwrap() > 0);
    assert!(found["memcpy_bytes_per_second"].as_u64().unwrap() > 0);
    assert!(found["mappings"]["resident_bytes_at_2mib"].as_u64().unwrap() > 0);
    let chain = found["io"]["chain"].as_array().unwrap();
    assert_eq!(chain.len(), 3);
    for backend in chain {
        assert!(backend["works"].as_bool().unwrap() != backend["why_not"].is_string(), "{backend}");
    }
    assert!(chain.iter().any(|backend| backend["works"] == true && backend["name"] == found["io"]["chosen"]));
    let disk = &found["directories"][0];
    assert!(disk["error"].is_null() && disk["filesystem"].is_string(), "{disk}");
    assert!(disk["in_memory"] == true || disk["read_bytes_per_second"].as_u64().unwrap() > 0, "{disk}");
    if disk["settings"].is_object() {
        for setting in ["page_size", "lookahead", "depth", "step"] {
            let chosen = &disk["settings"][setting];
            assert!(chosen["value"].is_u64() && !chosen["reason"].as_str().unwrap().is_empty(), "{setting}: {disk}");
        }
    } else {
        assert!(disk["in_memory"] == true || disk["direct"] == false, "{disk}");
    }
    let gpus = &found["gpus"];
    assert!(gpus["usable"].as_bool().unwrap() != gpus["why_not"].is_string(), "{gpus}");
    assert_eq!(gpus["usable"], gpus["page_tables_for_free_memory_bytes"].is_u64(), "{gpus}");

    // Either way it says so.
    let mapped = &found["mapped_files"];
    assert_eq!(mapped["works"].as_bool().unwrap(), mapped["why_not"].is_null(), "{mapped}");
    assert_eq!(mapped["library"].is_string(), mapped["why_no_library"].is_null(), "{mapped}");
    let table = text(&["doctor"]);
    assert!(found["memcpy_of_threads_bytes_per_second"].as_u64().unwrap() > 0, "{found}");
    assert!(table.contains("by one thread"), "{table}");
    // Of the disks that were measured it says what became of their notes.
    assert_eq!(table.contains("steps of"), table.contains("the next run measures the disk anew"), "{table}");
    let chosen = mapped["mechanism"].as_str().unwrap_or("does not work");
    assert_eq!(mapped["works"].as_bool().unwrap(), ["UFFDIO_MOVE", "UFFDIO_COPY"].contains(&chosen), "{mapped}");
    assert!(table.contains("mapped files") && table.contains("userfaultfd") && table.contains(chosen), "{table}");
    for part in ["io_uring", "lockable", "huge pages", "mappings", "GPU"] {
        assert!(table.contains(part), "{part:?} is not in\n{table}");
    }
    refused(&["doctor", "--dir", string(&dir.path().join("none"))], 1, &["none", "--dir"]);
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    refused(&["doctor", "--dir", string(&file)], 1, &["not a directory"]);
}

/// A host tier takes memory of the GPU, too: a 512th of its size.
#[cfg(feature = "cuda")]
#[test]
fn doctor_says_what_a_host_tier_takes_of_a_gpu() {
    const TEST: &str = "doctor_says_what_a_host_tier_takes_of_a_gpu";
    let driver = std::env::current_exe().unwrap().with_file_name("liboutcore_fake_cuda.so");
    if !driver.exists() {
        return outcore_testkit::fake_cuda::skipped(TEST, "emulated", "the emulated CUDA driver was not built");
    }
    let with_gpu = |arguments: &[&str]| {
        let output = program().args(arguments).env("LD_PRELOAD", &driver).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let dir = scratch();
    let found: Value = serde_json::from_str(&with_gpu(&["doctor", "--json", "--dir", string(dir.path())])).unwrap();
    let free = found["memory"]["headroom_bytes"].as_u64().unwrap();
    assert_eq!(found["gpus"]["page_tables_for_free_memory_bytes"], free.div_ceil(512), "{}", found["gpus"]);
    let table = with_gpu(&["doctor", "--dir", string(dir.path())]);
    assert!(table.contains("page tables: a host tier of") && table.contains("beside the budget"), "{table}");
}

/// `make test` builds the program once without the feature, for this test.
#[cfg(not(feature = "cuda"))]
#[test]
fn doctor_finds_no_gpu_usable_without_the_feature() {
    let table = text(&["doctor"]);
    assert!(table.contains("no CUDA device") && table.contains("feature `cuda`"), "{table}");
}

#[test]
fn probe_measures_a_file_without_changing_it() {
    let dir = scratch();
    let path = dir.path().join("data");
    fs::write(&path, vec![7; 1 << 20]).unwrap();
    let before = fs::metadata(&path).unwrap().modified().unwrap();
    let found = json(&["probe", "--file", string(&path), "--json", "--page-size", "256KiB"]);
    assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), before);
    assert_eq!(found["file_bytes"], 1 << 20);
    assert!(found["latency_4k"]["median_us"].as_f64().unwrap() > 0.0);
    assert!(found["page_read_us"].as_f64().unwrap() > 0.0);
    let points = found["points"].as_array().unwrap();
    assert_eq!(points.len(), 3 * 4, "64 KiB, 256 KiB and 1 MiB at four depths; 4 MiB does not fit");
    assert!(points.iter().all(|point| point["bytes"] == 1 << 20 && point["bytes_per_second"].as_u64().unwrap() > 0));

    let table = text(&["probe", "--size", "2MiB", "--dir", string(dir.path()), "--io", "buffered"]);
    assert!(table.contains("buffered") && table.contains("temporary file"), "{table}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the temporary file is gone");

    refused(&["probe", "--file", string(&dir.path().join("none"))], 1, &["none", "check the path"]);
    refused(&["probe", "--file", string(dir.path())], 1, &["is a directory"]);
    refused(&["probe", "--size", "1MiB", "--dir", string(&dir.path().join("none"))], 1, &["none"]);
    fs::write(&path, "short").unwrap();
    refused(&["probe", "--file", string(&path)], 1, &["larger file"]);
    refused(&["probe", "--size", "0"], 1, &["--size 0 B", "64.0 KiB", "1GiB"]);
}

#[test]
fn a_closed_pipe_is_no_error_and_a_full_disk_is_one() {
    let file = models::synthetic(&[100; 2000]);
    let command = || {
        let mut command = program();
        command.args(["inspect", string(&file.path), "--tensors"]).stderr(Stdio::piped());
        command
    };
    let mut child = command().stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));

    let full = File::options().write(true).open("/dev/full").unwrap();
    let output = command().stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("standard output"));
}

/// The program has the features of outcore-kv.
#[test]
fn kv_reads_a_store_that_is_encrypted_and_compressed() {
    let dir = scratch();
    let folder = dir.path().join("kv");
    fs::create_dir(&folder).unwrap();
    for name in ["manifest", "0000000000000001.kv"] {
        fs::copy(models::repository().join("runtime/kv/tests/data/both").join(name), folder.join(name)).unwrap();
    }
    fs::write(folder.join("lock"), "").unwrap();
    let key = dir.path().join("key");
    fs::write(&key, [3; 32]).unwrap();
    let found = json(&["kv", "verify", string(&folder), "--key-file", string(&key), "--json"]);
    let counts = (&found["encrypted"], &found["blocks"], &found["compressed"], &found["damaged"]);
    assert_eq!(counts, (&true.into(), &2.into(), &1.into(), &0.into()), "{found}");
    refused(&["kv", "verify", string(&folder)], 1, &["is encrypted", "no key was given"]);
}

/// A store with some blocks, one of which is damaged then.
#[test]
fn kv_looks_into_a_store_and_finds_what_is_damaged() {
    use outcore_kv::{BlockKey, Fingerprint, Store, StoreOptions, StoredBlock, TenantId, Token};
    let dir = scratch();
    let folder = dir.path().join("kv");
    let model = Fingerprint::of(&[b"of a test"]);
    let store = Store::open(&folder, &model, Bytes::kib(64), StoreOptions::new()).unwrap();
    let mut parent = None;
    for nth in 0..5 {
        let tokens = [Token::new(nth); 16];
        let key = parent.unwrap_or(BlockKey::root(&model, 7)).next(&tokens);
        let bytes = vec![nth as u8; 64 << 10];
        let block = StoredBlock { key, parent, tenant: TenantId::new(7), tokens: &tokens, bytes: &bytes };
        store.put_parked(&block).unwrap();
        parent = Some(key);
    }
    store.close().unwrap();
    let found = json(&["kv", "verify", string(&folder), "--json"]);
    assert_eq!((&found["blocks"], &found["tenants"], &found["damaged"]), (&5.into(), &1.into(), &0.into()), "{found}");
    let text = text(&["kv", "inspect", string(&folder)]);
    assert!(text.contains("5 of 64.0 KiB") && text.contains("none was seen"), "{text}");

    let file =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).find(|path| path.extension().is_some());
    let file = file.unwrap();
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).unwrap();
    let failed = outcore(&["kv", "verify", string(&folder)]);
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && said.contains("damaged") && said.contains("computed again"), "{said}");
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let none = outcore(&["kv", "inspect", string(&empty)]);
    let said = String::from_utf8_lossy(&none.stderr).into_owned();
    assert!(!none.status.success() && said.contains("there is no store"), "{said}");
}
