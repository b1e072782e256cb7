//! The parts, in the order in which they run: what is quick and says most comes first.

mod budget;
mod copies;
mod disk;
mod events;
mod first_page;
mod lock;
mod machine;
mod managed;
mod mapping;
mod overlap;
mod oversized;
pub(crate) mod pass;
mod pin;
mod queue;
mod soak;
mod sweep;
mod variants;

use std::fmt;
use std::str::FromStr;

use crate::report::Report;
use crate::{Failure, Settings};

/// Something that is measured by itself, in a process of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Part {
    /// What the machine has.
    Machine,
    /// Copies by page size, up, down and both ways; batches against loops.
    Copies,
    /// Mapping, setting access and unmapping, alone and beside a kernel.
    Mapping,
    /// Locking host memory: registered against allocated.
    Lock,
    /// Other ways of mapping: aliases, parts of handles, two threads.
    Variants,
    /// What a stream's queue takes until a call waits for the GPU.
    Queue,
    /// What events cost.
    Events,
    /// Pinning a tensor that is resident.
    Pin,
    /// Reads from the local disk, by block and depth.
    Disk,
    /// The first page after opening, while a large host tier is being locked.
    FirstPage,
    /// How much of the transfers hides behind matrix products.
    Overlap,
    /// Right bytes while copies, kernels and evictions overlap.
    Soak,
    /// Passes over a model in host memory, several times larger than the device budget.
    Oversized,
    /// Passes over a model of which most comes from the disk.
    ThreeTier,
    /// Passes by page size and by lookahead.
    Sweep,
    /// A budget of nine tenths of the GPU's memory: opening, closing, memory beside it.
    Budget,
    /// Passes over CUDA's managed memory, moved ahead of use, beside the runtime's.
    Managed,
}

impl Part {
    /// All of them.
    pub const ALL: [Self; 17] = [
        Self::Machine,
        Self::Queue,
        Self::Copies,
        Self::Mapping,
        Self::Variants,
        Self::Events,
        Self::Lock,
        Self::Pin,
        Self::Disk,
        Self::FirstPage,
        Self::Soak,
        Self::Overlap,
        Self::Oversized,
        Self::ThreeTier,
        Self::Sweep,
        Self::Budget,
        Self::Managed,
    ];

    /// What it is called on the command line and in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Machine => "machine",
            Self::Copies => "copies",
            Self::Mapping => "mapping",
            Self::Lock => "lock",
            Self::Events => "events",
            Self::Pin => "pin",
            Self::Disk => "disk",
            Self::FirstPage => "first-page",
            Self::Soak => "soak",
            Self::Overlap => "overlap",
            Self::Oversized => "oversized",
            Self::ThreeTier => "three-tier",
            Self::Sweep => "sweep",
            Self::Variants => "mapping-variants",
            Self::Queue => "queue",
            Self::Budget => "budget",
            Self::Managed => "managed",
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|part| part.name() == text).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|part| part.name()).collect();
            format!("there is no part {text:?}; there are: {}", names.join(" "))
        })
    }
}

pub(crate) fn run(part: Part, settings: &Settings, report: &mut Report<'_>) -> Result<(), Failure> {
    match part {
        Part::Machine => machine::run(settings, report),
        Part::Copies => copies::run(settings, report),
        Part::Mapping => mapping::run(settings, report),
        Part::Lock => lock::run(settings, report),
        Part::Events => events::run(settings, report),
        Part::Pin => pin::run(settings, report),
        Part::Disk => disk::run(settings, report),
        Part::FirstPage => first_page::run(settings, report),
        Part::Soak => soak::run(settings, report),
        Part::Overlap => overlap::run(settings, report),
        Part::Oversized => oversized::in_host_memory(settings, report),
        Part::ThreeTier => oversized::from_disk(settings, report),
        Part::Sweep => sweep::run(settings, report),
        Part::Variants => variants::run(settings, report),
        Part::Queue => queue::run(settings, report),
        Part::Budget => budget::run(settings, report),
        Part::Managed => managed::run(settings, report),
    }
}
