//! A cuBLASLt for the tests: the one that computes on the CPU over the emulated driver (`tests/fake-cublaslt`).

#![allow(dead_code, reason = "each user takes its own part")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::OnceLock;

use super::emulated::{Driver, driver, skipped};

/// The library, where cargo has built it.
pub fn library(test: &str) -> Option<PathBuf> {
    let beside = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let name = "liboutcore_fake_cublaslt.so";
    let places = [beside.join(name), beside.join("../deps").join(name), beside.join("deps").join(name)];
    let found = places.into_iter().find(|path| path.exists());
    if found.is_none() {
        skipped(test, "emulated", &format!("{name} is not beside this test; `cargo test` builds it"));
    }
    found
}

/// The library in this process, where cudarc finds it from now on. Load it after the emulated driver.
pub struct CublasLt {
    refuse: extern "C" fn(u32),
    count: extern "C" fn(u32) -> u64,
}

impl CublasLt {
    pub fn load(test: &str) -> Option<&'static Self> {
        static LOADED: OnceLock<CublasLt> = OnceLock::new();
        let path = CString::new(library(test)?.as_os_str().as_bytes()).unwrap();
        Some(LOADED.get_or_init(|| {
            // SAFETY: the library is the one of this workspace; it stays loaded.
            let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            assert!(!library.is_null(), "cannot load {path:?}");
            let (refuse, count) = (symbol(library, c"fakecublaslt_refuse"), symbol(library, c"fakecublaslt_count"));
            // SAFETY: the types are the signatures of the functions of these names in its sources.
            unsafe {
                Self {
                    refuse: std::mem::transmute::<*mut c_void, extern "C" fn(u32)>(refuse),
                    count: std::mem::transmute::<*mut c_void, extern "C" fn(u32) -> u64>(count),
                }
            }
        }))
    }

    /// From now on no handle can be made (1), heuristics find nothing (2), products fail (3), heuristics find nothing
    /// for several batches (4), these are not supported (5), or all goes well (0).
    pub fn refuse(&self, what: u32) {
        (self.refuse)(what);
    }
    /// Heuristics since this was last asked.
    pub fn heuristics(&self) -> u64 {
        (self.count)(0)
    }
    /// Products since this was last asked.
    pub fn products(&self) -> u64 {
        (self.count)(1)
    }
    /// The least alignment of matrices of weights since this was last asked, in bytes.
    pub fn least_alignment(&self) -> u64 {
        (self.count)(2)
    }
    /// Batches of the products since this was last asked.
    pub fn batches(&self) -> u64 {
        (self.count)(4)
    }
    /// Objects that were not given back.
    pub fn left(&self) -> u64 {
        (self.count)(3)
    }
}

/// The driver for a test, and over the emulated one this library; a GPU has its own, or none.
pub fn driver_with_library(test: &str) -> Option<(Driver, Option<&'static CublasLt>)> {
    let driver = driver(test)?;
    let library = match &driver.fake {
        Some(_) => Some(CublasLt::load(test)?),
        None => None,
    };
    Some((driver, library))
}

/// Says that a GPU has no cuBLASLt for a test.
pub fn no_library(test: &str) {
    skipped(test, "cublaslt", "there is no cuBLASLt that works with this driver");
}

/// Fails if the driver's judge found anything, or anything was not given back.
pub fn finish(driver: &Driver, library: Option<&CublasLt>) {
    driver.finish();
    assert!(library.is_none_or(|library| library.left() == 0), "the library's objects were not given back");
}

fn symbol(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: `library` is a handle of dlopen that is never closed, and the name is a C string.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!address.is_null(), "the library has no {name:?}");
    address
}
