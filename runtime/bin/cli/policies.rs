//! What policies make of a recorded trace.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Instant;

use clap::Args;
use outcore::sim::{self, Counts, Trace};
use outcore::{Error, ErrorKind, PolicyKind, Result};
use serde::Serialize;

use super::Report;
use super::output::{Side, Table};

/// What `outcore policies` takes.
#[derive(Debug, Args)]
pub struct Options {
    /// The trace: one JSON object a line, whose "hash_ids" are the blocks that a request uses in order (the form of the
    /// Mooncake traces)
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// Capacities in pages, separated by commas
    #[arg(long, value_name = "LIST", value_delimiter = ',', required = true, value_parser = capacity)]
    capacity: Vec<NonZeroU32>,
    /// Policies, separated by commas: lru, plan, fifo, clock, lfu, sieve, s3fifo, 2q, arc, lirs, wtinylfu, kv, mru, random;
    /// or all
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "all")]
    policy: Vec<Choice>,
    /// Print one JSON object instead
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, Debug)]
enum Choice {
    All,
    One(PolicyKind),
}

impl FromStr for Choice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "all" { Ok(Self::All) } else { text.parse().map(Self::One) }
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

/// What there is to say about a trace.
#[derive(Debug, Serialize)]
pub struct Found {
    trace: String,
    uses: u64,
    pages: u32,
    capacities: Vec<Capacity>,
}

#[derive(Debug, Serialize)]
struct Capacity {
    pages: NonZeroU32,
    /// Of Belady's MIN, which knows the trace.
    optimum: Ratio,
    policies: Vec<Outcome>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Ratio {
    hits: u64,
    misses: u64,
    hit_ratio: f64,
}

#[derive(Debug, Serialize)]
struct Outcome {
    policy: &'static str,
    #[serde(flatten)]
    ratio: Ratio,
    /// The optimum's hit ratio less this one's.
    regret: f64,
    /// Of a use, with what it evicts and brings in, and the simulation's own work.
    ns_per_use: f64,
}

impl From<Counts> for Ratio {
    fn from(counts: Counts) -> Self {
        Self { hits: counts.hits, misses: counts.misses(), hit_ratio: counts.hit_ratio() }
    }
}

/// Runs the trace through each policy at each capacity.
pub fn run(options: &Options) -> Result<Found> {
    let trace = Trace::open_mooncake(&options.trace)?;
    let mut kinds: Vec<PolicyKind> = Vec::new();
    for choice in &options.policy {
        match *choice {
            Choice::All => kinds.extend(PolicyKind::ALL),
            Choice::One(kind) => kinds.push(kind),
        }
    }
    let mut seen = std::collections::HashSet::new();
    kinds.retain(|kind| seen.insert(*kind));
    let mut capacities = Vec::new();
    for pages in options.capacity.iter().copied() {
        let optimum = Ratio::from(sim::optimum(&trace, pages));
        let mut policies = Vec::new();
        for kind in &kinds {
            let start = Instant::now();
            let ratio = Ratio::from(sim::replay(kind.build(), &trace, pages)?);
            let ns = start.elapsed().as_nanos() as f64 / trace.uses().len() as f64;
            policies.push(Outcome {
                policy: kind.name(),
                ratio,
                regret: optimum.hit_ratio - ratio.hit_ratio,
                ns_per_use: (ns * 10.0).round() / 10.0,
            });
        }
        capacities.push(Capacity { pages, optimum, policies });
    }
    Ok(Found {
        trace: options.trace.display().to_string(),
        uses: trace.uses().len() as u64,
        pages: trace.pages(),
        capacities,
    })
}

impl Report for Found {
    fn text(&self) -> String {
        let name = super::output::printable(&self.trace);
        let mut text = format!("{name}: {} uses of {} pages\n", self.uses, self.pages);
        for capacity in &self.capacities {
            text += &format!("\nwith room for {}\n", capacity.pages);
            let mut table = Table::new(&[
                ("policy", Side::Left),
                ("hits", Side::Right),
                ("hit ratio", Side::Right),
                ("below the optimum", Side::Right),
                ("ns a use", Side::Right),
            ]);
            let best = capacity.optimum;
            let ratio = |ratio: f64| format!("{ratio:.4}");
            table.row([
                "optimum".to_owned(),
                best.hits.to_string(),
                ratio(best.hit_ratio),
                String::new(),
                String::new(),
            ]);
            for found in &capacity.policies {
                table.row([
                    found.policy.to_owned(),
                    found.ratio.hits.to_string(),
                    ratio(found.ratio.hit_ratio),
                    ratio(found.regret),
                    format!("{:.0}", found.ns_per_use),
                ]);
            }
            text += &table.text();
        }
        text
    }
}
