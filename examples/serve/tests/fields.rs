//! The table of OpenAI's fields in docs/serving.md is true: what each row says is what the server does.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeMap;

use outcore_llm::ChatTemplate;
use outcore_serve::tenants::Tenants;
use serde_json::{Value, json};
use support::Server;

const DOCS: &str = include_str!("../../../docs/serving.md");
const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const EMBED: &str = "/v1/embeddings";

/// OpenAI's fields: those of `/v1/chat/completions`, of `/v1/completions` and of `/v1/embeddings`.
const CHAT_FIELDS: [&str; 35] = [
    "messages",
    "model",
    "audio",
    "frequency_penalty",
    "function_call",
    "functions",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "metadata",
    "modalities",
    "n",
    "parallel_tool_calls",
    "prediction",
    "presence_penalty",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "response_format",
    "safety_identifier",
    "seed",
    "service_tier",
    "stop",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "user",
    "verbosity",
    "web_search_options",
];
const TEXT_FIELDS: [&str; 18] = [
    "prompt",
    "model",
    "best_of",
    "echo",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "suffix",
    "temperature",
    "top_p",
    "user",
];

const EMBED_FIELDS: [&str; 5] = ["input", "model", "dimensions", "encoding_format", "user"];

/// The rows of the table: what it says of a field in each kind of request, and values that ask for nothing.
fn rows() -> BTreeMap<String, ([String; 3], Vec<Value>)> {
    let table = DOCS.split("| field | chat | completions | embeddings | |\n|---|---|---|---|---|\n").nth(1).unwrap();
    let mut rows = BTreeMap::new();
    for line in table.lines().take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(|cell| cell.trim_matches([' ', '|'])).collect();
        let [field, chat, text, embed, notes] = cells.as_slice() else { panic!("{line}") };
        let nothing = notes.strip_suffix("asks for nothing").or(notes.strip_suffix("ask for nothing"));
        let values = nothing.into_iter().flat_map(|said| said.split('`').skip(1).step_by(2));
        let values = values.map(|value| serde_json::from_str(value).unwrap()).collect();
        let said = [chat, text, embed].map(|said| said.to_string());
        let before = rows.insert(field.trim_matches('`').to_owned(), (said, values));
        assert!(before.is_none(), "{field} stands twice");
    }
    rows
}

fn tools() -> Value {
    json!([{ "type": "function", "function": { "name": "f" } }])
}

/// What has to be there for the field to be of use, a value that asks for something, and one of a wrong kind.
fn samples(field: &str, path: &str) -> (Value, Value, Value) {
    let alone = |value: Value, wrong: Value| (json!({}), value, wrong);
    match field {
        "messages" => alone(json!([{ "role": "user", "content": "a" }]), json!(1)),
        "prompt" | "input" => alone(json!("a"), json!(1)),
        "dimensions" => alone(json!(3), json!("3")),
        "encoding_format" => alone(json!("base64"), json!(1)),
        "model" => alone(json!(support::MODEL), json!(1)),
        "max_tokens" | "max_completion_tokens" | "n" | "best_of" => alone(json!(1), json!("1")),
        "temperature" | "top_p" | "presence_penalty" | "frequency_penalty" => alone(json!(0.5), json!("0")),
        "logit_bias" => alone(json!({ "5": 1 }), json!([])),
        "seed" => alone(json!(1), json!("1")),
        "stop" => alone(json!(["a"]), json!(1)),
        "stream" | "echo" => alone(json!(true), json!("true")),
        "stream_options" => (json!({ "stream": true }), json!({ "include_usage": true }), json!(1)),
        "logprobs" if path == CHAT => alone(json!(true), json!(1)),
        "logprobs" => alone(json!(1), json!(true)),
        "top_logprobs" => (json!({ "logprobs": true }), json!(1), json!("1")),
        "reasoning_effort" => alone(json!("low"), json!(1)),
        "response_format" => alone(json!({ "type": "json_object" }), json!(1)),
        "tools" => alone(tools(), json!(1)),
        "functions" => alone(json!([{ "name": "f" }]), json!(1)),
        "tool_choice" => (json!({ "tools": tools() }), json!("required"), json!(1)),
        "function_call" => alone(json!({ "name": "f" }), json!(1)),
        "suffix" => alone(json!("end"), json!(1)),
        "modalities" => alone(json!(["text", "audio"]), json!(1)),
        "audio" => alone(json!({ "voice": "any", "format": "wav" }), json!(1)),
        "prediction" => alone(json!({ "type": "content", "content": "a" }), json!(1)),
        "verbosity" => alone(json!("low"), json!(1)),
        "web_search_options" => alone(json!({}), json!(1)),
        _ => alone(json!({ "any": ["thing"] }), json!(["other"])),
    }
}

/// A request that is answered, with these fields.
fn body(path: &str, fields: &[(&str, &Value)]) -> String {
    let mut body = match path {
        CHAT => json!({ "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 2, "temperature": 0 }),
        TEXT => json!({ "prompt": "hello", "max_tokens": 2, "temperature": 0 }),
        _ => json!({ "input": "hello" }),
    };
    for (name, value) in fields {
        match *name {
            "" => body.as_object_mut().unwrap().extend(value.as_object().unwrap().clone()),
            name => body[name] = (*value).clone(),
        }
    }
    body.to_string()
}

#[test]
fn each_row_of_the_table_of_fields_is_true() {
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{# tools: <tool_call> #}";
    let server = Server::with(&[], Tenants::single(None).unwrap(), |app| {
        app.opened.template = Some(ChatTemplate::new(template.into(), String::new(), String::new()).unwrap());
    });
    let rows = rows();
    let param = |answer: &support::Answer| answer.json()["error"]["param"].as_str().unwrap_or_default().to_owned();
    let all = [(CHAT, &CHAT_FIELDS[..]), (TEXT, &TEXT_FIELDS[..]), (EMBED, &EMBED_FIELDS[..])];
    for (column, (path, fields)) in all.into_iter().enumerate() {
        let ask = |fields: &[(&str, &Value)]| server.post(path, body(path, fields));
        let made = |answer: &support::Answer| answer.json()[if path == EMBED { "data" } else { "choices" }].clone();
        let plain = made(&ask(&[]));
        assert_ne!(plain, Value::Null, "{path}");
        for field in fields {
            assert!(rows.contains_key(*field), "{field} is not in the table");
        }
        for (field, (said, nothing)) in &rows {
            let (field, said) = (field.as_str(), said[column].as_str());
            assert_eq!(said == "-", !fields.contains(&field), "{path}: {field} is said to be {said}");
            let (with, value, wrong) = samples(field, path);
            let answer = |value: &Value| ask(&[("", &with), (field, value)]);
            match said {
                "-" => {}
                "yes" => {
                    let given = answer(&value);
                    assert_eq!(given.status, 200, "{path}: {field}: {}", given.text());
                    // It is read: what is wrong is named.
                    let refused = answer(&wrong);
                    assert_eq!((refused.status, param(&refused).as_str()), (400, field), "{path}");
                }
                "no effect" => {
                    for value in [&value, &wrong] {
                        assert_eq!(made(&answer(value)), plain, "{path}: {field}");
                    }
                }
                "refused" => {
                    answer(&value).assert_error(
                        400,
                        "invalid_request_error",
                        Some(field),
                        Some("unsupported_parameter"),
                    );
                    for value in nothing.iter().chain([&Value::Null]) {
                        assert_eq!(made(&answer(value)), plain, "{path}: {field}: {value}");
                    }
                }
                other => panic!("{field}: {other}"),
            }
        }
    }
    server.assert_nothing_is_held();
}
