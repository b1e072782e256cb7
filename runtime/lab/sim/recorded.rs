//! The record of a simulation: lanes of spans, where pages were, and the order of use.
//!
//! # Invariants
//!
//! 1. A record is bounded, however long the simulation: [`LaneRecord::SPANS_MAX`] spans of each lane, the samples that
//!    [`Residency`] keeps, and the order of the first [`Recorded::USES_MAX`] uses, which is dropped at the end.
//! 2. Recording changes nothing: a simulation ends as it would have without.

use std::borrow::Cow;
use std::time::Duration;

use serde::ser::SerializeStruct;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::ids::{PageId, PageIndex, PageSize, SegmentId, Tier};
use crate::pager::policy::opt::{Optimum, min_hits};
use crate::pager::{PageUses, Pager, WaitCause};
use crate::residency::{Residency, Sample};

/// Nanoseconds since the start.
type Nanos = u64;

pub(super) fn nanos(time: Duration) -> Nanos {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The record of one device, and of the disk that all devices share.
///
/// Serialized, times of spans are in nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Recorded {
    /// The lanes: compute and stalls first, then links and the disk.
    pub lanes: Vec<LaneRecord>,
    /// Where the device's pages were over time.
    pub residency: Residency,
    /// Hits of the first uses of the device's pages, and hits of Belady's MIN with as many frames on the same uses.
    #[serde(flatten, serialize_with = "ratios")]
    pub optimum: Optimum,
    /// The most frames of the device tier that were in use after any event.
    #[serde(rename = "peak_device_frames")]
    pub peak_frames: u32,
    /// The same for the host tier.
    pub peak_host_frames: u32,
}

impl Recorded {
    /// The most uses whose order is kept, in some 16 MiB.
    pub const USES_MAX: usize = 1 << 22;
}

fn ratios<S: Serializer>(optimum: &Optimum, to: S) -> Result<S::Ok, S::Error> {
    let mut ratios = to.serialize_struct("Optimum", 3)?;
    ratios.serialize_field("hit_ratio", &optimum.actual_ratio())?;
    ratios.serialize_field("opt_hit_ratio", &optimum.ratio())?;
    ratios.serialize_field("ratio_uses", &optimum.uses)?;
    ratios.end()
}

/// The spans of one resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LaneRecord {
    /// Its name.
    pub name: Cow<'static, str>,
    /// The kinds that its spans can have.
    pub kinds: Vec<SpanKind>,
    /// Spans, in order. Where there were more than [`SPANS_MAX`](Self::SPANS_MAX), near ones of a kind are joined.
    pub spans: Vec<SpanRecord>,
    /// Spans of a kind are joined if together they are no longer than this.
    #[serde(skip)]
    cell: Nanos,
}

/// Totals of all spans of a kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpanKind {
    /// Its name.
    pub name: Cow<'static, str>,
    /// How many spans there were.
    pub count: u64,
    /// The sum of their times.
    #[serde(rename = "ns", serialize_with = "as_nanos", deserialize_with = "of_nanos")]
    pub time: Duration,
}

fn as_nanos<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(nanos(*time))
}

fn of_nanos<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    u64::deserialize(from).map(Duration::from_nanos)
}

/// An operation that took time, or several of one kind that were joined.
///
/// Serialized: its kind, its start, its length, and how much of the length was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanRecord {
    /// Index of its kind in the lane.
    pub kind: usize,
    /// Its start, since the start of the simulation.
    pub start: Duration,
    /// Its end, since the start of the simulation.
    pub end: Duration,
    /// How much of the time in between was taken.
    pub busy: Duration,
}

impl Serialize for SpanRecord {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let [start, len, busy] = [self.start, self.end.saturating_sub(self.start), self.busy].map(nanos);
        (self.kind, start, len, busy).serialize(to)
    }
}

impl<'de> Deserialize<'de> for SpanRecord {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let (kind, start, len, busy) = <(usize, u64, u64, u64)>::deserialize(from)?;
        let [start, len, busy] = [start, len, busy].map(Duration::from_nanos);
        Ok(Self { kind, start, end: start + len, busy })
    }
}

impl LaneRecord {
    /// The most spans that are kept.
    pub const SPANS_MAX: usize = 2000;

    fn new(name: &'static str, kinds: impl IntoIterator<Item = &'static str>) -> Self {
        let kind = |name| SpanKind { name: Cow::Borrowed(name), count: 0, time: Duration::ZERO };
        Self { name: Cow::Borrowed(name), kinds: kinds.into_iter().map(kind).collect(), spans: Vec::new(), cell: 0 }
    }

    fn push(&mut self, kind: usize, start: Nanos, end: Nanos) {
        let time = Duration::from_nanos(end - start);
        if let Some(kind) = self.kinds.get_mut(kind) {
            kind.count += 1;
            kind.time += time;
        }
        let span = SpanRecord { kind, start: Duration::from_nanos(start), end: Duration::from_nanos(end), busy: time };
        self.keep(span);
        while self.spans.len() > Self::SPANS_MAX {
            // Two neighbours of a kind that were not joined are together longer than the cell, so few enough are left.
            self.cell = (2 * self.cell).max(end / Self::SPANS_MAX as u64).max(1);
            for span in std::mem::take(&mut self.spans) {
                self.keep(span);
            }
        }
    }

    /// Joins a span with the last one of its kind if both together are short enough, so that variation over time can
    /// still be seen. Spans of other kinds may lie between.
    fn keep(&mut self, span: SpanRecord) {
        let cell = Duration::from_nanos(self.cell);
        let before = self.spans.iter_mut().rev().take(2 * self.kinds.len()).find(|last| last.kind == span.kind);
        match before {
            Some(last) if self.cell > 0 && span.end.saturating_sub(last.start) <= cell => {
                last.end = last.end.max(span.end);
                last.busy += span.busy;
            }
            _ => self.spans.push(span),
        }
    }

    /// Returns the sum of the times of all spans.
    pub fn busy(&self) -> Duration {
        self.kinds.iter().map(|kind| kind.time).sum()
    }

    /// Returns how many spans there were.
    pub fn count(&self) -> u64 {
        self.kinds.iter().map(|kind| kind.count).sum()
    }
}

/// The lanes, by index.
#[derive(Clone, Copy, Debug)]
pub(super) enum Row {
    Compute,
    Stalled,
    LinkIn,
    LinkOut,
    DiskRead,
    DiskWrite,
}

/// How many pages of each row a sample looks at.
const LOOKS: usize = 32;
/// Time between samples, at first.
const INTERVAL: Nanos = 10_000;

/// Records a simulation while it runs.
#[derive(Debug)]
pub(super) struct Recorder {
    lanes: Vec<LaneRecord>,
    residency: Residency,
    interval: Nanos,
    next: Nanos,
    /// By segment: the number of its first page.
    firsts: Vec<usize>,
    /// How many of those segments are the workload's, how many pages these have, and how many pages there are with
    /// segments added later.
    own: usize,
    pages: usize,
    numbered: usize,
    /// The order of use, and how many of these uses were hits.
    order: Vec<u32>,
    hits: u64,
    full: bool,
    peaks: (u32, u32),
}

impl Recorder {
    /// Makes a recorder for a device whose pager has segments of these numbers of pages, in order.
    pub(super) fn new(page: PageSize, segments: impl IntoIterator<Item = usize>, pager: &mut Pager) -> Self {
        let mut pages = 0;
        let first = |count| {
            pages += count;
            pages - count
        };
        let firsts: Vec<usize> = segments.into_iter().map(first).collect();
        pager.keep_uses();
        let lanes = vec![
            LaneRecord::new("compute", ["step"]),
            LaneRecord::new("stalled", WaitCause::ALL.map(WaitCause::name)),
            LaneRecord::new("link up", ["fill"]),
            LaneRecord::new("link down", ["write back"]),
            LaneRecord::new("disk read", ["read"]),
            LaneRecord::new("disk write", ["write"]),
        ];
        let residency = Residency { page_bytes: page.bytes(), ..Residency::default() };
        Self {
            lanes,
            residency,
            interval: INTERVAL,
            next: 0,
            own: firsts.len(),
            firsts,
            pages,
            numbered: pages,
            order: Vec::new(),
            hits: 0,
            full: false,
            peaks: (0, 0),
        }
    }

    /// Records a span of a lane.
    pub(super) fn span(&mut self, row: Row, start: Nanos, end: Nanos) {
        self.lanes[row as usize].push(0, start, end);
    }

    /// Records that the device had nothing to compute.
    pub(super) fn stalled(&mut self, cause: WaitCause, start: Nanos, end: Nanos) {
        if let Some(kind) = WaitCause::ALL.iter().position(|known| *known == cause) {
            self.lanes[Row::Stalled as usize].push(kind, start, end);
        }
    }

    /// Called after each event: updates the peaks, and takes a sample if one is due.
    pub(super) fn happened(&mut self, now: Nanos, pager: &mut Pager) {
        let (device, host) = (pager.device_frames().0, pager.host_frames().0);
        self.peaks = (self.peaks.0.max(device), self.peaks.1.max(host));
        if now >= self.next {
            self.look(now, pager);
            self.next = now.saturating_add(self.interval);
        }
    }

    fn look(&mut self, now: Nanos, pager: &mut Pager) {
        let tier = |number: usize| {
            let segment = self.firsts[..self.own].partition_point(|first| *first <= number) - 1;
            let index = PageIndex::new((number - self.firsts[segment]) as u32);
            let page = PageId { segment: SegmentId::new(segment as u32), index };
            pager.view_of(page).map_or(Tier::Disk, |view| view.tier())
        };
        let sample = Sample::of(now as f64 / 1e3, self.pages, tier, LOOKS);
        if self.residency.push(sample) {
            self.interval *= 2;
        }
        self.take_uses(pager);
    }

    /// Notes a segment of `pages` pages that was added. Only its uses are recorded, not where its pages are.
    pub(super) fn joined(&mut self, segment: SegmentId, pages: usize, pager: &mut Pager) {
        // Its number may have belonged to a removed segment, whose uses are taken first.
        self.take_uses(pager);
        let first = self.numbered;
        self.numbered += pages;
        match self.firsts.get_mut(segment.index()) {
            Some(known) => *known = first,
            None => self.firsts.push(first),
        }
    }

    fn take_uses(&mut self, pager: &mut Pager) {
        let PageUses { uses, dropped, .. } = pager.take_uses();
        if self.full || uses.is_empty() {
            return;
        }
        // Hits and the optimum are compared on the same uses, and hits are known only after each batch that was taken.
        if dropped > 0 || self.order.len() + uses.len() > Recorded::USES_MAX {
            self.full = true;
            return;
        }
        let number = |page: PageId| (self.firsts[page.segment.index()] + page.index.index()) as u32;
        self.order.extend(uses.iter().map(|used| number(used.page)));
        self.hits = pager.stats().hits;
    }

    /// Ends the recording and returns the record.
    pub(super) fn finish(mut self, now: Nanos, pager: &mut Pager, frames: u32) -> Recorded {
        self.look(now, pager);
        Recorded {
            lanes: self.lanes,
            residency: self.residency,
            optimum: Optimum {
                uses: self.order.len() as u64,
                hits: min_hits(&self.order, frames as usize),
                actual_hits: self.hits,
                truncated: self.full,
            },
            peak_frames: self.peaks.0,
            peak_host_frames: self.peaks.1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_keeps_every_span_while_there_are_few_and_their_time_where_there_are_many() {
        let mut lane = LaneRecord::new("lane", ["a", "b"]);
        for n in 0..1000 {
            lane.push((n % 2) as usize, n * 10, n * 10 + 4);
        }
        assert_eq!(lane.spans.len(), 1000);
        assert_eq!(lane.spans[1].start, Duration::from_nanos(10));
        for n in 1000..1_000_000 {
            lane.push((n % 3 / 2) as usize, n * 10, n * 10 + 4);
        }
        assert!(lane.spans.len() <= LaneRecord::SPANS_MAX && lane.spans.len() > 100, "{}", lane.spans.len());
        assert_eq!((lane.count(), lane.busy()), (1_000_000, Duration::from_nanos(4_000_000)));
        let kept: Duration = lane.spans.iter().map(|span| span.busy).sum();
        assert_eq!(kept, lane.busy());
        assert!(lane.spans.iter().all(|span| span.busy <= span.end - span.start), "no more than there is");
        // A span far from all others is not joined.
        lane.push(0, 1_000_000_000, 1_000_000_004);
        assert_eq!(lane.spans.last().unwrap().busy, Duration::from_nanos(4));
    }
}
