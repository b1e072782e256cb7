//! What grammars take of memory, measured by an allocator that counts: no more than is set aside for them. There is one
//! test, so that little else allocates meanwhile.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use outcore_serve::grammar::{ANSWER_BYTES, COMPILING, Source};
use peak_alloc::PeakAlloc;
use serde_json::{Map, Value, json};
use support::{Server, VOCAB};

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// Schemas that take much.
fn schemas() -> Vec<Value> {
    let properties = |count, of: fn(usize) -> Value| {
        let all: Map<String, Value> = (0..count).map(|nth| (format!("p{nth}"), of(nth))).collect();
        json!({ "type": "object", "properties": all })
    };
    let texts: Vec<String> = (0..3000).map(|nth| format!("value number {nth}")).collect();
    let levels: Map<String, Value> = (0..400)
        .map(|nth| {
            let next = json!({ "a": { "$ref": format!("#/$defs/d{}", (nth + 1) % 400) } });
            (format!("d{nth}"), json!({ "allOf": [{ "type": "object", "properties": next }] }))
        })
        .collect();
    let patterns = |nth: usize| json!({ "type": "string", "pattern": format!("^(a|b)*a(a|b){{{}}}$", 10 + nth % 10) });
    vec![
        json!({ "type": "object" }),
        properties(1200, |nth| json!({ "enum": [nth.to_string(), nth] })),
        properties(1500, |_| json!({ "type": "string" })),
        properties(200, patterns),
        json!({ "enum": texts }),
        json!({ "const": "a".repeat(60_000) }),
        json!({ "$ref": "#/$defs/d0", "$defs": levels }),
        json!({ "type": "string", "pattern": "^(.{0,5000}x){0,1000}$" }),
        json!({ "type": "string", "pattern": "^[\\p{L}\\p{N}]{1,2000}[\\p{Lu}]{500}$" }),
        json!({ "type": "integer", "multipleOf": 997, "minimum": -1_000_000, "maximum": 99_999_999 }),
    ]
}

#[test]
fn grammars_take_no_more_memory_than_is_set_aside_for_them() {
    let server = Server::start();
    let grammars = &server.app.opened.grammars;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let compile =
        |schema: &Value| runtime.block_on(grammars.compile(Source::Schema(schema.to_string()), "response_format", 1));
    // What all share is made by the first one.
    drop(compile(&json!({ "const": 1 })).unwrap());
    let mut most = 0;
    for schema in schemas() {
        let shown: String = schema.to_string().chars().take(60).collect();
        let before = ALLOCATED.current_usage();
        ALLOCATED.reset_peak_usage();
        let taken = || ALLOCATED.peak_usage().saturating_sub(before);
        let compiled = compile(&schema);
        assert!(taken() <= ANSWER_BYTES * COMPILING, "{} to compile {shown}", taken());
        most = most.max(taken());
        let Ok(mut compiled) = compiled else { continue };
        let grammar = &mut compiled[0];
        ALLOCATED.reset_peak_usage();
        for nth in 0..500 {
            let Ok(mask) = grammar.mask() else { break };
            let allowed: Vec<u32> = (0..VOCAB as u32).filter(|id| mask.allows(*id)).collect();
            if grammar.push(allowed[nth * 7919 % allowed.len()]).is_err() || grammar.is_over() {
                break;
            }
        }
        assert!(taken() <= ANSWER_BYTES, "{} for {shown}", taken());
        most = most.max(taken());
    }
    // The test knows a schema that takes much of it.
    assert!(most > ANSWER_BYTES / 2, "{most}");
}
