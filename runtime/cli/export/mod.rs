//! `outcore export`: writes a model to a GGUF file with weights of another type, in little memory.
//!
//! The file is the one that `llama-quantize --pure` of llama.cpp writes without an importance matrix: [`chosen`] says
//! which tensors get which type and in which order they lie, `outcore-quants` makes the bytes.

mod chosen;
mod convert;
mod written;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use clap::Args;
use outcore::format;
use outcore::format::gguf::{HeaderWriter, Layout, Metadata, Value};
use outcore::{Bytes, Error, ErrorKind, PageSize, Plan, Result, Runtime, Tensor};
use outcore_quants::WeightType;
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::bar::Bar;
use super::output::{Table, printable, rate, size};
use super::printed::Report;
use chosen::{Chosen, choose, file_type};
use convert::{Lanes, PIECE, PIECE_BYTES, Refused};
use written::Written;

#[derive(Debug, Args)]
pub struct Options {
    /// A GGUF file, or one file of a split model
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// The file, which is written beside and gets its name when it is whole. A file of that name is replaced
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// The type of matrices: F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4
    #[arg(long = "type", value_name = "TYPE")]
    to: WeightType,
    /// Memory for pages of the model, buffers and headers
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    memory: Bytes,
    /// Threads that convert; as many as there are processors unless set
    #[arg(long, value_name = "N")]
    threads: Option<std::num::NonZeroU16>,
    /// One JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

const PAGE: PageSize = PageSize::DEFAULT;
/// More are never faster. The system may refuse to start very many.
const THREADS_MOST: u64 = 256;
/// Fewest pages: those that a thread's piece can touch, and as many that are read meanwhile.
const LEAST_PAGES: u64 = 4;
/// Keys that llama.cpp writes anew behind the others.
const WRITTEN_ANEW: [&str; 2] = ["general.quantization_version", "general.file_type"];
/// Keys that belong to a model in several files.
const OF_SPLITS: [&str; 3] = ["split.no", "split.count", "split.tensors.count"];
/// The version of the formats of blocks: ggml's `GGML_QNT_VERSION`.
const QUANTIZATION_VERSION: u32 = 2;

/// What was written.
#[derive(Debug, Serialize)]
pub struct Exported {
    model: String,
    out: String,
    /// The type that was asked for.
    to: String,
    /// Tensors of the new file, by type.
    types: BTreeMap<&'static str, u64>,
    converted: u64,
    /// How many of these were quantised before: their errors add up.
    requantised: u64,
    /// Matrices of another type than was asked for, because their rows are no whole blocks of it.
    fallbacks: Vec<Fallback>,
    memory_bytes: u64,
    threads: u64,
    bytes_in: u64,
    bytes_out: u64,
    seconds: f64,
}

#[derive(Debug, Serialize)]
struct Fallback {
    tensor: String,
    to: &'static str,
}

impl Report for Exported {
    fn text(&self) -> String {
        let mut facts = Table::pairs();
        facts.pair("model", printable(&self.model));
        facts.pair("exported to", printable(&self.out));
        let types: Vec<String> = self.types.iter().map(|(name, count)| format!("{count} {name}")).collect();
        facts.pair("tensors", format!("{}; {} were converted", types.join(", "), self.converted));
        if self.requantised > 0 {
            facts.pair("quantised twice", format!("{}: the errors of both types add up", self.requantised));
        }
        const SHOWN: usize = 8;
        for Fallback { tensor, to } in self.fallbacks.iter().take(SHOWN) {
            facts.pair(
                "another type",
                format!("{} is {to}: its rows are not whole {} blocks", printable(tensor), self.to),
            );
        }
        if self.fallbacks.len() > SHOWN {
            facts.pair("", format!("and {} more; --json lists all", self.fallbacks.len() - SHOWN));
        }
        facts.pair("memory", format!("{}, {} threads", size(self.memory_bytes), self.threads));
        let a_second = (self.bytes_in as f64 / self.seconds.max(1e-9)) as u64;
        let (bytes_in, bytes_out) = (size(self.bytes_in), size(self.bytes_out));
        let what = format!("{bytes_in} in, {bytes_out} out, {:.1} s, {} in", self.seconds, rate(a_second));
        format!("{}  {what}\n", facts.text())
    }
}

/// # Errors
/// What opening the model says. [`Unsupported`](ErrorKind::Unsupported) for a model that is not GGUF, and for types
/// that cannot be read; [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) with the least memory;
/// [`InvalidArgument`](ErrorKind::InvalidArgument) for an output that cannot be one, and for weights that are no
/// numbers; errors of the disks. Then there is no new file.
pub fn run(options: &Options) -> Result<Exported> {
    let began = Instant::now();
    let header = Arc::new(format::open(&options.model)?);
    let metadata = header.gguf().ok_or_else(|| {
        let what = format!("{} is not GGUF, which export reads", options.model.display());
        let remedy = "convert it with convert_hf_to_gguf.py of llama.cpp, with --outtype bf16, and export that";
        Error::new(ErrorKind::Unsupported, what).remedy(remedy)
    })?;
    let chosen = choose(&header, options.to)?;

    let layout = layout(metadata, &chosen, options.to)?;
    let shares = Shares::of(options, layout.header.len() as u64)?;
    let stopped = stop_by_signals();
    let mut out = Written::new(&options.out, &header, layout.len)?;
    let runtime = Runtime::builder().page_size(PAGE).device_budget(shares.pages).open()?;
    let (bytes_in, bytes_out) = (header.tensors.iter().map(|tensor| tensor.len).sum(), layout.len);
    let model = runtime.open_parsed(Arc::clone(&header))?;

    let tensors: Vec<Tensor> = chosen.iter().map(|one| model.tensor(&one.tensor.name)).collect::<Result<_>>()?;
    let read: Vec<Tensor> = tensors.iter().filter(|tensor| tensor.size() > Bytes::ZERO).cloned().collect();
    runtime.plan(Plan::Once(&read));
    write_all(&runtime, &mut out, layout, &chosen, &tensors, shares.threads, &stopped)?;
    drop((read, tensors, model));
    runtime.close()?;
    out.finish()?;

    let mut types = BTreeMap::new();
    chosen.iter().for_each(|one| *types.entry(one.to.name()).or_default() += 1);
    let converted = || chosen.iter().filter(|one| one.to != one.tensor.dtype);
    let fallback = |one: &Chosen<'_>| Fallback { tensor: one.tensor.name.clone(), to: one.to.name() };
    Ok(Exported {
        model: options.model.display().to_string(),
        out: options.out.display().to_string(),
        to: options.to.to_string(),
        types,
        converted: converted().count() as u64,
        requantised: converted().filter(|one| one.tensor.dtype.block_elements() > 1).count() as u64,
        fallbacks: chosen.iter().filter(|one| one.fallback).map(fallback).collect(),
        memory_bytes: options.memory.get(),
        threads: shares.threads,
        bytes_in,
        bytes_out,
        seconds: (began.elapsed().as_secs_f64() * 1e3).round() / 1e3,
    })
}

/// The header of the new file: the key-values of the model, but those that say what it is now.
fn layout(metadata: &Metadata, chosen: &[Chosen<'_>], to: WeightType) -> Result<Layout> {
    let mut writer = HeaderWriter::new();
    writer.copy(metadata, &[&WRITTEN_ANEW[..], &OF_SPLITS].concat());
    writer.value(WRITTEN_ANEW[0], Value::U32(QUANTIZATION_VERSION));
    writer.value(WRITTEN_ANEW[1], Value::U32(file_type(to)?));
    for Chosen { tensor, to, .. } in chosen {
        writer.tensor(&tensor.name, *to, &tensor.shape)?;
    }
    writer.finish()
}

/// How the memory is shared out.
#[derive(Clone, Copy, Debug)]
struct Shares {
    pages: Bytes,
    threads: u64,
}

impl Shares {
    fn of(options: &Options, header_bytes: u64) -> Result<Self> {
        // As it was read, as it is written, and once more while it is made.
        let headers = 3 * header_bytes;
        let least_pages = LEAST_PAGES * PAGE.bytes();
        let least = headers + PIECE_BYTES + least_pages;
        let memory = options.memory.get();
        if memory < least {
            let what = format!("a memory of {} cannot export this model", options.memory);
            let remedy = format!("give at least {} bytes ({}) with --memory", least, Bytes::new(least));
            return Err(Error::new(ErrorKind::BudgetTooSmall, what).remedy(remedy));
        }
        let wanted = match options.threads {
            Some(threads) => u64::from(threads.get()).min(THREADS_MOST),
            None => std::thread::available_parallelism().map_or(1, |threads| threads.get() as u64),
        };
        // Each has buffers, and a piece in pages beside as much that is read meanwhile.
        let of_one = PIECE_BYTES + 2 * 4 * PIECE;
        let threads = wanted.min((memory - headers - least_pages) / of_one).max(1);
        Ok(Self { pages: Bytes::new(memory - headers - threads * PIECE_BYTES), threads })
    }
}

/// Whether a signal has asked to stop. What was written is then removed, as after an error.
fn stop_by_signals() -> Arc<AtomicBool> {
    let stopped = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // Where it cannot be caught, it ends the process, and the file beside stays: `.export-...`.
        drop(signal_hook::flag::register(signal, Arc::clone(&stopped)));
    }
    stopped
}

fn write_all(
    runtime: &Runtime,
    out: &mut Written,
    Layout { header, offsets, len, .. }: Layout,
    chosen: &[Chosen<'_>],
    tensors: &[Tensor],
    threads: u64,
    stopped: &AtomicBool,
) -> Result<()> {
    let bar = Bar::new("exporting", len);
    let mut lanes = Lanes::new(threads);
    out.write(&header)?;
    let mut at = header.len() as u64;
    drop(header);
    for ((one, tensor), offset) in chosen.iter().zip(tensors).zip(offsets.iter().chain([&len])) {
        pad(out, &mut at, *offset)?;
        // Pieces are whole blocks of both types.
        let (unit, types) = match one.types() {
            Some((from, to)) => (from.block_elements().max(to.block_elements()) as u64, Some((from, to))),
            None => (one.tensor.dtype.block_elements(), None),
        };
        let elements = one.tensor.elements();
        let units = tensor.reshape(&[elements / unit, unit])?;
        let step = match one.tensor.len {
            0 => continue,
            // Bytes that nothing is known of are as many as are converted at a time.
            len if types.is_none() => (lanes.elements() * 4 / (len / (elements / unit))).max(1),
            _ => lanes.elements() / unit,
        };
        for first in (0..elements / unit).step_by(step as usize) {
            if stopped.load(Ordering::Relaxed) {
                let what = "a signal ended the export: nothing was written";
                return Err(Error::new(ErrorKind::Io, what).remedy("start it again"));
            }
            let pinned = runtime.pin(&units.rows(first..(first + step).min(elements / unit))?).wait()?;
            match types {
                None => {
                    out.write(pinned.bytes())?;
                    at += pinned.bytes().len() as u64;
                }
                Some((from, to)) => {
                    let parts = lanes.convert(from, to, pinned.bytes());
                    for part in parts.map_err(|refused| not_finite(one, first * unit, refused))? {
                        out.write(part)?;
                        at += part.len() as u64;
                    }
                }
            }
            bar.at(at);
        }
    }
    pad(out, &mut at, len)
}

/// Writes zeros up to the offset `to`.
fn pad(out: &mut Written, at: &mut u64, to: u64) -> Result<()> {
    let zeros = [0; 4096];
    while *at < to {
        let some = (to - *at).min(zeros.len() as u64);
        out.write(&zeros[..some as usize])?;
        *at += some;
    }
    Ok(())
}

fn not_finite(one: &Chosen<'_>, before: u64, Refused { at, value }: Refused) -> Error {
    let (name, at) = (&one.tensor.name, before + at);
    let error = |what: String| Error::new(ErrorKind::InvalidArgument, what);
    if value.is_finite() {
        error(format!("element {at} of tensor {name:?} is {value}, which is too large for {}", one.to))
            .remedy("export to BF16 or F32")
    } else {
        error(format!("element {at} of tensor {name:?} is {value}, which is no number"))
            .remedy("the model is damaged: fetch it again, or convert it again from its source")
    }
}
