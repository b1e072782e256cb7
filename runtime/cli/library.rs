//! Where the library is that `outcore run` loads.

use std::fs::{self, DirBuilder, Permissions};
use std::hash::{DefaultHasher, Hasher};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use outcore::store::DiskProfile;
use outcore::{Error, ErrorKind, Result};
use tempfile::NamedTempFile;

/// Beside this program, where builds from the sources put it, if [`NAMED`] does not name another one.
const LIBRARY: &str = "liboutcore_preload.so";
const NAMED: &str = "OUTCORE_PRELOAD";

const REMEDY: &str = "set XDG_CACHE_HOME to a folder that this user alone may write, or name the library in \
                      OUTCORE_PRELOAD";

/// What `build.rs` made.
#[cfg(embedded)]
const EMBEDDED: Option<&[u8]> = Some(include_bytes!(env!("OUTCORE_EMBEDDED")));
#[cfg(not(embedded))]
const EMBEDDED: Option<&[u8]> = None;

/// The library's path.
///
/// # Errors
/// `NotFound` if there is none; `Io` and its kin if the program's own one cannot be written.
pub fn find() -> Result<PathBuf> {
    let bytes = match there()? {
        Place::File(path) => return found(path),
        Place::InProgram(bytes) => bytes,
    };
    let folder = DiskProfile::remembered_in().ok_or_else(|| {
        Error::new(ErrorKind::NotFound, "there is no folder for the library that is loaded into programs")
            .remedy("set XDG_CACHE_HOME or HOME to a folder that this user may write")
    })?;
    placed(bytes, &folder)
}

enum Place {
    File(PathBuf),
    InProgram(&'static [u8]),
}

fn there() -> Result<Place> {
    if let Some(named) = std::env::var_os(NAMED) {
        return Ok(Place::File(PathBuf::from(named)));
    }
    let own = std::env::current_exe().map_err(|cause| {
        Error::io("look for the library beside this program", cause).remedy(format!("name it in {NAMED}"))
    })?;
    let beside = own.with_file_name(LIBRARY);
    Ok(match EMBEDDED.filter(|_| !beside.is_file()) {
        Some(bytes) => Place::InProgram(bytes),
        None => Place::File(beside),
    })
}

/// Where [`find`] would find it, in words. Writes nothing.
///
/// # Errors
/// As for [`find`].
pub fn place() -> Result<String> {
    match there()? {
        Place::File(path) => found(path).map(|path| path.display().to_string()),
        Place::InProgram(_) => Ok("in this program".to_owned()),
    }
}

fn found(library: PathBuf) -> Result<PathBuf> {
    if library.is_file() {
        // The program may have another working directory.
        return library.canonicalize().map_err(|cause| Error::io(format!("find {}", library.display()), cause));
    }
    Err(Error::new(
        ErrorKind::NotFound,
        format!("{} is not there, and this build has no library of its own", library.display()),
    )
    .remedy(format!(
        "in the sources of outcore: `cargo build --release -p outcore-preload`, or `cargo install --path \
             runtime/cli`; or name it in {NAMED}"
    )))
}

/// The file with these bytes in `folder`, for this and later programs: those that a program starts load it too, when
/// this one has long ended. Only this user and root may change the folder, or what leads to it: what is checked here is
/// what programs load.
fn placed(bytes: &[u8], folder: &Path) -> Result<PathBuf> {
    let mut hash = DefaultHasher::new();
    hash.write(bytes);
    let name = format!("preload-{:016x}.so", hash.finish());
    let failed = |cause| {
        Error::io(format!("write {}, which is loaded into programs", folder.join(&name).display()), cause)
            .remedy(REMEDY)
    };
    let own = rustix::process::geteuid().as_raw();
    if !folder.exists() {
        // Nothing is made where it would be refused: root would leave a folder in another user's.
        if let Some(above) = folder.ancestors().find_map(|above| above.canonicalize().ok()) {
            only_for(own, &above, false)?;
        }
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
    }
    let folder = folder.canonicalize().map_err(failed)?;
    only_for(own, &folder, true)?;
    let path = folder.join(&name);
    let mine = |path: &Path| {
        fs::symlink_metadata(path).is_ok_and(|found| found.is_file() && found.uid() == own && found.mode() & 0o022 == 0)
    };
    if mine(&path) && fs::read(&path).is_ok_and(|there| there == bytes) {
        return Ok(path);
    }
    let mut file = NamedTempFile::new_in(&folder).map_err(failed)?;
    file.write_all(bytes).map_err(failed)?;
    file.as_file().set_permissions(Permissions::from_mode(0o700)).map_err(failed)?;
    // Programs that have the old file keep it; others see the whole new one.
    file.persist(&path).map_err(|error| failed(error.error))?;
    Ok(path)
}

/// Refuses a folder in which others than `user` and root could put another file in the place of one, or, unless it is
/// the `last` one, a folder in the place of one. `folder` has no symbolic link in it.
fn only_for(user: u32, folder: &Path, last: bool) -> Result<()> {
    let look =
        |part: &Path| fs::metadata(part).map_err(|cause| Error::io(format!("look at {}", part.display()), cause));
    // In a user namespace that has not the machine's root, the root folder shows who that is.
    let root = look(Path::new("/"))?.uid();
    for part in folder.ancestors() {
        let found = look(part)?;
        let (owner, mode) = (found.uid(), found.mode());
        let is_last = last && part == folder;
        // Many systems give each user a group of the same number, in which nobody else is. With an access list, the
        // group's rights are those that anybody in the list may have.
        let has_list = || rustix::fs::getxattr(part, "system.posix_acl_access", &mut [0_u8; 0][..]).is_ok();
        let of_group = mode & 0o020 != 0 && (found.gid() != owner || has_list());
        let of_others = mode & 0o002 != 0 || of_group;
        // In a sticky folder, as /tmp is, only its owner and that of a file may rename the file.
        let is_sticky = mode & 0o1000 != 0 && !is_last;
        let why = if owner != user && (is_last || ![0, root].contains(&owner)) {
            format!("belongs to user {owner}, not to user {user}")
        } else if of_others && !is_sticky {
            format!("may be written by other users (mode {:o})", mode & 0o7777)
        } else {
            continue;
        };
        let what = format!("the library that is loaded into programs cannot be kept in {}", folder.display());
        let what =
            if part == folder { format!("{what}, which {why}") } else { format!("{what}: {} {why}", part.display()) };
        return Err(Error::new(ErrorKind::PermissionDenied, what).remedy(REMEDY));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;

    #[test]
    fn the_file_has_the_bytes_and_is_this_users() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("not/there/yet");
        let path = placed(b"one", &folder).unwrap();
        let inode = |path: &Path| fs::metadata(path).unwrap().ino();
        let first = inode(&path);
        assert_eq!(placed(b"one", &folder).unwrap(), path);
        assert_eq!((inode(&path), fs::metadata(&path).unwrap().mode() & 0o777), (first, 0o700));
        // What was cut off, changed, or could be changed by others, is written anew.
        let spoil: [fn(&Path); 4] = [
            |path| fs::write(path, b"on").unwrap(),
            |path| fs::write(path, b"two").unwrap(),
            |path| fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap(),
            |path| {
                fs::remove_file(path).unwrap();
                std::os::unix::fs::symlink("/dev/null", path).unwrap();
            },
        ];
        for spoil in spoil {
            spoil(&path);
            assert_eq!(placed(b"one", &folder).unwrap(), path);
            let found = fs::symlink_metadata(&path).unwrap();
            assert!(found.is_file() && found.mode() & 0o777 == 0o700);
            assert_eq!(fs::read(&path).unwrap(), b"one");
        }
        assert_ne!(placed(b"two", &folder).unwrap(), path);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2, "nothing else is left there");
    }

    #[test]
    fn regression_a_folder_that_others_may_change_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (above, kept) = (folder.path().join("above"), folder.path().join("above/outcore"));
        let mode = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        let refused = |named: &Path, why: &str| {
            let error = placed(b"one", &kept).unwrap_err();
            let (kind, text) = (error.kind(), error.to_string());
            assert!(kind == ErrorKind::PermissionDenied && text.contains(why) && text.contains("XDG_CACHE"), "{text}");
            assert!(text.contains(&named.display().to_string()), "{text}");
            assert_eq!(fs::read_dir(&kept).unwrap().count(), 0, "nothing was written");
        };
        fs::create_dir_all(&above).unwrap();
        mode(&above, 0o777);
        assert!(placed(b"one", &kept).is_err() && !kept.exists(), "a folder was made where it is refused");
        mode(&above, 0o755);
        fs::create_dir_all(&kept).unwrap();
        mode(&kept, 0o755);
        let (above, kept) = (above.canonicalize().unwrap(), kept.canonicalize().unwrap());
        for (path, bits) in [(&above, 0o777), (&kept, 0o777), (&kept, 0o1777)] {
            mode(path, bits);
            refused(path, &format!("{bits:o}"));
            mode(path, 0o755);
        }
        if rustix::process::geteuid().is_root() {
            for path in [&above, &kept] {
                std::os::unix::fs::chown(path, Some(1), None).unwrap();
                refused(path, "belongs to user 1,");
                std::os::unix::fs::chown(path, Some(0), None).unwrap();
            }
        } else {
            eprintln!("SKIPPED: only root can make another user's folder");
        }
        // As /tmp is.
        mode(&above, 0o1777);
        assert_eq!(placed(b"one", &kept).unwrap().parent(), Some(&*kept));
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, b"").unwrap();
        let error = placed(b"one", &file).unwrap_err().to_string();
        assert!(error.contains("preload-") && error.contains("XDG_CACHE_HOME"), "{error}");
    }
}
