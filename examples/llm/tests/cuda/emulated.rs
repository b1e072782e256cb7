//! A CUDA driver for the tests of the forward pass on a GPU: the emulated one (`tests/fake-cuda`), with the kernels'
//! own source compiled for the CPU; or the machine's, where `OUTCORE_TEST_GPU` names a GPU.

#![allow(dead_code, reason = "each user takes its own part")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use outcore_cuda::CudaDeviceSelector;
pub use outcore_testkit::fake_cuda::{Fake, skipped};
use twox_hash::XxHash3_64;

/// The files that the library is made of, by their places in the package. Their texts are in the test, which may run
/// where no sources are, and must not hold a path of the machine that built it.
const SOURCES: [(&str, &str); 10] = [
    ("src/cuda/kernels.cu", include_str!("../../src/cuda/kernels.cu")),
    ("src/cuda/kernels/numbers.cu", include_str!("../../src/cuda/kernels/numbers.cu")),
    ("src/cuda/kernels/weights.cu", include_str!("../../src/cuda/kernels/weights.cu")),
    ("src/cuda/kernels/products.cu", include_str!("../../src/cuda/kernels/products.cu")),
    ("src/cuda/kernels/layers.cu", include_str!("../../src/cuda/kernels/layers.cu")),
    ("src/cuda/kernels/attention.cu", include_str!("../../src/cuda/kernels/attention.cu")),
    ("src/cuda/kernels/choosing.cu", include_str!("../../src/cuda/kernels/choosing.cu")),
    ("src/cuda/kernels/prefill.cu", include_str!("../../src/cuda/kernels/prefill.cu")),
    ("tests/cuda/emulation.h", include_str!("emulation.h")),
    ("tests/cuda/emulation.cpp", include_str!("emulation.cpp")),
];

/// Where cargo puts what tests make: `tmp` in the folder in whose `debug/deps` this test is.
pub fn folder() -> PathBuf {
    std::env::current_exe().unwrap().ancestors().nth(3).unwrap().join("tmp")
}

/// The emulated driver's library, where cargo has built it.
pub fn driver_library() -> Option<PathBuf> {
    let beside = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let name = "liboutcore_fake_cuda.so";
    let places = [beside.join(name), beside.join("../deps").join(name), beside.join("deps").join(name)];
    places.into_iter().find(|path| path.exists())
}

/// The kernels as a library of host functions; built once for each state of their source. `None`, with a note, where
/// there is no C++ compiler.
pub fn kernel_library(test: &str) -> Option<&'static Path> {
    static LIBRARY: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    match LIBRARY.get_or_init(build) {
        Ok(path) => Some(path),
        Err(why) => {
            skipped(test, "c++", why);
            None
        }
    }
}

/// The error says what to tell a user whose machine has no C++ compiler.
fn build() -> Result<PathBuf, String> {
    let options =
        ["-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-strict-aliasing"];
    let key = format!("{}{options:?}", SOURCES.map(|(_, text)| text).concat());
    let library = folder().join(format!("libemulated_kernels_{:016x}.so", XxHash3_64::oneshot(key.as_bytes())));
    if library.exists() {
        return Ok(library);
    }
    std::fs::create_dir_all(folder()).unwrap();
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let unfinished = library.with_extension(format!("{}.tmp", std::process::id()));
    let sources = library.with_extension(format!("{}.src", std::process::id()));
    for (name, text) in SOURCES {
        std::fs::create_dir_all(sources.join(name).parent().unwrap()).unwrap();
        std::fs::write(sources.join(name), text).unwrap();
    }
    let mut command = Command::new(&compiler);
    command
        .args(options)
        .args(["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror", "-o"])
        .arg(&unfinished)
        .arg(sources.join("tests/cuda/emulation.cpp"));
    let output = command.arg("-ldl").output();
    // The same text behind the first pass alone, in which `__global__` still stands before each kernel.
    let mut expand = Command::new(&compiler);
    expand.args(["-std=c++17", "-E", "-P", "-DNAME_KERNELS"]).arg(sources.join("tests/cuda/emulation.cpp"));
    let expanded = expand.output();
    std::fs::remove_dir_all(&sources).unwrap();
    let output = output.map_err(|error| {
        format!("there is no C++ compiler ({compiler}: {error}), so that the kernels' source cannot be run")
    })?;
    assert!(output.status.success(), "the kernels do not compile: {}", String::from_utf8_lossy(&output.stderr));
    let names = kernels_in(&String::from_utf8_lossy(&expanded.unwrap().stdout)).join("\n");
    std::fs::write(library.with_extension("kernels"), names).unwrap();
    std::fs::rename(unfinished, &library).unwrap();
    Ok(library)
}

/// The names of functions behind `__global__`.
fn kernels_in(text: &str) -> Vec<String> {
    let names = text.split("__global__").skip(1).filter_map(|rest| {
        let rest = rest.trim_start().strip_prefix("void")?.trim_start();
        // What bounds the launch has brackets of its own, and is a macro without text here.
        let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        (!name.is_empty()).then_some(name)
    });
    names.collect()
}

/// Every kernel of the sources, their macros expanded; `None`, with a note, where there is no C++ compiler.
pub fn kernels_of_the_sources(test: &str) -> Option<Vec<String>> {
    let library = kernel_library(test)?;
    Some(std::fs::read_to_string(library.with_extension("kernels")).unwrap().lines().map(str::to_owned).collect())
}

/// The kernels that this process has run; `None` on a GPU.
pub fn kernels_that_ran() -> Option<Vec<String>> {
    if std::env::var_os("OUTCORE_TEST_GPU").is_some() {
        return None;
    }
    let library = kernel_library("kernels_that_ran")?;
    // SAFETY: the function has no parameters and returns a C string that lives until its next call, which is no other
    // thread's: the text is copied at once, by the one test that asks.
    let text = unsafe {
        let function = symbol(open(library), c"emulated_kernels_that_ran");
        CStr::from_ptr(std::mem::transmute::<*mut c_void, extern "C" fn() -> *const c_char>(function)())
    };
    Some(text.to_str().unwrap().lines().map(str::to_owned).collect())
}

fn symbol(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: `library` is a handle of dlopen that is never closed, and the name is a C string.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!address.is_null(), "the library has no {name:?}");
    address
}

fn open(path: &Path) -> *mut c_void {
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the library is the one that was just built; it stays loaded.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null(), "cannot load {}", path.display());
    library
}

/// A PTX text that names the kernels, which is all that the emulated driver reads of a module.
pub fn ptx_file(test: &str) -> Option<PathBuf> {
    let library = kernel_library(test)?;
    let path = library.with_extension("ptx");
    // Tests that run side by side write one file.
    static WRITING: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _writing = WRITING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if !path.exists() {
        // SAFETY: the function has no parameters and returns a C string that lives as long as the library.
        let text = unsafe {
            let function = symbol(open(library), c"emulated_kernels_ptx");
            CStr::from_ptr(std::mem::transmute::<*mut c_void, extern "C" fn() -> *const c_char>(function)())
        };
        let unfinished = path.with_extension(format!("{}.tmp", std::process::id()));
        std::fs::write(&unfinished, text.to_bytes()).unwrap();
        std::fs::rename(unfinished, &path).unwrap();
    }
    Some(path)
}

/// A driver in the hands of one test.
pub struct Driver {
    pub fake: Option<Fake>,
    /// The GPU.
    pub device: CudaDeviceSelector,
    /// The kernels; `None` leaves them to NVRTC.
    pub kernels: Option<PathBuf>,
}

/// The driver for a test, or `None`, with a note, where there is none.
pub fn driver(test: &str) -> Option<Driver> {
    if let Ok(device) = std::env::var("OUTCORE_TEST_GPU") {
        let kernels = std::env::var_os("OUTCORE_TEST_KERNELS").map(PathBuf::from);
        return Some(Driver { fake: None, device: device.parse().unwrap(), kernels });
    }
    if driver_library().is_none() {
        skipped(test, "emulated", "liboutcore_fake_cuda.so is not beside this test; `cargo test` builds it");
        return None;
    }
    let library = kernel_library(test)?;
    let kernels = ptx_file(test)?;
    let fake = Fake::load();
    // SAFETY: the function has no parameters and returns a bool.
    let registered = unsafe {
        let function = symbol(open(library), c"emulated_kernels_register");
        std::mem::transmute::<*mut c_void, extern "C" fn() -> bool>(function)()
    };
    assert!(registered, "the emulated driver is loaded, but not found");
    Some(Driver { fake: Some(fake), device: CudaDeviceSelector::default(), kernels: Some(kernels) })
}

impl Driver {
    /// Fails if the judge found anything, or anything was not given back.
    pub fn finish(&self) {
        if let Some(fake) = &self.fake {
            fake.finish();
        }
    }
}
