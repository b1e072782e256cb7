//! What work reads and writes, by the addresses that the program gave.

/// A range of addresses that work reads or writes.
#[derive(Clone, Copy, Debug)]
pub struct Reach {
    pub address: u64,
    pub len: u64,
    pub write: bool,
}
