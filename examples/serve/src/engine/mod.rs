//! Continuous batching: one thread that runs passes over the model, each for all sequences that are active. Requests
//! come to it through a channel, and tokens go back through one channel a request.

mod answer;
mod choose;
mod embeddings;
mod failed;
mod scheduler;
mod turns;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use outcore_kv::{KvPool, TenantId};
use outcore_llm::{DraftModel, Passes, Sampler, Tokenizer};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::capture::Capture;
use crate::error::ApiError;
use crate::grammar::Grammar;
use crate::metrics::Metrics;
use crate::slack::Slack;

pub use embeddings::{Embedding, Places, Pooling};

/// An answer to be written, or a text to be embedded.
#[derive(Debug)]
pub struct Job {
    /// Whose it is.
    pub tenant: TenantId,
    /// What it continues: at least one token.
    pub prompt: Vec<u32>,
    /// The most tokens of it, at least one.
    pub most: usize,
    /// Chooses its tokens.
    pub sampler: Sampler,
    /// Which tokens it may have, if not all.
    pub grammar: Option<Grammar>,
    /// Whether it goes on behind the model's end tokens.
    pub ignore_end: bool,
    /// How many alternatives of each token are named.
    pub logprobs: Option<usize>,
    /// Where its tokens go.
    pub sink: Sink,
    /// When it came.
    pub received: Instant,
    /// When it is given up.
    pub deadline: Instant,
    /// Other answers to the same prompt. They are begun when the prompt has been read, and find its keys and values.
    pub followers: Vec<Job>,
    /// If the prompt becomes a vector and no answer is written: `most` is 0 then, and there are no followers.
    pub embedding: Option<Embedding>,
}

/// Events of an answer that may wait to be taken. A client that is further behind is given up: else what waits for
/// clients that take nothing would be without bound.
pub const BACKLOG: usize = 256;

/// Where the tokens of an answer go: a channel that several answers share. When its other end is gone, so are they.
#[derive(Clone, Debug)]
pub struct Sink {
    /// The answer's number in the channel.
    pub index: usize,
    /// The channel, with room for [`BACKLOG`] events of each answer.
    pub events: mpsc::Sender<(usize, Event)>,
    /// Set by whoever needs no more of this answer.
    pub enough: Arc<AtomicBool>,
}

impl Sink {
    fn send(&self, event: Event) {
        // If the other end is gone, or does not take them, the next look finds that.
        if self.events.try_send((self.index, event)).is_err() {
            self.enough.store(true, Ordering::Relaxed);
        }
    }

    /// Whether nobody needs more.
    fn is_over(&self) -> bool {
        self.events.is_closed() || self.enough.load(Ordering::Relaxed)
    }
}

/// What becomes of an answer.
#[derive(Debug)]
pub enum Event {
    /// Its turn has come; the keys and values of so many tokens of the prompt were there.
    Begun(usize),
    /// The next token.
    Token(Token),
    /// There is no more.
    Ended(End),
    /// The embedding, behind which nothing comes.
    Embedded(Vec<f32>),
    /// It was given up.
    Failed(Box<ApiError>),
}

/// A token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// How likely it was, and its alternatives, if that was asked for.
    pub logprobs: Option<LogProbs>,
}

/// The natural logarithms of probabilities at temperature 1.
#[derive(Clone, Debug, PartialEq)]
pub struct LogProbs {
    /// Of the token that was chosen.
    pub chosen: f32,
    /// Of the likeliest ones, in order.
    pub top: Vec<(u32, f32)>,
}

/// Why an answer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The model has ended it.
    Stop,
    /// It has as many tokens as it may.
    Length,
}

/// What becomes of the keys and values of an answer that has to make room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Preempt {
    /// Whichever of the two costs less.
    #[default]
    Auto,
    /// They go to the tiers below, and come back.
    Park,
    /// They are computed again.
    Recompute,
}

/// How much is done at a time.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most answers that are written at a time.
    pub concurrency: usize,
    /// The most answers that wait for that.
    pub queue: usize,
    /// The most tokens of a pass.
    pub pass: usize,
    /// The most drafted tokens of a pass: none if no drafts are made.
    pub drafts: usize,
    /// What becomes of the keys and values of answers that have to make room.
    pub preempt: Preempt,
}

/// What drafts for answers where looking up finds nothing.
#[derive(Debug)]
pub struct Drafter {
    /// The draft model.
    pub model: DraftModel,
    /// Answers for which it drafts at a time, at most.
    pub sessions: usize,
    /// The most tokens that it drafts for one of them in a pass.
    pub tokens: usize,
}

enum Command {
    Submit(Box<Job>),
    Stop,
}

/// What the thread and its callers share.
#[derive(Debug, Default)]
struct Shared {
    /// Answers that were handed over and have not ended.
    unfinished: AtomicUsize,
    stopping: AtomicBool,
    /// Why no pass can succeed any more.
    broken: Mutex<Option<String>>,
}

/// Tells that no request will be answered any more, if the thread panics.
struct BrokenByPanic(Arc<Shared>);

impl Drop for BrokenByPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let why = "The server failed and has to be started again: see its log.";
            self.0.broken.lock().get_or_insert_with(|| why.into());
        }
    }
}

/// A handle of the thread. When the last one is dropped, the thread ends.
#[derive(Clone, Debug)]
pub struct Engine {
    commands: Sender<Command>,
    shared: Arc<Shared>,
    limits: Limits,
    thread: Arc<Mutex<Option<std::thread::JoinHandle<()>>>>,
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Submit(_) => "Submit",
            Self::Stop => "Stop",
        })
    }
}

impl Engine {
    /// Starts the thread, whatever computes the passes of `model`. With a drafter, that drafts too.
    ///
    /// # Errors
    /// The system's, if no thread can be started.
    pub fn start<P: Passes>(
        model: Arc<P>,
        drafter: Option<Drafter>,
        pool: (KvPool, Arc<Slack>),
        tokenizer: Arc<Tokenizer>,
        limits: Limits,
        metrics: Arc<Metrics>,
        capture: Capture,
    ) -> std::io::Result<Self> {
        let (commands, receiver) = channel();
        let shared = Arc::new(Shared::default());
        let scheduler = scheduler::Scheduler::new(model, drafter, pool, tokenizer, limits, metrics, shared.clone());
        let scheduler = scheduler.capturing(capture);
        let panics = BrokenByPanic(shared.clone());
        let work = move || {
            let _panics = panics;
            scheduler.run(&receiver);
        };
        let thread = std::thread::Builder::new().name("engine".into()).spawn(work)?;
        Ok(Self { commands, shared, limits, thread: Arc::new(Mutex::new(Some(thread))) })
    }

    /// Hands an answer, and its followers, to the thread; or an embedding, which has a place already.
    ///
    /// # Errors
    /// 429 if as many wait as may; 503 if the engine stops or cannot go on. Embeddings of a request that was begun go
    /// on while the engine stops.
    pub fn submit(&self, job: Job) -> Result<(), ApiError> {
        let count = if job.embedding.is_some() { 0 } else { 1 + job.followers.len() };
        match job.embedding.is_some() {
            true => self.broken().map_or(Ok(()), |why| Err(ApiError::unavailable(why, None)))?,
            false => drop(self.take_places(count, count)?),
        }
        self.commands.send(Command::Submit(Box::new(job))).map_err(|_| {
            self.shared.unfinished.fetch_sub(count, Ordering::SeqCst);
            ApiError::internal("The engine has ended.")
        })
    }

    /// Takes places for embeddings: so many, or as many as there are.
    ///
    /// # Errors
    /// As for [`submit`](Self::submit).
    pub fn places_for(&self, most: usize) -> Result<Places, ApiError> {
        Ok(Places { count: self.take_places(1, most)?, shared: self.shared.clone() })
    }

    /// Counts answers as handed over: so many, or fewer down to `least` where there are no more places.
    fn take_places(&self, least: usize, most: usize) -> Result<usize, ApiError> {
        if self.shared.stopping.load(Ordering::SeqCst) {
            return Err(stopping());
        }
        if let Some(why) = self.broken() {
            return Err(ApiError::unavailable(why, None));
        }
        let some = |unfinished: usize| most.min(self.places().saturating_sub(unfinished));
        let more = |unfinished| Some(some(unfinished)).filter(|some| *some >= least).map(|some| unfinished + some);
        match self.shared.unfinished.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more) {
            Ok(unfinished) => Ok(some(unfinished)),
            Err(unfinished) => {
                let message = format!(
                    "The server is overloaded: {unfinished} answers are written or wait, and with {least} more they \
                     would be more than {}. Try again later.",
                    self.places()
                );
                Err(ApiError::too_many(message, Duration::from_secs(1 + unfinished as u64 / 16)))
            }
        }
    }

    /// Answers that are written at a time, at most.
    pub fn concurrency(&self) -> usize {
        self.limits.concurrency
    }

    /// Answers that are written or wait, at most.
    pub fn places(&self) -> usize {
        self.limits.queue + self.limits.concurrency
    }

    /// Answers that were handed over and have not ended.
    pub fn unfinished(&self) -> usize {
        self.shared.unfinished.load(Ordering::SeqCst)
    }

    /// Why no pass can succeed any more, if that is so.
    pub fn broken(&self) -> Option<String> {
        self.shared.broken.lock().clone()
    }

    /// Why requests are not answered, if that is so.
    pub fn why_not_ready(&self) -> Option<String> {
        match self.shared.stopping.load(Ordering::SeqCst) {
            true => Some(stopping().message),
            false => self.broken(),
        }
    }

    /// Takes no more requests.
    pub fn drain(&self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
    }

    /// Parks what is active, gives up what waits, and ends the thread. Blocks until that is done.
    pub fn stop(&self) {
        self.drain();
        let _ = self.commands.send(Command::Stop);
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
    }
}

/// What becomes of requests when the server stops.
fn stopping() -> ApiError {
    ApiError::unavailable("The server is shutting down. Send the request again.", Some(Duration::from_secs(5)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regression_a_thread_that_panics_is_known_to_be_broken() {
        let shared = Arc::new(Shared::default());
        for panics in [false, true] {
            let guard = BrokenByPanic(shared.clone());
            let thread = std::thread::spawn(move || {
                let _guard = guard;
                assert!(!panics, "as the test wants");
            });
            assert_eq!((thread.join().is_err(), shared.broken.lock().is_some()), (panics, panics));
        }
    }
}
