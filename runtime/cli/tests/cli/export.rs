//! `outcore export`: the file is llama.cpp's, whatever the memory and the threads; what cannot be exported is refused,
//! and leaves nothing behind.

use std::os::unix::fs::symlink;
use std::process::Child;

use outcore::DType;
use outcore::format::gguf::{HeaderWriter, Value as Gguf};
use rustix::process::{Pid, Signal, kill_process};
use twox_hash::XxHash3_64;

use super::*;

/// A tensor of a file that is made here: name, type, extents, bytes.
type Made = (&'static str, DType, Vec<u64>, Vec<u8>);

fn f32s(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// Numbers like those of weights.
fn numbers(seed: u32, count: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next() * next()).collect()
}

fn write(path: &Path, keys: impl FnOnce(&mut HeaderWriter), tensors: &[Made]) {
    let mut writer = HeaderWriter::new();
    keys(&mut writer);
    for (name, dtype, shape, _) in tensors {
        writer.tensor(name, *dtype, shape).unwrap();
    }
    let layout = writer.finish().unwrap();
    let mut bytes = layout.header;
    for ((_, _, _, data), offset) in tensors.iter().zip(layout.offsets) {
        bytes.resize(offset as usize, 0);
        bytes.extend(data);
    }
    bytes.resize(layout.len as usize, 0);
    fs::write(path, bytes).unwrap();
}

/// A matrix of F32, and a norm.
fn small(dir: &Path, matrix: &[f32]) -> String {
    let path = dir.join("small.gguf");
    let shape = vec![matrix.len() as u64 / 256, 256];
    let tensors = [
        ("blk.0.attn_q.weight", DType::F32, shape, f32s(matrix.iter().copied())),
        ("blk.0.attn_norm.weight", DType::F32, vec![4], f32s([1.0; 4])),
    ];
    write(&path, |keys| keys.value("general.architecture", Gguf::Str("llama")), &tensors);
    string(&path).to_owned()
}

/// A model that llama.cpp knows how to read: all plain types and one that is quantised, rows that are whole blocks of
/// 256, of 32 and of nothing, experts, a router, tensors and keys in another order than that of what is written.
fn model(path: &Path) {
    let plain = |seed, shape: &[u64]| f32s(numbers(seed, shape.iter().product()));
    // The upper halves of f32 are bf16; f16 has bits of its own, below infinity.
    let halves = |seed, shape: &[u64]| -> Vec<u8> {
        plain(seed, shape).chunks(4).flat_map(|bytes| [bytes[2], bytes[3]]).collect()
    };
    let f16 = |seed, shape: &[u64]| -> Vec<u8> {
        halves(seed, shape).chunks(2).flat_map(|bytes| [bytes[0], bytes[1] & 0xb3]).collect()
    };
    let q8_0 = |seed, shape: &[u64]| -> Vec<u8> {
        let values = numbers(seed, shape.iter().product());
        values
            .chunks(32)
            .flat_map(|x| [[0x00, 0x24].to_vec(), x.iter().map(|x| (x * 100.0) as i8 as u8).collect()].concat())
            .collect()
    };
    let made: Vec<Made> = vec![
        ("output.weight", DType::F16, vec![6, 256], f16(1, &[6, 256])),
        ("token_embd.weight", DType::BF16, vec![6, 256], halves(2, &[6, 256])),
        ("output_norm.weight", DType::F32, vec![256], plain(3, &[256])),
        ("blk.10.ffn_up.weight", DType::Q8_0, vec![3, 256], q8_0(4, &[3, 256])),
        ("blk.2.ffn_gate_inp.weight", DType::F32, vec![4, 256], plain(5, &[4, 256])),
        ("blk.2.ffn_down_exps.weight", DType::F32, vec![4, 5, 512], plain(6, &[4, 5, 512])),
        ("blk.2.attn_q.weight", DType::F32, vec![7, 96], plain(7, &[7, 96])),
        ("blk.2.attn_k.weight", DType::BF16, vec![3, 100], halves(8, &[3, 100])),
        ("blk.2.attn_q_norm.weight", DType::F32, vec![2, 32], plain(9, &[2, 32])),
        ("blk.2.attn_q.bias", DType::F32, vec![7], plain(10, &[7])),
        ("rope_freqs.weight", DType::F32, vec![16], plain(11, &[16])),
    ];
    let keys = |keys: &mut HeaderWriter| {
        keys.value("general.architecture", Gguf::Str("llama"));
        keys.value("general.file_type", Gguf::U32(0));
        keys.value("general.name", Gguf::Str("made"));
        for (key, n) in [
            ("llama.block_count", 11),
            ("llama.context_length", 64),
            ("llama.embedding_length", 256),
            ("llama.feed_forward_length", 512),
            ("llama.attention.head_count", 4),
            ("llama.vocab_size", 6),
        ] {
            keys.value(key, Gguf::U32(n));
        }
        keys.value("llama.attention.layer_norm_rms_epsilon", Gguf::F32(1e-5));
        keys.strings("tokenizer.ggml.tokens", &["a", "b", "", "d", "e", "f"]);
        keys.integers("tokenizer.ggml.token_type", &[1, 1, 1, 1, 1, 3]);
    };
    write(path, keys, &made);
}

/// XXH3 of the files that `llama_model_quantize` of llama-cpp-python 0.3.36 writes of `model` with `pure` and
/// `allow_requantize`.
const OF_LLAMA_CPP: [(&str, u64); 16] = [
    ("f32", 0x3ef7_905b_f7ac_af0f),
    ("f16", 0x62c0_9c53_54c4_e163),
    ("bf16", 0x603c_250c_76d6_cade),
    ("q4_0", 0x5305_3398_6296_4baf),
    ("q4_1", 0xa3ef_8ffe_8e36_90d3),
    ("q5_0", 0xc888_24e3_5de5_7e9a),
    ("q5_1", 0x5405_f052_0f24_1511),
    ("q8_0", 0x137a_e6e0_1d50_2c3d),
    ("q2_k", 0xeae2_6ce1_a1a4_375c),
    ("q3_k", 0x91d3_aff3_58a5_50bb),
    ("q4_k", 0x7c48_eee3_c223_6a46),
    ("q5_k", 0xd572_c6db_0441_aa42),
    ("q6_k", 0xd709_91c2_50e1_c12c),
    ("iq4_nl", 0x7791_9a51_57ec_3dd6),
    ("iq4_xs", 0x826e_6233_00d3_00ea),
    ("mxfp4", 0x8b17_67a2_c742_1e0f),
];

#[test]
fn export_writes_the_files_of_llama_cpp() {
    let dir = scratch();
    let (from, to) = (dir.path().join("model.gguf"), dir.path().join("out.gguf"));
    model(&from);
    for (dtype, hash) in OF_LLAMA_CPP {
        let found = json(&["export", string(&from), string(&to), "--type", dtype, "--json"]);
        let bytes = fs::read(&to).unwrap();
        assert_eq!(XxHash3_64::oneshot(&bytes), hash, "{dtype}");
        assert_eq!((&found["bytes_out"], &found["to"]), (&bytes.len().into(), &dtype.to_uppercase().into()));
    }
    let found = json(&["export", string(&from), string(&to), "--type", "Q5_K", "--json"]);
    let fallbacks = r#"[{"tensor":"blk.2.attn_k.weight","to":"F16"},{"tensor":"blk.2.attn_q.weight","to":"Q5_1"}]"#;
    assert_eq!(found["fallbacks"].to_string(), fallbacks);
    assert_eq!((&found["converted"], &found["requantised"]), (&6.into(), &1.into()));
    assert_eq!(found["types"].to_string(), r#"{"F16":1,"F32":5,"Q5_1":1,"Q5_K":4}"#);
    let told = outcore(&["export", string(&from), string(&to), "--type", "q5_k"]);
    let report = String::from_utf8(told.stdout).unwrap();
    for part in ["blk.2.attn_q.weight is Q5_1", "quantised twice", "6 were converted"] {
        assert!(report.contains(part), "{part:?} is not in\n{report}");
    }
    let last = report.lines().last().unwrap();
    assert!([" in, ", " out, ", " s, "].iter().all(|part| last.contains(part)), "{last}");
    assert!(told.stderr.is_empty(), "a bar is for terminals");
    assert_eq!(beside(dir.path()), Vec::<String>::new());
}

fn beside(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with('.')).collect()
}

/// The least memory, which the error names, is enough for a model of twice its size, and makes the same file.
#[test]
fn export_of_a_model_larger_than_the_memory() {
    let dir = scratch();
    let matrix = numbers(3, 5 << 20);
    let from = small(dir.path(), &matrix);
    let out = dir.path().join("out.gguf");
    let arguments = ["export", &from, string(&out), "--type", "q4_0", "--memory"];
    let refusal = outcore(&[&arguments[..], &["1MiB"]].concat());
    let message = String::from_utf8(refusal.stderr).unwrap();
    let least: u64 = message.split_once("give at least ").unwrap().1.split(' ').next().unwrap().parse().unwrap();
    assert!(least < (20 << 20) * 3 / 5, "{message}");
    refused(&[&arguments[..], &[&(least - 1).to_string()]].concat(), 1, &["--memory", &least.to_string()]);
    assert!(!out.exists());
    let mut files = Vec::new();
    for (memory, threads) in [(&*least.to_string(), "8"), ("1GiB", "1"), ("1GiB", "3")] {
        let found = json(&[&arguments[..], &[memory, "--threads", threads, "--json"]].concat());
        assert_eq!(found["threads"], if memory == "1GiB" { threads.parse::<u64>().unwrap() } else { 1 });
        files.push(fs::read(&out).unwrap());
    }
    assert!(files.windows(2).all(|two| two[0] == two[1]));
    assert!(files[0].len() > (5 << 20) / 32 * 18);
}

/// Tensors whose values nobody looks at, and those without elements, are copied.
#[test]
fn export_copies_what_it_does_not_convert() {
    let dir = scratch();
    let (from, to) = (dir.path().join("model.gguf"), dir.path().join("out.gguf"));
    let integers: Vec<u8> = (0..3000u32).flat_map(|n| n.to_le_bytes()).collect();
    let codebook: Vec<u8> = (0..74u8).collect();
    let made: Vec<Made> = vec![
        ("empty.bias", DType::F32, vec![4, 0], Vec::new()),
        ("table.ids", DType::I32, vec![3, 1000], integers),
        ("codes", DType::IQ2_XS, vec![256], codebook),
        ("scalar", DType::F32, vec![], f32s([0.5])),
    ];
    write(&from, |keys| keys.value("general.alignment", Gguf::U32(64)), &made);
    let found = json(&["export", string(&from), string(&to), "--type", "q8_0", "--json"]);
    assert_eq!(found["converted"], 0);
    let runtime = Runtime::builder().open().unwrap();
    let model = runtime.open_model(&to).unwrap();
    assert_eq!(model.header().gguf().unwrap().get_u32("general.file_type"), Some(7));
    for (name, dtype, shape, bytes) in made {
        let tensor = model.tensor(name).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (dtype, &*shape), "{name}");
        if !bytes.is_empty() {
            assert_eq!(runtime.pin(&tensor).wait().unwrap().bytes(), bytes, "{name}");
        }
    }
}

#[test]
fn export_refuses_bad_input() {
    let dir = scratch();
    let from = small(dir.path(), &numbers(1, 512));
    let out = dir.path().join("out.gguf");
    let to = string(&out);
    let of = |model: &str, why: &[&str]| refused(&["export", model, to, "--type", "f16"], 1, why);
    refused(&["export", &from, to, "--type", "q9_x"], 2, &["q9_x", "Q4_K", "MXFP4"]);
    refused(&["export", &from, to], 2, &["--type"]);
    refused(&["export", &from, to, "--type", "q8_0", "--memory", "lots"], 2, &["lots"]);
    refused(&["export", &from, to, "--type", "q8_0", "--threads", "0"], 2, &["--threads"]);
    of("/nowhere/at.all", &["/nowhere/at.all"]);
    let place = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        string(&path).to_owned()
    };
    of(&place("st.safetensors", &headers::rich_safetensors()), &["not GGUF", "convert_hf_to_gguf.py"]);
    let whole = fs::read(&from).unwrap();
    of(&place("short.gguf", &whole[..whole.len() - 64]), &["the file ends at byte", "fetch it again"]);
    of(&place("cut.gguf", &whole[..100]), &["fetch it again"]);
    let codes: Made = ("blk.0.attn_q.weight", DType::IQ2_XS, vec![2, 256], vec![0; 148]);
    let unreadable = dir.path().join("codes.gguf");
    write(&unreadable, |_| {}, &[codes]);
    of(string(&unreadable), &["\"blk.0.attn_q.weight\" is IQ2_XS", "BF16"]);

    // What is there stays as it was.
    fs::write(&out, "before").unwrap();
    for (value, dtype, why) in [
        (f32::NAN, "q4_k", &["element 300 ", "\"blk.0.attn_q.weight\"", "NaN", "no number"][..]),
        (f32::INFINITY, "f32", &["element 300 ", "inf"]),
        (-70_000.0, "f16", &["element 300 ", "-70000", "too large for F16", "BF16"]),
    ] {
        let mut matrix = numbers(1, 512);
        matrix[300] = value;
        let wrong = small(dir.path(), &matrix);
        refused(&["export", &wrong, to, "--type", dtype], 1, why);
    }
    assert_eq!(fs::read(&out).unwrap(), b"before");
    assert_eq!(beside(dir.path()), Vec::<String>::new());
}

#[test]
fn export_refuses_outputs_that_cannot_be() {
    let dir = scratch();
    let from = small(dir.path(), &numbers(1, 512));
    let before = fs::read(&from).unwrap();
    let (link, hard) = (dir.path().join("link.gguf"), dir.path().join("hard.gguf"));
    symlink(&from, &link).unwrap();
    fs::hard_link(&from, &hard).unwrap();
    for out in [&*from, string(&link), string(&hard)] {
        refused(&["export", &from, out, "--type", "q8_0"], 1, &["it is a file of the model", "a file of its own"]);
    }
    refused(&["export", &from, string(dir.path()), "--type", "q8_0"], 1, &["no regular file"]);
    refused(&["export", &from, "/dev/full", "--type", "q8_0"], 1, &["no regular file"]);
    refused(&["export", &from, "/nowhere/at.all", "--type", "q8_0"], 1, &["/nowhere/at.all", "can be written to"]);
    assert_eq!(fs::read(&from).unwrap(), before);
    assert_eq!(beside(dir.path()), Vec::<String>::new());
}

/// A limit for the size of files does to an export what a full disk does.
#[test]
fn export_that_finds_no_room_leaves_nothing() {
    let dir = scratch();
    let from = small(dir.path(), &numbers(1, 256 << 10));
    let out = dir.path().join("out.gguf");
    let script = r#"trap '' XFSZ; ulimit -f 64; exec "$0" "$@""#;
    let program = env!("CARGO_BIN_EXE_outcore");
    let arguments = ["-c", script, program, "export", &from, string(&out), "--type", "f16"];
    let output = Command::new("sh").args(arguments).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.starts_with("outcore: reserve 512.") && message.contains("free as much"), "{message}");
    assert!(!out.exists());
    assert_eq!(beside(dir.path()), Vec::<String>::new());
}

/// Signals that ask a process to end: the file beside is removed, and there is none under the final name.
#[test]
fn export_that_is_stopped_leaves_nothing() {
    let dir = scratch();
    // Seconds of work, of which the signal needs a moment.
    let from = small(dir.path(), &numbers(1, 16 << 20));
    let out = dir.path().join("out.gguf");
    for signal in [Signal::INT, Signal::TERM] {
        let mut command = program();
        command.args(["export", &from, string(&out), "--type", "q3_k", "--threads", "1"]);
        let mut child: Child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        while beside(dir.path()).is_empty() {
            assert_eq!(child.try_wait().unwrap(), None, "it ended before it began to write");
            std::thread::yield_now();
        }
        kill_process(Pid::from_child(&child), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains("a signal ended the export") && message.contains("start it again"), "{message}");
        assert!(!out.exists());
        assert_eq!(beside(dir.path()), Vec::<String>::new());
    }
}
