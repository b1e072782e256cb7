//! The runtime as programs see it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod chunks;
mod compute;
mod concurrency;
mod dlpack;
mod durable;
mod durable_damage;
mod durable_kills;
mod failure;
mod fuzzed_state;
mod link_server;
mod load;
mod panics;
mod private;
mod readme;
mod refusals;
mod scopes;
mod soak;
mod stream_pins;
mod streaming;
mod strict;
mod uses;
mod walkers;
mod workload;
