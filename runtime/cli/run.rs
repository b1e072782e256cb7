//! `outcore run`: starts a program whose mappings of model files are outcore's, by loading a library into it.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use outcore::{Bytes, Error, ErrorKind, Result};

/// The library that is loaded. It lies beside this program, unless [`NAMED`] names it.
const LIBRARY: &str = "liboutcore_preload.so";
const NAMED: &str = "OUTCORE_PRELOAD";

#[derive(Debug, Args)]
pub struct Options {
    /// Memory for pages of model files; smaller files are left to the kernel
    #[arg(long, value_name = "SIZE")]
    budget: Bytes,
    /// The program and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// Becomes the program. Returns only if that failed.
///
/// # Errors
/// `NotFound` without the library or the program; `Unsupported` where the kernel has no fitting `userfaultfd`.
pub fn run(options: &Options) -> Error {
    let library = match library().and_then(|library| outcore_mapped::Faulting::new().map(|_| library)) {
        Ok(library) => library,
        Err(error) => return error,
    };
    let Some((program, arguments)) = options.command.split_first() else {
        return Error::new(ErrorKind::InvalidArgument, "no program was named").remedy("give one behind `--`");
    };
    let mut loaded = library.into_os_string();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        loaded.push(":");
        loaded.push(others);
    }
    let cause = Command::new(program)
        .args(arguments)
        .env("LD_PRELOAD", loaded)
        .env("OUTCORE_RUN_BUDGET", options.budget.get().to_string())
        .exec();
    let remedy = match cause.kind() {
        io::ErrorKind::NotFound => "check its name and PATH",
        io::ErrorKind::PermissionDenied => "give this user the right to run it",
        _ => "start it without `outcore run` to see what it says",
    };
    Error::io(format!("start {}", Path::new(program).display()), cause).remedy(remedy)
}

fn library() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os(NAMED) {
        return found(PathBuf::from(named));
    }
    let own = std::env::current_exe().map_err(|cause| {
        Error::io("look for the library beside this program", cause).remedy(format!("name it in {NAMED}"))
    })?;
    found(own.with_file_name(LIBRARY))
}

fn found(library: PathBuf) -> Result<PathBuf> {
    if library.is_file() {
        // The program may have another working directory.
        return library.canonicalize().map_err(|cause| Error::io(format!("find {}", library.display()), cause));
    }
    Err(Error::new(ErrorKind::NotFound, format!("{} is not there", library.display()))
        .remedy(format!("build it (`cargo build --release -p outcore-preload`), or name it in {NAMED}")))
}
