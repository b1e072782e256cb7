//! The promise: a model in several files is one model to `outcore run`, and what only looks like one reads right.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{can_run, outcore};

/// Goes over the layers of a safetensors model in so many files, again and again, and compares what it finds.
const PROGRAM: &str = r#"
import json, mmap, sys

folder, stem, count, passes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
access = mmap.ACCESS_COPY if "private" in sys.argv[5:] else mmap.ACCESS_READ
places = []
for n in range(count):
    name = f"{folder}/{stem}.safetensors" if count == 1 else f"{folder}/{stem}-{n + 1:05}-of-{count:05}.safetensors"
    try:
        file = open(name, "rb")
    except FileNotFoundError:
        continue
    data = mmap.mmap(file.fileno(), 0, access=access)
    end = 8 + int.from_bytes(data[:8], "little")
    for tensor, at in json.loads(data[8:end]).items():
        start, stop = at["data_offsets"]
        places.append((int(tensor.split(".")[2]), data, end + start, end + stop))
places.sort(key=lambda place: place[0], reverse="back" in sys.argv[5:])
for _ in range(passes):
    for layer, data, start, stop in places:
        found = data[start:stop:4096]
        assert found == bytes([layer + 1]) * len(found), f"layer {layer}"
print("all is equal")
"#;

const LAYERS: usize = 48;

/// A model of layers of 1 MiB, each of which has bytes of its number, in so many files.
fn write(folder: &Path, stem: &str, count: usize) {
    // As `save_file` sorts them: layer 10 comes before layer 2.
    let mut layers: Vec<usize> = (0..LAYERS).collect();
    layers.sort_by_key(usize::to_string);
    for (n, layers) in layers.chunks(LAYERS / count).enumerate() {
        let tensors = layers.iter().enumerate().map(|(at, layer)| {
            let (start, end) = (at << 20, (at + 1) << 20);
            let name = format!("model.layers.{layer}.mlp.up_proj.weight");
            format!("\"{name}\":{{\"dtype\":\"U8\",\"shape\":[1048576],\"data_offsets\":[{start},{end}]}}")
        });
        let header = format!("{{{}}}", tensors.collect::<Vec<_>>().join(","));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        layers.iter().for_each(|layer| bytes.resize(bytes.len() + (1 << 20), *layer as u8 + 1));
        let name = match count {
            1 => format!("{stem}.safetensors"),
            _ => format!("{stem}-{:05}-of-{count:05}.safetensors", n + 1),
        };
        fs::write(folder.join(name), bytes).unwrap();
    }
}

/// What the library says at the end of a run over a model in so many files.
fn said(folder: &Path, stem: &str, count: usize, passes: usize) -> String {
    said_of(folder, &[stem, &count.to_string(), &passes.to_string()])
}

fn said_of(folder: &Path, what: &[&str]) -> String {
    run(outcore().args(["run", "--budget", "20MiB", "--no-kept-order"]), folder, what)
}

fn run(outcore: &mut Command, folder: &Path, what: &[&str]) -> String {
    let output = outcore.args(["--", "python3", "-c", PROGRAM]).arg(folder).args(what).output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && output.stdout == b"all is equal\n", "{:?}: {told}", output.status);
    told
}

fn hits(told: &str) -> f64 {
    told.split_once("hit ratio ").and_then(|(_, rest)| rest.split_once(')')).unwrap().0.parse().unwrap()
}

#[test]
fn a_model_in_several_files_has_one_order() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut ratios = Vec::new();
    for count in [1, 4, 16] {
        write(folder.path(), &format!("m{count}"), count);
        let told = said(folder.path(), &format!("m{count}"), count, 8);
        let of = if count == 1 { String::new() } else { format!(" of {count} files, one model,") };
        let order = format!("The order of use{of} is that of the layers, by the headers.");
        assert!(told.contains(&order) && told.contains(&format!("{count} file(s) mapped")), "{told}");
        ratios.push(hits(&told));
    }
    // Files that are alone in their cycles would have next to none. Each of 16 files ends in the middle of a page, and
    // a page takes a frame however much of it is a file's: that makes 32 pages of 24.
    assert!((ratios[1] - ratios[0]).abs() < 0.08 && ratios.iter().all(|ratio| *ratio > 0.15), "{ratios:?}");
}

/// Caches name files by their hashes: only the links that a program opens say which files are parts of one model.
#[test]
fn regression_files_that_were_opened_by_links_are_one_model() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let [links, files] = ["links", "files"].map(|name| folder.path().join(name));
    fs::create_dir(&links).unwrap();
    fs::create_dir(&files).unwrap();
    write(&links, "model", 4);
    for (number, link) in fs::read_dir(&links).unwrap().map(|entry| entry.unwrap().path()).enumerate() {
        let file = files.join(format!("{number}d41d8cd9"));
        fs::rename(&link, &file).unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
    }
    let told = said(&links, "model", 4, 6);
    assert!(told.contains("The order of use of 4 files, one model, is that of the layers, by the headers."), "{told}");
    assert!(told.contains("model-00001-of-00004.safetensors (12.0 MiB)"), "{told}");
}

/// As PyTorch maps files.
#[test]
fn the_order_of_files_that_are_written_privately_is_told() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    write(folder.path(), "model", 4);
    let told = said_of(folder.path(), &["model", "4", "6", "private"]);
    assert!(told.contains("The order of use of 4 files, one model, is that of the layers, by the headers."), "{told}");
}

/// A model of many files in a process that may have few descriptors: some of them stay the kernel's, the program has
/// descriptors left, and all bytes are right.
#[test]
fn regression_a_program_has_descriptors_left_beside_a_model_of_many_files() {
    if !can_run() {
        return;
    }
    const MANY: &str = r#"
import ctypes, mmap, os, resource, sys

c = ctypes.CDLL(None, use_errno=True)
c.mmap.restype = ctypes.c_void_p
folder, count, size = sys.argv[1], int(sys.argv[2]), 2 << 20
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
header = b'{"t%05d":{"dtype":"U8","shape":[2097152],"data_offsets":[0,2097152]}}'
shards = [f"{folder}/model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
for n, shard in enumerate(shards):
    with open(shard, "wb") as file:
        text = header % n
        file.write(len(text).to_bytes(8, "little") + text + n.to_bytes(8, "little"))
        file.truncate(8 + len(text) + size)
start, views = 8 + len(header % 0), []
for shard in shards:
    fd = os.open(shard, os.O_RDONLY)
    views.append(c.mmap(None, ctypes.c_size_t(start + size), mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0)))
    os.close(fd)
for _ in range(2):
    assert [int.from_bytes(ctypes.string_at(view + start, 8), "little") for view in views] == list(range(count))
own = [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]
print("all is equal")
"#;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let arguments = ["run", "--budget", "20MiB", "--no-kept-order", "--", "python3", "-c", MANY];
    let output = outcore().args(arguments).arg(folder.path()).arg("2000").output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && output.stdout == b"all is equal\n", "{:?}: {told}", output.status);
}

#[test]
fn a_part_without_the_others_is_alone_and_the_reason_is_told() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    write(folder.path(), "model", 2);
    fs::remove_file(folder.path().join("model-00002-of-00002.safetensors")).unwrap();
    let told = said(folder.path(), "model", 2, 2);
    let reason = "model-00001-of-00002.safetensors counts as a model of its own: ";
    assert!(told.contains(reason) && told.contains("model-00002-of-00002.safetensors"), "{told}");
}

/// Files that belong to a model and spoil it: the bytes are right, and the reason is told.
#[test]
fn files_that_spoil_a_model_are_told() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    write(folder.path(), "model", 2);
    // Those of another model beside it change nothing.
    write(folder.path(), "other", 4);
    let told = said(folder.path(), "model", 2, 4);
    assert!(told.contains("The order of use of 2 files, one model, is that of the layers, by the headers."), "{told}");
    let index = folder.path().join("model.safetensors.index.json");
    fs::write(&index, r#"{"weight_map":{"model.layers.0.mlp.up_proj.weight":"../elsewhere.safetensors"}}"#).unwrap();
    let told = said(folder.path(), "model", 2, 2);
    assert!(told.contains(" counts as a model of its own: ") && told.contains("../elsewhere.safetensors"), "{told}");
    fs::remove_file(index).unwrap();
    let [first, second] = [1, 2].map(|part| folder.path().join(format!("model-{part:05}-of-00002.safetensors")));
    fs::remove_file(&second).unwrap();
    fs::hard_link(&first, &second).unwrap();
    let told = said(folder.path(), "model", 2, 2);
    assert!(told.contains(" counts as a model of its own: ") && told.contains(" appears twice "), "{told}");
}

#[test]
fn the_order_of_a_model_in_several_files_is_kept_for_the_next_start() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    write(folder.path(), "model", 4);
    let start = || {
        let mut outcore = outcore();
        outcore.env("XDG_CACHE_HOME", folder.path().join("cache")).args(["run", "--budget", "20MiB"]);
        run(&mut outcore, folder.path(), &["model", "4", "16", "back"])
    };
    let told = start();
    assert!(told.contains("The order of use of 4 files, one model, was found in pass "), "{told}");
    let told = start();
    assert!(told.contains("The order of use of 4 files, one model, is known from an earlier run."), "{told}");
}
