//! Passes on a GPU, as programs ask for them.

use std::sync::Arc;

use outcore::ErrorKind;

use super::session::{CudaModel, CudaSession};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::paged_kv::PagedKeys;
use crate::passes::{AnySession, Logits, Output, Part, PassCounts, PassError, PassTime, Passes};
use crate::sampler::Sampler;

fn unsupported(what: String, remedy: &str) -> Error {
    outcore::Error::new(ErrorKind::Unsupported, what).remedy(remedy).into()
}

impl Passes for CudaModel {
    type Session = CudaSession;

    fn config(&self) -> &Config {
        self.config()
    }

    fn begin(self: &Arc<Self>, keys: PagedKeys, pass: usize) -> Result<CudaSession> {
        CudaSession::paged(self.clone(), keys, pass)
    }

    /// A pass of one session, with the logits after its last token at most. A part of more tokens than the session's
    /// passes have is read in several.
    fn pass(
        self: &Arc<Self>,
        parts: &mut [Part<'_, CudaSession>],
    ) -> std::result::Result<(Vec<Output>, PassTime), PassError> {
        let [Part { session, tokens, logits, sampler }] = parts else {
            let what = format!("a pass of {} sequences is not supported on a GPU", parts.len());
            return Err(unsupported(what, "read each sequence in a pass of its own, or use --device host").into());
        };
        let failed = |error| PassError { part: Some(0), error };
        if !Arc::ptr_eq(session.model(), self) {
            return Err(failed(Error::Invalid("a session of another model, in a pass of this one".into())));
        }
        if logits.is_hidden() {
            let what = "the hidden states of tokens are not supported on a GPU".into();
            return Err(failed(unsupported(what, "ask for logits, or use --device host")));
        }
        if *logits == Logits::All && tokens.len() > 1 {
            let what = format!("the logits after each of {} tokens of a pass are not supported on a GPU", tokens.len());
            return Err(failed(unsupported(what, "ask for those after the last token, or use --device host")));
        }
        let before = session.len();
        match output(session, tokens, *logits, sampler.as_deref_mut()) {
            Ok(output) => Ok((vec![output], session.last_pass())),
            Err(error) => {
                // Where the tokens were read, and choosing one failed.
                if session.len() > before {
                    session.truncate(before).map_err(failed)?;
                }
                Err(failed(error))
            }
        }
    }
}

fn output(session: &mut CudaSession, tokens: &[u32], logits: Logits, sampler: Option<&mut Sampler>) -> Result<Output> {
    let mut output = Output::default();
    match (logits, sampler) {
        (Logits::None, None) => session.read(tokens)?,
        // Nothing waits for the logits, and none are copied.
        (Logits::None, Some(sampler)) => output.next = Some(session.next(tokens, sampler)?),
        (_, sampler) => {
            output.logits = session.forward(tokens)?.to_vec();
            output.next = sampler.map(|sampler| session.sample(sampler)).transpose()?;
        }
    }
    Ok(output)
}

impl AnySession for CudaSession {
    fn len(&self) -> usize {
        self.len()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.truncate(len)
    }

    fn park(&mut self) -> Result<()> {
        self.park()
    }

    fn paged_keys(&self) -> Option<&PagedKeys> {
        self.paged_keys()
    }

    fn counts(&self) -> Option<PassCounts> {
        Some(self.counts())
    }
}
