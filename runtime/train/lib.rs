//! Optimizers whose parameters, states and gradients are paged by an [outcore] runtime.
//!
//! An [`Optimizer`] trains more parameters than there is memory for their state: `f32` parameters and, for AdamW, two
//! `f32` moments take 12 bytes each, gradients 2 or 4 more. A step brings them up block by block, updates a block in
//! one pass, and writes each page once. In a [durable](outcore::durable) folder every step can be a checkpoint: what a
//! commit adds is the pages that memory would have kept.
//!
//! ```
//! use outcore::durable::DurableOptions;
//! use outcore::{Bytes, DType, PageSize, PolicyKind, Runtime};
//! use outcore_train::{AdamW, Group, Optimizer, Schedule};
//!
//! # let folder = tempfile::tempdir_in(".").unwrap();
//! # let folder = folder.path().join("state");
//! let runtime = Runtime::builder()
//!     .page_size(PageSize::new(Bytes::kib(64))?)
//!     .device_budget(Bytes::mib(4))
//!     .policy(PolicyKind::Plan)
//!     .open()?;
//! let state = runtime.open_durable(&folder, DurableOptions::default())?;
//! let weights = Group::new(AdamW::default(), Schedule::constant(1e-3)).parameter("weights", &[1024, 1024]);
//! let mut optimizer = Optimizer::builder(&runtime).group(weights).gradients(DType::BF16).clip(1.0).open_in(&state)?;
//! // What a program computes, a tensor or some rows of it at a time.
//! optimizer.accumulate("weights", 0, &vec![0.5; 1024 * 1024], 1.0)?;
//! let step = optimizer.step(1.0)?;
//! assert_eq!((step.number, step.norm), (1, 512.0));
//! optimizer.commit(&serde_json::json!({ "tokens": 4096 }))?;
//! # drop((optimizer, state));
//! # runtime.close()?;
//! # Ok::<(), outcore::Error>(())
//! ```

#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod errors;
mod gradients;
mod group;
mod layout;
mod loss_scale;
mod note;
mod optimizer;
mod options;
mod paged;
mod rule;
mod schedule;
mod sweep;
mod torn;

#[cfg(feature = "cuda")]
pub use cuda::CudaKernels;
pub use group::Group;
pub use loss_scale::LossScale;
pub use optimizer::{Optimizer, Planned, Step};
pub use options::{NonFinite, OptimizerBuilder};
pub use rule::{AdamW, DeviceRule, Moment, Rule, Sgd};
pub use schedule::Schedule;
