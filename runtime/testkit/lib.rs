//! What the tests and benches of outcore share.

pub mod hooked;
pub mod sim;
