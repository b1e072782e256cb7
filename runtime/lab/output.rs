//! Output files that are complete or not there at all.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::error::{Error, ErrorKind, Result};

/// An output file. Its contents go to a temporary file beside it, which takes its name when complete. Until then a file
/// of that name stays as it was.
///
/// ```
/// use std::io::Write;
///
/// use outcore_lab::output::NewFile;
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("page.html");
/// let file = NewFile::create(&path, "page", "--output", &[])?;
/// let mut beside = file.beside()?;
/// beside.write_all(b"all of it")?;
/// assert!(!path.exists());
/// file.put(beside)?;
/// assert_eq!(std::fs::read(&path)?, b"all of it");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct NewFile {
    path: PathBuf,
    what: &'static str,
    option: &'static str,
}

impl NewFile {
    /// Prepares to write a `what`, such as "page", at `path`, which must not be one of `inputs`. `option` is the
    /// command-line option that named `path`, for error messages.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if `path` is one of the inputs, under any name, or is not a regular file;
    /// [`ErrorKind::Io`] and its kin if no file can be made there.
    pub fn create(path: &Path, what: &'static str, option: &'static str, inputs: &[Input]) -> Result<Self> {
        // A link stays; the file that it points to is replaced.
        let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let file = Self { path, what, option };
        if let Ok(there) = std::fs::metadata(&file.path) {
            if !there.is_file() {
                return Err(file.refused("it is no regular file"));
            }
            let here = Some((there.dev(), there.ino()));
            if let Some(input) = inputs.iter().find(|input| identity(&input.path) == here) {
                return Err(file.refused(input.is));
            }
        }
        // Tries to make a file there. It is unlinked at once, so nothing stays behind however the run ends.
        drop(file.beside()?);
        Ok(file)
    }

    /// Checks that this is not the same file as `other`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if it is the same file.
    pub fn is_not(&self, other: &Path) -> Result<()> {
        let other = std::fs::canonicalize(other).unwrap_or_else(|_| other.to_owned());
        let same = identity(&self.path).is_some_and(|is| identity(&other) == Some(is));
        if same || beside_what(&self.path) == beside_what(&other) {
            return Err(self.refused("something else is written there"));
        }
        Ok(())
    }

    fn refused(&self, why: &str) -> Error {
        let what = format!("the {} cannot be written to {}: {why}", self.what, self.path.display());
        Error::new(ErrorKind::InvalidArgument, what)
            .remedy(format!("give {} the name of a file of its own", self.option))
    }

    /// Makes an empty temporary file in the same folder. It is removed when dropped.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] and its kin if none can be made there.
    pub fn beside(&self) -> Result<NamedTempFile> {
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        // Like any new file of this user: the umask decides who may read it.
        let usual = Permissions::from_mode(0o666);
        let prefix = format!(".{}-", self.what);
        let mut builder = tempfile::Builder::new();
        let made = builder.permissions(usual).prefix(&prefix).tempfile_in(folder.unwrap_or(Path::new(".")));
        made.map_err(|cause| self.failed(cause))
    }

    /// Gives the name to a file that [`beside`](Self::beside) made.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] and its kin if the file cannot be renamed.
    pub fn put(&self, file: NamedTempFile) -> Result<()> {
        file.persist(&self.path).map(drop).map_err(|refused| self.failed(refused.error))
    }

    /// Makes the error that says that the file cannot be written.
    pub fn failed(&self, cause: std::io::Error) -> Error {
        // Leaves out the temporary file's name, which means nothing to the user.
        let inner = cause.get_ref().and_then(|named| named.source()?.downcast_ref::<std::io::Error>());
        let cause = inner.and_then(std::io::Error::raw_os_error).map_or(cause, std::io::Error::from_raw_os_error);
        Error::io(format!("write the {} to {}", self.what, self.path.display()), cause)
            .remedy(format!("{} wants the name of a file in a folder that can be written to", self.option))
    }
}

/// An input file, which must not be overwritten.
#[derive(Clone, Debug)]
pub struct Input {
    /// Its path.
    pub path: PathBuf,
    /// The reason given in the error for writing over it, such as "it is a file of the model".
    pub is: &'static str,
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// Returns the canonical folder and the name in it: the same for two paths of one file, even if it does not exist yet.
fn beside_what(path: &Path) -> (Option<PathBuf>, Option<&std::ffi::OsStr>) {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    (std::fs::canonicalize(folder).ok(), path.file_name())
}
