//! Errors as OpenAI's API shapes them: `{"error": {"message", "type", "param", "code"}}` with an HTTP status.
//!
//! Shapes and codes: <https://platform.openai.com/docs/guides/error-codes>. No message repeats what the user wrote but
//! for names of fields, which are cut short, and what is wrong in a schema, in the words of who compiles it.

use std::time::Duration;

use serde_json::{Value, json};

/// The longest part of a user's own name for something that an error repeats, in characters.
const NAME_MOST: usize = 64;

/// An answer that is no success.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// The HTTP status.
    pub status: u16,
    /// What is wrong, the limit that was met, and what to do.
    pub message: String,
    /// OpenAI's `type`.
    pub kind: &'static str,
    /// The field of the request that is wrong.
    pub param: Option<String>,
    /// OpenAI's `code`.
    pub code: Option<&'static str>,
    /// When to try again.
    pub retry_after: Option<Duration>,
}

impl ApiError {
    fn new(status: u16, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), kind, param: None, code: None, retry_after: None }
    }

    /// 400: the request is wrong, and will be tomorrow.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(400, "invalid_request_error", message)
    }

    /// 401.
    pub fn token(message: impl Into<String>) -> Self {
        Self::new(401, "invalid_request_error", message).code("invalid_api_key")
    }

    /// 404, 405, 408, 413, 415, 431 and others of the kind.
    pub fn refused(status: u16, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", message)
    }

    /// 429: too much at once, or too much in a minute.
    pub fn too_many(message: impl Into<String>, retry_after: Duration) -> Self {
        let error = Self::new(429, "rate_limit_error", message).code("rate_limit_exceeded");
        Self { retry_after: Some(retry_after), ..error }
    }

    /// 503: the server cannot do it now.
    pub fn unavailable(message: impl Into<String>, retry_after: Option<Duration>) -> Self {
        Self { retry_after, ..Self::new(503, "server_error", message).code("service_unavailable") }
    }

    /// 500: something failed that should not.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(500, "server_error", message).code("internal_error")
    }

    /// The field that is wrong.
    #[must_use]
    pub fn param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// OpenAI's code.
    #[must_use]
    pub fn code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// The body.
    pub fn body(&self) -> Value {
        let Self { message, kind, param, code, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }
}

/// A user's name for something, fit for a message: short, and without control characters.
pub fn shortened(name: &str) -> String {
    let mut text: String = name.chars().filter(|c| !c.is_control()).take(NAME_MOST).collect();
    if name.chars().nth(NAME_MOST).is_some() {
        text.push('\u{2026}');
    }
    text
}
