//! The pager by itself: which states it can reach, that everybody is served, what it costs.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod cost;
mod exhaustive;
mod liveness;
mod model;
mod policies;
mod world;
