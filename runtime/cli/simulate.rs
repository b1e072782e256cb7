//! `outcore simulate`: forecasts how long passes over a model take on a machine that is only described, or on this one.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use outcore::{Bytes, DType, Error, ErrorKind, Lookahead, PageSize, Result, format};
use outcore_lab::planning::Shape;
use outcore_lab::residency::PagedFile;
use outcore_lab::sim::{
    self, AnyPolicy, ClassBytes, Even, Flow, MachineModel, Recorded, Settings, Simulated, TensorClass, Workload,
};
use serde::Serialize;

use super::arguments::page_size;
use super::here::{self, Here, Source};
use super::named;
use super::output::{Side, Table, digits, percent, printable, size};
use super::printed::Report;

/// The options of `outcore simulate`.
#[derive(Debug, Args)]
pub struct Options {
    /// A GGUF or safetensors model: a file, one file of a split model, an index.json, or a folder; only headers are
    /// read. Or the name of a well-known model, such as llama-3.3-70b
    #[arg(value_name = "MODEL", required_unless_present = "params", conflicts_with_all = ["params", "layers"])]
    model: Option<PathBuf>,
    /// In place of a model: the number of parameters in equal layers, such as 70B or 1T
    #[arg(long, value_name = "N", value_parser = params)]
    params: Option<u64>,
    /// With --params or a name: the type of the weights, such as bf16 (the default), q8_0 or q4_k
    #[arg(long, value_name = "TYPE")]
    dtype: Option<DType>,
    /// With --params: the number of layers, from 1 to 16777216
    #[arg(long, value_name = "N", default_value_t = 80)]
    layers: u32,
    /// With --params: the number of experts of each layer
    #[arg(long, value_name = "N", requires = "params")]
    experts: Option<u32>,
    /// How many experts of a layer a pass uses. Default: the number in a GGUF model's metadata, or of the model of that
    /// name, else all
    #[arg(long, value_name = "N")]
    experts_used: Option<u32>,
    /// The machine: h200, rtx4090, gh200, dgx-spark, laptop, dgx-h200, or a file that describes one
    /// (docs/simulator.md). Default: this machine, as measured now
    #[arg(long, value_name = "NAME|FILE")]
    machine: Option<String>,
    /// The policy, which decides which pages stay: one of those of `outcore policies`
    #[arg(long, value_name = "NAME", default_value = "plan")]
    policy: AnyPolicy,
    /// Memory for pages on each device. Default: 90 % of the device's memory
    #[arg(long, value_name = "SIZE")]
    device_budget: Option<Bytes>,
    /// Memory for pages on the host, for all devices together
    #[arg(long, value_name = "SIZE", default_value = "0")]
    host_budget: Bytes,
    /// Size of a page: a power of two from 4KiB to 1GiB
    #[arg(long, value_name = "SIZE", value_parser = page_size, default_value = "2MiB")]
    page_size: PageSize,
    /// How far ahead of use fills start: auto, off, or a size
    #[arg(long, value_name = "SIZE", default_value = "auto")]
    lookahead: Lookahead,
    /// The most of a tensor that is pinned at once. Default: as `generate` does, 8MiB but at most a 32nd of the budget
    #[arg(long, value_name = "SIZE")]
    step: Option<Bytes>,
    /// How many steps ahead of the computed one are pinned. Default: 1 where there is a link, else 0
    #[arg(long, value_name = "N")]
    steps_ahead: Option<u32>,
    /// The number of passes, from 1 up
    #[arg(long, value_name = "N", value_parser = passes, default_value = "4")]
    passes: NonZeroU32,
    /// Seed of everything that is drawn by chance: the same seed gives the same numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// With --json: also record lanes and residency over time, for `outcore report`: at most some 2 MB, however long
    /// the run
    #[arg(long, requires = "json")]
    timeline: bool,
    /// One JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

fn wrong(message: String, remedy: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, message).remedy(remedy)
}

fn passes(text: &str) -> Result<NonZeroU32> {
    match u32::from_str(text).map(NonZeroU32::new) {
        Ok(Some(passes)) => Ok(passes),
        Ok(None) => Err(wrong("0 passes simulate nothing".to_owned(), "give at least 1")),
        Err(_) => Err(wrong(format!("{text:?} is no number of passes"), "give a whole number from 1 to 4294967295")),
    }
}

fn params(text: &str) -> Result<u64> {
    let bad = || wrong(format!("{text:?} is no number of parameters"), "give a number and K, M, B or T, such as 70B");
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let scale = match unit.to_ascii_uppercase().as_str() {
        "" => 1.0,
        "K" => 1e3,
        "M" => 1e6,
        "B" => 1e9,
        "T" => 1e12,
        _ => return Err(bad()),
    };
    let params = number.parse::<f64>().map_err(|_| bad())? * scale;
    // Even with 16 bytes each, the bytes of 10^18 parameters fit 64 bits.
    if (1.0..=1e18).contains(&params) { Ok(params as u64) } else { Err(bad()) }
}

#[derive(Debug, Serialize)]
pub struct Found {
    model: String,
    machine: String,
    /// Where this machine's numbers come from; none of a machine that is only described.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    sources: Vec<Source>,
    devices: NonZeroU32,
    policy: &'static str,
    page_bytes: u64,
    device_budget_bytes: u64,
    host_budget_bytes: u64,
    seed: u64,
    model_bytes: u64,
    pages: u64,
    frames: u32,
    host_frames: u32,
    unit_pages: u32,
    first_pass_s: f64,
    median_pass_s: f64,
    passes_s: Vec<f64>,
    /// Of one sequence, which gets a token by each pass: by the median pass.
    tokens_per_s: f64,
    total_s: f64,
    hit_ratio: f64,
    stall_s: f64,
    stalls: Vec<Stall>,
    disk_read: Flow,
    disk_written: Flow,
    link_in: Flow,
    link_out: Flow,
    compute: Flow,
    uses: u64,
    hits: u64,
    faults: u64,
    evictions: u64,
    demotions: u64,
    events: u64,
    /// Bytes of the model's files by class of tensors.
    weights: Vec<ClassBytes>,
    /// Bytes of last pages beyond the files' ends, over all files and devices.
    tail_bytes: u64,
    ceiling: Ceilings,
    /// Of the first device.
    #[serde(skip_serializing_if = "Option::is_none")]
    timeline: Option<Recorded>,
}

/// What the machine can move, summed over all devices.
#[derive(Debug, Serialize)]
struct Ceilings {
    disk_read_bytes_per_second: u64,
    disk_write_bytes_per_second: u64,
    /// In each direction. `None` where device memory is host memory.
    link_bytes_per_second: Option<u64>,
    compute_bytes_per_second: u64,
}

#[derive(Debug, Serialize)]
struct Stall {
    cause: &'static str,
    tier: &'static str,
    count: u64,
    seconds: f64,
}

/// The model to simulate.
struct Model {
    name: String,
    workload: Workload,
    weights: Vec<ClassBytes>,
    /// The files' names, by segment.
    files: Vec<String>,
    /// The file on whose disk most of it is.
    file: Option<PathBuf>,
}

impl Model {
    /// Returns the files of one device, which has an equal part of each.
    fn files_of_a_device(&self, machine: &MachineModel, page: PageSize) -> Vec<PagedFile> {
        let part = |(name, (_, len)): (&String, &(_, u64))| {
            let bytes = len.div_ceil(u64::from(machine.devices.get()));
            PagedFile { name: name.clone(), bytes, pages: page.pages_for(bytes).max(1) }
        };
        self.files.iter().zip(self.workload.segments()).map(part).collect()
    }
}

pub fn run(options: &Options) -> Result<Found> {
    let named = options.machine.as_deref().map(MachineModel::find).transpose()?;
    let model = model(options)?;
    let (machine, sources) = match named {
        Some(machine) => (machine, Vec::new()),
        None => {
            let remedy = "name a machine with --machine, or run this in a folder on a disk";
            let here = Here::measure(model.file.as_deref(), None, remedy)?;
            let sources = here.found();
            (here.machine, sources)
        }
    };
    let device_budget = options.device_budget.unwrap_or(Bytes::new(machine.device_memory.get() / 10 * 9));
    let step_pages = match options.step {
        None => None,
        Some(step) => {
            let pages = options.page_size.pages_for(step.get());
            let pages = u32::try_from(pages).ok().and_then(NonZeroU32::new);
            Some(pages.ok_or_else(|| wrong(format!("a step cannot be {step}"), "give from 1 to 2^32 - 1 pages"))?)
        }
    };
    let settings = Settings {
        policy: options.policy,
        page_size: options.page_size,
        lookahead: options.lookahead,
        step_pages,
        steps_ahead: options.steps_ahead.unwrap_or(u32::from(machine.link.is_some())),
        passes: options.passes,
        seed: options.seed,
        timeline: options.timeline,
        ..Settings::new(device_budget, options.host_budget)
    };
    let done = sim::simulate(&model.workload, &machine, &settings)?;
    Ok(Found { sources, ..found(options, &machine, &settings, model, done) })
}

fn model(options: &Options) -> Result<Model> {
    if let Some(path) = &options.model {
        if let Some(shape) = named::shape(path, options.dtype)? {
            return named_model(path.display().to_string(), shape, options);
        }
        let header = format::open(path)?;
        let name = |path: &Path| path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        return Ok(Model {
            name: path.display().to_string(),
            workload: Workload::of_model(&header, options.experts_used)?,
            weights: ClassBytes::of_model(&header),
            files: header.files.iter().map(|file| name(&file.path)).collect(),
            file: here::largest(&header),
        });
    }
    let Options { params, layers, .. } = *options;
    let params = params.unwrap_or_default();
    let dtype = options.dtype.unwrap_or(DType::BF16);
    if let (Some(used), None) = (options.experts_used, options.experts) {
        let what = format!("--experts-used {used} has no effect without --experts");
        return Err(wrong(what, "give --experts too, how many each layer has"));
    }
    let experts = options.experts.map(|experts| (experts, options.experts_used.unwrap_or(experts)));
    let workload = Workload::even(Even { params, dtype, layers, experts })?;
    let class = if experts.is_some() { TensorClass::Experts } else { TensorClass::Other };
    Ok(Model {
        name: format!("{params} parameters of {} in {layers} layers", dtype.name()),
        weights: vec![ClassBytes::new(class, workload.bytes())],
        files: vec!["layers".to_owned()],
        file: None,
        workload,
    })
}

/// A model that is known by name.
fn named_model(name: String, mut shape: Shape, options: &Options) -> Result<Model> {
    if let Some(used) = options.experts_used {
        let Some(experts) = &mut shape.experts else {
            let what = format!("--experts-used {used} has no effect: {name} has no experts");
            return Err(wrong(what, "leave it out"));
        };
        if !(1..=experts.count).contains(&u64::from(used)) {
            let what = format!("a pass cannot use {used} of {} experts", experts.count);
            return Err(wrong(what, "give from 1 to as many as there are"));
        }
        experts.active = u64::from(used);
    }
    let workload = shape.workload()?;
    let of_experts = shape.experts.map_or(0, |experts| experts.weights.get());
    let classes = [(TensorClass::Experts, of_experts), (TensorClass::Other, workload.bytes() - of_experts)];
    let weights = classes.into_iter().filter(|(_, bytes)| *bytes > 0);
    Ok(Model {
        name: format!("{name} in {}", shape.dtype),
        weights: weights.map(|(class, bytes)| ClassBytes::new(class, bytes)).collect(),
        files: vec![name],
        file: None,
        workload,
    })
}

fn found(options: &Options, machine: &MachineModel, settings: &Settings, model: Model, mut done: Simulated) -> Found {
    let files = model.files_of_a_device(machine, settings.page_size);
    let mut timeline = done.recorded.take();
    if let Some(recorded) = &mut timeline {
        recorded.residency.files = files;
    }
    let of_all = |rate: Bytes| rate.get().saturating_mul(u64::from(machine.devices.get()));
    let stalls = done.stalls.iter().flat_map(|stall| {
        stall.tiers.iter().filter(|tier| tier.count > 0).map(|tier| Stall {
            cause: stall.name,
            tier: tier.tier.name(),
            count: tier.count,
            seconds: tier.time.as_secs_f64(),
        })
    });
    let stalls: Vec<Stall> = stalls.collect();
    Found {
        model_bytes: model.workload.bytes(),
        model: model.name,
        machine: machine.name.clone(),
        sources: Vec::new(),
        devices: machine.devices,
        policy: settings.policy.name(),
        page_bytes: settings.page_size.bytes(),
        device_budget_bytes: settings.device_budget.get(),
        host_budget_bytes: settings.host_budget.get(),
        seed: options.seed,
        pages: done.pages,
        frames: done.frames,
        host_frames: done.host_frames,
        unit_pages: done.unit_pages,
        first_pass_s: done.first().as_secs_f64(),
        median_pass_s: done.median().as_secs_f64(),
        passes_s: done.passes.iter().map(std::time::Duration::as_secs_f64).collect(),
        tokens_per_s: 1.0 / done.median().as_secs_f64().max(1e-9),
        total_s: done.time.as_secs_f64(),
        hit_ratio: done.hit_ratio(),
        stall_s: done.stalls.iter().map(|stall| stall.time.as_secs_f64()).sum(),
        stalls,
        disk_read: done.disk_read,
        disk_written: done.disk_written,
        link_in: done.link_in,
        link_out: done.link_out,
        compute: done.compute,
        uses: done.pager.uses,
        hits: done.pager.hits,
        faults: done.pager.faults,
        evictions: done.pager.evictions,
        demotions: done.pager.demotions,
        events: done.events,
        weights: model.weights,
        tail_bytes: done.tails.get(),
        ceiling: Ceilings {
            disk_read_bytes_per_second: machine.disk.read.get(),
            disk_write_bytes_per_second: machine.disk.write.get(),
            link_bytes_per_second: machine.link.map(|link| of_all(link.bandwidth())),
            compute_bytes_per_second: of_all(machine.compute.bandwidth),
        },
        timeline,
    }
}

impl Report for Found {
    fn text(&self) -> String {
        let seconds = |s: f64| format!("{s:.6} s");
        let mut text = format!("{} on {}, simulated\n", printable(&self.model), printable(&self.machine));
        let mut about = Table::pairs();
        about.pair("model", format!("{}, {} pages of {}", size(self.model_bytes), self.pages, size(self.page_bytes)));
        about.pair("devices", format!("{}, each with {} frames", self.devices, self.frames));
        for source in &self.sources {
            about.pair(source.what, printable(&source.from));
        }
        about.pair("host tiers", format!("{} frames each", self.host_frames));
        about.pair("policy", self.policy);
        about.pair("largest step", format!("{} pages of a device", self.unit_pages));
        about.pair("first pass", seconds(self.first_pass_s));
        if self.passes_s.len() > 1 {
            about.pair("median of the others", seconds(self.median_pass_s));
        }
        about.pair("passes", self.passes_s.len().to_string());
        about.pair("speed", format!("{} tok/s: a pass gives one sequence a token", digits(self.tokens_per_s)));
        about.pair("hits", format!("{} of {} uses", percent(self.hits, self.uses), self.uses));
        let of_all = match self.devices.get() {
            1 => String::new(),
            devices => format!(" on each of {devices} devices, whose stalls are added"),
        };
        about.pair("stalled", format!("{} in all, of {}{of_all}", seconds(self.stall_s), seconds(self.total_s)));
        text += &about.text();
        let mut flows = Table::new(&[("link", Side::Left), ("bytes", Side::Right), ("busy", Side::Right)]);
        for (name, flow) in [
            ("disk, read", &self.disk_read),
            ("disk, written", &self.disk_written),
            ("host to device", &self.link_in),
            ("device to host", &self.link_out),
            ("compute", &self.compute),
        ] {
            let share = format!("{:.1} %", 100.0 * flow.utilisation);
            flows.row([name.to_owned(), size(flow.bytes.get()), share]);
        }
        text += "\n";
        text += &flows.text();
        if !self.stalls.is_empty() {
            let head = [
                ("stalled by", Side::Left),
                ("bytes were in", Side::Left),
                ("times", Side::Right),
                ("time", Side::Right),
            ];
            let mut table = Table::new(&head);
            for stall in &self.stalls {
                let row =
                    [stall.cause.to_owned(), stall.tier.to_owned(), stall.count.to_string(), seconds(stall.seconds)];
                table.row(row);
            }
            text += "\n";
            text += &table.text();
        }
        text
    }
}
