//! From a request to its answer: tokens, text, pieces.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use outcore_llm::{Call as LlmCall, Turn, Unfinished};
use serde_json::{Map, Value};
use tokio::sync::mpsc::{Receiver, channel};
use tokio::time::{Interval, interval_at};

use super::reply::{Choice, Kind, Reply, Usage};
use super::room::Hold;
use super::{App, blocking, check_model};
use crate::call::Call;
use crate::calls::{self, Finder, Form};
use crate::channels::{self, Channels, Spoken};
use crate::engine::{BACKLOG, End, Event, Job, Sink, Token};
use crate::error::ApiError;
use crate::grammar::{Grammar, Source};
use crate::open::Opened;
use crate::request::{Common, Format, Message, Prompt, Request, ToolChoice, Tools};
use crate::tenants::{Leave, Tenant};
use crate::text::Stops;

/// Bytes of an event that waits to be taken, and of each alternative in it.
const EVENT_BYTES: usize = size_of::<(usize, Event)>();
const TOP_BYTES: usize = size_of::<(u32, f32)>();
/// How often a stream says that it lives, while there is nothing else to say.
const ALIVE_EVERY: Duration = Duration::from_secs(10);
/// Answers are sent in chunks of so many bytes, and a little more.
const CHUNK_BYTES: usize = 16 << 10;
/// What a chat template writes for a turn, besides what was said, in bytes.
const TURN_BYTES: usize = 64;
/// What a value of JSON takes besides its text, while a template is rendered, in bytes.
const VALUE_BYTES: usize = 128;
/// Bytes of the text of a token that may be held back as a part of a call.
const HELD_BYTES: usize = 8;
/// What a choice takes besides tokens and texts, in bytes.
const CHOICE_BYTES: usize = 1 << 10;

/// Answers a request, for which `hold` has room.
pub async fn answer(
    app: Arc<App>,
    tenant: Tenant,
    request: Request,
    hold: Hold,
    since: Instant,
) -> Result<Response, ApiError> {
    if let Some(name) = &request.common.model {
        check_model(&app, name)?;
    }
    let stream = request.common.stream;
    let writing = Writing::begin(app, tenant, request, hold, since).await?;
    if stream { writing.stream().await } else { writing.whole().await }
}

/// A prompt's tokens, and its text where that is part of the answer.
pub(super) struct Encoded {
    pub tokens: Vec<u32>,
    echoed: Arc<str>,
}

impl Encoded {
    /// Bytes of memory for so many choices: each has the tokens, and all have one text.
    fn bytes(&self, choices: usize) -> usize {
        choices * size_of_val(self.tokens.as_slice()) + self.echoed.len()
    }
}

/// Turns prompts, which the field `param` has, into tokens, for which `hold` then has room beside the prompts.
pub(super) async fn encode(
    app: &Arc<App>,
    param: &'static str,
    prompts: Vec<Prompt>,
    (echo, choices, variables): (bool, usize, Map<String, Value>),
    tools: Option<Arc<str>>,
    mut hold: Hold,
) -> Result<(Vec<Encoded>, Hold), ApiError> {
    // They are encoded one after the other.
    let mut most = 0;
    for prompt in &prompts {
        let text = text_bytes(app, prompt, echo) + tools.as_ref().map_or(0, |tools| tools.len());
        let values = tools.iter().map(|tools| value_bytes(tools)).sum::<usize>() + values_of(prompt);
        most = most.max(encoding_bytes(app, param, text)?.saturating_add(values));
    }
    let mut room = app.room.encoding(most).await?;
    let (app, several) = (app.clone(), prompts.len() > 1);
    // Both are kept until it is done, also when nobody waits for it any more.
    blocking(move || {
        let mut bytes = hold.bytes();
        let encoded = prompts.into_iter().enumerate().map(|(nth, prompt)| {
            let one = encode_one(&app, param, prompt, (echo, &variables, tools.as_deref()), &mut room);
            let one = one.map_err(|error| if several { error.param(format!("{param}[{nth}]")) } else { error })?;
            bytes += one.bytes(choices);
            hold.set(bytes)?;
            Ok(one)
        });
        let encoded = encoded.collect::<Result<_, ApiError>>()?;
        Ok((encoded, hold))
    })
    .await?
}

/// Bytes of the text that is made of a prompt, or from which it is made.
fn text_bytes(app: &App, prompt: &Prompt, echo: bool) -> usize {
    match prompt {
        Prompt::Text(text) => text.len(),
        Prompt::Tokens(tokens) if echo => tokens.iter().map(|id| app.opened.tokenizer.bytes(*id).len()).sum(),
        Prompt::Tokens(_) => 0,
        Prompt::Chat(turns) => turns.iter().map(turn_bytes).sum(),
    }
}

/// Bytes of the text of a turn.
fn turn_bytes(turn: &Message) -> usize {
    let calls = turn.calls.iter().map(|call| call.id.len() + call.name.len() + call.arguments.len() + TURN_BYTES);
    let said = turn.content.iter().chain(&turn.call).map(String::len).sum::<usize>();
    turn.role.len() + said + calls.sum::<usize>() + TURN_BYTES
}

/// Bytes of memory that the values of a JSON text take while a template is rendered, at most.
fn value_bytes(text: &str) -> usize {
    text.len() + text.bytes().filter(|byte| b"[{,:".contains(byte)).count() * VALUE_BYTES
}

/// As [`value_bytes`], of the calls in a prompt.
fn values_of(prompt: &Prompt) -> usize {
    match prompt {
        Prompt::Chat(turns) => turns.iter().flat_map(|turn| &turn.calls).map(|call| value_bytes(&call.arguments)).sum(),
        _ => 0,
    }
}

/// A turn as templates get it.
fn turn(message: Message) -> Turn {
    let Message { role, content, calls, call } = message;
    let calls = calls.into_iter().map(|call| LlmCall { id: call.id, name: call.name, arguments: call.arguments });
    Turn { role: role.to_owned(), content, calls: calls.collect(), call }
}

/// Refuses tools where the model's template has no place for them.
fn check_tools(app: &App) -> Result<(), ApiError> {
    match &app.opened.template {
        Some(template) if !template.mentions("tools") => {
            let message = "The chat template of this server's model does not mention 'tools', so that it would never \
                           learn of them: leave them out, or describe them in a message.";
            Err(ApiError::invalid(message).param("tools").code("unsupported_value"))
        }
        _ => Ok(()),
    }
}

/// Bytes of memory that it takes to turn a text of so many bytes into tokens.
fn encoding_bytes(app: &App, param: &str, text: usize) -> Result<usize, ApiError> {
    let each = app.opened.tokenizer.encoding_bytes();
    let (bytes, most) = (text.saturating_mul(each), app.room.encoding_most());
    if bytes <= most {
        return Ok(bytes);
    }
    if text > app.opened.tokenizer.longest_text(app.opened.context) {
        return Err(too_long(app, param, "more tokens than that for the prompt"));
    }
    let message = format!(
        "The prompt is longer than {} bytes, the most that this server turns into tokens. Shorten it, or start the \
         server with more --memory.",
        most / each
    );
    Err(ApiError::invalid(message).param(param).code("invalid_value"))
}

/// `room` is for the prompt's text, and grows if a chat's template writes more than was expected.
fn encode_one(
    app: &App,
    param: &'static str,
    prompt: Prompt,
    (echo, variables, tools): (bool, &Map<String, Value>, Option<&str>),
    room: &mut Hold,
) -> Result<Encoded, ApiError> {
    let failed = |error: outcore_llm::Error| ApiError::invalid(error.in_full()).param(param).code("invalid_value");
    let Opened { tokenizer, template, context, vocab, .. } = &app.opened;
    let (tokens, text) = match prompt {
        Prompt::Tokens(tokens) => {
            if tokens.len() > *context {
                return Err(too_long(app, param, &format!("{} tokens for the prompt", tokens.len())));
            }
            if let Some(wrong) = tokens.iter().find(|token| **token as usize >= *vocab) {
                let message = format!("Invalid token: {wrong}, and the model has {vocab} tokens.");
                return Err(ApiError::invalid(message).param(param).code("invalid_value"));
            }
            let text = if echo { tokenizer.decode(&tokens) } else { String::new() };
            (Some(tokens), text)
        }
        Prompt::Text(text) => (tokenizer.encode_at_most(&text, true, *context).map_err(failed)?, text),
        Prompt::Chat(messages) => {
            let Some(template) = template else {
                let message = "The model of this server has no chat template: use /v1/completions.";
                return Err(ApiError::invalid(message).param("messages").code("unsupported_value"));
            };
            let turns: Vec<Turn> = messages.into_iter().map(turn).collect();
            let text = template.render_turns(&turns, tools, true, variables).map_err(failed)?;
            let bytes = encoding_bytes(app, param, text.len())?;
            room.set(bytes.max(room.bytes()))?;
            (tokenizer.encode_chat_at_most(&text, *context).map_err(failed)?, String::new())
        }
    };
    let tokens = tokens.ok_or_else(|| too_long(app, param, "more tokens than that for the prompt"))?;
    if tokens.is_empty() {
        return Err(ApiError::invalid("The prompt has no tokens.").param(param).code("invalid_value"));
    }
    Ok(Encoded { tokens, echoed: if echo { text.into() } else { Arc::default() } })
}

fn too_long(app: &App, param: &str, requested: &str) -> ApiError {
    let message = format!(
        "This server's maximum context length is {} tokens. However, you requested {requested}. Please reduce their number.",
        app.opened.context
    );
    ApiError::invalid(message).param(param).code("context_length_exceeded")
}

/// The longest sequence of a tenant whose blocks are limited.
pub(super) fn blocks_tokens(app: &App, tenant: &Tenant) -> usize {
    let block = app.opened.places.pool().layout().block_tokens() as usize;
    usize::try_from(tenant.options.blocks_most).unwrap_or(usize::MAX).saturating_mul(block)
}

/// How many tokens an answer to a prompt of so many may have.
fn most_tokens(app: &App, tenant: &Tenant, kind: Kind, prompt: usize, asked: Option<usize>) -> Result<usize, ApiError> {
    let own = blocks_tokens(app, tenant);
    if own < app.opened.context && prompt + asked.unwrap_or(1) > own {
        let message = format!(
            "This token may have {own} tokens of keys and values at a time, and the prompt has {prompt}. Shorten it, or \
             ask for fewer tokens."
        );
        return Err(ApiError::invalid(message).param(kind.prompt()).code("context_length_exceeded"));
    }
    let left = app.opened.context.min(own).saturating_sub(prompt);
    if left == 0 || asked.is_some_and(|asked| asked > left) {
        let wanted = asked.map_or_else(String::new, |asked| format!(" and {asked} for the answer"));
        return Err(too_long(app, kind.prompt(), &format!("{prompt} tokens for the prompt{wanted}")));
    }
    match (asked, app.max_tokens) {
        (Some(asked), Some(most)) if asked > most => {
            let message = format!("max_tokens is too large: {asked}. This server writes at most {most} tokens.");
            Err(ApiError::invalid(message).param("max_tokens").code("invalid_value"))
        }
        (asked, most) => Ok(asked.unwrap_or(left).min(most.unwrap_or(left))),
    }
}

/// Bytes of memory that so many tokens with logprobs take until a whole answer is sent.
fn logprobs_bytes(app: &App, kind: Kind, tokens: usize, top: usize) -> Result<usize, ApiError> {
    let (bytes, most) = (tokens.saturating_mul(Choice::token_bytes(top)), app.room.staying_most());
    if bytes <= most {
        return Ok(bytes);
    }
    let top = match kind {
        Kind::Chat => "top_logprobs",
        Kind::Completion => "logprobs",
    };
    let message = format!(
        "The logprobs of {tokens} tokens would take {bytes} bytes of memory, and this server has {most} for a request. \
         Stream the answer, or ask for less by 'n', 'max_tokens' or '{top}'."
    );
    Err(ApiError::invalid(message).param(top).code("invalid_value"))
}

/// The grammars of so many answers of the form that is asked for, one each; none for any text.
async fn grammars(
    app: &App,
    form: Option<Form>,
    common: &mut Common,
    answers: usize,
) -> Result<Vec<Grammar>, ApiError> {
    let schema = match common.format.take() {
        None => return grammars_of_calls(app, form, common.tools.as_ref(), answers).await,
        Some(Format::Object) => r#"{"type":"object"}"#.to_owned(),
        Some(Format::Schema(schema)) => schema,
    };
    let source = match form {
        Some(Form::Channels) => Source::Within(schema, channels::answer_rule),
        _ => Source::Schema(schema),
    };
    app.opened.grammars.compile(source, "response_format", answers).await
}

/// Those of answers that have to call a tool.
async fn grammars_of_calls(
    app: &App,
    form: Option<Form>,
    tools: Option<&Tools>,
    answers: usize,
) -> Result<Vec<Grammar>, ApiError> {
    let Some(tools) = tools else { return Ok(Vec::new()) };
    let only = match &tools.choice {
        ToolChoice::Auto => return Ok(Vec::new()),
        ToolChoice::Required => None,
        ToolChoice::Named(name) => Some(name.clone()),
    };
    let Some(form) = form else {
        let message = "This server does not know how its model calls tools, so it cannot make it call one: give \
                       'tool_choice' as 'auto'.";
        return Err(ApiError::invalid(message).param("tool_choice").code("unsupported_value"));
    };
    let definitions = tools.definitions.clone();
    let source = Source::Rules(Box::new(move |tokenizer| calls::rules(form, &definitions, only.as_deref(), tokenizer)));
    app.opened.grammars.compile(source, "tools", answers).await
}

/// The text of one choice so far.
struct Text {
    unfinished: Unfinished,
    stops: Stops,
    /// Looks for calls of tools, if there are tools.
    calls: Option<Finder>,
    /// Sorts tokens by channels, if the model writes in them.
    channels: Option<Channels>,
    enough: Arc<AtomicBool>,
    finished: bool,
}

/// An answer that is being written.
struct Writing {
    app: Arc<App>,
    reply: Reply,
    events: Receiver<(usize, Event)>,
    texts: Vec<Text>,
    /// Choices that have not ended.
    open: usize,
    usage: Usage,
    stream_usage: bool,
    /// Whose cached tokens are counted: one choice of each prompt.
    choices: usize,
    /// What is to be sent before anything else.
    ready: VecDeque<Bytes>,
    alive: Interval,
    /// Tokens of each prompt.
    prompts: Vec<usize>,
    /// Room for what it takes of memory. A long whole answer has it until it is sent.
    hold: Option<Hold>,
    leave: Leave,
}

/// A piece of one choice.
struct Piece {
    index: usize,
    text: String,
    thoughts: String,
    calls: Vec<Call>,
    token: Option<Token>,
    finish: Option<&'static str>,
}

impl Writing {
    async fn begin(
        app: Arc<App>,
        tenant: Tenant,
        request: Request,
        hold: Hold,
        since: Instant,
    ) -> Result<Self, ApiError> {
        let Request { prompts, echo, mut common } = request;
        let kind = if matches!(prompts.first(), Some(Prompt::Chat(_))) { Kind::Chat } else { Kind::Completion };
        let (answers, places) = (prompts.len().saturating_mul(common.choices), app.opened.engine.places());
        if answers > places {
            let message = format!("{answers} answers are asked for, and this server has places for {places}.");
            return Err(ApiError::invalid(message).param("n").code("invalid_value"));
        }
        let mut leave = tenant.enter(answers, Instant::now())?;
        let variables = std::mem::take(&mut common.template);
        let tools = common.tools.as_ref().map(|tools| tools.definitions.clone());
        if tools.is_some() {
            check_tools(&app)?;
        }
        let (encoded, mut hold) =
            encode(&app, kind.prompt(), prompts, (echo, common.choices, variables), tools, hold).await?;
        let form = app.opened.template.as_ref().filter(|_| kind == Kind::Chat).and_then(Form::of);
        let mut grammars = grammars(&app, form, &mut common, answers).await?.into_iter();
        let names = common.tools.as_ref().map(|tools| tools.names.clone());
        let finder = || Some(Finder::new(form.filter(|form| *form != Form::Channels)?, names.clone()?));
        let (sender, events) = channel(BACKLOG * answers);
        let seed = common.sampling.seed.unwrap_or_else(rand::random);
        let deadline = since + app.timeout;
        let mut texts: Vec<Text> = Vec::with_capacity(answers);
        let mut jobs = Vec::with_capacity(encoded.len());
        let (mut usage, mut echoed) = (Usage::default(), Vec::new());
        let prompt_lengths: Vec<usize> = encoded.iter().map(|one| one.tokens.len()).collect();
        let stops: usize = common.stop.iter().map(String::len).sum();
        let mut bytes = common.bytes() + answers * (CHOICE_BYTES + stops);
        bytes += encoded.iter().map(|one| one.bytes(common.choices)).sum::<usize>();
        let (mut tokens, mut taken) = (0, 0);
        for Encoded { tokens: prompt, echoed: text } in encoded {
            let most = most_tokens(&app, &tenant, kind, prompt.len(), common.max_tokens)?;
            tokens += common.choices * most;
            // Once for all choices of a prompt, as OpenAI's API counts.
            usage.prompt += prompt.len();
            taken += prompt.len() + most * common.choices;
            bytes += common.choices * app.opened.sampling.bytes(&common.sampling, prompt.len() + most);
            let mut of_prompt = (0..common.choices).map(|nth| {
                let sink = Sink { index: texts.len(), events: sender.clone(), enough: Arc::default() };
                texts.push(Text {
                    unfinished: Unfinished::default(),
                    stops: Stops::new(common.stop.clone()),
                    calls: finder(),
                    channels: (form == Some(Form::Channels)).then(Channels::default),
                    enough: sink.enough.clone(),
                    finished: false,
                });
                echoed.push(text.clone());
                Job {
                    tenant: tenant.id,
                    prompt: prompt.clone(),
                    most,
                    sampler: app.opened.sampling.sampler(&common.sampling, seed.wrapping_add(nth as u64), &prompt),
                    grammar: grammars.next(),
                    ignore_end: common.ignore_end,
                    logprobs: common.logprobs,
                    sink,
                    received: since,
                    deadline,
                    followers: Vec::new(),
                    embedding: None,
                }
            });
            let Some(mut first) = of_prompt.next() else { continue };
            first.followers = of_prompt.collect();
            jobs.push(first);
        }
        if common.tools.is_some() {
            bytes += tokens.saturating_mul(HELD_BYTES);
        }
        match common.logprobs {
            Some(top) if !common.stream => bytes += logprobs_bytes(&app, kind, tokens, top)?,
            // What a client may be behind. Whole answers are taken as they are written.
            top if common.stream => {
                bytes += tokens.min(BACKLOG * answers) * (EVENT_BYTES + top.map_or(0, |top| top * TOP_BYTES));
            }
            _ => {}
        }
        hold.set(bytes)?;
        leave.take(taken, Instant::now())?;
        jobs.into_iter().try_for_each(|job| app.opened.engine.submit(job))?;
        let with = [common.logprobs.is_some(), common.stream_usage];
        let reply = Reply::new(kind, app.name.clone(), app.opened.tokenizer.clone(), with, echoed);
        let alive = interval_at(tokio::time::Instant::now() + ALIVE_EVERY, ALIVE_EVERY);
        Ok(Self {
            reply,
            events,
            open: texts.len(),
            texts,
            usage,
            stream_usage: common.stream_usage,
            choices: common.choices,
            ready: VecDeque::new(),
            alive,
            app,
            prompts: prompt_lengths,
            hold: Some(hold),
            leave,
        })
    }

    /// What an event adds to a choice; nothing if that is not known yet.
    fn piece(&mut self, index: usize, event: Event) -> Result<Option<Piece>, ApiError> {
        let tokenizer = &self.app.opened.tokenizer;
        let first_of_prompt = index.is_multiple_of(self.choices);
        let Some(text) = self.texts.get_mut(index).filter(|text| !text.finished) else { return Ok(None) };
        let mut spoken = Spoken::default();
        let (piece, token, finish) = match event {
            Event::Failed(error) => return Err(*error),
            Event::Begun(cached) => {
                if first_of_prompt {
                    self.usage.cached += cached;
                    self.leave.used(self.prompts.get(index / self.choices).copied().unwrap_or(0));
                }
                return Ok(None);
            }
            // What no answer gets.
            Event::Embedded(_) => return Ok(None),
            Event::Token(new) => {
                self.usage.completion += 1;
                self.leave.used(1);
                let mut said = tokenizer.push(&mut text.unfinished, new.id);
                said.push_str(text.calls.as_ref().map_or("", |calls| calls.spoken(tokenizer, new.id)));
                if let Some(channels) = &mut text.channels {
                    spoken = channels.push(tokenizer, new.id, &said);
                    said = std::mem::take(&mut spoken.text);
                }
                let piece = text.stops.push(&said);
                let found = text.stops.found();
                text.enough.store(found, Ordering::Relaxed);
                (piece, Some(new), found.then_some("stop"))
            }
            Event::Ended(end) => {
                let mut rest = std::mem::take(&mut text.unfinished).finish();
                if let Some(channels) = &mut text.channels {
                    spoken = channels.finish(&rest);
                    rest = std::mem::take(&mut spoken.text);
                }
                let mut piece = text.stops.push(&rest);
                piece.push_str(&text.stops.finish());
                let why = match end {
                    End::Stop => "stop",
                    End::Length => "length",
                };
                (piece, None, Some(why))
            }
        };
        let Spoken { thoughts, call, .. } = spoken;
        let mut piece = Piece { index, text: piece, thoughts, calls: call.into_iter().collect(), token, finish };
        if finish == Some("stop") && text.channels.as_ref().is_some_and(Channels::called) {
            piece.finish = Some("tool_calls");
        }
        if let Some(calls) = &mut text.calls {
            let found = calls.push(&piece.text);
            (piece.text, piece.calls) = (found.text, found.calls);
            if finish.is_some() {
                let rest = calls.finish();
                piece.text += &rest.text;
                piece.calls.extend(rest.calls);
            }
            if finish == Some("stop") && calls.found() > 0 {
                piece.finish = Some("tool_calls");
            }
        }
        if finish.is_some() {
            text.finished = true;
            self.open -= 1;
        }
        Ok(Some(piece))
    }

    /// What came out of the channel, as a [piece](Self::piece).
    fn received(&mut self, event: Option<(usize, Event)>) -> Result<Option<Piece>, ApiError> {
        let (index, event) = event.ok_or_else(|| {
            let message =
                "The answer was given up: it was not taken as fast as it was written, or the engine has ended.";
            ApiError::unavailable(message, None)
        })?;
        self.piece(index, event)
    }

    async fn whole(mut self) -> Result<Response, ApiError> {
        let mut choices: Vec<Choice> = self.texts.iter().map(|_| Choice::default()).collect();
        while self.open > 0 {
            let event = self.events.recv().await;
            let Some(piece) = self.received(event)? else { continue };
            if let Some(choice) = choices.get_mut(piece.index) {
                choice.add(&piece.text, piece.token, piece.finish);
                choice.add_thoughts(&piece.thoughts);
                piece.calls.into_iter().for_each(|call| choice.add_call(call));
            }
        }
        Ok(written(self.reply.whole(choices, &self.usage), self.hold.take()))
    }

    /// Waits for the first event, so that what is refused by then has a status; then streams.
    async fn stream(mut self) -> Result<Response, ApiError> {
        let first = tokio::select! {
            first = self.events.recv() => first,
            () = tokio::time::sleep(ALIVE_EVERY) => None,
        };
        if let Some((index, first)) = first {
            let piece = self.piece(index, first)?;
            self.say(piece);
        }
        let opening = stream::iter(self.reply.opening().map(|chunk| event(&chunk)));
        let chunks = stream::unfold(Some(self), |writing| async move {
            let mut writing = writing?;
            let (chunk, ends) = writing.chunk().await;
            Some((chunk, (!ends).then_some(writing)))
        });
        let headers = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
        Ok((headers, Body::from_stream(opening.chain(chunks).map(Ok::<_, std::convert::Infallible>))).into_response())
    }

    /// Has a piece sent.
    fn say(&mut self, piece: Option<Piece>) {
        let Some(Piece { index, text, thoughts, calls, token, finish }) = piece else { return };
        // One chunk a token, also where its text is not known yet: clients measure by them.
        let is_said = token.is_some() || !text.is_empty() || !thoughts.is_empty();
        let mut choice = Choice::default();
        choice.add(&text, token, None);
        choice.add_thoughts(&thoughts);
        if is_said {
            let chunk = self.reply.chunk(index, &choice, None);
            self.ready.push_back(event(&chunk));
        }
        for call in calls {
            let chunk = self.reply.call_chunk(index, call);
            self.ready.push_back(event(&chunk));
        }
        if finish.is_some() {
            let chunk = self.reply.chunk(index, &Choice::default(), finish);
            self.ready.push_back(event(&chunk));
        }
        if self.open == 0 {
            if self.stream_usage {
                let chunk = self.reply.usage(&self.usage);
                self.ready.push_back(event(&chunk));
            }
            self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        }
    }

    /// The next bytes of a stream, and whether they are the last.
    async fn chunk(&mut self) -> (Bytes, bool) {
        loop {
            // What has come goes out together, but not more than a chunk: a client may take it slowly.
            while self.ready.iter().map(Bytes::len).sum::<usize>() < CHUNK_BYTES
                && let Ok((index, next)) = self.events.try_recv()
            {
                match self.piece(index, next) {
                    Ok(piece) => self.say(piece),
                    Err(error) => return (self.broken_off(&error), true),
                }
            }
            if !self.ready.is_empty() {
                let bytes: Vec<u8> = self.ready.drain(..).flatten().collect();
                return (bytes.into(), self.open == 0);
            }
            let next = tokio::select! {
                next = self.events.recv() => next,
                _ = self.alive.tick() => return (Bytes::from_static(b": alive\n\n"), false),
            };
            match self.received(next) {
                Ok(piece) => self.say(piece),
                Err(error) => return (self.broken_off(&error), true),
            }
        }
    }

    /// What is there, and the error that nothing comes behind.
    fn broken_off(&mut self, error: &ApiError) -> Bytes {
        self.ready.push_back(event(&error.body()));
        self.ready.drain(..).flatten().collect::<Vec<u8>>().into()
    }
}

/// A whole answer of JSON in pieces. A short one is ready and has a length; a long one is written as it is sent, and
/// has `hold` until then.
pub(super) fn written(pieces: impl Iterator<Item = String> + Send + 'static, hold: Option<Hold>) -> Response {
    let mut chunks = chunks(pieces);
    let first = chunks.next().unwrap_or_default();
    let body = if first.len() < CHUNK_BYTES {
        Body::from(first)
    } else {
        Body::from_stream(stream::iter(std::iter::once(first).chain(chunks).map(move |chunk| {
            let _held = &hold;
            Ok::<_, std::convert::Infallible>(chunk)
        })))
    };
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// JSON that comes in pieces, in chunks that are worth sending.
fn chunks(mut pieces: impl Iterator<Item = String>) -> impl Iterator<Item = Bytes> {
    std::iter::from_fn(move || {
        let mut chunk = String::new();
        while chunk.len() < CHUNK_BYTES {
            let Some(piece) = pieces.next() else { break };
            chunk.push_str(&piece);
        }
        (!chunk.is_empty()).then(|| chunk.into())
    })
}

/// One event of a stream.
fn event(value: &Value) -> Bytes {
    format!("data: {value}\n\n").into()
}
