//! A store's folder: whatever the bytes, no panic, no wrong block, and no deleted one that comes back.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../runtime/kv/tests/store/fuzzed.rs"]
mod fuzzed;

fuzz_target!(|input: &[u8]| fuzzed::check(input));
