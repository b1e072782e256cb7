//! Timelines: files in the Trace Event Format, which `generate --timeline` writes, and records of `outcore simulate
//! --timeline`.

use std::collections::BTreeMap;

use outcore::{Error, ErrorKind, Result};
use outcore_lab::residency::Residency;
use outcore_lab::sim::LaneRecord;
use outcore_mapped::live::Run;
use serde::{Deserialize, Serialize};

use super::{residency, run};

/// The fields of an event that are read.
#[derive(Debug, Deserialize)]
pub struct Event {
    #[serde(default)]
    name: String,
    #[serde(default)]
    cat: String,
    ph: String,
    /// Start and duration in microseconds.
    ts: Option<f64>,
    dur: Option<f64>,
}

/// A run's spans by lane, in seconds.
#[derive(Debug, Serialize)]
pub struct Timeline {
    #[serde(skip)]
    pub name: String,
    /// A note about it.
    #[serde(skip)]
    pub about: Option<String>,
    pub start: f64,
    pub end: f64,
    /// The names of spans.
    pub names: Vec<String>,
    pub lanes: Vec<Lane>,
    pub residency: Option<Residency>,
    /// What `outcore run --report` wrote besides.
    #[serde(skip)]
    pub run: Option<Run>,
}

type Span = (usize, f64, f64, f64);

/// A lane, drawn as a row.
#[derive(Debug, Serialize)]
pub struct Lane {
    pub name: String,
    /// For each span: index of its name, start, end, and how much of that was taken. Near spans are joined if there are
    /// very many.
    pub spans: Vec<Span>,
    /// How many spans there were.
    #[serde(skip)]
    pub count: u64,
    /// Seconds in which there was at least one span.
    #[serde(skip)]
    pub busy: f64,
    /// By index of the name: how many spans there were, and the sum of their times in seconds.
    #[serde(skip)]
    pub by_name: BTreeMap<usize, (u64, f64)>,
}

/// The most spans that are drawn as they are. If there are more, spans of one lane and name that together take at most
/// this share of the run are joined.
const DRAWN_MAX: usize = 20_000;
const JOINED: f64 = 1.0 / 4000.0;

/// The most lanes and names. Further ones are shown as "other".
const LANES_MAX: usize = 16;
const NAMES_MAX: usize = 32;

fn place(of: &str, names: &mut Vec<String>, most: usize) -> usize {
    let name = if of.is_empty() { "other" } else { of };
    if let Some(at) = names.iter().position(|known| known == name) {
        return at;
    }
    if names.len() + 1 >= most {
        if names.last().is_none_or(|last| last != "other") {
            names.push("other".to_owned());
        }
        return names.len() - 1;
    }
    names.push(name.to_owned());
    names.len() - 1
}

impl Timeline {
    /// Makes a timeline from a file's events, in any order, its residency, and what the run was.
    pub fn new(file: String, events: Vec<Event>, residency: Option<Residency>, run: Option<Run>) -> Result<Self> {
        residency.as_ref().map_or(Ok(()), |seen| residency::check(seen, &file))?;
        run.as_ref().map_or(Ok(()), |found| run::check(found, &file))?;
        let (mut names, mut lanes) = (Vec::new(), Vec::new());
        let mut spans: Vec<Vec<(usize, f64, f64)>> = Vec::new();
        for event in events {
            let (Some(start), Some(time)) = (event.ts, event.dur) else { continue };
            if event.ph != "X" || !(start.is_finite() && time.is_finite() && time >= 0.0) {
                continue;
            }
            let lane = place(&event.cat, &mut lanes, LANES_MAX);
            if spans.len() <= lane {
                spans.resize(lane + 1, Vec::new());
            }
            spans[lane].push((place(&event.name, &mut names, NAMES_MAX), start / 1e6, (start + time) / 1e6));
        }
        let all = || spans.iter().flatten();
        let count = all().count();
        if count == 0 {
            return Err(Error::new(ErrorKind::Format, format!("{file} has no spans"))
                .remedy("give a file that `generate --timeline` or `outcore run --report` wrote"));
        }
        let start = all().map(|span| span.1).fold(f64::INFINITY, f64::min);
        let end = all().map(|span| span.2).fold(f64::NEG_INFINITY, f64::max);
        let cell = if count > DRAWN_MAX { (end - start) * JOINED } else { 0.0 };
        let mut lanes: Vec<Lane> =
            lanes.into_iter().zip(spans).map(|(name, spans)| Lane::new(name, spans, cell)).collect();
        // Computing and waiting first, then what moved.
        let order = ["compute", "pass", "stall", "link", "disk"];
        lanes.sort_by_key(|lane| order.iter().position(|known| *known == lane.name).unwrap_or(order.len()));
        Ok(Self { name: file, about: None, start, end, names, lanes, residency, run })
    }

    /// Makes a timeline from the record of a simulation.
    pub fn of_record(
        file: &str,
        name: String,
        about: Option<String>,
        recorded: Vec<LaneRecord>,
        seen: Residency,
    ) -> Result<Self> {
        residency::check(&seen, file)?;
        let wrong = |what: String| {
            Err(Error::new(ErrorKind::Format, format!("{file} has a timeline {what}"))
                .remedy("give it as `outcore simulate --timeline` wrote it"))
        };
        if recorded.len() > LANES_MAX {
            return wrong(format!("of {} lanes: at most {LANES_MAX} can be drawn", recorded.len()));
        }
        let (mut names, mut lanes, mut last) = (Vec::new(), Vec::new(), 0.0_f64);
        for lane in recorded {
            if lane.spans.len() > DRAWN_MAX {
                return wrong(format!("of {} spans in a lane: at most {DRAWN_MAX} can be drawn", lane.spans.len()));
            }
            let mut placed = BTreeMap::new();
            for (at, kind) in lane.kinds.iter().enumerate().filter(|(_, kind)| kind.count > 0) {
                placed.insert(at, place(&kind.name, &mut names, NAMES_MAX));
            }
            let mut spans = Vec::with_capacity(lane.spans.len());
            for span in lane.spans {
                let Some(name) = placed.get(&span.kind) else {
                    return wrong(format!("with a span of a kind that lane {:?} does not have", lane.name));
                };
                let [start, end, taken] = [span.start, span.end, span.busy].map(|time| time.as_secs_f64());
                last = last.max(end);
                spans.push((*name, start, end, taken.min(end - start)));
            }
            let mut by_name: BTreeMap<usize, (u64, f64)> = BTreeMap::new();
            for (at, name) in &placed {
                let of = by_name.entry(*name).or_default();
                *of = (of.0 + lane.kinds[*at].count, of.1 + lane.kinds[*at].time.as_secs_f64());
            }
            let (count, busy) = by_name.values().fold((0, 0.0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
            lanes.push(Lane { name: lane.name.into_owned(), spans, count, busy, by_name });
        }
        if lanes.iter().all(|lane| lane.spans.is_empty()) {
            return wrong("that has no spans".to_owned());
        }
        Ok(Self { name, about, start: 0.0, end: last, names, lanes, residency: Some(seen), run: None })
    }

    /// The lane of this name.
    pub fn lane(&self, name: &str) -> Option<&Lane> {
        self.lanes.iter().find(|lane| lane.name == name)
    }

    /// Returns its length in seconds.
    pub fn seconds(&self) -> f64 {
        self.end - self.start
    }
}

impl Lane {
    /// Makes a lane from spans in any order. Spans of a name that together fit in `cell` seconds are joined.
    fn new(name: String, mut spans: Vec<(usize, f64, f64)>, cell: f64) -> Self {
        spans.sort_by(|a, b| a.1.total_cmp(&b.1));
        let (mut busy, mut until) = (0.0, f64::NEG_INFINITY);
        let mut by_name: BTreeMap<usize, (u64, f64)> = BTreeMap::new();
        for (what, start, end) in &spans {
            busy += (end - until.max(*start)).max(0.0);
            until = until.max(*end);
            let of = by_name.entry(*what).or_default();
            *of = (of.0 + 1, of.1 + end - start);
        }
        let count = spans.len() as u64;
        let mut drawn: Vec<Span> = Vec::new();
        let mut last: BTreeMap<usize, usize> = BTreeMap::new();
        for (what, start, end) in spans {
            match last.get(&what).and_then(|at| drawn.get_mut(*at)) {
                Some(before) if cell > 0.0 && end.max(before.2) - before.1 <= cell => {
                    before.3 += (end - before.2.max(start)).max(0.0);
                    before.2 = before.2.max(end);
                }
                _ => {
                    last.insert(what, drawn.len());
                    drawn.push((what, start, end, end - start));
                }
            }
        }
        Self { name, spans: drawn, count, busy, by_name }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;

    fn event(cat: &str, name: &str, ts: f64, dur: f64) -> Event {
        Event { name: name.into(), cat: cat.into(), ph: "X".into(), ts: Some(ts), dur: Some(dur) }
    }

    #[test]
    fn busy_time_is_a_union() {
        let events = vec![
            event("disk", "read", 3e6, 1e6),
            event("disk", "read", 0.0, 2e6),
            event("disk", "write", 1e6, 2e6),
            event("stall", "disk fault", 5e6, 1e6),
        ];
        let timeline = Timeline::new("t".into(), events, None, None).unwrap();
        assert_eq!((timeline.start, timeline.end, timeline.seconds()), (0.0, 6.0, 6.0));
        let disk = timeline.lane("disk").unwrap();
        assert_eq!((disk.busy, disk.count), (4.0, 3));
        let read = timeline.names.iter().position(|name| name == "read").unwrap();
        assert_eq!(disk.by_name[&read], (2, 3.0));
        assert_eq!(timeline.lanes[0].name, "stall", "what waited stands above what moved");
    }

    #[test]
    fn very_many_spans_are_joined_and_none_is_lost() {
        let events: Vec<Event> = (0..100_000).map(|n| event("disk", "read", f64::from(n) * 10.0, 5.0)).collect();
        let timeline = Timeline::new("t".into(), events, None, None).unwrap();
        let disk = &timeline.lanes[0];
        assert_eq!(disk.count, 100_000);
        assert!((4000..4400).contains(&disk.spans.len()), "{}", disk.spans.len());
        assert!((disk.busy - 0.5).abs() < 1e-6);
        let drawn: f64 = disk.spans.iter().map(|span| span.3).sum();
        assert!((drawn - 0.5).abs() < 1e-6, "what is joined says how much of it was taken: {drawn}");
        // A thousand groups of spans, a second apart.
        let apart =
            (0..100_000).map(|n| event("disk", "read", f64::from(n / 100) * 1e6 + f64::from(n % 100), 5.0)).collect();
        let drawn = Timeline::new("t".into(), apart, None, None).unwrap().lanes[0].spans.len();
        assert_eq!(drawn, 1000);
    }

    fn record(spans: &str) -> Result<Timeline> {
        let text = format!(
            "[{{\"name\": \"stalled\", \"kinds\": [{{\"name\": \"a\", \"count\": 3, \"ns\": 500}}, \
             {{\"name\": \"b\", \"count\": 0, \"ns\": 0}}], \"spans\": [{spans}]}}]"
        );
        Timeline::of_record("r.json", "r".into(), None, serde_json::from_str(&text).unwrap(), Residency::default())
    }

    #[test]
    fn what_a_simulation_recorded_is_a_timeline_too() {
        let timeline = record("[0, 100, 900, 500]").unwrap();
        let lane = timeline.lane("stalled").unwrap();
        assert_eq!((lane.count, &timeline.names), (3, &vec!["a".to_owned()]));
        assert!((lane.busy - 5e-7).abs() < 1e-12 && (timeline.seconds() - 1e-6).abs() < 1e-12);
        assert!((lane.spans[0].3 - 5e-7).abs() < 1e-12);
        for (wrong, part) in [("", "has no spans"), ("[1, 0, 1, 1]", "a kind that lane"), ("[7, 0, 1, 1]", "a kind")] {
            let error = record(wrong).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("r.json"), "{error}");
        }
        let many = vec!["[0, 0, 1, 1]"; DRAWN_MAX + 1].join(",");
        assert!(record(&many).unwrap_err().to_string().contains("at most 20000"));
    }

    #[test]
    fn lanes_and_names_are_limited_and_nonsense_is_passed_over() {
        let mut events: Vec<Event> =
            (0..100).map(|n| event(&format!("lane {n}"), &format!("name {n}"), f64::from(n), 1.0)).collect();
        events.push(event("x", "endless", 0.0, f64::INFINITY));
        events.push(Event { ph: "M".into(), ..event("x", "thread_name", 0.0, 0.0) });
        let timeline = Timeline::new("t".into(), events, None, None).unwrap();
        assert_eq!((timeline.lanes.len(), timeline.names.len()), (LANES_MAX, NAMES_MAX));
        assert_eq!(timeline.lanes.iter().map(|lane| lane.count).sum::<u64>(), 100);
    }
}
