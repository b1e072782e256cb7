//! What users write stays out of logs, at every level: prompts, answers, names of fields, values of headers, paths.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::io::Write;
use std::sync::{Arc, Mutex};

use outcore_serve::tenants::Tenants;
use serde_json::json;
use support::{Server, get, post};
use tracing::Level;

/// What users write, in whatever place. No other text has it.
const MARK: &str = "xyzzy";
const TOKEN: &str = "secret-xyzzy";

/// Keeps what is logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn logs_have_no_text_of_users() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt().with_max_level(Level::TRACE).with_ansi(false).with_writer(move || writer.clone()).init();
    let tenants = Tenants::parse(&json!({ "tenants": [{ "name": "a-tenant", "token": TOKEN }] }).to_string()).unwrap();
    let server = Server::with(&["--max-body", "4KiB"], tenants, |_| {});
    let token = format!("Authorization: Bearer {TOKEN}\r\n");
    let chat = json!({
        "messages": [{ "role": "user", "content": MARK, "name": MARK }],
        "user": MARK, "stop": [MARK], "max_tokens": 3, "ignore_eos": true,
    });
    assert_eq!(server.ask(post("/v1/chat/completions", &token, chat.to_string())).status, 200);
    let echo = json!({ "prompt": MARK, "echo": true, "max_tokens": 3, "stream": true });
    assert!(server.ask(post("/v1/completions", &token, echo.to_string())).text().contains(MARK));
    // Names of fields that nobody knows are the only words of users in the log, each once.
    let unknown = json!({ "prompt": MARK, "max_tokens": 1, "wings": MARK }).to_string();
    for _ in 0..2 {
        assert_eq!(server.ask(post("/v1/completions", &token, unknown.clone())).status, 200);
    }
    let wrong = [
        format!("{{\"prompt\": \"{MARK}\", {MARK}"),
        json!({ "prompt": MARK, "model": MARK }).to_string(),
        json!({ "prompt": MARK, "max_tokens": 1_000_000 }).to_string(),
        MARK.repeat(2000),
    ];
    for body in wrong {
        assert!(server.ask(post("/v1/completions", &token, body)).status >= 400);
    }
    assert_eq!(
        server.ask(post("/v1/completions", &format!("Authorization: Bearer {MARK}{MARK}\r\n"), "{}")).status,
        401
    );
    assert_eq!(server.get(&format!("/{MARK}?{MARK}")).status, 404);
    let name = get(&format!("/v1/models/{MARK}")).replace("\r\n\r\n", &format!("\r\nX-{MARK}: {MARK}\r\n{token}\r\n"));
    assert_eq!(server.ask(name).status, 404);
    let mut client = server.connect();
    client.send(format!("{MARK} {MARK} {MARK}\r\n{MARK}\r\n\r\n"));
    client.rest();
    drop(server);

    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    // It does log, and who asked.
    assert!(log.contains("answered") && log.contains("a-tenant"), "{log}");
    assert_eq!(log.matches("wings").count(), 1, "{log}");
    let told: Vec<&str> = log.lines().filter(|line| line.contains(MARK)).collect();
    assert!(told.is_empty(), "{told:#?}");
}
