//! The runtime of this process, and the files that are mapped on it.

use std::ffi::{c_int, c_long};
use std::fs::{self, File};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use outcore::{Bytes, Error, PolicyKind, Runtime};
use outcore_mapped::{Faulting, Mapped, page_size_for};
use parking_lot::Mutex;

/// Files smaller than this are left to the kernel.
const LEAST: u64 = 32 << 20;
/// The budget in bytes. `outcore run` sets it.
const BUDGET: &str = "OUTCORE_RUN_BUDGET";

/// What is mapped. A file stays mapped when the program unmaps it: programs map files anew, and then its pages are
/// there.
struct Known {
    identity: (u64, u64, i64, i64, u64),
    mapped: Arc<Mapped>,
}

struct Pool {
    runtime: Runtime,
    files: Mutex<Vec<Known>>,
}

static POOL: OnceLock<Option<Pool>> = OnceLock::new();
/// The range of addresses that all mapped files lie in, so that other calls are told apart without a lock.
static LOWEST: AtomicU64 = AtomicU64::new(u64::MAX);
static HIGHEST: AtomicU64 = AtomicU64::new(0);
static HAS_EXPERTS: AtomicBool = AtomicBool::new(false);
static REPORTED: AtomicBool = AtomicBool::new(false);

/// Mapped ranges for a child by `fork`, which gets the files themselves there: address, length, descriptor plus one.
const FILES_MAX: usize = 256;
static FOR_CHILDREN: [[AtomicU64; 3]; FILES_MAX] = [const { [const { AtomicU64::new(0) }; 3] }; FILES_MAX];

/// Bytes of a page of the kernel.
pub fn page_size() -> u64 {
    // SAFETY: a plain question.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

/// A system call. It takes all arguments as 64 bits: of shorter ones the C library's `syscall`, whose arguments are
/// variadic, would pass on whatever the upper half of their place on the stack holds.
///
/// # Safety
/// That of the call.
pub unsafe fn kernel(number: c_long, arguments: [u64; 6]) -> c_long {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: as the caller promised.
    unsafe { libc::syscall(number, a, b, c, d, e, f) }
}

/// One line on standard error, without the program's stdio.
pub fn say(line: &str) {
    let line = format!("outcore: {line}\n");
    // SAFETY: `write` gets a buffer of that many bytes. That nobody reads it is no error here.
    let _ = unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
}

fn budget() -> Option<Bytes> {
    std::env::var(BUDGET).ok()?.parse().ok().map(Bytes::new)
}

/// The runtime. It is opened for the first file, whose experts decide how large pages are.
fn pool(first: &Path) -> Option<&'static Pool> {
    let open = || {
        let budget = budget()?;
        // Threads of the runtime take no signals: a handler of the program's may not run on them.
        let opened = without_signals(|| {
            let builder = Runtime::builder().device(Faulting::new()?).device_budget(budget).policy(PolicyKind::Model);
            match page_size_for(first) {
                Some(page) => builder.page_size(page).open(),
                None => builder.open(),
            }
        });
        match opened {
            Ok(runtime) => {
                // SAFETY: both functions have the C library's signature and do not unwind.
                unsafe {
                    libc::atexit(at_exit);
                    libc::pthread_atfork(None, None, Some(in_child));
                }
                Some(Pool { runtime, files: Mutex::default() })
            }
            Err(error) => {
                say(&format!("files stay the kernel's: {}", told(&error)));
                None
            }
        }
    };
    POOL.get_or_init(open).as_ref()
}

fn told(error: &Error) -> String {
    match error.advice() {
        Some(advice) => format!("{error}; {advice}"),
        None => error.to_string(),
    }
}

fn without_signals<T>(run: impl FnOnce() -> T) -> T {
    // SAFETY: plain calls on sets that live here.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let result = run();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        result
    }
}

/// The path of a model file that is too large for the budget; `None` for everything else.
fn model(file: &File) -> Option<(PathBuf, fs::Metadata)> {
    let metadata = file.metadata().ok()?;
    let budget = budget()?.get();
    if !metadata.is_file() || metadata.len() < LEAST || metadata.len() <= budget {
        return None;
    }
    let mut first = [0; 9];
    file.read_exact_at(&mut first, 0).ok()?;
    // GGUF by its magic; safetensors by the length of its header and the brace behind it; zip files of PyTorch.
    let header = u64::from_le_bytes(first[..8].try_into().ok()?);
    let known =
        first.starts_with(b"GGUF") || (first[8] == b'{' && header < metadata.len()) || first.starts_with(b"PK\x03\x04");
    if !known {
        return None;
    }
    let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    Some((path, metadata))
}

/// The address at which the bytes of an open file from `offset` on are, if it is one that is mapped here.
pub fn map(fd: c_int, len: u64, offset: u64) -> Option<u64> {
    // SAFETY: the caller's descriptor is looked at during this call only, and not closed.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let (path, metadata) = model(&file)?;
    if len < LEAST || offset.checked_add(len)? > metadata.len().next_multiple_of(page_size()) {
        return None;
    }
    let pool = pool(&path)?;
    let identity = (metadata.dev(), metadata.ino(), metadata.mtime(), metadata.mtime_nsec(), metadata.len());
    let mut files = pool.files.lock();
    if let Some(known) = files.iter().find(|known| known.identity == identity) {
        return Some(known.mapped.as_ptr() as u64 + offset);
    }
    let left = |why: &str| say(&format!("{} stays the kernel's: {why}", path.display()));
    let Some(slot) = FOR_CHILDREN.get(files.len()) else {
        left(&format!("{FILES_MAX} files are mapped already"));
        return None;
    };
    // SAFETY: a copy of the caller's descriptor, which stays open until the process ends.
    let own = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 64) };
    if own < 0 {
        left("this process has no file descriptor left; raise `ulimit -n`");
        return None;
    }
    let mapped = match without_signals(|| Mapped::open(&pool.runtime, &path)) {
        Ok(mapped) => Arc::new(mapped),
        Err(error) => {
            left(&told(&error));
            // SAFETY: the copy that was just made, of which nobody knows.
            unsafe { libc::close(own) };
            return None;
        }
    };
    let start = mapped.as_ptr() as u64;
    let [at, len_of, descriptor] = slot;
    at.store(start, Ordering::Relaxed);
    len_of.store(metadata.len().next_multiple_of(page_size()), Ordering::Relaxed);
    descriptor.store((own + 1) as u64, Ordering::Release);
    LOWEST.fetch_min(start, Ordering::Relaxed);
    HIGHEST.fetch_max(start + metadata.len().next_multiple_of(page_size()), Ordering::Relaxed);
    HAS_EXPERTS.fetch_or(mapped.has_experts(), Ordering::Relaxed);
    files.push(Known { identity, mapped });
    Some(start + offset)
}

/// Whether this address lies in a mapped file.
pub fn holds(address: u64) -> bool {
    if address < LOWEST.load(Ordering::Relaxed) || address >= HIGHEST.load(Ordering::Relaxed) {
        return false;
    }
    let inside = |slot: &[AtomicU64; 3]| {
        let start = slot[0].load(Ordering::Relaxed);
        slot[2].load(Ordering::Acquire) != 0 && address >= start && address - start < slot[1].load(Ordering::Relaxed)
    };
    FOR_CHILDREN.iter().any(inside)
}

/// A child has nothing of these ranges, and no thread that could answer for them: it gets the files themselves.
extern "C" fn in_child() {
    for [start, len, fd] in &FOR_CHILDREN {
        let fd = fd.load(Ordering::Acquire);
        if fd > 0 {
            let [start, len] = [start, len].map(|value| value.load(Ordering::Relaxed));
            let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
            // SAFETY: the raw call, at addresses that this process does not have, of a descriptor that is ours.
            unsafe { kernel(libc::SYS_mmap, [start, len, libc::PROT_READ as u64, flags as u64, fd - 1, 0]) };
        }
    }
    REPORTED.store(true, Ordering::Relaxed);
}

/// Runs `run`; a panic is the same as `None`. Nothing unwinds into the program.
pub fn without_panic<T>(run: impl FnOnce() -> Option<T>) -> Option<T> {
    std::panic::catch_unwind(AssertUnwindSafe(run)).ok().flatten()
}

/// Whether a file with experts is mapped.
pub fn has_experts() -> bool {
    HAS_EXPERTS.load(Ordering::Relaxed)
}

/// The program uses these experts of a layer next. Returns when they are there.
pub fn experts(layer: u32, experts: &[u32]) {
    let Some(Some(pool)) = POOL.get() else { return };
    // A child by fork has a copy of this, and reads the files themselves.
    if REPORTED.load(Ordering::Relaxed) {
        return;
    }
    let files = pool.files.lock();
    let has_all = |known: &&Known| experts.iter().all(|expert| known.mapped.has_expert(layer, *expert));
    // Of two models with such a layer nobody knows which one is meant. Their experts come as they are touched.
    let found = |nth| files.iter().filter(has_all).nth(nth).map(|known| known.mapped.clone());
    let (Some(one), None) = (found(0), found(1)) else { return };
    drop(files);
    // What could not be read now is tried again when it is touched, and is a signal if that fails too.
    let _ = one.expert_hint(layer, experts);
}

extern "C" fn at_exit() {
    if REPORTED.swap(true, Ordering::Relaxed) {
        return;
    }
    if let Some(Some(pool)) = POOL.get() {
        // A child by fork has a copy of this, but not the pool; `in_child` has marked it.
        let stats = pool.runtime.stats();
        let files = pool.files.try_lock().map_or(0, |files| files.len());
        let waited: f64 = stats.stalls.iter().map(|stall| stall.time.as_secs_f64()).sum();
        let pager = &stats.pager;
        say(&format!(
            "{files} file(s) mapped in {} of memory: {} read; {} of {} reads were ahead of use; {waited:.1} s of waiting for \
             the others",
            stats.traffic.peak_device,
            stats.traffic.disk_read,
            pager.fills_disk.saturating_sub(pager.faults),
            pager.fills_disk,
        ));
    }
}
