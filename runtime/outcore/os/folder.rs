//! A folder that is opened once. What is done in it later is relative to the open folder, not to its path.
//!
//! So the files stay in the folder that was locked, whatever its path names later: the folder may be renamed, a
//! symbolic link to it switched, or something mounted over it. By path, the owner of the lock would write into another
//! folder, which may belong to another process.

use std::ffi::OsStr;
use std::fs::{File, TryLockError};
use std::io;
use std::os::fd::AsFd;
use std::path::{Component, Path, absolute};
use std::process;

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, mkdirat, openat, renameat, unlinkat};
use rustix::io::{Errno, retry_on_intr};

/// How [`Folder::open`] opens a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// There must be such a file.
    Read,
    /// There must be such a file.
    Write,
    /// There must be no such file yet.
    Create,
    /// An old one is emptied.
    Replace,
}

impl Access {
    fn flags(self) -> OFlags {
        match self {
            Self::Read => OFlags::RDONLY,
            Self::Write => OFlags::RDWR,
            Self::Create => OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
            Self::Replace => OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC,
        }
    }
}

/// An open folder.
#[derive(Debug)]
pub struct Folder(File);

impl Folder {
    /// The folder at this path, if there is one. The path may be, or go through, symbolic links.
    ///
    /// # Errors
    /// What the system says.
    pub fn existing(path: &Path) -> io::Result<Self> {
        Self::at(CWD, path.as_os_str())
    }

    /// The folder at this path. It is made if there is none, and so are those above it. Nobody else can look into a
    /// folder that is made here. When this returns, their names last.
    ///
    /// # Errors
    /// What the system says.
    pub fn make(path: &Path) -> io::Result<Self> {
        match Self::existing(path) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
            opened => return opened,
        }
        let path = absolute(path)?;
        let last = path.components().next_back().map(Component::as_os_str);
        let (Some(above), Some(last)) = (path.parent(), last) else { return Err(io::ErrorKind::NotFound.into()) };
        let above = Self::make(above)?;
        match mkdirat(&above.0, last, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(cause) => return Err(cause.into()),
        }
        // A folder is an entry of the one above, which must last too.
        above.sync()?;
        Self::at(&above.0, last)
    }

    fn at(above: impl AsFd, name: &OsStr) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self(retry_on_intr(|| openat(&above, name, flags, Mode::empty()))?.into()))
    }

    /// The folder itself, open.
    pub fn file(&self) -> &File {
        &self.0
    }

    /// Opens a regular file of this folder. Only this user can read and write a file that is made here.
    ///
    /// # Errors
    /// What the system says, [`io::ErrorKind::NotFound`] if there is none. For symbolic links, which are not followed,
    /// and for pipes and devices.
    pub fn open(&self, name: &str, access: Access) -> io::Result<File> {
        let (name, irregular) = (entry(name)?, || io::Error::other("not a regular file"));
        let flags = access.flags() | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match retry_on_intr(|| openat(&self.0, name, flags, Mode::RUSR | Mode::WUSR)) {
            // The name is one entry, so the only link on the way to the file is the entry itself.
            Err(Errno::LOOP) => return Err(irregular()),
            file => File::from(file?),
        };
        if file.metadata()?.is_file() { Ok(file) } else { Err(irregular()) }
    }

    /// Gives an entry another name. If that name was a file's, the file is gone.
    ///
    /// # Errors
    /// What the system says.
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(renameat(&self.0, entry(from)?, &self.0, entry(to)?)?)
    }

    /// Removes a file. Of a symbolic link, the link.
    ///
    /// # Errors
    /// What the system says.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        Ok(unlinkat(&self.0, entry(name)?, AtFlags::empty())?)
    }

    /// The names of all entries that are UTF-8, in no order.
    ///
    /// # Errors
    /// What the system says.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for found in Dir::read_from(&self.0)? {
            if let Ok(name) = found?.file_name().to_str()
                && entry(name).is_ok()
            {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    /// When this returns, entries that were made, renamed and removed stay so.
    ///
    /// # Errors
    /// What the system says.
    pub fn sync(&self) -> io::Result<()> {
        self.0.sync_all()
    }

    /// Locks the folder until what is returned is dropped. `None` if somebody else has locked it, by whatever path.
    /// Those who lock it for [`Access::Read`] may have it together.
    ///
    /// The folder itself is locked, and a file in it, which `access` opens or makes: network file systems lock only
    /// files between machines. On one machine the lock holds if that file is removed.
    ///
    /// # Errors
    /// What the system says.
    pub fn lock(&self, file: &str, access: Access) -> io::Result<Option<FolderLock>> {
        // Opened anew, because a lock belongs to what was opened: two locks of one `Folder` have to exclude each other.
        let Self(folder) = Self::at(&self.0, OsStr::new("."))?;
        let Some(folder) = Locked::of(folder, access)? else { return Ok(None) };
        let file = Locked::of(self.open(file, access)?, access)?;
        Ok(file.map(|file| FolderLock { _file: file, _folder: folder }))
    }
}

/// The name, if it names an entry of a folder, so that nothing outside of the folder is opened or changed.
fn entry(name: &str) -> io::Result<&str> {
    if matches!(name, "" | "." | "..") || name.contains('/') {
        let what = format!("{name:?} does not name an entry of a folder");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    Ok(name)
}

/// A folder that is [locked](Folder::lock).
#[derive(Debug)]
pub struct FolderLock {
    /// Unlocked first: who has locked the folder is then not refused the file by this lock.
    _file: Locked,
    _folder: Locked,
}

/// A locked file or folder. It is unlocked explicitly: a child that is being started has it open too for a moment. A
/// child by `fork` unlocks nothing: the lock is its parent's.
#[derive(Debug)]
struct Locked {
    file: File,
    process: u32,
}

impl Locked {
    fn of(file: File, access: Access) -> io::Result<Option<Self>> {
        match if access == Access::Read { file.try_lock_shared() } else { file.try_lock() } {
            Ok(()) => Ok(Some(Self { file, process: process::id() })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(cause)) => Err(cause),
        }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        if process::id() == self.process
            && let Err(cause) = self.file.unlock()
        {
            tracing::debug!(%cause, "a folder stays locked until it is closed everywhere");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{ErrorKind, Read, Write};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn write(folder: &Folder, name: &str, access: Access, text: &str) {
        folder.open(name, access).unwrap().write_all(text.as_bytes()).unwrap();
    }

    fn read(folder: &Folder, name: &str) -> String {
        let mut text = String::new();
        folder.open(name, Access::Read).unwrap().read_to_string(&mut text).unwrap();
        text
    }

    fn names(folder: &Folder) -> String {
        let mut names = folder.names().unwrap();
        names.sort();
        names.join(" ")
    }

    #[test]
    fn all_operations_are_on_the_folder_that_was_opened() {
        let parent = tempfile::tempdir().unwrap();
        let [path, moved] = ["here", "moved"].map(|name| parent.path().join(name));
        let folder = Folder::make(&path).unwrap();
        write(&folder, "old", Access::Create, "old");
        fs::rename(&path, &moved).unwrap();
        let other = Folder::make(&path).unwrap();
        write(&other, "old", Access::Create, "other");

        write(&folder, "new", Access::Create, "new");
        write(&folder, "replaced", Access::Replace, "replaced");
        assert_eq!((read(&folder, "old"), names(&folder)), ("old".into(), "new old replaced".into()));
        folder.rename("new", "old").unwrap();
        folder.remove("replaced").unwrap();
        folder.sync().unwrap();
        assert_eq!((read(&folder, "old"), names(&folder)), ("new".into(), "old".into()));
        assert_eq!((read(&other, "old"), names(&other)), ("other".into(), "old".into()));
        assert_eq!(fs::read_to_string(moved.join("old")).unwrap(), "new");
        for (name, access) in [("old", Access::Create), ("none", Access::Read), ("none", Access::Write)] {
            let kind = if name == "old" { ErrorKind::AlreadyExists } else { ErrorKind::NotFound };
            assert_eq!(folder.open(name, access).unwrap_err().kind(), kind);
        }
    }

    #[test]
    fn folders_above_are_made_for_this_user_alone() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("one/two/../three");
        assert_eq!(Folder::existing(&path).unwrap_err().kind(), ErrorKind::NotFound);
        let folder = Folder::make(&path).unwrap();
        write(&folder, "a", Access::Create, "a");
        let mode = |name: &str| fs::metadata(parent.path().join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!(["one", "one/two", "one/three", "one/three/a"].map(mode), [0o700, 0o700, 0o700, 0o600]);
        // A file is no folder, and neither has one; a link without a target does not become one.
        symlink("nowhere", parent.path().join("link")).unwrap();
        for (name, kind) in [("a", ErrorKind::NotADirectory), ("a/b", ErrorKind::NotADirectory)] {
            assert_eq!(Folder::make(&path.join(name)).unwrap_err().kind(), kind);
        }
        assert_eq!(Folder::make(&parent.path().join("link")).unwrap_err().kind(), ErrorKind::NotFound);
        assert!(Folder::make(Path::new("")).is_err());
    }

    #[test]
    fn links_are_not_followed_and_names_do_not_leave_the_folder() {
        let parent = tempfile::tempdir().unwrap();
        let outside = parent.path().join("outside");
        fs::write(&outside, "outside").unwrap();
        let folder = Folder::make(&parent.path().join("here")).unwrap();
        for target in ["../outside", "nowhere"] {
            symlink(target, parent.path().join("here/link")).unwrap();
            for access in [Access::Read, Access::Write, Access::Replace] {
                let error = folder.open("link", access).unwrap_err();
                assert!(error.to_string().contains("not a regular file"), "{error}");
            }
            assert_eq!(folder.open("link", Access::Create).unwrap_err().kind(), ErrorKind::AlreadyExists);
            assert!(folder.lock("link", Access::Replace).is_err());
            // The link goes, and not what it names.
            folder.remove("link").unwrap();
        }
        write(&folder, "a", Access::Create, "a");
        for name in ["../outside", "", ".", "..", "./a", "/", "a\0"] {
            assert_eq!(folder.open(name, Access::Replace).unwrap_err().kind(), ErrorKind::InvalidInput, "{name}");
            assert_eq!(folder.rename("a", name).unwrap_err().kind(), ErrorKind::InvalidInput, "{name}");
            assert_eq!(folder.remove(name).unwrap_err().kind(), ErrorKind::InvalidInput, "{name}");
        }
        assert_eq!((fs::read_to_string(&outside).unwrap(), names(&folder)), ("outside".into(), "a".into()));
    }

    #[test]
    fn a_folder_is_locked_by_all_its_names_and_without_its_lock_file() {
        let parent = tempfile::tempdir().unwrap();
        let [path, moved, link] = ["here", "moved", "link"].map(|name| parent.path().join(name));
        let folder = Folder::make(&path).unwrap();
        let held = folder.lock("lock", Access::Replace).unwrap().unwrap();
        assert!(folder.lock("lock", Access::Write).unwrap().is_none(), "by the same handle");
        fs::rename(&path, &moved).unwrap();
        symlink(&moved, &link).unwrap();
        let free = |name: &Path, access| Folder::existing(name).unwrap().lock("lock", access).unwrap().is_some();
        for access in [Access::Read, Access::Write] {
            assert!(!free(&moved, access) && !free(&link, access));
        }
        fs::remove_file(moved.join("lock")).unwrap();
        assert!(!free(&link, Access::Replace), "whoever makes the file anew");
        drop(held);
        let held = folder.lock("lock", Access::Replace).unwrap().unwrap();
        drop(held);
        // Those who only look do so together.
        let looking = folder.lock("lock", Access::Read).unwrap().unwrap();
        assert!(free(&link, Access::Read) && !free(&link, Access::Write));
        drop(looking);
        assert!(free(&link, Access::Write));
    }
}
