//! Model files: which open files are ones, and when two of them are the same.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::names;

/// Models smaller than this are left to the kernel.
pub const LEAST: u64 = 32 << 20;
/// So are files smaller than this of a model in several files.
pub const LEAST_PART: u64 = 1 << 20;

/// The least that a file has, by its name, which is not left to the kernel: the files of a model are about as long as
/// each other.
pub fn least(path: &Path) -> u64 {
    (LEAST / shards(path)).max(LEAST_PART)
}

/// How many files a model has, by the name of one (`model-00001-of-00003.gguf`).
pub fn shards(path: &Path) -> u64 {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let number = |text: &str| {
        let digits: String = text.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().ok().filter(|_| digits.len() >= 4)
    };
    name.rsplit_once("-of-").and_then(|(_, rest)| number(rest)).unwrap_or(1).max(1)
}

/// One state of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Device and inode.
    file: (u64, u64),
    /// Bytes.
    pub len: u64,
    /// Time of the last write, and of the last change of any kind: the former may be put back.
    times: [(i64, i64); 2],
}

pub fn identity(of: &fs::Metadata) -> Identity {
    let times = [(of.mtime(), of.mtime_nsec()), (of.ctime(), of.ctime_nsec())];
    Identity { file: (of.dev(), of.ino()), len: of.len(), times }
}

/// The path of a large model file, by which the program opened it if that is known; `None` for everything else.
pub fn model(file: &File) -> Option<(PathBuf, fs::Metadata)> {
    let metadata = is_model(file)?;
    let path = names::of(&metadata).or_else(|| own_path(file))?;
    (metadata.len() >= least(&path)).then_some((path, metadata))
}

/// The path of an open file itself, not that of a link.
pub fn own_path(file: &File) -> Option<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
}

/// What the system knows of a model file that is not small; `None` for everything else.
pub fn is_model(file: &File) -> Option<fs::Metadata> {
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || metadata.len() < LEAST_PART {
        return None;
    }
    let mut first = [0; 9];
    file.read_exact_at(&mut first, 0).ok()?;
    // GGUF by its magic; safetensors by the length of its header and the brace behind it; zip files of PyTorch.
    let header = u64::from_le_bytes(first[..8].try_into().ok()?);
    let known =
        first.starts_with(b"GGUF") || (first[8] == b'{' && header < metadata.len()) || first.starts_with(b"PK\x03\x04");
    known.then_some(metadata)
}
