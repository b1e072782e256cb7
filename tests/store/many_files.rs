//! The promise: a model of more files than the process may open works, and none of its files is mistaken for another.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use outcore::{Bytes, ErrorKind, IoBackend, PageSize, Runtime};
use rustix::process::{Resource, Rlimit, setrlimit};
use serde_json::{Map, Value, json};

const SHARDS: usize = 2000;
const LIMIT: u64 = 256;
const LEN: usize = 4096;

/// The byte that a shard's tensor is full of.
fn byte(shard: usize) -> u8 {
    (shard % 251) as u8
}

fn name(shard: usize) -> String {
    format!("model-{:05}-of-{SHARDS:05}.safetensors", shard + 1)
}

/// A model in safetensors files of one tensor each.
fn write(folder: &Path) {
    let mut map = Map::new();
    for shard in 0..SHARDS {
        let tensor = format!("t{shard}");
        let header = json!({ &tensor: {"dtype": "U8", "shape": [LEN], "data_offsets": [0, LEN]} }).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend([byte(shard); LEN]);
        fs::write(folder.join(name(shard)), file).unwrap();
        map.insert(tensor, name(shard).into());
    }
    let index = json!({ "metadata": {}, "weight_map": Value::Object(map) });
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// Run by the test below, in a process of its own: the limit is the process's.
#[test]
fn child_reads_more_files_than_it_may_open() {
    let Some(folder) = std::env::var_os("OUTCORE_CHILD_MANY_FILES").map(PathBuf::from) else { return };
    setrlimit(Resource::Nofile, Rlimit { current: Some(LIMIT), maximum: Some(LIMIT) }).unwrap();
    for io in [IoBackend::Auto, IoBackend::Threads] {
        let page = PageSize::new(Bytes::kib(4)).unwrap();
        let builder = Runtime::builder().page_size(page).device_budget(Bytes::mib(8)).host_budget(Bytes::ZERO).io(io);
        let runtime = builder.open().unwrap();
        let model = runtime.open_model(&folder).unwrap();
        let reads = |shard: usize| {
            let tensor = model.tensor(&format!("t{shard}")).unwrap();
            runtime
                .pin(&tensor)
                .wait()
                .map(|pin| assert!(pin.bytes().iter().all(|found| *found == byte(shard)), "{shard}"))
        };
        // First in order, then far apart.
        (0..SHARDS).chain((0..SHARDS).map(|n| n * 777 % SHARDS)).for_each(|shard| reads(shard).unwrap());
        // More at once than may be open: operations that wait hold no descriptor.
        let tensors: Vec<_> = (900..1300).map(|shard| model.tensor(&format!("t{shard}")).unwrap()).collect();
        let set = runtime.pin(&tensors).wait().unwrap();
        let right = |(at, shard)| set.bytes(at).unwrap().iter().all(|found| *found == byte(shard));
        assert!((900..1300).enumerate().all(right));
        drop((set, tensors));
        // A file that the store has closed by now is replaced by another of the same length.
        let replaced = folder.join(name(5));
        let (kept, other) = (fs::read(&replaced).unwrap(), folder.join("other"));
        fs::write(&other, kept.iter().map(|_| 1).collect::<Vec<u8>>()).unwrap();
        fs::rename(&other, &replaced).unwrap();
        runtime.evict(&model.tensor("t5").unwrap());
        let error = reads(5).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ModelChanged, "{error}");
        assert!(error.to_string().contains(&name(5)), "{error}");
        reads(6).unwrap();
        drop(model);
        runtime.close().unwrap();
        fs::write(&replaced, kept).unwrap();
    }
    println!("read {SHARDS} files with {LIMIT} descriptors");
}

/// Run by the test below, in a process of its own.
#[test]
fn child_opens_a_model_without_a_descriptor_left() {
    let Some(folder) = std::env::var_os("OUTCORE_CHILD_MANY_FILES").map(PathBuf::from) else { return };
    setrlimit(Resource::Nofile, Rlimit { current: Some(LIMIT), maximum: Some(LIMIT) }).unwrap();
    for io in [IoBackend::Auto, IoBackend::Threads] {
        let page = PageSize::new(Bytes::kib(4)).unwrap();
        let builder = Runtime::builder().page_size(page).device_budget(Bytes::mib(8)).host_budget(Bytes::ZERO).io(io);
        let runtime = builder.open().unwrap();
        let first = runtime.open_model(&folder).unwrap();
        let header = std::sync::Arc::new(outcore::format::open(&folder).unwrap());
        let mut others: Vec<fs::File> = Vec::new();
        let exhaust =
            |others: &mut Vec<fs::File>| others.extend(std::iter::from_fn(|| fs::File::open("/dev/null").ok()));
        exhaust(&mut others);
        let second = runtime.open_model(&folder).unwrap();
        exhaust(&mut others);
        let third = runtime.open_parsed(header).unwrap();
        exhaust(&mut others);
        for (model, shard) in [(&first, 3), (&second, 1000), (&third, 1999)] {
            let tensor = model.tensor(&format!("t{shard}")).unwrap();
            assert!(runtime.pin(&tensor).wait().unwrap().iter().all(|found| *found == byte(shard)));
        }
        drop((first, second, third));
        runtime.close().unwrap();
    }
    println!("opened {SHARDS} files with none of {LIMIT} descriptors left");
}

/// Runs one of the tests above in a process of its own, with a model of many files. Returns what it printed.
fn child(name: &str) -> String {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    write(folder.path());
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", &format!("many_files::{name}"), "--nocapture", "--test-threads", "1"]);
    let output = child.env("OUTCORE_CHILD_MANY_FILES", folder.path()).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    out.into_owned()
}

#[test]
fn a_model_of_more_files_than_may_be_open_works() {
    let out = child("child_reads_more_files_than_it_may_open");
    assert!(out.contains("read 2000 files"), "{out}");
}

/// The bug: a model could not be opened in a process without a descriptor left, although the store could do without
/// half of those that it had.
#[test]
fn regression_a_model_is_opened_where_no_descriptor_is_left() {
    let out = child("child_opens_a_model_without_a_descriptor_left");
    assert!(out.contains("opened 2000 files"), "{out}");
}
