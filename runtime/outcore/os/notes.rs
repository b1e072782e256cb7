//! Small files in the user's cache folder: what was measured or learned, and can be again.
//!
//! The files are not trusted: the folder may be shared, and a file may hold anything.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::cache;
use super::descriptors::undisturbed;
use super::limits::{effective_user, longest_file};

/// The folder, which may not exist yet: `outcore` in `$XDG_CACHE_HOME`, or in `~/.cache`.
pub fn folder() -> Option<PathBuf> {
    cache::cache_folder()
}

/// Reads a file whole. Only a regular file of this user's of at most `most` bytes is read: no link, no pipe, no device.
///
/// # Errors
/// What the system says, and for files of another kind.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file: File = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.uid() != effective_user() || metadata.len() > most {
        return Err(io::Error::other("not a note of this user's"));
    }
    let mut text = Vec::new();
    file.take(most).read_to_end(&mut text)?;
    Ok(text)
}

/// Writes a file whole or not at all, because another process may be reading it; and makes its folder if there is none.
/// Nobody else may read it. The names of all such files begin with `prefix`.
///
/// # Errors
/// What the system says.
pub fn write(path: &Path, prefix: &str, text: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    cache::make_cache_folder(folder)?;
    if text.len() as u64 > longest_file() {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    let mut file = tempfile::Builder::new().prefix(prefix).tempfile_in(folder)?;
    file.write_all(text)?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// Removes files whose names begin with `prefix`: those that were last written longer than `age` ago, files that were
/// not written to their end among them, and the oldest of more than `most`.
pub fn forget_old(folder: &Path, prefix: &str, age: Duration, most: usize) {
    let now = SystemTime::now();
    let written = |entry: fs::DirEntry| {
        let ours = entry.file_name().as_bytes().starts_with(prefix.as_bytes());
        let at = entry.metadata().and_then(|note| note.modified()).ok()?;
        ours.then(|| (at, entry.path()))
    };
    let list = || fs::read_dir(folder).into_iter().flatten().flatten().filter_map(written).collect();
    let mut notes: Vec<_> = undisturbed(list);
    notes.sort_unstable();
    let over = notes.len().saturating_sub(most);
    for (at, (written, path)) in notes.iter().enumerate() {
        // What comes from the future is not old.
        let old = now.duration_since(*written).is_ok_and(|passed| passed > age);
        if (old || at < over)
            && let Err(cause) = fs::remove_file(path)
        {
            tracing::debug!(%cause, note = %path.display(), "an old note stays");
        }
    }
}
