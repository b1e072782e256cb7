//! Requests: from JSON to what is to be done. Trusts nothing.
//!
//! Fields: <https://platform.openai.com/docs/api-reference/chat/create> and `.../completions/create`. What OpenAI's API
//! has and this server does not do is refused by name, unless the value asks for nothing; what nobody knows is refused
//! too. Beyond OpenAI's API: `top_k`, `ignore_eos`, and prompts of token ids.

use serde_json::{Map, Value};

use crate::error::{ApiError, shortened};

/// The most stop sequences of a request (OpenAI's limit).
const STOPS_MOST: usize = 4;
/// The longest stop sequence, in bytes.
const STOP_BYTES_MOST: usize = 1024;
/// The most choices of a request.
const CHOICES_MOST: u64 = 128;
/// The most alternatives of a token that a chat completion names (OpenAI's limit), and a completion.
const CHAT_LOGPROBS_MOST: u64 = 20;
const LOGPROBS_MOST: u64 = 5;

/// What is asked for, whatever the kind of request.
#[derive(Clone, Debug, PartialEq)]
pub struct Common {
    /// The model's name.
    pub model: Option<String>,
    /// The most tokens of an answer.
    pub max_tokens: Option<usize>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Answers to the same prompt.
    pub choices: usize,
    /// Texts that end an answer; they are not part of it.
    pub stop: Vec<String>,
    /// Whether pieces are sent as they come.
    pub stream: bool,
    /// Whether the last piece tells what was used.
    pub stream_usage: bool,
    /// How many alternatives of each token are named.
    pub logprobs: Option<usize>,
    /// Whether the answer goes on behind the model's end tokens.
    pub ignore_end: bool,
}

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest.
    pub temperature: f32,
    /// See [`outcore_llm::Sampler::top_p`].
    pub top_p: f32,
    /// See [`outcore_llm::Sampler::top_k`].
    pub top_k: usize,
    /// The same seed gives the same answer.
    pub seed: Option<u64>,
}

/// A turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: &'static str,
    /// What was said.
    pub content: String,
}

/// What an answer continues.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
    /// A conversation, for the model's chat template.
    Chat(Vec<Message>),
}

impl Prompt {
    /// Bytes of its text: none if it has tokens already.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(_) => 0,
            Self::Chat(turns) => turns.iter().map(|turn| turn.role.len() + turn.content.len()).sum(),
        }
    }
}

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// What to continue: each has its own answers.
    pub prompts: Vec<Prompt>,
    /// Whether the prompt is part of the answer's text.
    pub echo: bool,
    /// The rest.
    pub common: Common,
}

/// Fields that change nothing that this server does.
const WITHOUT_EFFECT: [&str; 8] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
];

/// Fields of OpenAI's API that this server does not do, with the values that ask for nothing.
fn asks_for_nothing(name: &str, value: &Value) -> Option<bool> {
    let empty = || value.is_null() || value.as_array().is_some_and(Vec::is_empty);
    Some(match name {
        "frequency_penalty" | "presence_penalty" => value.is_null() || value.as_f64() == Some(0.0),
        "logit_bias" => value.is_null() || value.as_object().is_some_and(Map::is_empty),
        "tools" | "functions" => empty(),
        "tool_choice" | "function_call" => value.is_null() || value.as_str() == Some("none"),
        "response_format" => {
            value.is_null() || value.get("type").and_then(Value::as_str).is_some_and(|kind| kind == "text")
        }
        "modalities" => empty() || *value == serde_json::json!(["text"]),
        "suffix" => value.is_null() || value.as_str() == Some(""),
        "audio" | "prediction" | "reasoning_effort" | "verbosity" | "web_search_options" => value.is_null(),
        _ => return None,
    })
}

/// The members of a request's object.
struct Fields(Map<String, Value>);

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a decimal",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

fn wrong_type(param: &str, wanted: &str, got: &Value) -> ApiError {
    ApiError::invalid(format!("Invalid type for '{param}': expected {wanted}, but got {} instead.", kind_of(got)))
        .param(param)
        .code("invalid_type")
}

fn wrong_value(param: &str, why: impl AsRef<str>) -> ApiError {
    ApiError::invalid(format!("Invalid value for '{param}': {}.", why.as_ref())).param(param).code("invalid_value")
}

impl Fields {
    fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body).map_err(|wrong| {
            ApiError::invalid(format!("The body is not UTF-8: byte {} is wrong.", wrong.valid_up_to()))
        })?;
        match serde_json::from_str(text) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(other) => {
                Err(ApiError::invalid(format!("The body has to be a JSON object, but it is {}.", kind_of(&other))))
            }
            Err(wrong) => Err(ApiError::invalid(format!(
                "We could not parse the JSON body of your request: line {}, column {}: {}.",
                wrong.line(),
                wrong.column(),
                match wrong.classify() {
                    serde_json::error::Category::Eof => "it ends too early",
                    _ => "it is not valid there",
                }
            ))),
        }
    }

    /// The field, unless it is absent or null.
    fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    fn bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| wrong_type(name, "a boolean", &value))
    }

    fn number(&mut self, name: &str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| wrong_type(name, "a decimal", &value))?;
        if (least..=most).contains(&number) {
            return Ok(Some(number));
        }
        Err(wrong_value(name, format!("it has to be between {least} and {most}")))
    }

    fn integer(&mut self, name: &str, least: u64, most: u64) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        if value.as_i64().is_none() && value.as_u64().is_none() {
            return Err(wrong_type(name, "an integer", &value));
        }
        let number = value.as_u64().filter(|number| (least..=most).contains(number));
        number.map(Some).ok_or_else(|| wrong_value(name, format!("it has to be between {least} and {most}")))
    }

    fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(name, "a string", &other)),
        }
    }

    fn stop(&mut self) -> Result<Vec<String>, ApiError> {
        let stops = match self.take("stop") {
            None => return Ok(Vec::new()),
            Some(Value::String(one)) => vec![one],
            Some(Value::Array(all)) => all
                .into_iter()
                .enumerate()
                .map(|(nth, stop)| match stop {
                    Value::String(stop) => Ok(stop),
                    other => Err(wrong_type(&format!("stop[{nth}]"), "a string", &other)),
                })
                .collect::<Result<_, _>>()?,
            Some(other) => return Err(wrong_type("stop", "a string or an array of strings", &other)),
        };
        if stops.len() > STOPS_MOST {
            return Err(wrong_value("stop", format!("at most {STOPS_MOST} sequences are allowed")));
        }
        if stops.iter().any(|stop| stop.is_empty() || stop.len() > STOP_BYTES_MOST) {
            return Err(wrong_value("stop", format!("a sequence has 1 to {STOP_BYTES_MOST} bytes")));
        }
        Ok(stops)
    }

    /// What both kinds of requests have.
    fn common(&mut self, logprobs: Option<usize>) -> Result<Common, ApiError> {
        let stream = self.bool("stream")?.unwrap_or(false);
        let stream_usage = match self.take("stream_options") {
            None => false,
            Some(Value::Object(options)) => {
                if !stream {
                    let message = "The 'stream_options' parameter is only allowed when 'stream' is enabled.";
                    return Err(ApiError::invalid(message).param("stream_options"));
                }
                let mut options = Self(options);
                let mut flag = |name: &str| match options.take(name) {
                    None => Ok(false),
                    Some(Value::Bool(flag)) => Ok(flag),
                    Some(other) => Err(wrong_type(&format!("stream_options.{name}"), "a boolean", &other)),
                };
                let [usage, obfuscation] = ["include_usage", "include_obfuscation"].map(&mut flag);
                obfuscation?;
                let usage = usage?;
                options.finish("stream_options.")?;
                usage
            }
            Some(other) => return Err(wrong_type("stream_options", "an object", &other)),
        };
        let seed = match self.take("seed") {
            None => None,
            Some(value) => {
                let signed = value.as_i64().map(|seed| seed as u64);
                Some(signed.or(value.as_u64()).ok_or_else(|| wrong_type("seed", "an integer", &value))?)
            }
        };
        let [longest, newer] = ["max_tokens", "max_completion_tokens"].map(|name| self.integer(name, 1, 1 << 31));
        let max_tokens = newer?.or(longest?).map(|most| most as usize);
        let common = Common {
            model: self.string("model")?,
            max_tokens,
            sampling: Sampling {
                temperature: self.number("temperature", 0.0, 2.0)?.unwrap_or(1.0) as f32,
                top_p: self.number("top_p", 0.0, 1.0)?.unwrap_or(1.0) as f32,
                top_k: self.integer("top_k", 0, 1 << 31)?.unwrap_or(0) as usize,
                seed,
            },
            choices: self.integer("n", 1, CHOICES_MOST)?.unwrap_or(1) as usize,
            stop: self.stop()?,
            stream,
            stream_usage,
            logprobs,
            ignore_end: self.bool("ignore_eos")?.unwrap_or(false),
        };
        Ok(common)
    }

    /// Refuses what is left.
    fn finish(self, within: &str) -> Result<(), ApiError> {
        for (name, value) in &self.0 {
            if within.is_empty() && WITHOUT_EFFECT.contains(&name.as_str()) {
                continue;
            }
            let param = format!("{within}{}", shortened(name));
            match asks_for_nothing(name, value).filter(|_| within.is_empty()) {
                Some(true) => {}
                Some(false) => {
                    let message = format!("Unsupported parameter: '{param}' is not supported with this model.");
                    return Err(ApiError::invalid(message).param(param).code("unsupported_parameter"));
                }
                None => {
                    let message = format!("Unrecognized request argument supplied: {param}");
                    return Err(ApiError::invalid(message).param(param).code("unknown_parameter"));
                }
            }
        }
        Ok(())
    }
}

/// A message's text: a string, or parts of type `text`.
fn content(at: &str, value: Option<Value>) -> Result<String, ApiError> {
    let param = format!("{at}.content");
    match value {
        None | Some(Value::Null) => {
            let message = format!("Missing required parameter: '{param}'.");
            Err(ApiError::invalid(message).param(param).code("missing_required_parameter"))
        }
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => {
            let mut whole = String::new();
            for (nth, part) in parts.iter().enumerate() {
                let param = format!("{param}[{nth}]");
                match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
                    (Some("text"), Some(text)) => whole.push_str(text),
                    (Some("text"), None) => return Err(wrong_value(&param, "a part of type 'text' has a text")),
                    _ => return Err(wrong_value(&param, "only parts of type 'text' are supported")),
                }
            }
            Ok(whole)
        }
        Some(other) => Err(wrong_type(&param, "a string or an array of parts", &other)),
    }
}

fn message(nth: usize, value: Value) -> Result<Message, ApiError> {
    let at = format!("messages[{nth}]");
    let Value::Object(fields) = value else { return Err(wrong_type(&at, "an object", &value)) };
    let mut fields = Fields(fields);
    let role = match fields.take("role") {
        Some(Value::String(role)) => role,
        Some(other) => return Err(wrong_type(&format!("{at}.role"), "a string", &other)),
        None => {
            let message = format!("Missing required parameter: '{at}.role'.");
            return Err(ApiError::invalid(message).param(format!("{at}.role")).code("missing_required_parameter"));
        }
    };
    // OpenAI's newer name of the same role, which templates do not know.
    let role = match role.as_str() {
        "developer" => "system",
        "system" => "system",
        "user" => "user",
        "assistant" => "assistant",
        _ => return Err(wrong_value(&format!("{at}.role"), "supported roles are 'system', 'user' and 'assistant'")),
    };
    let content = content(&at, fields.take("content"))?;
    fields.take("name");
    fields.take("refusal");
    for name in ["tool_calls", "function_call", "audio", "annotations"] {
        if fields.take(name).is_some_and(|value| value.as_array().is_none_or(|all| !all.is_empty())) {
            return Err(wrong_value(&format!("{at}.{name}"), "it is not supported"));
        }
    }
    fields.finish(&format!("{at}."))?;
    Ok(Message { role, content })
}

/// The request in the body of `/v1/chat/completions`.
pub fn chat(body: &[u8]) -> Result<Request, ApiError> {
    let mut fields = Fields::parse(body)?;
    let messages = match fields.take("messages") {
        Some(Value::Array(messages)) => messages,
        Some(other) => return Err(wrong_type("messages", "an array of objects", &other)),
        None => {
            let message = "Missing required parameter: 'messages'.";
            return Err(ApiError::invalid(message).param("messages").code("missing_required_parameter"));
        }
    };
    if messages.is_empty() {
        return Err(wrong_value("messages", "it needs at least one message"));
    }
    let messages =
        messages.into_iter().enumerate().map(|(nth, value)| message(nth, value)).collect::<Result<_, _>>()?;
    let top = fields.integer("top_logprobs", 0, CHAT_LOGPROBS_MOST)?;
    let logprobs = match (fields.bool("logprobs")?.unwrap_or(false), top) {
        (true, top) => Some(top.unwrap_or(0) as usize),
        (false, None | Some(0)) => None,
        (false, Some(_)) => return Err(wrong_value("top_logprobs", "'logprobs' has to be true for it")),
    };
    let common = fields.common(logprobs)?;
    fields.finish("")?;
    Ok(Request { prompts: vec![Prompt::Chat(messages)], echo: false, common })
}

fn token(param: &str, value: &Value) -> Result<u32, ApiError> {
    let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
    token.ok_or_else(|| wrong_type(param, "a token id", value))
}

/// The prompts of a completion: a text, an array of texts, of token ids, or of arrays of token ids.
fn prompts(value: Value) -> Result<Vec<Prompt>, ApiError> {
    let all = match value {
        Value::String(text) => return Ok(vec![Prompt::Text(text)]),
        Value::Array(all) => all,
        other => return Err(wrong_type("prompt", "a string or an array", &other)),
    };
    if all.first().is_some_and(Value::is_number) {
        let tokens = all.iter().enumerate().map(|(nth, value)| token(&format!("prompt[{nth}]"), value));
        return Ok(vec![Prompt::Tokens(tokens.collect::<Result<_, _>>()?)]);
    }
    let one = |(nth, value): (usize, Value)| match value {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(tokens) => {
            let param = format!("prompt[{nth}]");
            Ok(Prompt::Tokens(tokens.iter().map(|value| token(&param, value)).collect::<Result<_, _>>()?))
        }
        other => Err(wrong_type(&format!("prompt[{nth}]"), "a string or an array of token ids", &other)),
    };
    all.into_iter().enumerate().map(one).collect()
}

/// The request in the body of `/v1/completions`.
pub fn completion(body: &[u8]) -> Result<Request, ApiError> {
    let mut fields = Fields::parse(body)?;
    let Some(prompt) = fields.take("prompt") else {
        let message = "Missing required parameter: 'prompt'.";
        return Err(ApiError::invalid(message).param("prompt").code("missing_required_parameter"));
    };
    let prompts = prompts(prompt)?;
    let logprobs = fields.integer("logprobs", 0, LOGPROBS_MOST)?.map(|top| top as usize);
    let mut common = fields.common(logprobs)?;
    // OpenAI's default for completions.
    common.max_tokens = common.max_tokens.or(Some(16));
    let echo = fields.bool("echo")?.unwrap_or(false);
    let best_of = fields.integer("best_of", 1, CHOICES_MOST)?;
    if best_of.is_some_and(|best| best as usize != common.choices) {
        return Err(wrong_value("best_of", "it has to be the same as 'n'"));
    }
    fields.finish("")?;
    if prompts.is_empty() || prompts.len() * common.choices > CHOICES_MOST as usize {
        return Err(wrong_value("prompt", format!("a request has 1 to {CHOICES_MOST} prompts times choices")));
    }
    Ok(Request { prompts, echo, common })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use serde_json::json;

    use super::*;

    type Parse = fn(&[u8]) -> Result<Request, ApiError>;

    const BOTH: [(Parse, &str); 2] =
        [(chat, r#"{"messages": [{"role": "user", "content": "a"}]}"#), (completion, r#"{"prompt": "a"}"#)];

    /// A valid request with this field.
    fn with(valid: &str, name: &str, value: Value) -> Vec<u8> {
        let mut fields: Map<String, Value> = serde_json::from_str(valid).unwrap();
        fields.insert(name.into(), value);
        Value::from(fields).to_string().into_bytes()
    }

    fn refused(parse: Parse, valid: &str, name: &str, value: Value) -> (String, Option<String>, Option<&'static str>) {
        let error = parse(&with(valid, name, value)).unwrap_err();
        assert_eq!((error.status, error.kind), (400, "invalid_request_error"));
        (error.message, error.param, error.code)
    }

    #[test]
    fn a_wrong_type_is_refused_by_the_fields_name_in_openais_words() {
        let common = [
            ("model", json!(1), "a string", "an integer"),
            ("max_tokens", json!("5"), "an integer", "a string"),
            ("max_completion_tokens", json!(5.0), "an integer", "a decimal"),
            ("temperature", json!("0"), "a decimal", "a string"),
            ("top_p", json!([]), "a decimal", "an array"),
            ("top_k", json!(1.5), "an integer", "a decimal"),
            ("seed", json!("7"), "an integer", "a string"),
            ("n", json!(true), "an integer", "a boolean"),
            ("stop", json!(7), "a string or an array of strings", "an integer"),
            ("stream", json!("true"), "a boolean", "a string"),
            ("stream", json!(1), "a boolean", "an integer"),
            ("stream_options", json!(true), "an object", "a boolean"),
            ("ignore_eos", json!({}), "a boolean", "an object"),
        ];
        let check = |parse, valid, (name, value, wanted, got): (&str, Value, &str, &str)| {
            let message = format!("Invalid type for '{name}': expected {wanted}, but got {got} instead.");
            let refused = refused(parse, valid, name, value);
            assert_eq!(refused, (message, Some(name.to_owned()), Some("invalid_type")));
        };
        for (parse, valid) in BOTH {
            common.clone().into_iter().for_each(|one| check(parse, valid, one));
        }
        let [(chat, messages), (completion, prompt)] = BOTH;
        check(chat, messages, ("messages", json!({}), "an array of objects", "an object"));
        check(chat, messages, ("logprobs", json!(5), "a boolean", "an integer"));
        check(chat, messages, ("top_logprobs", json!("5"), "an integer", "a string"));
        check(completion, prompt, ("prompt", json!(7), "a string or an array", "an integer"));
        check(completion, prompt, ("logprobs", json!(true), "an integer", "a boolean"));
        check(completion, prompt, ("echo", json!("yes"), "a boolean", "a string"));
        check(completion, prompt, ("best_of", json!("1"), "an integer", "a string"));
    }

    #[test]
    fn what_is_wrong_within_a_field_is_named_by_where_it_is() {
        let [(chat, messages), (completion, prompt)] = BOTH;
        let cases = [
            (chat, messages, "messages", json!(["a"]), "messages[0]", "invalid_type"),
            (chat, messages, "messages", json!([{}]), "messages[0].role", "missing_required_parameter"),
            (chat, messages, "messages", json!([{ "role": 1 }]), "messages[0].role", "invalid_type"),
            (chat, messages, "messages", json!([{ "role": "tool" }]), "messages[0].role", "invalid_value"),
            (
                chat,
                messages,
                "messages",
                json!([{ "role": "user", "content": null }]),
                "messages[0].content",
                "missing_required_parameter",
            ),
            (
                chat,
                messages,
                "messages",
                json!([{ "role": "user", "content": [{ "type": "image_url" }] }]),
                "messages[0].content[0]",
                "invalid_value",
            ),
            (
                chat,
                messages,
                "messages",
                json!([{ "role": "user", "content": "a", "wings": 2 }]),
                "messages[0].wings",
                "unknown_parameter",
            ),
            (completion, prompt, "prompt", json!([1, -1]), "prompt[1]", "invalid_type"),
            (completion, prompt, "prompt", json!(["a", 1]), "prompt[1]", "invalid_type"),
            (completion, prompt, "stop", json!(["a", 1]), "stop[1]", "invalid_type"),
        ];
        for (parse, valid, name, value, param, code) in cases {
            let (message, named, coded) = refused(parse, valid, name, value);
            assert_eq!((named.as_deref(), coded), (Some(param), Some(code)), "{message}");
            assert!(message.contains(&format!("'{param}'")) || code == "unknown_parameter", "{message}");
        }
    }

    #[test]
    fn regression_a_wrong_option_of_streams_is_named_by_where_it_is() {
        for name in ["include_usage", "include_obfuscation"] {
            let body = json!({ "prompt": "a", "stream": true, "stream_options": { name: 1 } }).to_string();
            let error = completion(body.as_bytes()).unwrap_err();
            let param = format!("stream_options.{name}");
            assert!(error.message.contains(&format!("'{param}'")), "{error}");
            assert_eq!(error.param, Some(param));
        }
    }

    #[test]
    fn values_beyond_a_limit_say_the_limit() {
        for (parse, valid) in BOTH {
            for (name, value, limit) in [
                ("max_tokens", json!(0), "between 1 and"),
                ("max_tokens", json!(-1), "between 1 and"),
                ("temperature", json!(2.1), "between 0 and 2"),
                ("top_p", json!(-0.1), "between 0 and 1"),
                ("n", json!(0), "between 1 and 128"),
                ("n", json!(u64::MAX), "between 1 and 128"),
                ("stop", json!(["a", "b", "c", "d", "e"]), "at most 4"),
                ("stop", json!(""), "1 to 1024 bytes"),
                ("stop", json!("a".repeat(1025)), "1 to 1024 bytes"),
            ] {
                let (message, param, code) = refused(parse, valid, name, value);
                assert!(message.starts_with(&format!("Invalid value for '{name}': ")), "{message}");
                assert!(message.contains(limit), "{message}");
                assert_eq!((param.as_deref(), code), (Some(name), Some("invalid_value")));
            }
        }
        let many = json!({ "prompt": vec!["a"; 65], "n": 2 }).to_string();
        assert_eq!(completion(many.as_bytes()).unwrap_err().param.as_deref(), Some("prompt"));
        let best = refused(completion, BOTH[1].1, "best_of", json!(2));
        assert_eq!((best.1.as_deref(), best.2), (Some("best_of"), Some("invalid_value")));
    }

    #[test]
    fn null_is_the_same_as_absent() {
        let names = [
            "model",
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "top_p",
            "top_k",
            "seed",
            "n",
            "stop",
            "stream",
            "stream_options",
            "logprobs",
            "top_logprobs",
            "ignore_eos",
            "user",
            "tools",
            "tool_choice",
            "response_format",
            "logit_bias",
            "frequency_penalty",
            "presence_penalty",
            "metadata",
            "modalities",
            "audio",
        ];
        for (parse, valid) in BOTH {
            let plain = parse(valid.as_bytes()).unwrap();
            for name in names {
                // A member of chat completions only.
                if name == "top_logprobs" && valid.contains("prompt") {
                    continue;
                }
                assert_eq!(parse(&with(valid, name, Value::Null)).as_ref(), Ok(&plain), "{name}");
            }
        }
        let [(chat, messages), (completion, prompt)] = BOTH;
        for (parse, valid, name) in [(chat, messages, "messages"), (completion, prompt, "prompt")] {
            let (message, param, code) = refused(parse, valid, name, Value::Null);
            assert_eq!(message, format!("Missing required parameter: '{name}'."));
            assert_eq!((param.as_deref(), code), (Some(name), Some("missing_required_parameter")));
        }
    }

    #[test]
    fn what_asks_for_nothing_is_accepted_and_the_rest_is_refused_by_name() {
        let fields = [
            ("frequency_penalty", json!(0), json!(0.5)),
            ("presence_penalty", json!(0.0), json!(-1)),
            ("logit_bias", json!({}), json!({ "1": 5 })),
            ("tools", json!([]), json!([{ "type": "function" }])),
            ("functions", json!([]), json!([1])),
            ("tool_choice", json!("none"), json!("auto")),
            ("response_format", json!({ "type": "text" }), json!({ "type": "json_object" })),
            ("modalities", json!(["text"]), json!(["audio"])),
            ("suffix", json!(""), json!("end")),
        ];
        for (parse, valid) in BOTH {
            let plain = parse(valid.as_bytes()).unwrap();
            for (name, nothing, something) in fields.clone() {
                assert_eq!(parse(&with(valid, name, nothing)).as_ref(), Ok(&plain), "{name}");
                let (message, param, code) = refused(parse, valid, name, something);
                assert_eq!(message, format!("Unsupported parameter: '{name}' is not supported with this model."));
                assert_eq!((param.as_deref(), code), (Some(name), Some("unsupported_parameter")));
            }
            for name in WITHOUT_EFFECT {
                assert_eq!(parse(&with(valid, name, json!({ "any": ["thing"] }))).as_ref(), Ok(&plain), "{name}");
            }
            let (message, param, code) = refused(parse, valid, "wings", json!(2));
            assert_eq!(message, "Unrecognized request argument supplied: wings");
            assert_eq!((param.as_deref(), code), (Some("wings"), Some("unknown_parameter")));
            // A name of any length is repeated in part.
            let (message, ..) = refused(parse, valid, &"\u{1b}\u{1f600}".repeat(1000), json!(2));
            assert!(message.len() < 400 && !message.contains(char::is_control), "{message:?}");
        }
    }

    #[test]
    fn bodies_that_are_no_object_say_where_they_go_wrong_and_repeat_nothing() {
        for (body, said) in [
            (b"{\"prompt\": xyzzy}".as_slice(), "line 1, column 12"),
            (b"{\"prompt\": \"xyzzy", "it ends too early"),
            (b"\"xyzzy\"", "it is a string"),
            (b"xyzzy\xff", "byte 5"),
            (b"", "it ends too early"),
        ] {
            for (parse, _) in BOTH {
                let error = parse(body).unwrap_err();
                assert!(error.message.contains(said) && !error.message.contains("xyzzy"), "{error}");
            }
        }
    }
}
