//! Keys and values of sequences, in pages of an outcore runtime.

mod key;

pub use key::{BlockKey, Fingerprint, TenantId, Token};
