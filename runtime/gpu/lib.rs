//! A device of [`outcore`] over any asynchronous GPU: frames behind addresses, copies on streams, and what has ended.
//!
//! Whoever has a GPU that reserves addresses, maps physical memory behind them, and has streams and events implements
//! [`Driver`], which names its calls; [`GpuDevice`] is the [`Device`](outcore::device::Device) over it. The crate
//! `outcore-cuda` is such a driver. A device that works in another way implements `Device` itself.
//!
//! What is here does not depend on whose GPU it is:
//!
//! - Mapping calls are made in runs, by a thread, ahead of the copies that need them.
//! - One thread learns for all streams which work has ended, and reports it.
//! - Copies of host memory that is not locked go through a locked buffer of their stream.
//! - Streams of others are adopted; nothing of ours becomes part of a graph that is captured on them.
//! - A lost device fails everything later with its first error, and what it borrowed is given back.

mod device;
mod driver;

pub use device::{GpuConfig, GpuDevice};
pub use driver::{BatchedCopy, Driver, Failure, Locked, Outcome};
