//! `outcore state`: what is in a folder of durable tensors, whether it is whole, and the same tensors in a safetensors
//! file.

use std::os::unix::fs::FileExt;

use outcore::DType;
use outcore::durable::{DurableOptions, TensorSpec};

use super::*;

const PAGE: u64 = 16 << 10;

/// A folder with two generations of three tensors, in `scratch`.
fn folder(dir: &Path) -> String {
    let path = dir.join("state");
    let page = PageSize::new(Bytes::new(PAGE)).unwrap();
    let runtime = Runtime::builder().page_size(page).device_budget(Bytes::new(4 * PAGE)).open().unwrap();
    let state = runtime.open_durable(&path, DurableOptions::default().keep(2)).unwrap();
    let large = state.alloc("large", DType::F32, &[3, 5000]).unwrap();
    let small = [TensorSpec::new("b", DType::U8, &[7]), TensorSpec::new("a\"", DType::BF16, &[2, 3])];
    let small = state.alloc_packed(&small).unwrap();
    for step in 1..=2u8 {
        for row in 0..3 {
            let row = large.rows(row..row + 1).unwrap();
            runtime.pin(&row).write().wait().unwrap().view_mut::<f32>().unwrap().fill(f32::from(step));
        }
        runtime.pin(&small[1]).write().wait().unwrap().bytes_mut().fill(step);
        state.set_note(&[step; 9]);
        state.commit().unwrap();
    }
    string(&path).to_owned()
}

#[test]
fn state_says_what_there_is_and_exports_it() {
    let dir = scratch();
    let state = folder(dir.path());
    let found = json(&["state", "inspect", &state, "--json"]);
    assert_eq!((&found["generation"], found["generations"].to_string()), (&2.into(), "[2,1]".into()));
    assert_eq!((&found["page_bytes"], &found["note_bytes"]), (&PAGE.into(), &9.into()));
    assert_eq!(found["bytes"], 60_000 + 7 + 12);
    let report = text(&["state", "verify", &state]);
    assert!(report.contains("every page was read") && report.contains("3 x 5000"), "{report}");
    let file = dir.path().join("out.safetensors");
    for (generation, value) in [("2", 2u8), ("1", 1)] {
        json(&["state", "export", &state, string(&file), "--generation", generation, "--json"]);
        let runtime = Runtime::builder().open().unwrap();
        let model = runtime.open_model(&file).unwrap();
        let read = |name: &str| runtime.pin(&model.tensor(name).unwrap()).wait().unwrap().bytes().to_vec();
        assert!(read("large").chunks(4).all(|bytes| bytes == f32::from(value).to_le_bytes()));
        assert_eq!((read("b"), read("a\"")), (vec![0; 7], vec![value; 12]));
        assert_eq!(model.tensor("large").unwrap().shape(), [3, 5000]);
    }
    let left = fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.file_name().into_string().unwrap());
    assert_eq!(left.filter(|name| name.contains("export")).count(), 0, "nothing is left beside");
}

/// A safetensors file.
fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

/// What is exported and imported again is the same.
#[test]
fn state_imports_what_it_exported() {
    let dir = scratch();
    let (state, file) = (folder(dir.path()), dir.path().join("out.safetensors"));
    json(&["state", "export", &state, string(&file), "--json"]);
    let (copy, again) = (dir.path().join("copy"), dir.path().join("again.safetensors"));
    let found = json(&["state", "import", string(&copy), string(&file), "--json"]);
    assert_eq!((&found["generation"], &found["bytes"]), (&1.into(), &(60_000 + 7 + 12).into()));
    json(&["state", "export", string(&copy), string(&again), "--json"]);
    assert_eq!(fs::read(&file).unwrap(), fs::read(&again).unwrap());
    // A folder that is there has pages of its own size; a new one has those that were asked for.
    let other = dir.path().join("other.safetensors");
    fs::write(&other, with_header(r#"{"other":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#, &[1, 2, 3])).unwrap();
    let found = json(&["state", "import", &state, string(&other), "--json"]);
    assert_eq!((&found["page_bytes"], found["generations"].to_string()), (&PAGE.into(), "[3,2]".into()));
    let small = dir.path().join("small");
    let found = json(&["state", "import", string(&small), string(&other), "--page-size", "64KiB", "--json"]);
    assert_eq!(found["page_bytes"], 64 << 10);
    refused(&["state", "import", string(&small), string(&file), "--page-size", "48KiB"], 2, &["power of two"]);
    refused(&["state", "import", string(&small), string(&file), "--page-size", "1MiB"], 1, &["pages of"]);
    // Nothing changes in a folder that has a tensor of the name.
    refused(&["state", "import", string(&copy), string(&file)], 1, &["\"large\" already", "another name"]);
    assert_eq!(json(&["state", "inspect", string(&copy), "--json"])["generation"], 1);
    refused(&["state", "import", string(&copy), "/nowhere/at.all"], 1, &["/nowhere"]);
    refused(&["state", "import", string(dir.path()), string(&file)], 1, &["give a folder"]);
}

#[test]
fn state_says_what_is_wrong() {
    let dir = scratch();
    let state = folder(dir.path());
    let file = dir.path().join("out.safetensors");
    refused(&["state", "inspect", string(dir.path())], 1, &["durable folder", "give a folder"]);
    refused(&["state", "inspect", &state, "--generation", "7"], 1, &["generation 7 is not kept", "2, 1"]);
    refused(&["state", "export", &state, "/nowhere/at.all"], 1, &["/nowhere"]);
    let page = PageSize::new(Bytes::new(PAGE)).unwrap();
    let runtime = Runtime::builder().page_size(page).device_budget(Bytes::new(4 * PAGE)).open().unwrap();
    let open = runtime.open_durable(&state, DurableOptions::default().keep(2)).unwrap();
    refused(&["state", "verify", &state], 1, &["has it open"]);
    drop((open, runtime));
    // One flipped bit in each slot: of the newest generation, some page is damaged.
    let pages = File::options().read(true).write(true).open(Path::new(&state).join("pages")).unwrap();
    for slot in 0..pages.metadata().unwrap().len() / PAGE {
        let mut byte = [0];
        pages.read_exact_at(&mut byte, slot * PAGE + 9).unwrap();
        pages.write_all_at(&[byte[0] ^ 4], slot * PAGE + 9).unwrap();
    }
    json(&["state", "inspect", &state, "--json"]);
    for arguments in [&["state", "verify", &state][..], &["state", "export", &state, string(&file)]] {
        refused(arguments, 1, &["large", "other bytes than were written"]);
    }
    assert!(!file.exists());
    fs::write(Path::new(&state).join("manifest"), "no manifest").unwrap();
    refused(&["state", "inspect", &state], 1, &["damaged"]);
}

/// Flips a bit of the manifest.
fn flip(state: &str, at: u64) {
    let manifest = File::options().read(true).write(true).open(Path::new(state).join("manifest")).unwrap();
    let mut byte = [0];
    manifest.read_exact_at(&mut byte, at).unwrap();
    manifest.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

/// The newest generation is damaged: in its head, and in a block that only this one names.
#[test]
fn state_shows_the_generation_before_a_damaged_one_and_says_why() {
    let dir = scratch();
    let state = folder(dir.path());
    let manifest = fs::read(Path::new(&state).join("manifest")).unwrap();
    // Of generation 2, the head is the first block. Its note is 9 bytes.
    let note = manifest.chunks(4096).position(|block| block.starts_with(&[2; 9]) && block[9] == 0).unwrap() as u64;
    let file = dir.path().join("out.safetensors");
    for (at, why) in [(100, "does not match its checksum"), (note * 4096, "generation 2: the manifest is damaged")] {
        flip(&state, at);
        let found = json(&["state", "inspect", &state, "--json"]);
        assert_eq!((&found["generation"], found["generations"].to_string()), (&1.into(), "[1,0]".into()));
        let passed_over = found["passed_over"].as_array().unwrap();
        assert!(passed_over.len() == 1 && passed_over[0].as_str().unwrap().contains(why), "{passed_over:?}");
        let report = text(&["state", "inspect", &state]);
        assert!(report.contains("passed over") && report.contains(why), "{report}");
        // And it is whole.
        assert_eq!(json(&["state", "verify", &state, "--json"])["verified"], true);
        json(&["state", "export", &state, string(&file), "--json"]);
        let runtime = Runtime::builder().open().unwrap();
        let model = runtime.open_model(&file).unwrap();
        let bytes = runtime.pin(&model.tensor("a\"").unwrap()).wait().unwrap().bytes().to_vec();
        assert_eq!(bytes, [1; 12]);
        let of_newest = if at == 100 { "generation 2 is not kept" } else { "other bytes than were written" };
        refused(&["state", "inspect", &state, "--generation", "2"], 1, &[of_newest]);
        flip(&state, at);
        let found = json(&["state", "inspect", &state, "--json"]);
        assert_eq!((&found["generation"], found["passed_over"].to_string()), (&2.into(), "[]".into()));
    }
}
