//! Answers as OpenAI's API shapes them, whole and in chunks.
//!
//! Shapes: <https://platform.openai.com/docs/api-reference/chat/object>, `.../chat-streaming`, `.../completions/object`.
//! A whole answer is written in pieces of a bounded size: with logprobs, its JSON is many times as large as its tokens.

use std::fmt::Write;
use std::iter::{from_fn, once};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use outcore_llm::{Tokenizer, Unfinished};
use serde_json::{Map, Value, json};

use crate::call::Call;
use crate::engine::{LogProbs, Token};

/// Texts are written in pieces of so many bytes at most.
const PIECE_BYTES: usize = 4 << 10;
/// JSON has no infinity.
const LOGPROB_LEAST: f32 = -9999.0;

/// JSON that comes in pieces.
type Pieces = Box<dyn Iterator<Item = String> + Send>;

/// Which of the two kinds of requests is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
}

impl Kind {
    /// The field that has what an answer continues.
    pub fn prompt(self) -> &'static str {
        match self {
            Self::Chat => "messages",
            Self::Completion => "prompt",
        }
    }
}

/// Tokens that a request used.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Of its prompts.
    pub prompt: usize,
    /// Of these, those whose keys and values were there.
    pub cached: usize,
    /// Of its answers.
    pub completion: usize,
}

/// What is the same in all parts of an answer.
#[derive(Debug)]
pub struct Reply {
    kind: Kind,
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
    logprobs: bool,
    /// Whether the last chunk of a stream tells what was used.
    stream_usage: bool,
    /// The prompts' texts, by choice, where they are part of the answer.
    echoed: Vec<Arc<str>>,
    /// Where each choice's next token begins.
    offsets: Vec<Offset>,
    /// How many calls of tools each choice's chunks had.
    calls: Vec<usize>,
}

/// Text of one choice, with what is known of its tokens.
#[derive(Debug, Default)]
pub struct Choice {
    text: String,
    /// What the model thought before, if it tells that apart.
    thoughts: String,
    finish: Option<&'static str>,
    tokens: Vec<(u32, LogProbs)>,
    calls: Vec<Value>,
}

/// A call of a tool, as OpenAI's API shapes it.
fn call_object(call: Call) -> Value {
    let Call { name, arguments } = call;
    let id = format!("call_{:032x}", rand::random::<u128>());
    json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
}

impl Choice {
    /// Bytes of memory that a token with so many alternatives takes, at most: a list that grows by doubling exists
    /// twice for a while, and each token's alternatives and text are allocations.
    pub fn token_bytes(top: usize) -> usize {
        3 * size_of::<(u32, LogProbs)>() + top * size_of::<(u32, f32)>() + 48
    }

    /// Adds a piece.
    pub fn add(&mut self, text: &str, token: Option<Token>, finish: Option<&'static str>) {
        self.text.push_str(text);
        self.finish = self.finish.or(finish);
        if let Some(Token { id, logprobs: Some(logprobs) }) = token {
            self.tokens.push((id, logprobs));
        }
    }
}

impl Choice {
    /// Adds to what the model thought.
    pub fn add_thoughts(&mut self, text: &str) {
        self.thoughts.push_str(text);
    }

    /// Adds a call of a tool.
    pub fn add_call(&mut self, call: Call) {
        self.calls.push(call_object(call));
    }
}

/// Characters of a choice's text before its next token.
#[derive(Clone, Debug, Default)]
struct Offset {
    chars: usize,
    unfinished: Unfinished,
}

impl Offset {
    /// Goes behind a token, and returns where that begins.
    fn pass(&mut self, tokenizer: &Tokenizer, id: u32) -> usize {
        let begin = self.chars;
        self.chars += tokenizer.push(&mut self.unfinished, id).chars().count();
        begin
    }
}

/// A token's text; for a control token, which has none, its name in the vocabulary. Bytes that are no text are written
/// as `bytes` says.
fn name(tokenizer: &Tokenizer, id: u32, bytes: impl FnOnce(&[u8]) -> String) -> String {
    match tokenizer.bytes(id) {
        [] => tokenizer.token(id).unwrap_or_default().to_owned(),
        text => std::str::from_utf8(text).map_or_else(|_| bytes(text), str::to_owned),
    }
}

/// As completions name tokens: by its bytes, one that is no text, so that it differs from others.
fn completion_name(tokenizer: &Tokenizer, id: u32) -> String {
    let bytes = |bytes: &[u8]| bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect::<String>();
    name(tokenizer, id, |text| format!("bytes:{}", bytes(text)))
}

/// A token with its alternatives, as chat completions have them.
fn chat_token(tokenizer: &Tokenizer, (id, logprobs): &(u32, LogProbs)) -> Value {
    let one = |id: u32, logprob: f32| {
        let token = name(tokenizer, id, |bytes| String::from_utf8_lossy(bytes).into_owned());
        json!({ "token": token, "logprob": logprob.max(LOGPROB_LEAST), "bytes": tokenizer.bytes(id) })
    };
    let mut value = one(*id, logprobs.chosen);
    value["top_logprobs"] = logprobs.top.iter().map(|(id, logprob)| one(*id, *logprob)).collect();
    value
}

/// The alternatives of a token and itself, as completions have them.
fn completion_top(tokenizer: &Tokenizer, (id, logprobs): &(u32, LogProbs)) -> Value {
    // Itself last: where two tokens have one name, the one that was chosen counts.
    let all = logprobs.top.iter().copied().chain(once((*id, logprobs.chosen)));
    let named = |(id, logprob): (u32, f32)| (completion_name(tokenizer, id), json!(logprob.max(LOGPROB_LEAST)));
    all.map(named).collect::<Map<_, _>>().into()
}

fn usage_object(usage: &Usage) -> Value {
    let Usage { prompt, cached, completion } = *usage;
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": { "cached_tokens": cached },
    })
}

/// A text in pieces.
fn pieces(text: impl AsRef<str>) -> impl Iterator<Item = String> {
    let mut begin = 0;
    from_fn(move || {
        let rest = &text.as_ref()[begin..];
        let mut end = rest.len().min(PIECE_BYTES);
        while !rest.is_char_boundary(end) {
            end -= 1;
        }
        begin += end;
        (end > 0).then(|| rest[..end].to_owned())
    })
}

/// Two texts as one JSON string.
fn string(first: Arc<str>, second: String) -> impl Iterator<Item = String> {
    let escaped = |piece| {
        let quoted = Value::String(piece).to_string();
        quoted[1..quoted.len() - 1].to_owned()
    };
    let quote = || once("\"".to_owned());
    quote().chain(pieces(first).chain(pieces(second)).map(escaped)).chain(quote())
}

/// A JSON array of what `value` says of each token.
fn array(
    tokens: &Arc<Vec<(u32, LogProbs)>>,
    mut value: impl FnMut(&(u32, LogProbs)) -> Value + Send + 'static,
) -> impl Iterator<Item = String> + Send + 'static {
    let (count, tokens) = (tokens.len(), tokens.clone());
    let element = move |nth: usize| format!("{}{}", if nth == 0 { "" } else { "," }, value(&tokens[nth]));
    once("[".to_owned()).chain((0..count).map(element)).chain(once("]".to_owned()))
}

/// Pieces, with these texts around them.
fn between(before: String, pieces: impl Iterator<Item = String>, after: String) -> impl Iterator<Item = String> {
    once(before).chain(pieces).chain(once(after))
}

/// The members of an object that has some, and the bracket behind them.
fn members(object: &Value) -> String {
    object.to_string().split_off(1)
}

fn chat_logprobs(tokenizer: Arc<Tokenizer>, tokens: Vec<(u32, LogProbs)>) -> Pieces {
    let content = array(&Arc::new(tokens), move |token| chat_token(&tokenizer, token));
    Box::new(between(r#"{"content":"#.into(), content, r#","refusal":null}"#.into()))
}

fn completion_logprobs(tokenizer: Arc<Tokenizer>, tokens: Vec<(u32, LogProbs)>) -> Pieces {
    let tokens = Arc::new(tokens);
    let [naming, topping] = [tokenizer.clone(), tokenizer.clone()];
    let mut offset = Offset::default();
    let all: [(&str, Pieces); 4] = [
        (r#"{"tokens":"#, Box::new(array(&tokens, move |(id, _)| completion_name(&naming, *id).into()))),
        (r#","token_logprobs":"#, Box::new(array(&tokens, |(_, all)| json!(all.chosen.max(LOGPROB_LEAST))))),
        (r#","top_logprobs":"#, Box::new(array(&tokens, move |token| completion_top(&topping, token)))),
        (r#","text_offset":"#, Box::new(array(&tokens, move |(id, _)| offset.pass(&tokenizer, *id).into()))),
    ];
    let parts = all.into_iter().flat_map(|(name, values)| once(name.to_owned()).chain(values));
    Box::new(parts.chain(once("}".to_owned())))
}

impl Reply {
    /// An answer of as many choices as there are texts in `echoed`.
    pub fn new(
        kind: Kind,
        model: String,
        tokenizer: Arc<Tokenizer>,
        [logprobs, stream_usage]: [bool; 2],
        echoed: Vec<Arc<str>>,
    ) -> Self {
        let prefix = match kind {
            Kind::Chat => "chatcmpl",
            Kind::Completion => "cmpl",
        };
        let id = format!("{prefix}-{:032x}", rand::random::<u128>());
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let offsets = vec![Offset::default(); echoed.len()];
        let calls = vec![0; echoed.len()];
        Self { kind, model, tokenizer, logprobs, stream_usage, echoed, id, created, offsets, calls }
    }

    fn object(&self, kind: &str) -> Value {
        json!({ "id": self.id, "object": kind, "created": self.created, "model": self.model })
    }

    /// The JSON of a whole answer, in pieces.
    pub fn whole(&self, choices: Vec<Choice>, usage: &Usage) -> impl Iterator<Item = String> + Send + use<> {
        let (kind, logprobs, tokenizer) = (self.kind, self.logprobs, self.tokenizer.clone());
        let one = move |(index, (choice, echoed)): (usize, (Choice, Arc<str>))| {
            let rest = members(&json!({ "index": index, "finish_reason": choice.finish }));
            let is_silent = choice.text.is_empty() && !choice.calls.is_empty();
            let (text, tokens) = (string(echoed, choice.text), choice.tokens);
            let before = if index == 0 { "{" } else { ",{" };
            let text: Pieces = match kind {
                Kind::Chat => {
                    let mut message = format!(r#"{before}"message":{{"role":"assistant","refusal":null,"#);
                    if !choice.thoughts.is_empty() {
                        let _ = write!(message, r#""reasoning_content":{},"#, Value::String(choice.thoughts));
                    }
                    message.push_str(r#""content":"#);
                    let text: Pieces = if is_silent { Box::new(once("null".to_owned())) } else { Box::new(text) };
                    let end = match choice.calls.is_empty() {
                        true => "}".to_owned(),
                        false => format!(r#","tool_calls":{}}}"#, Value::from(choice.calls)),
                    };
                    Box::new(between(message, text, end))
                }
                Kind::Completion => Box::new(between(format!(r#"{before}"text":"#), text, String::new())),
            };
            let logprobs: Pieces = match kind {
                _ if !logprobs => Box::new(once("null".to_owned())),
                Kind::Chat => chat_logprobs(tokenizer.clone(), tokens),
                Kind::Completion => completion_logprobs(tokenizer.clone(), tokens),
            };
            text.chain(between(r#","logprobs":"#.into(), logprobs, format!(",{rest}")))
        };
        let mut object = self.object(match kind {
            Kind::Chat => "chat.completion",
            Kind::Completion => "text_completion",
        });
        object["usage"] = usage_object(usage);
        let choices = choices.into_iter().zip(self.echoed.clone()).enumerate().flat_map(one);
        between(r#"{"choices":["#.into(), choices, format!("],{}", members(&object)))
    }

    /// A chunk, but for its choices.
    fn chunk_object(&self) -> Value {
        let mut chunk = self.object(match self.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Completion => "text_completion",
        });
        if self.stream_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    /// The chunks with which a stream begins.
    pub fn opening(&self) -> impl Iterator<Item = Value> + Send + use<> {
        let (kind, object) = (self.kind, self.chunk_object());
        let pieces = move |(index, text): (usize, Arc<str>)| -> Box<dyn Iterator<Item = Value> + Send> {
            let choice = move |name: &str, value: Value| {
                let mut choice = json!({ "index": index, "logprobs": null, "finish_reason": null });
                choice[name] = value;
                choice
            };
            match kind {
                Kind::Chat => {
                    let delta = json!({ "role": "assistant", "content": "", "refusal": null });
                    Box::new(once(choice("delta", delta)))
                }
                Kind::Completion => Box::new(pieces(text).map(move |piece| choice("text", piece.into()))),
            }
        };
        self.echoed.clone().into_iter().enumerate().flat_map(pieces).map(move |choice| {
            let mut chunk = object.clone();
            chunk["choices"] = json!([choice]);
            chunk
        })
    }

    /// A chunk of one choice.
    pub fn chunk(&mut self, index: usize, piece: &Choice, finish: Option<&'static str>) -> Value {
        let tokens = &piece.tokens;
        let has_tokens = self.logprobs && !tokens.is_empty();
        let tokenizer = &self.tokenizer;
        let choice = match self.kind {
            Kind::Chat => {
                let delta = match finish {
                    Some(_) => json!({}),
                    None if !piece.thoughts.is_empty() && piece.text.is_empty() => {
                        json!({ "reasoning_content": piece.thoughts })
                    }
                    None if !piece.thoughts.is_empty() => {
                        json!({ "reasoning_content": piece.thoughts, "content": piece.text })
                    }
                    None => json!({ "content": piece.text }),
                };
                let content = || tokens.iter().map(|token| chat_token(tokenizer, token)).collect::<Value>();
                let logprobs = has_tokens.then(|| json!({ "content": content(), "refusal": null }));
                json!({ "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish })
            }
            Kind::Completion => {
                let offset = &mut self.offsets[index];
                let logprobs = has_tokens.then(|| {
                    let all = tokens.iter();
                    json!({
                        "tokens": all.clone().map(|(id, _)| completion_name(tokenizer, *id)).collect::<Value>(),
                        "token_logprobs": all.clone().map(|(_, all)| all.chosen.max(LOGPROB_LEAST)).collect::<Value>(),
                        "top_logprobs": all.clone().map(|token| completion_top(tokenizer, token)).collect::<Value>(),
                        "text_offset": all.map(|(id, _)| offset.pass(tokenizer, *id)).collect::<Value>(),
                    })
                });
                json!({ "index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": finish })
            }
        };
        let mut chunk = self.chunk_object();
        chunk["choices"] = json!([choice]);
        chunk
    }

    /// A chunk with a call of one choice.
    pub fn call_chunk(&mut self, index: usize, call: Call) -> Value {
        let mut object = call_object(call);
        object["index"] = self.calls[index].into();
        self.calls[index] += 1;
        let delta = json!({ "tool_calls": [object] });
        let mut chunk = self.chunk_object();
        chunk["choices"] = json!([{ "index": index, "delta": delta, "logprobs": null, "finish_reason": null }]);
        chunk
    }

    /// The last chunk, if it was asked for.
    pub fn usage(&self, usage: &Usage) -> Value {
        let mut chunk = self.chunk_object();
        chunk["choices"] = json!([]);
        chunk["usage"] = usage_object(usage);
        chunk
    }
}
