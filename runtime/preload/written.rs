//! System calls that read memory of the program, given an address in a mapped file.
//!
//! Where the kernel may not wait for this process's pages, it answers `EFAULT` for those that are not there. So the
//! bytes are copied first, which brings the pages, and the call gets the copy.

use std::ffi::{c_int, c_void};

use crate::ranges;
use crate::sys::kernel;

/// Bytes that are copied at a time. The copy lies on the stack: a call may come from where nothing can be allocated.
const PIECE: usize = 16 << 10;
/// The most bytes of one message on a stream, which may be sent in part.
const MESSAGE: usize = 1 << 20;

/// As for files that were opened with `O_DIRECT`.
#[repr(align(4096))]
struct Piece([u8; PIECE]);

/// Whether the kernel would meet pages there that it may not wait for.
pub fn is_mapped(address: *const c_void, len: usize) -> bool {
    ranges::overlaps(address as u64, len as u64) && !ranges::kernel_waits()
}

/// As `write`, whose system call is `call`, with the bytes and the place of the first of them among all.
///
/// # Safety
/// There are `len` bytes at `from`.
pub unsafe fn in_pieces(from: *const c_void, len: usize, mut call: impl FnMut(&[u8], usize) -> isize) -> isize {
    let (mut piece, mut done) = (Piece([0; PIECE]), 0);
    while done < len {
        let count = PIECE.min(len - done);
        // SAFETY: within the caller's bytes. A page that is not there comes; the copy overlaps nothing.
        unsafe { from.cast::<u8>().add(done).copy_to_nonoverlapping(piece.0.as_mut_ptr(), count) };
        let written = call(&piece.0[..count], done);
        match usize::try_from(written) {
            Ok(written) => {
                done += written;
                if written < count {
                    break;
                }
            }
            // What was written counts; the error comes again.
            Err(_) if done > 0 => break,
            Err(_) => return written,
        }
    }
    done as isize
}

/// A message in one piece, as datagrams need it; of a stream at most [`MESSAGE`] bytes. `None` without memory.
///
/// # Safety
/// All parts are there.
pub unsafe fn gathered(fd: c_int, parts: &[libc::iovec]) -> Option<Vec<u8>> {
    let all = parts.iter().fold(0usize, |sum, part| sum.saturating_add(part.iov_len));
    let most = if is_stream(fd) { all.min(MESSAGE) } else { all };
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(most).ok()?;
    for part in parts {
        let count = part.iov_len.min(most - bytes.len());
        if count > 0 {
            // SAFETY: as the caller promised.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(part.iov_base.cast::<u8>(), count) });
        }
    }
    Some(bytes)
}

/// The kind of a socket; `None` of everything else.
fn kind(fd: c_int) -> Option<c_int> {
    let (mut kind, mut len) = (0 as c_int, size_of::<c_int>() as libc::socklen_t);
    let to = (&raw mut kind).cast::<c_void>();
    // SAFETY: a place for the answer, of that size.
    let found = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_TYPE, to, &raw mut len) };
    (found == 0).then_some(kind)
}

fn is_stream(fd: c_int) -> bool {
    kind(fd) == Some(libc::SOCK_STREAM)
}

/// Whether each write is a message of its own, which must not come in parts.
pub fn keeps_messages(fd: c_int) -> bool {
    kind(fd).is_some_and(|kind| kind != libc::SOCK_STREAM)
}

/// `write`, or `pwrite` at an offset.
///
/// # Safety
/// That of the call.
pub unsafe fn write(fd: c_int, from: *const c_void, len: usize, offset: Option<i64>) -> isize {
    let call = |bytes: &[u8], done: usize| {
        let (fd, at, count) = (fd as i64 as u64, bytes.as_ptr() as u64, bytes.len() as u64);
        // SAFETY: bytes that are there.
        unsafe {
            match offset {
                None => kernel(libc::SYS_write, [fd, at, count, 0, 0, 0]) as isize,
                Some(offset) => {
                    let offset = (offset as u64).wrapping_add(done as u64);
                    kernel(libc::SYS_pwrite64, [fd, at, count, offset, 0, 0]) as isize
                }
            }
        }
    };
    // SAFETY: as the caller promised.
    unsafe { in_pieces(from, len, call) }
}
