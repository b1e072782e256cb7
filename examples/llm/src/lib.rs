//! Llama-family models over paged weights.
#![warn(missing_docs)]

mod config;
mod dtype;
mod error;
mod files;
pub mod kernels;
mod model;
mod pool;
mod sampler;
mod weights;

pub use config::{Arch, Config, RopePairs};
pub use dtype::WeightType;
pub use error::{Error, Result};
pub use files::{Container, ModelFiles};
pub use model::{KvType, Model, Options, PassTime, Session};
pub use pool::Pool;
pub use sampler::{Sampler, argmax};
pub use weights::{PlainWeights, Rows, Step, TensorId, WeightInfo, Weights};
