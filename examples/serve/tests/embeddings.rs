//! Embeddings: what transformers makes of the same tokens, the same bits alone and in any company, and the API's
//! limits.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use outcore_serve::tenants::Tenants;
use serde_json::{Value, json};
use support::{Answer, CONTEXT, Client, ENDLESS, MODEL, Server, VOCAB, post};

const INVALID: &str = "invalid_request_error";
const PATH: &str = "/v1/embeddings";
const REFERENCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../llm/tests/reference/qwen3moe");
const POOLINGS: [&str; 3] = ["last", "mean", "cls"];
/// The numbers of an embedding of the synthetic model.
const DIM: usize = 64;

fn with(more: &[&str]) -> Server {
    Server::with(more, Tenants::single(None).unwrap(), |_| {})
}

/// The vectors of a whole answer.
#[track_caller]
fn vectors(answer: &Answer) -> Vec<Vec<f32>> {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let data = answer.json()["data"].as_array().unwrap().clone();
    let vector = |(nth, one): (usize, &Value)| {
        assert_eq!((&one["object"], &one["index"]), (&json!("embedding"), &json!(nth)));
        serde_json::from_value(one["embedding"].clone()).unwrap()
    };
    data.iter().enumerate().map(vector).collect()
}

#[track_caller]
fn embedded(server: &Server, input: &Value) -> Vec<Vec<f32>> {
    vectors(&server.post(PATH, json!({ "input": input }).to_string()))
}

fn some_tokens(count: usize, seed: usize) -> Vec<usize> {
    (0..count).map(|nth| (nth * nth * 7 + nth * seed + seed) % VOCAB as usize).collect()
}

/// The numbers, of four bytes each, of a tensor beside the reference model.
fn reference<T>(file: &str, name: &str, read: impl Fn([u8; 4]) -> T) -> Vec<T> {
    let path = Path::new(REFERENCE).join(file);
    let header = outcore::format::open(&path).unwrap();
    let tensor = header.tensors.iter().find(|tensor| tensor.name == name).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let bytes = &bytes[tensor.offset as usize..(tensor.offset + tensor.len) as usize];
    bytes.chunks_exact(4).map(|bytes| read(bytes.try_into().unwrap())).collect()
}

#[test]
fn embeddings_are_those_of_transformers() {
    let tokens = reference("logits.safetensors", "tokens", u32::from_le_bytes);
    let write = |path: &Path| {
        std::fs::copy(Path::new(REFERENCE).join("model.gguf"), path).unwrap();
    };
    for pooling in POOLINGS {
        let wanted = reference("hidden.safetensors", pooling, f32::from_le_bytes);
        let server = Server::of(write, &["--pooling", pooling], Tenants::single(None).unwrap(), |_| {});
        let [found] = &embedded(&server, &json!(tokens))[..] else { panic!("one input") };
        assert_eq!(found.len(), wanted.len());
        let largest = wanted.iter().fold(0f32, |most, number| most.max(number.abs()));
        let worst = found.iter().zip(&wanted).fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest;
        assert!(worst <= 1e-4, "{pooling}: {worst}");
        let length: f64 = found.iter().map(|number| f64::from(*number).powi(2)).sum();
        assert!((length - 1.0).abs() < 1e-6, "{pooling}: {length}");
        let name = format!("outcore_embeddings_total{{pooling=\"{pooling}\"}}");
        assert_eq!(server.metric(&name), 1);
    }
}

#[test]
fn the_answer_has_openais_shape_in_both_encodings() {
    let server = Server::start();
    let input = json!(["hello", "a longer text, of more tokens"]);
    let answer = server.post(PATH, json!({ "input": input, "model": MODEL, "user": "u" }).to_string());
    let plain = vectors(&answer);
    let answer = answer.json();
    assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!(MODEL)));
    let tokenizer = &server.app.opened.tokenizer;
    let count = |text: &Value| tokenizer.encode(text.as_str().unwrap(), true).unwrap().len();
    let tokens: usize = input.as_array().unwrap().iter().map(count).sum();
    assert_eq!(answer["usage"], json!({ "prompt_tokens": tokens, "total_tokens": tokens }));
    assert_eq!(server.metric("outcore_prompt_tokens_total"), tokens as u64);
    assert!(plain.len() == 2 && plain.iter().all(|vector| vector.len() == DIM) && plain[0] != plain[1]);

    let encoded = server.post(PATH, json!({ "input": input, "encoding_format": "base64" }).to_string()).json();
    for (nth, plain) in plain.iter().enumerate() {
        let bytes = BASE64_STANDARD.decode(encoded["data"][nth]["embedding"].as_str().unwrap()).unwrap();
        let numbers = bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap()));
        assert_eq!(&numbers.collect::<Vec<f32>>(), plain);
    }

    // The same texts one by one, and as token ids.
    for (nth, text) in input.as_array().unwrap().iter().enumerate() {
        let ids = json!(tokenizer.encode(text.as_str().unwrap(), true).unwrap());
        for input in [text.clone(), json!([text]), ids.clone(), json!([ids])] {
            assert_eq!(embedded(&server, &input), [plain[nth].clone()], "{input}");
        }
    }

    let short = vectors(&server.post(PATH, json!({ "input": input, "dimensions": 5 }).to_string()));
    for (short, plain) in short.iter().zip(&plain) {
        let length = plain[..5].iter().map(|number| number * number).sum::<f32>().sqrt();
        assert!(short.len() == 5 && short.iter().zip(plain).all(|(a, b)| (a - b / length).abs() < 1e-6));
    }
    let all = vectors(&server.post(PATH, json!({ "input": input, "dimensions": DIM }).to_string()));
    assert_eq!(all, plain);
    server.assert_nothing_is_held();
}

#[test]
fn wrong_inputs_are_refused_by_name() {
    let server = with(&["--context", "40"]);
    let long = some_tokens(41, 1);
    for (body, param, code) in [
        (json!({ "input": "" }), "input", "invalid_value"),
        (json!({ "input": [] }), "input", "invalid_value"),
        (json!({ "input": [[1], []] }), "input[1]", "invalid_value"),
        (json!({ "input": ["a", [1]] }), "input[1]", "invalid_type"),
        (json!({ "input": [[1], "a"] }), "input[1]", "invalid_type"),
        (json!({ "input": vec!["a"; 2049] }), "input", "invalid_value"),
        (json!({ "input": [VOCAB] }), "input", "invalid_value"),
        (json!({ "input": [[1], [2, VOCAB]] }), "input[1]", "invalid_value"),
        (json!({ "input": long }), "input", "context_length_exceeded"),
        (json!({ "input": [[1], long] }), "input[1]", "context_length_exceeded"),
        (json!({ "input": "a".repeat(9999) }), "input", "context_length_exceeded"),
        (json!({ "input": "a", "encoding_format": "hex" }), "encoding_format", "invalid_value"),
        (json!({ "input": "a", "dimensions": DIM + 1 }), "dimensions", "invalid_value"),
    ] {
        server.post(PATH, body.to_string()).assert_error(400, INVALID, Some(param), Some(code));
    }
    let other = json!({ "input": "a", "model": "other" }).to_string();
    server.post(PATH, other).assert_error(404, INVALID, Some("model"), Some("model_not_found"));
    // The whole context: nothing is written behind it.
    assert_eq!(embedded(&server, &json!(some_tokens(40, 1))).len(), 1);
    server.assert_nothing_is_held();
    let strict = with(&["--unknown-fields", "refuse"]);
    let unknown = json!({ "input": "a", "wings": 2 }).to_string();
    strict.post(PATH, unknown).assert_error(400, INVALID, Some("wings"), Some("unknown_parameter"));
    assert_eq!(CONTEXT, 16384, "the other tests' inputs are shorter");
}

/// Inputs of which some are longer than a pass, alone; then together, beside answers, where there is room for few.
#[test]
fn embeddings_are_the_same_alone_and_in_any_company() {
    let inputs: Vec<Vec<usize>> = (0..8).map(|nth| some_tokens([3, 900, 70, 1, 400][nth % 5], nth / 2)).collect();
    let answers: Vec<Vec<usize>> = (0..4).map(|nth| some_tokens(30 + 40 * nth, 5 + nth)).collect();
    // They get more tokens than they are expected to get.
    let body =
        |prompt: &Vec<usize>| json!({ "prompt": prompt, "max_tokens": 400, "temperature": 0, "ignore_eos": true });
    // Attention sums up block by block, so the size of pages changes last bits.
    let [size, least] = ["--page-size", "16KiB"];
    for pooling in POOLINGS {
        let server = with(&["--pooling", pooling, size, least]);
        let alone: Vec<Vec<f32>> = inputs.iter().flat_map(|input| embedded(&server, &json!([input]))).collect();
        let said = |answer: &Answer| answer.json()["choices"][0]["text"].clone();
        let said_alone: Vec<_> =
            answers.iter().map(|prompt| said(&server.post("/v1/completions", body(prompt).to_string()))).collect();
        assert!(said_alone.iter().all(|text| text.as_str().is_some_and(|text| !text.is_empty())));
        // Room for half of what is asked for; the longest inputs have more than all of it.
        let tight = |how| vec!["--kv-memory", "512KiB", "--preempt", how];
        let mut servers = vec![vec!["--concurrency", "3", "--speculate"]];
        if pooling == "mean" {
            // What has been summed up is kept, or is summed up again.
            servers.extend([tight("recompute"), tight("park")]);
        }
        for more in servers {
            let server = with(&[&["--pooling", pooling, size, least], &more[..]].concat());
            let is_tight = more.contains(&"--preempt");
            let has_made_room = || server.get("/metrics").text().contains("outcore_preemptions_total{");
            let until = Instant::now() + support::PATIENCE;
            // Again, if the machine was so busy that one request had ended when the next one came.
            loop {
                let mut asked: Vec<Client> = Vec::new();
                for prompt in &answers {
                    asked.push(server.connect());
                    asked.last_mut().unwrap().send(post("/v1/completions", "", body(prompt).to_string()));
                }
                assert!(embedded(&server, &json!(inputs)) == alone, "{pooling}: {more:?}");
                for (client, wanted) in asked.iter_mut().zip(&said_alone) {
                    assert_eq!(&said(&client.answer()), wanted, "{pooling}: {more:?}");
                }
                server.assert_nothing_is_held();
                if !is_tight || has_made_room() {
                    break;
                }
                assert!(Instant::now() < until, "{pooling}: {more:?}: nobody had to make room");
            }
        }
    }
}

/// Tokens whose keys and values are there have no hidden states.
#[test]
fn a_beginning_that_was_read_before_changes_no_embedding() {
    for pooling in POOLINGS {
        let server = with(&["--pooling", pooling, "--page-size", "16KiB"]);
        let input = some_tokens(400, 3);
        let found = embedded(&server, &json!(input));
        assert_eq!(server.metric("outcore_cached_tokens_total"), 0);
        assert_eq!(embedded(&server, &json!(input)), found, "{pooling}");
        let cached = server.metric("outcore_cached_tokens_total");
        assert_eq!(cached >= 300, pooling == "last", "{pooling}: {cached} tokens");
        // An answer finds what an embedding has read, whatever its pooling.
        let body = json!({ "prompt": input, "max_tokens": 1 }).to_string();
        let usage = server.post("/v1/completions", body).json()["usage"].clone();
        assert!(usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() >= 300, "{pooling}: {usage}");
    }
}

/// A GGUF file of the Llama family then says that its pooling is of this kind.
fn with_pooling(path: &Path, kind: u32) {
    let mut bytes = std::fs::read(path).unwrap();
    // Tensors stay aligned: the two keys have 64 bytes.
    let pair = |key: &str, value: u32| {
        let number = [4u32.to_le_bytes(), value.to_le_bytes()].concat();
        [&(key.len() as u64).to_le_bytes(), key.as_bytes(), &number].concat()
    };
    let more = [pair("llama.pooling_type", kind), pair("general.filler", 0)].concat();
    assert_eq!(more.len(), 64);
    let pairs = u64::from_le_bytes(bytes[16..24].try_into().unwrap());
    bytes[16..24].copy_from_slice(&(pairs + 2).to_le_bytes());
    bytes.splice(24..24, more);
    std::fs::write(path, bytes).unwrap();
}

/// Such as that of a reranker: no answer needs it.
#[test]
fn regression_a_model_with_another_pooling_writes_answers() {
    let of = |kind, more: &[&str]| {
        let patch = |path: &Path| with_pooling(path, kind);
        Server::with_model(more, Tenants::single(None).unwrap(), patch, |_| {})
    };
    let server = of(4, &[]);
    server.assert_lives();
    let message = server.post(PATH, r#"{"input": "a"}"#).assert_error(400, INVALID, None, None);
    assert!(message.contains("llama.pooling_type is 4") && message.contains("--pooling last"), "{message}");
    server.assert_lives();
    server.assert_nothing_is_held();
    assert_eq!(server.metric("outcore_embeddings_total{pooling=\"none\"}"), 0);
    let last = embedded(&of(3, &[]), &json!("text"));
    assert_eq!(embedded(&of(4, &["--pooling", "last"]), &json!("text")), last);
}

#[test]
fn more_inputs_than_places_follow_each_other() {
    let server = with(&["--concurrency", "2", "--queue", "1"]);
    let inputs: Vec<String> = (0..40).map(|nth| format!("text {nth}")).collect();
    let all = embedded(&server, &json!(inputs));
    let alone: Vec<_> = inputs.iter().flat_map(|input| embedded(&server, &json!(input))).collect();
    assert!(all.len() == 40 && all == alone);
    // All places but one are taken by others.
    let mut others = [server.connect(), server.connect()];
    for client in &mut others {
        client.send(post("/v1/completions", "", ENDLESS));
        client.until("data: ");
    }
    let mut waits = server.connect();
    waits.send(post(PATH, "", json!({ "input": inputs }).to_string()));
    let until = Instant::now() + support::PATIENCE;
    while server.app.opened.engine.unfinished() < 3 {
        assert!(Instant::now() < until);
        std::thread::yield_now();
    }
    let refused = server.post(PATH, r#"{"input": "a"}"#);
    let message = refused.assert_error(429, "rate_limit_error", None, Some("rate_limit_exceeded"));
    assert!(message.contains("overloaded") && refused.header("retry-after").is_some(), "{message}");
    drop(others);
    assert!(vectors(&waits.answer()) == all);
    server.assert_nothing_is_held();
}

#[test]
fn a_client_that_goes_away_leaves_nothing_and_a_deadline_ends_a_request() {
    let server = with(&["--concurrency", "2"]);
    let inputs: Vec<Vec<usize>> = (0..200).map(|nth| some_tokens(3000, nth)).collect();
    let body = json!({ "input": inputs }).to_string();
    let mut client = server.connect();
    client.send(post(PATH, "", &body));
    let until = Instant::now() + support::PATIENCE;
    while server.app.opened.engine.unfinished() == 0 {
        assert!(Instant::now() < until);
        std::thread::yield_now();
    }
    drop(client);
    server.assert_nothing_is_held();
    let done = server.metric("outcore_embeddings_total{pooling=\"last\"}");
    assert!(done < 200, "{done} were embedded for nobody");
    server.assert_lives();

    let late = Server::with(&["--concurrency", "1"], Tenants::single(None).unwrap(), |app| {
        app.timeout = Duration::from_millis(1);
    });
    late.post(PATH, &body).assert_error(503, "server_error", None, Some("service_unavailable"));
    late.assert_nothing_is_held();
}

/// What was begun is embedded to its end, and nothing new is begun.
#[test]
fn a_server_that_drains_embeds_what_was_begun() {
    let server = with(&["--concurrency", "2"]);
    let inputs: Vec<Vec<usize>> = (0..30).map(|nth| some_tokens(200 + nth, nth)).collect();
    let wanted = embedded(&server, &json!(inputs));
    let mut client = server.connect();
    client.send(post(PATH, "", json!({ "input": inputs }).to_string()));
    let engine = &server.app.opened.engine;
    let until = Instant::now() + support::PATIENCE;
    while engine.unfinished() == 0 {
        assert!(Instant::now() < until);
        std::thread::yield_now();
    }
    engine.drain();
    let refused = server.post(PATH, r#"{"input": "a"}"#);
    let message = refused.assert_error(503, "server_error", None, Some("service_unavailable"));
    assert!(message.contains("shutting down") && refused.header("retry-after").is_some(), "{message}");
    assert_eq!(server.get("/ready").status, 503);
    assert!(vectors(&client.answer()) == wanted);
    server.assert_nothing_is_held();
}

#[test]
fn tenants_have_their_limits() {
    let tenants = r#"{"tenants": [
        {"name": "a", "token": "aaaaaaaa", "concurrency": 1, "blocks": 2, "operator": true},
        {"name": "b", "token": "bbbbbbbb", "tokens_per_minute": 60}
    ]}"#;
    let server = Server::with(&["--page-size", "16KiB"], Tenants::parse(tenants).unwrap(), |_| {});
    let [a, b] = ["a", "b"].map(|letter| format!("Authorization: Bearer {}\r\n", letter.repeat(8)));
    let ask = |token: &str, input: &Value| server.ask(post(PATH, token, json!({ "input": input }).to_string()));
    ask("", &json!("x")).assert_error(401, INVALID, None, Some("invalid_api_key"));
    // One after the other, since it may have one at a time.
    assert_eq!(vectors(&ask(&a, &json!(["x", "y", "z"]))).len(), 3);
    let block = server.app.opened.places.pool().layout().block_tokens() as usize;
    assert_eq!(vectors(&ask(&a, &json!(some_tokens(2 * block, 1)))).len(), 1);
    let too_long = ask(&a, &json!([[1], some_tokens(2 * block + 1, 1)]));
    too_long.assert_error(400, INVALID, Some("input[1]"), Some("context_length_exceeded"));
    assert_eq!(ask(&b, &json!(some_tokens(100, 1))).status, 200);
    let refused = ask(&b, &json!([1]));
    let message = refused.assert_error(429, "rate_limit_error", None, Some("rate_limit_exceeded"));
    assert!(message.contains("tokens a minute"), "{message}");
    // 100 were taken of 60: 41 have to come back.
    assert!((30..=42).contains(&refused.header("retry-after").unwrap().parse::<u32>().unwrap()));
}

#[test]
fn what_does_not_fit_into_memory_is_refused_with_what_to_do() {
    let server = Server::with(&[], Tenants::single(None).unwrap(), |app| {
        app.room = outcore_serve::http::Room::new(900_000);
        app.max_body = 64 << 10;
    });
    let inputs = vec!["a"; 2000];
    let message = server.post(PATH, json!({ "input": inputs }).to_string()).assert_error(400, INVALID, None, None);
    assert!(message.contains("--memory"), "{message}");
    // A body that is answered in many chunks.
    assert_eq!(embedded(&server, &json!(inputs[..200])).len(), 200);
    let room = &server.app.room;
    server.assert_nothing_is_held();
    let until = Instant::now() + support::PATIENCE;
    while room.free() != 900_000 {
        assert!(Instant::now() < until, "{} bytes are free", room.free());
        std::thread::yield_now();
    }
}
