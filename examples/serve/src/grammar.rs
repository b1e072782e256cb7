//! Answers of a given form: which tokens may come next, by a grammar. The `llguidance` crate compiles a JSON schema to
//! a grammar, and says before each token which ones the grammar allows behind those before.
//!
//! A grammar comes from a client, so what it takes is limited: the size of a schema, the work and the time of compiling
//! it, the work of each mask, and the memory of what is compiled. `llguidance` counts work in steps of its own, so that
//! limits of it are the same on every machine. Nothing is fetched: a reference to another document is refused.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use llguidance::api::{GrammarWithLexer, ParserLimits, StopReason, TopLevelGrammar};
use llguidance::toktrie::{
    ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie,
};
use llguidance::{JsonCompileOptions, Matcher, ParserFactory};
use outcore_llm::Tokenizer;
use serde_json::{Map, Value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::slack::Slack;

/// Steps of compiling the texts that a grammar is made of.
const COMPILE_STEPS: u64 = 100_000;
/// Symbols of a grammar.
const SYMBOLS_MOST: usize = 20_000;
/// States of the automaton that knows its texts.
const STATES_MOST: usize = 4_000;
/// Steps of a mask: of the automaton, and of the parser.
const MASK_STEPS: u64 = 200_000;
const MASK_ITEMS: usize = 30_000;
/// The least common multiple of all that a schema wants multiples of, in units of their last digits.
const MULTIPLE_MOST: u64 = 1000;
/// The most digits of these behind the point.
const SCALE_MOST: i32 = 6;
/// A grammar is compiled on a thread with a stack of its own: schemas are nested.
const STACK_BYTES: usize = 64 << 20;
/// How long compiling may take, and before that, waiting for memory and for others that are compiled.
const COMPILE_TIME: Duration = Duration::from_secs(10);
/// White space between two parts of JSON, in characters. Without a limit, a model may write nothing else.
const SPACE_MOST: usize = 64;
/// The longest token that may be part of an answer with a grammar, in bytes.
const TOKEN_BYTES_MOST: usize = 255;
/// The most of a reason that an error repeats, in characters.
const REASON_MOST: usize = 300;

/// Bytes of memory that the tokens take for grammars: for each, and for each of their bytes.
const VOCAB_BYTES: [u64; 2] = [128, 32];
/// Bytes of memory that a grammar takes for an answer, at most, and how many times that while it is compiled.
pub const ANSWER_BYTES: usize = 10 << 20;
/// See [`ANSWER_BYTES`].
pub const COMPILING: usize = 2;
/// The least memory for grammars, in bytes.
pub const BYTES_LEAST: usize = ANSWER_BYTES * COMPILING;

/// What the grammars of a server share.
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    vocab: usize,
    slack: Arc<Slack>,
    metrics: Arc<Metrics>,
    /// Made when the first grammar is asked for.
    factory: OnceLock<Result<ParserFactory, String>>,
    /// One is compiled at a time.
    compiling: Arc<Semaphore>,
    room: Arc<Semaphore>,
    places: usize,
    compile_time: Duration,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").field("vocab", &self.vocab).field("places", &self.places).finish_non_exhaustive()
    }
}

/// Writes rules, with the tokens of a model.
pub type Writer = Box<dyn FnOnce(&Tokenizer) -> Result<String, ApiError> + Send>;

/// What a grammar is made from.
pub enum Source {
    /// A JSON schema, as text.
    Schema(String),
    /// The same within a rule, which the function writes around the name of the schema's.
    Within(String, fn(&Tokenizer, &str) -> String),
    /// What writes rules in the syntax of `llguidance`, where there is memory for it.
    Rules(Writer),
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Schema(_) | Self::Within(..) => "Schema",
            Self::Rules(_) => "Rules",
        })
    }
}

/// The tokens that may come next in one answer.
pub struct Grammar {
    matcher: Matcher,
    param: &'static str,
    /// For what it takes of memory.
    _room: OwnedSemaphorePermit,
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").field("param", &self.param).finish_non_exhaustive()
    }
}

/// A reason in the words of `llguidance`, fit for a message. It may repeat parts of the schema.
fn reason(error: &str) -> String {
    let first = error.split("\n<").next().unwrap_or_default();
    let mut text: String = first.chars().map(|c| if c.is_control() { ' ' } else { c }).take(REASON_MOST).collect();
    if first.chars().nth(REASON_MOST).is_some() {
        text.push('\u{2026}');
    }
    text
}

fn refused(param: &'static str, why: &str) -> ApiError {
    let message = format!("Invalid value for '{param}': {}.", why.trim_end_matches('.'));
    ApiError::invalid(message).param(param).code("invalid_value")
}

/// What exceeds a limit, with the limit and what to do.
pub fn too_complex(param: &'static str, why: &str) -> ApiError {
    refused(param, &format!("it is too complex: {why}. Use shorter patterns, fewer alternatives, or smaller bounds"))
}

/// The bytes of each token, as `llguidance` wants them: of a control token its name behind a byte that no text has.
fn words(tokenizer: &Tokenizer, vocab: usize) -> Vec<Vec<u8>> {
    let word = |id: u32| match tokenizer.bytes(id) {
        [] => match tokenizer.token(id) {
            Some(name) if !name.is_empty() => [[TokTrie::SPECIAL_TOKEN_MARKER].as_slice(), name.as_bytes()].concat(),
            _ => Vec::new(),
        },
        bytes => bytes.to_vec(),
    };
    let fits = |word: Vec<u8>| if word.len() <= TOKEN_BYTES_MOST { word } else { Vec::new() };
    (0..vocab as u32).map(word).map(fits).collect()
}

/// Bytes of memory that a vocabulary of `vocab` tokens takes for grammars.
pub fn vocab_bytes(tokenizer: &Tokenizer, vocab: usize) -> u64 {
    let bytes: usize = (0..vocab as u32).map(|id| tokenizer.bytes(id).len()).sum();
    vocab as u64 * VOCAB_BYTES[0] + bytes as u64 * VOCAB_BYTES[1]
}

fn factory(tokenizer: &Tokenizer, vocab: usize) -> Result<ParserFactory, String> {
    let ends: Vec<u32> = tokenizer.eos().iter().copied().filter(|id| (*id as usize) < vocab).collect();
    let info = TokRxInfo::new(vocab as u32, ends.first().copied().unwrap_or(INVALID_TOKEN));
    let mut trie = TokTrie::from(&info, &words(tokenizer, vocab));
    if !ends.is_empty() {
        trie = trie.with_eos_tokens(&ends);
    }
    let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    // Without slices of the vocabulary: they would save part of the time of a mask, and take three times the memory.
    let factory = ParserFactory::new(&tokens, InferenceCapabilities::default(), &[]);
    let mut factory = factory.map_err(|error| error.to_string())?;
    factory.quiet();
    *factory.limits_mut() = ParserLimits {
        initial_lexer_fuel: COMPILE_STEPS,
        step_lexer_fuel: MASK_STEPS,
        step_max_items: MASK_ITEMS,
        max_lexer_states: STATES_MOST,
        max_grammar_size: SYMBOLS_MOST,
        precompute_large_lexemes: false,
        verbose_errors: false,
        ..ParserLimits::default()
    };
    Ok(factory)
}

/// How JSON may be written.
pub fn json_options() -> Value {
    let options = JsonCompileOptions {
        whitespace_pattern: Some(format!(r"[\x20\x0A\x0D\x09]{{1,{SPACE_MOST}}}")),
        ..JsonCompileOptions::default()
    };
    let mut schema = Value::Object(Map::new());
    options.apply_to(&mut schema);
    schema
}

/// A schema that has these options, and none of its own.
pub fn with_options(mut schema: Map<String, Value>) -> Value {
    if let Value::Object(options) = json_options() {
        schema.extend(options);
    }
    Value::Object(schema)
}

/// Refuses what is not counted as steps: an automaton for multiples of a number has as many states as that.
pub fn check(schema: &Value) -> Result<(), String> {
    let mut multiples = Vec::new();
    let mut left = vec![schema];
    while let Some(value) = left.pop() {
        match value {
            Value::Array(all) => left.extend(all),
            Value::Object(members) => {
                multiples.extend(members.get("multipleOf").and_then(Value::as_f64));
                left.extend(members.values());
            }
            _ => {}
        }
    }
    // But for the error of products of fractions.
    let is_whole = |number: f64| number == 0.0 || number.round() != 0.0 && (number.round() - number).abs() < 1e-6;
    // Of several in one place, multiples of all are wanted; so they count together.
    let scale = (0..=SCALE_MOST)
        .map(|digits| 10_f64.powi(digits))
        .find(|scale| multiples.iter().all(|number| is_whole(number * scale)));
    let gcd = |mut a: u64, mut b: u64| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let together = scale.and_then(|scale| {
        multiples.iter().try_fold(1_u64, |all, number| {
            let number = ((number * scale).abs().round() as u64).max(1);
            all.checked_mul(number / gcd(all, number)).filter(|all| *all <= MULTIPLE_MOST)
        })
    });
    let why = || format!("the least common multiple of all 'multipleOf', without a point, is beyond {MULTIPLE_MOST}");
    together.map(drop).ok_or_else(why)
}

/// A schema of the field `param`, with the options of all.
fn checked(schema: &str, param: &'static str) -> Result<Value, ApiError> {
    let schema = serde_json::from_str(schema).map_err(|_| refused(param, "it is no JSON object"))?;
    let schema = with_options(schema);
    check(&schema).map_err(|why| too_complex(param, &why))?;
    Ok(schema)
}

impl Source {
    fn grammar(self, param: &'static str, tokenizer: &Tokenizer) -> Result<TopLevelGrammar, ApiError> {
        match self {
            Self::Rules(write) => {
                let rules = write(tokenizer)?;
                Ok(TopLevelGrammar::from_grammar(GrammarWithLexer::from_lark(rules)))
            }
            Self::Schema(schema) => Ok(TopLevelGrammar::from_json_schema(checked(&schema, param)?)),
            Self::Within(schema, around) => {
                let (schema, start) = (checked(&schema, param)?, around(tokenizer, "body"));
                let rules = format!("start: {start}\nbody: %json {schema}\n");
                Ok(TopLevelGrammar::from_grammar(GrammarWithLexer::from_lark(rules)))
            }
        }
    }
}

impl Grammars {
    /// For a model with `vocab` tokens, and `bytes` of memory for all grammars.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        vocab: usize,
        bytes: usize,
        slack: Arc<Slack>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let places = (bytes / ANSWER_BYTES).max(COMPILING);
        Self {
            tokenizer,
            vocab,
            slack,
            metrics,
            factory: OnceLock::new(),
            compiling: Arc::new(Semaphore::new(1)),
            room: Arc::new(Semaphore::new(places)),
            places,
            compile_time: COMPILE_TIME,
        }
    }

    /// Sets how long compiling may take, and before that, waiting for others: 10 s, but for tests; and the bytes of
    /// memory for all grammars. None may be in use.
    pub fn set_limits(&mut self, compile_time: Duration, bytes: usize) {
        self.compile_time = compile_time;
        self.places = (bytes / ANSWER_BYTES).max(COMPILING);
        self.room = Arc::new(Semaphore::new(self.places));
    }

    /// Compiles the grammar that the field `param` has, for each of `answers` answers.
    ///
    /// # Errors
    /// 400 for what cannot be compiled, that nothing can meet, or that exceeds a limit; 503 if there is no room now.
    pub async fn compile(
        self: &Arc<Self>,
        source: Source,
        param: &'static str,
        answers: usize,
    ) -> Result<Vec<Grammar>, ApiError> {
        if answers > self.places {
            let message = format!(
                "{answers} answers of a given form are asked for, and this server has memory for {} at a time. Ask \
                 for fewer, or start it with more --memory.",
                self.places
            );
            return Err(ApiError::invalid(message).param("n").code("invalid_value"));
        }
        let deadline = tokio::time::Instant::now() + self.compile_time;
        let permits = u32::try_from(answers.max(COMPILING)).unwrap_or(u32::MAX);
        let room = tokio::time::timeout_at(deadline, self.room.clone().acquire_many_owned(permits)).await;
        let Ok(Ok(room)) = room else {
            let message = format!(
                "The server writes as many answers of a given form as it has memory for: {}. Try again later, or start \
                 it with more --memory.",
                self.places
            );
            return Err(ApiError::unavailable(message, Some(Duration::from_secs(1))));
        };
        let turn = tokio::time::timeout_at(deadline, self.compiling.clone().acquire_owned()).await;
        let Ok(Ok(turn)) = turn else {
            let message = "Other grammars are being compiled. Try again later.";
            return Err(ApiError::unavailable(message, Some(Duration::from_secs(1))));
        };
        // The wait for pages that make room is no part of compiling.
        let slack = self.slack.clone();
        let made = tokio::task::spawn_blocking(move || slack.begin_grammars()).await;
        made.map_err(|_| ApiError::internal("The server failed to make room for a grammar: see its log."))?.map_err(
            |error| {
                tracing::warn!(%error, "pages did not make room for grammars");
                ApiError::unavailable("The server has no room for this now. Try again.", Some(Duration::from_secs(1)))
            },
        )?;
        // Waiting for others is not held against it.
        let deadline = tokio::time::Instant::now() + self.compile_time;
        let seconds = self.compile_time.as_secs_f64();
        let late = || too_complex(param, &format!("compiling it did not end within {seconds} s"));
        let (tell, told) = oneshot::channel();
        let grammars = self.clone();
        let work = move || {
            // Both are kept until it is done, also when nobody waits for it any more.
            let compiled = grammars.compile_now(source, param, answers, room);
            drop(turn);
            let _ = tell.send(compiled);
        };
        let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES);
        thread.spawn(work).map_err(|error| {
            tracing::error!(%error, "no thread could be started");
            ApiError::unavailable("The server has no thread for this now. Try again.", Some(Duration::from_secs(1)))
        })?;
        match tokio::time::timeout_at(deadline, told).await {
            Ok(Ok(compiled)) => compiled,
            Ok(Err(_)) => Err(ApiError::internal("The server failed to compile a grammar: see its log.")),
            Err(_) => Err(late()),
        }
    }

    fn compile_now(
        &self,
        source: Source,
        param: &'static str,
        answers: usize,
        room: OwnedSemaphorePermit,
    ) -> Result<Vec<Grammar>, ApiError> {
        let since = Instant::now();
        let factory = self.factory.get_or_init(|| factory(&self.tokenizer, self.vocab)).as_ref().map_err(|why| {
            tracing::error!(why, "the model's tokens cannot be used for grammars");
            let message = "The tokens of this server's model cannot be used for answers of a given form.";
            ApiError::invalid(message).param(param).code("unsupported_value")
        })?;
        let compiled = source.grammar(param, &self.tokenizer).and_then(|grammar| {
            let parser = factory.create_parser(grammar).map_err(|error| why_not(param, &format!("{error:#}")))?;
            let mut matcher = Matcher::new(Ok(parser));
            // What no token can begin is refused here, not when its turn comes.
            let mut begun = matcher.deep_clone();
            begun.compute_mask().map_err(|error| match error.to_string() {
                none if none.starts_with(&StopReason::NoExtensionBias.to_string()) => {
                    refused(param, "no text can meet it")
                }
                other => why_not(param, &other),
            })?;
            if matcher.is_accepting().is_ok_and(|empty| empty) {
                return Err(refused(param, "it allows an empty answer"));
            }
            Ok(matcher)
        });
        self.metrics.grammar(since.elapsed(), if compiled.is_ok() { answers } else { 0 });
        let matcher = compiled?;
        // Each has caches of its own, so that which answers are written together changes none of them.
        let mut room = room;
        let one = |_| Some(Grammar { matcher: matcher.deep_clone(), param, _room: room.split(1)? });
        Ok((0..answers).map_while(one).collect())
    }
}

/// Why something cannot be compiled.
fn why_not(param: &'static str, error: &str) -> ApiError {
    let limits = ["fuel", "too large", "too complex", "too many", "limit", "max is", "exceed", "nable to determine"];
    let why = reason(error);
    match limits.iter().any(|limit| why.contains(limit)) {
        true => too_complex(param, &why),
        false => refused(param, &why),
    }
}

impl Grammar {
    /// The tokens that may come next.
    ///
    /// # Errors
    /// 400 if there are none, or if finding them exceeds a limit.
    pub fn mask(&mut self) -> Result<Mask, ApiError> {
        self.matcher.compute_mask().map(Mask).map_err(|error| self.failed(&error.to_string()))
    }

    /// The next token is this one.
    ///
    /// # Errors
    /// As [`mask`](Self::mask).
    pub fn push(&mut self, id: u32) -> Result<(), ApiError> {
        self.matcher.consume_token(id).map_err(|error| self.failed(&error.to_string()))
    }

    /// Whether nothing can come behind the last token.
    pub fn is_over(&self) -> bool {
        self.matcher.is_stopped()
    }

    fn failed(&self, error: &str) -> ApiError {
        too_complex(self.param, &format!("the answer could not go on: {}", reason(error)))
    }
}

/// Tokens that may come next.
#[derive(Debug)]
pub struct Mask(SimpleVob);

impl Mask {
    /// Whether this one may.
    pub fn allows(&self, id: u32) -> bool {
        (id as usize) < self.0.len() && self.0.is_allowed(id)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn multiples_count_together_in_units_of_their_last_digits() {
        let fits = |numbers: &[f64]| {
            let all: Vec<Value> = numbers.iter().map(|number| json!({ "multipleOf": number })).collect();
            check(&json!({ "properties": { "multipleOf": { "allOf": all } } })).is_ok()
        };
        let good: [&[f64]; 7] = [&[], &[1000.0], &[0.01], &[0.5, 5.0, 10.0], &[0.01, 10.0], &[7.0, 11.0, 1.0], &[0.0]];
        let bad: [&[f64]; 5] = [&[1001.0], &[0.01, 10.01], &[7.0, 11.0, 13.0], &[1e300], &[1e-9]];
        good.iter().for_each(|numbers| assert!(fits(numbers), "{numbers:?}"));
        bad.iter().for_each(|numbers| assert!(!fits(numbers), "{numbers:?}"));
    }

    #[test]
    fn a_reason_is_short_and_has_no_control_characters() {
        let reason = reason(&format!("a\u{1b}\n{}\n<state>more", "b".repeat(1000)));
        assert!(reason.starts_with("a  bbb") && reason.chars().count() == REASON_MOST + 1, "{reason}");
        assert_eq!(super::reason("short\n<non-verbose/>"), "short");
    }
}
