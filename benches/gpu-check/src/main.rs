//! `gpu-probe`: runs parts, one record a line. Called by run.sh, each part in a process of its own.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use outcore::machine::MemoryLimit;
use outcore::{Bytes, PageSize};
use outcore_gpu_check::{Failure, Part, Report, Scale, Settings, run};

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ScaleName {
    Full,
    Quick,
    Tiny,
}

/// Measures what only a GPU can show.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print the names of the parts.
    Parts,
    /// Exit with 0 if there is a GPU, with 3 and the reason if there is not.
    Gpu {
        /// Which, by number.
        #[arg(long, default_value_t = 0)]
        device: u32,
    },
    /// Run a part: one JSON record a line. Exits with 1 if it failed, with 3 if the machine has not what it needs.
    Run {
        /// Its name.
        part: Part,
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
    },
}

/// The exit status where the machine lacks what a part needs.
const NOT_POSSIBLE: u8 = 3;

fn settings(
    scale: ScaleName,
    device: u32,
    dir: PathBuf,
    memory: Option<Bytes>,
    page: Option<Bytes>,
) -> Result<Settings, Failure> {
    let scale = match scale {
        ScaleName::Full => Scale::Full,
        ScaleName::Quick => Scale::Quick,
        ScaleName::Tiny => Scale::Tiny,
    };
    let memory = match memory {
        Some(memory) => memory,
        None => MemoryLimit::detect()?.free(),
    };
    let page = match (page, scale) {
        (Some(page), _) => PageSize::new(page)?,
        (None, Scale::Tiny) => PageSize::DEFAULT,
        (None, _) => PageSize::USUAL_ON_GPU,
    };
    Ok(Settings { scale, device, dir, memory, page })
}

fn execute(command: Command) -> Result<(), Failure> {
    let out = std::io::stdout();
    let line = |text: &str| {
        // If the reader is gone, the line can be lost.
        let _ = writeln!(out.lock(), "{text}");
    };
    match command {
        Command::Parts => Part::ALL.iter().for_each(|part| line(part.name())),
        Command::Gpu { device } => {
            let found = outcore_cuda::cuda_devices()?;
            let count = found.len();
            let gpu = found.into_iter().nth(device as usize).ok_or_else(|| {
                Failure::Impossible(format!("there is no GPU {device}: the CUDA driver sees {count}"))
            })?;
            line(&gpu.name);
        }
        Command::Run { part, scale, device, dir, memory, page } => {
            let settings = settings(scale, device, dir, memory, page)?;
            let mut report = Report::new(|record| {
                if let Ok(text) = serde_json::to_string(record) {
                    line(&text);
                }
            });
            run(part, &settings, &mut report)?;
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match execute(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("gpu-probe: {failure}");
            if failure.is_of_the_machine() { ExitCode::from(NOT_POSSIBLE) } else { ExitCode::FAILURE }
        }
    }
}
