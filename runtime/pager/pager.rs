//! The pager: three machines, and what goes between them.
//!
//! - *Residency* knows which page is in which frame, and what moves. It knows no request but by the ids of those that
//!   wait for a fill, and calls nobody.
//! - *Admission* knows the requests, the lines that they stand in, and the scopes.
//! - *Usage* counts who uses which page.
//!
//! # What goes between them
//!
//! Admission has residency act by these calls. With those that may take a frame it says what it has promised of the
//! frames: `Kept`.
//!
//! 1. `reach`: pin or lock a page, if nothing is in the way; `undo` takes that back.
//! 2. `reclaim`: make one more frame free.
//! 3. `fill_for`: have a page filled for a request; `serve_awaiting` gives such fills their frames.
//! 4. `lend`: pin pages whose fills the device has taken up.
//! 5. `begin_write`: let a writer have a page that it has locked.
//! 6. `let_go`: give up a pin, a lock, or the wait for a fill.
//! 7. `set_waited_for`: close a page to pins without the latch, or open it again.
//!
//! Residency answers later by `Change`s, which admission takes after each call: a page in whose line somebody stands
//! has changed, a fill that a request waits for was taken up, has ended or starts anew, there may be more frames. Usage
//! takes `Arrival`s in the same way: a page has become resident, or has left.
//!
//! The other calls only look: how many frames there are, what state a page is in, whether it moves, of which page a
//! move is. The pump here calls both machines in turn.

use std::sync::Arc;

use crate::admission::{Admission, closing, earlier};
use crate::config::PagerConfig;
use crate::effects::Effects;
use crate::error::{Error, Result};
use crate::granted::{Granted, Submitted, WaitCause};
use crate::ids::{FillPoint, FrameId, HostFrameId, MoveId, PageId, RequestId, ScopeId, SegmentClass, SegmentId};
use crate::policy::Policy;
use crate::residency::{Backing, Committed, Residency, Unwritten};
use crate::runs::{PageRun, pages_of};
use crate::scope::{Holdings, ScopeTerms};
use crate::state::{PageWords, State};
use crate::terms::{Purpose, Terms};
use crate::usage::Usage;

/// The state machine. See the [documentation of the crate](crate).
#[derive(Debug)]
pub struct Pager {
    pub(super) residency: Residency,
    pub(super) admission: Admission,
    pub(super) usage: Usage,
}

impl Pager {
    /// A pager with all frames free.
    pub fn new(config: PagerConfig, policy: Box<dyn Policy>) -> Self {
        Self { residency: Residency::new(config, policy), admission: Admission::new(), usage: Usage::new() }
    }

    /// Replaces the bound [`PASSES_MAX`], for tests that follow every sequence.
    #[doc(hidden)]
    pub fn set_passes(&mut self, passes: u32) {
        self.admission.set_passes(passes);
    }

    /// Adds a segment of `pages` pages. Returns its page words too: whoever pins the pages shares them.
    pub fn add_segment(&mut self, backing: Backing, class: SegmentClass, pages: u32) -> (SegmentId, PageWords) {
        let (segment, words) = self.residency.add_segment(backing, class, pages);
        self.usage.add_segment(segment, class, pages, self.residency.numbers());
        (segment, words)
    }

    /// Sets how many bytes of a new segment's last page do not exist.
    pub fn set_tail(&mut self, segment: SegmentId, bytes: u64) {
        self.residency.set_tail(segment, bytes);
    }

    /// Removes a segment that nothing refers to any more. Its frames go back, and it ends when nothing of it is in
    /// flight.
    pub fn remove_segment(&mut self, segment: SegmentId, fx: &mut Effects) {
        self.admission.cancel_all_of(&mut self.residency, segment, fx);
        if self.residency.retire_segment(segment) {
            // Guards and requests keep their segment alive. So nobody has these pins any more.
            self.admission.forget_pins_of(segment);
        }
        self.residency.reap_segment(segment, fx);
        self.pump(fx);
    }

    /// Asks for pins of all these pages as a unit. `runs` must be [normalized](PageRun::normalize).
    ///
    /// # Errors
    /// - `BudgetTooSmall`: the pages can never be resident together, or are more than the scope was opened for.
    /// - `Busy`: the scope holds pins, and others hold what it asks for, or its own pins are in the way.
    /// - `InvalidArgument`: the request can never be refused, and has a scope.
    /// - `Poisoned`: the bytes of a page were lost.
    /// - `Closed`: the pager is closing, or the scope has ended.
    pub fn submit(&mut self, runs: &[PageRun], terms: impl Into<Terms>, fx: &mut Effects) -> Result<Submitted> {
        let terms = terms.into();
        if self.is_closing() {
            return Err(closing());
        }
        self.admission.may_ask(&self.residency, &terms, runs)?;
        let writes = terms.purpose == Purpose::Write;
        self.turn_to(terms.walker);
        let mut cause = WaitCause::None;
        for page in runs.iter().flat_map(|run| run.pages()) {
            let snapshot = self.residency.word(page).load();
            cause = earlier(cause, self.residency.cause_for(page, snapshot.state));
            // Counts only, and tells the policy. Whether the request gets the page is decided by `Residency::reach`.
            if snapshot.is_resident() || snapshot.state == State::Evicting {
                self.used(page, snapshot.fresh, writes, 1);
            } else {
                self.missed(page, snapshot.state, writes);
            }
            if snapshot.state == State::Poisoned {
                self.admission.unclaim(terms.scope, pages_of(runs) as u32);
                return Err(self.residency.lost_error(page));
            }
        }
        self.residency.policy_mut().unit(pages_of(runs) as u32);
        let id = self.admission.ask(runs, terms, cause);
        self.enter(id, fx)
    }

    /// Sets aside the frames that a scope says it needs. Waits in line like a request for as many pages.
    ///
    /// # Errors
    /// - `BudgetTooSmall`: there are never so many frames.
    /// - `Closed`: the pager is closing.
    /// - `InvalidArgument`: the scope was not opened for a number of pages, has pins, has reserved before, or has
    ///   ended.
    pub fn reserve(&mut self, scope: ScopeId, frames: u32, fx: &mut Effects) -> Result<Submitted> {
        if self.is_closing() {
            return Err(closing());
        }
        let id = self.admission.ask_frames(&self.residency, scope, frames)?;
        self.enter(id, fx)
    }

    /// Tries a new request. If it cannot be admitted, it stands in line.
    fn enter(&mut self, id: RequestId, fx: &mut Effects) -> Result<Submitted> {
        // Older requests and pages first get what has become possible meanwhile.
        self.serve_awaiting(fx);
        self.admission.try_new(&mut self.residency, id, fx);
        self.pump(fx);
        // A request that is ready at once is returned here, not listed in the effects.
        if let Some(at) = fx.done.iter().position(|(done, _)| *done == id) {
            let (_, result) = fx.done.swap_remove(at);
            return Ok(Submitted::Ready(result?));
        }
        invariant!(!self.admission.waits_for_a_page_held(&self.residency, id), "{id:?} waits for a holder, and is one");
        Ok(Submitted::Waiting(id))
    }

    /// Waits until the device tier fits its budget.
    pub fn await_budget(&mut self, fx: &mut Effects) -> Submitted {
        if self.residency.fits_budget() {
            return Submitted::Ready(Granted::default());
        }
        let id = self.admission.ask_budget();
        self.discard_again(fx);
        self.pump(fx);
        if let Some(at) = fx.done.iter().position(|(done, _)| *done == id) {
            let _ = fx.done.swap_remove(at);
            return Submitted::Ready(Granted::default());
        }
        Submitted::Waiting(id)
    }

    /// Ends a request that nobody waits for any more. It releases what it holds. Fills under way go on as prefetches.
    pub fn cancel(&mut self, id: RequestId, fx: &mut Effects) {
        self.admission.cancel(&mut self.residency, id, fx);
        self.pump(fx);
    }

    /// Pins of these pages have ended: a writer's, or pins that somebody waits for. Requests in the pages' lines may go
    /// on.
    pub fn released(&mut self, runs: &[PageRun], fx: &mut Effects) {
        for page in runs.iter().flat_map(|run| run.pages()) {
            self.residency.changed(page);
        }
        self.pump(fx);
    }

    /// [`released`](Self::released) for a guard on whose pages its scope had spent `frames` of its purse. Called under
    /// the same hold of the latch that unpins the pages: the frames belong to the scope, so nobody else may get one
    /// before that.
    pub fn unspent(&mut self, id: ScopeId, runs: &[PageRun], frames: u32, fx: &mut Effects) {
        self.admission.unspent(id, runs, frames);
        self.released(runs, fx);
    }

    /// Opens a scope. Returns its id, and the holdings in which its pins are kept. A scope that says how much it needs
    /// must [`reserve`](Self::reserve) it before it pins.
    pub fn open_scope(&mut self, terms: ScopeTerms) -> (ScopeId, Arc<Holdings>) {
        self.admission.open_scope(terms)
    }

    /// Ends a scope. What was set aside for it is free for anybody. Its waiting requests end with `Closed`. Its pins
    /// may outlive it and then count as pins outside of scopes.
    pub fn close_scope(&mut self, id: ScopeId, fx: &mut Effects) {
        self.admission.close_scope(&mut self.residency, id, fx);
        self.pump(fx);
    }

    /// Notes that a waiting scope got more pins without the latch.
    pub fn holds_more(&mut self, id: ScopeId, fx: &mut Effects) {
        self.admission.holds_more(&mut self.residency, id);
        self.pump(fx);
    }

    /// Keeps this many frames for requests that can never be refused.
    ///
    /// # Errors
    /// `BudgetTooSmall` if no frame would be left for others, or fewer than scopes have declared.
    pub fn set_floor(&mut self, frames: u32, fx: &mut Effects) -> Result<()> {
        self.admission.set_floor(&self.residency, frames)?;
        self.admission.refuse_oversized(&mut self.residency, fx);
        self.pump(fx);
        Ok(())
    }

    /// Handles moves that take too long, each given with its error. Requests of `waiting` that wait for one of these
    /// moves end with that error. The moves go on, and keep their frames and buffers.
    pub fn overdue(&mut self, moves: &[(MoveId, Error)], waiting: &[RequestId], fx: &mut Effects) {
        self.admission.overdue(&mut self.residency, moves, waiting, fx);
        self.pump(fx);
    }

    /// Notes that the device has taken up the copy of a fill: it cannot be refused any more, its bytes have been
    /// checked, and they are there once `point` has passed. Requests for streams then have what they wait for, and
    /// others of their scopes are tried. Ignores ids of other moves, and unknown ids, because the move may have ended
    /// already.
    pub fn taken(&mut self, id: MoveId, point: FillPoint, fx: &mut Effects) {
        self.residency.taken(id, point);
        self.hear(fx);
        // The other requests of a scope that got its first pages no longer wait for other holders: they are tried now.
        if self.admission.is_stirred() {
            self.pump(fx);
        }
    }

    /// Ends a move. Ignores unknown ids, so that a completion reported twice does no harm.
    pub fn complete(&mut self, id: MoveId, result: Result<()>, fx: &mut Effects) {
        let Some(page) = self.residency.complete(id, result, fx) else { return };
        self.hear(fx);
        self.residency.settled(page, fx);
        self.pump(fx);
    }

    /// Notes that a discarded frame's memory is back with the system.
    pub fn discarded(&mut self, frame: FrameId, fx: &mut Effects) {
        self.residency.discarded(frame);
        self.pump(fx);
    }

    /// Notes that the system has not taken a frame's memory. A frame that was to leave the budget still is, and no page
    /// gets it meanwhile. Whoever waits for the smaller budget gets the error.
    pub fn discard_refused(&mut self, frame: FrameId, error: &Error, fx: &mut Effects) {
        if self.residency.discard_refused(frame) {
            self.admission.end_shrinking(Some(error), fx);
        }
        self.pump(fx);
    }

    /// Offers the system again the memory that it has [refused](Self::discard_refused).
    pub fn discard_again(&mut self, fx: &mut Effects) {
        self.residency.discard_again(fx);
    }

    /// Changes the device budget. Growing takes effect at once. Shrinking evicts, and frames leave as their pages can.
    /// Returns how many frames must exist in all.
    pub fn set_frames(&mut self, frames: u32, fx: &mut Effects) -> u32 {
        let exist = self.residency.set_frames(frames);
        self.hear(fx);
        self.admission.refuse_oversized(&mut self.residency, fx);
        self.pump(fx);
        exist
    }

    /// Evicts these pages, except where something forbids it. Returns how many evictions it began.
    pub fn evict(&mut self, pages: impl Iterator<Item = PageId>, fx: &mut Effects) -> u32 {
        let count = self.residency.evict(self.admission.kept(), pages, fx);
        self.pump(fx);
        count
    }

    /// The bytes of these pages are of no use any more. Copies below the device tier are dropped, where no move uses
    /// them and no write back of the host copy is due: a page that has no frame reads as zero bytes then, and is filled
    /// without a read. A dirty page that no writer holds becomes clean without a write. A page that is on its way, in
    /// either direction, or not read-write stays as it is. Returns how many pages lost their bytes.
    pub fn discard_bytes(&mut self, pages: impl Iterator<Item = PageId>, fx: &mut Effects) -> u32 {
        let count = self.residency.discard_bytes(pages, fx);
        self.pump(fx);
        count
    }

    /// Begins to write back what is not on disk yet of these segments. Their pages stay where they are. If all is
    /// there, nothing of them is written to disk until [`end_commit`](Self::end_commit): dirty pages stay in memory.
    pub fn begin_commit(&mut self, segments: &[SegmentId], fx: &mut Effects) -> Unwritten {
        let left = self.residency.freeze(segments, fx);
        self.pump(fx);
        left
    }

    /// Ends what [`begin_commit`](Self::begin_commit) began.
    pub fn end_commit(&mut self, segments: &[SegmentId], fx: &mut Effects) {
        self.residency.thaw(segments);
        self.pump(fx);
    }

    /// The pages of these segments that are being written to disk, or copied to the host tier.
    pub fn write_backs_of(&self, segments: &[SegmentId]) -> Vec<PageId> {
        self.residency.write_backs_of(segments)
    }

    /// Forgets what was written to these segments since they were last committed, unless a pin or a move is in the way.
    /// Then nothing has changed.
    pub fn roll_back(
        &mut self,
        segments: &[SegmentId],
        committed: &dyn Fn(PageId) -> Committed,
        fx: &mut Effects,
    ) -> Unwritten {
        let left = self.residency.roll_back(segments, committed, fx);
        self.pump(fx);
        left
    }

    /// The disk has bytes of these pages, of a segment that is new.
    pub fn found_on_disk(&mut self, pages: impl Iterator<Item = PageId>) {
        self.residency.found_on_disk(pages);
    }

    /// Gives the memory of up to `count` device frames back to the system. First come free frames that may have memory,
    /// then frames of clean unused pages, which it evicts. Dirty pages are passed over, and no page is copied to the
    /// host tier. The budget stays. Returns how many frames lose their memory.
    pub fn trim(&mut self, count: u32, fx: &mut Effects) -> u32 {
        self.trim_frames(count, true, fx)
    }

    /// [`trim`](Self::trim) that evicts nothing.
    pub fn trim_free(&mut self, count: u32, fx: &mut Effects) -> u32 {
        self.trim_frames(count, false, fx)
    }

    fn trim_frames(&mut self, count: u32, evicting: bool, fx: &mut Effects) -> u32 {
        let given = self.residency.trim(self.admission.kept(), count, evicting, fx);
        self.hear(fx);
        given
    }

    /// Picks up to `count` host frames whose memory goes back to the system. First come free frames that may have
    /// memory, then frames of copies whose bytes are elsewhere too, which it drops. Answered by
    /// [`host_discarded`](Self::host_discarded).
    pub fn trim_host(&mut self, count: u32) -> Vec<HostFrameId> {
        self.residency.trim_host(count)
    }

    /// Notes that the memory of these host frames is back with the system.
    pub fn host_discarded(&mut self, frames: &[HostFrameId], fx: &mut Effects) {
        self.residency.host_discarded(frames);
        self.pump(fx);
    }

    /// Gives up the copies in lower tiers of those pages that were written since these were made, and that no writer
    /// holds. Otherwise that is done when a page leaves. From now on they are
    /// [`DiskCopy::Spare`](crate::DiskCopy::Spare), also while a writer holds the page.
    pub fn outdate(&mut self, pages: impl Iterator<Item = PageId>, fx: &mut Effects) {
        self.residency.outdate(pages);
        // A host frame may be free.
        self.pump(fx);
    }

    /// Says that no free frame has memory yet: the device takes it when a page first comes.
    pub fn frames_are_bare(&mut self) {
        self.residency.frames_are_bare();
    }

    /// Stops admitting. Waiting requests fail with `error`, running fills are finished. No move begins afterwards,
    /// except those that already wait for a staging buffer.
    pub fn close(&mut self, error: &Error, fx: &mut Effects) {
        self.residency.close();
        self.admission.end_all_queued(&mut self.residency, error, fx);
        let frameless = self.residency.end_frameless(error);
        self.hear(fx);
        // Such a fill may have been the last thing in flight of a segment that nobody refers to.
        for page in frameless {
            self.residency.reap_segment(page.segment, fx);
        }
        self.pump(fx);
    }

    /// Does everything that has become possible.
    pub fn pump(&mut self, fx: &mut Effects) {
        if self.residency.next_event() {
            self.admission.ease();
        }
        self.residency.release_spoiled(fx);
        self.hear(fx);
        self.serve_awaiting(fx);
        let Self { residency, admission, .. } = self;
        admission.serve_lines(residency, fx);
        if !residency.is_closing() {
            residency.keep_reserve(admission.kept(), fx);
            if !admission.wants_frames() {
                residency.look_ahead(admission.kept(), fx);
            }
            admission.hear(residency, fx);
        }
        // An admission that failed may have left frames free. A page that was evicted may be one that a request waits
        // for.
        admission.serve_awaiting(residency, fx);
        while admission.is_stirred() {
            admission.serve_lines(residency, fx);
            admission.serve_awaiting(residency, fx);
        }
        residency.raise_victims(admission.wanted_beside(), fx);
        admission.has_served(residency);
        self.hear(fx);
    }

    /// Has pages that await frames, purses and a smaller budget served, in this order.
    fn serve_awaiting(&mut self, fx: &mut Effects) {
        self.admission.serve_awaiting(&mut self.residency, fx);
        self.admission.fill_purses(&mut self.residency, fx);
        self.residency.retire_frames(self.admission.kept(), fx);
        self.hear(fx);
        if self.residency.fits_budget() {
            self.admission.end_shrinking(None, fx);
        }
    }

    /// Tells admission and usage what has happened in residency.
    fn hear(&mut self, fx: &mut Effects) {
        self.admission.hear(&mut self.residency, fx);
        for arrival in self.residency.take_arrivals() {
            self.usage.hear(arrival);
        }
    }
}
