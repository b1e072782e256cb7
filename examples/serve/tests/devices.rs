//! What computes a model is chosen by its options and by what opens it. All else knows `Passes` only.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// Files that may name a device.
const ASIDE: [&str; 3] = ["args.rs", "main.rs", "open.rs"];
/// Wherever they stand, in any case.
const WORDS: [&str; 6] = ["cuda", "gpu", "host device", "hostdevice", "plainweights", "model::load"];
/// Types of one device, as whole words of code.
const TYPES: [&str; 2] = ["Model", "Session"];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in folder.read_dir().unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

/// The first line that names a device.
fn names_a_device(source: &str) -> Option<&str> {
    source.lines().find(|line| {
        let lower = line.to_lowercase();
        // Those of whatever device there is.
        let code = line.split("//").next().unwrap_or_default().replace("P::Session", "");
        let mut words = code.split(|c: char| !c.is_alphanumeric() && c != '_');
        WORDS.iter().any(|word| lower.contains(word)) || words.any(|word| TYPES.contains(&word))
    })
}

#[test]
fn no_source_names_a_device_but_those_that_open_a_model() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    sources(&folder, &mut found);
    let is_aside = |path: &Path| ASIDE.iter().any(|name| path == folder.join(name));
    let (aside, rest): (Vec<_>, Vec<_>) = found.iter().partition(|path| is_aside(path));
    assert!(aside.len() == ASIDE.len() && rest.len() > 15, "{found:?}");
    for path in rest {
        let source = read_to_string(path).unwrap();
        assert_eq!(names_a_device(&source), None, "{}", path.display());
    }
    // Words that it would find.
    let open = read_to_string(folder.join("open.rs")).unwrap();
    assert!(names_a_device(&open).is_some());
    for wrong in ["    session: Option<Session>,", "model: &outcore_llm::Model", "// on the GPU", "CudaSession::new("] {
        assert!(names_a_device(wrong).is_some(), "{wrong}");
    }
    for right in ["ErrorKind::ModelChanged", "// A Session.", "S: AnySession", "Option<P::Session>", "stats().device"] {
        assert_eq!(names_a_device(right), None);
    }
}
