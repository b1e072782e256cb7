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
mod model;
mod parts;
mod processor;
mod report;

use std::path::PathBuf;

use outcore::{Bytes, PageSize};

pub use children::{LEAVING, Scenario};
pub use cli::command_line;
pub use parts::Part;
pub use report::{Goal, Record, Report, Spread, Unit};

/// Why a part could not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// A call of the CUDA driver, or of cuBLAS, was refused.
    #[error("{what}: {code} ({text})")]
    Cuda {
        /// What the call was for.
        what: &'static str,
        /// The driver's name of the error.
        code: String,
        /// The driver's description.
        text: String,
    },
    /// outcore failed.
    #[error(transparent)]
    Outcore(#[from] outcore::Error),
    /// The operating system refused something.
    #[error("{what}: {cause}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        cause: std::io::Error,
    },
    /// The machine lacks what this needs. This is not a failure of outcore.
    #[error("not possible here: {0}")]
    Impossible(String),
    /// Bytes are not what they should be.
    #[error("wrong bytes: {0}")]
    Wrong(String),
}

impl Failure {
    /// Whether the machine is the reason (it has no GPU, say), and not outcore or the driver.
    pub fn is_of_the_machine(&self) -> bool {
        use outcore::ErrorKind as Kind;
        match self {
            Self::Impossible(_) => true,
            Self::Outcore(error) => matches!(error.kind(), Kind::Unsupported | Kind::NotFound),
            _ => false,
        }
    }

    pub(crate) fn io(what: impl Into<String>, cause: std::io::Error) -> Self {
        Self::Io { what: what.into(), cause }
    }
}

/// How large the inputs are, and how many rounds there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// The scale at which results are made.
    Full,
    /// Smaller inputs and fewer rounds.
    Quick,
    /// Megabytes: for the emulated driver. The numbers mean nothing.
    Tiny,
}

/// What a part runs with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Sizes and rounds.
    pub scale: Scale,
    /// Which GPU.
    pub device: u32,
    /// Where files are made. Parts leave the model's file there, for the next.
    pub dir: PathBuf,
    /// Host memory the parts may use in all.
    pub memory: Bytes,
    /// Bytes of a page. The verdicts are about this size.
    pub page: PageSize,
}

impl Settings {
    pub(crate) fn pick<T>(&self, full: T, quick: T, tiny: T) -> T {
        match self.scale {
            Scale::Full => full,
            Scale::Quick => quick,
            Scale::Tiny => tiny,
        }
    }

    pub(crate) fn rounds(&self) -> usize {
        self.pick(5, 3, 2)
    }
}

/// Runs a part. If it fails, what it found before that has been reported.
///
/// # Errors
/// What kept it from going on.
pub fn run(part: Part, settings: &Settings, report: &mut Report<'_>) -> Result<(), Failure> {
    parts::run(part, settings, report)
}
