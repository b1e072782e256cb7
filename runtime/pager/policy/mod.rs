//! Policies: which page goes when a frame is needed, and which page is filled before it is used.
//!
//! A policy holds no bytes and no page state; it keeps an order. The pager tells it of every use, in order, and of
//! every page that enters or leaves the device tier, and asks it for victims. Policies are deterministic.

mod active;
mod arc;
mod auto;
pub mod bare;
mod beside;
mod build;
mod classes;
mod contract;
#[cfg(test)]
mod crowd;
mod cycle;
mod division;
#[doc(hidden)]
pub mod guarded;
#[cfg(test)]
mod interleaved;
mod kind;
mod kv;
mod line;
mod lirs;
mod lru;
mod names;
pub mod opt;
mod outside;
#[doc(hidden)]
pub mod parts;
mod place;
mod plan;
mod queues;
mod s3fifo;
mod scores;
mod shares;
mod sketch;
mod standing;
#[cfg(test)]
mod tests;
mod two_q;
mod wtinylfu;

pub(crate) use contract::offer_each;
pub use contract::{Policy, Take, WalkerPlace, Want};
pub use kind::PolicyKind;
pub use lru::LruPolicy;
pub use plan::PlanPolicy;
#[doc(hidden)]
pub use plan::found;
