//! A pager whose moves end as soon as they are started, and carry no bytes.

use crate::error::{Error, ErrorKind, Result};
use crate::pager::policy::Policy;
use crate::pager::{Effects, Move, PageRun, Pager, PagerConfig, Purpose, Submitted};

/// The pager, and what it wants done.
#[derive(Debug)]
pub struct AtOnce {
    /// The pager.
    pub pager: Pager,
    /// Moves that were not started yet, and requests that were served.
    pub fx: Effects,
}

impl AtOnce {
    /// A pager without pages, under this policy, which is new.
    pub fn new(config: PagerConfig, policy: Box<dyn Policy>) -> Self {
        Self { pager: Pager::new(config, policy), fx: Effects::default() }
    }

    /// Pins these pages as a unit. `moved` is told of each move.
    ///
    /// # Errors
    /// Those of [`Pager::submit`].
    pub fn pin(&mut self, runs: &[PageRun], purpose: Purpose, moved: impl FnMut(&Move)) -> Result<()> {
        let submitted = self.pager.submit(runs, purpose, &mut self.fx)?;
        self.settle(moved);
        let Submitted::Waiting(id) = submitted else { return Ok(()) };
        let at = self.fx.done.iter().position(|(done, _)| *done == id);
        let (_, result) = at.map(|at| self.fx.done.swap_remove(at)).ok_or_else(|| {
            Error::new(ErrorKind::Internal, "a simulated request was not served").remedy("report this as a bug")
        })?;
        result.map(drop)
    }

    /// The words of these pages were unpinned. `wanted` if somebody waits for one of them.
    pub fn unpinned(&mut self, runs: &[PageRun], wanted: bool, moved: impl FnMut(&Move)) {
        if wanted {
            self.pager.released(runs, &mut self.fx);
        }
        self.settle(moved);
    }

    /// Ends every move that was started.
    pub fn settle(&mut self, mut moved: impl FnMut(&Move)) {
        loop {
            let moves = std::mem::take(&mut self.fx.moves);
            self.fx.protect.clear();
            self.fx.raised.clear();
            if moves.is_empty() {
                return;
            }
            for movement in moves {
                moved(&movement);
                self.pager.complete(movement.id, Ok(()), &mut self.fx);
            }
        }
    }
}
