//! The parts of a run of `outcore run`, beside its timeline.

use outcore_mapped::live::{Counts, Held, Run, rate};

use super::super::output::{percent, size};
use super::bars::{Bars, Unit};
use super::input::Inputs;
use super::lines::Lines;
use super::of_run;
use super::part::{self, Cell, LAYERS, Link, OVER_TIME, Part, RUN, head, seconds};

/// Returns all parts. `of` is added to titles to tell it from other runs.
pub fn parts(run: &Run, inputs: &Inputs, of: &str) -> Vec<Part> {
    let end = &run.end;
    let mut parts = vec![summary(run, of)];
    if run.samples.len() > 1 {
        parts.extend(over_time(&run.samples, of));
    }
    let (ceiling, note) = of_run::probed(inputs);
    let mut notes = vec!["The disk's bandwidth is what was read over the time in which something was.".to_owned()];
    notes.push(note);
    let counts = &end.counts;
    let busy = Some(counts.read_seconds);
    let disk = Link { name: "disk", bytes: counts.read_bytes, busy, ceiling: ceiling.map(|rate| rate as f64) };
    parts.push(part::links(format!("Bandwidth by link{of}"), notes, &[disk], counts.at));
    if let Some(optimum) = end.optimum {
        let title = format!("Hit ratio beside the optimum{of}");
        parts.push(part::beside_optimum(title, optimum.uses, &end.policy, optimum.hit_ratio, optimum.best));
    }
    parts.extend(layers(run, of));
    parts
}

fn summary(run: &Run, of: &str) -> Part {
    let (end, counts) = (&run.end, &run.end.counts);
    let mut rows = Vec::new();
    let mut pair = |name: &str, value: String| rows.push(vec![Cell::left(name), Cell::left(value)]);
    let files = end.files.iter().map(|file| format!("{} ({})", file.name, size(file.held.bytes)));
    pair("files", Vec::from_iter(files).join(", "));
    if let Some(limit) = end.memory.process_limit_bytes {
        let resident = size(end.memory.resident_bytes);
        pair("memory of the process at the end", format!("{resident} of {}", size(limit)));
    }
    pair("budget of pages at the end", size(counts.budget_bytes));
    pair("page, policy", format!("{}, {}", size(end.page_bytes), end.policy));
    pair("from the first mapping to the end", seconds(counts.at));
    pair("read", format!("{}, {} while reading", size(counts.read_bytes), told(counts.read_rate())));
    let of_uses = |count: u64| format!("{count} ({})", percent(count, counts.uses));
    pair("uses of pages that were seen", counts.uses.to_string());
    pair("there since an earlier use", of_uses(counts.hits));
    pair("read ahead, and ready", of_uses(counts.prefetched));
    pair("on their way", of_uses(counts.late));
    pair("absent", of_uses(counts.faults));
    pair("pages that went", counts.evictions.to_string());
    let waited: f64 = counts.stalls.iter().map(|stall| stall.seconds).sum();
    pair("waited, by all threads together", seconds(waited));
    let experts = end.told_of_experts();
    if !experts.is_empty() {
        pair("experts", experts);
    }
    Part { kind: RUN, title: format!("The run{of}"), rows, ..Part::default() }
}

fn told(found: Option<f64>) -> String {
    found.map_or("nothing".to_owned(), rate)
}

/// Hits, reads and the budget, each a chart.
fn over_time(samples: &[Counts], of: &str) -> [Part; 3] {
    let mut hits = Lines::new("hits", Unit::Ratio, ["hit ratio", "hits, and pages read ahead"]);
    let mut reads = Lines::new("reads", Unit::Rate, ["over all of the time", "while reading"]);
    let mut room = Lines::new("room", Unit::Bytes, ["budget", "in use"]);
    for (before, now) in samples.iter().zip(samples.iter().skip(1)) {
        let last = now.since(before);
        let ready = last.hits.saturating_add(last.prefetched);
        let ready = (last.uses > 0).then(|| ready as f64 / last.uses as f64);
        hits.push(now.at, [last.hit_ratio(), ready]);
        reads.push(now.at, [last.mean_rate(), last.read_rate()]);
        room.push(now.at, [Some(now.budget_bytes as f64), Some(now.used_bytes as f64)]);
    }
    let part = |title: &str, note: &str, lines: Lines| Part {
        kind: OVER_TIME,
        title: format!("{title}{of}"),
        notes: vec![note.to_owned()],
        lines: Some(lines),
        ..Part::default()
    };
    [
        part("Hits over time", "Of the uses between two samples. Where nothing was used there is a gap.", hits),
        part("Reads over time", "What was read between two samples.", reads),
        part("Budget over time", "What pages were allowed, and what they took.", room),
    ]
}

/// What of each layer was in memory at the end.
fn layers(run: &Run, of: &str) -> Vec<Part> {
    let files = run.end.files.iter().filter(|file| file.held.bytes > 0);
    let of_file = |file: &outcore_mapped::live::File| {
        let mut bars = Bars::new("layers", Unit::Bytes, ["bytes", "in memory", "of these, used"]);
        let mut rows = Vec::new();
        let mut row = |name: String, held: &Held| {
            let float = |bytes: u64| Some(bytes as f64);
            bars.push_told(
                name.clone(),
                format!("{} of {}", size(held.there()), size(held.bytes)),
                [float(held.bytes), float(held.there()), float(held.used)],
            );
            rows.push(vec![
                Cell::left(name),
                Cell::right(size(held.bytes)),
                Cell::right(size(held.used)),
                Cell::right(size(held.ahead)),
                Cell::right(percent(held.there(), held.bytes)),
            ]);
        };
        for part in &file.parts {
            if part.held.bytes > 0 {
                row(part.name.clone(), &part.held);
            }
            if let Some(experts) = &part.experts {
                row(format!("{}, {} experts", part.name, experts.count), &experts.held);
            }
        }
        if file.parts.is_empty() {
            row("the file".to_owned(), &file.held);
        }
        Part {
            kind: LAYERS,
            title: format!("{} in memory at the end, by layer{of}", file.name),
            notes: vec!["Layers by the names of the file's tensors.".to_owned()],
            bars: bars.some(),
            head: head([
                ("", false),
                ("bytes", true),
                ("in memory and used", true),
                ("read ahead", true),
                ("in memory", true),
            ]),
            rows,
            ..Part::default()
        }
    };
    files.map(of_file).collect()
}
