//! This target must fail. It claims that no GGUF header parses, and every seed contradicts that. If a run of it ends
//! well, the harness is broken, and the silence of the other targets means nothing.
#![no_main]

use libfuzzer_sys::fuzz_target;
use outcore::format::gguf;

fuzz_target!(|input: &[u8]| {
    assert!(gguf::parse(input, input.len() as u64).is_err(), "canary: a header parsed, as it should");
});
