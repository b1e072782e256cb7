//! Lists of numbers of any length.

use std::io::{self, Read, Seek, SeekFrom, Write};

use tempfile::SpooledTempFile;

use crate::error::{Error, Result};

/// A list of 32-bit numbers, in memory while it is short, else in a temporary file.
pub(super) struct Numbers {
    file: SpooledTempFile,
    pub(super) len: u64,
    /// Numbers that are not yet written.
    tail: Vec<u32>,
}

impl std::fmt::Debug for Numbers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Numbers({})", self.len)
    }
}

/// Numbers read or written at a time: 256 KiB.
pub(super) const BLOCK: usize = 1 << 16;

impl Numbers {
    /// Bytes kept in memory.
    const IN_MEMORY: usize = 32 << 20;

    pub(super) fn new() -> Self {
        Self { file: SpooledTempFile::new(Self::IN_MEMORY), len: 0, tail: Vec::with_capacity(BLOCK) }
    }

    fn failed(cause: io::Error) -> Error {
        Error::io(format!("keep the trace in a temporary file in {}", std::env::temp_dir().display()), cause)
            .remedy("make room there, eight bytes for each use, or set TMPDIR to a folder that has it")
    }

    pub(super) fn push(&mut self, number: u32) -> Result<()> {
        self.tail.push(number);
        self.len += 1;
        if self.tail.len() == BLOCK { self.flush() } else { Ok(()) }
    }

    pub(super) fn flush(&mut self) -> Result<()> {
        let written = self.file.write_all(bytemuck::cast_slice(&self.tail));
        self.tail.clear();
        written.map_err(Self::failed)
    }

    pub(super) fn blocks(&self) -> u64 {
        self.len.div_ceil(BLOCK as u64)
    }

    fn seek(&mut self, block: u64) -> Result<usize> {
        let first = block * BLOCK as u64;
        self.file.seek(SeekFrom::Start(first * 4)).map_err(Self::failed)?;
        Ok((self.len - first).min(BLOCK as u64) as usize)
    }

    pub(super) fn read(&mut self, block: u64, into: &mut Vec<u32>) -> Result<()> {
        let len = self.seek(block)?;
        into.resize(len, 0);
        self.file.read_exact(bytemuck::cast_slice_mut(into)).map_err(Self::failed)
    }

    pub(super) fn write(&mut self, block: u64, numbers: &[u32]) -> Result<()> {
        self.seek(block)?;
        self.file.write_all(bytemuck::cast_slice(numbers)).map_err(Self::failed)
    }
}

/// Splits a number into two halves, the lower one first.
pub(super) fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

/// Reads numbers one after the other.
pub(super) struct Cursor<'a> {
    numbers: &'a mut Numbers,
    at: u64,
    block: Vec<u32>,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(numbers: &'a mut Numbers) -> Self {
        Self { numbers, at: 0, block: Vec::new() }
    }

    pub(super) fn next(&mut self) -> Result<Option<u32>> {
        if self.at == self.numbers.len {
            return Ok(None);
        }
        let within = (self.at % BLOCK as u64) as usize;
        if within == 0 {
            self.numbers.read(self.at / BLOCK as u64, &mut self.block)?;
        }
        self.at += 1;
        Ok(self.block.get(within).copied())
    }

    /// Reads a number from two halves.
    pub(super) fn whole(&mut self) -> Result<Option<u64>> {
        let Some(low) = self.next()? else { return Ok(None) };
        Ok(self.next()?.map(|high| u64::from(high) << 32 | u64::from(low)))
    }

    /// Reads a chain, and how many uses come before it.
    pub(super) fn chain(&mut self) -> Result<Option<(u64, Vec<u32>)>> {
        let Some(before) = self.whole()? else { return Ok(None) };
        let mut pages = Vec::new();
        for _ in 0..self.next()?.unwrap_or(0) {
            pages.extend(self.next()?);
        }
        Ok(Some((before, pages)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_a_file_is_what_was_in_memory() {
        let mut numbers = Numbers { file: SpooledTempFile::new(BLOCK), len: 0, tail: Vec::new() };
        let len = 3 * BLOCK as u32 + 5;
        (0..len).try_for_each(|number| numbers.push(number)).unwrap();
        numbers.flush().unwrap();
        assert!(numbers.file.is_rolled());
        let mut block = Vec::new();
        for at in [3, 0, 2] {
            numbers.read(at, &mut block).unwrap();
            let first = at as u32 * BLOCK as u32;
            let end = len.min(first + BLOCK as u32);
            assert!(block.iter().copied().eq(first..end), "block {at}");
        }
    }
}
