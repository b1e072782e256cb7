//! Timelines in the Trace Event Format, as `generate --timeline` writes them.

use std::collections::BTreeMap;

use outcore::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use super::residency::Residency;

/// What is read of an event.
#[derive(Debug, Deserialize)]
pub struct Event {
    #[serde(default)]
    name: String,
    #[serde(default)]
    cat: String,
    ph: String,
    /// In microseconds.
    ts: Option<f64>,
    dur: Option<f64>,
}

/// A run's spans by lane, in seconds.
#[derive(Debug, Serialize)]
pub struct Timeline {
    #[serde(skip)]
    pub name: String,
    pub start: f64,
    pub end: f64,
    /// What spans were.
    pub names: Vec<String>,
    pub lanes: Vec<Lane>,
    pub residency: Option<Residency>,
}

/// A row.
#[derive(Debug, Serialize)]
pub struct Lane {
    pub name: String,
    /// What they were, where they begin and where they end; near ones joined where there are very many.
    pub spans: Vec<(usize, f64, f64)>,
    /// How many there were.
    #[serde(skip)]
    pub count: u64,
    /// The time in which there was at least one.
    #[serde(skip)]
    pub busy: f64,
    /// By what they were: how many, and the sum of their times.
    #[serde(skip)]
    pub by_name: BTreeMap<usize, (u64, f64)>,
}

/// Spans drawn as they are; beyond, those of a lane and a name that are nearer than this part of the run are joined.
const DRAWN_MAX: usize = 20_000;
const JOINED: f64 = 1.0 / 4000.0;

/// Lanes and names at most; others are put together.
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
    /// Of a file's events, in any order, and what it says of pages.
    pub fn new(file: String, events: Vec<Event>, residency: Option<Residency>) -> Result<Self> {
        residency.as_ref().map_or(Ok(()), |residency| residency.check(&file))?;
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
                .remedy("give a file that `generate --timeline` wrote"));
        }
        let start = all().map(|span| span.1).fold(f64::INFINITY, f64::min);
        let end = all().map(|span| span.2).fold(f64::NEG_INFINITY, f64::max);
        let near = if count > DRAWN_MAX { (end - start) * JOINED } else { 0.0 };
        let mut lanes: Vec<Lane> =
            lanes.into_iter().zip(spans).map(|(name, spans)| Lane::new(name, spans, near)).collect();
        // What the program computed and where it waited first, then what moved.
        let order = ["compute", "stall", "link", "disk"];
        lanes.sort_by_key(|lane| order.iter().position(|known| *known == lane.name).unwrap_or(order.len()));
        Ok(Self { name: file, start, end, names, lanes, residency })
    }

    /// The lane of this name.
    pub fn lane(&self, name: &str) -> Option<&Lane> {
        self.lanes.iter().find(|lane| lane.name == name)
    }

    /// How long it is.
    pub fn seconds(&self) -> f64 {
        self.end - self.start
    }
}

impl Lane {
    fn new(name: String, mut spans: Vec<(usize, f64, f64)>, near: f64) -> Self {
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
        if near > 0.0 {
            let mut joined: Vec<(usize, f64, f64)> = Vec::new();
            let mut last: BTreeMap<usize, usize> = BTreeMap::new();
            for span in spans {
                match last.get(&span.0).and_then(|at| joined.get_mut(*at)) {
                    Some(before) if span.1 - before.2 < near => before.2 = before.2.max(span.2),
                    _ => {
                        last.insert(span.0, joined.len());
                        joined.push(span);
                    }
                }
            }
            spans = joined;
        }
        Self { name, spans, count, busy, by_name }
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
        let timeline = Timeline::new("t".into(), events, None).unwrap();
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
        let timeline = Timeline::new("t".into(), events, None).unwrap();
        let disk = &timeline.lanes[0];
        assert_eq!((disk.count, disk.spans.len()), (100_000, 1));
        assert!((disk.busy - 0.5).abs() < 1e-6);
        // A thousand groups, each a second from the next.
        let apart =
            (0..100_000).map(|n| event("disk", "read", f64::from(n / 100) * 1e6 + f64::from(n % 100), 5.0)).collect();
        let drawn = Timeline::new("t".into(), apart, None).unwrap().lanes[0].spans.len();
        assert_eq!(drawn, 1000);
    }

    #[test]
    fn lanes_and_names_are_limited_and_nonsense_is_passed_over() {
        let mut events: Vec<Event> =
            (0..100).map(|n| event(&format!("lane {n}"), &format!("name {n}"), f64::from(n), 1.0)).collect();
        events.push(event("x", "endless", 0.0, f64::INFINITY));
        events.push(Event { ph: "M".into(), ..event("x", "thread_name", 0.0, 0.0) });
        let timeline = Timeline::new("t".into(), events, None).unwrap();
        assert_eq!((timeline.lanes.len(), timeline.names.len()), (LANES_MAX, NAMES_MAX));
        assert_eq!(timeline.lanes.iter().map(|lane| lane.count).sum::<u64>(), 100);
    }
}
