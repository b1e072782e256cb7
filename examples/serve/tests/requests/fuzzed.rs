//! What must hold of any bytes that are parsed as a request, or as a file of tenants. The fuzz target `serve_request`
//! and the tests use it.

use super::error::ApiError;
use super::request::embeddings::{EmbeddingRequest, embedding};
use super::request::{Prompt, Request, ToolChoice, Tools, chat, completion};
use super::tenants::Tenants;

/// Looks that these bytes are refused properly, or that what they ask for is within the limits. Returns whether they
/// are a request.
pub fn check(input: &[u8]) -> bool {
    let parsed = [chat(input), completion(input)];
    for parsed in &parsed {
        match parsed {
            Ok(request) => accepted(request),
            Err(error) => refused(error),
        }
    }
    let embedded = embedding(input);
    match &embedded {
        Ok(request) => embeddable(request),
        Err(error) => refused(error),
    }
    if let Ok(text) = std::str::from_utf8(input) {
        match Tenants::parse(text) {
            Ok(tenants) => {
                assert!(tenants.have_tokens() && (1..=1024).contains(&tenants.iter().count()));
                assert_eq!(tenants.find(None).map(|tenant| tenant.id).map_err(|error| error.status), Err(401));
            }
            Err(why) => short(&why),
        }
    }
    parsed.iter().any(Result::is_ok) || embedded.is_ok()
}

fn short(text: &str) {
    assert!(!text.is_empty() && text.len() < 1024 && !text.contains(char::is_control), "{text:?}");
}

fn refused(error: &ApiError) {
    assert!((400..500).contains(&error.status), "{error:?}");
    short(&error.message);
    // A field may have no name at all.
    error.param.iter().filter(|param| !param.is_empty()).for_each(|param| short(param));
}

fn accepted(request: &Request) {
    let Request { prompts, echo, common } = request;
    assert!((1..=128).contains(&(prompts.len() * common.choices)), "{request:?}");
    let is_chat = matches!(prompts.as_slice(), [Prompt::Chat(messages)] if !messages.is_empty());
    assert!(is_chat && !echo || prompts.iter().all(|prompt| !matches!(prompt, Prompt::Chat(_))), "{request:?}");
    assert!(common.max_tokens.is_none_or(|most| (1..=1 << 31).contains(&most)), "{request:?}");
    let sampling = &common.sampling;
    let within = |number: Option<f32>, most: f32| number.is_none_or(|number| (0.0..=most).contains(&number));
    assert!(within(sampling.temperature, 2.0) && within(sampling.top_p, 1.0), "{request:?}");
    assert!(within(sampling.min_p, 1.0) && within(sampling.repetition, 100.0), "{request:?}");
    assert!(sampling.presence.abs() <= 2.0 && sampling.frequency.abs() <= 2.0, "{request:?}");
    assert!(sampling.bias.iter().all(|(_, more)| more.abs() <= 100.0), "{request:?}");
    assert!(common.unknown.len() <= 8, "{request:?}");
    assert!(common.stop.len() <= 4 && common.stop.iter().all(|stop| (1..=1024).contains(&stop.len())), "{request:?}");
    assert!(common.logprobs.is_none_or(|most| most <= if is_chat { 20 } else { 5 }), "{request:?}");
    assert!(is_chat && !common.ignore_end || common.format.is_none(), "{request:?}");
    assert!(common.format.is_none() || common.tools.is_none(), "{request:?}");
    if let Some(Tools { definitions, names, choice }) = &common.tools {
        assert!((1..=128).contains(&names.len()) && definitions.len() <= 128 << 10 && is_chat, "{request:?}");
        assert!(!common.ignore_end || *choice == ToolChoice::Auto, "{request:?}");
        assert!(!matches!(choice, ToolChoice::Named(name) if !names.contains(name)), "{request:?}");
    }
    assert!(common.stream || !common.stream_usage, "{request:?}");
    assert!(!echo || common.logprobs.is_none(), "{request:?}");
}

fn embeddable(request: &EmbeddingRequest) {
    let EmbeddingRequest { inputs, dimensions, unknown, .. } = request;
    assert!((1..=2048).contains(&inputs.len()) && dimensions.is_none_or(|count| count > 0), "{request:?}");
    let texts = inputs.iter().filter(|input| matches!(input, Prompt::Text(text) if !text.is_empty())).count();
    let ids = inputs.iter().filter(|input| matches!(input, Prompt::Tokens(ids) if !ids.is_empty())).count();
    assert!(texts == inputs.len() || ids == inputs.len(), "{request:?}");
    assert!(unknown.len() <= 64, "{request:?}");
}
