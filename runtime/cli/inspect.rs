//! `outcore inspect`: shows a model's tensors and pages, and how much of it memory budgets would hold. Reads headers
//! only.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;

use clap::Args;
use outcore::format::{self, Metadata, ModelHeader, TensorHeader};
use outcore::{Bytes, PageSize, Result};
use serde::Serialize;

use super::arguments::page_size;
use super::config::config_beside;
use super::output::{Side, Table, percent, printable, size};
use super::printed::Report;
use super::residency::{self, row_bytes};

#[derive(Debug, Args)]
pub struct Options {
    /// A GGUF or safetensors file, one file of a split model, an index.json, or a folder with one of them
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Size of a page to assume: a power of two from 4KiB to 1GiB; `generate` chooses smaller ones for small budgets
    #[arg(long, value_name = "SIZE", value_parser = page_size, default_value = "2MiB")]
    page_size: PageSize,
    /// Device budgets to consider, such as 4GiB; repeat the option, or list several. Default: 10, 25, 50, 75 and 100 %
    /// of the model
    #[arg(long, value_name = "SIZE", num_args = 1.., value_delimiter = ',', action = clap::ArgAction::Append)]
    budget: Vec<Bytes>,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// One JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Serialize)]
pub struct Inspection {
    model: String,
    format: &'static str,
    metadata: BTreeMap<String, String>,
    files: Vec<FileReport>,
    file_bytes: u64,
    tensor_count: u64,
    tensor_bytes: u64,
    parameters: u64,
    /// How many tensors share all their bytes with an earlier one.
    tied_tensors: u64,
    dtypes: Vec<TypeReport>,
    largest: Vec<TensorReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<Vec<TensorReport>>,
    page_bytes: u64,
    /// How many pages all files have.
    pages: u64,
    /// How many pages hold bytes of a tensor.
    tensor_pages: u64,
    /// How many pages hold bytes of several tensors.
    shared_pages: u64,
    /// Bytes of last pages beyond the ends of files.
    tail_waste_bytes: u64,
    /// The least budget with which every tensor can be used, row by row.
    minimum_budget_bytes: u64,
    /// The least budget with which every tensor can be pinned as a whole.
    whole_tensor_budget_bytes: u64,
    budgets: Vec<BudgetReport>,
}

#[derive(Debug, Serialize)]
struct FileReport {
    path: String,
    bytes: u64,
    pages: u64,
}

#[derive(Debug, Serialize)]
struct TypeReport {
    dtype: &'static str,
    tensors: u64,
    bytes: u64,
}

#[derive(Clone, Debug, Serialize)]
struct TensorReport {
    name: String,
    dtype: &'static str,
    shape: Vec<u64>,
    bytes: u64,
    pages: u64,
    row_bytes: u64,
    file: u32,
    offset: u64,
    alignment: u64,
}

#[derive(Debug, Serialize)]
struct BudgetReport {
    budget_bytes: u64,
    frames: u64,
    runs: bool,
    /// The share of the tensors' pages that each pass finds resident under `plan`.
    resident_share: f64,
    pages_streamed_per_pass: u64,
    bytes_streamed_per_pass: u64,
    /// How many pages the largest unit has.
    unit_pages: u64,
}

const LARGEST: usize = 5;

pub fn run(options: &Options) -> Result<Inspection> {
    let model = format::open(&options.model)?;
    let page = options.page_size;
    let pages = Pages::of(&model, page);
    let report = |tensor: &TensorHeader| TensorReport {
        name: tensor.name.clone(),
        dtype: tensor.dtype.name(),
        shape: tensor.shape.clone(),
        bytes: tensor.len,
        pages: pages_between(tensor.offset, tensor.len, page),
        row_bytes: row_bytes(&tensor.shape, tensor.len),
        file: tensor.file,
        offset: tensor.offset,
        alignment: tensor.alignment(),
    };
    let mut by_size: Vec<&TensorHeader> = model.tensors.iter().collect();
    by_size.sort_by(|a, b| b.len.cmp(&a.len).then_with(|| a.name.cmp(&b.name)));
    let minimum = model.tensors.iter().map(|tensor| least_pages(tensor, page)).max().unwrap_or(0);
    let whole = model.tensors.iter().map(|tensor| pages_between(tensor.offset, tensor.len, page)).max().unwrap_or(0);
    let files: Vec<FileReport> = model
        .files
        .iter()
        .map(|file| FileReport {
            path: file.path.display().to_string(),
            bytes: file.len,
            pages: page.pages_for(file.len),
        })
        .collect();
    let all_pages: u64 = files.iter().map(|file| file.pages).sum();
    let file_bytes: u64 = files.iter().map(|file| file.bytes).sum();
    let defaults =
        [10, 25, 50, 75, 100].map(|share| Bytes::new((pages.with_tensors * share).div_ceil(100) * page.bytes()));
    let wanted = if options.budget.is_empty() { &defaults[..] } else { &options.budget[..] };
    let mut budgets = Vec::new();
    for budget in wanted {
        budgets.push(consider(&model, page, *budget, minimum, pages.with_tensors)?);
    }
    Ok(Inspection {
        model: options.model.display().to_string(),
        format: match model.metadata {
            Metadata::Gguf(_) => "GGUF",
            Metadata::Safetensors(_) => "safetensors",
            _ => "unknown",
        },
        metadata: interesting(&model),
        file_bytes,
        tensor_count: model.tensors.len() as u64,
        tensor_bytes: model.tensor_bytes(),
        parameters: model.tensors.iter().map(TensorHeader::elements).fold(0, u64::saturating_add),
        tied_tensors: pages.tied,
        dtypes: types(&model),
        largest: by_size.iter().take(LARGEST).map(|tensor| report(tensor)).collect(),
        tensors: options.tensors.then(|| model.tensors.iter().map(report).collect()),
        page_bytes: page.bytes(),
        pages: all_pages,
        tensor_pages: pages.with_tensors,
        shared_pages: pages.shared,
        tail_waste_bytes: all_pages * page.bytes() - file_bytes,
        minimum_budget_bytes: minimum * page.bytes(),
        whole_tensor_budget_bytes: whole * page.bytes(),
        budgets,
        files,
    })
}

fn consider(model: &ModelHeader, page: PageSize, budget: Bytes, minimum: u64, pages: u64) -> Result<BudgetReport> {
    let frames = budget.get() / page.bytes();
    let mut report = BudgetReport {
        budget_bytes: budget.get(),
        frames,
        runs: frames >= minimum && frames > 0,
        resident_share: 0.0,
        pages_streamed_per_pass: 0,
        bytes_streamed_per_pass: 0,
        unit_pages: 0,
    };
    if report.runs {
        // Frames beyond twice the number of pages make no difference.
        let pass = residency::pass(model, page, u32::try_from(frames.min(2 * pages + 1)).unwrap_or(u32::MAX))?;
        report.pages_streamed_per_pass = pass.pages_streamed;
        report.bytes_streamed_per_pass = pass.streamed;
        report.unit_pages = pass.unit_pages;
        report.resident_share = 1.0 - (pass.pages_streamed as f64 / pages.max(1) as f64).min(1.0);
    }
    Ok(report)
}

/// Counts of pages that hold tensors.
struct Pages {
    with_tensors: u64,
    shared: u64,
    tied: u64,
}

impl Pages {
    fn of(model: &ModelHeader, page: PageSize) -> Self {
        let mut extents = HashSet::new();
        let mut pages = Self { with_tensors: 0, shared: 0, tied: 0 };
        // Tensors that are not tied share no byte, so only their first and last pages can be shared.
        let mut edges: HashMap<(u32, u64), u32> = HashMap::new();
        for tensor in model.tensors.iter().filter(|tensor| tensor.len > 0) {
            if !extents.insert((tensor.file, tensor.offset)) {
                pages.tied += 1;
                continue;
            }
            let (first, last) = (page.page_of(tensor.offset), page.page_of(tensor.end() - 1));
            pages.with_tensors += (last - first).saturating_sub(1);
            *edges.entry((tensor.file, first)).or_default() += 1;
            if last != first {
                *edges.entry((tensor.file, last)).or_default() += 1;
            }
        }
        pages.with_tensors += edges.len() as u64;
        pages.shared = edges.values().filter(|count| **count > 1).count() as u64;
        pages
    }
}

fn pages_between(offset: u64, len: u64, page: PageSize) -> u64 {
    if len == 0 { 0 } else { page.page_of(offset + len - 1) - page.page_of(offset) + 1 }
}

/// Returns how many pages the widest row covers.
fn least_pages(tensor: &TensorHeader, page: PageSize) -> u64 {
    if tensor.len == 0 {
        return 0;
    }
    let row = row_bytes(&tensor.shape, tensor.len);
    // No row covers more pages than this.
    let most = page.pages_for(row - 1) + 1;
    let mut worst = 0;
    let mut at = tensor.offset;
    while at < tensor.end() && worst < most {
        worst = worst.max(pages_between(at, row, page));
        // Rows inside the page that they begin in cover one page. Go on to the first row that does not.
        let inside = (page.bytes() - at % page.bytes()) / row;
        at += row * inside.max(1);
    }
    worst
}

fn types(model: &ModelHeader) -> Vec<TypeReport> {
    let mut types: BTreeMap<&'static str, (u64, u64)> = BTreeMap::new();
    for tensor in &model.tensors {
        let (count, bytes) = types.entry(tensor.dtype.name()).or_default();
        *count += 1;
        *bytes += tensor.len;
    }
    let mut types: Vec<TypeReport> =
        types.into_iter().map(|(dtype, (tensors, bytes))| TypeReport { dtype, tensors, bytes }).collect();
    types.sort_by_key(|row| std::cmp::Reverse(row.bytes));
    types
}

/// Returns the metadata that tell a reader which model this is.
fn interesting(model: &ModelHeader) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    match &model.metadata {
        Metadata::Gguf(metadata) => {
            let architecture = metadata.get_str("general.architecture").unwrap_or_default();
            for (name, key) in [("architecture", "general.architecture"), ("name", "general.name")] {
                if let Some(text) = metadata.get_str(key) {
                    found.insert(name.to_owned(), printable(text));
                }
            }
            for (name, key) in [
                ("layers", "block_count"),
                ("context", "context_length"),
                ("embedding", "embedding_length"),
                ("heads", "attention.head_count"),
                ("kv heads", "attention.head_count_kv"),
                ("experts", "expert_count"),
            ] {
                if let Some(n) = metadata.get_u64(&format!("{architecture}.{key}")) {
                    found.insert(name.to_owned(), n.to_string());
                }
            }
            if let Some(tokens) = metadata.get_array("tokenizer.ggml.tokens") {
                found.insert("vocabulary".to_owned(), tokens.len().to_string());
            }
        }
        Metadata::Safetensors(metadata) => {
            const SHOWN: usize = 16;
            for (key, value) in metadata.iter().take(SHOWN) {
                let value: String = value.chars().take(80).collect();
                found.insert(printable(key), printable(&value));
            }
            // The config is only shown, so a bad one is ignored.
            let config = model.files.first().and_then(|file| config_beside(&file.path).ok());
            if let Some(config) = config.and_then(|text| serde_json::from_str::<serde_json::Value>(&text).ok()) {
                for (name, key) in [
                    ("architecture", "model_type"),
                    ("layers", "num_hidden_layers"),
                    ("context", "max_position_embeddings"),
                    ("embedding", "hidden_size"),
                    ("heads", "num_attention_heads"),
                    ("kv heads", "num_key_value_heads"),
                    ("vocabulary", "vocab_size"),
                ] {
                    match config.get(key) {
                        Some(serde_json::Value::String(text)) => found.insert(name.to_owned(), printable(text)),
                        Some(serde_json::Value::Number(n)) => found.insert(name.to_owned(), n.to_string()),
                        _ => None,
                    };
                }
            }
        }
        _ => {}
    }
    found
}

impl Report for Inspection {
    fn text(&self) -> String {
        let (left, right) = (Side::Left, Side::Right);
        let mut facts = Table::pairs();
        let files = match self.files.len() {
            1 => "1 file".to_owned(),
            n => format!("{n} files"),
        };
        facts.pair("model", format!("{}: {}, {files}, {}", self.model, self.format, size(self.file_bytes)));
        let tied = if self.tied_tensors > 0 { format!(", {} tied", self.tied_tensors) } else { String::new() };
        facts.pair(
            "tensors",
            format!("{} ({}), {} elements{tied}", self.tensor_count, size(self.tensor_bytes), self.parameters),
        );
        facts.pair(
            "pages",
            format!(
                "{} of {}; {} hold tensors, {} of these shared by several; {} behind file ends",
                self.pages,
                size(self.page_bytes),
                self.tensor_pages,
                self.shared_pages,
                size(self.tail_waste_bytes)
            ),
        );
        facts.pair(
            "least budget",
            format!(
                "{} row by row, {} with whole tensors",
                size(self.minimum_budget_bytes),
                size(self.whole_tensor_budget_bytes)
            ),
        );
        facts.pair(
            "assumed",
            format!(
                "pages of {} (--page-size) and tensors used in file order; generate takes pages of 64 KiB to 2 MiB by \
                 its budget, and the model's own order",
                size(self.page_bytes)
            ),
        );
        for (name, value) in &self.metadata {
            facts.pair(name, value.clone());
        }
        let mut types = Table::new(&[("type", left), ("tensors", right), ("size", right), ("share", right)]);
        for kind in &self.dtypes {
            types.row([
                kind.dtype.to_owned(),
                kind.tensors.to_string(),
                size(kind.bytes),
                percent(kind.bytes, self.tensor_bytes),
            ]);
        }
        let mut budgets = Table::new(&[
            ("budget", right),
            ("frames", right),
            ("resident", right),
            ("streamed a pass", right),
            ("pages", right),
        ]);
        for budget in &self.budgets {
            let first = [size(budget.budget_bytes), budget.frames.to_string()];
            if budget.runs {
                budgets.row(first.into_iter().chain([
                    format!("{:.1} %", 100.0 * budget.resident_share),
                    size(budget.bytes_streamed_per_pass),
                    budget.pages_streamed_per_pass.to_string(),
                ]));
            } else {
                budgets.row(first.into_iter().chain(["too small".to_owned(), "-".to_owned(), "-".to_owned()]));
            }
        }
        let (title, listed) = match &self.tensors {
            Some(all) => ("Tensors", all),
            None => ("Largest tensors", &self.largest),
        };
        let mut tensors = Table::new(&[
            ("tensor", left),
            ("type", left),
            ("shape", left),
            ("size", right),
            ("pages", right),
            ("a row", right),
        ]);
        for tensor in listed {
            tensors.row([
                printable(&tensor.name),
                tensor.dtype.to_owned(),
                tensor.shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(" x "),
                size(tensor.bytes),
                tensor.pages.to_string(),
                size(tensor.row_bytes),
            ]);
        }
        format!(
            "{}\nTypes\n{}\n{title}\n{}\nBudgets: tensors used in file order, over and over, with the plan policy\n{}",
            facts.text(),
            types.text(),
            tensors.text(),
            budgets.text()
        )
    }
}
