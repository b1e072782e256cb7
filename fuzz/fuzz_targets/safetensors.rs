//! Safetensors headers: whatever the bytes, no panic, and what parses covers its file exactly.
#![no_main]

use libfuzzer_sys::fuzz_target;
use outcore::format::safetensors;

fuzz_target!(|input: &[u8]| {
    let file_len = input.len() as u64;
    let Ok(header) = safetensors::parse(input, file_len) else { return };
    let mut at = header.data_offset;
    for t in &header.tensors {
        assert_eq!(t.offset, at);
        assert_eq!(t.dtype.bytes_for(t.elements()), Some(t.len));
        at = t.end();
    }
    assert_eq!(at, file_len);
});
