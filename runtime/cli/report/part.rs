//! A part of the page: a heading, notes, a chart, a table.

use outcore_lab::sim::ClassBytes;
use serde::Serialize;

use super::super::output::size;
use super::bars::{Bars, Unit};
use super::lines::Lines;

#[derive(Debug, Default, Serialize)]
pub struct Cell {
    pub text: String,
    pub right: bool,
    pub best: bool,
    /// A bar in place of text: its length in percent.
    pub share: Option<f64>,
}

impl Cell {
    pub fn left(text: impl Into<String>) -> Self {
        Self { text: text.into(), ..Self::default() }
    }

    pub fn right(text: impl Into<String>) -> Self {
        Self { text: text.into(), right: true, ..Self::default() }
    }

    pub fn bar(part: f64, whole: f64) -> Self {
        let share = if whole > 0.0 { (100.0 * part / whole).clamp(0.0, 100.0) } else { 0.0 };
        Self { share: Some((share * 100.0).round() / 100.0), ..Self::default() }
    }
}

#[derive(Debug, Default, Serialize)]
pub struct Part {
    #[serde(skip)]
    pub kind: &'static str,
    pub title: String,
    pub notes: Vec<String>,
    /// Id of the element that a chart is drawn in.
    pub chart: Option<String>,
    #[serde(skip)]
    pub bars: Option<Bars>,
    #[serde(skip)]
    pub lines: Option<Lines>,
    pub head: Vec<Cell>,
    pub rows: Vec<Vec<Cell>>,
}

pub const RUN: &str = "what a run was";
pub const SIMULATED: &str = "what a simulation found";
pub const TIMELINE: &str = "timeline by lane";
pub const RESIDENCY: &str = "residency over time";
pub const OVER_TIME: &str = "hits, reads and budget over time";
pub const LAYERS: &str = "layers in memory at the end";
pub const STALLS: &str = "stalls by cause";
pub const LINKS: &str = "bandwidth by link";
pub const OPTIMUM: &str = "hit ratio beside the optimum";
pub const MEMORY: &str = "memory by class";
pub const POLICIES: &str = "hit ratio by capacity and policy";

/// The input that each kind of part needs, in the order of the page.
pub const NEEDS: [(&str, &str); 11] = [
    (RUN, "the last line of `generate --json`, or the file of `outcore run --report`"),
    (SIMULATED, "`outcore simulate --json`"),
    (TIMELINE, "the file of `generate --timeline` or `outcore run --report`, or `outcore simulate --json --timeline`"),
    (OVER_TIME, "the file of `outcore run --report`"),
    (RESIDENCY, "the file of `generate --timeline`, or `outcore simulate --json --timeline`, of this release"),
    (LAYERS, "the file of `outcore run --report`"),
    (STALLS, "the last line of `generate --json`, the file of `generate --timeline`, or `outcore simulate --json`"),
    (LINKS, "the last line of `generate --json`, the file of `outcore run --report`, or `outcore simulate --json`"),
    (
        OPTIMUM,
        "the last line of `generate --json`, the file of `generate --capture`, `outcore policies --json`, or \
         `outcore simulate --json --timeline`",
    ),
    (
        MEMORY,
        "the last line of `generate --json`, `outcore simulate --json`, or `outcore policies --json` of a capture or \
         workload",
    ),
    (POLICIES, "the file of `generate --capture`, or `outcore policies --json`"),
];

/// Returns a model's name without its folders, which are private.
pub fn file_name(model: &str) -> &str {
    model.rsplit('/').find(|name| !name.is_empty()).unwrap_or(model)
}

pub fn seconds(time: f64) -> String {
    format!("{time:.3} s")
}

pub fn ratio(ratio: f64) -> String {
    format!("{ratio:.4}")
}

pub fn head<'a>(names: impl IntoIterator<Item = (&'a str, bool)>) -> Vec<Cell> {
    names.into_iter().map(|(name, right)| if right { Cell::right(name) } else { Cell::left(name) }).collect()
}

/// Makes the part of waits by cause: how often and how long.
pub fn causes(title: String, mut causes: Vec<(String, u64, f64)>, whole: f64, of: &str) -> Part {
    causes.retain(|(_, count, _)| *count > 0);
    causes.sort_by(|a, b| b.2.total_cmp(&a.2));
    let mut bars = Bars::new("stalls", Unit::Seconds, ["time"]);
    let share = |time: f64| if whole > 0.0 { format!("{:.1} %", 100.0 * time / whole) } else { "-".to_owned() };
    let mut rows = Vec::new();
    for (cause, count, time) in causes {
        bars.push_told(&cause, format!("{}, {}", seconds(time), share(time)), [Some(time)]);
        rows.push(vec![
            Cell::left(cause),
            Cell::right(count.to_string()),
            Cell::right(seconds(time)),
            Cell::right(share(time)),
        ]);
    }
    let notes = if rows.is_empty() {
        vec!["Nobody waited for a page.".to_owned()]
    } else {
        vec![format!("Percent are of {of}.")]
    };
    let head = head([("cause", false), ("waits", true), ("time", true), ("of all", true)]);
    Part { kind: STALLS, title, notes, bars: bars.some(), head, rows, ..Part::default() }
}

/// Makes the part that compares a policy's hit ratio with the optimum's.
pub fn beside_optimum(title: String, uses: u64, policy: &str, hits: f64, optimum: f64) -> Part {
    let mut bars = Bars::new("optimum", Unit::Ratio, ["hit ratio"]);
    let mut rows = Vec::new();
    for (name, value) in [(policy, hits), ("optimum", optimum)] {
        bars.push(name, [Some(value)]);
        let of = if optimum > 0.0 { format!("{:.1} %", 100.0 * value / optimum) } else { "-".to_owned() };
        rows.push(vec![Cell::left(name), Cell::right(ratio(value)), Cell::right(of)]);
    }
    let notes = vec![format!(
        "Both are of the first {uses} uses, in the same order. The optimum is Belady's MIN with as many frames, which \
         fills each page at its use."
    )];
    let head = head([("", false), ("hit ratio", true), ("of the optimum", true)]);
    Part { kind: OPTIMUM, title, notes, bars: bars.some(), head, rows, ..Part::default() }
}

/// The traffic of a link.
pub struct Link<'a> {
    pub name: &'a str,
    pub bytes: u64,
    /// Seconds in which it had work, if known.
    pub busy: Option<f64>,
    /// Bytes a second that it can carry, if known.
    pub ceiling: Option<f64>,
}

/// Makes the part of links' bandwidth: over the time with work, and over all of `all` seconds, beside their ceilings.
pub fn links(title: String, notes: Vec<String>, links: &[Link], all: f64) -> Part {
    let known = links.iter().any(|link| link.ceiling.is_some());
    let mut bars = if known {
        Bars::new("links", Unit::Share, ["ceiling", "while it had work", "over the whole time"])
    } else {
        Bars::new("links", Unit::Rate, ["while it had work", "over the whole time"])
    };
    let told = |rate: Option<f64>| rate.map_or("-".to_owned(), |rate| format!("{}/s", size(rate as u64)));
    let mut rows = Vec::new();
    for Link { name, bytes, busy, ceiling } in links {
        let over = |time: f64| Some(*bytes as f64 / time).filter(|rate| time > 0.0 && rate.is_finite());
        let (working, mean) = (busy.and_then(over), over(all));
        let said = match ceiling {
            Some(_) => format!("{} of {}", told(working.or(mean)), told(*ceiling)),
            None if *bytes == 0 => "nothing moved".to_owned(),
            None => format!("{}, ceiling not known", told(working.or(mean))),
        };
        let part = |rate: Option<f64>| Some(rate? / ceiling.as_ref()?);
        if known {
            bars.push_told(*name, said, [ceiling.map(|_| 1.0), part(working), part(mean)]);
        } else {
            bars.push_told(*name, said, [working, mean]);
        }
        rows.push(vec![
            Cell::left(*name),
            Cell::right(size(*bytes)),
            Cell::right(busy.map_or("-".to_owned(), seconds)),
            Cell::right(told(working)),
            Cell::right(told(mean)),
            Cell::right(ceiling.map_or("not known".to_owned(), |rate| told(Some(rate)))),
            Cell::right(part(working).map_or("-".to_owned(), |part| format!("{:.1} %", 100.0 * part))),
        ]);
    }
    let head = head([
        ("link", false),
        ("moved", true),
        ("had work for", true),
        ("while it had work", true),
        ("over the whole time", true),
        ("ceiling", true),
        ("of its ceiling", true),
    ]);
    Part { kind: LINKS, title, notes, bars: bars.some(), head, rows, ..Part::default() }
}

/// Makes the part of weights by class; none if there are no classes.
pub fn weights(title: String, classes: &[ClassBytes]) -> Option<Part> {
    let classes: Vec<_> = classes.iter().map(|class| (class.class.clone(), Some(class.bytes), None)).collect();
    let notes = vec!["In the model's files, by what tensors are for.".to_owned()];
    if classes.is_empty() { None } else { Some(memory(title, notes, &classes)) }
}

/// Makes the part of bytes by class. Each class has its name, the most bytes in use if known, and the room for it if it
/// has one.
pub fn memory(title: String, notes: Vec<String>, classes: &[(String, Option<u64>, Option<u64>)]) -> Part {
    let roomy = classes.iter().any(|(_, _, room)| room.is_some());
    let mut bars = if roomy {
        Bars::new("memory", Unit::Bytes, ["room", "used"])
    } else {
        Bars::new("memory", Unit::Bytes, ["bytes"])
    };
    let told = |bytes: Option<u64>, none: &str| bytes.map_or(none.to_owned(), size);
    let whole = classes.iter().filter_map(|(_, used, _)| *used).fold(0, u64::saturating_add).max(1);
    let mut rows = Vec::new();
    for (name, used, room) in classes {
        let float = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
        let share = used.map_or("-".to_owned(), |used| format!("{:.1} %", 100.0 * used as f64 / whole as f64));
        let mut row = vec![Cell::left(name), Cell::right(told(*used, "not known")), Cell::right(share)];
        if roomy {
            let said = match (used, room) {
                (Some(used), Some(room)) => format!("{} of {}", size(*used), size(*room)),
                (None, Some(room)) => format!("room for {}", size(*room)),
                _ => String::new(),
            };
            bars.push_told(name, said, [float(*room), float(*used)]);
            row.push(Cell::right(told(*room, "-")));
        } else {
            bars.push(name, [float(*used)]);
        }
        rows.push(row);
    }
    let mut cells = head([("class", false), ("bytes", true), ("of these", true)]);
    if roomy {
        cells.push(Cell::right("room"));
    }
    Part { kind: MEMORY, title, notes, bars: bars.some(), head: cells, rows, ..Part::default() }
}

/// Says how much memory is wasted: none between frames, and how much beyond the ends of files.
pub fn waste(tails: Option<u64>, pages: Option<u64>) -> String {
    const FRAMES: &str = "Frames: no fragmentation, because all have one size.";
    match (tails, pages) {
        (Some(tails), Some(pages)) if pages > 0 => {
            let share = 100.0 * tails as f64 / pages as f64;
            format!(
                "{FRAMES} Tail waste: the last pages of files reach {} beyond their ends, {share:.2} % of all pages.",
                size(tails)
            )
        }
        (Some(tails), _) => {
            format!("{FRAMES} Tail waste: the last pages of files reach {} beyond their ends.", size(tails))
        }
        (None, _) => format!("{FRAMES} Tail waste: not known, because the input does not say where files end."),
    }
}
