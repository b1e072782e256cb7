//! Requests that nobody meant to send: valid ones, changed at random. The fuzz target `serve_request` looks for the
//! same with more time.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fuzzed;

use outcore_serve::{error, request, tenants};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// Requests, and a file of tenants, that have all members there are.
fn valid() -> [Value; 5] {
    let mut chat = json!({
        "model": "m", "max_completion_tokens": 5, "logprobs": true, "top_logprobs": 3, "modalities": ["text"],
        "messages": [
            { "role": "developer", "content": "a", "name": "n" },
            { "role": "user", "content": [{ "type": "text", "text": "b" }, { "type": "text", "text": "c" }] },
            { "role": "assistant", "content": "d", "refusal": null, "tool_calls": [] },
            { "role": "assistant", "content": null, "tool_calls": [
                { "id": "c", "type": "function", "function": { "name": "f", "arguments": "{\"a\": 1}" } },
            ] },
            { "role": "tool", "tool_call_id": "c", "content": "e" },
        ],
        "tools": [{ "type": "function", "function": {
            "name": "f", "description": "g", "parameters": { "type": "object" }, "strict": true,
        } }],
        "tool_choice": { "type": "function", "function": { "name": "f" } }, "chat_template_kwargs": { "enable_thinking": false }, "reasoning_effort": "low", "response_format": { "type": "text" }, "metadata": { "k": "v" },
    });
    let mut text = json!({ "prompt": ["a", "b"], "echo": true, "best_of": 2, "n": 2, "suffix": "" });
    let mut ids =
        json!({ "prompt": [[1, 2], [3]], "logit_bias": { "1": 5, "2": -100 }, "ignore_eos": true, "logprobs": 2 });
    let common = json!({
        "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": -3, "stop": ["x", "y"], "max_tokens": 7, "user": "u",
        "stream": true, "stream_options": { "include_usage": true, "include_obfuscation": false },
        "frequency_penalty": 0.5, "presence_penalty": -0.5, "min_p": 0.05, "repetition_penalty": 1.1,
    });
    for request in [&mut chat, &mut text, &mut ids] {
        let fields = request.as_object_mut().unwrap();
        fields.extend(common.as_object().unwrap().clone());
    }
    let tenants = json!({ "tenants": [
        { "name": "a", "token": "aaaaaaaa", "concurrency": 2, "tokens_per_minute": 60, "blocks": 9 },
        { "name": "b", "token": "bbbbbbbb", "reserved_blocks": 2, "weight": 3, "shares": true },
    ] });
    let embeddings = json!({
        "input": ["a", "b\n"], "model": "m", "encoding_format": "base64", "dimensions": 8, "user": "u",
    });
    [chat, text, ids, embeddings, tenants]
}

fn any_json() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (-2i64..200).prop_map(Value::from),
    ];
    let text = prop_oneof![any::<String>().prop_map(Value::from), Just(json!("x".repeat(3000)))];
    let leaf = prop_oneof![Just(Value::Null), any::<bool>().prop_map(Value::from), number, text];
    leaf.prop_recursive(3, 16, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((any::<String>(), inner), 0..4)
                .prop_map(|members| Value::from(members.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

/// Puts `new` in the place of the nth of all values, counted from the outside.
fn replace(value: &mut Value, nth: &mut usize, new: &Value) {
    if *nth == 0 {
        value.clone_from(new);
    }
    *nth = nth.wrapping_sub(1);
    match value {
        Value::Array(all) => all.iter_mut().for_each(|value| replace(value, nth, new)),
        Value::Object(members) => members.values_mut().for_each(|value| replace(value, nth, new)),
        _ => {}
    }
}

#[test]
fn valid_requests_are_accepted_and_null_is_the_same_as_absent() {
    let [chat, text, ids, embeddings, file] = valid();
    for valid in [&chat, &text, &ids, &embeddings] {
        assert!(fuzzed::check(valid.to_string().as_bytes()), "{valid}");
    }
    tenants::Tenants::parse(&file.to_string()).unwrap();
    for (parse, valid) in
        [(request::chat as fn(&[u8]) -> _, &chat), (request::completion, &text), (request::completion, &ids)]
    {
        for name in valid.as_object().unwrap().keys() {
            let [mut null, mut absent] = [valid.clone(), valid.clone()];
            null[name] = Value::Null;
            absent.as_object_mut().unwrap().remove(name);
            let [null, absent] = [null, absent].map(|request| parse(request.to_string().as_bytes()));
            assert_eq!(null, absent, "{name}");
        }
    }
    for name in embeddings.as_object().unwrap().keys() {
        let [mut null, mut absent] = [embeddings.clone(), embeddings.clone()];
        null[name] = Value::Null;
        absent.as_object_mut().unwrap().remove(name);
        let [null, absent] =
            [null, absent].map(|request| request::embeddings::embedding(request.to_string().as_bytes()));
        assert_eq!(null, absent, "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn values_of_any_kind_in_any_place_are_refused_properly_or_within_the_limits(
        which in 0..5usize, nth in 0..60usize, new in any_json(), name in any::<String>(), more in any_json(),
    ) {
        let mut value = valid()[which].clone();
        replace(&mut value, &mut nth.clone(), &new);
        fuzzed::check(value.to_string().as_bytes());
        if let Some(fields) = value.as_object_mut() {
            fields.insert(name, more);
        }
        fuzzed::check(value.to_string().as_bytes());
    }

    #[test]
    fn bytes_of_any_kind_in_any_place_are_refused_properly_or_within_the_limits(
        which in 0..5usize, at in any::<prop::sample::Index>(), count in 0..9usize,
        new in prop::collection::vec(any::<u8>(), 0..9),
    ) {
        let mut bytes = valid()[which].to_string().into_bytes();
        let at = at.index(bytes.len());
        let end = bytes.len().min(at + count);
        bytes.splice(at..end, new);
        fuzzed::check(&bytes);
        fuzzed::check(&bytes[..at]);
    }
}

/// Writes the seeds of the fuzz target.
#[test]
#[ignore = "writes into the tree"]
fn write_seeds() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/serve_request");
    std::fs::create_dir_all(&folder).unwrap();
    for (name, value) in ["chat", "text", "ids", "embeddings", "tenants"].iter().zip(valid()) {
        std::fs::write(folder.join(name), value.to_string()).unwrap();
    }
}

#[test]
fn fuzz_corpus() {
    let fuzz = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    let mut requests = 0;
    for folder in ["corpus", "regressions"] {
        let Ok(files) = std::fs::read_dir(fuzz.join(folder).join("serve_request")) else { continue };
        for file in files {
            requests += usize::from(fuzzed::check(&std::fs::read(file.unwrap().path()).unwrap()));
        }
    }
    assert!(requests >= 4, "no seed is a request: run cargo test --test requests -- --ignored write_seeds");
}
