//! A CUDA driver in host memory. See README.md for what it shows and what it does not.
//!
//! `driver` holds all state behind one lock and is where every call enters; the state's parts are in `state`. `work`
//! says what can be put on a stream, `issue` gives it to the judge, and `stream` runs it, unless the stream captures
//! (`capture`). `judge` and `clock` decide whether two operations were ordered, `inject` makes things go wrong. The
//! other modules are the driver API by subject; `exports` is what tests call.

mod abi;
mod capture;
mod clock;
mod context;
mod copy;
mod driver;
mod event;
mod exports;
mod graph;
mod inject;
mod issue;
mod judge;
mod launch;
mod locked;
mod managed;
mod memory;
mod module;
mod reach;
mod state;
mod stream;
mod vmm;
mod work;
