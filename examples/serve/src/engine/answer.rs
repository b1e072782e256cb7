//! An answer while it waits and is written, and its turn in a pass.

use std::mem::take;
use std::time::Instant;

use outcore_kv::Permit;
use outcore_llm::drafts::{DraftBy, Drafts};
use outcore_llm::{AnySession, DraftSession, Logits, Passes};

use super::{Drafter, End, Event, Job};
use crate::error::ApiError;

/// An answer, waiting or active.
pub(super) struct Answer<P: Passes> {
    /// Its prompt is the beginning of `tokens`.
    pub job: Job,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// The prompt, and what was written.
    pub tokens: Vec<u32>,
    /// Its keys and values: while it is active, and while it is parked.
    pub session: Option<P::Session>,
    pub permit: Option<Permit>,
    /// Whether looking up pays.
    pub drafts: Drafts,
    /// What the draft model has read of it, while it is active and one of those that are drafted for.
    pub drafted: Option<DraftSession>,
    /// Whether its drafts pay.
    pub model_drafts: Drafts,
    /// When it became active: larger is later.
    pub nth: u64,
    /// It needs more than there is room for beside anybody else: it is active when nobody else is.
    pub alone: bool,
    /// The tokens that its tenant's turn was taken to be, once it has begun.
    pub charged: Option<u64>,
    /// Why it has all its tokens, if it has.
    pub ended: Option<End>,
    /// Why it cannot go on, if it cannot.
    pub failed: Option<ApiError>,
    /// When its last token came.
    pub last: Option<Instant>,
}

impl<P: Passes> Answer<P> {
    pub fn new(mut job: Job) -> Self {
        let tokens = take(&mut job.prompt);
        Self {
            job,
            prompt: tokens.len(),
            tokens,
            session: None,
            permit: None,
            drafts: Drafts::default(),
            drafted: None,
            model_drafts: Drafts::default(),
            nth: 0,
            alone: false,
            charged: None,
            ended: None,
            failed: None,
            last: None,
        }
    }

    pub fn written(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// Tokens whose keys and values are there.
    pub fn read(&self) -> usize {
        self.session.as_ref().map_or(0, AnySession::len)
    }

    pub fn is_decoding(&self) -> bool {
        self.job.embedding.is_none() && self.read() + 1 == self.tokens.len()
    }

    /// Whether nobody waits for it any more.
    pub fn is_over(&self, now: Instant) -> bool {
        self.job.deadline <= now || self.job.sink.is_over()
    }

    pub fn send(&self, event: Event) {
        self.job.sink.send(event);
    }

    pub fn drafts_by(&mut self, by: DraftBy) -> &mut Drafts {
        match by {
            DraftBy::Lookup => &mut self.drafts,
            DraftBy::SmallModel => &mut self.model_drafts,
        }
    }

    /// What the draft model says next, up to `most` tokens, as far as that pays: `worth` says what a drafted token
    /// costs, by the seconds that drafting it takes. Begins one of the `sessions` that may still begin, if it has none.
    pub fn draft(
        &mut self,
        drafter: &Drafter,
        most: usize,
        worth: &dyn Fn(f64) -> f64,
        sessions: &mut usize,
    ) -> Vec<u32> {
        let drafting = self.drafted.as_ref().map_or(0.0, DraftSession::seconds);
        let pays = self.model_drafts.pay(most.min(drafter.tokens), worth(drafting));
        if pays == 0 || (self.drafted.is_none() && *sessions == 0) {
            return Vec::new();
        }
        let made = match self.drafted.take() {
            Some(session) => Ok(session),
            None => {
                *sessions -= 1;
                drafter.model.begin()
            }
        };
        let made = made.and_then(|mut session| Ok((session.draft(&self.tokens, pays)?, session)));
        match made {
            Ok((made, session)) => {
                self.drafted = Some(session);
                made
            }
            Err(error) => {
                tracing::warn!(error = error.in_full(), "nothing was drafted for an answer");
                Vec::new()
            }
        }
    }
}

/// What an answer does in a pass.
pub(super) struct Turn {
    /// Its place among those that run.
    pub at: usize,
    pub input: Vec<u32>,
    /// What follows the last token, perhaps; as much of it as pays is part of the input.
    pub draft: Vec<u32>,
    pub drafted: usize,
    pub by: DraftBy,
    pub logits: Logits,
}

impl Turn {
    /// Behind how many of its tokens there are logits, or hidden states, which are taken to be as long.
    pub fn rows(&self) -> usize {
        match self.logits {
            Logits::None => 0,
            Logits::Last | Logits::HiddenLast => 1,
            Logits::All | Logits::HiddenAll => self.input.len(),
        }
    }
}
