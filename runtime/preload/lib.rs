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
mod end;
mod engine;
mod experts;
mod files;
mod forks;
mod fragments;
mod given;
mod inside;
mod interrupts;
mod limit;
mod map;
mod memory;
mod names;
mod open_calls;
mod opens;
mod pool;
mod predict;
mod process;
mod ranges;
mod routing;
mod routing_state;
mod settings;
mod sides;
mod sys;
mod timeline;
mod watch;
mod written;
