//! Where the scratch file is made unless the user says where: on a disk, never in memory.
//!
//! A folder for temporary files is memory on many systems. Read-write tensors larger than memory would then be kept in memory.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use super::scratch::{ScratchFile, ScratchOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::PageSize;

/// Folders to try, the best first: `TMPDIR` if it is set, the user's cache folder
/// ([XDG Base Directory Specification](https://specifications.freedesktop.org/basedir-spec/latest/)), `/var/tmp`, which
/// outlives a restart and so is on a disk, the folder of a model, and the system's folder for temporary files.
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

/// The user's cache folder.
fn cache(variable: &impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let absolute = |name: &str| variable(name).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
    cache.map(|cache| cache.join("outcore"))
}

/// The folder for what can be measured again. It need not be there.
pub(super) fn cache_folder() -> Option<PathBuf> {
    cache(&|name: &str| env::var_os(name).map(PathBuf::from))
}

/// Makes a scratch file in the first folder that is on a disk and takes one. `model` is a folder that holds one.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if there is none; it names all of them, and why not.
pub(crate) fn scratch_on_a_disk(
    page_size: PageSize,
    model: Option<&Path>,
    options: &ScratchOptions,
) -> Result<ScratchFile> {
    let variable = |name: &str| env::var_os(name).map(PathBuf::from);
    first_on_a_disk(folders(variable, model), page_size, options)
}

fn first_on_a_disk(folders: Vec<PathBuf>, page_size: PageSize, options: &ScratchOptions) -> Result<ScratchFile> {
    let mut refusals = Vec::new();
    for folder in folders {
        // A cache folder need not be there yet. What is wrong with it, the next call says.
        let _there = fs::create_dir_all(&folder);
        match ScratchFile::create_with(&folder, page_size, options.clone()) {
            Ok(file) if file.is_in_memory() => refusals.push(format!("{} is in memory", folder.display())),
            Ok(file) => {
                tracing::debug!(folder = %folder.display(), "scratch file");
                return Ok(file);
            }
            Err(error) => refusals.push(error.to_string()),
        }
    }
    let message = format!("no folder for the scratch file is on a disk: {}", refusals.join("; "));
    Err(Error::new(ErrorKind::Unsupported, message)
        .remedy("name one on a disk (RuntimeBuilder::scratch_dir, or TMPDIR); one in memory is taken if it is named"))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        // A relative one would be another in each working folder; the specification has it ignored.
        let cache = folders(|name| (name == "XDG_CACHE_HOME").then(|| "cache".into()), None);
        assert_eq!(cache[0], Path::new("/var/tmp"));
    }

    #[test]
    fn a_folder_in_memory_is_passed_over_and_named() {
        let memory = Path::new("/dev/shm");
        let page = PageSize::DEFAULT;
        if !ScratchFile::create(memory, page, false).is_ok_and(|file| file.is_in_memory()) {
            return eprintln!("SKIPPED: {} is not in memory here", memory.display());
        }
        let disk = tempfile::tempdir().unwrap();
        if ScratchFile::create(disk.path(), page, false).unwrap().is_in_memory() {
            return eprintln!("SKIPPED: {} is in memory here", disk.path().display());
        }
        let missing = disk.path().join("made/when/needed");
        let file = first_on_a_disk(vec![memory.into(), missing.clone()], page, &ScratchOptions::default()).unwrap();
        assert_eq!(file.path(), missing);
        let error =
            first_on_a_disk(vec![memory.into(), "/proc/none".into()], page, &ScratchOptions::default()).unwrap_err();
        let text = error.to_string();
        assert!(error.kind() == ErrorKind::Unsupported && error.advice().is_some(), "{text}");
        assert!(text.contains("/dev/shm is in memory") && text.contains("/proc/none"), "{text}");
    }
}
