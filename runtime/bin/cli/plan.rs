//! `outcore plan`: what a job needs of memory, what of it would move, how fast that can be, and what would help. Reads
//! headers only.

use std::path::PathBuf;

use clap::Args;
use outcore::format::{self, Metadata};
use outcore::planning::{
    self, Bandwidth, Checkpointing, Forecast, Given, Job, KvType, Memory, Optimizer, Outcome, Parameters, Resources,
    Run, Shape, Target, Work,
};
use outcore::{Bytes, DType, Error, ErrorKind, Result};
use serde::Serialize;

use super::Report;
use super::config::config_beside;
use super::output::{Side, Table, percent, printable, rate, size};

/// What `outcore plan` takes.
#[derive(Debug, Args)]
pub struct Options {
    /// A GGUF or safetensors file, one file of a split model, an index.json, or a folder with one of them; safetensors
    /// need their config.json beside them
    #[arg(value_name = "MODEL", required_unless_present = "params")]
    model: Option<PathBuf>,
    /// Without a file: the model's number of parameters, such as 70B
    #[arg(long, value_name = "N", conflicts_with = "model", allow_hyphen_values = true)]
    params: Option<Parameters>,
    /// Without a file: the type of the weights, such as bf16 or q8_0
    #[arg(long, value_name = "TYPE", conflicts_with = "model", requires = "params", default_value = "bf16")]
    dtype: DType,
    /// Without a file: layers. This and what follows is estimated where it is left out
    #[arg(long, value_name = "N", conflicts_with = "model", requires = "params", value_parser = count, allow_hyphen_values = true)]
    layers: Option<u64>,
    /// Without a file: elements of the residual stream
    #[arg(long, value_name = "N", conflicts_with = "model", requires = "params", value_parser = count, allow_hyphen_values = true)]
    hidden: Option<u64>,
    /// Without a file: query heads
    #[arg(long, value_name = "N", conflicts_with = "model", requires = "params", value_parser = count, allow_hyphen_values = true)]
    heads: Option<u64>,
    /// Without a file: heads of keys and values
    #[arg(long, value_name = "N", conflicts_with = "model", requires = "params", value_parser = count, allow_hyphen_values = true)]
    kv_heads: Option<u64>,
    /// Without a file: elements of the feed-forward layer
    #[arg(long, value_name = "N", conflicts_with = "model", requires = "params", value_parser = count, allow_hyphen_values = true)]
    ffn: Option<u64>,
    /// Without a file: token ids
    #[arg(long, value_name = "N", conflicts_with = "model", requires = "params", value_parser = count, allow_hyphen_values = true)]
    vocab: Option<u64>,
    /// Without a file: the feed-forward layer has a gate (SwiGLU), as Llama's
    #[arg(long, conflicts_with = "model", requires = "params")]
    gated: bool,
    /// The device's memory, such as 24GiB: a GPU's, or this process's where there is none
    #[arg(long, value_name = "SIZE", value_parser = some_memory, allow_hyphen_values = true)]
    device_memory: Bytes,
    /// The host's memory beside it; 0 for no host tier
    #[arg(long, value_name = "SIZE", default_value = "0", allow_hyphen_values = true)]
    host_memory: Bytes,
    /// What the disk reads, such as 2GB/s; `outcore probe` measures it
    #[arg(long, value_name = "BANDWIDTH", allow_hyphen_values = true)]
    disk: Bandwidth,
    /// What the link between host and GPU moves each way, such as 25GB/s; none where the device is the host
    #[arg(long, value_name = "BANDWIDTH", allow_hyphen_values = true)]
    link: Option<Bandwidth>,
    /// Time of a pass or a step with everything resident, such as 80ms; not known if left out
    #[arg(long, value_name = "TIME", value_parser = seconds, allow_hyphen_values = true)]
    compute: Option<f64>,
    /// Tokens of a sequence. Default: 4096, or what the model was made for if that is less
    #[arg(long, value_name = "N", value_parser = count, allow_hyphen_values = true)]
    context: Option<u64>,
    /// Sequences at a time
    #[arg(long, value_name = "N", value_parser = count, default_value = "1", allow_hyphen_values = true)]
    batch: u64,
    /// Generate text (the default)
    #[arg(long, conflicts_with = "train")]
    infer: bool,
    /// Train all weights
    #[arg(long)]
    train: bool,
    /// How keys and values are kept: f32, f16 or q8
    #[arg(long, value_name = "TYPE", default_value = "f16", conflicts_with = "train")]
    kv: KvType,
    /// What updates the weights: sgd, adam, adam-mixed or adam-8bit
    #[arg(long, value_name = "NAME", default_value = "adam-mixed", requires = "train")]
    optimizer: Optimizer,
    /// Which activations are computed again in the backward pass: none, selective (attention scores) or full (all but
    /// each layer's input)
    #[arg(long, value_name = "NAME", default_value = "none", requires = "train")]
    checkpoint: Checkpointing,
    /// What is to stay free, in percent of what is used
    #[arg(long, value_name = "PERCENT", default_value = "20", value_parser = clap::value_parser!(u64).range(..=1000))]
    headroom: u64,
    /// Tokens a second that are wanted, of all sequences together
    #[arg(long, value_name = "TOK/S", value_parser = tokens_per_second, allow_hyphen_values = true)]
    target: Option<f64>,
    /// One JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

fn wrong(what: String, remedy: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, what).remedy(remedy)
}

fn count(text: &str) -> Result<u64> {
    const MOST: u64 = 1 << 40;
    match text.trim().parse::<u64>() {
        Ok(n) if (1..=MOST).contains(&n) => Ok(n),
        Ok(n) => Err(wrong(format!("{n} is not from 1 to 2^40"), "give a number of that size")),
        Err(_) => {
            Err(wrong(format!("number {text:?} is not understood"), "give a whole number from 1 up, such as 4096"))
        }
    }
}

fn some_memory(text: &str) -> Result<Bytes> {
    match text.parse::<Bytes>()? {
        Bytes::ZERO => Err(wrong("a device of 0 bytes holds nothing".to_owned(), "give its memory, such as 24GiB")),
        memory => Ok(memory),
    }
}

fn positive(text: &str, scale: f64) -> Option<f64> {
    let n = text.trim().parse::<f64>().ok()? * scale;
    (n.is_finite() && n > 0.0).then_some(n)
}

fn seconds(text: &str) -> Result<f64> {
    let units = [("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];
    let found = units.into_iter().find_map(|(unit, scale)| Some((text.trim().strip_suffix(unit)?, scale)));
    found
        .and_then(|(number, scale)| positive(number, scale))
        .ok_or_else(|| wrong(format!("time {text:?} is not understood"), "give more than none, such as 80ms or 1.5s"))
}

fn tokens_per_second(text: &str) -> Result<f64> {
    positive(text, 1.0).ok_or_else(|| {
        wrong(format!("{text:?} tokens a second is not understood"), "give a number above 0, such as 10 or 0.5")
    })
}

/// What there is to say about a job.
#[derive(Debug, Serialize)]
pub struct Plan {
    /// The file; none if the model was described.
    model: Option<String>,
    format: Option<&'static str>,
    /// What was estimated or assumed.
    assumed: Vec<String>,
    shape: ShapeReport,
    job: JobReport,
    resources: ResourcesReport,
    memory: MemoryReport,
    /// `resident`, `streamed`, or `too small`.
    fit: &'static str,
    /// The least device memory in which the job runs at all.
    least_device_bytes: u64,
    /// What to give the runtime; none if the job does not run.
    recommended: Option<Recommended>,
    /// What a pass or a step moves; none if the job does not run.
    pass: Option<PassReport>,
    /// Single changes that would help, most first.
    changes: Vec<ChangeReport>,
    target: Option<TargetReport>,
}

#[derive(Debug, Serialize)]
struct ShapeReport {
    parameters: u64,
    dtype: &'static str,
    layers: u64,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    key_dim: u64,
    value_dim: u64,
    ffn: u64,
    gated: bool,
    vocab: u64,
}

#[derive(Debug, Serialize)]
struct JobReport {
    work: &'static str,
    context: u64,
    batch: u64,
    kv: Option<&'static str>,
    optimizer: Option<&'static str>,
    checkpointing: Option<&'static str>,
}

#[derive(Debug, Serialize)]
struct ResourcesReport {
    device_bytes: u64,
    host_bytes: u64,
    disk_bytes_per_second: u64,
    link_bytes_per_second: Option<u64>,
    compute_s: Option<f64>,
}

#[derive(Debug, Serialize)]
struct MemoryReport {
    weights_bytes: u64,
    kv_bytes: u64,
    activations_bytes: u64,
    gradients_bytes: u64,
    optimizer_bytes: u64,
    scratch_bytes: u64,
    headroom_bytes: u64,
    total_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Recommended {
    device_budget_bytes: u64,
    host_budget_bytes: u64,
    page_bytes: u64,
    lookahead_bytes: u64,
    policy: &'static str,
    scratch_file_bytes: u64,
}

#[derive(Debug, Serialize)]
struct PassReport {
    /// What is paged and used in a pass.
    paged_bytes: u64,
    kv_paged: bool,
    streamed_bytes: u64,
    in_host_bytes: u64,
    filled_bytes: u64,
    copied_down_bytes: u64,
    disk_read_bytes: u64,
    disk_written_bytes: u64,
    compute_s: Option<f64>,
    link_s: Option<f64>,
    disk_s: f64,
    /// The longest of these; none if nothing moves and computing is not known.
    pass_s: Option<f64>,
    bottleneck: Option<&'static str>,
    /// What takes more than half as long: a pass then takes longer than the longest.
    beside: Option<&'static str>,
    tokens: u64,
    /// At most, if computing is not known.
    tokens_per_s: Option<f64>,
}

#[derive(Debug, Serialize)]
struct ChangeReport {
    change: String,
    /// Tokens a second then over now; none if the job does not run now, or nothing moves then.
    speedup: Option<f64>,
    tokens_per_s: Option<f64>,
    fit: &'static str,
}

#[derive(Debug, Serialize)]
struct TargetReport {
    tokens_per_s: f64,
    /// None if no move stands in its way and computing is not known.
    reached: Option<bool>,
    ways: Vec<ChangeReport>,
}

fn fit(run: Option<&Run>) -> &'static str {
    match run {
        None => "too small",
        Some(run) if run.is_resident() => "resident",
        Some(_) => "streamed",
    }
}

impl From<&Outcome> for ChangeReport {
    fn from(outcome: &Outcome) -> Self {
        Self {
            change: outcome.change.to_string(),
            speedup: outcome.speedup,
            tokens_per_s: outcome.run.tokens_per_second(),
            fit: fit(Some(&outcome.run)),
        }
    }
}

const CONTEXT: u64 = 4096;

/// Reads the header, if there is a file, and does the sums.
pub fn run(options: &Options) -> Result<Plan> {
    let (mut shape, format) = shape(options)?;
    let context = match (options.context, shape.context) {
        (Some(asked), made_for) => {
            if let Some(made_for) = made_for.filter(|made_for| asked > *made_for) {
                shape.assumed.push(format!("a context of {asked} is more than the {made_for} the model was made for"));
            }
            asked
        }
        (None, made_for) => {
            let context = made_for.filter(|n| *n > 0).unwrap_or(CONTEXT).min(CONTEXT);
            shape.assumed.push(format!("context: {context} (--context)"));
            context
        }
    };
    let work = if options.train {
        Work::Train { optimizer: options.optimizer, checkpointing: options.checkpoint }
    } else {
        Work::Infer { kv: options.kv }
    };
    let job = Job { shape, work, context, batch: options.batch, headroom_percent: options.headroom };
    let resources = Resources {
        device: options.device_memory,
        host: options.host_memory,
        disk: options.disk,
        link: options.link,
        compute: options.compute,
    };
    let forecast = planning::forecast(&job, &resources)?;
    let changes = planning::advice(&job, &resources, &forecast)?;
    let target = options.target.map(|wanted| planning::target(&job, &resources, &forecast, wanted)).transpose()?;
    let model = options.model.as_ref().map(|path| path.display().to_string());
    Ok(report(model, format, &job, &resources, &forecast, &changes, target.as_ref()))
}

fn shape(options: &Options) -> Result<(Shape, Option<&'static str>)> {
    if let Some(parameters) = options.params {
        let given = Given {
            parameters,
            dtype: options.dtype,
            layers: options.layers,
            hidden: options.hidden,
            heads: options.heads,
            kv_heads: options.kv_heads,
            ffn: options.ffn,
            vocab: options.vocab,
            gated: options.gated,
        };
        return Ok((Shape::estimate(&given)?, None));
    }
    let path = options.model.clone().unwrap_or_default();
    let header = format::open(&path)?;
    let (config, format) = match (&header.metadata, header.files.first()) {
        (Metadata::Safetensors(_), Some(file)) => (Some(config_beside(&file.path)?), "safetensors"),
        _ => (None, "GGUF"),
    };
    let shape = Shape::of(&header, config.as_deref()).map_err(|error| error.context(path.display()))?;
    Ok((shape, Some(format)))
}

fn report(
    model: Option<String>,
    format: Option<&'static str>,
    job: &Job,
    resources: &Resources,
    forecast: &Forecast,
    changes: &[Outcome],
    target: Option<&Target>,
) -> Plan {
    let shape = &job.shape;
    let run = forecast.run.as_ref();
    Plan {
        model,
        format,
        assumed: shape.assumed.clone(),
        shape: ShapeReport {
            parameters: shape.parameters,
            dtype: shape.dtype.name(),
            layers: shape.layers,
            hidden: shape.hidden,
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            key_dim: shape.key_dim,
            value_dim: shape.value_dim,
            ffn: shape.ffn,
            gated: shape.gated,
            vocab: shape.vocab,
        },
        job: match job.work {
            Work::Train { optimizer, checkpointing } => JobReport {
                work: "train",
                context: job.context,
                batch: job.batch,
                kv: None,
                optimizer: Some(optimizer.name()),
                checkpointing: Some(checkpointing.name()),
            },
            Work::Infer { kv } => JobReport {
                work: "infer",
                context: job.context,
                batch: job.batch,
                kv: Some(kv.name()),
                optimizer: None,
                checkpointing: None,
            },
            _ => JobReport {
                work: "other",
                context: job.context,
                batch: job.batch,
                kv: None,
                optimizer: None,
                checkpointing: None,
            },
        },
        resources: ResourcesReport {
            device_bytes: resources.device.get(),
            host_bytes: resources.host.get(),
            disk_bytes_per_second: resources.disk.bytes_per_second().get(),
            link_bytes_per_second: resources.link.map(|link| link.bytes_per_second().get()),
            compute_s: resources.compute,
        },
        memory: MemoryReport::from(&forecast.memory),
        fit: fit(run),
        least_device_bytes: forecast.least_device.get(),
        recommended: run.map(|run| Recommended {
            device_budget_bytes: run.device_budget.get(),
            host_budget_bytes: run.host_budget.get(),
            page_bytes: run.page_size.bytes(),
            lookahead_bytes: run.lookahead.get(),
            policy: run.policy.name(),
            scratch_file_bytes: run.scratch_file.get(),
        }),
        pass: run.map(PassReport::from),
        changes: changes.iter().map(ChangeReport::from).collect(),
        target: target.map(|target| TargetReport {
            tokens_per_s: target.wanted,
            reached: target.reached,
            ways: target.ways.iter().map(ChangeReport::from).collect(),
        }),
    }
}

impl From<&Memory> for MemoryReport {
    fn from(memory: &Memory) -> Self {
        Self {
            weights_bytes: memory.weights.get(),
            kv_bytes: memory.kv.get(),
            activations_bytes: memory.activations.get(),
            gradients_bytes: memory.gradients.get(),
            optimizer_bytes: memory.optimizer.get(),
            scratch_bytes: memory.scratch.get(),
            headroom_bytes: memory.headroom.get(),
            total_bytes: memory.total.get(),
        }
    }
}

impl From<&Run> for PassReport {
    fn from(run: &Run) -> Self {
        Self {
            paged_bytes: run.paged.get(),
            kv_paged: run.kv_paged,
            streamed_bytes: run.streamed.get(),
            in_host_bytes: run.in_host.get(),
            filled_bytes: run.filled.get(),
            copied_down_bytes: run.copied_down.get(),
            disk_read_bytes: run.disk_read.get(),
            disk_written_bytes: run.disk_written.get(),
            compute_s: run.compute_s,
            link_s: run.link_s,
            disk_s: run.disk_s,
            pass_s: run.pass_s(),
            bottleneck: run.bottleneck().map(planning::Bottleneck::name),
            beside: run.beside().map(planning::Bottleneck::name),
            tokens: run.tokens,
            tokens_per_s: run.tokens_per_second(),
        }
    }
}

/// Three digits or so of a number that may be of any size.
fn digits(n: f64) -> String {
    match n {
        n if n >= 100.0 => format!("{n:.0}"),
        n if n >= 10.0 => format!("{n:.1}"),
        n if n >= 1.0 => format!("{n:.2}"),
        n if n >= 0.01 => format!("{n:.3}"),
        n => format!("{n:.1e}"),
    }
}

fn time(seconds: f64) -> String {
    if seconds >= 1.0 { format!("{} s", digits(seconds)) } else { format!("{} ms", digits(seconds * 1e3)) }
}

impl Plan {
    fn training(&self) -> bool {
        self.job.work == "train"
    }

    fn pass_name(&self) -> &'static str {
        if self.training() { "step" } else { "pass" }
    }

    fn facts(&self) -> Table {
        let mut facts = Table::pairs();
        let shape = &self.shape;
        let parameters =
            Parameters::new(shape.parameters).map_or_else(|_| shape.parameters.to_string(), |n| n.to_string());
        let what = match (&self.model, self.format) {
            (Some(model), Some(format)) => {
                format!("{}: {format}, {parameters} parameters, {}", printable(model), shape.dtype)
            }
            _ => format!("{parameters} parameters, {}", shape.dtype),
        };
        facts.pair("model", what);
        facts.pair(
            "shape",
            format!(
                "{} layers of {}, {} heads ({} of keys and values), feed-forward {}{}, vocabulary {}",
                shape.layers,
                shape.hidden,
                shape.heads,
                shape.kv_heads,
                shape.ffn,
                if shape.gated { " gated" } else { "" },
                shape.vocab
            ),
        );
        let job = &self.job;
        let how = match (job.kv, job.optimizer, job.checkpointing) {
            (Some(kv), ..) => format!("keys and values in {kv}"),
            (_, Some(optimizer), Some("none")) => format!("{optimizer}, no checkpointing"),
            (_, Some(optimizer), Some(checkpointing)) => format!("{optimizer}, {checkpointing} checkpointing"),
            _ => String::new(),
        };
        let work = if self.training() { "training" } else { "inference" };
        facts.pair("job", format!("{work}, context {}, batch {}, {how}", job.context, job.batch));
        let resources = &self.resources;
        let link = resources.link_bytes_per_second.map_or_else(String::new, |link| format!(", link {}", rate(link)));
        facts.pair(
            "resources",
            format!(
                "{} device memory, {} host memory, disk {}{link}",
                size(resources.device_bytes),
                size(resources.host_bytes),
                rate(resources.disk_bytes_per_second)
            ),
        );
        for (at, assumed) in self.assumed.iter().enumerate() {
            facts.pair(if at == 0 { "assumed" } else { "" }, assumed.as_str());
        }
        facts
    }

    fn classes(&self) -> Table {
        let mut classes = Table::new(&[("memory", Side::Left), ("size", Side::Right), ("share", Side::Right)]);
        let memory = &self.memory;
        for (class, bytes) in [
            ("weights", memory.weights_bytes),
            ("keys and values", memory.kv_bytes),
            ("activations", memory.activations_bytes),
            ("gradients", memory.gradients_bytes),
            ("optimizer", memory.optimizer_bytes),
            ("scratch", memory.scratch_bytes),
            ("headroom", memory.headroom_bytes),
            ("in all", memory.total_bytes),
        ] {
            if bytes > 0 {
                classes.row([class.to_owned(), size(bytes), percent(bytes, memory.total_bytes)]);
            }
        }
        classes
    }

    fn moves(&self, pass: &PassReport) -> Table {
        let title = format!("each {}", self.pass_name());
        let mut moves = Table::new(&[(title.as_str(), Side::Left), ("bytes", Side::Right), ("time", Side::Right)]);
        let unknown = || "not known".to_owned();
        let both = |up: u64, down: u64| {
            if down > 0 { format!("{} up, {} down", size(up), size(down)) } else { size(up) }
        };
        moves.row(["compute".to_owned(), String::new(), pass.compute_s.map_or_else(unknown, time)]);
        if let Some(seconds) = pass.link_s {
            moves.row(["link".to_owned(), both(pass.filled_bytes, pass.copied_down_bytes), time(seconds)]);
        }
        moves.row(["disk".to_owned(), both(pass.disk_read_bytes, pass.disk_written_bytes), time(pass.disk_s)]);
        moves
    }

    /// What there is to say of speed, in a line or two.
    fn speed(&self, pass: &PassReport) -> String {
        let name = self.pass_name();
        match (pass.pass_s, pass.tokens_per_s, pass.bottleneck) {
            (Some(seconds), Some(tokens), Some(bottleneck)) => {
                let at_most = if pass.compute_s.is_none() { "at most, " } else { "" };
                format!(
                    "{} a {name} of {} token{}: {at_most}{} tok/s, bound by {bottleneck}",
                    time(seconds),
                    pass.tokens,
                    if pass.tokens == 1 { "" } else { "s" },
                    digits(tokens)
                )
            }
            _ if self.fit == "resident" => "nothing moves: as fast as it computes (--compute)".to_owned(),
            _ => "what moves is between host and device only, as fast as memory copies".to_owned(),
        }
    }

    fn ways(title: &str, changes: &[ChangeReport]) -> Table {
        let mut table =
            Table::new(&[(title, Side::Left), ("speed", Side::Right), ("tok/s", Side::Right), ("", Side::Left)]);
        for change in changes {
            table.row([
                change.change.clone(),
                change.speedup.map_or_else(|| "-".to_owned(), |speedup| format!("{}x", digits(speedup))),
                change.tokens_per_s.map_or_else(|| "-".to_owned(), digits),
                if change.fit == "resident" { "nothing moves".to_owned() } else { String::new() },
            ]);
        }
        table
    }
}

impl Report for Plan {
    fn text(&self) -> String {
        let mut text = format!("{}\n{}\n", self.facts().text(), self.classes().text());
        let mut verdict = Table::pairs();
        let device = size(self.resources.device_bytes);
        match (&self.recommended, &self.pass) {
            (Some(recommended), Some(pass)) => {
                if self.fit == "resident" {
                    verdict.pair("fits", format!("yes, in {device} of device memory"));
                } else {
                    let places = format!(
                        "{} of the {} that a {} uses stream, {} of them from the host's memory",
                        size(pass.streamed_bytes),
                        size(pass.paged_bytes),
                        self.pass_name(),
                        size(pass.in_host_bytes)
                    );
                    verdict.pair("fits", format!("no: {places}"));
                }
                if pass.kv_paged {
                    verdict.pair("", "keys and values are paged too: there is no room for them");
                }
                verdict.pair("speed", self.speed(pass));
                if let Some(beside) = pass.beside {
                    verdict.pair(
                        "",
                        format!("expect less: {beside} takes more than half as long, and they slow each other down"),
                    );
                }
                verdict.pair(
                    "budgets",
                    format!(
                        "device {}, host {}, pages of {}, lookahead {}, policy {}",
                        size(recommended.device_budget_bytes),
                        size(recommended.host_budget_bytes),
                        size(recommended.page_bytes),
                        size(recommended.lookahead_bytes),
                        recommended.policy
                    ),
                );
                if recommended.scratch_file_bytes > 0 {
                    verdict.pair("scratch file", format!("{} on disk", size(recommended.scratch_file_bytes)));
                }
                text += &verdict.text();
                if self.fit != "resident" || pass.compute_s.is_some() {
                    text += &format!("\n{}", self.moves(pass).text());
                }
            }
            _ => {
                verdict.pair(
                    "fits",
                    format!(
                        "no, and does not run: what cannot be paged takes {} of device memory, and there are {device}",
                        size(self.least_device_bytes)
                    ),
                );
                text += &verdict.text();
            }
        }
        if !self.changes.is_empty() {
            text += &format!("\n{}", Self::ways("one change", &self.changes).text());
        }
        if let Some(target) = &self.target {
            let wanted = digits(target.tokens_per_s);
            text += &match target.reached {
                Some(true) => format!("\n  {wanted} tok/s are reached\n"),
                None => {
                    format!("\n  no move stands in the way of {wanted} tok/s; computing is not known (--compute)\n")
                }
                Some(false) if target.ways.is_empty() => {
                    format!("\n  {wanted} tok/s are not reached, and no single change would do it\n")
                }
                Some(false) => {
                    let title = format!("to reach {wanted} tok/s");
                    format!("\n{}", Self::ways(&title, &target.ways).text())
                }
            };
        }
        text
    }
}
