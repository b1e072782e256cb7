//! Why a part of the check ends without a result.

/// Why a part could not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// A call of the CUDA driver, or of cuBLAS, was refused.
    #[error("{what}: {code} ({text})")]
    Cuda {
        /// What the call was for.
        what: &'static str,
        /// The driver's name of the error.
        code: String,
        /// The driver's description.
        text: String,
    },
    /// outcore failed.
    #[error(transparent)]
    Outcore(#[from] outcore::Error),
    /// The operating system refused something.
    #[error("{what}: {cause}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        cause: std::io::Error,
    },
    /// The machine lacks what this needs. This is not a failure of outcore.
    #[error("not possible here: {0}")]
    Impossible(String),
    /// Bytes are not what they should be.
    #[error("wrong bytes: {0}")]
    Wrong(String),
}

impl Failure {
    /// Whether the machine is the reason (it has no GPU, say), and not outcore or the driver.
    pub fn is_of_the_machine(&self) -> bool {
        use outcore::ErrorKind as Kind;
        match self {
            Self::Impossible(_) => true,
            Self::Outcore(error) => matches!(error.kind(), Kind::Unsupported | Kind::NotFound),
            _ => false,
        }
    }

    pub(crate) fn io(what: impl Into<String>, cause: std::io::Error) -> Self {
        Self::Io { what: what.into(), cause }
    }
}
