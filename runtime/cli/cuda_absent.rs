//! Stands in for `cuda` in a build without that feature.

use outcore::{Error, ErrorKind, Result};

/// The GPUs there are.
pub struct Gpus {
    /// A line for each.
    pub found: Vec<String>,
    /// What the driver supports.
    pub driver: Option<String>,
    /// Whether one of them can be a device.
    pub usable: bool,
}

/// Asks nobody.
///
/// # Errors
/// [`ErrorKind::Unsupported`]: this build has no CUDA device.
pub fn gpus() -> Result<Gpus> {
    Err(Error::new(ErrorKind::Unsupported, "this build of outcore has no CUDA device")
        .remedy("build it with the feature `cuda` (cargo build -p outcore-cli --features cuda)"))
}
