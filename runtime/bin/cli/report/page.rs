//! The page: what can be said in words and tables is text, charts are drawn from the data that it carries.

use minijinja::{AutoEscape, Environment, context};
use outcore::{Error, ErrorKind, Result};
use serde::Serialize;

use super::super::output::{percent, size};
use super::super::policies::{Found, Ratio};
use super::LeftOut;
use super::input::{Flow, Generated, Inputs, Simulated, SimulatedStall};
use super::residency::Residency;
use super::timeline::Timeline;

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
const CHART_SCRIPT: &str = include_str!("uPlot.iife.min.js");
const CHART_STYLE: &str = include_str!("uPlot.min.css");
const CHART_LICENCE: &str = include_str!("uPlot.LICENSE");

/// A page, and what is on it.
pub struct Page {
    pub text: String,
    pub parts: Vec<&'static str>,
    pub left_out: Vec<LeftOut>,
}

#[derive(Debug, Default, Serialize)]
struct Cell {
    text: String,
    right: bool,
    best: bool,
    /// A bar instead: percent of its room.
    share: Option<f64>,
}

impl Cell {
    fn left(text: impl Into<String>) -> Self {
        Self { text: text.into(), ..Self::default() }
    }

    fn right(text: impl Into<String>) -> Self {
        Self { text: text.into(), right: true, ..Self::default() }
    }

    fn bar(part: f64, whole: f64) -> Self {
        let share = if whole > 0.0 { (100.0 * part / whole).clamp(0.0, 100.0) } else { 0.0 };
        Self { share: Some((share * 100.0).round() / 100.0), ..Self::default() }
    }
}

#[derive(Debug, Default, Serialize)]
struct Part {
    #[serde(skip)]
    kind: &'static str,
    title: String,
    notes: Vec<String>,
    chart: Option<String>,
    head: Vec<Cell>,
    rows: Vec<Vec<Cell>>,
}

const RUN: &str = "what a run was";
const SIMULATED: &str = "what a simulation found";
const TIMELINE: &str = "timeline by lane";
const RESIDENCY: &str = "residency over time";
const STALLS: &str = "stalls by cause";
const LINKS: &str = "bandwidth by link";
const OPTIMUM: &str = "hit ratio beside the optimum";
const MEMORY: &str = "memory by class";
const POLICIES: &str = "hit ratio by capacity and policy";

/// What each part needs.
const NEEDS: [(&str, &str); 9] = [
    (RUN, "the last line of `generate --json`"),
    (SIMULATED, "`outcore simulate --json`"),
    (TIMELINE, "the file of `generate --timeline`"),
    (RESIDENCY, "the file of `generate --timeline`, of this release"),
    (STALLS, "the last line of `generate --json`, the file of `generate --timeline`, or `outcore simulate --json`"),
    (LINKS, "the last line of `generate --json`, or `outcore simulate --json`"),
    (OPTIMUM, "the last line of `generate --json`, the file of `generate --capture`, or `outcore policies --json`"),
    (MEMORY, "the last line of `generate --json`, or `outcore policies --json` of a capture or workload"),
    (POLICIES, "the file of `generate --capture`, or `outcore policies --json`"),
];

/// The page of these inputs.
pub fn of(inputs: &Inputs) -> Result<Page> {
    let mut parts = Vec::new();
    let several = inputs.generated.len() > 1;
    for run in &inputs.generated {
        let of =
            if several { format!(": {} with {}", run.model, size(run.device_budget_bytes)) } else { String::new() };
        parts.extend([
            summary(run, &of),
            stalls(run, &of),
            links(run, inputs, &of),
            optimum(run, &of),
            memory(run, &of),
        ]);
    }
    for (at, line) in inputs.timelines.iter().enumerate() {
        parts.push(timeline(line, at));
        parts.extend(line.residency.as_ref().map(|residency| where_pages_were(residency, &line.name, at)));
        parts.extend(stalls_of(line));
    }
    for (at, found) in inputs.policies.iter().enumerate() {
        parts.push(policies(found, at));
        parts.extend(classes(found));
        if inputs.generated.is_empty() {
            parts.push(regrets(found));
        }
    }
    for (at, simulated) in inputs.simulated.iter().enumerate() {
        parts.extend([simulation(simulated, at), simulated_stalls(simulated), simulated_links(simulated)]);
    }
    // Kinds in their order, and within a kind the order that was given.
    let rank = |kind: &str| NEEDS.iter().position(|(known, _)| *known == kind).unwrap_or(NEEDS.len());
    parts.sort_by_key(|part| rank(part.kind));
    let there = |kind: &str| parts.iter().any(|part| part.kind == kind);
    let left_out: Vec<LeftOut> =
        NEEDS.iter().filter(|(part, _)| !there(part)).map(|(part, needs)| LeftOut { part, needs }).collect();
    let kinds = NEEDS.iter().map(|(part, _)| *part).filter(|part| there(part)).collect();
    let first = (inputs.generated.first(), inputs.policies.first(), inputs.timelines.first());
    let title = match first {
        (Some(run), ..) => format!("{}, {} of device memory", run.model, size(run.device_budget_bytes)),
        (_, Some(found), _) => found.trace.clone(),
        (_, _, Some(line)) => line.name.clone(),
        _ => inputs.simulated.first().map_or("What a disk reads".to_owned(), simulated_name),
    };
    Ok(Page { text: render(&title, &parts, &left_out, inputs)?, parts: kinds, left_out })
}

fn render(title: &str, parts: &[Part], left_out: &[LeftOut], inputs: &Inputs) -> Result<String> {
    #[derive(Serialize)]
    struct Data<'a> {
        policies: &'a [Found],
        timelines: &'a [Timeline],
        /// Seconds by pass.
        simulated: Vec<&'a [f64]>,
    }
    let failed = |cause: String| {
        Error::new(ErrorKind::Internal, format!("the page was not made: {cause}")).remedy("report this as a bug")
    };
    let simulated = inputs.simulated.iter().map(|simulated| simulated.passes_s.as_slice()).collect();
    let data = Data { policies: &inputs.policies, timelines: &inputs.timelines, simulated };
    // In a script element only "<" can end the data.
    let data = serde_json::to_string(&data).map_err(|cause| failed(cause.to_string()))?.replace('<', "\\u003c");
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    let page = environment.render_str(
        TEMPLATE,
        context! {
            title, parts, left_out, data,
            version => env!("CARGO_PKG_VERSION"),
            style => STYLE, script => SCRIPT,
            chart_style => CHART_STYLE, chart_script => CHART_SCRIPT, chart_licence => CHART_LICENCE,
        },
    );
    page.map_err(|cause| failed(cause.to_string()))
}

fn seconds(time: f64) -> String {
    format!("{time:.3} s")
}

fn ratio(ratio: f64) -> String {
    format!("{ratio:.4}")
}

fn head<const N: usize>(names: [(&str, bool); N]) -> Vec<Cell> {
    names.map(|(name, right)| if right { Cell::right(name) } else { Cell::left(name) }).into()
}

fn summary(run: &Generated, of: &str) -> Part {
    let mut rows = Vec::new();
    let mut pair = |name: &str, value: String| rows.push(vec![Cell::left(name), Cell::left(value)]);
    pair("model", run.model.clone());
    pair("device, reads by", format!("{}, {}", run.device, run.io));
    pair("device budget, host budget", format!("{}, {}", size(run.device_budget_bytes), size(run.host_budget_bytes)));
    pair("page, policy", format!("{}, {}", size(run.page_bytes), run.policy));
    pair("tokens", format!("{} in, {} out", run.prompt_tokens.len(), run.tokens.len()));
    pair("first token after", seconds(run.ttft_s));
    pair("tokens a second", format!("{:.2}", run.decode_tok_s));
    pair("median pass", seconds(run.pass_s_median));
    pair("computing, waiting", format!("{}, {}", seconds(run.compute_s), seconds(run.stall_s)));
    pair("transfers hidden behind compute", format!("{:.1} %", 100.0 * run.overlap));
    let notes = run.interrupted.then(|| "The run was interrupted.".to_owned()).into_iter().collect();
    Part {
        kind: RUN,
        title: format!("The run{of}"),
        notes,
        rows,
        head: head([("", false), ("", false)]),
        ..Part::default()
    }
}

fn causes(kind: &'static str, title: String, mut causes: Vec<(String, u64, f64)>, whole: f64, of: &str) -> Part {
    causes.retain(|(_, count, _)| *count > 0);
    causes.sort_by(|a, b| b.2.total_cmp(&a.2));
    let notes = if causes.is_empty() {
        vec!["Nobody waited for a page.".to_owned()]
    } else {
        vec![format!("Bars are shares of {of}.")]
    };
    let row = |(cause, count, time): (String, u64, f64)| {
        vec![Cell::left(cause), Cell::right(count.to_string()), Cell::right(seconds(time)), Cell::bar(time, whole)]
    };
    let rows: Vec<_> = causes.into_iter().map(row).collect();
    let head = head([("cause", false), ("waits", true), ("time", true), ("", false)]);
    Part { kind, title, notes, head, rows, ..Part::default() }
}

fn stalls(run: &Generated, of: &str) -> Part {
    let all = run.stalls.iter().map(|(cause, stall)| (cause.clone(), stall.count, stall.seconds));
    let whole = run.compute_s + run.stall_s;
    causes(STALLS, format!("Stalls by cause{of}"), all.collect(), whole, "the time in passes")
}

fn stalls_of(line: &Timeline) -> Option<Part> {
    let lane = line.lane("stall")?;
    let named = |(name, (count, time)): (&usize, &(u64, f64))| {
        (line.names.get(*name).cloned().unwrap_or_default(), *count, *time)
    };
    let title = format!("Stalls by cause, in {}", line.name);
    Some(causes(STALLS, title, lane.by_name.iter().map(named).collect(), line.seconds(), "the timeline"))
}

fn links(run: &Generated, inputs: &Inputs, of: &str) -> Part {
    let ceiling = inputs.probed.iter().flat_map(|probed| probed.points.iter().map(move |point| (probed, point)));
    let ceiling = ceiling.max_by_key(|(_, point)| point.bytes_per_second);
    let mut notes = vec!["A link's bandwidth is its bytes over the time in which it had work.".to_owned()];
    match ceiling {
        Some((probed, point)) => notes.push(format!(
            "The disk's ceiling is what `outcore probe` read of {}: blocks of {}, {} at a time.",
            probed.file,
            size(point.block_bytes),
            point.depth
        )),
        None => notes.push("The disk's ceiling is not known: `outcore probe --json` tells it.".to_owned()),
    }
    let ceiling = ceiling.map(|(_, point)| point.bytes_per_second as f64);
    let row = |name: &str, bytes: u64, busy: Option<f64>, ceiling: Option<f64>| {
        let rate = busy.filter(|busy| *busy > 0.0).map(|busy| bytes as f64 / busy);
        let told = |rate: Option<f64>| rate.map_or("-".to_owned(), |rate| format!("{}/s", size(rate as u64)));
        let whole = ceiling.or(rate).unwrap_or(0.0);
        vec![
            Cell::left(name),
            Cell::right(size(bytes)),
            Cell::right(busy.map_or("-".to_owned(), seconds)),
            Cell::right(told(rate)),
            Cell::right(told(ceiling)),
            if ceiling.is_some() { Cell::bar(rate.unwrap_or(0.0), whole) } else { Cell::left("") },
        ]
    };
    let disk = run.disk_read_bytes.saturating_add(run.disk_written_bytes);
    let rows = vec![
        row("disk", disk, run.disk_busy_s, ceiling),
        row("link to the device", run.link_bytes, run.link_busy_s, None),
    ];
    let head =
        head([("link", false), ("moved", true), ("busy", true), ("bandwidth", true), ("ceiling", true), ("", false)]);
    Part { kind: LINKS, title: format!("Bandwidth by link{of}"), notes, head, rows, ..Part::default() }
}

fn optimum(run: &Generated, of: &str) -> Part {
    let row = |name: &str, value: f64| vec![Cell::left(name), Cell::right(ratio(value)), Cell::bar(value, 1.0)];
    let rows = vec![row(&run.policy, run.hit_ratio), row("optimum", run.opt_hit_ratio)];
    let notes = vec![format!(
        "Of the first {} uses. The optimum is Belady's MIN with as many frames, every page coming at its use.",
        run.ratio_uses
    )];
    let head = head([("", false), ("hit ratio", true), ("", false)]);
    Part { kind: OPTIMUM, title: format!("Hit ratio beside the optimum{of}"), notes, head, rows, ..Part::default() }
}

fn memory(run: &Generated, of: &str) -> Part {
    // On the host device its frames are memory of the process, as the host tier's are.
    let in_process = run.peak_host_bytes + if run.device == "host" { run.peak_device_bytes } else { 0 };
    let rest = run.peak_rss_bytes.saturating_sub(in_process);
    let all = [
        ("frames of the device tier", run.peak_device_bytes),
        ("frames of the host tier", run.peak_host_bytes),
        ("the rest of the process", rest),
    ];
    let whole: u64 = all.iter().map(|(_, bytes)| bytes).sum();
    let row = |(name, bytes): (&str, u64)| {
        vec![Cell::left(name), Cell::right(size(bytes)), Cell::bar(bytes as f64, whole as f64)]
    };
    let notes = vec!["The most at one time of each tier, and of the process the most less these.".to_owned()];
    let head = head([("class", false), ("peak", true), ("", false)]);
    let rows = all.map(row).into();
    Part { kind: MEMORY, title: format!("Memory by class{of}"), notes, head, rows, ..Part::default() }
}

fn simulated_name(simulated: &Simulated) -> String {
    format!("{} on {}, simulated", simulated.model, simulated.machine)
}

fn simulation(simulated: &Simulated, at: usize) -> Part {
    let mut rows = Vec::new();
    let mut pair = |name: &str, value: String| rows.push(vec![Cell::left(name), Cell::left(value)]);
    pair("model", format!("{}, {}", simulated.model, size(simulated.model_bytes)));
    pair("machine, devices", format!("{}, {}", simulated.machine, simulated.devices));
    pair("page, policy", format!("{}, {}", size(simulated.page_bytes), simulated.policy));
    let tiers = [simulated.frames, simulated.host_frames];
    let [device, host] = tiers.map(|frames| size(frames.saturating_mul(simulated.page_bytes)));
    pair("memory for pages of each device, of the host for each", format!("{device}, {host}"));
    pair("first pass, median of the others", [simulated.first_pass_s, simulated.median_pass_s].map(seconds).join(", "));
    pair("hit ratio", ratio(simulated.hit_ratio));
    Part {
        kind: SIMULATED,
        title: simulated_name(simulated),
        notes: vec![
            "A forecast: the runtime's pager under a virtual clock, on a machine that is only described.".to_owned(),
        ],
        chart: Some(format!("simulated-{at}")),
        head: head([("", false), ("", false)]),
        rows,
    }
}

fn simulated_stalls(simulated: &Simulated) -> Part {
    let named = |stall: &SimulatedStall| (format!("{}, {}", stall.cause, stall.tier), stall.count, stall.seconds);
    let title = format!("Stalls by cause: {}", simulated_name(simulated));
    let whole = simulated.total_s * simulated.devices as f64;
    causes(STALLS, title, simulated.stalls.iter().map(named).collect(), whole, "the time of all devices")
}

fn simulated_links(simulated: &Simulated) -> Part {
    let row = |(name, flow): (&str, &Flow)| {
        let rate = if flow.busy_s > 0.0 {
            format!("{}/s", size((flow.bytes as f64 / flow.busy_s) as u64))
        } else {
            "-".into()
        };
        vec![
            Cell::left(name),
            Cell::right(size(flow.bytes)),
            Cell::right(seconds(flow.busy_s)),
            Cell::right(rate),
            Cell::right(format!("{:.1} %", 100.0 * flow.utilisation)),
            Cell::bar(flow.utilisation, 1.0),
        ]
    };
    let all = [
        ("disk, read", &simulated.disk_read),
        ("disk, written", &simulated.disk_written),
        ("host to device", &simulated.link_in),
        ("device to host", &simulated.link_out),
        ("compute", &simulated.compute),
    ];
    let head = head([
        ("link", false),
        ("moved", true),
        ("busy", true),
        ("bandwidth", true),
        ("of its ceiling", true),
        ("", false),
    ]);
    Part {
        kind: LINKS,
        title: format!("Bandwidth by link: {}", simulated_name(simulated)),
        notes: vec![
            "Of its ceiling is the part of the simulated time in which a link was used as well as it can be."
                .to_owned(),
        ],
        head,
        rows: all.map(row).into(),
        ..Part::default()
    }
}

fn timeline(line: &Timeline, at: usize) -> Part {
    let all = line.seconds();
    let row = |lane: &super::timeline::Lane| {
        vec![
            Cell::left(lane.name.clone()),
            Cell::right(lane.count.to_string()),
            Cell::right(seconds(lane.busy)),
            Cell::bar(lane.busy, all),
        ]
    };
    let mut notes = vec![format!("{} in all; busy is the time in which a lane had at least one span.", seconds(all))];
    let (count, drawn): (u64, u64) =
        line.lanes.iter().fold((0, 0), |sum, lane| (sum.0 + lane.count, sum.1 + lane.spans.len() as u64));
    if drawn < count {
        notes.push(format!("Of {count} spans, near ones are drawn as one; the table has all of them."));
    }
    Part {
        kind: TIMELINE,
        title: format!("Timeline: {}", line.name),
        notes,
        chart: Some(format!("timeline-{at}")),
        head: head([("lane", false), ("spans", true), ("busy", true), ("", false)]),
        rows: line.lanes.iter().map(row).collect(),
    }
}

fn where_pages_were(residency: &Residency, name: &str, at: usize) -> Part {
    let (pages, rows) = (residency.pages(), residency.rows());
    let mut notes = vec![format!(
        "{pages} pages of {}, looked at {} times; {rows} rows from the first file's first page down.",
        size(residency.page_bytes),
        residency.samples.len()
    )];
    notes.push(format!(
        "Frames are of one size, so that none is lost to fragmentation; the last pages of files reach {} beyond their ends.",
        size(residency.tails())
    ));
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
    }
}

fn policies(found: &Found, at: usize) -> Part {
    let mut notes = vec![format!("{}: {} uses of {} pages.", found.trace, found.uses, found.pages)];
    notes.extend(found.about.as_ref().map(|about| format!("Captured from: {about}.")));
    let mut cells = head([("pages", true), ("optimum", true)]);
    let names = found.capacities.first().map(|capacity| capacity.policies.as_slice()).unwrap_or_default();
    cells.extend(names.iter().map(|policy| Cell::right(policy.policy.clone())));
    let row = |capacity: &super::super::policies::Capacity| {
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
    }
}

fn regrets(found: &Found) -> Part {
    let moved = |ratio: &Ratio| Cell::right(ratio.bytes_moved.map_or("-".to_owned(), size));
    let rows = found.capacities.iter().map(|capacity| {
        let best = capacity.policies.iter().max_by(|a, b| a.ratio.hit_ratio.total_cmp(&b.ratio.hit_ratio));
        let mut row = vec![Cell::right(capacity.pages.to_string()), Cell::right(ratio(capacity.optimum.hit_ratio))];
        row.push(moved(&capacity.optimum));
        match best {
            Some(best) => row.extend([
                Cell::left(best.policy.clone()),
                Cell::right(ratio(best.ratio.hit_ratio)),
                moved(&best.ratio),
                Cell::bar(best.ratio.hit_ratio, capacity.optimum.hit_ratio),
            ]),
            None => row.extend((0..4).map(|_| Cell::left("-"))),
        }
        row
    });
    let names = [("pages", true), ("optimum", true), ("moved", true), ("best policy", false), ("hit ratio", true)];
    let mut cells = head(names);
    cells.extend(head([("moved", true), ("of the optimum", false)]));
    Part {
        kind: OPTIMUM,
        title: format!("Hit ratio beside the optimum, {}", found.trace),
        notes: vec!["The optimum is Belady's MIN, every page coming at its use.".to_owned()],
        head: cells,
        rows: rows.collect(),
        ..Part::default()
    }
}

fn classes(found: &Found) -> Option<Part> {
    let bytes = found.page_bytes?;
    let row = |class: &super::super::policies::Class| {
        let (pages, all) = (u64::from(class.pages), u64::from(found.pages));
        vec![
            Cell::left(class.class.clone()),
            Cell::right(class.pages.to_string()),
            Cell::right(size(pages.saturating_mul(bytes))),
            Cell::right(percent(class.uses, found.uses)),
            Cell::bar(pages as f64, all as f64),
        ]
    };
    let head = head([("class", false), ("pages", true), ("bytes", true), ("of the uses", true), ("", false)]);
    Some(Part {
        kind: MEMORY,
        title: format!("Memory by class, {}", found.trace),
        notes: vec!["Pages that were used, by what they hold most of.".to_owned()],
        head,
        rows: found.classes.iter().map(row).collect(),
        ..Part::default()
    })
}
