//! `outcore run`: starts a program whose mappings of model files are outcore's, by loading a library into it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use glob::Pattern;
use outcore::{Bytes, Error, ErrorKind, PolicyKind, Result};

use crate::library;
use crate::loads::Loads;

#[derive(Debug, Args)]
pub struct Options {
    /// Memory for pages of model files; the program's own memory comes on top
    #[arg(long, value_name = "SIZE", conflicts_with = "memory")]
    budget: Option<Bytes>,
    /// Memory for the whole process: pages get what the program itself leaves [default: what the machine or the control
    /// group leaves]
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// The policy by which pages go: lru, plan, ... (`outcore policies` compares them)
    #[arg(long, value_name = "NAME")]
    policy: Option<PolicyKind>,
    /// Map only files whose path, or name if there is no slash, matches; may be given several times
    #[arg(long = "match", value_name = "GLOB", value_parser = pattern)]
    matches: Vec<Pattern>,
    /// Write what the run was, its timeline included, for `outcore report`
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Do not keep the order in which the program uses its files for the next start, nor follow one that was kept
    #[arg(long)]
    no_kept_order: bool,
    /// The program and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// Becomes the program. Returns only if that failed.
///
/// # Errors
/// `NotFound` without the library or the program; `Unsupported` where the kernel has no fitting `userfaultfd`.
pub fn run(options: &Options) -> Error {
    let library = match library::find().and_then(|library| outcore_mapped::Faulting::new().map(|_| library)) {
        Ok(library) => library,
        Err(error) => return error,
    };
    let Some((program, arguments)) = options.command.split_first() else {
        return Error::new(ErrorKind::InvalidArgument, "no program was named").remedy("give one behind `--`");
    };
    let loaded = beside_others(&library, std::env::var_os("LD_PRELOAD"));
    let mut command = Command::new(program);
    command.args(arguments);
    let loads = Loads::of(program);
    if let Some(why) = loads.why_not() {
        // If standard error is closed, nobody can be told.
        drop(writeln!(io::stderr(), "outcore: {} {why}: its mappings stay the kernel's", Path::new(program).display()));
    }
    // Programs that this one starts may take it even where it does not.
    if loads != Loads::Fails {
        command.env("LD_PRELOAD", loaded);
    }
    if let Err(error) = set(&mut command, options) {
        return error;
    }
    let cause = command.exec();
    let remedy = match cause.kind() {
        io::ErrorKind::NotFound => "check its name and PATH",
        io::ErrorKind::PermissionDenied => "give this user the right to run it",
        _ => "start it without `outcore run` to see what it says",
    };
    Error::io(format!("start {}", Path::new(program).display()), cause).remedy(remedy)
}

/// The value of `LD_PRELOAD`: what is loaded anyway stays, and a program that runs in one that was started so loads the
/// library once.
fn beside_others(library: &Path, others: Option<OsString>) -> OsString {
    let mut all = library.as_os_str().to_owned();
    let others = others.unwrap_or_default();
    // The loader takes both signs.
    let others = others.as_bytes().split(|byte| matches!(byte, b':' | b' '));
    for other in others.filter(|other| !other.is_empty() && *other != library.as_os_str().as_bytes()) {
        all.push(":");
        all.push(OsStr::from_bytes(other));
    }
    all
}

/// Tells the library what it is to do. What was not given is unset: this program may itself have been started so.
fn set(command: &mut Command, options: &Options) -> Result<()> {
    let lines: Vec<&str> = options.matches.iter().map(Pattern::as_str).collect();
    let report = match &options.report {
        Some(path) => Some(place(path)?),
        None => None,
    };
    let number = |bytes: Option<Bytes>| bytes.map(|bytes| bytes.get().to_string().into());
    let variables: [(&str, Option<OsString>); 7] = [
        ("OUTCORE_RUN_BUDGET", number(options.budget)),
        ("OUTCORE_RUN_MEMORY", number(options.memory)),
        ("OUTCORE_RUN_POLICY", options.policy.map(|policy| policy.name().into())),
        ("OUTCORE_RUN_MATCH", (!lines.is_empty()).then(|| lines.join("\n").into())),
        ("OUTCORE_RUN_REPORT", report.map(PathBuf::into_os_string)),
        ("OUTCORE_RUN_KEEP_ORDER", options.no_kept_order.then(|| "0".into())),
        // The program has the number of this process.
        ("OUTCORE_RUN_FIRST", Some(std::process::id().to_string().into())),
    ];
    for (name, value) in variables {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    Ok(())
}

/// The whole path of a file that can be written.
fn place(path: &Path) -> Result<PathBuf> {
    let failed = |cause| {
        Error::io(format!("write {}", path.display()), cause).remedy("give --report a file that this user may write")
    };
    // The program may have another working directory.
    let whole = std::path::absolute(path).map_err(failed)?;
    // What an earlier run left there is not taken for this one's.
    File::create(&whole).map_err(failed)?;
    Ok(whole)
}

fn pattern(text: &str) -> std::result::Result<Pattern, String> {
    if text.contains('\n') {
        return Err("a pattern is one line".to_owned());
    }
    Pattern::new(text).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_loaded_once_and_others_stay() {
        let value = |others: &str| beside_others(Path::new("/a/own.so"), Some(others.into()));
        assert_eq!(beside_others(Path::new("/a/own.so"), None), "/a/own.so");
        assert_eq!(value(""), "/a/own.so");
        assert_eq!(value("/b/x.so:/a/own.so y.so:"), "/a/own.so:/b/x.so:y.so");
    }
}
