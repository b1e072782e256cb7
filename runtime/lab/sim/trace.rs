//! Traces in memory, and how they are read from files.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde::Deserialize;

use crate::error::{Error, ErrorKind, Result};

/// The longest line of a trace in bytes, without its end: 16 MiB. A longer one is refused before it is read to its end.
pub const LINE_BYTES_MAX: usize = 16 << 20;

/// The most pages of a trace. Higher bits of a page number are kept for marks.
pub(super) const PAGES_MAX: usize = 1 << 30;

/// Uses of pages, in order. Pages are numbered from 0 in the order of their first use.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    uses: Vec<u32>,
    pages: u32,
    /// Where each request's uses end, as indices of uses; empty if requests are not known.
    ends: Vec<u32>,
}

/// Numbers ids in the order of their first use.
#[derive(Default)]
struct Numbering {
    numbers: HashMap<u64, u32>,
    uses: Vec<u32>,
    ends: Vec<u32>,
}

impl Numbering {
    fn push(&mut self, id: u64) -> Result<()> {
        let next = self.numbers.len() as u32;
        let number = *self.numbers.entry(id).or_insert(next);
        if number as usize >= PAGES_MAX {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("the trace has more than {PAGES_MAX} different ids"),
            )
            .remedy("cut it into several"));
        }
        self.uses.push(number);
        Ok(())
    }

    fn end(self) -> Trace {
        Trace { uses: self.uses, pages: self.numbers.len() as u32, ends: self.ends }
    }
}

/// The part of a line that is read.
#[derive(Deserialize)]
struct Request {
    hash_ids: Vec<u64>,
}

impl Trace {
    /// Makes a trace from ids, one for each use. Equal ids are one page.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if there are more than 2^30 different ids.
    pub fn from_ids(ids: impl IntoIterator<Item = u64>) -> Result<Self> {
        let mut numbering = Numbering::default();
        ids.into_iter().try_for_each(|id| numbering.push(id))?;
        Ok(numbering.end())
    }

    /// Reads a trace of requests to an inference server in the form of the Mooncake project: one JSON object a line.
    /// Its `hash_ids` lists the request's prefix blocks; equal ids are equal blocks. Each request uses its blocks in
    /// order. Other members are ignored; empty lines are skipped.
    ///
    /// The form: R. Qin et al., "Mooncake: trading more storage for less computation - a KVCache-centric architecture
    /// for serving LLM chatbot", FAST 2025.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::PermissionDenied`] and [`ErrorKind::Io`] if the file cannot be read;
    /// [`ErrorKind::Format`] if a line is not such an object or is longer than [`LINE_BYTES_MAX`], or if no line has an
    /// id (the message names the file, and a bad line); [`ErrorKind::Unsupported`] as for [`from_ids`](Self::from_ids).
    pub fn open_mooncake(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let file = File::open(path).map_err(|cause| {
            Error::io(format!("open the trace {name}"), cause).remedy("check the path, and that you may read the file")
        })?;
        Self::read_mooncake(BufReader::with_capacity(1 << 16, file), &name)
    }

    /// As [`open_mooncake`](Self::open_mooncake), but reads from `input`. Messages call it `name`.
    ///
    /// # Errors
    /// As for [`open_mooncake`](Self::open_mooncake).
    pub fn read_mooncake(input: impl BufRead, name: &str) -> Result<Self> {
        let mut numbering = Numbering::default();
        read_requests(input, name, &mut |ids| {
            ids.iter().try_for_each(|id| numbering.push(*id))?;
            numbering.ends.push(numbering.uses.len() as u32);
            Ok(())
        })?;
        Ok(numbering.end())
    }

    /// The pages' numbers, in order of use.
    pub fn uses(&self) -> &[u32] {
        &self.uses
    }

    /// Returns the uses of each request, in order; all uses as one request if requests are not known.
    pub fn requests(&self) -> impl Iterator<Item = &[u32]> {
        let mut rest = self.uses.as_slice();
        let last = self.ends.is_empty().then_some(self.uses.len());
        let mut begin = 0;
        self.ends.iter().map(|end| *end as usize).chain(last).map(move |end| {
            let (request, after) = rest.split_at(end - begin);
            (rest, begin) = (after, end);
            request
        })
    }

    /// Returns a function that takes every use in order and says whether it writes its page. A request writes the pages
    /// that no request used before. Where requests are not known nothing is written.
    pub(super) fn writes(&self) -> impl FnMut(u32) -> bool + use<> {
        let has_requests = self.has_requests();
        let mut seen = 0;
        move |number| {
            let first = number == seen;
            seen += u32::from(first);
            first && has_requests
        }
    }

    /// Whether requests are known. Each is a prefix chain.
    pub fn has_requests(&self) -> bool {
        !self.ends.is_empty()
    }

    /// How many different pages there are. Page numbers are below it.
    pub fn pages(&self) -> u32 {
        self.pages
    }
}

/// Passes the ids of each request of a trace in the Mooncake project's form to `each`, in order. Errors are those of
/// [`Trace::read_mooncake`].
pub(super) fn read_requests(
    mut input: impl BufRead,
    name: &str,
    each: &mut dyn FnMut(&[u64]) -> Result<()>,
) -> Result<()> {
    const EXPECTED: &str = "expected one JSON object a line with \"hash_ids\", a list of whole numbers from 0 up";
    let mut line = Vec::new();
    let mut any = false;
    for number in 1u64.. {
        line.clear();
        // The longest line, its end, and one byte more.
        let most = LINE_BYTES_MAX as u64 + 2;
        let read = input.by_ref().take(most).read_until(b'\n', &mut line);
        let read = read.map_err(|cause| {
            Error::io(format!("read line {number} of the trace {name}"), cause).remedy("check the file and its disk")
        })?;
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
        any |= !request.hash_ids.is_empty();
        each(&request.hash_ids)?;
    }
    if !any {
        return Err(Error::new(ErrorKind::Format, format!("the trace {name} has no ids")).remedy(EXPECTED));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> Result<Trace> {
        Trace::read_mooncake(text, "made.jsonl")
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
        let trace = read(text).unwrap();
        assert_eq!((trace.uses(), trace.pages()), (&[0, 1, 0, 2][..], 3));
        assert_eq!(trace.requests().collect::<Vec<_>>(), [&[0, 1][..], &[], &[0, 2]]);
        let ids = Trace::from_ids([4, 4, 5]).unwrap();
        assert_eq!((ids.has_requests(), ids.requests().collect::<Vec<_>>()), (false, vec![&[0, 0, 1][..]]));
        let crlf = read(b"{\"hash_ids\": [5]}\r\n\r\n{\"hash_ids\": [5]}\r\n").unwrap();
        assert_eq!(crlf.uses(), [0, 0]);
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
        let error = Trace::read_mooncake(endless, "made.jsonl").unwrap_err();
        assert!(error.to_string().contains("line 1 of the trace made.jsonl is longer than 16 MiB"), "{error}");
        let mut longest = b"{\"hash_ids\": [3]}".to_vec();
        longest.resize(LINE_BYTES_MAX, b' ');
        assert_eq!(read(&longest).unwrap().uses(), [0]);
        longest.push(b'\n');
        assert_eq!(read(&longest).unwrap().uses(), [0]);
        longest.insert(0, b' ');
        refused(&longest, &["line 1 ", "longer than 16 MiB"]);
    }

    /// Nesting as deep as a line is long is an error, not a stack overflow.
    #[test]
    fn deep_nesting_is_refused() {
        refused(format!("{{\"x\": {}", "[".repeat(1 << 20)).as_bytes(), &["line 1 "]);
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let error = Trace::open_mooncake("no/such/trace.jsonl").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("no/such/trace.jsonl"), "{error}");
    }
}
