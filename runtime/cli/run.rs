//! `outcore run`: starts a program whose mappings of model files are outcore's, by loading a library into it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use glob::Pattern;
use outcore::{Bytes, Error, ErrorKind, PageSize, PolicyKind, Result};
use outcore_mapped::{Faulting, LEAST_FRAMES};

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

/// Why the program was not started, and this one's exit status then.
#[derive(Debug)]
pub struct Failure {
    pub error: Error,
    pub status: u8,
}

/// As shells have it: there is no such program, and one that cannot be executed.
const NOT_FOUND: u8 = 127;
const NOT_EXECUTED: u8 = 126;

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, status: 1 }
    }
}

/// Memory of a process beside the least that pages take: what is kept in reserve, and a small program.
const BESIDE_PAGES: Bytes = Bytes::mib(8);

/// Refuses limits that cannot be kept.
fn check(options: &Options) -> Result<()> {
    let pages = Bytes::new(LEAST_FRAMES * PageSize::DEFAULT.bytes());
    let what_for = format!("{LEAST_FRAMES} pages of {}", Bytes::new(PageSize::DEFAULT.bytes()));
    for (option, given, least, what_for) in [
        ("--budget", options.budget, pages, what_for.clone()),
        ("--memory", options.memory, pages + BESIDE_PAGES, format!("{what_for}, and {BESIDE_PAGES} beside them")),
    ] {
        if let Some(given) = given.filter(|given| *given < least) {
            let message = format!("{option} {given} cannot be kept: a mapped file needs {what_for}");
            return Err(Error::new(ErrorKind::BudgetTooSmall, message).remedy(format!("give {option} {least} or more")));
        }
    }
    Ok(())
}

/// Becomes the program. Returns only if that failed.
pub fn run(options: &Options) -> Failure {
    if let Err(error) = check(options) {
        return error.into();
    }
    let library = match library::find() {
        Ok(library) => library,
        Err(error) => return error.into(),
    };
    let Some((program, arguments)) = options.command.split_first() else {
        return Error::new(ErrorKind::InvalidArgument, "no program was named").remedy("give one behind `--`").into();
    };
    let report = match options.report.as_deref().map(Report::at).transpose() {
        Ok(report) => report,
        Err(error) => return error.into(),
    };
    let mut command = Command::new(program);
    command.args(arguments);
    let faulting = Faulting::new().err();
    let others = std::env::var_os("LD_PRELOAD").unwrap_or_default();
    let loads = Loads::of(program);
    let why_not = match (&faulting, loads.why_not()) {
        (Some(error), _) => Some(format!("is started without the library of outcore, because {error}")),
        (None, why) => why.map(str::to_owned),
    };
    if let Some(why) = why_not {
        let no_report = report
            .as_ref()
            .map_or(String::new(), |report| format!(", and nothing is written to {}", report.path.display()));
        // If standard error is closed, nobody can be told.
        drop(writeln!(
            io::stderr(),
            "outcore: {} {why}: its mappings stay the kernel's{no_report}",
            Path::new(program).display()
        ));
    }
    if faulting.is_some() {
        // This program may have been started with the library.
        match without(&library, &others) {
            rest if rest.is_empty() => command.env_remove("LD_PRELOAD"),
            rest => command.env("LD_PRELOAD", rest),
        };
    } else if loads != Loads::Fails {
        // Programs that this one starts may take it even where it does not.
        command.env("LD_PRELOAD", beside_others(&library, &others));
    }
    set(&mut command, options, report.as_ref());
    let cause = command.exec();
    if let Some(report) = report {
        report.give_up();
    }
    let (status, remedy) = match cause.kind() {
        io::ErrorKind::NotFound => (NOT_FOUND, "check its name and PATH"),
        io::ErrorKind::PermissionDenied => (NOT_EXECUTED, "give this user the right to run it"),
        _ => (NOT_EXECUTED, "start it without `outcore run` to see what it says"),
    };
    Failure { error: Error::io(format!("start {}", Path::new(program).display()), cause).remedy(remedy), status }
}

/// The value of `LD_PRELOAD`: what is loaded anyway stays, and a program that runs in one that was started so loads the
/// library once.
fn beside_others(library: &Path, others: &OsStr) -> OsString {
    let (mut all, rest) = (library.as_os_str().to_owned(), without(library, others));
    if !rest.is_empty() {
        all.push(":");
        all.push(rest);
    }
    all
}

/// The others of a value of `LD_PRELOAD`.
fn without(library: &Path, others: &OsStr) -> OsString {
    // The loader takes both signs.
    let others = others.as_bytes().split(|byte| matches!(byte, b':' | b' '));
    let others = others.filter(|other| !other.is_empty() && *other != library.as_os_str().as_bytes());
    OsString::from_vec(Vec::from_iter(others).join(&b':'))
}

/// Tells the library what it is to do. What was not given is unset: this program may itself have been started so.
fn set(command: &mut Command, options: &Options, report: Option<&Report>) {
    let lines: Vec<&str> = options.matches.iter().map(Pattern::as_str).collect();
    let number = |bytes: Option<Bytes>| bytes.map(|bytes| bytes.get().to_string().into());
    let variables: [(&str, Option<OsString>); 7] = [
        ("OUTCORE_RUN_BUDGET", number(options.budget)),
        ("OUTCORE_RUN_MEMORY", number(options.memory)),
        ("OUTCORE_RUN_POLICY", options.policy.map(|policy| policy.name().into())),
        ("OUTCORE_RUN_MATCH", (!lines.is_empty()).then(|| lines.join("\n").into())),
        ("OUTCORE_RUN_REPORT", report.map(|report| report.path.clone().into_os_string())),
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
}

/// The file of `--report`. It can be written. What an earlier run left there stays until the program has started with
/// the library, which empties it.
#[derive(Debug)]
struct Report {
    path: PathBuf,
    /// Whether there was none before.
    is_new: bool,
}

impl Report {
    fn at(path: &Path) -> Result<Self> {
        let failed = |cause| {
            Error::io(format!("write {}", path.display()), cause)
                .remedy("give --report a file that this user may write")
        };
        // The program may have another working directory.
        let path = std::path::absolute(path).map_err(failed)?;
        let is_new = match File::create_new(&path) {
            Ok(_) => true,
            Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => {
                // A link to a file that is not there is made one.
                OpenOptions::new().write(true).create(true).truncate(false).open(&path).map_err(failed)?;
                false
            }
            Err(cause) => return Err(failed(cause)),
        };
        Ok(Self { path, is_new })
    }

    /// The program was not started: all is as it was.
    fn give_up(self) {
        if self.is_new {
            // An empty file that stays is no harm.
            drop(fs::remove_file(self.path));
        }
    }
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
        let value = |others: &str| beside_others(Path::new("/a/own.so"), others.as_ref());
        assert_eq!(value(""), "/a/own.so");
        assert_eq!(value("/b/x.so:/a/own.so y.so:"), "/a/own.so:/b/x.so:y.so");
        assert_eq!(without(Path::new("/a/own.so"), "/a/own.so:/b/x.so /a/own.so".as_ref()), "/b/x.so");
    }
}
