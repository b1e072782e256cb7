//! Answers of a given form: they have it, whatever the model says, with and without drafts and whoever else is served;
//! and a schema that cannot be used is refused before anything is written.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use outcore_serve::grammar::{ANSWER_BYTES, Source};
use outcore_serve::http::App;
use outcore_serve::tenants::Tenants;
use serde_json::{Map, Value, json};
use support::{Answer, PATIENCE, Server, small};

const CHAT: &str = "/v1/chat/completions";
const INVALID: &str = "invalid_request_error";
const SCHEMA: &str = "response_format";

fn schema(schema: &Value) -> Value {
    json!({ "type": "json_schema", "json_schema": { "name": "form", "schema": schema, "strict": true } })
}

fn body(format: &Value, more: Value) -> Value {
    let mut body = json!({
        "messages": [{ "role": "user", "content": "hello" }], "response_format": format, "max_tokens": 2000,
        "temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// What an answer says, which has to be whole.
#[track_caller]
fn said(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let choice = &answer.json()["choices"][0];
    assert_eq!(choice["finish_reason"], "stop", "{choice}");
    let text = choice["message"]["content"].as_str().unwrap();
    serde_json::from_str(text).unwrap_or_else(|wrong| panic!("{wrong}: {text:?}"))
}

/// Whether a value is right.
type Judge = fn(&Value) -> bool;

/// Schemas whose texts are short, and whether a value is what they say.
fn schemas() -> Vec<(Value, Judge)> {
    let object = json!({
        "type": "object", "required": ["kind", "size"], "additionalProperties": false,
        "properties": { "kind": { "enum": ["one", "two", "\u{fc}"] }, "size": { "$ref": "#/$defs/size" } },
        "$defs": { "size": { "type": "integer", "minimum": 3, "maximum": 420 } },
    });
    let list = json!({
        "type": "array", "minItems": 2, "maxItems": 3,
        "items": { "anyOf": [{ "type": "boolean" }, { "type": "string", "pattern": "^[ab]{1,3}$" }] },
    });
    let same = json!({ "type": "array", "minItems": 12, "maxItems": 12, "items": { "const": "again and again" } });
    vec![
        (object, |value| {
            let known = ["one", "two", "\u{fc}"].contains(&value["kind"].as_str().unwrap());
            known && (3..=420).contains(&value["size"].as_u64().unwrap()) && value.as_object().unwrap().len() == 2
        }),
        (list, |value| {
            let all = value.as_array().unwrap();
            let fits = |text: &str| (1..=3).contains(&text.len()) && text.bytes().all(|byte| b"ab".contains(&byte));
            (2..=3).contains(&all.len()) && all.iter().all(|one| one.is_boolean() || one.as_str().is_some_and(fits))
        }),
        (same, |value| value.as_array().unwrap() == &vec![json!("again and again"); 12]),
    ]
}

#[test]
fn answers_have_the_form_that_is_asked_for() {
    let server = Server::start();
    for (schema_of, is_right) in schemas() {
        for seed in 0..4 {
            let temperature = f64::from(seed % 2) * 1.5;
            let penalties = json!({ "seed": seed, "temperature": temperature, "frequency_penalty": 0.5 });
            let answer = server.post(CHAT, body(&schema(&schema_of), penalties).to_string());
            let value = said(&answer);
            assert!(is_right(&value), "{value} for {schema_of}");
        }
    }
    // The form comes before what the client makes likelier.
    let bias = json!({ "logit_bias": { "5": 100 }, "temperature": 0 });
    let short = json!({ "const": "a" });
    assert_eq!(said(&server.post(CHAT, body(&schema(&short), bias).to_string())), "a");
    // Several choices, and a stream.
    let answer = server.post(CHAT, body(&schema(&schemas()[0].0), json!({ "n": 2, "seed": 3 })).to_string());
    let choices = answer.json()["choices"].as_array().unwrap().clone();
    assert_eq!(choices.len(), 2, "{}", answer.text());
    for choice in &choices {
        let text = choice["message"]["content"].as_str().unwrap();
        assert!(schemas()[0].1(&serde_json::from_str(text).unwrap()), "{text}");
    }
    let stream = server.post(CHAT, body(&schema(&schemas()[0].0), json!({ "stream": true, "seed": 3 })).to_string());
    let text: String = stream
        .text()
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok())
        .filter_map(|chunk| Some(chunk["choices"][0]["delta"]["content"].as_str()?.to_owned()))
        .collect();
    assert_eq!(text, choices[0]["message"]["content"].as_str().unwrap());
    // Any object, which may be cut off.
    for seed in 0..4 {
        let more = json!({ "seed": seed, "max_tokens": 200 });
        let answer = server.post(CHAT, body(&json!({ "type": "json_object" }), more).to_string()).json();
        let choice = &answer["choices"][0];
        let text = choice["message"]["content"].as_str().unwrap();
        match serde_json::from_str::<Value>(text) {
            Ok(value) => assert!(value.is_object() && choice["finish_reason"] == "stop", "{choice}"),
            Err(error) => assert!(error.is_eof() && choice["finish_reason"] == "length", "{choice}"),
        }
    }
    assert_eq!(server.metric("outcore_grammar_answers_total"), 12 + 1 + 2 + 1 + 4);
    assert_eq!(server.metric("outcore_grammar_compile_seconds_count"), 12 + 1 + 1 + 1 + 4);
    assert!(server.metric("outcore_grammar_mask_seconds_count") > 100);
    server.assert_nothing_is_held();
}

#[test]
fn answers_of_a_form_are_the_same_with_drafts_and_in_company() {
    let all: Vec<String> = schemas()
        .iter()
        .flat_map(|(of, _)| {
            (0..4).map(|seed| body(&schema(of), json!({ "seed": seed, "temperature": f64::from(seed % 2) })))
        })
        .map(|body| body.to_string())
        .collect();
    let text = |answer: &Answer| said(answer).to_string() + &answer.json()["choices"][0].to_string();
    // Attention sums each block by itself, so what it gives depends on where blocks begin, and that on the page size.
    let with = |args: &[&str]| {
        Server::with(&[&["--page-size", "16KiB"], args].concat(), Tenants::single(None).unwrap(), |_| {})
    };
    let alone = with(&[]);
    let wanted: Vec<String> = all.iter().map(|body| text(&alone.post(CHAT, body))).collect();
    let together = with(&["--speculate", "--kv-memory", "256KiB"]);
    // Others are not bound to any form.
    let free = r#"{"prompt": [1, 2, 3, 1, 2, 3, 1, 2], "max_tokens": 300, "ignore_eos": true, "temperature": 0}"#;
    std::thread::scope(|scope| {
        let (together, text) = (&together, &text);
        let others: Vec<_> = (0..3).map(|_| scope.spawn(|| together.post("/v1/completions", free).status)).collect();
        let asked: Vec<_> = all.iter().map(|body| scope.spawn(move || text(&together.post(CHAT, body)))).collect();
        for (nth, (answer, wanted)) in asked.into_iter().zip(&wanted).enumerate() {
            assert_eq!(&answer.join().unwrap(), wanted, "{}", all[nth]);
        }
        others.into_iter().for_each(|other| assert_eq!(other.join().unwrap(), 200));
    });
    // One alone, whose text repeats itself: drafts of it are right, if the time that passes take lets any pay.
    let counts = || {
        ["drafted", "accepted"].map(|what| together.metric(&format!("outcore_{what}_tokens_total{{by=\"lookup\"}}")))
    };
    let before = counts();
    assert_eq!(text(&together.post(CHAT, all.last().unwrap())), *wanted.last().unwrap());
    let [drafted, accepted] = std::array::from_fn(|nth| counts()[nth] - before[nth]);
    assert!(accepted > 0 || drafted < 20, "of {drafted} drafted tokens of a form none was right");
    together.assert_nothing_is_held();
}

/// How many answers are written together.
const BATCH: usize = 64;

/// Lets that many answers of a given form be written at once, however much memory the machine has.
fn with_room(app: &mut App) {
    let grammars = Arc::get_mut(&mut app.opened.grammars).unwrap();
    grammars.set_limits(PATIENCE, (BATCH + 2) * ANSWER_BYTES);
}

/// What all choices of an answer say.
#[track_caller]
fn all_said(answer: &Answer) -> Vec<String> {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let choices = answer.json()["choices"].as_array().unwrap().clone();
    choices.iter().for_each(|choice| assert_eq!(choice["finish_reason"], "stop", "{choice}"));
    choices.iter().map(|choice| choice["message"]["content"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn sixty_four_answers_of_a_form_are_the_same_together_with_drafts_of_both_kinds() {
    let same = json!({ "type": "array", "minItems": 3, "maxItems": 3, "items": { "const": "again" } });
    let mut schemas = schemas();
    schemas[2] = (same, |value| value == &json!(["again", "again", "again"]));
    let request = |nth: usize| {
        let more = json!({ "seed": nth, "temperature": nth % 2 });
        body(&schema(&schemas[nth % 3].0), more).to_string()
    };
    let all: Vec<String> = (0..BATCH).map(request).collect();
    // One request whose answers begin, and mostly go on, in the same passes.
    let wide = body(&schema(&schemas[2].0), json!({ "n": BATCH, "seed": 5, "max_tokens": 500 })).to_string();
    let alone = Server::with(&["--concurrency", "1"], Tenants::single(None).unwrap(), with_room);
    let wanted: Vec<String> = all.iter().map(|body| all_said(&alone.post(CHAT, body)).remove(0)).collect();
    for (nth, text) in wanted.iter().enumerate() {
        let value = serde_json::from_str(text).unwrap();
        assert!(schemas[nth % 3].1(&value), "{value} for {}", schemas[nth % 3].0);
    }
    let wanted_wide = all_said(&alone.post(CHAT, &wide));
    assert_eq!(wanted_wide.len(), BATCH);
    let folder = tempfile::tempdir().unwrap();
    let draft = folder.path().join("draft.gguf");
    small().write_gguf(&draft).unwrap();
    for (more, by) in [(["--speculate"].as_slice(), "lookup"), (&["--draft-model", draft.to_str().unwrap()], "model")] {
        let args: Vec<&str> = ["--concurrency", "64"].into_iter().chain(more.iter().copied()).collect();
        let together = Server::with(&args, Tenants::single(None).unwrap(), with_room);
        std::thread::scope(|scope| {
            let together = &together;
            let ask = |body| scope.spawn(move || all_said(&together.post(CHAT, body)).remove(0));
            let asked: Vec<_> = all.iter().map(ask).collect();
            for (nth, (answer, wanted)) in asked.into_iter().zip(&wanted).enumerate() {
                assert_eq!(&answer.join().unwrap(), wanted, "{by}: {}", all[nth]);
            }
        });
        let passes = || ["outcore_pass_tokens_total", "outcore_passes_total"].map(|name| together.metric(name));
        let before = passes();
        assert_eq!(all_said(&together.post(CHAT, &wide)), wanted_wide, "{by}");
        let [tokens, count] = std::array::from_fn(|nth| passes()[nth] - before[nth]);
        assert!(tokens > count * BATCH as u64 / 4, "{by}: {tokens} tokens in {count} passes");
        // Whether drafts pay goes by the time that passes take, so on a busy machine there may be none.
        let count = |what: &str| together.metric(&format!("outcore_{what}_tokens_total{{by=\"{by}\"}}"));
        for _ in 0..20 {
            assert_eq!(all_said(&together.post(CHAT, &all[2]))[0], wanted[2], "{by}");
        }
        let (drafted, accepted) = (count("drafted"), count("accepted"));
        assert!(accepted > 0 || drafted < 20, "{by}: of {drafted} drafted tokens of a form none was right");
        together.assert_nothing_is_held();
    }
}

#[test]
fn a_grammar_that_takes_too_long_to_compile_is_refused_with_the_limit() {
    let server = Server::with(&[], Tenants::single(None).unwrap(), |app| {
        let grammars = Arc::get_mut(&mut app.opened.grammars).unwrap();
        grammars.set_limits(Duration::from_millis(250), 4 * ANSWER_BYTES);
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // It is compiled until this is dropped.
    let (end, ended) = mpsc::channel::<()>();
    let endless = Source::Rules(Box::new(move |_| {
        let _ = ended.recv();
        Ok("start: \"a\"".to_owned())
    }));
    let error = runtime.block_on(server.app.opened.grammars.compile(endless, SCHEMA, 1)).unwrap_err();
    assert_eq!(error.status, 400, "{error}");
    assert!(error.message.contains("too complex: compiling it did not end within 0.25 s"), "{error}");
    assert_eq!((error.param.as_deref(), error.code), (Some(SCHEMA), Some("invalid_value")), "{error}");
    // Others wait for it, as long as they would wait for their own.
    let short = body(&schema(&json!({ "const": "a" })), json!({})).to_string();
    let message = server.post(CHAT, &short).assert_error(503, "server_error", None, Some("service_unavailable"));
    assert!(message.contains("Other grammars are being compiled"), "{message}");
    drop(end);
    // Theirs may take too long as well, where the machine is busy.
    let until = Instant::now() + PATIENCE;
    while server.post(CHAT, &short).status != 200 {
        assert!(Instant::now() < until, "nothing is compiled any more");
    }
    server.assert_nothing_is_held();
}

/// Schemas that cannot be used, and a part of what is said about each.
fn refused() -> Vec<(Value, &'static str)> {
    // Each level has the next one twice.
    let mut levels = Map::from_iter([("d20".to_owned(), json!({ "type": "string" }))]);
    for level in 0..20 {
        let next = json!({ "$ref": format!("#/$defs/d{}", level + 1) });
        let twice = json!([{ "allOf": [next, { "minLength": 1 }] }, { "allOf": [next, { "maxLength": 9 }] }]);
        levels.insert(format!("d{level}"), json!({ "anyOf": twice }));
    }
    let deep = json!({ "$ref": "#/$defs/d0", "$defs": levels });
    let many: Vec<Value> = (0..14)
        .map(|n| json!({ "anyOf": [{ "properties": { format!("a{n}"): {} } }, { "properties": { format!("b{n}"): {} } }] }))
        .collect();
    let properties: Map<String, Value> =
        (0..1200).map(|n| (format!("p{n}"), json!({ "enum": [n.to_string(), n] }))).collect();
    let exponential = "^(a|b)*a(a|b){20}$";
    vec![
        (json!({ "type": "wings" }), "wings"),
        (json!({ "type": 1 }), ""),
        (json!({ "enum": 1 }), ""),
        (json!({ "properties": [] }), ""),
        (json!({ "not": {} }), "not"),
        (json!({ "type": "string", "pattern": "((" }), "regex"),
        (json!({ "type": "string", "pattern": "(a)\\1" }), "backreference"),
        (json!({ "$ref": "https://example.com/schema.json" }), "example.com"),
        (json!({ "$ref": "file:///etc/passwd" }), "fetch"),
        (json!({ "$ref": "#/$defs/none" }), "none"),
        (
            json!({ "$ref": "#/$defs/a", "$defs": { "a": { "allOf": [{ "$ref": "#/$defs/a" }, { "type": "object" }] } } }),
            "circular",
        ),
        // No text meets them.
        (json!({ "$ref": "#" }), "no text can meet it"),
        (json!({ "type": "integer", "minimum": 5, "maximum": 1 }), "minimum"),
        (json!({ "enum": [] }), "empty"),
        (json!({ "allOf": [{ "type": "string", "pattern": "^a+$" }, { "pattern": "^b+$" }] }), "empty"),
        // They would take too much.
        (deep, "too complex"),
        (json!({ "allOf": many }), "too complex"),
        (json!({ "type": "object", "properties": properties }), "too complex"),
        (json!({ "type": "integer", "multipleOf": 1_000_003 }), "too complex"),
        (json!({ "type": "number", "allOf": [{ "multipleOf": 0.37 }, { "multipleOf": 41 }] }), "too complex"),
        (json!({ "type": "string", "pattern": exponential, "minLength": 5000, "maxLength": 9000 }), "too complex"),
    ]
}

#[test]
fn schemas_that_cannot_be_used_are_refused_with_the_reason_and_the_server_goes_on() {
    let server = Server::start();
    for (of, part) in refused() {
        let answer = server.post(CHAT, body(&schema(&of), json!({ "max_tokens": 5 })).to_string());
        let message = answer.assert_error(400, INVALID, Some(SCHEMA), Some("invalid_value"));
        assert!(message.contains(part), "{message}");
    }
    // An answer that gets to where it cannot go on is given up, with the reason.
    let patterns = json!({ "type": "string", "pattern": "^(.{0,5000}x){500}$" });
    let answer = server.post(CHAT, body(&schema(&patterns), json!({ "max_tokens": 2000, "seed": 1 })).to_string());
    let message = answer.assert_error(400, INVALID, Some(SCHEMA), Some("invalid_value"));
    assert!(message.contains("too many states"), "{message}");
    // Deep, but no deeper than a body may be; and nested without end.
    let mut deep = json!({ "const": 1 });
    for _ in 0..58 {
        deep = json!({ "anyOf": [deep] });
    }
    assert_eq!(said(&server.post(CHAT, body(&schema(&deep), json!({})).to_string())), 1);
    let tree = json!({ "$ref": "#/$defs/a", "$defs": { "a": { "type": "array", "items": { "$ref": "#/$defs/a" } } } });
    assert_eq!(server.post(CHAT, body(&schema(&tree), json!({ "max_tokens": 50 })).to_string()).status, 200);
    let many = body(&json!({ "type": "json_object" }), json!({ "n": 128, "max_tokens": 1 })).to_string();
    let bytes = Server::with(&["--memory", "256MiB"], Tenants::single(None).unwrap(), |_| {});
    let message = bytes.post(CHAT, many).assert_error(400, INVALID, Some("n"), Some("invalid_value"));
    assert!(message.contains("--memory"), "{message}");
    assert_eq!(server.metric("outcore_kv_blocks{state=\"used\"}"), 0);
    server.assert_lives();
    server.assert_nothing_is_held();
}
