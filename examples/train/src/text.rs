//! A text as windows of tokens, in a shuffled order that is a function of the seed. Its tokens are its bytes, or those
//! of a model.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, Write};
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use outcore::{Error, ErrorKind, Result};
use outcore_llm::Tokenizer;
use rustix::fs::{Advice, fadvise};
use twox_hash::XxHash3_64;

use crate::file_id::FileId;
use crate::pass::Micro;

/// Bytes of a text that are encoded at once, and up to the end of their line.
const ENCODED: u64 = 64 << 10;
/// A line that goes on for longer is cut.
const LONGEST_LINE: u64 = 64 << 10;

/// A text file. It may be larger than memory: a window is read when it is used.
#[derive(Debug)]
pub struct Text {
    path: PathBuf,
    id: FileId,
    tokens: File,
    /// Bytes of a token in that file: 1, or 4 with the lowest first.
    bytes: u64,
    count: u64,
    window: u64,
    seed: u64,
}

impl Text {
    /// Opens a text, to be read in windows of this many tokens. With a tokenizer, given with the size of
    /// the model's vocabulary, it is encoded into a file without a name in a folder.
    ///
    /// # Errors
    /// `Io`; `InvalidArgument` for a text that is shorter than a window and one token.
    pub fn open(path: &Path, window: usize, seed: u64, encoder: Option<(&Tokenizer, usize, &Path)>) -> Result<Self> {
        let failed = |cause: io::Error| {
            Error::io(format!("read the text {}", path.display()), cause).remedy("give a file that can be read")
        };
        let file = File::open(path).map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        if !meta.is_file() {
            let what = format!("{} is not a regular file", path.display());
            return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("give a file of text"));
        }
        let id = FileId::of([&file]).map_err(failed)?;
        (&file).rewind().map_err(failed)?;
        let (tokens, bytes, count) = match encoder {
            None => (file, 1, meta.len()),
            Some((tokenizer, vocabulary, beside)) => {
                let (tokens, count) = encode(file, tokenizer, vocabulary, beside)
                    .map_err(|error| error.context(format!("the text {} cannot be encoded", path.display())))?;
                (tokens, 4, count)
            }
        };
        let (least, kind) = (window as u64 + 1, if bytes == 1 { "bytes" } else { "tokens" });
        if count < least {
            let what = format!("the text {} has {count} {kind}, and a window needs {least}", path.display());
            return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("give a longer text, or lower --window"));
        }
        Ok(Self { path: path.into(), id, tokens, bytes, count, window: window as u64, seed })
    }

    /// What tells it from other texts.
    pub fn id(&self) -> FileId {
        self.id
    }

    /// How many windows there are. Each has one more token behind its last one.
    pub fn windows(&self) -> u64 {
        (self.count - 1) / self.window
    }

    /// The windows of a step, `at_once` in each micro-batch. In each pass over the text every window comes once. Those
    /// of the next step are read ahead.
    ///
    /// # Errors
    /// `Io`; `Corrupt` if the file is shorter than it was.
    pub fn step(&self, step: u64, batch: usize, at_once: usize) -> Result<Vec<Micro>> {
        let of_step = |step: u64| (0..batch as u64).map(move |at| step * batch as u64 + at);
        let numbers: Vec<u64> = of_step(step).collect();
        let micros = numbers.chunks(at_once).map(|numbers| self.micro(numbers)).collect::<Result<_>>()?;
        for number in of_step(step + 1) {
            // Where the file system does not read ahead, the step waits for its windows.
            let _ = fadvise(&self.tokens, self.place(number), NonZeroU64::new(self.window_bytes()), Advice::WillNeed);
        }
        Ok(micros)
    }

    fn window_bytes(&self) -> u64 {
        self.bytes * (self.window + 1)
    }

    /// Where a window begins, by its number among all that are used.
    fn place(&self, number: u64) -> u64 {
        let (pass, within) = (number / self.windows(), number % self.windows());
        let key = XxHash3_64::oneshot_with_seed(self.seed, &pass.to_le_bytes());
        shuffled(within, self.windows(), key) * self.window * self.bytes
    }

    fn micro(&self, numbers: &[u64]) -> Result<Micro> {
        let mut micro = Micro { inputs: Vec::new(), targets: Vec::new() };
        let mut bytes = vec![0; self.window_bytes() as usize];
        for number in numbers {
            self.tokens.read_exact_at(&mut bytes, self.place(*number)).map_err(|cause| match cause.kind() {
                io::ErrorKind::UnexpectedEof => {
                    let what = format!("the text {} is shorter than when it was opened", self.path.display());
                    Error::new(ErrorKind::Corrupt, what).remedy("do not change the text while it is read")
                }
                _ => Error::io(format!("read the text {}", self.path.display()), cause),
            })?;
            let tokens: Vec<u32> = match self.bytes {
                1 => bytes.iter().map(|byte| u32::from(*byte)).collect(),
                _ => bytes.as_chunks().0.iter().map(|token| u32::from_le_bytes(*token)).collect(),
            };
            micro.inputs.extend(&tokens[..tokens.len() - 1]);
            micro.targets.extend(&tokens[1..]);
        }
        Ok(micro)
    }
}

/// Writes the tokens of a text to a new file, and counts them. Bytes that are no UTF-8 are encoded as the replacement
/// character.
fn encode(text: File, tokenizer: &Tokenizer, vocabulary: usize, beside: &Path) -> Result<(File, u64)> {
    let writing = |cause: io::Error| Error::io(format!("write tokens to a file in {}", beside.display()), cause);
    let reading = |cause: io::Error| Error::io("read it", cause);
    let mut tokens = BufWriter::new(tempfile::tempfile_in(beside).map_err(writing)?);
    let (mut text, mut count) = (BufReader::new(text), 0);
    loop {
        let mut piece = Vec::new();
        text.by_ref().take(ENCODED).read_to_end(&mut piece).map_err(reading)?;
        text.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut piece).map_err(reading)?;
        if piece.is_empty() {
            break;
        }
        let encoded = tokenizer.encode(&String::from_utf8_lossy(&piece), false);
        let encoded = encoded.map_err(|error| Error::new(ErrorKind::Format, error.to_string()))?;
        count += encoded.len() as u64;
        if let Some(token) = encoded.iter().find(|token| **token as usize >= vocabulary) {
            let what = format!("the tokenizer has given the token {token}, and the model has {vocabulary}");
            return Err(Error::new(ErrorKind::Unsupported, what).remedy("leave out of the text what becomes of it"));
        }
        for token in encoded {
            tokens.write_all(&token.to_le_bytes()).map_err(writing)?;
        }
    }
    let tokens = tokens.into_inner().map_err(|error| writing(error.into_error()))?;
    Ok((tokens, count))
}

/// The place of number `at` in a shuffled order of `count` numbers: a Feistel network of four rounds over the next
/// power of four, walked until it comes out below `count` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
/// 2002).
fn shuffled(at: u64, count: u64, key: u64) -> u64 {
    let half = (64 - count.saturating_sub(1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1 << half) - 1;
    let mut at = at;
    loop {
        let (mut left, mut right) = (at >> half, at & mask);
        for round in 0..4u64 {
            let mixed = XxHash3_64::oneshot_with_seed(key ^ round, &right.to_le_bytes());
            (left, right) = (right, left ^ (mixed & mask));
        }
        at = left << half | right;
        if at < count {
            return at;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;

    /// Every window comes once in a pass, and the next pass has another order.
    #[test]
    fn an_order_has_every_number_once() {
        for count in [1, 2, 3, 5, 16, 17, 1000, 4097] {
            let order = |key: u64| (0..count).map(|at| shuffled(at, count, key)).collect::<Vec<u64>>();
            let mut sorted = order(7);
            sorted.sort_unstable();
            assert_eq!(sorted, (0..count).collect::<Vec<u64>>());
            if count > 16 {
                assert_ne!(order(7), order(8));
                assert_ne!(order(7), (0..count).collect::<Vec<u64>>());
            }
        }
    }

    #[test]
    fn targets_are_the_bytes_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        let bytes: Vec<u8> = (0..101).collect();
        std::fs::write(&path, &bytes).unwrap();
        let text = Text::open(&path, 10, 3, None).unwrap();
        assert_eq!(text.windows(), 10);
        let mut seen = Vec::new();
        for step in 0..5 {
            let micros = text.step(step, 2, 1).unwrap();
            assert_eq!(micros.len(), 2);
            for micro in micros {
                let behind: Vec<u32> = micro.inputs.iter().map(|token| token + 1).collect();
                assert_eq!(micro.targets, behind);
                seen.push(micro.inputs[0] / 10);
            }
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..10).collect::<Vec<u32>>());
        let both = text.step(0, 2, 2).unwrap();
        assert_eq!(both.len(), 1);
        assert_eq!(both[0].inputs.len(), 20);
    }

    #[test]
    fn texts_are_told_apart_and_short_ones_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        let mut bytes = vec![7; 3_000_000];
        let id = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            Text::open(&path, 10, 3, None).unwrap().id()
        };
        let before = id(&bytes);
        assert_eq!(id(&bytes), before);
        *bytes.last_mut().unwrap() = 8;
        assert_ne!(id(&bytes), before);
        for len in [0, 10] {
            std::fs::write(&path, &bytes[..len]).unwrap();
            let error = Text::open(&path, 10, 3, None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.to_string().contains("a window needs 11"), "{error}");
        }
        assert_eq!(Text::open(folder.path(), 10, 3, None).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}
