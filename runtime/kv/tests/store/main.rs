//! What a store of blocks promises: over restarts, crashes, damage and bad input.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

mod blocks;
mod corpus;
mod cuts;
mod damage;
mod failures;
mod folder;
mod fuzzed;
mod kills;
mod threads;
mod whole;
