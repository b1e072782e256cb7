//! Who touched which bytes, and whether anything ordered them.
//!
//! Everything is judged when it is submitted, from what the program has said so far, so a verdict does not depend on
//! when the work happens to run. Device memory is tracked by physical allocation and offset: a frame that is mapped
//! somewhere else remains the same bytes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::clock::{Clock, TimelineId};

/// The memory in which offsets count.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Space {
    /// A physical allocation, by id; offsets count from its start.
    Device(u64),
    /// The process's own memory; offsets are addresses.
    Host,
}

/// One operation, for messages and for the records of what it touched.
#[derive(Clone, Debug)]
pub struct Op {
    /// `cuMemcpyHtoDAsync on stream 2`.
    pub what: Arc<str>,
    pub timeline: TimelineId,
    pub number: u64,
}

impl Op {
    fn before(&self, clock: &Clock) -> bool {
        clock.get(self.timeline) >= self.number
    }
}

/// A range that an operation touches.
#[derive(Clone, Copy, Debug)]
pub struct Touch {
    pub space: Space,
    pub start: u64,
    pub len: u64,
    pub write: bool,
}

#[derive(Clone, Default)]
struct Segment {
    end: u64,
    write: Option<Op>,
    /// The last read of each timeline since the write.
    reads: Vec<Op>,
}

/// Bytes with the same history are one segment; segments are disjoint.
#[derive(Default)]
struct History(BTreeMap<u64, Segment>);

impl History {
    /// Makes `at` a border of segments.
    fn split(&mut self, at: u64) {
        let Some((&start, segment)) = self.0.range_mut(..at).next_back() else { return };
        if start < at && at < segment.end {
            let right = segment.clone();
            segment.end = at;
            self.0.insert(at, right);
        }
    }

    /// Records the touch; returns the earlier operations it conflicts with.
    fn touch(&mut self, start: u64, end: u64, write: bool, op: &Op, clock: &Clock) -> Vec<(Op, bool)> {
        self.split(start);
        self.split(end);
        let mut conflicts: Vec<(Op, bool)> = Vec::new();
        // Of each timeline, the last conflicting operation: the earlier ones are before it.
        let mut found = |earlier: &Op, wrote: bool| {
            if earlier.before(clock) {
                return;
            }
            match conflicts.iter_mut().find(|(op, _)| op.timeline == earlier.timeline) {
                Some(known) if known.0.number < earlier.number => *known = (earlier.clone(), wrote),
                Some(_) => {}
                None => conflicts.push((earlier.clone(), wrote)),
            }
        };
        let mut gaps = Vec::new();
        let mut at = start;
        for (&from, segment) in self.0.range_mut(start..end) {
            if at < from {
                gaps.push((at, from));
            }
            at = segment.end;
            if let Some(earlier) = &segment.write {
                found(earlier, true);
            }
            if write {
                segment.reads.iter().for_each(|earlier| found(earlier, false));
            } else {
                segment.reads.retain(|earlier| earlier.timeline != op.timeline);
                segment.reads.push(op.clone());
            }
        }
        if write {
            let inside: Vec<u64> = self.0.range(start..end).map(|(&from, _)| from).collect();
            inside.iter().for_each(|from| drop(self.0.remove(from)));
            self.0.insert(start, Segment { end, write: Some(op.clone()), reads: Vec::new() });
        } else {
            if at < end {
                gaps.push((at, end));
            }
            for (from, to) in gaps {
                self.0.insert(from, Segment { end: to, write: None, reads: vec![op.clone()] });
            }
        }
        conflicts
    }

    fn forget(&mut self, start: u64, end: u64) {
        self.split(start);
        self.split(end);
        let inside: Vec<u64> = self.0.range(start..end).map(|(&from, _)| from).collect();
        inside.iter().for_each(|from| drop(self.0.remove(from)));
    }

    /// The operations on these bytes that are not known to have ended.
    fn unfinished(&self, start: u64, end: u64, known: &Clock) -> Option<Op> {
        let first = self.0.range(..start).next_back().filter(|(_, s)| s.end > start).map(|(&from, _)| from);
        self.0
            .range(first.unwrap_or(start)..end)
            .flat_map(|(_, segment)| segment.write.iter().chain(&segment.reads))
            .find(|op| !op.before(known))
            .cloned()
    }
}

/// The findings, and the histories that they are found with.
#[derive(Default)]
pub struct Judge {
    findings: Vec<String>,
    histories: HashMap<Space, History>,
    echo: bool,
}

/// More findings than this are counted, not kept.
const KEPT: usize = 1000;

impl Judge {
    pub fn new() -> Self {
        Self { echo: std::env::var_os("FAKECUDA_ECHO").is_some_and(|v| v != "0"), ..Self::default() }
    }
    /// Notes a finding: `kind` is one of the words in the README.
    pub fn find(&mut self, kind: &str, text: &str) {
        let line = format!("{kind}: {text}");
        if self.echo {
            eprintln!("fake CUDA: {line}");
        }
        if self.findings.len() < KEPT && !self.findings.contains(&line) {
            self.findings.push(line);
        }
    }
    pub fn findings(&self) -> &[String] {
        &self.findings
    }
    pub fn clear_findings(&mut self) {
        self.findings.clear();
    }

    /// Records what `op`, whose clock is `clock`, touches, and reports what conflicts with it.
    pub fn touch(&mut self, op: &Op, clock: &Clock, touches: &[Touch]) {
        self.touch_where(op, clock, touches, |_| true);
    }

    /// As [`touch`](Self::touch), for what an operation tells only while it runs. Operations that were submitted behind
    /// it are no earlier ones: `submitted` says how far each timeline was.
    pub fn touch_late(&mut self, op: &Op, clock: &Clock, submitted: &[u64], touches: &[Touch]) {
        self.touch_where(op, clock, touches, |other| {
            submitted.get(other.timeline).is_some_and(|&number| other.number <= number)
        });
    }

    fn touch_where(&mut self, op: &Op, clock: &Clock, touches: &[Touch], is_earlier: impl Fn(&Op) -> bool) {
        for touch in touches.iter().filter(|touch| touch.len > 0) {
            let end = touch.start + touch.len;
            let history = self.histories.entry(touch.space).or_default();
            for (earlier, wrote) in history.touch(touch.start, end, touch.write, op, clock) {
                if !is_earlier(&earlier) {
                    continue;
                }
                let place = match touch.space {
                    Space::Device(id) => format!("device memory {id}, bytes {}..{end}", touch.start),
                    Space::Host => format!("host memory {:#x}, {} bytes", touch.start, touch.len),
                };
                let verb = |write| if write { "writes" } else { "reads" };
                let text = format!(
                    "{} (operation {}) {} {place}; {} (operation {}) {} some of them, and nothing orders the two",
                    op.what,
                    op.number,
                    verb(touch.write),
                    earlier.what,
                    earlier.number,
                    verb(wrote),
                );
                self.find("race", &text);
            }
        }
    }

    /// Memory that goes away: its history ends here.
    pub fn forget(&mut self, space: Space, start: u64, end: u64) {
        if let Some(history) = self.histories.get_mut(&space) {
            history.forget(start, end);
        }
    }
    pub fn forget_space(&mut self, space: Space) {
        self.histories.remove(&space);
    }
    /// An operation on these bytes that the host does not know to have ended.
    pub fn unfinished(&self, space: Space, start: u64, end: u64, known: &Clock) -> Option<Op> {
        self.histories.get(&space)?.unfinished(start, end, known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A generator good enough to mix ranges: xorshift.
    struct Random(u64);
    impl Random {
        fn below(&mut self, n: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % n
        }
    }

    #[derive(Clone, Default)]
    struct Byte {
        write: Option<(TimelineId, u64)>,
        reads: BTreeMap<TimelineId, u64>,
    }

    /// Random touches by three unordered timelines that now and then learn of each other, against a table of bytes.
    #[test]
    fn segments_agree_with_a_table_of_bytes() {
        const BYTES: u64 = 40;
        for seed in 1..200u64 {
            let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
            let mut history = History::default();
            let mut table = vec![Byte::default(); BYTES as usize];
            let mut clocks = vec![Clock::default(); 4];
            for number in 1..60u64 {
                let timeline = 1 + random.below(3) as usize;
                if random.below(3) == 0 {
                    let other = clocks[1 + random.below(3) as usize].clone();
                    clocks[timeline].join(&other);
                }
                clocks[timeline].raise(timeline, number);
                let clock = clocks[timeline].clone();
                let start = random.below(BYTES - 1);
                let end = start + 1 + random.below(BYTES - start);
                let write = random.below(2) == 0;
                let op = Op { what: "test".into(), timeline, number };
                let mut found: Vec<_> = history
                    .touch(start, end, write, &op, &clock)
                    .iter()
                    .map(|(op, _)| (op.timeline, op.number))
                    .collect();
                found.sort_unstable();

                let mut expected: BTreeMap<TimelineId, u64> = BTreeMap::new();
                for byte in &mut table[start as usize..end as usize] {
                    let reads = byte.reads.iter().map(|(&t, &n)| (t, n)).filter(|_| write);
                    for (t, n) in byte.write.into_iter().chain(reads) {
                        if clock.get(t) < n {
                            let last = expected.entry(t).or_default();
                            *last = n.max(*last);
                        }
                    }
                    if write {
                        *byte = Byte { write: Some((timeline, number)), reads: BTreeMap::new() };
                    } else {
                        byte.reads.insert(timeline, number);
                    }
                }
                assert_eq!(found, expected.into_iter().collect::<Vec<_>>(), "seed {seed}, operation {number}");
            }
        }
    }
}
