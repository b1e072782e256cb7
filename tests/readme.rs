//! The promise: the README's example does what it says. It cannot be a doctest: it opens a model, and a README shows
//! the lines that a doctest hides. So a copy of it is a program that is run here beside a model of that name.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use support::{GgufFile, Kv};

mod example {
    include!("readme/example.rs");

    pub fn run() -> outcore::Result<()> {
        main()
    }
}

#[test]
fn the_readmes_example_runs() {
    let readme = include_str!("../README.md");
    let (_, code) = readme.split_once("```rust,no_run\n").unwrap();
    let (code, _) = code.split_once("```").unwrap();
    assert!(code == include_str!("readme/example.rs"), "README.md and tests/readme/example.rs differ");

    let folder = tempfile::tempdir().unwrap();
    let model = GgufFile::default().kv("general.architecture", Kv::str("llama")).tensor(
        "blk.0.attn_q.weight",
        &[64, 32],
        0,
        64 * 32 * 4,
    );
    std::fs::write(folder.path().join("model.gguf"), model.bytes()).unwrap();
    // The process may change its folder, because this is its only test.
    std::env::set_current_dir(folder.path()).unwrap();
    example::run().unwrap();
}
