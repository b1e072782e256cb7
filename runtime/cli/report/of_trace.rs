//! The parts of a trace that was run through policies.

use outcore_lab::sim::ClassUses;

use super::super::comparison::{Capacity, Found, Ratio};
use super::super::output::{percent, size};
use super::bars::{Bars, Unit};
use super::part::{self, Cell, MEMORY, OPTIMUM, POLICIES, Part, head, ratio};

/// Returns all parts of a trace. `at` is its number on the page.
pub fn parts(found: &Found, at: usize) -> Vec<Part> {
    let mut parts = vec![policies(found, at), regrets(found)];
    parts.extend(classes(found));
    parts
}

fn policies(found: &Found, at: usize) -> Part {
    let mut notes = vec![format!("{}: {} uses of {} pages.", found.trace, found.uses, found.pages)];
    notes.extend(found.about.as_ref().map(|about| format!("Captured from: {about}.")));
    let mut cells = head([("pages", true), ("optimum", true)]);
    let names = found.capacities.first().map(|capacity| capacity.policies.as_slice()).unwrap_or_default();
    cells.extend(names.iter().map(|policy| Cell::right(policy.policy.clone())));
    let row = |capacity: &Capacity| {
        let best = capacity.policies.iter().map(|policy| policy.ratio.hit_ratio).fold(0.0, f64::max);
        let mut row = vec![Cell::right(capacity.pages.to_string()), Cell::right(ratio(capacity.optimum.hit_ratio))];
        row.extend(capacity.policies.iter().map(|policy| {
            let value = policy.ratio.hit_ratio;
            Cell { best: best > 0.0 && value >= best, ..Cell::right(ratio(value)) }
        }));
        row
    };
    Part {
        kind: POLICIES,
        title: "Hit ratio by capacity and policy".to_owned(),
        notes,
        chart: Some(format!("policies-{at}")),
        head: cells,
        rows: found.capacities.iter().map(row).collect(),
        ..Part::default()
    }
}

fn regrets(found: &Found) -> Part {
    let bytes = |bytes: Option<u64>| Cell::right(bytes.map_or("-".to_owned(), size));
    // Shows what is written back if anything is written.
    let writes = found.writes > 0;
    let moved = |ratio: &Ratio| {
        let written = writes.then(|| bytes(ratio.bytes_written));
        std::iter::once(bytes(ratio.bytes_moved)).chain(written)
    };
    let mut bars = Bars::new("optimum", Unit::Ratio, ["optimum", "best policy"]);
    let mut rows = Vec::with_capacity(found.capacities.len());
    for capacity in &found.capacities {
        let best = capacity.policies.iter().max_by(|a, b| a.ratio.hit_ratio.total_cmp(&b.ratio.hit_ratio));
        let mut row = vec![Cell::right(capacity.pages.to_string()), Cell::right(ratio(capacity.optimum.hit_ratio))];
        row.extend(moved(&capacity.optimum));
        match best {
            Some(best) => {
                row.extend([Cell::left(best.policy.clone()), Cell::right(ratio(best.ratio.hit_ratio))]);
                row.extend(moved(&best.ratio));
                row.push(Cell::bar(best.ratio.hit_ratio, capacity.optimum.hit_ratio));
            }
            None => row.extend((0..if writes { 5 } else { 4 }).map(|_| Cell::left("-"))),
        }
        let hits = best.map(|best| best.ratio.hit_ratio);
        let told = best.map_or_else(String::new, |best| {
            format!("{}: {} of {}", best.policy, ratio(best.ratio.hit_ratio), ratio(capacity.optimum.hit_ratio))
        });
        bars.push_told(format!("{} pages", capacity.pages), told, [Some(capacity.optimum.hit_ratio), hits]);
        rows.push(row);
    }
    let written = writes.then_some(("written", true));
    let best = [("best policy", false), ("hit ratio", true), ("moved", true)];
    let names = [("pages", true), ("optimum", true), ("moved", true)].into_iter().chain(written).chain(best);
    let cells = head(names.chain(written).chain([("of the optimum", false)]));
    Part {
        kind: OPTIMUM,
        title: format!("Hit ratio beside the optimum, {}", found.trace),
        notes: vec!["The optimum is Belady's MIN, which fills each page at its use.".to_owned()],
        bars: bars.some(),
        head: cells,
        rows,
        ..Part::default()
    }
}

fn classes(found: &Found) -> Option<Part> {
    let bytes = found.page_bytes?;
    let row = |class: &ClassUses| {
        let (pages, all) = (u64::from(class.pages), u64::from(found.pages));
        vec![
            Cell::left(class.class.clone()),
            Cell::right(class.pages.to_string()),
            Cell::right(size(pages.saturating_mul(bytes))),
            Cell::right(percent(class.uses, found.uses)),
            Cell::bar(pages as f64, all as f64),
        ]
    };
    let mut bars = Bars::new("memory", Unit::Bytes, ["bytes"]);
    for class in &found.classes {
        bars.push(&class.class, [Some(u64::from(class.pages).saturating_mul(bytes) as f64)]);
    }
    let head =
        head([("class", false), ("pages", true), ("bytes", true), ("of the uses", true), ("of the pages", false)]);
    let used = "Pages that were used, by what they hold most of.".to_owned();
    Some(Part {
        kind: MEMORY,
        title: format!("Memory by class, {}", found.trace),
        notes: vec![used, part::waste(None, None)],
        bars: bars.some(),
        head,
        rows: found.classes.iter().map(row).collect(),
        ..Part::default()
    })
}
