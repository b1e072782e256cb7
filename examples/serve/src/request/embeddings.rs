//! Requests for embeddings.
//!
//! Fields: <https://platform.openai.com/docs/api-reference/embeddings/create>.

use super::{ALLOCATION_BYTES, Fields, Prompt, Raw, tokens, wrong_type, wrong_value};
use crate::error::ApiError;

/// The most inputs of a request (OpenAI's limit).
const INPUTS_MOST: usize = 2048;
/// The most numbers of an embedding that can be asked for; a model has fewer.
const DIMENSIONS_MOST: u64 = 1 << 31;
/// What a request takes besides its inputs, in bytes.
const REQUEST_BYTES: usize = 4 << 10;

/// How the numbers of an embedding are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// As an array.
    #[default]
    Float,
    /// As base64 of little-endian numbers of 32 bits.
    Base64,
}

/// A request for embeddings.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingRequest {
    /// Texts, or token ids: none is empty, and there is one at least. Each has its own embedding.
    pub inputs: Vec<Prompt>,
    /// The model's name.
    pub model: Option<String>,
    /// How numbers are written.
    pub encoding: Encoding,
    /// How many of the first numbers are wanted, if not all; at least one.
    pub dimensions: Option<usize>,
    /// The first fields with names that nobody knows, cut short. They have no effect.
    pub unknown: Vec<String>,
}

impl EmbeddingRequest {
    /// Bytes of memory that it takes.
    pub fn bytes(&self) -> usize {
        let inputs = self.inputs.iter().map(|input| size_of_val(input) + ALLOCATION_BYTES + input.bytes());
        REQUEST_BYTES + self.model.as_ref().map_or(0, String::len) + inputs.sum::<usize>()
    }
}

/// What an input is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Tokens,
}

impl Kind {
    /// Of an element of an array of inputs.
    fn of(param: &str, value: Raw<'_>) -> Result<Self, ApiError> {
        match (value.is_string(), value.is_array()) {
            (true, _) => Ok(Self::Text),
            (_, true) => Ok(Self::Tokens),
            _ => Err(wrong_type(param, "a string or an array of token ids", value)),
        }
    }
}

fn empty(param: &str, what: &str) -> ApiError {
    wrong_value(
        param,
        format!("{what} has to have at least one {}", if what == "a text" { "character" } else { "token" }),
    )
}

/// A text or an array of token ids.
fn input(param: &str, kind: Kind, value: Raw<'_>) -> Result<Prompt, ApiError> {
    match kind {
        Kind::Text if value.is_text("")? => Err(empty(param, "a text")),
        Kind::Text => value.owned().map(Prompt::Text),
        Kind::Tokens if value.is_empty() => Err(empty(param, "an array of token ids")),
        Kind::Tokens => tokens(value, value.count()?.0, |nth| format!("{param}[{nth}]")),
    }
}

/// A text, an array of token ids, or an array of either: all of one kind.
fn inputs(value: Raw<'_>) -> Result<Vec<Prompt>, ApiError> {
    const NAME: &str = "input";
    if value.is_string() {
        return Ok(vec![input(NAME, Kind::Text, value)?]);
    }
    if !value.is_array() {
        return Err(wrong_type(NAME, "a string or an array", value));
    }
    let (count, first) = value.count()?;
    let Some(first) = first else { return Err(wrong_value(NAME, "there has to be at least one input")) };
    if first.is_number() {
        return Ok(vec![input(NAME, Kind::Tokens, value)?]);
    }
    if count > INPUTS_MOST {
        return Err(wrong_value(NAME, format!("at most {INPUTS_MOST} inputs are allowed, and there are {count}")));
    }
    let kind = Kind::of(&format!("{NAME}[0]"), first)?;
    let mut inputs = Vec::with_capacity(count);
    value.elements(|nth, value| {
        let param = format!("{NAME}[{nth}]");
        if Kind::of(&param, value)? != kind {
            let wanted = if kind == Kind::Text { "a string" } else { "an array of token ids" };
            return Err(wrong_type(&param, &format!("{wanted}, as the first input is"), value));
        }
        inputs.push(input(&param, kind, value)?);
        Ok(())
    })?;
    Ok(inputs)
}

/// The request in the body of `/v1/embeddings`.
///
/// # Errors
/// 400, with the field that is wrong.
pub fn embedding(body: &[u8]) -> Result<EmbeddingRequest, ApiError> {
    let mut fields = Fields::parse(body)?;
    let inputs = inputs(fields.need("input", "")?)?;
    let encoding = match fields.take("encoding_format") {
        None => Encoding::default(),
        Some(other) if !other.is_string() => return Err(wrong_type("encoding_format", "a string", other)),
        Some(name) => match &*name.text()? {
            "float" => Encoding::Float,
            "base64" => Encoding::Base64,
            _ => return Err(wrong_value("encoding_format", "supported are 'float' and 'base64'")),
        },
    };
    let dimensions = fields.integer("dimensions", 1, DIMENSIONS_MOST)?.map(|count| count as usize);
    let model = fields.string("model")?;
    let mut unknown = Vec::new();
    fields.finish("", &mut unknown)?;
    Ok(EmbeddingRequest { inputs, model, encoding, dimensions, unknown })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use serde_json::{Value, json};

    use super::*;

    fn parse(body: &Value) -> Result<EmbeddingRequest, ApiError> {
        embedding(body.to_string().as_bytes())
    }

    #[test]
    fn inputs_are_texts_or_token_ids_one_or_many() {
        let text = |text: &str| Prompt::Text(text.into());
        for (input, wanted) in [
            (json!("a"), vec![text("a")]),
            (json!(["a"]), vec![text("a")]),
            (json!(["a", "b\n"]), vec![text("a"), text("b\n")]),
            (json!([1, 2]), vec![Prompt::Tokens(vec![1, 2])]),
            (json!([[1], [2, 3]]), vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]),
        ] {
            let read = parse(&json!({ "input": input })).unwrap();
            assert_eq!((read.inputs, read.encoding, read.dimensions), (wanted, Encoding::Float, None), "{input}");
        }
        let whole = json!({
            "input": "a", "model": "m", "encoding_format": "base64", "dimensions": 3, "user": "u", "wings": 2,
        });
        let read = parse(&whole).unwrap();
        assert_eq!((read.model.as_deref(), read.encoding, read.dimensions), (Some("m"), Encoding::Base64, Some(3)));
        assert_eq!(read.unknown, ["wings"]);
    }

    #[test]
    fn what_is_wrong_is_named_by_where_it_is() {
        let most = vec!["a"; INPUTS_MOST];
        assert_eq!(parse(&json!({ "input": most })).unwrap().inputs.len(), INPUTS_MOST);
        for (body, param, code, said) in [
            (json!({}), "input", "missing_required_parameter", "Missing"),
            (json!({ "input": null }), "input", "missing_required_parameter", "Missing"),
            (json!({ "input": {} }), "input", "invalid_type", "an object"),
            (json!({ "input": 7 }), "input", "invalid_type", "an integer"),
            (json!({ "input": "" }), "input", "invalid_value", "one character"),
            (json!({ "input": [] }), "input", "invalid_value", "at least one input"),
            (json!({ "input": [[]] }), "input[0]", "invalid_value", "one token"),
            (json!({ "input": ["a", ""] }), "input[1]", "invalid_value", "one character"),
            (json!({ "input": [[1], []] }), "input[1]", "invalid_value", "one token"),
            (json!({ "input": [null] }), "input[0]", "invalid_type", "null"),
            (json!({ "input": ["a", 1] }), "input[1]", "invalid_type", "an integer"),
            (json!({ "input": ["a", [1]] }), "input[1]", "invalid_type", "a string, as the first input is"),
            (json!({ "input": [[1], "a"] }), "input[1]", "invalid_type", "an array of token ids, as"),
            (json!({ "input": [1, "a"] }), "input[1]", "invalid_type", "a token id"),
            (json!({ "input": [1, [2]] }), "input[1]", "invalid_type", "a token id"),
            (json!({ "input": [[1, 2], [3, -1]] }), "input[1][1]", "invalid_type", "a token id"),
            (json!({ "input": [[1, [2]]] }), "input[0][1]", "invalid_type", "a token id"),
            (json!({ "input": vec!["a"; INPUTS_MOST + 1] }), "input", "invalid_value", "at most 2048 inputs"),
            (json!({ "input": "a", "encoding_format": "hex" }), "encoding_format", "invalid_value", "'base64'"),
            (json!({ "input": "a", "encoding_format": 1 }), "encoding_format", "invalid_type", "a string"),
            (json!({ "input": "a", "dimensions": 0 }), "dimensions", "invalid_value", "between 1 and"),
            (json!({ "input": "a", "dimensions": 1.5 }), "dimensions", "invalid_type", "an integer"),
            (json!({ "input": "a", "model": 1 }), "model", "invalid_type", "a string"),
            (json!({ "input": "a", "tools": [1] }), "tools", "unsupported_parameter", "tools"),
        ] {
            let error = parse(&body).unwrap_err();
            assert_eq!((error.status, error.param.as_deref(), error.code), (400, Some(param), Some(code)), "{body}");
            assert!(error.message.contains(said), "{error}");
        }
    }
}
