//! The functions of the C library that are replaced, but for those that open files (`open_calls.rs`) and those that set
//! what signals do (`interrupts.rs`).

use std::cell::Cell;
use std::ffi::{c_int, c_long, c_uchar, c_uint, c_void};
use std::sync::atomic::AtomicUsize;

use crate::files::LEAST_PART;
use crate::inside::{do_ours, ours};
use crate::map::{Request, map};
use crate::sys::{errno, kernel, next, page_size, set_errno};
use crate::{descriptors, fragments, opens, pool, ranges, written};

fn in_range(address: *mut c_void) -> bool {
    ranges::holds(address as u64)
}

/// The whole pages of a range that has some of a mapped file: its first address and the one behind. `None` if it has
/// none, or does not begin with a page: then all of it is the kernel's, which refuses the latter and changes nothing.
fn shared(first: u64, len: usize) -> Option<(u64, u64)> {
    let page = page_size();
    let end = (len as u64).checked_next_multiple_of(page).and_then(|len| first.checked_add(len))?;
    (first.is_multiple_of(page) && ranges::overlaps(first, end - first)).then_some((first, end))
}

/// Calls `run` with each part of a range, in turn: its first address, its length, and whether it lies in a mapped file.
/// Other mappings lie before a file, between two, and behind. The first result that is not 0 ends it.
fn divided((first, end): (u64, u64), mut run: impl FnMut(u64, u64, bool) -> c_int) -> c_int {
    let mut at = first;
    while at < end {
        let (start, behind) = ranges::first_part(at, end).unwrap_or((end, end));
        for (from, to, is_ours) in [(at, start, false), (start, behind, true)] {
            if from < to {
                let result = run(from, to - from, is_ours);
                if result != 0 {
                    return result;
                }
            }
        }
        at = behind;
    }
    0
}

/// A call on a range: the kernel's for what lies outside mapped files, and nothing for what lies in one.
fn outside(range: (u64, u64), of_kernel: impl Fn(u64, u64) -> c_int) -> c_int {
    divided(range, |from, len, is_ours| if is_ours { 0 } else { of_kernel(from, len) })
}

/// # Safety
/// That of mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    let fixed = flags & libc::MAP_FIXED != 0;
    if fixed && flags & libc::MAP_FIXED_NOREPLACE == 0 && ranges::overlaps(address as u64, len as u64) {
        do_ours(|| fragments::refuse_over(address as u64, len as u64));
        set_errno(libc::ENOMEM);
        return libc::MAP_FAILED;
    }
    // Pages of this library's are not executed.
    let wanted = fd >= 0
        && prot & libc::PROT_READ != 0
        && prot & !(libc::PROT_READ | libc::PROT_WRITE) == 0
        && !fixed
        && flags & (libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE) == 0;
    if wanted {
        let found = ours(|| {
            let offset = u64::try_from(offset).ok()?;
            let private = flags & libc::MAP_TYPE == libc::MAP_PRIVATE;
            map(&Request { fd, len: len as u64, offset, writable: prot & libc::PROT_WRITE != 0, private })
        });
        if let Some(found) = found {
            return found as *mut c_void;
        }
    }
    if fd >= 0 && flags & libc::MAP_ANONYMOUS == 0 && len as u64 >= LEAST_PART {
        opens::mapped_elsewhere(fd);
    }
    let arguments = [address as u64, len as u64, prot as u64, flags as u64, fd as i64 as u64, offset as u64];
    // SAFETY: as the caller promised.
    unsafe { kernel(libc::SYS_mmap, arguments) as *mut c_void }
}

/// # Safety
/// That of mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: as the caller promised.
    unsafe { mmap(address, len, prot, flags, fd, offset) }
}

/// # Safety
/// That of munmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(address: *mut c_void, len: usize) -> c_int {
    let first = address as u64;
    // SAFETY: as the caller promised.
    let of_kernel = |from: u64, len: u64| unsafe { kernel(libc::SYS_munmap, [from, len, 0, 0, 0, 0]) as c_int };
    if !ranges::overlaps(first, len as u64) {
        return of_kernel(first, len as u64);
    }
    let Some(range) = shared(first, len).filter(|_| len > 0) else {
        set_errno(libc::EINVAL);
        return -1;
    };
    divided(range, |from, len, is_ours| {
        if !is_ours {
            return of_kernel(from, len);
        }
        do_ours(|| fragments::unmap(from, len));
        0
    })
}

/// As madvise(2), which goes on behind addresses where nothing is mapped, and says so at the end.
///
/// # Safety
/// That of madvise(2).
unsafe fn advise(address: *mut c_void, len: usize, advice: c_int) -> c_int {
    // SAFETY: as the caller promised.
    let of_kernel =
        |from: u64, len: u64| unsafe { kernel(libc::SYS_madvise, [from, len, advice as u64, 0, 0, 0]) as c_int };
    let Some(range) = shared(address as u64, len) else { return of_kernel(address as u64, len as u64) };
    let is_missing = Cell::new(false);
    let result = outside(range, |from, len| {
        let result = of_kernel(from, len);
        let is_hole = result != 0 && errno() == libc::ENOMEM;
        is_missing.set(is_missing.get() || is_hole);
        if is_hole { 0 } else { result }
    });
    if result == 0 && is_missing.get() {
        set_errno(libc::ENOMEM);
        return -1;
    }
    result
}

/// # Safety
/// That of madvise(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int {
    // SAFETY: as the caller promised.
    unsafe { advise(address, len, advice) }
}

/// # Safety
/// That of posix_madvise(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int {
    // POSIX_MADV_DONTNEED loses nothing, unlike MADV_DONTNEED, so the C library ignores it too.
    if advice == libc::POSIX_MADV_DONTNEED {
        return 0;
    }
    // SAFETY: as the caller promised.
    returned(|| unsafe { advise(address, len, advice) }.into())
}

/// The error of a call that returns it, and leaves errno alone.
fn returned(call: impl FnOnce() -> c_long) -> c_int {
    let before = errno();
    let error = if call() == 0 { 0 } else { errno() };
    set_errno(before);
    error
}

/// The whole pages that have any of these addresses, if some are a mapped file's. `mlock` and its kin take any address.
fn shared_by_any(address: *const c_void, len: usize) -> Option<(u64, u64)> {
    let inside = address as u64 % page_size();
    shared(address as u64 - inside, len.checked_add(inside as usize)?)
}

/// # Safety
/// That of mlock(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(address: *const c_void, len: usize) -> c_int {
    // SAFETY: as the caller promised.
    let of_kernel = |from: u64, len: u64| unsafe { kernel(libc::SYS_mlock, [from, len, 0, 0, 0, 0]) as c_int };
    match shared_by_any(address, len) {
        Some(range) => outside(range, of_kernel),
        None => of_kernel(address as u64, len as u64),
    }
}

/// # Safety
/// That of mlock2(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(address: *const c_void, len: usize, flags: c_uint) -> c_int {
    // SAFETY: as the caller promised.
    let of_kernel =
        |from: u64, len: u64| unsafe { kernel(libc::SYS_mlock2, [from, len, flags.into(), 0, 0, 0]) as c_int };
    match shared_by_any(address, len) {
        Some(range) => outside(range, of_kernel),
        None => of_kernel(address as u64, len as u64),
    }
}

/// # Safety
/// That of mlockall(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    // It would bring in all pages of the files, and wait for ever where they are more than the frames.
    if flags & libc::MCL_CURRENT != 0 && ranges::holds_any() {
        do_ours(fragments::refuse_lock);
        set_errno(libc::ENOMEM);
        return -1;
    }
    // SAFETY: as the caller promised.
    unsafe { kernel(libc::SYS_mlockall, [flags as u64, 0, 0, 0, 0, 0]) as c_int }
}

/// # Safety
/// That of munlock(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munlock(address: *const c_void, len: usize) -> c_int {
    // SAFETY: as the caller promised.
    let of_kernel = |from: u64, len: u64| unsafe { kernel(libc::SYS_munlock, [from, len, 0, 0, 0, 0]) as c_int };
    match shared_by_any(address, len) {
        Some(range) => outside(range, of_kernel),
        None => of_kernel(address as u64, len as u64),
    }
}

/// # Safety
/// That of mprotect(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(address: *mut c_void, len: usize, prot: c_int) -> c_int {
    // SAFETY: as the caller promised.
    let of_kernel =
        |from: u64, len: u64| unsafe { kernel(libc::SYS_mprotect, [from, len, prot as u64, 0, 0, 0]) as c_int };
    let Some(range) = shared(address as u64, len) else { return of_kernel(address as u64, len as u64) };
    divided(range, |from, len, is_ours| {
        if !is_ours {
            return of_kernel(from, len);
        }
        // Pages stay readable, and writable where they were mapped so. Whoever asks for less gets that; a mapping that
        // was read-only stays so, and none can be executed.
        if prot & libc::PROT_EXEC == 0 && (prot & libc::PROT_WRITE == 0 || ranges::is_private(from)) {
            return 0;
        }
        set_errno(libc::EACCES);
        -1
    })
}

/// # Safety
/// That of mincore(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mincore(address: *mut c_void, len: usize, vector: *mut c_uchar) -> c_int {
    // SAFETY: as the caller promised.
    let of_kernel = |from: u64, len: u64, to: *mut c_uchar| unsafe {
        kernel(libc::SYS_mincore, [from, len, to as u64, 0, 0, 0]) as c_int
    };
    let Some(range) = shared(address as u64, len) else { return of_kernel(address as u64, len as u64, vector) };
    divided(range, |from, len, is_ours| {
        let page = page_size();
        // SAFETY: the caller's vector has a byte for each page of the range.
        let to = unsafe { vector.add(((from - range.0) / page) as usize) };
        if !is_ours {
            return of_kernel(from, len, to);
        }
        // Programs that ask touch what is not there, or read the file instead: then all of it would come at once.
        // SAFETY: as above.
        unsafe { to.write_bytes(1, (len / page) as usize) };
        0
    })
}

/// The C library's has the last argument only with `MREMAP_FIXED`. On the processors that Rust calls `x86_64` and
/// `aarch64`, a variable argument is where a fifth one is, and it is looked at with that flag only.
///
/// # Safety
/// That of mremap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    wanted: *mut c_void,
) -> *mut c_void {
    let fixed = flags & libc::MREMAP_FIXED != 0;
    let wanted = if fixed { wanted as u64 } else { 0 };
    if in_range(old) {
        let moved = ours(|| Some(fragments::remap(old as u64, old_len as u64, new_len as u64, flags, wanted)));
        match moved.unwrap_or(Err(libc::ENOMEM)) {
            Ok(address) => return address as *mut c_void,
            Err(number) => {
                set_errno(number);
                return libc::MAP_FAILED;
            }
        }
    }
    // A range that begins below a mapped file is not one mapping: it can be cut off only.
    if let Some((first, end)) = shared(old as u64, old_len) {
        let kept = (new_len as u64).checked_next_multiple_of(page_size()).unwrap_or(u64::MAX);
        if flags & !libc::MREMAP_MAYMOVE == 0 && kept > 0 && kept <= end - first {
            // SAFETY: as the caller promised.
            let cut = kept == end - first
                || unsafe { munmap(old.byte_add(kept as usize), (end - first - kept) as usize) } == 0;
            return if cut { old } else { libc::MAP_FAILED };
        }
        set_errno(libc::EFAULT);
        return libc::MAP_FAILED;
    }
    if fixed && ranges::overlaps(wanted, new_len as u64) {
        do_ours(|| fragments::refuse_over(wanted, new_len as u64));
        set_errno(libc::ENOMEM);
        return libc::MAP_FAILED;
    }
    let arguments = [old as u64, old_len as u64, new_len as u64, flags as u64, wanted, 0];
    // SAFETY: as the caller promised.
    unsafe { kernel(libc::SYS_mremap, arguments) as *mut c_void }
}

/// # Safety
/// That of posix_fadvise(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_fadvise(fd: c_int, offset: i64, len: i64, advice: c_int) -> c_int {
    returned(|| {
        // To fill the page cache with a file that is mapped here would take the memory twice.
        if advice == libc::POSIX_FADV_WILLNEED && ours(|| Some(pool::is_mapped(fd))) == Some(true) {
            return 0;
        }
        let arguments = [fd as i64 as u64, offset as u64, len as u64, advice as u64, 0, 0];
        // SAFETY: as the caller promised.
        unsafe { kernel(libc::SYS_fadvise64, arguments) }
    })
}

/// # Safety
/// That of posix_fadvise(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_fadvise64(fd: c_int, offset: i64, len: i64, advice: c_int) -> c_int {
    // SAFETY: as the caller promised.
    unsafe { posix_fadvise(fd, offset, len, advice) }
}

/// # Safety
/// That of readahead(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readahead(fd: c_int, offset: i64, count: usize) -> isize {
    if ours(|| Some(pool::is_mapped(fd))) == Some(true) {
        return 0;
    }
    // SAFETY: as the caller promised.
    unsafe { kernel(libc::SYS_readahead, [fd as i64 as u64, offset as u64, count as u64, 0, 0, 0]) as isize }
}

/// # Safety
/// That of close(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    // SAFETY: as the caller promised.
    let of_kernel = || unsafe { kernel(libc::SYS_close, [fd as i64 as u64, 0, 0, 0, 0, 0]) as c_int };
    descriptors::closing(fd, libc::EBADF, of_kernel)
}

/// # Safety
/// That of close_range(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // SAFETY: as the caller promised.
    let of_kernel = |first: c_uint, last: c_uint| unsafe {
        kernel(libc::SYS_close_range, [first.into(), last.into(), flags as i64 as u64, 0, 0, 0]) as c_int
    };
    // `CLOSE_RANGE_CLOEXEC` closes nothing now.
    if first > last || flags as c_uint & libc::CLOSE_RANGE_CLOEXEC != 0 {
        return of_kernel(first, last);
    }
    descriptors::closing_range(first, last, of_kernel)
}

/// # Safety
/// That of closefrom(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn closefrom(first: c_int) {
    // SAFETY: as the caller promised.
    unsafe { close_range(first.max(0) as c_uint, c_uint::MAX, 0) };
}

/// # Safety
/// That of dup2(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    if old == new {
        // SAFETY: a plain question: is it open?
        return if unsafe { libc::fcntl(old, libc::F_GETFD) } < 0 { -1 } else { new };
    }
    // SAFETY: as the caller promised.
    unsafe { dup3(old, new, 0) }
}

/// # Safety
/// That of dup3(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    let arguments = [old as i64 as u64, new as i64 as u64, flags as i64 as u64, 0, 0, 0];
    // SAFETY: as the caller promised.
    let of_kernel = || unsafe { kernel(libc::SYS_dup3, arguments) as c_int };
    // The refusal is what the kernel says where another thread has just got this descriptor.
    descriptors::closing(new, libc::EBUSY, of_kernel)
}

/// # Safety
/// That of write(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, from: *const c_void, len: usize) -> isize {
    if written::is_mapped(from, len) {
        // SAFETY: as the caller promised.
        return unsafe {
            match written::keeps_messages(fd) {
                true => write_gathered(fd, &[libc::iovec { iov_base: from.cast_mut(), iov_len: len }]),
                false => written::write(fd, from, len, None),
            }
        };
    }
    // SAFETY: as the caller promised.
    unsafe { kernel(libc::SYS_write, [fd as i64 as u64, from as u64, len as u64, 0, 0, 0]) as isize }
}

/// # Safety
/// That of pwrite(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwrite(fd: c_int, from: *const c_void, len: usize, offset: i64) -> isize {
    if written::is_mapped(from, len) {
        // SAFETY: as the caller promised.
        return unsafe { written::write(fd, from, len, Some(offset)) };
    }
    let arguments = [fd as i64 as u64, from as u64, len as u64, offset as u64, 0, 0];
    // SAFETY: as the caller promised.
    unsafe { kernel(libc::SYS_pwrite64, arguments) as isize }
}

/// # Safety
/// That of pwrite(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwrite64(fd: c_int, from: *const c_void, len: usize, offset: i64) -> isize {
    // SAFETY: as the caller promised.
    unsafe { pwrite(fd, from, len, offset) }
}

/// # Safety
/// That of writev(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, parts: *const libc::iovec, count: c_int) -> isize {
    // SAFETY: as the caller promised.
    let of_file = ranges::holds_any() && unsafe { has_mapped(parts, count as usize) };
    if !of_file {
        // SAFETY: as the caller promised.
        return unsafe {
            kernel(libc::SYS_writev, [fd as i64 as u64, parts as u64, count as i64 as u64, 0, 0, 0]) as isize
        };
    }
    // SAFETY: as the caller promised.
    let parts = unsafe { std::slice::from_raw_parts(parts, count as usize) };
    if written::keeps_messages(fd) {
        // SAFETY: as the caller promised.
        return unsafe { write_gathered(fd, parts) };
    }
    let mut done = 0;
    for part in parts {
        // SAFETY: as the caller promised.
        let now = unsafe { write(fd, part.iov_base, part.iov_len) };
        if now < 0 {
            return if done > 0 { done } else { now };
        }
        done += now;
        if (now as usize) < part.iov_len {
            break;
        }
    }
    done
}

/// A message, all at once.
///
/// # Safety
/// All parts are there.
unsafe fn write_gathered(fd: c_int, parts: &[libc::iovec]) -> isize {
    // SAFETY: as the caller promised.
    let Some(copy) = (unsafe { written::gathered(fd, parts) }) else {
        set_errno(libc::ENOMEM);
        return -1;
    };
    // SAFETY: bytes that are there.
    unsafe { kernel(libc::SYS_write, [fd as i64 as u64, copy.as_ptr() as u64, copy.len() as u64, 0, 0, 0]) as isize }
}

/// Whether one of the parts lies in a mapped file. More than the kernel takes are its to refuse.
///
/// # Safety
/// There are `count` parts.
unsafe fn has_mapped(parts: *const libc::iovec, count: usize) -> bool {
    if parts.is_null() || count > libc::UIO_MAXIOV as usize {
        return false;
    }
    // SAFETY: as the caller promised.
    let parts = unsafe { std::slice::from_raw_parts(parts, count) };
    parts.iter().any(|part| written::is_mapped(part.iov_base, part.iov_len))
}

/// # Safety
/// That of send(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(fd: c_int, from: *const c_void, len: usize, flags: c_int) -> isize {
    // SAFETY: as the caller promised.
    unsafe { sendto(fd, from, len, flags, std::ptr::null(), 0) }
}

/// With `MSG_ZEROCOPY` the kernel would read a copy when the call is over, and the copy gone.
fn of_copies(flags: c_int) -> c_int {
    flags & !libc::MSG_ZEROCOPY
}

/// # Safety
/// That of sendto(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendto(
    fd: c_int,
    from: *const c_void,
    len: usize,
    flags: c_int,
    to: *const libc::sockaddr,
    to_len: libc::socklen_t,
) -> isize {
    let part = libc::iovec { iov_base: from.cast_mut(), iov_len: len };
    // SAFETY: as the caller promised.
    let copy = written::is_mapped(from, len).then(|| unsafe { written::gathered(fd, &[part]) });
    let (from, len, flags) = match &copy {
        None => (from.cast::<u8>(), len, flags),
        Some(Some(copy)) => (copy.as_ptr(), copy.len(), of_copies(flags)),
        Some(None) => {
            set_errno(libc::ENOMEM);
            return -1;
        }
    };
    let arguments = [fd as i64 as u64, from as u64, len as u64, flags as i64 as u64, to as u64, to_len.into()];
    // SAFETY: as the caller promised; a copy lives until the call is over.
    unsafe { kernel(libc::SYS_sendto, arguments) as isize }
}

/// # Safety
/// That of sendmsg(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const libc::msghdr, flags: c_int) -> isize {
    // SAFETY: as the caller promised.
    let send = |message: *const libc::msghdr, flags: c_int| unsafe {
        kernel(libc::SYS_sendmsg, [fd as i64 as u64, message as u64, flags as i64 as u64, 0, 0, 0]) as isize
    };
    if !ranges::holds_any() || message.is_null() {
        return send(message, flags);
    }
    // SAFETY: as the caller promised.
    let mut copied = unsafe { *message };
    // SAFETY: as the caller promised.
    if !unsafe { has_mapped(copied.msg_iov, copied.msg_iovlen) } {
        return send(message, flags);
    }
    // SAFETY: as the caller promised.
    let bytes = unsafe { written::gathered(fd, std::slice::from_raw_parts(copied.msg_iov, copied.msg_iovlen)) };
    let Some(mut bytes) = bytes else {
        set_errno(libc::ENOMEM);
        return -1;
    };
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    (copied.msg_iov, copied.msg_iovlen) = (&raw mut part, 1);
    send(&raw const copied, of_copies(flags))
}

/// The C library writes large pieces from where they are, by a call of its own.
///
/// # Safety
/// That of fwrite(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fwrite(from: *const c_void, size: usize, count: usize, to: *mut libc::FILE) -> usize {
    type Write = unsafe extern "C" fn(*const c_void, usize, usize, *mut libc::FILE) -> usize;
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let next = next(c"fwrite", &NEXT);
    if next == 0 {
        set_errno(libc::ENOSYS);
        return 0;
    }
    // SAFETY: the C library's function of this name, which has this signature.
    let write = unsafe { std::mem::transmute::<usize, Write>(next) };
    let Some(len) = size.checked_mul(count).filter(|len| *len > 0 && written::is_mapped(from, *len)) else {
        // SAFETY: as the caller promised.
        return unsafe { write(from, size, count, to) };
    };
    // SAFETY: as the caller promised.
    let done =
        unsafe { written::in_pieces(from, len, |bytes, _| write(bytes.as_ptr().cast(), 1, bytes.len(), to) as isize) };
    done as usize / size
}
