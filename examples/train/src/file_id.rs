//! What tells one text or model from another.

use std::fs::File;
use std::hash::Hasher;
use std::io;
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

/// How many pieces of a file its sum covers, and how many bytes each has. A file that is no longer is covered whole.
const PIECES: u64 = 256;
const PIECE: u64 = 4096;

/// What tells files from others: their length, and a sum over pieces at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileId {
    /// Bytes, of all files.
    pub len: u64,
    /// XXH3-64 over pieces of each.
    pub sum: u64,
}

impl FileId {
    /// That of files, in order.
    ///
    /// # Errors
    /// Those of reads.
    pub fn of<'a>(files: impl IntoIterator<Item = &'a File>) -> io::Result<Self> {
        let (mut all, mut hash) = (0, XxHash3_64::with_seed(0));
        let mut bytes = vec![0; PIECE as usize];
        for file in files {
            let len = file.metadata()?.len();
            hash.write_u64(len);
            all += len;
            let pieces = len.div_ceil(PIECE).min(PIECES);
            for piece in 0..pieces {
                let at = if pieces < PIECES { piece * PIECE } else { (len - PIECE) / (PIECES - 1) * piece };
                let count = (len - at).min(PIECE) as usize;
                file.read_exact_at(&mut bytes[..count], at)?;
                hash.write(&bytes[..count]);
            }
            // The end of the text, wherever the pieces end.
            let last = len.min(PIECE) as usize;
            file.read_exact_at(&mut bytes[..last], len - last as u64)?;
            hash.write(&bytes[..last]);
        }
        Ok(Self { len: all, sum: hash.finish() })
    }
}
