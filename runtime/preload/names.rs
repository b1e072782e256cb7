//! The names by which a program opened model files, where these are symbolic links.
//!
//! A link may lead to a file of quite another name, as in caches where files are named by their hashes. Then only the
//! links say which files are parts of one model, and a program that maps a descriptor does not say by which link it got
//! that.

use std::collections::VecDeque;
use std::ffi::{CStr, OsStr, c_char, c_int};
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;

/// A file that was opened by a link.
#[derive(Debug)]
struct Named {
    file: (u64, u64),
    link: PathBuf,
}

static NAMED: Mutex<VecDeque<Named>> = Mutex::new(VecDeque::new());
/// How long other threads are waited for.
const LOCK_MOST: Duration = Duration::from_millis(50);
/// The oldest of more are forgotten.
const NAMED_MAX: usize = 4096;

/// Where a path leads from that is relative to this descriptor.
fn folder(at: c_int) -> Option<PathBuf> {
    match at {
        libc::AT_FDCWD => std::env::current_dir().ok(),
        folder => fs::read_link(format!("/proc/self/fd/{folder}")).ok(),
    }
}

/// The program has opened a model file by `path`, which is relative to the folder of the descriptor `at`.
///
/// # Safety
/// `path` is a string that ends with a zero byte.
pub unsafe fn opened(file: &Metadata, at: c_int, path: *const c_char) {
    // SAFETY: as the caller promised.
    let path = Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()));
    let Some(link) = (if path.is_absolute() { Some(path.to_owned()) } else { folder(at).map(|at| at.join(path)) })
    else {
        return;
    };
    if !fs::symlink_metadata(&link).is_ok_and(|found| found.is_symlink()) {
        return;
    }
    // Other threads have it for a moment; one that is not in this child, for ever.
    let Some(mut named) = NAMED.try_lock_for(LOCK_MOST) else { return };
    let file = (file.dev(), file.ino());
    named.retain(|known| known.file != file);
    named.truncate(NAMED_MAX - 1);
    named.push_front(Named { file, link });
}

/// The link by which this file was opened last, if it still leads there.
pub fn of(file: &Metadata) -> Option<PathBuf> {
    let id = (file.dev(), file.ino());
    let link = NAMED.try_lock_for(LOCK_MOST)?.iter().find(|known| known.file == id)?.link.clone();
    fs::metadata(&link).is_ok_and(|found| (found.dev(), found.ino()) == id).then_some(link)
}
