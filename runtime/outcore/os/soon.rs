//! Threads that others wait for run soon after they are woken.
//!
//! Programs compute on as many threads as there are processors, and many of these spin while they wait for each other.
//! A thread that is woken then waits for the end of a time slice of theirs, 3 ms and more: longer than a read takes.
//! Linux lets a thread ask for a short slice of its own, and prefers it when it is woken (`sched_setattr(2)`,
//! `sched_runtime` of the policy SCHED_OTHER, since Linux 6.12). It gets no more time than others.

/// The slice asked for: the least that Linux gives.
const SLICE_NS: u64 = 100_000;
/// `SCHED_FLAG_KEEP_POLICY` of linux/sched.h.
const KEEP_POLICY: u64 = 0x08;

/// Asks that the calling thread runs soon after it is woken. Where the kernel does not know how, nothing changes.
pub fn answer_soon() {
    // SAFETY: a plain question about the calling thread.
    let nice = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
    // SAFETY: integers only, for which zeros are values.
    let mut wanted: libc::sched_attr = unsafe { std::mem::zeroed() };
    wanted.size = size_of::<libc::sched_attr>() as u32;
    wanted.sched_flags = KEEP_POLICY;
    wanted.sched_nice = nice;
    wanted.sched_runtime = SLICE_NS;
    // SAFETY: the kernel reads as many bytes as `size` says. All arguments have 64 bits, as the variadic call needs.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0_u64, std::ptr::from_ref(&wanted), 0_u64) };
}
