//! Requests to the server, and its file of tenants: whatever the bytes, no panic, a short error or values within the
//! limits. The sources are taken by their paths: the server itself would bring two hundred crates with it.
#![no_main]
#![allow(dead_code, reason = "only parsing is looked at")]

use libfuzzer_sys::fuzz_target;

#[path = "../../examples/serve/src/error.rs"]
mod error;
#[path = "../../examples/serve/tests/requests/fuzzed.rs"]
mod fuzzed;
#[path = "../../examples/serve/src/request.rs"]
mod request;
#[path = "../../examples/serve/src/tenants.rs"]
mod tenants;

fuzz_target!(|input: &[u8]| {
    fuzzed::check(input);
});
