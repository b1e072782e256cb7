//! Keys and values of an inference server's sequences, in pages of an [outcore] runtime.
//!
//! A [`KvPool`] has blocks, which compete with weights and all else for the runtime's frames, go to the tiers below and
//! come back. A [`Sequence`] says which blocks hold its tokens. Sequences that begin with the same tokens use the same
//! blocks, if their [tenant](TenantId) is the same or shares.
//!
//! Two features, off by default, are for the folder that keeps blocks ([`Store`]): `encryption` and `compression`. A
//! build without one refuses what needs it, with an error that names the feature.

mod extent;
mod key;
mod layout;
mod options;
mod permit;
mod places;
mod pool;
mod sequence;
mod shared;
mod side_by_side;
mod state;
mod store;
mod tables;
mod turns;
mod view;

pub use extent::Extent;
pub use key::{BlockKey, Fingerprint, TenantId, Token};
pub use layout::{KvLayout, KvPart, KvShape, KvWindow};
pub use options::{ActiveOptions, TenantOptions};
pub use permit::{Permit, PermitFuture, PermitRequest};
pub use pool::{KvStats, TenantStats};
pub use sequence::{ReadBlocks, Sequence, WriteBlocks};
pub use shared::KvPool;
pub use store::{
    Admission, Clock, Put, Store, StoreKey, StoreOptions, StoreReport, StoreStats, StoredBlock, has_parts_of_a_store,
    inspect, verify,
};
#[doc(hidden)]
pub use store::{files, repair, report};
pub use tables::BlockId;
