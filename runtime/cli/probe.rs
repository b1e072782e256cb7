//! `outcore probe`: measures the ceilings that ratios are compared with, through the runtime's own store.

use std::path::{Path, PathBuf};

use clap::Args;
use outcore::machine::{self, Machine};
use outcore::store::{FileProbe, QueueDepth, probe_file};
use outcore::{Bytes, Error, ErrorKind, IoBackend, PageSize, Result};
use serde::Serialize;

use super::arguments::page_size;
use super::output::{Side, Table, microseconds, percent, rate, size};
use super::printed::Report;
use super::trial::TrialFile;

#[derive(Debug, Args)]
pub struct Options {
    /// The file to read; it is not changed
    #[arg(long, value_name = "FILE", required_unless_present = "size", conflicts_with_all = ["size", "dir"])]
    file: Option<PathBuf>,
    /// Make a temporary file of this size instead, such as 1GiB
    #[arg(long, value_name = "SIZE")]
    size: Option<Bytes>,
    /// Where to make it
    #[arg(long, value_name = "DIR", requires = "size", default_value = ".")]
    dir: PathBuf,
    /// Size of a page: a power of two from 4KiB to 1GiB
    #[arg(long, value_name = "SIZE", value_parser = page_size, default_value = "2MiB")]
    page_size: PageSize,
    /// How to read: auto, io_uring, threads or buffered
    #[arg(long, value_name = "BACKEND", default_value = "auto")]
    io: IoBackend,
    /// Read at most this much for each figure
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    budget: Bytes,
    /// One JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Serialize)]
pub struct ProbeReport {
    file: String,
    file_bytes: u64,
    filesystem: String,
    direct: bool,
    direct_refused: Option<String>,
    memory_alignment: Option<u64>,
    offset_alignment: Option<u64>,
    io: String,
    kernel: String,
    cpus: usize,
    page_bytes: u64,
    /// Latency of reading one 4 KiB block with nothing else in flight.
    latency_4k: Option<LatencyReport>,
    /// Mean time of one page read with nothing else in flight.
    page_read_us: Option<f64>,
    points: Vec<PointReport>,
    /// The fastest rate among the points whose blocks are one page.
    page_read_bytes_per_second: Option<u64>,
    memcpy_bytes_per_second: u64,
}

#[derive(Debug, Serialize)]
pub struct LatencyReport {
    median_us: f64,
    p99_us: f64,
    samples: u32,
}

#[derive(Debug, Serialize)]
struct PointReport {
    block_bytes: u64,
    depth: u32,
    bytes: u64,
    seconds: f64,
    bytes_per_second: u64,
    cpu_share: f64,
}

impl LatencyReport {
    pub fn of(probe: &FileProbe) -> Option<Self> {
        probe.page_latency.map(|latency| Self {
            median_us: microseconds(latency.median),
            p99_us: microseconds(latency.p99),
            samples: latency.samples,
        })
    }

    pub fn short(&self) -> String {
        format!("4 KiB in {:.0} us", self.median_us)
    }
}

/// The smallest block that is measured.
const LEAST: Bytes = Bytes::kib(64);

pub fn run(options: &Options) -> Result<ProbeReport> {
    let page = options.page_size.bytes();
    let (path, name, trial);
    match (&options.file, options.size) {
        (Some(file), _) => {
            if file.is_dir() {
                return Err(Error::new(ErrorKind::InvalidArgument, format!("{} is a directory", file.display()))
                    .remedy("give a file with --file, or --size with --dir to make one there"));
            }
            (path, name) = (file.clone(), file.display().to_string());
        }
        (None, size) => {
            let size = size.unwrap_or_default();
            if size < LEAST {
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    format!("--size {size} cannot be measured: no block of {LEAST} fits"),
                )
                .remedy("give at least that; 1GiB gives steady figures"));
            }
            trial = TrialFile::create(&options.dir, size, None)?;
            (path, name) = (trial.path(), format!("temporary file in {}", options.dir.display()));
        }
    }
    let depths = [1, 4, 16, 32].into_iter().map(QueueDepth::new).collect::<Result<Vec<_>>>()?;
    let mut blocks: Vec<u64> = vec![LEAST.get(), 256 << 10, 1 << 20, 4 << 20, page];
    blocks.sort_unstable();
    blocks.dedup();
    let blocks: Vec<Bytes> = blocks.into_iter().map(Bytes::new).collect();
    let probe = measure(&path, options.io, &blocks, &depths, options.budget)?;
    let points: Vec<PointReport> = probe
        .points
        .iter()
        .map(|point| PointReport {
            block_bytes: point.block.get(),
            depth: point.depth.get(),
            bytes: point.bytes.get(),
            seconds: point.elapsed.as_secs_f64(),
            bytes_per_second: point.bytes_per_second() as u64,
            cpu_share: point.cpu.as_secs_f64() / point.elapsed.as_secs_f64().max(1e-9),
        })
        .collect();
    let of_page = || points.iter().filter(|point| point.block_bytes == page);
    let machine = Machine::detect()?;
    Ok(ProbeReport {
        file: name,
        file_bytes: probe.size.get(),
        direct: probe.direct.is_ok(),
        direct_refused: probe.direct.as_ref().err().map(ToString::to_string),
        memory_alignment: probe.alignment.map(|alignment| alignment.memory.get()),
        offset_alignment: probe.alignment.map(|alignment| alignment.offset.get()),
        io: probe.backend.to_string(),
        kernel: machine.kernel,
        cpus: machine.cpus,
        page_bytes: page,
        latency_4k: LatencyReport::of(&probe),
        page_read_us: of_page()
            .find(|point| point.depth == 1)
            .map(|point| (point.seconds * 1e7 / (point.bytes / page).max(1) as f64).round() / 10.0),
        page_read_bytes_per_second: of_page().map(|point| point.bytes_per_second).max(),
        points,
        memcpy_bytes_per_second: machine::memcpy_bandwidth(Bytes::mib(128)).get(),
        filesystem: probe.filesystem,
    })
}

fn measure(path: &Path, io: IoBackend, blocks: &[Bytes], depths: &[QueueDepth], budget: Bytes) -> Result<FileProbe> {
    let probe = probe_file(path, io, blocks, depths, budget).map_err(|error| match error.kind() {
        ErrorKind::NotFound => error.remedy("check the path given with --file"),
        ErrorKind::PermissionDenied => error.remedy("give this user read permission on the file and its folders"),
        _ => error,
    })?;
    if probe.points.is_empty() {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("{} of {} cannot be measured: no block of {LEAST} fits", probe.size, path.display()),
        )
        .remedy("give a larger file and budget; 1GiB gives steady figures"));
    }
    Ok(probe)
}

impl Report for ProbeReport {
    fn text(&self) -> String {
        let mut facts = Table::pairs();
        facts.pair("file", format!("{}, {} on {}", self.file, size(self.file_bytes), self.filesystem));
        facts.pair("backend", format!("{}{}", self.io, if self.direct { ", O_DIRECT" } else { ", page cache" }));
        if let Some(latency) = &self.latency_4k {
            let text =
                format!("{:.0} us median, {:.0} us p99 ({} reads)", latency.median_us, latency.p99_us, latency.samples);
            facts.pair("4 KiB alone", text);
        }
        if let Some(time) = self.page_read_us {
            facts.pair("a page alone", format!("{time:.0} us for {}", size(self.page_bytes)));
        }
        if let Some(best) = self.page_read_bytes_per_second {
            facts.pair("pages", format!("{} at best", rate(best)));
        }
        facts.pair("memcpy", format!("{}, one thread", rate(self.memcpy_bytes_per_second)));
        let right = Side::Right;
        let head = [("block", right), ("depth", right), ("read", right), ("bandwidth", right), ("of a core", right)];
        let mut points = Table::new(&head);
        for point in &self.points {
            points.row([
                size(point.block_bytes),
                point.depth.to_string(),
                size(point.bytes),
                rate(point.bytes_per_second),
                percent((point.cpu_share * 1000.0) as u64, 1000),
            ]);
        }
        format!("{}\n{}", facts.text(), points.text())
    }
}
