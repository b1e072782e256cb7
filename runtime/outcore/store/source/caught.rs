//! The calls of a page source. It is code of the program's: it may panic, lie, and never come to an end.

use std::fmt;
use std::io;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result, caught};
use crate::store::MAX_REPEATS;
use crate::store::source::PageSource;

/// The remedy for errors of a source's own.
pub(crate) const SEE_THE_SOURCE: &str = "see what the source says: it is not a file of this machine";

/// Drops a source. Its `drop` may panic too.
struct Kept(Option<Arc<dyn PageSource>>);

impl Drop for Kept {
    fn drop(&mut self) {
        let source = self.0.take();
        if let Err(panic) = caught(|| drop(source)) {
            tracing::error!(panic, "a page source panicked as it was dropped");
        }
    }
}

/// A source whose panics are errors. It is asked for its name and its length once.
pub struct CaughtSource {
    source: Kept,
    name: String,
    len: u64,
}

impl CaughtSource {
    /// # Errors
    /// If the source panics.
    pub fn new(source: Arc<dyn PageSource>) -> Result<Self> {
        let mut this = Self { source: Kept(Some(source)), name: "a page source".to_owned(), len: 0 };
        this.name = this.ask("ask for the name of", |source| source.name())?;
        this.len = this.ask("ask for the length of", |source| source.len())?;
        Ok(this)
    }

    fn ask<T>(&self, what: &str, question: impl FnOnce(&dyn PageSource) -> T) -> Result<T> {
        self.call(question).map_err(|cause| self.failed(what, cause))
    }

    fn call<T>(&self, call: impl FnOnce(&dyn PageSource) -> T) -> io::Result<T> {
        let Some(source) = &self.source.0 else { return Err(io::Error::other("the source is gone")) };
        caught(|| call(&**source)).map_err(|panic| io::Error::other(format!("the source panicked: {panic}")))
    }

    /// The error of a call that failed.
    pub fn failed(&self, what: &str, cause: io::Error) -> Error {
        Error::io(format!("{what} {}", self.name), cause).remedy(SEE_THE_SOURCE)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    /// # Errors
    /// If the source panics.
    pub fn identity(&self) -> Result<u64> {
        self.ask("ask for the identity of", |source| source.identity())
    }

    /// One call of [`PageSource::read_at`]. No more bytes come than there is room for.
    ///
    /// # Errors
    /// The source's, or that it panicked.
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        let room = bytes.len();
        let came = self.call(|source| source.read_at(offset, bytes))??;
        Ok(came.min(room))
    }

    /// Reads all of `bytes`.
    ///
    /// # Errors
    /// The source's; that it panicked; that it said that no bytes came, or again and again that it was interrupted.
    pub fn read_exact_at(&self, mut offset: u64, mut bytes: &mut [u8]) -> Result<()> {
        let mut interruptions = 0;
        while !bytes.is_empty() {
            match self.read_at(offset, bytes) {
                Ok(0) => return Err(self.nothing_came(offset)),
                Ok(came) => {
                    bytes = bytes.get_mut(came..).unwrap_or_default();
                    offset = offset.saturating_add(came as u64);
                    interruptions = 0;
                }
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted && interruptions < MAX_REPEATS => {
                    interruptions += 1;
                }
                Err(cause) => {
                    return Err(self.failed(&format!("read {} bytes at offset {offset} of", bytes.len()), cause));
                }
            }
        }
        Ok(())
    }

    /// The error if the source said that it read nothing, before its end.
    pub fn nothing_came(&self, offset: u64) -> Error {
        let Self { name, len, .. } = self;
        Error::new(ErrorKind::Io, format!("{name} gave no bytes at offset {offset}, and says that it has {len}"))
            .remedy("let the source's read_at give at least one byte, or an error")
    }
}

impl fmt::Debug for CaughtSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CaughtSource").field("name", &self.name).field("len", &self.len).finish_non_exhaustive()
    }
}
