//! The command line of `outcore`.
//!
//! Exit status: 0 if the command is done; 1 if it failed, and standard error says why and what to do; 2 if the command
//! line was not understood. `outcore run` has the program's, 127 if there is no such program, and 126 if it cannot be
//! executed.

mod arguments;
mod bar;
mod comparison;
mod config;
// Who asks for GPUs is chosen by file; everything above sees the same names.
#[cfg_attr(not(feature = "cuda"), path = "cuda_absent.rs")]
mod cuda;
mod curve;
mod doctor;
mod export;
mod here;
mod inspect;
mod kv;
mod library;
mod loads;
mod named;
mod output;
mod plan;
mod policies;
mod printed;
mod probe;
mod replay;
mod report;
mod residency;
mod run;
mod simulate;
mod state;
mod top;
mod trial;

use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use outcore_lab::sim::AnyPolicy;
pub use outcore_lab::sim::OwnPolicy;

use printed::render;

/// Tensors larger than memory: what this machine allows, how fast its disk is, what a model needs and how fast it can
/// be.
#[derive(Debug, Parser)]
#[command(name = "outcore", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Say what works on this machine, what was chosen, and what would make it faster
    Doctor(doctor::Options),
    /// Measure the ceilings: reads of a file by block size and depth, latency, memory copies
    Probe(probe::Options),
    /// Show a model's tensors and pages, and how much of it memory budgets would hold
    Inspect(inspect::Options),
    /// Say how much memory a job needs, how much of it would move, how fast that can be, and what would help
    Plan(plan::Options),
    /// Run a captured, recorded or synthetic trace through policies, and compare their hits with the best possible
    Policies(policies::Options),
    /// Make one HTML page from what `generate`, `policies`, `simulate` and `probe` found
    Report(report::Options),
    /// Forecast how long passes over a model take on a machine that is only described
    Simulate(simulate::Options),
    /// Run a program whose model files are larger than memory: their pages come and go within a budget
    Run(run::Options),
    /// Look into a store of keys and values, or replay requests through a pool of them
    Kv(kv::Options),
    /// Write a model to a GGUF file with weights of another type, in little memory
    Export(export::Options),
    /// Look into a folder of durable tensors, check it, copy it to a safetensors file, or copy a model into it
    State(state::Options),
    /// Show what a program that was started by `outcore run` does: memory, reads, hits, waits, layers in memory
    Top(top::Options),
}

/// A command of a program's own, beside those of `outcore`.
#[derive(Clone, Debug)]
pub struct OwnCommand {
    parser: clap::Command,
    run: fn(&ArgMatches) -> u8,
}

impl OwnCommand {
    /// The command that `parser` is named after, which may be none of `outcore`'s. `run` gets what was given to it, and
    /// returns the exit status.
    pub fn new(parser: clap::Command, run: fn(&ArgMatches) -> u8) -> Self {
        Self { parser, run }
    }
}

/// Reads the arguments of the process, does what they say, and writes what was found.
pub fn main() -> ExitCode {
    main_with(&[])
}

/// As [`main`], for a program with policies of its own: `policies`, `simulate` and `report` know them by the names of
/// their entries, list them in `--help`, and show those names.
pub fn main_with(own: &[OwnPolicy]) -> ExitCode {
    main_from(std::env::args_os(), own, &[]).into()
}

/// As [`main_with`], of the arguments `args`, of which the first is the program's name, and with `commands` beside
/// those of `outcore`. Returns the exit status, with which the process should end: nothing is left in a buffer.
/// `outcore run` returns only if the program did not start, which else takes the place of this one.
pub fn main_from(args: impl IntoIterator<Item = OsString>, own: &[OwnPolicy], commands: &[OwnCommand]) -> u8 {
    let parser = command(own).subcommands(commands.iter().map(|command| command.parser.clone()));
    let given = match parser.try_get_matches_from(args) {
        Ok(given) => given,
        Err(error) => return explain(&error),
    };
    if let Some((name, given)) = given.subcommand()
        && let Some(command) = commands.iter().find(|command| command.parser.get_name() == name)
    {
        return (command.run)(given);
    }
    match Arguments::from_arg_matches(&given) {
        Ok(arguments) => run_command(arguments.command, own),
        Err(error) => explain(&error),
    }
}

/// Prints a help or what was not understood. Returns the exit status.
fn explain(error: &clap::Error) -> u8 {
    // If the stream is closed, the message is lost.
    drop(error.print());
    drop(io::stdout().flush());
    // clap has 0 and 2.
    error.exit_code().try_into().unwrap_or(FAILED)
}

/// The exit status of a command that failed.
const FAILED: u8 = 1;

fn run_command(command: Command, own: &[OwnPolicy]) -> u8 {
    let done = match command {
        Command::Doctor(options) => doctor::run(&options).map(|report| render(&report, options.json)),
        Command::Probe(options) => probe::run(&options).map(|report| render(&report, options.json)),
        Command::Inspect(options) => inspect::run(&options).map(|report| render(&report, options.json)),
        Command::Kv(options) => kv::run(&options).map(|report| render(&report, options.json())),
        Command::Export(options) => export::run(&options).map(|report| render(&report, options.json)),
        Command::State(options) => state::run(&options).map(|report| render(&report, options.json())),
        Command::Plan(options) => plan::run(&options).map(|report| render(&report, options.json)),
        Command::Policies(options) => policies::run(&options, own).map(|report| render(&report, options.json)),
        Command::Report(options) => report::run(&options, own).map(|report| render(&report, options.json)),
        Command::Simulate(options) => simulate::run(&options).map(|report| render(&report, options.json)),
        Command::Top(options) => {
            top::run(&options).map(|view| view.map_or(Ok(String::new()), |view| render(&view, options.json)))
        }
        // The program takes the place of this one.
        Command::Run(options) => {
            let run::Failure { error, status } = run::run(&options);
            fail(&error.to_string());
            return status;
        }
    };
    let written = match done {
        Ok(Ok(text)) => {
            let mut output = io::stdout().lock();
            output.write_all(text.as_bytes()).and_then(|()| output.flush())
        }
        Ok(Err(cause)) => Err(cause.into()),
        Err(error) => return fail(&error.to_string()),
    };
    match written {
        // The reader of the output has seen enough.
        Err(cause) if cause.kind() == ErrorKind::BrokenPipe => 0,
        Err(cause) => fail(&format!("cannot write the report: {cause} (check where standard output goes)")),
        Ok(()) => 0,
    }
}

/// Returns the command line, in which `own` are policies beside those that ship. Its help names them.
fn command(own: &[OwnPolicy]) -> clap::Command {
    let (compared, simulated) = (own.to_vec(), own.to_vec());
    let names = own.iter().map(|own| own.name()).collect::<Vec<_>>().join(", ");
    let with_own = |policy: clap::Arg| match policy.get_help() {
        Some(help) if !names.is_empty() => {
            let help = format!("{help}. This program's own: {names}");
            policy.help(help)
        }
        _ => policy,
    };
    Arguments::command()
        .mut_subcommand("policies", |command| {
            command.mut_arg("policy", |policy| {
                with_own(policy).value_parser(move |name: &str| policies::Choice::find(name, &compared))
            })
        })
        .mut_subcommand("simulate", |command| {
            command.mut_arg("policy", |policy| {
                with_own(policy).value_parser(move |name: &str| AnyPolicy::find(name, &simulated))
            })
        })
        .mut_subcommand("report", |command| match &*names {
            "" => command,
            _ => command.after_help(format!("Captures run through all policies, with this program's own: {names}")),
        })
}

fn fail(message: &str) -> u8 {
    // If standard error is closed, the message is lost.
    drop(writeln!(io::stderr(), "outcore: {message}"));
    FAILED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_programs_own_command_gets_its_arguments() {
        let status = clap::Arg::new("status").required(true).value_parser(clap::value_parser!(u8));
        let parser = clap::Command::new("more").arg(status);
        let own = OwnCommand::new(parser, |given| given.get_one("status").copied().unwrap_or(FAILED));
        let main = |words: &[&str]| main_from(words.iter().map(OsString::from), &[], std::slice::from_ref(&own));
        assert_eq!(main(&["outcore", "more", "7"]), 7);
        assert_eq!(main(&["outcore", "more", "--help"]), 0);
        for wrong in [&["outcore"][..], &["outcore", "more"], &["outcore", "more", "x"], &["outcore", "mroe", "7"]] {
            assert_eq!(main(wrong), 2, "{wrong:?}");
        }
    }
}
