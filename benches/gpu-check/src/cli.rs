//! The command line of `gpu-probe`: runs parts, one record a line. Called by run.sh, each part in a process of its own.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use outcore::machine::MemoryLimit;
use outcore::{Bytes, PageSize};

use crate::{Failure, Part, Report, Scale, Scenario, Settings};

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ScaleName {
    Full,
    Quick,
    Tiny,
}

/// Measures what only a GPU can show.
#[derive(Debug, Parser)]
#[command(name = "gpu-probe", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print the names of the parts.
    Parts,
    /// Print the names of the children.
    Children,
    /// Print the GPU's name; exit with 3 and the reason if there is none.
    Gpu {
        /// Which, by number.
        #[arg(long, default_value_t = 0)]
        device: u32,
        /// Print its PCI address, by which other tools know it, instead of its name.
        #[arg(long)]
        pci: bool,
    },
    /// Run a part: one JSON record a line. Exits with 1 if it failed, with 3 if the machine has not what it needs.
    Run {
        /// Its name.
        part: Part,
        #[command(flatten)]
        options: Options,
    },
    /// Be a process in which the GPU is lost, that leaves `main` with a live runtime, or that forks.
    Child {
        /// Its name.
        scenario: Scenario,
        #[command(flatten)]
        options: Options,
    },
}

#[derive(Debug, Args)]
struct Options {
    /// Sizes and rounds; with tiny, which is for the emulated driver, the numbers mean nothing.
    #[arg(long, value_enum, default_value = "full")]
    scale: ScaleName,
    /// Which GPU, by number.
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// Where files are made; the model's stays there.
    #[arg(long)]
    dir: PathBuf,
    /// Host memory that may be used; what is free now unless given.
    #[arg(long)]
    memory: Option<Bytes>,
    /// Bytes of a page. Default: a GPU's usual page; with tiny, 2 MiB.
    #[arg(long)]
    page: Option<Bytes>,
}

impl Options {
    fn settings(self) -> Result<Settings, Failure> {
        let scale = match self.scale {
            ScaleName::Full => Scale::Full,
            ScaleName::Quick => Scale::Quick,
            ScaleName::Tiny => Scale::Tiny,
        };
        let memory = match self.memory {
            Some(memory) => memory,
            None => MemoryLimit::detect()?.free(),
        };
        let page = match (self.page, scale) {
            (Some(page), _) => PageSize::new(page)?,
            (None, Scale::Tiny) => PageSize::DEFAULT,
            (None, _) => PageSize::USUAL_ON_GPU,
        };
        Ok(Settings { scale, device: self.device, dir: self.dir, memory, page })
    }
}

/// The exit status where the machine lacks what a part needs.
const NOT_POSSIBLE: u8 = 3;
/// The exit status for a wrong command line.
const USAGE: u8 = 2;

fn line(text: &str) {
    // If the reader is gone, the line can be lost.
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

fn execute(command: Command) -> Result<(), Failure> {
    let mut report = Report::new(|record| {
        if let Ok(text) = serde_json::to_string(record) {
            line(&text);
        }
    });
    match command {
        Command::Parts => Part::ALL.iter().for_each(|part| line(part.name())),
        Command::Children => Scenario::ALL.iter().for_each(|scenario| line(scenario.name())),
        Command::Gpu { device, pci } => {
            let found = outcore_cuda::cuda_devices()?;
            let count = found.len();
            let gpu = found.into_iter().nth(device as usize).ok_or_else(|| {
                Failure::Impossible(format!("there is no GPU {device}: the CUDA driver sees {count}"))
            })?;
            line(if pci { &gpu.pci } else { &gpu.name });
        }
        Command::Run { part, options } => crate::run(part, &options.settings()?, &mut report)?,
        Command::Child { scenario, options } => crate::children::run(scenario, &options.settings()?, &mut report)?,
    }
    Ok(())
}

/// Runs the program with these arguments, its name first. Returns the exit status; errors go to standard error.
pub fn command_line(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let parsed = match Arguments::try_parse_from(arguments) {
        Ok(parsed) => parsed,
        Err(wrong) => {
            // If standard error is closed there is nobody left to read it.
            let _ = wrong.print();
            return if wrong.use_stderr() { USAGE } else { 0 };
        }
    };
    match execute(parsed.command) {
        Ok(()) => 0,
        Err(failure) => {
            eprintln!("gpu-probe: {failure}");
            if failure.is_of_the_machine() { NOT_POSSIBLE } else { 1 }
        }
    }
}
