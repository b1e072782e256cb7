//! What the program does with parts of a mapping: it gives them back, moves them, and maps over them.

use std::ffi::c_int;
use std::sync::Once;

use crate::sys::{kernel, page_size, say};
use crate::{pool, ranges};

/// The program has given this part of a mapped file back. Of a whole mapping the pages stay, since programs map files
/// anew; of a fragment they go, because it is what the program does not need. The addresses stay this library's: the
/// next mapping of the file has them again.
///
/// A private mapping is one mapping alone: it goes when nothing of it is left.
pub fn unmap(address: u64, len: u64) {
    if pool::unmap_private(address, len) {
        return;
    }
    pool::with_file(address, |known, runtime| {
        let (start, tensor) = (known.mapped.as_ptr() as u64, known.mapped.tensor());
        let (offset, size, page) = (address - start, tensor.size().get(), tensor.page_size().bytes());
        if !known.given.take(offset, len.next_multiple_of(page_size())) {
            known.mapped.keep_order();
            return;
        }
        let end = offset.saturating_add(len);
        let end = if end >= size { size } else { end - end % page };
        let first = offset.next_multiple_of(page);
        if first < end
            && let Ok(part) = tensor.rows(first..end)
        {
            runtime.evict(&part);
        }
    });
}

/// `mremap` of a part of a mapped file.
///
/// # Errors
/// The number for `errno`.
pub fn remap(old: u64, old_len: u64, new_len: u64, flags: c_int, wanted: u64) -> Result<u64, c_int> {
    let page = page_size();
    let known = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    let (may_move, fixed) = (flags & libc::MREMAP_MAYMOVE != 0, flags & libc::MREMAP_FIXED != 0);
    let stays = flags & libc::MREMAP_DONTUNMAP != 0;
    if flags & !known != 0 || !old.is_multiple_of(page) || new_len == 0 || ((fixed || stays) && !may_move) {
        return Err(libc::EINVAL);
    }
    let whole = |len: u64| len.checked_next_multiple_of(page).ok_or(libc::EINVAL);
    let (old_len, new_len) = (whole(old_len)?, whole(new_len)?);
    if !fixed && !stays && new_len <= old_len {
        if new_len < old_len {
            unmap(old + new_len, old_len - new_len);
        }
        return Ok(old);
    }
    // What was written is nowhere else.
    if !may_move || ranges::is_private(old) || (fixed && ranges::overlaps(wanted, new_len)) {
        return Err(libc::ENOMEM);
    }
    // What is moved is the kernel's own mapping of the file from then on.
    let (start, fd) = ranges::descriptor_of(old).ok_or(libc::EFAULT)?;
    let flags = libc::MAP_PRIVATE | if fixed { libc::MAP_FIXED } else { 0 };
    let arguments = [wanted, new_len, libc::PROT_READ as u64, flags as u64, fd, old - start];
    // SAFETY: a new mapping where the kernel likes, or where the program wants it instead of whatever is there, which
    // is none of this library's.
    let moved = unsafe { kernel(libc::SYS_mmap, arguments) };
    if moved == -1 {
        return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::ENOMEM));
    }
    if !stays {
        unmap(old, old_len);
    }
    Ok(moved as u64)
}

/// Says once for each file that nothing is mapped over it.
pub fn refuse_over(address: u64, len: u64) {
    let Some(start) = ranges::overlapped(address, len) else { return };
    if ranges::is_private(start) {
        static SAID: Once = Once::new();
        return SAID.call_once(|| {
            say("the program maps something over a model file that it writes, at a fixed address, and was told that \
                 there is no memory; leave that file to the kernel with `--match`");
        });
    }
    pool::with_file(start, |known, _| {
        if !std::mem::replace(&mut known.refused, true) {
            say(&format!(
                "the program maps something over {} at a fixed address, and was told that there is no memory; leave \
                 that file to the kernel with `--match`",
                known.path.display()
            ));
        }
    });
}

/// Says once that the process is not locked in memory.
pub fn refuse_lock() {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        say("the program locks all its memory (mlockall), and was told that there is too little: its model files are \
             larger");
    });
}
