//! Page sources: bytes of a model that do not come from a file of this machine.

pub(crate) mod beside_files;
pub(crate) mod caught;

use std::fmt;
use std::io;

/// Where the bytes of a model are: an object store, a decompressor, another process. The counterpart of a file, for
/// [`Runtime::open_source`](crate::Runtime::open_source). `examples/source_http` is one over HTTP.
///
/// # Contract
///
/// 1. All calls come from several threads at once. [`read_at`](Self::read_at) may block. [`identity`](Self::identity)
///    may do what an `fstat` does. The others return at once.
/// 2. The bytes never change as long as [`identity`](Self::identity) does not. It is asked after each read: if it is
///    another one then, the read fails with [`ModelChanged`](crate::ErrorKind::ModelChanged), and none of its bytes are
///    used. A source that learns of a change from the answer to a read changes its identity before `read_at` returns.
///    An identity never goes back to one that it was: reads run at once, and one that got the new bytes must not find
///    the old identity again. Where several answers may be of different versions, `read_at` also fails for those of
///    another version than the one that was opened.
/// 3. It calls nothing of the runtime that reads it.
///
/// A method that fails or panics costs the reads for which it was called, also while the model is opened, and nothing
/// else: those reads end with an error, and later ones ask again.
///
/// # What is asked for
///
/// - When the model is opened, on the thread that opens it: the first 64 bytes, and then the header, in calls of any
///   size. A GGUF header is read in steps of at least 128 KiB, of which the first begins at byte 0; a safetensors
///   header from byte 64 to its end. Neither goes past the source's end.
/// - Afterwards whole pages: the offset is a multiple of the runtime's [page size](crate::PageSize), and the length is
///   the page size, or less for the page in which the source ends. One call asks for one page at most: 4 KiB to
///   1 GiB. If fewer bytes came, the next call asks for the rest of the page, from any byte on.
/// - Only pages that hold a tensor are asked for. Any of them may be asked for again, after it was evicted.
/// - 16 calls run at once by default, each on a thread of its own: up to 8 for pages that nobody waits for yet, the
///   others for pages that a request waits for. [`StoreOptions::depth`](crate::store::StoreOptions::depth) and
///   [`depth_ahead`](crate::store::StoreOptions::depth_ahead) set this, for files as well
///   ([`RuntimeBuilder::store`](crate::RuntimeBuilder::store)).
/// - The memory that a source takes for itself, such as a buffer for packed bytes, is in no budget.
#[allow(clippy::len_without_is_empty, reason = "nobody asks: a model that has no bytes is refused for its header")]
pub trait PageSource: Send + Sync + fmt::Debug {
    /// What messages call it, such as its URL. Asked once, at open.
    fn name(&self) -> String;

    /// How many bytes it has. Asked once, at open.
    fn len(&self) -> u64;

    /// A number that stands for its bytes: a hash of an ETag, a version, a time of modification. Asked at open and
    /// after each read, from several threads.
    fn identity(&self) -> u64;

    /// Reads bytes from `offset` on into `bytes`, which ends at the source's end or before. Returns how many came: at
    /// least one. The rest is asked for again. What `bytes` holds before the call has no meaning.
    ///
    /// # Errors
    /// Of any kind; 0 bytes are an error, too. A read that fails by `EIO`, as
    /// [`from_raw_os_error`](io::Error::from_raw_os_error) makes it, is tried twice more, unless it is of the header. A
    /// read that fails by `EINTR` ([`Interrupted`](io::ErrorKind::Interrupted)) is tried again, up to 10,000 times
    /// without progress. Any other error ends the read at once. So does `EAGAIN`, by which the standard library says
    /// that a socket's read took longer than its timeout.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize>;
}
