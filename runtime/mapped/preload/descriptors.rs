//! Descriptors of this library stay open, whatever the program closes: some programs close all that they do not know.
//!
//! What the runtime opens while a file is mapped is found by comparing what is open before and after. Of what other
//! threads of the program open meanwhile, only events, files without a name and the same file could be taken for the
//! library's: to close these then fails. Files that the runtime opens later are not protected; a read of one that was
//! closed fails.

use std::ffi::{c_int, c_uint};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Descriptors from here on are not protected: a process that has so many does not count them up to close them.
const MOST: usize = 1 << 16;

/// One bit for each descriptor of this library.
static OWNED: [AtomicU64; MOST / 64] = [const { AtomicU64::new(0) }; MOST / 64];

fn place(fd: c_int) -> Option<(&'static AtomicU64, u64)> {
    let at = usize::try_from(fd).ok()?;
    Some((OWNED.get(at / 64)?, 1 << (at % 64)))
}

/// All open descriptors, with what they lead to.
fn open_now() -> Vec<(c_int, String)> {
    let entries = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let named = entries.filter_map(|entry| {
        let fd = entry.file_name().to_str()?.parse().ok()?;
        Some((fd, fs::read_link(entry.path()).ok()?.to_string_lossy().into_owned()))
    });
    // The list itself is read from a descriptor that is gone afterwards.
    named.filter(|(_, leads_to)| !leads_to.ends_with("/fd")).collect()
}

/// Whether this may be the runtime's scratch file, which has no name, or has it no more.
fn is_scratch(leads_to: &str) -> bool {
    let name = leads_to.strip_suffix(" (deleted)").and_then(|path| path.rsplit('/').next());
    name.is_some_and(|name| name.starts_with('#') || (name.starts_with("outcore-") && name.ends_with(".scratch")))
}

/// Runs `open`, and protects what it leaves open. `model` is the file that it maps.
pub fn protecting<T>(model: &Path, open: impl FnOnce() -> T) -> T {
    let before: Vec<c_int> = open_now().into_iter().map(|(fd, _)| fd).collect();
    let result = open();
    let kinds =
        ["anon_inode:[userfaultfd]", "anon_inode:[eventfd]", "anon_inode:[io_uring]", "/memfd:outcore-lost", "/proc/"];
    for (fd, leads_to) in open_now() {
        let ours = Path::new(&leads_to) == model
            || kinds.iter().any(|kind| leads_to.starts_with(kind))
            || is_scratch(&leads_to);
        if ours && !before.contains(&fd) {
            protect(fd);
        }
    }
    result
}

pub fn protect(fd: c_int) {
    if let Some((word, bit)) = place(fd) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// Whether a descriptor is this library's.
pub fn is_ours(fd: c_int) -> bool {
    place(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

/// The library closes it itself.
pub fn release(fd: c_int) {
    if let Some((word, bit)) = place(fd) {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// Whether this is one of the runtime's threads, by its name: they close what they opened.
pub fn is_own_thread() -> bool {
    let mut name = [0u8; 16];
    // SAFETY: a buffer of the 16 bytes that the kernel writes.
    let told = unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    told == 0 && ["outcore-", "faulting-", "iou-"].iter().any(|own| name.starts_with(own.as_bytes()))
}

/// The parts of a range of descriptors that are not this library's: first and last.
pub fn others(first: c_uint, last: c_uint) -> Vec<(c_uint, c_uint)> {
    let (mut parts, mut from) = (Vec::new(), first);
    for fd in (first..=last.min(MOST as c_uint - 1)).filter(|fd| is_ours(*fd as c_int)) {
        if from < fd {
            parts.push((from, fd - 1));
        }
        from = fd + 1;
    }
    if from <= last {
        parts.push((from, last));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_closed_leaves_what_is_ours() {
        [60_000, 60_001, 60_005].into_iter().for_each(protect);
        assert_eq!(others(59_990, c_uint::MAX), [(59_990, 59_999), (60_002, 60_004), (60_006, c_uint::MAX)]);
        assert_eq!(others(60_000, 60_001), []);
        release(60_001);
        assert_eq!(others(60_000, 60_001), [(60_001, 60_001)]);
        assert!(is_ours(60_005) && !is_ours(60_006) && !is_ours(-1) && !is_ours(c_int::MAX));
    }
}
