//! What guards and requests hold of their scope and of their walker.

use std::sync::Arc;

use crate::engine::Engine;
use crate::ids::{ScopeId, WalkerId};
use crate::pager::pin::Words;
use crate::pager::{Holdings, PageRun, Purpose};
use crate::shared::Shared;

/// A walker that has begun. It ends when the last reference is dropped.
#[derive(Debug)]
pub(crate) struct Walking {
    pub(super) id: WalkerId,
    pub(super) shared: Arc<Shared>,
}

impl Drop for Walking {
    fn drop(&mut self) {
        self.shared.engine.with(|pager, fx| pager.end_walker(self.id, fx));
    }
}

/// The part of a scope that its guards share.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) id: ScopeId,
    pub(crate) holdings: Arc<Holdings>,
    pub(super) shared: Arc<Shared>,
}

impl Member {
    /// What it holds. `None` in a child by `fork`: its guards are copies there, its pins are the parent's, and a thread
    /// that the child does not have may hold the lock.
    #[inline]
    pub(super) fn holdings(&self) -> Option<&Holdings> {
        self.shared.engine.is_at_home().then_some(&*self.holdings)
    }

    /// How many pages it has pinned. 0 in a child by `fork`.
    pub(super) fn pages(&self) -> u32 {
        self.holdings().map_or(0, Holdings::pages)
    }

    /// Pins resident pages without the latch, and notes that the scope holds them. `runs` are the runs of `words`.
    pub(super) fn try_pin(
        &self,
        engine: &Engine,
        words: &[Words<'_>],
        runs: &[PageRun],
        (purpose, walker): (Purpose, WalkerId),
    ) -> bool {
        let asked: u32 = runs.iter().map(|run| run.count).sum();
        // More than the scope was opened for is an error; the pager words it.
        if !self.holdings.claim(asked) {
            return false;
        }
        if !engine.try_pin(words, purpose, walker) {
            self.holdings.unclaim(asked);
            return false;
        }
        if self.holdings.add(runs, purpose == Purpose::Write) {
            engine.with(|pager, fx| pager.holds_more(self.id, fx));
        }
        true
    }
}
