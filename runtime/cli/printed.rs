//! How the result of a command is printed.

use serde::Serialize;

/// The result of a command, which can be printed as a JSON object or as text.
pub trait Report: Serialize {
    fn text(&self) -> String;
}

/// What is printed of a result: one line of JSON, or its text.
pub fn render(report: &impl Report, json: bool) -> serde_json::Result<String> {
    if json { serde_json::to_string(report).map(|line| line + "\n") } else { Ok(report.text()) }
}
