//! Answers as OpenAI's API shapes them, whole and in chunks.
//!
//! Shapes: <https://platform.openai.com/docs/api-reference/chat/object>, `.../chat-streaming`, `.../completions/object`.

use std::time::{SystemTime, UNIX_EPOCH};

use outcore_llm::Tokenizer;
use serde_json::{Value, json};

use crate::engine::{LogProbs, Token};

/// Which of the two kinds of requests is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
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
    logprobs: bool,
    /// The prompts' texts, by choice, where they are part of the answer.
    echoed: Vec<String>,
    /// Bytes of each choice's text so far, for `text_offset`.
    offsets: Vec<usize>,
}

/// Text of one choice, with what is known of its tokens.
#[derive(Debug, Default)]
pub struct Choice {
    text: String,
    finish: Option<&'static str>,
    tokens: Vec<Named>,
}

/// A token, its text and its alternatives.
#[derive(Debug)]
struct Named {
    token: (String, Vec<u8>, f32),
    top: Vec<(String, Vec<u8>, f32)>,
}

impl Choice {
    /// Adds a piece.
    pub fn add(&mut self, tokenizer: &Tokenizer, text: String, token: Option<Token>, finish: Option<&'static str>) {
        self.text.push_str(&text);
        self.finish = self.finish.or(finish);
        let Some(Token { id, logprobs: Some(LogProbs { chosen, top }) }) = token else { return };
        let name = |id: u32, logprob: f32| {
            let bytes = tokenizer.bytes(id);
            // A control token has no text: then its name in the vocabulary.
            let text = match bytes {
                [] => tokenizer.token(id).unwrap_or_default().to_owned(),
                bytes => String::from_utf8_lossy(bytes).into_owned(),
            };
            // JSON has no infinity.
            (text, bytes.to_vec(), logprob.max(-9999.0))
        };
        let top = top.into_iter().map(|(id, logprob)| name(id, logprob)).collect();
        self.tokens.push(Named { token: name(id, chosen), top });
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.tokens.is_empty()
    }

    fn chat_logprobs(&self) -> Value {
        let one = |(token, bytes, logprob): &(String, Vec<u8>, f32)| json!({ "token": token, "logprob": logprob, "bytes": bytes });
        let content = self.tokens.iter().map(|named| {
            let mut value = one(&named.token);
            value["top_logprobs"] = named.top.iter().map(one).collect();
            value
        });
        json!({ "content": content.collect::<Vec<_>>(), "refusal": null })
    }

    fn completion_logprobs(&self, mut offset: usize) -> Value {
        let mut offsets = Vec::new();
        for named in &self.tokens {
            offsets.push(offset);
            offset += named.token.0.chars().count();
        }
        let top = self.tokens.iter().map(|named| {
            named.top.iter().map(|(token, _, logprob)| (token.clone(), json!(logprob))).collect::<Value>()
        });
        json!({
            "tokens": self.tokens.iter().map(|named| &named.token.0).collect::<Vec<_>>(),
            "token_logprobs": self.tokens.iter().map(|named| named.token.2).collect::<Vec<_>>(),
            "top_logprobs": top.collect::<Vec<_>>(),
            "text_offset": offsets,
        })
    }
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

impl Reply {
    /// An answer of as many choices as there are texts in `echoed`.
    pub fn new(kind: Kind, model: String, logprobs: bool, echoed: Vec<String>) -> Self {
        let prefix = match kind {
            Kind::Chat => "chatcmpl",
            Kind::Completion => "cmpl",
        };
        let id = format!("{prefix}-{:032x}", rand::random::<u128>());
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let offsets = echoed.iter().map(|text| text.chars().count()).collect();
        Self { kind, id, created, model, logprobs, echoed, offsets }
    }

    fn object(&self, kind: &str, choices: Vec<Value>) -> Value {
        json!({ "id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices })
    }

    /// The choices, in which there is what comes before the answers.
    pub fn choices(&self) -> Vec<Choice> {
        self.echoed.iter().map(|text| Choice { text: text.clone(), ..Choice::default() }).collect()
    }

    /// The whole answer.
    pub fn whole(&self, choices: Vec<Choice>, usage: &Usage) -> Value {
        let one = |(index, choice): (usize, Choice)| match self.kind {
            Kind::Chat => json!({
                "index": index,
                "message": { "role": "assistant", "content": choice.text, "refusal": null },
                "logprobs": if self.logprobs { choice.chat_logprobs() } else { Value::Null },
                "finish_reason": choice.finish,
            }),
            Kind::Completion => json!({
                "index": index,
                "text": choice.text,
                "logprobs": if self.logprobs { choice.completion_logprobs(self.offsets[index]) } else { Value::Null },
                "finish_reason": choice.finish,
            }),
        };
        let choices = choices.into_iter().enumerate().map(one).collect();
        let kind = match self.kind {
            Kind::Chat => "chat.completion",
            Kind::Completion => "text_completion",
        };
        let mut whole = self.object(kind, choices);
        whole["usage"] = usage_object(usage);
        whole
    }

    fn chunk_kind(&self) -> &'static str {
        match self.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Completion => "text_completion",
        }
    }

    /// The chunks with which a stream begins.
    pub fn opening(&self) -> Vec<Value> {
        let all = self.echoed.iter().enumerate();
        match self.kind {
            Kind::Chat => all
                .map(|(index, _)| {
                    let delta = json!({ "role": "assistant", "content": "", "refusal": null });
                    let choice = json!({ "index": index, "delta": delta, "logprobs": null, "finish_reason": null });
                    self.object(self.chunk_kind(), vec![choice])
                })
                .collect(),
            Kind::Completion => all
                .filter(|(_, text)| !text.is_empty())
                .map(|(index, text)| {
                    let choice = json!({ "index": index, "text": text, "logprobs": null, "finish_reason": null });
                    self.object(self.chunk_kind(), vec![choice])
                })
                .collect(),
        }
    }

    /// A chunk of one choice.
    pub fn chunk(&mut self, index: usize, piece: &Choice, finish: Option<&'static str>) -> Value {
        let has_tokens = self.logprobs && !piece.tokens.is_empty();
        let choice = match self.kind {
            Kind::Chat => {
                let delta = if finish.is_some() { json!({}) } else { json!({ "content": piece.text }) };
                let logprobs = if has_tokens { piece.chat_logprobs() } else { Value::Null };
                json!({ "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish })
            }
            Kind::Completion => {
                let offset = self.offsets[index];
                self.offsets[index] += piece.tokens.iter().map(|named| named.token.0.chars().count()).sum::<usize>();
                let logprobs = if has_tokens { piece.completion_logprobs(offset) } else { Value::Null };
                json!({ "index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": finish })
            }
        };
        self.object(self.chunk_kind(), vec![choice])
    }

    /// The last chunk, if it was asked for.
    pub fn usage(&self, usage: &Usage) -> Value {
        let mut chunk = self.object(self.chunk_kind(), Vec::new());
        chunk["usage"] = usage_object(usage);
        chunk
    }
}
