//! Makes policies by their kinds.

use super::arc::ArcPolicy;
use super::auto::AutoPolicy;
use super::kv::KvPolicy;
use super::lirs::LirsPolicy;
use super::lru::LruPolicy;
use super::plan::PlanPolicy;
use super::s3fifo::S3FifoPolicy;
use super::shares::SharesPolicy;
use super::two_q::TwoQPolicy;
use super::wtinylfu::WTinyLfuPolicy;
use super::{Policy, PolicyKind};

impl PolicyKind {
    /// A new policy of this kind.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::Lru => Box::new(LruPolicy::new()),
            Self::Plan => Box::new(PlanPolicy::new()),
            Self::Model => Box::new(PlanPolicy::of_model()),
            Self::S3Fifo => Box::<S3FifoPolicy>::default(),
            Self::TwoQ => Box::<TwoQPolicy>::default(),
            Self::Arc => Box::<ArcPolicy>::default(),
            Self::Lirs => Box::<LirsPolicy>::default(),
            Self::WTinyLfu => Box::<WTinyLfuPolicy>::default(),
            Self::Kv => Box::<KvPolicy>::default(),
            Self::Shares => Box::<SharesPolicy>::default(),
            Self::Auto => Box::<AutoPolicy>::default(),
        }
    }
}
