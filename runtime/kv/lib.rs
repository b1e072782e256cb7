//! Keys and values of sequences, in pages of an outcore runtime.

mod key;
mod store;

pub use key::{BlockKey, Fingerprint, TenantId, Token};
pub use store::{
    Admission, Clock, Put, Store, StoreKey, StoreOptions, StoreReport, StoreStats, StoredBlock, inspect, verify,
};
#[doc(hidden)]
pub use store::{files, repair, report};
