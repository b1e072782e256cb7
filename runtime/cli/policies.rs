//! `outcore policies`: runs a trace through policies and compares their hits.

use std::iter;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Instant;

use clap::Args;
use outcore::format::{self, ModelHeader};
use outcore::{Error, ErrorKind, PageSize, PolicyKind, Result};
use outcore_lab::output::{Input, NewFile};
use outcore_lab::sim::synthetic::{Workload, WorkloadKind};
use outcore_lab::sim::{AnyPolicy, Column, Counts, OpColumn, OwnPolicy, Progress, Trace, TraceForm, TraceOptions};

use super::arguments::page_size;
use super::bar::Bar;
use super::comparison::{Capacity, Found, Outcome, Point, Ratio};
use super::curve;
use super::output::{Side, Table, printable, size};
use super::printed::Report;

/// The options of `outcore policies`.
#[derive(Debug, Args)]
pub struct Options {
    /// The trace: a file that `generate --capture` wrote, Mooncake's JSON lines, a text with one id a line or with
    /// columns, or libCacheSim's oracleGeneral or csv; each may be packed by gzip or zstd (docs/trace-format.md)
    #[arg(long, value_name = "FILE", required_unless_present = "workload", conflicts_with = "workload")]
    trace: Option<PathBuf>,
    /// The trace's form: capture, mooncake, text, oracle-general or lis. Default: what the file shows
    #[arg(long, value_name = "FORM", conflicts_with = "workload")]
    format: Option<TraceForm>,
    /// The column of ids in a text of several: its number, from 1, or its name in the first line
    #[arg(long, value_name = "COLUMN", conflicts_with = "workload")]
    column: Option<Column>,
    /// The column of a text that tells reads from writes, or none. Default: the one called op, operation, rw or type
    #[arg(long, value_name = "COLUMN", conflicts_with = "workload")]
    op_column: Option<OpColumn>,
    /// No use of the trace writes its page
    #[arg(long, conflicts_with = "workload")]
    read_only: bool,
    /// A synthetic workload instead: decode, prefill, moe, kv, train or mixed (docs/policies.md says what they are)
    #[arg(long, value_name = "NAME")]
    workload: Option<WorkloadKind>,
    /// Seed of the workload's random numbers
    #[arg(long, value_name = "NUMBER", default_value_t = 0, conflicts_with = "trace")]
    seed: u64,
    /// How many uses the workload has
    #[arg(long, value_name = "COUNT", default_value_t = 1_000_000, conflicts_with = "trace")]
    uses: u64,
    /// The model whose weights the workload uses, as for `outcore inspect`; only headers are read. Default: the sizes
    /// of a well-known model
    #[arg(long, value_name = "MODEL", conflicts_with = "trace")]
    model: Option<PathBuf>,
    /// Size of a page. Default: a capture's own; 2MiB for workloads; none for other traces, for which no bytes are then
    /// shown
    #[arg(long, value_name = "SIZE", value_parser = page_size)]
    page_size: Option<PageSize>,
    /// Capacities in pages, separated by commas. Default: 10, 25, 50, 75 and 90 % of the pages
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = capacity, allow_hyphen_values = true)]
    capacity: Vec<NonZeroU32>,
    /// Policies, separated by commas: lru, plan, model, s3fifo, 2q, arc, lirs, wtinylfu, kv, shares, auto, fifo,
    /// clock, lfu, sieve, mru, random; plan-declared: plan, told the order of the first pass in advance; opt: the
    /// optimum, which is always shown; or all
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "all")]
    policy: Vec<Choice>,
    /// Draw miss ratios by capacity into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object instead
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, Debug)]
pub enum Choice {
    All,
    /// The optimum. It knows the future, so no runtime can use it.
    Optimum,
    One(Candidate),
}

/// A policy to compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Candidate {
    Policy(AnyPolicy),
    /// `plan`, where the program declares its order.
    Declared,
}

impl Candidate {
    const DECLARED: &str = "plan-declared";

    /// Returns all candidates that make sense for a trace.
    fn all(trace: &Trace, own: &[OwnPolicy]) -> impl Iterator<Item = Self> {
        let declared = (trace.passes() > 1).then_some(Self::Declared);
        AnyPolicy::all(own).flat_map(move |policy| {
            let declared = declared.filter(|_| policy == PolicyKind::Plan.into());
            iter::once(Self::Policy(policy)).chain(declared)
        })
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Policy(policy) => policy.name(),
            Self::Declared => Self::DECLARED,
        }
    }

    fn replay(self, trace: &mut Trace, pages: NonZeroU32, progress: Progress<'_>) -> Result<Counts> {
        match self {
            Self::Policy(policy) => trace.replay(policy.build(), pages, progress),
            Self::Declared => trace.replay_declared(PolicyKind::Plan.build(), pages, progress),
        }
    }
}

impl Choice {
    /// Returns what `text` selects; `own` are the program's own policies.
    pub fn find(text: &str, own: &[OwnPolicy]) -> Result<Self> {
        match text {
            "all" => Ok(Self::All),
            "opt" => Ok(Self::Optimum),
            Candidate::DECLARED => Ok(Self::One(Candidate::Declared)),
            _ => AnyPolicy::find_or(text, own, &["all", "opt", Candidate::DECLARED])
                .map(|policy| Self::One(Candidate::Policy(policy))),
        }
    }
}

impl FromStr for Choice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::find(text, &[])
    }
}

fn capacity(text: &str) -> Result<NonZeroU32> {
    let pages: Result<u64, _> = text.trim().parse();
    let wrong = match pages {
        Ok(pages) => match u32::try_from(pages).map(NonZeroU32::new) {
            Ok(Some(pages)) => return Ok(pages),
            Ok(None) => format!("capacity {text:?} holds no page"),
            Err(_) => format!("capacity {text:?} is more than {} pages", u32::MAX),
        },
        Err(_) => format!("capacity {text:?} is not understood"),
    };
    Err(Error::new(ErrorKind::InvalidArgument, wrong).remedy("give a whole number of pages, from 1 up, such as 5000"))
}

/// The most points of the curve, besides the capacities that were asked for.
const POINTS: u64 = 256;

fn ratio(counts: Counts, page: Option<PageSize>) -> Ratio {
    Ratio {
        hits: counts.hits,
        misses: counts.misses(),
        hit_ratio: counts.hit_ratio(),
        written_back: counts.written_back,
        bytes_written: page.map(|page| counts.written_back.saturating_mul(page.bytes())),
        bytes_moved: page.map(|page| counts.misses().saturating_mul(page.bytes())),
    }
}

/// Returns the trace, its name, and the size of its pages if that is known.
fn trace(options: &Options, model: Option<&ModelHeader>) -> Result<(Trace, String, Option<PageSize>)> {
    let kind = match (&options.trace, options.workload) {
        (Some(path), _) => {
            let bar = Bar::counting("reading");
            let mut how = TraceOptions::default();
            (how.form, how.read_only) = (options.format, options.read_only);
            (how.column, how.op_column) = (options.column.clone(), options.op_column.clone().unwrap_or_default());
            let trace = Trace::open(path, &how, &mut |uses| bar.at(uses))?;
            let name = path.display().to_string();
            let page = match (trace.page_size(), options.page_size) {
                (Some(has), Some(asked)) if has != asked => {
                    let (has, asked) = (size(has.bytes()), size(asked.bytes()));
                    let what = format!("the capture {name} has pages of {has}, not of {asked}");
                    return Err(Error::new(ErrorKind::InvalidArgument, what)
                        .remedy("leave --page-size out, or capture a run with pages of that size"));
                }
                (has, asked) => has.or(asked),
            };
            return Ok((trace, name, page));
        }
        (None, Some(kind)) => kind,
        (None, None) => {
            return Err(Error::new(ErrorKind::InvalidArgument, "there is nothing to look at")
                .remedy("give --trace or --workload"));
        }
    };
    let page = options.page_size.unwrap_or(PageSize::DEFAULT);
    let workload = Workload::new(kind, page, model)?;
    let bar = Bar::new("making the workload", options.uses);
    let trace = workload.trace(options.uses, options.seed, &mut |uses| bar.at(uses))?;
    Ok((trace, format!("workload {kind}, seed {}", options.seed), Some(page)))
}

/// Runs a capture through all policies at the default capacities.
pub fn of_capture(path: &std::path::Path, own: &[OwnPolicy]) -> Result<Found> {
    let options = Options {
        trace: Some(path.to_owned()),
        format: None,
        column: None,
        op_column: None,
        read_only: false,
        workload: None,
        seed: 0,
        uses: 0,
        model: None,
        page_size: None,
        capacity: Vec::new(),
        policy: vec![Choice::All],
        svg: None,
        json: false,
    };
    run(&options, own)
}

/// Runs the trace through each policy at each capacity.
pub fn run(options: &Options, own: &[OwnPolicy]) -> Result<Found> {
    let model = options.model.as_deref().map(format::open).transpose()?;
    let of_model = model.iter().flat_map(|model| model.files.iter().map(|file| &file.path)).chain(&options.model);
    let mut inputs: Vec<Input> =
        of_model.map(|path| Input { path: path.clone(), is: "it is a file of the model" }).collect();
    inputs.extend(options.trace.iter().map(|path| Input { path: path.clone(), is: "it is the trace" }));
    // Tried first, because some traces take long.
    let svg = options.svg.as_deref().map(|path| NewFile::create(path, "drawing", "--svg", &inputs)).transpose()?;
    let (mut trace, name, page) = trace(options, model.as_ref())?;
    let mut candidates: Vec<Candidate> = Vec::new();
    for choice in &options.policy {
        match *choice {
            Choice::All => candidates.extend(Candidate::all(&trace, own)),
            Choice::Optimum => {}
            Choice::One(candidate) => candidates.push(candidate),
        }
    }
    let mut seen = std::collections::HashSet::new();
    candidates.retain(|candidate| seen.insert(*candidate));
    if candidates.contains(&Candidate::Declared) && trace.passes() == 0 {
        let what = format!("{} needs a trace in passes, and {name} has none", Candidate::DECLARED);
        return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("leave it out"));
    }
    let mut sizes = if options.capacity.is_empty() { shares(trace.pages()) } else { options.capacity.clone() };
    let mut seen = std::collections::HashSet::new();
    sizes.retain(|pages| seen.insert(*pages));

    let rounds = sizes.len() as u64 * (candidates.len() as u64 + 1) + 1;
    let bar = Bar::new("policies", rounds * trace.uses());
    let uses = trace.uses();
    let mut done = 0;
    let hits = trace.hits_of_lru(&mut |uses| bar.at(uses))?;
    let mut capacities = Vec::new();
    for pages in sizes {
        done += uses;
        let optimum = ratio(trace.optimum(pages, &mut |uses| bar.at(done + uses))?, page);
        let mut policies = Vec::new();
        for candidate in &candidates {
            done += uses;
            let start = Instant::now();
            let ratio = ratio(candidate.replay(&mut trace, pages, &mut |uses| bar.at(done + uses))?, page);
            let ns = start.elapsed().as_nanos() as f64 / uses as f64;
            policies.push(Outcome {
                policy: candidate.name().to_owned(),
                ratio,
                regret: optimum.hit_ratio - ratio.hit_ratio,
                ns_per_use: (ns * 10.0).round() / 10.0,
            });
        }
        capacities.push(Capacity { pages, optimum, policies });
    }
    drop(bar);
    let found = Found {
        trace: name,
        about: trace.about().map(str::to_owned),
        uses,
        pages: trace.pages(),
        writes: trace.writes(),
        passes: trace.passes(),
        page_bytes: page.map(PageSize::bytes),
        classes: trace.classes().to_vec(),
        lru: points(&hits, uses, &capacities),
        capacities,
    };
    if let Some(svg) = svg {
        curve::write(&found, &svg)?;
    }
    Ok(found)
}

/// Returns 10, 25, 50, 75 and 90 % of the pages.
fn shares(pages: u32) -> Vec<NonZeroU32> {
    let of = |percent: u64| NonZeroU32::new((u64::from(pages) * percent / 100) as u32).unwrap_or(NonZeroU32::MIN);
    [10, 25, 50, 75, 90].map(of).to_vec()
}

/// Returns LRU's curve at evenly spaced capacities and at those that were asked for.
fn points(hits: &[u64], uses: u64, capacities: &[Capacity]) -> Vec<Point> {
    let all = hits.len() as u64;
    let mut at: Vec<u64> = (1..=POINTS).map(|n| (n * all).div_ceil(POINTS)).collect();
    at.extend(capacities.iter().map(|capacity| u64::from(capacity.pages.get()).min(all)));
    at.sort_unstable();
    at.dedup();
    let point = |pages: u64| {
        let hits = hits.get((pages as usize).checked_sub(1)?)?;
        Some(Point { pages: pages as u32, hit_ratio: *hits as f64 / uses as f64 })
    };
    at.into_iter().filter_map(point).collect()
}

impl Report for Found {
    fn text(&self) -> String {
        let writing = if self.writes > 0 { format!(", {} of which write,", self.writes) } else { String::new() };
        let mut text = format!("{}: {} uses{writing} of {} pages", printable(&self.trace), self.uses, self.pages);
        if let Some(bytes) = self.page_bytes {
            text += &format!(" of {}, {} in all", size(bytes), size(bytes * u64::from(self.pages)));
        }
        if self.passes > 0 {
            text += &format!(", in {} passes", self.passes);
        }
        text += "\n";
        if let Some(about) = &self.about {
            text += &format!("captured from: {}\n", printable(about));
        }
        if self.classes.len() > 1 {
            let mut table = Table::new(&[("class", Side::Left), ("pages", Side::Right), ("uses", Side::Right)]);
            for class in &self.classes {
                table.row([printable(&class.class), class.pages.to_string(), class.uses.to_string()]);
            }
            text += &format!("\n{}", table.text());
        }
        for capacity in &self.capacities {
            text += &format!("\nwith room for {}", capacity.pages);
            if let Some(bytes) = self.page_bytes {
                text += &format!(", {}", size(bytes * u64::from(capacity.pages.get())));
            }
            text += "\n";
            let mut head = vec![
                ("policy", Side::Left),
                ("hits", Side::Right),
                ("hit ratio", Side::Right),
                ("below the optimum", Side::Right),
                ("ns a use", Side::Right),
            ];
            let (bytes, passes, writes) = (self.page_bytes.is_some(), self.passes > 0, self.writes > 0);
            let columns = [
                (bytes, "moved"),
                (bytes && passes, "a pass"),
                (writes && bytes, "written"),
                (writes && bytes && passes, "a pass"),
                (writes && !bytes, "pages written"),
            ];
            head.extend(columns.into_iter().filter(|(is_there, _)| *is_there).map(|(_, name)| (name, Side::Right)));
            let mut table = Table::new(&head);
            let mut row = |name: &str, found: &Ratio, regret: String, ns: String| {
                let of_bytes = |bytes: Option<u64>| {
                    let all = bytes.map(size);
                    let pass = bytes.filter(|_| passes).map(|bytes| size(bytes / self.passes));
                    all.into_iter().chain(pass)
                };
                let written = found.bytes_written.filter(|_| writes);
                let pages = (writes && !bytes).then(|| found.written_back.to_string());
                let cells = [name.to_owned(), found.hits.to_string(), format!("{:.4}", found.hit_ratio), regret, ns];
                table.row(cells.into_iter().chain(of_bytes(found.bytes_moved)).chain(of_bytes(written)).chain(pages));
            };
            row("optimum", &capacity.optimum, String::new(), String::new());
            for found in &capacity.policies {
                row(&found.policy, &found.ratio, format!("{:.4}", found.regret), format!("{:.0}", found.ns_per_use));
            }
            text += &table.text();
        }
        text
    }
}
