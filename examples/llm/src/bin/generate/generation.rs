//! Passes over a model, one for each token, whoever computes them.

use std::hash::Hasher;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use outcore::machine::ProcessMemory;
use outcore::stats::Lane;
use outcore::{Bytes, Runtime};
use outcore_lab::sim::CaptureFile;
use outcore_llm::drafts::{DraftBy, Drafts, follow};
use outcore_llm::pace::Pace;
use outcore_llm::{
    AnySession, Decoder, DraftModel, DraftSession, Error, Logits, Part, PassTime, Passes, Result, Sampler, TextStream,
};

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
    /// What drafts, beside the prompt, if drafts are made.
    pub draft_model: Option<&'a DraftModel>,
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
            let drafter = self.draft_model.map(|model| Ok::<_, Error>(Drafter::new(model.begin()?))).transpose()?;
            let mut generation = Generation::new(self, model.clone(), session, capture.take(), progress);
            generation.drafter = drafter;
            generation.run()?;
            let done = generation.finish()?;
            times.push(done.times());
            if times.len() >= self.args.repeat || self.interrupt.asked() {
                return Ok((done, times));
            }
        }
    }
}

/// Makes drafts for a sequence, by looking up and by a draft model, as far as they pay.
struct Drafter {
    session: DraftSession,
    lookup: Drafts,
    model: Drafts,
    pace: Pace,
}

impl Drafter {
    fn new(session: DraftSession) -> Self {
        Self { session, lookup: Drafts::default(), model: Drafts::default(), pace: Pace::default() }
    }

    /// What may follow `tokens`, up to `most` tokens. Looking up comes first: it costs nothing.
    fn draft(&mut self, tokens: &[u32], most: usize) -> Result<(Vec<u32>, DraftBy)> {
        let Some((pass, token)) = self.pace.line() else { return Ok((Vec::new(), DraftBy::Lookup)) };
        let saves = pass + token;
        let mut found = follow(tokens, most);
        found.truncate(self.lookup.pay(found.len(), token / saves));
        if !found.is_empty() {
            return Ok((found, DraftBy::Lookup));
        }
        let pays = self.model.pay(most, (token + self.session.seconds()) / saves);
        Ok((self.session.draft(tokens, pays)?, DraftBy::SmallModel))
    }

    /// Records that `right` of `drafted` tokens were right.
    fn observe(&mut self, by: DraftBy, drafted: usize, right: usize) {
        match by {
            DraftBy::Lookup => self.lookup.observe(drafted, right),
            DraftBy::SmallModel => self.model.observe(drafted, right),
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
    drafter: Option<Drafter>,
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
            drafter: None,
            done: Generated::default(),
        }
    }

    /// Generates until the text ends, there are enough tokens, or the user interrupts.
    fn run(&mut self) -> Result<()> {
        let mut tokens = self.task.prompt.to_vec();
        let most = self.task.args.tokens;
        while self.done.tokens.len() < most && !self.task.interrupt.asked() {
            let read = self.session.len();
            let (draft, by) = match &mut self.drafter {
                // The last token is read, and each draft gives at most one more than it has.
                Some(drafter) if read + 1 == tokens.len() => {
                    let most = most - self.done.tokens.len() - 1;
                    let most = most.min(self.task.args.draft_tokens).min(self.task.pass.saturating_sub(1));
                    let since = Instant::now();
                    let made = drafter.draft(&tokens, most);
                    self.done.drafts.time += since.elapsed();
                    made.unwrap_or_else(|error| {
                        // The large model needs no drafts.
                        tracing::warn!(error = %error.in_full(), "the draft model failed: there are no more drafts");
                        self.drafter = None;
                        (Vec::new(), DraftBy::Lookup)
                    })
                }
                _ => (Vec::new(), DraftBy::Lookup),
            };
            let Some(chosen) = self.tokens(&tokens[read..], &draft, by)? else { break };
            for next in chosen {
                if self.is_end(next) {
                    return Ok(());
                }
                tokens.push(next);
                self.done.tokens.push(next);
                if let Some(stream) = &mut self.stream {
                    let piece = stream.push(next);
                    self.say(&piece)?;
                }
            }
        }
        Ok(())
    }

    fn is_end(&self, token: u32) -> bool {
        self.task.decoder.is_some_and(|decoder| decoder.is_end(token))
    }

    /// Reads `input` and what may follow it, and chooses the next tokens, up to the first one behind which something
    /// else was drafted, or nothing; `None` if a pass was given up. A long prompt is read in several passes; the logits
    /// after its last token are the ones that count.
    fn tokens(&mut self, input: &[u32], draft: &[u32], by: DraftBy) -> Result<Option<Vec<u32>>> {
        let (start, counts, before) = (Instant::now(), self.session.counts(), self.session.len());
        let (mut pass, mut chosen) = (PassTime::default(), Vec::new());
        let whole = [input, draft].concat();
        let mut chunks = whole.chunks(self.task.pass).peekable();
        while let Some(tokens) = chunks.next() {
            let since = Instant::now();
            let is_last = chunks.peek().is_none();
            let (logits, chooses) = match (is_last, draft) {
                (true, [_, ..]) => (Logits::All, false),
                (true, []) if self.hash.is_some() => (Logits::Last, true),
                (is_last, _) => (Logits::None, is_last),
            };
            let sampler = chooses.then_some(&mut self.sampler);
            let part = Part { session: &mut self.session, tokens, logits, sampler };
            let (outputs, took) = match self.model.pass(&mut [part]).map_err(|failed| failed.error) {
                Err(Error::Cancelled) => return Ok(None),
                done => done?,
            };
            for output in outputs {
                match output.next {
                    Some(next) => {
                        self.hash_logits(&output.logits);
                        chosen.push(next);
                    }
                    None => chosen.extend(self.choose(&output.logits, draft)),
                }
            }
            self.progress.take();
            if let Some(capture) = &mut self.capture {
                capture.pass(self.task.runtime)?;
            }
            self.task.runtime.observe().add_span(Lane::Compute, "pass", since, since + took.total);
            pass = PassTime { total: pass.total + took.total, waited: pass.waited + took.waited };
            if let Some(drafter) = &mut self.drafter {
                drafter.pace.observe(tokens.len(), took.total.as_secs_f64());
            }
        }
        let right = chosen.len().saturating_sub(1);
        if right < draft.len() {
            self.session.truncate(before + input.len() + right)?;
        }
        if let Some(drafter) = &mut self.drafter {
            drafter.observe(by, draft.len(), right);
        }
        let done = &mut self.done;
        done.drafts.count(by, draft.len(), right);
        (done.total, done.waited) = (done.total + pass.total, done.waited + pass.waited);
        if done.tokens.is_empty() {
            done.first_token = start.elapsed();
            tracing::info!(after = ?done.first_token, "first token");
        } else {
            done.passes.push(pass.total);
            done.later += chosen.len();
            if let (Some(now), Some(before)) = (self.session.counts(), counts) {
                done.counts = done.counts + (now - before);
            }
        }
        Ok(Some(chosen))
    }

    /// The tokens that follow a token and a draft behind it, by the logits after each of them: those of the draft as
    /// far as the same ones would have been chosen without it, and one more. The sampler, and the hash, meet the logits
    /// that they would have met then.
    fn choose(&mut self, logits: &[f32], draft: &[u32]) -> Vec<u32> {
        let mut chosen = Vec::new();
        let vocab = self.model.config().vocab.max(1);
        for (nth, row) in logits.chunks_exact(vocab).enumerate() {
            self.hash_logits(row);
            let next = self.sampler.sample(row);
            chosen.push(next);
            if draft.get(nth) != Some(&next) || self.is_end(next) {
                break;
            }
        }
        chosen
    }

    fn hash_logits(&mut self, logits: &[f32]) {
        if let Some(hash) = &mut self.hash {
            hash.write(&logits_bytes(logits));
        }
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
