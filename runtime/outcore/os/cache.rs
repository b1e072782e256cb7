//! The user's cache folder, for data that can be measured or learned again.

use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::limits::effective_user;

/// The user's cache folder.
pub(crate) fn cache(variable: &impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let absolute = |name: &str| variable(name).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
    cache.map(|cache| cache.join("outcore"))
}

/// The folder for data that can be measured again. It may not exist yet.
pub(crate) fn cache_folder() -> Option<PathBuf> {
    cache(&|name: &str| env::var_os(name).map(PathBuf::from))
}

/// Makes the user's cache folder if it does not exist. Root, as with `sudo`, is refused inside another user's folder:
/// that user could not write to the new folder.
pub(crate) fn make_cache_folder(folder: &Path) -> io::Result<()> {
    let root = effective_user() == 0;
    let whose = folder.ancestors().find_map(|there| fs::metadata(there).ok()).map(|there| there.uid());
    match whose {
        Some(user) if root && user != 0 => {
            let what = format!("{} is in a folder of user {user}, not of root", folder.display());
            Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
        }
        _ => fs::create_dir_all(folder),
    }
}
