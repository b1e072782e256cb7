//! `outcore top`: what a program that was started by `outcore run` does now.

mod ask;
mod screen;
mod view;

use std::io::{IsTerminal, stdout};
use std::time::Duration;

use clap::Args;
use outcore::{Error, ErrorKind, Result};

use ask::Process;
pub use view::View;

#[derive(Debug, Args)]
pub struct Options {
    /// The process: a program that was started by `outcore run` [default: the only one there is]
    #[arg(value_name = "PID")]
    process: Option<u32>,
    /// Print what there is as text after one interval, and end
    #[arg(long)]
    once: bool,
    /// As --once, but print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Seconds between looks
    #[arg(long, value_name = "SECONDS", value_parser = interval, default_value = "1")]
    interval: Duration,
}

/// Seconds of an interval: the least, so that looking costs little, and the most.
const INTERVAL: (f64, f64) = (0.1, 3600.0);

fn interval(text: &str) -> std::result::Result<Duration, String> {
    let (least, most) = INTERVAL;
    let seconds: f64 = text.parse().map_err(|_| format!("seconds are expected, {least} to {most}"))?;
    if !(least..=most).contains(&seconds) {
        return Err(format!("an interval has {least} to {most} seconds"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Watches a process until it ends or the user does. Returns a view if one is to be printed.
///
/// # Errors
/// Those of [`Process::look`]; `Unsupported` without a terminal.
pub fn run(options: &Options) -> Result<Option<View>> {
    let process = match options.process {
        Some(id) => Process::find(id)?,
        None => Process::only()?,
    };
    let first = process.look()?;
    if options.once || options.json {
        std::thread::sleep(options.interval);
        let now = process.look()?;
        return Ok(Some(View::new(&process.program, now, &first)));
    }
    if !stdout().is_terminal() {
        return Err(Error::new(ErrorKind::Unsupported, "standard output is no terminal")
            .remedy("give --once for text, or --json"));
    }
    screen::watch(&process, first, options.interval)?;
    Ok(None)
}
