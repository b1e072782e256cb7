//! Chat templates, compared with what transformers makes of them (`templates/write.py`).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use outcore_llm::{Call, ChatTemplate, Turn};
use regex::Regex;
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Deserialize)]
struct Case {
    name: String,
    messages: Vec<Value>,
    /// A JSON text, whose members keep their order.
    tools: Option<String>,
    variables: Map<String, Value>,
    opens: bool,
    /// What is made of it, with `TODAY` for the date.
    text: Option<String>,
    /// Why it is refused.
    error: Option<String>,
}

fn turn(message: &Value) -> Turn {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let call = |call: &Value| Call {
        id: text(&call["id"]).unwrap(),
        name: text(&call["function"]["name"]).unwrap(),
        arguments: text(&call["function"]["arguments"]).unwrap(),
    };
    Turn {
        role: text(&message["role"]).unwrap(),
        content: text(&message["content"]),
        calls: message["tool_calls"].as_array().into_iter().flatten().map(call).collect(),
        call: text(&message["tool_call_id"]),
    }
}

/// With macros that call themselves, namespaces, loops that are left, a date, and refusals of its own.
#[test]
fn a_template_of_channels_is_rendered_as_by_transformers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates");
    let source = std::fs::read_to_string(folder.join("channels.jinja")).unwrap();
    let template = ChatTemplate::new(source, String::new(), String::new()).unwrap();
    let cases = std::fs::read_to_string(folder.join("channels.json")).unwrap();
    let cases: Vec<Case> = serde_json::from_str(&cases).unwrap();
    let date = Regex::new(r"\d{4}-\d{2}-\d{2}").unwrap();
    for Case { name, messages, tools, variables, opens, text, error } in cases {
        let turns: Vec<Turn> = messages.iter().map(turn).collect();
        let made = template.render_turns(&turns, tools.as_deref(), opens, &variables);
        match (made, text, error) {
            (Ok(made), Some(text), None) => assert_eq!(date.replace_all(&made, "TODAY"), text, "{name}, {opens}"),
            (Err(made), None, Some(error)) => assert!(made.in_full().contains(&error), "{name}: {}", made.in_full()),
            (made, ..) => panic!("{name}, {opens}: {made:?}"),
        }
    }
}
