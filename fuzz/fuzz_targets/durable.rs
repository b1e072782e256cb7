//! The manifest of a folder of durable tensors: whatever the bytes, no panic, and no memory beyond the file's size.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/runtime/fuzzed_state.rs"]
mod fuzzed_state;

fuzz_target!(|input: &[u8]| {
    fuzzed_state::check(input);
});
