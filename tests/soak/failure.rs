//! Why a soak could not go on.

/// What a part of the soak came to.
pub type Result<T = ()> = std::result::Result<T, Failure>;

/// Why the soak could not go on. Wrong sums are no failure: they are what it finds.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// There is no such GPU.
    #[error("there is no GPU {0}: the CUDA driver sees {1}")]
    NoGpu(u32, usize),
    /// outcore refused a call.
    #[error(transparent)]
    Outcore(#[from] outcore::Error),
    /// The driver refused a call.
    #[error("{what}: {code}")]
    Driver {
        /// What the call was for.
        what: &'static str,
        /// The driver's name of the error.
        code: String,
    },
    /// The model's file cannot be read, or does not suit.
    #[error("the soak's model file {0}")]
    File(String),
    /// A thread of the soak panicked.
    #[error("a thread of the soak panicked")]
    Panicked,
}
