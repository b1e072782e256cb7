//! Page sources: bytes of a model that do not come from a file of this machine.
//!
//! A source is read by calls that block, so it has threads of its own, as many as operations may be under way. The store of
//! files does not wait for it, and it does not wait for them.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::engine::Engine;
use super::{Completions, FileUse, IoBackend, IoOp, OwnRead, Store, StoreOptions};
use crate::device::Token;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::FileId;
use crate::pager::Priority;

/// Where the bytes of a model are: an object store, a decompressor, another process. The counterpart of a file, for
/// [`Runtime::open_source`](crate::Runtime::open_source). `examples/source_http` is one over HTTP.
///
/// # Contract
///
/// 1. All calls come from several threads at once. [`read_at`](Self::read_at) may block; the others return at once.
/// 2. The bytes never change as long as [`identity`](Self::identity) does not. It is asked after each read: if it is
///    another one then, the read fails with [`ModelChanged`](ErrorKind::ModelChanged), and none of its bytes are used. A
///    source that learns of a change from the answer to a read changes its identity before `read_at` returns.
/// 3. It calls nothing of the runtime that reads it.
pub trait PageSource: Send + Sync + fmt::Debug {
    /// What messages call it, such as its URL.
    fn name(&self) -> String;

    /// How many bytes it has. Never changes.
    fn len(&self) -> u64;

    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A number that stands for its bytes: a hash of an ETag, a version.
    fn identity(&self) -> u64;

    /// Reads bytes from `offset` on into `bytes`, which ends at the source's end or before. Returns how many came: at
    /// least one. The rest is asked for again.
    ///
    /// # Errors
    /// Of any kind. Reads that fail by `EINTR`, `EAGAIN` or `EIO`, as
    /// [`from_raw_os_error`](io::Error::from_raw_os_error) makes them, are tried again a few times.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize>;
}

/// The files that are sources have this bit, and the others do not.
const SOURCE: u32 = 1 << 31;

/// A store of files, and one of sources that is started with the first of them.
pub(super) struct WithSources {
    files: Engine,
    sources: OnceLock<Engine>,
    /// How to start it.
    options: StoreOptions,
    sink: Arc<dyn Completions>,
}

impl WithSources {
    pub fn new(files: Engine, options: StoreOptions, sink: Arc<dyn Completions>) -> Self {
        Self { files, sources: OnceLock::new(), options, sink }
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

    fn add_source(&self, source: Arc<dyn PageSource>) -> Result<FileId> {
        let sources = match self.sources.get() {
            Some(sources) => sources,
            None => {
                let started = self.options.start_sources(Arc::clone(&self.sink))?;
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
        self.each().map(|store| store.close_within(limit)).fold(Ok(()), Result::and)
    }
}

impl fmt::Debug for WithSources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("files", &self.files).field("sources", &self.sources.get()).finish()
    }
}
