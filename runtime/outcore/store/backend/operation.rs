//! One operation from submission to completion: what to ask the kernel next, and what its answer means.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::sync::Arc;

use crate::device::{HostPointer, Token};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::FileId;
use crate::pager::Priority;
use crate::store::file::OpenFile;
use crate::store::source::caught::SEE_THE_SOURCE;
use crate::store::{IO_ALIGNMENT, MAX_REPEATS};

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoKind {
    /// File to memory.
    Read,
    /// Memory to file.
    Write,
}

/// One read or write.
#[derive(Debug)]
pub struct IoOp {
    /// Names the operation in its completion.
    pub token: Token,
    /// Read or write.
    pub kind: IoKind,
    /// The file.
    pub file: FileId,
    /// First byte in the file; a multiple of 4096.
    pub offset: u64,
    /// The memory; aligned to 4096.
    pub buffer: HostPointer,
    /// Bytes at `buffer`; a multiple of 4096.
    pub len: u32,
    /// Bytes that must be transferred, at most `len`. Smaller than `len` only for a file's last page.
    pub valid: u32,
    /// Urgency.
    pub priority: Priority,
}

/// How often a read is tried again after EIO. A drive that was reset answers the next try; a drive that dies does not.
const MAX_RETRIES: u32 = 2;

/// One call into the kernel on behalf of an operation.
#[derive(Clone, Copy, Debug)]
pub struct IoCall {
    /// The operation.
    pub token: Token,
    /// Read or write.
    pub kind: IoKind,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes asked for.
    pub len: u32,
}

/// What a call does with room of the scratch file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoomKind {
    /// From the file system to the file.
    Take,
    /// Back to the file system.
    GiveBack,
    /// It holds zeros from then on.
    Wipe,
}

/// One call into the kernel for room of the scratch file: a slice of one tensor's room.
#[derive(Clone, Copy, Debug)]
pub struct RoomCall {
    /// What is done with it.
    pub kind: RoomKind,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// What a call does with the files of a durable folder, beside reading and writing pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FolderCall {
    /// Takes room for pages or for the manifest.
    TakeRoom,
    /// Writes a block of the manifest.
    Write,
    /// Syncs the pages.
    SyncPages,
    /// Syncs the manifest.
    SyncManifest,
    /// Gives the manifest its name.
    Name,
    /// Makes that name durable.
    SyncFolder,
    /// Writes to a file of exported tensors, syncs it, gives it its name, or makes that durable.
    Export,
}

/// A [`CallHook`]'s answer to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Injected {
    /// The call goes to the kernel.
    Nothing,
    /// The call fails with this `errno` and never reaches the kernel.
    Errno(i32),
    /// The call goes to the kernel; at most this many of the bytes it transfers are reported.
    Short(u32),
}

/// Sees every call before the kernel does, and can make it fail. For tests. The hook runs on the store's own threads
/// and, unless it [may block](Self::may_block), on those of callers that carry out their reads. While it blocks, its
/// thread serves nothing else.
pub trait CallHook: Send + Sync {
    /// Called just before `call`.
    fn before(&self, call: &IoCall) -> Injected;

    /// Called just before a slice of the scratch file's room is taken, given back or wiped, on the thread that
    /// allocates a tensor, drops its last handle or has it wiped. A hook that waits here may hold up other allocations,
    /// and writes of the pages that are being wiped, but no read and no other write. [`Injected::Short`] has no effect
    /// here.
    fn before_room(&self, _call: &RoomCall) -> Injected {
        Injected::Nothing
    }

    /// Called just before a call for a durable folder, on the thread that opens it, adds tensors, commits or exports.
    /// [`Injected::Short`] has no effect here.
    fn before_folder(&self, _call: FolderCall) -> Injected {
        Injected::Nothing
    }

    /// Called just before a model file that was closed, because many are in use, is opened again, on the thread that
    /// opens it. While the hook waits here, reads of files that are open go on.
    fn before_open(&self, _path: &Path) {}

    /// Whether the hook may block for long, as it does to play a drive that does not answer. If so, it runs on the
    /// store's threads alone: callers that wait for pages do not carry out reads themselves, because they could not
    /// leave them.
    fn may_block(&self) -> bool {
        true
    }
}

/// An operation the store has accepted.
pub(crate) struct Active {
    pub op: IoOp,
    pub file: Arc<OpenFile>,
    /// The file's descriptor, from the operation's begin on; none of a source.
    handle: Option<Arc<File>>,
    /// Bytes transferred so far, counted from `op.offset`.
    done: u32,
    /// EINTR and EAGAIN answers since the last progress.
    repeats: u32,
    /// How often it was tried again after EIO.
    failed: u32,
    /// How often a read was tried again after EIO or EAGAIN.
    pub retries: u32,
    /// Most bytes to believe of the next answer, from an injected short transfer.
    believe: u32,
}

/// What remains of an operation, as one call.
pub(crate) struct Remainder {
    pub offset: u64,
    pub buffer: HostPointer,
    pub len: u32,
}

impl Active {
    /// An operation that has been [checked](Self::check).
    pub fn new(op: IoOp, file: Arc<OpenFile>) -> Self {
        Self { op, file, handle: None, done: 0, repeats: 0, failed: 0, retries: 0, believe: u32::MAX }
    }

    /// Takes hold of the file, which may have been closed and is then opened again. To be called before the first call
    /// of the operation.
    ///
    /// # Errors
    /// Those of [`OpenFile::handle`].
    pub fn open(&mut self, hook: Option<&dyn CallHook>) -> Result<()> {
        if !self.take_hold() {
            if let Some(hook) = hook {
                hook.before_open(self.file.path());
            }
            self.handle = self.file.handle()?;
        }
        Ok(())
    }

    /// Takes hold of the file if it is open. False if it must be [opened](Self::open) again.
    pub fn take_hold(&mut self) -> bool {
        if !self.has_hold() {
            self.handle = self.file.handle_now();
        }
        self.has_hold()
    }

    /// Whether it has hold of what it reads or writes: of a file by its descriptor, of a source always.
    pub fn has_hold(&self) -> bool {
        self.handle.is_some() || self.file.source().is_some()
    }

    /// The file's descriptor; of a source, or before it was [opened](Self::open), one that no call accepts.
    pub fn fd(&self) -> RawFd {
        self.handle.as_ref().map_or(-1, |file| file.as_raw_fd())
    }

    /// What the end of a call leaves to do: see [`OpenFile::drop_cache`].
    pub fn drop_cache(&self) {
        self.file.drop_cache(self.handle.as_deref(), self.op.offset, self.op.len);
    }

    /// Fails if the file has changed: see [`OpenFile::check_identity`].
    pub fn check_identity(&self) -> Result<()> {
        self.file.check_identity(self.handle.as_deref())
    }

    /// Checks what can be checked without the disk.
    pub fn check(op: &IoOp, file: &OpenFile) -> Result<()> {
        let path = file.path().display();
        let refuse = |why: String, remedy: &str| {
            let what = format!("{} {} bytes at offset {} of {path}: {why}", Verb(op.kind), op.len, op.offset);
            Err(Error::new(ErrorKind::InvalidArgument, what).remedy(remedy))
        };
        let address = op.buffer.as_ptr().addr() as u64;
        if !(op.offset | u64::from(op.len) | address).is_multiple_of(IO_ALIGNMENT) {
            return refuse(
                format!("offset, length and buffer must be multiples of {IO_ALIGNMENT}"),
                "align the operation",
            );
        }
        if op.len == 0 || op.valid == 0 || op.valid > op.len {
            return refuse(
                format!("{} valid bytes do not fit the length", op.valid),
                "ask for at least 1 and at most as many valid bytes as the buffer holds",
            );
        }
        if op.offset.checked_add(u64::from(op.len)).is_none_or(|end| end > i64::MAX as u64) {
            return refuse("the range ends past the largest file offset".into(), "stay below 2^63 bytes");
        }
        if op.kind == IoKind::Write && !file.is_writable() {
            return refuse("the file was opened to be read only".into(), "write to the scratch file");
        }
        Ok(())
    }

    /// Asks the hook about the next call. `Some` is an answer that takes the kernel's place.
    pub fn consult(&mut self, hook: Option<&dyn CallHook>) -> Option<i32> {
        let hook = hook?;
        let rest = self.remainder();
        let call = IoCall { token: self.op.token, kind: self.op.kind, offset: rest.offset, len: rest.len };
        match hook.before(&call) {
            Injected::Nothing => None,
            Injected::Errno(errno) => Some(-errno),
            Injected::Short(len) => {
                self.believe = len;
                None
            }
        }
    }

    /// The next call. It starts where the last one stopped, rounded down to the alignment of direct I/O: a few bytes
    /// are transferred twice.
    pub fn remainder(&self) -> Remainder {
        let skip = self.restart();
        // SAFETY: `skip` is at most `op.len`, and whoever submitted the operation vouched for that many bytes.
        let buffer = unsafe { self.op.buffer.0.add(skip as usize) };
        Remainder { offset: self.op.offset + u64::from(skip), buffer: HostPointer(buffer), len: self.op.len - skip }
    }

    fn restart(&self) -> u32 {
        if self.file.is_direct() { self.done - self.done % IO_ALIGNMENT as u32 } else { self.done }
    }

    /// Takes the answer to a call: a byte count, or a negated `errno`. `None` means that another call is needed.
    pub fn advance(&mut self, answer: i32) -> Option<Result<()>> {
        let believe = std::mem::replace(&mut self.believe, u32::MAX);
        if answer < 0 {
            let errno = -answer;
            let reads = self.op.kind == IoKind::Read;
            if matches!(errno, libc::EINTR | libc::EAGAIN) && self.repeats < MAX_REPEATS {
                self.repeats += 1;
                self.retries += u32::from(reads && errno == libc::EAGAIN);
                return None;
            }
            if errno == libc::EIO && reads && self.failed < MAX_RETRIES {
                self.failed += 1;
                self.retries += 1;
                return None;
            }
            return Some(Err(self.failure(errno)));
        }
        let reached = self.restart().saturating_add((answer as u32).min(believe));
        let progress = reached > self.done;
        self.done = self.done.max(reached);
        let target = match self.op.kind {
            IoKind::Read => self.op.valid,
            IoKind::Write => self.op.len,
        };
        if self.done >= target {
            Some(Ok(()))
        } else if progress {
            self.repeats = 0;
            None
        } else {
            Some(Err(self.ended_early(target)))
        }
    }

    fn describe(&self) -> String {
        format!("{} {} bytes at offset {} of {}", Verb(self.op.kind), self.op.valid, self.op.offset, self.path())
    }

    fn path(&self) -> std::path::Display<'_> {
        self.file.path().display()
    }

    fn failure(&self, errno: i32) -> Error {
        let cause = io::Error::from_raw_os_error(errno);
        if errno == libc::EFAULT {
            return Error::new(ErrorKind::Internal, format!("{}: the buffer is not mapped", self.describe()))
                .remedy("report this as a bug")
                .caused_by(cause);
        }
        let error = Error::io(format!("{} ({} bytes came)", self.describe(), self.done), cause);
        match errno {
            _ if self.file.source().is_some() => error.remedy(SEE_THE_SOURCE),
            libc::EIO => error.remedy("check the disk: the kernel log says more"),
            libc::ENOSPC | libc::EDQUOT => error.remedy("free space, or put the scratch file on another disk"),
            _ => error,
        }
    }

    fn ended_early(&self, target: u32) -> Error {
        if let Some(source) = self.file.source() {
            return source.nothing_came(self.op.offset + u64::from(self.done)).context(self.describe());
        }
        let what = format!("{}: only {} of {target} bytes came", self.describe(), self.done);
        match self.op.kind {
            IoKind::Read => Error::new(ErrorKind::Io, format!("{what}: end of file"))
                .remedy("the file is shorter than its header says: check that it was copied whole"),
            IoKind::Write => Error::new(ErrorKind::Io, format!("{what}: the disk takes no more"))
                .remedy("check the file-size limit (ulimit -f) and the space of the file system"),
        }
    }
}

impl fmt::Debug for Active {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Active").field("op", &self.op).field("done", &self.done).finish_non_exhaustive()
    }
}

struct Verb(IoKind);

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            IoKind::Read => "read",
            IoKind::Write => "write",
        })
    }
}
