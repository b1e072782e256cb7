//! The `outcore` command line.
fn main() {}
