//! `outcore state`: says what a folder of durable tensors holds, whether all of it can be read, and copies tensors out
//! of it and into it.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use outcore::durable::{DurableOptions, DurableReader, Generation, StoredTensor};
use outcore::{Bytes, PageSize, Result, Runtime};
use serde::Serialize;

use super::arguments::page_size;
use super::output::{Side, Table, printable};
use super::printed::Report;

#[derive(Debug, Args)]
pub struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Say which generations are kept, and which tensors there are
    Inspect(Folder),
    /// Read every page of a generation, and fail if one is not as it was written
    Verify(Folder),
    /// Write the tensors of a generation to a safetensors file
    Export {
        #[command(flatten)]
        folder: Folder,
        /// The file, which is written beside and gets its name when it is whole
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Copy the tensors of a model into a folder, which is made if there is none
    Import {
        /// The folder, which no process has open
        #[arg(value_name = "FOLDER")]
        folder: PathBuf,
        /// A GGUF or safetensors file, one of several, an index.json, or a folder with one of them
        #[arg(value_name = "MODEL")]
        model: PathBuf,
        /// The size of a new folder's pages: a power of two, such as 2MiB. Programs that open it have to use the same
        #[arg(long, value_name = "SIZE", value_parser = page_size)]
        page_size: Option<PageSize>,
        /// One JSON object instead of a table
        #[arg(long)]
        json: bool,
    },
}

/// What copying a model takes for pages, whatever its size; one page, if that is larger.
const FOR_IMPORT: Bytes = Bytes::mib(128);

#[derive(Debug, Args)]
struct Folder {
    /// The folder, which no process has open to write
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// A generation that is kept; the newest unless set
    #[arg(long, value_name = "N")]
    generation: Option<u64>,
    /// One JSON object instead of a table
    #[arg(long)]
    json: bool,
}

impl Options {
    /// Whether the report is to be one JSON object.
    pub fn json(&self) -> bool {
        match &self.what {
            What::Inspect(of) | What::Verify(of) | What::Export { folder: of, .. } => of.json,
            What::Import { json, .. } => *json,
        }
    }
}

/// Copies a model's tensors into a folder, and commits.
fn import(folder: &Path, model: &Path, page_size: Option<PageSize>) -> Result<()> {
    // If it cannot be opened, opening it to write says why.
    let found = DurableReader::open(folder, None).ok();
    let kept = found.as_ref().map_or(1, |found| found.generations().len());
    let page = page_size.unwrap_or_else(|| found.map_or(PageSize::DEFAULT, |found| found.page_size()));
    let budget = FOR_IMPORT.max(Bytes::new(page.bytes()));
    let runtime = Runtime::builder().page_size(page).device_budget(budget).open()?;
    let model = runtime.open_model(model)?;
    let state = runtime.open_durable(folder, DurableOptions::default().keep(kept.max(1) as u32))?;
    state.import(&model)?;
    state.commit()?;
    drop((state, model));
    runtime.close()
}

#[derive(Debug, Serialize)]
struct Row {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    bytes: u64,
}

/// What was found.
#[derive(Debug, Serialize)]
pub struct Found {
    folder: String,
    /// The one that was looked at.
    generation: u64,
    generations: Vec<u64>,
    page_bytes: u64,
    note_bytes: u64,
    bytes: u64,
    verified: bool,
    exported: Option<String>,
    /// Why generations were passed over.
    passed_over: Vec<String>,
    tensors: Vec<Row>,
}

impl Report for Found {
    fn text(&self) -> String {
        let mut facts = Table::pairs();
        let kept: Vec<String> = self.generations.iter().map(u64::to_string).collect();
        facts.pair("folder", format!("{}: pages of {}", self.folder, Bytes::new(self.page_bytes)));
        facts.pair("generation", format!("{}; kept: {}", self.generation, kept.join(", ")));
        facts.pair("tensors", format!("{}, {}", self.tensors.len(), Bytes::new(self.bytes)));
        facts.pair("note", Bytes::new(self.note_bytes).to_string());
        let damage = match self.verified {
            true => "none: every page was read and is as it was written",
            false => "not looked for; `outcore state verify` reads every page",
        };
        facts.pair("damage", damage);
        for why in &self.passed_over {
            facts.pair("passed over", why);
        }
        if let Some(file) = &self.exported {
            facts.pair("exported to", file);
        }
        let mut tensors =
            Table::new(&[("tensor", Side::Left), ("type", Side::Left), ("extents", Side::Left), ("size", Side::Right)]);
        for Row { name, dtype, shape, bytes } in &self.tensors {
            let extents: Vec<String> = shape.iter().map(u64::to_string).collect();
            tensors.row([printable(name), dtype.clone(), extents.join(" x "), Bytes::new(*bytes).to_string()]);
        }
        format!("{}\n{}", facts.text(), tensors.text())
    }
}

/// # Errors
/// What opening the folder or the model says; [`Corrupt`](outcore::ErrorKind::Corrupt) if a page was read and is not as
/// it was written; errors of the file that is written.
pub fn run(options: &Options) -> Result<Found> {
    let (folder, generation) = match &options.what {
        What::Inspect(of) | What::Verify(of) | What::Export { folder: of, .. } => (&of.folder, of.generation),
        What::Import { folder, model, page_size, .. } => {
            import(folder, model, *page_size)?;
            (folder, None)
        }
    };
    let reader = DurableReader::open(folder, generation.map(Generation::new))?;
    let (mut verified, mut exported) = (false, None);
    match &options.what {
        What::Inspect(_) | What::Import { .. } => {}
        What::Verify(_) => {
            reader.verify()?;
            verified = true;
        }
        What::Export { file, .. } => {
            reader.export(file)?;
            exported = Some(file.display().to_string());
        }
    }
    let row = |StoredTensor { name, dtype, shape, size, .. }: StoredTensor| Row {
        name,
        dtype: dtype.name().into(),
        shape,
        bytes: size.get(),
    };
    let generations: Vec<u64> = reader.generations().into_iter().map(Generation::get).collect();
    let tensors: Vec<Row> = reader.tensors().into_iter().map(row).collect();
    Ok(Found {
        folder: folder.display().to_string(),
        generation: generation.or(generations.first().copied()).unwrap_or_default(),
        generations,
        page_bytes: reader.page_size().bytes(),
        note_bytes: reader.note().len() as u64,
        bytes: tensors.iter().map(|tensor| tensor.bytes).sum(),
        verified,
        exported,
        passed_over: reader.passed_over().iter().map(ToString::to_string).collect(),
        tensors,
    })
}
