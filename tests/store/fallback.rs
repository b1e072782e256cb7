//! The promise: what the system refuses costs speed at most. A container may forbid io_uring, a kernel may lack it, and
//! a file system may not preallocate or may not know O_DIRECT. The runtime goes on without, and reads and writes the
//! right bytes. If the caller asked for it by name, there is an error that says what to do.
//!
//! A system-call filter makes the refusals. It holds for the thread that installs it and the threads that thread
//! starts, so each refusal has a thread of its own.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::thread;

use models::Synthetic;
use outcore::{Bytes, DType, ErrorKind, IoBackend, PageSize, Result, Runtime};
use outcore_testkit::models;

/// A system call that is answered with an error number.
#[derive(Clone, Copy, Debug)]
struct Refusal {
    call: libc::c_long,
    /// The refusal applies only if this argument has one of these bits.
    having: Option<(u32, u32)>,
    errno: i32,
}

impl Refusal {
    const fn of(call: libc::c_long, errno: i32) -> Self {
        Self { call, having: None, errno }
    }

    /// Refuses to open a file with O_DIRECT.
    const fn of_direct(errno: i32) -> Self {
        Self { call: libc::SYS_openat, having: Some((2, libc::O_DIRECT as u32)), errno }
    }

    /// The refusal applies to this thread from here on. Returns false where the system takes no filters.
    fn install(self) -> bool {
        let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
        let skip_unless = |code: u32, k: u32, jf: u8| libc::sock_filter { code: code as u16, jt: 0, jf, k };
        let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
        let rest = if self.having.is_some() { 3 } else { 1 };
        // The call's number is the first field of what a filter sees; the arguments, of 8 bytes, begin at 16.
        let mut filter =
            vec![statement(load, 0), skip_unless(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, self.call as u32, rest)];
        if let Some((argument, bits)) = self.having {
            let low = if cfg!(target_endian = "big") { 4 } else { 0 };
            filter.push(statement(load, 16 + 8 * argument + low));
            filter.push(skip_unless(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, bits, 1));
        }
        filter.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | self.errno as u32));
        filter.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: the call touches no memory.
        if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
            return false;
        }
        // SAFETY: `program` and the filter it points to outlive the call, which copies them.
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0 }
    }
}

/// Runs `test` on a thread to which `refusals` apply, or says that the system cannot refuse them.
fn refusing(refusals: &[Refusal], test: impl FnOnce() + Send) {
    thread::scope(|scope| {
        let under_filter = scope.spawn(|| {
            if refusals.iter().all(|refusal| refusal.install()) {
                test();
            } else {
                eprintln!("SKIPPED: no system-call filter can be installed here");
            }
        });
        if let Err(panic) = under_filter.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

const PAGE: u64 = 16 << 10;

fn open(io: IoBackend, dir: &Path) -> Result<Runtime> {
    Runtime::builder()
        .page_size(PageSize::new(Bytes::new(PAGE))?)
        .device_budget(Bytes::new(4 * PAGE))
        .io(io)
        .scratch_dir(dir)
        .open()
}

/// Reads a model larger than the budget, and writes and reads a table larger than it.
fn work(runtime: &Runtime, file: &Synthetic) {
    let model = runtime.open_model(&file.path).unwrap();
    for name in ["t0", "t1"] {
        let extent = model.header().tensor(name).unwrap();
        let (offset, len) = (extent.offset as usize, extent.len as usize);
        let tensor = model.tensor(name).unwrap();
        for row in (0..len).step_by(PAGE as usize) {
            let end = (row + PAGE as usize).min(len);
            let guard = runtime.pin(&tensor.rows(row as u64..end as u64).unwrap()).wait().unwrap();
            assert!(*guard == file.bytes[offset + row..offset + end], "{name}, from {row}");
        }
    }
    write(runtime);
}

fn write(runtime: &Runtime) {
    let table = runtime.alloc(DType::U8, &[16, PAGE]).unwrap();
    let row = |n: u64| table.rows(n..n + 1).unwrap();
    for n in 0..16 {
        runtime.pin(&row(n)).write().wait().unwrap().bytes_mut().fill(n as u8 + 1);
    }
    for n in 0..16 {
        assert!(runtime.pin(&row(n)).wait().unwrap().iter().all(|byte| *byte == n as u8 + 1), "row {n}");
    }
}

fn file() -> Synthetic {
    models::synthetic(&[100_000, 150_001])
}

#[test]
fn io_uring_that_is_refused_is_replaced_by_threads() {
    for errno in [libc::EPERM, libc::ENOSYS, libc::EACCES, libc::ENOMEM] {
        refusing(&[Refusal::of(libc::SYS_io_uring_setup, errno)], || {
            let file = file();
            let runtime = open(IoBackend::Auto, file.dir.path()).unwrap();
            assert_eq!(runtime.stats().io, IoBackend::Threads, "errno {errno}");
            work(&runtime, &file);
            runtime.close().unwrap();
            // A backend that was chosen by name is not replaced.
            let error = open(IoBackend::IoUring, file.dir.path()).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::OutOfMemory), "{error}");
            assert!(error.advice().is_some_and(|advice| advice.contains("I/O backend `threads`")), "{error}");
        });
    }
}

/// A kernel may set up rings and then run nothing in them. That counts as having no io_uring.
#[test]
fn io_uring_that_sets_up_and_does_not_run_is_replaced_by_threads() {
    for call in [libc::SYS_io_uring_register, libc::SYS_io_uring_enter] {
        refusing(&[Refusal::of(call, libc::EPERM)], || {
            let file = file();
            let runtime = open(IoBackend::Auto, file.dir.path()).unwrap();
            assert_eq!(runtime.stats().io, IoBackend::Threads);
            work(&runtime, &file);
            runtime.close().unwrap();
        });
    }
}

/// EFAULT says that the kernel could not read our memory. This is an error of ours, so there is no fallback.
#[test]
fn io_uring_that_faults_is_no_reason_to_go_on() {
    refusing(&[Refusal::of(libc::SYS_io_uring_setup, libc::EFAULT)], || {
        let file = file();
        assert_eq!(open(IoBackend::Auto, file.dir.path()).unwrap_err().kind(), ErrorKind::Internal);
    });
}

#[test]
fn a_file_system_that_does_not_preallocate_is_written_all_the_same() {
    for errno in [libc::EOPNOTSUPP, libc::ENOSYS] {
        refusing(&[Refusal::of(libc::SYS_fallocate, errno)], || {
            let file = file();
            for io in [IoBackend::Auto, IoBackend::Threads, IoBackend::Buffered] {
                let runtime = open(io, file.dir.path()).unwrap();
                work(&runtime, &file);
                runtime.close().unwrap();
            }
        });
    }
}

/// If there is no room, only the allocation that wants it fails.
#[test]
fn a_disk_that_is_full_at_preallocation_refuses_the_allocation() {
    let file = file();
    let runtime = open(IoBackend::Auto, file.dir.path()).unwrap();
    refusing(&[Refusal::of(libc::SYS_fallocate, libc::ENOSPC)], || {
        let error = runtime.alloc(DType::U8, &[16, PAGE]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DiskFull, "{error}");
    });
    work(&runtime, &file);
    runtime.close().unwrap();
}

#[test]
fn without_o_direct_files_go_through_the_page_cache() {
    refusing(&[Refusal::of_direct(libc::EINVAL)], || {
        let file = file();
        let runtime = open(IoBackend::Auto, file.dir.path()).unwrap();
        work(&runtime, &file);
        runtime.close().unwrap();
        for io in [IoBackend::IoUring, IoBackend::Threads] {
            let Ok(runtime) = open(io, file.dir.path()) else {
                eprintln!("SKIPPED: {io} does not work here");
                continue;
            };
            let error = runtime.open_model(&file.path).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.advice().is_some_and(|advice| advice.contains("I/O backend `buffered`")), "{error}");
            runtime.close().unwrap();
        }
        let runtime = open(IoBackend::Buffered, file.dir.path()).unwrap();
        work(&runtime, &file);
        runtime.close().unwrap();
    });
}

/// If a file's descriptor cannot be opened anew, the flags of the existing one are changed.
#[test]
fn a_file_that_cannot_be_opened_again_is_read_directly_all_the_same() {
    refusing(&[Refusal::of_direct(libc::EACCES)], || {
        let file = file();
        for io in [IoBackend::Auto, IoBackend::Threads] {
            let runtime = open(io, file.dir.path()).unwrap();
            work(&runtime, &file);
            runtime.close().unwrap();
        }
    });
}

/// The system refuses io_uring, preallocation and O_DIRECT at the same time. Only threads and the page cache are left.
#[test]
fn everything_refused_at_once_still_works() {
    let refusals = [
        Refusal::of(libc::SYS_io_uring_setup, libc::ENOSYS),
        Refusal::of(libc::SYS_fallocate, libc::EOPNOTSUPP),
        Refusal::of_direct(libc::EINVAL),
    ];
    refusing(&refusals, || {
        let file = file();
        let runtime = open(IoBackend::Auto, file.dir.path()).unwrap();
        assert_eq!(runtime.stats().io, IoBackend::Threads);
        work(&runtime, &file);
        runtime.close().unwrap();
    });
}
