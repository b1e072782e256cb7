//! Llama-family models over paged weights.
#![warn(missing_docs)]

mod chat;
mod config;
mod dtype;
mod error;
mod files;
pub mod kernels;
mod model;
mod paged;
mod pool;
mod sampler;
pub mod synthetic;
mod tokenizer;
mod weights;

pub use chat::{ChatTemplate, Message};
pub use config::{Arch, Config, RopePairs};
pub use dtype::WeightType;
pub use error::{Error, Result};
pub use files::{Container, ModelFiles};
pub use model::{KvType, Model, Options, PassTime, Session};
pub use paged::PagedWeights;
pub use pool::Pool;
pub use sampler::{Sampler, argmax};
pub use tokenizer::{TextStream, Tokenizer};
pub use weights::{PlainWeights, Rows, Step, TensorId, WeightInfo, Weights};
