//! The parts of a timeline.

use outcore_lab::residency::Residency;

use super::super::output::size;
use super::part::{self, Cell, Part, RESIDENCY, TIMELINE, head, seconds};
use super::timeline::{Lane, Timeline};

/// Returns all parts of a timeline. `at` is its number on the page.
pub fn parts(line: &Timeline, at: usize) -> Vec<Part> {
    let mut parts = vec![timeline(line, at)];
    parts.extend(line.residency.as_ref().map(|residency| where_pages_were(residency, &line.name, at)));
    parts.extend(stalls(line));
    parts
}

fn timeline(line: &Timeline, at: usize) -> Part {
    let all = line.seconds();
    let row = |lane: &Lane| {
        vec![
            Cell::left(lane.name.clone()),
            Cell::right(lane.count.to_string()),
            Cell::right(seconds(lane.busy)),
            Cell::bar(lane.busy, all),
        ]
    };
    let mut notes = vec![format!("{} in all; busy is the time in which a lane had at least one span.", seconds(all))];
    notes.extend(line.about.clone());
    notes.push("Where spans are too short to tell apart, the height is the share of time that they take.".to_owned());
    Part {
        kind: TIMELINE,
        title: format!("Timeline: {}", line.name),
        notes,
        chart: Some(format!("timeline-{at}")),
        head: head([("lane", false), ("spans", true), ("busy", true), ("", false)]),
        rows: line.lanes.iter().map(row).collect(),
        ..Part::default()
    }
}

fn stalls(line: &Timeline) -> Option<Part> {
    let lane = line.lane("stall")?;
    let named = |(name, (count, time)): (&usize, &(u64, f64))| {
        (line.names.get(*name).cloned().unwrap_or_default(), *count, *time)
    };
    let title = format!("Stalls by cause, in {}", line.name);
    Some(part::causes(title, lane.by_name.iter().map(named).collect(), line.seconds(), "the timeline"))
}

fn where_pages_were(residency: &Residency, name: &str, at: usize) -> Part {
    let (pages, rows) = (residency.pages(), residency.rows());
    let mut notes = vec![format!(
        "{pages} pages of {}, looked at {} times; {rows} rows from the first file's first page down. The stronger the \
         colour, the more of a row's pages were there. Colours mix where a row has pages in both memories.",
        size(residency.page_bytes),
        residency.samples.len()
    )];
    notes.push(part::waste(Some(residency.tails()), Some(pages.saturating_mul(residency.page_bytes))));
    let (device, host) = (residency.mean(|sample| &sample.device), residency.mean(|sample| &sample.host));
    let row = |name: &str, part: f64| {
        vec![Cell::left(name), Cell::right(format!("{:.1} %", 100.0 * part)), Cell::bar(part, 1.0)]
    };
    let rows = vec![
        row("device memory", device),
        row("host memory", host),
        row("only on the disk", (1.0 - device - host).max(0.0)),
    ];
    Part {
        kind: RESIDENCY,
        title: format!("Where pages were: {name}"),
        notes,
        chart: Some(format!("residency-{at}")),
        head: head([("tier", false), ("mean part of the pages", true), ("", false)]),
        rows,
        ..Part::default()
    }
}
