//! Kernels of a GPU whose own source is compiled for the CPU and run over the emulated driver (`tests/fake-cuda`); or
//! the machine's driver, where `OUTCORE_TEST_GPU` names a GPU.

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use outcore_cuda::CudaDeviceSelector;
use twox_hash::XxHash3_64;

use crate::fake_cuda::{Fake, skipped};

/// What stands beside [`EmulatedKernels::UNIT`].
const HEADERS: [(&str, &str); 3] = [
    ("tests/cuda/emulation.h", include_str!("emulation/emulation.h")),
    ("tests/cuda/machine.h", include_str!("emulation/machine.h")),
    ("tests/cuda/exports.h", include_str!("emulation/exports.h")),
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

/// Calls a function of the library that has no parameters and returns text.
fn text_of(library: &Path, name: &CStr) -> String {
    // SAFETY: the function returns a C string that lives until its next call at least, which is no other thread's: it
    // is copied at once.
    unsafe {
        let function = symbol(open(library), name);
        let function = std::mem::transmute::<*mut c_void, extern "C" fn() -> *const c_char>(function);
        CStr::from_ptr(function()).to_str().unwrap().to_owned()
    }
}

/// The kernels of a package.
pub struct EmulatedKernels {
    sources: &'static [(&'static str, &'static str)],
    library: OnceLock<Result<PathBuf, String>>,
}

impl EmulatedKernels {
    /// The file that is compiled. It includes `machine.h`, the kernels and `exports.h`, and has a table of the kernels.
    pub const UNIT: &'static str = "tests/cuda/emulation.cpp";

    /// Of these files, by their places in the package. Their texts are in the test, which may run where no sources are,
    /// and must not hold a path of the machine that built it.
    pub const fn new(sources: &'static [(&'static str, &'static str)]) -> Self {
        Self { sources, library: OnceLock::new() }
    }

    /// The kernels as a library of host functions; built once for each state of their source. `None`, with a note,
    /// where there is no C++ compiler.
    pub fn library(&self, test: &str) -> Option<&Path> {
        match self.library.get_or_init(|| self.build()) {
            Ok(path) => Some(path),
            Err(why) => {
                skipped(test, "c++", why);
                None
            }
        }
    }

    /// The error says what to tell a user whose machine has no C++ compiler.
    fn build(&self) -> Result<PathBuf, String> {
        let options =
            ["-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-strict-aliasing"];
        // No product is fused with a sum unless the source says so, as in kernels that nvcc compiles with -fmad=false.
        // It fuses in others, whose tests allow for a difference.
        let options = [&options[..], &["-ffp-contract=off"]].concat();
        let files = || self.sources.iter().chain(&HEADERS);
        let key = format!("{}{options:?}", files().map(|(_, text)| *text).collect::<String>());
        let library = folder().join(format!("libemulated_kernels_{:016x}.so", XxHash3_64::oneshot(key.as_bytes())));
        if library.exists() {
            return Ok(library);
        }
        std::fs::create_dir_all(folder()).unwrap();
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let unfinished = library.with_extension(format!("{}.tmp", std::process::id()));
        let sources = library.with_extension(format!("{}.src", std::process::id()));
        for (name, text) in files() {
            std::fs::create_dir_all(sources.join(name).parent().unwrap()).unwrap();
            std::fs::write(sources.join(name), text).unwrap();
        }
        let unit = sources.join(Self::UNIT);
        let mut command = Command::new(&compiler);
        command.args(options).args(["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror", "-o"]);
        let output = command.arg(&unfinished).arg(&unit).arg("-ldl").output();
        // The same text behind the first pass alone, in which `__global__` still stands before each kernel.
        let expanded = Command::new(&compiler).args(["-std=c++17", "-E", "-P", "-DNAME_KERNELS"]).arg(&unit).output();
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

    /// Every kernel of the sources, their macros expanded; `None`, with a note, where there is no C++ compiler.
    pub fn names(&self, test: &str) -> Option<Vec<String>> {
        let library = self.library(test)?;
        Some(std::fs::read_to_string(library.with_extension("kernels")).unwrap().lines().map(str::to_owned).collect())
    }

    /// The kernels that this process has run; `None` on a GPU. For one test of a process.
    pub fn that_ran(&self) -> Option<Vec<String>> {
        if std::env::var_os("OUTCORE_TEST_GPU").is_some() {
            return None;
        }
        let text = text_of(self.library("kernels_that_ran")?, c"emulated_kernels_that_ran");
        Some(text.lines().map(str::to_owned).collect())
    }

    /// A PTX text that names the kernels, which is all that the emulated driver reads of a module.
    pub fn ptx_file(&self, test: &str) -> Option<PathBuf> {
        let library = self.library(test)?;
        let path = library.with_extension("ptx");
        // Tests that run side by side write one file.
        static WRITING: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let _writing = WRITING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !path.exists() {
            let unfinished = path.with_extension(format!("{}.tmp", std::process::id()));
            std::fs::write(&unfinished, text_of(library, c"emulated_kernels_ptx")).unwrap();
            std::fs::rename(unfinished, &path).unwrap();
        }
        Some(path)
    }

    /// The driver for a test, or `None`, with a note, where there is none.
    pub fn driver(&self, test: &str) -> Option<Driver> {
        if let Ok(device) = std::env::var("OUTCORE_TEST_GPU") {
            let kernels = std::env::var_os("OUTCORE_TEST_KERNELS").map(PathBuf::from);
            return Some(Driver { fake: None, device: device.parse().unwrap(), kernels });
        }
        if driver_library().is_none() {
            skipped(test, "emulated", "liboutcore_fake_cuda.so is not beside this test; `cargo test` builds it");
            return None;
        }
        let library = self.library(test)?;
        let kernels = self.ptx_file(test)?;
        let fake = Fake::load();
        // SAFETY: the function has no parameters and returns a bool.
        let registered = unsafe {
            let function = symbol(open(library), c"emulated_kernels_register");
            std::mem::transmute::<*mut c_void, extern "C" fn() -> bool>(function)()
        };
        assert!(registered, "the emulated driver is loaded, but not found");
        Some(Driver { fake: Some(fake), device: CudaDeviceSelector::default(), kernels: Some(kernels) })
    }
}

/// A driver in the hands of one test.
pub struct Driver {
    pub fake: Option<Fake>,
    /// The GPU.
    pub device: CudaDeviceSelector,
    /// The kernels; `None` leaves them to the program.
    pub kernels: Option<PathBuf>,
}

impl Driver {
    /// Fails if the judge found anything, or anything was not given back.
    pub fn finish(&self) {
        if let Some(fake) = &self.fake {
            fake.finish();
        }
    }
}
