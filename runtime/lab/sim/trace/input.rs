//! What readers of traces share: files that may be packed, filled buffers, and lines that have an end.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;

use super::LINE_BYTES_MAX;
use crate::error::{Error, Result};

/// The first bytes of gzip's files (RFC 1952) and zstd's frames (RFC 8878).
const GZIP: [u8; 2] = [0x1F, 0x8B];
const ZSTD: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];
const BUFFER: usize = 1 << 16;

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

/// Opens a trace's file. Also returns what messages call it.
pub(super) fn opened(path: &Path) -> Result<(impl BufRead + 'static, String)> {
    let name = path.display().to_string();
    let file = File::open(path).map_err(|cause| {
        Error::io(format!("open the trace {name}"), cause).remedy("check the path, and that you may read the file")
    })?;
    Ok((BufReader::with_capacity(BUFFER, file), name))
}

/// What `input` holds, unpacked if its first bytes say that it is packed.
pub(super) fn unpacked<'a>(input: impl BufRead + 'a) -> io::Result<Box<dyn BufRead + 'a>> {
    let input = started(input)?;
    if start(&input).starts_with(&GZIP) {
        let unpacked = flate2::bufread::MultiGzDecoder::new(input);
        return Ok(Box::new(BufReader::with_capacity(BUFFER, unpacked)));
    }
    if start(&input).starts_with(&ZSTD) {
        let unpacked = zstd::stream::read::Decoder::with_buffer(input)?;
        return Ok(Box::new(BufReader::with_capacity(BUFFER, unpacked)));
    }
    Ok(Box::new(input))
}
