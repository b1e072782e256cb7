//! The promise: `include/outcore.h` says what the library has.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::{env, fs};

/// What stands before the declarations.
const HEAD: &str = include_str!("head.txt");

fn header() -> String {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = ["call.rs", "options.rs", "runtime.rs", "model.rs", "tensor.rs", "pins.rs", "mapped.rs"];
    let config = cbindgen::Config {
        language: cbindgen::Language::C,
        cpp_compat: true,
        include_guard: Some("OUTCORE_H".to_owned()),
        header: Some(HEAD.trim_end().to_owned()),
        documentation_style: cbindgen::DocumentationStyle::Doxy,
        style: cbindgen::Style::Type,
        no_includes: true,
        sys_includes: vec!["stddef.h".to_owned(), "stdint.h".to_owned()],
        usize_is_size_t: true,
        line_length: 118,
        ..cbindgen::Config::default()
    };
    let builder = files
        .iter()
        .fold(cbindgen::Builder::new().with_config(config), |builder, file| builder.with_src(source.join(file)));
    let mut text = Vec::new();
    builder.generate().unwrap().write(&mut text);
    String::from_utf8(text).unwrap()
}

/// With `OUTCORE_WRITE_HEADER` set it writes the header, for whoever changed a declaration on purpose.
#[test]
fn the_header_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/outcore.h");
    let wanted = header();
    if env::var_os("OUTCORE_WRITE_HEADER").is_some() {
        fs::write(&path, &wanted).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    let at = wanted.lines().zip(found.lines()).take_while(|(wanted, found)| wanted == found).count();
    assert!(
        wanted == found,
        "{} is stale from line {} on, where there should be {:?}; see what changes with\n    \
         OUTCORE_WRITE_HEADER=1 cargo test -p outcore-capi --test header && git diff runtime/capi/include",
        path.display(),
        at + 1,
        wanted.lines().nth(at).unwrap_or_default()
    );
}
