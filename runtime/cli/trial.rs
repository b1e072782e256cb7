//! A temporary file to measure a disk with. It is gone when this process ends, however it ends.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use outcore::{Bytes, Error, ErrorKind, Result};

/// An open file without a name.
#[derive(Debug)]
pub struct TrialFile {
    file: File,
    len: u64,
}

const CHUNK: usize = 4 << 20;
/// Bytes by which a disk's rate can be measured ([`DiskProfile::measure`](outcore::store::DiskProfile::measure)), and
/// some more: a part of them may not count.
const MEASURABLE: u64 = 40 << 20;

impl TrialFile {
    /// Makes a file of `len` bytes in `dir`. With a `time`, of as many of them as can be written in that time, but of
    /// [`MEASURABLE`] at least, or of as many as fit on the disk.
    pub fn create(dir: &Path, len: Bytes, time: Option<Duration>) -> Result<Self> {
        let path = dir.join(format!(".outcore-trial-{}", std::process::id()));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(|cause| Error::io(format!("make a file in {}", dir.display()), cause))
            .map_err(|error| error.remedy("choose a directory you may write to, or measure a file you have"))?;
        // From here on the file has no name, so nothing is left behind.
        fs::remove_file(&path).map_err(|cause| Error::io(format!("remove {}", path.display()), cause))?;
        let mut trial = Self { file, len: 0 };
        let chunk = noise(CHUNK);
        let start = Instant::now();
        while trial.len < len.get() && time.is_none_or(|time| trial.len < MEASURABLE || start.elapsed() < time) {
            let part = chunk.get(..((len.get() - trial.len) as usize).min(CHUNK)).unwrap_or(&chunk);
            let written = trial.file.write_all(part).and_then(|()| trial.file.sync_data());
            match written
                .map_err(|cause| Error::io(format!("write {} in {}", Bytes::new(trial.len), dir.display()), cause))
            {
                Ok(()) => trial.len += part.len() as u64,
                // With a time limit a shorter file will do, so what fits on a full disk is enough.
                Err(error) if error.kind() == ErrorKind::DiskFull && time.is_some() && trial.len > 0 => break,
                Err(error) => return Err(error.remedy("free some space, or choose another directory")),
            }
        }
        Ok(trial)
    }

    /// Returns a path under which this process can open it.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }
}

/// Returns bytes that no disk or file system can compress.
fn noise(len: usize) -> Vec<u8> {
    let mut x = 0x9E37_79B9_7F4A_7C15_u64;
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        bytes.extend_from_slice(&x.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
