//! What a store does, for those who give it operations.

use std::fmt;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::device::Token;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::FileId;
use crate::pager::Priority;
use crate::store::IoBackend;
use crate::store::backend::operation::IoOp;
use crate::store::backend::own_read::OwnRead;
use crate::store::file::FileUse;
use crate::store::source::caught::CaughtSource;

/// Reads and writes pages of files. There is one, in `engine.rs`, over three backends.
///
/// # Contract (every store passes `tests/store/suite.rs`)
///
/// 1. `submit` never blocks on the disk and never runs the completion on the caller's stack. `begin` may hand a demand
///    read back to its caller instead: `OwnRead::run` does both.
/// 2. Every submitted operation completes exactly once, through [`Completions`](crate::device::Completions), with
///    success only if all `valid` bytes were transferred. A short transfer is continued from where it stopped; end of
///    file before `valid` bytes is an [`Io`](crate::ErrorKind::Io) error that says how many came.
/// 3. The buffer is borrowed from `submit` until completion. No cancel gives it back earlier.
/// 4. Operations waiting in the store start in priority order, oldest first within a priority. An operation that the
///    kernel has is not taken back. `raise` moves a waiting operation up.
/// 5. A model file's identity (device, inode, size, mtime) is compared with the one at open after a read of it has
///    ended and before its completion is reported. A difference is [`ModelChanged`](crate::ErrorKind::ModelChanged),
///    whatever was read. Reads of one file that end together share one comparison, after the last of them.
/// 6. EINTR is repeated; of a file, EAGAIN too. A read that failed with EIO is tried again twice.
///    [`retries`](Store::retries) counts these tries of reads, except those after EINTR. EFAULT of the kernel is
///    reported as [`Internal`](crate::ErrorKind::Internal).
/// 7. `close` completes everything submitted, then joins its threads. Later submissions complete with
///    [`Closed`](crate::ErrorKind::Closed). If no operation ends within the limit, `close` fails and says how many
///    operations are outstanding. Those may never complete, and their memory must stay. Operations that were never
///    started complete with `Closed`.
pub trait Store: Send + Sync + fmt::Debug {
    /// The backend in use (never `Auto`).
    fn backend(&self) -> IoBackend;
    /// Adds a file to the store. `path` is for messages.
    fn add_file(&self, file: File, path: PathBuf, usage: FileUse) -> Result<FileId>;
    /// Closes half of the files that it can open again, for whoever finds no descriptor left in the process.
    fn spare_descriptors(&self) {}
    /// Takes a source of pages into the store, to be read like a model's file.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) for a store that reads files only, and where the system starts no
    /// thread.
    fn add_source(&self, source: Arc<CaughtSource>) -> Result<FileId> {
        Err(Error::new(ErrorKind::Unsupported, format!("this store reads no sources such as {}", source.name()))
            .remedy("open it with StoreOptions"))
    }
    /// The files that go through the page cache although direct I/O was preferred, in the order they were added.
    fn buffered_files(&self) -> Vec<PathBuf> {
        Vec::new()
    }
    /// Forgets a file. Operations submitted before still complete: they keep the file open.
    fn remove_file(&self, file: FileId);
    /// Queues an operation.
    fn submit(&self, op: IoOp);
    /// Starts an operation that the caller will wait for on this thread. A demand read may be returned, for the caller
    /// to carry out; any other operation is queued.
    fn begin(&self, op: IoOp) -> Option<OwnRead> {
        self.submit(op);
        None
    }
    /// Makes a waiting operation at least this urgent.
    fn raise(&self, token: Token, priority: Priority);
    /// Which of these operations are stuck: the system has had them for `limit`, or they wait and the system was given
    /// nothing for `limit`. An operation that waits behind others that make progress is slow, not late.
    fn late(&self, tokens: &[Token], limit: Duration) -> Vec<Token>;
    /// How often reads were tried again (contract rule 6).
    fn retries(&self) -> u64;
    /// How many operations have ended, with or without success.
    fn ended(&self) -> u64;
    /// How many operations were submitted and have not ended.
    fn outstanding(&self) -> u64;
    /// The limit of [`close`](Self::close).
    fn close_limit(&self) -> Duration;
    /// Closes the store (contract rule 7) with the limit it was opened with. Dropping a store waits as long, but only
    /// logs a failure: before freeing memory of operations, see them complete or `close` succeed.
    fn close(&self) -> Result<()> {
        self.close_within(self.close_limit())
    }
    /// Closes the store (contract rule 7).
    ///
    /// # Errors
    /// [`Io`](ErrorKind::Io) if no operation ended for `limit`; [`InvalidArgument`](ErrorKind::InvalidArgument) on a
    /// thread that reports completions.
    fn close_within(&self, limit: Duration) -> Result<()>;
}
