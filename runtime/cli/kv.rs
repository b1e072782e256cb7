//! `outcore kv`: says what a store of keys and values holds, and whether all of it can be read. [`replay`] is a file of
//! its own.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use outcore::{Bytes, Error, ErrorKind, Result};
use outcore_kv::{StoreKey, StoreReport};
use serde::Serialize;

use super::output::Table;
use super::printed::Report;
use super::replay;

#[derive(Debug, Args)]
pub struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Say what a store holds, by its manifest and the heads of its blocks
    Inspect(Folder),
    /// Read every block too, and fail if one cannot be read as it was written
    Verify(Folder),
    /// Replay requests to an inference server through a pool, and say in which tier their blocks were found
    Replay(Box<replay::Options>),
}

#[derive(Debug, Args)]
struct Folder {
    /// The folder of the store, which no other process has open
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// A file with the key of an encrypted store: 32 bytes, or 64 hexadecimal digits
    #[arg(long, value_name = "FILE", conflicts_with = "key_env")]
    key_file: Option<PathBuf>,
    /// The environment variable with that key, in hexadecimal digits
    #[arg(long, value_name = "NAME")]
    key_env: Option<String>,
    /// One JSON object instead of a table
    #[arg(long)]
    json: bool,
}

impl Options {
    /// Whether the report is to be one JSON object.
    pub fn json(&self) -> bool {
        match &self.what {
            What::Inspect(of) | What::Verify(of) => of.json,
            What::Replay(options) => options.json,
        }
    }
}

/// The result of one of them.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Answer {
    Store(Found),
    Stores(Several),
    Replay(Box<replay::Found>),
}

impl Report for Answer {
    fn text(&self) -> String {
        match self {
            Self::Store(found) => found.text(),
            Self::Stores(found) => found.text(),
            Self::Replay(found) => found.text(),
        }
    }
}

#[derive(Debug, Serialize)]
pub struct Found {
    folder: String,
    verified: bool,
    version: u32,
    model: String,
    encrypted: bool,
    generation: u64,
    files: u64,
    file_bytes: u64,
    blocks: u64,
    block_bytes: u64,
    compressed: u64,
    tenants: u64,
    written_bytes: u64,
    read_bytes: u64,
    missing_files: u64,
    damaged: u64,
}

impl Report for Found {
    fn text(&self) -> String {
        let bytes = |n: u64| Bytes::new(n).to_string();
        let mut facts = Table::pairs();
        let sealed = if self.encrypted { ", encrypted" } else { "" };
        facts.pair("store", format!("{}: version {}{sealed}", self.folder, self.version));
        facts.pair("made by", format!("a model and layout with the fingerprint {}", self.model));
        let compressed = if self.compressed > 0 { format!(", {} compressed", self.compressed) } else { String::new() };
        facts.pair("blocks", format!("{} of {}{compressed}", self.blocks, bytes(self.block_bytes)));
        facts.pair("tenants", self.tenants.to_string());
        let generation = self.generation;
        facts.pair("files", format!("{}, {}; generation {generation}", self.files, bytes(self.file_bytes)));
        let ratio = match self.read_bytes {
            0 => "nothing was read back yet".to_owned(),
            read => format!("{:.2} for each byte read back", self.written_bytes as f64 / read as f64),
        };
        facts.pair("written", format!("{} since it was made: {ratio}", bytes(self.written_bytes)));
        let damage = match (self.damaged, self.missing_files) {
            (0, 0) if self.verified => "none: every block was read and is as it was written".to_owned(),
            (0, 0) => "none was seen; `outcore kv verify` reads every block".to_owned(),
            (damaged, missing) => format!("{damaged} damaged parts, {missing} files missing or too short"),
        };
        facts.pair("damage", damage);
        facts.text()
    }
}

/// Stores in the folders of a folder.
#[derive(Debug, Serialize)]
pub struct Several {
    folder: String,
    stores: Vec<Found>,
}

impl Report for Several {
    fn text(&self) -> String {
        let head = format!("stores in {}: {}, each of a model and its layout\n", self.folder, self.stores.len());
        self.stores.iter().fold(head, |text, store| format!("{text}\n{}", store.text()))
    }
}

/// # Errors
/// What opening the store, or the replay, says. [`Corrupt`](ErrorKind::Corrupt) if every block was read and one cannot
/// be had.
pub fn run(options: &Options) -> Result<Answer> {
    match &options.what {
        What::Inspect(of) => look(of, false),
        What::Verify(of) => look(of, true),
        What::Replay(options) => replay::run(options).map(Box::new).map(Answer::Replay),
    }
}

/// The store in a folder, or where there is none, those in the folders in it: a server keeps one for each model.
fn look(of: &Folder, verified: bool) -> Result<Answer> {
    let none = match look_at(of, &of.folder, verified) {
        Err(error) if error.kind() == ErrorKind::NotFound => error,
        found => return found.map(Answer::Store),
    };
    let mut folders: Vec<PathBuf> =
        fs::read_dir(&of.folder).map_or_else(|_| Vec::new(), |all| all.flatten().map(|one| one.path()).collect());
    folders.sort();
    let (mut stores, mut refused) = (Vec::new(), Vec::new());
    folders.retain(|folder| outcore_kv::has_parts_of_a_store(folder).unwrap_or(false));
    for folder in folders {
        match look_at(of, &folder, verified) {
            Ok(found) => stores.push(found),
            Err(error) => refused.push(error),
        }
    }
    // All others were looked at, and are said.
    if let Some(first) = refused.first() {
        let sound = stores.len();
        let all: Vec<String> = refused.iter().map(ToString::to_string).collect();
        let message = format!(
            "{} of the stores in {} cannot be used, beside {sound}: {}",
            refused.len(),
            of.folder.display(),
            all.join("; ")
        );
        return Err(
            Error::new(first.kind(), message).remedy("look at each store's own folder; the others stay as they are")
        );
    }
    match stores.is_empty() {
        true => Err(none),
        false => Ok(Answer::Stores(Several { folder: of.folder.display().to_string(), stores })),
    }
}

fn look_at(of: &Folder, folder: &Path, verified: bool) -> Result<Found> {
    let key = match (&of.key_file, &of.key_env) {
        (Some(file), _) => Some(StoreKey::from_file(file)?),
        (None, Some(name)) => Some(StoreKey::from_env(name)?),
        (None, None) => None,
    };
    let look = if verified { outcore_kv::verify } else { outcore_kv::inspect };
    let report = look(folder, key)?;
    let StoreReport { blocks, missing, damaged, .. } = report;
    let folder = folder.display().to_string();
    if verified && (missing > 0 || damaged > 0) {
        let message = format!(
            "the store {folder} has {damaged} damaged parts and {missing} files that are missing or too short, beside \
             {blocks} sound blocks"
        );
        return Err(Error::new(ErrorKind::Corrupt, message).remedy(
            "it can be used as it is: what is damaged is found by nobody and computed again; or remove the folder",
        ));
    }
    Ok(Found {
        folder,
        verified,
        version: report.version,
        model: report.model.bytes().iter().rev().map(|byte| format!("{byte:02x}")).collect(),
        encrypted: report.encrypted,
        generation: report.generation,
        files: report.files,
        file_bytes: report.bytes.get(),
        blocks,
        block_bytes: report.block_bytes.get(),
        compressed: report.compressed,
        tenants: report.tenants,
        written_bytes: report.written.get(),
        read_bytes: report.read.get(),
        missing_files: missing,
        damaged,
    })
}
