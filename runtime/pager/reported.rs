//! What programs report of uses: those that were (hits, walkers), and those that are to come (hints, plans). These
//! calls change `Usage`, and notify the policy.

use crate::Pager;
use crate::effects::Effects;
use crate::ids::{PageId, SegmentClass, WalkerId};
use crate::runs::PageRun;
use crate::state::State;
use crate::word::access::{AccessLog, PageUses, Part};

impl Pager {
    /// Suggests that these pages will be used soon. A hint is not a promise: it is dropped if there is no frame for it.
    pub fn prefetch(&mut self, runs: &[PageRun], fx: &mut Effects) {
        for page in runs.iter().flat_map(|run| run.pages()) {
            self.residency.hint(page, None);
        }
        self.pump(fx);
    }

    /// A walker is likely to use these pages next, in this order. They take the place of those that it expected before:
    /// what is not on its way of these is not filled any more. The policy keeps expected pages from going before they
    /// are used, as long as others can go. A walker that has ended expects nothing.
    pub fn expect(&mut self, walker: WalkerId, runs: &[PageRun], fx: &mut Effects) {
        if !self.usage.is_walking(walker) {
            return;
        }
        self.residency.expect_nothing(walker);
        let pages: Vec<PageId> = runs.iter().flat_map(|run| run.pages()).collect();
        for page in &pages {
            self.residency.hint(*page, Some(walker));
        }
        self.usage.interrupted();
        self.turn_to(walker);
        self.residency.policy_mut().expected(&pages);
        self.pump(fx);
    }

    /// How many pages ahead of use fills start.
    pub fn lookahead(&self) -> u32 {
        self.residency.lookahead()
    }

    /// Sets how many pages ahead of use fills start. The policy hears of it with the next
    /// [`set_frames`](Self::set_frames).
    pub fn set_lookahead(&mut self, pages: u32) {
        self.residency.set_lookahead(pages);
    }

    /// Declares the order of use of the default walker. `cyclic` means that it repeats. An empty order withdraws the
    /// plan.
    pub fn declare_plan(&mut self, order: &[PageRun], cyclic: bool, fx: &mut Effects) {
        self.declare_plan_of(WalkerId::DEFAULT, order, cyclic, fx);
    }

    /// Declares the order of use of a walker. Does nothing for a walker that has ended.
    pub fn declare_plan_of(&mut self, walker: WalkerId, order: &[PageRun], cyclic: bool, fx: &mut Effects) {
        if !self.usage.is_walking(walker) {
            return;
        }
        self.usage.interrupted();
        self.turn_to(walker);
        self.residency.policy_mut().declare_runs(order, cyclic);
        self.pump(fx);
    }

    /// Tells of a cycle that walkers may be seen to follow later.
    pub fn know_order(&mut self, order: &[PageRun]) {
        self.residency.policy_mut().know(order);
    }

    /// The walker's uses have no order.
    pub fn declare_unordered(&mut self, walker: WalkerId, fx: &mut Effects) {
        if self.usage.is_walking(walker) {
            self.usage.interrupted();
            self.turn_to(walker);
            self.residency.policy_mut().unordered();
            self.pump(fx);
        }
    }

    /// Begins a walker. Several may walk at a time, each in an order of its own.
    pub fn begin_walker(&mut self) -> WalkerId {
        self.usage.begin_walker()
    }

    /// Ends a walker. Uses of it that are recorded later count as the default walker's.
    pub fn end_walker(&mut self, walker: WalkerId, fx: &mut Effects) {
        if walker != WalkerId::DEFAULT && self.usage.is_walking(walker) {
            self.turn_to(WalkerId::DEFAULT);
            self.usage.end_walker(walker);
            self.residency.expect_nothing(walker);
            self.residency.policy_mut().walker_ended(walker);
            self.pump(fx);
        }
    }

    /// The order that a walker follows, or one cycle of it; empty if it follows none.
    pub fn order_of(&self, walker: WalkerId) -> Vec<PageId> {
        self.residency.policy().order_of(walker)
    }

    /// Tells the policy that these pages are about to be used as a prefix chain: see
    /// [`Policy::chain`](crate::Policy::chain).
    pub fn chain(&mut self, runs: &[PageRun]) {
        let pages: Vec<PageId> = runs.iter().flat_map(|run| run.pages()).collect();
        self.residency.policy_mut().chain(&pages);
        self.usage.chain(pages);
    }

    /// Takes in uses that were logged without the latch. To be called first under each hold of the latch.
    pub fn record(&mut self, log: &AccessLog) {
        self.take_in(log, Part::Marked);
    }

    /// [`record`](Self::record) that misses no earlier use. For callers that count or want all uses.
    pub fn record_all(&mut self, log: &AccessLog) {
        self.take_in(log, Part::All);
    }

    /// [`record`](Self::record) of a part of the log, for callers in no hurry. Returns whether there is more.
    pub fn record_some(&mut self, log: &AccessLog) -> bool {
        self.take_in(log, Part::Some(1 << 10))
    }

    fn take_in(&mut self, log: &AccessLog, part: Part) -> bool {
        log.drain(part, |walker, used, count| {
            self.turn_to(walker);
            self.used(used.page(), used.is_first(), used.is_write(), count);
        })
    }

    /// The policy keeps so many frames for the tensors of these classes at least. Returns whether it does.
    pub fn keep_for_classes(&mut self, floors: &[(SegmentClass, u32)]) -> bool {
        self.residency.policy_mut().floors(floors)
    }

    /// Keeps every use from now on, for [`take_uses`](Self::take_uses).
    pub fn keep_uses(&mut self) {
        self.usage.keep_uses();
    }

    /// The uses since the last call. Empty unless they are [kept](Self::keep_uses).
    pub fn take_uses(&mut self) -> PageUses {
        self.usage.take_uses()
    }

    /// Makes this walker the current one: the policy is told that what follows is this walker's.
    pub(super) fn turn_to(&mut self, walker: WalkerId) {
        if let Some(walker) = self.usage.turn_to(walker) {
            self.residency.policy_mut().walker(walker);
        }
    }

    pub(super) fn used(&mut self, page: PageId, first_use: bool, write: bool, count: u32) {
        let number = self.residency.numbers().number(page);
        if self.usage.used(page, number, first_use, write, count) {
            self.residency.policy_mut().accessed(page);
        }
        if write {
            self.residency.policy_mut().written(page);
        }
    }

    pub(super) fn missed(&mut self, page: PageId, state: State, write: bool) {
        let number = self.residency.numbers().number(page);
        self.usage.missed(page, number, state == State::Filling, write);
        self.residency.policy_mut().accessed(page);
        if write {
            self.residency.policy_mut().written(page);
        }
    }
}
