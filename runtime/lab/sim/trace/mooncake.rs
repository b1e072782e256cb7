//! Requests to an inference server in the form of the Mooncake project: one JSON object a line. Its `hash_ids` lists
//! the request's prefix blocks; equal ids are equal blocks. Other members are ignored but `op`, which this reader adds;
//! empty lines are skipped.
//!
//! The form: R. Qin et al., "Mooncake: trading more storage for less computation - a KVCache-centric architecture for
//! serving LLM chatbot", FAST 2025.

use std::io::BufRead;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

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

/// JSON objects, one a line. Empty lines are skipped.
struct Lines<R> {
    input: R,
    name: String,
    /// The number of the last line read, from 1.
    number: u64,
    line: Vec<u8>,
    /// What each line should be.
    expected: &'static str,
}

impl<R: BufRead> Lines<R> {
    fn new(input: R, name: &str, expected: &'static str) -> Self {
        Self { input, name: name.to_owned(), number: 0, line: Vec::new(), expected }
    }

    /// An error of the last line.
    fn bad(&self, what: impl std::fmt::Display) -> Error {
        let Self { number, name, .. } = self;
        Error::new(ErrorKind::Format, format!("line {number} of the trace {name} {what}"))
    }

    fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        loop {
            self.number += 1;
            let read = input::line(&mut self.input, &mut self.line);
            let read = read.map_err(|cause| failed(&self.name, cause).context(format!("line {}", self.number)))?;
            if read == 0 {
                return Ok(None);
            }
            if self.line.last() == Some(&b'\n') {
                self.line.pop();
            }
            if self.line.len() > LINE_BYTES_MAX {
                return Err(self
                    .bad(format!("is longer than {} MiB", LINE_BYTES_MAX >> 20))
                    .remedy(format!("{}; give a trace in that form", self.expected)));
            }
            if self.line.trim_ascii().is_empty() {
                continue;
            }
            return serde_json::from_slice(&self.line).map(Some).map_err(|cause| {
                // The parser sees one line, so its line number is always 1.
                let cause = cause.to_string().replace(" at line 1 column ", " at column ");
                self.bad(format!("is not understood: {cause}")).remedy(self.expected)
            });
        }
    }
}

/// Reads requests. Each uses its blocks in order.
pub(super) fn read(lines: impl BufRead, name: &str, read_only: bool, progress: Progress<'_>) -> Result<TraceWriter> {
    const EXPECTED: &str = "expected one JSON object a line with \"hash_ids\", a list of whole numbers from 0 up";
    let mut writer = TraceWriter::new(["prefix block"]);
    let mut lines = Lines::new(lines, name, EXPECTED);
    while let Some(request) = lines.next::<Request>()? {
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

/// A request to an inference server.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct ServerRequest {
    /// When it came, in milliseconds.
    pub timestamp: u64,
    /// Tokens of its prompt.
    pub input_length: u64,
    /// Tokens of its answer. Nothing bounds this number.
    pub output_length: u64,
    /// The blocks of its prompt. Equal ids are equal tokens, with equal tokens in front of them. Only the last block
    /// may be short.
    pub hash_ids: Vec<u64>,
    /// Its line in the trace, from 1.
    #[serde(skip)]
    pub line: u64,
}

impl ServerRequest {
    /// Tokens of a block.
    pub const BLOCK_TOKENS: u64 = 512;
}

/// The requests of a trace in the form of the Mooncake project, in order.
///
/// ```
/// use outcore_lab::sim::ServerRequests;
///
/// let text = &br#"{"timestamp": 3, "input_length": 700, "output_length": 9, "hash_ids": [0, 7]}"#[..];
/// let request = ServerRequests::read(text, "a text")?.next().transpose()?.ok_or("no request")?;
/// assert_eq!((request.input_length, request.hash_ids), (700, vec![0, 7]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ServerRequests<'a>(Lines<Box<dyn BufRead + 'a>>);

impl std::fmt::Debug for ServerRequests<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ServerRequests({}, line {})", self.0.name, self.0.number)
    }
}

impl ServerRequests<'static> {
    /// Opens a trace, which may be packed by gzip or zstd.
    ///
    /// # Errors
    /// As for [`Trace::open`](super::Trace::open).
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let (file, name) = input::opened(path.as_ref())?;
        Self::read(file, &name)
    }
}

impl<'a> ServerRequests<'a> {
    const EXPECTED: &'static str = "expected one JSON object a line with the whole numbers \"timestamp\", \
                                    \"input_length\" and \"output_length\", and with \"hash_ids\", a list of them";

    /// As [`open`](ServerRequests::open), but reads from `input`. Messages call it `name`.
    ///
    /// # Errors
    /// As for [`open`](ServerRequests::open).
    pub fn read(input: impl BufRead + 'a, name: &str) -> Result<Self> {
        let unpacked = input::unpacked(input).map_err(|cause| failed(name, cause))?;
        Ok(Self(Lines::new(unpacked, name, Self::EXPECTED)))
    }
}

impl Iterator for ServerRequests<'_> {
    /// The error of reading, or [`ErrorKind::Format`] for a line that is no request or whose lengths do not agree.
    type Item = Result<ServerRequest>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut request: ServerRequest = match self.0.next().transpose()? {
            Ok(request) => request,
            Err(error) => return Some(Err(error)),
        };
        request.line = self.0.number;
        let (tokens, has) = (request.input_length, request.hash_ids.len());
        let (each, needs) = (ServerRequest::BLOCK_TOKENS, tokens.div_ceil(ServerRequest::BLOCK_TOKENS));
        if needs != has as u64 {
            let what = format!(
                "has {has} hash_ids for an input_length of {tokens}, which takes {needs} blocks of {each} tokens"
            );
            return Some(Err(self.0.bad(what).remedy("give as many ids as the prompt has blocks")));
        }
        Some(Ok(request))
    }
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

    fn requests(text: &[u8]) -> Result<Vec<ServerRequest>> {
        ServerRequests::read(text, "made.jsonl")?.collect()
    }

    #[test]
    fn requests_are_read_with_their_lengths() {
        let text = br#"
{"timestamp": 5, "input_length": 513, "output_length": 18446744073709551615, "hash_ids": [7, 9], "more": null}
{"timestamp": 6, "input_length": 0, "output_length": 0, "hash_ids": []}"#;
        let read = requests(text).unwrap();
        let [first, second] = &read[..] else { panic!("{read:?}") };
        assert_eq!((first.timestamp, first.input_length, first.output_length, first.line), (5, 513, u64::MAX, 2));
        assert_eq!((first.hash_ids.clone(), second.hash_ids.len(), second.line), (vec![7, 9], 0, 3));
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut packed, text).unwrap();
        assert_eq!(requests(&packed.finish().unwrap()).unwrap(), read);
    }

    #[test]
    fn lengths_that_do_not_agree_are_named() {
        let line = |input: &str, ids: &str| {
            format!("{{\"timestamp\": 0, \"input_length\": {input}, \"output_length\": 1, \"hash_ids\": {ids}}}")
        };
        for (input, ids, part) in [
            ("512", "[1, 2]", "2 hash_ids for an input_length of 512"),
            ("513", "[1]", "takes 2 blocks"),
            ("18446744073709551615", "[1]", "takes 36028797018963968 blocks"),
            ("-1", "[]", "-1"),
            ("1.5", "[1]", "1.5"),
            ("18446744073709551616", "[1]", "1.8446744073709552e"),
        ] {
            let error = requests(line(input, ids).as_bytes()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Format);
            let said = error.to_string();
            assert!(said.contains("line 1 of the trace made.jsonl") && said.contains(part), "{said}");
        }
        let error = requests(b"{\"hash_ids\": []}").unwrap_err();
        assert!(error.to_string().contains("missing field `timestamp`"), "{error}");
    }
}
