//! Hostile clients: whatever they send, the server answers in OpenAI's shape or ends the connection, and goes on. Bytes
//! are written to sockets, for what no HTTP library would send.
//!
//! Where hyper refuses a head it answers by itself, with a status, `connection: close` and no body: 400 for a head that
//! is no HTTP, 431 for one that is too long or has too many headers. It has no hook for a body. A head that does not
//! come in time gets no answer: the connection ends.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::time::Duration;

use outcore_llm::Tokenizer;
use outcore_serve::http::{App, Room};
use outcore_serve::request::bytes_to_parse;
use outcore_serve::tenants::Tenants;
use serde_json::{Value, json};
use support::{Answer, CONTEXT, ENDLESS, MODEL, Server, VOCAB, get, post};

const INVALID: &str = "invalid_request_error";
const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn two_tenants() -> Tenants {
    let text = r#"{"tenants": [{"name": "a", "token": "aaaaaaaa", "concurrency": 1},
        {"name": "b", "token": "bbbbbbbb", "tokens_per_minute": 3}]}"#;
    Tenants::parse(text).unwrap()
}

#[test]
fn every_documented_error_has_openais_shape() {
    let server = Server::with(&["--max-tokens", "100", "--max-body", "4KiB"], Tenants::single(None).unwrap(), |_| {});
    let bad = [
        (CHAT, r#"{"messages": ["#, None, None),
        (CHAT, "[]", None, None),
        (CHAT, "{}", Some("messages"), Some("missing_required_parameter")),
        (CHAT, r#"{"messages": null}"#, Some("messages"), Some("missing_required_parameter")),
        (CHAT, r#"{"messages": []}"#, Some("messages"), Some("invalid_value")),
        (CHAT, r#"{"messages": "hello"}"#, Some("messages"), Some("invalid_type")),
        (CHAT, r#"{"messages": [{"role": 1}]}"#, Some("messages[0].role"), Some("invalid_type")),
        (CHAT, r#"{"messages": [{"role": "user"}]}"#, Some("messages[0].content"), Some("missing_required_parameter")),
        (TEXT, r#"{"prompt": [1], "temperature": "hot"}"#, Some("temperature"), Some("invalid_type")),
        (TEXT, r#"{"prompt": [1], "temperature": 3}"#, Some("temperature"), Some("invalid_value")),
        (TEXT, r#"{"prompt": [1], "tools": [1]}"#, Some("tools"), Some("unsupported_parameter")),
        (TEXT, r#"{"prompt": [1], "n": 129}"#, Some("n"), Some("invalid_value")),
        (TEXT, r#"{"prompt": ""}"#, Some("prompt"), Some("invalid_value")),
        (TEXT, r#"{"prompt": [[]]}"#, Some("prompt"), Some("invalid_value")),
        (TEXT, r#"{"prompt": [1], "max_tokens": 101}"#, Some("max_tokens"), Some("invalid_value")),
        (TEXT, r#"{"prompt": [1], "max_tokens": 99999}"#, Some("prompt"), Some("context_length_exceeded")),
        (TEXT, r#"{"prompt": [1], "stream_options": {}}"#, Some("stream_options"), None),
    ];
    for (path, body, param, code) in bad {
        server.post(path, body).assert_error(400, INVALID, param, code);
    }
    let unknown = json!({ "prompt": [VOCAB], "max_tokens": 1 }).to_string();
    server.post(TEXT, unknown).assert_error(400, INVALID, Some("prompt"), Some("invalid_value"));
    server.post(TEXT, b"{\"prompt\": \"\xff\"}").assert_error(400, INVALID, None, None);
    let evil = "GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n";
    server.ask(evil).assert_error(403, INVALID, None, None);
    let other = r#"{"prompt": [1], "model": "other"}"#;
    server.post(TEXT, other).assert_error(404, INVALID, Some("model"), Some("model_not_found"));
    server.get("/v1/models/other").assert_error(404, INVALID, Some("model"), Some("model_not_found"));
    server.get("/v2").assert_error(404, INVALID, None, Some("unknown_url"));
    let answer = server.get(CHAT);
    answer.assert_error(405, INVALID, None, Some("method_not_supported"));
    assert_eq!(answer.header("allow"), Some("post"));
    server.post(TEXT, vec![b' '; 4097]).assert_error(413, INVALID, None, Some("request_too_large"));
    server.ask(format!("POST {TEXT} HTTP/1.1\r\nHost: localhost\r\n\r\n")).assert_error(415, INVALID, None, None);
    server.assert_lives();
    server.app.opened.engine.drain();
    let answer = server.post(TEXT, r#"{"prompt": [1]}"#);
    answer.assert_error(503, "server_error", None, Some("service_unavailable"));
    assert_eq!(answer.header("retry-after"), Some("5"));
    server.get("/ready").assert_error(503, "server_error", None, Some("service_unavailable"));

    let server = Server::with(&["--queue", "0", "--concurrency", "1"], two_tenants(), |app| {
        app.within.body = Duration::from_millis(100);
    });
    let [a, b] = ["a", "b"].map(|letter| format!("Authorization: Bearer {}\r\n", letter.repeat(8)));
    let answer = server.post(TEXT, ENDLESS);
    answer.assert_error(401, INVALID, None, Some("invalid_api_key"));
    assert_eq!(answer.header("www-authenticate"), Some("bearer"));
    let mut late = server.connect();
    let whole = post(TEXT, &a, ENDLESS);
    late.send(&whole[..whole.len() - 1]);
    late.answer().assert_error(408, INVALID, None, None);
    let mut first = server.connect();
    first.send(post(TEXT, &a, ENDLESS));
    first.until("data: ");
    for (token, why) in [(&a, "at a time"), (&b, "overloaded")] {
        let answer = server.ask(post(TEXT, token, r#"{"prompt": [1], "max_tokens": 1}"#));
        let message = answer.assert_error(429, "rate_limit_error", None, Some("rate_limit_exceeded"));
        assert!(message.contains(why), "{message}");
        assert!(answer.header("retry-after").is_some_and(|after| after.parse::<u32>().unwrap() > 0));
    }
    drop(first);
    let until = std::time::Instant::now() + support::PATIENCE;
    while server.app.opened.engine.unfinished() > 0 {
        assert!(std::time::Instant::now() < until);
        std::thread::yield_now();
    }
    let body = r#"{"prompt": [1, 2, 3, 4, 5, 6, 7, 8], "max_tokens": 1}"#;
    assert_eq!(server.ask(post(TEXT, &b, body)).status, 200);
    let answer = server.ask(post(TEXT, &b, body));
    let message = answer.assert_error(429, "rate_limit_error", None, Some("rate_limit_exceeded"));
    assert!(message.contains("tokens a minute"), "{message}");
    assert!(answer.header("retry-after").unwrap().parse::<u32>().unwrap() > 60);
}

#[test]
fn bearer_tokens_that_are_wrong_or_malformed_are_refused() {
    let server = Server::with(&[], two_tenants(), |_| {});
    let good = "Authorization: Bearer aaaaaaaa\r\n";
    let wrong: [&[u8]; 9] = [
        b"",
        b"Authorization:\r\n",
        b"Authorization: Bearer\r\n",
        b"Authorization: Bearer  \r\n",
        b"Authorization: Bearer aaaaaaa\r\n",
        b"Authorization: Bearer aaaaaaaa aaaaaaaa\r\n",
        b"Authorization: Basic aaaaaaaa\r\n",
        b"Authorization: \xff\xfe aaaaaaaa\r\n",
        b"X-Authorization: Bearer aaaaaaaa\r\n",
    ];
    let long = format!("Authorization: Bearer {}\r\n", "a".repeat(16000));
    for line in wrong.into_iter().chain([long.as_bytes()]) {
        for path in ["/v1/models", "/v1/models/small", "/metrics", "/pages"] {
            let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n");
            let answer = server.ask([head.as_bytes(), line, b"\r\n"].concat());
            let message = answer.assert_error(401, INVALID, None, Some("invalid_api_key"));
            assert_eq!(answer.header("www-authenticate"), Some("bearer"));
            assert!(!message.contains("aaaa"), "{message}");
        }
    }
    let head = "GET /v1/models HTTP/1.1\r\nHost: any.example\r\n";
    assert_eq!(server.ask(format!("{head}{good}\r\n")).status, 200);
    assert_eq!((server.get("/health").status, server.get("/ready").status), (200, 200));
    // Who may not ask is told so before the body has come, and is not asked to send it.
    let mut client = server.connect();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n";
    client.send(head);
    client.answer().assert_error(401, INVALID, None, Some("invalid_api_key"));
}

#[test]
fn bodies_that_are_no_requests_are_refused() {
    let server = Server::start();
    let deep = "[".repeat(100_000);
    let long = format!("{{\"prompt\": [1], \"{}\": 1}}", "x".repeat(100_000));
    let bodies = [
        "",
        "null",
        "\0",
        "{",
        "{\"prompt\": [1]} trailing",
        r#"{"prompt": [1], "temperature": 1e999}"#,
        r#"{"prompt": [1], "temperature": NaN}"#,
        r#"{"prompt": [-1]}"#,
        r#"{"prompt": [4294967296]}"#,
        r#"{"prompt": [1.5]}"#,
        r#"{"prompt": [1, "two"]}"#,
        r#"{"prompt": ["one", 2]}"#,
        r#"{"prompt": {"a": 1}}"#,
        r#"{"prompt": [1], "seed": 1.5}"#,
        r#"{"prompt": [1], "stop": ["a", "b", "c", "d", "e"]}"#,
        r#"{"prompt": [1], "stop": ""}"#,
        r#"{"prompt": [1], "max_tokens": 99999999999999999999}"#,
        &deep,
    ];
    for body in bodies {
        let answer = server.post(TEXT, body);
        assert_eq!(answer.status, 400, "{}", answer.text());
        answer.assert_shape();
    }
    // Fields that nobody knows have no effect.
    for body in [r#"{"prompt": [1], "\u0000\u001b[31m": 1}"#, &long] {
        assert_eq!(server.post(TEXT, body).status, 200);
    }
    // The last of two members with the same name counts, as in most parsers.
    let twice = r#"{"prompt": {}, "prompt": [1], "max_tokens": 1, "temperature": 1e-45}"#;
    assert_eq!(server.post(TEXT, twice).status, 200);
    let long = json!({ "prompt": vec![1; CONTEXT as usize], "max_tokens": 1 }).to_string();
    let message = server.post(TEXT, long).assert_error(400, INVALID, Some("prompt"), Some("context_length_exceeded"));
    assert!(message.contains("16384"), "{message}");
    let long = json!({ "messages": [{ "role": "user", "content": "a".repeat(CONTEXT as usize) }] }).to_string();
    server.post(CHAT, long).assert_error(400, INVALID, Some("messages"), Some("context_length_exceeded"));
    for kind in ["", "Content-Type: text/plain\r\n", "Content-Type: application/x-www-form-urlencoded\r\n"] {
        let head = format!("POST {TEXT} HTTP/1.1\r\nHost: localhost\r\n{kind}Content-Length: 2\r\n\r\n{{}}");
        server.ask(head).assert_error(415, INVALID, None, None);
    }
    server.assert_lives();
    server.assert_nothing_is_held();
}

#[test]
fn bodies_without_end_are_cut_off_and_the_answer_arrives() {
    let server = Server::with(&["--max-body", "64KiB"], Tenants::single(None).unwrap(), |_| {});
    let head = format!("POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n");
    // It says so: not one byte of it has to come.
    for length in ["65537", "9223372036854775807", "18446744073709551613"] {
        let answer = server.ask(format!("{head}Content-Length: {length}\r\n\r\n"));
        answer.assert_error(413, INVALID, None, Some("request_too_large"));
    }
    // Lengths that are none, and two that differ.
    for lengths in ["-1", "1e3", "99999999999999999999", "0x10", "3\r\nContent-Length: 4"] {
        let answer = server.ask(format!("{head}Content-Length: {lengths}\r\n\r\nabcd"));
        assert_eq!((answer.status, answer.body.len()), (400, 0), "{lengths}");
    }
    // It never says how long it is.
    let mut client = server.connect();
    client.send(format!("{head}Transfer-Encoding: chunked\r\n\r\n"));
    let chunk = [b"10000\r\n".as_slice(), &[b' '; 0x10000], b"\r\n"].concat();
    while client.try_send(&chunk) {}
    client.answer().assert_error(413, INVALID, None, Some("request_too_large"));
    // All of it is sent before the answer is read, as most clients do.
    let mut client = server.connect();
    client.try_send(post(TEXT, "", vec![b' '; 4 << 20]));
    client.answer().assert_error(413, INVALID, None, Some("request_too_large"));
    // Chunks whose sizes are no numbers.
    for size in ["zz", "-1", "ffffffffffffffffff", ""] {
        let answer = server.ask(format!("{head}Transfer-Encoding: chunked\r\n\r\n{size}\r\nabc"));
        answer.assert_error(400, INVALID, None, None);
    }
    server.assert_lives();
}

#[test]
fn regression_bodies_together_take_no_more_memory_than_there_is_for_requests() {
    let server = Server::with(&["--max-body", "64KiB"], Tenants::single(None).unwrap(), |app| {
        app.room = Room::new(2 * 4 * bytes_to_parse(64_000));
        app.within.body = Duration::from_secs(2);
    });
    let whole = post(TEXT, "", vec![b' '; 64_000]);
    let mut clients: Vec<_> = (0..5).map(|_| server.connect()).collect();
    clients.iter_mut().for_each(|client| client.send(&whole[..whole.len() - 1]));
    let answers: Vec<_> = clients.iter_mut().map(|client| client.answer()).collect();
    answers.iter().for_each(|answer| drop(answer.assert_shape()));
    let refused: Vec<_> = answers.iter().filter(|answer| answer.status == 503).collect();
    assert!(!refused.is_empty() && answers.iter().all(|answer| [408, 503].contains(&answer.status)));
    assert_eq!(refused[0].header("retry-after"), Some("1"));
    // The room is there again.
    assert_eq!(server.ask(&whole).status, 400);
    server.assert_lives();
}

/// As completions name a token.
fn name(tokenizer: &Tokenizer, id: u32) -> String {
    match std::str::from_utf8(tokenizer.bytes(id)) {
        Ok("") => tokenizer.token(id).unwrap().to_owned(),
        Ok(text) => text.to_owned(),
        Err(_) => format!("bytes:{}", tokenizer.bytes(id).escape_ascii()),
    }
}

/// The values of a stream's events, without the last, which is no JSON.
fn events(answer: &Answer) -> Vec<Value> {
    let text = answer.text();
    let mut events: Vec<&str> = text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    assert_eq!(events.pop(), Some("[DONE]"));
    events.into_iter().map(|event| serde_json::from_str(event).unwrap()).collect()
}

#[test]
fn regression_logprobs_of_completions_tell_tokens_apart_and_where_they_begin() {
    let server = Server::start();
    let tokenizer = &server.app.opened.tokenizer;
    for most in [0, 3] {
        let mut body = json!({
            "prompt": [5, 6], "max_tokens": 60, "ignore_eos": true, "seed": 3, "logprobs": most,
        });
        let answer = server.post(TEXT, body.to_string()).json();
        let logprobs = &answer["choices"][0]["logprobs"];
        let list = |name: &str| logprobs[name].as_array().unwrap().clone();
        let names = list("tokens");
        assert_eq!(names.len(), 60);
        let ids = names.iter().map(|token| (0..VOCAB as u32).find(|id| name(tokenizer, *id) == *token).unwrap());
        let (mut stream, mut text) = (tokenizer.stream(), String::new());
        for (nth, id) in ids.enumerate() {
            assert_eq!(list("text_offset")[nth], text.chars().count(), "token {nth}");
            text.push_str(&stream.push(id));
            let top = list("top_logprobs")[nth].as_object().unwrap().clone();
            assert_eq!(top[names[nth].as_str().unwrap()], list("token_logprobs")[nth], "token {nth}");
            assert!(top.len() == most || top.len() == most + 1, "{top:?}");
        }
        text.push_str(&stream.finish());
        assert_eq!(answer["choices"][0]["text"], text);
        // There are tokens that are no text, and tokens that have none.
        assert!(names.iter().any(|name| name.as_str().unwrap().starts_with("bytes:\\x")), "{names:?}");
        assert!(names.iter().any(|name| name.as_str().unwrap().starts_with("<unused")), "{names:?}");

        body["stream"] = true.into();
        let streamed = events(&server.post(TEXT, body.to_string()));
        for member in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let of_chunk = |chunk: &Value| chunk["choices"][0]["logprobs"][member].as_array().cloned();
            let all: Vec<Value> = streamed.iter().filter_map(of_chunk).flatten().collect();
            assert_eq!(all, list(member), "{member}");
        }
    }
    let echo = r#"{"prompt": [1], "echo": true, "logprobs": 0}"#;
    let message = server.post(TEXT, echo).assert_error(400, INVALID, Some("logprobs"), Some("unsupported_value"));
    assert!(message.contains("prompt"), "{message}");
}

#[test]
fn regression_chunks_before_the_last_have_no_usage_but_say_so() {
    let server = Server::start();
    for (path, mut body) in [
        (TEXT, json!({ "prompt": "a", "echo": true, "max_tokens": 3 })),
        (CHAT, json!({ "messages": [{ "role": "user", "content": "a" }], "max_tokens": 3 })),
    ] {
        body["stream"] = true.into();
        let chunks = events(&server.post(path, body.to_string()));
        assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()), "{chunks:?}");
        body["stream_options"] = json!({ "include_usage": true });
        let mut chunks = events(&server.post(path, body.to_string()));
        let last = chunks.pop().unwrap();
        assert_eq!((&last["choices"], last["usage"]["completion_tokens"].is_u64()), (&json!([]), true));
        assert!(chunks.iter().all(|chunk| chunk["usage"].is_null() && chunk.get("usage").is_some()), "{chunks:?}");
    }
}

#[test]
fn a_long_answer_is_sent_in_chunks_and_says_the_same_as_a_stream() {
    let server = Server::start();
    let mut body = json!({
        "messages": [{ "role": "user", "content": "a" }], "n": 3, "max_tokens": 50, "ignore_eos": true, "seed": 1,
        "logprobs": true, "top_logprobs": 20,
    });
    let answer = server.post(CHAT, body.to_string());
    assert_eq!((answer.header("transfer-encoding"), answer.header("content-length")), (Some("chunked"), None));
    let whole = answer.json();
    assert_eq!((&whole["object"], &whole["model"]), (&json!("chat.completion"), &json!(MODEL)));
    assert_eq!(whole["usage"]["completion_tokens"], 150);
    body["stream"] = true.into();
    let chunks = events(&server.post(CHAT, body.to_string()));
    for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
        assert_eq!((&choice["index"], &choice["finish_reason"]), (&json!(index), &json!("length")));
        let own: Vec<&Value> =
            chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == index).collect();
        let text: String = own.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        let message = json!({ "role": "assistant", "refusal": null, "content": text });
        assert_eq!(choice["message"], message);
        let of_chunk = |choice: &&Value| choice["logprobs"]["content"].as_array().cloned();
        let tokens: Vec<Value> = own.iter().filter_map(of_chunk).flatten().collect();
        assert_eq!(choice["logprobs"], json!({ "content": tokens, "refusal": null }));
        assert!(tokens.len() == 50 && tokens.iter().all(|token| token["top_logprobs"].as_array().unwrap().len() == 20));
    }
    let short = server.post(TEXT, r#"{"prompt": [1], "max_tokens": 2}"#);
    assert!(short.header("content-length").is_some());
}

#[test]
fn a_prompt_is_repeated_in_pieces_for_each_choice() {
    let server = Server::start();
    let prompt = "\"\u{fc}\u{1f600}\n".repeat(800);
    let mut body = json!({ "prompt": prompt, "echo": true, "n": 2, "max_tokens": 2, "ignore_eos": true, "seed": 1 });
    let whole = server.post(TEXT, body.to_string()).json();
    body["stream"] = true.into();
    let chunks = events(&server.post(TEXT, body.to_string()));
    for index in 0..2 {
        let own = chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == index);
        let texts: Vec<&str> = own.filter_map(|choice| choice["text"].as_str()).collect();
        assert!(texts.len() > 2 && texts.iter().all(|text| text.len() <= 4096));
        assert_eq!(whole["choices"][index]["text"], texts.concat());
        assert!(texts.concat().starts_with(&prompt));
    }
}

#[test]
fn what_would_never_fit_into_memory_is_refused_with_what_to_do() {
    let server = Server::with(&[], Tenants::single(None).unwrap(), |app| app.room = Room::new(2 << 20));
    let mut body = json!({
        "messages": [{ "role": "user", "content": "a" }], "n": 10, "max_tokens": 1000, "ignore_eos": true,
        "logprobs": true, "top_logprobs": 20,
    });
    let answer = server.post(CHAT, body.to_string());
    let message = answer.assert_error(400, INVALID, Some("top_logprobs"), Some("invalid_value"));
    assert!(["'n'", "'max_tokens'", "Stream"].iter().all(|word| message.contains(word)), "{message}");
    body["max_tokens"] = 2.into();
    assert_eq!(server.post(CHAT, body.to_string()).status, 200);
    let long = |bytes| json!({ "prompt": "a".repeat(bytes), "max_tokens": 1 }).to_string();
    let answer = server.post(TEXT, long(30_000));
    let message = answer.assert_error(400, INVALID, Some("prompt"), Some("invalid_value"));
    assert!(message.contains("18724 bytes") && message.contains("--memory"), "{message}");
    server.post(TEXT, long(250_000)).assert_error(400, INVALID, Some("prompt"), Some("context_length_exceeded"));
    let choices = json!({ "prompt": vec![1; 10_000], "n": 100, "max_tokens": 1 }).to_string();
    let message = server.post(TEXT, choices).assert_error(400, INVALID, None, None);
    assert!(message.contains("--memory"), "{message}");
    // All of it is there again.
    let half = json!({ "prompt": "a".repeat(3000), "max_tokens": 1 }).to_string();
    assert_eq!(server.post(TEXT, half).status, 200);
    server.assert_nothing_is_held();
    assert_eq!(server.app.room.free(), 2 << 20);
}

#[test]
fn slow_and_short_clients_do_not_hold_the_server() {
    let server = Server::with(&[], Tenants::single(None).unwrap(), |app: &mut App| {
        app.within.head = Duration::from_millis(300);
        app.within.body = Duration::from_millis(300);
    });
    // A head that never ends, none at all, and a connection that is idle behind an answer.
    let mut client = server.connect();
    client.send("GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ");
    assert_eq!(client.rest(), b"");
    assert_eq!(server.connect().rest(), b"");
    let mut client = server.connect();
    client.send(get("/health"));
    assert_eq!((client.answer().status, client.rest()), (200, Vec::new()));
    // A body that stays away.
    let whole = post(TEXT, "", r#"{"prompt": [1], "max_tokens": 1}"#);
    let (most, _) = whole.split_at(whole.len() - 3);
    let mut client = server.connect();
    client.send(most);
    client.answer().assert_error(408, INVALID, None, None);
    // One that is shorter than was said.
    let mut client = server.connect();
    client.send(most);
    client.finish();
    client.answer().assert_error(400, INVALID, None, None);
    // A client that has sent all it will: that cannot be told from one that is gone, so what had been answered by then
    // is, and the connection ends.
    let mut client = server.connect();
    client.send(get("/health"));
    client.finish();
    let rest = client.rest();
    assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 200 OK\r\n"), "{}", String::from_utf8_lossy(&rest));
    server.assert_lives();
    server.assert_nothing_is_held();
}

#[test]
fn paths_lead_nowhere_but_to_routes() {
    let server = Server::start();
    let long = format!("/{}", "a/".repeat(8000));
    let nowhere = [
        "health",
        "/v1/../",
        "//v1/models",
        "/v1/models/",
        "/v1//models",
        "/V1/models",
        "/v1/models/../../etc/passwd",
        "/v1/./models",
        "/%2e%2e/health",
        "/health%00",
        "/health/",
        "/health;x",
        "/..",
        "/.git/config",
        &long,
    ];
    for path in nowhere {
        assert_eq!(server.get(path).status, 404, "{path}");
        server.get(path).assert_shape();
    }
    for name in ["%2e%2e%2f", "%00", "..", "%", "%zz", "%F0%9F%98%80", "small%20", &"m".repeat(20_000)] {
        let answer = server.get(&format!("/v1/models/{name}"));
        answer.assert_error(404, INVALID, Some("model"), Some("model_not_found"));
    }
    for path in
        ["/v1/models", "/v1/models?x=%ff&y", "http://localhost/v1/models", "/v1/models/small", "/v1/models/%73mall"]
    {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    // hyper's own answers, without a body; see above.
    for (path, status) in [("/\u{1}", 400), ("/a b", 400), (&"/x".repeat(40_000), 431)] {
        let mut client = server.connect();
        client.try_send(get(path));
        let answer = client.answer();
        assert_eq!((answer.status, answer.body.len()), (status, 0), "{path:.20}");
    }
    server.assert_lives();
}

#[test]
fn regression_a_models_name_that_is_no_text_gets_an_error_in_openais_shape() {
    let server = Server::start();
    server.get("/v1/models/%ff").assert_error(404, INVALID, Some("model"), Some("model_not_found"));
}

#[test]
fn regression_every_host_header_has_to_be_local() {
    let server = Server::start();
    for host in ["localhost", "LOCALHOST:1", "127.0.0.1", "127.9.9.9:80", "[::1]:8080", "[::1]"] {
        assert_eq!(server.ask(format!("GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n")).status, 200, "{host}");
    }
    let others = [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "[2001:db8::1]",
        "",
        "evil@",
        "localhost:80@evil.example",
        "127.0.0.1@evil.example:80",
        "[::1]@evil.example",
        "[::1].evil.example",
        "localhost\r\nHost: evil.example",
        "\u{fc}",
    ];
    for host in others {
        for path in ["/v1/models", "/metrics", "/pages"] {
            let answer = server.ask(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
            answer.assert_error(403, INVALID, None, None);
        }
    }
    let absolute = server.ask("GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n");
    absolute.assert_error(403, INVALID, None, None);
}

#[test]
fn pages_of_other_origins_may_ask_if_they_are_named() {
    let of = |header: &str, answer: &Answer| answer.header(header).map(ToOwned::to_owned);
    let preflight = |origin: &str| {
        format!(
            "OPTIONS {TEXT} HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\nAccess-Control-Request-Method: POST\r\n\
             Access-Control-Request-Headers: authorization,content-type,x-stainless-lang\r\n\r\n"
        )
    };
    let ask = |origin: &str| format!("GET /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\n\r\n");
    let (here, elsewhere) = ("https://chat.example", "https://evil.example");
    let strict = Server::start();
    strict.ask(preflight(here)).assert_error(405, INVALID, None, Some("method_not_supported"));
    assert_eq!(of("access-control-allow-origin", &strict.ask(ask(here))), None);

    let origins = ["--allow-origin", here, "--allow-origin", "http://localhost:3000"];
    let named = Server::with(&origins, Tenants::single(None).unwrap(), |_| {});
    let answer = named.ask(preflight(here));
    assert_eq!((answer.status, of("access-control-allow-origin", &answer).as_deref()), (200, Some(here)));
    assert!(of("access-control-allow-headers", &answer).is_some_and(|all| all.contains("x-stainless-lang")));
    assert!(of("access-control-allow-methods", &answer).is_some_and(|all| all.contains("post")));
    let answer = named.ask(ask("http://localhost:3000"));
    assert_eq!(
        (answer.status, of("access-control-allow-origin", &answer).as_deref()),
        (200, Some("http://localhost:3000"))
    );
    for request in [preflight(elsewhere), ask(elsewhere)] {
        assert_eq!(of("access-control-allow-origin", &named.ask(request)), None);
    }
    let any = Server::with(&["--allow-origin", "*"], Tenants::single(None).unwrap(), |_| {});
    assert_eq!(of("access-control-allow-origin", &any.ask(ask(elsewhere))).as_deref(), Some("*"));
}

#[test]
fn unknown_fields_are_ignored_unless_they_are_to_be_refused() {
    let body = r#"{"prompt": [1], "max_tokens": 1, "wings": 2}"#;
    assert_eq!(Server::start().post(TEXT, body).status, 200);
    let refusing = Server::with(&["--unknown-fields", "refuse"], Tenants::single(None).unwrap(), |_| {});
    refusing.post(TEXT, body).assert_error(400, INVALID, Some("wings"), Some("unknown_parameter"));
}

#[test]
fn what_clients_send_changes_the_tokens_that_are_chosen() {
    let server = Server::start();
    let tokens = |more: Value| {
        let mut body =
            json!({ "prompt": [1, 2, 3], "max_tokens": 6, "temperature": 0, "logprobs": 0, "ignore_eos": true });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = server.post(TEXT, body.to_string());
        assert_eq!(answer.status, 200, "{more}: {}", String::from_utf8_lossy(&answer.body));
        answer.json()["choices"][0]["logprobs"]["tokens"].as_array().unwrap().clone()
    };
    let plain = tokens(json!({}));
    assert_eq!(tokens(json!({ "top_k": -1, "min_p": 0.5, "tools": [], "tool_choice": "auto", "wings": 1 })), plain);
    let biased = tokens(json!({ "logit_bias": { "7": 100 } }));
    assert!(biased != plain && biased.iter().all(|token| *token == biased[0]), "{biased:?}");
    // A penalty of two is less than the bias, but of each time it counts.
    let penalised =
        tokens(json!({ "logit_bias": { "7": 3, "9": 2.5 }, "frequency_penalty": 2, "presence_penalty": 2 }));
    assert!(penalised.iter().any(|token| *token != penalised[0]), "{penalised:?}");
}

#[test]
fn metrics_have_the_text_format_that_is_asked_for() {
    let server = Server::start();
    for (accept, kind, ends) in [
        ("*/*", "application/openmetrics-text", true),
        (
            "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
            "application/openmetrics-text",
            true,
        ),
        ("text/plain;version=0.0.4", "text/plain; version=0.0.4", false),
    ] {
        let answer = server.ask(format!("GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n\r\n"));
        assert!(answer.header("content-type").is_some_and(|found| found.starts_with(kind)), "{accept}");
        assert_eq!(answer.text().ends_with("# EOF\n"), ends, "{accept}");
        let counter = answer.text().lines().find_map(|line| {
            let name = line.strip_prefix("# TYPE ")?.strip_suffix(" counter")?;
            Some(name.ends_with("_total"))
        });
        assert_eq!(counter, Some(!ends), "{accept}");
    }
}

#[test]
fn a_name_that_is_allowed_reaches_the_server_without_a_token() {
    let server = Server::with(&["--allow-host", "model.lan"], Tenants::single(None).unwrap(), |_| {});
    for (host, status) in [("model.lan", 200), ("MODEL.lan:8080", 200), ("other.lan", 403), ("x@model.lan", 403)] {
        let answer = server.ask(format!("GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        assert_eq!(answer.status, status, "{host}");
    }
}

/// Any tenant read what all of them do.
#[test]
fn regression_metrics_and_pages_of_all_tenants_are_an_operators() {
    let text =
        r#"{"tenants": [{"name": "a", "token": "aaaaaaaa"}, {"name": "b", "token": "bbbbbbbb", "operator": true}]}"#;
    let server = Server::with(&[], Tenants::parse(text).unwrap(), |_| {});
    let ask = |path: &str, token: &str| {
        server.ask(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n"))
    };
    for path in ["/metrics", "/pages"] {
        let message = ask(path, "aaaaaaaa").assert_error(403, INVALID, None, None);
        assert!(message.contains("operator"), "{message}");
        assert_eq!(ask(path, "bbbbbbbb").status, 200);
        assert_eq!(ask("/v1/models", "aaaaaaaa").status, 200);
    }
    let alone = Tenants::single(Some("aaaaaaaa")).unwrap();
    let server = Server::with(&[], alone, |_| {});
    let head = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer aaaaaaaa\r\n\r\n";
    assert_eq!(server.ask(head).status, 200);
}

#[test]
fn heads_that_are_too_long_or_no_http_end_the_connection() {
    let server = Server::start();
    let start = "GET /health HTTP/1.1\r\nHost: localhost\r\n";
    let many: String = (0..1000).map(|nth| format!("X-{nth}: y\r\n")).collect();
    let long = format!("X: {}\r\n", "y".repeat(100_000));
    let long_name = format!("{}: y\r\n", "X".repeat(100_000));
    for (headers, status) in [(&many, 431), (&long, 431), (&long_name, 431), (&"X: a\0b\r\n".into(), 400)] {
        let mut client = server.connect();
        client.try_send(format!("{start}{headers}\r\n"));
        let answer = client.answer();
        assert_eq!((answer.status, answer.body.len()), (status, 0));
        assert_eq!(client.rest(), b"");
    }
    // A name with a space, a line that is folded, a line without a colon, an HTTP that there is not.
    for bytes in [
        "GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n",
        "GET /health HTTP/1.1\r\nHost: localhost\r\n folded\r\n\r\n",
        "GET /health HTTP/1.1\r\nHost\r\n\r\n",
        "GET /health HTTP/9.9\r\n\r\n",
        "GET /health\r\n\r\n",
        "\u{16}\u{3}\u{1}\u{2}\0\u{1}\0\u{1}\u{fc}\u{3}\u{3}",
        "{\"prompt\": [1]}\r\n\r\n",
    ] {
        let mut client = server.connect();
        client.send(bytes);
        client.finish();
        let text = String::from_utf8(client.rest()).unwrap();
        assert!(text.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{bytes:?}: {text:?}");
    }
    // The beginning of HTTP/2, which is not spoken: the connection ends.
    let mut client = server.connect();
    client.try_send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    let rest = client.rest();
    assert!(!rest.starts_with(b"HTTP/1.1 2"), "{}", String::from_utf8_lossy(&rest));
    server.assert_lives();
}

#[test]
fn methods_that_there_are_not_are_refused() {
    let server = Server::start();
    for method in ["OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "BREW", "get"] {
        for path in ["/v1/models", "/v1/models/small", TEXT, CHAT, "/health", "/ready", "/metrics", "/pages", "/"] {
            let answer = server.ask(format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
            answer.assert_error(405, INVALID, None, Some("method_not_supported"));
            let allowed = if [TEXT, CHAT].contains(&path) { "post" } else { "get,head" };
            assert_eq!(answer.header("allow"), Some(allowed), "{method} {path}");
            // No page of another origin may read or send anything.
            assert_eq!(answer.header("access-control-allow-origin"), None);
        }
    }
    for bytes in ["OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", "CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n"] {
        let answer = server.ask(bytes);
        assert!([400, 404, 405].contains(&answer.status), "{bytes}");
        answer.assert_shape();
    }
    // HEAD is GET without the body.
    for (path, status) in [("/health", 200), ("/v1/models", 200), ("/metrics", 200), ("/", 200), ("/nowhere", 404)] {
        let mut client = server.connect();
        client.send(format!("HEAD {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"));
        assert_eq!((client.head().status, client.rest()), (status, Vec::new()), "{path}");
    }
    let mut client = server.connect();
    client.send("GET /health HTTP/1.0\r\n\r\n");
    assert_eq!((client.answer().status, client.rest()), (200, Vec::new()));
    // HTTP/1.0 has no chunks: a stream ends with the connection.
    let mut client = server.connect();
    let body = r#"{"prompt": [1], "max_tokens": 3, "ignore_eos": true, "stream": true}"#;
    let request = String::from_utf8(post(TEXT, "", body)).unwrap().replace("HTTP/1.1", "HTTP/1.0");
    client.send(request);
    let answer = client.answer();
    assert_eq!((answer.status, answer.header("transfer-encoding")), (200, None));
    assert!(answer.text().ends_with("data: [DONE]\n\n"), "{}", answer.text());
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let server = Server::start();
    let mut client = server.connect();
    client.send([get("/health"), get("/v1/models")].concat());
    assert_eq!(client.answer().json(), json!({ "status": "ok" }));
    assert_eq!(client.answer().json()["data"][0]["id"], MODEL);
    let body = |most| json!({ "prompt": [1], "max_tokens": most, "ignore_eos": true }).to_string();
    client.send([post(TEXT, "", body(3)), post(TEXT, "", "{"), post(TEXT, "", body(2)), get("/v2").into()].concat());
    assert_eq!(client.answer().json()["usage"]["completion_tokens"], 3);
    client.answer().assert_error(400, INVALID, None, None);
    assert_eq!(client.answer().json()["usage"]["completion_tokens"], 2);
    client.answer().assert_error(404, INVALID, None, Some("unknown_url"));
    // Of two lengths of a body the chunks count, in whichever order they come, and the connection ends behind the
    // answer (RFC 9112, 6.3): what somebody in between takes for a part of the body is never taken for a request.
    for lengths in
        ["Content-Length: 4\r\nTransfer-Encoding: chunked", "Transfer-Encoding: chunked\r\nContent-Length: 4"]
    {
        let mut client = server.connect();
        let head =
            format!("POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{lengths}\r\n\r\n");
        client.send(format!("{head}2\r\n{{}}\r\n0\r\n\r\n{}", get("/v1/models")));
        client.answer().assert_error(400, INVALID, Some("prompt"), Some("missing_required_parameter"));
        assert_eq!(client.rest(), b"");
    }
    for coding in ["gzip", "chunked, gzip", "identity"] {
        let mut client = server.connect();
        client.send(format!("POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: {coding}\r\n\r\n0\r\n\r\n"));
        assert_eq!(client.answer().status, 400, "{coding}");
        assert_eq!(client.rest(), b"");
    }
}

#[test]
fn what_a_client_leaves_behind_is_free_again() {
    let server = Server::start();
    for leave in ["drop", "half-close", "reset before the answer"] {
        let mut client = server.connect();
        client.send(post(TEXT, "", ENDLESS));
        if leave != "reset before the answer" {
            client.until("data: ");
            assert!(server.metric("outcore_kv_blocks{state=\"used\"}") > 0);
        }
        // A client that sends no more while an answer is written counts as gone: the two cannot be told apart.
        if leave == "half-close" {
            client.finish();
        }
        if leave != "half-close" {
            drop(client);
        } else {
            assert!(!client.rest().ends_with(b"data: [DONE]\n\n\r\n0\r\n\r\n"));
        }
        server.assert_nothing_is_held();
    }
    // One that asked for a whole answer, and left.
    let mut client = server.connect();
    client.send(post(TEXT, "", ENDLESS.replace("true}", "false}")));
    while server.metric("outcore_running_answers") == 0 {
        std::thread::yield_now();
    }
    drop(client);
    server.assert_nothing_is_held();
    // One that had sent more by then.
    for more in [b"G".to_vec(), get("/health").into_bytes()] {
        let mut client = server.connect();
        client.send([post(TEXT, "", ENDLESS.replace("true}", "false}")), more].concat());
        while server.metric("outcore_running_answers") == 0 {
            std::thread::yield_now();
        }
        drop(client);
        server.assert_nothing_is_held();
    }
    // None of them was written to its end, streams that had begun among them.
    assert!(server.metric("outcore_generated_tokens_total") < 16_000);
    let until = std::time::Instant::now() + support::PATIENCE;
    // The one that left before its answer began may have left before its request was read.
    while server.metric(&format!("outcore_requests_total{{path=\"{TEXT}\",status=\"499\"}}")) < 5 {
        assert!(std::time::Instant::now() < until, "{}", server.get("/metrics").text());
        std::thread::yield_now();
    }
    server.assert_lives();
}

/// Clients that come, ask or do not, and go without reading.
fn come_and_go(server: &Server, count: usize) {
    let whole = post(TEXT, "", ENDLESS);
    let waiting = post(CHAT, "", r#"{"messages": [{"role": "user", "content": "hello"}], "n": 3}"#);
    let mut begun = 0;
    for nth in 0..count {
        let mut client = server.connect();
        match nth % 6 {
            0 => {}
            1 => client.send(&whole[..nth % whole.len()]),
            2 => client.send(&whole),
            3 => client.send(&waiting),
            4 => {
                client.send(&whole);
                let status = client.head().status;
                assert!([200, 429].contains(&status), "{status}");
                begun += usize::from(status == 200);
            }
            _ => {
                client.send([get("/health"), get("/metrics"), get("/pages")].concat());
            }
        }
    }
    assert!(begun > 0);
    server.assert_nothing_is_held();
    server.assert_lives();
    server.assert_nothing_is_held();
    // The connections have ended, but for that of the scrape.
    while server.metric("outcore_connections") > 1 {
        std::thread::yield_now();
    }
}

#[test]
fn three_hundred_clients_that_come_and_go_leave_nothing() {
    come_and_go(&Server::start(), 300);
}

#[test]
#[ignore = "for soak runs"]
fn ten_thousand_clients_that_come_and_go_leave_nothing() {
    let server = Server::start();
    (0..10).for_each(|_| come_and_go(&server, 1000));
}

#[test]
fn a_model_file_that_changes_ends_answers_and_not_the_process() {
    let server = Server::start();
    let file = std::fs::OpenOptions::new().append(true).open(&server.model).unwrap();
    std::io::Write::write_all(&mut &file, &[0; 4096]).unwrap();
    drop(file);
    for _ in 0..2 {
        let answer = server.post(TEXT, r#"{"prompt": [1], "max_tokens": 2}"#);
        let message = answer.assert_error(503, "server_error", None, Some("service_unavailable"));
        // Where the file is concerns nobody but who runs the server.
        assert!(
            message.contains("model") && !message.contains(server.model.parent().unwrap().to_str().unwrap()),
            "{message}"
        );
    }
    let answer = server.post(CHAT, r#"{"messages": [{"role": "user", "content": "a"}], "stream": true}"#);
    answer.assert_error(503, "server_error", None, Some("service_unavailable"));
    assert_eq!(server.get("/health").status, 200);
    server.get("/ready").assert_error(503, "server_error", None, Some("service_unavailable"));
    assert_eq!(server.get("/v1/models").status, 200);
    server.assert_nothing_is_held();
}

/// A tenant may never have what is larger than its own limit, so it is not told to try again.
#[test]
fn regression_a_prompt_beyond_a_tenants_blocks_is_refused_for_good() {
    let tenants = r#"{"tenants": [{"name": "a", "token": "aaaaaaaa", "blocks": 2, "concurrency": 2}]}"#;
    let server = Server::with(&["--page-size", "16KiB"], Tenants::parse(tenants).unwrap(), |_| {});
    let own = 2 * server.app.opened.places.pool().layout().block_tokens() as usize;
    let ask = |prompt: usize, more: &str| {
        let body = format!(r#"{{"prompt": {:?}, "ignore_eos": true{more}}}"#, vec![1; prompt]);
        server.ask(post(TEXT, "Authorization: Bearer aaaaaaaa\r\n", body))
    };
    ask(own, "").assert_error(400, INVALID, Some("prompt"), Some("context_length_exceeded"));
    ask(10, &format!(r#", "max_tokens": {own}"#)).assert_error(
        400,
        INVALID,
        Some("prompt"),
        Some("context_length_exceeded"),
    );
    let many = format!(r#"{{"prompt": {:?}, "n": 8}}"#, vec![[1]; 16]);
    server.ask(post(TEXT, "Authorization: Bearer aaaaaaaa\r\n", many)).assert_error(
        400,
        INVALID,
        Some("n"),
        Some("invalid_value"),
    );
    ask(1, r#", "n": 3"#).assert_error(400, INVALID, Some("n"), Some("invalid_value"));
    let answer = ask(own - 5, r#", "max_tokens": 5"#);
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json()["usage"]["completion_tokens"], 5);
}
