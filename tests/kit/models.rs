//! What several tests need: model files that are made here, and the real one if it was fetched.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::fake_cuda::skipped;

/// A safetensors file of U8 tensors `t0, t1, ...` with these lengths. The bytes differ everywhere.
pub struct Synthetic {
    pub dir: TempDir,
    pub path: PathBuf,
    pub bytes: Vec<u8>,
}

/// Cargo's folder for the files of tests, inside the build folder of this test. If the test runs from another place,
/// the system's folder.
pub fn folder() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let of_build = test.ancestors().nth(3).map(|build| build.join("tmp")).filter(|folder| folder.is_dir());
    of_build.unwrap_or_else(std::env::temp_dir)
}

/// The root of the repository in which the test runs: Cargo names the folder of the test's package. Not the folder in
/// which it was compiled, because test programs that are packed for another machine hold no path of this one.
pub fn repository() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let here = package.or_else(|| std::env::current_dir().ok()).unwrap_or_default();
    let root = here.ancestors().find(|folder| folder.join("tests/kit").is_dir());
    root.map_or_else(|| here.clone(), Path::to_path_buf)
}

pub fn synthetic(lengths: &[usize]) -> Synthetic {
    let dir = tempfile::tempdir_in(folder()).unwrap();
    let path = dir.path().join("model.safetensors");
    let mut end = 0;
    let mut entries = Vec::new();
    for (n, len) in lengths.iter().enumerate() {
        entries.push(format!("\"t{n}\":{{\"dtype\":\"U8\",\"shape\":[{len}],\"data_offsets\":[{end},{}]}}", end + len));
        end += len;
    }
    let mut header = format!("{{{}}}", entries.join(","));
    while header.len() % 8 != 0 {
        header.push(' ');
    }
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    let mut x = 0x9E37_79B9u32;
    bytes.extend((0..end).map(|_| {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x as u8
    }));
    std::fs::write(&path, &bytes).unwrap();
    Synthetic { dir, path, bytes }
}

/// The real model, if `make test` fetched it, or the one that the environment names.
pub fn real_model() -> Option<PathBuf> {
    std::env::var_os("OUTCORE_MODEL").map_or_else(fetched_model, |path| there(PathBuf::from(path)))
}

/// The model that `make test` fetches, and no other: for tests that know what is in it.
pub fn fetched_model() -> Option<PathBuf> {
    there(repository().join("models/SmolLM2-135M-Instruct.Q4_1.gguf"))
}

/// # Panics
/// If the environment names it as [required](crate::fake_cuda::REQUIRE), and it is not there.
fn there(path: PathBuf) -> Option<PathBuf> {
    if path.exists() {
        return Some(path);
    }
    let thread = std::thread::current();
    let why = format!("{} is not there; scripts/fetch_model.sh fetches it", path.display());
    skipped(thread.name().unwrap_or("a test"), "model", &why);
    None
}
