//! What the tests and benches of outcore share.
