//! GGUF headers: whatever the bytes, no panic, and what parses keeps its promises.
#![no_main]

use libfuzzer_sys::fuzz_target;
use outcore::format::gguf;

fuzz_target!(|input: &[u8]| {
    // A real file goes on behind its header, so every input is also read as the start of a huge one.
    for file_len in [input.len() as u64, 1 << 50] {
        let Ok(header) = gguf::parse(input, file_len) else { continue };
        for t in &header.tensors {
            assert!(t.offset.checked_add(t.len).is_some_and(|end| end <= file_len));
            assert_eq!(t.dtype.bytes_for(t.elements()), Some(t.len));
            assert!((t.offset - header.data_offset).is_multiple_of(u64::from(header.alignment)));
        }
        for pair in header.tensors.windows(2) {
            let [a, b] = pair else { continue };
            assert!(a.len == 0 || a.end() <= b.offset || b.len == 0 || (a.offset, a.len) == (b.offset, b.len));
        }
        for (key, value) in header.metadata.iter() {
            assert_eq!(header.metadata.get(key).map(|v| v.value_type()), Some(value.value_type()));
            if let gguf::Value::Array(array) = value {
                assert_eq!(array.into_iter().count(), array.len());
            }
        }
        // What was read can be written, unless tied tensors become too many bytes, and is read again.
        let mut writer = gguf::HeaderWriter::new();
        writer.copy(&header.metadata, &[]);
        for t in &header.tensors {
            assert!(writer.tensor(&t.name, t.dtype, &t.shape).is_ok());
        }
        let Ok(layout) = writer.finish() else { continue };
        let again = gguf::parse(&layout.header, layout.len).map(|header| (header.tensors.len(), header.metadata.len()));
        assert_eq!(again.ok(), Some((header.tensors.len(), header.metadata.len())));
    }
});
