//! The functions of the C library that open files by name, which are replaced: they look at what the program opens.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::files::{LEAST, LEAST_PART, is_model};
use crate::forks::Beginning;
use crate::inside::do_ours;
use crate::process::in_a_child;
use crate::sys::kernel;
use crate::{descriptors, end, names, opens};

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
            if let Some(metadata) = is_model(&file) {
                // SAFETY: as the caller promised.
                unsafe { names::opened(&metadata, at, path) };
            }
            if size >= LEAST && opens::has_room() {
                note(&file);
            }
        });
    }
}

fn note(file: &File) {
    // A child that has nothing of this library says nothing, and what it would wait for here may never come.
    if in_a_child() {
        return;
    }
    let _beginning = Beginning::new();
    if opens::note(file) {
        end::follow();
    }
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
            let open = || if next.is_null() {
                // SAFETY: as the caller promised.
                unsafe { kernel($number, [$($passed),*]) as c_int }
            } else {
                // SAFETY: the C library's function has this signature, and the arguments are what the caller promised.
                unsafe { std::mem::transmute::<*mut c_void, $signature>(next)($($argument),*) }
            };
            let fd = descriptors::opening(open, |fd| *fd);
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
    let open = || unsafe { std::mem::transmute::<*mut c_void, FOpen>(function)(path, mode) };
    // SAFETY: a stream that was just opened.
    let of = |stream: &*mut libc::FILE| if stream.is_null() { -1 } else { unsafe { libc::fileno(*stream) } };
    let stream = descriptors::opening(open, of);
    // SAFETY: the caller's path, by which a file was opened.
    unsafe { noticed(of(&stream), libc::O_RDONLY, libc::AT_FDCWD, path) };
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
