//! Llama-family models over weights whose bytes somebody else makes resident.
//!
//! [`ModelFiles`] reads the headers of a GGUF file or of a folder with safetensors. A [`Weights`] gives the bytes of
//! rows when they are wanted: [`PlainWeights`] holds the whole model in memory, and a paged implementation holds as
//! much of it as it may. [`Model`] binds the two; a [`Session`] is one sequence with its keys and values. Programs for
//! any device are written against [`Passes`].
//!
//! ```no_run
//! use std::sync::Arc;
//! use outcore_llm::{ChatTemplate, KvType, Message, Model, ModelFiles, Options};
//! use outcore_llm::{PlainWeights, Sampler, Session, Tokenizer};
//!
//! let files = ModelFiles::open("models/SmolLM2-135M-Instruct.Q4_1.gguf")?;
//! let tokenizer = Tokenizer::load(&files)?;
//! let weights = Arc::new(PlainWeights::read(&files)?);
//! let model = Arc::new(Model::load(&files, weights, Options::default())?);
//!
//! let chat = [Message::new("user", "What is virtual memory?")];
//! let prompt = match ChatTemplate::load(&files, &tokenizer)? {
//!     Some(template) => tokenizer.encode_chat(&template.render(&chat, true)?)?,
//!     None => tokenizer.encode(&chat[0].content, true)?,
//! };
//! let mut session = Session::new(model, prompt.len() + 64, KvType::F32)?;
//! let (mut sampler, mut text) = (Sampler::greedy(), tokenizer.stream());
//! let mut logits = session.forward(&prompt)?;
//! while session.len() < session.capacity() {
//!     let token = sampler.sample(&logits);
//!     if tokenizer.is_end(token) {
//!         break;
//!     }
//!     print!("{}", text.push(token));
//!     logits = session.forward(&[token])?;
//! }
//! # Ok::<(), outcore_llm::Error>(())
//! ```
//!
//! Results are deterministic: the number of threads, the size of tiles and how a prompt is cut into passes change no
//! bit. Another processor, whose kernels add in another order, may give other last bits.
#![warn(missing_docs)]

mod arch;
mod architecture;
mod arrivals;
mod block_attention;
pub mod budget;
mod chat;
mod chat_bounds;
mod config;
// What computes on a GPU is chosen by file; everything above sees the same names.
#[cfg_attr(not(feature = "cuda"), path = "cuda_absent.rs")]
mod cuda;
mod draft_model;
pub mod drafts;
mod dtype;
mod error;
mod expert_pass;
mod experts;
mod files;
mod fp8;
mod generation;
mod host;
pub mod kernels;
mod known;
mod model;
mod mxfp4;
pub mod pace;
mod paged;
pub mod paged_kv;
mod passes;
mod plain;
mod plain_keys;
mod pool;
mod product;
mod rotary;
mod sampler;
pub mod synthetic;
mod tokenizer;
mod waits;
mod weights;

pub use arch::{Arch, Scoring};
pub use architecture::pass_bytes;
pub use chat::{Call, ChatTemplate, Message, Turn};
pub use config::{Activation, Config, LongRope, Mixture, RopePairs, Window};
pub use cuda::{CudaDeviceSelector, CudaModel, CudaSession, Gpu};
pub use draft_model::{DraftFiles, DraftModel, DraftSession};
pub use dtype::{KvType, ON_GPU, WeightType};
pub use error::{Error, Result};
pub use files::{BESIDE, Container, ModelFiles};
pub use generation::GenerationDefaults;
pub use model::{Model, Options, Session};
pub use outcore_quants as quants;
pub use paged::PagedWeights;
pub use paged_kv::PagedKeys;
pub use passes::{AnySession, Logits, Output, Part, PassCounts, PassError, PassTime, Passes, Timing};
pub use plain::PlainWeights;
pub use pool::Pool;
pub use sampler::{Penalties, Sampler, argmax};
pub use tokenizer::{Decoder, TextStream, Tokenizer, Unfinished};
pub use weights::{Arrivals, Arrived, Rows, Step, TensorId, WeightInfo, Weights};
