//! A call of a tool in an answer.

/// A call that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The function's name.
    pub name: String,
    /// A JSON object, as text.
    pub arguments: String,
}
