//! What can go wrong while loading or running a model.

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model could not be loaded or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The weights could not be made resident.
    #[error(transparent)]
    Outcore(#[from] outcore::Error),
    /// A file could not be read or written.
    #[error("{what}")]
    Io {
        /// What was being done, naming the file.
        what: String,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// A header, a configuration or a tokenizer file is malformed.
    #[error("{what}: {why}")]
    Format {
        /// The file or the part of it.
        what: String,
        /// What is wrong with it.
        why: String,
    },
    /// The model is well-formed, but this crate does not run it.
    #[error("{0}")]
    Unsupported(String),
    /// A tensor the architecture needs is absent.
    #[error(
        "the model has no tensor {0:?} (it is incomplete, or its configuration is another model's: fetch it again)"
    )]
    MissingTensor(String),
    /// A tensor's shape contradicts the configuration.
    #[error(
        "tensor {name:?} is {rows} x {cols}, the configuration wants {want_rows} x {want_cols} \
         (its configuration is another model's: fetch the model again)"
    )]
    Shape {
        /// The tensor.
        name: String,
        /// Rows the file declares.
        rows: u64,
        /// Columns the file declares.
        cols: u64,
        /// Rows the configuration implies.
        want_rows: u64,
        /// Columns the configuration implies.
        want_cols: u64,
    },
    /// The pass was given up because somebody asked for it.
    #[error("the pass was cancelled")]
    Cancelled,
    /// An argument is outside what the call accepts.
    #[error("{0}")]
    Invalid(String),
}

impl Error {
    /// The error with its causes, on one line.
    pub fn in_full(&self) -> String {
        let mut text = self.to_string();
        // outcore's own errors name their causes already.
        if !matches!(self, Self::Outcore(_)) {
            let mut cause = std::error::Error::source(self);
            while let Some(inner) = cause {
                text.push_str(&format!(": {inner}"));
                cause = inner.source();
            }
        }
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// A malformed `what`.
    pub(crate) fn format(what: impl Into<String>, why: impl ToString) -> Self {
        Self::Format { what: what.into(), why: why.to_string() }
    }

    /// A failed file operation.
    pub(crate) fn io(what: impl Into<String>, source: std::io::Error) -> Self {
        Self::Io { what: what.into(), source }
    }
}
