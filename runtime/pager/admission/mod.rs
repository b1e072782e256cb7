//! Admission: who may use which pages, and who waits.
//!
//! It holds the requests, the lines that they stand in, and the scopes. It has residency pin, fill and evict pages, and
//! [hears](Admission::hear) from it what has happened.

mod admit;
mod check;
mod line;
mod lines;
mod overdue;
mod purses;
mod refuse;
mod request;
mod requests;
pub mod scope;
mod scopes;
mod waiting;

pub(crate) use admit::earlier;
pub use line::PASSES_MAX;

#[doc(hidden)]
pub use requests::closing;
pub use waiting::{Holder, Waiter, WaitsFor, WhoWaits};

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use line::{FrameLine, Line};
use request::Request;
use scope::Scope;
use slab::Slab;

use crate::effects::Effects;
use crate::error::Error;
use crate::ids::{PageId, RequestId, ScopeId};
use crate::pin::Gate;
use crate::residency::{Change, Kept, Residency};
use crate::stats::PagerStats;

/// Who may use which pages, and who waits.
#[derive(Debug, Default)]
pub(crate) struct Admission {
    requests: Slab<Request>,
    /// Requests that wait for frames.
    frame_line: FrameLine,
    /// Requests that wait for pages, by page. No line here is empty.
    page_lines: HashMap<PageId, Line>,
    /// Pages whose lines are to be served, because something has happened to them.
    moved: Vec<PageId>,
    /// Requests to try again wherever they stand: their scopes have got the first pin, or have got or given up what
    /// they reserve, so that these requests are served differently from now on.
    nearly: Vec<RequestId>,
    /// Scopes whose purses are to be served: a frame has come, or one of their requests wants fewer.
    filled: Vec<ScopeId>,
    /// Whether the line for frames is to be served: there may be more frames than when it was last served, or a request
    /// in it wants fewer or has left.
    eased: bool,
    /// How many times a request was looked at to see whether it can go on.
    looks: u64,
    /// Closed while a request waits for frames.
    gate: Arc<Gate>,
    scopes: Slab<Scope>,
    /// Frames set aside for scopes that declared them and have not spent them: the sum of all purses.
    purses: u32,
    /// Frames on their way to purses.
    coming: u32,
    /// The scopes to whose purses these frames go, by key.
    coming_to: BTreeSet<usize>,
    /// Frames owed to purses.
    owed: u32,
    /// The scopes to whose purses they are owed, by key.
    owed_to: BTreeSet<usize>,
    /// Frames that open scopes have declared, spent or not.
    declared: u32,
    /// Frames kept for requests that can never be refused.
    floor: u32,
    /// Requests that wait for the device tier to shrink to its budget.
    shrinking: Vec<RequestId>,
    next_age: u64,
    /// How often a waiting request may be passed.
    passes: u32,
    /// Requests that stand in a line.
    standing: usize,
    next_serial: u32,
    /// How many runs of live requests there are, by segment.
    by_segment: Vec<u32>,
    /// A buffer that [`hear`](Self::hear) exchanges for residency's list of changes, so that neither allocates a new
    /// one. Empty between calls.
    heard: VecDeque<Change>,
    stats: PagerStats,
}

impl Admission {
    /// Nobody waits.
    pub(crate) fn new() -> Self {
        Self { passes: PASSES_MAX, ..Self::default() }
    }

    /// Replaces the bound [`PASSES_MAX`].
    pub(crate) fn set_passes(&mut self, passes: u32) {
        self.passes = passes;
    }

    /// The gate: it tells pins whether a request waits for frames.
    pub(crate) fn gate(&self) -> Arc<Gate> {
        self.gate.clone()
    }

    /// The counters of requests.
    pub(crate) fn stats(&self) -> PagerStats {
        self.stats
    }

    /// What residency must keep of the device frames.
    pub(crate) fn kept(&self) -> Kept {
        Kept {
            purses: self.purses,
            coming: self.coming,
            floor: self.floor,
            least: if self.declared > 0 { self.declared + self.floor } else { 0 },
            shrinks: !self.shrinking.is_empty(),
        }
    }

    /// There may be more frames.
    pub(crate) fn ease(&mut self) {
        self.eased = true;
    }

    /// Acts on what has happened in residency.
    pub(crate) fn hear(&mut self, res: &mut Residency, fx: &mut Effects) {
        let (mut changes, eased) = res.take_changes(std::mem::take(&mut self.heard));
        self.eased |= eased;
        for change in changes.drain(..) {
            match change {
                Change::Page(page) => self.moved.push(page),
                Change::Ready(id, taken) => self.page_ready(res, id, taken, fx),
                Change::Taken(id) => self.page_taken(res, id, fx),
                Change::Untaken(id) => self.untake(id),
                Change::Ended(id, error) => self.end(res, id, error, fx),
            }
        }
        self.heard = changes;
    }

    /// Whether requests stand in the line for frames.
    pub(crate) fn wants_frames(&self) -> bool {
        !self.frame_line.line.is_empty()
    }

    /// How many frames are wanted beside those for demanded pages. `usize::MAX` if it is not known.
    pub(crate) fn wanted_beside(&self) -> usize {
        if self.frame_line.line.is_empty() && self.page_lines.is_empty() && self.shrinking.is_empty() {
            (self.coming + self.owed) as usize
        } else {
            usize::MAX
        }
    }

    /// Whether a request may go on that was not tried since.
    pub(crate) fn is_stirred(&self) -> bool {
        self.is_called() || self.eased && self.wants_frames()
    }

    fn is_called(&self) -> bool {
        !(self.moved.is_empty() && self.nearly.is_empty() && self.filled.is_empty())
    }

    /// Stops debug and `strict` builds if somebody who may go on was not tried.
    pub(crate) fn has_served(&self, res: &Residency) {
        invariant!(!self.is_called(), "somebody who may go on was not tried");
        invariant!(self.gate.is_closed() == self.wants_frames(), "the gate does not say who waits for frames");
        let free = res.frames().free;
        invariant!(free <= self.purses || !res.awaits_frames(), "a page awaits a frame that is free");
        invariant!(self.purses <= free, "what was set aside is not there");
        invariant!(free <= self.purses || self.coming == 0, "a purse awaits a frame that is free");
    }

    /// Ends the requests that wait for the device tier to fit its budget.
    pub(crate) fn end_shrinking(&mut self, error: Option<&Error>, fx: &mut Effects) {
        for id in std::mem::take(&mut self.shrinking) {
            self.finish(id, error.cloned().map_or(Ok(crate::granted::Granted::default()), Err), fx);
        }
    }
}
