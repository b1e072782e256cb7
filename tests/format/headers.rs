//! Promise: a model file's header is read exactly, or refused with an error that says what is wrong.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

use headers::{GgufFile, Kv, rich_gguf, rich_index, rich_safetensors};
use outcore::format::{self, gguf, safetensors};
use outcore::{Bytes, DType, Error, ErrorKind, Runtime};
use outcore_testkit::{harness::replay, headers, models};
use tempfile::TempDir;

fn parse_gguf(file: &GgufFile) -> Result<gguf::Gguf, Error> {
    let bytes = file.bytes();
    gguf::parse(&bytes, bytes.len() as u64)
}

fn parse_st(bytes: &[u8]) -> Result<safetensors::Safetensors, Error> {
    safetensors::parse(bytes, bytes.len() as u64)
}

/// Checks an error's kind, that its message holds every one of `words`, and that it says what to do.
#[track_caller]
fn refused<T>(result: Result<T, Error>, kind: ErrorKind, words: &[&str]) {
    let Err(error) = result else { panic!("accepted, but should be refused: {words:?}") };
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{text}");
    for word in words {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
    assert!(error.advice().is_some() || kind == ErrorKind::Unsupported, "{text:?} gives no advice");
    assert!(text.len() < 1_000, "{text:?} is too long");
}

mod gguf_headers {
    use super::*;

    #[test]
    fn every_value_type_is_read() {
        let header = parse_gguf(&rich_gguf()).unwrap();
        let m = &header.metadata;
        assert_eq!((header.version, header.alignment), (3, 32));
        assert_eq!(m.get_str("general.architecture"), Some("llama"));
        assert_eq!(m.get_u64("a.u8"), Some(200));
        assert_eq!(m.get_i64("a.i8"), Some(-3));
        assert_eq!(m.get_u64("a.i8"), None);
        assert_eq!(m.get_u32("a.u16"), Some(60_000));
        assert_eq!(m.get_i64("a.i16"), Some(-30_000));
        assert_eq!(m.get_i64("a.i32"), Some(-7));
        assert_eq!(m.get_f32("a.f32"), Some(0.5));
        assert_eq!(m.get_bool("a.bool"), Some(true));
        assert_eq!(m.get_u64("a.u64"), Some(u64::MAX));
        assert_eq!(m.get_i64("a.u64"), None);
        assert_eq!(m.get_i64("a.i64"), Some(i64::MIN));
        assert_eq!(m.get_f64("a.f64"), Some(1e300));
        let tokens: Vec<_> = m.get_array_str("tokenizer.ggml.tokens").unwrap().collect();
        assert_eq!(tokens, ["<s>", "", "\u{120}the", "\u{1f600}"]);
        assert_eq!(m.get_array_f32("tokenizer.ggml.scores").unwrap().collect::<Vec<_>>(), [1.0, -2.0]);
        assert_eq!(m.get_array("flags").unwrap().into_iter().last(), Some(gguf::Value::Bool(true)));
        let nested: Vec<_> = m.get_array("nested").unwrap().into_iter().collect();
        let [gguf::Value::Array(numbers), gguf::Value::Array(strings)] = nested[..] else { panic!("{nested:?}") };
        assert_eq!(numbers.into_iter().filter_map(|v| v.as_u64()).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(strings.into_iter().next(), Some(gguf::Value::Str("x")));
        assert_eq!(m.len(), m.iter().count());
        assert!(m.get("missing").is_none());
        assert_eq!(m.require_str("missing").unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(m.require_u64("general.architecture").unwrap_err().kind(), ErrorKind::Format);
        assert!(format!("{m:?}").contains("\"a.u8\": U8(200)"));
    }

    #[test]
    fn tensors_are_placed_and_turned() {
        let header = parse_gguf(&rich_gguf()).unwrap();
        let find = |name: &str| header.tensors.iter().find(|t| t.name == name).unwrap();
        let embd = find("token_embd.weight");
        assert_eq!((embd.dtype, &embd.shape[..], embd.len), (DType::Q4_1, &[10, 64][..], 400));
        assert_eq!(embd.offset, header.data_offset);
        assert_eq!(find("blk.0.ffn.weight").dtype, DType::Q4_K);
        assert_eq!(find("empty").len, 0);
        assert_eq!((find("scalar").len, find("scalar").elements()), (4, 1));
        assert!(header.tensors.iter().all(|t| t.alignment() >= 32));
        assert!(header.tensors.is_sorted_by_key(|t| t.offset));
    }

    #[test]
    fn tied_tensors_share_exactly_one_range() {
        let header = parse_gguf(&rich_gguf()).unwrap();
        let find = |name: &str| header.tensors.iter().find(|t| t.name == name).unwrap();
        assert_eq!(find("output.weight").offset, find("token_embd.weight").offset);
    }

    #[test]
    fn overlap_is_refused() {
        let file = GgufFile { data_len: 512, ..GgufFile::default() };
        let overlap = file.clone().info("first", &[64], 0, 0).info("second", &[64], 0, 224 & !31);
        refused(parse_gguf(&overlap), ErrorKind::Format, &["\"first\"", "\"second\"", "overlap"]);
        let same_start = file.clone().info("short", &[16], 0, 0).info("long", &[64], 0, 0);
        refused(parse_gguf(&same_start), ErrorKind::Format, &["overlap"]);
        // A tied pair does not hide a later tensor that overlaps it.
        let hidden = file.info("a", &[64], 0, 0).info("b", &[64], 0, 0).info("c", &[16], 0, 64);
        refused(parse_gguf(&hidden), ErrorKind::Format, &["overlap", "\"c\""]);
    }

    #[test]
    fn versions_and_byte_orders() {
        assert_eq!(parse_gguf(&GgufFile { version: 2, ..rich_gguf() }).unwrap().version, 2);
        for (version, word) in [(1, "version 1"), (4, "version 4"), (0, "version 0"), (u32::MAX, "version")] {
            refused(parse_gguf(&GgufFile { version, ..rich_gguf() }), ErrorKind::Unsupported, &[word]);
        }
        let big = GgufFile { version: 3u32.swap_bytes(), ..rich_gguf() };
        refused(parse_gguf(&big), ErrorKind::Unsupported, &["big-endian"]);
        refused(parse_gguf(&GgufFile { magic: *b"FUGG", ..rich_gguf() }), ErrorKind::Format, &["GGUF"]);
    }

    #[test]
    fn alignment() {
        let file = GgufFile { alignment: 4096, ..GgufFile::default() };
        let wide = file.kv("general.alignment", Kv::U32(4096)).tensor("t", &[8], 0, 32).tensor("u", &[8], 0, 32);
        let header = parse_gguf(&wide).unwrap();
        assert_eq!((header.data_offset, header.tensors[1].offset), (4096, 8192));
        for n in [0, 3, 48] {
            let odd = GgufFile::default().kv("general.alignment", Kv::U32(n));
            refused(parse_gguf(&odd), ErrorKind::Format, &["general.alignment", "power of two"]);
        }
        let text = GgufFile::default().kv("general.alignment", Kv::str("32"));
        refused(parse_gguf(&text), ErrorKind::Format, &["general.alignment", "string", "u32"]);
        let off = GgufFile { data_len: 64, ..GgufFile::default() }.info("t", &[4], 0, 8);
        refused(parse_gguf(&off), ErrorKind::Format, &["\"t\"", "offset 8", "alignment 32"]);
    }

    #[test]
    fn shapes() {
        let five = GgufFile::default().info("t", &[1; 5], 0, 0);
        refused(parse_gguf(&five), ErrorKind::Format, &["\"t\"", "5 dimensions", "4"]);
        for dims in [&[1 << 40, 1 << 40][..], &[u64::MAX], &[1 << 62, 2], &[0, u64::MAX]] {
            refused(parse_gguf(&GgufFile::default().info("t", dims, 0, 0)), ErrorKind::Format, &["\"t\"", "2^63"]);
        }
        let bytes = GgufFile::default().info("t", &[1 << 62], 0, 0);
        refused(parse_gguf(&bytes), ErrorKind::Format, &["\"t\"", "2^64"]);
        let row = GgufFile::default().info("t", &[33, 32], 3, 0);
        refused(parse_gguf(&row), ErrorKind::Format, &["\"t\"", "rows of 33", "Q4_1", "32"]);
    }

    #[test]
    fn types() {
        for id in [4, 5, 31, 32, 33, 36, 37, 38] {
            refused(
                parse_gguf(&GgufFile::default().info("t", &[256], id, 0)),
                ErrorKind::Unsupported,
                &["\"t\"", "withdrawn"],
            );
        }
        let unknown = GgufFile::default().info("t", &[256], 1000, 0);
        refused(parse_gguf(&unknown), ErrorKind::Unsupported, &["\"t\"", "1000", "unknown"]);
        let value = GgufFile::default().kv("k", Kv::Raw(13, vec![]));
        refused(parse_gguf(&value), ErrorKind::Format, &["\"k\"", "type 13"]);
        let element = GgufFile::default().kv("k", Kv::Raw(9, [vec![99, 0, 0, 0], vec![0; 8]].concat()));
        refused(parse_gguf(&element), ErrorKind::Format, &["\"k\"", "type 99"]);
    }

    #[test]
    fn bounds() {
        let outside = GgufFile { data_len: 64, ..GgufFile::default() }.info("t", &[32], 0, 0);
        refused(parse_gguf(&outside), ErrorKind::Format, &["\"t\"", "the file ends"]);
        let far = GgufFile { data_len: 64, ..GgufFile::default() }.info("t", &[8], 0, !31);
        refused(parse_gguf(&far), ErrorKind::Format, &["\"t\"", "overflows"]);
        let behind = GgufFile::default().info("t", &[8], 0, 1 << 40);
        refused(parse_gguf(&behind), ErrorKind::Format, &["\"t\"", "the file ends"]);
    }

    #[test]
    fn duplicates_are_refused() {
        let keys = GgufFile::default().kv("k", Kv::U8(1)).kv("k", Kv::U8(1));
        refused(parse_gguf(&keys), ErrorKind::Format, &["key \"k\"", "twice"]);
        let names = GgufFile::default().tensor("t", &[8], 0, 32).tensor("t", &[8], 0, 32);
        refused(parse_gguf(&names), ErrorKind::Format, &["tensor \"t\"", "twice"]);
    }

    #[test]
    fn text_must_be_utf8() {
        let mut key = GgufFile::default();
        key.kvs.push((vec![0xff, 0xfe], Kv::U8(1)));
        refused(parse_gguf(&key), ErrorKind::Format, &["key 0", "UTF-8"]);
        let value = GgufFile::default().kv("k", Kv::Str(vec![0xc3, 0x28]));
        refused(parse_gguf(&value), ErrorKind::Format, &["\"k\"", "UTF-8"]);
        let element = GgufFile::default().kv("k", Kv::Array(8, vec![Kv::str("ok"), Kv::Str(vec![0x80])]));
        refused(parse_gguf(&element), ErrorKind::Format, &["\"k\"", "UTF-8"]);
        let mut name = GgufFile::default().info("t", &[8], 0, 0);
        name.tensors[0].name = vec![0xff];
        refused(parse_gguf(&name), ErrorKind::Format, &["tensor 0", "UTF-8"]);
    }

    #[test]
    fn bools_are_zero_or_one() {
        refused(parse_gguf(&GgufFile::default().kv("k", Kv::Bool(2))), ErrorKind::Format, &["\"k\"", "bool is 2"]);
        let array = GgufFile::default().kv("k", Kv::Array(7, vec![Kv::Bool(1), Kv::Bool(255)]));
        refused(parse_gguf(&array), ErrorKind::Format, &["\"k\"", "bool is 255"]);
    }

    #[test]
    fn nesting_is_limited() {
        let nest = |depth| (1..depth).fold(Kv::Array(0, vec![Kv::U8(7)]), |inner, _| Kv::Array(9, vec![inner]));
        assert!(parse_gguf(&GgufFile::default().kv("k", nest(gguf::MAX_ARRAY_DEPTH))).is_ok());
        let deep = GgufFile::default().kv("k", nest(gguf::MAX_ARRAY_DEPTH + 1));
        refused(parse_gguf(&deep), ErrorKind::Format, &["\"k\"", "nested", "4"]);
        let level = [9u32.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec()].concat();
        let abyss = GgufFile::default().kv("k", Kv::Raw(9, level.repeat(100_000)));
        refused(parse_gguf(&abyss), ErrorKind::Format, &["nested"]);
    }

    #[test]
    fn counts_and_lengths_are_not_trusted() {
        for count in [gguf::MAX_TENSORS + 1, u64::MAX] {
            let lie = GgufFile { tensor_count: Some(count), ..rich_gguf() };
            refused(parse_gguf(&lie), ErrorKind::Format, &["tensors", "at most"]);
        }
        let many = GgufFile { tensor_count: Some(gguf::MAX_TENSORS), ..rich_gguf() };
        refused(parse_gguf(&many), ErrorKind::Format, &["the file ends"]);
        let keys = GgufFile { kv_count: Some(u64::MAX), ..rich_gguf() };
        refused(parse_gguf(&keys), ErrorKind::Format, &["key-values", "at most"]);
        for len in [1 << 20, 1 << 40, u64::MAX] {
            let string = GgufFile::default().kv("k", Kv::Raw(8, len.to_le_bytes().to_vec()));
            refused(parse_gguf(&string), ErrorKind::Format, &["the file ends"]);
            let array = [8u32.to_le_bytes().to_vec(), len.to_le_bytes().to_vec()].concat();
            refused(parse_gguf(&GgufFile::default().kv("k", Kv::Raw(9, array))), ErrorKind::Format, &["the file ends"]);
            let array = [12u32.to_le_bytes().to_vec(), len.to_le_bytes().to_vec()].concat();
            refused(parse_gguf(&GgufFile::default().kv("k", Kv::Raw(9, array))), ErrorKind::Format, &["the file ends"]);
        }
        let mut name = GgufFile::default().info("", &[8], 0, 0);
        name.tensors[0].name = vec![b'x'; gguf::MAX_NAME_BYTES as usize + 1];
        refused(parse_gguf(&name), ErrorKind::Format, &["tensor 0", "65536 bytes", "65535"]);
        let long = "n".repeat(60_000);
        refused(parse_gguf(&GgufFile::default().info(&long, &[8], 99, 0)), ErrorKind::Unsupported, &["nnn\"..."]);
    }

    #[test]
    fn every_truncation_is_refused() {
        let file = rich_gguf();
        let (whole, header) = (file.bytes(), file.header().len());
        for cut in 0..whole.len() {
            refused(gguf::parse(&whole[..cut], cut as u64), ErrorKind::Format, &[]);
            // As the beginning of a longer file these bytes are accepted once the header is complete, because data is
            // not looked at.
            assert_eq!(gguf::parse(&whole[..cut], whole.len() as u64).is_ok(), cut >= header, "{cut}");
        }
    }

    #[test]
    fn a_file_without_tensors_is_a_vocabulary() {
        let header = parse_gguf(&GgufFile::default().kv("k", Kv::U8(1))).unwrap();
        assert!(header.tensors.is_empty());
    }
}

mod safetensors_headers {
    use super::*;

    #[test]
    fn a_header_is_read() {
        let header = parse_st(&rich_safetensors()).unwrap();
        let names: Vec<_> = header.tensors.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "none", "f4"]);
        assert_eq!(header.metadata.get("format").map(String::as_str), Some("pt"));
        assert_eq!(header.tensors[0].offset, header.data_offset);
        assert_eq!((header.tensors[1].dtype, header.tensors[1].len), (DType::BF16, 12));
        assert_eq!(header.tensors[3].len, 2);
        assert!(parse_st(&headers::safetensors("{}", 0)).unwrap().tensors.is_empty());
        assert!(parse_st(&headers::safetensors(r#"{"__metadata__":null}"#, 0)).unwrap().metadata.is_empty());
    }

    #[test]
    fn unaligned_data_is_reported_not_refused() {
        let json = r#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
        for pad in 0..8 {
            let bytes = headers::safetensors(&format!("{json}{}", " ".repeat(pad)), 4);
            let header = parse_st(&bytes).unwrap();
            assert_eq!(header.tensors[0].offset % header.tensors[0].alignment(), 0);
            assert_eq!(header.tensors[0].alignment() >= 8, (8 + json.len() + pad).is_multiple_of(8));
        }
    }

    #[test]
    fn names_are_unique() {
        let twice = r#"{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
        refused(parse_st(&headers::safetensors(twice, 2)), ErrorKind::Format, &["\"t\"", "twice"]);
        let field = r#"{"t":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#;
        refused(parse_st(&headers::safetensors(field, 1)), ErrorKind::Format, &["duplicate", "dtype"]);
        let meta = r#"{"__metadata__":{},"__metadata__":{}}"#;
        refused(parse_st(&headers::safetensors(meta, 0)), ErrorKind::Format, &["duplicate", "__metadata__"]);
        let text = r#"{"__metadata__":{"a":"1","a":"2"}}"#;
        refused(parse_st(&headers::safetensors(text, 0)), ErrorKind::Format, &["\"a\"", "twice"]);
    }

    #[test]
    fn data_is_covered_exactly() {
        let two = |a: &str, b: &str| {
            let one = |name, range| format!(r#""{name}":{{"dtype":"U8","shape":[4],"data_offsets":[{range}]}}"#);
            format!("{{{},{}}}", one("first", a), one("second", b))
        };
        assert!(parse_st(&headers::safetensors(&two("4,8", "0,4"), 8)).is_ok());
        let overlap = headers::safetensors(&two("0,4", "2,6"), 6);
        refused(parse_st(&overlap), ErrorKind::Format, &["\"second\"", "overlaps"]);
        let tied = headers::safetensors(&two("0,4", "0,4"), 4);
        refused(parse_st(&tied), ErrorKind::Format, &["overlaps"]);
        let hole = headers::safetensors(&two("0,4", "8,12"), 12);
        refused(parse_st(&hole), ErrorKind::Format, &["\"second\"", "hole"]);
        let late = headers::safetensors(&two("2,6", "6,10"), 10);
        refused(parse_st(&late), ErrorKind::Format, &["\"first\"", "hole"]);
        let short = headers::safetensors(&two("0,4", "4,8"), 7);
        refused(parse_st(&short), ErrorKind::Format, &["\"second\"", "end at byte", "incomplete"]);
        let long = headers::safetensors(&two("0,4", "4,8"), 9);
        refused(parse_st(&long), ErrorKind::Format, &["goes on to byte"]);
    }

    #[test]
    fn sizes_match_shapes() {
        let one = |dtype: &str, shape: &str, range: &str| {
            let json = format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{range}}}}}"#);
            parse_st(&headers::safetensors(&json, 8))
        };
        assert!(one("F32", "[2]", "[0,8]").is_ok());
        refused(one("F32", "[3]", "[0,8]"), ErrorKind::Format, &["\"t\"", "[0, 8]", "12 bytes"]);
        refused(one("F32", "[2]", "[8,0]"), ErrorKind::Format, &["\"t\"", "[8, 0]"]);
        refused(one("F4", "[3]", "[0,8]"), ErrorKind::Format, &["\"t\"", "F4"]);
        refused(one("U8", "[4294967296,4294967296]", "[0,8]"), ErrorKind::Format, &["\"t\"", "2^64"]);
        refused(one("F64", "[4611686018427387904]", "[0,8]"), ErrorKind::Format, &["\"t\"", "2^64"]);
        refused(one("F99", "[2]", "[0,8]"), ErrorKind::Unsupported, &["\"t\"", "F99"]);
        refused(one("Q4_0", "[32]", "[0,8]"), ErrorKind::Unsupported, &["\"t\"", "Q4_0"]);
        let top = one("U8", "[8]", "[18446744073709551607,18446744073709551615]");
        refused(top, ErrorKind::Format, &["\"t\"", "overflow"]);
        let dims = format!("[{}1]", "1,".repeat(safetensors::MAX_DIMS));
        refused(one("U8", &dims, "[0,8]"), ErrorKind::Format, &["at most 64"]);
        for shape in ["[-1]", "[1.5]", "\"2\"", "{}", "[18446744073709551616]", "null"] {
            refused(one("U8", shape, "[0,8]"), ErrorKind::Format, &["not valid"]);
        }
        refused(one("U8", "[8]", "[0,8,9]"), ErrorKind::Format, &["not valid"]);
        refused(one("U8", "[8]", "[8]"), ErrorKind::Format, &["not valid"]);
    }

    #[test]
    fn header_lengths_are_not_trusted() {
        for cut in 0..8 {
            refused(parse_st(&rich_safetensors()[..cut]), ErrorKind::Format, &["at least 8"]);
        }
        for (len, word) in [(1000u64, "the file ends"), (100_000_001, "100000000"), (u64::MAX, "100000000")] {
            let mut bytes = rich_safetensors();
            bytes[..8].copy_from_slice(&len.to_le_bytes());
            refused(parse_st(&bytes), ErrorKind::Format, &[word]);
        }
        let mut short = rich_safetensors();
        short[..8].copy_from_slice(&20u64.to_le_bytes());
        refused(parse_st(&short), ErrorKind::Format, &["not valid"]);
        let whole = rich_safetensors();
        refused(safetensors::parse(&whole[..20], whole.len() as u64), ErrorKind::Format, &["only 20 bytes"]);
    }

    #[test]
    fn junk_is_refused() {
        for json in ["", "[]", " {}", "{", "{}x", "nul", "{\"t\":1}", "{\"t\":{}}", "{1:2}", "{\"\\ud800\":{}}"] {
            refused(parse_st(&headers::safetensors(json, 0)), ErrorKind::Format, &["safetensors header"]);
        }
        let mut latin = headers::safetensors("{\"x\":{}}", 0);
        latin[10] = 0xff;
        refused(parse_st(&latin), ErrorKind::Format, &["not valid"]);
        let deep = format!("{{\"t\":{{\"extra\":{}{}}}}}", "[".repeat(100_000), "]".repeat(100_000));
        refused(parse_st(&headers::safetensors(&deep, 0)), ErrorKind::Format, &["not valid"]);
        let meta = r#"{"__metadata__":{"a":1}}"#;
        refused(parse_st(&headers::safetensors(meta, 0)), ErrorKind::Format, &["not valid"]);
    }
}

mod indices {
    use super::*;

    #[test]
    fn an_index_is_read() {
        let index = safetensors::parse_index(&rich_index()).unwrap();
        assert_eq!(index.shards, ["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"]);
        assert_eq!(index.tensors, [("b".to_owned(), 0), ("a".to_owned(), 0), ("z".to_owned(), 1)]);
        assert_eq!((index.shard_of("z"), index.shard_of("y")), (Some(1), None));
        let late = safetensors::parse_index(br#"{"weight_map":{"a":"z.st","b":"a.st"}}"#).unwrap();
        assert_eq!(late.tensors, [("a".to_owned(), 1), ("b".to_owned(), 0)]);
    }

    #[test]
    fn files_outside_the_folder_are_refused() {
        for name in ["../x", "/etc/passwd", "a/../../x", "..", ".", "", "./x", "a/", "//x", "x\\u0000y", "a/../b", "/"]
        {
            let json = format!(r#"{{"weight_map":{{"t":"{name}"}}}}"#);
            refused(safetensors::parse_index(json.as_bytes()), ErrorKind::Format, &["not inside the model's folder"]);
        }
        assert!(safetensors::parse_index(br#"{"weight_map":{"t":"sub/x.safetensors"}}"#).is_ok());
    }

    #[test]
    fn duplicates_and_junk_are_refused() {
        let twice = br#"{"weight_map":{"t":"a","t":"b"}}"#;
        refused(safetensors::parse_index(twice), ErrorKind::Format, &["\"t\"", "twice"]);
        for junk in ["{}", "[]", "{\"weight_map\":[]}", "{\"weight_map\":{\"a\":1}}", "{\"weight_map\":{}", ""] {
            refused(safetensors::parse_index(junk.as_bytes()), ErrorKind::Format, &["index"]);
        }
    }
}

mod files {
    use super::*;

    struct Folder(TempDir);

    impl Folder {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn put(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
            let path = self.0.path().join(name);
            fs::write(&path, bytes).unwrap();
            path
        }

        fn path(&self) -> &Path {
            self.0.path()
        }
    }

    /// One of three files of a split model, with one tensor.
    fn split(no: u16) -> GgufFile {
        GgufFile::default()
            .kv("split.no", Kv::U16(no))
            .kv("split.count", Kv::U16(3))
            .kv("split.tensors.count", Kv::I32(3))
            .kv("which", Kv::U16(no))
            .tensor(&format!("t{no}"), &[8], 0, 32)
    }

    fn shard(name: &str) -> Vec<u8> {
        let json = format!(r#"{{"{name}":{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}}}"#);
        headers::safetensors(&json, 4)
    }

    #[test]
    fn one_file_of_either_format_by_any_name() {
        let folder = Folder::new();
        let model = format::open(folder.put("weights.bin", rich_gguf().bytes())).unwrap();
        assert_eq!(model.tensor("norm.weight").unwrap().shape, [64]);
        assert_eq!(model.gguf().unwrap().get_str("general.architecture"), Some("llama"));
        assert_eq!(model.files.len(), 1);
        let error = model.tensor("norm.weigh").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("\"norm.weight\""), "{error}");

        let model = format::open(folder.put("model.dat", rich_safetensors())).unwrap();
        assert_eq!(model.tensor("b").unwrap().shape, [2, 3]);
        assert_eq!(model.tensor_bytes(), 30);
        assert!(model.gguf().is_none());
        for t in &model.tensors {
            assert_eq!(model.tensor(&t.name).unwrap(), t);
        }
    }

    #[test]
    fn a_long_header_is_read_in_parts() {
        let folder = Folder::new();
        let tokens: Vec<String> = (0..400_000).map(|i| format!("token {i}")).collect();
        let file = rich_gguf().kv("many", Kv::strs(tokens.iter().map(String::as_str)));
        assert!(file.header().len() > 5 << 20);
        let model = format::open(folder.put("big.gguf", file.bytes())).unwrap();
        assert!(model.gguf().unwrap().get_array_str("many").unwrap().eq(tokens.iter()));
    }

    /// The bytes that this thread has read with system calls, except those read here. `None` if the kernel does not
    /// count them.
    fn read_by_this_thread() -> Option<u64> {
        thread_local!(static ASKING: std::cell::Cell<u64> = const { std::cell::Cell::new(0) });
        let text = fs::read_to_string("/proc/thread-self/io").ok()?;
        let read = text.lines().find_map(|line| line.strip_prefix("rchar: "))?.parse::<u64>().ok()?;
        let before = ASKING.get();
        ASKING.set(before + text.len() as u64);
        Some(read - before)
    }

    /// A GGUF header does not say how long it is, so a little of what follows is read with it, but never all the data.
    #[test]
    fn opening_reads_headers_and_next_to_no_data() {
        const SLACK: u64 = 128 << 10;
        const BEGINNINGS: u64 = 4096 + 64;
        if read_by_this_thread().is_none() {
            eprintln!("SKIPPED: the kernel does not count what threads read");
            return;
        }
        let folder = Folder::new();
        let tokens: Vec<String> = (0..200_000).map(|i| format!("t{i}")).collect();
        let long = rich_gguf().kv("many", Kv::strs(tokens.iter().map(String::as_str)));
        let weights = |file: GgufFile| file.tensor("weights", &[32 << 20], 0, 128 << 20);
        for (name, file) in [("long", weights(long)), ("short", weights(rich_gguf()))] {
            let header = file.header();
            let path = folder.put(&format!("{name}.gguf"), &header);
            let data = (header.len() as u64).next_multiple_of(32);
            fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(data + file.data_len).unwrap();

            let before = read_by_this_thread().unwrap();
            let parsed = format::open(&path).unwrap();
            let read = read_by_this_thread().unwrap() - before;
            let most = header.len() as u64 + SLACK + BEGINNINGS;
            assert!(
                read >= header.len() as u64 && read <= most,
                "{name}: {read} read, the header has {}",
                header.len()
            );

            // The header is not read again. The store reads the first block to see whether O_DIRECT works. What is read
            // of `/proc/self/maps` counts too.
            let runtime = Runtime::builder().device_budget(Bytes::mib(8)).open().unwrap();
            let mappings = 2 * fs::read("/proc/self/maps").unwrap().len() as u64;
            let before = read_by_this_thread().unwrap();
            let model = runtime.open_parsed(parsed).unwrap();
            let read = read_by_this_thread().unwrap() - before;
            assert!(read <= BEGINNINGS + mappings, "{name}: {read} read though the header was there");
            assert!(model.contains("weights"));
            assert_eq!(runtime.stats().traffic.disk_read, Bytes::ZERO);
            drop(model);
            runtime.close().unwrap();
        }
        // A safetensors file says how long its header is, so no byte of data is read.
        let json = r#"{"w":{"dtype":"U8","shape":[1048576],"data_offsets":[0,1048576]}}"#;
        let path = folder.put("one.safetensors", headers::safetensors(json, 1 << 20));
        let before = read_by_this_thread().unwrap();
        format::open(&path).unwrap();
        let read = read_by_this_thread().unwrap() - before;
        assert!(read <= 2 * 64 + json.len() as u64 + 8, "{read} read");
    }

    #[test]
    fn what_is_not_a_model_is_said() {
        let folder = Folder::new();
        refused(format::open(folder.path().join("no")), ErrorKind::NotFound, &["open", "/no", "check the path"]);
        refused(format::open(folder.path()), ErrorKind::NotFound, &["holds no model"]);
        refused(format::open("/dev/null"), ErrorKind::InvalidArgument, &["not a regular file"]);
        for (bytes, kind, word) in [
            (&b""[..], ErrorKind::Format, "is empty"),
            (b"hello world, this is text", ErrorKind::Format, "hello world, thi"),
            (b"\x00\x01", ErrorKind::Format, "\\x00\\x01"),
            (b"PK\x03\x04rest", ErrorKind::Unsupported, "zip"),
            (b"\x80\x02}q\x00", ErrorKind::Unsupported, "pickle"),
            (b"version https://git-lfs.github.com/spec/v1\noid", ErrorKind::Unsupported, "git lfs pull"),
            (b"tjgg\x01\0\0\0", ErrorKind::Unsupported, "older than GGUF"),
            (b"GGU", ErrorKind::Format, "GGU"),
            (b"GGUF", ErrorKind::Format, "incomplete"),
            (b"{\"a\": 1}", ErrorKind::Format, "weight_map"),
            (b"\x10\0\0\0\0\0\0\0{", ErrorKind::Format, "the file ends at byte 9"),
            (b"\xff\xff\xff\xff\xff\xff\xff\xff{\"a\":", ErrorKind::Format, "allows 100000000"),
        ] {
            refused(format::open(folder.put("x", bytes)), kind, &[word, "/x"]);
        }
    }

    #[test]
    fn no_permission() {
        use std::os::unix::fs::PermissionsExt;
        use std::os::unix::process::CommandExt;
        const CHILD: &str = "OUTCORE_CHILD_WITHOUT_PERMISSION";
        let check = |path: &Path| refused(format::open(path), ErrorKind::PermissionDenied, &["m.gguf", "permission"]);
        if let Some(path) = std::env::var_os(CHILD) {
            return check(Path::new(&path));
        }
        let folder = Folder::new();
        let path = folder.put("m.gguf", rich_gguf().bytes());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
        if fs::File::open(&path).is_err() {
            return check(&path);
        }
        // This user may read every file. The user `nobody` may not.
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "headers::files::no_permission", "--nocapture"]).env(CHILD, &path).uid(65_534);
        match child.output() {
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stdout);
                assert!(output.status.success() && said.contains("1 passed"), "{said}");
            }
            Err(cause) => println!("SKIPPED: no process can be started as another user here: {cause}"),
        }
    }

    #[test]
    fn a_split_model_opens_by_any_file() {
        let folder = Folder::new();
        let paths: Vec<_> =
            (0..3).map(|n| folder.put(&format!("m-0000{}-of-00003.gguf", n + 1), split(n).bytes())).collect();
        for path in paths.iter().map(PathBuf::as_path).chain([folder.path()]) {
            let model = format::open(path).unwrap();
            assert_eq!(model.files.iter().map(|f| &f.path).collect::<Vec<_>>(), paths.iter().collect::<Vec<_>>());
            assert_eq!(model.tensors.iter().map(|t| t.file).collect::<Vec<_>>(), [0, 1, 2]);
            assert_eq!(model.tensor("t2").unwrap().file, 2);
            assert_eq!(model.gguf().unwrap().get_u64("which"), Some(0));
        }
    }

    #[test]
    fn a_split_model_is_whole_or_refused() {
        let folder = Folder::new();
        let name = |n: u16| format!("m-0000{n}-of-00003.gguf");
        folder.put(&name(1), split(0).bytes());
        let third = folder.put(&name(3), split(2).bytes());
        for path in [third.as_path(), folder.path()] {
            refused(format::open(path), ErrorKind::NotFound, &["file 2 of 3", "m-00002-of-00003.gguf", "one folder"]);
        }
        folder.put(&name(2), split(0).bytes());
        refused(format::open(&third), ErrorKind::Format, &["m-00002-of-00003.gguf", "not file 2 of 3"]);
        folder.put(&name(2), rich_safetensors());
        refused(format::open(&third), ErrorKind::Format, &["m-00002-of-00003.gguf", "same format"]);
        folder.put(&name(2), split(1).tensor("more", &[8], 0, 32).bytes());
        refused(format::open(&third), ErrorKind::Format, &["4 tensors", "says 3"]);
        let mut same = split(1);
        same.tensors[0].name = b"t0".to_vec();
        folder.put(&name(2), same.bytes());
        refused(format::open(&third), ErrorKind::Format, &["\"t0\"", "twice"]);
        let renamed = folder.put("renamed.gguf", split(1).bytes());
        refused(format::open(renamed), ErrorKind::Format, &["file 2 of 3", "NAME-00002-of-00003.gguf"]);
        let wrong = folder.put("w-00001-of-00003.gguf", split(1).bytes());
        refused(format::open(wrong), ErrorKind::Format, &["file 2 of 3"]);
    }

    #[test]
    fn a_sharded_model_opens_by_index_folder_or_shard() {
        let folder = Folder::new();
        let index =
            br#"{"weight_map":{"b":"model-00002-of-00002.safetensors","a":"model-00001-of-00002.safetensors"}}"#;
        let first = folder.put("model-00001-of-00002.safetensors", shard("a"));
        folder.put("model-00002-of-00002.safetensors", shard("b"));
        let by_names = format::open(&first).unwrap();
        assert_eq!((by_names.files.len(), by_names.tensors.len()), (2, 2));
        let index = folder.put("model.safetensors.index.json", index);
        for path in [index.as_path(), folder.path(), first.as_path()] {
            let model = format::open(path).unwrap();
            assert_eq!(model.tensor("b").unwrap().file, 1);
            assert_eq!(model.files[0].path, first);
            assert_eq!(model.tensors.len(), 2);
        }
    }

    #[test]
    fn many_shards_keep_their_order() {
        let folder = Folder::new();
        let name = |n: usize| format!("m-{n:05}-of-00040.safetensors");
        for n in 1..=40 {
            folder.put(&name(n), shard(&format!("t{n}")));
        }
        let model = format::open(folder.path()).unwrap();
        for n in 1..=40 {
            assert_eq!(model.tensor(&format!("t{n}")).unwrap().file, n as u32 - 1);
            assert!(model.files[n - 1].path.ends_with(name(n)));
        }
        for n in [39, 17] {
            fs::remove_file(folder.path().join(name(n))).unwrap();
            refused(format::open(folder.path()), ErrorKind::NotFound, &[&format!("file {n} of 40")]);
        }
    }

    #[test]
    fn symbolic_links_are_followed() {
        let (folder, cache) = (Folder::new(), Folder::new());
        let blob = cache.put("blob", shard("a"));
        std::os::unix::fs::symlink(blob, folder.path().join("s.safetensors")).unwrap();
        let index = folder.put("model.safetensors.index.json", r#"{"weight_map":{"a":"s.safetensors"}}"#);
        assert_eq!(format::open(index).unwrap().tensors.len(), 1);
    }

    #[test]
    fn an_index_and_its_shards_must_agree() {
        let folder = Folder::new();
        let index = |json: &str| folder.put("model.safetensors.index.json", json);
        folder.put("s1.safetensors", shard("a"));
        let missing = index(r#"{"weight_map":{"a":"s1.safetensors","b":"s2.safetensors"}}"#);
        refused(format::open(missing), ErrorKind::NotFound, &["file 2 of 2", "s2.safetensors"]);
        let absent = index(r#"{"weight_map":{"a":"s1.safetensors","ghost":"s1.safetensors"}}"#);
        refused(format::open(absent), ErrorKind::Format, &["\"ghost\"", "s1.safetensors"]);
        folder.put("s2.safetensors", "version https://git-lfs.github.com/spec/v1\n");
        let pointer = index(r#"{"weight_map":{"a":"s1.safetensors","b":"s2.safetensors"}}"#);
        refused(format::open(pointer), ErrorKind::Unsupported, &["s2.safetensors", "git lfs pull"]);
        folder.put("s2.safetensors", rich_gguf().bytes());
        let mixed = index(r#"{"weight_map":{"a":"s1.safetensors","b":"s2.safetensors"}}"#);
        refused(format::open(mixed), ErrorKind::Format, &["s2.safetensors", "same format"]);
        let outside = index(r#"{"weight_map":{"a":"../s1.safetensors"}}"#);
        refused(format::open(outside), ErrorKind::Format, &["index.json", "../s1.safetensors"]);
        // What the index does not name is not part of the model.
        folder.put("s3.safetensors", rich_safetensors());
        let part = index(r#"{"weight_map":{"b":"s3.safetensors"}}"#);
        assert_eq!(format::open(part).unwrap().tensors.len(), 1);
    }

    #[test]
    fn a_folder_with_several_models_asks_which() {
        let folder = Folder::new();
        folder.put("a.gguf", rich_gguf().bytes());
        assert!(format::open(folder.path()).is_ok());
        folder.put("b.gguf", rich_gguf().bytes());
        refused(
            format::open(folder.path()),
            ErrorKind::InvalidArgument,
            &["2 models", "a.gguf, b.gguf", "name the file"],
        );
        folder.put("model.safetensors", rich_safetensors());
        assert!(format::open(folder.path()).unwrap().gguf().is_none());
    }

    /// The header of a published model, compared with figures that other tools took from the file.
    #[test]
    fn a_real_model() {
        let Some(path) = models::real_model() else { return };
        let model = format::open(&path).unwrap();
        let count = |dtype| model.tensors.iter().filter(|t| t.dtype == dtype).count();
        assert_eq!(model.tensors.len(), 272);
        assert_eq!((count(DType::Q4_1), count(DType::F32), count(DType::Q8_0)), (210, 61, 1));
        assert_eq!(model.tensors[0].offset, 1_785_664);
        let bytes = fs::read(&path).unwrap();
        let header = gguf::parse(&bytes, bytes.len() as u64).unwrap();
        assert_eq!((header.data_offset, header.alignment), (1_785_664, 32));
        assert_eq!(header.metadata.get_array_str("tokenizer.ggml.tokens").unwrap().count(), 49_152);
        assert_eq!(header.metadata.require_str("general.architecture").unwrap(), "llama");
        let times: Vec<_> = (0..20)
            .map(|_| {
                let start = std::time::Instant::now();
                format::open(&path).unwrap();
                start.elapsed()
            })
            .collect();
        println!("open: fastest {:?}, slowest {:?}", times.iter().min().unwrap(), times.iter().max().unwrap());
    }
}

mod random {
    use super::*;
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;

    fn value() -> impl Strategy<Value = Kv> {
        let scalar = prop_oneof![
            any::<u8>().prop_map(Kv::U8),
            any::<i16>().prop_map(Kv::I16),
            any::<u32>().prop_map(Kv::U32),
            any::<i64>().prop_map(Kv::I64),
            any::<u64>().prop_map(Kv::U64),
            (-1e30f32..1e30).prop_map(Kv::F32),
            (0u8..2).prop_map(Kv::Bool),
            ".{0,12}".prop_map(|s| Kv::str(&s)),
        ];
        let array = prop_oneof![
            prop::collection::vec(any::<u32>().prop_map(Kv::U32), 0..6).prop_map(|v| Kv::Array(4, v)),
            prop::collection::vec(".{0,5}".prop_map(|s| Kv::str(&s)), 0..6).prop_map(|v| Kv::Array(8, v)),
        ];
        prop_oneof![scalar, array.clone(), prop::collection::vec(array, 0..3).prop_map(|v| Kv::Array(9, v))]
    }

    /// What was written, compared with what is read.
    fn same(written: &Kv, read: gguf::Value<'_>) -> bool {
        match (written, read) {
            (Kv::U8(a), gguf::Value::U8(b)) => *a == b,
            (Kv::I16(a), gguf::Value::I16(b)) => *a == b,
            (Kv::U32(a), gguf::Value::U32(b)) => *a == b,
            (Kv::I64(a), gguf::Value::I64(b)) => *a == b,
            (Kv::U64(a), gguf::Value::U64(b)) => *a == b,
            (Kv::F32(a), gguf::Value::F32(b)) => a.to_bits() == b.to_bits(),
            (Kv::Bool(a), gguf::Value::Bool(b)) => (*a == 1) == b,
            (Kv::Str(a), gguf::Value::Str(b)) => a == b.as_bytes(),
            (Kv::Array(_, a), gguf::Value::Array(b)) => {
                a.len() == b.len() && b.into_iter().count() == a.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
            }
            _ => false,
        }
    }

    fn gguf_file() -> impl Strategy<Value = GgufFile> {
        let dtypes = DType::ALL.iter().copied().filter(|d| d.ggml_id().is_some()).collect::<Vec<_>>();
        let tensor = (prop::sample::select(dtypes), prop::collection::vec(0u64..5, 0..4), 0u64..4);
        (
            prop::collection::btree_map("[a-z.]{1,8}", value(), 0..8),
            prop::collection::btree_map("[a-z0-9.]{1,8}", tensor, 0..8),
            prop::sample::select(vec![1u64, 8, 32, 64, 4096]),
        )
            .prop_map(|(kvs, tensors, alignment)| {
                let mut file = GgufFile { alignment, ..GgufFile::default() };
                for (key, value) in kvs {
                    file = file.kv(&format!("k.{key}"), value);
                }
                file = file.kv("general.alignment", Kv::U32(alignment as u32));
                for (name, (dtype, outer, blocks)) in tensors {
                    let dims: Vec<u64> = [blocks * dtype.block_elements()].into_iter().chain(outer).collect();
                    let len = dtype.bytes_for(dims.iter().product()).unwrap();
                    file = file.tensor(&name, &dims, dtype.ggml_id().unwrap(), len);
                }
                file
            })
    }

    fn mutate(mut bytes: Vec<u8>, edits: &[(usize, u8)], cut: usize) -> Vec<u8> {
        for &(at, byte) in edits {
            let len = bytes.len().max(1);
            if let Some(slot) = bytes.get_mut(at % len) {
                *slot = byte;
            }
        }
        let keep = bytes.len() - cut.min(bytes.len());
        bytes.truncate(keep);
        bytes
    }

    fn edits() -> impl Strategy<Value = (Vec<(usize, u8)>, usize)> {
        let byte = prop_oneof![any::<u8>(), Just(0u8), Just(0xff), Just(1)];
        (prop::collection::vec((any::<usize>(), byte), 1..8), prop_oneof![4 => Just(0usize), 1 => 0usize..200])
    }

    /// What a header promises, whatever bytes it came from.
    fn check(tensors: &[format::TensorHeader], file_len: u64, ties: bool) {
        for t in tensors {
            assert!(t.offset.checked_add(t.len).unwrap() <= file_len);
            assert_eq!(t.dtype.bytes_for(t.elements()), Some(t.len));
        }
        for (i, a) in tensors.iter().enumerate() {
            for b in &tensors[i + 1..] {
                assert_ne!(a.name, b.name);
                let disjoint = a.end() <= b.offset || b.end() <= a.offset;
                assert!(disjoint || (ties && a.offset == b.offset && a.len == b.len) || a.len == 0 || b.len == 0);
            }
        }
    }

    fn generated(cases: u32) -> ProptestConfig {
        let rng_seed = RngSeed::Fixed(super::replay::seed("gguf_round_trips"));
        ProptestConfig { cases, failure_persistence: None, rng_seed, ..ProptestConfig::default() }
    }

    proptest! {
        #![proptest_config(generated(512))]

        #[test]
        fn gguf_round_trips(file in gguf_file()) {
            let header = parse_gguf(&file).unwrap();
            prop_assert_eq!(header.metadata.len(), file.kvs.len());
            for (key, written) in &file.kvs {
                let read = header.metadata.get(std::str::from_utf8(key).unwrap()).unwrap();
                prop_assert!(same(written, read), "{:?} {:?}", written, read);
            }
            prop_assert_eq!(header.tensors.len(), file.tensors.len());
            for t in &file.tensors {
                let read = header.tensors.iter().find(|r| r.name.as_bytes() == t.name).unwrap();
                prop_assert_eq!(read.dtype.ggml_id(), Some(t.ggml));
                prop_assert_eq!(read.shape.iter().rev().copied().collect::<Vec<_>>(), t.dims.clone());
                prop_assert_eq!(read.offset, header.data_offset + t.offset);
            }
            check(&header.tensors, file.bytes().len() as u64, true);
        }

        #[test]
        fn mutated_gguf_never_panics((edits, cut) in edits()) {
            let bytes = mutate(rich_gguf().bytes(), &edits, cut);
            if let Ok(header) = gguf::parse(&bytes, bytes.len() as u64) {
                check(&header.tensors, bytes.len() as u64, true);
                let _ = format!("{:?}", header.metadata);
            }
        }

        #[test]
        fn mutated_safetensors_never_panic((edits, cut) in edits()) {
            let bytes = mutate(rich_safetensors(), &edits, cut);
            if let Ok(header) = parse_st(&bytes) {
                check(&header.tensors, bytes.len() as u64, false);
            }
            let _ = safetensors::parse_index(&mutate(rich_index(), &edits, cut));
        }

        #[test]
        fn safetensors_round_trip(tensors in prop::collection::btree_map("[a-z0-9.\"\\\\\u{e9}]{1,8}",
            (prop::sample::select(DType::ALL.iter().copied().filter(|d| d.in_safetensors()).collect::<Vec<_>>()),
             prop::collection::vec(0u64..6, 0..4)), 0..10), pad in 0usize..9)
        {
            let mut at = 0;
            let mut entries = Vec::new();
            for (name, (dtype, outer)) in &tensors {
                let shape: Vec<u64> = outer.iter().copied().chain([dtype.block_elements()]).collect();
                let end = at + dtype.bytes_for(shape.iter().product()).unwrap();
                let value = serde_json::json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [at, end]});
                entries.push((name.clone(), value));
                at = end;
            }
            let map: serde_json::Map<_, _> = entries.into_iter().collect();
            let json = format!("{}{}", serde_json::Value::Object(map), " ".repeat(pad));
            let bytes = headers::safetensors(&json, at as usize);
            let header = parse_st(&bytes).unwrap();
            prop_assert_eq!(header.tensors.len(), tensors.len());
            for t in &header.tensors {
                prop_assert_eq!(t.dtype, tensors[&t.name].0);
            }
            check(&header.tensors, bytes.len() as u64, false);
        }
    }
}
