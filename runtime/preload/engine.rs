//! Which engine the program is, as far as its libraries tell, and what keeps its weights in the file.

use std::ffi::{CStr, CString, c_int, c_void};
use std::path::Path;
use std::ptr;

/// Names of libraries begin so.
const OF_LLAMA_CPP: [&[u8]; 2] = [b"libggml", b"libllama"];
const OF_PYTORCH: [&[u8]; 1] = [b"libtorch"];
/// So do names of llama.cpp's programs, which may have it linked in.
const PROGRAMS_OF_LLAMA_CPP: &[u8] = b"llama-";
/// Options of llama.cpp's programs that have it repack no weights.
const NO_REPACKING: [&str; 2] = ["--no-repack", "-nr"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    LlamaCpp,
    PyTorch,
    /// candle, for one: it is a part of its program.
    Unknown,
}

impl Engine {
    /// Of a process that has several, llama.cpp.
    pub fn of_this_process() -> Self {
        let libraries = libraries();
        let has = |names: &[&[u8]]| {
            libraries.iter().any(|path| names.iter().any(|name| file_name(path.to_bytes()).starts_with(name)))
        };
        let program = std::env::current_exe().ok();
        let is_llama_cpps = |path: &Path| {
            path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(PROGRAMS_OF_LLAMA_CPP))
        };
        if has(&OF_LLAMA_CPP) || program.as_deref().is_some_and(is_llama_cpps) {
            Self::LlamaCpp
        } else if has(&OF_PYTORCH) {
            Self::PyTorch
        } else {
            Self::Unknown
        }
    }

    /// What to do where this engine copies weights.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::LlamaCpp if std::env::args_os().any(|argument| NO_REPACKING.iter().any(|one| argument == *one)) => {
                "It copies them although it does not repack them: give it more memory."
            }
            Self::LlamaCpp => {
                "llama.cpp copies them to repack them: give it `--no-repack` (`use_extra_bufts = false` in \
                 llama_model_params), and they stay in the file."
            }
            Self::PyTorch => {
                "PyTorch copies weights that it converts or stacks: load them in the type that they have (`dtype=\"auto\"`), \
                 and save a mixture of transformers 5 once by `save_pretrained(DIR, save_original_format=False)`; or give \
                 it more memory."
            }
            Self::Unknown => {
                "outcore cannot keep what an engine copies within a limit: give it more memory, or take an engine that \
                 uses weights where they are mapped (llama.cpp with `--no-repack`), or outcore's own (`generate`, \
                 `serve`)."
            }
        }
    }
}

fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
}

/// Paths of the libraries that are loaded, those of `dlopen` too.
pub fn libraries() -> Vec<CString> {
    unsafe extern "C" fn collect(info: *mut libc::dl_phdr_info, _size: usize, names: *mut c_void) -> c_int {
        // SAFETY: the linker's own string, and the list that `libraries` passed.
        let (name, names) = unsafe { ((*info).dlpi_name, &mut *names.cast::<Vec<CString>>()) };
        if !name.is_null() {
            // SAFETY: a string that ends, as the linker promises.
            names.push(unsafe { CStr::from_ptr(name) }.to_owned());
        }
        0
    }
    let mut names: Vec<CString> = Vec::new();
    // SAFETY: `collect` has the signature, and the list outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(collect), ptr::from_mut(&mut names).cast()) };
    names
}
