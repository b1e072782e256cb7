//! Decides which waiting operation may start next.
//!
//! # Invariants
//!
//! 1. Operations start in priority order, oldest first within a priority.
//! 2. The store's threads have at most `total` operations started at once. At most `background` of these are not
//!    demand: with [`Depth::Ahead`], a demand operation always finds room.
//! 3. For [`DEMAND_WINDOW`] after a demand operation was submitted, at most `beside_demand` bytes of others (or one
//!    operation) are started at once. What the disk has cannot be taken back, so it must be little while somebody
//!    waits. To raise an operation to demand does not open this window: it belongs to a stream that the disk limits,
//!    and throttling the stream would make it later still.
//! 4. Reads that callers carry out bring their own threads, and do not count in `total`. With them, at most `all`
//!    operations are started at once.
//! 5. No limit is zero. So whenever operations wait, at least one is started, and its end is the occasion to look
//!    again: no timer is needed when the window has passed.
//!
//! The queue is pure: no lock, no clock, no I/O.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::{Duration, Instant};

use crate::device::Token;
use crate::error::{Error, ErrorKind, Result};
use crate::store::Priority;

/// Most started operations that are not demand, at the default depth.
const AHEAD: u32 = 8;
/// Further operations that may be started beside those if they are demand.
const DEMAND_RESERVE: u32 = 8;
/// Most started bytes of operations that are not demand, while demand is recent. One operation of 2 MiB keeps a disk as
/// busy as sixteen do, and a demand read then waits for at most that one (`benches/store_latency.rs`). Smaller
/// operations need as many bytes in flight to keep the disk busy.
const BYTES_BESIDE_DEMAND: u64 = 2 << 20;
/// How long after the last demand operation the others are held back.
const DEMAND_WINDOW: Duration = Duration::from_millis(250);
/// Most started operations at the default depth, with the reads that callers carry out: this limits the threads that
/// wait for a disk.
const ALL_DEPTH: u32 = 64;
const PRIORITIES: usize = 5;

/// How many operations the kernel may have at once: 1 to 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueueDepth(u32);

impl QueueDepth {
    /// The default depth. Only operations that somebody waits for may use more than half of it.
    pub const DEFAULT: Self = Self(AHEAD + DEMAND_RESERVE);

    /// One at a time.
    pub const ONE: Self = Self(1);

    /// A depth of `n`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if `n` is not from 1 to 1024.
    pub fn new(n: u32) -> Result<Self> {
        if (1..=1024).contains(&n) {
            return Ok(Self(n));
        }
        Err(Error::new(ErrorKind::InvalidArgument, format!("queue depth {n} is not usable"))
            .remedy("choose a depth from 1 to 1024"))
    }

    /// The depth as a number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for QueueDepth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub total: u32,
    pub all: u32,
    pub background: u32,
    /// Bytes.
    pub beside_demand: u64,
}

/// How many operations the kernel may have at once, and of which kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// This many that are not demand, and a fixed number more of demand.
    Ahead(QueueDepth),
    /// This many of any kind.
    Any(QueueDepth),
}

impl Default for Depth {
    fn default() -> Self {
        Self::Ahead(QueueDepth(AHEAD))
    }
}

impl Depth {
    /// The default for [`QueueDepth::DEFAULT`], else [`Any`](Self::Any).
    pub fn of(depth: QueueDepth) -> Self {
        if depth == QueueDepth::DEFAULT { Self::default() } else { Self::Any(depth) }
    }

    pub fn limits(self) -> Limits {
        match self {
            Self::Ahead(ahead) => {
                let total = ahead.get() + DEMAND_RESERVE;
                Limits { total, all: total.max(ALL_DEPTH), background: ahead.get(), beside_demand: BYTES_BESIDE_DEMAND }
            }
            Self::Any(depth) => {
                let depth = depth.get();
                Limits { total: depth, all: depth, background: depth, beside_demand: BYTES_BESIDE_DEMAND }
            }
        }
    }
}

/// The limit that a started operation counts against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    Demand,
    /// Not demand, with its bytes.
    Other(u32),
    /// A demand read that a caller carries out.
    Callers,
}

#[derive(Debug)]
struct Waiting<T> {
    token: Token,
    bytes: u32,
    item: T,
}

#[derive(Debug)]
pub struct Queue<T> {
    limits: Limits,
    waiting: [BTreeMap<u64, Waiting<T>>; PRIORITIES],
    places: HashMap<Token, (Priority, u64)>,
    submitted: u64,
    ended: u64,
    started_demand: u32,
    started_callers: u32,
    started_other: u32,
    started_other_bytes: u64,
    last_demand: Option<Instant>,
}

impl<T> Queue<T> {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            waiting: Default::default(),
            places: HashMap::new(),
            submitted: 0,
            ended: 0,
            started_demand: 0,
            started_callers: 0,
            started_other: 0,
            started_other_bytes: 0,
            last_demand: None,
        }
    }

    /// Adds an operation of `bytes` bytes.
    pub fn push(&mut self, token: Token, priority: Priority, bytes: u32, item: T, now: Instant) {
        if priority == Priority::Demand {
            self.last_demand = Some(now);
        }
        let place = self.submitted;
        self.submitted += 1;
        self.waiting[priority as usize].insert(place, Waiting { token, bytes, item });
        self.places.insert(token, (priority, place));
    }

    /// Starts a demand read that its caller carries out. It never waits here: false if too many operations are started.
    pub fn start_callers(&mut self, now: Instant) -> bool {
        self.last_demand = Some(now);
        let room = self.started() < self.limits.all;
        self.started_callers += u32::from(room);
        room
    }

    /// Queues a read that a caller was to carry out.
    pub fn give_back(&mut self, token: Token, bytes: u32, item: T, now: Instant) {
        self.finished(Lane::Callers);
        self.ended -= 1;
        self.push(token, Priority::Demand, bytes, item, now);
    }

    /// Makes a waiting operation at least as urgent as `priority`; it keeps its age.
    pub fn raise(&mut self, token: Token, priority: Priority) {
        let Some(&(from, place)) = self.places.get(&token) else { return };
        if priority >= from {
            return;
        }
        if let Some(item) = self.waiting[from as usize].remove(&place) {
            self.waiting[priority as usize].insert(place, item);
            self.places.insert(token, (priority, place));
        }
    }

    /// Whether the operation waits.
    pub fn waits(&self, token: Token) -> bool {
        self.places.contains_key(&token)
    }

    /// The next operation, if one may start; it then counts as started.
    pub fn pop(&mut self, now: Instant) -> Option<(T, Lane)> {
        let class = self.startable(now)?;
        let (place, Waiting { token, bytes, item }) = self.waiting[class].pop_first()?;
        if self.places.get(&token).is_some_and(|&(_, p)| p == place) {
            self.places.remove(&token);
        }
        if class == Priority::Demand as usize {
            self.started_demand += 1;
            return Some((item, Lane::Demand));
        }
        self.started_other += 1;
        self.started_other_bytes += u64::from(bytes);
        Some((item, Lane::Other(bytes)))
    }

    /// Whether [`pop`](Self::pop) would give an operation.
    pub fn has_startable(&self, now: Instant) -> bool {
        self.startable(now).is_some()
    }

    /// A started operation has ended.
    pub fn finished(&mut self, lane: Lane) {
        let count = match lane {
            Lane::Demand => &mut self.started_demand,
            Lane::Callers => &mut self.started_callers,
            Lane::Other(bytes) => {
                self.started_other_bytes = self.started_other_bytes.saturating_sub(u64::from(bytes));
                &mut self.started_other
            }
        };
        invariant!(*count > 0, "an operation ended that never started");
        *count = count.saturating_sub(1);
        self.ended += 1;
    }

    /// Takes out all operations that wait, and counts them as ended.
    pub fn take_waiting(&mut self) -> Vec<T> {
        self.places.clear();
        let waiting: Vec<T> = self
            .waiting
            .iter_mut()
            .flat_map(|class| std::mem::take(class).into_values())
            .map(|waiting| waiting.item)
            .collect();
        self.ended += waiting.len() as u64;
        waiting
    }

    /// How many operations have ended.
    pub fn ended(&self) -> u64 {
        self.ended
    }

    /// How many operations wait or are started.
    pub fn outstanding(&self) -> u64 {
        self.waiting.iter().map(BTreeMap::len).sum::<usize>() as u64 + u64::from(self.started())
    }

    /// How many reads callers carry out now.
    pub fn callers(&self) -> u32 {
        self.started_callers
    }

    fn started(&self) -> u32 {
        self.started_demand + self.started_other + self.started_callers
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.iter().all(BTreeMap::is_empty)
    }

    fn startable(&self, now: Instant) -> Option<usize> {
        if self.started_demand + self.started_other >= self.limits.total || self.started() >= self.limits.all {
            return None;
        }
        let class = self.waiting.iter().position(|class| !class.is_empty())?;
        if class == Priority::Demand as usize {
            return Some(class);
        }
        let demand_is_recent = self.last_demand.is_some_and(|t| now.saturating_duration_since(t) < DEMAND_WINDOW);
        let bytes = self.waiting[class].first_key_value().map_or(0, |(_, waiting)| u64::from(waiting.bytes));
        let fits = self.started_other < self.limits.background
            && (!demand_is_recent
                || self.started_other == 0
                || self.started_other_bytes + bytes <= self.limits.beside_demand);
        fits.then_some(class)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u32 = 64 << 10;
    const LIMITS: Limits = Limits { total: 4, all: 6, background: 3, beside_demand: BYTES as u64 };

    fn queue(ops: &[(u64, Priority)], now: Instant) -> Queue<u64> {
        let mut queue = Queue::new(LIMITS);
        for &(n, priority) in ops {
            queue.push(Token(n), priority, BYTES, n, now);
        }
        queue
    }

    #[test]
    fn starts_by_priority_then_age() {
        let now = Instant::now();
        let ops =
            [(1, Priority::Background), (2, Priority::Prefetch), (3, Priority::WriteBack), (4, Priority::Prefetch)];
        let mut queue = queue(&ops, now);
        let mut order = Vec::new();
        while let Some((n, lane)) = queue.pop(now) {
            order.push(n);
            queue.finished(lane);
        }
        assert_eq!(order, [3, 2, 4, 1]);
        assert!(queue.is_empty());
    }

    #[test]
    fn raise_moves_up_keeps_age_and_never_down() {
        let now = Instant::now();
        let ops = [(1, Priority::Prefetch), (2, Priority::Background), (3, Priority::Prefetch)];
        let mut queue = queue(&ops, now);
        queue.raise(Token(2), Priority::Prefetch);
        queue.raise(Token(1), Priority::Background);
        queue.raise(Token(99), Priority::Demand);
        let order: Vec<_> = std::iter::from_fn(|| queue.pop(now)).map(|(n, _)| n).collect();
        assert_eq!(order, [1, 2, 3]);
    }

    #[test]
    fn background_leaves_room_for_demand() {
        let now = Instant::now();
        let mut queue = queue(&[1, 2, 3, 4, 5].map(|n| (n, Priority::Prefetch)), now);
        for _ in 0..3 {
            assert!(matches!(queue.pop(now), Some((_, Lane::Other(_)))));
        }
        assert!(!queue.has_startable(now));
        queue.push(Token(9), Priority::Demand, BYTES, 9, now);
        assert_eq!(queue.pop(now), Some((9, Lane::Demand)));
        assert_eq!(queue.pop(now), None);
    }

    #[test]
    fn recent_demand_holds_others_back_until_the_window_has_passed() {
        let now = Instant::now();
        let mut queue = queue(&[(1, Priority::Prefetch), (2, Priority::Prefetch), (3, Priority::Demand)], now);
        assert_eq!(queue.pop(now), Some((3, Lane::Demand)));
        assert_eq!(queue.pop(now), Some((1, Lane::Other(BYTES))));
        assert_eq!(queue.pop(now), None);
        queue.finished(Lane::Demand);
        assert_eq!(queue.pop(now), None);
        assert_eq!(queue.pop(now + DEMAND_WINDOW), Some((2, Lane::Other(BYTES))));
    }

    #[test]
    fn small_operations_beside_demand_fill_the_same_bytes() {
        let now = Instant::now();
        let mut queue = Queue::new(Limits { beside_demand: 2 * u64::from(BYTES), ..LIMITS });
        queue.push(Token(0), Priority::Demand, BYTES, 0, now);
        for n in 1..=3 {
            queue.push(Token(n), Priority::Prefetch, BYTES, n, now);
        }
        let started: Vec<_> = std::iter::from_fn(|| queue.pop(now)).map(|(n, _)| n).collect();
        assert_eq!(started, [0, 1, 2]);
    }

    #[test]
    fn a_raised_operation_does_not_hold_its_stream_back() {
        let now = Instant::now();
        let mut queue = queue(&[1, 2, 3].map(|n| (n, Priority::Prefetch)), now);
        queue.raise(Token(2), Priority::Demand);
        let started: Vec<_> = std::iter::from_fn(|| queue.pop(now)).map(|(n, _)| n).collect();
        assert_eq!(started, [2, 1, 3]);
    }

    #[test]
    fn reads_of_callers_leave_the_threads_their_room() {
        let now = Instant::now();
        let mut queue = queue(&[1, 2, 3, 4, 5].map(|n| (n, Priority::Demand)), now);
        assert!(queue.start_callers(now) && queue.start_callers(now));
        let started: Vec<_> = std::iter::from_fn(|| queue.pop(now)).map(|(n, _)| n).collect();
        assert_eq!(started, [1, 2, 3, 4]);
        assert!(!queue.start_callers(now), "six are started in all");
        assert_eq!((queue.outstanding(), queue.callers()), (7, 2));
        queue.finished(Lane::Demand);
        assert!(queue.start_callers(now));
        assert_eq!(queue.pop(now), None, "six are started again");
        // An operation of another caller was submitted meanwhile; both are kept.
        queue.push(Token(8), Priority::Demand, BYTES, 8, now);
        queue.give_back(Token(9), BYTES, 9, now);
        assert_eq!(queue.pop(now).map(|(n, _)| n), Some(5));
        queue.finished(Lane::Callers);
        queue.finished(Lane::Callers);
        for _ in 0..4 {
            queue.finished(Lane::Demand);
        }
        assert_eq!([queue.pop(now), queue.pop(now)].map(|next| next.map(|(n, _)| n)), [Some(8), Some(9)]);
        assert_eq!((queue.outstanding(), queue.ended()), (2, 7));
    }

    #[test]
    fn limits_are_never_zero() {
        let limits = Depth::Any(QueueDepth::new(1).unwrap()).limits();
        assert_eq!((limits.total, limits.background), (1, 1));
        assert!(QueueDepth::new(0).is_err());
    }
}
