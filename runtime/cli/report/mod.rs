//! `outcore report`: describes runs in one HTML page that needs no other file.

mod bars;
mod input;
mod lines;
mod of_mapped;
mod of_run;
mod of_simulation;
mod of_timeline;
mod of_trace;
mod page;
mod part;
mod residency;
mod run;
mod timeline;

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use outcore::Result;
use outcore_lab::output::{Input, NewFile};
use serde::Serialize;

use super::output::{printable, size};
use super::printed::Report;
use input::Inputs;
use outcore_lab::sim::OwnPolicy;

/// The options of `outcore report`.
#[derive(Debug, Args)]
pub struct Options {
    /// Files of one run or of several: what `outcore run --report`, `generate --timeline` and `generate --capture`
    /// wrote, or the JSON of `generate --json`, `outcore policies --json`, `outcore simulate --json` (best with
    /// `--timeline`) or `outcore probe --json`
    #[arg(value_name = "JSON", required = true)]
    inputs: Vec<PathBuf>,
    /// The JSON of `outcore probe --json`, made on the run's machine: the speed of its disk and memory
    #[arg(long, value_name = "JSON")]
    probe: Option<PathBuf>,
    /// The page to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Print one JSON object about the page
    #[arg(long)]
    pub json: bool,
}

/// The page that was written.
#[derive(Debug, Serialize)]
pub struct Written {
    page: String,
    bytes: u64,
    parts: Vec<&'static str>,
    left_out: Vec<LeftOut>,
}

/// A part of the page that has no data, and the input that it needs.
#[derive(Clone, Debug, Serialize)]
pub struct LeftOut {
    pub part: &'static str,
    pub needs: &'static str,
}

pub fn run(options: &Options, own: &[OwnPolicy]) -> Result<Written> {
    let named = |path: &PathBuf| Input { path: path.clone(), is: "it is what is reported on" };
    let kept: Vec<Input> = options.inputs.iter().chain(&options.probe).map(named).collect();
    let file = NewFile::create(&options.output, "page", "--output", &kept)?;
    let inputs = Inputs::read(&options.inputs, options.probe.as_deref(), own)?;
    let page = page::of(&inputs)?;
    let mut out = file.beside()?;
    out.write_all(page.text.as_bytes()).map_err(|cause| file.failed(cause))?;
    file.put(out)?;
    Ok(Written {
        page: options.output.display().to_string(),
        bytes: page.text.len() as u64,
        parts: page.parts,
        left_out: page.left_out,
    })
}

impl Report for Written {
    fn text(&self) -> String {
        let mut text = format!("{}: {}\n", printable(&self.page), size(self.bytes));
        for part in &self.parts {
            text += &format!("  {part}\n");
        }
        for LeftOut { part, needs } in &self.left_out {
            text += &format!("  left out: {part}, which needs {needs}\n");
        }
        text
    }
}
