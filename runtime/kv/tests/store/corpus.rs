//! The inputs of the fuzz target, without a fuzzer.

use std::fs;
use std::path::PathBuf;

use outcore_kv::files::Memory;
use outcore_testkit::harness::replay::{self, Case};
use outcore_testkit::models::repository;

use crate::blocks::below;
use crate::fuzzed::{FILE, check, open, put_all};

/// The input that is a sound store.
fn seed(repaired: bool) -> Vec<u8> {
    let memory = Memory::default();
    let store = open(&memory).unwrap();
    put_all(&store);
    store.close().unwrap();
    let files = memory.contents();
    let length = (files["manifest"].len() as u16).to_le_bytes();
    [&[u8::from(repaired)][..], &length, &files["manifest"], &files[FILE]].concat()
}

fn corpus() -> PathBuf {
    repository().join("fuzz/corpus/kv_store")
}

#[test]
#[ignore = "writes the seeds of the fuzz target anew"]
fn write_seeds() {
    fs::create_dir_all(corpus()).unwrap();
    fs::write(corpus().join("sound"), seed(false)).unwrap();
    fs::write(corpus().join("repaired"), seed(true)).unwrap();
}

#[test]
fn fuzz_corpus() {
    let folders = [corpus(), repository().join("fuzz/regressions/kv_store")];
    let files = folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten();
    let count = files.map(|file| check(&fs::read(file.unwrap().path()).unwrap())).count();
    assert!(count >= 2, "{count} inputs");
}

/// A little of what a fuzzer does.
#[test]
fn changed_seeds() {
    for first in replay::first_seed()..replay::first_seed() + 3000 {
        let _case = Case::of("changed_seeds", first);
        let state = &mut first.clone();
        let mut input = seed(first % 2 == 0);
        for _ in 0..=below(state, 4) {
            // Heads and identities, more often than the rest.
            let at = match below(state, 3) {
                0 => below(state, input.len() as u64),
                1 => below(state, 300),
                _ => 3 + 248 + 4096 * below(state, 4) + below(state, 300),
            };
            let at = (at as usize).min(input.len() - 1);
            let values = [0, 1, 0x7F, 0xFF, input[at] ^ 1 << below(state, 8), below(state, 256) as u8];
            input[at] = values[below(state, values.len() as u64) as usize];
        }
        check(&input);
    }
}
