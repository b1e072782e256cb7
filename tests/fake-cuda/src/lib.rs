//! A CUDA driver in host memory. See README.md for what it shows and what it does not.
//!
//! `driver` holds all state behind one lock and is where every call enters. `stream` runs work, `work` says what work
//! is and gives it to the judge, `judge` and `clock` decide whether two operations were ordered, `inject` makes things
//! go wrong. The other modules are the driver API by subject; `exports` is what tests call.

mod abi;
mod clock;
mod context;
mod copy;
mod driver;
mod event;
mod exports;
mod graph;
mod inject;
mod judge;
mod locked;
mod managed;
mod memory;
mod module;
mod stream;
mod vmm;
mod work;
