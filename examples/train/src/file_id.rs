//! What tells one text or model from another.

use std::fs::File;
use std::hash::Hasher;
use std::io::{self, Read};

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

/// What tells files from others: their length, and a sum over all bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileId {
    /// Bytes, of all files.
    pub len: u64,
    /// XXH3-64 over the length of each and its bytes.
    pub sum: u64,
}

impl FileId {
    /// That of files that are open at their beginnings, in order. Reads them to their ends.
    ///
    /// # Errors
    /// Those of reads.
    pub fn of<'a>(files: impl IntoIterator<Item = &'a File>) -> io::Result<Self> {
        let (mut all, mut hash) = (0, XxHash3_64::with_seed(0));
        let mut bytes = vec![0; 1 << 20];
        for mut file in files {
            let len = file.metadata()?.len();
            hash.write_u64(len);
            all += len;
            let mut file = file.by_ref().take(len);
            loop {
                match file.read(&mut bytes)? {
                    0 => break,
                    count => hash.write(&bytes[..count]),
                }
            }
        }
        Ok(Self { len: all, sum: hash.finish() })
    }
}
