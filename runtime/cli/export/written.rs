//! The file that is exported to.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use outcore::format::ModelHeader;
use outcore::{Bytes, Error, Result};
use outcore_lab::output::{Input, NewFile};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use tempfile::NamedTempFile;

/// A file that gets its name when it is whole. Dropped before, it leaves nothing.
#[derive(Debug)]
pub struct Written {
    beside: BufWriter<NamedTempFile>,
    file: NewFile,
    path: PathBuf,
}

impl Written {
    /// Makes a file of `len` bytes, and has its room reserved where the file system can.
    ///
    /// # Errors
    /// Those of [`NewFile::create`], for a file of the model too; those of the file system, that it is full among them.
    pub fn new(path: &Path, model: &ModelHeader, len: u64) -> Result<Self> {
        let input = |of: &outcore::format::ModelFile| Input { path: of.path.clone(), is: "it is a file of the model" };
        let inputs: Vec<Input> = model.files.iter().map(input).collect();
        let file = NewFile::create(path, "export", "OUT", &inputs)?;
        let beside = file.beside()?;
        match fallocate(beside.as_file(), FallocateFlags::empty(), 0, len) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            Err(cause) => {
                let what = format!("reserve {} for {}", Bytes::new(len), path.display());
                return Err(Error::io(what, cause.into()).remedy("free as much there, or export to another disk"));
            }
        }
        Ok(Self { beside: BufWriter::with_capacity(1 << 20, beside), file, path: path.to_owned() })
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.beside.write_all(bytes).map_err(|cause| self.file.failed(cause))
    }

    /// Gives it its name, in the place of a file that has it, and makes both durable.
    ///
    /// # Errors
    /// Those of the file system. Then a file that has the name is as it was, unless only the name was not made durable.
    pub fn finish(self) -> Result<()> {
        let Self { beside, file, path } = self;
        let failed = |cause: io::Error| file.failed(cause);
        let beside = beside.into_inner().map_err(|error| failed(error.into_error()))?;
        beside.as_file().sync_all().map_err(failed)?;
        file.put(beside)?;
        let folder = std::fs::canonicalize(&path).map_err(failed)?;
        let folder = folder.parent().unwrap_or(Path::new("/"));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)
    }
}
