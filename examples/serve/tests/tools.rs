//! Tools: they reach the template, calls come back as OpenAI's API shapes them, whole and streamed, and what cannot be
//! used is refused.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::path::Path;

use outcore_llm::synthetic::Spec;
use outcore_llm::{Call, ChatTemplate, Turn, WeightType};
use outcore_serve::tenants::Tenants;
use serde_json::{Map, Value, json};
use support::{Answer, Server, small};

const CHAT: &str = "/v1/chat/completions";
const INVALID: &str = "invalid_request_error";

/// A template that shows tools, calls and results, and this text.
fn template(more: &str) -> ChatTemplate {
    let source = "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n\
                  {{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}\
                  {{ m.tool_call_id }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n";
    ChatTemplate::new(format!("{source}{{# {more} #}}"), String::new(), String::new()).unwrap()
}

fn server(template: ChatTemplate) -> Server {
    Server::with(&[], Tenants::single(None).unwrap(), |app| app.opened.template = Some(template))
}

fn tools() -> Value {
    json!([
        { "type": "function", "function": {
            "name": "weather", "description": "The weather of a place", "strict": true,
            "parameters": {
                "type": "object", "required": ["place", "days"], "additionalProperties": false,
                "properties": { "place": { "$ref": "#/$defs/place" }, "days": { "type": "integer", "minimum": 1, "maximum": 9 } },
                "$defs": { "place": { "enum": ["here", "there"] } },
            },
        } },
        { "type": "function", "function": { "name": "now" } },
    ])
}

fn body(more: Value) -> Value {
    let mut body = json!({
        "messages": [{ "role": "user", "content": "hello" }], "tools": tools(), "max_tokens": 1000, "temperature": 1.5,
        "top_k": 0, "top_p": 1, "min_p": 0,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Looks that a call is one of the tools, and returns its name.
#[track_caller]
fn checked(call: &Value) -> String {
    assert!(call["id"].as_str().unwrap().starts_with("call_") && call["type"] == "function", "{call}");
    let function = &call["function"];
    let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
    let name = function["name"].as_str().unwrap();
    match name {
        "weather" => {
            assert!(["here", "there"].contains(&arguments["place"].as_str().unwrap()), "{call}");
            assert!((1..=9).contains(&arguments["days"].as_u64().unwrap()), "{call}");
        }
        "now" => assert_eq!(arguments, json!({})),
        other => panic!("{other}"),
    }
    name.to_owned()
}

/// The objects of a stream.
fn events(answer: &Answer) -> Vec<Value> {
    let text = answer.text();
    text.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok()).collect()
}

/// What the tokenizer's file calls the kinds of its tokens.
const TEXT: i32 = 1;
const CONTROL: i32 = 3;
const UNUSED: i32 = 5;
/// The synthetic model's first unused token.
const FIRST: u32 = 260;

/// The first unused tokens become control tokens with these names, all of which together are as long.
fn with_control_tokens(path: &Path, names: &[&str]) {
    with_tokens(path, &names.iter().map(|name| (*name, CONTROL)).collect::<Vec<_>>());
}

/// The same of tokens of these kinds.
fn with_tokens(path: &Path, tokens: &[(&str, i32)]) {
    let mut bytes = std::fs::read(path).unwrap();
    let len = bytes.len();
    let at = |bytes: &[u8], what: &[u8]| bytes.windows(what.len()).position(|part| part == what).unwrap();
    for (id, (name, kind)) in (FIRST as usize..).zip(tokens) {
        let text = |name: &str| [&(name.len() as u64).to_le_bytes()[..], name.as_bytes()].concat();
        let unused = text(&format!("<unused_{id}>"));
        let place = at(&bytes, &unused);
        bytes.splice(place..place + unused.len(), text(name));
        // The list of types: behind its name come its kind, that of its elements, and how many there are.
        let key = b"tokenizer.ggml.token_type";
        let place = at(&bytes, key) + key.len() + 4 + 4 + 8 + id * 4;
        assert_eq!(bytes[place..place + 4], UNUSED.to_le_bytes());
        bytes[place..place + 4].copy_from_slice(&kind.to_le_bytes());
    }
    assert_eq!(bytes.len(), len, "tensors would not be where they were");
    std::fs::write(path, bytes).unwrap();
}

/// A server whose model writes in channels.
fn server_of_channels() -> Server {
    let names = ["<|channel|>", "<|message|>", "<|constrain|>", "<|padding_|>z"];
    let patch = |path: &Path| with_control_tokens(path, &names);
    let template = template("<|channel|>analysis<|message|>");
    Server::with_model(&[], Tenants::single(None).unwrap(), patch, |app| app.opened.template = Some(template))
}

#[test]
fn an_answer_that_has_to_call_a_tool_does_in_each_form() {
    let control = |app: &mut outcore_serve::http::App| app.opened.template = Some(template("[TOOL_CALLS]"));
    let patch = |path: &Path| with_control_tokens(path, &["[TOOL_CALLS]"]);
    let servers = [
        server(template("<tool_call>")),
        server(template("[TOOL_CALLS]")),
        server(template("\"parameters\"")),
        Server::with_model(&["--speculate"], Tenants::single(None).unwrap(), patch, control),
        server_of_channels(),
    ];
    for server in &servers {
        let mut met = Vec::new();
        for seed in 0..6 {
            let more = json!({ "tool_choice": "required", "seed": seed });
            let answer = server.post(CHAT, body(more.clone()).to_string());
            assert_eq!(answer.status, 200, "{}", answer.text());
            let choice = &answer.json()["choices"][0];
            assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("tool_calls"), &Value::Null));
            let calls = choice["message"]["tool_calls"].as_array().unwrap();
            assert_eq!(calls.len(), 1, "{choice}");
            met.push(checked(&calls[0]));
            // The stream of the same answer has the same call.
            let mut more = more;
            more["stream"] = json!(true);
            let chunks = events(&server.post(CHAT, body(more).to_string()));
            let of_choice = |chunk: &Value| chunk["choices"][0].clone();
            let deltas: Vec<Value> = chunks.iter().map(|chunk| of_choice(chunk)["delta"].clone()).collect();
            let called: Vec<&Value> =
                deltas.iter().filter_map(|delta| delta["tool_calls"].as_array()).flatten().collect();
            assert_eq!((called.len(), &called[0]["index"]), (1, &json!(0)));
            assert_eq!(called[0]["function"], calls[0]["function"]);
            assert!(deltas.iter().all(|delta| delta["content"].as_str().is_none_or(str::is_empty)), "{deltas:?}");
            assert_eq!(of_choice(chunks.last().unwrap())["finish_reason"], "tool_calls");
        }
        assert!(met.contains(&"weather".into()) && met.contains(&"now".into()), "{met:?}");
        let only = json!({ "type": "function", "function": { "name": "weather" } });
        let more = json!({ "tool_choice": only, "n": 2, "seed": 5, "parallel_tool_calls": false });
        let answer = server.post(CHAT, body(more).to_string()).json();
        let ids: Vec<Value> = (0..2)
            .map(|nth| {
                let call = &answer["choices"][nth]["message"]["tool_calls"][0];
                assert_eq!(checked(call), "weather");
                call["id"].clone()
            })
            .collect();
        assert_ne!(ids[0], ids[1]);
        // Cut off, it is no call.
        let cut = server.post(CHAT, body(json!({ "tool_choice": "required", "max_tokens": 3 })).to_string()).json();
        assert_eq!(cut["choices"][0]["finish_reason"], "length");
        assert!(cut["choices"][0]["message"]["tool_calls"].is_null(), "{cut}");
        server.assert_nothing_is_held();
    }
    let text = |nth: usize| servers[nth].metric("outcore_grammar_answers_total");
    assert_eq!([0, 1, 2, 3, 4].map(text), [15; 5]);
}

/// What the model thinks is told apart, and an answer of a given form has the header in front of it.
#[test]
fn an_answer_in_channels_is_what_the_last_one_has() {
    let server = server_of_channels();
    let schema = json!({ "type": "object", "properties": { "n": { "enum": [1, 2] } }, "required": ["n"],
                         "additionalProperties": false });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "n", "strict": true, "schema": schema } });
    let mut body = body(json!({ "response_format": format }));
    body.as_object_mut().unwrap().remove("tools");
    let choice = server.post(CHAT, body.to_string()).json()["choices"][0].clone();
    let said: Value = serde_json::from_str(choice["message"]["content"].as_str().unwrap()).unwrap();
    assert!(said == json!({ "n": 1 }) || said == json!({ "n": 2 }), "{choice}");
    assert_eq!(choice["finish_reason"], "stop");
    assert!(choice["message"].get("reasoning_content").is_none(), "{choice}");
    // A model that keeps to no format: all of its text is the answer.
    let plain = json!({ "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 40, "seed": 3 });
    let whole = server.post(CHAT, plain.to_string()).json()["choices"][0]["message"].clone();
    assert!(whole["content"].is_string(), "{whole}");
    server.assert_nothing_is_held();
}

/// Makes a model of F32 one whose next token depends on the last one alone: after each of these tokens come those of
/// its list, one as likely as another.
fn with_steps(path: &Path, steps: &[(u32, &[u32])]) {
    let header = outcore::format::open(path).unwrap();
    let mut bytes = std::fs::read(path).unwrap();
    let dim = small().dim as usize;
    for tensor in &header.tensors {
        let (first, count) = (tensor.offset as usize, tensor.len as usize / size_of::<f32>());
        let mut put = |nth: usize, value: f32| {
            let at = first + nth * size_of::<f32>();
            bytes[at..at + size_of::<f32>()].copy_from_slice(&value.to_le_bytes());
        };
        let value = if tensor.name.ends_with("norm.weight") { 1.0 } else { 0.0 };
        (0..count).for_each(|nth| put(nth, value));
        for (state, (token, next)) in steps.iter().enumerate() {
            match tensor.name.as_str() {
                "token_embd.weight" => put(*token as usize * dim + state, 1.0),
                // Behind the norm a state is 8.
                "output.weight" => next.iter().for_each(|next| put(*next as usize * dim + state, 5.0)),
                _ => {}
            }
        }
    }
    std::fs::write(path, bytes).unwrap();
}

/// What is thought and said by tokens of a chat's logprobs.
fn by_channels(tokens: &[Value]) -> [String; 2] {
    let mut said = [Vec::new(), Vec::new()];
    let (mut header, mut place) = (Some(String::new()), 0);
    for token in tokens {
        match (token["token"].as_str().unwrap(), &mut header) {
            ("<|message|>", Some(name)) => {
                place = usize::from(!name.ends_with("analysis"));
                header = None;
            }
            ("<|end|>", _) => header = Some(String::new()),
            (name, Some(header)) => header.push_str(name),
            (_, None) => {
                said[place].extend(token["bytes"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8))
            }
        }
    }
    said.map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// A model that thinks and speaks by turns, in characters of one and of two tokens.
#[test]
fn thoughts_come_apart_from_answers_whole_and_streamed() {
    let pad = "p".repeat(42);
    let texts = ["analysis", "final", "assistant"].map(|name| (name, TEXT));
    // With the last two, the third one ends no answer.
    let controls = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|return|>", "<|call|>"];
    let controls = controls.map(|name| (name, CONTROL));
    let tokens = [&controls[..], &texts, &[(&pad, CONTROL)]].concat();
    let [channel, message, end, start, returned, _, analysis, last, assistant] =
        std::array::from_fn(|nth| FIRST + nth as u32);
    let (x, y, [half, other_half]) = (u32::from(b'x'), u32::from(b'y'), [0xc3, 0xa9]);
    let steps: [(u32, &[u32]); 12] = [
        (u32::from(b'\n'), &[channel]),
        (channel, &[analysis, last]),
        (analysis, &[message]),
        (last, &[message]),
        (message, &[x, y, half]),
        (x, &[y, half, end]),
        (y, &[x, half, end, returned]),
        (half, &[other_half]),
        (other_half, &[x, y]),
        (end, &[start]),
        (start, &[assistant]),
        (assistant, &[channel]),
    ];
    let write = |path: &Path| {
        Spec { dtype: WeightType::F32, ..small() }.write_gguf(path).unwrap();
        with_tokens(path, &tokens);
        with_steps(path, &steps);
    };
    let template = template("<|channel|>analysis<|message|>");
    let server = Server::of(write, &[], Tenants::single(None).unwrap(), |app| app.opened.template = Some(template));
    let (mut thought, mut spoke, mut both, mut stopped) = (0, 0, 0, 0);
    for seed in 0..40 {
        // Some are cut off, also within a character or a header.
        let most = if seed % 2 == 0 { 200 } else { 3 + seed };
        let mut body = json!({
            "messages": [{ "role": "user", "content": "hello" }], "max_tokens": most, "seed": seed, "logprobs": true,
            "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0,
        });
        let whole = server.post(CHAT, body.to_string()).json()["choices"][0].clone();
        let [thoughts, text] = by_channels(whole["logprobs"]["content"].as_array().unwrap());
        let wanted = if thoughts.is_empty() { Value::Null } else { json!(thoughts) };
        assert_eq!((&whole["message"]["reasoning_content"], &whole["message"]["content"]), (&wanted, &json!(text)));
        assert!(whole["message"].get("reasoning_content").is_some() != thoughts.is_empty(), "{whole}");
        thought += usize::from(!thoughts.is_empty());
        spoke += usize::from(!text.is_empty());
        both += usize::from(!thoughts.is_empty() && !text.is_empty());
        body["stream"] = json!(true);
        let chunks = events(&server.post(CHAT, body.to_string()));
        let deltas = |name: &str| -> String {
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][name].as_str()).collect()
        };
        assert_eq!((deltas("reasoning_content"), deltas("content")), (thoughts.clone(), text.clone()), "seed {seed}");
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], whole["finish_reason"]);
        // A stop sequence is one of the answer, and no thought ends it.
        body["stream"] = json!(false);
        body["stop"] = json!("x");
        let cut = server.post(CHAT, body.to_string()).json()["choices"][0].clone();
        let before = text.split('x').next().unwrap();
        assert_eq!(cut["message"]["content"], json!(before), "seed {seed}");
        let thoughts_then = cut["message"]["reasoning_content"].as_str().unwrap_or_default();
        assert!(thoughts.starts_with(thoughts_then) && (before != text || thoughts_then == thoughts), "seed {seed}");
        stopped += usize::from(before != text);
    }
    assert!(thought > 10 && spoke > 10 && both > 5 && stopped > 5, "{thought} {spoke} {both} {stopped}");
    server.assert_nothing_is_held();
}

#[test]
fn tools_and_conversations_with_calls_reach_the_template() {
    let server = server(template("<tool_call>"));
    let arguments = r#"{"place":"here","days":2}"#;
    let messages = json!([
        { "role": "user", "content": "hello" },
        { "role": "assistant", "content": null, "tool_calls": [
            { "id": "c1", "type": "function", "function": { "name": "weather", "arguments": arguments } },
            { "id": "c2", "type": "function", "function": { "name": "now", "arguments": "" } },
        ] },
        { "role": "tool", "tool_call_id": "c1", "content": [{ "type": "text", "text": "rain" }] },
        { "role": "tool", "tool_call_id": "c2", "content": "noon" },
    ]);
    let call =
        |id: &str, name: &str, arguments: &str| Call { id: id.into(), name: name.into(), arguments: arguments.into() };
    let result = |id: &str, said: &str| Turn {
        role: "tool".into(),
        content: Some(said.into()),
        call: Some(id.into()),
        ..Turn::default()
    };
    let turns = [
        Turn { role: "user".into(), content: Some("hello".into()), ..Turn::default() },
        Turn {
            role: "assistant".into(),
            calls: vec![call("c1", "weather", arguments), call("c2", "now", "{}")],
            ..Turn::default()
        },
        result("c1", "rain"),
        result("c2", "noon"),
    ];
    let tokenizer = &server.app.opened.tokenizer;
    for (choice, definitions) in [("auto", Some(tools().to_string())), ("none", None)] {
        let text = server.app.opened.template.as_ref().unwrap();
        let text = text.render_turns(&turns, definitions.as_deref(), true, &Map::new()).unwrap();
        assert!(text.contains(r#""arguments": {"place": "here", "days": 2}"#) && text.contains("rainc1"), "{text}");
        let body = body(json!({ "messages": messages, "tool_choice": choice, "max_tokens": 1 }));
        let answer = server.post(CHAT, body.to_string());
        assert_eq!(answer.status, 200, "{}", answer.text());
        let tokens = tokenizer.encode_chat(&text).unwrap().len();
        assert_eq!(answer.json()["usage"]["prompt_tokens"], json!(tokens), "{choice}");
    }
}

#[test]
fn text_that_is_no_call_is_the_same_as_without_tools() {
    for form in ["<tool_call>", "[TOOL_CALLS]", "\"parameters\""] {
        let silent = format!("{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}{{# tools {form} #}}");
        let server = server(ChatTemplate::new(silent, String::new(), String::new()).unwrap());
        for seed in 0..4 {
            let more = json!({ "max_tokens": 60, "seed": seed, "ignore_eos": true });
            let with = server.post(CHAT, body(more.clone()).to_string()).json()["choices"].clone();
            let mut without = body(more.clone());
            without.as_object_mut().unwrap().remove("tools");
            assert_eq!(server.post(CHAT, without.to_string()).json()["choices"], with, "{form}");
            let mut streamed = body(more);
            streamed["stream"] = json!(true);
            let chunks = events(&server.post(CHAT, streamed.to_string()));
            let text: String =
                chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
            assert_eq!(with[0]["message"]["content"], json!(text));
        }
    }
}

#[test]
fn tools_that_cannot_be_used_are_refused_and_the_server_goes_on() {
    let known = server(template("<tool_call>"));
    let function = |function: Value| json!([{ "type": "function", "function": function }]);
    let with = |name: &str, value: Value| json!({ name: value });
    let required = |parameters: Value| json!({ "tools": function(json!({ "name": "f", "parameters": parameters })), "tool_choice": "required" });
    let said = |call: Value| {
        let turn = json!({ "role": "assistant", "content": null, "tool_calls": [call] });
        json!({ "messages": [{ "role": "user", "content": "a" }, turn] })
    };
    let many: Vec<Value> = (0..129).map(|nth| function(json!({ "name": nth.to_string() }))[0].clone()).collect();
    let long = function(json!({ "name": "f", "description": "d".repeat(1 << 20) }));
    let call =
        |arguments: &str| json!({ "id": "c", "type": "function", "function": { "name": "f", "arguments": arguments } });
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(5000), "]".repeat(5000));
    let wrong = [
        (with("tools", json!({})), "tools", "an array"),
        (with("tools", json!([1])), "tools[0]", "an object"),
        (with("tools", json!([{ "function": { "name": "f" } }])), "tools[0].type", "Missing"),
        (with("tools", json!([{ "type": "custom", "custom": {} }])), "tools[0].type", "function"),
        (with("tools", json!([{ "type": "function" }])), "tools[0].function", "Missing"),
        (with("tools", function(json!({}))), "tools[0].function.name", "Missing"),
        (with("tools", function(json!({ "name": "a b" }))), "tools[0].function.name", "letters"),
        (
            with("tools", function(json!({ "name": "f", "parameters": [] }))),
            "tools[0].function.parameters",
            "an object",
        ),
        (with("tools", json!(many)), "tools", "at most 128 tools"),
        (with("tools", long), "tools", "131072 bytes"),
        (with("tools", json!([tools()[1], tools()[1]])), "tools[1].function.name", "another"),
        (with("tool_choice", json!("any")), "tool_choice", "'required'"),
        (with("tool_choice", json!(1)), "tool_choice", "a string or an object"),
        (with("tool_choice", json!({ "type": "allowed_tools" })), "tool_choice", "supported"),
        (
            with("tool_choice", json!({ "type": "function", "function": { "name": "g" } })),
            "tool_choice.function.name",
            "no tool",
        ),
        (json!({ "tools": [], "tool_choice": "required" }), "tool_choice", "no 'tools'"),
        (with("response_format", json!({ "type": "json_object" })), "response_format", "'tools'"),
        (json!({ "tool_choice": "required", "ignore_eos": true }), "ignore_eos", "has an end"),
        (required(json!({ "type": "string" })), "tools[0].function.parameters", "an object"),
        (required(json!({ "properties": { "a": { "$ref": "https://example.com/a" } } })), "tools", "fetch"),
        (required(json!({ "properties": { "a": { "not": {} } } })), "tools", "not"),
        (
            required(json!({ "properties": { "a": { "type": "integer", "multipleOf": 1_000_003 } } })),
            "tools",
            "multipleOf",
        ),
        (said(call("[1]")), "messages[1].tool_calls[0].function.arguments", "JSON object"),
        (said(call("{\"a\"")), "messages[1].tool_calls[0].function.arguments", "JSON object"),
        (said(call(&deep)), "messages[1].tool_calls[0].function.arguments", "JSON object"),
        (said(json!(1)), "messages[1].tool_calls[0]", "an object"),
        (said(json!({ "type": "function" })), "messages[1].tool_calls[0].id", "Missing"),
        (with("messages", json!([{ "role": "tool", "content": "a" }])), "messages[0].tool_call_id", "Missing"),
        (
            with("messages", json!([{ "role": "user", "content": "a", "tool_calls": [1] }])),
            "messages[0].tool_calls",
            "",
        ),
        (with("messages", json!([{ "role": "assistant", "tool_calls": [] }])), "messages[0].content", "Missing"),
    ];
    for (more, param, part) in wrong {
        let answer = known.post(CHAT, body(more.clone()).to_string());
        assert_eq!(answer.status, 400, "{more}: {}", answer.text());
        let message = answer.assert_shape();
        assert_eq!(answer.json()["error"]["param"], param, "{message}");
        assert!(message.contains(part), "{message}");
    }
    known.assert_lives();
    known.assert_nothing_is_held();
    // Templates that know no tools, or not how they are called, or that do not end, or refuse.
    let of = |source: &str| server(ChatTemplate::new(source.into(), String::new(), String::new()).unwrap());
    let without = Server::start();
    let answer = without.post(CHAT, body(json!({})).to_string());
    let message = answer.assert_error(400, INVALID, Some("tools"), Some("unsupported_value"));
    assert!(message.contains("chat template"), "{message}");
    assert_eq!(without.post(CHAT, body(json!({ "tool_choice": "none", "max_tokens": 1 })).to_string()).status, 200);
    let unknown = of("{{ tools }}");
    let answer = unknown.post(CHAT, body(json!({ "tool_choice": "required" })).to_string());
    answer.assert_error(400, INVALID, Some("tool_choice"), Some("unsupported_value"));
    assert_eq!(unknown.post(CHAT, body(json!({ "max_tokens": 1 })).to_string()).status, 200);
    let endless =
        of("{% for a in range(9999) %}{% for b in range(9999) %}{% if tools %}{% endif %}{% endfor %}{% endfor %}");
    let answer = endless.post(CHAT, body(json!({})).to_string());
    let message = answer.assert_error(400, INVALID, Some("messages"), Some("invalid_value"));
    assert!(message.contains("4000000 steps"), "{message}");
    let refusing = of("{{ tools }}{{ raise_exception('roles must alternate') }}");
    let answer = refusing.post(CHAT, body(json!({})).to_string());
    let message = answer.assert_error(400, INVALID, Some("messages"), Some("invalid_value"));
    assert!(message.contains("roles must alternate"), "{message}");
    for server in [&unknown, &endless, &refusing] {
        server.assert_lives();
        server.assert_nothing_is_held();
    }
}
