//! The page word: the part of a page that is touched without the latch, and what is told of it later.

pub(crate) mod access;
pub mod pin;
pub mod state;
