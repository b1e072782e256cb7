//! What clients are told of a pass that failed.

use std::time::Duration;

use outcore::ErrorKind;
use outcore_llm::Error;

use crate::error::ApiError;

/// What is said where the log says more.
const FAILED: &str = "The server failed to write this answer: see its log.";

impl ApiError {
    /// What a pass that failed means for a request in it. The error itself, which names files of the server, is for
    /// its log.
    pub fn of_pass(error: &Error) -> Self {
        let soon = Some(Duration::from_secs(5));
        match error {
            Error::Outcore(error) => match error.kind() {
                ErrorKind::ModelChanged => {
                    let message = "The model's files were changed while the server had them open: start it again.";
                    Self::unavailable(message, None)
                }
                ErrorKind::Corrupt => {
                    Self::unavailable("The model's files cannot be read any more: see the server's log.", None)
                }
                ErrorKind::BudgetTooSmall | ErrorKind::OutOfMemory | ErrorKind::DiskFull => {
                    Self::unavailable("The server has no room for this answer now. Try again later.", soon)
                }
                _ => Self::internal(FAILED),
            },
            Error::Cancelled => Self::unavailable("The server is shutting down.", soon),
            _ => Self::internal(FAILED),
        }
    }
}
