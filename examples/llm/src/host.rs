//! Passes on this machine's processor, as programs ask for them.

use std::sync::Arc;
use std::time::Instant;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::model::{Model, Session};
use crate::paged_kv::PagedKeys;
use crate::passes::{AnySession, Logits, Output, Part, PassError, PassTime, Passes};

impl Passes for Model {
    type Session = Session;

    fn config(&self) -> &Config {
        self.config()
    }

    /// Room for activations is taken as passes need it, whatever `pass` is.
    fn begin(self: &Arc<Self>, keys: PagedKeys, _pass: usize) -> Result<Session> {
        Session::paged(self.clone(), keys)
    }

    fn pass(
        self: &Arc<Self>,
        parts: &mut [Part<'_, Session>],
    ) -> std::result::Result<(Vec<Output>, PassTime), PassError> {
        let (started, vocab) = (Instant::now(), self.config().vocab);
        let no_logits = |part: &Part<'_, Session>| part.logits.is_hidden() && part.sampler.is_some();
        if let Some(nth) = parts.iter().position(no_logits) {
            let what = "no token can be chosen by hidden states: give the part no sampler, or ask for its logits";
            return Err(PassError { part: Some(nth), error: Error::Invalid(what.into()) });
        }
        let (logits, waited) = self.forward_together(parts)?;
        // Choosing is not part of it, as on a GPU whose logits the host has to look at.
        let time = PassTime { total: started.elapsed(), waited };
        let output = |(part, logits): (&mut Part<'_, Session>, Vec<f32>)| {
            let next =
                part.sampler.as_mut().map(|sampler| sampler.sample(&logits[logits.len().saturating_sub(vocab)..]));
            Output { logits: if part.logits == Logits::None { Vec::new() } else { logits }, next }
        };
        Ok((parts.iter_mut().zip(logits).map(output).collect(), time))
    }

    fn for_each<T: Send>(&self, items: &mut [T], work: impl Fn(&mut T) + Sync) {
        self.pool().run_chunks(items, 1, |_, items| items.iter_mut().for_each(&work));
    }
}

impl AnySession for Session {
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
}
