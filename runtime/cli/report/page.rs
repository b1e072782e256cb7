//! Renders the page: texts and tables are HTML; charts are drawn from data in the page.

use std::collections::BTreeMap;

use minijinja::{AutoEscape, Environment, context};
use outcore::{Error, ErrorKind, Result};
use serde::Serialize;

use super::super::comparison::Found;
use super::super::output::size;
use super::bars::Bars;
use super::input::{Inputs, Simulated};
use super::lines::Lines;
use super::part::{NEEDS, OPTIMUM, Part, file_name};
use super::timeline::Timeline;
use super::{LeftOut, of_mapped, of_run, of_simulation, of_timeline, of_trace};

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
const CHART_SCRIPT: &str = include_str!("uPlot.iife.min.js");
const CHART_STYLE: &str = include_str!("uPlot.min.css");
const CHART_LICENCE: &str = include_str!("uPlot.LICENSE");

/// A page, the kinds of its parts, and the parts that lack data.
pub struct Page {
    pub text: String,
    pub parts: Vec<&'static str>,
    pub left_out: Vec<LeftOut>,
}

/// Makes the page of these inputs.
pub fn of(inputs: &Inputs) -> Result<Page> {
    let mut parts = Vec::new();
    let several = inputs.generated.len() > 1;
    for run in &inputs.generated {
        let of = if several {
            format!(": {} with {}", file_name(&run.model), size(run.device_budget_bytes))
        } else {
            String::new()
        };
        parts.extend(of_run::parts(run, inputs, &of));
    }
    for (at, line) in inputs.timelines.iter().enumerate() {
        parts.extend(of_timeline::parts(line, at));
        if let Some(run) = &line.run {
            // A run's own JSON, or another run, may be beside it.
            let alone = inputs.timelines.len() == 1 && inputs.generated.is_empty();
            let of = if alone { String::new() } else { format!(", in {}", line.name) };
            parts.extend(of_mapped::parts(run, inputs, &of));
        }
    }
    for (at, found) in inputs.policies.iter().enumerate() {
        // If there is a run, only the hit ratio of its own policy is shown beside the optimum.
        let beside = !inputs.generated.is_empty();
        parts.extend(of_trace::parts(found, at).into_iter().filter(|part| !(beside && part.kind == OPTIMUM)));
    }
    for (at, simulated) in inputs.simulated.iter().enumerate() {
        parts.extend(of_simulation::parts(simulated, at));
    }
    // Sorted by kind in the order of `NEEDS`; within a kind in the order given.
    let rank = |kind: &str| NEEDS.iter().position(|(known, _)| *known == kind).unwrap_or(NEEDS.len());
    parts.sort_by_key(|part| rank(part.kind));
    let (bars, lines) = number(&mut parts);
    let there = |kind: &str| parts.iter().any(|part| part.kind == kind);
    let left_out: Vec<LeftOut> =
        NEEDS.iter().filter(|(part, _)| !there(part)).map(|(part, needs)| LeftOut { part, needs }).collect();
    let kinds = NEEDS.iter().map(|(part, _)| *part).filter(|part| there(part)).collect();
    let first = (inputs.generated.first(), inputs.policies.first(), inputs.timelines.first());
    let title = match first {
        (Some(run), ..) => format!("{}, {} of device memory", file_name(&run.model), size(run.device_budget_bytes)),
        (_, Some(found), _) => found.trace.clone(),
        (_, _, Some(line)) => line.name.clone(),
        _ => inputs.simulated.first().map_or("What a disk reads".to_owned(), Simulated::name),
    };
    Ok(Page { text: render(&title, &parts, &left_out, (&bars, &lines), inputs)?, parts: kinds, left_out })
}

/// Takes the charts out of the parts and gives each a unique id.
fn number(parts: &mut [Part]) -> (Vec<Bars>, Vec<Lines>) {
    let (mut all, mut all_lines) = (Vec::new(), Vec::new());
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut name = |id: &mut String| {
        let count = counts.entry(id.clone()).or_default();
        *id = format!("{id}-{count}");
        *count += 1;
        Some(id.clone())
    };
    for part in parts {
        if let Some(mut bars) = part.bars.take() {
            part.chart = name(&mut bars.id);
            all.push(bars);
        } else if let Some(mut lines) = part.lines.take() {
            part.chart = name(&mut lines.id);
            all_lines.push(lines);
        }
    }
    (all, all_lines)
}

fn render(
    title: &str,
    parts: &[Part],
    left_out: &[LeftOut],
    (bars, lines): (&[Bars], &[Lines]),
    inputs: &Inputs,
) -> Result<String> {
    #[derive(Serialize)]
    struct Data<'a> {
        policies: &'a [Found],
        timelines: &'a [Timeline],
        /// Each simulation's passes, in seconds.
        simulated: Vec<&'a [f64]>,
        bars: &'a [Bars],
        lines: &'a [Lines],
    }
    let failed = |cause: String| {
        Error::new(ErrorKind::Internal, format!("the page was not made: {cause}")).remedy("report this as a bug")
    };
    let simulated = inputs.simulated.iter().map(|simulated| simulated.passes_s.as_slice()).collect();
    let data = Data { policies: &inputs.policies, timelines: &inputs.timelines, simulated, bars, lines };
    // In a script element, only "<" can begin the end of the data.
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
