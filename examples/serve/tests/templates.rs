//! What a chat template takes of memory, by an allocator that counts, and of time, by what it reads, whatever it says.
//! There is one test, so that little else allocates meanwhile.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use outcore_llm::ChatTemplate;
use outcore_serve::tenants::Tenants;
use peak_alloc::PeakAlloc;
use serde_json::{Value, json};
use support::Server;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

const CHAT: &str = "/v1/chat/completions";
/// What a rendering may make. A text that grows is there twice for a moment, and its buffer has room for more.
const MADE_MOST: usize = 64 << 20;
const TIMES: usize = 4;

/// A conversation with one text of a megabyte.
fn long() -> String {
    json!({ "messages": [{ "role": "user", "content": "a".repeat(1 << 20) }], "max_tokens": 1 }).to_string()
}

fn body(messages: usize, tools: usize) -> String {
    let tool = |nth| {
        let description = "d".repeat(1000);
        json!({ "type": "function", "function": { "name": format!("f{nth}"), "description": description } })
    };
    let messages = vec![json!({ "role": "user", "content": "hello" }); messages];
    let tools: Vec<Value> = (0..tools).map(tool).collect();
    let mut body = json!({ "messages": messages, "max_tokens": 1 });
    if !tools.is_empty() {
        body["tools"] = tools.into();
    }
    body.to_string()
}

#[test]
fn a_template_takes_no_more_memory_or_time_than_it_may_whatever_it_says() {
    let doubled = |step: &str| {
        format!("{{% set ns = namespace(s='ab') %}}{{% for i in range(40) %}}{step}{{% endfor %}}{{{{ tools }}}}")
    };
    let cases = [
        (doubled("{% set ns.s = ns.s ~ ns.s %}"), body(1, 0)),
        (doubled("{% set ns.s = ns.s * 2 %}"), body(1, 0)),
        (doubled("{% set ns.s = [ns.s, ns.s] | join %}"), body(1, 0)),
        (doubled("{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"), body(1, 0)),
        ("{% set l = [1] %}{{ (l * 99999999999) | list }}".to_owned(), body(1, 0)),
        ("{% for m in messages %}{{ tools | tojson }}{% endfor %}".to_owned(), body(2048, 100)),
    ];
    let made = cases.map(|(source, body)| (source, body, "bytes of texts and lists", 4));
    let again = |read: &str| {
        let own = "{% set c = messages[0].content %}{% set d = c ~ '' %}";
        format!("{own}{{% for i in range(99999) %}}{read}{{% endfor %}}{{{{ tools }}}}")
    };
    let reads = [
        "{% if c == d %}{% endif %}",
        "{% if c < d %}{% endif %}",
        "{% if 1 < c < d %}{% endif %}{% if c <= d <= c %}{% endif %}",
        "{% if 'b' in c %}{% endif %}",
        "{% if [c] == [d] %}{% endif %}",
        "{% if c is eq(d) %}{% endif %}",
        "{% if c is endingwith(d) %}{% endif %}",
        "{% if c | length %}{% endif %}",
        "{% if c.count('b') %}{% endif %}",
        "{% if [c, d] | sort %}{% endif %}",
        "{% if [c, c] | select('==', d) | first %}{% endif %}",
    ];
    let read = reads.map(|read| (again(read), long(), "reads more bytes of texts", 1));
    for (source, body, what, clients) in made.into_iter().chain(read) {
        let template = ChatTemplate::new(source.clone(), String::new(), String::new()).unwrap();
        let server = Server::with(&[], Tenants::single(None).unwrap(), |app| app.opened.template = Some(template));
        // What others use too is there before.
        server.assert_lives();
        let before = ALLOCATED.current_usage();
        ALLOCATED.reset_peak_usage();
        // One is rendered at a time.
        std::thread::scope(|scope| {
            for _ in 0..clients {
                scope.spawn(|| {
                    let answer = server.post(CHAT, &body);
                    let kind = "invalid_request_error";
                    let message = answer.assert_error(400, kind, Some("messages"), Some("invalid_value"));
                    for part in ["chat template", what, "shorten the conversation"] {
                        assert!(message.contains(part), "{source}: {message}");
                    }
                });
            }
        });
        let taken = ALLOCATED.peak_usage().saturating_sub(before);
        assert!(taken < TIMES * MADE_MOST, "{taken} for {source}");
        server.assert_lives();
        server.assert_nothing_is_held();
    }
}
