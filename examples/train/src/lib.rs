//! Trains a Llama-shaped model whose parameters, gradients and moments exceed the memory of the process, a layer at a
//! time: see `docs/training.md`. [outcore_train] has the optimizer; candle differentiates a layer.

pub mod checkpoint;
pub mod file_id;
pub mod losses;
pub mod memory;
pub mod operations;
pub mod paged;
pub mod pass;
pub mod run;
pub mod shape;
pub mod text;
