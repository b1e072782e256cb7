//! The parts of `make gpu-check` that need a GPU: what the driver does by itself (copies, mapping, locking, events),
//! and what the runtime makes of it (overlap, passes over models larger than the GPU's budget, first page, pins).
//!
//! Each part writes `Record`s as it goes, so that a run that is cut short keeps what it had found. Every number stands
//! beside a ceiling that the same part measured. The parts also run on the emulated driver of `tests/fake-cuda`. That
//! shows that they work and that their calls are in order; the numbers then mean nothing.

#![cfg(feature = "cuda")]

mod children;
mod cli;
mod clocks;
mod compute;
mod cuda;
mod failure;
mod model;
mod parts;
mod processor;
mod report;
mod settings;

pub use children::{LEAVING, Scenario};
pub use cli::command_line;
pub use failure::Failure;
pub use parts::Part;
pub use report::{Goal, Record, Report, Spread, Unit};
pub use settings::{Scale, Settings};

/// Runs a part. If it fails, what it found before that has been reported.
///
/// # Errors
/// What kept it from going on.
pub fn run(part: Part, settings: &Settings, report: &mut Report<'_>) -> Result<(), Failure> {
    parts::run(part, settings, report)
}
