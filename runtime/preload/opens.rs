//! Model files that a program opens, and never asks this library to map: engines that copy weights into memory of their
//! own, and those that map by raw system calls. It is said at the end, because nothing else is.
//!
//! A program that reads a file through, as checksums and copies do, holds little of it. So what counts is both: that
//! the process has read as much as the file has, since it was opened, and that it held a large part of that in memory.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use outcore::Bytes;
use outcore::machine::ProcessMemory;
use parking_lot::Mutex;

use crate::calls::do_ours;
use crate::descriptors;
use crate::names;
use crate::pool::{self, Beginning, Identity, LEAST, LEAST_PART, identity, kernel, say};
use crate::settings::settings;

/// A model file that was opened, and not mapped so far.
#[derive(Debug)]
struct Opened {
    identity: Identity,
    path: PathBuf,
    /// Not that of a link.
    own_path: PathBuf,
    /// What the process had read by then.
    read_before: u64,
    process: u32,
}

impl Opened {
    /// Its name and length.
    fn named(&self) -> String {
        let name = self.path.file_name().unwrap_or(self.path.as_os_str()).to_string_lossy();
        format!("{name} ({})", Bytes::new(self.identity.len))
    }
}

static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());
/// Their number, so that calls of `mmap` need no lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Further ones are not looked at.
const OPENED_MAX: usize = 8;
/// Large files of which the program has asked for a mapping.
static ASKED: Mutex<Vec<Identity>> = Mutex::new(Vec::new());
const ASKED_MAX: usize = 256;
/// The part of a file's bytes that the process must have read, and the part that it must have held: in percent.
const READ_PART: u64 = 90;
const HELD_PART: u64 = 30;

/// Options of llama.cpp's programs that have it read files.
const READS: [&str; 3] = ["--no-mmap", "--direct-io", "-dio"];

/// Bytes that this process has asked the kernel to read, whatever of.
fn read_so_far() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    text.lines().find_map(|line| line.strip_prefix("rchar:")?.trim().parse().ok())
}

/// The program has this descriptor now, of a file with this path from the folder of the descriptor `at`.
///
/// # Safety
/// `path` is a string that ends with a zero byte, if the descriptor is one.
unsafe fn noticed(fd: c_int, flags: c_int, at: c_int, path: *const c_char) {
    if fd < 0 || flags & libc::O_ACCMODE == libc::O_WRONLY || flags & (libc::O_PATH | libc::O_DIRECTORY) != 0 {
        return;
    }
    // SAFETY: `fstat` writes to the place that lives here; a descriptor that is closed by now is an error.
    let size = unsafe {
        let mut found: libc::stat = std::mem::zeroed();
        let is_file = libc::fstat(fd, &mut found) == 0 && found.st_mode & libc::S_IFMT == libc::S_IFREG;
        if is_file { u64::try_from(found.st_size).unwrap_or(0) } else { 0 }
    };
    if size >= LEAST_PART {
        do_ours(|| {
            // SAFETY: the caller's descriptor is looked at during this call only, and not closed.
            let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
            if let Some(metadata) = pool::is_model(&file) {
                // SAFETY: as the caller promised.
                unsafe { names::opened(&metadata, at, path) };
            }
            if size >= LEAST && COUNT.load(Ordering::Relaxed) < OPENED_MAX {
                note(&file);
            }
        });
    }
}

fn note(file: &File) {
    // A child that has nothing of this library says nothing, and what it would wait for here may never come.
    if pool::in_a_child() {
        return;
    }
    let _beginning = Beginning::new();
    let (Some((path, metadata)), Some(read_before)) = (pool::model(file), read_so_far()) else { return };
    let Some(own_path) = pool::own_path(file) else { return };
    if !settings().is_some_and(|settings| settings.may_map(&path)) {
        return;
    }
    let identity = identity(&metadata);
    // Opened once more: nothing is to be said of it.
    if ASKED.try_lock().is_none_or(|asked| asked.len() == ASKED_MAX || asked.contains(&identity)) {
        return;
    }
    // A signal handler may open a file while this thread is here.
    let Some(mut opened) = OPENED.try_lock() else { return };
    // A child by fork has its parent's list.
    opened.retain(|opened| opened.process == std::process::id());
    if opened.len() < OPENED_MAX && !opened.iter().any(|opened| opened.identity == identity) {
        opened.push(Opened { identity, path, own_path, read_before, process: std::process::id() });
        pool::follow_the_process();
    }
    COUNT.store(opened.len(), Ordering::Relaxed);
}

/// The program has asked for a mapping of this file, whoever's it became.
pub fn mapped(identity: Identity) {
    if let Some(mut asked) = ASKED.try_lock()
        && asked.len() < ASKED_MAX
        && !asked.contains(&identity)
    {
        asked.push(identity);
    }
    if COUNT.load(Ordering::Relaxed) == 0 {
        return;
    }
    if let Some(mut opened) = OPENED.try_lock() {
        opened.retain(|opened| opened.identity != identity);
        COUNT.store(opened.len(), Ordering::Relaxed);
    }
}

/// The file of this descriptor was mapped where this library has no part in it.
pub fn mapped_elsewhere(fd: c_int) {
    do_ours(|| {
        // SAFETY: the caller's descriptor is looked at during this call only, and not closed.
        let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
        if let Ok(metadata) = file.metadata() {
            mapped(identity(&metadata));
        }
    });
}

/// Bytes of a file that the kernel has mapped into this process, by the lines of `/proc/self/maps`.
fn mapped_bytes(maps: &[u8], path: &Path) -> u64 {
    let of_line = |line: &[u8]| {
        let mut fields = line.splitn(6, |byte| *byte == b' ');
        let (range, name) = (std::str::from_utf8(fields.next()?).ok()?, fields.nth(4)?.trim_ascii_start());
        let (first, end) = range.split_once('-')?;
        let [first, end] = [first, end].map(|address| u64::from_str_radix(address, 16));
        (name == path.as_os_str().as_bytes()).then_some(end.ok()?.checked_sub(first.ok()?)?)
    };
    maps.split(|byte| *byte == b'\n').filter_map(of_line).sum()
}

/// Says which model files are mapped though this library was never asked to map them.
pub fn tell_of_raw_calls() {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return;
    }
    let (Some(opened), Ok(maps)) = (OPENED.try_lock(), std::fs::read("/proc/self/maps")) else { return };
    let own = std::process::id();
    let raw = |opened: &&Opened| opened.process == own && mapped_bytes(&maps, &opened.own_path) >= LEAST;
    let files: Vec<String> = opened.iter().filter(raw).map(Opened::named).collect();
    if !files.is_empty() {
        say(&format!(
            "the kernel maps {}: the program asked it by a raw system call, which `outcore run` does not see; take a \
             build of the program that calls `mmap` of the C library",
            files.join(", ")
        ));
    }
}

/// Says which model files were read into memory, if any were.
pub fn tell() {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return;
    }
    let (Some(opened), Some(read), Some(memory)) = (OPENED.try_lock(), read_so_far(), ProcessMemory::now().ok()) else {
        return;
    };
    let own = std::process::id();
    let copied = |opened: &&Opened| {
        let len = opened.identity.len;
        opened.process == own
            && read.saturating_sub(opened.read_before) >= len / 100 * READ_PART
            && memory.peak.get() >= len / 100 * HELD_PART
    };
    let files: Vec<String> = opened.iter().filter(copied).map(Opened::named).collect();
    if files.is_empty() {
        return;
    }
    let given = std::env::args_os().find_map(|argument| READS.into_iter().find(|option| argument == *option));
    let what_helps = match given {
        Some(option) => format!("it was given {option}: leave that out"),
        None => "outcore cannot help an engine that copies its weights, unless an option has it map them".to_owned(),
    };
    say(&format!(
        "no file was mapped: the program read {} into memory of its own, with `read`, and held {}; {what_helps}",
        files.join(", "),
        memory.peak
    ));
}

/// A function of the C library, behind the one here. Looked for once.
struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(ptr::null_mut()) }
    }

    fn find(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Relaxed);
        if !found.is_null() {
            return found;
        }
        // SAFETY: a plain question.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// The mode is one of the variable arguments. On the processors that Rust calls `x86_64` and `aarch64` it is where a
/// third, or fourth, one is.
type Open = unsafe extern "C" fn(*const c_char, c_int, c_uint) -> c_int;
type OpenAt = unsafe extern "C" fn(c_int, *const c_char, c_int, c_uint) -> c_int;
type Open2 = unsafe extern "C" fn(*const c_char, c_int) -> c_int;
type OpenAt2 = unsafe extern "C" fn(c_int, *const c_char, c_int) -> c_int;
type FOpen = unsafe extern "C" fn(*const c_char, *const c_char) -> *mut libc::FILE;

/// Functions that open a file by name. Each calls the C library's, and looks at what it opened.
macro_rules! opens {
    ($($name:ident, $symbol:literal: $signature:ty, ($($argument:ident: $type:ty),*), $flags:ident,
        $path:ident from $at:expr, else $number:expr, [$($passed:expr),*];)*) => { $(
        /// # Safety
        /// That of the C library's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            static NEXT: Next = Next::new($symbol);
            let next = NEXT.find();
            let fd = if next.is_null() {
                // SAFETY: as the caller promised.
                unsafe { kernel($number, [$($passed),*]) as c_int }
            } else {
                // SAFETY: the C library's function has this signature, and the arguments are what the caller promised.
                unsafe { std::mem::transmute::<*mut c_void, $signature>(next)($($argument),*) }
            };
            descriptors::opened(fd);
            // SAFETY: the caller's path, by which a file was opened.
            unsafe { noticed(fd, $flags, $at, $path) };
            fd
        }
    )* };
}

const HERE: u64 = libc::AT_FDCWD as i64 as u64;

opens! {
    open, c"open": Open, (path: *const c_char, flags: c_int, mode: c_uint), flags, path from libc::AT_FDCWD,
        else libc::SYS_openat, [HERE, path as u64, flags as u64, mode.into(), 0, 0];
    open64, c"open64": Open, (path: *const c_char, flags: c_int, mode: c_uint), flags, path from libc::AT_FDCWD,
        else libc::SYS_openat, [HERE, path as u64, flags as u64, mode.into(), 0, 0];
    openat, c"openat": OpenAt, (at: c_int, path: *const c_char, flags: c_int, mode: c_uint), flags, path from at,
        else libc::SYS_openat, [at as i64 as u64, path as u64, flags as u64, mode.into(), 0, 0];
    openat64, c"openat64": OpenAt, (at: c_int, path: *const c_char, flags: c_int, mode: c_uint), flags, path from at,
        else libc::SYS_openat, [at as i64 as u64, path as u64, flags as u64, mode.into(), 0, 0];
    __open_2, c"__open_2": Open2, (path: *const c_char, flags: c_int), flags, path from libc::AT_FDCWD,
        else libc::SYS_openat, [HERE, path as u64, flags as u64, 0, 0, 0];
    __open64_2, c"__open64_2": Open2, (path: *const c_char, flags: c_int), flags, path from libc::AT_FDCWD,
        else libc::SYS_openat, [HERE, path as u64, flags as u64, 0, 0, 0];
    __openat_2, c"__openat_2": OpenAt2, (at: c_int, path: *const c_char, flags: c_int), flags, path from at,
        else libc::SYS_openat, [at as i64 as u64, path as u64, flags as u64, 0, 0, 0];
    __openat64_2, c"__openat64_2": OpenAt2, (at: c_int, path: *const c_char, flags: c_int), flags, path from at,
        else libc::SYS_openat, [at as i64 as u64, path as u64, flags as u64, 0, 0, 0];
}

/// # Safety
/// That of fopen(3).
unsafe fn open_stream(next: &Next, path: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    let function = next.find();
    if function.is_null() {
        // SAFETY: this thread's own errno.
        unsafe { *libc::__errno_location() = libc::ENOSYS };
        return ptr::null_mut();
    }
    // SAFETY: the C library's function has this signature, and the arguments are what the caller promised.
    let stream = unsafe { std::mem::transmute::<*mut c_void, FOpen>(function)(path, mode) };
    if !stream.is_null() {
        // SAFETY: a stream that was just opened.
        let fd = unsafe { libc::fileno(stream) };
        descriptors::opened(fd);
        // SAFETY: the caller's path, by which a file was opened.
        unsafe { noticed(fd, libc::O_RDONLY, libc::AT_FDCWD, path) };
    }
    stream
}

/// # Safety
/// That of fopen(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fopen(path: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    static NEXT: Next = Next::new(c"fopen");
    // SAFETY: as the caller promised.
    unsafe { open_stream(&NEXT, path, mode) }
}

/// # Safety
/// That of fopen(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fopen64(path: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    static NEXT: Next = Next::new(c"fopen64");
    // SAFETY: as the caller promised.
    unsafe { open_stream(&NEXT, path, mode) }
}
