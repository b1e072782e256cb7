//! Passes over a model, one for each token, whoever computes them.

use std::hash::Hasher;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use outcore::machine::ProcessMemory;
use outcore::stats::Lane;
use outcore::{Bytes, Runtime};
use outcore_lab::sim::CaptureFile;
use outcore_llm::{AnySession, Decoder, Error, Logits, Part, PassTime, Passes, Result, Sampler, TextStream};

use crate::args::Args;
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::report::{Generated, Times, write_out};

/// What is generated.
pub struct Task<'a> {
    pub args: &'a Args,
    pub runtime: &'a Runtime,
    pub interrupt: &'a Interrupt,
    pub prompt: &'a [u32],
    /// Turns tokens into text, if the model has a tokenizer.
    pub decoder: Option<&'a Decoder>,
    /// The most tokens of one pass.
    pub pass: usize,
    /// What the first pass reads.
    pub first_pass: Bytes,
}

impl Task<'_> {
    /// Generates as often as `--repeat` says, each time in a session of `model` that `begin` makes. Returns what was
    /// generated last, and how long each time took. `capture` is of the first time.
    pub fn run<P: Passes>(
        &self,
        model: &Arc<P>,
        begin: impl Fn() -> Result<P::Session>,
        mut capture: Option<CaptureFile>,
    ) -> Result<(Generated, Vec<Times>)> {
        let mut times = Vec::new();
        loop {
            let session = begin()?;
            if !self.interrupt.working.swap(true, Ordering::SeqCst) {
                let budget = self.runtime.stats().device.budget;
                tracing::info!(%budget, memory = ?ProcessMemory::now().ok(), "ready");
            }
            let progress = times.is_empty().then(|| Progress::start(self.runtime, self.first_pass));
            let mut generation = Generation::new(self, model.clone(), session, capture.take(), progress);
            generation.run()?;
            let done = generation.finish()?;
            times.push(done.times());
            if times.len() >= self.args.repeat || self.interrupt.asked() {
                return Ok((done, times));
            }
        }
    }
}

/// One time.
struct Generation<'a, P: Passes> {
    task: &'a Task<'a>,
    model: Arc<P>,
    session: P::Session,
    sampler: Sampler,
    capture: Option<CaptureFile>,
    stream: Option<TextStream<'a>>,
    hash: Option<twox_hash::XxHash3_64>,
    progress: Option<Progress>,
    done: Generated,
}

impl<'a, P: Passes> Generation<'a, P> {
    fn new(
        task: &'a Task<'a>,
        model: Arc<P>,
        session: P::Session,
        capture: Option<CaptureFile>,
        progress: Option<Progress>,
    ) -> Self {
        let args = task.args;
        let greedy = args.temperature <= 0.0;
        Self {
            task,
            model,
            session,
            sampler: if greedy { Sampler::greedy() } else { Sampler::new(args.temperature, args.seed) },
            capture,
            stream: task.decoder.map(Decoder::stream),
            hash: args.hashes_logits().then(twox_hash::XxHash3_64::new),
            progress,
            done: Generated::default(),
        }
    }

    /// Generates until the text ends, there are enough tokens, or the user interrupts.
    fn run(&mut self) -> Result<()> {
        let mut input = self.task.prompt.to_vec();
        while self.done.tokens.len() < self.task.args.tokens && !self.task.interrupt.asked() {
            let Some(next) = self.token(&input)? else { break };
            if self.task.decoder.is_some_and(|decoder| decoder.is_end(next)) {
                break;
            }
            self.done.tokens.push(next);
            if let Some(stream) = &mut self.stream {
                let piece = stream.push(next);
                self.say(&piece)?;
            }
            input = vec![next];
        }
        Ok(())
    }

    /// Reads `input` and chooses the next token; `None` if a pass was given up. A long prompt is read in several
    /// passes; the logits after its last token are the ones that count.
    fn token(&mut self, input: &[u32]) -> Result<Option<u32>> {
        let (start, counts) = (Instant::now(), self.session.counts());
        let (mut pass, mut next) = (PassTime::default(), None);
        let mut chunks = input.chunks(self.task.pass).peekable();
        while let Some(tokens) = chunks.next() {
            let since = Instant::now();
            let is_last = chunks.peek().is_none();
            let logits = if is_last && self.hash.is_some() { Logits::Last } else { Logits::None };
            let sampler = is_last.then_some(&mut self.sampler);
            let part = Part { session: &mut self.session, tokens, logits, sampler };
            let (outputs, took) = match self.model.pass(&mut [part]).map_err(|failed| failed.error) {
                Err(Error::Cancelled) => return Ok(None),
                done => done?,
            };
            for output in outputs {
                if let Some(hash) = self.hash.as_mut().filter(|_| is_last) {
                    hash.write(&logits_bytes(&output.logits));
                }
                next = output.next;
            }
            self.progress.take();
            if let Some(capture) = &mut self.capture {
                capture.pass(self.task.runtime)?;
            }
            self.task.runtime.observe().add_span(Lane::Compute, "pass", since, since + took.total);
            pass = PassTime { total: pass.total + took.total, waited: pass.waited + took.waited };
        }
        let done = &mut self.done;
        (done.total, done.waited) = (done.total + pass.total, done.waited + pass.waited);
        if done.tokens.is_empty() {
            done.first_token = start.elapsed();
            tracing::info!(after = ?done.first_token, "first token");
        } else {
            done.passes.push(pass.total);
            if let (Some(now), Some(before)) = (self.session.counts(), counts) {
                done.counts = done.counts + (now - before);
            }
        }
        Ok(next)
    }

    /// Prints text as it comes, unless standard output is for programs.
    fn say(&mut self, piece: &str) -> Result<()> {
        self.done.text.push_str(piece);
        if self.task.args.json { Ok(()) } else { write_out(piece) }
    }

    fn finish(mut self) -> Result<Generated> {
        if let Some(stream) = self.stream.take() {
            let rest = stream.finish();
            self.say(&rest)?;
        }
        if let Some(capture) = self.capture {
            capture.finish(self.task.runtime, self.task.interrupt.asked())?;
        }
        self.done.logits_hash = self.hash.as_ref().map(Hasher::finish);
        Ok(self.done)
    }
}

fn logits_bytes(logits: &[f32]) -> Vec<u8> {
    logits.iter().flat_map(|logit| logit.to_le_bytes()).collect()
}
