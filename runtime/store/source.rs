//! Page sources: bytes of a model that do not come from a file of this machine.

use std::fmt;
use std::io;

/// Where the bytes of a model are: an object store, a decompressor, another process. The counterpart of a file, for
/// [`Runtime::open_source`](crate::Runtime::open_source). `examples/source_http` is one over HTTP.
///
/// # Contract
///
/// 1. All calls come from several threads at once. [`read_at`](Self::read_at) may block; the others return at once.
/// 2. The bytes never change as long as [`identity`](Self::identity) does not. It is asked after each read: if it is
///    another one then, the read fails with [`ModelChanged`](crate::ErrorKind::ModelChanged), and none of its bytes are used. A
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
