//! What readers of traces share: filled buffers, and lines that have an end.

use std::io::{self, BufRead, Cursor, Read};

use super::LINE_BYTES_MAX;

/// The most bytes of a start.
const START: usize = 4096;

/// An input whose first bytes are known; they are read again.
pub(super) type Start<R> = io::Chain<Cursor<Vec<u8>>, R>;

/// Reads the first bytes of `input`: 4096 of them, or all.
pub(super) fn started<R: BufRead>(mut input: R) -> io::Result<Start<R>> {
    let mut start = Vec::new();
    record(&mut input, START, &mut start)?;
    Ok(Cursor::new(start).chain(input))
}

/// The first bytes.
pub(super) fn start<R>(input: &Start<R>) -> &[u8] {
    input.get_ref().0.get_ref()
}

/// Reads the next bytes in place of those in `into`: `most`, or fewer if the input ends before.
pub(super) fn record(input: &mut impl BufRead, most: usize, into: &mut Vec<u8>) -> io::Result<usize> {
    into.clear();
    input.take(most as u64).read_to_end(into)
}

/// Reads the next line with its end. Of one that is longer than [`LINE_BYTES_MAX`], so much that it can be seen.
/// Returns how many bytes were read: 0 at the end.
pub(super) fn line(input: &mut impl BufRead, into: &mut Vec<u8>) -> io::Result<usize> {
    into.clear();
    // The longest line, its end, and one byte more.
    input.take(LINE_BYTES_MAX as u64 + 2).read_until(b'\n', into)
}
