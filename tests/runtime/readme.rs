//! The promise: the README's example does what it says. It cannot be a doctest: it opens a model, and a README shows
//! the lines that a doctest hides. So a copy of it is a program that is run here beside a model of that name.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use headers::{GgufFile, Kv};
use outcore_testkit::{harness, headers};

mod example {
    include!("readme_example.rs");

    pub fn run() -> outcore::Result<()> {
        main()
    }
}

#[test]
fn the_readmes_example_runs() {
    let readme = include_str!("../../README.md");
    let (_, code) = readme.split_once("```rust,no_run\n").unwrap();
    let (code, _) = code.split_once("```").unwrap();
    assert!(code == include_str!("readme_example.rs"), "README.md and tests/runtime/readme_example.rs differ");

    let folder = tempfile::tempdir().unwrap();
    let model = GgufFile::default().kv("general.architecture", Kv::str("llama")).tensor(
        "blk.0.attn_q.weight",
        &[64, 32],
        0,
        64 * 32 * 4,
    );
    std::fs::write(folder.path().join("model.gguf"), model.bytes()).unwrap();
    harness::alone("the_readmes_example_runs", || {
        std::env::set_current_dir(folder.path()).unwrap();
        example::run().unwrap();
    });
}
