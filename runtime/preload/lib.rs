//! Loaded into a program by `LD_PRELOAD`: a read-only mapping of a large model file becomes a
//! [`Mapped`](outcore_mapped::Mapped) range, and one that is written privately a
//! [`MappedMut`](outcore_mapped::MappedMut) range of its own. Everything else goes to the kernel as it came.
//!
//! The functions here replace those of the C library, so they keep its contracts: they set `errno`, never unwind, and
//! do what the kernel would do where this library has no part in it.

mod answer;
mod begin;
mod calls;
mod copies;
mod descriptors;
mod engine;
mod fragments;
mod interrupts;
mod limit;
mod memory;
mod names;
mod opens;
mod pool;
mod predict;
mod routing;
mod settings;
mod timeline;
mod watch;
mod written;
