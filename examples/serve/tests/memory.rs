//! What parsing takes of memory, measured by an allocator that counts. There is one test, so that nothing else
//! allocates meanwhile.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::any::Any;

use outcore_serve::error::ApiError;
use outcore_serve::request::embeddings::embedding;
use outcore_serve::request::{bytes_to_parse, chat, completion, longest_body};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// A body of about so many bytes: `begin`, as many of `part` as fit, and `end`.
fn filled(begin: &str, part: &str, end: &str, bytes: usize) -> String {
    let count = bytes.saturating_sub(begin.len() + end.len()) / part.len();
    let parts = part.repeat(count);
    let parts = if part.ends_with(',') { parts.trim_end_matches(',') } else { &parts };
    [begin, parts, end].concat()
}

const CALLS: &str = r#"{"messages":[{"role":"assistant","tool_calls":"#;
const CALL: &str = r#"{"id":"a","type":"function","function":{"name":"a","arguments":""}},"#;

/// So many definitions of tools.
fn tools(count: usize, description: usize) -> String {
    let tool = |nth| {
        let description = "d".repeat(description);
        format!(r#"{{"type":"function","function":{{"name":"{nth}","description":"{description}"}}}}"#)
    };
    (0..count).map(tool).collect::<Vec<_>>().join(",")
}

#[test]
fn bodies_of_any_kind_take_no_more_memory_than_is_taken_for_them() {
    let bytes = 1 << 20;
    let of_prompt =
        |begin: &str, part, end: &str| filled(&format!("{{\"prompt\":{begin}"), part, &format!("{end}}}"), bytes);
    let within = |name: &str, begin: &str, part: &str, end: &str| {
        filled(&format!("{{\"prompt\":\"a\",\"{name}\":{begin}"), part, &format!("{end}}}"), bytes)
    };
    let said = |begin: &str, part: &str, end: &str| {
        let begin = format!("{{\"messages\":[{{\"role\":\"user\",\"content\":{begin}");
        filled(&begin, part, &format!("{end}}}]}}"), bytes)
    };
    let message = r#"{"role":"user","content":"a"},"#;
    let inputs = |begin: &str, part: &str, end: &str, count: usize| {
        filled(
            &format!("{{\"input\":{begin}"),
            part,
            &format!("{end}}}"),
            count * part.len() + 11 + begin.len() + end.len(),
        )
    };
    let bodies = [
        of_prompt("[", "1,", "]"),
        of_prompt("[[", "1,", "]]"),
        of_prompt("[1,", "a,", "]"),
        of_prompt("[", "[],", "]"),
        of_prompt("[", "\"\",", "]"),
        of_prompt("\"", "a", "\""),
        of_prompt("\"", "\\n", "\""),
        of_prompt("\"\\n", "a", "\""),
        of_prompt("\"", "\\u00fc", "\""),
        of_prompt("\"", "\\ud83d", "\""),
        of_prompt("", "[", ""),
        within("x", "[", "{\"\":0},", "0]"),
        within("x", "[", "[0],", "0]"),
        within("x", "[", "1,", "1]"),
        within("x", "\"\\n", "a", "\""),
        within("user", "[", "{\"\":0},", "0]"),
        within("stop", "[", "\"a\",", "\"a\"]"),
        within("stop", "\"\\n", "a", "\""),
        within("model", "\"\\n", "a", "\""),
        within("logit_bias", "{", "\"\":0,", "}"),
        within("stream_options", "{", "\"include_usage\":0,", "}"),
        within("modalities", "[", "\"text\",", "]"),
        filled("{\"prompt\":\"a\",", "\"\":0,", "}", bytes),
        filled("{\"prompt\":\"a\",\"\\n", "a", "\":0}", bytes),
        filled("{\"prompt\":\"a\",", "\"n\":1,", "}", bytes),
        filled(&format!("{CALLS}["), CALL, "]}]}", 120 * CALL.len()),
        filled(&format!("{CALLS}["), CALL, "]}]}", bytes),
        [r#"{"messages":[{"role":"user","content":"a"}],"tools":["#, &tools(128, 10), "]}"].concat(),
        [r#"{"messages":[{"role":"user","content":"a"}],"tools":["#, &tools(120, 1000), "]}"].concat(),
        [r#"{"messages":[{"role":"user","content":"a"}],"tools":["#, &tools(129, 10), "]}"].concat(),
        inputs("[", "1,", "]", bytes / 2),
        inputs("[[", "1,", "]]", bytes / 2),
        inputs("\"", "a", "\"", bytes),
        inputs("[", "\"a\",", "]", 2000),
        inputs("[", "\"a\",", "]", 2100),
        inputs("[", "[1],", "]", 2000),
        inputs("[", "[1,2,3,4,5,6,7,8,9],", "]", 2000),
        said("\"\\n", "a", "\""),
        said("[", r#"{"type":"text","text":"a"},"#, "]"),
        said("[", r#"{"type":"text","text":"\n"},"#, "]"),
        said("[{\"type\":\"text\",\"text\":\"", "a", "\\n\"}]"),
        said("[", "{},", "]"),
        filled("{\"messages\":[", message, "]}", bytes),
        filled("{\"messages\":[", message, "]}", 2000 * message.len()),
        filled("{\"messages\":[", &message.replace('a', "\\n"), "]}", 2000 * (message.len() + 1)),
    ];
    let mut most: f64 = 0.0;
    for body in bodies {
        let shown: String = body.chars().take(60).collect();
        type Parse = fn(&[u8]) -> Result<(usize, Box<dyn Any>), ApiError>;
        let parses: [Parse; 3] = [
            |body| chat(body).map(|request| (request.bytes(), Box::new(request) as Box<dyn Any>)),
            |body| completion(body).map(|request| (request.bytes(), Box::new(request) as Box<dyn Any>)),
            |body| embedding(body).map(|request| (request.bytes(), Box::new(request) as Box<dyn Any>)),
        ];
        for parse in parses {
            let before = ALLOCATED.current_usage();
            ALLOCATED.reset_peak_usage();
            let parsed = parse(body.as_bytes());
            // The body itself is a part of it.
            let taken = ALLOCATED.peak_usage() - before + body.len();
            most = most.max(taken as f64 / body.len() as f64);
            assert!(taken <= bytes_to_parse(body.len()), "{taken} for {} bytes: {shown}", body.len());
            let left = ALLOCATED.current_usage() - before;
            if let Ok((bytes, _request)) = parsed {
                assert!((left..=bytes_to_parse(body.len())).contains(&bytes), "{left}: {shown}");
            }
        }
    }
    // Three bytes for each, and the test knows a body that takes nearly as many.
    assert!(most > 2.9, "{most}");
    for room in [0, 1 << 15, 1 << 20, 8 << 20] {
        let longest = longest_body(room);
        assert!(longest == 0 || bytes_to_parse(longest) <= room && bytes_to_parse(longest + 1) > room, "{room}");
    }
}
