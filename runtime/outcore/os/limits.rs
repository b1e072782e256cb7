//! What the system lets this process have.

/// The largest size in bytes that this process may give a file (RLIMIT_FSIZE). A call that would exceed it ends the
/// process by a signal, so it must not be tried.
pub(crate) fn longest_file() -> u64 {
    // SAFETY: `limit` is valid for writing (`limit_of`).
    limit_of(|limit| unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, limit) })
}

/// How many descriptors this process may have (RLIMIT_NOFILE).
pub fn most_descriptors() -> u64 {
    // SAFETY: as above.
    limit_of(|limit| unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, limit) })
}

/// The user whose rights this process has; 0 is root.
pub(crate) fn effective_user() -> u32 {
    // SAFETY: the call has no preconditions.
    unsafe { libc::geteuid() }
}

/// The limit that is in force; `RLIM_INFINITY`, the largest number, where there is none.
fn limit_of(ask: impl FnOnce(*mut libc::rlimit) -> libc::c_int) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // If the call fails, it stays as it is.
    ask(&raw mut limit);
    limit.rlim_cur
}
