//! Indices of sharded models: whatever the bytes, no panic, and no file name that leads out of the folder.
#![no_main]

use std::path::{Component, Path};

use libfuzzer_sys::fuzz_target;
use outcore::format::safetensors;

fuzz_target!(|input: &[u8]| {
    let Ok(index) = safetensors::parse_index(input) else { return };
    for shard in &index.shards {
        assert!(Path::new("/model").join(shard).starts_with("/model"));
        assert!(!Path::new(shard).components().any(|part| part == Component::ParentDir));
    }
    for (name, shard) in &index.tensors {
        assert!((*shard as usize) < index.shards.len());
        assert_eq!(index.shard_of(name), Some(*shard));
    }
});
