//! From texts to their embeddings, as OpenAI's API shapes them.
//!
//! Shapes: <https://platform.openai.com/docs/api-reference/embeddings/object>. A request may have more inputs than the
//! engine has places: it takes as many as may be written at a time, and each input has one of them in its turn.

use std::iter::once;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use futures_util::{StreamExt, TryStreamExt, stream};
use outcore_llm::Sampler;
use parking_lot::Mutex;
use serde_json::{Map, json};
use tokio::sync::mpsc::channel;

use super::answer::{blocks_tokens, encode, written};
use super::room::Hold;
use super::{App, check_model};
use crate::engine::{Embedding, Event, Job, Places, Pooling, Sink};
use crate::error::ApiError;
use crate::request::embeddings::{EmbeddingRequest, Encoding};
use crate::tenants::{Leave, Tenant};

/// The field that has what is embedded.
const PARAM: &str = "input";
/// What an input takes besides its tokens and its embedding, in bytes.
const INPUT_BYTES: usize = 64;
/// More events than a text has until it is embedded: it begins, and it ends.
const EVENTS: usize = 4;
/// Numbers that are written at a time: so many end at the end of a group of base64.
const NUMBERS: usize = 768;

/// What the inputs of a request share.
struct Shared {
    app: Arc<App>,
    pooling: Pooling,
    tenant: Tenant,
    places: Arc<Places>,
    leave: Mutex<Leave>,
    since: Instant,
}

/// Answers a request, for which `hold` has room.
pub async fn answer(
    app: Arc<App>,
    tenant: Tenant,
    request: EmbeddingRequest,
    hold: Hold,
    since: Instant,
) -> Result<Response, ApiError> {
    let EmbeddingRequest { inputs, model, encoding, dimensions, .. } = request;
    if let Some(name) = &model {
        check_model(&app, name)?;
    }
    let pooling = app.opened.pooling.clone().map_err(|why| ApiError::invalid(format!("No embeddings: {why}.")))?;
    let dim = app.opened.dim;
    if let Some(wanted) = dimensions.filter(|wanted| *wanted > dim) {
        let message =
            format!("Invalid value for 'dimensions': {wanted}, and an embedding of this model has {dim} numbers.");
        return Err(ApiError::invalid(message).param("dimensions").code("invalid_value"));
    }
    let count = inputs.len();
    let at_once = tenant.may_enter(count.min(app.opened.engine.concurrency()));
    let mut leave = tenant.enter(at_once, Instant::now())?;
    let (encoded, mut hold) = encode(&app, PARAM, inputs, (false, 1, Map::new()), None, hold).await?;
    let inputs: Vec<Vec<u32>> = encoded.into_iter().map(|one| one.tokens).collect();
    check_lengths(&app, &tenant, &inputs)?;
    let tokens: usize = inputs.iter().map(Vec::len).sum();
    hold.set(tokens * size_of::<u32>() + count * (dim * size_of::<f32>() + INPUT_BYTES))?;
    leave.take(tokens, Instant::now())?;
    let places = Arc::new(app.opened.engine.places_for(at_once)?);
    let at_once = places.count();
    let shared = Arc::new(Shared { app: app.clone(), pooling, tenant, places, leave: Mutex::new(leave), since });
    let embedded = inputs.into_iter().map(|input| one(shared.clone(), input));
    let mut vectors: Vec<Vec<f32>> = stream::iter(embedded).buffered(at_once).try_collect().await?;
    if let Some(wanted) = dimensions.filter(|wanted| *wanted < dim) {
        vectors.iter_mut().try_for_each(|vector| shorten(vector, wanted))?;
    }
    Ok(written(whole(app.name.clone(), vectors, encoding, tokens), Some(hold)))
}

/// Refuses an input that is longer than a tenant's blocks.
fn check_lengths(app: &App, tenant: &Tenant, inputs: &[Vec<u32>]) -> Result<(), ApiError> {
    let most = blocks_tokens(app, tenant);
    let Some(nth) = inputs.iter().position(|input| input.len() > most) else { return Ok(()) };
    let message = format!(
        "This token may have {most} tokens of keys and values at a time, and an input has {}. Shorten it.",
        inputs[nth].len()
    );
    let param = if inputs.len() > 1 { format!("{PARAM}[{nth}]") } else { PARAM.to_owned() };
    Err(ApiError::invalid(message).param(param).code("context_length_exceeded"))
}

/// The embedding of one input. When this is dropped, nothing more is done for it.
async fn one(shared: Arc<Shared>, prompt: Vec<u32>) -> Result<Vec<f32>, ApiError> {
    let Shared { app, pooling, tenant, places, leave, since } = &*shared;
    let (sender, mut events) = channel(EVENTS);
    let length = prompt.len();
    app.opened.engine.submit(Job {
        tenant: tenant.id,
        prompt,
        most: 0,
        sampler: Sampler::greedy(),
        grammar: None,
        ignore_end: false,
        logprobs: None,
        sink: Sink { index: 0, events: sender, enough: Arc::default() },
        received: *since,
        deadline: *since + app.timeout,
        followers: Vec::new(),
        embedding: Some(Embedding::new(*pooling, places.clone())),
    })?;
    loop {
        match events.recv().await {
            Some((_, Event::Embedded(vector))) => return Ok(vector),
            Some((_, Event::Failed(error))) => return Err(*error),
            Some((_, Event::Begun(_))) => leave.lock().used(length),
            Some((_, Event::Token(_) | Event::Ended(_))) => {}
            None => {
                let message = "The input was given up: the engine has ended.";
                return Err(ApiError::unavailable(message, Some(Duration::from_secs(5))));
            }
        }
    }
}

/// The first numbers of a vector, made as long again as it was: 1.
fn shorten(vector: &mut Vec<f32>, count: usize) -> Result<(), ApiError> {
    vector.truncate(count);
    let length = vector.iter().map(|number| f64::from(*number).powi(2)).sum::<f64>().sqrt();
    if length == 0.0 {
        let message = format!("The first {count} numbers of an embedding are zero: ask for more 'dimensions'.");
        return Err(ApiError::invalid(message).param("dimensions").code("invalid_value"));
    }
    vector.iter_mut().for_each(|number| *number = (f64::from(*number) / length) as f32);
    Ok(())
}

/// The JSON of a whole answer, in pieces.
fn whole(
    model: String,
    vectors: Vec<Vec<f32>>,
    encoding: Encoding,
    tokens: usize,
) -> impl Iterator<Item = String> + Send {
    let [open, close] = match encoding {
        Encoding::Float => ["[", "]"],
        Encoding::Base64 => ["\"", "\""],
    };
    let one = move |(index, vector): (usize, Vec<f32>)| {
        let comma = if index == 0 { "" } else { "," };
        let begin = format!(r#"{comma}{{"object":"embedding","index":{index},"embedding":{open}"#);
        let chunks = (0..vector.len().div_ceil(NUMBERS)).map(move |nth| {
            let some = &vector[nth * NUMBERS..vector.len().min((nth + 1) * NUMBERS)];
            match encoding {
                Encoding::Base64 => BASE64_STANDARD.encode(bytes_of(some)),
                Encoding::Float => floats(some, nth > 0),
            }
        });
        once(begin).chain(chunks).chain(once(format!("{close}}}")))
    };
    let usage = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
    let end = format!(r#"],"model":{},"usage":{usage}}}"#, json!(model));
    once(r#"{"object":"list","data":["#.to_owned())
        .chain(vectors.into_iter().enumerate().flat_map(one))
        .chain(once(end))
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Numbers between commas, each with as many digits as it takes to read it back.
fn floats(numbers: &[f32], has_before: bool) -> String {
    let all = serde_json::to_string(numbers).unwrap_or_default();
    let inner = all.get(1..all.len().saturating_sub(1)).unwrap_or_default();
    format!("{}{inner}", if has_before { "," } else { "" })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use serde_json::Value;

    use super::*;

    #[test]
    fn numbers_are_read_back_as_they_were_in_both_encodings() {
        let vector = |count: usize| (0..count).map(|n| (n as f32 * 0.7).sin() / 1e3f32.powi(n as i32 % 9)).collect();
        let vectors: Vec<Vec<f32>> = [1, 2, NUMBERS, NUMBERS + 1, 3 * NUMBERS + 5].map(vector).into();
        for encoding in [Encoding::Float, Encoding::Base64] {
            let text: String = whole("a \"model\"".into(), vectors.clone(), encoding, 7).collect();
            let answer: Value = serde_json::from_str(&text).unwrap();
            assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("a \"model\"")));
            assert_eq!(answer["usage"], json!({ "prompt_tokens": 7, "total_tokens": 7 }));
            let data = answer["data"].as_array().unwrap();
            assert_eq!(data.len(), vectors.len());
            for (nth, (one, wanted)) in data.iter().zip(&vectors).enumerate() {
                assert_eq!((&one["object"], &one["index"]), (&json!("embedding"), &json!(nth)));
                let numbers: Vec<f32> = match &one["embedding"] {
                    Value::String(text) => {
                        let bytes = BASE64_STANDARD.decode(text).unwrap();
                        bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
                    }
                    numbers => serde_json::from_value(numbers.clone()).unwrap(),
                };
                assert_eq!(&numbers, wanted, "{encoding:?}");
            }
        }
    }

    #[test]
    fn a_vector_that_is_cut_short_has_length_one() {
        let mut vector = vec![0.6, 0.0, 0.8];
        shorten(&mut vector, 2).unwrap();
        assert_eq!(vector, [1.0, 0.0]);
        let error = shorten(&mut vec![0.0, 1.0], 1).unwrap_err();
        assert_eq!((error.status, error.param.as_deref()), (400, Some("dimensions")));
    }
}
