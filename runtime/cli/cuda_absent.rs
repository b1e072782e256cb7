//! Stands in for `cuda` in a build without that feature.

use outcore::{Bytes, Error, ErrorKind, Result};

/// The GPUs there are.
pub struct Gpus {
    /// A line for each.
    pub found: Vec<String>,
    /// What the driver supports.
    pub driver: Option<String>,
    /// Whether one of them can be a device.
    pub usable: bool,
    /// What page tables take of a GPU's memory for a host tier of all memory that is free.
    pub tables: Bytes,
}

/// Asks nobody.
///
/// # Errors
/// [`ErrorKind::Unsupported`]: this build has no CUDA device.
pub fn gpus(_free: Bytes) -> Result<Gpus> {
    Err(Error::new(ErrorKind::Unsupported, "this build of outcore has no CUDA device")
        .remedy("build it with the feature `cuda` (cargo build -p outcore-cli --features cuda)"))
}
