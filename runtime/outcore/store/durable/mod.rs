//! Pages that outlive the process: a folder with slots for pages, and a manifest that says what is in which.
//!
//! The *ledger* decides: which slot a page is written to, what a commit writes, what is free again when. It does no
//! I/O. The *manifest* is read and written here, in `tree.rs` and `head.rs`; `manifest.rs` is the order of its writes
//! and syncs. `docs/durable-format.md` has the layout.

pub(crate) mod files;
pub(crate) mod folder;
pub(crate) mod generation;
mod head;
mod ledger;
mod manifest;
mod places;
#[cfg(test)]
mod power_cut;
pub(crate) mod table;
mod tree;

pub(crate) use head::KEPT_MOST;
pub(crate) use ledger::Ledger;
pub(crate) use manifest::{Terms, read_page};
