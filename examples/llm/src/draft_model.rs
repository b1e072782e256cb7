//! Drafts by a small model: what it would say is verified by a large one in one pass (Leviathan et al., Fast Inference
//! from Transformers via Speculative Decoding, 2023). Here it drafts greedily, and a drafted token holds if it is the
//! one that the large model's sampler chooses: so answers are the same with and without.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use outcore::{Bytes, ErrorKind};

use crate::budget::{Working, keys_values};
use crate::config::Config;
use crate::dtype::KvType;
use crate::error::{Error, Result};
use crate::files::ModelFiles;
use crate::model::{Model, Options, Session};
use crate::plain::PlainWeights;
use crate::pool::Pool;
use crate::sampler::argmax;
use crate::tokenizer::Tokenizer;

/// Most tokens of one of its passes: it reads a prompt in several.
const PASS: usize = 64;
/// Vocabularies of one tokenizer may differ by so many tokens at their ends: those only pad a matrix.
const PADDING: usize = 128;
/// A draft has at most one part in so many of what a session has room for.
const DRAFT_PART: usize = 4;
/// A pass of at most so many tokens takes about as long as one of one.
const FEW: usize = 4;

/// A draft model whose weights have not been read yet.
#[derive(Debug)]
pub struct DraftFiles {
    path: PathBuf,
    files: ModelFiles,
    config: Config,
    vocab: usize,
    threads: usize,
    window: usize,
}

impl DraftFiles {
    /// Opens a model that drafts for one with the tokenizer `large`, of `vocab` tokens. `threads` compute it; 0 means
    /// one a core. Its sessions see the last `window` tokens at most.
    ///
    /// # Errors
    /// As for [`ModelFiles::open`] and [`Tokenizer::load`]; `InvalidArgument` if a token has another text than in
    /// `large`.
    pub fn open(
        path: impl AsRef<Path>,
        (large, vocab): (&Tokenizer, usize),
        threads: usize,
        window: usize,
    ) -> Result<Self> {
        let path = path.as_ref();
        let files = ModelFiles::open(path)?;
        let config = Config::new(&files)?;
        let own = Tokenizer::load(&files)?;
        let of = |tokenizer: &Tokenizer, id: u32| format!("{:?}", tokenizer.token(id).unwrap_or_default());
        let both = own.vocab().min(large.vocab()) as u32;
        let differs = match (0..both).find(|id| own.token(*id) != large.token(*id)) {
            Some(id) => Some(format!("token {id} is {} and {} there", of(&own, id), of(large, id))),
            None if own.vocab().abs_diff(large.vocab()) > PADDING => {
                Some(format!("it has {} tokens and the model {}", own.vocab(), large.vocab()))
            }
            None => None,
        };
        if let Some(differs) = differs {
            let what = format!("the draft model {} has another vocabulary than the model: {differs}", path.display());
            let error = outcore::Error::new(ErrorKind::InvalidArgument, what);
            return Err(error.remedy("choose a smaller model of the same family, or leave --draft-model out").into());
        }
        let window = window.min(config.context);
        Ok(Self { path: path.to_owned(), vocab: vocab.min(config.vocab), files, config, threads, window })
    }

    /// The memory that it takes, with so many sessions at a time.
    pub fn memory(&self, sessions: usize) -> Bytes {
        let weights = self.files.header().files.iter().fold(Bytes::ZERO, |sum, file| sum + Bytes::new(file.len));
        let threads = Pool::threads_for(self.threads);
        let working = Working::of(&self.config, self.window, 0, KvType::F16, PASS, threads);
        let keys = keys_values(&self.config, self.window, KvType::F16).get().saturating_mul(sessions as u64);
        weights + working.bytes(PASS) + Bytes::new(keys)
    }

    /// What is said where there is no room for so many sessions of it, in place of `error`.
    pub fn no_room(&self, sessions: usize, error: outcore::Error) -> Error {
        if !matches!(error.kind(), ErrorKind::BudgetTooSmall | ErrorKind::OutOfMemory) {
            return error.into();
        }
        let what =
            format!("the draft model {} takes {} of memory: {error}", self.path.display(), self.memory(sessions));
        let remedy = "choose a smaller draft model, leave --draft-model out, or give more --memory";
        outcore::Error::new(error.kind(), what).remedy(remedy).into()
    }

    /// Reads its weights into memory, where they stay.
    ///
    /// # Errors
    /// As for [`PlainWeights::read`] and [`Model::load`].
    pub fn load(self) -> Result<DraftModel> {
        let weights = Arc::new(PlainWeights::read(&self.files)?);
        let options = Options { threads: self.threads, ..Options::default() };
        let model = Arc::new(Model::load(&self.files, weights, options)?);
        Ok(DraftModel { model, vocab: self.vocab, window: self.window })
    }
}

/// A small model that drafts for a large one. Its weights are in memory.
#[derive(Debug)]
pub struct DraftModel {
    model: Arc<Model>,
    /// Tokens that both models have.
    vocab: usize,
    window: usize,
}

impl DraftModel {
    /// Drafts for one sequence.
    ///
    /// # Errors
    /// As for [`Session::new`].
    pub fn begin(&self) -> Result<DraftSession> {
        let session = Session::new(self.model.clone(), self.window, KvType::F16)?;
        Ok(DraftSession { session, vocab: self.vocab, first: 0, read: Vec::new(), seconds: 0.0 })
    }
}

/// What a draft model has read of one sequence: its last tokens, where the sequence is longer than the window.
#[derive(Debug)]
pub struct DraftSession {
    session: Session,
    vocab: usize,
    /// The first token of the sequence that it has read.
    first: usize,
    /// What it has read, drafts included.
    read: Vec<u32>,
    seconds: f64,
}

impl DraftSession {
    /// What a drafted token takes, in seconds, by the last one; 0 before.
    pub fn seconds(&self) -> f64 {
        self.seconds
    }

    /// Drafts up to `most` tokens that follow `tokens`: the likeliest ones. `tokens` are those of earlier calls, as far
    /// as they held, and more.
    ///
    /// # Errors
    /// None in sound models; drafts are then gone without.
    pub fn draft(&mut self, tokens: &[u32], most: usize) -> Result<Vec<u32>> {
        let window = self.session.capacity();
        let most = most.min(window / DRAFT_PART);
        if most == 0 || tokens.is_empty() || tokens.iter().any(|token| *token as usize >= self.vocab) {
            return Ok(Vec::new());
        }
        if tokens.len() <= self.first || tokens.len() - self.first + most > window {
            // It goes on with half of what it has room for, so that this is seldom.
            self.first = tokens.len().saturating_sub(window / 2);
            self.keep(0)?;
        }
        let tokens = &tokens[self.first..];
        // The last one is always read again: its logits are wanted.
        let same = tokens.iter().zip(&self.read).take_while(|(one, other)| one == other).count();
        self.keep(same.min(tokens.len() - 1))?;
        let mut logits = Vec::new();
        for part in tokens[self.read.len()..].chunks(PASS) {
            logits = self.pass(part)?;
        }
        let mut draft = Vec::with_capacity(most);
        loop {
            let next = argmax(&logits[..self.vocab.min(logits.len())]);
            draft.push(next);
            if draft.len() >= most {
                return Ok(draft);
            }
            logits = self.pass(&[next])?;
        }
    }

    /// Forgets all but the first `len` tokens that it has read.
    fn keep(&mut self, len: usize) -> Result<()> {
        self.read.truncate(len);
        self.session.truncate(len)
    }

    fn pass(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let logits = self.session.forward(tokens)?;
        self.read.extend_from_slice(tokens);
        if tokens.len() <= FEW {
            self.seconds = self.session.last_pass().total.as_secs_f64();
        }
        Ok(logits)
    }
}
