//! Promise: no input kept for the fuzzer, seed or former failure, makes a parser panic.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

use headers::{GgufFile, Kv, rich_gguf, rich_index, rich_safetensors};
use outcore::format::{gguf, safetensors};
use outcore_testkit::headers;

fn fuzz_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz")
}

/// Runs every input of a target through `parse`, which says whether it was accepted; returns how many were.
fn replay(target: &str, parse: impl Fn(&[u8]) -> bool) -> usize {
    let mut accepted = 0;
    for kind in ["corpus", "regressions"] {
        let Ok(folder) = fs::read_dir(fuzz_dir().join(kind).join(target)) else { continue };
        for entry in folder {
            let path = entry.unwrap().path();
            println!("{}", path.display());
            accepted += usize::from(parse(&fs::read(path).unwrap()));
        }
    }
    assert!(accepted > 0, "no seed of {target} parses: run cargo test --test fuzz_corpus -- --ignored write_seeds");
    accepted
}

#[test]
fn gguf_corpus() {
    replay("gguf", |input| {
        let _ = gguf::parse(input, 1 << 50).map(|header| format!("{header:?}"));
        gguf::parse(input, input.len() as u64).is_ok()
    });
}

#[test]
fn safetensors_corpus() {
    replay("safetensors", |input| safetensors::parse(input, input.len() as u64).is_ok());
}

#[test]
fn safetensors_index_corpus() {
    replay("safetensors_index", |input| safetensors::parse_index(input).is_ok());
}

/// The seeds together stay small enough to be kept with the source.
#[test]
fn seeds_are_small() {
    let bytes: u64 = seeds().iter().map(|(_, _, bytes)| bytes.len() as u64).sum();
    assert!(bytes < 200_000, "{bytes}");
}

/// Target, file name, bytes.
fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let split = GgufFile::default()
        .kv("split.no", Kv::U16(0))
        .kv("split.count", Kv::U16(2))
        .kv("split.tensors.count", Kv::I32(1))
        .tensor("t", &[256], 14, 210);
    let overlap = GgufFile { data_len: 64, ..GgufFile::default() }.info("a", &[16], 0, 0).info("b", &[8], 0, 32);
    let nested = (0..6).fold(Kv::Array(0, vec![Kv::U8(1)]), |inner, _| Kv::Array(9, vec![inner]));
    let gguf = [
        ("rich", rich_gguf().bytes()),
        ("version-2", GgufFile { version: 2, ..rich_gguf() }.bytes()),
        ("version-1", GgufFile { version: 1, ..rich_gguf() }.bytes()),
        ("header-only", rich_gguf().header()),
        ("split", split.bytes()),
        ("overlap", overlap.bytes()),
        ("nested", GgufFile::default().kv("k", nested).bytes()),
        ("huge-count", GgufFile { tensor_count: Some(1 << 20), ..GgufFile::default() }.bytes()),
        ("empty", GgufFile::default().bytes()),
    ];
    let one = |entry: &str, data| headers::safetensors(&format!("{{\"t\":{{{entry}}}}}"), data);
    let st = [
        ("rich", rich_safetensors()),
        ("empty", headers::safetensors("{}", 0)),
        ("one", one(r#""dtype":"F32","shape":[2],"data_offsets":[0,8]"#, 8)),
        ("hole", one(r#""dtype":"F32","shape":[2],"data_offsets":[4,12]"#, 12)),
        ("scalar", one(r#""dtype":"F64","shape":[],"data_offsets":[0,8]"#, 8)),
        ("escape", headers::safetensors(r#"{"__metadata__":{"\u00e9":"\n"}}"#, 0)),
    ];
    let index = [
        ("rich", rich_index()),
        ("outside", br#"{"weight_map":{"t":"../x"}}"#.to_vec()),
        ("folder", br#"{"weight_map":{"t":"a/b"}}"#.to_vec()),
        ("twice", br#"{"weight_map":{"t":"a","t":"b"}}"#.to_vec()),
    ];
    let named = |target, list: &[(&'static str, Vec<u8>)]| {
        list.iter().map(|(name, bytes)| (target, *name, bytes.clone())).collect::<Vec<_>>()
    };
    [named("gguf", &gguf), named("safetensors", &st), named("safetensors_index", &index)].concat()
}

#[test]
#[ignore = "writes fuzz/corpus; run it after a change to the seeds"]
fn write_seeds() {
    for (target, name, bytes) in seeds() {
        let folder = fuzz_dir().join("corpus").join(target);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(name), bytes).unwrap();
    }
}
