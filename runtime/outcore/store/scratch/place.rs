//! Chooses the scratch file's folder where the user names none: on a disk, never in memory.
//!
//! On many systems the folder for temporary files is in memory. Read-write tensors larger than memory would then be
//! kept in memory.

use std::env;
use std::path::{Path, PathBuf};

use crate::error::{Error, ErrorKind, Result};
use crate::ids::PageSize;
use crate::os::cache::{cache, cache_folder, make_cache_folder};
use crate::store::scratch::{ScratchFile, ScratchOptions};

/// Folders to try, the best first: `TMPDIR` if it is set; the user's cache folder ([XDG Base Directory
/// Specification](https://specifications.freedesktop.org/basedir-spec/latest/)); `/var/tmp`, which outlives a restart
/// and so is on a disk; the folder of a model; and the system's folder for temporary files.
fn folders(variable: impl Fn(&str) -> Option<PathBuf>, model: Option<&Path>) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    folders.extend(variable("TMPDIR").filter(|path| path.is_absolute()));
    folders.extend(cache(&variable));
    folders.push("/var/tmp".into());
    folders.extend(model.map(Path::to_owned));
    folders.push(env::temp_dir());
    folders.dedup();
    folders
}

/// Makes a scratch file in the first folder that is on a disk and has the room that `reserve` takes. Folders that other
/// machines serve come last. `model` is the folder of a model.
///
/// # Errors
/// [`ErrorKind::DiskFull`] if some folder takes a file, but none has room; [`ErrorKind::Unsupported`] if no folder
/// takes a file. Both name every folder and why it was refused. Any other error of `reserve`.
pub(crate) fn scratch_on_a_disk<T>(
    page_size: PageSize,
    model: Option<&Path>,
    options: &ScratchOptions,
    reserve: impl FnMut(&ScratchFile) -> Result<T>,
) -> Result<(ScratchFile, T)> {
    let variable = |name: &str| env::var_os(name).map(PathBuf::from);
    first_on_a_disk(folders(variable, model), cache_folder().as_deref(), page_size, options, reserve)
}

/// As [`scratch_on_a_disk`], with these folders. Of them, `cache` need not exist yet.
fn first_on_a_disk<T>(
    folders: Vec<PathBuf>,
    cache: Option<&Path>,
    page_size: PageSize,
    options: &ScratchOptions,
    mut reserve: impl FnMut(&ScratchFile) -> Result<T>,
) -> Result<(ScratchFile, T)> {
    let (mut refusals, mut full) = (Vec::new(), None);
    let mut remote = Vec::new();
    let local = folders.into_iter().filter_map(|folder| {
        if cache == Some(&folder)
            && let Err(cause) = make_cache_folder(&folder)
        {
            return Some(Err(format!("{}: {cause}", folder.display())));
        }
        Some(match ScratchFile::create_with(&folder, page_size, options.clone()) {
            Ok(file) if file.is_in_memory() => Err(format!("{} is in memory", folder.display())),
            Ok(file) if file.is_remote() => {
                remote.push(file);
                return None;
            }
            Ok(file) => Ok(file),
            Err(error) => Err(error.to_string()),
        })
    });
    let mut take = |file: std::result::Result<ScratchFile, String>| {
        let refusal = match file.map(|file| (reserve(&file), file)) {
            Ok((Ok(reserved), file)) => {
                tracing::debug!(folder = %file.directory().display(), "scratch file");
                return Some(Ok((file, reserved)));
            }
            Ok((Err(error), _)) if error.kind() == ErrorKind::DiskFull => {
                full = error.advice().map(str::to_owned);
                error.to_string()
            }
            Ok((Err(error), _)) => return Some(Err(error)),
            Err(refusal) => refusal,
        };
        refusals.push(refusal);
        None
    };
    let mut found = None;
    for file in local {
        found = take(file);
        if found.is_some() {
            break;
        }
    }
    let found = found.or_else(|| remote.into_iter().find_map(|file| take(Ok(file))));
    found.unwrap_or_else(|| {
        let remedy =
            "name a folder on a disk (RuntimeBuilder::scratch_dir, or TMPDIR); scratch_dir takes one in memory too";
        let refusals = refusals.join("; ");
        Err(if let Some(advice) = full {
            let message = format!("no folder for the scratch file has room: {refusals}");
            Error::new(ErrorKind::DiskFull, message).remedy(format!("{advice}; or {remedy}"))
        } else {
            let message = format!("no folder for the scratch file is on a disk: {refusals}");
            Error::new(ErrorKind::Unsupported, message).remedy(remedy)
        })
    })
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::ids::Bytes;
    use crate::os::limits::effective_user;

    #[test]
    fn folders_come_in_their_order() {
        let none = folders(|_| None, None);
        assert_eq!(none, [PathBuf::from("/var/tmp"), env::temp_dir()]);
        let set = |name: &str| match name {
            "TMPDIR" => Some(PathBuf::from("/scratch")),
            "HOME" => Some(PathBuf::from("/people/a")),
            _ => None,
        };
        let found = folders(set, Some(Path::new("/models")));
        let named = ["/scratch", "/people/a/.cache/outcore", "/var/tmp", "/models"].map(PathBuf::from);
        assert_eq!(found[..4], named);
        // A relative path would mean another folder in each working folder; the specification says to ignore it.
        let cache = folders(|name| (name == "XDG_CACHE_HOME").then(|| "cache".into()), None);
        assert_eq!(cache[0], Path::new("/var/tmp"));
    }

    #[test]
    fn a_folder_in_memory_is_passed_over_and_named() {
        let memory = Path::new("/dev/shm");
        let page = PageSize::DEFAULT;
        if !ScratchFile::create(memory, page).is_ok_and(|file| file.is_in_memory()) {
            return eprintln!("SKIPPED: {} is not in memory here", memory.display());
        }
        let disk = tempfile::tempdir().unwrap();
        if ScratchFile::create(disk.path(), page).unwrap().is_in_memory() {
            return eprintln!("SKIPPED: {} is in memory here", disk.path().display());
        }
        let missing = disk.path().join("made/when/needed");
        let first = |folders, cache| first_on_a_disk(folders, cache, page, &ScratchOptions::default(), |_| Ok(()));
        let (file, ()) = first(vec![memory.into(), missing.clone()], Some(&missing)).unwrap();
        assert_eq!(file.directory(), missing);
        let error = first(vec![memory.into(), "/proc/none".into()], None).unwrap_err();
        let text = error.to_string();
        assert!(error.kind() == ErrorKind::Unsupported && error.advice().is_some(), "{text}");
        assert!(text.contains("/dev/shm is in memory") && text.contains("/proc/none"), "{text}");
    }

    /// Only the cache folder is made; another folder that does not exist is passed over.
    #[test]
    fn regression_a_folder_that_is_not_there_is_not_made() {
        let there = tempfile::tempdir().unwrap();
        let page = PageSize::DEFAULT;
        if ScratchFile::create(there.path(), page).unwrap().is_in_memory() {
            return eprintln!("SKIPPED: {} is in memory here", there.path().display());
        }
        let missing = there.path().join("not/there");
        let folders = vec![missing.clone(), there.path().to_path_buf()];
        let first = |cache| first_on_a_disk(folders.clone(), cache, page, &ScratchOptions::default(), |_| Ok(()));
        let (file, ()) = first(None).unwrap();
        assert!(file.directory() == there.path() && !there.path().join("not").exists());
        // Nor is it made where another user could not write to it.
        if effective_user() == 0 {
            std::os::unix::fs::chown(there.path(), Some(65_534), None).unwrap();
            assert_eq!(make_cache_folder(&missing).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
            let (file, ()) = first(Some(&missing)).unwrap();
            assert!(file.directory() == there.path() && !there.path().join("not").exists());
        }
    }

    /// A folder that takes a file need not have the room: the next one is asked.
    #[test]
    fn regression_a_folder_that_is_full_is_passed_over_and_named() {
        let (full, next) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let page = PageSize::DEFAULT;
        if ScratchFile::create(full.path(), page).unwrap().is_in_memory() {
            return eprintln!("SKIPPED: {} is in memory here", full.path().display());
        }
        let first = |folders: &[&Path], wish: Bytes| {
            let folders = folders.iter().map(|folder| folder.to_path_buf()).collect();
            first_on_a_disk(folders, None, page, &ScratchOptions::default(), |file| {
                let wish = if file.directory() == full.path() { Bytes::new(1 << 60) } else { wish };
                file.reserve(wish)
            })
        };
        let (file, run) = first(&[full.path(), next.path()], Bytes::mib(2)).unwrap();
        assert_eq!((file.directory(), file.held()), (next.path(), Bytes::mib(2)));
        drop(run);
        let error = first(&[full.path(), "/proc/none".as_ref()], Bytes::mib(2)).unwrap_err();
        let text = error.to_string();
        assert!(error.kind() == ErrorKind::DiskFull && error.advice().is_some(), "{text}");
        assert!(text.contains(full.path().to_str().unwrap()) && text.contains("/proc/none"), "{text}");
    }
}
