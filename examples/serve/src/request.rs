//! Requests: from JSON to what is to be done. Trusts nothing.
//!
//! Fields: <https://platform.openai.com/docs/api-reference/chat/create> and `.../completions/create`. What OpenAI's API
//! has and this server does not do is refused by name, unless the value asks for nothing. What nobody knows is listed.
//! Beyond OpenAI's API: `top_k`, `min_p`, `repetition_penalty`, `ignore_eos`, `chat_template_kwargs`, and prompts of
//! token ids.
//!
//! Nothing of a body becomes a tree of values: members are looked up in its text, and what a [`Request`] has is copied
//! from there once its size is known. So [`bytes_to_parse`] holds for every body.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::error::{ApiError, shortened};

// By its path: the fuzzer takes this file by its own, and would look beside it.
#[path = "request/embeddings.rs"]
pub mod embeddings;

/// The most messages of a request (OpenAI's limit).
const MESSAGES_MOST: usize = 2048;
/// The most stop sequences of a request (OpenAI's limit).
const STOPS_MOST: usize = 4;
/// The longest stop sequence, in bytes.
const STOP_BYTES_MOST: usize = 1024;
/// The most tokens of a `logit_bias`.
const BIASES_MOST: usize = 1024;
/// The longest `chat_template_kwargs`, in bytes, and how much more memory its values take.
const TEMPLATE_BYTES_MOST: usize = 1 << 10;
const TEMPLATE_VALUES: usize = 64;
/// The longest schema of a `response_format`, in bytes.
const SCHEMA_BYTES_MOST: usize = 64 << 10;
/// The most tools of a request (OpenAI's limit), and their definitions in bytes.
const TOOLS_MOST: usize = 128;
const TOOLS_BYTES_MOST: usize = 128 << 10;
/// The most calls of a message.
const CALLS_MOST: usize = 128;
/// The longest name of a schema or of a function (OpenAI's limit).
const NAME_MOST: usize = 64;
/// The most names of unknown fields that are listed.
const UNKNOWN_MOST: usize = 64;
/// The most choices of a request.
const CHOICES_MOST: u64 = 128;
/// The most alternatives of a token that a chat completion names (OpenAI's limit), and a completion.
const CHAT_LOGPROBS_MOST: u64 = 20;
const LOGPROBS_MOST: u64 = 5;
/// How deep arrays and objects may be nested.
const DEPTH_MOST: usize = 127;
/// What an allocator takes for a text besides its bytes.
const ALLOCATION_BYTES: usize = 32;
/// What a request takes besides its texts and tokens, in bytes.
const REQUEST_BYTES: usize = (4 << 10) + TEMPLATE_BYTES_MOST * TEMPLATE_VALUES;

/// Bytes of memory for each byte of a body: itself, and twice as many for tokens of one digit.
const PARSING_BYTES: usize = 3;
/// The shortest messages take so much more than that, all together, and so do the parser's own variables.
const PARSING_MORE: usize = MESSAGES_MOST * 40 + TOOLS_MOST * 128 + TEMPLATE_BYTES_MOST * TEMPLATE_VALUES;

/// Bytes of memory that a body of so many bytes takes until it is parsed, with what becomes of it, at most.
pub fn bytes_to_parse(body: usize) -> usize {
    body.saturating_mul(PARSING_BYTES).saturating_add(PARSING_MORE)
}

/// The longest body that can be parsed in so many bytes of memory.
pub fn longest_body(memory: usize) -> usize {
    memory.saturating_sub(PARSING_MORE) / PARSING_BYTES
}

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
    /// What a chat template gets besides the messages.
    pub template: Map<String, Value>,
    /// What an answer has to be, if not just any text.
    pub format: Option<Format>,
    /// The tools that an answer may call, if it may call any.
    pub tools: Option<Tools>,
    /// The first fields with names that nobody knows, cut short. They have no effect.
    pub unknown: Vec<String>,
}

/// What an answer has to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Format {
    /// Any JSON object.
    Object,
    /// JSON that this schema describes: a JSON object, as it stands in the body.
    Schema(String),
}

impl Format {
    /// Bytes of memory that it takes.
    fn bytes(&self) -> usize {
        match self {
            Self::Object => 0,
            Self::Schema(schema) => schema.len(),
        }
    }
}

/// Tools that the model may call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tools {
    /// A JSON array of their definitions, as it stands in the body.
    pub definitions: Arc<str>,
    /// Their names, in order.
    pub names: Arc<[String]>,
    /// Which one is called.
    pub choice: ToolChoice,
}

/// Which of the tools an answer calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// Any, or none.
    Auto,
    /// One of them.
    Required,
    /// This one.
    Named(String),
}

impl Tools {
    /// Bytes of memory that they take.
    fn bytes(&self) -> usize {
        let names = self.names.iter().map(|name| size_of_val(name) + ALLOCATION_BYTES + name.len());
        self.definitions.len() + names.sum::<usize>() + 3 * ALLOCATION_BYTES + NAME_MOST
    }
}

/// How tokens are chosen; what is `None` is the server's choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest.
    pub temperature: Option<f32>,
    /// See [`outcore_llm::Sampler::top_p`].
    pub top_p: Option<f32>,
    /// See [`outcore_llm::Sampler::top_k`].
    pub top_k: Option<usize>,
    /// See [`outcore_llm::Sampler::min_p`].
    pub min_p: Option<f32>,
    /// See [`outcore_llm::Penalties`].
    pub repetition: Option<f32>,
    /// See [`outcore_llm::Penalties`].
    pub presence: f32,
    /// See [`outcore_llm::Penalties`].
    pub frequency: f32,
    /// See [`outcore_llm::Penalties`].
    pub bias: Vec<(u32, f32)>,
    /// The same seed gives the same answer.
    pub seed: Option<u64>,
}

/// A turn of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: &'static str,
    /// What was said. Only one who calls tools may say nothing.
    pub content: Option<String>,
    /// The tools that the assistant called.
    pub calls: Vec<Call>,
    /// The call whose result this is, by its id.
    pub call: Option<String>,
}

/// A call of a tool. Not the model's type: this module builds without the engine, for the fuzzer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Tells it from others.
    pub id: String,
    /// The function's name.
    pub name: String,
    /// A JSON object, as text.
    pub arguments: String,
}

impl Message {
    /// Bytes of memory that it takes.
    fn bytes(&self) -> usize {
        let texts = self.content.iter().chain(&self.call).map(|text| ALLOCATION_BYTES + text.len()).sum::<usize>();
        size_of_val(self) + texts + self.calls.iter().map(Call::bytes).sum::<usize>()
    }
}

impl Call {
    /// Bytes of memory that it takes.
    fn bytes(&self) -> usize {
        size_of_val(self) + self.id.len() + self.name.len() + self.arguments.len() + 3 * ALLOCATION_BYTES
    }
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
    /// Bytes of memory that it takes.
    fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(tokens) => size_of_val(tokens.as_slice()),
            Self::Chat(turns) => turns.iter().map(Message::bytes).sum(),
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

impl Common {
    /// Bytes of memory that a request takes besides its prompts.
    pub fn bytes(&self) -> usize {
        let texts = self.stop.iter().chain(&self.model).map(String::len).sum::<usize>();
        let format = self.format.as_ref().map_or(0, Format::bytes);
        let tools = self.tools.as_ref().map_or(0, Tools::bytes);
        REQUEST_BYTES + texts + format + tools + size_of_val(self.sampling.bias.as_slice())
    }
}

impl Request {
    /// Bytes of memory that it takes.
    pub fn bytes(&self) -> usize {
        self.common.bytes() + self.prompts.iter().map(Prompt::bytes).sum::<usize>()
    }
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

/// Fields of OpenAI's API that this server does not do.
const UNSUPPORTED: [&str; 11] = [
    "tools",
    "functions",
    "tool_choice",
    "function_call",
    "response_format",
    "modalities",
    "suffix",
    "audio",
    "prediction",
    "verbosity",
    "web_search_options",
];

/// All other names that something here looks up, in whichever object.
const LOOKED_UP: [&str; 48] = [
    "model",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "chat_template_kwargs",
    "reasoning_effort",
    "seed",
    "n",
    "stop",
    "stream",
    "stream_options",
    "include_usage",
    "include_obfuscation",
    "logprobs",
    "top_logprobs",
    "ignore_eos",
    "messages",
    "role",
    "content",
    "type",
    "text",
    "name",
    "refusal",
    "tool_calls",
    "annotations",
    "reasoning_content",
    "prompt",
    "echo",
    "best_of",
    "json_schema",
    "schema",
    "strict",
    "description",
    "function",
    "parameters",
    "arguments",
    "id",
    "tool_call_id",
    "input",
    "encoding_format",
    "dimensions",
];

/// Whether such a field's value asks for nothing.
fn asks_for_nothing(name: &str, value: Raw<'_>) -> Result<bool, ApiError> {
    Ok(value.is_null()
        || match name {
            "tools" | "functions" => value.is_array() && value.is_empty(),
            // Without tools, there is nothing to choose.
            "tool_choice" | "function_call" => value.is_text("none")? || value.is_text("auto")?,
            "response_format" if value.is_object() => {
                Fields::of(value)?.take("type").is_some_and(|kind| kind.is_text("text").unwrap_or(false))
            }
            "modalities" if value.is_array() => {
                let mut others = 0;
                value.elements(|_, kind| {
                    others += usize::from(!kind.is_text("text")?);
                    Ok(())
                })?;
                others == 0
            }
            "suffix" => value.is_text("")?,
            _ => false,
        })
}

fn unparsed(what: &str) -> ApiError {
    ApiError::invalid(format!("We could not parse the JSON body of your request: {what}."))
}

fn wrong_type(param: &str, wanted: &str, got: Raw<'_>) -> ApiError {
    ApiError::invalid(format!("Invalid type for '{param}': expected {wanted}, but got {} instead.", got.kind()))
        .param(param)
        .code("invalid_type")
}

fn missing(param: &str) -> ApiError {
    let message = format!("Missing required parameter: '{param}'.");
    ApiError::invalid(message).param(param).code("missing_required_parameter")
}

fn wrong_value(param: &str, why: impl AsRef<str>) -> ApiError {
    ApiError::invalid(format!("Invalid value for '{param}': {}.", why.as_ref())).param(param).code("invalid_value")
}

/// The text of one value in a body. It is valid JSON.
#[derive(Clone, Copy)]
struct Raw<'a>(&'a str);

impl<'a> Raw<'a> {
    fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body).map_err(|wrong| {
            ApiError::invalid(format!("The body is not UTF-8: byte {} is wrong.", wrong.valid_up_to()))
        })?;
        if depth(text) > DEPTH_MOST {
            return Err(unparsed(&format!("it is nested more than {DEPTH_MOST} deep")));
        }
        let raw: &RawValue = serde_json::from_str(text).map_err(|wrong| {
            let why = match wrong.classify() {
                serde_json::error::Category::Eof => "it ends too early",
                _ => "it is not valid there",
            };
            unparsed(&format!("line {}, column {}: {why}", wrong.line(), wrong.column()))
        })?;
        Ok(Self(raw.get()))
    }

    fn kind(self) -> &'static str {
        match self.0.as_bytes().first() {
            Some(b'n') => "null",
            Some(b't' | b'f') => "a boolean",
            Some(b'"') => "a string",
            Some(b'[') => "an array",
            Some(b'{') => "an object",
            _ => match self.scalar() {
                Value::Number(number) if !number.is_f64() => "an integer",
                Value::Number(_) => "a decimal",
                _ => "a number beyond all limits",
            },
        }
    }

    fn is_null(self) -> bool {
        self.0 == "null"
    }

    fn is_number(self) -> bool {
        self.0.starts_with(|c: char| c == '-' || c.is_ascii_digit())
    }

    fn is_string(self) -> bool {
        self.0.starts_with('"')
    }

    fn is_array(self) -> bool {
        self.0.starts_with('[')
    }

    fn is_object(self) -> bool {
        self.0.starts_with('{')
    }

    /// Whether there is nothing between two brackets.
    fn is_empty(self) -> bool {
        self.0.get(1..).is_some_and(|rest| rest.trim_start().len() == 1)
    }

    /// Whether it is a string, and this one.
    fn is_text(self, text: &str) -> Result<bool, ApiError> {
        Ok(self.is_string() && self.text()? == text)
    }

    /// A number or a boolean, and null for everything else.
    fn scalar(self) -> Value {
        match self.is_string() || self.is_array() || self.is_object() {
            true => Value::Null,
            false => serde_json::from_str(self.0).unwrap_or_default(),
        }
    }

    /// What a string says: a part of the body, unless something is escaped.
    fn text(self) -> Result<Cow<'a, str>, ApiError> {
        let inner = self.0.get(1..self.0.len().saturating_sub(1)).unwrap_or_default();
        if !inner.contains('\\') {
            return Ok(Cow::Borrowed(inner));
        }
        let text = unescaped(inner).map(Cow::Owned);
        text.ok_or_else(|| unparsed("a string has half of a pair of \\u escapes"))
    }

    /// What a string says, to be kept.
    fn owned(self) -> Result<String, ApiError> {
        let mut text = self.text()?.into_owned();
        text.shrink_to_fit();
        Ok(text)
    }

    /// Calls `visit` with the name and the value of each member of an object, or with nothing and each element of an
    /// array.
    fn walk(self, visit: &mut dyn FnMut(Raw<'a>, Raw<'a>) -> Result<(), ApiError>) -> Result<(), ApiError> {
        let mut refused = None;
        let walk = Walk { visit, refused: &mut refused };
        let walked = serde_json::Deserializer::from_str(self.0).deserialize_any(walk);
        refused.map_or_else(|| walked.map_err(|_| unparsed("it is not valid")), Err)
    }

    /// Calls `visit` with the number and the value of each element of an array.
    fn elements(self, mut visit: impl FnMut(usize, Raw<'a>) -> Result<(), ApiError>) -> Result<(), ApiError> {
        let mut nth = 0;
        self.walk(&mut |_, value| {
            visit(nth, value)?;
            nth += 1;
            Ok(())
        })
    }

    /// How many elements an array has, and the first.
    fn count(self) -> Result<(usize, Option<Raw<'a>>), ApiError> {
        let (mut count, mut first) = (0, None);
        self.elements(|_, value| {
            count += 1;
            first.get_or_insert(value);
            Ok(())
        })?;
        Ok((count, first))
    }
}

/// See [`Raw::walk`]. An error of `visit` ends it, and is put into `refused`.
struct Walk<'f, 'a> {
    visit: &'f mut dyn FnMut(Raw<'a>, Raw<'a>) -> Result<(), ApiError>,
    refused: &'f mut Option<ApiError>,
}

impl<'a> Walk<'_, 'a> {
    fn part<E: Error>(&mut self, name: &'a str, value: &'a RawValue) -> Result<(), E> {
        (self.visit)(Raw(name), Raw(value.get())).map_err(|error| {
            *self.refused = Some(error);
            E::custom("refused")
        })
    }
}

impl<'a> Visitor<'a> for Walk<'_, 'a> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or an array")
    }

    fn visit_map<A: MapAccess<'a>>(mut self, mut members: A) -> Result<(), A::Error> {
        while let Some((name, value)) = members.next_entry::<&RawValue, &RawValue>()? {
            self.part(name.get(), value)?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'a>>(mut self, mut elements: A) -> Result<(), A::Error> {
        while let Some(value) = elements.next_element::<&RawValue>()? {
            self.part("", value)?;
        }
        Ok(())
    }
}

/// How deep a text of JSON is nested. Parsers that skip values do not count that.
fn depth(text: &str) -> usize {
    let (mut depth, mut most) = (0_usize, 0);
    let (mut in_string, mut is_escaped) = (false, false);
    for byte in text.bytes() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_string,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'[' | b'{' => {
                depth += 1;
                most = most.max(depth);
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    most
}

/// What is between the quotes of a string, without escapes; `None` if one is half of a pair. Parsers keep a copy of
/// their own, which grows by doubling; this takes no more than the string.
fn unescaped(inner: &str) -> Option<String> {
    let unit = |digits: &str| u16::from_str_radix(digits.get(..4)?, 16).ok();
    let (mut text, mut rest) = (String::with_capacity(inner.len()), inner);
    while let Some((plain, escape)) = rest.split_once('\\') {
        text.push_str(plain);
        rest = escape.get(1..)?;
        text.push(match escape.as_bytes()[0] {
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let second = rest.get(4..).and_then(|more| unit(more.strip_prefix("\\u")?));
                let units = [Some(unit(rest)?), second].into_iter().flatten();
                let c = char::decode_utf16(units).next()?.ok()?;
                rest = rest.get(if c.len_utf16() == 2 { 10 } else { 4 }..)?;
                c
            }
            itself => char::from(itself),
        });
    }
    text.push_str(rest);
    Some(text)
}

/// The members of an object. Of those with the same name the last one counts.
struct Fields<'a> {
    known: BTreeMap<&'static str, Raw<'a>>,
    /// The first with names that nobody knows, cut short.
    unknown: Vec<String>,
}

impl<'a> Fields<'a> {
    fn of(object: Raw<'a>) -> Result<Self, ApiError> {
        let mut fields = Self { known: BTreeMap::new(), unknown: Vec::new() };
        object.walk(&mut |name, value| {
            let name = name.text()?;
            let mut all = LOOKED_UP.iter().chain(&UNSUPPORTED).chain(&WITHOUT_EFFECT);
            match all.find(|known| **known == name) {
                Some(known) => drop(fields.known.insert(known, value)),
                None if fields.unknown.len() < UNKNOWN_MOST => fields.unknown.push(shortened(&name)),
                None => {}
            }
            Ok(())
        })?;
        Ok(fields)
    }

    /// Those of a whole body.
    fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        let raw = Raw::parse(body)?;
        if !raw.is_object() {
            return Err(ApiError::invalid(format!("The body has to be a JSON object, but it is {}.", raw.kind())));
        }
        Self::of(raw)
    }

    /// The field, unless it is absent or null.
    fn take(&mut self, name: &str) -> Option<Raw<'a>> {
        self.known.remove(name).filter(|value| !value.is_null())
    }

    /// The field, unless it is absent or null.
    fn need(&mut self, name: &str, within: &str) -> Result<Raw<'a>, ApiError> {
        self.take(name).ok_or_else(|| missing(&format!("{within}{name}")))
    }

    fn bool(&mut self, name: &str, within: &str) -> Result<Option<bool>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let wrong = || wrong_type(&format!("{within}{name}"), "a boolean", value);
        value.scalar().as_bool().map(Some).ok_or_else(wrong)
    }

    fn number(&mut self, name: &str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = value.scalar().as_f64().ok_or_else(|| wrong_type(name, "a decimal", value))?;
        if (least..=most).contains(&number) {
            return Ok(Some(number));
        }
        Err(wrong_value(name, format!("it has to be between {least} and {most}")))
    }

    fn integer(&mut self, name: &str, least: u64, most: u64) -> Result<Option<u64>, ApiError> {
        let Some(raw) = self.take(name) else { return Ok(None) };
        let value = raw.scalar();
        if value.as_i64().is_none() && value.as_u64().is_none() {
            return Err(wrong_type(name, "an integer", raw));
        }
        let number = value.as_u64().filter(|number| (least..=most).contains(number));
        number.map(Some).ok_or_else(|| wrong_value(name, format!("it has to be between {least} and {most}")))
    }

    fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(text) if text.is_string() => text.owned().map(Some),
            Some(other) => Err(wrong_type(name, "a string", other)),
        }
    }

    fn stop(&mut self) -> Result<Vec<String>, ApiError> {
        let Some(value) = self.take("stop") else { return Ok(Vec::new()) };
        let mut stops = Vec::new();
        let mut add = |stop: Cow<'_, str>| {
            if stop.is_empty() || stop.len() > STOP_BYTES_MOST {
                return Err(wrong_value("stop", format!("a sequence has 1 to {STOP_BYTES_MOST} bytes")));
            }
            if stops.len() == STOPS_MOST {
                return Err(wrong_value("stop", format!("at most {STOPS_MOST} sequences are allowed")));
            }
            stops.push(stop.into_owned());
            Ok(())
        };
        if value.is_string() {
            add(value.text()?)?;
        } else if value.is_array() {
            value.elements(|nth, stop| match stop.is_string() {
                true => add(stop.text()?),
                false => Err(wrong_type(&format!("stop[{nth}]"), "a string", stop)),
            })?;
        } else {
            return Err(wrong_type("stop", "a string or an array of strings", value));
        }
        Ok(stops)
    }

    /// Whether a stream is asked for, and whether its last piece tells what was used.
    fn stream(&mut self, unknown: &mut Vec<String>) -> Result<(bool, bool), ApiError> {
        let stream = self.bool("stream", "")?.unwrap_or(false);
        let Some(options) = self.take("stream_options") else { return Ok((stream, false)) };
        if !options.is_object() {
            return Err(wrong_type("stream_options", "an object", options));
        }
        if !stream {
            let message = "The 'stream_options' parameter is only allowed when 'stream' is enabled.";
            return Err(ApiError::invalid(message).param("stream_options"));
        }
        let (mut options, within) = (Fields::of(options)?, "stream_options.");
        options.bool("include_obfuscation", within)?;
        let usage = options.bool("include_usage", within)?.unwrap_or(false);
        options.finish(within, unknown)?;
        Ok((stream, usage))
    }

    /// How many of the likeliest tokens are drawn from: -1 is all, as 0 is.
    fn top_k(&mut self) -> Result<Option<usize>, ApiError> {
        if self.known.get("top_k").is_some_and(|value| value.scalar().as_i64() == Some(-1)) {
            self.take("top_k");
            return Ok(Some(0));
        }
        Ok(self.integer("top_k", 0, 1 << 31)?.map(|most| most as usize))
    }

    fn bias(&mut self) -> Result<Vec<(u32, f32)>, ApiError> {
        const NAME: &str = "logit_bias";
        let Some(value) = self.take(NAME) else { return Ok(Vec::new()) };
        if !value.is_object() {
            return Err(wrong_type(NAME, "an object", value));
        }
        let mut bias: Vec<(u32, f32)> = Vec::new();
        value.walk(&mut |name, value| {
            let name = name.text()?;
            let wrong = |why: &str| wrong_value(&format!("{NAME}.{}", shortened(&name)), why);
            let token = name.parse().map_err(|_| wrong("a name is a token id"))?;
            let more = value.scalar().as_f64().filter(|more| (-100.0..=100.0).contains(more));
            let more = more.ok_or_else(|| wrong("it has to be a number between -100 and 100"))?;
            // The last of two members with the same name counts.
            bias.retain(|(known, _)| *known != token);
            if bias.len() == BIASES_MOST {
                return Err(wrong_value(NAME, format!("at most {BIASES_MOST} tokens are allowed")));
            }
            bias.push((token, more as f32));
            Ok(())
        })?;
        Ok(bias)
    }

    fn sampling(&mut self) -> Result<Sampling, ApiError> {
        let seed = match self.take("seed") {
            None => None,
            Some(raw) => {
                let value = raw.scalar();
                let signed = value.as_i64().map(|seed| seed as u64);
                Some(signed.or(value.as_u64()).ok_or_else(|| wrong_type("seed", "an integer", raw))?)
            }
        };
        let mut number = |name, least, most| Ok(self.number(name, least, most)?.map(|number| number as f32));
        Ok(Sampling {
            temperature: number("temperature", 0.0, 2.0)?,
            top_p: number("top_p", 0.0, 1.0)?,
            min_p: number("min_p", 0.0, 1.0)?,
            repetition: number("repetition_penalty", 0.01, 100.0)?,
            presence: number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0),
            frequency: number("frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0),
            top_k: self.top_k()?,
            bias: self.bias()?,
            seed,
        })
    }

    /// What a chat template gets besides the messages.
    fn template(&mut self) -> Result<Map<String, Value>, ApiError> {
        const NAME: &str = "chat_template_kwargs";
        let mut variables = match self.take(NAME) {
            None => Map::new(),
            Some(object) if !object.is_object() => return Err(wrong_type(NAME, "an object", object)),
            Some(object) if object.0.len() > TEMPLATE_BYTES_MOST => {
                return Err(wrong_value(NAME, format!("it has at most {TEMPLATE_BYTES_MOST} bytes")));
            }
            Some(object) => serde_json::from_str(object.0).map_err(|_| unparsed("it is not valid"))?,
        };
        if let Some(effort) = self.string("reasoning_effort")? {
            if effort.len() > TEMPLATE_BYTES_MOST {
                return Err(wrong_value("reasoning_effort", format!("it has at most {TEMPLATE_BYTES_MOST} bytes")));
            }
            variables.insert("reasoning_effort".to_owned(), effort.into());
        }
        Ok(variables)
    }

    /// What the answer to a chat has to be.
    fn format(&mut self, unknown: &mut Vec<String>) -> Result<Option<Format>, ApiError> {
        const NAME: &str = "response_format";
        let Some(value) = self.take(NAME) else { return Ok(None) };
        if !value.is_object() {
            return Err(wrong_type(NAME, "an object", value));
        }
        let (mut fields, within) = (Fields::of(value)?, "response_format.");
        let kind = fields.need("type", within)?;
        let wrong = || {
            let why = "supported are 'text', 'json_object' and 'json_schema'";
            wrong_value("response_format.type", why)
        };
        if !kind.is_string() {
            return Err(wrong());
        }
        let format = match &*kind.text()? {
            "text" => None,
            "json_object" => Some(Format::Object),
            "json_schema" => Some(schema(fields.need("json_schema", within)?, unknown)?),
            _ => return Err(wrong()),
        };
        fields.finish(within, unknown)?;
        Ok(format)
    }

    /// The tools that the answer to a chat may call.
    fn tools(&mut self, unknown: &mut Vec<String>) -> Result<Option<Tools>, ApiError> {
        const NAME: &str = "tools";
        const CHOICE: &str = "tool_choice";
        let mut names = Vec::new();
        let mut definitions = Raw("[]");
        if let Some(value) = self.take(NAME) {
            if !value.is_array() {
                return Err(wrong_type(NAME, "an array of objects", value));
            }
            if value.0.len() > TOOLS_BYTES_MOST {
                return Err(wrong_value(
                    NAME,
                    format!("all definitions together have at most {TOOLS_BYTES_MOST} bytes"),
                ));
            }
            value.elements(|nth, tool| {
                if nth == TOOLS_MOST {
                    return Err(wrong_value(NAME, format!("at most {TOOLS_MOST} tools are allowed")));
                }
                let name = tool_name(nth, tool, unknown)?;
                if names.contains(&name) {
                    return Err(wrong_value(&format!("{NAME}[{nth}].function.name"), "another tool has this name"));
                }
                names.push(name);
                Ok(())
            })?;
            definitions = value;
        }
        let Some(choice) = self.take(CHOICE) else { return Ok(tools_of(definitions, names, ToolChoice::Auto)) };
        let wrong = || wrong_value(CHOICE, "supported are 'auto', 'none', 'required', and a function by its name");
        let choice = if choice.is_string() {
            match &*choice.text()? {
                "none" => return Ok(None),
                "auto" => ToolChoice::Auto,
                "required" => ToolChoice::Required,
                _ => return Err(wrong()),
            }
        } else if choice.is_object() {
            let mut fields = Fields::of(choice)?;
            if !fields.need("type", "tool_choice.")?.is_text("function")? {
                return Err(wrong());
            }
            let function = fields.need("function", "tool_choice.")?;
            if !function.is_object() {
                return Err(wrong_type("tool_choice.function", "an object", function));
            }
            fields.finish("tool_choice.", unknown)?;
            let mut function = Fields::of(function)?;
            let within = "tool_choice.function.";
            let name = name("tool_choice.function.name", function.need("name", within)?)?;
            function.finish(within, unknown)?;
            if !names.contains(&name) {
                return Err(wrong_value("tool_choice.function.name", "no tool has this name"));
            }
            ToolChoice::Named(name)
        } else {
            return Err(wrong_type(CHOICE, "a string or an object", choice));
        };
        if names.is_empty() && choice != ToolChoice::Auto {
            return Err(wrong_value(CHOICE, "there are no 'tools'"));
        }
        Ok(tools_of(definitions, names, choice))
    }

    /// What both kinds of requests have.
    fn common(&mut self, logprobs: Option<usize>, mut unknown: Vec<String>) -> Result<Common, ApiError> {
        let (stream, stream_usage) = self.stream(&mut unknown)?;
        let [longest, newer] = ["max_tokens", "max_completion_tokens"].map(|name| self.integer(name, 1, 1 << 31));
        let max_tokens = newer?.or(longest?).map(|most| most as usize);
        let common = Common {
            model: self.string("model")?,
            max_tokens,
            sampling: self.sampling()?,
            choices: self.integer("n", 1, CHOICES_MOST)?.unwrap_or(1) as usize,
            stop: self.stop()?,
            stream,
            stream_usage,
            logprobs,
            ignore_end: self.bool("ignore_eos", "")?.unwrap_or(false),
            template: self.template()?,
            format: None,
            tools: None,
            unknown,
        };
        Ok(common)
    }

    /// Refuses what is left and known, and lists what is not.
    fn finish(self, within: &str, unknown: &mut Vec<String>) -> Result<(), ApiError> {
        let mut list = |name: &str| {
            if unknown.len() < UNKNOWN_MOST {
                unknown.push(format!("{within}{name}"));
            }
        };
        for (name, value) in self.known {
            let param = format!("{within}{name}");
            if within.is_empty() && WITHOUT_EFFECT.contains(&name) {
                continue;
            }
            if !within.is_empty() || !UNSUPPORTED.contains(&name) {
                list(name);
            } else if !asks_for_nothing(name, value)? {
                let message = format!("Unsupported parameter: this server does not do '{param}'.");
                return Err(ApiError::invalid(message).param(param).code("unsupported_parameter"));
            }
        }
        self.unknown.iter().for_each(|name| list(name));
        Ok(())
    }
}

/// The refusal of a field that nobody knows.
pub fn unknown(param: &str) -> ApiError {
    let message = format!("Unrecognized request argument supplied: {param}");
    ApiError::invalid(message).param(param).code("unknown_parameter")
}

/// A name of 1 to 64 letters, digits, underscores and hyphens, as OpenAI's API wants those of functions and schemas.
fn name(param: &str, value: Raw<'_>) -> Result<String, ApiError> {
    if !value.is_string() {
        return Err(wrong_type(param, "a string", value));
    }
    let name = value.text()?;
    let fits = |c: u8| c.is_ascii_alphanumeric() || c == b'_' || c == b'-';
    if name.is_empty() || name.len() > NAME_MOST || !name.bytes().all(fits) {
        let why = format!("a name has 1 to {NAME_MOST} letters, digits, underscores and hyphens");
        return Err(wrong_value(param, why));
    }
    Ok(name.into_owned())
}

/// None, if there are none.
fn tools_of(definitions: Raw<'_>, names: Vec<String>, choice: ToolChoice) -> Option<Tools> {
    let is_any = !names.is_empty();
    is_any.then(|| Tools { definitions: definitions.0.into(), names: names.into(), choice })
}

/// The name of the nth tool, whose definition is looked at.
fn tool_name(nth: usize, tool: Raw<'_>, unknown: &mut Vec<String>) -> Result<String, ApiError> {
    let at = format!("tools[{nth}]");
    if !tool.is_object() {
        return Err(wrong_type(&at, "an object", tool));
    }
    let (mut fields, within) = (Fields::of(tool)?, format!("{at}."));
    let kind = fields.need("type", &within)?;
    if !kind.is_text("function")? {
        return Err(wrong_value(&format!("{at}.type"), "the only supported type is 'function'"));
    }
    let function = fields.need("function", &within)?;
    fields.finish(&within, unknown)?;
    let at = format!("{at}.function");
    if !function.is_object() {
        return Err(wrong_type(&at, "an object", function));
    }
    let (mut fields, within) = (Fields::of(function)?, format!("{at}."));
    let name = name(&format!("{at}.name"), fields.need("name", &within)?)?;
    fields.bool("strict", &within)?;
    if let Some(other) = fields.take("description").filter(|value| !value.is_string()) {
        return Err(wrong_type(&format!("{at}.description"), "a string", other));
    }
    if let Some(other) = fields.take("parameters").filter(|value| !value.is_object()) {
        return Err(wrong_type(&format!("{at}.parameters"), "an object", other));
    }
    fields.finish(&within, unknown)?;
    Ok(name)
}

/// The calls of an assistant's message.
fn calls(at: &str, value: Raw<'_>, unknown: &mut Vec<String>) -> Result<Vec<Call>, ApiError> {
    if !value.is_array() {
        return Err(wrong_type(at, "an array of objects", value));
    }
    let (count, _) = value.count()?;
    if count > CALLS_MOST {
        return Err(wrong_value(at, format!("at most {CALLS_MOST} calls are allowed")));
    }
    let mut calls = Vec::with_capacity(count);
    value.elements(|nth, call| {
        let at = format!("{at}[{nth}]");
        if !call.is_object() {
            return Err(wrong_type(&at, "an object", call));
        }
        let (mut fields, within) = (Fields::of(call)?, format!("{at}."));
        if !fields.need("type", &within)?.is_text("function")? {
            return Err(wrong_value(&format!("{at}.type"), "the only supported type is 'function'"));
        }
        let text = |fields: &mut Fields<'_>, name: &str, within: &str| {
            let value = fields.need(name, within)?;
            match value.is_string() {
                true => value.owned(),
                false => Err(wrong_type(&format!("{within}{name}"), "a string", value)),
            }
        };
        let id = text(&mut fields, "id", &within)?;
        let function = fields.need("function", &within)?;
        fields.finish(&within, unknown)?;
        if !function.is_object() {
            return Err(wrong_type(&format!("{at}.function"), "an object", function));
        }
        let (mut fields, within) = (Fields::of(function)?, format!("{at}.function."));
        let name = text(&mut fields, "name", &within)?;
        let arguments = text(&mut fields, "arguments", &within)?;
        fields.finish(&within, unknown)?;
        // Of a function without parameters, some clients send nothing.
        let arguments = if arguments.is_empty() { "{}".to_owned() } else { arguments };
        let is_object = || {
            let value: Result<&RawValue, _> = serde_json::from_str(&arguments);
            depth(&arguments) <= DEPTH_MOST && value.is_ok_and(|value| Raw(value.get()).is_object())
        };
        if !is_object() {
            return Err(wrong_value(&format!("{within}arguments"), "it has to be a JSON object as a string"));
        }
        calls.push(Call { id, name, arguments });
        Ok(())
    })?;
    Ok(calls)
}

/// The schema in a `response_format`.
fn schema(value: Raw<'_>, unknown: &mut Vec<String>) -> Result<Format, ApiError> {
    const NAME: &str = "response_format.json_schema";
    if !value.is_object() {
        return Err(wrong_type(NAME, "an object", value));
    }
    let (mut fields, within) = (Fields::of(value)?, "response_format.json_schema.");
    name(&format!("{within}name"), fields.need("name", within)?)?;
    // What was asked for is what is answered, strict or not.
    fields.bool("strict", within)?;
    if let Some(other) = fields.take("description").filter(|value| !value.is_string()) {
        return Err(wrong_type(&format!("{within}description"), "a string", other));
    }
    let schema = fields.need("schema", within)?;
    let param = format!("{within}schema");
    if !schema.is_object() {
        return Err(wrong_type(&param, "an object", schema));
    }
    if schema.0.len() > SCHEMA_BYTES_MOST {
        return Err(wrong_value(&param, format!("a schema has at most {SCHEMA_BYTES_MOST} bytes")));
    }
    fields.finish(within, unknown)?;
    Ok(Format::Schema(schema.0.to_owned()))
}

/// A message's text: a string, or parts of type `text`.
fn content(param: &str, value: Raw<'_>) -> Result<String, ApiError> {
    if value.is_string() {
        return value.owned();
    }
    if !value.is_array() {
        return Err(wrong_type(param, "a string or an array of parts", value));
    }
    // No longer than that, and not made anew as it grows.
    let mut whole = String::with_capacity(value.0.len());
    value.elements(|nth, part| {
        let wrong = |why| wrong_value(&format!("{param}[{nth}]"), why);
        if !part.is_object() {
            return Err(wrong("only parts of type 'text' are supported"));
        }
        let mut part = Fields::of(part)?;
        match part.take("type") {
            Some(kind) if kind.is_text("text")? => {}
            _ => return Err(wrong("only parts of type 'text' are supported")),
        }
        let text = part.take("text").filter(|text| text.is_string());
        whole.push_str(&text.ok_or_else(|| wrong("a part of type 'text' has a text"))?.text()?);
        Ok(())
    })?;
    whole.shrink_to_fit();
    Ok(whole)
}

fn message(nth: usize, value: Raw<'_>, unknown: &mut Vec<String>) -> Result<Message, ApiError> {
    let at = format!("messages[{nth}]");
    if !value.is_object() {
        return Err(wrong_type(&at, "an object", value));
    }
    let (mut fields, within) = (Fields::of(value)?, format!("{at}."));
    let role = fields.need("role", &within)?;
    if !role.is_string() {
        return Err(wrong_type(&format!("{at}.role"), "a string", role));
    }
    let role = match &*role.text()? {
        // OpenAI's newer name of the same role, which templates do not know.
        "developer" | "system" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" => "tool",
        _ => {
            let why = "supported roles are 'system', 'user', 'assistant' and 'tool'";
            return Err(wrong_value(&format!("{at}.role"), why));
        }
    };
    let calls = match role {
        "assistant" => fields.take("tool_calls").map(|value| calls(&format!("{within}tool_calls"), value, unknown)),
        _ => None,
    };
    let calls = calls.transpose()?.unwrap_or_default();
    let content = match fields.take("content") {
        None if !calls.is_empty() => None,
        None => return Err(missing(&format!("{within}content"))),
        Some(value) => Some(content(&format!("{at}.content"), value)?),
    };
    let call = match role {
        "tool" => {
            let id = fields.need("tool_call_id", &within)?;
            if !id.is_string() {
                return Err(wrong_type(&format!("{within}tool_call_id"), "a string", id));
            }
            Some(id.owned()?)
        }
        _ => None,
    };
    fields.take("name");
    fields.take("refusal");
    // Thoughts of an answer that is sent back: templates leave them out of what came before.
    fields.take("reasoning_content");
    for name in ["tool_calls", "function_call", "audio", "annotations"] {
        if fields.take(name).is_some_and(|value| !value.is_array() || !value.is_empty()) {
            return Err(wrong_value(&format!("{at}.{name}"), "it is not supported"));
        }
    }
    fields.finish(&within, unknown)?;
    Ok(Message { role, content, calls, call })
}

fn messages(value: Raw<'_>, unknown: &mut Vec<String>) -> Result<Vec<Message>, ApiError> {
    if !value.is_array() {
        return Err(wrong_type("messages", "an array of objects", value));
    }
    let (count, _) = value.count()?;
    if count == 0 {
        return Err(wrong_value("messages", "it needs at least one message"));
    }
    if count > MESSAGES_MOST {
        return Err(wrong_value("messages", format!("at most {MESSAGES_MOST} messages are allowed")));
    }
    let mut messages = Vec::with_capacity(count);
    value.elements(|nth, value| {
        messages.push(message(nth, value, unknown)?);
        Ok(())
    })?;
    Ok(messages)
}

/// The request in the body of `/v1/chat/completions`.
///
/// # Errors
/// 400, with the field that is wrong.
pub fn chat(body: &[u8]) -> Result<Request, ApiError> {
    let mut fields = Fields::parse(body)?;
    let mut unknown = Vec::new();
    let messages = messages(fields.need("messages", "")?, &mut unknown)?;
    let top = fields.integer("top_logprobs", 0, CHAT_LOGPROBS_MOST)?;
    let logprobs = match (fields.bool("logprobs", "")?.unwrap_or(false), top) {
        (true, top) => Some(top.unwrap_or(0) as usize),
        (false, None | Some(0)) => None,
        (false, Some(_)) => return Err(wrong_value("top_logprobs", "'logprobs' has to be true for it")),
    };
    let mut common = fields.common(logprobs, unknown)?;
    common.format = fields.format(&mut common.unknown)?;
    common.tools = fields.tools(&mut common.unknown)?;
    let unsupported = |param: &str, why: &str| Err(ApiError::invalid(why).param(param).code("unsupported_value"));
    if common.format.is_some() && common.tools.is_some() {
        let why = "'response_format' is not supported with 'tools': leave one of them out, or give 'tool_choice' as \
                   'none'.";
        return unsupported("response_format", why);
    }
    let has_form = common.format.is_some() || common.tools.as_ref().is_some_and(|all| all.choice != ToolChoice::Auto);
    if has_form && common.ignore_end {
        let why = "'ignore_eos' is not supported with 'response_format', or where a tool has to be called: what is \
                   whole has an end.";
        return unsupported("ignore_eos", why);
    }
    fields.finish("", &mut common.unknown)?;
    Ok(Request { prompts: vec![Prompt::Chat(messages)], echo: false, common })
}

/// The ids of an array of so many, whose nth is called `param(nth)`.
fn tokens(value: Raw<'_>, count: usize, param: impl Fn(usize) -> String) -> Result<Prompt, ApiError> {
    let mut tokens = Vec::with_capacity(count);
    value.elements(|nth, token| {
        tokens.push(token.0.parse().map_err(|_| wrong_type(&param(nth), "a token id", token))?);
        Ok(())
    })?;
    Ok(Prompt::Tokens(tokens))
}

fn wrong_count() -> ApiError {
    wrong_value("prompt", format!("a request has 1 to {CHOICES_MOST} prompts times choices"))
}

/// The prompts of a completion: a text, an array of texts, of token ids, or of arrays of token ids.
fn prompts(value: Raw<'_>) -> Result<Vec<Prompt>, ApiError> {
    if value.is_string() {
        return Ok(vec![Prompt::Text(value.owned()?)]);
    }
    if !value.is_array() {
        return Err(wrong_type("prompt", "a string or an array", value));
    }
    let (count, first) = value.count()?;
    if first.is_some_and(Raw::is_number) {
        return Ok(vec![tokens(value, count, |nth| format!("prompt[{nth}]"))?]);
    }
    if count > CHOICES_MOST as usize {
        return Err(wrong_count());
    }
    let mut prompts = Vec::with_capacity(count);
    value.elements(|nth, value| {
        let param = format!("prompt[{nth}]");
        prompts.push(if value.is_string() {
            Prompt::Text(value.owned()?)
        } else if value.is_array() {
            tokens(value, value.count()?.0, |_| param.clone())?
        } else {
            return Err(wrong_type(&param, "a string or an array of token ids", value));
        });
        Ok(())
    })?;
    Ok(prompts)
}

/// The request in the body of `/v1/completions`.
///
/// # Errors
/// 400, with the field that is wrong.
pub fn completion(body: &[u8]) -> Result<Request, ApiError> {
    let mut fields = Fields::parse(body)?;
    let prompts = prompts(fields.need("prompt", "")?)?;
    let logprobs = fields.integer("logprobs", 0, LOGPROBS_MOST)?.map(|top| top as usize);
    let mut common = fields.common(logprobs, Vec::new())?;
    // OpenAI's default for completions.
    common.max_tokens = common.max_tokens.or(Some(16));
    let echo = fields.bool("echo", "")?.unwrap_or(false);
    let best_of = fields.integer("best_of", 1, CHOICES_MOST)?;
    if best_of.is_some_and(|best| best as usize != common.choices) {
        return Err(wrong_value("best_of", "it has to be the same as 'n'"));
    }
    if echo && logprobs.is_some() {
        let message = "'logprobs' is not supported with 'echo': logprobs of the prompt are not computed.";
        return Err(ApiError::invalid(message).param("logprobs").code("unsupported_value"));
    }
    fields.finish("", &mut common.unknown)?;
    if prompts.is_empty() || prompts.len() * common.choices > CHOICES_MOST as usize {
        return Err(wrong_count());
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
            (chat, messages, "messages", json!([{ "role": "any" }]), "messages[0].role", "invalid_value"),
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
            (completion, prompt, "prompt", json!([1, -1]), "prompt[1]", "invalid_type"),
            (completion, prompt, "prompt", json!(["a", 1]), "prompt[1]", "invalid_type"),
            (completion, prompt, "stop", json!(["a", 1]), "stop[1]", "invalid_type"),
        ];
        for (parse, valid, name, value, param, code) in cases {
            let (message, named, coded) = refused(parse, valid, name, value);
            assert_eq!((named.as_deref(), coded), (Some(param), Some(code)), "{message}");
            assert!(message.contains(&format!("'{param}'")), "{message}");
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
            ("functions", json!([]), json!([1])),
            ("function_call", json!("auto"), json!({ "name": "f" })),
            ("modalities", json!(["text"]), json!(["audio"])),
            ("suffix", json!(""), json!("end")),
        ];
        for (parse, valid) in BOTH {
            let plain = parse(valid.as_bytes()).unwrap();
            for (name, nothing, something) in fields.clone() {
                assert_eq!(parse(&with(valid, name, nothing)).as_ref(), Ok(&plain), "{name}");
                let (message, param, code) = refused(parse, valid, name, something);
                assert_eq!(message, format!("Unsupported parameter: this server does not do '{name}'."));
                assert_eq!((param.as_deref(), code), (Some(name), Some("unsupported_parameter")));
            }
            for name in WITHOUT_EFFECT {
                assert_eq!(parse(&with(valid, name, json!({ "any": ["thing"] }))).as_ref(), Ok(&plain), "{name}");
            }
            // A name of any length is repeated in part.
            for name in ["wings", &"\u{1b}\u{1f600}".repeat(1000)] {
                let unknown = parse(&with(valid, name, json!(2))).unwrap().common.unknown;
                let [listed] = &*unknown else { panic!("{unknown:?}") };
                assert!(listed == name || (listed.len() < 300 && !listed.contains(char::is_control)), "{listed:?}");
                let error = super::unknown(listed);
                assert_eq!((error.status, error.code), (400, Some("unknown_parameter")));
                assert_eq!(error.param.as_ref(), Some(listed));
            }
        }
    }

    #[test]
    fn forms_of_answers_are_read_and_what_is_wrong_is_named() {
        let [(chat, messages), (completion, prompt)] = BOTH;
        let object = json!({ "type": "json_object" });
        let schema = |schema: Value| json!({ "type": "json_schema", "json_schema": { "name": "a", "schema": schema } });
        let read = |value: &Value| chat(&with(messages, "response_format", value.clone())).unwrap().common;
        assert_eq!(read(&json!({ "type": "text" })).format, None);
        assert_eq!(read(&object).format, Some(Format::Object));
        let common = read(&schema(json!({ "type": "object" })));
        assert_eq!((common.format, common.unknown.len()), (Some(Format::Schema(r#"{"type":"object"}"#.into())), 0));
        let mut more = schema(json!({}));
        more["json_schema"]["strict"] = json!(true);
        more["json_schema"]["description"] = json!("b");
        more["json_schema"]["wings"] = json!(2);
        assert_eq!(read(&more).unknown, ["response_format.json_schema.wings"]);
        let long = json!({ "a": "b".repeat(SCHEMA_BYTES_MOST) });
        for (value, param) in [
            (json!("json"), ""),
            (json!({}), ".type"),
            (json!({ "type": 1 }), ".type"),
            (json!({ "type": "xml" }), ".type"),
            (json!({ "type": "json_schema" }), ".json_schema"),
            (json!({ "type": "json_schema", "json_schema": [] }), ".json_schema"),
            (json!({ "type": "json_schema", "json_schema": { "schema": {} } }), ".json_schema.name"),
            (json!({ "type": "json_schema", "json_schema": { "name": "a b", "schema": {} } }), ".json_schema.name"),
            (json!({ "type": "json_schema", "json_schema": { "name": "a" } }), ".json_schema.schema"),
            (schema(json!(true)), ".json_schema.schema"),
            (schema(long), ".json_schema.schema"),
        ] {
            let wanted = format!("response_format{param}");
            assert_eq!(refused(chat, messages, "response_format", value).1.as_deref(), Some(&*wanted));
        }
        let refused = refused(completion, prompt, "response_format", object.clone());
        assert_eq!((refused.1.as_deref(), refused.2), (Some("response_format"), Some("unsupported_parameter")));
        let body = with(messages, "response_format", object);
        let error = chat(&with(std::str::from_utf8(&body).unwrap(), "ignore_eos", json!(true))).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("ignore_eos"));
    }

    #[test]
    fn unknown_fields_are_listed_by_where_they_are() {
        let body = json!({
            "messages": [{ "role": "user", "content": "a" }, { "role": "user", "content": "b", "wings": 2, "echo": 1 }],
            "stream": true, "stream_options": { "more": 1 }, "text": "at another place", "typical_p": 1,
        });
        let unknown = chat(body.to_string().as_bytes()).unwrap().common.unknown;
        let wanted = ["messages[1].echo", "messages[1].wings", "stream_options.more", "text", "typical_p"];
        assert_eq!(unknown, wanted);
        let many: Map<String, Value> = (0..100).map(|nth| (format!("f{nth}"), json!(1))).collect();
        let mut body = json!({ "prompt": "a" });
        body.as_object_mut().unwrap().extend(many);
        assert_eq!(completion(body.to_string().as_bytes()).unwrap().common.unknown.len(), UNKNOWN_MOST);
    }

    #[test]
    fn how_tokens_are_chosen_is_read_and_what_is_not_said_is_left_open() {
        for (parse, valid) in BOTH {
            assert_eq!(parse(valid.as_bytes()).unwrap().common.sampling, Sampling::default());
            let mut body: Map<String, Value> = serde_json::from_str(valid).unwrap();
            let fields = json!({
                "temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.25, "repetition_penalty": 1.5, "seed": 7,
                "presence_penalty": -2, "frequency_penalty": 0.5, "logit_bias": { "5": -100, "7": 1.5 },
            });
            body.extend(fields.as_object().unwrap().clone());
            let wanted = Sampling {
                temperature: Some(0.0),
                top_p: Some(0.5),
                top_k: Some(0),
                min_p: Some(0.25),
                repetition: Some(1.5),
                presence: -2.0,
                frequency: 0.5,
                bias: vec![(5, -100.0), (7, 1.5)],
                seed: Some(7),
            };
            assert_eq!(parse(Value::from(body).to_string().as_bytes()).unwrap().common.sampling, wanted);
            let many: Map<String, Value> = (0..=BIASES_MOST).map(|token| (token.to_string(), json!(1))).collect();
            for (name, value, param) in [
                ("logit_bias", json!([1]), "logit_bias"),
                ("logit_bias", json!({ "a": 1 }), "logit_bias.a"),
                ("logit_bias", json!({ "-1": 1 }), "logit_bias.-1"),
                ("logit_bias", json!({ "1": 101 }), "logit_bias.1"),
                ("logit_bias", json!({ "1": null }), "logit_bias.1"),
                ("logit_bias", many.into(), "logit_bias"),
                ("top_k", json!(-2), "top_k"),
                ("min_p", json!(1.5), "min_p"),
                ("repetition_penalty", json!(0), "repetition_penalty"),
                ("presence_penalty", json!(3), "presence_penalty"),
            ] {
                assert_eq!(refused(parse, valid, name, value).1.as_deref(), Some(param));
            }
        }
    }

    #[test]
    fn variables_of_templates_are_few_and_effort_is_one() {
        for (parse, valid) in BOTH {
            let body =
                with(valid, "chat_template_kwargs", json!({ "enable_thinking": false, "a": [1, { "b": null }] }));
            let body = with(std::str::from_utf8(&body).unwrap(), "reasoning_effort", json!("low"));
            let wanted = json!({ "enable_thinking": false, "a": [1, { "b": null }], "reasoning_effort": "low" });
            assert_eq!(Value::from(parse(&body).unwrap().common.template), wanted);
            for (name, value) in [
                ("chat_template_kwargs", json!([])),
                ("chat_template_kwargs", json!({ "a": "b".repeat(TEMPLATE_BYTES_MOST) })),
                ("reasoning_effort", json!(1)),
                ("reasoning_effort", json!("b".repeat(TEMPLATE_BYTES_MOST + 1))),
            ] {
                assert_eq!(refused(parse, valid, name, value).1.as_deref(), Some(name));
            }
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

    #[test]
    fn escapes_are_read_as_serde_json_reads_them() {
        let escapes =
            ["a", "\u{fc}", "\u{1f600}", r"\n", r#"\""#, r"\\", r"\/", r"\b\f\r\t", r"\u00fc", r"\uD83d\uDe00"];
        let halves = [r"\ud83d", r"\ude00", r"\ud83d\n", r"\ud83da", r"\ud83d\u0061", r"\ude00\ud83d"];
        let all: Vec<&str> = escapes.into_iter().chain(halves).collect();
        for text in all.iter().flat_map(|first| all.iter().map(move |second| format!("\"{first}{second}\""))) {
            let read = Raw(&text).owned().ok();
            assert_eq!(read, serde_json::from_str(&text).ok(), "{text}");
        }
        let error = completion(br#"{"prompt": "a\ud83d"}"#).unwrap_err();
        assert!(error.message.contains("half of a pair"), "{error}");
    }

    #[test]
    fn what_is_nested_too_deep_is_refused_wherever_it_is() {
        for name in ["prompt", "metadata", "wings", "stop"] {
            let body = |depth| {
                let (open, close) = ("[".repeat(depth - 2), "]".repeat(depth - 2));
                format!("{{\"prompt\":\"[{{\\\"[\",\"{name}\":[{open}{close}]}}").into_bytes()
            };
            let refused = completion(&body(DEPTH_MOST + 1)).unwrap_err();
            assert!(refused.message.contains("127 deep"), "{refused}");
            let read = completion(&body(DEPTH_MOST));
            assert_eq!(read.is_ok(), ["metadata", "wings"].contains(&name), "{read:?}");
        }
    }

    #[test]
    fn of_two_members_with_one_name_the_last_one_counts() {
        let body = br#"{"prompt": {}, "n": 0, "prompt": [1, 2], "n": 2, "too\u006cs": [1], "tools": []}"#;
        let request = completion(body).unwrap();
        assert_eq!((request.prompts, request.common.choices), (vec![Prompt::Tokens(vec![1, 2])], 2));
        let body =
            br#"{"messages": [{"role": 1, "role": "user", "content": [{"type": "x", "type": "text", "text": "a"}]}]}"#;
        let message = Message { role: "user", content: Some("a".into()), ..Message::default() };
        assert_eq!(chat(body).unwrap().prompts, [Prompt::Chat(vec![message])]);
    }

    #[test]
    fn lists_that_are_too_long_say_the_limit() {
        let messages =
            |count| json!({ "messages": vec![json!({ "role": "user", "content": "a" }); count] }).to_string();
        assert!(chat(messages(2048).as_bytes()).is_ok());
        let error = chat(messages(2049).as_bytes()).unwrap_err();
        assert!(error.message.contains("2048") && error.param.as_deref() == Some("messages"), "{error}");
        let error = completion(json!({ "prompt": vec!["a"; 129] }).to_string().as_bytes()).unwrap_err();
        assert!(error.message.contains("128") && error.param.as_deref() == Some("prompt"), "{error}");
    }

    #[test]
    fn regression_logprobs_of_a_prompt_are_refused() {
        for logprobs in [0, 2] {
            let body = json!({ "prompt": "a", "echo": true, "logprobs": logprobs }).to_string();
            let error = completion(body.as_bytes()).unwrap_err();
            assert_eq!((error.param.as_deref(), error.code), (Some("logprobs"), Some("unsupported_value")));
        }
    }
}
