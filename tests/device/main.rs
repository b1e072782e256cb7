//! Devices, and the emulated CUDA driver that judges one of them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod choice;
mod cuda;
mod cuda_exit;
mod cuda_mapper;
mod cuda_queue;
mod cuda_reaper;
mod cuda_rig;
mod cuda_streams;
mod emulator;
mod emulator_judge;
mod host_tier;
mod overlap_soak;
mod pins_on_streams;
mod suite;
