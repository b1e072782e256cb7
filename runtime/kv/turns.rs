//! Which sequences may be active now, and which wait for their turn. Without locks, clocks or waits: the time is told.
//! What is a block here is so to [`permit`](crate::permit) too, where it is one of a single group of layers.
//!
//! The sequences that are active together need blocks in fast memory, each with every token. If these blocks are more
//! than there is room for, each sequence evicts the next one's blocks, and all become slow. So a sequence asks for its
//! blocks before it begins, and gives them back when it ends or is parked.
//!
//! # Who is next
//!
//! Each tenant has a *static share*: blocks that no other tenant gets. The other blocks are free to all; what a tenant
//! has of them beyond its static share is its *dynamic share*. A request within its tenant's static share is granted at
//! once. The others wait in line by tenant, and the next one is the first request of the tenant with the smallest
//! dynamic share for its weight. If that one does not fit, nobody passes it: a large request waits, but not for ever.
//!
//! The *reserve* is kept for tenants that have nothing active. So with N tenants active, another one's first request
//! need not wait for the end of theirs.
//!
//! # How long it takes
//!
//! Blocks that come back are counted, and counts decay with time. A request waits about as long as it takes until as
//! many blocks have come back as are missing for those before it and for itself.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use crate::key::TenantId;

/// How long blocks that came back count: after so much time, a third of the count is left.
const REMEMBERED: Duration = Duration::from_secs(60);

/// What a tenant may have active.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Its static share.
    pub reserved: u32,
    /// The weight of its dynamic share; at least 1.
    pub weight: u32,
    /// The most requests that wait.
    pub queue_most: u32,
}

impl Turn {
    pub const DEFAULT: Self = Self { reserved: 0, weight: 1, queue_most: u32::MAX };
}

impl Default for Turn {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// A request that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

#[derive(Clone, Copy, Debug)]
struct Request {
    id: RequestId,
    blocks: u32,
    since: Duration,
}

#[derive(Debug, Default)]
struct Line {
    turn: Turn,
    active: u32,
    waiting: VecDeque<Request>,
    counts: Counts,
}

impl Line {
    /// Whether so many blocks more are within its static share.
    fn is_within(&self, blocks: u32) -> bool {
        u64::from(self.active) + u64::from(blocks) <= u64::from(self.turn.reserved)
    }

    /// What is left of its static share.
    fn kept(&self) -> u32 {
        self.turn.reserved.saturating_sub(self.active)
    }

    fn is_idle(&self) -> bool {
        self.active == 0 && self.waiting.is_empty()
    }
}

/// What became of a tenant's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub granted: u64,
    /// Of those that were granted, those that had waited.
    pub waited: u64,
    pub refused: u64,
    /// The time that granted requests waited, in sum.
    pub waiting: Duration,
}

/// What is answered to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Granted,
    Waits(RequestId),
    Refused(Refusal),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The tenant can never have more than so many.
    Never(u32),
    /// As many of the tenant's requests wait as may.
    QueueFull(u32),
}

/// A request that is granted: whose, which, and how many blocks.
pub type Granted = (TenantId, RequestId, u32);

/// See the [module's documentation](self).
#[derive(Debug)]
pub struct Turns {
    blocks: u32,
    reserve: u32,
    active: u32,
    lines: HashMap<TenantId, Line>,
    /// The sums of all tenants' static shares, and of what is left of these.
    reserved: u64,
    kept: u64,
    next: u64,
    /// Blocks that came back, and the seconds in which they did; both decay. And when they were counted last.
    returned: f64,
    seconds: f64,
    counted: Duration,
}

impl Turns {
    /// Up to `blocks` may be active; of these, `reserve` are kept for tenants that have nothing active.
    pub fn new(blocks: u32, reserve: u32) -> Self {
        Self {
            blocks,
            reserve,
            active: 0,
            lines: HashMap::new(),
            reserved: 0,
            kept: 0,
            next: 0,
            returned: 0.0,
            seconds: 0.0,
            counted: Duration::ZERO,
        }
    }

    /// Changes how many may be active. Those that are stay so. Returns what is granted by that.
    pub fn resize(&mut self, blocks: u32, reserve: u32, now: Duration) -> Vec<Granted> {
        if (self.blocks, self.reserve) == (blocks, reserve) {
            return Vec::new();
        }
        (self.blocks, self.reserve) = (blocks, reserve);
        self.grant(now)
    }

    pub fn blocks(&self) -> u32 {
        self.blocks
    }
    pub fn active(&self) -> u32 {
        self.active
    }
    /// The static shares of all tenants but this one.
    pub fn reserved_by_others(&self, tenant: TenantId) -> u64 {
        self.reserved - self.lines.get(&tenant).map_or(0, |line| u64::from(line.turn.reserved))
    }
    pub fn waiting(&self) -> usize {
        self.lines.values().map(|line| line.waiting.len()).sum()
    }

    /// Blocks active, requests that wait, and counts of a tenant.
    pub fn of(&self, tenant: TenantId) -> (u32, usize, Counts) {
        self.lines.get(&tenant).map_or_else(Default::default, |line| (line.active, line.waiting.len(), line.counts))
    }

    /// Changes a tenant, and keeps the sums.
    fn change<T>(&mut self, tenant: TenantId, change: impl FnOnce(&mut Line) -> T) -> T {
        let line = self.lines.entry(tenant).or_default();
        let (reserved, kept, active) = (line.turn.reserved, line.kept(), line.active);
        let result = change(line);
        self.reserved = self.reserved - u64::from(reserved) + u64::from(line.turn.reserved);
        self.kept = self.kept - u64::from(kept) + u64::from(line.kept());
        self.active = self.active - active + line.active;
        result
    }

    /// Tells what a tenant may have. Returns what is granted by that.
    pub fn set(&mut self, tenant: TenantId, turn: Turn, now: Duration) -> Vec<Granted> {
        self.change(tenant, |line| line.turn = turn);
        self.grant(now)
    }

    /// Forgets a tenant's counts, and what it may have, if it has nothing active and nothing waits.
    pub fn forget(&mut self, tenant: TenantId, now: Duration) -> Vec<Granted> {
        if self.lines.get(&tenant).is_some_and(Line::is_idle) {
            self.change(tenant, |line| line.turn = Turn::DEFAULT);
            self.lines.remove(&tenant);
        }
        self.grant(now)
    }

    /// The most that this tenant can have, if nobody else has anything.
    fn most(&self, tenant: TenantId) -> u32 {
        u64::from(self.blocks).saturating_sub(self.reserved_by_others(tenant)) as u32
    }

    /// Blocks that a tenant cannot have now, beside those that are active.
    fn closed_to(&self, line: &Line) -> u64 {
        // With one tenant there is nobody to keep a reserve for.
        let reserve = if line.active == 0 || self.lines.len() < 2 { 0 } else { self.reserve };
        self.kept - u64::from(line.kept()) + u64::from(reserve)
    }

    /// Whether so many blocks may be active now, were this tenant's request the next one.
    fn fits(&self, line: &Line, blocks: u32) -> bool {
        // Within its static share, the others have left room for it.
        let closed = if line.is_within(blocks) { 0 } else { self.closed_to(line) };
        u64::from(self.active) + u64::from(blocks) + closed <= u64::from(self.blocks)
    }

    /// A tenant asks for blocks.
    pub fn ask(&mut self, tenant: TenantId, blocks: u32, now: Duration) -> Answer {
        self.decay(now);
        let id = RequestId(self.next);
        self.next += 1;
        let most = self.most(tenant);
        if blocks > most {
            self.change(tenant, |line| line.counts.refused += 1);
            return Answer::Refused(Refusal::Never(most));
        }
        self.change(tenant, |line| line.waiting.push_back(Request { id, blocks, since: now }));
        // Nothing else can be granted by a request more.
        if !self.grant(now).is_empty() {
            self.change(tenant, |line| line.counts.waited -= 1);
            return Answer::Granted;
        }
        self.change(tenant, |line| {
            let most = line.turn.queue_most;
            if line.waiting.len() as u64 <= u64::from(most) {
                return Answer::Waits(id);
            }
            line.waiting.pop_back();
            line.counts.refused += 1;
            Answer::Refused(Refusal::QueueFull(most))
        })
    }

    /// A request that waits is withdrawn. Returns what is granted by that.
    pub fn cancel(&mut self, tenant: TenantId, id: RequestId, now: Duration) -> Vec<Granted> {
        self.change(tenant, |line| line.waiting.retain(|request| request.id != id));
        self.grant(now)
    }

    /// A tenant whose request is active gets `blocks` more, if there are so many: those who wait are passed, since none
    /// of them can be granted before what is active has ended. Returns whether it got them.
    pub fn grow(&mut self, tenant: TenantId, blocks: u32, now: Duration) -> bool {
        self.decay(now);
        let fits = self.lines.get(&tenant).is_some_and(|line| self.fits(line, blocks));
        if fits {
            self.change(tenant, |line| line.active += blocks);
        }
        fits
    }

    /// Blocks come back. Returns what is granted by that.
    pub fn give_back(&mut self, tenant: TenantId, blocks: u32, now: Duration) -> Vec<Granted> {
        self.decay(now);
        self.returned += f64::from(blocks);
        self.change(tenant, |line| line.active = line.active.saturating_sub(blocks));
        self.grant(now)
    }

    fn decay(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.counted).as_secs_f64();
        self.counted = self.counted.max(now);
        let left = (-passed / REMEMBERED.as_secs_f64()).exp();
        self.returned *= left;
        self.seconds *= left;
        // The time in which nothing was active says nothing about how long anything is.
        if self.active > 0 {
            self.seconds += passed;
        }
    }

    /// Whose request is the next one: that of the smallest dynamic share for its weight. `already` says what would be
    /// granted to tenants before: blocks, and requests.
    fn next_tenant(&self, already: &HashMap<TenantId, (u64, usize)>) -> Option<(TenantId, Request)> {
        let first = self.lines.iter().filter_map(|(id, line)| {
            let (blocks, requests) = already.get(id).copied().unwrap_or_default();
            let first = line.waiting.get(requests)?;
            let active = u64::from(line.active) + blocks;
            let dynamic = active.saturating_sub(line.turn.reserved.into());
            // A fraction, compared without rounding.
            let share = (u128::from(dynamic) << u32::BITS) / u128::from(line.turn.weight.max(1));
            Some((share, active > 0, first.id, *id, *first))
        });
        let (.., tenant, request) = first.min_by_key(|(share, active, id, ..)| (*share, *active, *id))?;
        Some((tenant, request))
    }

    fn grant(&mut self, now: Duration) -> Vec<Granted> {
        let mut granted = Vec::new();
        loop {
            // Whoever stays within its static share passes the line.
            let within = self.lines.iter().filter_map(|(tenant, line)| {
                let first = line.waiting.front()?;
                (line.is_within(first.blocks) && self.fits(line, first.blocks)).then_some((*tenant, *first))
            });
            let next = within.min_by_key(|(_, first)| first.id).or_else(|| {
                let (tenant, first) = self.next_tenant(&HashMap::new())?;
                self.fits(self.lines.get(&tenant)?, first.blocks).then_some((tenant, first))
            });
            let Some((tenant, first)) = next else { return granted };
            self.change(tenant, |line| {
                line.waiting.pop_front();
                line.active += first.blocks;
                line.counts.granted += 1;
                line.counts.waited += 1;
                line.counts.waiting += now.saturating_sub(first.since);
            });
            granted.push((tenant, first.id, first.blocks));
        }
    }

    /// How long it takes until this request is granted, or one more of `blocks` blocks. `None` if no block came back
    /// so far, and for a request that does not wait.
    pub fn estimate(
        &mut self,
        tenant: TenantId,
        of: Option<RequestId>,
        blocks: u32,
        now: Duration,
    ) -> Option<Duration> {
        self.decay(now);
        if of.is_some() {
            return self.estimate_of(tenant, of?);
        }
        let id = RequestId(self.next);
        self.change(tenant, |line| line.waiting.push_back(Request { id, blocks, since: now }));
        let estimate = self.estimate_of(tenant, id);
        self.change(tenant, |line| line.waiting.pop_back());
        estimate
    }

    fn estimate_of(&self, tenant: TenantId, of: RequestId) -> Option<Duration> {
        let line = self.lines.get(&tenant)?;
        let request = line.waiting.iter().find(|request| request.id == of)?;
        let closed = if line.is_within(request.blocks) { 0 } else { self.closed_to(line) };
        let room = u64::from(self.blocks).saturating_sub(u64::from(self.active) + closed);
        let (mut needed, mut before) = (0, HashMap::<TenantId, (u64, usize)>::new());
        while let Some((next, first)) = self.next_tenant(&before) {
            needed += u64::from(first.blocks);
            if first.id == of {
                break;
            }
            let taken = before.entry(next).or_default();
            *taken = (taken.0 + u64::from(first.blocks), taken.1 + 1);
        }
        let missing = needed.saturating_sub(room);
        if missing == 0 {
            return Some(Duration::ZERO);
        }
        let rate = self.returned / self.seconds;
        (rate > 0.0).then(|| Duration::try_from_secs_f64(missing as f64 / rate).ok()).flatten()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;

    const A: TenantId = TenantId::new(1);
    const B: TenantId = TenantId::new(2);
    const C: TenantId = TenantId::new(3);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn waits(answer: Answer) -> RequestId {
        match answer {
            Answer::Waits(id) => id,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_static_share_is_there_whatever_others_have() {
        let mut all = Turns::new(100, 0);
        all.set(A, Turn { reserved: 30, ..Turn::DEFAULT }, at(0));
        assert_eq!(all.ask(B, 70, at(0)), Answer::Granted);
        waits(all.ask(B, 1, at(0)));
        assert_eq!(all.ask(A, 30, at(0)), Answer::Granted);
        waits(all.ask(A, 1, at(0)));
        assert_eq!(all.ask(B, 71, at(0)), Answer::Refused(Refusal::Never(70)));
        assert_eq!(all.ask(A, 101, at(0)), Answer::Refused(Refusal::Never(100)));
        assert_eq!(all.active(), 100);
        // B's request came first, but what comes back is A's.
        let tenants = |granted: Vec<Granted>| granted.iter().map(|(tenant, ..)| *tenant).collect::<Vec<_>>();
        assert_eq!(tenants(all.give_back(A, 1, at(1))), [A]);
        assert_eq!(tenants(all.give_back(B, 70, at(1))), [B]);
    }

    #[test]
    fn the_smallest_dynamic_share_for_its_weight_is_next() {
        let mut all = Turns::new(74, 0);
        all.set(B, Turn { weight: 2, ..Turn::DEFAULT }, at(0));
        for (tenant, blocks) in [(A, 30), (B, 34), (C, 10)] {
            assert_eq!(all.ask(tenant, blocks, at(0)), Answer::Granted);
        }
        let [a, b, c] = [(A, 10), (B, 4), (C, 10)].map(|(tenant, blocks)| waits(all.ask(tenant, blocks, at(0))));
        // C has 10, and B, with twice the weight, 34: B is behind C, and before A.
        assert!(all.give_back(A, 4, at(1)).is_empty(), "C's request is next, and does not fit");
        assert_eq!(all.give_back(A, 6, at(2)), [(C, c, 10)]);
        assert_eq!(all.give_back(C, 10, at(3)), [(B, b, 4)]);
        assert_eq!(all.give_back(C, 4, at(4)), [(A, a, 10)]);
        assert_eq!(all.of(A).2, Counts { granted: 2, waited: 1, refused: 0, waiting: at(4) });
    }

    #[test]
    fn the_reserve_is_for_whoever_has_nothing() {
        let mut all = Turns::new(100, 10);
        // Alone, a tenant has all.
        assert_eq!((all.ask(A, 60, at(0)), all.ask(A, 40, at(0))), (Answer::Granted, Answer::Granted));
        all.give_back(A, 40, at(0));
        assert_eq!(all.ask(B, 10, at(0)), Answer::Granted);
        let more = waits(all.ask(A, 25, at(0)));
        assert_eq!(all.ask(C, 10, at(0)), Answer::Granted, "it passes A, which has something");
        assert_eq!(all.cancel(A, more, at(0)), []);
        assert_eq!(all.of(A).1, 0);
        assert_eq!(all.ask(A, 10, at(0)), Answer::Granted);
        waits(all.ask(A, 1, at(0)));
    }

    #[test]
    fn what_is_active_grows_past_those_who_wait_and_no_further_than_there_is_room() {
        let (a, b) = (TenantId::new(1), TenantId::new(2));
        let mut turns = Turns::new(10, 0);
        turns.set(b, Turn { reserved: 2, ..Turn::DEFAULT }, at(0));
        assert_eq!(turns.ask(a, 4, at(0)), Answer::Granted);
        waits(turns.ask(a, 5, at(0)));
        // 6 are not active, and 2 of these are the other tenant's.
        assert!(!turns.grow(a, 5, at(0)) && turns.grow(a, 4, at(0)) && !turns.grow(a, 1, at(0)));
        assert_eq!((turns.active(), turns.of(a).0), (8, 8));
        assert_eq!(turns.ask(b, 1, at(0)), Answer::Granted);
        assert!(turns.grow(b, 1, at(0)) && !turns.grow(b, 1, at(0)));
        assert_eq!(turns.give_back(a, 8, at(1)).len(), 1);
        // Nobody of this name has anything.
        assert!(!turns.grow(TenantId::new(3), 1, at(1)) && turns.active() == 7);
    }

    #[test]
    fn a_queue_has_an_end() {
        let mut all = Turns::new(10, 0);
        all.set(A, Turn { queue_most: 1, ..Turn::DEFAULT }, at(0));
        assert_eq!(all.ask(A, 10, at(0)), Answer::Granted);
        waits(all.ask(A, 1, at(0)));
        assert_eq!(all.ask(A, 1, at(0)), Answer::Refused(Refusal::QueueFull(1)));
        assert_eq!((all.of(A).2.refused, all.waiting()), (1, 1));
        all.set(B, Turn { queue_most: 0, ..Turn::DEFAULT }, at(0));
        assert_eq!(all.ask(B, 1, at(0)), Answer::Refused(Refusal::QueueFull(0)));
    }

    #[test]
    fn waits_are_estimated_by_the_blocks_that_came_back() {
        let mut all = Turns::new(10, 0);
        assert_eq!(all.estimate(A, None, 10, at(0)), Some(at(0)));
        assert_eq!(all.ask(A, 10, at(0)), Answer::Granted);
        assert_eq!(all.estimate(B, None, 1, at(1)), None);
        // One block a second comes back, and is taken again.
        for second in 1..=300 {
            all.give_back(A, 1, at(second));
            assert_eq!(all.ask(A, 1, at(second)), Answer::Granted);
        }
        let near = |found: Option<Duration>, seconds: f64| {
            let found = found.unwrap().as_secs_f64();
            assert!((found - seconds).abs() < 0.05 * seconds, "{found} instead of {seconds}");
        };
        near(all.estimate(B, None, 7, at(300)), 7.0);
        let first = waits(all.ask(B, 5, at(300)));
        near(all.estimate(B, Some(first), 0, at(300)), 5.0);
        // C has as little as B, but comes later. A has more than both.
        near(all.estimate(C, None, 3, at(300)), 8.0);
        let second = waits(all.ask(A, 1, at(300)));
        near(all.estimate(A, Some(second), 0, at(300)), 6.0);
        assert_eq!((all.waiting(), all.estimate(B, Some(RequestId(99)), 1, at(300))), (2, None));
        // An idle hour is no long wait.
        all.cancel(B, first, at(300));
        all.cancel(A, second, at(300));
        all.give_back(A, 10, at(300));
        assert_eq!(all.ask(A, 10, at(4000)), Answer::Granted);
    }

    /// Whatever is asked for, given back, set and withdrawn: never more is active than may be, static shares are there,
    /// and nobody waits for ever.
    #[test]
    fn no_more_is_active_than_may_be_and_nobody_waits_for_ever() {
        for seed in 0..200 {
            let mut rng = outcore_testkit::harness::Rng::new(seed);
            let (blocks, tenants) = (20 + rng.below(80) as u32, 2 + rng.below(4));
            let mut all = Turns::new(blocks, rng.below(10) as u32);
            let mut left = blocks / 2;
            for tenant in 0..tenants {
                let turn = Turn {
                    reserved: rng.below(u64::from(left) + 1) as u32,
                    weight: 1 + rng.below(4) as u32,
                    queue_most: rng.below(20) as u32,
                };
                left -= turn.reserved;
                all.set(TenantId::new(tenant), turn, at(0));
            }
            let (mut active, mut waiting) = (Vec::new(), Vec::new());
            let mut now = Duration::ZERO;
            for step in 0..600 {
                now += Duration::from_millis(rng.below(100));
                let (tenant, count) = (TenantId::new(rng.below(tenants)), 1 + rng.below(12) as u32);
                let is_within =
                    all.lines.get(&tenant).is_some_and(|line| line.waiting.is_empty() && line.is_within(count));
                // At the end nobody asks, and all that is active ends.
                let kind = if step < 400 { rng.below(5) } else { 4 };
                let granted = match kind {
                    0..=2 => {
                        match all.ask(tenant, count, now) {
                            Answer::Granted => active.push((tenant, count)),
                            Answer::Waits(id) => waiting.push((tenant, id)),
                            Answer::Refused(Refusal::Never(most)) => assert!(count > most),
                            Answer::Refused(Refusal::QueueFull(_)) => {}
                        }
                        assert!(!is_within || active.last() == Some(&(tenant, count)), "seed {seed}, step {step}");
                        Vec::new()
                    }
                    3 if !waiting.is_empty() => {
                        let (tenant, id) = waiting.swap_remove(rng.below(waiting.len() as u64) as usize);
                        all.cancel(tenant, id, now)
                    }
                    _ if !active.is_empty() => {
                        let (tenant, count) = active.swap_remove(rng.below(active.len() as u64) as usize);
                        all.give_back(tenant, count, now)
                    }
                    _ => Vec::new(),
                };
                for (tenant, id, count) in granted {
                    let at = waiting.iter().position(|waits| *waits == (tenant, id)).unwrap();
                    waiting.swap_remove(at);
                    active.push((tenant, count));
                }
                let sum: u32 = active.iter().map(|(_, count)| count).sum();
                assert_eq!((all.active(), all.waiting()), (sum, waiting.len()), "seed {seed}, step {step}");
                assert!(sum <= blocks, "seed {seed}, step {step}");
                let mut sums = (0, 0);
                for line in all.lines.values() {
                    sums = (sums.0 + u64::from(line.turn.reserved), sums.1 + u64::from(line.kept()));
                }
                assert_eq!((all.reserved, all.kept), sums, "seed {seed}, step {step}");
            }
            assert!(waiting.is_empty(), "seed {seed}: {waiting:?}");
        }
    }
}
