//! The traces of the paper on ARC: text with one request a line, of four numbers: the first block, how many consecutive
//! blocks from there on are accessed, one that is ignored, and the request's number. All uses read.
//!
//! The form: Megiddo and Modha 2003, "ARC: A Self-Tuning, Low Overhead Replacement Cache"; the files end in `.lis`.

use std::io::BufRead;

use super::forms::failed;
use super::{LINE_BYTES_MAX, Progress, TraceWriter, input, tell};
use crate::error::{Error, ErrorKind, Result};

/// The most blocks of a request: each different one takes memory, so a short line must not name any number of them.
const BLOCKS_MAX: u64 = 1 << 20;
const EXPECTED: &str = "a line has four numbers: first block, how many blocks, one that is ignored, request number";

pub(super) fn read(mut text: impl BufRead, name: &str, progress: Progress<'_>) -> Result<TraceWriter> {
    let mut writer = TraceWriter::new(["block"]);
    let mut line = Vec::new();
    for number in 1_u64.. {
        let bad = |what: String| {
            Error::new(ErrorKind::Format, format!("line {number} of the trace {name} {what}"))
                .remedy(format!("{EXPECTED}; or name the trace's form"))
        };
        if input::line(&mut text, &mut line).map_err(|cause| failed(name, cause))? == 0 {
            break;
        }
        if line.len() > LINE_BYTES_MAX {
            return Err(bad(format!("is longer than {} MiB", LINE_BYTES_MAX >> 20)));
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let Some([first, count, ..]) = numbers(&line) else { return Err(bad("is not understood".to_owned())) };
        if !(1..=BLOCKS_MAX).contains(&count) {
            return Err(bad(format!("accesses {count} blocks, which is not from 1 to {BLOCKS_MAX}")));
        }
        let end = first.checked_add(count).ok_or_else(|| bad("accesses blocks beyond the last 64-bit one".into()))?;
        for block in first..end {
            tell(progress, writer.uses());
            writer.used(block, || 0)?;
        }
    }
    if writer.uses() == 0 {
        return Err(Error::new(ErrorKind::Format, format!("the trace {name} has no requests")).remedy(EXPECTED));
    }
    Ok(writer)
}

/// The numbers of a line; `None` unless there are exactly four.
pub(super) fn numbers(line: &[u8]) -> Option<[u64; 4]> {
    let fields = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    fields.map(|field| field.parse().ok()).collect::<Option<Vec<u64>>>()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::trace::pages_of;
    use crate::sim::{Trace, TraceForm, TraceOptions};

    #[test]
    fn a_line_uses_as_many_blocks_as_it_counts() {
        let text = b"110765 3 0 0\n110767 1 0 1\n\n7 2 0 2\r\n";
        for (name, form) in [("P1.lis", None), ("OLTP.LIS.gz", None), ("renamed", Some(TraceForm::Lis))] {
            let options = TraceOptions { form, ..TraceOptions::default() };
            let mut trace = Trace::read(&text[..], name, &options, &mut |_| ()).unwrap();
            assert_eq!((pages_of(&mut trace), trace.writes()), (vec![0, 1, 2, 2, 3, 4], 0), "{name}");
        }
    }

    /// A list of ids may have that name too.
    #[test]
    fn a_text_of_that_name_without_four_numbers_is_a_text() {
        let mut trace = Trace::read(&b"7\n3\n7\n"[..], "ids.lis", &TraceOptions::default(), &mut |_| ()).unwrap();
        assert_eq!(pages_of(&mut trace), [0, 1, 0]);
    }

    #[test]
    fn a_column_that_is_asked_for_hides_no_counts() {
        let options = TraceOptions { column: Some("1".parse().unwrap()), ..TraceOptions::default() };
        let error = Trace::read(&b"1 2 0 0\n"[..], "P1.lis", &options, &mut |_| ()).unwrap_err();
        assert!(error.to_string().contains("P1.lis has the form lis, which has no columns"), "{error}");
    }

    #[test]
    fn lines_that_cannot_be_are_refused() {
        for (text, part) in [
            (&b"1 2 0 0\n1 2 0\n"[..], "line 2 of the trace made.lis is not understood"),
            (b"1 0 0 0\n", "line 1 of the trace made.lis accesses 0 blocks"),
            (b"1 1048577 0 0\n", "not from 1 to 1048576"),
            (b"18446744073709551615 2 0 0\n", "beyond the last"),
            (b"one 2 0 0\n", "four numbers"),
            (b"\n", "has no requests"),
        ] {
            let error = read(text, "made.lis", &mut |_| ()).map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Format);
            assert!(error.to_string().contains(part), "{part:?}: {error}");
        }
    }
}
