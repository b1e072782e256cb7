//! A store of files beside one of page sources. A source is read by calls that block, so it has threads of its own, as
//! many as operations may be under way. The store of files does not wait for it, and it does not wait for them.

use std::fmt;
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::device::Token;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::FileId;
use crate::pager::Priority;
use crate::store::IoBackend;
use crate::store::backend::operation::IoOp;
use crate::store::backend::own_read::OwnRead;
use crate::store::contract::Store;
use crate::store::engine::Engine;
use crate::store::file::FileUse;
use crate::store::source::caught::CaughtSource;

/// The files that are sources have this bit, and the others do not.
const SOURCE: u32 = 1 << 31;

/// A store of files, and one of sources that is started with the first of them.
pub(crate) struct WithSources {
    files: Engine,
    sources: OnceLock<Engine>,
    start: Box<dyn Fn() -> Result<Engine> + Send + Sync>,
}

impl WithSources {
    /// `start` starts the store of sources.
    pub fn new(files: Engine, start: Box<dyn Fn() -> Result<Engine> + Send + Sync>) -> Self {
        Self { files, sources: OnceLock::new(), start }
    }

    /// The store that has a file, and what the file is called there.
    fn of(&self, file: FileId) -> (&Engine, FileId) {
        match self.sources.get() {
            Some(sources) if file.get() & SOURCE != 0 => (sources, FileId::new(file.get() & !SOURCE)),
            _ => (&self.files, file),
        }
    }

    fn each(&self) -> impl Iterator<Item = &Engine> {
        std::iter::once(&self.files).chain(self.sources.get())
    }
}

impl Store for WithSources {
    fn backend(&self) -> IoBackend {
        self.files.backend()
    }

    fn add_file(&self, file: File, path: PathBuf, usage: FileUse) -> Result<FileId> {
        let id = self.files.add_file(file, path, usage)?;
        if id.get() & SOURCE != 0 {
            self.files.remove_file(id);
            return Err(
                Error::new(ErrorKind::Unsupported, "this store has taken in 2^31 files").remedy("open a new store")
            );
        }
        Ok(id)
    }

    fn spare_descriptors(&self) {
        self.files.spare_descriptors();
    }

    fn add_source(&self, source: Arc<CaughtSource>) -> Result<FileId> {
        let sources = match self.sources.get() {
            Some(sources) => sources,
            None => {
                let started = (self.start)()?;
                // Of two that were started at once, one goes again: nobody has used it.
                self.sources.get_or_init(|| started)
            }
        };
        let id = sources.add_source(source)?;
        Ok(FileId::new(id.get() | SOURCE))
    }

    fn buffered_files(&self) -> Vec<PathBuf> {
        self.files.buffered_files()
    }

    fn remove_file(&self, file: FileId) {
        let (store, file) = self.of(file);
        store.remove_file(file);
    }

    fn submit(&self, mut op: IoOp) {
        let (store, file) = self.of(op.file);
        op.file = file;
        store.submit(op);
    }

    fn begin(&self, mut op: IoOp) -> Option<OwnRead> {
        let (store, file) = self.of(op.file);
        op.file = file;
        store.begin(op)
    }

    fn raise(&self, token: Token, priority: Priority) {
        self.each().for_each(|store| store.raise(token, priority));
    }

    fn late(&self, tokens: &[Token], limit: Duration) -> Vec<Token> {
        self.each().flat_map(|store| store.late(tokens, limit)).collect()
    }

    fn retries(&self) -> u64 {
        self.each().map(Store::retries).sum()
    }

    fn ended(&self) -> u64 {
        self.each().map(Store::ended).sum()
    }

    fn outstanding(&self) -> u64 {
        self.each().map(Store::outstanding).sum()
    }

    fn close_limit(&self) -> Duration {
        self.files.close_limit()
    }

    fn close_within(&self, limit: Duration) -> Result<()> {
        let closed: Vec<_> = self.each().map(|store| (store.close_within(limit), store.outstanding())).collect();
        // Of two that fail, one that has operations says why. Threads of the other may only have had no time to end.
        let worst = closed.into_iter().rev().max_by_key(|(closed, outstanding)| (closed.is_err(), *outstanding > 0));
        worst.map_or(Ok(()), |(closed, _)| closed)
    }
}

impl fmt::Debug for WithSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("files", &self.files).field("sources", &self.sources.get()).finish()
    }
}
