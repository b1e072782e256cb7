//! The parts of the driver's state, by subject: objects and tables of them. Calls act on them under the driver's lock.

pub mod contexts;
pub mod events;
pub mod graphs;
pub mod locked;
pub mod memory;
pub mod modules;
pub mod streams;
