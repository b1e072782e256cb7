//! A commit on a thread of its own.

use std::thread::{self, JoinHandle};

use outcore::durable::{Durable, Generation};
use outcore::{Error, ErrorKind, Result};
use serde_json::Value;

/// A commit that is under way. Whoever drops it waits for its end.
#[derive(Debug)]
pub(crate) struct Committing {
    /// What the program said with it.
    program: Value,
    thread: Option<JoinHandle<Result<Generation>>>,
}

impl Committing {
    /// Begins the commit of a folder whose note is set; `None` where the system has no thread for it.
    pub fn begin(folder: &Durable, program: &Value) -> Option<Self> {
        let folder = folder.clone();
        let commit = move || folder.commit();
        let thread = thread::Builder::new().name("outcore-commit".into()).spawn(commit).ok()?;
        Some(Self { program: program.clone(), thread: Some(thread) })
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// Those of [`Durable::commit`].
    pub fn end(mut self) -> Result<(Generation, Value)> {
        let outcome = self.thread.take().and_then(|thread| thread.join().ok()).unwrap_or_else(|| {
            Err(Error::new(ErrorKind::Internal, "the thread of a commit panicked").remedy("report this as a bug"))
        });
        outcome.map(|generation| (generation, std::mem::take(&mut self.program)))
    }
}

impl Drop for Committing {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
