//! Requests: sets of pages that are admitted, filled and pinned as a unit.

use super::policy::Want;
use super::state::{Claim, State, TryPin};
use super::{Effects, Granted, PageRun, Pager, Priority, Submitted, WaitCause};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, PageId, RequestId, SegmentId};

/// How often the oldest request may be overtaken by younger ones that fit where it does not. Bounded, so that a large
/// request is not starved. A nested request, whose submitter may hold the very guards that the oldest waits for, may
/// always pass: it is let through by what is free, and were it not, both would wait for ever.
const OVERTAKEN_MAX: u32 = 16;

/// How often a reader may leave the pages of a waiting writer with others still there, before new readers wait for the
/// writer. Nested ones pass here too.
const READERS_MAX: u32 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Holds nothing.
    Queued,
    /// Holds pins on some pages and waits for the others' fills.
    Filling,
    /// Holds a pin on every page and waits for readers to leave.
    Upgrading,
    /// Waits for the budget to be met.
    Shrinking,
}

/// What a request is like, but for its pages.
#[derive(Clone, Copy, Debug, Default)]
struct Kind {
    exclusive: bool,
    nested: bool,
    for_stream: bool,
}

#[derive(Debug)]
pub(super) struct Request {
    runs: Vec<PageRun>,
    exclusive: bool,
    /// Its submitter may hold guards.
    nested: bool,
    /// Its pages may be lent: it is for a stream, which waits for their fills.
    for_stream: bool,
    stage: Stage,
    /// How often a reader has left and others remained, once it waits for readers to leave.
    outlasted: u32,
    /// Pages whose fill it waits for.
    remaining: u32,
    /// Those of them that the device has not taken up.
    untaken: u32,
    cause: WaitCause,
    serial: u32,
}

impl Request {
    fn pages(&self) -> impl Iterator<Item = PageId> + use<> {
        self.runs.clone().into_iter().flat_map(PageRun::pages)
    }
}

impl Pager {
    fn request_id(&self, key: usize) -> RequestId {
        RequestId(key as u64 | u64::from(self.requests[key].serial) << 32)
    }

    fn request_key(&self, id: RequestId) -> Option<usize> {
        let key = id.0 as u32 as usize;
        self.requests.get(key).filter(|request| u64::from(request.serial) == id.0 >> 32).map(|_| key)
    }

    pub(super) fn request_runs(&self, id: RequestId) -> Option<&[PageRun]> {
        self.request_key(id).map(|key| self.requests[key].runs.as_slice())
    }

    /// Whether a request is nested, and how often it was outlasted by readers.
    pub(super) fn request_standing(&self, id: RequestId) -> Option<(bool, u32)> {
        self.request_key(id).map(|key| (self.requests[key].nested, self.requests[key].outlasted))
    }

    /// Of a live request for a stream: for how many pages it waits that the device has not taken up.
    pub(super) fn request_untaken(&self, id: RequestId) -> Option<u32> {
        let request = &self.requests[self.request_key(id)?];
        request.for_stream.then_some(request.untaken)
    }

    /// Every live request: its stage as a number, what it waits for, whether it writes.
    pub(super) fn request_stages(&self) -> impl Iterator<Item = (RequestId, u8, u32, bool)> {
        self.requests
            .iter()
            .map(|(key, request)| (self.request_id(key), request.stage as u8, request.remaining, request.exclusive))
    }

    fn add_request(&mut self, runs: Vec<PageRun>, kind: Kind, stage: Stage) -> RequestId {
        self.next_serial = self.next_serial.wrapping_add(1);
        let Kind { exclusive, nested, for_stream } = kind;
        let (cause, serial) = (WaitCause::None, self.next_serial);
        let (outlasted, remaining, untaken) = (0, 0, 0);
        let request =
            Request { runs, exclusive, nested, for_stream, stage, outlasted, remaining, untaken, cause, serial };
        let key = self.requests.insert(request);
        self.request_id(key)
    }

    /// Wants all these pages pinned at once; `exclusive` for writing. `runs` must be normalized.
    ///
    /// # Errors
    /// `BudgetTooSmall` if they can never be resident together, `Poisoned` if the bytes of one were lost, `Closed`.
    pub fn submit(&mut self, runs: &[PageRun], exclusive: bool, fx: &mut Effects) -> Result<Submitted> {
        self.submit_as(runs, Kind { exclusive, ..Kind::default() }, fx)
    }

    /// [`submit`](Self::submit) for a caller who holds guards, or may hold some. Such a request is served by what is free
    /// even while older ones wait, since they may wait for those guards.
    ///
    /// # Errors
    /// As for [`submit`](Self::submit).
    pub fn submit_nested(&mut self, runs: &[PageRun], exclusive: bool, fx: &mut Effects) -> Result<Submitted> {
        self.submit_as(runs, Kind { exclusive, nested: true, ..Kind::default() }, fx)
    }

    /// [`submit`](Self::submit) for reading, by work on a stream: a page whose fill the device has [taken](Self::taken) up
    /// is as good as one that is there, since the stream will wait for it. `nested` as for
    /// [`submit_nested`](Self::submit_nested).
    ///
    /// # Errors
    /// As for [`submit`](Self::submit).
    pub fn submit_for_stream(&mut self, runs: &[PageRun], nested: bool, fx: &mut Effects) -> Result<Submitted> {
        self.submit_as(runs, Kind { exclusive: false, nested, for_stream: true }, fx)
    }

    fn submit_as(&mut self, runs: &[PageRun], kind: Kind, fx: &mut Effects) -> Result<Submitted> {
        if self.closing {
            return Err(closing());
        }
        let total: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
        if total > u64::from(self.frames.target) {
            return Err(too_large(total, self.frames.target, self.config.page_bytes));
        }
        let mut cause = WaitCause::None;
        for page in runs.iter().flat_map(|run| run.pages()) {
            let snapshot = self.word(page).load();
            cause = earlier(cause, self.cause_for(page, snapshot.state));
            if snapshot.is_resident() || snapshot.state == State::Evicting {
                self.used(page, snapshot.fresh, kind.exclusive);
            } else {
                self.missed(page, snapshot.state, kind.exclusive);
            }
            if snapshot.state == State::Poisoned {
                return Err(self.lost_error(page));
            }
        }
        self.policy.unit(total as u32);
        let id = self.add_request(runs.to_vec(), kind, Stage::Queued);
        if let Some(key) = self.request_key(id) {
            self.requests[key].cause = cause;
        }
        self.queue.push_back(id);
        self.pump(fx);
        // Ready at once: the result is given here rather than as an effect.
        if let Some(at) = fx.done.iter().position(|(done, _)| *done == id) {
            let (_, result) = fx.done.swap_remove(at);
            return Ok(Submitted::Ready(result?.after));
        }
        Ok(Submitted::Waiting(id))
    }

    fn missed(&mut self, page: PageId, state: State, write: bool) {
        self.stats.uses += 1;
        if state == State::Filling {
            self.stats.late += 1;
        } else {
            self.stats.faults += 1;
        }
        self.traced(page, false, write);
        self.staying = None;
        self.policy.accessed(page);
    }

    fn cause_for(&mut self, page: PageId, state: State) -> WaitCause {
        match state {
            State::Empty => {
                let entry = self.entry(page);
                match (entry.valid_host(), entry.on_disk()) {
                    (Some(_), _) => WaitCause::Host,
                    (None, true) => WaitCause::Disk,
                    (None, false) => WaitCause::Zero,
                }
            }
            State::Filling => WaitCause::LatePrefetch,
            _ => WaitCause::None,
        }
    }

    /// Waits until the device tier is within its budget.
    pub fn await_budget(&mut self, fx: &mut Effects) -> Submitted {
        if self.frames.existing() <= self.frames.target {
            return Submitted::Ready(None);
        }
        let id = self.add_request(Vec::new(), Kind::default(), Stage::Shrinking);
        self.shrinking.push(id);
        self.pump(fx);
        if let Some(at) = fx.done.iter().position(|(done, _)| *done == id) {
            let _ = fx.done.swap_remove(at);
            return Submitted::Ready(None);
        }
        Submitted::Waiting(id)
    }

    /// Nobody waits for this request any more. What it holds is released; fills under way end as prefetches.
    pub fn cancel(&mut self, id: RequestId, fx: &mut Effects) {
        let Some(key) = self.request_key(id) else { return };
        match self.requests[key].stage {
            Stage::Queued => self.leave_queue(id),
            Stage::Shrinking => self.shrinking.retain(|waiting| *waiting != id),
            Stage::Filling | Stage::Upgrading => self.give_up(id),
        }
        self.requests.remove(key);
        self.pump(fx);
    }

    /// From now on the request is [nested](Self::submit_nested).
    pub fn take_for_nested(&mut self, id: RequestId, fx: &mut Effects) {
        let Some(key) = self.request_key(id) else { return };
        if !std::mem::replace(&mut self.requests[key].nested, true) {
            self.pump(fx);
        }
    }

    fn leave_queue(&mut self, id: RequestId) {
        if self.queue.front() == Some(&id) {
            // The next one has its own count: not to be overtaken at all would hold up whoever it waits for.
            self.overtaken = 0;
        }
        self.queue.retain(|queued| *queued != id);
    }

    /// Nobody can wait for pages of this segment any more: a request that still does was forgotten, not dropped.
    pub(super) fn cancel_all_of(&mut self, segment: SegmentId, fx: &mut Effects) {
        let forgotten: Vec<RequestId> = self
            .requests
            .iter()
            .filter(|(_, request)| request.runs.iter().any(|run| run.segment == segment))
            .map(|(key, _)| self.request_id(key))
            .collect();
        for id in forgotten {
            self.cancel(id, fx);
        }
    }

    /// Releases every pin and every wait of an admitted request.
    pub(super) fn give_up(&mut self, id: RequestId) {
        let Some(key) = self.request_key(id) else { return };
        self.upgrading.retain(|upgrading| *upgrading != id);
        let pages: Vec<PageId> = self.requests[key].pages().collect();
        for page in pages {
            if self.claims.get(&page) == Some(&id) {
                self.claims.remove(&page);
                self.word(page).open_to_readers();
            }
            let waits = self.filling.get_mut(&page).is_some_and(|fill| {
                let before = fill.waiters.len();
                fill.waiters.retain(|waiter| *waiter != id);
                fill.waiters.len() != before
            });
            if !waits && self.word(page).load().pins > 0 && self.holds(page) {
                // The pump that follows serves whoever wanted this.
                let _ = self.word(page).unpin();
            }
        }
    }

    /// A page of an admitted request is either still filling or pinned by it; a failed fill left it Empty.
    fn holds(&self, page: PageId) -> bool {
        self.word(page).load().is_resident()
    }

    /// A fill this request waited for has failed.
    pub(super) fn fail(&mut self, id: RequestId, error: &Error, fx: &mut Effects) {
        if self.request_key(id).is_none() {
            return;
        }
        self.give_up(id);
        self.finish(id, Err(error.clone()), fx);
    }

    /// A fill this request waited for is done; the request holds its pin. `taken` if it was said to be taken up before.
    pub(super) fn page_ready(&mut self, id: RequestId, taken: bool, fx: &mut Effects) {
        let Some(key) = self.request_key(id) else { return };
        self.requests[key].remaining -= 1;
        if !taken {
            self.requests[key].untaken -= 1;
        }
        if self.requests[key].remaining == 0 {
            self.all_ready(id, key, fx);
        } else {
            self.lend_if_taken(id, key, fx);
        }
    }

    /// A fill this request waits for has been taken up by the device.
    pub(super) fn page_taken(&mut self, id: RequestId, fx: &mut Effects) {
        let Some(key) = self.request_key(id) else { return };
        self.requests[key].untaken -= 1;
        self.lend_if_taken(id, key, fx);
    }

    /// Ends a request for a stream that waits only for fills that the device has taken up: their pages are lent.
    fn lend_if_taken(&mut self, id: RequestId, key: usize, fx: &mut Effects) {
        let Request { for_stream: true, untaken: 0, cause, .. } = self.requests[key] else { return };
        let awaited = |page: &PageId| self.filling.get(page).is_some_and(|fill| fill.waiters.contains(&id));
        let lent: Vec<PageId> = self.requests[key].pages().filter(awaited).collect();
        for (count, page) in lent.iter().enumerate() {
            if self.word(*page).lend().is_err() {
                // As many pins as a word counts. It waits for the ends of its fills, as others do.
                lent[..count].iter().for_each(|page| self.word(*page).unpin_quiet());
                return;
            }
        }
        let mut after = None;
        for page in lent {
            if let Some(fill) = self.filling.get_mut(&page) {
                fill.waiters.retain(|waiter| *waiter != id);
                fill.lent = true;
                after = after.max(fill.taken);
            }
        }
        self.finish(id, Ok(Granted { cause, after }), fx);
    }

    fn all_ready(&mut self, id: RequestId, key: usize, fx: &mut Effects) {
        if self.requests[key].exclusive {
            self.requests[key].stage = Stage::Upgrading;
            self.upgrading.push(id);
            self.advance_upgrades(fx);
            if self.closing && self.request_key(id).is_some() {
                self.give_up(id);
                self.finish(id, Err(closing()), fx);
            }
        } else {
            let cause = self.requests[key].cause;
            self.finish(id, Ok(Granted { cause, after: None }), fx);
        }
    }

    /// The request is over.
    pub(super) fn finish(&mut self, id: RequestId, result: Result<Granted>, fx: &mut Effects) {
        if let Some(key) = self.request_key(id) {
            self.requests.remove(key);
            fx.done.push((id, result));
        }
    }

    /// Locks the pages of writers whose readers have left.
    pub(super) fn advance_upgrades(&mut self, fx: &mut Effects) {
        for id in self.upgrading.clone() {
            let Some(key) = self.request_key(id) else { continue };
            let pages: Vec<PageId> = self.requests[key].pages().collect();
            if pages.iter().any(|page| self.entry(*page).copying_out()) {
                // The copy of a victim that was rescued still reads the frame.
                self.requests[key].cause = earlier(self.requests[key].cause, WaitCause::WriteBack);
                continue;
            }
            let clean: Vec<bool> = pages.iter().map(|page| self.word(*page).load().state == State::Clean).collect();
            let (mut locked, mut left) = (0, false);
            for page in &pages {
                // The mark of an earlier attempt that met pins is gone if one of them has ended since.
                left = !self.word(*page).load().wanted;
                if self.word(*page).lock() != Claim::Won {
                    break;
                }
                locked += 1;
            }
            if locked < pages.len() {
                let request = &mut self.requests[key];
                let closes = left && request.outlasted + 1 == READERS_MAX;
                if left && request.outlasted < READERS_MAX {
                    request.outlasted += 1;
                }
                for (page, clean) in pages[..locked].iter().zip(clean) {
                    let _ = self.word(*page).unlock_to_shared(clean);
                }
                if closes {
                    pages.iter().for_each(|page| self.word(*page).close_to_readers());
                }
                self.requests[key].cause = earlier(self.requests[key].cause, WaitCause::Guard);
                continue;
            }
            for page in pages {
                self.word(page).open_to_readers();
                self.entry(page).set_on_disk(false);
                self.forget_failures(page);
                self.drop_host_copy(page);
            }
            self.writers += 1;
            self.upgrading.retain(|upgrading| *upgrading != id);
            let cause = self.requests[key].cause;
            self.finish(id, Ok(Granted { cause, after: None }), fx);
        }
    }

    /// A writer's guard has ended and unlocked its pages.
    pub fn unlocked(&mut self, runs: &[PageRun], fx: &mut Effects) {
        for page in runs.iter().flat_map(|run| run.pages()) {
            self.claims.remove(&page);
        }
        self.pump(fx);
    }

    /// Admits what fits, oldest first.
    pub(super) fn admit_queued(&mut self, fx: &mut Effects) {
        let mut index = 0;
        while let Some(id) = self.queue.get(index).copied() {
            let Some(key) = self.request_key(id) else {
                self.queue.remove(index);
                continue;
            };
            if index > 0 && self.overtaken >= OVERTAKEN_MAX && !self.requests[key].nested {
                index += 1;
                continue;
            }
            if self.try_admit(id, key, fx) {
                self.queue.retain(|queued| *queued != id);
                self.overtaken = if index == 0 { 0 } else { (self.overtaken + 1).min(OVERTAKEN_MAX) };
                // What was admitted may have finished at once and changed what fits.
            } else {
                index += 1;
            }
        }
    }

    /// Takes everything the request needs, or nothing.
    fn try_admit(&mut self, id: RequestId, key: usize, fx: &mut Effects) -> bool {
        let pages: Vec<PageId> = self.requests[key].pages().collect();
        let Request { exclusive, nested, .. } = self.requests[key];
        if exclusive && pages.iter().any(|page| self.claims.contains_key(page)) {
            self.requests[key].cause = earlier(self.requests[key].cause, WaitCause::Guard);
            return false;
        }
        let mut pinned = Vec::with_capacity(pages.len());
        let mut joined = Vec::new();
        let mut missing = Vec::new();
        let mut blocked = None;
        for page in pages.iter().copied() {
            let word = self.word(page);
            match if nested { word.try_pin_nested() } else { word.try_pin() } {
                TryPin::Hit | TryPin::FirstUse => {
                    pinned.push(page);
                    if self.entry(page).evict_after() && !self.spare(page) {
                        blocked = Some(WaitCause::WriteBack);
                        break;
                    }
                    continue;
                }
                TryPin::Busy => {}
            }
            match self.word(page).load().state {
                State::Filling => {
                    if let Some(error) = self.filling.get(&page).and_then(|fill| fill.failed.clone()) {
                        // It cannot be tried again while it is lent, and when that ends is not known.
                        for page in pinned {
                            self.word(page).unpin_quiet();
                        }
                        self.finish(id, Err(error), fx);
                        return true;
                    }
                    joined.push(page);
                }
                State::Empty => missing.push(page),
                State::Evicting if self.can_rescue() && self.word(page).rescue().is_ok() => {
                    self.transit -= 1;
                    self.entered(page);
                    pinned.push(page);
                }
                State::Evicting => blocked = Some(WaitCause::Frames),
                State::Poisoned => {
                    for page in pinned {
                        self.word(page).unpin_quiet();
                    }
                    let error = self.lost_error(page);
                    self.finish(id, Err(error), fx);
                    return true;
                }
                _ => blocked = Some(WaitCause::Guard),
            }
            if blocked.is_some() {
                break;
            }
        }
        let needed = missing.len() as u32;
        while blocked.is_none() && self.frames.free_count() + self.transit < self.promised() + needed {
            if !self.reclaim(Want::Demand, fx) {
                blocked = Some(if self.transit > 0 { WaitCause::WriteBack } else { WaitCause::Frames });
            }
        }
        if let Some(cause) = blocked {
            for page in pinned {
                self.word(page).unpin_quiet();
            }
            let request = &mut self.requests[key];
            request.cause = earlier(request.cause, cause);
            return false;
        }
        let short = self.frames.free_count() < self.promised() + needed;
        let request = &mut self.requests[key];
        request.stage = Stage::Filling;
        request.remaining = needed + joined.len() as u32;
        request.untaken = request.remaining;
        if short {
            request.cause = earlier(request.cause, WaitCause::WriteBack);
        }
        if exclusive {
            for page in &pages {
                self.claims.insert(*page, id);
            }
        }
        for page in joined {
            if let Some(fill) = self.filling.get_mut(&page) {
                fill.waiters.push(id);
                self.requests[key].untaken -= u32::from(fill.taken.is_some());
            }
            self.raise(page, Priority::Demand, fx);
        }
        for page in missing {
            self.admit_fill(page, Some(id), Priority::Demand, fx);
        }
        if self.requests[key].remaining == 0 {
            self.all_ready(id, key, fx);
        } else {
            self.lend_if_taken(id, key, fx);
        }
        true
    }

    /// A victim that is being written back is wanted by an admission: it stays, unless its frame is promised. Were it
    /// left in transit, the admission could count on a frame that its own pin holds.
    fn spare(&mut self, page: PageId) -> bool {
        let may = self.can_rescue();
        if may {
            self.transit -= 1;
            self.entry(page).set_evict_after(false);
            self.entered(page);
        }
        may
    }

    /// Frames, free or in transit, that are spoken for: by admitted pages, and by a shrinking budget.
    pub(super) fn promised(&self) -> u32 {
        self.awaiting.len() as u32 + self.frames.active().saturating_sub(self.frames.target)
    }

    /// Whether the frame of a page being evicted is not promised to anybody.
    fn can_rescue(&self) -> bool {
        self.frames.free_count() + self.transit > self.promised()
    }

    /// Fails queued requests that a smaller budget can never hold.
    pub(super) fn refuse_oversized(&mut self, fx: &mut Effects) {
        let frames = self.frames.target;
        let page_bytes = self.config.page_bytes;
        for id in self.queue.clone() {
            let Some(key) = self.request_key(id) else { continue };
            let total: u64 = self.requests[key].runs.iter().map(|run| u64::from(run.count)).sum();
            if total > u64::from(frames) {
                self.leave_queue(id);
                self.finish(id, Err(too_large(total, frames, page_bytes)), fx);
            }
        }
    }
}

/// What every call gets once a runtime is being closed.
pub(crate) fn closing() -> Error {
    Error::new(ErrorKind::Closed, "the runtime is closing, or is closed")
        .remedy("open a new one, or close this one later")
}

/// The first cause that applies stays; `None` yields.
fn earlier(first: WaitCause, next: WaitCause) -> WaitCause {
    if first == WaitCause::None { next } else { first }
}

fn too_large(pages: u64, frames: u32, page_bytes: u64) -> Error {
    let need = Bytes::new(pages * page_bytes);
    let have = Bytes::new(u64::from(frames) * page_bytes);
    Error::new(
        ErrorKind::BudgetTooSmall,
        format!("{pages} pages ({need}) are wanted at once, but the device budget holds {frames} ({have})"),
    )
    .remedy(format!("raise the device budget to at least {need}, pin fewer rows at a time, or choose smaller pages"))
}
