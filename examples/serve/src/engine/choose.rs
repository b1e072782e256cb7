//! Which tokens follow an answer, by what a pass gave for it.

use std::time::{Duration, Instant};

use outcore_llm::{Config, Passes, Sampler, Tokenizer};

use super::answer::{Answer, Turn};
use super::{End, LogProbs, Token};
use crate::error::ApiError;
use crate::grammar::Grammar;

/// A turn of an answer, with what the pass gave for it.
pub(super) struct Given<'a, P: Passes> {
    pub answer: &'a mut Answer<P>,
    pub turn: &'a Turn,
    pub logits: &'a [f32],
    pub chosen: Chosen,
}

/// What follows an answer.
#[derive(Default)]
pub(super) struct Chosen {
    pub tokens: Vec<Token>,
    /// How many of the drafted tokens are among them.
    pub right: usize,
    pub ended: Option<End>,
    /// The last of the tokens is the model's end, which has no text.
    pub by_token: bool,
    /// Why it cannot go on, if it cannot.
    pub failed: Option<ApiError>,
    /// What finding the allowed tokens took, for each of `tokens`; nothing if all are allowed.
    pub masks: Vec<Duration>,
}

impl<P: Passes> Given<'_, P> {
    /// Chooses tokens, up to the first one behind which something else was drafted, or nothing.
    pub fn choose(&mut self, config: &Config, tokenizer: &Tokenizer) {
        let Config { vocab, context, .. } = *config;
        let (prompt, turn, chosen) = (self.answer.prompt, self.turn, &mut self.chosen);
        let read = self.answer.read();
        if let Some(embedding) = &mut self.answer.job.embedding {
            embedding.add(read - turn.input.len(), self.logits, config.dim);
            chosen.ended = (read == prompt).then_some(End::Stop);
            return;
        }
        let job = &mut self.answer.job;
        for (nth, row) in self.logits.chunks_exact(vocab).enumerate() {
            let id = match &mut job.grammar {
                None => job.sampler.sample(row),
                Some(grammar) => match choose_among(grammar, &mut job.sampler, row, &mut chosen.masks) {
                    Ok(id) => id,
                    Err(error) => {
                        chosen.failed = Some(error);
                        return;
                    }
                },
            };
            chosen.tokens.push(Token { id, logprobs: job.logprobs.map(|most| logprobs(row, id, most)) });
            let whole = self.answer.tokens.len() + chosen.tokens.len();
            if !job.ignore_end && tokenizer.is_end(id) {
                chosen.ended = Some(End::Stop);
                chosen.by_token = true;
            } else if job.grammar.as_ref().is_some_and(Grammar::is_over) {
                chosen.ended = Some(End::Stop);
            } else if whole - prompt >= job.most || whole >= context {
                chosen.ended = Some(End::Length);
            }
            if chosen.ended.is_some() || nth >= turn.drafted || turn.draft[nth] != id {
                return;
            }
            chosen.right = nth + 1;
        }
    }
}

/// The next token, of those that the grammar allows.
fn choose_among(
    grammar: &mut Grammar,
    sampler: &mut Sampler,
    row: &[f32],
    masks: &mut Vec<Duration>,
) -> Result<u32, ApiError> {
    let since = Instant::now();
    let mask = grammar.mask()?;
    masks.push(since.elapsed());
    // A grammar that allows a token allows one that the model has.
    let id = sampler.sample_among(row, &|id| mask.allows(id)).unwrap_or_default();
    grammar.push(id)?;
    Ok(id)
}

/// The logarithms of the probabilities of `id` and of the `most` likeliest tokens.
fn logprobs(logits: &[f32], id: u32, most: usize) -> LogProbs {
    let peak = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - peak).exp()).sum();
    let log_sum = sum.ln() as f32 + peak;
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let likelier = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let most = most.min(order.len());
    if most > 0 && most < order.len() {
        order.select_nth_unstable_by(most - 1, likelier);
    }
    order.truncate(most);
    order.sort_unstable_by(likelier);
    let of = |id: u32| logits.get(id as usize).map_or(f32::NEG_INFINITY, |logit| logit - log_sum);
    LogProbs { chosen: of(id), top: order.into_iter().map(|id| (id, of(id))).collect() }
}
