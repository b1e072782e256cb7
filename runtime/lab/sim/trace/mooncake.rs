//! Requests to an inference server in the form of the Mooncake project: one JSON object a line. Its `hash_ids` lists
//! the request's prefix blocks; equal ids are equal blocks. Other members are ignored but `op`, which this reader adds;
//! empty lines are skipped.
//!
//! The form: R. Qin et al., "Mooncake: trading more storage for less computation - a KVCache-centric architecture for
//! serving LLM chatbot", FAST 2025.

use std::io::BufRead;

use serde::Deserialize;

use super::forms::failed;
use super::{LINE_BYTES_MAX, Progress, TraceWriter, input, tell};
use crate::error::{Error, ErrorKind, Result};

/// The part of a line that is read.
#[derive(Deserialize)]
struct Request {
    hash_ids: Vec<u64>,
    /// What the request does with its blocks. Without it the request makes those that no request used before, as a
    /// prefill does, and reads the others.
    op: Option<Op>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Op {
    Read,
    Write,
}

/// Reads requests. Each uses its blocks in order.
pub(super) fn read(
    mut lines: impl BufRead,
    name: &str,
    read_only: bool,
    progress: Progress<'_>,
) -> Result<TraceWriter> {
    const EXPECTED: &str = "expected one JSON object a line with \"hash_ids\", a list of whole numbers from 0 up";
    let mut writer = TraceWriter::new(["prefix block"]);
    let mut line = Vec::new();
    for number in 1u64.. {
        let read = input::line(&mut lines, &mut line);
        let read = read.map_err(|cause| failed(name, cause).context(format!("line {number}")))?;
        if read == 0 {
            break;
        }
        if line.last() == Some(&b'\n') {
            line.pop();
        }
        let bad = |what: String| Error::new(ErrorKind::Format, format!("line {number} of the trace {name} {what}"));
        if line.len() > LINE_BYTES_MAX {
            return Err(bad(format!("is longer than {} MiB", LINE_BYTES_MAX >> 20))
                .remedy(format!("{EXPECTED}; give a trace in that form")));
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let request: Request = serde_json::from_slice(&line).map_err(|cause| {
            // The parser sees one line, so its line number is always 1.
            let cause = cause.to_string().replace(" at line 1 column ", " at column ");
            bad(format!("is not understood: {cause}")).remedy(EXPECTED)
        })?;
        writer.request();
        for id in request.hash_ids {
            tell(progress, writer.uses());
            match request.op {
                _ if read_only => writer.used(id, || 0)?,
                Some(Op::Read) => writer.used(id, || 0)?,
                Some(Op::Write) => writer.written(id, || 0)?,
                None => writer.made(id, || 0)?,
            }
        }
    }
    if writer.uses() == 0 {
        return Err(Error::new(ErrorKind::Format, format!("the trace {name} has no ids")).remedy(EXPECTED));
    }
    Ok(writer)
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::sim::trace::{Trace, pages_of};

    fn read(text: &[u8]) -> Result<Trace> {
        super::read(text, "made.jsonl", false, &mut |_| ())?.end()
    }

    fn refused(text: &[u8], parts: &[&str]) {
        let error = read(text).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Format, "{error}");
        let message = error.to_string();
        for part in parts.iter().chain(&["made.jsonl", "\"hash_ids\""]) {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }

    #[test]
    fn ids_become_numbers_in_order_of_first_use() {
        let text =
            br#"{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [46, 18446744073709551615]}

{"hash_ids": []}
{"timestamp": 27, "hash_ids": [46, 9]}"#;
        let mut trace = read(text).unwrap();
        assert_eq!((pages_of(&mut trace), trace.pages(), trace.requests), (vec![0, 1, 0, 2], 3, 2));
        let mut crlf = read(b"{\"hash_ids\": [5]}\r\n\r\n{\"hash_ids\": [5]}\r\n").unwrap();
        assert_eq!(pages_of(&mut crlf), [0, 0]);
    }

    /// Requests make the blocks that are new, unless they say otherwise, or the user does.
    #[test]
    fn reads_are_told_from_writes() {
        let text = &br#"{"hash_ids": [1, 2]}
{"hash_ids": [1, 3], "op": "read"}
{"hash_ids": [1, 2, 4], "op": "write"}"#[..];
        assert_eq!(read(text).unwrap().writes(), 5);
        let read_only = super::read(text, "made.jsonl", true, &mut |_| ()).unwrap().end().unwrap();
        assert_eq!(read_only.writes(), 0);
        refused(b"{\"hash_ids\": [1], \"op\": \"get\"}", &["line 1 ", "get"]);
    }

    #[test]
    fn bad_lines_are_named() {
        let good = "{\"hash_ids\": [1, 2]}\n";
        let bad: [(&str, &str); 9] = [
            ("{\"hash_ids\": [1, 2", "EOF"),
            ("{\"timestamp\": 3}", "missing field `hash_ids`"),
            ("{\"hash_ids\": [1, -2]}", "-2"),
            ("{\"hash_ids\": [1.5]}", "1.5"),
            ("{\"hash_ids\": \"1\"}", "string"),
            ("{\"hash_ids\": null}", "null"),
            ("7", "7"),
            ("{\"hash_ids\": [1]} {\"hash_ids\": [1]}", "trailing"),
            ("{\"hash_ids\": [18446744073709551616]}", "1.8446744073709552e"),
        ];
        for (line, part) in bad {
            refused(format!("{good}{good}{line}\n{good}").as_bytes(), &["line 3 ", part]);
        }
        refused(b"{\"hash_ids\": [1]}\n\xFF\xFE\n", &["line 2 "]);
        refused(b"", &["no ids"]);
        refused(b"\n\n{\"hash_ids\": []}\n", &["no ids"]);
    }

    /// A line without an end takes no more memory than the limit.
    #[test]
    fn lines_over_the_limit_are_refused() {
        let endless = std::io::BufReader::new(std::io::repeat(b' '));
        let error = super::read(endless, "made.jsonl", false, &mut |_| ()).unwrap_err();
        assert!(error.to_string().contains("line 1 of the trace made.jsonl is longer than 16 MiB"), "{error}");
        let mut longest = b"{\"hash_ids\": [3]}".to_vec();
        longest.resize(LINE_BYTES_MAX, b' ');
        assert_eq!(read(&longest).unwrap().uses(), 1);
        longest.push(b'\n');
        assert_eq!(read(&longest).unwrap().uses(), 1);
        longest.insert(0, b' ');
        refused(&longest, &["line 1 ", "longer than 16 MiB"]);
    }

    /// Nesting as deep as a line is long is an error, not a stack overflow.
    #[test]
    fn deep_nesting_is_refused() {
        refused(format!("{{\"x\": {}", "[".repeat(1 << 20)).as_bytes(), &["line 1 "]);
    }
}
