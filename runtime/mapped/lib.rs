//! Files larger than memory as plain slices.
//!
//! [`Mapped`] looks like a read-only mapping of a file, and [`MappedMut`] like one that is written privately. Behind
//! them, pages come and go under the budgets of an [outcore] runtime: a touch of a page that is not there is a fault,
//! which this crate handles by `userfaultfd(2)`.
//!
//! ```no_run
//! use std::fs::File;
//!
//! use outcore::Bytes;
//! use outcore_mapped::{Mapped, builder_for};
//!
//! // In place of `memmap2::Mmap::map`:
//! let file = Mapped::map(&File::open("model.gguf")?)?;
//! assert_eq!(&file[..4], b"GGUF");
//!
//! // Within a budget, beside tensors and pins of the same runtime:
//! let runtime = builder_for("model.gguf")?.device_budget(Bytes::gib(1)).open()?;
//! let file = Mapped::open(&runtime, "model.gguf")?;
//! assert_eq!(&file[..4], b"GGUF");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bell;
mod device;
mod expected;
mod experts;
mod faults;
mod followed;
mod foresight;
mod handler;
mod in_turn;
mod joined;
mod keeper;
mod layers;
pub mod live;
mod looks;
mod mapped;
mod memory;
mod model;
mod options;
mod order;
mod outline;
mod remembered;
mod row;
mod scan;
mod tables;
mod telling;
mod turns;
mod uffd;
mod uses;

pub use device::Faulting;
pub use experts::LayerExperts;
pub use mapped::{LEAST_FRAMES, Mapped, MappedMut, Written, builder_for, builder_on};
pub use options::MapOptions;
pub use uffd::Mechanism;
