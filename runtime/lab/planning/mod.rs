//! What memory a job needs, what moves in each pass, and how long a pass takes.
//!
//! No file is opened and nothing is measured here. [`Shape`] comes from a header that was read, or from numbers.
//! [`Job::memory`] counts bytes class by class. [`forecast`] says where pages would be by the rules of the runtime and
//! its policy `plan`, and simulates what a pass moves and how long it takes. It counts computing if its time or the
//! [machine](Compute) is known. [`advice`] and [`target`] make changes and forecast again. The formulas and their
//! sources are in `docs/planning.md`.
//!
//! ```
//! use outcore_lab::planning::{Bandwidth, Given, Job, KvType, Resources, Shape, Work, forecast};
//! use outcore_lab::sim::MachineModel;
//! use outcore::{Bytes, DType};
//!
//! let given = Given {
//!     parameters: "70B".parse()?,
//!     dtype: DType::BF16,
//!     layers: Some(80),
//!     hidden: Some(8192),
//!     heads: Some(64),
//!     kv_heads: Some(8),
//!     ffn: Some(28672),
//!     vocab: Some(32000),
//!     gated: true,
//!     experts: None,
//! };
//! let shape = Shape::estimate(&given)?;
//! let job = Job { shape, work: Work::Infer { kv: KvType::F16 }, context: 4096, batch: 1, headroom_percent: 20 };
//! assert_eq!(job.memory(true)?.kv, Bytes::mib(1280));
//!
//! let resources = Resources {
//!     device: Bytes::gib(80),
//!     host: Bytes::gib(64),
//!     disk: "5GB/s".parse()?,
//!     disk_write: None,
//!     disk_latency: std::time::Duration::ZERO,
//!     disk_depth: outcore::store::QueueDepth::DEFAULT,
//!     link: Some("50GB/s".parse()?),
//!     link_shared: false,
//!     link_latency: std::time::Duration::ZERO,
//!     compute: None,
//! };
//! let run = forecast(&job, &resources)?.run.expect("80 GiB hold more than activations");
//! assert!(run.paged.disk_read > Bytes::gib(10) && run.tokens_per_second() < Some(0.5));
//!
//! // For a known machine, the compute time of a pass can be estimated, too.
//! let resources = Resources { device: Bytes::gib(200), ..Resources::of(&MachineModel::named("h200")?)? };
//! let run = forecast(&job, &resources)?.run.expect("200 GiB hold all of it");
//! assert!(run.is_resident() && run.pass_s() > Some(0.028) && run.pass_s() < Some(0.035));
//! # Ok::<(), outcore::Error>(())
//! ```

mod advice;
mod compute;
mod declared;
mod estimate;
mod experts;
mod forecast;
mod known;
mod layer_at_a_time;
mod layout;
mod memory;
mod policy;
mod resources;
mod shape;
mod simulated;
mod units;

pub use advice::{Change, Outcome, Target, advice, target};
pub use compute::Compute;
pub use declared::{Declared, DeclaredExperts, values_of};
pub use estimate::{Given, GivenExperts};
pub use experts::Experts;
pub use forecast::{Bottleneck, Forecast, Paged, Recommended, Run, forecast};
pub use known::KnownModel;
pub use layer_at_a_time::LayerAtATime;
pub use memory::{Checkpointing, Job, KvType, Memory, Optimizer, Work};
pub use resources::Resources;
pub use shape::Shape;
pub use units::{Bandwidth, Parameters};

#[cfg(test)]
mod measured;
#[cfg(test)]
mod tests;
