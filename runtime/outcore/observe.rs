//! Observation: counters that are always on, and a timeline of spans that is kept on request.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Serialize, Serializer};

use crate::ids::{Bytes, PageId, PageIndex, Tier};
use crate::pager::WaitCause;

/// The most spans that are kept: 80 bytes each, 80 MiB in all, beside their texts. Later ones are only counted.
const TIMELINE_MAX: usize = 1 << 20;

/// One row of the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Lane {
    /// Reads and writes of files.
    Disk,
    /// Copies between host and device memory.
    Link,
    /// The caller's compute, where the caller reports it.
    Compute,
    /// A caller waited for pages.
    Stall,
}

/// Something that took time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its row.
    pub lane: Lane,
    /// What it was: "read", "write", "fill", "write back", a stall's cause, or the caller's own word.
    pub what: &'static str,
    /// The page or the caller's detail, as text. Empty if there is none.
    pub detail: String,
    /// When it began, since the runtime was opened.
    pub start: Duration,
    /// How long it took.
    pub duration: Duration,
}

/// Makes events of the Trace Event Format, which chrome://tracing, Perfetto and `outcore report` read, out of spans.
///
/// Spans of a lane that overlap get rows of their own, so that all are seen. A file has the events of all spans, in the
/// order of their starts, and then those that [name](Self::names) the rows:
///
/// ```
/// use outcore::stats::{Lane, Span, TraceRows};
/// use std::time::Duration;
///
/// let span = |start, duration| Span {
///     lane: Lane::Disk,
///     what: "read",
///     detail: String::new(),
///     start: Duration::from_micros(start),
///     duration: Duration::from_micros(duration),
/// };
/// let mut rows = TraceRows::default();
/// let mut events = Vec::new();
/// for span in [span(0, 10), span(5, 10), span(10, 10)] {
///     events.push(serde_json::to_value(rows.event(&span))?);
/// }
/// assert_eq!(events[0]["tid"], events[2]["tid"]);
/// assert_ne!(events[0]["tid"], events[1]["tid"]);
/// for name in rows.names() {
///     events.push(serde_json::to_value(name)?);
/// }
/// println!("{}", serde_json::json!({"displayTimeUnit": "ms", "traceEvents": events}));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct TraceRows {
    /// For each row of a lane, the end of its last span.
    ends: [Vec<Duration>; TraceRows::LANES.len()],
}

/// An event that is a span.
#[derive(Serialize)]
struct SpanEvent<'a> {
    name: &'static str,
    cat: &'static str,
    ph: &'static str,
    /// Microseconds.
    ts: f64,
    dur: f64,
    pid: u32,
    tid: usize,
    args: SpanDetail<'a>,
}

#[derive(Serialize)]
struct SpanDetail<'a> {
    detail: &'a str,
}

/// An event that says something of a row.
#[derive(Serialize)]
struct RowEvent {
    name: &'static str,
    ph: &'static str,
    pid: u32,
    tid: usize,
    args: RowDetail,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum RowDetail {
    Name(String),
    SortIndex(usize),
}

impl TraceRows {
    const LANES: [(Lane, &str); 4] =
        [(Lane::Compute, "pass"), (Lane::Stall, "stall"), (Lane::Link, "link"), (Lane::Disk, "disk")];
    /// A span that finds all rows of its lane taken shares the last one.
    const PER_LANE: usize = 1000;

    /// The event of a span, which begins no earlier than those before it.
    pub fn event<'a>(&mut self, span: &'a Span) -> impl Serialize + use<'a> {
        let lane = Self::LANES.iter().position(|(lane, _)| *lane == span.lane).unwrap_or(0);
        let ends = &mut self.ends[lane];
        let row = ends.iter().position(|end| *end <= span.start).unwrap_or_else(|| {
            if ends.len() < Self::PER_LANE {
                ends.push(Duration::ZERO);
            }
            ends.len() - 1
        });
        ends[row] = span.start + span.duration;
        let microseconds = |time: Duration| time.as_nanos() as f64 / 1e3;
        SpanEvent {
            name: span.what,
            cat: Self::LANES[lane].1,
            ph: "X",
            ts: microseconds(span.start),
            dur: microseconds(span.duration),
            pid: 1,
            tid: lane * Self::PER_LANE + row,
            args: SpanDetail { detail: &span.detail },
        }
    }

    /// The events that name the rows, and put them in order. Each lane has at least one row.
    pub fn names(&self) -> impl Iterator<Item = impl Serialize> {
        let rows = |(lane, ends): (usize, &Vec<Duration>)| (0..ends.len().max(1)).map(move |row| (lane, row));
        self.ends.iter().enumerate().flat_map(rows).flat_map(|(lane, row)| {
            let (name, tid) = (Self::LANES[lane].1, lane * Self::PER_LANE + row);
            let name = if row == 0 { name.to_owned() } else { format!("{name} {}", row + 1) };
            let event = |kind, args| RowEvent { name: kind, ph: "M", pid: 1, tid, args };
            [event("thread_name", RowDetail::Name(name)), event("thread_sort_index", RowDetail::SortIndex(tid))]
        })
    }
}

/// A resource's busy time: the union of the spans in which it had work.
#[derive(Debug, Default)]
struct Busy {
    state: Mutex<(u32, Option<Instant>, Duration)>,
}

impl Busy {
    fn begin(&self, now: Instant) {
        let mut state = self.state.lock();
        if state.0 == 0 {
            state.1 = Some(now);
        }
        state.0 += 1;
    }
    fn end(&self, now: Instant) {
        let mut state = self.state.lock();
        state.0 = state.0.saturating_sub(1);
        if state.0 == 0
            && let Some(since) = state.1.take()
        {
            state.2 += now.saturating_duration_since(since);
        }
    }
    fn total(&self, now: Instant) -> Duration {
        let state = self.state.lock();
        state.2 + state.1.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }
}

#[derive(Debug)]
pub(crate) struct Observer {
    opened: Instant,
    keep_timeline: AtomicBool,
    timeline: Mutex<Vec<Span>>,
    dropped: AtomicU64,
    disk_read: AtomicU64,
    disk_written: AtomicU64,
    link_in: AtomicU64,
    link_out: AtomicU64,
    disk_busy: Busy,
    link_busy: Busy,
    /// By cause, then by tier.
    stalls: [[Stall; Tier::ALL.len()]; WaitCause::ALL.len()],
    peak_device: AtomicU64,
    peak_host: AtomicU64,
}

#[derive(Debug, Default)]
struct Stall {
    count: AtomicU64,
    nanos: AtomicU64,
}

/// Which resource an operation uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resource {
    DiskRead,
    DiskWrite,
    LinkIn,
    LinkOut,
}

impl Observer {
    pub(crate) fn new(keep_timeline: bool) -> Self {
        Self {
            opened: Instant::now(),
            keep_timeline: AtomicBool::new(keep_timeline),
            timeline: Mutex::new(Vec::new()),
            dropped: AtomicU64::new(0),
            disk_read: AtomicU64::new(0),
            disk_written: AtomicU64::new(0),
            link_in: AtomicU64::new(0),
            link_out: AtomicU64::new(0),
            disk_busy: Busy::default(),
            link_busy: Busy::default(),
            stalls: Default::default(),
            peak_device: AtomicU64::new(0),
            peak_host: AtomicU64::new(0),
        }
    }

    fn busy(&self, resource: Resource) -> &Busy {
        match resource {
            Resource::DiskRead | Resource::DiskWrite => &self.disk_busy,
            Resource::LinkIn | Resource::LinkOut => &self.link_busy,
        }
    }

    pub(crate) fn begin(&self, resource: Resource) -> Instant {
        let now = Instant::now();
        self.busy(resource).begin(now);
        now
    }

    /// Records the end of an operation. `bytes` is what it moved, 0 if it failed.
    pub(crate) fn end(&self, resource: Resource, since: Instant, bytes: u64, detail: impl FnOnce() -> String) {
        let now = Instant::now();
        self.busy(resource).end(now);
        let (counter, lane, what) = match resource {
            Resource::DiskRead => (&self.disk_read, Lane::Disk, "read"),
            Resource::DiskWrite => (&self.disk_written, Lane::Disk, "write"),
            Resource::LinkIn => (&self.link_in, Lane::Link, "fill"),
            Resource::LinkOut => (&self.link_out, Lane::Link, "write back"),
        };
        counter.fetch_add(bytes, Ordering::Relaxed);
        self.span(lane, what, since, now, detail);
    }

    /// Records that somebody waited since `since` for bytes that were in `tier`. Returns how long.
    pub(crate) fn stall(
        &self,
        cause: WaitCause,
        tier: Tier,
        since: Instant,
        detail: impl FnOnce() -> String,
    ) -> Duration {
        let now = Instant::now();
        let time = now.saturating_duration_since(since);
        if let Some(at) = WaitCause::ALL.iter().position(|known| *known == cause) {
            let stall = &self.stalls[at][tier as usize];
            stall.count.fetch_add(1, Ordering::Relaxed);
            stall.nanos.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        }
        self.span(Lane::Stall, cause.name(), since, now, detail);
        time
    }

    pub(crate) fn span(
        &self,
        lane: Lane,
        what: &'static str,
        since: Instant,
        until: Instant,
        detail: impl FnOnce() -> String,
    ) {
        if !self.keep_timeline.load(Ordering::Relaxed) {
            return;
        }
        let span = Span {
            lane,
            what,
            detail: detail(),
            start: since.saturating_duration_since(self.opened),
            duration: until.saturating_duration_since(since),
        };
        let mut timeline = self.timeline.lock();
        if timeline.len() < TIMELINE_MAX {
            timeline.push(span);
        } else {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    pub(crate) fn take_timeline(&self) -> Vec<Span> {
        std::mem::take(&mut *self.timeline.lock())
    }

    pub(crate) fn in_use(&self, device: Bytes, host: Bytes) {
        self.peak_device.fetch_max(device.get(), Ordering::Relaxed);
        self.peak_host.fetch_max(host.get(), Ordering::Relaxed);
    }

    pub(crate) fn traffic(&self) -> Traffic {
        let get = |counter: &AtomicU64| Bytes::new(counter.load(Ordering::Relaxed));
        let now = Instant::now();
        Traffic {
            disk_read: get(&self.disk_read),
            disk_written: get(&self.disk_written),
            link_in: get(&self.link_in),
            link_out: get(&self.link_out),
            disk_busy: self.disk_busy.total(now),
            link_busy: self.link_busy.total(now),
            peak_device: get(&self.peak_device),
            peak_host: get(&self.peak_host),
        }
    }

    pub(crate) fn stalls(&self) -> Vec<StallStats> {
        let of_cause = |(cause, stalls): (&WaitCause, &[Stall; Tier::ALL.len()])| {
            let read = |stall: &Stall| {
                (stall.count.load(Ordering::Relaxed), Duration::from_nanos(stall.nanos.load(Ordering::Relaxed)))
            };
            StallStats::new(*cause, stalls.each_ref().map(read))
        };
        WaitCause::ALL.iter().zip(&self.stalls).map(of_cause).collect()
    }
}

/// Serializes a duration as seconds, with a fraction.
pub(crate) fn seconds<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64())
}

/// Bytes moved and time spent moving them, since the runtime was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Traffic {
    /// Bytes read from files.
    pub disk_read: Bytes,
    /// Bytes written to the scratch file.
    pub disk_written: Bytes,
    /// Bytes copied from host to device memory.
    pub link_in: Bytes,
    /// Bytes copied from device to host memory.
    pub link_out: Bytes,
    /// Time in which at least one read or write was under way.
    #[serde(serialize_with = "seconds")]
    pub disk_busy: Duration,
    /// Time in which at least one copy was under way.
    #[serde(serialize_with = "seconds")]
    pub link_busy: Duration,
    /// The most device memory in frames at one time.
    pub peak_device: Bytes,
    /// The most host-tier memory in frames at one time.
    pub peak_host: Bytes,
}

/// Time callers waited, for one cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct StallStats {
    /// The cause.
    pub cause: WaitCause,
    /// The cause in words.
    pub name: &'static str,
    /// How often.
    pub count: u64,
    /// How long in all.
    #[serde(serialize_with = "seconds")]
    pub time: Duration,
    /// The same by the tier that had the bytes of the awaited page, fastest first.
    pub tiers: [TierStalls; Tier::ALL.len()],
}

impl StallStats {
    /// The stalls of one cause: how often and how long in all, for each of [`Tier::ALL`].
    #[doc(hidden)]
    pub fn new(cause: WaitCause, tiers: [(u64, Duration); Tier::ALL.len()]) -> Self {
        let tiers = Tier::ALL.map(|tier| {
            let (count, time) = tiers[tier as usize];
            TierStalls { tier, count, time }
        });
        let count = tiers.iter().map(|stalls| stalls.count).sum();
        let time = tiers.iter().map(|stalls| stalls.time).sum();
        Self { cause, name: cause.name(), count, time, tiers }
    }
}

/// Time callers waited for pages whose bytes were in one tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TierStalls {
    /// The tier; [`Device`](Tier::Device) if the page was there but pinned or in motion, or had yet to be made.
    pub tier: Tier,
    /// How often.
    pub count: u64,
    /// How long in all.
    #[serde(serialize_with = "seconds")]
    pub time: Duration,
}

/// Time callers waited for one page. A request for several pages counts for the first of them that was missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PageStalls {
    /// The page.
    pub page: PageId,
    /// The tensors whose bytes the page holds, as text: the first by name, the others as a number. For an allocated
    /// tensor, its type and shape.
    pub tensor: String,
    /// How often.
    pub count: u64,
    /// How long in all.
    #[serde(serialize_with = "seconds")]
    pub time: Duration,
    /// The cause of the last wait.
    pub cause: WaitCause,
    /// That cause in words.
    pub name: &'static str,
    /// The tier that had its bytes at the last wait.
    pub tier: Tier,
}

/// The waits for each page of a segment: 8 bytes a page, allocated at the first wait.
#[derive(Debug, Default)]
pub(crate) struct PageWaits(OnceLock<Box<[PageWait]>>);

/// From the highest bit: time waited in units of 1024 ns (32 bits, 73 minutes), number of waits (24), cause and tier of
/// the last wait (8). Time and number stop at their largest value.
#[derive(Debug, Default)]
struct PageWait(AtomicU64);

impl PageWait {
    const TIME_MAX: u64 = (1 << 32) - 1;
    const COUNT_MAX: u64 = (1 << 24) - 1;

    fn unpack(word: u64) -> (u64, u64, usize) {
        (word >> 32, word >> 8 & Self::COUNT_MAX, (word & 0xFF) as usize)
    }

    fn add(&self, time: Duration, last: usize) {
        let units = (time.as_nanos() >> 10).min(u128::from(Self::TIME_MAX)) as u64;
        let added = |word| {
            let (time, count, _) = Self::unpack(word);
            let (time, count) = ((time + units).min(Self::TIME_MAX), (count + 1).min(Self::COUNT_MAX));
            Some(time << 32 | count << 8 | last as u64)
        };
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, added);
    }
}

impl PageWaits {
    pub(crate) fn add(&self, pages: u32, page: PageIndex, cause: WaitCause, tier: Tier, time: Duration) {
        let Some(cause) = WaitCause::ALL.iter().position(|known| *known == cause) else { return };
        let all = self.0.get_or_init(|| (0..pages).map(|_| PageWait::default()).collect());
        let Some(wait) = all.get(page.index()) else { return };
        wait.add(time, cause * Tier::ALL.len() + tier as usize);
    }

    /// The pages that were waited for.
    pub(crate) fn waited(&self) -> impl Iterator<Item = Waited> {
        let all = self.0.get().map(|all| &**all).unwrap_or_default();
        all.iter().enumerate().filter_map(|(index, wait)| {
            let (time, count, last) = PageWait::unpack(wait.0.load(Ordering::Relaxed));
            (count > 0).then(|| Waited {
                page: PageIndex::new(index as u32),
                count,
                time: Duration::from_nanos(time << 10),
                cause: WaitCause::ALL[last / Tier::ALL.len()],
                tier: Tier::ALL[last % Tier::ALL.len()],
            })
        })
    }
}

/// A page that was waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waited {
    pub(crate) page: PageIndex,
    pub(crate) count: u64,
    pub(crate) time: Duration,
    pub(crate) cause: WaitCause,
    pub(crate) tier: Tier,
}
